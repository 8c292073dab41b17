"""`Generation`: sampling with a static cache. In: prompts, an adapter's name. Out: responses, and from what they were chosen.

Prompts are read once, laid end to end; then one token a running sequence and step. A step works on fixed buffers only, so on a
GPU it is captured in a CUDA graph, one for each number of slots in `BUCKETS`. A slot whose sequence has ended is given to the
next waiting prompt; when none waits, the running sequences move together into fewer slots. What a sequence samples does not
depend on its slot, so none of this can be seen in the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from proxima.engine.attention import cached_attention, packed_attention
from proxima.engine.decoder import Decoder, Functions, Loras
from proxima.engine.layout import Layout, pack
from proxima.sampling import Sampling, choose, fold, hash_words, token_logprobs, truncate
from proxima.types import KeptSet, Tokens

BUCKETS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
STRIDE = 8  # steps on a GPU between looks at which sequences have ended
PREFILL_TOKENS = 32_768  # prompt tokens read at once
CACHE_STEP = 64  # the cache grows in steps of so many tokens
REFILL = 0.25  # share of the slots that must be free before new prompts are read


_NONE = torch.zeros(0, dtype=torch.long)
_NOWHERE = Layout(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, ())


@dataclass
class Slots:
    """The state of a step: fixed buffers, of which the first `n` slots are in use. C slots, S cache tokens, R responses."""

    tokens: Tensor  # (C,) last token of each sequence
    lengths: Tensor  # (C,) int32, tokens in its cache
    columns: Tensor  # (C,) responses written
    rows: Tensor  # (C,) row of the batch
    lanes: Tensor  # (C, 2) hash of seed, step and sequence
    running: Tensor  # (C,) bool
    keys: list[Tensor]  # a layer: (C, S, Hkv, D)
    values: list[Tensor]
    starts: Tensor  # (2, C + 1) int32
    base: Tensor  # (C,) first cache place of each slot

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        return self.keys[0].shape[1]

    def per_slot(self) -> list[Tensor]:
        return [self.tokens, self.lengths, self.columns, self.rows, self.lanes, self.running]


@dataclass
class Outputs:
    """What was sampled, one row a prompt and one more that takes what nobody reads."""

    ids: Tensor  # (B + 1, R)
    logprobs: Tensor  # (B + 1, R) float32, by the engine's own arithmetic
    kept: KeptSet | None

    def parts(self) -> list[Tensor]:
        kept = [] if self.kept is None else [part for part in (self.kept.ids, self.kept.bits) if part is not None]
        return [self.ids, self.logprobs, *kept]


class Generation:
    """Holds the cache, the buffers and the graphs from one call to the next."""

    def __init__(self, decoder: Decoder, max_slots: int = 256):
        self.decoder, self.max_slots = decoder, max_slots
        self.on_gpu = next(decoder.network.parameters()).is_cuda
        self.clock = Clock(self.on_gpu)
        self.replays = self.eager_steps = 0
        """Decode steps by graph and without one since the start."""
        self._slots: Slots | None = None
        self._outputs: Outputs | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._made_for: Any = None
        self._kernel = _decode_kernel(decoder) if self.on_gpu else None
        self._functions = _small_functions(decoder) if self._kernel is not None else decoder.functions
        self._silent = [Loras()] * len(decoder.blocks)  # no gradients are wanted
        self._pick: Callable[..., Any] = torch.compile(pick, dynamic=True) if decoder.compiled else pick

    @torch.no_grad()
    def generate(self, prompts: Tokens, sampling: Sampling, adapter: str | None) -> Tokens:
        """One response a prompt, until its first EOS or `max_new_tokens`."""
        count = len(prompts.prompts)
        sizes = prompts.prompt_sizes
        slots, outputs = self._prepare(prompts, sampling, adapter)
        lanes = hash_words(prompts.keys, sampling.seed, sampling.step)
        eos = torch.tensor(sampling.eos_ids, device=prompts.keys.device, dtype=torch.long)
        step = self._stepper(slots, outputs, sampling, eos)
        waiting = list(range(count))
        used = self._bucket(min(count, slots.count))
        slots.running.zero_()
        slots.rows.fill_(count)
        free = list(range(min(used, slots.count)))
        left = 0  # steps until the youngest sequence must have ended
        while True:
            if waiting and free:
                taken, waiting = waiting[: len(free)], waiting[len(free) :]
                for group in _by_tokens(taken, sizes.tolist(), PREFILL_TOKENS):
                    self._prefill(group, free[: len(group)], prompts, lanes, slots, outputs, sampling, eos)
                    free = free[len(group) :]
                left = sampling.max_new_tokens - 1
            with self.clock.lap(min(STRIDE, left) if self.on_gpu else 1) as steps:
                for _ in range(steps):
                    step(used)
            left -= steps
            alive = slots.running[:used].nonzero().flatten().tolist()
            if not alive and not waiting:
                break
            if waiting:
                idle = sorted(set(range(used)) - set(alive))
                free = idle if len(idle) >= REFILL * used or not alive else []
            elif (fewer := self._bucket(len(alive))) < used and (self.on_gpu or fewer <= 0.75 * used):
                self._move_together(alive, slots, count)
                used = fewer
        return self._collect(prompts, outputs, eos, count)

    # --- buffers ---

    def _bucket(self, count: int) -> int:
        """Slots for so many sequences: on a GPU one of few sizes, so that few graphs serve all."""
        if not self.on_gpu:
            return count
        return next((size for size in BUCKETS if size >= count), count)

    def _prepare(self, prompts: Tokens, sampling: Sampling, adapter: str | None) -> tuple[Slots, Outputs]:
        """Buffers large enough, outputs emptied, the adapter's weights as they are now."""
        count, device = len(prompts.prompts), prompts.keys.device
        need = int(prompts.prompt_sizes.max()) + sampling.max_new_tokens
        vocabulary = self.decoder.network.get_output_embeddings().weight.shape[0]
        chosen_from = _kept_shape(sampling, vocabulary)
        slots, outputs = self._slots, self._outputs
        setup = (sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.top_p, adapter, chosen_from)
        capacity = self._bucket(min(count, self.max_slots))
        if slots is None or slots.count < capacity or slots.size < need or slots.tokens.device != device:
            self._graphs.clear()
            size = -(-need // CACHE_STEP) * CACHE_STEP
            slots = self._slots = self._new_slots(max(capacity, slots.count if slots else 0), size, device)
        if outputs is None or outputs.ids.shape[0] <= count or setup != self._made_for:
            self._graphs.clear()
            outputs = self._outputs = _new_outputs(count, sampling.max_new_tokens, chosen_from, device)
            self._made_for = setup
        for part in outputs.parts():
            part.fill_(-1 if part.dtype == torch.int32 else 0)
        self.decoder.load(adapter)
        return slots, outputs

    def _new_slots(self, count: int, size: int, device: torch.device) -> Slots:
        shape = self.decoder.shape
        dtype = self.decoder.blocks[0].norm.weight.dtype
        self._slots = None  # the old cache goes first

        def cache() -> list[Tensor]:
            return [
                torch.zeros(count, size, shape.kv_heads, shape.head_size, dtype=dtype, device=device)
                for _ in self.decoder.blocks
            ]

        longs = [torch.zeros(count, dtype=torch.long, device=device) for _ in range(3)]
        places = torch.arange(count + 1, device=device, dtype=torch.int32)
        return Slots(
            tokens=longs[0],
            lengths=torch.zeros(count, dtype=torch.int32, device=device),
            columns=longs[1],
            rows=longs[2],
            lanes=torch.zeros(count, 2, dtype=torch.long, device=device),
            running=torch.zeros(count, dtype=torch.bool, device=device),
            keys=cache(),
            values=cache(),
            starts=torch.stack([places, places * size]),
            base=torch.arange(count, device=device) * size,
        )

    # --- steps ---

    def _prefill(
        self, rows: list[int], where: list[int], prompts: Tokens, lanes: Tensor, slots: Slots, outputs: Outputs,
        sampling: Sampling, eos: Tensor,
    ) -> None:  # fmt: skip
        """Read these prompts into these slots and choose their first tokens."""
        device = prompts.keys.device
        chosen, places = torch.tensor(rows), torch.tensor(where)
        lengths = prompts.prompt_sizes[chosen]
        width = prompts.prompt_ids.shape[1]
        layout = pack(lengths, None, width, device, read_last=True)
        ids = prompts.prompt_ids[chosen.to(device)]
        slot = places.to(device)
        place = slots.base[slot][layout.rows] + layout.positions

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slots.keys[layer].flatten(0, 1).index_copy_(0, place, k)
            slots.values[layer].flatten(0, 1).index_copy_(0, place, v)
            return packed_attention(q, k, v, layout, self.decoder.shape.scale)

        states = self.decoder.run(ids.flatten()[layout.source], layout, self._silent, attend, read=layout.read)
        logits = self.decoder.head(states)
        start = torch.zeros(len(rows), dtype=torch.long, device=device)
        row = chosen.to(device)
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        drawn = self._pick(logits, lanes[row], start, sampling.temperature, sampling.top_k, sampling.top_p)
        going = write(drawn, row, start, running, outputs, eos, sampling.max_new_tokens)
        values = (drawn[0], lengths.to(device).int(), start + 1, row, lanes[row], going)
        for buffer, value in zip(slots.per_slot(), values, strict=True):
            buffer[slot] = value

    def _stepper(self, slots: Slots, outputs: Outputs, sampling: Sampling, eos: Tensor) -> Callable[[int], None]:
        """One decode step of the first n slots: by graph on a GPU, which is captured when first asked for."""

        def plain(n: int) -> None:
            tokens, lengths = slots.tokens[:n], slots.lengths[:n]
            now = lengths + 1
            place = slots.base[:n] + lengths
            scale = self.decoder.shape.scale

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys, values = slots.keys[layer][:n], slots.values[layer][:n]
                if self._kernel is not None:
                    return self._kernel(q, k, v, keys, values, lengths, scale)
                keys.flatten(0, 1).index_copy_(0, place, k)
                values.flatten(0, 1).index_copy_(0, place, v)
                return cached_attention(q, keys, values, now, slots.starts[:, : n + 1], scale)

            here = replace(_NOWHERE, positions=lengths)
            logits = self.decoder.head(self.decoder.run(tokens, here, self._silent, attend, functions=self._functions))
            rows, columns, running = slots.rows[:n], slots.columns[:n], slots.running[:n]
            drawn = self._pick(logits, slots.lanes[:n], columns, sampling.temperature, sampling.top_k, sampling.top_p)
            going = write(drawn, rows, columns, running, outputs, eos, sampling.max_new_tokens)
            tokens.copy_(drawn[0])
            lengths.add_(running.int())
            columns.add_(running.long())
            running.copy_(going)

        def eager(n: int) -> None:
            self.eager_steps += 1
            plain(n)

        def by_graph(n: int) -> None:
            if n not in self._graphs:
                self._graphs[n] = self._capture(plain, n, slots, outputs)
            self._graphs[n].replay()
            self.replays += 1

        return by_graph if self.on_gpu else eager

    def _capture(self, plain: Callable[[int], None], n: int, slots: Slots, outputs: Outputs) -> torch.cuda.CUDAGraph:
        """Record a step; the state that warming up changes is put back."""
        saved = [buffer.clone() for buffer in (*slots.per_slot(), *outputs.parts())]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                plain(n)
                self.eager_steps += 1
        torch.cuda.current_stream().wait_stream(stream)
        for buffer, value in zip((*slots.per_slot(), *outputs.parts()), saved, strict=True):
            buffer.copy_(value)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            plain(n)
        return graph

    def _move_together(self, alive: list[int], slots: Slots, nobody: int) -> None:
        """The running sequences into the first slots."""
        device = slots.tokens.device
        old = torch.tensor(alive, device=device)
        for buffer in (*slots.per_slot(), *slots.keys, *slots.values):
            buffer[: len(alive)] = buffer[old]
        slots.running[len(alive) :] = False
        slots.rows[len(alive) :] = nobody

    def _collect(self, prompts: Tokens, outputs: Outputs, eos: Tensor, count: int) -> Tokens:
        """The batch with its responses, cut to the longest."""
        ids = outputs.ids[:count]
        is_end = torch.isin(ids, eos)
        before = is_end.long().cumsum(1) - is_end.long()
        mask = before == 0  # up to and including the first EOS
        width = int(mask.sum(1).max())
        kept = outputs.kept
        if kept is not None:
            kept = kept.map(lambda part: part[:count, :width].clone())
        return replace(
            prompts,
            response_ids=ids[:, :width].masked_fill(~mask[:, :width], 0),
            mask=mask[:, :width].clone(),
            ended=(is_end & mask).any(1),
            kept=kept,
            sampled_logprobs=outputs.logprobs[:count, :width].masked_fill(~mask[:, :width], 0),
        )


class Clock:
    """Seconds of a decode step, by the device's own clock: reading it waits, stopping it does not."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self._laps: list[tuple[Any, Any, int]] = []

    @contextmanager
    def lap(self, steps: int) -> Iterator[int]:
        start = self._now()
        yield steps
        self._laps = [*self._laps[-99:], (start, self._now(), steps)]

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """The median over the last laps; nan where there was none."""
        if self.on_gpu:
            torch.cuda.synchronize()
        laps = [((a.elapsed_time(b) / 1000 if self.on_gpu else b - a), steps) for a, b, steps in self._laps if steps]
        return median(spent / steps for spent, steps in laps) if laps else math.nan


def _decode_kernel(decoder: Decoder) -> Callable[..., Tensor] | None:
    """The Triton kernel, where Triton is installed and the shapes fit."""
    try:
        from proxima.engine.kernels.decode import decode_attention, fits
    except ImportError:
        return None
    shape = decoder.shape
    half = decoder.blocks[0].norm.weight.dtype in (torch.bfloat16, torch.float16)
    return decode_attention if half and fits(shape.heads, shape.kv_heads, shape.head_size) else None


def _small_functions(decoder: Decoder) -> Functions:
    """The functions of a layer for few tokens: by hand, for compiled ones are made for many."""
    from proxima.engine.kernels.decode import add_and_rms_norm
    from proxima.engine.kernels.gate import gate

    if decoder.is_gpt2:
        return decoder.functions
    return decoder.functions._replace(add_and_norm=add_and_rms_norm, activate=gate)


def pick(
    logits: Tensor, lanes: Tensor, columns: Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor, KeptSet | None]:
    """Tokens (n,), their log-probabilities and the sets they were chosen from."""
    scaled = logits.float() / temperature
    kept = truncate(scaled, top_k, top_p)
    token = choose(scaled, kept, fold(lanes, columns))
    return token, token_logprobs(scaled.unsqueeze(1), token.unsqueeze(1), kept, 1.0).squeeze(1), kept


def write(
    drawn: tuple[Tensor, Tensor, KeptSet | None], rows: Tensor, columns: Tensor, running: Tensor, outputs: Outputs,
    eos: Tensor, limit: int,
) -> Tensor:  # fmt: skip
    """Put what was drawn into the outputs of running sequences; which of them go on."""
    token, logprob, kept = drawn
    responses = outputs.ids.shape[1]
    nowhere = outputs.ids.numel() - 1  # in the last row
    place = torch.where(running, rows * responses + columns, nowhere)
    outputs.ids.view(-1).index_copy_(0, place, token)
    outputs.logprobs.view(-1).index_copy_(0, place, logprob)
    if kept is not None and outputs.kept is not None:
        for buffer, part in ((outputs.kept.ids, kept.ids), (outputs.kept.bits, kept.bits)):
            if buffer is not None and part is not None:
                buffer.flatten(0, 1).index_copy_(0, place, part.squeeze(1))
    return running & ~(token.unsqueeze(1) == eos).any(1) & (columns + 1 < limit)


def _kept_shape(sampling: Sampling, vocabulary: int) -> tuple[str, int]:
    if 0 < sampling.top_k < vocabulary:
        return "ids", sampling.top_k
    return ("bits", -(-vocabulary // 8)) if sampling.top_p < 1 else ("all", 0)


def _new_outputs(count: int, responses: int, chosen_from: tuple[str, int], device: torch.device) -> Outputs:
    shape, (form, size) = (count + 1, responses), chosen_from
    kept = None
    if form == "ids":
        kept = KeptSet(ids=torch.zeros(*shape, size, dtype=torch.int32, device=device))
    elif form == "bits":
        kept = KeptSet(bits=torch.zeros(*shape, size, dtype=torch.uint8, device=device))
    ids = torch.zeros(*shape, dtype=torch.long, device=device)
    return Outputs(ids, torch.zeros(*shape, device=device), kept)


def _by_tokens(rows: list[int], sizes: list[int], budget: int) -> list[list[int]]:
    """Groups of rows, in order, of at most `budget` tokens (or one row)."""
    groups: list[list[int]] = []
    room = 0
    for row in rows:
        if not groups or sizes[row] > room:
            groups.append([])
            room = budget
        groups[-1].append(row)
        room -= sizes[row]
    return groups
