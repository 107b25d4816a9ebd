"""What happens to a tile of raw logits before anything leaves the chip. Device functions only.

Every path that sees logits in tiles calls these, so that all of them draw the same token from the
same logits. Blocks are ``[BLOCK_V, BLOCK_B]``: vocabulary ids down, rows of the batch across.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .approx import log2, product, reciprocal, saturate
from .features import Edit

# Bound of a logit, so that logit / temperature stays finite.
LIMIT = tl.constexpr(2.0**100)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Of a group that has a token: its peak weighs 1, but where it is so large that its rounding is a power of its own.
LEAST_MASS = tl.constexpr(0.5)
_ADDITIVE = tl.constexpr(int(Edit.ADDITIVE))
_SCALING = tl.constexpr(int(Edit.SCALING))
_MASK = tl.constexpr(int(Edit.MASK))
_BIAS = tl.constexpr(int(Edit.BIAS))


@triton.jit
def transform_logits(
    acc,  # hidden @ weight.T: [BLOCK_V, BLOCK_B] f32, or any block of a GEMM's output
    logit_scale,
    softcap,
    LOGITS_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The model's logits, as float32: rounded like its GEMM output, scaled, soft-capped.

    Rounding matters: a bf16 model's logits have many exact ties, and another rounding is another
    distribution than the one its logits define.
    """
    logits = acc.to(LOGITS_DTYPE).to(tl.float32)
    if HAS_SCALE:
        logits = (logits * logit_scale).to(LOGITS_DTYPE).to(tl.float32)
    if HAS_SOFTCAP:
        logits = cap_softly(logits, softcap)
    return logits


@triton.jit
def cap_softly(logits, softcap):
    # tanh(x) = 1 - 2 / (e^2x + 1): saturates cleanly at both ends, no libdevice.
    return softcap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * _LOG2_E / softcap)) + 1.0))


@triton.jit
def bound_logits(logits, valid):
    """Logits in (-LIMIT, LIMIT], or -inf: what is not valid, not above -LIMIT, or NaN."""
    return tl.where(valid & (logits > -LIMIT), tl.minimum(logits, LIMIT), float("-inf"))


@triton.jit
def edit_logits(
    logits,  # [BLOCK_V, BLOCK_B] f32
    valid,  # [BLOCK_V, BLOCK_B] bool
    rows,  # [BLOCK_B] i32, rows of the batch
    columns,  # [BLOCK_V, 1] or [BLOCK_V, BLOCK_B] i32, absolute vocabulary ids
    edits,  # [BLOCK_B] i32, Edit flags
    edit_ptrs,  # additive and scaling, [B, V] f32; mask, [B, W] i32 or [B, V] bool; bias, [B, V] f32
    edit_strides,  # of the same, in the same order
    mask_words,  # W
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
):
    """SGLang's changes to the logits, in its order: penalties, grammar mask, bias.

    A row reads only what its own flags ask for.
    """
    additive_ptr, scaling_ptr, mask_ptr, bias_ptr = edit_ptrs
    additive_stride, scaling_stride, mask_stride, bias_stride = edit_strides
    asked = valid & ((edits & _ADDITIVE) != 0)[None, :]
    logits += tl.load(additive_ptr + rows[None, :] * additive_stride + columns, mask=asked, other=0.0)
    asked = valid & ((edits & _SCALING) != 0)[None, :]
    scale = tl.load(scaling_ptr + rows[None, :] * scaling_stride + columns, mask=asked, other=1.0)
    logits = tl.where(logits < 0, logits * scale, tl.div_rn(logits, scale))
    if BIAS_FIRST:
        asked = valid & ((edits & _BIAS) != 0)[None, :]
        logits += tl.load(bias_ptr + rows[None, :] * bias_stride + columns, mask=asked, other=0.0)
    asked = valid & ((edits & _MASK) != 0)[None, :]
    if MASK_IS_BOOL:
        forbidden = tl.load(mask_ptr + rows[None, :] * mask_stride + columns, mask=asked, other=0) != 0
    else:
        asked &= columns < mask_words * 32
        word = tl.load(mask_ptr + rows[None, :] * mask_stride + columns // 32, mask=asked, other=-1)
        forbidden = ((word >> (columns % 32)) & 1) == 0
    logits = tl.where(forbidden, float("-inf"), logits)
    if not BIAS_FIRST:
        asked = valid & ((edits & _BIAS) != 0)[None, :]
        logits += tl.load(bias_ptr + rows[None, :] * bias_stride + columns, mask=asked, other=0.0)
    return bound_logits(logits, True)


@triton.jit
def score_groups(
    logits,  # [NUM_GROUPS, GROUP_SIZE, BLOCK_B] f32
    valid,  # [NUM_GROUPS] bool, false beyond the vocabulary
    inv_temperature,  # [BLOCK_B] f32, 1 on greedy rows
    greedy,  # [BLOCK_B] bool
    seed,  # [NUM_GROUPS, BLOCK_B] i64
    position,  # [NUM_GROUPS, BLOCK_B] i64
    group,  # [NUM_GROUPS] i32, absolute group ids
):
    """Perturbed log-mass of each group (its maximum on greedy rows), its log-mass, and its largest logit.

    Returns ``score, log_mass, peak``, each ``[NUM_GROUPS, BLOCK_B]`` float32, the first two at temperature; a group
    without a token has -inf. Logits count as ``bound_logits`` would have them: that takes one instruction per logit
    here, and the rest per group.
    """
    peak = tl.max(logits, axis=1)
    some = valid[:, None] & (peak > -LIMIT)
    peak = tl.minimum(peak, LIMIT)
    rate = inv_temperature * _LOG2_E
    base = product(tl.where(some, peak, 0.0), rate[None, :])
    weights = saturate(tl.exp2(tl.fma(logits, rate[None, None, :], -base[:, None, :])))
    mass = tl.maximum(tl.sum(weights, axis=1), LEAST_MASS)
    waiting = rng.exponential(seed, position, group[:, None], rng.SAMPLE, rng.GROUP)
    # log(mass) - log(waiting) as one logarithm, in the layout of the noise: eight times less work than in that
    # of the sums, which every lane of a group holds. The log-mass is taken back from it for the same reason.
    perturbation = log2(mass * reciprocal(waiting))
    score = tl.where(greedy[None, :], peak, (base + perturbation) * _LN_2)
    log_mass = (base + (perturbation + log2(waiting))) * _LN_2
    none = float("-inf")
    return tl.where(some, score, none), tl.where(some, log_mass, none), tl.where(some, peak, none)
