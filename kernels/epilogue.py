"""From a tile of raw logits to what leaves the chip: scores of its groups, and the best of a split. Device functions.

Every path that sees logits in tiles calls these, so that all of them draw the same token from the same logits. Blocks
are ``[BLOCK_V, BLOCK_B]``: vocabulary ids down, rows of the batch across.

A split keeps its best group per group slot of the tile, ``[NUM_GROUPS, BLOCK_B]``, in registers: no tile needs a
reduction across warps, only the end of the program does. A plain row leaves one group per split. A truncated row leaves
several (``num_top_groups``): a forbidden token is followed by the next, and two of the first groups are rarely in the
same class of slots of the same split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import rng
from .intrinsics import LN_2, LOG2_E, clamp01, log2, mul_rn, reciprocal, round_to_bf16
from .params import PER_ROW, REPEATS_SHIFT, Edit
from .workspace import MAX_TOP_GROUPS

# Bound of a logit, so that logit / temperature stays finite.
LIMIT = tl.constexpr(2.0**100)
# Of a group that has a token: its peak weighs 1, but where it is so large that its rounding is a power of its own.
MIN_MASS = tl.constexpr(0.5)
# Groups per row that all splits together leave behind, about: enough that the first dozens are among them.
_TOP_GROUPS_OF_ALL_SPLITS = 1536
_ADDITIVE = tl.constexpr(int(Edit.ADDITIVE))
_SCALING = tl.constexpr(int(Edit.SCALING))
_MASK = tl.constexpr(int(Edit.MASK))
_BIAS = tl.constexpr(int(Edit.BIAS))
_PER_ROW = tl.constexpr(PER_ROW)
_SHIFT = tl.constexpr(REPEATS_SHIFT)


@triton.jit
def transform_logits(
    acc,  # hidden @ weight.T: [BLOCK_V, BLOCK_B] f32, or any block of a GEMM's output
    logit_scale,  # or None
    softcap,  # or None
    LOGITS_DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr = False,  # bfloat16 by ``round_to_bf16``
):
    """The model's logits, as float32: rounded like its GEMM output, scaled, soft-capped.

    Rounding matters: a bf16 model's logits have many exact ties, and another rounding is another
    distribution than the one its logits define.
    """
    if IN_PAIRS and LOGITS_DTYPE.is_bf16():
        logits = round_to_bf16(acc)
    else:
        logits = acc.to(LOGITS_DTYPE).to(tl.float32)
    if logit_scale is not None:
        logits = (logits * logit_scale).to(LOGITS_DTYPE).to(tl.float32)
    if softcap is not None:
        logits = soft_cap(logits, softcap)
    return logits


@triton.jit
def soft_cap(logits, softcap):
    # tanh(x) = 1 - 2 / (e^2x + 1): saturates cleanly at both ends, no libdevice.
    return softcap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / softcap)) + 1.0))


@triton.jit
def bound_logits(logits, valid):
    """Logits in (-LIMIT, LIMIT], or -inf: what is not valid, not above -LIMIT, or NaN."""
    return tl.where(valid & (logits > -LIMIT), tl.minimum(logits, LIMIT), float("-inf"))


@triton.jit
def load_edit_flags(edits, given_edits, offs_b, mask_b):
    """``[BLOCK_B]`` int32: the ``Edit`` flags of each row, and above ``_SHIFT`` the row of the edits that it takes.
    given_edits: of ``FeatureOperands``."""
    flags = tl.zeros(offs_b.shape, tl.int32)
    if edits is not None:
        flags += given_edits & (_PER_ROW - 1)
        flags &= tl.load(edits.rows + offs_b, mask=mask_b & ((given_edits & _PER_ROW) != 0), other=-1)
        flags |= (offs_b // (given_edits >> _SHIFT)) << _SHIFT
    return flags


@triton.jit
def edit_logits(
    logits,  # [BLOCK_V, BLOCK_B] f32
    valid,  # [BLOCK_V, BLOCK_B] bool
    rows,  # [BLOCK_B] i32, rows of the batch, and of the mask
    columns,  # [BLOCK_V, 1] or [BLOCK_V, BLOCK_B] i32, absolute vocabulary ids
    flags,  # [BLOCK_B] i32, of load_edit_flags
    edits,  # EditOperands
):
    """SGLang's changes to the logits, in its order: penalties, grammar mask, bias. A row reads only what its own flags
    ask for."""
    edit_rows = (flags >> _SHIFT)[None, :]
    read = valid & ((flags & _ADDITIVE) != 0)[None, :]
    logits += tl.load(edits.additive + edit_rows * edits.additive_stride + columns, mask=read, other=0.0)
    read = valid & ((flags & _SCALING) != 0)[None, :]
    scale = tl.load(edits.scaling + edit_rows * edits.scaling_stride + columns, mask=read, other=1.0)
    logits = tl.where(logits < 0, logits * scale, tl.div_rn(logits, scale))
    read = valid & ((flags & _MASK) != 0)[None, :]
    if edits.mask.dtype.element_ty == tl.int1:
        forbidden = tl.load(edits.mask + rows[None, :] * edits.mask_stride + columns, mask=read, other=0) != 0
    else:
        read &= columns < edits.mask_words * 32
        word = tl.load(edits.mask + rows[None, :] * edits.mask_stride + columns // 32, mask=read, other=-1)
        forbidden = ((word >> (columns % 32)) & 1) == 0
    logits = tl.where(forbidden, float("-inf"), logits)
    read = valid & ((flags & _BIAS) != 0)[None, :]
    logits += tl.load(edits.bias + edit_rows * edits.bias_stride + columns, mask=read, other=0.0)
    return bound_logits(logits, True)


@triton.jit
def rows_truncated(truncation, rows, mask, vocab_size):
    """Which rows restrict what may be drawn: bool, of the shape of ``rows``."""
    top_k = tl.load(truncation.top_k + rows, mask=mask, other=0)
    top_p = tl.load(truncation.top_p + rows, mask=mask, other=1.0)
    min_p = tl.load(truncation.min_p + rows, mask=mask, other=0.0)
    return ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def score_groups(
    logits,  # [NUM_GROUPS, GROUP_SIZE, BLOCK_B] f32
    valid,  # [NUM_GROUPS] bool, false beyond the vocabulary
    inv_temperature,  # [BLOCK_B] f32, 1 on greedy rows
    greedy,  # [BLOCK_B] bool
    seed,  # [NUM_GROUPS, BLOCK_B] i64
    position,  # [NUM_GROUPS, BLOCK_B] i64
    group,  # [NUM_GROUPS] i32, absolute group ids
):
    """Perturbed log-mass of each group (its maximum on greedy rows), its log-mass, and its largest logit.

    Returns ``score, log_mass, peak``, each ``[NUM_GROUPS, BLOCK_B]`` float32, the first two at temperature; a group
    without a token has -inf. Logits count as ``bound_logits`` would have them: that takes one instruction per logit
    here, and the rest per group.
    """
    peak = tl.max(logits, axis=1)
    has_token = valid[:, None] & (peak > -LIMIT)
    peak = tl.minimum(peak, LIMIT)
    rate = inv_temperature * LOG2_E
    base = mul_rn(tl.where(has_token, peak, 0.0), rate[None, :])
    weights = clamp01(tl.exp2(tl.fma(logits, rate[None, None, :], -base[:, None, :])))
    mass = tl.maximum(tl.sum(weights, axis=1), MIN_MASS)
    exponential = rng.exponential(seed, position, group[:, None], rng.SAMPLE, rng.GROUP)
    # log(mass) - log(exponential) as one logarithm, in the layout of the noise: eight times less work than in that
    # of the sums, which every lane of a group holds. The log-mass is taken back from it for the same reason.
    perturbation = log2(mass * reciprocal(exponential))
    score = tl.where(greedy[None, :], peak, (base + perturbation) * LN_2)
    log_mass = (base + (perturbation + log2(exponential))) * LN_2
    none = float("-inf")
    return tl.where(has_token, score, none), tl.where(has_token, log_mass, none), tl.where(has_token, peak, none)


class SplitState(NamedTuple):
    """What a split has seen so far, per group slot of its tiles: ``[NUM_GROUPS, BLOCK_B]`` each."""

    score: Any  # f32, of the best group
    tile: Any  # i32, its tile
    second: Any  # f32, score of the second-best group
    lse_max: Any  # f32, the largest log-mass of a group
    lse_sum: Any  # f32, the exp-sum of all of them relative to that


@triton.jit
def start_split(first_tile, NUM_GROUPS: tl.constexpr, BLOCK_B: tl.constexpr):
    """A ``SplitState`` without any group; its tile is the split's first."""
    none = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    tile = tl.full([NUM_GROUPS, BLOCK_B], 0, tl.int32) + first_tile
    return SplitState(none, tile, none, none, tl.zeros([NUM_GROUPS, BLOCK_B], tl.float32))


