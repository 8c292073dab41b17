"""Settings that suit the embedded model: the demo trains with them, `proxima data sample` writes them."""

from __future__ import annotations

from proxima.core.json_record import Record

MAX_NEW_TOKENS = 40  # more than any summary of the world has
STEPS = 20  # PPO steps of the demo

MISMATCH_COEF = (
    0.0  # of the demo's reward model: it takes half as long again, and a short pass has enough to learn
)
REWARD_SETTINGS: Record = {
    "dtype": "float32",
    "learning_rate": 2e-3,
    "batch_size": 32,
    "micro_batch_size": 8,
    "epochs": 1,
    "eval_every": 1000,
    "lora_dropout": 0.0,
}
PPO_SETTINGS: Record = {
    "dtype": "float32",
    "learning_rate": 2e-3,
    "value_learning_rate": 2e-3,
    "batch_size": 64,
    "minibatch_size": 32,
    "micro_batch_size": 16,
    "ppo_epochs": 2,
    "max_new_tokens": MAX_NEW_TOKENS,
    "gamma": 1.0,
    "lam": 0.95,
    "kl_coef": 0.1,
    "top_k": 0,
    "top_p": 1.0,
    "lr_schedule": "linear",
    "eval_every": 1000,
}
