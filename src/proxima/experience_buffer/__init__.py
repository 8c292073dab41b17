"""Stage 6 of the road: what training may see.

In: finished pairs. Out: minibatches, and nothing else is trained on.
"""

from proxima.experience_buffer.buffer import BatchedData, ExperienceBuffer

__all__ = ["BatchedData", "ExperienceBuffer"]
