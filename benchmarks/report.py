"""The pages with results, from the files in ``benchmarks/results`` and nothing else.

    python benchmarks/report.py             prints the tables
    python benchmarks/report.py --write     puts them between their markers in the pages
    python benchmarks/report.py --plots     draws the plots

A marker is ``<!-- results:NAME -->``; what follows, up to ``<!-- end -->``, is replaced. Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from run import BENCHMARKS
from tables import RESULTS, SECTIONS, Results, gpus

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "benchmarks/README.md", "benchmarks/RESULTS.md")]
MARKER = re.compile(r"<!-- results:([a-z-]+) -->\n.*?<!-- end -->", re.S)


def list_of_benchmarks() -> str:
    lines = ["| name | measures | needs |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {entry.measures} | {entry.needs} |" for name, entry in BENCHMARKS.items()]
    return "\n".join(lines)


def filled(page: str, folder: Path = RESULTS) -> str:
    """``page`` with each table between its markers. Raises ValueError for a marker of no table."""

    def replaced(marker: re.Match[str]) -> str:
        name = marker[1]
        if name != "benchmarks" and name not in SECTIONS:
            raise ValueError(f"results:{name} is no table; there are {', '.join(SECTIONS)}")
        table = list_of_benchmarks() if name == "benchmarks" else SECTIONS[name].markdown(folder)
        return f"<!-- results:{name} -->\n{table}\n<!-- end -->"

    return MARKER.sub(replaced, page)


def write_plots(folder: Path = RESULTS) -> list[Path]:
    """One file of each plot per GPU, and the summary of the first one with servers."""
    import plots

    written: dict[str, bytes] = {}
    for gpu in gpus(folder):
        drawn = plots.draw(Results(gpu, folder))
        written |= {f"{gpu}-{name}.png": png for name, png in drawn.items() if name not in plots.SUMMARIES}
        for name in plots.SUMMARIES.keys() & drawn.keys():
            written.setdefault(f"{name}.png", drawn[name])
    for name, png in written.items():
        (folder / name).write_bytes(png)
    return [folder / name for name in written]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plots", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    try:
        if options.write:
            for page in PAGES:
                page.write_text(filled(page.read_text(), options.results))
        if options.plots:
            print(*write_plots(options.results), sep="\n")
        if not options.write and not options.plots:
            for name, section in SECTIONS.items():
                print(f"{name}\n\n{section.markdown(options.results)}\n")
    except ImportError as error:
        sys.exit(f"error: {error}; the plots need `pip install '.[bench]'` in a checkout")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
