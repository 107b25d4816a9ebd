"""One token per row, straight from the hidden states: LM head, softmax and sampling in one pass.

    token[b] ~ softmax(logits[b] / temperature[b])   or   argmax(logits[b]) where temperature[b] <= 0
    logits   = softcap(logit_scale * (hidden @ weight.T))

without ``[B, V]`` in memory (FlashSampling paper, section 3.2; group factorization: Lemma 4.3).

Two launches. ``lm_head_sample_kernel`` is a persistent GEMM with the head as its left operand: P
programs (per block of rows) walk the vocabulary tiles, and each keeps, per row, the best perturbed
group of 16 ids and that group's logits. ``reduce_parts_kernel`` takes the best of the P parts and
draws the token inside its group.

A row with top-k, top-p or min-p also leaves its logits behind (2 bytes each where they are bf16), and
``draw_truncated`` is the second launch; a third is empty for most batches. Other rows leave nothing.

The head is read once per block of rows. Not for a batch so large that a GEMM with ``[B, V]`` output
is faster than this one: a dispatcher's business, not this file's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import rng
from .arguments import check_batch, feature_arguments, reduction_arguments, transform_arguments, workspace_for
from .draw_truncated import draw_truncated
from .epilogue import bound_logits, edit_logits, score_groups, transform_logits
from .features import LogitEdits, Truncation
from .head import EDIT_POINTERS, ROW_POINTERS, LMHead, Workspace
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
from .tiles import DEFAULT_DRAW, DrawConfig, TileConfig
from .truncates import truncates


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "vocab_start", "num_parts", "kept_groups"),
        *("additive_stride", "scaling_stride", "mask_stride", "bias_stride", "mask_words", "given_edits"),
    ],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *EDIT_POINTERS, *OUTPUTS],
)
def lm_head_sample_kernel(
    weight,  # [V, D] pointer, or a descriptor of its [BLOCK_V, BLOCK_D] blocks
    hidden,  # [B, D] pointer, or a descriptor of its [BLOCK_B, BLOCK_D] blocks
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    score_ptr,  # out [P * LEFT, B] f32, the part's best perturbed groups
    group_ptr,  # out [P * LEFT, B] i32, their absolute ids
    logits_ptr,  # out [P * LEFT, B, GROUP_SIZE] f32, their logits
    lse_ptr,  # out [P * LEFT, B, 2] f32, the largest log-mass of a group, and its exp-sum relative to that
    arrived_ptr,  # [B] i32, as the next three for ONE_LAUNCH
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    kept_ptr,  # out [B, kept_width], the logits of rows with a truncation
    peak_ptr,  # out [B, kept_width / GROUP_SIZE] f32, their largest logit per group
    second_ptr,  # out [P * LEFT, B] f32, with a truncation: the second-best perturbed groups
    edit_rows_ptr,  # [B] i32
    additive_ptr,  # [B, V] f32
    scaling_ptr,  # [B, V] f32
    mask_ptr,  # [B, W] i32 or [B, V] bool
    bias_ptr,  # [B, V] f32
    num_rows,
    vocab_size,
    vocab_start,
    num_parts,
    weight_stride,
    hidden_stride,
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
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    RETURN_LOGPROB: tl.constexpr,
    TRUNCATE: tl.constexpr,
    EDIT: tl.constexpr,
    EDIT_ROWS: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    WEIGHT_TMA: tl.constexpr,
    HIDDEN_TMA: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    LEFT: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    BOUNDED: tl.constexpr = EDIT or TRUNCATE or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    # Programs that share a vocabulary tile are neighbours: all but the first read it from L2.
    part = tl.program_id(0) // num_row_blocks
    first_row = (tl.program_id(0) % num_row_blocks) * BLOCK_B
    offs_b = first_row + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, NUM_GROUPS)
    if not HIDDEN_TMA:
        hidden_ptrs = hidden + offs_b.to(tl.int64)[None, :] * hidden_stride + offs_d[:, None]  # [BLOCK_D, BLOCK_B]
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy = temperature <= 0.0
    inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    # Seeds and positions are loaded as whole [NUM_GROUPS, BLOCK_B] blocks. A broadcast would do, but the
    # compiler then recomputes the noise in the accumulator's layout: eight times, once per lane of a group.
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    if TRUNCATE:
        cut = truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
        keep = as_bits(cut & ~greedy & mask_b, BLOCK_B)
        kept_width = kept_groups * rng.GROUP_SIZE
    edits = tl.zeros([BLOCK_B], tl.int32) + given_edits
    if EDIT_ROWS:
        edits &= tl.load(edit_rows_ptr + offs_b, mask=mask_b, other=0)
    edit_ptrs = (additive_ptr, scaling_ptr, mask_ptr, bias_ptr)
    edit_strides = (additive_stride, scaling_stride, mask_stride, bias_stride)

    # Per group slot of the tile (part.py), with the winner's logits in registers beside it.
    best_score = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    second_score = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    best_tile = tl.full([NUM_GROUPS, BLOCK_B], 0, tl.int32) + part
    best_logits = tl.full([NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B], float("-inf"), tl.float32)
    lse_peak = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    lse_mass = tl.zeros([NUM_GROUPS, BLOCK_B], tl.float32)
    for tile in tl.range(part, tl.cdiv(vocab_size, BLOCK_V), num_parts, flatten=FLATTEN):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        acc = tl.zeros([BLOCK_B, BLOCK_V] if ROWS_FIRST else [BLOCK_V, BLOCK_B], tl.float32)
        for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            mask_d = d + offs_d < D
            if WEIGHT_TMA:
                blk_w = weight.load([first, d])
            else:
                blk_w = tl.load(
                    weight + offs_v.to(tl.int64)[:, None] * weight_stride + (d + offs_d)[None, :],
                    mask=(offs_v < vocab_size)[:, None] & mask_d[None, :],
                    other=0.0,
                )
            if HIDDEN_TMA:
                blk_h = tl.trans(hidden.load([first_row, d]))
            else:
                blk_h = tl.load(hidden_ptrs + d, mask=mask_b[None, :] & mask_d[:, None], other=0.0)
            if ROWS_FIRST:
                acc = tl.dot(tl.trans(blk_h), tl.trans(blk_w), acc, input_precision="ieee")
            else:
                acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")
        if ROWS_FIRST:
            acc = tl.trans(acc)

        logits = transform_logits(acc, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
        if BOUNDED:
            logits = bound_logits(logits, (offs_v < vocab_size)[:, None])
        if EDIT:
            logits = edit_logits(
                logits,
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
        if TRUNCATE:
            tl.store(
                kept_ptr + offs_b[None, :] * kept_width + offs_v[:, None],
                logits.to(kept_ptr.dtype.element_ty),
                mask=(offs_v < kept_width)[:, None] & keep[None, :],
            )
        logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        group = (vocab_start + first) // rng.GROUP_SIZE + offs_g
        in_vocab = first + offs_g * rng.GROUP_SIZE < vocab_size
        score, log_mass, peak = score_groups(logits, in_vocab, inv_temperature, greedy, seed, position, group)
        if TRUNCATE:
            store_peaks(peak_ptr, peak, first // rng.GROUP_SIZE, offs_b, keep, kept_groups)
            second_score = tl.maximum(second_score, tl.minimum(score, best_score))
        better = score > best_score  # strict, and tiles ascend: the first maximum wins a tie
        best_score = tl.where(better, score, best_score)
        best_tile = tl.where(better, tile, best_tile)
        best_logits = tl.where(better[:, None, :], logits, best_logits)
        if RETURN_LOGPROB:
            lse_peak, lse_mass = add_log_mass(log_mass, lse_peak, lse_mass)

    best_group = (vocab_start + best_tile * BLOCK_V) // rng.GROUP_SIZE + offs_g[:, None]
    part_score, part_group, chosen = best_of_slots(best_score, best_group, LEFT)
    best_logits = tl.reshape(best_logits, [NUM_GROUPS // LEFT, LEFT, rng.GROUP_SIZE, BLOCK_B])
    part_logits = tl.sum(tl.where(chosen[:, :, None, :], best_logits, 0.0), axis=0)
    if not BOUNDED:
        part_logits = bound_logits(part_logits, True)
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


def num_parts(head: LMHead, num_rows: int, tile: TileConfig) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    row_blocks = cdiv(num_rows, tile.block_b)
    resident = resident_programs(head.weight.device, tile.ctas_per_sm)
    return max(1, min(resident // row_blocks, cdiv(head.vocab_size, tile.block_v)))


def workspace_slots(head: LMHead, max_rows: int, tile: TileConfig) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this tile."""
    return max(num_parts(head, rows, tile) * rows for rows in range(1, max_rows + 1))


