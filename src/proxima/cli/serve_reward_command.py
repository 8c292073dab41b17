"""`proxima serve-reward`: a reward model over HTTP."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

from proxima.cli.command import Command
from proxima.config import PPOConfig, RewardSpec


@dataclass
class ServeReward(Command):
    """Serve a reward model over HTTP, for `--rewards http://...` of other runs."""

    example: ClassVar[str] = "proxima serve-reward --model-name embedded --reward runs/reward --port 0"
    writes: ClassVar[str] = "Nothing."
    guide: ClassVar[str] = "rewards.md"
    serves: ClassVar[str] = "130"

    reward: RewardSpec
    """Folder of a trained reward model, or folder or Hub id of a sequence classifier (with its options)."""
    model_name: str = PPOConfig.model_name
    """Base model of a trained reward adapter; not used for a classifier."""
    port: int = 8000
    """Port to listen on; 0 = any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Other machines can only reach it with a token."""
    token_env: str = ""
    """Name of the environment variable that holds the bearer token that clients must send."""
    device: str = "auto"
    """`auto` = cuda if there is one, else mps, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto = bfloat16 on cuda, float32 on cpu, on mps as a probe says."""
    micro_batch_size: int = 8
    """Sequences in one forward pass."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""

    def run(self) -> None:
        from proxima.rewards import RewardServer, check_exposure, load_scorer

        if self.reward.is_http or self.reward.is_function or self.reward.weight != 1:
            raise ValueError(
                "serve-reward takes a reward model's folder or Hub id; functions, URLs and weights belong "
                "to a run"
            )
        token = os.environ.get(self.token_env, "") if self.token_env else ""
        if self.token_env and not token:
            raise ValueError(f"the environment variable {self.token_env} (--token-env) holds no token")
        check_exposure(self.host, token)
        config = PPOConfig(
            model_name=self.model_name,
            rewards=(self.reward,),
            device=self.device,
            dtype=self.dtype,
            micro_batch_size=self.micro_batch_size,
            trust_remote_code=self.trust_remote_code,
        )
        server = RewardServer(self.reward.label, lambda: load_scorer(config, self._say), token)
        try:
            server.serve(self.host, self.port, self._say)
        except KeyboardInterrupt:
            if server.ready:
                raise
            print("proxima: interrupted", file=sys.stderr, flush=True)
            os._exit(130)  # torch ends the process with SIGABRT when Python ends while a thread loads a model

    def _say(self, line: str) -> None:
        print(line, flush=True)
