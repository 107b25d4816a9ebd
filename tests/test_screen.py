"""A head's screen in the dispatch: it changes no token, it is used where it may be and the choices say so, and a copy
that is not of what the head holds is never read."""

from __future__ import annotations

import collections
import dataclasses
import pathlib

import pytest
import torch
from problems import integer_problem, random_problem, rows
from sgl_flashsample.kernels import screened_sample as screened_module
from sgl_flashsample.kernels.features import LogitEdits, Truncation
from sgl_flashsample.kernels.int8_head import MOST_HIDDEN, Counted
from sgl_flashsample.kernels.tiles import ReadConfig, ScreenConfig, TileConfig

from sgl_flashsample import BatchParams, LMHead, Path, Screen, paths, sample, selftest, tuned
from sgl_flashsample.choices import DENSE_ROWS, Choices, choices_for
from sgl_flashsample.table import Table
from sgl_flashsample.tuned import Shape, screen_of, tile_for
from sgl_flashsample.work import ANY_BATCH, OWN_PATHS, Work

VOCAB, HIDDEN, ROWS = 601, 32, 9
SCREENED = [work for work in Work if work.screened]


@pytest.fixture
def problem(device):
    """Dot products that no sum rounds: every path has the same logits to the bit. Of a dtype whose plain batches the
    built-in choices screen."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    states, weight = integer_problem(ROWS, VOCAB, HIDDEN, dtype, device)
    return states, LMHead(weight), BatchParams(**rows(ROWS, device))


@pytest.fixture
def screened(monkeypatch):
    """The sizes of the batches that were screened."""
    seen = []

    def note(hidden, *arguments, **keywords):
        seen.append(len(hidden))
        return screened_module.screened_sample(hidden, *arguments, **keywords)

    monkeypatch.setattr(paths, "screened_sample", note)
    return seen


def always(head, config=None):
    """Choices that screen every batch they can."""
    sizes = range(1, DENSE_ROWS + 1)
    config = config or screen_of(Shape.of(head), ROWS)
    return Choices(Shape.of(head), {work: dict.fromkeys(sizes, config) for work in SCREENED})


def edits_of(device):
    bias = torch.zeros(ROWS, VOCAB, device=device)
    bias[:, ::7] = 2.5
    return LogitEdits(bias=bias, scaling=torch.full((ROWS, VOCAB), 1.25, device=device))


def truncation_of(device):
    row = torch.arange(ROWS, device=device)
    return Truncation((row % 4 * 5).int(), 1.0 - row % 2 * 0.3, torch.zeros(ROWS, device=device))


@pytest.mark.parametrize("featured", ["plain", "edited", "greedy"])
def test_a_screened_batch_has_the_tokens_of_every_other_path(device, problem, screened, featured):
    states, head, params = problem
    if featured == "edited":
        params = dataclasses.replace(params, edits=edits_of(device))
    if featured == "greedy":
        params = dataclasses.replace(params, temperature=torch.zeros(ROWS, device=device), all_greedy=True)
    screen = Screen(head, ROWS)
    want = [sample(states, head, params, path=path).token_ids for path in ANY_BATCH]
    options = {"screen": screen, "choices": always(head)}
    got = [sample(states, head, params, path=path, **options).token_ids for path in (None, Path.SCREENED)]
    assert screened == [ROWS, ROWS]
    assert all(torch.equal(token, want[0]) for token in [*want, *got])
    assert screen.counters[Counted.ROWS] == 2 * ROWS


def test_batches_that_a_screen_cannot_serve_are_drawn_without_it_and_a_path_that_insists_says_why(
    device, problem, screened
):
    states, head, params = problem
    screen, choices = Screen(head, ROWS - 1), always(head)
    few = BatchParams(params.temperature[:3], params.seed[:3], params.position[:3])
    written = LMHead(head.weight.clone())
    stale = Screen(written, ROWS)
    written.weight.mul_(2)
    cases = [
        (states, head, params, {}, None, "its head has no screen"),
        (states, head, params, {}, screen, "it has 9 rows, the screen is for 8"),
        (states[:3], head, few, {"return_logprob": True}, screen, "logprobs are asked for"),
        (states[:3], written, few, {}, stale, "the screen is not of what the head holds now"),
    ]
    for hidden, own_head, own_params, options, own_screen, why in cases:
        want = sample(hidden, own_head, own_params, **options)
        got = sample(hidden, own_head, own_params, choices=choices, screen=own_screen, **options)
        assert torch.equal(got.token_ids, want.token_ids)
        with pytest.raises(ValueError, match=f"path is 'screened', which cannot serve this batch: {why}"):
            sample(hidden, own_head, own_params, path=Path.SCREENED, screen=own_screen, **options)
    assert screened == []


@pytest.mark.parametrize("edited", [False, True], ids=["", "edited"])
def test_a_truncated_batch_is_screened_where_every_limited_row_is_known_to_have_a_small_top_k(
    device, problem, screened, edited
):
    states, head, params = problem
    if edited:
        params = dataclasses.replace(params, edits=edits_of(device))
    screen, limits = Screen(head, ROWS), truncation_of(device)
    for largest, is_screened in ((64, True), (65, False), (None, False)):
        known = dataclasses.replace(limits, largest_top_k=largest)
        truncated = dataclasses.replace(params, truncation=known)
        want = sample(states, head, truncated, path=Path.FUSED).token_ids
        got = sample(states, head, truncated, choices=always(head), screen=screen).token_ids
        assert torch.equal(got, want)
        assert screened == [ROWS] * is_screened
        screened.clear()
        insisted = sample(states, head, truncated, path=Path.SCREENED, screen=screen).token_ids
        assert torch.equal(insisted, want) and screened == [ROWS]
        screened.clear()


def test_a_screen_serves_only_the_head_that_it_is_a_copy_of(device, problem):
    _, head, _ = problem
    screen = Screen(head, ROWS)
    same = LMHead(head.weight, softcap=5.0, logit_scale=0.5)
    assert screen.serves(head) and screen.serves(same), "what logits become does not change the copy"
    others = [
        LMHead(head.weight.clone()),
        LMHead(head.weight[: VOCAB - 5]),  # begins where the copied one does
        LMHead(head.weight, vocab_size=VOCAB - 5),
        LMHead(head.weight[:, : HIDDEN - 8]),
        LMHead(head.weight, logit_scale=-1.0),
    ]
    assert not any(screen.serves(other) for other in others)


def test_after_a_write_or_an_invalidation_nothing_is_served_until_the_copy_is_made_anew_in_place(problem, screened):
    states, head, params = problem
    choices, screen = always(head), Screen(head, ROWS)
    address = screen.int8_head.weight.data_ptr()

    def draw():
        return sample(states, head, params, choices=choices, screen=screen).token_ids

    before = draw()
    head.weight.copy_(head.weight.flip(0))
    assert not screen.serves(head)
    assert torch.equal(draw(), sample(states, head, params).token_ids) and len(screened) == 1
    screen.rebuild(head)
    after = draw()
    assert screen.serves(head) and len(screened) == 2
    assert torch.equal(after, sample(states, head, params).token_ids) and not torch.equal(after, before)
    assert screen.int8_head.weight.data_ptr() == address, "captured graphs read it there"
    head.weight.data.mul_(-1)  # PyTorch does not notice: whoever writes so says so
    screen.invalidate()
    assert not screen.serves(head)
    screen.rebuild(head)
    assert torch.equal(draw(), sample(states, head, params).token_ids) and len(screened) == 3


def test_a_rebuild_that_fails_in_the_middle_leaves_nothing_that_serves(problem, monkeypatch):
    _, head, _ = problem
    screen = Screen(head, ROWS)
    monkeypatch.setattr(screen.int8_head, "rebuild", lambda head: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        screen.rebuild(head)
    assert not screen.serves(head)


def test_a_closed_screen_holds_no_memory_and_serves_nothing(problem, screened):
    states, head, params = problem
    screen = Screen(head, ROWS)
    screen.close()
    assert not screen.serves(head) and not hasattr(screen, "int8_head")
    want = sample(states, head, params).token_ids
    assert torch.equal(sample(states, head, params, choices=always(head), screen=screen).token_ids, want)
    with pytest.raises(ValueError, match="the screen is closed; expected a new one"):
        screen.rebuild(head)
    assert screened == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab, hidden, max_rows", [(1, 8, 1), (127, 33, 3), (129, 80, 17), (5003, 72, 65)])
def test_what_a_screen_will_hold_is_known_to_the_byte_before_anything_is_allocated(
    device, vocab, hidden, max_rows, dtype
):
    _, weight = random_problem(1, vocab, hidden, dtype, device, padding=3)
    head = LMHead(weight, vocab_size=vocab)
    screen = Screen(head, max_rows)
    assert Screen.bytes_for(head, max_rows) == screen.num_bytes > screen.int8_head.num_bytes


def test_the_copy_of_a_large_head_takes_half_its_bytes_and_the_scratch_little():
    head = LMHead(torch.empty(151_936, 4096, dtype=torch.bfloat16, device="meta"))
    share = Screen.bytes_for(head, 32) / (head.weight.numel() * 2)
    assert 0.5 < share < 0.52


@pytest.mark.parametrize(
    "head, max_rows, message",
    [
        (LMHead(torch.zeros(32, 8), logit_scale=-1.0), 1, "cannot be screened: its logit_scale is -1.0"),
        (LMHead(torch.zeros(1, MOST_HIDDEN + 1)), 1, f"cannot be screened: its hidden size is {MOST_HIDDEN + 1}"),
        (LMHead(torch.zeros(32, 8)), 0, "max_rows is 0; expected 1 or more"),
    ],
    ids=["negative scale", "wide", "no rows"],
)
def test_a_screen_that_cannot_be_says_why(head, max_rows, message):
    with pytest.raises(ValueError, match=message):
        Screen(head, max_rows)


def test_a_copy_is_not_made_anew_from_another_head(problem):
    _, head, _ = problem
    screen = Screen(head, ROWS)
    with pytest.raises(ValueError, match=r"head is \(601, 32, 32, torch.float16.*expected the screen's \(601, 32"):
        screen.rebuild(LMHead(head.weight.half()))
    assert screen.serves(head)


def test_a_head_that_cannot_be_screened_is_said_so_by_the_path(problem):
    states, head, params = problem
    negative = LMHead(head.weight, logit_scale=-1.0)
    with pytest.raises(ValueError, match=r"path is 'screened', which cannot serve this head: its logit_scale is -1\.0"):
        sample(states, negative, params, path=Path.SCREENED, screen=Screen(head, ROWS))
    want = sample(states, negative, params).token_ids
    assert torch.equal(sample(states, negative, params, screen=Screen(head, ROWS)).token_ids, want)


# Choices


CHAINS = {
    Work.SCREENED: [Work.PLAIN],
    Work.SCREENED_EDIT: [Work.EDIT],
    Work.SCREENED_GREEDY: [Work.GREEDY, Work.PLAIN],
    Work.SCREENED_TRUNCATE: [Work.TRUNCATE],
    Work.SCREENED_EDIT_AND_TRUNCATE: [Work.EDIT_AND_TRUNCATE],
    Work.GREEDY: [Work.PLAIN],
}


def test_work_with_a_screen_falls_back_to_the_same_work_without_one():
    for work in Work:
        chain, last = [], work
        while (last := last.fallback) is not None:
            chain.append(last)
        assert chain == CHAINS.get(work, [])
        assert work.kernels is [work, *chain][-1]
    assert [work.with_screen for work in Work if not work.screened] == [
        *(Work.SCREENED, Work.SCREENED_TRUNCATE, Work.SCREENED_EDIT, Work.SCREENED_EDIT_AND_TRUNCATE),
        Work.SCREENED_GREEDY,
    ]
    for work in SCREENED:
        assert work.with_screen is work and work.unscreened.with_screen is work


TILE = TileConfig(16, 64, 32, 4, 1, flatten=False, tma=False)
READ = ReadConfig(4, 64, 4, ctas_per_sm=2)
SCREEN = ScreenConfig(16, 64, 32, 4, 1, flatten=False, tma=False, rescore_d=32, rescore_stages=1)


@pytest.mark.parametrize("columns, truncated", [(2048, 1), (2879, 1), (2880, 8), (4096, 8)])
@pytest.mark.parametrize("family", ["sm80", "sm90", "sm100"])
def test_without_a_table_batches_are_screened_where_that_was_measured_to_win_and_nowhere_else(
    monkeypatch, family, columns, truncated
):
    monkeypatch.setattr(tuned, "family_of", lambda _: family)
    shape = Shape(torch.device("cuda"), 2, 151_936, columns, True)
    own = Choices(shape)
    won = {Work.SCREENED: 32, Work.SCREENED_GREEDY: 16, Work.SCREENED_EDIT: 16, Work.SCREENED_TRUNCATE: truncated}
    won, most = (won, 32) if family == "sm90" else ({}, 0)
    for rows_ in (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 512, 513):
        for work in SCREENED:
            picked = own.pick(rows_, work)
            assert isinstance(picked, ScreenConfig) == (rows_ <= won.get(work, 0)), (rows_, work)
            if not isinstance(picked, ScreenConfig):
                assert picked == own.pick(rows_, work.unscreened)
    assert own.screens(512) == (most > 0) and own.screened_rows(512) == most and own.screened_rows(20) == min(20, most)
    assert not own.screens(512, tuned=True)
    assert not Choices(shape._replace(itemsize=4)).screens(512)


def test_without_a_table_no_batch_reads_logits_that_no_gemm_gives(monkeypatch):
    """A 2-byte weight with float32 logits: what such a head has a screen for is screened as elsewhere."""
    monkeypatch.setattr(tuned, "family_of", lambda _: "sm90")
    shape = Shape(torch.device("cuda"), 2, 151_936, 4096, True)
    for rows_ in (1, 8, 9, 32, 33, 128, 129, 512):
        for work in Work:
            usual = tuned.path_of(shape, rows_, work)
            expected = Path.FUSED if usual is Path.LOGITS else usual
            assert tuned.path_of(shape._replace(has_gemm=False), rows_, work) is expected, (rows_, work)
    assert tuned.path_of(shape, 512) is Path.LOGITS


def test_the_built_in_screen_lost_no_race_of_the_shipped_tables():
    """Where a screened configuration was in a race, it is the winner's path or among the others."""
    won = collections.Counter()
    for file in (pathlib.Path(tuned.__file__).parent / "tables").glob("fs1,*.json"):
        table = Table.loads(file.read_text())
        for work in SCREENED:
            most = tuned.screen_rows_in("sm90", 2, table.head.hidden, work)
            buckets = {rows_: bucket for rows_, bucket in table.classes[work].items() if rows_ <= most}
            for rows_, bucket in buckets.items():
                won[work] += table.configs[bucket.use].path == Path.SCREENED
                assert bucket.others.get(Path.SCREENED, 0.0) <= bucket.us, (file.name, work, rows_)
    assert sorted(won) == sorted(work for work in SCREENED if ("sm90", 2, work.unscreened) in tuned.SCREEN_ROWS)
    assert min(won.values()) >= 4


