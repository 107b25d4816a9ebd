"""Ten thousand steps of the sampler, under PyTorch's profiler: does one wait for the GPU, take memory from the driver,
or compile or load a kernel?

    python benchmarks/run.py hot-path --out benchmarks/results/h200-hot-path.json

Steps are calls of ``sample`` with a screen and without, of each kind of batch, with batch sizes in random order, and
replays of CUDA graphs of them. Each has been called once with each size before, as by a server that starts. Of each
step CUDA's calls are counted, by the names in ``step_profile.py``, and the kernels that Triton loads. Three steps more
are planted: one waits, one allocates, and one draws from a head of another type, whose kernels are new. The exit code
is 1 where a step has done one of these things, or where what is planted is not noticed.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, SHAPES, Benchmark, Result
from contenders import PICKED, PICKED_WITH_SCREEN, Selection, Tree, entrants
from step_profile import ALLOCATING, SYNCHRONISING
from triton import knobs

from sgl_flashsample.autotune.workload import Workload
from sgl_flashsample.kernels.config import cdiv

SIZES = (1, 3) if DRY_RUN else (1, 3, 17, 64)
STEPS = 20 if DRY_RUN else 10_000
RACED, WAYS = ("t1", "greedy", "k50p90", "edits", "logprob"), (PICKED, PICKED_WITH_SCREEN)
PART = 1_000  # steps of one profile
COUNTED = {"waits": SYNCHRONISING, "allocates": ALLOCATING}
Step = Callable[[], Any]


class Kernels:
    """Counts what Triton compiles or loads, while it is entered."""

    def __enter__(self) -> Kernels:
        self.count = 0
        knobs.runtime.kernel_load_start_hook.add(self._add)
        return self

    def __exit__(self, *error: object) -> None:
        knobs.runtime.kernel_load_start_hook.remove(self._add)

    def _add(self, *arguments: Any, **named: Any) -> None:
        self.count += 1


def make_steps() -> dict[str, list[Step]]:
    """A step of each batch size, by kind of batch and way."""
    shape = SHAPES[min(1, len(SHAPES) - 1)]
    tree = Tree(shape.weight(), shape.softcap, max(SIZES), tuned=True, folder=None)
    steps: dict[str, list[Step]] = {}
    for size in SIZES:
        for one in entrants([tree], Workload(tree.head, size, "typical"), None, Selection(WAYS, RACED)):
            one.call(0)
            steps.setdefault(f"{one.sampling}, {one.path}", []).append(functools.partial(one.call, 1))
            if not DRY_RUN:
                steps.setdefault(f"{one.sampling}, {one.path}, replayed", []).append(captured(one.call))
    return steps


def captured(call: Callable[[int], Any]) -> Step:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = call(1)
    graph.tokens = tokens  # its memory
    return graph.replay


def count(steps: list[Step]) -> Counter[str]:
    """Waits, allocations, loads and calls of CUDA of these steps, one after the other."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not DRY_RUN:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    profiler, marked = torch.profiler.profile(activities=activities), torch.profiler.record_function("steps")
    with Kernels() as kernels, profiler, marked:
        for step in steps:
            step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return counted(json.loads(file.read_text())["traceEvents"]) + Counter(loads=kernels.count)


def counted(events: list[dict[str, Any]]) -> Counter[str]:
    """Calls of CUDA within the steps, of a trace."""
    found: Counter[str] = Counter()
    (whole,) = (one for one in events if one.get("name") == "steps" and one.get("cat") == "user_annotation")
    for event in events:
        inside = whole["ts"] <= event.get("ts", -1) <= whole["ts"] + whole["dur"]
        if inside and event.get("cat") in ("cuda_runtime", "cuda_driver"):
            found["calls"] += 1
            for what, names in COUNTED.items():
                found[what] += event["name"] in names
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help="of all kinds together")


def measure(options: Any, result: Result) -> int:
    steps, choose = make_steps(), random.Random(0)
    for kind, calls in steps.items():
        found, left = Counter[str](), cdiv(options.steps, len(steps))
        row = {"kind": kind, "steps": left}
        while left:
            part = min(PART, left)
            found += count([choose.choice(calls) for _ in range(part)])
            left -= part
        row |= {name: found[name] for name in ("waits", "allocates", "loads", "calls")}
        print(row, flush=True)
        result.add([row])
    tensor, calls = torch.zeros(1, device=DEVICE), next(iter(steps.values()))
    wrong: list[Step] = [tensor.item, lambda: torch.empty(2**31, dtype=torch.int8, device=DEVICE)]
    other = Tree(torch.zeros(99, 40, device=DEVICE), None, 1, tuned=False, folder=None)  # float32: its kernels are new
    wrong.append(functools.partial(other.entrant(Workload(other.head, 1), "t1", PICKED).call, 0))
    found = count([*calls, *wrong, *calls])
    planted = {name: found[name] for name in ("waits", "allocates", "loads")}
    print("planted", planted, flush=True)
    result.data["planted"] = planted
    result.write()
    done = any(row[name] for row in result.rows for name in planted)
    return int(not DRY_RUN and (done or not all(planted.values())))


BENCHMARKS = {"hot-path": Benchmark(__doc__, measure, add_options, place=("kind",))}
