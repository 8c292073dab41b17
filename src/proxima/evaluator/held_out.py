"""Evaluation on held-out prompts during training: answers, rewards, KL, lengths.

In: a trainer and prompts. Out: its answers, what they measure, a few by token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import torch

from proxima.core.chat_turns import Turn
from proxima.core.json_record import Record
from proxima.core.types import Tokens
from proxima.evaluator.diversity import common_opening, copying, distinct, repetition
from proxima.evaluator.judges import OWN, compare_answers
from proxima.evaluator.win_rates import mean_interval, share_won
from proxima.ppo_trainer import Scores, followed_records
from proxima.rewards import Samples
from proxima.runs import rollout_metrics, score_metrics

if TYPE_CHECKING:
    from proxima.ppo_trainer import PPOTrainer

Kept = TypeVar("Kept")
Shown = TypeVar("Shown")

VALIDATION_STEP = -1  # its noise is a stream of its own, the same at every evaluation
FAST_BATCH = 256
SHOWN = ("kl", "kl_exact", "response_length", "eos_rate")
DECIDES_ANSWERS = (
    "model_name",
    "sft_adapter",
    "rewards",
    "judges",
    "temperature",
    "top_k",
    "top_p",
    "max_new_tokens",
    "seed",
)
OF_EPISODES = ("environment", "tools", "max_turns", "max_episode_tokens")


@dataclass(frozen=True)
class Answers:
    """One answer per prompt, and what they are worth."""

    prompts: list[str]  # as they were answered: an environment may have opened them
    texts: list[str]
    scores: dict[str, list[float]]  # by judge, the run's own rewards under `OWN`; nan where one failed
    measured: dict[str, float]  # by the names of the glossary
    records: list[Record]  # of the first few, token by token
    conversations: list[list[Turn]] = field(default_factory=list)  # of episodes, empty for other answers

    def asked(self, prompts: Sequence[str]) -> Sequence[str]:
        """The prompts; of episodes as their environments opened them."""
        return self.prompts if any(self.conversations) else prompts


def answer(trainer: PPOTrainer, prompts: Sequence[str], followed: int = 0) -> Answers:
    """Answers of the policy as it is now.

    Args:
        followed: answers, from the first on, whose every token is looked at.
    """
    records: list[Record] = []
    sums = dict.fromkeys(SHOWN, 0.0)
    collected = _Collected(trainer)
    for batch in _batches(trainer, prompts):
        pairs, _ = trainer.generator.generate_sequences(batch, VALIDATION_STEP)
        scores = collected.add(pairs.tokens)
        count = len(batch.prompts)
        if few := min(followed - len(records), count):
            rows = torch.arange(few)
            records += followed_records(trainer, pairs.select(rows), scores.select(rows))
        measured = rollout_metrics(pairs)
        sums = {name: sums[name] + measured[name] * count / len(prompts) for name in SHOWN}
    return collected.answers(sums, records)


def reference_answers(trainer: PPOTrainer, prompts: Sequence[str], group: int = 1) -> Answers:
    """Answers of the frozen reference with the same noise, however far the policy has gone.

    Args:
        group: equal prompts, one after the other, that meet the same environment.
    """
    collected = _Collected(trainer)
    sizes = ends = 0
    for batch in _batches(trainer, prompts, group):
        tokens = trainer.generator.sample_groups(batch, group, VALIDATION_STEP, reference=True)
        collected.add(tokens)
        sizes += int(tokens.mask.sum())
        ends += int(tokens.ended.sum())
    return collected.answers({"response_length": sizes / len(prompts), "eos_rate": ends / len(prompts)}, [])


class _Collected:
    """Texts and scores, batch by batch."""

    def __init__(self, trainer: PPOTrainer):
        self.trainer = trainer
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.conversations: list[list[Turn]] = []
        self.own_texts: list[str] = []  # without what an environment or a tool said
        self.own: list[Scores] = []
        self.judged: dict[str, list[float]] = {}

    def add(self, tokens: Tokens) -> Scores:
        scores = self.trainer.reward_computer.score_tokens(tokens)
        samples = Samples.of_tokens(tokens)
        judged = self.trainer.models.processes.on_main(lambda: self.trainer.judges.score(samples))
        self.prompts += samples.prompts
        self.texts += samples.completions
        self.conversations += samples.conversations
        self.own_texts += ["\n".join(turns) for turns in samples.own_turns]
        self.own.append(scores)
        for name, column in judged.items():
            self.judged.setdefault(name, []).extend(column)
        return scores

    def answers(self, measured: Mapping[str, float], records: list[Record]) -> Answers:
        total = torch.cat([item.total for item in self.own])
        by_name = {name: torch.cat([item.by_name[name] for item in self.own]) for name in self.own[0].by_name}
        varied = {f"distinct_{size}": distinct(self.own_texts, size) for size in (1, 2)} | {
            "repetition": repetition(self.own_texts),
            "common_opening": common_opening(self.own_texts),
            "copying": copying(self.prompts, self.own_texts),
        }
        numbers = {**score_metrics(total, by_name), **measured, **varied}
        scores = {OWN: total.tolist(), **self.judged}
        return Answers(self.prompts, self.texts, scores, numbers, records, self.conversations)


def _batches(trainer: PPOTrainer, prompts: Sequence[str], group: int = 1) -> Iterator[Tokens]:
    """Of the run's own size; more at once where the fast engine samples, which needs few passes for many
    prompts.

    Equal prompts are counted over all batches, so that no answer depends on the batches' size.
    """
    seen: dict[bytes, int] = {}
    fast = trainer.models.policy.backbone.generation is not None
    size = max(trainer.config.batch_size, FAST_BATCH if fast else 1)
    size = max(group, size - size % group)
    for start in range(0, len(prompts), size):
        part = [prompts[i] for i in range(start, min(start + size, len(prompts)))]
        yield trainer.generator.read_prompts(part, seen)


def win_rates(trainer: PPOTrainer, ours: Answers, theirs: Answers) -> dict[str, dict[str, float]]:
    """By judge, the run's own rewards under `OWN`: rate, low, high and the number of prompts it rests on."""
    texts, scores = (ours.texts, theirs.texts), (ours.scores, theirs.scores)
    judged = trainer.models.processes.on_main(
        lambda: list(compare_answers(trainer.judges.comparing, ours.prompts, texts, scores))
    )
    return {name: share_won(preferences, trainer.config.seed) for name, preferences in judged}


