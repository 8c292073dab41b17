"""A second round: `proxima label --from RUN` samples the run's policy, `proxima reward --continue FOLDER` goes on
from a reward model, on the old examples and the new."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proxima.cli import main
from proxima.cli.continued_reward import ExampleSource, Joined, held_out_keys, note_sources
from proxima.config import PPOConfig
from proxima.finetuning.held_out_prompts import prompt_key
from proxima.models import saved_units
from proxima.pages.label import Store
from proxima.ppo_trainer import PPOTrainer


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


@pytest.fixture(params=[4, 0], ids=["lora", "full"])
def run(request, tmp_path, tiny_folders, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))
    config = PPOConfig(
        tiny_folders["qwen3"],
        lora_r=request.param,
        rewards=("tests.cli.test_refresh:vowels",),
        batch_size=4,
        max_new_tokens=7,
        temperature=0.9,
        top_k=0,
        learning_rate=0.05 if request.param else 0.005,
        run_name="ppo",
    )
    trainer = PPOTrainer(config)
    trainer.train([f"prompt {i}" for i in range(4)], 2)
    Path("runs/ppo/data.json").write_text(json.dumps({"data": "prompts.txt"}))
    return trainer


@pytest.fixture
def no_server(monkeypatch):
    monkeypatch.setattr("proxima.pages.web.serve", lambda *given: None)


def fails(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_label_samples_two_answers_of_the_runs_policy_to_its_own_prompts(run, no_server, capsys):
    main(["label", "--from", "runs/ppo", "--db", "f.db", "--seed", "3"])
    assert "8 items and 0 answers" in capsys.readouterr().out
    store = Store(Path("f.db"))
    items = [store.item(number) for number in range(1, 9)]
    assert [item.prompt for item in items] == [f"prompt {i}" for i in range(8)]
    assert {item.a_model for item in items} == {"runs/ppo/policy"}
    run.config.seed = 3  # the noise of a sample follows from seed, step and prompt
    expected = run.generator.sample([item.prompt for item in items], 0).texts()
    assert [item.a for item in items] == expected
    assert all(len(item.a.split()) <= 7 for item in items)


def test_label_samples_a_base_in_4_bits(tmp_path, tiny, no_server, monkeypatch):
    """A run's policy with the form of its base, and the same adapter by flags."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(4)))
    config = PPOConfig(
        tiny, quantize="nf4", batch_size=4, max_new_tokens=7, learning_rate=0.05, run_name="ppo",
        rewards=("tests.cli.test_refresh:vowels",),
    )  # fmt: skip
    trainer = PPOTrainer(config)
    prompts = [f"prompt {i}" for i in range(4)]
    trainer.train(prompts)
    expected = trainer.generator.sample(prompts, 0).texts()
    by_flags = ["--model-name", tiny, "--adapter", "runs/ppo/policy", "--max-new-tokens", "7"]
    found = {}
    for name, given in {
        "from": ["--from", "runs/ppo"],
        "flags": [*by_flags, "--quantize", "nf4"],
        "full": by_flags,
    }.items():
        main(["label", *given, "--data", "prompts.txt", "--db", f"{name}.db", "--mode", "ratings"])
        found[name] = [Store(Path(f"{name}.db")).item(number).a for number in range(1, 5)]
    assert found["from"] == found["flags"] == expected
    assert found["full"] != expected


def test_what_is_wrong_with_the_run_is_said_in_one_line(run, no_server, capsys):
    assert "leave out --adapter" in fails(
        capsys, "label", "--from", "runs/ppo", "--adapter", "runs/ppo/policy"
    )
    assert "is not the folder of a finished" in fails(capsys, "label", "--from", "runs")
    Path("runs/ppo/data.json").unlink()
    assert "does not name its prompts; give --data" in fails(capsys, "label", "--from", "runs/ppo")
    said = fails(capsys, "label", "--from", "runs/ppo", "--export", "out.jsonl")
    assert "leave out --data, --pairs and --from" in said
    config = PPOConfig.from_yaml("runs/ppo/config.yaml")
    replace(config, environment="tests.environments.games:Once").to_yaml("runs/ppo/config.yaml")
    assert "trained on episodes, and the page shows single answers" in fails(
        capsys, "label", "--from", "runs/ppo"
    )


