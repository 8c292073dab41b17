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

from torch import Tensor
from torch.nn.functional import logsigmoid

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
CLEAR_RATIO = 1.2  # of two standard deviations, from which on the wider one is chosen
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
        how = json.loads((Path(source) / REPORT_FILE).read_text(encoding="utf-8"))["eos"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return how if how in HOW else ""


def _is_openrlhf(saved: PretrainedConfig) -> bool:
    return hasattr(saved, "normalize_reward")


def _is_trl(source: str) -> bool:
    """Whether the training arguments beside the weights are TRL's `RewardConfig`, or the model card has TRL's
    tag. Nothing is unpickled: only the name of the class is searched for."""
    folder = Path(source)
    try:
        with zipfile.ZipFile(folder / TRAINING_ARGUMENTS) as archive:
            name = next(item for item in archive.namelist() if item.endswith("data.pkl"))
            with archive.open(name) as file:
                if b"trl." in (found := file.read(MAX_ARGUMENTS)) and b"RewardConfig" in found:
                    return True
    except (OSError, StopIteration, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        pass
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            front_matter = file.read(MAX_ARGUMENTS).split("\n---", 1)[0]
            return re.search(r"^- reward-trainer\s*$", front_matter, re.MULTILINE) is not None
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


Score = Callable[[Samples, str], Tensor]


def compare_endings(score: Score, samples: Samples) -> Ending:
    """The ending under which the model separates samples better, for a checkpoint that does not say.

    Where prompts carry `chosen` and `rejected` responses: the ending that makes these preferences likelier,
    by the mean of log sigmoid(r(chosen) - r(rejected)). Otherwise the one with the larger spread of scores:
    training separates scores at the token that is read, and at any other token they stay closer together.
    Where neither decides, EOS is a guess: most trainers of reward models append it.

    Args:
        score: scores (B,) of samples under an ending, each sample taken as finished; nan where one failed.
    """
    pairs = preference_pairs(samples)
    if pairs is not None:
        chosen, rejected = pairs
        fit = {}
        for how in HOW:
            margins = score(chosen, how) - score(rejected, how)
            fit[how] = _finite(logsigmoid(margins)).mean().item()
        best = max(HOW, key=lambda how: fit[how])
        if fit["append"] != fit["leave"] and not any(map(math.isnan, fit.values())):
            shown = f"log-likelihood {fit['append']:.3f} with EOS, {fit['leave']:.3f} without"
            return Ending(best, f"it makes {len(chosen)} held-out preferences likelier ({shown})")
    spread = {how: _finite(score(samples, how)) for how in HOW}
    if min(map(len, spread.values())) >= MIN_SAMPLES:
        wide = {how: scores.std(correction=0).item() for how, scores in spread.items()}
        best = max(HOW, key=lambda how: wide[how])
        if wide[best] > CLEAR_RATIO * min(wide.values()):
            shown = f"standard deviation {wide['append']:.3g} with EOS, {wide['leave']:.3g} without"
            return Ending(best, f"scores of {len(samples)} samples have the larger spread ({shown})")
    return Ending(
        "append", "a guess, nothing says how it was trained; set eos=append or eos=leave", is_guess=True
    )


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


def _finite(numbers: Tensor) -> Tensor:
    return numbers[numbers.isfinite()]
