"""Counts the tokens that this server draws into a hot set (``hot_set.py``), if ``FLASHSAMPLE_TRACE`` names its file.

A step does one thing more: it starts a copy of its token ids to pinned memory and goes on. A thread of ours sees them
arrive (each place holds ``_EMPTY`` until then), so it makes no CUDA call that could wait for a step or break a capture.
Nobody ever waits for the device: ids that find no place, because the thread has fallen behind, are not counted.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import time
from pathlib import Path

import torch

from ..bounded_json import shorten
from ..files import write_whole
from ..hot_set import HotSet, HotSetError, groups_of, token_sizes
from ..kernels.rng import GROUP_SIZE

logger = logging.getLogger("sgl_flashsample")

TRACE_VARIABLE = "FLASHSAMPLE_TRACE"
SOURCE = "server"
CAPACITY = 1 << 18  # ids under way: 2 MiB of pinned memory, what 500 rows draw in 500 steps
_EMPTY = torch.iinfo(torch.int64).min
_LOOK_SECONDS = 0.5  # between two looks for ids that have arrived
_WRITE_SECONDS = 60.0  # between two writes while tokens keep coming: each takes some milliseconds of the interpreter
_IDLE_SECONDS = 5.0  # between two writes while they do not


def of_this_server() -> TokenTrace | None:
    """The trace that the environment asks for; None where it asks for none, or another process makes it."""
    file = os.environ.get(TRACE_VARIABLE)
    if not file:
        return None
    try:
        from sglang.srt.runtime_context import get_model, get_parallel

        parallel = get_parallel()
        if parallel.tp_rank != 0 or parallel.pp_rank != parallel.pp_size - 1:
            return None  # the ranks of a stage draw the same tokens, all stages but the last one none
        return TokenTrace(Path(file).absolute(), _name_of(get_model().model_path))
    except Exception as error:  # a trace must not keep a server from starting
        logger.warning("flashsample: no trace: %s: %s: %s", TRACE_VARIABLE, type(error).__name__, shorten(str(error)))
        return None


def _name_of(model: str) -> str:
    """The name of a folder, not where it lies; a hub's name as it is."""
    return shorten(Path(model).name if os.path.isdir(model) else str(model))


class TokenTrace:
    """Adds what is drawn from now on to what ``file`` holds from earlier runs.

    Raises ValueError where something else is in its place or another process writes it, OSError where its folder is of
    no use.
    """

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name
        self.problem: str | None = None  # why nothing is counted any more
        self.left_out = 0  # ids that found no place
        _lock(file)
        self._before = HotSet.load(file) if os.path.lexists(file) else None
        if self._before is not None and name and self._before.name not in ("", name):
            raise ValueError(f"{file} is of {self._before.name}, not of {name}; expected a file for each model")
        self._ids = torch.full((CAPACITY,), _EMPTY, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._added = self._counted = 0  # ids since the start: what lies in between is in self._ids
        self._counts: torch.Tensor | None = None  # [V] int64
        self._written, self._write_time = 0, time.monotonic()
        self._warned = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        logger.info("flashsample: counting the drawn tokens into %s", file)

    def add(self, token_ids: torch.Tensor, vocab: int) -> None:
        """Count the ids of one step (``[B]``), drawn from a vocabulary of ``vocab``. Waits for nothing; raises
        nothing."""
        if self.problem is not None:
            return
        try:
            if token_ids.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # a copy in a graph would be made at every replay
            if self._counts is None:
                self._begin(vocab)
            num_ids = token_ids.numel()
            if self._added + num_ids - self._counted > CAPACITY:
                if not self.left_out:
                    logger.warning("flashsample: tokens are drawn faster than they are counted: some are left out")
                self.left_out += num_ids
                return
            at = self._added % CAPACITY
            first = min(num_ids, CAPACITY - at)
            ids = token_ids.detach().reshape(-1)
            self._ids[at : at + first].copy_(ids[:first], non_blocking=True)
            if first < num_ids:
                self._ids[: num_ids - first].copy_(ids[first:], non_blocking=True)
            self._added += num_ids  # only now: the thread looks no further
        except Exception as error:  # as everywhere in a step: not the request's fault
            self._give_up(f"{type(error).__name__}: {error}")

    def _begin(self, vocab: int) -> None:
        if self._before is not None and self._before.vocab != vocab:
            raise ValueError(f"{self.file} is of {self._before.vocab} ids, the model has {vocab}")
        self._counts = torch.zeros(vocab, dtype=torch.int64)
        self._thread = threading.Thread(target=self._run, name="flashsample-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Count and write what has arrived."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                wait = _WRITE_SECONDS if self._collect() else _IDLE_SECONDS
                if time.monotonic() - self._write_time >= wait:
                    self._write()
            self._collect()
            self._write()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _collect(self) -> int:
        """Count the ids that have arrived. Returns how many."""
        assert self._counts is not None
        before, added = self._counted, self._added
        while self._counted < added:
            at = self._counted % CAPACITY
            place = self._ids[at : at + min(added - self._counted, CAPACITY - at)]
            missing = (place == _EMPTY).nonzero()
            ids = place[: int(missing[0])] if len(missing) else place
            if not len(ids):
                break
            # An id that is none (a sampler's answer to logits that are all NaN, say) is a row's problem, not ours.
            known = ids[(ids >= 0) & (ids < len(self._counts))]
            self._counts += torch.bincount(known, minlength=len(self._counts))
            num_ids = len(ids)
            ids.fill_(_EMPTY)
            self._counted += num_ids  # only now: a step may write there again
        return self._counted - before

    def _write(self) -> None:
        if self._counted == self._written:
            return
        self._write_time = time.monotonic()
        try:
            write_whole(self.file, self.hot_set().dumps())
            self._written = self._counted
            problem = ""
        except (OSError, ValueError) as error:  # a full disk, say; it may have room at the next write
            problem = shorten(str(error))
        if problem and problem != self._warned:
            logger.warning("flashsample: the trace cannot be written, tokens are still counted: %s", problem)
        self._warned = problem

    def hot_set(self) -> HotSet:
        """What this run has counted, and what the file held before. Raises HotSetError where that is nothing."""
        if self._counts is None:
            raise HotSetError("no token has been drawn")
        counts, vocab = self._counts, len(self._counts)
        padded = torch.zeros(groups_of(vocab) * GROUP_SIZE, dtype=torch.int64)
        padded[:vocab] = counts
        groups = tuple(padded.view(-1, GROUP_SIZE).sum(1).tolist())
        sizes = token_sizes(vocab)
        largest = torch.sort(counts, descending=True).values.cumsum(0)
        total = max(1, int(largest[-1]))
        by_token = {size: int(largest[size - 1]) / total for size in sizes}
        found = HotSet(vocab, groups, self.name, SOURCE, by_token)
        return found if self._before is None else self._before.plus(found)

    def _give_up(self, problem: str) -> None:
        if self.problem is None:
            self.problem = shorten(problem, 300)
            logger.warning("flashsample: the drawn tokens are not counted any more: %s", self.problem)


def _lock(file: Path) -> None:
    """Become the one process that writes ``file``, until this process ends: of replicas with one environment, the first
    counts. Raises ValueError where another process is; a file system without locks is taken as it is."""
    descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another process counts into {file}") from None
    except OSError:
        os.close(descriptor)
