"""Several processes as one. In: what each has of a batch. Out: the whole, the same on all. `torchrun` starts them.

<<<<<<< HEAD
`meeting` brings them together, `group` exchanges values, `gradients` gradients, `sharding` weights. Nothing heavy is imported.
=======
`meeting` brings them together, `group` exchanges values, `gradients` gradients, `sharding` weights.
Nothing heavy is imported here.
>>>>>>> fa71cbee5e02cb1df38a026afe0a4a9fcdaecf71
"""

from proxima.processes.launch import rank_and_count, started_by_torchrun

__all__ = ["rank_and_count", "started_by_torchrun"]
