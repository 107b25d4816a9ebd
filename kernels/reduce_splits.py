"""The best of the splits of a vocabulary, and the token in its best group. The second launch of ``lm_head_sample``.

    split, group = argmax over splits of score        (ties: the lowest group)
    token        = argmax_i  logits[i] / temperature + Gumbel(i)   over the 16 ids i of that group

A single value per split and row comes in, so this reads kilobytes and costs a launch. ``draw_if_last`` is the same
without a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .config import cdiv, next_power_of_2
from .epilogue import LIMIT, invert_temperature, relative_mass
from .intrinsics import mul_rn
from .launch import launch
from .params import ROW_POINTERS, BatchParams, LogitsSpec, SampleOutput
from .workspace import Workspace


@triton.jit
def mass_of_splits(splits, row, num_rows, num_splits, inv_temperature, BLOCK_P: tl.constexpr):
    """The row's largest logit, and its exp-sum at temperature relative to that."""
    offs_p = tl.arange(0, BLOCK_P)
    slots = (offs_p * num_rows + row) * 2
    peak = tl.load(splits.mass + slots, mask=offs_p < num_splits, other=float("-inf"))
    mass = tl.load(splits.mass + slots + 1, mask=offs_p < num_splits, other=0.0)
    largest = tl.max(peak)
    return largest, tl.sum(relative_mass(mass, peak, largest, inv_temperature))


@triton.jit
def log_mass_of(largest, log_total, inv_temperature):
    """The two parts of a row's log-mass, as in ``SampleOutput``. log_total: the logarithm of its exp-sum at
    temperature, relative to its largest logit."""
    product = mul_rn(largest, inv_temperature)
    high = tl.where(largest > float("-inf"), tl.minimum(tl.maximum(product, -LIMIT), LIMIT), largest)
    low = log_total + tl.where(product == high, tl.fma(largest, inv_temperature, -product), 0.0)
    return high, tl.where(largest > float("-inf"), low, 0.0)


@triton.jit
def store_logprob(output, rows, logit, largest, total, inv_temperature, mask):
    """The logprob of a row's token, and the row's log-mass. largest, total: the row's largest logit, and its exp-sum at
    temperature relative to that."""
    log_total = tl.log(total)
    logprob = (logit - largest) * inv_temperature - log_total
    tl.store(output.logprobs + rows, tl.where(logprob > 0.0, 0.0, logprob), mask=mask)
    high, low = log_mass_of(largest, log_total, inv_temperature)
    tl.store(output.log_mass + rows * 2, high, mask=mask)
    tl.store(output.log_mass + rows * 2 + 1, low, mask=mask)


