"""Turns results of benchmarks/kernels.py into one HTML page that needs no network, and PNGs beside it.

    python benchmarks/report.py benchmarks/results/h200-kernels.json --out benchmarks/results/h200-kernels.html

The tables are computed from the files and nothing else; the plots need matplotlib (the extra ``bench``).
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNSCREENED, SCREENED = ("fused", "logits"), "screened"
OURS = (*UNSCREENED, SCREENED)
# Paths in words. Greedy rivals have no noise: both are an argmax, as SGLang runs it and compiled.
NAMES = {
    "gemm": "GEMM alone (samples nothing)",
    "fused": "fused",
    "logits": "logits",
    "screened": "screened",
    "flashinfer_gumbel": "GEMM + FlashInfer Gumbel",
    "flashinfer_topk_topp": "GEMM + FlashInfer top-k/top-p",
    "multinomial_compiled": "GEMM + softmax and multinomial, torch.compile",
    "exp_race": "GEMM + exponential race (SGLang's default)",
}
GREEDY_NAMES = {
    "multinomial_compiled": "GEMM + argmax, torch.compile",
    "exp_race": "GEMM + argmax (SGLang's default)",
}
MODES = {"plain": "temperature 1", "trunc": "temperature 1, top_k 50, top_p 0.9", "greedy": "greedy"}
BF16 = 2  # bytes of a weight and of a hidden state
TOKEN = 8  # bytes of a token
PICKED = "picked by the table"
MAIN = (4096, 151936)
FIELDS = {"D": int, "V": int, "B": int, "mode": str, "path": str, "us": (int, float), "us_spread": (int, float)}


def name_of(path: str, mode: str) -> str:
    return (GREEDY_NAMES if mode == "greedy" else {}).get(path, NAMES.get(path, path))


@dataclasses.dataclass(frozen=True)
class Result:
    """One result file. rows: {(D, V, B, mode, path): row}; floor_tb_s: terabytes per second of the fastest read."""

    name: str
    env: dict[str, Any]
    floor_tb_s: float
    rows: dict[tuple[int, int, int, str, str], dict[str, Any]]

    def us(self, shape: tuple[int, int], batch: int, mode: str, path: str) -> float | None:
        row = self.rows.get((*shape, batch, mode, path))
        return row["us"] if row else None

    def ordered(self, mode: str | None = None) -> Iterator[tuple[tuple[int, int], int, str]]:
        """Shape, batch and mode of each group of rows that were raced together."""
        yield from dict.fromkeys(((d, v), b, m) for d, v, b, m, _ in self.rows if mode in (None, m))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(key[:2] for key in self.rows))

    def paths(self, shape: tuple[int, int], mode: str) -> list[str]:
        found = {key[4] for key in self.rows if key[:2] == shape and key[3] == mode}
        return [path for path in NAMES if path in found]

    def best(self, shape: tuple[int, int], batch: int, mode: str) -> tuple[str, float] | None:
        """Our fastest path, and its microseconds."""
        times = {path: us for path in OURS if (us := self.us(shape, batch, mode, path)) is not None}
        return min(times.items(), key=lambda item: item[1]) if times else None

    def floor_us(self, shape: tuple[int, int], batch: int) -> float:
        """What reading the weight and the hidden states and writing the tokens takes at the speed of the read."""
        return moved_bytes(shape, batch) / self.floor_tb_s / 1e6


def moved_bytes(shape: tuple[int, int], batch: int) -> int:
    hidden, vocab = shape
    return hidden * vocab * BF16 + batch * (hidden * BF16 + TOKEN)


def copy_bytes(shape: tuple[int, int]) -> int:
    """What a screen holds of a head, without its scratch: rows of int8, each a multiple of 16 bytes, and 12 bytes per
    row."""
    hidden, vocab = shape
    return vocab * (-(-hidden // 16) * 16 + 12)


def flops(shape: tuple[int, int], batch: int) -> int:
    return 2 * batch * shape[0] * shape[1]


def load(path: Path) -> Result:
    """Raises ValueError, in one line, for anything that is not a measured result."""
    try:
        data = json.loads(path.read_text())
        env, floor, rows = data["env"], data["floor_tb_s"], data["rows"]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of benchmarks/kernels.py: {type(error).__name__}: {error}") from None
    if isinstance(env, dict) and env.get("arguments", {}).get("dry_run"):
        raise ValueError(f"{path} is a dry run; expected a measured result")
    if not isinstance(env, dict) or not isinstance(floor, int | float) or not floor > 0 or not rows:
        raise ValueError(
            f"{path} has floor_tb_s {floor!r} and {len(rows or [])} rows; expected both of a measured result"
        )
    for index, row in enumerate(rows):
        for field, kind in FIELDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(field), kind):
                raise ValueError(f"{path}: row {index} has no {field} that is {kind}")
        if row["us"] <= 0:
            raise ValueError(f"{path}: row {index} has us {row['us']}; expected more than 0")
    keyed = {(row["D"], row["V"], row["B"], row["mode"], row["path"]): row for row in rows}
    return Result(path.name, env, float(floor), keyed)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A rival that is ``factor`` times as fast as our best path."""

    shape: tuple[int, int]
    batch: int
    mode: str
    rival: str
    rival_us: float
    ours: str
    ours_us: float
    within_spread: bool

    @property
    def factor(self) -> float:
        return self.ours_us / self.rival_us


