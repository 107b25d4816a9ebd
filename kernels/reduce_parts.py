"""Of the parts of a vocabulary, the best; of its best group, the token. The second launch of ``lm_head_sample``.

    part, group = argmax over parts of score          (ties: the lowest group)
    token       = argmax_i  logits[i] / temperature + Gumbel(i)   over the 16 ids i of that group

A single value per part and row comes in, so this reads kilobytes and costs a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import rng
from .head import ROW_POINTERS, Workspace
from .integers import cdiv, next_power_of_2
from .launch import launch

OUTPUTS = ("token_ptr", "best_score_ptr", "logprob_ptr")


@triton.jit
def lse_of_parts(lse_ptr, row, num_rows, num_parts, BLOCK_P: tl.constexpr):
    """The row's largest log-mass of a group, and its exp-sum relative to that."""
    offs_p = tl.arange(0, BLOCK_P)
    slots = (offs_p * num_rows + row) * 2
    peak = tl.load(lse_ptr + slots, mask=offs_p < num_parts, other=float("-inf"))
    mass = tl.load(lse_ptr + slots + 1, mask=offs_p < num_parts, other=0.0)
    heaviest = tl.max(peak)
    return heaviest, tl.sum(mass * tl.exp(peak - tl.where(heaviest == float("-inf"), 0.0, heaviest)))


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
    waiting = rng.exponential(seed[None, :], position[None, :], token, rng.SAMPLE, rng.TOKEN)
    perturbed = tl.where(greedy[None, :], logits, logits * inv_temperature[None, :] - tl.log(waiting))
    return tl.argmax(tl.where(token < vocab_end, perturbed, float("-inf")), axis=0)


@triton.jit
def draw_from_parts(
    score_ptr,  # [P, B] f32
    group_ptr,  # [P, B] i32
    logits_ptr,  # [P, B, GROUP_SIZE] f32
    lse_ptr,  # [P, B, 2] f32
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    num_rows,
    num_parts,
    vocab_size,
    vocab_start,
    program,
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rows ``program * BLOCK_R`` and following, ``BLOCK_R`` of them."""
    offs_b = program * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_b = offs_b < num_rows
    offs_p = tl.arange(0, BLOCK_P)
    slots = offs_p[:, None] * num_rows + offs_b[None, :]  # [BLOCK_P, BLOCK_R]
    mask = (offs_p < num_parts)[:, None] & mask_b[None, :]
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)

    score = tl.load(score_ptr + slots, mask=mask, other=float("-inf"))
    group = tl.load(group_ptr + slots, mask=mask, other=rng.NO_GROUP)
    best_score = tl.max(score, axis=0)
    # Parts interleave their tiles, so among equal scores the lowest group decides, not the lowest part.
    tied = score == best_score[None, :]
    best_group = tl.min(tl.where(tied, group, rng.NO_GROUP), axis=0)
    part = tl.sum(tl.where(tied & (group == best_group[None, :]), offs_p[:, None], 0), axis=0)

    offs_i = tl.arange(0, rng.GROUP_SIZE)
    logits_offs = (part * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None]
    logits = tl.load(logits_ptr + logits_offs, mask=mask_b[None, :], other=0.0)
    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    pick = pick_in_groups(best_group, logits, temperature, seed, position, vocab_start + vocab_size)
    tl.store(token_ptr + offs_b, (best_group * rng.GROUP_SIZE + pick).to(tl.int64), mask=mask_b)
    tl.store(best_score_ptr + offs_b, best_score, mask=mask_b)
    if RETURN_LOGPROB:
        inv_temperature = 1.0 / tl.where(temperature <= 0.0, 1.0, temperature)
        peak = tl.load(lse_ptr + slots * 2, mask=mask, other=float("-inf"))
        mass = tl.load(lse_ptr + slots * 2 + 1, mask=mask, other=0.0)
        max_peak = tl.max(peak, axis=0)
        total = tl.sum(mass * tl.exp(peak - max_peak[None, :]), axis=0)
        logit = tl.sum(tl.where(offs_i[:, None] == pick[None, :], logits, 0.0), axis=0)
        tl.store(logprob_ptr + offs_b, logit * inv_temperature - max_peak - tl.log(total), mask=mask_b)


@triton.jit
def draw_if_last(
    arrived_ptr,  # [B] i32, zeros: how many parts of a block of rows are done; zeros again afterwards
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
    row_block,
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The reduction without a launch of its own: of a block of rows, by the program of it that finishes last."""
    tl.debug_barrier()  # what this program's other threads have stored comes before its arrival
    if tl.atomic_add(arrived_ptr + row_block, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived_ptr + row_block, 0)
        for step in tl.range(BLOCK_B // BLOCK_R):
            draw_from_parts(
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
                row_block * (BLOCK_B // BLOCK_R) + step,
                RETURN_LOGPROB,
                BLOCK_P,
                BLOCK_R,
            )


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "vocab_size", "vocab_start"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *OUTPUTS],
)
def reduce_parts_kernel(
    score_ptr,  # [P, B] f32
    group_ptr,  # [P, B] i32
    logits_ptr,  # [P, B, GROUP_SIZE] f32
    lse_ptr,  # [P, B, 2] f32
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    num_rows,
    num_parts,
    vocab_size,
    vocab_start,
    # constexpr
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    draw_from_parts(
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
        tl.program_id(0),
        RETURN_LOGPROB,
        BLOCK_P,
        BLOCK_R,
    )


class Drawn(NamedTuple):
    """token ``[B]`` int64, score ``[B]`` float32, logprob ``[B]`` float32 or None."""

    token: torch.Tensor
    score: torch.Tensor
    logprob: torch.Tensor | None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device, return_logprob: bool) -> Drawn:
        score = torch.empty(num_rows, dtype=torch.float32, device=device)
        logprob = torch.empty_like(score) if return_logprob else None
        return cls(torch.empty(num_rows, dtype=torch.int64, device=device), score, logprob)

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.token, self.score, self.score if self.logprob is None else self.logprob


def reduce_parts(
    workspace: Workspace,  # score, group, logits and lse of P parts x B rows
    num_parts: int,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    vocab_size: int,
    vocab_start: int,
    *,
    return_logprob: bool,
    most_parts: int,
    rows_per_program: int,
) -> Drawn:
    """The tokens, from what the parts left in ``workspace``.

    most_parts: bound of ``num_parts`` on this device; one kernel serves every number up to it.
    """
    num_rows = temperature.shape[0]
    if not 1 <= num_parts <= most_parts or workspace.slots < num_parts * num_rows:
        raise ValueError(
            f"num_parts is {num_parts}; expected 1 to {most_parts}, and {num_rows} rows of them "
            f"in the workspace's {workspace.slots} slots"
        )
    device = temperature.device
    drawn = Drawn.empty(num_rows, device, return_logprob)
    launch(
        reduce_parts_kernel,
        cdiv(num_rows, rows_per_program),
        (
            workspace.score,
            workspace.group,
            workspace.logits,
            workspace.lse,
            temperature,
            seed,
            position,
            *drawn.pointers,
            num_rows,
            num_parts,
            vocab_size,
            vocab_start,
        ),
        {
            "RETURN_LOGPROB": return_logprob,
            "BLOCK_P": next_power_of_2(most_parts),
            "BLOCK_R": rows_per_program,
        },
        1,
        (device.index,),
    )
    return drawn
