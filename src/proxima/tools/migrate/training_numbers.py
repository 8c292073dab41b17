"""How a run was trained. In: `OldRun`. Out: rates, coefficients, batches, run length, schedules."""

from __future__ import annotations

import math

from proxima.tools.migrate.migration import Migration, is_count, shown
from proxima.tools.migrate.old_run import OldRun, Setting

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def numbers(old: OldRun, new: Migration) -> None:
    """Settings whose value carries over."""
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
        "whiten_advantages": (True, "TRL always whitened them"),
        "max_grad_norm": (0.0, "TRL's PPO loop never clipped gradients"),
        "reward_units": ("raw", "TRL took the reward model's scores as they are"),
    }
    for name, (value, why) in fixed.items():
        new.put(name, value, why)
        new.maps.append(f"{why} -> {name} = {shown(value)}")
    if old.get("cliprange_value").value == 0:
        new.differs.append(
            "cliprange_value = 0: TRL then kept every value fixed; here value_clip 0 does not clip at all"
        )


def batches(old: OldRun, new: Migration) -> None:
    """A batch is what one PPO step draws over all processes."""
    size = old.get("per_device_train_batch_size")
    steps = old.get("gradient_accumulation_steps")
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
        f"{size.value} per device ({size.where}) x {steps.value} accumulated ({steps.where}) x "
        f"{new.processes} {many}"
    )
    for name in ("batch_size", "minibatch_size"):
        new.put(name, batch, product)
    new.put("micro_batch_size", size.value, f"per_device_train_batch_size ({size.where})")
    new.maps.append(f"{product} -> batch_size = {batch}")
    new.maps.append(
        f"one optimiser step per epoch -> minibatch_size = {batch}, micro_batch_size = {size.value}"
    )


def length(old: OldRun, new: Migration, rows: int) -> int | None:
    """How long the run is, in Proxima's epochs; returns its PPO steps, where they are known."""
    episodes = old.get("total_episodes")
    if not episodes.known:
        new.map("total_episodes", episodes, limit=0, epochs=1)
        return None
    if episodes.value is not None:
        return _from_episodes("total_episodes", episodes, episodes.value, old, new, rows)
    epochs = old.get("num_train_epochs")
    if not epochs.known:
        new.map("num_train_epochs", epochs, epochs=1)
        return None
    if not isinstance(epochs.value, (int, float)) or not 0 < epochs.value < 2**31:
        raise ValueError(f"num_train_epochs ({shown(epochs.value)}, {epochs.where}) must be a number above 0")
    if epochs.value == int(epochs.value):
        return _from_epochs(epochs, int(epochs.value), old, new, rows)
    if not rows:
        new.leave("num_train_epochs", epochs, "not an integer; give the number of rows with --rows")
        return None
    return _from_episodes("num_train_epochs", epochs, int(epochs.value * rows), old, new, rows)


def _from_epochs(epochs: Setting, count: int, old: OldRun, new: Migration, rows: int) -> int | None:
    new.map("num_train_epochs", epochs, epochs=count)
    new.differs.append("the last batch of an epoch may be short; TRL left out the rows that fill no batch")
    if old.rows:
        new.put("limit", old.rows, "the split's first rows")
    batch = new.settings.get("batch_size")
    return math.ceil(count * rows / batch) if rows and batch else None


def _from_episodes(
    name: str, setting: Setting, total: object, old: OldRun, new: Migration, rows: int
) -> int | None:
    """Episodes as a limit where they fit into one epoch, else as epochs.

    Args:
        name, setting: the old setting that says how long the run is.
        total: episodes.
    """
    if not is_count(total):
        raise ValueError(f"{name} ({shown(setting.value)}, {setting.where}) must be a number above 0")
    batch = new.settings.get("batch_size")
    if not batch:
        new.leave(name, setting, "the batch is not known; set limit or epochs")
        return None
    updates = math.ceil(total / batch)
    drawn = updates * batch
    if not rows or drawn <= rows:
        new.map(name, setting, limit=drawn, epochs=1)
        more = "" if rows else "; if the data has fewer, give --rows to get epochs instead"
        new.differs.append(
            f"limit = {drawn}: {updates} PPO steps of {batch}; the first rows are taken, TRL drew from "
            f"all{more}"
        )
        return updates
    epochs = max(1, round(drawn / rows))
    first = {"limit": old.rows} if old.rows else {}
    new.map(name, setting, **first, epochs=epochs)
    if epochs * rows != drawn:
        new.differs.append(
            f"epochs = {epochs} are {epochs * rows} episodes of {rows} rows; TRL's were {drawn}"
        )
    return updates


def schedule(old: OldRun, new: Migration, updates: int | None) -> None:
    kind = old.get("lr_scheduler_type")
    warmup = old.get("warmup_steps")
    if kind.known and str(kind.value) not in SCHEDULES:
        new.used.add("lr_scheduler_type")
        new.put("lr_schedule", "linear", f"lr_scheduler_type ({kind.where}) has no counterpart here")
        new.differs.append(
            f"lr_scheduler_type = {shown(kind.value)} ({kind.where}): there is no such schedule; linear "
            "replaces it"
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
            "the first warm-up step already has a learning rate above 0; TRL's was 0, so its first update "
            "changed nothing"
        )
