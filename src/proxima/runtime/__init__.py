"""How models are run: the fast path (`engine`), several processes (`distributed`), vLLM (`vllm`)."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runtime.threads import thread_wait_problem

__all__, __getattr__ = lazy_exports(__name__)
