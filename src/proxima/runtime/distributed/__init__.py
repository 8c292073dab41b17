"""Data-parallel training over several processes, started by `torchrun`.

`rendezvous` initialises the process group, `process_group` has the collectives, `gradient_sync` sums
gradients, and `sharding` shards weights (FSDP2). Nothing heavy is imported here.
"""

from proxima.runtime.distributed.launch import rank_and_count, started_by_torchrun

__all__ = ["rank_and_count", "started_by_torchrun"]
