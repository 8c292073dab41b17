"""Reward models on real preferences: `RewardTrainer` of Proxima and of TRL 1.12, five folds each.

    python -m tools.peer.reward_models prepare --data DATA --out OUT
    python -m tools.peer.reward_models all --out OUT

Both get the same token ids, base, epochs, batch size, adapters and learning rates. Fold 0 of each runs alone,
for the seconds; the others run beside each other. The weights after the last step are judged, not the best
ones. OUT/reward is TRL's model of fold 0 as a sequence classifier, for `tools.peer.ppo`.
"""

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch

from proxima.base_setup import load_network, load_tokenizer, pick_device
from proxima.base_setup.tokenizer_setup import read_tokenizer
from proxima.config import FinetuningConfig, RewardConfig
from proxima.evaluator.win_rates import SAMPLES
from proxima.finetuning import RewardTrainer
from proxima.finetuning.reward_trainer import calibration_error
from tools.peer.judged_answers import scores
from tools.peer.preference_pairs import FOLDS, Pair, load_pairs, read_pairs, write_pairs
from tools.peer.side_by_side import run_together

SIDES = ("ours", "trl")
DEFAULT = "default"  # ours with its default loss: TRL has none of its terms
T_OF_4 = 2.776  # 97.5 % point of Student's t with four degrees of freedom: five folds
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": "all-linear"}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.do == "prepare":
        prepare(args)
    elif args.do in (*SIDES, DEFAULT):
        margins, seconds = train_trl(args) if args.do == "trl" else train_ours(args)
        record = {"margins": margins, "seconds": seconds}
        (args.out / f"{args.do}-{args.fold}.json").write_text(json.dumps(record))
    else:
        if args.do == "all":
            run_all(args)
        report(args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=["prepare", *SIDES, DEFAULT, "all", "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--instruct", type=int, default=1000)
    parser.add_argument("--hh", type=int, default=1500)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-4)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> None:
    """The base as a folder that `transformers` reads, with a pad token that is not EOS, and the pairs."""
    config = FinetuningConfig(args.model, dtype="float32")
    network = load_network(config, args.model, torch.device("cpu"))
    tokenizer: Any = read_tokenizer(args.model)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # TRL never trains an EOS that pads
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    network.save_pretrained(args.out / "base")
    tokenizer.save_pretrained(args.out / "base")
    counts = {"instruct": args.instruct, "hh": args.hh}
    pairs = read_pairs(args.data, tokenizer, counts, args.max_length)
    write_pairs(args.out / "pairs.json", pairs)
    print({source: sum(pair.source == source for pair in pairs) for source in counts})


