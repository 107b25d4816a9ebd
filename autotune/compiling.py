"""The worker that compiles: many such processes fill Triton's cache on disk while another one measures. One for a GPU
that need not be here says to which machine code the configurations of a table compile.

It makes the same launches as the one that measures, without running them, so that the binaries are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from ..kernels.config import ScreenConfig
from ..kernels.launch import Gpu, compiling_only, pretend_gpu
from ..kernels.params import LMHead
from ..kinds import KIND_NAMES, BatchKind, Config, SamplingPath
from ..paths import Parts
from ..screen import Screen, UnwrittenScreen, unsupported_head
from ..selfcheck import MAX_COMPILING_THREADS, MAX_IDS, first_ids, launch_once
from ..tables.fingerprint import machine_code
from ..tables.schema import HeadShape
from .correctness import checked_kinds, fused_beside
from .errors import error_of
from .labels import config_of, kernel_kind
from .workload import empty_head

# Kernels whose shared memory, registers and spills are reported.
_KERNELS = ("lm_head_sample_kernel", "sample_logits_kernel", "screen_head_kernel", "rescore_groups_kernel")
# Share of the device's memory for the heads and screens of all compiling processes. Beyond it, they compile for a
# shortened head, and the draw of truncated rows, which depends on the vocabulary, is left to the process that measures.
HEAD_SHARE = 0.45


class CompilingWorker:
    def __init__(self, device: torch.device, processes: int, many_ids: int = MAX_IDS) -> None:
        self.device, self.processes, self.many_ids = device, processes, many_ids
        self._shape: HeadShape | None = None
        self._heads: list[LMHead] = []
        self._screened: dict[int, Parts] = {}  # by vocabulary size
        self._usage: dict[str, int] = {}

    @classmethod
    def make(cls, spec: dict[str, Any]) -> CompilingWorker:
        os.nice(5)  # the process that measures comes first
        torch.set_num_threads(1)
        if "gpu" in spec:
            capability, multiprocessors = spec["gpu"]
            major, minor = map(int, capability.split("."))
            pretend_gpu(Gpu((major, minor), multiprocessors))
            return cls(torch.device("cpu"), 1)
        return cls(torch.device(spec.get("device", "cuda")), int(spec.get("processes", 1)))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"_answer_{request['op']}")(request)

    def _answer_codes(self, request: dict[str, Any]) -> dict[str, Any]:
        """The machine code of each of ``choices``, empty where one does not compile."""
        self._use(HeadShape(**request["head"]))
        head = self._heads[0]
        launches = []
        for choice in request["choices"]:
            config = config_of(choice["path"], choice["config"])
            launches.append((config, KIND_NAMES[choice["kind"]], self._parts(config, head)))
        threads = min(MAX_COMPILING_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), compiling_only():
            for config, kind, parts in launches:
                launch_once(parts, config, kind.launched(config))
        codes = []
        for launch in launches:
            codes.append("")
            with contextlib.suppress(Exception):  # whatever a compiler makes of a configuration
                codes[-1] = machine_code(*launch)
        return {"codes": codes}

    def _answer_compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds by part, and the maximum over the main kernels of shared memory in bytes, registers per thread and
        spilled bytes per thread."""
        began = time.monotonic()
        self._use(HeadShape(**request["head"]))
        config, kind = config_of(request["path"], request["config"]), KIND_NAMES[request["kind"]]
        self._usage = {"shared": 0, "registers": 0, "spilled": 0}
        if not triton.knobs.runtime.interpret:
            try:
                self._compile(config, kind)
            except Exception as error:
                answer = error_of(error)
                if answer["error"]["reason"] == "runtime" and not answer["error"]["fatal"]:
                    answer["error"]["reason"] = "compile"
                return answer
        return {"seconds": {"compile": time.monotonic() - began}, **self._usage}

    def _use(self, shape: HeadShape) -> None:
        """Make the heads, unless they are there: the whole one, and the one that tokens are compared on."""
        if shape == self._shape:
            return
        whole = empty_head(shape, "meta")
        size = whole.weight.nbytes + (Screen.bytes_for(whole, 1) if unsupported_head(whole) is None else 0)
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        if total and size * self.processes >= HEAD_SHARE * total:
            whole = first_ids(whole, self.many_ids)
        scale = None if whole.scale is None else torch.empty_like(whole.scale, device=self.device)
        weight = torch.empty_like(whole.weight, device=self.device)
        head = dataclasses.replace(whole, weight=weight, scale=scale)
        shortened = first_ids(head, self.many_ids)
        self._heads = [head, shortened] if shortened.vocab_size != head.vocab_size else [head]
        self._shape, self._screened = shape, {}

    def _compile(self, config: Config, kind: BatchKind) -> None:
        heads = self._heads if kind.truncate else self._heads[-1:]
        with compiling_only():
            if isinstance(config, ScreenConfig):  # the check launches it as well, and must not wait for it
                whole = self._heads[0]
                beside = fused_beside(config, whole, kind)
                launch_once(self._parts(beside, whole), beside, kernel_kind(kind, SamplingPath.FUSED))
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.listener = self._listen
                for head in heads:
                    for each in checked_kinds(config, kind):
                        launch_once(self._parts(config, head), config, each)

    def _parts(self, config: Config, head: LMHead) -> Parts:
        if not isinstance(config, ScreenConfig):
            return Parts.of(head)
        if head.vocab_size not in self._screened:
            self._screened[head.vocab_size] = Parts.of(head, UnwrittenScreen(head, 1))
        return self._screened[head.vocab_size]

    def _listen(self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **rest: Any) -> None:
        if metadata.get("name") not in _KERNELS:
            return
        usage = {"shared": int(metadata.get("shared", 0))}
        cubin = next((path for name, path in metadata_group.items() if name.endswith(".cubin")), None)
        if cubin is not None:
            # If the tool fails, both stay as they are, and the measurement decides.
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                usage["registers"], usage["spilled"] = register_usage(Path(cubin).read_bytes())
        self._usage |= {name: max(self._usage[name], value) for name, value in usage.items()}


def register_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread (spills). Raises ValueError where that cannot be told,
    OSError and CalledProcessError where CUDA's tool does not run."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if usage is None:
        raise ValueError(f"cuobjdump reports no resource usage: {report[:200]!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local
