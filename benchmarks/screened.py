"""The screened path on this GPU: its speed, that its tokens are the fused path's, and that they are right.

    python benchmarks/run.py screened --out benchmarks/results/h200-screened.json

speed         whole steps beside the fused path, the GEMM alone, FlashInfer and a kernel that only reads, in one race
tokens        rows of four kinds of heads, at several temperatures and truncations, drawn by both paths with the same
              noise; a token that differs is a near-tie where both scores agree to 1e-5
distribution  total variation between many draws and the known distribution, beside what chance alone gives
launches      the launches of a screened step, plain and truncated, in their order: when each starts and how long it
              runs, in a trace of replays
decision      heads without a tuned table: what the race at the start of a server decides, how long it takes, and the
              times of both paths on other batches

Configurations are those of the tuned table that a server would find; without one, the built-in ones. ``--fast``: a
sixteenth of the draws, two heads of the decision.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, DTYPE, SHAPES, Benchmark, Result, Shape
from contenders import Selection, Tree
from hot_path import captured
from racing import Race, Session

from sgl_flashsample import BatchParams, Head, LMHead, SampleOutput, SamplingPath, Truncation, screen_race
from sgl_flashsample.autotune import baselines
from sgl_flashsample.autotune.timing import Timer
from sgl_flashsample.autotune.workload import Workload
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.kinds import KIND_NAMES, MAX_SCREENED_ROWS
from sgl_flashsample.paths import Parts
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import compile_ahead
from sgl_flashsample.sglang.step_graphs import CudaCapture

BATCHES = (3,) if DRY_RUN else (1, 8, 16, 32)
ROUNDS = 1 if DRY_RUN else 11
FUSED, SCREENED = SamplingPath.FUSED, SamplingPath.SCREENED
TIMED = ("t1", "T0.7", "greedy", "T0.6 k20p95", "T0.6 k50p90")
TIMED_PROFILES = ("typical", "flat")
TOKENS_SHAPE, DISTRIBUTION_SHAPE = ((64, 1024), (64, 256)) if DRY_RUN else ((1024, 151936), (256, 4096))
TEMPERATURES = (0.0, 1.0) if DRY_RUN else (0.0, 0.2, 0.7, 1.0, 1.5)
TRUNCATED_TEMPERATURES = (0.6,) if DRY_RUN else (0.6, 1.0)
LIMITS = ((20, 1.0), (50, 0.9), (20, 0.8), (64, 0.95))  # top-k and top-p, row by row
TOKEN_ROWS, ROWS_PER_CALL = (1, 3) if DRY_RUN else (1 << 20, 32)
DRAWS, DRAWS_PER_CALL = (16, 16) if DRY_RUN else (10_000_000, 4096)
NEAR = 1e-5
# Heads without a tuned table: Qwen3.5 27B, Qwen2.5 7B, DeepSeek V3, Mistral Small 3, Gemma 3 4B without its softcap.
UNTABLED = (
    SHAPES
    if DRY_RUN
    else [Shape(5120, 248320), Shape(3584, 152064), Shape(7168, 129280), Shape(5120, 131072), Shape(2560, 262208)]
)
DECISION_ROUNDS = 1 if DRY_RUN else 9
LAUNCHED, REPLAYS = ("t1", "T0.6 k50p90"), 30


def make_tree(weight: torch.Tensor, rows: int) -> Tree:
    return Tree(weight, None, rows, tuned=True, folder=None)


def counted(tree: Tree) -> dict[str, int]:
    """Counts of the screen since the last call, and of the truncated rows that were left to a search."""
    values, searched = tree.screen.counters.tolist(), int(tree.workspace.searched)
    tree.screen.counters.zero_()
    tree.workspace.searched.zero_()
    return {counter.name.lower(): values[counter] for counter in ScreenCounter} | {"searched": searched}


def draw(tree: Tree, path: SamplingPath, hidden: torch.Tensor, params: BatchParams) -> SampleOutput:
    return tree.drawer(screened=True)(hidden, params=params, path=path)


def add_counters(tree: Tree, race: Race, rows: list[dict[str, Any]]) -> None:
    """Add to rows of the screened path what its screen counts in one step."""
    calls = {one.sampling: one.call for one in race.entrants if one.path == SCREENED}
    for row in rows:
        if row["path"] == SCREENED:
            counted(tree)
            calls[row["sampling"]](0)
            counts = counted(tree)
            row["candidates_per_row"] = round(counts["candidates"] / row["B"], 1)
            row |= {"groups_read": counts["groups"], "rows_left": counts["searched"]}


def speed(options: Any) -> dict[str, Any]:
    shape, rows, env = SHAPES[0], list[dict[str, Any]](), dict[str, Any]()
    selection = Selection((FUSED, SCREENED, baselines.GEMM, baselines.FLASHINFER), TIMED, tuned=True)
    session = Session([shape], BATCHES, selection, env)
    tree = make_tree(shape.weight(), max(BATCHES))
    for size in BATCHES:
        for profile in TIMED_PROFILES:
            batch, cell = Workload(tree.head, size, profile), {"B": size, "profile": profile}
            rows += session.race([tree], batch, ROUNDS, cell, functools.partial(add_counters, tree))
    memory = {"copy_bytes": tree.screen.int8_head.num_bytes, "head_bytes": tree.head.weight.nbytes}
    return shape.fields | memory | env | {"rows": rows}


def _random_weight(vocab: int, hidden: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    weight = torch.empty(vocab, hidden, dtype=dtype, device=DEVICE)
    for first in range(0, vocab, 8192):
        weight[first : first + 8192] = torch.randn(min(8192, vocab - first), hidden, device=DEVICE) * 0.02
    return weight


Hidden = Callable[[int], torch.Tensor]  # number of rows -> hidden states
Draw = Callable[[torch.Tensor, BatchParams], SampleOutput]


def _random(vocab: int, hidden: int) -> tuple[torch.Tensor, Hidden]:
    return _random_weight(vocab, hidden), lambda rows: torch.randn(rows, hidden, device=DEVICE)


def _peaked(vocab: int, hidden: int) -> tuple[torch.Tensor, Hidden]:
    """The first id has 0.9 of the probability at temperature 1, about: -3.7 log(rank), along one direction of all
    channels, and noise."""
    direction = torch.randint(0, 2, (hidden,), device=DEVICE) * 2.0 - 1.0
    logits = -3.7 * (torch.randperm(vocab, device=DEVICE) + 1.0).log()
    weight = _random_weight(vocab, hidden, torch.float32) + logits[:, None] * direction / hidden
    spread = 0.3 / (0.02 * hidden**0.5)
    return weight.to(DTYPE), lambda rows: direction + spread * torch.randn(rows, hidden, device=DEVICE)


def _flat(vocab: int, hidden: int) -> tuple[torch.Tensor, Hidden]:
    return _random_weight(vocab, hidden), lambda rows: 0.05 * torch.randn(rows, hidden, device=DEVICE)


def _heavy_tailed(vocab: int, hidden: int) -> tuple[torch.Tensor, Hidden]:
    """Student's t with 3 degrees of freedom; one hidden channel in 128 is 30 times as large."""
    students = torch.distributions.StudentT(torch.tensor(3.0, device=DEVICE))
    weight = torch.empty(vocab, hidden, dtype=DTYPE, device=DEVICE)
    for first in range(0, vocab, 8192):
        weight[first : first + 8192] = students.sample((min(8192, vocab - first), hidden)) * 0.01
    large = torch.ones(hidden, device=DEVICE)
    large[::128] = 30.0
    return weight, lambda rows: torch.randn(rows, hidden, device=DEVICE) * large


