"""One token per row from half the bytes: an INT8 copy of the head rules groups of ids out, the head decides the rest.

The token is the one that ``lm_head_sample`` draws from the same head, for the same noise. Three launches:

    quantize_hidden   hidden states in fixed point
    screen_head       of every group of 16 ids, bounds of its perturbed log-mass, on the integer tensor cores
    rescore_groups    the groups that could still win, from the head itself; the token inside the best

Two logits that are b apart at temperature t leave e^(2 b / t) groups or fewer to rescore, on average over the noise,
whatever the vocabulary and the distribution: b is ``int8_head.py``'s room. Where that is too many the answer is late,
never wrong: ``ScreenWorkspace.counters`` says how often.

A batch with truncations takes some more, of which the last two end at once where every row is answered:

    bound_truncated   what a logit must reach to matter to a row's top-k (after screen_head)
    rescore_groups    of the groups that surely do, the logits
    bound_truncated   with these, and higher
    list_ids          of ID_ROWS rows or fewer, what could still reach it
    verify_ids        which of them do: only their groups are rescored
    draw_screened     the token, from the rescored groups of such a row, where they are certain to decide it
    rescore_groups    all logits of the rows that are left
    search_truncated  their tokens
"""

from __future__ import annotations

import math

import torch

from .arguments import check_batch, kept_for
from .bound_truncated import bound_truncated
from .draw_screened import draw_screened
from .features import LogitEdits, Truncation
from .head import LMHead, Workspace
from .int8_head import ID_ROWS, Int8Head, ScreenWorkspace
from .list_ids import list_ids
from .quantize_hidden import quantize_hidden
from .reduce_parts import Drawn
from .rescore_groups import rescore_groups
from .rounds import Round
from .screen_head import screen_head
from .search_truncated import search_truncated
from .tiles import DEFAULT_DRAW, DrawConfig, ScreenConfig
from .verify_ids import verify_ids


def screened_sample(
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    int8_head: Int8Head,
    temperature: torch.Tensor,  # [B] f32; 0 or less is greedy
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    config: ScreenConfig,
    *,
    truncation: Truncation | None = None,
    edits: LogitEdits | None = None,
    return_logprob: bool = False,
    workspace: ScreenWorkspace | None = None,
    head_workspace: Workspace | None = None,
    draw: DrawConfig = DEFAULT_DRAW,
) -> Drawn:
    """Draw one token per row of ``hidden``; as ``lm_head_sample`` without logprobs, of which it has the invariants.

    int8_head: of ``head``, built from what its weight holds now. truncation: fast where every such row has a top-k of
    ``draw.candidates // 2`` or less; others read the whole head besides. edits: with positive ``scaling``.
    head_workspace: where rows with a truncation keep logits, ``head_workspace.last_kept``, of the groups that were
    rescored. draw: for such rows.

    Raises ValueError for a tensor of another shape, dtype, layout or device, an ``int8_head`` of another head, a scale
    of logits that is not positive, a truncation on a shard, and logprobs: those need every logit.
    """
    head.check(hidden)
    num_rows = hidden.shape[0]
    if return_logprob:
        raise ValueError("return_logprob is True; expected False: a screen does not see every logit")
    if head.logit_scale is not None and not 0 < head.logit_scale < math.inf:
        raise ValueError(f"logit_scale is {head.logit_scale}; expected a positive number or None")
    check_batch("hidden", hidden, head, temperature, seed, position, truncation, edits)
    int8_head.require_shape_of(head)
    if workspace is None:
        workspace = ScreenWorkspace(int8_head, max(num_rows, 1))
    workspace.require_room(int8_head, num_rows)
    if num_rows == 0:
        return Drawn.empty(0, hidden.device, False)
    quantize_hidden(hidden, int8_head, workspace, config)
    screen_head(head, int8_head, num_rows, temperature, seed, position, workspace, config, edits, truncation)
    if truncation is None:
        return rescore_groups(hidden, head, temperature, seed, position, workspace, config, edits)
    if head_workspace is None:
        head_workspace = Workspace(1, hidden.device)
    size = head.vocab_size
    kept = kept_for(num_rows, head, head.rounding, edits, head_workspace)
    bound = (num_rows, size, temperature, truncation, workspace, kept, config, draw)
    noise = (temperature, seed, position)
    rescored = (hidden, head, *noise, workspace, config, edits, truncation, kept)
    bound_truncated(*bound)
    rescore_groups(*rescored, of=Round.FIRST)
    bound_truncated(*bound, again=True)
    if num_rows <= ID_ROWS:
        list_ids(num_rows, size, temperature, truncation, workspace, config)
        verify_ids(hidden, head, temperature, truncation, workspace, config, edits)
    drawn = rescore_groups(*rescored)
    draw_screened(drawn, size, *noise, truncation, workspace, kept, config, draw)
    rescore_groups(*rescored, of=Round.REST)
    search_truncated(kept, *noise, truncation, size, head.vocab_start, *drawn, draw)
    return drawn
