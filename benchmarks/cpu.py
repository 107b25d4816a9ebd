"""The cpu path: time per call, beside SGLang's sampler, PyTorch's operations and the time to read the logits once.

    python benchmarks/run.py cpu --out benchmarks/results/cpu.json

Logits are float32. Batches take turns whose logits have 128 MiB together: on most machines they come from memory, not
from a cache. In a server, the weights of the LM head pass through the caches between two calls. ``stock`` is the
sampler of SGLang's CPU engine (its pytorch backend), where SGLang is installed. ``torch`` is the shortest way with
PyTorch: softmax and multinomial; argmax; with a truncation the multinomial of the largest ``TOP_K``. ``read`` is
PyTorch's sum of all logits. Threads are PyTorch's; ours share rows, so one row has one thread. In each round everything
runs once per batch, in rotated order; medians, with half the distance between the quartiles. What takes seconds runs in
fewer rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from common import Benchmark, Result, print_rows
from lab import torchvision_schemas  # noqa: F401

from sgl_flashsample import BatchParams
from sgl_flashsample.autotune.timing import Timing, rotated
from sgl_flashsample.cpu_path import sample_on_cpu
from sgl_flashsample.kernels.config import cdiv
from sgl_flashsample.kernels.params import LogitsSpec, Truncation

VOCABULARIES = (32768, 49152, 151936, 262144)
BATCHES = (1, 16, 128)
RACED = ("t1", "greedy", "k50p90")
TOP_K, TOP_P = 50, 0.9
COLD_BYTES = 2**27  # all batches that take turns
MOST_BATCHES = 16  # in a round, for batches of one row
ROUNDS, LEAST_ROUNDS = 15, 4
PATIENCE_S = 3.0  # in a cell, what has taken this long after LEAST_ROUNDS rounds is measured no more


def make_logits(rows: int, vocab: int, count: int) -> list[torch.Tensor]:
    """``count`` batches with the tuner's typical profile: -1.2 log(rank) and noise of deviation 2."""
    generator = torch.Generator().manual_seed(0)
    slope = -1.2 * torch.log(torch.arange(1, vocab + 1))
    noise = 2 * torch.randn(count, rows, vocab, generator=generator)
    return [batch + slope[torch.randperm(vocab, generator=generator)] for batch in noise]


def ours(name: str, rows: int, vocab: int) -> Callable[[torch.Tensor], object]:
    truncation = None
    if name == "k50p90":
        truncation = Truncation(
            torch.full((rows,), TOP_K, dtype=torch.int32), torch.full((rows,), TOP_P), torch.zeros(rows), TOP_K
        )
    temperature = torch.full((rows,), 0.0 if name == "greedy" else 1.0)
    position = torch.zeros(rows, dtype=torch.int64)
    params = BatchParams(temperature, torch.arange(rows) * 7919, position, truncation, all_greedy=name == "greedy")
    spec = LogitsSpec(vocab)

    def call(logits: torch.Tensor) -> object:
        position.add_(1)
        return sample_on_cpu(logits, spec, params)

    return call


def of_torch(name: str) -> Callable[[torch.Tensor], object]:
    def plain(logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits, -1), 1)

    def truncated(logits: torch.Tensor) -> torch.Tensor:
        largest, ids = torch.softmax(logits, -1).topk(TOP_K)
        above = torch.cumsum(largest, -1) - largest
        return ids.gather(1, torch.multinomial(largest.masked_fill(above > TOP_P, 0.0), 1))

    return {"t1": plain, "greedy": lambda logits: logits.argmax(-1), "k50p90": truncated}[name]


def of_sglang(name: str, rows: int) -> Callable[[torch.Tensor], object]:
    """Without the copy that SGLang's sampler divides by the temperatures in place."""
    from sglang.srt.layers import sampler

    temperature = torch.ones(rows, 1)
    limits = torch.full((rows,), TOP_K, dtype=torch.int32), torch.full((rows,), TOP_P), torch.zeros(rows)

    def plain(logits: torch.Tensor) -> torch.Tensor:
        return sampler.sampling_from_probs_torch(torch.softmax(logits / temperature, -1))

    def truncated(logits: torch.Tensor) -> torch.Tensor:
        probs = torch.softmax(logits / temperature, -1)
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs, *limits, False, None, None)

    return {"t1": plain, "greedy": lambda logits: torch.argmax(logits, -1).int(), "k50p90": truncated}[name]


def rows_of(rows: int, vocab: int, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    batches = make_logits(rows, vocab, max(2, cdiv(COLD_BYTES, rows * vocab * 4)))
    calls = {(name, "cpu"): ours(name, rows, vocab) for name in RACED}
    calls |= {(name, "torch"): of_torch(name) for name in RACED}
    if importlib.util.find_spec("sglang") is not None:
        calls |= {(name, "stock"): of_sglang(name, rows) for name in RACED}
    calls["", "read"] = torch.sum
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    per_round = min(len(batches), MOST_BATCHES if rows == 1 else 2)
    for index in range(ROUNDS + 1):
        for place, key in enumerate(rotated(list(calls), index)):
            if len(samples[key]) >= LEAST_ROUNDS and sum(samples[key]) * per_round > PATIENCE_S * 1e6:
                continue
            first = (index * len(calls) + place) * per_round
            begin = time.perf_counter()
            for step in range(per_round):
                calls[key](batches[(first + step) % len(batches)])
            if index:  # the first round compiles
                samples[key].append((time.perf_counter() - begin) / per_round * 1e6)
    results = []
    for (name, path), values in samples.items():
        timing, row = Timing.of(values), {"V": vocab, "B": rows, "sampling": name, "threads": threads, "path": path}
        results.append(row | {"form": "float32", "us": round(timing.us, 1), "us_spread": round(timing.spread, 1)})
    return results


def processor() -> str:
    """The model of the processor, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    return models[0] if models else platform.machine()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="on a machine that is busy: 1")
    parser.add_argument("--vocabularies", nargs="+", type=int, default=VOCABULARIES)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)


def prepare(options: Any) -> None:
    for name in ("threads", "vocabularies", "batches"):
        if (least := min(getattr(options, name))) < 1:
            raise ValueError(f"--{name} has {least}; expected 1 or more")


def measure(options: Any, result: Result) -> int:
    cores = len(os.sched_getaffinity(0))
    result.env |= {"processor": processor(), "cores": cores, "numba": numba.__version__}
    for vocab in options.vocabularies:
        for batch in options.batches:
            for threads in options.threads:
                rows = rows_of(batch, vocab, threads)
                print_rows(f"V={vocab} B={batch} threads={threads}", rows)
                result.add(rows)
    return 0


PLACE = ("V", "B", "threads", "sampling", "path")
BENCHMARKS = {"cpu": Benchmark(__doc__, measure, add_options, prepare, place=PLACE, needs_gpu=False)}