def losses(result: Result) -> list[Loss]:
    """Every row in which a rival, the bare GEMM among them, is faster than our best path; the worst first.

    within_spread: the difference is no larger than the sum of the two rows' spreads.
    """
    found = []
    for shape, batch, mode in result.ordered():
        best = result.best(shape, batch, mode)
        if best is None:
            continue
        for rival in result.paths(shape, mode):
            row = result.rows.get((*shape, batch, mode, rival))
            if rival in OURS or row is None or row["us"] >= best[1]:
                continue
            spread = row["us_spread"] + result.rows[(*shape, batch, mode, best[0])]["us_spread"]
            within = best[1] - row["us"] <= spread
            found.append(Loss(shape, batch, mode, rival, row["us"], *best, within))
    return sorted(found, key=lambda loss: -loss.factor)


@dataclasses.dataclass(frozen=True)
class Bar:
    """One demand: ``figure`` must be at most, or at least, ``limit``; None where a row is missing."""

    what: str
    limit: float
    at_most: bool
    figure: float | None
    source: str

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        return "met" if (self.figure <= self.limit if self.at_most else self.figure >= self.limit) else "missed"


# {batch: (over the floor, over the GEMM, FlashInfer's Gumbel over us)} for MAIN, plain.
MAIN_BARS: dict[int, tuple[float | None, float, float | None]] = {
    **dict.fromkeys((1, 2, 4, 8, 16, 32), (1.04, 0.97, None)),
    64: (None, 0.96, None),
    128: (None, 1.08, 1.27),
    **dict.fromkeys((256, 512), (None, 1.10, 1.35)),
}
OTHER_FLOOR, OTHER_FLOOR_ROWS = 1.06, 32
GREEDY_ROWS = 64


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _source(numerator: float | None, denominator: float | None) -> str:
    return "" if numerator is None or denominator is None else f"{numerator:.2f} / {denominator:.2f} us"


def bars(result: Result) -> list[Bar]:
    """The demands on our best path, per shape and batch size."""
    found = []
    for batch, (floor, gemm, gumbel) in MAIN_BARS.items():
        found += _bars_of(result, MAIN, batch, "plain", floor, {"gemm": gemm}, {"flashinfer_gumbel": gumbel})
    others = [shape for shape in result.shapes if shape != MAIN]
    for shape, batch, mode in result.ordered():
        if shape in others and mode != "greedy":
            floor = OTHER_FLOOR if mode == "plain" and batch <= OTHER_FLOOR_ROWS else None
            rivals = [path for path in result.paths(shape, mode) if path not in (*OURS, "gemm")]
            gemm = {"gemm": 1.0} if mode == "plain" else {}  # nothing bounds truncated sampling by it
            found += _bars_of(result, shape, batch, mode, floor, gemm, dict.fromkeys(rivals, 1.0))
    for shape, batch, mode in result.ordered("greedy"):
        if batch <= GREEDY_ROWS:
            found += _bars_of(result, shape, batch, mode, None, {"gemm": 1.0}, {})
    return found


