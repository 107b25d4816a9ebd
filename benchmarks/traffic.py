"""Tokens per second of real SGLang servers under traffic that moves, stock and ours, on one GPU.

    python benchmarks/run.py traffic --out benchmarks/results/h200-traffic.json --models qwen3-1.7b --clients 64 256

Requests end and join at almost every step: prompts of 32 to 512 tokens and answers of 16 to 512, uniform, the same
requests in the same order for both servers; dummy weights of the model's size. ``closed``: each of ``--clients`` sends
its next request when the last is answered. ``poisson``: requests arrive at 80 % of the rate that saturates stock.
``mix``: 40 % truncated, 20 % at temperature 1, 20 % greedy, 10 % with penalties or a bias, 10 % with JSON or logprobs,
with seeds in half of them; JSON is constrained by the tokenizer that is generated for the model.

Both servers are up and one answers at a time, in windows of ``--window`` seconds in the order stock, ours, ours, stock;
the other one's processes are stopped meanwhile. Closed loops are compared by equal work: the tokens that both servers
answered within windows are cut into equal segments, of about 2 s, and each is a pair of running times. ``tokens_s`` is
the compared tokens over their time. Poisson arrivals are compared by pairs of windows; ``tokens_s`` is their median.
``ratio.windows`` and ``ratio.segments`` count both (0 segments where windows are compared). A cell ends when the 99 %
interval of the ratio of tokens per second is 2 % wide, and after ``--seconds`` at the latest. Clients run on a quarter
of the cores and servers on the others. Percentiles are medians over windows; gaps are those of requests that stream
each token (about 8 at a time, the others stream every 16th), and a chunk with several tokens is one gap. ``itl_ratio``
has the ratios of their percentiles, by pairs of windows, with 99 % intervals. ``--pp``: pipeline stages of each server,
one GPU for each, and as many micro-batches; its rows say so.

traffic  servers that are under way, after requests of each kind
cold     the first ``--cold-seconds`` of traffic of servers with empty Triton caches, ours with an empty FlashInfer
         cache too
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import DRY_RUN, Benchmark, Result
from lab.servers import server_on_this_machine
from serve import versions
from servers import check_server_options, in_turns, server_options

from sgl_flashsample.tools import markov, traffic
from sgl_flashsample.tools.bench import COUNTERS_EVERY, OURS, STOCK, Load, check_active, generate
from sgl_flashsample.tools.samplings import SAMPLINGS
from sgl_flashsample.tools.server import Server, ServerError, stop_all
from sgl_flashsample.tools.traffic_client import ANSWERS, CLOSED, MIX, POISSON, PROMPTS, Clients, Plan, kinds_of

SAMPLED = ("trunc", "t1", "greedy", MIX)
CLIENTS, FAST_CLIENTS, SATURATING = (16, 64, 256, 512, 1024), (64, 256), 256
LOADED = 0.8  # of stock's saturation
GRAPHS_UP_TO = 1024  # rows of a batch
USABLE, OVERHEAD = 0.94, 6 * 2**30  # share of the GPU; bytes of a server beside weights and KV cache
OUT_OF_TIME = "out of time"
ARGUMENTS = ("--load-format", "dummy", "--random-seed", "1", "--enable-metrics", "--disable-radix-cache")
GPU_ARGUMENTS = ("--attention-backend", "triton", "--disable-flashinfer-autotune")


def weight_bytes(size: markov.Size) -> int:
    heads = 2 * size.num_attention_heads + 2 * size.num_key_value_heads
    layer = size.hidden_size * (heads * size.head_dim + 3 * size.intermediate_size)
    return 2 * (size.num_hidden_layers * layer + (1 if size.tied else 2) * size.vocab_size * size.hidden_size)


def room(size: markov.Size, servers: int) -> int:
    """Tokens of KV cache for each of so many servers on the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    token = 2 * 2 * size.num_hidden_layers * size.num_key_value_heads * size.head_dim
    return max(0, int((USABLE * total / servers - weight_bytes(size) - OVERHEAD) // token))


class ModelRun:
    """The servers of one model, and the traffic to them."""

    def __init__(self, name: str, options: Any, result: Result) -> None:
        self.name, self.options, self.result = name, options, result
        self.model = {"model": name} | ({"pp": options.pp} if options.pp > 1 else {})  # of a row
        vocab = markov.SIZES[name].vocab_size
        self.ids = range(vocab // 10, 9 * vocab // 10)
        self.most = max([*options.clients, *([SATURATING] * (POISSON in options.arrivals and not DRY_RUN))])
        self.kv_tokens = self.most * traffic.KV_TOKENS
        if torch.cuda.is_available():
            self.kv_tokens = min(self.kv_tokens, room(markov.SIZES[name], 1 if options.sequential else 2))
        self.servers_cores, self.clients_cores = traffic.split_cores()

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.options.until - time.monotonic()

    @contextlib.contextmanager
    def servers(self, labels: list[str], *, cold: bool = False) -> Iterator[dict[str, Server]]:
        """Started side by side, and ready. Raises ServerError."""
        running: dict[str, Server] = {}
        began = time.monotonic()
        kinds = dict.fromkeys(kind for sampling in self.options.samplings for kind in kinds_of(sampling))
        with tempfile.TemporaryDirectory() as folder, in_turns(self.options) as wait_for_turn:
            model, size = Path(folder) / "model", markov.SIZES[self.name]
            model.mkdir()
            (model / "config.json").write_text(json.dumps(markov.config(size)))
            markov.write_tokenizer(model, size.vocab_size)
            try:
                with traffic.on_cores(self.servers_cores):
                    for label in labels:
                        running[label] = self._server(model, label, cold)
                        running[label].start()
                    for label in labels:
                        running[label].wait_until_ready()
                        self._check_capacity(running[label])
                        if label == OURS:
                            check_active(running[label])
                        for kind in () if cold else kinds:  # compiles what the first such request compiles
                            generate(running[label], Load(self.ids), 2, SAMPLINGS[kind], 4)
                print(f"{self.name}: {', '.join(labels)} ready after {time.monotonic() - began:.0f} s", flush=True)
                wait_for_turn(running.values())
                yield running
            finally:
                stop_all(running.values())

    def _server(self, model: Path, label: str, cold: bool) -> Server:
        caches = {"TRITON_CACHE_DIR": str(model.parent / f"triton-{label}")} if cold else {}
        if cold and label == OURS:
            caches["FLASHINFER_WORKSPACE_BASE"] = str(model.parent / "flashinfer")
        stages = ["--pp-size", str(self.options.pp)] if self.options.pp > 1 else []
        on_gpu = torch.cuda.is_available()
        graphs = ["--cuda-graph-max-bs-decode", str(min(self.most, GRAPHS_UP_TO))]
        limits = ["--max-running-requests", str(self.most), "--mem-fraction-static", str(self.options.memory_share)]
        return server_on_this_machine(
            model,
            [*ARGUMENTS, *(("--max-total-tokens", str(self.kv_tokens)) if on_gpu else ("--dtype", "float32"))],
            backend=OURS if label == OURS else "flashinfer" if on_gpu else "pytorch",
            log=self.options.logs / f"{self.name}-{label}{'-cold' * cold}.log",
            # On a GPU as users have them: bringing the counters up to date takes time of a step.
            environment=(COUNTERS_EVERY if DRY_RUN else {}) | caches | self.options.set,
            gpu_arguments=(*GPU_ARGUMENTS, *stages, *graphs, *limits),
        )

    def _check_capacity(self, server: Server) -> None:
        capacities = re.findall(r"max_total_num_tokens=(\d+)", server.log_text())
        if torch.cuda.is_available() and (not capacities or int(capacities[-1]) < 0.98 * self.kv_tokens):
            raise ServerError(f"the server has room for {capacities[-1:]} tokens; expected {self.kv_tokens}")

    def run(self) -> None:
        """All cells. What fails, or would not end before the limit, is recorded."""
        for section in self.options.only:
            cold = section == "cold"
            if self.left < (self.options.cold_seconds if cold else self.options.seconds):
                for gap in [{"head": self.name}] if cold else map(self._gap, self._plans()):
                    self.result.miss(OUT_OF_TIME, section=section, **gap)
                continue
            try:
                with Clients(traffic.processes_of(self.most, self.clients_cores), self.clients_cores) as clients:
                    if self.options.sequential and not cold:
                        self._in_turns(clients)
                        continue
                    with self.servers([STOCK, OURS], cold=cold) as servers:
                        if cold:
                            self._cold(servers, clients)
                        for cell in () if cold else self.cells(servers, clients):
                            self._add(cell)
            except (ServerError, OSError, EOFError) as error:
                self.result.miss(error, section=section, **({"head": self.name} if cold else self.model))
                print(f"logs are in {self.options.logs}", flush=True)

    def _plans(self) -> list[Plan]:
        """The plans, closed loops first: they tell the rate that saturates stock."""
        closed = [Plan(s, self.ids, n) for n in self.options.clients for s in self.options.samplings]
        poisson = [Plan(s, self.ids, rate=1.0) for s in self.options.samplings]
        return closed * (CLOSED in self.options.arrivals) + poisson * (POISSON in self.options.arrivals)

    def _gap(self, plan: Plan) -> dict[str, Any]:
        about = self.model | {"clients": plan.clients or None}
        return about | {"arrivals": plan.arrivals, "sampling": plan.sampling}

    def cells(self, servers: dict[str, Server], clients: Clients) -> Iterator[traffic.TrafficCell]:
        """One after the other."""
        for plan in self._plans():
            gap, needed = {"section": "traffic"} | self._gap(plan), plan.clients * traffic.KV_TOKENS
            if torch.cuda.is_available() and needed > 1.2 * self.kv_tokens:  # few requests are at their end
                words = f"{needed} tokens of KV cache are needed; there is room for {self.kv_tokens}"
                self.result.miss(words, **gap)
                continue
            try:
                if plan.rate:
                    plan = plan._replace(rate=self._rate(plan.sampling, servers, clients))
                if self.left < (seconds := self.options.seconds * len(servers) / 2):
                    self.result.miss(OUT_OF_TIME, **gap)
                    continue
                yield traffic.measure(servers, clients, plan, seconds, window=self.options.window, step=self._show)
            except ServerError as error:
                self.result.miss(error, **gap)

    def _rate(self, sampling: str, servers: dict[str, Server], clients: Clients) -> float:
        """Requests per second: ``LOADED`` of what stock has answered, or answers now, with many clients."""
        rates = self.result.env.setdefault("poisson_requests_s", {})
        stages = f", {self.options.pp} stages" if self.options.pp > 1 else ""
        if (key := f"{self.name} {sampling}{stages}") not in rates:
            about = {"pp": None} | self.model | {"sampling": sampling, "arrivals": CLOSED, "backend": STOCK}
            alike = [row for row in self.result.rows if all(row.get(name) == value for name, value in about.items())]
            seen = [row for row in alike if row["clients"] >= SATURATING]
            if not seen and STOCK not in servers:
                raise ServerError("the rate that saturates stock is not known")
            if not seen:
                plan, seconds = Plan(sampling, self.ids, self.most), self.options.seconds / 2
                cell = traffic.measure({STOCK: servers[STOCK]}, clients, plan, seconds, window=self.options.window)
                seen = [{"tokens_s": sum(w.tokens_s for w in cell.windows[STOCK]) / len(cell.windows[STOCK])}]
            rates[key] = round(LOADED * max(row["tokens_s"] for row in seen) / (sum(ANSWERS) / 2), 3)
        return rates[key]

    def _in_turns(self, clients: Clients) -> None:
        """One server after the other, each with the whole GPU."""
        cells: dict[Plan, traffic.TrafficCell] = {}
        for label in (STOCK, OURS):
            with self.servers([label]) as servers:
                for part in self.cells(servers, clients):
                    whole = cells.setdefault(part.plan, traffic.TrafficCell(part.plan, {}, {}))
                    whole.windows |= part.windows
                    whole.curves |= part.curves
                    whole.figures |= part.figures
                    if len(whole.windows) == 2:
                        self._add(whole)

    def _cold(self, servers: dict[str, Server], clients: Clients) -> None:
        plan = Plan(self.options.samplings[0], self.ids, self.options.clients[-1])
        cell = traffic.measure_first(servers, clients, plan, self.options.cold_seconds)
        rows = [self.model | row for row in cell.rows()]
        print(f"{self._about(cell)}, cold: {cell.line()}", flush=True)
        self.result.put("cold", {"seconds": self.options.cold_seconds, "rows": rows}, self.name)

    def _add(self, cell: traffic.TrafficCell) -> None:
        print(f"{self._about(cell)}: {cell.line()}, {self.left:.0f} s left", flush=True)
        self.result.add([self.model | row for row in cell.rows()])

    def _about(self, cell: traffic.TrafficCell) -> str:
        load = f"{cell.plan.clients} clients" if cell.plan.clients else f"{cell.plan.rate:.1f} requests/s"
        return f"{self.name} {cell.plan.sampling}, {load}"

    def _show(self, cell: traffic.TrafficCell, left: float) -> None:
        pairs = min(map(len, cell.windows.values()))
        if len(cell.windows) > 1 and pairs % 4 == 0:
            print(f"  {self._about(cell)}: {cell.line()}; {left:.0f} s of it, {self.left:.0f} s left", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=markov.SIZES)
    parser.add_argument("--clients", type=int, nargs="+", help="of closed loops; the last number is that of cold")
    parser.add_argument("--arrivals", nargs="+", choices=(CLOSED, POISSON))
    parser.add_argument("--samplings", nargs="+", choices=SAMPLED, help="the first is that of cold")
    parser.add_argument("--seconds", type=float, default=4.0 if DRY_RUN else 60.0, help="of a cell, at most")
    parser.add_argument("--window", type=float, default=0.5 if DRY_RUN else traffic.WINDOW, help="seconds")
    parser.add_argument("--cold-seconds", type=float, default=3.0 if DRY_RUN else 60.0)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages of each server, one GPU for each")
    parser.add_argument("--sequential", action="store_true", help="one server after the other, each with the whole GPU")
    server_options(parser, "flashsample-traffic", memory_share=0.9)


def prepare(options: Any) -> None:
    fast = options.fast or DRY_RUN
    options.models = options.models or (["tiny"] if DRY_RUN else ["qwen3-1.7b"] if fast else ["qwen3-1.7b", "qwen3-8b"])
    options.clients = options.clients or ([4] if DRY_RUN else list(FAST_CLIENTS if fast else CLIENTS))
    options.samplings = options.samplings or (["trunc"] if fast else list(SAMPLED))
    options.arrivals = options.arrivals or ([CLOSED] if fast else [CLOSED, POISSON])
    for name, values, least in (
        ("--clients", options.clients, 1),
        ("--window", [options.window], 0.1),
        ("--seconds", [options.seconds], 4 * options.window),
        ("--cold-seconds", [options.cold_seconds], 1),
        ("--pp", [options.pp], 1),
    ):
        if min(values) < least:
            raise ValueError(f"{name} is {min(values):g}; expected {least:g} or more")
    check_server_options(options)


def run(options: Any, result: Result) -> int:
    result.env["servers"] = versions(sys.executable, options.set)
    result.run["sglang"] = result.env["servers"]["sglang"]
    servers, clients = map(len, traffic.split_cores())
    result.env["traffic"] = {
        **{"prompt_tokens": PROMPTS, "answer_tokens": ANSWERS, "lengths": "uniform", "window_s": options.window},
        **{"settle_s": traffic.SETTLE, "segment_s": traffic.SEGMENT},
        **{"cores_of_servers": servers, "cores_of_clients": clients},
    }
    result.env["server_arguments"] = [*ARGUMENTS, *GPU_ARGUMENTS]
    for name in options.models:
        ModelRun(name, options, result).run()
    return result.close()


PLACE = ("model", "pp", "clients", "arrivals", "sampling", "backend")
BENCHMARKS = {
    "traffic": Benchmark(__doc__, run, add_options, prepare, ("traffic", "cold"), ("traffic",), PLACE, PLACE[2:])
}
