"""A short run on a planted reward. In: a config and prompts. Out: `CanaryRun`, what it measured.

The planted reward is the share of a response's tokens that belong to a class of tokens which make up a third
of what the model writes; what an environment or tools wrote does not count. Its best value is 1, and a policy
that writes only such tokens, in their old proportions, needs ln 3 nats of KL per token. It has the mean and
the spread of the rewards that it stands in for.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

import torch
from torch import Tensor

from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import EngineFailure
from proxima.core.json_record import Record
from proxima.core.types import KeptSet, Tokens
from proxima.ppo_trainer import PPOTrainer
from proxima.reward_kl import shape_scores
from proxima.rewards import RewardOutcome, Samples
from proxima.runs import ROUNDING, numbers_of
from proxima.tools.doctor.reward_checks import is_flat

STEPS = 30  # within which the planted reward must rise
STANDSTILL = 4  # steps after which weights that have not changed will not change
RISE = 0.05  # by this much, of a share of about a third
CERTAIN = 4  # and by this many standard errors
RECENT = 3  # steps whose responses are compared with the first ones
CLASS_SHARE = 1 / 3
SCORED_ON, COMPARED_WITH = 32, 256  # responses that the rewards score, and that measure the share before
PLANTED_ON = 4096  # tokens that choose the class, of 32 to 256 responses: fewer, and it is theirs alone
PLANT_STEP = 1_000_033  # its noise: no step samples the same responses
FLAT = 0.1  # nats below the entropy of a uniform distribution; less, and a frozen head can prefer no token
NUDGE = 0.01  # added to every trained weight, to see whether anything depends on it


@dataclass
class PlantedReward:
    """offset + gain * share of the tokens, EOS apart, that belong to the class."""

    members: frozenset[int]
    eos_ids: tuple[int, ...]
    gain: float = 1.0
    offset: float = 0.0
    like_rewards: bool = True  # in mean and spread
    seen: list[list[float]] = field(default_factory=list)  # shares of each call's responses
    attempts = 1
    lacks_unit = False

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """It reads no columns."""

    def share(self, ids: Sequence[int]) -> float:
        written = [index for index in ids if index not in self.eos_ids]
        return sum(index in self.members for index in written) / max(1, len(written))

    def __call__(self, samples: Samples) -> RewardOutcome:
        self.seen.append([self.share(ids) for ids in samples.own_ids])
        return RewardOutcome([self.offset + self.gain * share for share in self.seen[-1]], {})


@dataclass
class CanaryRun:
    """What a run on the planted reward measured."""

    config: PPOConfig
    baseline: list[float]  # shares before anything is learned
    shaped: list[float]  # the rewards of these responses, as PPO sees them
    shares: list[list[float]] = field(default_factory=list)  # of each step's responses
    steps: list[dict[str, float]] = field(default_factory=list)  # each step's metrics
    trained: list[int] = field(default_factory=list)  # response tokens that each step trained on
    error: Exception | None = None  # what ended it
    weights_changed: bool = False
    moved: float = 0.0  # mean change of the log-probability of tokens written before, absolute
    towards: float = 0.0  # the mean change of the class's tokens less that of the others
    towards_error: float = 0.0  # its standard error
    unreached: float = 0.0  # share of the trained weights that no gradient has reached
    depends: bool = True  # whether log-probabilities change with the trained weights
    rounding: float = 1e-3  # of a log-probability
    like_rewards: bool = True  # whether the planted reward has the mean and spread of the configured ones

    @property
    def share(self) -> float:
        """Of the last few steps, without the first, which has learned nothing yet."""
        return fmean(self.recent) if self.recent else fmean(self.baseline)

    @property
    def recent(self) -> list[float]:
        return [share for step in self.shares[1:][-RECENT:] for share in step]

    @property
    def rose(self) -> bool:
        if not self.recent:
            return False
        rise, error = self.share - fmean(self.baseline), 0.0
        for shares in (self.recent, self.baseline):
            error += pstdev(shares) ** 2 / len(shares)
        return rise >= RISE and rise >= CERTAIN * math.sqrt(error)

    @property
    def kl(self) -> float:
        """Exact KL to the reference in the last step, nats per token."""
        return self.steps[-1]["kl_exact"] / max(1.0, self.steps[-1]["response_length"]) if self.steps else 0.0

    @property
    def kl_allowed(self) -> float:
        """What the best policy needs."""
        return -math.log(max(fmean(self.baseline), 1e-9))

    @property
    def is_far(self) -> bool:
        return not self.kl <= self.kl_allowed  # nan is far too

    @property
    def is_over(self) -> bool:
        """It has risen, or will not rise any more."""
        config, done = self.config, len(self.steps)
        done -= config.warmup_steps + config.critic_warmup_steps
        stands_still = done >= STANDSTILL and not self.weights_changed and not config.critic_warmup_until
        return self.rose or self.is_far or stands_still or is_flat(self.shaped) or done >= STEPS

    @property
    def passed(self) -> bool:
        return self.error is None and self.rose and not self.is_far


class NothingToPlant(ValueError):  # noqa: N818
    """The model writes too little that differs, or too much."""

    def __init__(self, message: str, advice: str):
        super().__init__(message)
        self.advice = advice


def cycled(prompts: Sequence[str], first: int, count: int) -> list[str]:
    return [prompts[(first + i) % len(prompts)] for i in range(count)]


def choose_class(rows: Sequence[Sequence[int]], eos_ids: Sequence[int]) -> frozenset[int]:
    """Tokens, the frequent ones first, that together make up about a third of these responses."""
    counts = Counter(index for row in rows for index in row if index not in eos_ids)
    room, members = CLASS_SHARE * counts.total(), set()
    for index, count in counts.most_common():
        if count <= room:
            members.add(index)
            room -= count
    return frozenset(members)


@torch.no_grad()
def check_flatness(trainer: PPOTrainer, written: Tokens) -> None:
    """Untrained weights write all tokens alike, and adapters under a frozen head hardly change that.

    The entropy is that before truncation: which few of many equal tokens top-k keeps says nothing.
    """
    vocabulary = trainer.models.policy.backbone.passes.vocabulary
    everything = torch.full((1, 1, -(-vocabulary // 8)), 255, dtype=torch.uint8, device=written.mask.device)
    whole = replace(written, kept=KeptSet(bits=everything.expand(*written.mask.shape, -1)))
    entropy = float(trainer.generator.score(whole)["entropy"][written.mask].mean())
    uniform = math.log(vocabulary)
    if uniform - entropy < FLAT:
        raise NothingToPlant(
            f"the model writes every token about equally often (an entropy of {entropy:.2f} nats before "
            f"truncation, where a uniform distribution has {uniform:.2f}), as untrained weights do: it can "
            "prefer none soon",
            "run it with the model that you will train; initializer_range 0.2 makes tiny random ones learn",
        )


def plant(trainer: PPOTrainer, written: Tokens, unit: bool) -> PlantedReward:
    """The reward for a class of these responses, with the mean and spread that the configured rewards have
    on the first of them.

    Args:
        unit: mean 0 and unit variance instead.
    """
    eos_ids, rows = trainer.models.eos_ids, Samples.of_tokens(written).own_ids
    planted = PlantedReward(choose_class(rows, eos_ids), eos_ids)
    shares = [planted.share(row) for row in rows]
    if is_flat(shares):
        raise NothingToPlant(
            f"{len(rows)} responses of the model hardly differ, so no reward for what they contain can be "
            "planted",
            "raise temperature, or top_k and top_p",
        )
    scores = [0.0]
    configured = trainer.config.rewards or trainer.config.environment
    if configured and not unit:
        few = first_rows(written)
        scores = trainer.reward_computer.score_tokens(few).total.tolist()
        scores = [score for score in scores if not math.isnan(score)]
        if not scores:
            why = trainer.reward_computer.last_failure
            raise ValueError(f"your rewards gave none of {len(few.prompts)} responses a score: {why}")
    mean, spread = (0.0, 1.0) if is_flat(scores) else (fmean(scores), pstdev(scores))
    planted.like_rewards = unit or not configured or not is_flat(scores)
    planted.gain = spread / pstdev(shares)
    planted.offset = mean - planted.gain * fmean(shares)
    return planted


def first_rows(written: Tokens) -> Tokens:
    """As many as the rewards score."""
    return written.select(torch.arange(min(SCORED_ON, len(written.prompts)), device=written.mask.device))


@torch.no_grad()
def logprobs_of(trainer: PPOTrainer, written: Tokens) -> Tensor:
    return trainer.generator.score(written)["logprob_policy"]


def fingerprint(trainer: PPOTrainer) -> list[float]:
    """Changes with the trained weights."""
    return [float(weight.detach().float().norm()) for weight in trainer.model_trainer.policy_parameters]


def run_canary(config: PPOConfig, prompts: Sequence[str], unit: bool = False) -> CanaryRun:
    """Up to `STEPS` PPO steps, and those of warm-ups; it ends when the reward has risen or the KL is too
    high."""
    gc.collect()  # a trainer before this one may still hold memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the doctor's other checks report the same
        trainer = PPOTrainer(replace(config, trackers=()))
        try:
            return run_on(trainer, prompts, unit)
        finally:
            trainer.generator.release()


def run_on(trainer: PPOTrainer, prompts: Sequence[str], unit: bool) -> CanaryRun:
    config = trainer.config
    count = min(256, max(SCORED_ON, PLANTED_ON // config.max_new_tokens))
    whole = trainer.generator.sample(cycled(prompts, 0, count), PLANT_STEP)
    written = first_rows(whole)
    check_flatness(trainer, written)
    planted = plant(trainer, whole, unit)
    first = trainer.generator.sample(cycled(prompts, count, COMPARED_WITH), PLANT_STEP + 1)
    rewards = torch.tensor(planted(Samples.of_tokens(first)).sequence, dtype=torch.float64)
    given = (config.missing_eos_penalty, config.normalize_rewards, config.clip_rewards)
    shaped = shape_scores(rewards, first.ended.cpu(), *given).tolist()
    run = CanaryRun(config, planted.seen.pop(), shaped, like_rewards=planted.like_rewards)
    run.rounding = ROUNDING.get(trainer.models.sft.backbone.network.dtype, 1e-3)
    trainer.reward_computer.rewards = [(RewardSpec("planted"), planted)]
    before = logprobs_of(trainer, written)
    train(trainer, planted, prompts, run)
    if not run.passed:
        measure(trainer, written, before, planted.members, run)
    return run


def train(trainer: PPOTrainer, planted: PlantedReward, prompts: Sequence[str], run: CanaryRun) -> None:
    size, weights = run.config.batch_size, fingerprint(trainer)
    while not run.is_over:
        try:
            results = trainer.ppo_step(cycled(prompts, size * len(run.steps), size))
        except RuntimeError as error:
            if not isinstance(error, EngineFailure) and "require grad" not in str(error):
                raise
            run.error = error
            return
        run.shares.append(planted.seen[-1])
        run.trained.append(tokens_trained_on(results))
        run.steps.append(numbers_of(results))
        run.weights_changed = run.weights_changed or fingerprint(trainer) != weights


def tokens_trained_on(results: Record) -> int:
    """Response tokens with a share in the policy's loss."""
    pairs = results["sa_pairs"]
    if not results["optimizer_steps"] + results["skipped_updates"]:
        return 0
    weights = pairs.columns.get("importance")
    return int((pairs.mask if weights is None else pairs.mask & (weights > 0)).sum())


