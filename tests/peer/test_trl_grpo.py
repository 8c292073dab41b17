"""Proxima's group methods beside TRL 1.12's GRPO, on the same tokens, log-probabilities and scores.

Where the two mean the same they agree to 1e-5; where they do not, the test says how they differ.
"""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here: `make test-peer` has an environment for it")

from proxima.advantage import Outcome, estimate
from proxima.core.ops import exact_kl
from proxima.core.sampling import token_logprobs
from proxima.training import Moved, policy_objective, policy_ratio, token_weights
from tests.peer.trl_update import PAD, PROMPTS, REAL, RESPONSES, TEMPERATURE, tiny, words

SCORES = [1.0, 0.0, 0.25, 0.97, 0.97, 0.97, 0.97, 0.97]
ADVANTAGES = torch.tensor([1.5, 0.7, -0.4, 2.0])
LOW, HIGH = 0.2, 0.28


def make_trainer(folder, scores=SCORES, generations=4, **settings):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    network = tiny("tokens", 0)
    network.save_pretrained(folder / "policy")
    network.config._name_or_path = str(folder / "policy")  # whence TRL loads its reference
    fixed = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    return GRPOTrainer(
        model=network,
        reward_funcs=lambda completions, **columns: scores[: len(completions)],
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(scores),
            num_generations=generations,
            max_completion_length=RESPONSES.shape[1],
            temperature=TEMPERATURE,
            epsilon=LOW,
            epsilon_high=settings.pop("epsilon_high", HIGH),
            gradient_checkpointing=False,
            **settings,
            **fixed,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w9", "w7 w3 w2"]}),
        processing_class=words(),
    )


def same(ours, theirs, size=1e-5):
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=size, atol=size)


def group_advantages(name, scores, generations):
    """Ours of one token per response."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    groups = torch.arange(len(scores)) // generations
    table = torch.tensor(scores).unsqueeze(1)
    outcome = Outcome(table, torch.zeros_like(table), mask, groups=groups)
    return estimate(name, outcome, 1.0, 1.0).advantages.squeeze(1)


@pytest.mark.parametrize(("scale", "name"), [("group", "grpo"), ("none", "dr_grpo")])
def test_advantages(tmp_path, scale, name):
    """Both std have Bessel's correction and 1e-4 added."""
    trainer = make_trainer(tmp_path, scale_rewards=scale)
    rows = [{"prompt": "w5 w9"}] * 4 + [{"prompt": "w7 w3 w2"}] * 4
    theirs = trainer._generate_and_score_completions(rows)["advantages"]
    same(group_advantages(name, SCORES, 4), theirs)


def test_groups_of_equal_scores(tmp_path):
    """Differs: of eight equal scores rounding leaves TRL advantages that are not 0; ours are exactly 0."""
    scores = [0.97] * 8
    trainer = make_trainer(tmp_path, scores, generations=8)
    theirs = trainer._generate_and_score_completions([{"prompt": "w5 w9"}] * 8)["advantages"]
    assert not group_advantages("grpo", scores, 8).any()
    assert theirs.abs().max() < 0.01  # 1e-4 beside the std keeps them small


@pytest.fixture
def inputs():
    """What TRL's loss reads: the policy has moved since `old`, by up to 0.5 per token."""
    noise = torch.Generator().manual_seed(0)
    new, ref = logprobs_of(tiny("tokens", 0)).detach(), logprobs_of(tiny("tokens", 1)).detach()
    return {
        "prompt_ids": PROMPTS,
        "prompt_mask": (PROMPTS != PAD).long(),
        "completion_ids": RESPONSES,
        "completion_mask": REAL.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": new + torch.rand(new.shape, generator=noise) - 0.5,
        "ref_per_token_logps": ref,
        "num_items_in_batch": REAL.sum(),
    }


