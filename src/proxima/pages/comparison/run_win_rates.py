"""Win rates between finished runs. In: their folders, and prompts. Out: how often each run's response is
better, by judge.

Every run answers the same prompts with its own settings and seed; episodes have the seed of one run, so that
all meet the same environments. A judge that compares sees both orders.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from proxima.base_setup import is_adapter
from proxima.config import PPOConfig, RewardSpec
from proxima.core.chat_turns import cut_turns, turns_of
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.evaluator import (
    OWN,
    Answers,
    PairJudge,
    answer,
    compare_answers,
    open_pair_judge,
    run_config,
    saved_config,
    share_won,
)
from proxima.ppo_trainer import PPOTrainer

OWN_SHOWN = "rewards"
NOT_READ = RewardSpec("ends_with_eos")  # scores answers that only the judges compare
Rates = dict[str, list[Record]]
ReadPrompts = Callable[[Tokenizer], Sequence[str]]


def win_rates_between(
    runs: Mapping[str, Path],
    read: ReadPrompts,
    rewards: Sequence[RewardSpec] = (),
    judges: Sequence[RewardSpec] = (),
    trust_remote_code: bool = False,
    environment: Sequence[RewardSpec] = (),
    tools: Sequence[RewardSpec] = (),
) -> tuple[Rates, list[Record]]:
    """
    Args:
        read: prompts as a tokenizer's chat template has them; the same rows for every run.
        rewards: score by these; by default the runs' own, where they are the same.
        trust_remote_code: run Python code that comes with the runs' checkpoints.
        environment, tools: those of the runs, which are used only where they are given here.
    Returns: by judge (the rewards under `rewards`), `ours`, `theirs`, `rate`, `low`, `high` and `prompts` of
        every pair of runs; and by prompt, every run's response.
    """
    if OWN_SHOWN in (spec.label for spec in judges):
        raise ValueError(
            f"{OWN_SHOWN!r} is what the runs' rewards are called; give that judge another name: SOURCE,name=…"
        )
    saved = {name: saved_config(folder) for name, folder in runs.items()}
    by_rewards = _same_rewards(saved, rewards)
    seed = min(config.seed for config in saved.values())
    if not by_rewards and not judges:
        raise ValueError(
            "these runs were trained with different rewards; say what to compare them by: --rewards or "
            "--judges"
        )
    given: Record = {"judges": tuple(judges), "trackers": (), "trust_remote_code": trust_remote_code}
    if rewards or not by_rewards:
        given["rewards"] = tuple(rewards) or (NOT_READ,)
    given |= {name: tuple(specs) for name, specs in (("environment", environment), ("tools", tools)) if specs}
    if environment or tools or any(config.has_episodes for config in saved.values()):
        given["seed"] = seed
    configs = {name: run_config(folder, **given) for name, folder in runs.items()}
    prompts, answers = _answer_all(runs, configs, read)
    comparing = {spec.label: judge for spec in judges if (judge := open_pair_judge(spec))}
    rates = _rates(answers, prompts, comparing, seed)
    if not by_rewards:
        rates.pop(OWN_SHOWN)
    return rates, _rows(next(iter(answers.values())).asked(prompts), answers)


def _rows(prompts: Sequence[str], answers: Mapping[str, Answers]) -> list[Record]:
    """By prompt, every run's response."""
    return [
        {
            "prompt": str(prompt),
            "turns": cut_turns(turns_of(prompt)),
            "answers": {name: side.texts[i] for name, side in answers.items()},
        }
        for i, prompt in enumerate(prompts)
    ]


def _answer_all(
    runs: Mapping[str, Path], configs: Mapping[str, PPOConfig], read: ReadPrompts
) -> tuple[list[str], dict[str, Answers]]:
    """The prompts, and every run's responses to them; one run's models are in memory at a time."""
    prompts: list[str] = []
    answers: dict[str, Answers] = {}
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
        del trainer
        gc.collect()
    return prompts, answers


def _rates(
    answers: Mapping[str, Answers], prompts: Sequence[str], comparing: Mapping[str, PairJudge], seed: int
) -> Rates:
    """The win rate of every pair of runs, by judge."""
    rates: Rates = {}
    for ours, theirs in combinations(answers, 2):
        left, right = answers[ours], answers[theirs]
        given = (left.texts, right.texts), (left.scores, right.scores)
        for name, preferences in compare_answers(comparing, left.asked(prompts), *given):
            row = {"ours": ours, "theirs": theirs, **share_won(preferences, seed)}
            rates.setdefault(OWN_SHOWN if name == OWN else name, []).append(row)
    return rates


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
