"""The report of a run, readable by anyone.

In: a `Run`. Out: one HTML file that needs nothing else, and a few lines for the terminal.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.pages.report.findings import find
    from proxima.pages.report.report_curves import (
        MARKED,
        NOT_DRAWN,
        bounds,
        chart,
        frontier,
        interval_names,
        meanings,
    )
    from proxima.pages.report.report_page import (
        Page,
        code,
        conclusion,
        folded,
        heading,
        listed,
        numbers,
        pairs,
        paragraph,
        settings,
        table,
    )
    from proxima.pages.report.report_samples import Pair, cut
    from proxima.pages.report.run_facts import Card, read_data
    from proxima.pages.report.run_outcome import held_out
    from proxima.pages.report.run_report import write_report
    from proxima.pages.report.short_numbers import percent
    from proxima.pages.report.terminal_summary import summary

__all__, __getattr__ = lazy_exports(__name__)
