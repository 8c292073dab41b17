"""The demo with `--engine vllm` reaches what it reaches with the built-in engine; on real vLLM."""

import json

import pytest

pytest.importorskip("vllm")

from proxima.cli import main
from proxima.world.demo import run_demo


@pytest.mark.timeout(900)
def test_the_demo_is_as_good_on_vllm(tmp_path):
    main(["demo", "--engine", "vllm", "--run-dir", str(tmp_path)])
    found = json.loads((tmp_path / "demo" / "results.json").read_text())
    expected = run_demo(run_dir=tmp_path, run_name="built-in", reward_from=tmp_path / "demo")
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
