"""`proxima data check`: what it finds, what it shows, how it exits; and that docs/data.md is true."""

import json
import re
import tracemalloc
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from proxima.cli import main
from proxima.data import (
    check,
    open_rows,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_ratings,
    show,
)
from proxima.data.column_forms import FORMS
from proxima.data.data_sources import FILES
from proxima.data.show_data import visible
from proxima.world.tiny_models import byte_tokenizer
from tests.docs.blocks import read_blocks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
DOCS = PAGE.read_text(encoding="utf-8")
PAIRS = [
    {"prompt": "p3 \x1b[31m\u202e\tred", "chosen": "x" * 400, "rejected": ""},
    {"prompt": "p1", "chosen": "good", "rejected": "bad"},
    {"prompt": "p1", "chosen": "bad", "rejected": "good"},  # the opposite
    {"prompt": "p1", "chosen": "good", "rejected": "worse"},
    {"prompt": "p2", "chosen": "a", "rejected": "a"},  # equal
    {"prompt": "", "chosen": "a", "rejected": "b"},  # empty
    {"prompt": "p1", "chosen": "good", "rejected": "worse"},  # again
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(report):
    console = Console(file=StringIO(), width=128, highlight=False)
    show(report, console)
    return console.file.getvalue()


def test_what_is_found_in_preferences(tmp_path):
    report = check(write(tmp_path / "a.jsonl", PAIRS), byte_tokenizer(), context=300, max_length=200)
    assert (report.rows, report.main, report.usable) == (7, "preferences", True)
    assert {kind: found.usable for kind, found in report.kinds.items()} == {"preferences": 5, "prompts": 6}
    assert {reason: item.count for reason, item in report.kinds["preferences"].left_out.items()} == {
        "equal sides": 1,
        "an empty prompt": 1,
    }
    assert (report.duplicates, report.contradictions, report.empty_answers) == (1, 2, 1)
    assert (report.over_context, report.over_max_length) == (1, 1)
    chosen = next(item for item in report.lengths if item.name == "chosen")
    assert (chosen.unit, chosen.minimum, chosen.median, chosen.maximum) == ("tokens", 4, 5, 401)  # EOS counts
    text = shown(report)
    assert "proxima reward" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"p3 \x1b[31m\u202e\tred" in text
    assert "x" * 200 not in text


def test_what_is_found_in_ratings_and_without_a_model(tmp_path):
    rows = [{"prompt": "two words", "completion": "c", "rating": rating} for rating in (1, 2, 2)]
    report = check(write(tmp_path / "a.jsonl", rows))
    assert (report.main, report.duplicates, report.contradictions) == ("ratings", 1, 3)
    assert [(item.name, item.unit, item.maximum) for item in report.lengths][:2] == [
        ("prompt", "characters", 9),
        ("prompt", "words", 2),
    ]
    assert "give --model-name for lengths in tokens" in shown(report)
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]
    report = check(write(tmp_path / "b.jsonl", talk))
    assert (report.main, report.plain) == ("demonstrations", True)
    assert "without a chat template" in shown(report)


