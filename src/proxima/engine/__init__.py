"""Under stages 1 to 7: the fast road through a decoder. No padding, fused weights, static cache, CUDA graphs; equal to the
plain road by test.

In: a `transformers` network with its adapters, whose own live weights it reads. Out: hidden states, and sampled responses.
A pass: `layout` (where tokens lie), `architecture` and `weights` (what is multiplied), `decoder` (the layers) with `products`,
`functions` and `attention`; `graphed_passes` and `graphs` on a GPU. Sampling: `generation`, on the buffers of `slots`.
"""

from proxima.engine.architecture import knows, supports
from proxima.engine.decoder import Decoder
from proxima.engine.functions import worth_compiling
from proxima.engine.generation import Generation
from proxima.engine.layout import Layout, pack, pack_mask

__all__ = ["Decoder", "Generation", "Layout", "knows", "pack", "pack_mask", "supports", "worth_compiling"]
