"""Win rates between finished runs. In: their folders, and prompts. Out: by judge, how often each run's answer
is better.

Every run answers the same prompts with its own settings and seed; a judge that compares sees both orders.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from proxima.base_setup.lora_setup import is_adapter
from proxima.config import PPOConfig, RewardSpec
from proxima.evaluator import open_pair_judge
from proxima.evaluator.finished_run import run_config, saved_config
from proxima.evaluator.held_out import Answers, answer
from proxima.evaluator.judges import OWN, compare_answers
from proxima.evaluator.win_rate import share_won
from proxima.ppo_trainer import PPOTrainer

OWN_SHOWN = "rewards"
NOT_READ = RewardSpec("ends_with_eos")  # scores answers that only the judges compare
Rates = dict[str, list[dict[str, Any]]]


def win_rates_between(
    runs: Mapping[str, Path],
    read: Callable[[Any], Sequence[str]],
    rewards: Sequence[RewardSpec] = (),
    judges: Sequence[RewardSpec] = (),
    trust_remote_code: bool = False,
) -> tuple[Rates, list[dict[str, Any]]]:
    """
    Args:
        read: prompts as a tokenizer's chat template has them; the same rows for every run.
        rewards: score by these; by default the runs' own, where they are the same.
        trust_remote_code: run Python code that comes with the runs' checkpoints.
    Returns: by judge (the rewards under `rewards`), `ours`, `theirs`, `rate`, `low`, `high` and `prompts` of
        every pair of runs; and by prompt, every run's answer.
    """
    if OWN_SHOWN in (spec.label for spec in judges):
        raise ValueError(
            f"{OWN_SHOWN!r} is what the runs' rewards are called; give that judge another name: SOURCE,name=…"
        )
    by_rewards = _same_rewards({name: saved_config(folder) for name, folder in runs.items()}, rewards)
    if not by_rewards and not judges:
        raise ValueError(
            "these runs were trained with different rewards; say what to compare them by: --rewards or "
            "--judges"
        )
    given: dict[str, Any] = {"judges": tuple(judges), "trackers": (), "trust_remote_code": trust_remote_code}
    if rewards or not by_rewards:
        given["rewards"] = tuple(rewards) or (NOT_READ,)
    configs = {name: run_config(folder, **given) for name, folder in runs.items()}
    answers: dict[str, Answers] = {}
    prompts: list[str] = []
    comparing = {spec.label: judge for spec in judges if (judge := open_pair_judge(spec))}
    seed = min(config.seed for config in configs.values())
    for name, folder in runs.items():
        trainer = PPOTrainer(configs[name])
        trainer.load(folder)
        own = list(read(trainer.tokenizer))
        if prompts and len(own) != len(prompts):
            raise ValueError(
                f"{name} reads {len(own)} prompts, the runs before it {len(prompts)}; all must take the same"
            )
        prompts = prompts or own
        trainer.judges.check(own)
        answers[name] = answer(trainer, own)
        del trainer  # one run's models at a time
        gc.collect()
    rates: Rates = {}
    for ours, theirs in combinations(answers, 2):
        sides = answers[ours], answers[theirs]
        texts, scores = (sides[0].texts, sides[1].texts), (sides[0].scores, sides[1].scores)
        judged = compare_answers(comparing, prompts, texts, scores)
        for name, preferences in judged:
            if name != OWN or by_rewards:
                row = {"ours": ours, "theirs": theirs, **share_won(preferences, seed)}
                rates.setdefault(name or OWN_SHOWN, []).append(row)
    rows = [
        {"prompt": str(prompt), "answers": {name: side.texts[i] for name, side in answers.items()}}
        for i, prompt in enumerate(prompts)
    ]
    return rates, rows


def _same_rewards(configs: Mapping[str, PPOConfig], rewards: Sequence[RewardSpec]) -> bool:
    """Whether all runs are scored alike; an adapter lives on one base and cannot score another's answers."""
    used = [[spec.to_dict() for spec in (rewards or config.rewards)] for config in configs.values()]
    bases = {config.model_name for config in configs.values()}
    adapters = [spec.label for spec in rewards if isinstance(spec.source, str) and is_adapter(spec.source)]
    if adapters and len(bases) > 1:
        raise ValueError(
            f"the reward model {adapters[0]!r} belongs to one base model and the runs have {len(bases)}; "
            "give rewards or judges that read text: a function, a URL or a classifier"
        )
    return all(each == used[0] for each in used)
