"""`Migration`: a new run, and an account of every change; filled by the other files here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.tools.migrate.old_run import Setting

DEFAULTS = PPOConfig()


@dataclass
class Migration:
    """The settings of a new run, and what became of the old ones."""

    name: str
    settings: Record = field(default_factory=dict)
    """For `proxima train`, by name."""
    origins: dict[str, str] = field(default_factory=dict)
    """Where each of them comes from."""
    maps: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    processes: int = 1
    used: set[str] = field(default_factory=set)
    """Old settings that were mapped."""

    def put(self, name: str, value: object, origin: str) -> None:
        self.settings[name] = value
        self.origins[name] = origin

    def leave(self, old: str, setting: Setting, why: str) -> None:
        """Leave an old setting to the reader."""
        self.used.add(old)
        self.unread.append(f"{old} = {said(setting)}: {why}")

    def map(self, old: str, setting: Setting, **new: object) -> None:
        """Map one old setting to one or more new ones; listed as unread where its value is computed."""
        self.used.add(old)
        if not setting.known:
            names = ", ".join(f"{name} (Proxima's own: {getattr(DEFAULTS, name, 'none')})" for name in new)
            self.unread.append(f"{old} = {said(setting)}: it is computed; set {names}")
            return
        for name, value in new.items():
            self.put(name, value, f"{old} ({setting.where})")
        listed = ", ".join(f"{name} = {shown(value)}" for name, value in new.items())
        self.maps.append(f"{old} = {shown(setting.value)} ({setting.where}) -> {listed}")


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63


def said(setting: Setting) -> str:
    """A value or an expression, and where it was found."""
    return f"{shown(setting.value) if setting.known else setting.text} ({setting.where})"


def shown(value: object) -> str:
    text = str(value) if not isinstance(value, list) else ", ".join(map(str, value))
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
