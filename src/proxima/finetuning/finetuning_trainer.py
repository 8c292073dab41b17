"""The training loop shared by supervised fine-tuning and reward-model training. In: examples. Out: the best
weights, and metrics.

Batches hold examples of similar length. The loss is divided by the count of the whole batch (tokens or
pairs), so micro-batches do not change it. Only lengths and an order stay in memory: an example is read and
encoded when its batch is due.
"""

from __future__ import annotations

import logging
import math
import random
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from proxima.base_setup import (
    MOMENTS,
    MicroBatches,
    add_adapter,
    copy_adapter,
    load_adapter,
    load_network,
    load_tokenizer,
    lora_config,
    merge_adapter,
    pick_device,
    pick_dtype,
    warn_of_another_base,
)
from proxima.config import SETTINGS_FILE, FinetuningConfig, settings_in
from proxima.core.progress import no_bars
from proxima.core.tokenizer import Tokenizer
from proxima.finetuning.encoded_examples import Encoded, Example, TokenRow
from proxima.models import Backbone, BaseModel, EngineSettings
from proxima.runs import Kind, Plot, live_folder, make_run_folder, read_origin
from proxima.runtime import forked_random_state
from proxima.runtime.engine import cut
from proxima.training import learning_rate_factor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

BUCKET = 32  # batches whose examples are sorted by length together
MAX_SKIPPED = 10  # updates with a gradient that is not finite, after which training gives up


