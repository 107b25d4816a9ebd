"""Timing of kernels that read a few hundred megabytes, as a server runs them.

CUDA-graph replay; weights cold, because each replay reads far more than the L2 cache holds; hidden
states hot; contenders interleaved, so that clock drift falls on all of them alike; medians with spread.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over rounds, and half the distance between the quartiles."""

    us: float
    spread: float
    rounds: int


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``call`` as a CUDA graph, after two warm-up calls that compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def race(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    replays: int = 4,
    before_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time every contender once per round, in rotating order; one sample is ``replays`` replays.

    before_round runs untimed: put fresh inputs into the contenders' buffers there.
    """
    graphs = {name: capture(call) for name, call in contenders.items()}
    replay = {name: graph.replay for name, graph in graphs.items()}
    return race_replays(replay, rounds=rounds, replays=replays, before_round=before_round)


def race_replays(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    replays: int = 4,
    before_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """As ``race``, of what is called as it is: replays of captured graphs, or what no graph can hold."""
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        for call in contenders.values():
            call()
    for index in range(rounds):
        before_round()
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            contenders[name]()
            start.record()
            for _ in range(replays):
                contenders[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / replays)
    timings = {}
    for name, values in samples.items():
        quartiles = statistics.quantiles(values, n=4)
        timings[name] = Timing(statistics.median(values), (quartiles[2] - quartiles[0]) / 2, rounds)
    return timings


def environment() -> dict[str, object]:
    """What a result depends on besides the code: device, driver, versions, clocks."""
    import platform
    import subprocess

    import triton

    properties = torch.cuda.get_device_properties(0)
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nvidia_smi": dict(zip(query.split(","), smi.split(", "), strict=False)),
    }
