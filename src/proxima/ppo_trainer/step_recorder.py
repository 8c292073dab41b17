"""`StepRecorder`: one PPO step, written down. In: a trainer before and after `ppo_step`. Out: the tensors and
facts of a bundle (`proxima.runs`), in host memory.

It holds all that the step read and computed, and no base weights: of these a checksum. It changes nothing
that the step computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima import __version__
from proxima.config import PPOConfig
from proxima.core.episode import Episode
from proxima.core.json_record import Record, RecordView
from proxima.core.linear4bit import Linear4bit
from proxima.core.pairs import TokenPairs
from proxima.core.recorded_experts import expert_dtype
from proxima.core.token_text import pieces
from proxima.core.types import Tokens
from proxima.environments import max_response_tokens
from proxima.models import Backbone, adapter_tensors
from proxima.ppo_trainer.trainer_state import plain_config, plain_state
from proxima.runs import (
    EPISODE,
    LARGEST_BUNDLE,
    TOLERANCE,
    Bundle,
    checksum,
    describe_environment,
    numbers_of,
    plain,
)
from proxima.runs.checkpoint import optimizer_tensors

if TYPE_CHECKING:
    from proxima.ppo_trainer.ppo_trainer import PPOTrainer
    from proxima.ppo_trainer.reward_computer import Scores

ADAPTER_SETTINGS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "fan_in_fan_out", "task_type", "bias"),
    *("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"),
)
"""Settings of an adapter that decide what it computes; others of PEFT's are not recorded."""
TOKEN_BYTES = 80
"""Of a response token but for its kept set and experts: id, mask, text, and 13 to 16 columns of numbers."""
ESTIMATED = ("td_error", "advantage", "return")
OWN_VALUE_NETWORK = (
    "record_steps needs the value model on the policy's base, and this one is a network of its own; set "
    "value_model to adapter or policy, or record_steps to 0"
)


@dataclass(frozen=True)
class StepRecord:
    """A step in host memory."""

    facts: Record
    tensors: dict[str, Tensor]
    tokens: Tokens
    after: dict[str, Tensor]
    """The weights after the step; empty where they are not known yet."""

    def bundle(self, reason: str = "") -> Bundle:
        """To write down, with the texts of its tokens.

        Args:
            reason: the alarm for which it is written; empty = none.
        """
        tokens = self.tokens
        facts = {
            **self.facts,
            "reason": reason,
            "prompts": [_prompt(prompt) for prompt in tokens.prompts],
            "episodes": [_episode(each) for each in tokens.episodes or ()],
            "tokens": [pieces(row, tokens.tokenizer.decode) for row in tokens.response_rows],
        }
        return Bundle(facts, {**self.tensors, **_named("after", self.after)})


