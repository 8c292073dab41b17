"""The findings of runs that really trained: the embedded model under a sound reward, one that can be gamed, and
learning rates with which nothing good happens."""

import math

import pytest

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

    def train(reward, steps=20, asked=64, **settings):
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
        done = PPOTrainer(config).train(posts["train"][: steps * BATCH], 1, posts["eval"][:asked])
        run = Run(done.run_folder)
        metrics = run.metrics()
        return run, {each.question: each for each in find(metrics, run.samples(), held_out(run, metrics))}

    return train


def test_a_good_run(trained):
    run, found = trained(gold)
    assert (found[LEARNED].answer, found[LEARNED].status) == ("yes", "good")
    assert found[GAMED].status == "good"
    assert found[COST].status != "bad"
    assert found[LEARNED].sentence.split(":")[0] in summary(run)


def test_a_run_that_games_its_reward(trained):
    """The reward rises to the end, and the judge likes the answers less and less."""
    run, found = trained(wordy, asked=192, missing_eos_penalty=1.0, lr_schedule="constant")
    rewards = list(filter(math.isfinite, run.metrics()["validation/reward"]))
    assert rewards[-1] > 1.3 * rewards[0]
    assert (found[GAMED].answer, found[GAMED].status) == ("yes", "bad")
    assert found[LEARNED].status == "bad"
    lengths = list(filter(math.isfinite, run.metrics()["validation/response_length"]))
    assert lengths[-1] > 1.2 * lengths[0]
    assert found[NEXT].sentence.startswith(f"Take the checkpoint nearest to step {found[GAMED].step}, keep")


def test_a_run_that_stands_still(trained):
    _, found = trained(gold, steps=12, learning_rate=1e-12)
    assert (found[LEARNED].answer, found[LEARNED].status) == ("not shown", "open")
    assert found[COST].answer == "almost nothing"
    assert "The policy hardly moves: raise learning_rate (it was 1.00e-12)" in found[NEXT].sentence


def test_a_run_that_collapses(trained):
    """A learning rate this high spoils the first update, so only the model before it is sound."""
    _, found = trained(gold, steps=12, learning_rate=0.5)
    assert (found[LEARNED].answer, found[LEARNED].status) == ("no", "bad")
    assert "The policy collapsed" in found[LEARNED].sentence
    assert found[COST].status == "bad"
    back = "Go back to the checkpoint nearest to step 0, and lower learning_rate (it was 0.5)"
    assert found[NEXT].sentence.startswith(back)


def test_a_run_that_is_too_short(trained):
    _, found = trained(gold, steps=5)
    assert found[GAMED].answer == found[COST].answer == "too early to say"
    assert found[LEARNED].status != "bad"
    assert found[NEXT].sentence.startswith("Train for 10 steps or more")
