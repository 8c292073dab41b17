"""Proxima's formulas beside those of TRL 1.12's PPO, on the same tokens, log-probabilities, scores and values.

Where the two mean the same they agree to 1e-5; where they do not, the test says how they differ. `make
test-peer` runs this in the environment that has TRL.
"""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here: `make test-peer` has an environment for it")

from proxima.advantage import Outcome, estimate
from proxima.core.ops import last_real, masked_mean, whiten
from proxima.core.pairs import PlainPairs
from proxima.core.sampling import token_logprobs
from proxima.models import ClassifierReward
from proxima.reward_kl import KLDivergence, RewardAdjuster, shape_scores
from proxima.training import Moved, approximate_kl, policy_objective, policy_ratio, value_loss
from tests.peer.trl_update import (
    ENDED,
    EOS,
    PAD,
    PROMPTS,
    REAL,
    RESPONSES,
    TEMPERATURE,
    run_update,
    tiny,
    words,
)

KL_COEF, GAMMA, LAM = 0.3, 0.9, 0.8


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    return run_update(tmp_path_factory.mktemp("trl"))


@pytest.fixture
def rollout(update):
    return update.rollout


def same(ours, theirs, size=1e-5):
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=size, atol=size)


def pairs_of(rollout, mask):
    columns = {"logprob_policy": rollout.logprobs, "logprob_ref": rollout.ref_logprobs}
    return KLDivergence().add_kl_to_sa_pairs(PlainPairs(mask, columns))


def with_ending(mask):
    """One position more where a response ended early: TRL's state after EOS."""
    return mask | torch.nn.functional.pad(mask[:, :-1], (1, 0))


def credit_of(rollout, mask, scores):
    """Our advantages and returns of TRL's log-probabilities and values; scores sit on the mask's last
    position."""
    kl = torch.where(REAL, pairs_of(rollout, REAL).column("kl"), 0.0)
    placed = torch.where(last_real(mask), scores.unsqueeze(1), 0.0)
    return estimate("gae", Outcome(placed, KL_COEF * kl, mask, rollout.values), GAMMA, LAM)


def test_log_probabilities_of_policy_and_reference(rollout):
    """TRL divides by temperature + 1e-7, which changes nothing that float32 shows."""
    import trl.experimental.ppo.ppo_trainer as inside

    both = torch.cat([PROMPTS, RESPONSES], 1)
    for network, theirs in ((tiny("tokens", 0), rollout.logprobs), (tiny("tokens", 1), rollout.ref_logprobs)):
        logits = inside.forward(network, both, PAD).logits[:, PROMPTS.shape[1] - 1 : -1]
        ours = token_logprobs(logits, RESPONSES, None, TEMPERATURE)
        same(ours[REAL], theirs[REAL])


def test_log_probabilities_of_half_precision_logits():
    """Differs: TRL's log-probabilities of bfloat16 logits are bfloat16, off by up to 2^-7 of their size; ours
    are float32, exact for these logits."""
    from trl.trainer.utils import selective_log_softmax

    logits = 3 * torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.log_softmax(logits.double(), -1).gather(-1, RESPONSES.unsqueeze(-1)).squeeze(-1)
    same(token_logprobs(logits, RESPONSES, None, 1.0), exact)
    theirs = selective_log_softmax(logits, RESPONSES)
    assert theirs.dtype == torch.bfloat16
    assert (theirs.double() - exact).abs().max() > 1e-3
    same(selective_log_softmax(logits.float(), RESPONSES), exact)


def test_which_tokens_are_real(rollout):
    """EOS included, nothing after it."""
    assert torch.equal(~rollout.padding_mask, REAL)
    assert torch.equal(~rollout.padding_mask_p1, with_ending(REAL))


def test_a_pad_token_that_is_eos_takes_eos_away(tmp_path):
    """Differs: where pad and EOS are one token, TRL does not count EOS as part of the response and never
    trains it, so that ending cannot be learned. Here a mask decides, never the pad id."""
    responses = RESPONSES.where(REAL, torch.tensor(EOS))
    padding = run_update(tmp_path, pad_token="w1", responses=responses).rollout.padding_mask
    assert REAL.sum(1).tolist() == [3, 6, 6, 1]
    assert (~padding).sum(1).tolist() == [2, 5, 6, 0]


