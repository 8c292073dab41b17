"""Memory and time on many GPUs, estimated on paper.

In: a model's size, GPUs, a batch. Out: memory per GPU, seconds per step, and the bottleneck.
"""

from proxima.tools.scaling.model_shapes import SHAPES, ModelShape
from proxima.tools.scaling.scaling_plan import ScalingPlan, best_plan, plans

__all__ = ["SHAPES", "ModelShape", "ScalingPlan", "best_plan", "plans"]
