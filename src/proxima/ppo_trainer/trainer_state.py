"""A trainer's whole state: what a checkpoint saves and `--resume` restores.

In: a trainer. Out: weights and optimisers in a folder, the rest as plain values; and back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.config import PPOConfig, RewardSpec, current_names, declarations
from proxima.core.json_record import Record, RecordView, within
from proxima.ppo_trainer.batch_plan import BatchPlan
from proxima.runs.checkpoint import (
    Checkpoint,
    load_optimizer,
    load_random_state,
    random_numbers,
    save_optimizer,
    save_random_tensors,
    set_random_state,
)
from proxima.runtime.distributed import gather_full_tensors

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

log = logging.getLogger(__name__)


def plain_config(config: PPOConfig) -> Record:
    """The settings as a checkpoint holds them."""
    return json.loads(json.dumps(config.to_dict(), default=repr))


def changed_settings(before: Mapping[str, object], config: PPOConfig) -> list[str]:
    """Settings that differ from a checkpoint's; those it does not know are left out."""
    before, now = as_written_now(before, type(config)), plain_config(config)
    return [name for name in now if name in before and before[name] != now[name]]


def as_written_now(settings: Mapping[str, object], kind: type[PPOConfig]) -> Record:
    """A checkpoint's settings as they would be written now.

    Earlier versions had other names for some, and wrote keys of addresses down.
    """
    settings = current_names(kind, settings)
    named = {name: settings[name] for name in ("rewards", "judges") if name in settings}
    return {
        **settings,
        **{name: [RewardSpec.of(each).to_dict() for each in specs] for name, specs in named.items()},
    }


def plain_state(trainer: PPOTrainer) -> Record:
    budget = trainer.models.micro_batches
    return {
        "step": trainer.step,
        "total_steps": trainer.total_steps,
        "kl_coef": trainer.kl_coef,
        "kl_budget": trainer.kl_budget and trainer.kl_budget.state(),
        "rate_factor": trainer.rate_factor,
        "critic_is_ready": trainer.critic_is_ready,
        "micro_batches": [budget.size, budget.tokens],
        "endings": endings(trainer),
        "units": trainer.reward_computer.recorded_units(),
        "random": random_numbers(),
        "config": plain_config(trainer.config),
    }


def endings(trainer: PPOTrainer) -> Record:
    """How texts end for the classifiers among rewards and judges."""
    judges = {name: judge.endings() for name, judge in trainer.judges.scoring.items()}
    return {"rewards": trainer.reward_computer.endings(), "judges": judges}


def restore_endings(trainer: PPOTrainer, saved: object) -> None:
    """A resumed run ends texts as before, whatever it would choose now."""
    trainer.reward_computer.restore_endings(within(saved, "rewards"))
    for name, judge in trainer.judges.scoring.items():
        judge.restore_endings(within(within(saved, "judges"), name))


def save_tensors(trainer: PPOTrainer, folder: Path, whole: Callable[[Tensor], Tensor]) -> None:
    trainer.models.policy.save(folder / "policy", whole)
    save_optimizer(trainer.model_trainer.policy_optimizer, folder / "policy_optimizer.safetensors", whole)
    if trainer.models.value is not None and trainer.model_trainer.value_optimizer is not None:
        trainer.models.value.save(folder / "value", whole)
        save_optimizer(trainer.model_trainer.value_optimizer, folder / "value_optimizer.safetensors", whole)
    save_random_tensors(folder / "random.safetensors")


def put_state_together(trainer: PPOTrainer, optimizers: bool = True) -> Callable[[Tensor], Tensor]:
    """Called by all processes before the main process writes: the function gives the whole of a tensor
    that is sharded."""
    roles = (trainer.models.policy, trainer.models.value)
    tensors = [tensor for role in roles if role is not None for tensor in role.parameters()]
    if optimizers:
        for optimizer in (trainer.model_trainer.policy_optimizer, trainer.model_trainer.value_optimizer):
            states = [] if optimizer is None else optimizer.state_dict()["state"].values()
            tensors += [tensor for state in states for tensor in state.values()]
    return gather_full_tensors(tensors, trainer.models.processes)


def agree(trainer: PPOTrainer) -> None:
    """At a checkpoint: generators and micro-batches, which differ a little between processes, become what
    is written."""
    processes, budget = trainer.models.processes, trainer.models.micro_batches
    if not processes.is_distributed:
        return
    budget.size, budget.tokens = (
        processes.all_reduce_min(budget.size),
        processes.all_reduce_min(budget.tokens),
    )
    set_random_state(processes.on_main(lambda: {"torch": torch.get_rng_state().tolist(), **random_numbers()}))


def load_state(trainer: PPOTrainer, folder: Path, state: RecordView) -> None:
    """Weights, optimisers, random numbers and all plain values of a checkpoint."""
    trainer.load(folder)
    load_optimizer(trainer.model_trainer.policy_optimizer, folder / "policy_optimizer.safetensors")
    if trainer.model_trainer.value_optimizer is not None:
        load_optimizer(trainer.model_trainer.value_optimizer, folder / "value_optimizer.safetensors")
    load_random_state(folder / "random.safetensors", state["random"])
    restore_values(trainer, state)


def restore_values(trainer: PPOTrainer, state: RecordView) -> None:
    """What `plain_state` wrote, except for the random numbers; what a setting that the user changed decides
    is left as the config has it."""
    restore_endings(trainer, state.get("endings"))
    trainer.reward_computer.restore_units(within(state, "units"))
    changed = changed_settings(state["config"], trainer.config)
    trainer.step, trainer.rate_factor = state["step"], state["rate_factor"]
    trainer.critic_is_ready = state.get("critic_is_ready", trainer.critic_is_ready)
    if "kl_coef" not in changed or trainer.kl_budget:
        trainer.kl_coef = state["kl_coef"]
    if trainer.kl_budget and state.get("kl_budget"):
        trainer.kl_budget.restore(state["kl_budget"])
    if not {"micro_batch_size", "micro_batch_tokens"} & set(changed):
        budget = trainer.models.micro_batches
        budget.size, budget.tokens = state["micro_batches"]


def check_resumable(
    checkpoint: Checkpoint, config: PPOConfig, plan: BatchPlan, total: int, force: bool
) -> bool:
    """Refuse to resume with other prompts or, unless forced, with settings that alter what is computed;
    whether any changed."""
    state, now = checkpoint.state, plan.fingerprints
    then = state["fingerprints"]
    if then["prompts"] != now["prompts"]:
        counts = f"{then['prompts']['count']} then, {now['prompts']['count']} now"
        raise ValueError(
            f"{checkpoint.path} was trained on other prompts ({counts}); give the same data or start a new "
            "run"
        )
    changed = changed_settings(state["config"], config)
    before, declared = as_written_now(state["config"], type(config)), declarations(type(config))
    refused = [
        f"{name} ({before[name]!r} then, {getattr(config, name)!r} now)"
        for name in changed
        if declared[name].changes_results
    ]
    if then["validation"] != now["validation"]:
        refused.append("the validation prompts")
    if total != state["total_steps"] and config.lr_schedule != "constant":
        refused.append(
            f"the number of epochs, which shapes the learning rates ({state['total_steps']} steps then, "
            f"{total} now)"
        )
    if refused and not force:
        raise ValueError(
            f"resuming with other settings would be another run: {'; '.join(refused)}; change them back or "
            "add --force"
        )
    if refused:
        log.warning("resumed with other settings: %s", "; ".join(refused))
    another = any(declared[name].defines_experiment for name in changed)
    return another or bool(refused) or total != state["total_steps"]
