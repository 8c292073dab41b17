"""Every chat template that TRL ships: an observation is exactly what the template writes after a turn, or the
template is refused by name; so are formats of tool calls."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from proxima.environments.observation_tokens import ObservationTokens
from proxima.environments.tool_calls import FORMATS, find_format
from proxima.world.tiny_models import byte_tokenizer

FOUND = find_spec("trl")
if FOUND is None or FOUND.origin is None:
    pytest.skip(
        "TRL is not installed here: `make test-peer` has an environment for it", allow_module_level=True
    )
TEMPLATES = sorted((Path(FOUND.origin).parent / "chat_templates").glob("*.jinja"))


LOSE_USER = {"idefics3", "llava_next"}  # they take lists of parts
ACCEPTED = {  # by family; where a family has a template for training, that one too
    "hermes": {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"},
    "llama3": {"llama3_1", "llama3_2"},
    "qwen_xml": {"qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "nemotron_3_nano", "nemotron_3_super"},
}
LEAST = 60  # of 63 in TRL 1.12.0


def test_the_templates_are_there():
    """Without them the tests below would pass over nothing."""
    assert len(TEMPLATES) >= LEAST
    names = {path.stem for path in TEMPLATES}
    assert LOSE_USER.union(*ACCEPTED.values()) <= names


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def speaks(request):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>", "bos_token": "<begin>"})
    tokenizer.chat_template, tokenizer.name_or_path = request.param.read_text(), f"a/{request.param.stem}"
    return tokenizer


def refusal(call, *given):
    """Why it is refused; empty where it is not."""
    try:
        call(*given)
    except ValueError as error:
        return str(error)
    return ""


def family(tokenizer):
    """Of a template or of its form for training."""
    return tokenizer.name_or_path.removeprefix("a/").removesuffix("_training")


@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_observation_is_the_suffix_or_refused_by_name(speaks, role):
    tokens = ObservationTokens(speaks)
    said = {"role": role, "content": "Higher.", "name": "compare"}
    why = refusal(tokens.check, role)
    if role == "user":
        assert bool(why) == (family(speaks) in LOSE_USER)
    if family(speaks) in set().union(*ACCEPTED.values()):
        assert not why
    if why:
        assert f"the chat template of {speaks.name_or_path!r} loses messages of role {role!r}" in why
        return
    talk = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "turn-7-turn"}, said]
    whole = speaks.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert speaks.decode(tokens.ids([said], [1, 2], True)) == whole.partition("turn-7-turn")[2]


def test_calls_are_of_a_known_format_or_refused_by_name(speaks):
    why = refusal(find_format, speaks)
    for name, families in ACCEPTED.items():
        if family(speaks) in families:
            assert find_format(speaks) == name
    assert f"the chat template of {speaks.name_or_path!r}" in why if why else find_format(speaks) in FORMATS
