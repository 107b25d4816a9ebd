"""The cost model agrees with what was measured, and decides where nothing was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tuned_tables import make_table

from sgl_flashsample import LMHead, defaults
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.cost_model import FUSED_EFFICIENCY, GEMM_EFFICIENCY, MOST_ROWS, FusedRows, fused_rows
from sgl_flashsample.defaults import MEASURED, HeadTraits, builtin_table, default_config, default_config_on
from sgl_flashsample.dispatch import DispatchTable, reading_table
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.launch import Gpu
from sgl_flashsample.kinds import BATCH_KINDS, PLAIN, BatchKind, Config, SamplingPath, path_of
from sgl_flashsample.tables.fingerprint import measured_sizes
from sgl_flashsample.tables.lookup import Match, TableFile, Target, dispatch_of
from sgl_flashsample.tables.schema import Confirmed, Device, HeadShape, Table

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-kernels.json"
SIZES = (16, 32, 48, 64, 96, 128, 200, 256, 512)  # classes of batch sizes
KINDS = (PLAIN, BatchKind(truncate=True), BatchKind(edit=True), BatchKind(truncate=True, edit=True))
VOCAB, HIDDEN = 151_936, 4096

# Multiprocessors, their clock and the memory's bandwidth as the driver has them.
H200 = Gpu((9, 0), 132, 1.98e9, 4.81e12)
H100 = Gpu((9, 0), 132, 1.98e9, 3.35e12)
A100 = Gpu((8, 0), 108, 1.41e9, 2.04e12)
A10 = Gpu((8, 6), 72, 1.695e9, 0.6e12)
B200 = Gpu((10, 0), 148, 1.965e9, 8.0e12)


def place(rows: float) -> int:
    """The place in ``SIZES`` of the largest size that is not larger."""
    return max((at for at, size in enumerate(SIZES) if size <= rows), default=0)


def limits_of(gpu: Gpu, vocab: int = VOCAB, hidden: int = HIDDEN, family: str = "sm90", kind=PLAIN) -> FusedRows:
    """The limits with the tile that the family's largest batches of ``kind`` take on the fused path."""
    tile = default_config_on(HeadTraits(family, 2, vocab, hidden), SamplingPath.FUSED, MOST_ROWS, kind)
    return fused_rows(gpu, vocab, hidden, tile)


def largest_fused(choose: Callable[[int], Config]) -> int:
    """The rows of the largest batch on the fused path; all larger ones are on the logits path."""
    paths = [path_of(choose(rows)) for rows in range(1, 513)]
    fused = paths.count(SamplingPath.FUSED)
    assert set(paths[:fused]) == {SamplingPath.FUSED} and set(paths[fused:]) == {SamplingPath.LOGITS}
    return fused


def assert_between(rows: float, fused: int, logits: int) -> None:
    """``rows`` is within one class of the sizes between the largest batch that ``fused`` was faster for and the
    smallest one that ``logits`` was faster for."""
    assert place(fused) - 1 <= place(rows) <= place(logits), (fused, rows, logits)


def built_in_limit(kind: BatchKind) -> int:
    entries = builtin_table(*MEASURED).entries
    return max(e.rows for e in entries if e.kind == str(kind) and e.path == "fused" and not e.on_request)


def test_the_limits_of_the_measured_table_are_the_models_for_an_h200_and_within_one_class_for_an_h100():
    traits = HeadTraits("sm90", 2, VOCAB, HIDDEN).modelled_on(H200)
    for kind in KINDS:
        assert largest_fused(lambda rows, kind=kind: default_config(traits, rows, kind)) == built_in_limit(kind)
        assert abs(place(limits_of(H100, kind=kind).of(kind)) - place(built_in_limit(kind))) <= 1


def rows_of_result() -> list[dict]:
    return json.loads(RESULT.read_text())["rows"]


