# python examples/quickstart.py
"""PPO in ten lines: the model in the package learns to write short summaries."""

from proxima import PPOConfig, PPOTrainer
from proxima.data import read_prompts


def brevity(prompts, completions):
    return [-len(text) / 100 for text in completions]


config = PPOConfig(
    "embedded",
    rewards=[brevity],
    batch_size=4,
    max_new_tokens=30,
    learning_rate=1e-3,
    value_learning_rate=1e-3,
)
results = PPOTrainer(config).train(read_prompts("examples/prompts.jsonl"), num_epochs=4)
print(f"{results.stop_reason}; best step {results.best_step}; everything is in {results.run_folder}")
