"""Runs compared. In: run folders, and held-out prompts where responses are to be compared. Out: one
HTML file, a table.

Without prompts only what the folders hold is read, and no model is loaded.
"""

from proxima.pages.comparison.compare_runs import compare_runs

__all__ = ["compare_runs"]
