"""From TRL 1.12's PPO to Proxima's.

In: a PPO script, a shell script or a YAML file; it is read, never run. Out: `Migration`.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.tools.migrate.convert import migrate
    from proxima.tools.migrate.migration import Migration
    from proxima.tools.migrate.show_migration import account, to_yaml

__all__, __getattr__ = lazy_exports(__name__)