def _bars_of(
    result: Result,
    shape: tuple[int, int],
    batch: int,
    mode: str,
    floor: float | None,
    at_most: dict[str, float],
    at_least: dict[str, float | None],
) -> Iterator[Bar]:
    best = result.best(shape, batch, mode)
    us = best[1] if best else None
    where = f"{shape[0]} x {shape[1]}, {MODES.get(mode, mode)}, B={batch}"
    if floor is not None:
        least = result.floor_us(shape, batch)
        yield Bar(f"{where}: ours / floor", floor, True, _ratio(us, least), _source(us, least))
    for path, limit in at_most.items():
        other = result.us(shape, batch, mode, path)
        yield Bar(f"{where}: ours / {name_of(path, mode)}", limit, True, _ratio(us, other), _source(us, other))
    for path, least_ratio in at_least.items():
        if least_ratio is not None:
            other = result.us(shape, batch, mode, path)
            what = f"{where}: {name_of(path, mode)} / ours"
            yield Bar(what, least_ratio, False, _ratio(other, us), _source(other, us))


def _table(head: list[str], lines: list[list[str]], marked: list[str] | None = None) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    out = [f"<div class=wide><table><thead><tr>{cells}</tr></thead><tbody>"]
    for index, line in enumerate(lines):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
        out.append(f"<tr class={marked[index].replace(' ', '-') if marked else 'row'}>{cells}</tr>")
    return "".join([*out, "</tbody></table></div>"])


def loss_table(result: Result) -> str:
    found = losses(result)
    if not found:
        return "<p>No rival is faster than our best path in any row.</p>"
    head = [
        "D x V",
        "sampling",
        "B",
        "rival",
        "rival, us",
        "our best path",
        "ours, us",
        "ours / rival",
        "within spread",
    ]
    lines = [
        [
            f"{loss.shape[0]} x {loss.shape[1]}",
            MODES.get(loss.mode, loss.mode),
            str(loss.batch),
            name_of(loss.rival, loss.mode),
            f"{loss.rival_us:.1f}",
            loss.ours,
            f"{loss.ours_us:.1f}",
            f"{loss.factor:.3f}",
            "yes" if loss.within_spread else "",
        ]
        for loss in found
    ]
    return _table(head, lines)


def bar_table(result: Result) -> str:
    """What is not met in the open, the rest behind a line to click on."""
    found = bars(result)
    counts = {verdict: sum(bar.verdict == verdict for bar in found) for verdict in ("met", "missed", "not measured")}
    out = [f"<p>{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}. "]
    out.append("Host time per decode step is not in this file: benchmarks/step_profile.py.</p>")
    for met in (False, True):
        lines, verdicts = [], []
        for bar in found:
            if (bar.verdict == "met") is met:
                limit = f"{'at most' if bar.at_most else 'at least'} {bar.limit:.2f}"
                figure = "" if bar.figure is None else f"{bar.figure:.3f}"
                lines.append([bar.what, limit, figure, bar.source, bar.verdict])
                verdicts.append(bar.verdict)
        if lines:
            table = _table(["demand", "limit", "figure", "from", "verdict"], lines, verdicts)
            out.append(f"<details><summary>{len(lines)} met</summary>{table}</details>" if met else table)
    return "".join(out)


def choice_table(result: Result) -> str:
    """Where the path that a batch takes by itself is not our fastest one."""
    lines = []
    for shape, batch, mode in result.ordered():
        best = result.best(shape, batch, mode)
        for path in OURS:
            row = result.rows.get((*shape, batch, mode, path))
            if row and best and path != best[0] and PICKED in row.get("config", ""):
                where = [f"{shape[0]} x {shape[1]}", MODES.get(mode, mode), str(batch)]
                lines.append(
                    [*where, path, f"{row['us']:.1f}", best[0], f"{best[1]:.1f}", f"{row['us'] / best[1]:.3f}"]
                )
    head = ["D x V", "sampling", "B", "picked", "us", "our fastest", "us", "picked / fastest"]
    return _table(head, lines) if lines else "<p>The table picks our fastest path in every row that was measured.</p>"


def screen_table(result: Result) -> str:
    """The screened path beside our fastest one without a screen, and the memory that it takes."""
    lines = []
    for shape, batch, mode in result.ordered():
        times = {path: us for path in UNSCREENED if (us := result.us(shape, batch, mode, path)) is not None}
        screened = result.us(shape, batch, mode, SCREENED)
        if screened is None or not times:
            continue
        without = min(times, key=lambda path: times[path])
        copy, head = copy_bytes(shape), shape[0] * shape[1] * BF16
        figures = [SCREENED if screened < times[without] else without, f"{screened:.1f}", without]
        figures += [f"{times[without]:.1f}", f"{1 - screened / times[without]:.1%}", f"{copy:,}", f"{copy / head:.1%}"]
        lines.append([f"{shape[0]} x {shape[1]}", MODES.get(mode, mode), str(batch), *figures])
    head_line = ["D x V", "sampling", "B", "winner", "screened, us", "fastest without", "us", "gain of the screen"]
    head_line += ["bytes of the copy", "of the head's"]
    return _table(head_line, lines) if lines else "<p>The screened path was not measured.</p>"


