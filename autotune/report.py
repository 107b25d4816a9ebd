"""``tune report``: one HTML page about a table and, where its log of trials lies beside it, about the search."""

from __future__ import annotations

import collections
import html
import json
import math
from pathlib import Path
from typing import Any

from ..table import Table
from ..work import Work
from . import svg
from .plan import EFFORTS, Plan, StudyKey
from .report_screen import section as screen_section
from .study import importances
from .table_files import or_flashinfer
from .trials import config_of, read

MOST_REJECTS = 200
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#111827;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:20px}h2{font-size:16px;margin-top:28px;border-bottom:1px solid #e5e7eb}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:2px 10px;text-align:right}
td.l,th.l{text-align:left}tr:nth-child(even){background:#f9fafb}th{color:#6b7280;font-weight:600}
svg text{font:11px system-ui,sans-serif}code{font:12px ui-monospace,monospace}.gain{color:#047857}
details{margin:6px 0}summary{cursor:pointer}
"""


def page(table: Table, log: Path | None) -> str:
    """The whole page, self-contained. log: of the trials, None without one."""
    events = read(log) if log is not None else []
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{_e(table.file_name)}</title><style>{_STYLE}</style>",
        _summary(table),
        screen_section(table),
        *(_work(table, work) for work in table.classes),
        _searches(table, events),
        _rejects(table, events),
        _environment(table),
        "</html>\n",
    ]
    return "\n".join(parts)


def _e(value: Any) -> str:
    return html.escape(str(value))


def _summary(table: Table) -> str:
    buckets = [bucket for found in table.classes.values() for bucket in found.values()]
    tuned = [bucket for bucket in buckets if bucket.use != bucket.default]
    gains = sorted(bucket.gain for bucket in tuned)
    head = table.head
    line = f"{len(tuned)} of {len(buckets)} buckets use something faster than the built-in default"
    if gains:
        line += f", by {gains[0]:.1%} to {gains[-1]:.1%} (median {gains[len(gains) // 2]:.1%})"
    state = "" if table.provenance.get("complete") is True else " The run was not finished."
    return (
        f"<h1>{_e(table.device.name)}, LM head {head.vocab} &times; {head.hidden} {_e(head.dtype)}"
        f"{', softcap' if head.softcap else ''}{f', shard of {head.tp}' if head.tp > 1 else ''}</h1>"
        f"<p>{line}. Effort {_e(table.effort)}, {_e(table.provenance.get('trials', '?'))} configurations tried, "
        f"{_e(table.provenance.get('seconds', '?'))} s.{state}</p>"
    )


def _work(table: Table, work: str) -> str:
    series: dict[str, list[svg.Point]] = collections.defaultdict(list)
    rows = []
    for batch, bucket in table.classes[work].items():
        choice = table.configs[bucket.use]
        series["tuned"].append((batch, bucket.us, 1.96 * bucket.se))
        if bucket.default:
            series["default"].append((batch, bucket.default_us, 0.0))
        for name, us in bucket.others.items():
            series[name].append((batch, us, 0.0))
        gain = f"<span class=gain>{bucket.gain:.1%}</span>" if bucket.use != bucket.default else "default stays"
        others = ", ".join(f"{_e(name)} {us:.1f}" for name, us in bucket.others.items())
        rows.append(
            f"<tr><td>{batch}<td>{bucket.us:.1f} &plusmn; {1.96 * bucket.se:.1f}<td>{bucket.default_us:.1f}<td>{gain}"
            f"<td class=l>{_e(choice.path)}<td class=l><code>{_e(bucket.use)}</code>{_e(or_flashinfer(bucket))}"
            f"<td>{len(bucket.tied)}"
            f"<td class=l>{others}<td class=l>{_e(bucket.checked)}<td>{bucket.n}"
        )
    header = (
        "<tr><th>rows<th>&micro;s<th>default<th>gain<th class=l>path<th class=l>configuration<th>as good"
        "<th class=l>others, &micro;s<th class=l>checked<th>rounds"
    )
    chart = svg.lines(series, "rows of the batch", "microseconds")
    return f"<h2>{_e(work)}</h2>{chart}<table>{header}{''.join(rows)}</table>"


def _searches(table: Table, events: list[dict[str, Any]]) -> str:
    """History and importance of each study."""
    by_study: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        if event.get("kind") == "trial" and isinstance(event.get("study"), str):
            by_study[event["study"]].append(event)
    if not by_study:
        return "<h2>Search</h2><p>The log of the trials is not beside the table.</p>"
    plan = Plan(table.device, table.head, EFFORTS["full"])
    parts = ["<h2>Search</h2><p>Time over that of the study's first configuration, where it does best.</p>"]
    for name, trials in by_study.items():
        ratios, values = [], {}
        first: dict[str, float] = next((trial["us"] for trial in trials if trial.get("us")), {})
        for trial in trials:
            us = trial.get("us") or {}
            found = [us[rows] / first[rows] for rows in us if first.get(rows)]
            ratios.append(min(found) if found else math.inf)
            try:
                values[config_of(trial["path"], trial["config"])] = math.log(min(found)) if found else None
            except (KeyError, TypeError, ValueError):
                continue
        key = _key_of(name)
        shares = importances(plan.space(key), values) if key is not None else {}
        rejected = sum(bool(trial.get("why")) for trial in trials)
        importance = f"<p>What decides:</p>{svg.bars(shares)}" if shares else ""
        parts.append(
            f"<details><summary>{_e(name)}: {len(trials)} configurations, {rejected} rejected</summary>"
            f"{svg.steps(ratios, 'ratio')}{importance}</details>"
        )
    return "".join(parts)


def _key_of(name: str) -> StudyKey | None:
    parts = name.split("/")
    try:
        return StudyKey(parts[1], Work(parts[0]), int(parts[2]) if len(parts) > 2 else 0)
    except (IndexError, ValueError):
        return None


def _rejects(table: Table, events: list[dict[str, Any]]) -> str:
    whys = collections.Counter(str(entry.get("why")) for entry in table.rejected)
    transfers = [event for event in events if event.get("kind") == "transfer"]
    worst = max((event.get("regret", 0.0) for event in transfers), default=None)
    between = "" if worst is None else f"<p>Between buckets: {len(transfers)} checked, largest regret {worst:.1%}.</p>"
    if not table.rejected:
        return f"{between}<h2>Rejected</h2><p>Nothing was rejected.</p>"
    rows = "".join(
        f"<tr><td class=l><code>{_e(_named(entry))}</code><td class=l>{_e(entry.get('why'))}"
        f"<td class=l>{_e(entry.get('detail'))}"
        for entry in table.rejected[:MOST_REJECTS]
    )
    counts = ", ".join(f"{count} {_e(why)}" for why, count in whys.most_common())
    return f"{between}<h2>Rejected</h2><p>{counts}</p><details><summary>all</summary><table>{rows}</table></details>"


def _named(entry: dict[str, Any]) -> str:
    config = entry.get("config")
    return f"{config.get('work')}/{config.get('key')}" if isinstance(config, dict) else str(config)


def _environment(table: Table) -> str:
    known = {**table.env, "effort": table.effort, **table.measure, **table.provenance}
    rows = "".join(f"<tr><td class=l>{_e(k)}<td class=l>{_e(json.dumps(v))}" for k, v in sorted(known.items()))
    return f"<h2>Environment</h2><table>{rows}</table>"
