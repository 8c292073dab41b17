"""Several processes as one. In: what each has of a batch. Out: the whole, the same on all. `torchrun` starts
them.

`meeting` brings them together, `group` exchanges values, `gradients` gradients, `sharding` weights.
Nothing heavy is imported here.
"""

from proxima.runtime.distributed.launch import rank_and_count, started_by_torchrun

__all__ = ["rank_and_count", "started_by_torchrun"]
