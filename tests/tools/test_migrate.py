"""`proxima migrate`: TRL's forms of a PPO run, read and never run; what cannot be read is named; what
comes out trains."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from proxima.cli import main, parse
from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.migrate import migrate
from proxima.tools.migrate.convert import ALWAYS, COMMAND_FLAGS
from proxima.tools.migrate.show_migration import account, commands, to_yaml
from proxima.tools.migrate.trl_settings import DIFFERS, KNOWN, MAPS, TABLE, UNSET_DEFAULTS

IMPORTS = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, ScriptArguments, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer
"""

PLAIN = (
    IMPORTS
    + """
base = "org/sft-model"
judge = "org/reward-model"
args = PPOConfig(
    output_dir="models/minimal/ppo",
    learning_rate=1e-6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    num_mini_batches=2,
    total_episodes=1_000,
    missing_eos_penalty=1.0,
    stop_token="eos",
    whiten_rewards=True,
    report_to=["wandb", "mlflow"],
)
policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to("cuda")
trainer = PPOTrainer(
    args,
    AutoTokenizer.from_pretrained(base),
    policy,
    None,
    reward_model=AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1),
    value_model=AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1),
    train_dataset=load_dataset("org/data", "small", split="train[:500]").map(lambda row: row),
    callbacks=[Callback()],
)
trainer.train()
"""
)

PARSED = (
    IMPORTS
    + """
if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    training_args.kl_coef = 0.02
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config, split=script_args.dataset_train_split)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    peft_config = get_peft_config(model_args)
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    else:
        ref_policy = None
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    trainer = PPOTrainer(
        args=training_args, processing_class=tokenizer, model=policy, ref_model=ref_policy, reward_model=reward_model,
        value_model=value_model, train_dataset=dataset, peft_config=peft_config,
    )
"""
)

SHELL = r"""#!/bin/bash
# the run of the paper
SFT=org/sft
export REWARD="org/reward"
CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 \
    examples/scripts/ppo/ppo_tldr.py \
    --dataset_name trl-lib/tldr --dataset_test_split=validation \
    --output_dir 'models/ppo tldr' \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient-accumulation-steps 4 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path ${SFT} \
    --reward_model_path $REWARD \
    --missing_eos_penalty 1.0 --stop_token eos \
    --use_peft --lora_r 8 --lora_target_modules q_proj v_proj \
    --no_gradient_checkpointing \
    --seed $RANDOM > log.txt && echo done
"""


@pytest.fixture
def old(tmp_path):
    """Write an old run and migrate it."""

    def make(text, name="old_ppo.py", **settings):
        path = tmp_path / name
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text, encoding="utf-8")
        return migrate(path, **settings)

    return make


def listed(items, word):
    return [item for item in items if item.startswith(word)]


def config(**settings):
    return IMPORTS + f"PPOConfig({', '.join(f'{name}={value}' for name, value in settings.items())})\n"


def test_a_plain_script(old):
    new = old(PLAIN)
    expected = {
        "model_name": "org/sft-model",
        "rewards": ["org/reward-model"],
        "value_model": "org/reward-model",
        "lora_r": 0,
        "dtype": "float32",
        "learning_rate": 1e-6,
        "value_learning_rate": 1e-6,
        "batch_size": 32,
        "minibatch_size": 32,
        "micro_batch_size": 4,
        "missing_eos_penalty": 1.0,
        "data": "org/data/small:train",
        "limit": 500,
        "epochs": 2,  # 32 steps of 32 = 1024 episodes of 500 rows
        "run_dir": "models/minimal",
        "run_name": "ppo",
        "trackers": ["wandb"],
    }
    assert {name: new.settings[name] for name in expected} == expected
    assert any("epochs = 2 are 1000 episodes of 500 rows; TRL's were 1024" in line for line in new.differs)
    assert any(line.startswith("num_mini_batches = 2 (line 15)") for line in new.differs)
    for word in ("whiten_rewards = True", "callbacks of PPOTrainer", "report_to = mlflow"):
        assert len(listed(new.dropped, word)) == 1, word
    assert not new.unread
    assert not new.unknown


