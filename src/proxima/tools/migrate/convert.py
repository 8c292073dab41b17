"""From an old run to a new one.

In: `OldRun`. Out: `Migration`: settings for `proxima train`, and an account of every change.
"""

from __future__ import annotations

from pathlib import Path

from proxima.config import TRACKERS, PPOConfig
from proxima.core.regular_files import open_file
from proxima.tools.migrate.migration import Migration, is_count, said, shown
from proxima.tools.migrate.old_models import four_bits, lora, models
from proxima.tools.migrate.old_run import OldRun, Setting
from proxima.tools.migrate.read_command import read_shell, read_yaml_settings
from proxima.tools.migrate.read_script import read_script
from proxima.tools.migrate.training_numbers import batches, length, numbers, schedule
from proxima.tools.migrate.trl_settings import KNOWN

LARGEST_FILE = 5_000_000
COMMAND_FLAGS = ("data", "limit", "epochs")  # of `proxima train` itself

ALWAYS = (
    "the loss of an optimiser step is the mean over its tokens; TRL took the mean of the micro-batch means",
    "advantages are whitened over the whole batch, with biased variance; TRL did it per process, with n - 1",
    "the score sits on a response's last token; TRL put it one token later where the response ended early: "
    "one more gamma x lam",
    "every optimiser step uses the whole batch; in the last batch of each epoch TRL stepped at every "
    "micro-batch",
    "old log-probabilities come from a forward pass, as the new ones do; TRL kept those of sampling",
    "AdamW's epsilon is 1e-5, the reference value of PPO for language models (TRL: 1e-8)",
)
"""What differs whatever the settings."""


def migrate(path: str | Path, processes: int = 0, rows: int = 0) -> Migration:
    """Read what a file says about a TRL 1.12 PPO run, and convert it.

    Args:
        path: a Python script (.py), a shell script that starts one (.sh), or TRL's settings (.yaml, .yml).
        processes: how many processes ran it; 0 = what the file says, else 1.
        rows: how many rows the data has, to convert episodes into epochs; 0 = unknown.
    """
    if processes < 0 or rows < 0:
        raise ValueError(
            f"{'processes' if processes < 0 else 'rows'} ({min(processes, rows)}) must be at least 0 (0 = "
            "unknown)"
        )
    return convert(read_old(Path(path)), processes, rows)


def read_old(path: Path) -> OldRun:
    kind = path.suffix.lower()
    if kind not in (".py", ".sh", ".bash", ".yaml", ".yml"):
        raise ValueError(
            f"{path} must be a Python script (.py), a shell script (.sh) or TRL's settings (.yaml)"
        )
    try:
        with open_file(path) as file:
            content = file.read(LARGEST_FILE + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE:,} bytes: that is not a script")
    if kind in (".yaml", ".yml"):
        return read_yaml_settings(path)
    return read_script(text, path.name) if kind == ".py" else read_shell(text, path)


def convert(old: OldRun, processes: int = 0, rows: int = 0) -> Migration:
    new = Migration(old.name, unread=list(old.unread), unknown=list(old.unknown))
    new.processes = processes or old.processes or 1
    models(old, new)
    lora(old, new)
    four_bits(old, new)
    numbers(old, new)
    batches(old, new)
    updates = length(old, new, rows or old.rows)
    schedule(old, new, updates)
    _run(old, new)
    _ends(old, new)
    _rest(old, new)
    new.differs += ALWAYS
    _check(new)
    return new


def _run(old: OldRun, new: Migration) -> None:
    """Data, folders, checkpoints, trackers, device; all but the data only where the file sets them."""
    _data(old, new)
    folder = old.get("output_dir")
    if folder.written and folder.known and isinstance(folder.value, str) and _plain_name(folder.value):
        path = Path(folder.value)
        new.map("output_dir", folder, run_dir=str(path.parent), run_name=path.name)
    elif folder.written:
        new.leave("output_dir", folder, "it does not name a run folder; set run_name")
    _checkpoints(old, new)
    _trackers(old.get("report_to"), new)
    if old.get("use_cpu").value is True:
        new.map("use_cpu", old.get("use_cpu"), device="cpu")
    if old.get("ddp_timeout").written:
        new.map("ddp_timeout", old.get("ddp_timeout"), process_timeout=old.get("ddp_timeout").value)


def _data(old: OldRun, new: Migration) -> None:
    data = old.data
    if data is None and old.get("dataset_name").value is not None:
        data = _dataset(old)
    if data is None:
        new.unread.append("the data: no dataset is named; give --data")
    elif data.known and "/" not in str(data.value) and "." not in str(data.value):
        new.unread.append(
            f"the data ({data.where}): {shown(data.value)} has no owner; give --data OWNER/NAME"
        )
    else:
        new.map("the data", data, data=data.value)


