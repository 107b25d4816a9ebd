"""One token per row of logits of some of the vocabulary's ids: a draft model's, or the rows of a head that are read
for drafts (FR-Spec, arXiv 2502.14856; SIMPLE, arXiv 2512.00719, section 5.3).

    token[b] ~ softmax over the ids in ``OwnIds`` of logits[b] / temperature[b]

with the noise of the ids themselves (``rng.py``), so that such a draft is often the token that all ids together give.
A group of 16 ids has the mass of those that are there. The same token as ``sample_logits`` of rows as wide as the
vocabulary, with minus infinity at the other ids.

The ids of a group are neighbours in ascending order: ``first`` is the place of its first one, and ``members`` says
which of its 16 ids they are. The number of groups is read from the device: a CUDA graph goes on with another set.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import rng
from .config import DEFAULT_TRUNCATION, GROUP_SIZE, ReadConfig, cdiv
from .epilogue import (
    add_tile,
    best_of_slots,
    bound_logits,
    invert_temperature,
    score_groups,
    start_split,
    store_split,
    transform_logits,
)
from .launch import launch
from .params import ROW_POINTERS, TRITON_DTYPES, BatchParams, LogitsSpec, SampleOutput
from .reduce_splits import draw_if_last
from .sample_logits import max_read_splits, num_read_splits
from .split_launch import SplitLaunch
from .workspace import Workspace


class OwnIdOperands(NamedTuple):
    """The groups of 16 ids that have any, in ascending order."""

    group: Any  # [G] i32
    first: Any  # [G] i32, place of the first of its ids
    members: Any  # [G] i32: bit i for id 16 * group + i
    num_groups: Any  # [1] i32
    column: Any  # [H] i32, of the id at each place, in the logits; None where columns are in ascending order


class OwnIds:
    """A set of ids that kernels, also within CUDA graphs, read where it lies. ``replace`` changes the set in place.

    token_ids: ``[H]`` int64, the id of each column of the logits. vocab_size: V, above all of them. most: the size of
    the largest set that it will hold, by default H. in_order: the ids of this set and of later ones are ascending.

    Raises ValueError for ids that are not different ones below V, or not ascending where they should be, for none, and
    for more than ``most``.
    """

    def __init__(
        self, token_ids: torch.Tensor, vocab_size: int, most: int | None = None, *, in_order: bool = True
    ) -> None:
        device = token_ids.device
        self.vocab_size, self.most, self.size = vocab_size, len(token_ids) if most is None else most, 0
        self.token_ids = torch.zeros(self.most, dtype=torch.int64, device=device)

        def integers(number: int) -> torch.Tensor:
            return torch.zeros(number, dtype=torch.int32, device=device)

        rows = min(self.most, cdiv(vocab_size, GROUP_SIZE))
        column = None if in_order else integers(self.most)
        self.operands = OwnIdOperands(integers(rows), integers(rows), integers(rows), integers(1), column)
        self.replace(token_ids)

    def replace(self, token_ids: torch.Tensor) -> None:
        """Takes another set of ids, in the order of the stream. Waits for the device, to look at the ids."""
        size, column = len(token_ids), None
        if not 1 <= size <= self.most:
            raise ValueError(f"token_ids has {size} ids; expected 1 to {self.most}")
        of_columns = token_ids
        if self.operands.column is not None:
            token_ids, column = token_ids.sort()
        if token_ids[0] < 0 or token_ids[-1] >= self.vocab_size or (token_ids[1:] <= token_ids[:-1]).any():
            expected = "different" if self.operands.column is not None else "ascending"
            raise ValueError(f"token_ids are not {expected} ids from 0 to {self.vocab_size - 1}")
        groups, counts = torch.unique_consecutive(token_ids // GROUP_SIZE, return_counts=True)
        place = torch.repeat_interleave(torch.arange(len(groups), device=token_ids.device), counts)
        members = torch.zeros_like(groups).index_add_(0, place, 1 << (token_ids % GROUP_SIZE))
        held = self.operands
        held.group[: len(groups)] = groups.int()
        held.first[: len(groups)] = (counts.cumsum(0) - counts).int()
        held.members[: len(groups)] = members.int()
        held.num_groups.fill_(len(groups))
        if column is not None:
            held.column[:size] = column.int()
        self.token_ids[:size] = of_columns
        self.size = size


@triton.jit
def _columns(own, index, exists):
    """Columns of the 16 ids of each group, and which of them are there: ``[N, GROUP_SIZE]``, of ``[N]`` groups."""
    offs_i = tl.arange(0, rng.GROUP_SIZE)[None, :]
    members = tl.load(own.members + index, mask=exists, other=0)[:, None]
    # Ids of the group before this one, counted in parallel: by pairs, by fours, by eights.
    before = members & ((1 << offs_i) - 1)
    before = before - ((before >> 1) & 0x5555)
    before = (before & 0x3333) + ((before >> 2) & 0x3333)
    before = (before + (before >> 4)) & 0x0F0F
    before = (before + (before >> 8)) & 0x1F
    places = tl.load(own.first + index, mask=exists, other=0)[:, None] + before
    there = ((members >> offs_i) & 1) != 0
    if own.column is None:
        columns = places
    else:
        columns = tl.load(own.column + places, mask=there, other=0)
    return columns, there


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "num_splits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def sample_own_ids_kernel(
    raw_ptr,  # [B, >= H], what logits come from
    own,  # OwnIdOperands
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    splits,  # SplitOperands, out
    output,  # SampleOutput, out, where the last program draws; None where the next launch does
    num_rows,
    vocab_size,
    num_splits,
    raw_stride,
    logit_scale,  # or None, as the next
    softcap,
    # constexpr
    LOGITS_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    BLOCK_B: tl.constexpr = TILE.block_b
    NUM_GROUPS: tl.constexpr = TILE.block_v // rng.GROUP_SIZE
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    split = tl.program_id(0) // num_row_blocks
    offs_b = (tl.program_id(0) % num_row_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_g = tl.arange(0, NUM_GROUPS)
    raw_rows = raw_ptr + (offs_b.to(tl.int64) * raw_stride)[None, None, :]
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy, inv_temperature = invert_temperature(temperature)
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
    position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
    num_groups = tl.load(own.num_groups)

    state = start_split(split, NUM_GROUPS, BLOCK_B)
    for tile in tl.range(split, tl.cdiv(num_groups, NUM_GROUPS), num_splits):
        index = tile * NUM_GROUPS + offs_g
        exists = index < num_groups
        group = tl.load(own.group + index, mask=exists, other=0)
        columns, there = _columns(own, index, exists)
        there = there[:, :, None] & mask_b[None, None, :]
        raw = tl.load(raw_rows + columns[:, :, None], mask=there, other=0.0)
        logits = bound_logits(transform_logits(raw, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=True), there)
        score, mass, peak = score_groups(logits, exists, inv_temperature, greedy, seed, position, group)
        state, _ = add_tile(state, tile, score, mass, peak, inv_temperature, False, False)

    top_score, top_index, chosen = best_of_slots(state.score, state.tile * NUM_GROUPS + offs_g[:, None], 1)
    top_index = tl.reshape(top_index, [BLOCK_B])
    exists = (top_index < num_groups) & mask_b
    # A split without groups names none: in a row without a number all splits tie, and the lowest group is drawn.
    top_group = tl.load(own.group + top_index, mask=exists, other=rng.NO_GROUP)
    columns, there = _columns(own, top_index, exists)  # [BLOCK_B, GROUP_SIZE]
    raw = tl.load(raw_ptr + offs_b.to(tl.int64)[:, None] * raw_stride + columns, mask=there, other=0.0)
    logits = bound_logits(transform_logits(raw, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=True), there)
    store_split(
        splits,
        split,
        num_rows,
        offs_b,
        mask_b,
        state,
        top_score,
        top_group[None, :],
        tl.reshape(tl.trans(logits), [1, rng.GROUP_SIZE, BLOCK_B]),
        chosen,
        inv_temperature,
        False,
        False,
        1,
    )
    if TILE.one_launch:
        draw_if_last(
            splits,
            temperature_ptr,
            seed_ptr,
            position_ptr,
            output,
            num_rows,
            num_splits,
            vocab_size,
            tl.program_id(0) % num_row_blocks,
            BLOCK_B,
            BLOCK_P,
            TILE.reduce_rows,
        )


def sample_own_ids(
    logits: torch.Tensor,  # [B, >= H] bf16, fp16 or fp32; contiguous rows at any distance
    own: OwnIds,
    spec: LogitsSpec,
    params: BatchParams,
    config: ReadConfig,
    *,
    workspace: Workspace | None = None,
) -> SampleOutput:
    """Draw one of the ids in ``own`` per row of ``logits``, whose columns are of these ids.

    spec: of the whole vocabulary. Invariants as in ``sample_logits``; a row without a number draws the first id of the
    first group, there or not.

    Raises ValueError for a tensor of another shape, dtype, layout or device, for a shard, and for a batch with a
    truncation or edits.
    """
    if logits.dim() != 2 or logits.dtype not in TRITON_DTYPES or logits.shape[1] < own.size:
        raise ValueError(
            f"logits is {tuple(logits.shape)} {logits.dtype}; "
            f"expected [B, {own.size} or more] in bfloat16, float16 or float32"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits has strides {logits.stride()}; expected rows that are contiguous")
    if spec.vocab_start or spec.vocab_size != own.vocab_size:
        raise ValueError(
            f"spec has ids {spec.vocab_start} to {spec.vocab_start + spec.vocab_size - 1}; "
            f"expected 0 to {own.vocab_size - 1}"
        )
    if params.truncation is not None or params.edits is not None:
        raise ValueError("params has a truncation or edits; expected neither with some of the ids")
    num_rows, device = logits.shape[0], logits.device
    params.check("logits", logits, spec)
    if num_rows == 0:
        return SampleOutput.empty(0, device, False)
    splits = num_read_splits(min(own.most * GROUP_SIZE, spec.vocab_size), num_rows, config, device)
    rounding = logits.dtype if spec.logits_dtype is None else spec.logits_dtype
    bound = max_read_splits(device, config)
    shared = SplitLaunch(params, spec, rounding, config, splits, bound, workspace, False)
    _, _, split_operands, _, output = shared.operands
    stride = logits.stride(0) if num_rows > 1 else 0
    launch(
        sample_own_ids_kernel,
        splits * cdiv(num_rows, config.block_b),
        (
            logits,
            own.operands,
            params.temperature,
            params.seed,
            params.position,
            split_operands,
            output,
            num_rows,
            spec.vocab_size,
            splits,
            stride,
            shared.features.logit_scale,
            shared.features.softcap,
        ),
        {name: shared.constants[name] for name in ("LOGITS_DTYPE", "TILE", "BLOCK_P")},
        config.num_warps,
        (
            device.index,
            logits.dtype,
            logits.data_ptr() % 16 == 0,
            (stride % 16 == 0, stride == 1, stride < 2**31),
            own.operands.column is None,
            *shared.variant,
        ),
    )
    return shared.draw(DEFAULT_TRUNCATION)
