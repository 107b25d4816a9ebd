"""Where a tuned table is found, how well it has to fit, what batches take then, and that nothing else in its place does
any harm."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import time
import types
from pathlib import Path

import msgspec
import pytest
import torch
from core_examples import READ, ROWS, SCREEN, TILE, UNSCREENED, VOCAB, assert_reference, example
from kernel_cases import take
from tuned_tables import CODE, CPU, H200, HEAD, make_entry, make_table, table_for_this_machine

from sgl_flashsample import Head, LMHead, defaults
from sgl_flashsample.defaults import HeadTraits, evidence_of
from sgl_flashsample.dispatch import DispatchTable, default_table
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kernels.launch import Gpu
from sgl_flashsample.kinds import KIND_NAMES, PLAIN
from sgl_flashsample.paths import Parts
from sgl_flashsample.tables import fingerprint, lookup
from sgl_flashsample.tables.fingerprint import compare_compiled
from sgl_flashsample.tables.lookup import (
    Match,
    ResolvedTable,
    TableFile,
    Target,
    bucket_for,
    dispatch_of,
    find,
    load_table,
    match,
    resolve,
    unsupported_config,
)
from sgl_flashsample.tables.schema import MAX_BYTES, Confirmed, HeadShape

replace = msgspec.structs.replace
TABLE = make_table()
TARGET = Target(H200, HEAD, dict(TABLE.env))
STALE = replace(TABLE, defaults="sha256:0")
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
A100 = replace(H200, name="NVIDIA A100", cc="8.0")


@pytest.fixture
def folders(tmp_path, monkeypatch):
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
    path = folder / (name or table.file_name)
    path.write_text(table.dumps())
    return str(path)


# How well a table fits.

NO_CODE = "it does not say with which machine code it was measured"
OTHER_CHOICES = "the built-in choices have changed since"
UNKNOWN_CODE = [replace(TABLE.entries[0], code=""), *TABLE.entries[1:]]


@pytest.mark.parametrize(
    "changes, wanted, reason",
    [
        ({}, Match.EXACT, ""),
        ({"env": TABLE.env | {"triton": "3.6.1"}}, Match.COMPATIBLE, "triton is 3.6.0, it was 3.6.1"),
        ({"env": TABLE.env | {"torch": "2.11.0+cu130"}}, Match.COMPATIBLE, "torch is 2.11.0, it was 2.11.0+cu130"),
        ({"env": TABLE.env | {"driver": "590.1"}}, Match.COMPATIBLE, "driver is 580.82.07, it was 590.1"),
        ({"env": TABLE.env | {"flashinfer": "0.7"}}, Match.EXACT, ""),
        ({"env": TABLE.env | {"torch": "2.14.1"}}, Match.COMPATIBLE, "torch is 2.11.0, it was 2.14.1"),
        ({"env": TABLE.env | {"triton": "3.8.0"}}, Match.OTHER_VERSIONS, "triton is 3.6.0, it was 3.8.0"),
        ({"env": TABLE.env | {"cuda": "12.8"}}, Match.OTHER_VERSIONS, "cuda is 13.0, it was 12.8"),
        ({"env": {}}, Match.OTHER_VERSIONS, "triton is 3.6.0, it was unknown"),
        ({"entries": UNKNOWN_CODE}, Match.STALE, NO_CODE),
        ({"confirmed": {"plain": Confirmed(rows=[32], us=[1.0])}}, Match.STALE, NO_CODE),
        ({"defaults": "sha256:0"}, Match.STALE, OTHER_CHOICES),
        ({"simulated": True}, None, "its times are simulated: no server uses it"),
        ({"device": H100}, Match.FAMILY, "it is for NVIDIA H100 80GB HBM3 (132 SMs), not NVIDIA H200"),
        ({"device": replace(H200, sms=66)}, Match.FAMILY, "(66 SMs), not NVIDIA H200 (132 SMs)"),
        ({"device": A100}, None, "it is for NVIDIA A100, not NVIDIA H200"),
        ({"head": replace(HEAD, tp=2)}, None, "it is for head 128256 x 4096 bf16, tp 2; expected 128256 x 4096"),
        ({"head": replace(HEAD, softcap=True)}, None, "bf16, tp 1, softcap; expected"),
    ],
)
def test_a_table_is_exact_compatible_stale_of_the_family_or_a_miss(changes, wanted, reason):
    how, differs = match(replace(TABLE, **changes), TARGET)
    assert how is wanted
    assert reason in "; ".join(differs) and bool(differs) == bool(reason)


def test_a_table_is_stale_once_a_built_in_choice_of_its_family_has_changed(builtin_files):
    for family, wanted in (("sm80", Match.EXACT), ("sm90", Match.STALE)):
        builtin_files(f"builtin-{family}-2byte.json", lambda line: line.replace('"stages": 5', '"stages": 4'))
        assert match(TABLE, TARGET)[0] is wanted


@pytest.mark.parametrize(
    "config, device, kind, reason",
    [
        (TileConfig(16, 128, 256, 4, 3), H200, "plain", None),
        (TileConfig(16, 128, 256, 4, 4), H200, "plain", "294912 bytes of shared memory; 232448 are there"),
        (TileConfig(16, 128, 256, 4, 4), replace(H200, smem_optin=0), "plain", None),
        (TileConfig(16, 128, 64, 4, 3), A100, "plain", "tma is on; expected it off for compute capability 8.0"),
        (TileConfig(16, 128, 64, 4, 3, tma=False), A100, "plain", None),
        (TileConfig(256, 32, 32, 4, 1), H200, "truncate", "block_b is 256; expected 128 or fewer with a truncation"),
        (TileConfig(256, 32, 32, 4, 1), H200, "edit", None),
        (ReadConfig(256, 32, 4), H200, "edit+truncate", "block_b is 256; expected 128 or fewer with a truncation"),
        (ScreenConfig(8, 64, 256, 4, 4, rescore_d=256), H200, "plain+screen", None),
        (ScreenConfig(8, 64, 256, 4, 4), H200, "plain", "is for batches with a screen; expected another path"),
        (ScreenConfig(8, 64, 256, 4, 12), H200, "plain+screen", "245760 bytes of shared memory; 232448 are there"),
        (ScreenConfig(8, 64, 256, 4, 4, rescore_d=512), H200, "plain+screen", "327680 bytes of shared memory"),
        (ScreenConfig(8, 64, 64, 4, 2), A100, "plain+screen", "tma is on; expected it off for compute capability 8.0"),
    ],
    ids=range(13),
)
def test_a_configuration_that_cannot_run_on_a_device_is_known_without_compiling_it(config, device, kind, reason):
    said = unsupported_config(config, device, "bf16", KIND_NAMES[kind])
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    "sizes, served",
    [
        # Exact, else the next one up: never across 16, 32 or 64 rows, never more than twice the batch.
        ([1, 4, 16], {1: 1, 2: 4, 3: 4, 4: 4, 5: None, 7: None, 8: 16, 15: 16, 16: 16, 17: None}),
        ([24, 64], {15: None, 16: None, 17: 24, 24: 24, 25: None, 32: None, 33: 64, 64: 64, 65: None}),
        ([128, 200, 512], {64: None, 65: 128, 128: 128, 129: 200, 201: None, 255: None, 256: 512, 512: 512, 513: None}),
        ([], {1: None, 512: None}),
    ],
    ids=str,
)
def test_a_batch_is_served_by_its_size_or_the_next_one_within_its_tile_class_and_twice_its_rows(sizes, served):
    assert {batch: bucket_for(sizes, batch) for batch in served} == served


# Where it is looked for.


def test_the_named_file_wins_then_the_folders_then_the_cache_then_what_is_shipped(folders):
    made, environ = folders
    for name in ("shipped", "cache/flashsample", "second", "first"):
        path = put(made[name])
        table_file, warnings = find(TARGET, environ=environ)
        assert table_file.file == path and warnings == []
    named = put(made["first"].parent, STALE, "any name.json")
    environ[lookup.FILE_VARIABLE] = named
    table_file, _ = find(TARGET, environ=environ)
    assert (table_file.file, table_file.match) == (named, Match.STALE), "a named file is used, even a stale one"
    assert find(TARGET, file=path, environ=environ)[0].file == path


def test_a_table_as_measured_wins_over_a_stale_one_wherever_they_are(folders):
    made, environ = folders
    first, _ = put(made["first"], STALE), put(made["second"], STALE)
    assert find(TARGET, environ=environ)[0].file == first
    fresh = put(made["shipped"])
    assert find(TARGET, environ=environ)[0].file == fresh


def test_a_stale_table_is_used_only_if_all_it_has_could_run_here(folders):
    made, environ = folders
    entries = [make_entry("plain", 1, TileConfig(16, 128, 256, 4, 4)), *TABLE.entries[2:]]
    put(made["first"], replace(STALE, entries=entries))
    table_file, warnings = find(TARGET, environ=environ)
    assert table_file is None
    assert "it is stale, and its configuration for plain 1 cannot run here: its buffers take" in warnings[0]
    put(made["first"], replace(TABLE, entries=entries))
    assert find(TARGET, environ=environ)[0].match is Match.EXACT, "measured here: the rest of it is of use"


def test_a_table_of_another_gpu_is_used_only_when_that_is_allowed_and_never_one_of_another_capability(folders):
    made, environ = folders
    other = replace(TABLE, device=H100)
    path = put(made["second"], other)
    assert find(TARGET, environ=environ) == (None, []), "under its own name it is nobody's business"
    renamed = put(made["first"], other, TABLE.file_name)
    table_file, (line,) = find(TARGET, environ=environ)
    assert table_file is None
    assert line.startswith(f"{renamed}: it is for NVIDIA H100") and "FLASHSAMPLE_ALLOW_FAMILY=1" in line
    os.remove(renamed)
    put(made["first"], replace(TABLE, device=A100))
    environ[lookup.FAMILY_VARIABLE] = "1"
    assert find(TARGET, environ=environ)[0].file == path
    mine = put(made["shipped"], STALE)
    assert find(TARGET, environ=environ)[0].file == mine, "a stale one of this GPU is nearer"


def test_a_folder_that_was_named_and_is_not_there_is_said_and_the_others_are_searched(folders, monkeypatch):
    made, environ = folders
    path = put(made["shipped"])
    environ[lookup.FOLDERS_VARIABLE] = os.pathsep.join([str(made["first"] / "nothing"), "", str(made["second"])])
    table_file, warnings = find(TARGET, environ=environ)
    assert table_file.file == path
    assert warnings == [f"FLASHSAMPLE_TUNED_DIR: {made['first'] / 'nothing'} is not a folder"]
    monkeypatch.setenv("HOME", "/home/me")
    assert lookup.user_folder({}) == Path("/home/me/.cache/sglang/flashsample"), "SGLang's own"


# Things that may be in the place of a table.


def huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take the memory of the machine


OTHER_HEAD = make_table(head=HeadShape(vocab=8, hidden=8, dtype="bf16")).dumps()
BUILT_IN = (defaults.SHIPPED / "builtin-sm90-2byte.json").read_text()
BAD = {
    "a folder": (Path.mkdir, "it is not a plain file"),
    "a pipe that nobody writes to": (os.mkfifo, "it is not a plain file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a plain file"),
    "a loop of links": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    "a terabyte": (huge, f"it has {1 << 40} bytes; expected {MAX_BYTES} or fewer"),
    "nothing in it": (Path.touch, "it is not JSON: Expecting value"),
    "binary": (lambda path: path.write_bytes(b"\x7fELF\xff\xfe"), "it is not UTF-8 text (byte 4)"),
    "another's JSON": (lambda path: path.write_text('{"16": {"BLOCK_SIZE_M": 16}}'), "schema is None"),
    "half of it": (lambda path: path.write_text(TABLE.dumps()[:900]), "it is not JSON"),
    "another head's": (lambda path: path.write_text(OTHER_HEAD), "it is for head 8 x 8 bf16"),
    "built-in choices": (lambda path: path.write_text(BUILT_IN), "it holds built-in choices, not tuned ones"),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_a_bad_file_is_a_miss_with_one_line_at_once_and_the_next_place_serves(folders, make, message):
    made, environ = folders
    path, shipped = made["first"] / TABLE.file_name, put(made["shipped"])
    make(path)
    started = time.monotonic()
    for file, variables in ((path, environ | {lookup.FOLDERS_VARIABLE: ""}), (None, environ)):
        table_file, (line,) = find(TARGET, file=file, environ=variables)
        assert table_file.file == shipped
        assert line.startswith(f"{path}: ") and message in line and line.isprintable()
    assert time.monotonic() - started < 20, "a terabyte is not read"


def test_whatever_reading_raises_is_a_miss(tmp_path, monkeypatch):
    path, link = put(tmp_path), tmp_path / "link"
    link.symlink_to(path)
    assert load_table(link) == (TABLE, None), "a link to a table is one"
    assert load_table("\0")[0] is None
    monkeypatch.setattr(lookup.Table, "loads", lambda text: (_ for _ in ()).throw(MemoryError("no\nmore")))
    assert load_table(path) == (None, "MemoryError: no more")
    monkeypatch.setattr(os, "open", lambda *arguments: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert load_table(path) == (None, "Permission denied")


# Configurations that batches take then.


def own_table(head: LMHead, **changes):
    """A table for this machine's device and this head."""
    table = make_table(lookup.device_of(head.weight.device), lookup.head_shape_of(head), env=lookup.environment())
    entries = [make_entry("edit", 16, TILE), make_entry("plain", 16, TILE), make_entry("plain", 64, READ)]
    confirmed = {"plain": Confirmed(rows=[4, 32], us=[1.0, 2.0], code=[CODE, CODE])}
    return replace(table, **({"entries": entries, "confirmed": confirmed} | changes))


