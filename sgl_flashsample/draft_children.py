"""Draws for the nodes of a tree of drafts: beside the drawn id of each row, the ids that are next best.

Where a path has left its splits in a workspace, one launch more reads them (``kernels/draft_children.py``). In host
memory the scores of all ids are computed as they are defined: slow, for tests and small models.
"""

from __future__ import annotations

import torch

from . import paths
from .cpu_path import draws_in_host_memory
from .kernels.config import ReadConfig, TileConfig
from .kernels.draft_children import Children, Splits, best_ids
from .kernels.params import BatchParams, LogitsSpec
from .kernels.reference import best_ids_ref, transform_ref
from .kernels.sample_own_ids import OwnIds, sample_own_ids
from .kernels.workspace import Workspace
from .kinds import Config


def children_of_hidden(
    config: Config,  # of the fused pass, or of a reader
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    parts: paths.Parts,
    number: int,
) -> Children:
    """``number`` ids of each row. Raises ValueError for arguments that do not fit."""
    lm_head = parts.lm_head
    if draws_in_host_memory(hidden.device):
        logits = paths.compute_logits(hidden, lm_head, parts.workspace)[:, : lm_head.vocab_size]
        return _best(_transformed(logits, lm_head.spec), params, number)
    num_rows = max(1, len(hidden))
    parts = parts.with_scratch([config], num_rows)
    assert parts.workspace is not None and isinstance(config, ReadConfig | TileConfig)
    paths.launch(config, hidden, params, parts)
    return best_ids(parts.workspace, Splits.of_head(lm_head, num_rows, config), params, lm_head.spec, number)


def children_of_own_ids(
    logits: torch.Tensor,  # [B, H] or wider
    own: OwnIds,
    spec: LogitsSpec,
    params: BatchParams,
    number: int,
    workspace: Workspace | None = None,
) -> Children:
    """``number`` of the ids in ``own`` of each row of their logits. Raises ValueError for arguments that do not fit."""
    if draws_in_host_memory(logits.device):
        seen = _transformed(logits[:, : own.size], spec)
        wide = seen.new_full((len(logits), own.vocab_size), float("-inf"))
        return _best(wide.index_copy_(1, own.token_ids[: own.size], seen), params, number)
    num_rows, config = max(1, len(logits)), paths._reader_of(logits, spec, params)[2]
    splits = Splits.of_own_ids(own, num_rows, config)
    with paths.on_device_of(logits):
        workspace = Workspace.for_splits(splits.number, num_rows, logits.device, workspace)
        sample_own_ids(logits, own, spec, params, config, workspace=workspace)
        return best_ids(workspace, splits, params, spec, number)


def _transformed(logits: torch.Tensor, spec: LogitsSpec) -> torch.Tensor:
    rounding = logits.dtype if spec.logits_dtype is None else spec.logits_dtype
    return transform_ref(logits.double(), rounding, logit_scale=spec.logit_scale, softcap=spec.softcap)


def _best(logits: torch.Tensor, params: BatchParams, number: int) -> Children:
    ids, scores = best_ids_ref(logits, params.temperature, params.seed, params.position, number)
    return Children(ids, scores.float())
