"""A sampling backend that draws on the CPU from the logits of a GPU, as SIMPLE's decision plane does.

A GEMM computes the logits of a step. Blocks of rows are copied to pinned memory on a separate stream; threads draw from
one block while the next one is copied, and the tokens go back. They are the tokens of the fused pass for equal logits.
The host waits for the device in each step, so that overlap scheduling hides nothing.

The backend is sgl-flashsample's own with another draw, without a screen and without CUDA graphs of the step. It serves
LM heads that one rank holds, and draws on the device where logprobs beside those of the tokens are asked for.
``serve.py`` puts it on the path of its servers as it does ``oracle.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import torch

from sgl_flashsample.cpu_path import sample_on_cpu
from sgl_flashsample.kernels.params import BatchParams, LogitsSpec, SampleOutput
from sgl_flashsample.switches import SCREEN_VARIABLE, STEP_GRAPHS_VARIABLE

BACKEND = "decision_plane"
BLOCK_ROWS = 32
SLOTS = 2  # blocks in host memory: one is drawn while the next one arrives
MAX_THREADS = 16


def register() -> None:
    """Add the backend. Called by SGLang in each of its processes."""
    from sglang.srt.layers.sampler import register_sampler_backend

    register_sampler_backend(BACKEND, make_sampler)


def make_sampler() -> Any:
    os.environ |= {SCREEN_VARIABLE: "off", STEP_GRAPHS_VARIABLE: "0"}
    from sgl_flashsample.sglang import draw, plugin, sampler, step_graphs

    planes: dict[torch.device, DecisionPlane] = {}
    draw_on_device = sampler.draw

    def draw_in_host_memory(lazy: Any, step: Any) -> Any:
        if step.asked is not None:  # logprobs of other ids than the tokens
            return draw_on_device(lazy, step)
        state, hidden = lazy.source, lazy.hidden
        if state.exchange is not None:
            raise ValueError("several ranks share the LM head; expected one")
        state.update(len(hidden))
        draw.gather(state, step, len(hidden))
        params = draw.params_of(state, step.kind, step.edits, len(hidden))
        plane = planes.setdefault(hidden.device, DecisionPlane(hidden.device))
        drawn = plane.draw(state.head.logits(hidden), state.head.lm_head.spec, params, step.return_logprob)
        return step_graphs.Drawn(drawn.token_ids, drawn.logprobs)

    sampler.draw = draw_in_host_memory
    return plugin.make_sampler()


class DecisionPlane:
    """Draws in host memory from the logits of one device. For one stream of it and one thread at a time.

    block_rows: rows that are copied and drawn at once. threads: how many share the rows of a block; the cores of this
    process, up to ``MAX_THREADS``, when None. A token depends on neither.
    """

    def __init__(self, device: torch.device, block_rows: int = BLOCK_ROWS, threads: int | None = None) -> None:
        self.block_rows = block_rows
        self.threads = min(len(os.sched_getaffinity(0)), MAX_THREADS) if threads is None else threads
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = [] if self._stream is None else [torch.cuda.Event() for _ in range(SLOTS)]
        self._memory: dict[tuple[int, str], torch.Tensor] = {}  # by slot and content: flat

    def draw(
        self,
        logits: torch.Tensor,  # [B, >= V] bf16, fp16 or fp32
        spec: LogitsSpec,
        params: BatchParams,
        return_logprob: bool = False,
    ) -> SampleOutput:
        """One token per row, on the device of ``logits``. Waits for the device. Raises ValueError for arguments that do
        not fit."""
        params.check("logits", logits, spec)
        num_rows = len(logits)
        drawn = SampleOutput(
            self._host(SLOTS, "tokens", torch.int64, num_rows),
            self._host(SLOTS, "logprobs", torch.float32, num_rows) if return_logprob else None,
            self._host(SLOTS, "scores", torch.float32, num_rows),
        )
        blocks = [slice(row, min(row + self.block_rows, num_rows)) for row in range(0, num_rows, self.block_rows)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(logits.device))
        arriving = self._load(0, logits, params, blocks[0])
        for place, block in enumerate(blocks):
            block_logits, block_params = arriving
            if place + 1 < len(blocks):
                arriving = self._load((place + 1) % SLOTS, logits, params, blocks[place + 1])
            if self._stream is not None:
                self._arrived[place % SLOTS].synchronize()
            out = sample_on_cpu(block_logits, spec, block_params, return_logprob=return_logprob, threads=self.threads)
            for whole, part in zip(drawn, out, strict=True):
                if whole is not None:
                    whole[block] = part
        return SampleOutput(
            *(None if one is None else one.to(logits.device, copy=True, non_blocking=True) for one in drawn)
        )

    def _load(
        self, slot: int, logits: torch.Tensor, params: BatchParams, rows: slice
    ) -> tuple[torch.Tensor, BatchParams]:
        """Logits and parameters of some rows in host memory; they are there when ``_arrived`` of the slot says so."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            loaded = (
                self._copy(slot, "logits", logits[rows]),
                self._copy(slot, "params", params.rows(rows.start, rows.stop)),
            )
            if self._stream is not None:
                self._arrived[slot].record()
        return loaded

    def _copy(self, slot: int, name: str, value: Any) -> Any:
        """A tensor, or a dataclass of tensors, with its tensors copied to the host memory of a slot."""
        if isinstance(value, torch.Tensor):
            return self._host(slot, name, value.dtype, *value.shape).copy_(value, non_blocking=True)
        if not dataclasses.is_dataclass(value):
            return value
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return type(value)(**{field: self._copy(slot, f"{name}.{field}", part) for field, part in fields.items()})

    def _host(self, slot: int, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Host memory for this content; reserved anew where there is too little."""
        size, held = torch.Size(shape).numel(), self._memory.get((slot, name))
        if held is None or held.dtype is not dtype or held.numel() < size:
            pinned = self._stream is not None
            held = self._memory[slot, name] = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
        return held[:size].view(shape)
