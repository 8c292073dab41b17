"""The command line, run in this process: help, training end to end, settings, generation, errors,
trackers."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proxima.cli import main, parse
from proxima.cli.commands import COMMANDS
from proxima.config import PPOConfig, RewardSpec
from proxima.ppo_trainer import PPOTrainer

REWARD = "def length(prompts, texts):\n    return [float(len(text)) for text in texts]\n"
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
QUICK = ["--max-new-tokens", "3", "--batch-size", "2", "--ppo-epochs", "1", "--learning-rate", "0.02"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_reward.py").write_text(REWARD)
    (folder / "prompts.txt").write_text("first prompt\n\nsecond\\nwith a break\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "third"}\n{"prompt": "fourth", "extra": 1}\n')
    return folder


@pytest.fixture
def call(home, tiny, monkeypatch, capsys):
    """Run a command in the folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def train(call, tiny):
    return lambda *more: call("train", "--model", tiny, "--rewards", "cli_reward:length", *QUICK, *more)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert all(command in out for command in ("train", "generate", "demo"))


def test_train_help_lists_every_setting(call):
    code, out, _ = call("train", "--help")
    assert code == 0
    flags = {name.replace("_", "-") for name in PPOConfig().to_dict()}
    assert {flag for flag in flags if f"--{flag}" not in out and f"--no-{flag}" not in out} == set()
    assert all(flag in out for flag in ("--data", "--validation", "--epochs", "--config"))


def test_training_end_to_end_then_generation_with_its_adapter(call, train, home, tiny):
    code, out, err = train(
        "--data", "prompts.txt", "--run-name", "one", "--epochs", "3", "--validation", "prompts.jsonl"
    )
    assert code == 0, err
    assert "stopped: all epochs done" in out
    assert str(home / "runs" / "one") in out or "runs/one" in out
    metrics = metrics_of(home / "runs" / "one")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert all("reward/length" in line for line in metrics[1:])
    assert all("validation/reward" in line for line in metrics)
    samples = (home / "runs" / "one" / "samples.jsonl").read_text()
    assert "second\\nwith a break" in samples

    ask = ("generate", "--model-name", tiny, "--prompt", "first prompt", "--max-new-tokens", "8")
    with_adapter, without = call(*ask, "--adapter", "runs/one/policy"), call(*ask)
    assert with_adapter[0] == without[0] == 0
    assert with_adapter[1].startswith("first prompt\n  -> ")
    assert with_adapter[1] != without[1]  # so it was loaded
    assert call(*ask, "--adapter", "runs/one/policy") == with_adapter


def test_generation_reads_prompts_from_a_file_too(call, tiny):
    code, out, _ = call(
        "generate", "--model-name", tiny, "--prompt", "x", "--data", "prompts.jsonl", "--max-new-tokens", "1"
    )
    assert code == 0
    assert out.count("  -> ") == 3


def test_a_settings_file_gives_defaults_and_flags_win(call, train, home, tiny):
    settings = {
        "model_name": tiny,
        "rewards": [{"source": "cli_reward:length", "weight": 0.5, "name": "size"}],
        "max_new_tokens": 2,
        "batch_size": 1,
        "data": "prompts.jsonl",
        "run_name": "two",
    }
    (home / "settings.yaml").write_text(yaml.safe_dump(settings))
    code, _, err = call("train", "--config", "settings.yaml", "--batch-size", "2", "--ppo-epochs", "1")
    assert code == 0, err
    written = PPOConfig.from_yaml(home / "runs" / "two" / "config.yaml")
    assert (written.batch_size, written.max_new_tokens, written.rewards[0].weight) == (2, 2, 0.5)
    assert len(metrics_of(home / "runs" / "two")) == 1
    assert "reward/size" in metrics_of(home / "runs" / "two")[0]
    code, _, err = call(
        "train", "--config=runs/two/config.yaml", "--run-name", "again", "--data", "prompts.txt"
    )
    assert code == 0, err
    assert PPOConfig.from_yaml(home / "runs" / "again" / "config.yaml").to_dict() == written.to_dict() | {
        "run_name": "again"
    }


