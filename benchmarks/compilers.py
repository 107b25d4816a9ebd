"""What releases of Triton make of the built-in configurations: registers, spills and shared memory, without a GPU.

    python benchmarks/compilers.py --out results/compilers.json --triton 3.6.0=FOLDER 3.7.1=FOLDER 3.8.0=FOLDER

Each FOLDER holds an unpacked wheel of that release (``pip install --no-deps --target FOLDER triton==VERSION``). All
configurations are compiled for sm90 through their own launchers (``tests/compile_targets.py``). Where another release
needs other registers, a tuned table may name what is no longer the fastest (``Match.OTHER_VERSIONS``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

from common import today, write_result

from sgl_flashsample import __version__

COMPILE_TARGETS = Path(__file__).resolve().parents[1] / "tests" / "compile_targets.py"
NAMES = ("registers", "spilled", "shared")


def resources(folder: str, capability: int) -> dict[str, list[int]]:
    """Per launch and kernel, ``NAMES``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(COMPILE_TARGETS), "resources", str(capability), "--full"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{folder}: {done.stderr.strip().splitlines()[-1]}")
    used = json.loads(done.stdout.splitlines()[-1])
    return {f"{one['launch']}, {one['kernel']}": [one[name] for name in NAMES] for one in used}


def compared(first: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, object]:
    """How far ``other`` is from ``first``: kernels of both, how many need other resources, and by how much at most."""
    both = [(first[name], other[name]) for name in first.keys() & other.keys()]
    more = [tuple(b - a for a, b in zip(mine, theirs, strict=True)) for mine, theirs in both]
    return {
        "kernels": len(both),
        "missing": len(first) - len(both),
        "other registers": sum(registers != 0 for registers, _, _ in more),
        "more registers, at most": max((registers for registers, _, _ in more), default=0),
        "more spilled bytes, at most": max((spilled for _, spilled, _ in more), default=0),
        "more shared bytes, at most": max((shared for _, _, shared in more), default=0),
    }


def largest(used: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    """Per kernel the largest of each of ``NAMES`` over all launches."""
    by_kernel: dict[str, list[int]] = {}
    for launch, numbers in used.items():
        kernel = launch.rpartition(", ")[2]
        by_kernel[kernel] = [max(pair) for pair in zip(by_kernel.get(kernel, numbers), numbers, strict=True)]
    return {kernel: dict(zip(NAMES, numbers, strict=True)) for kernel, numbers in sorted(by_kernel.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--triton", nargs="+", required=True, metavar="VERSION=FOLDER", help="releases, the base first")
    parser.add_argument("--capability", type=int, default=90, help="compute capability, times ten (default: 90)")
    options = parser.parse_args()
    releases = dict(text.split("=", 1) for text in options.triton)
    with ThreadPool(len(releases)) as pool:
        per_release = pool.starmap(resources, [(folder, options.capability) for folder in releases.values()])
    used = dict(zip(releases, per_release, strict=True))
    base, *others = releases
    result = {
        "env": {
            "sgl_flashsample": __version__,
            "date": today(),
            "command": f"python benchmarks/compilers.py --triton {' '.join(f'{one}=FOLDER' for one in releases)}",
        },
        "capability": options.capability,
        "base": base,
        "compared": {version: compared(used[base], used[version]) for version in others},
        "most": {version: largest(one) for version, one in used.items()},
    }
    write_result(options.out, result)
    for version in others:
        print(f"{base} -> {version}: {result['compared'][version]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
