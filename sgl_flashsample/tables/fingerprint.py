"""Fingerprints of the kernels that a tuned table was measured with: a hash per path, over the code of the device."""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib
from typing import Any

from .. import kernels
from ..kinds import SamplingPath

# The module of each path's launcher, in kernels/.
LAUNCHERS = {
    SamplingPath.FUSED: "lm_head_sample",
    SamplingPath.LOGITS: "sample_logits",
    SamplingPath.SCREENED: "screened_sample",
}
_IGNORED = {
    "ctx",
    "kind",
    "type_comment",
    "type_params",
}  # fields of syntax trees that differ between versions of Python


@functools.cache
def kernel_fingerprint(path: str) -> str:
    """The installed kernels of a path, as "sha256:...": the jitted functions, constants and enumerations of its
    launcher's module and of those that it imports. Launchers, references, comments, docstrings and layout may change
    without it, and so may the version of Python."""
    folder = pathlib.Path(kernels.__file__).parent
    digest = hashlib.sha256()
    for module in sorted(_imported_from(folder, LAUNCHERS[SamplingPath(path)])):
        for statement in ast.parse((folder / f"{module}.py").read_text(encoding="utf-8")).body:
            if _is_device_code(statement):
                digest.update(repr(_canonical(statement)).encode())
    return f"sha256:{digest.hexdigest()}"


def installed_fingerprints() -> dict[str, str]:
    """``kernel_fingerprint`` of every path."""
    return {path.value: kernel_fingerprint(path) for path in LAUNCHERS}


def _imported_from(folder: pathlib.Path, module: str) -> set[str]:
    """``module`` and what it imports from ``folder``, directly or not."""
    modules: set[str] = set()
    new = {module}
    while new:
        name = new.pop()
        modules.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [alias.name for alias in node.names] if node.module is None else [node.module]
                new |= set(names) - modules
    return modules


def _is_device_code(statement: ast.stmt) -> bool:
    """True where a kernel may use the name that the statement defines."""
    if isinstance(statement, ast.FunctionDef):
        return any(".jit" in ast.unparse(decorator) for decorator in statement.decorator_list)
    if isinstance(statement, ast.ClassDef):
        return any(ast.unparse(base).endswith(("Enum", "Flag", "NamedTuple")) for base in statement.bases)
    return isinstance(statement, ast.Assign)


def _canonical(node: Any) -> Any:
    """A syntax tree as nested lists, without docstrings and without fields that differ between versions of Python."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED]
    return [type(node).__name__, *((name, _canonical(value)) for name, value in fields if value not in (None, []))]
