"""Every parser on hostile input: it parses, or raises a ValueError or OSError in words; nothing else, and
it ends."""

import gzip
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxima.base_setup import BaseSetup
from proxima.cli import parse
from proxima.config import FinetuningConfig, PPOConfig, RewardSpec
from proxima.config.setting_declaration import declarations
from proxima.data import read_demonstrations, read_preferences, read_prompts, read_ratings
from proxima.data.data_check import check
from proxima.data.show_data import show
from proxima.models.reward_model import reward_warning
from proxima.pages.label.label_items import read_items
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards.http_reward import UnusableReply, check_status, read_reply, retry_after
from proxima.rewards.reward_outcome import RewardOutcome
from proxima.rewards.reward_samples import Samples
from proxima.rewards.reward_server import BadRequest, read_batch

quick = settings(
    max_examples=100,
    deadline=2000,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
    derandomize=True,
)


def parses_or_says_why(call, *allowed):
    """The result; None where it was refused in words."""
    try:
        return call()
    except (ValueError, OSError, *allowed) as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} without a word") from error
        return None


NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 2**63, math.nan, math.inf, -0.0, 1e308, True, None]),
)
TEXT = st.text(st.characters(codec=None), max_size=30)  # lone surrogates too
SCALARS = st.one_of(NUMBERS, TEXT, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)


# --- settings ---

FIELDS = sorted(PPOConfig().to_dict())


@quick
@given(st.dictionaries(st.one_of(st.sampled_from(FIELDS), TEXT), VALUES, max_size=4))
def test_settings_from_any_mapping(values):
    config = parses_or_says_why(lambda: PPOConfig.from_dict(values))
    if config is not None:
        assert all(
            math.isfinite(getattr(config, name))
            for name, declared in declarations(PPOConfig).items()
            if declared.range is not None
        )
        again = PPOConfig.from_dict(config.to_dict())
        assert again.to_dict() == config.to_dict()
    parses_or_says_why(lambda: FinetuningConfig.from_dict(values))


YAML_TEXT = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda name, value: f"{name}: {value}\n".encode(errors="surrogatepass"), st.sampled_from(FIELDS), TEXT
    ),
    st.builds(
        lambda name, tag, value: f"{name}: !!{tag} {value}\n".encode(),
        st.sampled_from(FIELDS),
        st.sampled_from(
            [
                "python/object/apply:os.system",
                "python/name:os.system",
                "binary",
                "timestamp",
                "set",
                "int",
                "float",
                "omap",
                "null",
            ]
        ),
        st.sampled_from(["[touch x]", "''", "2020-99-99", "1:99:xx", "{a: b}", "abc", "=", "~"]),
    ),
)


@quick
@given(YAML_TEXT)
def test_settings_from_any_yaml(tmp_path, content):
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    parses_or_says_why(lambda: PPOConfig.from_yaml(path))
    parses_or_says_why(lambda: FinetuningConfig.from_yaml(path))


LATER = [
    "trackers",
    "seed",
    "run_dir",
    "patience",
    "eval_every",
    "dual_clip",
    "value_clip",
    "warmup_steps",
    "kl_stop",
    "dtype",
]


@pytest.mark.parametrize(
    "content",
    [
        "batch_size: " + "[" * 100_000,
        "a: &a [x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")),
        "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(["x", *LATER])).replace(
            "*x", "x"
        )
        + f"model_name: *{LATER[-1]}\n",
        "batch_size: &a [*a]\n",
        "batch_size: " + "9" * 10_000,
        "batch_size: 2020-99-99",
        "kl_coef: !!float ''",
        "? [a, b]\n: 1\n",
        "!!python/object/apply:os.system ['touch owned']",
        "rewards: [{source: x, weight: " + "9" * 400 + "}]",
        "kl_coef: " + "9" * 400,
        "rewards: [{source: x, name: [1]}]",
        "rewards: [{source: x, options: {1: 2}}]",
        "rewards: {source: {a: b}}",
    ],
    ids=lambda content: content[:30],
)
def test_bombs_and_oddities_in_yaml_are_refused_in_words(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"\w") as problem:
        PPOConfig.from_yaml("settings.yaml")
    assert len(str(problem.value)) < 2000
    assert not Path("owned").exists()
    with pytest.raises(ValueError, match=r"\w"):
        parse(["train", "--config", "settings.yaml"])


@quick
@given(
    st.one_of(
        TEXT, st.from_regex(r"\A[0-9.eE+*-]{0,6}[a-z:/\[\]]{0,9}(,[a-z]{1,3}=[-'\"\\0-9a-z_:.~]{0,8}){0,3}\Z")
    )
)
def test_reward_texts(text):
    spec = parses_or_says_why(lambda: RewardSpec.of(text))
    if spec is not None:
        assert isinstance(parses_or_says_why(lambda: spec.label) or "", str)
        parses_or_says_why(lambda: (spec.is_function, spec.is_http, PPOConfig(rewards=(spec,)).to_dict()))


