"""The command line: `main` runs one command; one module per command."""

from proxima.cli.command_line import main, overview, parse

__all__ = ["main", "overview", "parse"]
