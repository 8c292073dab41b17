"""Tool calls in the text of a turn, in the three formats that most chat templates write.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    llama3    {"name": "add", "parameters": {"a": 1}}
    qwen_xml  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>

Which one a template writes is found by rendering a call. Without a template it is hermes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from proxima.core.json_record import Record
from proxima.core.strict_json import read_strict_json
from proxima.core.tokenizer import Tokenizer

Schema = Record
"""A tool as `transformers.utils.get_json_schema` describes it."""

PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Probe."}},
            "required": ["probe_key"],
        },
    },
}
QUESTION = "proxima-question-71c3"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
CALL_MARKS = CALL_BEGIN + CALL_END
THOUGHT_END = "</think>"  # what a model thinks of a call is none
QUOTES = ("`", '"', "'", "“", "‘", "«")
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
FUNCTION = re.compile(r"<function=([^>\s]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
PYTHON = {"True": True, "False": False, "None": None}  # as some templates write them


class Call(NamedTuple):
    name: str
    arguments: Record


class MalformedCall(ValueError):  # noqa: N818
    """A turn that means to call a tool, and in which no call can be read."""


def read_hermes(text: str, schemas: Mapping[str, Schema]) -> list[Call]:
    return [_from_json(block, "arguments") for block in _blocks(text)]


def read_llama3(text: str, schemas: Mapping[str, Schema]) -> list[Call]:
    bare = text.strip().removeprefix("<|python_tag|>").strip()
    if bare.startswith("{") and '"name"' in bare:
        return [_from_json(bare, "parameters")]
    if '"parameters"' in bare and any(f'"{name}"' in bare for name in schemas):
        raise MalformedCall("a call must be the whole turn, without text or a code block around it")
    return []


def read_qwen_xml(text: str, schemas: Mapping[str, Schema]) -> list[Call]:
    return [_from_xml(block, schemas) for block in _blocks(text)]


FORMATS: dict[str, Callable[[str, Mapping[str, Schema]], list[Call]]] = {
    "hermes": read_hermes,
    "llama3": read_llama3,
    "qwen_xml": read_qwen_xml,
}


def read_calls(name: str, text: str, schemas: Mapping[str, Schema]) -> list[Call]:
    """The calls in a turn, in order; none where it is an answer.

    Args:
        name: of the format.
        schemas: of the tools, by name.
    """
    calls = FORMATS[name](text.rpartition(THOUGHT_END)[2], schemas)
    for call in calls:
        if call.name not in schemas:
            raise MalformedCall(f"there is no tool {call.name[:60]!r}; the tools are {', '.join(schemas)}")
        _check_arguments(call, schemas[call.name])
    return calls


def _check_arguments(call: Call, schema: Schema) -> None:
    """Against the schema that the policy was shown."""
    parameters = schema["function"].get("parameters", {})
    known = parameters.get("properties", {})
    if strange := [name for name in call.arguments if name not in known]:
        takes = ", ".join(known) or "none"
        raise MalformedCall(f"{call.name} has no argument {strange[0][:60]!r}; it takes {takes}")
    if missing := [name for name in parameters.get("required", ()) if name not in call.arguments]:
        raise MalformedCall(f"{call.name} needs the argument {missing[0]!r}")
    for name, value in call.arguments.items():
        kinds = _kinds_of(known[name])
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            raise MalformedCall(f"the argument {name!r} of {call.name} must be of type {' or '.join(kinds)}")
        if (among := known[name].get("enum")) and value not in among:
            raise MalformedCall(f"the argument {name!r} of {call.name} must be one of {str(among)[:200]}")


def _kinds_of(described: Schema) -> list[str]:
    """The JSON types of an argument; none where it may be anything."""
    kinds = described.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    known = bool(kinds) and all(kind in TYPES for kind in kinds)
    return kinds + ["null"] * bool(described.get("nullable")) if known else []


def _is_of(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (isinstance(value, bool) <= (kind == "boolean"))


def find_format(tokenizer: Tokenizer) -> str:
    """The format that the tokenizer's chat template writes; a ValueError where it is none of these."""
    if not tokenizer.chat_template:
        return "hermes"
    made = {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": made}]},
    ]
    whose = f"the chat template of {tokenizer.name_or_path!r}"
    try:
        text = tokenizer.apply_chat_template(messages, tools=[PROBE], tokenize=False)
    except Exception as error:  # the template is a program that came with the model
        raise ValueError(f"{whose} refuses tool calls ({' '.join(str(error).split())[:100]})") from None
    written = text.rpartition(QUESTION)[2]
    if "probe_value" not in written:
        raise ValueError(f"{whose} drops tool calls; use a model whose template writes them")
    schemas, begins = {"probe_tool": PROBE}, written.find("{")
    marked = "".join(written.rpartition(CALL_END)[:2])  # without the end of the turn
    for name, part in (
        ("qwen_xml", marked or written),
        ("hermes", marked or written),
        ("llama3", _json_part(written[begins:]) if begins >= 0 else ""),
    ):
        try:
            if read_calls(name, part, schemas) == [Call("probe_tool", {"probe_key": "probe_value"})]:
                return name
        except MalformedCall:
            continue
    raise ValueError(
        f"{whose} writes tool calls in a form that is not read here (read are {', '.join(FORMATS)}); it "
        f"begins {' '.join(written.split())[:80]!r}"
    )


