"""How a search proposes, what it remembers, and when a study is over."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import zlib
from pathlib import Path

import pytest
from tune_examples import (
    DEFAULT,
    EDIT,
    FULL,
    PLAIN,
    QUICK,
    SCREENED,
    SCREENED_TRUNCATE,
    TRUNCATE,
    InstantPool,
    context_of,
)

from sgl_flashsample.autotune.decide import Decider
from sgl_flashsample.autotune.labels import config_of, kernel_kind
from sgl_flashsample.autotune.plan import Plan, StudyKey
from sgl_flashsample.autotune.search import PROBATION, Search
from sgl_flashsample.autotune.space import FUSED, LOGITS, Limits, Space
from sgl_flashsample.autotune.space import SCREENED as SCREENED_PATH
from sgl_flashsample.autotune.study import LARGE_PROMISE, MIN_PROMISE, Study, finished_study
from sgl_flashsample.autotune.trials import TrialLog, read_events
from sgl_flashsample.autotune.writer import TableWriter
from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.kinds import KIND_NAMES, BatchKind, Config, path_of
from sgl_flashsample.tables.schema import config_fields

SPACE = FULL.space(StudyKey(FUSED, PLAIN, 16))


def cost(config) -> float:
    """A landscape with a slope on every axis."""
    distance = abs(math.log2(config.block_v / 128)) + abs(config.num_warps / 4 - 1) + abs(config.stages - 4) / 4
    return 300.0 * (1 + 0.05 * distance + 0.02 * (not config.flatten))


def hashed(*values: object) -> float:
    return zlib.crc32(str(values).encode()) / 2**32


def finish(study: Study, cost=cost, limit: int = 10_000) -> int:
    """Answers every request of the study, and returns the number of answers."""
    count = 0
    while count < limit and (config := study.ask()) is not None:
        study.tell(config, {16: cost(config)})
        count += 1
    return count


def test_a_study_finds_the_best_of_hundreds_in_dozens():
    study = Study(SPACE, SPACE.first(), 40)
    assert finish(study) == 40
    assert cost(study.best(16, 1)[0]) <= 1.02 * min(map(cost, SPACE.points))


def test_a_small_space_is_walked_and_nothing_is_asked_twice():
    small = Space(Limits(64, 2, 60_000, False, 72), FUSED, 128, False, False)
    assert 0 < len(small.points) <= 64
    study = Study(small, [], 10_000)
    assert finish(study) == len(small.points) == len(study.trials)


@pytest.mark.parametrize("plan", [QUICK, FULL], ids=lambda plan: plan.effort.name)
def test_every_study_of_an_effort_begins_with_its_first_seed_and_gives_the_sampler_its_share(plan):
    search, effort = Search(context_of(plan), InstantPool()), plan.effort
    for key, study in search.studies.items():
        first = study.ask()
        study.tell(first, {16: 300.0})
        finish(study, lambda config, key=key: 300.0 * (1 + 0.2 * hashed(key, config)))
        assert first == plan.seeds(key)[0]
        assert len(study.trials) == plan.cap(key)
        assert len(study.proposals) >= effort.proposed * plan.cap(key)
    proposed = sum(len(study.proposals) for study in search.studies.values())
    at_least = {"quick": 0, "full": search.size / 3}
    assert proposed >= at_least[effort.name], "studies that run out of seeds propose more"
    assert proposed == 0 or effort.proposed


def test_the_last_trials_are_proposals_if_there_are_seeds_for_all():
    seeds = SPACE.first()
    study = Study(SPACE, seeds, 6, proposed=1 / 3)
    finish(study)
    assert list(study.trials)[:4] == seeds[:4] and set(list(study.trials)[4:]) == study.proposals
    without = Study(SPACE, seeds, 6)
    finish(without)
    assert list(without.trials) == seeds[:6] and not without.proposals


def test_a_proposal_follows_from_the_times_though_they_are_few():
    """Four trials tell which warps are fast: uniform draws would have them in half of the proposals."""
    seeds, fast = SPACE.first(), 0
    for seed in range(20):
        study = Study(SPACE, seeds, 6, proposed=1 / 3, seed=seed)
        finish(study, lambda config: 100.0 if config.num_warps == 8 else 300.0)
        fast += sum(config.num_warps == 8 for config in study.proposals)
    assert fast >= 30


def test_two_studies_with_the_same_seed_and_times_try_the_same():
    one, other = (Study(SPACE, SPACE.first(), 24, proposed=1 / 3, seed=7) for _ in range(2))
    finish(one)
    finish(other)
    assert list(one.trials) == list(other.trials) and one.proposals == other.proposals


def test_a_space_that_is_tried_as_a_whole_needs_no_proposals_and_a_small_one_that_is_not_has_its_share():
    small = Space(Limits(64, 2, 60_000, False, 72), FUSED, 128, False, False)
    whole = Study(small, small.first(), len(small.points), proposed=1 / 3)
    assert finish(whole) == len(small.points) and not whole.proposals
    part = Study(small, small.first(), 6, proposed=1 / 3)
    assert finish(part) == 6 and len(part.proposals) >= 2


def test_a_study_goes_on_from_what_is_remembered():
    first, second = Study(SPACE, SPACE.first(), 30), Study(SPACE, SPACE.first(), 40)
    finish(first)
    for config, trial in first.trials.items():
        second.tell(config, trial.us)
    assert finish(second) == 10 and len(second.trials) == 40


def test_rejected_configurations_are_never_the_best():
    study = Study(SPACE, SPACE.first(), 30)
    while (config := study.ask()) is not None:
        bad = config.block_v == 64
        study.tell(config, None if bad else {16: cost(config)}, "incorrect" if bad else "")
    assert study.trials and all(config.block_v != 64 for config in study.best(16, 100))
    assert all(study.value(config) is None for config in study.trials if config.block_v == 64)


def test_several_proposals_at_once_are_different():
    study = Study(SPACE, SPACE.first()[:1], 40)
    finish(study, limit=20)
    asked = [study.ask() for _ in range(8)]
    assert None not in asked and len(set(asked)) == 8 and study.asked == 8


def test_winners_of_another_study_are_tried_next_as_far_as_they_are_in_the_space():
    study = Study(SPACE, SPACE.first(), 40)
    offered = list(SPACE.points)[-1]
    study.offer([offered, TileConfig(32, 128, 64, 4, 2)])
    assert study.ask() == offered


def test_the_neighbours_of_what_is_best_at_one_batch_size_alone_are_tried():
    base, best, second, single = SPACE.first()[:4]
    costs = {best: {1: 100.0, 16: 50.0}, second: {1: 100.0, 16: 60.0}, single: {1: 90.0, 16: 100.0}}
    around = {near for config in costs for near in SPACE.neighbours(config)}
    study = Study(SPACE, [base, *costs], len(around | {base, *costs}))
    while (config := study.ask()) is not None:
        study.tell(config, costs.get(config, {1: 100.0, 16: 100.0}))
    assert set(SPACE.neighbours(single)) <= study.trials.keys()


@pytest.mark.parametrize("block_b", [8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_of_each_launch_are_put_together_where_times_add_up(block_b, seed):
    key = StudyKey(SCREENED_PATH, SCREENED, block_b)
    space = FULL.space(key)

    def us(launches) -> float:
        return 150.0 * (1 + 0.3 * hashed(seed, launches[0])) + 25.0 * (1 + hashed(seed, launches[1]))

    study = Study(space, space.first(), FULL.cap(key))
    finish(study, lambda config: us(space.launches(config)))
    # Launches that only the last trials had cannot be put together any more.
    firsts, seconds = zip(*map(space.launches, list(study.trials)[:-3]), strict=True)
    pairs = [pair for pair in itertools.product(firsts, seconds) if space.of_launches(pair) is not None]
    assert len(study.trials) == FULL.cap(key) < len(space.points) / 8
    assert us(space.launches(study.best(16, 1)[0])) <= (1 + 2 * MIN_PROMISE) * min(map(us, pairs))


def test_a_pair_is_put_together_only_where_it_promises_something():
    space = FULL.space(StudyKey(SCREENED_PATH, SCREENED, 16))
    star = space.first()

    def study_with(faster: dict) -> Study:
        study = Study(space, star, len(star) + 1)
        for config in star:
            study.tell(config, {16: faster.get(config, 100.0 if config == star[0] else 110.0)})
        return study

    # Every other value is slower than the first of its axis, and each pair of others is slower still.
    assert study_with({}).recombined(MIN_PROMISE) == []
    study = study_with({config: 100.0 for config in star} | {star[2]: 95.0, star[-4]: 96.0})
    tile, rescore = space.launches(star[-4])[0], space.launches(star[2])[1]
    together = space.of_launches((tile, rescore))
    assert together not in star and study.recombined(MIN_PROMISE)[0] == together
    # 95 + 96 - 100: 4 % less than the best.
    assert study.recombined(LARGE_PROMISE)[0] == together and not study.recombined(0.05)
    study.offer([space.neighbours(star[0])[-1]])
    assert study.ask() == together, "before what is only offered"


def test_a_finished_study_is_optunas_with_what_it_was_worth():
    values = {config: 0.5 * (config.num_warps == 8) for config in list(SPACE.points)[:20]}
    study = finished_study(SPACE, values | {TileConfig(32, 128, 64, 4, 2): 1.0})
    assert [trial.value for trial in study.trials] == list(values.values()), "what is outside of the space is left out"


# --- all studies of a plan


def test_studies_of_built_in_choices_come_first_so_that_these_are_compiled_before_they_race():
    keys = list(Search(context_of(QUICK), InstantPool()).studies)
    assert sorted(map(str, keys)) == sorted(map(str, QUICK.studies))
    with_default = [bool(QUICK.defaults(key)) for key in keys]
    assert with_default == sorted(with_default, reverse=True) and True in with_default and False in with_default


def test_a_study_that_is_slower_than_others_everywhere_is_over_and_one_that_is_not_goes_on():
    fused, screened = StudyKey(FUSED, TRUNCATE, 16), StudyKey(SCREENED_PATH, SCREENED_TRUNCATE, 16)

    def search_with(slower: float, count: int) -> Search:
        search = Search(context_of(FULL), InstantPool())
        for key, us, trials in ((fused, 300.0, 1), (screened, slower * 300.0, count)):
            for config in list(search.studies[key].space.points)[:trials]:
                search.tell(key, config, dict.fromkeys(FULL.probes(key), us), None)
        return search

    assert not search_with(1.2, PROBATION).over
    assert not search_with(1.4, PROBATION - 1).over, "too few to tell"
    search = search_with(1.4, PROBATION)
    assert search.over == {screened}
    alone = StudyKey(FUSED, PLAIN, 16)
    for config in list(search.studies[alone].space.points)[:PROBATION]:
        search.tell(alone, config, dict.fromkeys(FULL.probes(alone), 1e6), None)
    assert alone not in search.over, "nobody else has been timed for its batches"


def test_the_log_says_which_trials_the_sampler_proposed_also_to_a_run_that_goes_on():
    context = context_of(Plan(QUICK.device, QUICK.head, dataclasses.replace(QUICK.effort, proposed=1 / 3)))
    search = Search(context, InstantPool())
    key = StudyKey(FUSED, PLAIN, 16)
    while (config := search.studies[key].ask()) is not None:
        search.tell(key, config, dict.fromkeys(QUICK.probes(key), cost(config)), None)
    proposed = [event["proposed"] for event in search.context.log.of("trial")]
    assert proposed == [False] * 4 + [True] * 2
    assert Search(context, InstantPool()).studies[key].proposals == search.studies[key].proposals


def test_a_study_of_which_nothing_runs_is_named_with_the_reason():
    notes: list[str] = []
    search = Search(context_of(QUICK, note=notes.append), InstantPool())
    key = StudyKey(SCREENED_PATH, SCREENED_TRUNCATE, 16)
    for config in list(search.studies[key].space.points)[:PROBATION]:
        search.tell(key, config, {}, {"reason": "compile", "detail": "ValueError: of another head"})
    search.tell(StudyKey(FUSED, PLAIN, 16), QUICK.default(16, PLAIN), {16: 280.0}, None)
    search.stop()
    (note,) = notes
    assert "truncate+screen/screened/16: none of 6 could be used; 6 of them: compile: ValueError: of another" in note


def test_what_races_in_any_case_is_compiled_beside_the_races_unless_a_trial_has_compiled_it(tmp_path):
    """In a short search, most defaults were in no trial: the process that measures would compile them one by one."""
    compilers, gpu = InstantPool({"shared": 0, "registers": 0, "spilled": 0}), InstantPool()
    search = Search(context_of(QUICK, gpus=gpu), compilers)
    search.fill()
    (tried,) = compilers.asked
    search.stop()
    compilers.reply()
    assert not gpu.asked, "a search that is over measures nothing more"
    decider = Decider(search.context, TableWriter(tmp_path, QUICK, {}), lambda *_: [], lambda: False)
    search.compile_for_races(decider.entered())
    asked = [(request["path"], str(request["config"]), request["kind"]) for request in compilers.asked]
    assert asked[0] == (tried["path"], str(tried["config"]), tried["kind"]) and len(set(asked)) == len(asked)
    for kind in QUICK.kinds:
        for rows in QUICK.sizes_of(kind):
            default = QUICK.default(rows, kind)
            kernels = kernel_kind(kind, path_of(default))
            assert (path_of(default), str(config_fields(default)), str(kernels)) in asked, (kind, rows)


def asked_of(pool: InstantPool) -> list[tuple[Config, BatchKind]]:
    return [(config_of(one["path"], one["config"]), KIND_NAMES[one["kind"]]) for one in pool.asked]


@pytest.mark.parametrize(
    "answer, reason",
    [
        ({"shared": 10**6, "registers": 0, "spilled": 0}, "shared_memory"),
        ({"shared": 0, "registers": 255, "spilled": 4096}, "registers"),
        ({"error": {"reason": "compile", "detail": "nonsense", "fatal": False}}, "compile"),
    ],
)
def test_what_a_compiler_says_against_a_configuration_keeps_it_from_the_gpu(answer, reason):
    compilers, gpu = InstantPool(answer), InstantPool()
    search = Search(context_of(QUICK, gpus=gpu), compilers)
    while len(compilers.asked) < 40:
        search.fill()
        compilers.reply()
        if gpu.jobs:
            gpu.reply()
    assert set(search.context.rejected.values()) == {reason}
    built_in = [one for one in asked_of(compilers) if search.context.is_default(*one)]
    measured = built_in if reason == "registers" else []
    assert built_in and asked_of(gpu) == measured, "a built-in choice is what a server runs, though it spills"


def test_a_search_whose_time_is_over_waits_for_no_compiler():
    search = Search(context_of(QUICK), InstantPool())
    search.fill()
    assert not search.finished
    search.stop()
    assert search.finished


def test_finalists_are_the_fastest_of_the_studies_that_serve_a_batch_unless_they_are_far_behind():
    search, best = Search(context_of(FULL), InstantPool()), {}
    for key, times in (
        (StudyKey(FUSED, PLAIN, 16), [300.0, 330.0, 310.0, 320.0]),  # the last but one of them is one too many
        (StudyKey(FUSED, PLAIN, 128), [200.0]),  # for larger batches
        (StudyKey(LOGITS, PLAIN, 0), [360.0, 340.0]),  # the first is far behind
        (StudyKey(FUSED, EDIT, 16), [200.0]),
    ):
        best[key] = list(itertools.islice(search.studies[key].space.points, len(times)))
        for config, us in zip(best[key], times, strict=True):
            search.tell(key, config, dict.fromkeys(FULL.probes(key), us), None)
    tiles, readers = best[StudyKey(FUSED, PLAIN, 16)], best[StudyKey(LOGITS, PLAIN, 0)]
    assert FULL.effort.finalists == 3
    assert search.finalists(16, PLAIN) == [tiles[0], tiles[2], tiles[3], readers[1]]


# --- the log


def test_a_log_survives_a_line_that_was_cut_short_and_goes_on(tmp_path):
    path = tmp_path / "trials.jsonl"
    log = TrialLog(path, {"device": "x"}, resume=True)
    log.add("trial", value=1)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "trial", "val')
    log = TrialLog(path, {"device": "x"}, resume=True)
    assert [event["value"] for event in log.of("trial")] == [1]
    log.add("trial", value=2)
    log.close()
    assert [event.get("value") for event in read_events(path)] == [None, 1, 2]


def test_a_log_that_is_not_gone_on_with_is_kept_under_a_name_of_its_own_and_a_line_says_why(tmp_path):
    path = tmp_path / "trials.jsonl"

    def opened(device, resume=True) -> TrialLog:
        log = TrialLog(path, {"device": device}, resume=resume)
        log.add("trial", device=device)
        log.close()
        return log

    assert opened("x").note == ""
    assert opened("y").note == "the log of another device, version or space is kept as trials.old"
    assert opened("x").note == "the log of another device, version or space is kept as trials.old2"
    assert opened("x", resume=False).note == "the log of earlier runs is kept as trials.old3"
    path.write_bytes(b"\xff" + path.read_bytes())
    assert opened("x").note == "the log that cannot be read is kept as trials.old4"
    devices = [read_events(tmp_path / f"trials.old{number}")[-1]["device"] for number in ("", 2, 3, 4)]
    assert devices == ["x", "y", "x", "x"] and len(opened("x").events) == 2


def test_a_damaged_byte_costs_a_log_its_line_and_no_other(tmp_path):
    path = tmp_path / "trials.jsonl"
    log = TrialLog(path, {"device": "x"}, resume=True)
    for value in range(3):
        log.add("trial", value=value)
    log.close()
    path.write_bytes(path.read_bytes().replace(b'"value": 1', b'"value\xff": 1'))
    log = TrialLog(path, {"device": "x"}, resume=True)
    assert [event["value"] for event in log.of("trial")] == [0, 2] and not log.note


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\0" * 100, '{"event": ["trial"]}\n' * 3, "\u2028"], ids=range(5))
def test_what_is_no_log_is_as_none(tmp_path, text):
    (tmp_path / "log").write_text(text)
    assert all(isinstance(event, dict) for event in read_events(tmp_path / "log"))
    assert read_events(Path("/dev/null")) == read_events(tmp_path) == []


def test_a_search_recalls_a_log_and_leaves_out_what_it_cannot_use():
    context = context_of(QUICK)
    good = {"kind": "plain", "path": "fused", "config": config_fields(DEFAULT)}
    context.log.add("trial", **good, us={"1": 280.0, "16": 282.0}, reason="", detail="")
    other, hanging = (dataclasses.replace(DEFAULT, stages=stages) for stages in (2, 3))
    for config, reason in ((other, "registers"), (hanging, "timeout")):
        failed = {"kind": "plain", "path": "fused", "config": config_fields(config), "us": {}}
        context.log.add("trial", **failed, reason=reason, detail="x")
    for broken in ({"kind": "sort"}, {"path": "abacus"}, {"config": {"block_b": 3}}, {"us": [1]}, {"us": {"x": 1}}):
        context.log.add("trial", **({**good, "us": {}, "reason": "", "detail": ""} | broken))
    search = Search(context, InstantPool())
    study = search.studies[QUICK.study_of(DEFAULT, PLAIN)]
    assert search.tried == 2 and study.trials[DEFAULT].us == {1: 280.0, 16: 282.0}
    assert study.trials[other].reason == "registers" and list(context.rejected.values()) == ["registers"]
    assert hanging not in study.trials, "what may work now is tried again"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_closed_all_the_same(tmp_path):
    log = TrialLog(tmp_path / "t.jsonl", {}, resume=False)
    log._file.close()
    log._file = open("/dev/full", "a")  # noqa: SIM115 - closed below
    with pytest.raises(OSError):
        log.add("trial")
    log.close()
    assert log._file.closed
