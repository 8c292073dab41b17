"""A migration as text. In: `Migration`. Out: a settings file with a comment per line, and the account."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields

from proxima.config import PPOConfig
from proxima.tools.migrate.convert import COMMAND_FLAGS
from proxima.tools.migrate.migration import Migration

PLAIN = re.compile(r"[A-Za-z0-9_./:,*-]+")


def to_yaml(migration: Migration) -> str:
    """Settings for `proxima train --config`, in the order of its help; each says where it came from."""
    import yaml

    order = [*(field.name for field in fields(PPOConfig)), *COMMAND_FLAGS]
    lines = [
        f"# Made by `proxima migrate {_one_line(migration.name)}` from TRL 1.12's PPO; docs/migrate.md says "
        "what differs."
    ]
    for name in sorted(migration.settings, key=order.index):
        lines.append(f"{name}: {_value(migration.settings[name])}  # {_one_line(migration.origins[name])}")
    lines += [f"# not read: {_one_line(item)}" for item in migration.unread]
    text = "\n".join(lines) + "\n"
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    if read != migration.settings:
        raise ValueError(
            f"{migration.name}: a value in it cannot be written as YAML; are there control characters in a "
            "name?"
        )
    return text


def account(migration: Migration, path: str = "") -> str:
    """What maps, what differs, what is dropped; what is left to do."""
    parts = {
        "maps": migration.maps,
        "differs": migration.differs,
        "dropped": migration.dropped,
        "unknown": migration.unknown,
        "not read": migration.unread,
        "next": commands(migration, path or "ppo.yaml"),
    }
    lines = [f"{_one_line(migration.name)}: TRL 1.12's PPO -> Proxima{f', {path}' if path else ''}"]
    for title, items in parts.items():
        if items:
            lines += ["", title, *(f"  {_one_line(item)}" for item in items)]
    return "\n".join(lines)


def commands(migration: Migration, path: str) -> list[str]:
    """What to run next, with placeholders for what is not known yet."""
    more = f"--config {shlex.quote(path)}"
    if "data" not in migration.settings:
        more += " --data prompts.jsonl"
    if "rewards" not in migration.settings:
        more += " --rewards my_rewards:score"
    if "model_name" not in migration.settings:
        more += " --model-name MODEL"
    start = (
        "proxima"
        if migration.processes == 1
        else f"torchrun --nproc_per_node={migration.processes} -m proxima"
    )
    return [f"proxima doctor {more}", f"{start} train {more}"]


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")  # 3e-06 is text to YAML
    if not isinstance(value, str):
        return json.dumps(value)
    import yaml

    if PLAIN.fullmatch(value) and "," not in value:
        try:
            if yaml.safe_load(value) == value:
                return value
        except (ValueError, yaml.YAMLError):
            pass
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
