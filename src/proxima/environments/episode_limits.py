"""Limits of an episode: turns, tokens and seconds."""

from __future__ import annotations

from proxima.config import PPOConfig

READ_PER_TURN = 32  # tokens for which an episode has room by default


def max_response_tokens(config: PPOConfig) -> int:
    """Most tokens after a prompt, read ones included."""
    if not config.has_episodes:
        return config.max_new_tokens
    return config.max_episode_tokens or config.max_turns * (config.max_new_tokens + READ_PER_TURN)


def max_chosen_tokens(config: PPOConfig) -> int:
    """Most tokens after a prompt that the policy chooses itself."""
    if not config.has_episodes:
        return config.max_new_tokens
    return min(config.max_turns * config.max_new_tokens, max_response_tokens(config))


def response_limit(config: PPOConfig) -> str:
    """What bounds the tokens after a prompt, for errors."""
    if not config.has_episodes:
        return f"max_new_tokens ({config.max_new_tokens})"
    if config.max_episode_tokens:
        return f"max_episode_tokens ({config.max_episode_tokens})"
    return (
        f"an episode of max_turns ({config.max_turns}) x (max_new_tokens ({config.max_new_tokens}) + "
        f"{READ_PER_TURN} read)"
    )
