"""The labelling page in a real browser, and the closed loop: label, export, reward model, PPO, all by the
command line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxima.core.types import Prompt
from proxima.pages.label import Item, Store, export, make_label_app
from proxima.pages.web import Site, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SOURCE = Path(__file__).parents[2] / "src"
HOSTILE = (
    '<script>document.title="taken"</script><img src=x onerror="document.title=\'taken\'"><b '
    'id="taken">b</b> \u202e {{7*7}}'
)

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def open_browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "no-first-run",
        "disable-background-networking",
        "disable-dev-shm-usage",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


class Person:
    """What someone at the page sees and does."""

    store = None

    def __init__(self, driver, url):
        self.driver = driver
        driver.get_log("performance")
        driver.get(url)

    def script(self, code, *given):
        return self.driver.execute_script(code, *given)

    def wait(self, code, seconds=15):
        end = time.monotonic() + seconds
        while not (found := self.script(f"return {code}")):
            assert time.monotonic() < end, f"never came: {code}"
            time.sleep(0.02)
        return found

    def text(self, element):
        return self.script("return document.getElementById(arguments[0]).textContent", element)

    def enter(self, name):
        from selenium.webdriver.common.keys import Keys

        self.wait(
            "!document.getElementById('view-name').hidden && document.getElementById('intro').textContent"
        )
        self.driver.switch_to.active_element.send_keys(name + Keys.ENTER)
        self.wait("document.getElementById('view-name').hidden && !document.getElementById('tools').hidden")

    def view(self):
        return self.wait("[...document.querySelectorAll('main > section')].find((one) => !one.hidden)?.id")

    def item(self):
        """The item's number in the store, where it is known; the page has another."""
        number = int(self.wait("document.getElementById('view-item').dataset.item"))
        return number if self.store is None else self.store.item_of(number)

    def sides(self):
        return self.script(
            "return [...document.querySelectorAll('#sides .text')].map((one) => one.textContent)"
        )

    def press(self, key, waits=True):
        """A key, pressed no sooner than a person could, then the page's answer to it."""
        from selenium.webdriver.common.action_chains import ActionChains

        before = self.text("count")
        time.sleep(0.27)
        ActionChains(self.driver).send_keys(key).perform()
        if waits:
            self.wait(f"document.getElementById('count').textContent !== {json.dumps(before)}")

    def errors(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            event["params"]["request"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture
def page(driver, tmp_path):
    """Serve items and open the page; everything is checked for errors and foreign requests at the end."""
    stack = []

    def start(items, **settings):
        store = Store(tmp_path / "feedback.db", **{"overlap": 1, **settings})
        store.add_items(items)
        site = Site()
        served = running(make_label_app(store, site), site)
        served.__enter__()
        person = Person(driver, site.url)
        person.store = store
        stack.append((served, site, person))
        return store, site, person

    yield start
    for served, site, person in stack:
        served.__exit__(None, None, None)
        asked = person.requests()
        assert asked
        assert {request["url"].split("/")[2] for request in asked} == {f"127.0.0.1:{site.port}"}
        assert all(site.token not in json.dumps(request) for request in asked[1:])  # no Referer, no query
        assert person.errors() == []


def pairs(count):
    return [
        Item(f"prompt {i}", f"short {i}", f"a longer text {i}", i % 2 == 0, True, "one", "two")
        for i in range(count)
    ]


def test_two_annotators_label_by_keys_and_the_export_is_what_they_chose(page, tmp_path):
    store, site, person = page(pairs(5))
    assert person.view() == "view-name"
    assert person.script("return [location.href, history.length]")[0] == f"{site.address}/"
    assert person.script("return document.cookie") == ""  # scripts cannot read it
    chosen = {}
    person.enter("Ann")
    assert person.text("count") == "0 of 5"
    for key in ("1", "2", "t", "s", "1"):
        item, sides = person.item(), person.sides()
        chosen["Ann", item] = sides[int(key) - 1] if key in "12" else {"t": "tie", "s": "skip"}[key]
        person.press(key)
    assert person.view() == "view-summary"
    assert person.text("summary-title") == "All done. Thank you, Ann."
    assert person.text("command").split() == [
        "proxima",
        "label",
        "--db",
        str(store.path),
        "--export",
        "preferences.jsonl",
    ]
    person.script("document.getElementById('switch').click()")
    person.enter("Bob")
    while person.view() == "view-item":
        item, sides = person.item(), person.sides()
        chosen["Bob", item] = sides[0]
        person.press("1")
    assert "Krippendorff" in person.wait("document.getElementById('figures').textContent")

    items = {item.id: item for item in store.items()}
    stored = {(answer.annotator, answer.item): answer for answer in store.answers()}
    assert stored.keys() == chosen.keys()
    for key, answer in stored.items():
        item = items[answer.item]
        assert {"a": item.a, "b": item.b}.get(answer.choice, answer.choice) == chosen[key]
        assert 0.2 < answer.seconds < 60
    assert {answer.swapped for answer in stored.values()} == {True, False}
    export(store, tmp_path / "out.jsonl", every_answer=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {(row["annotator"], row["prompt"]): row["chosen"] for row in rows} == {
        (name, items[number].prompt): text
        for (name, number), text in chosen.items()
        if text not in ("tie", "skip")
    }


def test_a_chat_prompt_is_shown_as_turns(page):
    talk = [{"role": "system", "text": "Be kind."}, {"role": "user", "text": "Hi there"}]
    rendered = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    kept = Item(Prompt(rendered, turns=talk), "a", "b")
    _, _, person = page([kept, Item(rendered, "c", "d"), Item("plain", "e", "f")])
    person.enter("Ann")
    found = []
    for _ in range(3):
        person.item()
        found.append(
            person.script(
                "return [...document.querySelectorAll('#prompt .turn > .told')].map((one) => one.textContent)"
            )
        )
        assert "im_start" not in person.script("return document.body.textContent")
        person.press("1")
    assert sorted(found) == [[], ["Be kind.", "Hi there"], ["Be kind.", "Hi there"]]


def test_undo_brings_the_item_back_and_a_reload_changes_nothing(page):
    store, _, person = page(pairs(4))
    person.enter("Ann")
    first = person.item()
    person.press("u", waits=False)  # nothing to undo yet
    person.press("1")
    second = person.item()
    person.driver.refresh()
    assert person.item() == second
    assert person.text("count") == "1 of 4"
    assert person.text("switch").startswith("Ann")
    person.press("u")
    assert person.item() == first
    assert store.answers() == []
    person.press("t")
    [answer] = store.answers()
    assert (answer.item, answer.choice) == (first, "tie")
    for _ in range(3):
        person.press("2")
    assert person.view() == "view-summary"
    person.press("u")
    assert person.view() == "view-item"
    assert len(store.answers()) == 3


def test_a_double_press_and_a_held_key_answer_one_item(page):
    from selenium.webdriver.common.action_chains import ActionChains

    store, _, person = page(pairs(6))
    person.enter("Ann")
    person.item()
    press = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '1'}))"
    soon = f"new MutationObserver(() => setTimeout(() => {press}, 50))"  # as soon as the next item is there
    person.script(f"{soon}.observe(document.getElementById('view-item'), {{attributeFilter: ['data-item']}})")
    time.sleep(0.27)
    ActionChains(person.driver).send_keys("111").perform()
    person.wait("document.getElementById('count').textContent === '1 of 6'")
    held = (
        "for (let i = 0; i < 9; i++) document.dispatchEvent(new KeyboardEvent('keydown', {key: '1', "
        "repeat: true}))"
    )
    time.sleep(0.27)
    person.script(held)
    person.script(
        "for (const key of ['1', 't']) document.dispatchEvent(new KeyboardEvent('keydown', {key, ctrlKey: "
        "true}))"
    )
    time.sleep(0.2)
    assert len(store.answers()) == 1
    azerty = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '&', code: 'Digit1'}))"
    person.script(azerty)
    person.wait("document.getElementById('count').textContent === '2 of 6'")


