"""Small tools for tests of the whole pipeline."""

from dataclasses import replace

import torch

from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.model_trainer import ADAM_EPS
from proxima.training import add_importance_weights

LOGPROB_ROUNDING = (
    16 * 64 * 2.0**-24
)  # logits of a tiny model, over a temperature of 0.6, reach 12: 64 roundings of float32
GRADIENT_ROUNDING = 8 * 2.0**-24  # of a gradient's norm, which is clipped to 1: eight roundings of float32


class Crash(BaseException):
    """Ends a run as a kill does: nothing may be written any more."""


def crash_at(trainer: PPOTrainer, step: int) -> PPOTrainer:
    """Die in the middle of this step, after its update."""

    def die(_):
        if trainer.step == step:
            raise Crash

    trainer.generator.check_sampling_gap = die
    return trainer


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """All weights that training may change, as one vector per role."""
    roles = {"policy": trainer.models.policy, "value": trainer.models.value}
    return {
        name: torch.cat([p.detach().flatten().clone() for p in role.parameters()])
        for name, role in roles.items()
        if role is not None
    }


def shake(trainer: PPOTrainer, size: float = 0.05, seed: int = 1) -> PPOTrainer:
    """Move adapters and heads away from their initial values, so that roles differ from each other and from
    the base."""
    generator = torch.Generator().manual_seed(seed)
    for role in (trainer.models.policy, trainer.models.value):
        for parameter in role.parameters() if role else ():
            parameter.data += size * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return trainer


def on_another_engine(trainer: PPOTrainer) -> PPOTrainer:
    """As if another engine had sampled: log-probabilities are off by up to 0.2, by token, so that some
    importance weights are cut."""

    def weigh(rollout):
        tokens = rollout.tokens
        off = 0.1 * (tokens.response_ids % 5 - 2)
        tokens = replace(tokens, sampled_logprobs=rollout.column("logprob_policy") - off)
        config = trainer.config
        band = (config.importance_mode, config.importance_low, config.importance_clip)
        moved = type(rollout)(replace(rollout.storage, tokens=tokens))
        moved, cut = add_importance_weights(moved, *band, is_old=False)
        return moved, {"policy_lag": 0, "engine_retries": 0, "importance_truncated": cut}

    trainer.generator.add_importance_weights = weigh
    return trainer


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def rounding(trainer: PPOTrainer) -> float:
    """How far the order of sums alone may move a weight of this trainer.

    Adam divides a gradient by its own size plus ADAM_EPS: each step turns an error of the gradient into at
    most learning_rate * error / ADAM_EPS, and reaches that where the gradient itself is no larger than the
    error.
    """
    workers = trainer.model_trainer
    states = [
        state
        for optimizer in (workers.policy_optimizer, workers.value_optimizer)
        if optimizer is not None
        for state in optimizer.state.values()
    ]
    steps = max(int(state["step"]) for state in states)
    rate = max(trainer.config.learning_rate, trainer.config.value_learning_rate)
    return steps * rate * GRADIENT_ROUNDING / ADAM_EPS
