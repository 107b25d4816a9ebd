"""The plots of benchmarks/report.py: SVG that takes the page's colour of text, and PNG on white."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterator

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from report import MODES, Result, flops, moved_bytes, name_of

INK = "#010203"  # becomes currentColor in SVG
# Colours of Okabe and Ito, told apart with any colour vision; markers and dashes say the same again.
STYLES = {
    "gemm": (INK, "s", "--"),
    "fused": ("#0072B2", "o", "-"),
    "logits": ("#009E73", "D", "-"),
    "screened": ("#56B4E9", "P", "-"),
    "flashinfer_gumbel": ("#D55E00", "^", "-."),
    "flashinfer_topk_topp": ("#CC79A7", "v", "-."),
    "multinomial_compiled": ("#E69F00", "x", ":"),
    "exp_race": ("#808080", "+", ":"),
}
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashsample",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
PNG_DPI = 120
Shape = tuple[int, int]
Points = list[tuple[float, float, float]]  # x, y, half the height of the band around it


@dataclasses.dataclass(frozen=True)
class Plot:
    slug: str
    title: str
    svg: str
    png: bytes


def _batches(result: Result, shape: Shape, mode: str, path: str) -> Iterator[tuple[int, dict]]:
    """Batch size and row, ascending."""
    found = {key[2]: row for key, row in result.rows.items() if (*key[:2], *key[3:]) == (*shape, mode, path)}
    yield from sorted(found.items())


def _time(result: Result, shape: Shape, mode: str, path: str) -> Points:
    return [(batch, row["us"], row["us_spread"]) for batch, row in _batches(result, shape, mode, path)]


def _over_floor(result: Result, shape: Shape, mode: str, path: str) -> Points:
    points = []
    for batch, row in _batches(result, shape, mode, path):
        floor = result.floor_us(shape, batch)
        points.append((batch, row["us"] / floor, row["us_spread"] / floor))
    return points


def _sampling_share(result: Result, shape: Shape, mode: str, path: str) -> Points:
    points = []
    for batch, row in _batches(result, shape, mode, path):
        gemm = result.us(shape, batch, mode, "gemm")
        if gemm is not None and path != "gemm":
            points.append((batch, 100 * (row["us"] - gemm) / row["us"], 100 * row["us_spread"] / row["us"]))
    return points


def _rate(result: Result, shape: Shape, mode: str, path: str) -> Points:
    points = []
    for batch, row in _batches(result, shape, mode, path):
        done, spread = flops(shape, batch), row["us_spread"] / row["us"]
        rate = done / row["us"] / 1e6
        points.append((done / moved_bytes(shape, batch), rate, rate * spread))
    return points


def _draw_floor(axes: Axes, result: Result, shape: Shape, mode: str) -> None:
    batches = sorted({key[2] for key in result.rows if key[:2] == shape and key[3] == mode})
    axes.plot(batches, [result.floor_us(shape, batch) for batch in batches], color=INK, linewidth=0.8)


def _draw_one(axes: Axes, result: Result, shape: Shape, mode: str) -> None:
    axes.axhline(1.0, color=INK, linewidth=0.8)


def _draw_zero(axes: Axes, result: Result, shape: Shape, mode: str) -> None:
    axes.axhline(0.0, color=INK, linewidth=0.8)


def _draw_roofs(axes: Axes, result: Result, shape: Shape, mode: str) -> None:
    intensities = [x for path in result.paths(shape, mode) for x, _, _ in _rate(result, shape, mode, path)]
    ceiling = result.env.get("matmul_tflop_s") or float("inf")
    ends = [min(intensities), max(intensities)]
    ridge = ceiling / result.floor_tb_s
    ends[1:1] = [ridge] if ends[0] < ridge < ends[1] else []
    axes.plot(ends, [min(ceiling, x * result.floor_tb_s) for x in ends], color=INK, linewidth=0.8)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One figure: a column per shape, a row per mode. note: what the thin line is."""

    slug: str
    title: str
    x: str
    y: str
    note: str
    points: Callable[[Result, Shape, str, str], Points]
    line: Callable[[Axes, Result, Shape, str], None]
    modes: tuple[str, ...]
    log_y: bool
    top: float | None = None  # where the axis ends; above it are batches that arithmetic bounds, or slow rivals


EVERY_MODE = tuple(MODES)
ROWS = "rows of the batch"
KINDS = (
    Kind("time", "Time of the last step", ROWS, "microseconds", "floor", _time, _draw_floor, EVERY_MODE, True),
    Kind(
        "floor",
        "Ratio to the floor, up to 1.6",
        ROWS,
        "time / floor",
        "1: the floor",
        _over_floor,
        _draw_one,
        EVERY_MODE,
        False,
        1.6,
    ),
    Kind(
        "share",
        "Share of sampling: what the time exceeds the bare GEMM by",
        ROWS,
        "% of the time",
        "0: the GEMM alone",
        _sampling_share,
        _draw_zero,
        EVERY_MODE,
        False,
    ),
    Kind(
        "roofline",
        "Roofline",
        "floating-point operations per byte",
        "TFLOP/s",
        "measured read bandwidth and matrix rate",
        _rate,
        _draw_roofs,
        ("plain",),
        True,
    ),
)


def _figure(result: Result, kind: Kind) -> Figure:
    modes = [mode for mode in kind.modes if next(result.ordered(mode), None) is not None]
    shapes = result.shapes
    figure = Figure(figsize=(1.2 + 2.6 * len(shapes), 1.3 + 2.3 * len(modes)), layout="constrained")
    grid = figure.subplots(len(modes), len(shapes), squeeze=False)
    shown: dict[str, Line2D] = {}
    for mode, line in zip(modes, grid, strict=True):
        for shape, axes in zip(shapes, line, strict=True):
            if not result.paths(shape, mode):
                axes.set_axis_off()
                continue
            kind.line(axes, result, shape, mode)
            for path in result.paths(shape, mode):
                colour, marker, dash = STYLES[path]
                points = kind.points(result, shape, mode, path)
                if not points:
                    continue
                x, y, band = zip(*points, strict=True)
                drawn = axes.plot(x, y, dash, color=colour, marker=marker, markersize=4, linewidth=1.4)[0]
                low, high = ([value + sign * half for value, half in zip(y, band, strict=True)] for sign in (-1, 1))
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
                shown.setdefault(name_of(path, mode), drawn)
            axes.set_xscale("log", base=2 if kind.x == ROWS else 10)
            if kind.x == ROWS:
                ticks = sorted({key[2] for key in result.rows if key[:2] == shape})[::2]
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
            axes.set_title(f"D={shape[0]}, V={shape[1]}\n{MODES.get(mode, mode)}", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(kind.x, fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(kind.y, fontsize=8)
    handles = [*shown.values(), Line2D([], [], color=INK, linewidth=0.8)]
    figure.legend(handles, [*shown, kind.note], loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _inline(svg: str) -> str:
    """What a page can hold: no prologue, no metadata, text in the page's colour."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    return svg.replace(INK, "currentColor")


def draw(result: Result) -> list[Plot]:
    drawn = []
    with matplotlib.rc_context(SETTINGS):
        for kind in KINDS:
            figure = _figure(result, kind)
            svg, png = io.StringIO(), io.BytesIO()
            figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
            figure.savefig(png, format="png", dpi=PNG_DPI, facecolor="white")
            drawn.append(Plot(kind.slug, kind.title, _inline(svg.getvalue()), png.getvalue()))
    return drawn
