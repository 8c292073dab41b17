"""`Tokenizer`: what this package uses of a Hugging Face tokenizer. Anything that has these is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of `PreTrainedTokenizerBase` that is called here, with EOS and padding, as `load_tokenizer`
    gives it."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token: str
    eos_token_id: int
    pad_token: str | None
    pad_token_id: int
    padding_side: str
    truncation_side: str
    chat_template: str | dict[str, str] | None
    name_or_path: str

    @property
    def all_special_ids(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = ..., **options: object
    ) -> Mapping[str, Any]: ...

    def decode(self, token_ids: Sequence[int] | int, **options: object) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def add_special_tokens(self, special_tokens_dict: dict[str, str]) -> int: ...

    def apply_chat_template(self, conversation: object, **options: object) -> Any: ...

    def save_pretrained(self, save_directory: object) -> object: ...
