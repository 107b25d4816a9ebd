"""The cost model agrees with what was measured, and decides where nothing was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tuned_tables import make_table

from sgl_flashsample import LMHead, defaults
from sgl_flashsample.autotune.decisions import Decision, decisions
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.cost_model import (
    FUSED_EFFICIENCY,
    GEMM_EFFICIENCY,
    MOST_ROWS,
    PARTS,
    FusedRows,
    fused_rows,
    largest_fused,
)
from sgl_flashsample.defaults import MEASURED, SHIPPED, HeadTraits, builtin_table, default_config, default_config_on
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.launch import Gpu
from sgl_flashsample.kinds import BATCH_KINDS, PLAIN, BatchKind, SamplingPath, path_of
from sgl_flashsample.tables.lookup import Match, TableFile, Target, dispatch_of
from sgl_flashsample.tables.schema import Confirmed, Device, HeadShape, Table

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-kernels.json"
SIZES = (16, 32, 48, 64, 96, 128, 200, 256, 512)  # classes of batch sizes
KINDS = (PLAIN, *PARTS)
VOCAB, HIDDEN = 151_936, 4096

# Multiprocessors, their clock and the memory's bandwidth as the driver has them.
H200 = Gpu((9, 0), 132, 1.98e9, 4.81e12)
H100 = Gpu((9, 0), 132, 1.98e9, 3.35e12)
A100 = Gpu((8, 0), 108, 1.41e9, 2.04e12)
B200 = Gpu((10, 0), 148, 1.965e9, 8.0e12)
NAMES = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}


def place(rows: float) -> int:
    """The place in ``SIZES`` of the largest size that is not larger."""
    return max((at for at, size in enumerate(SIZES) if size <= rows), default=0)


def limits_of(gpu: Gpu, vocab: int = VOCAB, hidden: int = HIDDEN, family: str = "sm90") -> FusedRows:
    """The limits with the tile that the family's largest batches take on the fused path."""
    tile = default_config_on(HeadTraits(family, 2, vocab, hidden), SamplingPath.FUSED, MOST_ROWS, PLAIN)
    return fused_rows(gpu, vocab, hidden, tile)


def predicted(kind: BatchKind, limits: FusedRows) -> float:
    """The rows at which the GEMM becomes faster, not cut to tiles."""
    return limits.reading * PARTS[kind] if kind in PARTS else limits.plain


def assert_between(rows: float, fused: int, logits: int) -> None:
    """``rows`` is within one class of the sizes between the largest batch that ``fused`` was faster for and the
    smallest one that ``logits`` was faster for."""
    assert place(fused) - 1 <= place(rows) <= place(logits), (fused, rows, logits)


def built_in_limit(kind: BatchKind) -> int:
    entries = builtin_table(*MEASURED).entries
    return max(e.rows for e in entries if e.kind == str(kind) and e.path == "fused" and not e.on_request)


def test_the_limits_of_the_measured_table_are_the_models_for_an_h200_and_within_one_class_for_an_h100():
    for kind in KINDS:
        own = default_config_on(HeadTraits("sm90", 2, VOCAB, HIDDEN), SamplingPath.FUSED, MOST_ROWS, kind)
        assert largest_fused(kind, limits_of(H200), own.block_b) == built_in_limit(kind)
        assert abs(place(predicted(kind, limits_of(H100))) - place(built_in_limit(kind))) <= 1
    assert {kind: built_in_limit(kind) / built_in_limit(PLAIN) for kind in PARTS} == PARTS


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
        assert_between(predicted(kind, limits_of(H200, vocab, hidden)), fused, logits)


