"""What an installation puts where: wheel, wheel from the sdist, and editable install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The wheel, the sdist, and a wheel built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, tracked):  # a copy, so that no build folder appears in the checkout
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    (source / "sgl_flashsample" / "tables").mkdir(exist_ok=True)
    (source / "sgl_flashsample" / "tables" / "fs1,device=none.json").write_text("{}")  # also where none is shipped yet
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", folder, source)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    unpacked = next((folder / "unpacked").iterdir())
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "second", unpacked)
    return {
        "wheel": next(folder.glob("*.whl")),
        "sdist": sdist,
        "second": next((folder / "second").glob("*.whl")),
        "source": source,
    }


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_nothing_but_sgl_flashsample(built):
    names = modules(built["wheel"])
    assert {name.split("/")[0] for name in names} == {"sgl_flashsample"}
    for folder, package in (("sgl_flashsample", ""), ("kernels", "kernels/"), ("autotune", "autotune/")):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder).as_posix()
            assert f"sgl_flashsample/{package}{relative}" in names
    assert "sgl_flashsample/py.typed" in names
    shipped = {path.name for path in (ROOT / "sgl_flashsample" / "tables").glob("*.json")} | {"fs1,device=none.json"}
    assert {f"sgl_flashsample/tables/{name}" for name in shipped} <= names
    assert all(name.endswith((".py", "py.typed", ".txt", ".json")) for name in names)


def test_the_sdist_builds_the_same_wheel(built):
    assert modules(built["second"]) == modules(built["wheel"])


def test_metadata_name_license_entry_points_and_light_dependencies(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(info).decode()
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "Name: sgl-flashsample\n" in text
    assert "License-Expression: Apache-2.0" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0] for line in required) == ["torch", "triton"]
    for extra in ("sglang", "flashinfer", "tune", "test"):
        assert f"Provides-Extra: {extra}" in text
    assert "flashsample = sgl_flashsample.sglang.plugin:register" in points
    assert "sgl-flashsample = sgl_flashsample.cli:main" in points


@pytest.mark.parametrize("how", ["wheel", "second", "editable"])
def test_an_installation_puts_only_sgl_flashsample_into_site_packages(built, tmp_path, how):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    before = {path.name for path in site.iterdir()}
    if how == "editable":
        # No index and no isolation: the build backend comes from the environment that runs the tests.
        backend = str(importlib.metadata.distribution("setuptools").locate_file(""))
        install = ["install", "-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "-e", built["source"]]
        run(python, "-m", "pip", *install, PYTHONPATH=backend)
    else:
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", built[how])
    added = {path.name for path in site.iterdir()} - before - {"__pycache__"}
    assert all("sgl_flashsample" in name for name in added), added
    code = "import sgl_flashsample as s, importlib.util as u; print(s.__version__, u.find_spec('kernels'))"
    assert run(python, "-c", code, cwd=tmp_path).strip() == "0.1.0 None"
    for name in ("kernels", "autotune", "sglang", "demo"):
        find = f"import importlib.util as u; print(u.find_spec('sgl_flashsample.{name}') is not None)"
        assert run(python, "-c", find, cwd=tmp_path).strip() == "True"
    assert "serve" in run(environment / "bin" / "sgl-flashsample", "--help")


def test_beside_what_is_installed_here_an_installation_changes_no_version(built):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-index",
        "--quiet",
        "--report",
        "-",
        "--force-reinstall",
    ]
    # --force-reinstall shows the wheel itself even where it is installed already; --no-deps would hide the question.
    report = run(
        *[part for part in pip if part != "--force-reinstall"], "--ignore-installed", "--no-deps", built["wheel"]
    )
    assert [item["metadata"]["name"] for item in json.loads(report)["install"]] == ["sgl-flashsample"]
    # With dependencies, and no index to get any from, pip succeeds only if the installed ones already do.
    report = run(*pip[:-1], built["wheel"])
    assert {item["metadata"]["name"] for item in json.loads(report)["install"]} <= {"sgl-flashsample"}


def test_the_folders_refuse_to_be_imported_under_their_generic_names():
    for name in ("kernels", "autotune"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"this folder is sgl_flashsample.{name}" in done.stderr