def test_ratings_by_buttons_and_by_keyboard_alone(page, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    store, _, person = page([Item(f"p {i}", f"text {i}", a_ended=i > 0) for i in range(3)], mode="ratings")
    person.enter("Ann")
    assert person.script(
        "return document.querySelectorAll('.mark.cut').length + document.querySelectorAll('.mark').length"
    ) in (1, 2)
    answers = {person.item(): "4"}
    person.press("4")
    answers[person.item()] = "2"
    time.sleep(0.27)
    person.driver.find_element(By.CSS_SELECTOR, "[data-choice='2']").click()
    person.wait("document.getElementById('count').textContent === '2 of 3'")
    answers[person.item()] = "skip"
    time.sleep(0.27)
    person.script("document.getElementById('question').focus()")
    for _ in range(12):  # by the tab key to "Skip"
        person.driver.switch_to.active_element.send_keys(Keys.TAB)
        if person.script("return document.activeElement.dataset.choice") == "skip":
            break
    person.driver.switch_to.active_element.send_keys(Keys.ENTER)
    person.wait("!document.getElementById('view-summary').hidden")
    assert {answer.item: answer.choice for answer in store.answers()} == answers
    assert "ratings.jsonl" in person.text("command")


def test_hostile_right_to_left_empty_and_huge_texts_are_only_text(page):
    huge = "word " * 20_000
    items = [
        Item(HOSTILE, HOSTILE + " 1", "مرحبا 😀", True, True, "", ""),
        Item("p\x00", "", huge, True, False, "", ""),
    ]
    _, _, person = page(items)
    person.enter("<i>Ann</i>")
    seen = []
    for _ in range(2):
        person.item()
        seen += [person.text("prompt"), *person.sides()]
        assert person.script("return document.title") == "Label · Proxima"
        assert (
            person.script(
                "return document.querySelectorAll('#taken, main img, main script, main b, header i').length"
            )
            == 0
        )
        for width, height in ((1280, 800), (390, 844), (800, 450)):
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            person.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert (
                person.script("return document.getElementById('choices').getBoundingClientRect().bottom")
                <= height + 1
            )
            assert person.script("return document.documentElement.scrollWidth") <= width
        person.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        person.press("1")
    assert {HOSTILE, HOSTILE + " 1", "مرحبا 😀", "p\x00", "(empty)", huge} == set(seen)
    assert person.text("switch") == "<i>Ann</i> · switch"


def test_an_answer_outlives_a_server_that_is_gone(driver, tmp_path):
    store = Store(tmp_path / "f.db", overlap=1)
    store.add_items(pairs(3))
    site = Site()
    with running(make_label_app(store, site), site):
        person = Person(driver, site.url)
        person.store = store
        person.enter("Ann")
        item = person.item()
    person.press("t", waits=False)
    assert "does not respond" in person.wait("document.getElementById('notice').textContent")
    assert "kept" in person.text("notice")
    assert person.item() == item
    again = Site(port=site.port)
    with running(make_label_app(store, again), again):
        person.wait("document.getElementById('notice').textContent.includes('was restarted')")
        assert store.answers() == []
        driver.get(again.url)  # the new address, in the same tab
        person.wait("document.getElementById('count').textContent === '1 of 3'")
        assert [(answer.item, answer.choice) for answer in store.answers()] == [(item, "tie")]
        assert person.item() != item
        assert person.script("return document.getElementById('notice').hidden")
    person.errors()  # the browser's own complaints about the time without a server


def test_the_first_of_two_tabs_counts(page):
    store, _, person = page(pairs(3))
    person.enter("Ann")
    item = person.item()
    store.add_answer(item, "Ann", "tie")  # as from another tab
    person.press("1")
    assert "already" in person.text("notice")
    assert person.item() != item
    assert [answer.choice for answer in store.answers()] == ["tie"]
    person.errors()  # the browser's own complaint about the refused answer


def test_screen_readers_are_told_and_the_look_follows_the_system(page):
    _, _, person = page(pairs(3))
    person.enter("Ann")
    assert person.script("return document.activeElement.id") == "question"
    person.press("1")
    assert person.text("live") == "Saved. Item 2 of 3."
    person.press("u")
    assert person.text("live") == "Undone. Item 1 of 3."
    grounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        person.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        grounds.append(person.script("return getComputedStyle(document.body).backgroundColor"))
    person.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds == ["rgb(245, 244, 241)", "rgb(18, 19, 23)"]


# --- the closed loop ---


def proxima(folder, *arguments):
    """The command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "proxima", *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.long
def test_from_prompts_through_people_to_a_policy_by_the_command_line(driver, tmp_path, forked):
    def run(*arguments):
        done = forked([sys.executable, "-m", "proxima", *arguments], tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    post = "SUBREDDIT: r/advice\\nTITLE: long story\\nPOST: my {} moved out {}. what should i do?\\nTL;DR:"
    prompts = [
        post.format(who, when)
        for who in ("boss", "sister", "cousin")
        for when in ("today", "last week", "online")
    ]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    model = ("--model-name", "embedded", "--device", "cpu")
    label = (
        "label",
        "--data",
        "prompts.txt",
        *model,
        "--max-new-tokens",
        "24",
        "--count",
        "12",
        "--db",
        "f.db",
    )
    server = proxima(tmp_path, *label)
    try:
        said = ""
        while not (found := re.search(r"Open (http://127\.0\.0\.1:\d+/\?token=\S+)", said)):
            line = server.stdout.readline()
            assert line, said
            said += line
        person = Person(driver, found[1])
        person.enter("Ann")
        answered = 0
        while person.view() == "view-item":
            first, second = person.sides()
            person.press("1" if len(first) <= len(second) else "2")  # the rule: the shorter one
            answered += 1
    finally:
        server.send_signal(signal.SIGINT)
    assert f"{answered} answers in f.db" in finish(server)
    assert answered >= 10

    exported = run("label", "--db", "f.db", "--export", "preferences.jsonl")
    assert f"{answered} rows in preferences.jsonl" in exported
    rows = [json.loads(line) for line in (tmp_path / "preferences.jsonl").read_text().splitlines()]
    assert all(len(row["chosen"].strip()) <= len(row["rejected"].strip()) for row in rows)
    tune = ("--lora-r", "4", "--run-name", "reward", "--batch-size", "4", "--validation-share", "0.2")
    assert "use it with --rewards" in run("reward", "--data", "preferences.jsonl", *model, *tune)
    small = (
        "--batch-size",
        "4",
        "--max-new-tokens",
        "8",
        "--ppo-epochs",
        "1",
        "--run-name",
        "ppo",
        "--lora-r",
        "4",
    )
    trained = run("train", "--data", "prompts.txt", *model, "--rewards", "runs/reward", *small)
    assert "stopped: all epochs done" in trained
    metrics = [
        json.loads(line) for line in (tmp_path / "runs" / "ppo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(metrics) == 3
    assert all("reward/reward" in line for line in metrics)


def test_instructions_keys_and_notes_by_keyboard(page):
    store, _, person = page(pairs(3))
    store.instructions = (
        "Prefer what is true.\n</script><img src=x onerror=\"document.title='taken'\"><b id=taken>b</b>"
    )
    person.driver.refresh()
    person.wait(
        "document.getElementById('intro-instructions').textContent.startsWith('Prefer what is true.')"
    )
    person.enter("ann")
    person.item()
    press(person, "i")
    person.wait("document.getElementById('told').open")
    assert person.text("instructions").startswith("Prefer what is true.")
    press(person, "1")  # nothing is answered behind a dialog
    press(person, "\ue00c")
    person.wait("!document.getElementById('told').open")
    press(person, "?")
    person.wait("document.getElementById('keys').open")
    listed = person.script(
        "return [...document.querySelectorAll('#keys-list dt')].map((one) => one.textContent)"
    )
    assert {"1", "2", "t", "s", "u", "n", "i", "?"} <= set(listed)
    press(person, "\ue00c")
    person.wait("!document.getElementById('keys').open")
    assert store.counts()[1] == 0
    press(person, "n")
    press(person, "two things: 1 and 2, <b>tie</b>")  # keys in a note answer nothing
    assert store.counts()[1] == 0
    press(person, "\ue007")
    person.press("1")
    assert [answer.note for answer in store.answers()] == ["two things: 1 and 2, <b>tie</b>"]
    assert person.script("return document.getElementById('note').value") == ""
    person.press("2")
    assert [answer.note for answer in store.answers()] == ["two things: 1 and 2, <b>tie</b>", ""]
    assert person.script("return document.getElementById('taken')") is None
    assert person.driver.title == "Label · Proxima"


def test_a_note_outlives_a_reload_and_comes_back_with_undo(page):
    """It is kept in the tab, for the annotator who wrote it."""
    store, _, person = page(pairs(3))
    person.enter("ann")
    first = person.item()
    note = "return document.getElementById('note').value"
    press(person, "n")
    press(person, "both are wrong")
    person.driver.refresh()
    assert person.item() == first
    assert person.script(note) == "both are wrong"
    person.press("t")
    assert [answer.note for answer in store.answers()] == ["both are wrong"]
    assert person.script(note) == ""
    person.press("u")
    assert (person.item(), person.script(note)) == (first, "both are wrong")
    person.script("document.getElementById('switch').click()")
    person.enter("bob")
    for _ in range(3):
        person.item()
        assert person.script(note) == ""
        person.press("s")


def press(person, text):
    """Keys that leave the count as it is."""
    person.press(text, waits=False)


def test_agreement_follows_what_others_answer_and_tells_no_control_question(page):
    """Both answer eleven items, one of the first ten a control question, which only one gets right."""
    store, _, person = page(pairs(10), overlap=1)
    store.add_controls([Item("is it?", "yes", "no", True, True)], ["a"])
    person.enter("ann")
    [control] = store.controls()
    while store.next_item("ann"):
        item = person.item()
        person.press("2" if store.is_swapped(item, "ann") else "1")
    assert person.view() == "view-summary"
    assert person.text("people") == "AnnotatorAnswersann11"
    assert "measured once two people" in person.text("agreement")
    while item := store.next_item("<b>bob</b>"):
        if store.progress("<b>bob</b>")[0] < 10:
            assert "Raw agreement" not in person.text("figures")  # it waits for the tenth
        first = store.is_swapped(item.id, "<b>bob</b>") == (item.id == control)
        store.add_answer(item.id, "<b>bob</b>", "1" if first else "2")
    # of the first ten answers both have the control question and eight or nine other items
    person.wait("/Raw agreement0.(89|90)/.test(document.getElementById('figures').textContent)")
    assert "<b>bob</b>11" in person.text("people")
    assert "Agreement" in person.text("see-agreement")
