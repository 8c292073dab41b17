"""Times steps of TRL 1.12 on random weights; `trl_peer.py` runs it in TRL's own environment. In:
JSON. Out: one line of JSON.

The job is that of a Proxima step: a LoRA policy, a value model, a reward model, KL to the base. TRL trains
its value model in full; it has no other way. With several responses per prompt it is GRPO: a function as the
reward, no KL, advantages scaled by the group, loss over all tokens. It also times optimiser steps of
supervised fine-tuning and of reward training, with the plain preference loss and the same dropout.
"""

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

Given = dict[str, Any]  # JSON, and keyword arguments


def main(given: Given) -> Given:
    import torch
    import trl

    torch.set_num_threads(given["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    makers = {
        "ppo": make_trainer,
        "grpo": make_group_trainer,
        "sft": make_sft_trainer,
        "reward": make_reward_trainer,
    }
    trainer = makers[given["job"]](given, device)
    clock = StepClock(trainer, device, generates=given["job"] in ("ppo", "grpo"))
    trainer.train()
    marks = clock.marks[: given["steps"] + 1]  # all but PPO log once more, at the end
    steps = [later[0] - earlier[0] for earlier, later in pairwise(marks)]
    generates = [later[1] - earlier[1] for earlier, later in pairwise(marks)]
    middle = len(steps) // 2
    return {
        "version": trl.__version__,
        "seconds": sorted(steps)[middle],
        "generate": sorted(generates)[middle],
        "all": steps,
        "peak_gib": torch.accelerator.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "micro": given["micro"],
    }


class StepClock:
    """Notes the time, and what generation has taken so far, whenever the trainer logs a step."""

    def __init__(self, trainer: Any, device: str, generates: bool):
        self.device = device
        self.generating = 0.0
        self.marks: list[tuple[float, float]] = []
        if generates:
            self.time_generation(trainer)
        self.log = trainer.log
        trainer.log = self.marked

    def time_generation(self, trainer: Any) -> None:
        import trl.experimental.ppo.ppo_trainer as inside

        owner: Any = trainer if hasattr(trainer, "_generate_single_turn") else inside
        name = "batch_generation" if owner is inside else "_generate_single_turn"
        self.generate = getattr(owner, name)
        setattr(owner, name, self.timed)

    def now(self) -> float:
        import torch

        if self.device == "cuda":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def timed(self, *arguments: Any, **named: Any) -> Any:
        started = self.now()
        found = self.generate(*arguments, **named)
        self.generating += self.now() - started
        return found

    def marked(self, *arguments: Any, **named: Any) -> Any:
        self.marks.append((self.now(), self.generating))
        return self.log(*arguments, **named)


def make_trainer(given: Given, device: str) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
    from trl.experimental.ppo import PPOTrainer

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    special = {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    shape = {**given["shape"], **special}
    with torch.device(device):
        policy = Qwen3ForCausalLM(Qwen3Config(**shape)).to(dtype)
        value = Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1)).to(dtype)
        reward = Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1)).to(dtype)
    size = (given["batch"] * (given["steps"] + 2), given["prompt"])
    rows = torch.randint(3, shape["vocab_size"], size, generator=torch.Generator().manual_seed(0))
    data = Dataset.from_dict({"input_ids": rows.tolist()})
    return PPOTrainer(
        args=make_settings(given, device),
        processing_class=make_tokenizer(shape["vocab_size"]),
        model=policy,
        ref_model=None,
        reward_model=reward,
        value_model=value,
        train_dataset=data,
        eval_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def make_group_trainer(given: Given, device: str) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOTrainer

    special = {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    shape = {**given["shape"], **special}
    with torch.device(device):
        policy = Qwen3ForCausalLM(Qwen3Config(**shape))
    size = (given["batch"] * (given["steps"] + 2), given["prompt"])
    rows = torch.randint(3, shape["vocab_size"], size, generator=torch.Generator().manual_seed(0))
    texts = [" ".join(f"w{token}" for token in row) for row in rows.tolist()]
    return GRPOTrainer(
        model=policy.to(torch.bfloat16 if device == "cuda" else torch.float32),
        reward_funcs=even_words,
        args=make_group_settings(given, device),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=make_tokenizer(shape["vocab_size"]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def even_words(completions: list[str], **columns: Any) -> list[float]:
    """The share of even numbers among the words, as in `bench_case.py`."""
    words = [text.split() for text in completions]
    return [sum(word[-1:] in set("02468") for word in row) / max(1, len(row)) for row in words]


def make_group_settings(given: Given, device: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=given["micro"],
        gradient_accumulation_steps=given["batch"] * given["generations"] // given["micro"],
        num_generations=given["generations"],
        num_iterations=given["epochs"],
        max_steps=given["steps"] + 1,
        max_completion_length=given["response"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        gradient_checkpointing=False,
    )


def make_sft_trainer(given: Given, device: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    size = (given["batch"] * (given["steps"] + 1), given["prompt"] + given["response"])
    rows = torch.randint(3, given["shape"]["vocab_size"], size)
    labels = rows.clone()
    labels[:, : given["prompt"]] = -100  # the loss is that of the answer
    return SFTTrainer(
        model=make_network(Qwen3ForCausalLM, given, device),
        args=SFTConfig(**finetuning_settings(given, device)),
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist(), "labels": labels.tolist()}),
        processing_class=make_tokenizer(given["shape"]["vocab_size"]),
        peft_config=make_adapter("CAUSAL_LM"),
    )


def make_reward_trainer(given: Given, device: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import Qwen3ForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    size = (2, given["batch"] * (given["steps"] + 1), given["prompt"] + given["response"])
    chosen, rejected = torch.randint(3, given["shape"]["vocab_size"], size)
    return RewardTrainer(
        model=make_network(Qwen3ForSequenceClassification, given, device, num_labels=1),
        args=RewardConfig(**finetuning_settings(given, device), disable_dropout=False),
        train_dataset=Dataset.from_dict({"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist()}),
        processing_class=make_tokenizer(given["shape"]["vocab_size"]),
        peft_config=make_adapter("SEQ_CLS"),
    )


def make_network(kind: Any, given: Given, device: str, **more: int) -> Any:
    import torch
    from transformers import Qwen3Config

    special = {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    with torch.device(device):
        network = kind(Qwen3Config(**given["shape"], **special, **more))
    return network.to(torch.bfloat16 if device == "cuda" else torch.float32)


def make_adapter(task: str) -> Any:
    """As `proxima sft` and `proxima reward` have it by default."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", task_type=task)


def finetuning_settings(given: Given, device: str) -> Given:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": given["micro"],
        "gradient_accumulation_steps": given["batch"] // given["micro"],
        "max_steps": given["steps"] + 1,
        "max_length": given["prompt"] + given["response"],
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "gradient_checkpointing": False,
    }


def make_settings(given: Given, device: str) -> Any:
    from trl.experimental.ppo import PPOConfig

    return PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=given["micro"],
        gradient_accumulation_steps=given["batch"] // given["micro"],
        total_episodes=given["batch"] * (given["steps"] + 1),
        response_length=given["response"],
        temperature=1.0,
        num_ppo_epochs=given["epochs"],
        num_mini_batches=given["minibatches"],
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        logging_steps=1,
        local_rollout_forward_batch_size=given["micro"],
        learning_rate=1e-5,
        missing_eos_penalty=None,
        gradient_checkpointing=False,
    )


def make_tokenizer(size: int) -> Any:
    """One token per word `w0`, `w1`, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