class StepRecorder:
    """`with recorder.step(): outcome = trainer.ppo_step(prompts)`, then `recorder.record(outcome)`."""

    def __init__(self, trainer: PPOTrainer):
        check_recordable(trainer)
        self.trainer = trainer
        self.base = {
            "name": trainer.config.model_name,
            "sha256": base_checksum(trainer.models.policy.backbone),
        }
        found = describe_environment()  # without what it says of the working directory
        self._environment = {name: value for name, value in found.items() if not name.startswith("git_")}
        reference = _adapter(trainer, "reference")
        self._reference = _named("reference", {} if reference is None else _of_adapter(trainer, reference))
        self._tensors: dict[str, Tensor] = {}
        self._facts: Record = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Copy to host memory what the step is going to change (adapters, heads and optimisers), and what it
        computes on its way."""
        self._begin()
        before, self.trainer.on_phases = self.trainer.on_phases, self._take
        try:
            yield
        finally:
            self.trainer.on_phases = before

    @property
    def before(self) -> dict[str, Tensor]:
        """The weights before the step that runs, or ran last, by the names of `weights`."""
        start, optimizers = "before/", ("before/policy_optimizer/", "before/value_optimizer/")
        return {
            name.removeprefix(start): tensor
            for name, tensor in self._tensors.items()
            if name.startswith(start) and not name.startswith(optimizers)
        }

    def _begin(self) -> None:
        trainer = self.trainer
        self._tensors = {
            **self._reference,
            **_named("before", {**weights(trainer), **_optimizers(trainer)}),
        }
        state = plain_state(trainer)
        kept = {name: value for name, value in state.items() if name not in ("config", "random")}
        self._facts = {"state": {**kept, "first_step": trainer.first_step}}

    def _take(self, rollout: TokenPairs, scores: Scores, estimated: TokenPairs) -> None:
        self._tokens = rollout.tokens.map(host)
        self._tensors |= _named("tokens", token_tensors(self._tokens))
        self._tensors |= _named("scoring", _columns(rollout, set(rollout.columns)))
        self._tensors |= score_tensors(scores)
        own = {"token_rewards": ("kl", "reward"), "values": ("value",), "advantages": ESTIMATED}
        for group, names in own.items():
            self._tensors |= _named(group, _columns(estimated, set(names) & set(estimated.columns)))
        self._facts["state"]["policy_lag"] = self.trainer.generator.policy_lag
        self._facts["reward_names"] = list(scores.by_name)

    def record(self, outcome: RecordView) -> StepRecord:
        """The step just done, still without the weights after it."""
        trainer = self.trainer
        self._tensors["rows"] = torch.tensor(outcome["trained_rows"], dtype=torch.int64)
        self._tensors |= _named("whitened", _columns(outcome["sa_pairs"], {"advantage"}))
        self._tensors |= _named("update", _history(trainer.model_trainer.history))
        dtype = str(trainer.models.sft.backbone.network.dtype).removeprefix("torch.")
        facts = {
            **self._facts,
            "proxima": __version__,
            "step": trainer.step,
            "redacted": False,
            "settings": plain_config(trainer.config),
            "environment": self._environment,
            "device": trainer.models.device.type,
            "dtype": dtype,
            "base": self.base,
            "adapters": _adapter_settings(trainer),
            "tolerance": TOLERANCE.get(dtype, TOLERANCE["bfloat16"]),
            "metrics": plain(numbers_of(outcome)),
        }
        return StepRecord(facts, self._tensors, self._tokens, {})


def check_recordable(trainer: PPOTrainer) -> None:
    """An error that says what to change where a step of this trainer cannot be recorded."""
    config, models = trainer.config, trainer.models
    if config.not_recordable:
        raise ValueError(config.not_recordable)
    if models.value is not None and models.value.backbone is not models.policy.backbone:
        raise ValueError(OWN_VALUE_NETWORK)


def check_size(trainer: PPOTrainer) -> None:
    """An error where the bundle of a step could be larger than bundles may be."""
    if problem := too_large(*most_bytes(trainer)):
        raise ValueError(problem)


def too_large(adapters: int, rollout: int) -> str:
    """Why the bundle of a step could be larger than bundles may be, and what to do; empty where it could
    not."""
    if adapters + rollout <= LARGEST_BUNDLE:
        return ""
    return (
        f"a recorded step would take up to {adapters + rollout:,} bytes ({adapters:,} for adapters and their "
        f"optimiser, {rollout:,} for responses of max_new_tokens with their kept sets), the most is "
        f"{LARGEST_BUNDLE:,}; lower lora_r, batch_size or max_new_tokens, sample with a top_k, or set "
        "record_steps to 0"
    )


def most_bytes(trainer: PPOTrainer) -> tuple[int, int]:
    """What a step's bundle takes, as `recorded_bytes` gives it."""
    reference = _adapter(trainer, "reference")
    fixed = 0 if reference is None else _bytes(_of_adapter(trainer, reference))
    vocabulary = trainer.models.policy.backbone.network.get_input_embeddings().num_embeddings
    return recorded_bytes(trainer.config, _bytes(weights(trainer)), fixed, vocabulary, _expert_bytes(trainer))


def recorded_bytes(
    config: PPOConfig, trained: int, reference: int, vocabulary: int, experts: int
) -> tuple[int, int]:
    """What a step's bundle takes for its adapters, before and after, with their optimiser; and for its
    responses, all as long as they may be. Prompts are not counted: nothing says how long they are.

    Args:
        trained: bytes of all weights that train.
        reference: bytes of the reference's adapter.
        experts: bytes of a token's experts.
    """
    tokens = config.batch_size * config.num_generations * max_response_tokens(config)
    return 4 * trained + reference, tokens * (TOKEN_BYTES + _kept_bytes(config, vocabulary) + experts)


def _kept_bytes(config: PPOConfig, vocabulary: int) -> int:
    """Of a response token's kept set: ids by top-k, a bit per token of the vocabulary by top-p alone."""
    if config.top_k:
        return 4 * min(config.top_k, vocabulary)
    return -(-vocabulary // 8) if config.top_p < 1 else 0


def _expert_bytes(trainer: PPOTrainer) -> int:
    """Of the experts that a token went to, in every layer of a mixture."""
    decoder = trainer.models.policy.backbone.decoder
    experts = None if decoder is None else decoder.blocks[0].experts
    if decoder is None or experts is None:
        return 0
    return len(decoder.blocks) * experts.per_token * expert_dtype(experts.total).itemsize


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors.values())


def weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    """Copies in host memory of all that training changes: adapters and the value head."""
    policy, value = _adapter(trainer, "policy"), _adapter(trainer, "value")
    found: dict[str, Tensor] = {}
    for role, adapter in (("policy", policy), ("value", value)):
        if adapter is not None:
            found |= _named(role, _of_adapter(trainer, adapter))
    if trainer.models.value is not None and trainer.models.value.head is not None:
        head = trainer.models.value.head.state_dict()
        found |= _named("value_head", {name: host(each) for name, each in head.items()})
    return found