@pytest.fixture
def head(device):
    return example(device).head


def test_a_resolved_table_serves_its_sizes_and_the_built_in_choices_serve_the_rest(folders, head, monkeypatch):
    for name, value in folders[1].items():
        monkeypatch.setenv(name, value)
    none = resolve(head)
    assert none.table_file is None and none.warnings == ()
    evidence = f" ({none.evidence})" if none.evidence else ""
    advice = "; `sgl-flashsample tune run` makes one" if head.weight.is_cuda else ""
    assert none.line() == (f"no tuned table for {none.about}: built-in kernel settings{evidence}, same tokens{advice}")
    path = put(folders[0]["second"], own_table(head))
    resolved = resolve(head)
    assert (resolved.table_file.match, resolved.warnings) == (Match.EXACT, ())
    for rows in range(1, 140):
        default = default_table(head).lookup(rows)
        wanted = TILE if 8 <= rows <= 16 else READ if 33 <= rows <= 64 else default
        assert resolved.dispatch.lookup(rows) == resolved.dispatch.lookup(rows, KIND_NAMES["greedy"]) == wanted
        assert resolved.dispatch.is_measured(rows, PLAIN) == (rows in (2, 3, 4, *range(8, 65)))
    assert resolved.line() == (
        f"tuned table {path} (match of GPU, LM head and versions: exact; from: FLASHSAMPLE_TUNED_DIR): tuned kernel "
        "settings for 3 batch sizes; built-in ones for 2 others, where they measured fastest; built-in ones without a "
        "measurement: plain 1, 5-7, 65-512; truncate 1-512; edit 1-7, 17-512; edit+truncate 1-512; "
        "greedy 1, 5-7, 65-512"
    )


