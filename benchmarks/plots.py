"""The plots of the pages: of the kernels, from a result of kernels.py, PNG on white; of the servers, on a transparent
ground."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from tables import GEMM, NOTHING, PATHS, READ, Cell, Results, summary_rows

from sgl_flashsample.tools.samplings import SAMPLINGS

INK = "black"
# Colours of Okabe and Ito, told apart with any colour vision; markers and dashes say the same again.
STYLES = {
    GEMM: (INK, "s", "--"),
    "fused": ("#0072B2", "o", "-"),
    "logits": ("#009E73", "D", "-"),
    "screened": ("#56B4E9", "P", "-"),
    "gemm+flashinfer": ("#D55E00", "^", "-."),
    "gemm+multinomial": ("#E69F00", "x", ":"),
    "gemm+exponential": ("#808080", "+", ":"),
    "gemm+argmax": ("#CC79A7", "v", "-."),
}
PNG_DPI = 90
BLUES = ("#9ecae1", "#6baed6", "#3182bd", "#2171b5")  # seen on a light page and on a dark one
SUMMARIES = {"summary": "#1f2328", "summary-dark": "#e6edf3"}  # colour of the text, by the name of the picture
BF16, TOKEN = 2, 8  # bytes of a weight and of a hidden state, of a token
Point = tuple[float, float, float]  # x, y, half the height of the band around it


def moved_bytes(cell: Cell) -> int:
    return cell.hidden * cell.vocab * BF16 + cell.batch * (cell.hidden * BF16 + TOKEN)


def flops(cell: Cell) -> int:
    return 2 * cell.batch * cell.hidden * cell.vocab


def _time(cell: Cell, row: dict) -> Point:
    return cell.batch, row["us"], row["us_spread"]


def _over_floor(cell: Cell, row: dict) -> Point:
    floor = cell.floor or float("nan")
    return cell.batch, row["us"] / floor, row["us_spread"] / floor


def _sampling_share(cell: Cell, row: dict) -> Point:
    gemm = cell.us(NOTHING, GEMM) or float("nan")
    return cell.batch, 100 * (row["us"] - gemm) / row["us"], 100 * row["us_spread"] / row["us"]


def _rate(cell: Cell, row: dict) -> Point:
    rate = flops(cell) / row["us"] / 1e6
    return flops(cell) / moved_bytes(cell), rate, rate * row["us_spread"] / row["us"]


def _roof(cell: Cell, tflop_s: float) -> float:
    """TFLOP/s that the matrix rate and the floor allow; ``tflop_s`` is the former."""
    return min(tflop_s, flops(cell) / (cell.floor or float("nan")) / 1e6)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One figure: a column per head, a row per sampling. line: of the thin line, which ``note`` explains; None for the
    roofs. top: where the axis ends."""

    title: str
    x: str
    y: str
    note: str
    point: Callable[[Cell, dict], Point]
    line: Callable[[Cell], float] | None
    log_y: bool = False
    top: float | None = None
    samplings: tuple[str, ...] = tuple(SAMPLINGS)


ROWS = "rows of the batch"
SHARE = "Share of sampling: what the time exceeds the bare GEMM by"
KINDS = {
    "time": Kind("Time of the last step", ROWS, "microseconds", "floor", _time, lambda cell: cell.floor or 0.0, True),
    "floor": Kind("Over the floor", ROWS, "time / floor", "1: the floor", _over_floor, lambda cell: 1.0, top=1.6),
    "share": Kind(SHARE, ROWS, "% of the time", "0: the GEMM alone", _sampling_share, lambda cell: 0.0),
    "roofline": Kind(
        "Roofline",
        "floating-point operations per byte",
        "TFLOP/s",
        "measured read bandwidth and matrix rate",
        _rate,
        None,
        True,
        samplings=("t1",),
    ),
}


