"""`PPOTrainer`: the orchestrator.

In: a config, then prompts. Out: a trained policy, and metrics for every step.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from proxima.advantage import GAEAdvantage, ReturnCalculator, TDError
from proxima.base_setup import BaseSetup
from proxima.config import PPOConfig
from proxima.core.errors import RewardFailure
from proxima.core.ops import masked_mean, whiten
from proxima.core.pairs import SAPairs, rejoin
from proxima.evaluator import Evaluator
from proxima.evaluator.held_out import HeldOut
from proxima.evaluator.judges import Judges, check_judges
from proxima.experience_buffer import BatchedData, ExperienceBuffer
from proxima.ppo_trainer.batch_plan import Plan
from proxima.ppo_trainer.generator import SequenceGenerator
from proxima.ppo_trainer.model_trainer import ModelTrainer
from proxima.ppo_trainer.reward_computer import RewardComputer, Scores
from proxima.ppo_trainer.shared_run import open_run
from proxima.ppo_trainer.stop_signals import StopSignals
from proxima.ppo_trainer.stopwatch import Stopwatch
from proxima.ppo_trainer.trainer_state import put_state_together
from proxima.ppo_trainer.training_results import TrainingResults
from proxima.ppo_trainer.training_run import TrainingRun
from proxima.ppo_trainer.value_adder import ValueAdder
from proxima.reward_kl import KLDivergence, RewardAdjuster, adapt_kl_coef, shape_scores
from proxima.rewards import check_rewards
from proxima.runs.checkpoint import write_folder
from proxima.runs.metrics import (
    ROUNDING,
    advantage_metrics,
    rollout_metrics,
    sampling_gap,
    score_metrics,
    update_metrics,
)
from proxima.training import importance_weights
from proxima.training.schedule import learning_rate_factor

NEGLIGIBLE_GAP = (
    1e-3  # mean |log-probability of engine - of training side| a token, up to which no weights are needed
)
CHECKED_AT_ONCE = 512  # prompts tokenised together before a run


class PPOTrainer:
    """Builds everything from the config; `ppo_step` runs one PPO iteration, `train` runs it over a set of
    prompts."""

    def __init__(self, config: PPOConfig):
        self.config = config
        for what, remedy in config.idle_settings.values():
            warnings.warn(f"{what}; {remedy}", stacklevel=2)
        check_rewards(config)
        check_judges(config)
        setup = BaseSetup(config)
        self.tokenizer, self.models = setup.tokenizer, setup.models
        workers = (self.models, self.tokenizer, config)
        self.generator = SequenceGenerator(*workers)
        self.reward_computer = RewardComputer(*workers)
        self.judges = Judges(*workers)
        self.value_adder = ValueAdder(*workers)
        self.model_trainer = ModelTrainer(*workers)
        self.kl_divergence, self.reward_adjuster = KLDivergence(), RewardAdjuster()
        self.td_error, self.gae_advantage, self.return_calculator = (
            TDError(),
            GAEAdvantage(),
            ReturnCalculator(),
        )
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
        self.rate_factor = 1.0  # of both learning rates; smaller after a rollback
        self.step = 0
        self.first_step = 0  # of the call of `train` under way; its schedule begins there
        self.total_steps: int | None = None  # the step at which that call ends; None outside `train`

    def ppo_step(self, prompts: Sequence[str], next_prompts: Sequence[str] | None = None) -> dict[str, Any]:
        """One whole PPO step on any number of prompts.

        Args:
            next_prompts: of the next step, sampled in the background during this one (`overlap` does it
        in `train`).
        Returns: every metric of the glossary by name, and `generated_texts`, `rewards` (nan where one
        failed), `rewards_by_name`, `reward_source` and the `sa_pairs` that were trained on.
        """
        clock = Stopwatch(self.models.device)
        rollout, texts = self.generator.generate_sequences(prompts, self.step, clock, next_prompts)
        rollout, importance = self.add_importance_weights(rollout)
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
            **importance,
            "kl_coef": self.kl_coef,
            **advantages_measured,
            **update_measured,
            "buffer_bytes": self.buffer.nbytes,
            **clock.seconds(),
        }
        self.adapt_kl(metrics["kl"], rollout.batch_size)
        self.compare_with_sampling(metrics["sampling_gap"])
        return {
            "generated_texts": texts,
            "rewards": scores.total.tolist(),
            "rewards_by_name": {name: column.tolist() for name, column in scores.by_name.items()},
            "reward_source": self.reward_computer.reward_source,
            "sa_pairs": pairs,
            **metrics,
        }

    def compare_with_sampling(self, gap: float) -> None:
        """Warn where the built-in sampling and the scoring pass differ by more than rounding (vLLM's is
        importance instead)."""
        limit = ROUNDING.get(self.models.sft.backbone.network.dtype, 1e-3)
        if self.generator.rollouts is None and gap > limit:
            warnings.warn(
                f"tokens were sampled with log-probabilities that are {gap:.3g} nats per token off those "
                "they are trained "
                f"with, where rounding explains {limit:g}; run `proxima doctor`, and try engine: plain",
                stacklevel=2,
            )

    def add_importance_weights(self, rollout: SAPairs) -> tuple[SAPairs, dict[str, float]]:
        """Importance weights, where vLLM's probabilities differ from the training side's by more than
        rounding may."""
        lag, rollouts = self.generator.policy_lag, self.generator.rollouts
        measured: dict[str, float] = {"policy_lag": lag, "importance_truncated": 0.0, "engine_retries": 0}
        if rollouts is None:
            return rollout, measured
        measured["engine_retries"] = self.models.processes.all_reduce_sum(rollouts.new_retries())
        assert rollout.tokens is not None
        sampled = rollout.tokens.sampled_logprobs
        if sampled is None or (not lag and float(sampling_gap(rollout)) <= NEGLIGIBLE_GAP):
            return rollout, measured
        weights, cut = importance_weights(
            rollout.column("logprob_policy"), sampled, self.config.importance_clip
        )
        measured["importance_truncated"] = float(masked_mean(cut.float(), rollout.mask))
        return rollout.with_columns(importance=weights), measured

    def leave_out_failed(self, rollout: SAPairs, scores: Scores) -> tuple[SAPairs, Tensor]:
        """The sequences whose rewards came, and their rewards as PPO sees them, (B,) or (B, R).

        Penalty, normalisation and clipping act on the part that is one number a sequence; rewards a token
        stay as they are.
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
        """Whitened last, so that targets and metrics are not."""
        pairs = self.advantages_of(pairs)
        measured = advantage_metrics(pairs)
        if self.config.whiten_advantages:
            pairs = pairs.with_columns(advantage=whiten(pairs.column("advantage"), pairs.mask))
        return pairs, measured

    def advantages_of(self, pairs: SAPairs) -> SAPairs:
        """TD errors, advantages and the configured value target."""
        gamma, lam, given = self.config.gamma, self.config.lam, pairs
        pairs = self.td_error.compute_td_errors(pairs, gamma)
        pairs = rejoin(self.gae_advantage.compute_gae_advantages(pairs, gamma, lam), given)
        if self.config.value_target == "lambda_return":
            return pairs.with_columns(**{"return": pairs.column("advantage") + pairs.column("value")})
        return rejoin(self.return_calculator.add_reward_to_go(pairs, gamma), given)

    def update_models(self, batches: BatchedData) -> dict[str, float]:
        """All epochs at this step's learning rates; what was measured."""
        done, total = (
            self.step - self.first_step,
            None if self.total_steps is None else self.total_steps - self.first_step,
        )
        factor = learning_rate_factor(self.config.lr_schedule, done, total, self.config.warmup_steps)
        rates = self.model_trainer.set_learning_rates(self.rate_factor * factor)
        history, stopped = self.model_trainer.update(
            batches, policy=self.step >= self.config.critic_warmup_steps
        )
        taken = [stats for stats in history if "skipped" not in stats]
        return {
            **update_metrics(taken),
            "optimizer_steps": len(taken) - stopped,
            "skipped_updates": len(history) - len(taken),
            "kl_stopped": int(stopped),
            "learning_rate": rates[0],
            "value_learning_rate": rates[1],
        }

    def adapt_kl(self, kl: float, sequences: int) -> None:
        """The next step's coefficient, where it adapts; while only the value model trains there is nothing
        to steer."""
        if self.config.kl_controller == "adaptive" and self.step > self.config.critic_warmup_steps:
            self.kl_coef = adapt_kl_coef(
                self.kl_coef, kl, self.config.kl_target, self.config.kl_horizon, sequences
            )

    def train(
        self,
        prompts: Sequence[str],
        num_epochs: int = 1,
        validation_prompts: Sequence[str] | None = None,
        resume: bool = False,
        force: bool = False,
    ) -> TrainingResults:
        """PPO steps of `batch_size` prompts, shuffled anew each epoch, until all are done or an evaluation or
        guard says stop.

        Prompts may be a lazy Sequence (`proxima.data.read_prompts`): a step reads only its own.

        Args:
            resume: go on from the newest good checkpoint of the run in run_dir/run_name; without one there,
            begin.
            force: resume although settings changed that alter what is computed.
        """
        config, held_out = self.config, validation_prompts
        if num_epochs < 1:
            raise ValueError(f"num_epochs ({num_epochs}) must be at least 1")
        given = {
            "prompts": prompts,
            "validation": held_out,
        }  # what is wrong with them is said before anything happens
        fingerprints = self.models.processes.on_all(
            lambda: {name: None if texts is None else self.check(texts) for name, texts in given.items()}
        )
        plan = Plan(prompts, config.batch_size, num_epochs, config.seed, fingerprints)
        if config.judges and held_out is None:
            raise ValueError(
                "judges compare answers to held-out prompts, and there are none; give --validation"
            )
        validate = None if held_out is None else HeldOut(self, held_out, str(fingerprints["validation"]))
        evaluator = Evaluator(self.models, self.tokenizer, config, validate)
        with open_run(config, resume, self.models.processes) as run, StopSignals() as signals:
            return TrainingRun(self, plan, evaluator, run, signals).go(force)

    def check(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Refuse prompts that no step could read; a part at a time, nothing is kept but how many they are
        and their hash."""
        if isinstance(prompts, str) or not len(prompts):
            self.generator.tokenize(prompts)
        digest = hashlib.sha256()
        for first in range(0, len(prompts), CHECKED_AT_ONCE):
            part = prompts[first : first + CHECKED_AT_ONCE]
            self.generator.tokenize(part, first)
            self.reward_computer.check_columns(part)
            for prompt in part:
                columns = getattr(prompt, "columns", {})
                digest.update(
                    json.dumps(
                        [prompt, columns], sort_keys=True, default=lambda item: type(item).__name__
                    ).encode()
                )
        return {"count": len(prompts), "sha256": digest.hexdigest()}

    def save(self, folder: str | Path) -> Path:
        """Write `policy/` and `value/` (adapters in PEFT's format, heads) and the tokenizer; each folder
        in one move."""

        whole = put_state_together(self, optimizers=False)

        def policy(part: Path) -> None:
            self.models.policy.save(part, whole)
            self.tokenizer.save_pretrained(part)

        def write() -> None:
            write_folder(Path(folder) / "policy", policy, manifest=False)
            write_folder(
                Path(folder) / "value", lambda part: self.models.value.save(part, whole), manifest=False
            )

        self.models.processes.on_main(write)
        return Path(folder)

    def load(self, folder: str | Path) -> None:
        """Take over policy and value model from a folder that `save` wrote."""
        self.generator.cancel()
        self.models.policy.load(Path(folder) / "policy")
        self.models.value.load(Path(folder) / "value")
