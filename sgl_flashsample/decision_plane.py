"""The decision plane: logits from a GPU, tokens from threads of the host, as SIMPLE does it.

A GEMM computes the logits of a step. Blocks of rows are copied to pinned memory on a separate stream; each is drawn by
the cpu path while the next one is copied, and the tokens go back to the device. They are the tokens of every other path
for equal logits. The host waits for the device in each step, so that nothing of the next step is prepared meanwhile.

On a CPU the blocks are copied by the calling thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from .cpu_path import sample_on_cpu, unsupported_by_machine
from .kernels.launch import next_power_of_2
from .kernels.params import BatchParams, LMHead, LogitEdits, SampleOutput, Truncation
from .kernels.workspace import Workspace
from .paths import compute_logits, on_device_of

BLOCK_ROWS = 32
SLOTS = 2  # blocks in pinned memory: one is drawn while the next one arrives
MAX_THREADS = 16
MIN_ROWS = 512  # that room is made for at once
_EDITS = ("additive", "scaling", "mask", "bias")
_ROW_DTYPES = {
    "position": torch.int64,
    "temperature": torch.float32,
    "seed": torch.int64,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "flags": torch.int32,
}
_OUTPUT_BYTES = 24  # per row: token, score, logprob and the two parts of the log-mass


class _Source(NamedTuple):
    """A tensor that was copied, and PyTorch's count of the writes to it where there is one."""

    tensor: torch.Tensor
    version: int | None


