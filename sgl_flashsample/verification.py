"""Speculative decoding for engines: ``verify`` draws a token at every node of a tree of drafts and keeps the path on
which the drafts are what was drawn. SGLang's backend does the same (``sglang/speculation.py``)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from .api import check_params, sample
from .cpu_path import draws_in_host_memory, follow_drafts_on_cpu
from .dispatch import DispatchTable
from .kernels.follow_drafts import follow_drafts
from .kernels.params import BatchParams, LMHead, check_tensor
from .kernels.workspace import Workspace
from .kinds import SamplingPath
from .screen import Screen

_NONE = -1


class DraftTree(NamedTuple):
    """How D nodes hang together, the same in every row, or one tree per row: ``[D]`` or ``[B, D]`` int64 each.

    first_child, next_sibling: nodes, -1 for none. depth: 0 of the root, which is node 0.
    """

    first_child: torch.Tensor
    next_sibling: torch.Tensor
    depth: torch.Tensor

    @classmethod
    def chain(cls, num_nodes: int, device: torch.device | str) -> DraftTree:
        """Each node but the last has one child."""
        depth = torch.arange(num_nodes, device=device)
        none = torch.full_like(depth, _NONE)
        return cls(torch.where(depth + 1 < num_nodes, depth + 1, none), none, depth)

    @classmethod
    def from_parents(cls, parents: list[int], device: torch.device | str) -> DraftTree:
        """parents: of each node, -1 of node 0, the root; parents come before their children. Of siblings, the one that
        comes first is asked first. Raises ValueError for anything else."""
        first, following, depth = [_NONE] * len(parents), [_NONE] * len(parents), [0] * len(parents)
        last_child: dict[int, int] = {}
        for node, parent in enumerate(parents):
            if node == 0:
                if parent != _NONE:
                    raise ValueError(f"parents[0] is {parent}; expected -1")
                continue
            if not 0 <= parent < node:
                raise ValueError(f"parents[{node}] is {parent}; expected 0 to {node - 1}")
            depth[node] = depth[parent] + 1
            if parent in last_child:
                following[last_child[parent]] = node
            else:
                first[parent] = node
            last_child[parent] = node
        return cls(*(torch.tensor(column, device=device) for column in (first, following, depth)))


class VerifyOutput(NamedTuple):
    """token_ids: ``[B, D]`` int64, the tokens that each row gains, then -1: its accepted drafts and the token drawn
    after them. num_tokens: ``[B]`` int32, how many these are, 1 to D. nodes: ``[B, D]`` int32, the node at which each
    was drawn, as a place in ``[B * D]``, then -1: what of the KV cache stays. logprobs: ``[B, D]`` float32 of these
    tokens, 0 elsewhere; None unless asked for."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    nodes: torch.Tensor
    logprobs: torch.Tensor | None


def verify(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead,
    draft_tokens: torch.Tensor,
    params: BatchParams,
    tree: DraftTree | None = None,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    path: SamplingPath | str | None = None,
    table: DispatchTable | None = None,
    screen: Screen | None = None,
) -> VerifyOutput:
    """The tokens that each row gains from its drafts: those that drawing one token after another would give.

    At every node a token is drawn with the noise of its position; a draft is accepted where it is the token drawn at
    its parent. The tokens are the same with other drafts, or with none: drafts decide only how many come at once. This
    has the law of verification by acceptance probabilities (FlashSpec; SGLang with thresholds of 1).

    Args:
        hidden: ``[B, D, H]``, contiguous, the head's dtype and device: the final hidden state after each node's token.
        lm_head: as in ``sample``.
        draft_tokens: ``[B, D]`` int64, the token of each node. That of node 0, the last known token, is not looked at.
        params: one value per row; position is that of the token which the root draws, and a node d levels below draws
            that of d positions later. A mask of ``edits`` has a row per row, or one per node (``B * D``).
        tree: a chain when None.
        return_logprob, workspace, path, table, screen: as in ``sample``, for batches of ``B * D`` rows.

    Raises:
        ValueError: as ``sample``, and for drafts or a tree of another shape.
    """
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[1] == 0:
        given = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else f"a {type(hidden).__name__}"
        raise ValueError(f"hidden is {given}; expected [B, D, H] with a D of 1 or more")
    shape = hidden.shape[:2]
    num_rows, num_nodes = shape
    check_tensor("draft_tokens", draft_tokens, tuple(shape), torch.int64, hidden)
    check_params(params)
    check_tensor("position", params.position, (num_rows,), torch.int64, hidden)
    tree = DraftTree.chain(num_nodes, hidden.device) if tree is None else tree
    if not isinstance(tree, DraftTree):
        raise ValueError(f"tree is a {type(tree).__name__}; expected a DraftTree or None")
    for name, column in zip(tree._fields, tree, strict=True):
        if tuple(column.shape) not in ((num_nodes,), tuple(shape)):
            raise ValueError(f"tree.{name} is {tuple(column.shape)}; expected {(num_nodes,)} or {tuple(shape)}")
    first_child, next_sibling, depth = (column.expand(shape).contiguous() for column in tree)
    params = params.repeated(num_nodes)
    params = dataclasses.replace(params, position=params.position + depth.reshape(-1))
    drawn = sample(
        hidden.flatten(0, 1),
        lm_head,
        params,
        return_logprob=return_logprob,
        workspace=workspace,
        path=path,
        table=table,
        screen=screen,
    )
    token_ids = drawn.token_ids.view(shape)
    follow = follow_drafts_on_cpu if draws_in_host_memory(hidden.device) else follow_drafts
    nodes, num_tokens = follow(token_ids, draft_tokens.contiguous(), first_child, next_sibling)
    on_path, places = nodes >= 0, nodes.clamp(min=0).long()
    logprobs = None if drawn.logprobs is None else torch.where(on_path, drawn.logprobs[places], 0.0)
    return VerifyOutput(torch.where(on_path, drawn.token_ids[places], _NONE), num_tokens, nodes, logprobs)
