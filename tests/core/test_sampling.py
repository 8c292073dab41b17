"""Sampling: kept sets, noise, and log-probabilities over what was kept."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import TopKLogitsWarper, TopPLogitsWarper

from proxima.core.sampling import (
    choose,
    gumbel_noise,
    hash_words,
    kept_logits,
    log_kept_mass,
    pack_bits,
    sequence_keys,
    shuffled_order,
    token_logprobs,
    truncate,
    unpack_bits,
)
from proxima.core.types import KeptSet

SETTINGS = [(0, 1.0), (5, 1.0), (0, 0.7), (5, 0.7), (1, 1.0), (1000, 1.0)]


def logits(rows: int = 1, vocabulary: int = 12, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def kept_mask(scaled: torch.Tensor, kept: KeptSet | None) -> torch.Tensor:
    if kept is None:
        return torch.ones_like(scaled, dtype=torch.bool)
    if kept.bits is not None:
        return unpack_bits(kept.bits[:, 0], scaled.shape[1])
    ids = kept.ids[:, 0].long()
    spare = torch.zeros(len(ids), scaled.shape[1] + 1, dtype=torch.bool)
    return spare.scatter(1, torch.where(ids < 0, scaled.shape[1], ids), True)[:, :-1]


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
def test_the_kept_set_is_that_of_transformers(top_k, top_p):
    scaled = logits(50)
    expected = TopKLogitsWarper(top_k)(None, scaled) if top_k else scaled
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(kept_mask(scaled, truncate(scaled, top_k, top_p)), expected > -torch.inf)


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
def test_chosen_tokens_follow_the_exact_distribution(top_k, top_p):
    scaled, draws = logits(vocabulary=9, seed=3), 20_000
    kept = truncate(scaled, top_k, top_p)
    exact = torch.softmax(scaled.double().masked_fill(~kept_mask(scaled, kept), -torch.inf), -1)[0]
    keys = hash_words(sequence_keys([[i] for i in range(draws)]), 0, 1, 2)
    repeated = None if kept is None else kept.map(lambda tensor: tensor.expand(draws, *tensor.shape[1:]))
    counts = torch.bincount(choose(scaled.expand(draws, -1), repeated, keys), minlength=9).double()
    assert counts[exact == 0].sum() == 0
    possible = exact > 0
    if possible.sum() > 1:
        assert chisquare(counts[possible], draws * exact[possible]).pvalue > 1e-3


@pytest.mark.parametrize("varied", ["seed", "step", "position", "sequence"])
def test_every_counter_gives_new_independent_noise(varied):
    tokens = torch.arange(4000).unsqueeze(0)
    counters = {"seed": 7, "step": 7, "position": 7, "sequence": 7}
    one = gumbel_noise(hash_words(torch.tensor([7]), 7, 7, 7), tokens)
    counters[varied] += 1
    other = gumbel_noise(
        hash_words(
            torch.tensor([counters["sequence"]]), counters["seed"], counters["step"], counters["position"]
        ),
        tokens,
    )
    correlation = torch.corrcoef(torch.cat([one, other]))[0, 1]
    assert abs(correlation) < 0.06


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(hash_words(torch.arange(40), 0, 0, 0), torch.arange(20_000).unsqueeze(0)).double()
    assert noise.mean() == pytest.approx(0.577216, abs=0.005)
    assert noise.var() == pytest.approx(1.644934, abs=0.02)
    assert noise.isfinite().all()
    for threshold in (-1.0, 0.0, 2.0, 8.0):  # the tail decides which rare tokens are ever drawn
        exact = float(torch.exp(-torch.exp(torch.tensor(-threshold, dtype=torch.float64))))
        share = float((noise < threshold).double().mean())
        assert share == pytest.approx(exact, abs=4 * (exact * (1 - exact) / noise.numel()) ** 0.5 + 1e-6)


def test_noise_belongs_to_the_token_not_to_its_place_in_the_kept_set():
    keys = hash_words(torch.tensor([3]), 0, 0, 0)
    whole = gumbel_noise(keys, torch.arange(100).unsqueeze(0))
    some = torch.tensor([[42, 7, 99]])
    assert torch.equal(gumbel_noise(keys, some)[0], whole[0, some[0]])


def test_small_numeric_noise_almost_never_flips_a_token():
    scaled = logits(2000, 5000, seed=5)
    keys = hash_words(torch.arange(2000), 0, 0, 0)
    moved = scaled + 1e-5 * torch.randn(scaled.shape, generator=torch.Generator().manual_seed(1))
    assert (choose(scaled, None, keys) != choose(moved, None, keys)).sum() <= 2


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 300])
def test_packed_bits_come_back(vocabulary):
    mask = torch.rand(3, 2, vocabulary, generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), vocabulary), mask)


@pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
def test_log_probabilities_over_the_kept_set_sum_to_one(top_k, top_p):
    raw, temperature = logits(4), 0.7
    kept = truncate(raw / temperature, top_k, top_p)
    every = torch.arange(12)
    table = torch.stack(
        [
            token_logprobs(raw.unsqueeze(1), torch.full((4, 1), int(token)), kept, temperature)[:, 0]
            for token in every
        ],
        1,
    )
    inside = kept_mask(raw, kept)
    assert torch.allclose((table.exp() * inside).sum(1), torch.ones(4), atol=1e-6)
    full = torch.log_softmax(raw / temperature, -1)
    mass = (full.exp() * inside).sum(1)
    assert torch.allclose(log_kept_mass(raw.unsqueeze(1), kept, temperature)[:, 0], mass.log(), atol=1e-6)
    assert torch.allclose(table[inside], (full - mass.log().unsqueeze(1))[inside], atol=1e-5)


def test_padding_rows_of_a_kept_set_have_finite_log_probabilities_and_gradients():
    raw = logits(1).unsqueeze(1).requires_grad_()
    for kept in (
        KeptSet(ids=torch.full((1, 1, 3), -1, dtype=torch.int32)),
        KeptSet(bits=torch.zeros(1, 1, 2, dtype=torch.uint8)),
    ):
        value = token_logprobs(raw, torch.zeros(1, 1, dtype=torch.long), kept, 1.0)
        (gradient,) = torch.autograd.grad(value.sum(), raw)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert kept_logits(raw, kept).isfinite().all()


def test_keys_follow_the_prompt_and_tell_its_copies_apart():
    keys = sequence_keys([[1, 2], [3], [1, 2], [12]])
    assert len(set(keys.tolist())) == 4
    assert set(sequence_keys([[1, 2], [1, 2], [12], [3]]).tolist()) == set(keys.tolist())


def test_the_shuffle_follows_the_sequences():
    keys = sequence_keys([[i] for i in range(20)])
    order = shuffled_order(keys, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(20))
    turned = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keys[turned][shuffled_order(keys[turned], 1, 2, 3)], keys[order])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(order, shuffled_order(keys, *other))
