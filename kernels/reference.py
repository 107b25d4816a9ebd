"""The results of the kernels, in float64 PyTorch and from the definitions: no tiles, no fusion, any device.

The truth that tests compare with. Slow and memory-hungry on purpose.
"""

from __future__ import annotations

import dataclasses

import torch

from .gather_rows import NO_MIN_P, NO_TOP_K
from .params import LARGEST_LOGIT, BatchParams
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


def dequantize_ref(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``[V, D]`` float64, the weights that a ``[V, D]`` weight and the ``[V]`` scale of its rows stand for."""
    return weight.double() if scale is None else weight.double() * scale.double()[:, None]


def logits_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    perturb: float = 0.0,
) -> torch.Tensor:
    """``[B, V]`` float64 logits, rounded where the model's GEMM and scaling round.

    scale: ``[V]``, of a quantised weight's rows; logits are then rounded to the dtype of ``hidden`` where
    ``logits_dtype`` is None.
    perturb: added to each dot product, in units of ``sum_k |hidden_k weight_k|``: the room that the order
    of an accumulation has. Rounding can turn it into a step of a whole unit in the last place.
    """
    exact = dequantize_ref(weight, scale)
    logits = hidden.double() @ exact.T
    if perturb:
        logits += perturb * (hidden.double().abs() @ exact.abs().T)
    rounding = hidden.dtype if logits_dtype is None else logits_dtype
    return transform_ref(logits, rounding, logit_scale=logit_scale, softcap=softcap)


def transform_ref(
    logits: torch.Tensor, rounding: torch.dtype, *, logit_scale: float | None = None, softcap: float | None = None
) -> torch.Tensor:
    """``[B, V]`` float64 logits of a model from a GEMM's output: rounded, scaled and rounded again, soft-capped."""
    logits = logits.to(rounding).double()
    if logit_scale is not None:
        logits = (logits * logit_scale).to(rounding).double()
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
    width = logits.shape[1]
    group_noise = group_noise_ref(seed, position, width, vocab_start)

    def group_score(values: torch.Tensor) -> torch.Tensor:
        return group_scores_ref(values, temperature, group_noise)

    group = group_score(logits).argmax(-1)
    near_tie = _overlaps(group_score(low), group_score(high), group, tolerance)

    token = group[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=logits.device)
    inside = token < width
    gather = token.clamp(max=width - 1)
    noise = gumbel_ref(seed[:, None], position[:, None], vocab_start + token, Stream.SAMPLE, Unit.TOKEN)

    peak = torch.where(inside, logits.gather(1, gather), float("-inf")).amax(-1, keepdim=True)
    peak = torch.where(peak > float("-inf"), peak, 0.0)

    def token_score(values: torch.Tensor) -> torch.Tensor:
        picked = (values.gather(1, gather) - peak) * scale
        return torch.where(inside, torch.where(greedy, picked, picked + noise), float("-inf"))

    pick = token_score(logits).argmax(-1)
    near_tie |= _overlaps(token_score(low), token_score(high), pick, tolerance)
    local = group * GROUP_SIZE + pick

    def logprob(of_token: torch.Tensor, of_all: torch.Tensor) -> torch.Tensor:
        return (of_token * scale).gather(1, local[:, None]).squeeze(1) - torch.logsumexp(of_all * scale, -1)

    return Reference(vocab_start + local, near_tie, logprob(low, high), logprob(high, low))


def group_noise_ref(seed: torch.Tensor, position: torch.Tensor, width: int, vocab_start: int) -> torch.Tensor:
    """``[B, G]`` float64, the noise of the groups of ``width`` ids from ``vocab_start`` on."""
    group = vocab_start // GROUP_SIZE + torch.arange(-(-width // GROUP_SIZE), device=seed.device)
    return gumbel_ref(seed[:, None], position[:, None], group[None], Stream.SAMPLE, Unit.GROUP)


def group_scores_ref(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``[B, G]`` float64: perturbed log-masses of the groups of ``[B, V]`` logits, largest logits on greedy rows."""
    num_rows, width = logits.shape
    grouped = torch.nn.functional.pad(logits, (0, -width % GROUP_SIZE), value=float("-inf"))
    grouped = grouped.view(num_rows, -1, GROUP_SIZE)
    greedy = (temperature <= 0)[:, None]
    scale = torch.where(greedy, 1.0, 1.0 / temperature.double()[:, None])
    return torch.where(greedy, grouped.amax(-1), torch.logsumexp(grouped * scale[..., None], -1) + noise)


def _overlaps(low: torch.Tensor, high: torch.Tensor, winner: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Whether some candidate's upper score reaches the winner's lower score. Equal, exact scores do not count:
    the first maximum wins those."""
    floor = low.gather(1, winner[:, None])
    slack = tolerance * floor.abs().clamp(min=1.0)
    exact = (low == high) & (low == floor)
    others = torch.where(exact, float("-inf"), high).scatter(1, winner[:, None], float("-inf"))
    return (others >= floor - slack).any(-1)


def edit_logits_ref(
    logits: torch.Tensor,
    *,
    additive: torch.Tensor | None = None,
    scaling: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """SGLang's penalties, grammar mask (``allowed`` bool) and bias on ``[B, V]`` float32 logits, in its order."""
    logits = logits.float()
    if additive is not None:
        logits = logits + additive
    if scaling is not None:
        logits = torch.where(logits < 0, logits * scaling, logits / scaling)
    possible = logits > float("-inf")  # not where it is NaN
    if allowed is not None:
        possible &= allowed
    if bias is not None:  # the sum with a finite one is finite, however large
        logits, possible = logits + bias, possible & (bias > float("-inf"))
    return torch.where(possible, logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT), float("-inf"))


def allowed_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    slack: float = 0.0,
) -> torch.Tensor:
    """``[B, V]`` bool: the tokens that top-k, top-p and min-p leave, of ``[B, V]`` float64 logits.

    slack: moves the limits of probability by this share of the distribution, to find rows that rounding decides.
    """
    width = logits.shape[1]
    probability = torch.softmax(logits / temperature.double()[:, None], -1)
    value, order = logits.sort(-1, descending=True)
    rank = torch.arange(width, device=logits.device).expand_as(value)
    # Of equal logits the first one's rank and mass count for all: only larger logits are above.
    starts = torch.ones_like(value, dtype=torch.bool)
    starts[:, 1:] = value[:, 1:] < value[:, :-1]
    above = torch.where(starts, rank, 0).cummax(-1).values
    sorted_probability = probability.gather(1, order)
    before = torch.cumsum(sorted_probability, -1) - sorted_probability
    mass_above = before.gather(1, above)
    k = torch.where((top_k >= 1) & (top_k < width), top_k, width)[:, None]
    allowed_by_k = above < k
    p = torch.where(top_p < 1, top_p.double(), 2.0)[:, None]
    sequential = (min_p > 0)[:, None]
    p = torch.where(sequential, p * (sorted_probability * allowed_by_k).sum(-1, keepdim=True), p)
    allowed = allowed_by_k & ((mass_above < p + slack) | (above == 0))
    min_p_limit = value[:, :1] + temperature.double()[:, None] * torch.log(min_p.double().clamp(max=1.0))[:, None]
    tolerance = 4e-7 * value[:, :1].abs().clamp(min=1.0) * (1 if slack > 0 else -1 if slack < 0 else 0)
    allowed &= (value >= min_p_limit - tolerance) | (above == 0)
    return torch.zeros_like(allowed).scatter(1, order, allowed) & (logits > float("-inf"))


def token_scores_ref(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """``[B, V]`` float64: minus the log of each token's waiting time in the race of ``draw_truncated``."""
    num_rows, width = logits.shape
    groups = -(-width // GROUP_SIZE)
    grouped = torch.nn.functional.pad(logits, (0, groups * GROUP_SIZE - width), value=float("-inf"))
    grouped = grouped.view(num_rows, groups, GROUP_SIZE)
    peak = grouped.amax(-1)
    peak = torch.where(peak > float("-inf"), peak, 0.0)
    # Relative to the group's largest logit: float64 has no digits for the noise beside 1e20.
    tempered = (grouped - peak[..., None]) / temperature.double()[:, None, None]
    group = torch.arange(groups, device=logits.device)
    ids = torch.arange(groups * GROUP_SIZE, device=logits.device)
    of_group = gumbel_ref(seed[:, None], position[:, None], group[None], Stream.SAMPLE, Unit.GROUP)
    of_token = gumbel_ref(seed[:, None], position[:, None], ids[None], Stream.SAMPLE, Unit.TOKEN).view_as(tempered)
    group_score = torch.logsumexp(tempered, -1) + of_group
    base = torch.where(group_score > float("-inf"), group_score, 0.0)[..., None]
    token_time = torch.exp(-(tempered + of_token - base))
    time = torch.exp(-(group_score[..., None] - base)) + token_time - token_time.amin(-1, keepdim=True)
    score = (peak / temperature.double()[:, None])[..., None] + (base - torch.log(time))
    return torch.where(tempered > float("-inf"), score, float("-inf")).view(num_rows, -1)[:, :width]


def best_ids_ref(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids with the largest scores of each row of ``[B, V]`` float64 ``logits``, and these: ``[B, number]`` int64
    and float64. The score of a greedy row's id is its logit. Where a row has fewer ids its first one stands again, with
    minus infinity."""
    greedy = (temperature <= 0)[:, None]
    sampled = token_scores_ref(logits, torch.where(temperature > 0, temperature, 1.0), seed, position)
    best, ids = torch.where(greedy, logits, sampled).topk(number)
    return torch.where(best > float("-inf"), ids, ids[:, :1]), best


def truncated_sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    tolerance: float = 4e-6,
) -> Reference:
    """The token of each row of ``[B, V]`` float64 ``logits`` (taken as exact) under a truncation: of the allowed
    tokens, the first in the race.

    A row is a near-tie when another allowed token's score is within ``tolerance * max(1, |score|)``, or when the
    answer depends on whether a limit of probability is 1e-5 higher or lower.
    """
    score = token_scores_ref(logits, temperature, seed, position)

    def first(slack: float) -> tuple[torch.Tensor, torch.Tensor]:
        allowed = allowed_ref(logits, temperature, top_k, top_p, min_p, slack=slack)
        allowed_score = torch.where(allowed, score, float("-inf"))
        best, token = allowed_score.max(-1)
        second = allowed_score.scatter(1, token[:, None], float("-inf")).amax(-1)
        return token, second >= best - tolerance * best.abs().clamp(min=1.0)

    token, near_tie = first(0.0)
    for slack in (-1e-5, 1e-5):
        near_tie |= first(slack)[0] != token
    logprob = torch.log_softmax(logits / temperature.double()[:, None], -1).gather(1, token[:, None]).squeeze(1)
    return Reference(token, near_tie, logprob, logprob)


def quantize_hidden_ref(limbs: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """``[B, D]`` float64, what ``[B, LIMBS, D]`` int8 limbs, each 256 times as fine as the one before, stand for with
    ``[B]`` steps."""
    value = limbs[:, 0].double()
    for limb in range(1, limbs.shape[1]):
        value = 256 * value + limbs[:, limb].double()
    return step.double()[:, None] * value


def error_bound_ref(
    weight: torch.Tensor, copy: torch.Tensor, hidden: torch.Tensor, fixed: torch.Tensor, accumulation: float
) -> torch.Tensor:
    """``[B, V]`` float64: how far <hidden, weight>, summed in float32, may be from <fixed, copy> (Cauchy and Schwarz).

    accumulation: how far that sum may be off per product, as a share of ``|hidden| |weight|``.
    """
    weight, hidden = weight.double(), hidden.double()
    off_weight = torch.linalg.vector_norm(weight - copy, dim=1)
    off_hidden = torch.linalg.vector_norm(hidden - fixed, dim=1)
    sums = accumulation * weight.shape[1] * torch.linalg.vector_norm(weight, dim=1)
    length = torch.linalg.vector_norm(hidden, dim=1)
    return length[:, None] * (off_weight + sums) + off_hidden[:, None] * torch.linalg.vector_norm(copy, dim=1)


def screen_head_ref(
    dots: torch.Tensor,
    bound: torch.Tensor,
    temperature: torch.Tensor,
    noise: torch.Tensor,
    *,
    rounding: torch.dtype,
    logit_scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, G]`` float64, the least and the most that each group's score can be when ``[B, V]`` float64 ``dots`` may be
    off by ``[B, V]`` ``bound``. noise: ``group_noise_ref``."""
    low = transform_ref(dots - bound, rounding, logit_scale=logit_scale, softcap=softcap)
    high = transform_ref(dots + bound, rounding, logit_scale=logit_scale, softcap=softcap)
    return group_scores_ref(low, temperature, noise), group_scores_ref(high, temperature, noise)


def reduce_splits_ref(
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
    """``[B]`` tokens from ``[P, B]`` scores and groups and ``[P, B, GROUP_SIZE]`` logits of P splits."""
    best = score.amax(0)
    lowest = torch.where(score == best, group, torch.iinfo(group.dtype).max).amin(0)
    split = ((score == best) & (group == lowest)).int().argmax(0)
    of_group = logits[split, torch.arange(len(split), device=split.device)].double()
    token = lowest.long()[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=split.device)
    noise = gumbel_ref(seed[:, None], position[:, None], token, Stream.SAMPLE, Unit.TOKEN)
    greedy = (temperature <= 0)[:, None]
    peak = torch.where(token < vocab_start + vocab_size, of_group, float("-inf")).amax(-1, keepdim=True)
    perturbed = torch.where(greedy, of_group, (of_group - peak) / temperature.double()[:, None] + noise)
    perturbed = torch.where(token < vocab_start + vocab_size, perturbed, float("-inf"))
    return token.gather(1, perturbed.argmax(-1, keepdim=True)).squeeze(1)


def merge_records_ref(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token (``[B]`` int64), logprob and log-mass (``[B]`` float64) of the whole vocabulary, of ``[N, B, 5]`` records:
    score, id, logprob and the two parts of the log-mass of each rank's draw."""
    score, token, logprob, high, low = records.double().unbind(-1)
    log_mass = high + low
    winner = (score == score.amax(0)).int().argmax(0)[None]
    total = torch.logsumexp(log_mass, 0)
    of_winner = (logprob + log_mass).gather(0, winner)[0]
    return token.gather(0, winner)[0].long(), of_winner - total, total


def follow_drafts_ref(
    drawn: torch.Tensor, drafts: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor
) -> list[list[int]]:
    """Per row, the nodes on the path of accepted drafts, the root first; all ``[B, D]``."""

    def children(row: int, node: int) -> list[int]:
        nodes, child = [], int(first_child[row, node])
        while child >= 0:
            nodes.append(child)
            child = int(next_sibling[row, child])
        return nodes

    paths = []
    for row in range(drawn.shape[0]):
        path: list[int] = []
        fitting = [0]
        while fitting:
            path.append(fitting[0])
            fitting = [child for child in children(row, path[-1]) if drafts[row, child] == drawn[row, path[-1]]]
        paths.append(path)
    return paths


def gather_rows_ref(
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    nodes: int = 1,
    edits: int = 0,
    drafts: bool = False,
) -> dict[str, torch.Tensor]:
    """The rows of ``gather_rows``, ``[B * nodes]`` each, by the names of ``RowBuffers``."""
    known = (slots >= 0) & (slots < len(table))
    words = table[torch.where(known, slots, 0)].repeat_interleave(nodes, 0)
    temperature, top_p, min_p = (words.view(torch.float32)[:, word] for word in (0, 4, 5))
    top_k = words[:, 1]
    if drafts:  # as SGLang verifies drafts: without min-p, and with top-p of what top-k has left
        in_turn = (top_p != 1) & (top_k > 0) & (top_k < NO_TOP_K)
        min_p = torch.where(in_turn, NO_MIN_P, 0.0)
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": (words[:, 3].long() << 32) | (words[:, 2].long() & _MASK32),
        "position": positions,
        "edits": words[:, 6] & edits,
    }


def log_softmax_ref(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """``[B, V]`` float64 logprobs of ``[B, V]`` logits after their edits: -inf counts for NaN, the largest logit for
    +inf; at least the smallest float32, and NaN in a row of -inf alone. temperature: ``[B]``, 1 where it is 0 or less,
    and when None."""
    logits = _bounded(logits)
    if temperature is not None:
        bounded = (
            temperature.double()
            .nan_to_num(nan=torch.inf)
            .clamp(BatchParams.MIN_TEMPERATURE, BatchParams.MAX_TEMPERATURE)
        )
        # Relative to the largest: a quotient may be beyond what float64 holds exactly.
        largest = logits.amax(-1, keepdim=True)
        logits = (logits - largest) / torch.where(temperature <= 0, 1.0, bounded)[:, None]
    return torch.log_softmax(logits, -1).clamp(min=torch.finfo(torch.float32).min)


def top_logprobs_ref(
    logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None, *, vocab_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (``[B, k]`` int64) and logprobs (``[B, k]`` float64) of the ``k`` largest of ``[B, V]`` logits after their
    edits, of equal ones the smaller ids; V is k or more. temperature: as in ``log_softmax_ref``."""
    ids = _bounded(logits).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return vocab_start + ids, log_softmax_ref(logits, temperature).gather(1, ids)


def gather_logprobs_ref(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None = None, *, vocab_start: int = 0
) -> torch.Tensor:
    """``[B, m]`` float64 logprobs of ``[B, m]`` ids, the smallest float32 for one that ``[B, V]`` logits have no column
    for. temperature: as in ``log_softmax_ref``."""
    columns = ids - vocab_start
    inside = (columns >= 0) & (columns < logits.shape[1])
    found = log_softmax_ref(logits, temperature).gather(1, torch.where(inside, columns, 0))
    return torch.where(inside, found, torch.finfo(torch.float32).min)


def _bounded(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.double()
    return torch.where(logits > -torch.inf, logits.clamp(max=LARGEST_LOGIT), -torch.inf)


def lm_head_sample_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    accumulation: float = 2.0**-22,
) -> Reference:
    """``lm_head_sample`` from its definition. ``accumulation`` bounds the error of a float32 dot product, in
    units of ``sum_k |hidden_k weight_k|``."""
    weight, scale = weight[:vocab_size], None if scale is None else scale[:vocab_size]
    low, logits, high = (
        logits_ref(
            hidden,
            weight,
            scale=scale,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            perturb=sign * accumulation,
        )
        for sign in (-1, 0, 1)
    )
    return sample_ref(logits, low, high, temperature, seed, position, vocab_start=vocab_start)
