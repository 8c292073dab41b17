"""Before a run: what would spoil it. In: a config and data. Out: findings, each with a level, a sentence and what to do."""

from proxima.doctor.doctor import examine, quick_findings
from proxima.doctor.finding import Finding
from proxima.doctor.memory import MemoryEstimate, estimate_memory
from proxima.doctor.show import show

__all__ = ["Finding", "MemoryEstimate", "estimate_memory", "examine", "quick_findings", "show"]
