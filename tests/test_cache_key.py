"""What one process has compiled, every other one finds on disk."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys

import sgl_flashsample

# Looking at kernels needs a process whose Triton is not the interpreter.
SCRIPT = """
import importlib, json, pkgutil, sys

sys.path[:] = json.loads(sys.argv[1])
import sgl_flashsample
sgl_flashsample.__path__[:] = json.loads(sys.argv[2])  # also where it is not installed
import triton
from sgl_flashsample import kernels
from sgl_flashsample.kernels.launch import compiling_only, launch

found = {}
for module in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda module: module.name):
    for name, value in vars(importlib.import_module(f"sgl_flashsample.kernels.{module.name}")).items():
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
            found[name] = value
first = sys.argv[3]
for name in sorted(found, key=lambda name: (name != first, name)):
    kernel = found[name]
    kernel.warmup = lambda *arguments, **options: None  # needs a GPU
    with compiling_only():
        launch(kernel, 1, (), {parameter.name: 0 for parameter in kernel.params if parameter.is_constexpr}, 4, ())
constants = {
    name: sorted((constant, str(value)) for (constant, _), (value, _) in kernel.used_global_vals.items())
    for name, kernel in found.items()
}
print(json.dumps({"keys": {name: kernel.cache_key for name, kernel in found.items()}, "constants": constants}))
"""


def looked_at(first: str = "") -> dict[str, dict]:
    """Of each kernel, its key and the constants that it uses. first: the kernel that Triton looks at first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [json.dumps(list(paths)) for paths in (sys.path, sgl_flashsample.__path__)]
    command = [sys.executable, "-c", SCRIPT, *paths, first]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_a_kernel_has_the_same_name_in_the_cache_whichever_was_launched_first():
    """Triton's own depends on that: seven orders, six sets of names."""
    alphabetical = looked_at()["keys"]
    assert len(alphabetical) >= 12 and len(set(alphabetical.values())) == len(alphabetical)
    for first in ("lm_head_sample_kernel", "screen_head_kernel", "rescore_groups_kernel", "draw_truncated_kernel"):
        assert first in alphabetical
        assert looked_at(first)["keys"] == alphabetical, first


def test_a_constant_that_two_modules_name_alike_has_one_value():
    """Triton puts the constants of a kernel in the order of their names, and of addresses where these are the same."""
    of_kernels = looked_at()["constants"].values()
    assert any(of_kernels)
    for constants in of_kernels:
        values = collections.defaultdict(set)
        for name, value in constants:
            values[name].add(value)
        assert all(len(found) == 1 for found in values.values()), dict(values)
