"""Many concurrent requests with mixed features to real servers, stock and ours: is each answered, is memory flat, and
are the slowest answers as fast?

    python benchmarks/run.py load --out benchmarks/results/load.json --models smollm2-135m qwen3-8b

Each server has a GPU of its own: two per model, all at once where there are as many. Without a GPU both run on the CPU:
``--models tiny --concurrency 64``. Weights are dummies of the model's size. ``--concurrency`` clients per server send
one request after the other, the same to both servers: numbers draw from ``MIX``, prompts and answers are of random
lengths. Some streams are timed token by token, and some clients leave before their answer is complete.

A row per server has what became of its requests, how long answers and gaps between tokens took (with half the distance
between the quartiles of the same percentile in each of ``PARTS`` parts of the run, one after the other: a difference
between servers that is not larger is none), memory of its processes
and of its GPU every ``--every`` seconds, and of ours the rows that each path and reason has served, CUDA graphs and
bytes. Growth is the median of the last quarter of the run over that of the second one. The file is written as results
come.

The exit code is 1 where an answer is missing or has another length, a server ends, or ours logs a failure or leaves
rows to SGLang's sampler that it can serve.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from common import Benchmark, Result, write_result
from lab.servers import server_on_this_machine
from servers import counters_of, failures_of

from sgl_flashsample.sglang.versions import sglang_version
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.bench import COUNTERS_EVERY, OURS, STOCK, check_active
from sgl_flashsample.tools.samplings import SAMPLINGS, SERVED, Sampling
from sgl_flashsample.tools.server import ServerError, stop_all

GPU_ARGUMENTS = (
    *("--attention-backend", "triton", "--max-running-requests", "512", "--cuda-graph-max-bs-decode", "512"),
    *("--disable-prefill-cuda-graph", "--disable-flashinfer-autotune"),
)
ARGUMENTS = ("--load-format", "dummy", "--random-seed", "1", "--enable-metrics", "--disable-radix-cache")
# Samplings of requests, with equal chances.
MIX: dict[str, Sampling] = {name: SAMPLINGS[name] for name in SERVED} | {
    "seed": Sampling("seed", {"temperature": 0.8, "sampling_seed": 7}),
    "min-p": SAMPLINGS["minp05"],
    "top-p": Sampling("top_p", {"temperature": 0.6, "top_p": 0.95}),
    "bias": Sampling("bias", SAMPLINGS["trunc"].params | {"logit_bias": {"100": 3.0, "200": -100.0}}),
    "regex": Sampling("regex", {"temperature": 1.0, "regex": "[a-f0-9]{400}"}),
    "min-tokens": Sampling("min tokens", {"temperature": 1.0, "min_new_tokens": 8}),
}
PROMPTS, ANSWERS = (8, 256), (8, 256)  # tokens, the fewest and the most
STREAMED, LEFT = 20, 50  # one of so many requests
PERCENTS = (50, 99)
PARTS = 10  # parts of a run have equally many answers, or gaps, in the order in which they ended
LOST = "no answer"
ANSWER_SECONDS = 180.0
START_SECONDS = 60.0  # kernels are loaded and the queue fills meanwhile: these times are left out


def make_request(number: int, vocab: int) -> dict[str, Any]:
    """The body of a request, the same for each server."""
    r = random.Random(number)
    asked = MIX[r.choice(list(MIX))]
    tokens = r.randint(*ANSWERS)
    prompt = [r.randrange(vocab // 2, vocab) for _ in range(r.randint(*PROMPTS))]
    params = {**asked.params, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, **asked.fields}


class Clients:
    """The clients of one server. file: where their summary is written.

    ends: how many requests ended in which way. seconds, gaps: of answers, and between tokens of streams.
    """

    def __init__(self, port: int, vocab: int, file: Path) -> None:
        self.url, self.vocab, self.file = f"http://127.0.0.1:{port}/generate", vocab, file
        self.ends: collections.Counter[str] = collections.Counter()
        self.tokens = 0
        self.seconds: list[float] = []
        self.gaps: list[float] = []

    async def run(self, concurrency: int, seconds: float, every: float) -> None:
        """``concurrency`` clients, until so many seconds have passed and their last answers are there."""
        numbers, self.began = itertools.count(), time.monotonic()
        self.warm = self.began + min(START_SECONDS, seconds / 5)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close an idle connection at any time
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self.http:

            async def client() -> None:
                while time.monotonic() < self.began + seconds:
                    self.ends[await self.ask(next(numbers))] += 1

            clients = [asyncio.ensure_future(client()) for _ in range(concurrency)]
            while (await asyncio.wait(clients, timeout=every))[1]:
                write_result(self.file, self.summary())
            for one in clients:
                one.result()
            write_result(self.file, self.summary())

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"requests": self.ends.total(), "ends": dict(self.ends.most_common())}
        found["tokens_per_s"] = round(self.tokens / (time.monotonic() - self.began), 1)
        for name, scale, values in (("answer_s", 1, self.seconds), ("gap_ms", 1e3, self.gaps)):
            for percent in PERCENTS if values else ():
                found[f"{name}_p{percent}"] = round(scale * float(np.percentile(values, percent)), 3)
                if len(values) >= PARTS:
                    of_parts = [np.percentile(part, percent) for part in np.array_split(values, PARTS)]
                    low, high = np.percentile(of_parts, (25, 75))
                    found[f"{name}_p{percent}_spread"] = round(scale * float(high - low) / 2, 3)
        return found

    async def ask(self, number: int) -> str:
        """Send a request; how it ended."""
        body, started = make_request(number, self.vocab), time.monotonic()
        leaves = random.Random(number).random() * 2 if number % LEFT == 1 else None
        answer = self.stream(body) if number % STREAMED == 0 else self.whole(body)
        try:
            tokens = await asyncio.wait_for(answer, leaves)
        except aiohttp.ClientError as error:
            return f"{LOST}: {type(error).__name__}"
        except TimeoutError:
            return "left" if leaves is not None else f"{LOST} in {ANSWER_SECONDS:.0f} s"
        if isinstance(tokens, str):
            return tokens
        self.tokens += tokens
        if started >= self.warm:
            self.seconds.append(time.monotonic() - started)
        expected = body["sampling_params"]["max_new_tokens"]
        return "answered" if tokens == expected else f"{tokens} tokens; expected {expected}"

    async def whole(self, body: dict[str, Any]) -> int | str:
        """Tokens of the answer, or its status."""
        async with self.http.post(self.url, json=body) as response:
            data = await response.json() if response.status == 200 else None
            return f"status {response.status}" if data is None else data["meta_info"]["completion_tokens"]

    async def stream(self, body: dict[str, Any]) -> int | str:
        tokens, before = 0, None
        async with self.http.post(self.url, json=body | {"stream": True}) as response:
            if response.status != 200:
                return f"status {response.status}"
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    tokens, now = json.loads(line[5:])["meta_info"]["completion_tokens"], time.monotonic()
                    if before is not None and before >= self.warm:
                        self.gaps.append(now - before)
                    before = now
        return tokens


def ask(port: int, vocab: int, file: Path, concurrency: int, seconds: float, every: float) -> None:
    """Run the clients of one server, in a process of its own."""
    asyncio.run(Clients(port, vocab, file).run(concurrency, seconds, every))


class Side:
    """One server. gpu: its number, None on a CPU. clients: the file of their summary. memory: what its processes and
    its GPU have held, by time."""

    def __init__(self, name: str, backend: str, gpu: int | None, folder: Path, options: Any) -> None:
        self.name, self.backend, self.gpu = name, backend, gpu
        self.vocab = markov.SIZES[name].vocab_size
        self.clients = folder / f"{name}-{backend}.json"
        self.about = {"model": name, "backend": backend, "concurrency": options.concurrency}
        self.memory: list[dict[str, float]] = []
        usual = "pytorch" if gpu is None else "flashinfer"
        self.server = server_on_this_machine(
            folder / name,
            ["--dtype", markov.SIZES[name].dtype, *ARGUMENTS],
            backend=usual if backend == STOCK else OURS,
            log=(options.logs or folder) / f"{name}-{backend}.log",
            environment=COUNTERS_EVERY | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
            gpu_arguments=GPU_ARGUMENTS,
        )

    def warm_up(self) -> None:
        """Each kind of request once: what a first one of its kind compiles is compiled."""
        self.server.wait_until_ready()
        if self.backend == OURS:
            check_active(self.server)
        for asked in MIX.values():
            params = asked.params | {"max_new_tokens": ANSWERS[0]}
            self.server.generate(input_ids=[[self.vocab - 2]], sampling_params=params, **asked.fields)

    def look(self, seconds: float) -> None:
        """Add to ``memory``."""
        assert self.server.process is not None
        mib = {"s": round(seconds)}
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.server.process.pid)
            mib["host_mib"] = round(sum(one.memory_info().rss for one in (process, *process.children(True))) / 2**20)
        if self.gpu is not None:
            query = ["nvidia-smi", "-i", str(self.gpu), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            mib["device_mib"] = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
        self.memory.append(mib)

    def row(self) -> dict[str, Any]:
        """So far."""
        row = self.about | (json.loads(self.clients.read_text()) if self.clients.exists() else {"ends": {}})
        for name in ("host_mib", "device_mib"):
            values = [seen[name] for seen in self.memory if name in seen]
            if quarter := len(values) // 4:
                growth = statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])
                row[f"{name}_growth"] = growth
        return row | {"memory": self.memory}

    def last_row(self) -> dict[str, Any]:
        """The row, with the heads, counters and failures of the server in the end."""
        row = self.row()
        if self.server.process is None or self.server.process.poll() is not None:
            return row | {"ended": self.server.last_error()}
        if self.backend == OURS:
            row["heads"] = self.server.get("/server_info")["internal_states"][0]["flashsample"]["heads"]
            row |= {"rows": counters_of(self.server), "failures": failures_of(self.server)}
        return row


def run_together(
    names: list[str], gpus: list[int | None], options: Any, folder: Path
) -> Iterator[list[dict[str, Any]]]:
    """All servers of these models at once; their rows, as they come."""
    pairs = list(itertools.product(names, (STOCK, OURS)))
    sides = [Side(name, backend, gpu, folder, options) for (name, backend), gpu in zip(pairs, gpus, strict=False)]
    try:
        for side in sides:
            side.server.start()
        for side in sides:
            side.warm_up()
        print(f"{', '.join(names)}: ready", flush=True)
        context, started = multiprocessing.get_context("spawn"), time.monotonic()
        with concurrent.futures.ProcessPoolExecutor(len(sides), context) as pool:
            about = options.concurrency, options.minutes * 60, options.every
            asked = [pool.submit(ask, side.server.port, side.vocab, side.clients, *about) for side in sides]
            while concurrent.futures.wait(asked, options.every).not_done:
                for side in sides:
                    side.look(time.monotonic() - started)
                yield [side.row() for side in sides]
        for future in asked:
            future.result()
        yield [side.last_row() for side in sides]
    finally:
        stop_all(side.server for side in sides)


def wrong(row: dict[str, Any]) -> list[str]:
    """Findings of a row that a healthy server does not have."""
    found = [f"{count} requests: {end}" for end, count in row["ends"].items() if end not in ("answered", "left")]
    if "ended" in row:
        found.append(f"the server ended: {row['ended']}")
    reasons = {name for name in row.get("rows", ()) if name.startswith("native")}
    found += [f"SGLang's sampler served rows: {name}" for name in sorted(reasons)]
    return found + row.get("failures", [])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=markov.SIZES, default=["smollm2-135m", "qwen3-8b"])
    parser.add_argument("--concurrency", type=int, default=1000, help="requests at a time, of each server")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks at the memory")
    parser.add_argument("--logs", type=Path, help="a folder for the servers' logs, to be kept")


def check(options: Any) -> None:
    if not 0 < options.minutes < float("inf"):
        raise ValueError(f"--minutes is {options.minutes:g}; expected above 0")
    if torch.cuda.device_count() == 1:
        raise ValueError("there is one GPU; expected two or more, or none")


def measure(options: Any, result: Result) -> int:
    gpus: list[int | None] = list(range(torch.cuda.device_count()))
    result.run["sglang"] = sglang_version()
    with tempfile.TemporaryDirectory() as name:
        for model in options.models:
            (Path(name) / model).mkdir()
            (Path(name) / model / "config.json").write_text(json.dumps(markov.config(markov.SIZES[model])))
            markov.write_tokenizer(Path(name) / model, markov.SIZES[model].vocab_size)
        at_once = max(1, len(gpus) // 2)
        for first in range(0, len(options.models), at_once):
            names = options.models[first : first + at_once]
            try:
                for rows in run_together(names, gpus or [None, None], options, Path(name)):
                    result.add(rows)
            except ServerError as error:
                result.miss(error, server=", ".join(names))
    for row in result.rows:
        shown = {key: value for key, value in row.items() if key not in ("memory", "heads", "ends")}
        print(f"{json.dumps(shown)} {wrong(row)}", flush=True)
    return result.close() or int(any(map(wrong, result.rows)))


BENCHMARKS = {
    "load": Benchmark(__doc__, measure, add_options, check, place=("model", "backend", "concurrency"), needs_gpu=False)
}