HEADS = {"random": _random, "peaked": _peaked, "flat": _flat, "heavy-tailed": _heavy_tailed}


def tokens(options: Any) -> dict[str, Any]:
    hidden_size, vocab = TOKENS_SHAPE
    size = ROWS_PER_CALL
    cells = [(value, False) for value in TEMPERATURES] + [(value, True) for value in TRUNCATED_TEMPERATURES]
    calls = math.ceil(TOKEN_ROWS / len(HEADS) / len(TEMPERATURES) / size / (16 if options.fast else 1))
    seed = torch.arange(size, device=DEVICE) * 7919
    limits = torch.tensor(LIMITS, device=DEVICE)[torch.arange(size, device=DEVICE) % len(LIMITS)]
    top_k, top_p = limits[:, 0].int().contiguous(), limits[:, 1].contiguous()
    truncation = Truncation(top_k, top_p, torch.zeros_like(top_p), max_top_k=max(LIMITS)[0])
    rows = []
    for kind, make in HEADS.items():
        weight, hidden_states = make(vocab, hidden_size)
        tree = make_tree(weight, size)
        for value, truncated in cells:
            temperature = torch.full((size,), value, device=DEVICE)
            different, apart, left = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(3))
            counted(tree)
            for call in range(calls):
                hidden = hidden_states(size).to(DTYPE)
                position = torch.full((size,), call, dtype=torch.int64, device=DEVICE)
                params = BatchParams(temperature, seed, position, truncation if truncated else None)
                one = draw(tree, FUSED, hidden, params)
                tree.workspace.searched.zero_()
                other = draw(tree, SCREENED, hidden, params)
                left += tree.workspace.searched[0]
                differs = one.token_ids != other.token_ids
                different += differs.sum()
                apart += (differs & ((one.scores - other.scores).abs() > NEAR * one.scores.abs().clamp(min=1.0))).sum()
            counts, num_rows = counted(tree), calls * size
            row: dict[str, Any] = {"head": kind, "temperature": value, "truncated": truncated, "rows": num_rows}
            row |= {"different": int(different), "no_near_tie": int(apart)}
            row["candidates_per_row"] = round(counts["candidates"] / counts["rows"], 1)
            row["certified"] = round(counts["certified_rows"] / counts["rows"], 4)
            row["many_candidates"] = round(counts["many_candidates"] / counts["row_blocks"], 4)
            rows.append(row | {"left": round(int(left) / num_rows, 4)})
            print(
                "  {head:13} T={temperature:<4} {rows} rows, {different} differ, {no_near_tie} no near-tie".format(
                    **row
                )
            )
        del weight, tree
    return {"D": hidden_size, "V": vocab, "rows": rows}


