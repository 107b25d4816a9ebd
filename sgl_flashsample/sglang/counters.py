"""Batches and rows per path and reason: summed here, shown in the log and through SGLang's /metrics."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import Any

logger = logging.getLogger("sgl_flashsample")

LOG_SECONDS_VARIABLE = "FLASHSAMPLE_LOG_SECONDS"
_DEFAULT_LOG_SECONDS = 60.0


class Counters:
    """One ``add`` for each path and reason in a batch; a log line at most once per interval; Prometheus counters where
    metrics are on."""

    def __init__(self, metrics: bool) -> None:
        self.interval = _log_seconds()
        self._batches: Counter[tuple[str, str]] = Counter()
        self._rows: Counter[tuple[str, str]] = Counter()
        self._last_log = time.monotonic()
        self._prometheus = _prometheus_counters() if metrics else None

    def add(self, path: str, reason: str, rows: int) -> None:
        """Count ``rows`` rows of one batch; ``reason`` is empty on the fused path."""
        self._batches[path, reason] += 1
        self._rows[path, reason] += rows
        if self._prometheus is not None:
            batches, total = self._prometheus
            batches.labels(path, reason).inc()
            total.labels(path, reason).inc(rows)
        now = time.monotonic()
        if now - self._last_log >= self.interval:
            self._last_log = now
            logger.info("flashsample: %s", self.summary())

    def summary(self) -> str:
        """Totals since the start, fused first: "fused 12 rows in 3 batches; native (top_p) 4 rows in 2 batches"."""
        parts = []
        for path, reason in sorted(self._rows, key=lambda key: (key[0] != "fused", key)):
            label = f"{path} ({reason})" if reason else path
            parts.append(f"{label} {self._rows[path, reason]:,} rows in {self._batches[path, reason]:,} batches")
        return "; ".join(parts)


def _log_seconds() -> float:
    text = os.environ.get(LOG_SECONDS_VARIABLE)
    try:
        return _DEFAULT_LOG_SECONDS if text is None else float(text)
    except ValueError:
        logger.warning("flashsample: %s is %r; expected seconds, as a number", LOG_SECONDS_VARIABLE, text)
        return _DEFAULT_LOG_SECONDS


def _prometheus_counters() -> tuple[Any, Any] | None:
    """Counters in the registry that SGLang's /metrics collects; None without prometheus_client."""
    try:
        from prometheus_client import Counter as PrometheusCounter
    except ImportError:
        logger.warning("flashsample: metrics are on but prometheus_client is not installed: no flashsample metrics")
        return None
    labels = ["path", "reason"]
    return (
        PrometheusCounter("sglang:flashsample_batches", "Batches sampled, per path and reason", labels),
        PrometheusCounter("sglang:flashsample_rows", "Rows sampled, per path and reason", labels),
    )
