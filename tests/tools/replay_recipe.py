"""The recorded steps in the repository and their model, which no version of any package may change.

`python -m tests.tools.replay_recipe NAME` records one with the versions that it runs with. The model's weights
come from numpy's `RandomState`, whose numbers are frozen, and not from torch's generator.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
BUNDLE = RECORDED / "step-00000002.safetensors"
OLDEST = RECORDED / "torch-2.11.safetensors"
PROMPTS = ["SUBREDDIT: r/a TL;DR:", "Why? TL;DR:", "x", "A longer prompt, TL;DR:"]
SETTINGS = {
    "rewards": ["length_band,low=2,high=5", "0.5*regex,pattern=[aeiou]"],
    **{"max_new_tokens": 8, "minibatch_size": 2, "ppo_epochs": 2, "top_k": 8, "device": "cpu"},
    **{"learning_rate": 1e-3, "value_learning_rate": 1e-3, "lora_r": 1, "lora_targets": "q_proj,v_proj"},
}


def make_model(folder: str | Path) -> str:
    """The model of the recorded step, the same in every version."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from proxima.world.tiny_models import make_tiny_model

    made = str(make_tiny_model(folder))
    network = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    numbers = np.random.RandomState(0)
    with torch.no_grad():
        for name, weight in sorted(network.named_parameters()):
            drawn = torch.from_numpy(numbers.standard_normal(tuple(weight.shape)).astype(np.float32))
            weight.copy_(1 + 0.1 * drawn if "norm" in name else 0.2 * drawn)
    network.save_pretrained(made)
    return made


def record(model: str, steps: int = 2, prompts: list[str] = PROMPTS, **settings: object):
    """The last of some steps as a bundle, and the trainer after it."""
    from proxima.config import PPOConfig
    from proxima.ppo_trainer import PPOTrainer, StepRecorder, weights

    trainer = PPOTrainer(PPOConfig(model, **{**SETTINGS, **settings}))
    recorder = StepRecorder(trainer)
    for _ in range(steps):
        with recorder.step():
            outcome = trainer.ppo_step(prompts)
    return replace(recorder.record(outcome), after=weights(trainer)).bundle(), trainer


if __name__ == "__main__":
    from proxima.runs import write_bundle

    with tempfile.TemporaryDirectory() as folder:
        bundle, _ = record(make_model(Path(folder) / "model"))
    facts = {
        **bundle.facts,
        "base": {**bundle.facts["base"], "name": "the model of tests/tools/replay_recipe.py"},
    }
    facts["environment"] = {**facts["environment"], "system": "Linux"}
    facts["settings"] = {**facts["settings"], "model_name": facts["base"]["name"]}
    path = RECORDED / f"{sys.argv[1]}.safetensors"
    print(write_bundle(path, facts, bundle.tensors), "bytes in", path)
