"""Runs the checks in order.

In: a config and data. Out: findings: first those that need no weights, then those of one PPO step that learns
nothing. Each check is a function in one of the `*_checks` modules and returns a `Finding`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from proxima.base_setup import eos_token_ids, is_gguf, load_config, load_tokenizer, model_path
from proxima.config import PPOConfig
from proxima.core.context_length import context_length
from proxima.core.errors import RewardFailure
from proxima.core.hub import hub_or_cache
from proxima.core.tokenizer import Tokenizer
from proxima.data import Rows, open_rows, read_prompts
from proxima.environments import max_response_tokens
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import ClassifierSource, Samples, check_rewards
from proxima.tools.doctor.audit_checks import NO_ANSWERS, answers_in_data, audit
from proxima.tools.doctor.canary_checks import canary
from proxima.tools.doctor.finding import Finding, fail
from proxima.tools.doctor.resource_checks import check_disk, check_memory, check_recording, check_threads
from proxima.tools.doctor.reward_checks import (
    check_ending,
    check_endpoint,
    check_padding,
    check_reward_model,
    check_reward_scale,
    is_flat,
    is_reward_model,
    padded_samples,
    reads_episodes,
)
from proxima.tools.doctor.role_weights import count_weights, without_weights
from proxima.tools.doctor.settings_checks import SETTINGS_CHECKS, check_batches, check_learning_rates
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
from proxima.tools.doctor.worker_checks import check_protections, constant_findings, cost_findings

ROUNDS = 16  # prompts are sampled at most this often until two scores differ
QUICK_PROMPTS = 2048  # measured at the start of a run, which itself checks all of them
Probe = Callable[[PPOTrainer, Sequence[str]], list[Finding]]
NEEDED = ("vocabulary", "memory", "reward", "recorded steps")
"""Where one of these fails, no step can run."""


def examine(
    config: PPOConfig,
    data: str | Rows,
    limit: int = 0,
    epochs: int = 1,
    samples: int = 16,
    validation: str = "",
    with_audit: bool = False,
    with_canary: bool = False,
) -> list[Finding]:
    """Run every check. What the user can fix is a finding, never an exception.

    Args:
        samples: prompts for the step that learns nothing, drawn evenly from the data; while all score the
            same, as many more are sampled, up to 16 times.
        with_audit: also probe the rewards with cheap tricks.
        with_canary: run the canary, in place of the step that learns nothing (beside it where the rewards are
            probed).
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
        found += check_protections(config)
        lengths = prompt_lengths(prompts, tokenizer)
        context = context_length(load_config(config.model_name, config.trust_remote_code))
        if validation:
            held_out = prompt_lengths(read_prompts(validation, tokenizer), tokenizer)
            found.append(check_context(config, held_out, context, "validation context"))
        shown = answers_in_data(rows, tokenizer, samples) if with_audit else NO_ANSWERS
    except (ValueError, OSError) as error:
        return [fail("setup", str(error), "fix it and run the doctor again")]
    room = (context or float("inf")) - max_response_tokens(config)
    fits = [config.truncate_prompts or length <= room for length in lengths]
    usable = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
    if room < 1 or not usable or any(item.level == "fail" and item.name in NEEDED for item in found):
        return found
    rounds = sampling_rounds(usable, samples)
    more: list[Probe] = [partial(audit, data=shown)] if with_audit else []
    if with_audit or not with_canary:
        found += step_findings(config, next(rounds), rounds, more)
    return found + canary_findings(config, usable) if with_canary else found