def test_what_was_not_written_keeps_trls_defaults(old):
    new = old(config(output_dir="'x'"))
    carried = {
        "learning_rate": 3e-6,
        "value_learning_rate": 3e-6,
        "max_new_tokens": 53,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "gamma": 1.0,
        "lam": 0.95,
        "kl_coef": 0.05,
        "clip_epsilon": 0.2,
        "value_clip": 0.2,
        "value_target": "lambda_return",
        "ppo_epochs": 4,
        "batch_size": 8,
        "minibatch_size": 8,
        "missing_eos_penalty": 0.0,
        "max_grad_norm": 0.0,
        "whiten_advantages": True,
        "reward_units": "raw",
        "lr_schedule": "linear",
        "epochs": 3,
        "seed": 42,
        "model_name": "EleutherAI/pythia-160m",
    }
    assert {name: new.settings[name] for name in carried} == carried
    assert "rewards" not in new.settings
    assert "data" not in new.settings
    assert [item.split(":")[0] for item in new.unread] == ["the reward", "the data"]
    assert (
        commands(new, "p.yaml")[1]
        == "proxima train --config p.yaml --data prompts.jsonl --rewards my_rewards:score"
    )


def test_the_batch_counts_every_process(old):
    text = config(per_device_train_batch_size=4, gradient_accumulation_steps=2, total_episodes=100)
    new = old(text, processes=3)
    assert (new.settings["batch_size"], new.settings["limit"]) == (24, 120)  # TRL: ceil(100 / 24) updates
    assert any("4 per device" in line and "x 3 processes -> batch_size = 24" in line for line in new.maps)
    assert commands(new, "p.yaml")[1].startswith("torchrun --nproc_per_node=3 -m proxima train ")


def test_rows_turn_episodes_into_epochs(old):
    text = config(per_device_train_batch_size=10, total_episodes=1000)
    few, many = old(text, rows=400).settings, old(text, rows=5000).settings
    assert (few["epochs"], few.get("limit")) == (2, None)  # 2.5, to even
    assert (many["epochs"], many["limit"]) == (1, 1000)
    half = old(config(per_device_train_batch_size=10, num_train_epochs=0.5), rows=400).settings
    assert (half["epochs"], half["limit"]) == (1, 200)


def test_a_script_that_parses_its_command_line(old):
    new = old(PARSED)
    assert new.settings["kl_coef"] == 0.02
    assert new.settings["model_name"] == "EleutherAI/pythia-160m"
    assert new.origins["model_name"] == "the policy (TRL's default)"
    assert any("settings come from a command line" in item and "line 10" in item for item in new.unread)
    assert not listed(new.dropped, "ref_model")


def test_a_shell_script(old):
    new = old(SHELL, "run.sh")
    expected = {
        "model_name": "org/sft",
        "rewards": ["org/reward"],
        "value_model": "org/reward",
        "lora_r": 8,
        "lora_alpha": 32,
        "lora_targets": "q_proj,v_proj",
        "batch_size": 128,
        "limit": 1_000_064,
        "data": "trl-lib/tldr:train",
        "dtype": "float32",  # ModelConfig's default, with which TRL's own scripts load
        "run_name": "ppo tldr",
        "learning_rate": 3e-6,
    }
    assert {name: new.settings[name] for name in expected} == expected
    assert new.processes == 2
    assert listed(new.unread, "seed = $RANDOM (line 19)")
    assert "seed" not in new.settings
    assert listed(new.differs, "gradient_checkpointing = False")
    assert listed(new.differs, "model_name_or_path")
    assert listed(new.dropped, "dataset_test_split = validation")
    assert not new.unknown


