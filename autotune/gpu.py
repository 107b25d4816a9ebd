"""The bench that measures on a GPU: what a worker process answers (``worker.py``).

The unit is the whole path as a server runs it, replayed from a CUDA graph that holds as many calls as a millisecond
takes, each with noise of its own; weights cold, hidden states hot. Without a GPU the same calls run one by one, for
tests: their times mean nothing.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from .. import __version__
from ..flashinfer_path import draw_with_flashinfer
from ..kernels.head import LMHead, Workspace
from ..kernels.lm_head_sample import lm_head_sample, num_parts
from ..kernels.sample_logits import num_read_parts, sample_logits
from ..kernels.screened_sample import screened_sample
from ..paths import compute_logits
from ..resolution import device_of, environment
from ..screen import Screen
from ..tuned import draw_for
from ..work import Path, Work
from . import nvml, rivals
from .gate import Gate
from .inputs import DTYPES, STEPS, Batch, copies_needed, make_weight
from .plan import LARGEST_SCREENED
from .race import rotated
from .space import Config, ReadConfig, ScreenConfig
from .trials import config_of
from .worker import error_of

LATE = "compiling late"  # what should have been compiled before it was to be checked
SAMPLE_US = 1000.0  # of one sample, at least
SCREENING_SAMPLES = 3
WARM_SECONDS = 0.3
SOFTCAP = 30.0  # of heads that have one: its value moves no time

Call = Callable[[int], Any]


@dataclasses.dataclass
class Contender:
    """Something that can be timed. replay: ``calls`` calls of ``call``, which holds what a graph writes to."""

    replay: Callable[[], None]
    calls: int
    call: Call


class GpuBench:
    """One head at a time; batches are made when they are first needed."""

    note: Callable[[str], None] = staticmethod(lambda text: None)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shape: dict[str, Any] | None = None
        self._heads: list[LMHead] = []
        self._screens: list[Screen] = []  # of the heads, made when they are first needed
        self._batches: dict[int, Batch] = {}
        self._workspace = Workspace(1, device)
        self._racing: dict[str, Contender] = {}
        self._race_batch: Batch | None = None
        self._gate: Gate | None = None
        self._compiled = 0.0  # seconds that this process has compiled for
        self._bus_id = ""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            domain, bus, place = (getattr(properties, f"pci_{n}_id", 0) for n in ("domain", "bus", "device"))
            self._bus_id = f"{domain:08X}:{bus:02X}:{place:02X}.0"

    @classmethod
    def make(cls, spec: dict[str, Any]) -> GpuBench:
        device = torch.device(spec.get("device", "cuda"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "this machine has no CUDA device; run and verify measure on one, other commands need none"
            )
        bench = cls(device)
        triton.knobs.compilation.listener = bench._listen
        return bench

    def _listen(self, *, times: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self._compiled += times.total * 1e-6

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "head" in request:
            self._use(request["head"])
        return getattr(self, f"_{request['op']}")(request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        env = environment() | {"python": platform.python_version(), "sgl_flashsample": __version__}
        if self.device.type != "cuda":
            device = {"name": "cpu", "cc": "0.0", "sms": 1, "l2_mb": 0, "smem_optin": 232448}
            return {"device": device, "env": env, "busy": 0}
        busy, device = nvml.busy_percent(self._bus_id), dataclasses.asdict(device_of(self.device))
        properties = torch.cuda.get_device_properties(self.device)
        return {"device": device, "env": env, "busy": busy, "memory": properties.total_memory}

    def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"copies": len(self._heads)}

    def _use(self, shape: dict[str, Any]) -> None:
        """Make the head, unless it is there."""
        if shape == self._shape:
            return
        self._shape, self._heads, self._screens, self._batches, self._racing = None, [], [], {}, {}
        weight = make_weight(shape["vocab"], shape["hidden"], DTYPES[shape["dtype"]], self.device)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 0
        copies = [weight, *(weight.clone() for _ in range(copies_needed(weight, l2) - 1))]
        softcap = SOFTCAP if shape.get("softcap") else None
        self._heads = [LMHead(copy, softcap=softcap) for copy in copies]
        self._gate = Gate(self._heads[0])
        self._shape = dict(shape)
        if self.device.type == "cuda":  # clocks and temperature as they are under load
            batch, until = self._batch(16), time.monotonic() + WARM_SECONDS
            while time.monotonic() < until:
                for _ in range(8):
                    torch.mm(batch.hidden, weight.T)
                torch.cuda.synchronize(self.device)

    def _trial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Tokens first; then the median time of a few samples, per batch size."""
        began, compiled = time.monotonic(), self._compiled
        config, work = config_of(request["path"], request["config"]), Work(request["work"])
        self.note(request["label"])
        assert self._gate is not None
        self._gate.check(config, work)
        checked, compiled = time.monotonic(), self._compiled - compiled
        us = {}
        for rows in request["batches"]:
            batch = self._batch(rows)
            contender = self._contender(self._call(config, work, batch), batch)
            us[str(rows)] = statistics.median(self._time([contender] * SCREENING_SAMPLES))
        seconds = {"check": checked - began - compiled, LATE: compiled, "timing": time.monotonic() - checked}
        return {"us": us, "checked": "tokens", "seconds": seconds}

    def _gtest(self, request: dict[str, Any]) -> dict[str, Any]:
        work, path = Work(request["work"]), request["path"]
        config = None if path == Path.FLASHINFER else config_of(path, request["config"])
        self.note(request["label"])
        assert self._gate is not None
        p, draws = self._gate.g_test(config, work, request["draws"])
        return {"p": p, "draws": draws}

    def _setup(self, request: dict[str, Any]) -> dict[str, Any]:
        """Get ready to race ``entries`` in batches of ``batch`` rows; which of them cannot, and why."""
        self._racing, work = {}, Work(request["work"])
        batch = self._race_batch = self._batch(request["batch"])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        failed: dict[str, Any] = {}
        for entry in request["entries"]:
            self.note(entry["name"])
            try:
                if entry["path"] == Path.FLASHINFER:
                    call = self._flashinfer_call(batch)
                elif entry.get("config") is None:
                    call = rivals.call_of(entry["name"], self._heads, batch, work)
                else:
                    call = self._call(config_of(entry["path"], entry["config"]), work, batch)
                self._racing[entry["name"]] = self._contender(call, batch)
            except Exception as error:
                found = error_of(error)["error"]
                if found["fatal"]:
                    raise
                failed[entry["name"]] = found
        self._time(list(self._racing.values()))
        return {"failed": failed}

    def _rounds(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time ``names`` once per round, in rotated order, from round ``first`` on."""
        samples: dict[str, list[float]] = {name: [] for name in request["names"]}
        clocks: list[float] = []
        assert self._race_batch is not None
        for index in range(request["first"], request["first"] + request["rounds"]):
            self._race_batch.refresh(index)
            order = rotated(request["names"], index)
            timed = self._time([self._racing[name] for name in order], clocks)
            for name, us in zip(order, timed, strict=True):
                samples[name].append(us)
        return {"samples": samples, "clocks": clocks}

    def _rivals(self, request: dict[str, Any]) -> dict[str, Any]:
        return rivals.prepare(self.device)

    def _batch(self, rows: int) -> Batch:
        if rows not in self._batches:
            self._batches[rows] = Batch(self._heads[0], rows)
        return self._batches[rows]

    def _call(self, config: Config, work: Work, batch: Batch) -> Call:
        """The path as a server runs it: one call, with the noise of step ``step``."""
        heads, hidden, temperature = self._heads, batch.hidden, batch.temperature(work)
        options: dict[str, Any] = {
            "truncation": batch.truncation(work),
            "edits": batch.edits if work.edits else None,
            "draw": draw_for(heads[0]),
        }
        if isinstance(config, ScreenConfig):
            return self._screened_call(config, batch, temperature, options)
        if isinstance(config, ReadConfig):
            reader, greedy = config, work.greedy
            workspace = self._room(num_read_parts(heads[0].vocab_size, batch.rows, reader, self.device), batch)

            def read(step: int) -> Any:
                weight = heads[step % len(heads)].weight
                logits = workspace.gemm(batch.rows, weight.shape[0], weight.dtype)
                torch.mm(hidden, weight.T, out=logits)
                params = (temperature, batch.seed, batch.position[step])
                return sample_logits(
                    logits, heads[0].source, *params, reader, workspace=workspace, all_greedy=greedy, **options
                )

            return read
        tile, workspace = config, self._room(num_parts(heads[0], batch.rows, config), batch)

        def draw(step: int) -> Any:
            params = (temperature, batch.seed, batch.position[step])
            return lm_head_sample(hidden, heads[step % len(heads)], *params, tile, workspace=workspace, **options)

        return draw

    def _screened_call(
        self, config: ScreenConfig, batch: Batch, temperature: torch.Tensor, options: dict[str, Any]
    ) -> Call:
        """Copies are as cold as their heads: they take turns with them."""
        if not self._screens:
            self._screens = [Screen(head, LARGEST_SCREENED) for head in self._heads]
        heads, screens, workspace = self._heads, self._screens, self._room(1, batch)

        def draw(step: int) -> Any:
            head, screen = heads[step % len(heads)], screens[step % len(heads)]
            params = (temperature, batch.seed, batch.position[step])
            own = options | {"workspace": screen.workspace, "head_workspace": workspace}
            return screened_sample(batch.hidden, head, screen.int8_head, *params, config, **own)

        return draw

    def _flashinfer_call(self, batch: Batch) -> Call:
        """The flashinfer path as a server runs it."""
        heads, temperature, workspace = self._heads, batch.temperature(Work.TRUNCATE), self._room(1, batch)
        truncation = batch.truncation(Work.TRUNCATE)
        assert truncation is not None

        def draw(step: int) -> Any:
            logits = compute_logits(batch.hidden, heads[step % len(heads)], workspace)
            params = (temperature, batch.seed, batch.position[step])
            return draw_with_flashinfer(logits, heads[0].source, *params, truncation)

        return draw

    def _room(self, parts: int, batch: Batch) -> Workspace:
        """The workspace, a larger one where it is too small; calls keep theirs."""
        if self._workspace.slots < parts * batch.rows:
            self._workspace = Workspace(parts * batch.rows, self.device)
        return self._workspace

    def _contender(self, call: Call, batch: Batch) -> Contender:
        """``call``, captured as often as a sample needs it."""
        call(0)  # compiles and allocates
        if self.device.type != "cuda":
            return Contender(lambda: call(0), 1, call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The library's own context manager collects garbage and empties caches, ten times the cost of a capture.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            call(0)
            start.record()
            call(1)
            end.record()
            end.synchronize()
            us = max(start.elapsed_time(end) * 1e3, 1.0)
            # Every copy of the head is read equally often.
            copies = len(self._heads)
            calls = min(STEPS, math.ceil(SAMPLE_US / us / copies) * copies)
            graph.capture_begin()
            try:
                for step in range(calls):
                    call(step)
            finally:
                graph.capture_end()
        torch.cuda.synchronize(self.device)
        return Contender(graph.replay, calls, call)

    def _time(self, contenders: list[Contender], clocks: list[float] | None = None) -> list[float]:
        """Microseconds per call of each, one after the other without a pause; and the clock while they ran."""
        if self.device.type != "cuda":
            found = []
            for contender in contenders:
                began = time.perf_counter()
                contender.replay()
                found.append((time.perf_counter() - began) * 1e6 / contender.calls)
            if clocks is not None:
                clocks.append(0.0)
            return found
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(contenders) + 1)]
        if contenders:
            contenders[0].replay()  # the first sample must not pay for the pause before it
        events[0].record()
        for contender, event in zip(contenders, events[1:], strict=True):
            contender.replay()
            event.record()
        if clocks is not None:
            clocks.append(nvml.sm_clock(self._bus_id))
        events[-1].synchronize()
        pairs = zip(events, events[1:], contenders, strict=False)
        return [first.elapsed_time(second) * 1e3 / contender.calls for first, second, contender in pairs]
