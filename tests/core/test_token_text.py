"""Token by token, the pieces of a text add up to the whole, whatever the tokenizer and the characters."""

import pytest
from transformers import AutoTokenizer

from proxima.core.token_text import pieces

TEXTS = [
    "",
    "a",
    "plain words, and more.",
    "naïve café",
    "日本語のテキスト",
    "😀 and 👩‍👩‍👧 together",
    "a\n\n b\t",
]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(tiny_folders, name, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders[name])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = pieces(ids, tokenizer.decode)
    assert len(parts) == len(ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_bytes_of_a_character_wait_for_the_last_and_broken_ones_are_shown():
    def decode(ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")

    euro = list("€".encode())
    assert pieces([97, *euro, 98], decode) == ["a", "", "", "€", "b"]
    assert pieces(euro[:2], decode) == ["", "\ufffd"]
    assert "".join(pieces([0xFF] * 6, decode)) == "\ufffd" * 6
