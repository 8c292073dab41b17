"""`Generation`: sampling with a static KV cache. In: prompts, an adapter's name. Out: responses, kept sets.

Prompts are prefilled once, packed end to end (`prefill`); then each step decodes one token per running
sequence. A step works on fixed buffers only, so on a GPU it is captured as a CUDA graph, one for each number
of slots. A `SlotSchedule` says which sequences have a slot, and `SamplingMemory` how many slots there are.
What a sequence samples depends neither on its slot nor on how many there are, so none of this changes the
results.

With a `Conversation` a response has several turns. A turn that ends leaves its slot; when its reply has come,
the episode waits for a slot again, with a longer prefix. The noise follows from the column, so neither slots
nor the time that replies take change what is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proxima.core.episode import Conversation
from proxima.core.sampling import (
    Sampling,
    choose,
    fold,
    hash_words,
    kept_shape,
    token_logprobs,
    truncate,
)
from proxima.core.transcript import Transcript
from proxima.core.types import Tokens
from proxima.runtime.engine.attention_rules import ruled_cached_attention
from proxima.runtime.engine.decode_clock import StepTimer
from proxima.runtime.engine.decoder import Decoder
from proxima.runtime.engine.expert_record import new_expert_record
from proxima.runtime.engine.experts import Routing
from proxima.runtime.engine.few_rows_decoder import FewRowsDecoder, few_rows_decoder
from proxima.runtime.engine.generation_slots import Drawn, Outputs, Slots, new_outputs, new_slots
from proxima.runtime.engine.layout import Layout, fill_up, pack
from proxima.runtime.engine.merged_decoder import MergedDecoder, merges
from proxima.runtime.engine.packed_attention import beyond_ends, cached_attention
from proxima.runtime.engine.prefill import (
    PREFILL_TOKENS,
    PREFILL_TOKENS_ON_CPU,
    PrefillPass,
    prefill_passes,
)
from proxima.runtime.engine.sampling_memory import MAX_SLOTS, SamplingMemory
from proxima.runtime.engine.slot_schedule import SlotSchedule

_NONE = torch.zeros(0, dtype=torch.long)
_EMPTY_LAYOUT = Layout(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, ())


@dataclass(frozen=True)
class GenerationBatch:
    """The prompts and buffers of one `generate` call."""

    prompts: Tokens
    sizes: list[int]  # tokens of each prompt
    sampling: Sampling
    lanes: Tensor  # (B, 2) hash of seed, step and sequence
    slots: Slots
    outputs: Outputs
    transcript: Transcript | None  # None where a response is one turn

    def size(self, row: int) -> int:
        """Tokens to prefill before the row's next turn."""
        return self.sizes[row] + (0 if self.transcript is None else len(self.transcript.ids[row]))

    def end_turns(self, rows: list[int]) -> None:
        """Hand over the turns of these rows, which have left their slots."""
        if self.transcript is None or not rows:
            return
        first = self.transcript.starts(rows)
        last = self.transcript.limits(first).tolist()
        ids = self.outputs.ids[torch.tensor(rows, device=first.device)].tolist()
        for row, begin, end, sampled in zip(rows, first.tolist(), last, ids, strict=True):
            self.transcript.end_turn(row, sampled[begin:end])

    def collect(self) -> Tokens:
        if self.transcript is None:
            return self.outputs.collect(self.prompts)
        return self.outputs.collect_episodes(self.prompts, self.transcript)


