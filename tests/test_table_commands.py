"""``sgl-flashsample tune show | explain | diff | merge | lint``, as a person meets them; none of it needs a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sgl_flashsample.autotune import commands, lint
from sgl_flashsample.autotune.merge import joined
from sgl_flashsample.kernels.tiles import ScreenConfig, TileConfig
from tuned_tables import H200, HEAD, make_table

import sgl_flashsample
from sgl_flashsample import lookup
from sgl_flashsample.sources import sources_hash
from sgl_flashsample.table import Choice, HeadShape, Table
from sgl_flashsample.work import Work

TABLE = make_table()


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No table of this machine is found by chance."""
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    for name in (lookup.FILE_VARIABLE, lookup.FOLDERS_VARIABLE, lookup.FAMILY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tune(capsys):
    """Runs a command; its exit code and what it printed on both streams."""

    def run(*arguments):
        try:
            code = commands.main([*map(str, arguments)])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def put(path, table=TABLE):
    path.write_text(table.dumps())
    return path


@pytest.fixture
def file(tmp_path):
    return put(tmp_path / TABLE.file_name)


def with_bucket(table, work, rows, **changes):
    classes = {name: dict(buckets) for name, buckets in table.classes.items()}
    classes[work][rows] = dataclasses.replace(classes[work][rows], **changes)
    return dataclasses.replace(table, classes=classes)


# --- all of them


def test_help_names_every_command_and_where_servers_look_and_each_command_explains_its_options(tune):
    code, out, _ = tune("--help")
    assert code == 0
    assert all(name in out for name in ("show", "explain", "diff", "merge", "lint", "FLASHSAMPLE_TUNED_DIR"))
    for name, words in {"show": "--json", "explain": "--vocab", "diff": "same head", "merge": "--strict"}.items():
        code, out, _ = tune(name, "--help")
        assert code == 0 and words in out


def test_the_command_line_reaches_them_without_loading_torch(file):
    code = "import sys; from sgl_flashsample.cli import main; c = main(sys.argv[1:]); print('torch' in sys.modules, c)"
    for arguments in (["show", file], ["explain", file, "--batch", "3"], ["lint", file]):
        command = [sys.executable, "-c", code, "tune", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False 0", done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: command (see `sgl-flashsample tune --help`)"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["show"], "the following arguments are required: file (see `sgl-flashsample tune show --help`)"),
        (["show", "nothing.json"], "nothing.json: No such file or directory"),
        (["show", "."], ".: it is not a plain file"),
        (["show", "text"], "text: it is not JSON: Expecting value"),
        (["explain", "FILE"], "required: --batch"),
        (["explain", "FILE", "--batch", "0"], "argument --batch: '0' is no positive number"),
        (["explain", "FILE", "--batch", "9" * 5000], "is no positive number"),
        (["explain", "FILE", "--batch", "1", "--work", "sort"], "argument --work: invalid choice: 'sort'"),
        (["explain", "FILE", "--batch", "1", "--vocab", "8"], "a table and --device, --vocab or --hidden are given"),
        (["explain", "--batch", "1"], "no table is given; expected one, or --device, --vocab and --hidden"),
        (["diff", "FILE"], "required: b"),
        (["diff", "FILE", "text"], "text: it is not JSON"),
        (["diff", "FILE", "other"], "FILE is for head 128256 x 4096 bf16, tp 1, other for 8 x 8 fp32, tp 1"),
        (["merge", "FILE", "FILE"], "required: -o/--out"),
        (["merge", "FILE", "other", "-o", "c"], "FILE is for head 128256 x 4096 bf16, tp 1, other for 8 x 8"),
        (["merge", "FILE", "h100", "-o", "c"], "FILE is for Device(name='NVIDIA H200'"),
        (["merge", "FILE", "old", "-o", "c"], "measured with different kernels (fused)"),
        (["merge", "FILE", "FILE", "-o", "."], ". is not a plain file"),
        (["merge", "FILE", "FILE", "-o", "nowhere/c"], "No such file or directory"),
        (["lint"], "required: FILE"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line_and_exit_code_two(tune, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "FILE")
    (tmp_path / "text").write_text("hello")
    put(tmp_path / "other", make_table(head=HeadShape(8, 8, "fp32")))
    put(tmp_path / "h100", make_table(dataclasses.replace(H200, name="NVIDIA H100")))
    put(tmp_path / "old", dataclasses.replace(TABLE, kernels={"fused": {"src": "sha256:00"}}))
    before = sorted(os.listdir(tmp_path))
    code, out, err = tune(*arguments)
    assert (code, out) == (2, "")
    assert message.replace("FILE is for head", "FILE is for head") in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before, "nothing is written, nothing is left behind"


# --- show


def test_show_prints_every_bucket_and_says_whether_the_kernels_are_those_installed(tune, file, tmp_path):
    code, out, _ = tune("show", file)
    assert code == 0
    assert out.startswith("NVIDIA H200 (compute capability 9.0, 132 SMs), head 128256 x 4096 bf16, tp 1\n")
    assert "effort full; noise 1, sgl_flashsample 0.1.0, cuda 13.0" in out and "kernels: as installed here" in out
    assert "1  284.0  0.40    305.4  7.0 %  fused 16x128x256 warps 4 stages 3" in out
    assert "4  287.5  0.40    309.1  7.0 %  logits 1x512 warps 1 ctas_per_sm 32" in out
    assert "gemm+flashinfer 355.0, logits 298.2" in out
    assert out.index("\nplain\n") < out.index("\nedit+truncate\n")
    assert "rejected: 1 shared_memory" in out
    old = put(tmp_path / "old", dataclasses.replace(TABLE, kernels={}))
    assert "kernels: not those installed here (stale)" in tune("show", old)[1]


def test_show_as_json_is_the_table_and_what_was_noted(tune, file):
    data = json.loads(TABLE.dumps()) | {"added_later": 1}
    file.write_text(json.dumps(data))
    _, out, _ = tune("show", file, "--json")
    found = json.loads(out)
    assert Table.loads(json.dumps(found["table"])) == TABLE
    assert found["notes"] == ["added_later is not known to this release and is ignored"]
    assert found["kernels_as_installed"] is True


# --- explain


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch", 4], ["4 rows, plain: its own bucket", "takes     logits 1x512", "expected  287.5 +- 0.40 us"]),
        (["--batch", 3], ["bucket 4, the next one of its tile class, at most twice it"]),
        (["--batch", 9, "--work", "greedy"], ["bucket 16, the next", "of plain (there is none of greedy)"]),
        (["--batch", 5], ["built-in choice: no bucket from 5 to 10 in its tile class (buckets: 1, 4, 16, 32, 128)"]),
        (["--batch", 500], ["built-in choice: no bucket from 500 to 1000"]),
        (["--batch", 1, "--work", "edit"], ["built-in choice", "(buckets: none)"]),
        (
            ["--batch", 17, "--work", "edit+truncate"],
            ["default   371.0 us (fused 16x128x128 warps 4 stages 4); gain 7.0 %", "tied      fused 32x128x128"],
        ),
        (
            ["--batch", 32, "--work", "edit+truncate"],
            ["others    gemm+flashinfer 431.2 us", "checked   tokens, G-test", "150 samples, 1965 MHz"],
        ),
    ],
)
def test_explain_says_what_a_batch_takes_and_why(tune, file, arguments, words):
    code, out, err = tune("explain", file, *arguments)
    assert (code, err) == (0, "")
    assert f"table     {file} (exact; the named file)\nfor       NVIDIA H200, head 128256 x 4096 bf16" in out
    for word in words:
        assert word in out


