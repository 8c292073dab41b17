"""PPO on a real model: Proxima and TRL 1.12, with the same prompts, reward model, settings and samples.

    python -m tools.peer.ppo all --out OUT

OUT is what `tools.peer.reward_models` left: the base, the reward model as a sequence classifier, the pairs.
Both train an adapter (rank 16) of the policy and start the value model from the reward model. TRL trains its
value model in full, since it has no other way; Proxima trains an adapter of it. Seed 0 of each runs alone,
for the seconds, unless `--alone no`. `all` ends after --limit seconds with a report of what is complete, and
the same command continues. A job that takes longer than the limit is never complete: raise it, or lower
--together.
"""

import argparse
import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch

from proxima.base_setup import load_network, merge_adapter, pick_device, pick_dtype
from proxima.config import PPOConfig, RewardSpec
from proxima.core.encoding import encode_prompts
from proxima.evaluator.win_rates import win_rate
from proxima.models import Backbone
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import write_json
from tools.peer.judged_answers import judge
from tools.peer.preference_pairs import load_pairs
from tools.peer.side_by_side import Job, add_limits, run_all

SIDES = ("ours", "trl")
HELD_OUT = 128
WARM = 3  # steps left out of the seconds per step


def main() -> None:
    args = arguments()
    if args.do != "report" and not (args.out / "reward").exists():
        sys.exit(f"{args.out / 'reward'} is missing: `python -m tools.peer.reward_models trl` makes it")
    if args.do == "all":
        alone = [job(args, side, 0) for side in ("base", *SIDES)]
        others = [job(args, side, seed) for seed in range(1, args.seeds) for side in SIDES]
        run_all("tools.peer.ppo", args, alone, others, report)
    elif args.do == "report":
        report(args.out)
    else:
        run_one(args)


