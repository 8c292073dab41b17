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


def kl_budget(spread: float, target: float, kls: list[float]) -> list[float]:
    """The coefficient of each step, from the whole history anew: PI on its log, no integral part while the KL
    rises for the first time."""
    centre = spread / math.sqrt(2 * target)
    smooth: list[float] = []
    log_coef, lag, rising, slow = math.log(centre) - 6 / 9, 6.0, True, 0
    coefs = [math.exp(log_coef)]
    for n, kl in enumerate(kls, 1):
        smooth.append(kl if n == 1 else smooth[-1] + (kl - smooth[-1]) / 3)
        errors = [x / target - 1 if x < target else math.log(x / target) for x in smooth]
        if rising:
            area = math.fsum(1 - x / max(smooth) for x in smooth) if max(smooth) else n
            lag = max(6.0, area / 2)
            slow = slow + 1 if smooth[-1] < 2 * math.fsum(smooth) / n else 0
            rising = smooth[-1] < target and slow < 3
        move = 0.0 if n == 1 else errors[-1] - errors[-2]
        if not rising:
            move += max(math.log(smooth[-1] / target), -2.0) / lag if smooth[-1] else -2.0 / lag
        log_coef = clip(log_coef + move * lag / (lag + 3), math.log(centre / 100), math.log(centre * 100))
        coefs.append(math.exp(log_coef))
    return coefs


# --- credit since 2022: VAPO, RLOO, GRPO, Dr. GRPO, REINFORCE++, CISPO, DIS, IcePop
# ----------------------------------------------------------------------------------------------------------


def adaptive_lambda(length: int, alpha: float) -> float:
    """1 - 1 / (alpha l), held within 0 .. 1."""
    return clip(1 - 1 / (alpha * length), 0.0, 1.0)


def bootstrapped(rewards: list[float], gamma: float, value_after: float) -> list[float]:
    """The rewards of a response that went on: what follows the last token is worth gamma * V there."""
    return [*rewards[:-1], rewards[-1] + gamma * value_after]


def rloo(scores: list[float]) -> list[float]:
    """Each score minus the mean of the others."""
    n = len(scores)
    if n == 1 or max(scores) - min(scores) <= 1e-6:
        return [0.0] * n
    return [s - math.fsum(scores[:i] + scores[i + 1 :]) / (n - 1) for i, s in enumerate(scores)]


def dr_grpo(scores: list[float]) -> list[float]:
    """Each score minus the mean of all."""
    if max(scores) - min(scores) <= 1e-6:
        return [0.0] * len(scores)
    return [s - math.fsum(scores) / len(scores) for s in scores]


def grpo(scores: list[float], eps: float = 1e-4) -> list[float]:
    """Divided by std + eps, the std with Bessel's correction."""
    centred = dr_grpo(scores)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(scores) - 1))
    return [c / (std + eps) for c in centred]


CENTRED_SCORES = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce_plus_plus": lambda scores: scores,
    "reinforce_plus_plus_baseline": dr_grpo,
}
"""By name of the estimator: a group's scores less its baseline."""


def less_kl_to_go(centred: float, kl_costs: list[float]) -> list[float]:
    """The advantage of each token: its response's centred score minus the KL cost from it to the end."""
    return [centred - math.fsum(kl_costs[t:]) for t in range(len(kl_costs))]


def cispo_gradient(ratio: float, advantage: float, high: float) -> float:
    """d loss / d logprob = -min(r, 1 + high) A."""
    return -min(ratio, 1 + high) * advantage


def dis_gradient(ratio: float, advantage: float, low: float, high: float) -> float:
    """d loss / d logprob = -r A within the band, 0 outside."""
    return -ratio * advantage if 1 - low < ratio < 1 + high else 0.0


def kl_loss_gradient(name: str, new: float, ref: float, ratio: float) -> float:
    """d / d log pi of (log pi - log ref)^2 / 2, and of pi / pi_old * k3: both by hand."""
    return {"k2": new - ref, "k3": ratio * (new - ref)}[name]


def expected_kl_gradients(p: float, ref: float) -> dict[str, float]:
    """Of two tokens with probabilities p, 1 - p: the expected gradient on the first logit, by the KL's use."""
    found = dict.fromkeys(
        ("true", "k1 reward", "k2 loss", "k1 loss", "k3 loss", "k3 ratio loss", "k3 reward"), 0.0
    )
    for chance, other, score in ((p, ref, 1 - p), (1 - p, 1 - ref, -p)):  # score: d log chance / d logit
        k1 = math.log(chance / other)
        k3 = other / chance - 1 + k1
        found["true"] += chance * score * (k1 + 1)  # product rule on sum of chance * log(chance / other)
        found["k1 reward"] += chance * k1 * score
        found["k1 loss"] += chance * score
        found["k2 loss"] += chance * k1 * score
        found["k3 loss"] += chance * (1 - other / chance) * score
        found["k3 reward"] += chance * k3 * score
        found["k3 ratio loss"] += chance * (k3 + 1 - other / chance) * score
    return found


def masked_weight(weight: float, low: float, high: float) -> float:
    return weight if low <= weight <= high else 0.0


def geometric_mean(weights: list[float]) -> float:
    return math.prod(weights) ** (1 / len(weights))


def weighted_loss(losses: list[list[float]], mode: str, horizon: int) -> float:
    """Of a minibatch, one list per response."""
    if mode == "sequence":
        return math.fsum(math.fsum(row) / len(row) for row in losses) / len(losses)
    total = math.fsum(x for row in losses for x in row)
    return total / (sum(map(len, losses)) if mode == "token" else len(losses) * horizon)
