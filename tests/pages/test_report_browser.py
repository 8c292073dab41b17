"""A report in a real browser: nothing is asked for, no text takes over, and the microscope shows the
numbers on disk."""

import json
import math
from html import unescape

import pytest

from proxima.evaluator import evaluate_run
from proxima.pages.report import write_report
from proxima.pages.report.report_page import escape
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.runs.glossary import GLOSSARY, without_backticks
from tests.environments.games import Parity
from tests.fake_run import HOSTILE, token_sample, write_outcome, write_run, write_tokens
from tests.pages.test_label_browser import CHROMIUM, DRIVER, Person, open_browser

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


def open_page(driver, path):
    person = Person(driver, path.resolve().as_uri())
    person.wait("document.readyState === 'complete'")
    return person


def key(driver, *names):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(driver).send_keys(*(getattr(Keys, name) for name in names)).perform()


def choose(person, picker, value):
    person.script(
        "const pick = document.getElementById(arguments[0]) ?? document.querySelector(arguments[0]);"
        "pick.value = arguments[1]; pick.dispatchEvent(new Event('change'))",
        picker,
        value,
    )


FACTS = (
    "return [...document.querySelectorAll('.scope-facts')].map((side) => Object.fromEntries("
    "[...side.querySelectorAll('[data-column]')].map((cell) => [cell.dataset.column, "
    "[cell.dataset.value, cell.querySelector('dd').textContent]])))"
)


def same(shown, stored):
    """What the page shows of a token, to six digits, and holds, exactly, is what is on disk."""
    assert set(shown) == set(stored)
    for name, (held, text) in shown.items():
        assert float(held) == stored[name]
        assert math.isclose(float(text.replace(",", "")), stored[name], rel_tol=1e-5, abs_tol=1e-12)


def test_the_microscope_shows_the_numbers_on_disk(driver, tmp_path):
    run = Run(write_run(tmp_path / "r", 30))
    write_tokens(
        run.path, 10, [token_sample(10), token_sample(10, "trained", "another text", "another prompt")]
    )
    person = open_page(driver, write_report(run))
    assert (
        person.script("return document.getElementById('pick-sample').value") == "followed 1"
    )  # what can be set side by side
    assert person.script("return document.querySelectorAll('.chart-line').length") > 20
    assert person.script("return document.querySelectorAll('.scope-text').length") == 2
    choose(person, "pick-sample", "trained 1")
    choose(person, "pick-left", "1")
    left, right = run.tokens(20)[1], run.tokens(30)[1]
    person.script("document.querySelector('.scope-token').focus()")
    for place in range(len(left["tokens"])):
        for shown, sample in zip(person.script(FACTS), (left, right), strict=True):
            same(shown, {name: values[place] for name, values in sample["columns"].items()})
        key(driver, "ARROW_RIGHT")
    assert person.script("return document.activeElement.textContent") == left["tokens"][-1]
    key(driver, "HOME")
    assert person.script("return document.activeElement.textContent") == left["tokens"][0]
    choose(person, "pick-right", "")
    assert person.script("return document.querySelectorAll('.scope-text').length") == 1
    assert person.errors() == []


def test_tokens_are_coloured_by_the_chosen_column(driver, tmp_path):
    folder = write_run(tmp_path / "r", 10, samples=False)
    sample = token_sample(10, text="a b c d")
    sample["columns"] = {
        "kl": [0.0, 2.0, -2.0, None],
        "advantage": [1.0, 0.0, 0.0, 0.5],
        "odd": [1e-9, 1e9, -3.5, 0.1],
    }
    write_tokens(folder, 10, [sample])
    person = open_page(driver, write_report(Run(folder)))
    colours = (
        "return [...document.querySelectorAll('.scope-token')].map((token) => "
        "getComputedStyle(token).backgroundColor)"
    )
    by_advantage = person.script(colours)
    choose(person, ".scope-bar select", "kl")
    by_kl = person.script(colours)
    clear = "rgba(0, 0, 0, 0)"
    assert (by_kl[0], by_kl[3]) == (clear, clear)
    assert by_kl[1] != by_kl[2] != clear
    assert (by_advantage[1], by_advantage[2]) == (clear, clear)
    assert by_advantage[0] == by_kl[1]  # the strongest of a column is as strong as that of another
    options = person.script(
        "return [...document.querySelectorAll('.scope-bar option')].map((one) => one.value)"
    )
    assert options == ["advantage", "kl", "odd"]


