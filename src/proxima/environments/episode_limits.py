"""Limits of an episode: turns, tokens and seconds."""

from __future__ import annotations

from proxima.config import PPOConfig

READ_PER_TURN = 32  # tokens for which an episode has room by default


def max_response_tokens(config: PPOConfig) -> int:
    """Most tokens after a prompt, read ones included."""
    if not config.has_episodes:
        return config.max_new_tokens
    return config.max_episode_tokens or config.max_turns * (config.max_new_tokens + READ_PER_TURN)
