"""`proxima eval`: a finished run on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import RewardSpec, setting
from proxima.core.chat_turns import turn_line, turns_of
from proxima.core.json_record import RecordView
from proxima.core.terminal_text import printable, visible
from proxima.runs import is_defined, title_of, with_unit

TITLES = 48  # characters of the first column
LEFT_OUT = ("failed_rewards", "reward_low", "reward_high")  # told below the table, or as an interval


@dataclass
class Eval(Command):
    """Evaluate a finished run on held-out prompts: rewards, KL, lengths, and its win rate against the
    reference."""

    words: ClassVar[tuple[str, ...]] = ("folder",)
    example: ClassVar[str] = "proxima eval runs/first --data my-data/held_out.jsonl --limit 20"
    writes: ClassVar[str] = "`evaluation.json` in the run's folder."
    guide: ClassVar[str] = "evaluate.md"

    folder: Path
    """Folder of the run, for example runs/NAME; may be given without the flag."""
    data: str
    """Held-out prompts, in any form `proxima train` takes."""
    rewards: tuple[RewardSpec, ...] = ()
    """Score by these instead of the run's own rewards; functions and servers are only called where they
    are named here."""
    judges: tuple[RewardSpec, ...] = ()
    """Who else says which of two answers is better: any reward, or a function or URL that compares
    (docs/evaluate.md); by default the run's own judges."""
    environment: tuple[RewardSpec, ...] = ()
    """The run's environment, which is only used where it is named here; so are its `--tools`."""
    tools: tuple[RewardSpec, ...] = ()
    """The run's tools."""
    limit: int = 0
    """Use only the first `limit` prompts; 0 = all."""
    best_of: int = setting(0, at_least=0, at_most=1024)
    """Also sample the reference this many times per prompt and score the best of 1, 2, 4, ... by the rewards:
    what PPO must beat at the same KL; 0 = no."""
    show: int = 3
    """Number of responses to print, reference and policy side by side."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused, whatever the run's
    settings say."""

    def run(self) -> None:
        from proxima.base_setup import load_tokenizer
        from proxima.data import read_prompts
        from proxima.evaluator import evaluate_run, run_config

        named = ("rewards", "judges", "environment", "tools")
        given = {name: value for name in named if (value := getattr(self, name))}
        config = run_config(self.folder, **given, trust_remote_code=self.trust_remote_code)
        prompts = read_prompts(
            self.data, load_tokenizer(config.model_name, config.trust_remote_code), self.limit
        )
        results = evaluate_run(
            self.folder, prompts, trust_remote_code=self.trust_remote_code, best_of=self.best_of, **given
        )
        for sample in results["samples"][: self.show]:
            turns = turns_of(sample["prompt"], sample.get("turns"))
            told = [visible(turn_line(turn)) for turn in turns] or [visible(sample["prompt"])]
            print("\n" + "\n".join(told))
            for side in ("reference", "policy"):
                said = " | ".join(map(turn_line, sample.get(f"{side}_turns", ()))) or sample[side]
                print(f"  {side} ({sample[side + '_reward']:.3g}): {visible(said)}")
        print(printable(table(results)))
        print(f"written to {visible(str(self.folder / 'evaluation.json'))}")


def table(results: RecordView) -> str:
    """Reference and policy side by side, then the win rates."""
    old, new = results["reference"], results["policy"]
    rows = [f"\n{'on ' + str(results['prompts']) + ' prompts':{TITLES}}{'reference':>12}{'policy':>12}"]
    for name in new:
        declared = "validation/reward" if name == "avg_reward" else f"validation/{name}"
        if name in old and name not in LEFT_OUT and is_defined(declared):
            rows.append(f"{with_unit(declared):{TITLES}}{old[name]:>12.4g}{new[name]:>12.4g}")
    rates = {"validation/win_rate": results["win_rate"]}
    rates |= {f"validation/win_rate/{name}": rate for name, rate in results["win_rates"].items()}
    for name, rate in rates.items():
        interval = f"(95 %: {rate['low']:.3f} to {rate['high']:.3f})"
        rows.append(f"{title_of(name):{TITLES}}{'':>12}{rate['rate']:>12.3f}   {interval}")
    for row in results.get("best_of", ()):
        name = f"best of {row['n']} of the reference, KL at most {row['kl']:.2f}"
        rows.append(f"{name:{TITLES}}{row['reward']:>12.4g}")
    for name, best in results.get("best_constants", {}).items():
        shown = f"{name} of the constant answer {best['answer']!r}"
        rows.append(f"{shown:{TITLES}}{best['score']:>12.4g}{best['score']:>12.4g}")
    failed = sum(results[side]["failed_rewards"] for side in ("reference", "policy"))
    if failed:
        rows.append(f"{failed:.0f} rewards failed and were left out")
    for name, rate in results["win_rates"].items():
        if unjudged := results["prompts"] - rate["prompts"]:
            rows.append(f"{unjudged} prompts could not be judged by {name} and were left out")
    return "\n".join(rows)
