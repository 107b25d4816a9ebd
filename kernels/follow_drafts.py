"""The drafted tokens that are accepted, from a draw at every node of a tree of drafts: follow the child that equals the
draw, as long as there is one.

A node's draw is from the model's distribution after the tokens up to that node. So the tokens on the path, the draw at
its last node included, have the law of drawing them one after another, and with noise that is keyed by their positions
they are the same tokens: a child is taken because it is what was drawn, and only one node per depth is visited. This is
the law of FlashSpec's and SGLang's verification by acceptance probabilities (with thresholds of 1), without
probabilities.

A tree is two tables, as SGLang has them: the first child and the next sibling of each node, -1 for none. Node 0 is
the root, the last token that is known; its draft is not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import launch
from .params import check_tensor

_BLOCK_D = 128  # nodes whose tokens are copied at a time


class Accepted(NamedTuple):
    """nodes: ``[B, P]`` int32, the nodes on the path as places in ``[B * D]``, the root first, then -1. num_tokens:
    ``[B]`` int32, how many these are, which is also how many tokens a row gains: those drawn at its nodes."""

    nodes: torch.Tensor
    num_tokens: torch.Tensor


@triton.jit(do_not_specialize=["num_nodes", "max_path"], do_not_specialize_on_alignment=["tokens_ptr"])
def follow_drafts_kernel(
    drawn_ptr,  # [B, D] i64
    drafts_ptr,  # [B, D] i64
    first_child_ptr,  # [B, D] i64
    next_sibling_ptr,  # [B, D] i64
    accepted,  # Accepted, out
    tokens_ptr,  # [B, D] i32, out: the drawn tokens; or None
    num_nodes,
    max_path,
    # constexpr
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = row * num_nodes
    if tokens_ptr is not None:
        for start in range(0, num_nodes, BLOCK_D):
            nodes = start + tl.arange(0, BLOCK_D)
            tokens = tl.load(drawn_ptr + base + nodes, mask=nodes < num_nodes)
            tl.store(tokens_ptr + base + nodes, tokens.to(tl.int32), mask=nodes < num_nodes)
    path = accepted.nodes + row * max_path
    node = tl.zeros([], tl.int64)
    length = 1
    tl.store(path, base.to(tl.int32))
    goes_on = max_path > 1
    while goes_on:
        token = tl.load(drawn_ptr + base + node)
        child = tl.load(first_child_ptr + base + node)
        exists = (child >= 0) & (child < num_nodes)
        draft = tl.load(drafts_ptr + base + child, mask=exists, other=-1)
        siblings = 1  # bounded, for tables in which siblings form a circle
        while exists & (draft != token) & (siblings < num_nodes):
            child = tl.load(next_sibling_ptr + base + child)
            exists = (child >= 0) & (child < num_nodes)
            draft = tl.load(drafts_ptr + base + child, mask=exists, other=-1)
            siblings += 1
        goes_on = exists & (draft == token)
        if goes_on:
            tl.store(path + length, (base + child).to(tl.int32))
            node = child
            length += 1
            goes_on = length < max_path
    tl.store(accepted.num_tokens + row, length)
    for place in tl.range(length, max_path):
        tl.store(path + place, -1)


def follow_drafts(
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    max_path: int | None = None,
    tokens: torch.Tensor | None = None,
) -> Accepted:
    """The path of accepted drafts of each row. drawn: ``[B, D]`` int64, the token drawn at each node. drafts:
    ``[B, D]`` int64, the token of each node. first_child, next_sibling: ``[B, D]`` int64, nodes of the same row, -1 for
    none, as is a number that is no node; of a node that comes twice, the path is any one. max_path: the most nodes of
    a path; of the whole tree when None. tokens: ``[B * D]`` int32, gets ``drawn``: a conversion costs the host as much
    as this launch.

    Raises ValueError for another shape, dtype, layout or device.
    """
    shape = tuple(drawn.shape)
    for name, value in (
        ("drawn", drawn),
        ("drafts", drafts),
        ("first_child", first_child),
        ("next_sibling", next_sibling),
    ):
        if len(shape) != 2 or tuple(value.shape) != shape or value.dtype is not torch.int64:
            expected = shape if len(shape) == 2 else "[B, D]"
            raise ValueError(f"{name} is {tuple(value.shape)} {value.dtype}; expected {expected} torch.int64")
        if not value.is_contiguous() or value.device != drawn.device:
            raise ValueError(
                f"{name} has strides {value.stride()} on {value.device}; expected it contiguous on {drawn.device}"
            )
    num_rows, num_nodes = shape
    max_path = num_nodes if max_path is None else max_path
    if min(max_path, num_nodes) < 1:
        raise ValueError(f"max_path is {max_path} of {num_nodes} nodes; expected 1 or more")
    device = drawn.device
    if tokens is not None and (
        tokens.shape != (num_rows * num_nodes,)
        or tokens.dtype is not torch.int32
        or not tokens.is_contiguous()
        or tokens.device != device
    ):
        check_tensor("tokens", tokens, (num_rows * num_nodes,), torch.int32, drawn)
    nodes = torch.empty(num_rows, max_path, dtype=torch.int32, device=device)
    accepted = Accepted(nodes, torch.empty(num_rows, dtype=torch.int32, device=device))
    if num_rows == 0:
        return accepted
    launch(
        follow_drafts_kernel,
        num_rows,
        (drawn, drafts, first_child, next_sibling, accepted, tokens, num_nodes, max_path),
        {"BLOCK_D": _BLOCK_D},
        1,
        # An engine's tables may be views that start anywhere.
        (device.index, tokens is None, *(t.data_ptr() % 16 == 0 for t in (drawn, drafts, first_child, next_sibling))),
    )
    return accepted
