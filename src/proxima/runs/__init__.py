"""Run folders, read. In: runs/NAME, finished, broken or still growing. Out: `Run` with its numbers,
samples and tokens; never a crash for what a file holds: it is left out and `problems` says so."""

from proxima.runs.find_runs import find_runs
from proxima.runs.run_reader import Run
from proxima.runs.thin_curves import thin

__all__ = ["Run", "find_runs", "thin"]
