"""What a compiled kernel takes of a multiprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def register_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread (spills). Raises ValueError where that cannot be told,
    OSError and CalledProcessError where CUDA's tool does not run."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise ValueError(f"cuobjdump reports no resource usage: {report[:200]!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
