"""Rewards over HTTP against real servers, most of them misbehaving; and `proxima serve-reward`, as a
process of its own."""

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.types import Prompt
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples
from proxima.rewards import http_reward as endpoint
from proxima.rewards.http_reward import EndpointReward, is_loopback, retry_after
from proxima.rewards.reward_server import MAX_CONNECTIONS, MAX_SAMPLES, RewardServer, load_scorer
from tests.helpers import difference, shake, weights

ROOT = Path(__file__).parents[2]
TOKEN = "tok-3f9a71c0-secret"
PROMPTS = [f"prompt {i}" for i in range(8)]


def lengths(batch):
    return [float(len(text)) for text in batch["completions"]]


class Server:
    """A real server in threads; `behave(handler, batch, number)` answers its n-th request."""

    def __init__(self, behave):
        self.requests, self.headers, self.busy, self.busiest = [], [], 0, 0
        self.times, self._lock = [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(batch)
                    outer.headers.append(dict(self.headers))
                    outer.times.append(time.monotonic())
                    number = len(outer.requests)
                    outer.busy += 1
                    outer.busiest = max(outer.busiest, outer.busy)
                try:
                    behave(self, batch, number)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with outer._lock:
                        outer.busy -= 1

            def do_GET(self):
                outer.requests.append("GET")
                answer(self, {"rewards": [1.0] * 99})

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def answer(handler, reply, status=200, headers=()):
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def serve():
    servers = []

    def start(behave):
        servers.append(Server(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Back-off as in life, but shorter."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.02)


def good(handler, batch, number):
    answer(handler, {"rewards": lengths(batch)})


def samples(count=4, columns=None):
    prompts = [
        Prompt(f"p{i}", {name: values[i] for name, values in (columns or {}).items()}) for i in range(count)
    ]
    return Samples(
        prompts, ["c" * (i + 1) for i in range(count)], [[7] * (i + 1) for i in range(count)], [True] * count
    )


def ask(server, count=4, **options):
    return EndpointReward(server.url, **{"timeout": 5.0, "retries": 1, **options})(samples(count))


# --- the form ---


def test_the_request_has_the_documented_form_and_scores_come_back_in_order(serve):
    server = serve(good)
    columns = {"answer": ["a", None, 3, float("nan")], "rare": [1, 2, 3, {"deep": [1]}]}
    reward = EndpointReward(server.url, batch=3)
    outcome = reward(samples(4, columns))
    assert outcome.sequence == [1.0, 2.0, 3.0, 4.0]
    first, second = sorted(server.requests, key=lambda batch: batch["prompts"])
    assert first == {
        "prompts": ["p0", "p1", "p2"],
        "completions": ["c", "cc", "ccc"],
        "ended": [True, True, True],
        "columns": {"answer": ["a", None, 3], "rare": [1, 2, 3]},
    }
    assert second["columns"] == {"answer": [None], "rare": [{"deep": [1]}]}
    assert server.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in server.headers[0]


def test_ids_are_sent_on_request_and_per_token_rewards_come_back(serve):
    def a_token(handler, batch, number):
        answer(
            handler, {"rewards": [[0.5] * len(ids) for ids in batch["completion_ids"][:-1]] + [[1.0] * 99]}
        )

    server = serve(a_token)
    outcome = ask(server, send_ids=True)
    assert server.requests[0]["completion_ids"] == [[7], [7, 7], [7, 7, 7], [7] * 4]
    assert server.requests[0]["ended"] == [True] * 4
    assert outcome.token == {0: [0.5], 1: [0.5] * 2, 2: [0.5] * 3}
    assert ask(server, send_ids=True, batch=2).token == {0: [0.5], 2: [0.5] * 3}  # each on its own sequence
    assert [math.isnan(score) for score in outcome.sequence] == [False, False, False, True]


def test_no_more_requests_are_under_way_than_asked_for(serve):
    def slow(handler, batch, number):
        time.sleep(0.05)
        good(handler, batch, number)

    for concurrency in (1, 3):
        server = serve(slow)
        assert ask(server, 12, batch=1, concurrency=concurrency).sequence == [float(i + 1) for i in range(12)]
        assert len(server.requests) == 12
        assert server.busiest == concurrency


# --- servers that misbehave, alone and in a run ---


def sleeps(handler, batch, number):
    time.sleep(1.5)
    good(handler, batch, number)


def trickles(handler, batch, number):
    """A byte now and then: no single read takes long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def closes(handler, batch, number):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [1')
    handler.close_connection = True


def hangs_up(handler, batch, number):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def huge(handler, batch, number):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(4000):
        handler.wfile.write(chunk)


def says(reply, status=200, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, batch, number: answer(
        handler, reply(batch) if callable(reply) else reply, status, headers
    )


# name: (what it does, attempts that are made with one retry, part of the reason)
BROKEN = {
    "sleeps": (sleeps, 2, "no whole reply within 0.5 s"),
    "trickles": (trickles, 2, "no whole reply within 0.5 s"),
    "500 forever": (says({}, 500), 2, "answered 500"),
    "503": (says(b"", 503, Retry_After="0"), 2, "answered 503"),
    "429 forever": (says({}, 429), 2, "answered 429"),
    "closes in mid-reply": (closes, 2, "connection failed"),
    "hangs up": (hangs_up, 2, "connection failed"),
    "401": (says(lambda batch: {"rewards": lengths(batch)}, 401), 1, "answered 401"),
    "404": (says({}, 404), 1, "answered 404"),
    "201": (says(lambda batch: {"rewards": lengths(batch)}, 201), 1, "answered 201"),
    "redirect": (says(b"", 307, Location="/elsewhere"), 1, "answered 307 (redirects are not followed)"),
    "not JSON": (says(b"<html>"), 1, "not JSON of the form"),
    "empty": (says(b""), 1, "not JSON of the form"),
    "not text": (says(b"\xff\xfe\x00"), 1, "not JSON of the form"),
    "deep JSON": (says(b"[" * 200_000), 1, "not JSON of the form"),
    "other JSON": (says({"scores": [1, 2]}), 1, "not JSON of the form"),
    "bare list": (says(lengths), 1, "not JSON of the form"),
    "a number": (says({"rewards": 3}), 1, "it returned a int"),
    "too few": (says(lambda batch: {"rewards": lengths(batch)[1:]}), 1, "rewards for"),
    "too many": (says(lambda batch: {"rewards": [*lengths(batch), 1.0]}), 1, "rewards for"),
    "none": (says({"rewards": []}), 1, "it returned 0 rewards"),
    "NaN": (says(lambda batch: {"rewards": [math.nan] * len(batch["prompts"])}), 1, "not a finite number"),
    "infinity": (
        says(lambda batch: {"rewards": [-math.inf] * len(batch["prompts"])}),
        1,
        "not a finite number",
    ),
    "null": (says(lambda batch: {"rewards": [None] * len(batch["prompts"])}), 1, "but None"),
    "strings": (says(lambda batch: {"rewards": ["1.0"] * len(batch["prompts"])}), 1, "a str"),
    "booleans": (says(lambda batch: {"rewards": [True] * len(batch["prompts"])}), 1, "but True"),
    "long integers": (says(lambda batch: {"rewards": [10**999] * len(batch["prompts"])}), 1, "a int"),
    "huge reply": (huge, 1, "longer than"),
    "compressed": (says(lambda batch: {"rewards": lengths(batch)}, Content_Encoding="gzip"), 1, "compressed"),
}


def test_the_docs_count_the_kinds_of_broken_server():
    page = ROOT / "docs" / "reliability.md"
    assert f"({len(BROKEN)} kinds of broken server:" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reply_is_nan_and_a_reason_and_is_asked_for_again_only_where_that_can_help(serve, name):
    behave, attempts, reason = BROKEN[name]
    server = serve(behave)
    start = time.monotonic()
    outcome = ask(server, timeout=0.5 if "within" in reason else 5.0)
    assert all(map(math.isnan, outcome.sequence))
    assert len(outcome.sequence) == 4
    assert reason in outcome.reason
    assert len(server.requests) == attempts
    assert "GET" not in server.requests
    assert time.monotonic() - start < 10


@pytest.fixture(scope="module")
def shared(tiny_folders, tmp_path_factory):
    """One trainer for many servers; its reward is opened anew for each."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "model_name": tiny_folders["qwen3"],
        "max_new_tokens": 4,
        "ppo_epochs": 1,
        "run_dir": str(folder),
    }
    return PPOTrainer(PPOConfig(**settings, rewards=("http://127.0.0.1:9/score",), learning_rate=1e-3))


def step_with(trainer, server, **options):
    spec, source = (
        RewardSpec(server.url),
        EndpointReward(server.url, **{"timeout": 5.0, "retries": 0, "batch": 2, **options}),
    )
    trainer.reward_computer.rewards = [(spec, source)]
    return trainer.ppo_step(PROMPTS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_batch_fails_alone_and_the_rest_of_the_step_trains(serve, shared, name):
    behave, _, reason = BROKEN[name]

    def for_some(handler, batch, number):
        (behave if "prompt 3" in batch["prompts"] else good)(handler, batch, number)

    before = weights(shared)
    results = step_with(shared, serve(for_some), timeout=1.0 if "within" in reason else 5.0)
    assert [i for i, reward in enumerate(results["rewards"]) if math.isnan(reward)] == [2, 3]
    assert results["failed_rewards"] == 2
    assert results["sa_pairs"].tokens.prompts == PROMPTS[:2] + PROMPTS[4:]
    expected = [float(len(text)) for text in results["generated_texts"]]
    assert [r for r in results["rewards"] if not math.isnan(r)] == expected[:2] + expected[4:]
    assert difference(before, weights(shared)) > 0


@pytest.mark.parametrize("name", ["500 forever", "closes in mid-reply", "NaN", "too few", "401", "strings"])
def test_a_server_that_never_answers_well_stops_the_step_and_nothing_is_trained(serve, shared, name):
    before, step = weights(shared), shared.step
    with pytest.raises(RewardFailure, match=rf"all 8 rewards of step {step + 1} failed") as problem:
        step_with(shared, serve(BROKEN[name][0]))
    assert BROKEN[name][2] in str(problem.value)
    assert difference(before, weights(shared)) == 0


def test_single_samples_may_be_null(serve, shared):
    def one_null(handler, batch, number):
        answer(handler, {"rewards": [None if prompt == "prompt 5" else 1.0 for prompt in batch["prompts"]]})

    results = step_with(shared, serve(one_null))
    assert [i for i, reward in enumerate(results["rewards"]) if math.isnan(reward)] == [5]


# --- trying again ---


@pytest.mark.parametrize(
    "first", ["500 forever", "503", "429 forever", "closes in mid-reply", "hangs up", "sleeps"]
)
def test_a_server_that_recovers_costs_nothing(serve, first):
    server = serve(
        lambda handler, batch, number: (BROKEN[first][0] if number < 3 else good)(handler, batch, number)
    )
    outcome = ask(server, retries=3, timeout=0.5)
    assert outcome.sequence == [1.0, 2.0, 3.0, 4.0]
    assert len(server.requests) == 3


def test_waits_double_with_jitter_and_are_as_long_as_the_server_asks(serve, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.2)
    server = serve(says({}, 500))
    ask(server, retries=2)
    first, second = server.times[1] - server.times[0], server.times[2] - server.times[1]
    assert 0.1 <= first < 0.35
    assert 0.2 <= second < 0.6
    server = serve(
        lambda handler, batch, number: (says({}, 429, Retry_After="1") if number == 1 else good)(
            handler, batch, number
        )
    )
    assert ask(server).sequence == [1.0, 2.0, 3.0, 4.0]
    assert server.times[1] - server.times[0] >= 1.0


def test_a_server_cannot_make_a_run_wait_forever(serve, monkeypatch):
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.2)
    server = serve(says({}, 503, Retry_After="86400"))
    start = time.monotonic()
    ask(server)
    assert time.monotonic() - start < 5
    assert retry_after("86400") == 86400
    assert 50 < retry_after(time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))) <= 60
    assert [retry_after(text) for text in ("", "soon", "-5", "1e9", "²", "nan")] == [0.0] * 6


