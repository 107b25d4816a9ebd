"""The pages and pictures of results, from the files in ``benchmarks/results`` and nothing else.

    python benchmarks/report.py             prints the tables
    python benchmarks/report.py --write     puts them between their markers in the pages; writes the pictures, and the
                                            rows of docs/results/table.html
    python benchmarks/report.py --check     exit code 1 where a file was measured with other kernels than this tree's

A marker is ``<!-- results:NAME -->``; the text after it, up to ``<!-- end -->``, is replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import picture
import rows
from run import BENCHMARKS
from tables import NOT_MEASURED, RESULTS, SECTIONS, with_other_code

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "index.md"
PAGE_OF_THE_TUNER = ROOT / "docs" / "tune" / "decisions.md"
PAGE_OF_LOGPROBS = ROOT / "docs" / "rl" / "logprobs.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", PAGE, PAGE_OF_THE_TUNER, PAGE_OF_LOGPROBS]
TABLE_DATA = PAGE.parent / "table-data.js"
MARKER = re.compile(r"<!-- results:([a-z-]+) -->\n.*?<!-- end -->", re.S)
OF_A_PAGE = ("benchmarks", "summary-picture")  # not from one table


def list_of_benchmarks() -> str:
    lines = ["| name | measures | needs |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {entry.measures} | {entry.needs} |" for name, entry in BENCHMARKS.items()]
    return "\n".join(lines)


def picture_of(page: Path, folder: Path) -> str:
    """The picture for light pages and dark ones, by links from ``page``."""
    if not picture.pictures(folder):
        return NOT_MEASURED
    light, dark = (os.path.relpath(RESULTS / name, page.parent) for name in picture.SCHEMES)
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<picture>{source}<img alt="{picture.NAME}" src="{light}"></picture>'


def filled(page: Path, text: str, folder: Path = RESULTS) -> str:
    """``text`` of ``page`` with each table between its markers. Raises ValueError for a marker of no table."""

    def replaced(marker: re.Match[str]) -> str:
        name = marker[1]
        if name not in SECTIONS and name not in OF_A_PAGE:
            raise ValueError(f"results:{name} is no table; there are {', '.join([*OF_A_PAGE, *SECTIONS])}")
        if name == "benchmarks":
            table = list_of_benchmarks()
        else:
            table = picture_of(page, folder) if name == "summary-picture" else SECTIONS[name](folder)
        return f"<!-- results:{name} -->\n{table}\n<!-- end -->"

    return MARKER.sub(replaced, text)


def written(folder: Path = RESULTS) -> dict[Path, str]:
    """The content of each file that ``--write`` writes."""
    files = {page: filled(page, page.read_text(), folder) for page in PAGES}
    files |= {RESULTS / name: text for name, text in picture.pictures(folder).items()}
    return files | {TABLE_DATA: rows.script(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        if options.write:
            for file, text in written().items():
                file.write_text(text)
        if options.check and (others := with_other_code()):
            sys.exit(f"error: measured with other kernels than this tree's, measure again: {', '.join(others)}")
        if not options.write and not options.check:
            for name, section in SECTIONS.items():
                print(f"{name}\n\n{section(RESULTS)}\n")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
