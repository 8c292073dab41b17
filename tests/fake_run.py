"""Run folders without training, quick for any number of steps: `write_run`.

Numbers are smooth, and the same every time.
"""

import json
import math
from pathlib import Path

from proxima.config import PPOConfig

HOSTILE = (
    '</script><script>document.title="taken"</script><img src=x onerror="document.title=\'taken\'"><b '
    'id="taken">b</b>'
    " \u202e right to left \u2028 <!-- {{7*7}} & \" ' \\ \x00\x1b[31m"
)
COLUMNS = (
    "logprob",
    "logprob_ref",
    "kl",
    "reward",
    "value",
    "td_error",
    "advantage",
    "return",
    "ratio",
    "clipped",
)


def metrics_at(step: int, steps: int = 100) -> dict[str, float]:
    """What a step logs: reward rises, KL too, entropy falls."""
    done = step / max(steps, 1)
    wave = math.sin(step * 1.7)
    return {
        "epoch": 1,
        "step": step,
        "avg_reward": 2 * (1 - math.exp(-3 * done)) + 0.2 * wave,
        "reward_std": 1 - 0.4 * done,
        "reward/gold": 0.5 + 0.4 * done + 0.03 * wave,
        "failed_rewards": 0,
        "kl": 6 * done + 0.1 * wave,
        "kl_exact": 6 * done,
        "truncation_cost": 0.0,
        "sampling_gap": 1e-7,
        "kl_coef": 0.1,
        "entropy": 1.2 - 0.8 * done,
        "response_length": 20 - 6 * done + wave,
        "eos_rate": 0.8 + 0.2 * done,
        "truncated_prompts": 0,
        "tokens": 1280,
        "value_mean": done,
        "return_mean": done + 0.1,
        "explained_variance": 0.9 * (1 - math.exp(-4 * done)),
        "advantage_std": 1.0,
        "policy_loss": -0.01 + 0.005 * wave,
        "value_loss": 2 * math.exp(-3 * done) + 0.1,
        "clip_fraction": 0.05 + 0.02 * wave,
        "approx_kl": 0.004,
        "ratio_max": 1.6 + 0.3 * wave,
        "first_ratio_error": 1e-6,
        "grad_norm_policy": 0.5 + 0.1 * wave,
        "grad_norm_value": 3 - done,
        "learning_rate": 1e-5 * (1 - done),
        "value_learning_rate": 1e-4 * (1 - done),
        "optimizer_steps": 16,
        "skipped_updates": 0,
        "kl_stopped": 0,
        "buffer_bytes": 187008,
        "seconds/generate": 1.2,
        "seconds/score": 0.4,
        "seconds/reward": 0.1,
        "seconds/value": 0.2,
        "seconds/update": 2.0,
        "seconds": 3.9 + 0.1 * wave,
        "alarms": 0,
    }


def validation_at(step: int, steps: int) -> dict[str, float]:
    done = step / max(steps, 1)
    return {"validation/reward": 1.5 * done, "validation/kl": 5 * done, "validation/eos_rate": 0.9}


def token_sample(
    step: int,
    kind: str = "followed",
    text: str = "my coworker owes me rent, should i look for help?",
    prompt="",
):
    """One token record as a run writes it; its numbers follow from step and place."""
    words = text.split(" ")
    pieces = [word if place == 0 else f" {word}" for place, word in enumerate(words)]
    columns = {
        name: [round(math.sin(step + 3 * place + 7 * number), 4) for place in range(len(pieces))]
        for number, name in enumerate(COLUMNS)
    }
    columns["logprob"] = [-abs(value) for value in columns["logprob"]]
    columns["logprob_ref"] = [-abs(value) - 0.1 for value in columns["logprob_ref"]]
    columns["ratio"] = [round(1 + value / 3, 4) for value in columns["ratio"]]
    columns["clipped"] = [int(abs(value - 1) > 0.2) for value in columns["ratio"]]
    if kind == "followed":
        del columns["ratio"], columns["clipped"]
    return {
        "kind": kind,
        "prompt": prompt
        or "SUBREDDIT: r/roommates\nTITLE: please help\nPOST: my coworker owes me rent.\nTL;DR:",
        "text": text,
        "reward": round(math.sin(step / 10), 4),
        "rewards": {"gold": round(math.sin(step / 10), 4)},
        "ended": True,
        "observed": [],
        "ids": list(range(len(pieces))),
        "tokens": pieces,
        "columns": columns,
    }


def write_tokens(folder: Path, step: int, samples: list[dict]) -> None:
    (folder / "tokens").mkdir(exist_ok=True)
    part = folder / "tokens" / f".step-{step:08d}.part"
    part.write_text(json.dumps({"step": step, "samples": samples}), encoding="utf-8")
    part.rename(folder / "tokens" / f"step-{step:08d}.json")


