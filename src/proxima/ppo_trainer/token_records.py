"""What each token of a few samples was worth. In: a trainer, and samples. Out: plain records for
`runs/NAME/tokens/`.

`followed`: the same prompts at every evaluation, processed as in a step, but not trained on. Their
scores are not normalised and their advantages not whitened: over so few samples that would mean nothing.
`trained`: samples of the step's batch, with ratio and clipping as they are after its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from proxima.core.pairs import SAPairs, rejoin
from proxima.core.token_text import pieces
from proxima.ppo_trainer.reward_computer import Scores
from proxima.reward_kl import shape_scores
from proxima.training import clipped, policy_ratio

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

COLUMNS = {"logprob": "logprob_policy"} | {
    name: name
    for name in (
        "logprob_ref",
        "kl",
        "reward",
        "value",
        "td_error",
        "advantage",
        "return",
        "ratio",
        "clipped",
    )
}
FROM_SCORE = ("reward", "td_error", "advantage", "return")  # without a score they mean nothing
DIGITS = 6  # of a number in a file


def followed_records(trainer: PPOTrainer, rollout: SAPairs, scores: Scores) -> list[dict[str, Any]]:
    """Records of a rollout that nothing is trained on."""
    assert rollout.tokens is not None
    config, failed = trainer.config, scores.total.isnan()
    known = Scores(
        scores.sequence.nan_to_num(),
        None if scores.token is None else scores.token.nan_to_num(),
        scores.by_name,
    )
    shaped = shape_scores(
        known.sequence, rollout.tokens.ended.cpu(), config.missing_eos_penalty, clip=config.clip_rewards
    )
    pairs = trainer.kl_divergence.add_kl_to_sa_pairs(rollout)
    rewards = known.placed(shaped, rollout.mask)
    pairs = trainer.reward_adjuster.adjust_rewards_with_kl(pairs, rewards, trainer.kl_coef)
    pairs = trainer.value_adder.add_values_to_sa_pairs(rejoin(pairs, rollout))
    pairs = trainer.advantages_of(rejoin(pairs, rollout))
    unknown = failed.to(pairs.mask.device).unsqueeze(1)
    pairs = pairs.with_columns(
        **{name: pairs.column(name).masked_fill(unknown, math.nan) for name in FROM_SCORE}
    )
    by_name = {name: column.tolist() for name, column in scores.by_name.items()}
    return records(pairs, "followed", scores.total.tolist(), by_name)


def trained_records(trainer: PPOTrainer, outcome: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Records of the first `count` samples that a step trained on; their log-probabilities are scored once
    more."""
    good = [i for i, reward in enumerate(outcome["rewards"]) if not math.isnan(reward)][:count]
    pairs = outcome["sa_pairs"].select(torch.arange(len(good)))
    ratio = policy_ratio(
        trainer.generator.score(pairs.tokens)["logprob_policy"], pairs.column("logprob_policy")
    )
    held = clipped(ratio, pairs.column("advantage"), trainer.config.clip_epsilon)
    by_name = {name: [column[i] for i in good] for name, column in outcome["rewards_by_name"].items()}
    return records(
        pairs.with_columns(ratio=ratio, clipped=held),
        "trained",
        [outcome["rewards"][i] for i in good],
        by_name,
    )


def records(
    pairs: SAPairs, kind: str, rewards: Sequence[float], by_name: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """One record a sequence: texts, ids, and every number of every token."""
    tokens = pairs.tokens
    assert tokens is not None
    columns = {name: pairs.columns[own].cpu() for name, own in COLUMNS.items() if own in pairs.columns}
    ids, mask, ended = tokens.response_ids.cpu(), pairs.mask.cpu(), tokens.ended.tolist()
    rows = []
    for i, (prompt, text) in enumerate(zip(tokens.prompts, tokens.texts(), strict=True)):
        own = ids[i][mask[i]].tolist()
        rows.append(
            {
                "kind": kind,
                "prompt": str(prompt),
                "text": text,
                "reward": rounded(rewards[i]),
                "rewards": {name: rounded(column[i]) for name, column in by_name.items()},
                "ended": ended[i],
                "ids": own,
                "tokens": pieces(own, tokens.tokenizer.decode),
                "columns": {
                    name: [rounded(x) for x in column[i][mask[i]].tolist()]
                    for name, column in columns.items()
                },
            }
        )
    return rows


def sample_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a line of the small table."""
    shown = {name: record[name] for name in ("kind", "prompt", "text", "reward", "rewards", "ended")}
    return {**shown, "length": len(record["ids"]), "kl": rounded(math.fsum(record["columns"]["kl"]))}


def rounded(number: float) -> float | int:
    return int(number) if isinstance(number, (bool, int)) else float(f"{number:.{DIGITS}g}")
