"""Tokenizers from GGUF files. In: the metadata. Out: a tokenizer of `transformers`.

A file names how text is cut before the merges (`tokenizer.ggml.pre`) but does not say what that means; the
cuts of the names that matter are here.
"""

from __future__ import annotations

import warnings

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from proxima.base_setup.gguf_files import GGUFFile, Metadata, gguf_error, read_gguf

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [WORDS % ""],
    "llama-bpe": [WORDS % "{1,3}"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
"""Regular expressions that cut a text, one after the other, as llama.cpp has them."""
SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def load_gguf_tokenizer(path: str) -> PreTrainedTokenizerFast:
    return gguf_tokenizer(read_gguf(path))


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that a file describes, with its chat template."""
    kind = file.stated("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise file.error(f"its tokenizer is of the kind {kind!r}; only byte-level BPE ('gpt2') is read")
    pre = str(file.stated("tokenizer.ggml.pre", str))
    file.stated("tokenizer.chat_template", str)
    if SAME.get(pre, pre) not in CUTS:
        warnings.warn(
            f"the GGUF file {file.path!r} cuts texts by {pre!r}, which is not known here: token boundaries "
            "may differ from those that the model was trained with",
            stacklevel=2,
        )
    try:
        return build_tokenizer(file.metadata, SAME.get(pre, pre), file.path)
    except Exception as error:  # the library raises plain ones
        raise gguf_error(file.path, f"its tokenizer is damaged ({' '.join(str(error).split())})") from None


def build_tokenizer(metadata: Metadata, pre: str | None, path: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the entries `tokenizer.*`, cut by `pre` (the default where unknown)."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens: list[str] = own["tokens"]
    merges = [tuple(merge.split(" ")) for merge in own.get("merges", ())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ValueError("two tokens are the same")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cut(pre)
    backend.decoder = decoders.ByteLevel()
    kinds = list(map(int, own.get("token_type", ())))
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        add([AddedToken(tokens[i], normalized=False, special=kind == CONTROL) for i in _of(kinds, kind)])
    named = {
        f"{role}_token": _stated_token(tokens, own[f"{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in own
    }
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if own.get("add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        first = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, vocabulary[first])]
        )
    limits = [value for key, value in metadata.items() if key.endswith(".context_length")]
    options: dict[str, object] = {"model_max_length": limits[0]} if limits else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        name_or_path=path,
        **named,
        **options,
    )


def cut(pre: str | None) -> pre_tokenizers.Sequence:
    """What divides a text before the merges."""
    pieces = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in CUTS.get(pre or "default", CUTS["default"])
    ]
    return pre_tokenizers.Sequence(
        [*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _stated_token(tokens: list[str], number: object) -> str:
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(f"it has no token {number!r}")
    return tokens[number]


def _of(kinds: list[int], kind: int) -> list[int]:
    return [number for number, item in enumerate(kinds) if item == kind]
