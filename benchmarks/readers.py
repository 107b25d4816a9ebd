"""Times every reader of the declared space on this GPU beside the GEMM alone and the fused pass, writes JSON.

    python benchmarks/readers.py --out benchmarks/results/h200-readers.json

The tables READS and PATHS (sgl_flashsample/tuned.py) are to follow from this file's output. Each reader is screened
alone, on logits that are there; the best are then raced behind their GEMM, which is the path as a server runs it.
``--dry-run`` runs all of it on small shapes and times nothing; it works without a GPU.
"""

from __future__ import annotations

import os
import sys

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import features
import torch
from features import Batch, Mode, Shape
from sgl_flashsample.autotune import measure, space
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import num_parts
from sgl_flashsample.kernels.sample_logits import num_read_parts, sample_logits
from sgl_flashsample.kernels.tiles import ReadConfig

from sgl_flashsample import Path as SamplingPath
from sgl_flashsample import sample
from sgl_flashsample.tuned import draw_for, read_for, tile_for

MODES = {name: features.MODES[name] for name in ("plain", "k50p90", "edits")}
BATCHES = (64, 128, 256, 512)
DRY = Shape(64, 1024, (3,), torch.float32, "cpu")
DRY_CANDIDATES = 2
PROFILE = "typical"


def candidates(shape: Shape, mode: Mode) -> list[ReadConfig]:
    found = list(space.read_candidates(mode.work.truncates))
    return found if shape.device == "cuda" else found[:DRY_CANDIDATES]


def read_call(
    logits: torch.Tensor, head: LMHead, batch: Batch, mode: Mode, config: ReadConfig, workspace: Workspace
) -> Callable[[], torch.Tensor]:
    """The reader alone. Returns the tokens."""
    params = batch.params(mode)

    def call() -> torch.Tensor:
        return sample_logits(
            logits,
            head.source,
            params.temperature,
            params.seed,
            params.position,
            config,
            truncation=params.truncation,
            edits=params.edits,
            workspace=workspace,
            draw=draw_for(head),
        )[0]

    return call


