"""What a program that walks vocabulary tiles leaves behind of its part of them. Device functions only.

The best is kept per group slot of the tile, ``[NUM_GROUPS, BLOCK_B]``, in registers: no tile needs a reduction across
warps, only the end of the program does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng


@triton.jit
def add_log_mass(log_mass, peak, mass):
    """Running ``peak + log(mass)`` of each slot with one more group: the largest log-mass, and the exp-sum relative
    to it."""
    new_peak = tl.maximum(peak, log_mass)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, mass * tl.exp(peak - shift) + tl.exp(log_mass - shift)


@triton.jit
def best_of_slots(best_score, best_group):
    """Score and absolute id of the part's best group per row (the lowest of equal ones), and which slot holds it."""
    part_score = tl.max(best_score, axis=0)
    tied = best_score == part_score[None, :]
    part_group = tl.min(tl.where(tied, best_group, rng.NO_GROUP), axis=0)
    return part_score, part_group, tied & (best_group == part_group[None, :])


@triton.jit
def store_part(
    score_ptr,
    group_ptr,
    logits_ptr,
    out,  # [BLOCK_B] i32, slots of the workspace
    mask_b,
    part_score,
    part_group,
    part_logits,  # [GROUP_SIZE, BLOCK_B] f32
):
    """The part's best group, for ``reduce_parts`` and ``draw_truncated``."""
    tl.store(score_ptr + out, part_score, mask=mask_b)
    tl.store(group_ptr + out, part_group, mask=mask_b)
    logits_offs = out[None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[:, None]
    tl.store(logits_ptr + logits_offs, part_logits, mask=mask_b[None, :])


@triton.jit
def store_second(second_ptr, out, mask_b, best_score, second_score, chosen):
    """The score of the part's second-best group: a truncated row's next token may be in it."""
    others = tl.where(chosen, float("-inf"), best_score)
    tl.store(second_ptr + out, tl.max(tl.maximum(others, second_score), axis=0), mask=mask_b)


@triton.jit
def store_log_mass(lse_ptr, out, mask_b, peak, mass):
    """The part's log-mass, from that of its slots."""
    part_peak = tl.max(peak, axis=0)
    shift = tl.where(part_peak == float("-inf"), 0.0, part_peak)
    part_mass = tl.sum(mass * tl.exp(peak - shift[None, :]), axis=0)
    tl.store(lse_ptr + out * 2, part_peak, mask=mask_b)
    tl.store(lse_ptr + out * 2 + 1, part_mass, mask=mask_b)