def parts(args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and the fold that is held out."""
    pairs = load_pairs(args.out / "pairs.json")
    return [p for p in pairs if p.fold != args.fold], [p for p in pairs if p.fold == args.fold]


def settings(args: argparse.Namespace) -> FinetuningConfig:
    return FinetuningConfig(
        str(args.out / "base"),
        learning_rate=args.rate,
        epochs=args.epochs,
        batch_size=args.batch,
        micro_batch_size=args.batch,
        max_length=args.max_length,
        eval_every=10**6,  # at the end alone
        run_dir=str(args.out / "runs"),
        seed=args.fold,
    )


def train_ours(args: argparse.Namespace) -> tuple[list[float], float]:
    """Margins of the held-out pairs, and the seconds that training took."""
    train, held_out = ([pair.preference for pair in part] for part in parts(args))
    config = settings(args)
    trainer = RewardTrainer(RewardConfig(**config.to_dict()) if args.do == DEFAULT else config)
    started = time.perf_counter()
    trainer.train(train, train[: args.batch])
    seconds = time.perf_counter() - started
    rows = [trainer.encode(each) for each in held_out]
    with torch.no_grad(), trainer.role.active():
        found = [trainer.margins(rows[i : i + 32]) for i in range(0, len(rows), 32)]
    return torch.cat(found).tolist(), seconds


def train_trl(args: argparse.Namespace) -> tuple[list[float], float]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig
    from trl import RewardTrainer as TRLTrainer

    train, held_out = (encoded(args, part) for part in parts(args))
    steps = args.epochs * math.ceil(len(train["chosen_ids"]) / args.batch)
    cuda = pick_device("auto").type == "cuda"
    base = str(args.out / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(args.fold)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    trainer = TRLTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(args.out / f"trl-{args.fold}"),
            per_device_train_batch_size=args.batch,
            num_train_epochs=args.epochs,
            learning_rate=args.rate,
            lr_scheduler_type="cosine",
            warmup_steps=round(settings(args).warmup_share * steps),
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_length=None,  # all pairs fit
            disable_dropout=False,
            gradient_checkpointing=False,
            bf16=cuda,
            use_cpu=not cuda,
            save_strategy="no",
            report_to="none",
            seed=args.fold,
        ),
        train_dataset=Dataset.from_dict(train),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"]),
    )
    started = time.perf_counter()
    trainer.train()
    trainer.save_model()  # ours saves too, and centres the scores
    seconds = time.perf_counter() - started
    merged = trainer.model.merge_and_unload().eval()
    if args.fold == 0:
        merged.save_pretrained(args.out / "reward")
        tokenizer.save_pretrained(args.out / "reward")
    both = [scores(merged, held_out[name], tokenizer.pad_token_id) for name in ("chosen_ids", "rejected_ids")]
    return (both[0] - both[1]).tolist(), seconds


def encoded(args: argparse.Namespace, pairs: list[Pair]) -> dict[str, list[list[int]]]:
    """Token ids as Proxima makes them."""
    from proxima.finetuning.example_batches import encode

    tokenizer = load_tokenizer(str(args.out / "base"))

    def ids(prompt: str, answer: str) -> list[int]:
        before, after = encode(tokenizer, prompt, answer)
        return before + after

    return {
        "chosen_ids": [ids(pair.prompt, pair.chosen) for pair in pairs],
        "rejected_ids": [ids(pair.prompt, pair.rejected) for pair in pairs],
    }


def run_all(args: argparse.Namespace) -> None:
    """Fold 0 of each side alone, then the others at the same time."""
    jobs = [(side, fold) for fold in range(FOLDS) for side in (*SIDES, DEFAULT)]
    for side, fold in jobs[:3]:
        finish(args, [(side, fold)])
    finish(args, jobs[3:])


def finish(args: argparse.Namespace, jobs: list[tuple[str, int]]) -> None:
    given = {"out": args.out, "epochs": args.epochs, "batch": args.batch, "rate": args.rate}
    flags = [f"--{name}={value}" for name, value in {**given, "max-length": args.max_length}.items()]
    commands = {args.out / f"{side}-{fold}.log": [side, *flags, f"--fold={fold}"] for side, fold in jobs}
    run_together("tools.peer.reward_models", commands)


def report(out: Path) -> None:
    """What was measured, as a table and in OUT/reward_models.json."""
    pairs = load_pairs(out / "pairs.json")
    order = [i for fold in range(FOLDS) for i, pair in enumerate(pairs) if pair.fold == fold]
    sources = [pairs[i].source for i in order]
    found: dict[str, Any] = {}
    margins = {}
    for side in (*SIDES, DEFAULT):
        records = [json.loads((out / f"{side}-{fold}.json").read_text()) for fold in range(FOLDS)]
        margins[side] = torch.tensor([margin for record in records for margin in record["margins"]])
        chosen = {"all": [True] * len(order), **{s: [each == s for each in sources] for s in set(sources)}}
        found[side] = {
            name: measures(margins[side][torch.tensor(rows)]) for name, rows in sorted(chosen.items())
        }
        found[side]["seconds_alone"] = records[0]["seconds"]
    right = {side: (margins[side] > 0).double() for side in margins}
    folds = torch.tensor([pairs[i].fold for i in order])
    for side in ("ours", DEFAULT):
        difference = right[side] - right["trl"]
        found[f"{side} less trl"] = {
            "by_fold": by_fold([float(difference[folds == fold].mean()) for fold in range(FOLDS)]),
            "by_prompt": by_prompt(difference.tolist(), [pairs[i].prompt for i in order]),
        }
    (out / "reward_models.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=1))


def measures(margins: torch.Tensor) -> dict[str, Any]:
    """Accuracy, in all and by quarters of the margin's size; calibration error and Brier score."""
    right = (margins > 0).double()
    quarters = right[margins.abs().argsort()].tensor_split(4)
    return {
        "pairs": len(margins),
        "accuracy": float(right.mean()),
        "calibration_error": calibration_error(margins),
        "brier": float(((1 - torch.sigmoid(margins)) ** 2).mean()),
        "by_margin": [float(quarter.mean()) for quarter in quarters],
    }


def by_fold(differences: list[float]) -> dict[str, Any]:
    mean = statistics.fmean(differences)
    half = T_OF_4 * statistics.stdev(differences) / len(differences) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "folds": differences}


def by_prompt(differences: list[float], prompts: list[str]) -> dict[str, float]:
    """Bootstrap over prompts: every pair was held out once, but trainings share data."""
    groups: dict[str, list[float]] = {}
    for prompt, each in zip(prompts, differences, strict=True):
        groups.setdefault(prompt, []).append(each)
    sums = [(sum(group), len(group)) for group in groups.values()]
    rng = random.Random("prompts")
    means = []
    for _ in range(SAMPLES):
        drawn = rng.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return {
        "mean": statistics.fmean(differences),
        "low": means[int(0.025 * SAMPLES)],
        "high": means[int(0.975 * SAMPLES) - 1],
    }


if __name__ == "__main__":
    main()
