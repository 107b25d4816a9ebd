"""Ten thousand steps of the sampler, under PyTorch's profiler: does one wait for the GPU, take memory from the driver,
or compile or load a kernel?

    python benchmarks/hot_path.py --out benchmarks/results/h200-hot-path.json

Steps are calls of ``sample`` with and without a screen, of each kind of batch in turn, with batch sizes in random
order, and replays of CUDA graphs of them. Each kind has been called once with each size before, as a server does when
it starts. Of each step CUDA's calls are counted, by the names in ``step_profile.py``, and the kernels that Triton
loads. Three steps more are planted: one waits, one allocates, and one draws from a head of another type, whose kernels
are new. The exit code is 1 where a step has done one of these things, or where what is planted is not noticed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, SHAPES, Batch, make_parser, new_env, write_result
from step_profile import ALLOCATING, SYNCHRONISING
from triton import knobs

from sgl_flashsample import BatchParams, LMHead, Screen, Truncation, resolve, sample
from sgl_flashsample.dispatch import make_workspace

SIZES = (1, 3) if DRY_RUN else (1, 3, 17, 64)
STEPS = 20 if DRY_RUN else 10_000
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


def params_of(batch: Batch, kind: str) -> BatchParams:
    temperature = batch.full(0.0 if kind == "greedy" else 0.8)
    truncation = Truncation(batch.full(50, torch.int32), batch.full(0.9), batch.full(0.0)) if kind == "k50p90" else None
    edits = batch.edits if kind == "edited" else None
    return BatchParams(temperature, batch.seed, batch.position[0], truncation, edits, all_greedy=kind == "greedy")


def make_steps() -> dict[str, list[Step]]:
    """By kind and way: a step of each batch size."""
    shape = SHAPES[min(1, len(SHAPES) - 1)]
    head = LMHead(shape.weight(), softcap=shape.softcap)
    table = resolve(head).dispatch
    options: dict[str, Any] = {"workspace": make_workspace(head, max(SIZES), table=table), "table": table}
    ways: dict[str, dict[str, Any]] = {"": options}
    if not DRY_RUN:
        ways[", with a screen"] = options | {"screen": Screen(head, max(SIZES))}
    batches = [Batch(head, size) for size in SIZES]
    steps: dict[str, list[Step]] = {}
    for kind in ("plain", "greedy", "k50p90", "edited", "logprobs"):
        for way, given in ways.items():
            named = given | ({"return_logprob": True} if kind == "logprobs" else {})
            calls = [make_step(head, batch, kind, named) for batch in batches]
            for call in calls:
                call()
            steps[kind + way] = calls
            if not DRY_RUN:
                steps[f"{kind}{way}, replayed"] = [captured(call) for call in calls]
    return steps


def make_step(head: LMHead, batch: Batch, kind: str, options: dict[str, Any]) -> Step:
    params = params_of(batch, kind)
    return lambda: sample(batch.hidden, head, params, **options)


def captured(call: Step) -> Step:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    graph.outputs = outputs  # its memory
    return graph.replay


def count(steps: list[Step]) -> Counter[str]:
    """What these steps have done, one after the other."""
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


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of all kinds together")
    options = parser.parse_args()
    steps, choose = make_steps(), random.Random(0)
    result: dict[str, Any] = {"env": new_env(), "rows": []}
    for kind, calls in steps.items():
        found, left = Counter[str](), -(-options.steps // len(steps))
        row = {"kind": kind, "steps": left}
        while left:
            part = min(PART, left)
            found += count([choose.choice(calls) for _ in range(part)])
            left -= part
        result["rows"].append(row | {name: found[name] for name in ("waits", "allocates", "loads", "calls")})
        print(result["rows"][-1], flush=True)
        write_result(options.out, result)
    tensor, calls = torch.zeros(1, device=DEVICE), next(iter(steps.values()))
    planted: list[Step] = [tensor.item, lambda: torch.empty(2**31, dtype=torch.int8, device=DEVICE)]
    head = LMHead(torch.zeros(99, 40, device=DEVICE))  # in float32: kernels that no step before has launched
    planted.append(lambda: sample(torch.zeros(1, 40, device=DEVICE), head, params_of(Batch(head, 1), "plain")))
    found = count([*calls, *planted, *calls])
    result["planted"] = {name: found[name] for name in ("waits", "allocates", "loads")}
    print("planted", result["planted"], flush=True)
    write_result(options.out, result)
    done = any(row[name] for row in result["rows"] for name in ("waits", "allocates", "loads"))
    return int(not DRY_RUN and (done or not all(result["planted"].values())))


if __name__ == "__main__":
    sys.exit(main())