def test_a_yaml_file_alone_and_behind_config(old, tmp_path):
    text = (
        "learning_rate: 5e-6\nuse_peft: true\nlora_r: 4\nkl_coef: 0.1\nsft_model_path: org/sft\nenv: {A: 1}\n"
    )
    new = old(text, "old.yaml")
    assert (new.settings["learning_rate"], new.settings["lora_r"], new.settings["kl_coef"]) == (5e-6, 4, 0.1)
    assert listed(new.unread, "env")
    behind = old("python ppo.py --config old.yaml --kl_coef 0.3\n", "run.sh")
    assert (behind.settings["lora_r"], behind.settings["kl_coef"]) == (4, 0.3)  # a flag wins
    assert listed(old("python ppo.py --config gone.yaml\n", "run2.sh").unread, "--config gone.yaml (line 1)")


PEFT = "use_peft: true\nlora_r: 4\nsft_model_path: org/sft\nload_in_4bit: true\n"


def test_a_base_in_4_bits(old):
    new = old(PEFT, "old.yaml")
    assert new.settings["quantize"] == "nf4"
    assert listed(
        new.differs, "load_in_4bit (old.yaml): TRL's script quantised the value and reward model too"
    )
    assert listed(
        new.differs, "use_bnb_nested_quant = False (TRL's default): double quantisation is always on"
    )
    assert not listed(new.dropped, "4bit")
    nested = old(PEFT + "bnb_4bit_quant_type: nf4\nuse_bnb_nested_quant: true\n", "old.yaml")
    assert nested.settings["quantize"] == "nf4"
    assert not listed(nested.differs, "use_bnb_nested_quant")
    assert not listed(nested.dropped, "bnb")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("true\nlora_r", "false\nlora_r"), "load_in_4bit = True (old.yaml): codes cannot be trained"),
        (
            ("load_in_4bit", "bnb_4bit_quant_type: fp4\nload_in_4bit"),
            "bnb_4bit_quant_type = fp4 (old.yaml): the one 4-bit form here is nf4",
        ),
    ],
)
def test_a_4_bit_run_that_has_no_counterpart_is_left_to_the_reader(old, changes, told):
    new = old(PEFT.replace(*changes), "old.yaml")
    assert "quantize" not in new.settings
    assert listed(new.unread, told)


def test_8_bits_and_settings_of_4_bits_without_them(old):
    new = old(
        PEFT.replace("load_in_4bit: true", "load_in_8bit: true\nuse_bnb_nested_quant: true"), "old.yaml"
    )
    assert "quantize" not in new.settings
    assert listed(new.dropped, "load_in_8bit = True")
    assert listed(new.dropped, "use_bnb_nested_quant = True")


def test_lora_from_pefts_own_config(old):
    text = PLAIN.replace("callbacks=[Callback()]", "peft_config=lora") + "\n"
    new = old(
        text.replace(
            "policy =", "lora = LoraConfig(r=16, use_rslora=True, target_modules='all-linear')\npolicy ="
        )
    )
    assert (new.settings["lora_r"], new.settings["lora_targets"]) == (16, "all-linear")
    assert new.settings["lora_alpha"] == 32  # PEFT's 8, times sqrt(16)
    plain = old(text.replace("policy =", "lora = LoraConfig()\npolicy ="))
    assert (plain.settings["lora_r"], plain.settings["lora_alpha"]) == (
        8,
        8,
    )  # PEFT's defaults, not TRL's 16 and 32
    assert listed(plain.differs, "lora_target_modules is not given")


@pytest.mark.parametrize(
    ("lines", "data"),
    [
        ("data = load_dataset('a/b', split='train')", "a/b:train"),
        ("data = load_dataset('a/b')['odd']", "a/b:odd"),
        ("both = load_dataset('a/b')\ndata = both['odd'].map(f)\nheld_out = both['test']", "a/b:odd"),
        (
            "both = load_dataset('a/b', 'c')\ntrain = both['train']\ndata = prepare(train)\nx = both['test']",
            "a/b/c:train",
        ),
        ("test = load_dataset('x/test')\ndata = load_dataset('a/b')", "a/b"),
        ("data = load_dataset('json', data_files='rows.jsonl')", "rows.jsonl"),
        ("data = load_from_disk('saved/rows')", "saved/rows"),
        ("data = load_dataset('imdb')", None),
        ("data = load_dataset(which)", None),
        ("data = load_dataset('a/b', split='train[10%:]')", None),
        ("data = load_dataset('a/b', split=['train', 'test'])", None),
        ("both = load_dataset('a/b')\ndata = join(both['x'], both['y'])", None),
        ("data = join(load_dataset('a/b'), load_dataset('c/d'))", None),
        ("data = Dataset.from_dict({'input_ids': []})", None),
    ],
)
def test_the_data_is_the_set_that_was_trained_on(old, lines, data):
    new = old(IMPORTS + lines + "\nPPOTrainer(args=PPOConfig(), train_dataset=data, eval_dataset=held_out)\n")
    assert new.settings.get("data") == data
    assert [item for item in new.unread if item.startswith("the data")] or data


