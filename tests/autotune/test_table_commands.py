"""``sgl-flashsample tune show | explain | diff | merge | lint``: what they print, exit codes and errors. None needs a
GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tuned_tables import CODE, H200, HEAD, make_entry, make_table

import sgl_flashsample
from sgl_flashsample.autotune import tables
from sgl_flashsample.autotune.decisions import decisions
from sgl_flashsample.autotune.labels import key_of
from sgl_flashsample.autotune.staleness import Compilers
from sgl_flashsample.autotune.tables import check, joined
from sgl_flashsample.defaults import HeadTraits, default_config
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kinds import BATCH_KINDS, KIND_NAMES
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.lookup import Match, TableFile, Target, dispatch_of, load_table
from sgl_flashsample.tables.schema import Confirmed, HeadShape, Table

TABLE = make_table()
OTHER_TRITON = f"it was measured with Triton 3.6.0, and {importlib.metadata.version('triton')} is installed"
NO_CODE = "it does not say with which machine code it was measured"
FUSED, READ = "fused-16x128x256-w4-s3-c1", "logits-1x512-w1-s1-c32-p1"
TRAITS = HeadTraits("sm90", 2, HEAD.vocab, HEAD.hidden)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Lookups do not find a table that this machine happens to have."""
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    for name in (lookup.FILE_VARIABLE, lookup.FOLDERS_VARIABLE, lookup.FAMILY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def put(path: Path, table: Table = TABLE) -> Path:
    path.write_text(table.dumps())
    return path


@pytest.fixture
def file(tmp_path):
    return put(tmp_path / TABLE.file_name)


def changed(table: Table, kind: str, rows: int, config=None, **evidence) -> Table:
    """``table`` with one entry changed."""
    entries = list(table.entries)
    place = next(place for place, entry in enumerate(entries) if (entry.kind, entry.rows) == (kind, rows))
    entry = msgspec.structs.replace(entries[place], **evidence)
    if config is not None:
        other = make_entry(kind, rows, config)
        entry = msgspec.structs.replace(entry, path=other.path, config=other.config)
    entries[place] = entry
    return msgspec.structs.replace(table, entries=entries)


SCREEN = ScreenConfig(8, 64, 256, 4, 4, ctas_per_sm=2, rescore_d=256, prefetch=False)
READ_8 = ReadConfig(8, 64, 1)
SCREENED = msgspec.structs.replace(
    TABLE,
    entries=[
        *TABLE.entries,
        make_entry("plain+screen", 16, SCREEN, us=160.0, se=0.4, n=9, others={"fused": 285.0, "gemm": 250.0}),
    ],
    measure=TABLE.measure | {"screen": {"bytes": 532_000_000, "rows": 64}},
)


# --- all of them


def test_they_load_neither_torch_nor_triton_nor_optuna_nor_plotly(file):
    code = f"""
import sys
from sgl_flashsample.cli import main
file = {str(file)!r}
for arguments in (["show", file], ["explain", file, "--batch", "3"], ["lint", file], ["diff", file, file]):
    assert main(["tune", *arguments]) == 0
print({{"torch", "triton", "optuna", "plotly"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["show", "nothing.json"], "nothing.json: No such file or directory"),
        (["show", "."], ".: it is not a plain file"),
        (["show", "pipe"], "pipe: it is not a plain file"),
        (["show", "text"], "text: it is not JSON: Expecting value"),
        (
            ["explain", "FILE", "--batch", "1", "--vocab", "8", "--hidden", "64"],
            "a table and --device or a head are given",
        ),
        (["explain", "FILE", "--batch", "1", "--tp", "2"], "a table and --device or a head are given"),
        (["explain", "FILE", "--batch", "1", "--vocab", "0"], "a table and --device or a head are given"),
        (
            ["explain", "--batch", "1"],
            "there is no GPU here; expected --device NAME and a head to look for a table, or a table",
        ),
        (["explain", "--batch", "1", "--device", "h200", "--vocab", "8"], "or --vocab and --hidden"),
        (["diff", "FILE", "text"], "text: it is not JSON"),
        (["diff", "FILE", "other"], "FILE is for head 128256 x 4096 bf16, tp 1, other for 8 x 8 fp32, tp 1"),
        (["merge", "FILE", "other", "-o", "c"], "FILE is for head 128256 x 4096 bf16, tp 1, other for 8 x 8"),
        (["merge", "FILE", "h100", "-o", "c"], "FILE is for NVIDIA H200 (compute capability 9.0, 132 SMs, "),
        (
            ["merge", "FILE", "old", "-o", "c"],
            "measured with different machine code of the same configuration (plain 1)",
        ),
        (["merge", "FILE", "changed", "-o", "c"], "measured against different built-in choices"),
        (["merge", "FILE", "newer", "-o", "c"], "measured with different versions (triton 3.6.0 and 3.7.0)"),
        (["merge", "FILE", "allowed", "-o", "c"], "tuned with different --allow-path (none and flashinfer)"),
        (["merge", "FILE", "FILE", "-o", "pipe"], "--out is pipe, which is not a plain file"),
        (["merge", "FILE", "FILE", "-o", "nowhere/c"], "--out is nowhere/c, in a folder that is not there"),
        (["merge", "more", "FILE", "-o", "FILE"], "--out is FILE, a file that is read; expected another one"),
        (["verify", "pipe"], "pipe: it is not a plain file"),
        (["report", "pipe"], "pipe: it is not a plain file"),
        (["report", "FILE", "--out", "FILE"], "--out is FILE, a file that is read; expected another one"),
        (["report", "FILE", "--out", "nowhere/x.html"], "--out is nowhere/x.html, in a folder that is not there"),
        (["lint", "FILE", "nothing.json"], "nothing.json: No such file or directory"),
        (["lint", "."], ".: it is not a plain file"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line_and_exit_code_two(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("FILE", "more"):
        put(tmp_path / name)
    (tmp_path / "text").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    put(tmp_path / "other", make_table(head=HeadShape(vocab=8, hidden=8, dtype="fp32"), defaults=""))
    put(tmp_path / "h100", make_table(msgspec.structs.replace(H200, name="NVIDIA H100")))
    put(tmp_path / "old", changed(TABLE, "plain", 1, code="other"))
    put(tmp_path / "newer", msgspec.structs.replace(TABLE, env=TABLE.env | {"triton": "3.7.0"}))
    put(tmp_path / "allowed", msgspec.structs.replace(TABLE, measure=TABLE.measure | {"allowed": "flashinfer"}))
    put(tmp_path / "changed", msgspec.structs.replace(TABLE, defaults="sha256:00"))
    before = sorted(os.listdir(tmp_path))
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before, "nothing is written, nothing is left behind"


def test_a_table_with_nothing_but_what_it_must_have_is_a_table(command, tmp_path):
    minimal = Table(
        device=H200,
        head=HEAD,
        entries=[make_entry("plain", 4, ReadConfig(1, 512, 1))],
        confirmed={"plain": Confirmed(rows=[1], us=[0.0])},
    )
    file = put(tmp_path / minimal.file_name, minimal)
    for arguments in (["show", file], ["explain", file, "--batch", 3], ["diff", file, file], ["merge", file, file]):
        more = ["-o", tmp_path / "c"] if arguments[0] == "merge" else []
        code, out, err = command(*arguments, *more)
        assert (code, err) == (0, "") and out, arguments
    code, out, _ = command("lint", file)
    assert code == 1 and "plain 4: n is 0; expected 2 or more samples" in out and "us is 0.0" in out


# --- show


def test_show_prints_every_size_and_whether_kernels_and_built_in_choices_are_those_installed(command, file, tmp_path):
    code, out, _ = command("show", file)
    assert code == 0
    assert out.startswith("NVIDIA H200 (compute capability 9.0, 132 SMs), head 128256 x 4096 bf16, tp 1\n")
    assert "effort full; noise 2, sgl_flashsample 0.1.0, cuda 13.0" in out
    assert (
        f"machine code: whether it is stale is not known: {OTHER_TRITON}" in out
        and "built-in choices: as installed here" in out
    )
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"1 284.0 0.40 304.0 7.0% {FUSED} 5 1 gemm+flashinfer 364.0, logits 299.0" in lines
    built_in = key_of(default_config(TRAITS, 128, KIND_NAMES["plain"]))
    assert f"128 353.0 353.0 built-in: {built_in} 4 gemm 270.5" in lines
    assert out.index("\nplain\n") < out.index("\nedit+truncate\n")
    assert "rejected: 14 shared_memory" in out and "screen:" not in out
    assert "\nplain\n" not in command("show", file, "--kind", "edit+truncate")[1]
    old = put(tmp_path / "old", msgspec.structs.replace(TABLE, defaults="sha256:00"))
    out = command("show", old)[1]
    assert "machine code: stale: the built-in choices have changed since" in out
    assert "built-in choices: not those installed here" in out
    out = command("show", put(tmp_path / "screened", SCREENED))[1]
    assert "screen: 0.53 GB beside the head, for up to 64 rows (plain+screen)" in out.splitlines()


def test_show_as_json_is_the_table_and_what_was_noted(command, file):
    file.write_text(json.dumps(json.loads(TABLE.dumps()) | {"added_later": 1}))
    shown = json.loads(command("show", file, "--json")[1])
    assert Table.loads(json.dumps(shown["table"])) == Table.loads(TABLE.dumps())
    assert shown["notes"] == ["added_later is not known to this release and is ignored"]
    assert shown["stale"] == [] and shown["unknown"] == OTHER_TRITON


def test_text_from_a_table_is_shown_as_it_is(command, file):
    put(file, msgspec.structs.replace(TABLE, env=TABLE.env | {"note": "[red]:smile:[/red]"}))
    assert "note [red]:smile:[/red]" in command("show", file)[1]


# --- explain


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch", 4], ["4 rows, plain: its own size", f"takes     {READ}", "expected  287.5 +- 0.40 us"]),
        (["--batch", 3], ["size 4, the next measured one of its tile class, not above 6"]),
        (["--batch", 9, "--kind", "greedy"], ["size 16, the next", "of plain (there is none of greedy)"]),
        (["--batch", 5], ["built-in choice: no size from 5 to 10 in its tile class (measured: 1, 4, 16, 32, 128)"]),
        (["--batch", 500], ["built-in choice: no size from 500 to 1000", "takes     logits-"]),
        (
            ["--batch", 100],
            ["the built-in choice, confirmed: size 128", "expected  353.0 us", "others    gemm 270.5 us"],
        ),
        (["--batch", 1, "--kind", "edit"], ["built-in choice", "(measured: none)"]),
        (
            ["--batch", 16, "--kind", "edit+truncate"],
            [
                *("built-in  360.0 us (fused-16); gain 7.0%", "tied      fused-32", "checked   tokens, G-test"),
                *("others    gemm+flashinfer 420.0 us", "150 samples, 1965 MHz"),
            ],
        ),
    ],
    ids=str,
)
def test_explain_says_what_a_batch_of_one_kind_takes_and_why(command, file, arguments, words):
    kind = [] if "--kind" in arguments else ["--kind", "plain"]
    code, out, err = command("explain", file, *arguments, *kind)
    assert (code, err) == (0, "")
    assert f"table     {file} (exact; the named file)\nfor       NVIDIA H200, head 128256 x 4096 bf16" in out
    for word in words:
        assert word in out


@pytest.mark.parametrize("kind, words", [([], "1 row; a server"), (["--kind", "plain"], "1 row, plain: its own size")])
def test_explain_speaks_of_one_row(command, file, kind, words):
    assert f"batch     {words}" in command("explain", file, "--batch", 1, *kind)[1]


@pytest.mark.parametrize("columns", [100, 120, None], ids=["100", "120", "not set"])
def test_what_people_read_fits_its_columns_has_no_blanks_at_the_end_and_breaks_no_path(
    command, file, tmp_path, monkeypatch, columns
):
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))
    monkeypatch.chdir(tmp_path)
    other = put(tmp_path / "other.json", changed(TABLE, "plain", 16, READ_8, us=400.0))
    screened = put(tmp_path / "screened.json", SCREENED)
    for words in (
        ("show", screened.name),
        ("explain", screened.name, "--batch", 16),
        ("explain", screened.name, "--batch", 16, "--kind", "plain+screen"),
        ("diff", file.name, other.name, "--all"),
    ):
        out = command(*words)[1]
        lines = out.splitlines()
        assert lines and max(map(len, lines)) <= (columns or 100), words
        assert all(line == line.rstrip() for line in lines), words
        assert words[0] != "explain" or screened.name in out


def test_explain_follows_the_kinds_of_batches_with_a_screen(command, file, tmp_path):
    screened = put(tmp_path / "screened", SCREENED)

    def why(path, batch, kind):
        return command("explain", path, "--batch", batch, "--kind", kind)[1]

    assert "its own size" in (out := why(screened, 16, "plain+screen")) and "takes     screened-8x64x256" in out
    assert "the built-in choice, the screened path: the table has nothing of plain+screen" in why(
        file, 4, "plain+screen"
    )
    assert "its own size, of plain (there is none of plain+screen)" in why(file, 128, "plain+screen")
    assert "the built-in choice, the screened path" in why(file, 16, "greedy+screen")
    assert "its own size, of plain (there is none of greedy+screen)" in why(file, 128, "greedy+screen")


def test_explain_says_which_size_cannot_run_on_the_device(command, tmp_path):
    a100 = msgspec.structs.replace(H200, name="NVIDIA A100", cc="8.0", smem_optin=166_912)
    entries = [
        make_entry("greedy", 16, TileConfig(16, 128, 256, 4, 4, tma=False)),  # buffers of 294,912 bytes
        make_entry("plain", 16, READ_8, us=280.0),
    ]
    file = put(tmp_path / "a100", make_table(a100, entries=entries, confirmed={}, defaults=""))
    out = command("explain", file, "--batch", 16, "--kind", "greedy")[1]
    assert (
        "its own size, of plain (there is none of greedy); size 16 of greedy cannot be used: its buffers take " in out
    )
    assert f"takes     {key_of(READ_8)}" in out


def test_explain_prints_what_a_server_with_default_settings_takes_of_all_kinds(command, file, tmp_path):
    _, out, _ = command("explain", file, "--batch", 16)
    assert "16 rows; a server with default settings keeps no screen" in out
    kinds = [line.split()[0] for line in out.splitlines()[4:]]
    assert kinds == ["plain", "truncate", "edit", "edit+truncate", "greedy"]
    _, out, _ = command("explain", put(tmp_path / "screened", SCREENED), "--batch", 16)
    assert "keeps a screen, for this table says that it wins" in out
    first = out.splitlines()[4].split()
    assert first[:3] == ["plain+screen", "160.0", key_of(SCREEN)]
    assert sum("+screen" in line.split()[0] for line in out.splitlines()[4:]) == 5


LARGE = msgspec.structs.replace(TABLE, entries=[*TABLE.entries, make_entry("plain", 1024, READ_8, us=1.0)])


@pytest.mark.parametrize("table", [TABLE, SCREENED, LARGE], ids=["unscreened", "screened", "large"])
def test_explain_names_what_the_dispatcher_takes(command, tmp_path, table):
    file = put(tmp_path / "table", table)
    table_file = TableFile(load_table(file)[0], str(file), "the named file", Match.EXACT)
    dispatch, _ = dispatch_of(table_file, Target(H200, HEAD, {}), TRAITS)
    for rows in (1, 2, 3, 4, 5, 9, 16, 17, 24, 33, 64, 100, 129, 512, 513, 1024):
        explained = json.loads(command("explain", file, "--batch", rows, "--json")[1])
        takes = {batch["kind"]: batch["takes"] for batch in explained["batches"]}
        assert takes == {name: key_of(dispatch.lookup(rows, KIND_NAMES[name])) for name in takes}
        assert takes.keys() == {str(kind) for kind in BATCH_KINDS if explained["screen"] or not kind.screen}


RACES = "races a screen at its start, for {}, and uses it where it is faster; for which batches is not known before"


@pytest.mark.parametrize(
    "cc, modelled", [("8.6", True), ("8.7", False), ("11.0", False), ("12.0", True), ("12.1", False)]
)
def test_explain_names_the_cost_model_of_a_gpu_that_has_one_with_and_without_a_table(
    command, tmp_path, monkeypatch, cc, modelled
):
    device = msgspec.structs.replace(H200, name="a GPU", cc=cc)
    monkeypatch.setattr(tables, "known_device", lambda name: device)
    ask = ("--batch", 16, "--kind", "plain", "--json")
    answers = [command("explain", *ask, "--device", "a GPU", "--vocab", 128_256, "--hidden", 4096)]
    answers.append(
        command("explain", put(tmp_path / "table", make_table(device, HEAD, entries=[], confirmed={})), *ask)
    )
    for _, out, _ in answers:
        assert ("by a cost model of its clocks" in json.loads(out)["batches"][0]["why"]) is modelled


def test_explain_finds_the_table_that_a_server_would(command, tmp_path, monkeypatch):
    ask = ["explain", "--batch", 16, "--device", "NVIDIA H200", "--vocab", 128_256, "--hidden", 4096]
    code, out, _ = command(*ask)
    assert code == 0
    assert f"table     none: {TABLE.file_name} is not in {tmp_path / 'cache' / 'flashsample'}, " in out
    assert "the built-in choice, without a table" in out and "cost model" not in out
    _, unmeasured, _ = command(*ask[:4], "NVIDIA A10", *ask[5:])
    assert "without a table; a server on this GPU takes the fused or the logits path by a cost model" in unmeasured
    assert f"a server with default settings {RACES.format('there is no table')}\n" in out
    folder = tmp_path / "cache" / "flashsample"
    folder.mkdir(parents=True)
    put(folder / TABLE.file_name, changed(TABLE, "plain", 1, code=""))
    _, out, _ = command(*ask)
    assert f"table     {folder / TABLE.file_name} (stale: " in out and NO_CODE in out
    assert f"a server with default settings {RACES.format('this table is stale')}\n" in out
    assert "the user's cache)" in out and FUSED in out
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / TABLE.file_name).write_text("{")
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(tmp_path / "bad"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128_256, "hidden_size": 4096}))
    code, out, err = command(*ask[:5], "--model-path", tmp_path, "--kind", "plain", "--json")
    explained = json.loads(out)
    assert (code, err, explained["match"]) == (0, "", "stale") and "it is not JSON" in explained["warnings"][0]
    (batch,) = explained["batches"]
    assert batch["config"]["block_v"] == 128 and batch["us"] == 286.0
    assert command(*ask[:3], "--device", "h200", *ask[5:])[1].startswith("table     " + str(folder))


def test_explain_of_an_unknown_device_says_that_it_knows_nothing_of_it(command):
    _, out, _ = command("explain", "--batch", 1, "--device", "Abacus", "--vocab", 640, "--hidden", 64)
    assert "table     none" in out and re.search(r"\nplain +the built-in choice +the built-in choice, without", out)
    assert "a server with default settings keeps no screen\n" in out, "its head is too small"


@pytest.mark.parametrize(
    "name, remark", [("L40S", ""), ("Abacus", " (if there are kernels for this GPU, which is not known here)")]
)
def test_explain_says_that_a_server_races_a_screen_on_a_card_without_a_table(command, name, remark):
    ask = ["explain", "--batch", 4, "--device", name, "--vocab", 151_936, "--hidden", 4096]
    assert f"4 rows; a server with default settings {RACES.format('there is no table')}{remark}\n" in command(*ask)[1]
    explained = json.loads(command(*ask, "--json")[1])
    assert explained["screen_raced"] and not explained["screen"]
    assert json.loads(command(*ask, "--dtype", "e4m3", "--json")[1])["screen_raced"] is False


# --- list


def test_list_prints_the_tables_of_the_lookup_order_and_says_which_files_are_none(command, tmp_path, monkeypatch):
    named, shipped = tmp_path / "named", tmp_path / "shipped"
    for folder in (named, shipped):
        folder.mkdir()
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(named))
    put(named / TABLE.file_name)
    put(shipped / TABLE.file_name, msgspec.structs.replace(changed(TABLE, "plain", 1, code=""), effort="quick"))
    (shipped / "fs2-Broken.json").write_text("{")
    (shipped / "builtin.json").write_text("{")
    code, out, _ = command("list")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and lines[0] == "device head effort choices built-in where stale"
    head = f"NVIDIA H200 {HEAD.vocab} x {HEAD.hidden} bf16, tp 1"
    assert lines[1:3] == [
        f"{head} full 4 3 {lookup.FOLDERS_VARIABLE}",
        f"{head} quick 4 3 shipped {NO_CODE}",
    ]
    assert lines[3].startswith("stale: as far as is known without compiling")
    assert lines[4].startswith(f"not used: {shipped / 'fs2-Broken.json'}: ")
    assert lines[5:] == [
        f"{lookup.FOLDERS_VARIABLE}: {named}",
        f"the user's cache: {tmp_path / 'cache' / 'flashsample'}",
        f"shipped: {shipped}",
    ]
    listed = json.loads(command("list", "--json")[1])
    assert [one["file"] for one in listed] == [
        str(named / TABLE.file_name),
        str(shipped / "fs2-Broken.json"),
        str(shipped / TABLE.file_name),
    ]


# --- diff


def test_diff_tells_noise_from_a_difference_and_a_changed_choice_from_the_same(command, file, tmp_path):
    other = changed(TABLE, "plain", 1, us=284.9)  # 0.9 of 0.57 combined: less than 1.96
    other = changed(other, "plain", 4, TileConfig(16, 128, 256, 4, 3), us=280.0)
    other = changed(other, "plain", 16, us=289.0)
    confirmed = {"plain": Confirmed(rows=[32], us=[300.0]), "edit+truncate": TABLE.confirmed["edit+truncate"]}
    other = msgspec.structs.replace(other, env=other.env | {"triton": "3.7.0"}, effort="quick", confirmed=confirmed)
    path = put(tmp_path / "b", other)
    code, out, _ = command("diff", file, path)
    assert code == 1 == command("diff", file, path, "--json")[0]
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    assert lines["triton"] == "triton: 3.6.0 -> 3.7.0" and lines["effort"] == "effort: full -> quick"
    assert f"us B/A 0.9739 +- 0.0019, B faster; {READ} -> {FUSED}" in lines["plain 4"]
    assert "1.0105 +- 0.0020, B slower; same choice" in lines["plain 16"]
    assert "1.0345 +- 0.0044, B slower; same choice" in lines["plain 32"], "a confirmed size has the error of a race"
    assert "only in A: built-in: fused-64" in lines["plain 128"] and "plain 1" not in lines
    assert "6 sizes in both: 1 with another choice, 3 with a time beyond noise (1.96 combined" in out
    assert "us B/A 1.0032 +- 0.0020, within noise; same choice" in command("diff", file, path, "--all")[1]
    difference = json.loads(command("diff", path, file, "--json")[1])
    assert difference["environment"] == {"effort": ["quick", "full"], "triton": ["3.7.0", "3.6.0"]}
    noise = [one["within_noise"] for one in difference["sizes"] if "ratio" in one]
    assert sorted(noise) == [False, False, False, True, True, True]


def test_diff_of_a_table_with_itself_has_nothing_to_say(command, file):
    summary = "7 sizes in both: 0 with another choice, 0 with a time beyond noise (1.96 combined standard errors)\n"
    assert command("diff", file, file)[:2] == (0, summary)
    assert command("diff", file, file, "--all")[1].count("within noise; same choice") == 7


# --- merge


def test_merge_takes_the_other_choice_only_where_it_is_better_beyond_noise(command, file, tmp_path):
    other = changed(TABLE, "plain", 1, TileConfig(32, 128, 128, 8, 5), us=283.5)  # better, within noise
    other = changed(other, "plain", 4, TileConfig(16, 128, 256, 4, 3), us=280.0)  # better
    confirmed = {
        "plain": Confirmed(rows=[2, 128], us=[200.0, 400.0]),
        "greedy": Confirmed(rows=[2], us=[281.0], gemm_us=[255.0]),
    }
    entries = [entry for entry in other.entries if (entry.kind, entry.rows) != ("plain", 16)]
    faster = {"us": 250.0, "se": 0.4, "n": 9, "default_us": 290.0}
    entries.append(make_entry("plain", 32, READ_8, **faster))  # what A keeps is slower
    other = msgspec.structs.replace(other, entries=entries, confirmed=confirmed)
    path, out = put(tmp_path / "b", other), tmp_path / "c"
    code, said, _ = command("merge", file, path, "-o", out)
    assert code == 0 and said == f"{out}: 9 sizes, 2 of them better in {path}, 2 only there\n"
    merged, _ = load_table(out)
    for rows, table in ((1, TABLE), (4, other), (16, TABLE), (32, other)):
        assert merged.entry("plain", rows) == table.entry("plain", rows)
    times = {"us": [200.0, 353.0], "gemm_us": [0.0, 270.5]}
    assert merged.confirmed["plain"] == Confirmed(rows=[2, 128], **times, code=["", CODE])
    assert merged.confirmed["greedy"] == other.confirmed["greedy"] and merged.entry("edit+truncate", 16) is not None
    assert merged.provenance["a"] == TABLE.provenance and merged.rejected == TABLE.rejected
    again = command("merge", out, out, "-o", tmp_path / "d")
    assert again[0] == 0, "merging tables that were merged does not nest without end"


def test_merge_compares_what_was_timed_in_one_race_and_not_two_sessions():
    """B's GPU was a fifth faster throughout: where its choice gains no more, and where it was the built-in one."""
    confirmed = {"plain": Confirmed(rows=[1, 128], us=[200.0, 290.0], gemm_us=[180.0, 220.0])}
    entry = make_entry("plain", 4, READ_8, us=236.0, se=0.4, default_us=250.0)
    merged, *counts = joined(TABLE, msgspec.structs.replace(TABLE, entries=[entry], confirmed=confirmed))
    assert counts == [0, 0] and merged.confirmed["plain"] == TABLE.confirmed["plain"]
    assert all(merged.entry(entry.kind, entry.rows) == entry for entry in TABLE.entries)
    slower = changed(TABLE, "plain", 4, READ_8, us=320.0, default_us=360.0)
    assert joined(TABLE, slower)[0].entry("plain", 4) == slower.entry("plain", 4), "more gain on a slower GPU"


def test_merge_compares_with_the_gemm_where_the_built_in_choice_did_not_race_and_nothing_without_either():
    without = {"default": "", "default_us": 0.0, "gain": 0.0}
    table = changed(TABLE, "plain", 1, **without, others={"gemm": 250.0})
    built_in = msgspec.structs.replace(
        TABLE, entries=[], confirmed={"plain": Confirmed(rows=[1], us=[220.0], gemm_us=[220.0])}
    )
    merged, taken, _ = joined(table, built_in)
    assert taken == 1 and merged.entry("plain", 1) is None and 1 in merged.confirmed["plain"].rows
    table = changed(TABLE, "plain", 1, **without)
    assert joined(table, built_in)[0].entry("plain", 1) == table.entry("plain", 1)


def test_merge_keeps_the_memory_of_the_larger_screen():
    small = msgspec.structs.replace(SCREENED, measure={"screen": {"bytes": 1000, "rows": 1}})
    assert joined(small, SCREENED)[0].measure["screen"] == SCREENED.measure["screen"]
    merged, taken, added = joined(TABLE, SCREENED)
    assert merged.measure["screen"] == SCREENED.measure["screen"] and (taken, added) == (0, 1)
    assert joined(SCREENED, TABLE)[0].measure == SCREENED.measure


def test_merge_stops_at_a_conflict_when_it_is_to_be_strict(command, file, tmp_path):
    other = put(tmp_path / "b", changed(TABLE, "plain", 4, TileConfig(16, 128, 256, 4, 3)))
    code, _, err = command("merge", file, other, "-o", tmp_path / "c", "--strict")
    assert code == 2 and err.startswith(f"error: plain 4 takes {READ} in A and {FUSED} in B")
    assert not (tmp_path / "c").exists()
    same = put(tmp_path / "b", changed(TABLE, "plain", 4, us=200.0))
    assert command("merge", file, same, "-o", tmp_path / "c", "--strict")[0] == 0


def test_merge_may_write_into_a_folder_and_over_the_table_there(command, file, tmp_path):
    other, folder = put(tmp_path / "b", changed(TABLE, "plain", 4, us=200.0)), tmp_path / "merged"
    folder.mkdir()
    put(folder / TABLE.file_name)
    assert command("merge", file, other, "-o", folder)[0] == 0
    assert load_table(folder / TABLE.file_name)[0].entry("plain", 4).us == 200.0
    assert os.listdir(folder) == [TABLE.file_name]


# --- lint


def test_lint_passes_a_good_table_and_no_stale_one(command, file, tmp_path):
    notes = f"{file}: note: no sizes for truncate, edit\n"
    notes += f"{file}: note: whether it is stale is not known: {OTHER_TRITON}\n"
    assert command("lint", file) == (0, f"{notes}1 of 1 tables are well-formed and up to date\n", "")
    (tmp_path / "old").mkdir()
    stale = msgspec.structs.replace(changed(TABLE, "plain", 1, code=""), defaults="sha256:00")
    old = put(tmp_path / "old" / TABLE.file_name, stale)
    code, out, _ = command("lint", file, old)
    assert code == 1 and out.endswith("1 of 2 tables are well-formed and up to date\n")
    assert f"{old}: stale: {NO_CODE}\n" in out and f"{old}: stale: the built-in choices have changed since\n" in out
    unknown = put(tmp_path / "old" / TABLE.file_name, msgspec.structs.replace(SCREENED, measure=TABLE.measure))
    assert "measure.screen is missing: what memory a screen takes" in check(str(unknown), Compilers(print))[2]


def test_lint_passes_a_table_of_any_name_and_notes_that_no_folder_is_searched_for_it(command, tmp_path):
    path = put(tmp_path / "table.json", TABLE)
    code, out, _ = command("lint", path)
    assert code == 0 and f"{path}: note: its name is not {TABLE.file_name}: " in out


def test_lint_and_merge_answer_in_json(command, file, tmp_path):
    (tmp_path / "broken").write_text("{")
    code, out, _ = command("lint", file, tmp_path / "broken", "--json")
    good, broken = json.loads(out)
    assert code == 1 and good["file"] == str(file) and good["error"] == good["stale"] == []
    assert "no sizes for truncate, edit" in good["note"] and len(broken["error"]) == 1
    code, out, _ = command("merge", file, file, "-o", tmp_path / "c", "--json")
    sizes = len(list(decisions(load_table(tmp_path / "c")[0])))
    assert json.loads(out) == {"file": str(tmp_path / "c"), "sizes": sizes, "better_in_b": 0, "only_in_b": 0}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.write_text(path.read_text().replace("  ", " ")), "not in its canonical form"),
        (lambda path: path.write_text(path.read_text()[:-1]), "not in its canonical form"),
        (lambda path: path.write_text("{"), "it is not JSON"),
        (lambda path: put(path, changed(TABLE, "plain", 1, n=1)), "plain 1: n is 1; expected 2 or more"),
        (lambda path: put(path, changed(TABLE, "plain", 1, gain=0.3)), "plain 1: gain is 0.3; its times give 0.066"),
        (lambda path: put(path, changed(TABLE, "plain", 1, default_us=0)), "plain 1: default_us is 0.0; expected"),
        (lambda path: put(path, changed(TABLE, "plain", 1, tied=[FUSED])), f"tied names {FUSED}, which it takes"),
        (lambda path: put(path, changed(TABLE, "plain", 1, flashinfer=True)), "it serves truncated batches, tp 1"),
        (lambda path: put(path, msgspec.structs.replace(TABLE, entries=[], confirmed={})), "it has no sizes"),
        (
            lambda path: put(
                path, msgspec.structs.replace(TABLE, confirmed={"plain": Confirmed(rows=[128, 32], us=[1.0, 1.0])})
            ),
            "confirmed.plain: rows are [128, 32]; expected them ascending",
        ),
        (
            lambda path: put(path, changed(TABLE, "plain", 1, default_config(TRAITS, 1, KIND_NAMES["plain"]))),
            "plain 1 takes the built-in choice: it belongs to the confirmed sizes",
        ),
        (lambda path: put(path, changed(TABLE, "plain", 4, SCREEN)), "it is for batches with a screen"),
        (
            lambda path: put(path, make_table(msgspec.structs.replace(H200, smem_optin=101_376))),
            f"plain 1 takes {FUSED}, which cannot run: its buffers take 221184 bytes",
        ),
    ],
    ids=range(13),
)
def test_lint_names_what_is_wrong_and_exits_with_one(command, file, change, message):
    change(file)
    code, out, _ = command("lint", file)
    assert code == 1
    assert f"{file}: error: " in out and message in out
    assert out.endswith("0 of 1 tables are well-formed and up to date\n")


def test_every_shipped_table_is_fit_to_be_shipped():
    shipped = Path(sgl_flashsample.__file__).parent / "tables"
    for path in sorted(shipped.glob("fs2-*.json")):
        assert check(str(path), Compilers(print))[0] == [], path
        assert path.name == load_table(path)[0].file_name
