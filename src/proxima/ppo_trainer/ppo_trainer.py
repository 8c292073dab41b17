"""`PPOTrainer`: `ppo_step`, which calls the phases in order, and `train`.

In: a config, then prompts. Out: a trained policy, and metrics for every step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from proxima.advantage import (
    GAEAdvantage,
    GAEParts,
    Outcome,
    ReturnCalculator,
    TDError,
    add_credit,
    estimate,
    whiten_advantages,
)
from proxima.base_setup import BaseSetup
from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.core.ops import place_rewards
from proxima.core.pairs import TokenPairs, rejoin
from proxima.environments import check_environments
from proxima.evaluator import Evaluator, HeldOut, Judges, check_judges
from proxima.experience_buffer import ExperienceBuffer
from proxima.ppo_trainer.batch_plan import BatchPlan, fingerprint
from proxima.ppo_trainer.generator import SequenceGenerator
from proxima.ppo_trainer.model_trainer import ModelTrainer
from proxima.ppo_trainer.prompt_groups import group_metrics, repeat_prompts, with_groups
from proxima.ppo_trainer.reward_computer import RewardComputer, Scores
from proxima.ppo_trainer.shared_run import open_run
from proxima.ppo_trainer.stop_signals import StopSignals
from proxima.ppo_trainer.stopwatch import Stopwatch
from proxima.ppo_trainer.trainer_state import put_state_together
from proxima.ppo_trainer.training_results import TrainingResults
from proxima.ppo_trainer.training_run import TrainingRun
from proxima.ppo_trainer.value_adder import ValueAdder
from proxima.reward_kl import KLBudget, KLDivergence, RewardAdjuster, adapt_kl_coef
from proxima.rewards import check_rewards
from proxima.runs import advantage_metrics, guards, rollout_metrics, score_metrics
from proxima.runs.checkpoint import write_folder
from proxima.training import learning_rate_factor

log = logging.getLogger(__name__)

ROUNDING = 1e-6  # relative to the largest reward


def _ignore(*phases: object) -> None:
    """What a step computes on its way goes nowhere where nobody records it."""


class PPOTrainer:
    """Builds everything from the config; `ppo_step` runs one PPO iteration, `train` runs it over a set of
    prompts."""

    def __init__(self, config: PPOConfig):
        self.config = config
        for what, remedy in config.idle_settings.values():
            warnings.warn(f"{what}; {remedy}", stacklevel=2)
        check_rewards(config)
        check_judges(config)
        check_environments(config)
        setup = BaseSetup(config)
        self.tokenizer, self.models = setup.tokenizer, setup.models
        workers = (self.models, self.tokenizer, config)
        self.generator = SequenceGenerator(*workers)
        self.reward_computer = RewardComputer(*workers)
        self.judges = Judges(*workers)
        self.value_adder = ValueAdder(*workers)
        self.model_trainer = ModelTrainer(*workers)
        self.kl_divergence = KLDivergence()
        self.reward_adjuster = RewardAdjuster()
        self.td_error = TDError()
        self.gae_advantage = GAEAdvantage()
        self.return_calculator = ReturnCalculator()
        self.estimator: str = config.adv_estimator  # a name in `proxima.advantage.ESTIMATORS`
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
        self.kl_budget = KLBudget(config.kl_target) if config.kl_controller == "budget" else None
        self.rate_factor = 1.0  # of both learning rates; smaller after a rollback
        self.critic_is_ready = config.critic_warmup_until == 0
        self.policy_trains = True  # not so in steps of critic warm-up
        self.step = 0
        self.first_step = 0  # of the call of `train` under way; its schedule begins there
        self.total_steps: int | None = None  # the step at which that call ends; None outside `train`
        self.on_phases: Callable[[TokenPairs, Scores, TokenPairs], None] = _ignore
        """Called in every step with its rollout, scores and advantages that are not whitened."""

    def __repr__(self) -> str:
        config, models = self.config, self.models
        trained = sum(parameter.numel() for parameter in models.policy.parameters())
        rewards = ", ".join(spec.label for spec, _ in self.reward_computer.rewards)
        return (
            f"PPOTrainer({config.model_name!r}): step {self.step}, {config.adv_estimator} with "
            f"{config.objective}, {trained:,} trained parameters on {models.device}; rewards: "
            f"{rewards or 'none'}"
        )

    def ppo_step(self, prompts: Sequence[str], next_prompts: Sequence[str] | None = None) -> Record:
        """One whole PPO step on any number of prompts, each answered `num_generations` times. With `overlap`,
        the responses to `next_prompts`, of the next step, are sampled in the background during this one.

        Returns: every metric by name, `generated_texts`, `rewards` (nan where one failed), `rewards_by_name`,
            `reward_source`, the `sa_pairs` that were trained on, and `trained_rows`, of which responses.
        """
        config, clock = self.config, Stopwatch(self.models.device)
        prompts, next_prompts = self._repeated(prompts), next_prompts and self._repeated(next_prompts)
        rollout, texts = self.generator.generate_sequences(prompts, self.step, clock, next_prompts)
        rollout, importance = self.generator.add_importance_weights(rollout)
        rollout = with_groups(rollout, config.num_generations)
        clock.lap("score")
        scores = self.reward_computer.score_pairs(rollout)
        clock.lap("reward")
        rows, trains = self.reward_computer.rows_to_train(rollout, scores, self.step + 1)
        scored = rollout.select(rows) if len(rows) < rollout.batch_size else rollout
        rewards = self.reward_computer.shape_rewards(scored, scores.select(rows))
        pairs = self.kl_divergence.add_kl_to_sa_pairs(scored)
        pairs = self.reward_adjuster.adjust_rewards_with_kl(pairs, rewards, self._kl_coef(rewards))
        pairs = self.value_adder.add_values_to_sa_pairs(rejoin(pairs, scored))
        estimated = self.estimate_advantages(rejoin(pairs, scored), rewards)
        trained = whiten_advantages(estimated) if config.whiten_advantages else estimated
        self.on_phases(rollout, scores, estimated)
        clock.lap("value")
        self.buffer.clear()
        batches = self.buffer.store(trained, self.step) if trains else None
        measured = advantage_metrics(estimated)
        self.policy_trains = self._critic_is_warm(measured["explained_variance"])
        with self.generator.read_ahead.running():
            updated = self.model_trainer.update_models(batches, self._rate(), self.policy_trains)
        clock.lap("update")
        self._end_step()
        metrics = {
            "step": self.step,
            **score_metrics(scores.total, scores.by_name, scores.spread, scores.failed_programs),
            **rollout_metrics(rollout),
            **importance,
            "kl_coef": self.kl_coef,
            **measured,
            **group_metrics(estimated, self._placed(rewards, estimated)),
            **updated,
            "buffer_bytes": self.buffer.nbytes,
            **clock.seconds(),
        }
        if self.policy_trains and trains:
            self._adapt_kl_coef(metrics, rollout.batch_size)
        self.generator.check_sampling_gap(metrics["sampling_gap"])
        done = {"generated_texts": texts, "sa_pairs": trained, "trained_rows": rows.tolist()}
        return {**done, **self.reward_computer.describe(scores), **metrics}

    def _end_step(self) -> None:
        self.step += 1
        self.models.micro_batches.plan(None)

    def _repeated(self, prompts: Sequence[str]) -> Sequence[str]:
        return repeat_prompts(prompts, self.config.num_generations)

    def _kl_coef(self, rewards: Tensor) -> float:
        """The coefficient of this step; a budget begins where rewards (B,) or (B, R) first differ."""
        if self.kl_budget is not None and not self.kl_budget.has_begun:
            sums = rewards if rewards.ndim == 1 else rewards.sum(1)
            spread = float(sums.std(correction=0))
            if spread > ROUNDING * float(sums.abs().max()):  # equal rewards have a spread of rounding errors
                self.kl_coef = self.kl_budget.begin(spread)
        return self.kl_coef

    def _adapt_kl_coef(self, metrics: Record, sequences: int) -> None:
        if self.kl_budget is not None:
            self.kl_coef = self.kl_budget.next_coef(self.kl_coef, metrics["kl_exact"])
        elif self.config.kl_controller == "adaptive":
            goal = (self.config.kl_target, self.config.kl_horizon)
            self.kl_coef = adapt_kl_coef(self.kl_coef, metrics["kl"], *goal, sequences)

    def _rate(self) -> float:
        """The factor of both learning rates at this step."""
        steps = (self.step, self.total_steps, self.config.warmup_steps, self.first_step)
        return self.rate_factor * learning_rate_factor(self.config.lr_schedule, *steps)

    def _critic_is_warm(self, explained_variance: float) -> bool:
        """Whether the policy trains in this step; once the value model was good enough, or the policy has
        waited long enough, it stays so."""
        until, waited = self.config.critic_warmup_until, self.step - self.config.critic_warmup_steps
        if waited < 0:
            return False
        if not self.critic_is_ready and (explained_variance >= until or waited >= guards.LONGEST_WAIT):
            self.critic_is_ready = True
            how = "has reached" if explained_variance >= until else "has not reached"
            log.info(
                "step %d: the policy trains from here on; the explained variance (%.3g) %s "
                "critic_warmup_until (%g)",
                *(self.step + 1, explained_variance, how, until),
            )
        return self.critic_is_ready

    def _placed(self, rewards: Tensor, pairs: TokenPairs) -> Tensor:
        return place_rewards(rewards, pairs.mask, pairs.column("reward"))

    def estimate_advantages(self, pairs: TokenPairs, rewards: Tensor) -> TokenPairs:
        """Pairs with advantages that are not whitened; TD errors and the value target where the estimator
        has them.

        Args:
            rewards: without KL, as `RewardComputer.shape_rewards` gives them.
        """
        parts = GAEParts(self.td_error, self.gae_advantage, self.return_calculator)
        config = self.config
        after = self.value_adder.values_after_cut(pairs) if config.cut_responses == "bootstrap" else None
        outcome = Outcome.of_pairs(pairs, self._placed(rewards, pairs), after)
        value_lam = None if config.value_target == "lambda_return" else config.value_lam
        given = (config.gamma, config.lam, config.lam_alpha, value_lam)
        by_turns = config.discount == "turn"
        return add_credit(pairs, estimate(self.estimator, outcome, *given, parts, by_turns))

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
            resume: continue from the newest good checkpoint of the run in run_dir/run_name; without one,
                start a new run.
            force: resume although settings changed that alter what is computed.
        """
        config, held_out = self.config, validation_prompts
        if num_epochs < 1:
            raise ValueError(f"num_epochs ({num_epochs}) must be at least 1")
        # what is wrong with the prompts is said before anything happens
        given = {"prompts": prompts, "validation": held_out}
        fingerprints = self.models.processes.on_all(
            lambda: {
                name: None if texts is None else fingerprint(texts, self.check)
                for name, texts in given.items()
            }
        )
        plan = BatchPlan(prompts, config.batch_size, num_epochs, config.seed, fingerprints)
        if config.judges and held_out is None:
            raise ValueError(
                "judges compare answers to held-out prompts, and there are none; give --validation"
            )
        validate = None if held_out is None else HeldOut(self, held_out, str(fingerprints["validation"]))
        evaluator = Evaluator(self.models, self.tokenizer, config, validate)
        with open_run(config, resume, self.models.processes) as run, StopSignals() as signals:
            self.keep_in(run.path)
            return TrainingRun(self, plan, evaluator, run, signals).go(force)

    def keep_in(self, folder: Path) -> None:
        """Keep what judges say in this folder, so that the same answer is judged once."""
        self.reward_computer.keep_in(folder)
        self.judges.keep_in(folder)

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """Refuse prompts that no step could read; errors count them from `first`."""
        self.generator.tokenize(prompts, first)
        self.reward_computer.check_columns(prompts, first)
        if self.generator.environment is not None:
            self.generator.environment.check(prompts, first)

    def save(self, folder: str | Path) -> Path:
        """Write `policy/` and `value/` (adapters in PEFT's format, heads) and the tokenizer; each folder
        in one move."""

        whole = put_state_together(self, optimizers=False)

        def policy(part: Path) -> None:
            self.models.policy.save(part, whole)
            self.tokenizer.save_pretrained(part)

        value = self.models.value

        def write() -> None:
            write_folder(Path(folder) / "policy", policy, manifest=False)
            if value is not None:
                write_folder(Path(folder) / "value", lambda part: value.save(part, whole), manifest=False)

        self.models.processes.on_main(write)
        return Path(folder)

    def load(self, folder: str | Path) -> None:
        """Take over policy and value model from a folder that `save` wrote."""
        self.generator.cancel()
        self.models.policy.load(Path(folder) / "policy")
        if self.models.value is not None:
            self.models.value.load(Path(folder) / "value")
