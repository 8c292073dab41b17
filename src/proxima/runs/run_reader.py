"""`Run`: one run folder, read. In: its path. Out: config, environment, numbers by step, samples, tokens,
checkpoints.

A run may be training meanwhile: every call shows what is on disk now, and numbers already read are not read
again.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from html import escape
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from proxima.config import PPOConfig, current_names, read_yaml, settings_in
from proxima.core.json_record import Record
from proxima.core.regular_files import open_file, read_file
from proxima.runs import token_files
from proxima.runs.checkpoint import eval_reward
from proxima.runs.json_lines import JsonLines, last_record
from proxima.runs.run_files import BEST_CONSTANTS, bundle_paths
from proxima.runs.run_origin import DOCTOR, ORIGIN, Kind, read_examinations, read_origin
from proxima.runs.run_plot import Plot

if TYPE_CHECKING:
    import pandas

State = Literal["training", "finished", "stopped"]
LARGEST_FILE = 2**24  # bytes of a file that is read and shown whole
MOST_NAMES = 5000  # metrics of one run; more are left out
BUNDLE_NAME = re.compile(r"(?P<kind>step|alarm)-(?P<step>[0-9]{1,15})")
FINETUNED: tuple[Kind, ...] = ("sft", "reward")


class Run:
    """What a run folder holds. Calls fail only where the folder does not exist.

    Links inside are not followed: in a folder from elsewhere they could show any file of this machine.
    """

    def __init__(self, path: str | Path, name: str = ""):
        """
        Args:
            name: how to call it; the folder's own name where not given.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{path} is not the folder of a run; `proxima train` makes them under runs/")
        self.name = name or self.path.resolve().name
        self._kept: dict[str, tuple[tuple[int, ...], Record | None]] = {}
        self._said: dict[str, str] = {}
        self._columns: dict[str, list[float]] = {}
        self._rows, self._version = 0, -1

    @property
    def kind(self) -> Kind:
        """Whether PPO, supervised fine-tuning or reward-model training made it."""
        for kind in FINETUNED:
            if self.origin.get("kind") == kind or (self.path / f"{kind}.json").is_file():
                return kind
        return "ppo"

    @property
    def origin(self) -> Record:
        """The command line that made it, the folder it was given in, and what the doctor said; empty where
        Python code made it."""
        return self._file(ORIGIN, lambda path: read_origin(path.parent)) or {}

    @property
    def examinations(self) -> list[Record]:
        """What `proxima doctor` found where it was given the run's name, the newest last."""
        found = self._file(DOCTOR, lambda path: {"examinations": read_examinations(path.parent)})
        return found["examinations"] if found else []

    @property
    def config(self) -> Record:
        """Its settings as written down, by their present names; those of fine-tuning when it has ended."""
        if self.kind != "ppo" and (path := settings_in(self.path)) is not None:
            return self._file(path.name, read_yaml) or {}
        return self._file("config.yaml", _read_settings) or {}

    @property
    def environment(self) -> Record:
        return self._file("environment.json", _read_json) or {}

    @property
    def results(self) -> Record | None:
        """What the run ended with; None until it has."""
        return self._file("results.json" if self.kind == "ppo" else f"{self.kind}.json", _read_json)

    @property
    def evaluation(self) -> Record | None:
        """What `proxima eval` found; None where it was not run, or not since the last step."""
        found, last = self._file("evaluation.json", _read_json), self.last().get("step")
        return found if found and found.get("step", last) == last else None

    @property
    def best_constants(self) -> dict[str, tuple[str, float]]:
        """Of each verifiable reward, the answer that scores best where it is given to every prompt, and its
        mean score; what is not of this form is left out."""
        found = self._file(BEST_CONSTANTS, _read_json) or {}
        pairs = {
            name: (best.get("answer"), best.get("score"))
            for name, best in found.items()
            if isinstance(best, dict)
        }
        return {
            name: (answer, float(score))
            for name, (answer, score) in pairs.items()
            if isinstance(answer, str) and isinstance(score, (int, float)) and math.isfinite(score)
        }

    @property
    def state(self) -> State:
        """`stopped` means that the run ended early: interrupted, killed or failed."""
        if _is_locked(self.path / ".lock"):
            return "training"
        if self.kind != "ppo":
            return "stopped" if self.results is None else "finished"
        ended = (self.results or {}).get("last_metrics")
        last = ended.get("step", 0) if isinstance(ended, dict) else 0
        done = self.results is not None and token_files.number(last, 0.0) >= token_files.number(
            self.last().get("step"), 0.0
        )
        return "finished" if done else "stopped"

    @property
    def problems(self) -> list[str]:
        """What could not be read so far, in words."""
        return [
            *self._said.values(),
            *self._metric_lines.problems,
            *self._sample_lines.problems,
            *self._warning_lines.problems,
        ]

    @property
    def changed(self) -> float:
        """Time of the last step written (or of the config, or of the folder), as seconds since 1970."""
        for name in ("metrics.jsonl", "config.yaml", "."):
            try:
                return (self.path / name).stat().st_mtime
            except OSError:
                continue
        return 0.0

    def metrics(self) -> dict[str, list[float]]:
        """Columns by name, `step` first, one number per step; nan where a step has none."""
        records = self._metric_lines.look()
        if self._version != self._metric_lines.version:
            self._columns = {"step": []}
            self._rows = 0
            self._version = self._metric_lines.version
        new = records[self._rows :]
        for name in dict.fromkeys(chain.from_iterable(new)):
            if len(self._columns) < MOST_NAMES:
                self._columns.setdefault(name, [math.nan] * self._rows)
            elif name not in self._columns:
                self._said["names"] = f"metrics.jsonl has more than {MOST_NAMES:,} metrics: some are left out"
                break
        for name, column in self._columns.items():
            values = [record.get(name) for record in new]
            column += [
                value if type(value) is float and value - value == 0 else token_files.number(value, math.nan)
                for value in values
            ]
        self._rows = len(records)
        return {name: list(column) for name, column in self._columns.items()}

    @property
    def steps(self) -> int:
        """PPO steps that were logged."""
        metrics = self.metrics()
        return len(metrics["step"]) - first_step_row(metrics)

    @property
    def version(self) -> int:
        """Grows when steps that `metrics` returned have changed: the run was cut back."""
        return self._metric_lines.version

    def last(self) -> Record:
        """The newest step's numbers, without reading the others."""
        return last_record(self.path / "metrics.jsonl")

    def log_text(self, after: int = -1, most: int = 65536) -> tuple[str, int]:
        """The log after a byte, at most its last `most` bytes, and the byte it ends at."""
        try:
            with open_file(self.path / "log.txt", follow=False) as file:
                size = file.seek(0, 2)
                start = after if 0 <= after <= size else 0
                file.seek(max(start, size - most))
                read = file.read(most)
                return read.decode("utf-8", "replace"), file.tell()
        except OSError:
            return "", 0

    def warnings(self) -> list[Record]:
        """Alarms of the guards: step, guard, message, action."""
        return list(self._warning_lines.look())

    def samples(self, step: int | None = None) -> list[Record]:
        """Texts logged with the evaluations: step, prompt, text, reward; of one step or of all."""
        return [sample for sample in self._sample_lines.look() if step is None or sample["step"] == step]

    def token_steps(self) -> list[int]:
        return token_files.token_steps(self.path)

    def tokens(self, step: int) -> list[Record]:
        """The token records of a logged step, columns as long as the tokens. A broken file gives none, and a
        problem."""
        try:
            return token_files.read_tokens(self.path, step)
        except ValueError as error:
            if step not in self.token_steps():
                raise
            self._said[f"tokens {step}"] = str(error)
            return []

    def checkpoints(self) -> list[Record]:
        """Oldest first: name, step, eval_reward (None where there was no evaluation), best."""
        found = []
        for path in sorted((self.path / "checkpoints").glob("step-*")):
            state = self._file(f"checkpoints/{path.name}/state.json", _read_json)
            if state is not None:
                found.append(
                    {
                        "name": path.name,
                        "step": state.get("step"),
                        "eval_reward": token_files.number(eval_reward(state), None),
                    }
                )
        best = max((each["eval_reward"] for each in found if each["eval_reward"] is not None), default=None)
        first = next(
            (each["name"] for each in found if best is not None and each["eval_reward"] == best), None
        )
        return [{**each, "best": each["name"] == first} for each in found]

    def bundles(self) -> list[Record]:
        """Recorded steps, which `proxima replay` reads, the oldest first: path, name, step (None where the
        name has none), whether it was recorded for an alarm or a failure, bytes, and when it was written."""
        found: list[Record] = []
        for path in bundle_paths(self.path):
            with suppress(OSError):  # a run that goes on removes its oldest
                if path.name.isprintable() and not path.is_symlink():
                    named, noted = BUNDLE_NAME.fullmatch(path.stem), path.stat()
                    found.append(
                        {
                            "path": str(path),
                            "name": path.name,
                            "step": int(named["step"]) if named else None,
                            "alarmed": named is not None and named["kind"] == "alarm",
                            "bytes": noted.st_size,
                            "changed": noted.st_mtime,
                        }
                    )
        return sorted(found, key=lambda each: each["changed"])

    def metrics_frame(self) -> pandas.DataFrame:
        """One row per step."""
        return _pandas().DataFrame(self.metrics())

    def samples_frame(self) -> pandas.DataFrame:
        """One row per sample that was logged with an evaluation."""
        return _pandas().DataFrame(self.samples())

    def tokens_frame(self, step: int) -> pandas.DataFrame:
        """One row per token of a logged step: sample, kind, position, token, then its columns."""
        rows = []
        for place, sample in enumerate(self.tokens(step)):
            for position, token in enumerate(sample["tokens"]):
                row = {"sample": place, "kind": sample["kind"], "position": position, "token": token}
                rows.append(row | {name: values[position] for name, values in sample["columns"].items()})
        return _pandas().DataFrame(rows)

    def plot(self, *names: str | Sequence[str]) -> Plot:
        """Curves of some metrics by step, for a notebook: `run.plot("avg_reward", "kl")`; a list is drawn
        in one chart."""
        return Plot.of(self.metrics(), names)

    def _repr_html_(self) -> str:
        """In a notebook: what it is, its main curves, and a sample of the last evaluation."""
        said = f"{self.state}, step {self.last().get('step', 0)}"
        shown = f"<p><b>{escape(self.name)}</b>: {escape(said)}</p>"
        if self.steps:
            shown += self.plot()._repr_html_()
        if samples := self.samples():
            prompt, text = (escape(str(samples[-1].get(part, ""))) for part in ("prompt", "text"))
            shown += f'<pre style="white-space: pre-wrap">{prompt}<b>{text}</b></pre>'
        return shown

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.state}, step {self.last().get('step', 0)}"

    @cached_property
    def _metric_lines(self) -> JsonLines:
        return JsonLines(self.path / "metrics.jsonl")

    @cached_property
    def _sample_lines(self) -> JsonLines:
        return JsonLines(self.path / "samples.jsonl")

    @cached_property
    def _warning_lines(self) -> JsonLines:
        return JsonLines(self.path / "warnings.jsonl")

    def _file(self, name: str, read: Callable[[Path], Record]) -> Record | None:
        """A small file, read again only when it changed; None where it is not there or broken."""
        path = self.path / name
        try:
            found = path.lstat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            if name not in self._kept or self._kept[name][0] != mark:
                self._kept[name] = (mark, None)  # a broken file, too, is read once
                self._said.pop(name, None)
                if stat.S_ISLNK(found.st_mode):
                    raise ValueError("it is a link, which is not followed")
                if found.st_size > LARGEST_FILE:
                    raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
                self._kept[name] = (mark, read(path))
            return self._kept[name][1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._said[name] = f"{name} cannot be read: {error}"
            return None


def first_step_row(metrics: Mapping[str, Sequence[float]]) -> int:
    """Where the steps begin in the columns of `Run.metrics`: after the evaluation of the model that the run
    began with (1), or with the first row (0) where the run had no validation prompts or is an older one."""
    rewards, evaluated = metrics.get("avg_reward", ()), metrics.get("validation/reward", ())
    trained = len(rewards) > 0 and not math.isnan(rewards[0])
    return 1 if len(evaluated) and not trained else 0


def _read_settings(path: Path) -> Record:
    return current_names(PPOConfig, read_yaml(path))


def _read_json(path: Path) -> Record:
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _is_locked(path: Path) -> bool:
    """Whether a process holds the run; the lock goes with the process, however it ends."""
    try:
        import fcntl

        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError:
        raise ValueError("data frames need pandas: pip install pandas pyarrow") from None
    return pandas
