"""One token per row of logits that are in memory: a GEMM's output, or anyone's (FlashSampling paper, section 5.2).

    token[b] ~ softmax(logits[b] / temperature[b])   or   argmax(logits[b]) where temperature[b] <= 0

in one pass over ``[B, V]``, with the epilogue of ``lm_head_sample`` (the same device functions) and its second launch.
Where a fused GEMM loses to the vendor's, at large batches, this takes over: the same logits give the same token. What
may differ is the order in which the 16 masses of a group are added up, a rounding of the last place of a score: rows
whose two best scores are that close ("near-ties", about one in a million) may go either way.

Programs are small and many. Each walks tiles of one block of rows and keeps the best group's score and place only:
its 16 logits are read again at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .arguments import check_batch, feature_arguments, reduction_arguments, transform_arguments, workspace_for
from .draw_truncated import draw_truncated
from .epilogue import bound_logits, cap_softly, edit_logits, score_groups, transform_logits
from .features import LogitEdits, Truncation
from .head import EDIT_POINTERS, ROW_POINTERS, TRITON_DTYPES, LogitsSource, Workspace
from .integers import cdiv
from .launch import launch, resident_programs
from .part import (
    add_log_mass,
    as_bits,
    best_of_slots,
    left_of,
    left_slots,
    store_log_mass,
    store_part,
    store_peaks,
    store_second,
)
from .reduce_parts import OUTPUTS, Drawn, draw_if_last, reduce_parts
from .tiles import DEFAULT_DRAW, MOST_PARTS, DrawConfig, ReadConfig
from .truncates import truncates


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "vocab_start", "num_parts", "kept_groups"),
        *("additive_stride", "scaling_stride", "mask_stride", "bias_stride", "mask_words", "given_edits"),
    ],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *EDIT_POINTERS, *OUTPUTS],
)
def sample_logits_kernel(
    source_ptr,  # [B, >= V]
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    score_ptr,  # out [P * LEFT, B] f32, like the next three as lm_head_sample_kernel leaves them
    group_ptr,  # out [P * LEFT, B] i32
    logits_ptr,  # out [P * LEFT, B, GROUP_SIZE] f32
    lse_ptr,  # out [P * LEFT, B, 2] f32
    arrived_ptr,  # [B] i32, as the next three for ONE_LAUNCH
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    kept_ptr,  # out [B, kept_width], the logits of rows with a truncation
    peak_ptr,  # out [B, kept_width / GROUP_SIZE] f32, their largest logit per group
    second_ptr,  # out [P * LEFT, B] f32, with a truncation, as lm_head_sample_kernel leaves it
    edit_rows_ptr,  # [B] i32
    additive_ptr,  # [B, V] f32
    scaling_ptr,  # [B, V] f32
    mask_ptr,  # [B, W] i32 or [B, V] bool
    bias_ptr,  # [B, V] f32
    num_rows,
    vocab_size,
    vocab_start,
    num_parts,
    source_stride,
    logit_scale,
    softcap,
    kept_groups,
    additive_stride,
    scaling_stride,
    mask_stride,
    bias_stride,
    mask_words,
    given_edits,
    # constexpr
    LOGITS_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    RETURN_LOGPROB: tl.constexpr,
    TRUNCATE: tl.constexpr,
    EDIT: tl.constexpr,
    EDIT_ROWS: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    LEFT: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    BOUNDED: tl.constexpr = EDIT or TRUNCATE or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    part = tl.program_id(0) // num_row_blocks
    offs_b = (tl.program_id(0) % num_row_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_g = tl.arange(0, NUM_GROUPS)
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    source_rows = source_ptr + (offs_b.to(tl.int64) * source_stride)[None, :]
    # A mask that changes at multiples of 16 alone lets a thread load 16 bytes at a time.
    whole = vocab_size // rng.GROUP_SIZE * rng.GROUP_SIZE
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy = temperature <= 0.0
    inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    # Whole blocks, not broadcasts: the layout of these loads is that of the noise, one value per thread.
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
    position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
    if TRUNCATE:
        kept_width = kept_groups * rng.GROUP_SIZE  # a multiple of 16 to the compiler: stores of 16 bytes
        kept_rows = kept_ptr + (offs_b.to(tl.int64) * kept_width)[None, :]
        cut = truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
        keep = as_bits(cut & ~greedy & mask_b, BLOCK_B)
    edits = tl.zeros([BLOCK_B], tl.int32) + given_edits
    if EDIT_ROWS:
        edits &= tl.load(edit_rows_ptr + offs_b, mask=mask_b, other=0)
    edit_ptrs = (additive_ptr, scaling_ptr, mask_ptr, bias_ptr)
    edit_strides = (additive_stride, scaling_stride, mask_stride, bias_stride)

    best_score = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    second_score = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    best_tile = tl.full([NUM_GROUPS, BLOCK_B], 0, tl.int32) + part
    lse_peak = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    lse_mass = tl.zeros([NUM_GROUPS, BLOCK_B], tl.float32)
    for tile in tl.range(part, tl.cdiv(vocab_size, BLOCK_V), num_parts, num_stages=STAGES):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        in_whole = (offs_v < whole)[:, None] & mask_b[None, :]
        raw = tl.load(source_rows + offs_v[:, None], mask=in_whole)  # what is not loaded is not valid
        if not WHOLE_GROUPS:
            in_rest = (offs_v >= whole) & (offs_v < vocab_size)
            if first + BLOCK_V > whole:
                rest = tl.load(source_rows + offs_v[:, None], mask=in_rest[:, None] & mask_b[None, :], other=0.0)
                raw = tl.where(in_rest[:, None], rest, raw)
        # A softcap keeps the order: without noise, of the largest of a group is enough.
        logits = transform_logits(raw, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP and not ALL_GREEDY)
        logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        in_vocab = first + offs_g * rng.GROUP_SIZE < vocab_size
        if BOUNDED:
            ids = first + offs_g[:, None] * rng.GROUP_SIZE + offs_i[None, :]
            valid = in_vocab[:, None, None] if WHOLE_GROUPS else (ids < vocab_size)[:, :, None]
            logits = bound_logits(logits, valid)
        if EDIT:
            logits = edit_logits(
                tl.reshape(logits, [BLOCK_V, BLOCK_B]),
                (offs_v < vocab_size)[:, None] & mask_b[None, :],
                offs_b,
                (vocab_start + offs_v)[:, None],
                edits,
                edit_ptrs,
                edit_strides,
                mask_words,
                MASK_IS_BOOL,
                BIAS_FIRST,
            )
            logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        if TRUNCATE:
            tl.store(
                kept_rows + offs_v[:, None],
                tl.reshape(logits, [BLOCK_V, BLOCK_B]).to(kept_ptr.dtype.element_ty),
                mask=(offs_v < kept_width)[:, None] & keep[None, :],
            )
        if ALL_GREEDY:
            score = tl.max(logits, axis=1)
            if HAS_SOFTCAP:
                score = cap_softly(score, softcap)
            score = bound_logits(score, in_vocab[:, None])
        else:
            group = (vocab_start + first) // rng.GROUP_SIZE + offs_g
            score, log_mass, peak = score_groups(logits, in_vocab, inv_temperature, greedy, seed, position, group)
        if TRUNCATE:
            store_peaks(peak_ptr, peak, first // rng.GROUP_SIZE, offs_b, keep, kept_groups)
            second_score = tl.maximum(second_score, tl.minimum(score, best_score))
        better = score > best_score  # strict, and tiles ascend: the first maximum wins a tie
        best_score = tl.where(better, score, best_score)
        best_tile = tl.where(better, tile, best_tile)
        if RETURN_LOGPROB:
            lse_peak, lse_mass = add_log_mass(log_mass, lse_peak, lse_mass)

    best_group = (vocab_start + best_tile * BLOCK_V) // rng.GROUP_SIZE + offs_g[:, None]
    part_score, part_group, chosen = best_of_slots(best_score, best_group, LEFT)
    columns = part_group[:, None, :] * rng.GROUP_SIZE - vocab_start + offs_i[None, :, None]
    columns = tl.reshape(columns, [LEFT * rng.GROUP_SIZE, BLOCK_B])
    inside = (columns < vocab_size) & mask_b[None, :]
    part_logits = tl.load(source_rows + columns, mask=inside, other=0.0)
    part_logits = transform_logits(part_logits, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
    part_logits = bound_logits(part_logits, inside)
    if EDIT:
        part_logits = edit_logits(
            part_logits,
            inside,
            offs_b,
            vocab_start + columns,
            edits,
            edit_ptrs,
            edit_strides,
            mask_words,
            MASK_IS_BOOL,
            BIAS_FIRST,
        )
    part_logits = tl.reshape(part_logits, [LEFT, rng.GROUP_SIZE, BLOCK_B])
    out = left_slots(part, num_rows, offs_b, LEFT)
    mask = (out >= 0) & mask_b[None, :]
    store_part(score_ptr, group_ptr, logits_ptr, out, mask, part_score, part_group, part_logits)
    if TRUNCATE:
        store_second(second_ptr, out, mask, best_score, second_score, chosen, LEFT)
    if RETURN_LOGPROB:
        store_log_mass(lse_ptr, out, mask, lse_peak, lse_mass, LEFT)
    if ONE_LAUNCH:
        draw_if_last(
            arrived_ptr,
            score_ptr,
            group_ptr,
            logits_ptr,
            lse_ptr,
            temperature_ptr,
            seed_ptr,
            position_ptr,
            token_ptr,
            best_score_ptr,
            logprob_ptr,
            num_rows,
            num_parts,
            vocab_size,
            vocab_start,
            tl.program_id(0) % num_row_blocks,
            RETURN_LOGPROB,
            BLOCK_B,
            BLOCK_P,
            BLOCK_R,
        )


def most_parts(device: torch.device, config: ReadConfig) -> int:
    """The largest P of any batch."""
    return min(MOST_PARTS, max(config.least_parts, resident_programs(device, config.ctas_per_sm)))


def num_read_parts(vocab_size: int, num_rows: int, config: ReadConfig, device: torch.device) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    row_blocks = cdiv(num_rows, config.block_b)
    wanted = max(config.least_parts, resident_programs(device, config.ctas_per_sm) // row_blocks)
    return max(1, min(wanted, MOST_PARTS, cdiv(vocab_size, config.block_v)))


def read_slots(vocab_size: int, max_rows: int, config: ReadConfig, device: torch.device) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this config."""
    return max(num_read_parts(vocab_size, rows, config, device) * rows for rows in range(1, max_rows + 1))


