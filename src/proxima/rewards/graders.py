"""Graders of the verifiable rewards: one answer and its reference in, a score out.

They run in worker processes, because the libraries behind them can hang on an answer. A worker imports these
before its first call (`WorkerPool`'s `imports`), so that no answer's deadline pays for it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from proxima.core.json_record import Record
from proxima.core.strict_json import read_strict_json

SHORT = 200  # characters of an answer that may be maths as it stands
WORD = re.compile(r"[A-Za-z]{2,}")
TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox|begin|end)\s*\{[^{}]*\}")  # which math-verify compares as text
COMMAND = re.compile(r"\\[A-Za-z]+")
FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "pi",
    "max",
    "min",
    "gcd",
    "lcm",
    "arcsin",
    "arctan",
}
BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BETWEEN = re.compile(r"[\s$,;.]{0,20}(?:and|or|and/or)?[\s$,;]{0,20}")
MOST_BOXES = 20
SAID_ANSWER = re.compile(r"####|\banswers?\b(?:\s+(?:is|are)\b)?", re.IGNORECASE)
FORMULA = re.compile(r"[\d$\\]")
TEXT_MARK = re.compile(r"\\text\w*\s*\{|\\(?:quad|q?quad|,|;|!| )|[{}$]")
OR = re.compile(
    r"(?:[\d)\]]|\b[A-Za-z])\W{0,5}\s(?:and/)?or\s\W{0,5}(?:\w+\s){0,2}\W{0,5}(?:\d|\\|[A-Za-z]\b)|\d\s*\|\s*\d"
)
NUMBER = r"-?\d+(?:\.\d+)?"
LISTED = re.compile(rf"(?<![\d.,]){NUMBER}(?:(?:\s*[;,|]\s+|\s+|,(?!\d{{3}}\b)){NUMBER}){{2,}}[\s.$}})\]]*\Z")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
FENCED = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*?)```\s*\Z", re.DOTALL | re.IGNORECASE)


# Mathematics


def math_reference(reference: object) -> str:
    """The part of a reference that is the answer: GSM8K writes it after ####."""
    return str(reference).rpartition("####")[2].strip()


def complain_math(reference: object) -> str:
    """Why a reference cannot grade; empty where it can."""
    if isinstance(reference, bool) or not isinstance(reference, (str, int, float)):
        return f"a number or text is needed, not a {type(reference).__name__}"
    text = math_reference(reference)
    words = [
        word for word in WORD.findall(COMMAND.sub(" ", TEXT.sub(" ", text))) if word.lower() not in FUNCTIONS
    ]
    if words:
        return (
            f"{words[0]!r} would be read as a product of variables; compare words with a function of your own"
        )
    from math_verify import verify

    if not verify(_gold(text), _parse(f"\\boxed{{{text}}}"), timeout_seconds=None):
        return "math-verify cannot read it as mathematics"
    return ""


def grade_math(completion: str, reference: object) -> float:
    """1 where the final answer equals the reference as mathematics, else 0."""
    from math_verify import verify

    text = math_reference(reference)
    answer = final_answer(completion)
    if offers_several(answer) and not (offers_several(text) or "," in text or "pm" in text):
        return 0.0
    readings = [answer]
    if len(answer) <= SHORT and "$" not in answer and "boxed" not in answer:
        readings.append(f"${answer.strip().rstrip('.')}$")
    gold = _gold(text)
    return float(any(verify(gold, _parse(text), timeout_seconds=None) for text in readings))


def final_answer(completion: str) -> str:
    """The part of an answer that decides: the last \\boxed{}, which must be closed, with those that it is
    listed with; else the rest of the line after the last ####, "answer is" or "answer:"; else the last line
    with a number or a formula."""
    boxes = _boxes(completion)
    if boxes:
        return f"\\boxed{{{', '.join(boxes)}}}" if boxes[-1] else ""
    if BOX.search(completion):
        return ""
    lines = completion.splitlines()
    said = [line[found[-1].start() :] for line in lines if (found := list(SAID_ANSWER.finditer(line)))]
    formulas = [line for line in lines if FORMULA.search(line)]
    for candidates in (said[-1:], formulas[-1:]):
        if candidates and FORMULA.search(candidates[0]):
            return candidates[0]
    return completion


def _boxes(text: str) -> list[str]:
    """What stands in the last \\boxed{}, and before it in those from which only "or", "and" or a comma
    separate it; empty without one, or if the last is not closed."""
    found: list[str] = []
    begin = len(text) + 1
    for opened in reversed(list(BOX.finditer(text))[-MOST_BOXES:]):
        end = _closing(text, opened.end())
        if end is None or (found and not BETWEEN.fullmatch(text[end + 1 : begin])):
            break
        if content := text[opened.end() : end].strip():
            found.insert(0, content)
        begin = opened.start()
    return list(dict.fromkeys(found))


