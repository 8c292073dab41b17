"""From scores to the slope of every token's log-probability: each method whole, against the papers' formulas
in plain Python, on ragged responses with holes."""

import math
import random
from itertools import product
from statistics import fmean, pstdev, stdev

import pytest
import torch

from proxima.advantage import Outcome, estimate, whiten_advantages
from proxima.core.pairs import PlainPairs
from proxima.training import Moved, correction, policy_objective, token_weights

LOW, HIGH, HORIZON, ALPHA = 0.2, 0.28, 9, 1.5
GROUPS = (0, 0, 0, 1, 1, 1)
BANDS = {"none": (0.0, 0.0), "truncate": (0.5, 1.2), "mask": (0.8, 1.25), "sequence_mask": (0.97, 1.03)}


def cases(seed):
    """Of each response: tokens that the policy chose, each with what the formulas read, and its score."""
    chance = random.Random(seed)
    for group in GROUPS:
        count = chance.randint(1, 5)
        tokens = [
            {
                "place": place,
                "old": (old := chance.uniform(-3, -0.2)),
                "new": old + chance.gauss(0, 0.3),
                "sampled": old + chance.gauss(0, 0.1),
                "kl": 0.1 * chance.gauss(0, 1),
                "value": chance.gauss(0, 1),
            }
            for place in sorted(chance.sample(range(7), count))
        ]
        yield group, chance.gauss(0, 1), tokens


def advantages_by_hand(name, responses):
    found = []
    for group, score, tokens in responses:
        own = [other for mate, other, _ in responses if mate == group]
        if name == "gae":
            found.append(gae_by_hand(score, tokens))
            continue
        baseline = {
            "rloo": (sum(own) - score) / (len(own) - 1),
            "reinforce_plus_plus": 0.0,
        }.get(name, fmean(own))
        scale = stdev(own) + 1e-4 if name == "grpo" else 1.0
        to_go = [sum(each["kl"] for each in tokens[i:]) for i in range(len(tokens))]
        found.append([(score - baseline) / scale - cost for cost in to_go])
    return found


def gae_by_hand(score, tokens, gamma=0.9):
    """sum over l of (gamma lambda)^l delta_{t+l}, lambda by the number of tokens."""
    lam = max(0.0, 1 - 1 / (ALPHA * len(tokens)))
    last = len(tokens) - 1
    deltas = [
        (score if i == last else 0.0) - each["kl"] - each["value"]
        + gamma * (0.0 if i == last else tokens[i + 1]["value"])
        for i, each in enumerate(tokens)
    ]  # fmt: skip
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, last + 1)) for t in range(last + 1)]


def slope_by_hand(objective, token, advantage):
    """d loss / d log pi."""
    ratio = math.exp(token["new"] - token["old"])
    if objective == "cispo":
        return -min(ratio, 1 + HIGH) * advantage
    if objective == "dis":
        ratio = math.exp(token["new"] - token["sampled"])
        return -ratio * advantage if 1 - LOW < ratio < 1 + HIGH else 0.0
    gained = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
    return 0.0 if gained else -ratio * advantage


def weights_by_hand(mode, tokens):
    low, high = BANDS[mode]
    weights = [math.exp(each["old"] - each["sampled"]) for each in tokens]
    mean = math.prod(weights) ** (1 / len(weights))
    return {
        "none": [1.0] * len(weights),
        "truncate": [min(w, high) for w in weights],
        "mask": [w if low <= w <= high else 0.0 for w in weights],
        "sequence_mask": [float(low <= mean <= high)] * len(weights),
    }[mode]


def shares_by_hand(weighting, responses):
    """1 / denominator of each token, rejected ones counted."""
    sizes = [len(tokens) for _, _, tokens in responses]
    return {
        "token": [1 / sum(sizes)] * len(sizes),
        "sequence": [1 / (len(sizes) * size) for size in sizes],
        "horizon": [1 / (len(sizes) * HORIZON)] * len(sizes),
    }[weighting]


def slopes_by_hand(responses, name, whitened, objective, mode, weighting):
    advantages = advantages_by_hand(name, responses)
    if whitened:
        every = [number for row in advantages for number in row]
        scale = math.sqrt(pstdev(every) ** 2 + 1e-8)
        advantages = [[(number - fmean(every)) / scale for number in row] for row in advantages]
    shares = shares_by_hand(weighting, responses)
    return [
        share * weight * slope_by_hand(objective, token, advantage)
        for share, row, (_, _, tokens) in zip(shares, advantages, responses, strict=True)
        for advantage, weight, token in zip(row, weights_by_hand(mode, tokens), tokens, strict=True)
    ]


def slopes(responses, name, whitened, objective, mode, weighting):
    """By the package."""
    tables = {
        key: torch.full((len(responses), 7), 9.0, dtype=torch.float64)
        for key in ("old", "new", "sampled", "kl", "value")
    }
    mask, scores = torch.zeros(len(responses), 7, dtype=torch.bool), torch.zeros(len(responses), 7).double()
    for i, (_, score, tokens) in enumerate(responses):
        for token in tokens:
            mask[i, token["place"]] = True
            for key, table in tables.items():
                table[i, token["place"]] = token[key]
        scores[i, tokens[-1]["place"]] = score
    values = tables["value"] if name == "gae" else None
    outcome = Outcome(scores, tables["kl"], mask, values, groups=torch.tensor(GROUPS))
    advantages = estimate(name, outcome, 0.9, 0.5, lam_alpha=ALPHA).advantages
    if whitened:
        advantages = whiten_advantages(PlainPairs(mask, {"advantage": advantages})).column("advantage")
    new = tables["new"].requires_grad_()
    moved = Moved(new, tables["old"], advantages, tables["sampled"])
    losses, _ = policy_objective(objective, moved, LOW, HIGH)
    if mode != "none":
        losses = losses * correction(mode, tables["old"], tables["sampled"], mask, *BANDS[mode])[0]
    counted = token_weights(weighting, mask.sum(1), HORIZON)
    rows = None if counted.rows is None else counted.rows.unsqueeze(1).expand(mask.shape)[mask]
    loss = counted.mean(losses[mask], rows)
    return torch.autograd.grad(loss, new)[0][mask].tolist()


METHODS = [
    ("gae", False), ("gae", True), ("rloo", False), ("grpo", False), ("dr_grpo", False),
    ("reinforce_plus_plus", False), ("reinforce_plus_plus", True),
    ("reinforce_plus_plus_baseline", False), ("reinforce_plus_plus_baseline", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "whitened"), METHODS)
@pytest.mark.parametrize("objective", ["ppo", "cispo", "dis"])
@pytest.mark.parametrize("seed", range(3))
def test_the_slopes_of_a_minibatch(name, whitened, objective, seed):
    responses = [*cases(seed)]
    modes = ["none"] if objective == "dis" else BANDS
    for mode, weighting in product(modes, ("token", "sequence", "horizon")):
        chosen = (responses, name, whitened, objective, mode, weighting)
        # lambda by length and 1 / size are float32
        assert slopes(*chosen) == pytest.approx(slopes_by_hand(*chosen), rel=1e-5, abs=1e-6), chosen[3:]