def _checkpoints(old: OldRun, new: Migration) -> None:
    every = old.get("save_steps")
    limit = old.get("save_total_limit")
    if old.get("save_strategy").value == "no":
        new.map("save_strategy", old.get("save_strategy"), checkpoint_every=0)
    elif every.written and every.known and is_count(every.value):
        new.map("save_steps", every, checkpoint_every=every.value)
    elif every.written:
        new.leave(
            "save_steps", every, "it is not a number of steps that can be read here; set checkpoint_every"
        )
    if limit.written and (not limit.known or is_count(limit.value)):
        new.map("save_total_limit", limit, keep_checkpoints=limit.value)


def _dataset(old: OldRun) -> Setting:
    parts = [old.get(name) for name in ("dataset_name", "dataset_config", "dataset_train_split")]
    if unread := [part for part in parts if not part.known]:
        return unread[0]
    name, config, split = (part.value for part in parts)
    return Setting(f"{name}{f'/{config}' if config else ''}:{split}", parts[0].where)


def _trackers(given: Setting, new: Migration) -> None:
    new.used.add("report_to")
    if not given.written or not given.known:
        if not given.known:
            new.map("report_to", given, trackers=[])
        return
    names = given.value if isinstance(given.value, list) else [given.value]
    if known := [name for name in names if name in TRACKERS]:
        new.map("report_to", given, trackers=known)
    for name in names:
        if name not in (*TRACKERS, "none", None):
            new.dropped.append(
                f"report_to = {shown(name)} ({given.where}): trackers are {', '.join(TRACKERS)}"
            )


def _ends(old: OldRun, new: Migration) -> None:
    """Where a response ends, and terms of the loss that differ."""
    stop = old.get("stop_token")
    token = old.get("stop_token_id")
    if token.value is not None:
        new.differs.append(f"stop_token_id = {said(token)}: {KNOWN['stop_token_id'].note}")
    elif stop.value == "eos":
        new.maps.append(f"stop_token = eos ({stop.where}) -> a response always ends at EOS")
    elif stop.value is None:
        new.differs.append(
            "stop_token is not set: TRL then sampled past EOS to response_length; here a response ends at EOS"
        )
    else:
        new.differs.append(f"stop_token = {said(stop)}: {KNOWN['stop_token'].note}")
    estimator = old.get("kl_estimator")
    if estimator.value == "k1":
        new.maps.append(f"kl_estimator = k1 ({estimator.where}) -> the same, always")
    factor = old.get("vf_coef")
    half = f" = {factor.value / 2:g}" if isinstance(factor.value, (int, float)) else " to half of it"
    new.differs.append(f"vf_coef = {said(factor)}: {KNOWN['vf_coef'].note}{half} (TRL halves the loss)")


SAID = {
    "vf_coef",
    "stop_token",
    "stop_token_id",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}
UNUSED = "it had no effect on the old run"


def _rest(old: OldRun, new: Migration) -> None:
    """What was set and has no counterpart here."""
    if "dataset_name" in old.settings and old.data is None:
        new.used |= {"dataset_name", "dataset_config", "dataset_train_split"}
    taken = {
        str(value)
        for name in ("model_name", "rewards", "value_model")
        for value in _listed(new.settings.get(name))
    }
    for name, setting in old.settings.items():
        known, value = KNOWN[name], setting.value
        if (
            name in SAID
            or name in new.used
            or setting.where.startswith("PEFT")
            or (known.status == "maps" and str(value) in taken)
        ):
            continue
        if name in ("kl_estimator", "whiten_rewards") and value == known.default:
            continue
        note = UNUSED if known.status == "maps" else known.note
        (new.differs if known.status == "differs" else new.dropped).append(
            f"{name} = {said(setting)}: {note}"
        )
    reasons = {
        "data_collator": "prompts are text, padded on the left by the trainer",
        "eval_dataset": "give held-out prompts as --validation; they are evaluated, not only shown",
        "optimizers": "both optimisers are AdamW",
        "callbacks": "guards, evaluations and trackers replace them; `proxima studio` shows a run live",
    }
    for name, where in old.arguments.items():
        new.dropped.append(f"{name} of PPOTrainer ({where}): {reasons[name]}")


def _check(new: Migration) -> None:
    """Check all settings by Proxima's own rules; an error names the old setting behind it."""
    settings = {name: value for name, value in new.settings.items() if name not in COMMAND_FLAGS}
    try:
        PPOConfig.from_dict(settings)
    except ValueError as error:
        wrong = next((name for name, value in settings.items() if not _fits(name, value)), "")
        origin = f"{new.origins[wrong]} cannot be migrated: " if wrong else ""
        raise ValueError(f"{new.name}: {origin}{error}") from None


def _fits(name: str, value: object) -> bool:
    try:
        PPOConfig.from_dict({name: value})
    except ValueError:
        return False
    return True


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _plain_name(folder: str) -> bool:
    name = Path(folder).name
    return bool(name) and not name.startswith(".")
