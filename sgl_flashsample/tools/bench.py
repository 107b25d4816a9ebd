"""``sgl-flashsample bench``: what this backend gains for a model on this machine, against stock SGLang.

Two real servers with the same arguments, but for the sampling backend, answer the same kind of requests. A cell is one
way of sampling at one batch size. Its time per output token is the time between a short and a long answer to the same
batch, divided by the tokens between them: no prefill, no HTTP. An answer has been given when its last byte has arrived;
it is read as JSON later. The latencies between tokens are those of one request of the batch, which streams its answer
while the others wait for theirs.

Where the memory allows, both servers run side by side and each cell is measured in pairs: stock, ours, then ours,
stock, and so on, so that drift falls on both. Else they start in turns, stock, ours, ours, stock, and what is compared
are the medians of the starts. A difference is named only if the confidence interval of the ratio excludes 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..autotune.race import Ratio
from ..autotune.timing import Timing, describe_machine, memory_share
from ..files import write_whole
from .progress import Progress
from .samplings import SAMPLINGS, Sampling, server_arguments
from .server import RequestError, Server, ServerError

STOCK, OURS = "stock", "flashsample"
SIDE_BY_SIDE, IN_TURNS = "side by side", "in turns"
ALPHA = 0.01  # chance that equal servers are called different, per cell
COUNTERS_EVERY = {"FLASHSAMPLE_LOG_SECONDS": "0.2"}  # environment: how often the counters are brought up to date
HALF = 0.47  # of a GPU's memory: what the first server may take if the second is to run beside it
SPARE_TOKENS = 4096  # of the KV cache, beyond what a batch of prompts and answers takes
LOAD_REQUESTS = 200  # of SGLang's bench_serving
PERCENTILES = (50, 99)
ATTEMPTS = 3


class Load(NamedTuple):
    """The requests of a cell. ids: the prompts' ids are sampled from these. short, long: lengths of the two answers in
    tokens. seconds: a sample has as many long answers as take that long."""

    ids: range
    prompt_tokens: int = 32
    short: int = 8
    long: int = 200
    seconds: float = 1.0

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
    while not each or len(each) * min(each) < load.seconds:
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
    others: threading.Thread | None = None
    if batch > 1:
        others = threading.Thread(target=generate, args=(server, load, batch - 1, request, load.long))
        others.start()
    times = []
    sampling_params = {**request.params, "max_new_tokens": load.long, "ignore_eos": True}
    for _ in server.stream(input_ids=load.prompts(1)[0], sampling_params=sampling_params, **request.fields):
        times.append(perf_counter())
    if others is not None:
        others.join()
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
    """samples, gaps: microseconds by server's name; per output token, and between the tokens of one request. A list of
    samples per start of the server. paths, host_us: of the last server, ours."""

    sampling: str
    batch: int
    samples: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    gaps: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    paths: dict[str, float] = dataclasses.field(default_factory=dict)
    host_us: float = 0.0

    def timing(self, label: str) -> Timing:
        return Timing.of([sample for start in self.samples[label] for sample in start])

    @property
    def ratio(self) -> Ratio:
        """The last server's time divided by the first one's, minus 1. Raises ValueError for fewer than two pairs of
        samples, or for servers that were started in turns fewer than twice."""
        stock, ours = self.samples.values()
        if len(stock) == 1:
            return Ratio.paired(ours[0], stock[0], ALPHA)
        return Ratio.unpaired(list(map(statistics.median, ours)), list(map(statistics.median, stock)), ALPHA)

    @property
    def verdict(self) -> str:
        """The change of the time per token and its confidence interval, in percent."""
        off, low, high = (100 * value for value in (self.ratio.off, self.ratio.low, self.ratio.high))
        if high < 0:
            return f"{-off:.1f} % faster (99 % interval {-high:.1f} to {-low:.1f} %)"
        if low > 0:
            return f"{off:.1f} % slower (99 % interval {low:.1f} to {high:.1f} %)"
        return f"no difference (99 % interval {low:+.1f} to {high:+.1f} %)"

    def percentiles(self, label: str) -> list[float]:
        """PERCENTILES of the times between tokens, in µs; empty where none were taken."""
        gaps = sorted(self.gaps.get(label, []))
        return [gaps[min(len(gaps) - 1, len(gaps) * percent // 100)] for percent in PERCENTILES] if gaps else []

    def rows(self) -> list[dict[str, Any]]:
        """For a result file, one per server."""
        rows: list[dict[str, Any]] = []
        for label in self.samples:
            timing, samples = self.timing(label), [round(us, 1) for start in self.samples[label] for us in start]
            row = {"sampling": self.sampling, "batch": self.batch, "backend": label, "tpot_us": round(timing.us, 1)}
            latencies = zip(PERCENTILES, self.percentiles(label), strict=False)
            row |= {f"itl_p{percent}_us": round(us, 1) for percent, us in latencies}
            rows.append(row | {"spread_us": round(timing.spread, 1), "samples": samples})
        if self.paths:
            rows[-1] |= {"paths": self.paths, "host_us": self.host_us}
        return rows


def measure(
    servers: Mapping[str, Server],
    load: Load,
    sampling: str,
    batch: int,
    pairs: int,
    *,
    latencies: bool = True,
    step: Callable[[], Any] = lambda: None,
) -> Cell:
    """A cell of one server, or of two that run at once, the baseline first. pairs: samples of each. latencies: also
    those between tokens. step: called after each sample."""
    cell, request, labels = Cell(sampling, batch), SAMPLINGS[sampling], list(servers)
    order = [label for pair in range(pairs) for label in (labels if pair % 2 == 0 else reversed(labels))]
    for label, server in servers.items():
        generate(server, load, batch, request, load.short)  # compiles, and fills caches
        cell.samples[label] = [[]]
    before = Counters.of(servers[labels[-1]], load)
    for label in order:
        cell.samples[label][0].append(tpot_us(servers[label], load, batch, request))
        step()
    after = Counters.of(servers[labels[-1]], load)
    cell.paths, cell.host_us = after.shares_since(before), after.host_us_since(before)
    if latencies:
        cell.gaps = {label: gaps_us(server, load, batch, request) for label, server in servers.items()}
    return cell


# --- the comparison -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """model: a folder or a hub's name. arguments: of both servers. backend: stock's sampling backend, None for what
    SGLang takes by itself. in_turns: do not try side by side. starts: of each server where they run in turns. rate:
    requests per second of SGLang's bench_serving, None without it. seconds: of a cell of moving traffic."""

    model: str
    arguments: tuple[str, ...]
    samplings: tuple[str, ...]
    batches: tuple[int, ...]
    pairs: int
    load: Load
    logs: Path
    backend: str | None = None
    in_turns: bool = False
    starts: int = 2
    rate: float | None = None
    seconds: float = 60.0


