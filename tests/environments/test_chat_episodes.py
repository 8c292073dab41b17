"""Episodes through a chat template: what was sampled and read is, id by id, the conversation as the template
writes it, and what is trained on are these ids."""

import json

import pytest
from transformers import AutoTokenizer

from examples.calculator import multiply
from proxima.core.types import Prompt
from proxima.data import ChatTemplate
from proxima.world.tiny_models import make_tiny_model
from tests.environments.games import Parity
from tests.environments.test_episodes import EOS, cells, make_trainer, scripted, turns_in

# As Qwen2.5 writes it, in short: calls in Hermes JSON, results that follow each other in one turn of the user.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}"
    "{% endfor %}<end>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}<end>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<end>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is 3 * 4 * 3?"}]


@pytest.fixture
def speaks(tmp_path):
    """The folder of a tiny model whose tokenizer has that template."""
    folder = make_tiny_model(tmp_path / "speaks", context=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = QWEN.replace("<end>", tokenizer.eos_token)
    tokenizer.save_pretrained(folder)
    return str(folder)


def call(left, right):
    return (
        f'<tool_call>\n{{"name": "multiply", "arguments": {json.dumps({"left": left, "right": right})}}}'
        "\n</tool_call>"
    )


def test_three_turns_with_tools_are_one_rendering_of_the_conversation(make_config, speaks):
    """The first turn calls the calculator twice, the second was cut after its call, the third is the
    answer."""
    trainer = make_trainer(
        make_config,
        model_name=speaks,
        environment=(),
        tools=["examples.calculator:multiply"],
        rewards=["examples.calculator:right_answer"],
        max_new_tokens=160,
        max_episode_tokens=600,
        top_k=0,
        top_p=1.0,
    )
    said = [f"First.{call(3, 4)}\n{call(12, 1)}", call(12, 3), "It is 36."]
    encode, asked = trainer.tokenizer, ChatTemplate(trainer.tokenizer).prompt(QUESTION)
    trainer = scripted(trainer, *said, cut=(1,))
    results = trainer.ppo_step([Prompt(str(asked), {"answer": 36}, asked.turns)])
    tokens = results["sa_pairs"].tokens
    schema = trainer.generator.environment.schemas["multiply"]
    assert multiply.__doc__.strip().startswith(schema["function"]["description"])
    read = [["12", "12"], ["36"]]
    talk = [*QUESTION]
    for turn, answers in zip(said, [*read, []], strict=True):
        talk += [{"role": "assistant", "content": turn}]
        talk += [{"role": "tool", "content": answer} for answer in answers]
    whole = encode.apply_chat_template(talk, tools=[schema], tokenize=False)
    ids = encode(whole.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert tokens.input_ids[tokens.input_mask].tolist() == ids
    [(row, acted)] = cells(tokens)
    assert [encode.decode(turn, skip_special_tokens=True) for turn in turns_in(row, acted)] == said
    assert [turn[-1] == encode.eos_token_id for turn in turns_in(row, acted)] == [True, False, True]
    assert results["rewards"] == [1.0]
    assert (results["episode_turns"], results["malformed_calls"], results["eos_rate"]) == (3, 0, 1)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_sampled_turns_are_trained_on_as_they_were_sampled(make_config, speaks, engine):
    """Whether a turn ended with the template's own end, with another, or was cut."""
    trainer = make_trainer(make_config, model_name=speaks, environment=Parity, engine=engine)
    encode, asked = trainer.tokenizer, ChatTemplate(trainer.tokenizer).prompt(QUESTION)
    trainer.models.eos_ids = (*EOS, encode.eos_token_id)
    results = trainer.ppo_step([asked] * 8)
    tokens = results["sa_pairs"].tokens
    assert results["first_ratio_error"] < 1e-5
    assert results["episode_turns"] == 3
    end = encode.eos_token_id
    for place, (ids, acted) in enumerate(cells(tokens)):
        turns, at = turns_in(ids, acted), 0
        for turn in turns[:-1]:
            at += len(turn)
            seen = ids[at : at + acted[at:].index(True)]
            at += len(seen)
            text = encode.decode(seen)
            assert text.startswith("" if turn[-1] == end else encode.eos_token), place
            assert text.removeprefix(encode.eos_token).startswith("\n<|im_start|>user\n [")
            assert text.endswith(f"]{encode.eos_token}\n<|im_start|>assistant\n")
            assert encode(text, add_special_tokens=False)["input_ids"] == seen
        assert ids[at:] == turns[-1]