def test_the_shares_of_the_multiply_adds_are_those_of_the_results_of_an_h200():
    peak = 2 * 2048 * H200.multiprocessors * H200.clock
    for sampling, path, share in (("nothing", "gemm", GEMM_EFFICIENCY), ("t1", "fused", FUSED_EFFICIENCY)):
        large = [row for row in rows_of_result() if (row["B"], row["sampling"], row["path"]) == (256, sampling, path)]
        reached = [2 * row["V"] * row["D"] * 256 / (row["us"] * 1e-6) / peak for row in large]
        assert len(reached) >= 5 and reached == pytest.approx([share] * len(reached), rel=0.06)


def test_the_model_finds_where_the_gemm_becomes_faster_in_the_results_of_an_h200():
    times: dict[tuple, dict[int, dict[str, float]]] = {}
    for row in rows_of_result():
        if row["path"] in ("fused", "logits"):
            of_head = times.setdefault((row["V"], row["D"], row["sampling"]), {})
            of_head.setdefault(row["B"], {})[row["path"]] = row["us"]
    assert len(times) >= 15
    for (vocab, hidden, sampling), by_rows in times.items():
        # Times within 3 % of each other decide nothing.
        fused = max(rows for rows, us in by_rows.items() if us["fused"] < 0.97 * us["logits"])
        logits = min((rows for rows, us in by_rows.items() if us["logits"] < 0.97 * us["fused"]), default=SIZES[-1])
        kind = BatchKind(truncate=True) if "p90" in sampling else PLAIN
        assert_between(limits_of(H200, vocab, hidden, kind=kind).of(kind), fused, logits)


# Microseconds on an H200, 151936 x 4096, random hidden states: the tiles that other families take for large batches,
# beside the GEMM and its reader.
GEMM = {32: 318.1, 64: 326.0, 96: 338.1, 128: 349.9, 160: 379.2, 192: 423.4}
TILES = {
    "sm80": {32: 316.3, 64: 435.1, 96: 601.4, 128: 775.5, 160: 964.3, 192: 1133.1},  # 32 x 128, through pointers
    "sm100": {32: 309.2, 64: 294.0, 96: 333.2, 128: 340.1, 160: 536.4, 192: 533.4},  # 64 x 128, descriptors
}


@pytest.mark.parametrize("family", TILES)
def test_a_smaller_tile_has_the_limit_that_it_was_timed_with(family):
    limits = limits_of(H200, family=family)
    fused = max(rows for rows in GEMM if TILES[family][rows] <= GEMM[rows])
    assert_between(limits.plain, fused, min(rows for rows in GEMM if rows > fused))
    beyond = 2 * HIDDEN * VOCAB * 192 / (TILES[family][192] * 1e-6)  # operations per second
    assert limits.reading == pytest.approx(beyond / (0.9 * H200.bandwidth), rel=0.15)


