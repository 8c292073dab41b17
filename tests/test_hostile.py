"""Hostile input, seen from outside: keys in addresses, terminal escapes, pipes, damaged files, halves of
characters, endless scripts. Each is refused in words, or does no harm."""

import gzip
import json
import logging
import math
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch

from proxima.base_setup import load_config, load_network, load_tokenizer
from proxima.cli import main, parse
from proxima.config import PPOConfig, RewardSpec
from proxima.config.secrets import hide_address, is_secret, shareable, shareable_words
from proxima.config.settings_base import read_yaml
from proxima.core.terminal_text import printable, visible, without_lone_surrogates
from proxima.data import BrokenData, check, open_rows, read_demonstrations, read_preferences, read_prompts
from proxima.pages.label import Item, Store, export, in_words, summarize
from proxima.pages.label.label_items import read_items
from proxima.pages.report import summary, write_report
from proxima.pages.web import Site
from proxima.pages.web import page_server as web_server
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.trainer_state import changed_settings
from proxima.rewards import READY_MADE
from proxima.rewards.endings import recorded_ending
from proxima.runs import Run
from proxima.runs.checkpoint import Checkpoints
from proxima.tools.migrate import migrate
from proxima.tools.model_export import export as export_model
from tests.fake_run import write_run
from tests.helpers import shake
from tests.rewards.test_reward_http import Server, answer, lengths

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
HALF = "\ud800"
KEY = "sk-SECRET-41c7"


def ends(arguments, capsys):
    """The exit code and everything that a command prints."""
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def steers(text):
    return any(letter in text for letter in "\x1b\x07\x9b\u202e")


# --- keys ---


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://a.org/score", "https://a.org/score"),
        ("https://a.org/score?api_key=K&model=m", "https://a.org/score?api_key=***&model=***"),
        ("https://a.org/score?K", "https://a.org/score?***"),
        ("https://a.org:8/s?a=K;b=K#K", "https://a.org:8/s?a=***;b=***#***"),
        ("https://me:K@a.org/s", "https://***@a.org/s"),
        ("https://[broken/?key=K", "https://[broken/?key=***"),
    ],
)
def test_an_address_is_shown_without_what_may_be_a_key(address, shown):
    assert hide_address(address) == shown


def test_options_are_known_by_their_names():
    assert all(
        map(
            is_secret,
            (
                *("api_key", "key", "hf_token", "token", "headers", "openai-api-key", "client_secret"),
                *("PASSWORD", "pwd", "db_pass", "passphrase", "jwt", "signature", "url_sig", "pem"),
                *("api_keys", "tokens", "access_tokens", "aws_access_key_id", "private_key_pem"),
            ),
        )
    )
    assert not any(
        map(
            is_secret,
            (
                *(
                    "token_env",
                    "send_ids",
                    "low",
                    "max_tokens",
                    "eos_token",
                    "stop_token",
                    "keyword",
                    "batch",
                ),
                *("eos_tokens", "stop_tokens", "prompt_tokens", "pass_rate", "compass", "monkeys"),
                *(each.name for each in fields(PPOConfig)),
                *(name for made in READY_MADE.values() for name in signature(made).parameters),
            ),
        )
    )


@pytest.mark.parametrize("name", ["pem", "cookie", "credential", "pwd", "sig", "url_tokens", "Access_Key_Id"])
def test_a_query_in_any_text_is_shown_without_its_keys(name):
    assert shareable(f"sent to /score?low=2&{name}={KEY}") == f"sent to /score?low=2&{name}=***"