MISTAKES = [
    (("fly",), "unknown command 'fly'; the commands are demo, data, sft, label, reward, train,"),
    (("train", "--data", "prompts.txt"), "no reward is configured"),
    (("train", "--data", "no.txt", "--rewards", "cli_reward:length"), "no.txt"),
    (
        ("train", "--data", "prompts.txt", "--rewards", "cli_reward:none", "--model-name", "{tiny}"),
        "cli_reward:none",
    ),
    (("train", "--config", "missing.yaml"), "missing.yaml"),
    (("train", "--config"), "--config needs a file"),
    (("train", "--config", "wrong.yaml"), "did you mean 'batch_size'?"),
    (("train", "--config", "blank.yaml", "--data", "prompts.txt"), "rewards"),
    (("generate", "--model-name", "{tiny}"), "no prompts"),
    (("generate", "--model-name", "no/such-model", "--prompt", "x"), "no/such-model"),
    (("generate", "--model-name", "{tiny}", "--prompt", "x", "--adapter", "nowhere"), "nowhere"),
    (("demo", "--config", "wrong.yaml"), "batch_sizes"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_and_debug_raises(call, home, tiny, arguments, message):
    (home / "wrong.yaml").write_text("batch_sizes: 3\n")
    (home / "blank.yaml").write_text("rewards:\n")
    arguments = [argument.replace("{tiny}", tiny) for argument in arguments]
    code, _, err = call(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("proxima: ")
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(ValueError, match=message.split("; ")[0].replace("?", ".")):
        call(*arguments, "--debug")


def test_a_flag_out_of_range_exits_with_code_2_and_names_it(call):
    code, out, err = call("train", "--data", "prompts.txt", "--gamma", "1.5")
    assert code == 2
    assert "gamma (1.5) must be in [0, 1]" in " ".join((out + err).split())
    assert "Traceback" not in out + err


YAML_MISTAKES = [
    ("train", "data: [a, b]", "data (['a', 'b']) must be of type str"),
    ("train", "data: x\nlimit: '1'", "limit ('1') must be of type int"),
    ("train", "data: x\nepochs: true", "epochs (True) must be of type int"),
    ("train", "rewards: [{source: a:f, name: 3}]", "the name of a reward must be a text, got 3"),
    ("train", "a: " + "[" * 3000, "cannot read the settings"),
    ("train", "{{{", "cannot read the settings"),
    ("generate", "prompt: [1]", "prompt (1) must be a text"),
    ("export", "folder: 3", "folder (3) must be of type str"),
    ("label", "mode: fast", "mode ('fast') must be one of pairs, ratings"),
    ("serve-reward", "reward: 3", "a reward needs a source"),
]


@pytest.mark.parametrize(("command", "text", "message"), YAML_MISTAKES)
def test_a_setting_of_the_wrong_type_for_the_commands_own_flags_is_one_line(
    call, home, command, text, message
):
    (home / "own.yaml").write_text(text)
    code, _, err = call(command, "--config", "own.yaml")
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_a_settings_file_may_give_one_prompt_and_the_served_reward(home, monkeypatch):
    monkeypatch.chdir(home)
    (home / "own.yaml").write_text("prompt: hello\n")
    assert parse(["generate", "--config", "own.yaml"]).prompt == ("hello",)
    (home / "own.yaml").write_text("reward: runs/reward\n")
    assert parse(["serve-reward", "--config", "own.yaml"]).reward == RewardSpec("runs/reward")
    (home / "own.yaml").write_text("export: a.jsonl\nmode:\n")
    assert parse(["label", "--config", "own.yaml"]).export == Path("a.jsonl")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_it_takes(call, name):
    words = shlex.split(COMMANDS[name].example)
    assert words[:2] == ["proxima", name]
    assert isinstance(parse(words[1:]), COMMANDS[name])
    assert " ".join(COMMANDS[name].example.split()) in " ".join(call(name, "--help")[1].split())


def test_what_nobody_expected_is_one_line_and_exit_code_1(call, monkeypatch):
    def fail(self):
        raise KeyError("odd\nthing")

    monkeypatch.setattr(COMMANDS["demo"], "run", fail)
    code, _, err = call("demo")
    assert code == 1
    assert err == "proxima: 'odd\\nthing' (an unexpected KeyError; --debug shows the traceback)\n"
    with pytest.raises(KeyError):
        call("demo", "--debug")


def test_a_reader_that_went_away_is_not_an_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "proxima"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")
    process.stderr.close()


def test_a_warning_is_one_line_without_a_place_in_the_code(forked, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    words = ["generate", "--model", "embedded", "--data", "p.jsonl", "--max-new-tokens", "1"]
    done = forked([sys.executable, "-m", "proxima", *words], tmp_path)
    assert (
        done.stderr == "proxima: p.jsonl: 1 of 2 rows are left out: 1 with an empty prompt (first: line 2)\n"
    )


def test_the_folder_of_a_run_given_as_adapter_is_told_where_the_adapter_is(call, tiny, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "adapter_config.json").write_text("{}")
    code, _, err = call("generate", "--model", tiny, "--prompt", "x", "--adapter", tmp_path)
    assert code == 2
    assert f"did you mean '{tmp_path / 'policy'}'?" in err


# --- trackers ---


def test_tensorboard_files_hold_the_metrics(train, home):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, err = train("--data", "prompts.txt", "--run-name", "board", "--trackers", "tensorboard")
    assert code == 0, err
    events = EventAccumulator(str(home / "runs" / "board" / "tensorboard"))
    events.Reload()
    [line] = metrics_of(home / "runs" / "board")
    assert events.Scalars("avg_reward")[0].value == pytest.approx(line["avg_reward"])
    assert set(events.Tags()["scalars"]) == {name for name, value in line.items() if value is not None}


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_says_how_to_install_it_and_leaves_no_half_run(
    make_config, monkeypatch, tmp_path, package
):
    real = importlib.import_module

    def refuse(name, *rest):
        if package in name:
            raise ImportError(f"No module named {package!r}")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", refuse)
    settings = {"max_new_tokens": 1, "ppo_epochs": 1, "run_name": "same"}
    with pytest.raises(ValueError, match=f"pip install {package}"):
        PPOTrainer(make_config(trackers=package, **settings)).train(["a"])
    PPOTrainer(make_config(**settings)).train(["a"])  # the name is still free


def test_an_error_on_the_way_out_of_an_interrupt_is_an_interrupt(monkeypatch, capsys):
    """Python's import lock raises one now and then where Ctrl-C comes in the middle of an import."""

    def run(_):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr("proxima.cli.command_line._run", run)
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert (ended.value.code, capsys.readouterr().err) == (130, "proxima: interrupted\n")
