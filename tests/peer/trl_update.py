"""One update of TRL 1.12's PPO on a tiny model and given responses, with the numbers it computed on the way.

TRL's formulas for rewards, GAE and losses are lines of `PPOTrainer.train`. They are not copied here: `train`
runs, and what its local variables hold is noted where it whitens the advantages and at each backward pass.
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

PAD, EOS = 0, 1
TEMPERATURE = 0.7
PROMPTS = torch.tensor([[PAD, PAD, 5, 9], [PAD, 7, 3, 2], [4, 8, 6, 3], [PAD, 2, 9, 5]])  # padded on the left
RESPONSES = torch.tensor(
    [
        [6, 3, EOS, PAD, PAD, PAD],  # ended early
        [8, 2, 7, 9, 4, EOS],  # ended at the last position
        [3, 3, 8, 5, 2, 6],  # cut
        [EOS, PAD, PAD, PAD, PAD, PAD],  # empty
    ]
)
REAL = torch.tensor([[True] * size + [False] * (6 - size) for size in (3, 6, 6, 1)])  # EOS included
ENDED = torch.tensor([True, True, False, True])


def tiny(head: str, seed: int):
    """A network of TRL's kind with random weights large enough that its log-probabilities and scores
    differ."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"vocab_size": 12, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    labels = {"num_labels": 1} if head == "score" else {}
    config = Qwen3Config(**sizes, **heads, **special, **labels, initializer_range=0.2)
    kind = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config)


def words(pad_token: str = "w0"):
    """A tokenizer with one token per word `w0` to `w11`; `w1` is EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = Tokenizer(models.WordLevel({f"w{i}": i for i in range(12)}, unk_token="w2"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=table, padding_side="left", pad_token=pad_token, eos_token="w1", unk_token="w2"
    )


def run_update(folder, pad_token="w0", responses=RESPONSES, batches=2, **settings):
    """What TRL computed: `rollout`, the variables of `train` where it whitens advantages; `passes`, those at
    each backward pass; `metrics` it logged; `optimizer_steps` it took.

    Args:
        batches: in the data, of which the first is trained on.
    """
    import trl.experimental.ppo.ppo_trainer as inside
    from datasets import Dataset

    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "total_episodes": 4,
        "num_ppo_epochs": 2,
        "learning_rate": 0.02,
        "response_length": responses.shape[1],
        "temperature": TEMPERATURE,
        "kl_coef": 0.3,
        "gamma": 0.9,
        "lam": 0.8,
        "stop_token": "eos",
        "num_sample_generations": 0,
        "local_rollout_forward_batch_size": 4,
    }
    fixed = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    data = Dataset.from_dict({"input_ids": batches * PROMPTS.tolist()})
    trainer = inside.PPOTrainer(
        args=inside.PPOConfig(output_dir=str(folder), **{**given, **settings}, **fixed),
        processing_class=words(pad_token),
        model=tiny("tokens", 0),
        ref_model=tiny("tokens", 1),
        reward_model=tiny("score", 2),
        value_model=tiny("score", 3),
        train_dataset=data,
        eval_dataset=data,
        data_collator=lambda rows: {"input_ids": PROMPTS.clone()},
    )
    return record(trainer, inside, responses)


def record(trainer, inside, responses):
    found = SimpleNamespace(rollout=None, passes=[], metrics={}, optimizer_steps=0)
    optimizer = trainer.optimizer.optimizer
    whiten, backward, step = inside.masked_whiten, trainer.accelerator.backward, optimizer.step

    def respond(model, queries, _, pad, generation_config):
        """The given responses, and the logits that sampling them would have had."""
        both = torch.cat([queries, responses], 1)
        logits = inside.forward(model, both, pad).logits[:, queries.shape[1] - 1 : -1]
        return both, logits / generation_config.temperature

    def whitening(values, mask, shift_mean=True):
        found.rollout = variables(sys._getframe(1))
        return whiten(values, mask, shift_mean)

    def passing(loss):
        found.passes.append(variables(sys._getframe(1)))
        backward(loss)

    def stepping(*arguments, **named):
        found.optimizer_steps += 1
        return step(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside, "batch_generation", respond)
        patch.setattr(inside, "masked_whiten", whitening)
        patch.setattr(trainer.accelerator, "backward", passing)
        patch.setattr(optimizer, "step", stepping)
        patch.setattr(trainer, "log", found.metrics.update)
        trainer.train()
    return found


def variables(frame):
    """Copies of the tensors among a frame's local variables."""
    tensors = {name: kept for name, kept in frame.f_locals.items() if isinstance(kept, torch.Tensor)}
    return SimpleNamespace(**{name: tensor.detach().clone() for name, tensor in tensors.items()})
