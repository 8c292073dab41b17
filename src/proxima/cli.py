"""The command line: `proxima demo`, `sft`, `reward`, `train`, `generate`. In: flags or YAML. Out: a run.

Flags are made by tyro from the dataclasses themselves. `--config FILE.yaml` gives them new defaults; flags win.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima import __version__
from proxima.config import PPOConfig, RewardSpec, StageConfig
from proxima.config.settings import read_yaml
from proxima.errors import RewardFailure


@dataclass
class Train:
    """Train a policy with PPO on a file of prompts."""

    ppo: PPOConfig
    data: Path
    """Prompts: .txt, one a line, or .jsonl with a `prompt` field."""
    validation: Path | None = None
    """Held-out prompts that decide what is best and when to stop; the same forms."""
    epochs: int = 1
    """Passes over the prompts."""

    def run(self) -> None:
        from proxima.ppo_trainer import PPOTrainer
        from proxima.prompts import read_prompts

        if not self.ppo.rewards:
            raise ValueError(
                "no reward is configured; give --rewards module:function, a reward model's folder or a Hub id "
                "(several may follow each other, WEIGHT*SOURCE weighs one)"
            )
        prompts = read_prompts(self.data)
        held_out = read_prompts(self.validation) if self.validation else None
        results = PPOTrainer(self.ppo).train(prompts, self.epochs, held_out)
        print(f"stopped: {results.stop_reason}; best step {results.best_step}; results in {results.run_folder}")


@dataclass
class Generate:
    """Sample responses from a model, with or without a trained adapter."""

    ppo: PPOConfig
    prompt: tuple[str, ...] = ()
    """Prompts to answer."""
    data: Path | None = None
    """File with more prompts, as for `train`."""
    adapter: str = ""
    """Folder of a trained policy adapter, for example runs/NAME/policy."""

    def run(self) -> None:
        from proxima.base_setup import BaseSetup
        from proxima.ppo_trainer import SequenceGenerator
        from proxima.prompts import read_prompts

        prompts = [*self.prompt, *(read_prompts(self.data) if self.data else [])]
        config = dataclasses.replace(self.ppo, sft_adapter=self.adapter) if self.adapter else self.ppo
        setup = BaseSetup(config)
        texts = SequenceGenerator(setup.models, setup.tokenizer, config).sample(prompts).texts()
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}\n  -> {text}\n")


@dataclass
class Demo:
    """See all of RLHF work, offline, in minutes: preferences, reward model, PPO, evaluation, on the embedded model."""

    seed: int = 0
    """Seed of the whole demo: the same seed gives the same results.json, but for times."""
    steps: int = 20
    """PPO steps."""
    relabel: bool = False
    """Sample answers and ask the simulated annotators now, instead of reading the shipped preferences."""
    device: str = "auto"
    """`auto` = cuda where there is one, else cpu."""
    run_dir: Path = Path("runs")
    """Folder of all runs; this one is `demo` in it."""

    def run(self) -> None:
        from proxima.demo import run_demo

        run_demo(self.seed, self.steps, self.relabel, self.run_dir, device=self.device)


@dataclass
class Sft:
    """Fine-tune a model on demonstrations (supervised): the stage that gives PPO its reference."""

    stage: StageConfig
    data: Path
    """Demonstrations: .jsonl or .jsonl.gz with `prompt` and `completion`."""
    validation: Path | None = None
    """Held-out demonstrations; by default a share of the data."""

    def run(self) -> None:
        from proxima.stages import SFTTrainer, read_demonstrations

        held_out = read_demonstrations(self.validation) if self.validation else None
        results = SFTTrainer(self.stage).train(read_demonstrations(self.data), held_out)
        best = results.best
        print(f"stopped: {results.stop_reason}; validation loss {best['validation_loss']:.4f} at step {best['step']:.0f}")
        print(f"left out as too long: {results.left_out}; saved to {results.folder}")


@dataclass
class Reward:
    """Train a reward model on preferences: which of two answers is better."""

    stage: StageConfig
    data: Path
    """Preferences: .jsonl or .jsonl.gz with `prompt`, `chosen` and `rejected`."""
    validation: Path | None = None
    """Held-out preferences; by default a share of the data."""
    demonstrations: Path | None = None
    """Demonstrations that shall score 0 on average; by default the training answers do."""

    def run(self) -> None:
        from proxima.stages import RewardTrainer, read_demonstrations, read_preferences

        held_out = read_preferences(self.validation) if self.validation else None
        centre = read_demonstrations(self.demonstrations) if self.demonstrations else None
        results = RewardTrainer(self.stage, centre_on=centre).train(read_preferences(self.data), held_out)
        best = results.best
        print(
            f"stopped: {results.stop_reason}; held-out accuracy {best['accuracy']:.3f}, loss {best['validation_loss']:.4f}, "
            f"calibration error {best['calibration_error']:.3f}"
        )
        print(f"left out as too long: {results.left_out}; use it with --rewards {results.folder}")


COMMANDS: dict[str, Any] = {"demo": Demo, "sft": Sft, "reward": Reward, "train": Train, "generate": Generate}
CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "stage": StageConfig}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. What the user can mend is one line on stderr and exit code 2; `--debug` shows the traceback too."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        parse([argument for argument in given if argument != "--debug"]).run()
    except (ValueError, OSError, MemoryError, RewardFailure) as error:
        if debug:
            raise
        print(f"proxima: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("proxima: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def parse(arguments: Sequence[str]) -> Any:
    """The command that these arguments describe, ready to run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        raise SystemExit(0)
    name, *rest = arguments
    if name == "--version":
        print(f"proxima {__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}")
    import tyro

    kind = COMMANDS[name]
    rest, values = _take_config(rest)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_reward_rule)
    return tyro.cli(
        kind,
        args=rest,
        prog=f"proxima {name}",
        description=f"{kind.__doc__}\n\n--config FILE.yaml gives every flag a new default; --debug shows tracebacks.",
        default=_defaults(kind, values),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=registry,
    )


