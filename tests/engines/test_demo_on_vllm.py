"""The demo with `--engine vllm` reaches what it reaches with the built-in engine; on real vLLM."""

import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proxima.cli import main
from proxima.world import demo
from proxima.world.demo_settings import PPO_SETTINGS, STEPS

MADE = Path(__file__).parents[2] / "runs" / "demo"
SETTINGS = {"steps": STEPS, **PPO_SETTINGS, "engine": "auto", "engine_urls": []}


def results_in(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture
def built_in(tmp_path):
    """The demo on the built-in engine: what `make demo` left (`make test-engines` makes it anew where the
    source is newer), or made here."""
    if (MADE / "results.json").exists():
        made = results_in(MADE)
        if (made["seed"], made["settings"], made["reward_model"]["preferences"]) == (0, SETTINGS, 3000):
            return MADE
    main(["demo", "--run-dir", str(tmp_path / "built-in")])
    return tmp_path / "built-in" / "demo"


@pytest.mark.timeout(900)
def test_the_demo_is_as_good_on_vllm(built_in, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, reward_from=built_in))
    main(["demo", "--engine", "vllm", "--run-dir", str(tmp_path)])
    found, expected = results_in(tmp_path / "demo"), results_in(built_in)
    assert found["settings"] == {**expected["settings"], "engine": "vllm"}
    lines = (tmp_path / "demo" / "ppo" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["sampling_gap"] for line in lines) < 1e-4
    assert expected["ppo"]["gold"] > expected["sft"]["gold"] + 0.2
    assert found["sft"]["gold"] == pytest.approx(expected["sft"]["gold"], abs=0.05)
    assert found["ppo"]["gold"] == pytest.approx(expected["ppo"]["gold"], abs=0.05)
    assert found["win_rate_by_gold"]["low"] > 0.65
    print(
        {name: (found[name]["gold"], expected[name]["gold"]) for name in ("sft", "ppo")},
        found["seconds"],
        expected["seconds"],
    )
