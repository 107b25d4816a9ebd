"""The first pass of the screened path: of every group of 16 ids, how well it could do, from the INT8 head.

The fused pass (``lm_head_sample``) would give a group the score S(x), x being its 16 logits. The screen knows dot
products to within intervals (``int8_head.py``). All that happens to one on its way to a logit is monotone, so the
transforms and edits of an interval's ends are the ends of the logit's; and S is monotone in every logit. So

    upper[g] = S(upper ends) + slack  >=  the fused pass's score of g  >=  S(lower ends) - slack

with the same noise in all three, and a group whose ``upper`` is below another one's lower score cannot win:
``threshold``, per row, is the best lower score. An interval that is not finite reaches from -inf to +inf.

slack: S is float32. It is within 2**-15 + 2**-23 |S| of the real number it stands for: 16 weights, each within 2**-22
of itself, their sum within 15 * 2**-24, a logarithm of at most 70 within 2**-22 of itself, a base and a result within
2**-24 (``score_groups``). Two values of S err twice as much; ``slack`` is twice that again, and more. A greedy row's
score is its largest logit, to the bit: no slack.

A row with a truncation takes its token from what its largest logits are, whatever the noise. Of its groups, ``upper``
is what their largest logit could be, ``reach`` what it is at least, and ``most`` and ``least`` are the ends of their
log-mass at the row's temperature; ``bound_truncated`` makes a threshold of them. In a small batch ``id_upper`` is what
each logit could be, rounded up to a float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .arguments import edit_arguments, transform_arguments, truncation_pointers
from .epilogue import bound_logits, edit_logits, score_groups, transform_logits
from .features import Edit, LogitEdits, Truncation
from .head import EDIT_POINTERS, ROW_POINTERS, LMHead
from .int8_head import ID_ROWS, Int8Head, ScreenWorkspace, room_of
from .integers import cdiv
from .kept_row import ordered
from .launch import launch, resident_programs, starts_early
from .tiles import ScreenConfig
from .truncates import truncates

_SLACK = tl.constexpr(2.0**-13)
_RELATIVE_SLACK = tl.constexpr(2.0**-20)
# Of a soft cap: how far two float32 values of it may be in the wrong order. Its quotient is of numbers up to 2, each
# rounded a few times.
_CAP_SLACK = tl.constexpr(2.0**-20)
# Beyond this, intervals and scores are as good as infinite: everything is finite that is computed from what is below.
_MOST = tl.constexpr(2.0**90)
_SCALING = tl.constexpr(int(Edit.SCALING))
_LEAST_HALF = tl.constexpr(-65504.0)
_ID_ROWS = tl.constexpr(ID_ROWS)
_HALF_ROUNDING, _HALF_TINY = tl.constexpr(2.0**-10), tl.constexpr(2.0**-20)  # more than a float16 can be off by


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "vocab_start", "num_parts"),
        *("additive_stride", "scaling_stride", "mask_stride", "bias_stride", "mask_words", "given_edits"),
    ],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *EDIT_POINTERS],
)
def screen_head_kernel(
    weight,  # [V, D] i8 pointer, or a descriptor of its [BLOCK_V, BLOCK_D] blocks
    terms,  # [B * TERMS, D] i8 pointer, or a descriptor of its [BLOCK_B * TERMS, BLOCK_D] blocks
    scale_ptr,  # [V] f32
    error_ptr,  # [V] f32
    norm_ptr,  # [V] f32
    hidden_scale_ptr,  # [B] f32
    hidden_norm_ptr,  # [B] f32
    hidden_error_ptr,  # [B] f32
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    upper_ptr,  # out [G, B] f32, G groups of ids
    threshold_ptr,  # out [B] i32, ``ordered`` lower scores: raised to the best
    reach_ptr,  # out [B, G] f32, of rows with a truncation, as the next two
    most_ptr,  # out [B, G] f32
    least_ptr,  # out [B, G] f32
    id_upper_ptr,  # out [V, B] f16, likewise, of ID_ROWS rows or fewer
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    edit_rows_ptr,  # [B] i32
    additive_ptr,  # [B, V] f32
    scaling_ptr,  # [B, V] f32
    mask_ptr,  # [B, W] i32 or [B, V] bool
    bias_ptr,  # [B, V] f32
    num_rows,
    vocab_size,
    vocab_start,
    num_parts,
    stride,  # of weight and terms
    logit_scale,
    softcap,
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
    TRUNCATE: tl.constexpr,
    EDIT: tl.constexpr,
    EDIT_ROWS: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    TMA: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    BOUNDED: tl.constexpr = EDIT or not WHOLE_GROUPS
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    part = tl.program_id(0) // num_row_blocks
    first_row = (tl.program_id(0) % num_row_blocks) * BLOCK_B
    offs_b = first_row + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_n = first_row * TERMS + tl.arange(0, BLOCK_B * TERMS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, NUM_GROUPS)
    hidden_scale = tl.load(hidden_scale_ptr + offs_b, mask=mask_b, other=0.0)
    hidden_norm = tl.load(hidden_norm_ptr + offs_b, mask=mask_b, other=0.0)
    hidden_error = tl.load(hidden_error_ptr + offs_b, mask=mask_b, other=0.0)
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    greedy = temperature <= 0.0
    inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    if TRUNCATE:
        cut = mask_b & ~greedy & truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
    block_offs = offs_b[None, :] + tl.zeros([NUM_GROUPS, 1], tl.int32)
    block_mask = mask_b[None, :] & (offs_g >= 0)[:, None]
    edits = tl.zeros([BLOCK_B], tl.int32) + given_edits
    if EDIT_ROWS:
        edits &= tl.load(edit_rows_ptr + offs_b, mask=mask_b, other=0)
    edit_ptrs = (additive_ptr, scaling_ptr, mask_ptr, bias_ptr)
    edit_strides = (additive_stride, scaling_stride, mask_stride, bias_stride)

    best_lower = tl.full([NUM_GROUPS, BLOCK_B], float("-inf"), tl.float32)
    for tile in tl.range(part, tl.cdiv(vocab_size, BLOCK_V), num_parts, flatten=FLATTEN):
        first = tile * BLOCK_V
        offs_v = first + tl.arange(0, BLOCK_V)
        acc = tl.zeros([BLOCK_V, BLOCK_B * TERMS], tl.int32)
        for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            if TMA:
                blk_w = weight.load([first, d])
                blk_h = tl.trans(terms.load([first_row * TERMS, d]))
            else:
                mask_d = d + offs_d < D
                blk_w = tl.load(
                    weight + offs_v.to(tl.int64)[:, None] * stride + (d + offs_d)[None, :],
                    mask=(offs_v < vocab_size)[:, None] & mask_d[None, :],
                    other=0,
                )
                blk_h = tl.load(
                    terms + offs_n.to(tl.int64)[None, :] * stride + (d + offs_d)[:, None],
                    mask=mask_d[:, None],
                    other=0,
                )
            acc = tl.dot(blk_w, blk_h, acc, out_dtype=tl.int32)

        if TERMS == 2:
            high, low = tl.split(tl.reshape(acc, [BLOCK_V, BLOCK_B, 2]))
            steps = high.to(tl.float32) * 256.0 + low.to(tl.float32)
        else:
            steps = acc.to(tl.float32)
        valid = offs_v < vocab_size
        scale = tl.load(scale_ptr + offs_v, mask=valid, other=0.0)
        error = tl.load(error_ptr + offs_v, mask=valid, other=0.0)
        norm = tl.load(norm_ptr + offs_v, mask=valid, other=0.0)
        dots = steps * scale[:, None] * hidden_scale[None, :]
        room = room_of(error, norm, hidden_norm, hidden_error)
        known = room < _MOST  # not where it is NaN
        lower = transform_logits(dots - room, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
        upper = transform_logits(dots + room, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
        if HAS_SOFTCAP:
            lower -= softcap * _CAP_SLACK
            upper += softcap * _CAP_SLACK
        lower = tl.where(known, lower, float("-inf"))
        upper = tl.where(known, upper, float("inf"))
        if BOUNDED:
            lower = bound_logits(lower, valid[:, None])
            upper = bound_logits(upper, valid[:, None])
        if EDIT:
            asked = valid[:, None] & mask_b[None, :]
            lower = edit_logits(
                lower,
                asked,
                offs_b,
                (vocab_start + offs_v)[:, None],
                edits,
                edit_ptrs,
                edit_strides,
                mask_words,
                MASK_IS_BOOL,
                BIAS_FIRST,
            )
            upper = edit_logits(
                upper,
                asked,
                offs_b,
                (vocab_start + offs_v)[:, None],
                edits,
                edit_ptrs,
                edit_strides,
                mask_words,
                MASK_IS_BOOL,
                BIAS_FIRST,
            )
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        groups = first // rng.GROUP_SIZE + offs_g
        in_vocab = groups * rng.GROUP_SIZE < vocab_size
        group = vocab_start // rng.GROUP_SIZE + groups
        if TRUNCATE:
            few = num_rows <= _ID_ROWS  # no branch, and no kernel of its own: what compiles ahead has one row
            rounded = tl.maximum(upper + (tl.abs(upper) * _HALF_ROUNDING + _HALF_TINY), _LEAST_HALF)
            rounded = tl.where(upper == float("-inf"), upper, tl.where(rounded < _MOST, rounded, float("inf")))
            out = offs_v[:, None] * num_rows + offs_b[None, :]
            tl.store(id_upper_ptr + out, rounded.to(tl.float16), mask=few & valid[:, None] & cut[None, :])
        lower = tl.reshape(lower, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        upper = tl.reshape(upper, [NUM_GROUPS, rng.GROUP_SIZE, BLOCK_B])
        lower_score, least, reach = score_groups(lower, in_vocab, inv_temperature, greedy, seed, position, group)
        upper_score, most, could = score_groups(upper, in_vocab, inv_temperature, greedy, seed, position, group)
        lower_score -= slack_of(lower_score, greedy)
        upper_score += slack_of(upper_score, greedy)
        # A score so large may be one of logits at their limit, or infinite, or none.
        upper_score = tl.where(upper_score < _MOST, upper_score, float("inf"))
        lower_score = tl.where(lower_score < _MOST, lower_score, float("-inf"))
        if TRUNCATE:
            upper_score = tl.where(cut[None, :], tl.where(could < _MOST, could, float("inf")), upper_score)
            lower_score = tl.where(cut[None, :], float("-inf"), lower_score)
            reach = tl.where(reach < _MOST, reach, float("-inf"))
            most += slack_of(most, greedy)
            least -= slack_of(least, greedy)
            out = offs_b.to(tl.int64)[None, :] * tl.cdiv(vocab_size, rng.GROUP_SIZE) + groups[:, None]
            kept = in_vocab[:, None] & cut[None, :]
            tl.store(reach_ptr + out, reach, mask=kept)
            tl.store(most_ptr + out, tl.where(most < _MOST, most, float("inf")), mask=kept)
            tl.store(least_ptr + out, tl.where(least < _MOST, least, float("-inf")), mask=kept)
        best_lower = tl.maximum(best_lower, lower_score)
        tl.store(
            upper_ptr + groups[:, None] * num_rows + offs_b[None, :],
            upper_score,
            mask=in_vocab[:, None] & mask_b[None, :],
        )
    tl.atomic_max(threshold_ptr + offs_b, ordered(tl.max(best_lower, axis=0)), mask=mask_b, sem="relaxed")


@triton.jit
def slack_of(score, greedy):
    slack = tl.where(tl.abs(score) < _MOST, tl.abs(score) * _RELATIVE_SLACK + _SLACK, 0.0)
    return tl.where(greedy[None, :], 0.0, slack)


def num_parts(head: LMHead, num_rows: int, config: ScreenConfig) -> int:
    """P: how many programs share the vocabulary for each block of rows."""
    row_blocks = cdiv(num_rows, config.block_b)
    resident = resident_programs(head.weight.device, config.ctas_per_sm)
    return max(1, min(resident // row_blocks, cdiv(head.vocab_size, config.block_v)))


def screen_head(
    head: LMHead,
    int8_head: Int8Head,
    num_rows: int,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    workspace: ScreenWorkspace,  # with the hidden states' terms (``quantize_hidden``)
    config: ScreenConfig,
    edits: LogitEdits | None = None,
    truncation: Truncation | None = None,
) -> None:
    """Put what every group could reach into ``workspace.upper``, and what one does reach into ``threshold``; of rows
    with a truncation, what their groups have at least and at most into ``reach``, ``most`` and ``least``."""
    parts = num_parts(head, num_rows, config)
    editing = edit_arguments(edits, temperature, workspace.threshold)
    early = config.early and starts_early(head.weight.device)
    transform = transform_arguments(head.logit_scale, head.softcap, head.rounding)
    launch(
        screen_head_kernel,
        parts * cdiv(num_rows, config.block_b),
        (
            int8_head.blocks(config),
            workspace.blocks(config),
            int8_head.scale,
            int8_head.error,
            int8_head.norm,
            workspace.hidden_scale,
            workspace.hidden_norm,
            workspace.hidden_error,
            temperature,
            seed,
            position,
            workspace.upper,
            workspace.threshold,
            workspace.reach,
            workspace.most,
            workspace.least,
            workspace.id_upper,
            *truncation_pointers(truncation, temperature),
            *editing.pointers,
            num_rows,
            head.vocab_size,
            head.vocab_start,
            parts,
            int8_head.weight.stride(0),
            *transform.numbers,
            *editing.numbers,
        ),
        {
            "D": int8_head.weight.shape[1],
            **transform.constants,
            "WHOLE_GROUPS": head.vocab_size % rng.GROUP_SIZE == 0,
            "TRUNCATE": truncation is not None,
            **editing.constants,
            "BLOCK_B": config.block_b,
            "BLOCK_V": config.block_v,
            "BLOCK_D": config.block_d,
            "TERMS": config.terms,
            "STAGES": config.stages,
            "FLATTEN": config.flatten,
            "TMA": config.tma,
            "EARLY": early,
        },
        config.num_warps,
        (head.weight.device.index, int8_head.weight.stride(0)),
        early=early,
    )
