"""Observations and tool calls through chat templates of several families, written here in short."""

import contextlib
import time

import pytest

from proxima.core.types import Prompt
from proxima.data import ChatTemplate
from proxima.environments import EpisodeRunner, tool_calls
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "parameters": {"n": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"n": 2, "n": 3}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"n": NaN}}</tool_call>'),
        ("llama3", '{"name": "add", "arguments": {"n": 2}}'),
        ("qwen_xml", "<tool_call><function=add><parameter=n>2</function></tool_call>"),
        ("qwen_xml", "<tool_call><function=add><parameter n>2</parameter></function></tool_call>"),
        ("qwen_xml", "<tool_call><function=add>2</function></tool_call>"),
        ("qwen_xml", "<tool_call><function=add></function><function=add></function></tool_call>"),
        (
            "qwen_xml",
            "<tool_call><function=add><parameter=n>1</parameter><parameter=n>2</parameter></function></tool_call>",
        ),
    ],
)
def test_what_stands_in_a_call_is_never_passed_over(name, text):
    """The tool would be called without it."""
    with pytest.raises(MalformedCall):
        read_calls(name, text, SCHEMAS)


GOOD = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"n": 2}}</tool_call>',
    "llama3": '{"name": "add", "parameters": {"n": 2}}',
    "qwen_xml": "<tool_call><function=add><parameter=n>2</parameter></function></tool_call>",
}
AROUND = (
    ("```json\n{}\n```", "code block"),
    ("I would write `{}`", "quotes|whole turn"),
    ('Say "{}"', "quotes|whole turn"),
    ("{} and then I am done.", "no text after|not one JSON object"),
    ("{}\n```", "no text after|not one JSON object"),
)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(("around", "words"), AROUND)
def test_a_call_in_quotes_or_with_text_after_it_is_not_made(name, around, words):
    assert read_calls(name, GOOD[name], SCHEMAS) == [Call("add", {"n": 2})]
    with pytest.raises(MalformedCall, match=words) as raised:
        read_calls(name, around.replace("{}", GOOD[name]), SCHEMAS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_a_call_in_a_thought_is_none_and_text_before_one_is_allowed(name):
    call = GOOD[name]
    assert read_calls(name, f"<think>maybe {call}</think>The answer is 5.", SCHEMAS) == []
    assert len(read_calls(name, f"<think>`{call}`</think>\n{call}\n", SCHEMAS)) == 1
    assert len(read_calls(name, f"```py\nx\n``` so\n{call}\n{call}", SCHEMAS)) == 2


TYPED = {
    "find": {
        "function": {
            "parameters": {
                "properties": {
                    "number": {"type": "integer"},
                    "share": {"type": "number", "nullable": True},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "either": {"type": ["integer", "string"]},
                    "order": {"type": "string", "enum": ["up", "down"]},
                    "any": {},
                },
                "required": ["number"],
            }
        }
    }
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"number": 1, "share": null, "names": ["a"], "either": "x", "order": "up", "any": [1]}', ""),
        ('{"number": 1, "share": 2, "either": 3}', ""),
        ("{}", "find needs the argument 'number'"),
        ('{"number": "1"}', "the argument 'number' of find must be of type integer"),
        ('{"number": true}', "must be of type integer"),
        ('{"number": 1.5}', "must be of type integer"),
        ('{"number": 1, "share": "half"}', "must be of type number or null"),
        ('{"number": 1, "names": "a"}', "must be of type array"),
        ('{"number": 1, "either": []}', "must be of type integer or string"),
        ('{"number": 1, "order": "sideways"}', "must be one of"),
        ('{"number": 1, "extra": 2}', "find has no argument 'extra'; it takes number, share"),
        ('{"number": 1, "number": 2}', "names each key once"),
        ('{"number": 1}, "also": 3', "the call has 'also' beside 'arguments'"),
    ],
)
def test_arguments_are_those_of_the_schema(arguments, words):
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    if not words:
        assert len(read_calls("hermes", text, TYPED)) == 1
        return
    with pytest.raises(MalformedCall, match=words):
        read_calls("hermes", text, TYPED)


def test_an_answer_in_json_is_not_a_call_of_llama3():
    assert read_calls("llama3", '{"total": 5}', SCHEMAS) == []
    assert read_calls("llama3", "Its parameters are large.", SCHEMAS) == []


