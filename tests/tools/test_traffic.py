"""Moving traffic: which requests are sent, what a window counts, and what is called a difference."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import math
import random
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from serving import CUDA, needs_sglang

from sgl_flashsample.tools import bench, markov, progress
from sgl_flashsample.tools.bench import OURS, STOCK
from sgl_flashsample.tools.server import RequestError, Server, ServerError

pytest.importorskip("aiohttp")

from sgl_flashsample.tools import traffic, traffic_client
from sgl_flashsample.tools.samplings import SAMPLINGS
from sgl_flashsample.tools.traffic_client import (
    ANSWERS,
    CHUNK_TOKENS,
    MIX,
    PROMPTS,
    TICK,
    Clients,
    Plan,
    Report,
    Requests,
)

LAB = Path(__file__).resolve().parents[1] / "lab"
IDS = range(100, 900)
CLOSED, POISSON = Plan("t1", IDS, clients=32), Plan("t1", IDS, rate=4.0)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_request_depends_on_its_plan_and_number_alone():
    """In whatever order, and in whatever process, they are asked for."""
    numbers = list(range(200))
    one = {number: Plan(MIX, IDS, 8).request(number) for number in numbers}
    assert {number: Plan(MIX, IDS, 8).request(number) for number in reversed(numbers)} == one
    assert len({json.dumps(body) for body in one.values()}) == len(numbers)
    assert Plan(MIX, IDS, 8, seed=2).request(0) != one[0]
    code = (
        "import json, sys\nfrom sgl_flashsample.tools.traffic_client import Plan\n"
        "print(json.dumps([Plan('mix', range(100, 900), 8).request(n) for n in range(200)]))\n"
        "assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == list(one.values())


def test_the_mix_has_the_stated_shares_and_seeds_in_half():
    plan = Plan(MIX, IDS)
    kinds = Counter(plan.kind(number) for number in range(4000))
    shares = {"trunc": 0.4, "t1": 0.2, "greedy": 0.2, "penalty": 0.05, "bias": 0.05, "json": 0.05, "logprob": 0.05}
    assert kinds == {(kind, seeded): 4000 * share / 2 for kind, share in shares.items() for seeded in (False, True)}
    for number in range(200):
        body, (kind, seeded) = plan.request(number), plan.kind(number)
        asked = SAMPLINGS[kind]
        assert asked.params.items() <= body["sampling_params"].items() and asked.fields.items() <= body.items()
        assert ("sampling_seed" in body["sampling_params"]) is seeded


def test_lengths_are_uniform_and_a_clients_first_answer_is_cut():
    bodies = [Plan("t1", IDS).request(number) for number in range(3000)]
    for lengths, (least, most) in (
        ([len(body["input_ids"]) for body in bodies], PROMPTS),
        ([body["sampling_params"]["max_new_tokens"] for body in bodies], ANSWERS),
    ):
        assert min(lengths) >= least and max(lengths) <= most
        assert scipy.stats.kstest(lengths, scipy.stats.uniform(least, most - least).cdf).pvalue > 1e-3
    assert all(token in IDS for body in bodies for token in body["input_ids"])
    cut = [Plan("t1", IDS, clients=2000).request(n)["sampling_params"]["max_new_tokens"] for n in range(3000)]
    whole = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    assert cut[2000:] == whole[2000:] and all(1 <= a <= b for a, b in zip(cut, whole, strict=True))
    assert np.mean(cut[:2000]) == pytest.approx(np.mean(whole) / 2, rel=0.05)


def test_arrivals_are_a_poisson_process_of_the_rate():
    plan, parts = Plan("t1", IDS, rate=50.0), 3
    arrivals = sorted(
        at
        for part in range(parts)
        for at in itertools.accumulate(plan.wait(n, parts) for n in range(part, 9000, parts))
    )
    waits = np.diff(arrivals[:8000])
    assert scipy.stats.kstest(waits, scipy.stats.expon(scale=1 / 50).cdf).pvalue > 1e-3


# --- what is called a difference --------------------------------------------------------------------------------------


def cell_of(stock: list[float], ours: list[float]) -> traffic.TrafficCell:
    windows = {
        label: [traffic.Window(speed, (), ()) for speed in speeds] for label, speeds in ((STOCK, stock), (OURS, ours))
    }
    return traffic.TrafficCell(POISSON, windows, {})


def test_a_server_that_answered_nothing_has_no_ratio():
    stock, ours = cell_of([0.0], [900.0]).rows()
    assert (stock["tokens_s"], ours["tokens_s"]) == (0.0, 900.0)
    assert (ours["ratio"]["of"], ours["ratio"]["low"]) == (None, None)


def test_the_interval_of_windows_is_that_of_the_t_distribution():
    r = random.Random(3)
    stock = [1000 * math.exp(r.gauss(0, 0.03)) for _ in range(9)]
    ours = [1.06 * speed * math.exp(r.gauss(0, 0.01)) for speed in stock]
    cell = cell_of(stock, ours)
    logs = np.log(ours), np.log(stock)
    low, high = (math.exp(bound) for bound in scipy.stats.ttest_rel(*logs).confidence_interval(0.99))
    row = cell.rows()[1]
    assert (row["ratio"]["low"], row["ratio"]["high"]) == pytest.approx((low, high), abs=1e-4)
    assert row["ratio"]["of"] == pytest.approx(math.exp(np.mean(logs[0]) - np.mean(logs[1])), abs=1e-4)
    assert row["ratio"]["windows"] == 18 and row["ratio"]["segments"] == 0
    assert row["tokens_s"] == pytest.approx(np.median(ours), abs=0.1)
    assert cell.precise is (high - low <= 0.02)


def test_percentiles_of_gaps_have_the_interval_of_their_pairs_of_windows():
    r = random.Random(5)
    gaps = {label: [(r.uniform(4, 5), r.uniform(40, 90)) for _ in range(7)] for label in (STOCK, OURS)}
    windows = {label: [traffic.Window(1000.0, both, ()) for both in each] for label, each in gaps.items()}
    row = traffic.TrafficCell(POISSON, windows, {}).rows()[1]
    for place, percent in enumerate(("p50", "p99")):
        ours, stock = (np.log([both[place] for both in gaps[label]]) for label in (OURS, STOCK))
        low, high = np.exp(scipy.stats.ttest_rel(ours, stock).confidence_interval(0.99))
        got = row["itl_ratio"][percent]
        assert (got["low"], got["high"]) == pytest.approx((low, high), abs=1e-4)
        assert got["of"] == pytest.approx(math.exp(np.mean(ours) - np.mean(stock)), abs=1e-4)


@pytest.mark.parametrize("missing", [(), (0.0, 50.0)], ids=["no gaps", "a gap of 0"])
def test_a_pair_of_windows_counts_for_gaps_where_both_servers_have_them(missing):
    def windows(*gaps: tuple[float, ...]) -> list[traffic.Window]:
        return [traffic.Window(1000.0, each, ()) for each in gaps]

    sides = {STOCK: windows(missing, (4.0, 50.0), (5.0, 60.0)), OURS: windows((9.0, 9.0), (2.0, 25.0), (2.5, 30.0))}
    row = traffic.TrafficCell(POISSON, sides, {}).rows()[1]
    assert [row["itl_ratio"][name]["of"] for name in ("p50", "p99")] == [0.5, 0.5]
    sides = {STOCK: windows(missing, (4.0, 50.0)), OURS: windows((9.0, 9.0), (2.0, 25.0))}
    assert traffic.TrafficCell(POISSON, sides, {}).rows()[1]["itl_ratio"] == {}


def curve_of(speeds: list[float], segment: float, before: float, after: float = 0.0) -> traffic.Curve:
    """Tokens of segments at these speeds, after ``before`` tokens and before ``after`` seconds at the last speed; one
    window from the first segment on."""
    ends = np.cumsum([1.0, *(segment / speed for speed in speeds), max(after, TICK)])
    tokens = [before + segment * place for place in range(len(speeds) + 1)] + [before + segment * (len(speeds) + 9)]
    totals = np.interp(np.arange(0, ends[-2] + after + TICK / 2, TICK), [0.0, *ends], [0.0, *tokens])
    return traffic.Curve(tuple(totals), ((1.0, TICK * (len(totals) - 1)),))


def test_closed_loops_are_compared_by_equal_work():
    """Curves with known speeds in segments whose bounds lie on ticks: the row has their ratio, speed and spread. Stock
    answers the 1,000 tokens of a segment in its first 2 s."""
    stock = [500.0, 1000.0, 250.0, 1000.0, 500.0]
    ours = [1000.0, 1000.0, 1000.0, 500.0, 500.0]
    curves = {STOCK: curve_of(stock, 1000.0, 300.0), OURS: curve_of(ours, 1000.0, 300.0, after=3.0)}
    same = [traffic.Window(77.0, (), ())] * 2
    cell = traffic.TrafficCell(CLOSED, {STOCK: same, OURS: same}, {}, curves)
    assert cell.segments == {STOCK: pytest.approx(stock), OURS: pytest.approx(ours)}
    rows, logs = cell.rows(), (np.log(ours), np.log(stock))
    low, high = (math.exp(bound) for bound in scipy.stats.ttest_rel(*logs).confidence_interval(0.99))
    assert (rows[1]["ratio"]["low"], rows[1]["ratio"]["high"]) == pytest.approx((low, high), abs=1e-4)
    assert rows[1]["ratio"]["segments"] == 5 and rows[1]["ratio"]["windows"] == 4
    assert [row["tokens_s"] for row in rows] == [pytest.approx(5000 / 10, abs=0.1), pytest.approx(5000 / 7, abs=0.1)]
    assert rows[0]["spread"] == traffic.Timing.of(stock).spread


def test_a_later_window_adds_segments_and_changes_none():
    """So that one may look after each window."""
    r = np.random.default_rng(1)
    stock, ours = ([float(speed) for speed in r.uniform(400, 900, 24)] for _ in range(2))
    curves = [curve_of(speeds, 1000.0, 300.0) for speeds in (stock, ours)]
    ends = [curve.windows[0][1] for curve in curves]
    pieces = [[(start, start + 6.0) for start in np.arange(1.0, end - 6, 7.0)] for end in ends]
    found = [
        traffic.equal_work(
            [curve._replace(windows=tuple(some[:count])) for curve, some in zip(curves, pieces, strict=True)]
        )
        for count in range(2, 5)
    ]
    counts = [len(speeds) for speeds, _ in found]
    assert counts[0] >= 4 and counts == sorted(set(counts))
    for fewer, more in itertools.pairwise(found):
        assert [speeds[: len(fewer[0])] for speeds in more] == [pytest.approx(speeds) for speeds in fewer]


def test_a_cell_that_is_gone_on_with_counts_its_earlier_work():
    curves = {STOCK: curve_of([500.0] * 5, 1000.0, 300.0), OURS: curve_of([625.0] * 5, 1000.0, 300.0)}
    windows = {label: [traffic.Window(1.0, (), ())] for label in curves}
    first = traffic.TrafficCell(CLOSED, windows, {}, curves)
    both = traffic.TrafficCell(CLOSED, windows, {}, curves, before=first)
    assert both.segments == {STOCK: pytest.approx([500.0] * 10), OURS: pytest.approx([625.0] * 10)}
    assert (first.comparison.pairs, both.comparison.pairs) == (5, 10)
    assert both.verdict == "faster by 25.0 ± 0.1 %"


def test_work_outside_the_windows_of_either_server_is_left_out():
    """Each server runs at 1,000 and at 1,250 tokens/s within its windows, and at a tenth of it for a second after each
    stop. The windows have tokens 100 to 5,100 and 5,200 to 10,200 of stock, 50 to 6,300 and 6,425 to 12,675 of ours."""

    def curve(speed: float, first: float) -> traffic.Curve:
        times, tokens, windows = [0.0, 1.0], [0.0, first], []
        for _ in range(2):
            windows.append((times[-1], times[-1] + 5.0))
            times += [times[-1] + 5.0, times[-1] + 6.0]
            tokens += [tokens[-1] + 5 * speed, tokens[-1] + 5.1 * speed]
        return traffic.Curve(tuple(np.interp(np.arange(0, 13.05, TICK), times, tokens)), tuple(windows))

    speeds = traffic.equal_work([curve(1000.0, 100.0), curve(1250.0, 50.0)])
    assert speeds == [pytest.approx([1000.0] * 4), pytest.approx([1250.0] * 4)]


@pytest.mark.parametrize(
    "before, number", [(300.0, 4), (2300.0, 0), (7300.0, 0), (9300.0, 0)], ids=["8 s", "6 s", "1 s", "none"]
)
def test_without_enough_common_work_there_is_no_ratio(before, number):
    """The first window of ours begins after so many tokens, that of stock after 300; stock answered 8 s of work."""
    curves = {STOCK: curve_of([1000.0] * 8, 1000.0, 300.0), OURS: curve_of([1000.0] * 8, 1000.0, before)}
    windows = [traffic.Window(1000.0, (), ())] * 4
    cell = traffic.TrafficCell(CLOSED, {STOCK: windows, OURS: windows}, {}, curves)
    assert cell.rows()[1]["ratio"]["segments"] == number
    assert (cell.ratio is None) is (number == 0) and cell.precise is (number > 0)
    assert cell.comparison.pairs == number
    assert cell.rows()[0]["tokens_s"] == pytest.approx(1000.0, abs=0.1)


def served(
    requests: tuple[np.ndarray, np.ndarray], speed: float, rng: np.random.Generator
) -> tuple[traffic.Curve, list[traffic.Window]]:
    """A made server that is stopped five times at random: its curve, and its windows of 6 s. requests: tokens of
    prompts and of answers.

    A step takes longer with more rows and pauses for prefill, its time is noisy, and some steps stall. A request joins
    in the first or the second step after the last one of its client has ended. The first step after a stop takes up to
    0.4 s longer.
    """
    steps = 3300
    chunks, rows, prefill = np.zeros((2, steps)), np.zeros(steps + 1), np.zeros(steps)  # chunks: by client process
    free = [0] * CLOSED.clients
    waits = rng.integers(0, 2, len(requests[0]))
    for number, (prompt, tokens, wait) in enumerate(zip(*(each.tolist() for each in (*requests, waits)), strict=True)):
        if (begin := heapq.heappop(free) + wait) >= steps:
            break
        end, interval = begin + tokens, 1 if CLOSED.streams(number) else CHUNK_TOKENS
        prefill[begin] += prompt
        rows[begin] += 1
        rows[min(end, steps)] -= 1
        mine = chunks[number % 2]
        mine[begin] += 1
        mine[begin + interval : end : interval] += interval
        if (rest := (tokens - 1) % interval) and end <= steps:
            mine[end - 1] += rest
        heapq.heappush(free, end)
    seconds = 0.006 + 5e-5 * np.cumsum(rows[:-1]) + np.where(prefill > 0, 0.04 + 1e-4 * prefill, 0.0)
    seconds *= np.exp(rng.normal(0, 0.05, steps))
    seconds += np.where(rng.random(steps) < 0.002, rng.exponential(0.02, steps), 0.0)
    times = np.cumsum(seconds / speed)
    turns = [3 + 2 * rng.random()]  # running times; at the first one the server is filled
    for _ in range(5):
        times[times >= turns[-1]] += 0.4 * rng.random()
        turns.append(turns[-1] + 7.0 + 0.5 * rng.random())
    assert times[-1] > turns[-1]
    bounds, totals = TICK * np.arange(int(turns[-1] / TICK) + 1), np.cumsum(chunks.sum(0))

    def total(at: float) -> float:
        return float(totals[np.searchsorted(times, at) - 1])

    windows = [traffic.Window((total(turn + 7) - total(turn + 1)) / 6, (), ()) for turn in turns[:-1]]
    ticks = [np.histogram(times, bounds, weights=part)[0] for part in chunks]
    return traffic.Curve.of(ticks, [(turn + 1, turn + 7) for turn in turns[:-1]]), windows


@pytest.mark.parametrize("faster", [1.0, 1.05])
def test_equal_work_tells_apart_what_windows_do_not(faster):
    """100 cells of two made servers: the 99 % interval holds the true ratio, and is at most half as wide as that of
    windows. So does the interval that may be looked at after each window, at all looks."""
    rng, held, always, widths = np.random.default_rng(7), 0, 0, []
    for _ in range(100):
        prompts, answers = (rng.integers(least, most + 1, 900) for least, most in (PROMPTS, ANSWERS))
        cut = 1.0 - rng.random(CLOSED.clients)
        answers[: CLOSED.clients] = np.ceil(answers[: CLOSED.clients] * cut)
        (stock, of_stock), (ours, of_ours) = (served((prompts, answers), speed, rng) for speed in (1.0, faster))
        about = {STOCK: of_stock, OURS: of_ours}, {}, {STOCK: stock, OURS: ours}
        work, windows = (traffic.TrafficCell(plan, *about).ratio for plan in (CLOSED, POISSON))
        held += work.low <= faster - 1 <= work.high
        looks = [
            traffic.TrafficCell(CLOSED, {STOCK: [], OURS: []}, {}, curves).comparison
            for count in range(2, 6)
            if (curves := {label: curve._replace(windows=curve.windows[:count]) for label, curve in about[2].items()})
        ]
        always += all(look.low <= faster - 1 <= look.high for look in looks)
        widths.append((work.high - work.low, windows.high - windows.low))
    assert min(held, always) >= 95
    of_work, of_windows = np.median(widths, axis=0)
    assert of_work <= of_windows / 2


def test_tokens_count_in_the_tick_of_running_time_in_which_they_arrived(monkeypatch):
    """A stop of 5 s does not count, and a tick that is not over is not told."""
    now = 100.0
    monkeypatch.setattr(traffic_client, "time", types.SimpleNamespace(monotonic=lambda: now))

    async def run() -> None:
        nonlocal now
        requests = Requests(None, 0, CLOSED._replace(clients=0), 0, 1)
        for after, act in (
            (0.05, lambda: requests._note(requests._now(), 3)),
            (0.12, lambda: requests._note(requests._now(), 4)),
            (0.08, requests.pause),
            (5.00, lambda: requests._note(requests._now(), 5)),
            (0.00, requests.resume),
            (0.17, lambda: requests._note(requests._now(), 6)),
            (0.03, lambda: None),
        ):
            now += after
            act()
        assert requests.arrived() == [3, 4, 5, 0]
        requests.end()

    asyncio.run(run())


def test_equal_servers_are_called_different_as_often_as_stated():
    """A cell that ends as soon as its interval is narrow, 2,000 times: the rate of 1 % has a standard error of 0.2."""
    r, different = random.Random(5), 0
    for _ in range(2000):
        stock, ours = ([math.exp(r.gauss(0, 0.01)) for _ in range(12)] for _ in range(2))
        for pairs in range(4, 13):
            cell = cell_of(stock[:pairs], ours[:pairs])
            if cell.precise:
                break
        different += not cell.ratio.low <= 0 <= cell.ratio.high
    assert different <= 2000 * 0.02


def test_a_line_says_the_speeds_and_the_answer():
    assert cell_of([1000.0] * 4, [1060.0] * 4).line() == "1000 -> 1060 tokens/s: faster by 6.0 ± 0.1 %, 8 windows"
    assert cell_of([1000.0], [1060.0]).line().startswith("1000 -> 1060 tokens/s: not decided yet (about ")
    assert cell_of([0.0], [1060.0]).line() == "0 -> 1060 tokens/s"


def test_a_window_counts_tokens_and_has_the_percentiles_of_what_all_processes_saw():
    gaps = [[0.001 * place for place in range(1, 61)], [0.001 * place for place in range(61, 101)]]
    window = traffic.Window.of([Report(60, gaps[0], [0.5], 0, 0, {}), Report(40, gaps[1], [], 0, 0, {})], 2.0)
    assert window.tokens_s == 50 and window.firsts == (500.0, 500.0)
    assert window.gaps == pytest.approx(tuple(np.percentile([*gaps[0], *gaps[1]], (50, 99)) * 1e3))


# --- windows of servers -----------------------------------------------------------------------------------------------

# Answers a token per request and step, in chunks of the interval that the request asks for; --short: a token less. It
# counts steps, and under two labels how often its metrics are read.
ANSWERING = """
import asyncio, json, sys
from aiohttp import web
option = lambda name: sys.argv[sys.argv.index(name) + 1]
step, steps, reads = float(option("--step")), 0, 0