def sample_logits(
    logits: torch.Tensor,  # [B, >= V] bf16, fp16 or fp32; contiguous rows at any distance
    source: LogitsSource,
    temperature: torch.Tensor,  # [B] f32; 0 or less is greedy
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    config: ReadConfig,
    *,
    truncation: Truncation | None = None,
    edits: LogitEdits | None = None,
    all_greedy: bool = False,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    draw: DrawConfig = DEFAULT_DRAW,
) -> Drawn:
    """Draw one token per row of ``logits``, which are not changed.

    Returns ``token [B] i64``, ``score [B] f32`` and ``logprob [B] f32`` or None, with the meaning and the invariants
    of ``lm_head_sample``: equal logits give equal tokens, near-ties of scores excepted. Columns from
    ``source.vocab_size`` on are never read. all_greedy: the caller knows that every temperature is 0 or less, which
    spares the noise and the exponentials; with another temperature the token is undefined. Fastest where rows start at
    multiples of 16 elements; right anywhere.

    Raises ValueError for a tensor of another shape, dtype, layout or device, and for a truncation on a shard.
    """
    if logits.dim() != 2 or logits.dtype not in TRITON_DTYPES or logits.shape[1] < source.vocab_size:
        raise ValueError(
            f"logits is {tuple(logits.shape)} {logits.dtype}; "
            f"expected [B, {source.vocab_size} or more] in bfloat16, float16 or float32"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits has strides {logits.stride()}; expected rows that are contiguous")
    num_rows, device = logits.shape[0], logits.device
    check_batch("logits", logits, source, temperature, seed, position, truncation, edits)
    if num_rows == 0:
        return Drawn.empty(0, device, return_logprob)
    parts = num_read_parts(source.vocab_size, num_rows, config, device)
    workspace = workspace_for(parts, num_rows, device, workspace)
    rounding = logits.dtype if source.rounding is None else source.rounding
    bound = most_parts(device, config)
    left = left_of(truncation is not None, config.block_v, bound)
    features = feature_arguments(
        num_rows, source, rounding, temperature, truncation, edits, return_logprob, workspace, config.block_b
    )
    reduction = reduction_arguments(config, position, truncation, return_logprob, workspace, bound)
    stride = logits.stride(0) if num_rows > 1 else 0
    transform = transform_arguments(source.logit_scale, source.softcap, rounding)
    launch(
        sample_logits_kernel,
        parts * cdiv(num_rows, config.block_b),
        (
            logits,
            temperature,
            seed,
            position,
            workspace.score,
            workspace.group,
            workspace.logits,
            workspace.lse,
            *reduction.pointers,
            *features.pointers,
            num_rows,
            source.vocab_size,
            source.vocab_start,
            parts,
            stride,
            *transform.numbers,
            *features.numbers,
        ),
        {
            **transform.constants,
            "WHOLE_GROUPS": source.vocab_size % rng.GROUP_SIZE == 0,
            "ALL_GREEDY": all_greedy and truncation is None and edits is None and not return_logprob,
            **features.constants,
            "BLOCK_B": config.block_b,
            "BLOCK_V": config.block_v,
            "STAGES": config.stages,
            "LEFT": left,
            **reduction.constants,
        },
        config.num_warps,
        (
            device.index,
            logits.dtype,
            logits.data_ptr() % 16 == 0,
            (stride % 16 == 0, stride == 1, stride < 2**31),
            None if features.kept is None else features.kept.logits.dtype,
        ),
    )
    if truncation is not None and features.kept is not None:
        return draw_truncated(
            workspace,
            features.kept,
            parts * left,
            temperature,
            seed,
            position,
            truncation,
            source.vocab_size,
            source.vocab_start,
            return_logprob=return_logprob,
            most_parts=bound * left,
            config=draw,
        )
    if reduction.drawn is not None:
        return reduction.drawn
    return reduce_parts(
        workspace,
        parts,
        temperature,
        seed,
        position,
        source.vocab_size,
        source.vocab_start,
        return_logprob=return_logprob,
        most_parts=bound,
        rows_per_program=config.reduce_rows,
    )
