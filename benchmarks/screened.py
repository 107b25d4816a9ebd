"""The screened path against the fused one: how long it takes, that its tokens are the same, and that they are right.

    python benchmarks/screened.py --out benchmarks/results/h200-screened.json

Three parts. ``speed``: whole steps on a bf16 head of random weights, in one race with a kernel that only reads, the
GEMM alone, GEMM and FlashInfer's Gumbel sampling, and the fused path; CUDA-graph replay, cold weights, fresh hidden
states each round, interleaved rounds, medians and half the distance between the quartiles. ``tokens``: rows of four
kinds of heads and hidden states at four temperatures and greedy, drawn by both paths with the same noise; a token that
differs is a near-tie where both paths' scores agree to 1e-5. ``distribution``: the total variation between what many
draws of a known distribution gave and that distribution, beside what chance alone gives. Rows with a truncation are
timed and compared too. Launches are those of the tuned table that a server would find. ``--dry-run``: small shapes,
nothing is timed; needs no GPU.
"""

from __future__ import annotations

import sys

if "--dry-run" in sys.argv:
    from sgl_flashsample.demo import interpreter

    interpreter.turn_on()  # before triton is imported

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import STEPS, first_line, steps_of
from rivals import Contender, Inputs, import_flashinfer, rivals
from sgl_flashsample.autotune import measure
from sgl_flashsample.kernels.features import Truncation
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.int8_head import Counted, Int8Head, ScreenWorkspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, workspace_slots
from sgl_flashsample.kernels.reduce_parts import Drawn
from sgl_flashsample.kernels.screened_sample import screened_sample
from sgl_flashsample.kernels.tiles import ScreenConfig, TileConfig

from sgl_flashsample import resolution, tuned
from sgl_flashsample.work import Work

SECTIONS = ("speed", "tokens", "distribution")
# Hidden elements, ids; of speed, tokens, distribution.
SHAPES = {"speed": (4096, 151936), "tokens": (1024, 151936), "distribution": (256, 4096)}
DRY_SHAPES = {"speed": (64, 1024), "tokens": (64, 1024), "distribution": (64, 256)}
BATCHES, DRY_BATCHES = (1, 8, 16, 32), (1, 3)
TEMPERATURES = (0.0, 0.2, 0.7, 1.0, 1.5)
TIMED_TEMPERATURES = (1.0, 0.7, 0.0)
# Top-k and top-p: of the race, at temperature 0.7; of the compared tokens, row by row.
TIMED_LIMITS = ((20, 0.95), (50, 0.9))
LIMITS = ((20, 1.0), (50, 0.9), (20, 0.8), (64, 0.95))
LIMITED_TEMPERATURES = (0.6, 1.0)
TOKEN_ROWS, ROWS_PER_CALL = 1 << 20, 32
DRAWS, DRAWS_PER_CALL = 10_000_000, 4096
NEAR = 1e-5
READ_BYTES = 2**31


class Paths:
    """The fused and the screened path of one head. configs: of the screened one, by number of rows; the built-in ones
    elsewhere."""

    def __init__(self, weight: torch.Tensor, max_rows: int, configs: dict[int, ScreenConfig]) -> None:
        self.head, self._configs = LMHead(weight), configs
        self._choices = resolution.resolve(self.head).choices
        self.copy = Int8Head(self.head)
        tiles = [config for _, _, config in self._choices.used_up_to(max_rows) if isinstance(config, TileConfig)]
        tiles += [tuned.tile_for(self.head, rows, work) for rows in (1, max_rows) for work in Work]
        slots = max(workspace_slots(self.head, max_rows, tile) for tile in tiles)
        self.workspace = Workspace(slots, weight.device)
        self.screen_workspace = ScreenWorkspace(self.copy, max_rows)

    def fused(self, hidden: torch.Tensor, *parameters: torch.Tensor, limits: Truncation | None = None) -> Drawn:
        tile, draw = self.tile(hidden.shape[0], limits), self._choices.draw
        options: dict[str, Any] = {"truncation": limits, "draw": draw, "workspace": self.workspace}
        return lm_head_sample(hidden, self.head, *parameters, tile, **options)

    def screened(self, hidden: torch.Tensor, *parameters: torch.Tensor, limits: Truncation | None = None) -> Drawn:
        config, draw = self.config(hidden.shape[0], limits), self._choices.draw
        options: dict[str, Any] = {"truncation": limits, "draw": draw, "workspace": self.screen_workspace}
        return screened_sample(
            hidden, self.head, self.copy, *parameters, config, head_workspace=self.workspace, **options
        )

    def tile(self, rows: int, limits: Truncation | None) -> TileConfig:
        work = Work.PLAIN if limits is None else Work.TRUNCATE
        picked = self._choices.pick(rows, work)
        return picked if isinstance(picked, TileConfig) else tuned.tile_for(self.head, rows, work)

    def config(self, rows: int, limits: Truncation | None = None) -> ScreenConfig:
        """The given one, else the tuned table's where it has one, else the built-in."""
        work = Work.SCREENED if limits is None else Work.SCREENED_TRUNCATE
        picked = self._choices.pick(rows, work)
        if rows in self._configs:
            return self._configs[rows]
        return picked if isinstance(picked, ScreenConfig) else tuned.screen_of(self._choices.shape, rows, work)

    def counted(self) -> dict[str, int]:
        values, searched = self.screen_workspace.counters.tolist(), int(self.workspace.searched)
        self.screen_workspace.counters.zero_()
        self.workspace.searched.zero_()
        return {kind.name.lower(): values[kind] for kind in Counted} | {"searched": searched}


