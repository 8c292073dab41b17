"""Errors of a run, as opposed to errors in its settings (those are ValueErrors)."""


class RewardFailure(RuntimeError):  # noqa: N818
    """More rewards of a step failed than `max_reward_failures` allows: nothing was trained on it."""