def row_table(result: Result) -> str:
    head = ["D x V", "B", "sampling", "path", "us", "+- us", "/ floor", "TB/s", "TFLOP/s", "configuration"]
    lines = []
    for (d, v, batch, mode, path), row in result.rows.items():
        us, shape = row["us"], (d, v)
        over, tb_s = us / result.floor_us(shape, batch), moved_bytes(shape, batch) / us / 1e6
        figures = [f"{us:.2f}", f"{row['us_spread']:.2f}", f"{over:.3f}", f"{tb_s:.2f}"]
        figures.append(f"{flops(shape, batch) / us / 1e6:.1f}")
        where = [f"{d} x {v}", str(batch), MODES.get(mode, mode), name_of(path, mode)]
        lines.append([*where, *figures, str(row.get("config", ""))])
    return _table(head, lines)


STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#c8ccd1;--good:#0b6e4f;--bad:#b3400d}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--paper:#15181c;--line:#454b52;--good:#5fd3a8;--bad:#ff9d66}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:72rem;margin:2rem auto;
padding:0 1rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
th,td{border-bottom:1px solid var(--line);padding:.2rem .6rem;text-align:left;white-space:nowrap}
.met td:last-child{color:var(--good)}.missed td:last-child{color:var(--bad);font-weight:600}
svg{max-width:100%;height:auto;color:var(--ink)}pre{overflow-x:auto}
"""
BEFORE_PLOTS = (
    "Floor: the weight and the hidden states read once and the tokens written, at the fastest read of the same "
    "run. Times are medians; bands and +- are half the distance between the quartiles."
)


def page(results: list[Result], figures: dict[str, dict[str, str]]) -> str:
    """figures: {name of a result: {title: inline SVG}}"""
    out = ["<!doctype html><html lang=en><meta charset=utf-8><title>sgl-flashsample: kernels</title>"]
    out += ["<meta name=viewport content='width=device-width'>", f"<style>{STYLE}</style>"]
    out.append("<h1>The last step of decoding, ours and its rivals</h1>")
    for result in results:
        device = html.escape(str(result.env.get("device", "")))
        out.append(f"<h2>{html.escape(result.name)}: {device}</h2>")
        out.append(f"<p>Read bandwidth {result.floor_tb_s:g} TB/s. {BEFORE_PLOTS}</p>")
        out += [f"<h3>{html.escape(title)}</h3>{svg}" for title, svg in figures.get(result.name, {}).items()]
        out += ["<h3>Demands</h3>", bar_table(result), "<h3>Where we lose</h3>", loss_table(result)]
        out += ["<h3>What the table picks</h3>", choice_table(result)]
        out += ["<h3>With a screen</h3>", screen_table(result)]
        not_run = [[json.dumps(gap)] for gap in result.env.get("not_run", [])]
        out += ["<h3>Not run</h3>", _table(["what, and why"], not_run) if not_run else "<p>Everything ran.</p>"]
        out += ["<h3>All rows</h3>", row_table(result)]
        rest = {key: value for key, value in result.env.items() if key not in ("not_run", "reads")}
        out += ["<h3>Environment</h3>", f"<pre>{html.escape(json.dumps(rest, indent=1))}</pre>"]
    return "\n".join([*out, "</html>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that benchmarks/kernels.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the HTML file to write; PNGs go beside it")
    options = parser.parse_args()
    try:
        results = [load(path) for path in options.results]
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        import plots
    except ImportError as error:
        sys.exit(f"error: {error}; the plots need `pip install 'sgl-flashsample[bench]'`")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = {result.name: plots.draw(result) for result in results}
    written = [options.out]
    options.out.write_text(page(results, {name: {p.title: p.svg for p in found} for name, found in drawn.items()}))
    for name, found in drawn.items():
        for plot in found:
            written.append(options.out.parent / f"{Path(name).stem}-{plot.slug}.png")
            written[-1].write_bytes(plot.png)
    print("\n".join(str(path) for path in written))


if __name__ == "__main__":
    main()
