"""`Step`: what an environment answers to a turn (observation, reward, done), read strictly, and how long it
may be.

Nothing heavy is imported: worker processes import it.
"""

from __future__ import annotations

from typing import NamedTuple

from proxima.core.json_record import Record
from proxima.rewards import LARGEST

Message = Record

LONGEST = 200_000  # characters of an observation


class Step(NamedTuple):
    """The answer to a turn."""

    observation: str | list[Message] | None = None
    """What the policy reads next: a text, or messages with `role` and `content`."""
    reward: float = 0.0
    """Of this turn."""
    done: bool = False
    """Whether the episode is over."""


class Answered(NamedTuple):
    """A `Step` as it was checked."""

    messages: list[Message]  # to read next
    reward: float
    done: bool
    cut: bool = False  # over, but not done: gymnasium's `truncated`


def read_step(returned: object) -> Answered:
    """A `Step`, or the five values of gymnasium: observation, reward, terminated, truncated, info."""
    parts = list(returned) if isinstance(returned, (tuple, list)) else []
    if len(parts) not in (3, 5):
        raise ValueError(
            f"step returned {_named(returned)}, not a Step(observation, reward, done) or gymnasium's five "
            "values"
        )
    done, cut = _flag("done", parts[2]), len(parts) == 5 and _flag("truncated", parts[3])
    messages = read_observation("step", parts[0])
    if not messages and not done and not cut:
        raise ValueError("step returned no observation, but the episode is not done")
    return Answered(messages, read_reward("step", parts[1]), done, cut)


def read_observation(method: str, returned: object) -> list[Message]:
    """Messages: a text is one of the user, None is none."""
    if returned is None:
        return []
    messages = [{"role": "user", "content": returned}] if isinstance(returned, str) else returned
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(
            f"the observation of {method} is {_named(returned)}, not a text, a list of "
            "{role, content} or None"
        )
    for message in messages:
        message["content"].encode()  # half of a character pair raises a ValueError
    if (size := sum(len(message["content"]) for message in messages)) > LONGEST:
        raise ValueError(
            f"the observation of {method} has {size:,} characters, more than {LONGEST:,}: return less"
        )
    return messages


def read_reward(method: str, returned: object) -> float:
    value = _plain(returned)
    if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST:  # nan and infinity are not
        return float(value)
    shown = str(value) if isinstance(value, float) else _named(value)
    raise ValueError(f"the reward of {method} is {shown}, not a finite number of float32")


def _flag(name: str, value: object) -> bool:
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise ValueError(f"{name} of step is {_named(plain)}, not true or false")
    return plain


def _plain(value: object) -> object:
    """An array or a number of one as a worker process sends it: what has a shape is a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _named(value: object) -> str:
    if value is None:
        return "None"
    many = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{many}"
