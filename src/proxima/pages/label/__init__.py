"""Human feedback: people compare or rate completions on a local page.

In: prompts and a model, or ready completions. Out: answers in an SQLite file, then preferences or ratings as
    JSONL.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.pages.label.label_export import export, in_words, summarize
    from proxima.pages.label.label_items import read_controls, read_items, sample_items
    from proxima.pages.label.label_page import PAGE, add_label_routes, make_label_app
    from proxima.pages.label.label_store import Item, Store
    from proxima.pages.label.least_sure_items import POOL, keep_least_sure, load_trained_reward

__all__, __getattr__ = lazy_exports(__name__)
