"""`RewardModel` and `ClassifierReward`: from token ids, EOS included, to one score per sequence (B,); an
ensemble's mean minus its doubt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proxima.core.context_length import context_length
from proxima.core.regular_files import read_file
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Tokens
from proxima.models.backbone import Backbone
from proxima.models.base_model import BaseModel
from proxima.models.score_unit import ScoreUnit
from proxima.runtime.engine import pack, pack_mask

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

REPORT_FILE = "reward.json"
NEAR_CHANCE = 0.55  # held-out accuracy


def reward_warning(folder: str) -> str:
    """What a user should know before trusting the reward model in a folder; empty where there is nothing to
    warn of."""
    path = Path(folder) / REPORT_FILE
    try:
        accuracy = float(json.loads(read_file(path))["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the reward model {folder!r} has no {REPORT_FILE}: nothing is known of its held-out accuracy"
    if accuracy < NEAR_CHANCE:
        return (
            f"the reward model {folder!r} is near chance: {accuracy:.3f} of its held-out pairs are "
            "ordered right"
        )
    return ""


def saved_units(folder: str | Path) -> list[ScoreUnit]:
    """The unit that the scores of each head of the reward model in a folder have been given, as it records;
    one for all heads in a folder of an earlier version; empty where it records none."""
    try:
        unit = json.loads(read_file(Path(folder) / REPORT_FILE))["unit"]
        return [
            ScoreUnit(float(each["mean"]), float(each["deviation"])) for each in unit.get("heads", [unit])
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


class RewardModel(BaseModel):
    """The base with the reward adapter and a scalar head, read at the last real token.

    An ensemble has several heads, trained on different parts of the data: the score is their mean.
    """

    def __init__(self, backbone: Backbone, adapter: str | None, head: nn.Linear, source: str):
        super().__init__(backbone, adapter, head)
        self.source = source
        """The folder it was loaded from, or `untrained`."""

    @property
    def heads(self) -> int:
        assert self.head is not None
        return self.head.out_features

    def member_scores(self, hidden: Tensor) -> Tensor:
        """Scores (M, heads) of hidden states (M, D), in float32."""
        assert self.head is not None
        return self.head(hidden.float())

    def token_members(self, tokens: Tokens) -> Tensor:
        """Scores (B, heads) of a rollout."""
        layout = pack(
            tokens.prompt_sizes, tokens.sizes, tokens.prompt_ids.shape[1], self.device, read_last=True
        )
        return self.member_scores(self.backbone.hidden(tokens.input_ids, layout, self.adapter))

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """What the head reads (B, D) of sequences (B, T), padded on either side."""
        return self.backbone.hidden(ids, pack_mask(mask), self.adapter)

    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores (B,) of these."""
        return self.member_scores(self.hidden(ids, mask)).mean(1)


def doubted(members: Tensor, doubt_coef: float) -> tuple[Tensor, Tensor]:
    """Mean - doubt_coef * spread (B,) of the scores of several heads (B, K), and the spread (B,): their
    standard deviation."""
    spread = members.std(1, correction=0)
    return members.mean(1) - doubt_coef * spread, spread


def least_sure(first: Tensor, second: Tensor) -> Tensor:
    """How unsure a reward model is which of two answers is better (B,), from the scores of its heads (B, K)
    for either: the standard deviation of their differences relative to the mean one; with one head, minus
    the distance of the scores.

    The deviation alone is largest where scores differ most, whose order is known already.
    """
    difference = first - second
    mean = difference.mean(1).abs()
    if difference.shape[1] == 1:
        return -mean
    deviation = difference.std(1, correction=0)
    return deviation / (mean + deviation).clamp(min=torch.finfo(mean.dtype).tiny)


