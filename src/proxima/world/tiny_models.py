"""Tiny models with random weights, for demos and tests.

In: a folder. Out: a checkpoint there that `transformers` loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
ARCHITECTURES = ("qwen3", "llama", "gpt2")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and EOS (id 256). Like many tokenizers, it has no pad token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[EOS_TOKEN] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)


def make_tiny_model(
    folder: str | Path, architecture: str = "qwen3", seed: int = 0, context: int = 256
) -> Path:
    """Write a model of about 0.1 M random parameters and its byte tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

    tokenizer = byte_tokenizer()
    common = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
    }
    if architecture == "qwen3":
        config: PreTrainedConfig = Qwen3Config(**common, **sizes, head_dim=32, tie_word_embeddings=True)
    elif architecture == "llama":
        config = LlamaConfig(**common, **sizes)
    elif architecture == "gpt2":
        config = GPT2Config(
            **common, n_embd=64, n_layer=2, n_head=4, n_positions=context, initializer_range=0.2
        )
    else:
        raise ValueError(f"architecture ({architecture!r}) must be one of {', '.join(ARCHITECTURES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
