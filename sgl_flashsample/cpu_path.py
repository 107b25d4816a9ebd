"""The cpu path: one token per row of logits in host memory, by threads over the rows.

The noise, the limits and the edits are those of the kernels, so equal logits give the kernels' token but for near-ties.
Logits are read once for a plain row, about twice for a truncated one, and never copied or widened in memory; rows with
edits, a scale, a softcap or another rounding are written once as float32, one row per thread at a time.

The loops are compiled by Numba at the first call of each dtype and kept on disk. Nothing else of the package needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton

from .kernels.follow_drafts import Accepted
from .kernels.launch import gpu_of
from .kernels.params import TRITON_DTYPES, BatchParams, LogitsSpec, SampleOutput

_MAX_THREADS = 1024  # of the process
# The words of a dtype, as ``cpu_loops.py`` has them.
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.uint16}


def draws_in_host_memory(device: torch.device) -> bool:
    """Whether rows on ``device`` are drawn here: on a CPU, unless Triton's interpreter runs the kernels there."""
    return device.type == "cpu" and gpu_of(device) is None and not triton.knobs.runtime.interpret


@functools.cache
def unsupported_by_machine() -> str | None:
    """Why nothing can be drawn in host memory; None where it can."""
    if importlib.util.find_spec("numba") is None:
        return "the cpu path needs Numba (pip install 'sgl-flashsample[cpu]')"
    return None


@functools.cache
def _loops() -> ModuleType:
    try:
        from . import cpu_loops
    except ImportError as error:
        raise ImportError(f"the cpu path needs Numba ({error}): pip install 'sgl-flashsample[cpu]'") from error
    return cpu_loops


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """It starts a thread only where none is idle: there are as many as have ever worked at once."""
    return ThreadPoolExecutor(_MAX_THREADS, "flashsample-cpu")


def sample_on_cpu(
    logits: torch.Tensor,  # [B, >= V] bf16, fp16 or fp32; contiguous rows at any distance
    spec: LogitsSpec,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    threads: int | None = None,
) -> SampleOutput:
    """Draw one token per row of ``logits``, which are in host memory and are not changed.

    threads: how many share the rows; PyTorch's own number when None. A token does not depend on it. Columns from
    ``spec.vocab_size`` on are never read. Holds no lock of Python while it draws.

    Raises ValueError for a tensor of another shape, dtype, layout or device, for a truncation on a shard and for less
    than one thread; ImportError without Numba.
    """
    if logits.dim() != 2 or logits.dtype not in TRITON_DTYPES or logits.shape[1] < spec.vocab_size:
        raise ValueError(
            f"logits is {tuple(logits.shape)} {logits.dtype}; "
            f"expected [B, {spec.vocab_size} or more] in bfloat16, float16 or float32"
        )
    if logits.device.type != "cpu":
        raise ValueError(f"logits is on {logits.device}; expected it in host memory, on cpu")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits has strides {logits.stride()}; expected rows that are contiguous")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; expected 1 or more")
    params.check("logits", logits, spec)
    loops = _loops()
    num_rows = logits.shape[0]
    output = SampleOutput.empty(num_rows, logits.device, return_logprob)
    if num_rows == 0:
        return output
    rounding = logits.dtype if spec.rounding is None else spec.rounding
    transforms = rounding is not logits.dtype or spec.logit_scale is not None or spec.softcap is not None
    scores = output.scores
    outputs = (
        output.token_ids,
        scores,
        scores if output.logprobs is None else output.logprobs,
        scores if output.log_mass is None else output.log_mass,
    )
    flags, edits, repeats, strides, widths = _edit_arguments(params, num_rows)
    arguments: tuple[Any, ...] = (
        spec.vocab_size,
        spec.vocab_start,
        transforms,
        {torch.float32: loops.FLOAT32, torch.bfloat16: loops.BFLOAT16, torch.float16: loops.FLOAT16}[rounding],
        np.float32(1.0 if spec.logit_scale is None else spec.logit_scale),
        np.float32(0.0 if spec.softcap is None else spec.softcap),
        params.temperature.detach().numpy(),
        params.seed.numpy(),
        params.position.numpy(),
        _limits(params),
        flags,
        edits,
        repeats,
        strides,
        widths,
        return_logprob,
        tuple(tensor.numpy() for tensor in outputs),
    )
    stride = logits.stride(0) if num_rows > 1 else 0
    words = _flat(logits.detach().view(_WORDS[logits.dtype]))
    threads = min(num_rows, torch.get_num_threads() if threads is None else threads)
    cuts = [num_rows * thread // threads for thread in range(threads + 1)]
    calls = [
        _pool().submit(loops.sample_rows, words, stride, first, last, *arguments)
        for first, last in itertools.pairwise(cuts[1:])
    ]
    loops.sample_rows(words, stride, 0, cuts[1], *arguments)  # this thread has a share too
    for call in calls:
        call.result()
    return output


def follow_drafts_on_cpu(
    drawn: torch.Tensor, drafts: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor
) -> Accepted:
    """``follow_drafts`` of whole paths, for tensors in host memory: all rows go down a node at a time, by PyTorch's
    operations. Arguments and result are the kernel's; they are not checked."""
    num_rows, num_nodes = drawn.shape
    row, node = torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)
    nodes = torch.full((num_rows, num_nodes), -1, dtype=torch.int32)
    nodes[:, 0] = row * num_nodes
    num_tokens = torch.ones(num_rows, dtype=torch.int32)
    for place in range(1, num_nodes):
        token, child = drawn[row, node], first_child[row, node]  # where a path has ended, none fits again
        while bool((others := (child >= 0) & (drafts[row, child.clamp(min=0)] != token)).any()):
            child = torch.where(others, next_sibling[row, child.clamp(min=0)], child)
        goes_on = child >= 0
        nodes[:, place] = torch.where(goes_on, row * num_nodes + child, -1)
        node = torch.where(goes_on, child, node)
        num_tokens += goes_on
        if not goes_on.any():
            break
    return Accepted(nodes, num_tokens)


