"""How a run was trained. In: `OldRun`. Out: rates, coefficients, batches, how long, schedules."""

from __future__ import annotations

import math

from proxima.tools.migrate.migration import Migration, is_count, shown
from proxima.tools.migrate.old_run import OldRun

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def numbers(old: OldRun, new: Migration) -> None:
    """Settings that keep their value."""
    rate = old.get("learning_rate")
    new.map("learning_rate", rate, learning_rate=rate.value, value_learning_rate=rate.value)
    for name, wanted in (
        ("response_length", "max_new_tokens"),
        ("temperature", "temperature"),
        ("num_ppo_epochs", "ppo_epochs"),
        ("kl_coef", "kl_coef"),
        ("cliprange", "clip_epsilon"),
        ("cliprange_value", "value_clip"),
        ("gamma", "gamma"),
        ("lam", "lam"),
        ("seed", "seed"),
    ):
        new.map(name, old.get(name), **{wanted: old.get(name).value})
    penalty = old.get("missing_eos_penalty")
    new.map("missing_eos_penalty", penalty, missing_eos_penalty=penalty.value or 0.0)
    fixed = {
        "top_k": (0, "TRL sampled from the whole vocabulary"),
        "top_p": (1.0, "TRL sampled from the whole vocabulary"),
        "value_target": ("lambda_return", "TRL: returns = advantages + values"),
        "whiten_advantages": (True, "TRL whitened them always"),
        "max_grad_norm": (0.0, "TRL's PPO loop never clipped gradients"),
    }
    for name, (value, why) in fixed.items():
        new.put(name, value, why)
        new.maps.append(f"{why} -> {name} = {shown(value)}")
    if old.get("cliprange_value").value == 0:
        new.differs.append(
            "cliprange_value = 0: TRL then held every value where it was; here value_clip 0 does not clip "
            "at all"
        )


def batches(old: OldRun, new: Migration) -> None:
    """A batch is what one PPO step draws over all processes."""
    size, steps = old.get("per_device_train_batch_size"), old.get("gradient_accumulation_steps")
    if not (is_count(size.value) and is_count(steps.value)):
        for name, setting in (("per_device_train_batch_size", size), ("gradient_accumulation_steps", steps)):
            if setting.known and not is_count(setting.value):
                raise ValueError(f"{name} ({shown(setting.value)}, {setting.where}) must be a number above 0")
            if not setting.known:
                new.map(name, setting, batch_size=0, minibatch_size=0)
        return
    batch = size.value * steps.value * new.processes
    many = "process" if new.processes == 1 else "processes"
    product = (
        f"{size.value} a device ({size.where}) x {steps.value} accumulated ({steps.where}) x "
        f"{new.processes} {many}"
    )
    for name in ("batch_size", "minibatch_size"):
        new.put(name, batch, product)
    new.put("micro_batch_size", size.value, f"per_device_train_batch_size ({size.where})")
    new.maps.append(f"{product} -> batch_size = {batch}")
    new.maps.append(
        f"one optimiser step an epoch -> minibatch_size = {batch}, micro_batch_size = {size.value}"
    )


def length(old: OldRun, new: Migration, rows: int) -> int | None:
    """How long the run is, in Proxima's passes over the data; its PPO steps, where they are known."""
    episodes, passes, batch = (
        old.get("total_episodes"),
        old.get("num_train_epochs"),
        new.settings.get("batch_size"),
    )
    if not episodes.known:
        new.map("total_episodes", episodes, limit=0, epochs=1)
        return None
    total, name = episodes.value, "total_episodes"
    if total is None:
        if not isinstance(passes.value, (int, float)) or not 0 < passes.value < 2**31:
            if passes.known:
                raise ValueError(
                    f"num_train_epochs ({shown(passes.value)}, {passes.where}) must be a number above 0"
                )
            new.map("num_train_epochs", passes, epochs=1)
            return None
        if passes.value == int(passes.value):
            new.map("num_train_epochs", passes, epochs=int(passes.value))
            new.differs.append(
                "the last batch of an epoch may be short; TRL left the rows out that fill no batch"
            )
            if old.rows:
                new.put("limit", old.rows, "the split's first rows")
            return math.ceil(int(passes.value) * rows / batch) if rows and batch else None
        if not rows:
            new.leave("num_train_epochs", passes, "no whole passes; say how many rows there are with --rows")
            return None
        total, name, episodes = int(passes.value * rows), "num_train_epochs", passes
    if not is_count(total):
        raise ValueError(f"{name} ({shown(episodes.value)}, {episodes.where}) must be a number above 0")
    if not batch:
        new.leave(name, episodes, "the batch is not known; set limit or epochs")
        return None
    updates = math.ceil(total / batch)
    if not rows or updates * batch <= rows:
        new.map(name, episodes, limit=updates * batch, epochs=1)
        note = "the first rows are taken; TRL drew them from all"
        more = "" if rows else "; where the data has fewer, give --rows to get epochs in its place"
        new.differs.append(f"limit = {updates * batch}: {updates} PPO steps of {batch}; {note}{more}")
    else:
        epochs = max(1, round(updates * batch / rows))
        first = {"limit": old.rows} if old.rows else {}
        new.map(name, episodes, **first, epochs=epochs)
        if epochs * rows != updates * batch:
            new.differs.append(
                f"epochs = {epochs} are {epochs * rows} episodes of {rows} rows, for {updates * batch} of "
                "TRL's"
            )
    return updates


def schedule(old: OldRun, new: Migration, updates: int | None) -> None:
    kind, warmup = old.get("lr_scheduler_type"), old.get("warmup_steps")
    if kind.known and str(kind.value) not in SCHEDULES:
        new.used.add("lr_scheduler_type")
        new.put("lr_schedule", "linear", f"lr_scheduler_type ({kind.where}) has no like here")
        new.differs.append(
            f"lr_scheduler_type = {shown(kind.value)} ({kind.where}): there is none such; linear takes its "
            "place"
        )
    else:
        new.map("lr_scheduler_type", kind, lr_schedule=SCHEDULES.get(str(kind.value), "linear"))
    name = "warmup_steps"
    if "warmup_ratio" in old.settings and not warmup.written:
        name, warmup = "warmup_ratio", old.get("warmup_ratio")
    if not warmup.known:
        new.map(name, warmup, warmup_steps=0)
    elif warmup.value and kind.value != "constant":
        steps = warmup.value
        if not isinstance(steps, (int, float)) or not 0 <= steps < 2**31:
            raise ValueError(
                f"{name} ({shown(steps)}, {warmup.where}) must be a number of steps, or a share of them"
            )
        if steps < 1 and updates is None:
            new.leave(name, warmup, "a share of an unknown number of steps; set warmup_steps, or give --rows")
            return
        new.map(name, warmup, warmup_steps=int(steps) if steps >= 1 else math.ceil(steps * (updates or 0)))
        new.differs.append(
            "the first warm-up step has a learning rate already; TRL's was 0, so its first update changed "
            "nothing"
        )
