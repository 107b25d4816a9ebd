"""Races of ``contenders.py``: everything compiled in parallel into the caches on disk, baselines tried in separate
processes, the ceilings of the device measured; then, batch by batch, everyone timed side by side."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, Shape, print_rows, reason_of
from contenders import (
    BASELINES,
    EAGER,
    MAX_SCREENED_ROWS,
    NOTHING,
    READ,
    Entrant,
    Selection,
    Tree,
    entrants,
    import_flashinfer,
    trees,
)
from floor import READ_BYTES, measure_ceilings

from sgl_flashsample import LMHead
from sgl_flashsample.autotune import baselines
from sgl_flashsample.autotune.race import Ratio
from sgl_flashsample.autotune.timing import Call, Contender, Timer, Timing
from sgl_flashsample.autotune.workload import Workload
from sgl_flashsample.tools.samplings import SAMPLINGS

WORKERS = 15
PROBE = Shape(64, 151936)  # FlashInfer chooses its kernels by V
PROBE_ROWS = 2
MEMORY_SHARE = 0.8  # share of the device's memory, for all processes together
PROBE_BYTES = 2**30  # memory that a process takes which tries one contender, about


class Race:
    """Entrants of one batch, captured in CUDA graphs and timed side by side.

    unusual: of baselines that no CUDA graph can hold, {name: ``EAGER`` or why it cannot run}. reader: reads
    ``READ_BYTES``. refresh: in place of the batch's. copies: of the head, which the calls read in turns. failed: {name:
    reason} of those that cannot run.
    """

    def __init__(
        self,
        batch: Workload,
        entered: Sequence[Entrant],
        unusual: Mapping[str, str],
        reader: Callable[[], object] | None,
        refresh: Callable[[int], object] | None = None,
        copies: int = 1,
    ) -> None:
        self._timer, self._refresh, self._head_bytes = Timer(DEVICE), refresh or batch.refresh, batch.head.weight.nbytes
        self.entrants = [one for one in entered if unusual.get(one.name, EAGER) == EAGER]
        self.failed = {one.name: unusual[one.name] for one in entered if one not in self.entrants}
        self._eager = {name for name, how in unusual.items() if how == EAGER}
        self._ready: dict[str, Contender] = {}
        self._samples: dict[str, dict[int, float]] = {}
        self._clocks: list[float] = []
        calls: dict[str, Call] = {one.name: one.call for one in self.entrants}
        if reader is not None:
            calls[READ] = lambda step: reader()
        for name, call in calls.items():
            try:
                self._ready[name] = self._timer.contender(call, copies=copies, graph=name not in self._eager)
            except Exception as error:
                self.failed[name] = reason_of(error)
                gc.collect()  # the traceback holds the tensors of what ran out of memory

    def run(self, rounds: int, names: Sequence[str] | None = None) -> None:
        """Time all, or ``names``, in further rounds."""
        ready = {name: self._ready[name] for name in (self._ready if names is None else names)}
        first = len(self._clocks)
        timed = self._timer.rounds(ready, rounds, first=first, before_round=self._refresh)
        self._clocks += timed.clocks
        for name, samples in timed.samples.items():
            self._samples.setdefault(name, {}).update(enumerate(samples, first))

    def timing(self, name: str) -> Timing | None:
        return Timing.of(list(self._samples[name].values())) if name in self._samples else None

    def ratio(self, mine: str, theirs: str, alpha: float) -> Ratio | None:
        """The ratio in the rounds that both were in; None where one did not run, or with too few rounds."""
        rounds = sorted(self._samples.get(mine, {}).keys() & self._samples.get(theirs, {}).keys())
        one, other = ([self._samples[name][index] for index in rounds] for name in (mine, theirs))
        with contextlib.suppress(ValueError):
            return Ratio.of(one, other, [self._clocks[index] for index in rounds], alpha)
        return None

    def floor_us(self, moved_bytes: float) -> float | None:
        """Microseconds that moving so many bytes takes at the speed of the reader."""
        timing = self.timing(READ)
        return None if timing is None else moved_bytes * timing.us / READ_BYTES

    def rows(self, cell: dict[str, Any]) -> list[dict[str, Any]]:
        """One row of a result file per path and sampling, and dtype of the head where there are several, the fastest
        form of each; the older tree has none. ``READ`` is the time of reading the batch's own head once. cell: fields
        of every row."""
        fastest: dict[tuple[str, str, str], tuple[Timing, Entrant]] = {}
        for one in self.entrants:
            timing, key = self.timing(one.name), (one.dtype, one.sampling, one.path)
            if timing is not None and not one.older and (key not in fastest or timing.us < fastest[key][0].us):
                fastest[key] = timing, one
        rows = []
        for (dtype, sampling, path), (timing, one) in fastest.items():
            row = cell | ({"dtype": dtype} if dtype else {}) | {"sampling": sampling, "path": path}
            row |= {"us": round(timing.us, 2), "us_spread": round(timing.spread, 2)}
            row["form"] = one.form + (", without a graph" if one.name in self._eager else "")
            rows.append(row | ({"picked": True} if one.picked else {}))
        if (us := self.floor_us(self._head_bytes)) is not None:
            rows.append(cell | {"sampling": NOTHING, "path": READ, "us": round(us, 2), "us_spread": 0.0, "form": ""})
        return rows

    def gaps(self, cell: dict[str, Any]) -> list[dict[str, Any]]:
        """Contenders that could not run, for ``env.not_run`` of a result file."""
        return [cell | {"path": name, "reason": reason} for name, reason in self.failed.items()]


Job = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of a module and its arguments, for another process


class Session:
    """The races of one run. env: of its result file; what is missing and cannot run is recorded there. compiled:
    further jobs of the compiling processes; each returns what failed. tried: further contenders that are tried in
    processes of their own, {name: job}; each returns what ``verdict`` does."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        batches: Sequence[int],
        selection: Selection,
        env: dict[str, Any],
        compiled: Sequence[Job] = (),
        tried: Mapping[str, Job] | None = None,
    ) -> None:
        self.selection, self.env, self._started, self._flashinfer = selection, env, time.monotonic(), None
        env.setdefault("not_run", [])
        if baselines.FLASHINFER in selection.paths:
            self._flashinfer, missing = import_flashinfer()
            env["flashinfer"] = getattr(sys.modules.get("flashinfer"), "__version__", None)
            env["not_run"] += [{"path": "flashinfer", "reason": missing}] if missing is not None else []
        flashinfer = self._flashinfer is not None
        self.unusual = _warm_up(shapes, batches, selection, flashinfer, compiled, tried or {})
        self.ceilings = measure_ceilings(DEVICE)
        env |= self.ceilings.env

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def race(
        self,
        ours: Sequence[Tree],
        batch: Workload,
        rounds: int,
        cell: dict[str, Any],
        then: Callable[[Race, list[dict[str, Any]]], object] = lambda race, rows: None,
    ) -> list[dict[str, Any]]:
        """The rows of one batch. cell: fields of each. then: adds to them while everyone is ready to run."""
        enter = functools.partial(entrants, ours, batch, self._flashinfer, self.selection)
        return self.race_entrants(enter, batch, rounds, cell, then)

    def race_entrants(
        self,
        enter: Callable[[], Sequence[Entrant]],
        batch: Workload,
        rounds: int,
        cell: dict[str, Any],
        then: Callable[[Race, list[dict[str, Any]]], object] = lambda race, rows: None,
        copies: int = 1,
    ) -> list[dict[str, Any]]:
        """``race`` of those that ``enter`` returns. copies: of ``Race``."""
        rows: list[dict[str, Any]] = []
        try:
            race = Race(batch, enter(), self.unusual, self.ceilings.reader, copies=copies)
            race.run(rounds)
            rows = race.rows(cell)
            then(race, rows)
            gaps = race.gaps(cell)
            del race
        except Exception as error:  # the next batch may do
            gaps = [cell | {"path": "all", "reason": reason_of(error)}]
        self.env["not_run"] += gaps
        print_rows(f"{', '.join(f'{name}={value}' for name, value in cell.items())}, {self.seconds:.0f} s", rows)
        for gap in gaps:
            print(f"  not run: {gap['path']}: {gap['reason']}", flush=True)
        torch.compiler.reset()  # its limit of recompilations counts every batch size
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        return rows