@pytest.mark.parametrize(
    "entries, confirmed, words",
    [
        ([5, 5, 3], [9, 3], "; raced against 3 to 9 other configurations"),
        ([5, 5, 5], [5, 5], "; raced against 5 other configurations"),
        ([1, 1, 1], [1, 1], "; raced against 1 other configuration"),
        ([0, None, 1], [], "; raced against 0 to 1 other configurations where that is known"),
        ([None, None, None], [4, 2], "; raced against 2 to 4 other configurations where that is known"),
        ([None, None, None], [], ""),
    ],
)
def test_the_line_of_a_table_says_against_how_many_others_its_choices_were_raced(
    head, tmp_path, entries, confirmed, words
):
    table = own_table(head)
    raced = [replace(entry, against=others) for entry, others in zip(table.entries, entries, strict=True)]
    plain = replace(table.confirmed["plain"], against=confirmed)
    line = resolve(head, file=put(tmp_path, replace(table, entries=raced, confirmed={"plain": plain}))).line()
    assert f"; built-in ones for 2 others, where they measured fastest{words}; built-in ones without a " in line


def test_a_table_with_screened_kinds_leaves_those_without_a_screen_alone(head, tmp_path):
    table, kind = own_table(head), KIND_NAMES["plain+screen"]
    older = resolve(head, file=put(tmp_path, table, "older")).dispatch
    screened = [make_entry("plain+screen", 8, SCREEN), make_entry("plain+screen", 16, TILE)]
    newer = replace(table, entries=[*table.entries, *screened])
    resolved = resolve(head, file=put(tmp_path, newer, "newer"))
    assert resolved.table_file.match is Match.EXACT and resolved.warnings == ()
    assert [resolved.dispatch.lookup(rows, kind) for rows in (4, 8, 9, 16)] == [SCREEN, SCREEN, TILE, TILE]
    assert [one.screened_rows(512, measured=True) for one in (resolved.dispatch, older)] == [8, 0]
    for kind in UNSCREENED:
        assert all(resolved.dispatch.lookup(rows, kind) == older.lookup(rows, kind) for rows in range(1, 140))
    assert "; plain+screen 1" in resolved.line() and "edit+screen" not in resolved.line()


