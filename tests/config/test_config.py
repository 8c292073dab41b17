"""`PPOConfig`: the contract's fields, checked values, YAML, rewards, and pins that agree."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import proxima
from proxima.config import FinetuningConfig, PPOConfig, RewardConfig, RewardSpec
from proxima.config.setting_declaration import KEY, declarations

ROOT = Path(__file__).parents[2]
FIELDS = dataclasses.fields(PPOConfig)
CONTRACT = {
    "model_name": "Qwen/Qwen3-0.6B-Base",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "learning_rate": 1e-5,
    "value_learning_rate": 1e-4,
    "batch_size": 32,
    "max_new_tokens": 10,
    "gamma": 0.99,
    "lam": 0.95,
    "kl_coef": 0.1,
    "clip_epsilon": 0.2,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 0.95,
}


def test_the_contracts_fields_come_first_with_its_defaults():
    first = [(field.name, field.default) for field in FIELDS[: len(CONTRACT)]]
    assert first == list(CONTRACT.items())


@pytest.mark.parametrize("kind", [PPOConfig, FinetuningConfig, RewardConfig])
def test_every_setting_is_declared_every_number_with_a_range_that_holds_its_default(kind):
    for field in dataclasses.fields(kind):
        assert KEY in field.metadata, f"{field.name} is not declared with `setting`"
        declared = field.metadata[KEY]
        assert (declared.range is not None) == (field.type in ("int", "float")), field.name
        assert declared.range is None or field.default in declared.range, field.name
    assert kind(**kind().to_dict()) == kind()
    former = [each.formerly for each in declarations(kind).values() if each.formerly]
    assert len(set(former)) == len(former)
    assert not set(former) & declarations(kind).keys()


def test_settings_that_both_configs_have_take_the_same_values():
    ppo, finetuning = declarations(PPOConfig), declarations(FinetuningConfig)
    shared = ppo.keys() & finetuning.keys()
    assert len(shared) > 15
    for name in shared:
        for part in ("range", "not_empty", "check", "values", "formerly"):
            assert getattr(ppo[name], part) == getattr(finetuning[name], part), (name, part)


NEGATIVE = """lora_r lora_dropout learning_rate value_learning_rate batch_size gamma lam kl_coef top_k seed
    missing_eos_penalty clip_rewards value_clip value_coef entropy_coef dual_clip kl_loss_coef kl_stop max_grad_norm
    warmup_steps critic_warmup_steps patience min_improvement max_reward_failures
    checkpoint_every max_skipped_updates kl_limit min_entropy length_limit max_declining_evals token_samples"""
ZERO = """lora_alpha batch_size max_new_tokens clip_epsilon temperature top_p ppo_epochs minibatch_size micro_batch_size
    kl_target kl_horizon buffer_token_budget buffer_max_bytes eval_every keep_checkpoints
    rollback_rate_factor"""
OTHER = [
    ("gamma", 1.01),
    ("lam", 2.0),
    ("clip_epsilon", 1.0),
    ("top_p", 1.5),
    ("lora_dropout", 1.0),
    ("learning_rate", 2.0),
]
NOT_FINITE = [
    (name, float(value)) for name in ("kl_coef", "temperature", "gamma") for value in ("nan", "inf")
]


@pytest.mark.parametrize(
    ("name", "value"),
    [*((n, -1) for n in NEGATIVE.split()), *((n, 0) for n in ZERO.split()), *OTHER, *NOT_FINITE],
)
def test_a_value_out_of_range_is_refused_with_name_value_and_range(name, value):
    allowed = declarations(PPOConfig)[name].range
    with pytest.raises(ValueError, match=name) as problem:
        PPOConfig(**{name: value})
    assert f"({value})" in str(problem.value)
    assert str(allowed) in str(problem.value)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"batch_size": 1.5}, ("batch_size", "1.5", "int")),
        ({"batch_size": True}, ("batch_size", "True", "int")),
        ({"gamma": "high"}, ("gamma", "high", "number")),
        ({"truncate_prompts": 1}, ("truncate_prompts", "1", "bool")),
        ({"model_name": ""}, ("model_name", "empty")),
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"buffer_sampling": "random"}, ("buffer_sampling", "random", "shuffled")),
        ({"trackers": "mlflow"}, ("trackers", "mlflow", "tensorboard")),
        ({"dual_clip": 0.5}, ("dual_clip", "0.5", "above 1")),
        ({"run_name": "../elsewhere"}, ("run_name", "../elsewhere", "run_dir")),
        ({"rewards": None}, ("rewards", "None")),
        ({"rewards": 3}, ("rewards", "3")),
        ({"trackers": None}, ("trackers", "None")),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_name(settings, parts):
    with pytest.raises(ValueError, match=parts[0]) as problem:
        PPOConfig(**settings)
    assert all(part in str(problem.value) for part in parts)


def some_reward(prompts, texts):
    return [0.0] * len(texts)


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("my.module:brevity", RewardSpec("my.module:brevity")),
        ("0.5*my.module:brevity", RewardSpec("my.module:brevity", 0.5)),
        ("-2 * folder/model/", RewardSpec("folder/model/", -2.0)),
        ({"source": "a:b", "weight": 3, "name": "c"}, RewardSpec("a:b", 3, "c")),
        (some_reward, RewardSpec(some_reward)),
        (RewardSpec("a:b", 2.0), RewardSpec("a:b", 2.0)),
    ],
)
def test_a_reward_may_be_given_in_every_form_alone_or_in_a_list(given, spec):
    assert PPOConfig(rewards=given).rewards == PPOConfig(rewards=[given]).rewards == (spec,)


@pytest.mark.parametrize(
    ("source", "label", "is_function"),
    [("pkg.mod:brevity", "brevity", True), ("org/model", "model", False), ("/some/dir/", "dir", False)],
)
def test_a_rewards_name_and_kind_follow_from_its_source(source, label, is_function):
    spec = RewardSpec(source)
    assert (spec.label, spec.is_function) == (label, is_function)


@pytest.mark.parametrize(
    "given", ["", "heavy*a:b", "nan*a:b", "2*", {"weight": 1.0}, {"source": "a:b", "wieght": 2.0}, 7]
)
def test_a_reward_that_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError, match="reward"):
        RewardSpec.of(given)


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"\['f'\]"):
        PPOConfig(rewards=["a:f", "b:f"])


def test_yaml_gives_the_same_settings_back(tmp_path):
    config = PPOConfig(
        learning_rate=3e-6,
        buffer_sampling="token_budget",
        rewards=["0.5*a:f", {"source": "b:f", "name": "g"}],
        trackers="tensorboard",
        run_name="日本",
        truncate_prompts=True,
    )
    config.to_yaml(tmp_path / "c.yaml")
    again = PPOConfig.from_yaml(tmp_path / "c.yaml")
    assert again.rewards == (RewardSpec("a:f", 0.5, "f"), RewardSpec("b:f", 1.0, "g"))
    assert again == PPOConfig(**{**vars(config), "rewards": again.rewards})
    (tmp_path / "short.yaml").write_text("learning_rate: 3e-6\n")  # YAML reads this as text
    assert PPOConfig.from_yaml(tmp_path / "short.yaml") == PPOConfig(learning_rate=3e-6)
    (tmp_path / "empty.yaml").write_text("")
    assert PPOConfig.from_yaml(tmp_path / "empty.yaml") == PPOConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
        ("zzzz: 1", "unknown setting 'zzzz'$"),
        ("- a", "must hold `setting: value` lines, got list"),
        ("a: [", "cannot read the settings"),
        ("gamma: !!int ''", "cannot read the settings in .*: a value is not what its !!tag says"),
        ("overlap: !!bool maybe", "cannot read the settings in .*: a value is not what its !!tag says"),
        ("gamma: 2", r"gamma \(2\) must be in \[0, 1\]"),
    ],
)
def test_a_yaml_file_with_mistakes_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        PPOConfig.from_yaml(tmp_path / "c.yaml")


def settings_read_outside_config() -> set[str]:
    """x of every `config.x`, `settings.x` and `….config.x` in the package."""
    package = Path(proxima.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        if file.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = (
                    node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                )
                found |= {node.attr} if holder in ("config", "settings", "ppo") else set()
    return found


def test_something_reads_every_setting():
    fields = {field.name for kind in (PPOConfig, RewardConfig) for field in dataclasses.fields(kind)}
    assert fields - settings_read_outside_config() == set()


def test_pins_are_exact_the_same_in_both_files_and_name_no_host():
    text = (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert pins == project["tool"]["uv"]["constraint-dependencies"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert "torch==2.13.0" in pins
    for file in ("constraints.txt", "pyproject.toml"):
        assert not re.search(
            r"https?:|://|git\+|--index|\[\[?tool\.uv\.(index|sources)", (ROOT / file).read_text()
        )
    names = {re.split("[=]", pin)[0].lower().replace("_", "-") for pin in pins}
    needed = {re.split(r"[<>=\[]", need)[0].lower() for need in project["project"]["dependencies"]}
    assert needed <= names


def test_the_engines_are_tested_with_the_same_pins():
    """`uv` resolves all extras together, vllm too: a pin that vLLM cannot live with would break every `uv
    sync`."""

    def pins(file):
        lines = [
            line for line in (ROOT / file).read_text().lower().replace("_", "-").splitlines() if "==" in line
        ]
        return dict(line.partition("+")[0].split("==") for line in lines if not line.startswith("#"))

    ours, engines = pins("constraints.txt"), pins("engines.lock.txt")
    both = ours.keys() & engines.keys()
    assert {"torch", "transformers", "fastapi"} <= both
    assert {name: ours[name] for name in both} == {name: engines[name] for name in both}
