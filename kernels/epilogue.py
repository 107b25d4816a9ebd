"""From a tile of raw logits to what leaves the chip: scores of its groups, and the best of a split. Device functions.

Every path that sees logits in tiles calls these, so that all of them draw the same token from the same logits. Blocks
are ``[BLOCK_V, BLOCK_B]``: vocabulary ids down, rows of the batch across.

A tile has ``NUM_GROUPS`` slots, one per group of 16 ids. A split keeps the best group that it has seen in each slot,
``[NUM_GROUPS, BLOCK_B]``, in registers: no tile needs a reduction across warps, only the end of the program does. A
plain row leaves the best of its slots per split. A truncated row needs more, because a forbidden token is followed by
the next best: its slots are dealt into ``num_top_groups`` classes, and the best of each class is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import rng
from .intrinsics import LN_2, LOG2_E, drop_nan, log2, mul_rn, reciprocal, round_to_bf16
from .params import LARGEST_LOGIT, NARROW_CAP, PER_ROW, REPEATS_SHIFT, BatchParams, Edit, MaskOperands
from .workspace import MAX_TOP_GROUPS

LIMIT = tl.constexpr(LARGEST_LOGIT)
# A score in bits whose size is above this has no digits for the noise, and the product it comes from may be infinite.
HUGE_SCORE = tl.constexpr(2.0**126)
_COLDEST = tl.constexpr(BatchParams.MIN_TEMPERATURE)
_HOTTEST = tl.constexpr(BatchParams.MAX_TEMPERATURE)
_NARROW_CAP = tl.constexpr(NARROW_CAP)
_TANH_UP_TO = tl.constexpr(0.25)  # a share of the cap: the series of tanh to y^9 leaves 1e-8 of it
# Groups per row that all splits together leave behind, about: enough that the first dozens are among them.
_TOP_GROUPS_OF_ALL_SPLITS = 1536
_ADDITIVE = tl.constexpr(int(Edit.ADDITIVE))
_SCALING = tl.constexpr(int(Edit.SCALING))
_MASK = tl.constexpr(int(Edit.MASK))
_BIAS = tl.constexpr(int(Edit.BIAS))
_PER_ROW = tl.constexpr(PER_ROW)
_SHIFT = tl.constexpr(REPEATS_SHIFT)
_MASK_OPERANDS = tl.constexpr(len(MaskOperands._fields))


@triton.jit
def transform_logits(
    acc,  # hidden @ weight.T: [BLOCK_V, BLOCK_B] f32, or any block of a GEMM's output
    logit_scale,  # or None
    softcap,  # FeatureOperands.softcap, or None
    LOGITS_DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr = False,  # bfloat16 by ``round_to_bf16``
    DROP_NAN: tl.constexpr = False,
):
    """The model's logits, as float32: rounded like its GEMM output, scaled, soft-capped. DROP_NAN: -inf for NaN.

    Rounding matters: a bf16 model's logits have many exact ties, and another rounding is another
    distribution than the one its logits define.
    """
    if IN_PAIRS and LOGITS_DTYPE.is_bf16():
        rounded = round_to_bf16(acc)
    else:
        rounded = acc.to(LOGITS_DTYPE)
    if DROP_NAN and logit_scale is None and softcap is None:
        rounded = drop_nan(rounded)
    logits = rounded.to(tl.float32)
    if logit_scale is not None:
        logits = (logits * logit_scale).to(LOGITS_DTYPE).to(tl.float32)
    if softcap is not None:
        logits = soft_cap(logits, softcap)
    if DROP_NAN and not (logit_scale is None and softcap is None):
        logits = drop_nan(logits)
    return logits


@triton.jit
def soft_cap(logits, softcap):
    """``cap * tanh(logits / cap)``, without libdevice. softcap: ``FeatureOperands.softcap``."""
    cap = softcap[0]
    # tanh(y) = 1 - 2 / (e^2y + 1) saturates cleanly at both ends. Its error is a share of the cap.
    capped = cap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / cap)) + 1.0))
    if len(softcap) == 2:
        share = logits * softcap[1]
        square = share * share
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * 62.0 / 2835.0)))
        capped = tl.where(square < _TANH_UP_TO * _TANH_UP_TO, logits * series, capped)
    return capped


@triton.jit
def cap_slack(capped, softcap):
    """The largest distance by which ``soft_cap`` puts a larger logit below ``capped``, or a smaller one above it: its
    quotient and its series have numbers up to 2, each rounded a few times."""
    return tl.minimum(softcap[0], tl.maximum(4.0 * tl.abs(capped), _NARROW_CAP)) * 2.0**-20


@triton.jit
def bound_logits(logits, valid):
    """Logits up to LIMIT; -inf where one is not valid. None is NaN."""
    return tl.where(valid, tl.minimum(logits, LIMIT), float("-inf"))


@triton.jit
def pack_bf16(logits):
    """``[N, GROUP_SIZE, B]`` float32 that bfloat16 holds, as ``[N, GROUP_SIZE // 2, B]`` int32, two in each."""
    bits = logits.to(tl.int32, bitcast=True)
    # Ids i and i + 8 of a group: a tensor-core product leaves both with one thread.
    halves = tl.reshape(bits, [bits.shape[0], 2, bits.shape[1] // 2, bits.shape[2]])
    low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def unpack_bf16(words):
    """The logits that ``pack_bf16`` has packed."""
    low = (words << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    logits = tl.permute(tl.join(low, high), (0, 3, 1, 2))
    return tl.reshape(logits, [words.shape[0], 2 * words.shape[1], words.shape[2]])


@triton.jit
def invert_temperature(temperature):
    """A flag per temperature, true where it is greedy, and the reciprocals: 1 where it is greedy, else that of the
    nearest number in [MIN_TEMPERATURE, MAX_TEMPERATURE]; NaN counts as the largest."""
    greedy = temperature <= 0.0
    bounded = tl.where(temperature < _HOTTEST, tl.maximum(temperature, _COLDEST), _HOTTEST)
    return greedy, tl.div_rn(1.0, tl.where(greedy, 1.0, bounded))


class RowEdits(NamedTuple):
    """The edits of a program's rows. flags: ``[BLOCK_B]`` i32, the ``Edit`` flags of each row, and above ``_SHIFT`` the
    row of the edits that it takes. The others are pointers, which nothing reads where a mask is the only edit."""

    flags: Any
    mask: Any
    additive: Any
    scaling: Any
    bias: Any


@triton.jit
def find_edits(edits, given_edits, offs_b, mask_b):
    """The ``RowEdits`` of these rows; rows outside ``mask_b`` have no flag. None without edits. given_edits:
    ``FeatureOperands.given_edits``. Once per program: no tile waits for an address."""
    if edits is None:
        found = None
    else:
        every = tl.where(mask_b, -1, 0)
        flags = tl.zeros(offs_b.shape, tl.int32) + (given_edits & (_PER_ROW - 1))
        flags &= tl.load(edits.rows + offs_b, mask=mask_b & ((given_edits & _PER_ROW) != 0), other=every)
        flags |= (offs_b // (given_edits >> _SHIFT)) << _SHIFT
        mask = _place(edits.mask, edits.places, 2)
        if len(edits) == _MASK_OPERANDS:
            found = RowEdits(flags, mask, mask, mask, mask)  # Triton 3.6 returns no None in a tuple
        else:
            found = RowEdits(
                flags,
                mask,
                _place(edits.additive, edits.places, 0),
                _place(edits.scaling, edits.places, 1),
                _place(edits.bias, edits.places, 3),
            )
    return found


@triton.jit
def _place(given, places, which: tl.constexpr):
    """``given``, a pointer, or in its place the address that ``places`` has, which is not 0."""
    address = tl.load(places + which)
    address = tl.where(address == 0, given.to(tl.int64), address)
    return tl.multiple_of(address.to(given.dtype), 16)


@triton.jit
def _read(pointer, edit_stride, columns, valid, found, FLAG: tl.constexpr, other: tl.constexpr):
    """An edit of ``[B, V]`` float32: its values of these columns in rows with the flag, ``other`` elsewhere."""
    read = valid & ((found.flags & FLAG) != 0)[None, :]
    return tl.load(pointer + (found.flags >> _SHIFT)[None, :] * edit_stride + columns, mask=read, other=other)


@triton.jit
def _scaled(logits, scale):
    # With 0 added, the product is rounded before a bias is added, in every kernel.
    return tl.where(logits < 0, tl.fma(logits, scale, 0.0), tl.div_rn(logits, scale))


@triton.jit
def _masked(logits, allowed):
    return tl.where(allowed, logits, float("-inf"))


@triton.jit
def _biased(logits, bias):
    """The sum with a finite bias is finite, however large: it forbids nothing."""
    possible = (logits > float("-inf")) & (bias > float("-inf"))
    return tl.where(possible, _within_limits(logits + bias), float("-inf"))


@triton.jit
def _unbiased(logits):
    return tl.where(logits > float("-inf"), _within_limits(logits + 0.0), float("-inf"))  # 0 in the place of -0


@triton.jit
def _within_limits(logits):
    return tl.minimum(tl.maximum(logits, -LIMIT), LIMIT)


@triton.jit
def _allowed(valid, rows, columns, found, edits, groups):
    """The ids that the mask allows: bool, ``[BLOCK_V, BLOCK_B]``. Arguments as in ``edit_logits``."""
    masked = ((found.flags & _MASK) != 0)[None, :]
    if edits.mask.dtype.element_ty == tl.int1:
        forbidden = tl.load(found.mask + rows[None, :] * edits.mask_stride + columns, mask=valid & masked, other=0)
        allowed = forbidden == 0
    else:
        if groups is None:
            read = valid & masked & (columns < edits.mask_words * 32)
            word = tl.load(found.mask + rows[None, :] * edits.mask_stride + columns // 32, mask=read, other=-1)
        else:
            place = groups[:, None] // (32 // rng.GROUP_SIZE)
            read = (place < edits.mask_words) & masked
            word = tl.load(found.mask + rows[None, :] * edits.mask_stride + place, mask=read, other=-1)
            word = tl.broadcast_to(word[:, None, :], [groups.shape[0], rng.GROUP_SIZE, rows.shape[0]])
            word = tl.reshape(word, [groups.shape[0] * rng.GROUP_SIZE, rows.shape[0]])
        allowed = ((word >> (columns % 32)) & 1) != 0
    return allowed


@triton.jit
def edit_logits(
    logits,  # [BLOCK_V, BLOCK_B] f32
    valid,  # [BLOCK_V, BLOCK_B] bool
    rows,  # [BLOCK_B] i32, rows of the batch, and of the mask
    columns,  # [BLOCK_V, 1] or [BLOCK_V, BLOCK_B] i32, absolute vocabulary ids
    found,  # RowEdits
    edits,  # EditOperands or MaskOperands
    groups=None,  # [BLOCK_V // GROUP_SIZE] i32, absolute group ids, where columns are all ids of these groups
):
    """SGLang's changes to the logits, in its order: penalties, grammar mask, bias. A row reads only what its own flags
    ask for. With ``groups``, each word of the mask is loaded once per group.

    The mask forbids ids, and so does a logit, a penalty or a bias that is -inf or no number. A finite bias does not,
    however far down the sum is.
    """
    ONLY_MASK: tl.constexpr = len(edits) == _MASK_OPERANDS
    if ONLY_MASK:
        logits = _unbiased(_masked(logits, _allowed(valid, rows, columns, found, edits, groups)))
    else:
        # No branch around an edit that is not given: the compiler would bring each load to the layout of the product,
        # where now the logits are brought, once, to that of the loads.
        logits += _read(found.additive, edits.additive_stride, columns, valid, found, _ADDITIVE, 0.0)
        logits = _scaled(logits, _read(found.scaling, edits.scaling_stride, columns, valid, found, _SCALING, 1.0))
        logits = _masked(logits, _allowed(valid, rows, columns, found, edits, groups))
        logits = _biased(logits, _read(found.bias, edits.bias_stride, columns, valid, found, _BIAS, 0.0))
    return logits


@triton.jit
def edit_bounds(low, high, valid, rows, columns, found, edits, groups):
    """``edit_logits`` of two bounds of each logit, with one load of each edit."""
    ONLY_MASK: tl.constexpr = len(edits) == _MASK_OPERANDS
    if ONLY_MASK:
        allowed = _allowed(valid, rows, columns, found, edits, groups)
        low, high = _unbiased(_masked(low, allowed)), _unbiased(_masked(high, allowed))
    else:
        additive = _read(found.additive, edits.additive_stride, columns, valid, found, _ADDITIVE, 0.0)
        low += additive
        high += additive
        scale = _read(found.scaling, edits.scaling_stride, columns, valid, found, _SCALING, 1.0)
        low, high = _scaled(low, scale), _scaled(high, scale)
        allowed = _allowed(valid, rows, columns, found, edits, groups)
        low, high = _masked(low, allowed), _masked(high, allowed)
        bias = _read(found.bias, edits.bias_stride, columns, valid, found, _BIAS, 0.0)
        low, high = _biased(low, bias), _biased(high, bias)
    return low, high


@triton.jit
def rows_truncated(truncation, rows, mask, vocab_size):
    """A flag per row, true where it has a top-k, a top-p or a min-p that is on: bool, of the shape of ``rows``."""
    top_k = tl.load(truncation.top_k + rows, mask=mask, other=0)
    top_p = tl.load(truncation.top_p + rows, mask=mask, other=1.0)
    min_p = tl.load(truncation.min_p + rows, mask=mask, other=0.0)
    return ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def perturb(peak, mass, rate, exponential):
    """Perturbed log-masses of groups, absolute and relative to ``peak / temperature``: blocks that broadcast.

    peak: the largest logit. mass: the exp-sum relative to it. rate: ``log2(e) / temperature``. Where their product may
    be more than a float32 holds, scores have the order of the logits.
    """
    # log(mass) - log(exponential) as one logarithm, in the layout of the noise: an eighth of the work that it takes in
    # the layout of the sums, where every lane of a group has them.
    relative = log2(mass * reciprocal(exponential))
    base = mul_rn(peak, rate)
    score = base + (relative + tl.fma(peak, rate, -base))  # with what the product's rounding has taken
    huge = tl.where(peak > 0.0, HUGE_SCORE, -HUGE_SCORE) + peak * (HUGE_SCORE / LIMIT)
    return tl.where(tl.abs(base) > HUGE_SCORE, huge, score) * LN_2, relative * LN_2


@triton.jit
def score_groups(
    logits,  # [NUM_GROUPS, GROUP_SIZE, BLOCK_B] f32
    valid,  # [NUM_GROUPS] bool, false beyond the vocabulary
    inv_temperature,  # [BLOCK_B] f32, 1 on greedy rows
    greedy,  # [BLOCK_B] bool
    seed,  # [NUM_GROUPS, BLOCK_B] i64
    position,  # [NUM_GROUPS, BLOCK_B] i64
    group,  # [NUM_GROUPS] i32, absolute group ids
    noise=None,  # [NUM_GROUPS, BLOCK_B] f32, rng.exponential of these, where it is at hand
):
    """Perturbed log-mass of each group (its maximum on greedy rows), its mass, and its largest logit.

    Returns ``score, mass, peak``, each ``[NUM_GROUPS, BLOCK_B]`` float32. score: at temperature, -inf of a group
    without a token, as peak. mass: the exp-sum of the logits at temperature, relative to ``peak``, finite where no
    logit is +inf. No logit is NaN. Scores count logits as ``bound_logits`` would have them.
    """
    peak = tl.max(logits, axis=1)
    has_token = valid[:, None] & (peak > float("-inf"))
    peak = tl.minimum(peak, LIMIT)
    rate = inv_temperature * LOG2_E
    # Relative to the largest logit before the temperature: a product of each would be rounded at its own size.
    mass = tl.sum(tl.exp2((logits - peak[:, None, :]) * rate[None, None, :]), axis=1)
    if noise is None:
        noise = rng.exponential(seed, position, group[:, None], rng.SAMPLE, rng.GROUP)
    score, _ = perturb(peak, mass, rate[None, :], noise)
    score = tl.where(greedy[None, :], peak, score)
    # Without a token the largest logit is -inf, and what is relative to it no number.
    none = float("-inf")
    return tl.where(has_token, score, none), tl.where(has_token, mass, 0.0), tl.where(has_token, peak, none)


class SplitState(NamedTuple):
    """The best groups and the mass that a split has seen so far, per group slot of its tiles: ``[NUM_GROUPS, BLOCK_B]``
    each."""

    score: Any  # f32, of the best group
    tile: Any  # i32, its tile
    second: Any  # f32, score of the second-best group
    peak: Any  # f32, the largest logit
    mass: Any  # f32, the exp-sum of all logits at temperature, relative to that


@triton.jit
def start_split(first_tile, NUM_GROUPS: tl.constexpr, BLOCK_B: tl.constexpr):
    """A ``SplitState`` without any group; its tile is the split's first."""
    none = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    tile = tl.full([NUM_GROUPS, BLOCK_B], 0, tl.int32) + first_tile
    return SplitState(none, tile, none, none, tl.zeros([NUM_GROUPS, BLOCK_B], tl.float32))


@triton.jit
def relative_weight(logits, reference, inv_temperature):
    """The weights of logits at temperature, relative to the logit ``reference``: 0 where a logit is -inf; ``reference``
    may be -inf then."""
    shift = tl.where(reference == float("-inf"), 0.0, reference)
    return tl.exp2((logits - shift) * (inv_temperature * LOG2_E))


@triton.jit
def relative_mass(mass, peak, reference, inv_temperature):
    """A mass relative to the logit ``peak`` as one relative to ``reference``, as ``relative_weight`` has it.

    The product is rounded: as part of a fused multiply-add of a reduction, it would give each thread another sum, and
    threads that branch by it would part.
    """
    return mul_rn(mass, relative_weight(peak, reference, inv_temperature))


@triton.jit
def add_tile(state, tile, score, mass, peak, inv_temperature, KEEP_SECOND: tl.constexpr, KEEP_MASS: tl.constexpr):
    """The state with the groups of one more tile, and where these are the new best."""
    second, largest, total = state.second, state.peak, state.mass
    if KEEP_SECOND:
        second = tl.maximum(second, tl.minimum(score, state.score))
    better = score > state.score  # strict, and tiles ascend: the first maximum wins a tie
    if KEEP_MASS:
        # Every lane with ids of a group holds its peak and its mass, but one lane holds its score. A mask that is made
        # of the score takes both into the layout of the score: a fraction of the registers.
        peak = tl.where(score > float("-inf"), peak, float("-inf"))
        mass = tl.where(score > float("-inf"), mass, 0.0)
        largest = tl.maximum(state.peak, peak)
        total = relative_mass(state.mass, state.peak, largest, inv_temperature[None, :])
        total += relative_mass(mass, peak, largest, inv_temperature[None, :])
    score = tl.where(better, score, state.score)
    return SplitState(score, tl.where(better, tile, state.tile), second, largest, total), better


def num_top_groups(truncated: bool, block_v: int, max_splits: int) -> int:
    """The number of groups that a split leaves behind per row, a power of two."""
    if not truncated:
        return 1
    wanted = max(1, min(MAX_TOP_GROUPS, block_v // rng.GROUP_SIZE, _TOP_GROUPS_OF_ALL_SPLITS // max_splits))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def best_of_slots(score, group, TOP_GROUPS: tl.constexpr):
    """The best group per row in each of ``TOP_GROUPS`` classes of slots (of equal scores the lowest id): scores and
    absolute ids, ``[TOP_GROUPS, BLOCK_B]``, and the slots that hold these groups, as flags
    ``[NUM_GROUPS // TOP_GROUPS, TOP_GROUPS, BLOCK_B]``.
    """
    scores = tl.reshape(score, [score.shape[0] // TOP_GROUPS, TOP_GROUPS, score.shape[1]])
    groups = tl.reshape(group, [score.shape[0] // TOP_GROUPS, TOP_GROUPS, score.shape[1]])
    top_score = tl.max(scores, axis=0)
    tied = scores == top_score[None, :, :]
    top_group = tl.min(tl.where(tied, groups, rng.NO_GROUP), axis=0)
    return top_score, top_group, tied & (groups == top_group[None, :, :])


@triton.jit
def store_split(
    splits,  # SplitOperands
    split,
    num_rows,
    offs_b,
    mask_b,
    state,  # SplitState
    top_score,  # [TOP_GROUPS, BLOCK_B] f32
    top_group,  # [TOP_GROUPS, BLOCK_B] i32
    top_logits,  # [TOP_GROUPS, GROUP_SIZE, BLOCK_B] f32
    chosen,  # [NUM_GROUPS // TOP_GROUPS, TOP_GROUPS, BLOCK_B] bool: the slots that these are from
    inv_temperature,  # [BLOCK_B] f32
    KEEP_SECOND: tl.constexpr,
    KEEP_MASS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Leave the split's best groups to the launch that draws."""
    shape: tl.constexpr = [state.score.shape[0] // TOP_GROUPS, TOP_GROUPS, state.score.shape[1]]
    out = (split * TOP_GROUPS + tl.arange(0, TOP_GROUPS))[:, None] * num_rows + offs_b[None, :]
    mask = (out >= 0) & mask_b[None, :]
    tl.store(splits.score + out, top_score, mask=mask)
    tl.store(splits.group + out, top_group, mask=mask)
    logits_offs = out[:, None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :, None]
    tl.store(splits.logits + logits_offs, top_logits, mask=mask[:, None, :])
    if KEEP_SECOND:  # a truncated row's next token may be in a second-best group
        others = tl.where(chosen, float("-inf"), tl.reshape(state.score, shape))
        second = tl.max(tl.maximum(others, tl.reshape(state.second, shape)), axis=0)
        tl.store(splits.second + out, second, mask=mask)
    if KEEP_MASS:
        peak = tl.reshape(state.peak, shape)
        largest = tl.max(peak, axis=0)
        parts = relative_mass(tl.reshape(state.mass, shape), peak, largest[None, :, :], inv_temperature[None, None, :])
        tl.store(splits.mass + out * 2, largest, mask=mask)
        tl.store(splits.mass + out * 2 + 1, tl.sum(parts, axis=0), mask=mask)


@triton.jit
def flags_as_bits(flags, BLOCK_B: tl.constexpr):
    """``[BLOCK_B]`` bool, the same flags: from the bits of two scalars.

    A block would be loaded and computed anew for every layout that asks for it, in each tile.
    """
    slot = tl.arange(0, BLOCK_B)
    bits = flags.to(tl.int64) << (slot & 63)
    low = tl.sum(tl.where(slot < 64, bits, 0))
    high = tl.sum(tl.where(slot < 64, 0, bits))
    return ((tl.where(slot < 64, low, high) >> (slot & 63)) & 1) != 0


@triton.jit
def store_group_max(buffer, peak, first_group, rows, keep, num_groups):
    """The largest logit of each group of the tile, ``[NUM_GROUPS, BLOCK_B]``, of truncated rows."""
    groups = first_group + tl.arange(0, peak.shape[0])
    mask = (groups < num_groups)[:, None] & keep[None, :]
    tl.store(buffer.group_max + rows[None, :] * num_groups + groups[:, None], peak, mask=mask)
