"""Which dict belongs to which sequence: by `sequence` and `position` in any order, else by states that
grow."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.advantage import GAEAdvantage, ReturnCalculator, TDError
from proxima.core.pairs import PlainPairs
from proxima.reward_kl import KLDivergence, RewardAdjuster
from tests import oracles
from tests.formula_cases import batches, column, flat, near, padded, plain, ragged, sweep, tagged

GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.1

PHASES = {
    "kl": lambda pairs: KLDivergence().add_kl_to_sa_pairs(pairs),
    "reward": lambda pairs: RewardAdjuster().adjust_rewards_with_kl(pairs, [1.5, -0.5], KL_COEF),
    "td_error": lambda pairs: TDError().compute_td_errors(pairs, GAMMA),
    "advantage": lambda pairs: GAEAdvantage().compute_gae_advantages(pairs, GAMMA, LAM),
    "return": lambda pairs: ReturnCalculator().add_reward_to_go(pairs, GAMMA),
}


def lengths_seen(pairs):
    """Rewards of 1 at gamma 1: reward-to-go counts the tokens from this one to the end of its sequence."""
    counted = ReturnCalculator().add_reward_to_go(
        [{"action": "w", "reward": 1.0, **pair} for pair in pairs], 1.0
    )
    return column(counted, "return")


@sweep
@given(
    batch=batches("logprob_policy", "logprob_ref", "value"),
    spelling=st.sampled_from([plain, tagged]),
    data=st.data(),
)
def test_the_whole_pipeline_gives_output_i_for_input_i(batch, spelling, data):
    """Each phase takes the one before; tagged pairs come in any order."""
    rewards = data.draw(st.lists(st.floats(-3, 3), min_size=len(batch), max_size=len(batch)))
    count = sum(map(len, batch))
    order = data.draw(st.permutations(range(count))) if spelling is tagged else range(count)
    pairs = [spelling(batch)[i] for i in order]

    out = KLDivergence().add_kl_to_sa_pairs(pairs)
    out = RewardAdjuster().adjust_rewards_with_kl(out, rewards, KL_COEF)
    out = TDError().compute_td_errors(out, GAMMA)
    out = GAEAdvantage().compute_gae_advantages(out, GAMMA, LAM)
    out = ReturnCalculator().add_reward_to_go(out, GAMMA)

    kls = [
        [oracles.kl(token["logprob_policy"], token["logprob_ref"]) for token in tokens] for tokens in batch
    ]
    adjusted = [oracles.adjusted_rewards(r, k, KL_COEF) for r, k in zip(rewards, kls, strict=True)]
    deltas = [oracles.td_errors(r, v, GAMMA) for r, v in zip(adjusted, ragged(batch, "value"), strict=True)]
    expected = {
        "kl": kls,
        "reward": adjusted,
        "td_error": deltas,
        "advantage": [oracles.gae(d, GAMMA, LAM) for d in deltas],
        "return": [oracles.reward_to_go(r, GAMMA) for r in adjusted],
    }
    assert len(out) == count
    for name, sequences in expected.items():
        assert column(out, name) == near([flat(sequences)[i] for i in order]), name


@sweep
@given(batch=batches("reward", "value"))
def test_numbers_in_the_padding_of_columns_have_no_share(batch):
    columns = {name: padded(ragged(batch, name))[0] for name in ("reward", "value")}
    pairs = PlainPairs(padded(ragged(batch, "value"))[1], columns)
    deltas = [
        oracles.td_errors(r, v, GAMMA)
        for r, v in zip(ragged(batch, "reward"), ragged(batch, "value"), strict=True)
    ]
    expected = {
        "td_error": deltas,
        "advantage": [oracles.gae(d, GAMMA, LAM) for d in deltas],
        "return": [oracles.reward_to_go(r, GAMMA) for r in ragged(batch, "reward")],
    }
    for name, sequences in expected.items():
        assert column(PHASES[name](pairs), name) == near(flat(sequences)), name


@pytest.mark.parametrize("spelling", [plain, tagged])
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_alone_leaves_its_input_as_it_was_and_keeps_every_other_key(phase, spelling):
    names = ("logprob_policy", "logprob_ref", "kl", "reward", "value", "td_error", "advantage", "return")
    batch = [
        [{name: 0.1 * t - 1 / (2 + i) for i, name in enumerate(names)} for t in range(n)] for n in (3, 1)
    ]
    pairs = spelling(batch)
    before = deepcopy(pairs)
    out = PHASES[phase](pairs)
    assert pairs == before
    assert len(out) == len(pairs)
    for pair, result in zip(before, out, strict=True):
        assert {key: result[key] for key in pair if key != phase} == {
            k: v for k, v in pair.items() if k != phase
        }
    assert column(out, phase) != [pair[phase] for pair in before]  # the old column was not simply passed on


def test_a_new_sequence_starts_where_the_state_does_not_extend_the_one_before():
    states = [
        "a b", "a b c", "a b c d",  # grows
        "a b c",                    # shorter
        "a b c",                    # equal: a second sample of one token
        "x b c d", "x b c d e",     # longer, but not an extension
        "x", "x\ufffd", "x\u00e9!",  # third: the end of the state before changed, so it does not extend it
    ]  # fmt: skip
    assert lengths_seen([{"state": state} for state in states]) == [3, 2, 1, 1, 1, 2, 1, 2, 1, 1]


def test_a_state_may_grow_by_other_text_than_the_action():
    """Tokens decoded one by one need not join to the text of the whole."""
    pairs = [
        {"state": "a", "action": "\ufffd"},
        {"state": "a\u00e9", "action": "b"},
        {"state": "a\u00e9 b", "action": "c"},
    ]
    assert lengths_seen(pairs) == [3, 2, 1]


def test_sequence_goes_before_the_state():
    pairs = [{"state": "a", "sequence": 0, "position": 0}, {"state": "a b", "sequence": 1, "position": 0}]
    assert lengths_seen(pairs) == [1, 1]


def test_reward_k_belongs_to_sequence_k_wherever_it_stands():
    """A shuffled list must not hand a sequence's reward to another one."""
    pairs = [{"state": "a", "action": "w", "kl": 0.0, "sequence": s, "position": 0} for s in (2, 0, 1)]
    adjusted = RewardAdjuster().adjust_rewards_with_kl(pairs, [10.0, 11.0, 12.0], KL_COEF)
    assert column(adjusted, "reward") == [12.0, 10.0, 11.0]


def test_sequence_without_position_keeps_the_order_given():
    pairs = [{"state": "a", "sequence": s} for s in (1, 0, 1, 1, 0)]
    assert lengths_seen(pairs) == [3, 2, 2, 1, 1]
