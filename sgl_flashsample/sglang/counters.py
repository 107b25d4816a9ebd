"""Batches and rows per path and reason, how truncated and screened rows fared, and what a batch costs the host: in the
log and through SGLang's /metrics."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.int8_head import Counted

logger = logging.getLogger("sgl_flashsample")

LOG_SECONDS_VARIABLE = "FLASHSAMPLE_LOG_SECONDS"
_DEFAULT_LOG_SECONDS = 60.0
_READ_SECONDS = 1.0  # between two copies of a counter from the device: each costs the host some microseconds


class Counters:
    """One ``add`` for each path and reason in a batch; a log line at most once per interval; Prometheus counters where
    metrics are on."""

    def __init__(self, metrics: bool) -> None:
        self.interval = _log_seconds()
        self.read_interval = min(self.interval, _READ_SECONDS)
        self._batches: Counter[tuple[str, str]] = Counter()
        self._rows: Counter[tuple[str, str]] = Counter()
        self._truncated = self._searched = 0
        self._screened = [0] * len(Counted)
        self._resting = False
        self._host_batches, self._host_seconds = 0, 0.0
        self._last_log = time.monotonic()
        self._prometheus = _prometheus_metrics() if metrics else None

    def add(self, path: str, reason: str, rows: int, batches: int = 1) -> None:
        """Count ``rows`` rows of each of ``batches`` batches; ``reason`` is empty on the fused path."""
        self._batches[path, reason] += batches
        self._rows[path, reason] += rows * batches
        if self._prometheus is not None:
            self._prometheus.batches.labels(path, reason).inc(batches)
            self._prometheus.rows.labels(path, reason).inc(rows * batches)
        now = time.monotonic()
        if now - self._last_log >= self.interval:
            self._last_log = now
            logger.info("flashsample: %s", self.summary())

    def add_truncated(self, rows: int, searched: int) -> None:
        """Count ``rows`` rows that the fused pass has drawn with top-k, top-p or min-p, and ``searched`` that a search
        over kept logits has answered."""
        self._truncated += rows
        self._searched += searched
        if self._prometheus is not None:
            self._prometheus.truncated.inc(rows)
            self._prometheus.searched.inc(searched)

    def add_screened(self, counted: Sequence[int], resting: bool) -> None:
        """Count what a screen has counted on the device: one number for each member of ``Counted``. resting: it serves
        nothing at the moment (``screen_guard.py``)."""
        if resting is not self._resting:
            self._resting = resting
            if self._prometheus is not None:
                self._prometheus.screen_resting.set(resting)
        if not any(counted):
            return
        for kind in Counted:
            self._screened[kind] += counted[kind]
            if self._prometheus is not None:
                self._prometheus.screened[kind].inc(counted[kind])

    def add_host_time(self, seconds: float, batches: int = 1) -> None:
        """Count what ``batches`` batches, all of them fused, took of the host's time in the sampler, together."""
        self._host_batches += batches
        self._host_seconds += seconds
        if self._prometheus is not None:
            for _ in range(batches):
                self._prometheus.host_seconds.observe(seconds / batches)

    def summary(self) -> str:
        """Totals since the start, fused first: "fused 12 rows in 3 batches; native (top_logprobs) 4 rows in 2 batches;
        truncated 9 rows, 1 of them searched; screened 8 rows, 75.0 % sure, 1.5 candidates per row, 5.0 groups read per
        batch, 0 of 2 batches wide, resting; host 41.5 us per batch over 3 batches"."""
        parts = []
        for path, reason in sorted(self._rows, key=lambda key: (key[0] != "fused", key)):
            label = f"{path} ({reason})" if reason else path
            parts.append(f"{label} {self._rows[path, reason]:,} rows in {self._batches[path, reason]:,} batches")
        if self._truncated:
            parts.append(f"truncated {self._truncated:,} rows, {self._searched:,} of them searched")
        rows, batches = self._screened[Counted.ROWS], self._screened[Counted.BATCHES]
        if rows and batches:
            parts.append(
                f"screened {rows:,} rows, {100 * self._screened[Counted.SURE_ROWS] / rows:.1f} % sure, "
                f"{self._screened[Counted.CANDIDATES] / rows:.1f} candidates per row, "
                f"{self._screened[Counted.GROUPS] / batches:.1f} groups read per batch, "
                f"{self._screened[Counted.WIDE_BATCHES]:,} of {batches:,} batches wide"
                f"{', resting' if self._resting else ''}"
            )
        if self._host_batches:
            mean = self._host_seconds / self._host_batches * 1e6
            parts.append(f"host {mean:.1f} us per batch over {self._host_batches:,} batches")
        return "; ".join(parts)


