"""Where a tuned table is found, how well it has to fit, and that whatever else is in the place of one does no harm."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sgl_flashsample.kernels.tiles import ReadConfig, ScreenConfig, TileConfig
from tuned_tables import CPU, H200, HEAD, make_table

from sgl_flashsample import LMHead, lookup, resolution
from sgl_flashsample.choices import choices_for
from sgl_flashsample.lookup import Match, Target, bucket_for, config_problem, find, load_table, match
from sgl_flashsample.sources import installed_sources, sources_hash
from sgl_flashsample.table import MAX_BYTES, Choice, HeadShape
from sgl_flashsample.work import Work

TABLE = make_table()
TARGET = Target(H200, HEAD, dict(TABLE.env))
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
A100 = dataclasses.replace(H200, name="NVIDIA A100", cc="8.0")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folders of the lookup order, empty, and the environment that names them."""
    made = {name: tmp_path / name for name in ("first", "second", "cache/flashsample", "shipped")}
    for folder in made.values():
        folder.mkdir(parents=True)
    monkeypatch.setattr(lookup, "SHIPPED", made["shipped"])
    environ = {
        lookup.FOLDERS_VARIABLE: os.pathsep.join(str(made[name]) for name in ("first", "second")),
        "SGLANG_CACHE_DIR": str(tmp_path / "cache"),
    }
    return made, environ


def put(folder: Path, table=TABLE, name=None) -> str:
    path = folder / (name or TABLE.file_name)
    path.write_text(table.dumps())
    return str(path)


def stale(table=TABLE):
    return dataclasses.replace(table, env=table.env | {"triton": "3.7.0"})


# --- how well a table fits


@pytest.mark.parametrize(
    "changes, wanted, says",
    [
        ({}, Match.EXACT, ""),
        ({"env": TABLE.env | {"triton": "3.6.1"}}, Match.COMPATIBLE, "triton is 3.6.0, it was 3.6.1"),
        ({"env": TABLE.env | {"torch": "2.11.0+cu130"}}, Match.COMPATIBLE, "torch is 2.11.0, it was 2.11.0+cu130"),
        ({"env": TABLE.env | {"driver": "590.1"}}, Match.COMPATIBLE, "driver is 580.82.07, it was 590.1"),
        ({"env": TABLE.env | {"flashinfer": "0.7"}}, Match.EXACT, ""),
        ({"env": TABLE.env | {"triton": "3.7.0"}}, Match.STALE, "triton is 3.6.0, it was 3.7.0"),
        ({"env": TABLE.env | {"cuda": "12.8"}}, Match.STALE, "cuda is 13.0, it was 12.8"),
        ({"env": {}}, Match.STALE, "triton is 3.6.0, it was unknown"),
        ({"kernels": {}}, Match.STALE, "the kernels have changed since"),
        ({"kernels": {"fused": TABLE.kernels["fused"]}}, Match.STALE, "the kernels have changed since"),
        ({"device": H100}, Match.FAMILY, "it is for NVIDIA H100 80GB HBM3 (132 SMs), not NVIDIA H200"),
        ({"device": dataclasses.replace(H200, sms=66)}, Match.FAMILY, "(66 SMs), not NVIDIA H200 (132 SMs)"),
        ({"device": A100}, None, "it is for NVIDIA A100, not NVIDIA H200"),
        ({"head": dataclasses.replace(HEAD, tp=2)}, None, "it is for 128256 x 4096 bf16 tp 2, not 128256 x 4096"),
        ({"head": dataclasses.replace(HEAD, softcap=True)}, None, "bf16 tp 1 with softcap, not"),
        ({"head": dataclasses.replace(HEAD, dtype="fp16")}, None, "4096 fp16 tp 1, not"),
    ],
)
def test_a_table_is_exact_compatible_stale_of_the_family_or_a_miss(changes, wanted, says):
    found, differs = match(dataclasses.replace(TABLE, **changes), TARGET)
    assert found is wanted
    assert says in "; ".join(differs) and bool(differs) == bool(says)