def random_weight(vocab: int, hidden: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.empty(vocab, hidden, dtype=dtype, device=device)
    for first in range(0, vocab, 8192):
        weight[first : first + 8192] = torch.randn(min(8192, vocab - first), hidden, device=device) * 0.02
    return weight


def speed(device: str, dtype: torch.dtype, dry: bool, configs: dict[int, ScreenConfig]) -> dict[str, Any]:
    hidden_size, vocab = (DRY_SHAPES if dry else SHAPES)["speed"]
    weight = random_weight(vocab, hidden_size, device, dtype)
    paths = Paths(weight, max(DRY_BATCHES if dry else BATCHES), configs)
    flashinfer, reader, found, missing = None, None, {}, {}
    try:
        flashinfer = import_flashinfer()
    except Exception as error:
        missing["flashinfer_gumbel"] = first_line(error)
    if not dry:
        import warm

        reader, _, found = warm.ceilings(READ_BYTES, 8192)
    rows = []
    for batch in DRY_BATCHES if dry else BATCHES:
        inputs = Inputs.make(weight, None, batch, STEPS)
        raced = [rival for rival in rivals(inputs, flashinfer, lambda call: call) if _is_raced(rival)]
        for temperature in TIMED_TEMPERATURES:
            for name in ("fused", "screened"):
                raced.append(_ours(paths, name, inputs, temperature))
        for one in TIMED_LIMITS:
            raced += [_ours(paths, name, inputs, LIMITED_TEMPERATURES[0], one) for name in ("fused", "screened")]
        timings = race(raced, reader, inputs.refresh)
        read_us = timings.pop("read").us if reader is not None else None
        floor_us = None if read_us is None else weight.numel() * weight.element_size() * read_us / READ_BYTES
        for contender in raced:
            timing = timings[contender.name]
            row = {"B": batch, "path": contender.path, "mode": contender.mode, "config": contender.form}
            row |= {"us": round(timing.us, 2), "us_spread": round(timing.spread, 2)}
            row["over_floor"] = None if floor_us is None else round(timing.us / floor_us, 4)
            if contender.path == "screened":
                paths.counted()
                contender.draw(0)
                counted = paths.counted()
                row["candidates_per_row"] = round(counted["candidates"] / batch, 1)
                row["groups_read"] = counted["groups"]
                row["rows_left"] = counted["searched"]
            rows.append(row)
            print(
                "  B={B:<3} {path:18} {mode:20} {us:8.1f} +- {us_spread:4.1f} us  {over_floor}".format(**row),
                flush=True,
            )
    size = weight.numel() * weight.element_size()
    return {
        "D": hidden_size,
        "V": vocab,
        **found,
        "not_run": missing,
        "copy_bytes": paths.copy.num_bytes,
        "head_bytes": size,
        "copy_over_head": round(paths.copy.num_bytes / size, 4),
        "rows": rows,
    }


def _is_raced(rival: Contender) -> bool:
    return rival.path in ("gemm", "flashinfer_gumbel")


def _ours(paths: Paths, name: str, inputs: Inputs, value: float, limit: tuple[int, float] | None = None) -> Contender:
    call: Callable[..., Drawn] = getattr(paths, name)
    rows, device = inputs.hidden.shape[0], inputs.hidden.device
    temperature = torch.full((rows,), value, device=device)
    limits = None if limit is None else _limits((limit,), rows, device)

    def draw(step: int) -> torch.Tensor:
        return call(inputs.hidden, temperature, inputs.seed, inputs.position[step], limits=limits).token

    config = paths.tile(rows, limits) if name == "fused" else paths.config(rows, limits)
    mode = "greedy" if value == 0 else f"T={value:g}" + ("" if limit is None else ", k={}, p={:g}".format(*limit))
    return Contender(name, mode, str(config), draw)


def _limits(kinds: tuple[tuple[int, float], ...], rows: int, device: torch.device | str) -> Truncation:
    """One of ``kinds``, top-k and top-p, after the other."""
    top_k, top_p = torch.tensor(kinds, device=device)[torch.arange(rows, device=device) % len(kinds)].unbind(1)
    return Truncation(top_k.int().contiguous(), top_p.contiguous(), torch.zeros(rows, device=device))


def race(
    raced: list[Contender], reader: Callable[[], object] | None, before_round: Callable[[], None]
) -> dict[str, measure.Timing]:
    """Time per step of each, by name, and of ``reader`` as "read"; without one each is called and nothing is timed."""
    if reader is None:
        for contender in raced:
            contender.draw(0)
        return {contender.name: measure.Timing(0.0, 0.0, 0) for contender in raced}
    calls: dict[str, Callable[[], object]] = {
        contender.name: measure.capture(steps_of(contender)).replay for contender in raced
    }
    calls["read"] = measure.capture(lambda: [reader() for _ in range(STEPS)]).replay
    timings = measure.race_replays(calls, rounds=11, replays=1, before_round=before_round)
    return {name: measure.Timing(t.us / STEPS, t.spread / STEPS, t.rounds) for name, t in timings.items()}


def _random(vocab: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, Callable]:
    return random_weight(vocab, hidden, device, dtype), lambda rows: torch.randn(rows, hidden, device=device)


def _peaked(vocab: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, Callable]:
    """The first id has 0.9 of the probability at temperature 1, about: -3.7 log(rank), along one direction of all
    channels, and noise."""
    direction = torch.randint(0, 2, (hidden,), device=device) * 2.0 - 1.0
    logits = -3.7 * (torch.randperm(vocab, device=device) + 1.0).log()
    weight = random_weight(vocab, hidden, device, torch.float32) + logits[:, None] * direction / hidden
    spread = 0.3 / (0.02 * hidden**0.5)
    return weight.to(dtype), lambda rows: direction + spread * torch.randn(rows, hidden, device=device)


def _flat(vocab: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, Callable]:
    return random_weight(vocab, hidden, device, dtype), lambda rows: 0.05 * torch.randn(rows, hidden, device=device)


def _heavy_tailed(vocab: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, Callable]:
    """Student's t with 3 degrees of freedom; one hidden channel in 128 is 30 times as large."""
    students = torch.distributions.StudentT(torch.tensor(3.0, device=device))
    weight = torch.empty(vocab, hidden, dtype=dtype, device=device)
    for first in range(0, vocab, 8192):
        weight[first : first + 8192] = students.sample((min(8192, vocab - first), hidden)) * 0.01
    large = torch.ones(hidden, device=device)
    large[::128] = 30.0
    return weight, lambda rows: torch.randn(rows, hidden, device=device) * large


KINDS = {"random": _random, "peaked": _peaked, "flat": _flat, "heavy-tailed": _heavy_tailed}


def tokens(device: str, dtype: torch.dtype, dry: bool, configs: dict[int, ScreenConfig]) -> dict[str, Any]:
    hidden_size, vocab = (DRY_SHAPES if dry else SHAPES)["tokens"]
    per_call = 3 if dry else ROWS_PER_CALL
    cells = [(value, False) for value in TEMPERATURES] + [(value, True) for value in LIMITED_TEMPERATURES]
    calls = 2 if dry else math.ceil(TOKEN_ROWS / len(KINDS) / len(TEMPERATURES) / per_call)
    limits = _limits(LIMITS, per_call, device)
    rows = []
    for kind, make in KINDS.items():
        weight, hidden_states = make(vocab, hidden_size, device, dtype)
        paths = Paths(weight, per_call, configs)
        for value, limited in cells:
            temperature = torch.full((per_call,), value, device=device)
            options = {"limits": limits if limited else None}
            seed = torch.arange(per_call, device=device) * 7919
            differ, far, left = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
            paths.counted()
            for call in range(calls):
                hidden = hidden_states(per_call).to(dtype)
                position = torch.full((per_call,), call, dtype=torch.int64, device=device)
                one = paths.fused(hidden, temperature, seed, position, **options)
                paths.workspace.searched.zero_()
                other = paths.screened(hidden, temperature, seed, position, **options)
                left += paths.workspace.searched[0]
                different = one.token != other.token
                apart = (one.score - other.score).abs() > NEAR * one.score.abs().clamp(min=1.0)
                differ += different.sum()
                far += (different & apart).sum()
            counted = paths.counted()
            row = {"kind": kind, "temperature": value, "limited": limited, "rows": calls * per_call}
            row |= {"different": int(differ), "left": round(int(left) / (calls * per_call), 4)}
            row |= {"no_near_tie": int(far), "candidates_per_row": round(counted["candidates"] / counted["rows"], 1)}
            row["sure"] = round(counted["sure_rows"] / counted["rows"], 4)
            row["wide"] = round(counted["wide_batches"] / counted["batches"], 4)
            rows.append(row)
            print(
                "  {kind:13} T={temperature:<4} limited {limited:d}: {rows} rows, {different} differ, {no_near_tie} of "
                "them no near-tie, {candidates_per_row} candidates per row, {left} of the rows left".format(**row),
                flush=True,
            )
        del weight, paths
    return {"D": hidden_size, "V": vocab, "total": sum(row["rows"] for row in rows), "rows": rows}


def distribution(device: str, dtype: torch.dtype, dry: bool, configs: dict[int, ScreenConfig]) -> dict[str, Any]:
    """Every row has the logits of one column of the head, which no sum rounds: the distribution is known exactly."""
    hidden_size, vocab = (DRY_SHAPES if dry else SHAPES)["distribution"]
    per_call = 16 if dry else DRAWS_PER_CALL
    calls = 2 if dry else math.ceil(DRAWS / per_call)
    weight = random_weight(vocab, hidden_size, device, dtype)
    weight[:, 0] = torch.randn(vocab, device=device).to(dtype)
    paths = Paths(weight, per_call, configs)
    hidden = torch.zeros(per_call, hidden_size, dtype=dtype, device=device)
    hidden[:, 0] = 1.0
    truth = torch.softmax(weight[:, 0].double(), 0)
    temperature, row = torch.ones(per_call, device=device), torch.arange(per_call, device=device)
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    for call in range(calls):
        token = paths.screened(hidden, temperature, row * 7919 + 1, torch.full_like(row, call)).token
        counts += torch.bincount(token, minlength=vocab)
    draws = calls * per_call
    variation = 0.5 * (counts.double() / draws - truth).abs().sum()
    # The mean of |binomial - its mean|, and the deviation of half their sum were they independent.
    each = (truth * (1 - truth) / draws).sqrt()
    chance, deviation = 0.5 * (2 / math.pi) ** 0.5 * each.sum(), 0.5 * ((1 - 2 / math.pi) * each.square().sum()).sqrt()
    found = {"V": vocab, "draws": draws, "total_variation": float(variation), "by_chance": float(chance)}
    found |= {"deviations_from_chance": float((variation - chance) / deviation)}
    print(
        "  {draws} draws of {V} ids: total variation {total_variation:.6f}, by chance {by_chance:.6f}, "
        "{deviations_from_chance:+.1f} deviations".format(**found),
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, after every section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--keep", action="store_true", help="keep the file's sections that are not measured now")
    parser.add_argument("--configs", type=Path, help="JSON of launch configurations, {rows: {option: value}}")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, nothing is timed; needs no GPU")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run works without one")
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    configs: dict[int, ScreenConfig] = {}
    if options.configs is not None:
        configs = {int(rows): ScreenConfig(**own) for rows, own in json.loads(options.configs.read_text()).items()}
    sections = json.loads(options.out.read_text())["sections"] if options.keep and options.out.exists() else {}
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
    for name in options.only:
        began = time.monotonic()
        torch.manual_seed(0)
        print(name, flush=True)
        found = {"speed": speed, "tokens": tokens, "distribution": distribution}[name](device, dtype, dry, configs)
        sections[name] = found | {
            "env": {} if dry else measure.environment(),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *words]),
            "seconds": round(time.monotonic() - began, 1),
        }
        words = sections[name]["command"].split()[1:]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"sections": sections}, indent=1) + "\n")


if __name__ == "__main__":
    main()
