"""The report of a run, readable by anyone.

In: a `Run`. Out: one HTML file that needs nothing else, and a few lines for the terminal.
"""

from proxima.pages.report.run_report import write_report
from proxima.pages.report.terminal_summary import summary

__all__ = ["summary", "write_report"]
