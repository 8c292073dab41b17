"""How models are run: on which device (`devices`), the fast path (`engine`), several processes
(`distributed`), vLLM (`vllm`)."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runtime.devices import (
        FAST_PATH,
        accelerator,
        default_device,
        default_dtype,
        device_memory,
        forked_random_state,
        free_cached_memory,
        is_out_of_memory,
        noise_problem,
        random_states,
        set_random_states,
        synchronize,
        used_random_states,
    )
    from proxima.runtime.threads import thread_wait_problem

__all__, __getattr__ = lazy_exports(__name__)
