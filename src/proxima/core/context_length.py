"""How many tokens a network can read, and its kinds of rotary positions. In: its config. Out: a number, or
the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> int | None:
    """Most tokens of a sequence; None where the config names no limit.

    With `longrope` positions it is the original context: where one sequence of a batch is longer,
    `transformers` gives all of them other angles, so a log-probability would depend on its neighbours.
    """
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None), original_context(text)]
    return min((limit for limit in limits if limit is not None), default=None)


def original_context(text: PretrainedConfig) -> int | None:
    """The context that a network with `longrope` positions had before it was extended; None for others."""
    limits = [
        rope.get("original_max_position_embeddings")
        for rope in rotary_parameters(text)
        if rope.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def rotary_parameters(text: PretrainedConfig) -> list[dict[str, object]]:
    """Those of all layers, or those of each type of layer.

    Args:
        text: the config of the language model.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]