@triton.jit
def add_tile(state, tile, score, log_mass, KEEP_SECOND: tl.constexpr, KEEP_MASS: tl.constexpr):
    """The state with the groups of one more tile, and where these are the new best."""
    second, lse_max, lse_sum = state.second, state.lse_max, state.lse_sum
    if KEEP_SECOND:
        second = tl.maximum(second, tl.minimum(score, state.score))
    better = score > state.score  # strict, and tiles ascend: the first maximum wins a tie
    if KEEP_MASS:
        lse_max = tl.maximum(state.lse_max, log_mass)
        shift = tl.where(lse_max == float("-inf"), 0.0, lse_max)
        lse_sum = state.lse_sum * tl.exp(state.lse_max - shift) + tl.exp(log_mass - shift)
    score = tl.where(better, score, state.score)
    return SplitState(score, tl.where(better, tile, state.tile), second, lse_max, lse_sum), better


def num_top_groups(truncated: bool, block_v: int, max_splits: int) -> int:
    """How many groups a split leaves behind per row, a power of two."""
    if not truncated:
        return 1
    wanted = max(1, min(MAX_TOP_GROUPS, block_v // rng.GROUP_SIZE, _TOP_GROUPS_OF_ALL_SPLITS // max_splits))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def best_of_slots(score, group, TOP_GROUPS: tl.constexpr):
    """Of each of ``TOP_GROUPS`` classes of slots, score and absolute id of the best group per row (the lowest of equal
    ones), ``[TOP_GROUPS, BLOCK_B]``; and which slots hold them, ``[NUM_GROUPS // TOP_GROUPS, TOP_GROUPS, BLOCK_B]``.
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
        lse_max = tl.reshape(state.lse_max, shape)
        top_max = tl.max(lse_max, axis=0)
        shift = tl.where(top_max == float("-inf"), 0.0, top_max)
        top_sum = tl.sum(tl.reshape(state.lse_sum, shape) * tl.exp(lse_max - shift[None, :, :]), axis=0)
        tl.store(splits.log_mass + out * 2, top_max, mask=mask)
        tl.store(splits.log_mass + out * 2 + 1, top_sum, mask=mask)


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