@pytest.mark.parametrize(
    "config, device, work, problem",
    [
        (TileConfig(16, 128, 256, 4, 3), H200, Work.PLAIN, None),
        (TileConfig(16, 128, 256, 4, 4), H200, Work.PLAIN, "294912 bytes of shared memory; 232448 are there"),
        (TileConfig(16, 128, 256, 4, 4), dataclasses.replace(H200, smem_optin=0), Work.PLAIN, None),
        (TileConfig(16, 128, 64, 4, 3), A100, Work.PLAIN, "tma is on; expected it off for compute capability 8.0"),
        (TileConfig(16, 128, 64, 4, 3, tma=False), A100, Work.PLAIN, None),
        (TileConfig(256, 32, 16, 4, 1), H200, Work.TRUNCATE, "block_b is 256; expected 128 or fewer with a truncation"),
        (TileConfig(256, 32, 16, 4, 1), H200, Work.EDIT, None),
        (ReadConfig(1, 512, 1), A100, Work.TRUNCATE, None),
        (ScreenConfig(8, 64, 256, 4, 4, rescore_d=256), H200, Work.SCREENED, None),
        (
            ScreenConfig(8, 64, 256, 4, 4),
            H200,
            Work.PLAIN,
            "is for batches with a screen; expected another path",
        ),
        (ScreenConfig(8, 64, 256, 4, 12), H200, Work.SCREENED, "245760 bytes of shared memory; 232448 are there"),
        (ScreenConfig(8, 64, 256, 4, 4, rescore_d=512), H200, Work.SCREENED, "327680 bytes of shared memory"),
        (ScreenConfig(8, 64, 64, 4, 2), A100, Work.SCREENED, "tma is on; expected it off for compute capability 8.0"),
    ],
    ids=range(13),
)
def test_a_configuration_that_cannot_run_on_a_device_is_known_without_compiling_it(config, device, work, problem):
    found = config_problem(Choice.of(config), device, "bf16", work)
    assert found is None if problem is None else problem in found


def test_every_built_in_configuration_passes_the_same_check():
    from sgl_flashsample.tuned import SCREENS
    from sgl_flashsample.tuned import TABLE as BUILT_IN

    small = {"sm80": dataclasses.replace(A100, smem_optin=101_376), "sm90": H200}
    small["sm100"] = dataclasses.replace(H200, cc="10.0")
    for (family, itemsize), entries in BUILT_IN.items():
        for _, tile in entries:
            dtype = "bf16" if itemsize == 2 else "fp32"
            assert config_problem(Choice.of(tile), small[family], dtype, Work.TRUNCATE) is None
    for (family, itemsize, _), screens in SCREENS.items():
        for _, screen in screens:
            dtype = "bf16" if itemsize == 2 else "fp32"
            assert config_problem(Choice.of(screen), small[family], dtype, Work.SCREENED) is None


# --- which bucket serves a batch


@pytest.mark.parametrize(
    "buckets, served",
    [
        # Exact, else the next one up: never across 16, 32 or 64 rows, never more than twice the batch.
        ([1, 4, 16], {1: 1, 2: 4, 3: 4, 4: 4, 5: None, 7: None, 8: 16, 15: 16, 16: 16, 17: None}),
        ([24, 64], {15: None, 16: None, 17: 24, 24: 24, 25: None, 32: None, 33: 64, 64: 64, 65: None}),
        ([32], {16: None, 17: 32, 32: 32}),
        ([128, 200, 512], {64: None, 65: 128, 128: 128, 129: 200, 200: 200, 201: None, 255: None, 256: 512, 513: None}),
        ([], {1: None, 512: None}),
    ],
    ids=str,
)
def test_a_batch_is_served_by_its_bucket_or_the_next_one_within_its_tile_class_and_twice_its_size(buckets, served):
    entries = dict.fromkeys(buckets, TABLE.classes["plain"][1])
    assert {batch: bucket_for(entries, batch) for batch in served} == served


# --- where it is looked for


