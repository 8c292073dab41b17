"""Builds what the package ships: `make embedded`. In: a seed. Out: tokenizer, model and preferences in
`proxima/world/embedded/`.

The tokenizer is a byte-level BPE of the world's text. The model is a small Qwen3, trained from scratch on
demonstrations of mixed quality by the package's own `SFTTrainer`. The preferences are pairs of its samples,
labelled by the simulated annotators.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from proxima.base_setup import EMBEDDED, BaseSetup
from proxima.config import FinetuningConfig, PPOConfig
from proxima.core.json_record import Record
from proxima.core.types import Tokens
from proxima.finetuning import Demonstration, SFTTrainer
from proxima.ppo_trainer import SequenceGenerator
from proxima.world.annotators import Annotator
from proxima.world.demo_settings import MAX_NEW_TOKENS
from proxima.world.demonstrations import write_summary
from proxima.world.gold import gold_score
from proxima.world.posts import Post, make_posts
from proxima.world.tiny_models import EOS_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 1024  # at most; every word of the world becomes one token before that
PAD_TOKEN = "<|pad|>"
PREFERENCES = {"train": 6000, "eval": 1000}


def demonstrations(posts: list[Post], seed: int) -> list[Demonstration]:
    rng = random.Random(f"demonstrations {seed}")
    return [Demonstration(post.prompt, write_summary(post, rng)) for post in posts]


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def build_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def sample_preferences(
    generator: SequenceGenerator, posts: list[Post], seed: int, step: int, against_reference: bool = False
) -> list[Record]:
    """Two samples per post, and which one an annotator prefers; equal samples are left out.

    Args:
        against_reference: the second sample of each pair is the reference's.
    """
    annotator = Annotator(seed)
    rows = []
    for start in range(0, len(posts), 100):
        chunk = posts[start : start + 100]
        if against_reference:
            prompts = [post.prompt for post in chunk]
            firsts, seconds = (
                _answers(tokens)
                for tokens in (generator.sample(prompts, step), generator.sample(prompts, step + 1, True))
            )
        else:
            both = _answers(generator.sample([post.prompt for post in chunk for _ in range(2)], step))
            firsts, seconds = both[0::2], both[1::2]
        for post, first, second in zip(chunk, firsts, seconds, strict=True):
            if first == second:
                continue
            chosen, rejected = first, second
            if not annotator.prefers_first(post, first, second):
                chosen, rejected = second, first
            row: Record = {"prompt": post.prompt, "chosen": chosen[0], "rejected": rejected[0]}
            flags = {"chosen_ended": chosen[1], "rejected_ended": rejected[1]}
            rows.append(row | {name: value for name, value in flags.items() if not value})
    return rows


def _answers(tokens: Tokens) -> list[tuple[str, bool]]:
    return list(zip(tokens.texts(), tokens.ended.tolist(), strict=True))


def write_jsonl(path: Path, rows: list[Record]) -> None:
    """Gzipped without a timestamp: the same rows give the same bytes."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def build(
    folder: Path, seed: int = 0, posts: int = 110_000, epochs: int = 1, device: str = "auto", batch: int = 64
) -> None:
    started = time.perf_counter()
    training = make_posts(posts, "train", seed)
    examples = demonstrations(training, seed)
    tokenizer = build_tokenizer([item.prompt + item.completion for item in examples[:20_000]])
    with tempfile.TemporaryDirectory() as scratch:
        config = FinetuningConfig(
            model_name="from scratch",
            lora_r=0,
            learning_rate=3e-3,
            batch_size=batch,
            micro_batch_size=batch,
            epochs=epochs,
            weight_decay=0.01,
            eval_every=200,
            device=device,
            seed=seed,
            run_dir=scratch,
            run_name="sft",
        )
        trainer = SFTTrainer(config, build_network(tokenizer, seed), tokenizer)
        print(
            f"{sum(p.numel() for p in trainer.role.parameters()):,} parameters, {len(examples):,} "
            "demonstrations"
        )
        results = trainer.train(examples[1000:], examples[:1000])
    folder.mkdir(parents=True, exist_ok=True)
    trainer.backbone.network.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    setup = BaseSetup(
        settings := PPOConfig(str(folder), max_new_tokens=MAX_NEW_TOKENS, top_k=0, top_p=1.0, device=device)
    )
    generator = SequenceGenerator(setup.models, setup.tokenizer, settings)
    held_out = make_posts(400, "eval", seed)
    for temperature in (1.0, 0.01):
        settings.temperature = temperature
        tokens = generator.sample([post.prompt for post in held_out], -1)
        gold = [gold_score(*row) for row in zip(held_out, tokens.texts(), tokens.ended.tolist(), strict=True)]
        print(f"gold on {len(gold)} held-out posts at temperature {temperature}: {sum(gold) / len(gold):.3f}")
    settings.temperature = 1.0
    for number, (split, count) in enumerate(PREFERENCES.items()):
        rows = sample_preferences(generator, make_posts(count, split, seed + 1), seed, number + 1)  # type: ignore[arg-type]
        write_jsonl(folder / f"preferences_{split}.jsonl.gz", rows)
        print(f"{len(rows)} preferences ({split})")
    print(
        f"validation loss {results.best['validation_loss']:.4f}; all done in "
        f"{time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=EMBEDDED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--posts", type=int, default=110_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    build(given.folder, given.seed, given.posts, given.epochs, given.device)
