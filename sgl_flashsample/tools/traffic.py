"""Tokens per second of servers whose batches change at every step: stock SGLang and ours, in turns.

Both servers run, but one at a time: while one answers, the processes of the other are stopped (SIGSTOP), in the middle
of their requests, and go on later as if no time had passed. So a window measures a server that is under way: nothing
fills or drains. Windows are taken in the order stock, ours, ours, stock. Clients are processes of their own, on cores
that no server uses (``traffic_client.py``).

Closed loops are compared by equal work: both servers answer the same requests in the same order, so the same count of
tokens is the same work. The tokens that both have answered within windows are cut into equal segments, and a pair is
the two running times of one segment. A later window adds segments and changes none, so
one may look after each. Tokens of the first second after a stop are left out for both servers: requests of many clients
then wait for prefill. Two windows of equal time hold different requests, whose prompts and answers differ more than the
servers do. Poisson arrivals come by time, not as the server answers: their pairs are windows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..autotune.race import Ratio
from ..autotune.timing import Timing
from .bench import HALF, OURS, PERCENTILES, STOCK, Bench, Load, memory_share
from .comparison import ALPHA, Comparison
from .samplings import SAMPLINGS
from .server import Server, ServerError
from .traffic_client import ANSWERS, MIX, PROMPTS, TICK, Clients, Plan, Report, kinds_of

# Figures of a row, by the names of our metrics without their prefix: the increase of the first ones during the windows
# over that of the second ones, times a factor; or their increase since the first request of the cell.
PREFIX = "sglang:flashsample_"
FIGURES = {
    "host_us": (("host_seconds_sum", "scheduling_seconds_total"), ("host_seconds_count",), 1e6),
    "replayed": (("replayed_steps_total",), ("replayed_steps_total", "launched_steps_total"), 1.0),
    "late_captures": (("late_captures_total",), None, 1.0),
    "late_compiles": (("late_compiles_total",), None, 1.0),
}
WINDOW, SETTLE = 6.0, 1.0  # seconds; of a window, and after a server goes on until its window begins
PRECISE = 0.02  # width of the interval of the ratio at which a cell of the benchmarks ends
LEAST_PAIRS = 4  # in such a cell
# A segment has as many tokens as the slower server answers in the first SEGMENT seconds, the faster one in SHORTEST.
SEGMENT, SHORTEST, LEAST_SEGMENTS = 2.0, 0.5, 4
FILL = 2.0  # seconds, at least, until a server's first window
SHORTEST_CELL = 2 * (2 * (WINDOW + SETTLE) + FILL)  # seconds of two pairs of windows
KV_TOKENS = (sum(PROMPTS) + sum(ANSWERS)) // 2 + 16  # of a request, on average and at its end
CLIENTS_PER_PROCESS = 64


class Window(NamedTuple):
    """tokens_s: output tokens that arrived, per second. gaps, firsts: PERCENTILES in ms of the times between two chunks
    of a stream and until the first chunk; empty without one."""

    tokens_s: float
    gaps: tuple[float, ...]
    firsts: tuple[float, ...]

    @classmethod
    def of(cls, reports: Iterable[Report], seconds: float) -> Window:
        reports = list(reports)
        gaps, firsts = (
            [one for r in reports for one in values(r)] for values in (lambda r: r.gaps, lambda r: r.firsts)
        )
        return cls(sum(r.tokens for r in reports) / seconds, _percentiles(gaps), _percentiles(firsts))


class Curve(NamedTuple):
    """The tokens that arrived from one server since its cell began. totals: at the end of each ``TICK`` of running
    time, from 0 on. windows: running time, in seconds, of the start and the end of each window."""

    totals: tuple[float, ...]
    windows: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, processes: Iterable[Sequence[int]], windows: Iterable[tuple[float, float]] = ()) -> Curve:
        """processes: tokens in each tick that each client process saw; the last ticks of some may be missing."""
        ticks = map(sum, zip(*processes, strict=False))
        return cls(tuple(itertools.accumulate(ticks, initial=0)), tuple(windows))

    @property
    def running(self) -> float:
        """Seconds that the server has run."""
        return TICK * (len(self.totals) - 1)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Tokens that had arrived at the start and at the end of each window."""
        return [tuple(self.tokens(window).tolist()) for window in self.windows]

    def seconds(self, tokens: Any) -> Any:
        """Running time at which so many tokens had arrived, by linear interpolation."""
        return TICK * np.interp(tokens, self.totals, np.arange(len(self.totals)))

    def tokens(self, seconds: Any) -> Any:
        """Tokens that had arrived at a running time, by linear interpolation."""
        return np.interp(np.divide(seconds, TICK), np.arange(len(self.totals)), self.totals)