def test_nobody_listening(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcome = EndpointReward(f"http://127.0.0.1:{port}/score", retries=1)(samples())
    assert all(map(math.isnan, outcome.sequence))
    assert outcome.reason == "the connection failed (ConnectError)"


# --- the token ---


def test_the_token_is_sent_and_is_written_nowhere(serve, make_config, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)

    def guarded(handler, batch, number):
        if number > 1:  # it even sends the token back
            return answer(
                handler,
                {"error": handler.headers["Authorization"]},
                401,
                {"X-Echo": handler.headers["Authorization"]},
            )
        return good(handler, batch, number)

    server = serve(guarded)
    spec = RewardSpec.of(f"{server.url},token_env=REWARD_TOKEN,retries=0")
    trainer = PPOTrainer(make_config(rewards=(spec,), batch_size=2, run_name="token", trackers="tensorboard"))
    with pytest.raises(RewardFailure) as problem:
        trainer.train(["a", "b", "c", "d"])
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    shown = (
        str(problem.value) + caplog.text + "".join(capfd.readouterr()) + repr(trainer.reward_computer.rewards)
    )
    shown += repr(vars(trainer.reward_computer.rewards[0][1])) + repr(trainer.config)
    assert "answered 401" in shown
    assert TOKEN not in shown
    files = [path for path in (tmp_path / "runs" / "token").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_a_token_is_not_sent_in_the_clear_to_another_machine(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    for host in ("example.org", "10.0.0.1", "127.0.0.1.example.org", "0.0.0.0"):
        with pytest.raises(ValueError, match="would go over plain http to") as problem:
            EndpointReward(f"http://{host}/score", token_env="REWARD_TOKEN")
        assert TOKEN not in str(problem.value)
        EndpointReward(f"http://{host}/score", token_env="REWARD_TOKEN", allow_insecure=True)
        EndpointReward(f"https://{host}/score", token_env="REWARD_TOKEN")
    for host in ("127.0.0.1:1", "localhost", "[::1]:8000", "127.9.9.9"):
        EndpointReward(f"http://{host}/score", token_env="REWARD_TOKEN")
    assert not is_loopback("localhost.example.org")


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "ümlaut"])
def test_a_token_that_cannot_be_sent_is_refused_at_the_start_without_showing_it(monkeypatch, value):
    monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ValueError, match=r"REWARD_TOKEN \(token_env\) holds no usable token") as problem:
        EndpointReward("http://127.0.0.1/score", token_env="REWARD_TOKEN")
    assert not value or value not in str(problem.value)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(serve(good)).sequence == [1.0, 2.0, 3.0, 4.0]


