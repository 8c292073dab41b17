"""`TrainingRun`: the loop of `train`: evaluation, checkpoints, rollback, early stopping. In: a trainer, a
plan of batches, a run folder. Out: results; a run that can be resumed.

A step's batch follows from its number, its noise from seed and number; so a checkpoint and a number say how a
run continues.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from proxima.core.chat_turns import with_turns
from proxima.core.errors import EngineFailure, Interrupted, ProcessLost, RewardFailure
from proxima.core.json_record import Record
from proxima.core.progress import no_bars
from proxima.core.terminal_text import visible
from proxima.evaluator import Evaluator, HeldOut, answer
from proxima.ppo_trainer.batch_plan import BatchPlan
from proxima.ppo_trainer.prompt_groups import repeat_prompts
from proxima.ppo_trainer.reward_units import measure_units, settle_endings
from proxima.ppo_trainer.shared_run import AnyRun
from proxima.ppo_trainer.step_recordings import Recordings
from proxima.ppo_trainer.stop_signals import StopSignals
from proxima.ppo_trainer.token_records import (
    sample_row,
    trained_records,
    trained_replies,
    with_replies,
)
from proxima.ppo_trainer.trainer_state import (
    agree,
    check_resumable,
    endings,
    load_state,
    plain_state,
    put_state_together,
    save_tensors,
)
from proxima.ppo_trainer.training_results import DONE, TrainingResults, start_line, step_line
from proxima.runs import MAX_ROLLBACKS, Alarm, Run, alarms, numbers_of, plain
from proxima.runs.checkpoint import Checkpoint, eval_reward, same_random_state
from proxima.runtime.distributed import is_lost

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

log = logging.getLogger(__name__)


class TrainingRun:
    """The loop over steps, with evaluations, guards, checkpoints and signals around each."""

    def __init__(
        self, trainer: PPOTrainer, plan: BatchPlan, evaluator: Evaluator, run: AnyRun, signals: StopSignals
    ):
        self.trainer = trainer
        self.plan = plan
        self.evaluator = evaluator
        self.run = run
        self.signals = signals
        self.config = trainer.config
        self.processes = trainer.models.processes
        self.results = TrainingResults(run_folder=run.path)
        self.recordings = Recordings(trainer, run.path)
        self.rollbacks = 0
        self.eval_reward: float | None = None  # of the step just done
        self.saved: int | None = None  # step of the newest checkpoint
        self.ahead: tuple[int, int, list[str]] | None = None  # a step's number, epoch and batch

    def go(self, force: bool = False) -> TrainingResults:
        """The whole call; the learning-rate schedule is this call's own, so it ends with it, however that
        is."""
        try:
            self.begin(force)
            self.loop()
            return self.finish()
        finally:
            self.trainer.first_step, self.trainer.total_steps = 0, None
            self.trainer.generator.read_ahead.next_prompts = None

    def loop(self) -> None:
        if self.config.overlap:
            log.info(
                "overlap: responses are sampled one update behind; importance weights correct for it "
                "(policy_lag)"
            )
        total = self.trainer.total_steps or 0
        done = self.trainer.step - self.trainer.first_step
        hidden = no_bars() if self.processes.is_main else True
        with tqdm(
            desc="PPO", unit="step", initial=done, total=total - self.trainer.first_step, disable=hidden
        ) as bar:
            try:
                self.start(bar)
                while not self.results.stop_reason and self.trainer.step < total:
                    if self.stop_asked():
                        self.interrupt()
                    self.advance(bar)
                    bar.update(self.trainer.step - self.trainer.first_step - bar.n)
            except (RewardFailure, EngineFailure) as failure:
                self.checkpoint()
                folder = self.trainer.save(self.run.path)
                raise type(failure)(
                    f"{failure}; the weights as they were before this step are in {folder}"
                ) from failure
            except Exception as error:
                if is_lost(error):
                    raise ProcessLost(f"{self.processes.lost(error)}; {self.what_to_do()}") from error
                if not self.processes.is_distributed:
                    with suppress(OSError):
                        self.trainer.save(self.run.path)
                raise
            finally:
                self.trainer.generator.cancel()

    def stop_asked(self) -> bool:
        """Whether a signal came, to any process: all stop after the same step."""
        self.signals.received = self.processes.all_reduce_max(self.signals.received)
        return self.signals.received > 0

    def what_to_do(self) -> str:
        """After another process was lost."""
        last = (
            "no checkpoint was written yet"
            if self.saved is None
            else f"the checkpoint of step {self.saved} is good"
        )
        return (
            f"{last}; to go on: the same command with --resume --run-name {shlex.quote(self.run.path.name)}"
        )

    def begin(self, force: bool) -> None:
        """From the newest checkpoint if there is one to resume from, else from the trainer as it is."""
        steps = self.plan.epochs * self.plan.steps_per_epoch
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            self.trainer.first_step = self.trainer.step
            self.trainer.total_steps = self.trainer.step + steps
            self.take_metrics(self.run.begin())
            settle_endings(self.trainer, self.held_out_prompts or self.plan.prompts)
            measure_units(self.trainer, self.plan.prompts)
            self.note_best_constants()
            return
        state = checkpoint.state
        total = state["first_step"] + steps
        changed = self.processes.on_main(
            lambda: check_resumable(checkpoint, self.config, self.plan, total, force)
        )
        self.restore(checkpoint)
        settle_endings(self.trainer, self.held_out_prompts or self.plan.prompts)
        self.take_metrics(self.run.begin(checkpoint.step, state["warnings"]))
        self.run.checkpoints.forget_after(checkpoint)
        self.trainer.total_steps = total
        if not changed:  # an ended run stays ended
            self.results.stop_reason = state["stop_reason"]
        log.info("resumed after step %d of %d from %s", checkpoint.step, total, checkpoint.path)
        if self.processes.is_main:
            print(f"resumed after step {checkpoint.step} of {total} from {checkpoint.path}")
        if Run(self.run.path).best_constants.keys() != self.trainer.reward_computer.verifiers.keys():
            self.note_best_constants()

    def note_best_constants(self) -> None:
        """Keep the best constant answer of each verifiable reward: only what is above it was learned."""
        computer, prompts = self.trainer.reward_computer, self.plan.prompts
        found = self.processes.on_main(
            lambda: {name: best._asdict() for name, best in computer.best_constants(prompts).items()}
        )
        self.run.write_best_constants(found)
        for name, best in found.items():
            told = (
                f"reward {name}: the best constant answer {best['answer'][:40]!r} scores {best['score']:.3g}"
            )
            log.info("%s", told)
            if self.processes.is_main:
                print(visible(told))

    def take_metrics(self, lines: list[dict[str, float]]) -> None:
        """The lines that stay in `metrics.jsonl`: the evaluation before the first step, and the steps."""
        first = self.trainer.first_step
        self.results.start = next((line for line in lines if line["step"] <= first), {})
        self.results.metrics = [line for line in lines if line["step"] > first]

    def start(self, bar: tqdm[NoReturn]) -> None:
        """Before the first step: an evaluation, where there are validation prompts, and a checkpoint."""
        if self.trainer.step > self.trainer.first_step:
            return
        if self.validates and not self.evaluator.evaluations:
            self.evaluate_start(bar)
        elif self.saved is not None:
            return
        if self.config.checkpoint_every:
            self.checkpoint(again=True)

    def evaluate_start(self, bar: tqdm[NoReturn]) -> None:
        """The model that the run begins with. What a run that was killed here left of it is dropped."""
        step = self.trainer.step
        self.take_metrics(self.run.go_back(step - 1))
        with same_random_state():
            performance, convergence = self.evaluator.evaluate({"step": step, "avg_reward": math.nan})
            self.write_samples([])
        self.take_evaluation(performance, convergence)
        self.results.start = {"step": step, **performance["validation"]}
        self.run.write_metrics(self.results.start)
        if self.processes.is_main:
            bar.write(start_line(self.results.start))

    @property
    def validates(self) -> bool:
        """Whether there are validation prompts."""
        return self.evaluator.validate is not None

    @property
    def held_out_prompts(self) -> Sequence[str]:
        """The validation prompts, if any."""
        held_out = self.evaluator.validate
        return held_out.prompts if isinstance(held_out, HeldOut) else ()

    def take_evaluation(self, performance: Record, convergence: Mapping[str, object]) -> None:
        self.results.evaluation = {**performance, **convergence}
        self.results.best_step = performance["best_step"]
        self.eval_reward = None if math.isnan(performance["evidence"]) else performance["evidence"]

    def advance(self, bar: tqdm[NoReturn]) -> None:
        """One step, and all that follows from it."""
        trainer, results = self.trainer, self.results
        epoch, batch = self.batch_at(trainer.step - trainer.first_step)
        answered = repeat_prompts(batch, self.config.num_generations)
        next_prompts = self.next_prompts()
        given = (batch,) if next_prompts is None else (batch, next_prompts)
        trainer.generator.read_ahead.next_prompts = self.following()
        with self.recordings.step():
            outcome = trainer.ppo_step(*given)
        self.recordings.keep(outcome)
        metrics = {"epoch": epoch + 1, **numbers_of(outcome)}
        # what evaluations and guards decide by is the same bits everywhere
        metrics = self.processes.on_main(lambda: metrics)
        self.eval_reward = None
        new_best = False
        if trainer.step % self.config.eval_every == 0 or trainer.step == trainer.total_steps:
            with same_random_state():  # an evaluation changes nothing that training draws
                performance, convergence = self.evaluator.evaluate(
                    {**outcome, **metrics, "prompts": answered}, policy_waits=not trainer.policy_trains
                )
                self.write_samples(performance["samples"], outcome)
            metrics |= performance["validation"]
            self.take_evaluation(performance, convergence)
            new_best = performance["performance_improved"] and self.validates
            if not convergence["should_continue"]:
                results.stop_reason = convergence["reason"]
        if trainer.step == trainer.total_steps:
            results.stop_reason = results.stop_reason or DONE
        results.metrics.append(metrics)
        raised = self.alarms(results.metrics)
        self.recordings.write(self.new_alarms(raised))
        metrics["alarms"] = len(raised)
        self.run.write_metrics(metrics)
        if self.processes.is_main:
            bar.write(step_line(metrics))
        if raised and self.act_on(raised):
            return
        every = self.config.checkpoint_every
        if results.stop_reason or (every and (new_best or trainer.step % every == 0)):
            self.checkpoint()

    def next_prompts(self) -> list[str] | None:
        """The prompts of the step after this one, where they may be sampled ahead."""
        if not self.config.overlap or self.trainer.step + 1 >= (self.trainer.total_steps or 0):
            return None
        return self.plan.at(self.trainer.step + 1 - self.trainer.first_step)[1]

    def following(self) -> Callable[[], Sequence[str]] | None:
        """The same where they are only read ahead, as the next step repeats them."""
        number = self.trainer.step + 1
        if self.config.overlap or number >= (self.trainer.total_steps or 0):
            return None
        place = number - self.trainer.first_step

        def read() -> Sequence[str]:
            self.ahead = place, *self.plan.at(place)
            return repeat_prompts(self.ahead[2], self.config.num_generations)

        return read

    def batch_at(self, place: int) -> tuple[int, list[str]]:
        """The epoch and the batch of a step, both counted from 0."""
        ahead, self.ahead = self.ahead, None
        return ahead[1:] if ahead is not None and ahead[0] == place else self.plan.at(place)

    def write_samples(self, trained: list[Record], outcome: Record | None = None) -> None:
        """A few samples in the small table, and every token of them in a file of its own.

        Args:
            trained: samples of the step.
            outcome: what the step gave; None before the first one.
        """
        trainer, count = self.trainer, self.config.token_samples
        followed: list[Record] = []
        if count:
            held_out = self.evaluator.validate
            followed = (
                held_out.records
                if isinstance(held_out, HeldOut)
                else answer(trainer, self.plan.prompts[:count], count).records
            )
            seen = trained_records(trainer, outcome, count) if outcome else []
            self.run.write_tokens(trainer.step, [*followed, *seen])
        replies = trained_replies(outcome, len(trained)) if outcome else [[]] * len(trained)
        rows = [
            *map(sample_row, followed),
            *(
                {"kind": "trained", **with_turns(sample), **with_replies(said)}
                for sample, said in zip(trained, replies, strict=True)
            ),
        ]
        self.run.write_samples(trainer.step, rows)

    def alarms(self, history: list[dict[str, float]]) -> list[Alarm]:
        config = self.config
        return alarms(
            history,
            max_skipped_updates=config.max_skipped_updates,
            kl_limit=config.kl_limit,
            min_entropy=config.min_entropy,
            length_limit=config.length_limit,
            max_declining_evals=config.max_declining_evals,
            max_failed_rewards=config.max_reward_failures * config.batch_size * config.num_generations,
            start=self.results.start,
            critic_warmup_until=0.0 if self.trainer.critic_is_ready else config.critic_warmup_until,
            critic_warmup_steps=config.critic_warmup_steps,
            last_step=self.trainer.total_steps,
            leaves_out_cut=config.cut_responses == "leave_out",
        )

    def new_alarms(self, raised: list[Alarm]) -> list[Alarm]:
        """Those whose guard had none at the step before."""
        history = self.results.metrics
        before = (
            {alarm.guard for alarm in self.alarms(history[:-1])} if raised and len(history) > 1 else set()
        )
        return [alarm for alarm in raised if alarm.guard not in before]

    def act_on(self, raised: list[Alarm]) -> bool:
        """Say what is new, and do as configured; True where the run went back and the step is no more."""
        new = self.new_alarms(raised)
        # what stops a run of failing rewards is `max_reward_failures`; while the policy waits, no weights of
        # its own can go back
        own = {"nonfinite": self.config.on_nonfinite, "rewards": "warn", "critic": "warn"}
        actions = {alarm: own.get(alarm.guard, self.config.on_guard) for alarm in raised}
        for alarm, action in actions.items():
            if action != "warn" or alarm in new:
                log.warning(
                    "step %d, guard %s: %s (%s)", self.trainer.step, alarm.guard, alarm.message, action
                )
                self.run.write_warning(self.trainer.step, alarm.guard, alarm.message, action)
        for alarm, action in actions.items():
            if action == "rollback":
                return self.go_back(alarm)
            if action == "stop":
                self.results.stop_reason = f"guard {alarm.guard}: {alarm.message}"
                return False
        return False

    def go_back(self, alarm: Alarm) -> bool:
        """To the best checkpoint (the newest where updates were not finite), and on from there with smaller
        learning rates.

        What a step samples shows what the update before it did, so the checkpoint before this step is the one
        that went wrong.
        """
        checkpoints, last = self.run.checkpoints, self.trainer.step - 2
        found = checkpoints.newest() if alarm.guard == "nonfinite" else self.best_until(last)
        if found is None:
            self.results.stop_reason = (
                f"guard {alarm.guard}: {alarm.message}; there is no checkpoint to go back to"
            )
            return False
        self.results.stop_reason = ""
        rate = self.trainer.rate_factor * self.config.rollback_rate_factor
        rollbacks = self.rollbacks + 1
        checkpoints.forget_after(found)
        lines = self.run.go_back(found.step)
        self.restore(found)
        self.recordings.forget()
        self.take_metrics(lines)
        self.trainer.rate_factor = rate
        self.rollbacks = rollbacks
        if rollbacks > MAX_ROLLBACKS:
            self.results.stop_reason = (
                f"guard {alarm.guard}: {alarm.message}, again after {MAX_ROLLBACKS} rollbacks"
            )
        log.warning("rolled back to step %d; learning rates are now x %g", found.step, rate)
        self.checkpoint(again=True)
        return True

    def best_until(self, last: int) -> Checkpoint | None:
        """The checkpoint with the best evaluation; the newest where no step was evaluated, whatever the model
        was worth before the first one."""
        evaluated = any("validation/reward" in line for line in self.results.metrics if line["step"] <= last)
        checkpoints = self.run.checkpoints
        best = checkpoints.best(last) if evaluated or not self.results.start else None
        return best or checkpoints.newest(last)

    def checkpoint(self, again: bool = False) -> None:
        if self.saved == self.trainer.step and not again:
            return
        agree(self.trainer)
        whole = put_state_together(self.trainer)
        epoch, batch = divmod(self.trainer.step - self.trainer.first_step, self.plan.steps_per_epoch)
        state = {
            **plain_state(self.trainer),
            "first_step": self.trainer.first_step,
            "epoch": epoch,
            "batch": batch,
            "fingerprints": self.plan.fingerprints,
            "evaluator": self.evaluator.state(),
            "eval_reward": self.eval_reward,
            "evaluation": plain(self.results.evaluation),
            "rollbacks": self.rollbacks,
            "warnings": self.run.warnings,
            "stop_reason": self.results.stop_reason,
        }
        self.run.sync()
        path = self.run.checkpoints.write(state, lambda folder: save_tensors(self.trainer, folder, whole))
        self.saved = self.trainer.step
        log.info("checkpoint %s", path)

    def restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        load_state(self.trainer, checkpoint.path, state)
        self.evaluator.restore(state["evaluator"])
        self.trainer.first_step = state["first_step"]
        self.rollbacks = state["rollbacks"]
        self.eval_reward = eval_reward(state)
        self.results.evaluation = state["evaluation"]
        self.results.best_step = self.evaluator.best_step
        self.saved = self.trainer.step

    def interrupt(self) -> None:
        """After a whole step: a checkpoint, the weights, and out."""
        self.checkpoint()
        self.trainer.save(self.run.path)
        log.info("stopped by %s after step %d", self.signals.name, self.trainer.step)
        raise Interrupted(
            self.signals.received,
            f"stopped by {self.signals.name} after step {self.trainer.step}, checkpoint in {self.run.path}; "
            f"to go on: the same command with --resume --run-name {shlex.quote(self.run.path.name)}",
        )

    def finish(self) -> TrainingResults:
        results = self.results
        results.stop_reason = results.stop_reason or DONE
        self.trainer.save(self.run.path)
        best = self.run.checkpoints.by_evaluation()[:1]
        self.run.write_results(
            {
                "stop_reason": results.stop_reason,
                "steps": self.trainer.step - self.trainer.first_step,
                "best_step": results.best_step,
                "best_checkpoint": best[0].name if best else None,
                "rollbacks": self.rollbacks,
                "endings": endings(self.trainer),
                "units": self.trainer.reward_computer.recorded_units(),
                "evaluation": results.evaluation,
                "last_metrics": results.metrics[-1] if results.metrics else {},
            }
        )
        self.trainer.generator.release()
        log.info("ended after step %d: %s", self.trainer.step, results.stop_reason)
        if self.stop_asked():
            raise Interrupted(
                self.signals.received,
                f"{self.signals.name} came in the last step; {self.run.path} is finished",
            )
        return results