def test_hostile_texts_are_harmless_and_nothing_is_asked_for(driver, tmp_path):
    folder = write_run(tmp_path / "r", 20, hostile=True)
    write_tokens(folder, 20, [{**token_sample(20, text=HOSTILE), "rewards": {HOSTILE: 1.0, "b": 2.0}}])
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        config.replace("model_name: embedded", "model_name: '</script><script>alert(1)</script>'")
    )
    person = open_page(driver, write_report(Run(folder)))
    assert person.script("return document.title") == "r · Proxima"
    assert person.script("return document.getElementById('taken')") is None
    assert person.script("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert person.script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    tokens = person.script(
        "return [...document.querySelectorAll('.scope-token')].map((one) => one.textContent)"
    )
    assert any("⟨U+202E⟩" in token for token in tokens)
    assert "\u202e" not in person.script("return document.getElementById('microscope').textContent")
    assert "</script><script>alert(1)" in person.script("return document.body.innerText")
    assert all(request["url"].startswith(("file:", "data:")) for request in person.requests())
    assert person.errors() == []


EVIL = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)><b id="taken">b</b>'


class Says(Parity):
    """Two turns, with an attack on the page between them."""

    def step(self, text):
        return super().step(text)._replace(observation=EVIL)


@pytest.fixture
def played(make_config):
    """A run on episodes, its prompts all the same, and an evaluation of it."""
    config = make_config(environment=Says, rewards=(), max_turns=2, batch_size=4, max_episode_tokens=200)
    trainer = PPOTrainer(config)
    folder = trainer.train(["x"] * 8, validation_prompts=["x"] * 4).run_folder
    return Run(folder)


def by_page(person, selector):
    return person.script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )


@pytest.mark.timeout(240)
def test_an_episode_is_shown_as_turns_with_what_was_read_marked(driver, played):
    """In the microscope and beside each other, before an evaluation and after it."""
    person = open_page(driver, write_report(played))
    steps = played.token_steps()
    assert len(steps) > 1
    for label, picker in ((steps[0], "pick-left"), (steps[-1], "pick-right")):
        choose(person, picker, str(steps.index(label)))
    for number, kind in enumerate(("followed 1", "followed 2")):
        choose(person, "pick-sample", kind)
        for side, step in enumerate((steps[0], steps[-1])):
            sample = [each for each in played.tokens(step) if each["kind"] == "followed"][number]
            where = f".scope-side:nth-child({side + 1})"
            marked = person.script(
                "return [...document.querySelectorAll(arguments[0])].map((one) => Number(one.dataset.index))",
                f"{where} .scope-token.scope-read",
            )
            assert marked == sample["observed"] == list(range(marked[0], marked[0] + len(EVIL)))
            roles = by_page(person, f"{where} .scope-text .turn > b")
            assert roles == ["assistant", "environment", "assistant"]
            assert by_page(person, f"{where} .scope-text .turn.read > div") == [EVIL]
    person.script("document.querySelector('.scope-token.scope-read').focus()")
    assert "read, not chosen" in by_page(person, ".scope-facts")[0]
    followed = [each for each in played.tokens(steps[-1]) if each["kind"] == "followed"]
    assert shown_beside(person) == as_shown(each["replies"] for each in followed)
    samples = evaluate_run(played.path, ["x"] * 4, environment=Says)["samples"]
    person = open_page(driver, write_report(played))
    assert shown_beside(person) == as_shown(each["policy_turns"] for each in samples)
    assert all("truncated at a limit of the episode" in text for text in by_page(person, ".scope-title"))
    assert person.script("return document.title") == f"{played.name} · Proxima"
    assert person.script("return document.getElementById('taken')") is None
    assert person.script("return document.querySelectorAll('img').length") == 0
    assert person.errors() == []


def as_shown(conversations):
    """Control characters are drawn as symbols."""
    return [
        [{"role": turn["role"], "text": unescape(escape(turn["text"]))} for turn in turns]
        for turns in conversations
    ]


def shown_beside(person):
    """The turns of the answers after training, as the report has them; what is read is in another colour."""
    soft, plain = (
        person.script("return getComputedStyle(document.querySelector(arguments[0])).color", selector)
        for selector in (".pair .after .turn.read .told", ".pair .after .turn:not(.read) .told")
    )
    assert soft != plain
    found = []
    for number in range(len(by_page(person, ".pair"))):
        where = f".pair:nth-child({number + 1}) .after .turn"
        roles, texts = by_page(person, f"{where} > b"), by_page(person, f"{where} > .told")
        found.append([{"role": role, "text": text} for role, text in zip(roles, texts, strict=True)])
    return found


