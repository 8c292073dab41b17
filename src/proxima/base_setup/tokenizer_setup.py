"""The tokenizer. In: a model's name. Out: a tokenizer whose pad token is its own, never EOS."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from proxima.base_setup.loading import explain_loading, model_path

PAD_TOKEN = "<|proxima_pad|>"


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Load it and, where it has no pad token or uses EOS as one, add a pad token. (The network never reads its id.)"""
    with explain_loading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    tokenizer.padding_side = "left"
    return tokenizer


def eos_token_ids(tokenizer: Any, network: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's EOS and those of the model's generation settings."""
    found = {tokenizer.eos_token_id}
    for config in (network.config, getattr(network, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return tuple(sorted(found - {None}))
