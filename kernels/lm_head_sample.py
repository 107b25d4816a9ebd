"""One token per row, straight from the hidden states: LM head, softmax and sampling in one pass.

    token[b] ~ softmax(logits[b] / temperature[b])   or   argmax(logits[b]) where temperature[b] <= 0
    logits   = softcap(logit_scale * (hidden @ weight.T))

without ``[B, V]`` in memory (FlashSampling paper, section 3.2; group factorization: Lemma 4.3).

Two launches, or one with ``TileConfig.one_launch``, where the last program does the work of the second.
``lm_head_sample_kernel`` is a persistent GEMM with the head as its left operand: P programs (per block of rows) walk
the vocabulary tiles, and each keeps, per row, the best perturbed group of 16 ids and that group's logits.
``reduce_splits_kernel`` takes the best of the P splits and draws the token inside its group.

A truncated row also leaves its logits behind (2 bytes each where they are bf16), and ``sample_truncated`` is the second
launch; a third is empty for most batches. Other rows leave nothing.

A quantised head (float8_e4m3fn and a scale per row) has a launch before these, which writes the hidden states as
float16 (``scale_hidden.py``). Its weights are loaded as pairs and become float16 in registers, one instruction for two,
which is exact; scale and unit multiply the float32 sums, before anything else is done to a logit.

The head is read once per block of rows. For a batch so large that a GEMM with ``[B, V]`` output is faster, a dispatcher
chooses ``sample_logits``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import rng
from .config import DEFAULT_TRUNCATION, TileConfig, TruncationConfig, cdiv
from .epilogue import (
    add_tile,
    best_of_slots,
    bound_logits,
    edit_logits,
    find_edits,
    flags_as_bits,
    invert_temperature,
    pack_bf16,
    rows_truncated,
    score_groups,
    start_split,
    store_group_max,
    store_split,
    transform_logits,
    unpack_bf16,
)
from .launch import launch, resident_programs, supports_early_launch
from .params import ROW_POINTERS, BatchParams, LMHead, QuantizedOperands, SampleOutput
from .reduce_splits import draw_if_last
from .scale_hidden import ORDERED, load_pairs, scale_hidden, weights_as_fp16
from .split_launch import SplitLaunch
from .workspace import Workspace


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "vocab_size", "vocab_start", "num_splits", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def lm_head_sample_kernel(
    weight,  # [V, D] pointer, or a descriptor of its [block_v, block_d] blocks; of a quantised head, pairs or bytes
    hidden,  # [B, D] pointer, or a descriptor of its [block_b, block_d] blocks
    quantized,  # QuantizedOperands, with hidden states in float16; None where the weight is not quantised
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
    weight_stride,
    hidden_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    KEEP_MASS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_V: tl.constexpr = TILE.block_v
    BLOCK_D: tl.constexpr = TILE.block_d
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    HIDDEN_WIDTH: tl.constexpr = D if quantized is None else tl.cdiv(D, ORDERED) * ORDERED
    TRUNCATE: tl.constexpr = truncation is not None
    BOUNDED: tl.constexpr = edits is not None or TRUNCATE or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    # Programs that share a vocabulary tile are neighbours: all but the first read it from L2.
    split = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    # Where there are several blocks, the last one reads from the rows before it what it lacks. With fewer rows it would
    # need less of the hidden states, run ahead of its neighbours, and leave them a tile that is no longer in L2.
    first_row = tl.minimum(row_block * BLOCK_B, tl.maximum(num_rows - BLOCK_B, 0))
    offs_b = first_row + tl.arange(0, BLOCK_B)
    exists = offs_b < num_rows
    mask_b = exists & (offs_b >= row_block * BLOCK_B)
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, NUM_GROUPS)
    if not TILE.hidden_tma:
        hidden_ptrs = hidden + offs_b.to(tl.int64)[None, :] * hidden_stride + offs_d[:, None]  # [BLOCK_D, BLOCK_B]
    if quantized is not None:
        unit = tl.load(quantized.unit + offs_b, mask=exists, other=0.0)
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy, inv_temperature = invert_temperature(temperature)
    # Seeds and positions are loaded as whole [NUM_GROUPS, BLOCK_B] blocks. A broadcast would do, but the
    # compiler then recomputes the noise in the accumulator's layout: eight times, once per lane of a group.
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    if TRUNCATE:
        truncated = rows_truncated(truncation, offs_b, mask_b, vocab_size)
        keep = truncated & ~greedy & mask_b
        if KEEP_ALL:
            keep = mask_b
        keep = flags_as_bits(keep, BLOCK_B)
        buffer_width = num_groups * rng.GROUP_SIZE
    found = find_edits(edits, given_edits, offs_b, mask_b)
    # Multiples of 16 to the compiler: a thread loads the edits of neighbouring ids together.
    first_column = vocab_start // rng.GROUP_SIZE * rng.GROUP_SIZE
    end = vocab_size // rng.GROUP_SIZE * rng.GROUP_SIZE if WHOLE_GROUPS else vocab_size

    state = start_split(split, NUM_GROUPS, BLOCK_B)
    # In half of the registers, a third program of a quantised head has room on a multiprocessor. Other heads have one
    # or two, and packing takes them longer.
    PACKED: tl.constexpr = quantized is not None and edits is None and softcap is None and LOGITS_DTYPE.is_bf16()
    best_logits = tl.full([NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B], float("-inf"), tl.float32)  # in registers, beside it
    if PACKED:
        best_logits = pack_bf16(best_logits)
    for tile in tl.range(split, tl.cdiv(vocab_size, BLOCK_V), num_splits, flatten=TILE.flatten):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        if quantized is not None:  # before the products: no epilogue waits for it
            scale = tl.load(quantized.scale + offs_v, mask=offs_v < vocab_size, other=0.0)
        acc = tl.zeros([BLOCK_B, BLOCK_V] if TILE.rows_first else [BLOCK_V, BLOCK_B], tl.float32)
        for d in tl.range(0, D, BLOCK_D, num_stages=TILE.stages):
            if quantized is not None:
                if TILE.tma:
                    pairs = weight.load([first, d // 2])
                else:
                    pairs = load_pairs(weight, weight_stride, offs_v, d // 2, vocab_size, D, BLOCK_D // 2)
                blk_w = weights_as_fp16(pairs)
            elif TILE.tma:
                blk_w = weight.load([first, d])
            else:
                blk_w = tl.load(
                    weight + offs_v.to(tl.int64)[:, None] * weight_stride + (d + offs_d)[None, :],
                    mask=(offs_v < vocab_size)[:, None] & (d + offs_d < D)[None, :],
                    other=0.0,
                )
            if TILE.hidden_tma:
                blk_h = tl.trans(hidden.load([first_row, d]))
            else:
                blk_h = tl.load(hidden_ptrs + d, mask=exists[None, :] & (d + offs_d < HIDDEN_WIDTH)[:, None], other=0.0)
            if TILE.rows_first:
                acc = tl.dot(tl.trans(blk_h), tl.trans(blk_w), acc, input_precision="ieee")
            else:
                acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")
        if TILE.rows_first:
            acc = tl.trans(acc)
        if quantized is not None:
            acc = acc * unit[None, :] * scale[:, None]

        # On an H200, pairs are faster for plain batches, slower with a truncation, and the same with edits.
        IN_PAIRS: tl.constexpr = edits is None and not TRUNCATE
        logits = transform_logits(acc, logit_scale, softcap, LOGITS_DTYPE, IN_PAIRS, DROP_NAN=True)
        if BOUNDED or KEEP_MASS:  # of whole groups, score_groups knows which ones are valid
            logits = bound_logits(logits, True if WHOLE_GROUPS else (offs_v < vocab_size)[:, None])
        if edits is not None:
            columns = (first_column + offs_v)[:, None]
            groups = (vocab_start + first) // rng.GROUP_SIZE + offs_g
            logits = edit_logits(logits, (offs_v < end)[:, None], offs_b, columns, found, edits, groups)
        if TRUNCATE:
            tl.store(
                buffer.logits + offs_b[None, :] * buffer_width + offs_v[:, None],
                logits.to(buffer.logits.dtype.element_ty),
                mask=(offs_v < buffer_width)[:, None] & keep[None, :],
            )
        logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        group = (vocab_start + first) // rng.GROUP_SIZE + offs_g
        in_vocab = first + offs_g * rng.GROUP_SIZE < vocab_size
        score, mass, peak = score_groups(logits, in_vocab, inv_temperature, greedy, seed, position, group)
        if TRUNCATE:
            store_group_max(buffer, peak, first // rng.GROUP_SIZE, offs_b, keep, num_groups)
        state, better = add_tile(state, tile, score, mass, peak, inv_temperature, TRUNCATE, KEEP_MASS)
        best_logits = tl.where(better[:, None, :], pack_bf16(logits) if PACKED else logits, best_logits)

    best_group = (vocab_start + state.tile * BLOCK_V) // rng.GROUP_SIZE + offs_g[:, None]
    top_score, top_group, chosen = best_of_slots(state.score, best_group, TOP_GROUPS)
    best_logits = tl.reshape(best_logits, [NUM_GROUPS // TOP_GROUPS, TOP_GROUPS, best_logits.shape[1], BLOCK_B])
    top_logits = tl.sum(tl.where(chosen[:, :, None, :], best_logits, 0), axis=0)
    if PACKED:
        top_logits = unpack_bf16(top_logits)
    if not BOUNDED:
        top_logits = bound_logits(top_logits, True)
    store_split(
        splits,
        split,
        num_rows,
        offs_b,
        mask_b,
        state,
        top_score,
        top_group,
        top_logits,
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
            row_block,
            BLOCK_B,
            BLOCK_P,
            TILE.reduce_rows,
        )


def num_splits(head: LMHead, num_rows: int, tile: TileConfig) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    # The splits of a row are a part of the order of its sums.
    row_blocks = 1 if head.batch_invariant else cdiv(num_rows, tile.block_b)
    resident = resident_programs(head.weight.device, tile.ctas_per_sm)
    return max(1, min(resident // row_blocks, cdiv(head.vocab_size, tile.block_v)))


def workspace_slots(head: LMHead, max_rows: int, tile: TileConfig) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this tile."""
    return max(num_splits(head, rows, tile) * rows for rows in range(1, max_rows + 1))


