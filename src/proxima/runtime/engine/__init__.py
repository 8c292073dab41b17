"""The fast path: passes through a decoder without padding, with fused weights, static cache, CUDA graphs.

In: a `transformers` network with its adapters, whose live weights it reads. Out: hidden states and sampled
responses, equal to those of the reference path by test.

A pass: `layout` (where tokens lie), `families` (which networks), `architecture` and `layer_weights` (what is
multiplied), `decoder` (the layers) with `lora_products`, `layer_functions`, `packed_attention` and
`attention_rules`, and `experts` where a layer has several MLPs; on a GPU `graphed_passes`, `cuda_graphs` and
`pass_capacity`.
Sampling: `generation`, on the buffers of `generation_slots` and `expert_record`, with `prefill`,
`slot_schedule` and `sampling_memory`. After the head: `vocabulary`.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.runtime.engine.architecture import knows, network_logits, supports
    from proxima.runtime.engine.decoder import Decoder
    from proxima.runtime.engine.experts import expert_matrices
    from proxima.runtime.engine.generation import Generation
    from proxima.runtime.engine.layer_functions import worth_compiling
    from proxima.runtime.engine.layout import Layout, cells, cut, pack, pack_mask
    from proxima.runtime.engine.pass_capacity import PassCapacity
    from proxima.runtime.engine.sampling_memory import (
        CACHED_PASSES,
        MAX_SLOTS,
        SamplingMemory,
        cache_tokens,
        fewest_slots,
    )
    from proxima.runtime.engine.vocabulary import has_kernels, head_logprobs, score_tokens, token_logprobs

__all__, __getattr__ = lazy_exports(__name__)
