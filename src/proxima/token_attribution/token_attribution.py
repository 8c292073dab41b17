"""`TokenAttributor`: from what was generated to state-action pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from proxima.core.pairs import SAPairs, TokenPairs
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Rollout
from proxima.token_attribution.extractor import split_text
from proxima.token_attribution.sa_pair_builder import pairs_from_pieces


class TokenAttributor:
    """Gives each generated token its state, its action and its log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        """
        Args:
            tokenizer: cuts a plain text into tokens; without one, at the spaces. A rollout brings its own.
        """
        self.tokenizer = tokenizer

    @overload
    def extract_pairs(self, text: str | Sequence[str], logprobs: Rollout) -> TokenPairs: ...
    @overload
    def extract_pairs(self, text: str, logprobs: Sequence[float], prompt: str = "") -> SAPairs: ...
    def extract_pairs(
        self, text: str | Sequence[str], logprobs: Rollout | Sequence[float], prompt: str = ""
    ) -> SAPairs:
        """
        Args:
            text: a generated text, or the texts of a whole rollout.
            logprobs: what `SequenceGenerator.generate` returned for it; or plain numbers, one per token, then
                `logprob_ref` is None.
            prompt: with plain numbers, the text before; a rollout knows its own.
        """
        if isinstance(logprobs, Rollout):
            check_texts([text] if isinstance(text, str) else list(text), logprobs)
            return TokenPairs(logprobs.storage)
        if not isinstance(text, str):
            raise ValueError("plain log-probabilities belong to one text; give a rollout for several")
        return pairs_from_pieces(prompt, split_text(text, self.tokenizer), logprobs)


def check_texts(texts: Sequence[str], rollout: Rollout) -> None:
    """A rollout must be read with its own texts: a mix-up here would train on someone else's words."""
    if len(texts) != len(rollout):
        raise ValueError(f"{len(texts)} texts for a rollout of {len(rollout)} sequences")
    for i, (given, made) in enumerate(zip(texts, rollout.tokens.texts(), strict=True)):
        if given != made:
            raise ValueError(
                f"text {i} is not the rollout's own: got {given[:60]!r}, generated was {made[:60]!r}"
            )
