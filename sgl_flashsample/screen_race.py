"""The screened path against the built-in choice: a short race at the start of a server whose table knows no screen.

One heat per kind and size of batch. In each round of a heat both paths draw the same batch, one directly after the
other, so that each finds the other's bytes in the cache, not its own. The decision is a pure function of these times.

Hidden states are made from the head's own rows, less the mean of all: how many groups of ids a screen leaves to rescore
depends on how far the largest logits are from the rest, and on the lengths of hidden states and rows
(``screened_sample.py``). The rows of trained heads have a direction in common, which raises all logits alike. A server
whose traffic leaves more groups than these rows pauses its screen (``sglang/screen_lifecycle.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .dispatch import DispatchTable
from .kernels.config import ScreenConfig, cdiv
from .kernels.params import BatchParams, LMHead, Truncation
from .kinds import BATCH_KINDS, KIND_NAMES, MAX_SCREENED_ROWS, MIN_RACED_BYTES, BatchKind, Config, SamplingPath
from .paths import Parts, launch, on_device_of
from .selfcheck import edits_of_every_kind
from .tables.lookup import bucket_for, ranges_of

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Rows of the largest batch that is raced, by kind. Larger truncated batches leave most of the head to rescore, and
# larger edited ones are no faster: neither is worth the compilation of its kernels at each start.
MOST_ROWS = {"plain": MAX_SCREENED_ROWS, "greedy": MAX_SCREENED_ROWS, "truncate": 32, "edit": 32, "edit+truncate": 8}

MAX_SECONDS = 1.0  # of a whole race
ROUNDS = 12
BUSY_SECONDS = 0.05
TRIMMED = 1  # rounds of the largest and of the smallest saving that do not count: something else may have run meanwhile
MIN_GAIN = 0.02  # share of the built-in choice's time that a screen has to save, beyond the spread
SPREAD = 2.0  # standard errors of the mean saving

# The rows of a batch, in turn. The colder a row, the more groups a screen leaves to rescore.
TEMPERATURES = (0.8, 1.0, 0.6, 0.3)
TRUNCATIONS = ((50, 0.9), (20, 0.95), (40, 1.0))  # top-k, which a screen serves up to 64, and top-p
# Standard deviation of a row's logits, and how far its likeliest ids are above the mean beyond that. The first two are
# like most rows of a trained model: several ids that could be drawn, one that is almost certain. The third has no
# likely id: greedy or at a low temperature, it leaves many more groups than most rows of a trained model do. It is one
# row in three, so a race errs on the hard side, as a tuned table does: the tuner's workload has the same three kinds
# (``autotune/workload.py``).
PROFILES = ((2.0, tuple(17.0 - 1.2 * math.log(rank) for rank in range(1, 17))), (3.0, (23.0,)), (1.0, ()))
MEAN_OF_IDS = 2048  # ids, spread over the vocabulary, whose rows give the mean row of a head

Times = list[list[float]]  # microseconds: of each call, of each round


class Graph(Protocol):
    def replay(self) -> None: ...


class Capture(Protocol):
    """Captures launches into a CUDA graph."""

    def new_pool(self) -> Any: ...
    def __call__(self, launches: Callable[[], Any], pool: Any) -> tuple[Graph, Any]: ...


class Stopwatch(Protocol):
    """Times calls on a device."""

    def __call__(self, calls: Sequence[Callable[[], Any]], rounds: int, refresh: Callable[[int], None]) -> Times:
        """Run each call once per round, one directly after the other. refresh: takes the number of a round, before it;
        not timed."""
        ...


class GraphStopwatch:
    """Times calls as a server replays them: each is captured in a CUDA graph of its own. The first ones run until the
    clocks of the device are those of a busy one."""

    def __init__(self, device: torch.device, capture: Capture) -> None:
        self._device, self._capture = device, capture
        self._pool = capture.new_pool()
        self._graphs: list[Graph] = []  # PyTorch refuses a pool whose graphs have all gone

    def __call__(self, calls: Sequence[Callable[[], Any]], rounds: int, refresh: Callable[[int], None]) -> Times:
        for call in calls:
            call()  # loads its kernels and allocates scratch
        graphs = [self._capture(call, self._pool)[0] for call in calls]
        if not self._graphs:
            busy_until = time.monotonic() + BUSY_SECONDS
            while time.monotonic() < busy_until:
                for graph in graphs:
                    graph.replay()
                torch.cuda.synchronize(self._device)
        self._graphs += graphs
        timed = []
        for index in range(-1, rounds):  # the first round finds the device idle, and does not count
            refresh(max(index, 0))
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
            events[0].record()
            for graph, event in zip(graphs, events[1:], strict=True):
                graph.replay()
                event.record()
            timed.append(events)
        torch.cuda.synchronize(self._device)
        return [
            [events[place].elapsed_time(events[place + 1]) * 1e3 for events in timed[1:]] for place in range(len(calls))
        ]


class Heat(NamedTuple):
    """One kind and size of batch. kind: the name of its kind without a screen. builtin, screened: microseconds of each
    round, the same rounds for both."""

    kind: str
    rows: int
    builtin: Sequence[float]
    screened: Sequence[float]

    @property
    def screen_wins(self) -> bool:
        """The screened path saves more than ``MIN_GAIN`` of the time, and more than ``SPREAD`` standard errors of what
        it saves.

        A mean, not a median: one batch in a few may be an unlucky one, for which most of the head is read again.
        """
        saved = sorted(builtin - screened for builtin, screened in zip(self.builtin, self.screened, strict=True))
        counted = saved[TRIMMED : len(saved) - TRIMMED]
        if len(counted) < 2:
            return False
        error = statistics.stdev(counted) / math.sqrt(len(counted))
        return statistics.fmean(counted) > max(SPREAD * error, MIN_GAIN * statistics.median(self.builtin))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """heats: those that were run. seconds: that the race took. skipped: kinds and sizes for which no time was left."""

    heats: tuple[Heat, ...]
    seconds: float
    skipped: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_ranks(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """One outcome for ranks that share a head: a step takes as long as the slowest of them, so each round has the
        largest time of all. A heat that one rank lacks counts for none."""
        times = [{(heat.kind, heat.rows): heat for heat in outcome.heats} for outcome in outcomes]
        heats, skipped = [], []
        for kind, rows in dict.fromkeys(key for of_rank in times for key in of_rank):
            same = [of_rank[kind, rows] for of_rank in times if (kind, rows) in of_rank]
            if len(same) < len(times):
                skipped.append((kind, rows))
                continue
            builtin, screened = (
                tuple(max(of_round) for of_round in zip(*each, strict=True))
                for each in ([heat.builtin for heat in same], [heat.screened for heat in same])
            )
            heats.append(Heat(kind, rows, builtin, screened))
        skipped += [key for outcome in outcomes for key in outcome.skipped]
        return cls(tuple(heats), max(outcome.seconds for outcome in outcomes), tuple(dict.fromkeys(skipped)))

    def words(self, table: DispatchTable) -> str:
        """The decision, for a log. table: what was made of it."""
        used = []
        for name in MOST_ROWS:
            kind = KIND_NAMES[name].screened
            sizes = range(1, MAX_SCREENED_ROWS + 1)
            if screened := [rows for rows in sizes if isinstance(table.lookup(rows, kind), ScreenConfig)]:
                used.append(f"{name} {ranges_of(screened)}")
        example = ""
        if self.heats:
            first = self.heats[0]
            without, with_screen = map(statistics.median, (first.builtin, first.screened))
            example = f" ({first.kind} {first.rows}: {without:.0f} µs without it, {with_screen:.0f} µs with it)"
        left_out = "".join(f", {kind} {rows}" for kind, rows in self.skipped)
        left_out = f"; no time was left for {left_out.removeprefix(', ')}" if left_out else ""
        rows_of_kinds = f"{', '.join(used)} rows" if used else "no batch"
        return f"screen used for {rows_of_kinds}, measured in {self.seconds:.2f} s{example}{left_out}"


def unsupported_race(head: LMHead) -> str | None:
    """Why ``head`` is not raced, and has no screen without a tuned table; None where it is."""
    size = head.vocab_size * head.weight.shape[1] * head.weight.element_size()
    if size >= MIN_RACED_BYTES:
        return None
    return f"no tuned table says that it is faster here, and a head of {size:,} bytes is too small for it to be"


def raced_kinds(head: LMHead) -> list[BatchKind]:
    """The kinds of batches of ``head`` that are raced: only a whole vocabulary is truncated."""
    return [KIND_NAMES[name] for name in MOST_ROWS if head.shards == 1 or not KIND_NAMES[name].truncate]


def candidates(table: DispatchTable, kinds: Iterable[BatchKind]) -> DispatchTable:
    """``table`` with the screened path for all that is raced, and for nothing else: what is to be compiled and checked
    before the race."""
    configs = {}
    for kind in kinds:
        for rows in _sizes_of(kind):
            configs[kind, rows] = table.lookup_on(SamplingPath.SCREENED, rows, kind.screened)
    return _with_screened(table, configs)


def decide(table: DispatchTable, outcome: Outcome) -> DispatchTable:
    """``table``, of ``candidates``, with the screened path where that has won its heat, and nowhere else."""
    won = [(KIND_NAMES[heat.kind], heat.rows) for heat in outcome.heats if heat.screen_wins]
    return _with_screened(table, {(kind, rows): table.lookup(rows, kind.screened) for kind, rows in won})


def _with_screened(table: DispatchTable, configs: dict[tuple[BatchKind, int], Config]) -> DispatchTable:
    """configs: of the sizes of ``SIZES`` that take the screened path. Sizes between take what a tuned table would give
    them; all others what they take without a screen."""
    tuned: dict[BatchKind, dict[int, Config]] = {}
    for kind in BATCH_KINDS:
        if kind.screen:
            unscreened = kind.unscreened
            tuned[kind] = {}
            for rows in range(1, MAX_SCREENED_ROWS + 1):
                of_size = configs.get((unscreened, bucket_for(_sizes_of(unscreened), rows) or 0))
                tuned[kind][rows] = table.lookup(rows, unscreened) if of_size is None else of_size
    return table.with_choices(tuned)


def _sizes_of(kind: BatchKind) -> list[int]:
    return [rows for rows in SIZES if rows <= MOST_ROWS.get(str(kind), 0)]


def race(
    parts: Parts,
    table: DispatchTable,
    stopwatch: Stopwatch,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Time the screened path of ``parts.screen`` where ``table``, of ``candidates``, takes it, beside what the batch
    takes without a screen.

    Small batches come first; a heat that might end after ``MAX_SECONDS`` is left out, and so are those after it. The
    kernels of all these batches have been compiled before. Allocates scratch, and lets go of it.
    """
    assert parts.screen is not None
    started = clock()
    wanted = [
        (kind, rows)
        for rows in SIZES
        for kind in raced_kinds(parts.lm_head)
        if rows in _sizes_of(kind) and rows <= parts.screen.max_rows
        if isinstance(table.lookup(rows, kind.screened), ScreenConfig)
    ]
    largest = max(rows for _, rows in wanted)
    needed = {table.lookup(rows, one) for kind, rows in wanted for one in (kind, kind.screened)}
    parts = parts.with_scratch(needed, largest)  # for all heats, as a server keeps it
    inputs = _Inputs(parts.lm_head, largest)
    heats: list[Heat] = []
    longest = 0.0
    for kind, rows in wanted:
        began = clock()
        if began - started + longest > MAX_SECONDS:
            break
        hidden, params = inputs.batch(kind, rows)
        configs = [table.lookup(rows, kind), table.lookup(rows, kind.screened)]
        calls = [functools.partial(launch, config, hidden, params, parts) for config in configs]
        with on_device_of(hidden):
            builtin, screened = stopwatch(calls, ROUNDS, inputs.refresh)
        heats.append(Heat(str(kind), rows, tuple(builtin), tuple(screened)))
        longest = max(longest, clock() - began)
    skipped = tuple((str(kind), rows) for kind, rows in wanted[len(heats) :])
    return Outcome(tuple(heats), clock() - started, skipped)


