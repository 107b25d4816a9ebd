"""Results of several runs of one benchmark, in one file.

    python benchmarks/join.py --out results/h200-speculation.json eagle.json eagle3.json

For cells that ran apart, or at different times. The file has the environment of the last part, "runs" with the command
and date of each, and the rows of all, each with the place of its run. A part may be such a file itself. Rows of a cell
that an earlier part has too stay beside them: leave that part out, or measure the cell under another name. What a part
has not run is left out where a later one has rows of the same section.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import read_result, write_result

DIFFERS = ("device", "torch", "triton")  # said of each run where the runs differ in it


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for results of several benchmarks."""
    scripts = {run["command"].split()[1].rpartition("/")[2] for part in parts for run in runs_of(part)}
    if len(scripts) > 1:
        raise ValueError(f"these are results of {' and '.join(sorted(scripts))}; expected one benchmark's")
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for part in parts:
        first = len(runs)
        runs += runs_of(part)
        rows += [row | {"run": first + row.get("run", 0)} for row in part["rows"]]
    gaps: list[dict[str, Any]] = []
    for part in parts:
        measured = {row["section"] for row in part["rows"] if "section" in row}
        gaps = [gap for gap in gaps if gap.get("section") not in measured] + part["env"].get("not_run", [])
    env = parts[-1]["env"] | {"not_run": gaps}
    different = [name for name in DIFFERS if len({run.get(name) for run in runs}) > 1]
    kept = ("date", "command", "sglang", *different)
    return {"env": env, "runs": [{name: run[name] for name in kept if name in run} for run in runs], "rows": rows}


def runs_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    env = part["env"]
    about = {name: env[name] for name in DIFFERS if name in env}
    if "runs" in part:
        return [about | run for run in part["runs"]]
    sglang = env.get("sglang") or env.get("servers", {}).get("sglang")
    return [about | {"date": env["date"], "command": env["command"]} | ({"sglang": sglang} if sglang else {})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("parts", type=Path, nargs="+", metavar="PART", help="result files, the newest last")
    options = parser.parse_args()
    try:
        joined = join([read_result(part, "*.py") for part in options.parts])
    except ValueError as error:
        sys.exit(f"error: {error}")
    write_result(options.out, joined)
    return 0


if __name__ == "__main__":
    sys.exit(main())