class ClassifierReward:
    """Any `AutoModelForSequenceClassification`: token ids in, one logit out.

    A decoder that scores each token is read at the last token of each row, whatever its pad id. Any other
    network is called through its own forward pass.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: Tokenizer,
        label: int | str | None = None,
        max_length: int = 0,
    ):
        """
        Args:
            label: index or name of the logit that is the score; may be left out where there is only one.
            max_length: rows of more tokens are cut on the left; 0 = they fail, as does what the network
                cannot read.
        """
        self.network = network.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        known = (context_length(network.config), getattr(tokenizer, "model_max_length", None))
        self.limit = min((number for number in known if number is not None), default=None)
        if max_length and self.limit is not None and max_length > self.limit:
            raise ValueError(f"max_length ({max_length}) is more than the reward model's {self.limit} tokens")
        self.label = pick_label(network.config, label)
        self.max_length = max_length
        self.decoder: RewardModel | None = None
        if (head := token_head(network)) is not None:
            self.decoder = RewardModel(Backbone(network.base_model), None, pick_row(head, self.label), "")

    @torch.no_grad()
    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores (B,) of rows of ids, nan for one that is empty or too long."""
        return self._of_fitting(rows, self._forward)

    @torch.no_grad()
    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states (B, D) that a decoder's head reads, nan for a row that is empty or too long."""
        decoder = self.decoder
        assert decoder is not None
        return self._of_fitting(rows, lambda fitting: decoder.hidden(*self._padded(fitting)))

    @property
    def weight(self) -> Tensor | None:
        """The weight (D,) of a decoder's head."""
        head = None if self.decoder is None else self.decoder.head
        return None if head is None else head.weight[0]

    def _of_fitting(
        self, rows: Sequence[Sequence[int]], compute: Callable[[list[list[int]]], Tensor]
    ) -> Tensor:
        """What is computed of the rows that can be read, with nan for the others."""
        cut = [self.cut(list(row)) for row in rows]
        fits = [i for i, row in enumerate(cut) if row and (self.limit is None or len(row) <= self.limit)]
        if not fits:
            return torch.full((len(cut),), float("nan"))
        read = compute([cut[i] for i in fits]).float().cpu()
        found = read.new_full((len(cut), *read.shape[1:]), float("nan"))
        found[fits] = read
        return found

    def cut(self, row: list[int]) -> list[int]:
        """The last `max_length` tokens; a leading BOS is kept."""
        if not self.max_length or len(row) <= self.max_length:
            return row
        first = row[:1] if row[0] == self.tokenizer.bos_token_id else []
        return [*first, *row[len(row) - self.max_length + len(first) :]]

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask (B, T), padded on the right."""
        sizes = torch.tensor([[len(row)] for row in rows])
        mask = torch.arange(max(map(len, rows))) < sizes
        ids = torch.full(mask.shape, self.tokenizer.pad_token_id)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return ids.to(self.network.device), mask.to(self.network.device)

    def _forward(self, rows: list[list[int]]) -> Tensor:
        ids, mask = self._padded(rows)
        if self.decoder is None:
            return self.network(input_ids=ids, attention_mask=mask.long()).logits[:, self.label]
        return self.decoder.scores(ids, mask)


@torch.no_grad()
def token_head(network: PreTrainedModel) -> nn.Linear | None:
    """The head of a network that scores every token and reads the last one; None where its forward pass does
    anything else."""
    head = getattr(network, "score", None)
    inner = network.base_model
    if not isinstance(head, nn.Linear) or inner is network:
        return None
    pad = network.config.get_text_config().pad_token_id
    ids = torch.tensor([[i for i in range(4) if i != pad]], device=network.device)
    try:
        own = head(inner(input_ids=ids).last_hidden_state)[:, -1]
        theirs = network(input_ids=ids).logits
    except (AttributeError, TypeError, ValueError):  # a model's own code may do anything
        return None
    same = own.shape == theirs.shape and torch.allclose(own.float(), theirs.float(), rtol=1e-2, atol=1e-3)
    return head if same else None


def pick_row(head: nn.Linear, index: int) -> nn.Linear:
    """One output of a linear layer, as a float32 scalar head."""
    # `skip_init` draws no random numbers
    chosen = nn.utils.skip_init(nn.Linear, head.in_features, 1, device=head.weight.device)
    chosen.weight.data.copy_(head.weight.data[index : index + 1])
    chosen.bias.data.copy_(torch.zeros(1) if head.bias is None else head.bias.data[index : index + 1])
    return chosen.requires_grad_(False)


def pick_label(config: PretrainedConfig, label: int | str | None) -> int:
    """The index of the logit that is the score; raises a ValueError that lists the labels."""
    count: int = config.num_labels
    names = {str(name): int(i) for i, name in config.id2label.items()}
    listed = ", ".join(f"{i} ({name})" for name, i in names.items())
    if label is None:
        if count != 1:
            raise ValueError(
                f"the classifier has {count} labels: {listed}; say which is the reward with the option "
                "label=..."
            )
        return 0
    index = names.get(label) if isinstance(label, str) else label
    if index is None or not 0 <= index < count:
        raise ValueError(f"the classifier has no label {label!r}; it has {listed}")
    return index
