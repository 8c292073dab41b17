"""`PolicyVersions`: saves the policy in a new folder whenever its weights have changed."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import weakref
from pathlib import Path

import torch

from proxima.models import PolicyModel
from proxima.runtime.distributed import Processes
from proxima.runtime.vllm.rollout_job import PolicyVersion

KEPT = 2  # the newest, and the one that a rollout in flight may still use


class PolicyVersions:
    """The saved versions, in a folder under `home` that is deleted with the trainer."""

    def __init__(self, policy: PolicyModel, home: Path, processes: Processes):
        self.policy = policy
        self.processes = processes
        self.kept: list[PolicyVersion] = []
        self._count = 0
        self._parent = home
        self._home = Path()
        self._launch = ""

    def digest(self) -> str:
        """A hash of the live weights."""
        found = hashlib.blake2b(digest_size=16)
        for parameter in self.policy.parameters():
            found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def publish(self) -> tuple[PolicyVersion, list[PolicyVersion]]:
        """The current policy, and the versions that are no longer needed (their folders still exist)."""
        digest = self.processes.on_main(self.digest)
        if self.kept and self.kept[-1].digest == digest:
            return self.kept[-1], []
        if not self._launch:
            folder, self._launch = self.processes.on_main(lambda: _new_home(self._parent))
            self._home = Path(folder)
            if self.processes.is_main:
                weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._count += 1
        number = self._count
        name = f"proxima-{self._launch}-{number}"
        place = self._home / name
        self.processes.on_main(lambda: self.policy.save(place) and None)
        version = PolicyVersion(number, name, place, digest, self.policy.adapter is not None)
        self.kept.append(version)
        old, self.kept = self.kept[:-KEPT], self.kept[-KEPT:]
        return version, old

    def remove(self, version: PolicyVersion) -> None:
        self.processes.on_main(lambda: shutil.rmtree(version.folder, ignore_errors=True))


def _new_home(home: Path) -> list[str]:
    home.mkdir(parents=True, exist_ok=True)
    folder = home.resolve() / f".adapters-{secrets.token_hex(8)}"
    folder.mkdir()  # default mode: servers of another user may read it where the umask allows
    return [str(folder), secrets.token_hex(4)]
