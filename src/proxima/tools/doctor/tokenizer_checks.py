"""Whether tokenizer, model and data fit each other.

In: a tokenizer, a model's config, rows. Out: findings; no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from proxima.base_setup import PAD_TOKEN
from proxima.config import PPOConfig
from proxima.core.encoding import added_ids, encode_prompts
from proxima.core.tokenizer import Tokenizer
from proxima.data import Rows, Skip, kinds_of, prompt_of
from proxima.environments import max_response_tokens, response_limit
from proxima.tools.doctor.finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AT_ONCE = 512  # prompts tokenised together
LOOKED_AT = 100  # rows searched for a conversation


def check_pad(tokenizer: Tokenizer) -> Finding:
    """A pad token that is EOS hides every EOS from code that derives masks from ids.

    `load_tokenizer` gives such a tokenizer a pad token of its own.
    """
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or pad == end:
        what = (
            "there is no pad token"
            if pad is None
            else f"pad and EOS are the same token ({tokenizer.pad_token!r})"
        )
        return fail(
            "pad token", what, "load it with proxima's load_tokenizer, or give it a pad token of its own"
        )
    if tokenizer.pad_token == PAD_TOKEN:
        return ok(
            "pad token",
            "the tokenizer has none of its own (or uses EOS): one is added, which the network never reads",
        )
    return ok("pad token", f"{tokenizer.pad_token!r}, not EOS")


def check_vocabulary(tokenizer: Tokenizer, network: PreTrainedConfig) -> Finding:
    rows = network.get_text_config().vocab_size
    ids = [index for index in tokenizer.get_vocab().values() if index != tokenizer.pad_token_id]
    if max(ids) >= rows:
        return fail(
            "vocabulary",
            f"the tokenizer has ids up to {max(ids)}, the model reads {rows}",
            "use the tokenizer that came with the model, in one folder with it",
        )
    return ok("vocabulary", f"{len(ids)} tokens, the model reads {rows}")


def check_eos(ends: Sequence[int], network: PreTrainedConfig) -> Finding:
    """Whether any token ends a response, and can be sampled.

    Args:
        ends: every id that ends a response.
    """
    rows = network.get_text_config().vocab_size
    if not ends:
        return warn(
            "EOS",
            "neither tokenizer nor model names a token that ends a response: every response is cut at "
            "max_new_tokens",
            "set eos_token in the tokenizer's files",
        )
    if beyond := [end for end in ends if end >= rows]:
        return warn(
            "EOS", f"id {beyond[0]} can never be sampled: the model writes {rows} ids", "fix eos_token_id"
        )
    return ok("EOS", f"ids {', '.join(map(str, ends))}")


def check_chat_template(rows: Rows, tokenizer: Tokenizer) -> Finding:
    """Conversations need a template, plain texts do not."""
    form = kinds_of(rows).get("prompts")
    if form is None:
        return fail("chat template", f"{rows.name} holds no prompts", "see docs/data.md for the forms")
    for row in rows[:LOOKED_AT]:
        try:
            conversation = isinstance(prompt_of(row, form), list)
        except Skip:
            continue
        if conversation and not tokenizer.chat_template:
            return fail(
                "chat template",
                f"{rows.name} holds conversations, and the tokenizer has no chat template",
                "use a chat model's tokenizer, or data with `prompt` as text",
            )
        if conversation:
            return ok("chat template", "present, for the conversations in the data")
    return ok("chat template", "not needed: the prompts are plain text")


def prompt_lengths(prompts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Number of tokens of each prompt."""
    return [length for length, _ in _measured(prompts, tokenizer)]


def measure_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, ends: Sequence[int]
) -> tuple[list[int], int]:
    """Number of tokens of each prompt, and how many prompts end with one of `ends`."""
    measured = list(_measured(prompts, tokenizer))
    return [length for length, _ in measured], sum(last in ends for _, last in measured)


def _measured(prompts: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, int | None]]:
    """Number of tokens of each prompt, and its last token."""
    for first in range(0, len(prompts), AT_ONCE):
        for row in encode_prompts(tokenizer, prompts[first : first + AT_ONCE]):
            yield len(row), row[-1] if row else None


def check_prompt_ends(tokenizer: Tokenizer, ended: int, count: int) -> Finding:
    """What comes right before the answer: after EOS a model starts a new text.

    Args:
        ended: how many of the `count` prompts end with a token that ends a text.
    """
    name = "prompt end"
    added = added_ids(tokenizer)
    if ended:
        return warn(
            name,
            f"{ended} of {count} prompts end with a token that ends a text: the model would start a new text "
            "instead of answering",
            "remove it from the prompts in the data, or from the chat template",
        )
    if added.after:
        return ok(
            name,
            f"the tokenizer appends {tokenizer.decode(added.after)!r} to a text; it is left out after "
            "prompts",
        )
    return ok(name, "no prompt ends with EOS")


def check_context(
    config: PPOConfig, lengths: Sequence[int], context: int | None, name: str = "context"
) -> Finding:
    """Prompts too long to leave room for a response."""
    if context is None:
        return ok(name, "the model sets no limit")
    room, limit = context - max_response_tokens(config), response_limit(config)
    if room < 1:
        return fail(
            name,
            f"{limit} leaves no room in the context of {context}",
            "set max_episode_tokens, or lower max_turns" if config.has_episodes else "lower max_new_tokens",
        )
    over = sum(length > room for length in lengths)
    if not over:
        return ok(name, f"longest prompt {max(lengths)} tokens, room for {room}")
    text = (
        f"{over} of {len(lengths)} prompts have more than the {room} tokens that {limit} leaves of {context}"
    )
    if config.truncate_prompts:
        return warn(
            name, f"{text}: they are cut on the left", "check that what remains still asks the question"
        )
    return fail(name, f"{text}: they are refused", "shorten them, or set truncate_prompts")
