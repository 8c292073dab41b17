"""What is done with a finished run: `proxima eval`, `proxima export`, loading its weights; win rates."""

import json
import math
import os
import shutil
import stat
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxima.cli import main, parse
from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import RewardFailure
from proxima.evaluator import win_rate
from proxima.evaluator.finished_run import evaluate_run
from proxima.pages.report.run_report import repeat_commands
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.tools.model_export import export, model_card
from tests.helpers import difference, weights


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


REWARD = "tests.evaluator.test_finished_runs:vowels"
SETTINGS = {"rewards": REWARD, "batch_size": 4, "max_new_tokens": 6, "seed": 3}


@pytest.fixture(scope="module", params=[4, 0], ids=["lora", "full"])
def trained(request, tmp_path_factory, tiny_folders):
    """A finished run of a few strong steps, and the trainer that made it."""
    folder = tmp_path_factory.mktemp("runs")
    rate = 0.05 if request.param else 0.005
    config = PPOConfig(
        tiny_folders["qwen3"],
        lora_r=request.param,
        run_dir=str(folder),
        run_name="one",
        learning_rate=rate,
        **SETTINGS,
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
    main(["eval", str(folder), "--data", str(tmp_path / "held_out.txt"), "--show", "1", "--rewards", REWARD])
    shown = capsys.readouterr().out
    assert r"one \x1b[2J more" in shown  # nothing steers the terminal
    assert "Win rate" in shown
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
        evaluate_run(folder, prompts, [RewardSpec(vowels)], batch_size=size, engine=engine)
        for size, engine in ((5, "auto"), (2, "plain"))
    )
    assert again["samples"] == once["samples"]
    assert again["policy"] == pytest.approx(once["policy"], rel=1e-4, abs=1e-5)
    other = evaluate_run(
        folder, prompts, rewards=[PPOConfig(rewards=lambda prompts, texts: [7.0] * len(texts)).rewards[0]]
    )
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


def test_an_export_is_as_private_as_the_umask_says(trained, tmp_path):
    """Whatever the files of the run allow."""
    _, folder = trained
    (folder / "policy" / "tokenizer_config.json").chmod(0o664)
    for mask, files, folders in ((0o077, 0o600, 0o700), (0o022, 0o644, 0o755)):
        before = os.umask(mask)
        try:
            to = export(folder, tmp_path / str(mask))
        finally:
            os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()} == {files}
        assert stat.S_IMODE(to.stat().st_mode) == folders


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
    with pytest.warns(
        UserWarning, match=r"only \d+% of what was trained is left .* bfloat16; merge with --dtype float32"
    ):
        export(tmp_path / "run", tmp_path / "half", merge=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(tmp_path / "run", tmp_path / "whole", merge=True, dtype="float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [(None, "no config.yaml or finetuning.yaml"), ("seed: 1\n", "neither an adapter nor a model")],
)
def test_what_cannot_be_exported_is_said(tmp_path, settings, message):
    if settings:
        (tmp_path / "config.yaml").write_text(settings)
    with pytest.raises(ValueError, match=message):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="not the folder of a finished"):
        evaluate_run(tmp_path, ["x"])


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    config = PPOConfig(
        str(tmp_path / "base"), rewards=[str(tmp_path / "judge"), "a:b"], sft_adapter=str(tmp_path / "sft")
    )
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


def test_a_killed_runs_unfinished_line_and_another_machines_folders_do_not_hinder_an_export(
    trained, tmp_path
):
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
    monkeypatch.setattr(shutil, "copyfile", lambda _, to: (to.touch(), 1 / 0))
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

    with pytest.raises(
        RewardFailure, match="all rewards failed, nothing was judged; the last reason: broken: OSError: away"
    ):
        evaluate_run(tmp_path / "run", ["a"], [RewardSpec(broken)])
    half = RewardSpec(
        lambda prompts, texts: [None if prompt == "a" else 1.0 for prompt in prompts], name="half"
    )
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


# --- folders that may be a stranger's ---

EVIL_MODEL = """
import os, pathlib
pathlib.Path(os.environ["MARK"]).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig): model_type = "evil"
class EvilModel(LlamaForCausalLM): config_class = EvilConfig
"""
EVIL_REWARD = """
import os, pathlib
pathlib.Path(os.environ["MARK"]).write_text("ran")
def score(prompts, completions): return [0.0] * len(prompts)
"""


