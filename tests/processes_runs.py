"""What each process of `tests/runtime/test_processes.py` does. In: cases by name. Out: what the main process
saw of each, as JSON.

`torchrun --nproc_per_node=N tests/processes_runs.py MODELS OUT CASE...`; by itself it is the run on one
process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

STEPS = 3  # the first update, one that finds moments in the optimizer, one after the KL controller has moved
PROMPTS = [f"Post {i % 5}: " + "word " * (i % 5) + "TL;DR:" for i in range(12)]  # some twice in a batch


def count_e(prompts: list[str], texts: list[str]) -> list[float]:
    return [len(text.encode()) / 10 + text.count("e") for text in texts]


def some_fail(prompts: list[str], texts: list[str]) -> list[float | None]:
    """None for about a third of the texts, whoever asks."""
    return [None if hashlib.sha256(text.encode()).digest()[0] < 80 else len(text) / 10 for text in texts]


def each_token(prompts: list[str], texts: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    return [[0.01 * (token % 7) for token in ids] for ids in completion_ids]


def fails_on_the_second(prompts: list[str], texts: list[str]) -> list[float]:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the second process has no luck")
    return count_e(prompts, texts)


def env_turns(environments: list[Any], completions: list[str]) -> list[float]:
    return [env.turns + len(text) / 10 for env, text in zip(environments, completions, strict=True)]


class SomeFail:
    """Raises in about a third of its episodes, whoever asks."""

    def reset(self, seed: int) -> str:
        self.fails = seed % 3 == 0
        return f" level {seed % 7}:"

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.fails:
            raise RuntimeError("no luck")
        return " more", len(text.encode()) / 10, False


CASES: dict[str, dict[str, Any]] = {
    # settings of the config; `prompts` is the number per step, `doubt` the doubt_coef of a trained ensemble
    "lora": {},
    "lora-sharded": {"shard_base": True},
    "full": {"lora_r": 0},
    "full-sharded": {"lora_r": 0, "shard_base": True},
    "few-prompts": {"prompts": 3, "minibatch_size": 1},
    "few-prompts-sharded": {"prompts": 3, "minibatch_size": 2, "shard_base": True},
    "one-prompt-full-sharded": {"prompts": 1, "lora_r": 0, "shard_base": True},
    "kl-stop": {"kl_stop": 2e-3, "learning_rate": 1e-2},
    "adaptive": {"kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 20, "normalize_rewards": True},
    "budget": {"kl_controller": "budget", "kl_target": 0.5, "rewards": (each_token, count_e)},
    "ensemble": {"doubt": 2.0},
    "ensemble-sharded": {"doubt": 0.5, "kl_controller": "budget", "kl_target": 0.5, "shard_base": True},
    "failures": {"rewards": (some_fail,), "max_reward_failures": 0.9, "normalize_rewards": True},
    "token-rewards": {"rewards": (each_token, count_e)},
    "trunk": {"value_model": "policy"},
    "trunk-sharded": {"value_model": "policy", "shard_base": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "groups": {
        "adv_estimator": "grpo",
        "num_generations": 3,
        "prompts": 3,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
        "loss_weighting": "sequence",
        "rewards": (some_fail,),
        "max_reward_failures": 0.9,
    },
    "groups-full-sharded": {
        "adv_estimator": "rloo",
        "num_generations": 2,
        "prompts": 3,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
        "lora_r": 0,
        "shard_base": True,
    },
    "dr-grpo": {
        "adv_estimator": "dr_grpo",
        "num_generations": 2,
        "prompts": 3,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
        "loss_weighting": "horizon",
        "kl_loss_coef": 0.1,
        "kl_loss": "k3",
    },
    "reinforce": {
        "adv_estimator": "reinforce_plus_plus_baseline",
        "num_generations": 2,
        "prompts": 3,
        "value_learning_rate": 1e-4,
        "kl_loss_coef": 0.1,
        "kl_loss": "k2",
    },
    "reinforce-plain": {
        "adv_estimator": "reinforce_plus_plus",
        "num_generations": 2,
        "prompts": 3,
        "value_learning_rate": 1e-4,
    },
    "mask": {"importance_mode": "mask", "importance_low": 0.9, "importance_clip": 1.15},
    "sequence-mask": {"importance_mode": "sequence_mask", "importance_low": 0.99, "importance_clip": 1.01},
    "bootstrap": {"cut_responses": "bootstrap", "lam_alpha": 1.5, "value_epochs": 2, "objective": "dis"},
    "bootstrap-sharded": {
        "cut_responses": "bootstrap",
        "shard_base": True,
        "objective": "cispo",
        "loss_weighting": "horizon",
    },
    "episodes": {"environment": "tests.environments.games:Parity", "max_turns": 3, "discount": "turn"},
    "episodes-sharded": {
        "environment": "tests.environments.games:Gym",
        "max_turns": 3,
        "prompts": 3,
        "shard_base": True,
    },
    "episode-failures": {
        "environment": "tests.processes_runs:SomeFail",
        "max_reward_failures": 0.9,
        "max_turns": 2,
        "step_seconds": 20.0,
    },
    "episodes-read": {
        "environment": "tests.environments.games:Parity",
        "max_turns": 3,
        "rewards": (env_turns, count_e),
    },
    "top-p": {"top_k": 0, "top_p": 0.8},
    "all-tokens": {"top_k": 0, "top_p": 1.0, "buffer_sampling": "length_balanced"},
    "passes-of-one": {"micro_batch_size": 1, "shard_base": True},
    "untrained": {"rewards": (), "shard_base": True},
    "plain": {"engine": "plain", "gradient_checkpointing": True},
    "checkpointed-sharded": {"shard_base": True, "gradient_checkpointing": True, "micro_batch_size": 2},
    "checkpointed-full-sharded": {"lora_r": 0, "shard_base": True, "gradient_checkpointing": True},
    "experts": {"model": "mixture"},
    "gpt2-sharded": {"model": "gpt2", "shard_base": True},
    "llama-full-sharded": {"model": "llama", "lora_r": 0, "shard_base": True, "value_clip": 0.2},
}


def run_case(models: Path, name: str) -> dict[str, Any]:
    import torch

    from proxima.config import PPOConfig, RewardSpec
    from proxima.ppo_trainer import PPOTrainer
    from proxima.runs.glossary import is_defined
    from tests.helpers import on_another_engine

    settings = {
        "rewards": (count_e,),
        "minibatch_size": 3,
        "ppo_epochs": 2,
        "max_new_tokens": 6,
        "learning_rate": 1e-3,
        "value_learning_rate": 1e-3,
        **CASES[name],
    }
    count, model = settings.pop("prompts", 7), settings.pop("model", "qwen3")
    if doubt := settings.pop("doubt", None):
        settings["rewards"] = RewardSpec(str(models / "ensemble"), options={"doubt_coef": doubt})
    trainer = PPOTrainer(PPOConfig(str(models / model), **settings))
    if trainer.config.importance_mode != "truncate":
        on_another_engine(trainer)
    processes = trainer.models.processes
    assert processes.world_size == int(os.environ.get("WORLD_SIZE", "1"))
    steps = []
    for step in range(STEPS):
        batch = [PROMPTS[(step * count + i) % len(PROMPTS)] for i in range(count)]
        outcome = trainer.ppo_step(batch)
        numbers = {
            key: value for key, value in outcome.items() if is_defined(key) and not key.startswith("seconds")
        }
        assert outcome["sa_pairs"].tokens is not None
        tokens = [row[mask].tolist() for row, mask in zip(*_columns(outcome["sa_pairs"]), strict=True)]
        steps.append(
            {
                "numbers": numbers,
                "texts": outcome["generated_texts"],
                "rewards": outcome["rewards"],
                "tokens": tokens,
                "experts": _routing(outcome["sa_pairs"].tokens),
            }
        )
    roles = [role for role in (trainer.models.policy, trainer.models.value) if role is not None]
    weights = [p.detach() for role in roles for p in role.parameters()]
    held = sum(
        (p.to_local() if hasattr(p, "to_local") else p).numel()
        for p in trainer.models.sft.backbone.network.parameters()
    )
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]
    digest = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in whole)).hexdigest()
    assert len(set(processes.all_gather_object(digest))) == 1, "the replicas differ"
    norms = [float(torch.linalg.vector_norm(p.float())) for p in whole]
    del whole
    return {
        "world": processes.world_size,
        "steps": steps,
        "norms": norms,
        "reference_parameters_held": held,
        "tensor_bytes": processes.all_gather_object(tensor_bytes()),
    }


def tensor_bytes() -> int:
    """What all live tensors of this process hold: weights, gradients, moments, the last rollout."""
    import torch

    gc.collect()
    found = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            for tensor in (local, local.grad if local.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _columns(pairs: Any) -> tuple[Any, Any]:
    return pairs.tokens.response_ids, pairs.tokens.mask


def _routing(tokens: Any) -> list[Any] | None:
    """The experts of each sequence's tokens, prompt and response; None where none are recorded."""
    if tokens.experts is None:
        return None
    return [row[mask].tolist() for row, mask in zip(tokens.experts.whole, tokens.input_mask, strict=True)]


def main(models: str, out: str, *names: str) -> None:
    import torch

    from proxima.runtime.distributed import end_process, init_distributed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: run_case(Path(models), name) for name in names}
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    init_distributed().close()
    end_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
