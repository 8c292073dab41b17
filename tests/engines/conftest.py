"""Real vLLM servers for the tests beside this file."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from proxima.base_setup.loading import EMBEDDED

SETTINGS = """--dtype float32 --enforce-eager --gpu-memory-utilization 0.3 --kv-cache-memory-bytes 67108864
    --no-enable-chunked-prefill --max-num-batched-tokens 4096
    --enable-lora --max-lora-rank 16 --max-loras 2 --logprobs-mode processed_logprobs --enable-scale-out"""
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class VllmServer:
    """vLLM's own server as a process of its own; it can be killed and started again on the same port."""

    def __init__(self, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(EMBEDDED)]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port), *SETTINGS.split()],
                env={**os.environ, **ENVIRONMENT},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its engine is a process too; both go together
            )
        return self

    def wait(self, seconds=600):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
            try:
                if httpx.get(f"{self.url}/health", trust_env=False, timeout=60).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        raise AssertionError(f"the server is not ready: {self.log.read_text()[-3000:]}")

    def freeze(self):
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Two of them; a test that kills one starts it again."""
    folder = tmp_path_factory.mktemp("servers")
    both = [VllmServer(folder / f"{i}.log").start() for i in range(2)]
    try:
        yield [server.wait() for server in both]
    finally:
        for server in both:
            server.kill()
