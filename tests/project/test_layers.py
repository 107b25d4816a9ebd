"""The architecture: imports point down and close no circle, randomness has one home, nothing is loaded unsafely."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "sgl_flashsample", "autotune")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Layer -> what it may import. What a person runs is on top; the tuner and the server do not know one another.
BELOW = {
    "kernels": {"kernels"},
    "base": {"kernels", "base"},
    "autotune": {"kernels", "base", "autotune"},
    "sglang": {"kernels", "base", "sglang"},
    "top": {"kernels", "base", "autotune", "sglang", "top"},
}
KERNELS = [path for path in SOURCES if path.parent.name == "kernels"]
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())


def layer_of(module: str) -> str | None:
    """The layer of a module; None for a module that is not of this project."""
    parts = module.split(".")
    if parts[0] != "sgl_flashsample":
        return None
    if len(parts) > 1 and parts[1] in ("kernels", "autotune", "sglang"):
        return parts[1]
    return "top" if len(parts) > 1 and parts[1] in ("__main__", "cli", "tools") else "base"


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "sgl_flashsample":
        parts.insert(0, "sgl_flashsample")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def run_by_python(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, at any depth, but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from run_by_python(node)


def imports(path: Path, *, types_too: bool = True) -> set[str]:
    """Absolute names of the modules that a source imports, also within functions. types_too: also for types alone."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree) if types_too else run_by_python(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{prefix}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else prefix for name in inside}
    return names


@each_source
def test_every_module_of_ours_that_is_imported_exists(path):
    """Also modules that are imported only on a GPU."""
    assert {name for name in imports(path) if layer_of(name)} <= MODULES.keys()


@each_source
def test_imports_point_down(path):
    """Only the SGLang layer imports SGLang, and only the tuner imports Optuna."""
    layer = layer_of(module_of(path))
    for name in imports(path):
        assert layer_of(name) in {None, *BELOW[layer]}, f"{layer} imports {name}"
        if name.split(".")[0] == "sglang":
            assert layer in ("sglang", "top"), f"{path} knows SGLang"
        if name.split(".")[0] == "optuna":
            assert layer == "autotune"


def test_kernels_know_torch_and_triton_and_nothing_else():
    names = {name.split(".")[0] for path in KERNELS for name in imports(path)}
    assert names - sys.stdlib_module_names == {"sgl_flashsample", "torch", "triton"}


def test_no_import_closes_a_circle():
    """Over all modules, with imports inside functions and without imports for type checkers."""
    graph = {
        module: {name for name in imports(path, types_too=False) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert set(order) == MODULES.keys()


def test_randomness_of_kernels_and_server_comes_from_rng_alone():
    pattern = re.compile(
        r"tl\.(rand|randint|randn|philox)|torch\.(rand|randn|randint|multinomial|bernoulli)\b|exponential_\("
    )
    test_inputs = {"kernels/rng.py", "sgl_flashsample/selfcheck.py"}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if name not in test_inputs and not name.startswith(("sgl_flashsample/tools/", "autotune/")):
            assert not pattern.search(path.read_text()), name


@each_source
def test_the_environment_variables_of_this_package_are_read_in_one_file(path):
    """Elsewhere their names are only set, for processes that are started."""
    if path.name != "switches.py":
        for line in path.read_text().splitlines():
            named = re.search(r"[\"']FLASHSAMPLE_|_VARIABLE\b", line)
            assert not (named and re.search(r"environ\.get\(|getenv\(|environ\[[^]]*\](?! =)", line)), line


@each_source
def test_nothing_is_unpickled_evaluated_or_listened_on(path):
    pattern = re.compile(r"\b(pickle|dill|marshal)\b|\b(eval|exec)\(|torch\.load\b|yaml\.load\b|socket\.listen")
    assert not pattern.search(path.read_text())


def test_rows_that_may_be_far_apart_are_addressed_in_64_bits():
    """A row's place times a stride of its tensor: of a head or of logits, more than an int32 holds."""
    products = [
        (path.name, line.strip())
        for path in KERNELS
        for line in path.read_text().splitlines()
        if re.search(r"\* (weight_|hidden_|raw_|limbs_)?stride\b", line)
    ]
    assert len(products) >= 8
    for name, line in products:
        assert "int64" in line, f"{name}: {line}"


def test_every_kernel_has_a_launcher_and_a_test():
    """The launcher has the kernel's name and is in the kernel's file. A test calls the launcher."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "kernels").glob("*.py"))
    kernels = {
        function.removesuffix("_kernel"): path
        for path in KERNELS
        for function in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert len(kernels) >= 14
    for name, path in kernels.items():
        assert re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE), f"{name} has no launcher"
        assert re.search(rf"\b{name}\(", tests), f"{name} has no test that calls its launcher"
