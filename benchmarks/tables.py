"""The tables of the pages, from the files in ``results/`` and nothing else. Needs pandas and no torch.

A result file is ``<gpu>-<benchmark>.json``: ``h200-kernels.json``, ``h100-serve.json``; ``cpu.json`` is from a CPU. A
table without a file says so, and a GPU that was not measured is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from step_profile import SYNCHRONISING

from sgl_flashsample.kernels.config import cdiv
from sgl_flashsample.tools.samplings import SAMPLINGS

RESULTS = Path(__file__).resolve().parent / "results"
# The names of files and of pages; other GPUs follow, under the names of their files.
GPUS = {"h200": "H200", "h200x2": "two H200s", "h200x4": "four H200s", "h100": "H100", "h100x2": "two H100s"}
NOT_MEASURED = "Not measured."
OURS, SCREENED = ("fused", "logits"), "screened"
GEMM, READ, NOTHING = "gemm", "read", "nothing"
PATHS = {
    **{path: path for path in (*OURS, SCREENED)},
    GEMM: "GEMM alone (draws nothing)",
    "gemm+argmax": "GEMM, argmax",
    "gemm+multinomial": "GEMM, softmax and multinomial under torch.compile",
    "gemm+exponential": "GEMM, exponential race (SGLang's default)",
    "gemm+flashinfer": "GEMM, FlashInfer",
}
BASELINES = [path for path in PATHS if path not in (*OURS, SCREENED, GEMM)]
# Our paths in the race against rivals.
OUR_WAYS = ("ours-fused", "ours-picked", "ours-screened", "ours-tuned", "ours-tuned-screened")
# Sections of tuning.py, in words.
TUNING = {
    "runs": "a run, and a second one",
    "regret": "the search's choice over the best of a sweep",
    "sweep": "between the measured sizes, against the built-in choice",
    "replay": "measured again in a fresh process",
}
EXCHANGED = (151936, 4096, 64)  # V, D, B of the table
TOLD = 4.0  # upper bound of a ratio's interval over the ratio, above which a page does not give it
SUMMARY_BATCHES = (1, 16, 64, 256)
SUMMARY_SAMPLINGS = ("t1", "trunc", "greedy")
Row = dict[str, Any]
Words = Callable[[Row], str]


def title(sampling: str) -> str:
    return SAMPLINGS[sampling].title


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(head: Iterable[str], lines: Iterable[Iterable[str]]) -> pd.DataFrame | None:
    """A table of these lines; None without one."""
    lines = list(lines)
    return pd.DataFrame(lines, columns=list(head)) if lines else None


def wide(
    rows: Iterable[Row], corner: str, line: Words, column: Words, cell: Words, columns: Iterable[str] | None = None
) -> pd.DataFrame | None:
    """A line per name that ``line`` gives to rows, a column per name that ``column`` gives, and the text of ``cell``;
    lines without a text are left out. columns: their order, that of the rows by default."""
    frame = pd.DataFrame([(line(row), column(row), cell(row)) for row in rows], columns=["line", "column", "cell"])
    shown = frame[frame.cell != ""].drop_duplicates(["line", "column"], keep="last")
    if shown.empty:
        return None
    table = shown.pivot(index="line", columns="column", values="cell")
    order = list(frame.column.unique() if columns is None else columns)
    table = table.reindex(index=shown.line.unique(), columns=order).fillna("")
    return table.rename_axis(corner).reset_index()


def by_batch(rows: Iterable[Row], corner: str, line: Words, cell: Words, key: str = "batch") -> pd.DataFrame | None:
    """``wide`` with a column per batch size."""
    rows = list(rows)
    sizes = [f"B={size}" for size in sorted({row[key] for row in rows})]
    return wide(rows, corner, line, lambda row: f"B={row[key]}", cell, sizes)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Everything that was raced together for one head and batch size."""

    hidden: int
    vocab: int
    batch: int
    rows: dict[tuple[str, str], Row]  # sampling, path

    @property
    def head(self) -> str:
        return f"{self.vocab:,} x {self.hidden:,}"

    def row(self, sampling: str, path: str) -> Row | None:
        return self.rows.get((NOTHING if path in (GEMM, READ) else sampling, path))

    def us(self, sampling: str, path: str) -> float | None:
        row = self.row(sampling, path)
        return row["us"] if row is not None else None

    @property
    def floor(self) -> float | None:
        """Microseconds that reading the head once takes."""
        return self.us(NOTHING, READ)

    @property
    def samplings(self) -> list[str]:
        return list(dict.fromkeys(sampling for sampling, _ in self.rows if sampling != NOTHING))

    def picked(self, sampling: str, *, screened: bool = False) -> Row | None:
        """The row of the path that a batch takes by itself. screened: where its head has a screen, if that is the
        screened path."""
        paths = (SCREENED,) if screened else OURS
        rows = [row for path in paths if (row := self.row(sampling, path)) is not None and row.get("picked")]
        return rows[0] if rows else None

    def fastest_baseline(self, sampling: str) -> Row | None:
        """The row of the fastest baseline that draws."""
        rows = [row for path in BASELINES if (row := self.row(sampling, path)) is not None]
        return min(rows, key=lambda row: row["us"]) if rows else None