def equal_work(curves: Sequence[Curve]) -> list[list[float]]:
    """Tokens per second of each server in each segment of the tokens that both answered within windows. Segments have
    equally many tokens. With fewer than ``LEAST_SEGMENTS`` there are none."""
    common = _common([curve.spans for curve in curves])
    nothing: list[list[float]] = [[] for _ in curves]
    if not common:
        return nothing
    tokens = np.concatenate([[0.0], np.cumsum([end - start for start, end in common])])
    starts = np.array([start for start, _ in common])
    # Running time within the common spans alone, at the start of each and at the end of the last.
    within = [np.concatenate([[0.0], np.cumsum([np.ptp(curve.seconds(span)) for span in common])]) for curve in curves]
    if min(float(times[-1]) for times in within) < SHORTEST or max(float(times[-1]) for times in within) < SEGMENT:
        return nothing

    def answered(curve: Curve, times: np.ndarray, seconds: float) -> float:
        """Tokens of the common spans in the first ``seconds`` of a server; all where it took less."""
        if seconds >= times[-1]:
            return float(tokens[-1])
        place = int(np.searchsorted(times, seconds, side="right")) - 1
        running = curve.seconds(starts[place]) + seconds - times[place]
        return float(tokens[place] + curve.tokens(running) - starts[place])

    each = list(zip(curves, within, strict=True))
    segment = max(min(answered(*one, SEGMENT) for one in each), max(answered(*one, SHORTEST) for one in each))
    number = int(tokens[-1] / segment + 1e-6)
    if number < LEAST_SEGMENTS:
        return nothing
    bounds = np.minimum(segment * np.arange(number + 1), tokens[-1])
    place = np.clip(np.searchsorted(tokens, bounds, side="right") - 1, 0, len(common) - 1)
    at = starts[place] + bounds - tokens[place]
    speeds = []
    for curve, times in each:
        seconds = times[place] + curve.seconds(at) - curve.seconds(starts[place])
        speeds.append((segment / np.diff(seconds)).tolist())
    return speeds