class HeldOut:
    """Called at an evaluation, it measures the held-out prompts; `records` are those of the last call.

    The reference answers once, at the first evaluation; its answers are part of a checkpoint. Where the
    policy is still the reference, its answers are the reference's.
    """

    def __init__(self, trainer: PPOTrainer, prompts: Sequence[str], fingerprint: str = ""):
        """
        Args:
            fingerprint: hash of the prompts, so that answers kept for other prompts are not taken for theirs.
        """
        self.trainer, self.prompts = trainer, list(prompts)
        self.records: list[Record] = []
        self.reference: Answers | None = None
        trainer.judges.check(self.prompts)
        settings = trainer.config.to_dict()
        names = DECIDES_ANSWERS + (OF_EPISODES if trainer.config.has_episodes else ())
        stamp = json.dumps([fingerprint, *(settings[name] for name in names)], default=repr)
        self.stamp = hashlib.sha256(stamp.encode()).hexdigest()

    def __call__(self) -> dict[str, float]:
        """Where too many rewards fail, the reward is nan: no evaluation."""
        config = self.trainer.config
        answers = answer(self.trainer, self.prompts, config.token_samples)
        self.records = answers.records
        if self.reference is None:
            models = self.trainer.models
            same = models.policy.is_still(models.sft)  # before the first update: the noise is the same, too
            self.reference = answers if same else reference_answers(self.trainer, self.prompts)
        measured = dict(answers.measured)
        too_many = measured["failed_rewards"] > config.max_reward_failures * len(self.prompts)
        numbers = [math.nan] * 3 if too_many else mean_interval(answers.scores[OWN], config.seed)
        named = dict(zip(("reward", "reward_low", "reward_high"), numbers, strict=True))
        known = [score for score in self.reference.scores[OWN] if not math.isnan(score)]
        named["reference_reward"] = fmean(known) if known else math.nan
        for name, rate in win_rates(self.trainer, answers, self.reference).items():
            by = f"/{name}" if name else ""
            named |= {
                f"win_rate{by}": rate["rate"],
                f"win_rate_low{by}": rate["low"],
                f"win_rate_high{by}": rate["high"],
            }
            if name:
                named[f"unjudged/{name}"] = len(self.prompts) - rate["prompts"]
        left_out = ("avg_reward", "reward_std", "kl_exact")
        shown = {**named, **{name: number for name, number in measured.items() if name not in left_out}}
        return self.trainer.models.processes.on_main(lambda: shown)

    def state(self) -> Record | None:
        """The reference's answers, as plain values; None before there are any."""
        if self.reference is None:
            return None
        return {
            "stamp": self.stamp,
            "texts": self.reference.texts,
            "scores": _each(self.reference.scores, lambda score: None if math.isnan(score) else score),
        }

    def restore(self, state: Record) -> None:
        """Answers that were kept under other settings or for other prompts are forgotten: the reference
        answers anew."""
        scores = _each(state["scores"], lambda score: math.nan if score is None else score)
        self.reference = (
            Answers(self.prompts, list(state["texts"]), scores, {}, [])
            if state["stamp"] == self.stamp
            else None
        )


def _each(columns: Mapping[str, Sequence[Kept]], change: Callable[[Kept], Shown]) -> dict[str, list[Shown]]:
    return {name: [change(number) for number in column] for name, column in columns.items()}
