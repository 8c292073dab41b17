"""A finished run, judged on held-out prompts. In: a run's folder and prompts. Out: policy and reference side
by side.

Both are sampled with the same noise and scored by the run's own rewards (or others, where given).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from proxima.config import PPOConfig, RewardSpec, check_trust
from proxima.core.chat_turns import with_turns
from proxima.core.errors import RewardFailure
from proxima.core.json_record import Record, within
from proxima.evaluator.best_of_n import best_of_kl, best_of_mean, powers_up_to
from proxima.evaluator.held_out import Answers, answer, reference_answers, win_rates
from proxima.evaluator.judges import OWN
from proxima.evaluator.win_rates import mean_interval
from proxima.ppo_trainer import PPOTrainer, restore_endings
from proxima.runs import Run, write_json

ALONE = {"engine": "auto", "engine_urls": (), "overlap": False}
"""A run that sampled on vLLM is evaluated without it: its servers may be gone."""

SAID = ("reference_turns", "policy_turns")
SAMPLE = ("prompt", "reference", "reference_reward", "policy", "policy_reward")


def saved_config(run: str | Path) -> PPOConfig:
    """The settings of a finished run as they stand in its folder, which may be a stranger's: to look at,
    not to load by."""
    path = Path(run) / "config.yaml"
    if not (Path(run) / "policy").is_dir() or not path.is_file():
        raise ValueError(
            f"{run} is not the folder of a finished `proxima train` run (no config.yaml and policy/ in it)"
        )
    return PPOConfig.from_yaml(path)


def run_config(run: str | Path, **given: object) -> PPOConfig:
    """The settings to load a finished run by: its own, some of them replaced by what is given. Functions,
    servers and `trust_remote_code` count only where they are given."""
    config = saved_config(run)
    check_trust(run, config, given)
    alone = ALONE if config.engine == "vllm" else {}
    changes: Record = {"trust_remote_code": False, **alone, **given}
    return replace(config, **changes)


def open_run(run: str | Path, rewards: Sequence[RewardSpec] = (), **changes: object) -> PPOTrainer:
    """The trainer of a finished run, before its trained weights are loaded: policy and reference are still
    the same."""
    return PPOTrainer(run_config(run, **_given(rewards), **{"trackers": (), "judges": (), **changes}))


def evaluate_run(
    run: str | Path,
    prompts: Sequence[str],
    rewards: Sequence[RewardSpec] = (),
    judges: Sequence[RewardSpec] = (),
    best_of: int = 0,
    **changes: object,
) -> Record:
    """
    Args:
        rewards: score by these instead of the run's own.
        judges: who else judges win rates; by default the run's own judges.
        best_of: also sample the reference this many times per prompt, and score the best of n by the rewards;
            0 = not.
        changes: settings to evaluate with, for example `temperature`.
            Functions and servers that only the run's folder names are refused: give them here, as
            `trust_remote_code`.
    Returns: `reference` and `policy` by metric, the `win_rate` by the rewards, `win_rates` by judge,
        `best_of` by n where it was asked for, `best_constants` of verifiable rewards, and `samples`; also in
        the run's `evaluation.json`.
    """
    judges = tuple(judges) or run_config(run, **_given(rewards), **changes).judges
    trainer = open_run(run, rewards, judges=judges, **changes)
    trainer.judges.check(prompts)
    trainer.keep_in(Path(run))
    saved = Run(run).results
    restore_endings(trainer, within(saved, "endings"))
    trainer.reward_computer.restore_units(within(saved, "units"))
    reference = answer(trainer, prompts)
    trainer.load(run)
    policy = answer(trainer, prompts)
    scores = [side.scores[OWN] for side in (reference, policy)]
    if any(all(map(math.isnan, column)) for column in scores):
        raise RewardFailure(
            f"all rewards failed, nothing was judged; the last reason: {trainer.reward_computer.last_failure}"
        )
    rates = win_rates(trainer, policy, reference)
    results = {
        "step": Run(run).last().get("step"),
        "prompts": len(prompts),
        "rewards": trainer.reward_computer.reward_source,
        "reference": _with_interval(reference, trainer.config.seed),
        "policy": _with_interval(policy, trainer.config.seed),
        "win_rate": rates.pop(OWN),
        "win_rates": rates,
        **_beside(trainer, prompts, best_of),
        "samples": _samples(prompts, reference, policy),
    }
    write_json(Path(run) / "evaluation.json", results)
    return results


def _samples(prompts: Sequence[str], reference: Answers, policy: Answers) -> list[Record]:
    """Both answers to each prompt; of episodes with their turns."""
    sides = [column for side in (reference, policy) for column in (side.texts, side.scores[OWN])]
    asked = reference.asked(prompts)
    rows = [dict(zip(SAMPLE, row, strict=True)) for row in zip(asked, *sides, strict=True)]
    said = zip(reference.conversations, policy.conversations, strict=True)
    turns = [dict(zip(SAID, each, strict=True)) if any(each) else {} for each in said]
    return [with_turns({**row, **of_row}) for row, of_row in zip(rows, turns, strict=True)]


def _beside(trainer: PPOTrainer, prompts: Sequence[str], best_of: int) -> Record:
    """What policy and reference are to be compared with."""
    found: Record = {"best_of": best_of_rows(trainer, prompts, best_of)} if best_of else {}
    if constants := trainer.reward_computer.best_constants(prompts):
        found["best_constants"] = {name: best._asdict() for name, best in constants.items()}
    return found


def best_of_rows(trainer: PPOTrainer, prompts: Sequence[str], most: int) -> list[Record]:
    """For n = 1, 2, 4, ... `most`: `n`, the bound of its `kl`, the mean `reward` of the best of n samples of
    the reference, and the mean score that each judge gives it."""
    drawn = reference_answers(trainer, [prompt for prompt in prompts for _ in range(most)], group=most)

    def groups(values: Sequence[float]) -> list[list[tuple[float, float]]]:
        pairs = list(zip(drawn.scores[OWN], values, strict=True))
        return [pairs[start : start + most] for start in range(0, len(pairs), most)]

    by = {"reward" if name == OWN else f"judge/{name}": groups(each) for name, each in drawn.scores.items()}
    return [
        {"n": n, "kl": best_of_kl(n), **{name: best_of_mean(each, n) for name, each in by.items()}}
        for n in powers_up_to(most)
    ]


def _given(rewards: Sequence[RewardSpec]) -> Record:
    return {"rewards": tuple(rewards)} if rewards else {}


def _with_interval(answers: Answers, seed: int) -> dict[str, float]:
    _, low, high = mean_interval(answers.scores[OWN], seed)
    return {**answers.measured, "reward_low": low, "reward_high": high}
