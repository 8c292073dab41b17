"""A recorded step, run again. In: a bundle, and its base model. Out: the same recording, recomputed.

The trainer is built from the bundle alone; the run's folder is not needed. `ppo_step` runs as it did, but on
the recorded tokens (and the recorded scores, where the rewards cannot be asked again), and is recorded again.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig, RewardSpec
from proxima.core.encoding import pad_rows
from proxima.core.episode import Episode
from proxima.core.pairs import TokenPairs
from proxima.core.recorded_experts import RecordedExperts
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import KeptSet, Prompt, Tokens
from proxima.models import fill_adapter
from proxima.ppo_trainer import (
    PPOTrainer,
    RewardComputer,
    Scores,
    SequenceGenerator,
    StepRecorder,
    restore_values,
    token_tensors,
    weights,
)
from proxima.runs import Bundle
from proxima.runs.checkpoint import fill_optimizer
from proxima.tools.replay.bundle_checks import check_state, check_tokens, check_weights
from proxima.tools.replay.replay_settings import check_adapter_sizes, replay_config
from proxima.tools.replay.stage_comparison import Comparison, compare_bundles
from proxima.training import add_importance_weights


@dataclass(frozen=True)
class Replayed:
    """What was recomputed, and how it compares with what was recorded."""

    recomputed: Bundle
    comparison: Comparison


def replay_step(
    bundle: Bundle,
    model: str = "",
    rewards: Sequence[RewardSpec] = (),
    device: str = "",
    trust_remote_code: bool = False,
) -> Replayed:
    """
    Args:
        model: the base model; empty = by the name in the bundle. Its weights must be those of the recording.
        rewards: ask these; by default the recorded ones where they are ready-made, else
            none: scores are taken from the bundle.
        device: by default the recorded kind of device if there is one.
        trust_remote_code: run Python code that comes with the base model.
    """
    if bundle.is_redacted:
        raise ValueError(
            f"{bundle.path} is redacted: it holds no tokens and no weights, so nothing can be recomputed; "
            "compare it with another (proxima replay A B) or look at it (--show)"
        )
    check_weights(bundle)
    with tempfile.TemporaryDirectory(prefix="proxima-replay-") as folder, _threads(bundle):
        config, asks = replay_config(bundle, Path(folder), model, rewards, device)
        config = replace(config, trust_remote_code=trust_remote_code)
        check_adapter_sizes(config, bundle)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no reward is configured")
            trainer = PPOTrainer(config)
            recorder = StepRecorder(trainer)
            if recorder.base["sha256"] != bundle.facts["base"].get("sha256"):
                raise ValueError(
                    f"{config.model_name} is another model than the step was recorded with (its weights have "
                    "another checksum); give the right one with --model-name"
                )
            skipped = _restore(trainer, bundle, asks)
        tokens = recorded_tokens(bundle, trainer)
        sampled, not_sampled = _sample_again(trainer, bundle, tokens)
        trainer.generator = RecordedGenerator(tokens, bundle, trainer.models, trainer.tokenizer, config)
        with recorder.step():
            outcome = trainer.ppo_step(tokens.prompts[:: config.num_generations])
        again = replace(recorder.record(outcome), after=weights(trainer)).bundle()
    again = replace(again, facts={**again.facts, "settings": bundle.facts["settings"]})
    return Replayed(again, compare_bundles(bundle, again, sampled, {**skipped, **not_sampled}))


@contextmanager
def _threads(bundle: Bundle) -> Iterator[None]:
    """On a CPU as many threads as were recorded: the order of sums depends on it."""
    before, recorded = torch.get_num_threads(), bundle.facts["environment"].get("threads")
    if bundle.facts["device"] == "cpu" and type(recorded) is int and 0 < recorded <= 1024:
        torch.set_num_threads(recorded)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _restore(trainer: PPOTrainer, bundle: Bundle, asks: bool) -> dict[str, str]:
    """Weights, optimisers and plain values as they were before the step, and recorded scores where rewards
    are not asked; what was thus taken from the bundle."""
    models, state = trainer.models, bundle.facts["state"]
    peft = models.policy.backbone.peft
    assert peft is not None
    for role in (models.policy, models.value):
        name = "policy" if role is models.policy else "value"
        if role is not None and role.adapter and (own := bundle.group(f"before/{name}")):
            fill_adapter(peft, role.adapter, own)
    if models.value is not None and models.value.head is not None:
        try:
            models.value.head.load_state_dict(bundle.group("before/value_head"))
        except RuntimeError:  # other names or shapes
            raise ValueError(f"{bundle.path}: its value head does not fit the model") from None
    for name in ("policy", "value"):
        _fill_optimizer(trainer, name, bundle)
    check_state(state, bundle)
    try:
        restore_values(trainer, {**state, "config": bundle.facts["settings"]})
        trainer.first_step, trainer.total_steps = int(state["first_step"]), state["total_steps"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{bundle.path}: its state cannot be restored: {error!r}") from None
    if asks:
        return {}
    trainer.reward_computer = RecordedRewards(bundle, models, trainer.tokenizer, trainer.config)
    return {"rewards": "taken from the bundle; --rewards asks them again"}


def _fill_optimizer(trainer: PPOTrainer, name: str, bundle: Bundle) -> None:
    optimizer = getattr(trainer.model_trainer, f"{name}_optimizer")
    tensors = bundle.group(f"before/{name}_optimizer")
    if optimizer is None or not tensors:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    shapes = {
        f"{place}.{key}": each.shape
        for place, each in enumerate(parameters)
        for key in ("exp_avg", "exp_avg_sq")
    }
    shapes |= {f"{place}.step": torch.Size() for place in range(len(parameters))}
    began = {key.split(".")[0] for key in tensors}  # parameters that have had a gradient
    wanted = {key: shape for key, shape in shapes.items() if key.split(".")[0] in began}
    given = {key: tensor.shape for key, tensor in tensors.items()}
    if odd := sorted(key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key)):
        raise ValueError(f"{bundle.path}: {odd[0]} of its optimiser does not fit the adapters of the model")
    fill_optimizer(optimizer, tensors)


def recorded_tokens(bundle: Bundle, trainer: PPOTrainer) -> Tokens:
    """The tokens of the step as they were sampled, on the trainer's device."""
    own = bundle.group("tokens")
    prompts: list[str] = [
        Prompt(each["text"], each.get("columns") or {}, each.get("turns") or ())
        for each in bundle.facts["prompts"]
    ]
    kept = {name: own.pop(f"kept_{name}", None) for name in ("ids", "bits")}
    experts = [own.pop(name) for name in ("experts_prompt", "experts_response") if name in own]
    named = any(each is not None for each in kept.values())
    by_scoring = "scoring/outside_kept" in bundle.tensors  # whatever sampled did not name the kept sets
    tokens = Tokens(
        prompts=prompts,
        tokenizer=trainer.tokenizer,
        kept=KeptSet(**kept) if named and not by_scoring else None,
        episodes=[Episode(**each) for each in bundle.facts.get("episodes", [])] or None,
        experts=RecordedExperts(*experts) if len(experts) == 2 else None,
        **own,
    )
    check_tokens(tokens, trainer, bundle)
    return tokens.map(lambda tensor: tensor.to(trainer.models.device))