def append_step(folder: Path, step: int, steps: int = 100, **changes) -> None:
    """One more line of metrics, as a training run appends it."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**metrics_at(step, steps), **changes}) + "\n")


def write_run(
    folder: Path,
    steps: int = 50,
    eval_every: int = 10,
    samples: bool = True,
    finished: bool = True,
    hostile: bool = False,
) -> Path:
    """A run folder with this many steps; unfinished ones have no results.

    `hostile` puts text that attacks a page everywhere.
    """
    folder.mkdir(parents=True)
    config = PPOConfig(
        model_name="embedded", rewards=("length_band,low=5,high=20",), run_name=folder.name, batch_size=64
    )
    config.to_yaml(folder / "config.yaml")
    environment = {
        "proxima": "0.1.0",
        "python": "3.11.9",
        "packages": {"torch": "2.13.0"},
        "git_commit": "0" * 40,
        "gpus": [],
    }
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    logged = [step for step in range(1, steps + 1) if step % eval_every == 0 or step == steps]
    text = f"{HOSTILE} " + "x" * 100_000 if hostile else "my coworker owes me rent, should i look for help?"
    prompt = f"{HOSTILE} TL;DR:" if hostile else ""
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            held_out = validation_at(step, steps) if step % eval_every == 0 or step == steps else {}
            file.write(json.dumps({**metrics_at(step, steps), **held_out}) + "\n")
    (folder / "samples.jsonl").touch()
    (folder / "warnings.jsonl").touch()
    if steps and hostile:
        warning = {"step": steps, "guard": HOSTILE, "message": HOSTILE, "action": "warn"}
        (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\n", encoding="utf-8")
    if samples:
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for step in logged:
                for kind in ("followed", "trained"):
                    one = token_sample(step, kind, text, prompt)
                    kept = {"step": step, "prompt": one["prompt"], "text": text, "reward": one["reward"]}
                    file.write(json.dumps(kept, ensure_ascii=False) + "\n")
                write_tokens(
                    folder, step, [token_sample(step, kind, text, prompt) for kind in ("followed", "trained")]
                )
    for step in logged[-2:]:
        place = folder / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        (place / "state.json").write_text(
            json.dumps({"step": step, "eval_reward": step / 10}), encoding="utf-8"
        )
    if finished:
        last = metrics_at(steps, steps) if steps else {}
        results = {
            "stop_reason": "all epochs done",
            "steps": steps,
            "best_step": steps,
            "last_metrics": last,
            "evaluation": {},
        }
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


OUTCOMES = (
    "good",
    "deterministic",  # the right answers, and always the same ones
    "brief",  # the right answers, which get to the point and begin alike
    "longer",  # one sign
    "far",  # one sign: the KL
    "gamed",
    "gamed for more KL",  # longer answers, many nats, and nothing else
    "one answer",  # to every prompt, and the reward likes it
    "collapsed",
    "declined",
    "stuck",
    "too short",
)
FALLING = (
    "gamed",
    "gamed for more KL",
    "one answer",
    "collapsed",
    "declined",
)  # in quality, from half way on
COLLAPSING = ("collapsed", "declined")  # in reward too


def outcome_at(outcome: str, step: int, steps: int, judges: bool) -> dict[str, float]:
    """What changes of `metrics_at` and `validation_at` in a run that ended like this. Half way, a run that does
    not end well turns to what judges do not like."""
    done, late = step / steps, max(0.0, 2 * step / steps - 1)
    wave = 0.02 * math.sin(step * 1.7)
    rise = 0.0 if outcome == "stuck" else done - 1.6 * late * (outcome in COLLAPSING)
    quality = 0.0 if outcome == "stuck" else done - 1.5 * late * (outcome in FALLING)
    gamed, brief = (late * (outcome == each) for each in ("gamed", "brief"))
    collapsed = late * (outcome in ("collapsed", "one answer"))
    longer = late * (outcome in ("gamed", "longer", "gamed for more KL"))
    sure = done * (outcome == "deterministic")
    kl = (17 if outcome in ("far", "gamed for more KL") else 6) * done
    held_out = {
        "validation/reward": rise + wave,
        "validation/reward_low": rise + wave - 0.06,
        "validation/reward_high": rise + wave + 0.06,
        "validation/kl": kl,
        "validation/response_length": 20 * (1 + longer - 0.7 * brief),
        "validation/distinct_2": 0.8 - 0.1 * gamed - 0.6 * collapsed,
        "validation/repetition": 0.01,
        "validation/common_opening": 0.2 + 0.6 * gamed + 0.75 * collapsed + 0.7 * brief,
        "validation/eos_rate": 0.95,
    }
    if judges:
        rate = 0.5 + 0.4 * quality + wave / 4
        held_out |= {
            "validation/win_rate/gold": rate,
            "validation/win_rate_low/gold": rate - 0.04,
            "validation/win_rate_high/gold": rate + 0.04,
        }
    trained = {"avg_reward": rise + 2 * wave, "reward/gold": rise + 2 * wave, "kl_exact": kl}
    return {**trained, "entropy": 1.2 - 0.4 * done - 0.6 * collapsed - 0.78 * sure, **held_out}


def write_outcome(
    folder: Path, outcome: str, steps: int = 60, judges: bool = True, evaluated: bool = True
) -> Path:
    """A run folder that ended like one of `OUTCOMES`, with an evaluation every fifth step."""
    steps = 6 if outcome == "too short" else steps
    write_run(folder, steps, samples=False)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(0 if evaluated else 1, steps + 1):
            made = outcome_at(outcome, step, steps, judges)
            held_out = {key: number for key, number in made.items() if key.startswith("validation/")}
            trained = {key: number for key, number in made.items() if key not in held_out}
            line = {**metrics_at(step, steps), **trained} if step else {"step": 0}
            at_evaluation = evaluated and (step % 5 == 0 or step == steps)
            file.write(json.dumps({**line, **(held_out if at_evaluation else {})}) + "\n")
    return folder
