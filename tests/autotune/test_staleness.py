"""Tables that are stale: their configurations compile to other machine code than was measured. Simulated devices
compile to whatever their file says; the last tests compile for a GPU that is not here."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest
from compiled import CACHE
from lab.simulated import code_of
from tune_examples import DEFAULT, ENV, OTHER, PLAIN, Notes, tune, verify
from tuned_tables import H200, make_entry, make_table

import sgl_flashsample
from sgl_flashsample.autotune import workload
from sgl_flashsample.autotune.decisions import decisions
from sgl_flashsample.autotune.labels import label_of
from sgl_flashsample.autotune.staleness import Compilers, Staleness
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kinds import KIND_NAMES
from sgl_flashsample.paths import Parts
from sgl_flashsample.tables import fingerprint, lookup
from sgl_flashsample.tables.lookup import known_stale, load_table
from sgl_flashsample.tables.schema import HeadShape

TRITON = importlib.metadata.version("triton")
ENTRIES = [make_entry("plain", 1, OTHER, us=1.0, n=2), make_entry("plain", 4, ReadConfig(1, 512, 1), us=1.0, n=2)]
ENTRIES = [msgspec.structs.replace(entry, code=code_of(label_of(entry.configuration, PLAIN))) for entry in ENTRIES]
# As a simulated device compiles it, by the Triton that is installed.
TABLE = make_table(env={"triton": TRITON}, entries=ENTRIES, confirmed={})
CHANGED = {"changed": [label_of(OTHER, PLAIN)]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / TABLE.file_name
    path.write_text(TABLE.dumps())
    return path


def test_lint_compiles_a_table_and_names_the_sizes_that_are_stale(command, file, simulated):
    code, out, err = command("lint", file, device=simulated())
    assert code == 0 and "stale" not in out
    assert err == "compiling what 2 batch sizes take on an NVIDIA H200, to compare the machine code\n"
    code, out, _ = command("lint", file, device=simulated(**CHANGED))
    assert code == 1 and f"{file}: stale: other machine code than was measured: plain 1\n" in out


def test_show_marks_the_sizes_that_are_stale(command, file, simulated):
    assert f"machine code: as measured, by Triton {TRITON}\n" in command("show", file, device=simulated())[1]
    _, out, _ = command("show", file, device=simulated(**CHANGED))
    assert "machine code: stale: other machine code than was measured: plain 1\n" in out
    first, second = (line for line in out.splitlines() if line.split()[:1] in (["1"], ["4"]))
    assert first.endswith("stale") and "stale" not in second
    shown = json.loads(command("show", file, "--json", device=simulated(**CHANGED))[1])
    assert shown["stale_sizes"] == ["plain 1"] and shown["unknown"] == ""


def test_a_process_that_cannot_compile_leaves_it_unknown(command, file, tmp_path):
    code, out, _ = command("lint", file, device=str(tmp_path / "missing.json"))
    assert code == 0 and "whether it is stale is not known: nothing could be compiled: " in out


def test_a_simulated_table_is_marked_and_not_fit_to_be_shipped(command, file):
    file.write_text(msgspec.structs.replace(TABLE, simulated=True).dumps())
    line = "its times are simulated: no server uses it"
    code, out, _ = command("lint", file)
    assert code == 1 and f"{file}: error: {line}\n" in out
    assert f"\n{line}\n" in command("show", file)[1]
    code, out, _ = command("explain", file, "--batch", 1, "--kind", "plain")
    assert code == 0 and f"({'exact'}: {line}; the named file)" in out


@pytest.mark.parametrize(
    "others, words",
    [(None, "an unknown number of other configurations"), (0, "no other configuration"), (1, "1 other configuration")],
)
def test_explain_says_against_how_many_other_configurations_a_choice_was_raced(command, file, others, words):
    entry = msgspec.structs.replace(ENTRIES[0], against=others)
    file.write_text(msgspec.structs.replace(TABLE, entries=[entry]).dumps())
    assert f"\nagainst   {words}\n" in command("explain", file, "--batch", 1, "--kind", "plain")[1]


def test_diff_says_where_the_same_choice_is_other_machine_code(command, file, tmp_path):
    other = tmp_path / "other"
    other.write_text(msgspec.structs.replace(TABLE, entries=[make_entry("plain", 1, OTHER, us=1.0, n=2)]).dumps())
    line = next(line for line in command("diff", file, other, "--all")[1].splitlines() if line.startswith("plain 1:"))
    assert line.endswith("same choice, compiled to other machine code")


# --- runs


@pytest.mark.slow
def test_a_run_records_machine_code_and_rivals_of_every_size_and_that_it_was_simulated(tmp_path, simulated):
    table = tune(tmp_path, simulated(costs={label_of(OTHER, PLAIN): {"1": 250.0}}), sizes=(1, 64)).table
    assert table.simulated and table.has_code
    for one in decisions(table):
        kind = one.kind.unscreened if one.entry.path != "screened" else one.kind
        assert one.entry.code == code_of(label_of(one.config, kind)) and one.entry.against >= 1, one
    assert table.entry("plain", 1).code == code_of(label_of(OTHER, PLAIN))


@pytest.mark.slow
def test_a_run_measures_what_is_stale_again_and_is_up_to_date_then(tmp_path, simulated):
    costs = {label_of(DEFAULT, PLAIN): {"1": 200.0}}
    tune(tmp_path, simulated(costs=costs), sizes=(1, 2))
    notes, device = Notes(), simulated(costs=costs, changed=[label_of(DEFAULT, PLAIN)])
    again = tune(tmp_path, device, notes, sizes=(1,))
    stale = [line for line in notes.lines if "other machine code than was measured: plain 1" in line]
    assert again.status == "done" and stale and stale[0].endswith("such sizes are measured again")
    assert again.table.sizes("plain") == [1] and again.table.sizes("truncate") == [1, 2], "what is stale is not kept"
    assert tune(tmp_path, device, sizes=(1,)).status == "up to date"


@pytest.mark.slow
def test_a_run_does_not_go_on_with_the_log_of_other_sources_of_the_kernels(tmp_path, simulated, monkeypatch):
    tune(tmp_path, simulated(), sizes=(1,))
    monkeypatch.setattr("sgl_flashsample.autotune.run._kernel_sources", lambda: "others")
    assert tune(tmp_path, simulated(), sizes=(1,)).status == "up to date", "its machine code is the same"
    notes = Notes()
    assert tune(tmp_path, simulated(), notes, sizes=(1, 2)).status == "done"
    assert any("the log of another device, version" in line for line in notes.lines)


@pytest.mark.slow
def test_verify_names_what_is_stale_though_its_times_hold(tmp_path, simulated):
    device = {"noise": 0.002, "costs": {label_of(DEFAULT, PLAIN): {"1": 200.0}}}
    result = tune(tmp_path, simulated(**device), sizes=(1,))
    code, line, replayed = verify(result.table, simulated(**device, changed=[label_of(DEFAULT, PLAIN)]))
    assert code == 0 and "; stale: other machine code than was measured: plain 1" in line
    assert [one.stale for one in replayed if one.kind == "plain"] == [True]
    code, line, _ = verify(result.table, simulated(**device, env=ENV | {"triton": "3.7.0"}))
    known = "it was measured with Triton 3.6.0, and 3.7.0 is installed"
    assert code == 0 and line.endswith(f"; whether it is stale is not known: {known}")


# --- compiled


def test_a_head_with_a_soft_cap_is_measured_with_the_one_that_servers_compare():
    assert workload.SOFTCAP == fingerprint.SOFTCAP


@pytest.mark.slow
def test_a_table_is_compiled_for_its_gpu_which_need_not_be_here():
    head, config, kind = HeadShape(vocab=4096, hidden=64, dtype="bf16"), ReadConfig(1, 512, 1), KIND_NAMES["greedy"]
    with Compilers(print) as compilers:
        (code,) = compilers.codes(H200, head, [(config, kind)])["codes"]
        entries = [make_entry("greedy", 4, config, code=code), make_entry("greedy", 8, config)]
        table = make_table(head=head, env={"triton": TRITON}, entries=entries, confirmed={})
        assert len(code) == 16 and compilers.staleness(table) == Staleness(sizes=((kind, 8),))


def codes_of(head, choices, device):
    parts = Parts.of(workload.empty_head(head, device))
    return [fingerprint.machine_code(*choice, parts) for choice in choices]


@pytest.mark.gpu
def test_a_gpu_compiles_to_the_machine_code_that_was_found_without_it(device, monkeypatch):
    """In a new process: torch.compile gives the one that calls it another assembler, ``TRITON_PTXAS_PATH``."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    head, here = HeadShape(vocab=4096, hidden=64, dtype="bf16"), lookup.device_of(device)
    choices = [(ReadConfig(1, 512, 1), KIND_NAMES["greedy"]), (TileConfig(16, 64, 32, 4, 2), KIND_NAMES["edit"])]
    with Compilers(print) as compilers:
        codes = compilers.codes(here, head, choices)["codes"]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(codes_of, head, choices, device).result() == codes


SHIPPED = sorted((Path(sgl_flashsample.__file__).parent / "tables").glob("fs2-*.json"))


def test_shipped_tables_are_of_full_effort_and_fresh_as_far_as_is_known_without_compiling():
    tables = [load_table(path)[0] for path in SHIPPED]
    assert tables and all(table.effort == "full" and table.has_code and not known_stale(table) for table in tables)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_table_is_stale(path):
    """Compiled by the release of Triton that it was measured with, unless test_compile.py has compiled the same."""
    table, _ = load_table(path)
    measured = table.env["triton"]
    folder = Path(sys.prefix, "triton-versions", measured)
    if measured != TRITON and not folder.is_dir():
        pytest.skip(f"needs Triton {measured}")
    environment = os.environ | CACHE | ({} if measured == TRITON else {"PYTHONPATH": str(folder)})
    command = [sys.executable, "-m", "sgl_flashsample", "tune", "lint", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "not known" not in done.stdout, done.stdout