class DecisionPlane:
    """Draws in host memory from the logits of one device, for heads of any shape.

    block_rows: that are copied and drawn at once. threads: that share the rows of a block; the cores of this process,
    up to ``MAX_THREADS``, when None. A token depends on neither.

    Pinned memory is reserved by the first draw, by the first with an edit of a kind and by one of more rows than all
    before; a later draw allocates its logits, as any GEMM does, and its output. For one stream of the device and one
    thread at a time.

    Raises ValueError where nothing can be drawn in host memory.
    """

    def __init__(self, device: torch.device, block_rows: int = BLOCK_ROWS, threads: int | None = None) -> None:
        if (reason := unsupported_by_machine()) is not None:
            raise ValueError(reason)
        if block_rows < 1:
            raise ValueError(f"block_rows is {block_rows}; expected 1 or more")
        self.block_rows = block_rows
        self.threads = min(len(os.sched_getaffinity(0)), MAX_THREADS) if threads is None else threads
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._computed = torch.cuda.Event() if self._pinned else None
        self._arrived = [torch.cuda.Event() if self._pinned else None for _ in range(SLOTS)]
        self._blocks: dict[tuple[str, int], torch.Tensor] = {}  # by what they hold and slot: flat
        self._max_rows = 0
        self._rows: dict[str, torch.Tensor] = {}  # of the whole batch, by the names of ``_ROW_DTYPES``
        self._sources: dict[str, _Source] = {}  # what these were copied from
        self._views: tuple[Hashable, list[BatchParams]] = (None, [])  # of the blocks of the last batch, and of which
        self._outputs = torch.empty(0, dtype=torch.uint8, device="cpu")

    def draw(
        self,
        hidden: torch.Tensor,  # [B, D], the weight's dtype
        head: LMHead,
        params: BatchParams,
        *,
        workspace: Workspace,
        return_logprob: bool = False,
    ) -> SampleOutput:
        """One token per row, on the device of ``hidden``. Waits for the device.

        Positions and edits are copied to the host in each step; the other parameters of the rows only where they are
        in another tensor than in the last step, or in one that PyTorch knows to have been written to since.

        Raises ValueError for arguments that do not fit.
        """
        with on_device_of(hidden):
            logits = compute_logits(hidden, head, workspace)
            params.check("logits", logits, head.spec)
            num_rows = logits.shape[0]
            if num_rows == 0:
                return SampleOutput.empty(0, hidden.device, return_logprob)
            self._reserve_rows(num_rows)
            if self._stream is None:
                self._draw_blocks(logits, head, params, return_logprob)
            else:
                assert self._computed is not None
                self._computed.record()
                self._stream.wait_event(self._computed)
                with torch.cuda.stream(self._stream):
                    self._draw_blocks(logits, head, params, return_logprob)
            drawn = torch.empty(num_rows * _OUTPUT_BYTES, dtype=torch.uint8, device=hidden.device)
            self._copy(drawn, self._outputs[: len(drawn)])
        return _outputs(drawn, num_rows, return_logprob)

    def _draw_blocks(self, logits: torch.Tensor, head: LMHead, params: BatchParams, return_logprob: bool) -> None:
        """Leave what is drawn in ``_outputs``."""
        num_rows = logits.shape[0]
        block_params = self._load_rows(params)
        drawn = _outputs(self._outputs, num_rows, return_logprob)
        cuts = [*range(0, num_rows, self.block_rows), num_rows]
        arriving = self._load_block(0, logits, params.edits, cuts[0], cuts[1])
        for place, (first, last) in enumerate(itertools.pairwise(cuts)):
            block, edits = arriving
            if last < num_rows:
                arriving = self._load_block((place + 1) % SLOTS, logits, params.edits, last, cuts[place + 2])
            if (arrived := self._arrived[place % SLOTS]) is not None:
                arrived.synchronize()
            rows = block_params[place]
            if edits is not None:
                rows = dataclasses.replace(rows, edits=edits)
            out = sample_on_cpu(block, head.spec, rows, return_logprob=return_logprob, threads=self.threads)
            for whole, part in zip(drawn, out, strict=True):
                if whole is not None and part is not None:
                    whole[first:last] = part

    def _load_rows(self, params: BatchParams) -> list[BatchParams]:
        """The parameters of each block's rows in host memory, without edits; they are there when the first block is."""
        num_rows, truncation = len(params.temperature), params.truncation
        self._copy(self._rows["position"][:num_rows], params.position)
        given = {"temperature": params.temperature, "seed": params.seed}
        if truncation is not None:
            given |= {"top_k": truncation.top_k, "top_p": truncation.top_p, "min_p": truncation.min_p}
        if params.edits is not None and params.edits.rows is not None:
            given["flags"] = params.edits.rows
        for name, tensor in given.items():
            source, known = _source(tensor), self._sources.get(name)
            if known is None or known.tensor is not tensor or known.version != source.version:
                self._copy(self._rows[name][:num_rows], tensor)
                self._sources[name] = source
        key = (num_rows, truncation is not None)
        if self._views[0] != key:
            rows = {name: tensor[:num_rows] for name, tensor in self._rows.items()}
            if truncation is not None:
                truncation = Truncation(rows["top_k"], rows["top_p"], rows["min_p"])
            whole = BatchParams(rows["temperature"], rows["seed"], rows["position"], truncation)
            firsts = range(0, num_rows, self.block_rows)
            self._views = key, [whole.rows(first, min(first + self.block_rows, num_rows)) for first in firsts]
        return self._views[1]

    def _load_block(
        self, slot: int, logits: torch.Tensor, edits: LogitEdits | None, first: int, last: int
    ) -> tuple[torch.Tensor, LogitEdits | None]:
        """The logits and the edits of some rows in host memory; they are there when ``_arrived`` of the slot says so.
        Rows of logits are copied with what lies between them: one piece of memory is one transfer."""
        stride = logits.stride(0)
        whole = logits.as_strided((len(logits), stride), (stride, 1))
        block = self._load("logits", slot, whole[first:last])
        if edits is not None:
            part = edits.part(first, last)
            given: dict[str, Any] = {
                name: self._load(name, slot, tensor) for name in _EDITS if (tensor := getattr(part, name)) is not None
            }
            if edits.rows is not None:
                given["rows"] = self._rows["flags"][first:last]
            edits = LogitEdits(**given)
        if (arrived := self._arrived[slot]) is not None:
            arrived.record()
        return block, edits

    def _load(self, name: str, slot: int, rows: torch.Tensor) -> torch.Tensor:
        """A copy of ``rows`` in the host memory of a slot."""
        held, size = self._blocks.get((name, slot)), self.block_rows * rows.shape[1]
        if held is None or held.dtype is not rows.dtype or held.numel() < size:
            held = self._blocks[name, slot] = self._host_memory(size, rows.dtype)
        return self._copy(held[: rows.numel()].view(rows.shape), rows)

    def _reserve_rows(self, num_rows: int) -> None:
        if num_rows > self._max_rows:
            self._max_rows = max(MIN_ROWS, next_power_of_2(num_rows))
            self._rows = {name: self._host_memory(self._max_rows, dtype) for name, dtype in _ROW_DTYPES.items()}
            self._outputs = self._host_memory(self._max_rows * _OUTPUT_BYTES, torch.uint8)
            self._sources, self._views = {}, (None, [])

    def _host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return destination.copy_(source, non_blocking=self._pinned)


def _source(tensor: torch.Tensor) -> _Source:
    return _Source(tensor, None if tensor.is_inference() else tensor._version)


def _outputs(memory: torch.Tensor, num_rows: int, return_logprob: bool) -> SampleOutput:
    """Tokens, scores, logprobs and log-masses in one piece of memory, so that one transfer takes them all."""
    tokens, scores, logprobs, log_mass = (
        memory[first * num_rows : last * num_rows].view(dtype)
        for first, last, dtype in (
            (0, 8, torch.int64),
            (8, 12, torch.float32),
            (12, 16, torch.float32),
            (16, _OUTPUT_BYTES, torch.float32),
        )
    )
    if not return_logprob:
        return SampleOutput(tokens, None, scores)
    return SampleOutput(tokens, logprobs, scores, log_mass.view(num_rows, 2))