@pytest.mark.parametrize("weight", ["", "0.5*", "-2e-1*"])
@pytest.mark.parametrize(
    "address",
    [f"https://h/score?api_key={KEY}", f"https://me:{KEY}@h/s?x={KEY};y={KEY}#{KEY}", "https://h/s"],
)
@pytest.mark.parametrize(
    "options",
    [
        *("", ",timeout=5", ",batch=4,name=judge,retries=0", f",timeout=5,api_key={KEY},send_ids=true"),
        *(f",token='{KEY} two',batch=4", ",eos=append,token_env=REWARD_TOKEN,x='a, b=c'"),
    ],
)
def test_what_follows_a_key_in_a_reward_is_kept(weight, address, options):
    """In a command line, a message and a settings file: the reward without its keys has its weight, its name
    and its other options, and it is known for the same reward when a run is resumed."""
    text = f"{weight}{address}{options}"
    given = RewardSpec.of(text)
    wanted = given.to_dict()
    assert KEY not in json.dumps(wanted)
    for hidden in (
        *shareable_words([text]),
        shareable_words([f"--rewards={text}"])[0].removeprefix("--rewards="),
        given.to_text(),
    ):
        assert KEY not in hidden
        assert RewardSpec.of(hidden).to_dict() == wanted
        assert RewardSpec.of(shareable(hidden)).to_dict() == wanted  # a message may be cleared twice
    before = {"rewards": [wanted]}
    assert changed_settings(before, PPOConfig(rewards=(given,))) == []
    other = RewardSpec.of(f"{text},concurrency=2")
    assert changed_settings(before, PPOConfig(rewards=(other,))) == ["rewards"]
    said = f"reward {text!r} is odd, see {text} or {text}, low=1"
    told = shareable(said)
    assert f"api_key={KEY}" not in told
    assert f"token='{KEY}" not in told
    assert told.count("timeout=5") == said.count("timeout=5")
    assert told.count("batch=4") == said.count("batch=4")


def test_a_key_is_used_but_reaches_nothing_that_a_run_leaves(tiny, tmp_path, monkeypatch, caplog, capfd):
    """Config, checkpoints, logs, trackers, results, report and model card; and the run can be resumed."""
    caplog.set_level(logging.DEBUG)
    paths = []

    def behave(handler, batch, number):
        paths.append(handler.path)
        answer(handler, {"rewards": lengths(batch)})

    server, told = Server(behave), []
    monkeypatch.setattr(
        "proxima.runs.run_writer.open_trackers",
        lambda names, path, settings, step: told.append(settings) or [],
    )
    settings = {
        "rewards": (f"{server.url}?api_key={KEY}&x={KEY}2", RewardSpec(with_key, options={"api_key": KEY}))
    }
    shape = {"batch_size": 2, "max_new_tokens": 3, "lora_r": 2, "checkpoint_every": 1, "ppo_epochs": 1}
    config = PPOConfig(
        tiny, run_dir=str(tmp_path), run_name="one", **settings, **shape, lr_schedule="constant"
    )
    PPOTrainer(config).train(["a", "b"], 1)
    assert f"/score?api_key={KEY}&x={KEY}2" in paths
    PPOTrainer(config).train(["a", "b"], 2, resume=True)
    assert Run(tmp_path / "one").last()["step"] == 2
    write_report(Run(tmp_path / "one"))
    export_model(tmp_path / "one", tmp_path / "card")
    server.close()
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == []
    assert told
    assert KEY not in str(told) + repr(config) + caplog.text + "".join(capfd.readouterr())
    with pytest.raises(
        ValueError, match=r"holds \*\*\*, for a key is not written down; give the reward again"
    ):
        PPOTrainer(PPOConfig.from_yaml(tmp_path / "one" / "config.yaml"))


def with_key(prompts, completions, api_key="none"):
    assert api_key == KEY
    return [0.0] * len(prompts)


def test_a_checkpoint_of_an_earlier_version_that_holds_a_key_is_still_resumed():
    address = f"http://127.0.0.1:9/score?api_key={KEY}"
    before = {"rewards": [{"source": address, "weight": 1.0, "name": "score"}], "seed": 0}
    assert changed_settings(before, PPOConfig(rewards=address)) == []
    assert changed_settings(before, PPOConfig(rewards=address.replace("score?", "other?"))) == ["rewards"]


def test_a_key_in_a_settings_file_is_taken_whole_and_messages_do_not_repeat_it(tmp_path, capsys):
    address = f"http://127.0.0.1:9/score?api_key={KEY}"
    (tmp_path / "run.yaml").write_text(f"rewards: ['{address}']\n")
    assert (
        parse(["train", "--config", str(tmp_path / "run.yaml"), "--data", "x"]).ppo.rewards[0].source
        == address
    )
    for reward in (f"nan*{address}", f"{address},timeout=none,token={KEY}", f"x*{address}"):
        code, shown = ends(
            ["train", "--model-name", "embedded", "--data", "no.txt", "--rewards", reward], capsys
        )
        assert code == 2
        assert KEY not in shown
    assert KEY not in ends(["train", "--config", str(tmp_path / "run.yaml"), "--help"], capsys)[1]


# --- terminals ---