def test_a_table_decides_by_its_own_entries_then_the_built_in_screen_then_what_batches_without_one_take(monkeypatch):
    monkeypatch.setattr(tuned, "family_of", lambda _: "sm90")
    shape = Shape(torch.device("cuda"), 2, 151_936, 2048, True)
    older = {Work.PLAIN: {1: TILE, 64: READ}, Work.GREEDY: {64: TILE}, Work.TRUNCATE: {1: TILE, 4: READ}}
    older = Choices(shape, older | {Work.EDIT_AND_TRUNCATE: {1: READ}})
    assert isinstance(older.pick(1, Work.SCREENED), ScreenConfig) and not older.is_tuned(1, Work.SCREENED)
    assert older.pick(64, Work.SCREENED) == READ and older.is_tuned(64, Work.SCREENED)
    assert isinstance(older.pick(1, Work.SCREENED_TRUNCATE), ScreenConfig)
    assert older.pick(4, Work.SCREENED_TRUNCATE) == READ and older.is_tuned(4, Work.SCREENED_TRUNCATE)
    assert older.pick(1, Work.SCREENED_EDIT_AND_TRUNCATE) == READ, "where the built-in choice is no screen"
    assert isinstance(older.pick(16, Work.SCREENED_GREEDY), ScreenConfig)
    assert older.pick(64, Work.SCREENED_GREEDY) == TILE
    newer = Choices(shape, {Work.SCREENED: {1: READ, 2: SCREEN, 64: SCREEN}, Work.PLAIN: {1: TILE}})
    assert newer.pick(1, Work.SCREENED) == READ and newer.pick(1) == TILE, "what won its race"
    assert newer.pick(64, Work.SCREENED) == SCREEN and newer.screened_rows(512, tuned=True) == 64
    assert not any(newer.pick(rows_, Work.SCREENED_GREEDY) == SCREEN for rows_ in range(1, 65)), (
        "greedy rows leave more to rescore"
    )


