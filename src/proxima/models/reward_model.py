"""`RewardModel`, `ClassifierReward`: one score a sequence. In: token ids with EOS; text for a classifier. Out: scores (B,)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.engine import pack, pack_mask
from proxima.files import read_file
from proxima.models.backbone import Backbone
from proxima.models.base_model import BaseModel
from proxima.types import Tokens

REPORT_FILE = "reward.json"
NEAR_CHANCE = 0.55


def reward_warning(folder: str) -> str:
    """What a user should know before trusting the reward model in a folder; empty where there is nothing to say."""
    path = Path(folder) / REPORT_FILE
    try:
        accuracy = float(json.loads(read_file(path))["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the reward model {folder!r} has no {REPORT_FILE}: nothing is known of its held-out accuracy"
    if accuracy < NEAR_CHANCE:
        return f"the reward model {folder!r} is near chance: {accuracy:.3f} of its held-out pairs are ordered right"
    return ""


class RewardModel(BaseModel):
    """Base plus the reward adapter and a scalar head, read at the last real token."""

    def __init__(self, backbone: Backbone, adapter: str | None, head: nn.Linear, source: str):
        super().__init__(backbone, adapter, head)
        self.source = source
        """Folder it was loaded from, or `untrained`."""

    def token_scores(self, tokens: Tokens) -> Tensor:
        """Scores (B,) of a rollout."""
        layout = pack(tokens.prompt_sizes, tokens.sizes, tokens.prompt_ids.shape[1], self.device, read_last=True)
        return self.head_values(self.backbone.hidden(tokens.input_ids, layout, self.adapter))

    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores (B,) of sequences (B, T), padded on either side."""
        return self.head_values(self.backbone.hidden(ids, pack_mask(mask), self.adapter))


class ClassifierReward:
    """Any `AutoModelForSequenceClassification` with a tokenizer of its own: text in, one logit out."""

    def __init__(self, network: Any, tokenizer: Any, label: int | str | None = None, max_length: int = 0):
        """
        Args:
            label: index or name of the logit that is the score; may be left out where there is only one.
            max_length: texts of more tokens are cut on the left; 0 = they fail, as does what the network cannot read.
        """
        self.network, self.tokenizer = network.eval().requires_grad_(False), tokenizer
        known = (getattr(network.config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None))
        self.limit = min((number for number in known if number is not None), default=None)
        if max_length and self.limit is not None and max_length > self.limit:
            raise ValueError(f"max_length ({max_length}) is more than the reward model's {self.limit} tokens")
        self.label, self.max_length = pick_label(network.config, label), max_length

    @torch.no_grad()
    def scores(self, texts: Sequence[str], special: bool = True) -> Tensor:
        """Scores (B,), nan for a text that is too long.

        Args:
            special: add the tokenizer's own special tokens (False where a chat template has written them).
        """
        way: dict[str, Any] = {"add_special_tokens": special}
        if self.max_length:
            way |= {"truncation": True, "max_length": self.max_length}
        rows = self.tokenizer(list(texts), **way)["input_ids"]
        fits = [i for i, row in enumerate(rows) if row and (self.limit is None or len(row) <= self.limit)]
        scores = torch.full((len(rows),), float("nan"))
        if fits:
            batch = self.tokenizer([texts[i] for i in fits], return_tensors="pt", padding=True, **way)
            scores[fits] = self.network(**batch.to(self.network.device)).logits[:, self.label].float().cpu()
        return scores


def pick_label(config: Any, label: int | str | None) -> int:
    """Which logit is the score, or an error that names the labels."""
    count, names = config.num_labels, {str(name): int(i) for i, name in config.id2label.items()}
    listed = ", ".join(f"{i} ({name})" for name, i in names.items())
    if label is None:
        if count != 1:
            raise ValueError(f"the classifier has {count} labels: {listed}; say which is the reward with the option label=...")
        return 0
    index = names.get(label) if isinstance(label, str) else label
    if index is None or not 0 <= index < count:
        raise ValueError(f"the classifier has no label {label!r}; it has {listed}")
    return index