def test_explain_finds_the_table_that_a_server_would(tune, tmp_path, monkeypatch):
    ask = ["explain", "--batch", 16, "--device", "NVIDIA H200", "--vocab", 128_256, "--hidden", 4096]
    code, out, _ = tune(*ask)
    assert code == 0
    assert f"table     none: {TABLE.file_name} is not in {tmp_path / 'cache' / 'flashsample'}, " in out
    assert "16 rows, plain: the built-in choice, without a table" in out
    folder = tmp_path / "cache" / "flashsample"
    folder.mkdir(parents=True)
    put(folder / TABLE.file_name, dataclasses.replace(TABLE, kernels={}))
    _, out, _ = tune(*ask)
    assert f"table     {folder / TABLE.file_name} (stale: " in out and "the kernels have changed since" in out
    assert "the user's cache)" in out and "takes     fused 16x128x256" in out
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / TABLE.file_name).write_text("{")
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(tmp_path / "bad"))
    code, out, err = tune(*ask, "--json")
    found = json.loads(out)
    assert code == 0 and err == ""
    assert found["match"] == "stale" and found["takes"]["config"]["block_v"] == 128 and found["us"] == 286.0
    assert "it is not JSON" in found["warnings"][0]


def test_explain_knows_a_bucket_that_this_release_cannot_use(tune, tmp_path):
    configs = TABLE.configs | {"read": Choice("speculative", {"hot": 4096})}
    path = put(tmp_path / "x", dataclasses.replace(TABLE, configs=configs))
    assert (
        "the built-in choice: bucket 4 cannot be used (this release has no path 'speculative')"
        in tune("explain", path, "--batch", 4)[1]
    )