def test_what_was_measured_with_a_gemm_serves_no_head_whose_gemm_is_slow(tmp_path):
    """The head of a table has a padded vocabulary; without padding, cuBLAS takes several times as long."""
    shape = HeadShape(vocab=50_257, hidden=768, dtype="bf16")
    entries = [make_entry("plain", 16, TILE), make_entry("plain", 64, READ), make_entry("truncate", 16, READ)]
    entries.append(make_entry("truncate", 2, TILE, flashinfer=True))
    confirmed = {"plain": Confirmed(rows=[4, 256], us=[1.0, 2.0], code=[CODE, CODE])}
    table = make_table(H200, shape, entries=entries, confirmed=confirmed)
    file = TableFile(table, "the table", "the named file", Match.EXACT)
    traits = HeadTraits.of_shape(shape, "sm90")
    padded, warnings = dispatch_of(file, Target(H200, shape, {}), traits)
    assert isinstance(padded.lookup(256), ReadConfig) and padded.is_measured(256, PLAIN) and warnings == []
    assert (padded.lookup(64), padded.flashinfer) == (READ, {1, 2})
    slow = traits._replace(has_gemm=False)
    dispatch, (warning,) = dispatch_of(file, Target(H200, shape, {}), slow)
    assert warning.startswith("the table: not used, measured with a GEMM that is slow here")
    assert warning.endswith(": plain 64; plain 256; truncate 16")
    for rows in (4, 16):
        assert dispatch.lookup(rows) == padded.lookup(rows) and dispatch.is_measured(rows, PLAIN)
    for rows in (64, 256):
        assert dispatch.lookup(rows) == DispatchTable(slow).lookup(rows) and not dispatch.is_measured(rows, PLAIN)
    assert (dispatch.lookup(2, KIND_NAMES["truncate"]), dispatch.flashinfer) == (TILE, frozenset())
    shipped = dataclasses.replace(file, source=lookup.SHIPPED_SOURCE)
    assert dispatch_of(shipped, Target(H200, shape, {}), slow)[1] == []


