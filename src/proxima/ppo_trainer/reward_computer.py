"""`RewardComputer`: the weighted sum of all rewards, and what happens to samples whose reward failed (phase 3
of a PPO step). In: what was generated. Out: the weighted sum of all rewards, nan where one failed; and of
these, what PPO is given.

Where scores come from is in `proxima.rewards`. No failure is ever replaced by a number.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.json_record import Record
from proxima.core.ops import place_rewards
from proxima.core.pairs import TokenPairs
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Tokens, pad_to
from proxima.environments import EnvironmentReward
from proxima.models import ScoreUnit
from proxima.ppo_trainer.process_shares import own_share
from proxima.reward_kl import shape_scores
from proxima.rewards import (
    LARGEST,
    BestConstant,
    ChatReward,
    ClassifierSource,
    RewardOutcome,
    RewardSource,
    Samples,
    TrainedReward,
    VerifierReward,
    call_with_retries,
    counted,
    open_reward,
)
from proxima.runtime.distributed import Processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Scores of a batch: weighted sums, and each reward by name. nan where any reward failed."""

    sequence: Tensor  # (B,) the rewards that are one number per sequence
    token: Tensor | None  # (B, R) those that are one number per response token; None if there are none
    by_name: dict[str, Tensor]  # (B,) each, before its weight; per-token rewards added up
    spread: Tensor | None = None  # (B,) of ensembles, times their weights; nan where one failed
    failed_programs: Tensor | None = None  # (B,) 1 where a program came to no end; None where none are run

    @property
    def total(self) -> Tensor:
        return self.with_tokens(self.sequence)  # (B,)

    def with_tokens(self, scores: Tensor) -> Tensor:
        """Scores (B,) plus what each sequence's tokens earned by themselves."""
        return scores if self.token is None else scores + self.token.sum(1)

    def placed(self, shaped: Tensor, mask: Tensor) -> Tensor:
        """Rewards as the adjuster takes them: `shaped` (B,), or (B, R) with `shaped` added on each last
        real token."""
        if self.token is None:
            return shaped
        width = mask.shape[1]
        return self.token[:, :width] + place_rewards(shaped, mask.cpu(), self.token[:, :width])

    def select(self, rows: Tensor) -> Scores:
        token = None if self.token is None else self.token[rows]
        spread = None if self.spread is None else self.spread[rows]
        by_name = {name: each[rows] for name, each in self.by_name.items()}
        programs = None if self.failed_programs is None else self.failed_programs[rows]
        return Scores(self.sequence[rows], token, by_name, spread, programs)


def join_scores(scores: Scores, shape: torch.Size, processes: Processes) -> Scores:
    """The scores of a whole batch (B, R), from each process's own."""
    total, width = shape
    token = None
    if processes.all_reduce_max(int(scores.token is not None)):
        own = (
            torch.zeros(len(scores.sequence), 0, dtype=torch.float64)
            if scores.token is None
            else scores.token
        )
        token = processes.all_gather(pad_to(own, width), total)
    by_name = {name: processes.all_gather(each, total) for name, each in scores.by_name.items()}
    spread, programs = (
        None if each is None else processes.all_gather(each, total)
        for each in (scores.spread, scores.failed_programs)
    )
    return Scores(processes.all_gather(scores.sequence, total), token, by_name, spread, programs)


def _is_unit(recorded: object) -> bool:
    """Whether it is a mean and a deviation above 0."""
    return (
        isinstance(recorded, list)
        and len(recorded) == 2
        and all(isinstance(number, float) and math.isfinite(number) for number in recorded)
        and recorded[1] > 0
    )


def _is_ensemble(source: RewardSource) -> bool:
    return isinstance(source, TrainedReward) and source.model.heads > 1