def job(args: argparse.Namespace, side: str, seed: int) -> Job:
    alone = args.alone if seed == 0 else "no"
    own = argparse.Namespace(**{**vars(args), "do": side, "seed": seed, "alone": alone})
    return Job(f"ppo-{side}-{seed}", own, ("pairs.json", "reward/model.safetensors"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("do", choices=["all", "base", *SIDES, "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt, in tokens")
    parser.add_argument("--response", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--kl", type=float, default=0.05)
    add_limits(parser, together=1)
    return parser.parse_args()


def run_one(args: argparse.Namespace) -> None:
    """Train one side with one seed (or neither, for the base) and judge what came of it."""
    torch.manual_seed(args.seed)
    device = pick_device("auto")
    config = PPOConfig(str(args.out / "base"), dtype="float32")  # judged without rounding
    tokenizer, train, held_out = read_prompts(args)
    found: dict[str, Any] = {}
    if args.do == "base":
        policy = load_network(config, config.model_name, device)
    else:
        trainer = {"ours": train_ours, "trl": train_trl}[args.do]
        policy, found = trainer(args, tokenizer, train)
    reference = load_network(config, config.model_name, device)
    classifier = load_classifier(args, device).float()
    ids = encode_prompts(tokenizer, held_out)
    policy = policy.to(device).float().eval()
    found |= judge(policy, reference, classifier, tokenizer, ids, args.response)
    job(args, args.do, args.seed).write(found)


def read_prompts(args: argparse.Namespace) -> tuple[Any, list[str], list[str]]:
    """Prompts of the pairs that are short enough; those of the reward model's held-out fold are judged."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.out / "base", padding_side="left")
    folds = {pair.prompt: pair.fold for pair in load_pairs(args.out / "pairs.json")}
    sizes = map(len, encode_prompts(tokenizer, list(folds)))
    fitting = [text for text, size in zip(folds, sizes, strict=True) if size <= args.prompt]
    random.Random(0).shuffle(fitting)
    held_out = [text for text in fitting if folds[text] == 0][:HELD_OUT]
    train = [text for text in fitting if folds[text] != 0]
    need = args.steps * args.batch
    repeated = [text for _ in range(-(-need // len(train))) for text in train][:need]
    random.Random(args.seed).shuffle(repeated)
    return tokenizer, repeated, held_out


def load_classifier(args: argparse.Namespace, device: torch.device) -> Any:
    from transformers import AutoModelForSequenceClassification

    dtype = pick_dtype("auto", device)
    return AutoModelForSequenceClassification.from_pretrained(args.out / "reward", dtype=dtype).to(device)


def train_ours(args: argparse.Namespace, tokenizer: Any, prompts: list[str]) -> tuple[Any, dict[str, Any]]:
    config = PPOConfig(
        str(args.out / "base"),
        rewards=(RewardSpec(str(args.out / "reward")),),
        value_model=str(args.out / "reward"),
        learning_rate=args.rate,
        value_learning_rate=args.rate,
        batch_size=args.batch,
        minibatch_size=args.batch,
        ppo_epochs=args.epochs,
        max_new_tokens=args.response,
        kl_coef=args.kl,
        gamma=1.0,
        lam=0.95,
        top_k=0,
        top_p=1.0,
        value_clip=0.2,
        value_target="lambda_return",
        reward_units="raw",  # TRL has no other
        max_grad_norm=0.0,
        seed=args.seed,
        eval_every=10**6,
        checkpoint_every=0,
        token_samples=0,
        run_dir=str(args.out / "runs"),
        run_name=f"ppo-{args.seed}-{time.time_ns()}",
    )
    started = time.perf_counter()
    trainer = PPOTrainer(config)
    trained = trainer.train(prompts)
    total = time.perf_counter() - started
    trainer.save(trained.run_folder / "policy-of-peer")
    curve = {
        "rewards_by_step": [step["avg_reward"] for step in trained.metrics],
        "kl_by_step": [step["kl"] for step in trained.metrics],
        "seconds_by_step": [step["seconds"] for step in trained.metrics],
        "total_seconds": total,
    }
    base = Backbone(load_network(config, config.model_name, pick_device("auto")))
    adapter = str(trained.run_folder / "policy-of-peer" / "policy")
    return merge_adapter(base, adapter).network, curve


def train_trl(args: argparse.Namespace, tokenizer: Any, prompts: list[str]) -> tuple[Any, dict[str, Any]]:
    started = time.perf_counter()
    trainer = trl_trainer(args, tokenizer, prompts)
    logged: list[dict[str, float]] = []
    marks = [time.perf_counter()]

    def log(metrics: dict[str, float]) -> None:
        logged.append(metrics)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    trainer.log = log
    trainer.train()
    curve = {
        "rewards_by_step": [step["objective/scores"] for step in logged],
        "kl_by_step": [step["objective/kl"] for step in logged],
        "seconds_by_step": [after - before for before, after in pairwise(marks)],
        "total_seconds": time.perf_counter() - started,
    }
    return trainer.accelerator.unwrap_model(trainer.model).policy.float().merge_and_unload(), curve


def trl_trainer(args: argparse.Namespace, tokenizer: Any, prompts: list[str]) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl.experimental.ppo import PPOConfig as Settings
    from trl.experimental.ppo import PPOTrainer as Trainer

    device = pick_device("auto")
    policy = AutoModelForCausalLM.from_pretrained(args.out / "base", dtype=pick_dtype("auto", device))
    # one batch more than is used: TRL steps after every micro-batch of the last one
    rows = encode_prompts(tokenizer, prompts + prompts[: args.batch])
    data = Dataset.from_dict({"input_ids": rows})
    cuda = device.type == "cuda"
    settings = Settings(
        output_dir=str(args.out / f"ppo-trl-{args.seed}"),
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=1,
        total_episodes=args.steps * args.batch,
        local_rollout_forward_batch_size=args.batch,
        response_length=args.response,
        num_ppo_epochs=args.epochs,
        learning_rate=args.rate,
        adam_epsilon=1e-5,
        kl_coef=args.kl,
        gamma=1.0,
        lam=0.95,
        cliprange_value=0.2,
        temperature=1.0,
        stop_token="eos",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=cuda,
        tf32=True if cuda else None,
        use_cpu=not cuda,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    return Trainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=load_classifier(args, device),
        value_model=load_classifier(args, device).float(),  # trained in full: bfloat16 would lose its steps
        train_dataset=data,
        eval_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def report(out: Path) -> None:
    """Every side and seed that is there as one line, and all in OUT/ppo.json."""
    records = {path.stem[4:]: json.loads(path.read_text()) for path in sorted(out.glob("ppo-*-*.json"))}
    base = records.get("base-0")
    found: dict[str, Any] = {name.replace("-", " "): summary(each, base) for name, each in records.items()}
    for name, record in records.items():
        side, _, seed = name.partition("-")
        if side == "ours" and (other := records.get(f"trl-{seed}")):
            found[f"ours against trl {seed}"] = win_rate(record["rewards"], other["rewards"])
    write_json(out / "ppo.json", found)
    for name, numbers in found.items():
        print(name, {key: round(number, 4) for key, number in numbers.items() if key != "wins"}, flush=True)


def summary(record: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Win rates against the base where it was judged."""
    found: dict[str, Any] = {"reward": statistics.fmean(record["rewards"])}
    found |= {name: record[name] for name in ("kl", "length", "eos_rate")}
    if base:
        wins = win_rate(record["rewards"], base["rewards"])
        found |= {"wins": wins, **{f"win_{name}": wins[name] for name in ("rate", "low", "high")}}
    if "total_seconds" in record:
        last = max(1, len(record["kl_by_step"]) // 4)
        steady = record["seconds_by_step"][WARM:] or record["seconds_by_step"]
        found["training_reward"] = statistics.fmean(record["rewards_by_step"][-last:])
        found["training_kl"] = statistics.fmean(record["kl_by_step"][-last:])
        found["seconds_per_step"] = statistics.median(steady)
        found["total_seconds"] = record["total_seconds"]
    return found


if __name__ == "__main__":
    main()
