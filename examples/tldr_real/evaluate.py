# python -m examples.tldr_real.evaluate runs/tldr-real/seed-0
# not run: needs the runs that `python -m examples.tldr_real.run` makes; a test runs it on a tiny model
"""Held-out posts before SFT, after SFT and after PPO with each reward, sampled and greedy.

In: the folder of a seed. Out: `results.json` in it: means of every measure, what each answer scored, win
rates. Beside the models stand the person's own summary and the first sentence of the post.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from examples.tldr_real.measures import copied, first_sentence, rouge, words
from proxima import PPOTrainer, RewardSpec, SequenceGenerator
from proxima.core.types import Prompt
from proxima.data import read_prompts
from proxima.evaluator import answer, open_run, preferences, repetition, saved_config, share_won
from proxima.runs import write_json

BEFORE, SFT, BY_ROUGE, BY_REWARD = "before SFT", "after SFT", "PPO (ROUGE-L)", "PPO (reward model)"
MODELS = BEFORE, SFT, BY_ROUGE, BY_REWARD
PERSON, COPY = "the person", "first sentence"
RUNS = {BY_ROUGE: "ppo-rouge", BY_REWARD: "ppo-reward"}
JUDGE = "reward_model"
COMPARED = (
    (SFT, BEFORE),
    (BY_ROUGE, SFT),
    (BY_REWARD, SFT),
    (BY_REWARD, BY_ROUGE),
    *((name, PERSON) for name in (SFT, BY_ROUGE, BY_REWARD)),
)
DECODING: dict[str, dict[str, float]] = {"sampled": {}, "greedy": {"top_k": 1}}
"""Settings to sample with, beside those of the runs."""


def evaluate(folder: Path) -> dict:
    judge = RewardSpec(str(folder / "reward"), name=JUDGE)
    run = folder / RUNS[BY_ROUGE]
    trainer = open_run(run, saved_config(run).rewards, judges=(judge,))
    prompts = [*read_prompts(folder / "held_out.jsonl", trainer.tokenizer)]
    results: dict = {name: {} for name in DECODING}
    results[PERSON] = given(trainer, prompts, [str(prompt.columns["summary"]) for prompt in prompts])
    results[COPY] = given(trainer, prompts, [first_sentence(prompt) for prompt in prompts])
    answer_all(trainer, prompts, SFT, results)
    for name, run_name in RUNS.items():
        trainer.load(folder / run_name)
        answer_all(trainer, prompts, name, results)
    del trainer
    raw = replace(saved_config(run), sft_adapter="", judges=(judge,))
    answer_all(PPOTrainer(raw), prompts, BEFORE, results)
    results = {"posts": len(prompts), "reward": read_json(folder / "reward" / "reward.json"), **results}
    return {**results, "win_rates": win_rates([results])}


def win_rates(seeds: Sequence[dict]) -> dict[str, dict]:
    """By decoding, then "ours against theirs", then judge: rate, low, high. Over seeds, a post counts once,
    with the mean of its preferences, so that the interval is that of the posts."""
    found: dict[str, dict] = {}
    for decoding in DECODING:
        sides = [{**seed[decoding], PERSON: seed[PERSON]} for seed in seeds]
        for ours, theirs in COMPARED:
            for judge in ("rouge_l", JUDGE):
                if theirs == PERSON and judge == "rouge_l":
                    continue  # the person's summary is what ROUGE-L is measured against
                columns = (
                    [side[ours]["each"][judge] for side in sides],
                    [side[theirs]["each"][judge] for side in sides],
                )
                won = [preferences(*map(numbers, pair)) for pair in zip(*columns, strict=True)]
                by_post = [fmean(each) for each in zip(*won, strict=True)]
                found.setdefault(decoding, {}).setdefault(f"{ours} against {theirs}", {})[judge] = {
                    **share_won(by_post),
                    "seeds": [mean_known(each) for each in won],
                }
    return found


def mean_known(values: Sequence[float]) -> float:
    """Without nan; nan where nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def numbers(column: Sequence[float | None]) -> list[float]:
    """As JSON holds them: null is nan."""
    return [math.nan if value is None else value for value in column]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def answer_all(trainer: PPOTrainer, prompts: Sequence[Prompt], name: str, results: dict) -> None:
    """The policy's answers by each decoding, with the same noise for every model."""
    config = trainer.config
    for decoding, sampling in DECODING.items():
        trainer.generator = SequenceGenerator(trainer.models, trainer.tokenizer, replace(config, **sampling))
        found = answer(trainer, prompts)
        rated = rate(prompts, found.texts, found.scores[JUDGE])
        kl = (
            found.measured["kl_exact"] if name in RUNS and not sampling else math.nan
        )  # greedy has no distribution
        rated["means"] |= {"kl": kl, "tokens": found.measured["response_length"]}
        rated["means"] |= {
            "eos_rate": found.measured["eos_rate"],
            "band": found.measured["reward/length_band"],
        }
        results[decoding][name] = {**rated, "answers": found.texts}


def given(trainer: PPOTrainer, prompts: Sequence[Prompt], texts: Sequence[str]) -> dict:
    """Texts that no model wrote; a space begins them, as it begins the answers."""
    scores = trainer.judges.scoring[JUDGE].compute_rewards(prompts, [f" {text}" for text in texts])
    return rate(prompts, texts, scores)


def rate(prompts: Sequence[Prompt], texts: Sequence[str], scores: Sequence[float]) -> dict:
    """`each` answer's scores by which win rates are judged, and means of everything."""
    summaries = [str(prompt.columns["summary"]) for prompt in prompts]
    measured = rouge(summaries, texts)
    shares = [copied(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    means = {
        **{name: fmean(column) for name, column in measured.items()},
        JUDGE: mean_known(scores),
        "copied": mean_known(shares),
        "repetition": repetition(texts),
        "words": fmean(len(words(text)) for text in texts),
    }
    return {"means": means, "each": {"rouge_l": measured["rouge_l"], JUDGE: list(scores)}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Evaluate the models of a seed on held-out posts.")
    parser.add_argument("folder", type=Path, help="runs/tldr-real/seed-N")
    folder = parser.parse_args(arguments).folder
    try:
        write_json(folder / "results.json", evaluate(folder))
    except (OSError, ValueError) as error:
        sys.exit(f"tldr_real: {error}")
    print(f"saved to {folder / 'results.json'}")


if __name__ == "__main__":
    main()
