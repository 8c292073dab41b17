"""Random weights in the shape of a real model, for timing.

In: a folder and the name of a shape. Out: a checkpoint and tokenizer.
"""

from __future__ import annotations

import gc
from pathlib import Path

from proxima.core.json_record import Record

SHAPES: dict[str, Record] = {
    "0.6B": {  # Qwen3-0.6B
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "4B": {  # Qwen3-4B
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "8B": {  # Qwen3-8B, with tied embeddings
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "14B": {  # Qwen3-14B, with tied embeddings
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "embedded": {  # the model in the package
        "vocab_size": 837,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    },
}
CPU_SIZES = "embedded", "tiny"  # that suit a CPU


def free_memory() -> None:
    """Give back what a case held, so that the next one does not count it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.accelerator.empty_cache()


def make_random_model(folder: str | Path, shape: str, device: str = "cpu", seed: int = 0) -> Path:
    """A Qwen3 of this shape and a tokenizer with one token per word `t3`, `t4`, ...; id 1 is EOS."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        **SHAPES[shape], tie_word_embeddings=True, eos_token_id=1, bos_token_id=None, pad_token_id=0
    )
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate(special + [f"t{i}" for i in range(3, config.vocab_size)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
