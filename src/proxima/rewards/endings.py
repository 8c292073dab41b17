"""How a text ends for a classifier. In: a checkpoint, or scores of samples. Out: `Ending`: with EOS or
without, and why.

A reward model is read at its last token, so a text has to end as those that it was trained on.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.core.tokenizer import Tokenizer
from proxima.models.reward_model import REPORT_FILE
from proxima.rewards.reward_samples import Samples, columns_of

HOW = ("append", "leave")
CHOICES = ("auto", *HOW)
TRAINING_ARGUMENTS = "training_args.bin"  # what `Trainer.save_model` of transformers leaves
LARGEST_ARGUMENTS = 2**20  # bytes of it that are looked at
PAIR = ("chosen", "rejected")
FEWEST = 8  # samples that a comparison needs
CLEARLY = 1.2  # ratio of two deviations from which on the wider one counts
TURN = "Proxima asks what follows an answer."


@dataclass(frozen=True)
class Ending:
    """`append`: a response that ended is followed by EOS.

    `leave`: none is added, a sampled one is dropped.
    """

    how: str
    why: str
    is_guess: bool = False

    def __str__(self) -> str:
        return f"{'EOS ends a finished response' if self.how == 'append' else 'no EOS is added'}: {self.why}"


def recorded_ending(source: str, saved: Any, tokenizer: Tokenizer, chat: bool) -> Ending | None:
    """What the checkpoint says of the texts that it was trained on; None where it says nothing.

    Args:
        saved: its config as it lies on the disk.
        chat: whether texts are written by its chat template.
    """
    if chat:
        return Ending("leave", "its chat template writes the end")
    if tokenizer.eos_token_id is None:
        return Ending("leave", "its tokenizer has no EOS token")
    if how := _report(source):
        return Ending(how, f"its {REPORT_FILE} says so")
    last = tokenizer("x")["input_ids"][-1]
    if last == tokenizer.eos_token_id:
        return Ending("append", "its tokenizer ends every text with EOS")
    if last in tokenizer.all_special_ids:
        return Ending("leave", "its tokenizer ends every text itself")
    if _is_openrlhf(saved):
        return Ending("append", "it was trained by OpenRLHF, which ends every text with EOS")
    if saved.get_text_config().pad_token_id == tokenizer.eos_token_id:
        return Ending("leave", "it pads with EOS, so that transformers reads the token before the first EOS")
    if _is_trl(source):
        return Ending("append", "it was trained by TRL's RewardTrainer, which ends every text with EOS")
    if _turn_ends_with_eos(tokenizer):
        return Ending("append", "its chat template ends an answer with EOS")
    return None


def unread_pad(saved: Any, tokenizer: Tokenizer) -> int | None:
    """The id of a pad token that the network itself would never read at the end of a row; EOS is
    `Ending`'s matter."""
    pad = saved.get_text_config().pad_token_id
    return None if pad == tokenizer.eos_token_id or _is_openrlhf(saved) else pad


def _report(source: str) -> str:
    try:
        how = json.loads((Path(source) / REPORT_FILE).read_text(encoding="utf-8"))["eos"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return how if how in HOW else ""


def _is_openrlhf(saved: Any) -> bool:
    return hasattr(saved, "normalize_reward")


def _is_trl(source: str) -> bool:
    """Whether the training arguments beside the weights are a `RewardConfig`, or the model card has TRL's
    tag. Nothing is
    unpickled: only the name of the class is looked for."""
    folder = Path(source)
    try:
        with zipfile.ZipFile(folder / TRAINING_ARGUMENTS) as archive:
            name = next(item for item in archive.namelist() if item.endswith("data.pkl"))
            with archive.open(name) as file:
                if b"trl." in (found := file.read(LARGEST_ARGUMENTS)) and b"RewardConfig" in found:
                    return True
    except (OSError, StopIteration, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        pass
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            return bool(
                re.search(
                    r"^- reward-trainer\s*$", file.read(LARGEST_ARGUMENTS).split("\n---", 1)[0], re.MULTILINE
                )
            )
    except OSError:
        return False


def _turn_ends_with_eos(tokenizer: Tokenizer) -> bool:
    if not tokenizer.chat_template:
        return False
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
    try:
        written = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template of a stranger's may raise anything
        return False
    return written.partition(TURN)[2].lstrip().startswith(tokenizer.eos_token)


Score = Callable[[Samples, str], Tensor]


def compare_endings(score: Score, samples: Samples) -> Ending:
    """The ending under which the model tells samples apart, where its checkpoint says nothing.

    Prompts that carry `chosen` and `rejected` answers: the ending that makes these preferences likelier, by
    the mean of log sigmoid(r(chosen) - r(rejected)). Else the one whose scores of the samples spread wider:
    training draws scores apart at the token that it reads, and at another one they stay closer together.
    Where neither tells, EOS is a guess: most trainers of reward models append it.

    Args:
        score: scores (B,) of samples under an ending, each sample taken as finished; nan where one failed.
    """
    pairs = preference_pairs(samples)
    if pairs is not None:
        chosen, rejected = pairs
        fit = {
            how: _finite(logsigmoid(score(chosen, how) - score(rejected, how))).mean().item() for how in HOW
        }
        best = max(HOW, key=lambda how: fit[how])
        if fit["append"] != fit["leave"] and not any(map(math.isnan, fit.values())):
            shown = f"log-likelihood {fit['append']:.3f} with EOS, {fit['leave']:.3f} without"
            return Ending(best, f"it makes {len(chosen)} held-out preferences likelier ({shown})")
    spread = {how: _finite(score(samples, how)) for how in HOW}
    if min(map(len, spread.values())) >= FEWEST:
        wide = {how: scores.std(correction=0).item() for how, scores in spread.items()}
        best = max(HOW, key=lambda how: wide[how])
        if wide[best] > CLEARLY * min(wide.values()):
            shown = f"deviation {wide['append']:.3g} with EOS, {wide['leave']:.3g} without"
            return Ending(best, f"scores of {len(samples)} samples spread wider ({shown})")
    return Ending(
        "append", "a guess, nothing tells how it was trained; set eos=append or eos=leave", is_guess=True
    )


def preference_pairs(samples: Samples) -> tuple[Samples, Samples] | None:
    """Both answers to the prompts that carry them; None where these are too few."""
    rows = [(prompt, columns_of(prompt)) for prompt in samples.prompts]
    rows = [(prompt, row) for prompt, row in rows if all(isinstance(row.get(name), str) for name in PAIR)]
    if len(rows) < FEWEST:
        return None
    prompts = [prompt for prompt, _ in rows]
    chosen, rejected = (
        Samples(prompts, [row[name] for _, row in rows], [[]] * len(rows), [True] * len(rows))
        for name in PAIR
    )
    return chosen, rejected


def _finite(numbers: Tensor) -> Tensor:
    return numbers[numbers.isfinite()]
