"""Time per output token of real SGLang servers, stock and with our backend, side by side on one GPU.

    python benchmarks/run.py serve --out benchmarks/results/h200-serve.json --models qwen3-1.7b

Both servers run at once with the same arguments and dummy weights of the model's size; an idle one leaves the GPU
alone, and one with pipeline stages stands still meanwhile, since it keeps CPU cores busy. Cells are measured as
``sgl-flashsample bench`` does (``sgl_flashsample/tools/bench.py``), with a fixed number of pairs. Medians, half the
distance between the quartiles, and the change pair by pair with its 99 % interval. Host time is the server's own metric
``sglang:flashsample_host_seconds``.

stock    stock SGLang and our backend
screen   our backend without a screen and with one; answers to seeded requests are compared too
graphs   our backend with the model's CUDA graphs as SGLang captures them and with a second root, and how long the GPU
         idles between kernels in each
oracle   a backend that draws nothing (``oracle.py``) and ours: what a sampler of no cost would gain
plane    our backend, and one that draws on the CPU (``decision_plane.py``); answers to seeded requests are compared
         too. With ``--keep --only oracle`` into the same file, its table has what draws nothing as well
repeats  stock SGLang and our backend, each cell measured ten times anew: how often the verdict is the same
prompts  stock SGLang and our backend: milliseconds of a request for one token and the logprobs of its prompt, of 2,048
         and of 32,768 tokens, and by how many MB the memory of the server has grown after the first
answers  our backend, with ``--deterministic``: how many of 1,000 requests have other tokens or logprobs than alone,
         among 63 others; in chunks, after retractions and without CUDA graphs; on another GPU, where there are two
host     our backend alone on the host: microseconds of the sampler's host time per step
profile  calls per decode step, stock and ours, counted in profiler traces (``step_profile.py``), how long the GPU
         idles between kernels, and the time of kernels that are no part of the model's graph; with several
         tensor-parallel ranks, microseconds of their exchange

``--tp``, ``--pp``: GPUs of each server. Its rows say so, and how many bytes a rank receives per row of a step.
Ours has the default environment: with numbers of them that are off by default, ``--set FLASHSAMPLE_SEVERAL_GPUS=1``.
``--dp``: DP attention with ``--enable-dp-lm-head``, of so many replicas of ``--tp`` ranks in all; its rows say so.
``--speculation``: drafts of n-grams in both servers, ``--draft-tokens`` per step; its rows say so. With dummy weights
they tell what a step costs, not how many drafts are accepted. ``--deterministic``: servers of deterministic inference;
its rows say so.

Without ``--only`` the section is stock. ``--fast``: three samplings, three batch sizes, three pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import decision_plane
import oracle
import step_profile
import torch
from common import DRY_RUN, Benchmark, Result
from lab.servers import PretendedServer
from servers import TakingTurns, check_server_options, in_turns, server_options, take_turns

from sgl_flashsample.autotune.race import Ratio
from sgl_flashsample.autotune.timing import Timing
from sgl_flashsample.model_config import shard_of
from sgl_flashsample.sglang.exchange import bytes_received
from sgl_flashsample.sglang.model_graph import MODEL_GRAPHS_VARIABLE
from sgl_flashsample.sglang.support import SPECULATION_VARIABLE
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.bench import (
    COUNTERS_EVERY,
    OURS,
    STOCK,
    Counters,
    Load,
    check_active,
    generate,
    measure,
)
from sgl_flashsample.tools.comparison import ALPHA
from sgl_flashsample.tools.samplings import SAMPLINGS, SERVED, Sampling, server_arguments
from sgl_flashsample.tools.server import Server, ServerError

BATCHES, FAST_BATCHES, FAST_SAMPLINGS = (1, 8, 32, 64), (1, 8, 64), ("t1", "trunc", "greedy")
LOAD = Load(range(1000, 100_000), long=100, seconds=0.0 if DRY_RUN else 1.2)  # three answers at 5 ms per token
HOST_TOKENS, SHORT_ANSWERS = 600, 20  # tokens of a long answer whose host time is taken; number of short answers
REPEATS = 10
COMPARED_BATCHES, COMPARED_TOKENS = (1, 8, 16), 64
PROFILED_STEPS = 40
PROMPTS, PROMPT_TOKENS = "prompt-logprobs", (2048, 32768)
ANSWERED, ANSWER_TOKENS, CLIENTS = 6 if DRY_RUN else 1000, 6, 64
ASKED_FOR: tuple[dict[str, Any], ...] = (  # by the requests of ``answers``, in turn
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.3, "logit_bias": {"5000": 4.0, "7700": 1.0, "7800": -100.0}},
)
CACHE_TOKENS = 65536
OUT_OF_TIME = "out of time"
SERVER_ARGUMENTS = [
    *("--load-format", "dummy", "--attention-backend", "triton", "--random-seed", "1", "--enable-metrics"),
    *("--max-total-tokens", str(CACHE_TOKENS), "--cuda-graph-max-bs-decode", "64"),
    *("--disable-prefill-cuda-graph", "--disable-flashinfer-autotune", "--disable-radix-cache"),
]


class Backend(NamedTuple):
    """One server of a comparison. name: its --sampling-backend. arguments: beside those of all servers."""

    name: str
    environment: dict[str, str]
    arguments: tuple[str, ...] = ()


Backends = dict[str, Backend]  # the baseline first
BACKENDS: Backends = {STOCK: Backend("flashinfer", {}), OURS: Backend(OURS, {})}
ORACLES: Backends = {oracle.BACKEND: Backend(oracle.BACKEND, {}), OURS: BACKENDS[OURS]}
PLANES: Backends = {OURS: BACKENDS[OURS], "decision plane": Backend(decision_plane.BACKEND, {})}
GRAPHS: Backends = {
    "one root": Backend(OURS, {MODEL_GRAPHS_VARIABLE: "0"}),
    "two roots": Backend(OURS, {MODEL_GRAPHS_VARIABLE: "1"}),
}
SCREENS: Backends = {f"screen {mode}": Backend(OURS, {"FLASHSAMPLE_SCREEN": mode}) for mode in ("off", "on")}
USUAL, OTHER, SECOND_GPU, CHUNK = "usual", "other", "second GPU", "64"
ANSWERERS: Backends = {
    USUAL: BACKENDS[OURS],
    OTHER: Backend(
        OURS,
        {
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "7",
            # Else chunks are multiples of 4,096 tokens, and a longer prompt than a chunk of 64 is never begun.
            "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": CHUNK,
        },
        ("--chunked-prefill-size", CHUNK, "--disable-cuda-graph"),
    ),
}
# The server that is asked in each way.
WAYS = {"among others": USUAL}
if torch.cuda.device_count() > 1:
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    ANSWERERS[SECOND_GPU] = Backend(OURS, {"CUDA_VISIBLE_DEVICES": second})
    WAYS["among others, on a second GPU"] = SECOND_GPU
WAYS["in chunks, retracted, without CUDA graphs"] = OTHER  # last: the slowest


def _free_mb() -> float:
    """Device memory that no process has taken."""
    return torch.cuda.mem_get_info()[0] / 2**20 if torch.cuda.is_available() else 0.0


def seeded(server: Server, batch: int, request: Sampling) -> list[list[int]]:
    """The tokens of prompts and seeds that are the same each time."""
    prompts = [[1000 + 7 * row + 3 * place for place in range(LOAD.prompt_tokens)] for row in range(batch)]
    params = {**request.params, "max_new_tokens": COMPARED_TOKENS, "ignore_eos": True}
    rows = [params | {"sampling_seed": row} for row in range(batch)]
    return [a["output_ids"] for a in server.generate(input_ids=prompts, sampling_params=rows, **request.fields)]


def numbered_request(number: int) -> dict[str, Any]:
    """A request that is the same each time, of 3 to 300 tokens."""
    params = {"sampling_seed": number, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return {
        "input_ids": [random.Random(number).choices(LOAD.ids, k=3 + 37 * number % 298)],
        "sampling_params": ASKED_FOR[number % len(ASKED_FOR)] | params,
        "return_logprob": True,
        "top_logprobs_num": 2 if number % 4 == 1 else 0,
        "logprob_start_len": 0 if number % 3 == 0 else -1,
    }


Answer = tuple[list[int], dict[str, Any]]  # tokens, and all lists of logprobs by their names


def _answer(server: Server, request: dict[str, Any]) -> Answer:
    (answer,) = server.generate(**request)
    tokens = answer["output_ids"]
    logprobs = {name: value for name, value in answer["meta_info"].items() if name.endswith("logprobs")}
    if len(tokens) != ANSWER_TOKENS or not logprobs.get("output_token_logprobs"):
        raise ServerError(f"an answer has {len(tokens)} tokens and {list(logprobs)}; expected {ANSWER_TOKENS} of each")
    return tokens, logprobs


def _lacks_logprobs(answer: Answer) -> bool:
    """SGLang 0.5.17 can lose a logprob of a request that it retracts, with its own sampler too."""
    tokens, logprobs = answer
    return len(logprobs["output_token_logprobs"]) < len(tokens)


def fused_answers(server: Server, requests: Iterable[dict[str, Any]], clients: int) -> list[Answer]:
    """The answers in the order of the requests. One client takes a request when the one before is answered. Raises
    ServerError for an answer of another length, and where another path than the fused one has drawn."""
    before, ask = Counters.of(server, LOAD), functools.partial(_answer, server)
    with ThreadPoolExecutor(clients) as pool:
        answers = list(map(ask, requests) if clients == 1 else pool.map(ask, requests))
    paths = Counters.of(server, LOAD).shares_since(before)
    if paths.keys() != {"fused"}:
        raise ServerError(f"the paths of the answers are {paths}; expected the fused one alone")
    return answers


def _retractions(server: Server) -> int:
    """How many requests the server has retracted so far."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log_text())))