def logits_of(network):
    mask = torch.cat([PROMPTS != PAD, REAL], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    both = torch.cat([PROMPTS, RESPONSES], 1)
    logits = network(input_ids=both, attention_mask=mask.long(), position_ids=places).logits
    return logits[:, PROMPTS.shape[1] - 1 : -1]


def logprobs_of(network):
    return token_logprobs(logits_of(network), RESPONSES, None, TEMPERATURE)


def our_loss(inputs, objective, weighting, extra=0.0, network=None):
    """Ours, as `ModelTrainer` puts it together."""
    new = logprobs_of(network or tiny("tokens", 0))
    advantages = inputs["advantages"].unsqueeze(1).expand_as(new)
    moved = Moved(new, inputs["old_per_token_logps"], advantages)
    losses, _ = policy_objective(objective, moved, LOW, HIGH)
    counted = token_weights(weighting, REAL.sum(1), RESPONSES.shape[1])
    rows = None if counted.rows is None else counted.rows.unsqueeze(1).expand_as(new)[REAL]
    return counted.mean((losses + extra)[REAL], rows)


LOSSES = [
    ("grpo", "ppo", "sequence"),
    ("bnpo", "ppo", "token"),
    ("dapo", "ppo", "token"),
    ("dr_grpo", "ppo", "horizon"),
    ("cispo", "cispo", "token"),
]


@pytest.mark.parametrize(("loss_type", "objective", "weighting"), LOSSES)
def test_losses(tmp_path, inputs, loss_type, objective, weighting):
    """Differs in name alone: TRL's `epsilon_high` of CISPO is the cap itself, ours the distance of the cap
    from 1."""
    cap = 1 + HIGH if objective == "cispo" else HIGH
    trainer = make_trainer(tmp_path, loss_type=loss_type, epsilon_high=cap, beta=0.0)
    theirs = loss_of(trainer, inputs)
    same(our_loss(inputs, objective, weighting), theirs)
    assert abs(theirs) > 1e-2


def loss_of(trainer, inputs):
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer._compute_loss(trainer.model, inputs)


def test_gradients(tmp_path, inputs):
    """Of the weights, to 1e-5 of the largest."""
    trainer, network = make_trainer(tmp_path, loss_type="grpo", beta=0.0), tiny("tokens", 0)
    loss_of(trainer, inputs).backward()
    our_loss(inputs, "ppo", "sequence", network=network).backward()
    ours, theirs = (
        torch.cat([weight.grad.flatten() for weight in each.parameters()])
        for each in (network, trainer.model)
    )
    same(ours / theirs.abs().max(), theirs / theirs.abs().max())


def test_kl_as_a_loss(tmp_path, inputs):
    """Differs: TRL's `beta` weighs k3 of the sampled token, times the ratio, as a loss; ours is k1 in the
    reward (`kl_coef`), charged to a token for what follows it, or the exact KL as a loss (`kl_loss_coef`)."""
    trainer = make_trainer(tmp_path, loss_type="bnpo", beta=0.5)
    new, ref = logprobs_of(tiny("tokens", 0)), inputs["ref_per_token_logps"]
    ratio = policy_ratio(new, inputs["old_per_token_logps"])
    same(our_loss(inputs, "ppo", "token", 0.5 * ratio * k3(new, ref)), loss_of(trainer, inputs))


@pytest.mark.parametrize("corrected", [True, False])
def test_kl_as_a_loss_in_expectation(corrected):
    """With the ratio (TRL's default) k3 has the exact KL's gradient, so that `beta` is `kl_loss_coef`;
    without it (`use_bias_correction_kl=False`) its value alone is the exact KL's."""
    logits = logits_of(tiny("tokens", 0)).detach().double().requires_grad_()
    new = torch.log_softmax(logits, -1)
    ref = torch.log_softmax(logits_of(tiny("tokens", 1)).detach().double(), -1)
    old = new.detach()
    weight = policy_ratio(new, old) if corrected else 1.0
    theirs = (old.exp() * weight * k3(new, ref)).sum(-1)
    ours = exact_kl(new, ref)
    same(theirs, ours)
    gaps = torch.autograd.grad((theirs - ours).sum(), logits)[0]
    assert (gaps.abs().max() < 1e-5) == corrected


def k3(new, ref):
    return torch.expm1(ref - new) - (ref - new)