def test_how_the_policy_was_loaded(old):
    kwargs = "ways = dict(dtype='bfloat16', revision='v2', trust_remote_code=True)\n"
    new = old(PLAIN.replace("args = PPO", kwargs + "args = PPO").replace("dtype=torch.float32", "**ways"))
    assert new.settings["dtype"] == "bfloat16"
    assert "trust_remote_code" not in new.settings  # never carried over: it lets a model's own code run
    assert any("--trust-remote-code" in line for line in new.unread)
    assert listed(new.dropped, "model_revision = v2")
    assert "dtype" not in old(PLAIN.replace(", dtype=torch.float32", "")).settings
    assert listed(old(PLAIN.replace("torch.float32", "pick()")).unread, "dtype = pick()")


@pytest.mark.parametrize(
    ("old_value", "settings"),
    [
        ("**{'kl_coef': 0.3, **{'lam': 0.9}}", {"kl_coef": 0.3, "lam": 0.9}),
        ("**dict(kl_coef=0.3)", {"kl_coef": 0.3}),
        ("**SETTINGS", {"kl_coef": 0.7, "gamma": 0.5}),
        ("kl_coef=RATE", {"kl_coef": 0.25}),
        ("kl_coef=2 * RATE / 5", {"kl_coef": 0.1}),
        ("seed=-(-7)", {"seed": 7}),
        ("lr_scheduler_type='constant', warmup_steps=9", {"lr_schedule": "constant"}),
        (
            "lr_scheduler_type='constant_with_warmup', warmup_steps=9",
            {"lr_schedule": "constant", "warmup_steps": 9},
        ),
        (
            "lr_scheduler_type='cosine', warmup_ratio=0.1, total_episodes=800",
            {"lr_schedule": "cosine", "warmup_steps": 10},
        ),
        ("save_strategy='no'", {"checkpoint_every": 0}),
        ("save_steps=20, save_total_limit=3", {"checkpoint_every": 20, "keep_checkpoints": 3}),
        ("use_cpu=True, ddp_timeout=60", {"device": "cpu", "process_timeout": 60}),
        ("num_train_epochs=5", {"epochs": 5}),
    ],
)
def test_values_that_can_be_read(old, old_value, settings):
    given = f"RATE = 0.25\nSETTINGS = {{'kl_coef': 0.7, 'gamma': 0.5}}\nPPOConfig({old_value})\n"
    new = old(IMPORTS + given)
    assert {name: new.settings[name] for name in settings} == pytest.approx(settings)
    assert not [item for item in new.unread if not item.startswith("the ")]


