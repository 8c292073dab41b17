"""Loads and compares tokenizers, and says which ids end a response. A loaded tokenizer has a pad token of its
own, never EOS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from proxima.base_setup.gguf_files import is_gguf
from proxima.base_setup.gguf_tokenizers import load_gguf_tokenizer
from proxima.base_setup.loading import explain_loading, model_path
from proxima.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAD_TOKEN = "<|proxima_pad|>"


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """A tokenizer that pads on the left. Where it has no pad token or pads with EOS, one is added.

    (The network never reads its id.)
    """
    tokenizer = read_tokenizer(name, trust_remote_code)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    tokenizer.padding_side = "left"
    return tokenizer


def read_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer:
    """A tokenizer as it was saved."""
    if is_gguf(path := model_path(name)):
        return load_gguf_tokenizer(path)
    with explain_loading("tokenizer", name):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def lacks_tokenizer(name: str) -> bool:
    """Whether this is a folder without a tokenizer's files, from which `transformers` would make an empty
    tokenizer."""
    folder = Path(model_path(name))
    return folder.is_dir() and not any(
        file.name.startswith(("tokeniz", "vocab")) or file.suffix == ".model" for file in folder.iterdir()
    )


def own_tokenizer(name: str, trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer that was saved beside a checkpoint's weights; None if there is none."""
    if lacks_tokenizer(name):
        return None
    try:
        return read_tokenizer(name, trust_remote_code)
    except (OSError, ValueError):
        return None


def same_vocabulary(left: Tokenizer, right: Tokenizer) -> bool:
    """Whether every id is the same token in both; a pad token that only one of them has does not count."""
    mine, other = left.get_vocab(), right.get_vocab()
    for tokenizer, vocabulary, beside in ((left, mine, other), (right, other, mine)):
        if tokenizer.pad_token is not None and tokenizer.pad_token not in beside:
            vocabulary.pop(tokenizer.pad_token, None)
    return mine == other


PROBES = (
    "SUBREDDIT: r/pets TITLE: It's 3,141.59 — isn't it?  POST:\n\tdef f(x):\r\n    return x**2  # naïve "
    "cafe\u0301 TL;DR:",
    " 日本語 Привет مرحبا 🤖👩‍🚀 \u00a0 ﬁ Ａ ...   100000 <b>ALL CAPS</b> http://a.b/c?d=e_f",
    "x",
)


def same_tokenizer(left: Tokenizer, right: Tokenizer) -> bool:
    """Whether both encode texts as the same ids, so that the ids of one can be read by the other's model.

    They must agree in vocabulary and EOS, and on texts for which normalisers and pre-tokenisers differ. An
    EOS that one of them appends does not count: a sampled response has its own.
    """
    if left.eos_token_id != right.eos_token_id or not same_vocabulary(left, right):
        return False
    end = left.eos_token_id

    def ids(tokenizer: Tokenizer, text: str) -> list[int]:
        row: list[int] = tokenizer(text)["input_ids"]
        return row[:-1] if row and row[-1] == end else row

    return all(ids(left, text) == ids(right, text) for text in PROBES)


def eos_token_ids(tokenizer: Tokenizer, network: PreTrainedModel) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's EOS and those of the model's generation settings."""
    found: set[int | None] = {tokenizer.eos_token_id}
    for config in (network.config, getattr(network, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return tuple(sorted(id for id in found if id is not None))
