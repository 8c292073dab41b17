"""What is done with a finished run: `proxima eval`, `proxima export`, loading its weights; win rates."""

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxima.cli import main
from proxima.config import PPOConfig, RewardSpec
from proxima.errors import RewardFailure
from proxima.evaluation import evaluate_run
from proxima.evaluator import win_rate
from proxima.export import export, model_card
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from tests.helpers import difference, weights


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


SETTINGS = {"rewards": "tests.test_finished_runs:vowels", "batch_size": 4, "max_new_tokens": 6, "seed": 3}


@pytest.fixture(scope="module", params=[4, 0], ids=["lora", "full"])
def trained(request, tmp_path_factory, tiny_folders):
    """A finished run of a few strong steps, and the trainer that made it."""
    folder = tmp_path_factory.mktemp("runs")
    rate = 0.05 if request.param else 0.005
    config = PPOConfig(
        tiny_folders["qwen3"], lora_r=request.param, run_dir=str(folder), run_name="one", learning_rate=rate, **SETTINGS
    )
    trainer = PPOTrainer(config)
    trainer.train([f"prompt {i}" for i in range(12)], 2)
    return trainer, folder / "one"


def test_a_saved_run_loads_into_a_fresh_trainer(trained):
    trainer, folder = trained
    fresh = PPOTrainer(trainer.config)
    assert difference(weights(fresh), weights(trainer)) > 0
    fresh.load(folder)
    assert difference(weights(fresh), weights(trainer)) == 0
    assert fresh.generator.sample(["a", "b"]).texts() == trainer.generator.sample(["a", "b"]).texts()


def test_weights_of_another_shape_are_refused(trained, make_config):
    trainer, folder = trained
    other = PPOTrainer(make_config(lora_r=trainer.config.lora_r + 2))
    with pytest.raises(ValueError, match="cannot load the weights"):
        other.load(folder)


def test_eval_compares_policy_and_reference_on_the_same_noise(trained, tmp_path, capsys):
    _, folder = trained
    (tmp_path / "held_out.txt").write_text("one \x1b[2J more\nand another\nlast")
    main(["eval", str(folder), "--data", str(tmp_path / "held_out.txt"), "--show", "1"])
    shown = capsys.readouterr().out
    assert r"one \x1b[2J more" in shown  # nothing steers the terminal
    assert "win rate (ties half)" in shown
    assert shown.count("reference (") == 1
    results = json.loads((folder / "evaluation.json").read_text())
    assert results["prompts"] == 3
    assert Run(folder).evaluation == results
    assert abs(results["reference"]["kl_exact"]) < 1e-5  # before loading, the policy is the reference
    assert results["policy"]["kl_exact"] > 1e-3
    for side in ("reference", "policy"):
        texts = [sample[side] for sample in results["samples"]]
        assert [sample[f"{side}_reward"] for sample in results["samples"]] == vowels(None, texts)
        assert results[side]["avg_reward"] == pytest.approx(sum(vowels(None, texts)) / 3)