@pytest.mark.parametrize(
    ("value", "left_out"),
    [
        ("kl_coef=float('0.1')", "kl_coef"),
        ("kl_coef=__import__('os').system('touch hacked')", "kl_coef"),
        ("kl_coef=twice", "kl_coef"),
        ("kl_coef=argument", "kl_coef"),
        ("kl_coef=elsewhere", "kl_coef"),
        ("kl_coef=2 ** 99999999", "kl_coef"),
        ("seed=10**100", "seed"),
        ("seed=" + "9" * 60, "seed"),
        ("gamma=1 / 0", "gamma"),
        ("lam=[i for i in range(9)][0]", "lam"),
        ("per_device_train_batch_size=count()", "batch_size"),
        ("total_episodes=len(data)", "limit"),
        ("num_train_epochs=0.5", "epochs"),
        ("lr_scheduler_type=kind()", "lr_schedule"),
        ("warmup_steps=0.1", "warmup_steps"),
        ("output_dir=f'models/{name}'", "run_name"),
    ],
)
def test_what_is_computed_is_named_with_its_line_and_never_guessed(
    old, tmp_path, monkeypatch, value, left_out
):
    monkeypatch.chdir(tmp_path)
    before = "twice = 1; twice = 2\nfrom settings import elsewhere; elsewhere = 1\n"
    given = before + f"def make(argument=1):\n    return PPOConfig(\n        {value})\n"
    new = old(IMPORTS + given)
    name = value.split("=")[0]
    assert len([item for item in new.unread if item.startswith(f"{name} = ") and "(line 11)" in item]) == 1, (
        new.unread
    )
    assert left_out not in new.settings
    assert not (tmp_path / "hacked").exists()
    assert f"not read: {name}" in to_yaml(new)


def test_changes_after_the_config_was_made(old):
    body = (
        "args = PPOConfig(kl_coef=0.1, lam=0.9, seed=1)\nargs.kl_coef = 0.2\nif fast:\n    args.lam = "
        "0.5\nargs.seed += 1\n"
    )
    new = old(IMPORTS + body + "setattr(args, 'gamma', 0)\n")
    assert new.settings["kl_coef"] == 0.2
    assert "lam" not in new.settings
    assert "seed" not in new.settings
    assert {item.split(" ")[0] for item in new.unread} >= {"lam", "seed", "setattr(args,"}


def test_settings_of_another_trl_or_slips_are_named_as_unknown(old):
    new = old(config(kl_ceof=0.1, init_kl_coef=0.2, adap_kl_ctrl=True))
    assert [item.split(" ")[0] for item in new.unknown] == ["kl_ceof", "init_kl_coef", "adap_kl_ctrl"]
    assert "did you mean kl_coef?" in new.unknown[0]
    assert new.settings["kl_coef"] == 0.05


