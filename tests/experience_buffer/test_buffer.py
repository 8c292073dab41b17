"""`ExperienceBuffer`: a bound in bytes, overflow policies, sampling strategies, and storage that changes
nothing."""

import gc
import random
import warnings
from typing import get_args, get_type_hints

import pytest
import torch

from proxima.config import PPOConfig
from proxima.core.pairs import TokenPairs
from proxima.core.types import KeptSet, TokenColumns, Tokens
from proxima.experience_buffer import ExperienceBuffer
from proxima.experience_buffer.sampling_strategies import STRATEGIES


def make_pairs(lengths, first_key=0, prompt=3, choices=4):
    """Sequences of these response lengths; `value` and the response ids say whose they are."""
    count, width = len(lengths), max(lengths)
    keys = torch.arange(first_key, first_key + count)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    flags = torch.zeros(count, dtype=torch.bool)
    tokens = Tokens(
        prompts=[f"prompt {key}" for key in keys.tolist()],
        prompt_ids=torch.ones(count, prompt, dtype=torch.long),
        prompt_mask=torch.ones(count, prompt, dtype=torch.bool),
        response_ids=keys.unsqueeze(1) * mask,
        mask=mask,
        ended=flags,
        truncated=flags.clone(),
        keys=keys,
        tokenizer=None,  # nothing is decoded
        kept=KeptSet(ids=torch.arange(choices, dtype=torch.int32).expand(count, width, choices).contiguous()),
    )
    return TokenPairs(TokenColumns(tokens, {"value": keys.unsqueeze(1) + torch.arange(width) / 100}))


def drawn(data, epoch=0):
    """Keys of each minibatch."""
    return [batch.tokens.keys.tolist() for batch in data.epoch(epoch)]


def tensors_in_memory(buffer):
    """Bytes of the storages behind every tensor that the buffer keeps in memory, each counted once."""
    storages = {}
    for pairs, file in buffer._parts:
        held = [value for value in vars(pairs).values() if isinstance(value, torch.Tensor)]
        if file is None:
            pairs.map(lambda tensor, held=held: held.append(tensor) or tensor)
        else:  # what was mapped is on disk, all else is not
            mapped = []
            pairs.map(
                lambda tensor, mapped=mapped: mapped.append(tensor.untyped_storage().data_ptr()) or tensor
            )
            held = [tensor for tensor in held if tensor.untyped_storage().data_ptr() not in mapped]
        for tensor in held:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.fixture
def one_part():
    buffer = ExperienceBuffer()
    buffer.store(make_pairs([4] * 4))
    return buffer.nbytes


@pytest.mark.parametrize("overflow", ["drop_oldest", "disk"])
def test_bytes_stay_within_the_bound_over_many_stores(overflow, one_part, tmp_path):
    buffer = ExperienceBuffer(max_bytes=3 * one_part, overflow=overflow, folder=tmp_path)
    chance = random.Random(0)
    stored, seen = 0, []
    for _ in range(60):
        lengths = [chance.randint(1, 6) for _ in range(chance.randint(1, 4))]
        data = buffer.store(make_pairs(lengths, stored))
        stored += len(lengths)
        assert buffer.nbytes <= buffer.max_bytes
        assert tensors_in_memory(buffer) <= buffer.max_bytes
        seen = [key for batch in drawn(data) for key in batch]
    assert len(seen) == len(buffer) == stored - buffer.dropped_sequences
    if overflow == "disk":
        assert buffer.dropped_sequences == 0
    else:  # what is left are the newest, and the buffer is not kept emptier than it must be
        assert sorted(seen) == list(range(buffer.dropped_sequences, stored))
        assert buffer.nbytes > 2 * one_part


def test_bytes_count_what_the_tensors_really_hold():
    wide = make_pairs([50] + [2] * 9)
    buffer = ExperienceBuffer()
    buffer.store(wide.select(torch.arange(1, 10)))  # as `ppo_step` does where one reward failed
    assert buffer.nbytes >= tensors_in_memory(buffer)


def test_overflow_error_refuses_the_new_and_keeps_the_old(one_part):
    buffer = ExperienceBuffer(max_bytes=int(1.5 * one_part), overflow="error")
    buffer.store(make_pairs([4] * 4))
    with pytest.raises(MemoryError, match=f"at most {buffer.max_bytes:,}; raise buffer_max_bytes"):
        buffer.store(make_pairs([4] * 4, 4))
    assert len(buffer) == 4
    assert buffer.nbytes == one_part


def test_drop_oldest_refuses_data_larger_than_the_bound_and_keeps_the_old(one_part):
    buffer = ExperienceBuffer(max_bytes=int(1.5 * one_part), overflow="drop_oldest")
    buffer.store(make_pairs([4] * 4))
    with pytest.raises(MemoryError):
        buffer.store(make_pairs([4] * 8, 4))
    assert (len(buffer), buffer.dropped_sequences) == (4, 0)


def test_drop_oldest_forgets_no_more_sequences_than_needed(one_part):
    buffer = ExperienceBuffer(max_bytes=int(1.5 * one_part), overflow="drop_oldest", strategy="sequential")
    buffer.store(make_pairs([4] * 4))
    data = buffer.store(make_pairs([4] * 4, 4))
    assert drawn(data) == [[2, 3, 4, 5, 6, 7]]
    assert buffer.dropped_sequences == 2


def test_overflow_disk_keeps_everything_and_maps_what_does_not_fit(one_part, tmp_path):
    buffer = ExperienceBuffer(max_bytes=one_part, overflow="disk", strategy="sequential", folder=tmp_path)
    for first in (0, 4, 8):
        data = buffer.store(make_pairs([4] * 4, first))
    assert drawn(data) == [list(range(8)), list(range(8, 12))]
    assert buffer.nbytes == one_part
    assert len(list(tmp_path.iterdir())) == 2