def test_choices_without_a_screen_leave_it_nothing(problem):
    _, head, _ = problem
    assert choices_for(head).screens(ROWS)
    for own in (choices_for(head), always(head)):
        without = own.without_screen()
        assert not without.screens(DENSE_ROWS) and without.without_flashinfer().screens(DENSE_ROWS) is False
        for work in SCREENED:
            assert [without.pick(n, work) for n in (1, 9, 600)] == [
                without.pick(n, work.unscreened) for n in (1, 9, 600)
            ]
        assert without.digest != own.digest


def test_a_refusal_in_one_kind_of_work_is_one_in_all_that_launch_the_same(problem):
    _, head, _ = problem
    own = Choices(
        Shape.of(head), {Work.SCREENED: {1: SCREEN, 2: TILE}, Work.SCREENED_GREEDY: {1: SCREEN}, Work.PLAIN: {2: TILE}}
    )
    without = own.without(SCREEN, Work.SCREENED_GREEDY)
    assert SCREEN not in {without.pick(1, work) for work in SCREENED} and without.pick(2, Work.SCREENED) == TILE
    without = own.without(TILE, Work.PLAIN)
    assert TILE not in {without.pick(2, work) for work in Work} and without.pick(1, Work.SCREENED) == SCREEN


# The check of a starting server


