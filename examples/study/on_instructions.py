# python -m examples.study.on_instructions
"""The study's methods on examples/instructions: a real model, and a function as the reward.

`python -m examples.study.run --task instructions` trains them; this file alone prints their settings. In: a
method and a seed. Out: a run folder, and what its policy is worth on held-out prompts: the share of answers
that follow all that was asked. The settings are those of `examples/instructions/ppo.yaml`; a method changes
its own, and every method gets as many responses per step.
"""

import math
import os
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.instructions import evaluate
from examples.instructions.constraints import score
from examples.instructions.prompts import write
from examples.study.methods import METHODS, VARIANTS
from proxima import PPOConfig, PPOTrainer, Run
from proxima.config import read_yaml
from proxima.config.credit_checks import OF_THE_CRITIC
from proxima.data import read_prompts
from proxima.evaluator.finished_run import open_run

OF_THE_RUN = ("data", "validation", "run_name", "epochs")
PPO_YAML = Path(__file__).parents[1] / "instructions" / "ppo.yaml"
COMMON: dict[str, Any] = {
    name: value for name, value in read_yaml(str(PPO_YAML)).items() if name not in OF_THE_RUN
}
STEPS = 64
JUDGED_AT_A_TIME = 256
PROMPTS = "prompts"  # in the folder of the study


def settings_of(method: str) -> dict[str, Any]:
    chosen = (METHODS | VARIANTS)[method]
    without = OF_THE_CRITIC if "adv_estimator" in chosen else ()
    common = {name: value for name, value in COMMON.items() if name not in without}
    prompts = COMMON["batch_size"] // chosen.get("num_generations", 1)
    return {**common, "batch_size": prompts, **chosen}


def write_prompts(folder: Path) -> None:
    """The same for every method and seed."""
    if not (folder / PROMPTS / "held_out.jsonl").is_file():
        write(folder / PROMPTS)


def train_and_judge(
    home: Path, seed: int, method: str, steps: int, model: str
) -> tuple[Path, dict[str, float]]:
    """The folder of one finished run, and what became of its policy."""
    asked = (home.parent / PROMPTS).resolve()
    os.chdir(home)
    config = PPOConfig(
        **{**settings_of(method), "model_name": model, "run_dir": ".", "run_name": method, "seed": seed}
    )
    trainer = PPOTrainer(config)
    training, held_out = (
        read_prompts(str(asked / f"{name}.jsonl"), trainer.tokenizer) for name in ("train", "held_out")
    )
    prompts = [training[at % len(training)] for at in range(steps * config.batch_size)]
    folder = trainer.train(prompts, validation_prompts=held_out, resume=True).run_folder
    del trainer
    seconds = sum(filter(math.isfinite, Run(folder).metrics()["seconds"]))
    return folder, {**judge(folder, asked / "held_out.jsonl"), "seconds": seconds}


def judge(folder: Path, held_out: Path) -> dict[str, float]:
    """Sampled as in training."""
    trainer = open_run(folder, [score], batch_size=JUDGED_AT_A_TIME, **evaluate.FULL)
    trainer.load(folder)
    records = read_prompts(str(held_out), trainer.tokenizer)
    prompts = [records[at] for at in range(len(records))]
    own = {name: Run(folder).config[name] for name in evaluate.FULL}
    answers = evaluate.answer(trainer, prompts, **own)
    found = evaluate.measure(prompts, answers, trainer.config.seed)
    return {"gold": found["success"]["all"], "kl": found["kl"], "response_length": fmean(answers.sizes)}


if __name__ == "__main__":
    for name in METHODS:
        print(f"{name:26} {settings_of(name)}")
