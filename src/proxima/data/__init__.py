"""Reading and checking data. In: a file, a folder or a Hub id. Out: a lazy Sequence of records."""

from proxima.data.data_check import DataReport, check
from proxima.data.data_sources import open_rows
from proxima.data.read_records import (
    Records,
    kinds_of,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_ratings,
)
from proxima.data.records import Demonstration, Preference, Rating
from proxima.data.rows import BrokenData
from proxima.data.show_data import show

__all__ = [
    "BrokenData",
    "DataReport",
    "Demonstration",
    "Preference",
    "Rating",
    "Records",
    "check",
    "kinds_of",
    "open_rows",
    "read_demonstrations",
    "read_preferences",
    "read_prompts",
    "read_ratings",
    "show",
]
