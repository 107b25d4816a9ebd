"""``tune report``: one self-contained HTML page about a table and, where its log of trials lies beside it, about the
search."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import plotly.graph_objects as go

from ..kinds import BATCH_KINDS, BatchKind, SamplingPath
from ..tables.schema import ITEMSIZE, Entry, Table
from .baselines import ARGMAX, EXPONENTIAL, FLASHINFER, MULTINOMIAL
from .decide import entry_of
from .decisions import CONFIDENT, Decision, baseline_ratio, decisions, device_and_head, screen_cost
from .labels import GEMM, config_of, key_of
from .pages import document, environment_section, figure_html, grid, sized, text
from .plan import EFFORTS, Plan
from .study import finished_study
from .trials import read_events, recalled

COLOURS = {
    "fused": "#1b7837",
    "logits": "#2166ac",
    "screened": "#b2182b",
    "flashinfer": "#e08214",
    "built-in": "#777777",
}
LEAST_KNOWN = 12  # timed configurations of a study whose importances are shown
TAKEN, BUILT_IN = "choice", "built-in choice"
LINES = {
    TAKEN: "#d62728",
    BUILT_IN: "#999999",
    **COLOURS,
    ARGMAX: "#9467bd",
    MULTINOMIAL: "#8c564b",
    EXPONENTIAL: "#17becf",
    FLASHINFER: "#bcbd22",
}


def page(table: Table, log: Path | None) -> str:
    """The whole page. log: of the trials, None without one."""
    events = read_events(log) if log is not None else []
    # A table has only the times of a confirmed size and of its GEMM.
    logged = recalled((event for event in events if event.get("event") == "decided"), entry_of)
    sizes = list(decisions(table, logged))
    kinds = list(dict.fromkeys(one.kind for one in sizes))
    return document(
        table.file_name,
        (
            _summary(table, sizes),
            figure_html(overview(sizes)) if sizes else "",
            figure_html(ratios(sizes)) if any(one.gemm_us for one in sizes) else "",
            "<h2>All sizes</h2>" if kinds else "",
            *(_kind_section(kind, [one for one in sizes if one.kind == kind]) for kind in kinds),
            _search_section(table, events),
            _rejected_section(table, events),
            _environment_section(table),
        ),
    )


def overview(sizes: Sequence[Decision]) -> go.Figure:
    """Choices by kind and size of batch: colour by path; as text the microseconds and, where a baseline was raced, the
    time of the fastest one over them."""
    kinds = [str(kind) for kind in BATCH_KINDS if any(one.kind == kind for one in sizes)][::-1]
    rows, paths = sorted({one.rows for one in sizes}), list(COLOURS)
    by_place = {(str(one.kind), one.rows): one for one in sizes}
    shares = [place / len(paths) for place in range(len(paths) + 1)]
    scale = [[share, colour] for place, colour in enumerate(COLOURS.values()) for share in shares[place : place + 2]]

    def text_of(one: Decision) -> str:
        ratio = baseline_ratio(one.entry)
        return f"{one.us:.0f}" if ratio is None else f"{one.us:.0f}<br>{ratio:.2f}x"

    def cells(value: Callable[[Decision], Any]) -> list[list[Any]]:
        places = [[by_place.get((kind, size)) for size in rows] for kind in kinds]
        return [[None if one is None else value(one) for one in line] for line in places]

    heatmap = go.Heatmap(
        x=[str(size) for size in rows],
        y=kinds,
        z=cells(lambda one: paths.index(one.entry.path) + 0.5),
        text=[[text or "" for text in line] for line in cells(text_of)],
        customdata=cells(lambda one: one.takes),
        hovertemplate="%{y}, %{x} rows: %{text} µs<br>%{customdata}<extra></extra>",
        texttemplate="%{text}",
        zmin=0,
        zmax=len(paths),
        colorscale=scale,
        colorbar={"tickvals": [place + 0.5 for place in range(len(paths))], "ticktext": paths},
        xgap=2,
        ygap=2,
    )
    title = "Choices: microseconds, and the time of the fastest GEMM with a sampler over them"
    figure = go.Figure(heatmap).update_layout(title=title, xaxis_title="rows of the batch")
    return sized(figure, height=130 + 42 * len(kinds))


def ratios(sizes: Sequence[Decision]) -> go.Figure:
    """Times over that of the GEMM alone, by batch size, of one kind of batch at a time: the choice, the built-in
    choice, other paths and baselines."""
    figure, kinds_of_lines = go.Figure(), []
    kinds = list(dict.fromkeys(one.kind for one in sizes if one.gemm_us))
    for kind in kinds:
        series: dict[str, dict[int, float]] = collections.defaultdict(dict)
        for one in sizes:
            if one.kind == kind and one.gemm_us:
                times = {**one.entry.others, BUILT_IN: one.entry.default_us, TAKEN: one.us}
                for name, us in times.items():
                    series[name] |= {one.rows: us / one.gemm_us} if us else {}
        for name, by_rows in series.items():
            kinds_of_lines.append(kind)
            figure.add_scatter(
                x=list(by_rows),
                y=list(by_rows.values()),
                name=f"{GEMM} alone (draws no token)" if name == GEMM else name,
                mode="lines+markers" if name == TAKEN else "lines",
                visible=kind == kinds[0],
                line={
                    "color": LINES.get(name, "#777777"),
                    "width": 5 if name == TAKEN else 1.5,
                    "dash": "dash" if name in (GEMM, BUILT_IN) else None,
                },
            )
    buttons = [
        {"label": str(kind), "method": "restyle", "args": ["visible", [one == kind for one in kinds_of_lines]]}
        for kind in kinds
    ]
    menu = {
        "buttons": buttons,
        "x": 1.0,
        "xanchor": "right",
        "y": 1.18,
        "yanchor": "top",
        "font": {"color": "#333333"},
        "bgcolor": "#dddddd",
    }
    figure.update_layout(updatemenus=[menu], title="Times over that of the GEMM alone")
    rows = sorted({one.rows for one in sizes})
    figure.update_xaxes(type="log", title="rows of the batch", tickvals=rows, ticktext=list(map(str, rows)))
    return sized(figure)


def _summary(table: Table, sizes: Sequence[Decision]) -> str:
    device, head = device_and_head(table)
    samplers = sorted(ratio for one in sizes if (ratio := baseline_ratio(one.entry)) is not None)
    gemms = sorted(one.us / one.gemm_us for one in sizes if one.us and one.gemm_us)
    first = ""
    if samplers:
        first = f"The fastest GEMM with a sampler takes {_span(samplers)} times as long ({len(samplers)} raced). "
    if gemms:
        first += f"A batch takes {_span(gemms)} times as long as the GEMM alone (which draws no token)."
    gains = sorted(one.entry.gain for one in sizes if not one.confirmed)
    line = f"{len(gains)} of {len(sizes)} batch sizes take something else than the built-in choice"
    if gains:
        line += f", by {gains[0]:.1%} to {gains[-1]:.1%} faster" if len(gains) > 1 else f", {gains[0]:.1%} faster"
    provenance = table.provenance
    state = "" if provenance.get("complete") is True else " The run was not finished."
    state += " The times are simulated: no server uses the table." if table.simulated else ""
    trials, seconds = (provenance.get(name, "?") for name in ("trials", "seconds"))
    effort = f"Effort {table.effort}, {trials} configurations tried, {seconds} s."
    title = f"{device.name}, LM head {head}"
    first_paragraph = f"<p><b>{text(first.strip())}</b></p>" if first else ""
    return (
        f"<h1>{text(title)}</h1>{first_paragraph}{_screen_summary(table, sizes)}"
        f"<p>{text(line)}. {text(effort)}{state}</p>"
    )


def _span(ratios: Sequence[float]) -> str:
    """Range of sorted numbers, in words."""
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else f"{ratios[0]:.2f}"


def _screen_summary(table: Table, sizes: Sequence[Decision]) -> str:
    """Sizes that the screened path wins, and the memory of a screen; empty where none has raced."""
    screened = [one.entry.path == SamplingPath.SCREENED for one in sizes if one.kind.screen]
    if not screened:
        return ""
    (size, rows), head = screen_cost(table), device_and_head(table)[1]
    head_bytes = head.vocab * head.hidden * ITEMSIZE[head.dtype]
    share = f"{size / head_bytes:.1%} of the LM head's {head_bytes:,}"
    memory = f"A screen for up to {rows} rows takes {size:,} bytes, {share}."
    memory = memory if size else "Its memory is not in the table."
    return f"<p>Of batches with a screen, {sum(screened)} of {len(screened)} sizes take it. {memory}</p>"


def screen_gain(entry: Entry) -> str:
    """The share of the best time without a screen that the screened path saves, below 0 where it takes longer; empty
    where one of the two has not raced."""
    times = entry.others | {entry.path: entry.us}
    without = [times[path] for path in (SamplingPath.FUSED, SamplingPath.LOGITS) if times.get(path)]
    screened = times.get(SamplingPath.SCREENED)
    return f"{1 - screened / min(without):.1%}" if screened and without else ""


def _kind_section(kind: BatchKind, sizes: Sequence[Decision]) -> str:
    rows = [
        {
            "rows": one.rows,
            "µs": f"{one.us:.1f} ± {CONFIDENT * one.entry.se:.1f}",
            "built-in choice, µs": f"{one.entry.default_us:.1f}" if one.entry.default_us else "",
            "gain": f"{one.entry.gain:.1%}" if one.entry.gain else "",
            "takes": one.takes,
            "raced against": "?" if one.entry.against is None else one.entry.against,
            "as good": len(one.entry.tied),
            "others, µs": ", ".join(f"{name} {us:.1f}" for name, us in one.entry.others.items()),
            "gain of the screen": screen_gain(one.entry),
            "checked": one.entry.checked,
            "rounds": one.entry.n or "",
        }
        for one in sizes
    ]
    shown = grid(rows, ("takes", "others, µs", "checked"))
    return f"<details><summary>{kind}</summary><div class=scroll>{shown}</div></details>"


def _search_section(table: Table, events: Sequence[dict[str, Any]]) -> str:
    """History and importance of each study."""
    by_study: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        if event.get("event") == "trial" and isinstance(event.get("study"), str):
            by_study[event["study"]].append(event)
    if not by_study:
        return "<h2>Search</h2><p>The log of the trials is not beside the table.</p>"
    plan = Plan(*device_and_head(table), EFFORTS["full"])
    parts = ["<h2>Search</h2><p>Time over that of the study's first configuration, where it does best.</p>"]
    for name, trials in by_study.items():
        rejected = sum(bool(trial.get("reason")) for trial in trials)
        figures = "".join(map(figure_html, study_figures(plan, name, trials)))
        title = f"{name}: {len(trials)} configurations, {rejected} rejected"
        parts.append(f"<details><summary>{text(title)}</summary>{figures}</details>")
    return "".join(parts)


def study_figures(plan: Plan, name: str, trials: Sequence[dict[str, Any]]) -> Iterator[go.Figure]:
    """Optimisation history and importances of the axes of one study; nothing where too little is known."""
    ratios: dict[Any, float | None] = {}
    first: dict[str, float] = next((trial["us"] for trial in trials if trial.get("us")), {})
    keys = {str(key): key for key in plan.studies}
    try:
        space = plan.space(keys[name])
        for trial in trials:
            times = [us / first[rows] for rows, us in (trial.get("us") or {}).items() if first.get(rows)]
            ratios[config_of(trial["path"], trial["config"])] = min(times) if times else None
        study = finished_study(space, ratios)
    except (KeyError, TypeError, ValueError):
        return
    known = sum(trial.value is not None for trial in study.trials)
    if known:
        yield sized(optuna.visualization.plot_optimization_history(study, target_name="ratio"))
    if known >= LEAST_KNOWN:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        try:
            yield sized(optuna.visualization.plot_param_importances(study, evaluator=evaluator))
        except (RuntimeError, ValueError):  # one value on every axis
            return


def _rejected_section(table: Table, events: Sequence[dict[str, Any]]) -> str:
    regrets = [event.get("regret", 0.0) for event in events if event.get("event") == "transfer"]
    between = f"<p>Between two sizes: {len(regrets)} raced, largest regret {max(regrets):.1%}.</p>" if regrets else ""
    if not table.rejected:
        return f"{between}<h2>Rejected</h2><p>Nothing was rejected.</p>"
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(table.rejected.items(), key=lambda one: -one[1]))

    def line(event: dict[str, Any]) -> dict[str, Any]:
        name = f"{event['kind']}/{key_of(config_of(event['path'], event['config']))}"
        return {"configuration": name, "reason": event["reason"], "detail": event["detail"]}

    rejected = (event for event in events if event.get("event") in ("trial", "refused") and event.get("reason"))
    rows = list(recalled(rejected, line))
    shown = grid(rows, ("configuration", "reason", "detail"))
    details = f"<details><summary>all</summary><div class=scroll>{shown}</div></details>" if shown else ""
    return f"{between}<h2>Rejected</h2><p>{text(counts)}</p>{details}"


def _environment_section(table: Table) -> str:
    known = {**table.env, "effort": table.effort, **table.measure, **table.provenance}
    return environment_section(known)
