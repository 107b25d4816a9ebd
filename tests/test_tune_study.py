"""What a search may try, what it tries first, and what it remembers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import zlib
from types import SimpleNamespace

import pytest
from sgl_flashsample.autotune import builtin
from sgl_flashsample.autotune.builtin import kernels_of
from sgl_flashsample.autotune.decide import Decider
from sgl_flashsample.autotune.names import key_of, label_of, path_of
from sgl_flashsample.autotune.plan import EFFORTS, Plan, StudyKey, midpoint
from sgl_flashsample.autotune.search import PROBATION, Context, Search
from sgl_flashsample.autotune.space import (
    FUSED,
    LOGITS,
    SCREEN_CLASSES,
    SCREENED,
    TILE_CLASSES,
    Problem,
    Space,
    shared_bytes,
)
from sgl_flashsample.autotune.study import MUCH, PROMISE, Study, importances
from sgl_flashsample.autotune.trials import config_data
from sgl_flashsample.kernels.tiles import ScreenConfig, TileConfig

from sgl_flashsample import tuned
from sgl_flashsample.table import Device, HeadShape
from sgl_flashsample.work import Work

H200 = Device("NVIDIA H200", "9.0", 132, 50, 232448)
A100 = Device("NVIDIA A100-SXM4-80GB", "8.0", 108, 40, 166912)
PROBLEM = Problem(4096, 2, 232448, True, 72)
SPACES = [
    Space(PROBLEM, FUSED, block_b, t, e) for block_b in TILE_CLASSES for t in (False, True) for e in (False, True)
]
SPACES += [Space(PROBLEM, LOGITS, 0, truncates, False) for truncates in (False, True)]
SPACES += [Space(PROBLEM, SCREENED, block_b, False, edits) for block_b in SCREEN_CLASSES for edits in (False, True)]


def cost(config) -> float:
    """A landscape with a slope on every axis."""
    distance = abs(math.log2(config.block_v / 128)) + abs(config.num_warps / 4 - 1) + abs(config.stages - 4) / 4
    return 300.0 * (1 + 0.05 * distance + 0.02 * (not getattr(config, "flatten", True)))


def finish(study: Study, limit: int = 10_000) -> int:
    """Answer whatever the study asks; how many answers that took."""
    count = 0
    while count < limit and (config := study.ask()) is not None:
        study.baseline.setdefault(16, cost(config))
        study.tell(config, {16: cost(config)})
        count += 1
    return count


class NoLog:
    def of(self, kind: str) -> list:
        return []

    def add(self, kind: str, **values: object) -> None: ...


class NoCrew:
    pending = 0

    def drop_waiting(self) -> None: ...


def context_of(plan: Plan, notes: list[str] | None = None) -> Context:
    return Context(
        plan, NoLog(), {}, NoCrew(), (notes if notes is not None else []).append, lambda *values: None, lambda: 1.0
    )


class OneProcess(NoCrew):
    """One that begins what it is given at once, and keeps what it was asked. answers: to everything."""

    def __init__(self, **answers: object) -> None:
        self.idle, self.asked, self.jobs, self._answers = 1, [], [], answers

    def add(self, job) -> None:
        self.idle = 0
        self.jobs.append(job)
        self.asked.append(next(job)[0])

    def answer(self) -> None:
        with contextlib.suppress(StopIteration):
            self.jobs.pop(0).send(self._answers)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_configuration_of_a_space_can_run_by_arithmetic_and_is_found_again(space):
    assert space.points
    for config, point in space.points.items():
        assert space.problem_of(config) is None
        assert space.config(point) == config
        assert shared_bytes(config, 2) <= PROBLEM.shared_memory
        if isinstance(config, TileConfig):
            assert config.ctas_per_sm * shared_bytes(config, 2) <= PROBLEM.shared_memory
        if isinstance(config, ScreenConfig):
            screening = config.stages * (config.block_v + config.block_b * config.terms) * config.block_d
            assert config.ctas_per_sm * screening <= PROBLEM.shared_memory
    assert len({key_of(config) for config in space.points}) == len(space.points), "keys tell them apart"


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_neighbours_are_one_step_away_and_first_tries_are_inside(space):
    first = space.first()
    assert first and all(config in space.points for config in first)
    for near in space.neighbours(first[0]):
        assert near in space.points and near != first[0]
    assert first[0] in space.neighbours(space.neighbours(first[0])[0])


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("head", [HeadShape(151936, 4096, "bf16"), HeadShape(1000, 48, "fp32")], ids=str)
def test_each_default_is_tried_by_its_study_and_comes_first(device, head):
    plan = Plan(device, head, EFFORTS["quick"])
    for work in plan.works:
        for rows in plan.buckets_of(work):
            default = plan.default(rows, work)
            assert default in plan.seeds(plan.study_of(default, work)), label_of(default, work.value)
    key = plan.study_of(plan.default(1, Work.PLAIN), Work.PLAIN)
    assert plan.seeds(key)[0] == plan.default(1, Work.PLAIN)


def test_defaults_without_a_device_are_those_of_the_built_in_tables():
    assert builtin.default_of("sm90", 2, 4096, 16, Work.PLAIN) == tuned.TABLE["sm90", 2][0][1]
    assert builtin.default_of("sm90", 2, 4096, 16, Work.GREEDY) == tuned.TABLE["sm90", 2][0][1]
    assert key_of(builtin.default_of("sm90", 2, 4096, 512, Work.PLAIN)).startswith("logits-")
    assert builtin.default_of("sm90", 2, 4096, 16, Work.SCREENED) == tuned.SCREENS["sm90", 2, Work.PLAIN][1][1]
    assert builtin.default_of("sm90", 2, 4096, 16, Work.SCREENED_GREEDY) == tuned.SCREENS["sm90", 2, Work.PLAIN][1][1]
    assert builtin.default_of("sm90", 2, 4096, 32, Work.SCREENED_GREEDY) == tuned.TABLE["sm90", 2][1][1]
    truncated = {columns: builtin.default_of("sm90", 2, columns, 8, Work.SCREENED_TRUNCATE) for columns in (2048, 2880)}
    assert [isinstance(config, ScreenConfig) for config in truncated.values()] == [False, True]
    assert builtin.default_of("sm80", 2, 4096, 1, Work.SCREENED_GREEDY) == tuned.TABLE["sm80", 2][0][1]


@pytest.mark.parametrize("vocab, chunk", [(151936, 72), (201088, 96), (1024, 16)])
def test_each_multiprocessor_has_a_rescoring_program(vocab, chunk):
    plan = Plan(H200, HeadShape(vocab, 2880, "bf16"), EFFORTS["quick"])
    key = StudyKey(SCREENED, Work.SCREENED, 16)
    assert plan.problem.chunk == chunk and {config.chunk for config in plan.space(key).points} == {chunk}
    built_in = {dataclasses.replace(config, chunk=72) for config in plan.seeds(key) if config in plan.space(key).points}
    assert set(plan.defaults(key)) <= built_in, "the default's tiles are tried with that chunk too"


def test_a_shard_has_no_studies_of_truncated_batches():
    plan = Plan(H200, HeadShape(75968, 4096, "bf16", tp=2), EFFORTS["quick"])
    screened = (Work.SCREENED, Work.SCREENED_GREEDY, Work.SCREENED_EDIT)
    assert plan.works == (Work.PLAIN, Work.GREEDY, Work.EDIT, *screened)
    assert not any(key.work.truncates for key in plan.studies)


def test_batches_with_a_screen_have_studies_of_the_screened_path_and_what_is_found_without_one():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    screened = [key for key in plan.studies if key.path == SCREENED]
    assert {(key.work, key.block_b) for key in screened} == {
        (work, block_b) for work in Work if work.screened and not work.greedy for block_b in SCREEN_CLASSES
    }
    assert not any(key.work.screened for key in plan.studies if key.path != SCREENED)
    assert plan.buckets_of(Work.SCREENED) == (1, 2, 4, 8, 16, 32, 64) and plan.races == 5 * 10 + 5 * 7

    def racing(rows, work):
        return {str(key) for key in plan.studies if plan.serves(key, rows, work)}

    assert racing(3, Work.SCREENED) == {"plain+screen/screened/8", "plain/fused/16", "plain/logits"}
    assert racing(3, Work.SCREENED_GREEDY) == racing(3, Work.SCREENED), "greedy rows change no kernel of a screen"
    assert racing(17, Work.SCREENED_EDIT) >= {"edit+screen/screened/32", "edit/fused/32", "edit/logits"}
    assert not any("screen" in name for name in racing(3, Work.PLAIN) | racing(3, Work.EDIT))


def test_a_head_that_no_screen_can_serve_has_no_such_studies():
    plan = Plan(H200, HeadShape(1000, 2**15 + 16, "bf16"), EFFORTS["quick"])
    assert not any(work.screened for work in plan.works) and plan.screen == {} and SCREENED not in plan.paths


@pytest.mark.parametrize("effort, most", [("quick", 60), ("full", 300)])
def test_a_run_with_all_paths_is_expected_to_be_over_in_time_even_without_its_budget(effort, most):
    import dataclasses

    unbounded = dataclasses.replace(EFFORTS[effort], budget=1e9)
    for head in (HeadShape(151936, 4096, "bf16"), HeadShape(128256, 8192, "bf16")):
        assert Plan(H200, head, unbounded).estimate(processes=15)["total"] < most


def test_what_a_screen_takes_is_known_without_a_device():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    assert plan.screen["rows"] == 64 and 0.5 < plan.screen["bytes"] / (151936 * 4096 * 2) < 0.52


def test_probes_are_buckets_that_the_class_serves():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["full"])
    assert plan.probes(StudyKey(FUSED, Work.PLAIN, 16)) == [1, 16]
    assert plan.probes(StudyKey(FUSED, Work.PLAIN, 64)) == [64, 128, 256]
    assert plan.probes(StudyKey(LOGITS, Work.PLAIN, 0)) == [64, 256, 512]
    assert plan.probes(StudyKey(SCREENED, Work.SCREENED, 8)) == [1, 8]
    assert plan.probes(StudyKey(SCREENED, Work.SCREENED, 32)) == [32, 64]


def test_studies_of_built_in_defaults_come_first_so_that_these_are_compiled_before_they_race():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    keys = list(Search(context_of(plan), None).studies)
    assert sorted(map(str, keys)) == sorted(map(str, plan.studies))
    own = [bool(plan.defaults(key)) for key in keys]
    assert own == sorted(own, reverse=True)
    assert any(own) and not all(own)


def test_a_study_that_is_slower_than_others_everywhere_is_over_and_one_that_is_not_goes_on():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["full"])
    search = Search(context_of(plan), None)
    fused, screened = StudyKey(FUSED, Work.TRUNCATE, 16), StudyKey(SCREENED, Work.SCREENED_TRUNCATE, 16)

    def tell(key, us, count):
        study = search.studies[key]
        for config in [config for config in study.space.points if config not in study.trials][:count]:
            search._tell(key, config, dict.fromkeys(plan.probes(key), us), None)

    tell(fused, 300.0, 1)
    tell(screened, 1.2 * 300.0, PROBATION)
    assert screened not in search._over
    search.studies[screened].trials.clear()
    tell(screened, 1.4 * 300.0, PROBATION - 1)
    assert screened not in search._over, "too few to tell"
    tell(screened, 1.4 * 300.0, 1)
    assert screened in search._over and fused not in search._over
    alone = StudyKey(FUSED, Work.PLAIN, 16)
    tell(alone, 1e6, PROBATION)
    assert alone not in search._over, "nobody else has been timed for its batches"


def test_a_study_of_which_nothing_runs_is_named_with_the_reason():
    notes: list[str] = []
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    search = Search(context_of(plan, notes), None)
    key = StudyKey(SCREENED, Work.SCREENED_TRUNCATE, 16)
    for config in list(search.studies[key].space.points)[:PROBATION]:
        search._tell(key, config, {}, {"why": "compile", "detail": "ValueError: of another head"})
    search._tell(StudyKey(FUSED, Work.PLAIN, 16), plan.default(16, Work.PLAIN), {16: 280.0}, None)
    search.stop()
    (note,) = notes
    assert "truncate+screen/screened/16: none of 6 could be used; 6 of them: compile: ValueError: of another" in note


def test_midpoints_lie_between_and_small_batches_have_none():
    assert [midpoint(a, b) for a, b in ((1, 2), (4, 8), (8, 16), (64, 128), (256, 512))] == [None, None, 12, 96, 384]


def test_a_study_finds_the_best_of_hundreds_in_dozens():
    space = SPACES[0]
    study = Study(space, space.first(), 40)
    assert finish(study) == 40
    best = min(map(cost, space.points))
    assert cost(study.best(16, 1)[0]) <= 1.02 * best


def test_the_neighbours_of_what_is_best_at_one_batch_size_alone_are_tried():
    space = SPACES[0]
    base, best, second, single = space.first()[:4]
    costs = {best: {1: 100.0, 16: 50.0}, second: {1: 100.0, 16: 60.0}, single: {1: 90.0, 16: 100.0}}
    around = {near for config in costs for near in space.neighbours(config)}
    study = Study(space, [base, *costs], len(around | {base, *costs}))
    while (config := study.ask()) is not None:
        study.baseline = {1: 100.0, 16: 100.0}
        study.tell(config, costs.get(config, {1: 100.0, 16: 100.0}))
    assert set(space.neighbours(single)) <= study.trials.keys()


def hashed(*values: object) -> float:
    return zlib.crc32(str(values).encode()) / 2**32


@pytest.mark.parametrize("block_b", [8, 16, 32])
@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_of_each_launch_are_put_together_where_times_add_up(block_b, seed):
    space = Space(PROBLEM, SCREENED, block_b, False, False)
    head = HeadShape(151936, 4096, "bf16")
    cap = Plan(H200, head, EFFORTS["full"]).cap(StudyKey(SCREENED, Work.SCREENED, block_b))

    def cost(launches) -> float:
        return 150.0 * (1 + 0.3 * hashed(seed, launches[0])) + 25.0 * (1 + hashed(seed, launches[1]))

    study = Study(space, space.first(), cap)
    while (config := study.ask()) is not None:
        study.baseline.setdefault(16, cost(space.launches(config)))
        study.tell(config, {16: cost(space.launches(config))})
    # What the last trials have taught cannot be put together any more.
    firsts, seconds = zip(*map(space.launches, list(study.trials)[:-3]), strict=True)
    pairs = [pair for pair in itertools.product(firsts, seconds) if space.of_launches(pair) is not None]
    assert len(study.trials) == cap < len(space.points) / 8
    assert cost(space.launches(study.best(16, 1)[0])) <= (1 + 2 * PROMISE) * min(map(cost, pairs))


def test_a_pair_is_not_put_together_where_it_promises_nothing():
    space = Space(PROBLEM, SCREENED, 16, False, False)
    star = space.first()
    study = Study(space, star, len(star) + 1)
    for config in star:  # whatever is not the first is slower, so each pair of others is slower still
        study.tell(config, {16: 100.0 if config == star[0] else 110.0})
    assert study._promising(PROMISE) == []
    faster = {config: 100.0 for config in star} | {star[2]: 95.0, star[-4]: 96.0}
    study.trials.clear()
    for config, us in faster.items():
        study.tell(config, {16: us})
    tile, rescore = space.launches(star[-4])[0], space.launches(star[2])[1]
    together = space.of_launches((tile, rescore))
    assert study._promising(PROMISE)[0] == together not in star
    # 95 + 96 - 100: 4 % less than the best.
    assert study._promising(MUCH)[0] == together and not study._promising(0.05)
    study.offer([space.neighbours(star[0])[-1]])
    assert study.ask() == together, "before what is only offered"


def test_a_small_space_is_walked_and_nothing_is_asked_twice():
    small = Space(Problem(64, 2, 60_000, False, 72), FUSED, 128, False, False)
    assert 0 < len(small.points) <= 64
    study = Study(small, [], 10_000)
    assert finish(study) == len(small.points) == len(study.trials)


def test_a_study_goes_on_from_what_is_remembered():
    space = SPACES[0]
    first = Study(space, space.first(), 30)
    finish(first)
    second = Study(space, space.first(), 40)
    for config, trial in first.trials.items():
        second.baseline.setdefault(16, trial.us[16])
        second.tell(config, trial.us)
    assert finish(second) == 10
    assert len(second.trials) == 40


def test_rejected_configurations_are_told_as_bad_and_are_never_the_best():
    space = SPACES[0]
    study = Study(space, space.first(), 30)
    while (config := study.ask()) is not None:
        bad = config.block_v == 64
        study.tell(config, None if bad else {16: cost(config)}, "incorrect" if bad else "")
    assert study.trials and all(config.block_v != 64 for config in study.best(16, 100))
    assert all(study.value(config) is None for config in study.trials if config.block_v == 64)


def test_several_proposals_at_once_are_different():
    space = SPACES[0]
    study = Study(space, space.first()[:1], 40)
    finish(study, 20)
    asked = [study.ask() for _ in range(8)]
    assert None not in asked and len(set(asked)) == 8 and study.asked == 8


def test_winners_of_another_study_are_tried_next():
    space = SPACES[0]
    study = Study(space, space.first(), 40)
    offered = list(space.points)[-1]
    study.offer([offered, TileConfig(32, 128, 64, 4, 2)])
    assert study.ask() == offered


def test_the_axis_that_decides_is_named():
    space = SPACES[0]
    values = {config: 0.5 * (config.num_warps == 8) + 1e-4 * place for place, config in enumerate(space.points)}
    shares = importances(space, values)
    assert max(shares, key=shares.get) == "num_warps"
    assert importances(space, dict(list(values.items())[:3])) == {}


def test_what_races_in_any_case_is_compiled_beside_the_races_unless_a_trial_has_compiled_it():
    """In a short search, most defaults were in no trial: the process that measures would compile them one by one."""
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    compilers, gpu = OneProcess(shared=0, registers=0, spilled=0), OneProcess(us={})
    search = Search(dataclasses.replace(context_of(plan), gpus=gpu), compilers)
    search.fill()
    (tried,) = compilers.asked
    search.stop()
    compilers.answer()
    assert not gpu.asked, "a search that is over measures nothing more"
    decider = Decider(search.context, SimpleNamespace(buckets={}, configs={}, flashinfer=False), lambda *_: [], bool)
    search.compile_for_races(decider.entered())
    found = [(request["path"], str(request["config"]), request["work"]) for request in compilers.asked]
    assert found[0] == (tried["path"], str(tried["config"]), tried["work"]) and len(set(found)) == len(found)
    for work in plan.works:
        for rows in plan.buckets_of(work):
            default = plan.default(rows, work)
            kernels = kernels_of(work, default)
            assert (path_of(default), str(config_data(default)), kernels.value) in found, (work, rows)


def test_a_search_whose_time_is_over_waits_for_no_compiler():
    plan = Plan(H200, HeadShape(151936, 4096, "bf16"), EFFORTS["quick"])
    compilers = OneProcess()
    search = Search(context_of(plan), compilers)
    search.fill()
    compilers.pending = 1
    assert not search.finished
    search.stop()
    assert search.finished