def is_close(one: Decision) -> bool:
    """The fused and the logits path took times within 3 % of each other."""
    other = {SamplingPath.FUSED: "logits", SamplingPath.LOGITS: "fused"}[path_of(one.config)]
    return other in one.entry.others and abs(one.entry.others[other] / one.us - 1) < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_the_model_finds_where_the_gemm_becomes_faster_in_the_tuned_tables(name):
    files = [file for file in SHIPPED.glob("fs2-*-tp1-*.json") if Table.loads(file.read_text()).device.name == name]
    assert len(files) >= 8
    for file in files:
        table = Table.loads(file.read_text())
        limits = limits_of(NAMES[name], table.head.vocab, table.head.hidden)
        for kind in KINDS:
            taken = {
                one.rows: path_of(one.config)
                for one in decisions(table)
                if one.kind == kind and one.rows >= 32 and not is_close(one)
            }
            logits = min((rows for rows, path in taken.items() if path is SamplingPath.LOGITS), default=SIZES[-1])
            fused = max((rows for rows in taken if rows < logits), default=0)
            if taken:
                assert_between(predicted(kind, limits), min(fused, MOST_ROWS), logits)


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
# A 32 x 128 tile does 2 * 32 * 128 operations per 320 bytes: 25.6 per byte.
@pytest.mark.parametrize(
    "gpu, family, reading, plain",
    [
        # 108 * 1.41 GHz * 30 B * 25.6 = 117 T, below 0.58 * 312 T; over 0.9 * 2.04 TB/s
        (A100, "sm80", 63, 66),
        # 142 * 2.52 GHz * 15 B * 25.6 = 137 T, below 0.58 * 366 T; over 0.9 * 0.864 TB/s
        (Gpu((8, 9), 142, 2.52e9, 0.864e12), "sm80", 176, 194),  # L40S
        # 72 * 1.695 GHz * 15 B * 25.6 = 46.9 T; over 0.9 * 0.6 TB/s
        (Gpu((8, 6), 72, 1.695e9, 0.6e12), "sm80", 86, 90),  # A10
        # 58 * 2.04 GHz * 15 B * 25.6 = 45.4 T; over 0.9 * 0.3 TB/s
        (Gpu((8, 9), 58, 2.04e9, 0.3e12), "sm80", 168, 183),  # L4
        # 0.58 * 128 * 2.52 GHz * 512 = 95.8 T, half of 0.58 * 330 T; over 0.9 * 1.008 TB/s
        (Gpu((8, 9), 128, 2.52e9, 1.008e12, is_geforce=True), "sm80", 105, 111),  # RTX 4090
        # 0.58 * 82 * 1.695 GHz * 512 = 41.3 T; over 0.9 * 0.936 TB/s
        (Gpu((8, 6), 82, 1.695e9, 0.936e12, is_geforce=True), "sm80", 48, 50),  # RTX 3090
        # 148 * 1.965 GHz * 41 B * 42.7 (64 x 128) = 509 T, below 0.58 * 2383 T; over 0.9 * 8 TB/s
        (B200, "sm100", 70, 76),
    ],
)
def test_a_gpu_that_nothing_was_measured_on_has_the_limits_of_its_bandwidth_and_multiprocessors(
    gpu, family, reading, plain
):
    traits = HeadTraits(family, 2, VOCAB, HIDDEN).modelled_on(gpu)
    assert traits.fused_rows == (plain, reading)
    for kind in BATCH_KINDS:
        paths = [path_of(default_config(traits, rows, kind)) for rows in range(1, 600)]
        fused = paths.count(SamplingPath.FUSED)
        assert set(paths[:fused]) == {SamplingPath.FUSED} and set(paths[fused:]) == {SamplingPath.LOGITS}
        tile = default_config(traits, fused, kind)
        assert isinstance(tile, TileConfig) and fused % tile.block_b == 0
        most = predicted(BatchKind(kind.truncate, kind.edit), traits.fused_rows)
        assert most - tile.block_b < fused <= max(most, tile.block_b), "whole tiles"
    # Beyond the family's entries for all callers, the tile is that of callers who ask for the path.
    asked = {rows: default_config_on(traits, SamplingPath.FUSED, rows, PLAIN) for rows in range(65, fused + 1)}
    assert all(default_config(traits, rows, PLAIN) == tile for rows, tile in asked.items())
    assert isinstance(default_config(traits._replace(has_gemm=False), 500, PLAIN), TileConfig)


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
    assert (traits.fused_rows is not None) is modelled and traits.unmodelled.fused_rows is None
    for table in (DispatchTable(traits), DispatchTable(traits.unmodelled)):
        table.check(head)


def test_a_tuned_table_means_the_choices_that_it_was_measured_against_whatever_the_gpu():
    device, shape = (
        Device(name="A10", cc="8.6", sms=72, l2_mb=6, smem_optin=101_376),
        HeadShape(vocab=VOCAB, hidden=HIDDEN, dtype="bf16"),
    )
    table = make_table(device, shape, entries=[], confirmed={"plain": Confirmed(rows=[96], us=[700.0])})
    modelled = HeadTraits("sm80", 2, VOCAB, HIDDEN, fused_rows=FusedRows(200, 200))
    assert isinstance(DispatchTable(modelled).lookup(96), TileConfig)
    dispatch, warnings = dispatch_of(TableFile(table, "", "", Match.EXACT), Target(device, shape, {}), modelled)
    by_tuner = Plan(device, shape, EFFORTS["quick"])
    assert warnings == [] and dispatch.is_measured(96, PLAIN)
    assert all(dispatch.lookup(rows, kind) == by_tuner.default(rows, kind) for rows in (64, 96, 200) for kind in KINDS)