def token_tensors(tokens: Tokens) -> dict[str, Tensor]:
    """The tensors of a rollout by name; nothing is kept where there is no token."""
    names = ("prompt_ids", "prompt_mask", "response_ids", "mask", "ended", "truncated", "keys")
    found = {name: getattr(tokens, name) for name in (*names, "observed", "sampled_logprobs")}
    if tokens.kept is not None:
        nowhere, kept = ~tokens.mask.unsqueeze(-1), tokens.kept
        found["kept_ids"] = None if kept.ids is None else kept.ids.masked_fill(nowhere, -1)
        found["kept_bits"] = None if kept.bits is None else kept.bits.masked_fill(nowhere, 0)
    if tokens.experts is not None:
        found |= {"experts_prompt": tokens.experts.prompt, "experts_response": tokens.experts.response}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def score_tensors(scores: Scores) -> dict[str, Tensor]:
    by_name = [host(each) for each in scores.by_name.values()]
    found = {"sequence": scores.sequence, "token": scores.token, "spread": scores.spread}
    found["failed_programs"] = scores.failed_programs
    given = {name: host(tensor) for name, tensor in found.items() if tensor is not None}
    return _named("rewards", {**given, "by_name": torch.stack(by_name)})


@torch.no_grad()
def base_checksum(backbone: Backbone) -> str:
    """Of all frozen weights as they are in memory, whatever their names and order."""
    peft = backbone.peft
    adapters = [] if peft is None else list(peft.peft_config)
    trained = {id(each) for adapter in adapters for each in backbone.adapter_parameters(adapter)}
    frozen = [each for each in backbone.network.parameters() if id(each) not in trained]
    layers = [each for each in backbone.network.modules() if isinstance(each, Linear4bit)]
    # what 4-bit codes are multiplied by are no parameters
    frozen += [scales for each in layers for name, scales in each.nf4.tensors.items() if name != "codes"]
    return hashlib.sha256("".join(sorted({checksum(host(each)) for each in frozen})).encode()).hexdigest()


def host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _named(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for name, tensor in tensors.items()}


def _columns(pairs: TokenPairs, names: set[str]) -> dict[str, Tensor]:
    """Copies of these columns, 0 where there is no token."""
    nowhere = ~pairs.mask
    return {name: host(pairs.columns[name].masked_fill(nowhere, 0)) for name in sorted(names)}


def _adapter(trainer: PPOTrainer, role: str) -> str | None:
    """The name of a role's adapter; None where it has none of its own."""
    models = trainer.models
    if role == "reference":
        return models.sft.adapter
    if role == "policy":
        return models.policy.adapter
    return None if models.value is None or models.value.shares_policy else models.value.adapter


def _of_adapter(trainer: PPOTrainer, adapter: str) -> dict[str, Tensor]:
    peft = trainer.models.policy.backbone.peft
    assert peft is not None
    return {name: host(each) for name, each in adapter_tensors(peft, adapter).items()}


def _adapter_settings(trainer: PPOTrainer) -> Record:
    """The settings of those adapters that a replay makes anew."""
    peft = trainer.models.policy.backbone.peft
    assert peft is not None
    found = {role: _adapter(trainer, role) for role in ("reference", "value")}
    settings = {role: peft.peft_config[name].to_dict() for role, name in found.items() if name is not None}
    return {
        role: {name: _listed(values[name]) for name in ADAPTER_SETTINGS if values.get(name) is not None}
        for role, values in settings.items()
    }


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _optimizers(trainer: PPOTrainer) -> dict[str, Tensor]:
    both = {
        "policy_optimizer": trainer.model_trainer.policy_optimizer,
        "value_optimizer": trainer.model_trainer.value_optimizer,
    }
    return {
        f"{name}/{key}": host(tensor)
        for name, optimizer in both.items()
        if optimizer is not None
        for key, tensor in optimizer_tensors(optimizer).items()
    }


def _history(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What each minibatch measured, one number per minibatch (M,); nan where it was not measured."""
    names = sorted({name for stats in history for name in stats})
    missing = torch.tensor(torch.nan)
    return {
        name: host(torch.stack([stats.get(name, missing).float().cpu() for stats in history]))
        for name in names
    }


def _prompt(prompt: str) -> Record:
    """A prompt with the columns of its row that JSON can hold, and its turns."""
    columns: Record = {}
    for name, value in getattr(prompt, "columns", {}).items():
        try:
            columns[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return {"text": str(prompt), "columns": columns, "turns": list(getattr(prompt, "turns", ()))}


def _episode(episode: Episode) -> Record:
    """An episode without the attributes of its environment, which only rewards read."""
    return {name: getattr(episode, name) for name in EPISODE}
