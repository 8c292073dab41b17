"""Rollouts on vLLM (phase 1 of a PPO step), in the training process or on servers.

The policy is handed over as a saved version. Responses come back with vLLM's own log-probabilities and are
checked before they are used.
"""

from proxima.runtime.vllm.vllm_rollouts import PendingRollout, VllmRollouts

__all__ = ["PendingRollout", "VllmRollouts"]