def test_the_named_file_wins_then_the_folders_then_the_cache_then_what_is_shipped(places):
    made, environ = places
    expected = [put(made["shipped"])]
    assert find(TARGET, environ=environ)[0].file == expected[-1]
    for name in ("cache/flashsample", "second", "first"):
        expected.append(put(made[name]))
        found, warnings = find(TARGET, environ=environ)
        assert found.file == expected[-1] and warnings == []
    named = put(made["first"].parent, stale(), "any name.json")
    found, _ = find(TARGET, environ=environ | {lookup.FILE_VARIABLE: named})
    assert (found.file, found.match) == (named, Match.STALE), "who names a file wants that file"
    assert find(TARGET, file=expected[0], environ=environ | {lookup.FILE_VARIABLE: named})[0].file == expected[0]


def test_a_table_as_measured_wins_over_a_stale_one_wherever_they_are(places):
    made, environ = places
    put(made["first"], stale())
    assert find(TARGET, environ=environ)[0].match is Match.STALE
    fresh = put(made["shipped"])
    assert find(TARGET, environ=environ)[0].file == fresh


def test_a_stale_table_is_used_only_if_all_it_has_could_run_here(places):
    made, environ = places
    table = stale()
    too_large = Choice.of(TileConfig(16, 128, 256, 4, 4))
    put(made["first"], dataclasses.replace(table, configs=table.configs | {"fused-16": too_large}))
    found, warnings = find(TARGET, environ=environ)
    assert found is None
    assert "it is stale, and its configuration fused-16 cannot run here: its buffers take" in warnings[0]
    later = table.configs | {"fused-16": Choice("speculative", {"hot": 4096})}
    put(made["first"], dataclasses.replace(table, configs=later))
    assert find(TARGET, environ=environ)[0].match is Match.STALE, "what this release does not know is left out"


def test_a_table_of_another_gpu_is_used_only_when_that_is_allowed_and_never_one_of_another_capability(places):
    made, environ = places
    other = dataclasses.replace(TABLE, device=H100)
    path = put(made["second"], other, other.file_name)
    assert find(TARGET, environ=environ) == (None, []), "under its own name it is nobody's business"
    renamed = put(made["first"], other)
    found, warnings = find(TARGET, environ=environ)
    assert found is None
    assert warnings[0].startswith(f"{renamed}: it is for NVIDIA H100") and "FLASHSAMPLE_ALLOW_FAMILY=1" in warnings[0]
    os.remove(renamed)
    put(made["shipped"], dataclasses.replace(TABLE, device=A100), file_of(A100))
    allowed = environ | {lookup.FAMILY_VARIABLE: "1"}
    assert find(TARGET, environ=allowed)[0].file == path
    mine = put(made["shipped"], stale())
    assert find(TARGET, environ=allowed)[0].file == mine, "a stale one of this GPU is nearer"


def file_of(device):
    return dataclasses.replace(TABLE, device=device).file_name


def test_a_folder_that_was_named_and_is_not_there_is_said_and_the_others_are_searched(places):
    made, environ = places
    path = put(made["shipped"])
    environ[lookup.FOLDERS_VARIABLE] = os.pathsep.join([str(made["first"] / "nothing"), "", str(made["second"])])
    found, warnings = find(TARGET, environ=environ)
    assert found.file == path
    assert warnings == [f"FLASHSAMPLE_TUNED_DIR: {made['first'] / 'nothing'} is not a folder"]


def test_the_users_cache_is_sglangs(monkeypatch):
    assert lookup.user_folder({"SGLANG_CACHE_DIR": "/x"}) == Path("/x/flashsample")
    monkeypatch.setenv("HOME", "/home/me")
    assert lookup.user_folder({}) == Path("/home/me/.cache/sglang/flashsample")


# --- what else may be in the place of a table


def loop(path):
    path.symlink_to(path)


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take the memory of the machine


