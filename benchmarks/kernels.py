"""Races the whole last step, LM head to token, against its rivals on this GPU; prints tables, writes JSON.

    python benchmarks/kernels.py --out benchmarks/results/h200-kernels.json

Every path of ours and every rival (benchmarks/rivals.py) in one race per shape and batch size: CUDA-graph replay, cold
weights, hot hidden states, fresh hidden states each round, other noise in every call, interleaved rounds, medians and
half the distance between the quartiles, beside a kernel that only reads. ``--dry-run`` draws on small shapes and times
nothing; it works without a GPU. What cannot run is left out, with the reason in ``env.not_run``.
"""

from __future__ import annotations

import sys

if "--dry-run" in sys.argv:
    from sgl_flashsample.demo import interpreter

    interpreter.turn_on()  # before triton is imported

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import MODES, OURS, PATHS, STEPS, Shape, Wanted, contenders, first_line, steps_of
from rivals import Contender, Inputs, import_flashinfer
from sgl_flashsample.autotune import measure
from sgl_flashsample.autotune.inputs import REACH, directions

from sgl_flashsample import tuned

# Logits of the benchmark's head: SLOPE * log(rank) below the first, and Gaussian noise of this deviation: the "typical"
# distribution of benchmarks/features.py. The rank's part lies along one direction of all channels, as long in a hidden
# state as REACH in each of them: a single large column would leave an INT8 copy of the head nothing of the others.
SLOPE, DEVIATION = 1.2, 2.0
READ_BYTES = 2**31
MATMUL = 8192  # rows and columns of the product whose rate is the ceiling of arithmetic


SHAPES = [Shape(4096, 151936), Shape(2048, 151936), Shape(8192, 128256), Shape(2880, 201088), Shape(3840, 262144, 30.0)]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
DRY_SHAPES = [Shape(64, 1024), Shape(48, 777, 30.0)]
DRY_BATCHES = [1, 3]


def direction(shape: Shape, device: str) -> torch.Tensor:
    """``[D]``: what the hidden states have in common."""
    return REACH * shape.hidden**0.5 * directions(shape.hidden, torch.device(device))[0]


def make_weight(shape: Shape, device: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, generator=generator)
    weight *= DEVIATION / shape.hidden**0.5
    rank = torch.randperm(shape.vocab, device=device, generator=generator) + 1
    along = direction(shape, device)
    weight.addr_(-SLOPE * rank.float().log(), along / along.square().sum())
    return weight.to(dtype)


def prepare(
    found: list[Contender], capture: dict[str, str], dry: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What can be raced, captured as far as ``capture`` says it can be, and the reasons why the others cannot."""
    ready: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for contender in found:
        call, how = steps_of(contender), capture.get(contender.name, "graph")
        try:
            if how not in ("graph", "eager"):
                raise RuntimeError(how)
            call()
            ready[contender.name] = call if dry or how == "eager" else measure.capture(call).replay
        except Exception as error:
            failed[contender.name] = first_line(error)
            gc.collect()  # the traceback held the tensors of what ran out of memory
    return ready, failed


def race(
    ready: dict[str, Callable[[], object]], inputs: Inputs, reader: Callable[[], object] | None, rounds: int
) -> dict[str, measure.Timing]:
    """Microseconds per call; without a GPU, one of each. ``reader`` may be None there."""
    if reader is None:
        inputs.refresh()
        return dict.fromkeys(ready, measure.Timing(1.0, 0.0, 1))
    graph = measure.capture(lambda: [reader() for _ in range(STEPS)])
    timings = measure.race_replays(
        {**ready, "read": graph.replay}, rounds=rounds, replays=1, before_round=inputs.refresh
    )
    return {name: measure.Timing(t.us / STEPS, t.spread / STEPS, t.rounds) for name, t in timings.items()}


def rows_of(
    shape: Shape, rows: int, found: list[Contender], timings: dict[str, measure.Timing], capture: dict[str, str], modes
) -> list[dict[str, Any]]:
    """One row per path and mode: its fastest form. The GEMM, which knows no mode, is a row of every one."""
    best: dict[tuple[str, str], tuple[Contender, measure.Timing]] = {}
    for contender in found:
        timing = timings.get(contender.name)
        for mode in modes if contender.path == "gemm" else (contender.mode,):
            key = (mode, contender.path)
            if timing is not None and (key not in best or timing.us < best[key][1].us):
                best[key] = (contender, timing)
    order = sorted(best, key=lambda key: (MODES.index(key[0]), PATHS.index(key[1])))
    return [
        {
            "D": shape.hidden,
            "V": shape.vocab,
            "B": rows,
            "mode": mode,
            "path": path,
            "us": round(best[mode, path][1].us, 2),
            "us_spread": round(best[mode, path][1].spread, 2),
            "config": best[mode, path][0].form
            + ("; eager, CUDA events" if capture.get(best[mode, path][0].name) == "eager" else ""),
        }
        for mode, path in order
    ]


def agreement(found: list[Contender]) -> list[dict[str, Any]]:
    """How many tokens of our other paths are those of the first, and of greedy ones those of an argmax. They differ
    where two logits are equal to within the rounding of their sums."""
    counted = []
    for mode in MODES:
        of_mode = {c.path: c for c in found if c.mode == mode and (c.path in OURS or mode == "greedy")}
        tokens = {}
        for path, contender in of_mode.items():
            try:
                tokens[path] = contender.draw(0).flatten()
            except Exception:  # its reason is in not_run
                continue
        first = next((path for path in OURS if path in tokens), None)
        for path in tokens if first is not None else ():
            if path != first:
                same = int((tokens[path] == tokens[first]).sum())
                counted.append({"mode": mode, "paths": [first, path], "same": same, "of": len(tokens[path])})
    return counted


def table(rows: list[dict[str, Any]], read_tb_s: float | None) -> str:
    lines = []
    for mode in MODES:
        of_mode = [row for row in rows if row["mode"] == mode]
        if not of_mode:
            continue
        bytes_read = of_mode[0]["D"] * of_mode[0]["V"] * torch.bfloat16.itemsize
        for row in of_mode:
            over = f"  {row['us'] / (bytes_read / read_tb_s / 1e6):6.3f} of the floor" if read_tb_s else ""
            line = f"  {mode:6} {row['path']:21} {row['us']:8.1f} +- {row['us_spread']:5.1f} us{over}"
            lines.append(f"{line}  {row['config']}")
    return "\n".join(lines)


def save(result: dict[str, Any], out: Path) -> None:
    reads = [read["tb_s"] for read in result["env"]["reads"]]
    result["floor_tb_s"] = round(statistics.median(reads), 4) if reads else None
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(out)


def resumed(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The result to go on with. Raises ValueError where ``out`` holds a result of other arguments."""
    try:
        result = json.loads(out.read_text())
        before = result["env"]["arguments"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out} is no result to resume: {first_line(error)}") from None
    if before != wanted:
        raise ValueError(f"{out} was made with {before}; expected {wanted}")
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes, batches = (DRY_SHAPES, DRY_BATCHES) if "--dry-run" in sys.argv else (SHAPES, BATCHES)
    names = {str(shape): shape for shape in shapes}
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, after every shape")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--shapes", nargs="+", choices=names, default=list(names), metavar="DxV")
    parser.add_argument("--batches", nargs="+", type=int, default=batches)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--resume", action="store_true", help="keep the shapes that --out holds already")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, nothing is timed; needs no GPU")
    options = parser.parse_args()
    if min(options.batches) < 1 or options.rounds < 2:
        parser.error(f"batches are {options.batches}, rounds {options.rounds}; expected at least 1 and at least 2")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run works without one")
    options.shapes = [names[name] for name in options.shapes]
    return options


