"""Reward models on real preferences: `RewardTrainer` of Proxima and of TRL 1.12, five folds each.

    python -m tools.peer.reward_models prepare --data DATA --out OUT
    python -m tools.peer.reward_models all --out OUT

Both get the same token ids, base, epochs, batch size, adapters and learning rates. Fold 0 of each runs alone,
for the seconds; the others run beside each other, and with `--alone no` all do. `all` ends after --limit
seconds with a report of what is complete, and the same command continues. The weights after the last step are
judged, not the best ones. OUT/reward is TRL's model of fold 0 as a sequence classifier, for
`tools.peer.ppo`.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable
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
from proxima.pages.comparison.seed_groups import t_interval
from proxima.runs import write_json
from tools.peer.judged_answers import scores
from tools.peer.preference_pairs import FOLDS, Pair, load_pairs, read_pairs, write_pairs
from tools.peer.side_by_side import Job, add_limits, run_all

SIDES = ("ours", "trl")
DEFAULT = "default"  # ours with its default loss: TRL has none of its terms
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": "all-linear"}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.do == "prepare":
        prepare(args)
    elif args.do in (*SIDES, DEFAULT):
        margins, seconds = train_trl(args) if args.do == "trl" else train_ours(args)
        job(args, args.do, args.fold).write({"margins": margins, "seconds": seconds})
    elif args.do == "all":
        jobs = [job(args, side, fold) for fold in range(FOLDS) for side in (*SIDES, DEFAULT)]
        run_all("tools.peer.reward_models", args, jobs[:3], jobs[3:], report)
    else:
        report(args.out)


def job(args: argparse.Namespace, side: str, fold: int) -> Job:
    alone = args.alone if fold == 0 else "no"
    own = argparse.Namespace(**{**vars(args), "do": side, "fold": fold, "alone": alone})
    return Job(f"{side}-{fold}", own, ("pairs.json",))


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
    add_limits(parser, together=4)
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


def report(out: Path) -> None:
    """What was measured so far, as a table and in OUT/reward_models.json."""
    pairs = load_pairs(out / "pairs.json")
    by_fold_of = {fold: [pair for pair in pairs if pair.fold == fold] for fold in range(FOLDS)}
    records = {side: read_records(out, side) for side in (*SIDES, DEFAULT)}
    found: dict[str, Any] = {"missing": []}
    for side, each in records.items():
        found["missing"] += [f"{side}-{fold}" for fold in range(FOLDS) if fold not in each]
        if each:
            held_out = [pair for fold in each for pair in by_fold_of[fold]]
            found[side] = by_source(joined(each), [pair.source for pair in held_out])
            timed = [one["seconds"] for one in each.values() if one["settings"].get("alone") == "yes"]
            found[side]["seconds_alone"] = timed[0] if timed else None
    for side in ("ours", DEFAULT):
        both = [fold for fold in records["trl"] if fold in records[side]]
        if both:
            right = {name: (joined(records[name], both) > 0).double() for name in (side, "trl")}
            difference = right[side] - right["trl"]
            parts = difference.split([len(by_fold_of[fold]) for fold in both])
            prompts = [pair.prompt for fold in both for pair in by_fold_of[fold]]
            found[f"{side} less trl"] = {
                "by_fold": by_fold([float(part.mean()) for part in parts]),
                "by_prompt": by_prompt(difference.tolist(), prompts),
            }
    write_json(out / "reward_models.json", found)
    print((out / "reward_models.json").read_text())


def read_records(out: Path, side: str) -> dict[int, dict[str, Any]]:
    """By fold, those that are there."""
    paths = {fold: out / f"{side}-{fold}.json" for fold in range(FOLDS)}
    return {fold: json.loads(path.read_text()) for fold, path in paths.items() if path.is_file()}


def joined(records: dict[int, dict[str, Any]], folds: Iterable[int] | None = None) -> torch.Tensor:
    """Margins of all held-out pairs, fold after fold."""
    return torch.tensor([margin for fold in folds or records for margin in records[fold]["margins"]])


def by_source(margins: torch.Tensor, sources: list[str]) -> dict[str, Any]:
    """Measures of all pairs, and of each source's."""
    found = {"all": measures(margins)}
    for source in sorted(set(sources)):
        found[source] = measures(margins[torch.tensor([each == source for each in sources])])
    return found


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
    """With Student's interval where there are two folds or more."""
    several = len(differences) > 1
    mean, low, high = t_interval(differences) if several else (differences[0], None, None)
    return {"mean": mean, "low": low, "high": high, "folds": differences}


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
