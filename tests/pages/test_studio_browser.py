"""The studio in a real browser: on a run that trains, on one that ended, on one that attacks, on one of
10,000 steps."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from proxima.data import read_prompts
from proxima.pages.label import Item, Store
from proxima.pages.studio import Library, make_studio_app
from proxima.pages.web import Site, running
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run, write_examination
from tests.environments.games import Parity
from tests.fake_run import (
    HOSTILE,
    append_step,
    metrics_at,
    token_sample,
    write_outcome,
    write_run,
    write_tokens,
)
from tests.pages.test_label_browser import CHROMIUM, DRIVER, SOURCE, Person, finish, open_browser, proxima
from tests.pages.test_studio import busy, cut_back, write_finetuning
from tests.pages.test_turns import TALK, TEMPLATE

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LAST = "document.querySelector('#panel').dataset.step"
PHONE, DESK = (390, 844), (1280, 860)


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


class Visitor(Person):
    """Someone at the studio."""

    def go(self, place):
        self.script("location.hash = arguments[0]", place)

    def keys(self, text):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(text).perform()

    def all(self, selector, what="textContent"):
        code = "return [...document.querySelectorAll(arguments[0])].map((one) => one[arguments[1]])"
        return self.script(code, selector, what)

    def wait_for(self, selector, words="", seconds=15):
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.wait(f"{found}.some((one) => one.textContent.includes({json.dumps(words)}))", seconds)

    def size(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def studio(driver, tmp_path):
    """Serve a folder of runs and open it; errors and foreign requests are looked for at the end."""
    stack = []

    def start(folder=tmp_path / "runs", store=None):
        site = Site()
        served = running(make_studio_app(Library(folder), site, store), site)
        served.__enter__()
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        visitor = Visitor(driver, site.url)
        visitor.wait("location.pathname === '/' && document.getElementById('runs')")
        visitor.forgiven = ()
        stack.append((served, site, visitor))
        return visitor

    yield start
    for served, site, visitor in stack:
        asked = visitor.requests()
        visitor.script("window.stop(); location.hash = '#/none'")
        errors = [
            one for one in visitor.errors() if not any(words in one["message"] for words in visitor.forgiven)
        ]
        driver.get("about:blank")  # no look is under way when the server goes
        served.__exit__(None, None, None)
        assert {request["url"].split("/")[2] for request in asked if request["url"].startswith("http")} == {
            f"127.0.0.1:{site.port}"
        }
        assert all(site.token not in json.dumps(request) for request in asked[1:])
        assert errors == []


def curve_end(visitor, title):
    """What a chart reads without a pointer: the last number of its first curve."""
    code = (
        "return [...document.querySelectorAll('.chart')].find((one) => "
        "one.querySelector('.chart-title').textContent"
        " === arguments[0])?.querySelector('.chart-readout').textContent"
    )
    return float(
        re.search(r"(-?[\d.,]+(e-?\d+)?)\s*$", visitor.script(code, title).split("   ")[0])[1].replace(
            ",", ""
        )
    )


# --- a run that trains ---


@pytest.mark.long
def test_a_real_training_run_is_followed_to_its_end_and_its_tokens_are_those_on_disk(studio, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    post = "SUBREDDIT: r/advice\\nTITLE: long story\\nPOST: my {} moved out {}. what should i do?\\nTL;DR:"
    prompts = [
        post.format(who, when)
        for who in ("boss", "sister", "cousin")
        for when in ("today", "last week", "online")
    ]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    visitor = studio(runs)
    visitor.wait_for(".narrow h2", "No runs yet")
    small = (
        "--batch-size 3 --max-new-tokens 8 --ppo-epochs 1 --lora-r 4 --eval-every 2 --run-name live "
        "--device cpu --skip-checks"
    )
    [advised] = visitor.all(".command")
    training = proxima(tmp_path, *advised.split()[1:], *small.split(), "--epochs", "30")
    try:
        visitor.wait_for("#runs a", "live", 90)  # it comes up by itself
        visitor.keys("j")
        visitor.keys("\ue007")
        visitor.wait_for(".state", "training")
        visitor.wait(f"Number({LAST}) > 0", 60)
        first = int(visitor.script(f"return {LAST}"))
        drawing = visitor.wait("document.querySelector('.chart-drawing')")
        visitor.wait(f"Number({LAST}) > {first}", 60)
        assert visitor.script("return arguments[0].isConnected", drawing)  # drawn on, not drawn anew
    finally:
        output = finish(training)
    assert "stopped: all epochs done" in output
    visitor.wait_for(".state", "finished", 30)
    visitor.wait(f"Number({LAST}) === 90")
    run = Run(runs / "live")
    last = run.metrics()["avg_reward"][-1]
    assert curve_end(visitor, "Training reward") == pytest.approx(last, rel=1e-3, abs=1e-4)
    assert visitor.all("#why") == ["Ended: all epochs done"]
    visitor.keys("3")
    check_microscope(visitor, run, run.token_steps()[-1])
    visitor.keys("2")
    visitor.wait_for(".samples td", run.samples()[0]["text"].strip()[:20])


def check_microscope(visitor, run, step):
    """Every number of every token of every sample of a step is the stored one."""
    visitor.wait(f"document.getElementById('panel').dataset.shown?.startsWith('{step} ')")
    for place, sample in enumerate(run.tokens(step)):
        if place:
            visitor.keys(".")
        visitor.wait(f"document.getElementById('panel').dataset.shown === '{step}  {place}'")
        shown = visitor.script(
            "return [...document.querySelectorAll('.scope-side:first-child .scope-token')].map((token) => {"
            "  token.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));"
            "  const cells = [...document.querySelectorAll('.scope-side:first-child .scope-facts "
            "[data-column]')];"
            "  return cells.map((cell) => [cell.dataset.column, cell.dataset.value, "
            "cell.querySelector('dd').textContent]);"
            "})"
        )
        assert len(shown) == len(sample["tokens"]) > 0
        for index, cells in enumerate(shown):
            assert [name for name, _, _ in cells] == list(sample["columns"])
            for name, value, text in cells:
                stored = sample["columns"][name][index]
                assert json.loads(value) == stored
                assert (
                    text == "–"
                    if stored is None
                    else math.isclose(float(text.replace(",", "")), stored, rel_tol=1e-5, abs_tol=1e-9)
                )


WRITER = """
import sys, time
from pathlib import Path
from tests.fake_run import append_step
import fcntl
folder = Path(sys.argv[1])
lock = (folder / ".lock").open("a+")
fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
for step in range(31, 10_000):
    append_step(folder, step)
    time.sleep(0.2)
