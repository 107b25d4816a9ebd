"""Draws for an hour, or as long as is asked for, of distributions that are known exactly: is there evidence that a path
draws another one?

    python tests/proof/soak.py --out tests/proof/results/soak.json
    python tests/proof/soak.py --out soak.json --minutes 5

Rows are those of ``exact.py``, with temperatures, top-k, top-p, min-p and masks, where no rounding decides what may be
drawn. Each is drawn at new positions all the time, and the evidence against its distribution is looked at again and
again (``log_e_value`` in ``stats.py``). Where draws are right, the mean over the rows of one of N batches ever reaches
N / ``ALPHA`` with a chance of at most ``ALPHA`` / N, so that of any batch of a path with a chance of ``ALPHA``.

In the end the same counts are compared with distributions at a total variation distance of ``PLANTED_TVD``, and
``noticed`` says in how many rows there would be evidence. ``powerful`` says in how many rows so many draws of a
distribution at a distance of ``TVD`` would be noticed in 99 of 100 simulations. Both distributions have the most likely
id less often, and all others more often by the same share.

Paths are those of ``exact.py``, and have equal parts of the time, and so have the batches of rows that a process draws
one after the other. The file has those that have ended. The exit code is 1 where the evidence of one has reached N /
``ALPHA``, or where nothing planted is noticed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from definition import Row, may_and_must, probabilities
from exact import PATHS, Batch
from programs import DEVICE, in_processes, make_parser, new_env, write_result
from scipy.special import logsumexp
from stats import log_e_value

from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.selfcheck import MAX_COMPILED_ROWS

ALPHA, TVD, PLANTED_TVD = 1e-6, 1e-3, 0.03
ROWS = 32  # of a batch
AT_ONCE = MAX_COMPILED_ROWS // ROWS  # positions of a call
CALLS = 100  # between two looks
SIMULATIONS = 100


def distribution(row: Row) -> np.ndarray | None:
    """``[V]`` float64. None where rounding decides which ids a limit leaves, or where one id is left."""
    p = probabilities(row)
    may, must = may_and_must(row, p, flashinfer=True)
    return np.where(must, p, 0.0) / p[must].sum() if (may == must).all() and must.sum() > 1 else None


def at_distance(probability: np.ndarray, tvd: float) -> np.ndarray:
    """Another distribution of the same ids. The most likely one is less likely by ``tvd``, if it can be."""
    most = probability.argmax()
    tvd = min(tvd, probability[most] / 2)
    other = probability * (1 + tvd / (1 - probability[most]))
    other[most] = probability[most] - tvd
    return other


class Draws:
    """Of one batch of rows. probability: of each row, None where it is not certain. counts: ``[B, V + 1]`` int64, the
    last of what is no id."""

    def __init__(self, path: str, index: int) -> None:
        self.index, self.position = index, 0
        self.batch = Batch(index, ROWS, AT_ONCE)
        self.draw = PATHS[path].draw_of(self.batch)
        self.probability = [distribution(row) for row in self.batch.seen]
        self.counts = np.zeros((ROWS, self.batch.may.shape[1] + 1), dtype=np.int64)
        self.most_evidence = -math.inf

    def go_on(self) -> None:
        """``CALLS`` calls, and a look at the evidence."""
        width = self.counts.shape[1]
        first = torch.arange(0, self.counts.size, width, device=DEVICE).repeat_interleave(AT_ONCE)
        counts = torch.zeros(self.counts.size, dtype=torch.int64, device=DEVICE)
        for _ in range(CALLS):
            tokens = self.draw(range(self.position, self.position + AT_ONCE)).token_ids
            tokens = torch.where((tokens >= 0) & (tokens < width), tokens, width - 1)
            counts += torch.bincount(first + tokens, minlength=len(counts))
            self.position += AT_ONCE
        self.counts += counts.view(ROWS, width).cpu().numpy()
        self.most_evidence = max(self.most_evidence, self.evidence())

    def of_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Counts and distribution of each row that has one."""
        for counts, probability in zip(self.counts, self.probability, strict=True):
            if probability is not None:
                yield counts, np.append(probability, 0.0)

    def evidence(self) -> float:
        """Log of the mean over the rows."""
        logs = [log_e_value(counts, probability) for counts, probability in self.of_rows()]
        return float(logsumexp(logs) - math.log(len(logs))) if logs else 0.0

    def summary(self) -> dict[str, Any]:
        random, limit = np.random.default_rng(0), -math.log(ALPHA)
        noticed = powerful = rows = 0
        for counts, probability in self.of_rows():
            rows += 1
            noticed += log_e_value(counts, at_distance(probability, PLANTED_TVD)) > limit
            simulated = random.multinomial(counts.sum(), at_distance(probability, TVD), size=SIMULATIONS)
            powerful += sum(log_e_value(one, probability) > limit for one in simulated) >= 0.99 * SIMULATIONS
        found = {"batch": self.index, "ids": self.batch.may.shape[1], "rows": rows, "draws_per_row": self.position}
        found |= {"log_evidence": round(self.evidence(), 2), "most_log_evidence": round(self.most_evidence, 2)}
        return found | {"noticed": int(noticed), "powerful": int(powerful)}


def soak(path: str, index: int, seconds: float) -> dict[str, Any]:
    """What has been drawn from one batch of rows until the time is over."""
    started, draws = time.monotonic(), Draws(path, index)
    while draws.position == 0 or time.monotonic() < started + seconds:
        draws.go_on()
    return {"path": path} | draws.summary()


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all paths together")
    parser.add_argument("--batches", type=int, default=4, help=f"of {ROWS} rows each, of each process")
    parser.add_argument("--processes", type=int, default=1, help="they share all GPUs")
    options = parser.parse_args()
    paths = [path for path in PATHS if (path == "cpu") == (DEVICE.type == "cpu")]
    if DEVICE.type == "cpu" and not draws_in_host_memory(DEVICE):
        parser.error("without a GPU this draws in host memory: the extra `cpu`, and TRITON_INTERPRET unset")
    result: dict[str, Any] = {"env": new_env(), "rows": []}
    wrong = False
    for path in paths:
        seconds = options.minutes * 60 / len(paths) / options.batches
        cases = ((path, index, seconds) for index in range(options.batches * options.processes))
        rows: list[dict[str, Any]] = []
        for row in in_processes(soak, cases, options.processes):
            rows += [row] if row["rows"] else []
            write_result(options.out, result | {"rows": result["rows"] + rows})
        result["rows"] += rows
        evidence, limit = max(row["most_log_evidence"] for row in rows), math.log(len(rows) / ALPHA)
        counts = {name: sum(row[name] for row in rows) for name in ("rows", "noticed", "powerful")}
        draws = sum(row["rows"] * row["draws_per_row"] for row in rows)
        print(f"{path}: {draws:,} draws of {counts}; most log evidence {evidence:.2f}, limit {limit:.2f}", flush=True)
        wrong |= evidence >= limit or not counts["noticed"]
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