def test_kl(rollout, update):
    """Per token k1; the metric is its sum over a sequence, averaged over sequences."""
    kl = pairs_of(rollout, REAL).column("kl")
    same(kl[REAL], rollout.kl[REAL])
    assert not rollout.kl[~REAL].any()
    ours = torch.where(REAL, kl, 0.0).sum(1).mean()
    assert update.metrics["objective/kl"] == pytest.approx(float(ours), rel=1e-5, abs=1e-5)


def test_k3_in_the_reward(tmp_path, rollout):
    """Differs: TRL can charge k3 in the reward, whose gradient has the wrong sign; here it is k1 always."""
    theirs = run_update(tmp_path, kl_estimator="k3").rollout.kl
    kl = pairs_of(rollout, REAL).column("kl")
    same(torch.expm1(-kl[REAL]) + kl[REAL], theirs[REAL])
    assert (theirs[REAL] - kl[REAL]).abs().max() > 0.1


def test_scores(rollout):
    """A reward model is read at the last real token, whatever follows it."""
    reward = ClassifierReward(tiny("score", 2), words())
    rows = [
        [*prompt[prompt != PAD].tolist(), *response[real].tolist()]
        for prompt, response, real in zip(PROMPTS, RESPONSES, REAL, strict=True)
    ]
    same(reward.scores(rows), rollout.scores)


def test_missing_eos_penalty(tmp_path, rollout):
    theirs = run_update(tmp_path, missing_eos_penalty=1.5).rollout.scores
    same(shape_scores(rollout.scores, ENDED, missing_eos_penalty=1.5), theirs)


def test_rewards(rollout):
    """Differs: a response that ended early has its score one position after EOS in TRL, where nothing was
    written, and on EOS here. Elsewhere, and in KL, they agree."""
    pairs = pairs_of(rollout, REAL)
    ours = RewardAdjuster().adjust_rewards_with_kl(pairs, rollout.scores.tolist(), KL_COEF).column("reward")
    early = last_real(REAL) & ~REAL[:, -1:]
    same(ours[REAL & ~early], rollout.rewards[REAL & ~early])
    same(ours[early], rollout.rewards[early] + rollout.scores[[0, 3]])
    same(rollout.rewards[last_real(with_ending(REAL)) & ~REAL], rollout.scores[[0, 3]])


def test_advantages_and_returns(rollout):
    """The same GAE. Differs: in TRL an early end has one state more, after EOS, with a value of its own and
    the score; given that state, ours are theirs, and without early ends they are theirs as it is."""
    credit = credit_of(rollout, with_ending(REAL), rollout.scores)
    extended = with_ending(REAL)
    same(credit.advantages[extended], rollout.advantages[extended])
    same(credit.targets[extended], rollout.returns[extended])
    plain = credit_of(rollout, REAL, rollout.scores)
    full = REAL.all(1)
    same(plain.advantages[full], rollout.advantages[full])
    assert (plain.advantages - rollout.advantages)[~full][REAL[~full]].abs().min() > 1e-3


def test_whitening(rollout):
    """Differs: TRL's variance has Bessel's correction, so that its advantages are sqrt((n - 1) / n) of ours,
    n real tokens: 3 % apart here, 0.02 % at 3,000 tokens. Both are centred. It whitens what one process
    sampled, we what all did."""
    from trl.experimental.ppo.ppo_trainer import masked_whiten

    n = int(REAL.sum())
    theirs = masked_whiten(rollout.advantages, REAL)
    same(whiten(rollout.advantages, REAL)[REAL] * ((n - 1) / n) ** 0.5, theirs[REAL])
    assert abs(float(masked_mean(theirs, REAL))) < 1e-5