def _warm_up(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    selection: Selection,
    flashinfer: bool,
    compiled: Sequence[Job],
    tried: Mapping[str, Job],
) -> dict[str, str]:
    """Compile what a race of ``selection`` needs. Returns, of the contenders that no CUDA graph can hold, {name:
    ``EAGER`` or why it cannot run}. Nothing without CUDA."""
    if DEVICE.type != "cuda":
        return {}
    started = time.monotonic()
    # Inductor moves Triton's cache for its whole process when it is not told where it is, and these processes share it.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    inductor = tempfile.mkdtemp(prefix="flashsample-inductor-")
    atexit.register(shutil.rmtree, inductor, ignore_errors=True)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": inductor, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    jobs = compiling_jobs(shapes, batches, selection)
    softcaps = {shape.softcap is not None: shape.softcap for shape in shapes}.values()
    probes: dict[str, Job] = {
        name: (_probe, (name, softcap, selection))
        for softcap in softcaps
        for name in _baseline_names(softcap, selection, flashinfer)
    }
    probes |= tried
    largest = max(_device_bytes(shape, rows) for shape in shapes for rows in batches)
    memory = MEMORY_SHARE * torch.cuda.get_device_properties(DEVICE).total_memory - len(probes) * PROBE_BYTES
    fitting = int(memory / largest)
    spawn, workers = multiprocessing.get_context("spawn"), max(1, min(WORKERS, (os.cpu_count() or 2) - 1, fitting))
    unusual: dict[str, str] = {}
    with contextlib.ExitStack() as pools:
        compiling = pools.enter_context(concurrent.futures.ProcessPoolExecutor(workers, spawn))
        calls = [compiling.submit(function, *arguments) for function, arguments in [*jobs, *compiled]]
        answers = {}
        for name, (function, arguments) in probes.items():  # one that dies takes its pool with it
            lone_process = pools.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn))
            answers[name] = lone_process.submit(function, *arguments)
        for call in calls:
            try:
                for failure in call.result():
                    print(f"  {failure}", flush=True)
            except Exception as error:
                print(f"  a compiling process failed: {reason_of(error)}", flush=True)
        for name, answer in answers.items():
            try:
                verdict = answer.result()
            except Exception as error:
                verdict = reason_of(error)
            if verdict is not None:
                unusual[name] = verdict
                print(f"  {name}: {verdict}", flush=True)
    # Inductor picked these while the GPU was shared; they are picked again, alone.
    for picked in Path(inductor).rglob("*.best_config"):
        picked.unlink()
    seconds = time.monotonic() - started
    done = f"{len(jobs) + len(compiled)} jobs compiled, {len(probes)} baselines tried"
    print(f"{done} in {seconds:.0f} s", flush=True)
    return unusual


