"""Which groups a row with a truncation could take its token from, by what the screen knows of its largest logits.

What the largest lower ends of k groups are above, k logits are above. So no logit that a top-k of k allows is in a
group that cannot reach it: it is the row's threshold. A row without a small top-k has the threshold of as many as the
draw can hold; whether that was enough is for the draw to say (``draw_screened.py``).

Once the groups that surely reach the threshold have been read, what they reach is what they are: then the same question
has a higher answer, and fewer groups could reach that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .draw_top_k import bound_of_top_k, largest_of_spans
from .features import Truncation
from .head import ROW_POINTERS, Kept, block_of_spans
from .int8_head import ScreenWorkspace
from .kept_row import ordered
from .launch import launch, starts_early
from .tiles import DrawConfig, ScreenConfig
from .truncates import truncates


@triton.jit
def groups_to_find(top_k, vocab_size, CANDIDATES: tl.constexpr):
    """How many of the largest groups are looked for, and whether they are enough for the top-k: where that is not
    small, as many as there is room for, with ties."""
    small = (top_k >= 1) & (top_k < vocab_size) & (top_k <= CANDIDATES // 2)
    return tl.where(small, top_k, CANDIDATES // 2), small


@triton.jit(do_not_specialize=["vocab_size", "num_groups"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def bound_truncated_kernel(
    reach_ptr,  # [B, G] f32
    temperature_ptr,  # [B] f32
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    threshold_ptr,  # out [B] i32, ``ordered`` logits, of rows with a truncation alone
    peak_ptr,  # out [B, G] f32: -inf, as of a group that was not rescored; not AGAIN
    vocab_size,
    num_groups,
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    AGAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if (tl.load(temperature_ptr + row) > 0.0) & truncates(top_k_ptr, top_p_ptr, min_p_ptr, row, True, vocab_size):
        reach_ptr += row.to(tl.int64) * num_groups
        if not AGAIN:
            peak_ptr += row.to(tl.int64) * num_groups
            for first in tl.range(0, num_groups, BLOCK_S):
                groups = first + tl.arange(0, BLOCK_S)
                tl.store(peak_ptr + groups, float("-inf"), mask=groups < num_groups)
        of_span = largest_of_spans(reach_ptr, num_groups, BLOCK_S)
        k, _ = groups_to_find(tl.load(top_k_ptr + row), vocab_size, CANDIDATES)
        bound = bound_of_top_k(of_span, tl.max(of_span), k, 0)
        tl.store(threshold_ptr + row, ordered(bound))


def bound_truncated(
    num_rows: int,
    vocab_size: int,
    temperature: torch.Tensor,  # [B] f32
    truncation: Truncation,
    workspace: ScreenWorkspace,  # with what ``screen_head`` has left
    kept: Kept,
    config: ScreenConfig,
    draw: DrawConfig,
    *,
    again: bool = False,
) -> None:
    """Put the thresholds of rows with a truncation into ``workspace.threshold``, and start their rows of ``kept``.

    again: with the largest logits of some groups in ``workspace.reach``; ``kept`` stays.
    """
    early = config.early and starts_early(temperature.device)
    launch(
        bound_truncated_kernel,
        num_rows,
        (
            workspace.reach,
            temperature,
            truncation.top_k,
            truncation.top_p,
            truncation.min_p,
            workspace.threshold,
            kept.peak,
            vocab_size,
            kept.width // rng.GROUP_SIZE,
        ),
        {"BLOCK_S": block_of_spans(kept.width), "CANDIDATES": draw.candidates, "AGAIN": again, "EARLY": early},
        draw.num_warps,
        (temperature.device.index,),
        early=early,
    )