@pytest.fixture
def spoiled(monkeypatch):
    """Makes one configuration of the screened path draw the token after the right one, or raise."""

    def spoil(config, how="shift"):
        def broken(hidden, head, *arguments, **keywords):
            if how == "raise":
                raise RuntimeError("out of resource: shared memory\nmore")
            token, score, logprob = screened_module.screened_sample(hidden, head, *arguments, **keywords)
            return (token + (arguments[4] == config)) % head.vocab_size, score, logprob

        monkeypatch.setattr(selftest, "screened_sample", broken)

    return spoil


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "logit_scale": 0.5}, {"vocab_start": 320}], ids=str)
def test_right_screened_kernels_pass_the_check(device, options):
    _, weight = random_problem(1, 700, 48, torch.float32, device)
    head = LMHead(weight, **options)
    assert selftest.compare_with_reference(head, 20, screen=Screen(head, 20)) is None


def test_every_screened_configuration_is_checked_where_there_is_a_screen_and_none_elsewhere(problem, monkeypatch):
    _, head, _ = problem
    seen = set()
    monkeypatch.setattr(selftest, "_compare", lambda head, rows, config, work, *rest: seen.add((work, config)))
    own = Choices(Shape.of(head), {Work.SCREENED: {1: SCREEN, 2: TILE}, Work.SCREENED_EDIT: {3: SCREEN}})
    selftest.compare_with_reference(head, ROWS, choices=own)
    assert not any(work.screened for work, _ in seen)
    selftest.compare_with_reference(head, ROWS, choices=own, screen=Screen(head, ROWS))
    assert {(Work.SCREENED, SCREEN), (Work.SCREENED, TILE), (Work.SCREENED_EDIT, SCREEN)} <= seen
    assert all(work is not Work.SCREENED_GREEDY for work, _ in seen), "it launches what SCREENED does"


