"""A recorded cost surface instead of a GPU: the same requests, answered from a JSON file, noise and mishaps included.
Everything but measuring runs and is tested on it.

    {"schema": "flashsample-surface/1", "device": {...}, "env": {...}, "noise": 0.004, "seed": 0,
     "model": {"us": 300.0, "rugged": 0.05},           times of what was not recorded; left out: rejected
     "costs": {"plain/fused-16x128x128-w4-s6-c1": {"1": 282.0, "16": 285.5}},
     "faults": {"plain/fused-16x...": "hang" | "crash" | "illegal" | "wrong" | "biased" | a reason}}

Keys are ``names.label_of``. Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

from .worker import WHY, Incorrect

SCHEMA = "flashsample-surface/1"
MAX_BYTES = 1 << 26
NOISE = 0.004


class SurfaceError(ValueError):
    """A surface that cannot be read; the message is one line."""


def load(path: str) -> dict[str, Any]:
    """Raises SurfaceError."""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise SurfaceError(f"{path} is longer than {MAX_BYTES} bytes")
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise SurfaceError(f"no surface in {path}: {error}".splitlines()[0]) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise SurfaceError(f"{path} is no {SCHEMA}")
    for name in ("device", "env"):
        if not isinstance(data.get(name), dict):
            raise SurfaceError(f"{path} has no object {name!r}")
    return data


class SurfaceBench:
    """Answers what ``GpuBench`` answers."""

    note: Callable[[str], None]

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.costs = data.get("costs", {})
        self.faults = data.get("faults", {})
        self.model = data.get("model")
        self.noise = float(data.get("noise", NOISE))
        self._random = random.Random(data.get("seed", 0))
        self._lost = False
        self._racing: dict[str, dict[str, Any]] = {}

    @classmethod
    def make(cls, spec: dict[str, Any]) -> SurfaceBench:
        return cls(load(spec["file"]))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return getattr(self, f"_{request['op']}")(request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        busy = self.data.get("busy", 0)
        return {"device": self.data["device"], "env": self.data["env"], "busy": busy}

    def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"copies": 1}

    def _compile(self, request: dict[str, Any]) -> dict[str, Any]:
        self._mishap(request["label"], ("compile", "shared_memory", "registers", "slow_compile"))
        return {"seconds": {"compile": 0.0}, "shared": 0, "registers": 0, "spilled": 0}

    def _rivals(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"available": bool(self.data.get("rivals"))}

    def _trial(self, request: dict[str, Any]) -> dict[str, Any]:
        self.note(request["label"])
        self._mishap(request["label"], ("hang", "crash", "illegal", "wrong", "runtime", "timeout"))
        us = {str(batch): self._sample(request, batch) for batch in request["batches"]}
        return {"us": us, "checked": "tokens"}

    def _setup(self, request: dict[str, Any]) -> dict[str, Any]:
        self._racing, failed = {}, {}
        for entry in request["entries"]:
            self.note(entry["name"])
            try:
                self._mishap(entry.get("label", ""), ("hang in race", "crash in race"))
                self._base({**entry, "work": request["work"]}, request["batch"])
                self._racing[entry["name"]] = {**entry, "batch": request["batch"]}
            except ValueError as error:
                failed[entry["name"]] = {"why": "runtime", "detail": str(error)}
        return {"failed": failed}

    def _rounds(self, request: dict[str, Any]) -> dict[str, Any]:
        time.sleep(float(self.data.get("seconds_per_round", 0.0)) * request["rounds"])
        samples = {
            name: [self._sample(self._racing[name], self._racing[name]["batch"]) for _ in range(request["rounds"])]
            for name in request["names"]
        }
        return {"samples": samples, "clocks": [float(self.data.get("clock", 1980.0))] * request["rounds"]}

    def _gtest(self, request: dict[str, Any]) -> dict[str, Any]:
        biased = self.faults.get(request["label"]) == "biased"
        return {"p": 1e-12 if biased else 0.5, "draws": request["draws"]}

    def _mishap(self, label: str, kinds: tuple[str, ...]) -> None:
        fault = self.faults.get(label)
        if fault is None or fault not in kinds:
            return
        if fault.startswith("hang"):
            time.sleep(1e6)
        if fault == "slow_compile":
            time.sleep(float(self.data.get("slow_compile", 1.0)))
            return
        if fault.startswith("crash"):
            os._exit(139)
        if fault == "illegal":
            self._lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "wrong":
            raise Incorrect("3 of 13 tokens differ from the reference")
        assert fault in WHY, fault
        raise {"compile": _named("CompilationError"), "shared_memory": _named("OutOfResources")}.get(
            fault, RuntimeError
        )(f"recorded as {fault}: out of resource: shared memory" if fault == "shared_memory" else f"recorded: {fault}")

    def _sample(self, request: dict[str, Any], batch: int) -> float:
        return self._base(request, batch) * math.exp(self._random.gauss(0.0, self.noise))

    def _base(self, request: dict[str, Any], batch: int) -> float:
        """The true time. A batch size that was not recorded has the time of the next larger one, or the largest."""
        label = request.get("label") or request["name"]
        recorded = self.costs.get(label)
        if recorded:
            sizes = sorted(map(int, recorded))
            size = next((size for size in sizes if size >= batch), sizes[-1])
            return float(recorded[str(size)])
        if self.model is None:
            raise ValueError(f"no cost of {label} was recorded")
        rugged, seed = float(self.model.get("rugged", 0.05)), self.data.get("seed", 0)
        # What a configuration costs is mostly the sum of what its parts cost: a search can learn it.
        parts = [_hashed(f"{seed} {place} {part}") for place, part in enumerate(re.split("[-x]", label))]
        share = 0.85 * sum(parts) / len(parts) + 0.15 * _hashed(f"{seed} {label}")
        rows = 1.0 + batch / float(self.model.get("rows", 256.0))
        return float(self.model["us"]) * rows * (1.0 + rugged * share)


def _hashed(text: str) -> float:
    """A number from 0 to 1."""
    return zlib.crc32(text.encode()) / 2**32


def _named(name: str) -> type[Exception]:
    return type(name, (Exception,), {})
