"""Illegal tokens: of a billion draws, how many have an id that their row may not be given?

    python benchmarks/legal.py --out benchmarks/results/legal.json

Random rows of logits with temperatures, top-k, top-p, min-p and grammar masks, of 1 to 5,000 ids, holes of -inf among
them. The oracle says in float64 which ids each may draw (``definition.py``); each batch is drawn at many positions, in
rounds. A token is illegal if it is none of these ids, or no id at all.

cpu      in host memory, where there is no GPU
logits   from logits on the GPU
fused    from an LM head whose products are these logits: a hidden state has a single element that is not 0

In one more batch the oracle forbids each row's most likely id: those draws must be counted, or nothing is proven. The
exit code is 1 if a token is illegal, or if that is not noticed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import DEVICE, make_parser, new_env, write_result
from definition import make_row, may_and_must, probabilities

from sgl_flashsample import BatchParams, LMHead, Truncation, sample, sample_from_logits
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.kernels.params import LogitEdits

ROWS, MASKED_SHARE = 1024, 0.3
FUSED_WIDTH = 64  # elements of a hidden state: rows of logits that a head can hold at a time
Draw = Callable[[int], torch.Tensor]


class Batch:
    """``rows`` rows of one size. may: ``[B, V]`` bool, what each may draw."""

    def __init__(self, index: int, rows: int) -> None:
        random = np.random.default_rng(index)
        vocab = make_row(index).logits.size
        made = [make_row(index * rows + row, vocab) for row in range(rows)]
        allowed = np.ones((rows, vocab), dtype=bool)
        for row in np.flatnonzero(random.random(rows) < MASKED_SHARE):
            allowed[row] = random.random(vocab) < 0.5
            allowed[row, made[row].logits.argmax()] = True  # a grammar leaves a row something to draw
        self.logits = np.stack([row.logits for row in made])
        self.may = np.empty_like(allowed)
        for place, row in enumerate(made):
            logits = np.where(allowed[place], row.logits, np.float32(-np.inf))
            seen = row.__class__(row.shape, logits, row.temperature, row.top_k, row.top_p, row.min_p)
            self.may[place] = may_and_must(seen, probabilities(seen), flashinfer=True)[0]
        columns = {
            "temperature": [row.temperature for row in made],
            "top_k": [row.top_k or 0 for row in made],
            "top_p": [row.top_p or 1.0 for row in made],
            "min_p": [row.min_p or 0.0 for row in made],
        }
        on_device = {name: torch.tensor(values, device=DEVICE) for name, values in columns.items()}
        self._temperature = on_device["temperature"]
        limits = on_device["top_k"].to(torch.int32), on_device["top_p"], on_device["min_p"]
        self._truncation = Truncation(*limits)
        bits = np.pad(allowed, ((0, 0), (0, -vocab % 32)))
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._edits = LogitEdits(mask=torch.from_numpy(words.copy()).to(DEVICE))
        self._seed = torch.arange(rows, device=DEVICE) + index * rows

    def params(self, position: int) -> BatchParams:
        positions = torch.full_like(self._seed, position)
        return BatchParams(self._temperature, self._seed, positions, truncation=self._truncation, edits=self._edits)

    def illegal(self, draw: Draw, positions: range, may: np.ndarray) -> int:
        """How many tokens of these positions are not in ``may``."""
        legal, count = torch.from_numpy(may).to(DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
        for position in positions:
            tokens = draw(position).long()
            inside = (tokens >= 0) & (tokens < legal.shape[1])
            found = legal.gather(1, tokens.clamp(0, legal.shape[1] - 1)[:, None])[:, 0]
            count += (~(inside & found)).sum()
        return int(count)


def from_logits(batch: Batch) -> Draw:
    logits = torch.from_numpy(batch.logits).to(DEVICE)
    return lambda position: sample_from_logits(logits, batch.params(position)).token_ids


def from_head(batch: Batch) -> Draw:
    """Products of an element 1.0 and its column of the head, and of zeros: the logits, bit for bit. A hole is a logit
    of -3e38, which no row draws that has another."""
    weight = torch.from_numpy(np.maximum(batch.logits, np.float32(-3e38)).T.copy()).to(DEVICE)
    head, hidden = LMHead(weight), torch.eye(len(batch.logits), device=DEVICE)
    return lambda position: sample(hidden, head, batch.params(position)).token_ids


def measure(path: str, draw_of: Callable[[Batch], Draw], rows: int, options: Any) -> dict[str, Any]:
    """The counts of one path. Batches are made until there are enough draws."""
    started, total, illegal, index = time.monotonic(), 0, 0, 0
    while total < options.draws:
        batch = Batch(index, rows)
        illegal += batch.illegal(draw_of(batch), range(options.positions), batch.may)
        total += rows * options.positions
        index += 1
        if index % 20 == 0:
            print(f"{path}: {total:.3g} draws, {illegal} illegal, {time.monotonic() - started:.0f} s", flush=True)
    batch = Batch(0, rows)
    wrong = batch.may.copy()
    wrong[np.arange(rows), batch.logits.argmax(1)] = False
    noticed = batch.illegal(draw_of(batch), range(2), wrong)
    seconds = round(time.monotonic() - started, 1)
    return {"path": path, "draws": total, "illegal": illegal, "planted_noticed": noticed, "seconds": seconds}


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--draws", type=float, default=1e9, help="of each path")
    parser.add_argument("--positions", type=int, default=1000, help="that each batch is drawn at")
    options = parser.parse_args()
    paths: dict[str, tuple[Callable[[Batch], Draw], int]] = {
        "logits": (from_logits, ROWS),
        "fused": (from_head, FUSED_WIDTH),
    }
    if DEVICE.type == "cpu":
        if not draws_in_host_memory(DEVICE):
            parser.error("without a GPU this draws in host memory: the extra `cpu`, and TRITON_INTERPRET unset")
        paths = {"cpu": (from_logits, ROWS)}
    result: dict[str, Any] = {"env": new_env(), "rows": []}
    for path, (draw_of, rows) in paths.items():
        result["rows"].append(measure(path, draw_of, rows, options))
        print(result["rows"][-1], flush=True)
        write_result(options.out, result)
    return int(any(row["illegal"] or not row["planted_noticed"] for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
