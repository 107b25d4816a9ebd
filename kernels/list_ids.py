"""Of the groups that rows with a truncation could take their token from, the ids that make them so: as one list.

Such a group has sixteen ids, and mostly one whose bound reaches the row's threshold. Reading that one says whether it
does (``verify_ids``): until then the group is taken for one that cannot. Entries come in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .arguments import truncation_pointers
from .features import Truncation
from .head import ROW_POINTERS
from .int8_head import ID_ROWS, ScreenWorkspace
from .integers import cdiv
from .kept_row import value_of
from .launch import launch, starts_early
from .list_groups import flag_groups
from .tiles import ScreenConfig
from .truncates import truncates

_GROUPS_AT_ONCE = 16
_WARPS = 4  # no more threads than pairs of these groups and a block's rows: what one of them changes, none still reads


@triton.jit(do_not_specialize=["num_rows", "num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def list_ids_kernel(
    upper_ptr,  # [G, B] f32, out: -inf where ids of the group are listed for the row
    id_upper_ptr,  # [V, B] f16, of rows with a truncation
    threshold_ptr,  # [B] i32, ``ordered`` logits
    temperature_ptr,  # [B] f32
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    ids_ptr,  # out [V] i32
    num_ids_ptr,  # [1] i32, zero: the length of the list
    candidates_ptr,  # [B] i32: groups that the row could take its token from
    num_rows,
    num_groups,
    vocab_size,
    # constexpr
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    sampled = tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0) > 0.0
    cut = mask_b & sampled & truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_groups
    threshold = tl.load(threshold_ptr + offs_b, mask=mask_b, other=0)
    possible = flag_groups(upper_ptr, threshold, offs_c, mask_c, offs_b, cut, num_rows, 1)
    if tl.max(tl.max(possible, axis=1), axis=0) > 0:
        ids = offs_c[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        of_id = tl.load(
            id_upper_ptr + ids[:, :, None] * num_rows + offs_b[None, None, :],
            mask=(possible > 0)[:, None, :] & (ids < vocab_size)[:, :, None],
            other=float("-inf"),
        ).to(tl.float32)
        reaches = (of_id >= value_of(threshold)[None, None, :]) & (of_id > float("-inf"))
        listed = tl.reshape(tl.max(reaches.to(tl.int32), axis=2), [BLOCK_C * rng.GROUP_SIZE])
        first = tl.atomic_add(num_ids_ptr, tl.sum(listed), sem="relaxed")
        place = first + tl.cumsum(listed, axis=0) - 1
        tl.store(ids_ptr + place, tl.reshape(ids, [BLOCK_C * rng.GROUP_SIZE]), mask=listed > 0)
        own = tl.sum(possible, axis=0)
        tl.atomic_add(candidates_ptr + offs_b, own, mask=mask_b & (own > 0), sem="relaxed")
        tl.debug_barrier()
        of_group = offs_c[:, None] * num_rows + offs_b[None, :]
        tl.store(upper_ptr + of_group, tl.full(of_group.shape, float("-inf"), tl.float32), mask=possible > 0)


def list_ids(
    num_rows: int,  # ID_ROWS or fewer
    vocab_size: int,
    temperature: torch.Tensor,  # [B] f32
    truncation: Truncation,
    workspace: ScreenWorkspace,  # with what ``bound_truncated`` has left
    config: ScreenConfig,
) -> None:
    """Put the ids that have yet to be verified into ``workspace.ids``, and rule their groups out until they are."""
    early = config.early and starts_early(temperature.device)
    launch(
        list_ids_kernel,
        cdiv(workspace.num_groups, _GROUPS_AT_ONCE),
        (
            workspace.upper,
            workspace.id_upper,
            workspace.threshold,
            temperature,
            *truncation_pointers(truncation, temperature),
            workspace.ids,
            workspace.num_ids,
            workspace.candidates,
            num_rows,
            workspace.num_groups,
            vocab_size,
        ),
        {"BLOCK_B": ID_ROWS, "BLOCK_C": _GROUPS_AT_ONCE, "EARLY": early},
        _WARPS,
        (temperature.device.index,),
        early=early,
    )
