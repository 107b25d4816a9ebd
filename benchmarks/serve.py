"""Time per output token of a real SGLang server, stock and with our backend, side by side on one GPU.

    python benchmarks/serve.py --out benchmarks/results/h200-serve.json

Both servers run at once with the same arguments and dummy weights of the model's size; an idle one leaves the
GPU alone. Every cell is measured stock, ours, stock, ours, ... stock, so that drift falls on both. TPOT is the
time between a short and a long answer to the same batch, divided by the tokens between them: no prefill, no
HTTP. Medians. ``--screen``: both servers are ours, one without a screen and one with; seeded requests are compared too.
``--alone``: ours, with no other server on the host, and of it the host time that the sampler takes in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import step_profile
from sgl_flashsample.autotune import measure

from sgl_flashsample.demo import markov
from sgl_flashsample.demo.server import Server

MODELS = ["qwen3-1.7b", "qwen3-8b"]
BATCHES = [1, 8, 32, 64]
# A list of objects that no answer of a benchmark's length ends; numbers, words and fixed text in turn.
JSON_SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "count": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "count", "ok"],
    },
}
TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
# {name: (sampling parameters, other fields of the request)}
SAMPLING: dict[str, tuple[dict, dict]] = {
    "t1": ({"temperature": 1.0}, {}),
    "trunc": (TRUNCATED, {}),
    "greedy": ({"temperature": 0.0}, {}),
    "penalty": (TRUNCATED | {"frequency_penalty": 0.5, "repetition_penalty": 1.1}, {}),
    "json": (TRUNCATED | {"json_schema": json.dumps(JSON_SCHEMA)}, {}),
    "logprob": ({"temperature": 1.0}, {"return_logprob": True}),
    "top-logprobs": ({"temperature": 1.0}, {"return_logprob": True, "top_logprobs_num": 5}),
}
PROMPT_TOKENS = 32
SHORT, LONG = 8, 200
CACHE_TOKENS = 65536
SERVER_ARGUMENTS = [
    *("--load-format", "dummy", "--attention-backend", "triton", "--random-seed", "1"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", str(CACHE_TOKENS), "--cuda-graph-max-bs-decode", "64"),
    *("--disable-prefill-cuda-graph", "--disable-flashinfer-autotune", "--disable-radix-cache"),
]
# What is compared, the baseline first: {name: (--sampling-backend, environment)}
BACKENDS = {"stock": ("flashinfer", {}), "flashsample": ("flashsample", {})}
SCREENS = {
    "screen off": ("flashsample", {"FLASHSAMPLE_SCREEN": "off"}),
    "screen on": ("flashsample", {"FLASHSAMPLE_SCREEN": "on"}),
}
COMPARED_BATCHES, COMPARED_TOKENS = (1, 8, 16), 64
ALONE_TOKENS = 600  # of an answer whose steps' host time is taken


def generate(server: Server, batch: int, sampling: tuple[dict, dict], tokens: int) -> float:
    """Seconds for ``batch`` fresh random prompts to be answered with ``tokens`` tokens each."""
    params, fields = sampling
    prompts = [[random.randrange(1000, 100_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    started = time.perf_counter()
    answers = server.generate(
        input_ids=prompts, sampling_params={**params, "max_new_tokens": tokens, "ignore_eos": True}, **fields
    )
    seconds = time.perf_counter() - started
    assert all(len(answer["output_ids"]) == tokens for answer in answers)
    return seconds


def tpot_us(server: Server, batch: int, sampling: tuple[dict, dict]) -> float:
    short = generate(server, batch, sampling, SHORT)
    return (generate(server, batch, sampling, LONG) - short) / (LONG - SHORT) * 1e6


def counted(server: Server) -> tuple[dict[str, int], float, int]:
    """Rows per path, microseconds of host time in the sampler, and the batches that took them: from the newest line
    with counters in our server's log."""
    time.sleep(0.3)
    generate(server, 1, SAMPLING["greedy"], 2)  # a step after the interval: the line is written
    line = (server.log_lines("] flashsample: ") or [""])[-1]
    counts = {"fused": 0, "native": 0}
    for path, rows in re.findall(r"(fused|native)[^;]*? ([\d,]+) rows", line):
        counts[path] += int(rows.replace(",", ""))
    host = re.search(r"host ([\d.]+) us per batch over ([\d,]+) batches", line)
    batches = int(host[2].replace(",", "")) if host else 0
    return counts, float(host[1]) * batches if host else 0.0, batches