@quick
@given(VALUES)
def test_reward_values(value):
    spec = parses_or_says_why(lambda: RewardSpec.of(value))
    assert spec is None or isinstance(spec.label, str)


PLAIN = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\ufeff"),
    max_size=12,
)


@quick
@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z_]{1,6}\Z").filter(lambda key: key != "name"),
        st.one_of(PLAIN, st.booleans(), st.integers(), st.none()),
        max_size=3,
    )
)
def test_options_come_back_from_their_text(options):
    spec = RewardSpec("module:function", 0.5, "label", options)
    assert RewardSpec.of(spec.to_text()) == spec


# --- data ---

CELLS = st.one_of(
    SCALARS,
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "system", ""]),
                "content": st.one_of(TEXT, st.none()),
            },
            optional={"tool_calls": VALUES},
        ),
        max_size=3,
    ),
    VALUES,
)
COLUMNS = [
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "rating",
    "messages",
    "instruction",
    "input",
    "chosen_ended",
    "query",
]
ROWS = st.lists(
    st.dictionaries(st.one_of(st.sampled_from(COLUMNS), TEXT), CELLS, max_size=4), min_size=1, max_size=3
)
JSON_LINES = ROWS.map(lambda rows: b"".join(dump(row) + b"\n" for row in rows))
READERS = (read_prompts, read_demonstrations, read_preferences, read_ratings)


def dump(row):
    return json.dumps(row).encode()


@pytest.fixture(scope="module")
def chat_tokenizer(tiny_folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["qwen3"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content + '' }}\n{% endfor %}{{ "
        "'a:' if add_generation_prompt }}"
    )
    return tokenizer


def read_all(path, tokenizer):
    """Read a file in every way there is; each may refuse it."""
    for reader in READERS:
        for given_tokenizer in (None, tokenizer):
            records = parses_or_says_why(lambda reader=reader, it=given_tokenizer: reader(path, it))
            for record in records if records is not None else ():
                assert isinstance(record, str) or record.prompt
    for given_tokenizer in (None, tokenizer):
        report = parses_or_says_why(lambda it=given_tokenizer: check(path, it, 256, 64))
        if report is not None:
            show(report)
    for mode in ("pairs", "ratings"):
        parses_or_says_why(lambda mode=mode: read_items(path, mode))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".jsonl.gz"])
def test_data_files_of_any_bytes(tmp_path, chat_tokenizer, ending, capsys):
    @settings(quick, max_examples=40)
    @given(
        st.one_of(
            st.binary(max_size=200),
            JSON_LINES,
            ROWS.map(lambda rows: b"[" + b",".join(map(dump, rows)) + b"]"),
        )
    )
    def run(content):
        path = tmp_path / f"data{ending}"
        path.write_bytes(
            gzip.compress(content, mtime=0) if ending.endswith(".gz") and len(content) % 2 else content
        )
        read_all(path, chat_tokenizer)

    run()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ending", "content"),
    [
        (".jsonl", b"[" * 200_000),
        (".json", b"[" * 200_000),
        (".jsonl", b'{"a":' * 200_000),
        (".jsonl", b'{"prompt": "x", "completion": "y", "rating": 1' + b"0" * 400 + b"}"),
        (".jsonl", b'{"prompt": "x", "completion": "y", "rating": 1' + b"0" * 5000 + b"}"),
        (".json", b'[{"prompt": "x", "rating": 1' + b"0" * 5000 + b"}]"),
        (".csv", b'prompt,completion\n"never closed'),
        (".csv", b"prompt\n" + b"\0" * 100),
        (".csv", b"\xff\xfe\x00p"),
        (".txt", b"\xff\xff\n"),
        (".jsonl", b'{"prompt": "\\ud800"}\n'),
        (".jsonl", b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n'),
        (".jsonl", b'{"prompt": "x", "completion": "\\udfff"}\n{"\\ud800": 1}\n'),
        (".jsonl.gz", b"\x1f\x8b not gzip"),
        (".jsonl.gz", gzip.compress(b'{"prompt": "x"}\n' * 100, mtime=0)[:-30]),
    ],
)
def test_data_files_that_were_made_to_hurt(tmp_path, chat_tokenizer, ending, content, capsys):
    path = tmp_path / f"data{ending}"
    path.write_bytes(content)
    read_all(path, chat_tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages + 1 }}",
        "{{ none.x.y }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_chat_template_is_refused_in_words(tmp_path, chat_tokenizer, monkeypatch, template):
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match="chat template"):
        read_prompts(path, chat_tokenizer)


