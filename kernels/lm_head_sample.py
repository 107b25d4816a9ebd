"""One token per row, straight from the hidden states: LM head, softmax and sampling in one pass.

    token[b] ~ softmax(logits[b] / temperature[b])   or   argmax(logits[b]) where temperature[b] <= 0
    logits   = softcap(logit_scale * (hidden @ weight.T))

without ``[B, V]`` in memory (FlashSampling paper, section 3.2; group factorization: Lemma 4.3).

Two launches. ``lm_head_sample_kernel`` is a persistent GEMM with the head as its left operand: P
programs (per block of rows) walk the vocabulary tiles, and each keeps, per row, the best perturbed
group of 16 ids and that group's logits. ``reduce_parts_kernel`` takes the best of the P parts and
draws the token inside its group.

The head is read once per block of rows. Not for a batch so large that a GEMM with ``[B, V]`` output
is faster than this one: a dispatcher's business, not this file's.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from . import rng
from .epilogue import score_groups, transform_logits
from .head import ROW_POINTERS, TRITON_DTYPES, LMHead, Workspace
from .reduce_parts import reduce_parts
from .tiles import TileConfig


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_parts"],
    do_not_specialize_on_alignment=ROW_POINTERS,
)
def lm_head_sample_kernel(
    weight,  # [V, D] pointer, or a descriptor of its [BLOCK_V, BLOCK_D] blocks
    hidden_ptr,  # [B, D]
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    score_ptr,  # out [P, B] f32, the part's best perturbed group
    group_ptr,  # out [P, B] i32, its absolute id
    logits_ptr,  # out [P, B, GROUP_SIZE] f32, its logits
    lse_ptr,  # out [P, B, 2] f32, the part's largest log-mass of a group, and its exp-sum relative to that
    num_rows,
    vocab_size,
    vocab_start,
    num_parts,
    weight_stride,
    hidden_stride,
    logit_scale,
    softcap,
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    # Programs that share a vocabulary tile are neighbours: all but the first read it from L2.
    part = tl.program_id(0) // num_row_blocks
    offs_b = (tl.program_id(0) % num_row_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, NUM_GROUPS)
    hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + offs_d[:, None]  # [BLOCK_D, BLOCK_B]
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy = temperature <= 0.0
    inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    # Seeds and positions are loaded as whole [NUM_GROUPS, BLOCK_B] blocks. A broadcast would do, but the
    # compiler then recomputes the noise in the accumulator's layout: eight times, once per lane of a group.
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]

    # The running best is kept per group slot of the tile, [NUM_GROUPS, BLOCK_B], with the winner's logits in
    # registers beside it: no tile needs a reduction across warps, only the program's end does.
    best_score = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    best_tile = tl.full([NUM_GROUPS, BLOCK_B], 0, tl.int32) + part
    best_logits = tl.full([NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B], float("-inf"), tl.float32)
    lse_peak = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    lse_mass = tl.zeros([NUM_GROUPS, BLOCK_B], tl.float32)
    for tile in tl.range(part, tl.cdiv(vocab_size, BLOCK_V), num_parts, flatten=FLATTEN):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        acc = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
        for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            mask_d = d + offs_d < D
            if USE_TMA:
                blk_w = weight.load([first, d])
            else:
                blk_w = tl.load(
                    weight + offs_v.to(tl.int64)[:, None] * weight_stride + (d + offs_d)[None, :],
                    mask=(offs_v < vocab_size)[:, None] & mask_d[None, :],
                    other=0.0,
                )
            blk_h = tl.load(hidden_ptrs + d, mask=mask_b[None, :] & mask_d[:, None], other=0.0)
            acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")

        logits = transform_logits(
            acc, (offs_v < vocab_size)[:, None], logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP
        )
        logits = tl.reshape(logits, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        group = (vocab_start + first) // rng.GROUP_SIZE + offs_g
        score, log_mass = score_groups(logits, inv_temperature, greedy, seed, position, group)
        better = score > best_score  # strict, and tiles ascend: the first maximum wins a tie
        best_score = tl.where(better, score, best_score)
        best_tile = tl.where(better, tile, best_tile)
        best_logits = tl.where(better[:, None, :], logits, best_logits)
        if RETURN_LOGPROB:
            new_peak = tl.maximum(lse_peak, log_mass)
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            lse_mass = lse_mass * tl.exp(lse_peak - shift) + tl.exp(log_mass - shift)
            lse_peak = new_peak

    best_group = (vocab_start + best_tile * BLOCK_V) // rng.GROUP_SIZE + offs_g[:, None]
    part_score = tl.max(best_score, axis=0)
    tied = best_score == part_score[None, :]
    part_group = tl.min(tl.where(tied, best_group, rng.NO_GROUP), axis=0)
    chosen = tied & (best_group == part_group[None, :])
    part_logits = tl.sum(tl.where(chosen[:, None, :], best_logits, 0.0), axis=0)  # [GROUP_SIZE, BLOCK_B]
    out = part * num_rows + offs_b
    tl.store(score_ptr + out, part_score, mask=mask_b)
    tl.store(group_ptr + out, part_group, mask=mask_b)
    logits_offs = out[None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[:, None]
    tl.store(logits_ptr + logits_offs, part_logits, mask=mask_b[None, :])
    if RETURN_LOGPROB:
        part_peak = tl.max(lse_peak, axis=0)
        shift = tl.where(part_peak == float("-inf"), 0.0, part_peak)
        part_mass = tl.sum(lse_mass * tl.exp(lse_peak - shift[None, :]), axis=0)
        tl.store(lse_ptr + out * 2, part_peak, mask=mask_b)
        tl.store(lse_ptr + out * 2 + 1, part_mass, mask=mask_b)


@functools.cache
def _num_programs(device: torch.device, ctas_per_sm: int) -> int:
    if device.type != "cuda":
        return ctas_per_sm  # interpreted: programs run one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count * ctas_per_sm


def num_parts(head: LMHead, num_rows: int, tile: TileConfig) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    row_blocks = triton.cdiv(num_rows, tile.block_b)
    resident = _num_programs(head.weight.device, tile.ctas_per_sm)
    return max(1, min(resident // row_blocks, triton.cdiv(head.vocab_size, tile.block_v)))


def workspace_slots(head: LMHead, max_rows: int, tile: TileConfig) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this tile."""
    return max(num_parts(head, rows, tile) * rows for rows in range(1, max_rows + 1))