@pytest.mark.parametrize("how", ["shift", "raise"])
def test_a_tuned_screened_configuration_that_fails_gives_its_batches_back_and_is_named(problem, spoiled, how):
    _, head, _ = problem
    spoiled(SCREEN, how)
    own = Choices(Shape.of(head), {Work.SCREENED: {1: SCREEN}})
    checked = selftest.refuse_wrong(head, 1, own, screen=Screen(head, 1))
    assert checked.problem is None
    (line,) = checked.refused
    assert str(SCREEN) in line and line.endswith("(plain+screen)") and "\n" not in line
    assert (checked.unscreened is None) == (how == "shift"), "the built-in one is checked in turn"


def test_a_built_in_screened_configuration_that_fails_leaves_the_server_without_a_screen_and_nothing_else(
    problem, spoiled
):
    _, head, _ = problem
    spoiled(screen_of(Shape.of(head), 1))
    screen = Screen(head, ROWS)
    checked = selftest.refuse_wrong(head, ROWS, choices_for(head), screen=screen)
    assert checked.problem is None and checked.refused == ()
    assert "tokens differ from the reference with ScreenConfig(" in checked.unscreened
    assert not checked.choices.screens(ROWS)
    assert checked.choices.pick(ROWS, Work.SCREENED) == tile_for(head, ROWS)


def test_no_memory_for_the_check_s_own_copy_costs_the_screen_alone(problem, monkeypatch):
    _, head, _ = problem
    screen = Screen(head, ROWS)

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(selftest, "Screen", full)
    checked = selftest.refuse_wrong(head, ROWS, choices_for(head), screen=screen)
    assert checked.problem is None and not checked.choices.screens(ROWS)
    assert checked.unscreened.startswith("OutOfMemoryError: CUDA out of memory. with ScreenConfig(")


def test_own_paths_are_those_that_draw_the_same_token():
    assert set(OWN_PATHS) == set(Path) - {Path.FLASHINFER} == {*ANY_BATCH, Path.SCREENED}
