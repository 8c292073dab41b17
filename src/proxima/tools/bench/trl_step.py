"""Times one PPO step of TRL 1.12 on random weights; run by `peer.py` in TRL's own environment. In: JSON. Out:
a line of JSON.

The job is the one a Proxima step does: a LoRA policy, a value model, a reward model, KL to the base. TRL
trains its value model in full; it has no other way.
"""

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main(given: dict[str, Any]) -> dict[str, Any]:
    import torch
    import trl
    import trl.experimental.ppo.ppo_trainer as inside
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(given["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = {
        **given["shape"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    size = shape["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    torch.manual_seed(0)
    with torch.device(device):
        policy = Qwen3ForCausalLM(Qwen3Config(**shape)).to(dtype)
        value, reward = (
            Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1)).to(dtype) for _ in range(2)
        )
    batch, micro = given["batch"], given["micro"]
    rows = torch.randint(
        3, size, (batch * (given["steps"] + 2), given["prompt"]), generator=torch.Generator().manual_seed(0)
    )
    data = Dataset.from_dict({"input_ids": rows.tolist()})

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    spent = [0.0]
    original = inside.batch_generation

    def timed(*arguments: Any, **named: Any) -> Any:
        started = now()
        found = original(*arguments, **named)
        spent[0] += now() - started
        return found

    inside.batch_generation = timed
    settings = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        total_episodes=batch * (given["steps"] + 1),
        response_length=given["response"],
        temperature=1.0,
        num_ppo_epochs=given["epochs"],
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        logging_steps=1,
        local_rollout_forward_batch_size=micro,
        learning_rate=1e-5,
        missing_eos_penalty=None,
        gradient_checkpointing=False,
    )
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward,
        value_model=value,
        train_dataset=data,
        eval_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    marks: list[tuple[float, float]] = []
    log = trainer.log

    def marked(*arguments: Any, **named: Any) -> Any:
        marks.append((now(), spent[0]))
        return log(*arguments, **named)

    trainer.log = marked
    trainer.train()
    steps = [later[0] - earlier[0] for earlier, later in pairwise(marks)]
    generates = [later[1] - earlier[1] for earlier, later in pairwise(marks)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    middle = len(steps) // 2
    return {
        "version": trl.__version__,
        "seconds": sorted(steps)[middle],
        "generate": sorted(generates)[middle],
        "all": steps,
        "peak_gib": peak,
        "micro": micro,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