def test_a_stale_table_is_used_with_a_warning_that_says_what_has_changed(head, tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "known_stale", lambda table: [OTHER_CHOICES])
    path = put(tmp_path, own_table(head))
    resolved = resolve(head, file=path)
    assert resolved.table_file.match is Match.STALE and resolved.dispatch.lookup(16) == TILE
    (line,) = resolved.warnings
    assert line.startswith(f"tuned table {path} is used, but it is stale ({OTHER_CHOICES})") and "tune verify" in line


@pytest.mark.parametrize("shipped", [True, False], ids=["shipped", "of the user"])
@pytest.mark.parametrize(
    "changes, match, differs",
    [
        ({"env": lookup.environment() | {"triton": "3.5.1"}}, Match.OTHER_VERSIONS, r"triton is \S+, it was 3\.5\.1"),
        ({"defaults": "stale"}, Match.STALE, OTHER_CHOICES),
    ],
    ids=["other versions", "stale"],
)
def test_a_table_that_no_longer_fits_is_used_and_only_one_of_the_user_is_worth_a_warning(
    head, tmp_path, monkeypatch, shipped, changes, match, differs
):
    table = own_table(head)
    path = put(tmp_path, replace(table, **changes), table.file_name)
    # The built-in choices for a CPU are computed, and never change.
    monkeypatch.setattr(lookup, "known_stale", lambda table: [OTHER_CHOICES] * (table.defaults == "stale"))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(lookup.FILE_VARIABLE, raising=False)
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path if shipped else tmp_path / "nowhere")
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, "" if shipped else str(tmp_path))
    resolved = resolve(head)
    assert resolved.table_file.match is match and resolved.dispatch.lookup(16) == TILE
    assert re.search(rf"{path} \(match of GPU, LM head and versions: {match}: .*{differs}", resolved.line())
    assert len(resolved.warnings) == (0 if shipped else 1)
    if not shipped:
        assert re.search(differs, resolved.warnings[0]) and "tune run` again" in resolved.warnings[0]


