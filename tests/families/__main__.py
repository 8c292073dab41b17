"""`python -m tests.families`: try every architecture, write the table of docs/families.md anew.

Each is tried in a process that may die or hang without ending the sweep.
"""

import json
import subprocess
import sys
import warnings
from dataclasses import asdict

from tests.families.check import Outcome, check
from tests.families.networks import causal_configs
from tests.families.table import write

AT_ONCE = 20  # architectures of one process
SECONDS = 60  # for each of them


def main() -> int:
    names, outcomes, broken = list(causal_configs()), [], []
    while names:
        found = _try(names[:AT_ONCE])
        outcomes += found
        names = names[len(found) :]
        if len(found) < AT_ONCE and names:
            broken.append(names.pop(0))
            print(f"{broken[-1]}: failed", flush=True)
    if broken:
        print(f"no table is written: {len(broken)} failed: {', '.join(broken)}")
        return 1
    write(outcomes)
    return 0


def _try(names: list[str]) -> list[Outcome]:
    """Outcomes up to the first architecture that failed."""
    command = [sys.executable, "-m", "tests.families", *names]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=SECONDS * len(names), check=False
        ).stdout
    except subprocess.TimeoutExpired as slow:
        done = (slow.stdout or b"").decode()
    found = [Outcome(**json.loads(line)) for line in done.splitlines() if line.startswith("{")]
    for outcome in found:
        print(*(value for value in asdict(outcome).values() if value), flush=True)
    return found


def _work(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        print(json.dumps(asdict(check(name))), flush=True)


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1:]) if len(sys.argv) > 1 else main())
