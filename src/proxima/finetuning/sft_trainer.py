"""`SFTTrainer`: supervised fine-tuning.

In: demonstrations. Out: an adapter or a model that writes like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from proxima.data import Demonstration
from proxima.finetuning.example_batches import collate, encode, token_losses
from proxima.finetuning.finetuning_trainer import FinetuningResults, FinetuningTrainer
from proxima.models import PolicyModel
from proxima.runs import write_json

Row = tuple[list[int], list[int]]


class SFTTrainer(FinetuningTrainer[Demonstration, Row]):
    """Cross-entropy of the completion's tokens, EOS included; the prompt does not count."""

    name, judged_by, higher_is_better = "sft", "validation_loss", False
    kind = "sft"

    def make_role(self) -> PolicyModel:
        adapter = self.adapter("policy")
        return PolicyModel(self.backbone, adapter)

    def encode(self, example: Demonstration) -> Row:
        return encode(self.tokenizer, example.prompt, example.completion)

    def length(self, encoded: Row) -> int:
        return len(encoded[0]) + len(encoded[1])

    def count(self, encoded: Row) -> int:
        return len(encoded[1])

    def loss(self, rows: Sequence[Row]) -> Tensor:
        batch = collate(rows, self.role.device)
        hidden = self.backbone.hidden(batch.ids, batch.layout, self.role.adapter)
        return token_losses(self.role, hidden, batch.response_ids, self.passes.chunk).sum()

    def measure(self, rows: Sequence[Row]) -> dict[str, float]:
        summed, tokens = 0.0, 0
        for batch in self.chunks(rows, self.length):
            summed += float(self.loss(batch))
            tokens += sum(self.count(row) for row in batch)
        return {"validation_loss": summed / tokens}

    def save(self, folder: Path, results: FinetuningResults) -> None:
        super().save(folder, results)
        write_json(folder / "sft.json", {"best": results.best, "left_out": results.left_out})