BAD = {
    "a folder": (Path.mkdir, "it is not a plain file"),
    "a pipe that nobody writes to": (os.mkfifo, "it is not a plain file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a plain file"),
    "a loop of links": (loop, "Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    "a terabyte": (huge, f"it has {1 << 40} bytes; expected {MAX_BYTES} or fewer"),
    "nothing in it": (Path.touch, "it is not JSON: Expecting value"),
    "binary": (lambda path: path.write_bytes(b"\x7fELF\xff\xfe"), "it is not UTF-8 text (byte 4)"),
    "another's JSON": (lambda path: path.write_text('{"16": {"BLOCK_SIZE_M": 16}}'), "schema is None"),
    "half of it": (lambda path: path.write_text(TABLE.dumps()[:900]), "it is not JSON"),
    "another head's": (lambda path: put(path.parent, make_table(head=HeadShape(8, 8, "bf16")), path.name), "8 x 8"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("how", ["named", "in a folder"])
def test_a_bad_file_is_a_miss_with_one_line_at_once_and_the_next_place_serves(places, name, how):
    made, environ = places
    make, message = BAD[name]
    path = made["first"] / TABLE.file_name
    make(path)
    shipped = put(made["shipped"])
    started = time.monotonic()
    found, warnings = find(
        TARGET, file=path if how == "named" else None, environ=environ | {lookup.FOLDERS_VARIABLE: ""}
    )
    if how == "in a folder":
        found, warnings = find(TARGET, environ=environ)
    assert time.monotonic() - started < 1
    assert found.file == shipped
    (line,) = warnings
    assert line.startswith(f"{path}: ") and message in line and "\n" not in line


def test_a_file_that_may_not_be_read_is_a_miss(tmp_path, monkeypatch):
    path = Path(put(tmp_path))
    monkeypatch.setattr(os, "open", lambda *arguments: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert load_table(path) == (None, "Permission denied")


def test_any_error_at_all_while_reading_is_a_miss(tmp_path, monkeypatch):
    path = put(tmp_path)
    monkeypatch.setattr(lookup.Table, "loads", lambda text: (_ for _ in ()).throw(MemoryError("no\nmore")))
    assert load_table(path) == (None, "MemoryError: no more")
    assert load_table("\0")[0] is None


def test_looking_for_a_table_needs_no_torch():
    code = "import sys, sgl_flashsample.lookup; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- what batches take then

V, D = 600, 32
TILES = {16: TileConfig(16, 64, 32, 4, 1, flatten=False, tma=False), 64: ReadConfig(4, 64, 4)}


def own_table(device, **changes):
    """A table for this machine's device and a head of V x D."""
    environment = resolution.environment()
    buckets = {
        rows: dataclasses.replace(TABLE.classes["plain"][1], use=str(rows), default="", tied=[]) for rows in TILES
    }
    return dataclasses.replace(
        make_table(resolution.device_of(device), HeadShape(V, D, "fp32")),
        configs={str(rows): Choice.of(config) for rows, config in TILES.items()},
        classes={"plain": buckets, "edit": {16: buckets[16]}},
        env=environment,
        **changes,
    )


@pytest.fixture
def head(device):
    return LMHead(torch.zeros(V, D, device=device))


def test_a_resolved_table_serves_its_batches_and_the_built_in_choices_serve_the_rest(
    places, head, tmp_path, monkeypatch
):
    for name, value in places[1].items():
        monkeypatch.setenv(name, value)
    none = resolution.resolve(head)
    assert none.found is None and none.warnings == ()
    assert none.line().startswith("no tuned table for ") and none.line().endswith("built-in choices for all batches")
    table = own_table(head.weight.device)
    path = put(tmp_path / "second", table, table.file_name)
    found = resolution.resolve(head)
    assert (found.found.match, found.buckets, found.warnings) == (Match.EXACT, 3, ())
    for rows in range(1, 140):
        expected = TILES[16] if 8 <= rows <= 16 else TILES[64] if 33 <= rows <= 64 else None
        built_in = choices_for(head).pick(rows)
        assert found.choices.pick(rows) == (expected or built_in)
        assert found.choices.pick(rows, Work.GREEDY) == (expected or built_in)
    assert found.line() == (
        f"tuned table {path} (exact, FLASHSAMPLE_TUNED_DIR): 3 buckets in use, batches without one: plain 1-7, 17-32, "
        "65-512; truncate 1-512; edit 1-7, 17-512; edit+truncate 1-512; greedy 1-7, 17-32, 65-512"
    )


SCREEN = ScreenConfig(16, 64, 32, 4, 1, flatten=False, tma=False, rescore_d=32, rescore_stages=1)


def test_a_table_with_batches_that_have_a_screen_serves_them_and_leaves_those_without_one_alone(head, tmp_path):
    table = own_table(head.weight.device)
    older = resolution.resolve(head, file=put(tmp_path, table, "older")).choices
    buckets = {8: dataclasses.replace(table.classes["plain"][16], use="screen"), 16: table.classes["plain"][16]}
    newer = dataclasses.replace(
        table,
        configs=table.configs | {"screen": Choice.of(SCREEN)},
        classes=table.classes | {"plain+screen": buckets},
        kernels=table.kernels | {"screened": {"src": sources_hash("screened")}},
    )
    found = resolution.resolve(head, file=put(tmp_path, newer, "newer"))
    assert found.found.match is Match.EXACT and found.warnings == ()
    assert [found.choices.pick(rows, Work.SCREENED) for rows in (4, 8, 9, 16)] == [SCREEN, SCREEN, TILES[16], TILES[16]]
    assert found.choices.screened_rows(512, tuned=True) == 8 and not older.screens(512, tuned=True)
    for work in Work:
        if not work.screened:
            assert all(found.choices.pick(rows, work) == older.pick(rows, work) for rows in range(1, 140))
    assert "; plain+screen 1-3, " in found.line() and "edit+screen" not in found.line()
    stale = dataclasses.replace(newer, kernels=table.kernels)
    found = resolution.resolve(head, file=put(tmp_path, stale, "stale"))
    assert found.found.match is Match.STALE, "the screened kernels are not those that it was measured with"


def test_a_screened_configuration_for_batches_without_a_screen_is_left_out_with_a_warning(head, tmp_path):
    table = own_table(head.weight.device)
    configs = table.configs | {"16": Choice.of(SCREEN)}
    kernels = table.kernels | {"screened": {"src": sources_hash("screened")}}
    found = resolution.resolve(head, file=put(tmp_path, dataclasses.replace(table, configs=configs, kernels=kernels)))
    assert found.choices.pick(16) == choices_for(head).pick(16)
    (line,) = found.warnings
    assert "16: it is for batches with a screen" in line


def test_a_stale_table_is_used_with_a_warning_that_says_what_has_changed(head, tmp_path):
    table = own_table(head.weight.device, kernels={})
    path = put(tmp_path, table)
    found = resolution.resolve(head, file=path)
    assert found.found.match is Match.STALE and found.buckets == 3
    (line,) = found.warnings
    assert line.startswith(f"{path} is stale (the kernels have changed since)") and "tune verify" in line


def test_buckets_that_cannot_run_here_are_left_to_the_built_in_choice_with_one_warning(head, tmp_path):
    table = own_table(head.weight.device)
    configs = table.configs | {"64": Choice("speculative", {"hot": 4096})}
    if head.weight.device.type == "cpu":
        configs["16"] = Choice.of(dataclasses.replace(TILES[16], tma=True))
    found = resolution.resolve(head, file=put(tmp_path, dataclasses.replace(table, configs=configs)))
    assert found.choices.pick(64) == choices_for(head).pick(64)
    (line,) = found.warnings
    assert "64: this release has no path 'speculative'" in line
    if head.weight.device.type == "cpu":
        assert "16: tma is on" in line and found.buckets == 0


def test_a_shard_and_a_head_with_other_logits_have_no_table_of_a_whole_head(head, tmp_path):
    path = put(tmp_path, own_table(head.weight.device))
    assert resolution.resolve(head, tp=2, file=path).found is None
    half = LMHead(head.weight.half(), logits_dtype=torch.float32)
    found = resolution.resolve(half, file=path)
    assert found.found is None and "logits in another dtype" in found.line()


def test_a_cpu_is_a_device_of_its_own_for_tables():
    assert resolution.device_of(torch.device("cpu")) == CPU
    assert set(resolution.environment()) >= {"triton", "torch", "cuda"}
    assert Target(CPU, HEAD, {}).src == installed_sources()
