"""Reward models and classifiers as reward sources: one score per sequence.

`TrainedReward` is a reward model of this package: it scores token ids, EOS included, never re-tokenised text.
`ClassifierSource` is any sequence classifier: it does the same where its tokenizer is the policy's; otherwise
it tokenises the text with its own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.base_setup import MicroBatches, load_classifier, same_tokenizer
from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Tokens
from proxima.models import ClassifierReward, EngineSettings, RewardModel, doubted, reward_warning, saved_units
from proxima.rewards.endings import (
    CHOICES,
    ENDING_SAMPLES,
    HOW,
    MIN_SAMPLES,
    Ending,
    Readings,
    compare_endings,
    recorded_ending,
    unread_pad,
)
from proxima.rewards.reward_outcome import RewardOutcome, read_rewards
from proxima.rewards.reward_samples import Samples, tokens_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

DOUBT_COEF = 1.0  # of an ensemble where the option is not given
EARLY = Ending(
    "append", "a guess until more samples were compared; set eos=append or eos=leave", is_guess=True
)
SAMPLED = Ending("append", "its tokenizer is the policy's, and a sampled EOS is part of the response")


class TrainedReward:
    """A reward adapter or network of this package, with its scalar head."""

    attempts = 2

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Tokenizer,
        micro_batches: MicroBatches,
        *,
        doubt_coef: float | None = None,
    ):
        """
        Args:
            doubt_coef: of an ensemble, the score is the mean of its heads less this times their spread; by
                default 1.
        """
        if doubt_coef is not None and (model.heads == 1 or doubt_coef < 0):
            raise ValueError(
                f"doubt_coef ({doubt_coef:g}) of reward {model.source!r} must be 0 or more"
                if doubt_coef < 0
                else f"reward {model.source!r} has one head, so doubt_coef does nothing; leave it out, or "
                "train it with proxima reward --ensemble 4"
            )
        self.doubt_coef = DOUBT_COEF if doubt_coef is None else doubt_coef
        self.model = model
        self.tokenizer = tokenizer
        self.micro_batches = micro_batches
        self.lacks_unit = model.source != "untrained" and not saved_units(model.source)
        if model.source != "untrained" and (message := reward_warning(model.source)):
            warnings.warn(message, stacklevel=2)

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """It needs no column."""

    @torch.no_grad()
    def members(self, samples: Samples) -> Tensor:
        """Scores (B, heads) of the model's heads."""
        tokens = self._tokenized(samples) if samples.tokens is None else samples.tokens

        def score() -> list[Tensor]:
            return [self.model.token_members(tokens.select(rows)) for rows in self.micro_batches.rows(tokens)]

        return torch.cat(self.micro_batches.run(score, tokens.longest))

    def __call__(self, samples: Samples) -> RewardOutcome:
        members = self.members(samples)
        if self.model.heads == 1:
            return read_rewards(members[:, 0], samples.lengths)
        scores, spread = doubted(members, self.doubt_coef)
        return replace(read_rewards(scores, samples.lengths), spread=spread.tolist())

    def _tokenized(self, samples: Samples) -> Tokens:
        """Texts that were not sampled, as the model was trained on them: prompt, completion, and EOS where it
        is finished."""
        rows: list[list[int]] = self.tokenizer(samples.completions, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        rows = [
            [*row, end] if ended and end is not None else row
            for row, ended in zip(rows, samples.ended, strict=True)
        ]
        return tokens_of(samples.prompts, rows, samples.ended, self.tokenizer, self.model.device)


class ClassifierSource:
    """Any `AutoModelForSequenceClassification`, by folder or Hub id.

    Where its tokenizer is the policy's it reads the sampled ids; otherwise it tokenises the text itself.
    `ending` says whether a finished response ends with EOS for it; a response that was cut off never does.
    """

    attempts = 2
    lacks_unit = True

    def __init__(
        self,
        source: str,
        config: PPOConfig,
        device: torch.device,
        policy_tokenizer: Tokenizer | None = None,
        *,
        label: int | str | None = None,
        max_length: int = 0,
        chat: bool = False,
        eos: str = "auto",
    ):
        """
        Args:
            policy_tokenizer: the one of the sampled ids; None = the classifier's own.
            label: index or name of the score among several labels.
            max_length: longer texts are cut on the left; 0 = a text that does not fit fails.
            chat: format prompt and completion as user and assistant turns of the tokenizer's chat template.
            eos: `append` = EOS follows a finished response, `leave` = none does, `auto` = as the model was
                trained.
        """
        if max_length < 0:
            raise ValueError(f"max_length ({max_length}) of reward {source!r} must be 0 (off) or more")
        if eos not in CHOICES:
            raise ValueError(f"eos ({eos!r}) of reward {source!r} must be one of {', '.join(CHOICES)}")
        network, tokenizer, saved = load_classifier(config, source, device)
        _check_tokenizer(tokenizer, source, chat, eos)
        try:
            self.classifier = ClassifierReward(network, tokenizer, label, max_length)
        except ValueError as error:
            raise ValueError(f"reward {source!r}: {error}") from None
        if self.classifier.decoder is not None:
            settings = EngineSettings(fast=config.engine != "plain", compiled=config.compile_layers)
            self.classifier.decoder.backbone.settings = settings
        self.source = source
        self.chat = chat
        self.eos = eos
        self.size = config.micro_batch_size
        self.reads_ids = not chat and (
            policy_tokenizer is None or same_tokenizer(policy_tokenizer, tokenizer)
        )
        self.ending = self._known_ending(saved, tokenizer, policy_tokenizer)
        self.settles = True
        """Whether it chooses its ending itself where nothing says it; among several processes the main one
        chooses."""
        self._seen = Samples.finished([])
        """What was scored while it did not tell the ending."""
        self._needed = MIN_SAMPLES
        self._unread = unread_pad(saved, tokenizer)
        self._logged: Ending | None = None

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """It needs no column."""

    def _known_ending(
        self, saved: PretrainedConfig, tokenizer: Tokenizer, policy_tokenizer: Tokenizer | None
    ) -> Ending | None:
        """The ending that the option, the checkpoint or the policy's tokenizer decides; None where samples
        must."""
        if self.eos != "auto":
            return Ending(self.eos, "the option says so")
        recorded = recorded_ending(self.source, saved, tokenizer, self.chat)
        if recorded is None and self.reads_ids and policy_tokenizer is not None:
            return SAMPLED
        return recorded

    @property
    def ending_now(self) -> Ending:
        """The ending, or until there are samples enough to choose it by, a guess."""
        return self.ending or EARLY

    def choose_ending(self, samples: Samples) -> None:
        """Choose how texts end by these samples and those before, unless it is known; once chosen, it stays.

        Samples that are too few, or do not tell, are kept for a later call, up to `ENDING_SAMPLES`.
        """
        if self.ending is not None:
            return
        if self.reads_ids and samples.tokens is not None:
            self.ending = SAMPLED
            return
        self._seen = Samples.finished([self._seen, samples])
        if len(self._seen) < self._needed:
            return
        found = compare_endings(self._read, self._seen)
        if found.is_guess and len(self._seen) < ENDING_SAMPLES:
            self._needed = min(2 * len(self._seen), ENDING_SAMPLES)
            return
        self.ending, self._seen = found, Samples.finished([])

    def _log_ending(self) -> None:
        """Once, and again when a choice takes the place of a guess."""
        ending = self.ending_now
        if ending == self._logged:
            return
        level = logging.WARNING if ending.is_guess else logging.INFO
        read = "the sampled ids" if self.reads_ids else "the text"
        log.log(level, "reward %s reads %s; %s", self.source, read, ending)
        self._logged = ending

    def chosen_state(self, samples: Samples) -> dict[str, str | bool] | None:
        """The state after `choose_ending`."""
        self.choose_ending(samples)
        return self.state()

    def state(self) -> dict[str, str | bool] | None:
        """The chosen ending, as JSON; None before there is one."""
        if self.ending is None:
            return None
        return {
            "source": self.source,
            "how": self.ending.how,
            "why": self.ending.why,
            "is_guess": self.ending.is_guess,
        }

    def restore(self, state: object) -> None:
        """Use the ending that a run chose for this same model, unless the user gave the option."""
        if (
            self.eos == "auto"
            and isinstance(state, dict)
            and state.get("source") == self.source
            and state.get("how") in HOW
        ):
            self.ending = Ending(state["how"], str(state.get("why")), bool(state.get("is_guess")))

    def __call__(self, samples: Samples) -> RewardOutcome:
        if self.settles:
            self.choose_ending(samples)
        self._log_ending()
        ending = self.ending_now
        if self.reads_ids and samples.tokens is not None:
            rows = self._id_rows(samples.tokens, ending.how)
        else:
            rows = self._text_rows(samples, ending.how)
        outcome = read_rewards(self._score(rows), samples.lengths)
        why = f"a text is empty or longer than the {self.classifier.limit} tokens that the model reads"
        return RewardOutcome(outcome.sequence, {}, why if outcome.failures else "")

    def _read(self, samples: Samples, how: str) -> Readings:
        """What it reads of samples that are taken as finished."""
        rows = self._text_rows(replace(samples, ended=[True] * len(samples)), how)
        weight = self.classifier.weight
        if weight is None:
            return Readings(self._score(rows))
        hidden, weight = self._in_parts(self.classifier.hidden, rows), weight.float().cpu()
        return Readings(hidden @ weight, hidden, weight)

    def _score(self, rows: list[list[int]]) -> Tensor:
        return self._in_parts(self.classifier.scores, rows)

    def _in_parts(self, compute: Callable[[list[list[int]]], Tensor], rows: list[list[int]]) -> Tensor:
        return torch.cat([compute(rows[i : i + self.size]) for i in range(0, len(rows), self.size)])

    def _id_rows(self, tokens: Tokens, how: str) -> list[list[int]]:
        """The ids of prompt and response as they were sampled."""
        rows = [ids[mask].tolist() for ids, mask in zip(tokens.input_ids, tokens.input_mask, strict=True)]
        ends: list[bool] = tokens.ended.tolist()
        if tokens.episodes is not None:  # one may be done by a turn that was cut, or cut after one that ended
            special = set(self.classifier.tokenizer.all_special_ids)
            ends = [row[-1] in special for row in rows]
        for row, ended in zip(rows, ends, strict=True):
            if ended and (how == "leave" or row[-1] == self._unread):
                row.pop()
        return rows

    def _text_rows(self, samples: Samples, how: str) -> list[list[int]]:
        """The texts, tokenised by the classifier's own tokenizer."""
        texts = self._as_chats(samples) if self.chat else samples.full_texts
        tokenizer = self.classifier.tokenizer
        longest = self.classifier.max_length
        options: Record = {"add_special_tokens": not self.chat}
        if longest:
            options |= {"truncation": True, "max_length": longest - (how == "append")}
        rows: list[list[int]] = tokenizer(texts, **options)["input_ids"]
        end = tokenizer.eos_token_id
        if how == "append":
            for row, ended in zip(rows, samples.ended, strict=True):
                if ended and row and row[-1] != end:
                    row.append(end)
                elif not ended and row and row[-1] == end and self.classifier.decoder is not None:
                    row.pop()  # the EOS that the tokenizer added
        return rows

    def _as_chats(self, samples: Samples) -> list[str]:
        turns = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(samples.prompts, samples.completions, strict=True)
        ]
        return [self.classifier.tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]


def _check_tokenizer(tokenizer: Tokenizer, source: str, chat: bool, eos: str) -> None:
    if chat and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of reward {source!r} has no chat template; leave the option chat out"
        )
    if eos == "append" and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of reward {source!r} has no EOS token to append; leave the option eos out"
        )