@pytest.mark.parametrize(
    ("word", "value"), [("True", True), ("false", False), ("None", None), ("yes", "yes")]
)
def test_values_in_xml_may_be_pythons_words(word, value, monkeypatch):
    monkeypatch.setattr(tool_calls, "_check_arguments", lambda call, schema: None)
    text = f"<tool_call><function=add><parameter=n>{word}</parameter><parameter=s>{word}</parameter>"
    calls = read_calls("qwen_xml", f"{text}</function></tool_call>", SCHEMAS)
    assert calls == [Call("add", {"n": value, "s": word})]


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen_xml"])
@pytest.mark.parametrize("mark", ["<tool_call>", "<parameter=n>", "<tool_call><function=add>", '{"name', " "])
def test_reading_calls_takes_linear_time(name, mark):
    """Quadratic time was 7 s, in which the trainer waits."""
    for text in (mark * 10_000, f"<tool_call><function=add>{mark * 10_000}</function></tool_call>"):
        begin = time.process_time()
        with contextlib.suppress(MalformedCall):
            read_calls(name, text, SCHEMAS)
        assert time.process_time() - begin < 1


def test_calls_whose_marks_are_special_tokens_are_read(make_config):
    speaks = tokenizer(template(CHATML, HERMES))
    speaks.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    environment = Environment(make_config(tools=(multiply,)), speaks)
    call = '<tool_call>{"name": "multiply", "arguments": {"left": 2, "right": 3}}</tool_call>'
    ids = speaks(call + "<end>", add_special_tokens=False)["input_ids"]
    assert read_calls("hermes", environment.called(ids), environment.schemas)[0].arguments["left"] == 2
    assert "<end>" not in environment.said(ids)


@pytest.mark.parametrize("text", ["[1]", "7", '{"name": 3}', '{"name": "add", "arguments": [1]}', "{" * 5000])
def test_json_that_is_not_a_call_is_malformed(text):
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


def test_an_observation_in_a_role_that_the_template_loses_is_refused(make_config):
    """Beside the role that was checked before the run."""
    speaks = tokenizer(template(CHATML, roles=("user", "assistant")))
    environment = Environment(make_config(environment=Parity, rewards=()), speaks)
    lost = [{"role": "system", "content": "A hint."}]
    with pytest.raises(ValueError, match="loses messages of role 'system'"):
        environment.observation_tokens.ids(lost, [1], True)
    prompt = Prompt("<|im_start|>user\nQ<end>\n", turns=[{"role": "user", "text": "Q"}])
    with pytest.raises(ValueError, match="loses what reset returned in the role 'system'"):
        environment.open_prompt(prompt, lost)


DATED = "{{ '<|im_start|>system\nToday is a day. ' + (messages[0].content if messages[0].role == 'system' else '') }}<end>\n"
USERS = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    + CHATML.replace("CALLS", HERMES)
    + "{% endif %}{% endfor %}"
)


def test_a_prompt_is_written_again_from_its_messages_not_from_how_they_are_shown(make_config):
    """A template that adds words of its own, as Llama 3's adds the date, adds them once."""
    speaks = tokenizer((DATED + USERS).replace("<end>", "<|im_end|>"))
    environment = Environment(make_config(environment=Parity, rewards=()), speaks)
    call = {"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}
    given = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "user", "content": "Again."},
    ]
    prompt = ChatTemplate(speaks).prompt(given)
    opened = environment.open_prompt(prompt, [{"role": "user", "content": " Please."}])
    assert opened == prompt.replace("Again.", "Again. Please.")
    assert opened.count("Today") == opened.count("<tool_call>") == 1


def test_a_template_that_loses_observations_is_refused_where_it_is_used(make_config):
    environment = Environment(
        make_config(environment=Parity, rewards=()), tokenizer(template(CHATML, roles=("assistant", "tool")))
    )
    environment.check(["Say."])
    chat = Prompt("Say.", turns=[{"role": "user", "text": "Say."}])
    for refuse in (environment.check, lambda prompts: EpisodeRunner(environment, prompts, [1, 2], None, [])):
        with pytest.raises(ValueError, match=r"loses messages of role 'user'.*or prompts as plain text$"):
            refuse(["Say.", chat])
    lost = tokenizer(template(CHATML, HERMES, roles=("user", "assistant")))
    with pytest.raises(ValueError, match=r"loses messages of role 'tool'.*whose template shows them$"):
        Environment(make_config(tools=(multiply,)), lost)


def test_a_plain_prompt_is_left_as_it_is(make_config):
    environment = Environment(make_config(environment=Parity, rewards=()), tokenizer(template(CHATML)))
    assert environment.open_prompt("Say.", []) == "Say."
    assert not environment.is_chat("Say.")
    assert environment.is_chat(Prompt("Say.", turns=[{"role": "user", "text": "Say."}]))
