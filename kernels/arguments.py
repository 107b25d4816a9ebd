"""What launchers of kernels that walk vocabulary tiles share: a batch's checks, and its features as arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from . import rng
from .features import LogitEdits, Truncation, require
from .head import TRITON_DTYPES, Kept, LMHead, LogitsSource, Workspace
from .integers import next_power_of_2
from .reduce_parts import Drawn
from .tiles import MOST_FLAGS, ReadConfig, TileConfig


def check_batch(
    name: str,
    rows: torch.Tensor,  # [B, ...], what is drawn from
    source: LMHead | LogitsSource,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    truncation: Truncation | None,
    edits: LogitEdits | None,
) -> None:
    """Raise ValueError unless there is one value per row of ``rows``, which messages call ``name``."""
    num_rows, width = rows.shape[0], source.vocab_start + source.vocab_size
    require("temperature", temperature, (num_rows,), torch.float32, rows)
    require("seed", seed, (num_rows,), torch.int64, rows)
    require("position", position, (num_rows,), torch.int64, rows)
    if truncation is not None:
        truncation.check(num_rows, rows)
        if source.vocab_start:
            raise ValueError(
                f"vocab_start is {source.vocab_start}; expected 0, the whole vocabulary, with a truncation"
            )
    if edits is not None:
        edits.check(num_rows, width, rows)
    if num_rows * (width + rng.GROUP_SIZE) >= 2**31 and (truncation or edits):
        raise ValueError(f"{name} has {num_rows} rows; expected fewer than 2**31 logits with a truncation or edits")


def workspace_for(parts: int, num_rows: int, device: torch.device, given: Workspace | None) -> Workspace:
    """The given scratch, if it has room, or new."""
    if given is None:
        return Workspace(parts * num_rows, device)
    if given.slots < parts * num_rows:
        raise ValueError(f"workspace has {given.slots} slots; expected at least {parts} parts x {num_rows} rows")
    return given


class TransformArguments(NamedTuple):
    """How a logit comes from a dot product. numbers, constants: in the order of the kernels' signatures; constants are
    shared, and stay as they are."""

    numbers: tuple[float, float]
    constants: dict[str, Any]


@functools.lru_cache(maxsize=64)
def transform_arguments(logit_scale: float | None, softcap: float | None, rounding: torch.dtype) -> TransformArguments:
    constants = {
        "LOGITS_DTYPE": TRITON_DTYPES[rounding],
        "HAS_SCALE": logit_scale is not None,
        "HAS_SOFTCAP": softcap is not None,
    }
    numbers = (1.0 if logit_scale is None else float(logit_scale), 1.0 if softcap is None else float(softcap))
    return TransformArguments(numbers, constants)


class FeatureArguments(NamedTuple):
    """pointers, numbers, constants: in the order of the kernels' signatures. kept: where rows with a truncation leave
    their logits, or None."""

    pointers: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    kept: Kept | None


def feature_arguments(
    num_rows: int,
    source: LMHead | LogitsSource,
    rounding: torch.dtype,
    temperature: torch.Tensor,
    truncation: Truncation | None,
    edits: LogitEdits | None,
    return_logprob: bool,
    workspace: Workspace,
    block_b: int,
) -> FeatureArguments:
    """A batch's truncation and edits for ``lm_head_sample_kernel`` and ``sample_logits_kernel``.

    What is not given is not read, but has a type and an alignment: the kernel is the same whatever is given.
    """
    kept = None
    if truncation is not None:
        if block_b > MOST_FLAGS:
            raise ValueError(f"block_b is {block_b}; expected {MOST_FLAGS} or fewer with a truncation")
        kept = kept_for(num_rows, source, rounding, edits, workspace)
    editing = edit_arguments(edits, temperature, workspace.group)
    return FeatureArguments(
        pointers=(
            *truncation_pointers(truncation, temperature),
            workspace.score if kept is None else kept.logits,
            workspace.score if kept is None else kept.peak,
            workspace.second,
            *editing.pointers,
        ),
        numbers=(0 if kept is None else kept.width // rng.GROUP_SIZE, *editing.numbers),
        constants={
            "RETURN_LOGPROB": return_logprob or truncation is not None,  # top-p is a share of the whole mass
            "TRUNCATE": truncation is not None,
            **editing.constants,
        },
        kept=kept,
    )


def truncation_pointers(truncation: Truncation | None, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``other`` in the place of what is not given."""
    return (other,) * 3 if truncation is None else (truncation.top_k, truncation.top_p, truncation.min_p)


def kept_for(
    num_rows: int, source: LMHead | LogitsSource, rounding: torch.dtype, edits: LogitEdits | None, workspace: Workspace
) -> Kept:
    """Where rows with a truncation leave their logits."""
    # bfloat16 holds the logits exactly where they are bfloat16 numbers.
    exact = rounding is torch.bfloat16 and source.softcap is None and not (edits and edits.kinds)
    return workspace.kept(num_rows, source.vocab_size, torch.bfloat16 if exact else torch.float32)


class EditArguments(NamedTuple):
    """pointers, numbers, constants: in the order of the kernels' signatures."""

    pointers: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def edit_arguments(edits: LogitEdits | None, floats: torch.Tensor, integers: torch.Tensor) -> EditArguments:
    """A batch's edits, for the kernels that walk vocabulary tiles.

    floats, integers: any float32 and int32 tensor, in the place of what is not given.
    """
    nothing = (floats, floats, integers, floats)
    given = nothing if edits is None else (edits.additive, edits.scaling, edits.mask, edits.bias)
    tensors = [other if edit is None else edit for edit, other in zip(given, nothing, strict=True)]
    strides = [0 if tensor is other else tensor.stride(0) for tensor, other in zip(tensors, nothing, strict=True)]
    edit_rows = edits.rows if edits is not None else None
    return EditArguments(
        pointers=(floats if edit_rows is None else edit_rows, *tensors),
        numbers=(
            *strides,
            edits.mask.shape[1] if edits is not None and edits.mask is not None else 0,
            int(edits.kinds if edits is not None else 0),
        ),
        constants={
            "EDIT": edits is not None,
            "EDIT_ROWS": edit_rows is not None,
            "MASK_IS_BOOL": edits is not None and edits.mask_is_bool,
            "BIAS_FIRST": edits is not None and edits.bias_before_mask,
        },
    )


class ReductionArguments(NamedTuple):
    """drawn: what the kernel itself draws into; None where another launch does. pointers, constants: in the order of
    the kernels' signatures."""

    drawn: Drawn | None
    pointers: tuple[torch.Tensor, ...]
    constants: dict[str, Any]


def reduction_arguments(
    config: TileConfig | ReadConfig,
    position: torch.Tensor,
    truncation: Truncation | None,
    return_logprob: bool,
    workspace: Workspace,
    most_parts: int,
) -> ReductionArguments:
    """Who draws from the parts: their kernel, in one launch, or the next one."""
    if not config.one_launch or truncation is not None:
        nothing = (workspace.arrived, position, workspace.score, workspace.score)  # of the right types
        return ReductionArguments(None, nothing, {"ONE_LAUNCH": False, "BLOCK_P": 1, "BLOCK_R": 1})
    drawn = Drawn.empty(position.shape[0], position.device, return_logprob)
    constants = {"ONE_LAUNCH": True, "BLOCK_P": next_power_of_2(most_parts), "BLOCK_R": config.reduce_rows}
    return ReductionArguments(drawn, (workspace.arrived, *drawn.pointers), constants)
