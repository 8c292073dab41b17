"""`TokenAttributor`: from what was generated to state-action pairs."""

from __future__ import annotations

from collections.abc import Sequence

from proxima.core.pairs import SAPairs
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Rollout
from proxima.token_attribution.extractor import check_texts, split_text
from proxima.token_attribution.sa_pair_builder import pairs_from_pieces, pairs_from_rollout


class TokenAttributor:
    """Gives each generated token its state, its action and its log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None = None):
        """
        Args:
            tokenizer: cuts a plain text into tokens; without one, at the spaces. A rollout brings its own.
        """
        self.tokenizer = tokenizer

    def extract_pairs(
        self, text: str | Sequence[str], logprobs: Rollout | Sequence[float], prompt: str = ""
    ) -> SAPairs:
        """
        Args:
            text: a generated text, or the texts of a whole rollout.
            logprobs: what `SequenceGenerator.generate` returned for it; or plain numbers, one a token, then
                `logprob_ref` is None.
            prompt: with plain numbers, the text before; a rollout knows its own.
        """
        if isinstance(logprobs, Rollout):
            check_texts([text] if isinstance(text, str) else list(text), logprobs)
            return pairs_from_rollout(logprobs)
        if not isinstance(text, str):
            raise ValueError("plain log-probabilities belong to one text; give a rollout for several")
        return pairs_from_pieces(prompt, split_text(text, self.tokenizer), logprobs)
