"""GPU tests of the kernels under NVIDIA's compute-sanitizer: accesses out of bounds, races, reads of what nobody wrote.

    python tests/proof/sanitized.py --out tests/proof/results/h200-sanitized.json --processes 16

Processes share the GPUs, and each runs some of the tests, one process after the other. PyTorch allocates each tensor by
itself (``PYTORCH_NO_CUDA_MEMORY_CACHING=1``), so that an access behind the end of a tensor is one out of bounds. CUDA
graphs cannot be captured that way: tests that do are left out. A row per tool has how many tests have run and their
outcomes, what the tool reports, with the kernel, and among which tests, and the first line of each failure. Where 13
processes share a card of 141 GB, some tests fail as its memory runs out. ``--select`` is pytest's ``-k``.

memcheck and initcheck also run on something planted, a kernel with the defect that they look for, and must report it.
The file is written as results come; nothing begins after ``--limit``. The exit code is 1 where a tool reports
something, a test fails, or what is planted is not noticed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from programs import MAX_REASON, ROOT, make_parser, new_env, write_result

from sgl_flashsample.files import one_line

TESTS = ROOT / "tests" / "kernels"
SELECTED = "not captured_graph and not thousand and not hundred_thousand and not no_longer_than"
TOOLS = ("memcheck", "racecheck", "initcheck")
PER_PROCESS = 16  # tests
# The first line of a report, and the kernel that the second one names.
REPORT = re.compile(r"^=+ ((?:Invalid|Error:|Uninitialized|Program hit) .*)(?:\n=+ +at ([^+(\n]*))?", re.M)
PLANTED = {
    "memcheck": """
@triton.jit
def defect(x, y):
    ids = tl.arange(0, 128)
    tl.store(y + ids, tl.load(x + 4 * ids))
""",
    "initcheck": """
@triton.jit
def defect(x, y):
    ids = tl.arange(0, 128)
    tl.store(y + ids, tl.load(x + ids))
""",
}
PROGRAM = """
import torch, triton, triton.language as tl
{kernel}
defect[1,](torch.empty(128, device="cuda"), torch.empty(128, device="cuda"))
torch.cuda.synchronize()
"""


@dataclasses.dataclass
class Tested:
    """Outcomes of the tests of one process, or of several. failures: the first line of each test that failed.
    reports: of the tool, by the names of the tests that one process ran."""

    outcomes: collections.Counter[str]
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    reports: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, other: Tested) -> None:
        self.outcomes += other.outcomes
        self.failures |= other.failures
        self.reports |= other.reports

    def row(self) -> dict[str, Any]:
        counts = collections.Counter(report for reports in self.reports.values() for report in reports)
        found = {"outcomes": dict(self.outcomes), "reports": dict(counts.most_common(20))}
        return found | {"reported_among": list(self.reports), "failures": self.failures}


class Tool:
    """``processes`` at a time, each on one of the GPUs."""

    def __init__(self, name: str, processes: int, ends: float, folder: Path) -> None:
        self.name, self.ends, self.folder = name, ends, folder
        self.pool = concurrent.futures.ThreadPoolExecutor(processes)
        self.gpus: queue.SimpleQueue[str] = queue.SimpleQueue()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        for _, gpu in zip(range(processes), itertools.cycle(visible.split(",")), strict=False):
            self.gpus.put(gpu)

    def run(self, number: int, *command: str) -> str:
        """The tool's log; of a command that ran until the end, it has the tool's summary."""
        log, gpu = self.folder / f"{self.name}-{number}.txt", self.gpus.get()
        variables = {"CUDA_VISIBLE_DEVICES": gpu, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        sanitizer = ["compute-sanitizer", "--tool", self.name, "--log-file", str(log)]
        try:
            subprocess.run(
                [*sanitizer, sys.executable, *command],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=max(1.0, self.ends - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return ""
        finally:
            self.gpus.put(gpu)
        return log.read_text() if log.exists() else ""

    def notices(self) -> bool | None:
        """True if it reports the planted error; None where nothing is planted for it."""
        if self.name not in PLANTED:
            return None
        file = self.folder / f"{self.name}.py"  # Triton reads the source of a kernel from its file
        file.write_text(PROGRAM.format(kernel=PLANTED[self.name]))
        return any("in defect" in report for report in reports_of(self.run(-1, str(file))))

    def test(self, number: int, names: list[str]) -> Tested:
        """These tests, in one process."""
        file = self.folder / f"{self.name}-{number}.xml"
        options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={file}")
        log = self.run(number, "-m", "pytest", *options, *names) if time.monotonic() < self.ends else ""
        if not file.exists() or "SUMMARY" not in log:
            return Tested(collections.Counter({"not run": len(names)}))
        outcomes, failures = collections.Counter[str](), {}
        for case in ElementTree.parse(file).iter("testcase"):  # our own file
            found = [child for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[found[0].tag if found else "passed"] += 1
            if found and found[0].tag != "skipped":
                failures[str(case.get("name"))] = one_line(found[0].get("message", ""), MAX_REASON)
        reports = reports_of(log)
        return Tested(outcomes, failures, {", ".join(names): reports} if reports else {})


def reports_of(log: str) -> list[str]:
    return [f"{what} in {kernel}" if kernel else what for what, kernel in REPORT.findall(log)]


def wrong(row: dict[str, Any]) -> bool:
    return bool(row["reports"] or {"failure", "error"} & {*row["outcomes"]} or row["planted_noticed"] is False)


def select(expression: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-k", expression, str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return [line for line in done.stdout.splitlines() if "::" in line]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--select", default=SELECTED, help="pytest's -k")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds per tool")
    options = parser.parse_args()
    os.chdir(ROOT)
    names = select(options.select)
    if not names:
        parser.error(f"--select is {options.select!r}, and no GPU test has such a name")
    env = new_env() | {"select": options.select}
    rows: list[dict[str, Any]] = []
    for name in options.tools:
        with tempfile.TemporaryDirectory() as folder:
            tool = Tool(name, options.processes, time.monotonic() + options.limit, Path(folder))
            row: dict[str, Any] = {"tool": name, "tests": len(names), "planted_noticed": tool.notices()}
            tested = Tested(collections.Counter())
            parts = [names[first : first + PER_PROCESS] for first in range(0, len(names), PER_PROCESS)]
            for of_part in tool.pool.map(tool.test, range(len(parts)), parts):
                tested.add(of_part)
                row |= tested.row()
                write_result(options.out, {"env": env, "rows": [*rows, row]})
        rows.append(row)
        print(row, flush=True)
    return int(any(map(wrong, rows)))


if __name__ == "__main__":
    sys.exit(main())
