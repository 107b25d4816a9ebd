"""Batches and rows per path and reason, how truncated and screened rows fared, and what a batch costs the host: in the
log and through SGLang's /metrics.

A step only adds to numbers of this process, which go to Prometheus and to the log at intervals: each object that a step
touches is likely a cache miss, because the host runs much other code between two steps.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..kernels.workspace import ScreenCounter
from ..switches import LOG_SECONDS_VARIABLE, seconds
from .batch import Routing, time_of_sglang
from .step_graphs import StepCounts

logger = logging.getLogger("sgl_flashsample")

FLUSH_SECONDS = 1.0  # between two updates of Prometheus
# Upper ends of the buckets of the sampler's host time, in seconds: a replayed step takes tens of microseconds.
HOST_BUCKETS = tuple(
    us / 1e6 for us in (10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
)
_FUSED = ("fused", "")
READ_SECONDS = 1.0  # between two copies of a counter from the device: each costs the host some microseconds


class Metrics:
    """add_batch counts one batch; all but the counting runs at intervals. A log line at most once per
    ``FLASHSAMPLE_LOG_SECONDS``; Prometheus metrics, with these labels, where the server has metrics on. reports: False
    on a rank whose batches another one reports: it has neither. last_batch: the time of the last one that was counted
    or, without rows, ran beside another rank's, by ``time.perf_counter``."""

    def __init__(self, prometheus: bool, reports: bool = True, labels: Mapping[str, str] | None = None) -> None:
        self.log_seconds, self._reports = seconds(LOG_SECONDS_VARIABLE), reports
        self.read_seconds = min(self.log_seconds, READ_SECONDS)
        self._batches: Counter[tuple[str, str]] = Counter()  # totals since the start
        self._rows: Counter[tuple[str, str]] = Counter()
        self._truncated = self._searched = 0
        self._replayed = self._launched = 0
        self.scheduling_seconds = 0.0  # of hooks outside of the sampler, and of the last flush
        self._screened = [0] * len(ScreenCounter)
        self._paused = False
        self._host_batches, self._host_seconds = 0, 0.0
        self._new: dict[tuple[str, str], list[int]] = {}  # batches and rows that are not in the totals yet
        self._fused_batches = self._fused_rows = 0  # those of ``add_fused``, likewise
        self._new_times: list[float] = []  # host time of each batch of fused rows alone, likewise
        self._new_truncated = 0
        self._unlogged = False  # whether the totals have grown since the last log line
        self.last_batch = -math.inf
        self._last_log = time.perf_counter()
        self.next_flush = self._last_log + min(FLUSH_SECONDS, self.log_seconds)
        self._prometheus = _prometheus_metrics(labels or {}) if prometheus and reports else None

    def add_batch(self, routing: Routing, num_truncated: int, started: float | None) -> bool:
        """Count one batch. started: ``time.perf_counter()`` at its beginning, for batches of fused rows alone; the time
        of SGLang's own penalties and grammars is left out. Returns whether it is time for ``flush``."""
        now, of_sglang = time.perf_counter(), time_of_sglang.take()
        self.last_batch = now
        for key, rows in routing.counts.items():
            new = self._new.get(key)
            if new is None:
                self._new[key] = [1, rows]
            else:
                new[0] += 1
                new[1] += rows
        self._new_truncated += num_truncated
        if started is not None:
            self._new_times.append(now - started - of_sglang)
        return now >= self.next_flush

    def add_fused(self, rows: int, num_truncated: int, started: float) -> bool:
        """``add_batch`` for a batch whose rows are all fused."""
        self._fused_batches += 1
        self._fused_rows += rows
        self._new_truncated += num_truncated
        now = self.last_batch = time.perf_counter()
        self._new_times.append(now - started)
        return now >= self.next_flush

    def flush(self) -> None:
        """Bring everything that was counted into the totals, to Prometheus and, at its interval, into the log."""
        exported = self._prometheus
        if self._fused_batches:
            batches, rows = self._new.get(_FUSED, (0, 0))
            self._new[_FUSED] = [batches + self._fused_batches, rows + self._fused_rows]
        self._unlogged = self._unlogged or bool(self._new)
        for (path, reason), (batches, rows) in self._new.items():
            self._batches[path, reason] += batches
            self._rows[path, reason] += rows
            if exported is not None:
                labels = {**exported.labels, "path": path, "reason": reason}
                exported.batches.labels(**labels).inc(batches)
                exported.rows.labels(**labels).inc(rows)
        self._truncated += self._new_truncated
        times = sorted(self._new_times)
        self._host_batches += len(times)
        self._host_seconds += sum(times)
        if exported is not None:
            if self._new_truncated:
                exported.truncated.inc(self._new_truncated)
            # `observe` takes one batch: its calls for some hundred batches would hold up a step.
            counts = [bisect.bisect_right(times, end) for end in HOST_BUCKETS]
            for bucket, (before, count) in zip(
                exported.host_seconds._buckets, itertools.pairwise([0, *counts, len(times)]), strict=True
            ):
                if count > before:
                    bucket.inc(count - before)
            exported.host_seconds._sum.inc(sum(times))
            exported.scheduling_seconds.inc(self.scheduling_seconds)
        now = self.drop()
        if self._reports and self._unlogged and now - self._last_log >= self.log_seconds:
            self._last_log, self._unlogged = now, False
            logger.info("flashsample: %s", self.summary())

    def drop(self) -> float:
        """Forget what was counted since the last ``flush``, and wait for the time of the next one. Returns the time."""
        self._new, self._new_truncated, self.scheduling_seconds = {}, 0, 0.0
        self._fused_batches = self._fused_rows = 0
        self._new_times.clear()
        now = time.perf_counter()
        self.next_flush = now + min(FLUSH_SECONDS, self.log_seconds)
        return now

    def is_behind(self, now: float) -> bool:
        """``flush`` has counts to show, in Prometheus or, at ``now``, in the log."""
        has_counts = bool(self._new) or self._fused_batches > 0
        return has_counts or (self._reports and self._unlogged and now - self._last_log >= self.log_seconds)

    def set_active(self, active: bool) -> None:
        """Set the gauge: the fused pass serves some head."""
        if self._prometheus is not None:
            self._prometheus.active.set(active)

    def add_steps(self, counts: StepCounts) -> None:
        """Add the steps of a head since the last call, and set ``counts`` to 0."""
        for name, count in vars(counts).items() if self._prometheus is not None else ():
            if count:  # each call costs some microseconds of a step
                getattr(self._prometheus, name).inc(count)
        self._replayed += counts.replayed
        self._launched += counts.launched
        counts.replayed = counts.launched = counts.prefills = counts.late_captures = counts.late_compiles = 0

    def add_searched(self, rows: int) -> None:
        """Count rows whose tokens took a search over their logits."""
        self._searched += rows
        if self._prometheus is not None and rows:
            self._prometheus.searched.inc(rows)

    def add_screened(self, counted: Sequence[int], paused: bool) -> None:
        """Add the counts of a screen on the device: one number for each member of ``ScreenCounter``. paused: it serves
        nothing at the moment (``screen_lifecycle.py``)."""
        if paused is not self._paused:
            self._paused = paused
            if self._prometheus is not None:
                self._prometheus.screen_paused.set(paused)
        for counter in ScreenCounter if any(counted) else ():
            self._screened[counter] += counted[counter]
            if self._prometheus is not None and counted[counter]:
                self._prometheus.screened[counter].inc(counted[counter])

    def summary(self) -> str:
        """Totals since the start, fused first: "since the start: fused 12 rows in 3 batches, 9 of the rows with top-k,
        top-p or min-p (1 by a search); SGLang's sampler (top_logprobs) 4 rows in 2 batches; screen 8 rows (6 with one
        candidate group or none), 5.0 of the head's groups read per block of rows, 0 of 2 blocks with too many
        candidates, paused; CPU time of fused sampling 41.5 us
        per batch over 3 batches; 2 of 3 decode steps by CUDA graphs"."""
        parts = []
        for path, reason in sorted(self._rows, key=lambda key: (key[0] != "fused", key)):
            label = "fused" if path == "fused" else f"SGLang's sampler ({reason})"
            parts.append(f"{label} {self._rows[path, reason]:,} rows in {self._batches[path, reason]:,} batches")
            if path == "fused" and self._truncated:
                parts[-1] += (
                    f", {self._truncated:,} of the rows with top-k, top-p or min-p ({self._searched:,} by a search)"
                )
        rows, blocks = self._screened[ScreenCounter.ROWS], self._screened[ScreenCounter.ROW_BLOCKS]
        if rows and blocks:
            parts.append(
                f"screen {rows:,} rows ({self._screened[ScreenCounter.CERTIFIED_ROWS]:,} with one candidate group or "
                f"none), {self._screened[ScreenCounter.GROUPS] / blocks:.1f} of the head's groups read per block of "
                f"rows, {self._screened[ScreenCounter.MANY_CANDIDATES]:,} of {blocks:,} blocks with too many candidates"
                f"{', paused' if self._paused else ''}"
            )
        if self._host_batches:
            mean = self._host_seconds / self._host_batches * 1e6
            parts.append(f"CPU time of fused sampling {mean:.1f} us per batch over {self._host_batches:,} batches")
        if self._replayed:
            steps = self._replayed + self._launched
            parts.append(f"{self._replayed:,} of {steps:,} decode steps by CUDA graphs")
        return f"since the start: {'; '.join(parts)}" if parts else ""