def _common(spans: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The parts that lie in a span of each list. Spans of one list are in order, and apart."""
    common = list(spans[0])
    for others in spans[1:]:
        both = [(max(a, c), min(b, d)) for a, b in common for c, d in others]
        common = [(start, end) for start, end in both if end > start]
    return common


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1e3 * float(value) for value in np.percentile(seconds, PERCENTILES)) if seconds else ()


@dataclasses.dataclass
class TrafficCell:
    """One plan, measured. windows, figures, curves: by server's name, stock first. curves: none where the first seconds
    are measured. before: the same cell, when it was measured earlier; its windows are among these, its work counts.
    seconds: that it has taken, with those before."""

    plan: Plan
    windows: dict[str, list[Window]]
    figures: dict[str, dict[str, float | None]]
    curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    before: TrafficCell | None = None
    seconds: float = 0.0

    @property
    def title(self) -> str:
        asked = "mixed requests" if self.plan.sampling == MIX else SAMPLINGS[self.plan.sampling].title
        return f"{asked}; {self.plan.clients} clients"

    @property
    def place(self) -> dict[str, Any]:
        return {"sampling": self.plan.sampling, "clients": self.plan.clients}

    @property
    def segments(self) -> dict[str, list[float]]:
        """Tokens per second by server's name, of closed loops, in segments of equal work; empty without such."""
        earlier = self.before.segments if self.before is not None else {}
        if not self.plan.clients or len(self.curves) != 2:
            return earlier
        work = equal_work([self.curves[label] for label in self.windows])
        speeds = {label: earlier.get(label, []) + own for label, own in zip(self.windows, work, strict=True)}
        return speeds if all(speeds.values()) else {}

    @property
    def pairs(self) -> list[list[float]]:
        """Tokens per second of stock and of ours, in pairs: of segments, or of windows. None with a server that has
        answered nothing."""
        speeds = self.segments
        if not self.plan.clients:
            pairs = min(map(len, self.windows.values()))
            speeds = {label: [one.tokens_s for one in windows[:pairs]] for label, windows in self.windows.items()}
        each = list(speeds.values())
        return each if len(each) == 2 and all(each) and min(*map(min, each)) > 0 else [[], []]

    @property
    def ratio(self) -> Ratio | None:
        """Tokens per second of ours over stock's, minus 1, with the interval of a measurement that does not end for
        what it shows. None with fewer than two pairs."""
        stock, ours = self.pairs
        return Ratio.paired(ours, stock, ALPHA) if len(stock) > 1 else None

    @property
    def comparison(self) -> Comparison:
        """Of tokens per second, with an interval that holds after each pair of windows."""
        return Comparison.of(*self.pairs, more_is_faster=True)

    @property
    def pair_seconds(self) -> float:
        return self.seconds / max(1, self.comparison.pairs)

    @property
    def verdict(self) -> str:
        return self.comparison.words(self.pair_seconds)

    @property
    def gap_ratios(self) -> dict[int, Ratio]:
        """Percentiles of the times between tokens, ours over stock's, minus 1, by pairs of windows; empty with fewer
        than two pairs in which both servers have such times, above 0."""
        stock, ours = ([window.gaps for window in windows] for windows in self.windows.values())
        pairs = [pair for pair in zip(ours, stock, strict=False) if all(gaps and min(gaps) > 0 for gaps in pair)]
        if len(pairs) < 2:
            return {}
        return {
            percent: Ratio.paired([mine[place] for mine, _ in pairs], [theirs[place] for _, theirs in pairs], ALPHA)
            for place, percent in enumerate(PERCENTILES)
        }

    def speed(self, label: str) -> tuple[float, float]:
        """Tokens per second, and half the distance of the quartiles: of the compared work, or else of the windows."""
        if segments := self.segments.get(label):  # of equally many tokens: their harmonic mean is tokens over time
            return statistics.harmonic_mean(segments), Timing.of(segments).spread
        timing = Timing.of([window.tokens_s for window in self.windows[label]])
        return timing.us, timing.spread

    @property
    def precise(self) -> bool:
        """The interval is narrow enough, wherever it lies: to stop for where it lies would favour a difference."""
        pairs = len(self.segments.get(OURS, ())) if self.plan.clients else min(map(len, self.windows.values()))
        return pairs >= LEAST_PAIRS and (ratio := self.ratio) is not None and ratio.high - ratio.low <= PRECISE

    def rows(self) -> list[dict[str, Any]]:
        """For a result file, one per server. tokens_s, spread: ``speed``; times are medians of the windows. ratio: of
        tokens per second (None where stock answered nothing), with the bounds of its 99 % interval (None without
        ``ratio``), the windows of both servers, and the segments of their compared work (0 where windows are compared).
        itl_ratio: of the times between tokens, by percentile, where there are two pairs of windows."""
        rows: list[dict[str, Any]] = []
        for label, windows in self.windows.items():
            tokens_s, spread = self.speed(label)
            row: dict[str, Any] = {"clients": self.plan.clients or None, "arrivals": self.plan.arrivals}
            row |= {"sampling": self.plan.sampling, "backend": label}
            row |= {"tokens_s": round(tokens_s, 1), "spread": round(spread, 1)}
            for name, values in (("ttft_ms", [w.firsts for w in windows]), ("itl_ms", [w.gaps for w in windows])):
                for place, percent in enumerate(PERCENTILES):
                    seen = [each[place] for each in values if each]
                    row[f"{name}_p{percent}"] = round(statistics.median(seen), 3) if seen else None
            rows.append(row | self.figures.get(label, dict.fromkeys(FIGURES)))
        stock, ours = (row["tokens_s"] for row in rows)
        of, low, high = round(ours / stock, 4) if stock else None, None, None
        if (ratio := self.ratio) is not None:
            of, low, high = bounds_of(ratio)
        counts = {"windows": sum(map(len, self.windows.values())), "segments": len(self.segments.get(OURS, ()))}
        rows[1]["ratio"] = {"of": of, "low": low, "high": high} | counts
        rows[1]["itl_ratio"] = {
            f"p{percent}": dict(zip(("of", "low", "high"), bounds_of(one), strict=True))
            for percent, one in self.gap_ratios.items()
        }
        return rows

    @property
    def shown(self) -> dict[str, str]:
        """What is measured beside the answer, in words."""
        gaps = [[window.gaps for window in windows if window.gaps] for windows in self.windows.values()]
        between = ""
        if all(gaps):
            medians = [[statistics.median(each[place] for each in one) for one in gaps] for place in (0, 1)]
            texts = zip(PERCENTILES, medians, strict=True)
            between = ", ".join(f"p{percent} {stock:.2f} -> {ours:.2f}" for percent, (stock, ours) in texts)
        speeds = " -> ".join(f"{self.speed(label)[0]:.0f}" for label in self.windows)
        return {"tokens/s": speeds, "ms between tokens": between}

    def line(self) -> str:
        windows = sum(map(len, self.windows.values()))
        verdict = f": {self.verdict}, {windows} windows" if self.comparison.pairs else ""
        return f"{self.shown['tokens/s']} tokens/s{verdict}"


def bounds_of(ratio: Ratio) -> tuple[float, float, float]:
    """The ratio and the bounds of its interval, as they stand in result files."""
    off, low, high = (round(1 + value, 4) for value in (ratio.off, ratio.low, ratio.high))
    return off, low, high


def split_cores() -> tuple[list[int], list[int]]:
    """The cores of servers and those of clients, a quarter of this process's; all of both where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    clients = max(1, len(cores) // 4)
    return cores[:-clients] or cores, cores[-clients:]


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started within the block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processes_of(clients: int, cores: Sequence[int]) -> int:
    """How many processes send the requests of so many clients."""
    return max(1, min(len(cores), -(-clients // CLIENTS_PER_PROCESS)))


# --- one server ------------------------------------------------------------------------------------------------------


class Side:
    """One server and the requests to it. stops: it stands still unless it is measured."""

    def __init__(self, label: str, server: Server, clients: Clients, stops: bool) -> None:
        self.label, self._server, self._clients, self._stops = label, server, clients, stops
        self._first = self._start = self._last = dict[str, float]()  # counters before the first request and window
        self._windows: list[tuple[float, float]] = []
        self._begun = False

    def begin(self, plan: Plan) -> None:
        self._signal(signal.SIGCONT)
        self._first = self._start = self._last = counters(self._server.metrics())
        self._tell("begin", self.label, self._server.port, plan)
        self._begun = True

    def _tell(self, *command: Any) -> list[Any]:
        try:
            return self._clients.tell(*command)
        except (EOFError, OSError) as error:
            raise ServerError(f"a client process has ended or hangs: {error or type(error).__name__}") from error

    def fill(self, most: float) -> None:
        """Wait until as many requests have ended as are open, for ``most`` seconds at most."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < most:
            time.sleep(min(0.25, most))
            reports = self._report(0.0, 0.0)
            if waited >= FILL and sum(r.ended for r in reports) >= sum(r.open for r in reports) > 0:
                break
        self._start = self._last = counters(self._server.metrics())

    def window(self, seconds: float, settle: float = SETTLE) -> Window:
        """Raises ServerError for a request that was not answered as asked."""
        ran = self.curve().running
        start = time.monotonic() + settle
        time.sleep(settle + seconds)
        window = Window.of(self._report(start, start + seconds), seconds)
        self._windows.append((ran + settle, ran + settle + seconds))
        self._last = counters(self._server.metrics())
        return window

    def curve(self) -> Curve:
        return Curve.of(self._tell("arrived", self.label), self._windows)

    def _report(self, start: float, end: float) -> list[Report]:
        reports = self._tell("report", self.label, start, end)
        for failure, count in (pair for report in reports for pair in report.failures.items()):
            if self._server.process is not None and (code := self._server.process.poll()) is not None:
                raise ServerError(f"{self.label} ended with code {code}: {self._server.last_error()}")
            raise ServerError(f"{count} requests to {self.label}: {failure}")
        return reports

    def pause(self) -> None:
        if self._stops:
            self._tell("pause", self.label)
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._stops:
            self._signal(signal.SIGCONT)
            self._tell("resume", self.label)

    def end(self) -> None:
        """Leave the requests, and let the server forget them."""
        self._signal(signal.SIGCONT)
        if self._begun:
            with contextlib.suppress(OSError, ServerError):
                self._tell("end", self.label)
                self._server.post("/abort_request", rid="", abort_all=True)

    def figures(self) -> dict[str, float | None]:
        """The figures of the windows; None for each that the server does not count."""
        found: dict[str, float | None] = {}
        for name, (above, below, factor) in FIGURES.items():
            before = self._start if below else self._first
            increase, steps = (
                sum(self._last.get(one, 0.0) - before.get(one, 0.0) for one in names)
                for names in (above, below or above)
            )
            counted = {*above, *(below or ())} <= self._last.keys() and (below is None or steps > 0)
            found[name] = round(factor * increase / (steps if below else 1.0), 3) if counted else None
        return found

    def _signal(self, number: signal.Signals) -> None:
        if self._server.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.process.pid, number)


