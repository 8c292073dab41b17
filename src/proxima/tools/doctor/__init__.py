"""Checks before a run: what would spoil it.

In: a config and data. Out: findings, each with a level, a sentence and what to do about it.
"""

from proxima.tools.doctor.examination import examine, quick_findings
from proxima.tools.doctor.finding import Finding
from proxima.tools.doctor.fit import find_fit
from proxima.tools.doctor.memory_estimate import MemoryEstimate, estimate_memory
from proxima.tools.doctor.role_weights import without_weights
from proxima.tools.doctor.show_findings import show

__all__ = [
    "Finding",
    "MemoryEstimate",
    "estimate_memory",
    "examine",
    "find_fit",
    "quick_findings",
    "show",
    "without_weights",
]