class DeviceCounters:
    """Reads counters on the device, without waiting for the device.

    A copy to pinned memory is started at most once in ``interval`` seconds; a later call sees its values.
    """

    def __init__(self, counters: torch.Tensor, interval: float) -> None:
        self._counters = counters  # [N] int64
        self._interval = interval
        on_gpu = counters.is_cuda
        self._copy = torch.zeros(len(counters), dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._copying = False
        self._started = -interval
        self._seen = self._nothing = (0,) * len(counters)

    def new(self) -> tuple[int, ...]:
        """The increase of each counter since the last call, as far as it has arrived."""
        counted = self._nothing
        if self._copying and (self._arrived is None or self._arrived.query()):
            before, self._seen = self._seen, tuple(self._copy.tolist())
            counted = tuple(now - then for now, then in zip(self._seen, before, strict=True))
            self._copying = False
        now = time.monotonic()
        if not self._copying and now - self._started >= self._interval:
            self._copy.copy_(self._counters, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._copying, self._started = True, now
        return counted


_SCREEN_METRICS = {
    ScreenCounter.ROW_BLOCKS: "Blocks of rows that a screen has served, each reading groups of its own",
    ScreenCounter.ROWS: "Rows that a screen has served",
    ScreenCounter.GROUPS: "Groups of 16 ids read from the head itself, per block of rows",
    ScreenCounter.CANDIDATES: "Groups that a row could have taken its token from",
    ScreenCounter.CERTIFIED_ROWS: "Rows with one candidate group or none",
    ScreenCounter.MANY_CANDIDATES: "Blocks of rows with candidates in more than 1/16 of the groups",
}


class _Prometheus(NamedTuple):
    """labels: those of every metric; ``batches`` and ``rows`` have ``path`` and ``reason`` as well."""

    labels: Mapping[str, str]
    batches: Any
    rows: Any
    truncated: Any
    searched: Any
    replayed: Any
    launched: Any
    prefills: Any
    late_captures: Any
    late_compiles: Any
    screened: list[Any]  # by ScreenCounter
    screen_paused: Any
    host_seconds: Any
    scheduling_seconds: Any
    active: Any


def _prometheus_metrics(labels: Mapping[str, str]) -> _Prometheus | None:
    """Metrics in the registry that SGLang's /metrics collects; None without prometheus_client. labels: of SGLang's
    metrics; one that has the name of a label of ours is left out."""
    try:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge, Histogram
    except ImportError:
        logger.warning("flashsample: metrics are on but prometheus_client is not installed: no flashsample metrics")
        return None
    ours = ["path", "reason"]
    labels = {name: value for name, value in labels.items() if name not in ours}

    def labelled(metric: Any) -> Any:
        return metric.labels(**labels) if labels else metric

    def counter(name: str, text: str) -> Any:
        return labelled(PrometheusCounter(f"sglang:flashsample_{name}", text, [*labels]))

    def gauge(name: str, text: str, mode: Literal["livemin", "livesum"]) -> Any:
        return labelled(Gauge(f"sglang:flashsample_{name}", text, [*labels], multiprocess_mode=mode))

    return _Prometheus(
        labels=labels,
        batches=PrometheusCounter(
            "sglang:flashsample_batches", "Batches sampled, per path and reason", [*labels, *ours]
        ),
        rows=PrometheusCounter("sglang:flashsample_rows", "Rows sampled, per path and reason", [*labels, *ours]),
        truncated=counter("truncated_rows", "Fused rows with top-k, top-p or min-p"),
        searched=counter("searched_rows", "Fused truncated rows that took a search over their logits"),
        replayed=counter("replayed_steps", "Fused steps that were replays of CUDA graphs"),
        launched=counter("launched_steps", "Fused steps that were launched, but prefills"),
        prefills=counter("prefill_steps", "Fused steps of prefills"),
        late_captures=counter("late_captures", "CUDA graphs that were captured while a step waited for them"),
        late_compiles=counter("late_compiles", "Kernels that were compiled or loaded while a step waited for them"),
        screened=[counter(f"screen_{one.name.lower()}", _SCREEN_METRICS[one]) for one in ScreenCounter],
        screen_paused=gauge(
            "screen_paused",
            "Screens that serve nothing for a while, because they have read too much of the head",
            "livesum",
        ),
        host_seconds=labelled(
            Histogram(
                "sglang:flashsample_host_seconds",
                "Host time in the sampler, per batch of fused rows alone",
                [*labels],
                buckets=HOST_BUCKETS,
            )
        ),
        scheduling_seconds=counter(
            "scheduling_seconds", "Host time outside of the sampler: batches that change, hooks and counters"
        ),
        active=gauge("active", "1 where the fused pass serves, 0 where SGLang's sampler serves everything", "livemin"),
    )