class _Inputs:
    """Batches of up to ``max_rows`` rows, other ones in each round, at one place for all rounds."""

    def __init__(self, head: LMHead, max_rows: int) -> None:
        self._head = head
        device = head.weight.device
        of_round = torch.arange(ROUNDS, device=device)[:, None]
        turn = torch.arange(max_rows, device=device) + of_round  # a batch of one row, too, has each of them in turn
        self._hidden = _hidden_states(head, turn)
        self._temperature = _in_turn(TEMPERATURES, turn)
        self._top_k = _in_turn([top_k for top_k, _ in TRUNCATIONS], turn).int()
        self._top_p = _in_turn([top_p for _, top_p in TRUNCATIONS], turn)
        self._position = of_round.expand(-1, max_rows)
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # where a batch is, and its rounds

    def batch(self, kind: BatchKind, rows: int) -> tuple[torch.Tensor, BatchParams]:
        """Hidden states and parameters of a batch, which ``refresh`` writes to from now on."""
        self._places = []

        def placed(rounds: torch.Tensor) -> torch.Tensor:
            self._places.append((rounds[0, :rows].clone(), rounds[:, :rows]))
            return self._places[-1][0]

        row = torch.arange(rows, device=self._head.weight.device)
        hidden, position = placed(self._hidden), placed(self._position)
        temperature = torch.zeros(rows, device=row.device) if kind.greedy else placed(self._temperature)
        truncation = edits = None
        if kind.truncate:
            top_k, top_p = placed(self._top_k), placed(self._top_p)
            largest = max(top_k for top_k, _ in TRUNCATIONS)
            truncation = Truncation(top_k, top_p, torch.zeros_like(top_p), max_top_k=largest)
        if kind.edit:
            edits, _ = edits_of_every_kind(row, self._head)
        params = BatchParams(temperature, row * 7919, position, truncation, edits, all_greedy=kind.greedy)
        return hidden, params

    def refresh(self, index: int) -> None:
        for place, rounds in self._places:
            place.copy_(rounds[index])


