"""The bench that compiles: many processes of it fill Triton's cache on disk while one measures.

It launches what the worker will launch, with nothing run, so that the binaries are the same to the last argument.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from ..kernels.head import LMHead
from ..kernels.launch import compiling_only
from ..screen import Screen, UnwrittenScreen, problem_of
from ..warmup import launch_once
from ..work import Work
from .cubin import register_usage
from .gate import MANY_IDS, first_ids, launched_by, rival_of
from .gpu import SOFTCAP
from .inputs import DTYPES
from .space import Config, ScreenConfig
from .trials import config_of
from .worker import error_of

_KERNELS = ("lm_head_sample_kernel", "sample_logits_kernel", "screen_head_kernel", "rescore_groups_kernel")
# Of the device's memory that heads of all compiling processes and their screens may take; beyond, they compile for a
# cut head, and the draw of truncated rows, which depends on the vocabulary, is left to the worker.
HEAD_SHARE = 0.45


class CompileBench:
    note: Callable[[str], None] = staticmethod(lambda text: None)

    def __init__(self, device: torch.device, processes: int) -> None:
        self.device, self.processes = device, processes
        self._shape: dict[str, Any] | None = None
        self._heads: list[LMHead] = []
        self._screens: dict[int, Screen] = {}  # by the size of our heads' vocabularies
        self._used: dict[str, Any] = {}

    @classmethod
    def make(cls, spec: dict[str, Any]) -> CompileBench:
        os.nice(5)  # who measures comes first
        torch.set_num_threads(1)
        return cls(torch.device(spec.get("device", "cuda")), int(spec.get("processes", 1)))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds by part, and the most that any of the main kernels has of shared memory in bytes, registers and
        spilled bytes per thread."""
        assert request["op"] == "compile", request["op"]
        began = time.monotonic()
        self._use(request["head"])
        config, work = config_of(request["path"], request["config"]), Work(request["work"])
        self.note(request["label"])
        self._used = {"shared": 0, "registers": 0, "spilled": 0}
        if not triton.knobs.runtime.interpret:
            try:
                self._compile(config, work)
            except Exception as error:
                answer = error_of(error)
                if answer["error"]["why"] == "runtime" and not answer["error"]["fatal"]:
                    answer["error"]["why"] = "compile"
                return answer
        return {"seconds": {"compile": time.monotonic() - began}, **self._used}

    def _use(self, shape: dict[str, Any]) -> None:
        if shape == self._shape:
            return
        dtype = DTYPES[shape["dtype"]]
        whole = LMHead(torch.empty(shape["vocab"], shape["hidden"], dtype=dtype, device="meta"))
        size = whole.weight.nbytes + (Screen.bytes_for(whole, 1) if problem_of(whole) is None else 0)
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        softcap = SOFTCAP if shape.get("softcap") else None
        ids = shape["vocab"]
        if total and size * self.processes >= HEAD_SHARE * total:
            ids = min(ids, MANY_IDS + 16)
            ids -= (ids - shape["vocab"]) % 16  # the last group is as full
        head = LMHead(torch.empty(ids, shape["hidden"], dtype=dtype, device=self.device), softcap=softcap)
        cut = first_ids(head, MANY_IDS)
        self._heads = [head, cut] if cut.vocab_size != head.vocab_size else [head]
        self._shape, self._screens = dict(shape), {}

    def _compile(self, config: Config, work: Work) -> None:
        heads = self._heads if work.truncates else self._heads[-1:]
        screens = [self._screen(head) if isinstance(config, ScreenConfig) else None for head in heads]
        with compiling_only():
            if isinstance(config, ScreenConfig):  # the gate launches it as well, and must not wait for it
                launch_once(self._heads[0], rival_of(config, self._heads[0], work), work.kernels, False)
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.listener = self._listen
                for head, screen in zip(heads, screens, strict=True):
                    for each in launched_by(config, work):
                        launch_once(head, config, each, False, screen=screen)

    def _screen(self, head: LMHead) -> Screen:
        """Of one of our heads; made when it is first needed."""
        if head.vocab_size not in self._screens:
            self._screens[head.vocab_size] = UnwrittenScreen(head, 1)
        return self._screens[head.vocab_size]

    def _listen(self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **rest: Any) -> None:
        if metadata.get("name") not in _KERNELS:
            return
        self._used["shared"] = max(self._used["shared"], int(metadata.get("shared", 0)))
        cubin = next((path for name, path in metadata_group.items() if name.endswith(".cubin")), None)
        if cubin is not None:
            try:
                registers, spilled = register_usage(Path(cubin).read_bytes())
            except (OSError, ValueError, subprocess.SubprocessError):
                return  # a fact less; the measurement will tell
            self._used["registers"] = max(self._used["registers"], registers)
            self._used["spilled"] = max(self._used["spilled"], spilled)