class Generation:
    """Keeps the cache, the buffers and the graphs from one call to the next."""

    def __init__(self, decoder: Decoder, memory: Callable[[], SamplingMemory] | None = None):
        """
        Args:
            memory: asked at every call; by default there is no bound.
        """
        self.decoder = MergedDecoder(decoder) if merges(decoder) else decoder
        self.max_slots = MAX_SLOTS
        self._memory = memory
        self.on_gpu = decoder.weight.is_cuda
        self.fixed_passes = self.on_gpu and decoder.blocks[0].experts is None
        """Whether prefill has passes whose size follows from a prompt alone. (The products of experts have as
        many rows as there are tokens for them, whatever the pass.)"""
        self.cache_size = (0, 0)
        """Slots, and tokens of each, that were last wanted."""
        self.clock = StepTimer(self.on_gpu)
        self.replays = self.eager_steps = 0
        """Decode steps with and without a graph since the start."""
        self.slot_steps = 0
        """Slots of all decode steps since the start, also those of sequences that had ended."""
        self._slots: Slots | None = None
        self._few_rows: FewRowsDecoder | None = None  # decodes by kernels of its own where it can
        self._outputs: Outputs | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._made_for: tuple[Sampling, str | None] | None = None
        self._kernel = _decode_kernel(decoder) if self.on_gpu else None
        self._no_loras = decoder.loras(None)  # sampling needs no gradients
        self._pick: Callable[..., Drawn] = torch.compile(pick, dynamic=True) if decoder.compiled else pick

    @torch.no_grad()
    def generate(
        self,
        prompts: Tokens,
        sampling: Sampling,
        adapter: str | None,
        conversation: Conversation | None = None,
    ) -> Tokens:
        """One response per prompt, until its first EOS or `max_new_tokens`; or, where something answers, one
        episode of such turns."""
        batch = self._prepare(prompts, sampling, adapter, conversation)
        slots, transcript = batch.slots, batch.transcript
        unused_row = len(prompts.prompts)
        slots.reset(unused_row)
        schedule = SlotSchedule(unused_row, slots.count, self.on_gpu)
        inside: set[int] = set()  # rows of episodes that have a slot
        while True:
            if taken := schedule.take(sampling.max_new_tokens):
                self._prefill_all(batch, taken)
                inside.update(row for row, _ in taken)
            with self.clock.lap(schedule.steps) as steps:
                for _ in range(steps):
                    self._step(batch, schedule.used)
            schedule.stepped(steps)
            alive = slots.running[: schedule.used].nonzero().flatten().tolist()
            if transcript is not None:
                running = set(slots.rows[: schedule.used][slots.running[: schedule.used]].tolist())
                batch.end_turns(sorted(inside - running))
                inside = running
                idle = not alive and not schedule.waiting
                schedule.wait(transcript.take_replies(wait=idle), len(alive))
            if not alive and not schedule.waiting:
                return batch.collect()
            before, moves = schedule.used, schedule.moves(alive)
            if schedule.used < before:
                slots.move(moves, schedule.used, unused_row)

    # --- buffers ---

    @property
    def memory(self) -> SamplingMemory:
        """What bounds sampling at present."""
        return SamplingMemory(math.inf, 1) if self._memory is None else self._memory()

    @property
    def _prefill_tokens(self) -> int:
        """Prompt tokens that are read at once."""
        return self.memory.prefill or (PREFILL_TOKENS if self.on_gpu else PREFILL_TOKENS_ON_CPU)

    def _prepare(
        self, prompts: Tokens, sampling: Sampling, adapter: str | None, conversation: Conversation | None
    ) -> GenerationBatch:
        """Make the buffers large enough, reset the outputs, load the adapter's current weights."""
        count, device = len(prompts.prompts), prompts.keys.device
        longest, memory = int(prompts.prompt_sizes.max() + sampling.width), self.memory
        capacity, need = memory.cache_size(count, longest, self.on_gpu, self.max_slots)
        slots, outputs = self._slots, self._outputs
        if slots is None or slots.count < capacity or slots.size < need or slots.tokens.device != device:
            self._graphs.clear()
            if slots is not None:
                capacity = max(capacity, min(slots.count, self.max_slots, memory.slots(need)))
            self.cache_size = capacity, need
            slots = self._slots = self._few_rows = None  # frees the old cache first
            slots = self._slots = new_slots(capacity, need, self.decoder, device)
            self._few_rows = few_rows_decoder(self.decoder, slots)
        setup = (replace(sampling, seed=0, step=0), adapter)  # what a captured graph depends on
        record = None if outputs is None else outputs.experts
        short = record is not None and record.positions < slots.size
        if outputs is None or outputs.ids.shape[0] <= count or setup != self._made_for or short:
            self._graphs.clear()
            vocabulary = self.decoder.architecture.network.get_output_embeddings().weight.shape[0]
            record = new_expert_record(count, slots.size, self.decoder, device)
            outputs = self._outputs = new_outputs(count, sampling, vocabulary, device, record)
            self._made_for = setup
        outputs.reset()
        self.decoder.load(adapter)
        lanes = hash_words(prompts.keys, sampling.seed, sampling.step)
        transcript = None if conversation is None else Transcript(prompts, sampling, conversation)
        sizes = prompts.prompt_sizes.tolist()
        return GenerationBatch(prompts, sizes, sampling, lanes, slots, outputs, transcript)

    # --- steps ---

    def _prefill_all(self, batch: GenerationBatch, taken: list[tuple[int, int]]) -> None:
        """Prefill rows into slots."""
        sizes = [batch.size(row) for row, _ in taken]
        for part in prefill_passes(sizes, self._prefill_tokens, self.fixed_passes):
            self._prefill(batch, part, *zip(*(taken[index] for index in part.rows), strict=True))

    def _prefill(
        self, batch: GenerationBatch, part: PrefillPass, rows: tuple[int, ...], where: tuple[int, ...]
    ) -> None:
        """Prefill these rows into these slots and sample the first tokens of their turns."""
        prompts, slots, transcript = batch.prompts, batch.slots, batch.transcript
        device = prompts.keys.device
        row, slot = torch.tensor(rows).to(device), torch.tensor(where).to(device)
        lengths = torch.tensor([batch.size(each) for each in rows])
        if transcript is None:
            ids, start = prompts.prompt_ids[row], torch.zeros_like(row)
            limits = torch.full_like(row, batch.sampling.max_new_tokens)
        else:
            ids, start = transcript.prefixes(list(rows))[0], transcript.starts(list(rows))
            limits = transcript.limits(start)
        layout = pack(lengths, None, ids.shape[1], device, read_last=True)
        place, real = slots.base[slot][layout.rows] + layout.positions, layout.total
        if self.fixed_passes:
            layout = fill_up(layout, part.tokens, part.reads)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slots.keys[layer].flatten(0, 1).index_copy_(0, place, k[:real])
            slots.values[layer].flatten(0, 1).index_copy_(0, place, v[:real])
            return self.decoder.attend(layer, q, k, v, layout)

        record = batch.outputs.experts
        reader = row if record is None else row[layout.rows]
        routing = Routing(None if record is None else record.experts[reader, layout.positions])
        states = self.decoder.run(
            ids.flatten()[layout.source], layout, self._no_loras, attend, read=layout.read, routing=routing
        )
        if record is not None:  # what earlier turns recorded stays
            record.write(routing, reader, layout.positions, None, layout.read)
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        states = states[: len(rows)]
        drawn, going = self._draw(batch, states, batch.lanes[row], row, start, running, limits)
        values = (drawn, lengths.to(device).int(), start + 1, row, batch.lanes[row], going, limits)
        for buffer, value in zip(slots.per_slot(), values, strict=True):
            buffer[slot] = value

    def _step(self, batch: GenerationBatch, n: int) -> None:
        """One decode step of the first n slots; on a GPU by a graph, captured at first use if it can be."""
        self.slot_steps += n
        if not (self.on_gpu and self.decoder.capturable):
            self._step_eagerly(batch, n)
            self.eager_steps += 1
            return
        if n not in self._graphs:
            self._graphs[n] = self._capture(batch, n)
        self._graphs[n].replay()
        self.replays += 1

    def _step_eagerly(self, batch: GenerationBatch, n: int) -> None:
        slots, sampling, fast = batch.slots, batch.sampling, self._few_rows
        states = self._states(batch, n) if fast is None else fast(n)
        columns, running = slots.columns[:n], slots.running[:n]
        if fast is not None and batch.outputs.kept is None and batch.transcript is None:
            fast.sample_and_advance(states, batch.outputs, sampling.temperature, sampling.max_new_tokens)
            return
        given = (slots.lanes[:n], slots.rows[:n], columns, running, slots.limits[:n])
        drawn, going = self._draw(batch, states, *given)
        slots.tokens[:n].copy_(drawn)
        slots.lengths[:n].add_(1).mul_(going.int())  # of a sequence that has ended no cache is read
        columns.add_(running.long())
        running.copy_(going)

    def _states(self, batch: GenerationBatch, n: int) -> Tensor:
        """Hidden states (n, D) after the last token of each slot, which is added to the cache."""
        slots = batch.slots
        scale = self.decoder.shape.scale
        routing = Routing()
        tokens, lengths = slots.tokens[:n], slots.lengths[:n]
        now = lengths + 1
        place = slots.base[:n] + lengths
        beyond = None if self.on_gpu else beyond_ends(now)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = slots.keys[layer][:n], slots.values[layer][:n]
            rule = self.decoder.rules[layer]
            if self._kernel is not None and not any(rule):
                return self._kernel(q, k, v, keys, values, lengths, scale)
            keys.flatten(0, 1).index_copy_(0, place, k)
            values.flatten(0, 1).index_copy_(0, place, v)
            if any(rule):
                return ruled_cached_attention(q, keys, values, now, scale, rule)
            return cached_attention(q, keys, values, now, slots.starts[:, : n + 1], scale, beyond)

        here = replace(_EMPTY_LAYOUT, positions=lengths)
        states = self.decoder.run(tokens, here, self._no_loras, attend, routing=routing)
        if batch.outputs.experts is not None:
            batch.outputs.experts.write(routing, slots.rows[:n], lengths.long(), slots.running[:n], None)
        return states

    def _draw(
        self,
        batch: GenerationBatch,
        states: Tensor,
        lanes: Tensor,
        rows: Tensor,
        columns: Tensor,
        running: Tensor,
        limits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Samples the next tokens (n,) and writes them to the outputs; also which sequences continue."""
        sampling = batch.sampling
        fast = self._few_rows
        logits = fast.logits(states) if fast else self.decoder.head(states)
        given = (logits, lanes, columns, sampling.temperature)
        if fast and kept_shape(sampling.top_k, sampling.top_p, logits.shape[1]) is None:
            drawn: Drawn = (*fast.sample(*given), None)
        else:
            drawn = (pick if fast else self._pick)(*given, sampling.top_k, sampling.top_p)
        return drawn[0], batch.outputs.write(drawn, rows, columns, running, limits)

    def _capture(self, batch: GenerationBatch, n: int) -> torch.cuda.CUDAGraph:
        """Capture a step, after two that change nothing."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._warm_up(batch, n)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step_eagerly(batch, n)
        return graph

    def _warm_up(self, batch: GenerationBatch, n: int) -> None:
        """One step whose results are taken back. (A second one before that would write over the first cached
        token of each sequence that the first one ended.)"""
        buffers = (*batch.slots.per_slot(), *batch.outputs.parts())
        saved = [buffer.clone() for buffer in buffers]
        self._step_eagerly(batch, n)
        self.eager_steps += 1
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)


def pick(
    logits: Tensor, lanes: Tensor, columns: Tensor, temperature: float, top_k: int, top_p: float
) -> Drawn:
    """Sampled tokens (n,), their log-probabilities and their kept sets."""
    scaled = logits.float() / temperature
    kept = truncate(scaled, top_k, top_p)
    token = choose(scaled, kept, fold(lanes, columns))
    return token, token_logprobs(scaled.unsqueeze(1), token.unsqueeze(1), kept, 1.0).squeeze(1), kept


def _decode_kernel(decoder: Decoder) -> Callable[..., Tensor] | None:
    """The Triton kernel where Triton is installed and supports these shapes."""
    try:
        from proxima.runtime.engine.kernels import decode_attention, fits
    except ImportError:
        return None
    shape = decoder.shape
    return decode_attention if decoder.half and fits(shape.heads, shape.kv_heads, shape.head_size) else None
