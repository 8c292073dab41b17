"""`RewardModel`: one score a sequence. In: token ids with EOS, or text for a classifier of its own. Out: scores (B,)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.engine import pack_mask
from proxima.models.base_model import Backbone, BaseModel

REPORT_FILE = "reward.json"
NEAR_CHANCE = 0.55


def reward_warning(folder: str) -> str:
    """What a user should know before trusting the reward model in a folder; empty where there is nothing to say."""
    path = Path(folder) / REPORT_FILE
    try:
        accuracy = float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])
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

    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores (B,) of sequences (B, T), padded on either side."""
        return self.head_values(self.backbone.hidden(ids, pack_mask(mask), self.adapter))


class ClassifierReward:
    """Any `AutoModelForSequenceClassification` with a tokenizer of its own: text in, its first logit out."""

    def __init__(self, network: Any, tokenizer: Any):
        self.network, self.tokenizer = network.eval().requires_grad_(False), tokenizer

    @torch.no_grad()
    def scores(self, texts: Sequence[str]) -> Tensor:
        limit = getattr(self.network.config, "max_position_embeddings", None)
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True)
        if limit is not None and batch["input_ids"].shape[1] > limit:
            raise ValueError(f"a text of {batch['input_ids'].shape[1]} tokens is longer than the reward model's {limit}")
        return self.network(**batch.to(self.network.device)).logits[:, 0].float()