def _json_part(text: str) -> str:
    """The JSON value at the beginning of a text; empty if there is none."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except ValueError:
        return ""


def _blocks(text: str) -> list[str]:
    """In linear time, whatever the policy wrote."""
    before, *begun = text.split(CALL_BEGIN)
    pieces = [piece.partition(CALL_END) for piece in begun]
    if not all(end for _, end, _ in pieces):
        raise MalformedCall(f"{CALL_BEGIN} has no {CALL_END}")
    if pieces and (before.count("```") % 2 or before.rstrip(" ").endswith(QUOTES)):
        raise MalformedCall("a call must not stand in a code block or in quotes")
    if any(after.strip() for _, _, after in pieces):
        raise MalformedCall(f"there must be no text after {CALL_END}")
    return [inside for inside, _, _ in pieces]


def _from_json(text: str, key: str) -> Call:
    try:
        value = read_strict_json(text)
    except (ValueError, RecursionError):
        raise MalformedCall("the call is not one JSON object that names each key once") from None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedCall("the call has no name")
    if others := value.keys() - {"name", "type", "id", key}:
        place = "beside" if key in value else "in place of"
        raise MalformedCall(f"the call has {min(others)[:60]!r} {place} {key!r}")
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        raise MalformedCall(f"{key!r} of the call is not an object")
    return Call(value["name"], arguments)


def _from_xml(text: str, schemas: Mapping[str, Schema]) -> Call:
    text = text.strip()
    begun = FUNCTION.match(text)
    if begun is None or not text.endswith("</function>"):
        raise MalformedCall("the call is not <function=NAME>...</function>")
    known = schemas.get(begun[1], PROBE)["function"]["parameters"].get("properties", {})
    inside, place = text[begun.end() :].removesuffix("</function>"), 0
    arguments: Record = {}
    while found := PARAMETER.match(inside, place):
        value = found[2].removeprefix("\n").removesuffix("\n")
        if found[1] in arguments:
            raise MalformedCall(f"the call has the argument {found[1][:60]!r} twice")
        arguments[found[1]], place = _typed(value, known.get(found[1], {}).get("type")), found.end()
    if inside[place:].strip():
        raise MalformedCall("an argument of the call is not <parameter=NAME>...</parameter>")
    return Call(begun[1], arguments)


def _typed(text: str, kind: object) -> object:
    """A value that is not meant as text is read as JSON where it is, or as Python's words for such values."""
    if kind == "string":
        return text
    if text in PYTHON:
        return PYTHON[text]
    try:
        return read_strict_json(text)
    except (ValueError, RecursionError):
        return text
