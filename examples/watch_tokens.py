# python examples/watch_tokens.py
"""What a run learned, token by token, as data frames: which tokens earned reward and how much more likely
they became."""

from proxima import PPOConfig, PPOTrainer, Run
from proxima.data import read_prompts

config = PPOConfig(
    "embedded",
    rewards=["length_band,low=4,high=12", "ends_with_eos"],
    batch_size=4,
    max_new_tokens=20,
    run_name="watched",
)
results = PPOTrainer(config).train(read_prompts("examples/prompts.jsonl"), num_epochs=3)
run = Run(results.run_folder)  # also works on a run that is still training
print(
    run.metrics_frame()[["step", "avg_reward", "kl_exact", "response_length"]].round(3).to_string(index=False)
)
tokens = run.tokens_frame(run.token_steps()[-1])
first = tokens[
    (tokens["kind"] == "trained") & (tokens["sample"] == tokens[tokens["kind"] == "trained"]["sample"].min())
]
print(first[["token", "reward", "value", "advantage", "ratio"]].round(3).to_string(index=False))
print(tokens.groupby("kind")[["kl", "advantage"]].mean().round(4))
run.plot("avg_reward", ["kl", "kl_exact"]).save("watched.html")
