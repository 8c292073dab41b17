"""Data-parallel training over several processes, started by `torchrun`.

`rendezvous` initialises the process group, `process_group` has the collectives, `gradient_sync` sums
gradients, and `sharding` shards weights (FSDP2). Nothing heavy is imported here.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runtime.distributed.gradient_sync import all_reduce_gradients, clip_gradients
    from proxima.runtime.distributed.launch import end_process, rank_and_count, started_by_torchrun
    from proxima.runtime.distributed.process_group import Processes
    from proxima.runtime.distributed.rendezvous import init_distributed, is_lost
    from proxima.runtime.distributed.sharding import (
        Lockstep,
        copy_full_tensor,
        decoder_layers,
        gather_full_tensors,
        make_mesh,
        shard_like,
        shard_network,
    )

__all__, __getattr__ = lazy_exports(__name__)
