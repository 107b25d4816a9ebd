"""A head without a tuned table takes the screened path where given times say that it is faster, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from core_examples import VOCAB, example

from sgl_flashsample import screen_race
from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable, default_table
from sgl_flashsample.head import Head
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.kinds import BATCH_KINDS, KIND_NAMES, MAX_SCREENED_ROWS, BatchKind
from sgl_flashsample.paths import Parts
from sgl_flashsample.screen import Screen
from sgl_flashsample.screen_race import (
    MAX_SECONDS,
    MIN_GAIN,
    MIN_RACED_BYTES,
    MOST_ROWS,
    ROUNDS,
    SIZES,
    Heat,
    Outcome,
    candidates,
    decide,
    race,
    raced_kinds,
    unsupported_race,
)
from sgl_flashsample.sglang.step_graphs import CudaCapture

H200 = HeadTraits("sm90", 2, 248_320, 5_120)
FAMILIES = [HeadTraits(family, size, 248_320, 5_120) for family in ("sm80", "sm90", "sm100") for size in (2, 4)]
KINDS = [KIND_NAMES[name] for name in MOST_ROWS]


def heat(kind: str, rows: int, builtin: float, screened: float) -> Heat:
    return Heat(kind, rows, (builtin,) * ROUNDS, (screened,) * ROUNDS)


def screened_in(table: DispatchTable) -> dict[str, list[int]]:
    """The sizes that take the screened path, by kind without the screen."""
    sizes = range(1, 513)
    found = {
        str(kind.unscreened): [rows for rows in sizes if isinstance(table.lookup(rows, kind), ScreenConfig)]
        for kind in BATCH_KINDS
        if kind.screen
    }
    return {name: rows for name, rows in found.items() if rows}


# The verdict on one heat.

STEADY = [300.0] * ROUNDS
NOISY = [300.0 + 40 * (-1) ** place for place in range(ROUNDS)]  # a standard error of about 13


@pytest.mark.parametrize(
    "builtin, screened, wins",
    [
        (STEADY, [170.0] * ROUNDS, True),
        (STEADY, STEADY, False),
        (STEADY, [301.0] * ROUNDS, False),
        (STEADY, [300 * (1 - MIN_GAIN) + 0.5] * ROUNDS, False),
        (STEADY, [300 * (1 - MIN_GAIN) - 0.5] * ROUNDS, True),
        (NOISY, [285.0] * ROUNDS, False),
        (NOISY, [240.0] * ROUNDS, True),
        (STEADY, [170.0, 5000.0, *[170.0] * (ROUNDS - 2)], True),
        ([*STEADY[1:], 5000.0], [310.0] * ROUNDS, False),
        (STEADY, [237.0, 237.0, 423.0] * (ROUNDS // 3), False),
        (STEADY[:2], [170.0] * 2, False),
        ([], [], False),
    ],
    ids=[
        "faster",
        "equal",
        "slower",
        "less than the least gain",
        "more than the least gain",
        "within the spread",
        "beyond the spread",
        "an interruption of the screened path",
        "an interruption of the built-in choice",
        "every third batch reads the head again",
        "too few rounds",
        "no rounds",
    ],
)
def test_a_screen_wins_where_it_is_faster_by_more_than_the_spread_of_the_times(builtin, screened, wins):
    assert Heat("plain", 1, builtin, screened).screen_wins is wins


# The table that follows.


def test_the_sizes_that_won_and_those_that_a_table_would_serve_with_them_take_the_screened_path():
    table = candidates(DispatchTable(H200), KINDS)
    won = [heat("plain", 1, 550, 300), heat("plain", 8, 550, 300), heat("greedy", 64, 550, 400)]
    lost = [heat("plain", 2, 550, 560), heat("truncate", 1, 550, 600), heat("edit", 16, 550, 550)]
    decided = decide(table, Outcome((*won, *lost), 0.4))
    assert screened_in(decided) == {"plain": [1, 5, 6, 7, 8], "greedy": [*range(33, 65)]}
    assert decided.screened_rows(512, measured=True) == 64
    for rows in (8, 64):
        for name in ("plain", "greedy"):
            kind = KIND_NAMES[name].screened
            if isinstance(decided.lookup(rows, kind), ScreenConfig):
                assert decided.lookup(rows, kind) == table.lookup(rows, kind), "what was raced is what is taken"


def test_where_nothing_won_every_batch_takes_what_it_takes_without_a_screen():
    built_in = DispatchTable(H200)
    decided = decide(candidates(built_in, KINDS), Outcome((), 0.0))
    assert screened_in(decided) == {} and decided.screened_rows(512) == 0
    for kind in BATCH_KINDS:
        for rows in (1, 16, 33, 64, 65, 512):
            assert decided.lookup(rows, kind) == built_in.lookup(rows, kind.unscreened)


@pytest.mark.parametrize("traits", FAMILIES, ids=lambda traits: f"{traits.family}-{traits.itemsize}byte")
def test_on_every_family_all_raced_sizes_have_a_candidate_and_no_others(traits):
    found = screened_in(candidates(DispatchTable(traits), KINDS))
    assert found == {name: [*range(1, most + 1)] for name, most in MOST_ROWS.items()}


def test_greedy_batches_of_17_to_64_rows_are_raced_with_tiles_of_32_rows():
    table = candidates(DispatchTable(H200), KINDS)
    greedy, plain = (BatchKind(greedy=greedy, screen=True) for greedy in (True, False))
    for rows in (17, 32, 64):
        assert table.lookup(rows, greedy).block_b == 32 and table.lookup(rows, greedy) == table.lookup(rows, plain)


def test_a_shard_is_raced_without_truncations():
    whole = LMHead(torch.zeros(640, 8))
    shard = LMHead.of_rank(torch.zeros(320, 8), 1, 2, 640)
    assert [str(kind) for kind in raced_kinds(whole)] == ["plain", "greedy", "truncate", "edit", "edit+truncate"]
    assert [str(kind) for kind in raced_kinds(shard)] == ["plain", "greedy", "edit"]


@pytest.mark.parametrize(
    "vocab, hidden, dtype, raced",
    [
        (151_936, 4_096, torch.bfloat16, True),
        (32_768, 4_096, torch.bfloat16, True),  # 268 MB
        (50_257, 768, torch.bfloat16, False),
        (18_992, 4_096, torch.bfloat16, False),  # one of eight ranks
        (32_768, 2_048, torch.float32, True),
    ],
)
def test_heads_below_the_least_size_are_not_raced(vocab, hidden, dtype, raced):
    size = vocab * hidden * dtype.itemsize
    reason = unsupported_race(LMHead(torch.empty(vocab, hidden, dtype=dtype, device="meta")))
    assert (reason is None) is raced is (size >= MIN_RACED_BYTES)
    assert raced or reason.endswith(f"and a head of {size:,} bytes is too small for it to be")


def test_ranks_decide_by_the_slowest_of_them_and_a_heat_that_one_of_them_lacks_decides_nothing():
    first = Outcome((heat("plain", 1, 300, 200), heat("plain", 2, 300, 200), heat("greedy", 1, 300, 200)), 0.3)
    second = Outcome((heat("plain", 1, 290, 310), heat("plain", 2, 350, 210)), 0.5, (("greedy", 1),))
    for outcomes in ([first, second], [second, first]):
        of_ranks = Outcome.of_ranks(outcomes)
        assert set(of_ranks.heats) == {heat("plain", 1, 300, 310), heat("plain", 2, 350, 210)}
        assert (of_ranks.seconds, of_ranks.skipped) == (0.5, (("greedy", 1),))
    assert Outcome.of_ranks([first]) == first


def test_the_words_of_a_decision_name_the_batches_the_times_and_what_was_left_out():
    table = candidates(DispatchTable(H200), KINDS)
    heats = (heat("plain", 1, 553, 302), heat("plain", 2, 553, 302), heat("truncate", 1, 553, 302))
    outcome = Outcome(heats, 0.414, (("edit", 16), ("plain", 64)))
    assert outcome.words(decide(table, outcome)) == (
        "screen used for plain 1-2, truncate 1 rows, measured in 0.41 s (plain 1: 553 µs without it, 302 µs with it); "
        "no time was left for edit 16, plain 64"
    )
    slower = Outcome((heat("plain", 1, 100, 140),), 0.2)
    assert slower.words(decide(table, slower)) == (
        "screen used for no batch, measured in 0.20 s (plain 1: 100 µs without it, 140 µs with it)"
    )


# The race.


@dataclasses.dataclass
class GivenTimes:
    """A stopwatch that notes its calls. seconds: that each heat takes on ``clock``. runs: the calls are made in each
    round, and their tokens noted."""

    seconds: float = 0.01
    runs: bool = False
    now: float = 100.0
    heats: int = 0
    tokens: list[list[list[int]]] = dataclasses.field(default_factory=list)

    def __call__(self, calls, rounds, refresh):
        self.heats += 1
        self.now += self.seconds
        for index in range(rounds if self.runs else 0):
            refresh(index)
            self.tokens.append([call().token_ids.tolist() for call in calls])
        return [[300.0] * rounds, [170.0] * rounds]

    def clock(self) -> float:
        return self.now


def raced_on(stopwatch: GivenTimes, parts: Parts) -> Outcome:
    table = candidates(default_table(parts.lm_head), raced_kinds(parts.lm_head))
    return race(parts, table, stopwatch, clock=stopwatch.clock)


@pytest.fixture
def parts(device) -> Parts:
    head = example(device).head
    return Parts.of(head, Screen(head, MAX_SCREENED_ROWS))


def test_every_kind_and_size_is_raced_once_small_batches_first(parts):
    outcome = raced_on(GivenTimes(seconds=0.0), parts)
    raced = [(heat.kind, heat.rows) for heat in outcome.heats]
    assert raced == [(name, rows) for rows in SIZES for name, most in MOST_ROWS.items() if rows <= most]
    assert outcome.skipped == () and all(len(heat.builtin) == len(heat.screened) == ROUNDS for heat in outcome.heats)


@pytest.mark.parametrize("seconds, heats", [(0.1, 10), (0.3, 3), (2.0, 1)])
def test_no_heat_begins_that_may_end_after_the_limit(parts, seconds, heats):
    stopwatch = GivenTimes(seconds=seconds)
    outcome = raced_on(stopwatch, parts)
    total = sum(rows <= most for rows in SIZES for most in MOST_ROWS.values())
    assert len(outcome.heats) == stopwatch.heats == heats and len(outcome.skipped) == total - heats
    assert outcome.seconds == pytest.approx(heats * seconds) and (outcome.seconds <= MAX_SECONDS or heats == 1)


def test_batches_beyond_the_screens_scratch_are_not_raced(parts):
    parts.screen.grow(8)
    assert max(heat.rows for heat in raced_on(GivenTimes(), parts).heats) == 8


@pytest.mark.slow
def test_both_paths_draw_the_same_tokens_in_each_round_and_other_ones_in_the_next(parts, monkeypatch):
    monkeypatch.setattr(screen_race, "SIZES", (4,))
    monkeypatch.setattr(screen_race, "ROUNDS", 2)
    stopwatch = GivenTimes(runs=True)
    raced_on(stopwatch, parts)
    assert len(stopwatch.tokens) == 2 * len(MOST_ROWS)
    assert all(builtin == screened for builtin, screened in stopwatch.tokens)
    first, second = ([builtin for builtin, _ in stopwatch.tokens[start::2]] for start in (0, 1))
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert parts.screen.counters[ScreenCounter.ROWS] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_decided_table_draws_the_tokens_of_the_built_in_choice(device, kind):
    case = example(device, kind)
    head, params = case.head, case.params
    if kind.greedy:
        params = dataclasses.replace(params, all_greedy=True, temperature=torch.zeros_like(params.temperature))
    if params.truncation is not None:
        small = dataclasses.replace(params.truncation, top_k=params.truncation.top_k.clamp(1, 60), max_top_k=60)
        params = dataclasses.replace(params, truncation=small)
    table = candidates(default_table(head), KINDS)
    decided = decide(table, Outcome(tuple(heat(str(kind), rows, 2, 1) for rows in SIZES), 0.1))
    screen = Screen(head, MAX_SCREENED_ROWS)
    most = MOST_ROWS[str(kind)]
    hidden, params = case.hidden[:most], params.rows(0, min(most, len(case.hidden)))
    drawn = Head(head, table=decided, screen=screen).draw(hidden, params).token_ids
    assert torch.equal(drawn, Head(head).draw(hidden, params).token_ids)
    assert screen.counters[ScreenCounter.ROWS] == len(drawn)


def test_times_are_those_of_replays_each_directly_after_the_other_path_and_the_first_round_does_not_count(monkeypatch):
    now, order = [0.0], []  # ms

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def elapsed_time(self, later):
            return later.at - self.at

    class Captured:
        def __init__(self, call):
            self.call = call

        def replay(self):
            now[0] += self.call()

    class Capture:
        def new_pool(self):
            return "pool"

        def __call__(self, launches, pool):
            assert pool == "pool"
            return Captured(launches), None

    def call(name, milliseconds):
        order.append(name)
        return milliseconds + first[0]

    def refresh(index):
        now[0] += 5.0  # not timed
        order.append(index)
        first[0] = 7.0 if order.count(0) == 1 and index == 0 else 0.0

    first = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(screen_race, "BUSY_SECONDS", 0.0)
    stopwatch = screen_race.GraphStopwatch(torch.device("cuda"), Capture())
    calls = [functools.partial(call, "builtin", 0.3), functools.partial(call, "screened", 0.17)]
    times = stopwatch(calls, 3, refresh)
    assert times == [pytest.approx([300.0] * 3), pytest.approx([170.0] * 3)]
    rounds = [[index, "builtin", "screened"] for index in (0, 0, 1, 2)]
    assert order == ["builtin", "screened", *(step for one in rounds for step in one)]


@pytest.mark.gpu
def test_on_a_gpu_a_race_of_loaded_kernels_takes_less_than_its_limit(device):
    weight = torch.randn(65_536, 2_048, device=device).bfloat16()
    head = LMHead(weight)
    table = candidates(default_table(head), raced_kinds(head))
    parts = Parts.of(head, Screen(head, MAX_SCREENED_ROWS))
    stopwatch = screen_race.GraphStopwatch(device, CudaCapture(device))
    race(parts, table, stopwatch, clock=lambda: 0.0)  # loads them
    outcome = race(parts, table, stopwatch)
    assert outcome.skipped == () and outcome.seconds < MAX_SECONDS
    floor = weight.nbytes / 10e6  # microseconds at 10 TB/s
    assert all(min(heat.builtin) > floor and min(heat.screened) > floor / 2 for heat in outcome.heats)


@pytest.mark.parametrize("common", [0.0, 1.0], ids=["rows in all directions", "rows with a common direction"])
def test_the_made_rows_have_likely_ids_and_ids_of_a_usual_spread(device, common):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(4 * VOCAB, 2048, generator=generator) + common).to(device)
    turn = torch.arange(3, device=device)[None, :]
    hidden = screen_race._hidden_states(LMHead(weight), turn)[0]
    logits = hidden.float() @ weight.T.float()
    typical, peaked, flat = logits.sort(dim=1).values[:, :-16].std(dim=1).tolist()
    assert flat == pytest.approx(1.0, abs=0.1) and 1.9 < typical < 2.7 and 2.8 < peaked < 3.2
    typical, peaked, flat = (logits.amax(dim=1) - logits.mean(dim=1)).tolist()
    assert 15 < typical < 22 and abs(peaked - 23) < 3 * 3 and flat < 5  # 23, and noise: each device has its own
    probability = torch.softmax(logits, dim=1).amax(dim=1).tolist()
    assert probability[1] > 0.95 > probability[0] > 0.1 > probability[2]
    scaled = screen_race._hidden_states(LMHead(weight, logit_scale=0.25), turn)[0]
    assert torch.allclose(scaled * 0.25, hidden, rtol=0.02, atol=0.02)


def test_an_id_that_was_never_trained_makes_no_long_hidden_state(device):
    weight = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0)).to(device)
    turn = torch.ones(1, 1, dtype=torch.int64, device=device)  # the profile with one likely id
    usual = screen_race._hidden_states(LMHead(weight), turn).norm()
    weight[VOCAB // 2] = weight.mean(dim=0)
    assert screen_race._hidden_states(LMHead(weight), turn).norm() < 2 * usual
