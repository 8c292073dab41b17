"""`PPOTrainer`: the orchestrator. In: a config, then prompts. Out: a trained policy, and metrics for every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from proxima.advantage import GAEAdvantage, ReturnCalculator, TDError
from proxima.base_setup import BaseSetup
from proxima.config import PPOConfig
from proxima.errors import RewardFailure
from proxima.evaluator import Evaluator
from proxima.experience_buffer import BatchedData, ExperienceBuffer
from proxima.metrics import advantage_metrics, is_defined, rollout_metrics, score_metrics, update_metrics
from proxima.ops import whiten
from proxima.pairs import SAPairs, rejoin
from proxima.ppo_trainer.generator import SequenceGenerator, Stopwatch
from proxima.ppo_trainer.model_trainer import ModelTrainer
from proxima.ppo_trainer.reward_computer import RewardComputer, Scores
from proxima.ppo_trainer.value_adder import ValueAdder
from proxima.reward_kl import KLDivergence, RewardAdjuster, adapt_kl_coef, shape_scores
from proxima.rewards import check_rewards
from proxima.run_folder import RunFolder
from proxima.training.schedule import learning_rate_factor

CHECKED_AT_ONCE = 512  # prompts tokenised together before a run
VALIDATION_STEP = -1  # its noise is a stream of its own, the same at every evaluation


@dataclass
class TrainingResults:
    """What `PPOTrainer.train` did."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    """One dict a step, by the names of `proxima.metrics.GLOSSARY`."""
    best_step: int = 0
    """The step with the best verdict, counted from 1."""
    stop_reason: str = ""
    """Why it ended: `all epochs done`, or the evaluator's reason."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """The evaluator's last word: performance and convergence."""
    run_folder: Path = Path()
    """Config, metrics, samples and the trained adapters."""


class PPOTrainer:
    """Builds everything from the config; `ppo_step` walks the road once, `train` walks it over a set of prompts."""

    def __init__(self, config: PPOConfig):
        self.config = config
        check_rewards(config)
        setup = BaseSetup(config)
        self.tokenizer, self.models = setup.tokenizer, setup.models
        workers = (self.models, self.tokenizer, config)
        self.generator = SequenceGenerator(*workers)
        self.reward_computer = RewardComputer(*workers)
        self.value_adder = ValueAdder(*workers)
        self.model_trainer = ModelTrainer(*workers)
        self.kl_divergence, self.reward_adjuster = KLDivergence(), RewardAdjuster()
        self.td_error, self.gae_advantage, self.return_calculator = TDError(), GAEAdvantage(), ReturnCalculator()
        self.buffer = ExperienceBuffer(
            max_bytes=config.buffer_max_bytes,
            overflow=config.buffer_overflow,
            strategy=config.buffer_sampling,
            storage=config.buffer_storage,
            minibatch_size=config.minibatch_size,
            token_budget=config.buffer_token_budget,
            seed=config.seed,
        )
        self.kl_coef = config.kl_coef
        self.step = 0
        self.total_steps: int | None = None

    def ppo_step(self, prompts: Sequence[str]) -> dict[str, Any]:
        """One whole PPO step on any number of prompts.

        Returns: every metric of the glossary by name, and `generated_texts`, `rewards` (nan where one failed),
        `reward_source` and the `sa_pairs` that were trained on.
        """
        clock = Stopwatch(self.models.device)
        rollout, texts = self.generator.generate_sequences(prompts, self.step, clock)
        clock.lap("score")
        scores = self.reward_computer.score_pairs(rollout)
        clock.lap("reward")
        scored, rewards = self.leave_out_failed(rollout, scores)
        pairs = self.kl_divergence.add_kl_to_sa_pairs(scored)
        pairs = self.reward_adjuster.adjust_rewards_with_kl(pairs, rewards, self.kl_coef)
        pairs = self.value_adder.add_values_to_sa_pairs(rejoin(pairs, scored))
        pairs, advantages_measured = self.add_advantages(rejoin(pairs, scored))
        clock.lap("value")
        self.buffer.clear()
        batches = self.buffer.store(pairs, self.step)
        update_measured = self.update_models(batches)
        clock.lap("update")
        self.step += 1
        metrics = {
            "step": self.step,
            **score_metrics(scores.total, scores.by_name),
            **rollout_metrics(rollout),
            "kl_coef": self.kl_coef,
            **advantages_measured,
            **update_measured,
            "buffer_bytes": self.buffer.nbytes,
            **clock.seconds(),
        }
        self.adapt_kl(metrics["kl"], rollout.batch_size)
        return {
            "generated_texts": texts,
            "rewards": scores.total.tolist(),
            "reward_source": self.reward_computer.reward_source,
            "sa_pairs": pairs,
            **metrics,
        }

    def leave_out_failed(self, rollout: SAPairs, scores: Scores) -> tuple[SAPairs, Tensor]:
        """The sequences whose rewards came, and their rewards as PPO sees them, (B,) or (B, R).

        Penalty, normalisation and clipping act on the part that is one number a sequence; rewards a token stay as they are.
        """
        assert rollout.tokens is not None
        config, count = self.config, rollout.batch_size
        good = (~scores.total.isnan()).nonzero().flatten()
        failed = count - len(good)
        if not len(good) or failed > config.max_reward_failures * count:
            many = f"all {count}" if not len(good) else f"{failed} of {count}"
            limit = f" (max_reward_failures is {config.max_reward_failures:g})" if len(good) else ""
            raise RewardFailure(
                f"{many} rewards of step {self.step + 1} failed{limit}, nothing was trained on it; "
                f"the last reason: {self.reward_computer.last_failure}"
            )
        kept, chosen = (rollout if not failed else rollout.select(good)), scores.select(good)
        assert kept.tokens is not None
        shaped = shape_scores(
            chosen.sequence,
            kept.tokens.ended.cpu(),
            config.missing_eos_penalty,
            config.normalize_rewards,
            config.clip_rewards,
        )
        return kept, chosen.placed(shaped, kept.mask)

    def add_advantages(self, pairs: SAPairs) -> tuple[SAPairs, dict[str, float]]:
        """TD errors, advantages and the configured value target; whitened last, so that targets and metrics are not."""
        gamma, lam, given = self.config.gamma, self.config.lam, pairs
        pairs = self.td_error.compute_td_errors(pairs, gamma)
        pairs = rejoin(self.gae_advantage.compute_gae_advantages(pairs, gamma, lam), given)
        if self.config.value_target == "lambda_return":
            pairs = pairs.with_columns(**{"return": pairs.column("advantage") + pairs.column("value")})
        else:
            pairs = rejoin(self.return_calculator.add_reward_to_go(pairs, gamma), given)
        measured = advantage_metrics(pairs)
        if self.config.whiten_advantages:
            pairs = pairs.with_columns(advantage=whiten(pairs.column("advantage"), pairs.mask))
        return pairs, measured

    def update_models(self, batches: BatchedData) -> dict[str, float]:
        """All epochs at this step's learning rates; what was measured."""
        factor = learning_rate_factor(self.config.lr_schedule, self.step, self.total_steps, self.config.warmup_steps)
        rates = self.model_trainer.set_learning_rates(factor)
        history, stopped = self.model_trainer.update(batches, policy=self.step >= self.config.critic_warmup_steps)
        return {
            **update_metrics(history),
            "optimizer_steps": len(history) - stopped,
            "kl_stopped": int(stopped),
            "learning_rate": rates[0],
            "value_learning_rate": rates[1],
        }

    def adapt_kl(self, kl: float, sequences: int) -> None:
        """The next step's coefficient, where it adapts."""
        if self.config.kl_controller == "adaptive":
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, self.config.kl_target, self.config.kl_horizon, sequences)

    def train(
        self, prompts: Sequence[str], num_epochs: int = 1, validation_prompts: Sequence[str] | None = None
    ) -> TrainingResults:
        """PPO steps of `batch_size` prompts, shuffled anew each epoch, until all epochs are done or the evaluator says stop.

        Prompts may be a lazy Sequence (`proxima.data.read_prompts`): a step reads only its own.
        """
        self.check(prompts)  # what is wrong is said before anything happens
        if num_epochs < 1:
            raise ValueError(f"num_epochs ({num_epochs}) must be at least 1")
        validate = None
        if (held_out := validation_prompts) is not None:
            self.check(held_out)
            validate = lambda: self.validate(held_out)  # noqa: E731
        evaluator = Evaluator(self.models, self.tokenizer, self.config, validate)
        plan = (
            (epoch, [prompts[i] for i in rows.tolist()])
            for epoch in range(num_epochs)
            for rows in _permutation(len(prompts), self.config.seed, epoch).split(self.config.batch_size)
        )
        steps = num_epochs * math.ceil(len(prompts) / self.config.batch_size)
        self.total_steps = self.step + steps
        results = TrainingResults(stop_reason="all epochs done")
        with (
            RunFolder(self.config) as run,
            self.saved_at_the_end(run.path),
            tqdm(plan, desc="PPO", unit="step", total=steps, disable=None) as bar,
        ):
            results.run_folder = run.path
            for epoch, batch in bar:
                outcome = self.ppo_step(batch)
                metrics = {"epoch": epoch + 1, **{name: outcome[name] for name in outcome if is_defined(name)}}
                verdict_due = self.step % self.config.eval_every == 0 or self.step == self.total_steps
                if verdict_due:
                    performance, convergence = evaluator.evaluate({**outcome, "prompts": batch})
                    metrics |= performance["validation"]
                    results.evaluation = {**performance, **convergence}
                    results.best_step = performance["best_step"]
                    run.write_samples(self.step, performance["samples"])
                results.metrics.append(metrics)
                run.write_metrics(metrics)
                bar.write(step_line(metrics))
                if verdict_due and not convergence["should_continue"]:
                    results.stop_reason = convergence["reason"]
                    break
        return results

    def check(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that no step could read; a part at a time, nothing is kept."""
        if isinstance(prompts, str) or not len(prompts):
            self.generator.tokenize(prompts)
        for first in range(0, len(prompts), CHECKED_AT_ONCE):
            part = prompts[first : first + CHECKED_AT_ONCE]
            self.generator.tokenize(part, first)
            self.reward_computer.check_columns(part)

    @contextmanager
    def saved_at_the_end(self, folder: Path) -> Iterator[None]:
        """However the block ends, what was learned is on disk."""
        try:
            yield
        except RewardFailure as failure:
            raise RewardFailure(f"{failure}; the weights as they were before this step are in {folder}") from failure
        finally:
            self.save(folder)

    def validate(self, prompts: Sequence[str]) -> dict[str, float]:
        """Score samples on held-out prompts; nothing is trained. Where too many rewards fail, the reward is nan: no verdict."""
        pairs, _ = self.generator.generate_sequences(prompts, VALIDATION_STEP)
        shown = rollout_metrics(pairs)
        total = self.reward_computer.score_pairs(pairs).total
        too_many = float(total.isnan().double().mean()) > self.config.max_reward_failures
        reward = math.nan if too_many else float(total.nanmean())
        return {"reward": reward, **{name: shown[name] for name in ("kl", "response_length", "eos_rate")}}

    def save(self, folder: str | Path) -> Path:
        """Write `policy/` and `value/` (adapters in PEFT's format, heads) and the tokenizer."""
        folder = Path(folder)
        self.models.policy.save(folder / "policy")
        self.tokenizer.save_pretrained(folder / "policy")
        self.models.value.save(folder / "value")
        return folder

    def load(self, folder: str | Path) -> None:
        """Take over policy and value model from a folder that `save` wrote."""
        self.models.policy.load(Path(folder) / "policy")
        self.models.value.load(Path(folder) / "value")


def step_line(metrics: dict[str, float]) -> str:
    """One line a step."""
    shown = {"reward": "avg_reward", "kl": "kl", "policy": "policy_loss", "value": "value_loss", "length": "response_length"}
    numbers = "  ".join(f"{label} {metrics[name]:.4g}" for label, name in shown.items() if not math.isnan(metrics[name]))
    return f"step {metrics['step']:>4.0f}  {numbers}  {metrics['seconds']:.1f} s"


def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)
