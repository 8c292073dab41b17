"""From an old run to a new one. In: `OldRun`. Out: `Migration`: settings of `proxima train`, and an account of every change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxima.config import PPOConfig
from proxima.migrate.names import KNOWN
from proxima.migrate.old_run import OldRun, Setting
from proxima.migrate.read_command import read_shell, read_yaml_settings
from proxima.migrate.read_script import read_script

LARGEST_FILE = 5_000_000
COMMAND_FLAGS = ("data", "limit", "epochs")  # of `proxima train` itself
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
TRACKERS = ("tensorboard", "wandb", "trackio")
DEFAULTS = PPOConfig()

ALWAYS = (
    "the loss of an optimiser step is a mean over its tokens; TRL took the mean of the means of its micro-batches",
    "advantages are whitened over the whole batch, by its own variance; TRL did it in each process, with n - 1",
    "the score sits on a response's last token; TRL put it one later where the response ended early: one more gamma x lam",
    "every optimiser step has the whole batch; in the last batch of each pass over the data TRL stepped at every micro-batch",
    "old log-probabilities come from a pass of their own, as new ones do; TRL kept those of sampling",
    "AdamW's epsilon is 1e-5, the reference value of PPO for language models (TRL: 1e-8)",
)
"""What differs whatever the settings are."""


@dataclass
class Migration:
    """A new run, and what became of the old one."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `proxima train`, by name."""
    origins: dict[str, str] = field(default_factory=dict)
    """Where each came from."""
    maps: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    processes: int = 1
    used: set[str] = field(default_factory=set)
    """Old names that were mapped."""

    def put(self, name: str, value: Any, origin: str) -> None:
        self.settings[name], self.origins[name] = value, origin

    def leave(self, old: str, setting: Setting, why: str) -> None:
        """An old setting that is left to the reader."""
        self.used.add(old)
        self.unread.append(f"{old} = {_said(setting)}: {why}")

    def map(self, old: str, setting: Setting, **new: Any) -> None:
        """One old setting as one or more new ones; named as unread where its value is computed."""
        self.used.add(old)
        if not setting.known:
            names = ", ".join(f"{name} (Proxima's own: {getattr(DEFAULTS, name, 'none')})" for name in new)
            self.unread.append(f"{old} = {_said(setting)}: it is computed; set {names}")
            return
        for name, value in new.items():
            self.put(name, value, f"{old} ({setting.where})")
        shown = ", ".join(f"{name} = {_shown(value)}" for name, value in new.items())
        self.maps.append(f"{old} = {_shown(setting.value)} ({setting.where}) -> {shown}")


def migrate(path: str | Path, processes: int = 0, rows: int = 0) -> Migration:
    """Read what a file says of a TRL 1.12 PPO run, and convert it.

    Args:
        path: a Python script (.py), a shell script that starts one (.sh), or TRL's settings (.yaml, .yml).
        processes: how many processes ran it; 0 = what the file says, else 1.
        rows: how many rows the data has, so that episodes can be told in epochs; 0 = unknown.
    """
    if processes < 0 or rows < 0:
        raise ValueError(
            f"{'processes' if processes < 0 else 'rows'} ({min(processes, rows)}) must be at least 0 (0 = unknown)"
        )
    return convert(read_old(Path(path)), processes, rows)


def read_old(path: Path) -> OldRun:
    kind = path.suffix.lower()
    if kind not in (".py", ".sh", ".bash", ".yaml", ".yml"):
        raise ValueError(f"{path} must be a Python script (.py), a shell script (.sh) or TRL's settings (.yaml)")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE:,} bytes: that is no script")
    if kind in (".yaml", ".yml"):
        return read_yaml_settings(path)
    return read_script(text, path.name) if kind == ".py" else read_shell(text, path)


def convert(old: OldRun, processes: int = 0, rows: int = 0) -> Migration:
    new = Migration(old.name, unread=list(old.unread), unknown=list(old.unknown))
    new.processes = processes or old.processes or 1
    _models(old, new)
    _lora(old, new)
    _numbers(old, new)
    _batches(old, new)
    updates = _length(old, new, rows or old.rows)
    _schedule(old, new, updates)
    _run(old, new)
    _ends(old, new)
    _rest(old, new)
    new.differs += ALWAYS
    _check(new)
    return new