def _draw(axes: Axes, kind: Kind, cells: list[Cell], sampling: str, tflop_s: float, shown: dict[str, Line2D]) -> None:
    line = [kind.line(cell) if kind.line is not None else _roof(cell, tflop_s) for cell in cells]
    rows_of = {path: [row for cell in cells if (row := cell.row(sampling, path)) is not None] for path in STYLES}
    drawn_line = False
    for path, rows in rows_of.items():
        if not rows:
            continue
        here = [cell for cell in cells if cell.row(sampling, path) is not None]
        x, y, band = zip(*(kind.point(cell, row) for cell, row in zip(here, rows, strict=True)), strict=True)
        if not drawn_line and len(here) == len(cells):
            axes.plot(x, line, color=INK, linewidth=0.8)
            drawn_line = True
        colour, marker, dash = STYLES[path]
        drawn = axes.plot(x, y, dash, color=colour, marker=marker, markersize=4, linewidth=1.4)[0]
        low, high = ([value + sign * half for value, half in zip(y, band, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        shown.setdefault(PATHS[path], drawn)
    axes.set_xscale("log", base=2 if kind.x == ROWS else 10)
    if kind.x == ROWS:
        ticks = [cell.batch for cell in cells][::2]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if kind.log_y:
        axes.set_yscale("log", base=10)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylim(top=kind.top)
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_title(f"{cells[0].head}\n{SAMPLINGS[sampling].title}", fontsize=8)


def _figure(results: Results, kind: Kind) -> Figure:
    data = results.data("kernels")
    assert data is not None
    heads: dict[str, list[Cell]] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.batch):
        heads.setdefault(cell.head, []).append(cell)
    samplings = [sampling for sampling in kind.samplings if any(sampling in cell.samplings for cell in results.cells)]
    figure = Figure(figsize=(1.2 + 2.6 * len(heads), 1.3 + 2.3 * len(samplings)), layout="constrained")
    grid = figure.subplots(len(samplings), len(heads), squeeze=False)
    shown: dict[str, Line2D] = {}
    for sampling, line in zip(samplings, grid, strict=True):
        for cells, axes in zip(heads.values(), line, strict=True):
            here = [cell for cell in cells if sampling in cell.samplings and cell.row(NOTHING, READ) is not None]
            if here:
                _draw(axes, kind, here, sampling, data["env"].get("matmul_tflop_s") or float("inf"), shown)
            else:
                axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel(kind.x, fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(kind.y, fontsize=8)
    handles = [*shown.values(), Line2D([], [], color=INK, linewidth=0.8)]
    figure.legend(handles, [*shown, kind.note], loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def summary(results: Results, ink: str) -> Figure | None:
    """The share of the time per token that servers save with ours, in percent: a group of bars per model and sampling,
    a bar per batch size. ink: the colour of all text, on a transparent ground."""
    gains = {
        f"{model}\n{SAMPLINGS[sampling].title}": {
            batch: 100 * (1 - ours["tpot_us"] / stock["tpot_us"]) for batch, (stock, ours) in pairs.items()
        }
        for (model, sampling), pairs in summary_rows(results).items()
    }
    if not gains:
        return None
    batches = sorted({batch for by_batch in gains.values() for batch in by_batch})
    figure = Figure(figsize=(7.5, 0.9 + 0.24 * sum(map(len, gains.values())) + 0.12 * len(gains)), layout="constrained")
    axes = figure.subplots()
    height = 0.84 / len(batches)
    for place, batch in enumerate(batches):
        shown = [(group, by_batch[batch]) for group, by_batch in enumerate(gains.values()) if batch in by_batch]
        blue = BLUES[place * (len(BLUES) - 1) // max(1, len(batches) - 1)]
        y = [group + (place - (len(batches) - 1) / 2) * height for group, _ in shown]
        bars = axes.barh(y, [gain for _, gain in shown], 0.9 * height, color=blue, label=f"batch of {batch}")
        axes.bar_label(bars, [f"{gain:.1f} %" for _, gain in shown], padding=3, fontsize=8, color=ink)
    axes.set_yticks(range(len(gains)), list(gains), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("% less time per token than stock SGLang", color=ink)
    axes.axvline(0, color=ink, linewidth=0.8)
    axes.tick_params(colors=ink)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(fontsize=8, loc="lower right", frameon=False, labelcolor=ink)
    return figure


def draw(results: Results) -> dict[str, bytes]:
    """A PNG of each of ``KINDS`` where kernels were measured; ``SUMMARIES`` where servers were."""
    figures = {f"kernels-{name}": _figure(results, kind) for name, kind in KINDS.items()} if results.cells else {}
    for name, ink in SUMMARIES.items():
        if (bars := summary(results, ink)) is not None:
            figures[name] = bars
    drawn = {}
    with matplotlib.rc_context({"font.size": 9}):
        for name, figure in figures.items():
            png = io.BytesIO()
            ground = "none" if name in SUMMARIES else "white"
            figure.savefig(png, format="png", dpi=PNG_DPI, facecolor=ground, metadata={"Software": None})
            drawn[name] = png.getvalue()
    return drawn
