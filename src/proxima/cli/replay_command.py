"""`proxima replay`: a recorded step, recomputed or compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from proxima.cli.command import Command
from proxima.config import RewardSpec

if TYPE_CHECKING:
    from proxima.runs import Bundle


@dataclass
class Replay(Command):
    """Recompute a recorded PPO step stage by stage and name the first stage that differs; or compare two
    recordings."""

    words: ClassVar[tuple[str, ...]] = ("bundles...",)
    example: ClassVar[str] = "proxima replay runs/recorded/replay/step-00000002.safetensors"
    writes: ClassVar[str] = "`replay.html`, or `--out`; with `--share` that copy of the bundle."
    guide: ClassVar[str] = "replay.md"
    fails: ClassVar[str] = "a stage differs"

    bundles: tuple[str, ...]
    """A bundle that `record_steps` wrote, or two to compare; may be given without the flag."""
    model_name: str = ""
    """The base model, where it is not found by the name in the bundle; its weights must be the same."""
    rewards: tuple[RewardSpec, ...] = ()
    """Ask these rewards again; by default ready-made ones are asked, and the scores of all others are taken
    from the bundle."""
    device: str = ""
    """Recompute on this device; by default on the recorded kind if there is one."""
    show: bool = False
    """Say what is inside and write the page, but recompute nothing; needs no model."""
    share: Path | None = None
    """Write a copy for others to this file, and say what is inside; recomputes nothing."""
    redact: bool = False
    """With --share, leave out prompts, responses, token ids and weights: only numbers, settings and versions
    stay."""
    out: Path = Path("replay.html")
    """Where the page goes."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base model, which `--model-name` must then name. Off: such models
    are refused."""

    def run(self) -> None:
        from proxima.runs import read_bundle

        if len(self.bundles) not in (1, 2):
            raise ValueError(f"replay takes one bundle, or two to compare; got {len(self.bundles)}")
        others = (self.share, self.show, self.rewards, self.model_name, self.device, self.trust_remote_code)
        if len(self.bundles) == 2 and any(others):
            raise ValueError("two bundles are only compared: leave out all other flags except --out")
        if self.redact and self.share is None:
            raise ValueError("--redact is for the copy that --share FILE writes")
        if self.trust_remote_code and not self.model_name:
            raise ValueError(
                "--trust-remote-code runs code of the base model, which the bundle must not choose; name the "
                "model you trust with --model-name"
            )
        bundles = [read_bundle(path) for path in self.bundles]
        if self.share is not None:
            self._share(bundles[0], self.share)
        elif self.show:
            self._show(bundles[0])
        else:
            self._compare(bundles)

    def _compare(self, bundles: list[Bundle]) -> None:
        from proxima.pages.comparison import write_replay_page
        from proxima.tools.replay import compare_bundles, replay_step, stage_lines

        if len(bundles) == 2:
            sides = list(zip(self.bundles, bundles, strict=True))
            comparison = compare_bundles(bundles[0], bundles[1])
        else:
            done = replay_step(bundles[0], self.model_name, self.rewards, self.device, self.trust_remote_code)
            sides, comparison = [("recorded", bundles[0]), ("recomputed", done.recomputed)], done.comparison
        print("\n".join(stage_lines(comparison)))
        print(f"written to {write_replay_page(self.out, sides, comparison)}")
        if comparison.first is not None:
            raise SystemExit(1)

    def _show(self, bundle: Bundle) -> None:
        from proxima.pages.comparison import write_replay_page
        from proxima.tools.replay import contents

        print("\n".join(contents(bundle)))
        print(f"written to {write_replay_page(self.out, [('recorded', bundle)])}")

    def _share(self, bundle: Bundle, path: Path) -> None:
        from proxima.runs import write_bundle
        from proxima.tools.replay import contents, redacted

        if path.exists():
            raise ValueError(f"{path} exists; choose another name")
        shared = redacted(bundle) if self.redact else bundle
        print("\n".join(contents(shared)))
        print(f"written to {path}, {write_bundle(path, shared.facts, shared.tensors):,} bytes")
