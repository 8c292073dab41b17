"""The promises about one PPO step: where it starts, and what it does not depend on."""

import pytest
import torch

from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples
from proxima.rewards.model_reward import TrainedReward
from tests.helpers import LOGPROB_ROUNDING, difference, rounding, shake, weights

SAMPLING = [
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 0, "top_p": 1.0, "temperature": 0.6},
    {"top_k": 10, "top_p": 1.0},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "temperature": 1.7},
    {"top_k": 1, "top_p": 1.0},
]
ONE_BATCH = {"minibatch_size": 8, "ppo_epochs": 1}


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("moved", [False, True], ids=["fresh", "moved"])
def test_at_step_0_the_ratio_is_1_and_the_kl_is_what_truncation_costs(make_config, prompts, sampling, moved):
    trainer = PPOTrainer(make_config(**sampling))
    if moved:
        shake(trainer)
    results = trainer.ppo_step(prompts)
    assert results["first_ratio_error"] < LOGPROB_ROUNDING
    pairs = results["sa_pairs"]
    if not moved:
        assert torch.allclose(
            pairs.column("kl"), pairs.column("truncation_cost"), rtol=0, atol=LOGPROB_ROUNDING
        )
        assert results["kl_exact"] == pytest.approx(0, abs=LOGPROB_ROUNDING)
        if sampling["top_k"] == 0 and sampling["top_p"] == 1:
            assert results["kl"] == pytest.approx(0, abs=6 * LOGPROB_ROUNDING)  # a sum over tokens
        else:
            assert results["truncation_cost"] > 0.1
    else:
        assert results["kl_exact"] > 0.01


def test_k1_kl_is_an_unbiased_sample_of_the_exact_kl(make_config):
    """Without truncation the mean of logprob_policy - logprob_ref must approach the exact KL of the
    visited states."""
    trainer = shake(PPOTrainer(make_config(top_k=0, top_p=1.0, max_new_tokens=4, micro_batch_size=64)), 0.08)
    pairs, _ = trainer.generator.generate_sequences([f"prompt {i}" for i in range(500)])
    sampled = (pairs.column("logprob_policy") - pairs.column("logprob_ref"))[pairs.mask]
    exact = pairs.column("kl_exact")[pairs.mask]
    error = (sampled - exact).double()
    assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5
    assert exact.min() >= -1e-6


def test_the_same_seed_gives_the_same_bits_and_another_does_not(make_config, prompts):
    runs = []
    for seed in (3, 3, 4):
        trainer = PPOTrainer(make_config(seed=seed))
        texts = [trainer.ppo_step(prompts)["generated_texts"] for _ in range(2)]
        runs.append((texts, weights(trainer)))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert difference(runs[0][1], runs[1][1]) == 0
    assert difference(runs[0][1], runs[2][1]) > 0


def test_the_global_random_state_is_left_alone(make_config, prompts):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    PPOTrainer(make_config()).ppo_step(prompts)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "cut", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 64}], ids=str
)
def test_micro_batches_do_not_change_a_step(make_config, prompts, cut):
    outcomes = []
    for micro in ({"micro_batch_size": 8}, cut):
        trainer = shake(PPOTrainer(make_config(**micro, **ONE_BATCH)))
        results = [trainer.ppo_step(prompts) for _ in range(2)]
        outcomes.append((results, weights(trainer)))
    for left, right in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert left["generated_texts"] == right["generated_texts"]
        for name in (
            "policy_loss",
            "value_loss",
            "grad_norm_policy",
            "grad_norm_value",
            "kl",
            "approx_kl",
            "clip_fraction",
        ):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
    assert difference(outcomes[0][1], outcomes[1][1]) < rounding(trainer)


def test_the_order_of_prompts_does_not_change_a_step(make_config, prompts):
    settings = {"minibatch_size": 2, "ppo_epochs": 2}
    outcomes = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        trainer = shake(PPOTrainer(make_config(**settings)))
        results = trainer.ppo_step([prompts[i] for i in order])
        outcomes.append((dict(zip(order, results["generated_texts"], strict=True)), weights(trainer)))
    assert outcomes[0][0] == outcomes[1][0]
    assert difference(outcomes[0][1], outcomes[1][1]) < rounding(trainer)


