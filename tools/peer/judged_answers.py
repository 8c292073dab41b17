"""Answers of a policy to held-out prompts, with what a reward model and the reference make of them.

The same code for every policy: generation, log-probabilities and scores are those of `transformers`.
"""

from typing import Any

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch
from torch import Tensor

from proxima.core.encoding import pad_rows

BATCH = 64


@torch.no_grad()
def scores(classifier: Any, rows: list[list[int]], pad: int) -> Tensor:
    """Scores (B,) of rows of ids, by the classifier's own forward pass."""
    found = []
    for start in range(0, len(rows), BATCH):
        table, mask = on(classifier.device, pad_rows(rows[start : start + BATCH], pad))
        found.append(classifier(input_ids=table, attention_mask=mask).logits.float().squeeze(-1).cpu())
    return torch.cat(found)


def on(device: torch.device, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask on a device."""
    return tensors[0].to(device), tensors[1].to(device)


@torch.no_grad()
def sample(network: Any, prompts: list[list[int]], length: int, eos: int, pad: int) -> list[list[int]]:
    """One answer for each prompt at temperature 1, EOS included."""
    found = []
    for start in range(0, len(prompts), BATCH):
        table, mask = on(network.device, pad_rows(prompts[start : start + BATCH], pad, left=True))
        written = network.generate(
            input_ids=table,
            attention_mask=mask,
            max_new_tokens=length,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=eos,
            pad_token_id=pad,
        )[:, table.shape[1] :].tolist()
        found += [row[: row.index(eos) + 1] if eos in row else row for row in written]
    return found


@torch.no_grad()
def log_probabilities(network: Any, prompts: list[list[int]], answers: list[list[int]], pad: int) -> Tensor:
    """Of each answer, summed over its tokens (B,)."""
    found = []
    for start in range(0, len(prompts), BATCH):
        some = list(zip(prompts[start : start + BATCH], answers[start : start + BATCH], strict=True))
        table, mask = on(network.device, pad_rows([prompt + answer for prompt, answer in some], pad))
        logits = network(input_ids=table, attention_mask=mask).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, table[:, 1:].unsqueeze(-1)).squeeze(-1)
        for row, (prompt, answer) in zip(chosen, some, strict=True):
            found.append(row[len(prompt) - 1 : len(prompt) + len(answer) - 1].sum().cpu())
    return torch.stack(found)


def judge(
    policy: Any, reference: Any, classifier: Any, tokenizer: Any, prompts: list[list[int]], length: int
) -> dict[str, Any]:
    """Per-prompt rewards, and means of KL to the reference, length and EOS rate."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    answers = sample(policy, prompts, length, eos, pad)
    both = [log_probabilities(network, prompts, answers, pad) for network in (policy, reference)]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "rewards": scores(classifier, rows, pad).tolist(),
        "kl": float((both[0] - both[1]).mean()),
        "length": sum(map(len, answers)) / len(answers),
        "eos_rate": sum(answer[-1] == eos for answer in answers) / len(answers),
        "samples": tokenizer.batch_decode(answers[:3]),
    }