# --- batches with a screen

SCREEN = ScreenConfig(8, 64, 256, 4, 4, ctas_per_sm=2, rescore_d=256, prefetch=False)


@pytest.fixture
def screened(tmp_path):
    """TABLE with a bucket of batches with a screen, and its file."""
    bucket = dataclasses.replace(TABLE.classes["plain"][16], use="screen", us=160.0, gain=0.44, tied=[])
    table = dataclasses.replace(
        TABLE,
        configs=TABLE.configs | {"screen": Choice.of(SCREEN)},
        classes=TABLE.classes | {"plain+screen": {16: dataclasses.replace(bucket, others={"fused": 285.0})}},
        kernels=TABLE.kernels | {"screened": {"src": sources_hash("screened"), "space": "sha256:41aa"}},
        measure=TABLE.measure | {"screen": {"bytes": 532_000_000, "rows": 64}},
    )
    (tmp_path / "screened").mkdir()
    return table, put(tmp_path / "screened" / table.file_name, table)


def test_show_says_what_a_screen_costs_and_what_its_batches_take(tune, file, screened):
    out = tune("show", screened[1])[1]
    assert "screen: 0.53 GB beside the head, for up to 64 rows (plain+screen)" in out.splitlines()
    assert (
        "screened 8x64x256 warps 4 stages 4 ctas_per_sm 2 rescore_d 256 prefetch False" in out and "fused 285.0" in out
    )
    assert "screen:" not in tune("show", file)[1]


def test_explain_follows_the_chain_of_batches_with_a_screen(tune, file, screened):
    def why(path, batch, work):
        return tune("explain", path, "--batch", batch, "--work", work)[1]

    assert "its own bucket" in (out := why(screened[1], 16, "plain+screen")) and "takes     screened 8x64x256" in out
    assert "the built-in choice, the screened path: the table has nothing of plain+screen" in why(
        file, 4, "plain+screen"
    )
    assert "its own bucket, of plain (there is none of plain+screen)" in why(file, 128, "plain+screen")
    assert "the built-in choice, the screened path" in why(file, 16, "greedy+screen")
    assert "its own bucket, of plain (there is none of greedy+screen)" in why(file, 128, "greedy+screen")
    assert "the built-in choice: no bucket from 3 to 6" in why(file, 3, "edit+truncate+screen")


def test_merge_keeps_what_a_screen_costs_and_diff_and_lint_know_its_batches(tune, file, screened, tmp_path):
    table, path = screened
    merged, _, added = joined(TABLE, table)
    assert merged.measure["screen"] == table.measure["screen"] and added == 1
    assert merged.classes["plain+screen"] == table.classes["plain+screen"]
    assert joined(table, TABLE)[0].measure == table.measure
    assert "plain+screen 16:" in (out := tune("diff", file, path)[1]) and "only in B: screened 8x64x256" in out
    errors, notes = lint.check(str(path))
    assert errors == [] and not any("screen" in note for note in notes)
    unknown = dataclasses.replace(table, measure=TABLE.measure)
    assert "note: measure.screen is missing: what memory a screen takes" in lint.check(str(put(path, unknown)))[1]
    misplaced = dataclasses.replace(table, classes=TABLE.classes | {"edit": table.classes["plain+screen"]})
    assert any("it is for batches with a screen" in error for error in lint.check(str(put(path, misplaced)))[0])


def cells_of(page, work):
    """The rows of the report's first table that are of one class, without markup."""
    text = page[page.index("<h2>With a screen</h2>") :]
    found = re.findall(rf"<tr><td class=l>{re.escape(work)}<td>(.*?)(?=<tr>|</table>)", text)
    return [re.sub(r"<(?!td)[^>]*>", "", row).replace("<td class=l>", "<td>").split("<td>") for row in found]


