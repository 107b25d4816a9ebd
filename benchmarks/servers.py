"""The log and the metrics of a server of ours: failures, and the rows of each path."""

from __future__ import annotations

import re
import time

from sgl_flashsample.demo.server import Server


def failures_of(server: Server) -> list[str]:
    """What our server says of itself that a healthy one does not."""
    lines = [line for line in server.log_lines('File "') if "sgl_flashsample" in line]
    lines += server.log_lines("Scheduler hit an exception") + server.log_lines("until restart")
    return lines


def counters_of(server: Server) -> dict[str, float]:
    """The rows of each path and reason, and whether ours serves."""
    time.sleep(server.metrics_seconds)
    server.generate(text="a", sampling_params={"max_new_tokens": 2})  # a step brings the counters up to date
    named = re.findall(
        r'^sglang:flashsample_(?:rows_total\{path="(\w+)",reason="(\w*)"\}|(active)) (\S+)', server.metrics(), re.M
    )
    return {" ".join(filter(None, words)): float(value) for *words, value in named}
