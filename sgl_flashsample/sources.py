"""Which code of the kernels a tuned table was measured with, as a hash per path."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import pathlib
import tokenize

from . import kernels

# The module of each path's launcher, in kernels/.
LAUNCHERS = {"fused": "lm_head_sample", "logits": "sample_logits"}


@functools.cache
def sources_hash(path: str) -> str:
    """The installed kernels of a path, as "sha256:..." over what the device runs: the code of the kernels that its
    launcher and the modules imported by it define, and of their constants. Launchers, references and comments may
    change without it."""
    folder = pathlib.Path(kernels.__file__).parent
    digest = hashlib.sha256()
    for module in sorted(imported_from(folder, LAUNCHERS[path])):
        code = device_code((folder / f"{module}.py").read_text(encoding="utf-8")).encode()
        if code:
            digest.update(f"{module} {len(code)}\n".encode())
            digest.update(code)
    return f"sha256:{digest.hexdigest()}"


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


def device_code(source: str) -> str:
    """Of Python source: kernels and the functions they call, constants and enumerations, without comments, docstrings
    and blank lines; the same under every version of Python."""
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
    kept: list[str] = []
    for statement in filter(_reaches_the_device, tree.body):
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        kept += lines[first - 1 : statement.end_lineno]
    return "\n".join(line.rstrip() for line in kept if line.strip())


def _reaches_the_device(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return any(".jit" in ast.unparse(decorator) for decorator in statement.decorator_list)
    if isinstance(statement, ast.ClassDef):
        return any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in statement.bases)
    return isinstance(statement, ast.Assign | ast.AnnAssign)
