"""Logprobs of given ids: from a row's logits where these are in memory, else from the rows of the head with these ids.

A row of the head is ``2 D`` bytes and a logit 2 or 4. A few ids cost less from the head than a GEMM whose ``[B, V]``
logits are in memory; a log-mass must be known, which a draw with logprobs leaves (``SampleOutput.log_mass``). The
products are summed and rounded as in the fused pass, by the code of the rescoring: a logit is the same on both ways.

Ids are given per row, ``[B, m]``, or once for all rows, ``[1, m]``: then a row of the head is read once per 16 rows of
the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import MIN_RESCORED_ROWS, cdiv
from .epilogue import find_edits, invert_temperature
from .launch import launch, resident_programs
from .logit_summary import (
    LOWEST_LOGPROB,
    NUM_WARPS,
    LogitRows,
    RowSummary,
    check_rows,
    features_of,
    finish_logits,
    logprobs_by_log_mass,
    logprobs_by_mass,
    mass_constants,
    mass_of_tiles,
    temperature_of,
    untruncated,
)
from .params import ROW_POINTERS, TRITON_DTYPES, BatchParams, LMHead
from .reduce_splits import log_mass_of
from .rescore import logits_of_ids

IDS_PER_PROGRAM = 128  # of a row, from its logits
# From the head: rows of a tile that takes the instruction of the fused pass, and elements per step, by itemsize.
_TILE_IDS = 64
_TILE_STEPS = {2: 128, 4: 32}
_STAGES = 3
_FEW_IDS = 16  # of a tile, where programs would be few
_LOWEST = tl.constexpr(LOWEST_LOGPROB)


@triton.jit(
    do_not_specialize=["num_ids", "ids_stride", "num_tiles", "vocab_size", "vocab_start", "given_edits"],
    do_not_specialize_on_alignment=["temperature_ptr", "ids_ptr", "tile_mass_ptr", "log_mass_ptr", "own_mass_ptr"],
)
def gather_logprobs_kernel(
    raw_ptr,  # [B, >= V]
    temperature_ptr,  # [B] f32, or None: 1 in every row
    ids_ptr,  # [B or 1, m] i64, absolute
    edits,  # EditOperands, or None
    tile_mass_ptr,  # [B, T, 2] f32; or None, where there is a log-mass
    log_mass_ptr,  # [B, 2] f32, or None
    logprobs_ptr,  # [B, m] f32, out
    own_mass_ptr,  # [B, 2] f32, out: the log-mass of the tiles; or None
    num_ids,  # m
    ids_stride,  # m, or 0: the same ids in every row
    num_tiles,
    vocab_size,
    vocab_start,
    raw_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    LOGITS_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    programs = tl.cdiv(num_ids, BLOCK_I)
    row = (tl.program_id(0) // programs).to(tl.int64)
    places = (tl.program_id(0) % programs) * BLOCK_I + tl.arange(0, BLOCK_I)
    exists = places < num_ids
    absolute = tl.load(ids_ptr + row * ids_stride + places, mask=exists, other=-1)
    inside = (absolute >= vocab_start) & (absolute < vocab_start + vocab_size)
    ids = tl.where(inside, absolute - vocab_start, 0).to(tl.int32)
    raw = tl.load(raw_ptr + row.to(tl.int64) * raw_stride + ids, mask=inside, other=0.0)
    logits = finish_logits(
        raw, inside, ids, row.to(tl.int32), vocab_start, logit_scale, softcap, edits, given_edits, LOGITS_DTYPE
    )
    inv_temperature = temperature_of(temperature_ptr, row)
    if log_mass_ptr is None:
        largest, total = mass_of_tiles(tile_mass_ptr, row, num_tiles, inv_temperature, BLOCK_T)
        log_total = tl.log(total)
        logprobs = logprobs_by_mass(logits, largest, log_total, inv_temperature)
        if own_mass_ptr is not None:
            high, low = log_mass_of(largest, log_total, inv_temperature)
            tl.store(own_mass_ptr + row * 2, high)
            tl.store(own_mass_ptr + row * 2 + 1, low)
    else:
        high, low = tl.load(log_mass_ptr + row * 2), tl.load(log_mass_ptr + row * 2 + 1)
        logprobs = logprobs_by_log_mass(logits, high, low, inv_temperature)
    tl.store(logprobs_ptr + row * num_ids + places, tl.where(inside, logprobs, _LOWEST), mask=exists)


def gather_logprobs(
    rows: LogitRows,
    ids: torch.Tensor,
    *,
    summary: RowSummary | None = None,
    own_mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B, m]`` float32 logprobs of given ids, from ``rows``; after a pass over these, where ``summary`` has no mass.

    ids: ``[B, m]`` int64, absolute vocabulary ids; or ``[1, m]``, the same for all rows. Rows with fewer ids are filled
    with -1. An id that the columns of the logits do not hold has ``LOWEST_LOGPROB``, as has a forbidden one: with the
    log-mass of the whole vocabulary, the largest over its parts is the id's. No logprob is above 0; an id of a row
    without an allowed id has NaN. summary: as in ``top_logprobs``. own_mass: ``[B, 2]`` float32, where the log-mass of
    the columns is written, as in ``SampleOutput``; for a summary without one, and at least one id.

    Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    num_rows, spec = rows.num_rows, rows.spec
    num_ids = check_ids(ids, num_rows, rows.logits)
    known = rows.complete(summary, ranked=False)
    if own_mass is not None:
        check_rows("own_mass", own_mass, (num_rows, 2), torch.float32, rows.logits)
        if known.log_mass is not None or num_ids == 0:
            raise ValueError(f"own_mass with {num_ids} ids; expected 1 or more, and no log_mass in the summary")
    logprobs = torch.empty(num_rows, num_ids, dtype=torch.float32, device=rows.logits.device)
    if logprobs.numel() == 0:
        return logprobs
    launch(
        gather_logprobs_kernel,
        num_rows * cdiv(num_ids, IDS_PER_PROGRAM),
        (
            rows.logits,
            rows.temperature,
            ids,
            rows.features.edits,
            known.tile_mass if known.log_mass is None else None,
            known.log_mass,
            logprobs,
            own_mass,
            num_ids,
            0 if ids.shape[0] < num_rows else num_ids,
            rows.num_tiles,
            spec.vocab_size,
            spec.vocab_start,
            rows.stride,
            rows.features.logit_scale,
            rows.features.softcap,
            rows.features.given_edits,
        ),
        {**mass_constants(rows), "BLOCK_I": IDS_PER_PROGRAM},
        NUM_WARPS,
        (*rows.variant, known.log_mass is None, own_mass is None),
    )
    return logprobs


@triton.jit(
    do_not_specialize=["num_rows", "num_ids", "num_live", "vocab_size", "vocab_start", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, "ids_ptr", "log_mass_ptr"],
)
def head_logprobs_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    temperature_ptr,  # [B] f32, or None: 1 in every row
    ids_ptr,  # [B, m] i64, absolute; or [1, m]
    log_mass_ptr,  # [B, 2] f32
    edits,  # EditOperands, or None
    logprobs_ptr,  # [B, m] f32, out
    num_rows,
    num_ids,  # m
    num_live,  # ids of a tile, BLOCK_V or fewer
    vocab_size,
    vocab_start,
    weight_stride,
    hidden_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    SHARED: tl.constexpr,  # the ids of all rows are the same
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(num_ids, num_live)
    block = tl.program_id(0) // tiles
    lanes = tl.arange(0, BLOCK_B)
    if SHARED:
        offs_b = block * BLOCK_B + lanes
        mask_b = offs_b < num_rows
        list_ptr = ids_ptr
    else:  # a tile has the ids of one row, which is alone in it
        offs_b = block + lanes * 0
        mask_b = lanes == 0
        list_ptr = ids_ptr + block.to(tl.int64) * num_ids
    slots = tl.arange(0, BLOCK_V)
    places = (tl.program_id(0) % tiles) * num_live + slots
    exists = (slots < num_live) & (places < num_ids)
    absolute = tl.load(list_ptr + places, mask=exists, other=-1)
    inside = (absolute >= vocab_start) & (absolute < vocab_start + vocab_size)
    ids = tl.where(inside, absolute - vocab_start, 0).to(tl.int32)
    logits = logits_of_ids(
        weight_ptr,
        hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + tl.arange(0, BLOCK_D)[:, None],
        ids,
        inside,
        offs_b,
        mask_b,
        vocab_start,
        weight_stride,
        logit_scale,
        softcap,
        edits,
        find_edits(edits, given_edits, offs_b, mask_b),
        D,
        LOGITS_DTYPE,
        BLOCK_D,
        STAGES,
        True,
    )
    inv_temperature = tl.full([BLOCK_B], 1.0, tl.float32)
    if temperature_ptr is not None:
        _, inv_temperature = invert_temperature(tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0))
    high = tl.load(log_mass_ptr + offs_b * 2, mask=mask_b, other=0.0)
    low = tl.load(log_mass_ptr + offs_b * 2 + 1, mask=mask_b, other=0.0)
    logprobs = logprobs_by_log_mass(logits, high[None, :], low[None, :], inv_temperature[None, :])
    out = offs_b.to(tl.int64)[None, :] * num_ids + places[:, None]
    tl.store(logprobs_ptr + out, tl.where(inside[:, None], logprobs, _LOWEST), mask=exists[:, None] & mask_b[None, :])


def head_logprobs(
    hidden: torch.Tensor,
    head: LMHead,
    ids: torch.Tensor,
    log_mass: torch.Tensor,
    params: BatchParams | None = None,
    *,
    original: bool = False,
) -> torch.Tensor:
    """``[B, m]`` float32 logprobs of given ids, from ``[B, D]`` hidden states and the head's rows with these ids.

    ids: as in ``gather_logprobs``. log_mass: ``[B, 2]`` float32, as ``SampleOutput.log_mass``, at the temperatures that
    are asked for: of the head's logits, or of all parts of a vocabulary. params, original: as in ``LogitRows``. The
    result is as in ``gather_logprobs``.

    Raises ValueError for a tensor of another shape, dtype, layout or device, and for a quantised head.
    """
    head.check(hidden)
    head.check_not_quantised()
    num_rows, spec, weight, device = hidden.shape[0], head.spec, head.weight, hidden.device
    if params is not None:
        params = untruncated(params)
        params.check("hidden", hidden, spec)
    num_ids = check_ids(ids, num_rows, hidden)
    check_rows("log_mass", log_mass, (num_rows, 2), torch.float32, hidden)
    logprobs = torch.empty(num_rows, num_ids, dtype=torch.float32, device=device)
    if logprobs.numel() == 0:
        return logprobs
    temperature = None if params is None or original else params.temperature
    features = features_of(params, spec, logprobs, ids.new_empty(1, dtype=torch.int32))
    shared = ids.shape[0] < num_rows
    blocks = cdiv(num_rows, MIN_RESCORED_ROWS) if shared else num_rows
    few = blocks * cdiv(num_ids, _TILE_IDS) < resident_programs(device, 1)
    live = _FEW_IDS if few else _TILE_IDS
    launch(
        head_logprobs_kernel,
        blocks * cdiv(num_ids, live),
        (
            weight,
            hidden,
            temperature,
            ids,
            log_mass,
            features.edits,
            logprobs,
            num_rows,
            num_ids,
            live,
            spec.vocab_size,
            spec.vocab_start,
            weight.stride(0),
            hidden.stride(0),
            features.logit_scale,
            features.softcap,
            features.given_edits,
        ),
        {
            "D": hidden.shape[1],
            "LOGITS_DTYPE": TRITON_DTYPES[head.rounding],
            "SHARED": shared,
            "BLOCK_B": MIN_RESCORED_ROWS,
            "BLOCK_V": _TILE_IDS,
            "BLOCK_D": _TILE_STEPS[weight.element_size()],
            "STAGES": _STAGES,
        },
        NUM_WARPS,
        (
            device.index,
            head.variant,
            hidden.stride(0),
            hidden.data_ptr() % 16 == 0,
            temperature is None,
            features.variant,
        ),
    )
    return logprobs


def check_ids(ids: torch.Tensor, num_rows: int, like: torch.Tensor, name: str = "ids") -> int:
    """m. Raises ValueError unless ``ids`` is contiguous ``[B, m]`` or ``[1, m]`` int64 on the device of ``like``."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] not in (1, num_rows):
        shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"{name} is {shape}; expected a tensor of shape ({num_rows}, m) or (1, m)")
    check_rows(name, ids, tuple(ids.shape), torch.int64, like)
    return ids.shape[1]
