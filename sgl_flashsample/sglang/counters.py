"""Batches and rows per path and reason: summed here, shown in the log and through SGLang's /metrics."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import Any

logger = logging.getLogger("sgl_flashsample")

LOG_SECONDS_VARIABLE = "FLASHSAMPLE_LOG_SECONDS"


class Counters:
    """Counts into plain dicts on the hot path; publishes at most once per interval."""

    def __init__(self, metrics: bool) -> None:
        self.interval = float(os.environ.get(LOG_SECONDS_VARIABLE, "60"))
        self._batches: Counter[tuple[str, str]] = Counter()
        self._rows: Counter[tuple[str, str]] = Counter()
        self._published: Counter[tuple[str, str, str]] = Counter()
        self._last_log = self._last_metrics = time.monotonic()
        self._logged_rows = 0
        self._metrics: dict[str, Any] | None = _prometheus_counters() if metrics else None

    def add(self, path: str, reason: str, rows: int) -> None:
        """Count one batch of ``rows`` rows; ``reason`` is empty on the fused path."""
        self._batches[path, reason] += 1
        self._rows[path, reason] += rows
        now = time.monotonic()
        if self._metrics is not None and now - self._last_metrics >= 1.0:
            self._last_metrics = now
            self._publish()
        if now - self._last_log >= self.interval:
            self._last_log = now
            self.log()

    def log(self) -> None:
        """One line with the totals, if anything has been counted since the last one."""
        total = sum(self._rows.values())
        if total == self._logged_rows:
            return
        self._logged_rows = total
        logger.info("flashsample: %s", self.summary())

    def summary(self) -> str:
        parts = []
        for key in sorted(self._rows, key=lambda k: (k[0] != "fused", k)):
            path, reason = key
            label = f"{path} ({reason})" if reason else path
            parts.append(f"{label} {self._rows[key]:,} rows in {self._batches[key]:,} batches")
        return "; ".join(parts)

    def _publish(self) -> None:
        for kind, counts in (("batches", self._batches), ("rows", self._rows)):
            for (path, reason), value in counts.items():
                fresh = value - self._published[kind, path, reason]
                if fresh:
                    self._published[kind, path, reason] = value
                    self._metrics[kind].labels(path=path, reason=reason).inc(fresh)


def _prometheus_counters() -> dict[str, Any] | None:
    """Counters in the registry that SGLang's /metrics collects; None without prometheus_client."""
    try:
        from prometheus_client import Counter as PrometheusCounter
    except ImportError:
        logger.warning("flashsample: metrics are on but prometheus_client is not installed: no flashsample metrics")
        return None
    labels = ["path", "reason"]
    return {
        "batches": PrometheusCounter("sglang:flashsample_batches", "Batches sampled, per path and reason", labels),
        "rows": PrometheusCounter("sglang:flashsample_rows", "Rows sampled, per path and reason", labels),
    }