class ModelRun:
    """The servers of one model, and the requests to them."""

    def __init__(self, name: str, options: Any, result: Result) -> None:
        self.name, self.options, self.result = name, options, result
        # Fields of its rows about the servers; none for one GPU without drafts.
        self.about = {"tp": options.tp, "pp": options.pp} if options.tp * options.pp > 1 else {}
        if options.dp > 1:
            self.about |= {"dp": options.dp}
        if options.speculation:
            self.about |= {"speculation": options.speculation, "draft_tokens": options.draft_tokens}
        if options.deterministic:
            self.about |= {"deterministic": True}

    @contextlib.contextmanager
    def servers(self, backends: Backends) -> Iterator[dict[str, Server]]:
        """Started and ready. The first starts alone and compiles for the others, where they do not start together.
        Raises ServerError."""
        running: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder, in_turns(self.options) as wait_for_turn:
            model, size = Path(folder), markov.SIZES[self.name]
            (model / "config.json").write_text(json.dumps(markov.config(size)))
            if not DRY_RUN:
                markov.write_tokenizer(model, size.vocab_size)  # grammars are made of its tokens
            try:
                first, *others = backends
                for labels in [list(backends)] if self.options.together else [[first], others]:
                    began = time.monotonic()
                    for label in labels:
                        log = self.options.logs / f"{self.name}-{label.replace(' ', '-')}.log"
                        running[label] = self.make_server(model, backends[label], log)
                        running[label].start()
                    for label in labels:
                        running[label].wait_until_ready()
                        self._check_capacity(running[label])
                        if backends[label].name in (OURS, decision_plane.BACKEND):
                            check_active(running[label])
                        for sampling in self.options.samplings:  # compiles what the first such request compiles
                            generate(running[label], LOAD, 2, SAMPLINGS[sampling], 4)
                        print(f"{self.name} {label}: ready after {time.monotonic() - began:.0f} s", flush=True)
                wait_for_turn(running.values())
                if self.options.pp > 1:
                    take_turns(running.values())
                yield running
            finally:
                for server in running.values():
                    server.stop()

    def make_server(self, model: Path, backend: Backend, log: Path) -> Any:
        if DRY_RUN:
            return PretendedServer(log, CACHE_TOKENS)
        variables = backend.environment
        arguments = ["--mem-fraction-static", str(self.options.memory_share), *backend.arguments]
        arguments += server_arguments(self.options.samplings)
        if self.options.tp * self.options.pp > 1:
            arguments += ["--tp-size", str(self.options.tp), "--pp-size", str(self.options.pp)]
        if self.options.dp > 1:
            arguments += ["--dp-size", str(self.options.dp), "--enable-dp-attention", "--enable-dp-lm-head"]
        if self.options.speculation:
            arguments += ["--speculative-algorithm", self.options.speculation]
            arguments += ["--speculative-num-draft-tokens", str(self.options.draft_tokens)]
            variables = variables | {SPECULATION_VARIABLE: "1"}
        if self.options.deterministic:
            arguments += ["--enable-deterministic-inference"]
        if backend.name in (oracle.BACKEND, decision_plane.BACKEND):
            file = Path((oracle if backend.name == oracle.BACKEND else decision_plane).__file__)
            path = [str(oracle.install(model, file)), os.environ.get("PYTHONPATH", "")]
            variables = variables | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        return (TakingTurns if self.options.pp > 1 else Server)(
            model,
            [*SERVER_ARGUMENTS, *arguments],
            backend=backend.name,
            log=log,
            launcher=(self.options.python, "-m", "sglang.launch_server"),
            environment=COUNTERS_EVERY | variables | self.options.set,
        )

    def _check_capacity(self, server: Server) -> None:
        """A server with too little memory would run a large batch in several pieces."""
        capacities = re.findall(r"max_total_num_tokens=(\d+)", server.log_text())
        if not capacities or int(capacities[-1]) != CACHE_TOKENS:
            raise ServerError(
                f"the server has room for {capacities[-1:]} tokens; expected {CACHE_TOKENS} (--memory-share)"
            )

    def _late(self) -> bool:
        return time.monotonic() > self.options.until

    def cells(self, section: str, batches: tuple[int, ...] | list[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Sampling, batch size and the fields of a row. What would begin after the limit is recorded instead."""
        for sampling in self.options.samplings:
            for batch in batches:
                about = {"model": self.name, "sampling": sampling, "batch": batch} | self.about
                if self._late():
                    self.result.miss(OUT_OF_TIME, section=section, **about)
                else:
                    yield sampling, batch, about

    def compare(self, section: str, servers: dict[str, Server]) -> Iterator[list[dict[str, Any]]]:
        """The rows of one cell after the other, of the baseline and of what is compared with it."""
        for sampling, batch, about in self.cells(section, self.options.batches):
            try:
                yield self._cell(section, servers, sampling, batch, about)
            except (ServerError, OSError) as error:
                self.result.miss(error, section=section, **about)

    def _cell(
        self,
        section: str,
        servers: dict[str, Server],
        sampling: str,
        batch: int,
        about: dict[str, Any],
    ) -> list[dict[str, Any]]:
        cell = measure(servers, LOAD, sampling, batch, self.options.pairs, latencies=section == STOCK)
        rows = [about | {"section": section} | row for row in cell.rows()]
        if section == "plane":
            check_active(servers["decision plane"])  # after a failure SGLang's sampler draws
        if section in ("screen", "graphs", "plane") and batch in COMPARED_BATCHES:
            one, another = (seeded(server, batch, SAMPLINGS[sampling]) for server in servers.values())
            rows[-1]["same_answers"] = sum(a == b for a, b in zip(one, another, strict=True))
        if section == "graphs":
            for row, (label, server) in zip(rows, servers.items(), strict=True):
                row["gaps_us"] = self._summary(label, server, sampling, batch).get("gaps_us")
        received = ""
        if self.options.tp > self.options.dp:
            rows[-1]["bytes_per_row"] = self._bytes_per_row(SAMPLINGS[sampling], batch)
            received = f", {rows[-1]['bytes_per_row']:.0f} bytes per row and rank"
        us, (baseline, compared) = [row["tpot_us"] for row in rows], (cell.samples[label][0] for label in servers)
        ratio = Ratio.paired(compared, baseline, ALPHA)
        print(
            f"{self.name} {sampling:12} B={batch:<3} {' -> '.join(servers)} {us[0]:7.0f} -> {us[1]:.0f} us, "
            f"{100 * ratio.off:+.1f} % ({100 * ratio.low:+.1f} to {100 * ratio.high:+.1f}), {cell.paths}, "
            f"host {cell.host_us:.0f} us{received}",
            flush=True,
        )
        return rows

    def _bytes_per_row(self, request: Sampling, batch: int) -> float:
        """Bytes per row that a tensor-parallel rank of ours receives in a step, by the shapes that are exchanged."""
        ranks, truncated = self.options.tp // self.options.dp, request.truncation is not None
        shard = 2 * shard_of(markov.SIZES[self.name].vocab_size, ranks) if truncated else None
        return round(bytes_received(ranks, batch, shard) / batch, 1)

    def repeats(self, servers: dict[str, Server]) -> Iterator[list[dict[str, Any]]]:
        """Verdicts of independent comparisons by the same two servers, by cell: the change of the time per
        token and its interval, in percent, and how many of them call our server faster and slower."""
        for sampling, batch, about in self.cells("repeats", self.options.batches):
            cells = [
                measure(servers, LOAD, sampling, batch, self.options.pairs, latencies=False)
                for _ in range(2 if DRY_RUN else REPEATS)
            ]
            ratios = [Ratio.paired(cell.samples[OURS][0], cell.samples[STOCK][0], ALPHA) for cell in cells]
            verdicts = {"faster": sum(r.high < 0 for r in ratios), "slower": sum(r.low > 0 for r in ratios)}
            percent = [[round(100 * value, 2) for value in (r.off, r.low, r.high)] for r in ratios]
            print(f"{self.name} {sampling:12} B={batch:<3} {len(ratios)} repeats: {verdicts} {percent}", flush=True)
            pairs = {"pairs": self.options.pairs, "percent": percent}
            yield [about | {"section": "repeats"} | verdicts | pairs]

    def prompts(self, servers: dict[str, Server]) -> Iterator[list[dict[str, Any]]]:
        """The rows of one length after the other, stock and ours."""
        request, labels = SAMPLINGS[PROMPTS], list(servers)
        for tokens in (16, 32) if DRY_RUN else PROMPT_TOKENS:
            load = LOAD._replace(prompt_tokens=tokens)
            samples: dict[str, list[float]] = {label: [] for label in labels}
            grown = dict.fromkeys(labels, 0.0)
            for pair in range(self.options.pairs + 1):
                for label in labels if pair % 2 == 0 else reversed(labels):
                    free = _free_mb()
                    seconds = generate(servers[label], load, 1, request, 1)
                    if pair:
                        samples[label].append(round(1e3 * seconds, 3))
                    else:  # compiles, and takes the memory that the next ones find
                        grown[label] = round(free - _free_mb(), 1)
            about = {"section": "prompts", "model": self.name, "sampling": PROMPTS, "batch": 1, "prompt_tokens": tokens}
            rows = []
            for label, times in samples.items():
                timing = Timing.of(times)
                figures = {"ms": round(timing.us, 3), "spread_ms": round(timing.spread, 3), "grown_mb": grown[label]}
                rows.append(about | {"backend": label} | figures | {"samples": times} | self.about)
            words = (f"{row['ms']:.1f} ms, grown by {row['grown_mb']:.0f} MB" for row in rows)
            print(f"{self.name} prompt of {tokens} tokens {' -> '.join(labels)} {' -> '.join(words)}", flush=True)
            yield rows

    def answers(self, servers: dict[str, Server]) -> Iterator[list[dict[str, Any]]]:
        """The row of one way of asking after the other. Requests that would begin alone after the limit are left out of
        both."""
        numbered = map(numbered_request, range(ANSWERED))
        requests = itertools.takewhile(lambda _: not self._late(), numbered)
        alone = fused_answers(servers[USUAL], requests, clients=1)
        for way, label in WAYS.items():
            about = {"section": "answers", "model": self.name, "way": way} | self.about
            if not alone:
                self.result.miss(OUT_OF_TIME, **about)
                continue
            try:
                row = about | self._compared_with(alone, servers[label])
            except (ServerError, OSError) as error:
                self.result.miss(error, **about)
                continue
            print(
                f"{self.name} {way}: {row['requests']} requests, {row['tokens']} tokens, {row['different']} with other "
                f"tokens than alone, {row['different_logprobs']} with other logprobs, {row['without_all_logprobs']} "
                f"without all, {row['retractions']} retracted",
                flush=True,
            )
            yield [row]

    def _compared_with(self, alone: list[Answer], server: Server) -> dict[str, Any]:
        """The figures of a row: the same requests as ``alone``, many at once, of ``server``."""
        retracted = _retractions(server)
        answers = fused_answers(server, map(numbered_request, range(len(alone))), CLIENTS)
        pairs = list(zip(answers, alone, strict=True))
        whole = [pair for pair in pairs if not any(map(_lacks_logprobs, pair))]
        return {
            "requests": len(answers),
            "tokens": sum(len(tokens) for tokens, _ in answers),
            "different": sum(one[0] != other[0] for one, other in pairs),
            "different_logprobs": sum(one[1] != other[1] for one, other in whole),
            "without_all_logprobs": len(pairs) - len(whole),
            "retractions": _retractions(server) - retracted,
        }

    def host(self) -> Iterator[list[dict[str, Any]]]:
        """Microseconds of the sampler's host time per step, of our server alone: in long answers, whose batches stay as
        they are, and in short ones, whose steps are hardly ever replayed."""
        for screen in self.options.screens:
            label = f"{OURS} screen {screen}"
            with self.servers({label: Backend(OURS, {"FLASHSAMPLE_SCREEN": screen})}) as servers:
                server = servers[label]
                for sampling, batch, about in self.cells("host", self.options.batches):
                    request, row = SAMPLINGS[sampling], about | {"section": "host", "screen": screen}
                    generate(server, LOAD, batch, request, LOAD.long)  # compiles, and captures this batch's steps
                    for which, tokens, answers in (
                        ("host_us", HOST_TOKENS, 1),
                        ("host_us_short", LOAD.short, SHORT_ANSWERS),
                    ):
                        before = Counters.of(server, LOAD)
                        for _ in range(answers):
                            generate(server, LOAD, batch, request, tokens)
                        row[which] = Counters.of(server, LOAD).host_us_since(before)
                    print(
                        f"{self.name} screen {screen:4} {sampling:12} B={batch:<3} host {row['host_us']:.0f} us per "
                        f"step, {row['host_us_short']:.0f} us in short answers",
                        flush=True,
                    )
                    yield [row]

    def profile(self, servers: dict[str, Server]) -> Iterator[list[dict[str, Any]]]:
        """Calls per decode step, stock and ours."""
        for sampling, batch, about in self.cells("profile", self.options.profiled):
            for label, server in servers.items():
                row = about | {"section": "profile", "backend": label}
                yield [row | self._summary(label, server, sampling, batch)]

    def _summary(self, label: str, server: Server, sampling: str, batch: int) -> dict[str, Any]:
        """The summary of a trace of decode steps; nothing in a dry run."""
        if DRY_RUN:
            return {}
        folder = self.options.logs / f"{self.name}-{label.replace(' ', '-')}-trace" / f"{sampling}-{batch}"
        step_profile.record(
            server, folder, PROFILED_STEPS, lambda: generate(server, LOAD, batch, SAMPLINGS[sampling], HOST_TOKENS)
        )
        return step_profile.summarise(folder, PROFILED_STEPS)

    def run(self, sections: list[str]) -> Iterator[list[dict[str, Any]]]:
        """The rows of one cell after the other. A server that does not start or ends is recorded for the sections that
        are left."""
        left = list(sections)
        measured = {"repeats": self.repeats, "profile": self.profile, "prompts": self.prompts, "answers": self.answers}
        try:
            if shared := [section for section in sections if section in BACKENDS_OF]:
                with self.servers({k: v for section in shared for k, v in BACKENDS_OF[section].items()}) as servers:
                    for section in shared:
                        of_section = {label: servers[label] for label in BACKENDS_OF[section]}
                        yield from measured.get(section, functools.partial(self.compare, section))(of_section)
                        left.remove(section)
            if "screen" in sections:
                with self.servers(SCREENS) as servers:
                    yield from self.compare("screen", servers)
                left.remove("screen")
            if "host" in sections:
                yield from self.host()
        except (ServerError, OSError, TimeoutError) as error:
            for section in left:
                self.result.miss(error, section=section, model=self.name, **self.about)
            print(f"logs are in {self.options.logs}", flush=True)


# Sections that share one start of servers, and their servers, the baseline first.
BACKENDS_OF = {
    STOCK: BACKENDS,
    "graphs": GRAPHS,
    "oracle": ORACLES,
    "plane": PLANES,
    "repeats": BACKENDS,
    "profile": BACKENDS,
    "prompts": BACKENDS,
    "answers": ANSWERERS,
}
SECTIONS = (*BACKENDS_OF, "screen", "host")


def versions(python: str, variables: dict[str, str]) -> dict[str, str]:
    """Versions of the servers' packages, as their interpreter has them. Raises ValueError where SGLang is not there."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run([python, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    try:
        installed = {name.lower(): version for name, version in json.loads(done.stdout).items() if name}
    except ValueError:
        raise ValueError(f"{python} does not run: {done.stderr.strip().splitlines()[-1:]}") from None
    names = ("sglang", "flashinfer-python", "sgl-flashsample", "torch", "triton", "transformers")
    if "sglang" not in installed and not DRY_RUN:
        raise ValueError(f"{python} has no sglang; name another interpreter with --python")
    return {name: installed.get(name, "none") for name in names}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=markov.SIZES, default=["qwen3-1.7b"])
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--profiled", type=int, nargs="+", default=[32], metavar="BATCH", help="of profile")
    parser.add_argument("--pairs", type=int, help="samples of each server per cell, 6 by default")
    parser.add_argument("--screens", nargs="+", choices=("auto", "on", "off"), default=["auto"], help="of host")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has SGLang and the plugin")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each server")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages of each server")
    parser.add_argument(
        "--dp", type=int, default=1, help="of the ranks, replicas of DP attention, each with an LM head"
    )
    parser.add_argument("--speculation", choices=("NGRAM",), help="speculative decoding in each server")
    parser.add_argument("--draft-tokens", type=int, default=8, help="nodes that a step verifies, with --speculation")
    parser.add_argument("--deterministic", action="store_true", help="deterministic inference in each server")
    parser.add_argument("--together", action="store_true", help="start all servers at once: with warm caches, sooner")
    server_options(parser, "flashsample-serve", memory_share=0.55)


