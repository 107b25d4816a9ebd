"""What SGLang does to the logits of a batch before it samples, as the tensors that the fused pass reads."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import torch

from ..kernels.features import Edit, LogitEdits
from .plan import Plan
from .rows import Rows, to_device


def edits_of(rows: Rows, plan: Plan, sampling_info: Any) -> LogitEdits | None:
    """The edits of the rows of ``plan`` that are fused; None where none of them has any.

    Raises ValueError for a grammar whose mask is in no form that we know.
    """
    if plan.edit_kinds is None:
        _find_edits(rows, plan, sampling_info)
    kinds = plan.edit_kinds
    if not kinds:
        return None
    additive, scaling = penalties_of(sampling_info) if kinds & (Edit.ADDITIVE | Edit.SCALING) else (None, None)
    return LogitEdits(
        additive=additive,
        scaling=scaling,
        mask=_mask(sampling_info, _fused_grammars(plan, sampling_info)) if kinds & Edit.MASK else None,
        bias=sampling_info.logit_bias if kinds & Edit.BIAS else None,
        rows=plan.edit_rows,
    )


def _find_edits(rows: Rows, plan: Plan, sampling_info: Any) -> None:
    """What the rows of a new plan need, onto the plan: its later steps only look."""
    grammars = _fused_grammars(plan, sampling_info) or [None] * len(rows)
    flags = [
        0 if reason is not None else int(own | Edit.MASK if grammar is not None else own)
        for own, grammar, reason in zip(rows.edits, grammars, plan.reasons, strict=True)
    ]
    plan.edit_kinds = functools.reduce(operator.or_, flags, 0)
    if plan.edit_kinds:
        plan.edit_rows = to_device(flags, torch.int32, rows.seed.device)


def _fused_grammars(plan: Plan, sampling_info: Any) -> list:
    """Per row its grammar, None where another sampler serves it; empty where no row has one."""
    return [
        grammar if reason is None else None
        for grammar, reason in zip(sampling_info.grammars or (), plan.reasons, strict=False)
    ]


def penalties_of(sampling_info: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Additive and scaling penalties of the whole batch, ``[B, V]`` each, or None.

    Overlap mode has accumulated them on its copy already. Elsewhere the penalizers are asked, on a copy as well:
    left on the original, the penalties would be applied beside the penalizers that they come from. Additive ones
    come first in both modes; by themselves, the penalizers have the order of a Python set.
    """
    orchestrator = sampling_info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        sampling_info = copy.copy(sampling_info)
        sampling_info.update_penalties()
    return sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties


def _mask(sampling_info: Any, grammars: list) -> torch.Tensor:
    """The mask of these grammars: SGLang's code fills it, on a copy that nothing else sees."""
    info = copy.copy(sampling_info)
    info.grammars = grammars
    info.update_regex_vocab_mask()
    mask = info.grammar_mask.vocab_mask
    if mask.dim() != 2 or mask.dtype not in (torch.int32, torch.bool) or mask.shape[0] != len(grammars):
        raise ValueError(f"a grammar's mask is {tuple(mask.shape)} {mask.dtype}; expected [B, W] int32 or [B, V] bool")
    return mask