def behind_gemm(
    batch: Batch, head: LMHead, logits: torch.Tensor, call: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def both() -> torch.Tensor:
        torch.mm(batch.hidden, head.weight.T, out=logits)
        return call()

    return both


def fused_call(batch: Batch, head: LMHead, mode: Mode, workspace: Workspace) -> Callable[[], torch.Tensor]:
    params = batch.params(mode)
    return lambda: sample(batch.hidden, head, params, workspace=workspace, path=SamplingPath.FUSED).token_ids


def compile_one(job: tuple[str, ReadConfig | None]) -> str | None:
    """Compiles into the disk cache by running once on a small problem: the binary of a reader does not depend on V.
    No reader: the fused pass's tiles."""
    name, config = job
    mode, shape = MODES[name], Shape(vocab=1024)
    try:
        batch = Batch(shape, 128)
        head = LMHead(torch.zeros(shape.vocab, shape.hidden, dtype=shape.dtype, device="cuda"))
        if config is None:
            for rows in BATCHES:
                fused_call(Batch(shape, rows), head, mode, Workspace(rows * 512, batch.hidden.device))()
        else:
            logits = torch.zeros(128, shape.vocab, dtype=shape.dtype, device="cuda")
            read_call(logits, head, batch, mode, config, Workspace(128 * 512, logits.device))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return None


def compile_all() -> set[tuple[str, ReadConfig]]:
    """The readers that do not compile or run."""
    seen: dict[tuple[str, Any], tuple[str, ReadConfig]] = {}
    for name, mode in MODES.items():
        for config in candidates(Shape(), mode):
            # How the vocabulary is cut is no constant of the binary.
            key = (name, dataclasses.replace(config, ctas_per_sm=1, least_parts=1))
            seen.setdefault(key, (name, config))
    jobs: list[tuple[str, ReadConfig | None]] = [*((name, None) for name in MODES), *seen.values()]
    started = time.time()
    workers = max(1, min(15, len(jobs), (os.cpu_count() or 2) - 1))
    rejected = set()
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for (name, config), error in zip(jobs, pool.map(compile_one, jobs, chunksize=2), strict=True):
            if error:
                print(f"  rejected {name} {config}: {error}", flush=True)
                if config is not None:
                    rejected.add((name, dataclasses.replace(config, ctas_per_sm=1, least_parts=1)))
    print(f"{len(jobs)} kernels compiled in {time.time() - started:.0f} s, {len(rejected)} rejected", flush=True)
    return rejected


def race_mode(
    shape: Shape, head: LMHead, batch: Batch, name: str, configs: list[ReadConfig], rounds: int, top: int
) -> list[dict]:
    """One mode at one batch size: all readers screened, the best of them raced behind a GEMM."""
    race = measure.race if shape.device == "cuda" else features.run_once
    mode, rows, device = MODES[name], batch.rows, batch.hidden.device
    shipped = read_for(device, head.vocab_size, rows, mode.work)
    configs = list(dict.fromkeys([*configs, shipped]))
    tile = tile_for(head, rows, mode.work)
    slots = [num_parts(head, rows, tile), *(num_read_parts(head.vocab_size, rows, c, device) for c in configs)]
    workspace = Workspace(max(slots) * rows, device)
    logits = workspace.gemm(rows, shape.vocab, shape.dtype)

    def gemm() -> torch.Tensor:
        return torch.mm(batch.hidden, head.weight.T, out=logits)

    gemm()
    readers = {repr(config): read_call(logits, head, batch, mode, config, workspace) for config in configs}
    tokens = {config: call() for config, call in readers.items()}
    first = next(iter(tokens.values()))
    differing = {config for config, token in tokens.items() if not torch.equal(token, first)}

    def refresh() -> None:
        batch.refresh()
        gemm()

    screened = race(readers, rounds=2, replays=2, before_round=refresh)
    ranked = sorted(readers, key=lambda config: screened[config].us)[:top]
    ranked += [repr(shipped)] if repr(shipped) not in ranked else []
    calls: dict[str, Callable[[], object]] = {"gemm": gemm, "fused": fused_call(batch, head, mode, workspace)}
    calls |= {config: behind_gemm(batch, head, logits, readers[config]) for config in ranked}
    timings = race(calls, rounds=rounds, replays=3, before_round=refresh)
    common = {"D": shape.hidden, "V": shape.vocab, "B": rows, "mode": name}
    found = []
    for call, timing in timings.items():
        config = next((c for c in configs if repr(c) == call), None)
        found.append(
            common
            | {
                "path": call if config is None else "logits",
                "us": round(timing.us, 2),
                "us_spread": round(timing.spread, 2),
                "over_gemm": round(timing.us / timings["gemm"].us, 4),
                "alone_us": None if config is None else round(screened[call].us, 2),
                "config": None if config is None else dataclasses.asdict(config),
                "shipped": config == shipped,
                "same_tokens": call not in differing,
            }
        )
    return found


def report(rows: list[dict]) -> str:
    lines = [f"{rows[0]['mode']} B={rows[0]['B']}:"]
    for row in sorted(rows, key=lambda row: row["us"]):
        about = "" if row["config"] is None else f" (alone {row['alone_us']:.1f}) {tuple(row['config'].values())}"
        marks = (" shipped" if row["shipped"] else "") + ("" if row["same_tokens"] else " OTHER TOKENS")
        lines.append(
            f"  {row['us']:7.1f} +- {row['us_spread']:4.1f}  {row['over_gemm']:.3f}  {row['path']}{about}{marks}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--top", type=int, default=5, help="readers raced behind their GEMM, beside the shipped one")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, nothing is timed; needs no GPU")
    options = parser.parse_args()
    shape = DRY if options.dry_run else Shape(batches=BATCHES)
    if options.batches:
        shape = dataclasses.replace(shape, batches=tuple(options.batches))

    torch.manual_seed(0)
    rejected = compile_all() if shape.device == "cuda" else set()
    started = time.time()
    head = features.make_head(shape, PROFILE)
    result: dict[str, Any] = {"env": measure.environment() if shape.device == "cuda" else {}, "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for rows in shape.batches:
        batch = Batch(shape, rows)
        for name in options.modes:
            configs = [
                config
                for config in candidates(shape, MODES[name])
                if (name, dataclasses.replace(config, ctas_per_sm=1, least_parts=1)) not in rejected
            ]
            timed = race_mode(shape, head, batch, name, configs, options.rounds, options.top)
            print(report(timed), flush=True)
            result["rows"] += timed
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"measured in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