def test_whitening_of_rewards(rollout):
    """Differs: `whiten_rewards` scales per-token rewards and leaves their mean; nothing here does.
    `normalize_rewards` centres and scales the scores, before KL is charged."""
    from trl.experimental.ppo.ppo_trainer import masked_whiten

    theirs = masked_whiten(rollout.rewards, REAL, shift_mean=False)
    centred = whiten(rollout.rewards, REAL) * ((REAL.sum() - 1) / REAL.sum()).sqrt()
    same(theirs[REAL], (centred + masked_mean(rollout.rewards, REAL))[REAL])
    assert abs(float(shape_scores(rollout.scores, ENDED, normalize=True).mean())) < 1e-6


def test_the_update_has_the_whitened_advantages(update, rollout):
    n = int(REAL.sum())
    assert len(update.passes) == 4  # two epochs of two micro-batches
    for here in update.passes:
        same(whiten(rollout.advantages, REAL) * ((n - 1) / n) ** 0.5, here.advantages)
        same(here.advantages[here_rows(here)], here.mb_advantage)


def test_policy_loss(update):
    """In every micro-batch, clipped or not."""
    moves = []
    for here in update.passes:
        real = ~here.padding_mask[here_rows(here)]
        moved = Moved(here.new_logprobs[real], here.mb_logprobs[real], here.mb_advantage[real])
        losses, _ = policy_objective("ppo", moved, 0.2, 0.0)
        same(losses.mean(), here.pg_loss)
        moves.append(float((policy_ratio(moved.new, moved.old) - 1).abs().max()))
    assert moves[0] < 1e-5  # the first micro-batch is trained by the policy that sampled
    assert max(moves[2:]) > 0.2  # the second epoch's are clipped


def test_value_loss(update):
    """Differs: TRL takes half of the squared error, over the state after EOS too, and adds vf_coef of it to
    the policy's loss; ours is the squared error over real tokens, and the value model has an optimiser of its
    own."""
    for here in update.passes:
        mask = ~here.padding_mask_p1[here_rows(here)]
        ours = value_loss(here.vpred, here.mb_return, here.mb_values, 0.2)
        same(masked_mean(ours, mask) / 2, here.vf_loss)
        same(here.pg_loss + 0.1 * here.vf_loss, here.loss)


def here_rows(here):
    """Which rows of the batch a micro-batch holds: found by its log-probabilities, which all differ."""
    return [int((here.logprobs == row).all(1).nonzero()) for row in here.mb_logprobs]


def test_a_minibatch_loss(update):
    """Differs: TRL's is a mean of micro-batch means; ours a mean over all tokens, however they are cut."""
    last = update.passes[2:]
    sizes = [int((~here.padding_mask[here_rows(here)]).sum()) for here in last]
    theirs = sum(float(here.pg_loss) for here in last) / 2
    ours = sum(size * float(here.pg_loss) for size, here in zip(sizes, last, strict=True)) / sum(sizes)
    assert sizes[0] != sizes[1]
    assert abs(theirs - ours) > 1e-4


def test_approximate_kl(update):
    """Differs: TRL's is k2, half the squared difference, over padding too; ours k3 over real tokens. Both
    measure old against new policy."""
    theirs, ours = [], []
    for here in update.passes:
        real = ~here.padding_mask[here_rows(here)]
        difference = here.new_logprobs[real] - here.mb_logprobs[real]
        theirs.append(float((difference**2).sum()) / 2 / real.numel())
        ours.append(float(approximate_kl(policy_ratio(here.new_logprobs, here.mb_logprobs))[real].mean()))
    assert update.metrics["policy/approxkl_avg"] == pytest.approx(sum(theirs) / 4, rel=1e-4)
    assert sum(ours) > 1.2 * sum(theirs)


def test_optimiser_steps(tmp_path):
    """Differs: TRL steps once per epoch, whatever `num_mini_batches` says, and after every micro-batch where
    the prompts are the last of the data; here a minibatch is a step."""
    for count in (1, 2):
        assert run_update(tmp_path / str(count), num_mini_batches=count).optimizer_steps == 2
    assert run_update(tmp_path / "last", batches=1).optimizer_steps == 4