TURNS = [
    {"role": "system", "content": "Be brief and kind, and never speak of the weather. " * 8},
    {"role": "user", "content": "First " + "x" * 300},
    {"role": "assistant", "content": "y" * 300},
    {"role": "user", "content": "What is the capital of France?"},
]
ANSWERS = [{"role": "assistant", "content": text} for text in ("Paris.", "Rome.")]
TALK = (
    f"\n\nHuman: {'x' * 300}\n\nAssistant: {'y' * 300}\n\nHuman: What is the capital of France?\n\nAssistant:"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TURNS},
        {"messages": [*TURNS, ANSWERS[0]]},
        {"prompt": TURNS, "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]},
        {"chosen": [*TURNS, ANSWERS[0]], "rejected": [*TURNS, ANSWERS[1]]},
        {"chosen": f"{TALK} Paris.", "rejected": f"{TALK} Rome."},
    ],
    ids=["prompt", "messages", "preferences", "whole", "transcripts"],
)
@pytest.mark.parametrize("more", ["", "z" * 400], ids=["short", "long"])
@pytest.mark.parametrize("template", ["", CHATML], ids=["plain", "chatml"])
def test_the_last_question_of_a_conversation_is_shown(tmp_path, row, more, template):
    """Of messages, as a turn of its own; the ends of a long transcript are not what matters in it."""
    row = json.loads(json.dumps(row).replace("of France?", f"of France?{more}"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    console = Console(file=StringIO(), width=2000)
    show(check(write(tmp_path / "a.jsonl", [row]), tokenizer if template else None), console)
    lines = console.file.getvalue().splitlines()
    prompt = [line for line in lines if line.startswith(("  prompt", "  user"))][-1]
    assert "What is the capital of France?" in prompt
    assert "<|im_start|>" not in "".join(lines)
    assert any(line.startswith("  system") for line in lines) == ("system" in json.dumps(row))
    assert "x" * 200 not in prompt
    assert len(prompt) < 400


def test_a_conversation_that_nobody_asked_is_shown_too(tmp_path):
    rows = [{"messages": [{"role": "system", "content": "s" * 300}, ANSWERS[0]]}]
    assert "Paris." in shown(check(write(tmp_path / "a.jsonl", rows)))


def test_a_kind_that_breaks_on_the_way_does_not_spoil_the_others(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "c" if i < 5 else 7} for i in range(9)]
    report = check(write(tmp_path / "a.jsonl", rows))
    assert (report.main, report.kinds["prompts"].usable, report.usable) == ("prompts", 9, True)
    assert "line 6: `completion` is a int" in report.kinds["demonstrations"].problem
    assert report.lengths[0].minimum == 2
    assert "not as demonstrations" in shown(report)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ('{"prompt": "a"}\n', 0, "as prompts"),
        ('{"text": "a", "id": 1}\n', 1, "columns: text, id"),
        ('{"prompt": ""}\n', 1, "not usable: no row is left"),
        ('{"prompt": "a"}\nnot json\n', 1, "line 2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', 1, "line 2: `prompt` is a int"),
        ("", 1, "holds no rows"),
        (None, 2, "no such file or folder"),
    ],
)
def test_the_command_and_its_exit_code(tmp_path, capsys, content, code, message):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    try:
        main(["data", "check", str(path)])
        found = 0
    except SystemExit as end:
        found = end.code
    out, err = capsys.readouterr()
    assert found == code
    assert message in " ".join((out + err).split())
    assert "\x1b" not in out


def test_the_command_measures_in_tokens_of_a_model_and_has_a_help(tmp_path, tiny, capsys):
    main(
        [
            "data",
            "check",
            str(write(tmp_path / "a.jsonl", [{"prompt": "x" * 300}, {"prompt": "y"}])),
            "--model-name",
            tiny,
        ]
    )
    out = capsys.readouterr().out
    assert re.search(r"prompt, tokens +1 +\d+ +300 +300", out)
    assert "1  longer than the model's context of 256 tokens" in out
    with pytest.raises(SystemExit) as end:
        main(["data", "--help"])
    assert end.value.code == 0
    assert "{check,sample}" in capsys.readouterr().out


def test_a_large_file_is_checked_without_holding_it(tmp_path):
    path = tmp_path / "large.jsonl"
    with open(path, "w") as file:
        for i in range(1500):
            file.write(json.dumps({"prompt": f"{i} " + "word " * 2000, "completion": "x"}) + "\n")
    tracemalloc.start()
    report = check(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.rows == 1500
    assert peak < path.stat().st_size / 3


def test_control_characters_are_visible():
    assert visible("a\nb\x00c\u200bd é\x7f") == "a\\nb\\x00c\\u200bd é\\x7f"


# --- docs/data.md ---


def test_the_documented_forms_are_the_ones_recognised_and_their_examples_are_read(tmp_path):
    [block] = [block.text for block in read_blocks(PAGE) if block.language == "jsonl"]
    read = {
        "prompts": read_prompts,
        "demonstrations": read_demonstrations,
        "preferences": read_preferences,
        "ratings": read_ratings,
    }
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    documented = set()
    for number, line in enumerate(block.splitlines()):
        path = write(tmp_path / f"{number}.jsonl", [json.loads(line)])
        report = check(path)
        assert report.usable, line
        for kind, found in report.kinds.items():
            documented.add(found.form.name)
            assert len(read[kind](path, tokenizer)) == 1
    assert documented >= {form.name for form in FORMS} - {"prompts"}
    rows = dict(re.findall(r"^\| (\w+) \| (`.*?`) \|", DOCS, re.MULTILINE))
    assert {name: tuple(re.findall(r"`(\w+)`", columns)) for name, columns in rows.items()} == {
        form.name: form.columns for form in FORMS
    }
    assert all(f"`{suffix}`" in DOCS for suffix in FILES)


def test_the_documented_check_is_what_the_command_prints(tmp_path, capsys, monkeypatch):
    rows, sample = (block.text for block in read_blocks(PAGE) if block.language in ("csv", "text"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ratings.csv").write_text(rows)
    main(["data", "check", "ratings.csv", "--model-name", "embedded"])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert sample.splitlines() == printed
    assert len(open_rows("ratings.csv")) == 6