def test_charts_are_read_by_keys_and_their_curves_hidden_by_the_legend(driver, tmp_path):
    run = Run(write_run(tmp_path / "r", 30))
    person = open_page(driver, write_report(run))
    person.script(
        "window.figure = [...document.querySelectorAll('.chart')].find((one) => "
        "one.textContent.startsWith('KL to the reference'));"
        "figure.querySelector('svg').focus()"
    )
    key(driver, "END", "ARROW_LEFT")
    said = person.script("return figure.querySelector('.chart-readout').textContent")
    metrics = run.metrics()
    assert said.startswith("step 29")
    assert f"kl_exact {metrics['kl_exact'][28]:g}" in said
    assert person.script("return figure.querySelectorAll('.chart-line').length") == 2
    person.script("figure.querySelector('.chart-legend button').click()")
    assert person.script("return figure.querySelectorAll('.chart-line').length") == 1
    assert (
        person.script("return figure.querySelector('.chart-legend button').getAttribute('aria-pressed')")
        == "false"
    )


def test_a_question_mark_tells_what_is_healthy_and_names_stay_text(driver, tmp_path):
    folder = write_run(tmp_path / "r", 30)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    more = [{**line, f"reward/{HOSTILE}": line["step"] % 7} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    person = open_page(driver, write_report(Run(folder)))
    person.script(
        "window.figures = Object.fromEntries([...document.querySelectorAll('.chart')].map((one) => "
        "[one.querySelector('h3').textContent, one.querySelector('.chart-help')]))"
    )
    shown = "return figures[arguments[0]].innerText"
    assert "Healthy" not in person.script(shown, "Training reward")
    person.script("figures['Training reward'].querySelector('summary').click()")
    told = person.script(shown, "Training reward")
    assert f"Healthy: {without_backticks(GLOSSARY['avg_reward'].healthy)}" in told
    assert f"Otherwise: {without_backticks(GLOSSARY['avg_reward'].otherwise)}" in told
    assert GLOSSARY["avg_reward"].meaning not in told  # the note says it
    person.script("figures['Each reward by name'].querySelector('summary').click()")
    assert (
        person.script(shown, "Each reward by name").count("Healthy:") == 1
    )  # both rewards are of one family
    assert person.script("return document.getElementById('taken')") is None
    assert person.script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert person.errors() == []


def test_odd_series_are_drawn(driver, tmp_path):
    """No points, one point, gaps, flat, huge and tiny numbers: no error, and no number that is none in the
    drawing."""
    from proxima.runs.run_plot import Plot

    points = {
        "none": [], "null": [[1, None]], "one": [[3, 0.5]], "gaps": [[1, 1], [2, None], [3, 3], [4, 4]],
        "flat": [[1, 7], [9, 7]], "huge": [[1, 1e300], [2, -1e300]],
        "tiny": [[1, 1e-300], [2, 3e-300]], "zero": [[0, 0], [1, 0]],
    }  # fmt: skip
    charts = [
        {"title": name, "x": "step", "series": [{"name": name, "points": each}]}
        for name, each in points.items()
    ]
    person = open_page(driver, Plot(charts).save(tmp_path / "odd.html"))
    person.wait(f"document.querySelectorAll('figure').length === {len(charts)}")
    for number in range(len(charts)):
        person.script("document.querySelectorAll('svg')[arguments[0]].focus()", number)
        key(driver, "END", "ARROW_LEFT", "ESCAPE")
    drawn = person.script("return [...document.querySelectorAll('svg')].map((one) => one.outerHTML)")
    assert not [text for text in drawn if "NaN" in text or "Infinity" in text]
    assert ["nothing to show yet" in text for text in drawn] == [True, True] + [False] * 6
    assert person.errors() == []


def test_a_plot_works_inside_a_notebook(driver, tmp_path):
    run = Run(write_run(tmp_path / "r", 30))
    page = tmp_path / "notebook.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>n</title>{run.plot()._repr_html_()}", encoding="utf-8"
    )
    person = open_page(driver, page)
    driver.switch_to.frame(0)
    try:
        person.wait("document.querySelectorAll('.chart-line').length >= 3")
        assert (
            json.loads(person.script("return document.getElementById('data').textContent"))["charts"][0][
                "title"
            ]
            == "Training reward"
        )
    finally:
        driver.switch_to.default_content()
    assert person.errors() == []


@pytest.mark.parametrize("width", [1200, 400])
def test_the_findings_stand_on_the_page_with_their_numbers(driver, tmp_path, width):
    driver.set_window_size(width, 1000)
    person = open_page(driver, write_report(Run(write_outcome(tmp_path / "gamed", "gamed"))))
    told = person.script(
        "return [...document.querySelectorAll('.findings article')].map((one) => one.innerText)"
    )
    assert [text.split("?")[0] for text in told] == [
        "Did it learn",
        "What did it cost in KL",
        "Did it game the reward",
        "Is the critic good",
        "What to change next",
    ]
    assert "until step 30" in told[0]
    assert "answers got longer" in told[2]
    assert "Most common opening" in told[2]
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert person.script(wide)
    driver.set_window_size(1200, 1000)