def test_every_written_setting_is_accounted_for(old):
    """Each known name, given one at a time, stands somewhere in the account."""
    values = {
        "lr_scheduler_type": "'cosine'",
        "output_dir": "'a/b'",
        "dtype": "'bfloat16'",
        "num_train_epochs": "2",
    }
    values |= {
        "cliprange": "0.5",
        "sft_model_path": "'a/b'",
        "reward_model_path": "'a/b'",
        "dataset_name": "'a/b'",
    }
    for name in KNOWN:
        new = old(IMPORTS + f"args = dict({name}={values.get(name, '1')})\nPPOConfig(**args)\n")
        said = account(new)
        assert (
            len(
                [
                    item
                    for part in (new.dropped, new.differs, new.unread)
                    for item in listed(part, f"{name} = ")
                ]
            )
            <= 1
        ), name
        assert re.search(rf"(^|\W){name} ?(=|\()|{name} \(line", said, re.MULTILINE) or name in (
            "per_device_train_batch_size",  # in words: 1 per device, 8 accumulated
            "gradient_accumulation_steps",
            "reward_model_path",
            "dataset_name",
            "use_peft",
        ), name
        assert not new.unknown


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def broken(:\n", "a.py", r"a\.py, line 1: this is not Python"),
        ("print('hello')\n", "a.py", "not a PPO script of TRL"),
        (
            "from trl import GRPOConfig, GRPOTrainer\nGRPOConfig()\n",
            "a.py",
            "script for TRL's GRPOTrainer; only PPO",
        ),
        ("from trl import DPOConfig, ModelConfig\n", "a.py", "script for TRL's DPOConfig"),
        (
            "from proxima.config import PPOConfig\nPPOConfig()\n",
            "a.py",
            "line 1: this is already a Proxima script",
        ),
        ("PPOConfig()\nPPOConfig()\n", "a.py", r"makes 2 PPOConfigs \(lines 1, 2\)"),
        ("PPOTrainer()\nPPOTrainer()\n", "a.py", r"makes 2 PPOTrainers \(lines 1, 2\)"),
        (b"\x7fELF\x00\x01\xff", "a.py", "not a text file in UTF-8"),
        (b"PPOConfig()\x00", "a.py", "read as Python|not Python"),
        ("x = " + "(" * 5000 + ")" * 5000, "a.py", "nested|not Python"),
        ("x = " + "-" * 200_000 + "1", "a.py", "nested|not Python"),
        ("PPOConfig(seed=" + "9" * 9999 + ")", "a.py", "not Python|read as Python"),
        (
            "PPOConfig(cliprange=3)",
            "a.py",
            r"cliprange \(line 1\) cannot be migrated: clip_epsilon \(3\) must be in",
        ),
        ("PPOConfig(gamma='high')", "a.py", r"gamma \(line 1\) cannot be migrated"),
        (
            "PPOConfig(per_device_train_batch_size=0)",
            "a.py",
            r"per_device_train_batch_size \(0, line 1\) must be",
        ),
        ("PPOConfig(total_episodes=-5)", "a.py", r"total_episodes \(-5, line 1\)"),
        ("PPOConfig(num_train_epochs='all')", "a.py", r"num_train_epochs \(all, line 1\)"),
        ("PPOConfig(save_total_limit=2, warmup_steps='few')", "a.py", r"warmup_steps \(few, line 1\)"),
        ("echo hello\n", "a.sh", "starts no PPO script"),
        ("trl grpo --learning_rate 1\n", "a.sh", r"line 1: `trl grpo` is not PPO"),
        ("python dpo.py --learning_rate 1\n", "a.sh", r"`dpo.py` is not PPO"),
        ("python ppo.py --a 1\npython ppo2.py --a 1\n", "a.sh", r"starts 2 PPO runs \(lines 1, 2\)"),
        ("python ppo.py --output_dir 'x\n", "a.sh", "line 1: a quote is not closed"),
        ("beta: 1\n", "a.yaml", "no setting of TRL's PPO"),
        ("- 1\n", "a.yaml", "must hold `setting: value` lines"),
        ("a: &x [1]\nb: *x\n", "a.yaml", "alias"),
        ("{}", "a.json", "must be a Python script"),
    ],
)
def test_what_is_not_a_ppo_run_of_trl_is_refused_in_one_sentence(old, text, name, message):
    with pytest.raises(ValueError, match=message):
        old(text, name)


def test_a_missing_file_a_huge_one_and_numbers_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*gone"):
        migrate(tmp_path / "gone.py")
    (tmp_path / "huge.py").write_text("#" * 5_000_001)
    with pytest.raises(ValueError, match="more than 5,000,000 bytes"):
        migrate(tmp_path / "huge.py")
    with pytest.raises(ValueError, match=r"processes \(-1\)"):
        migrate(tmp_path / "huge.py", processes=-1)


def test_names_with_odd_characters_stay_in_their_line(old, tmp_path):
    """Nothing in a script can add a setting to the file, or a line to the account."""
    odd = "org/x\\ntrust_remote_code: true # \\u2028 \\x1b[31m 'q' \"d\""
    text = PLAIN.replace('"org/sft-model"', f"'{odd}'".replace("'q'", "q")).replace(
        "org/reward-model", "org/réward 😀: #1"
    )
    new = old(text)
    values = yaml.safe_load(to_yaml(new))
    assert values == new.settings
    assert "trust_remote_code" not in values
    assert values["rewards"] == ["org/réward 😀: #1"]
    assert "\x1b" not in account(new)
    assert not [line for line in account(new).splitlines() if line.startswith("trust")]


