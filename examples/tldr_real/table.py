# python -m examples.tldr_real.table runs/tldr-real/seed-0 runs/tldr-real/seed-1 runs/tldr-real/seed-2
# not run: needs the results that `python -m examples.tldr_real.run` writes; a test makes some
"""The results of one or more seeds as Markdown tables.

In: folders of seeds. Out: means over the seeds, from the lowest seed to the highest in brackets; win rates
with their 95 % interval over posts.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from examples.tldr_real.evaluate import COPY, DECODING, JUDGE, MODELS, PERSON, numbers, read_json, win_rates

SHOWN = {
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    JUDGE: "reward model",
    "kl": "KL to SFT",
    "tokens": "tokens",
    "words": "words",
    "band": "length band",
    "eos_rate": "EOS rate",
    "copied": "copied 4-grams",
    "repetition": "repeated 4-grams",
}
TITLES = {"sampled": "sampled, temperature 1", "greedy": "greedy"}
SAME = ("data", "model_name", "short", "preferences")


def tables(folders: Sequence[Path]) -> str:
    seeds = [read_json(folder / "results.json") for folder in folders]
    tasks = [read_json(folder / "task.json") for folder in folders]
    for name in SAME:
        if len({task[name] for task in tasks}) > 1:
            raise ValueError(f"the seeds differ in {name}: {', '.join(task[name] for task in tasks)}")
    count, accuracy = seeds[0]["posts"], [seed["reward"]["accuracy"] for seed in seeds]
    parts = [
        f"{count} held-out posts; seed {', '.join(task['seed'] for task in tasks)}. Accuracy of the reward "
        f"model on pairs that it was not trained on (a person's summary, an SFT sample): {cell(accuracy)}."
    ]
    for decoding in DECODING:
        rows = {name: [seed[decoding][name]["means"] for seed in seeds] for name in MODELS}
        rows |= {name: [seed[name]["means"] for seed in seeds] for name in (PERSON, COPY)}
        parts.append(model_table(TITLES[decoding], rows))
    parts += [win_table(seeds), time_table(folders)]
    return "\n\n".join(parts) + "\n"


def samples(folder: Path, count: int) -> str:
    """The first posts' titles, or whatever the prompts begin with, and what was made of them."""
    results = read_json(folder / "results.json")
    lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    parts = []
    for at, row in enumerate(map(json.loads, lines)):
        parts.append(" ".join(row["prompt"].split())[:200])
        parts.append(f"- {PERSON}: {row['summary']}")
        for decoding in DECODING:
            answers = ((name, results[decoding][name]["answers"][at]) for name in MODELS)
            parts += [f"- {name}, {decoding}: {' '.join(text.split())}" for name, text in answers]
        parts.append("")
    return "\n".join(parts)


def model_table(title: str, rows: dict[str, list[dict]]) -> str:
    body = [
        [name, *(cell(numbers([means.get(measure) for means in seeds])) for measure in SHOWN)]
        for name, seeds in rows.items()
    ]
    return markdown([title, *SHOWN.values()], body)


def win_table(seeds: Sequence[dict]) -> str:
    body = []
    for decoding, compared in win_rates(seeds).items():
        for sides, judged in compared.items():
            cells = [interval(judged[judge]) if judge in judged else "" for judge in ("rouge_l", JUDGE)]
            body.append([f"{sides}, {decoding}", *cells])
    return markdown(["win rate (95 % interval)", "by ROUGE-L", "by the reward model"], body)


def time_table(folders: Sequence[Path]) -> str:
    taken: dict[str, list[float]] = {}
    for folder in folders:
        lines = (folder / "times.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = {row["stage"]: row["seconds"] for row in map(json.loads, lines)}
        for name, value in (*seconds.items(), ("all", sum(seconds.values()))):
            taken.setdefault(name, []).append(value)
    return markdown(["stage", "seconds"], [[name, cell(values)] for name, values in taken.items()])


def cell(values: Sequence[float]) -> str:
    """The mean, and the range where there is more than one seed."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    mean = f"{fmean(known):.3g}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.3g} to {max(known):.3g})"


def interval(rate: dict) -> str:
    each = f"; seeds {', '.join(f'{one:.2f}' for one in rate['seeds'])}" if len(rate["seeds"]) > 1 else ""
    return f"{rate['rate']:.2f} ({rate['low']:.2f} to {rate['high']:.2f}{each})"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables of one or more seeds, in Markdown.")
    parser.add_argument("folders", type=Path, nargs="+", help="runs/tldr-real/seed-N")
    parser.add_argument("--out", type=Path, help="also write them to this file")
    parser.add_argument("--samples", type=int, default=0, help="instead: this many posts and answers")
    given = parser.parse_args(arguments)
    try:
        text = samples(given.folders[0], given.samples) if given.samples else tables(given.folders)
    except (OSError, ValueError) as error:
        sys.exit(f"tldr_real: {error}")
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