"""


@pytest.fixture
def live(tmp_path):
    """A run that another process writes."""
    folder = write_run(tmp_path / "runs" / "live", steps=30, finished=False)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], env=environment, stdout=subprocess.PIPE
    )
    writer.stdout.readline()
    yield folder, writer
    writer.kill()
    writer.communicate()


def test_charts_grow_by_new_points_alone_and_keep_focus_and_reading(studio, live):
    folder, writer = live
    visitor = studio()
    visitor.go("#/run/live/charts")
    visitor.wait(f"Number({LAST}) >= 30")
    visitor.script("document.querySelector('.chart-drawing').focus()")
    visitor.keys("\ue011")  # Home: the first point is read
    assert visitor.all(".chart-readout b")[0] == "step 1"
    visitor.requests()
    before = int(visitor.script(f"return {LAST}"))
    visitor.wait(f"Number({LAST}) > {before + 15}")
    assert visitor.all(".chart-readout b")[0] == "step 1"
    assert visitor.script("return document.activeElement.classList.contains('chart-drawing')")
    looks = [request["url"] for request in visitor.requests() if "/api/" in request["url"]]
    assert 1 <= len(looks) <= 6
    assert all("/api/curves" in url and int(re.search(r"after=(\d+)", url)[1]) >= before for url in looks)
    assert int(visitor.script("return document.getElementById('panel').dataset.points")) > 15
    writer.kill()
    visitor.wait_for(".state", "stopped")
    assert visitor.all(".figures dd")[0] == str(Run(folder).last()["step"])


@pytest.mark.long
def test_a_run_that_is_rolled_back_and_then_vanishes_while_it_is_looked_at(studio, live):
    folder, writer = live
    writer.kill()
    writer.wait()
    visitor = studio()
    visitor.forgiven = ("404 (Not Found)",)
    for tab in ("charts", "microscope"):
        visitor.go(f"#/run/live/{tab}")
        visitor.wait_for("#panel", "")
    visitor.wait("document.getElementById('panel').dataset.shown?.startsWith('30 ')")
    cut_back(folder, 12)
    for step in (20, 30):
        (folder / "tokens" / f"step-{step:08d}.json").unlink()
    visitor.wait("document.getElementById('panel').dataset.shown?.startsWith('10 ')", 30)
    visitor.go("#/run/live/charts")
    visitor.wait(f"Number({LAST}) === 12")
    append_step(folder, 13)
    visitor.wait(f"Number({LAST}) === 13")
    cut_back(folder, 12)  # with the charts in view
    visitor.wait(f"Number({LAST}) === 12", 30)
    assert (
        visitor.script("return document.querySelector('.chart-line').getAttribute('d').match(/[ML]/g).length")
        == 12
    )
    assert curve_end(visitor, "Training reward") == pytest.approx(metrics_at(12, 30)["avg_reward"], rel=1e-3)
    append_step(folder, 13, avg_reward=-7)
    visitor.wait(f"Number({LAST}) === 13", 30)
    assert curve_end(visitor, "Training reward") == -7
    shutil.rmtree(folder)
    visitor.wait_for("#gone", "moved or removed", 30)
    visitor.go("#/")
    visitor.wait_for(".narrow h2", "No runs yet")


# --- a run that ended ---


def test_lists_links_keys_and_the_way_back(studio, tmp_path):
    runs = tmp_path / "runs"
    for number, name in enumerate(("alpha", "beta", "sweep/gamma & <b>")):
        write_run(runs / name, steps=20 + number)
    visitor = studio(runs)
    visitor.wait_for("#runs a", "alpha")
    assert visitor.all("#runs a") == ["sweep/gamma & <b>", "beta", "alpha"]
    visitor.keys("/")
    visitor.keys("finished amm")
    assert visitor.wait("document.querySelectorAll('#runs tr').length === 1")
    assert visitor.all("#runs a") == ["sweep/gamma & <b>"]
    visitor.keys("\ue00c")  # Escape leaves the box
    visitor.keys("j")
    visitor.keys("\ue007")
    visitor.wait_for("h1", "sweep/gamma & <b>")
    visitor.wait(f"Number({LAST}) === 22")
    for key, words in (("5", "model_name"), ("4", "No warnings"), ("2", "coworker"), ("3", "Colour by")):
        visitor.keys(key)
        visitor.wait_for("#panel", words)
    address = visitor.script("return location.href")
    assert address.endswith("#/run/sweep%2Fgamma%20%26%20%3Cb%3E/microscope")
    visitor.script("history.back()")
    visitor.wait_for(".samples td", "coworker")
    for _ in range(4):
        visitor.script("history.back()")
        time.sleep(0.1)
    visitor.wait("document.getElementById('filter')?.value === 'finished amm'")
    visitor.driver.get("about:blank")
    visitor.driver.get(address)  # a deep link
    visitor.wait_for("#panel", "Colour by")
    visitor.keys("?")
    assert visitor.script("return document.getElementById('keys').open")
    assert {"[", "]", "1", "g", "?"} <= set(visitor.all("#keys-list kbd"))
    visitor.script("document.querySelector('#keys button').click()")
    visitor.wait("!document.getElementById('keys').open")
    visitor.keys("g")
    visitor.wait_for("#runs a", "alpha")


def test_an_answer_that_comes_after_the_tab_was_left_changes_nothing(studio, tmp_path):
    write_run(tmp_path / "runs" / "alpha", steps=20)
    visitor = studio()
    visitor.go("#/run/alpha/charts")
    visitor.wait(f"Number({LAST}) === 20")
    visitor.script(
        "const plain = window.fetch; window.late = 0;"
        "window.fetch = async (path, ...more) => {"
        "  const answer = await plain(path, ...more);"
        "  if (!String(path).includes('/api/samples')) return answer;"
        "  await new Promise((done) => setTimeout(done, 1000));"
        "  setTimeout(() => window.late++, 200);"
        "  return answer;"
        "};"
    )
    visitor.keys("2")
    visitor.wait("location.hash.endsWith('samples')")
    visitor.keys("3")
    visitor.wait_for("#panel", "Colour by")
    visitor.wait("window.late > 0")
    assert "Colour by" in visitor.script("return document.getElementById('panel').textContent")
    assert not visitor.all(".samples")


def test_the_microscope_shows_any_step_sample_and_column_and_two_steps(studio, tmp_path):
    runs = tmp_path / "runs"
    run = Run(write_run(runs / "ended", steps=50))
    write_tokens(run.path, 40, [token_sample(step) for step in (40, 41)])  # one prompt twice
    write_tokens(run.path, 50, [token_sample(step) for step in (50, 51)])
    visitor = studio(runs)
    visitor.go("#/run/ended/microscope?step=50&beside=40&sample=1")
    visitor.wait("document.getElementById('panel')?.dataset.shown === '50 40 1'")
    visitor.script("document.querySelector('.scope-token').focus()")
    shown = [float(value) for value in visitor.all(".scope-facts [data-column=kl] dd")]
    assert shown == [run.tokens(step)[1]["columns"]["kl"][0] for step in (50, 40)]
    visitor.go("#/run/ended/microscope?step=23")
    check_microscope(visitor, run, 20)  # the nearest one that was logged
    visitor.keys("]")
    visitor.wait("document.getElementById('panel').dataset.shown === '30  1'")
    visitor.keys("b")
    visitor.wait("document.getElementById('panel').dataset.shown === '30 10 1'")
    assert visitor.all(".scope-title b") == ["Step 30 · trained", "Step 10 · trained"]
    visitor.script(
        "document.querySelectorAll('.scope-token')[2].dispatchEvent(new PointerEvent('pointerover', { "
        "bubbles: true }))"
    )
    shown = [float(value) for value in visitor.all(".scope-facts [data-column=kl] dd")]
    assert shown == [run.tokens(step)[1]["columns"]["kl"][2] for step in (30, 10)]
    visitor.script(
        "const picker = document.querySelector('.scope select'); picker.value = 'ratio';"
        "picker.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    address = visitor.wait("location.href.includes('column=ratio') && location.href")
    assert all(part in address for part in ("step=30", "beside=10", "sample=1"))
    visitor.driver.get("about:blank")
    visitor.driver.get(address)
    visitor.wait("document.getElementById('panel')?.dataset.shown === '30 10 1'")
    assert visitor.script("return document.querySelector('.scope select').value") == "ratio"


def names_that_cover_others(visitor):
    """Names of points in the first chart whose boxes overlap; there is at least one name."""
    return visitor.script(
        "const all = [...document.querySelector('.chart-drawing').querySelectorAll('text')].filter((one) => "
        "one.textContent.startsWith('step ')); if (!all.length) return ['none']; const boxes = all.map((one) =>"
        " one.getBoundingClientRect()); return all.filter((_, i) => boxes.some((b, j) => { const a = boxes[i]; "
        "return j < i && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom; }))"
        ".map((one) => one.textContent)"
    )


def test_runs_over_each_other(studio, tmp_path):
    runs = tmp_path / "runs"
    for seed in range(3):
        folder = write_run(runs / f"seed-{seed}", steps=40)
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(re.sub(r"(?m)^seed: .*$", f"seed: {seed}", text))
    other = write_run(runs / "other", steps=60)
    (other / "config.yaml").write_text(
        (other / "config.yaml").read_text().replace("batch_size: 64", "batch_size: 32")
    )
    visitor = studio(runs)
    visitor.wait_for("#runs a", "other")
    for _ in range(4):
        visitor.keys("j")
        visitor.keys("x")
    visitor.wait_for("#compare-chosen", "Compare 4 runs")
    visitor.keys("c")
    visitor.wait("document.getElementById('view').dataset.compared === '4'")
    assert visitor.all(".chart-title")[0] == "Held-out reward against KL"
    assert names_that_cover_others(visitor) == []
    series = {"other", "seed-0", "seed-1", "seed-2", "seed (3 seeds)"}
    assert set(visitor.all(".chart-card:nth-child(2) .chart-legend button")) == series
    assert visitor.script("return document.querySelectorAll('.chart-band').length") >= 4
    assert series == set(visitor.all("#last tbody tr > :first-child"))
    visitor.script(
        "const add = document.querySelector('.pick select'); add.value = 'ratio_max';add.dispatchEvent(new "
        "Event('change'))"
    )
    visitor.wait_for(".chart-title", "Largest policy ratio")
    address = visitor.script("return location.href")
    assert "metric=ratio_max" in address
    visitor.script("document.querySelector('.choice input').click()")
    visitor.wait("document.getElementById('view').dataset.compared === '3'")
    visitor.driver.get("about:blank")
    visitor.driver.get(address)
    visitor.wait("document.getElementById('view').dataset.compared === '4'")
    thinned = visitor.driver.execute_async_script(
        "const done = arguments[0]; import(new URL('curves.js', document.querySelector('script[src*=studio]')"
        ".src)).then(({ drift }) => done([100, 5].map((count) => drift(Array.from({ length: count }, "
        "(_, i) => [i % 2, i, `step ${i}`])))))"
    )
    assert [len(points) for points in thinned] == [25, 5]  # few points stay as they are
    assert thinned[0][0] == [0.5, 1.5, "step 3"]


def test_labelling_inside_the_studio(studio, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "ended", steps=20)
    store = Store(tmp_path / "feedback.db", overlap=1)
    store.add_items([Item(f"p {i}", "one", "two", True, True, "m", "m") for i in range(2)])
    visitor = studio(runs, store)
    visitor.wait("!document.getElementById('to-label').hidden")
    visitor.script("document.getElementById('to-label').click()")
    visitor.wait("location.pathname === '/label' && document.getElementById('intro')?.textContent")
    assert visitor.all("#places a") == ["Runs", "Compare", "Label"]
    visitor.enter("Ann")
    visitor.item()
    visitor.press("t")
    assert [answer.choice for answer in store.answers()] == ["tie"]
    visitor.script("document.querySelector('#places a').click()")
    visitor.wait_for("#runs a", "ended")


# --- attacks and limits ---


def test_hostile_text_is_only_text_everywhere_and_fits_a_phone(studio, tmp_path):
    runs = tmp_path / "runs"
    name = "evil <img src=x onerror=alert(1)> \u202e"
    folder = write_run(runs / name, steps=20, eval_every=5, hostile=True)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        re.sub(r"(?m)^model_name: .*$", lambda _: f"model_name: {json.dumps(HOSTILE)}", text)
    )
    many = token_sample(20, text=f"{HOSTILE} " + "مرحبا 😀 \ud800 " * 300)
    write_tokens(folder, 20, [many, token_sample(20, text=""), token_sample(20, text=HOSTILE * 50)])
    (folder / "log.txt").write_text(
        "".join(f"2026-11-16 10:00:0{i},000 WARNING {HOSTILE} {'x' * 3000}\n" for i in range(9))
    )
    check = dict.fromkeys(("level", "name", "text", "advice"), f"{HOSTILE} {'y' * 3000}")
    (folder / "doctor.json").write_text(json.dumps([{"how": f"{HOSTILE} {'z' * 999}", "checks": [check]}]))
    rows = [
        {"step": step, "prompt": HOSTILE, "text": f"{HOSTILE if step > 15 else 'a b'} {'w' * 999}"}
        for step in (5, 10, 15, 20)
        for _ in range(8)
    ]
    with (folder / "samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            f'broken {HOSTILE}\n{{"step": 21, "avg_reward": "x", {json.dumps(HOSTILE)}: 1, "kl": NaN}}\n'
        )
    visitor = studio(runs)
    here = f"#/run/{visitor.script('return encodeURIComponent(arguments[0])', name)}"
    expected = {
        "#/": ("#runs a", "evil <img"),
        f"{here}/charts": (".chart-title", "Training reward"),
        f"{here}/samples": (".samples td", "<script>"),
        f"{here}/microscope?step=15": (".scope-text", "100,001 characters"),
        f"{here}/microscope?step=20": (".scope-text", "<script>"),
        f"{here}/warnings": ("#panel td", "<script>"),
        f"{here}/findings": (".finding", "Did it game the reward?"),
        f"{here}/log": (".log li.loud", "<script>"),
        f"{here}/about": (".pairs dd", "<script>"),
        f"#/compare?{visitor.script('return new URLSearchParams({run: arguments[0]}).toString()', name)}": (
            ".chart-title",
            "Response length",
        ),
    }
    for place, (selector, words) in expected.items():
        visitor.go(place)
        visitor.wait_for(selector, words)
        for width, height in (PHONE, DESK):
            visitor.size(width, height)
            time.sleep(0.05)
            assert visitor.script("return document.documentElement.scrollWidth") <= width, place
        assert "taken" not in visitor.script("return document.title")
        assert (
            visitor.script(
                "return document.querySelectorAll('#taken, main img, main script, main b#taken, "
                "iframe').length"
            )
            == 0
        )
    assert (
        visitor.script("return document.body.textContent").count("\u202e") <= 1
    )  # the run's own name, in isolation
    visitor.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_says_so_when_the_server_is_gone_or_another(driver, tmp_path):
    write_run(tmp_path / "run", steps=20)
    site = Site()
    with running(make_studio_app(Library(tmp_path), site), site):
        visitor = Visitor(driver, site.url)
        visitor.wait_for("#runs a", "run")
    visitor.wait("document.getElementById('notice').textContent.includes('does not respond')", 20)
    again = Site(port=site.port)
    with running(make_studio_app(Library(tmp_path), again), again):
        visitor.script("document.querySelector('#notice button').click()")
        visitor.wait("document.getElementById('notice').textContent.includes('was restarted')", 20)
        driver.get(again.url)
        visitor.wait_for("#runs a", "run")
        visitor.wait("document.getElementById('notice').hidden")
        driver.get("about:blank")
    visitor.errors()  # the browser's own complaints about the time without a server


DRAWN = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
}).observe({ type: "longtask", buffered: true });
(function look() {
  const lines = [...document.querySelectorAll(".chart-line")].filter((line) => line.getAttribute("d").length > 1000);
  if (lines.length >= 6) requestAnimationFrame(() => setTimeout(() => { window.drawn = performance.now(); }));
  else requestAnimationFrame(look);
})();
"""