@pytest.mark.parametrize("value", [None, True, -1, 2**62, 1e999, "", "a b\n", [[1]], {"a": [None]}])
def test_any_value_of_any_setting_is_taken_or_refused_in_words(old, value):
    """A ValueError with one sentence, or settings that `train` takes; nothing else."""
    for name in (*MAPS, *DIFFERS, *UNSET_DEFAULTS):
        text = IMPORTS + f"values = dict({name}={value!r})\nPPOConfig(**values)\n".replace("=inf", "=1e999")
        try:
            new = old(text)
        except ValueError as error:
            assert "old_ppo.py" in str(error) or name in str(error)  # noqa: PT017
            continue
        assert to_yaml(new)  # reads what it wrote
        assert account(new)


@pytest.mark.parametrize("text", [PLAIN, PARSED, SHELL])
def test_the_settings_are_those_of_train_and_doctor(old, tmp_path, text):
    new = old(text, "run.sh" if text is SHELL else "old_ppo.py")
    (tmp_path / "ppo.yaml").write_text(to_yaml(new), encoding="utf-8")
    for name in ("train", "doctor"):
        given = [] if "data" in new.settings else ["--data", "prompts.jsonl"]
        command = parse([name, "--config", str(tmp_path / "ppo.yaml"), *given])
        wanted = {key: value for key, value in new.settings.items() if key not in COMMAND_FLAGS}
        assert command.ppo == PPOConfig.from_dict(wanted)
        assert command.epochs == new.settings["epochs"]
        assert command.limit == new.settings.get("limit", 0)
    for line in to_yaml(new).splitlines():
        assert "#" in line  # each says where it came from


def test_the_command_writes_the_file_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old_ppo.py").write_text(PLAIN)
    main(["migrate", "old_ppo.py", "--out", "ppo.yaml"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if re.fullmatch(r"\w.*", line)][1:] == [
        "maps",
        "differs",
        "dropped",
        "next",
    ]
    assert "  proxima doctor --config ppo.yaml\n  proxima train --config ppo.yaml\n" in shown
    assert all(fact in shown for fact in ALWAYS)
    with pytest.raises(SystemExit) as end:
        main(["migrate", "old_ppo.py", "--out", "ppo.yaml"])
    assert end.value.code == 2
    assert "ppo.yaml is there already" in capsys.readouterr().err
    main(["migrate", "old_ppo.py"])
    assert Path("ppo.yaml").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_a_migrated_run_trains(old, tmp_path, tiny, lora):
    """With the models replaced by tiny ones: a value model of its own, all weights or an adapter."""
    text = PLAIN.replace("org/sft-model", tiny).replace(
        "callbacks=[Callback()]", f"peft_config={'LoraConfig(r=4)' if lora else None}"
    )
    text = text.replace(
        "gradient_accumulation_steps=8", "gradient_accumulation_steps=2, response_length=6"
    ).replace("org/reward-model", tiny)
    new = old(text)
    settings = {name: value for name, value in new.settings.items() if name not in COMMAND_FLAGS}
    settings |= {"rewards": ["ends_with_eos"], "device": "cpu", "dtype": "float32"}
    trainer = PPOTrainer(PPOConfig.from_dict(settings))
    assert trainer.models.value.backbone is not trainer.models.policy.backbone
    results = trainer.ppo_step([f"prompt {i}" for i in range(8)])
    assert results["optimizer_steps"] == 4  # as TRL: one per epoch, though num_mini_batches is 2
    assert results["first_ratio_error"] < 1e-4
    assert abs(results["kl"]) < 1e-4
    assert results["value_loss"] == results["value_loss"]


def test_the_page_names_every_setting_that_maps_or_differs():
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    for name, known in TABLE.items():
        if known.status != "dropped":
            assert f"`{name}`" in page, name
        for new in known.note.split(", ") if known.status == "maps" else ():
            assert f"`{new}`" in page, new
        assert known.status != "differs" or f"| {known.note} |" in page, name
    said = " ".join(page.split())
    assert all(fact[1:] in said for fact in ALWAYS)


def test_nothing_is_imported_from_trl():
    source = Path(migrate.__code__.co_filename).parent
    assert not [
        path
        for path in source.rglob("*.py")
        if re.search(r"^\s*(import|from) trl", path.read_text(), re.MULTILINE)
    ]
    assert "trl" not in sys.modules
