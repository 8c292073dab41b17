"""Run folders, read. In: runs/NAME, finished, broken or still training. Out: `Run` with its metrics, samples
and tokens. No content of a file makes it fail: what cannot be read is left out, and `problems` says so."""

from proxima.runs.find_runs import find_runs
from proxima.runs.run_reader import Run
from proxima.runs.thin_curves import thin

__all__ = ["Run", "find_runs", "thin"]