class RewardComputer:
    """Adds up the configured rewards; without any, the reward model's untrained head stands in and says
    so."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.last_failure = ""
        self.units: dict[str, ScoreUnit] = {}  # of rewards whose own scale is arbitrary, by name
        self.rewards: list[tuple[RewardSpec, RewardSource]] = [
            (spec, open_reward(spec, models.reward, tokenizer, config, models.micro_batches))
            for spec in config.rewards
        ]
        self.rewards += [(spec, EnvironmentReward()) for spec in config.environment]
        if not self.rewards:
            warnings.warn(
                "no reward is configured: scores come from an untrained head and mean nothing; set `rewards`",
                stacklevel=2,
            )
            self.rewards = [
                (RewardSpec("untrained"), TrainedReward(models.reward, tokenizer, models.micro_batches))
            ]

    @property
    def reward_source(self) -> str:
        """Where the scores come from, for logs and results."""
        return ", ".join(spec.label for spec, _ in self.rewards)

    def describe(self, scores: Scores) -> Record:
        """`rewards`, `rewards_by_name` and `reward_source`, as plain values."""
        by_name = {name: column.tolist() for name, column in scores.by_name.items()}
        return {
            "rewards": scores.total.tolist(),
            "rewards_by_name": by_name,
            "reward_source": self.reward_source,
        }

    def check_columns(self, prompts: Sequence[str], first: int = 0) -> None:
        """A ValueError where a reward asks for a column that the prompts lack; it counts them from
        `first`."""
        for _, source in self.rewards:
            source.check(prompts, first)

    def best_constants(self, prompts: Sequence[str]) -> dict[str, BestConstant]:
        """Of each verifiable reward, the one answer that scores best on all of these prompts."""
        return {name: source.best_constant(prompts) for name, source in self.verifiers.items()}

    @property
    def verifiers(self) -> dict[str, VerifierReward]:
        return {spec.label: source for spec, source in self.rewards if isinstance(source, VerifierReward)}

    def keep_in(self, folder: Path) -> None:
        """Keep what judges say in this folder."""
        for _, source in self.rewards:
            if isinstance(source, ChatReward):
                source.keep_in(folder)

    def compute_rewards(
        self,
        prompts: Sequence[str],
        generated_texts: Sequence[str] | None = None,
        normalize: bool | None = None,
    ) -> list[float]:
        """One score per sequence, on prompt + generated text; nan where it failed. Per-token rewards are
        added up.

        Texts carry no token ids, so each counts as finished: a reward model reads the text as its own
        tokenizer writes it, and an EOS after it where the model was trained on texts that end with one.
        Inside `ppo_step` sampled ids are scored.

        Args:
            prompts: prompts; or, without `generated_texts`, the full texts.
            normalize: shift and scale over the batch; by default as the config says.
        """
        prompts = list(prompts)
        texts = [""] * len(prompts) if generated_texts is None else list(generated_texts)
        if len(prompts) != len(texts):
            raise ValueError(f"{len(texts)} generated texts for {len(prompts)} prompts")
        if not prompts:
            raise ValueError("there are no texts to score")
        scores = self.score(Samples.of_texts(prompts, texts, self.tokenizer))
        chosen = self.config.normalize_rewards if normalize is None else normalize
        shaped = shape_scores(scores.sequence, torch.ones(len(prompts), dtype=torch.bool), normalize=chosen)
        return scores.with_tokens(shaped).tolist()

    def score_pairs(self, pairs: TokenPairs) -> Scores:
        """Scores of a rollout, from its own token ids wherever a reward model has the policy's tokenizer."""
        return self.score_tokens(pairs.tokens)

    def score_tokens(self, tokens: Tokens) -> Scores:
        """The same of a rollout that is not pairs yet; several processes score their own rows, and all get
        all scores."""
        if self.models.processes.is_distributed:
            self.settle(Samples.of_tokens(tokens))
        own, self.last_failure = own_share(tokens, self.models.processes), ""
        scores = self.score(Samples.of_tokens(own))
        if not self.models.processes.is_distributed:
            return scores
        reasons = self.models.processes.all_gather_object(self.last_failure)
        self.last_failure = next((reason for reason in reasons if reason), "")
        for rank, reason in enumerate(reasons):
            if reason and rank != self.models.processes.rank:
                log.warning("reward failed in process %d: %s", rank, reason)
        return join_scores(scores, tokens.mask.shape, self.models.processes)

    def rows_to_train(self, rollout: TokenPairs, scores: Scores, step: int) -> tuple[Tensor, bool]:
        """The sequences whose rewards succeeded and which `cut_responses` does not leave out, and True; if it
        leaves out all, those whose rewards succeeded, and False: there is nothing to train on.

        A RewardFailure where no reward came, or more than `max_reward_failures` of them failed.

        Args:
            step: number of the PPO step, for the message.
        """
        known = ~scores.total.isnan()
        good = known.nonzero().flatten()
        count, limit = rollout.batch_size, self.config.max_reward_failures
        failed = count - len(good)
        if not len(good) or failed > limit * count:
            many = f"{failed} of {count}" if len(good) else f"all {count}"
            allowed = f" (max_reward_failures is {limit:g})" if len(good) else ""
            raise RewardFailure(
                f"{many} rewards of step {step} failed{allowed}, nothing was trained on it; "
                f"the last reason: {self.last_failure}"
            )
        if self.config.cut_responses == "leave_out":
            finished = (known & rollout.tokens.ended.cpu()).nonzero().flatten()
            if not len(finished):
                log.warning(
                    "step %d: no update, as none of %d responses finished (cut_responses leave_out)",
                    step,
                    count,
                )
                return good, False
            return finished, True
        return good, True

    def shape_rewards(self, rollout: TokenPairs, scores: Scores, normalize: bool | None = None) -> Tensor:
        """Scores as PPO sees them: (B,), or (B, R) where a reward is per token.

        Penalty, normalisation and clipping act on the part that is one number per sequence; per-token rewards
        stay as they are. Where cut responses are bootstrapped, a value takes the place of that number.

        Args:
            normalize: over the batch; by default as the config says.
        """
        config, ended = self.config, rollout.tokens.ended.cpu()
        shaped = shape_scores(
            scores.sequence,
            ended,
            config.missing_eos_penalty,
            config.normalize_rewards if normalize is None else normalize,
            config.clip_rewards,
        )
        if config.cut_responses == "bootstrap":
            shaped = torch.where(ended, shaped, 0.0)
        return scores.placed(shaped, rollout.mask)

    @property
    def has_spread(self) -> bool:
        """Whether a reward is an ensemble: the same in every process, whatever fails in one."""
        return any(_is_ensemble(source) for _, source in self.rewards)

    @property
    def runs_programs(self) -> bool:
        """Whether a reward runs the policy's programs: the same in every process too."""
        return any(isinstance(each, VerifierReward) and each.runs_programs for _, each in self.rewards)

    @property
    def classifiers(self) -> dict[str, ClassifierSource]:
        return {spec.label: source for spec, source in self.rewards if isinstance(source, ClassifierSource)}

    def settle(self, samples: Samples) -> None:
        """Choose how texts end for classifiers, where nothing says it: the main process does, for all."""
        processes = self.models.processes
        for source in self.classifiers.values():
            if source.ending is None:
                source.settles = not processes.is_distributed
                source.restore(processes.on_main(partial(source.chosen_state, samples)))

    def endings(self) -> Record:
        """How texts end for each classifier, as plain values."""
        return {name: source.state() for name, source in self.classifiers.items()}

    def restore_endings(self, endings: Record) -> None:
        for name, source in self.classifiers.items():
            source.restore(endings.get(name))

    def lacking_units(self) -> list[str]:
        """Names of the reward models whose unit has to be measured."""
        if self.config.reward_units == "raw":
            return []
        return [spec.label for spec, each in self.rewards if each.lacks_unit and spec.label not in self.units]

    def recorded_units(self) -> Record:
        """The measured units, as plain values."""
        return {name: [unit.mean, unit.deviation] for name, unit in self.units.items()}

    def restore_units(self, recorded: Record) -> None:
        """Use the units that a run measured, and no others."""
        known = recorded if self.config.reward_units == "standard" else {}
        self.units = {name: ScoreUnit(*unit) for name, unit in known.items() if _is_unit(unit)}

    def score(self, samples: Samples) -> Scores:
        if not len(samples):  # a process without a share
            nothing = torch.zeros(0, dtype=torch.float64)
            by_name = {spec.label: nothing for spec, _ in self.rewards}
            spread, programs = (nothing if has else None for has in (self.has_spread, self.runs_programs))
            return Scores(nothing, None, by_name, spread, programs)
        self.check_columns(samples.prompts)
        outcomes = [
            (spec, self._in_unit(spec.label, self._attempt(spec.label, source, samples)))
            for spec, source in self.rewards
        ]
        by_name = {
            spec.label: torch.tensor(outcome.totals, dtype=torch.float64) for spec, outcome in outcomes
        }
        sequence = torch.zeros(len(samples), dtype=torch.float64)
        token = torch.zeros(len(samples), max(samples.lengths), dtype=torch.float64)
        for spec, outcome in outcomes:
            sequence += spec.weight * torch.tensor(outcome.sequence, dtype=torch.float64)
            for row, numbers in outcome.token.items():
                token[row, : len(numbers)] += spec.weight * torch.tensor(numbers, dtype=torch.float64)
        sequence[self._failed_episodes(samples)] = torch.nan
        sequence[self._too_large(sequence, token)] = torch.nan
        per_token = any(outcome.token for _, outcome in outcomes)
        spread = self._spread(outcomes, len(samples))
        programs = torch.zeros_like(sequence) if self.runs_programs else None
        if programs is not None:
            for _, outcome in outcomes:
                programs[list(outcome.failed_programs)] = 1
        return Scores(sequence, token if per_token else None, by_name, spread, programs)

    def _spread(self, outcomes: Sequence[tuple[RewardSpec, RewardOutcome]], count: int) -> Tensor | None:
        """(B,) of all ensembles, each times its weight, as it lowers the score; nan where one failed."""
        if not self.has_spread:
            return None
        failed = [math.nan] * count
        rows = [
            (spec.weight, failed if outcome.spread is None else outcome.spread)
            for (spec, outcome), (_, source) in zip(outcomes, self.rewards, strict=True)
            if _is_ensemble(source)
        ]
        return torch.stack(
            [abs(weight) * torch.tensor(row, dtype=torch.float64) for weight, row in rows]
        ).sum(0)

    def _failed_episodes(self, samples: Samples) -> list[int]:
        """Rows that are left out whatever their rewards say: what they hold is not what was meant."""
        episodes = (samples.tokens and samples.tokens.episodes) or []
        rows = [row for row, episode in enumerate(episodes) if episode.failure]
        if rows and self.config.tools and not self.config.environment:  # whose reward reports it itself
            self.last_failure = f"tools: {counted([episodes[row].failure for row in rows])}"
            log.warning("%d of %d episodes failed: %s", len(rows), len(samples), self.last_failure)
        return rows

    def _too_large(self, sequence: Tensor, token: Tensor) -> Tensor:
        """(B,) where a sum or one of its parts is more than losses, in float32, can hold."""
        parts = torch.cat([sequence.unsqueeze(1), token, (sequence + token.sum(1)).unsqueeze(1)], dim=1)
        large = (parts.abs() > LARGEST).any(1)
        if large.any():
            self.last_failure = f"the weighted sum of rewards is larger than {LARGEST:g}"
            log.warning("%d of %d samples are left out: %s", large.sum(), len(large), self.last_failure)
        return large

    def _in_unit(self, name: str, outcome: RewardOutcome) -> RewardOutcome:
        if name not in self.units:
            return outcome
        scores = self.units[name](torch.tensor(outcome.sequence, dtype=torch.float64))
        return replace(outcome, sequence=scores.tolist())

    def _attempt(self, name: str, source: RewardSource, samples: Samples) -> RewardOutcome:
        """A call that raises is tried as often as its source says, then its samples are nan."""

        def warn(reason: str) -> None:
            log.warning("reward %s failed; retrying: %s", name, reason)

        outcome = call_with_retries(lambda: source(samples), len(samples), source.attempts, warn)
        if outcome.failures:
            self.last_failure = f"{name}: {outcome.reason}"
            log.warning(
                "reward failed for %d of %d samples: %s", outcome.failures, len(samples), self.last_failure
            )
        if programs := outcome.failed_programs:
            reasons = counted(list(programs.values()))
            log.warning(
                "reward %s: %d of %d programs failed and score 0: %s",
                name,
                len(programs),
                len(samples),
                reasons,
            )
        return outcome
