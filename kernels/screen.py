"""The first pass of the screened path: bounds on the score of every group of 16 ids, from the INT8 head.

``quantize_hidden`` puts hidden states in fixed point, for the integer tensor cores, and says how far that is from them:

    k = step * (256 hi + lo),   |256 hi + lo| <= 127 * 256,   two int8 limbs per element

``screen_head`` multiplies. The fused pass (``lm_head_sample``) gives a group the score S(x), where x are its 16 logits.
The screen knows each dot product to within an interval (``int8_head.py``). Scale, softcap, rounding and edits are
monotone, so applied to the ends of that interval they give the ends of the logit's; and S is monotone in every logit.
So

    score_hi[g] = S(upper ends) + slack  >=  the fused pass's score of g  >=  S(lower ends) - slack

with the same noise in all three, and a group whose ``score_hi`` is below another one's lower score cannot win:
``threshold``, per row, is the best lower score. An interval that is not finite reaches from -inf to +inf.

slack: S is float32. It is within 2**-15 + 2**-23 |S| of the real number it stands for: 16 weights, each within 2**-22
of itself, their sum within 15 * 2**-24, a logarithm of at most 70 within 2**-22 of itself, a base and a result within
2**-24 (``score_groups``). Two values of S err twice as much; ``slack`` is twice that again, and more. A greedy row's
score is its largest logit, to the bit: no slack.

Which tokens of a truncated row are allowed depends on its largest logits, not on the noise. So there are, per group of
such a row, the ends of its largest logit, ``logit_hi`` and ``max_logit_lo``, and those of its log-mass at the row's
temperature, ``lse_hi`` and ``lse_lo``. In a small batch ``id_hi`` is the upper end of each logit, rounded up to a
float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .config import LIMBS, ScreenConfig, cdiv, next_power_of_2
from .epilogue import (
    bound_logits,
    cap_slack,
    edit_bounds,
    find_edits,
    invert_temperature,
    rows_truncated,
    score_groups,
    transform_logits,
)
from .int8_head import MIN_SCALE, Int8Head, error_bound
from .intrinsics import LN_2, float_to_ordered, log2
from .launch import launch, resident_programs, supports_early_launch
from .params import ROW_POINTERS, TRITON_DTYPES, BatchParams, LMHead
from .workspace import MAX_ID_ROWS, ScreenWorkspace

NO_BEST = tl.constexpr(-(2**63))  # below all that groups write into ``best``
_QUANTIZE_WARPS = 8
_LIMBS = tl.constexpr(LIMBS)
_LARGEST_STEPS = tl.constexpr(127.0 * 256.0)
# Sums of D <= 2**15 squares, in any order, are within 2**-9 of themselves, their roots within 2**-10.
_SUM = tl.constexpr(1.0 + 2.0**-9)
# An element in steps: the reciprocal of a rounded quotient and one product, 4 * 2**-24 of it with room.
_STEPS = tl.constexpr(2.0**-21)
_TINY = tl.constexpr(MIN_SCALE)
_SLACK = tl.constexpr(2.0**-13)
_RELATIVE_SLACK = tl.constexpr(2.0**-20)
# Larger intervals and scores count as infinite: all that is computed from smaller ones is finite.
_MOST = tl.constexpr(2.0**90)
_LOWEST_HALF = tl.constexpr(-65504.0)
_MAX_ID_ROWS = tl.constexpr(MAX_ID_ROWS)
_HALF_ROUNDING, _HALF_TINY = tl.constexpr(2.0**-10), tl.constexpr(2.0**-20)  # more than a float16 can be off by


@triton.jit
def quantize_hidden_kernel(
    hidden_ptr,  # [B, D]
    limbs_ptr,  # out [B * LIMBS, D] i8
    screen,  # ScreenOperands, out: step, norm and error of the hidden states, and the start of a screen
    hidden_stride,
    limbs_stride,
    # constexpr
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # they wait for these programs to end
    row = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    mask = offs_d < D
    hidden = tl.load(hidden_ptr + row.to(tl.int64) * hidden_stride + offs_d, mask=mask, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(hidden)), _TINY * _LARGEST_STEPS) / _LARGEST_STEPS
    in_steps = hidden * (1.0 / step)
    rounded = tl.minimum(tl.maximum(tl.floor(in_steps + 0.5), -_LARGEST_STEPS), _LARGEST_STEPS)
    off = in_steps - rounded
    # Measured in steps: no square overflows, and those that underflow are nothing beside the largest.
    norm = tl.sqrt(tl.sum(in_steps * in_steps)) * _SUM
    error = tl.sqrt(tl.sum(off * off)) * _SUM + norm * _STEPS
    tl.store(screen.hidden_scale + row, step)
    tl.store(screen.hidden_norm + row, norm * (1.0 + _STEPS) * step + _TINY)
    tl.store(screen.hidden_error + row, error * (1.0 + _STEPS) * step + _TINY)
    limbs = limbs_ptr + (row * _LIMBS).to(tl.int64) * limbs_stride + offs_d
    high = tl.floor((rounded + 128.0) * (1.0 / 256.0))
    tl.store(limbs, high.to(tl.int8), mask=mask)
    tl.store(limbs + limbs_stride, (rounded - 256.0 * high).to(tl.int8), mask=mask)
    tl.store(screen.threshold + row, float_to_ordered(tl.full([], float("-inf"), tl.float32)))
    tl.store(screen.best + row, NO_BEST)
    tl.store(screen.candidates + row, 0)


def quantize_hidden(
    hidden: torch.Tensor,  # [B, D], as ``screened_sample`` has checked it
    workspace: ScreenWorkspace,
    config: ScreenConfig,
) -> None:
    """Put the limbs of ``hidden``, their steps and the norms into ``workspace``, and start a screen there."""
    num_rows, width = hidden.shape
    limbs = workspace.limbs
    launch(
        quantize_hidden_kernel,
        num_rows,
        (hidden, limbs, workspace.operands, hidden.stride(0), limbs.stride(0)),
        {
            "D": width,
            "BLOCK_D": next_power_of_2(width),
            "EARLY": config.early and supports_early_launch(hidden.device),
        },
        _QUANTIZE_WARPS,
        (hidden.device.index, hidden.dtype, hidden.stride(0), limbs.stride(0), hidden.data_ptr() % 16 == 0),
    )


@triton.jit
def _slack_of(score, greedy):
    slack = tl.where(tl.abs(score) < _MOST, tl.abs(score) * _RELATIVE_SLACK + _SLACK, 0.0)
    return tl.where(greedy[None, :], 0.0, slack)


@triton.jit
def _bounded(log_mass, largest, unknown):
    """The log-mass of groups, ``unknown`` where it is as good as infinite; -inf where there is no largest logit."""
    return tl.where((tl.abs(log_mass) < _MOST) | (largest == float("-inf")), log_mass, unknown)


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_splits", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def screen_head_kernel(
    weight,  # [V, D] i8 pointer, or a descriptor of its [block_v, block_d] blocks
    limbs,  # [B * LIMBS, D] i8 pointer, or a descriptor of its [block_b * LIMBS, block_d] blocks
    copy,  # Int8Operands
    screen,  # ScreenOperands, of which this kernel writes score_hi, threshold and what is of truncated rows
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands, or None
    edits,  # EditOperands, MaskOperands, or None
    num_rows,
    vocab_size,
    vocab_start,
    num_splits,
    stride,  # distance of the rows of weight and limbs
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_V: tl.constexpr = TILE.block_v
    BLOCK_D: tl.constexpr = TILE.block_d
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    TRUNCATE: tl.constexpr = truncation is not None
    BOUNDED: tl.constexpr = edits is not None or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    split = tl.program_id(0) // num_row_blocks
    first_row = (tl.program_id(0) % num_row_blocks) * BLOCK_B
    offs_b = first_row + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_n = first_row * _LIMBS + tl.arange(0, BLOCK_B * _LIMBS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, NUM_GROUPS)
    hidden_scale = tl.load(screen.hidden_scale + offs_b, mask=mask_b, other=0.0)
    hidden_norm = tl.load(screen.hidden_norm + offs_b, mask=mask_b, other=0.0)
    hidden_error = tl.load(screen.hidden_error + offs_b, mask=mask_b, other=0.0)
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy, inv_temperature = invert_temperature(temperature)
    if TRUNCATE:
        truncated = mask_b & ~greedy & rows_truncated(truncation, offs_b, mask_b, vocab_size)
    # A block with fewer numbers than threads would be loaded in the layout of the sums, and its noise computed there,
    # by every lane of a group. So there are copies of the rows, a thread for each.
    COPIES: tl.constexpr = max(1, TILE.num_warps * 32 // (NUM_GROUPS * BLOCK_B))
    offs_c = first_row + tl.arange(0, COPIES * BLOCK_B) % BLOCK_B
    block_offs = offs_c[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = (offs_c < num_rows)[None, :] & (offs_g >= 0)[:, None]
    found = find_edits(edits, given_edits, offs_b, mask_b)
    # Multiples of 16 to the compiler: a thread loads the edits of neighbouring ids together.
    first_column = vocab_start // rng.GROUP_SIZE * rng.GROUP_SIZE
    end = vocab_size // rng.GROUP_SIZE * rng.GROUP_SIZE if WHOLE_GROUPS else vocab_size

    best_lower = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    for tile in tl.range(split, tl.cdiv(vocab_size, BLOCK_V), num_splits, flatten=TILE.flatten):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        acc = tl.zeros([BLOCK_V, BLOCK_B * _LIMBS], tl.int32)
        for d in tl.range(0, D, BLOCK_D, num_stages=TILE.stages):
            if TILE.tma:
                blk_w = weight.load([first, d])
                blk_h = tl.trans(limbs.load([first_row * _LIMBS, d]))
            else:
                mask_d = d + offs_d < D
                blk_w = tl.load(
                    weight + offs_v.to(tl.int64)[:, None] * stride + (d + offs_d)[None, :],
                    mask=(offs_v < vocab_size)[:, None] & mask_d[None, :],
                    other=0,
                )
                blk_h = tl.load(
                    limbs + offs_n.to(tl.int64)[None, :] * stride + (d + offs_d)[:, None],
                    mask=mask_d[:, None],
                    other=0,
                )
            acc = tl.dot(blk_w, blk_h, acc, out_dtype=tl.int32)

        high, low = tl.split(tl.reshape(acc, [BLOCK_V, BLOCK_B, 2]))
        steps = high.to(tl.float32) * 256.0 + low.to(tl.float32)
        valid = offs_v < vocab_size
        scale = tl.load(copy.scale + offs_v, mask=valid, other=0.0)
        error = tl.load(copy.error + offs_v, mask=valid, other=0.0)
        norm = tl.load(copy.norm + offs_v, mask=valid, other=0.0)
        dots = steps * scale[:, None] * hidden_scale[None, :]
        bound = error_bound(error, norm, hidden_norm, hidden_error)
        known = (bound < _MOST) & (tl.abs(dots) < _MOST)  # not where one is NaN
        SCALED: tl.constexpr = logit_scale is not None  # 0 times what overflows is no number
        logits_lo = transform_logits(dots - bound, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=SCALED)
        logits_hi = transform_logits(dots + bound, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=SCALED)
        if softcap is not None:
            logits_lo -= cap_slack(logits_lo, softcap)
            logits_hi += cap_slack(logits_hi, softcap)
        logits_lo = tl.where(known, logits_lo, float("-inf"))
        logits_hi = tl.where(known, logits_hi, float("inf"))
        if BOUNDED:
            logits_lo = bound_logits(logits_lo, True if WHOLE_GROUPS else valid[:, None])
            logits_hi = bound_logits(logits_hi, True if WHOLE_GROUPS else valid[:, None])
        groups = first // rng.GROUP_SIZE + offs_g
        group = vocab_start // rng.GROUP_SIZE + groups
        if edits is not None:
            columns = (first_column + offs_v)[:, None]
            inside = (offs_v < end)[:, None]
            logits_lo, logits_hi = edit_bounds(logits_lo, logits_hi, inside, offs_b, columns, found, edits, group)
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        in_vocab = groups * rng.GROUP_SIZE < vocab_size
        if TRUNCATE:
            few = num_rows <= _MAX_ID_ROWS  # a mask and no constant: one kernel is compiled ahead, with one row
            rounded = tl.maximum(logits_hi + (tl.abs(logits_hi) * _HALF_ROUNDING + _HALF_TINY), _LOWEST_HALF)
            id_hi = tl.where(rounded < _MOST, rounded, float("inf"))
            id_hi = tl.where(logits_hi == float("-inf"), logits_hi, id_hi)
            out = offs_v[:, None] * num_rows + offs_b[None, :]
            tl.store(screen.id_hi + out, id_hi.to(tl.float16), mask=few & valid[:, None] & truncated[None, :])
        logits_lo = tl.reshape(logits_lo, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        logits_hi = tl.reshape(logits_hi, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        noise = None
        if COPIES > 1:
            noise = rng.exponential(seed, position, group[:, None], rng.SAMPLE, rng.GROUP)
            noise = tl.max(tl.reshape(noise, [NUM_GROUPS, COPIES, BLOCK_B]), axis=1)
        score_lo, _, max_lo = score_groups(logits_lo, in_vocab, inv_temperature, greedy, seed, position, group, noise)
        score_hi, _, max_hi = score_groups(logits_hi, in_vocab, inv_temperature, greedy, seed, position, group, noise)
        if TRUNCATE:  # log-masses, in the layout of the noise: an eighth of the work that their sums would take
            if COPIES == 1:
                noise = rng.exponential(seed, position, group[:, None], rng.SAMPLE, rng.GROUP)
            log_noise = log2(noise) * LN_2
            lse_lo = _bounded(score_lo + log_noise - _slack_of(score_lo, greedy), max_lo, float("-inf"))
            lse_hi = _bounded(score_hi + log_noise + _slack_of(score_hi, greedy), max_hi, float("inf"))
        score_lo -= _slack_of(score_lo, greedy)
        score_hi += _slack_of(score_hi, greedy)
        # A score so large may be one of logits at their limit, or infinite, or none.
        score_hi = tl.where(score_hi < _MOST, score_hi, float("inf"))
        score_lo = tl.where(score_lo < _MOST, score_lo, float("-inf"))
        if TRUNCATE:
            max_hi = tl.where(max_hi < _MOST, max_hi, float("inf"))
            max_lo = tl.where(max_lo < _MOST, max_lo, float("-inf"))
            out = offs_b.to(tl.int64)[None, :] * tl.cdiv(vocab_size, rng.GROUP_SIZE) + groups[:, None]
            mask = in_vocab[:, None] & truncated[None, :]
            tl.store(screen.logit_hi + out, max_hi, mask=mask)
            tl.store(screen.max_logit_lo + out, max_lo, mask=mask)
            tl.store(screen.lse_hi + out, lse_hi, mask=mask)
            tl.store(screen.lse_lo + out, lse_lo, mask=mask)
        best_lower = tl.maximum(best_lower, score_lo)
        tl.store(
            screen.score_hi + groups[:, None] * num_rows + offs_b[None, :],
            score_hi,
            mask=in_vocab[:, None] & mask_b[None, :],
        )
    lower = float_to_ordered(tl.max(best_lower, axis=0))
    tl.atomic_max(screen.threshold + offs_b, lower, mask=mask_b, sem="relaxed")


def screen_head(
    head: LMHead,
    int8_head: Int8Head,
    num_rows: int,
    params: BatchParams,
    workspace: ScreenWorkspace,  # with the hidden states' limbs (``quantize_hidden``)
    config: ScreenConfig,
) -> None:
    """Put what every group could reach into ``workspace``, and what one does reach; of truncated rows, what their
    groups have at least and at most."""
    device, spec = head.weight.device, head.spec
    row_blocks = cdiv(num_rows, config.block_b)
    resident = resident_programs(device, config.ctas_per_sm)
    splits = max(1, min(resident // row_blocks, cdiv(head.vocab_size, config.block_v)))
    early = config.early and supports_early_launch(device)
    features = params.operands(spec, workspace.operands.score_hi, workspace.operands.threshold)
    launch(
        screen_head_kernel,
        splits * row_blocks,
        (
            int8_head.weight_operand(config),
            workspace.limbs_operand(config),
            int8_head.operands,
            workspace.operands,
            params.temperature,
            params.seed,
            params.position,
            features.truncation,
            features.edits,
            num_rows,
            spec.vocab_size,
            spec.vocab_start,
            splits,
            int8_head.weight.stride(0),
            features.logit_scale,
            features.softcap,
            features.given_edits,
        ),
        {
            "D": int8_head.weight.shape[1],
            "LOGITS_DTYPE": TRITON_DTYPES[head.rounding],
            "WHOLE_GROUPS": spec.vocab_size % rng.GROUP_SIZE == 0,
            "TILE": config.screen_tile,
            "EARLY": early,
        },
        config.num_warps,
        (device.index, int8_head.weight.stride(0), features.variant),
        early=early,
    )
