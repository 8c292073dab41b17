"""The page of a recorded step in a real browser: its stages, its tokens with the recorded numbers, and no
text that takes over."""

import contextlib
from dataclasses import replace

import pytest
import torch

from proxima.cli import main
from proxima.pages.comparison import write_replay_page
from proxima.runs import read_bundle
from proxima.tools.replay import compare_bundles, redacted
from tests.fake_run import HOSTILE
from tests.pages.test_label_browser import CHROMIUM, DRIVER, open_browser
from tests.pages.test_report_browser import FACTS, choose, open_page
from tests.tools.replay_recipe import BUNDLE, make_model

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
COLUMNS = {
    "logprob": "scoring/logprob_policy",
    "logprob_ref": "scoring/logprob_ref",
    "kl": "token_rewards/kl",
    "reward": "token_rewards/reward",
    "value": "values/value",
    "td_error": "advantages/td_error",
    "advantage": "whitened/advantage",
    "return": "advantages/return",
}
CELLS = (
    "return [...document.querySelectorAll('section')].find((one) => "
    "one.querySelector('h2')?.textContent === arguments[0])?.querySelector('table')"
    "?.innerText.split('\\n').map((line) => line.split('\\t')) ?? null"
)


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def bundle():
    return read_bundle(BUNDLE)


def test_two_recordings_side_by_side(driver, bundle, tmp_path):
    changed = replace(
        bundle,
        tensors={**bundle.tensors, "values/value": bundle.tensors["values/value"] + 1},
        facts={**bundle.facts, "settings": {**bundle.facts["settings"], "gamma": 0.5}},
    )
    changed = replace(changed, facts={**changed.facts, "step": 5})
    comparison = compare_bundles(bundle, changed)
    person = open_page(
        driver, write_replay_page(tmp_path / "r.html", [("here", bundle), ("there", changed)], comparison)
    )
    assert person.script("return document.querySelector('h1').textContent") == "Steps 2 and 5"
    stages = person.script(CELLS, "Stages")
    assert (stages[0][0], stages[0][-1]) == ("stage", "result")
    results = {row[0]: row[-1] for row in stages[1:]}
    assert list(results) == [stage.name for stage in comparison.stages]
    assert {name for name, result in results.items() if result == "differs"} == {"values"}
    assert "first stage that differs: values" in person.script(
        "return document.querySelector('main').innerText"
    )
    assert ["gamma", "0.99", "0.5"] in person.script(CELLS, "Settings that differ")
    assert person.script("return document.querySelectorAll('.scope-text').length") == 2
    row = 2
    choose(person, "pick-sample", f"trained {row + 1}")
    length = int(bundle.tensors["tokens/mask"][row].sum())
    person.script("document.querySelectorAll('.scope-token')[0].focus()")
    for place in range(length):
        person.script("document.querySelectorAll('.scope-token')[arguments[0]].focus()", place)
        left, right = person.script(FACTS)
        for name, tensor in COLUMNS.items():
            recorded = float(bundle.tensors[tensor][row, place])
            assert float(left[name][0]) == pytest.approx(recorded, rel=1e-6, abs=1e-12)
            assert float(right[name][0]) == pytest.approx(recorded + (name == "value"), rel=1e-6, abs=1e-12)
    shown = person.script(
        "return [...document.querySelector('.scope-text').children].map((one) => one.textContent)"
    )
    assert len(shown) == length


def test_the_page_that_the_command_writes(driver, bundle, tmp_path, capsys):
    """Recorded beside recomputed: the stages as the terminal has them, and both sides of every token."""
    page = tmp_path / "out" / "step.html"
    page.parent.mkdir()
    model = make_model(tmp_path / "model")
    with contextlib.suppress(SystemExit):  # whatever the stages say on this machine
        main(["replay", str(BUNDLE), "--model-name", model, "--out", str(page)])
    said = capsys.readouterr().out
    person = open_page(driver, page)
    stages = person.script(CELLS, "Stages")[1:]
    assert len(stages) == 11
    printed = {line[:22].strip(): line[22:].strip() for line in said.splitlines()}
    for row in stages:
        assert printed[row[0]].startswith(row[-1])
    assert person.script("return document.querySelectorAll('.scope-text').length") == 2
    choose(person, "pick-sample", "trained 2")
    person.script("document.querySelectorAll('.scope-token')[0].focus()")
    recorded, again = person.script(FACTS)
    assert float(recorded["value"][0]) == pytest.approx(float(bundle.tensors["values/value"][1, 0]), rel=1e-6)
    assert float(again["value"][0]) == pytest.approx(float(recorded["value"][0]), rel=0.01, abs=0.01)


def test_one_recording_opens_in_the_microscope(driver, bundle, tmp_path):
    person = open_page(driver, write_replay_page(tmp_path / "r.html", [("recorded", bundle)]))
    assert person.script("return document.querySelectorAll('.scope-text').length") == 1
    assert person.script("return document.querySelectorAll('#pick-sample option').length") == 4
    assert person.script(CELLS, "Stages") is None
    assert len(person.script(CELLS, "Metrics")) > 20
    assert person.script("return performance.getEntriesByType('resource').length") == 0


def test_hostile_texts_stay_texts(driver, bundle, tmp_path):
    prompts = [{"text": HOSTILE, "columns": {HOSTILE: HOSTILE}, "turns": []} for _ in range(4)]
    tokens = [[HOSTILE] * len(row) for row in bundle.facts["tokens"]]
    evil = replace(
        bundle,
        facts={
            **bundle.facts,
            **{"prompts": prompts, "tokens": tokens, "reason": HOSTILE, "proxima": HOSTILE},
            "reward_names": [HOSTILE, "b"],
            "settings": {**bundle.facts["settings"], "run_name": HOSTILE},
            "metrics": {HOSTILE: 1.0, "kl": HOSTILE, "entropy": float("nan"), "avg_reward": 10**400},
            "environment": {**bundle.facts["environment"], "cpu": HOSTILE, "packages": {"torch": HOSTILE}},
        },
        tensors={
            **bundle.tensors,
            "values/value": torch.full_like(bundle.tensors["values/value"], torch.nan),
        },
    )
    comparison = compare_bundles(bundle, evil)
    path = write_replay_page(tmp_path / "r.html", [(HOSTILE, bundle), ("evil", evil)], comparison)
    person = open_page(driver, path)
    assert person.script("return document.title") == "step 2 · Proxima"
    assert person.script("return document.getElementById('taken')") is None
    assert person.script("return document.querySelectorAll('img').length") == 0
    assert person.script("return document.querySelectorAll('.scope-text').length") == 2


def test_a_redacted_recording_shows_numbers_and_no_text(driver, bundle, tmp_path):
    path = write_replay_page(tmp_path / "r.html", [("recorded", redacted(bundle))])
    person = open_page(driver, path)
    shown = person.script("return document.querySelector('.scope-text').textContent")
    assert set(shown) == {"▯"}
    assert all(
        each["text"] not in path.read_text() for each in bundle.facts["prompts"] if len(each["text"]) > 5
    )
