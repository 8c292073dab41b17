# python examples/own_reward.py
"""A reward that reads a column of the data: train on it, evaluate, write the report."""

from proxima import PPOConfig, PPOTrainer, Run
from proxima.data import read_prompts
from proxima.evaluator import evaluate_run
from proxima.pages.report import summary, write_report


def mentions(prompts, completions, answer):
    """1 if the summary names what the post is about, minus a small penalty per character."""
    return [float(wanted in text) - len(text) / 200 for wanted, text in zip(answer, completions, strict=True)]


prompts = read_prompts("examples/prompts.jsonl")  # the column `answer` stays with each prompt
config = PPOConfig(
    model_name="embedded",
    rewards=[mentions],
    batch_size=4,
    max_new_tokens=30,
    learning_rate=1e-3,
    value_learning_rate=1e-3,
    top_k=0,
    top_p=1.0,
    run_name="own-reward",
)
results = PPOTrainer(config).train(prompts, num_epochs=5)
found = evaluate_run(results.run_folder, prompts, [mentions])  # better: evaluate on held-out prompts
print(f"reward {found['reference']['avg_reward']:.2f} before, {found['policy']['avg_reward']:.2f} after")
run = Run(results.run_folder)
print(summary(run))
print(write_report(run))
