"""The draws and logprobs of a batch-invariant head (``LogitsSpec.batch_invariant``): a row's logits, token and logprobs
are the same, bit by bit, in every batch.

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

from .defaults import HeadTraits, default_config
from .kernels.config import TileConfig
from .kernels.lm_head_sample import num_splits
from .kernels.logit_summary import LogitRows
from .kernels.params import BatchParams, LMHead, LogitsSpec
from .kinds import PLAIN

if TYPE_CHECKING:
    from .logprobs import WantedLogprobs
    from .paths import Parts

ROW_BYTES = 5  # of a logit in float32, and its share of what a group of 16 ids has
SLOT_BYTES = 708  # of scratch, per row and program that shares it


def tile_of(head: LMHead) -> TileConfig:
    """The tile that all batches of ``head`` take."""
    tile = default_config(HeadTraits.of(head), 1, PLAIN)
    assert isinstance(tile, TileConfig)
    return tile


def row_bytes(head: LMHead) -> int:
    """Bytes of the logits and the scratch of one row."""
    return ROW_BYTES * head.vocab_size + num_splits(head, 1, tile_of(head)) * SLOT_BYTES


def params_of_prompt(hidden: torch.Tensor) -> BatchParams:
    """The parameters of draws at temperature 1, one per row of ``hidden``, that leave the logits of a prompt."""
    place = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    return BatchParams(torch.ones(len(hidden), device=hidden.device), place, place).of_every_kind()


def at_wanted_temperatures(params: BatchParams, wanted: WantedLogprobs) -> BatchParams:
    """``params`` at the temperatures of the logprobs that are wanted."""
    if wanted.temperature is not None:
        return dataclasses.replace(params, temperature=wanted.temperature)
    return dataclasses.replace(params, temperature=torch.ones_like(params.temperature)) if wanted.original else params


def rows_left(parts: Parts, params: BatchParams) -> LogitRows:
    """The rows that the last draw with ``parts`` has left, one or more, at the temperatures of ``params``."""
    assert parts.workspace is not None and parts.workspace.last_buffer is not None
    logits = parts.workspace.last_buffer.logits[: len(params.temperature)]
    done = dataclasses.replace(params, truncation=None, edits=None)
    return LogitRows(logits, LogitsSpec(parts.lm_head.vocab_size), done, workspace=parts.readers)
