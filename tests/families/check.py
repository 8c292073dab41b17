"""One architecture, end to end. In: a model type. Out: an `Outcome`: it passes, is refused by name, or cannot
be built here.

It passes where the log-probabilities of sampling, of scoring, of training and of the network by itself (each
sequence alone, no padding, no cache) are the same, two PPO steps train, and what was trained loads again from
an export.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from proxima import PPOConfig, PPOTrainer
from proxima.core.types import Tokens
from proxima.models.passes import accepted_arguments
from proxima.tools.model_export import export
from proxima.world.tiny_models import byte_tokenizer
from tests.families.networks import PAD, tiny_network

PROMPTS = [
    "hello there",
    "a",
    "some prompt that is longer than seventy tokens, so that layers which work in chunks are seen",
    "xyz",
]
CLOSE = 2e-3  # nats: a few layers in float32, summed in another order


@dataclass(frozen=True)
class Outcome:
    """A row of the table in docs/families.md."""

    family: str
    status: str  # passes, refused, not built
    path: str = ""
    sampling: str = ""
    reason: str = ""


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    """It differs between texts."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def check(family: str, folder: Path | None = None, **settings: Any) -> Outcome:
    """
    Args:
        settings: of the PPO config.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return check(family, Path(made), **settings)
    try:
        tiny_network(family).save_pretrained(folder / "model")
    except Exception as error:  # another library is missing, or the config's class does not fit the network's
        return Outcome(family, "not built", reason=first_sentence(error))
    byte_tokenizer().save_pretrained(folder / "model")
    config = PPOConfig(
        model_name=str(folder / "model"),
        rewards=(reward,),
        device="cpu",
        **{
            "lora_r": 2,
            "learning_rate": 1e-2,
            "value_learning_rate": 1e-2,
            "max_new_tokens": 6,
            "ppo_epochs": 1,
            **settings,
        },
    )
    try:
        trainer = PPOTrainer(config)
    except ValueError as error:
        return Outcome(family, "refused", reason=why_refused(str(error)))
    run_twice(trainer)
    check_export(trainer, folder)
    backbone = trainer.models.policy.backbone
    if backbone.decoder is not None:
        return Outcome(family, "passes", "fast", "no padding")
    return Outcome(family, "passes", "reference", backbone.passes.decoding)


def why_refused(message: str) -> str:
    """The reason in a refusal; any other error is not a refusal."""
    if message.startswith("the architecture "):
        return message.split(": ", 1)[1]
    if message.startswith("cannot load the model ") and "has no causal language model" in message:
        return "transformers itself cannot load what it saves of it"
    raise AssertionError(message)


def run_twice(trainer: PPOTrainer, own: Any = None) -> None:
    """Two PPO steps: all log-probabilities agree, before and after the first update, and the update is seen
    in the second.

    Args:
        own: what the reference must be; by default the base as `transformers` loads it.
    """
    own = own or load_alone(trainer.config.model_name)
    for step in range(2):
        results = trainer.ppo_step(PROMPTS)
        pairs = results["sa_pairs"]
        tokens = pairs.tokens
        alone = logprobs_alone(own, tokens, trainer.config.temperature)
        plain = tokens.mask & (tokens.response_ids != PAD).all(
            1, keepdim=True
        )  # some networks do not count this token
        assert_close(
            "the reference's scoring and the network alone", pairs.column("logprob_ref"), alone, plain
        )
        scored = pairs.column("logprob_policy")
        assert_close("sampling and scoring", tokens.sampled_logprobs, scored, tokens.mask)
        assert results["first_ratio_error"] < CLOSE, (
            f"scoring and training differ: {results['first_ratio_error']:.3g}"
        )
        numbers = ("policy_loss", "value_loss", "kl_exact", "grad_norm_policy", "grad_norm_value")
        assert all(math.isfinite(results[name]) for name in numbers), {
            name: results[name] for name in numbers
        }
        assert results["grad_norm_policy"] > 0
        assert (results["kl_exact"] > 1e-6) == (step > 0), (
            f"KL {results['kl_exact']:.3g} nats in step {step + 1}"
        )


def load_alone(folder: str | Path) -> Any:
    """A network as `transformers` loads it, with the attention that computes all that its config says."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        network.set_attn_implementation("eager")
    return network


def check_export(trainer: PPOTrainer, folder: Path) -> None:
    """The merged policy, loaded by `transformers`, gives the policy's log-probabilities."""
    trainer.models.policy.save(folder / "run" / "policy")
    trainer.config.to_yaml(folder / "run" / "config.yaml")
    exported = export(folder / "run", folder / "exported", merge=True)
    network = load_alone(exported)
    tokens = trainer.generator.sample(PROMPTS, 7)
    scored = trainer.generator.score(tokens)["logprob_policy"]
    kept = whole_logprobs(trainer, tokens)
    assert scored.isfinite().all()
    plain = tokens.mask & (tokens.response_ids != PAD).all(1, keepdim=True)
    assert_close(
        "the policy and its export", kept, logprobs_alone(network, tokens, trainer.config.temperature), plain
    )


@torch.no_grad()
def whole_logprobs(trainer: PPOTrainer, tokens: Tokens) -> torch.Tensor:
    """The policy's (B, R) log-probabilities over the whole vocabulary."""
    logits = trainer.models.policy.response_logits(tokens) / trainer.config.temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens.response_ids.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def logprobs_alone(network: Any, tokens: Tokens, temperature: float) -> torch.Tensor:
    """The network by itself: each sequence alone, without padding or cache; (B, R), 0 on padding."""
    found = torch.zeros(tokens.mask.shape)
    for row in range(len(tokens.prompts)):
        prompt, response = (
            ids[row][mask[row]]
            for ids, mask in ((tokens.prompt_ids, tokens.prompt_mask), (tokens.response_ids, tokens.mask))
        )
        given = accepted_arguments(
            network, {"input_ids": torch.cat([prompt, response])[None], "use_cache": False}
        )
        logits = network(**given).logits[0, len(prompt) - 1 : -1] / temperature
        found[row, : len(response)] = torch.log_softmax(logits, -1).gather(-1, response[:, None]).squeeze(-1)
    return found


def assert_close(what: str, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> None:
    gap = float(((one - other) * mask).abs().max())
    assert gap <= CLOSE, f"{what} differ by {gap:.3g} nats"


def first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text.split('. ')[0][:100]}"
