"""One token per row from half the bytes: an INT8 copy of the head rules groups of ids out, the head decides the rest.

The token is the one that ``lm_head_sample`` draws from the same head, for the same noise. Three launches (four where
``ScreenConfig.listed`` lists the groups first):

    quantize_hidden   hidden states in fixed point
    screen_head       bounds of the perturbed log-mass of every group of 16 ids, on the integer tensor cores
    rescore_groups    the groups that could still win, from the head itself; the token inside the best

With an error bound b (``int8_head.py``) at temperature t, at most e^(2 b / t) groups are left to rescore on average
over the noise, whatever the vocabulary and the distribution. Where these are many the answer is late, never wrong; the
counters of ``ScreenWorkspace`` say how often.

A truncated batch takes some more. Those after certify_truncated end at once where every row is answered:

    bound_truncated    a logit below it does not matter to a row's top-k; which rows race (after screen_head)
    certify_truncated  the rows whose token the truncation surely allows are answered; a higher bound for the others,
                       which are open (after rescore_groups)
    list_ids           single ids of open rows that could reach it, in a batch of MAX_ID_ROWS rows or fewer
    read_ids           logits of these ids: only the groups of those that do reach it are read
    read_groups        these groups
    draw_rescored      the token, where what was read is certain to decide it
    read_groups        where it is not, for want of the mass of others: those whose mass is known least
    draw_rescored      the tokens of these rows
    read_groups        all logits of the rows that are left
    search_truncated   their tokens
"""

from __future__ import annotations

import math

import torch

from .config import DEFAULT_TRUNCATION, ScreenConfig, TruncationConfig
from .int8_head import Int8Head
from .params import BatchParams, LMHead, SampleOutput
from .rescore import RescorePass, rescore_groups
from .screen import quantize_hidden, screen_head
from .screened_truncated import bound_truncated, certify_truncated, draw_rescored, list_ids, read_groups, read_ids
from .search_truncated import search_truncated
from .workspace import MAX_ID_ROWS, ScreenWorkspace, Workspace


def screened_sample(
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    int8_head: Int8Head,
    params: BatchParams,
    config: ScreenConfig,
    *,
    workspace: ScreenWorkspace | None = None,
    head_workspace: Workspace | None = None,
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION,
) -> SampleOutput:
    """Draw one token per row of ``hidden``; as ``lm_head_sample`` without logprobs, of which it has the invariants.

    int8_head: of ``head``, built from what its weight holds now. A truncation is fast where every such row has a top-k
    of ``truncation_config.max_small_top_k`` or less; others read the whole head besides. Edits have positive
    ``scaling``. head_workspace: where truncated rows leave logits, ``head_workspace.last_buffer``, of the groups that
    were read.

    Raises ValueError for a tensor of another shape, dtype, layout or device, an ``int8_head`` of another head, a scale
    of logits that is not positive, and a truncation on a shard.
    """
    head.check(hidden)
    num_rows, spec = hidden.shape[0], head.spec
    if head.logit_scale is not None and not 0 < head.logit_scale < math.inf:
        raise ValueError(f"logit_scale is {head.logit_scale}; expected a positive number or None")
    params.check("hidden", hidden, spec)
    int8_head.check(head)
    num_groups, width = int8_head.num_groups, int8_head.weight.shape[1]
    if workspace is None:
        workspace = ScreenWorkspace(num_groups, width, max(num_rows, 1), hidden.device)
    workspace.check(num_rows, num_groups, width)
    if num_rows == 0:
        return SampleOutput.empty(0, hidden.device, False)
    quantize_hidden(hidden, workspace, config)
    screen_head(head, int8_head, num_rows, params, workspace, config)
    if params.truncation is None:
        return rescore_groups(hidden, head, params, workspace, config)
    if head_workspace is None:
        head_workspace = Workspace(1, hidden.device)
    buffer = head_workspace.logits_buffer(num_rows, spec, head.rounding, edited=params.makes_logits)
    size = spec.vocab_size
    bound_truncated(num_rows, size, params, workspace, buffer, config, truncation_config)
    output = rescore_groups(hidden, head, params, workspace, config, buffer)
    certify_truncated(output, size, params, workspace, buffer, config, truncation_config)
    if num_rows <= MAX_ID_ROWS:
        list_ids(num_rows, size, workspace, buffer, config)
        read_ids(hidden, head, params, workspace, buffer, config)
    read_groups(hidden, head, params, workspace, config, buffer, RescorePass.POSSIBLE)
    draw_rescored(output, size, params, workspace, buffer, config, truncation_config)
    read_groups(hidden, head, params, workspace, config, buffer, RescorePass.WIDE)
    draw_rescored(output, size, params, workspace, buffer, config, truncation_config, again=True)
    read_groups(hidden, head, params, workspace, config, buffer, RescorePass.ALL)
    search_truncated(buffer, params, spec, output, truncation_config)
    return output
