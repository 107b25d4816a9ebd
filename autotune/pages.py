"""The look of the HTML pages of ``tune report`` and ``bench``: one file each, with plotly's script in it, light or dark
as the browser asks for."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

HEIGHT = 420
GREY = "rgba(128,128,128,.35)"  # grid lines; visible on a light page and on a dark one
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:20px}h2{font-size:16px;margin-top:28px;border-bottom:1px solid #8884}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:2px 10px;text-align:right}
td.l,th.l{text-align:left}tr:nth-child(even){background:#8881}th{opacity:.7;font-weight:600}
code{font:12px ui-monospace,monospace}details{margin:6px 0}summary{cursor:pointer}
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The page. parts: HTML."""
    return "\n".join(
        (
            "<!doctype html><html lang=en><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width'>",
            f"<title>{text(title)}</title><style>{_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            *parts,
            "</html>\n",
        )
    )


def sized(figure: go.Figure, height: int = HEIGHT) -> go.Figure:
    """Readable on a light page and on a dark one."""
    figure.update_xaxes(gridcolor=GREY, zerolinecolor=GREY).update_yaxes(gridcolor=GREY, zerolinecolor=GREY)
    return figure.update_layout(
        autosize=True,
        height=height,
        margin={"l": 60, "r": 20, "t": 60, "b": 45},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080"},
    )


def figure_html(figure: go.Figure) -> str:
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})


def text(value: Any) -> str:
    return html.escape(str(value))


def grid(rows: Sequence[dict[str, Any]], left: Sequence[str]) -> str:
    """A table with the keys of ``rows`` as its head. left: the columns that are text."""

    def line(tag: str, cells: Iterable[Any]) -> str:
        named = zip(rows[0], cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{' class=l' if name in left else ''}>{text(cell)}" for name, cell in named)

    return f"<table>{line('th', rows[0])}{''.join(line('td', row.values()) for row in rows)}</table>" if rows else ""


def environment_section(known: Mapping[str, Any]) -> str:
    """The environment that results depend on, folded."""
    rows = [{"name": name, "value": json.dumps(value)} for name, value in sorted(known.items())]
    shown = grid(rows, ("name", "value"))
    return f"<h2>Environment</h2><details><summary>all</summary><div class=scroll>{shown}</div></details>"
