"""The cpu path: one token per row of logits in host memory, by threads over the rows.

The noise, the limits and the edits are those of the kernels, so equal logits give the kernels' token but for near-ties.
Logits are read once for a plain row, once or twice for a truncated one, and never copied or widened in memory; rows
with edits, a scale, a softcap or another rounding are written once as float32, one row per thread at a time.

The loops are compiled by Numba at the first call of each dtype and kept on disk where that is possible. Nothing else of
the package needs Numba.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton

from .kernels.follow_drafts import Accepted
from .kernels.gather_rows import NO_MIN_P, NO_TOP_K, RowBuffers
from .kernels.launch import gpu_of
from .kernels.params import TRITON_DTYPES, BatchParams, LogitEdits, LogitsSpec, SampleOutput

_MAX_THREADS = 1024  # of the process
# The words of a dtype, as ``cpu_loops.py`` has them.
_WORDS = {torch.float32: "int32", torch.bfloat16: "int16", torch.float16: "uint16"}
_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_INSTALL = "pip install '.[cpu]' in a checkout of sgl-flashsample"


def draws_in_host_memory(device: torch.device) -> bool:
    """True if rows on ``device`` are drawn here: on a CPU, unless Triton's interpreter runs the kernels there."""
    return device.type == "cpu" and gpu_of(device) is None and not triton.knobs.runtime.interpret


@functools.cache
def unsupported_by_machine() -> str | None:
    """Why nothing can be drawn in host memory; None where it can."""
    if importlib.util.find_spec("numba") is None:
        return f"the cpu path needs Numba ({_INSTALL})"
    return None


@functools.cache
def _loops() -> ModuleType:
    try:
        from . import cpu_loops
    except ImportError as error:
        raise ImportError(f"the cpu path needs Numba ({error}): {_INSTALL}") from error
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

    threads: how many share the rows; PyTorch's own when None. A token does not depend on it. Columns from
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
    job = _make_job(loops, logits, spec, params, output)
    _run(loops.sampler_of(_WORDS[logits.dtype]), job.ctypes.data, num_rows, threads)
    return output


def _make_job(
    loops: ModuleType, logits: torch.Tensor, spec: LogitsSpec, params: BatchParams, output: SampleOutput
) -> np.ndarray[Any, Any]:
    """A ``JOB`` of the loops, whose members have this order."""
    rounding = logits.dtype if spec.logits_dtype is None else spec.logits_dtype
    edits, limits = params.edits or LogitEdits(), params.truncation
    words, bools = (None, edits.mask) if edits.mask_is_bool else (edits.mask, None)
    of_ids = (edits.additive, edits.scaling, words, bools, edits.bias)
    tensors = (
        *(logits, params.temperature, params.seed, params.position),
        *((None, None, None) if limits is None else (limits.top_k, limits.top_p, limits.min_p)),
        *(edits.rows, *of_ids),
        *(output.token_ids, output.scores, output.logprobs, output.log_mass),
    )
    job = (
        0,  # the next row
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(logits.shape[0], logits.stride(0), spec.vocab_size, spec.vocab_start, edits.given, edits.repeats),
        *(0 if tensor is None else tensor.stride(0) for tensor in of_ids),
        *(0 if tensor is None else tensor.shape[1] for tensor in of_ids),
        rounding is not logits.dtype or spec.logit_scale is not None or spec.softcap is not None,
        {torch.float32: loops.FLOAT32, torch.bfloat16: loops.BFLOAT16}.get(rounding, loops.FLOAT16),
        1.0 if spec.logit_scale is None else spec.logit_scale,
        0.0 if spec.softcap is None else spec.softcap,
    )
    return np.array([job], loops.JOB)


def _run(draw: int, job: int, num_rows: int, threads: int | None) -> None:
    """Call the C function at ``draw`` with the address of a job, in several threads where there are several rows.

    PyTorch's own threads are awake after its last operation. Python's would wake one after another, each with the lock
    of the interpreter.
    """
    if num_rows == 1 or threads == 1:
        _C_FUNCTION(draw)(job)
    elif threads is None and (openmp := _openmp()) is not None:
        openmp(draw, job, torch.get_num_threads(), 0)
    else:
        call = _C_FUNCTION(draw)
        threads = min(num_rows, torch.get_num_threads() if threads is None else threads)
        calls = [_pool().submit(call, job) for _ in range(threads - 1)]
        call(job)  # this thread takes rows too
        for one in calls:
            one.result()


@functools.cache
def _openmp() -> Any | None:
    """``GOMP_parallel`` of the OpenMP library that PyTorch uses (GNU's or Intel's): function, data, threads, flags.
    None where PyTorch uses none."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is None or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    function.restype = None
    return function


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
        for _ in range(num_nodes):  # bounded, for tables in which siblings form a circle
            exists = (child >= 0) & (child < num_nodes)
            others = exists & (drafts[row, torch.where(exists, child, 0)] != token)
            if not others.any():
                break
            child = torch.where(others, next_sibling[row, torch.where(exists, child, 0)], child)
        goes_on = exists & ~others
        nodes[:, place] = torch.where(goes_on, row * num_nodes + child, -1)
        node = torch.where(goes_on, child, node)
        num_tokens += goes_on
        if not goes_on.any():
            break
    return Accepted(nodes, num_tokens)


def gather_rows_on_cpu(
    table: torch.Tensor,  # [S, 8] int32
    slots: torch.Tensor,  # [B] int64
    positions: torch.Tensor,  # [B * nodes] int64
    out: RowBuffers,
    *,
    nodes: int = 1,
    drafts: bool = False,
    edits: int = 0,
    rows: int | None = None,
) -> None:
    """``gather_rows`` for a table in host memory."""
    rows = len(positions) if rows is None else rows
    ids = torch.where((slots >= 0) & (slots < len(table)), slots, 0).repeat_interleave(nodes)
    lines = table[torch.nn.functional.pad(ids, (0, rows - len(ids)))]
    positions = torch.nn.functional.pad(positions, (0, rows - len(ids)))
    floats, words = lines.view(torch.float32), lines.view(torch.int64)
    top_p, min_p = floats[:, 4], floats[:, 5]
    if drafts:
        has_both = (top_p != 1.0) & (lines[:, 1] >= 1) & (lines[:, 1] < NO_TOP_K)
        min_p = torch.where(has_both, NO_MIN_P, 0.0)
    columns = (floats[:, 0], lines[:, 1], top_p, min_p, words[:, 1], positions, lines[:, 6] & edits)
    for buffer, column in zip(out.tensors, columns, strict=True):
        buffer[:rows] = column