# The crossover by hand, of 151936 x 4096: operations per second of the fused pass over bytes per second (2 bytes and 2
# operations per weight), then what writing and reading logits and one launch more cost the GEMM, 3 to 14 %.
# Tiles of 32 x 128 and of 16 x 128 do 2 * 32 * 128 operations per 320 bytes and 2 * 16 * 128 per 288: 25.6 and 14.2 per
# byte. Edited rows of sm80 take the smaller one. Two thirds, cut to whole tiles, are left to edited or truncated rows.
@pytest.mark.parametrize(
    "gpu, family, plain, reading, edited, largest",
    [
        # 108 * 1.41 GHz * 30 B * 25.6 = 117 T, below 0.58 * 312 T; over 0.9 * 2.04 TB/s
        (A100, "sm80", 66, 63, 35, (64, 32, 16, 16)),
        # 142 * 2.52 GHz * 15 B * 25.6 = 137 T, below 0.58 * 366 T; over 0.9 * 0.864 TB/s
        (Gpu((8, 9), 142, 2.52e9, 0.864e12), "sm80", 194, 176, 98, (192, 96, 64, 64)),  # L40S
        # 72 * 1.695 GHz * 15 B * 25.6 = 46.9 T; over 0.9 * 0.6 TB/s
        (A10, "sm80", 90, 86, 48, (64, 32, 32, 32)),
        # 58 * 2.04 GHz * 15 B * 25.6 = 45.4 T; over 0.9 * 0.3 TB/s
        (Gpu((8, 9), 58, 2.04e9, 0.3e12), "sm80", 183, 168, 93, (160, 96, 48, 48)),  # L4
        # 0.58 * 128 * 2.52 GHz * 512 = 95.8 T, half of 0.58 * 330 T; over 0.9 * 1.008 TB/s. Edited: 68.8 T from L2
        (Gpu((8, 9), 128, 2.52e9, 1.008e12, is_geforce=True), "sm80", 111, 105, 75, (96, 64, 48, 48)),  # RTX 4090
        # 0.58 * 82 * 1.695 GHz * 512 = 41.3 T; over 0.9 * 0.936 TB/s
        (Gpu((8, 6), 82, 1.695e9, 0.936e12, is_geforce=True), "sm80", 50, 48, 35, (32, 32, 16, 16)),  # RTX 3090
        # 148 * 1.965 GHz * 41 B * 42.7 (64 x 128) = 509 T, below 0.58 * 2383 T; over 0.9 * 8 TB/s. Batches of up to 64
        # rows, and edited ones, have 32 x 128 tiles: 305 T, so 45 plain rows, and too few of others for a whole tile.
        (B200, "sm100", 76, 70, 42, (32, 16, 16, 16)),
    ],
)
def test_a_gpu_that_nothing_was_measured_on_has_the_limits_of_its_bandwidth_and_multiprocessors(
    gpu, family, plain, reading, edited, largest
):
    traits = HeadTraits(family, 2, VOCAB, HIDDEN).modelled_on(gpu)
    assert limits_of(gpu, family=family) == (plain, reading)
    assert limits_of(gpu, family=family, kind=BatchKind(edit=True)).reading == edited
    most = dict(zip(KINDS, largest, strict=True))
    for kind in BATCH_KINDS:
        fused = largest_fused(lambda rows, kind=kind: default_config(traits, rows, kind))
        assert fused == most[BatchKind(kind.truncate, kind.edit)], kind
        tile = default_config(traits, fused, kind)
        assert isinstance(tile, TileConfig) and fused % tile.block_b == 0, "whole tiles"
    # Beyond the family's entries for all callers, the tile is that of callers who ask for the path.
    for rows in range(65, most[PLAIN] + 1):
        assert default_config(traits, rows, PLAIN) == default_config_on(traits, SamplingPath.FUSED, rows, PLAIN)
    assert isinstance(default_config(traits._replace(has_gemm=False), 500, PLAIN), TileConfig)


def test_a_tile_without_a_batch_that_it_is_faster_for_is_taken_by_none_but_the_smallest():
    """A GPU with little arithmetic for its bandwidth: every limit is below one tile."""
    traits = HeadTraits("sm80", 2, VOCAB, HIDDEN).modelled_on(Gpu((8, 6), 10, 1.0e9, 1.0e12))
    for kind in KINDS:
        assert largest_fused(lambda rows, kind=kind: default_config(traits, rows, kind)) == 16


def test_a_gpu_without_clocks_or_of_another_kind_keeps_the_limits_of_the_table():
    traits = HeadTraits("sm80", 2, VOCAB, HIDDEN)
    unnamed = Gpu((8, 0), 108), Gpu((8, 0), 108, clock=1.41e9), Gpu((8, 0), 108, bandwidth=2.04e12)
    for gpu in (*unnamed, Gpu((8, 7), 16, 1.3e9, 0.2e12), None):
        assert traits.modelled_on(gpu) == traits
    assert isinstance(default_config(traits, 64, PLAIN), TileConfig)
    assert isinstance(default_config(traits, 65, PLAIN), ReadConfig)