def test_padding_does_not_change_a_sample_or_its_numbers(make_config, prompts):
    """The short prompt alone, and beside a much longer one."""
    trainer = shake(PPOTrainer(make_config()))
    alone, _ = trainer.generator.generate_sequences(["x"])
    beside, _ = trainer.generator.generate_sequences(["a long prompt " * 8, "x"])
    alone, beside = (
        trainer.value_adder.add_values_to_sa_pairs(alone),
        trainer.value_adder.add_values_to_sa_pairs(beside),
    )
    row = [pair for pair in beside if pair["sequence"] == 1]
    assert [pair["action_id"] for pair in row] == [pair["action_id"] for pair in alone]
    for name in ("logprob_policy", "logprob_ref", "value", "kl_exact", "entropy"):
        assert [pair[name] for pair in row] == pytest.approx(
            [pair[name] for pair in alone], abs=LOGPROB_ROUNDING
        ), name
    own = TrainedReward(trainer.models.reward, trainer.tokenizer, trainer.models.micro_batches)
    scores = [own(Samples.of_tokens(pairs.tokens)).sequence for pairs in (alone, beside)]
    assert scores[0][0] == pytest.approx(scores[1][1], abs=LOGPROB_ROUNDING)


def test_what_a_sequence_samples_depends_on_nothing_but_itself(make_config, prompts):
    trainer = PPOTrainer(make_config())
    together = trainer.generator.generate(prompts)[0]
    assert [trainer.generator.generate([prompt])[0][0] for prompt in prompts] == together
    twice = trainer.generator.generate(["x", "x"])[0]
    assert twice[0] == together[3] != twice[1]  # a repeated prompt gets a sample of its own


def test_a_response_ends_with_its_first_eos_which_is_scored_and_trained_on(make_config):
    trainer = PPOTrainer(make_config(max_new_tokens=12, temperature=5.0, top_k=0, top_p=1.0))
    seen = []
    trainer.models.reward.token_members = lambda tokens: (
        seen.append(tokens) or torch.zeros(len(tokens.prompts), 1)
    )
    own = TrainedReward(trainer.models.reward, trainer.tokenizer, trainer.models.micro_batches)
    trainer.reward_computer.rewards = [(trainer.config.rewards[0], own)]
    results = trainer.ppo_step([f"prompt {i}" for i in range(64)])
    tokens = results["sa_pairs"].tokens
    eos = trainer.tokenizer.eos_token_id
    assert 0 < tokens.ended.sum() < 64
    for ids, mask, ended in zip(tokens.response_ids, tokens.mask, tokens.ended, strict=True):
        row = ids[mask].tolist()
        assert (eos in row) == bool(ended)
        assert eos not in row[:-1]
        assert ended or len(row) == 12
    scored = torch.cat([((part.response_ids == eos) & part.mask).any(1) for part in seen])
    assert torch.equal(scored, tokens.ended)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_prompts_makes_a_step(make_config, count):
    trainer = PPOTrainer(make_config(batch_size=32, minibatch_size=2))
    results = trainer.ppo_step([f"prompt {i}" for i in range(count)])
    assert len(results["generated_texts"]) == len(results["rewards"]) == count
    assert results["optimizer_steps"] == trainer.config.ppo_epochs * -(-count // 2)


def test_training_reads_the_buffer_and_nothing_else(make_config, prompts):
    """What the buffer returns is what is learned: hand out another rollout's minibatches and the result is
    theirs."""
    settings = make_config(**ONE_BATCH)
    other = PPOTrainer(settings).ppo_step(["something else entirely"])["sa_pairs"]
    swapped, honest = PPOTrainer(settings), PPOTrainer(settings)
    store = swapped.buffer.store
    swapped.buffer.store = lambda pairs, step: store(other, step)
    swapped.ppo_step(prompts)
    honest.ppo_step(["something else entirely"])
    assert difference(weights(swapped), weights(honest)) == 0


def test_dropout_is_off_in_ppo(make_config, prompts, tiny_folders):
    outcomes = []
    for dropout in (0.0, 0.9):
        trainer = PPOTrainer(make_config(lora_dropout=dropout))
        trainer.ppo_step(prompts)
        outcomes.append(weights(trainer))
        assert not any(module.training for module in trainer.models.policy.backbone.network.modules())
    assert difference(*outcomes) == 0
    gpt2 = PPOTrainer(make_config(model_name=tiny_folders["gpt2"]))  # its own config asks for dropout 0.1
    assert gpt2.ppo_step(prompts)["first_ratio_error"] < LOGPROB_ROUNDING


def test_each_response_is_decoded_to_text_once_in_a_step(make_config, prompts):
    """By the generator; its check, the rewards and the token records read the same text."""
    trainer = PPOTrainer(make_config())
    decoded = []

    class Counting:
        def __getattr__(self, name):
            return getattr(trainer.tokenizer, name)

        def __call__(self, *given, **options):
            return trainer.tokenizer(*given, **options)

        def decode(self, ids, **options):
            decoded.append(list(ids))
            return trainer.tokenizer.decode(ids, **options)

    trainer.generator.tokenizer = Counting()
    results = trainer.ppo_step(prompts)
    assert decoded == results["sa_pairs"].tokens.response_rows
    assert results["sa_pairs"].tokens.texts() == results["generated_texts"]
    assert len(decoded) == len(prompts)
