"""Times every sampling feature of the fused pass on this GPU beside plain fused sampling and its rivals, writes JSON.

    python benchmarks/features.py --out benchmarks/results/h200-features.json

Also counts, per feature and shape of the distribution, how many rows the pass over the kept logits left to the search,
and compares tokens with the float64 reference. ``--dry-run`` runs every path on small shapes and times nothing; it
works without a GPU.
"""

from __future__ import annotations

import os
import sys

if "--dry-run" in sys.argv:
    from sgl_flashsample.demo import interpreter

    interpreter.turn_on()  # before triton is imported

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floor
import torch
from sgl_flashsample.autotune import measure
from sgl_flashsample.autotune.inputs import as_bitmask
from sgl_flashsample.kernels.features import LogitEdits, Truncation
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import num_parts
from sgl_flashsample.kernels.reference import truncated_sample_ref

from sgl_flashsample.api import BatchParams, sample
from sgl_flashsample.tuned import Work, tile_for

# Logits at temperature 1: ``-slope * log(rank)`` plus Gaussian noise of this deviation.
PROFILES = {"peaked": (2.5, 3.0), "typical": (1.2, 2.0), "flat": (0.0, 1.0)}
COMPARED_AT_ONCE = 64  # rows of float64 reference


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is measured. rows: sampled per profile and mode for the count of searches; compared: of those, with the
    reference."""

    hidden: int = 4096
    vocab: int = 151936
    batches: tuple[int, ...] = (1, 8, 16, 32, 64)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    rows: int = 4096
    compared: int = 256


DRY = Shape(64, 1024, (1, 4), torch.float32, "cpu", rows=8, compared=4)


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to ask for tokens. truncation: top_k, top_p, min_p. edits: fields of ``LogitEdits``."""

    truncation: tuple[int, float, float] | None = None
    edits: tuple[str, ...] = ()
    greedy: bool = False
    logprob: bool = False

    @property
    def work(self) -> Work:
        return Work.of(self.truncation is not None, bool(self.edits))

    @property
    def kernel(self) -> tuple:
        """Modes that are equal here share their binaries."""
        return self.work, self.logprob


ALL_EDITS = ("additive", "scaling", "mask", "bias")
MODES = {
    "plain": Mode(),
    "k20p95": Mode((20, 0.95, 0.0)),
    "k50p90": Mode((50, 0.9, 0.0)),
    "p90": Mode((0, 0.9, 0.0)),
    "minp05": Mode((0, 1.0, 0.05)),
    "k1000": Mode((1000, 1.0, 0.0)),
    "greedy": Mode(greedy=True),
    "penalties": Mode(edits=("additive", "scaling")),
    "bias": Mode(edits=("bias",)),
    "bitmask": Mode(edits=("mask",)),
    "edits": Mode(edits=ALL_EDITS),
    "edits+k50p90": Mode((50, 0.9, 0.0), ALL_EDITS),
    "logprob": Mode(logprob=True),
}


class Batch:
    """The inputs of one batch size: hidden states and positions are fresh after each ``refresh``, all else stays."""

    def __init__(self, shape: Shape, rows: int) -> None:
        device, vocab = shape.device, shape.vocab
        self.rows = rows
        self.hidden = torch.empty(rows, shape.hidden, dtype=shape.dtype, device=device)
        self.seed = torch.arange(rows, device=device) * 7919
        self.position = torch.arange(rows, device=device) + 100
        self.rival_seed = torch.tensor([1234], device=device)
        self.rival_offset = torch.tensor([0], device=device)
        # Penalties of a few hundred tokens that have been seen, and a grammar that allows a tenth of the vocabulary.
        seen = torch.randint(vocab, (rows, min(200, vocab)), device=device)
        self.edits = {
            "additive": torch.zeros(rows, vocab, device=device).scatter_(1, seen, -0.5),
            "scaling": torch.ones(rows, vocab, device=device).scatter_(1, seen, 1.1),
            "bias": torch.zeros(rows, vocab, device=device).scatter_(1, seen[:, :20], 2.0),
            "mask": as_bitmask(torch.rand(rows, vocab, device=device) < 0.1),
        }
        self.refresh()

    def refresh(self) -> None:
        self.hidden.normal_()
        self.hidden[:, 0] = 1.0  # the column of the head that depends on the rank
        self.position.add_(1)
        self.rival_offset.add_(4096)

    def params(self, mode: Mode) -> BatchParams:
        device, truncation, edits = self.hidden.device, None, None
        if mode.truncation is not None:
            top_k, top_p, min_p = mode.truncation
            truncation = Truncation(
                torch.full((self.rows,), top_k, dtype=torch.int32, device=device),
                torch.full((self.rows,), top_p, device=device),
                torch.full((self.rows,), min_p, device=device),
            )
        if mode.edits:
            edits = LogitEdits(**{name: self.edits[name] for name in mode.edits})
            flags = torch.full((self.rows,), int(edits.kinds), dtype=torch.int32, device=device)
            edits = dataclasses.replace(edits, rows=flags)  # a server always says which row has which edits
        temperature = torch.full((self.rows,), 0.0 if mode.greedy else 1.0, device=device)
        return BatchParams(temperature, self.seed, self.position, truncation, edits, mode.greedy)

    def edit_bytes(self, mode: Mode) -> int:
        return sum(self.edits[name].numel() * self.edits[name].element_size() for name in mode.edits)


