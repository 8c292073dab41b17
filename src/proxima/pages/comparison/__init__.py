"""Runs compared. In: run folders, and held-out prompts where responses are to be compared. Out: one
HTML file, a table.

Without prompts only what the folders hold is read, and no model is loaded.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.pages.comparison.comparison_page import lines
    from proxima.pages.comparison.replay_page import write_replay_page
    from proxima.pages.comparison.run_comparison import (
        columns_of,
        compare_runs,
        compared,
        curves,
        frontier,
        notes,
        table,
    )
    from proxima.pages.comparison.seed_groups import group_by_seed

__all__, __getattr__ = lazy_exports(__name__)
