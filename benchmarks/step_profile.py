"""Calls of CUDA that one decode step makes, counted in a torch profiler trace of a server."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_flashsample.tools.server import Server

PREFILL_SECONDS = 0.3  # then only decode steps are left to be profiled
MOST_ANSWERS = 10  # that one trace is taken of
TRACES = "*.trace.json.gz"

# Calls that make the host wait, and calls that take memory from the driver. None may be added to a steady step. (An
# ``aten::item`` waits by one of them, or reads a tensor of the host.)
SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaMallocAsync", "cuMemCreate", "cuMemMap", "cudaHostAlloc")
LAUNCHING = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
# Kernels of an exchange between ranks, with the wait for the others: ours, and collectives. The model's own collectives
# run in its CUDA graph.
EXCHANGING = ("exchange_records", "tell_logits", "copy_rows", "pack_record", "merge_records")
COLLECTIVE = ("cross_device_reduce", "all_reduce", "nccl")
SHORT_GAP_US = 5.0  # between two kernels; where it is longer, the GPU waits for the host
TENSORS = ("aten::empty", "aten::empty_strided")  # in which others end, ``aten::empty_like`` among them


def record(server: Server, folder: Path, steps: int, ask: Callable[[], Any], shapes: bool = False) -> None:
    """Have a trace of ``steps`` decode steps written to ``folder``, with the shapes of arguments if asked for, while
    ``ask()`` waits for a long answer, and for more where that has too few steps."""
    with concurrent.futures.ThreadPoolExecutor(1) as asking:
        answer = asking.submit(ask)
        time.sleep(PREFILL_SECONDS)
        server.profile(folder, steps=steps, shapes=shapes)
        answer.result()
    for _ in range(MOST_ANSWERS):
        if any(folder.rglob(TRACES)):
            break
        ask()


def events_of(folder: Path, wait_seconds: float = 60.0) -> list[dict[str, Any]]:
    """The events of the last trace in ``folder``. Raises TimeoutError where there is no whole one."""
    deadline = time.monotonic() + wait_seconds
    while not (traces := sorted(folder.rglob(TRACES))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no trace appeared in {folder}")
        time.sleep(0.5)
    for _ in range(20):  # the file exists before it is complete
        try:
            return json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
        except (EOFError, ValueError, OSError):
            time.sleep(1.0)
    raise TimeoutError(f"the trace in {folder} is not complete")


def summarise(folder: Path, steps: int, wait_seconds: float = 60.0) -> dict[str, Any]:
    """Calls and kernel time per step in the trace in ``folder``, of ``steps`` decode steps. Raises TimeoutError, as
    ``events_of``."""
    events = events_of(folder, wait_seconds)
    counts = Counter(event["name"] for event in events if event.get("ph") == "X")
    summary: dict[str, Any] = {"steps": steps, "graph_launches": round(counts["cudaGraphLaunch"] / steps, 2)}
    for title, names in (
        ("synchronising", SYNCHRONISING),
        ("driver_allocating", ALLOCATING),
        ("launches", LAUNCHING),
        ("tensors", TENSORS),
    ):
        summary[title] = round(sum(counts[name] for name in names) / steps, 2)
    kernels: Counter[str] = Counter()
    replayed = {correlation(event) for event in events if event.get("name") == "cudaGraphLaunch"}
    exchange_us = beside_us = 0.0
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event["name"][:60]] += event["dur"]
            beside_us += event["dur"] * (correlation(event) not in replayed)
            name = event["name"].lower()
            collective = any(known in name for known in COLLECTIVE) and correlation(event) not in replayed
            if collective or any(known in name for known in EXCHANGING):
                exchange_us += event["dur"]
    if exchange_us:
        summary["exchange_us"] = round(exchange_us / steps, 1)
    summary["gaps_us"] = round(_short_gaps(events) / steps, 1)
    summary["beside_graphs_us"] = round(beside_us / steps, 1)
    summary["gpu_busy_us"] = round(sum(kernels.values()) / steps, 1)
    summary["longest_kernels_us"] = {name: round(us / steps, 1) for name, us in kernels.most_common(12)}
    summary |= {name: round(counts[name] / steps, 2) for name in (*SYNCHRONISING, *ALLOCATING) if counts[name]}
    return summary


def _short_gaps(events: list[dict[str, Any]]) -> float:
    """Microseconds between kernels that follow each other on a stream without the host; negative where they overlap
    (programmatic dependent launch)."""
    ends: dict[Any, float] = {}
    total = 0.0
    kernels = (event for event in events if event.get("cat") == "kernel" and "ts" in event)
    for event in sorted(kernels, key=lambda event: event["ts"]):
        stream = event.get("args", {}).get("stream")
        gap = event["ts"] - ends.get(stream, float("-inf"))
        if abs(gap) <= SHORT_GAP_US:
            total += gap
        ends[stream] = event["ts"] + event["dur"]
    return total


def correlation(event: dict[str, Any]) -> Any:
    """The number that a kernel and the call that launched it have in common."""
    return event.get("args", {}).get("correlation")