@pytest.fixture
def stranger(tmp_path, tiny_folders, monkeypatch):
    """A run folder, a model with code of its own and a module beside it, as an archive from the net may
    hold them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    trainer = PPOTrainer(
        PPOConfig(tiny_folders["llama"], lora_r=2, rewards="ends_with_eos", max_new_tokens=4)
    )
    model = tmp_path / "model"
    shutil.copytree(tiny_folders["llama"], model)
    (model / "evil_code.py").write_text(EVIL_MODEL)
    maps = {"AutoConfig": "evil_code.EvilConfig", "AutoModelForCausalLM": "evil_code.EvilModel"}
    settings = json.loads((model / "config.json").read_text()) | {"model_type": "evil", "auto_map": maps}
    (model / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil_rewards.py").write_text(EVIL_REWARD)
    (tmp_path / "prompts.txt").write_text("a\nb\n")

    def make(name="run", **changes):
        folder = tmp_path / name
        trainer.save(folder)
        (folder / "metrics.jsonl").write_text('{"step": 1, "avg_reward": 0.0}\n')
        replace(trainer.config, **changes).to_yaml(folder / "config.yaml")
        return str(folder)

    return make


def refusal(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1].replace("'", "")  # as a shell would read it


@pytest.mark.parametrize("command", ["export", "eval", "compare"])
def test_code_of_a_checkpoint_runs_only_where_the_command_line_allows_it(stranger, tmp_path, command, capsys):
    run, other = (stranger(name, model_name="model", trust_remote_code=True) for name in ("run", "other"))
    scored = ["--data", "prompts.txt", "--rewards", "ends_with_eos"]
    words = {
        "export": ["export", run, str(tmp_path / "out"), "--merge"],
        "eval": ["eval", run, *scored],
        "compare": ["compare", run, other, *scored],
    }[command]
    assert "--trust-remote-code" in refusal(words, capsys)
    assert not (tmp_path / "mark").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
        main([*words, "--trust-remote-code"])
    assert (tmp_path / "mark").exists()


NAMED = [
    ({"rewards": "evil_rewards:score"}, "--rewards 1.0*evil_rewards:score,name=score"),
    (
        {"rewards": ("ends_with_eos", "0.5*evil_rewards:score")},
        "--rewards 1.0*ends_with_eos,name=ends_with_eos 0.5*evil",
    ),
    ({"judges": "evil_rewards:score"}, "--judges 1.0*evil_rewards:score"),
    (
        {"rewards": "http://127.0.0.1:9/score,token_env=HOME"},
        "--rewards 1.0*http://127.0.0.1:9/score",
    ),  # would be sent $HOME
]


@pytest.mark.parametrize(("settings", "flags"), NAMED)
def test_functions_and_servers_are_called_only_where_the_command_line_names_them(
    stranger, tmp_path, settings, flags, capsys
):
    run = stranger(**settings)
    assert flags in refusal(["eval", run, "--data", "prompts.txt"], capsys)
    with pytest.raises(ValueError, match="if you trust whoever made the run"):
        evaluate_run(run, ["a"])
    if "rewards" in settings:
        assert flags in refusal(
            ["compare", run, stranger("other", **settings), "--data", "prompts.txt"], capsys
        )
    main(["export", run, str(tmp_path / "out")])
    main(["report", run])
    told = repeat_commands(Run(run))
    assert f"--data HELD_OUT {flags}" in told.replace("'", "")
    assert told.index("# only if you trust whoever made the run") < told.index("proxima train")
    assert not (tmp_path / "mark").exists()
    given = ["--rewards", "ends_with_eos"] + (
        ["--judges", "evil_rewards:score"] if "judges" in settings else []
    )
    main(["eval", run, "--data", "prompts.txt", *given])
    assert (tmp_path / "mark").exists() == ("judges" in settings)


@pytest.mark.parametrize(
    ("settings", "warned"), [({"trust_remote_code": True}, True), ({"rewards": "ends_with_eos"}, False)]
)
def test_the_commands_of_a_report_are_for_those_who_trust_the_run_where_they_run_its_code(
    stranger, settings, warned
):
    told = repeat_commands(Run(stranger(**settings))).splitlines()
    caution = [line for line in told if line.startswith("# only if you trust whoever made the run")]
    assert bool(caution) == warned == any("--trust-remote-code" in line for line in told)
    if warned:
        assert told.index(caution[0]) < [line.startswith("proxima") for line in told].index(True)


def test_a_settings_file_alone_does_not_turn_remote_code_on(stranger, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model_name: model\ntrust_remote_code: true\nrewards: ends_with_eos\n")
    for command in ("train", "generate", "doctor"):
        assert "add --trust-remote-code" in refusal(
            [command, "--config", "run.yaml", "--data", "prompts.txt"], capsys
        )
    (tmp_path / "stage.yaml").write_text("model_name: model\ntrust_remote_code: true\n")
    assert "add --trust-remote-code" in refusal(
        ["sft", "--config", "stage.yaml", "--data", "prompts.txt"], capsys
    )
    assert parse(
        ["train", "--config", "run.yaml", "--data", "x", "--trust-remote-code"]
    ).ppo.trust_remote_code
    assert not (tmp_path / "mark").exists()


def test_an_export_copies_nothing_from_outside_the_run(stranger, tmp_path):
    run = stranger()
    (tmp_path / "secret").write_text("key")
    (tmp_path / "run" / "policy" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="leads out of the run"):
        export(run, tmp_path / "out")