def test_memory_mapped_data_does_not_count_and_holds_no_memory(tmp_path):
    buffer = ExperienceBuffer(max_bytes=1, storage="disk", folder=tmp_path)
    buffer.store(make_pairs([100] * 50))
    assert buffer.nbytes == 0
    assert tensors_in_memory(buffer) == 0


@pytest.mark.parametrize("how", ["clear", "delete"])
def test_disk_files_vanish_with_the_buffer_without_a_warning(tmp_path, how):
    buffer = ExperienceBuffer(storage="disk", folder=tmp_path)
    buffer.store(make_pairs([2, 3]))
    assert list(tmp_path.iterdir())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if how == "clear":
            buffer.clear()
        del buffer
        gc.collect()
    assert not list(tmp_path.iterdir())
    left_to_chance = [str(item.message) for item in seen if "Implicitly cleaning up" in str(item.message)]
    assert how == "delete" or not left_to_chance


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [1, 7, 8, 19])
def test_each_sequence_comes_exactly_once_an_epoch(strategy, count):
    lengths = [1 + i % 5 for i in range(count)]
    data = ExperienceBuffer(strategy=strategy, minibatch_size=4, token_budget=20).store(make_pairs(lengths))
    for epoch in range(3):
        batches = drawn(data, epoch)
        assert sorted(key for batch in batches for key in batch) == list(range(count))
        assert len(data) == len(batches) or epoch > 0
        if strategy != "token_budget":
            assert len(batches) == -(-count // 4)
            assert max(map(len, batches)) <= 4
    assert drawn(data) == [batch.tokens.keys.tolist() for batch in data]


def test_a_minibatch_holds_the_sequences_own_numbers():
    data = ExperienceBuffer(minibatch_size=3).store(make_pairs([1, 5, 2, 4, 3]))
    for batch in data:
        for row, key in enumerate(batch.tokens.keys.tolist()):
            length = int(batch.lengths[row])
            assert length == [1, 5, 2, 4, 3][key]
            assert batch.tokens.prompts[row] == f"prompt {key}"
            assert batch.tokens.response_ids[row, :length].tolist() == [key] * length
            torch.testing.assert_close(batch.column("value")[row, :length], key + torch.arange(length) / 100)


def test_token_budget_is_respected_and_filled_unless_one_sequence_is_longer():
    lengths = [1 + 3 * i % 11 for i in range(30)] + [40]
    totals = [length + 3 for length in lengths]
    batches = drawn(ExperienceBuffer(strategy="token_budget", token_budget=25).store(make_pairs(lengths)))
    sizes = [sum(totals[key] for key in batch) for batch in batches]
    assert all(size <= 25 or batch == [30] for size, batch in zip(sizes, batches, strict=True))
    for size, following in zip(sizes, batches[1:], strict=False):
        assert size + totals[following[0]] > 25  # the next one would not have fitted


def test_length_balance_spreads_long_and_short_sequences():
    lengths = list(range(1, 25))
    data = ExperienceBuffer(strategy="length_balanced", minibatch_size=6).store(make_pairs(lengths))
    totals = [sum(lengths[key] for key in batch) for batch in drawn(data)]
    assert max(totals) - min(totals) <= 4 * 6
    assert all(min(batch) < 6 and max(batch) >= 18 for batch in drawn(data))


@pytest.mark.parametrize("strategy", ["shuffled", "length_balanced", "token_budget"])
@pytest.mark.parametrize("lengths", [[3] * 24, list(range(1, 25))], ids=["equal", "ragged"])
def test_shuffles_follow_seed_step_epoch_and_keys_but_not_storage_order(strategy, lengths):
    pairs = make_pairs(lengths)

    def order(pairs=pairs, seed=0, step=0, epoch=0):
        buffer = ExperienceBuffer(strategy=strategy, minibatch_size=6, token_budget=60, seed=seed)
        return drawn(buffer.store(pairs, step), epoch)

    assert order() == order()
    others = [order(epoch=1), order(step=1), order(seed=1)]
    assert all(other != order() for other in others)
    assert others[0] != others[1] != others[2] != others[0]
    assert order(pairs.select(torch.randperm(24, generator=torch.Generator().manual_seed(1)))) == order()


@pytest.mark.parametrize("storage", ["cpu", "disk"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_storage_does_not_change_the_minibatches(storage, strategy, tmp_path):
    def batches(kind):
        buffer = ExperienceBuffer(
            storage=kind, strategy=strategy, minibatch_size=3, token_budget=15, folder=tmp_path
        )
        buffer.store(make_pairs([1, 5, 2, 4]))
        return list(buffer.store(make_pairs([3, 6, 1], 4, prompt=5), 2))

    for one, other in zip(batches("device"), batches(storage), strict=True):
        assert one.tokens.prompts == other.tokens.prompts
        left, right = [], []
        one.map(lambda tensor, left=left: left.append(tensor) or tensor)
        other.map(lambda tensor, right=right: right.append(tensor) or tensor)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def test_nothing_is_not_stored():
    with pytest.raises(ValueError, match="no state-action pairs"):
        ExperienceBuffer().store([])
    with pytest.raises(ValueError, match="no sequences to store"):
        ExperienceBuffer().store(make_pairs([1, 2]).select(torch.tensor([], dtype=torch.long)))


def test_the_setting_offers_the_strategies_that_there_are():
    assert set(get_args(get_type_hints(PPOConfig)["buffer_sampling"])) == set(STRATEGIES)
    with pytest.raises(ValueError, match=r"strategy \('nearest'\) must be one of shuffled, sequential"):
        ExperienceBuffer(strategy="nearest")
