"""Reproducible sampling: kept sets (top-k, top-p), log-probabilities over them, counter-based noise.

In: logits. Out: sampled tokens, the kept sets they were sampled from, and log-probabilities renormalised over
these.

Sampling is Gumbel-max, argmax_v(logit_v / temperature + g_v), with g from a counter-based hash of (seed,
step, sequence, position, token id). What a sequence samples therefore does not depend on its batch slot,
micro-batch, padding, process count or on resuming, and tiny numeric differences almost never flip a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.ops import at_least_float32, entropy, exact_kl
from proxima.core.types import KeptSet

WORD = 0xFFFFFFFF
SALTS = (0x9E3779B9, 0x85EBCA6B)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, and the counters of the noise."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    eos_ids: tuple[int, ...]
    seed: int
    step: int
    max_episode_tokens: int = 0

    @property
    def width(self) -> int:
        """Most tokens after a prompt: of one turn, or of an episode."""
        return self.max_episode_tokens or self.max_new_tokens


def mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche hash (lowbias32) on int64 lanes: every input bit reaches every output bit."""
    x = x & WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def hash_words(keys: Tensor, *words: int) -> Tensor:
    """Two 32-bit hashes (N, 2) of int64 keys (N,) and some small integers."""
    lanes = torch.stack([mix(keys ^ salt) for salt in SALTS], -1)
    for word in (keys >> 32, *(torch.tensor(word, device=keys.device) for word in words)):
        lanes = fold(lanes, word)
    return lanes


def fold(lanes: Tensor, word: Tensor) -> Tensor:
    """The hashes (N, 2) after one more word, (N,) or the same for all."""
    return torch.stack([mix(lanes[:, i] ^ mix(word + salt)) for i, salt in enumerate(SALTS)], -1)


