"""The findings of runs that really trained: the embedded model under a sound reward, one that can be gamed, and
learning rates with which nothing good happens."""

import pytest
import torch

from proxima.config import PPOConfig, RewardSpec
from proxima.pages.report import held_out, summary
from proxima.pages.report.findings import COST, GAMED, LEARNED, NEXT, find
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.world.demo_settings import PPO_SETTINGS
from proxima.world.gold import gold_score
from proxima.world.posts import facts_of, make_posts

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
BATCH = 32


def gold(prompts, completions, ended):
    """What a summary is worth; the reward, or the judge of another one."""
    rows = zip(prompts, completions, ended, strict=True)
    return [gold_score(facts_of(prompt), text, end) for prompt, text, end in rows]


def wordy(prompts, completions):
    """A reward that can be gamed: words, whatever they say."""
    return [len(text.split()) / 20 for text in completions]


@pytest.fixture(scope="module")
def posts():
    return {name: [post.prompt for post in make_posts(640, name, seed=3)] for name in ("train", "eval")}


@pytest.fixture
def trained(posts, tmp_path):
    """Trains the embedded model; the run, and its findings by question."""

    def train(reward, steps=20, **settings):
        config = PPOConfig(
            "embedded",
            **{
                **PPO_SETTINGS,
                "batch_size": BATCH,
                "rewards": (RewardSpec(reward),),
                "judges": (RewardSpec(gold, name="gold"),),
                "eval_every": 4,
                "token_samples": 0,
                "checkpoint_every": 0,
                "run_dir": str(tmp_path),
                "device": "cpu",
                **settings,
            },
        )
        done = PPOTrainer(config).train(posts["train"][: steps * BATCH], 1, posts["eval"][:64])
        run = Run(done.run_folder)
        metrics = run.metrics()
        return run, {each.question: each for each in find(metrics, run.samples(), held_out(run, metrics))}

    return train


def show(run, found):
    import os
    if os.environ.get("SHOW"):
        print()
        for each in found.values():
            print(each.question, "|", each.answer, "|", each.status, "|", each.sentence)
            for e in each.evidence: print("     ", e)


def test_a_good_run(trained):
    run, found = trained(gold)
    show(run, found)


def test_a_gamed(trained):
    run, found = trained(wordy)
    show(run, found)

def test_b_stuck(trained):
    run, found = trained(gold, steps=12, learning_rate=1e-12)
    show(run, found)


def test_c_collapsed(trained):
    run, found = trained(gold, steps=12, learning_rate=0.5)
    show(run, found)


def test_d_short(trained):
    run, found = trained(gold, steps=5)
    show(run, found)
