"""What `proxima migrate` says about TRL 1.12, compared with the real one: names, defaults, and what its PPO
loop does.

Runs where $PROXIMA_TRL_PYTHON or .venv-trl (`make peer`) has trl==1.12.0, and is skipped elsewhere.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from proxima.tools.migrate.trl_settings import (
    DIFFERS,
    LORA_CONFIG,
    MAPS,
    TABLE,
    TRAINER_ARGUMENTS,
    UNSET_DEFAULTS,
)

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PROXIMA_TRL_PYTHON") or str(ROOT / ".venv-trl" / "bin" / "python")

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="TRL 1.12 is not here: `make peer` makes .venv-trl"
)

FIELDS = """
import dataclasses, inspect, json
import trl
from peft import LoraConfig
from trl import ModelConfig, ScriptArguments
from trl.experimental.ppo import PPOConfig, PPOTrainer

def plain(kind):
    return {field.name: field.default if isinstance(field.default, (int, float, str, bool)) else None
            for field in dataclasses.fields(kind)}

print(json.dumps({
    "version": trl.__version__,
    "settings": plain(PPOConfig) | plain(ModelConfig) | plain(ScriptArguments),
    "lora": plain(LoraConfig),
    "arguments": list(inspect.signature(PPOTrainer.__init__).parameters)[1:],
}))
"""

LOOP = """
import json, tempfile
import torch
torch.set_num_threads(1)
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
import trl.experimental.ppo.ppo_trainer as inside
from trl.experimental.ppo import PPOConfig, PPOTrainer

SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=8, vocab_size=64, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None)
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", pad_token="w0", eos_token="w1", unk_token="w2")

def build(peft=None, **settings):
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    value, reward = (Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, num_labels=1)) for _ in range(2))
    data = Dataset.from_dict({"input_ids": torch.randint(3, 64, (12, 6)).tolist()})
    args = PPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        response_length=40, num_sample_generations=0, report_to="none", save_strategy="no", **settings)
    return PPOTrainer(args=args, processing_class=tokenizer, model=policy, ref_model=None, reward_model=reward,
        value_model=value, train_dataset=data, eval_dataset=data, peft_config=peft)

def train(**settings):
    trainer = build(bf16=False, **settings)
    optimizer, steps, marks, after = trainer.optimizer.optimizer, [0], [], [0]
    step, log, generate = optimizer.step, trainer.log, inside.batch_generation
    def counted(*given, **named):
        steps[0] += 1
        return step(*given, **named)
    def marked(*given, **named):
        marks.append((steps[0], trainer.lr_scheduler.get_last_lr()[0]))
        return log(*given, **named)
    def watched(*given, **named):
        found = generate(*given, **named)
        ended = (found[0][:, 6:] == 1).cumsum(1) > 0
        after[0] += int((ended[:, :-1] & (found[0][:, 7:] != 0)).sum())
        return found
    optimizer.step, trainer.log, inside.batch_generation = counted, marked, watched
    trainer.train()
    inside.batch_generation = generate
    return {"steps": [mark[0] for mark in marks], "rates": [mark[1] for mark in marks], "tokens_after_eos": after[0],
        "checkpointing": trainer.policy_model.is_gradient_checkpointing, "eps": optimizer.param_groups[0]["eps"]}

lora = build(peft=LoraConfig(r=4, lora_dropout=0.5, task_type="CAUSAL_LM"), bf16=False)
print(json.dumps({
    "one": train(num_mini_batches=1, total_episodes=12),
    "two": train(num_mini_batches=2, total_episodes=12, stop_token="eos"),
    "warm": train(warmup_steps=2, total_episodes=12, learning_rate=1.0e-5)["rates"],
    "precision": build(bf16=True).accelerator.mixed_precision,
    "value_in_full": all(each.requires_grad for each in lora.value_model.parameters()),
    "dropout": max(part.p for part in lora.policy_model.modules() if isinstance(part, torch.nn.Dropout)),
    "reference": lora.ref_model is None,
}))
"""


def ask(code):
    environment = {
        **os.environ,
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def fields():
    return ask(FIELDS)


def test_every_setting_of_trl_has_its_status(fields):
    assert fields["version"] == "1.12.0"
    assert set(TABLE) == set(fields["settings"])


def test_defaults_are_trls_own(fields):
    told = {name: TABLE[name].default for name in (*MAPS, *DIFFERS, *UNSET_DEFAULTS)}
    assert told == {name: fields["settings"][name] for name in told}
    assert {name: default for name, (_, default) in LORA_CONFIG.items()} == {
        name: fields["lora"][name] for name in LORA_CONFIG
    }


def test_arguments_of_the_trainer_are_trls_own(fields):
    assert list(TRAINER_ARGUMENTS) == fields["arguments"]


@pytest.mark.long
def test_trls_ppo_loop_does_what_the_page_says():
    seen = ask(LOOP)
    one, two = seen["one"], seen["two"]
    assert (
        one["steps"] == two["steps"] == [4, 8, 16]
    )  # one per epoch; in the last batch of the data, one per micro-batch
    assert one["rates"] == pytest.approx([3e-6, 2e-6, 1e-6])
    assert seen["warm"] == pytest.approx([0.0, 5e-6, 1e-5])
    assert one["eps"] == 1e-8
    assert one["checkpointing"] is False  # though gradient_checkpointing is True by default
    assert one["tokens_after_eos"] > 0 == two["tokens_after_eos"]
    assert seen["precision"] == "no"
    assert seen["value_in_full"]
    assert seen["dropout"] == 0
    assert seen["reference"]
