"""Reading and checking data. In: a file, a folder or a Hub id. Out: a lazy Sequence of records."""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.data.chat_templates import ChatTemplate, Skip
    from proxima.data.column_forms import flag_of, prompt_of
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
    from proxima.data.rows import BrokenData, ListRows, Rows
    from proxima.data.show_data import show

__all__, __getattr__ = lazy_exports(__name__)