def main() -> None:
    options, started = parse(), time.time()
    wanted = Wanted(tuple(options.paths), tuple(options.modes), options.dry_run)
    arguments = {name: getattr(options, name) for name in ("paths", "batches", "modes", "rounds", "dry_run")}
    env: dict[str, Any] = {"arguments": arguments, "shapes": [], "reads": [], "clocks": [], "agreement": []}
    result: dict[str, Any] = {"env": env | {"not_run": []}, "floor_tb_s": None, "rows": []}
    try:
        result = resumed(options.out, arguments) if options.resume and options.out.exists() else result
    except ValueError as error:
        sys.exit(f"error: {error}")
    env = result["env"]
    todo = [shape for shape in options.shapes if str(shape) not in env["shapes"]]
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)

    flashinfer, capture, reader, clocks = None, {}, None, dict
    if not todo:
        sys.exit(f"{options.out} holds every shape already")
    env["not_run"] = [gap for gap in env["not_run"] if "B" in gap]  # the others are found anew
    for path in OURS:
        if path in options.paths and path not in list(tuned.Path):
            env["not_run"].append({"path": path, "reason": "this version of sgl_flashsample has no such path"})
    try:
        flashinfer = import_flashinfer()
    except Exception as error:
        env["not_run"].append({"path": "flashinfer", "reason": first_line(error)})
        print(f"no FlashInfer rivals: {first_line(error)}", flush=True)
    if not options.dry_run:
        import warm

        capture = warm.up(todo, options.batches, wanted, flashinfer is not None)
        reader, clocks, ceilings = warm.ceilings(READ_BYTES, MATMUL)
        now = measure.environment()
        if env.get("device", now["device"]) != now["device"]:
            sys.exit(f"error: {options.out} is of {env['device']}; expected {now['device']}")
        words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
        env.update(now, command=" ".join(["python", *words]), **ceilings)
        env["flashinfer"] = getattr(sys.modules.get("flashinfer"), "__version__", None)

    torch.manual_seed(0)
    for shape in todo:
        weight = make_weight(shape, device, dtype)
        before = clocks()
        for rows in options.batches:
            inputs = Inputs.make(weight, shape.softcap, rows, STEPS, direction(shape, device).to(dtype))
            found = contenders(inputs, flashinfer, wanted)
            ready, failed = prepare(found, capture, options.dry_run)
            timings = race(ready, inputs, reader, options.rounds)
            where = {"D": shape.hidden, "V": shape.vocab, "B": rows}
            env["not_run"] += [where | {"path": name, "reason": reason} for name, reason in failed.items()]
            env["agreement"] += [where | same for same in agreement(found)]
            read_tb_s = READ_BYTES / timings["read"].us / 1e6 if "read" in timings else None
            if read_tb_s:
                env["reads"].append(where | {"tb_s": round(read_tb_s, 4)})
            new = rows_of(shape, rows, found, timings, capture, options.modes)
            result["rows"] += new
            print(f"{shape} B={rows}, {time.time() - started:.0f} s", flush=True)
            print(table(new, read_tb_s), *(f"  not run: {n}: {r}" for n, r in failed.items()), sep="\n", flush=True)
            del inputs, found, ready
            if not options.dry_run:
                torch.compiler.reset()  # its limit of recompilations counts every batch size
                gc.collect()
                torch.cuda.empty_cache()
        env["clocks"].append({"shape": str(shape), "before": before, "after": clocks()})
        env["shapes"].append(str(shape))
        del weight
        save(result, options.out)
    save(result, options.out)
    print(f"floor {result['floor_tb_s']} TB/s; {time.time() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