def _models(old: OldRun, new: Migration) -> None:
    """Policy and reference are model_name, value and reward the reward model's checkpoint."""
    policy, reward = old.models.get("model", old.get("sft_model_path")), old.models.get("reward_model")
    new.map("the policy" if "model" in old.models else "sft_model_path", policy, model_name=policy.value)
    reference = old.models.get("ref_model")
    if reference and (not reference.known or (reference.value is not None and reference.value != policy.value)):
        new.dropped.append(
            f"ref_model = {_said(reference)}: the reference is model_name itself, or sft_adapter on it; nothing else"
        )
    if reward is None and old.get("reward_model_path").written:
        reward = old.get("reward_model_path")
    if reward is None or reward.value is None:
        new.unread.append("the reward: none is named; set rewards, or give --rewards (docs/rewards.md)")
    else:
        new.map("the reward model", reward, rewards=[reward.value])
        new.differs.append(
            "a classifier reads prompt and response as text, with its own tokenizer; TRL gave it the policy's ids, with EOS"
        )
    value = old.models.get("value_model", reward)
    if value is not None and not (value.known and value.value is None):
        new.map("the value model", value, value_model=value.value)
    if old.trust_remote_code and old.trust_remote_code.value is not False:
        new.map("trust_remote_code", old.trust_remote_code, trust_remote_code=True)
    dtype = old.get("dtype")
    if (dtype.written or old.outside) and dtype.value in ("float32", "bfloat16", "float16", "auto"):
        new.map("dtype", dtype, dtype=dtype.value)
    elif dtype.written:
        new.leave("dtype", dtype, "it is no type of weights that can be read here; set dtype")


def _lora(old: OldRun, new: Migration) -> None:
    use = old.get("use_peft")
    new.used.add("use_peft")
    if not use.known:
        new.map("use_peft", use, lora_r=0)
        return
    if not (old.peft or use.value):
        new.put("lora_r", 0, "no peft_config: TRL trained all weights")
        new.maps.append("no peft_config: TRL trained all weights -> lora_r = 0")
        return
    rank, alpha, targets = old.get("lora_r"), old.get("lora_alpha"), old.get("lora_target_modules")
    new.map("lora_r", rank, lora_r=rank.value)
    scale = alpha.value
    if old.get("use_rslora").value is True and _is_count(rank.value) and _is_count(scale):
        scale = round(scale * math.sqrt(rank.value))
        new.used.add("use_rslora")
        new.differs.append(
            f"use_rslora ({old.get('use_rslora').where}): its scale, alpha / sqrt(r), is had by lora_alpha = {scale}"
        )
    new.map("lora_alpha", alpha, lora_alpha=scale)
    if not targets.known:
        new.map("lora_target_modules", targets, lora_targets="all-linear")
    elif isinstance(targets.value, (str, list)) and targets.value:
        names = [targets.value] if isinstance(targets.value, str) else targets.value
        new.map("lora_target_modules", targets, lora_targets=",".join(map(str, names)))
    else:
        new.put("lora_targets", "all-linear", "PEFT chose its targets by architecture")
        new.differs.append(
            "lora_target_modules is not given: PEFT chose by architecture (q_proj,v_proj for Qwen and Llama); set "
            "lora_targets to the same names, or keep all-linear"
        )
    new.differs.append(
        "with LoRA the value model is trained through an adapter, TRL trained all its weights; an adapter usually wants a "
        f"larger value_learning_rate (Proxima's own: {DEFAULTS.value_learning_rate:g})"
    )


def _numbers(old: OldRun, new: Migration) -> None:
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
        new.maps.append(f"{why} -> {name} = {_shown(value)}")
    if old.get("cliprange_value").value == 0:
        new.differs.append(
            "cliprange_value = 0: TRL then held every value where it was; here value_clip 0 does not clip at all"
        )


def _batches(old: OldRun, new: Migration) -> None:
    """A batch is what one PPO step draws over all processes."""
    size, steps = old.get("per_device_train_batch_size"), old.get("gradient_accumulation_steps")
    if not (_is_count(size.value) and _is_count(steps.value)):
        for name, setting in (("per_device_train_batch_size", size), ("gradient_accumulation_steps", steps)):
            if setting.known and not _is_count(setting.value):
                raise ValueError(f"{name} ({_shown(setting.value)}, {setting.where}) must be a number above 0")
            if not setting.known:
                new.map(name, setting, batch_size=0, minibatch_size=0)
        return
    batch = size.value * steps.value * new.processes
    many = "process" if new.processes == 1 else "processes"
    product = f"{size.value} a device ({size.where}) x {steps.value} accumulated ({steps.where}) x {new.processes} {many}"
    for name in ("batch_size", "minibatch_size"):
        new.put(name, batch, product)
    new.put("micro_batch_size", size.value, f"per_device_train_batch_size ({size.where})")
    new.maps.append(f"{product} -> batch_size = {batch}")
    new.maps.append(f"one optimiser step an epoch -> minibatch_size = {batch}, micro_batch_size = {size.value}")