def make_head(shape: Shape, profile: str) -> LMHead:
    slope, deviation = PROFILES[profile]
    generator = torch.Generator(shape.device).manual_seed(1)
    weight = torch.randn(shape.vocab, shape.hidden, device=shape.device, generator=generator)
    weight *= deviation / shape.hidden**0.5
    rank = torch.randperm(shape.vocab, device=shape.device, generator=generator) + 1
    weight[:, 0] = -slope * rank.float().log()
    return LMHead(weight.to(shape.dtype))


def make_workspace(shape: Shape, head: LMHead, rows: int) -> Workspace:
    slots = max(num_parts(head, rows, tile_for(head, rows, work)) * rows for work in Work)
    return Workspace(slots, torch.device(shape.device))


def fused_call(
    batch: Batch, head: LMHead, mode: Mode, workspace: Workspace
) -> Callable[[], tuple[torch.Tensor, BatchParams]]:
    params = batch.params(mode)

    def call() -> tuple[torch.Tensor, BatchParams]:
        out = sample(batch.hidden, head, params, return_logprob=mode.logprob, workspace=workspace)
        return out.token_ids, params

    return call


def rival_calls(batch: Batch, head: LMHead, flashinfer: Any, eager: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """{mode: GEMM and the best sampling for it outside a fused pass}. FlashInfer reads seed and offset from tensors:
    its default, the generator of PyTorch, cannot be asked during the capture of a graph."""
    hidden, weight = batch.hidden, head.weight
    linear = torch.nn.functional.linear
    calls: dict[str, Callable[[], torch.Tensor]] = {"greedy": lambda: linear(hidden, weight).argmax(-1)}
    if flashinfer is None:
        return calls
    noise: dict[str, Any] = {} if eager else {"seed": batch.rival_seed, "offset": batch.rival_offset}
    noise["deterministic"] = True

    def plain() -> torch.Tensor:
        return flashinfer.sampling_from_logits(linear(hidden, weight).float(), **noise)

    def top_k_top_p(params: BatchParams) -> Callable[[], torch.Tensor]:
        assert params.truncation is not None
        top_k = torch.where(params.truncation.top_k < 1, head.vocab_size, params.truncation.top_k)
        top_p = params.truncation.top_p
        return lambda: flashinfer.top_k_top_p_sampling_from_logits(
            linear(hidden, weight).float(), top_k, top_p, filter_apply_order="joint", **noise
        )

    def min_p(params: BatchParams) -> Callable[[], torch.Tensor]:
        assert params.truncation is not None
        least = params.truncation.min_p
        return lambda: flashinfer.min_p_sampling_from_probs(
            torch.softmax(linear(hidden, weight).float(), -1), least, **noise
        )

    calls["plain"] = plain
    for name, mode in MODES.items():
        if mode.truncation is not None and not mode.edits:
            calls[name] = (min_p if mode.truncation[2] else top_k_top_p)(batch.params(mode))
    return calls


def import_flashinfer() -> Any:
    try:
        import flashinfer.sampling
    except Exception as error:  # it looks for compilers and GPUs when it is imported
        print(f"no FlashInfer rivals: {type(error).__name__}: {error}", flush=True)
        return None
    return flashinfer.sampling


def usable_rivals(shape: Shape, flashinfer: Any) -> dict[str, str]:
    """{mode: "graph", or "eager" where its rival cannot be in a CUDA graph}; a rival that fails is left out."""
    head = LMHead(torch.zeros(shape.vocab, shape.hidden, dtype=shape.dtype, device=shape.device))
    batch, usable = Batch(shape, 2), {}
    for timed in ("graph", "eager"):
        for name, call in rival_calls(batch, head, flashinfer, timed == "eager").items():
            if name in usable:
                continue
            try:
                if shape.device == "cuda" and timed == "graph":
                    measure.capture(call).replay()
                    torch.cuda.synchronize()
                else:
                    call()
                usable[name] = timed
            except Exception as error:
                reason = str(error).splitlines()[0][:120] if str(error) else ""
                print(f"the rival of {name} cannot be timed ({timed}): {type(error).__name__}: {reason}", flush=True)
    return usable


def run_once(
    calls: dict[str, Callable[[], object]], rounds: int, replays: int, before_round: Callable[[], None]
) -> dict[str, measure.Timing]:
    """In place of a race in a dry run."""
    before_round()
    for call in calls.values():
        call()
    return {name: measure.Timing(1.0, 0.0, rounds) for name in calls}


def race_modes(
    shape: Shape, profile: str, head: LMHead, batch: Batch, flashinfer: Any, usable: dict[str, str], rounds: int
) -> list[dict]:
    """One race of all modes and their rivals at one batch size."""
    race, eager_race = (measure.race, measure.race_replays) if shape.device == "cuda" else (run_once, run_once)
    workspace = make_workspace(shape, head, batch.rows)
    calls: dict[str, Callable[[], object]] = {"gemm": lambda: torch.nn.functional.linear(batch.hidden, head.weight)}
    if shape.device == "cuda":
        calls["read"] = floor.read_call(head.weight)
    for name, mode in MODES.items():
        calls[f"fused {name}"] = fused_call(batch, head, mode, workspace)
    rivals: dict[str, dict[str, Callable[[], object]]] = {
        timed: {
            f"rival {name}": call
            for name, call in rival_calls(batch, head, flashinfer, timed == "eager").items()
            if usable.get(name) == timed
        }
        for timed in ("graph", "eager")
    }
    calls |= rivals["graph"]
    timings = race(calls, rounds=rounds, replays=3, before_round=batch.refresh)
    if rivals["eager"]:
        timings |= eager_race(rivals["eager"], rounds=rounds, replays=3, before_round=batch.refresh)
    plain = timings["fused plain"].us
    head_bytes = head.weight.numel() * head.weight.element_size()
    bytes_per_us = head_bytes / timings["read" if "read" in timings else "gemm"].us
    rows = []
    for name, timing in timings.items():
        kind, _, mode_name = name.partition(" ")
        mode = MODES.get(mode_name, MODES["plain"])
        path = kind if kind != "rival" else "torch" if mode_name == "greedy" else "flashinfer"
        rows.append(
            {
                "D": shape.hidden,
                "V": shape.vocab,
                "B": batch.rows,
                "profile": profile,
                "mode": mode_name or kind,
                "path": path,
                "timed": "eager" if name in rivals["eager"] else "graph",
                "us": round(timing.us, 2),
                "us_spread": round(timing.spread, 2),
                "over_plain": round(timing.us / plain, 4),
                "extra_bytes_us": (
                    round(batch.edit_bytes(mode) / bytes_per_us, 2) if kind == "fused" and mode.edits else None
                ),
            }
        )
    return rows


def count_searches(shape: Shape, profile: str, head: LMHead, batch: Batch) -> list[dict]:
    """Per mode with a truncation: how many rows were left to the search, and whether the tokens are the reference's."""
    workspace = make_workspace(shape, head, batch.rows)
    counted = []
    for name, mode in MODES.items():
        if mode.truncation is None:
            continue
        call = fused_call(batch, head, mode, workspace)
        seen = searched = compared = differing = near_ties = 0
        while seen < shape.rows:
            batch.refresh()
            token, params = call()
            kept = workspace.last_kept
            assert kept is not None
            seen += batch.rows
            searched += int((kept.rounds[: batch.rows] > 1).sum())
            for first in range(0, batch.rows if compared < shape.compared else 0, COMPARED_AT_ONCE):
                part = slice(first, first + COMPARED_AT_ONCE)
                assert params.truncation is not None
                want = truncated_sample_ref(
                    kept.logits[: batch.rows, : shape.vocab][part].double(),
                    *(values[part] for values in (params.temperature, params.seed, params.position)),
                    *(getattr(params.truncation, field)[part] for field in ("top_k", "top_p", "min_p")),
                )
                compared += len(want.token)
                differing += int(((token[part] != want.token) & ~want.near_tie).sum())
                near_ties += int(want.near_tie.sum())
        counted.append(
            {
                "profile": profile,
                "mode": name,
                "B": batch.rows,
                "rows": seen,
                "first_pass": seen - searched,
                "searched": searched,
                "compared": compared,
                "differ_from_reference": differing,
                "near_ties": near_ties,
            }
        )
    return counted


def compile_one(job: tuple[int, str]) -> str | None:
    """Compiles into the disk cache by running once; ``flashinfer`` builds its sampling module instead."""
    rows, name = job
    try:
        shape = Shape()
        if name == "flashinfer":
            import flashinfer.sampling

            flashinfer.sampling.sampling_from_logits(torch.zeros(2, 1000, device="cuda"))
        else:
            # A search's binary depends on the vocabulary size: the real one.
            head = LMHead(torch.zeros(shape.vocab, shape.hidden, dtype=shape.dtype, device="cuda"))
            fused_call(Batch(shape, rows), head, MODES[name], make_workspace(shape, head, rows))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return None


def compile_all(shape: Shape, flashinfer: Any) -> None:
    head = LMHead(torch.zeros(shape.vocab, shape.hidden, dtype=shape.dtype, device=shape.device))
    jobs: dict[tuple, tuple[int, str]] = {}
    for name, mode in MODES.items():
        for rows in shape.batches:
            jobs.setdefault((*mode.kernel, tile_for(head, rows, mode.work)), (rows, name))
    todo = [(0, "flashinfer")] * (flashinfer is not None) + list(jobs.values())
    started = time.time()
    workers = max(1, min(16, len(todo), (os.cpu_count() or 2) - 1))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for job, error in zip(todo, pool.map(compile_one, todo), strict=True):
            if error:
                print(f"  B={job[0]} {job[1]}: {error}", flush=True)
    print(f"{len(todo)} kernels compiled in {time.time() - started:.0f} s", flush=True)


def report(rows: list[dict]) -> str:
    """One line per mode of one race: fused, its ratio to plain, its rival's time over it."""
    by = {(row["path"], row["mode"]): row for row in rows}
    gemm = by["gemm", "gemm"]["us"]
    lines = [f"{rows[0]['profile']} B={rows[0]['B']}: GEMM {gemm:.1f} us"]
    for name in MODES:
        row = by["fused", name]
        rival = by.get(("flashinfer", name)) or by.get(("torch", name))
        line = f"  {name:13} {row['us']:7.1f} +- {row['us_spread']:4.1f}  {row['over_plain']:.3f}"
        if row["extra_bytes_us"] is not None:
            net = (row["us"] - row["extra_bytes_us"]) / by["fused", "plain"]["us"]
            line += f"  less {row['extra_bytes_us']:.1f} us of its bytes {net:.3f}"
        if rival is not None:
            line += f"  {rival['path']} ({rival['timed']}) {rival['us']:.1f}, x{rival['us'] / row['us']:.2f}"
        lines.append(line)
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """The worst of each kind, over profiles and batch sizes."""
    by = {(row["profile"], row["B"], row["path"], row["mode"]): row for row in result["rows"]}
    truncated = {name for name, mode in MODES.items() if mode.truncation and not mode.edits}
    fused = [row for row in result["rows"] if row["path"] == "fused"]
    worst = {
        "truncated over plain, at most": max(row["over_plain"] for row in fused if row["mode"] in truncated),
        "edits over plain, less their bytes, at most": max(
            (row["us"] - row["extra_bytes_us"]) / by[row["profile"], row["B"], "fused", "plain"]["us"]
            for row in fused
            if row["extra_bytes_us"] is not None
        ),
        "share of rows searched, at most": max(row["searched"] / row["rows"] for row in result["rounds"]),
    }
    ratios = [
        by[row["profile"], row["B"], "flashinfer", row["mode"]]["us"] / row["us"]
        for row in fused
        if (row["profile"], row["B"], "flashinfer", row["mode"]) in by and row["mode"] in truncated
    ]
    if ratios:
        worst["FlashInfer over truncated, at least"] = min(ratios)
    return "\n".join(f"{name}: {value:.4f}" for name, value in worst.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry-run", action="store_true", help="small shapes, nothing is timed; needs no GPU")
    options = parser.parse_args()
    shape = DRY if options.dry_run else Shape()
    if options.batches:
        shape = dataclasses.replace(shape, batches=tuple(options.batches))

    torch.manual_seed(0)
    flashinfer = import_flashinfer()
    if shape.device == "cuda":
        compile_all(shape, flashinfer)
    usable = usable_rivals(shape, flashinfer)
    result: dict[str, Any] = {"env": measure.environment() if shape.device == "cuda" else {}, "rows": [], "rounds": []}
    started = time.time()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for profile in options.profiles:
        head = make_head(shape, profile)
        for rows in shape.batches:
            timed = race_modes(shape, profile, head, Batch(shape, rows), flashinfer, usable, options.rounds)
            print(report(timed), flush=True)
            result["rows"] += timed
        counted = count_searches(shape, profile, head, Batch(shape, max(shape.batches)))
        for row in counted:
            print(
                f"{profile} {row['mode']}: {row['searched']} of {row['rows']} rows searched; "
                f"{row['differ_from_reference']} of {row['compared']} tokens differ, {row['near_ties']} near-ties",
                flush=True,
            )
        result["rounds"] += counted
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(summary(result))
    print(f"measured in {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