# --- replies, reports, requests ---

PART = Samples(["a", "b"], ["x", "yy"], [[1], [1, 2]], [True, True])
REPLIES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(lambda value: json.dumps({"rewards": value}).encode()),
    st.lists(st.one_of(NUMBERS, st.lists(st.floats(), max_size=3)), min_size=2, max_size=2).map(
        lambda rewards: json.dumps({"rewards": rewards}).encode()
    ),
    st.just(b"[" * 100_000),
    st.just(b'{"rewards": [1, ' + b"9" * 5000 + b"]}"),
)


@quick
@given(REPLIES)
def test_replies_of_a_reward_server(reply):
    outcome = parses_or_says_why(lambda: read_reply(reply, PART), UnusableReply)
    if outcome is not None:
        assert isinstance(outcome, RewardOutcome)
        assert len(outcome.sequence) == 2
        assert all(math.isfinite(number) or math.isnan(number) for number in outcome.totals)


@quick
@given(st.integers(100, 999), st.dictionaries(st.sampled_from(["retry-after", "content-encoding"]), TEXT))
def test_states_of_a_reply(status, headers):
    parses_or_says_why(lambda: check_status(status, headers), UnusableReply)
    assert 0 <= retry_after(headers.get("retry-after", "")) < 10**12


@quick
@given(st.one_of(st.binary(max_size=60), VALUES.map(dump)))
def test_requests_to_a_reward_server_and_its_report(tmp_path, body):
    parses_or_says_why(lambda: read_batch(body), BadRequest)
    (tmp_path / "reward.json").write_bytes(body)
    assert isinstance(reward_warning(str(tmp_path)), str)


# --- adapters ---


@pytest.fixture(scope="module")
def adapter(tiny_folders, tmp_path_factory):
    config = PPOConfig(model_name=tiny_folders["qwen3"], lora_r=2, rewards=("length_band,low=1,high=2",))
    return PPOTrainer(config).save(tmp_path_factory.mktemp("saved")) / "value"


def damage(path, kind, place, filler):
    content = path.read_bytes()
    at = place % max(1, len(content))
    changed = {
        "cut": content[:at],
        "flip": content[:at] + bytes([content[at] ^ (filler % 255 + 1)]) + content[at + 1 :],
        "fill": bytes([filler % 256]) * 40,
        "empty": b"",
        "length": (2**62 + filler).to_bytes(8, "little") + content[8:],
    }
    path.write_bytes(changed[kind])


NAMES = ["adapter_config.json", "adapter_model.safetensors", "head.safetensors"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ["sft_adapter", "value_model", "rewards"])
def test_damaged_adapters(tiny_folders, adapter, tmp_path, role):
    @settings(quick, max_examples=15, deadline=10_000)
    @given(
        st.sampled_from(NAMES),
        st.sampled_from(["cut", "flip", "fill", "empty", "length"]),
        st.integers(0, 2000),
        st.integers(0, 255),
    )
    def run(name, kind, place, filler):
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter, folder)
        damage(folder / name, kind, place, filler)
        parses_or_says_why(
            lambda: BaseSetup(PPOConfig(model_name=tiny_folders["qwen3"], lora_r=2, **{role: str(folder)}))
        )

    run()


CONFIG_KEYS = [
    "r",
    "lora_alpha",
    "target_modules",
    "peft_type",
    "task_type",
    "rank_pattern",
    "modules_to_save",
    "bias",
    "init_lora_weights",
]


@pytest.mark.filterwarnings("ignore")
def test_adapters_with_any_settings(tiny_folders, adapter, tmp_path):
    @settings(quick, max_examples=25, deadline=10_000)
    @given(st.dictionaries(st.sampled_from(CONFIG_KEYS), VALUES, min_size=1, max_size=2))
    def run(changes):
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter, folder)
        settings_of = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(settings_of | changes))
        parses_or_says_why(
            lambda: BaseSetup(PPOConfig(model_name=tiny_folders["qwen3"], lora_r=2, sft_adapter=str(folder)))
        )

    run()


def test_the_fuzz_reaches_what_it_should(adapter, tiny_folders, tmp_path):
    """The sound originals are accepted, so refusals above are those of damage."""
    assert BaseSetup(PPOConfig(model_name=tiny_folders["qwen3"], lora_r=2, sft_adapter=str(adapter)))
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(PPOConfig(rewards=("0.5*length_band,low=1,high=2",)).to_dict()))
    assert PPOConfig.from_yaml(path).rewards[0].options == {"low": 1, "high": 2}
    assert read_reply(b'{"rewards": [1, [2, 3]]}', PART).totals == [1.0, 5.0]
