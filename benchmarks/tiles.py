"""Times every tile of the declared space on this GPU, checks that all draw the same tokens, writes JSON.

    python benchmarks/tiles.py --out benchmarks/results/h200-tiles.json

The shipped tile table (sgl_flashsample/tuned.py) comes from this file's output.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from sgl_flashsample.autotune import measure, space
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_parts
from sgl_flashsample.kernels.tiles import TileConfig

from sgl_flashsample.tuned import tile_for

SHAPES = [(2048, 151936), (4096, 151936)]
BATCHES = [1, 8, 16, 32, 64, 128, 256, 512]


@triton.jit
def _read_kernel(source_ptr, out_ptr, n, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), n // BLOCK, NUM_PROGRAMS, num_stages=STAGES):
        acc ^= tl.load(source_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), acc)


def read_call(tensor: torch.Tensor, programs_per_sm: int = 8, block: int = 2048, num_warps: int = 8, stages: int = 4):
    """Reads every byte of ``tensor`` once, whole blocks of 4-byte words of it: the floor of anything that does."""
    words = tensor.view(-1).view(torch.int32)
    programs = torch.cuda.get_device_properties(0).multi_processor_count * programs_per_sm
    out = torch.empty(programs * block, dtype=torch.int32, device=tensor.device)
    return lambda: _read_kernel[(programs,)](
        words, out, words.numel(), NUM_PROGRAMS=programs, BLOCK=block, STAGES=stages, num_warps=num_warps
    )


def stock_call(states: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor):
    """What SGLang's sampler does for temperature-only rows: GEMM, float32 copy, divide, softmax, exponential race."""

    def call() -> torch.Tensor:
        logits = torch.nn.functional.linear(states, weight).float()
        logits.div_(temperature[:, None])
        logits[:] = torch.softmax(logits, -1)
        waiting = torch.empty_like(logits).exponential_(1.0).clamp_min_(torch.finfo(torch.float32).tiny)
        return (logits / waiting).argmax(-1)

    return call


def parameters(rows: int) -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.ones(rows, device="cuda"),
        "seed": torch.arange(rows, device="cuda") * 7919,
        "position": torch.arange(rows, device="cuda") + 100,
    }


def compile_one(job: tuple[int, int, TileConfig]) -> str | None:
    """Compiles into the disk cache by running once on a small head: the binary does not depend on V."""
    hidden_size, rows, tile = job
    try:
        head = LMHead(torch.zeros(1024, hidden_size, dtype=torch.bfloat16, device="cuda"))
        states = torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device="cuda")
        lm_head_sample(states, head, **parameters(rows), tile=tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--shapes", type=int, nargs="+", default=[n for s in SHAPES for n in s], help="D V D V ...")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--top", type=int, default=8, help="best configurations kept per batch size in the file, beside the shipped one"
    )
    options = parser.parse_args()
    shapes = list(zip(options.shapes[::2], options.shapes[1::2], strict=True))

    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    jobs: dict[tuple[int, int, TileConfig], None] = {}
    for hidden_size, _ in shapes:
        for rows in options.batches:
            for tile in space.candidates(rows, hidden_size, 2, shared, tma=True):
                key = (hidden_size, min(rows, tile.block_b) if rows > 1 else 2, tile)
                jobs[key] = None
    started = time.time()
    workers = max(1, (os.cpu_count() or 2) - 1)
    rejected: dict[tuple[int, TileConfig], str] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for (hidden_size, _, tile), error in zip(jobs, pool.map(compile_one, jobs, chunksize=4), strict=True):
            if error:
                rejected[hidden_size, tile] = error
    print(f"{len(jobs)} configurations compiled in {time.time() - started:.0f} s, {len(rejected)} rejected", flush=True)
    for (hidden_size, tile), error in list(rejected.items())[:5]:
        print("  rejected", hidden_size, tile, error, flush=True)

    result = {"env": measure.environment(), "rows": []}
    for hidden_size, vocab in shapes:
        weight = (torch.randn(vocab, hidden_size, device="cuda") * 3 / hidden_size**0.5).bfloat16()
        head = LMHead(weight)
        for rows in options.batches:
            states = torch.randn(rows, hidden_size, device="cuda").bfloat16()
            params = parameters(rows)
            tiles = [
                t for t in space.candidates(rows, hidden_size, 2, shared, tma=True) if (hidden_size, t) not in rejected
            ]
            workspace = Workspace(max(num_parts(head, rows, t) for t in tiles) * rows, weight.device)
            calls = {
                "read": read_call(weight),
                "gemm": lambda s=states, w=weight: torch.nn.functional.linear(s, w),
                "stock": stock_call(states, weight, params["temperature"]),
            }
            tokens = {}
            for tile in tiles:
                tokens[tile], _, _ = lm_head_sample(states, head, **params, tile=tile, workspace=workspace)
                calls[repr(tile)] = lambda h=head, t=tile, s=states, p=params, ws=workspace: lm_head_sample(
                    s, h, **p, tile=t, workspace=ws
                )
            reference = tokens[tiles[0]]
            differing = [repr(t) for t in tiles if not torch.equal(tokens[t], reference)]

            def refresh(s=states, p=params) -> None:
                s.normal_()
                p["position"].add_(1)

            # Screen everything once, then race the best against the floor and the GEMM.
            screened = measure.race(calls, rounds=2, replays=2, before_round=refresh)
            ranked = sorted(tiles, key=lambda t: screened[repr(t)].us)[: options.top]
            shipped = tile_for(head, rows)
            ranked += [shipped] if shipped in tiles and shipped not in ranked else []
            finalists = {name: calls[name] for name in ["read", "gemm", "stock", *map(repr, ranked)]}
            timings = measure.race(finalists, rounds=options.rounds, replays=4, before_round=refresh)
            floor = timings["read"].us
            bytes_read = weight.numel() * weight.element_size()
            print(
                f"D={hidden_size} B={rows}: read {floor:.1f} us ({bytes_read / floor / 1e6:.2f} TB/s), "
                f"gemm {timings['gemm'].us:.1f}, stock {timings['stock'].us:.1f}; "
                f"{len(tiles)} tiles, {len(differing)} with other tokens",
                flush=True,
            )
            for tile in sorted(ranked, key=lambda t: timings[repr(t)].us):
                timing = timings[repr(tile)]
                print(f"    {timing.us:7.1f} +- {timing.spread:4.1f}  {timing.us / floor:.3f}  {tile}", flush=True)
                result["rows"].append(
                    {
                        "D": hidden_size,
                        "V": vocab,
                        "B": rows,
                        "us": round(timing.us, 2),
                        "us_spread": round(timing.spread, 2),
                        "read_us": round(floor, 2),
                        "gemm_us": round(timings["gemm"].us, 2),
                        "stock_us": round(timings["stock"].us, 2),
                        "config": dataclasses.asdict(tile),
                        "same_tokens": repr(tile) not in differing,
                    }
                )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
