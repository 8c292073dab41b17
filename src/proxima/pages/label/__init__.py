"""Human feedback: people compare or rate completions on a local page.

In: prompts and a model, or ready completions. Out: answers in an SQLite file, then preferences or ratings as
    JSONL.
"""

from proxima.pages.label.label_export import export, in_words, summarize
from proxima.pages.label.label_page import PAGE, add_label_routes, make_label_app
from proxima.pages.label.label_store import Item, Store

__all__ = ["PAGE", "Item", "Store", "add_label_routes", "export", "in_words", "make_label_app", "summarize"]