def test_eval_takes_other_judges_and_batches_change_nothing(trained):
    _, folder = trained
    prompts = [f"held out {i}" for i in range(5)]
    once, again = (
        evaluate_run(folder, prompts, batch_size=size, engine=engine) for size, engine in ((5, "auto"), (2, "plain"))
    )
    assert again["samples"] == once["samples"]
    assert again["policy"] == pytest.approx(once["policy"], rel=1e-4, abs=1e-5)
    other = evaluate_run(folder, prompts, rewards=[PPOConfig(rewards=lambda prompts, texts: [7.0] * len(texts)).rewards[0]])
    assert (other["policy"]["avg_reward"], other["win_rate"]["rate"]) == (7.0, 0.5)


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_an_export_is_loaded_by_transformers_itself_and_writes_the_same(trained, tmp_path, merge, capsys):
    trainer, folder = trained
    words = ["export", str(folder), str(tmp_path / "out"), *(["--merge"] if merge else [])]
    main(words)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = trainer.generator.sample(["to be compared"])
    ours = trainer.models.policy.response_logits(tokens)
    ids = tokens.input_ids
    theirs = network(ids).logits[:, tokens.prompt_ids.shape[1] - 1 : -1]
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)
    assert tokenizer("to be compared")["input_ids"] == ids[0, : tokens.prompt_ids.shape[1]].tolist()
    assert (tmp_path / "out" / "adapter_config.json").exists() == (not merge and trainer.config.lora_r > 0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: " + ("peft" if not merge and trainer.config.lora_r else "transformers") in card
    assert "avg_reward" in card
    assert "learning_rate" in card
    assert str(folder.parent) not in card
    with pytest.raises(SystemExit):
        main(words)  # never written over
    assert "already exists" in capsys.readouterr().err


def test_a_merged_export_in_another_type(trained, tmp_path):
    _, folder = trained
    if not (folder / "policy" / "adapter_config.json").exists():
        pytest.skip("nothing to merge")
    export(folder, tmp_path / "half", merge=True, dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_merged_export_says_what_rounding_takes_away(make_config, tiny, tmp_path):
    """An update of a thousandth of the weights is below what bfloat16 resolves, 1/256; float32 keeps it."""
    base = Path(shutil.copytree(tiny, tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(base)
    trainer = PPOTrainer(make_config(model_name=str(base), lora_r=4))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.models.policy.backbone.network.named_parameters():
        if ".policy." in name and "lora_B" in name:
            parameter.data += 1e-4 * torch.randn(parameter.shape, generator=generator)
    trainer.save(tmp_path / "run")
    trainer.config.to_yaml(tmp_path / "run" / "config.yaml")
    with pytest.warns(UserWarning, match=r"only \d+% of what was trained is left .* bfloat16; merge with --dtype float32"):
        export(tmp_path / "run", tmp_path / "half", merge=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(tmp_path / "run", tmp_path / "whole", merge=True, dtype="float32")


@pytest.mark.parametrize(
    ("settings", "message"), [(None, "no config.yaml or stage.yaml"), ("seed: 1\n", "neither an adapter nor a model")]
)
def test_what_cannot_be_exported_is_said(tmp_path, settings, message):
    if settings:
        (tmp_path / "config.yaml").write_text(settings)
    with pytest.raises(ValueError, match=message):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="not the folder of a finished"):
        evaluate_run(tmp_path, ["x"])


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    config = PPOConfig(str(tmp_path / "base"), rewards=[str(tmp_path / "judge"), "a:b"], sft_adapter=str(tmp_path / "sft"))
    card = model_card(tmp_path, config, whole=True)
    assert str(tmp_path) not in card
    assert "source: judge" in card


@pytest.mark.parametrize("content", [None, b"not safetensors"], ids=["missing", "broken"])
def test_a_run_without_readable_weights_is_not_exported(trained, tmp_path, content):
    _, folder = trained
    shutil.copytree(folder, tmp_path / "run")
    for path in (tmp_path / "run" / "policy").glob("*.safetensors"):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no weights|cannot be read"):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_killed_runs_unfinished_line_and_another_machines_folders_do_not_hinder_an_export(trained, tmp_path):
    _, folder = trained
    shutil.copytree(folder, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "avg_')
    config = PPOConfig.from_yaml(folder / "config.yaml")
    replace(config, rewards="/home/someone/secret/judge").to_yaml(tmp_path / "run" / "config.yaml")
    card = (export(tmp_path / "run", tmp_path / "new" / "out") / "README.md").read_text()
    assert "| | step 1 | step 6 |" in card
    assert "judge" in card
    assert "someone" not in card


def test_an_export_that_fails_leaves_nothing(trained, tmp_path, monkeypatch):
    _, folder = trained
    monkeypatch.setattr(shutil, "copytree", lambda *given, **more: (given[1].mkdir(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        export(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="lies in the folder that is exported"):
        export(folder, folder / "policy" / "out")


def test_eval_where_every_reward_fails_says_so_and_nan_is_null(trained, tmp_path):
    _, folder = trained
    shutil.copytree(folder, tmp_path / "run")

    def broken(prompts, texts):
        raise OSError("away")

    with pytest.raises(RewardFailure, match="all rewards failed, nothing was judged; the last reason: broken: OSError: away"):
        evaluate_run(tmp_path / "run", ["a"], [RewardSpec(broken)])
    half = RewardSpec(lambda prompts, texts: [None if prompt == "a" else 1.0 for prompt in prompts], name="half")
    evaluate_run(tmp_path / "run", ["a", "b"], [half])
    written = (tmp_path / "run" / "evaluation.json").read_text()
    assert "NaN" not in written
    assert json.loads(written)["samples"][0]["policy_reward"] is None


def test_a_value_model_is_not_exported_as_a_policy(trained, tmp_path):
    _, folder = trained
    (folder / "value" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="reward or value model"):
        export(folder / "value", tmp_path / "out")


def test_win_rates_count_ties_half_leave_out_failures_and_have_an_interval():
    rate = win_rate([1.0, 0.5, 0.2, 0.9, math.nan], [0.0, 0.5, 0.3, 0.1, 1.0])
    assert rate["rate"] == 0.625
    assert rate["prompts"] == 4
    assert 0 <= rate["low"] < rate["rate"] < rate["high"] <= 1
    assert math.isnan(win_rate([math.nan], [1.0])["rate"])
