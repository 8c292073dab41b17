"""Small tools for tests of the whole road."""

import torch

from proxima.ppo_trainer import PPOTrainer


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """All that training may change, as one vector a role."""
    roles = {"policy": trainer.models.policy, "value": trainer.models.value}
    return {name: torch.cat([p.detach().flatten().clone() for p in role.parameters()]) for name, role in roles.items()}


def shake(trainer: PPOTrainer, size: float = 0.05, seed: int = 1) -> PPOTrainer:
    """Move adapters and heads away from their start, so that roles differ from each other and from the base."""
    generator = torch.Generator().manual_seed(seed)
    for role in (trainer.models.policy, trainer.models.value):
        for parameter in role.parameters():
            parameter.data += size * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return trainer


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)
