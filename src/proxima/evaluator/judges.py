"""Which judges decide win rates, and their preferences from scores. In: a config's rewards and judges. Out:
one preference per prompt by each, nan where one failed.

The rewards judge by the scores that answers have anyway. A judge that scores is a reward that is not trained
on; one that compares sees both answers, in both orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from proxima.base_setup import ModelSet, has_head, load_reward
from proxima.config import PPOConfig, RewardSpec
from proxima.core.tokenizer import Tokenizer
from proxima.evaluator.pair_judge import PairJudge, as_reward, open_pair_judge
from proxima.evaluator.win_rates import preferences
from proxima.ppo_trainer import RewardComputer
from proxima.rewards import Samples, check_rewards
from proxima.runtime import forked_random_state

OWN = ""  # the run's own rewards


class Judges:
    """By name: those that score an answer, and those that compare two."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.scoring: dict[str, RewardComputer] = {}
        self.comparing: dict[str, PairJudge] = {}
        for spec in config.judges:
            if judge := open_pair_judge(spec):
                self.comparing[spec.label] = judge
            else:
                self.scoring[spec.label] = _scorer(as_reward(spec), models, tokenizer, config)

    def check(self, prompts: Sequence[str]) -> None:
        """A ValueError where a judge asks for a column that the prompts lack."""
        for scorer in self.scoring.values():
            scorer.check_columns(prompts)
        for judge in self.comparing.values():
            judge.check(prompts)

    def keep_in(self, folder: Path) -> None:
        """Keep what language models as judges say in this folder."""
        for scorer in self.scoring.values():
            scorer.keep_in(folder)
        for judge in self.comparing.values():
            judge.keep_in(folder)

    def score(self, samples: Samples) -> dict[str, list[float]]:
        """One score per answer by each judge that scores."""
        return {name: judge.score(samples).total.tolist() for name, judge in self.scoring.items()}


def compare_answers(
    comparing: Mapping[str, PairJudge],
    prompts: Sequence[str],
    texts: tuple[Sequence[str], Sequence[str]],
    scores: tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]],
) -> Iterator[tuple[str, list[float]]]:
    """Name and preferences of each judge, the run's own rewards first.

    Args:
        comparing: judges that see both answers.
        texts: our answers and theirs.
        scores: of these, by judge that scores; the rewards' own under `OWN`.
    """
    for name in scores[0]:
        yield name, preferences(scores[0][name], scores[1][name])
    for name, judge in comparing.items():
        yield name, judge.compare(prompts, *texts)


def check_judges(config: PPOConfig) -> None:
    """Everything that can be wrong with the judges and needs no model to be seen, before any is loaded."""
    for spec in config.judges:
        if open_pair_judge(spec) is None:
            check_rewards(_alone(config, as_reward(spec)))


def _scorer(spec: RewardSpec, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig) -> RewardComputer:
    alone = _alone(config, spec)
    source = spec.source
    if isinstance(source, str) and has_head(source) and source != models.reward.source:
        with forked_random_state(models.device):
            models = replace(models, reward=load_reward(alone, models.sft.backbone, f"judge {spec.label}"))
    return RewardComputer(models, tokenizer, alone)


def _alone(config: PPOConfig, judge: RewardSpec) -> PPOConfig:
    """The settings with this judge as the one reward: an environment's rewards are none of its own."""
    return replace(config, rewards=(judge,), judges=(), environment=(), tools=(), discount="token")
