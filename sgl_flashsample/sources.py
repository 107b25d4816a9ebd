"""Which code of the kernels a tuned table was measured with, as a hash per path."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import pathlib
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from . import kernels

# The module of each path's launcher, in kernels/.
LAUNCHERS = {"fused": "lm_head_sample", "logits": "sample_logits", "screened": "screened_sample"}


@functools.cache
def sources_hash(path: str) -> str:
    """The installed kernels of a path, as "sha256:..." over what the device runs: the kernels that its launcher and the
    modules imported by it define, and all they use. Launchers, references, comments and other paths' kernels may change
    without it."""
    folder = pathlib.Path(kernels.__file__).parent
    modules = sorted(imported_from(folder, LAUNCHERS[path]))
    code = device_code([(folder / f"{module}.py").read_text(encoding="utf-8") for module in modules]).encode()
    return f"sha256:{hashlib.sha256(code).hexdigest()}"


def installed_sources() -> dict[str, str]:
    """``sources_hash`` of every path."""
    return {path: sources_hash(path) for path in LAUNCHERS}


def imported_from(folder: pathlib.Path, module: str) -> set[str]:
    """``module`` and what it imports from ``folder``, directly or not."""
    found: set[str] = set()
    new = {module}
    while new:
        name = new.pop()
        found.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [alias.name for alias in node.names] if node.module is None else [node.module]
                new |= set(names) - found
    return found


def device_code(sources: list[str]) -> str:
    """Of Python sources: the kernels (jitted functions whose names end so), and the functions, constants and
    enumerations of any of these sources that they use, without comments, docstrings and blank lines; the same under
    every version of Python."""
    statements = [statement for source in sources for statement in _statements(source)]
    used = {statement.name for statement in statements if statement.name.endswith("_kernel")}
    kept: set[int] = set()
    while new := {place for place, statement in enumerate(statements) if statement.name in used} - kept:
        kept |= new
        used = used.union(*(statements[place].uses for place in new))
    return "\n".join(statements[place].text for place in sorted(kept))


class _Statement(NamedTuple):
    name: str
    text: str
    uses: frozenset[str]  # names that it mentions, attributes too


def _statements(source: str) -> Iterator[_Statement]:
    """The jitted functions, constants and enumerations at the top of a module."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
                lines[row - 1] = ""
    for statement in tree.body:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        text = "\n".join(line.rstrip() for line in lines[first - 1 : statement.end_lineno] if line.strip())
        uses = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        uses |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        for name in _device_names(statement):
            yield _Statement(name, text, frozenset(uses))


def _device_names(statement: ast.stmt) -> list[str]:
    """What a statement defines that a kernel may use."""
    if isinstance(statement, ast.FunctionDef):
        jitted = any(".jit" in ast.unparse(decorator) for decorator in statement.decorator_list)
        return [statement.name] if jitted else []
    if isinstance(statement, ast.ClassDef):
        counted = any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in statement.bases)
        return [statement.name] if counted else []
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []
