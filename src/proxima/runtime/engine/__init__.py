"""Under stages 1 to 7: the fast path through a decoder. No padding, fused weights, static cache, CUDA graphs;
equal to the reference path by test.

In: a `transformers` network with its adapters, whose own live weights it reads. Out: hidden states, and
sampled responses. A pass: `layout` (where tokens lie), `architecture` and `weights` (what is multiplied),
`decoder` (the layers) with `products`, `functions` and `attention`; `graphed_passes` and `graphs` on a GPU.
Sampling: `generation`, on the buffers of `slots`.
"""

from proxima.runtime.engine.architecture import knows, supports
from proxima.runtime.engine.decoder import Decoder
from proxima.runtime.engine.generation import Generation
from proxima.runtime.engine.layer_functions import worth_compiling
from proxima.runtime.engine.layout import Layout, pack, pack_mask

__all__ = ["Decoder", "Generation", "Layout", "knows", "pack", "pack_mask", "supports", "worth_compiling"]
