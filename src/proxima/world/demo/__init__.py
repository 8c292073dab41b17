"""All of RLHF on the embedded model, offline: `proxima demo`.

In: a seed. Out: results, a report, and what was learned.
"""

from proxima.world.demo.demo_pipeline import run_demo

__all__ = ["run_demo"]
