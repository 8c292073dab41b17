"""A paper plan. In: a model's size, GPUs, a batch. Out: memory a GPU, seconds a step, and which resource is the bottleneck."""

from proxima.scaling.plan import Plan, best_plan, plans
from proxima.scaling.shapes import SHAPES, Shape

__all__ = ["SHAPES", "Plan", "Shape", "best_plan", "plans"]
