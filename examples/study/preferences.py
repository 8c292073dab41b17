# python -m examples.study.preferences
# not run: an hour on two cores
"""From preferences to a policy, seed by seed: is it truly better, and does it stay so? In: seeds, settings.
Out: a table, and NAME.json in the folder.

    python -m examples.study.preferences --folder runs/study --jobs 5
    python -m examples.study.preferences --reward '{"lm_coef": 0}' --ppo '{"kl_coef": 0.2}' --preset stable

Each seed trains a reward model on the shipped pairs with default settings and runs PPO for twice the demo's
long runs: as a preset says, with `max_new_tokens` and nothing else, or with settings made for this world. The
gold score judges held-out posts along the way; training never sees it. A seed whose reward model or row is in
the folder already is not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch

from examples.study.learn import in_jobs
from proxima.base_setup import EMBEDDED
from proxima.config import PPOConfig, RewardConfig, RewardSpec
from proxima.core.json_record import Record, RecordView
from proxima.evaluator import win_rate
from proxima.finetuning import RewardTrainer, read_preferences
from proxima.models import REPORT_FILE
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import write_json
from proxima.world.demo.gold_judge import Judgement, judge, judge_best_of
from proxima.world.demo_settings import MAX_NEW_TOKENS
from proxima.world.posts import make_posts
from proxima.world.words import OPENING

STEPS = 80
EVERY = 10  # steps between judgements
POSTS = 300
BEST_OF = 16
GIVEN: Record = {  # to a preset: the length of responses, and what is written down
    "max_new_tokens": MAX_NEW_TOKENS,
    "eval_every": 1000,
    "checkpoint_every": 0,
    "token_samples": 0,
}
BY_HAND: Record = {  # without a preset: what suits this model, sampled from all tokens
    "learning_rate": 1e-3,
    "value_learning_rate": 2e-3,
    "batch_size": 64,
    "minibatch_size": 32,
    "micro_batch_size": 16,
    "top_k": 0,
    "top_p": 1.0,
    "ppo_epochs": 2,
    "gamma": 1.0,
}


def study_seed(seed: int, folder: Path, name: str, given: RecordView) -> Record:
    """Train both models of one seed; its row of the table."""
    home = folder / f"{name}-{seed}"
    if (home / "row.json").is_file():
        return json.loads((home / "row.json").read_text(encoding="utf-8"))
    reward = Path(given["reward_from"]) / f"{given['reward_name']}-{seed}" / "reward"
    if not (reward / REPORT_FILE).is_file():
        reward = train_reward(home, seed, given["reward"], given["pairs"])
    row = {"name": name, "seed": seed, "reward_model": json.loads((reward / REPORT_FILE).read_text())}
    if given["steps"]:
        row |= run_ppo(home, reward, seed, given)
    write_json(home / "row.json", row)
    return row


def train_reward(home: Path, seed: int, settings: RecordView, pairs: int) -> Path:
    """A reward model from the shipped pairs; its report gets its accuracy on the shipped held-out pairs."""
    config = RewardConfig("embedded", seed=seed, run_dir=str(home), run_name="reward", **settings)
    trainer = RewardTrainer(config)
    results = trainer.train(read_preferences(EMBEDDED / "preferences_train.jsonl.gz", limit=pairs))
    held_out = [trainer.encode(item) for item in read_preferences(EMBEDDED / "preferences_eval.jsonl.gz")]
    with torch.no_grad(), trainer.role.active():
        measured = trainer.measure(held_out)
    report = json.loads((results.folder / REPORT_FILE).read_text())
    write_json(results.folder / REPORT_FILE, {**report, "shipped_accuracy": measured["accuracy"]})
    return results.folder


def run_ppo(home: Path, reward: Path, seed: int, given: RecordView) -> Record:
    """PPO on the reward model, judged every few steps; the last judgement against the first."""
    preset = given["preset"]
    made = {**GIVEN, **({} if preset else BY_HAND), **given["ppo"]}
    options = {} if given["doubt"] is None else {"doubt_coef": given["doubt"]}
    run: Record = {
        "model_name": "embedded",
        "rewards": (RewardSpec(str(reward), options=options),),
        "seed": seed,
        "run_dir": str(home),
        "run_name": "ppo",
    }
    config = PPOConfig.from_preset(preset, **made, **run) if preset else PPOConfig(**made, **run)
    trainer = PPOTrainer(config)
    posts = make_posts(POSTS, "eval", seed + 2)
    judged: list[tuple[int, Judgement]] = [(0, judge(trainer, posts))]
    compared = judge_best_of(trainer, posts, BEST_OF) if given["best_of"] else []
    step = trainer.ppo_step

    def judged_step(prompts: Sequence[str], next_prompts: Sequence[str] | None = None) -> Record:
        outcome = step(prompts, next_prompts)
        if trainer.step % EVERY == 0:
            judged.append((trainer.step, judge(trainer, posts)))
        return outcome

    trainer.ppo_step = judged_step
    count = given["steps"] * trainer.config.batch_size
    prompts = [post.prompt for post in make_posts(count, "train", seed + 4)]
    trainer.train(prompts, resume=True)  # begins again where it was killed
    win = win_rate(judged[-1][1].gold, judged[0][1].gold, seed)
    return {"curve": [{"step": at, **told(one)} for at, one in judged], "win_rate": win, "best_of": compared}


def told(one: Judgement) -> dict[str, float]:
    opened = sum(text.strip().lower().startswith(OPENING) for text in one.texts) / len(one.texts)
    return {**one.summary(), "opening": opened}


def show(rows: Sequence[RecordView]) -> None:
    print(
        f"\n{'name':>14} {'seed':>4} {'accuracy':>9} {'gold, every ' + str(EVERY) + ' steps':<60} {'KL':>6}"
    )
    for row in rows:
        model, curve = row["reward_model"], row.get("curve", [])
        accuracy = model.get("shipped_accuracy", model["accuracy"])
        gold = " ".join(f"{point['gold']:.3f}" for point in curve)
        last = curve[-1] if curve else {}
        print(
            f"{row['name']:>14} {row['seed']:>4} {accuracy:>9.3f} {gold:<60} {last.get('kl', 0):>6.2f} "
            f"length {last.get('response_length', 0):.1f} opening {last.get('opening', 0):.2f}"
        )
        if row.get("best_of"):
            told_of = "  ".join(f"{one['n']}: {one['gold']:.3f} at {one['kl']:.2f}" for one in row["best_of"])
            print(f"{'best of':>19} {told_of}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/study"))
    parser.add_argument("--name", default="default", help="of the row and of its folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, one thread each")
    parser.add_argument("--pairs", type=int, default=0, help="first pairs to train on; 0 = all")
    parser.add_argument("--steps", type=int, default=STEPS, help="of PPO; 0 = the reward model alone")
    parser.add_argument("--reward", type=json.loads, default={}, help="changes to RewardConfig, as JSON")
    parser.add_argument("--ppo", type=json.loads, default={}, help="changes to the PPO settings, as JSON")
    parser.add_argument("--preset", default="", help="of PPO")
    parser.add_argument("--reward-name", default="", help="reuse the reward models of the rows of this name")
    parser.add_argument("--doubt", type=float, help="doubt_coef of an ensemble")
    parser.add_argument("--best-of", action="store_true", help="also the best of n answers")
    given = vars(parser.parse_args())
    folder, name = given.pop("folder"), given.pop("name")
    seeds, jobs = given.pop("seeds"), given.pop("jobs")
    given |= {"reward_from": str(folder), "reward_name": given["reward_name"] or name}
    rows = in_jobs(jobs, [partial(study_seed, seed, folder, name, given) for seed in seeds])
    write_json(folder / f"{name}.json", rows)
    show(rows)
    print(f"written to {folder / f'{name}.json'}")


if __name__ == "__main__":
    main()