def _require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != like.device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
            f"expected contiguous {shape} {dtype} on {like.device}"
        )


def lm_head_sample(
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    temperature: torch.Tensor,  # [B] f32; 0 or less is greedy
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    tile: TileConfig,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw one token per row of ``hidden``.

    Returns ``token [B] i64`` (absolute ids), ``score [B] f32`` (the winning group's perturbed log-mass;
    its largest logit on greedy rows: the shard with the largest score holds the token of the whole
    vocabulary, ties to the lowest shard) and ``logprob [B] f32`` of the token under
    ``softmax(logits / temperature)`` (temperature 1 on greedy rows) or None.

    Invariants: a token depends on (logits row, seed, position) alone; every token is in
    ``[vocab_start, vocab_start + vocab_size)``, also when logits are NaN (never drawn; a row of nothing else gives
    ``vocab_start``) or infinite; the first maximum wins a greedy tie.

    Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    if hidden.dim() != 2 or hidden.dtype != head.weight.dtype or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} {hidden.dtype}; "
            f"expected [B, {head.weight.shape[1]}] {head.weight.dtype} as the head's"
        )
    if hidden.device != head.weight.device or hidden.stride(1) != 1:
        raise ValueError(
            f"hidden is on {hidden.device} with strides {hidden.stride()}; "
            f"expected contiguous rows on {head.weight.device}"
        )
    num_rows = hidden.shape[0]
    _require("temperature", temperature, (num_rows,), torch.float32, hidden)
    _require("seed", seed, (num_rows,), torch.int64, hidden)
    _require("position", position, (num_rows,), torch.int64, hidden)
    if num_rows == 0:
        empty = torch.empty(0, dtype=torch.float32, device=hidden.device)
        return empty.to(torch.int64), empty, empty.clone() if return_logprob else None
    if tile.tma and not head.supports_tma:
        tile = dataclasses.replace(tile, tma=False)
    parts = num_parts(head, num_rows, tile)
    if workspace is None:
        workspace = Workspace(parts * num_rows, hidden.device)
    elif workspace.slots < parts * num_rows:
        raise ValueError(f"workspace has {workspace.slots} slots; expected at least {parts} parts x {num_rows} rows")

    lm_head_sample_kernel[(parts * triton.cdiv(num_rows, tile.block_b),)](
        head.blocks(tile),
        hidden,
        temperature,
        seed,
        position,
        workspace.score,
        workspace.group,
        workspace.logits,
        workspace.lse,
        num_rows,
        head.vocab_size,
        head.vocab_start,
        parts,
        head.weight.stride(0),
        hidden.stride(0),
        1.0 if head.logit_scale is None else head.logit_scale,
        1.0 if head.softcap is None else head.softcap,
        D=hidden.shape[1],
        LOGITS_DTYPE=TRITON_DTYPES[head.rounding],
        HAS_SCALE=head.logit_scale is not None,
        HAS_SOFTCAP=head.softcap is not None,
        RETURN_LOGPROB=return_logprob,
        BLOCK_B=tile.block_b,
        BLOCK_V=tile.block_v,
        BLOCK_D=tile.block_d,
        STAGES=tile.stages,
        FLATTEN=tile.flatten,
        USE_TMA=tile.tma,
        num_warps=tile.num_warps,
    )
    return reduce_parts(
        workspace,
        parts,
        temperature,
        seed,
        position,
        head.vocab_size,
        head.vocab_start,
        return_logprob=return_logprob,
        most_parts=_num_programs(hidden.device, tile.ctas_per_sm),
        rows_per_program=tile.reduce_rows,
    )