@pytest.mark.parametrize("content", ["no table", "entries that cannot run here"])
def test_a_shipped_table_that_is_of_no_use_is_worth_no_warning(head, tmp_path, monkeypatch, content):
    table = own_table(head, entries=[make_entry("plain", 16, SCREEN)])
    path = put(tmp_path, table, table.file_name)
    if content == "no table":
        Path(path).write_text("{")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(lookup.FILE_VARIABLE, raising=False)
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, "")
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path)
    resolved = resolve(head)
    assert resolved.warnings == () and resolved.dispatch.lookup(16) == default_table(head).lookup(16)


def test_entries_that_cannot_run_here_are_left_to_the_built_in_choice_with_one_warning(head, tmp_path):
    entries = [make_entry("edit", 16, TILE), make_entry("edit+truncate", 16, ReadConfig(256, 32, 4))]
    table = own_table(head, entries=[*entries, make_entry("plain", 16, SCREEN)])
    resolved = resolve(head, file=put(tmp_path, table))
    for kind in (PLAIN, KIND_NAMES["edit+truncate"]):
        assert resolved.dispatch.lookup(16, kind) == default_table(head).lookup(16, kind)
    assert resolved.dispatch.lookup(16, KIND_NAMES["edit"]) == TILE
    (line,) = resolved.warnings
    assert "not used, edit+truncate 16: block_b is 256" in line and "plain 16: it is for batches with a screen" in line


def test_the_sizes_that_a_table_gives_to_flashinfer_are_those_of_truncated_batches(head, tmp_path):
    kinds = {"edit+truncate": 16, "plain": 16, "truncate": 2}
    entries = [make_entry(kind, rows, TILE, flashinfer=True) for kind, rows in kinds.items()]
    entries += [make_entry("truncate", rows, READ) for rows in (1, 16)]
    resolved = resolve(head, file=put(tmp_path, own_table(head, entries=entries)))
    assert resolved.dispatch.flashinfer == {2} and resolved.dispatch.lookup(2, KIND_NAMES["truncate"]) == TILE
    assert resolved.line().endswith("; FlashInfer draws truncated batches of 2 rows without seeds")


def test_a_tuned_table_of_this_machine_draws_the_references_tokens(device, head, tmp_path, launched):
    table = table_for_this_machine(head)
    resolved = resolve(head, file=put(tmp_path, table))
    assert resolved.table_file.match is Match.EXACT and resolved.warnings == ()
    for entry in table.entries:
        if entry.rows <= ROWS:
            case = example(device, KIND_NAMES[entry.kind])
            params = take(case.params, torch.arange(entry.rows))
            drawn = Head(case.head, table=resolved.dispatch).draw(case.hidden[: entry.rows], params)
            assert_reference(drawn.token_ids, case)
            assert launched.pop() == entry.configuration


def test_a_gpu_is_what_its_driver_says_with_its_l2_cache_in_mib(monkeypatch):
    properties = {"major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 50 << 20}
    properties |= {"name": "NVIDIA H200", "shared_memory_per_block_optin": 232_448}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(**properties))
    assert lookup.device_of.__wrapped__(torch.device("cuda", 0)) == H200


