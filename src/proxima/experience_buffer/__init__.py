"""Phase 6 of a PPO step: what training may see.

In: finished pairs. Out: minibatches, and nothing else is trained on.
"""

from proxima.experience_buffer.buffer import BatchedData, ExperienceBuffer

__all__ = ["BatchedData", "ExperienceBuffer"]