def _flat(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """All elements from the first of the first row to the last of the last one: Numba compiles rows that are contiguous
    to vectors only where their array is."""
    size = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] if rows.numel() else 0
    return rows.detach().as_strided((size,), (1,)).numpy()


@functools.cache
def _empty(dtype: str) -> np.ndarray[Any, Any]:
    return np.empty(0, dtype)


def _limits(params: BatchParams) -> tuple[np.ndarray[Any, Any], ...]:
    truncation = params.truncation
    if truncation is None:
        return _empty("int32"), _empty("float32"), _empty("float32")
    return truncation.top_k.numpy(), truncation.top_p.detach().numpy(), truncation.min_p.detach().numpy()


def _edit_arguments(params: BatchParams, num_rows: int) -> tuple[Any, ...]:
    """Flags of the rows; the edits, flat; how many rows share a row of all but the masks; the distance of their rows,
    and how long these are."""
    edits = params.edits
    nothing = _empty("float32"), _empty("float32"), _empty("int32"), _empty("uint8"), _empty("float32")
    if edits is None or not edits.given:
        return np.zeros(num_rows, np.int32), nothing, 1, (0,) * 5, (0,) * 5
    bools = None if not edits.mask_is_bool or edits.mask is None else edits.mask.view(torch.uint8)
    tensors = (edits.additive, edits.scaling, None if edits.mask_is_bool else edits.mask, bools, edits.bias)
    given = np.full(num_rows, int(edits.given), np.int32)
    flags = given if edits.rows is None else given & edits.rows.numpy()
    return (
        flags,
        tuple(empty if tensor is None else _flat(tensor) for tensor, empty in zip(tensors, nothing, strict=True)),
        edits.repeats,
        tuple(0 if tensor is None else tensor.stride(0) for tensor in tensors),
        tuple(0 if tensor is None else tensor.shape[1] for tensor in tensors),
    )
