"""The rollout in minibatches: what training may see (phase 6 of a PPO step).

In: finished pairs. Out: minibatches, and nothing else is trained on.
"""

from proxima.experience_buffer.buffer import BatchedData, ExperienceBuffer

__all__ = ["BatchedData", "ExperienceBuffer"]
