"""What each token of a few samples was worth. In: a trainer, and samples. Out: plain records for
`runs/NAME/tokens/`.

`followed`: the same prompts at every evaluation, processed as in a step, but not trained on. Their
scores are not normalised and their advantages not whitened: over a few samples that would mean nothing.
`trained`: samples of the step's batch, with ratio and clipping as they are after its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from proxima.core.chat_turns import Turn, episode_turns, with_turns
from proxima.core.json_record import Record
from proxima.core.pairs import TokenPairs, rejoin
from proxima.core.token_text import pieces
from proxima.core.types import Tokens
from proxima.ppo_trainer.reward_computer import Scores
from proxima.training import Moved, policy_objective, policy_ratio

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


def followed_records(trainer: PPOTrainer, rollout: TokenPairs, scores: Scores) -> list[Record]:
    """Records of a rollout that nothing is trained on."""
    failed = scores.total.isnan()
    token = None if scores.token is None else scores.token.nan_to_num()
    known = Scores(scores.sequence.nan_to_num(), token, scores.by_name)
    rewards = trainer.reward_computer.shape_rewards(rollout, known, normalize=False)
    pairs = trainer.kl_divergence.add_kl_to_sa_pairs(rollout)
    pairs = trainer.reward_adjuster.adjust_rewards_with_kl(pairs, rewards, trainer.kl_coef)
    pairs = trainer.value_adder.add_values_to_sa_pairs(rejoin(pairs, rollout))
    estimated = trainer.estimate_advantages(rejoin(pairs, rollout), rewards)
    unknown = failed.to(estimated.mask.device).unsqueeze(1)
    shown = {
        name: estimated.column(name).masked_fill(unknown, math.nan)
        for name in FROM_SCORE
        if name in estimated.columns  # not every estimator has TD errors
    }
    by_name = {name: column.tolist() for name, column in scores.by_name.items()}
    return records(estimated.with_columns(**shown), "followed", scores.total.tolist(), by_name)


def trained_records(trainer: PPOTrainer, outcome: Record, count: int) -> list[Record]:
    """Records of the first `count` samples that a step trained on; their log-probabilities are scored once
    more."""
    good = outcome["trained_rows"][:count]
    pairs: TokenPairs = outcome["sa_pairs"].select(torch.arange(len(good)))
    logprobs = trainer.generator.score(pairs.tokens)["logprob_policy"]
    ratio = policy_ratio(logprobs, pairs.column("logprob_policy"))
    moved = Moved(
        logprobs, pairs.column("logprob_policy"), pairs.column("advantage"), pairs.tokens.sampled_logprobs
    )
    config = trainer.config
    _, held = policy_objective(config.objective, moved, config.clip_epsilon, config.clip_epsilon_high)
    by_name = {name: [column[i] for i in good] for name, column in outcome["rewards_by_name"].items()}
    return records(
        pairs.with_columns(ratio=ratio, clipped=held),
        "trained",
        [outcome["rewards"][i] for i in good],
        by_name,
    )


def records(
    pairs: TokenPairs, kind: str, rewards: Sequence[float], by_name: Mapping[str, Sequence[float]]
) -> list[Record]:
    """One record per sequence: texts, ids, and every number of every token; `observed` lists the places of
    tokens that the policy read and did not choose."""
    tokens = pairs.tokens
    columns = {name: pairs.columns[own].cpu() for name, own in COLUMNS.items() if own in pairs.columns}
    read = tokens.read.cpu()
    ended = tokens.ended.tolist()
    texts = tokens.texts()
    if tokens.holes is not None:  # what the policy did not choose has no numbers
        columns = {
            name: column.float().masked_fill(~tokens.holes, math.nan) for name, column in columns.items()
        }
    rows = []
    for i, prompt in enumerate(tokens.prompts):
        own, chosen = tokens.response_rows[i], _chosen(tokens, i)
        record = with_turns({"kind": kind, "prompt": prompt})
        rows.append(
            {
                **record,
                "prompt": str(prompt),
                "text": texts[i],
                "reward": rounded(rewards[i]),
                "rewards": {name: rounded(column[i]) for name, column in by_name.items()},
                "ended": ended[i],
                "ids": own,
                "tokens": _pieces(tokens, i),
                "observed": [place for place, is_own in enumerate(chosen) if not is_own],
                "columns": {
                    name: [rounded(x) for x in column[i][read[i]].tolist()]
                    for name, column in columns.items()
                },
            }
        )
    return rows


def sample_row(record: Record) -> Record:
    """A record as a line of the small table."""
    names = ("kind", "prompt", "turns", "text", "reward", "rewards", "ended")
    shown = {name: record[name] for name in names if name in record}
    observed = set(record["observed"])
    chosen = [place not in observed for place in range(len(record["tokens"]))]
    kl = [number for number, own in zip(record["columns"]["kl"], chosen, strict=True) if own]
    replies = episode_turns(record["tokens"], chosen)
    return {**shown, **with_replies(replies), "length": len(kl), "kl": rounded(math.fsum(kl))}


def trained_replies(outcome: Record, count: int) -> list[list[Turn]]:
    """The turns of a step's first responses; none where a response is one turn, or was not trained on."""
    tokens, places = outcome["sa_pairs"].tokens, {row: i for i, row in enumerate(outcome["trained_rows"])}
    if tokens.holes is None:
        return [[]] * count
    found = [places.get(row) for row in range(count)]
    return [[] if i is None else episode_turns(_pieces(tokens, i), _chosen(tokens, i)) for i in found]


def with_replies(replies: list[Turn]) -> Record:
    return {"replies": replies} if replies else {}


def _chosen(tokens: Tokens, row: int) -> list[bool]:
    """Of each response token, whether the policy chose it."""
    count = len(tokens.response_rows[row])
    return [True] * count if tokens.holes is None else tokens.holes[row, :count].tolist()


def _pieces(tokens: Tokens, row: int) -> list[str]:
    chosen = _chosen(tokens, row)
    ends = [place for place in range(1, len(chosen)) if chosen[place] != chosen[place - 1]]
    return pieces(tokens.response_rows[row], tokens.tokenizer.decode, ends)


def rounded(number: float) -> float | int:
    return int(number) if isinstance(number, (bool, int)) else float(f"{number:.{DIGITS}g}")
