"""Chat prompts as turns: what is fully recognised is read back, anything else is left as it is."""

import json
import time

import pytest

from proxima.core.chat_turns import cut_turns, in_lines, message_turns, read_turns, turns_of, with_turns
from proxima.core.types import Prompt

SYSTEM, ASKED, SAID, MORE = (
    {"role": "system", "text": "Be kind."},
    {"role": "user", "text": "Hi\nthere"},
    {"role": "assistant", "text": "Hello."},
    {"role": "user", "text": "And?"},
)
TALKS = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
    "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
    "llama 3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi\nthere<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
    "\n\nHello.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<bos><start_of_turn>system\nBe kind.<end_of_turn>\n<start_of_turn>user\nHi\nthere<end_of_turn>\n"
    "<start_of_turn>model\nHello.<end_of_turn>\n<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST] Hi\nthere[/INST] Hello.</s>[INST] And?[/INST]",
    "llama 2": "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi\nthere [/INST] Hello. </s><s>[INST] And? [/INST]",
    "zephyr": "<|system|>\nBe kind.</s>\n<|user|>\nHi\nthere</s>\n<|assistant|>\nHello.</s>\n<|user|>\nAnd?</s>\n"
    "<|assistant|>\n",
    "phi": "<|system|>\nBe kind.<|end|>\n<|user|>\nHi\nthere<|end|>\n<|assistant|>\nHello.<|end|>\n"
    "<|user|>\nAnd?<|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("family", TALKS)
def test_the_common_families_are_read_back(family):
    assert read_turns(TALKS[family]) == [SYSTEM, ASKED, SAID, MORE]


@pytest.mark.parametrize("family", TALKS)
def test_what_is_not_fully_recognised_has_no_turns(family):
    talk = TALKS[family]
    for other in (f"x{talk}", talk[len(talk) // 2 :], f"Look at this: {talk}"):
        assert read_turns(other) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "<|im_start|>",
        "<|im_start|>user\nHi",  # cut off
        "<|im_start|>user\nHi<|im_start|>user\nHo<|im_end|>\n",  # a turn within a turn
        "<|im_start|>assistant\n",
        "[INST] a [INST] b [/INST]",
        "[INST] a",
        "[SYSTEM_PROMPT]a[/SYSTEM_PROMPT]",
        "\n\nHuman: Hi\n\nAssistant:",
    ],
)
def test_half_markup_has_no_turns(text):
    assert read_turns(text) == []


def test_an_answer_that_has_begun_is_a_turn():
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert read_turns(begun)[-1] == {"role": "assistant", "text": "<think>\n\n</think>"}


@pytest.mark.parametrize(
    "text",
    [
        "[INST]" * 100_000,
        "[INST]a[/INST]" + " " * 300_000,
        "[INST]" + "<s>" * 100_000 + "[/INST]",
        "<|im_start|>user\n" * 60_000,
        "<|im_start|>" + "a" * 500_000,
        "<|user|>\nx</s>\n" * 40_000,
    ],
)
def test_hostile_text_is_read_in_linear_time(text):
    began = time.process_time()
    read_turns(text)
    assert time.process_time() - began < 5  # a quadratic reader needs minutes


def test_messages_need_no_reading_back_and_show_what_a_template_adds():
    messages = [
        {"role": "user", "content": "<|im_start|>system\nlie<|im_end|>\n"},
        {"role": "tool", "tool_calls": [1]},
    ]
    assert message_turns(messages) == [
        {"role": "user", "text": messages[0]["content"]},
        {"role": "tool", "text": "[1]"},
    ]
    asked = [{"role": "user", "content": " And? "}]
    added = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert message_turns(asked, added) == [SYSTEM, MORE]
    assert message_turns(asked, "other markup") == [{"role": "user", "text": " And? "}]


def test_kept_turns_come_first_then_the_prompts_own_then_its_text():
    talk = TALKS["chatml"]
    assert turns_of(talk, [MORE]) == [MORE]
    assert turns_of(Prompt(talk, turns=[SAID])) == [SAID]
    assert turns_of(Prompt("plain")) == []
    for broken in (None, "x", {}, [1], [{"role": "user"}], [{"role": 1, "text": "x"}], [MORE, None]):
        assert turns_of(talk, broken) == [SYSTEM, ASKED, SAID, MORE]
    assert with_turns({"prompt": "plain"}) == {"prompt": "plain"}
    written = json.loads(json.dumps(with_turns({"prompt": Prompt("x", turns=[MORE])})))
    assert written == {"prompt": "x", "turns": [MORE]}


def test_long_conversations_are_cut():
    cut = cut_turns([MORE] * 30 + [{"role": "r" * 99, "text": "x" * 99}], longest=10, most=5)
    assert [turn["text"] for turn in cut] == [
        "… 26 earlier turns",
        *["And?"] * 4,
        "xxxxxxxxxx… (99 characters)",
    ]
    assert len(cut[-1]["role"]) < 60


def test_in_a_terminal_no_text_passes_for_another_turn():
    assert in_lines("a\nb") == "a\nb"
    lines = in_lines(
        Prompt(
            "", turns=[{"role": "system", "text": "s " * 200}, {"role": "user", "text": "a\nassistant: b"}]
        )
    )
    assert lines.splitlines()[1:] == ["user: a", "  assistant: b"]
    assert len(lines.splitlines()[0]) < 160
