"""Errors of a run, as opposed to errors in its settings (those are ValueErrors)."""


class RewardFailure(RuntimeError):  # noqa: N818
    """More rewards of a step failed than `max_reward_failures` allows; the step was not trained on."""


class EngineFailure(RuntimeError):  # noqa: N818
    """The rollout engine failed for good; the step was not trained on."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; the step was finished and a checkpoint written."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ProcessLost(RuntimeError):  # noqa: N818
    """Another process of the run died, left or does not respond."""


def first_line(error: BaseException) -> str:
    """What an error says in its first line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