def distribution(options: Any) -> dict[str, Any]:
    """Every row has the logits of one column of the head, which no sum rounds: the distribution is known exactly."""
    hidden_size, vocab = DISTRIBUTION_SHAPE
    size = DRAWS_PER_CALL
    calls = math.ceil(DRAWS / size / (16 if options.fast else 1))
    weight = _random_weight(vocab, hidden_size)
    weight[:, 0] = torch.randn(vocab, device=DEVICE).to(DTYPE)
    tree = make_tree(weight, size)
    tree.screened_rows = size
    hidden = torch.zeros(size, hidden_size, dtype=DTYPE, device=DEVICE)
    hidden[:, 0] = 1.0
    truth = torch.softmax(weight[:, 0].double(), 0)
    temperature, row = torch.ones(size, device=DEVICE), torch.arange(size, device=DEVICE)
    counts = torch.zeros(vocab, dtype=torch.int64, device=DEVICE)
    for call in range(calls):
        params = BatchParams(temperature, row * 7919 + 1, torch.full_like(row, call))
        counts += torch.bincount(draw(tree, SCREENED, hidden, params).token_ids, minlength=vocab)
    draws = calls * size
    variation = float(0.5 * (counts.double() / draws - truth).abs().sum())
    # The mean of |binomial - its mean|, and the deviation of half their sum were they independent.
    each = (truth * (1 - truth) / draws).sqrt()
    chance = float(0.5 * (2 / math.pi) ** 0.5 * each.sum())
    deviation = float(0.5 * ((1 - 2 / math.pi) * each.square().sum()).sqrt())
    result = {"V": vocab, "draws": draws, "total_variation": variation, "by_chance": chance}
    result["deviations_from_chance"] = (variation - chance) / deviation
    print(
        "  {draws} draws of {V} ids: total variation {total_variation:.6f}, by chance {by_chance:.6f}".format(**result)
    )
    return result


class HostStopwatch:
    """``screen_race.Stopwatch`` of a machine without a GPU, whose times mean nothing."""

    def __call__(
        self, calls: Sequence[Callable[[], Any]], rounds: int, refresh: Callable[[int], None]
    ) -> screen_race.Times:
        times = []
        for call in calls:
            began = time.perf_counter()
            call()
            times.append([(time.perf_counter() - began) * 1e6] * rounds)
        return times


def race_at_start(
    parts: Parts, choices: DispatchTable, count: int = 1
) -> tuple[DispatchTable, list[screen_race.Outcome]]:
    """The table of ``screen_race.candidates``, and the outcomes of so many races of the screen of ``parts``, as a
    server runs one when it starts without a table that knows its screen. choices: those without one."""
    assert parts.screen is not None
    table = screen_race.candidates(choices, screen_race.raced_kinds(parts.lm_head))
    compile_ahead([parts], parts.screen.max_rows, table)
    watch = HostStopwatch() if DRY_RUN else screen_race.GraphStopwatch(DEVICE, CudaCapture(DEVICE))
    return table, [screen_race.race(parts, table, watch) for _ in range(count)]


