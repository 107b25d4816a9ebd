"""One token per row of logits that are in memory: a GEMM's output, or anyone's (FlashSampling paper, section 5.2).

    token[b] ~ softmax(logits[b] / temperature[b])   or   argmax(logits[b]) where temperature[b] <= 0

in one pass over ``[B, V]``, with the epilogue of ``lm_head_sample`` (the same device functions) and its second launch.
Where a fused GEMM loses to the vendor's, at large batches, this takes over: the same logits give the same token. The
order in which the 16 masses of a group are added up may differ, a rounding of the last place of a score: rows whose two
best scores are that close ("near-ties", about one in a million) may go either way.

Programs are small and many. Each walks tiles of one block of rows and keeps the best group's score and place only:
its 16 logits are read again at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .config import DEFAULT_TRUNCATION, MAX_SPLITS, ReadConfig, TruncationConfig, cdiv
from .epilogue import (
    add_tile,
    best_of_slots,
    bound_logits,
    edit_logits,
    find_edits,
    flags_as_bits,
    invert_temperature,
    rows_truncated,
    score_groups,
    soft_cap,
    start_split,
    store_group_max,
    store_split,
    transform_logits,
)
from .intrinsics import drop_nan
from .launch import launch, resident_programs
from .params import ROW_POINTERS, TRITON_DTYPES, BatchParams, LogitsSpec, SampleOutput
from .reduce_splits import draw_if_last
from .split_launch import SplitLaunch
from .workspace import Workspace


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "vocab_size", "vocab_start", "num_splits", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def sample_logits_kernel(
    raw_ptr,  # [B, >= V], what logits come from
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands, or None
    edits,  # EditOperands, MaskOperands, or None
    splits,  # SplitOperands, out
    buffer,  # BufferOperands, out: logits and group_max of truncated rows; None where there is no truncation
    output,  # SampleOutput, out, where the last program draws; None where the next launch does
    num_rows,
    num_groups,
    vocab_size,
    vocab_start,
    num_splits,
    raw_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    ALL_GREEDY: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    KEEP_MASS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_V: tl.constexpr = TILE.block_v
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    TRUNCATE: tl.constexpr = truncation is not None
    BOUNDED: tl.constexpr = edits is not None or TRUNCATE or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    split = tl.program_id(0) // num_row_blocks
    offs_b = (tl.program_id(0) % num_row_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_g = tl.arange(0, NUM_GROUPS)
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    raw_rows = raw_ptr + (offs_b.to(tl.int64) * raw_stride)[None, :]
    # A mask that changes at multiples of 16 alone lets a thread load 16 bytes at a time.
    whole = vocab_size // rng.GROUP_SIZE * rng.GROUP_SIZE
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy, inv_temperature = invert_temperature(temperature)
    # Whole blocks, not broadcasts: the layout of these loads is that of the noise, one value per thread.
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
    position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
    if TRUNCATE:
        buffer_width = num_groups * rng.GROUP_SIZE  # a multiple of 16 to the compiler: stores of 16 bytes
        buffer_rows = buffer.logits + (offs_b.to(tl.int64) * buffer_width)[None, :]
        truncated = rows_truncated(truncation, offs_b, mask_b, vocab_size)
        keep = flags_as_bits(truncated & ~greedy & mask_b, BLOCK_B)
    found = find_edits(edits, given_edits, offs_b, mask_b)

    state = start_split(split, NUM_GROUPS, BLOCK_B)
    for tile in tl.range(split, tl.cdiv(vocab_size, BLOCK_V), num_splits, num_stages=TILE.stages):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        in_whole = (offs_v < whole)[:, None] & mask_b[None, :]
        raw = tl.load(raw_rows + offs_v[:, None], mask=in_whole)  # an id that is not loaded is not valid
        if not WHOLE_GROUPS:
            in_rest = (offs_v >= whole) & (offs_v < vocab_size)
            if first + BLOCK_V > whole:
                rest = tl.load(raw_rows + offs_v[:, None], mask=in_rest[:, None] & mask_b[None, :], other=0.0)
                raw = tl.where(in_rest[:, None], rest, raw)
        # A softcap keeps the order: without noise, the largest of a group decides, and it alone is capped below.
        capped = None if ALL_GREEDY else softcap
        logits = transform_logits(raw, logit_scale, capped, LOGITS_DTYPE, DROP_NAN=BOUNDED or not ALL_GREEDY)
        logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        in_vocab = first + offs_g * rng.GROUP_SIZE < vocab_size
        if BOUNDED or KEEP_MASS:  # of whole groups, score_groups knows which ones are valid
            ids = first + offs_g[:, None] * rng.GROUP_SIZE + offs_i[None, :]
            logits = bound_logits(logits, True if WHOLE_GROUPS else (ids < vocab_size)[:, :, None])
        if edits is not None:
            logits = edit_logits(
                tl.reshape(logits, [BLOCK_V, BLOCK_B]),
                (offs_v < (whole if WHOLE_GROUPS else vocab_size))[:, None],
                offs_b,
                (vocab_start // rng.GROUP_SIZE * rng.GROUP_SIZE + offs_v)[:, None],
                found,
                edits,
                (vocab_start + first) // rng.GROUP_SIZE + offs_g,
            )
            logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        if TRUNCATE:
            tl.store(
                buffer_rows + offs_v[:, None],
                tl.reshape(logits, [BLOCK_V, BLOCK_B]).to(buffer.logits.dtype.element_ty),
                mask=(offs_v < buffer_width)[:, None] & keep[None, :],
            )
        if ALL_GREEDY:
            score = tl.max(logits, axis=1)
            if softcap is not None:
                score = soft_cap(score, softcap)
            score = bound_logits(drop_nan(score), in_vocab[:, None])
            mass, peak = score, score
        else:
            group = (vocab_start + first) // rng.GROUP_SIZE + offs_g
            score, mass, peak = score_groups(logits, in_vocab, inv_temperature, greedy, seed, position, group)
        if TRUNCATE:
            store_group_max(buffer, peak, first // rng.GROUP_SIZE, offs_b, keep, num_groups)
        state, _ = add_tile(state, tile, score, mass, peak, inv_temperature, TRUNCATE, KEEP_MASS)

    best_group = (vocab_start + state.tile * BLOCK_V) // rng.GROUP_SIZE + offs_g[:, None]
    top_score, top_group, chosen = best_of_slots(state.score, best_group, TOP_GROUPS)
    columns = top_group[:, None, :] * rng.GROUP_SIZE - vocab_start + offs_i[None, :, None]
    columns = tl.reshape(columns, [TOP_GROUPS * rng.GROUP_SIZE, BLOCK_B])
    inside = (columns < vocab_size) & mask_b[None, :]
    top_logits = tl.load(raw_rows + columns, mask=inside, other=0.0)
    top_logits = transform_logits(top_logits, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=True)
    top_logits = bound_logits(top_logits, inside)
    if edits is not None:
        top_logits = edit_logits(top_logits, inside, offs_b, vocab_start + columns, found, edits)
    store_split(
        splits,
        split,
        num_rows,
        offs_b,
        mask_b,
        state,
        top_score,
        top_group,
        tl.reshape(top_logits, [TOP_GROUPS, rng.GROUP_SIZE, BLOCK_B]),
        chosen,
        inv_temperature,
        TRUNCATE,
        KEEP_MASS,
        TOP_GROUPS,
    )
    if TILE.one_launch and not TRUNCATE:
        draw_if_last(
            splits,
            temperature_ptr,
            seed_ptr,
            position_ptr,
            output,
            num_rows,
            num_splits,
            vocab_start + vocab_size,
            tl.program_id(0) % num_row_blocks,
            BLOCK_B,
            BLOCK_P,
            TILE.reduce_rows,
        )


def max_read_splits(device: torch.device, config: ReadConfig) -> int:
    """The largest P of any batch."""
    return min(MAX_SPLITS, max(config.min_splits, resident_programs(device, config.ctas_per_sm)))


def num_read_splits(vocab_size: int, num_rows: int, config: ReadConfig, device: torch.device) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    row_blocks = cdiv(num_rows, config.block_b)
    wanted = max(config.min_splits, resident_programs(device, config.ctas_per_sm) // row_blocks)
    return max(1, min(wanted, MAX_SPLITS, cdiv(vocab_size, config.block_v)))


def read_slots(vocab_size: int, max_rows: int, config: ReadConfig, device: torch.device) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this config."""
    return max(num_read_splits(vocab_size, rows, config, device) * rows for rows in range(1, max_rows + 1))