async def generate(request):
    global steps
    params = (await request.json())["sampling_params"]
    response = web.StreamResponse()
    await response.prepare(request)
    for count in range(1, params["max_new_tokens"] + 1 - ("--short" in sys.argv)):
        await tick.wait()
        steps += 1
        if count % params["stream_interval"] == (params["stream_interval"] > 1) or count == params["max_new_tokens"]:
            line = "data: " + json.dumps({"meta_info": {"completion_tokens": count}}) + "\\n\\n"
            await response.write(line.encode())
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def metrics(request):
    global reads
    reads += request.path == "/metrics"
    counted = {"host_seconds_sum": steps * 4e-5, "scheduling_seconds_total": steps * 1e-5, "host_seconds_count": steps}
    counted |= {"replayed_steps_total": steps * 3, "launched_steps_total": steps}
    counted |= {f'late_captures_total{{kind="{kind}"}}': reads for kind in "ab"}
    lines = [f"sglang:flashsample_{name} {value}\\n" for name, value in counted.items()]
    return web.Response(text="".join(lines) if "--counts" in sys.argv else "")

async def run():
    global tick
    tick = asyncio.Event()
    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", metrics)
    app.router.add_post("/abort_request", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(option("--port"))).start()
    due = asyncio.get_running_loop().time()
    while True:
        due = max(due + step, asyncio.get_running_loop().time())
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        tick.set(); tick.clear()