def counters(metrics: str) -> dict[str, float]:
    """Our metrics in the text of /metrics, without their prefix, summed over their labels."""
    found: dict[str, float] = {}
    for name, value in re.findall(rf"^{PREFIX}(\w+)(?:\{{[^}}]*\}})? (\S+)$", metrics, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


# --- a cell ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _sides(servers: Mapping[str, Server], clients: Clients) -> Iterator[list[Side]]:
    """The sides of a cell. Each of several stands still until it begins: an idle server keeps a core busy."""
    sides = [Side(label, server, clients, stops=len(servers) > 1) for label, server in servers.items()]
    try:
        for side in sides if len(sides) > 1 else ():
            side._signal(signal.SIGSTOP)
        yield sides
    finally:
        for side in sides:
            side.end()


def measure(
    servers: Mapping[str, Server],
    clients: Clients,
    plan: Plan,
    seconds: float,
    *,
    window: float = WINDOW,
    before: TrafficCell | None = None,
    enough: Callable[[TrafficCell], bool] = lambda cell: cell.precise,
    step: Callable[[TrafficCell, float], Any] = lambda cell, left: None,
) -> TrafficCell:
    """A cell of two servers, the baseline first, or of one. It ends when it is ``enough``, and after ``seconds`` at the
    latest, but with two pairs. before: the same cell, to go on with. step: called after each pair with the seconds that
    are left. Raises ServerError."""
    began = time.monotonic()
    cell = TrafficCell(plan, {label: list(before.windows[label]) if before else [] for label in servers}, {})
    cell.before, earlier = before, before.seconds if before else 0.0
    with _sides(servers, clients) as sides:
        for side in sides:
            side.begin(plan)
            side.fill(seconds / 4)
            side.pause()
        for pair in itertools.count(1):
            for side in sides if pair % 2 else reversed(sides):
                side.resume()
                cell.windows[side.label].append(side.window(window))
                side.pause()
                cell.curves[side.label] = side.curve()
            cell.figures = {side.label: side.figures() for side in sides}
            cell.seconds = earlier + time.monotonic() - began
            left = began + seconds - time.monotonic()
            step(cell, left)
            if pair >= 2 and (left < len(sides) * (window + SETTLE) or (len(sides) > 1 and enough(cell))):
                return cell
    raise AssertionError


def measure_first(servers: Mapping[str, Server], clients: Clients, plan: Plan, seconds: float) -> TrafficCell:
    """The first ``seconds`` of the traffic of each server, one after the other."""
    cell = TrafficCell(plan, {}, {})
    with _sides(servers, clients) as sides:
        for side in sides:
            side.begin(plan)
            cell.windows[side.label] = [side.window(seconds, settle=0.0)]
            cell.figures[side.label] = side.figures()
            side.pause()
    return cell


# --- sgl-flashsample bench --traffic ---------------------------------------------------------------------------------


class TrafficBench(Bench):
    """``sgl-flashsample bench --traffic``: both servers side by side, a cell per sampling (the mix may be one) and
    number of clients, which ``options.batches`` has. Each cell gets an equal share of the time that is left; what
    decided cells leave over goes to the others."""

    compared, size_option = "tokens per second", "--traffic"

    def _compare(self) -> None:
        servers, mine = split_cores()
        with contextlib.ExitStack() as stack:
            with on_cores(servers):
                running = {STOCK: stack.enter_context(self.started(STOCK))}
                if (share := memory_share(self.device)) > HALF:
                    raise ServerError(
                        f"one server takes {share:.0%} of the GPU's memory: --traffic needs two at once; a smaller "
                        "--mem-fraction-static makes room, else leave --traffic out"
                    )
                running[OURS] = stack.enter_context(self.started(OURS))
            clients = stack.enter_context(Clients(processes_of(max(self.options.batches), mine), mine))
            while (places := self._undecided) and self._progress.left >= SHORTEST_CELL:
                for number, place in enumerate(places):
                    seconds = self._progress.left / (len(places) - number)
                    if self._progress.left >= SHORTEST_CELL:
                        self._measure_traffic(running, clients, place, max(seconds, SHORTEST_CELL))

    def _measure_traffic(
        self, servers: Mapping[str, Server], clients: Clients, place: tuple[str, int], seconds: float
    ) -> None:
        plan, before = Plan(place[0], self.options.load.ids, place[1]), self._cells.get(place)

        def step(cell: TrafficCell, left: float) -> None:
            self._cells[place] = cell
            self._progress.know(cell.comparison.percent)

        self._progress.begin(f"{place[0]}, {place[1]} clients", before.comparison.percent if before else "no pair yet")
        measure(servers, clients, plan, seconds, before=before, enough=lambda cell: cell.comparison.decided, step=step)
        self._show_decided()

    def _kinds_of(self, sampling: str) -> list[str]:
        return kinds_of(sampling)


def load_of(ids: range) -> Load:
    """The load by which ``Bench`` bounds the KV cache of its servers."""
    return Load(ids, prompt_tokens=KV_TOKENS - ANSWERS[0] - 64, long=ANSWERS[0])
