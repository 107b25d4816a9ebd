"""Puts the results of other runs of a benchmark, on the same GPU model, into its file: several ran at once.

    python benchmarks/merge.py benchmarks/results/h200-serve.json first.json second.json

What a file measured takes the place of the same cells of those before it. Runs of which nothing is left are left out.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from common import Benchmark, read_result, write_result
from run import BENCHMARKS, load


def merged(old: dict[str, Any], new: dict[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """The content of a file with what ``new`` measured. Raises ValueError where their devices differ."""
    if (device := new["env"].get("device")) != (expected := old["env"].get("device")):
        raise ValueError(f"one file is of {device}; expected {expected}, as before it")
    before = old.get("runs", [])
    rows = [row | {"run": len(before) + row["run"]} for row in new.get("rows", [])]
    replaced = set(map(benchmark.key, rows))
    rows = [row for row in old.get("rows", []) if benchmark.key(row) not in replaced] + rows
    sections = dict(old.get("sections", {}))
    for name, section in new.get("sections", {}).items():
        of_heads = "command" not in section  # else it has one value
        sections[name] = (sections.get(name, {}) if of_heads else {}) | section
    env = old["env"] | new["env"]
    for name, value in new["env"].items():
        if isinstance(value, dict) and isinstance(earlier := old["env"].get(name), dict):
            env[name] = earlier | value
    gaps = {repr(gap | {"reason": None}): gap for part in (old, new) for gap in part["env"].get("not_run", [])}
    env["not_run"] = [gap for gap in gaps.values() if not _measured(gap, rows, sections, benchmark)]
    data = old | new | {"env": env, "runs": [*before, *new["runs"]]}
    data |= {"rows": rows} if rows else {}
    data |= {"sections": {name: sections[name] for name in benchmark.sections if name in sections}} if sections else {}
    return _without_unused_runs(data)


def _measured(gap: dict[str, Any], rows: list[Any], sections: dict[str, Any], benchmark: Benchmark) -> bool:
    parts = sections.get(gap.get("section", ""), {})
    of_section = bool(parts) if gap.get("head") is None else gap["head"] in parts
    return of_section or any(benchmark.fills(row, gap) for row in rows)


def _without_unused_runs(data: dict[str, Any]) -> dict[str, Any]:
    rows = data.get("rows", [])
    used = sorted({row["run"] for row in rows}) if rows else range(len(data["runs"]))
    places = {run: place for place, run in enumerate(used)}
    data["runs"] = [data["runs"][run] for run in used]
    for row in rows:
        row["run"] = places[row["run"]]
    return data


def name_of(file: Path) -> str:
    """The benchmark of a file by its name. Raises ValueError."""
    names = [name for name in BENCHMARKS if file.stem == name or file.stem.endswith(f"-{name}")]
    if not names:
        raise ValueError(f"{file} ends with the name of no benchmark; expected one of {', '.join(BENCHMARKS)}")
    return max(names, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="GPU-NAME.json; made if it does not exist")
    parser.add_argument("others", type=Path, nargs="+", metavar="other", help="result files, the newest last")
    options = parser.parse_args()
    try:
        name = name_of(options.file)
        files = [*([options.file] if options.file.exists() else []), *options.others]
        results = [read_result(file, f"run.py {name}") for file in files]
        data = functools.reduce(lambda old, new: merged(old, new, load(name)), results)
    except ValueError as error:
        parser.error(str(error))
    write_result(options.file, data)
    print(f"{options.file}: {len(data['runs'])} runs, {len(data.get('rows', []))} rows")


if __name__ == "__main__":
    main()
