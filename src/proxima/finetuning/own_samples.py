"""Answers of a model as it is before training. In: training examples. Out: answers on their prompts, as ids.

The unit of a reward model's scores is measured on them: PPO starts from answers like these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proxima.base_setup import eos_token_ids
from proxima.config import FinetuningConfig
from proxima.core.encoding import pad_rows
from proxima.core.sampling import Sampling, sequence_keys
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Tokens
from proxima.models import Backbone, PolicyModel

Row = tuple[list[int], list[int]]
AT_ONCE = 64  # prompts that are sampled together
TEMPERATURE = 1.0


@dataclass(frozen=True)
class OwnSamples:
    """Sampled answers, and how they were sampled."""

    rows: list[Row]  # prompt ids, response ids with a sampled EOS
    how: dict[str, object]


def sample_answers(
    backbone: Backbone,
    adapter: str | None,
    tokenizer: Tokenizer,
    config: FinetuningConfig,
    examples: Sequence[Sequence[Row]],
) -> OwnSamples:
    """One answer per example, from the whole vocabulary at temperature 1, no longer than the longest answer
    in the examples.

    Args:
        adapter: of the model to sample; None = the base.
        examples: the answers of each example, which share its prompt.
    """
    prompts = [answers[0][0] for answers in examples]
    longest = max(len(response) for answers in examples for _, response in answers)
    if backbone.context_length is not None:
        longest = max(1, min(longest, backbone.context_length - max(map(len, prompts))))
    sampling = Sampling(
        max_new_tokens=longest,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        eos_ids=eos_token_ids(tokenizer, backbone.network),
        seed=config.seed,
        step=0,
    )
    seen: dict[bytes, int] = {}
    rows: list[Row] = []
    backbone.network.eval()
    for start in range(0, len(prompts), AT_ONCE):
        chunk = prompts[start : start + AT_ONCE]
        sampled = PolicyModel(backbone, adapter).generate(
            _prompts(chunk, seen, backbone, tokenizer), sampling
        )
        rows += zip(chunk, map(list, sampled.response_rows), strict=True)
    backbone.release_generation()
    how = {
        "samples": len(rows),
        "model": config.model_name,
        **({"sft_adapter": config.sft_adapter} if config.sft_adapter else {}),
        "max_new_tokens": longest,
        "temperature": TEMPERATURE,
        "seed": config.seed,
    }
    return OwnSamples(rows, how)


def _prompts(
    rows: Sequence[list[int]], seen: dict[bytes, int], backbone: Backbone, tokenizer: Tokenizer
) -> Tokens:
    ids, mask = pad_rows(rows, left=True)
    nothing = torch.zeros(len(rows), 0, dtype=torch.long)
    tokens = Tokens(
        prompts=[""] * len(rows),
        prompt_ids=ids,
        prompt_mask=mask,
        response_ids=nothing,
        mask=nothing.bool(),
        ended=torch.zeros(len(rows), dtype=torch.bool),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        keys=sequence_keys(rows, seen),
        tokenizer=tokenizer,
    )
    return tokens.map(lambda tensor: tensor.to(backbone.device))