asyncio.run(run())
"""


@pytest.fixture
def answering(tmp_path):
    """Makes a server that takes so many seconds for a step."""

    def make(name: str, step: float, *options: str) -> Server:
        launcher = (sys.executable, "-c", ANSWERING)
        return Server("m", ["--step", str(step), *options], backend=None, log=tmp_path / name, launcher=launcher)

    return make


@pytest.fixture
def shorter(monkeypatch):
    """No second is spent on what only real servers need."""
    monkeypatch.setattr(traffic, "SETTLE", 0.1)
    monkeypatch.setattr(traffic, "FILL", 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan("t1", IDS, clients=8), Plan(MIX, IDS, rate=4.0)], ids=["closed", "poisson"])
def test_a_window_measures_one_server_while_the_other_one_stands_still(answering, shorter, monkeypatch, plan):
    """Servers with known steps of 20 and 16 ms: their speeds, gaps and counters come out, and no request is lost."""
    standing: list[set[str]] = []

    def state(server: Server) -> str:
        return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with answering("a", 0.020) as stock, answering("b", 0.016, "--counts") as ours, Clients(2, None) as clients:
        watched = traffic.Side.window

        def window(side: traffic.Side, *values: float) -> traffic.Window:
            time.sleep(0.02)
            standing.append(
                {name for name, server in ((STOCK, stock), (OURS, ours)) if state(server) == "T"} | {side.label}
            )
            return watched(side, *values)

        monkeypatch.setattr(traffic.Side, "window", window)
        began = time.monotonic()
        cell = traffic.measure({STOCK: stock, OURS: ours}, clients, plan, 4.0, window=0.4)
        took = time.monotonic() - began
        assert state(stock) != "T" != state(ours), "afterwards none does"
    assert len(standing) >= 4 and all(one == {STOCK, OURS} for one in standing)
    ran = [curve.running for curve in cell.curves.values()]
    assert sum(ran) < took and all(seconds > 0.5 * len(cell.windows[OURS]) - TICK for seconds in ran)
    rows = cell.rows()
    if plan.clients:
        assert all(0.1 < row["tokens_s"] * step / 8 < 1.1 for row, step in zip(rows, (0.020, 0.016), strict=True))
    # A busy machine makes a step longer, never shorter.
    assert all(0.9 < row["itl_ms_p50"] / step < 9.0 for row, step in zip(rows, (20.0, 16.0), strict=True))
    assert rows[0]["host_us"] is None and rows[1]["host_us"] == pytest.approx(50.0)
    assert rows[1]["late_captures"] == 2 * (1 + len(cell.windows[OURS]))
    assert rows[1]["replayed"] == 0.75 and rows[1]["late_compiles"] is None


@pytest.mark.slow
def test_an_answer_that_is_too_short_ends_the_cell(answering, shorter):
    refused = pytest.raises(ServerError, match=r"requests to stock: \d+ tokens; expected \d+")
    with answering("a", 0.001, "--short") as server, Clients(1, None) as clients, refused:
        traffic.measure({STOCK: server}, clients, Plan("t1", IDS, 4), 2.0, window=0.2)


@pytest.mark.slow
def test_a_client_process_that_dies_ends_the_measurement_with_one_line(answering):
    with answering("a", 0.001) as server, Clients(1, None) as clients:
        side = traffic.Side("stock", server, clients, stops=True)
        side.begin(Plan("t1", IDS, 4))
        (process,) = clients._processes
        process.kill()
        process.join()
        for call in (side.curve, side.pause, side.resume, lambda: side.window(0.0, 0.0)):
            with pytest.raises(ServerError, match="a client process has ended or hangs: "):
                call()
        side.end()


def test_clients_and_servers_share_no_core(monkeypatch):
    for cores, expected in (
        ({0}, ([0], [0])),
        ({2, 5}, ([2], [5])),
        (set(range(16)), ([*range(12)], [12, 13, 14, 15])),
    ):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: cores)
        assert traffic.split_cores() == expected
    assert [traffic.processes_of(clients, range(4)) for clients in (1, 64, 65, 1024)] == [1, 1, 2, 4]


# --- the whole measurement -------------------------------------------------------------------------------------------


def test_cells_share_the_time_and_the_undecided_ones_get_what_is_left(tmp_path, monkeypatch, capsys):
    """Servers that need no time; a cell with 64 clients is decided at once, one with 4 never."""
    now, shares = [0.0], []
    for module in (bench, progress):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(traffic, "on_cores", lambda cores: contextlib.nullcontext())
    monkeypatch.setattr(traffic, "Clients", lambda *_: contextlib.nullcontext())

    def measure(servers, clients, plan, seconds, *, before, enough, step):
        shares.append((plan.clients, round(seconds)))
        ours = 1100.0 if plan.clients == 64 else 1000.0
        r = random.Random(len(shares))
        speeds = {STOCK: [1000.0] * 5, OURS: [ours * math.exp(r.gauss(0, 0.1 * (plan.clients == 4))) for _ in range(5)]}
        curves = {label: curve_of(each, 2500.0, 300.0) for label, each in speeds.items()}
        cell = traffic.TrafficCell(plan, {label: [traffic.Window(1.0, (), ())] for label in speeds}, {}, curves, before)
        cell.seconds = seconds
        now[0] += 30.0 if plan.clients == 64 else seconds
        step(cell, 0.0)
        assert enough(cell) is (plan.clients == 64)

    monkeypatch.setattr(traffic, "measure", measure)
    options = bench.Options("M", (), ("t1",), (64, 4), traffic.load_of(IDS), tmp_path, minutes=5.0)
    comparison = traffic.TrafficBench(options, tmp_path / "b.json", tmp_path / "b.html")
    comparison.started = lambda label: contextlib.nullcontext()
    comparison.run()
    assert shares == [(64, 150), (4, 270)]
    many, few = comparison.cells
    assert many.comparison.answer == "faster" and few.comparison.answer == "not decided yet"
    printed = capsys.readouterr().out
    assert f"temperature 1; 64 clients: {many.verdict}\n    tokens/s 1000 -> 1100; 6 pairs: +10.0 ± 0.1 %\n" in printed
    written = json.loads((tmp_path / "b.json").read_text())
    assert [(one["clients"], one["answer"]) for one in written["comparisons"]] == [
        (64, "faster"),
        (4, "not decided yet"),
    ]
    words = "--samplings t1 --traffic 64,4 --minutes 5"
    assert written["env"]["command"] == f"sgl-flashsample bench --model-path M {words}"
    assert "change of the tokens per second, %" in (tmp_path / "b.html").read_text()


def test_a_kind_that_a_server_refuses_takes_the_mix_out_too(tmp_path, monkeypatch):
    def generate(server, load, batch, request, tokens):
        if request is SAMPLINGS["json"]:
            raise RequestError("/generate answered 400: no grammar backend")

    class Running:
        __enter__, __exit__ = (lambda self: self), (lambda self, *error: None)

    monkeypatch.setattr(bench, "generate", generate)
    monkeypatch.setattr(bench.Bench, "server", lambda *_: Running())
    options = bench.Options("M", (), ("trunc", "mix"), (64,), traffic.load_of(IDS), tmp_path)
    comparison = traffic.TrafficBench(options)
    with comparison.started(STOCK):
        assert list(comparison.refused) == [("mix", 64)] and comparison._places == [("trunc", 64)]


def test_two_servers_that_do_not_fit_are_known_before_the_second_starts(tmp_path, monkeypatch):
    started = []

    class Running:
        __enter__, __exit__ = (lambda self: self), (lambda self, *error: None)

    monkeypatch.setattr(bench, "generate", lambda *_: 0.0)
    monkeypatch.setattr(bench.Bench, "server", lambda _, label: started.append(label) or Running())
    monkeypatch.setattr(traffic, "memory_share", lambda device: 0.88)
    comparison = traffic.TrafficBench(bench.Options("M", (), ("mix",), (64,), traffic.load_of(IDS), tmp_path))
    with pytest.raises(ServerError, match="one server takes 88% of the GPU's memory: --traffic needs two at once"):
        comparison._compare()
    assert started == [STOCK]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--traffic", "16,x"], "--traffic is '16,x'; expected integers separated by commas, such as 1,8,32"),
        (["--traffic", "0"], "--traffic is 0; expected 1 to 65536"),
        (["--traffic", "--in-turns"], "--in-turns is no option of a measurement with --traffic; leave it out"),
        (["--traffic", "--load", "2"], "--load is no option of a measurement with --traffic; leave it out"),
        (["--samplings", "mix"], "--samplings has mix; expected some of t1, trunc, greedy, "),
        (["--traffic", "--samplings", "mix,t2"], "--samplings has t2; expected some of t1, trunc, greedy, "),
    ],
)
@needs_sglang
def test_what_cannot_be_measured_is_one_line(run, arguments, message):
    code, _, err = run("bench", "--model-path", "nowhere", *arguments)
    assert code == 2
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_two_real_servers_are_compared_under_moving_traffic(tmp_path):
    markov.write(tmp_path / "model", markov.SIZES["tiny"])
    changes = ["--traffic", "4", "--samplings", "mix", "--minutes", "1.5", "--json", "b.json", "--logs", "logs"]
    servers = ["--dtype", "float32", "--random-seed", "1", *(["--mem-fraction-static", "0.3"] if CUDA else [])]
    command = [sys.executable, str(LAB), "bench", "--model-path", str(tmp_path / "model"), *changes, *servers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mixed requests; 4 clients: " in done.stdout and "tokens/s " in done.stdout
    stock, ours = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert min(stock["tokens_s"], ours["tokens_s"]) > 0 and ours["ratio"]["windows"] >= 4
    assert ours["host_us"] > 0 and stock["host_us"] is None