def test_nothing_that_steers_a_terminal_is_left_and_line_breaks_and_joiners_are():
    assert visible("a\n\x1b[2J") == r"a\n\x1b[2J"
    assert (
        printable("a\n\tb\x1b[2J\r\u202e\u2028\ud800 👩\u200d🔬")
        == "a\n\tb\\x1b[2J\\r\\u202e\\u2028\\ud800 👩\u200d🔬"
    )


def test_generate_shows_escapes_instead_of_obeying_them(tiny, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": f"one {ESCAPE}\nmore"}) + "\n")
    code, shown = ends(
        ["generate", "--model-name", tiny, "--data", str(tmp_path / "p.jsonl"), "--max-new-tokens", "4"],
        capsys,
    )
    assert code == 0
    assert "one \\x1b]0;owned\\x07\\x1b[2J\\u202e\\x9b31m\nmore\n  -> " in shown
    assert not steers(shown)


@pytest.mark.parametrize("command", ["train", "reward", "data", "label"])
def test_errors_show_escapes_of_a_file_instead_of_obeying_them(tiny, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    Path("h.csv").write_text(f"foo{ESCAPE},bar\n1,2\n")
    folder = Path("f")
    folder.mkdir()
    (folder / f"x{ESCAPE}.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": 3}\n')
    for source in ("h.csv", "f"):
        words = {
            "train": ["train", "--model-name", tiny, "--data", source, "--rewards", "ends_with_eos"],
            "reward": ["reward", "--model-name", tiny, "--data", source],
            "data": ["data", "check", source],
            "label": ["label", "--pairs", source],
        }[command]
        code, shown = ends(words, capsys)
        assert code in (1, 2)
        assert not steers(shown)
        assert "\\x1b" in shown or command == "label" or (command, source) == ("reward", "f")


def test_warnings_logs_and_summaries_show_escapes_instead_of_obeying_them(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    folder = tmp_path / f"w{ESCAPE}"
    folder.mkdir()
    (tmp_path / "x.jsonl").rename(folder / "x.jsonl")
    code, shown = ends(
        ["generate", "--model-name", "no/such", "--data", str(folder), "--prompt", "a"], capsys
    )
    assert code == 2
    assert not steers(shown)
    store = Store(tmp_path / "f.db")
    store.add_items([Item("p", "a", "b", True, True, f"one{ESCAPE}", f"two{ESCAPE}")])
    store.add_answer(1, "Ann", "1")
    assert steers("".join(in_words(summarize(store))))
    code, shown = ends(
        ["label", "--db", str(tmp_path / "f.db"), "--export", str(tmp_path / "o.jsonl")], capsys
    )
    assert code == 0
    assert not steers(shown)


def test_names_of_files_and_folders_show_escapes_too(tmp_path, monkeypatch, capsys):
    """They come with an archive, and a shell completes them."""
    folder = write_run(tmp_path / f"run{ESCAPE}", 3)
    code, shown = ends(["report", str(folder)], capsys)
    assert (code, steers(shown)) == (0, False)
    assert "report.html" in shown
    pairs, controls = (tmp_path / f"{name}{ESCAPE}.jsonl" for name in ("pairs", "controls"))
    for path in (pairs, controls):
        path.write_text(json.dumps({"prompt": path.stem, "chosen": "a", "rejected": "b"}) + "\n")

    class Nothing:
        def run(self, sockets):
            pass

    monkeypatch.setattr(web_server, "_server", lambda app: Nothing())
    given = ["--db", str(tmp_path / "f.db"), "--pairs", str(pairs), "--controls", str(controls)]
    code, shown = ends(["label", *given], capsys)
    assert (code, steers(shown)) == (0, False)
    assert "items added" in shown
    assert "control questions added" in shown


def test_a_message_of_the_log_is_one_line_without_escapes(tmp_path):
    code = (
        "import logging, proxima.cli.command_line as cli\n"
        "from proxima.runs.run_writer import log_file\n"
        "from pathlib import Path\n"
        f"with log_file(Path({str(tmp_path / 'log.txt')!r})), cli._safe_log():\n"
        f"    logging.getLogger('proxima.x').warning('a\\nb %s', {ESCAPE!r})\n"
        "with cli._safe_log():\n"
        f"    logging.getLogger('proxima.x').warning('c\\nd %s', {ESCAPE!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    written = (tmp_path / "log.txt").read_text()
    for text in (written, done.stderr):
        assert not steers(text)
    assert len(written.splitlines()) == 1
    assert "c\\nd \\x1b" in done.stderr


# --- halves of characters ---

BAD_ROWS = [
    (read_prompts, {"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": f"a{HALF}b"}]}),
    (read_prompts, {"prompt": [{"role": "user", "content": "a"}]}, {"prompt": [{"role": f"user{HALF}", "content": "a"}]}),
    (
        read_demonstrations,
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": f"y{HALF}"}]},
    ),
    (
        read_preferences,
        {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "rejected": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": "z"}]},
        {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "rejected": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": "z", "tool_calls": [{"name": HALF}]}]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("read", "good", "bad"), BAD_ROWS)
def test_half_a_surrogate_pair_in_a_message_is_a_bad_row_with_its_line(
    chat_tokenizer, tmp_path, read, good, bad
):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, bad)))
    with pytest.warns(
        UserWarning, match=r"rows.jsonl: 2 of 3 rows are left out: 2 with half of a surrogate pair .*line 2"
    ):
        assert len(read(path, chat_tokenizer)) == 1
    for tokenizer in (None, chat_tokenizer):
        report = check(path, tokenizer)
        assert report.usable
        left_out = report.kinds[report.main].left_out["half of a surrogate pair in the text"]
        assert (left_out.count, left_out.first) == (2, f"{path}, line 2")
    path.write_text(json.dumps(bad) + "\n")
    with pytest.raises(BrokenData, match=r"half of a surrogate pair.*line 1"):
        read(path, chat_tokenizer)


@pytest.fixture
def chat_tokenizer(tiny):
    from proxima.base_setup.tokenizer_setup import load_tokenizer

    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    return tokenizer


def test_half_a_surrogate_pair_elsewhere_is_said_with_its_place(tmp_path, tiny, capsys):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "p", "a": HALF, "b": "b"}) + "\n")
    with pytest.raises(ValueError, match=r"pairs.jsonl, line 1: `a` holds half of a surrogate pair"):
        read_items(tmp_path / "pairs.jsonl", "pairs")
    code, shown = ends(["generate", "--model-name", tiny, "--prompt", os.fsdecode(b"\xff")], capsys)
    assert (code, "not UTF-8" in shown) == (2, True)