def _length(old: OldRun, new: Migration, rows: int) -> int | None:
    """How long the run is, in Proxima's passes over the data; its PPO steps, where they are known."""
    episodes, passes, batch = old.get("total_episodes"), old.get("num_train_epochs"), new.settings.get("batch_size")
    if not episodes.known:
        new.map("total_episodes", episodes, limit=0, epochs=1)
        return None
    total, name = episodes.value, "total_episodes"
    if total is None:
        if not isinstance(passes.value, (int, float)) or not 0 < passes.value < 2**31:
            if passes.known:
                raise ValueError(f"num_train_epochs ({_shown(passes.value)}, {passes.where}) must be a number above 0")
            new.map("num_train_epochs", passes, epochs=1)
            return None
        if passes.value == int(passes.value):
            new.map("num_train_epochs", passes, epochs=int(passes.value))
            new.differs.append("the last batch of an epoch may be short; TRL left the rows out that fill no batch")
            if old.rows:
                new.put("limit", old.rows, "the split's first rows")
            return math.ceil(int(passes.value) * rows / batch) if rows and batch else None
        if not rows:
            new.leave("num_train_epochs", passes, "no whole passes; say how many rows there are with --rows")
            return None
        total, name, episodes = int(passes.value * rows), "num_train_epochs", passes
    if not _is_count(total):
        raise ValueError(f"{name} ({_shown(episodes.value)}, {episodes.where}) must be a number above 0")
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
            new.differs.append(f"epochs = {epochs} are {epochs * rows} episodes of {rows} rows, for {updates * batch} of TRL's")
    return updates


