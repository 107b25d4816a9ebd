"""The worker that measures: its answers to the requests of a run (``worker.py``).

The unit is the whole path as a server runs it (``timing.py``). Without a GPU the same calls run one by one, for tests.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import triton

from .. import __version__
from ..kernels.params import LMHead
from ..kinds import KIND_NAMES, MAX_SCREENED_ROWS, PLAIN, BatchKind, Config, SamplingPath
from ..paths import compute_logits
from ..tables.fingerprint import machine_code
from ..tables.lookup import device_of, environment
from ..tables.schema import HeadShape
from .baselines import FLASHINFER, baseline_call, baselines, import_flashinfer
from .correctness import CorrectnessCheck
from .errors import error_of
from .labels import config_of
from .launcher import Launcher, draw
from .timing import Call, Contender, Timer, busy_percent, copies_needed
from .workload import Workload, copy_of, random_head

COMPILING_LATE = "compiling late"  # compilation that a compiling process should have done before the check
SCREENING_SAMPLES = 3


class MeasuringWorker:
    """One head at a time; workloads are made when they are first needed."""

    note: Callable[[str], None] = staticmethod(lambda text: None)

    def __init__(self, device: torch.device) -> None:
        self.device, self.timer = device, Timer(device)
        self._shape: HeadShape | None = None
        self._heads: list[LMHead] = []
        self._workloads: dict[int, Workload] = {}
        self._launcher = Launcher(device, MAX_SCREENED_ROWS)
        self._racing: dict[str, Contender] = {}
        self._race_workload: Workload | None = None
        self._check: CorrectnessCheck | None = None
        self._compiled = 0.0  # seconds that this process has compiled for

    @classmethod
    def make(cls, spec: dict[str, Any]) -> MeasuringWorker:
        device = torch.device(spec.get("device", "cuda"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; run and verify measure on one, other commands need none")
        worker = cls(device)
        triton.knobs.compilation.listener = worker._listen
        return worker

    def _listen(self, *, times: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self._compiled += times.total * 1e-6

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "head" in request:
            self._use(HeadShape(**request["head"]))
        return getattr(self, f"_{request['op']}")(request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """Device, versions, and the load of the device by other processes in percent. simulated: it is no GPU."""
        env = environment() | {"python": platform.python_version(), "sgl_flashsample": __version__}
        device = msgspec.to_builtins(device_of(self.device))
        if self.device.type != "cuda":
            return {"device": device | {"sms": 1, "smem_optin": 232_448}, "env": env, "busy": 0, "simulated": True}
        return {"device": device, "env": env, "busy": round(busy_percent(self.device))}

    def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"copies": len(self._heads)}

    def _use(self, shape: HeadShape) -> None:
        """Make the head, unless it is there."""
        if shape == self._shape:
            return
        self._shape, self._heads, self._workloads, self._racing = None, [], {}, {}
        self._launcher = Launcher(self.device, MAX_SCREENED_ROWS)
        head = random_head(shape, self.device)
        self._heads = [head, *(copy_of(head) for _ in range(copies_needed(head.weight) - 1))]
        self._check = CorrectnessCheck(head)
        self._shape = shape
        hidden = self._workload(16).hidden
        logits = compute_logits(hidden, head)
        self.timer.warm_up(lambda step: compute_logits(hidden, head, out=logits))

    def _trial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Tokens first; then the median time of a few samples, per batch size."""
        began, compiled = time.monotonic(), self._compiled
        config, kind = config_of(request["path"], request["config"]), KIND_NAMES[request["kind"]]
        assert self._check is not None
        self._check.check(config, kind)
        checked, compiled = time.monotonic(), self._compiled - compiled
        us = {}
        for rows in request["sizes"]:
            contender = self._contender(self._call(config, kind, self._workload(rows)))
            us[str(rows)] = statistics.median(self.timer.sample([contender] * SCREENING_SAMPLES)[0])
        seconds = {"check": checked - began - compiled, COMPILING_LATE: compiled, "timing": time.monotonic() - checked}
        return {"us": us, "seconds": seconds}

    def _gtest(self, request: dict[str, Any]) -> dict[str, Any]:
        kind, path = KIND_NAMES[request["kind"]], request["path"]
        config = None if path == SamplingPath.FLASHINFER else config_of(path, request["config"])
        assert self._check is not None
        p, draws = self._check.g_test(config, kind, request["draws"])
        return {"p": p, "draws": draws}

    def _codes(self, request: dict[str, Any]) -> dict[str, Any]:
        """The machine code of each of ``choices``."""
        codes = []
        for choice in request["choices"]:
            config = config_of(choice["path"], choice["config"])
            parts = self._launcher.parts(config, self._heads[0], 1)
            codes.append(machine_code(config, KIND_NAMES[choice["kind"]], parts))
        return {"codes": codes}

    def _setup(self, request: dict[str, Any]) -> dict[str, Any]:
        """Prepare a race of ``contenders`` in batches of ``rows`` rows. Returns the reason of each that cannot race."""
        self._racing, kind = {}, KIND_NAMES[request["kind"]]
        self._race_workload = self._workload(request["rows"])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        failed: dict[str, Any] = {}
        for one in request["contenders"]:
            self.note(one["name"])
            try:
                self._racing[one["name"]] = self._contender(self._call_of(one, kind, self._race_workload))
            except Exception as error:
                reason = error_of(error)["error"]
                if reason["fatal"]:
                    raise
                failed[one["name"]] = reason
        self.timer.sample(list(self._racing.values()))
        return {"failed": failed}

    def _rounds(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time ``names`` once per round, in rotated order, from round ``first`` on."""
        assert self._race_workload is not None
        racing = {name: self._racing[name] for name in request["names"]}
        refresh = self._race_workload.refresh
        rounds = self.timer.rounds(racing, request["rounds"], first=request["first"], before_round=refresh)
        return {"samples": rounds.samples, "clocks": rounds.clocks}

    def _baselines(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import FlashInfer and compile the kernels that will be raced: a minute the first time on a machine. Returns
        whether it can be raced."""
        if self.device.type != "cuda":
            return {"available": False, "detail": "no CUDA device"}
        head = LMHead(torch.randn(1024, 16, device=self.device))
        for one in baselines(Workload(head, 2).for_baselines([head], PLAIN), flashinfer=import_flashinfer()):
            if one.name == FLASHINFER:
                one.call(0)
        torch.cuda.synchronize(self.device)
        return {"available": True}

    def _workload(self, rows: int) -> Workload:
        if rows not in self._workloads:
            self._workloads[rows] = Workload(self._heads[0], rows)
        return self._workloads[rows]

    def _contender(self, call: Call) -> Contender:
        return self.timer.contender(call, copies=len(self._heads))

    def _call_of(self, contender: dict[str, Any], kind: BatchKind, workload: Workload) -> Call:
        """The call of a configuration, of the flashinfer path or of a baseline."""
        if contender.get("config") is not None:
            return self._call(config_of(contender["path"], contender["config"]), kind, workload)
        if contender["path"] == SamplingPath.FLASHINFER:
            return self._call(None, kind, workload)
        return baseline_call(contender["name"], kind, workload.for_baselines(self._heads, kind))

    def _call(self, config: Config | None, kind: BatchKind, workload: Workload) -> Call:
        """The path as a server runs it: one call, with the noise of step ``step``. config: None for FlashInfer. The
        copies of the head take turns, each with a screen of its own, which is as cold."""
        params, hidden = workload.params(kind), workload.hidden
        parts = [self._launcher.parts(config, head, workload.rows) for head in self._heads]

        def call(step: int) -> Any:
            return draw(config, hidden, params[step], parts[step % len(parts)])

        return call