@triton.jit
def pick_in_groups(
    group,  # [BLOCK_R] i32, absolute ids
    logits,  # [GROUP_SIZE, BLOCK_R] f32, of these groups
    temperature,  # [BLOCK_R] f32
    seed,  # [BLOCK_R] i64
    position,  # [BLOCK_R] i64
    vocab_end,
):
    """The place of each row's token in its group, ``[BLOCK_R]``."""
    greedy, inv_temperature = invert_temperature(temperature)
    token = group[None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[:, None]
    exponential = rng.exponential(seed[None, :], position[None, :], token, rng.SAMPLE, rng.TOKEN)
    allowed = (token < vocab_end) & (logits > float("-inf"))
    peak = tl.max(tl.where(allowed, logits, float("-inf")), axis=0)
    perturbed = (logits - peak[None, :]) * inv_temperature[None, :] - tl.log(exponential)
    perturbed = tl.where(greedy[None, :], logits, perturbed)
    return tl.argmax(tl.where(allowed, perturbed, float("-inf")), axis=0)


@triton.jit
def draw_from_splits(
    splits,  # SplitOperands
    temperature_ptr,
    seed_ptr,
    position_ptr,
    output,  # SampleOutput
    num_rows,
    num_splits,
    vocab_end,
    program,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rows ``program * BLOCK_R`` and following, ``BLOCK_R`` of them."""
    offs_b = program * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_b = offs_b < num_rows
    offs_p = tl.arange(0, BLOCK_P)
    slots = offs_p[:, None] * num_rows + offs_b[None, :]  # [BLOCK_P, BLOCK_R]
    mask = (offs_p < num_splits)[:, None] & mask_b[None, :]
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)

    score = tl.load(splits.score + slots, mask=mask, other=float("-inf"))
    group = tl.load(splits.group + slots, mask=mask, other=rng.NO_GROUP)
    best_score = tl.max(score, axis=0)
    # Splits interleave their tiles, so among equal scores the lowest group decides, not the lowest split.
    tied = score == best_score[None, :]
    best_group = tl.min(tl.where(tied, group, rng.NO_GROUP), axis=0)
    split = tl.sum(tl.where(tied & (group == best_group[None, :]), offs_p[:, None], 0), axis=0)

    offs_i = tl.arange(0, rng.GROUP_SIZE)
    logits_offs = (split * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None]
    logits = tl.load(splits.logits + logits_offs, mask=mask_b[None, :], other=0.0)
    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    pick = pick_in_groups(best_group, logits, temperature, seed, position, vocab_end)
    tl.store(output.token_ids + offs_b, (best_group * rng.GROUP_SIZE + pick).to(tl.int64), mask=mask_b)
    tl.store(output.scores + offs_b, best_score, mask=mask_b)
    if output.logprobs is not None:
        _, inv_temperature = invert_temperature(temperature)
        peak = tl.load(splits.mass + slots * 2, mask=mask, other=float("-inf"))
        mass = tl.load(splits.mass + slots * 2 + 1, mask=mask, other=0.0)
        largest = tl.max(peak, axis=0)
        total = tl.sum(relative_mass(mass, peak, largest[None, :], inv_temperature[None, :]), axis=0)
        logit = tl.sum(tl.where(offs_i[:, None] == pick[None, :], logits, 0.0), axis=0)
        store_logprob(output, offs_b, logit, largest, total, inv_temperature, mask_b)


@triton.jit
def draw_if_last(
    splits,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    output,
    num_rows,
    num_splits,
    vocab_end,
    row_block,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The reduction without a launch of its own: of a block of rows, by the program of it that finishes last."""
    tl.debug_barrier()  # the stores of this program's other threads come before its arrival
    if tl.atomic_add(splits.arrived + row_block, 1, sem="acq_rel") == num_splits - 1:
        tl.store(splits.arrived + row_block, 0)
        for step in tl.range(BLOCK_B // BLOCK_R):
            draw_from_splits(
                splits,
                temperature_ptr,
                seed_ptr,
                position_ptr,
                output,
                num_rows,
                num_splits,
                vocab_end,
                row_block * (BLOCK_B // BLOCK_R) + step,
                BLOCK_P,
                BLOCK_R,
            )


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "vocab_end"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def reduce_splits_kernel(
    splits,  # SplitOperands, one group per split
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    output,  # SampleOutput, out
    num_rows,
    num_splits,
    vocab_end,
    # constexpr
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    draw_from_splits(
        splits,
        temperature_ptr,
        seed_ptr,
        position_ptr,
        output,
        num_rows,
        num_splits,
        vocab_end,
        tl.program_id(0),
        BLOCK_P,
        BLOCK_R,
    )


def reduce_splits(
    workspace: Workspace,  # score, group, logits and log-mass of P splits x B rows
    num_splits: int,
    params: BatchParams,
    spec: LogitsSpec,
    *,
    return_logprob: bool,
    max_splits: int,
    rows_per_program: int,
) -> SampleOutput:
    """The tokens, from what the splits left in ``workspace``.

    max_splits: bound of ``num_splits`` on this device; one kernel serves every number up to it. Raises ValueError for
    splits that the workspace has no room for.
    """
    num_rows, device = params.temperature.shape[0], params.temperature.device
    if not 1 <= num_splits <= max_splits or workspace.slots < num_splits * num_rows:
        raise ValueError(
            f"num_splits is {num_splits}; expected 1 to {max_splits}, and {num_rows} rows of them "
            f"in the workspace's {workspace.slots} slots"
        )
    output = SampleOutput.empty(num_rows, device, return_logprob)
    launch(
        reduce_splits_kernel,
        cdiv(num_rows, rows_per_program),
        (
            workspace.splits,
            params.temperature,
            params.seed,
            params.position,
            output,
            num_rows,
            num_splits,
            spec.vocab_end,
        ),
        {"BLOCK_P": next_power_of_2(max_splits), "BLOCK_R": rows_per_program},
        1,
        (device.index, return_logprob),
    )
    return output