def test_a_folder_whose_name_is_not_text_can_be_worked_with(tmp_path):
    """Names of files are bytes; what cannot be printed is shown, after the work is done."""
    folder = write_run(tmp_path / os.fsdecode(b"r\xff"), 3)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent / "src"),
        "PYTHONIOENCODING": "ascii",
    }
    for words in (
        ["report", folder],
        ["compare", folder, write_run(tmp_path / "two", 3), "--out", folder / "c.html"],
    ):
        command = [sys.executable, "-m", "proxima", *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "\\udcff" in done.stdout
    assert {"report.html", "c.html"} <= {path.name for path in folder.iterdir()}


def test_settings_are_a_small_file(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "seed: " + "1:" * 200_000 + "1\n"
    )  # a number to the base 60 that takes minutes
    assert "that is not a file of settings" in str(within(20, read_yaml, tmp_path / "s.yaml"))


def test_a_run_with_halves_of_characters_is_reported_and_compared(tmp_path, capsys):
    """As JSON escapes, as raw bytes, in every file that a report reads."""
    one, two = write_run(tmp_path / "one", 3), write_run(tmp_path / "two", 3)
    for raw in (False, True):
        for name in ("results.json", "samples.jsonl", "warnings.jsonl", "environment.json", "data.json"):
            halves = dict.fromkeys(
                ("prompt", "text", "kind", "message", "stop_reason", "data", "git_commit"), f"p{HALF}"
            )
            text = json.dumps({"step": 1, "reward": 1, **halves}, ensure_ascii=not raw)
            (two / name).write_bytes(text.encode("utf-8", "surrogatepass") + b"\n")
        page = write_report(Run(two))
        assert "\ufffd" in page.read_bytes().decode()
        assert "\\ud800" in summary(Run(two)) or HALF not in summary(Run(two))
        main(["report", str(two)])
        main(["compare", str(one), str(two), "--out", str(tmp_path / "c.html")])
        (tmp_path / "c.html").read_bytes().decode()
    assert without_lone_surrogates(f"a{HALF}b😀") == "a\ufffdb😀"


# --- pipes, devices, damaged files ---


def within(seconds, function, *arguments):
    """What it returns or raises; a test that hangs would never end, so it runs in a thread that may be
    left behind."""
    outcome = []

    def call():
        try:
            outcome.append(function(*arguments))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"it still waits after {seconds} s"
    return outcome[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt", "x.csv", "x.jsonl.gz", "x.parquet"])
def test_a_pipe_or_a_device_as_data_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "device" / name):
        refusal = within(20, open_rows, path)
        assert isinstance(refusal, ValueError)
        assert f"{path} is a pipe or a device" in str(refusal)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_among_the_files_of_a_run_is_a_problem_and_not_a_wait(tmp_path):
    folder = write_run(tmp_path / "r", 3)
    names = [
        "metrics.jsonl",
        "samples.jsonl",
        "warnings.jsonl",
        "config.yaml",
        "results.json",
        "environment.json",
        "data.json",
    ]
    names += [".lock", "evaluation.json", "tokens/step-00000001.json"]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    run = Run(folder)
    for look in (
        run.metrics,
        run.samples,
        run.warnings,
        run.last,
        lambda: run.config,
        lambda: run.state,
        lambda: run.tokens(1),
    ):
        assert not isinstance(within(20, look), BaseException)
    assert any("metrics.jsonl" in problem for problem in run.problems)
    assert any("config.yaml" in problem and "a pipe or a device" in problem for problem in run.problems)
    assert "holds no run" in str(within(20, lambda: parse(["report", str(folder)]).run()))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_as_settings_or_script_is_refused_but_what_the_shell_has_opened_is_read(tmp_path):
    for name in ("s.yaml", "s.py"):
        os.mkfifo(tmp_path / name)
    assert "a pipe or a device" in str(within(20, read_yaml, tmp_path / "s.yaml"))
    assert "a pipe or a device" in str(within(20, migrate, str(tmp_path / "s.py")))
    reader, writer = os.pipe()
    os.write(writer, b"seed: 7\n")
    os.close(writer)
    assert read_yaml(f"/dev/fd/{reader}") == {"seed": 7}  # as --config <(command) gives it
    os.close(reader)


def replace_by_pipe(path, kind):
    """A named pipe, a link to an endless device, or a socket, in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)


MODEL_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
MODEL_FILES += ["generation_config.json", "chat_template.jinja", "additional_chat_templates/x.jinja"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_a_pipe_among_the_files_of_a_model_is_refused_at_once(tiny, tmp_path, name, kind):
    folder = Path(shutil.copytree(tiny, tmp_path / "m"))
    replace_by_pipe(folder / name, kind)
    config = PPOConfig(str(folder))
    for load in (
        lambda: load_tokenizer(str(folder)),
        lambda: load_config(str(folder)),
        lambda: load_network(config, str(folder), torch.device("cpu")),
    ):
        refusal = within(20, load)
        assert isinstance(refusal, ValueError)
        assert "is a pipe or a device" in str(refusal)
        assert name.split("/")[-1] in str(refusal)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "head.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_among_the_files_of_an_adapter_is_refused_at_once(make_config, tmp_path, name, kind):
    trainer = PPOTrainer(make_config())
    folder = trainer.models.value.save(tmp_path / "a")
    replace_by_pipe(folder / name, kind)
    again = PPOTrainer(make_config())
    for load in (
        lambda: again.models.value.load(folder),
        lambda: PPOTrainer(make_config(value_model=str(folder))),
        lambda: PPOTrainer(make_config(rewards=str(folder))),
        lambda: PPOTrainer(make_config(sft_adapter=str(folder))),
    ):
        refusal = within(30, load)
        assert isinstance(refusal, ValueError), refusal
        assert "\n" not in str(refusal)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["reward.json", "training_args.bin", "README.md"])
def test_a_pipe_beside_a_classifier_says_nothing_of_its_ending(tiny, tmp_path, name):
    folder = Path(shutil.copytree(tiny, tmp_path / "m"))
    replace_by_pipe(folder / name, "pipe")
    tokenizer, saved = load_tokenizer(tiny), load_config(tiny)
    assert not isinstance(within(20, recorded_ending, str(folder), saved, tokenizer, False), BaseException)


ENDLESS = r"((\w+)+\.?)+!"
"""An expression whose search in a module's name takes longer than anybody waits."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exclude_modules": ENDLESS}, "its exclude_modules is a regular expression"),
        ({"rank_pattern": {ENDLESS: 4}}, "its rank_pattern is not plain names"),
        ({"alpha_pattern": {ENDLESS: 4}}, "its alpha_pattern is not plain names"),
        ({"layers_pattern": [ENDLESS], "layers_to_transform": [0]}, "its layers_pattern is not plain names"),
        ({"peft_type": "LOHA"}, "PEFT's type 'LOHA'; only LoRA adapters"),
        ({"init_lora_weights": "pissa"}, "belongs to a changed base"),
        ({"lora_alpha": math.inf}, "its lora_alpha is inf"),
        ({"megatron_config": {"x": 1}, "megatron_core": "this"}, "megatron_core"),
        (None, "is not a JSON object"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_an_adapters_settings_ask_for_is_done_at_once_or_refused(make_config, tmp_path, change, reason):
    folder = PPOTrainer(make_config()).models.policy.save(tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text("[]" if change is None else json.dumps({**json.loads(path.read_text()), **change}))
    refusal = within(30, lambda: PPOTrainer(make_config(sft_adapter=str(folder))))
    assert isinstance(refusal, ValueError), refusal
    assert reason in str(refusal)
    assert "this" not in sys.modules


@pytest.mark.parametrize("expression", [ENDLESS, r".*\.(self_attn|mlp)\.\w+_proj"])
def test_an_adapter_whose_modules_are_described_is_loaded_by_its_weights(make_config, tmp_path, expression):
    trainer = shake(PPOTrainer(make_config(lora_targets="q_proj,down_proj")))
    folder = trainer.models.policy.save(tmp_path / "a")
    path = folder / "adapter_config.json"
    described = {**json.loads(path.read_text()), "target_modules": expression}
    path.write_text(json.dumps(described))
    again = within(30, lambda: PPOTrainer(make_config(sft_adapter=str(folder))))
    own = weights_of(trainer.models.policy)
    assert torch.equal(weights_of(again.models.policy), own)
    assert json.loads(path.read_text()) == described


def weights_of(role):
    return torch.cat([weight.detach().flatten() for weight in role.parameters()])


RUN_FILES = ["metrics.jsonl", "samples.jsonl", "warnings.jsonl", "log.txt", ".lock", "environment.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_in_a_run_that_is_continued_is_one_line(make_config, tmp_path, prompts, kind):
    config = make_config(run_name="r", checkpoint_every=1, batch_size=2)
    PPOTrainer(config).train(prompts[:2])
    run = tmp_path / "runs" / "r"
    for name in RUN_FILES:
        copy = Path(shutil.copytree(run, run.with_name(f"{kind}-{name}")))
        replace_by_pipe(copy / name, kind)
        trainer = PPOTrainer(replace(config, run_name=copy.name))
        refusal = within(60, partial(trainer.train, resume=True), prompts[:2])
        assert isinstance(refusal, ValueError), (name, refusal)
        assert f"{copy / name}: it is a pipe or a device" in str(refusal)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_in_a_checkpoint_is_a_damaged_checkpoint(make_config, tmp_path, prompts, kind):
    config = make_config(run_name="r", checkpoint_every=1, batch_size=2)
    PPOTrainer(config).train(prompts[:2])
    *others, newest = Checkpoints(tmp_path / "runs" / "r" / "checkpoints", 1).paths()
    for other in others:
        shutil.rmtree(other)
    kept = shutil.copytree(newest, tmp_path / "kept")
    for file in [path.relative_to(kept) for path in kept.rglob("*") if path.is_file()]:
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
        replace_by_pipe(newest / file, kind)
        found = Checkpoints(newest.parent, 1)
        assert within(20, found.newest) is None
        assert not isinstance(within(20, found.by_evaluation), BaseException)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "tokenizer.json", "extra.bin"])
def test_a_pipe_among_exported_files_is_refused(make_config, tmp_path, prompts, name):
    PPOTrainer(make_config(run_name="r", batch_size=2)).train(prompts[:2])
    run = tmp_path / "runs" / "r"
    replace_by_pipe(run / "policy" / name, "pipe")
    refusal = within(30, export_model, run, tmp_path / "out")
    assert isinstance(refusal, ValueError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.json.gz", "d.csv.gz", "d.txt.gz"])
def test_a_damaged_gz_is_named(tmp_path, name):
    """Whichever byte is wrong, it is read as it was or refused by name."""
    draw = random.Random(0)
    rows = [{"prompt": str(draw.random())} for _ in range(300)]
    plain = "".join(json.dumps(row) + "\n" for row in rows) if "jsonl" in name else json.dumps(rows)
    plain = "prompt\n" + "\n".join(row["prompt"] for row in rows) if "csv" in name or "txt" in name else plain
    whole, path, refused = gzip.compress(plain.encode()), tmp_path / name, 0
    for place in range(10, len(whole) - 8, 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        outcome = within(60, open_rows, path)
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, ValueError)
            assert str(path) in str(outcome)
            refused += 1
    assert refused > 10


# --- scripts without end ---

SHAPES = {
    "lists": ["a{i} = [a{j}, a{j}, a{j}, a{j}]", "lora_target_modules"],
    "dicts": ["a{i} = {{'x': a{j}, 'y': a{j}, 'z': a{j}}}", "lora_target_modules"],
    "sums": ["a{i} = a{j} + a{j}", "learning_rate"],
    "mixed": ["a{i} = (a{j}, -a{j}, [a{j} * a{j}])", "learning_rate"],
    "circle": ["a{i} = [a{j}, a0]", "learning_rate"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_names_that_refer_to_each_other_are_read_in_little_time(tmp_path, shape):
    line, setting = SHAPES[shape]
    chain = "\n".join(line.format(i=i, j=i + 1) for i in range(18))
    path = tmp_path / "old.py"
    path.write_text(
        f"from trl import PPOConfig, PPOTrainer\n{chain}\na18 = 0\nc = PPOConfig({setting}=a0, "
        "kl_coef=0.25)\n"
    )
    found = within(60, migrate, str(path))
    assert found.settings["kl_coef"] == 0.25


# --- permissions, process list ---


def test_what_label_exports_is_as_private_as_the_umask_says(tmp_path):
    store = Store(tmp_path / "f.db")
    store.add_items([Item("p", "a", "b")])
    store.add_answer(1, "Ann", "1")
    for mask, mode in ((0o077, 0o600), (0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            export(store, tmp_path / f"{mask}.jsonl")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{mask}.jsonl").stat().st_mode) == mode
    assert sorted(path.name for path in tmp_path.glob("*jsonl*")) == ["18.jsonl", "23.jsonl", "63.jsonl"]


@pytest.mark.parametrize("home", ["here", "missing", "unknown"])
def test_opening_the_page_shows_the_token_to_nobody_else(monkeypatch, tmp_path, home):
    """The browser is started with the name of a file that only this user can read; it leads on to the page.
    It lies in the home folder, not hidden: a browser in a sandbox reads no other place."""
    seen = {}
    places = {"here": tmp_path, "missing": tmp_path / "nothing"}
    if home == "unknown":
        monkeypatch.setattr(Path, "home", classmethod(no_home))
    else:
        monkeypatch.setenv("HOME", str(places[home]))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def browser(url):
        page = Path(url.removeprefix("file://"))
        seen.update(url=url, text=page.read_text(), mode=stat.S_IMODE(page.stat().st_mode), page=page)

    class Nothing:
        def run(self, sockets):
            assert seen["page"].exists()

    site = Site()
    monkeypatch.setattr(webbrowser, "open", browser)
    monkeypatch.setattr(web_server, "_server", lambda app: Nothing())
    web_server.serve(None, site, open_browser=True)
    assert signal.getsignal(signal.SIGTERM) is before
    site.socket.close()
    assert seen["page"].parent == (tmp_path if home == "here" else tmp_path / "temporary")
    assert not seen["page"].name.startswith(".")
    assert site.token not in seen["url"]
    assert f'url={site.url}"' in seen["text"]
    assert seen["mode"] == 0o600
    assert not seen["page"].exists()


def no_home(cls):
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_file_for_the_browser_is_gone_when_the_server_is_stopped(tmp_path, number):
    program = (
        "import webbrowser\nfrom proxima.cli import main\n"
        "webbrowser.open = lambda url: print(url, flush=True)\n"
        "main(['studio', '--run-dir', '.', '--open'])\n"
    )
    given = {**os.environ, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=given, stdout=subprocess.PIPE, text=True
    ) as studio:
        page = next(line.strip() for line in studio.stdout if line.startswith("file://"))
        assert Path(page.removeprefix("file://")).parent == tmp_path
        time.sleep(1)  # the server has begun
        studio.send_signal(number)
        studio.wait(20)
    assert not Path(page.removeprefix("file://")).exists()
