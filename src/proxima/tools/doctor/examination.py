"""The doctor's round.

In: a config and data. Out: findings: those that need no weights, then those of one unchanging step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from proxima.base_setup.gguf_files import is_gguf
from proxima.base_setup.loading import load_config, model_path
from proxima.base_setup.tokenizer_setup import eos_token_ids, load_tokenizer
from proxima.config import PPOConfig
from proxima.core.errors import RewardFailure
from proxima.core.hub import hub_or_cache
from proxima.core.tokenizer import Tokenizer
from proxima.data import open_rows, read_prompts
from proxima.data.rows import Rows
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, check_rewards
from proxima.rewards.model_reward import ClassifierSource
from proxima.tools.doctor.finding import Finding, fail
from proxima.tools.doctor.resource_checks import check_disk, check_memory, check_threads
from proxima.tools.doctor.reward_checks import (
    check_ending,
    check_endpoint,
    check_padding,
    check_reward_model,
    check_reward_scale,
    is_flat,
    is_reward_model,
    padded_samples,
)
from proxima.tools.doctor.settings_checks import (
    check_batches,
    check_idle_settings,
    check_learning_rates,
    check_reach,
    check_remote_code,
    check_rewards_given,
)
from proxima.tools.doctor.step_checks import (
    check_deterministic,
    check_ends,
    check_gap,
    check_kl,
    check_ratio,
    tolerance_of,
    unchanging,
)
from proxima.tools.doctor.tokenizer_checks import (
    check_chat_template,
    check_context,
    check_eos,
    check_pad,
    check_prompt_ends,
    check_vocabulary,
    measure_prompts,
    prompt_lengths,
)

ROUNDS = 16  # so often prompts are sampled, at most, until two scores differ
QUICK_PROMPTS = 2048  # measured at the start of a run, which checks all of them itself


def examine(
    config: PPOConfig,
    data: str | Rows,
    limit: int = 0,
    epochs: int = 1,
    samples: int = 16,
    validation: str = "",
) -> list[Finding]:
    """Everything. What the user can mend is a finding, never an exception.

    Args:
        samples: prompts of the unchanging step, drawn evenly from the data; while all score the same, as many
            more are sampled, up to 16 times.
    """
    if samples < 1:
        raise ValueError(f"samples ({samples}) must be at least 1")
    try:
        tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
        rows = open_rows(data, limit)
        template = check_chat_template(rows, tokenizer)
        if template.level == "fail":
            return [template]
        prompts = read_prompts(rows, tokenizer)
        found = [template, *quick_findings(config, prompts, tokenizer, epochs, len(prompts))]
        lengths = prompt_lengths(prompts, tokenizer)
        context = context_of(config)
        if validation:
            held_out = prompt_lengths(read_prompts(validation, tokenizer), tokenizer)
            found.append(check_context(config, held_out, context, "validation context"))
    except (ValueError, OSError) as error:
        return [fail("setup", str(error), "correct it and ask the doctor again")]
    room = (context or float("inf")) - config.max_new_tokens
    usable = (
        range(len(prompts))
        if config.truncate_prompts
        else [i for i, length in enumerate(lengths) if length <= room]
    )
    if room < 1 or not usable or any(item.level == "fail" and item.name in NEEDED for item in found):
        return found
    count = min(samples, len(usable))
    rounds = (
        [prompts[usable[(i * len(usable) // count + turn) % len(usable)]] for i in range(count)]
        for turn in range(ROUNDS)
    )
    return found + step_findings(config, next(rounds), rounds)


NEEDED = ("vocabulary", "memory", "reward")
"""Without these no step can be walked."""


def context_of(config: PPOConfig) -> int | None:
    network = load_config(config.model_name, config.trust_remote_code)
    return getattr(network.get_text_config(), "max_position_embeddings", None)


def quick_findings(
    config: PPOConfig,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    epochs: int = 1,
    measured: int = QUICK_PROMPTS,
) -> list[Finding]:
    """What can be seen without weights: settings, tokenizer, prompts, memory, disk, endpoints, reports of
    reward models.

    Raises a ValueError where a reward cannot be opened at all.
    """
    check_rewards(config)
    network = load_config(config.model_name, config.trust_remote_code)
    ends = ends_of(config, tokenizer, network)
    lengths, ended = measure_prompts(prompts[:measured], tokenizer, ends)
    context = getattr(network.get_text_config(), "max_position_embeddings", None)
    longest = max(lengths) if context is None else min(max(lengths), max(1, context - config.max_new_tokens))
    return [
        check_rewards_given(config),
        check_learning_rates(config),
        check_batches(config, len(prompts), epochs),
        check_reach(config),
        check_idle_settings(config),
        check_remote_code(config),
        check_pad(tokenizer),
        check_vocabulary(tokenizer, network),
        check_eos(ends, network),
        check_prompt_ends(tokenizer, ended, len(lengths)),
        check_context(config, lengths, context),
        check_memory(config, network, longest),
        check_disk(config, network),
        check_threads(config),
        *(check_endpoint(spec, prompts[0], tokenizer) for spec in config.rewards if spec.is_http),
        *(check_reward_model(spec) for spec in config.rewards if is_reward_model(spec)),
    ]


def ends_of(config: PPOConfig, tokenizer: Tokenizer, network: Any) -> tuple[int, ...]:
    """Every id that will end a response, from the files beside the weights."""
    path = model_path(config.model_name)
    try:
        with hub_or_cache(path):
            generation: Any = None if is_gguf(path) else GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    return eos_token_ids(tokenizer, SimpleNamespace(config=network, generation_config=generation))


def step_findings(
    config: PPOConfig, prompts: Sequence[str], more: Iterable[Sequence[str]] = ()
) -> list[Finding]:
    """What only the models can show: one PPO step on these prompts that learns nothing and writes nothing.

    Args:
        more: prompts to sample as well while all scores are the same: a good reward may be rare.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is found above
            trainer = PPOTrainer(unchanging(config))
        found = [check_deterministic(trainer, prompts), *padding_findings(trainer, prompts)]
        results = trainer.ppo_step(prompts)
        scores = scores_until_two_differ(trainer, results["rewards"], more)
    except RewardFailure:
        reason = trainer.reward_computer.last_failure
        return [*found, fail("reward failures", f"no sample got a score: {reason}", "mend the reward")]
    except ValueError as error:
        return [fail("one step", str(error), "correct it and ask the doctor again")]
    tolerance = tolerance_of(trainer)
    return [
        *found,
        check_kl(results, tolerance),
        check_ratio(results, tolerance),
        check_gap(results, config, tolerance),
        *(
            check_ending(spec, source)
            for spec, source in trainer.reward_computer.rewards
            if isinstance(source, ClassifierSource)
        ),
        *check_reward_scale(scores, config, len(prompts)),
        check_ends(results, config),
    ]


@torch.no_grad()
def scores_until_two_differ(
    trainer: PPOTrainer, scores: list[float], more: Iterable[Sequence[str]]
) -> list[float]:
    """These scores, and those of more samples for as long as no two differ and most come; every round has
    its own noise."""
    found = list(scores)
    for step, prompts in enumerate(more, trainer.step + 1):
        if not is_flat(found) or sum(map(math.isnan, found)) > len(found) / 2:
            break
        found += trainer.reward_computer.score_tokens(trainer.generator.sample(prompts, step)).total.tolist()
    return found


@torch.no_grad()
def padding_findings(trainer: PPOTrainer, prompts: Sequence[str]) -> list[Finding]:
    """One for every reward, on the first prompt and its sampled response."""
    trainer.reward_computer.check_columns(prompts)
    sampled = Samples.of_tokens(trainer.generator.sample(prompts[:1]))
    alone, beside = padded_samples(
        sampled.prompts[0], sampled.completion_ids[0], trainer.tokenizer, trainer.models.device
    )
    tolerance = tolerance_of(trainer)
    return [
        check_padding(spec, source, alone, beside, tolerance)
        for spec, source in trainer.reward_computer.rewards
    ]
