"""Counts the tokens that this server draws into a file of ``hot_vocab.HotVocab``, if ``FLASHSAMPLE_TRACE`` names one.

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
from pathlib import Path

import torch

from ..files import hold, one_line, write_whole
from ..hot_vocab import HotVocab
from ..switches import TRACE_VARIABLE, text

logger = logging.getLogger("sgl_flashsample")

_EMPTY = torch.iinfo(torch.int64).min


class TokenCounts:
    """Adds the tokens that are drawn from now on to the counts that ``file`` holds from earlier runs.

    name: the model's. capacity: ids under way, 8 bytes of pinned memory each; the default holds 500 steps of 500 rows.
    look_seconds: interval between two looks for ids that have arrived. write_seconds, idle_seconds: interval between
    two writes of the file, a few ms of the interpreter each, while tokens keep coming and while they do not.

    Raises ValueError where ``file`` is of another model or another process writes it, OSError where it cannot be
    written.
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

    def __init__(
        self,
        file: Path,
        name: str,
        *,
        capacity: int = 1 << 18,
        look_seconds: float = 0.5,
        write_seconds: float = 60.0,
        idle_seconds: float = 5.0,
    ) -> None:
        self.file, self.name = file, name
        self.look_seconds, self.write_seconds, self.idle_seconds = look_seconds, write_seconds, idle_seconds
        self.disabled_reason: str | None = None
        self.dropped = 0  # ids that found no free slot
        lock_file = hold(file.with_name(f".{file.name}.lock"))
        if lock_file is None:  # among replicas with one environment, the first counts
            raise ValueError(f"another process counts into {file}")
        self._lock_file = lock_file
        self._earlier = HotVocab.load(file) if os.path.lexists(file) else None
        if self._earlier is not None and name and self._earlier.name not in ("", name):
            raise ValueError(f"{file} is of {self._earlier.name}, not of {name}; expected a file for each model")
        self._slots = torch.full((capacity,), _EMPTY, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._added = self.counted = self._written = 0  # ids since the start; those added but not counted have slots
        self._counts = torch.zeros(0, dtype=torch.int64)  # [V]
        self._write_time, self._write_error = time.monotonic(), ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        logger.info("flashsample: counting the drawn tokens into %s", file)

    def add(self, token_ids: torch.Tensor, vocab: int) -> None:
        """Count the ids of one step (``[B]``), drawn from a vocabulary of ``vocab``. Waits for nothing; raises
        nothing."""
        if self.disabled_reason is not None:
            return
        try:
            if token_ids.is_cuda and torch.cuda.is_current_stream_capturing():  # coverage: needs a GPU
                return  # a copy in a graph would be made at every replay
            if self._thread is None:
                self._begin(vocab)
            ids, capacity = token_ids.detach().reshape(-1), len(self._slots)
            if self._added + len(ids) - self.counted > capacity:
                if not self.dropped:
                    logger.warning(
                        "flashsample: FLASHSAMPLE_TRACE cannot keep up, from now on its counts miss tokens (this line "
                        "comes once); answers are not affected"
                    )
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
        if self._thread is not None:
            self._thread.join(5)
        self._lock_file.close()

    def _begin(self, vocab: int) -> None:
        if self._earlier is not None and self._earlier.vocab != vocab:
            raise ValueError(f"{self.file} is of {self._earlier.vocab} ids, the model has {vocab}")
        self._counts = torch.zeros(vocab, dtype=torch.int64)
        self._thread = threading.Thread(target=self._run, name="flashsample-token-counts", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.look_seconds):
                wait = self.write_seconds if self._collect() else self.idle_seconds
                if time.monotonic() - self._write_time >= wait:
                    self._write()
            self._collect()
            self._write()
        except Exception as error:
            self._disable(error)

    def _collect(self) -> int:
        """Count the ids that have arrived, in the order of their steps. Returns how many."""
        before, added, capacity = self.counted, self._added, len(self._slots)
        while self.counted < added:
            start = self.counted % capacity
            slots = self._slots[start : start + min(added - self.counted, capacity - start)]
            missing = (slots == _EMPTY).nonzero()
            arrived = slots[: int(missing[0])] if len(missing) else slots
            if not len(arrived):
                break
            # An id outside of the vocabulary is not counted; a sampler may give one for logits that are all NaN.
            known = arrived[(arrived >= 0) & (arrived < len(self._counts))]
            self._counts += torch.bincount(known, minlength=len(self._counts))
            num_arrived = len(arrived)
            arrived.fill_(_EMPTY)
            self.counted += num_arrived  # only now: a step may write there again
        return self.counted - before

    def _write(self) -> None:
        if self.counted == self._written:
            return
        self._write_time, error_text = time.monotonic(), ""
        try:
            counts = HotVocab.of_ids(self._counts.numpy(), self.name, "server")
            write_whole(self.file, (counts if self._earlier is None else self._earlier.plus(counts)).dumps())
            self._written = self.counted
        except (OSError, ValueError) as error:  # a full disk, say; it may have room at the next write
            error_text = one_line(str(error))
        if error_text not in ("", self._write_error):
            logger.warning(
                "flashsample: the counts of FLASHSAMPLE_TRACE cannot be written, the next write tries again: %s",
                error_text,
            )
        self._write_error = error_text

    def _disable(self, error: Exception) -> None:
        if self.disabled_reason is None:
            self.disabled_reason = f"{type(error).__name__}: {one_line(str(error), 300)}"
            logger.warning(
                "flashsample: FLASHSAMPLE_TRACE counts no tokens any more, answers are not affected: %s",
                self.disabled_reason,
            )
