"""Episodes of several turns: what is known of one when it is over, and who answers the policy's turns while a
batch is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from proxima.core.json_record import Record


@dataclass
class Episode:
    """What is known of one episode besides its tokens."""

    rewards: list[float] = field(default_factory=list)  # of each turn, as the environment gave them
    failure: str = ""  # why it is left out; empty where nothing failed
    malformed: int = 0  # tool calls that could not be read or made
    done: bool = False  # it came to its end, and was not cut
    attributes: Record = field(default_factory=dict)  # of its environment, where a reward reads them
    unreadable: dict[str, str] = field(default_factory=dict)  # why others cannot be read, by name


class Reply(NamedTuple):
    """The answer to a turn."""

    row: int
    ids: list[int]  # tokens to read after the turn
    goes_on: bool  # whether the policy has another turn


class Conversation(Protocol):
    """Answers the turns of a batch's rows, perhaps later than it is asked."""

    def finish_turn(self, row: int, ids: list[int]) -> None:
        """Take a turn's own tokens."""

    def replies(self, wait: bool) -> list[Reply]:
        """The replies that have come since; `wait`: at least one, where any is to come."""