# --- a server that dies in mid-run ---

MORTAL = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        count = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompts"])
        body = json.dumps({"rewards": [1.0] * count}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def test_a_server_killed_in_mid_run_stops_it_with_the_weights_on_disk(make_config, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", MORTAL], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/score"
        trainer = PPOTrainer(
            make_config(rewards=(f"{url},retries=1",), batch_size=2, ppo_epochs=1, run_name="killed")
        )
        learned = []
        step = trainer.ppo_step

        def watched(prompts):
            if trainer.step == 2:
                process.send_signal(signal.SIGKILL)
                process.wait()
                learned.append(weights(trainer))
            return step(prompts)

        trainer.ppo_step = watched
        folder = tmp_path / "runs" / "killed"
        with pytest.raises(RewardFailure, match="all 2 rewards of step 3 failed") as problem:
            trainer.train([f"p{i}" for i in range(8)])
        assert str(folder) in str(problem.value)
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
        assert difference(learned[0], weights(trainer)) == 0
        again = PPOTrainer(make_config(sft_adapter=str(folder / "policy"), value_model=str(folder / "value")))
        saved, now = weights(again), weights(trainer)
        assert difference(saved, now) == 0
    finally:
        process.kill()
        process.wait()


# --- serve-reward ---


@pytest.fixture(scope="module")
def reward_folder(tiny_folders, tmp_path_factory):
    """A reward adapter with its head, as reward training would leave one."""
    trainer = shake(
        PPOTrainer(PPOConfig(model_name=tiny_folders["qwen3"], rewards=(lambda p, t: [0.0] * len(p),))),
        seed=11,
    )
    folder = tmp_path_factory.mktemp("trained") / "judge"
    trainer.models.value.save(folder)
    (folder / "reward.json").write_text('{"accuracy": 0.9}')
    return str(folder)


@pytest.fixture(scope="module")
def classifier_folder(tiny_folders, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("classifier") / "judge")
    AutoModelForSequenceClassification.from_pretrained(tiny_folders["llama"], num_labels=2).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(tiny_folders["llama"]).save_pretrained(folder)
    return folder


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


class Process:
    """`proxima serve-reward` on a free port; ready when made."""

    def __init__(self, *arguments, **variables):
        command = [sys.executable, "-m", "proxima", "serve-reward", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**variables)
        )
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.strip() == "ready":
                break
        self.url = next(
            (word.rstrip(",") for line in self.lines for word in line.split() if word.startswith("http://")),
            "",
        )

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.process.terminate()
        self.process.wait(10)


@pytest.mark.long
def test_train_against_serve_reward_from_the_command_line(tiny, reward_folder, tmp_path, forked):
    """As processes of their own, with a token; the scores of the run are those of the same model in this
    process."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(4))
    )
    secret = {"REWARD_TOKEN": TOKEN}
    with Process(
        "--model-name", tiny, "--reward", reward_folder, "--token-env", "REWARD_TOKEN", **secret
    ) as server:
        assert httpx.get(server.url.replace("score", "health"), trust_env=False, timeout=60).json() == {
            "name": "judge",
            "ready": True,
        }
        common = (
            sys.executable,
            "-m",
            "proxima",
            "train",
            "--model-name",
            tiny,
            "--data",
            "prompts.jsonl",
            "--max-new-tokens",
            "6",
            "--ppo-epochs",
            "1",
        )
        with_ids = f"{server.url},token_env=REWARD_TOKEN,send_ids=true"
        done = forked([*common, "--run-name", "served", "--rewards", with_ids], tmp_path, **secret)
        assert done.returncode == 0, done.stderr
        refused = forked([*common, "--run-name", "refused", "--rewards", server.url], tmp_path)
        assert refused.returncode == 2
        assert "answered 401" in refused.stderr
        assert not (
            tmp_path / "runs" / "refused"
        ).exists()  # the doctor's quick part saw it before the run began
        stopped = forked(
            [*common, "--run-name", "stopped", "--rewards", server.url, "--skip-checks"], tmp_path
        )
        assert stopped.returncode == 2
        assert "answered 401" in stopped.stderr
        assert "runs/stopped" in stopped.stderr
    [metrics] = [
        json.loads(line) for line in (tmp_path / "runs" / "served" / "metrics.jsonl").read_text().splitlines()
    ]
    samples = [
        json.loads(line) for line in (tmp_path / "runs" / "served" / "samples.jsonl").read_text().splitlines()
    ]
    samples = [sample for sample in samples if sample["kind"] == "trained"]
    local = PPOTrainer(PPOConfig(model_name=tiny, rewards=(reward_folder,), max_new_tokens=6))
    pairs, texts = local.generator.generate_sequences([sample["prompt"] for sample in samples])
    assert texts == [sample["text"] for sample in samples]
    assert [sample["reward"] for sample in samples] == pytest.approx(
        local.reward_computer.score_pairs(pairs).total.tolist(), abs=1e-5
    )
    assert metrics["failed_rewards"] == 0
    logs = "".join([*server.lines, done.stdout, done.stderr, refused.stderr, stopped.stderr])
    assert TOKEN not in logs
    assert not [
        path
        for path in (tmp_path / "runs").rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]


def test_an_interrupt_while_the_model_loads_ends_the_server_as_one_later_does(tiny, reward_folder):
    arguments = ("serve-reward", "--port", "0", "--model-name", tiny, "--reward", reward_folder)
    # a job that a shell put in the background ignores the signal, and so would all that it starts
    heard = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from proxima.cli "
        "import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", heard, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout.readline().strip().endswith("loading")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "proxima: interrupted"


def client(scorer_config, token=""):
    from fastapi.testclient import TestClient

    server = RewardServer("judge", lambda: load_scorer(scorer_config), token)
    server._scorer = server._load()
    return TestClient(server.app(), "http://127.0.0.1")


BATCH = {
    "prompts": ["Why? TL;DR:", "a longer prompt than that TL;DR:", "x"],
    "completions": [" because", " no.", " 日本"],
}


def test_served_scores_are_those_of_the_model_in_this_process(tiny, reward_folder, classifier_folder):
    for source in (reward_folder, f"{classifier_folder},label=1"):
        config = PPOConfig(model_name=tiny, rewards=(source,), micro_batch_size=2)
        served = client(config).post("/score", json=BATCH)
        assert served.status_code == 200
        computer = PPOTrainer(config).reward_computer
        assert served.json()["rewards"] == pytest.approx(
            computer.compute_rewards(BATCH["prompts"], BATCH["completions"]), abs=1e-5
        )


def test_served_ids_are_scored_with_their_eos_and_foreign_ids_are_refused(tiny, reward_folder):
    config = PPOConfig(
        model_name=tiny, rewards=(reward_folder,), temperature=5.0, top_k=0, top_p=1.0, max_new_tokens=12
    )
    trainer = PPOTrainer(config)
    pairs, _ = trainer.generator.generate_sequences([f"prompt {i}" for i in range(40)])
    given = Samples.of_tokens(pairs.tokens)
    assert 0 < sum(given.ended) < 40
    batch = {
        "prompts": given.prompts,
        "completions": given.completions,
        "completion_ids": given.completion_ids,
        "ended": given.ended,
    }
    served = client(config).post("/score", json=batch)
    expected = trainer.reward_computer.score_pairs(pairs).total
    torch.testing.assert_close(
        torch.tensor(served.json()["rewards"], dtype=torch.float64), expected, rtol=0, atol=1e-5
    )
    for ids in ([1], [-1], [10**6], given.completion_ids[1]):
        wrong = client(config).post(
            "/score", json={**batch, "completion_ids": [ids, *given.completion_ids[1:]]}
        )
        assert wrong.status_code == 422


def test_only_a_text_that_is_too_long_is_null(classifier_folder, tiny):
    config = PPOConfig(model_name=tiny, rewards=(f"{classifier_folder},label=0",))
    rewards = (
        client(config)
        .post("/score", json={"prompts": ["a", "x" * 400], "completions": ["b", "c"]})
        .json()["rewards"]
    )
    assert [reward is None for reward in rewards] == [False, True]


BAD_REQUESTS = [
    (b"<html>", 400),
    (b"[" * 200_000, 400),
    (b"[]", 422),
    (b"{}", 422),
    (b'{"prompts": []}', 422),
    (b'{"prompts": "a", "completions": "b"}', 422),
    (b'{"prompts": ["a"]}', 422),
    (b'{"prompts": ["a"], "completions": ["b", "c"]}', 422),
    (b'{"prompts": [1], "completions": ["b"]}', 422),
    (b'{"prompts": [""], "completions": ["b"]}', 422),
    (b'{"prompts": ["a"], "completions": [null]}', 422),
    (b'{"prompts": ["\\ud800"], "completions": ["b"]}', 422),
    (b'{"prompts": ["a"], "completions": ["b\\udfff"]}', 422),
    (b'{"prompts": ["a"], "completions": ["b"], "completion_ids": [[1]]}', 422),
    (b'{"prompts": ["a"], "completions": ["b"], "completion_ids": [[true]], "ended": [true]}', 422),
    (
        json.dumps({"prompts": ["a"] * (MAX_SAMPLES + 1), "completions": ["b"] * (MAX_SAMPLES + 1)}).encode(),
        413,
    ),
    (b" " * (17 * 2**20), 413),
]


@pytest.fixture(scope="module")
def guarded(classifier_folder):
    return client(PPOConfig(rewards=(f"{classifier_folder},label=0",)), TOKEN)


@pytest.mark.parametrize(("body", "status"), BAD_REQUESTS)
def test_a_request_that_cannot_be_scored_is_refused(guarded, body, status):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    reply = guarded.post("/score", content=body, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"]
)
def test_only_the_token_opens_the_server(guarded, sent):
    headers = {} if sent is None else {"Authorization": sent}
    assert guarded.post("/score", json=BATCH, headers=headers).status_code == 401
    assert guarded.post("/score", json=BATCH, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.get("/health").json() == {"name": "judge", "ready": True}


def test_a_form_of_a_web_page_is_refused(guarded):
    headers = {"Content-Type": "text/plain", "Authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/score", content=json.dumps(BATCH), headers=headers).status_code == 415


def test_while_the_model_loads_clients_are_told_to_come_back():
    from fastapi.testclient import TestClient

    app = TestClient(RewardServer("judge", lambda: lengths).app(), "http://127.0.0.1")
    assert app.get("/health").json() == {"name": "judge", "ready": False}
    reply = app.post("/score", json=BATCH)
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")


@pytest.mark.parametrize(
    "kind", ["qwen3", "gpt2"]
)  # rotary positions have no end of their own, learned ones do
def test_a_trained_model_reads_no_more_than_its_context(tiny_folders, tmp_path, kind):
    config = PPOConfig(model_name=tiny_folders[kind], rewards=(lambda p, t: [0.0] * len(p),))
    trainer = shake(PPOTrainer(config), seed=5)
    trainer.models.value.save(tmp_path / "judge")
    context, tokenizer = trainer.models.context_length, trainer.tokenizer
    app = client(PPOConfig(model_name=tiny_folders[kind], rewards=(str(tmp_path / "judge"),)))
    prompts = ["x " * context, "short", "x" * 3000]
    ids = [tokenizer(" y")["input_ids"]] * 2
    request = {"prompts": ["short"], "completions": [" y"], "ended": [False], "columns": {"a": [1]}}
    alone = app.post("/score", json=request).json()["rewards"]
    with_ids = {"completion_ids": [*ids, [ids[0][0]] * 4000], "ended": [False] * 3}
    for more in ({"ended": [False] * 3}, with_ids):
        completions = [" y", " y", tokenizer.decode([ids[0][0]] * 4000)]
        reply = app.post("/score", json={"prompts": prompts, "completions": completions, **more})
        assert reply.status_code == 200
        assert [reward is None for reward in reply.json()["rewards"]] == [True, False, True]
    assert reply.json()["rewards"][1] == pytest.approx(alone[0], abs=1e-5)


HOSTS = [
    ("127.0.0.1:8000", True),
    ("localhost", True),
    ("LOCALHOST:9", True),  # a tunnel has a port of its own
    ("[::1]:8000", True),
    ("evil.example:8000", False),
    ("127.0.0.1.evil.example", False),
    ("localhost.evil.example:80", False),
    ("evil.example:127.0.0.1", False),
    ("", False),
]


@pytest.mark.parametrize(("host", "passes"), HOSTS)
def test_without_a_token_a_foreign_name_of_this_machine_is_refused(host, passes):
    from fastapi.testclient import TestClient

    server = RewardServer("judge", lambda: lengths)
    server._scorer = lengths
    for app, right in ((server.app(), passes), (RewardServer("judge", lambda: lengths, TOKEN).app(), True)):
        assert (TestClient(app).get("/health", headers={"Host": host}).status_code == 200) == right
    reply = TestClient(server.app()).post("/score", json=BATCH, headers={"Host": host})
    assert reply.status_code == (200 if passes else 403)


def start(server):
    """The server in a thread; its URL and port."""
    lines = []
    threading.Thread(target=lambda: server.serve("127.0.0.1", 0, lines.append), daemon=True).start()
    while "ready" not in lines:
        time.sleep(0.01)
    url = next(word.rstrip(",") for word in lines[0].split() if word.startswith("http://"))
    return url, int(url.split(":")[2].split("/")[0])


def half_request(port):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nX-")
    return connection


def test_idle_connections_do_not_block_the_owner_of_a_server():
    url, port = start(RewardServer("judge", lambda: lengths))
    idle = [half_request(port) for _ in range(MAX_CONNECTIONS + 20)]
    try:
        for _ in range(3):
            assert httpx.post(url, json=BATCH, timeout=20, trust_env=False).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_connection_that_trickles_is_closed_in_time(monkeypatch):
    from proxima.pages.web import connections

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    _, port = start(RewardServer("judge", lambda: lengths))
    head = (
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        b"100\r\n\r\n"
    )
    for sent in (b"GET /hea", head):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(sent)
            assert is_closed_in_time(connection)


def is_closed_in_time(connection, seconds=20):
    """Whether the other side hangs up while one byte after the other is sent."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            connection.sendall(b"x")
            time.sleep(0.05)
    except OSError:
        return True
    return False


def test_a_request_that_takes_long_to_score_is_not_cut_off(monkeypatch):
    from proxima.pages.web import connections

    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.1)

    def slow(batch):
        time.sleep(0.5)
        return lengths(batch)

    url, _ = start(RewardServer("judge", lambda: slow))
    assert httpx.post(url, json=BATCH, timeout=20, trust_env=False).status_code == 200


