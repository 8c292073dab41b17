"""What rewards give to whole episodes. In: a trainer with an environment or tools, prompts. Out:
`RewardEvidence` of the weighted sum, which PPO maximises.

Scored are episodes of the policy, the same turns in the same environments again, and each trick, said at
every turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from proxima.core.episode import Conversation
from proxima.core.sampling import Sampling
from proxima.core.transcript import Transcript
from proxima.core.types import Tokens
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, counted
from proxima.tools.doctor.cheap_tricks import TRICKS, Answer, Writer
from proxima.tools.doctor.reward_checks import reads_episodes
from proxima.tools.doctor.reward_evidence import HONEST, Prober, RewardEvidence

Turn = list[int]


@dataclass(frozen=True)
class Script:
    """Says given turns; the last one of a row again and again."""

    turns: Sequence[Sequence[Turn]]

    def generate(self, prompts: Tokens, sampling: Sampling, conversation: Conversation) -> Tokens:
        transcript = Transcript(prompts, sampling, conversation)
        said, rows = [0] * len(prompts.prompts), list(range(len(prompts.prompts)))
        while rows:
            starts = transcript.starts(rows)
            room = (transcript.limits(starts) - starts).tolist()
            for row, size in zip(rows, room, strict=True):
                own = self.turns[row]
                transcript.end_turn(row, own[min(said[row], len(own) - 1)][:size])
                said[row] += 1
            rows = transcript.take_replies(wait=True)
        ids, chosen, observed = transcript.responses()
        return replace(prompts, response_ids=ids, mask=chosen, observed=observed)


def turns_of(tokens: Tokens) -> list[list[Turn]]:
    """The policy's own turns of each episode."""
    found = []
    for ids, chosen in zip(tokens.response_rows, tokens.mask.tolist(), strict=True):
        runs = groupby(zip(ids, chosen, strict=False), key=lambda each: each[1])
        found.append([[token for token, _ in run] for own, run in runs if own])
    return found


def play_all(trainer: PPOTrainer, prompts: Sequence[str], writer: Writer, step: int) -> dict[str, Samples]:
    """Episodes by what was said in them."""
    sampled = trainer.generator.sample(prompts, step)
    turns = turns_of(sampled)
    scripts = {"again": turns}
    honest = [Answer(prompt, own[0], True) for prompt, own in zip(sampled.prompts, turns, strict=True)]
    for trick in TRICKS:
        if len(answers := writer.play(trick, honest)) == len(honest):
            scripts[trick.name] = [[answer.ids] for answer in answers]
    played = {name: trainer.generator.play(prompts, Script(said), step) for name, said in scripts.items()}
    return {name: Samples.of_tokens(each) for name, each in {"samples": sampled, **played}.items()}


def episode_evidence(
    trainer: PPOTrainer, prompts: Sequence[str], writer: Writer, step: int
) -> RewardEvidence:
    """Of the weighted sum, minus the penalty of episodes that were cut; nan where an episode failed."""
    played = play_all(trainer, prompts, writer, step)
    rewards = [
        (spec, source, Prober(source, writer.samples)) for spec, source in trainer.reward_computer.rewards
    ]
    lengths = chosen_lengths(played["samples"])
    found = RewardEvidence("episodes", lengths=lengths, honest_are="episodes of the policy")
    for name, samples in played.items():
        outcomes = [(spec, source, prober.score(samples)[0]) for spec, source, prober in rewards]
        columns = [[spec.weight * score for score in outcome.totals] for spec, _, outcome in outcomes]
        lost = [math.nan if failure else 0.0 for failure in failures_of(samples)]
        costs = [0.0 if ended else trainer.config.missing_eos_penalty for ended in samples.ended]
        found.scores[name] = [
            math.fsum(scores) + nan - cost for *scores, nan, cost in zip(*columns, lost, costs, strict=True)
        ]
        failed = [each for each in failures_of(samples) if each]
        reasons = [
            each.reason for spec, source, each in outcomes if reads_episodes(spec, source) and each.reason
        ]
        if failed or reasons:
            found.failures[name] = counted(failed) if failed else "; ".join(reasons)
    found.scores[HONEST] = found.scores["samples"]
    return found


def failures_of(samples: Samples) -> list[str]:
    """Why each episode failed; empty where it did not."""
    episodes = (samples.tokens and samples.tokens.episodes) or []
    return [episode.failure for episode in episodes]


def chosen_lengths(samples: Samples) -> list[int]:
    """The policy's own tokens of each episode."""
    assert samples.tokens is not None
    lengths: list[int] = samples.tokens.mask.sum(1).tolist()
    return lengths