def overview() -> str:
    rows = "\n".join(f"  {name:10} {kind.__doc__}" for name, kind in COMMANDS.items())
    return (
        f"Proxima {__version__}: PPO fine-tuning of language models with human feedback.\n\n"
        f"usage: proxima COMMAND [flags]\n\n{rows}\n\n"
        "`proxima COMMAND --help` lists its flags; `proxima demo` is the place to start."
    )


def _take_config(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Cut `--config FILE` (or `--config=FILE`) out of the arguments and read the file."""
    rest: list[str] = []
    values: dict[str, Any] = {}
    pending = iter(arguments)
    for argument in pending:
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(pending, "")
            if not path:
                raise ValueError("--config needs a file")
            values |= read_yaml(path)
        else:
            rest.append(argument)
    return rest, values


def _defaults(kind: Any, values: dict[str, Any]) -> Any:
    """The command with its defaults; a YAML file may set the command's own flags and those of `PPOConfig` alike."""
    import tyro

    own: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in CONFIGS:
            continue
        if field.name in values:
            value = values.pop(field.name)
            own[field.name] = Path(value) if "Path" in str(field.type) and value is not None else value
        elif field.default is dataclasses.MISSING:
            own[field.name] = tyro.MISSING
    for field in dataclasses.fields(kind):
        if field.name in CONFIGS:
            own[field.name] = CONFIGS[field.name].from_dict(values)
            values = {}
    if values:
        raise ValueError(f"unknown setting {sorted(values)[0]!r} for this command")
    return kind(**own)


def _reward_rule(info: Any) -> Any:
    """On the command line a reward is one word: SOURCE or WEIGHT*SOURCE."""
    import tyro

    if info.type is not RewardSpec:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[WEIGHT*]SOURCE",
        instance_from_str=lambda words: RewardSpec.of(words[0]),
        is_instance=lambda value: isinstance(value, RewardSpec),
        str_from_instance=lambda spec: [f"{spec.weight:g}*{spec.to_dict()['source']}"],
    )
