"""``sgl-flashsample bench``: what this backend gains for a model on this machine, against stock SGLang.

Two real servers with the same arguments, but for the sampling backend, answer the same kind of requests. A cell is one
way of sampling at one batch size. Its time per output token is the time between a short and a long answer to the same
batch, divided by the tokens between them: no prefill, no HTTP. An answer has been given when its last byte has arrived;
it is read as JSON later. The latencies between tokens are those of one request of the batch, which streams its answer
while the others wait for theirs.

Where the memory allows, both servers run side by side, and pairs are measured: stock, ours, then ours, stock, and so
on, so that drift falls on both. Else they start in turns, stock, ours, ours, stock, and a pair is the medians of two
starts. Cells that are not decided (``comparison.py``) take turns, until all are or the time is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import __version__
from ..autotune.timing import Timing, describe_machine, memory_share
from ..files import write_whole
from ..sglang.versions import sglang_version
from .comparison import EQUAL, FASTER, LEAST_PAIRS, MARGIN, OPEN, SLOWER, Comparison
from .progress import Progress
from .samplings import SAMPLINGS, Sampling, server_arguments
from .server import RequestError, Server, ServerError

STOCK, OURS = "stock", "flashsample"
SIDE_BY_SIDE, IN_TURNS = "side by side", "in turns"
COUNTERS_EVERY = {"FLASHSAMPLE_LOG_SECONDS": "0.2"}  # environment: how often the counters are brought up to date
HALF = 0.47  # of a GPU's memory: what the first server may take if the second is to run beside it
SPARE_TOKENS = 4096  # of the KV cache, beyond what a batch of prompts and answers takes
LOAD_REQUESTS, LOAD_RUNS = 200, 2  # of SGLang's bench_serving: requests of a run, runs against each server
PERCENTILES = (50, 99)
ATTEMPTS = 3
NOT_REACHED = "not reached"
TURN_PAIRS = 2  # of a cell, until the next cell's turn: each server comes first once


class Load(NamedTuple):
    """The requests of a cell. ids: the prompts' ids are sampled from these. short, long: lengths of the two answers in
    tokens. seconds: a sample has as many long answers as take that long."""

    ids: range
    prompt_tokens: int = 32
    short: int = 8
    long: int = 200
    seconds: float = 0.5

    def prompts(self, batch: int) -> list[list[int]]:
        return [random.choices(self.ids, k=self.prompt_tokens) for _ in range(batch)]

    def kv_tokens(self, batch: int) -> int:
        """Enough KV cache for a batch."""
        return batch * (self.prompt_tokens + self.long + 64) + SPARE_TOKENS


# --- one server -----------------------------------------------------------------------------------------------------


def generate(server: Server, load: Load, batch: int, request: Sampling, tokens: int) -> float:
    """Seconds for ``batch`` fresh random prompts to be answered with ``tokens`` tokens each. Raises ServerError for
    answers of another length."""
    sampling_params = {**request.params, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": load.prompts(batch), "sampling_params": sampling_params, **request.fields}
    data = json.dumps(body).encode()
    started = perf_counter()
    answers = server.ask("/generate", data)
    seconds = perf_counter() - started
    # Read after the clock has stopped: answers with likeliest ids are long.
    lengths = {len(answer["output_ids"]) for answer in json.loads(answers)}
    if lengths != {tokens}:
        raise ServerError(f"answers have {sorted(lengths)} tokens; expected {tokens}")
    return seconds


def tpot_us(server: Server, load: Load, batch: int, request: Sampling) -> float:
    """Microseconds per output token: the median of as many long answers, less a short one each, as take
    ``load.seconds`` where none is held up. Raises ServerError where short answers keep taking longer than long ones."""
    each: list[float] = []
    while not each or len(each) * statistics.median_low(each) < load.seconds:
        each.append(_decoding_seconds(server, load, batch, request))
    return statistics.median(each) / (load.long - load.short) * 1e6


def _decoding_seconds(server: Server, load: Load, batch: int, request: Sampling) -> float:
    """The time of the tokens that a long answer has more than a short one, in seconds."""
    for _ in range(ATTEMPTS):
        short = generate(server, load, batch, request, load.short)
        seconds = generate(server, load, batch, request, load.long) - short
        if seconds > 0:
            return seconds
    raise ServerError(
        f"an answer of {load.long} tokens takes no longer than one of {load.short}, {ATTEMPTS} times in a row: "
        "the machine is busy, or --output-tokens is too small"
    )


def gaps_us(server: Server, load: Load, batch: int, request: Sampling) -> list[float]:
    """Microseconds between the tokens of one request of a batch, as they arrive."""
    times = []
    sampling_params = {**request.params, "max_new_tokens": load.long, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(generate, server, load, batch - 1, request, load.long) if batch > 1 else None
        for _ in server.stream(input_ids=load.prompts(1)[0], sampling_params=sampling_params, **request.fields):
            times.append(perf_counter())
        if others is not None:
            others.result()
    # Until all requests of the batch have been prefilled, a gap is not one of decoding.
    times = times[load.short :]
    return [(after - before) * 1e6 for before, after in itertools.pairwise(times)]


class Counters(NamedTuple):
    """Since the server's start. rows: {path: rows}."""

    rows: dict[str, float]
    host_seconds: float
    host_steps: float

    @classmethod
    def of(cls, server: Server, load: Load) -> Counters:
        """The counters of a server that has its metrics on, and COUNTERS_EVERY in its environment."""
        time.sleep(server.metrics_seconds)
        generate(server, load, 1, SAMPLINGS["greedy"], 2)
        text = server.metrics()
        rows: dict[str, float] = {}
        for path, value in re.findall(r'^sglang:flashsample_rows_total\{[^}]*path="([^"]*)"[^}]*\} (\S+)$', text, re.M):
            rows[path] = rows.get(path, 0.0) + float(value)
        host = [
            sum(
                map(float, re.findall(rf"^sglang:flashsample_host_seconds_{which}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))
            )
            for which in ("sum", "count")
        ]
        return cls(rows, *host)

    def shares_since(self, before: Counters) -> dict[str, float]:
        """Share of the rows that each path has served."""
        served = {path: rows - before.rows.get(path, 0.0) for path, rows in self.rows.items()}
        total = max(1.0, sum(served.values()))
        return {path: round(count / total, 3) for path, count in served.items() if count}

    def host_us_since(self, before: Counters) -> float:
        """Microseconds of the sampler's host time per step."""
        steps = max(1.0, self.host_steps - before.host_steps)
        return round((self.host_seconds - before.host_seconds) / steps * 1e6, 1)


def check_active(server: Server) -> None:
    """Raises ServerError where SGLang's sampler serves everything: there is nothing to compare."""
    states = server.get("/server_info").get("internal_states") or [{}]
    status = states[0].get("flashsample") or {}
    if not status.get("active"):
        raise ServerError(
            f"flashsample is not active in its server: {status.get('reason') or 'the plugin was not found'}"
        )


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cell:
    """samples, gaps: microseconds by server's name, the baseline's first; per output token, and between the tokens of
    one request. A list of samples per start of the server. in_turns: a pair is the medians of two starts, not two
    samples. paths, host_us: of the last server, ours. seconds: that its pairs have taken."""

    sampling: str
    batch: int
    samples: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    gaps: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    paths: dict[str, float] = dataclasses.field(default_factory=dict)
    host_us: float = 0.0
    in_turns: bool = False
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return f"{SAMPLINGS[self.sampling].title}; batch of {self.batch}"

    @property
    def place(self) -> dict[str, Any]:
        return {"sampling": self.sampling, "batch": self.batch}

    def timing(self, label: str) -> Timing:
        return Timing.of([sample for start in self.samples[label] for sample in start])

    @property
    def comparison(self) -> Comparison:
        """Of the last server's time per token with the first one's."""
        each = list(self.samples.values()) if len(self.samples) == 2 else [[], []]
        if self.in_turns:
            stock, ours = ([statistics.median(start) for start in starts] for starts in each)
        else:
            stock, ours = ([sample for start in starts for sample in start] for starts in each)
        return Comparison.of(stock, ours, more_is_faster=False)

    @property
    def pair_seconds(self) -> float:
        return self.seconds / max(1, self.comparison.pairs)

    @property
    def verdict(self) -> str:
        return self.comparison.words(self.pair_seconds)

    def percentiles(self, label: str) -> list[float]:
        """PERCENTILES of the times between tokens, in µs; empty where none were taken."""
        gaps = self.gaps.get(label)
        return np.percentile(gaps, PERCENTILES).tolist() if gaps else []

    def rows(self) -> list[dict[str, Any]]:
        """For a result file, one per server."""
        rows: list[dict[str, Any]] = []
        for label in self.samples:
            timing, samples = self.timing(label), [round(us, 1) for start in self.samples[label] for us in start]
            row = {**self.place, "backend": label, "tpot_us": round(timing.us, 1)}
            latencies = zip(PERCENTILES, self.percentiles(label), strict=False)
            row |= {f"itl_p{percent}_us": round(us, 1) for percent, us in latencies}
            rows.append(row | {"spread_us": round(timing.spread, 1), "samples": samples})
        if self.paths:
            rows[-1] |= {"paths": self.paths, "host_us": self.host_us}
        return rows

    @property
    def shown(self) -> dict[str, str]:
        """What is measured beside the answer, in words."""
        timings = [self.timing(label) for label in self.samples]
        latencies = [[f"{us / 1000:.2f}" for us in self.percentiles(label)] for label in self.samples]
        between = [f"p{percent} {one} -> {two}" for percent, one, two in zip(PERCENTILES, *latencies, strict=False)]
        return {
            "µs per token": " -> ".join(f"{timing.us:.0f}" for timing in timings),
            "tokens/s": " -> ".join(f"{self.batch * 1e6 / timing.us:.0f}" for timing in timings),
            "ms between tokens": ", ".join(between),
            "served by": ", ".join(f"{path} {share:.0%}" for path, share in self.paths.items()),
        }


def measure(
    servers: Mapping[str, Server],
    load: Load,
    sampling: str,
    batch: int,
    pairs: int,
    *,
    cell: Cell | None = None,
    latencies: bool = True,
    step: Callable[[Cell], Any] = lambda cell: None,
    over: Callable[[], bool] = lambda: False,
) -> Cell:
    """A cell of one server, or of two that run at once, the baseline first. pairs: samples of each. cell: the one to
    add them to. latencies: also those between tokens, with the first pairs. step: called after each pair. over: no pair
    is begun where it is true."""
    cell, request, labels = cell or Cell(sampling, batch), SAMPLINGS[sampling], list(servers)
    for server in servers.values():
        generate(server, load, batch, request, load.short)  # compiles, and fills caches
    first = not cell.samples
    for label in labels if first else ():
        cell.samples[label] = [[]]
    before = Counters.of(servers[labels[-1]], load) if first else None
    began, done = monotonic(), len(cell.samples[labels[0]][0])
    for pair in range(done, done + pairs):
        if over():
            break
        for label in labels if pair % 2 == 0 else reversed(labels):
            cell.samples[label][0].append(tpot_us(servers[label], load, batch, request))
        cell.seconds += monotonic() - began
        began = monotonic()
        step(cell)
    if before is not None:
        after = Counters.of(servers[labels[-1]], load)
        cell.paths, cell.host_us = after.shares_since(before), after.host_us_since(before)
        if latencies:
            cell.gaps = {label: gaps_us(server, load, batch, request) for label, server in servers.items()}
    return cell


# --- the comparison -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """model: a folder or a hub's name. arguments: of both servers. batches: requests at once, or clients. minutes: of
    the whole measurement, with the starts of the servers. backend: stock's sampling backend, None for what SGLang takes
    by itself. in_turns: do not try side by side. rate: requests per second of SGLang's bench_serving, None without."""

    model: str
    arguments: tuple[str, ...]
    samplings: tuple[str, ...]
    batches: tuple[int, ...]
    load: Load
    logs: Path
    minutes: float = 10.0
    backend: str | None = None
    in_turns: bool = False
    rate: float | None = None

    @property
    def places(self) -> list[tuple[str, int]]:
        return list(itertools.product(self.samplings, self.batches))


class Bench:
    """Runs the comparison, and shows at any time what it does and how much time is left. When a cell is decided, its
    lines are printed and ``json_file`` and ``html_file`` written; the others' at the end.

    cells: what has pairs. loads: of bench_serving. mode: how the servers run. unwritten: files that could not be
    written with all that is measured, and why.
    """

    compared, size_option = "time per token", "--batches"  # what a pair compares; the option that has the sizes

    def __init__(self, options: Options, json_file: Path | None = None, html_file: Path | None = None) -> None:
        self.options, self._json_file, self._html_file = options, json_file, html_file
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.mode = SIDE_BY_SIDE
        self.loads: list[dict[str, Any]] = []
        self.unwritten: dict[Path, str] = {}
        self.refused: dict[tuple[str, int], str] = {}  # cells whose requests a server does not take, and why
        self._cells: dict[tuple[str, int], Any] = {}
        self._told: set[tuple[str, int]] = set()  # cells whose lines are printed
        self._progress = Progress(60 * options.minutes, len(options.places))

    def _say(self, line: str) -> None:
        """Print a line. Where nobody reads it any more, the measurement ends, unless a file is to have it."""
        try:
            self._progress.say(line)
        except BrokenPipeError:
            if self._json_file is None and self._html_file is None:
                raise

    @property
    def minutes_taken(self) -> float:
        """So far, with the starts of the servers."""
        return self._progress.elapsed / 60

    @property
    def cells(self) -> list[Any]:
        return [cell for place, cell in self._cells.items() if place not in self.refused and cell.comparison.pairs]

    def server(self, label: str) -> Server:
        """Not started."""
        options = self.options
        arguments = [*options.arguments, "--enable-metrics", *server_arguments(self._kinds)]
        if not any(argument.split("=")[0] == "--max-total-tokens" for argument in arguments):
            arguments += ["--max-total-tokens", str(options.load.kv_tokens(max(options.batches)))]
        return Server.on_this_machine(
            options.model,
            arguments,
            backend=OURS if label == OURS else options.backend,
            log=options.logs / f"{label}.log",
            environment=COUNTERS_EVERY | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")},
            progress=self._say,
        )

    @contextlib.contextmanager
    def started(self, label: str) -> Iterator[Server]:
        self._say(f"starting {label}")
        self._progress.begin(f"starting {label}")
        began = monotonic()
        with self.server(label) as server:
            for kind in self._kinds:
                self._progress.begin(f"{label}'s first requests of {kind}")
                try:  # compiles what the first such request compiles
                    generate(server, self.options.load, 2, SAMPLINGS[kind], 4)
                except RequestError as error:
                    self._leave_out([place for place in self._places if kind in self._kinds_of(place[0])], error)
            self._say(f"{label} is ready after {monotonic() - began:.0f} s")
            if label == OURS:
                check_active(server)
            yield server

    def run(self) -> None:
        """Raises ServerError for a server that does not start or answer, and where the time is over before anything
        was measured."""
        if self.device.type == "cpu":
            self._say("no CUDA GPU found: SGLang runs on the CPU, and the times say nothing about a GPU")
        number = len(self.options.places)
        self._say(
            f"{self.options.model}: stock SGLang -> flashsample, {number} cell{'s' * (number > 1)}; about "
            f"{self.options.minutes:g} minutes, starts of the servers included"
        )
        try:
            with self._progress.shown():
                self._compare()
        finally:
            if self.cells:
                self._finish()
        if not self.cells:
            raise ServerError(f"nothing was measured in {self.options.minutes:g} minutes: --minutes gives it more")

    def _compare(self) -> None:
        if self.options.in_turns:
            return self._in_turns()
        with self.started(STOCK) as stock:
            share = memory_share(self.device)
            if share <= HALF:
                try:
                    with self.started(OURS) as ours:
                        return self._side_by_side({STOCK: stock, OURS: ours})
                except ServerError as error:
                    if self.cells or "memory" not in str(error).lower():
                        raise
                    self._say(f"the second server does not fit beside the first: {error}")
            else:
                self._say(f"one server takes {share:.0%} of the GPU's memory: two do not fit at once")
        self._in_turns()

    def _side_by_side(self, servers: dict[str, Server]) -> None:
        while (places := self._undecided) and self._progress.left > 0:
            for place in places:
                if self._progress.left > 0:
                    self._measure(servers, place, self._cells.setdefault(place, Cell(*place)))
                    self._show_decided()
        for label in (STOCK, OURS, OURS, STOCK) if self.options.rate is not None else ():
            self._serve_load(label, servers[label])

    def _in_turns(self) -> None:
        self.mode, began = IN_TURNS, monotonic()
        self._cells.clear()  # of servers that did not fit side by side
        self._say("the servers are started one after another: stock, flashsample, flashsample, stock, and so on")
        for turn in itertools.count():
            if not (places := self._undecided) or (turn and self._progress.left < (monotonic() - began) / turn):
                return
            for label in (STOCK, OURS) if turn % 2 == 0 else (OURS, STOCK):
                with self.started(label) as server:
                    for place in places:
                        if place not in self.refused and self._progress.left > 0:
                            self._add_start(label, server, place)
                    if self.options.rate is not None and turn < LOAD_RUNS:
                        self._serve_load(label, server)
            for cell in self.cells:
                cell.seconds = monotonic() - began  # of all cells: a start is one for each
            self._show_decided()

    def _add_start(self, label: str, server: Server, place: tuple[str, int]) -> None:
        whole = self._cells.setdefault(place, Cell(*place, samples={STOCK: [], OURS: []}, in_turns=True))
        part = Cell(*place)
        self._measure({label: server}, place, part)
        if not part.samples.get(label, [[]])[0]:
            return
        whole.samples[label] += part.samples[label]
        whole.gaps.setdefault(label, []).extend(part.gaps.get(label, []))
        if label == OURS:
            whole.paths, whole.host_us = part.paths, part.host_us

    def _measure(self, servers: Mapping[str, Server], place: tuple[str, int], cell: Cell) -> None:
        """Pairs of a cell, which is left out where a server refuses its requests."""

        def step(cell: Cell) -> None:
            self._progress.know(self._known(place))

        self._progress.begin(f"{place[0]}, batch {place[1]}", self._known(place))
        try:
            measure(
                servers,
                self.options.load,
                *place,
                TURN_PAIRS,
                cell=cell,
                step=step,
                over=lambda: self._progress.left <= 0,
            )
        except RequestError as error:
            self._leave_out([place], error)

    def _known(self, place: tuple[str, int]) -> str:
        comparison = self._cells[place].comparison
        return comparison.percent if comparison.pairs else "no pair yet"

    def _leave_out(self, places: list[tuple[str, int]], error: RequestError) -> None:
        """Measure the other cells. Raises ServerError where none is left."""
        for sampling, batch in places:
            self.refused[sampling, batch] = str(error)
            self._say(f"{sampling}, batch {batch}: left out, as a server refuses it: {error}")
        if not self._places:
            raise ServerError(f"the servers refuse all requests; the last one: {error}")

    @property
    def _kinds(self) -> list[str]:
        """The kinds of all requests."""
        return list(dict.fromkeys(kind for sampling, _ in self._places for kind in self._kinds_of(sampling)))

    def _kinds_of(self, sampling: str) -> list[str]:
        """The names in ``SAMPLINGS`` of the requests of a cell."""
        return [sampling]

    @property
    def _places(self) -> list[tuple[str, int]]:
        """The cells that no server has refused."""
        return [place for place in self.options.places if place not in self.refused]

    @property
    def _undecided(self) -> list[tuple[str, int]]:
        cells = self._cells
        return [place for place in self._places if place not in cells or not cells[place].comparison.decided]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """The cells without a pair."""
        done = [place for place, cell in self._cells.items() if cell.comparison.pairs]
        size = "clients" if self.size_option == "--traffic" else "batch"
        return [
            {"sampling": place[0], size: place[1], "reason": self.refused.get(place, NOT_REACHED)}
            for place in self.options.places
            if place in self.refused or place not in done
        ]

    def _show_decided(self) -> None:
        decided = {place for place, cell in self._cells.items() if cell.comparison.decided}
        self._progress.decided(len(decided - self.refused.keys()), len(self._places))
        if new := [place for place in self._cells if place in decided - self._told]:
            self._write()  # first: whoever reads what is said may have gone
            for place in new:
                self._tell(place)

    def _tell(self, place: tuple[str, int]) -> None:
        self._told.add(place)
        for line in cell_lines(self._cells[place]):
            self._say(line)

    def _finish(self) -> None:
        """Write all, and tell of the cells that are not decided."""
        self._write()
        for place, cell in self._cells.items():
            if place not in self._told | self.refused.keys() and cell.comparison.pairs:
                self._tell(place)
        for line in (*load_lines(self), closing(self, self.minutes_taken)):
            self._say(line)

    def _write(self) -> None:
        """Files that cannot be written now may be after the next cell: the measurement goes on."""
        self.unwritten = {}
        texts = {
            self._json_file: lambda: json.dumps(result(self), indent=1) + "\n",
            self._html_file: lambda: page(self),
        }
        for file, text in texts.items():
            if file is not None:
                try:
                    write_whole(file, text())
                except (OSError, ValueError) as error:
                    self.unwritten[file] = getattr(error, "strerror", None) or str(error)

    def _serve_load(self, label: str, server: Server) -> None:
        """SGLang's own bench_serving: its result, with the server's name. What fails is said, and nothing else ends."""
        rate, load = self.options.rate, self.options.load
        self._progress.begin(f"bench_serving against {label}")
        self._say(f"bench_serving against {label}: {LOAD_REQUESTS} requests, {rate:g} per second")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "load.jsonl"
            command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1"]
            command += ["--port", str(server.port), "--dataset-name", "random-ids", "--tokenizer", self.options.model]
            command += ["--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.long)]
            command += ["--num-prompts", str(LOAD_REQUESTS), "--request-rate", str(rate), "--disable-tqdm"]
            command += ["--output-file", str(out)]
            done = subprocess.run(command, env=server.environment, capture_output=True, text=True)
            if done.returncode or not out.exists():
                last = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
                return self._say(f"sglang.bench_serving failed: {last[:300]}")
            result = json.loads(out.read_text().splitlines()[-1])
        names = ("completed", "output_throughput", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_itl_ms")
        self.loads.append({"backend": label} | {name: result.get(name) for name in names})


# --- results --------------------------------------------------------------------------------------------------------


def environment(bench: Bench) -> dict[str, Any]:
    """What the results depend on."""
    about = {
        "model": model_name(bench.options),
        "command": command(bench),
        "arguments": bench.options.arguments,
        "mode": bench.mode,
        "minutes": bench.options.minutes,
        "minutes_taken": round(bench.minutes_taken, 1),
    }
    versions = {"sglang": sglang_version(), "sgl_flashsample": __version__}
    return describe_machine(bench.device) | versions | {"date": time.strftime("%Y-%m-%d")} | about


def result(bench: Bench) -> dict[str, Any]:
    """What is measured, for a JSON file."""
    cells = bench.cells
    return {
        "env": environment(bench) | {"not_run": bench.missing},
        "rows": [row for cell in cells for row in cell.rows()],
        "comparisons": [cell.place | {"verdict": cell.verdict} | cell.comparison.fields() for cell in cells],
        "load": bench.loads,
    }


def model_name(options: Options) -> str:
    """The name of the model; for a folder its last part, so that a result names no folder of this machine."""
    folder = Path(options.model)
    return folder.resolve().name if folder.is_dir() else options.model


def command(bench: Bench) -> str:
    """The command that measures the same cells again."""
    options, load = bench.options, bench.options.load
    words = ["--model-path", model_name(options), "--samplings", ",".join(options.samplings)]
    words += [bench.size_option, ",".join(map(str, options.batches)), "--minutes", f"{options.minutes:g}"]
    if bench.size_option == "--batches":
        words += ["--input-tokens", str(load.prompt_tokens), "--output-tokens", str(load.long)]
    words += ["--in-turns"] * options.in_turns
    words += ["--sampling-backend", options.backend] if options.backend is not None else []
    return shlex.join(["sgl-flashsample", "bench", *words, *options.arguments])


def cell_lines(cell: Any) -> Iterator[str]:
    """A cell as text of at most 100 columns."""
    first, *others = (f"{name} {value}" for name, value in cell.shown.items() if value)
    yield f"{cell.title}: {cell.verdict}"
    yield f"    {first}; {cell.comparison.pairs} pairs: {cell.comparison.percent}"
    if others:
        yield f"    {'; '.join(others)}"


def closing(bench: Bench, minutes: float) -> str:
    """How many cells are decided, and what would decide the others. minutes: that were spent."""
    cells = bench.cells
    more = [cell.comparison.more_pairs * cell.pair_seconds / 60 for cell in cells if not cell.comparison.decided]
    decided, total = len(cells) - len(more), len(cells) + len(bench.missing)
    line = f"{decided} of {total} cells decided in {minutes:.0f} minutes"
    unreached = sum(one["reason"] == NOT_REACHED for one in bench.missing)
    usual = statistics.median(cell.pair_seconds for cell in cells) / 60
    more += [LEAST_PAIRS * usual] * unreached
    if more:
        needed = minutes + (sum(more) if bench.mode == SIDE_BY_SIDE else max(more))
        line += f"; about --minutes {math.ceil(needed)} decides the others"
    return line


def load_lines(bench: Bench) -> Iterator[str]:
    """The figures of bench_serving, one line per server."""
    for load in bench.loads:
        values = ", ".join(f"{name} {value:.4g}" for name, value in load.items() if isinstance(value, int | float))
        yield f"bench_serving, {load['backend']}: {values}"


def page(bench: Bench) -> str:
    """What is measured, as one self-contained HTML page. Needs plotly."""
    from ..autotune.pages import document, environment_section, figure_html, grid, text

    env, cells = environment(bench), bench.cells
    title = f"{env['model']}: stock SGLang and flashsample"
    versions = ", ".join(f"{name} {env[name]}" for name in ("sglang", "torch", "triton") if env.get(name))
    rows = [{"cell": cell.title, "answer": cell.verdict, "pairs": cell.comparison.pairs} | cell.shown for cell in cells]
    parts = (
        f"<h1>{text(title)}</h1>",
        f"<p>{text(env['device'])}, {text(env['date'])}, {text(versions)}, sgl-flashsample {text(__version__)}. "
        f"Servers {text(bench.mode)}.</p><p><code>{text(env['command'])}</code></p>",
        figure_html(changes(bench)),
        f"<div class=scroll>{grid(rows, tuple(rows[0]))}</div>",
        *(f"<p>{text(line)}</p>" for line in load_lines(bench)),
        environment_section(env | {"not run": bench.missing}),
    )
    return document(title, parts)


def changes(bench: Bench) -> Any:
    """The figure of the cells' changes and their intervals."""
    import plotly.graph_objects as go

    from ..autotune.pages import sized

    colours = {FASTER: "#1b7837", SLOWER: "#b2182b", EQUAL: "#2166ac", OPEN: "#888888"}
    figure, titles = go.Figure(), [cell.title for cell in bench.cells]
    for answer, colour in colours.items():
        found = [(cell.title, cell.comparison) for cell in bench.cells if cell.comparison.answer == answer]
        figure.add_scatter(
            x=[100 * one.middle for _, one in found],
            y=[title for title, _ in found],
            error_x={"type": "data", "array": [100 * one.half if one.bounded else None for _, one in found]},
            mode="markers",
            marker={"color": colour, "size": 9},
            name=answer,
        )
    figure.add_vrect(-100 * MARGIN, 100 * MARGIN, fillcolor="#888888", opacity=0.15, line_width=0)
    figure.update_yaxes(categoryorder="array", categoryarray=titles[::-1])
    figure.update_xaxes(title=f"change of the {bench.compared}, %")
    figure.update_layout(title="ours over stock, with 99 % intervals; grey: equal", showlegend=True)
    return sized(figure, height=160 + 34 * len(titles)).update_layout(margin={"l": 280})
