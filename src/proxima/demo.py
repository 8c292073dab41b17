"""The demo. In: a seed. Out: a tiny random model that has learned to write vowels, and the run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

VOWELS = "aeiouAEIOU"
SUBREDDITS = ("relationships", "advice", "personalfinance", "jobs")
TITLES = ("Should I admit to snooping?", "Need help with a decision", "Lent money, never came back", "Quit without notice?")


def vowel_share(prompts: list[str], texts: list[str]) -> list[float]:
    """The demo's reward: the share of vowels in a response."""
    return [sum(character in VOWELS for character in text) / max(len(text), 1) for text in texts]


def example_prompts() -> list[str]:
    return [f"SUBREDDIT: r/{place} TITLE: {title} POST: ... TL;DR:" for place in SUBREDDITS for title in TITLES]


def run_demo(seed: int = 0, steps: int = 30, folder: str | Path = "runs") -> Path:
    """Train and say in a few lines what happened."""
    from proxima.config import PPOConfig, RewardSpec
    from proxima.ppo_trainer import PPOTrainer
    from proxima.tiny import make_tiny_model

    home = Path(folder) / "demo"
    if (home / "metrics.jsonl").exists():
        shutil.rmtree(home)
    model = make_tiny_model(home / "model", seed=seed)
    config = PPOConfig(
        model_name=str(model),
        learning_rate=3e-3,
        value_learning_rate=3e-3,
        batch_size=16,
        max_new_tokens=12,
        kl_coef=0.01,
        top_k=0,
        top_p=1.0,
        seed=seed,
        rewards=(RewardSpec("proxima.demo:vowel_share"),),
        run_dir=str(folder),
        run_name="demo",
    )
    print("A tiny language model with random weights is rewarded for vowels. Watch `reward` rise.\n")
    trainer = PPOTrainer(config)
    prompts = example_prompts()
    before = trainer.generator.generate(prompts[:3], step=-2)[0]
    results = trainer.train(prompts, num_epochs=steps)
    after = trainer.generator.generate(prompts[:3], step=-2)[0]
    print("\nresponses before -> after:")
    for old, new in zip(before, after, strict=True):
        print(f"  {old!r} -> {new!r}")
    first, last = results.metrics[0], results.metrics[-1]
    print(f"\nreward {first['avg_reward']:.2f} -> {last['avg_reward']:.2f}, sequence KL {last['kl']:.1f} nats")
    print(f"metrics, samples and the trained adapter: {results.run_folder}")
    return results.run_folder
