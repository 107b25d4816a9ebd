"""The host side of a kernel that walks the vocabulary in splits: what ``lm_head_sample`` and ``sample_logits`` pass to
theirs beside the tiles, and which launch draws the tokens afterwards."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .config import (
    GROUP_SIZE,
    MAX_TRUNCATED_ROWS_PER_TILE,
    ReadConfig,
    TileConfig,
    TruncationConfig,
    next_power_of_2,
)
from .epilogue import num_top_groups
from .params import TRITON_DTYPES, BatchParams, LogitsSpec, SampleOutput
from .reduce_splits import reduce_splits
from .sample_truncated import sample_truncated
from .workspace import LogitsBuffer, Workspace


class SplitLaunch:
    """One batch, ``num_splits`` programs per block of rows; ``max_splits`` bounds them on this device.

    operands, features, constants: arguments of both kernels. variant: what of these a binary depends on.

    Raises ValueError for a truncation with tiles of more than ``MAX_TRUNCATED_ROWS_PER_TILE`` rows, and for a workspace
    that is too small.
    """

    def __init__(
        self,
        params: BatchParams,
        spec: LogitsSpec,
        rounding: torch.dtype,
        config: TileConfig | ReadConfig,
        num_splits: int,
        max_splits: int,
        workspace: Workspace | None,
        return_logprob: bool,
    ) -> None:
        num_rows, device = params.temperature.shape[0], params.temperature.device
        truncation = params.truncation
        self.params, self.spec, self.return_logprob = params, spec, return_logprob
        self.num_splits, self.max_splits, self.reduce_rows = num_splits, max_splits, config.reduce_rows
        self.workspace = Workspace.for_splits(num_splits, num_rows, device, workspace)
        self._buffer: LogitsBuffer | None = None
        self._output: SampleOutput | None = None
        if truncation is not None:
            if config.block_b > MAX_TRUNCATED_ROWS_PER_TILE:
                raise ValueError(
                    f"block_b is {config.block_b}; expected {MAX_TRUNCATED_ROWS_PER_TILE} or fewer with a truncation"
                )
            self._buffer = self.workspace.logits_buffer(
                num_rows, spec, rounding, edited=params.makes_logits or spec.batch_invariant
            )
        elif config.one_launch:
            self._output = SampleOutput.empty(num_rows, device, return_logprob)
        splits = self.workspace.splits
        self.features = params.operands(spec, splits.score, splits.group, one_for_all=spec.batch_invariant)
        self.top_groups = num_top_groups(truncation is not None, config.block_v, max_splits)
        self.operands: tuple[Any, ...] = (
            self.features.truncation,
            self.features.edits,
            splits,
            None if self._buffer is None else self._buffer.operands,
            self._output,
        )
        self.constants = {
            "LOGITS_DTYPE": TRITON_DTYPES[rounding],
            "WHOLE_GROUPS": spec.vocab_size % GROUP_SIZE == 0,
            "KEEP_MASS": return_logprob or truncation is not None,  # top-p is a share of the whole mass
            "TILE": config.compiled,
            "TOP_GROUPS": self.top_groups,
            "BLOCK_P": 1 if self._output is None else next_power_of_2(max_splits),
        }
        self.variant: tuple[Hashable, ...] = (
            self.features.variant,
            None if self._buffer is None else self._buffer.dtype,
            None if self._output is None else return_logprob,
        )

    def draw(self, config: TruncationConfig) -> SampleOutput:
        """The tokens, once the kernel has been launched."""
        if self._buffer is not None:
            return sample_truncated(
                self.workspace,
                self._buffer,
                self.num_splits * self.top_groups,
                self.params,
                self.spec,
                return_logprob=self.return_logprob,
                max_splits=self.max_splits * self.top_groups,
                config=config,
            )
        if self._output is not None:
            return self._output
        return reduce_splits(
            self.workspace,
            self.num_splits,
            self.params,
            self.spec,
            return_logprob=self.return_logprob,
            max_splits=self.max_splits,
            rows_per_program=self.reduce_rows,
        )