def test_the_report_shows_where_the_screened_path_wins_by_how_much_and_what_memory_it_takes(screened):
    from sgl_flashsample.autotune import report

    table, _ = screened
    (bucket,) = table.classes["plain+screen"].values()
    buckets = {
        8: dataclasses.replace(bucket, others={"fused": 285.0, "logits": 280.0, "gemm": 270.0}),
        32: dataclasses.replace(bucket, use="fused-16", us=290.0, others={"screened": 348.0, "logits": 300.0}),
        64: dataclasses.replace(bucket, others={"gemm+flashinfer": 355.0}),
    }
    for work in [work for work in Work if work.screened]:  # whichever there are
        page = report.page(dataclasses.replace(table, classes=table.classes | {work.value: buckets}), None)
        wins = "2" if work is Work.SCREENED else "3"
        assert f"The screened path wins {wins} of {int(wins) + 1} buckets. " in page
        assert cells_of(page, work.value) == [
            ["8", "screened", "160.0 &plusmn; 0.8", "160.0", "280.0", "logits", "42.9%"],
            ["32", "fused", "290.0 &plusmn; 0.8", "348.0", "290.0", "fused", "-20.0%"],
            ["64", "screened", "160.0 &plusmn; 0.8", "160.0", "not raced", "", ""],
        ]
        assert "A screen for up to 64 rows takes 532,000,000 bytes, 50.6% of the LM head's 1,050,673,152." in page
    unknown = report.page(dataclasses.replace(table, measure={}), None)
    assert "What memory a screen takes is not in the table." in unknown
    assert "With a screen" not in report.page(TABLE, None)


# --- diff


def test_diff_tells_noise_from_a_difference_and_a_changed_choice_from_the_same(tune, file, tmp_path):
    other = with_bucket(TABLE, "plain", 1, us=284.9)  # 0.9 of 0.57 combined: less than 1.96
    other = with_bucket(other, "plain", 4, us=280.0, use="fused-16")
    other = with_bucket(other, "plain", 16, us=289.0)
    other = dataclasses.replace(other, env=other.env | {"triton": "3.7.0"}, effort="quick")
    del other.classes["plain"][128]
    path = put(tmp_path / "b", other)
    code, out, _ = tune("diff", file, path)
    assert code == 0
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    assert lines["triton"] == "triton: 3.6.0 -> 3.7.0" and lines["effort"] == "effort: full -> quick"
    assert "us B/A 1.0032 +- 0.0020, within noise; same choice" in lines["plain 1"]
    assert "us B/A 0.9739 +- 0.0019, B faster; logits 1x512" in lines["plain 4"] and "-> fused 16x" in lines["plain 4"]
    assert "1.0105 +- 0.0020, B slower; same choice" in lines["plain 16"]
    assert "only in A: logits" in lines["plain 128"]
    assert "6 buckets in both: 1 with another choice, 2 with a time beyond noise (1.96 combined" in out
    found = json.loads(tune("diff", path, file, "--json")[1])
    assert found["environment"] == {"effort": ["quick", "full"], "triton": ["3.7.0", "3.6.0"]}
    assert [one["within_noise"] for one in found["buckets"] if "ratio" in one] == [True, False, False, True, True, True]


def test_diff_of_a_table_with_itself_has_nothing_to_say(tune, file):
    _, out, _ = tune("diff", file, file)
    assert out.count("within noise; same choice") == 7
    assert "7 buckets in both: 0 with another choice, 0 with a time beyond noise" in out


# --- merge


def test_merge_takes_the_other_choice_only_where_it_is_better_beyond_noise(tune, file, tmp_path):
    other = with_bucket(TABLE, "plain", 1, us=283.5, use="fused-32")  # better, within noise
    other = with_bucket(other, "plain", 4, us=280.0, use="fused-16", tied=["read"])  # better
    other = with_bucket(other, "plain", 16, us=300.0, use="read")  # worse
    other.classes["greedy"] = {2: other.classes["plain"][4]}  # not in A
    del other.classes["plain"][128]  # not in B
    path, out = put(tmp_path / "b", other), tmp_path / "c"
    code, said, _ = tune("merge", file, path, "-o", out)
    assert code == 0 and said == f"{out}: 8 buckets, 1 of them better in {path}, 1 only there\n"
    merged, _ = lookup.load_table(out)
    for rows, table in ((1, TABLE), (4, other), (16, TABLE), (128, TABLE)):
        assert merged.classes["plain"][rows] == table.classes["plain"][rows]
    assert merged.classes["greedy"] == other.classes["greedy"]
    assert merged.classes["edit+truncate"] == TABLE.classes["edit+truncate"]
    assert merged.provenance == {"merged": [TABLE.provenance, other.provenance]}
    assert merged.rejected == TABLE.rejected
    assert os.stat(out).st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_merge_keeps_two_configurations_of_one_name_apart_and_drops_those_that_nobody_uses():
    mine, theirs = Choice.of(TileConfig(16, 64, 64, 4, 2)), Choice.of(TileConfig(32, 64, 64, 4, 2))
    a = dataclasses.replace(TABLE, configs=TABLE.configs | {"fused-16": mine, "idle": mine})
    b = with_bucket(dataclasses.replace(TABLE, configs=TABLE.configs | {"fused-16": theirs}), "plain", 1, us=200.0)
    merged, taken, added = joined(a, b)
    assert (taken, added) == (1, 0)
    assert merged.configs[merged.classes["plain"][1].use] == theirs
    assert merged.classes["plain"][16].use == "fused-16" and merged.configs["fused-16"] == mine, "A keeps its names"
    assert "idle" not in merged.configs and len(merged.configs) == 5
    again, _, _ = joined(merged, joined(b, a)[0])
    assert Table.loads(again.dumps()) == again, "merging tables that were merged does not nest without end"


