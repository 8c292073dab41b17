"""Loading, before PPO starts: from a config to the tokenizer, the LoRA adapters and the four models."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.base_setup.base_setup import BaseSetup
    from proxima.base_setup.gguf_files import Metadata, is_gguf, read_gguf
    from proxima.base_setup.gguf_networks import (
        ARCHITECTURES,
        FREQUENCIES,
        checked_names,
        gguf_config,
        llama3_factors,
        rotated_heads,
        stored_names,
    )
    from proxima.base_setup.gguf_tokenizers import (
        CONTROL,
        CUTS,
        NORMAL,
        UNUSED,
        USER_DEFINED,
        build_tokenizer,
    )
    from proxima.base_setup.learning_rates import ADAPTER, ALL_WEIGHTS, fill_learning_rates, rates_by_size
    from proxima.base_setup.loading import (
        EMBEDDED,
        load_config,
        load_context_length,
        load_network,
        model_path,
        no_progress_bar,
        pick_device,
        pick_dtype,
    )
    from proxima.base_setup.lora_setup import (
        adapter_size,
        add_adapter,
        copy_adapter,
        is_adapter,
        load_adapter,
        lora_config,
        merge_adapter,
        warn_of_another_base,
    )
    from proxima.base_setup.memory_rules import (
        LOGITS,
        MOMENTS,
        TRAINED,
        USUAL_TOKENS,
        MemoryAtHand,
        cached_bytes,
        config_number,
        held_bytes,
        tokens_for_memory,
    )
    from proxima.base_setup.micro_batches import MicroBatches
    from proxima.base_setup.model_setup import ModelSet, has_head, load_classifier, load_reward
    from proxima.base_setup.nf4_loading import quantization_of, quantize_without_weights
    from proxima.base_setup.tokenizer_setup import (
        PAD_TOKEN,
        PROBES,
        eos_token_ids,
        load_tokenizer,
        same_tokenizer,
    )

__all__, __getattr__ = lazy_exports(__name__)
