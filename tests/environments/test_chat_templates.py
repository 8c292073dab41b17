"""Observations and tool calls through chat templates of several families, written here in short."""

import pytest

from proxima.core.types import Prompt
from proxima.environments.episode_environment import Environment
from proxima.environments.observation_tokens import ObservationTokens
from proxima.environments.tool_calls import Call, MalformedCall, find_format, read_calls
from proxima.world.tiny_models import byte_tokenizer
from tests.environments.games import Counter, Parity, multiply

TOOLS = "{% if tools %}{{ '<sys>' + tools | tojson + '<end>' }}{% endif %}"


def template(said, calls="", roles=("system", "user", "assistant", "tool")):
    """A template of one family: what a turn looks like, and how it writes calls."""
    wanted = " or ".join(f"m.role == '{role}'" for role in roles)
    return (
        TOOLS
        + "{% for m in messages %}{% if "
        + wanted
        + " %}"
        + said.replace("CALLS", calls)
        + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}"
        + said.partition("{{ m.content }}")[0].replace("{{ m.role }}", "assistant")
        + "{% endif %}"
    )


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<end>\n"
HEADERS = "<|start|>{{ m.role }}<|head|>\n\n{{ m.content }}CALLS<end>"
EACH = "{% for c in m.tool_calls or [] %}"
HERMES = (
    EACH + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
LLAMA = (
    EACH + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)
XML = (
    EACH + "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
OTHER = EACH + "[call {{ c.function.name }}: {{ c.function.arguments.probe_key }}]{% endfor %}"
RAISES = "{{ raise_exception('only users speak here') if m.role == 'tool' }}" + CHATML


def tokenizer(written):
    """The tokenizer of the tests, with `<end>` as one token that ends a turn."""
    made = byte_tokenizer()
    made.add_special_tokens({"eos_token": "<end>"})
    made.chat_template, made.name_or_path = written, "a/model"
    return made


@pytest.mark.parametrize("said", [CHATML, HEADERS])
def test_an_observation_is_what_the_template_writes_after_the_turn(said):
    speaks = tokenizer(template(said))
    tokens, end = ObservationTokens(speaks), speaks.eos_token_id
    tokens.check("user")
    tokens.check("tool")
    messages = [{"role": "user", "content": "Higher."}]
    whole = speaks.apply_chat_template(
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "5"}, *messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    after = speaks(whole.partition("5")[2], add_special_tokens=False)["input_ids"]
    assert after[0] == end
    assert tokens.ids(messages, [1, 2, end], True) == after[1:]  # the policy ended its turn
    assert tokens.ids(messages, [1, 2, 3], True) == after  # it was cut
    several = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert speaks.decode(tokens.ids(several, [end], True)).count("tool") == 2


def test_without_a_template_an_observation_is_plain_text():
    plain = ObservationTokens(tokenizer(None))
    assert plain.tokenizer.decode(plain.ids([{"role": "user", "content": " lower"}], [5], False)) == " lower"


@pytest.mark.parametrize(
    ("written", "role"),
    [
        (template(CHATML, roles=("user", "assistant")), "tool"),
        (template(CHATML, roles=("assistant", "tool")), "user"),
        (template(RAISES), "tool"),
        ("{{ messages[0].content }}", "user"),
    ],
)
def test_templates_that_lose_an_observation_are_refused_by_name(written, role):
    tokens = ObservationTokens(tokenizer(written))
    with pytest.raises(ValueError, match=f"the chat template of 'a/model' loses messages of role '{role}'"):
        tokens.check(role)


@pytest.mark.parametrize(("calls", "name"), [(HERMES, "hermes"), (LLAMA, "llama3"), (XML, "qwen_xml")])
@pytest.mark.parametrize("said", [CHATML, HEADERS])
def test_the_format_of_calls_is_found_by_rendering_one(said, calls, name):
    assert find_format(tokenizer(template(said, calls))) == name


@pytest.mark.parametrize(
    ("calls", "words"),
    [("", "'a/model' drops tool calls"), (OTHER, "writes tool calls in a form that is not read here")],
)
def test_other_formats_are_refused_by_name(calls, words):
    with pytest.raises(ValueError, match=words):
        find_format(tokenizer(template(CHATML, calls)))


SCHEMAS = {
    "add": {"function": {"parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'I add. <tool_call>{"name": "add", "arguments": {"n": 2, "s": "3"}}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"n": 2, "s": "3"}}'),
        (
            "qwen_xml",
            "<tool_call>\n<function=add>\n<parameter=n>\n2\n</parameter>\n<parameter=s>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ],
)
def test_calls_are_read(name, text):
    assert read_calls(name, text, SCHEMAS) == [Call("add", {"n": 2, "s": "3"})]
    assert read_calls(name, "The sum is 5.", SCHEMAS) == []
    with pytest.raises(MalformedCall, match="there is no tool 'sub'; the tools are add"):
        read_calls(name, text.replace("add", "sub"), SCHEMAS)
    with pytest.raises(MalformedCall):
        read_calls(name, text[: len(text) * 2 // 3], SCHEMAS)


@pytest.mark.parametrize("text", ["[1]", "7", '{"name": 3}', '{"name": "add", "arguments": [1]}', "{" * 5000])
def test_json_that_is_no_call_is_malformed(text):
    with pytest.raises(MalformedCall):
        read_calls("hermes", f"<tool_call>{text}</tool_call>", SCHEMAS)


def test_prompts_are_opened_with_tools_and_with_what_reset_returns(make_config):
    speaks = tokenizer(template(CHATML, HERMES))
    environment = Environment(make_config(environment=Counter, tools=(multiply,), rewards=()), speaks)
    turns = [{"role": "user", "text": "Count."}]
    opened = environment.open_prompt(
        Prompt("<|im_start|>user\nCount.<end>\n<|im_start|>assistant\n", {"level": 1}, turns),
        [{"role": "user", "content": " To two."}],
    )
    assert opened.columns == {"level": 1}
    assert opened.turns[-1] == {"role": "user", "text": "Count. To two."}
    assert opened.endswith("<|im_start|>user\nCount. To two.<end>\n<|im_start|>assistant\n")
    assert '"multiply"' in opened
    assert '"add"' in opened
    assert "Adds to the count." in opened
    with pytest.raises(ValueError, match=r"prompt 3 .* is plain text, so that the chat template cannot tell"):
        environment.check(["Count."], 3)


def test_a_plain_prompt_is_left_as_it_is(make_config):
    environment = Environment(make_config(environment=Parity, rewards=()), tokenizer(template(CHATML)))
    assert environment.open_prompt("Say.", []) == "Say."
    assert not environment.is_chat("Say.")
    assert environment.is_chat(Prompt("Say.", turns=[{"role": "user", "text": "Say."}]))
