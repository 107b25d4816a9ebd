"""The picture of README.md: time per token and time of the last step, without us and with us, as an SVG.

Bars begin at zero; whiskers are spreads. One picture for light pages and one for dark ones, from result files.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator
from pathlib import Path

from tables import RESULTS, SCREENED, SHORT, STANDING, Pair, Results, conditions_of, sglang_of, summary_rows, title

WIDTH, PANEL = 1000, 480  # of the picture, and of each of its two panels
LABEL, VALUE = 132, 104  # pixels left of the bars, and right of the longest
TOP, BAR, GAP = 104, 17, 16  # of the first bar, of a bar, and between groups
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
NAME = "Time per token and time of the last step, without and with sgl-flashsample"
MODEL, HEAD, ROWS = "qwen3-8b", (151936, 4096), 16


@dataclasses.dataclass(frozen=True)
class Ink:
    """Colours that are seen on a light page, or on a dark one."""

    text: str
    soft: str
    other: str
    ours: str
    screened: str


SCHEMES = {
    "summary.svg": Ink("#1f2328", "#59636e", "#9aa4ae", "#0969da", "#54aeff"),
    "summary-dark.svg": Ink("#e6edf3", "#9198a1", "#6e7781", "#388bfd", "#79c0ff"),
}


@dataclasses.dataclass(frozen=True)
class Bar:
    """A time in the unit of its panel, half the length of its whisker, the colour's name, and words behind it."""

    value: float
    spread: float
    colour: str
    words: str


@dataclasses.dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    digits: int
    groups: dict[str, list[Bar]]


def _change(pair: Pair) -> str:
    return f"{pair.change:+.0f} %"


def _bars(pair: Pair, scale: float, screened: Pair | None = None) -> list[Bar]:
    """A bar of the other way, one of ours, and one with a screen."""
    bars = [Bar(pair.one / scale, pair.spreads[0] / scale, "other", "")]
    for colour, one in (("ours", pair), (SCREENED, screened)):
        if one is not None:
            bars.append(Bar(one.ours / scale, one.spreads[1] / scale, colour, _change(one)))
    return bars


def panels(results: Results) -> list[Panel]:
    """Time per token of servers with stock SGLang and with ours; the last step with the fastest other way, with ours
    and with a screen. Empty where one of them was not measured."""
    rows = summary_rows(results)
    servers = {
        SHORT[sampling]: _bars(Pair.of(*rows[MODEL, sampling][STANDING], "tpot_us", "spread_us"), 1000)
        for sampling in ("trunc", "t1", "greedy")
        if STANDING in rows.get((MODEL, sampling), {})
    }
    steps: dict[str, list[Bar]] = {}
    for cell in results.cells:
        if (cell.vocab, cell.hidden, cell.batch) == (*HEAD, ROWS):
            for sampling in ("k50p90", "t1", "greedy"):
                other, ours = cell.fastest_baseline(sampling), cell.picked(sampling)
                screened = cell.picked(sampling, screened=True)
                if other is not None and ours is not None:
                    pair, *more = (Pair.of(other, row, "us", "us_spread") for row in (ours, screened) if row)
                    steps[SHORT[sampling]] = _bars(pair, 1, *more)
    if not servers or not steps:
        return []
    return [
        Panel(f"A server: time per token, Qwen3-8B, batch of {STANDING}", "ms", 2, servers),
        Panel(f"The last step alone: hidden states to tokens, {ROWS} rows", "µs", 0, steps),
    ]


def _text(x: float, y: float, words: str, colour: str, size: int = 13, rest: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}"{rest}>{html.escape(words)}</text>'


def _panel(panel: Panel, left: float, ink: Ink) -> Iterator[str]:
    longest = max(bar.value for bars in panel.groups.values() for bar in bars)
    width = PANEL - LABEL - VALUE
    yield _text(left, TOP - 16, panel.title, ink.text, 14, ' font-weight="600"')
    y = TOP
    for name, bars in panel.groups.items():
        middle = y + len(bars) * BAR / 2 + 4
        yield _text(left + LABEL - 10, middle, name, ink.text, 13, ' text-anchor="end"')
        for bar in bars:
            length, half = width * bar.value / longest, width * bar.spread / longest
            colour, begin, line = getattr(ink, bar.colour), left + LABEL, y + (BAR - 2) / 2
            yield f'<rect x="{begin:g}" y="{y:g}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>'
            low, high = begin + length - half, begin + length + half
            path = f"M{low:.1f} {line:g}H{high:.1f}M{low:.1f} {line - 3:g}v6M{high:.1f} {line - 3:g}v6"
            yield f'<path d="{path}" stroke="{ink.text}" fill="none"/>'
            words = f"{bar.value:,.{panel.digits}f} {panel.unit}"
            bold = ' font-weight="600"' * (bar.colour != "other")
            yield _text(high + 6, y + BAR - 4.5, ", ".join(filter(None, (words, bar.words))), ink.text, 13, bold)
            y += BAR
        y += GAP
    yield f'<path d="M{left + LABEL:g} {TOP - 5}V{y - GAP + 4:g}" stroke="{ink.soft}" fill="none"/>'


def _height(panel: Panel) -> float:
    return sum(len(bars) * BAR + GAP for bars in panel.groups.values())


def draw(results: Results, ink: Ink) -> str | None:
    """The picture as a file; None where something was not measured."""
    both = panels(results)
    if not both:
        return None
    height = TOP + max(map(_height, both)) + 46
    legend = [
        ("other", "without: stock SGLang; the vendor's GEMM and the fastest other sampler"),
        ("ours", "with sgl-flashsample"),
        (SCREENED, "with its INT8 screen"),
    ]
    sglang = " and ".join(sorted(sglang_of([results.data("serve")])))
    heading = f"Exact sampling fused into the LM head: {results.name}, SGLang {sglang}"
    parts = [_text(20, 26, heading, ink.text, 18, ' font-weight="700"')]
    x = 20.0
    for colour, words in legend:
        parts.append(f'<rect x="{x:g}" y="46" width="12" height="12" fill="{getattr(ink, colour)}"/>')
        parts.append(_text(x + 18, 56.5, words, ink.text, 13))
        x += 40 + 6.7 * len(words)
    for place, panel in enumerate(both):
        parts += _panel(panel, 20 + place * (WIDTH - 40 - PANEL), ink)
    limits = title("trunc").replace("temperature 0.7, ", "")
    parts.append(_text(20, height - 28, conditions_of(results, "serve", "kernels"), ink.soft, 12))
    about = f"Dummy weights of Qwen3-8B's size; top-k, top-p: {limits}. Axes begin at 0; whiskers are spreads."
    parts.append(_text(20, height - 11, about, ink.soft, 12))
    box = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" {FONT}'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">', f"<title>{NAME}</title>", *parts, "</svg>", ""]
    )


def pictures(folder: Path = RESULTS, gpu: str = "h200") -> dict[str, str]:
    """The content of each file of ``SCHEMES``; empty where something was not measured."""
    drawn = {name: draw(Results(gpu, folder), ink) for name, ink in SCHEMES.items()}
    return {name: text for name, text in drawn.items() if text is not None}
