"""Branch coverage of the host code that a server process runs, by the tests that start no server.

    python tests/proof/host_coverage.py --out tests/proof/results/coverage.json
    python tests/proof/host_coverage.py --keep -k WORDS    # these tests beside those of the last run

``pyproject.toml``, ``[tool.coverage]`` says which code. Kernels are left out: no tracer sees what a device runs. A line
with ``# coverage: needs REASON`` is left out with the block that it opens, and so is the other way of a line with
``# coverage: else needs REASON``; the result counts both by their reason.

The exit code is 1 where a test fails, or a branch or statement is not covered.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from programs import ROOT, command_line, today, write_result

RESULT = ROOT / "tests" / "proof" / "results" / "coverage.json"
DATA = ROOT / ".cache" / "coverage"
TESTS = ("tests/core", "tests/kernels", "tests/sglang", "tests/tools")
EXCLUDED = re.compile(r"# coverage: (?:else )?needs (.+)")
COUNTS = {
    "statements": "num_statements",
    "missing_statements": "missing_lines",
    "branches": "num_branches",
    "missing_branches": "missing_branches",
}


def coverage(*arguments: str) -> int:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "COVERAGE_FILE": str(DATA / "data")}
    return subprocess.call([sys.executable, "-m", "coverage", *arguments], env=environment, cwd=ROOT)


def summary(totals: dict[str, Any]) -> dict[str, Any]:
    counts = {name: totals[key] for name, key in COUNTS.items()}
    branches = counts["branches"]
    return counts | {"percent": round(100 - 100 * counts["missing_branches"] / branches, 2) if branches else 100.0}


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Per module its counts, and what is missing: lines, and the two ends of branches."""
    rows = []
    for module, about in sorted(report["files"].items()):
        missing = [*map(str, about["missing_lines"]), *(f"{one}->{other}" for one, other in about["missing_branches"])]
        rows.append({"module": module, **summary(about["summary"]), **({"missing": missing} if missing else {})})
    return rows


def excluded(texts: Iterable[str]) -> dict[str, int]:
    """Lines that are left out, by their reason."""
    return dict(collections.Counter(reason for text in texts for reason in EXCLUDED.findall(text)).most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON file to write")
    parser.add_argument("--keep", action="store_true", help="add to what the last run has measured")
    options, arguments = parser.parse_known_args()
    if not options.keep:
        shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True, exist_ok=True)
    workers = ("-n", str(min(4, len(os.sched_getaffinity(0)))))
    failed = coverage("run", "-m", "pytest", "-q", *workers, "-m", "not server", *TESTS, *arguments)
    coverage("combine", "-q", "--append")
    coverage("json", "-q", "-o", str(DATA / "report.json"))
    report = json.loads((DATA / "report.json").read_text())
    rows, total = rows_of(report), summary(report["totals"])
    left_out = excluded((ROOT / row["module"]).read_text() for row in rows)
    versions = {name: importlib.metadata.version(name) for name in ("coverage", "torch", "triton", "sglang")}
    commands = [json.loads(options.out.read_text())["env"]["command"]] if options.keep and options.out.exists() else []
    env = versions | {"date": today(), "command": "; ".join([*commands, command_line()])}
    write_result(options.out, {"env": env, "total": total, "excluded": left_out, "rows": rows})
    incomplete = [row for row in rows if "missing" in row]
    for row in incomplete:
        print(f"{row['percent']:6.2f} %  {row['module']}: {', '.join(row['missing'])}")
    print(f"{total['percent']:6.2f} % of {total['branches']:,} branches; left out: {left_out}")
    return int(bool(failed or incomplete))


if __name__ == "__main__":
    sys.exit(main())