def _in_turn(values: Sequence[float], turn: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=turn.device)[turn % len(values)]


def _hidden_states(head: LMHead, turn: torch.Tensor) -> torch.Tensor:
    """``[ROUNDS, B, D]``, the profile of each row in turn. turn: ``[ROUNDS, B]``."""
    weight = head.weight.detach()[: head.vocab_size]
    device, width = weight.device, weight.shape[1]
    generator = torch.Generator(device).manual_seed(1)
    some = weight[:: cdiv(len(weight), MEAN_OF_IDS)].float()
    mean = some.mean(dim=0)
    length = (some - mean).norm(dim=1).mean().clamp(min=1e-6)
    noise = torch.randn(*turn.shape, width, generator=generator, device=device)
    hidden = noise * (_in_turn([deviation for deviation, _ in PROFILES], turn) / length)[..., None]
    # A row of the head less the mean row, divided by the square of its length, gives its own id a logit 1 above the
    # mean, and most others little. With the mean row in it, 16 of them would raise all logits by as much as their own,
    # and make hidden states so long that the screen's bounds are several times as wide.
    likely = torch.zeros(len(PROFILES), width, device=device)
    for place, (_, logits) in enumerate(PROFILES):
        step = max(1, len(weight) // (len(logits) + 1))
        for rank, logit in enumerate(logits):
            row = weight[min((rank + 1) * step, len(weight) - 1)].float() - mean
            likely[place] += logit * row / row.square().sum().clamp(min=length.square() / 4)  # an unused id's is short
    return ((hidden + likely[turn % len(PROFILES)]) / (head.logit_scale or 1.0)).to(weight.dtype)
