"""Memory and time on many GPUs, estimated on paper.

In: a model's size, GPUs, a batch. Out: memory per GPU, seconds per step, and the bottleneck.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.tools.scaling.model_shapes import SHAPES, ModelShape
    from proxima.tools.scaling.scaling_plan import H200, ScalingPlan, best_plan, plans
    from proxima.tools.scaling.step_costs import GIB, StepWork

__all__, __getattr__ = lazy_exports(__name__)