def test_the_model_is_called_once_at_a_time():
    """Real server, real client with many requests at once."""
    busy, busiest = [], []

    def slow(batch):
        busy.append(1)
        busiest.append(len(busy))
        time.sleep(0.03)
        busy.pop()
        return lengths(batch)

    url, _ = start(RewardServer("slow", lambda: slow))
    assert EndpointReward(url, batch=1, concurrency=8)(samples(12)).sequence == [
        float(i + 1) for i in range(12)
    ]
    assert len(busiest) == 12
    assert max(busiest) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reward", "{judge}", "--host", "0.0.0.0"), "can be reached from other machines"),
        (("--reward", "{judge}", "--token-env", "NOT_SET"), "NOT_SET (--token-env) holds no token"),
        (("--reward", "my:function"), "takes a reward model's folder or Hub id"),
        (("--reward", "2*{judge}"), "weights belong to a run"),
        (("--reward", "{judge}", "--port", "0"), "has 2 labels"),
        (("--reward", "no/such-judge", "--port", "0"), "no/such-judge"),
        (("--reward", "{judge},label=1", "--port", "{taken}"), "ddress already in use"),
    ],
)
def test_mistakes_of_serve_reward_are_one_line(capsys, classifier_folder, arguments, message, monkeypatch):
    from proxima.cli import main

    monkeypatch.setattr(signal, "signal", lambda *given: None)  # uvicorn catches signals while it runs
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"{judge}": classifier_folder, "{taken}": str(taken.getsockname()[1])}
        for name, word in words.items():
            arguments = [argument.replace(name, word) for argument in arguments]
        with pytest.raises(SystemExit) as end:
            main(["serve-reward", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_port_that_cannot_be_had_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99999):
            with pytest.raises(
                ValueError, match=f"cannot listen at 127.0.0.1, port {port}: .*; try --port 0"
            ):
                RewardServer("judge", lambda: None).serve("127.0.0.1", port)
