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
UNPATCHED = ("torch", "triton", "sglang", "transformers")  # packages of others
CHANGES = ("append", "clear", "insert", "pop", "remove", "setdefault", "update")  # methods of lists and dictionaries
KERNELS = [path for path in SOURCES if path.parent.name == "kernels"]


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


def test_every_module_of_ours_that_is_imported_exists():
    """Also modules that are imported only on a GPU."""
    ours = [(module, name) for module, path in MODULES.items() for name in imports(path) if layer_of(name)]
    assert not [f"{module} imports {name}" for module, name in ours if name not in MODULES]


def test_imports_point_down():
    """Only the SGLang layer imports SGLang, and only the tuner imports Optuna."""
    importers = {"sglang": ("sglang", "top"), "optuna": ("autotune",)}
    faults = []
    for module, path in MODULES.items():
        layer = layer_of(module)
        for name in imports(path):
            known = layer_of(name) in {None, *BELOW[layer]}
            if not known or layer not in importers.get(name.split(".")[0], BELOW):
                faults.append(f"{module} ({layer}) imports {name}")
    assert not faults, "\n".join(faults)


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
    test_inputs = {"kernels/rng.py", "sgl_flashsample/selfcheck.py", "sgl_flashsample/screen_race.py"}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if name not in test_inputs and not name.startswith(("sgl_flashsample/tools/", "autotune/")):
            assert not pattern.search(path.read_text()), name


def lines() -> Iterator[tuple[str, str]]:
    """The name of a source's file and one of its lines."""
    for path in SOURCES:
        for line in path.read_text().splitlines():
            yield path.relative_to(ROOT).as_posix(), line


def test_the_environment_variables_of_this_package_are_read_in_one_file():
    """Elsewhere their names are only set, for processes that are started."""
    named = re.compile(r"[\"']FLASHSAMPLE_|_VARIABLE\b")
    read = re.compile(r"environ\.get\(|getenv\(|environ\[[^]]*\](?! =)")
    readers = [f"{file}: {line}" for file, line in lines() if named.search(line) and read.search(line)]
    assert not [reader for reader in readers if not reader.startswith("sgl_flashsample/switches.py:")]


def test_nothing_is_unpickled_evaluated_or_listened_on():
    pattern = re.compile(r"\b(pickle|dill|marshal)\b|\b(eval|exec)\(|torch\.load\b|yaml\.load\b|socket\.listen")
    assert not [f"{file}: {line}" for file, line in lines() if pattern.search(line)]


def patches(source: str) -> list[str]:
    """Lines of a source that change a module or class of another project, or how modules are found."""
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
            foreign |= {name for name, module in named.items() if module.split(".")[0] in UNPATCHED}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in UNPATCHED:
            foreign |= {alias.asname or alias.name for alias in node.names}

    def is_foreign(node: ast.AST) -> bool:
        """True for such a module or class, something in it, its dictionary, or a list of Python's imports.
        ``triton.knobs`` is none of them: it holds Triton's settings."""
        if ast.unparse(node).startswith("triton.knobs."):
            return False
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            if ast.unparse(node) in ("sys.modules", "sys.meta_path", "sys.path_hooks"):
                return True
            if isinstance(node, ast.Call):
                if not (isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args):
                    return False
                node = node.args[0]
            else:
                node = node.value
        return isinstance(node, ast.Name) and node.id in foreign

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "_")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owner = node.func.value
            targets = [owner] if isinstance(owner, ast.Attribute | ast.Call) else []
        changed = any(isinstance(one, ast.Attribute | ast.Subscript | ast.Call) and is_foreign(one) for one in targets)
        if changed:
            found.append(ast.unparse(node).splitlines()[0])
    return found


def test_nothing_of_triton_sglang_or_torch_is_patched():
    """SGLang is extended through its registry of hooks and its entry points alone."""
    found = {path.relative_to(ROOT).as_posix(): patches(path.read_text()) for path in SOURCES}
    assert {name: patched for name, patched in found.items() if patched} == {}


@pytest.mark.parametrize("name", ["interpreter", "cpu_platform", "torchvision_schemas"])
def test_the_harness_of_the_tests_does_patch_and_is_found(name):
    assert patches((ROOT / "tests" / "lab" / f"{name}.py").read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compile = None",
        "import triton.language as tl\ntl.dtype.__eq__ = print",
        "def f():\n    from sglang.srt import utils\n    setattr(utils, 'x', 1)",
        "from torch import nn\nvars(nn).update(Linear=None)",
        "import sys\nsys.modules['torchvision'] = None",
        "import sys\nsys.modules |= {'sgl_kernel': None}",
        "import torch\ndel torch.compile",
        "import torch, triton\ntorch.a, triton.b = 1, 2",
    ],
)
def test_each_way_to_patch_is_found(source):
    assert len(patches(source)) == 1


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
