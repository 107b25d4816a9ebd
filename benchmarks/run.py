"""Runs a benchmark by its name and writes its result file.

    python benchmarks/run.py                      the list of benchmarks
    python benchmarks/run.py NAME --help          what one measures, and its options
    python benchmarks/run.py NAME --out FILE      measures, and writes FILE as results come

A benchmark is an entry of ``BENCHMARKS`` and of the table of the same name in its module.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from common import Benchmark


class Entry(NamedTuple):
    """module: of this folder. measures, needs: for people."""

    module: str
    measures: str
    needs: str


BENCHMARKS = {
    "kernels": Entry(
        "step",
        "the whole last step, LM head to token, on every path of ours and with every baseline",
        "a GPU, FlashInfer",
    ),
    "features": Entry(
        "step",
        "every sampling feature, with a screen and without; searches; tokens against the reference",
        "a GPU, FlashInfer",
    ),
    "quantised": Entry("step", "a head in float8_e4m3fn beside the same head in bfloat16, in one race", "a GPU"),
    "rivals": Entry(
        "rivals",
        "the whole last step raced against FlashInfer, vLLM's Triton sampler, FlashSampling, SGLang and torch.compile",
        "a GPU, the rivals that are to be raced",
    ),
    "screened": Entry(
        "screened",
        "the screened path: speed, tokens against the fused path, distribution, what a server without a table decides",
        "a GPU, FlashInfer",
    ),
    "serve": Entry("serve", "time per output token of real SGLang servers, stock and ours", "a GPU, SGLang"),
    "load": Entry(
        "load",
        "1,000 clients of each server for ten minutes, with mixed features: lost requests, memory, slowest answers",
        "two GPUs per model, SGLang; or a CPU, with `--models tiny --concurrency 64`",
    ),
    "traffic": Entry(
        "traffic",
        "tokens per second of servers whose requests end and join at every step, stock and ours",
        "a GPU, SGLang",
    ),
    "speculation": Entry(
        "speculation",
        "speculative decoding in servers: tokens per second, accepted drafts and parts of a step",
        "a GPU, SGLang",
    ),
    "ranks": Entry(
        "ranks",
        "ranks that share an LM head, without a server: their tokens against one rank's, and the time of an exchange",
        "two GPUs, SGLang",
    ),
    "tuning": Entry(
        "tuning",
        "the promises of the autotuner: time, regret, batches between sizes, replay",
        "a GPU, the extra `tune`",
    ),
    "hot-path": Entry(
        "hot_path", "10,000 steps of the sampler under the profiler: waits, allocations, loaded kernels", "a GPU"
    ),
    "cpu": Entry(
        "cpu",
        "the cpu path beside SGLang's sampler, PyTorch's operations and the time to read the logits once",
        "a CPU, the extra `cpu`",
    ),
}


def load(name: str) -> Benchmark:
    return importlib.import_module(BENCHMARKS[name].module).BENCHMARKS[name]


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        known = "\n".join(f"{known:12} {entry.measures} (needs {entry.needs})" for known, entry in BENCHMARKS.items())
        if name not in ("", "-h", "--help"):
            sys.exit(f"error: there is no benchmark {name!r}; there are\n{known}")
        print(f"{known}\n\npython benchmarks/run.py NAME --help")
        return 0
    benchmark = load(name)
    from common import Result, read_result  # after the benchmark, which turns the interpreter on for --dry-run

    parser = benchmark.parser(name)
    options = parser.parse_args(sys.argv[2:])
    try:
        if options.out.exists() and not options.out.is_file():
            raise ValueError(f"--out is {options.out}, which is not a plain file")
        benchmark.prepare(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        kept = read_result(options.out, f"run.py {name}") if options.keep and options.out.exists() else {}
        result = Result(options.out, benchmark, kept)
    except ValueError as error:
        sys.exit(f"error: {error}")
    return benchmark.measure(options, result)


if __name__ == "__main__":
    sys.exit(main())
