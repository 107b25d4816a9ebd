"""Files of an installation: the wheel that the sdist gives, an editable install, and a checkout as it is."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import test_deploy
from lab import bootstrap

from sgl_flashsample import __version__

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("sgl_flashsample/kernels", "sgl_flashsample/autotune")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package")]


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


def checkout() -> list[str]:
    """The files of the checkout and its links, but those that Git ignores."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return [name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the checkout, so that no build folder appears in it."""
    folder = tmp_path_factory.mktemp("source")
    for name in checkout():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def dist(source, tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel that is built from it: nothing that a wheel needs is missing there."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    return next(dist.glob("*.whl"))


def test_the_sdist_is_the_checkout_without_its_links_and_without_ci(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    made = ("PKG-INFO", "setup.cfg", "sgl_flashsample.egg-info/")
    left_out = (".ci/", ".github/", *LINKS)
    expected = {name for name in checkout() if not name.startswith(left_out)}
    assert {name for name in names if not name.startswith(made)} == expected


def test_an_index_would_take_the_sdist_and_the_wheel(dist):
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_wheel_holds_every_module_table_and_dashboard_once_and_nothing_else(wheel):
    """So ``test_layers.py``, which reads the modules of the three folders, reads all that is installed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    tables = (ROOT / "sgl_flashsample" / "tables").glob("*.json")
    expected = [f"sgl_flashsample/{name}" for name in ("py.typed", *(f"tables/{path.name}" for path in tables))]
    expected += [f"sgl_flashsample/sglang/monitoring/{name}" for name in ("alerts.yml", "grafana.json")]
    for folder, package in (("sgl_flashsample", ""), ("kernels", "kernels/"), ("autotune", "autotune/")):
        for path in (ROOT / folder).rglob("*.py"):
            expected.append(f"sgl_flashsample/{package}{path.relative_to(ROOT / folder).as_posix()}")
    assert sorted(names) == sorted(expected)


def test_what_the_image_copies_makes_the_same_wheel(source, wheel, tmp_path):
    (tmp_path / "src").mkdir()
    for name in test_deploy.copied():
        if (source / name).is_dir():
            shutil.copytree(source / name, tmp_path / "src" / name, symlinks=True)
        else:
            shutil.copy(source / name, tmp_path / "src")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", tmp_path / "src")
    (built,) = (tmp_path / "dist").iterdir()
    assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(wheel).namelist()


def test_a_checkout_that_is_not_installed_is_whole_from_any_folder(source, tmp_path):
    """The package links to the folders beside it, as Git keeps them."""
    for link in LINKS:
        assert (source / link).is_symlink() and (source / link).resolve() == source / Path(link).name
    names = ["sgl_flashsample.kernels.config", "sgl_flashsample.autotune.race", "sgl_flashsample.tools.server"]
    code = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    printed = run(sys.executable, "-c", code, *names, cwd=tmp_path, PYTHONPATH=str(source)).split()
    assert printed == [f"{source}/{name.replace('.', '/')}.py" for name in names]


CONSUMER = """\
from sgl_flashsample import SamplingParams
from sgl_flashsample.autotune.race import Ratio
from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.tools.server import Server

reveal_type(Ratio)
reveal_type(TileConfig)
reveal_type(Server)
SamplingParams(topk=50)
"""


def test_type_checkers_find_a_checkout_from_any_folder(tmp_path, monkeypatch):
    """mypy and pyright read path files and directories, and run no finder of imports."""
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / "venv")
    bootstrap.write_site_files(gpu=True)
    python = tmp_path / "venv" / "bin" / "python"
    program = tmp_path / "project" / "consumer.py"
    program.parent.mkdir()
    program.write_text(CONSUMER)
    mypy = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--python-executable", str(python)]
    done = subprocess.run([*mypy, program.name], cwd=program.parent, capture_output=True, text=True, check=False)
    *notes, error, _ = done.stdout.splitlines()
    assert len(notes) == 3 and not any('"Any"' in note for note in notes), done.stdout
    assert 'Unexpected keyword argument "topk" for "SamplingParams"' in error
    shown = subprocess.run([python, "-c", "import sgl_flashsample"], cwd=program.parent, capture_output=True, text=True)
    assert "No module named 'sgl_flashsample'" in shown.stderr, "Python itself goes by what is installed"


def test_metadata_name_license_entry_points_and_light_bounded_dependencies(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(info).decode()
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert f"Name: sgl-flashsample\nVersion: {__version__}\n" in text
    assert "License-Expression: Apache-2.0" in text
    requirements = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("Requires-Dist")]
    needed = {re.split("[<>=]", line)[0]: line for line in requirements if "extra ==" not in line}
    assert sorted(needed) == ["msgspec", "numpy", "packaging", "torch", "triton"]
    assert all(re.search("<[0-9.]+", line) for line in needed.values()), "untested minors are not installed"
    for extra in ("sglang", "flashinfer", "tune", "test"):
        assert f"Provides-Extra: {extra}" in text
    assert "Author: The sgl-flashsample maintainers" in text and "Project-URL: Paper, https://arxiv.org/" in text
    assert "flashsample = sgl_flashsample.sglang.plugin:register" in points
    assert "sgl-flashsample = sgl_flashsample.cli:main" in points


def repository(source: Path, folder: Path) -> Path:
    """A Git repository with these files as its only commit."""
    shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns("benchmarks", "tests"))
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        run(*git, *command)
    return folder


@pytest.mark.parametrize("way", ["wheel", "editable", "git"])
def test_an_installation_puts_only_sgl_flashsample_into_site_packages(source, wheel, tmp_path, way):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    if way == "wheel":
        run(*install, wheel)
    else:
        # No isolation: the build backend comes from the environment that runs the tests.
        backend = str(importlib.metadata.distribution("setuptools").locate_file(""))
        what = ["-e", source] if way == "editable" else [f"git+file://{repository(source, tmp_path / 'git')}"]
        run(*install, "--no-build-isolation", "--ignore-installed", *what, PYTHONPATH=backend)
    site = next((environment / "lib").glob("python*/site-packages"))
    assert all("sgl_flashsample" in path.name for path in site.iterdir() if path.name != "__pycache__")
    code = "import sgl_flashsample as s, importlib.util as u; print(s.__version__, u.find_spec('kernels'))"
    code += "; [print(u.find_spec(f'sgl_flashsample.{n}').name) for n in ('kernels', 'autotune', 'sglang', 'tables')]"
    printed = run(python, "-c", code, cwd=tmp_path).split()
    assert printed[:2] == [__version__, "None"] and len(printed) == 6
    assert "serve" in run(environment / "bin" / "sgl-flashsample", "--help")


def test_beside_what_is_installed_here_an_installation_changes_no_version(wheel):
    # With no index to get any from, pip succeeds only if the installed dependencies already do.
    report = run(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-q", "--report", "-", wheel)
    assert {item["metadata"]["name"] for item in json.loads(report)["install"]} <= {"sgl-flashsample"}


def test_the_folders_refuse_to_be_imported_under_their_generic_names():
    for name in ("kernels", "autotune"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"this folder is sgl_flashsample.{name}" in done.stderr
