"""Of the splits of a vocabulary, the best; of its best group, the token. The second launch of ``lm_head_sample``.

    split, group = argmax over splits of score        (ties: the lowest group)
    token        = argmax_i  logits[i] / temperature + Gumbel(i)   over the 16 ids i of that group

A single value per split and row comes in, so this reads kilobytes and costs a launch. ``draw_if_last`` is the same
without a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .launch import cdiv, launch, next_power_of_2
from .params import ROW_POINTERS, BatchParams, LogitsSpec, SampleOutput
from .workspace import Workspace


@triton.jit
def lse_of_splits(splits, row, num_rows, num_splits, BLOCK_P: tl.constexpr):
    """The row's largest log-mass of a group, and its exp-sum relative to that."""
    offs_p = tl.arange(0, BLOCK_P)
    slots = (offs_p * num_rows + row) * 2
    lse_max = tl.load(splits.log_mass + slots, mask=offs_p < num_splits, other=float("-inf"))
    lse_sum = tl.load(splits.log_mass + slots + 1, mask=offs_p < num_splits, other=0.0)
    largest = tl.max(lse_max)
    return largest, tl.sum(lse_sum * tl.exp(lse_max - tl.where(largest == float("-inf"), 0.0, largest)))


@triton.jit
def pick_in_groups(
    group,  # [BLOCK_R] i32, absolute ids
    logits,  # [GROUP_SIZE, BLOCK_R] f32, of these groups
    temperature,  # [BLOCK_R] f32
    seed,  # [BLOCK_R] i64
    position,  # [BLOCK_R] i64
    vocab_end,
):
    """Which of its group's ids each row takes, ``[BLOCK_R]``."""
    greedy = temperature <= 0.0
    inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
    token = group[None, :] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[:, None]
    exponential = rng.exponential(seed[None, :], position[None, :], token, rng.SAMPLE, rng.TOKEN)
    perturbed = tl.where(greedy[None, :], logits, logits * inv_temperature[None, :] - tl.log(exponential))
    return tl.argmax(tl.where(token < vocab_end, perturbed, float("-inf")), axis=0)


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
        inv_temperature = 1.0 / tl.where(temperature <= 0.0, 1.0, temperature)
        lse_max = tl.load(splits.log_mass + slots * 2, mask=mask, other=float("-inf"))
        lse_sum = tl.load(splits.log_mass + slots * 2 + 1, mask=mask, other=0.0)
        largest = tl.max(lse_max, axis=0)
        # Of a row without an allowed id every term is -inf; the difference would be NaN.
        total = tl.sum(lse_sum * tl.exp(lse_max - tl.where(largest == float("-inf"), 0.0, largest)[None, :]), axis=0)
        logit = tl.sum(tl.where(offs_i[:, None] == pick[None, :], logits, 0.0), axis=0)
        tl.store(output.logprobs + offs_b, logit * inv_temperature - largest - tl.log(total), mask=mask_b)
        tl.store(output.log_mass + offs_b, largest + tl.log(total), mask=mask_b)


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
    tl.debug_barrier()  # what this program's other threads have stored comes before its arrival
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
