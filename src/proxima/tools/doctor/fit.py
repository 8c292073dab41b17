"""`proxima doctor --fit`: the largest micro-batch, batch and response that fit a device, found by trial.

Each trial is one PPO step in a process of its own (`fit_trial.py`), with every prompt as long as the longest
and every response cut at its limit, under a limit of memory. No trial is run that follows from another, and
none after ten minutes. In: a config, the longest prompt, a limit. Out: the settings that fitted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxima.base_setup import load_config, load_tokenizer, pick_device
from proxima.config import PPOConfig
from proxima.core.tokenizer import Tokenizer
from proxima.data import open_rows, read_prompts
from proxima.environments import max_response_tokens
from proxima.rewards import is_ready_made
from proxima.runtime.engine import MAX_SLOTS
from proxima.tools.doctor.memory_estimate import GIB, free_memory
from proxima.tools.doctor.tokenizer_checks import prompt_lengths

MOST_SEQUENCES = MAX_SLOTS  # per step: no more are generated at once, so more take hardly more memory
GROWTH = 4
NO_LIMIT = 32768  # response tokens that are tried at most where the model names no context length
REFINED = 2  # halvings of the gap between what fitted and what did not
MINUTES = 10  # of all trials together
OUT_OF_MEMORY = 75  # exit status of a trial that did not fit
NO_MEMORY = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL)  # compiled libraries abort; so may the system

Trial = Callable[[PPOConfig], bool]


@dataclass(frozen=True)
class Fit:
    """What fitted, each with the others as they are."""

    micro_batch_size: int
    micro_batch_tokens: int
    batch_size: int
    longest_response: int
    """With the batch of the config, or the largest that fits."""
    limit: int
    """Bytes."""
    in_time: bool = True
    """Whether nothing was left untried for want of time."""

    @property
    def settings(self) -> dict[str, int]:
        names = ("micro_batch_size", "micro_batch_tokens", "batch_size")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.settings.items()]
        head = [
            f"# fits {self.limit / GIB:.1f} GiB; responses of up to {self.longest_response} tokens fitted too"
        ]
        if not self.in_time:
            head.append(f"# the search ended after {MINUTES} minutes, so more may fit")
        return "\n".join([*head, *lines])


def find_fit(config: PPOConfig, data: str, limit: int = 0, memory: float = 0.0) -> Fit:
    """Try settings on this device.

    Args:
        data: prompts, of which the longest counts.
        limit: use only the first rows of the data; 0 = all.
        memory: GiB that a trial may take; 0 = what is free now.

    Raises:
        ValueError: not even one sequence fits, or its step takes longer than the whole search may.
    """
    device = pick_device(config.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--fit tries settings on a CPU or with CUDA, not on {device.type}")
    allowed = int(memory * GIB) or free_memory(device)
    tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
    prompt = _longest_prompt(tokenizer, data, limit)
    length = prompt_lengths([prompt], tokenizer)[0]
    network = load_config(config.model_name, config.trust_remote_code).get_text_config()
    context = getattr(network, "max_position_embeddings", None) or length + NO_LIMIT

    ends, outcomes = time.monotonic() + 60 * MINUTES, set[bool | None]()

    def fits(settings: PPOConfig) -> bool:
        left = ends - time.monotonic()
        outcome = run_trial(settings, prompt, allowed, left) if left > 0 else None
        said = {True: "fits", False: "out of memory", None: "no time left"}[outcome]
        text = "micro_batch_size {}, batch_size {}, max_new_tokens {}: {}".format(*_key(settings), said)
        if outcome is not None or None not in outcomes:  # that time is up is said once
            print(text, file=sys.stderr, flush=True)
        outcomes.add(outcome)
        if outcomes == {None}:
            raise ValueError(
                f"a step of one sequence takes more than {MINUTES} minutes here; lower max_new_tokens, or "
                "use a smaller model"
            )
        return bool(outcome)

    print(f"trying settings, for up to {MINUTES} minutes", file=sys.stderr, flush=True)
    found = search(config, length, context - length, allowed, fits)
    return replace(found, in_time=None not in outcomes)


def _key(settings: PPOConfig) -> tuple[int, int, int]:
    """What a trial varies; memory grows with each."""
    return settings.micro_batch_size, settings.batch_size, settings.max_new_tokens


def search(config: PPOConfig, prompt: int, room: int, allowed: int, fits: Trial) -> Fit:
    """The largest of each, one after the other.

    Args:
        prompt: tokens of the longest prompt.
        room: response tokens that the context leaves.
    """
    sequence = prompt + max_response_tokens(config)
    if config.max_new_tokens > room:
        raise ValueError(
            f"the longest prompt has {prompt} tokens, and max_new_tokens ({config.max_new_tokens}) does not "
            f"fit beside it; the model leaves {room}"
        )

    known: dict[tuple[int, int, int], bool] = {}

    def fits_once(settings: PPOConfig) -> bool:
        key = _key(settings)
        for other, fitted in known.items():  # what is smaller than one that fitted fits, and so on
            small, large = (key, other) if fitted else (other, key)
            if all(one <= two for one, two in zip(small, large, strict=True)):
                return fitted
        known[key] = fits(settings)
        return known[key]

    def with_passes_of(count: int) -> PPOConfig:
        return replace(config, micro_batch_size=count, micro_batch_tokens=count * sequence)

    def with_batch(count: int) -> PPOConfig:
        return replace(with_passes_of(micro), batch_size=count)

    most = min(config.minibatch_size, config.batch_size * config.num_generations)
    micro = largest(lambda count: fits_once(replace(with_passes_of(count), batch_size=count)), 1, most)
    if not micro:
        raise ValueError(
            f"not even one sequence of {sequence} tokens fits {allowed / GIB:.1f} GiB; set quantize to nf4 "
            "or gradient_checkpointing, lower max_new_tokens, or use a smaller model"
        )
    first = max(1, micro // config.num_generations)
    batch = largest(
        lambda count: fits_once(with_batch(count)), first, MOST_SEQUENCES // config.num_generations
    )
    batch = max(batch, first)
    usual = with_batch(min(batch, config.batch_size))
    longest = largest(
        lambda tokens: fits_once(replace(usual, max_new_tokens=tokens)), config.max_new_tokens, room
    )
    return Fit(micro, micro * sequence, batch, max(longest, config.max_new_tokens), allowed)


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """About the largest number up to `most` that fits, at least `first`, where smaller ones fit too: in
    steps of `GROWTH`, then by halving the gap; 0 where not even the first fits."""
    fitted, failed = 0, most + 1
    number = min(first, most)
    while number < failed:
        if not fits(number):
            failed = number
            break
        fitted = number
        number = min(GROWTH * number, most) if number < most else failed
    for _ in range(REFINED if fitted and failed <= most else 0):
        middle = (fitted + failed) // 2
        if middle in (fitted, failed):
            break
        if fits(middle):
            fitted = middle
        else:
            failed = middle
    return fitted


def _longest_prompt(tokenizer: Tokenizer, data: str, limit: int) -> str:
    prompts = read_prompts(open_rows(data, limit), tokenizer)
    lengths = prompt_lengths(prompts, tokenizer)
    return max(zip(lengths, prompts, strict=True), key=lambda pair: pair[0])[1]


def run_trial(config: PPOConfig, prompt: str, allowed: int, seconds: float) -> bool | None:
    """Whether a step with these settings fits this many bytes; None where it takes longer than the seconds.
    Anything else that goes wrong is raised."""
    kept = [spec for spec in config.rewards if not (spec.is_http or spec.is_function or is_ready_made(spec))]
    tried = replace(config, rewards=tuple(kept))  # functions and servers take no memory of the device
    given = {"config": tried.to_dict(), "prompt": prompt, "allowed": allowed}
    command = [sys.executable, "-m", "proxima.tools.doctor.fit_trial"]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode not in (0, *NO_MEMORY):
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise ValueError(f"a trial failed, not for want of memory: {reason}")
    return done.returncode == 0