@dataclass(repr=False)
class FinetuningResults:
    """What a fine-tuning run did."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    """One dict per evaluation: step, train_loss, and the validation metrics."""
    best: dict[str, float] = field(default_factory=dict)
    """The evaluation whose weights are saved."""
    stop_reason: str = "all epochs done"
    left_out: int = 0
    """Examples longer than max_length."""
    folder: Path = Path()
    """The trained adapter or model."""

    def plot(self, *names: str | Sequence[str]) -> Plot:
        """Curves for a notebook, as `Run.plot` draws them: `results.plot("accuracy")`."""
        columns = {name: [step[name] for step in self.metrics] for name in (self.metrics or [{}])[0]}
        return Plot.of(columns, names or [["train_loss", "validation_loss"]])

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {value:.4g}" for name, value in self.best.items())
        return f"FinetuningResults: {self.stop_reason}; best: {best or 'no evaluation'}; in {self.folder}"


class FinetuningTrainer(ABC, Generic[Example, TokenRow]):
    """Encodes, trains, evaluates, keeps the best weights."""

    name: str
    kind: Kind = "reward"
    judged_by: str
    higher_is_better: bool
    start_adapter: str | None = None
    """The adapter of the model that training starts from; None = the base."""
    ends_when_stale = False
    """Whether training ends after an epoch that improved nothing."""

    def __init__(
        self,
        config: FinetuningConfig,
        network: PreTrainedModel | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        """
        Args:
            network, tokenizer: a model already in memory (one trained from scratch, say); by default
                `model_name` is loaded.
        """
        self.config = config
        self.tokenizer = tokenizer or load_tokenizer(config.model_name, config.trust_remote_code)
        device = pick_device(config.device)
        if network is None:
            network = load_network(config, config.model_name, device, trains=config.lora_r == 0)
        self.backbone = Backbone(network.to(device))
        self.skipped = 0
        with forked_random_state(device):
            torch.manual_seed(config.seed)
            self.role = self.make_role()
        trained = sum(weight.numel() for weight in self.role.parameters())
        self.passes = MicroBatches.of(config, config.batch_size, self.backbone, MOMENTS * trained)
        self.passes.release = self.backbone.release_generation
        on_gpu = device.type == "cuda"
        self.backbone.settings = EngineSettings(
            fast=config.lora_r > 0 or not on_gpu,  # a captured graph cannot hold weights that train
            compiled=False,
            checkpointing=config.gradient_checkpointing,
            by_size=on_gpu,
            sampling_memory=lambda: self.passes.sampling,
        )
        if config.gradient_checkpointing and self.backbone.decoder is None:
            self.backbone.checkpoint_layers()

    def __repr__(self) -> str:
        trained = sum(parameter.numel() for parameter in self.role.parameters())
        return (
            f"{type(self).__name__}({self.config.model_name!r}): {trained:,} trained parameters on "
            f"{self.role.device}"
        )

    def adapter(self, name: str) -> str | None:
        """What trains: an adapter (new, or a copy of `sft_adapter`), or with lora_r = 0 the whole network in
        float32."""
        if self.config.sft_adapter:
            warn_of_another_base(self.backbone, self.config.sft_adapter)
        if self.config.lora_r == 0:
            if self.config.sft_adapter:
                self.backbone = merge_adapter(self.backbone, self.config.sft_adapter)
            self.backbone.network.float().requires_grad_(True)
            return None
        if self.config.sft_adapter:
            self.start_adapter = load_adapter(self.backbone, "sft", self.config.sft_adapter)
            return copy_adapter(self.backbone, self.start_adapter, name)
        return add_adapter(self.backbone, name, lora_config(self.config, self.backbone.network))

    @abstractmethod
    def make_role(self) -> BaseModel:
        """The model that trains."""

    @abstractmethod
    def encode(self, example: Example) -> TokenRow:
        """An example as token ids."""

    @abstractmethod
    def length(self, encoded: TokenRow) -> int:
        """Tokens of the longest sequence in an encoded example."""

    def tokens(self, encoded: TokenRow) -> int:
        """Tokens of all sequences in an encoded example."""
        return self.length(encoded)

    @abstractmethod
    def count(self, encoded: TokenRow) -> int:
        """The example's weight in the mean loss: its tokens, or 1 per pair."""

    @abstractmethod
    def loss(self, rows: Sequence[TokenRow]) -> Tensor:
        """Summed loss of some encoded examples."""

    @abstractmethod
    def measure(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        """Metrics on validation examples; one of them is `judged_by`."""

    def train(
        self, examples: Sequence[Example], validation: Sequence[Example] | None = None
    ) -> FinetuningResults:
        """Train on examples, evaluate on validation (a share of the examples by default), save the best
        weights."""
        if len(examples) < 2:
            raise ValueError(f"{self.name} needs at least 2 examples, got {len(examples)}")
        held_out: Sequence[Example] = examples if validation is None else validation
        if validation is None:
            order, places = self.split(examples)
        else:
            order, places = array("Q", range(len(examples))), array("Q", range(len(held_out)))
        results = FinetuningResults()
        self.prepare((examples[i] for i in order), (held_out[i] for i in places))
        train_rows = self._fitting(examples, order)
        validation_rows = self._fitting(held_out, places)
        results.left_out = len(order) - len(train_rows)
        if not len(train_rows) or not len(validation_rows):
            raise ValueError(f"no example fits max_length ({self.config.max_length} tokens); raise it")
        results.folder = self._folder()
        with live_folder(results.folder, self.kind) as write_metrics:
            self.settle(train_rows, validation_rows)
            with forked_random_state(self.role.device):
                torch.manual_seed(self.config.seed)
                self._fit(train_rows, validation_rows, results, write_metrics)
            self.finish(validation_rows)
            self.save(results.folder, results)
        return results

    def split(self, examples: Sequence[Example]) -> tuple[array[int], array[int]]:
        """Positions of the examples to train on and of those that are held out, where none are given."""
        order = self.shuffled(len(examples))
        cut = self.held_out_count(len(examples))
        return order[cut:], order[:cut]

    def held_out_count(self, count: int) -> int:
        return max(1, round(self.config.validation_share * count))

    def shuffled(self, count: int) -> array[int]:
        order = array("Q", range(count))
        random.Random(f"validation {self.config.seed}").shuffle(order)
        return order

    def prepare(self, examples: Iterable[Example], held_out: Iterable[Example]) -> None:
        """Compute what must be known about the data before training."""

    def settle(self, rows: Encoded[Example, TokenRow], held_out: Encoded[Example, TokenRow]) -> None:
        """Decide what depends on the encoded examples, before training."""

    def keep(self) -> None:
        """The weights of the last evaluation are the best so far."""

    def finish(self, held_out: Sequence[TokenRow]) -> None:
        """Look at the best weights, and change them, before they are saved."""

    def save(self, folder: Path, results: FinetuningResults) -> None:
        self.role.save(folder)
        self.tokenizer.save_pretrained(folder)
        config = self.config
        if self.backbone.quantized:  # the codes depend on the type that was quantised
            dtype = str(pick_dtype(config.dtype, self.role.device)).removeprefix("torch.")
            config = replace(config, dtype=dtype)  # type: ignore[arg-type]  # one of the names
        config.to_yaml(folder / SETTINGS_FILE)

    def _fit(
        self,
        rows: Encoded[Example, TokenRow],
        validation: Encoded[Example, TokenRow],
        results: FinetuningResults,
        write_metrics: Callable[[Mapping[str, float]], None],
    ) -> None:
        config = self.config
        parameters = self.role.parameters()
        optimizer = self._make_optimizer(parameters)
        per_epoch = math.ceil(len(rows) / config.batch_size)
        total = config.epochs * per_epoch
        warmup = round(config.warmup_share * total)
        best: list[Tensor] = []
        recent: list[Tensor] = []  # losses since the last evaluation
        stale = 0
        started = time.perf_counter()
        bar = tqdm(total=total, desc=self.name, unit="step", disable=no_bars())
        schedule = ((epoch, batch) for epoch in range(config.epochs) for batch in self.batches(rows, epoch))
        for step, (epoch, batch) in enumerate(schedule, 1):
            factor = learning_rate_factor(config.lr_schedule, step - 1, total, warmup)
            optimizer.param_groups[0]["lr"] = factor * config.learning_rate
            recent.append(self.train_step(batch, optimizer, parameters))
            bar.update()
            ends_epoch = self.ends_when_stale and step % per_epoch == 0
            if step % config.eval_every and step != total and not ends_epoch:
                continue
            measured = {"train_loss": float(torch.stack(recent).mean()), **self._measure(validation, step)}
            recent = []
            bar.write(self._said(measured, f"step {step}/{total}", time.perf_counter() - started))
            results.metrics.append({"step": step, "epoch": epoch + 1, **measured})
            write_metrics(results.metrics[-1])
            if self._is_better(measured, results.best):
                results.best = results.metrics[-1]
                best = [parameter.detach().clone() for parameter in parameters]
                self.keep()
                stale = 0
            else:
                stale += 1
            if config.patience and stale >= config.patience:
                results.stop_reason = f"{self.judged_by} has not improved in {stale} evaluations"
                break
            if ends_epoch and results.best["epoch"] < epoch + 1:
                results.stop_reason = f"{self.judged_by} has not improved in epoch {epoch + 1}"
                break
        bar.close()
        for parameter, value in zip(parameters, best, strict=True):
            parameter.data.copy_(value)
        self.backbone.network.eval()

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            fused=all(parameter.is_cuda for parameter in parameters),
        )

    def _said(self, measured: Mapping[str, float], where: str, seconds: float) -> str:
        """The line of an evaluation, which is also logged."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in measured.items())
        line = f"{self.name}: {where}  {shown}  {seconds:.0f} s"
        log.info("%s", line)
        return line

    def train_step(
        self, batch: list[TokenRow], optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
    ) -> Tensor:
        """One optimiser step; the batch's mean loss. Dropout acts here and only here."""
        self.backbone.network.train()

        def backward() -> Tensor:
            optimizer.zero_grad()
            total = sum(self.count(row) for row in batch)
            summed = torch.zeros((), device=self.role.device)
            for rows in self.chunks(batch, self.tokens):
                loss = self.loss(rows) / total
                loss.backward()
                summed += loss.detach()
            return summed

        with self.role.training():
            summed = self.passes.run(backward, max(map(self.tokens, batch)))
        norm = nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm or float("inf"))
        if norm.isfinite():
            optimizer.step()
        else:
            self.skipped += 1
            if self.skipped == MAX_SKIPPED:
                raise ValueError(f"{MAX_SKIPPED} updates had a gradient that is not finite; {self._remedy()}")
        return summed

    def _remedy(self) -> str:
        return f"lower learning_rate ({self.config.learning_rate:g}), or set dtype to float32"

    @torch.no_grad()
    def _measure(self, rows: Sequence[TokenRow], step: int) -> dict[str, float]:
        """Validation metrics, and how many updates were skipped if any were."""
        self.backbone.network.eval()
        with self.role.active():
            measured = self.passes.run(lambda: self.measure(rows), max(map(self.tokens, rows)))
        if math.isnan(measured[self.judged_by]):
            raise ValueError(f"{self.judged_by} is not a number at step {step}; {self._remedy()}")
        return {**measured, "skipped_updates": self.skipped} if self.skipped else measured

    def _is_better(self, measured: dict[str, float], best: dict[str, float]) -> bool:
        if not best:
            return True
        new, old = measured[self.judged_by], best[self.judged_by]
        return new > old if self.higher_is_better else new < old

    def by_passes(
        self, rows: Sequence[Item], tokens: Callable[[Item], int], work: Callable[[Sequence[Item]], Result]
    ) -> list[Result]:
        """What `work` makes of the rows of each pass; smaller passes when memory runs out."""
        longest = max(map(tokens, rows), default=0)
        return self.passes.run(lambda: [work(chunk) for chunk in self.chunks(rows, tokens)], longest)

    def chunks(self, rows: Sequence[Item], tokens: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
        """Rows of one pass each, within the sequences and tokens that a pass may have."""
        size = self.passes.size
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            for group in cut([tokens(row) for row in block], self.passes.tokens):
                yield [block[i] for i in group]

    def _fitting(self, examples: Sequence[Example], places: Sequence[int]) -> Encoded[Example, TokenRow]:
        """The examples at these positions that fit max_length."""
        lengths = ((place, self.length(self.encode(examples[place]))) for place in places)
        return Encoded(examples, self.encode, (pair for pair in lengths if pair[1] <= self.config.max_length))

    def batches(self, rows: Encoded[Example, TokenRow], epoch: int) -> Iterator[list[TokenRow]]:
        """Shuffled, but sorted by length within a bucket of batches, so that little is padding."""
        size = self.config.batch_size
        rng = random.Random(f"{self.name} {self.config.seed} {epoch}")
        order = rng.sample(range(len(rows)), len(rows))
        batches = []
        for start in range(0, len(order), size * BUCKET):
            bucket = sorted(order[start : start + size * BUCKET], key=lambda i: rows.lengths[i])
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        rng.shuffle(batches)
        return ([rows[i] for i in batch] for batch in batches)

    def _folder(self) -> Path:
        """Created before training, so that a name that is taken or cannot be written costs no time."""

        def is_free(path: Path) -> bool:
            unfinished = read_origin(path).get("kind") in ("sft", "reward")
            return settings_in(path) is None and (unfinished or not (path / "metrics.jsonl").exists())

        parent = Path(self.config.run_dir)
        return make_run_folder(parent, self.config.run_name, f"{self.name}-", is_free)
