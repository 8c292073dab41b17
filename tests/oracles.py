"""Slow references for every formula of PPO on language models: plain Python floats in, plain Python floats
out.

Written from the papers, never from the package, so that both can only agree by being right. One sequence is a
list of floats, one per real token; there is no padding here. The value after the last real token is 0.

Sources: Schulman et al. 2016 (GAE), Schulman et al. 2017 (PPO-clip), Ziegler et al. 2019 (KL in the reward,
adaptive coefficient), Ye et al. 2020 (dual clip).
"""

import math


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def kl(logprob_policy: float, logprob_ref: float) -> float:
    """One-sample estimate (k1) of KL(policy || reference) at the token that was drawn."""
    return logprob_policy - logprob_ref


def adjusted_rewards(reward: float, kls: list[float], kl_coef: float) -> list[float]:
    """The sequence's reward on its last token, minus kl_coef * kl on every token."""
    last = len(kls) - 1
    return [(reward if t == last else 0.0) - kl_coef * kls[t] for t in range(len(kls))]


def adjusted_token_rewards(rewards: list[float], kls: list[float], kl_coef: float) -> list[float]:
    """reward_t - kl_coef * kl_t, where every token has its own reward."""
    return [r - kl_coef * k for r, k in zip(rewards, kls, strict=True)]


def td_errors(rewards: list[float], values: list[float], gamma: float) -> list[float]:
    """delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)."""
    next_values = [*values[1:], 0.0]
    return [r + gamma * after - v for r, after, v in zip(rewards, next_values, values, strict=True)]


def gae(deltas: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = delta_t + gamma * lam * A_{t+1}, with A = 0 after the last token."""
    if not deltas:
        return []
    later = gae(deltas[1:], gamma, lam)
    return [deltas[0] + gamma * lam * (later[0] if later else 0.0), *later]


def gae_double_sum(deltas: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma * lam)^l * delta_{t+l}; 0^0 is 1."""
    n = len(deltas)
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def reward_to_go(rewards: list[float], gamma: float) -> list[float]:
    """R_t = sum over l of gamma^l * r_{t+l}."""
    n = len(rewards)
    return [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]


def ratio(logprob: float, old_logprob: float) -> float:
    return math.exp(logprob - old_logprob)


def policy_loss(ratio: float, advantage: float, clip_epsilon: float, dual_clip: float = 0.0) -> float:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A); dual clip bounds that objective from below by c A where A <
    0."""
    objective = min(ratio * advantage, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * advantage)
    if dual_clip > 0 and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


def policy_loss_gradient(
    ratio: float, advantage: float, clip_epsilon: float, dual_clip: float = 0.0
) -> float:
    """d loss / d logprob away from the kinks: -r A, and 0 wherever the ratio has left the trust region for
    gain."""
    too_good = advantage > 0 and ratio > 1 + clip_epsilon
    too_low = advantage < 0 and ratio < 1 - clip_epsilon
    too_bad = advantage < 0 and 0 < dual_clip < ratio
    return 0.0 if too_good or too_low or too_bad else -ratio * advantage


def value_loss(value: float, target: float, old_value: float | None = None, value_clip: float = 0.0) -> float:
    """(v - R)^2, without a factor 1/2; clipped: the larger of it and the error of v held within value_clip
    of v_old."""
    if old_value is None or value_clip == 0:
        return (value - target) ** 2
    held = old_value + clip(value - old_value, -value_clip, value_clip)
    return max((value - target) ** 2, (held - target) ** 2)


def masked_mean(xs: list[float], mask: list[bool], total: float | None = None) -> float:
    kept = [x for x, real in zip(xs, mask, strict=True) if real]
    return math.fsum(kept) / (len(kept) if total is None else total)


def whiten(xs: list[float]) -> list[float]:
    """(x - mean) / sqrt(var + 1e-8) with the biased variance; xs are all real tokens of the rollout."""
    mean = math.fsum(xs) / len(xs)
    variance = math.fsum((x - mean) ** 2 for x in xs) / len(xs)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in xs]


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, n: float) -> float:
    """beta * (1 + clip(KL / target - 1, -0.2, 0.2) * min(n / horizon, 1)), KL summed over a sequence."""
    return coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(n / horizon, 1))
