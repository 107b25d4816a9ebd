"""A simulated device instead of a GPU: it answers the requests of the tuner from a JSON file, with noise and faults.
Everything but measuring is developed and tested on it.

    python tests/lab/simulated.py DEVICE run ...     ``sgl-flashsample tune run ...`` over the device in the file DEVICE

    {"schema": "flashsample-simulated/1", "device": {...}, "env": {...}, "noise": 0.004, "seed": 0,
     "model": {"us": 300.0, "rugged": 0.05},           times of a configuration without costs; without: it is rejected
     "costs": {"plain/fused-16x128x128-w4-s6-c1": {"1": 282.0, "16": 285.5}},
     "faults": {"plain/fused-16x...": "hang" | "crash" | "illegal" | "wrong" | "biased" | a reason},
     "baselines": false, "busy": 0, "clock": 1980.0, "seconds_per_round": 0.0,
     "changed": ["plain/fused-16x..."],                configurations that compile to other machine code than elsewhere
     "simulated": true}                                whether it says that it is no GPU

The keys of costs and faults are ``labels.label_of``. The processes that answer load no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sgl_flashsample.autotune import pool
from sgl_flashsample.autotune.errors import REASONS, IncorrectTokens
from sgl_flashsample.files import BadFileError, parse_json, read_plain

SCHEMA = "flashsample-simulated/1"
MAX_BYTES = 1 << 26
NOISE = 0.004
# Times of a model, noise and all.
EXAMPLE: dict[str, Any] = {
    "schema": SCHEMA,
    "device": {"name": "NVIDIA H200", "cc": "9.0", "sms": 132, "l2_mb": 50, "smem_optin": 232448},
    "env": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
    "noise": 0.003,
    "model": {"us": 300.0, "rugged": 0.2},
    "costs": {"gemm": {"64": 320.0}},
    "seconds_per_round": 0.002,
}

COMPILING_FAULTS = ("compile", "shared_memory", "registers", "slow_compile")
TRIAL_FAULTS = ("hang", "crash", "illegal", "wrong", "runtime", "timeout")
RACE_FAULTS = ("hang in race", "crash in race")


def load(path: str) -> dict[str, Any]:
    """Raises ValueError, with one line, for a file that describes no device."""
    try:
        data = parse_json(read_plain(path, MAX_BYTES), MAX_BYTES)
    except BadFileError as error:
        raise ValueError(f"no simulated device in {path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no {SCHEMA}")
    for name in ("device", "env"):
        if not isinstance(data.get(name), dict):
            raise ValueError(f"{path} has no object {name!r}")
    return data


def workers(file: str) -> pool.Workers:
    """Processes that answer for the device in ``file``."""
    spec = {"worker": "lab.simulated:SimulatedWorker", "file": file}
    return pool.Workers(measuring=spec, compiling=spec, on_gpus=False)


@contextlib.contextmanager
def measuring_on(file: str) -> Iterator[None]:
    """Within this, runs and verifications of this process measure on the device in ``file``."""
    before, pool.WORKERS = pool.WORKERS, workers(file)
    try:
        yield
    finally:
        pool.WORKERS = before


def main(arguments: list[str]) -> int:
    """A command of ``tune`` over the device in a file. arguments: the file, then those of ``tune``. Returns the exit
    code."""
    from sgl_flashsample import cli

    with measuring_on(arguments[0]):
        return cli.main(["tune", *arguments[1:]])


class SimulatedWorker:
    """Answers what ``MeasuringWorker`` and ``CompilingWorker`` answer."""

    note: Callable[[str], None]

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.costs, self.faults = data, data.get("costs", {}), data.get("faults", {})
        self.noise = float(data.get("noise", NOISE))
        self._random = random.Random(data.get("seed", 0))
        self._lost = False
        self._racing: dict[str, dict[str, Any]] = {}

    @classmethod
    def make(cls, spec: dict[str, Any]) -> SimulatedWorker:
        return cls(load(spec["file"]))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return getattr(self, f"_{request['op']}")(request)

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = {"device": self.data["device"], "env": self.data["env"], "busy": self.data.get("busy", 0)}
        return answer | {"simulated": self.data.get("simulated", True)}

    def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"copies": 1}

    def _compile(self, request: dict[str, Any]) -> dict[str, Any]:
        self._fail_as_told(request["label"], COMPILING_FAULTS)
        return {"seconds": {"compile": 0.0}, "shared": 0, "registers": 0, "spilled": 0}

    def _codes(self, request: dict[str, Any]) -> dict[str, Any]:
        labels, changed = [choice["label"] for choice in request["choices"]], self.data.get("changed", ())
        return {"codes": [code_of(f"{label} changed" if label in changed else label) for label in labels]}

    def _baselines(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"available": bool(self.data.get("baselines"))}

    def _trial(self, request: dict[str, Any]) -> dict[str, Any]:
        self._fail_as_told(request["label"], TRIAL_FAULTS)
        return {"us": {str(rows): self._sample(request["label"], rows) for rows in request["sizes"]}}

    def _setup(self, request: dict[str, Any]) -> dict[str, Any]:
        self._racing, failed = {}, {}
        for one in request["contenders"]:
            self.note(one["name"])
            label = one.get("label") or one["name"]
            try:
                self._fail_as_told(label, RACE_FAULTS)
                self._true_us(label, request["rows"])
                self._racing[one["name"]] = {"label": label, "rows": request["rows"]}
            except ValueError as error:
                failed[one["name"]] = {"reason": "runtime", "detail": str(error), "fatal": False}
        return {"failed": failed}

    def _rounds(self, request: dict[str, Any]) -> dict[str, Any]:
        time.sleep(float(self.data.get("seconds_per_round", 0.0)) * request["rounds"])
        samples = {
            name: [self._sample(**self._racing[name]) for _ in range(request["rounds"])] for name in request["names"]
        }
        return {"samples": samples, "clocks": [float(self.data.get("clock", 1980.0))] * request["rounds"]}

    def _gtest(self, request: dict[str, Any]) -> dict[str, Any]:
        biased = self.faults.get(request["label"]) == "biased"
        return {"p": 1e-12 if biased else 0.5, "draws": request["draws"]}

    def _fail_as_told(self, label: str, faults: tuple[str, ...]) -> None:
        fault = self.faults.get(label)
        if fault not in faults:
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
            raise IncorrectTokens("3 of 13 tokens differ from the reference")
        assert fault in REASONS, fault
        if fault in ("shared_memory", "registers"):
            raise RuntimeError(f"simulated: out of resource: {fault.replace('_', ' ')}")
        raise RuntimeError("simulated: ptxas failed" if fault == "compile" else f"simulated: {fault}")

    def _sample(self, label: str, rows: int) -> float:
        return self._true_us(label, rows) * math.exp(self._random.gauss(0.0, self.noise))

    def _true_us(self, label: str, rows: int) -> float:
        """A batch size without a cost has that of the next larger one, or of the largest."""
        costs = self.costs.get(label)
        if costs:
            sizes = sorted(map(int, costs))
            return float(costs[str(next((size for size in sizes if size >= rows), sizes[-1]))])
        model = self.data.get("model")
        if model is None:
            raise ValueError(f"{label} has no cost")
        rugged, seed = float(model.get("rugged", 0.05)), self.data.get("seed", 0)
        # What a configuration costs is mostly the sum of what its parts cost: a search can learn it.
        parts = [_hashed(f"{seed} {place} {part}") for place, part in enumerate(re.split("[-x]", label))]
        share = 0.85 * sum(parts) / len(parts) + 0.15 * _hashed(f"{seed} {label}")
        return float(model["us"]) * (1.0 + rows / float(model.get("rows", 256.0))) * (1.0 + rugged * share)


def code_of(label: str) -> str:
    """The machine code of a configuration that is not changed."""
    return f"{zlib.crc32(label.encode()):08x}"


def _hashed(text: str) -> float:
    """A number from 0 to 1."""
    return zlib.crc32(text.encode()) / 2**32


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # of the package ``lab``, which worker processes import
    from lab.simulated import main as run

    raise SystemExit(run(sys.argv[1:]))