def _closing(text: str, place: int) -> int | None:
    """Where the brace that was opened before this place is closed."""
    depth = 1
    for found in BRACE.finditer(text, place):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    return None


def offers_several(answer: str) -> bool:
    """Whether it leaves open which of several answers it means, or is a list of numbers."""
    bare = TEXT_MARK.sub(" ", answer)
    return bool(OR.search(bare) or LISTED.search(bare))


def _gold(text: str) -> list[object]:
    return _parse(text if "$" in text.replace("\\$", "") or "boxed" in text else f"${text}$")


def _parse(text: str) -> list[object]:
    """math-verify's own time limits are signals, which a native call does not hear: the worker's holds."""
    import logging

    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return list(parse(text, parsing_timeout=None))


# JSON


@cache
def _validator(schema: str) -> Any:
    import jsonschema
    from referencing import Registry

    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    kind.check_schema(parsed)
    return kind(parsed, registry=Registry())  # which fetches nothing


def complain_schema(schema: object) -> str:
    """Why a schema cannot grade; empty where it can."""
    import jsonschema

    try:
        validator = _validator(_as_text(schema))
        _follow_references(validator.schema, validator.META_SCHEMA["$schema"])
        validator.is_valid(None)
    except jsonschema.SchemaError as error:
        return f"it is not a JSON Schema ({error.message})"
    except ValueError as error:
        return f"it is not JSON ({error})"
    except Exception as error:  # a reference that leads nowhere
        return f"it cannot be used ({error})"
    return ""


def _follow_references(schema: object, dialect: str) -> None:
    """Raises where one leads nowhere: validation would, on the first answer that comes there."""
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import specification_with

    root = specification_with(dialect).create_resource(schema)
    parts = [(root, REGISTRY.resolver_with_root(root))]
    for part, resolver in parts:
        contents = part.contents if isinstance(part.contents, dict) else {}
        for reference in (contents.get("$ref"), contents.get("$dynamicRef")):
            if isinstance(reference, str):
                resolver.lookup(reference)
        parts += [(each, resolver.in_subresource(each)) for each in part.subresources()]


def grade_schema(completion: str, schema: object) -> float:
    """1 where the answer, all of it or one fenced block, is JSON that the schema allows, else 0; also where
    it is nested too deeply, or holds a number too large, to be compared: a policy must not escape its
    score."""
    validator, fenced = _validator(_as_text(schema)), FENCED.match(completion)
    try:
        return float(validator.is_valid(read_strict_json(fenced[1] if fenced else completion)))
    except (ValueError, RecursionError, OverflowError):
        return 0.0


def _as_text(schema: object) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


# Choices

LETTER = r"\(?\s*([A-Za-z])\s*\)?"
BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*" + LETTER + r"\s*\}")
SAID = re.compile(
    r"\b(?i:answer|choice|option)\b(?:\s+is)?\s*[:=]?\s*\**\s*(?:\(([A-Za-z])\)|([A-Z]))(?![A-Za-z])"
)  # a small letter without brackets may be the word "a"
SPACE = re.compile(r"\s+")
ALONE = re.compile(r"\A\s*\**" + LETTER + r"\s*[.:,]?\**\s*(?:\Z|(?<=[.):,*])\s|\n)")


def chosen_letter(completion: str) -> str:
    """The letter that an answer chooses: in the last \\boxed{}, after the last "answer is", or alone at its
    start; empty where it chooses none."""
    tagged = ANSWER_TAG.findall(completion)
    text = SPACE.sub(_one_space, tagged[-1] if tagged else completion)
    for pattern in (BOXED, SAID):
        if found := pattern.findall(text):
            return "".join(found[-1]).upper()
    alone = ALONE.match(text)
    return alone[1].upper() if alone else ""


def _one_space(found: re.Match[str]) -> str:
    """Long runs would take the patterns cubic time, in the trainer's own process."""
    return "\n" if "\n" in found[0] else " "


def complain_choice(reference: object) -> str:
    if isinstance(reference, str) and re.fullmatch(r"[A-Za-z]", reference.strip()):
        return ""
    return "one letter is needed"


def grade_choice(completion: str, reference: str) -> float:
    return float(chosen_letter(completion) == reference.strip().upper())


# reasoning-gym


@cache
def _gym(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)


def complain_gym(entry: Record) -> str:
    """Why an entry cannot grade: its own answer must be right."""
    score = grade_gym(str(entry["answer"]), entry)
    return "" if score == 1 else f"its own answer scores {score:g}, not 1"


def grade_gym(completion: str, entry: Record) -> float:
    """The generator's own score, of the text in the last <answer> tag, or of all of it."""
    tagged = ANSWER_TAG.findall(completion)
    answer = (tagged[-1] if tagged else completion).strip()
    return float(_gym(entry["generator"]).score_answer(answer, entry))
