"""Items to label. In: prompts and a model, or a file of ready completions. Out: `Item`s.

The noise of a sample follows from (seed, step, prompt): the same call gives the same items, and two sides
differ in `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from proxima.base_setup import BaseSetup
from proxima.config import PPOConfig
from proxima.core.terminal_text import is_encodable
from proxima.data import BrokenData, flag_of, open_rows
from proxima.pages.label.label_store import Item
from proxima.ppo_trainer import SequenceGenerator

TRIES = 5
"""How often the second side is sampled before a prompt is given up because both sides are the same."""
BATCH = 32
"""Prompts in one batch. Memory only: what is sampled does not depend on it."""

Sample = tuple[str, bool]
"""A completion, and whether it finished."""
Sampler = Callable[[Sequence[str], int], list[Sample]]
"""From prompts, all different, and a step to one sample per prompt."""


def model_sampler(config: PPOConfig) -> Sampler:
    """Load a model to sample from."""
    setup = BaseSetup(config)
    generator = SequenceGenerator(setup.models, setup.tokenizer, config)

    def sample(prompts: Sequence[str], step: int) -> list[Sample]:
        found: list[Sample] = []
        for start in range(0, len(prompts), BATCH):
            tokens = generator.sample(prompts[start : start + BATCH], step)
            found += zip(tokens.texts(), tokens.ended.tolist(), strict=True)
        return found

    return sample


def sample_items(
    prompts: Sequence[str], config: PPOConfig, mode: str, adapter: str = "", adapter_b: str | None = None
) -> list[Item]:
    """One item per prompt, or none where both sides stay the same. A prompt that occurs again in the list
    gets other noise.

    Args:
        adapter: folder of a policy adapter; empty = the model as it is.
        adapter_b: that of the second side; None = the same model.
    """
    seen: Counter[str] = Counter()
    steps = []
    for prompt in prompts:
        steps.append(seen[prompt] * (TRIES + 1))
        seen[prompt] += 1
    sampler = model_sampler(replace(config, sft_adapter=adapter))
    source = source_b = adapter or config.model_name
    first = _draw(sampler, prompts, steps)
    if mode == "ratings":
        pairs = zip(prompts, first, strict=True)
        return [Item(prompt, text, a_ended=ended, a_model=source) for prompt, (text, ended) in pairs]
    if adapter_b is not None and adapter_b != adapter:
        sampler = model_sampler(replace(config, sft_adapter=adapter_b))
        source_b = adapter_b or config.model_name
    second = list(first)
    for attempt in range(1, TRIES + 1):
        same = [place for place, sample in enumerate(second) if sample[0] == first[place][0]]
        drawn = _draw(sampler, [prompts[place] for place in same], [steps[place] + attempt for place in same])
        for place, sample in zip(same, drawn, strict=True):
            second[place] = sample
    return [
        Item(prompt, a, b, a_ended, b_ended, source, source_b)
        for prompt, (a, a_ended), (b, b_ended) in zip(prompts, first, second, strict=True)
        if a != b
    ]


def _draw(sampler: Sampler, prompts: Sequence[str], steps: Sequence[int]) -> list[Sample]:
    """One sample per prompt, the prompts of one step together."""
    found: dict[int, Sample] = {}
    for step in sorted(set(steps)):
        places = [place for place, own in enumerate(steps) if own == step]
        found |= zip(places, sampler([prompts[place] for place in places], step), strict=True)
    return [found[place] for place in range(len(prompts))]


def read_items(path: str | Path, mode: str) -> list[Item]:
    """Ready completions: rows of `prompt`, `a`, `b` or `prompt`, `chosen`, `rejected`; for ratings
    `prompt`, `completion`. `a_ended` and so on are read where given."""
    items = []
    rows = open_rows(path)
    for number, row in enumerate(rows):
        names = ["completion"] if mode == "ratings" else ["a", "b"]
        if mode == "pairs" and isinstance(row, dict) and "chosen" in row:
            names = ["chosen", "rejected"]
        for name in ("prompt", *names):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise ValueError(f"{rows.where(number)}: `{name}` is missing or not a string")
            if not is_encodable(row[name]):
                raise ValueError(
                    f"{rows.where(number)}: `{name}` holds half of a surrogate pair; fix the text"
                )
        texts = {name: text for name, text in row.items() if isinstance(text, str)}
        sides = [texts[name] for name in names]
        flags = ["ended" if name == "completion" else f"{name}_ended" for name in names]
        try:
            ended = [flag_of(row, flag) for flag in flags]
        except BrokenData as error:
            raise ValueError(f"{rows.where(number)}: {error}") from None
        if mode == "ratings":
            items.append(Item(texts["prompt"], sides[0], a_ended=ended[0], a_model=str(path)))
        else:
            items.append(Item(texts["prompt"], sides[0], sides[1], ended[0], ended[1], names[0], names[1]))
    return items


def read_controls(path: str | Path, mode: str) -> tuple[list[Item], list[str]]:
    """Items whose answer is known, and the answers: rows of `prompt`, `chosen`, `rejected`; for ratings
    `prompt`, `completion`, `rating` from 1 to 5."""
    items, rows = read_items(path, mode), open_rows(path)
    if mode == "pairs":
        for number, item in enumerate(items):
            if item.a_model != "chosen":
                raise ValueError(f"{rows.where(number)}: a control question needs `chosen` and `rejected`")
        return items, ["a"] * len(items)
    ratings = [str(row.get("rating")) if isinstance(row, dict) else "" for row in rows]
    for number, rating in enumerate(ratings):
        if rating not in ("1", "2", "3", "4", "5"):
            raise ValueError(f"{rows.where(number)}: a control question needs a `rating` from 1 to 5")
    return items, ratings
