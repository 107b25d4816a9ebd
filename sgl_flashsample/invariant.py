"""Draws and logprobs of a batch-invariant head (``LogitsSpec.batch_invariant``): a row's logits, token and logprobs are
the same, bit by bit, in every batch.

A batch changes nothing but the number of programs. Every batch takes one tile, whose programs cut the vocabulary in the
same way, and the kernels of batches with edits and a truncation. These leave the logits of all rows, in float32 and
edited, and every logprob is read from such rows by one reader: those of a prompt too. No logit comes from a GEMM of the
vendor, whose order depends on the batch.

That a tensor core adds a row's products in one order, wherever the row is in a tile, is documented by nobody:
``selfcheck.dependence_on_batch`` tries it on the device.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from .cpu_path import draws_in_host_memory
from .defaults import HeadTraits, default_config, truncation_config
from .kernels.config import TileConfig, TruncationConfig, cdiv
from .kernels.lm_head_sample import lm_head_sample, num_splits
from .kernels.logit_summary import LogitRows
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from .kernels.workspace import LogprobWorkspace, Workspace
from .kinds import PLAIN
from .logprobs import Logprobs, WantedLogprobs, read_logprobs

if TYPE_CHECKING:
    from .paths import Parts

ROW_BYTES = 5  # of a logit in float32, and its share of what a group of 16 ids has
SLOT_BYTES = 708  # of scratch, per row and program that shares it
MAX_CHUNK_BYTES = 384_000_000  # of a prompt's logits and scratch, in memory at a time


def tile_of(head: LMHead) -> TileConfig:
    """The tile that all batches of ``head`` take."""
    tile = default_config(HeadTraits.of(head), 1, PLAIN)
    assert isinstance(tile, TileConfig)
    return tile


def draw(
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    tile: TileConfig,
    parts: Parts,
    *,
    return_logprob: bool = False,
) -> SampleOutput:
    """Draw one token per row. Raises ValueError for arguments that do not fit, and in host memory, where logits come
    from a GEMM."""
    if return_logprob:
        return draw_with_logprobs(hidden, params, parts, WantedLogprobs())[0]
    return _draw(hidden, params, tile, parts.lm_head, parts.workspace, parts.truncation_config)


def draw_with_logprobs(
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    parts: Parts,
    wanted: WantedLogprobs,
    scratch: LogprobWorkspace | None = None,
) -> tuple[SampleOutput, Logprobs]:
    """``draw``, and the logprobs that are wanted."""
    head, tile, num_rows = parts.lm_head, tile_of(parts.lm_head), len(hidden)
    workspace, slots = parts.workspace, num_splits(head, 1, tile) * max(1, num_rows)
    if workspace is None or workspace.slots < slots:
        workspace = Workspace(slots, hidden.device, None if workspace is None else workspace.searched)
    drawn = _draw(hidden, params, tile, head, workspace, parts.truncation_config)
    if wanted.temperature is not None:
        params = dataclasses.replace(params, temperature=wanted.temperature)
    elif wanted.original:
        params = dataclasses.replace(params, temperature=torch.ones_like(params.temperature))
    found = _read(workspace, head, params, drawn.token_ids, wanted, scratch)
    if wanted.are_of_draw:
        drawn = drawn._replace(logprobs=found.of_tokens, log_mass=found.log_mass)
    return drawn, found


def read_prompt(
    hidden: torch.Tensor,  # [T, D], the head's hidden_dtype
    token_ids: torch.Tensor,  # [T] int64
    head: LMHead,
    wanted: WantedLogprobs,
    chunk_rows: int,
    found: Logprobs,
) -> None:
    """Write the logprobs of given tokens, and others that are wanted, to ``found``: those of draws at temperature 1."""
    num_rows, device, tile = len(hidden), hidden.device, tile_of(head)
    splits, traits = num_splits(head, 1, tile), HeadTraits.of(head)
    row_bytes = ROW_BYTES * head.vocab_size + splits * SLOT_BYTES
    most = max(1, min(chunk_rows, MAX_CHUNK_BYTES // row_bytes))
    size = cdiv(num_rows, cdiv(num_rows, most)) if num_rows else 1
    # Scratch of this call alone: a prompt must not leave behind what a step of decoding never needs.
    workspace, scratch = Workspace(splits * size, device), LogprobWorkspace(size, head.vocab_size, device)
    limits = truncation_config(traits.family, traits.itemsize, traits.vocab_size)
    place = torch.zeros(size, dtype=torch.int64, device=device)
    params = BatchParams(torch.ones(size, device=device), place, place).of_every_kind()
    for start in range(0, num_rows, size):
        stop = min(start + size, num_rows)
        some = params.rows(0, stop - start)
        _draw(hidden[start:stop], some, tile, head, workspace, limits)
        part = wanted.rows(start, stop, num_rows)
        found.store(start, _read(workspace, head, some, token_ids[start:stop], part, scratch))


def _draw(
    hidden: torch.Tensor,
    params: BatchParams,
    tile: TileConfig,
    head: LMHead,
    workspace: Workspace | None,
    limits: TruncationConfig,
) -> SampleOutput:
    if draws_in_host_memory(hidden.device):
        raise ValueError("hidden is in host memory; expected it on a GPU with a batch-invariant head")
    return lm_head_sample(hidden, head, params, tile, workspace=workspace, truncation_config=limits)


def _read(
    workspace: Workspace,
    head: LMHead,
    params: BatchParams,
    token_ids: torch.Tensor,
    wanted: WantedLogprobs,
    scratch: LogprobWorkspace | None,
) -> Logprobs:
    """The logprobs that are wanted of the rows that the last draw has left, at the temperatures of ``params``."""
    num_rows, buffer = len(token_ids), workspace.last_buffer
    if not num_rows:
        return Logprobs.empty(wanted, 0, token_ids.device)
    assert buffer is not None
    done = dataclasses.replace(params, truncation=None, edits=None)
    rows = LogitRows(buffer.logits[:num_rows], LogitsSpec(head.vocab_size), done, workspace=scratch)
    return read_logprobs(rows, token_ids, wanted)