def sampling_rounds(prompts: Sequence[str], samples: int) -> Iterator[list[str]]:
    """Prompts drawn evenly from all, and other ones in each further round."""
    count = min(samples, len(prompts))
    for turn in range(ROUNDS):
        yield [prompts[(i * len(prompts) // count + turn) % len(prompts)] for i in range(count)]


def quick_findings(
    config: PPOConfig,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    epochs: int = 1,
    measured: int = QUICK_PROMPTS,
) -> list[Finding]:
    """What can be seen without weights: settings, tokenizer, prompts, memory, disk, endpoints, reward models'
    own reports.

    Raises:
        ValueError: a reward cannot be opened at all.
    """
    check_rewards(config)
    network = load_config(config.model_name, config.trust_remote_code)
    ends = ends_of(config, tokenizer, network)
    lengths, ended = measure_prompts(prompts[:measured], tokenizer, ends)
    context = context_length(network)
    longest = (
        max(lengths) if context is None else min(max(lengths), max(1, context - max_response_tokens(config)))
    )
    return [
        *(check(config) for check in SETTINGS_CHECKS),
        check_learning_rates(config, count_weights(without_weights(AutoModelForCausalLM, network))),
        check_batches(config, len(prompts), epochs),
        check_pad(tokenizer),
        check_vocabulary(tokenizer, network),
        check_eos(ends, network),
        check_prompt_ends(tokenizer, ended, len(lengths)),
        check_context(config, lengths, context),
        check_memory(config, network, longest),
        check_disk(config, network),
        *check_recording(config, network),
        check_threads(config),
        *(check_endpoint(spec, prompts[0], tokenizer) for spec in config.rewards if spec.is_http),
        *(check_reward_model(spec) for spec in config.rewards if is_reward_model(spec)),
    ]


def ends_of(config: PPOConfig, tokenizer: Tokenizer, network: PretrainedConfig) -> tuple[int, ...]:
    """Every id that will end a response, from the files beside the weights."""
    path = model_path(config.model_name)
    generation = None
    try:
        with hub_or_cache(path):
            generation = None if is_gguf(path) else GenerationConfig.from_pretrained(path)
    except OSError:
        pass  # many models have none
    return eos_token_ids(tokenizer, SimpleNamespace(config=network, generation_config=generation))


def step_findings(
    config: PPOConfig,
    prompts: Sequence[str],
    more: Iterable[Sequence[str]] = (),
    probes: Sequence[Probe] = (),
) -> list[Finding]:
    """What only the models can show: one PPO step on these prompts that learns and writes nothing.

    Args:
        more: further prompts to sample while all scores are the same, because a good reward may be rare.
        probes: what else to do with the same trainer and prompts, after the step.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checks above report the same
            trainer = PPOTrainer(unchanging(config))
        found = [check_deterministic(trainer, prompts), *padding_findings(trainer, prompts)]
        results = trainer.ppo_step(prompts)
        scores = scores_until_two_differ(trainer, results["rewards"], more)
        written = Samples.of_tokens(trainer.generator.sample(prompts))
        beyond = [
            *cost_findings(trainer, written, with_worker=bool(probes)),
            *constant_findings(trainer, prompts, results),
        ]
        probed = [finding for probe in probes for finding in probe(trainer, prompts)]
    except RewardFailure:
        reason = trainer.reward_computer.last_failure
        return [*found, fail("reward failures", f"no sample got a score: {reason}", "fix the reward")]
    except ValueError as error:
        return [fail("one step", str(error), "fix it and run the doctor again")]
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
        *check_reward_scale(scores, config, len(results["rewards"])),
        *beyond,
        check_ends(results, config),
        *probed,
    ]


def canary_findings(config: PPOConfig, prompts: Sequence[str]) -> list[Finding]:
    """Whether this setup learns a planted reward."""
    try:
        return [canary(config, prompts)]
    except ValueError as error:
        return [fail("canary", str(error), "fix it and run the doctor again")]


@torch.no_grad()
def scores_until_two_differ(
    trainer: PPOTrainer, scores: list[float], more: Iterable[Sequence[str]]
) -> list[float]:
    """These scores, and those of more samples while no two differ and most samples get one; every round has
    its own noise."""
    found = list(scores)
    for step, prompts in enumerate(more, trainer.step + 1):
        if not is_flat(found) or sum(map(math.isnan, found)) > len(found) / 2:
            break
        found += trainer.reward_computer.score_tokens(trainer.generator.sample(prompts, step)).total.tolist()
    return found


@torch.no_grad()
def padding_findings(trainer: PPOTrainer, prompts: Sequence[str]) -> list[Finding]:
    """One finding per reward of texts, on the first prompt and its sampled response."""
    trainer.reward_computer.check_columns(prompts)
    sampled = Samples.of_tokens(trainer.generator.sample(prompts[:1]))
    alone, beside = padded_samples(
        sampled.prompts[0], sampled.completion_ids[0], trainer.tokenizer, trainer.models.device
    )
    tolerance = tolerance_of(trainer)
    return [
        check_padding(spec, source, alone, beside, tolerance)
        for spec, source in trainer.reward_computer.rewards
        if not reads_episodes(spec, source)
    ]