def write_pairs(path, count, start=0):
    rows = [
        {"prompt": f"p{i}", "chosen": "a" * (1 + i % 5), "rejected": "zz " * (1 + i % 3)}
        for i in range(start, start + count)
    ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs("old.jsonl", 24)
    write_pairs("new.jsonl", 16, 100)
    return tmp_path


def train(tiny_folders, *words):
    settings = ("--learning-rate", "0.01", "--batch-size", "8", "--lora-dropout", "0")
    main(["reward", "--model-name", tiny_folders["qwen3"], *settings, *words])


@pytest.mark.parametrize("more", [(), ("--lora-r", "0", "--learning-rate", "0.001")], ids=["lora", "full"])
def test_a_reward_model_goes_on_with_the_old_pairs_and_the_new(home, tiny_folders, capsys, monkeypatch, more):
    train(tiny_folders, "--data", "old.jsonl", "--run-name", "one", "--limit", "20", *more)
    seen, heads = [], []
    from proxima.finetuning import RewardTrainer

    train_before, fit_before = RewardTrainer.train, RewardTrainer._fit

    def watched(self, examples, validation=None):
        seen.append([item.prompt for item in examples])
        return train_before(self, examples, validation)

    def watched_fit(self, *given):
        heads.append(self.role.head.weight.detach().clone())
        return fit_before(self, *given)

    monkeypatch.setattr(RewardTrainer, "train", watched)
    monkeypatch.setattr(RewardTrainer, "_fit", watched_fit)
    words = ("--continue", "runs/one", "--data", "new.jsonl", *more)
    train(tiny_folders, *words, "--run-name", "two")
    prompts = seen[0]
    assert prompts == [f"p{i}" for i in range(100, 116)] + [f"p{i}" for i in range(20)]
    saved = load_file("runs/one/head.safetensors")["weight"] * saved_units("runs/one")[0].deviation
    assert torch.allclose(heads[0], saved, rtol=1e-5)  # out of its unit: as it was trained
    one, two = (json.loads(Path(f"runs/{name}/data.json").read_text()) for name in ("one", "two"))
    assert len(one["held_out"]) == len(two["held_out"]) - 1 == 1
    assert set(one["held_out"]) < set(two["held_out"])  # what was trained on is never held out
    new = {f"{prompt_key(prompt):016x}" for prompt in prompts[:16]}
    assert len(new & set(two["held_out"])) == 1
    assert two["sources"] == [
        {"data": "new.jsonl", "limit": 0},
        {"data": "old.jsonl", "limit": 20},
    ]
    train(tiny_folders, *words, "--run-name", "three", "--earlier", "none")
    assert seen[1] == prompts[:16]


def test_bad_input_is_one_line(home, tiny_folders, capsys):
    tiny = tiny_folders["qwen3"]
    ask = ("reward", "--model-name", tiny, "--data", "new.jsonl")
    assert "not a folder that `proxima reward` wrote" in fails(capsys, *ask, "--continue", home)
    assert "add --continue" in fails(capsys, *ask, "--earlier", "old.jsonl")
    train(tiny_folders, "--data", "old.jsonl", "--run-name", "one")
    go_on = (*ask, "--continue", "runs/one")
    assert "it was trained with lora_r 16, not 8; add --lora-r 16" in fails(capsys, *go_on, "--lora-r", "8")
    assert "trained with quantize none, not nf4" in fails(capsys, *go_on, "--quantize", "nf4")
    other = ("reward", "--model-name", tiny_folders["llama"], "--data", "new.jsonl", "--continue", "runs/one")
    assert f"add --model-name {tiny}" in fails(capsys, *other)
    assert "trained without an SFT adapter; leave out" in fails(capsys, *go_on, "--sft-adapter", "runs/one")
    settings = Path("runs/one/finetuning.yaml")
    written = settings.read_text()
    settings.write_text(re.sub(r"(?m)^sft_adapter:.*$", "sft_adapter: runs/sft", written))
    assert "add --sft-adapter runs/sft" in fails(capsys, *go_on)
    settings.write_text(written)
    Path("runs/one/data.json").write_text("[]")
    assert "give the earlier examples with --earlier FILE" in fails(capsys, *go_on)
    assert "nowhere.jsonl" in fails(capsys, *go_on, "--earlier", "nowhere.jsonl")


def test_joined_sequences_read_as_one():
    joined = Joined([[1, 2], [], [3]])
    assert list(joined) == [1, 2, 3]
    assert (joined[-1], joined[1:], len(joined)) == (3, [2, 3], 3)
    with pytest.raises(IndexError):
        joined[3]


def test_what_a_model_was_trained_on_is_noted_in_one_move(tmp_path, monkeypatch):
    note_sources(tmp_path, [ExampleSource("old.jsonl", 20)], [7])
    before = (tmp_path / "data.json").read_text()

    def full_disk(path, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        note_sources(tmp_path, [ExampleSource("new.jsonl"), ExampleSource("old.jsonl", 20)], [7, 8])
    assert (tmp_path / "data.json").read_text() == before
    assert held_out_keys(str(tmp_path)) == {7}
