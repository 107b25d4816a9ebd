"""What the kernels compute, in float64 PyTorch and from the definitions: no tiles, no fusion, any device.

The truth that tests compare with. Slow and memory-hungry on purpose.
"""

from __future__ import annotations

import dataclasses

import torch

from .rng import GROUP_SIZE, Stream, Unit

_MASK32 = 0xFFFFFFFF


def philox4x32_ref(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): four counter words and two key words, int64 in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 64-bit product wraps in int64, its bits stay right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, ((p0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = p1 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]


def exponential_from_bits_ref(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """``-log1p(-v)`` for ``v = (2**32 hi + lo + 1/2) / 2**64``; int64 words, float64 result."""
    v = (hi.double() * 2.0**32 + lo.double() + 0.5) * 2.0**-64
    one_minus_v = ((_MASK32 - hi).double() * 2.0**32 + (_MASK32 - lo).double() + 0.5) * 2.0**-64
    return torch.where(v < 0.5, -torch.log1p(-v), -torch.log(one_minus_v))


def gumbel_ref(
    seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor, stream: Stream, unit: Unit
) -> torch.Tensor:
    """The project's noise, Gumbel(0, 1) in float64; int64 arguments that broadcast."""
    seed, position, index = torch.broadcast_tensors(seed, position, index)
    counter = [index, position & _MASK32, (position >> 32) & _MASK32, torch.full_like(index, stream + 256 * unit)]
    words = philox4x32_ref(counter, [seed & _MASK32, (seed >> 32) & _MASK32])
    return -torch.log(exponential_from_bits_ref(words[0], words[1]))


def logits_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    logit_scale: float | None = None,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    perturb: float = 0.0,
) -> torch.Tensor:
    """``[B, V]`` float64 logits, rounded where the model's GEMM and scaling round.

    perturb: added to each dot product, in units of ``sum_k |hidden_k weight_k|``: the room that the order
    of an accumulation has. Rounding can turn it into a step of a whole unit in the last place.
    """
    rounded = weight.dtype if logits_dtype is None else logits_dtype
    logits = hidden.double() @ weight.double().T
    if perturb:
        logits += perturb * (hidden.double().abs() @ weight.double().abs().T)
    logits = logits.to(rounded).double()
    if logit_scale is not None:
        logits = (logits * logit_scale).to(rounded).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


@dataclasses.dataclass(frozen=True)
class Reference:
    token: torch.Tensor  # [B] i64, absolute ids
    near_tie: torch.Tensor  # [B] bool: another token is within rounding of this one
    logprob_low: torch.Tensor  # [B] f64, of the token under softmax(logits / temperature): the least it can be
    logprob_high: torch.Tensor  # [B] f64, the most


def sample_ref(
    logits: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    vocab_start: int = 0,
    tolerance: float = 4e-6,
) -> Reference:
    """The token of each row of ``[B, V]`` float64 ``logits``, each of which another summation order, rounded, may
    put anywhere in ``[low, high]``.

    A row is a near-tie when the scores of two candidates overlap once each logit is anywhere in its
    interval and each score is off by ``tolerance * max(1, |score|)``, the float32 rounding of a score.
    """
    greedy = (temperature <= 0)[:, None]
    scale = torch.where(greedy, 1.0, 1.0 / temperature.double()[:, None])
    num_rows, width = logits.shape
    groups = -(-width // GROUP_SIZE)
    pad = (0, groups * GROUP_SIZE - width)

    group_id = vocab_start // GROUP_SIZE + torch.arange(groups, device=logits.device)
    group_noise = gumbel_ref(seed[:, None], position[:, None], group_id[None], Stream.SAMPLE, Unit.GROUP)

    def group_score(values: torch.Tensor) -> torch.Tensor:
        grouped = torch.nn.functional.pad(values, pad, value=float("-inf")).view(num_rows, groups, GROUP_SIZE)
        sampled = torch.logsumexp(grouped * scale[..., None], -1) + group_noise
        return torch.where(greedy, grouped.amax(-1), sampled)

    group = group_score(logits).argmax(-1)
    near_tie = _overlaps(group_score(low), group_score(high), group, tolerance)

    token = group[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=logits.device)
    inside = token < width
    gather = token.clamp(max=width - 1)
    noise = gumbel_ref(seed[:, None], position[:, None], vocab_start + token, Stream.SAMPLE, Unit.TOKEN)

    def token_score(values: torch.Tensor) -> torch.Tensor:
        picked = values.gather(1, gather) * scale
        return torch.where(inside, torch.where(greedy, picked, picked + noise), float("-inf"))

    pick = token_score(logits).argmax(-1)
    near_tie |= _overlaps(token_score(low), token_score(high), pick, tolerance)
    local = group * GROUP_SIZE + pick

    def logprob(own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (own * scale).gather(1, local[:, None]).squeeze(1) - torch.logsumexp(others * scale, -1)

    return Reference(vocab_start + local, near_tie, logprob(low, high), logprob(high, low))


def _overlaps(low: torch.Tensor, high: torch.Tensor, winner: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Whether some candidate's upper score reaches the winner's lower score. Equal, exact scores do not count:
    the first maximum wins those."""
    floor = low.gather(1, winner[:, None])
    slack = tolerance * floor.abs().clamp(min=1.0)
    exact = (low == high) & (low == floor)
    rival = torch.where(exact, float("-inf"), high).scatter(1, winner[:, None], float("-inf"))
    return (rival >= floor - slack).any(-1)


def reduce_parts_ref(
    score: torch.Tensor,
    group: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
) -> torch.Tensor:
    """``[B]`` tokens from ``[P, B]`` scores and groups and ``[P, B, GROUP_SIZE]`` logits of P parts."""
    best = score.amax(0)
    lowest = torch.where(score == best, group, torch.iinfo(group.dtype).max).amin(0)
    part = ((score == best) & (group == lowest)).int().argmax(0)
    own = logits[part, torch.arange(len(part), device=part.device)].double()
    token = lowest.long()[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=part.device)
    noise = gumbel_ref(seed[:, None], position[:, None], token, Stream.SAMPLE, Unit.TOKEN)
    greedy = (temperature <= 0)[:, None]
    perturbed = torch.where(greedy, own, own / temperature.double()[:, None] + noise)
    perturbed = torch.where(token < vocab_start + vocab_size, perturbed, float("-inf"))
    return token.gather(1, perturbed.argmax(-1, keepdim=True)).squeeze(1)


def lm_head_sample_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    accumulation: float = 2.0**-22,
) -> Reference:
    """``lm_head_sample`` from its definition. ``accumulation`` bounds the error of a float32 dot product, in
    units of ``sum_k |hidden_k weight_k|``."""
    weight = weight[:vocab_size]
    low, logits, high = (
        logits_ref(
            hidden,
            weight,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            perturb=sign * accumulation,
        )
        for sign in (-1, 0, 1)
    )
    return sample_ref(logits, low, high, temperature, seed, position, vocab_start=vocab_start)
