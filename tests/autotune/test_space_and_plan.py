"""Configurations that a search may try, those that it tries first, and the plan of a run for a head."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tune_examples import (
    A100,
    FULL,
    GREEDY,
    H200,
    HEAD,
    PLAIN,
    QUICK,
    SCREENED,
    SCREENED_EDIT,
    SCREENED_GREEDY,
    TRUNCATE,
)

from sgl_flashsample.autotune.labels import config_of, key_of, label_of
from sgl_flashsample.autotune.plan import EFFORTS, KINDS, Plan, StudyKey, midpoint
from sgl_flashsample.autotune.space import (
    FUSED,
    LOGITS,
    LOGITS_AXES,
    SCREEN_CLASSES,
    TILE_CLASSES,
    Limits,
    Space,
    space_hash,
)
from sgl_flashsample.autotune.space import SCREENED as SCREENED_PATH
from sgl_flashsample.defaults import HeadTraits, default_config
from sgl_flashsample.kernels.config import LIMBS, ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kinds import BATCH_KINDS, CONFIGS, path_of
from sgl_flashsample.tables.lookup import buffer_bytes
from sgl_flashsample.tables.schema import HeadShape, config_fields

LIMITS = Limits(hidden=4096, itemsize=2, shared_memory=232_448, tma=True, chunk=72)
SPACES = [
    *(Space(LIMITS, FUSED, block_b, t, e) for block_b in TILE_CLASSES for t in (False, True) for e in (False, True)),
    *(Space(LIMITS, LOGITS, 0, truncate, False) for truncate in (False, True)),
    *(Space(LIMITS, SCREENED_PATH, block_b, False, edit) for block_b in SCREEN_CLASSES for edit in (False, True)),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_configuration_of_a_space_can_run_by_arithmetic_and_is_found_again(space):
    assert space.points
    for config, point in space.points.items():
        assert space.unsupported_reason(config) is None
        assert space.config(point) == config
        assert config_of(path_of(config), config_fields(config)) == config
        if not isinstance(config, ReadConfig):
            assert buffer_bytes(config, 2) <= LIMITS.shared_memory
        if isinstance(config, TileConfig):
            assert config.ctas_per_sm * buffer_bytes(config, 2) <= LIMITS.shared_memory
            assert config.block_b * config.block_v <= (64 if space.edit else 128) * 32 * config.num_warps, "registers"
        if isinstance(config, ScreenConfig):
            screening = config.stages * (config.block_v + config.block_b * LIMBS) * config.block_d
            assert config.ctas_per_sm * screening <= LIMITS.shared_memory
            assert config.block_b * LIMBS * config.block_v <= 64 * 32 * config.num_warps, "two bounds of each logit"
        elif space.truncate or config.block_b > 16:
            assert not config.one_launch, "one program would reduce what many can"
    assert len({key_of(config) for config in space.points}) == len(space.points), "keys tell them apart"


@pytest.mark.parametrize(
    "path, fixed",
    [(FUSED, {"tma"}), (LOGITS, {"reduce_rows"}), (SCREENED_PATH, {"flatten", "tma", "chunk"})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_search_varies_every_field_of_a_configuration_but_what_is_known_without_one(path, fixed):
    tried = [config for space in SPACES if space.path == path for config in space.points]
    values = {
        field.name: {getattr(config, field.name) for config in tried} for field in dataclasses.fields(CONFIGS[path])
    }
    assert {name for name, tried in values.items() if len(tried) == 1} == fixed


def test_the_hash_of_a_space_is_of_the_values_of_its_own_axes(monkeypatch):
    before = {path: space_hash(path) for path in CONFIGS}
    monkeypatch.setitem(LOGITS_AXES["stages"], 4, {"stages": 4})
    assert {path for path in CONFIGS if space_hash(path) != before[path]} == {LOGITS}


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_neighbours_are_one_step_away_and_first_tries_are_inside(space):
    first = space.first()
    assert first and all(config in space.points for config in first)
    for near in space.neighbours(first[0]):
        assert near in space.points and near != first[0]
    assert first[0] in space.neighbours(space.neighbours(first[0])[0])


@pytest.mark.parametrize(
    "config",
    [TileConfig(64, 128, 64, 4, 2), ReadConfig(16, 512, 4), ScreenConfig(16, 64, 64, 4, 2, rescore_warps=2)],
    ids=path_of,
)
def test_every_field_of_a_configuration_is_in_its_key(config):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = not value if isinstance(value, bool) else value * 2
        assert key_of(dataclasses.replace(config, **{field.name: other})) != key_of(config), field.name


def test_a_path_that_has_no_configurations_is_named():
    with pytest.raises(ValueError, match="path is 'abacus'; expected one of fused, logits, screened"):
        config_of("abacus", {})


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("head", [HEAD, HeadShape(vocab=1000, hidden=48, dtype="fp32")], ids=str)
def test_each_default_is_tried_by_its_study_and_comes_first(device, head):
    plan = Plan(device, head, EFFORTS["quick"])
    for kind in plan.kinds:
        for rows in plan.sizes_of(kind):
            default = plan.default(rows, kind)
            assert default in plan.seeds(plan.study_of(default, kind)), label_of(default, kind)
    key = plan.study_of(plan.default(1, PLAIN), PLAIN)
    assert plan.seeds(key)[0] == plan.default(1, PLAIN)


def test_the_default_is_what_a_server_takes_without_a_table():
    traits = HeadTraits("sm90", 2, HEAD.vocab, HEAD.hidden)
    assert [QUICK.default(rows, kind) for kind in KINDS for rows in QUICK.sizes] == [
        default_config(traits, rows, kind) for kind in KINDS for rows in QUICK.sizes
    ]
    unaligned = Plan(H200, msgspec.structs.replace(HEAD, hidden=4097), EFFORTS["quick"])
    assert not unaligned.default(1, PLAIN).tma, "as the launcher runs it"


@pytest.mark.parametrize("vocab, chunk", [(151_936, 72), (201_088, 96), (1024, 16)])
def test_each_multiprocessor_has_a_rescoring_program(vocab, chunk):
    plan = Plan(H200, HeadShape(vocab=vocab, hidden=2880, dtype="bf16"), EFFORTS["quick"])
    key = StudyKey(SCREENED_PATH, SCREENED, 16)
    assert plan.limits.chunk == chunk and {config.chunk for config in plan.space(key).points} == {chunk}
    tried = {dataclasses.replace(config, chunk=72) for config in plan.seeds(key) if config in plan.space(key).points}
    assert set(plan.defaults(key)) <= tried, "the default's tiles are tried with that chunk too"


def test_a_shard_has_no_studies_of_truncated_batches():
    plan = Plan(H200, HeadShape(vocab=75_968, hidden=4096, dtype="bf16", tp=2), EFFORTS["quick"])
    assert [str(kind) for kind in plan.kinds] == [
        "plain",
        "plain+screen",
        "greedy",
        "greedy+screen",
        "edit",
        "edit+screen",
    ]
    assert not any(key.kind.truncate for key in plan.studies)


def test_batches_with_a_screen_race_the_screened_path_and_what_is_fastest_without_one():
    screened = [key for key in QUICK.studies if key.path == SCREENED_PATH]
    assert {(key.kind, key.block_b) for key in screened} == {
        (kind, block_b) for kind in BATCH_KINDS if kind.screen and not kind.greedy for block_b in SCREEN_CLASSES
    }
    assert not any(key.kind.screen for key in QUICK.studies if key.path != SCREENED_PATH)
    assert QUICK.sizes_of(SCREENED) == (1, 2, 4, 8, 16, 32, 64) and QUICK.races == 5 * 10 + 5 * 7

    def racing(rows, kind):
        return {str(key) for key in QUICK.studies if QUICK.serves(key, rows, kind)}

    assert racing(3, SCREENED) == {"plain+screen/screened/8", "plain/fused/16", "plain/logits"}
    assert racing(3, SCREENED_GREEDY) == racing(3, SCREENED), "greedy rows change no kernel of a screen"
    assert racing(3, GREEDY) == racing(3, PLAIN) == {"plain/fused/16", "plain/logits"}
    assert racing(17, SCREENED_EDIT) >= {"edit+screen/screened/32", "edit/fused/32", "edit/logits"}


def test_a_head_that_no_screen_can_serve_has_no_such_studies():
    plan = Plan(H200, HeadShape(vocab=1000, hidden=2**15 + 16, dtype="bf16"), EFFORTS["quick"])
    assert not any(kind.screen for kind in plan.kinds) and plan.screen == {} and SCREENED_PATH not in plan.paths


def test_what_a_screen_takes_is_known_without_a_device():
    assert QUICK.screen["rows"] == 64 and 0.5 < QUICK.screen["bytes"] / (HEAD.vocab * HEAD.hidden * 2) < 0.525


def test_probes_are_sizes_that_the_class_serves():
    assert FULL.probes(StudyKey(FUSED, PLAIN, 16)) == [1, 16]
    assert FULL.probes(StudyKey(FUSED, PLAIN, 64)) == [64, 128, 256]
    assert FULL.probes(StudyKey(LOGITS, PLAIN, 0)) == [64, 256, 512]
    assert FULL.probes(StudyKey(SCREENED_PATH, SCREENED, 8)) == [1, 8]
    assert FULL.probes(StudyKey(SCREENED_PATH, SCREENED, 32)) == [32, 64]


@pytest.mark.parametrize("effort, most", [("quick", 60), ("full", 300)])
@pytest.mark.parametrize("head", [HEAD, HeadShape(vocab=128_256, hidden=8192, dtype="bf16")], ids=str)
def test_a_run_with_fifteen_compilers_is_expected_to_be_over_in_time(effort, most, head):
    plan = Plan(H200, head, EFFORTS[effort])
    estimate = plan.estimate(processes=15)
    assert estimate.total < most and plan.compiles / 2 < estimate.covered <= plan.compiles
    alone = plan.estimate(processes=1)
    assert alone.total > plan.effort.budget, "what it takes, not what is allowed"
    assert 0 <= alone.covered < plan.compiles / 4


def test_midpoints_lie_between_and_small_batches_have_none():
    assert [midpoint(a, b) for a, b in ((1, 2), (4, 8), (8, 16), (64, 128), (256, 512))] == [None, None, 12, 96, 384]
    assert TRUNCATE in FULL.kinds