def check_capacity(server: Server) -> None:
    """A server that found too little memory would run a large batch in several pieces."""
    found = re.findall(r"max_total_num_tokens=(\d+)", server.log_text())
    if not found or int(found[-1]) != CACHE_TOKENS:
        raise RuntimeError(f"the server has room for {found[-1:]} tokens; expected {CACHE_TOKENS} (see {server.log})")


def seeded(server: Server, batch: int, sampling: tuple[dict, dict]) -> list[list[int]]:
    """The tokens of prompts and seeds that are the same each time."""
    prompts = [[1000 + 7 * row + 3 * place for place in range(PROMPT_TOKENS)] for row in range(batch)]
    params = {**sampling[0], "max_new_tokens": COMPARED_TOKENS, "ignore_eos": True}
    rows = [params | {"sampling_seed": row} for row in range(batch)]
    answers = server.generate(input_ids=prompts, sampling_params=rows, **sampling[1])
    return [answer["output_ids"] for answer in answers]


@contextlib.contextmanager
def made_model(name: str) -> Iterator[Path]:
    """A folder with what a server needs of the model besides weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(markov.config(markov.SIZES[name])))
        markov.write_tokenizer(model, markov.SIZES[name].vocab_size)  # grammars are made of its tokens
        yield model


def server_of(model: Path, backend: str, environment: dict[str, str], log: Path) -> Server:
    """Not started yet. Its counters are in the log five times a second."""
    variables = {"FLASHSAMPLE_LOG_SECONDS": "0.2"} | environment
    return Server(model, SERVER_ARGUMENTS, backend=backend, log=log, environment=variables)


def measure_model(
    name: str,
    batches: list[int],
    samplings: list[str],
    pairs: int,
    log_folder: Path,
    profiles: dict | None,
    backends: dict[str, tuple[str, dict[str, str]]],
) -> Iterator[list[dict]]:
    """The rows of one cell after the other."""
    baseline, subject = backends
    with made_model(name) as model:
        servers = {}
        try:
            for label, (backend, environment) in backends.items():
                started = time.monotonic()
                log = log_folder / f"{name}-{label.replace(' ', '-')}.log"
                servers[label] = server_of(model, backend, environment, log)
                servers[label].start()
                servers[label].wait_until_ready()  # one after the other: each measures the memory that is free
                check_capacity(servers[label])
                for sampling in samplings:  # compiles what the first such request compiles
                    generate(servers[label], 2, SAMPLING[sampling], 4)
                print(f"{name} {label}: ready after {time.monotonic() - started:.0f} s", flush=True)
            stock, ours = servers[baseline], servers[subject]
            for sampling in samplings:
                request = SAMPLING[sampling]
                for batch in batches:
                    for server in servers.values():
                        generate(server, batch, request, SHORT)
                    before, host_before, batches_before = counted(ours)
                    samples: dict[str, list[float]] = {baseline: [tpot_us(stock, batch, request)], subject: []}
                    for _ in range(pairs):
                        samples[subject].append(tpot_us(ours, batch, request))
                        samples[baseline].append(tpot_us(stock, batch, request))
                    after, host_after, batches_after = counted(ours)
                    host_us = (host_after - host_before) / max(1, batches_after - batches_before)
                    used = {path: after[path] - before[path] for path in after}
                    used["fused"] -= 2  # the two tokens that counted itself asks for
                    total = sum(used.values())
                    rows: list[dict] = []
                    for label, values in samples.items():
                        shares = {path: round(count / total, 4) for path, count in used.items()}
                        rows.append(
                            {
                                "model": name,
                                "tp": 1,
                                "batch": batch,
                                "sampling": sampling,
                                "backend": label,
                                "tpot_us": round(statistics.median(values), 1),
                                "tpot_us_all": [round(value, 1) for value in values],
                                "path_share": shares if label == subject else {label: 1.0},
                                "host_us": round(host_us, 1) if label == subject else None,
                            }
                        )
                    if backends is SCREENS and batch in COMPARED_BATCHES:
                        one, other = (seeded(server, batch, request) for server in servers.values())
                        rows[-1]["same_answers"] = sum(a == b for a, b in zip(one, other, strict=True))
                    ours_us, stock_us = (statistics.median(samples[key]) for key in (subject, baseline))
                    same = rows[-1].get("same_answers")
                    print(
                        f"{name} {sampling:12} B={batch:<3} {baseline} {stock_us:7.0f} us, "
                        f"{subject} {ours_us:7.0f} us, "
                        + (f"{same} answers the same, " if same is not None else "")
                        + f"ratio {ours_us / stock_us:.3f}, fused {used['fused'] / total:.3f}, host {host_us:.0f} us",
                        flush=True,
                    )
                    yield rows
            if profiles is not None:
                for label, server in servers.items():
                    folder = log_folder / f"{name}-{label.replace(' ', '-')}-trace"
                    for sampling in samplings:
                        server.profile(folder / sampling, steps=40)
                        generate(server, 32, SAMPLING[sampling], 80)
                        profiles.setdefault(name, {}).setdefault(sampling, {})[label] = step_profile.summarise(
                            folder / sampling
                        )
        finally:
            for server in servers.values():
                server.stop()


def measure_host(
    name: str, batches: list[int], samplings: list[str], log_folder: Path, screen: str
) -> Iterator[list[dict]]:
    """Microseconds of the sampler's host time per step, of our server alone: in long answers, whose batches stay as
    they are, and in answers of ``SHORT`` tokens, whose steps are hardly ever replayed."""
    log = log_folder / f"{name}-alone-screen-{screen}.log"
    with made_model(name) as model, server_of(model, "flashsample", {"FLASHSAMPLE_SCREEN": screen}, log) as server:
        check_capacity(server)
        for sampling in samplings:
            for batch in batches:
                generate(server, batch, SAMPLING[sampling], LONG)  # compiles, and captures this batch's steps
                found = {}
                for which, tokens, answers in (("host_us", ALONE_TOKENS, 1), ("host_us_short", SHORT, 20)):
                    _, before, batches_before = counted(server)
                    for _ in range(answers):
                        generate(server, batch, SAMPLING[sampling], tokens)
                    _, after, batches_after = counted(server)
                    found[which] = round((after - before) / max(1, batches_after - batches_before), 1)
                about = {"model": name, "tp": 1, "batch": batch, "sampling": sampling, "screen": screen}
                print(
                    f"{name} screen {screen:4} {sampling:12} B={batch:<3} host {found['host_us']:.0f} us per step, "
                    f"{found['host_us_short']:.0f} us in short answers",
                    flush=True,
                )
                yield [about | {"backend": "flashsample", **found}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--models", nargs="+", choices=markov.SIZES, default=MODELS)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--pairs", type=int, default=3, help="measurements of ours per cell; stock gets one more")
    parser.add_argument("--profile", type=Path, help="also trace decode steps at batch 32 and write their call counts")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "flashsample-serve")
    parser.add_argument("--screen", action="store_true", help="compare our server without a screen and with one")
    parser.add_argument("--alone", choices=["auto", "on", "off"], help="host time of our server alone, its screen so")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of what is not measured now")
    options = parser.parse_args()
    if options.alone and (options.screen or options.profile):
        parser.error("--alone measures one server by itself; expected neither --screen nor --profile")

    random.seed(1)
    environment = measure.environment()
    environment |= {
        "sglang": importlib.metadata.version("sglang"),
        "flashinfer": importlib.metadata.version("flashinfer-python"),
        "sgl-flashsample": importlib.metadata.version("sgl-flashsample"),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "server_arguments": SERVER_ARGUMENTS,
        "tokens": {"prompt": PROMPT_TOKENS, "short": SHORT, "long": ALONE_TOKENS if options.alone else LONG},
    }
    rows, runs = [], {}
    if options.keep and options.out.exists():
        kept = json.loads(options.out.read_text())
        rows = [
            row
            for row in kept["rows"]
            if row["model"] not in options.models
            or row["sampling"] not in options.samplings
            or row.get("screen") != options.alone
        ]
        runs = kept["env"].get("runs", {})
    profiles: dict | None = {} if options.profile else None
    backends = SCREENS if options.screen else BACKENDS
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        asked = (name, options.batches, options.samplings)
        if options.alone:
            cells = measure_host(*asked, options.logs, options.alone)
        else:
            cells = measure_model(*asked, options.pairs, options.logs, profiles, backends)
        run = {"command": environment["command"], "date": environment["date"], "gpu": environment["nvidia_smi"]}
        environment["runs"] = runs
        for cell in cells:  # what ends a run leaves the file with all that it has measured
            rows += cell
            runs[f"{name}, {cell[0]['sampling']}"] = run
            options.out.write_text(json.dumps({"env": environment, "rows": rows}, indent=1) + "\n")
    if options.profile:
        if options.keep and options.profile.exists():
            kept = json.loads(options.profile.read_text())["calls_per_step"]
            profiles = kept | {name: kept.get(name, {}) | own for name, own in profiles.items()}
        options.profile.write_text(json.dumps({"env": environment, "calls_per_step": profiles}, indent=1) + "\n")


if __name__ == "__main__":
    main()