def gumbel_noise(draw_keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u), u from a hash of the draw and the token id.

    Args:
        draw_keys: (B, 2) from `hash_words(sequence key, seed, step, position)`.
        token_ids: (B, K) or (1, V).
    """
    keys = draw_keys.int()  # the low 32 bits: products of these wrap around as `mix`'s masked ones do
    h = _mix_in_place(_mix_in_place(token_ids.int() + keys[:, :1]).bitwise_xor_(keys[:, 1:]))
    # u = (h + 1/2) / 2^32; near 1 through log1p, so that float32 keeps the tail's resolution
    is_high = h < 0
    distance = h.bitwise_xor_(h >> 31).float().add_(0.5).mul_(2.0**-32)  # u, or 1 - u where it is high
    return torch.where(is_high, torch.log1p(-distance), distance.log_()).neg_().log_().neg_()


def _mix_in_place(x: Tensor) -> Tensor:
    """`mix` of 32-bit words as int32, whose sign is the highest bit."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - WORD - 1)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def sequence_keys(prompts: Sequence[Sequence[int]], seen: dict[bytes, int] | None = None) -> Tensor:
    """One int64 per prompt, from its token ids and the number of equal prompts before it; the order of
    different prompts does not matter.

    Args:
        seen: counts of equal prompts; passed to the calls for all parts of one set, it makes the keys
            independent of how the set is split.
    """
    seen = {} if seen is None else seen
    keys = []
    for ids in prompts:
        content = b",".join(str(token).encode() for token in ids)
        ordinal = seen.get(content, 0)
        seen[content] = ordinal + 1
        digest = hashlib.blake2b(content + b"#%d" % ordinal, digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little") >> 1)
    return torch.tensor(keys, dtype=torch.int64)


def shuffled_order(keys: Tensor, seed: int, step: int, epoch: int) -> Tensor:
    """A permutation by (seed, step, epoch) that depends on the sequences, not on their rows."""
    lanes = hash_words(keys.cpu(), seed, step, epoch, 0x5F3759DF)
    order = (lanes[:, 0] << 31) ^ lanes[:, 1]
    return torch.argsort(order, stable=True)


def truncate(scaled: Tensor, top_k: int, top_p: float) -> KeptSet | None:
    """The kept set of one position: the top_k likeliest tokens (0 = all), of these the fewest with a
    probability mass of top_p.

    Args:
        scaled: (B, V) logits over temperature.

    Returns: ids (B, 1, K), or bits (B, 1, ceil(V/8)), or None when nothing is truncated.
    """
    vocabulary = scaled.shape[-1]
    listed = 0 < top_k < vocabulary
    if not listed and top_p >= 1:
        return None
    best, ids = scaled.topk(top_k) if listed else scaled.sort(descending=True)
    probabilities = torch.softmax(best, -1)
    inside = probabilities.cumsum(-1) - probabilities < top_p  # the first is always inside
    if listed:
        return KeptSet(ids=ids.masked_fill(~inside, -1).int().unsqueeze(1))
    mask = torch.zeros_like(inside).scatter(-1, ids, inside)
    return KeptSet(bits=pack_bits(mask).unsqueeze(1))


def kept_shape(top_k: int, top_p: float, vocabulary: int) -> tuple[int, torch.dtype] | None:
    """Size and dtype of a position's kept set as `truncate` gives it; None when nothing is truncated."""
    if 0 < top_k < vocabulary:
        return top_k, torch.int32
    return (-(-vocabulary // 8), torch.uint8) if top_p < 1 else None


def include_sampled(kept: KeptSet, token_ids: Tensor) -> tuple[KeptSet, Tensor]:
    """The kept sets (M, 1, ...) with the sampled tokens (M,) added, and which of these were outside (M,).

    For an engine that returns no kept sets. Its rounding, or a policy update since, may let it sample a token
    outside the set computed here. The acting policy is then the one over the set and that token: its
    log-probability is finite, and its ratio starts at 1.
    """
    if kept.ids is not None:
        present = (kept.ids == token_ids[:, None, None]).any(-1, keepdim=True)  # (M, 1, 1)
        added = torch.where(present, -1, token_ids[:, None, None]).int()
        return KeptSet(ids=torch.cat([kept.ids, added], -1)), ~present.flatten()
    assert kept.bits is not None
    place = (token_ids // 8)[:, None, None]
    bit = (1 << (token_ids % 8)).to(torch.uint8)[:, None, None]
    here = kept.bits.gather(-1, place)
    return KeptSet(bits=kept.bits.scatter(-1, place, here | bit)), ((here & bit) == 0).flatten()


def pack_bits(mask: Tensor) -> Tensor:
    """(..., V) bool -> (..., ceil(V/8)) uint8, lowest bit first."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    weights = 2 ** torch.arange(8, device=mask.device)
    return (padded.unflatten(-1, (-1, 8)).long() * weights).sum(-1).to(torch.uint8)


def unpack_bits(bits: Tensor, vocabulary: int) -> Tensor:
    """(..., ceil(V/8)) uint8 -> (..., V) bool."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :vocabulary].bool()


def kept_logits(scaled: Tensor, kept: KeptSet | None) -> Tensor:
    """The logits of the acting policy: (B, R, K) of the kept ids, or (B, R, V) with -inf for all others.

    On padding nothing is truncated.
    """
    if kept is None:
        return scaled
    if kept.ids is not None:
        cut = kept.ids < 0
        chosen = scaled.gather(-1, kept.ids.clamp(min=0).long())
    else:
        assert kept.bits is not None
        cut = ~unpack_bits(kept.bits, scaled.shape[-1])
        chosen = scaled
    return chosen.masked_fill(cut & ~cut.all(-1, keepdim=True), -torch.inf)


def choose(scaled: Tensor, kept: KeptSet | None, draw_keys: Tensor) -> Tensor:
    """Gumbel-max over the kept set: (B, V) logits over temperature -> (B,) token ids."""
    three = scaled.unsqueeze(1)
    allowed = kept_logits(three, kept).squeeze(1)
    if kept is not None and kept.ids is not None:
        ids = kept.ids.squeeze(1).long()
        best = (allowed + gumbel_noise(draw_keys, ids.clamp(min=0))).argmax(-1, keepdim=True)
        return ids.gather(-1, best).squeeze(-1)
    vocabulary = torch.arange(scaled.shape[-1], device=scaled.device).unsqueeze(0)
    return (allowed + gumbel_noise(draw_keys, vocabulary)).argmax(-1)


def token_logprobs(logits: Tensor, token_ids: Tensor, kept: KeptSet | None, temperature: float) -> Tensor:
    """log-probability (B, R) of each token under softmax(logits / temperature) renormalised over the kept
    set."""
    if kept is None:
        logprobs = log_softmax(logits, temperature)
        return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    scaled = at_least_float32(logits) / temperature
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(kept_logits(scaled, kept), -1)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) in float32 or wider, without a float32 copy of the logits where
    possible."""
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits if temperature == 1 else logits.to(wide) / temperature, -1, dtype=wide)


def score_tokens(
    logits: Tensor, ref_logits: Tensor, token_ids: Tensor, kept: KeptSet | None, temperature: float
) -> tuple[Tensor, ...]:
    """What a rollout records of each token (B, R): log-probability of policy and of reference, exact KL,
    entropy of the acting policy, cost of truncation.

    Log-probabilities are logits of the same distribution, so the formulas start from them.
    """
    policy = log_softmax(logits, temperature)
    reference = log_softmax(ref_logits, temperature)
    places = token_ids.unsqueeze(-1)
    acting = (
        policy.gather(-1, places).squeeze(-1)
        if kept is None
        else token_logprobs(logits, token_ids, kept, temperature)
    )
    return (
        acting,
        reference.gather(-1, places).squeeze(-1),
        exact_kl(policy, reference),
        entropy(kept_logits(policy, kept)),
        -log_kept_mass(policy, kept, 1.0),
    )


def log_kept_mass(logits: Tensor, kept: KeptSet | None, temperature: float) -> Tensor:
    """log of the probability mass of the kept set under the untruncated policy, (B, R); its negative is the
    cost of truncation."""
    if kept is None:
        return at_least_float32(logits.new_zeros(logits.shape[:-1]))
    scaled = at_least_float32(logits) / temperature
    return (torch.logsumexp(kept_logits(scaled, kept), -1) - torch.logsumexp(scaled, -1)).clamp(max=0)
