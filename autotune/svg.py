"""Charts as inline SVG: lines with intervals, points, bars. No script, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#4b5563")

# x, y, and half an interval around y.
Point = tuple[float, float, float]


def lines(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """One line per name over batch sizes, both axes logarithmic, with the intervals as bars."""
    points = [point for found in series.values() for point in found if point[1] > 0]
    if not points:
        return "<p>nothing was measured</p>"
    x_of = _log_axis([x for x, _, _ in points], LEFT, WIDTH - RIGHT)
    y_of = _log_axis([y for _, y, _ in points], HEIGHT - BOTTOM, TOP)
    parts = _frame(x_label, y_label)
    for x in sorted({x for x, _, _ in points}):
        parts.append(_text(x_of(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle"))
    for y in _ticks(min(y for _, y, _ in points), max(y for _, y, _ in points)):
        parts.append(_line(LEFT, y_of(y), WIDTH - RIGHT, y_of(y), "#e5e7eb"))
        parts.append(_text(LEFT - 6, y_of(y) + 4, f"{y:g}", "end"))
    for place, (name, found) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        kept = sorted(point for point in found if point[1] > 0)
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, _ in kept)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for x, y, half in kept:
            parts.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.4" fill="{colour}"/>')
            if half > 0:
                low, high = y_of(max(y - half, y * 0.5)), y_of(y + half)
                parts.append(_line(x_of(x), low, x_of(x), high, colour))
        parts.append(_text(LEFT + 8, TOP + 14 + 15 * place, name, "start", colour))
    return _svg(parts)


def steps(values: Sequence[float], y_label: str) -> str:
    """A search's history: a point per trial, and the best so far as a line. Values are ratios to a baseline."""
    kept = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    if not kept:
        return "<p>nothing was measured</p>"
    low, high = min(v for _, v in kept), min(max(v for _, v in kept), 2.0)
    span = max(high - low, 0.01)
    most = max(1, len(values) - 1)

    def x_of(place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * place / most

    def y_of(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(value, high) - low) / span)

    parts = _frame("configuration", y_label)
    for share in (0.0, 0.5, 1.0):
        value = low + span * share
        parts.append(_text(LEFT - 6, y_of(value) + 4, f"{value:.2f}", "end"))
    best, path = math.inf, []
    for place, value in kept:
        best = min(best, value)
        path.append(f"{x_of(place):.1f},{y_of(best):.1f}")
        parts.append(f'<circle cx="{x_of(place):.1f}" cy="{y_of(value):.1f}" r="1.8" fill="#9ca3af"/>')
    parts.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.6"/>')
    return _svg(parts)


def bars(shares: Mapping[str, float]) -> str:
    """Horizontal bars, the longest first."""
    height = 22 * len(shares) + 8
    parts = []
    for place, (name, share) in enumerate(sorted(shares.items(), key=lambda item: -item[1])):
        y = 6 + 22 * place
        parts.append(_text(150, y + 12, name, "end"))
        parts.append(f'<rect x="158" y="{y}" width="{max(1.0, 300 * share):.1f}" height="15" fill="{COLOURS[0]}"/>')
        parts.append(_text(164 + 300 * share, y + 12, f"{share:.0%}", "start"))
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">{"".join(parts)}</svg>'


def _log_axis(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)), math.log(max(values))
    span = max(high - low, 0.05)
    return lambda value: start + (end - start) * (math.log(value) - low + 0.03 * span) / (1.06 * span)


def _ticks(low: float, high: float) -> list[float]:
    found = []
    power = 10.0 ** math.floor(math.log10(low))
    while power <= high:
        found += [power * factor for factor in (1, 1.5, 2, 3, 5, 7) if low <= power * factor <= high]
        power *= 10
    return found or [low, high]


def _frame(x_label: str, y_label: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    return [
        _line(LEFT, bottom, WIDTH - RIGHT, bottom, "#6b7280"),
        _line(LEFT, TOP, LEFT, bottom, "#6b7280"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle"),
        f'<text x="14" y="{(TOP + bottom) / 2}" transform="rotate(-90 14 {(TOP + bottom) / 2})" '
        f'text-anchor="middle">{html.escape(y_label)}</text>',
    ]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#374151") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{"".join(parts)}</svg>'
