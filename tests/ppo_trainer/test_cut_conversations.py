"""Conversations that are too long are cut by whole messages, and no token of the template is cut."""

import pytest
from jinja2.exceptions import TemplateError

from proxima.core.encoding import encode_prompts
from proxima.core.types import Prompt
from proxima.data import ChatTemplate
from proxima.ppo_trainer.prompt_tokens import tokenize
from tests.environments.test_chat_templates import CHATML, HEADERS, template, tokenizer

STRICT = "{{ raise_exception('begins with the user') if messages[1].role != 'user' }}"
ALTERNATING = (
    "{% for m in messages %}{{ raise_exception('two') if not loop.first and m.role == loop.previtem.role }}"
    "{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
    {"role": "user", "content": "the last question"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def size(made, text):
    return len(encode_prompts(made, [text])[0])


def cut(made, prompt, room, **given):
    prompts, rows, truncated = tokenize([prompt], made, room + 8, 8, may_cut=True, **given)
    assert rows == encode_prompts(made, prompts)
    assert len(rows[0]) <= room
    assert truncated.tolist() == [True]
    return prompts[0]


@pytest.mark.parametrize("said", [template(CHATML), template(HEADERS), STRICT + template(CHATML)])
@pytest.mark.parametrize("kept", [3, 5])
@pytest.mark.parametrize("spare", [0, 3])
def test_the_oldest_messages_go_first_and_the_system_message_stays(said, kept, spare):
    made = tokenizer(said)
    whole = ChatTemplate(made).prompt(TALK)
    wanted = ChatTemplate(made).prompt([TALK[0], *TALK[kept:]])
    found = cut(made, Prompt(whole, {"answer": 1}, whole.turns, whole.messages), size(made, wanted) + spare)
    assert found == wanted
    assert found.columns == {"answer": 1}
    assert found.messages == [TALK[0], *TALK[kept:]]
    assert [turn["text"] for turn in found.turns] == [each["content"] for each in [TALK[0], *TALK[kept:]]]


def test_the_last_user_message_loses_its_beginning_where_it_alone_is_too_long():
    made = tokenizer(template(CHATML))
    whole = ChatTemplate(made).prompt(TALK)
    short = ChatTemplate(made).prompt([TALK[0], {"role": "user", "content": "question"}])
    assert cut(made, whole, size(made, short)) == short
    empty = ChatTemplate(made).prompt([TALK[0], {"role": "user", "content": ""}])
    assert whole.endswith(cut(made, whole, size(made, empty)))  # no room for a word: as a text


def test_a_question_after_tools_keeps_the_tools_and_their_results():
    made = tokenizer(template(CHATML))
    talk = [*TALK, {"role": "assistant", "content": "calls"}, {"role": "tool", "content": "result"}]
    whole = ChatTemplate(made, [TOOL]).prompt(talk)
    wanted = ChatTemplate(made, [TOOL]).prompt([talk[0], *talk[5:]])
    assert "Adds." in wanted
    assert cut(made, whole, size(made, wanted), tools=[TOOL]) == wanted
    assert whole.endswith(cut(made, whole, size(made, wanted)))  # no template without tools wrote it


def test_a_rendered_text_is_read_back_or_cut_as_a_text():
    made = tokenizer(template(CHATML.replace("<end>", "<|im_end|>")))
    whole = str(ChatTemplate(made).prompt(TALK))
    wanted = ChatTemplate(made).prompt([TALK[0], TALK[5]])
    assert cut(made, whole, size(made, wanted)) == wanted
    other = whole.replace("first question", " first question")
    assert other.endswith(cut(made, other, size(made, wanted)))


def test_a_plain_text_is_cut_on_the_left():
    made = tokenizer(template(CHATML))
    assert cut(made, "0123456789", 4) == "6789"


def test_a_template_that_refuses_what_is_left_is_asked_for_less():
    made = tokenizer(ALTERNATING + template(CHATML))
    talk = [TALK[0], TALK[1], TALK[2], TALK[5]]
    found = cut(
        made, ChatTemplate(made).prompt(talk), size(made, ChatTemplate(made).prompt([talk[0], talk[3]]))
    )
    assert found.messages == [talk[0], talk[3]]
    with pytest.raises(TemplateError):
        made.apply_chat_template([TALK[1], TALK[1]], tokenize=False)