class Results:
    """The result files of one GPU; each is read when it is first asked for."""

    def __init__(self, gpu: str, folder: Path = RESULTS) -> None:
        self.gpu, self.folder, self.name = gpu, folder, GPUS.get(gpu, gpu)

    @functools.cache  # noqa: B019 (one process, a few files)
    def data(self, benchmark: str) -> dict[str, Any] | None:
        """None where it was not measured. Raises ValueError for a file that is no result."""
        file = self.folder / (f"{self.gpu}-{benchmark}.json" if self.gpu else f"{benchmark}.json")
        if not file.exists():
            return None
        try:
            data = json.loads(file.read_text())
            env = data["env"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no result: {type(error).__name__}: {error}") from None
        if env.get("device") == "cpu" and self.gpu:
            raise ValueError(f"{file} is of a dry run; expected a measured result")
        return data

    def rows(self, benchmark: str, *sections: str) -> list[Row]:
        """The rows of a file; those of ``sections`` where they are given, with the fields ``served`` and ``about``."""
        data = self.data(benchmark) or {}
        if sections and sections[0] in data.get("sections", {}):
            return data["sections"][sections[0]]["rows"]
        rows = [row for row in data.get("rows", []) if not sections or row["section"] in sections]
        return [row | {"served": served(row), "about": cell_of(row)} for row in rows] if sections else rows

    @functools.cached_property
    def cells(self) -> list[Cell]:
        cells: dict[tuple[int, int, int], Cell] = {}
        for row in self.rows("kernels"):
            key = row["D"], row["V"], row["B"]
            cells.setdefault(key, Cell(*key, {})).rows[row["sampling"], row["path"]] = row
        return list(cells.values())

    def about(self, benchmark: str, section: str | None = None) -> str:
        """One line: the machine, versions and commands of a table."""
        data = self.data(benchmark)
        assert data is not None
        env = data["env"]
        runs: list[dict[str, Any]] = [env]
        if "runs" in data and "rows" in data:
            used = {row["run"] for row in data["rows"] if section in (None, row.get("section"))}
            runs = [data["runs"][place] for place in sorted(used)]
        elif section is not None and (part := data.get("sections", {}).get(section)) is not None:
            runs = [part] if "command" in part else list(part.values())
        versions = [f"{name} {env[key]}" for name, key in (("torch", "torch"), ("Triton", "triton")) if env.get(key)]
        sglang = dict.fromkeys(run["sglang"] for run in runs if run.get("sglang"))
        versions += [f"SGLang {version}" for version in sglang]
        flashinfer = env.get("flashinfer") or env.get("servers", {}).get("flashinfer-python")
        versions += [f"FlashInfer {flashinfer}"] if flashinfer not in (None, "none") else []
        versions += [f"{name} {version}" for name, version in env.get("rivals", {}).items() if name != "torch"]
        commands = dict.fromkeys(f"`{run['command']}` on {run['date']}" for run in runs)
        not_run = [gap for gap in env.get("not_run", []) if section is None or gap.get("section", section) == section]
        gaps = list(dict.fromkeys(f"{_gap_words(gap)}: {gap['reason']}" for gap in not_run))
        device = f"{env['cores']} cores of an {env['processor']}" if "cores" in env else env["device"]
        line = f"**{', '.join([device, *versions])}**; {'; '.join(commands)}."
        return line + (f" Not run: {'; '.join(gaps[:5])}." if gaps else "")


def _gap_words(gap: dict[str, Any]) -> str:
    about = [str(value) for name, value in gap.items() if name not in ("section", "reason")]
    return gap.get("path") or " ".join(about)


def gpus(folder: Path = RESULTS) -> list[str]:
    """The GPUs with a result file; the ones that ``GPUS`` names first."""
    names = {file.name.partition("-")[0] for file in folder.glob("*-*.json")}
    return [gpu for gpu in GPUS if gpu in names] + sorted((names & {"planted"}) ^ (names - GPUS.keys()))


# --- the last step --------------------------------------------------------------------------------------------------


def ratio(row: Row | None, ours: float) -> str:
    return "" if row is None else f"{row['us'] / ours:.2f}"


def kernels(results: Results) -> pd.DataFrame | None:
    head = ["V x D, B", "floor", "GEMM alone", "temperature 1 (over floor; over GEMM; path)", "with a screen"]
    head += ["fastest baseline (of ours)", "greedy (baseline of ours)", "top_k 50, top_p 0.9 (baseline of ours)"]
    lines = []
    for cell in results.cells:
        plain, floor, gemm = cell.picked("t1"), cell.floor, cell.us(NOTHING, GEMM)
        if plain is None or floor is None or gemm is None:
            continue
        us, screened, baseline = plain["us"], cell.picked("t1", screened=True), cell.fastest_baseline("t1")
        line = [f"{cell.head}, {cell.batch}", f"{floor:.0f}", f"{gemm:.0f}"]
        line.append(f"{us:.0f} ({us / floor:.3f}; {us / gemm:.3f}; {plain['path']})")
        line.append("" if screened is None else f"{screened['us']:.0f} ({screened['us'] / floor:.3f})")
        line.append(
            "" if baseline is None else f"{PATHS[baseline['path']]} {baseline['us']:.0f} ({ratio(baseline, us)})"
        )
        for sampling in ("greedy", "k50p90"):
            taken, other = cell.picked(sampling), cell.fastest_baseline(sampling)
            line.append("" if taken is None else f"{taken['us']:.0f} ({ratio(other, taken['us']) or 'none'})")
        lines.append(line)
    return listed(head, lines)


def kernels_faster(results: Results) -> pd.DataFrame | None:
    """Paths that draw faster than the one that a batch takes by itself, our other path among them; the worst first."""
    lines = []
    for cell in results.cells:
        for sampling in cell.samplings:
            picked = cell.picked(sampling)
            for path in PATHS if picked is not None else ():
                row = cell.row(sampling, path)
                if picked is None or row is None or path in (GEMM, SCREENED) or row["us"] >= picked["us"]:
                    continue
                within = picked["us"] - row["us"] <= row["us_spread"] + picked["us_spread"]
                line = [f"{cell.head}, {cell.batch}", title(sampling), f"{PATHS[path]} {row['us']:.1f}"]
                line += [f"{picked['path']} {picked['us']:.1f}", f"{picked['us'] / row['us']:.3f}"]
                lines.append((picked["us"] / row["us"], [*line, "yes" if within else ""]))
    head = ["V x D, B", "sampling", "faster, µs", "taken, µs", "taken over faster", "within the spread"]
    rows = [line for _, line in sorted(lines, key=lambda one: -one[0])]
    return listed(head, rows or [["none", *[""] * (len(head) - 1)]]) if results.cells else None


def features(results: Results, edited: bool) -> pd.DataFrame | None:
    """Samplings with edits or without them, by batch size. Times are of the median profile, ratios of the worst."""
    frame, key = pd.DataFrame(results.rows("features")), ["sampling", "B", "profile"]
    if frame.empty:
        return None
    ours = frame[frame.path == "picked"].set_index(key)
    plain = ours.us.loc["t1"].rename("plain")
    ours = ours.join(plain, on=["B", "profile"])
    screened = frame[(frame.path == "picked with screen") & frame.form.str.startswith("screened")].set_index(key).us
    times = pd.DataFrame({
        "us": ours.us,
        "over": (ours.us - ours.bytes_us.fillna(0.0)) / ours.plain,
        "baseline": frame[frame.path.isin(PATHS)].groupby(key).us.min() / ours.us,
        "read": ours.bytes_us,
        "screened": screened,
    }).loc[lambda table: table.us.notna()]  # fmt: skip
    how = {"us": "median", "over": "max", "baseline": "min", "read": "median", "screened": "median"}
    rows = times.groupby(["sampling", "B"]).agg(how).reset_index().to_dict("records")

    def cell(row: Row) -> str:
        notes = {"over": "{:.3f}", "baseline": "baseline {:.2f}", "read": "{:.1f} µs to read"}
        notes["screened"] = "with a screen {:.0f}"
        words = [text.format(row[name]) for name, text in notes.items() if pd.notna(row[name])]
        return f"{row['us']:.0f} ({'; '.join(words)})"

    rows = [row for row in rows if bool(SAMPLINGS[row["sampling"]].edits) is edited]
    rows.sort(key=lambda row: list(SAMPLINGS).index(row["sampling"]))
    return by_batch(rows, "µs (over plain; ...)", lambda row: title(row["sampling"]), cell, "B")


def searches(results: Results) -> pd.DataFrame | None:
    """The share of truncated rows that took a search, by profile, and the tokens compared with the reference."""
    rows = (results.data("features") or {}).get("searches", [])
    rows = sorted(rows, key=lambda row: list(SAMPLINGS).index(row["sampling"]))
    sums = pd.DataFrame(rows).groupby("profile")[["compared", "different", "near_ties"]].sum() if rows else None
    table = wide(
        rows,
        "rows searched",
        lambda row: row["profile"],
        lambda row: title(row["sampling"]),
        lambda row: f"{row['searched'] / row['rows']:.2%}",
    )
    if table is not None and sums is not None:
        counts = [", ".join(map(str, sums.loc[profile])) for profile in table["rows searched"]]
        table["compared, different, near-ties"] = counts
    return table


def quantised(results: Results) -> pd.DataFrame | None:
    """Both times of each head, sampling and batch size that was raced in two dtypes."""
    pairs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in results.rows("quantised"):
        if "dtype" in row:
            pairs.setdefault((row["V"], row["D"], row["sampling"], row["B"]), {})[row["dtype"]] = row
    rows = [of["e4m3"] | {"half": of["bf16"]} for of in pairs.values() if of.keys() >= {"bf16", "e4m3"}]
    return by_batch(
        rows,
        "µs, bfloat16 → float8_e4m3fn (ratio; larger spread)",
        lambda row: f"{row['V']:,} x {row['D']:,}, {title(row['sampling'])}",
        lambda row: pair_words(row["half"], row, "us", "us_spread"),
        "B",
    )


def _raced(results: Results) -> dict[tuple[int, int, int, str], dict[str, Row]]:
    """{(D, V, B, mode): {path: row}} of the race against rivals."""
    cells: dict[tuple[int, int, int, str], dict[str, Row]] = {}
    for row in results.rows("rivals"):
        cells.setdefault((row["D"], row["V"], row["B"], row["mode"]), {})[row["path"]] = row
    return cells


def _rivals_of(cell: dict[str, Row]) -> list[Row]:
    """The rows of those that draw and are not ours, the fastest first."""
    others = [row for path, row in cell.items() if path not in (GEMM, READ) and not path.startswith("ours-")]
    return sorted(others, key=lambda row: row["us"])


def _served(cell: dict[str, Row]) -> Row | None:
    """The row of the path that a server takes; None where it could not be timed."""
    return next((row for row in cell.values() if row.get("picked")), None)


def rivals(results: Results) -> pd.DataFrame | None:
    """The time of our server's path and that of the fastest rival, both over one read of the head."""
    rows = []
    for (hidden, vocab, size, mode), cell in _raced(results).items():
        ours, read = _served(cell), cell.get(READ)
        if ours is not None and read is not None:
            words = f"{ours['us'] / read['us']:.2f}"
            words += "".join(f" ({row['us'] / read['us']:.2f} {row['path']})" for row in _rivals_of(cell)[:1])
            rows.append({"batch": size, "line": f"{vocab:,} x {hidden:,}, {mode}", "words": words})
    return by_batch(rows, "V x D, mode", lambda row: row["line"], lambda row: row["words"])


def rivals_faster(results: Results) -> pd.DataFrame | None:
    """Cells in which a rival is faster than our server's path, or that has no time; the worst first."""
    lines: list[tuple[float, list[str]]] = []
    cells = _raced(results)
    for (hidden, vocab, size, mode), cell in cells.items():
        ours = _served(cell)
        for row in _rivals_of(cell):
            line = [f"{vocab:,} x {hidden:,}, {size}", mode, f"{row['path']} {row['us']:.1f}"]
            if ours is None:
                lines.append((math.inf, [*line, "not run", "", ""]))
            elif row["us"] < ours["us"]:
                within = ours["us"] - row["us"] <= row["us_spread"] + ours["us_spread"]
                line += [f"{ours['path']} {ours['us']:.1f}", f"{ours['us'] / row['us']:.3f}", "yes" if within else ""]
                lines.append((ours["us"] / row["us"], line))
    lines.sort(key=lambda line: -line[0])
    head = ["V x D, B", "mode", "rival, µs", "ours, µs", "ours over the rival", "within the spread"]
    none = [["none", *[""] * (len(head) - 1)]] if cells else []
    return listed(head, [line for _, line in lines] or none)


def rivals_gains(results: Results) -> pd.DataFrame | None:
    """The time of each of our paths over the fastest rival's, the median over the heads that have both."""
    over: dict[tuple[str, int, str], list[float]] = {}
    for (_, _, size, mode), cell in _raced(results).items():
        fastest = _rivals_of(cell)[:1]
        for path in OUR_WAYS if fastest else ():
            if path in cell:
                over.setdefault((mode, size, path), []).append(cell[path]["us"] / fastest[0]["us"])
    rows = [
        {"line": f"{mode}, {size}", "path": path, "words": f"{statistics.median(ratios):.3f} ({len(ratios)})"}
        for (mode, size, path), ratios in over.items()
    ]
    columns = [path for path in OUR_WAYS if any(row["path"] == path for row in rows)]
    corner = "mode, B: over the fastest rival (heads)"
    return wide(rows, corner, lambda row: row["line"], lambda row: row["path"], lambda row: row["words"], columns)


def screened_speed(results: Results) -> pd.DataFrame | None:
    """The screened path beside the fused one, over the floor, with the groups that it read."""
    rows = results.rows("screened", "speed")
    us = {(row["B"], row["profile"], row["path"], row["sampling"]): row["us"] for row in rows}

    def cell(row: Row) -> str:
        batch = row["B"], row["profile"]
        fused, floor = us.get((*batch, "fused", row["sampling"])), us.get((*batch, READ, NOTHING))
        if fused is None or floor is None:
            return ""
        return f"{row['us']:.0f} ({row['us'] / fused:.3f}; {row['us'] / floor:.3f}; {row['groups_read']})"

    return wide(
        [row for row in rows if row["path"] == SCREENED],
        "µs (over fused; over the floor; groups read): B, profile",
        lambda row: f"{row['B']}, {row['profile']}",
        lambda row: title(row["sampling"]),
        cell,
    )


def screened_tokens(results: Results) -> pd.DataFrame | None:
    """Tokens of the screened path that are not the fused one's, and groups that each row left to be decided."""

    def cell(row: Row) -> str:
        left = f"; {row['left']:.2%}" if row["truncated"] else ""
        return "{rows:,}; {different} ({no_near_tie} no near-tie); {candidates_per_row}".format(**row) + left

    return wide(
        results.rows("screened", "tokens"),
        "rows; different; candidate groups per row; left to a search",
        lambda row: row["head"],
        lambda row: f"T={row['temperature']:g}{', truncated' * row['truncated']}",
        cell,
    )


def screened_distribution(results: Results) -> pd.DataFrame | None:
    section = (results.data("screened") or {}).get("sections", {}).get("distribution")
    line = ["{V:,}", "{draws:,}", "{total_variation:.6f}", "{by_chance:.6f}", "{deviations_from_chance:+.1f}"]
    head = ["ids", "draws", "total variation", "by chance alone", "deviations from that"]
    return None if section is None else listed(head, [[cell.format(**section) for cell in line]])


def screened_decision(results: Results) -> pd.DataFrame | None:
    """The decisions of the race at a start for heads without a table, by the times of both paths afterwards."""
    section = (results.data("screened") or {}).get("sections", {}).get("decision")
    if section is None:
        return None
    lines = []
    for head in section["heads"]:
        taken = [(row["screened_us" if row["screen_wins"] else "builtin_us"], row) for row in head["rows"]]
        over = [us / min(row["builtin_us"], row["screened_us"]) for us, row in taken]
        won = sum(row["screen_wins"] for row in head["rows"])
        seconds = ", ".join(f"{one:.2f}" for one in head["seconds"])
        shape = f"{head['V']:,} x {head['D']:,}"
        lines.append([shape, seconds, f"{len(over)}", f"{won}", f"{max(over):.3f}" if over else ""])
    return listed(["head", "seconds of two races", "batches", "screen used for", "worst choice over the better"], lines)


# --- servers --------------------------------------------------------------------------------------------------------


def served(row: Row) -> str:
    """The model, its ranks where there are several, and its drafts where it has some."""
    about = [f"{name} {row[name]}" for name in ("tp", "pp") if row.get(name, 1) > 1]
    if "speculation" in row:
        about.append(f"{row['draft_tokens']} drafts of {row['speculation']}")
    return ", ".join([row["model"], *about]) if "model" in row else ""


def cell_of(row: Row) -> str:
    """The model and the sampling of a row of servers."""
    return f"{served(row)}, {title(row['sampling'])}" if "sampling" in row else ""


def _short(spread: float) -> str:
    return f"{spread:.0f}" if spread >= 1 else f"{spread:.1f}"


def pair_words(stock: Row, ours: Row, time: str = "tpot_us", spread: str = "spread_us") -> str:
    """Both times, their ratio and the larger spread, by the names of their fields."""
    over, widest = ours[time] / stock[time], max(stock[spread], ours[spread])
    return f"{stock[time]:.0f} → {ours[time]:.0f} ({over:.3f}; ± {_short(widest)})"


def compared(
    section: str, one: str, other: str, words: Callable[[Row, Row], str] = pair_words, benchmark: str = "serve"
) -> Callable[[Results], pd.DataFrame | None]:
    """A table of two kinds of servers, by model and sampling and by batch size."""

    def table(results: Results) -> pd.DataFrame | None:
        rows = results.rows(benchmark, section)
        native = {row["about"] for row in rows if row.get("paths", {"fused": 1.0}).get("fused", 0.0) < 0.5}
        before = {(row["about"], row["batch"]): row for row in rows if row["backend"] == one}
        rows.sort(key=lambda row: (row["served"], list(SAMPLINGS).index(row["sampling"])))

        def cell(row: Row) -> str:
            first = before.get((row["about"], row["batch"]))
            return words(first, row) if first is not None and row["backend"] == other else ""

        return by_batch(
            rows,
            "µs per token",
            lambda row: row["about"] + ", by the sampler of SGLang" * (row["about"] in native),
            cell,
        )

    return table


def _same_answers(row: Row) -> list[str]:
    return [f"{row['same_answers']} of {row['batch']} answers the same"] if "same_answers" in row else []


def _screen_words(off: Row, on: Row) -> str:
    notes = [f"{on['tpot_us'] / off['tpot_us']:.3f}", *_same_answers(on)]
    return f"{on['tpot_us']:.0f} ({'; '.join(notes)})"


def _graph_words(one: Row, two: Row) -> str:
    gaps = [f"gaps {one['gaps_us']:.0f} → {two['gaps_us']:.0f}"] if "gaps_us" in two else []
    return f"{pair_words(one, two)[:-1]}; {'; '.join([*gaps, *_same_answers(two)])})"


def serve_plane(results: Results) -> pd.DataFrame | None:
    """The decision plane; and a server that draws nothing, where that was measured too."""
    oracle = [row for row in results.rows("decision-plane", "oracle") if row["backend"] == "oracle"]
    nothing = {(row["about"], row["batch"]): row["tpot_us"] for row in oracle}

    def words(fused: Row, plane: Row) -> str:
        least = nothing.get((plane["about"], plane["batch"]))
        notes = [] if least is None else [f"nothing drawn {least:.0f}"]
        return f"{'; '.join([pair_words(fused, plane)[:-1], *notes, *_same_answers(plane)])})"

    return compared("plane", "flashsample", "decision plane", words, "decision-plane")(results)


def serve_repeats(results: Results) -> pd.DataFrame | None:
    """The share of comparisons of the same two servers that call ours faster, and their least and largest change."""

    def cell(row: Row) -> str:
        changes = sorted(change for change, _, _ in row["percent"])
        slower = f", {row['slower']} slower" * bool(row["slower"])
        return f"{row['faster']} of {len(changes)} faster{slower} ({changes[0]:+.1f} to {changes[-1]:+.1f} %)"

    rows = results.rows("serve", "repeats")
    return by_batch(rows, "verdicts (changes of the time per token)", lambda row: row["about"], cell)


def serve_prompts(results: Results) -> pd.DataFrame | None:
    return wide(
        results.rows("serve", "prompts"),
        "prompt with logprobs",
        lambda row: f"{row['model']}, {row['prompt_tokens']:,} tokens",
        lambda row: row["backend"],
        lambda row: f"{row['ms']:.1f} ± {row['spread_ms']:.1f} ms, {row['grown_mb']:.0f} MB",
    )


def serve_host(results: Results) -> pd.DataFrame | None:
    return by_batch(
        results.rows("serve", "host"),
        "host µs per step (in short answers)",
        lambda row: f"{row['model']}, screen {row['screen']}, {title(row['sampling'])}",
        lambda row: f"{row['host_us']:.0f} ({row['host_us_short']:.0f})",
    )


def serve_profile(results: Results) -> pd.DataFrame | None:
    """Calls of one decode step, stock and ours."""
    names = {
        "graph_launches": "CUDA graphs",
        "launches": "kernel launches and copies beside them",
        "synchronising": "synchronising calls",
        "driver_allocating": "allocations from the driver",
        "tensors": "tensors from PyTorch's allocator",
        "gpu_busy_us": "GPU busy, µs",
        "beside_graphs_us": "of this, beside the CUDA graphs, µs",
        "gaps_us": "gaps between kernels, µs",
        "exchange_us": "exchange between ranks, µs",
    }
    steps: dict[str, dict[str, Row]] = {}
    for row in results.rows("serve", "profile"):
        if "steps" in row:
            row["synchronising"] = round(sum(row.get(name, 0.0) for name in SYNCHRONISING), 2)
            steps.setdefault(f"{row['about']}, B={row['batch']}", {})[row["backend"]] = row
    pairs = [
        {"name": name, "step": step, "pair": [row for label in ("stock", "flashsample") if (row := of.get(label))]}
        for name in names
        for step, of in steps.items()
    ]
    return wide(
        pairs,
        "per decode step, stock → ours",
        lambda row: names[row["name"]],
        lambda row: row["step"],
        lambda row: " → ".join(f"{one[row['name']]:g}" for one in row["pair"] if row["name"] in one),
    )


def lost(row: Row) -> int:
    return sum(count for end, count in row["ends"].items() if end not in ("answered", "left"))


def load(results: Results) -> pd.DataFrame | None:
    """Requests of each server by their end, its slowest answers and gaps, and the growth of its memory."""
    head = ["", "requests", "lost", "tokens/s", "answers, P50 and P99", "gaps, P50 and P99", "memory, growth", "graphs"]
    lines = []
    for row in results.rows("load"):
        times = (
            f"{row[f'{name}_p50']:.{digits}f} and {row[f'{name}_p99']:.{digits}f}"
            + (f" (± {row[f'{name}_p99_spread']:.{digits}f})" if f"{name}_p99_spread" in row else "")
            + f" {unit}"
            if f"{name}_p50" in row
            else ""
            for name, unit, digits in (("answer_s", "s", 1), ("gap_ms", "ms", 0))
        )
        memory = [
            f"{where} {row[f'{name}_growth']:+.0f} of {row['memory'][-1][name]:,} MiB"
            for where, name in (("host", "host_mib"), ("GPU", "device_mib"))
            if f"{name}_growth" in row
        ]
        graphs = ", ".join(str(head["graphs"]) for head in row.get("heads", ()))
        about = f"{row['model']}, {row['concurrency']:,} clients, {row['backend']}"
        lines.append([about, f"{row['requests']:,}", f"{lost(row):,}", f"{row['tokens_per_s']:,.0f}", *times])
        lines[-1] += ["; ".join(memory), graphs]
    return listed(head, lines)


def traffic(results: Results) -> pd.DataFrame | None:
    """Stock and ours of each cell of moving traffic, and of the first seconds of cold servers."""
    parts = (results.data("traffic") or {}).get("sections", {}).get("cold", {}).values()
    cold = [row | {"cold": f", cold, first {part['seconds']:.0f} s"} for part in parts for row in part["rows"]]
    cells: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in [*results.rows("traffic"), *cold]:
        load = f"{row['clients']:,} clients" if row["clients"] else "80 % of saturation"
        name = "mixed requests" if row["sampling"] == "mix" else title(row["sampling"])
        model = f"{row['model']}, {row['pp']} stages" if "pp" in row else row["model"]
        cells.setdefault((model, load + row.get("cold", ""), name), {})[row["backend"]] = row
    head = ["stock → ours", "tokens/s", "ratio (99 % interval; pairs)", "first token, ms: P50; P99"]
    head += ["between tokens, ms: P50; P99", "host, µs per step", "replayed", "late captures, compilations"]
    lines = []
    for cell, sides in cells.items():
        if len(sides) < 2:
            continue
        stock, ours = sides["stock"], sides["flashsample"]
        of, low, high, windows, segments = (ours["ratio"][n] for n in ("of", "low", "high", "windows", "segments"))
        interval = f"{low:.3f} to {high:.3f}; {segments or windows // 2}" if low is not None else "no interval"
        times = [
            "; ".join(" → ".join(_figure(row[f"{name}_p{p}"], ".1f") for row in (stock, ours)) for p in (50, 99))
            for name in ("ttft_ms", "itl_ms")
        ]
        if gaps := ours.get("itl_ratio"):
            told = gaps["p99"]["high"] <= TOLD * gaps["p99"]["of"]
            words = "; P99 ratio {of:.2f} " + ("({low:.2f} to {high:.2f})" if told else "(too few windows)")
            times[1] += words.format(**gaps["p99"])
        lines.append([", ".join(cell), f"{stock['tokens_s']:,.0f} → {ours['tokens_s']:,.0f}"])
        lines[-1] += [f"{_figure(of, '.3f')} ({interval})", *times]
        late = ", ".join(_figure(ours[name], ".0f") for name in ("late_captures", "late_compiles"))
        lines[-1] += [_figure(ours["host_us"], ".0f"), _figure(ours["replayed"], ".0%"), late]
    return listed(head, lines)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# --- several GPUs, drafts, the tuner, the CPU -----------------------------------------------------------------------


def exchanged(results: Results) -> pd.DataFrame | None:
    """The bytes of a step of several ranks: the head, by its measured read, and the exchange."""
    cell = next((c for c in results.cells if (c.vocab, c.hidden, c.batch) == EXCHANGED and c.floor), None)
    if cell is None or cell.floor is None:
        return None
    lines = []
    for ranks in (2, 4, 8, 16):
        width, others = cell.vocab / ranks, ranks - 1
        each = cdiv(cell.batch, ranks)
        stock, records = cell.batch * others * width * 2, cell.batch * others * 20
        whole_rows = records + others * each * width * 2
        received = [f"{count / 1e6:.3g}" for count in (stock, records, whole_rows)]
        lines.append([str(ranks), f"{cell.floor / ranks:.0f}", *received, f"{cell.batch * cell.vocab * 6 / 1e6:.0f}"])
    head = ["ranks", "head read, µs", "gather of logits, MB", "records, MB", "whole rows, MB"]
    return listed([*head, "stock's float32 copy, MB"], lines)


def ranks_exchange(results: Results) -> pd.DataFrame | None:
    return by_batch(
        results.rows("ranks", "exchange"),
        "µs",
        lambda row: row["exchange"] + ", replayed" * row["in_graph"],
        lambda row: f"{row['us']:.1f} ± {row['us_spread']:.1f}",
    )


def ranks_tokens(results: Results) -> pd.DataFrame | None:
    head = ["rows", "ranks", "drawn", "compared with one rank", "different", "near-ties among them", "ranks disagree"]
    lines = (
        [row.get("kind", f"all kinds, {row.get('seconds', 0):.0f} s"), str(row["tp"])]
        + [f"{row['rows']:,}", f"{row.get('compared', row['rows']):,}"]
        + [str(row[name]) for name in ("differing", "near_ties", "ranks_differ")]
        for row in results.rows("ranks", "tokens", "soak")
    )
    return listed(head, lines)


def _nodes(row: Row) -> str:
    return f"{row['model']}, {row['draft_tokens']} nodes of {row['algorithm']}"


def speculation(results: Results) -> pd.DataFrame | None:
    """Tokens per second, accepted drafts and the time of a step of each server; with a trace, those of the verification
    and of a draft."""
    rows = results.rows("speculation", "speed")
    fields = ("model", "algorithm", "draft_tokens", "batch", "temperature", "error")
    distances: dict[tuple, float] = {}
    for row in rows:
        if "draft_tv" in row:
            key = tuple(map(row.get, fields))
            distances[key] = min(row["draft_tv"], distances.get(key, 1.0))

    def line(row: Row) -> str:
        distance = distances.get(tuple(map(row.get, fields)))
        words = "" if distance is None else f", total variation {distance:.2f}"
        return f"{_nodes(row)}, B={row['batch']}, temperature {row['temperature']:g}{words}"

    def cell(row: Row) -> str:
        text = f"{row['tokens_s']:.0f} ± {row['tokens_s_spread']:.0f} ({row['acceptance']:.2f})"
        text += f"; step {row['step_us']:.0f} ± {row['step_us_spread']:.0f}"
        text += f", verification {row['verify_us']:.0f}" if "verify_us" in row else ""
        return text + (f", draft {row['draft_step_us']:.0f}" if "draft_step_us" in row else "")

    return wide(rows, "tokens/s", line, lambda row: row["backend"], cell)


def speculation_parts(results: Results) -> pd.DataFrame | None:
    """The parts of a step on the GPU, of servers with traces, and the rest of the step."""
    parts = {
        "target": "target_us",
        "its head": "head_us",
        "verification, with the head": "verify_us",
        "drafts": "drafts_us",
        "one draft": "draft_step_us",
        "GPU busy": "busy_us",
    }
    lines = []
    for row in results.rows("speculation", "speed"):
        if "busy_us" not in row:
            continue
        about = f"{_nodes(row)}, B={row['batch']}, temperature {row['temperature']:g}, {row['backend']}"
        cells = [f"{row[field]:.0f}" if field in row else "" for field in parts.values()]
        waits = f"{max(0.0, row['step_us'] - row['busy_us']):.0f}"
        operations = str(len(row["logits_operations"])) if "logits_operations" in row else ""
        lines.append([about, *cells, waits, operations])
    return listed(["µs per step", *parts, "GPU waits", "operations on logits"], lines)


def speculation_tokens(results: Results) -> pd.DataFrame | None:
    lines = (
        [f"{_nodes(row)}, {row['backend']}, temperature {row['temperature']:g}"]
        + [f"{row[name]:,}" for name in ("tokens", "near_ties", "different")]
        for row in results.rows("speculation", "tokens")
        if row["backend"] != "no drafts"
    )
    return listed(["drafts", "tokens compared", "first differences that are near-ties", "other differences"], lines)


def tuning(results: Results) -> pd.DataFrame | None:
    """A line per section and head."""
    sections = (results.data("tuning") or {}).get("sections", {})
    lines = (
        [name, head.replace("x", " x "), measured["summary"]]
        for section, name in TUNING.items()
        for head, measured in sections.get(section, {}).items()
    )
    return listed(["", "head", "measured"], lines)


def cpu(results: Results) -> pd.DataFrame | None:
    """The time of the cpu path, over one read of the logits; then of the others."""
    rows = results.rows("cpu")
    us = {(row["V"], row["B"], row["threads"], row["sampling"], row["path"]): row["us"] for row in rows}

    def cell(row: Row) -> str:
        key = row["V"], row["B"], row["threads"]
        others = ((path, us.get((*key, row["sampling"], path))) for path in ("stock", "torch"))
        words = [f"{row['us']:,.0f} ({row['us'] / us[(*key, '', READ)]:.2f} of a read)"]
        return "; ".join([*words, *(f"{path} {time:,.0f}" for path, time in others if time)])

    return wide(
        [row for row in rows if row["path"] == "cpu"],
        "µs",
        lambda row: f"{row['V']:,} ids, B={row['B']}, {row['threads']} threads",
        lambda row: title(row["sampling"]),
        cell,
    )


# --- the README -----------------------------------------------------------------------------------------------------


def summary_kernels(results: Results) -> pd.DataFrame | None:
    """A few batch sizes of the first head, ours beside the fastest way without us."""
    samplings = ("t1", "k50p90", "greedy")
    head = ["µs, fastest baseline → ours (ratio; larger spread)", *map(title, samplings), "with a screen"]
    lines = []
    for cell in results.cells:
        if (cell.hidden, cell.vocab) != (results.cells[0].hidden, results.cells[0].vocab):
            continue
        if cell.batch in SUMMARY_BATCHES:
            line = [f"{results.name}, {cell.head}, B={cell.batch}"]
            for sampling in samplings:
                taken, other = cell.picked(sampling), cell.fastest_baseline(sampling)
                both = taken is not None and other is not None
                line.append(pair_words(other, taken, "us", "us_spread") if both else "")
            screened = cell.picked("t1", screened=True)
            lines.append([*line, "" if screened is None else f"{screened['us']:.0f} ± {_short(screened['us_spread'])}"])
    return listed(head, lines)


def summary_rows(results: Results) -> dict[tuple[str, str], dict[int, tuple[Row, Row]]]:
    """{(model, sampling): {batch size: the rows of stock and of ours}} of the usual samplings, of servers with one GPU
    and without drafts."""
    rows: dict[tuple[str, str], dict[int, dict[str, Row]]] = {}
    for row in results.rows("serve", "stock"):
        if row["sampling"] in SUMMARY_SAMPLINGS and row["served"] == row["model"]:
            by_size = rows.setdefault((row["model"], row["sampling"]), {})
            by_size.setdefault(row["batch"], {})[row["backend"]] = row
    pairs = {
        key: {batch: (of["stock"], of["flashsample"]) for batch, of in sorted(by_size.items()) if len(of) == 2}
        for key, by_size in rows.items()
    }
    return {key: by_size for key, by_size in pairs.items() if by_size}


def summary_serve(results: Results) -> pd.DataFrame | None:
    """Time per output token of the smallest and the largest batch, and tokens per second of that, stock and ours, of
    what was measured with both."""
    lines, rows = [], summary_rows(results)
    batches = sorted({batch for by_size in rows.values() for batch in by_size})
    for (model, sampling), by_size in rows.items():
        if {batches[0], batches[-1]} <= by_size.keys():
            pairs = {batch: by_size[batch] for batch in (batches[0], batches[-1])}
            times = [f"B={batch}: {pair_words(*pair)}" for batch, pair in pairs.items()]
            speeds = [f"{batches[-1] / row['tpot_us'] * 1e6:,.0f}" for row in pairs[batches[-1]]]
            lines.append([f"{results.name}, {model}, {title(sampling)}", *times, " → ".join(speeds)])
    head = ["µs per token, stock → ours (ratio; larger spread)", "smallest batch", "largest batch"]
    return listed([*head, "tokens/s of the largest batch"], lines)


@dataclasses.dataclass(frozen=True)
class Section:
    """One table. benchmark, part: the file, and its section, that the line above the table is about. brief: without
    that line, all GPUs in one table."""

    table: Callable[[Results], pd.DataFrame | None]
    benchmark: str
    part: str | None = None
    brief: bool = False

    def markdown(self, folder: Path = RESULTS) -> str:
        names = ["", *gpus(folder)]  # "": of a CPU
        tables = [(one, table) for name in names if (table := self.table(one := Results(name, folder))) is not None]
        if self.brief and tables:
            return markdown(pd.concat([table for _, table in tables]).fillna(""))
        blocks = [f"{results.about(self.benchmark, self.part)}\n\n{markdown(table)}" for results, table in tables]
        return "\n\n".join(blocks) or NOT_MEASURED


class Picture:
    """The plot of the README, where it has been drawn, for light pages and dark ones."""

    def markdown(self, folder: Path = RESULTS) -> str:
        if not (folder / "summary.png").exists():
            return NOT_MEASURED
        dark = '<source media="(prefers-color-scheme: dark)" srcset="benchmarks/results/summary-dark.png">'
        light = '<img alt="Less time per token than stock SGLang, in percent" src="benchmarks/results/summary.png">'
        return f"<picture>{dark}{light}</picture>"


SECTIONS: dict[str, Section | Picture] = {
    "summary-picture": Picture(),
    "summary-kernels": Section(summary_kernels, "kernels", brief=True),
    "summary-serve": Section(summary_serve, "serve", "stock", brief=True),
    "serve": Section(compared("stock", "stock", "flashsample"), "serve", "stock"),
    "serve-screen": Section(compared("screen", "screen off", "screen on", _screen_words), "serve", "screen"),
    "serve-repeats": Section(serve_repeats, "serve", "repeats"),
    "serve-graphs": Section(compared("graphs", "one root", "two roots", _graph_words), "serve", "graphs"),
    "serve-oracle": Section(compared("oracle", "oracle", "flashsample"), "serve", "oracle"),
    "serve-plane": Section(serve_plane, "decision-plane"),
    "serve-prompts": Section(serve_prompts, "serve", "prompts"),
    "serve-host": Section(serve_host, "serve", "host"),
    "serve-profile": Section(serve_profile, "serve", "profile"),
    "load": Section(load, "load"),
    "traffic": Section(traffic, "traffic"),
    "ranks-exchange": Section(ranks_exchange, "ranks", "exchange"),
    "ranks-tokens": Section(ranks_tokens, "ranks"),
    "exchanged": Section(exchanged, "kernels"),
    "speculation": Section(speculation, "speculation", "speed"),
    "speculation-parts": Section(speculation_parts, "speculation", "speed"),
    "speculation-tokens": Section(speculation_tokens, "speculation", "tokens"),
    "kernels": Section(kernels, "kernels"),
    "kernels-faster": Section(kernels_faster, "kernels"),
    "features-truncations": Section(functools.partial(features, edited=False), "features"),
    "features-edits": Section(functools.partial(features, edited=True), "features"),
    "features-searches": Section(searches, "features"),
    "rivals": Section(rivals, "rivals"),
    "rivals-faster": Section(rivals_faster, "rivals"),
    "rivals-gains": Section(rivals_gains, "rivals"),
    "quantised": Section(quantised, "quantised"),
    "screened": Section(screened_speed, "screened", "speed"),
    "screened-tokens": Section(screened_tokens, "screened", "tokens"),
    "screened-distribution": Section(screened_distribution, "screened", "distribution"),
    "screened-decision": Section(screened_decision, "screened", "decision"),
    "tuning": Section(tuning, "tuning"),
    "cpu": Section(cpu, "cpu"),
}
