"""Every shipped tile compiled to real machine code, without a GPU: it fits the device and spills no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Shared memory per program that a device of each compute capability offers.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
FAMILY = {80: "sm80", 86: "sm80", 90: "sm90", 100: "sm100"}

# Compiling needs a process whose Triton is not the interpreter.
SCRIPT = """
import dataclasses, json, sys
import torch
sys.path[:0] = json.loads(sys.argv[1])
try:
    import sgl_flashsample.kernels
except ImportError:
    import sgl_flashsample
    sgl_flashsample.__path__.append(sys.path[1])
from sgl_flashsample.autotune.compile import resources_of_lm_head_sample, resources_of_reduce_parts
from sgl_flashsample.tuned import TABLE
capability, family = int(sys.argv[2]), sys.argv[3]
found = []
for (name, itemsize), entries in TABLE.items():
    if name != family:
        continue
    dtypes = [torch.bfloat16, torch.float16] if itemsize == 2 else [torch.float32]
    for _, tile in entries:
        for dtype in dtypes:
            for options in ({}, {"return_logprob": True}, {"softcap": True}):
                if dtype is torch.float16 and options:
                    continue
                used = resources_of_lm_head_sample(capability, 4096, dtype, tile, **options)
                found.append([f"{tile} {dtype} {options}", dataclasses.asdict(used)])
        used = resources_of_reduce_parts(capability, tile, 256, return_logprob=True)
        found.append([f"reduction of {tile}", dataclasses.asdict(used)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_every_shipped_tile_compiles_fits_and_spills_nothing(capability, request):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(request.config.rootpath / "tests"), str(request.config.rootpath)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(roots), str(capability), FAMILY[capability]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 10
    for name, used in found:
        assert used["spilled"] == 0, f"{name} spills {used['spilled']} bytes per thread on sm{capability}"
        assert used["shared"] <= SHARED_LIMIT[capability], f"{name} needs {used['shared']} bytes on sm{capability}"