def unreached(trainer: PPOTrainer) -> float:
    """The share of the trained weights whose mean gradient is still 0."""
    weights, state = trainer.model_trainer.policy_parameters, trainer.model_trainer.policy_optimizer.state
    still = [each.numel() for each in weights if each not in state or not state[each]["exp_avg"].any()]
    return sum(still) / sum(each.numel() for each in weights)


def measure(
    trainer: PPOTrainer, written: Tokens, before: Tensor, members: frozenset[int], run: CanaryRun
) -> None:
    """Where the update went: on tokens that were written before it. Spoils the trainer's weights."""
    after, mask = logprobs_of(trainer, written), written.mask
    change = after - before
    ids = torch.tensor(sorted(members), device=mask.device)
    inside = torch.isin(written.response_ids, ids) & mask
    run.moved = float(change[mask].abs().mean())
    run.unreached = unreached(trainer)
    own, other = change[inside], change[mask & ~inside]
    run.towards = float(own.mean() - other.mean())
    run.towards_error = math.sqrt(
        sum(float(part.var(correction=0)) / max(1, len(part)) for part in (own, other))
    )
    with torch.no_grad():
        for weight in trainer.model_trainer.policy_parameters:
            weight.add_(NUDGE)
    run.depends = not torch.equal(logprobs_of(trainer, written), after)