def _schedule(old: OldRun, new: Migration, updates: int | None) -> None:
    kind, warmup = old.get("lr_scheduler_type"), old.get("warmup_steps")
    if kind.known and str(kind.value) not in SCHEDULES:
        new.used.add("lr_scheduler_type")
        new.put("lr_schedule", "linear", f"lr_scheduler_type ({kind.where}) has no like here")
        new.differs.append(
            f"lr_scheduler_type = {_shown(kind.value)} ({kind.where}): there is none such; linear takes its place"
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
            raise ValueError(f"{name} ({_shown(steps)}, {warmup.where}) must be a number of steps, or a share of them")
        if steps < 1 and updates is None:
            new.leave(name, warmup, "a share of an unknown number of steps; set warmup_steps, or give --rows")
            return
        new.map(name, warmup, warmup_steps=int(steps) if steps >= 1 else math.ceil(steps * (updates or 0)))
        new.differs.append(
            "the first warm-up step has a learning rate already; TRL's was 0, so its first update changed nothing"
        )


def _run(old: OldRun, new: Migration) -> None:
    """Folders, checkpoints, trackers, device; all but the data only where they were written."""
    data = old.data
    if data is None and old.get("dataset_name").value is not None:
        data = _dataset(old)
    if data is None:
        new.unread.append("the data: no dataset is named; give --data")
    elif data.known and "/" not in str(data.value) and "." not in str(data.value):
        new.unread.append(f"the data ({data.where}): {_shown(data.value)} has no owner; give --data OWNER/NAME")
    else:
        new.map("the data", data, data=data.value)
    folder = old.get("output_dir")
    if folder.written and folder.known and isinstance(folder.value, str) and _plain_name(folder.value):
        path = Path(folder.value)
        new.map("output_dir", folder, run_dir=str(path.parent), run_name=path.name)
    elif folder.written:
        new.leave("output_dir", folder, "it names no folder for a run; set run_name")
    every, limit = old.get("save_steps"), old.get("save_total_limit")
    if old.get("save_strategy").value == "no":
        new.map("save_strategy", old.get("save_strategy"), checkpoint_every=0)
    elif every.written and every.known and _is_count(every.value):
        new.map("save_steps", every, checkpoint_every=every.value)
    elif every.written:
        new.leave("save_steps", every, "it is no number of steps that can be read here; set checkpoint_every")
    if limit.written and (not limit.known or _is_count(limit.value)):
        new.map("save_total_limit", limit, keep_checkpoints=limit.value)
    _trackers(old.get("report_to"), new)
    if old.get("use_cpu").value is True:
        new.map("use_cpu", old.get("use_cpu"), device="cpu")
    if old.get("ddp_timeout").written:
        new.map("ddp_timeout", old.get("ddp_timeout"), process_timeout=old.get("ddp_timeout").value)


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
            new.dropped.append(f"report_to = {_shown(name)} ({given.where}): trackers are {', '.join(TRACKERS)}")


def _ends(old: OldRun, new: Migration) -> None:
    """Where a response ends, and terms of the loss that are not the same."""
    stop, token = old.get("stop_token"), old.get("stop_token_id")
    if token.value is not None:
        new.differs.append(f"stop_token_id = {_said(token)}: {KNOWN['stop_token_id'].note}")
    elif stop.value == "eos":
        new.maps.append(f"stop_token = eos ({stop.where}) -> a response always ends at EOS")
    elif stop.value is None:
        new.differs.append("stop_token is not set: TRL then sampled past EOS to response_length; here a response ends at EOS")
    else:
        new.differs.append(f"stop_token = {_said(stop)}: {KNOWN['stop_token'].note}")
    estimator = old.get("kl_estimator")
    if estimator.value == "k1":
        new.maps.append(f"kl_estimator = k1 ({estimator.where}) -> the same, always")
    factor = old.get("vf_coef")
    half = f" = {factor.value / 2:g}" if isinstance(factor.value, (int, float)) else " to half of it"
    new.differs.append(f"vf_coef = {_said(factor)}: {KNOWN['vf_coef'].note}{half} (TRL halves the loss)")


SAID = {"vf_coef", "stop_token", "stop_token_id", "per_device_train_batch_size", "gradient_accumulation_steps"}
UNUSED = "nothing in the old run followed from it"


def _rest(old: OldRun, new: Migration) -> None:
    """What was written and has no place here."""
    if "dataset_name" in old.settings and old.data is None:
        new.used |= {"dataset_name", "dataset_config", "dataset_train_split"}
    taken = {str(value) for name in ("model_name", "rewards", "value_model") for value in _listed(new.settings.get(name))}
    for name, setting in old.settings.items():
        known, value = KNOWN[name], setting.value
        if (
            name in SAID
            or name in new.used
            or setting.where.startswith("PEFT")
            or (known.fate == "maps" and str(value) in taken)
        ):
            continue
        if name in ("kl_estimator", "whiten_rewards") and value == known.default:
            continue
        note = UNUSED if known.fate == "maps" else known.note
        (new.differs if known.fate == "differs" else new.dropped).append(f"{name} = {_said(setting)}: {note}")
    reasons = {
        "data_collator": "prompts are text, padded on the left by the trainer",
        "eval_dataset": "give held-out prompts as --validation; they are measured, not only shown",
        "optimizers": "both optimisers are AdamW",
        "callbacks": "guards, verdicts and trackers take their place; a run can be watched in `proxima studio`",
    }
    for name, where in old.arguments.items():
        new.dropped.append(f"{name} of PPOTrainer ({where}): {reasons[name]}")


def _check(new: Migration) -> None:
    """All settings by Proxima's own rules; an error names the old one behind it."""
    settings = {name: value for name, value in new.settings.items() if name not in COMMAND_FLAGS}
    try:
        PPOConfig.from_dict(settings)
    except ValueError as error:
        wrong = next((name for name, value in settings.items() if not _fits(name, value)), "")
        origin = f"{new.origins[wrong]} cannot be taken over: " if wrong else ""
        raise ValueError(f"{new.name}: {origin}{error}") from None


def _fits(name: str, value: Any) -> bool:
    try:
        PPOConfig.from_dict({name: value})
    except ValueError:
        return False
    return True


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def _plain_name(folder: str) -> bool:
    name = Path(folder).name
    return bool(name) and not name.startswith(".")


def _said(setting: Setting) -> str:
    """A value or an expression, and where it stands."""
    return f"{_shown(setting.value) if setting.known else setting.text} ({setting.where})"


def _shown(value: Any) -> str:
    text = str(value) if not isinstance(value, list) else ", ".join(map(str, value))
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
