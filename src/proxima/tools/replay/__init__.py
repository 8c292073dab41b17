"""`proxima replay`: a recorded PPO step, recomputed or compared with another.

In: bundles of `record_steps`. Out: stage by stage, whether both are the same bits, within the tolerance or
different; and a copy to share.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.tools.replay.bundle_contents import contents, redacted
    from proxima.tools.replay.replayed_step import Replayed, replay_step
    from proxima.tools.replay.show_stages import note, stage_lines
    from proxima.tools.replay.stage_comparison import Comparison, Stage, compare_bundles

__all__, __getattr__ = lazy_exports(__name__)
