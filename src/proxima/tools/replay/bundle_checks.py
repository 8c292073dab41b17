"""Whether a step can start from a bundle, perhaps a stranger's. In: a bundle, and the trainer it is loaded
into. Out: nothing, or an error of one line that names what is odd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from proxima.core.episode import Episode
from proxima.core.json_record import Record
from proxima.core.ops import turn_ends
from proxima.core.recorded_experts import RecordedExperts, expert_dtype, unrecorded
from proxima.core.types import Tokens
from proxima.ppo_trainer import PPOTrainer
from proxima.reward_kl import SHORTEST_LAG, KLBudget
from proxima.runs import Bundle


def check_weights(bundle: Bundle) -> None:
    """Weights and optimisers that a step can start from."""
    for name, tensor in bundle.tensors.items():
        if not name.startswith(("before/", "reference/")):
            continue
        positive = name.endswith((".step", ".exp_avg_sq"))
        if not tensor.isfinite().all() or (positive and (tensor < 0).any()):
            problem = "negative numbers" if tensor.isfinite().all() else "numbers that are not finite"
            raise ValueError(
                f"{bundle.path}: its tensor {name!r} holds {problem}, so no step can start from it; look at "
                "the recorded numbers with --show"
            )


def check_state(state: Record, bundle: Bundle) -> None:
    """Counts, numbers and answers of yes or no where the trainer has them."""
    passes, budget = state.get("micro_batches"), state.get("kl_budget")
    sizes = passes if isinstance(passes, list) and len(passes) == 2 and 0 not in passes else [None]
    counts = [(name, state.get(name)) for name in ("step", "first_step", "policy_lag")]
    counts += [("micro_batches", each) for each in sizes]
    if state.get("total_steps") is not None:
        counts.append(("total_steps", state["total_steps"]))
    odd = [name for name, value in counts if type(value) is not int or not 0 <= value < 2**53]
    odd += [name for name in ("kl_coef", "rate_factor") if not _is_number(state.get(name))]
    if type(state.get("critic_is_ready", True)) is not bool:
        odd.append("critic_is_ready")
    if budget is not None and not _is_budget(budget):
        odd.append("kl_budget")
    if odd:
        raise ValueError(f"{bundle.path}: its state cannot be restored: {odd[0]} is {state.get(odd[0])!r}")


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def _is_budget(value: object) -> bool:
    """Whether it is what `KLBudget.state` gives: numbers by name, None for what was not measured."""
    if not isinstance(value, dict) or not value.keys() <= {each.name for each in fields(KLBudget)}:
        return False
    known = [each for name, each in value.items() if name != "rising" and each is not None]
    lag = value.get("lag", SHORTEST_LAG)
    return (
        all(_is_number(each) and math.isfinite(each) for each in known)
        and _is_number(lag)
        and lag >= SHORTEST_LAG
        and type(value.get("rising", True)) is bool
    )


def check_tokens(tokens: Tokens, trainer: PPOTrainer, bundle: Bundle) -> None:
    """Ids that the model has, sequences without gaps that fit its context."""
    backbone = trainer.models.policy.backbone
    rows = backbone.network.get_input_embeddings().num_embeddings
    ids = [tokens.prompt_ids[tokens.prompt_mask], tokens.response_ids[tokens.read]]
    if tokens.kept is not None and tokens.kept.ids is not None:
        ids.append(tokens.kept.ids.clamp(min=0).flatten())
    problem = ""
    if any(len(each) and (int(each.min()) < 0 or int(each.max()) >= rows) for each in ids):
        problem = f"token ids outside the model's vocabulary of {rows}"
    elif (
        tokens.kept is not None
        and tokens.kept.bits is not None
        and tokens.kept.bits.shape[2] != -(-rows // 8)
    ):
        problem = "kept sets of another vocabulary"
    elif tokens.experts is not None and not _has_experts(tokens.experts, trainer):
        problem = "experts that the model does not have"
    elif (tokens.prompt_mask.int().diff(dim=1) < 0).any() or (tokens.read.int().diff(dim=1) > 0).any():
        problem = "gaps within sequences"
    elif not tokens.prompt_mask.any(1).all() or not tokens.read.any(1).all():
        problem = "sequences without tokens"
    elif tokens.observed is not None and (tokens.mask & tokens.observed).any():
        problem = "tokens both chosen and read"
    elif tokens.episodes and trainer.config.environment and not _has_turns(tokens, tokens.episodes):
        problem = "rewards of other turns than its episodes have"
    elif trainer.models.context_length is not None and tokens.longest > trainer.models.context_length:
        problem = "sequences longer than the model's context"
    if problem:
        raise ValueError(f"{bundle.path}: it holds {problem}, so it is not a step of this model")


def _has_turns(tokens: Tokens, episodes: Sequence[Episode]) -> bool:
    """Whether each episode that did not fail has a reward of each turn."""
    turns = turn_ends(tokens.mask).sum(1).tolist()
    return all(
        each.failure or len(each.rewards) == count for each, count in zip(episodes, turns, strict=True)
    )


def _has_experts(experts: RecordedExperts, trainer: PPOTrainer) -> bool:
    """Whether the model has these layers and experts, so that they can be replayed."""
    decoder = trainer.models.policy.backbone.decoder
    own = None if decoder is None else decoder.blocks[0].experts
    if decoder is None or own is None:
        return decoder is None  # the reference path replays none
    numbers = experts.whole
    known = (numbers < own.total) | (numbers == unrecorded(numbers.dtype))
    shape, dtype = (len(decoder.blocks), own.per_token), expert_dtype(own.total)
    return numbers.shape[2:] == shape and numbers.dtype == dtype and bool((known & (numbers >= 0)).all())