def lm_head_sample(
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    head: LMHead,
    params: BatchParams,
    tile: TileConfig,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION,
) -> SampleOutput:
    """Draw one token per row of ``hidden``.

    Invariants: a token depends on (logits row, truncation, seed, position) alone; every token is in
    ``[vocab_start, vocab_start + vocab_size)``, also when logits are NaN (never drawn; a row of nothing else gives
    ``vocab_start``) or infinite; the first maximum wins a greedy tie; a truncation changes a token only where it
    forbids it.

    A batch-invariant head leaves the logits of all rows, edited, in ``workspace.last_buffer``; its logprobs are read
    from these (``invariant.py``).

    Raises ValueError for a tensor of another shape, dtype, layout or device, for a truncation on a shard, and for
    logprobs of a batch-invariant head.
    """
    head.check(hidden)
    num_rows, spec = hidden.shape[0], head.spec
    if spec.batch_invariant:
        if return_logprob:
            raise ValueError("return_logprob is True; expected False with a batch-invariant head")
        params = params.of_every_kind()
    params.check("hidden", hidden, spec)
    if num_rows == 0:
        return SampleOutput.empty(0, hidden.device, return_logprob)
    splits = num_splits(head, num_rows, tile)
    quantized, early = None, False
    if head.scale is not None:
        workspace = Workspace.for_splits(splits, num_rows, hidden.device, workspace)
        half = workspace.half_hidden(num_rows, hidden.shape[1])
        early = supports_early_launch(hidden.device)
        scale_hidden(hidden, half, early=early)
        hidden, quantized = half.states, QuantizedOperands(head.scale, half.unit)
    tile = head.without_unsupported_tma(tile, hidden)
    bound = resident_programs(hidden.device, tile.ctas_per_sm)
    shared = SplitLaunch(params, spec, head.rounding, tile, splits, bound, workspace, return_logprob)
    launch(
        lm_head_sample_kernel,
        splits * cdiv(num_rows, tile.block_b),
        (
            head.weight_operand(tile),
            TensorDescriptor.from_tensor(hidden, [tile.block_b, tile.block_d]) if tile.hidden_tma else hidden,
            quantized,
            params.temperature,
            params.seed,
            params.position,
            *shared.operands,
            num_rows,
            spec.num_groups,
            spec.vocab_size,
            spec.vocab_start,
            splits,
            head.addressed.stride(0),
            hidden.stride(0),
            shared.features.logit_scale,
            shared.features.softcap,
            shared.features.given_edits,
        ),
        {"D": head.weight.shape[1], **shared.constants, "KEEP_ALL": spec.batch_invariant, "EARLY": early},
        tile.num_warps,
        (hidden.device.index, head.variant, hidden.stride(0), hidden.data_ptr() % 16 == 0, *shared.variant),
        early=early,
        max_registers=tile.max_registers,
    )
    return shared.draw(truncation_config)