def sample_logits(
    logits: torch.Tensor,  # [B, >= V] bf16, fp16 or fp32; contiguous rows at any distance
    spec: LogitsSpec,
    params: BatchParams,
    config: ReadConfig,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION,
) -> SampleOutput:
    """Draw one token per row of ``logits``, which are not changed.

    The invariants are those of ``lm_head_sample``: equal logits give equal tokens, near-ties of scores excepted.
    Columns from ``spec.vocab_size`` on are never read. ``params.all_greedy`` spares the noise and the exponentials.
    Fastest where rows start at multiples of 16 elements; right anywhere.

    Raises ValueError for a tensor of another shape, dtype, layout or device, and for a truncation on a shard.
    """
    if logits.dim() != 2 or logits.dtype not in TRITON_DTYPES or logits.shape[1] < spec.vocab_size:
        raise ValueError(
            f"logits is {tuple(logits.shape)} {logits.dtype}; "
            f"expected [B, {spec.vocab_size} or more] in bfloat16, float16 or float32"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits has strides {logits.stride()}; expected rows that are contiguous")
    num_rows, device = logits.shape[0], logits.device
    params.check("logits", logits, spec)
    if num_rows == 0:
        return SampleOutput.empty(0, device, return_logprob)
    splits = num_read_splits(spec.vocab_size, num_rows, config, device)
    bound = max_read_splits(device, config)
    rounding = logits.dtype if spec.logits_dtype is None else spec.logits_dtype
    shared = SplitLaunch(params, spec, rounding, config, splits, bound, workspace, return_logprob)
    plain = params.truncation is None and params.edits is None and not return_logprob
    stride = logits.stride(0) if num_rows > 1 else 0
    launch(
        sample_logits_kernel,
        splits * cdiv(num_rows, config.block_b),
        (
            logits,
            params.temperature,
            params.seed,
            params.position,
            *shared.operands,
            num_rows,
            spec.num_groups,
            spec.vocab_size,
            spec.vocab_start,
            splits,
            stride,
            shared.features.logit_scale,
            shared.features.softcap,
            shared.features.given_edits,
        ),
        {"ALL_GREEDY": params.all_greedy and plain, **shared.constants},
        config.num_warps,
        (
            device.index,
            logits.dtype,
            logits.data_ptr() % 16 == 0,
            (stride % 16 == 0, stride == 1, stride < 2**31),
            *shared.variant,
        ),
    )
    return shared.draw(truncation_config)
