"""Phase 1 of a PPO step on vLLM: in this process, or on servers. In: prompts as ids, and the policy as a
version in a folder.
Out: sampled responses with the engine's own log-probabilities, checked before they are used."""

from proxima.runtime.vllm.vllm_rollouts import Pending, VllmRollouts

__all__ = ["Pending", "VllmRollouts"]
