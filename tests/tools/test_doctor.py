"""``sgl-flashsample doctor``: each finding with its remedy, whatever is broken; and what it asks about SGLang."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
import triton
from packaging.requirements import Requirement
from serving import needs_sglang
from tuned_tables import H200, make_entry, table_for_this_machine

from sgl_flashsample import cpu_path, selfcheck
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.sglang import versions
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.schema import HeadShape
from sgl_flashsample.tools import doctor


@pytest.fixture
def no_hook_targets(monkeypatch):
    """Skips the hook targets: importing SGLang for them takes long."""
    monkeypatch.setattr(versions, "HOOK_TARGETS", {})


@pytest.fixture
def compiled(monkeypatch):
    """Kernels are not interpreted, as on a machine of a user: in this process, and in those that it starts."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        os.environ.pop("TRITON_INTERPRET", None)  # the knob has set it
        yield


@pytest.mark.slow
def test_all_is_well_here(command, compiled):
    done = command("doctor")
    assert done.returncode == 0 and not [line for line in done.stderr.splitlines() if "takes a while" not in line]
    lines = done.stdout.splitlines()
    for level, what in (("ok", "Python 3."), ("ok", "torch 2."), ("ok", "triton 3."), ("ok", "self-test: ")):
        assert any(line.startswith(f"{level:8}{what}") for line in lines)
    assert not any(line.startswith("problem") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are checked instead")
def test_without_a_gpu_the_cpu_path_is_checked_where_numba_is_installed(compiled, monkeypatch):
    pytest.importorskip("numba")
    (finding,) = doctor.check_device()
    assert finding.what == "no CUDA device: rows are drawn in host memory, by the cpu path"
    (finding,) = doctor.check_kernels()
    assert finding.level == "ok"
    assert finding.what.startswith("self-test: the cpu path draws the reference's tokens (")
    monkeypatch.setattr(cpu_path, "unsupported_by_machine", lambda: "the cpu path needs Numba")
    assert not list(doctor.check_kernels())


@pytest.mark.slow
def test_triton_is_what_it_was_before_the_doctor_came(compiled):
    code = """
import os, sys
import triton.language as tl
from triton.runtime import interpreter

def state():
    names = {**vars(tl.core), **vars(tl.tensor), **vars(tl.dtype), **vars(tl.block_type), **vars(interpreter)}
    return {name: id(one) for name, one in names.items() if callable(one)}

before = state()
from sgl_flashsample.sglang import versions
from sgl_flashsample.tools import doctor
versions.HOOK_TARGETS = {}  # to import SGLang for them takes long
found = list(doctor.findings())
assert found[-1].what.startswith("self-test: "), found
assert state() == before and "TRITON_INTERPRET" not in os.environ and "lab" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_bare_python_is_told_what_to_install(command):
    done = command("doctor", hidden="torch,triton,numpy,msgspec")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("ok      Python 3.")
    for name in ("torch", "triton", "numpy", "msgspec"):
        assert f"problem {name} " in done.stdout
    assert "-> install torch again" in done.stdout


def test_a_package_that_breaks_at_import_is_a_finding_also_as_json(command, tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('compiled for another Python\\nmore')")
    done = command("doctor", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    problem = next(finding for finding in json.loads(done.stdout) if finding["level"] == "problem")
    version = importlib.metadata.version("numpy")
    what = f"numpy {version} does not import: ImportError: compiled for another Python"
    assert problem == {"level": "problem", "what": what, "advice": "install numpy again"}


@pytest.mark.parametrize(
    "requirement, level, what, advice",
    [
        ("numpy<99,>=1.26", "ok", "numpy ", ""),
        ("numpy", "ok", "numpy ", ""),
        ("numpy<1.27,>=1.26", "note", "is newer than what was tested", "pip install 'numpy<1.27,>=1.26'"),
        ("numpy>=99.0", "problem", " is not >=99.0", "pip install 'numpy>=99.0'"),
        (
            f"numpy!={np.__version__}",
            "problem",
            f" is not !={np.__version__}",
            f"pip install 'numpy!={np.__version__}'",
        ),
        ("no-such_package<2,>=1", "problem", "no-such_package is not installed", "pip install 'no-such_package<2,>=1'"),
    ],
)
def test_a_version_outside_of_the_tested_range_is_said(requirement, level, what, advice):
    finding = doctor.check_package(Requirement(requirement))
    assert finding.level == level
    assert what in finding.what and advice in finding.advice


def test_the_tested_range_is_that_of_this_package():
    findings = [finding.what for finding in doctor.check_packages()]
    names = ("Python", "torch", "triton", "msgspec", "numpy", "packaging")
    assert sorted(what.split()[0] for what in findings) == sorted(names)


@pytest.mark.parametrize("reason, level", [(None, "ok"), ("3 of 8 tokens differ", "problem")])
def test_the_self_test_says_how_the_kernels_differ(monkeypatch, reason, level):
    checked = []

    def check(head, rows, table):
        checked.append(head)
        return selfcheck.Checked(table, reason, ())

    monkeypatch.setattr(selfcheck, "refuse_wrong", check)
    (finding,) = doctor.check_kernels()
    assert finding.level == level and (reason or "configurations draw the reference's tokens") in finding.what
    (head,) = checked
    assert head.vocab_size > 2048, "a small top-k is drawn otherwise from fewer ids"


@pytest.mark.parametrize(
    "folder, level, words", [("/cache", "ok", "compiled once, into /cache"), (None, "note", "compiled at each start")]
)
def test_it_is_said_where_the_loops_of_the_cpu_path_are_kept(monkeypatch, folder, level, words):
    loops_cache = pytest.importorskip("sgl_flashsample.loops_cache", reason="needs Numba")
    monkeypatch.setattr(loops_cache, "cache_folder", lambda: folder)
    (finding,) = doctor.check_loops()
    assert finding.level == level and words in finding.what
    assert ("NUMBA_CACHE_DIR" in finding.advice) is (folder is None)


def test_without_numba_it_is_said_what_to_install_for_the_cpu_path(monkeypatch):
    monkeypatch.setattr(cpu_path, "unsupported_by_machine", lambda: "the cpu path needs Numba")
    (finding,) = doctor.check_loops()
    assert (finding.level, finding.what) == ("note", "the cpu path needs Numba")


def test_the_tables_that_servers_would_find_are_named_and_files_that_are_none(device, monkeypatch, tmp_path):
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "nowhere")
    here = table_for_this_machine(LMHead(torch.zeros(600, 32, device=device)))
    device_elsewhere = msgspec.structs.replace(H200, name="NVIDIA of another name")
    elsewhere = msgspec.structs.replace(
        here, device=device_elsewhere, head=HeadShape(vocab=700, hidden=32, dtype="fp32")
    )
    for table in (here, elsewhere):
        (tmp_path / table.file_name).write_text(table.dumps())
    (tmp_path / "fs2-broken.json").write_text("{")
    broken, finding = doctor.check_tables()
    assert broken.level == "note" and broken.what.startswith(f"{tmp_path / 'fs2-broken.json'} is not used: ")
    assert finding.level == "ok"
    assert finding.what == f"tuned tables for this device: 600 x 32 fp32 (exact, {lookup.FOLDERS_VARIABLE})"
    screened = make_entry("plain+screen", 4, ScreenConfig(16, 64, 32, 4, 2))
    here = msgspec.structs.replace(here, entries=[*here.entries, screened])
    (tmp_path / here.file_name).write_text(here.dumps())
    *_, finding = doctor.check_tables()
    assert finding.what.endswith(f"{lookup.FOLDERS_VARIABLE}, with a screen)")


def test_a_variable_that_a_server_would_not_read_is_a_finding(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("FLASHSAMPLE_")]:
        monkeypatch.delenv(name)
    assert not list(doctor.check_variables())
    monkeypatch.setenv("FLASHSAMPLE_SCREN", "on")
    monkeypatch.setenv("FLASHSAMPLE_SCREEN", "2")
    monkeypatch.setenv("FLASHSAMPLE_TUNED_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("FLASHSAMPLE_TUNED", str(tmp_path / "none.json"))
    found = list(doctor.check_variables())
    assert {finding.level for finding in found} == {"note"}
    assert [finding.what for finding in found] == [
        "FLASHSAMPLE_SCREEN is '2'; expected auto, on or off; using auto",
        "FLASHSAMPLE_SCREN is not a variable of this package; did you mean FLASHSAMPLE_SCREEN?",
        f"FLASHSAMPLE_TUNED_DIR: {tmp_path / 'none'} is not a folder",
        f"FLASHSAMPLE_TUNED: {tmp_path / 'none.json'} is not used: No such file or directory",
    ]


def test_a_check_that_fails_is_a_finding_and_the_others_are_made(monkeypatch, no_hook_targets):
    def fails(head, rows, table):
        raise RuntimeError("mask has unsupported dtype\nand more")

    monkeypatch.setattr(selfcheck, "refuse_wrong", fails)
    findings = list(doctor.findings())
    assert any(finding.what.startswith("SGLang ") for finding in findings)
    assert findings[-1].level == "problem"
    assert findings[-1].what == "check_kernels failed: RuntimeError: mask has unsupported dtype"


@needs_sglang
def test_an_sglang_that_would_not_use_the_plugin_has_its_remedies(monkeypatch):
    monkeypatch.setattr(versions, "HOOK_TARGETS", {"json.loads": ("s",), "json.nothing": ("self",)})
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    monkeypatch.setattr(versions, "entry_point_found", lambda: False)
    monkeypatch.setattr(versions, "sglang_version", lambda: "0.4.0")
    problems = [finding for finding in doctor.check_sglang() if finding.level == "problem"]
    for problem, word in zip(
        problems, ("SGLang 0.4.0", "not find the plugin", "SGLANG_PLUGINS=other", "json.nothing"), strict=True
    ):
        assert word in problem.what
    assert all(problem.advice for problem in problems)


@needs_sglang
def test_names_of_plugins_may_have_spaces_around_them(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, flashsample")
    assert not [finding for finding in doctor.check_sglang() if "SGLANG_PLUGINS" in finding.what]


# --- which SGLang


@pytest.mark.parametrize("version", ["0.5.17", "0.5.19", "0.5.21.post1", "0.5.23"])
def test_known_sglang_versions_are_accepted(version):
    assert versions.unsupported_version(version) is None


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "1.0", "unknown", "not installed"])
def test_an_unknown_sglang_version_is_named_with_those_that_are_known(version, monkeypatch):
    reason = versions.unsupported_version(version)
    assert f"SGLang {version} is not among the known versions 0.5.17 to 0.5.23" in reason
    monkeypatch.setenv(versions.ANY_VERSION_VARIABLE, "1")
    assert versions.unsupported_version(version) is None


def test_without_sglang_its_version_is_said_to_be_not_installed(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert versions.sglang_version() == "not installed"


def test_a_hook_target_that_is_missing_or_changed_is_named(monkeypatch):
    targets = {"json.nothing": ("self",), "json.loads": ("s", "strict"), "json.dumps": ("obj",)}
    monkeypatch.setattr(versions, "HOOK_TARGETS", targets)
    assert "json.nothing is missing" in versions.unsupported_target("json.nothing")
    assert "json.loads has parameters s, " in versions.unsupported_target("json.loads")
    assert versions.unsupported_target("json.dumps") is None
