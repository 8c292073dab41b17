"""A paper plan.

In: a model's size, GPUs, a batch. Out: memory a GPU, seconds a step, and which resource is the bottleneck.
"""

from proxima.tools.scaling.model_shapes import SHAPES, Shape
from proxima.tools.scaling.scaling_plan import Plan, best_plan, plans

__all__ = ["SHAPES", "Plan", "Shape", "best_plan", "plans"]