@pytest.mark.parametrize(
    "line, driver",
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build", "580.82.07"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Sat Aug", "535.104"),
        ("nothing that we know", None),
        (None, None),
    ],
)
def test_the_version_of_the_gpus_driver_is_part_of_the_environment_where_there_is_one(monkeypatch, line, driver):
    def read(file: str) -> io.StringIO:
        assert file == "/proc/driver/nvidia/version"
        if line is None:
            raise FileNotFoundError(file)
        return io.StringIO(line)

    monkeypatch.setattr(lookup, "open", read, raising=False)
    assert lookup.environment.__wrapped__().get("driver") == driver


@pytest.fixture
def compiled(monkeypatch):
    """The machine code that configurations compile to, by configuration; ``CODE`` where none is set."""
    codes: dict = {}

    def machine_code(config, kind, parts):
        code = codes.get(config, CODE)
        if isinstance(code, Exception):
            raise code
        return code

    monkeypatch.setattr(fingerprint, "machine_code", machine_code)
    return codes


def test_a_table_is_stale_once_its_kernels_are_compiled_to_other_machine_code(head, tmp_path, compiled):
    resolved = resolve(head, file=put(tmp_path, own_table(head)))
    changed = resolved.dispatch.lookup(32)  # on a GPU, a batch of 4 rows takes it too
    compiled[TILE] = compiled[changed] = "another"
    after = compare_compiled(resolved, Parts.of(head), 512)
    assert resolved.table_file.match is Match.EXACT and after.table_file.match is Match.STALE
    assert after.dispatch is resolved.dispatch, "what is taken stays"
    plain = "4, 16, 32" if resolved.dispatch.lookup(4) == changed else "16, 32"
    differs = f"other machine code than was measured: plain {plain}; edit 16"
    assert f"versions: stale: {differs};" in after.line()
    (line,) = after.warnings
    assert f"is used, but it is stale ({differs}): same tokens, but it may be slow" in line


@pytest.mark.parametrize(
    "code, env, max_rows",
    [
        (CODE, {}, 512),
        ("another", {"triton": "3.5.1"}, 512),
        ("another", {}, 8),
        (RuntimeError("no compiler"), {}, 512),
        ("", {}, 512),
    ],
    ids=["the same", "by another Triton", "of batches that are not compiled", "that fails to compile", "interpreted"],
)
def test_machine_code_that_is_the_same_or_cannot_be_compared_makes_no_table_stale(
    head, tmp_path, compiled, code, env, max_rows
):
    table = own_table(head, env=lookup.environment() | env, confirmed={}, entries=[make_entry("plain", 16, TILE)])
    resolved = resolve(head, file=put(tmp_path, table))
    compiled[TILE] = code
    after = compare_compiled(resolved, Parts.of(head), max_rows)
    assert after.table_file == resolved.table_file and after.warnings == ()