def prepare(options: Any) -> None:
    options.samplings = options.samplings or list(FAST_SAMPLINGS if options.fast else SERVED)
    options.batches = options.batches or list(FAST_BATCHES if options.fast else BATCHES)
    options.pairs = options.pairs or (3 if options.fast or DRY_RUN else 6)
    check_server_options(options)
    if options.dp < 1 or options.tp % options.dp:
        raise ValueError(f"--dp is {options.dp}; expected a divisor of --tp, which is {options.tp}")
    if "answers" in options.only and not options.deterministic:
        raise ValueError("--only names answers without --deterministic; expected --deterministic with it")


def run(options: Any, result: Result) -> int:
    random.seed(1)
    try:
        result.env["servers"] = versions(options.python, options.set)
    except ValueError as error:
        sys.exit(f"error: {error}")
    result.env["server_arguments"] = [*SERVER_ARGUMENTS, "--mem-fraction-static", str(options.memory_share)]
    result.env["tokens"] = {"prompt": LOAD.prompt_tokens, "short": LOAD.short, "long": LOAD.long}
    result.run["sglang"] = result.env["servers"]["sglang"]
    for name in options.models:
        for rows in ModelRun(name, options, result).run(options.only):
            result.add(rows)  # now: a run that ends early leaves all that it has measured
    return result.close()


# Fields that tell cells apart.
PLACE = ("section", "model", "tp", "pp", "dp", "deterministic", "speculation", "draft_tokens", "sampling", "batch")
PLACE += ("prompt_tokens", "backend", "screen", "way")
CELL = ("sampling", "batch", "backend", "screen", "way")
BENCHMARKS = {"serve": Benchmark(__doc__, run, add_options, prepare, SECTIONS, (STOCK,), PLACE, CELL)}
