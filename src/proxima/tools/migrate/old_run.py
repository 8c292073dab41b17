"""`OldRun`: what a TRL script says, as far as that can be read without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxima.tools.migrate.trl_settings import KNOWN, near


class Unread:
    """Stands for a value that is computed when the script runs."""

    def __repr__(self) -> str:
        return "(computed)"


UNREAD = Unread()
DEFAULT = "TRL's default"


@dataclass(frozen=True)
class Setting:
    """A value, and where it was found."""

    value: object
    where: str
    text: str = ""
    """The expression itself, where its value could not be read."""

    @property
    def known(self) -> bool:
        return self.value is not UNREAD

    @property
    def written(self) -> bool:
        return self.where != DEFAULT


@dataclass
class OldRun:
    """A PPO run of TRL."""

    name: str
    """The file's."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """By the names in `trl_settings.KNOWN`."""
    models: dict[str, Setting] = field(default_factory=dict)
    """Checkpoints by role: model, ref_model, reward_model, value_model; None for ref_model=None."""
    data: Setting | None = None
    """What `--data` takes."""
    rows: int = 0
    """How many rows the data has, where the script says so; 0 = unknown."""
    processes: int = 0
    """How many processes ran it, where the script says so; 0 = unknown."""
    outside: bool = False
    """Whether the settings are those of a command line, for one of TRL's own scripts."""
    peft: bool = False
    """Whether it was given a LoraConfig."""
    trust_remote_code: Setting | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    """Other arguments of PPOTrainer: name -> where."""
    unread: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""
    unknown: list[str] = field(default_factory=list)
    """Names that TRL 1.12 does not have, in sentences."""

    def put(self, name: str, setting: Setting) -> None:
        if name in KNOWN:
            self.settings[name] = setting
        else:
            shown = f" = {setting.value!r}" if setting.known else ""
            self.unknown.append(
                f"{name}{shown} ({setting.where}): TRL 1.12's PPO has no such setting{near(name)}"
            )

    def get(self, name: str) -> Setting:
        return self.settings.get(name, Setting(KNOWN[name].default, DEFAULT))