class DeviceCounters:
    """How far counters on the device have come, asked without waiting for the device.

    A copy to pinned memory is started at most once in ``interval`` seconds; what it brings is seen by a later call.
    """

    def __init__(self, counters: torch.Tensor, interval: float) -> None:
        self._counters = counters  # [N] int64
        self._interval = interval
        on_gpu = counters.is_cuda
        self._copy = torch.zeros(len(counters), dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._under_way = False
        self._started = -interval
        self._seen = self._nothing = (0,) * len(counters)

    def new(self) -> tuple[int, ...]:
        """What each has counted since the last call, as far as it has arrived."""
        found = self._nothing
        if self._under_way and (self._arrived is None or self._arrived.query()):
            before, self._seen = self._seen, tuple(self._copy.tolist())
            found = tuple(now - then for now, then in zip(self._seen, before, strict=True))
            self._under_way = False
        now = time.monotonic()
        if not self._under_way and now - self._started >= self._interval:
            self._copy.copy_(self._counters, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._under_way, self._started = True, now
        return found


def _log_seconds() -> float:
    text = os.environ.get(LOG_SECONDS_VARIABLE)
    try:
        return _DEFAULT_LOG_SECONDS if text is None else float(text)
    except ValueError:
        logger.warning("flashsample: %s is %r; expected seconds, as a number", LOG_SECONDS_VARIABLE, text)
        return _DEFAULT_LOG_SECONDS


_SCREEN_METRICS = {
    Counted.BATCHES: "Blocks of rows that a screen has served, each reading groups of its own",
    Counted.ROWS: "Rows that a screen has served",
    Counted.GROUPS: "Groups of 16 ids read from the head itself, per block of rows",
    Counted.CANDIDATES: "Groups that a row could have taken its token from",
    Counted.SURE_ROWS: "Rows with one such group or none",
    Counted.WIDE_BATCHES: "Blocks of rows that may have had to read a large share of the head",
}


class _Metrics(NamedTuple):
    batches: Any
    rows: Any
    truncated: Any
    searched: Any
    screened: list[Any]  # by Counted
    screen_resting: Any
    host_seconds: Any


def _prometheus_metrics() -> _Metrics | None:
    """Metrics in the registry that SGLang's /metrics collects; None without prometheus_client."""
    try:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge, Summary
    except ImportError:
        logger.warning("flashsample: metrics are on but prometheus_client is not installed: no flashsample metrics")
        return None
    labels = ["path", "reason"]
    return _Metrics(
        PrometheusCounter("sglang:flashsample_batches", "Batches sampled, per path and reason", labels),
        PrometheusCounter("sglang:flashsample_rows", "Rows sampled, per path and reason", labels),
        PrometheusCounter("sglang:flashsample_truncated_rows", "Fused rows with top-k, top-p or min-p"),
        PrometheusCounter(
            "sglang:flashsample_searched_rows", "Of these, rows that took a search over their kept logits"
        ),
        [
            PrometheusCounter(f"sglang:flashsample_screen_{kind.name.lower()}", _SCREEN_METRICS[kind])
            for kind in Counted
        ],
        Gauge(
            "sglang:flashsample_screen_resting",
            "Screens that serve nothing for a while, because they have read too much of the head",
            multiprocess_mode="livesum",
        ),
        Summary("sglang:flashsample_host_seconds", "Host time in the sampler, per batch of fused rows alone"),
    )