@pytest.mark.parametrize(
    "gpu, family, dtype, modelled",
    [
        (A100, "sm80", torch.bfloat16, True),
        (A100, "sm80", torch.float32, False),  # no tensor core multiplies these
        (B200, "sm100", torch.float16, True),
        (H100, "sm90", torch.bfloat16, False),
        (Gpu((9, 0), 78, 1.98e9, 4.0e12), "sm90", torch.bfloat16, False),  # an H20 takes what an H200 does
    ],
)
def test_a_head_with_2_bytes_per_element_is_modelled_where_nothing_was_measured(
    monkeypatch, gpu, family, dtype, modelled
):
    monkeypatch.setattr(defaults, "family_of_device", lambda device: family)
    monkeypatch.setattr("sgl_flashsample.kernels.launch.gpu_of", lambda device: gpu)
    head = LMHead(torch.zeros(640, 64, dtype=dtype))
    traits = HeadTraits.of(head)
    assert traits.gpu == (gpu if modelled else None) and traits.unmodelled.gpu is None
    for table in (DispatchTable(traits), DispatchTable(traits.unmodelled)):
        table.check(head)
    assert reading_table(traits).traits.gpu is None, "logits in memory have no fused path"


def modelled_with(
    confirmed: dict[str, list[int]], gpu: Gpu, name: str
) -> tuple[DispatchTable, HeadTraits, Plan, Table]:
    """The choices of a table with these confirmed sizes alone, on a GPU with a cost model; its traits and tuner."""
    device = Device(
        name=name, cc="{}.{}".format(*gpu.capability), sms=gpu.multiprocessors, l2_mb=40, smem_optin=101_376
    )
    shape = HeadShape(vocab=VOCAB, hidden=HIDDEN, dtype="bf16")
    sizes = {kind: Confirmed(rows=rows, us=[700.0] * len(rows)) for kind, rows in confirmed.items()}
    table = make_table(device, shape, entries=[], confirmed=sizes)
    traits = HeadTraits("sm80", 2, VOCAB, HIDDEN).modelled_on(gpu)
    dispatch, warnings = dispatch_of(TableFile(table, "", "", Match.EXACT), Target(device, shape, {}), traits)
    assert warnings == [] and traits.gpu == gpu
    return dispatch, traits, Plan(device, shape, EFFORTS["quick"]), table


def test_the_confirmed_sizes_of_a_tuned_table_mean_the_choices_that_were_raced_whatever_the_gpu():
    confirmed = {"plain": [64, 96], "edit": [64]}
    dispatch, traits, by_tuner, table = modelled_with(confirmed, A10, "NVIDIA A10")
    edit = BatchKind(edit=True)
    # Sizes serve those down to half of them in their tile class.
    measured = {(PLAIN, rows) for rows in range(33, 97)} | {(edit, rows) for rows in range(33, 65)}
    assert {(kind, rows) for kind in (PLAIN, edit) for rows in range(1, 513) if dispatch.is_measured(rows, kind)} == (
        measured
    )
    assert isinstance(default_config(traits, 64, edit), ReadConfig), "the cost model would take another path"
    for kind, rows in measured:
        assert dispatch.lookup(rows, kind) == by_tuner.default(rows, kind)
    for one in measured_sizes(table, traits):
        assert one.config == by_tuner.default(one.rows, one.kind) == dispatch.lookup(one.rows, one.kind)
    # A refused choice gives way to the one of the cost model.
    tile = dispatch.lookup(64, edit)
    assert dispatch.without(tile, edit).lookup(64, edit) == default_config(traits, 64, edit)


@pytest.mark.parametrize("gpu", [A100, Gpu((8, 9), 142, 2.52e9, 0.864e12)])
def test_a_tuned_table_leaves_what_it_did_not_measure_to_the_cost_model(gpu):
    dispatch, traits, _, _ = modelled_with({"plain": [16]}, gpu, "a GPU")
    untuned = DispatchTable(traits)
    for kind in KINDS:
        without = largest_fused(lambda rows, kind=kind: untuned.lookup(rows, kind))
        assert largest_fused(lambda rows, kind=kind: dispatch.lookup(rows, kind)) == without
