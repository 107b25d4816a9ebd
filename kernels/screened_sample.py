"""One token per row from half the bytes: an INT8 copy of the head rules groups of ids out, the head decides the rest.

The token is the one that ``lm_head_sample`` draws from the same head, for the same noise. Three launches:

    quantize_hidden   hidden states in fixed point
    screen_head       of every group of 16 ids, bounds of its perturbed log-mass, on the integer tensor cores
    rescore_groups    the groups that could still win, from the head itself; the token inside the best

Two logits that are b apart at temperature t leave e^(2 b / t) groups or fewer to rescore, on average over the noise,
whatever the vocabulary and the distribution: b is ``int8_head.py``'s room. Where that is too many the answer is late,
never wrong: ``ScreenWorkspace.counters`` says how often.
"""

from __future__ import annotations

import math

import torch

from .arguments import check_batch
from .features import LogitEdits, Truncation
from .head import LMHead
from .int8_head import Int8Head, ScreenWorkspace
from .quantize_hidden import quantize_hidden
from .reduce_parts import Drawn
from .rescore_groups import rescore_groups
from .screen_head import screen_head
from .tiles import ScreenConfig


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
) -> Drawn:
    """Draw one token per row of ``hidden``; as ``lm_head_sample`` without a truncation and logprobs, of which it has
    the invariants.

    int8_head: of ``head``, built from what its weight holds now. edits: with positive ``scaling``.

    Raises ValueError for a tensor of another shape, dtype, layout or device, an ``int8_head`` of another head, a scale
    of logits that is not positive, a truncation and logprobs: those need every logit.
    """
    head.check(hidden)
    num_rows = hidden.shape[0]
    if truncation is not None:
        raise ValueError("truncation is given; expected None: a screen does not see every logit")
    if return_logprob:
        raise ValueError("return_logprob is True; expected False: a screen does not see every logit")
    if head.logit_scale is not None and not 0 < head.logit_scale < math.inf:
        raise ValueError(f"logit_scale is {head.logit_scale}; expected a positive number or None")
    check_batch("hidden", hidden, head, temperature, seed, position, None, edits)
    int8_head.require_shape_of(head)
    if workspace is None:
        workspace = ScreenWorkspace(int8_head, max(num_rows, 1))
    workspace.require_room(int8_head, num_rows)
    if num_rows == 0:
        return Drawn.empty(0, hidden.device, False)
    quantize_hidden(hidden, int8_head, workspace, config)
    screen_head(head, int8_head, num_rows, temperature, seed, position, workspace, config, edits)
    return rescore_groups(hidden, head, temperature, seed, position, workspace, config, edits)
