"""Errors of a run, as opposed to errors in its settings (those are ValueErrors)."""


class RewardFailure(RuntimeError):  # noqa: N818
    """Every reward of a step failed: there is nothing to learn from."""