def test_merge_stops_at_a_conflict_when_it_is_to_be_strict(tune, file, tmp_path):
    other = put(tmp_path / "b", with_bucket(TABLE, "plain", 4, use="fused-16"))
    code, _, err = tune("merge", file, other, "-o", tmp_path / "c", "--strict")
    assert code == 2
    assert err.startswith("error: plain 4 takes logits 1x512 warps 1 ctas_per_sm 32 in A and fused 16x128x256")
    assert not (tmp_path / "c").exists()
    same = put(tmp_path / "b", with_bucket(TABLE, "plain", 4, us=200.0))
    assert tune("merge", file, same, "-o", tmp_path / "c", "--strict")[0] == 0


def test_merge_may_write_over_one_of_its_inputs(tune, file, tmp_path):
    other = put(tmp_path / "b", with_bucket(TABLE, "plain", 4, us=200.0))
    assert tune("merge", file, other, "-o", file)[0] == 0
    assert lookup.load_table(file)[0].classes["plain"][4].us == 200.0
    assert sorted(os.listdir(tmp_path)) == ["b", TABLE.file_name]


# --- lint


def test_lint_passes_a_good_table_and_says_what_is_stale(tune, file, tmp_path):
    assert tune("lint", file) == (
        0,
        f"{file}: note: no buckets for truncate, edit\n1 of 1 tables are well-formed\n",
        "",
    )
    (tmp_path / "old").mkdir()
    old = put(tmp_path / "old" / TABLE.file_name, dataclasses.replace(TABLE, kernels={}))
    code, out, _ = tune("lint", file, old)
    assert code == 0, "an old table is still a table"
    assert f"{old}: stale: the kernels of fused have changed since it was measured" in out


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.write_text(path.read_text().replace("  ", " ")), "not in its canonical form"),
        (lambda path: path.write_text(path.read_text()[:-1]), "not in its canonical form"),
        (lambda path: path.write_text("{"), "it is not JSON"),
        (lambda path: put(path, with_bucket(TABLE, "plain", 1, n=1)), "classes.plain.1.n is 1; expected 2 or more"),
        (lambda path: put(path, with_bucket(TABLE, "plain", 1, gain=0.3)), "plain.1.gain is 0.3; its times give 0.070"),
        (lambda path: put(path, with_bucket(TABLE, "plain", 1, default_us=0)), "plain.1.default_us is 0.0; expected"),
        (lambda path: put(path, with_bucket(TABLE, "plain", 1, tied=["fused-16"])), "names fused-16, which it uses"),
        (lambda path: put(path, dataclasses.replace(TABLE, classes={})), "it has no buckets"),
        (lambda path: put(path, make_table(head=dataclasses.replace(HEAD, tp=2))), "its name is not fs1,device=NVIDIA"),
        (
            lambda path: put(path, dataclasses.replace(TABLE, configs=TABLE.configs | {"x": TABLE.configs["read"]})),
            "configs.x is used by no bucket",
        ),
        (
            lambda path: put(path, make_table(dataclasses.replace(H200, smem_optin=101_376))),
            "classes.plain.1 uses fused-16, which cannot run: its buffers take 221184 bytes",
        ),
    ],
    ids=range(11),
)
def test_lint_names_what_is_wrong_and_exits_with_one(tune, file, change, message):
    change(file)
    code, out, _ = tune("lint", file)
    assert code == 1
    assert f"{file}: error: " in out and message in out
    assert out.endswith("0 of 1 tables are well-formed\n")


def test_every_shipped_table_is_fit_to_be_shipped():
    shipped = Path(sgl_flashsample.__file__).parent / "tables"
    for path in sorted(shipped.glob("*")):
        assert lint.check(str(path))[0] == [], path
