"""What benchmarks/kernels.py does before it measures: compiles everything in parallel, asks in processes of their own
which rivals a CUDA graph can hold, and measures the two ceilings of the device."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floor
import torch
from contenders import OURS, STEPS, Shape, Wanted, contenders, first_line, steps_of
from rivals import Inputs, import_flashinfer
from sgl_flashsample.autotune import measure
from sgl_flashsample.kernels.head import LMHead

from sgl_flashsample.tuned import Work, tile_for

WORKERS = 15
PROBE = Shape(64, 151936)  # FlashInfer chooses its kernels by V
PROBE_ROWS = 2
# Readers of the floor: programs per multiprocessor, int32 words per step, warps, depth of the pipeline.
READERS = [(8, 2048, 8, 4), (16, 2048, 8, 4), (4, 4096, 8, 4), (8, 4096, 8, 3), (4, 8192, 8, 3), (16, 1024, 4, 4)]


def _call_all(shape: Shape, rows: int, wanted: Wanted) -> list[str]:
    """Call everything of one batch size but FlashInfer's, so that its binaries are in the caches on disk."""
    weight = torch.zeros(shape.vocab, shape.hidden, dtype=torch.bfloat16, device="cuda")
    failed = []
    for contender in contenders(Inputs.make(weight, shape.softcap, rows, STEPS), None, wanted):
        try:
            contender.draw(0)
        except Exception as error:
            failed.append(f"{shape} B={rows} {contender.name}: {first_line(error)}")
    torch.cuda.synchronize()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return failed


def _probe(name: str, softcap: float | None, wanted: Wanted) -> str:
    """How the contender of this name can be timed, "graph" or "eager", or why it cannot be called."""
    weight = torch.randn(PROBE.vocab, PROBE.hidden, device="cuda").bfloat16()
    inputs = Inputs.make(weight, softcap, PROBE_ROWS, STEPS)
    flashinfer = import_flashinfer() if name.startswith("flashinfer") else None
    contender = next(found for found in contenders(inputs, flashinfer, wanted) if found.name == name)
    try:
        contender.draw(0)
        torch.cuda.synchronize()
    except Exception as error:
        return first_line(error)
    try:
        graph = measure.capture(steps_of(contender))
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {name} is timed without a graph: {first_line(error)}", flush=True)
        return "eager"
    return "graph"


def _names(softcap: float | None, flashinfer: bool, wanted: Wanted) -> list[str]:
    """Of the rivals that are to be raced. A failed capture can leave a process unable to draw: each gets its own."""
    weight = torch.empty(1, PROBE.hidden, dtype=torch.bfloat16, device="cuda")
    module = import_flashinfer() if flashinfer else None
    found = contenders(Inputs.make(weight, softcap, 1, STEPS), module, wanted)
    return [contender.name for contender in found if contender.path not in (*OURS, "gemm")]


def _ordered(shapes: list[Shape], batches: list[int]) -> list[tuple[Shape, int]]:
    """Batches with tiles of their own first: what shares a binary with them then finds it made."""
    first, rest = [], []
    for rows in sorted(batches, reverse=True):
        for shape in shapes:
            head = LMHead(torch.empty(1, shape.hidden, dtype=torch.bfloat16, device="cuda"))
            tiles_of_it = tuple(tile_for(head, rows, work) for work in (Work.PLAIN, Work.TRUNCATE))
            seen = {key for key, _ in first}
            if (shape, tiles_of_it) in seen:
                rest.append((shape, rows))
            else:
                first.append(((shape, tiles_of_it), rows))
    return [(shape, rows) for (shape, _), rows in first] + rest


def up(shapes: list[Shape], batches: list[int], wanted: Wanted, flashinfer: bool) -> dict[str, str]:
    """Compile what the race needs; {contender: "graph", "eager" or why it cannot run}, of the rivals."""
    started = time.time()
    # Inductor moves Triton's cache for its whole process when it is not told where it is, and these processes share it.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    inductor = tempfile.mkdtemp(prefix="flashsample-inductor-")
    atexit.register(shutil.rmtree, inductor, ignore_errors=True)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": inductor, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    jobs = _ordered(shapes, batches)
    softcaps = {shape.softcap is not None: shape.softcap for shape in shapes}.values()
    probes = {name: softcap for softcap in softcaps for name in _names(softcap, flashinfer, wanted)}
    spawn = multiprocessing.get_context("spawn")
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 1))
    found: dict[str, str] = {}
    with contextlib.ExitStack() as pools:
        compiling = pools.enter_context(concurrent.futures.ProcessPoolExecutor(workers, spawn))
        calls = [compiling.submit(_call_all, *job, wanted) for job in jobs]
        answers = {}
        for name, softcap in probes.items():  # one that dies takes its pool with it
            own = pools.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn))
            answers[name] = own.submit(_probe, name, softcap, wanted)
        for call in calls:
            try:
                for failure in call.result():
                    print(f"  {failure}", flush=True)
            except Exception as error:
                print(f"  a compiling process failed: {first_line(error)}", flush=True)
        for name, answer in answers.items():
            try:
                found[name] = answer.result()
            except Exception as error:
                found[name] = first_line(error)
    # Inductor picked these while the GPU was shared; they are picked again, alone.
    for picked in Path(inductor).rglob("*.best_config"):
        picked.unlink()
    print(f"{len(jobs)} batches compiled, {len(probes)} rivals tried in {time.time() - started:.0f} s", flush=True)
    return found


def ceilings(
    read_bytes: int, matmul: int
) -> tuple[Callable[[], object], Callable[[], dict[str, str]], dict[str, object]]:
    """The fastest reader of ``read_bytes``, a way to read the clocks under load, and both ceilings for ``env``."""
    words = torch.randint(-(2**31), 2**31 - 1, (read_bytes // 4,), dtype=torch.int32, device="cuda")
    readers: dict[str, Callable[[], object]] = {}
    for config in READERS:
        readers["programs per SM {}, words {}, warps {}, stages {}".format(*config)] = floor.read_call(words, *config)
    readers["torch.amax"] = lambda: words.view(-1, 2**14).amax(-1)
    left, right = (torch.randn(matmul, matmul, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    timings = measure.race({**readers, "matmul": lambda: torch.mm(left, right, out=product)}, rounds=5, replays=3)
    name = min(readers, key=lambda reader: timings[reader].us)
    for reader in readers:
        print(f"  read {read_bytes / timings[reader].us / 1e6:.3f} TB/s: {reader}", flush=True)
    flops = 2 * matmul**3 / timings["matmul"].us / 1e6
    print(f"  matmul {flops:.0f} TFLOP/s", flush=True)

    def clocks() -> dict[str, str]:
        """As nvidia-smi says while the GPU is busy for about a second."""
        for _ in range(int(1e6 / timings[name].us)):
            readers[name]()
        query = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        torch.cuda.synchronize()
        return dict(zip(query.split(","), said.split(", "), strict=False))

    found: dict[str, Any] = {"reader": name, "read_bytes": read_bytes, "matmul_tflop_s": round(flops, 1)}
    return readers[name], clocks, found
