"""Counts the tokens that this server draws: into a file of ``hot_vocab.HotVocab``, if ``FLASHSAMPLE_TRACE`` names one,
and for who ``watch``es them.

A step does one thing more: it starts a copy of its token ids to pinned memory and goes on. A thread sees them arrive
(each slot holds ``_EMPTY`` until then), so it makes no CUDA call that could wait for a step or break a capture. Nobody
ever waits for the device: ids that find no free slot, because the thread has fallen behind, are not counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch

from ..files import hold, one_line, write_whole
from ..hot_vocab import HotVocab
from ..switches import DRAFT_VOCAB_VARIABLE, TRACE_VARIABLE, text

logger = logging.getLogger("sgl_flashsample")

CAPACITY = 1 << 18  # ids under way, 8 bytes of pinned memory each: 500 steps of 500 rows
LOOK_SECONDS = 0.5  # interval between two looks for ids that have arrived
# Interval between two writes of the file, about 20 ms of the interpreter each, while tokens keep coming, and while not.
WRITE_SECONDS, IDLE_SECONDS = 60.0, 5.0
_EMPTY = torch.iinfo(torch.int64).min


class TokenCounts:
    """Adds the tokens that are drawn from now on to the counts that ``file`` holds from earlier runs.

    file: None where none is written. name: the model's. Raises ValueError where ``file`` is of another model or another
    process writes it, OSError where it cannot be written.
    """

    @classmethod
    def of_this_server(cls) -> TokenCounts | None:
        """The counter that the environment asks for; None without such a wish, and where another process of this server
        counts."""
        file = text(TRACE_VARIABLE)
        if not file:
            return None
        try:
            from sglang.srt.runtime_context import get_model, get_parallel

            parallel, model = get_parallel(), get_model().model_path
            if parallel.tp_rank != 0 or parallel.pp_rank != parallel.pp_size - 1:
                # The ranks of a stage draw the same tokens, all stages but the last one none. With DP attention, the
                # requests of the first rank are counted.
                return None
            # A folder's name without its path; a hub's name unchanged.
            return cls(Path(file).absolute(), one_line(Path(model).name if os.path.isdir(model) else model))
        except Exception as error:  # must not keep a server from starting
            reason = f"{type(error).__name__}: {one_line(str(error), 300)}"
            logger.warning("flashsample: drawn tokens are not counted (%s): %s", TRACE_VARIABLE, reason)
            return None

    def __init__(self, file: Path | None = None, name: str = "") -> None:
        self.file, self.name = file, name
        self.disabled = False
        self.dropped = 0  # ids that found no free slot
        self._lock_file: IO[str] | None = None
        self._earlier: HotVocab | None = None
        self._watcher: Callable[[np.ndarray], None] | None = None
        if file is not None:
            self._open(file, name)
        self._slots = torch.full((CAPACITY,), _EMPTY, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._added = self.counted = self._written = 0  # ids since the start; those added but not counted have slots
        self._counts = torch.zeros(0, dtype=torch.int64)  # [V], from the first step on
        self._write_time, self._write_error = time.monotonic(), ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashsample-token-counts", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if file is not None:
            logger.info("flashsample: counting the drawn tokens into %s", file)

    def _open(self, file: Path, name: str) -> None:
        self._lock_file = hold(file.with_name(f".{file.name}.lock"))
        if self._lock_file is None:  # among replicas with one environment, the first counts
            raise ValueError(f"another process counts into {file}")
        self._earlier = HotVocab.load(file) if os.path.lexists(file) else None
        if self._earlier is not None and name and self._earlier.name not in ("", name):
            raise ValueError(f"{file} is of {self._earlier.name}, not of {name}; expected a file for each model")

    def watch(self, watcher: Callable[[np.ndarray], None]) -> None:
        """Call ``watcher`` with the ids that are counted from now on, ``[N]`` int64, in the order of their steps: in a
        thread of its own."""
        self._watcher = watcher

    def add(self, token_ids: torch.Tensor, vocab: int) -> None:
        """Count the ids of one step (``[B]``), drawn from a vocabulary of ``vocab``. Waits for nothing; raises
        nothing."""
        if self.disabled:
            return
        try:
            if token_ids.is_cuda and torch.cuda.is_current_stream_capturing():  # coverage: needs a GPU
                return  # a copy in a graph would be made at every replay
            if not len(self._counts):
                self._counts = torch.zeros(vocab, dtype=torch.int64)
            ids, capacity = token_ids.reshape(-1), len(self._slots)
            if self._added + len(ids) - self.counted > capacity:
                if not self.dropped:
                    self._warn("cannot keep up, from now on its counts miss tokens (this line comes once)")
                self.dropped += len(ids)
                return
            start = self._added % capacity
            first = min(len(ids), capacity - start)
            self._slots[start : start + first].copy_(ids[:first], non_blocking=True)
            if first < len(ids):
                self._slots[: len(ids) - first].copy_(ids[first:], non_blocking=True)
            self._added += len(ids)  # only now: the thread looks no further
        except Exception as error:  # a step must not fail
            self._disable(error)

    def close(self) -> None:
        """Count and write what has arrived; let another process count into the file."""
        self._stop.set()
        self._thread.join(5)
        if self._lock_file is not None:
            self._lock_file.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                wait = WRITE_SECONDS if self._collect() else IDLE_SECONDS
                if time.monotonic() - self._write_time >= wait:
                    self._write()
            self._collect()
            self._write()
        except Exception as error:
            self._disable(error)

    def _collect(self) -> int:
        """Count the ids that have arrived, in the order of their steps. Returns how many."""
        if self.counted == self._added:
            return 0
        places = torch.arange(self.counted, self._added) % len(self._slots)
        slots = self._slots[places]
        missing = (slots == _EMPTY).nonzero()
        arrived = slots[: int(missing[0])] if len(missing) else slots
        # An id outside of the vocabulary is not counted; a sampler may give one for logits that are all NaN.
        known = arrived[(arrived >= 0) & (arrived < len(self._counts))]
        self._counts += torch.bincount(known, minlength=len(self._counts))
        self._slots[places[: len(arrived)]] = _EMPTY
        self.counted += len(arrived)  # only now: a step may write there again
        if self._watcher is not None:
            self._watcher(known.numpy())
        return len(arrived)

    def _write(self) -> None:
        if self.file is None or self.counted == self._written:
            return
        self._write_time = time.monotonic()
        try:
            counts = HotVocab.of_ids(self._counts.numpy(), self.name, "server")
            counts = counts if self._earlier is None else self._earlier.plus(counts)
            write_whole(self.file, counts.dumps(checked=False))
            self._written, self._write_error = self.counted, ""
        except (OSError, ValueError) as error:  # a full disk, say; it may have room at the next write
            reason = one_line(getattr(error, "strerror", None) or str(error))
            if reason != self._write_error:
                self._warn(f"cannot write {self.file}, the next write tries again: {reason}")
            self._write_error = reason

    def _disable(self, error: Exception) -> None:
        if not self.disabled:
            self.disabled = True
            self._warn(f"counts no tokens any more: {type(error).__name__}: {one_line(str(error), 300)}")

    def _warn(self, text: str) -> None:
        variable = DRAFT_VOCAB_VARIABLE if self.file is None else TRACE_VARIABLE
        logger.warning("flashsample: %s %s; answers are not affected", variable, text)