def test_a_run_of_ten_thousand_steps_opens_in_two_seconds_and_the_page_stays_quick(driver, tmp_path):
    folder = write_run(tmp_path / "long", steps=10_000, eval_every=10)
    found = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": DRAWN})
    opened = []  # seconds, as they would be if the machine were free
    try:
        for _ in range(3):  # a fresh server each: nothing is read beforehand
            site, crowd = Site(), busy()
            with running(make_studio_app(Library(tmp_path), site), site):
                visitor = Visitor(driver, site.url)
                visitor.wait("document.getElementById('runs')")
                driver.get("about:blank")
                driver.get(f"{site.address}/#/run/long/charts")
                opened.append(visitor.wait("window.drawn", 30) / 1000 / crowd)
                if opened[-1] < 2:
                    break
                driver.get("about:blank")
        site = Site()
        with running(make_studio_app(Library(tmp_path), site), site):
            visitor = Visitor(driver, site.url)
            visitor.go("#/run/long/charts")
            visitor.wait("window.drawn", 30)
            visitor.script("window.longest = 0")
            delays, crowd = [], busy()
            for key in ("s", "2", "3", "1", "\ue014", "s"):
                code = (
                    "const done = arguments[1], began = performance.now();"
                    "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: arguments[0], "
                    "bubbles: true }));"
                    "requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)))"
                )
                delays.append(driver.execute_async_script(code, key))
                time.sleep(0.3)
            append_step(folder, 10_001)
            visitor.wait(f"Number({LAST}) === 10001", 30)
            longest = visitor.script("return window.longest")
            visitor.go("#/run/long/microscope")
            visitor.wait("document.getElementById('panel').dataset.shown?.startsWith('10000 ')")
            assert visitor.errors() == []
            driver.get("about:blank")
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", found)
    shown = ", ".join(f"{seconds:.2f}" for seconds in opened)
    print(
        f"\n10,000 steps drawn after {shown} s; a key answered within {max(delays):.0f} ms; longest task "
        f"{longest:.0f} ms"
    )
    assert min(opened) < 2.0
    assert sorted(delays)[len(delays) // 2] < 200 * crowd
    assert longest < 500 * crowd


def test_the_command_serves_until_it_is_stopped(driver, tmp_path):
    write_run(tmp_path / "runs" / "ended", steps=20)
    server = proxima(tmp_path, "studio", "--port", "0")
    try:
        line = server.stdout.readline()
        url = re.search(r"Open (http://127\.0\.0\.1:\d+/\?token=\S+)", line)[1]
        visitor = Visitor(driver, url)
        visitor.wait_for("#runs a", "ended")
        assert visitor.script("return document.getElementById('to-label').hidden")
        driver.get("about:blank")
    finally:
        server.send_signal(signal.SIGINT)
        finish(server)


# --- every kind of run, findings, log and commands ---


@pytest.fixture
def everything(tmp_path):
    """A run that was stopped, with all that a folder may hold, and fine-tuning runs beside it; all hostile."""
    folder = write_outcome(tmp_path / "runs" / "gamed", "gamed")
    (folder / "results.json").unlink()
    check = {"level": "warn", "name": "length", "text": f"it grows {HOSTILE}", "advice": "look"}
    attack = "".join(letter for letter in HOSTILE if letter.isprintable())
    command = [
        "proxima",
        "train",
        "--data",
        "my file",
        "--rewards",
        "mine:f,api_key=s3cr3t",
        "--note",
        attack,
    ]
    origin = {"kind": "ppo", "command": command, "folder": "/home/me", "checks": [check]}
    (folder / "origin.json").write_text(json.dumps(origin))
    (folder / "log.txt").write_text(
        f"2026-11-16 10:00:00,000 INFO began {HOSTILE}\n2026-11-16 10:00:01,000 WARNING slow\n"
    )
    (folder / "replay").mkdir()
    (folder / "replay" / "step-00000030.safetensors").write_bytes(b"x" * 2_000_000)
    (folder / "replay" / "alarm-00000029.safetensors").write_bytes(b"x" * 1_000_000)
    write_finetuning(tmp_path / "runs" / "sft", "sft")
    write_finetuning(tmp_path / "runs" / "reward", "reward")
    return folder


def test_every_kind_of_run_is_on_the_list_and_has_its_parts(studio, everything):
    visitor = studio()
    visitor.wait_for("#runs td", "Reward model")
    notes = visitor.all("#runs td.cell-1 p")
    assert {note.split(" ·")[0] for note in notes} == {"PPO", "SFT", "Reward model"}
    assert any("Accuracy on held-out pairs" in cell for cell in visitor.all("#runs td.cell-4"))
    visitor.go("#/run/reward/charts")
    visitor.wait_for(".chart-title", "Validation loss")
    shown = visitor.script(
        "return [...document.querySelectorAll('.tabs a')].filter((one) => !one.hidden).map((one) => one.text)"
    )
    assert shown == ["Charts", "Config", "Log"]
    visitor.keys("3")
    visitor.wait_for(".log li", "reward began")


def test_findings_and_the_doctor_are_read_in_the_studio(studio, everything):
    checks = [{"level": "fail", "name": "canary", "text": f"it stays {HOSTILE}", "advice": "look"}]
    for how in ("proxima doctor --canary", f"proxima doctor {HOSTILE}"):
        write_examination(everything, how, checks)
    visitor = studio()
    visitor.go("#/run/gamed/findings")
    visitor.wait_for(".finding", "Did it game the reward?")
    told = visitor.all(".finding", "innerText")
    assert len(told) == 5
    assert "until step 30" in told[0]
    assert "more answers begin alike" in told[2]
    said = visitor.all(".doctor h2")
    assert said[0] == "What proxima doctor --canary said"
    assert said[-1] == "What the doctor said before it began"
    assert visitor.all(".doctor td")[:2] == ["fail", "canary"]
    assert "it grows" in visitor.all(".doctor td")[10]
    assert visitor.script("return document.getElementById('taken')") is None
    visitor.size(*PHONE)
    assert visitor.script("return document.documentElement.scrollWidth") <= PHONE[0]


def test_the_log_grows_while_it_is_read_and_warnings_stand_out(studio, everything):
    visitor = studio()
    visitor.script("const real = setTimeout; window.setTimeout = (what, wait) => real(what, wait / 10)")
    visitor.go("#/run/gamed/log")
    visitor.wait_for(".log li", "began")
    assert visitor.all(".log li.loud") == ["2026-11-16 10:00:01,000 WARNING slow"]
    with (everything / "log.txt").open("a") as file:
        file.write("2026-11-16 10:00:02,000 ERROR it failed\nhalf a li")
    visitor.wait_for(".log li", "it failed")
    assert len(visitor.all(".log li")) == 3  # a line that is not whole waits
    visitor.keys("w")
    seen = "return [...document.querySelectorAll('.log li')].filter((one) => one.checkVisibility()).length"
    assert visitor.script(seen) == 2
    (everything / "log.txt").write_text("2026-11-16 11:00:00,000 INFO again\n")
    visitor.wait("document.querySelectorAll('.log li').length === 1")
    assert visitor.script("return document.getElementById('taken')") is None


def warn(folder, step, message):
    """A guard's alarm, as a run that trains appends it."""
    with (folder / "warnings.jsonl").open("a") as file:
        alarm = {"step": step, "guard": "kl", "message": message, "action": "warn"}
        file.write(json.dumps(alarm) + "\n")


def test_warnings_come_in_while_their_tab_is_open(studio, everything):
    visitor = studio()
    visitor.script("const real = setTimeout; window.setTimeout = (what, wait) => real(what, wait / 10)")
    visitor.go("#/run/gamed/warnings")
    visitor.wait_for("#panel", "No warnings")
    tab = (
        "return [...document.querySelectorAll('.tabs a')].find((one) => one.textContent.startsWith('W')).text"
    )
    assert visitor.script(tab) == "Warnings"
    for count, message in enumerate(("kl is high", f"later {HOSTILE}"), 1):
        warn(everything, 50 + count, message)
        visitor.wait_for("#panel tbody tr:first-child td", message[:5])  # the newest first
        assert len(visitor.all("#panel tbody tr")) == count
        assert visitor.script(tab) == f"Warnings ({count})"
    assert visitor.script("return document.getElementById('taken')") is None
    visitor.go("#/run/gamed/charts")
    visitor.wait_for(".chart-title", "Training reward")
    warn(everything, 60, "elsewhere")
    visitor.wait_for(".tabs a", "Warnings (3)")


def test_a_real_fine_tuning_run_is_seen_in_the_studio(studio, tmp_path, tiny, forked):
    """Its numbers, settings, log and command are those that `proxima reward` wrote."""
    pairs = [{"prompt": f"p{i}", "chosen": f" good {i}", "rejected": f" bad {i}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    flags = "--data pairs.jsonl --batch-size 4 --eval-every 1 --epochs 1 --device cpu --run-name judge"
    forked([sys.executable, "-m", "proxima", "reward", "--model", tiny, *flags.split()], tmp_path)
    run = Run(tmp_path / "runs" / "judge")
    visitor = studio()
    visitor.wait_for("#runs td", "Reward model")
    visitor.go("#/run/judge/charts")
    visitor.wait_for(".chart-title", "Accuracy")
    visitor.wait_for(".state", "finished")
    shown = curve_end(visitor, "Accuracy on held-out pairs")
    assert shown == pytest.approx(run.metrics()["accuracy"][-1], abs=1e-3)
    visitor.keys("2")
    visitor.wait_for("#panel", "epochs")
    assert f"--model {tiny}" in visitor.script("return document.querySelector('#panel').textContent")
    visitor.keys("3")
    visitor.wait_for(".log li", "reward: step 1/")
    assert len(visitor.all(".log li")) == run.log_text()[0].count("\n")


def test_commands_are_copied_with_one_click_and_hold_no_key(studio, everything):
    warn(everything, 30, HOSTILE)
    visitor = studio()
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    visitor.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    visitor.go("#/run/gamed/about")
    visitor.wait_for("h2", "Resume it with")
    for label, end in (("Copy command", ""), ("Copy resume command", "--run-name gamed --resume")):
        visitor.script(
            "[...document.querySelectorAll('.copies button')].find((one) => one.textContent === arguments[0]).click()",
            label,
        )
        visitor.wait_for(".copies button", "Copied")
        copied = visitor.driver.execute_async_script(
            "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
        )
        assert copied.startswith("proxima train --data 'my file' --rewards 'mine:f,api_key=***' --note ")
        assert copied.endswith(end)
        assert HOSTILE[:20] in copied
        visitor.wait_for(".copies button", label)
    assert "s3cr3t" not in visitor.driver.page_source
    recorded = visitor.all(".bundles li")
    assert re.match(r"Step 302 MB, \d+ (s|min) agoCopy|Step 302 MB, nowCopy", recorded[0])
    assert recorded[1].startswith("Step 291 MB, ")
    assert f"alarm kl, at step 30: {HOSTILE[:10]}" in recorded[1]
    assert visitor.all(".bundles li:first-child button") == [
        "Copy replay command",
        "Copy command for the microscope",
    ]
    assert visitor.script("return document.getElementById('taken')") is None


def test_a_copy_without_a_clipboard_is_made_all_the_same(studio, everything):
    visitor = studio()
    visitor.go("#/run/sft/charts")
    visitor.wait_for(".copies button", "Copy command")
    visitor.script(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.addEventListener('copy', () => (window.copied = document.activeElement.value))"
    )
    visitor.driver.find_element("css selector", ".copies button").click()  # only a person may copy so
    visitor.wait_for(".copies button", "Copied")
    assert visitor.script("return window.copied") == "proxima sft"


def test_a_chat_prompt_is_shown_as_turns_in_the_sample_table(studio, make_config, tmp_path):
    trainer = PPOTrainer(make_config(batch_size=2, eval_every=9, max_new_tokens=4))
    trainer.tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": TALK}, {"prompt": [{"role": "user", "content": HOSTILE[:80]}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = Run(trainer.train(read_prompts(tmp_path / "p.jsonl", trainer.tokenizer), 1).run_folder)
    assert all("<|im_start|>" in row["prompt"] for row in run.samples())
    visitor = studio(run.path.parent)
    visitor.go(f"#/run/{run.name}/samples")
    visitor.wait_for(".samples th .turn", "Hi there")
    told = visitor.all(".samples th .turn > .told")
    assert {"Be kind.", "Hi there", HOSTILE[:80]} == set(told)
    assert "im_start" not in visitor.script("return document.body.textContent")
    assert visitor.script("return document.querySelectorAll('#taken, main img, main script').length") == 0


@pytest.mark.timeout(240)
def test_an_episode_is_shown_as_turns_in_the_sample_table(studio, make_config, prompts):
    """What the environment said is marked, at every step, and hostile words of it are text."""
    settings = {"environment": Parity, "rewards": (), "max_turns": 3, "max_new_tokens": 6, "batch_size": 4}
    trained = PPOTrainer(make_config(**settings, eval_every=1)).train(prompts * 2)
    run = Run(trained.run_folder)
    rows = run.samples()
    assert {row["kind"] for row in rows} == {"followed", "trained"}
    for row in rows:
        roles = [turn["role"] for turn in row["replies"]]
        assert roles == ["assistant", "environment"] * 2 + ["assistant"]
    evil = {**rows[-1], "prompt": "evil", "step": rows[-1]["step"] + 1}
    evil["replies"] = [{"role": "environment", "text": HOSTILE}, {"role": HOSTILE, "text": "x" * 9000}]
    broken = {**evil, "prompt": "broken", "replies": [[1], "x"]}
    with (run.path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(evil) + "\n" + json.dumps(broken) + "\n")
    visitor = studio(run.path.parent)
    visitor.go(f"#/run/{run.name}/samples")
    visitor.wait_for(".samples td .turn.read", "<script>")
    shown = [
        text for text in visitor.all(".samples td .turn.read > .told") if re.fullmatch(r"\[\d\d\]", text)
    ]
    said = [turn["text"] for row in rows for turn in row["replies"] if turn["role"] == "environment"]
    assert sorted(shown) == sorted(text.strip() for text in said)  # no half of the policy's character
    assert "taken" not in visitor.script("return document.title")
    assert visitor.script("return document.querySelectorAll('#taken, main img, main script').length") == 0
    soft, plain = (
        visitor.script("return getComputedStyle(document.querySelector(arguments[0])).color", selector)
        for selector in (".samples td .turn.read .told", ".samples td .turn:not(.read) .told")
    )
    assert soft != plain
