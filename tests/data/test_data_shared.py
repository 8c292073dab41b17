"""Reading real data sets, where they are: a folder named by PROXIMA_SHARED_DATA, or ../shared/data beside
the repository."""

import os
import warnings
from pathlib import Path

import pytest

from proxima.data import read_demonstrations, read_preferences, read_prompts

SHARED = Path(os.environ.get("PROXIMA_SHARED_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
pytestmark = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"no data sets in {SHARED} (PROXIMA_SHARED_DATA names the folder)"
)
QWEN = SHARED / "tokenizer-qwen2.5"


@pytest.mark.parametrize(
    ("name", "read", "usable", "left_out"),
    [
        ("reddit-tldr/train.jsonl", read_demonstrations, 9793, {}),
        ("reddit-tldr/train.jsonl", read_prompts, 9793, {}),
        (
            "hh-rlhf/helpful-base.test.jsonl.gz",
            read_preferences,
            2343,
            {"sides that part before the last answer": 9, "equal sides": 2},
        ),
        (
            "hh-rlhf/harmless-base.test.jsonl.gz",
            read_preferences,
            2307,
            {"sides that part before the last answer": 5},
        ),
        ("hh-rlhf:harmless", read_prompts, 2312, {}),
        (
            "llms-from-scratch-instruct/instruction-data-with-preference.json",
            read_preferences,
            1094,
            {"equal sides": 6},
        ),
        ("llms-from-scratch-instruct/instruction-data-with-preference.json", read_demonstrations, 1100, {}),
        ("llms-from-scratch-instruct/instruction-data.json", read_demonstrations, 1100, {}),
    ],
)
def test_every_row_is_used_or_counted(name, read, usable, left_out):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read(SHARED / name if ":" not in name else f"{SHARED}/{name}")
    assert len(found) == usable
    assert {reason: item.count for reason, item in found.left_out.items()} == left_out
    assert len(found.rows) == usable + sum(left_out.values())


def test_transcripts_are_put_together_again():
    with pytest.warns(UserWarning, match="left out"):
        found = read_preferences(SHARED / "hh-rlhf" / "helpful-base.test.jsonl.gz")
    rows = {(row["chosen"], row["rejected"]) for row in found.rows}
    for item in found:
        assert (item.prompt + item.chosen, item.prompt + item.rejected) in rows
        assert item.prompt.endswith("\n\nAssistant:")
        assert "\n\nHuman:" not in item.chosen + item.rejected


@pytest.mark.parametrize("template", ["", "chat_template.qwen3.jinja", "chat_template.qwen3_training.jinja"])
def test_qwen_conversations_are_the_templates_own(tmp_path, template):
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN)
    if template:
        tokenizer.chat_template = (QWEN / template).read_text()
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "nothing "},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    [found] = read_demonstrations(path, tokenizer)
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert found.prompt + found.completion + tokenizer.eos_token + "\n" == whole
    assert found.prompt.endswith("<|im_start|>assistant\n")
    assert found.completion.endswith("nothing ")
    assert list(read_prompts(path, tokenizer)) == [found.prompt]
    ids = (
        tokenizer(found.prompt)["input_ids"]
        + tokenizer(found.completion, add_special_tokens=False)["input_ids"]
    )
    assert ids == tokenizer(whole)["input_ids"][: len(ids)]  # the boundary falls between tokens
