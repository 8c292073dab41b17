"""Reading data: sources, forms, conversations, bad rows. Small files of the tests' own."""

import csv
import gzip
import json
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from proxima.core.types import Prompt
from proxima.data import (
    BrokenData,
    Demonstration,
    Preference,
    Rating,
    open_rows,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_ratings,
)
from proxima.ppo_trainer import PPOTrainer
from proxima.world.tiny_models import byte_tokenizer

ROOT = Path(__file__).parents[2]
ROWS = [
    {"prompt": f"question {i}\nsecond line, “quoted” \u2028 😀", "completion": f" answer {i}", "extra": i}
    for i in range(7)
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where `datasets` puts what it makes of a Parquet file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path, rows=ROWS):
    """The rows as a file or folder of the kind that its name says."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows)
    elif plain.suffix == ".json":
        content = json.dumps(rows, indent=1)
    elif plain.suffix in (".csv", ".tsv"):
        with open(plain, "w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if plain.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
        content = plain.read_bytes().decode()
    else:
        import datasets

        table = datasets.Dataset.from_list(rows)
        if plain.suffix == ".parquet":
            table.to_parquet(str(plain))
        elif plain.suffix == ".splits":
            datasets.DatasetDict({"train": table, "other": table.select([0])}).save_to_disk(str(plain))
        else:
            table.save_to_disk(str(plain))
        return path
    path.write_bytes(gzip.compress(content.encode()) if path != plain else content.encode())
    return path


KINDS = [
    "a.jsonl",
    "a.json",
    "a.csv",
    "a.tsv",
    "a.jsonl.gz",
    "a.json.gz",
    "a.csv.gz",
    "a.parquet",
    "saved",
    "a.splits",
]


@pytest.mark.parametrize("name", KINDS)
def test_every_source_gives_the_same_records(tmp_path, name):
    path = write(tmp_path / name)
    found = read_demonstrations(str(path))
    assert list(found) == [Demonstration(row["prompt"], row["completion"]) for row in ROWS]
    assert isinstance(found, Sequence)
    assert found[-1] == list(found)[6] == found[4:][2]
    assert list(found[::-2]) == list(found)[::-2]
    with pytest.raises(IndexError):
        found[7]
    prompts = read_prompts(path, limit=3)
    assert [str(prompt) for prompt in prompts] == [row["prompt"] for row in ROWS[:3]]
    assert isinstance(prompts[1], Prompt)
    assert prompts[1].columns == {"completion": " answer 1", "extra": "1" if "sv" in name else 1}


def test_text_is_one_prompt_per_line_and_only_a_line_break_ends_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufefffirst\\nbroken\r\n \na\u2028b\x85c\x0cd\n日本 😀".encode())
    assert list(read_prompts(path)) == ["first\nbroken", "a\u2028b\x85c\x0cd", "日本 😀"]


def test_a_folder_holds_files_of_one_kind_and_split(tmp_path):
    write(tmp_path / "train-1.jsonl", ROWS[:3])
    write(tmp_path / "train-2.jsonl.gz", ROWS[3:])
    assert [row.columns["extra"] for row in read_prompts(tmp_path)] == list(range(7))
    assert len(read_prompts(tmp_path, limit=4)) == 4
    assert open_rows(tmp_path).where(3) == f"{tmp_path / 'train-2.jsonl.gz'}, line 1"
    write(tmp_path / "test.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"several splits \(train, test\); say which, for example .*:train"):
        read_prompts(tmp_path)
    assert len(read_prompts(f"{tmp_path}:train")) == 7
    (tmp_path / "SOURCE.txt").write_text("about")
    with pytest.raises(ValueError, match=r"several kinds \(\.jsonl, \.txt\)"):
        read_prompts(tmp_path)
    with pytest.raises(ValueError, match="no file that begins with dev"):
        read_prompts(f"{tmp_path}:dev")


def test_a_split_that_was_saved_can_be_named(tmp_path):
    path = write(tmp_path / "a.splits")
    assert (len(read_prompts(path)), len(read_prompts(f"{path}:other"))) == (7, 1)
    with pytest.raises(ValueError, match=r"has no split 'third'; it has .*:train, .*:other"):
        read_prompts(f"{path}:third")


def test_a_hub_id_offline_is_one_clear_sentence():
    with pytest.raises(
        ValueError, match=r"cannot load 'trl-lib/tldr' .*Offline, give a local file"
    ) as caught:
        read_prompts("trl-lib/tldr:validation")
    assert "\n" not in str(caught.value)
    for name in ("nothing.jsonl", "folder/nothing.csv", "one_word", "a/b/c/d"):
        with pytest.raises(ValueError, match="no such file or folder"):
            read_prompts(name)


def test_with_a_limit_a_hub_dataset_is_streamed(monkeypatch):
    import datasets

    drawn, asked = [], []

    def rows():
        for row in ROWS:
            drawn.append(row)
            yield row

    def load(*names, streaming):
        asked.append((*names, streaming))
        return datasets.IterableDatasetDict({"test": datasets.IterableDataset.from_generator(rows)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read_prompts("owner/name/config", limit=2)) == 2
    assert asked == [("owner/name", "config", True)]
    assert len(drawn) <= 3


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
def test_a_large_file_is_never_in_memory(tmp_path, suffix):
    path = tmp_path / f"large{suffix}"
    with open(path, "w", newline="") as file:
        text = "words and more words " * 400
        if suffix == ".csv":
            file.write("prompt,completion\n")
        for i in range(4000):
            line = {".jsonl": json.dumps({"prompt": f"{i} {text}"}), ".csv": f'"{i}\n{text}",b'}.get(
                suffix, f"{i} {text}"
            )
            file.write(line + "\n")
    tracemalloc.start()
    prompts = read_prompts(path)
    total = sum(len(prompt) for prompt in prompts) + len(prompts[3999])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(prompts) == 4000
    assert path.stat().st_size > 30e6 < total
    assert peak < 2e6


def test_a_large_parquet_file_is_mapped_not_read(tmp_path):
    import pyarrow

    path = write(tmp_path / "large.parquet", [{"prompt": f"{i} " + "words " * 2000} for i in range(2000)])
    before = pyarrow.total_allocated_bytes()
    prompts = read_prompts(path)
    assert prompts[1999].startswith("1999 words")
    assert pyarrow.total_allocated_bytes() - before < 1e6


def test_text_formats_need_no_optional_package(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv.gz"):
        write(tmp_path / name)
    code = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'pandas'):\n"
        "    sys.modules[name] = None\n"
        "from proxima.data import read_prompts\n"
        f"assert {{len(read_prompts({str(tmp_path)!r} + '/' + name)) for name in ('a.jsonl', 'a.json', "
        "'a.csv.gz')} == {7}\n"
        "try:\n"
        f"    read_prompts({str(write(tmp_path / 'a.parquet'))!r})\n"
        "except ValueError as error:\n"
        "    assert 'pip install datasets' in str(error)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    )


# --- files that are broken ---


def test_parquet_without_rows_and_a_name_without_letters_say_so(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"prompt": ["a"]}).select([]).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(BrokenData, match=r"none\.parquet holds no rows"):
        open_rows(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="the name of the data is empty"):
        open_rows(" ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.xml", "a", "must end in .jsonl, .json, .csv"),
        ("p.txt", " \n", "holds no rows"),
        ("p.jsonl", "", "holds no rows"),
        ("p.csv", "prompt\n", "holds no rows"),
        ("p.json", "[]", "holds no rows"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', r"p.jsonl, line 2: `prompt` is missing"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt":', r"p.jsonl, line 3: not JSON"),
        ("p.jsonl", "[1]", "line 1: a JSON list, not an object"),
        ("p.jsonl", '{"prompt": 3}', "line 1: `prompt` is a int, not a text or a list of messages"),
        ("p.jsonl", '{"prompt": [3]}', "line 1: `prompt` must be a list of {role, content}"),
        (
            "p.jsonl",
            '{"text": "b"}',
            "holds no prompts: its columns are text; forms that are recognised: preferences",
        ),
        ("p.jsonl", '{"query": "a", "question": "b"}', "both `query` and `question` could be the prompt"),
        ("p.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("p.json", '[{"prompt": "a"},\n\n{]', "p.json, line 3: not JSON"),
        ("p.json", '[{"prompt": "a"}, 7]', "p.json, row 2: a JSON int"),
        ("p.json", '{"prompt": "a"}\n{"prompt": 1}', "p.json, line 2: `prompt` is a int"),
        ("p.csv", 'prompt,b\n"x\ny",2\n3\n', "line 4: 1 values for 2 columns"),
        ("p.csv", 'prompt,b\n1,2\n"x\ny,2\n', "line 3: not CSV"),
        ("p.csv", "prompt,prompt\n1,2\n", "a column is named twice"),
        ("p.csv", "prompt;b\n1;2\n", "line 1: only one column, 'prompt;b': CSV has no ';' between values"),
        ("p.tsv", "prompt,b\n1,2\n", "line 1: only one column, 'prompt,b': TSV has no ',' between values"),
        (
            "p.csv",
            "prompt\nhello, you\n",
            "line 2: 2 values for 1 columns; a value that holds ',' needs quotes",
        ),
        ("p.jsonl", '{"prompt": "a", "n": ' + "9" * 5000 + "}", "p.jsonl, line 1: not JSON"),
        ("p.json", '[{"prompt": "a", "n": ' + "9" * 5000 + "}]", "p.json cannot be read"),
        ("p.txt", b"fine\n\xff\xfe", "line 2: not UTF-8"),
        ("p.csv", b"prompt\nfine\n\xff\xfe\n", "line 3: not UTF-8"),
        ("p.jsonl.gz", b"not gzip", "cannot be read"),
        ("p.json.gz", b"not gzip", "cannot be read"),
        ("p.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-20], "cannot be read"),
        ("p.parquet", b"PAR1 not parquet", "cannot read"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BAD = [
    (read_demonstrations, {"prompt": "a"}, "line 1: `completion` is missing|holds no demonstrations"),
    (read_demonstrations, {"prompt": "a", "completion": 3}, "line 1: `completion` is a int"),
    (
        read_demonstrations,
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
        "must both be texts",
    ),
    (read_demonstrations, {"prompt": "a", "chosen": "b", "rejected": "c"}, "holds no demonstrations"),
    (
        read_preferences,
        {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
        "must both be texts",
    ),
    (
        read_preferences,
        {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_ended": "maybe"},
        "neither true nor false",
    ),
    (
        read_ratings,
        {"prompt": "a", "completion": "b", "rating": "good"},
        r"`rating` \('good'\) is not a number",
    ),
    (read_ratings, {"prompt": "a", "completion": "b", "rating": True}, "is not a number"),
    (read_prompts, {"messages": "hello"}, "`messages` is a str"),
    (read_prompts, {"messages": [{"role": "user", "content": ["parts"]}]}, "content is not a text"),
    (
        read_prompts,
        {"messages": [{"role": "user", "content": "a"}]},
        "line 1: conversations become text by a model's chat template",
    ),
]


@pytest.mark.parametrize(("read", "row", "message"), BAD)
def test_a_row_that_cannot_be_read_is_refused_with_its_line(tmp_path, read, row, message):
    with pytest.raises(BrokenData, match=message):
        read(lines(tmp_path / "a.jsonl", row))


LEFT_OUT = [
    (read_prompts, {"prompt": "a"}, {"prompt": " \n"}, "an empty prompt"),
    (read_prompts, {"prompt": "a"}, {"prompt": None}, "an empty prompt"),
    (read_prompts, {"prompt": "a"}, {"prompt": "\ud83d"}, "half of a surrogate pair"),
    (
        read_demonstrations,
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": " "},
        "an empty completion",
    ),
    (
        read_preferences,
        {"prompt": "a", "chosen": "", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        "equal sides",
    ),
    (
        read_ratings,
        {"prompt": "a", "completion": "", "rating": 1},
        {"prompt": "a", "completion": "b", "rating": None},
        "no rating",
    ),
    (
        read_ratings,
        {"prompt": "a", "completion": "b", "rating": 1},
        {"prompt": "a", "completion": "b", "rating": float("nan")},
        "finite",
    ),
    (
        read_ratings,
        {"prompt": "a", "completion": "b", "rating": 1},
        {"prompt": "a", "completion": "b", "rating": 10**400},
        "finite",
    ),
]


@pytest.mark.parametrize(("read", "good", "bad", "reason"), LEFT_OUT)
def test_bad_rows_are_left_out_counted_and_said_once(tmp_path, read, good, bad, reason):
    path = lines(tmp_path / "a.jsonl", good, bad, good, bad, good)
    with pytest.warns(
        UserWarning, match=rf"a.jsonl: 2 of 5 rows are left out: 2 with .*{reason}.* \(first: line 2\)"
    ) as said:
        found = read(path)
    assert len(said) == 1
    assert len(found) == len(list(found)) == 3
    assert found[1] == found[2]
    with pytest.raises(
        BrokenData, match=rf"no \w+ can be used: .*1 of 1 rows are left out: 1 with .*{reason}"
    ):
        read(lines(path, bad) if read is not read_ratings else lines(path, {**bad, "prompt": "a"}))


def test_the_same_text_ended_and_cut_off_is_not_an_equal_pair(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected,rejected_ended\na,b,b,False\na,b,c,\n")
    assert list(read_preferences(path)) == [Preference("a", "b", "b", True, False), Preference("a", "b", "c")]


# --- forms ---


def test_aliases_and_ratings(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"question": "q", "answer": "a", "rating": "3.5", "text": "t"})
    assert list(read_ratings(path)) == [Rating("q", "a", 3.5)]
    assert list(read_demonstrations(path)) == [Demonstration("q", "a")]
    assert read_prompts(path)[0].columns == {"answer": "a", "rating": "3.5", "text": "t"}
    path = lines(
        path, {"prompt": "p", "question": "q", "completion": "c", "answer": "42"}
    )  # the first name wins
    assert list(read_demonstrations(path)) == [Demonstration("p", "c")]


def test_alpaca(tmp_path):
    rows = [
        {"instruction": "Do {it}.", "input": "this", "output": "done", "chosen": "c", "rejected": "r"},
        {"instruction": "Do it.", "input": "", "output": "done", "chosen": "c", "rejected": "r"},
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    found = list(read_preferences(path))
    assert found[0].prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response "
        "that appropriately completes the request.\n\n### Instruction:\nDo {it}.\n\n### Input:\nthis\n\n### "
        "Response:\n"
    )
    assert found[1].prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n"
        "### Instruction:\nDo it.\n\n### Response:\n"
    )
    assert [(item.chosen, item.rejected) for item in found] == [("c", "r")] * 2
    assert [item.completion for item in read_demonstrations(path)] == ["done"] * 2
    assert list(read_prompts(path)) == [item.prompt for item in found]
    assert read_prompts(path)[0].columns == {"output": "done", "chosen": "c", "rejected": "r"}


H, A = "\n\nHuman:", "\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (f"{H} hi{A} yes", f"{H} hi{A} no", Preference(f"{H} hi{A}", " yes", " no")),
        (
            f"{H} hi{A} a{H} b{A} yes",
            f"{H} hi{A} a{H} b{A} no",
            Preference(f"{H} hi{A} a{H} b{A}", " yes", " no"),
        ),
        (f"{H} hi{A} yes", f"{H} hi{A} yes, sir", Preference(f"{H} hi{A}", " yes", " yes, sir")),
        (f"{H} hi{A}", f"{H} hi{A} no", Preference(f"{H} hi{A}", "", " no")),
        (f"{H} hi{A} yes", f"{H} hi{A} yes", "equal sides"),
        (
            f"{H} hi{A} a{H} b{A} yes",
            f"{H} hi{A} c{H} b{A} yes",
            "part before the last answer",
        ),  # part earlier
        (f"{H} hi{A} a{H} b", f"{H} hi{A} a{H} c", "part before the last answer"),  # end on the human
        (f"{H} hi{A} a{H} b", f"{H} hi{A} a", "part before the last answer"),
        (f"{H} hi{A} yes", f"{H} ho{A} no", "without a common prompt"),
        ("yes", "no", "without a common prompt"),
    ],
)
def test_transcripts_are_cut_at_the_last_common_answer(tmp_path, chosen, rejected, expected):
    path = lines(tmp_path / "a.jsonl", {"chosen": chosen, "rejected": rejected})
    if isinstance(expected, Preference):
        assert list(read_preferences(path)) == [expected]
        assert list(read_prompts(path)) == [expected.prompt]
    else:
        with pytest.raises(BrokenData, match=expected):
            read_preferences(path)


# --- conversations ---

CHATML = (
    "{{ bos_token or '' }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM, USER, MORE = (
    {"role": role, "content": text}
    for role, text in (("system", "be kind"), ("user", "hi"), ("user", "and?"))
)
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
EOS = "<|endoftext|>"


@pytest.fixture
def chat():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def rendering(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_conversation_as_demonstration_and_as_prompt(tmp_path, chat):
    talk = [SYSTEM, USER, NO, MORE, YES]
    path = lines(tmp_path / "a.jsonl", {"messages": talk, "id": 7}, {"messages": [*talk, USER], "id": 8})
    prompt = (
        f"<|system|>be kind{EOS}\n<|user|>hi{EOS}\n<|assistant|>no{EOS}\n<|user|>and?{EOS}\n<|assistant|>"
    )
    assert list(read_demonstrations(path, chat)) == [Demonstration(prompt, "yes")] * 2
    assert prompt + "yes" + EOS + "\n" == rendering(chat, talk)
    prompts = read_prompts(path, chat)
    assert list(prompts) == [prompt, f"{prompt}yes{EOS}\n<|user|>hi{EOS}\n<|assistant|>"]
    assert prompts[0].columns["id"] == 7


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [SYSTEM, USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]},
        {"prompt": "hi", "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]},
        {"chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]},
    ],
)
@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet"])
def test_preferences_between_conversations(tmp_path, chat, row, kind):
    path = write(tmp_path / kind, [row])
    prompt = f"<|system|>be kind{EOS}\n<|user|>hi{EOS}\n<|assistant|>"
    assert list(read_preferences(path, chat)) == [Preference(prompt, "yes", "no")]
    assert list(read_prompts(path, chat)) == [prompt]


def test_a_prompt_and_completion_of_messages(tmp_path, chat):
    path = lines(tmp_path / "a.jsonl", {"prompt": [USER], "completion": [YES], "answer": "42"})
    assert list(read_demonstrations(path, chat)) == [Demonstration(f"<|user|>hi{EOS}\n<|assistant|>", "yes")]
    assert read_prompts(path, chat)[0].columns == {"completion": [YES], "answer": "42"}


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (
            read_preferences,
            {"chosen": [USER, YES, MORE, NO], "rejected": [USER, NO, MORE, NO]},
            "part before the last answer",
        ),
        (read_preferences, {"chosen": [USER, YES], "rejected": [USER, YES]}, "equal sides"),
        (read_preferences, {"chosen": [USER, YES], "rejected": [MORE, NO]}, "without a common prompt"),
        (read_preferences, {"prompt": "hi", "chosen": [YES], "rejected": [NO]}, "without a common prompt"),
        (read_demonstrations, {"messages": [USER]}, "without an assistant"),
        (read_demonstrations, {"messages": [YES]}, "an empty prompt"),
        (read_demonstrations, {"messages": []}, "without an assistant"),
        (
            read_demonstrations,
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "an empty completion",
        ),
        (read_prompts, {"messages": [SYSTEM, YES]}, "an empty prompt"),
        (read_prompts, {"prompt": [USER, YES]}, "ends on the assistant"),
    ],
)
def test_conversations_without_a_clear_answer_are_left_out(tmp_path, chat, read, row, message):
    with pytest.raises(BrokenData, match=message):
        read(lines(tmp_path / "a.jsonl", row), chat)


def test_a_bos_is_never_doubled_and_one_that_only_the_template_adds_is_kept(tmp_path, chat):
    path = lines(tmp_path / "a.jsonl", {"messages": [USER, YES]})
    chat.add_special_tokens({"bos_token": "<s>"})
    assert read_demonstrations(path, chat)[0].prompt.startswith("<s><|user|>")
    chat.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", chat.bos_token_id)]
    )
    found = read_demonstrations(path, chat)[0]
    assert found.prompt.startswith("<|user|>")
    ids = chat(found.prompt)["input_ids"] + chat(found.completion, add_special_tokens=False)["input_ids"]
    whole = chat(rendering(chat, [USER, YES]), add_special_tokens=False)["input_ids"]
    assert ids == whole[: len(ids)]
    assert ids.count(chat.bos_token_id) == 1


def test_an_end_of_turn_that_is_not_the_eos_stays(tmp_path, chat):
    chat.chat_template = CHATML.replace("{{ eos_token }}", "<|end|>")
    found = read_demonstrations(lines(tmp_path / "a.jsonl", {"messages": [USER, YES]}), chat)[0]
    assert found.prompt + found.completion == rendering(chat, [USER, YES])


def test_templates_that_do_not_fit_say_so(tmp_path, chat):
    path = lines(tmp_path / "a.jsonl", {"messages": [USER, YES]}, {"messages": [SYSTEM, USER, YES]})
    chat.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    )
    with pytest.warns(
        UserWarning, match=r"1 of 2 .* refused by the chat template \(no system here\) \(first: line 2\)"
    ):
        assert len(read_demonstrations(path, chat)) == 1
    chat.chat_template = CHATML.replace("<|assistant|>", "<|assistant|><think>")
    with pytest.raises(BrokenData, match="line 1: the chat template writes a prompt differently"):
        read_demonstrations(path, chat)
    assert len(read_prompts(path, chat)) == 2
    with pytest.raises(BrokenData, match="has no chat template"):
        read_prompts(path, byte_tokenizer())


# --- PPO on lazy prompts ---


class OnDisk(Sequence):
    """Prompts that may be asked for, some at a time, but never all at once."""

    def __init__(self, prompts):
        self.prompts, self.asked = prompts, []

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, index):
        self.asked.append(len(self.prompts[index]) if isinstance(index, slice) else 1)
        return self.prompts[index]

    def __iter__(self):
        raise AssertionError("all prompts were read at once")


def test_ppo_trains_on_prompts_that_stay_on_disk(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.ppo_trainer.batch_plan.CHECKED_AT_ONCE", 3)
    path = lines(tmp_path / "a.jsonl", *({"prompt": f"prompt {i}", "answer": i} for i in range(7)))
    runs = []
    for prompts in (
        [f"prompt {i}" for i in range(7)],
        read_prompts(path),
        OnDisk([f"prompt {i}" for i in range(7)]),
    ):
        trainer = PPOTrainer(make_config(batch_size=3, ppo_epochs=1, max_new_tokens=3, token_samples=2))
        results = trainer.train(prompts, num_epochs=2)
        shown = [
            {name: value for name, value in row.items() if "seconds" not in name} for row in results.metrics
        ]
        runs.append(shown)
    assert str(runs[0]) == str(runs[1]) == str(runs[2])
    assert len(runs[0]) == 6
    assert max(prompts.asked) == 3
    with pytest.raises(ValueError, match="prompt 5 is empty"):
        trainer.train(["fine"] * 5 + [" "])
    with pytest.raises(ValueError, match="prompt 4 has 300 tokens"):
        trainer.train(["fine"] * 4 + ["x" * 300])


def test_rewards_see_the_columns_of_their_prompts(make_config, tmp_path):
    seen = []

    def reward(prompts, texts):
        seen.extend(prompt.columns["answer"] for prompt in prompts)
        return [float(len(text)) for text in texts]

    path = lines(tmp_path / "a.jsonl", *({"prompt": f"prompt {i}", "answer": i} for i in range(3)))
    PPOTrainer(make_config(rewards=(reward,), max_new_tokens=2, ppo_epochs=1)).train(read_prompts(path))
    assert sorted(set(seen)) == [0, 1, 2]


def test_nothing_is_said_where_nothing_is_left_out(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_prompts(write(tmp_path / "a.jsonl"))
