"""The ids of each row that a draw has as the next best: what a node of a tree of drafts branches to.

    s(i) = the perturbed score of id i; the drawn id has the largest (``truncation_math.py``)

A draw leaves the best group of each split and its 16 logits in the workspace. The k best of these groups hold the k
best ids, for a group's score is that of its best id, and the scores of its others follow from that (Kool, van Hoof and
Welling, arXiv 1903.06059, appendix B). The second best group of a split is not seen: of P splits, one of the k best
groups is missed in about k (k - 1) / 2P of all rows. A tree of drafts then branches to the id after it; no token that
is served depends on drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import rng
from .config import GROUP_SIZE, ReadConfig, TileConfig, next_power_of_2
from .epilogue import invert_temperature
from .launch import launch, resident_programs
from .lm_head_sample import num_splits
from .params import ROW_POINTERS, BatchParams, LMHead, LogitsSpec
from .sample_logits import max_read_splits, num_read_splits
from .sample_own_ids import OwnIds
from .truncation_math import NO_TOKEN, score_row_groups, token_scores
from .workspace import Workspace

MAX_CHILDREN = 8
_WARPS = 4


class Children(NamedTuple):
    """token_ids: ``[B, K]`` int64, the drawn id first. scores: ``[B, K]`` float32, of these ids, descending; the logits
    themselves in greedy rows. Where a row has fewer ids the drawn one stands again, with minus infinity."""

    token_ids: torch.Tensor
    scores: torch.Tensor


class Splits(NamedTuple):
    """How a draw has cut the vocabulary. number: of splits. most: on this device, in any batch."""

    number: int
    most: int

    @classmethod
    def of_head(cls, head: LMHead, num_rows: int, config: TileConfig | ReadConfig) -> Splits:
        """The splits of a draw from hidden states with this configuration."""
        device = head.weight.device
        if isinstance(config, ReadConfig):
            return cls(num_read_splits(head.vocab_size, num_rows, config, device), max_read_splits(device, config))
        return cls(num_splits(head, num_rows, config), resident_programs(device, config.ctas_per_sm))

    @classmethod
    def of_own_ids(cls, own: OwnIds, num_rows: int, config: ReadConfig) -> Splits:
        """The splits of a draw from the logits of some ids (``sample_own_ids``)."""
        device, width = own.token_ids.device, min(own.most * GROUP_SIZE, own.vocab_size)
        return cls(num_read_splits(width, num_rows, config, device), max_read_splits(device, config))


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "vocab_end"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def best_ids_kernel(
    splits,  # SplitOperands, one group per split
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    ids_ptr,  # [B, CHILDREN] i64, out
    scores_ptr,  # [B, CHILDREN] f32, out
    num_rows,
    num_splits,
    vocab_end,
    # constexpr
    CHILDREN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0)
    offs_p = tl.arange(0, BLOCK_P)
    mask = offs_p < num_splits
    waiting = tl.load(splits.score + offs_p * num_rows + row, mask=mask, other=float("-inf"))
    groups = tl.load(splits.group + offs_p * num_rows + row, mask=mask, other=rng.NO_GROUP)
    offs_k = tl.arange(0, BLOCK_K)
    split = tl.zeros([BLOCK_K], tl.int32)
    group = tl.zeros([BLOCK_K], tl.int32)
    group_score = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for rank in tl.static_range(CHILDREN):
        best = tl.max(waiting)
        first = tl.min(tl.where(waiting == best, groups, rng.NO_GROUP))  # of equal scores the lowest group
        place = tl.min(tl.where((waiting == best) & (groups == first), offs_p, BLOCK_P - 1))
        split = tl.where(offs_k == rank, place, split)
        group = tl.where(offs_k == rank, tl.where(best > float("-inf"), first, 0), group)
        group_score = tl.where(offs_k == rank, best, group_score)
        waiting = tl.where(offs_p == place, float("-inf"), waiting)

    found = group_score > float("-inf")
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    ids = group[:, None] * rng.GROUP_SIZE + offs_i[None, :]
    slots = (split * num_rows + row)[:, None] * rng.GROUP_SIZE + offs_i[None, :]
    inside = found[:, None] & (ids < vocab_end)
    logits = tl.load(splits.logits + slots, mask=inside, other=float("-inf"))
    greedy, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    _, relative, _, _ = score_row_groups(logits, group, inv_temperature, seed, position)
    scores = token_scores(logits, group_score, relative, ids, inv_temperature, seed, position)
    scores = tl.where(inside, tl.where(greedy, logits, scores), float("-inf"))
    scores = tl.reshape(scores, [BLOCK_K * rng.GROUP_SIZE])
    ids = tl.reshape(ids, [BLOCK_K * rng.GROUP_SIZE])
    drawn = tl.min(tl.where(scores == tl.max(scores), ids, NO_TOKEN))
    for rank in tl.static_range(CHILDREN):
        best = tl.max(scores)
        token = tl.min(tl.where(scores == best, ids, NO_TOKEN))
        tl.store(ids_ptr + row * CHILDREN + rank, tl.where(best > float("-inf"), token, drawn).to(tl.int64))
        tl.store(scores_ptr + row * CHILDREN + rank, best)
        scores = tl.where(ids == token, float("-inf"), scores)


def best_ids(
    workspace: Workspace,  # of a draw without a truncation and edits, which it still holds
    splits: Splits,
    params: BatchParams,
    spec: LogitsSpec,
    number: int,
) -> Children:
    """The ``number`` best ids of each row of the last draw in ``workspace``. params, spec: of that draw.

    Raises ValueError for a number that is not 2 to ``MAX_CHILDREN``, for splits that the workspace has no room for, and
    for a batch with a truncation or edits.
    """
    if not 2 <= number <= MAX_CHILDREN:
        raise ValueError(f"number is {number}; expected 2 to {MAX_CHILDREN}")
    if params.truncation is not None or params.edits is not None:
        raise ValueError("params has a truncation or edits; expected neither")
    num_rows, device = params.temperature.shape[0], params.temperature.device
    if not 1 <= splits.number <= splits.most or workspace.slots < splits.number * num_rows:
        raise ValueError(
            f"splits has {splits.number}; expected 1 to {splits.most}, and {num_rows} rows of them in the workspace's "
            f"{workspace.slots} slots"
        )
    children = Children(
        torch.empty(num_rows, number, dtype=torch.int64, device=device),
        torch.empty(num_rows, number, dtype=torch.float32, device=device),
    )
    if num_rows == 0:
        return children
    launch(
        best_ids_kernel,
        num_rows,
        (
            workspace.splits,
            params.temperature,
            params.seed,
            params.position,
            *children,
            num_rows,
            splits.number,
            spec.vocab_end,
        ),
        {"CHILDREN": number, "BLOCK_K": next_power_of_2(number), "BLOCK_P": next_power_of_2(splits.most)},
        _WARPS,
        (device.index,),
    )
    return children
