"""Tokens between the policy's own that it read but did not choose: they are context, and nothing is trained
on them."""

import math
from dataclasses import replace

import pytest
import torch

from proxima.core.pairs import TokenPairs
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.token_records import records, sample_row
from tests.helpers import difference, rounding, shake, weights


def with_holes(pairs):
    """The same rollout, of whose responses the tokens 2 and 3 count as observed, where another follows."""
    places = torch.arange(pairs.mask.shape[1])
    hole = pairs.mask & (places >= 1) & (places <= 2) & (pairs.lengths.unsqueeze(1) > 3)
    assert hole.any()
    tokens = replace(pairs.tokens, mask=pairs.mask & ~hole, observed=hole)
    return TokenPairs(replace(pairs.storage, tokens=tokens))


@pytest.fixture(params=["auto", "plain"])
def trainer(make_config, request):
    settings = {
        "engine": request.param,
        "max_new_tokens": 8,
        "loss_weighting": "horizon",
        "whiten_advantages": False,
        "top_k": 5,
    }
    trainer = shake(PPOTrainer(make_config(**settings)))
    trainer.models.eos_ids = tuple(range(0, 200, 5))  # responses of several lengths
    return trainer


@pytest.fixture
def whole(trainer, prompts):
    return trainer.generator.generate_sequences([*prompts, *prompts], 0)[0]


def test_the_passes_read_what_was_observed_and_measure_what_was_chosen(trainer, whole):
    holed = with_holes(whole)
    assert len(set(whole.lengths.tolist())) > 2
    found = trainer.generator.score(holed.tokens)
    for name in ("logprob_policy", "logprob_ref", "kl_exact", "entropy"):
        expected = whole.column(name)[holed.mask]
        torch.testing.assert_close(found[name][holed.mask], expected, rtol=1e-4, atol=1e-5)
        assert not found[name][~holed.mask].any()
    expected = trainer.value_adder.add_values_to_sa_pairs(whole).column("value")
    values = trainer.value_adder.add_values_to_sa_pairs(holed).column("value")
    torch.testing.assert_close(values[holed.mask], expected[holed.mask], rtol=1e-4, atol=1e-5)
    scores = trainer.models.reward.token_members
    torch.testing.assert_close(scores(holed.tokens), scores(whole.tokens), rtol=1e-4, atol=1e-5)
    cut = trainer.value_adder.values_after_cut
    torch.testing.assert_close(cut(holed), cut(whole), rtol=1e-4, atol=1e-5)


def test_holes_survive_selection_joining_and_reading_by_token(whole):
    holed = with_holes(whole)
    rows = torch.tensor([5, 0, 3])
    parts = TokenPairs.cat([holed.select(rows), whole.select(torch.tensor([1]))])
    for i, row in enumerate(rows.tolist()):
        width = int(whole.lengths[row])
        assert torch.equal(parts.mask[i, :width], holed.mask[row, :width])
        assert not parts.mask[i, width:].any()
        assert torch.equal(parts.tokens.input_mask.sum(1)[i], whole.tokens.input_mask.sum(1)[row])
    assert holed.tokens.texts() == whole.tokens.texts()
    chosen = {(pair["sequence"], pair["position"]): pair for pair in whole}
    assert 0 < len(holed) < len(whole)
    for pair in holed:
        other = chosen[pair["sequence"], pair["position"]]
        assert all(pair[name] == other[name] for name in ("state", "action", "action_id", "logprob_policy"))


def test_records_show_the_observed_tokens_without_numbers(whole):
    holed = with_holes(whole.with_columns(kl=whole.column("logprob_policy") - whole.column("logprob_ref")))
    row = int(holed.tokens.observed.any(1).nonzero()[0])
    record = records(holed, "trained", [0.0] * holed.batch_size, {})[row]
    numbers = record["columns"]["logprob"]
    assert len(numbers) == len(record["ids"]) == int(whole.lengths[row])
    assert [math.isnan(number) for number in numbers] == (~holed.mask[row, : len(numbers)]).tolist()
    expected = float(holed.column("kl")[row][holed.mask[row]].sum())
    assert sample_row(record)["kl"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_text_of_a_diverged_policy_stays_its_own(whole):
    """Whose log-probabilities are nan, so that numbers do not tell which tokens it chose."""
    lost = torch.full_like(whole.column("logprob_policy"), math.nan)
    diverged = whole.with_columns(logprob_policy=lost, kl=lost)
    assert "replies" not in sample_row(records(diverged, "trained", [0.0] * whole.batch_size, {})[0])
    holed = with_holes(diverged)
    row = int(holed.tokens.observed.any(1).nonzero()[0])
    shown = sample_row(records(holed, "trained", [0.0] * whole.batch_size, {})[row])
    assert [turn["role"] for turn in shown["replies"]] == ["assistant", "environment", "assistant"]
    assert shown["length"] == int(holed.mask[row].sum())
    assert math.isnan(shown["kl"])


def test_an_update_is_that_of_the_chosen_tokens_alone(make_config, trainer, whole):
    """Over all tokens with an advantage of 0 on the observed ones the policy's step is the same, as the
    denominator of `horizon` does not count tokens."""
    holed = with_holes(whole)
    advantages = torch.randn(whole.mask.shape, generator=torch.Generator().manual_seed(3))
    returns = torch.randn(whole.mask.shape, generator=torch.Generator().manual_seed(4))
    found = []
    for pairs in (holed, whole):
        other = shake(PPOTrainer(trainer.config))
        columns = {"advantage": advantages.masked_fill(~holed.mask, 0.0), "return": returns}
        losses = other.model_trainer.train_step(pairs.with_columns(**columns))
        found.append((weights(other)["policy"], losses))
    assert found[0][1][0] == pytest.approx(found[1][1][0], abs=1e-5)
    assert difference({"policy": found[0][0]}, {"policy": found[1][0]}) <= rounding(other)
    with torch.no_grad():
        values = trainer.models.value.response_values(whole.tokens)
    errors = ((values - returns) ** 2)[holed.mask]
    assert found[0][1][1] == pytest.approx(float(errors.mean()), rel=1e-4)
