"""How texts end for a classifier, with EOS or without: from its checkpoint, or from its scores of samples.

A reward model is read at the last token, so a text has to end like those it was trained on.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.core.regular_files import open_file, read_file
from proxima.core.tokenizer import Tokenizer
from proxima.models import REPORT_FILE
from proxima.rewards.reward_samples import Samples, columns_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HOW = ("append", "leave")
CHOICES = ("auto", *HOW)
TRAINING_ARGUMENTS = "training_args.bin"  # written by `Trainer.save_model` of transformers
MAX_ARGUMENTS = 2**20  # bytes of it that are read
PAIR = ("chosen", "rejected")
MIN_SAMPLES = 8  # that a comparison needs
ENDING_SAMPLES = 64  # that it reads
STANDARD_ERRORS = 2.6  # a mean so far from 0 is chance in 1 of 100 cases
CHANCE = 0.005  # one-sided, of two endings: 1 of 100 untrained models seems trained
CLEAR = 1.5  # times the variance; below that the score reads much the same at either token
DIRECTIONS = 2000
RESAMPLED = 400
TURN = "Proxima asks what follows an answer."


@dataclass(frozen=True)
class Ending:
    """`append`: a finished response is followed by EOS.

    `leave`: no EOS is added, and a sampled one is dropped.
    """

    how: str
    why: str
    is_guess: bool = False

    def __str__(self) -> str:
        return f"{'EOS ends a finished response' if self.how == 'append' else 'no EOS is added'}: {self.why}"


def recorded_ending(source: str, saved: PretrainedConfig, tokenizer: Tokenizer, chat: bool) -> Ending | None:
    """The ending of the texts that the model was trained on, as its checkpoint says; None where it does not.

    Args:
        saved: its config as it was saved.
        chat: whether texts are formatted by its chat template.
    """
    if chat:
        return Ending("leave", "its chat template writes the ending")
    if tokenizer.eos_token_id is None:
        return Ending("leave", "its tokenizer has no EOS token")
    if how := _reported(source):
        return Ending(how, f"its {REPORT_FILE} says so")
    last = tokenizer("x")["input_ids"][-1]
    if last == tokenizer.eos_token_id:
        return Ending("append", "its tokenizer ends every text with EOS")
    if last in tokenizer.all_special_ids:
        return Ending("leave", "its tokenizer ends every text itself")
    if _is_openrlhf(saved):
        return Ending("append", "it was trained by OpenRLHF, which ends every text with EOS")
    if saved.get_text_config().pad_token_id == tokenizer.eos_token_id:
        return Ending("leave", "it pads with EOS, so transformers reads the token before the first EOS")
    if _is_trl(source):
        return Ending("append", "it was trained by TRL's RewardTrainer, which ends every text with EOS")
    if _turn_ends_with_eos(tokenizer):
        return Ending("append", "its chat template ends an answer with EOS")
    return None


def unread_pad(saved: PretrainedConfig, tokenizer: Tokenizer) -> int | None:
    """The id of the pad token, which the network's own forward pass never reads at the end of a row; None
    where it is EOS, which `Ending` decides on."""
    pad = saved.get_text_config().pad_token_id
    return None if pad == tokenizer.eos_token_id or _is_openrlhf(saved) else pad


def _reported(source: str) -> str:
    """The ending in the report that this package writes beside a reward model; empty without one."""
    try:
        how = json.loads(read_file(Path(source) / REPORT_FILE))["eos"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return how if how in HOW else ""


def _is_openrlhf(saved: PretrainedConfig) -> bool:
    return hasattr(saved, "normalize_reward")


def _is_trl(source: str) -> bool:
    """Whether the training arguments beside the weights are TRL's `RewardConfig`, or the model card has TRL's
    tag. Nothing is unpickled: only the name of the class is searched for."""
    folder = Path(source)
    try:
        with open_file(folder / TRAINING_ARGUMENTS) as given, zipfile.ZipFile(given) as archive:
            name = next(item for item in archive.namelist() if item.endswith("data.pkl"))
            with archive.open(name) as file:
                if b"trl." in (found := file.read(MAX_ARGUMENTS)) and b"RewardConfig" in found:
                    return True
    except (OSError, StopIteration, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        pass
    try:
        with open_file(folder / "README.md") as file:
            front_matter = file.read(MAX_ARGUMENTS).split(b"\n---", 1)[0]
            return re.search(rb"^- reward-trainer\s*$", front_matter, re.MULTILINE) is not None
    except OSError:
        return False


def _turn_ends_with_eos(tokenizer: Tokenizer) -> bool:
    if not tokenizer.chat_template:
        return False
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
    try:
        written = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a model's own template may raise anything
        return False
    return written.partition(TURN)[2].lstrip().startswith(tokenizer.eos_token)


@dataclass(frozen=True)
class Readings:
    """What a classifier reads of samples at the end of their texts: nan where one failed."""

    scores: Tensor  # (B,)
    hidden: Tensor | None = None  # (B, D) that the head reads; None where it is not one linear layer
    weight: Tensor | None = None  # (D,) of the head


Read = Callable[[Samples, str], Readings]


def compare_endings(read: Read, samples: Samples) -> Ending:
    """The ending that the model was trained on, by how it reads samples; for a checkpoint that does not say.

    Where prompts carry `chosen` and `rejected` responses: the ending under which it orders them better.
    Otherwise the one at which more of the last hidden states' variance lies along the head's weight: training
    separates texts along it at the token that is read, whereas for an untrained head, or at a token that it
    was not trained at, it is a direction like any other. The spread of scores does not show this: texts end
    with different words, so it is large without EOS even in a model that was never trained.

    Where neither is beyond chance, EOS is a guess: most trainers of reward models append it.

    Args:
        read: readings of samples under an ending, each sample taken as finished.
    """
    samples = samples.part(0, ENDING_SAMPLES)
    pairs = preference_pairs(samples)
    found = None if pairs is None else _by_preferences(read, *pairs)
    if found is None and len(samples) >= MIN_SAMPLES:
        found = _by_variance(read, samples)
    return found or Ending(
        "append", "a guess, nothing says how it was trained; set eos=append or eos=leave", is_guess=True
    )


def _by_preferences(read: Read, chosen: Samples, rejected: Samples) -> Ending | None:
    """By margins r(chosen) - r(rejected), each ending's in units of their own root mean square, since their
    scale says nothing. The better ending has to order pairs beyond chance, and better than the other."""
    margins = torch.stack([read(chosen, how).scores - read(rejected, how).scores for how in HOW])
    margins = margins.cpu().double()  # MPS has no float64
    margins = margins[:, margins.isfinite().all(0)]  # (2, pairs)
    if margins.shape[1] < MIN_SAMPLES:
        return None
    units = margins / margins.square().mean(1, keepdim=True).sqrt()
    best = int(units.mean(1).argmax())
    if min(_in_errors(units[best]), _in_errors(units[best] - units[1 - best])) < STANDARD_ERRORS:
        return None
    right = [f"{share:.0%}" for share in (margins > 0).double().mean(1).tolist()]
    shown = f"{right[0]} right with EOS, {right[1]} without"
    return Ending(HOW[best], f"it orders {margins.shape[1]} held-out preferences better ({shown})")


def _in_errors(numbers: Tensor) -> float:
    """Their mean in standard errors; nan where they are not numbers."""
    return (numbers.mean() / (numbers.std() / math.sqrt(len(numbers)))).item()


def _by_variance(read: Read, samples: Samples) -> Ending | None:
    """By the share of the hidden states' variance that lies along the head's weight."""
    readings = [read(samples, how) for how in HOW]
    if any(each.hidden is None or each.weight is None for each in readings):
        return None
    rows = torch.stack([each.scores.isfinite() for each in readings]).all(0)
    if int(rows.sum()) < MIN_SAMPLES:
        return None
    states = [each.hidden[rows].cpu().double() for each in readings if each.hidden is not None]
    weight = next(each.weight for each in readings if each.weight is not None).cpu().double()
    generator = torch.Generator().manual_seed(0)  # of its own: a run draws no other random numbers for it
    resampled = torch.randint(len(states[0]), (RESAMPLED, len(states[0])), generator=generator)
    every = torch.arange(len(states[0])).unsqueeze(0)
    shares = torch.cat([variance_share(each, weight, every) for each in states]).tolist()
    best = shares.index(max(shares))
    if min(shares) <= 0 or chance_of(states[best], weight, generator) > CHANCE:
        return None
    ratios = variance_share(states[best], weight, resampled) / variance_share(
        states[1 - best], weight, resampled
    )
    if not ratios.isfinite().all() or ratios.quantile(CHANCE) <= 1 or shares[best] < CLEAR * min(shares):
        return None
    shown = [f"{share * len(weight):.3g}" for share in shares]
    return Ending(
        HOW[best],
        f"its score separates {len(states[0])} samples better (variance along it, against that of a usual "
        f"direction: {shown[0]} with EOS, {shown[1]} without)",
    )


def variance_share(states: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """Of hidden states (N, D): the share of their variance along a weight (D,), for each choice of rows
    (R, N); 1 / D along a direction like any other."""
    centred = states - states.mean(0)
    along = (centred @ (weight / weight.norm()))[rows]
    counts = torch.nn.functional.one_hot(rows, len(states)).sum(1).double() / rows.shape[1]  # (R, N)
    products = centred @ centred.T  # their diagonal: squared norms
    whole = counts @ products.diagonal() - (counts @ products * counts).sum(1)
    return along.var(1, correction=0) / whole


def chance_of(states: Tensor, weight: Tensor, generator: torch.Generator) -> float:
    """The share of random directions along which hidden states (N, D) vary as much as along the weight."""
    centred = states - states.mean(0)
    directions = torch.randn(len(weight), DIRECTIONS, generator=generator, dtype=states.dtype)
    along = (centred @ (directions / directions.norm(dim=0))).square().sum(0)
    own = (centred @ (weight / weight.norm())).square().sum()
    return (along >= own).double().mean().item()


def preference_pairs(samples: Samples) -> tuple[Samples, Samples] | None:
    """The chosen and the rejected responses of the prompts that carry both; None where these are too few."""
    rows = [(prompt, columns_of(prompt)) for prompt in samples.prompts]
    rows = [(prompt, row) for prompt, row in rows if all(isinstance(row.get(name), str) for name in PAIR)]
    if len(rows) < MIN_SAMPLES:
        return None
    prompts = [prompt for prompt, _ in rows]

    def side(name: str) -> Samples:
        return Samples(prompts, [str(row[name]) for _, row in rows], [[]] * len(rows), [True] * len(rows))

    chosen, rejected = map(side, PAIR)
    return chosen, rejected
