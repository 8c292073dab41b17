"""From TRL 1.12's PPO to Proxima's.

In: a PPO script, a shell script or a YAML file; it is read, never run. Out: `Migration`.
"""

from proxima.tools.migrate.convert import migrate
from proxima.tools.migrate.migration import Migration

__all__ = ["Migration", "migrate"]
