"""The architecture, checked: imports point down, randomness has one home, nothing is loaded unsafely."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Lower layers first. A module may import its own layer and those below it.
LAYERS = ["kernels", "base", "autotune", "sglang", "top"]
SOURCES = sorted(p for folder in ("kernels", "autotune", "sgl_flashsample") for p in (ROOT / folder).rglob("*.py"))


def layer_of_module(module: str) -> str:
    parts = module.split(".")
    if parts[0] != "sgl_flashsample":
        return ""
    if len(parts) > 1 and parts[1] in ("kernels", "autotune", "sglang"):
        return parts[1]
    return "top" if len(parts) > 1 and parts[1] in ("cli", "doctor", "demo", "trace") else "base"


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "sgl_flashsample":
        parts.insert(0, "sgl_flashsample")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a source file imports, at any depth of its code."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found |= {prefix} if node.module else {f"{prefix}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_of_ours_that_is_imported_exists(path):
    """Also one that is imported only on a GPU."""
    modules = {module_name(source) for source in SOURCES}
    for name in imports(path):
        if layer_of_module(name):
            assert name in modules or name == "sgl_flashsample.__version__", f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path):
    own = layer_of_module(module_name(path))
    for name in imports(path):
        other = layer_of_module(name)
        if other:
            assert LAYERS.index(other) <= LAYERS.index(own), f"{own} imports {name}"
        if name.split(".")[0] == "sglang":
            assert own in ("sglang", "top"), f"{path} knows SGLang"
        if name.split(".")[0] == "optuna":
            assert own == "autotune"


def test_a_server_never_imports_the_autotuner():
    for path in SOURCES:
        if layer_of_module(module_name(path)) in ("kernels", "base", "sglang"):
            assert not any(name.startswith("sgl_flashsample.autotune") for name in imports(path)), path


def test_randomness_of_kernels_and_server_comes_from_rng_alone():
    pattern = re.compile(
        r"tl\.(rand|randint|randn|philox)|torch\.(rand|randn|randint|multinomial|bernoulli)\b|exponential_\("
    )
    allowed = {
        "kernels/rng.py",
        "sgl_flashsample/selftest.py",
        "sgl_flashsample/doctor.py",
    }  # the last two: test inputs
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if name not in allowed and not name.startswith(("sgl_flashsample/demo/", "autotune/")):
            assert not pattern.search(path.read_text()), name


def test_nothing_is_unpickled_evaluated_or_listened_on():
    pattern = re.compile(r"\b(pickle|dill|marshal)\b|\b(eval|exec)\(|torch\.load\b|yaml\.load\b|socket\.listen")
    for path in SOURCES:
        assert not pattern.search(path.read_text()), path


def test_no_file_is_longer_than_one_idea():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
