"""How many files of the package a prompt passes between `ppo_step` and its optimiser step: a reader opens these."""

import sys
from pathlib import Path

import pytest

import proxima
from proxima import PPOConfig, PPOTrainer

PACKAGE = str(Path(proxima.__file__).parent)


def files_of(step) -> set[str]:
    """Files of the package in which a function runs while `step` does."""
    found = set()

    def entered(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(entered)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


# today's number and two more: a feature that nobody asked for in a run should not lie on every prompt's path
@pytest.mark.parametrize(("engine", "most"), [("plain", 60), ("auto", 71)])
def test_the_path_stays_short(engine, most):
    config = PPOConfig(
        "embedded",
        engine=engine,
        device="cpu",
        max_new_tokens=4,
        ppo_epochs=1,
        rewards=[lambda prompts, texts: [float(len(text)) for text in texts]],
    )
    trainer = PPOTrainer(config)
    trainer.ppo_step(["a", "b"])  # what is imported or built once is not counted
    passed = files_of(lambda: trainer.ppo_step(["a", "b"]))
    assert {"training/policy_loss.py", "advantage/gae_advantage.py"} <= passed
    assert len(passed) <= most, sorted(passed)
