"""The stages before PPO on a GPU, in bfloat16: they learn to the end, and PPO reads what they leave."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification

from proxima.base_setup import load_tokenizer
from proxima.config import FinetuningConfig, PPOConfig
from proxima.finetuning import RewardTrainer, SFTTrainer
from proxima.models import ClassifierReward
from proxima.ppo_trainer import PPOTrainer
from tests.finetuning.test_finetuning import DEMONSTRATIONS, PREFERENCES

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)


@pytest.fixture
def stage(tiny_folders, tmp_path):
    base = {
        "learning_rate": 1e-2,
        "batch_size": 8,
        "eval_every": 5,
        "dtype": "bfloat16",
        "run_dir": str(tmp_path),
    }
    return lambda **settings: FinetuningConfig(tiny_folders["qwen3"], **{**base, **settings})


def test_supervised_fine_tuning_learns(stage):
    losses = [row["validation_loss"] for row in SFTTrainer(stage(epochs=6)).train(DEMONSTRATIONS).metrics]
    assert losses[-1] < losses[0] / 3


def test_a_reward_model_learns_after_its_first_measurement_too_and_ppo_scores_with_it(stage):
    trainer = RewardTrainer(stage(epochs=6))
    seen = []
    measure = trainer.measure

    def measured(rows):
        seen.append([parameter.detach().clone() for parameter in trainer.role.parameters()])
        return measure(rows)

    trainer.measure = measured
    results = trainer.train(PREFERENCES)
    assert len(seen) > 3
    moved = [any(not torch.equal(a, b) for a, b in zip(one, two, strict=True)) for one, two in pairwise(seen)]
    assert all(moved)
    adapters = [
        sum(float((a - b).abs().sum()) for a, b in zip(one[:-2], two[:-2], strict=True))
        for one, two in pairwise(seen)
    ]
    assert min(adapters) > 0, "the adapter stopped learning after a measurement"
    assert results.best["accuracy"] == 1.0
    texts = [" yes!", " no!"]
    prompts = [f"prompt {i}" for i in range(len(texts))]
    scores = []
    for engine in ("auto", "plain"):
        config = PPOConfig(stage().model_name, rewards=str(results.folder), dtype="bfloat16", engine=engine)
        scores.append(PPOTrainer(config).reward_computer.compute_rewards(prompts, texts))
    assert scores[0] == pytest.approx(scores[1], rel=0.05, abs=0.1)
    assert scores[0][0] > scores[0][1]


def test_gradients_are_finite_by_cudnns_attention_too(tiny_folders):
    """With padding in front they were not, where the width was a multiple of 64."""
    trainer = PPOTrainer(
        PPOConfig(
            tiny_folders["qwen3"], dtype="bfloat16", engine="plain", max_new_tokens=32, top_k=0, top_p=1.0
        )
    )
    tokens = trainer.generator.sample(["a" * length for length in (20, 90, 130, 160)])
    policy = trainer.models.policy
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True), policy.training():
        policy.response_hidden(tokens).float().sum().backward()
    assert all(
        parameter.grad.isfinite().all() for parameter in policy.parameters() if parameter.grad is not None
    )


def test_a_foreign_classifier_scores_as_its_own_forward_pass(tiny_folders):
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(
        tiny_folders["qwen3"], num_labels=1, dtype=torch.bfloat16
    ).cuda()
    tokenizer = load_tokenizer(tiny_folders["qwen3"])
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    with torch.no_grad():
        own = [float(network(input_ids=torch.tensor([row]).cuda()).logits[0, 0]) for row in rows]
    found = ClassifierReward(network, tokenizer).scores(rows)
    torch.testing.assert_close(found, torch.tensor(own), rtol=0.05, atol=0.02)


def test_training_on_the_fast_path_agrees_with_the_reference_path(stage, monkeypatch):
    monkeypatch.setattr("proxima.runtime.engine.graphed_passes.SMALLEST", 16)  # several sizes in one update
    losses = {}
    for fast in (True, False):
        trainer = SFTTrainer(stage(epochs=4, lora_dropout=0.0, micro_batch_size=3))
        trainer.backbone.settings.fast = fast
        losses[fast] = [row["validation_loss"] for row in trainer.train(DEMONSTRATIONS).metrics]
        assert (trainer.backbone._decoder is not None) == fast
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=0.05, atol=0.02)