class Bench:
    """Runs the comparison, and shows at any time what it does and how long the rest takes. After each cell its lines
    are printed and ``json_file`` and ``html_file`` written.

    cells, loads: what is complete. mode: how the servers run. unwritten: files that could not be written with all that
    is complete, and why.
    """

    def __init__(self, options: Options, json_file: Path | None = None, html_file: Path | None = None) -> None:
        self.options, self._json_file, self._html_file = options, json_file, html_file
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.mode = SIDE_BY_SIDE
        self.cells: list[Cell] = []
        self.loads: list[dict[str, Any]] = []
        self.unwritten: dict[Path, str] = {}
        self.refused: dict[tuple[str, int], str] = {}  # cells whose requests a server does not take, and why
        self._progress = Progress(1.5 * options.load.seconds)
        self._say = self._progress.say

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
        began = time.monotonic()
        with self.server(label) as server:
            for sampling in self._kinds:
                self._progress.begin(f"{label}'s first requests of {sampling}")
                try:  # compiles what the first such request compiles
                    generate(server, self.options.load, 2, SAMPLINGS[sampling], 4)
                except RequestError as error:
                    self._leave_out([place for place in self._places if place[0] == sampling], error)
            self._progress.has_started(time.monotonic() - began)
            self._say(f"{label} is ready after {time.monotonic() - began:.0f} s")
            if label == OURS:
                check_active(server)
            yield server

    def run(self) -> None:
        """Raises ServerError for a server that does not start or answer."""
        if self.device.type == "cpu":
            self._say("no CUDA GPU found: SGLang runs on the CPU, and the times say nothing about a GPU")
        with self._progress.shown():
            self._compare()
        for line in load_lines(self):
            print(line)
        self._write()

    def _compare(self) -> None:
        if self.options.in_turns:
            return self._in_turns()
        self._progress.expect(2, 2 * len(self._places) * self.options.pairs)
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
        options = self.options
        self._progress.expect(0, 2 * len(self._places) * options.pairs)
        for place in self._places:
            if (cell := self._measured(servers, place)) is not None:
                self._complete(cell)
        for label in (STOCK, OURS, STOCK, OURS) if options.rate is not None else ():
            self._serve_load(label, servers[label])

    def _in_turns(self) -> None:
        options, self.mode = self.options, IN_TURNS
        order = ([STOCK, OURS, OURS, STOCK] * options.starts)[: 2 * options.starts]
        self._say(f"the servers are started one after another: {', '.join(order)}")
        self._progress.expect(len(order), len(order) * len(self._places) * options.pairs)
        cells = {place: Cell(*place) for place in self._places}
        for number, label in enumerate(order):
            with self.started(label) as server:
                for place in self._places:
                    whole = cells[place]
                    if (part := self._measured({label: server}, place)) is None:
                        continue
                    whole.samples.setdefault(label, []).extend(part.samples[label])
                    whole.gaps.setdefault(label, []).extend(part.gaps[label])
                    if label == OURS:
                        whole.paths, whole.host_us = part.paths, part.host_us
                    if number == len(order) - 1:
                        self._complete(whole)
                if options.rate is not None:
                    self._serve_load(label, server)

    def _measured(self, servers: Mapping[str, Server], place: tuple[str, int]) -> Cell | None:
        """A cell; None where a server refuses its requests."""
        self._progress.begin(f"{place[0]}, batch {place[1]}")
        try:
            return measure(servers, self.options.load, *place, self.options.pairs, step=self._progress.step)
        except RequestError as error:
            self._leave_out([place], error)
            return None

    def _leave_out(self, places: list[tuple[str, int]], error: RequestError) -> None:
        """Measure the other cells. Raises ServerError where none is left."""
        for sampling, batch in places:
            self.refused[sampling, batch] = str(error)
            self._say(f"{sampling}, batch {batch}: left out, as a server refuses it: {error}")
        if not self._places:
            raise ServerError(f"the servers refuse all requests; the last one: {error}")

    @property
    def _kinds(self) -> list[str]:
        """The samplings of the requests."""
        return list(dict.fromkeys(sampling for sampling, _ in self._places))

    @property
    def _places(self) -> list[tuple[str, int]]:
        """The cells that no server has refused."""
        places = itertools.product(self.options.samplings, self.options.batches)
        return [place for place in places if place not in self.refused]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """The cells that have no result yet."""
        done = {(cell.sampling, cell.batch) for cell in self.cells}
        return [
            {"sampling": sampling, "batch": batch, "reason": self.refused.get((sampling, batch), "not reached")}
            for sampling, batch in itertools.product(self.options.samplings, self.options.batches)
            if (sampling, batch) not in done
        ]

    def _complete(self, cell: Cell) -> None:
        self.cells.append(cell)
        if len(self.cells) == 1:
            self._say(heading(self))
        for line in cell_lines(cell):
            self._say(line)
        self._write()

    def _result(self) -> dict[str, Any]:
        return result(self)

    def _write(self) -> None:
        """Files that cannot be written now may be after the next cell: the measurement goes on."""
        self.unwritten = {}
        texts = {
            self._json_file: lambda: json.dumps(self._result(), indent=1) + "\n",
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


def result(bench: Bench) -> dict[str, Any]:
    """The complete cells, for a JSON file."""
    options, cells = bench.options, bench.cells
    comparisons = [
        {"sampling": cell.sampling, "batch": cell.batch, "verdict": cell.verdict} | cell.ratio.rounded for cell in cells
    ]
    about = {
        "model": model_name(options),
        "command": command(options),
        "arguments": options.arguments,
        "mode": bench.mode,
        "pairs": options.pairs,
        "not_run": bench.missing,
    }
    env = describe_machine(bench.device) | {"sgl_flashsample": __version__, "date": time.strftime("%Y-%m-%d")}
    rows = [row for cell in cells for row in cell.rows()]
    return {"env": env | about, "rows": rows, "comparisons": comparisons, "load": bench.loads}


def model_name(options: Options) -> str:
    """The name of the model; for a folder its last part, so that a result names no folder of this machine."""
    folder = Path(options.model)
    return folder.resolve().name if folder.is_dir() else options.model


def command(options: Options) -> str:
    """The command that measures the same cells again."""
    load = options.load
    words = ["--model-path", model_name(options), "--samplings", ",".join(options.samplings)]
    words += ["--batches", ",".join(map(str, options.batches)), "--pairs", str(options.pairs)]
    words += ["--input-tokens", str(load.prompt_tokens), "--output-tokens", str(load.long)]
    return shlex.join(["sgl-flashsample", "bench", *words, *options.arguments])


def heading(bench: Bench) -> str:
    options = bench.options
    tokens = options.load.long - options.load.short
    starts = "" if bench.mode == SIDE_BY_SIDE else f" in each of {options.starts} starts"
    samples = f"{options.pairs} samples of {tokens} tokens{starts}"
    return f"{options.model}: stock SGLang -> flashsample, {bench.mode}, {samples}"


def cell_lines(cell: Cell) -> Iterator[str]:
    """A cell as text of at most 100 columns."""
    stock, ours = (cell.timing(label) for label in cell.samples)
    rates = " -> ".join(f"{cell.batch * 1e6 / timing.us:.0f}" for timing in (stock, ours))
    latencies = [[f"{us / 1000:.2f}" for us in cell.percentiles(label)] for label in cell.samples]
    between = [f"p{percent} {one} -> {other}" for percent, one, other in zip(PERCENTILES, *latencies, strict=False)]
    paths = ", ".join(f"{path} {share:.0%}" for path, share in cell.paths.items())
    yield f"{SAMPLINGS[cell.sampling].title}; batch of {cell.batch}:"
    yield f"    {stock.us:.0f} -> {ours.us:.0f} us per step: {cell.verdict}"
    yield f"    {rates} tokens/s; inter-token latency, ms: {', '.join(between)}; flashsample's tokens: {paths}"


def load_lines(bench: Bench) -> Iterator[str]:
    """The figures of bench_serving, one line per server."""
    for load in bench.loads:
        values = ", ".join(f"{name} {value:.4g}" for name, value in load.items() if isinstance(value, int | float))
        yield f"bench_serving, {load['backend']}: {values}"


_STYLE = """
:root{color-scheme:light dark;--grey:#8a8a8a;--ours:#3b82c4}
body{font:14px/1.5 system-ui,sans-serif;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:20px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:3px 8px;text-align:left;border-bottom:1px solid #8884}
.bar{height:9px;background:var(--grey)}.ours{background:var(--ours)}td.bars{width:30%}
"""


def page(bench: Bench) -> str:
    """The complete cells, as one self-contained HTML page."""
    longest = max((cell.timing(label).us for cell in bench.cells for label in cell.samples), default=1.0)
    rows = []
    for cell in bench.cells:
        timings = [cell.timing(label) for label in cell.samples]
        bars = "".join(
            f'<div class="bar{" ours" * place}" style="width:{100 * timing.us / longest:.1f}%"></div>'
            for place, timing in enumerate(timings)
        )
        between = (f"{timing.us:.0f}" for timing in timings)
        paths = ", ".join(f"{path} {share:.0%}" for path, share in cell.paths.items())
        texts = (SAMPLINGS[cell.sampling].title, cell.batch, " → ".join(between), cell.verdict, paths)
        columns = "".join(f"<td>{html.escape(str(text))}</td>" for text in texts)
        rows.append(f"<tr>{columns}<td class=bars>{bars}</td></tr>")
    names = ("sampling", "batch", "µs per token", "change", "served by", "time per token")
    head, title = "".join(f"<th>{name}</th>" for name in names), html.escape(heading(bench))
    loads = "".join(f"<p>{html.escape(line)}</p>" for line in load_lines(bench))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Grey is stock SGLang, blue is flashsample; shorter is better.</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>{loads}</html>\n"
    )