def lm_head_sample(
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    temperature: torch.Tensor,  # [B] f32; 0 or less is greedy
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    tile: TileConfig,
    *,
    truncation: Truncation | None = None,
    edits: LogitEdits | None = None,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    draw: DrawConfig = DEFAULT_DRAW,
) -> Drawn:
    """Draw one token per row of ``hidden``.

    Returns ``token [B] i64`` (absolute ids), ``score [B] f32`` (the winning group's perturbed log-mass;
    its largest logit on greedy rows: the shard with the largest score holds the token of the whole
    vocabulary, ties to the lowest shard) and ``logprob [B] f32`` of the token under
    ``softmax(logits / temperature)`` (temperature 1 on greedy rows), after ``edits``, before ``truncation``; or None.

    Invariants: a token depends on (logits row, truncation, seed, position) alone; every token is in
    ``[vocab_start, vocab_start + vocab_size)``, also when logits are NaN (never drawn; a row of nothing else gives
    ``vocab_start``) or infinite; the first maximum wins a greedy tie; a truncation changes a token only where it
    forbids it.

    Raises ValueError for a tensor of another shape, dtype, layout or device, and for a truncation on a shard.
    """
    head.check(hidden)
    num_rows = hidden.shape[0]
    check_batch("hidden", hidden, head, temperature, seed, position, truncation, edits)
    if num_rows == 0:
        return Drawn.empty(0, hidden.device, return_logprob)
    tile = head.addressed(tile, hidden)
    parts = num_parts(head, num_rows, tile)
    workspace = workspace_for(parts, num_rows, hidden.device, workspace)
    bound = resident_programs(hidden.device, tile.ctas_per_sm)
    left = left_of(truncation is not None, tile.block_v, bound)
    features = feature_arguments(
        num_rows, head, head.rounding, temperature, truncation, edits, return_logprob, workspace, tile.block_b
    )
    reduction = reduction_arguments(tile, position, truncation, return_logprob, workspace, bound)
    transform = transform_arguments(head.logit_scale, head.softcap, head.rounding)
    launch(
        lm_head_sample_kernel,
        parts * cdiv(num_rows, tile.block_b),
        (
            head.blocks(tile),
            TensorDescriptor.from_tensor(hidden, [tile.block_b, tile.block_d]) if tile.hidden_tma else hidden,
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
            head.vocab_size,
            head.vocab_start,
            parts,
            head.weight.stride(0),
            hidden.stride(0),
            *transform.numbers,
            *features.numbers,
        ),
        {
            "D": hidden.shape[1],
            **transform.constants,
            "WHOLE_GROUPS": head.vocab_size % rng.GROUP_SIZE == 0,
            **features.constants,
            "BLOCK_B": tile.block_b,
            "BLOCK_V": tile.block_v,
            "BLOCK_D": tile.block_d,
            "STAGES": tile.stages,
            "FLATTEN": tile.flatten,
            "WEIGHT_TMA": tile.tma,
            "HIDDEN_TMA": tile.hidden_tma,
            "ROWS_FIRST": tile.rows_first,
            "LEFT": left,
            **reduction.constants,
        },
        tile.num_warps,
        (
            hidden.device.index,
            head.variant,
            hidden.stride(0),
            hidden.data_ptr() % 16 == 0,
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
            head.vocab_size,
            head.vocab_start,
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
        head.vocab_size,
        head.vocab_start,
        return_logprob=return_logprob,
        most_parts=bound,
        rows_per_program=tile.reduce_rows,
    )
