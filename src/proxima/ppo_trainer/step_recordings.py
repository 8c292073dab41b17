"""`Recordings`: the recorded steps of a run. In: a trainer and its run's folder. Out: bundles in
`runs/NAME/replay/`: of every n-th step, of the two steps up to an alarm, and of the last whole step where one
fails.

To be ready for these, every step is kept in host memory until the next but one begins: twice its rollout,
and twice the adapters with both moments of their optimisers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.core.json_record import RecordView
from proxima.ppo_trainer.step_recorder import StepRecord, StepRecorder, check_size, weights
from proxima.runs import BUNDLE_SUFFIX, REPLAY_FOLDER, Alarm, write_bundle

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer

log = logging.getLogger(__name__)

KEPT = 8  # newest bundles of each kind that stay: every n-th step's, and those up to an alarm
FIRST = {"step": 0, "alarm": 2}  # and, of those up to an alarm, the first: what went wrong began there
MOST_KEPT = 2 * KEPT + sum(FIRST.values())  # bundles of a run


class Recordings:
    """One call of `train`; without `record_steps` it does nothing. The main process alone keeps and
    writes."""

    def __init__(self, trainer: PPOTrainer, folder: Path):
        self.trainer, self.folder = trainer, folder / REPLAY_FOLDER
        self.every = trainer.config.record_steps
        self.steps: list[StepRecord] = []  # the last two
        self.alarmed = 0  # the last step that was written for an alarm
        self._recorder: StepRecorder | None = None
        if self.every:
            recorder = StepRecorder(trainer)  # refuses on all processes, as does the next line
            check_size(trainer)
            self._recorder = recorder if trainer.models.processes.is_main else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around `ppo_step`; where that fails, the step before it is written, which led there."""
        self.steps = self.steps[-1:]
        if self._recorder is None:
            yield
            return
        with self._recorder.step():
            try:
                yield
            except Exception as error:
                for last in self.steps:  # one or, in the first step, none
                    ended = replace(last, after=self._recorder.before)
                    self._write_alarmed(ended, f"the next step ended by {type(error).__name__}")
                raise

    def keep(self, outcome: RecordView) -> None:
        """After `ppo_step`."""
        if self._recorder is not None:
            record = self._recorder.record(outcome)
            before = [replace(last, after=self._recorder.before) for last in self.steps]
            self.steps = [*before, record]

    def write(self, alarms: Sequence[Alarm] = ()) -> None:
        """The last step where it is an n-th one; and the last two where there are new alarms."""
        if not self.every:
            return
        due = self.trainer.step % self.every == 0
        if due or alarms:
            reason = "; ".join(f"{alarm.guard}: {alarm.message}" for alarm in alarms)
            self.trainer.models.processes.on_main(lambda: self._write(due, reason))

    def forget(self) -> None:
        """After a rollback: the next step does not follow from the last one."""
        self.steps, self.alarmed = [], 0

    def _write(self, due: bool, reason: str) -> None:
        self.steps[-1] = replace(self.steps[-1], after=weights(self.trainer))
        if due:
            self._write_one(self.steps[-1], "step", "")
        for record in self.steps if reason else ():
            self._write_alarmed(record, reason)

    def _write_alarmed(self, record: StepRecord, reason: str) -> None:
        if record.facts["step"] > self.alarmed:  # else it was written for the alarm before
            self._write_one(record, "alarm", reason)
            self.alarmed = record.facts["step"]

    def _write_one(self, record: StepRecord, kind: str, reason: str) -> None:
        """A disk that is full ends no run: the checkpoint says so if it lasts."""
        bundle = record.bundle(reason)
        path = self.folder / f"{kind}-{bundle.step:08d}{BUNDLE_SUFFIX}"
        try:
            size = write_bundle(path, bundle.facts, bundle.tensors)
        except ValueError as error:
            log.warning("step %d is not recorded: %s", bundle.step, error)
            return
        log.info("recorded step %d in %s, %d bytes", bundle.step, path, size)
        for old in sorted(self.folder.glob(f"{kind}-*{BUNDLE_SUFFIX}"))[FIRST[kind] : -KEPT]:
            old.unlink(missing_ok=True)