def _sample_again(
    trainer: PPOTrainer, bundle: Bundle, tokens: Tokens
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The prompts encoded and the responses sampled anew, and what of this cannot be."""
    generator, state = trainer.generator, bundle.facts["state"]
    encoded = generator.tokenize(list(tokens.prompts))[1]
    recorded = [row[mask].tolist() for row, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)]
    # of a prompt that was cut only the rest is recorded
    rows = [
        own if cut else new
        for own, new, cut in zip(recorded, encoded, tokens.truncated.tolist(), strict=True)
    ]
    ids, mask = pad_rows(rows, trainer.tokenizer.pad_token_id, left=True)
    again = {"tokens/prompt_ids": ids, "tokens/prompt_mask": mask}
    if bundle.facts["settings"].get("engine") == "vllm":
        return again, {"sampled tokens": "taken from the bundle: vLLM sampled them"}
    if tokens.episodes is not None:
        return again, {"sampled tokens": "taken from the bundle: an environment or tools answered them"}
    nothing = tokens.response_ids[:, :0]
    prompts = replace(
        tokens,
        response_ids=nothing,
        mask=nothing.bool(),
        kept=None,
        sampled_logprobs=None,
        experts=None,
    )
    sampled = generator.sample(prompts, int(state["step"]))
    found = {name: each.detach().cpu() for name, each in token_tensors(sampled).items()}
    if "scoring/outside_kept" in bundle.tensors:
        found |= {name: each for name, each in bundle.group("tokens").items() if name.startswith("kept_")}
    return {f"tokens/{name}": each for name, each in found.items()} | again, {}


class RecordedGenerator(SequenceGenerator):
    """Gives recorded tokens for every prompt; scores them as any."""

    def __init__(
        self, tokens: Tokens, bundle: Bundle, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig
    ):
        super().__init__(models, tokenizer, config)
        self.tokens = tokens
        self.policy_lag = int(bundle.facts["state"].get("policy_lag", 0))
        self.on_vllm = bundle.facts["settings"].get("engine") == "vllm"

    def sample(self, prompts: object, step: int = 0, reference: bool = False) -> Tokens:
        return self.tokens

    def add_importance_weights(self, rollout: TokenPairs) -> tuple[TokenPairs, dict[str, float]]:
        rollout, measured = super().add_importance_weights(rollout)
        config = self.config
        if self.on_vllm and config.corrects_sampling:
            band = (config.importance_mode, config.importance_low, config.importance_clip)
            rollout, _ = add_importance_weights(rollout, *band, is_old=self.policy_lag > 0)
        return rollout, measured

    def check_sampling_gap(self, gap: float) -> None:
        """Another machine may have sampled: the stages say how far it is off."""


class RecordedRewards(RewardComputer):
    """Gives recorded scores."""

    def __init__(self, bundle: Bundle, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        super().__init__(models, tokenizer, config)
        own = bundle.group("rewards")
        by_name = dict(zip(map(str, bundle.facts["reward_names"]), own["by_name"], strict=True))
        self.recorded = Scores(
            own["sequence"], own.get("token"), by_name, own.get("spread"), own.get("failed_programs")
        )

    def score_pairs(self, pairs: TokenPairs) -> Scores:
        return self.recorded