def launches(options: Any) -> dict[str, Any]:
    shape, rows = SHAPES[0], list[dict[str, Any]]()
    tree = make_tree(shape.weight(), max(BATCHES))
    for size, name in itertools.product(BATCHES, LAUNCHED):
        call = tree.entrant(Workload(tree.head, size), name, SCREENED).call
        call(0)  # loads the kernels
        cell = {"B": size, "sampling": name}
        rows += [cell | launch for launch in launches_of([] if DRY_RUN else trace(captured(call)), REPLAYS)]
    return shape.fields | {"rows": rows}


def trace(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of ``REPLAYS`` steps, one after the other. Each reads more than the L2 cache holds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        return json.loads(file.read_text())["traceEvents"]


def launches_of(events: list[dict[str, Any]], replays: int) -> list[dict[str, Any]]:
    """The launches of one of so many equal steps: medians of microseconds. Raises ValueError where the kernels are not
    as many in each step."""
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    of_step, rest = divmod(len(kernels), replays)
    if rest:
        raise ValueError(f"{replays} steps have {len(kernels)} kernels; expected as many in each")
    steps = [kernels[first : first + of_step] for first in range(0, len(kernels), max(1, of_step))]
    return [
        {
            "launch": place,
            "kernel": same[0]["name"],
            "start_us": round(
                statistics.median(event["ts"] - step[0]["ts"] for event, step in zip(same, steps, strict=True)), 2
            ),
            "us": round(statistics.median(event["dur"] for event in same), 2),
        }
        for place, same in enumerate(zip(*steps, strict=True))
    ]


def decision(options: Any) -> dict[str, Any]:
    """Per head: the seconds of two races, of which the second finds everything loaded, and the words of the first. Per
    heat of the first: whether the screen won, and the times of both paths in the race and on the batches of
    ``Workload``."""
    timer, heads = Timer(DEVICE), []
    for shape in UNTABLED[: 2 if options.fast else None]:
        head = LMHead(shape.weight(), softcap=shape.softcap)
        ready = Head(head, max_rows=MAX_SCREENED_ROWS, screen=Screen(head, MAX_SCREENED_ROWS))
        ready.table, outcomes = race_at_start(ready.parts, ready.table, 2)
        decided, rows = screen_race.decide(ready.table, outcomes[0]), []
        ways = {"builtin": ready.twin(MAX_SCREENED_ROWS).draw, "screened": functools.partial(ready.draw, path=SCREENED)}
        for heat in outcomes[0].heats:
            work = Workload(head, heat.rows)
            params = work.params(KIND_NAMES[heat.kind].screened)  # limits that a screen can serve
            calls = {name: functools.partial(_draw_step, way, work, params) for name, way in ways.items()}
            contenders = {name: timer.contender(call) for name, call in calls.items()}
            rounds = timer.rounds(contenders, DECISION_ROUNDS, before_round=work.refresh)
            row = {"kind": heat.kind, "B": heat.rows, "screen_wins": heat.screen_wins}
            for name, raced in (("builtin", heat.builtin), ("screened", heat.screened)):
                timing = rounds.timing(name)
                row |= {f"{name}_race_us": round(statistics.fmean(raced), 2), f"{name}_us": round(timing.us, 2)}
                row[f"{name}_spread"] = round(timing.spread, 2)
            rows.append(row)
            print(f"  {shape} {row}", flush=True)
        seconds, words = [round(outcome.seconds, 3) for outcome in outcomes], outcomes[0].words(decided)
        print(f"  {shape}: {seconds} s, {words}", flush=True)
        heads.append(shape.fields | {"seconds": seconds, "words": words, "rows": rows})
    return {"heads": heads}


def _draw_step(draw_batch: Draw, work: Workload, params: Sequence[BatchParams], step: int) -> SampleOutput:
    return draw_batch(work.hidden, params[step])


SECTIONS = {
    "speed": speed,
    "tokens": tokens,
    "distribution": distribution,
    "launches": launches,
    "decision": decision,
}


def measure(options: Any, result: Result) -> int:
    for name in options.only:
        began = time.monotonic()
        torch.manual_seed(0)
        print(name, flush=True)
        try:
            section = SECTIONS[name](options)
        except Exception as error:  # the next one may do
            result.miss(error, section=name)
            continue
        result.put(name, section | {"seconds": round(time.monotonic() - began, 1)})
    return result.close()


BENCHMARKS = {"screened": Benchmark(__doc__, measure, sections=tuple(SECTIONS))}