def compiling_jobs(shapes: Sequence[Shape], batches: Sequence[int], selection: Selection) -> list[Job]:
    """The parts that compile by themselves: a sampling with the configurations of some batch size, truncated ones
    first, which take longest; then the baselines of each batch size."""
    ours = tuple(path for path in selection.paths if path not in BASELINES)
    jobs: dict[tuple, tuple[Shape, int, Selection]] = {}
    for shape in shapes:
        weight = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
        made = trees(shape, weight, 1, selection)
        for name in selection.samplings:
            one = dataclasses.replace(selection, samplings=(name,), paths=ours)
            for rows in sorted(batches, reverse=True):
                labels = [tree.labels(rows, one) for tree in made]
                jobs.setdefault((shape, name, *labels, rows > MAX_SCREENED_ROWS), (shape, rows, one))
        del made, weight
    ordered = sorted(jobs.values(), key=lambda job: SAMPLINGS[job[2].samplings[0]].truncation is None)
    others = tuple(path for path in selection.paths if path in BASELINES)
    compiled = dataclasses.replace(selection, paths=others, compared=None)
    ordered += [(shape, rows, compiled) for shape in shapes for rows in batches if others]
    return [(_call_all, job) for job in ordered]


def _device_bytes(shape: Shape, rows: int) -> float:
    """Memory that ``_call_all`` takes, about: a head, its INT8 copies, logits and edits of every kind, workspaces."""
    return 2.2 * shape.vocab * shape.hidden * 2 + 24.0 * rows * shape.vocab + 1.5e6 * rows


def _baseline_names(softcap: float | None, selection: Selection, flashinfer: bool) -> list[str]:
    weight = torch.empty(1, PROBE.hidden, dtype=torch.bfloat16, device=DEVICE)
    module = import_flashinfer()[0] if flashinfer else None
    tried = entrants([], Workload(LMHead(weight, softcap=softcap), 1, "typical"), module, selection)
    return [one.name for one in tried if one.path != baselines.GEMM]


def _call_all(shape: Shape, rows: int, selection: Selection) -> list[str]:
    """Call everything of one batch size but FlashInfer's; returns what failed."""
    weight = torch.zeros(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
    ours = trees(shape, weight, rows, selection)
    failed = []
    for one in entrants(ours, Workload(ours[0].head, rows, "typical"), None, selection):
        try:
            one.call(0)
        except Exception as error:
            failed.append(f"{shape} B={rows} {one.name}: {reason_of(error)}")
    torch.cuda.synchronize()
    torch.compiler.reset()
    del ours, weight
    torch.cuda.empty_cache()
    return failed


def _probe(name: str, softcap: float | None, selection: Selection) -> str | None:
    """None for a baseline that can be captured, else ``EAGER`` or why it cannot be called at all."""
    weight = torch.randn(PROBE.vocab, PROBE.hidden, device=DEVICE).bfloat16()
    module = import_flashinfer()[0] if baselines.FLASHINFER in name else None
    tried = entrants([], Workload(LMHead(weight, softcap=softcap), PROBE_ROWS, "typical"), module, selection)
    return verdict(name, next(one.call for one in tried if one.name == name))


def verdict(name: str, call: Call) -> str | None:
    """None for a call that can be captured, else ``EAGER`` or why it cannot be called at all."""
    try:
        call(0)
        torch.cuda.synchronize()
    except Exception as error:
        return reason_of(error)
    try:
        Timer(DEVICE).contender(call).replay()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {name} is timed without a graph: {reason_of(error)}", flush=True)
        return EAGER
    return None
