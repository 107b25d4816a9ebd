"""Which groups the screen has not ruled out, as one list per block of rows: so that the programs of ``rescore_groups``
share them evenly, however they lie in the vocabulary.

Entries come in any order: the best of the rescored groups does not depend on it. There is room for every group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import truncation_pointers
from .features import Truncation
from .head import ROW_POINTERS
from .int8_head import ScreenWorkspace
from .integers import cdiv, next_power_of_2
from .kept_row import value_of
from .launch import launch, starts_early
from .tiles import ScreenConfig
from .truncates import truncates


@triton.jit
def flag_groups(upper_ptr, threshold, offs_c, mask_c, offs_b, mask_b, group_stride, row_stride):
    """Of ``[BLOCK_C]`` groups, ``[BLOCK_C, BLOCK_B]`` int32: 1 where the row could take its token from the group.
    threshold: ``[BLOCK_B]`` int32, ``ordered`` scores."""
    upper = tl.load(
        upper_ptr + offs_c[:, None] * group_stride + offs_b[None, :] * row_stride,
        mask=mask_c[:, None] & mask_b[None, :],
        other=float("-inf"),
    )
    return ((upper >= value_of(threshold)[None, :]) & (upper > float("-inf"))).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def list_groups_kernel(
    upper_ptr,  # [G, B] f32, G groups of ids; with FIRST [B, G] f32, what they reach, of rows with a truncation
    threshold_ptr,  # [B] i32
    temperature_ptr,  # [B] f32, with FIRST, as the next three
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    list_ptr,  # out [row blocks, G] i32: the groups to rescore
    place_ptr,  # out [row blocks, G] i32: where each of these is in the list
    candidates_ptr,  # [B] i32: groups that the row could take its token from
    flagged_ptr,  # [row blocks] i32, zeros: the lengths of the lists
    num_rows,
    num_groups,
    vocab_size,
    # constexpr
    FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    chunk = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_c = chunk * CHUNK + tl.arange(0, BLOCK_C)
    mask_c = offs_c < tl.minimum((chunk + 1) * CHUNK, num_groups)
    threshold = tl.load(threshold_ptr + offs_b, mask=mask_b, other=0)
    if FIRST:
        sampled = tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0) > 0.0
        cut = mask_b & sampled & truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
        possible = flag_groups(upper_ptr, threshold, offs_c, mask_c, offs_b, cut, 1, num_groups)
    else:
        possible = flag_groups(upper_ptr, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, 1)
    flagged = tl.max(possible, axis=1)
    num_flagged = tl.sum(flagged)
    if num_flagged > 0:
        first = tl.atomic_add(flagged_ptr + row_block, num_flagged, sem="relaxed")
        place = first + tl.cumsum(flagged, axis=0) - 1
        tl.store(list_ptr + row_block * num_groups + place, offs_c, mask=flagged > 0)
        tl.store(place_ptr + row_block * num_groups + offs_c, place, mask=flagged > 0)
        own = tl.sum(possible, axis=0)
        tl.atomic_add(candidates_ptr + offs_b, own, mask=mask_b & (own > 0), sem="relaxed")


def list_groups(
    num_rows: int,
    block_b: int,
    workspace: ScreenWorkspace,
    config: ScreenConfig,
    first: tuple[torch.Tensor, Truncation, int] | None = None,
) -> None:
    """Put the groups that could still win into ``workspace.list``, for blocks of ``block_b`` rows.

    first: temperatures, truncation and size of the vocabulary: instead, of rows with a truncation, the groups whose
    largest logit surely reaches the threshold.
    """
    device: torch.device = workspace.upper.device
    early = config.early and starts_early(device)
    if first is None:
        limits = (workspace.upper, *truncation_pointers(None, workspace.upper))
    else:
        limits = (first[0], *truncation_pointers(first[1], first[0]))
    launch(
        list_groups_kernel,
        cdiv(workspace.num_groups, config.chunk) * cdiv(num_rows, block_b),
        (
            workspace.upper if first is None else workspace.reach,
            workspace.threshold,
            *limits,
            workspace.list,
            workspace.place,
            workspace.candidates,
            workspace.flagged,
            num_rows,
            workspace.num_groups,
            0 if first is None else first[2],
        ),
        {
            "FIRST": first is not None,
            "BLOCK_B": block_b,
            "CHUNK": config.chunk,
            "BLOCK_C": next_power_of_2(config.chunk),
            "EARLY": early,
        },
        config.rescore_warps,
        (device.index,),
        early=early,
    )