@pytest.mark.parametrize(
    "changes",
    [{"logit_scale": 0.5}, {"softcap": 50.0}, {"vocab_size": VOCAB - 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_head_whose_kernels_have_constants_of_their_own_is_not_compared(head, tmp_path, compiled, changes):
    resolved = resolve(head, file=put(tmp_path, own_table(head)))
    compiled[TILE] = "another"
    assert compare_compiled(resolved, Parts.of(head), 512).table_file.match is Match.STALE
    other = dataclasses.replace(head, **changes)
    assert compare_compiled(resolved, Parts.of(other), 512).table_file.match is Match.EXACT


def test_a_head_whose_gemm_is_slow_is_not_compared(head, tmp_path, compiled):
    """It is not padded as the head that was measured, and its built-in choices are others."""
    bare = dataclasses.replace(head, weight=torch.cat([head.weight, head.weight[:1]]))
    resolved = resolve(bare, file=put(tmp_path, own_table(head)))
    compiled[TILE] = "another"
    assert compare_compiled(resolved, Parts.of(bare), 512).table_file.match is Match.EXACT
    assert resolved.dispatch.lookup(16) == TILE and "not used" in resolved.warnings[0]


def test_a_table_of_another_gpu_is_not_compared(head, tmp_path, compiled):
    """Kernels have the number of its multiprocessors in them."""
    resolved = resolve(head, file=put(tmp_path, own_table(head)))
    compiled[TILE] = "another"
    family = dataclasses.replace(resolved.table_file, match=Match.FAMILY)
    after = compare_compiled(dataclasses.replace(resolved, table_file=family), Parts.of(head), 512)
    assert after.table_file == family and after.warnings == ()


def test_choices_that_a_server_does_not_take_are_not_compared(head, tmp_path, compiled):
    """A screened one without a screen, and one that the self-check has refused."""
    entries = [make_entry("plain", 16, TILE), make_entry("plain+screen", 16, SCREEN)]
    resolved = resolve(head, file=put(tmp_path, own_table(head, entries=entries, confirmed={})))
    compiled[TILE] = compiled[SCREEN] = "another"
    refused = dataclasses.replace(resolved, dispatch=resolved.dispatch.without(TILE, PLAIN))
    assert compare_compiled(refused, Parts.of(head), 512).table_file.match is Match.EXACT


def test_a_simulated_table_is_found_in_no_folder_and_under_no_name(folders):
    made, environ = folders
    path = put(made["first"], replace(TABLE, simulated=True))
    for file in (None, path):
        table_file, warnings = find(TARGET, file=file, environ=environ)
        assert table_file is None and set(warnings) == {f"{path}: its times are simulated: no server uses it"}


@pytest.mark.parametrize(
    "traits, device, evidence",
    [
        (HeadTraits("sm90", 2, 640, 64), "NVIDIA H200", "measured on H100 or H200"),
        (HeadTraits("sm90", 2, 640, 64), "NVIDIA H20", "measured on H100 or H200, not on this GPU"),
        (HeadTraits("sm90", 4, 640, 64), "NVIDIA H200", "compiled for GPUs of this kind, measured on none"),
        (HeadTraits("sm100", 2, 640, 64), "NVIDIA B200", "compiled for GPUs of this kind, measured on none"),
        (
            HeadTraits("sm100", 2, 640, 64, gpu=Gpu((10, 0), 148, 1.965e9, 8.0e12)),
            "NVIDIA B200",
            "compiled for GPUs of this kind, measured on none; the path of a batch by a cost model of bandwidth and "
            "multiprocessors",
        ),
    ],
)
def test_the_line_without_a_table_says_on_which_gpus_the_built_in_choices_were_measured(traits, device, evidence):
    assert evidence_of(traits, device) == evidence
    line = ResolvedTable(DispatchTable(traits), None, device, (), evidence).line("a screen for plain 1-64")
    assert line == (
        f"no tuned table for {device}: a screen for plain 1-64; else built-in kernel settings ({evidence}), same "
        "tokens; `sgl-flashsample tune run` makes one"
    )


def test_a_kind_that_was_measured_at_every_size_is_not_named_among_those_without_a_measurement(head, tmp_path):
    sizes = range(1, 513)
    confirmed = {"plain": Confirmed(rows=list(sizes), us=[1.0] * len(sizes))}
    path = put(tmp_path, own_table(head, entries=[], confirmed=confirmed))
    line = resolve(head, file=path).line()
    assert line.endswith("built-in ones without a measurement: truncate 1-512; edit 1-512; edit+truncate 1-512")


def test_what_is_looked_for_is_this_machine_and_this_head(head, tmp_path):
    assert lookup.device_of(torch.device("cpu")) == CPU
    assert set(lookup.environment()) >= {"triton", "torch", "cuda"}
    shape = HeadShape(vocab=VOCAB, hidden=32, dtype="fp32")
    assert lookup.head_shape_of(head) == shape
    assert lookup.head_shape_of(LMHead(head.weight, softcap=2.0)) == replace(shape, softcap=True)
    parts = [LMHead.of_rank(head.weight[:320], rank, 2, VOCAB) for rank in range(2)]
    assert parts[0].vocab_size != parts[1].vocab_size
    assert [lookup.head_shape_of(part) for part in parts] == [replace(shape, vocab=320, tp=2)] * 2
    assert " 320 x 32 fp32 on each of 2 ranks: built-in kernel settings" in resolve(parts[1]).line()
    other_logits = LMHead(head.weight.half(), logits_dtype=torch.float32)  # no table is measured for such a head
    resolved = resolve(other_logits, file=put(tmp_path, own_table(head)))
    assert resolved.table_file is None and "logits in another dtype" in resolved.line()
