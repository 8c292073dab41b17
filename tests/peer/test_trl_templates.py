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


@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_observation_is_the_suffix_or_refused_by_name(speaks, role):
    tokens = ObservationTokens(speaks)
    said = {"role": role, "content": "Higher.", "name": "compare"}
    if why := refusal(tokens.check, role):
        assert f"the chat template of {speaks.name_or_path!r} loses messages of role {role!r}" in why
        return
    talk = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "turn-7-turn"}, said]
    whole = speaks.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert speaks.decode(tokens.ids([said], [1, 2], True)) == whole.partition("turn-7-turn")[2]


def test_calls_are_of_a_known_format_or_refused_by_name(speaks):
    why = refusal(find_format, speaks)
    assert f"the chat template of {speaks.name_or_path!r}" in why if why else find_format(speaks) in FORMATS
