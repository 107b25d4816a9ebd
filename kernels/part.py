"""What a program that walks vocabulary tiles leaves behind of its part of them. Device functions only.

The best is kept per group slot of the tile, ``[NUM_GROUPS, BLOCK_B]``, in registers: no tile needs a reduction across
warps, only the end of the program does. For plain rows that leaves one group; for rows with a truncation several
(``left_of``), because a token that is not allowed is followed by the next, and two of the first groups of the race are
rarely in the same class of slots of the same part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .head import MOST_LEFT

# Groups per row that all parts together leave behind, about: enough that the first dozens are among them.
_LEFT_OF_ALL = 1536


def left_of(truncates: bool, block_v: int, most_parts: int) -> int:
    """How many groups a part leaves behind per row, a power of two."""
    if not truncates:
        return 1
    wanted = max(1, min(MOST_LEFT, block_v // rng.GROUP_SIZE, _LEFT_OF_ALL // most_parts))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def add_log_mass(log_mass, peak, mass):
    """Running ``peak + log(mass)`` of each slot with one more group: the largest log-mass, and the exp-sum relative
    to it."""
    new_peak = tl.maximum(peak, log_mass)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, mass * tl.exp(peak - shift) + tl.exp(log_mass - shift)


@triton.jit
def best_of_slots(best_score, best_group, LEFT: tl.constexpr):
    """Of each of ``LEFT`` classes of slots, score and absolute id of the best group per row (the lowest of equal ones),
    ``[LEFT, BLOCK_B]``; and which slots hold them, ``[NUM_GROUPS // LEFT, LEFT, BLOCK_B]``."""
    score = tl.reshape(best_score, [best_score.shape[0] // LEFT, LEFT, best_score.shape[1]])
    group = tl.reshape(best_group, [best_score.shape[0] // LEFT, LEFT, best_score.shape[1]])
    part_score = tl.max(score, axis=0)
    tied = score == part_score[None, :, :]
    part_group = tl.min(tl.where(tied, group, rng.NO_GROUP), axis=0)
    return part_score, part_group, tied & (group == part_group[None, :, :])


@triton.jit
def left_slots(part, num_rows, offs_b, LEFT: tl.constexpr):
    """Places in the workspace of what a part leaves behind, ``[LEFT, BLOCK_B]``."""
    return (part * LEFT + tl.arange(0, LEFT))[:, None] * num_rows + offs_b[None, :]


@triton.jit
def store_part(
    score_ptr,
    group_ptr,
    logits_ptr,
    out,  # [LEFT, BLOCK_B] i32
    mask,  # [LEFT, BLOCK_B] bool, like the next two
    part_score,
    part_group,
    part_logits,  # [LEFT, GROUP_SIZE, BLOCK_B] f32
):
    """The part's best groups, for ``reduce_parts`` and ``draw_truncated``."""
    tl.store(score_ptr + out, part_score, mask=mask)
    tl.store(group_ptr + out, part_group, mask=mask)
    logits_offs = out[:, None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :, None]
    tl.store(logits_ptr + logits_offs, part_logits, mask=mask[:, None, :])


@triton.jit
def store_second(second_ptr, out, mask, best_score, second_score, chosen, LEFT: tl.constexpr):
    """The scores of the second-best groups: a truncated row's next token may be in one."""
    shape: tl.constexpr = [best_score.shape[0] // LEFT, LEFT, best_score.shape[1]]
    others = tl.where(chosen, float("-inf"), tl.reshape(best_score, shape))
    second = tl.max(tl.maximum(others, tl.reshape(second_score, shape)), axis=0)
    tl.store(second_ptr + out, second, mask=mask)


@triton.jit
def store_log_mass(lse_ptr, out, mask, peak, mass, LEFT: tl.constexpr):
    """The part's log-mass, from that of its slots."""
    shape: tl.constexpr = [peak.shape[0] // LEFT, LEFT, peak.shape[1]]
    peak = tl.reshape(peak, shape)
    part_peak = tl.max(peak, axis=0)
    shift = tl.where(part_peak == float("-inf"), 0.0, part_peak)
    part_mass = tl.sum(tl.reshape(mass, shape) * tl.exp(peak - shift[None, :, :]), axis=0)
    tl.store(lse_ptr + out * 2, part_peak, mask=mask)
    tl.store(lse_ptr + out * 2 + 1, part_mass, mask=mask)


@triton.jit
def as_bits(flags, BLOCK_B: tl.constexpr):
    """``[BLOCK_B]`` bool, the same flags: from the bits of scalars.

    A block would be loaded and computed anew for every layout that asks for it, in each tile.
    """
    slot = tl.arange(0, BLOCK_B)
    bits = flags.to(tl.int64) << (slot & 63)
    low = tl.sum(tl.where(slot < 64, bits, 0))
    high = tl.sum(tl.where(slot < 64, 0, bits))
    return ((tl.where(slot < 64, low, high) >> (slot & 63)) & 1) != 0


@triton.jit
def store_peaks(peak_ptr, peak, first_group, rows, keep, kept_groups):
    """The largest logit of each group of the tile, ``[NUM_GROUPS, BLOCK_B]``, of rows with a truncation."""
    groups = first_group + tl.arange(0, peak.shape[0])
    mask = (groups < kept_groups)[:, None] & keep[None, :]
    tl.store(peak_ptr + rows[None, :] * kept_groups + groups[:, None], peak, mask=mask)
