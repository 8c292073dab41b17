"""Triton kernels for what torch lacks or does slower; by test they give what the plain functions give.

Imported only where there is a GPU and Triton.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runtime.engine.kernels.attention_kernels import TiledAttention
    from proxima.runtime.engine.kernels.copy_kernels import Copies
    from proxima.runtime.engine.kernels.decode_kernels import decode_attention, fits
    from proxima.runtime.engine.kernels.few_rows_kernels import (
        CacheAttention,
        add_norm_down,
        few_rows_parts,
        few_rows_product,
    )
    from proxima.runtime.engine.kernels.nf4_kernels import Parts, fill, nf4_parts, nf4_product
    from proxima.runtime.engine.kernels.sampling_kernels import advance, sample
    from proxima.runtime.engine.kernels.vocabulary_kernels import pair, slope, stats
    from proxima.runtime.engine.kernels.warm_up import run_together, training_calls

__all__, __getattr__ = lazy_exports(__name__)
