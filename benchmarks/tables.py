"""The tables of README.md, benchmarks/README.md, docs/results/index.md and docs/tune/decisions.md, from result files
and nothing else. Loads no torch.

A result file is ``<gpu>-<benchmark>.json``: ``h200-kernels.json``, ``h100-serve.json``; ``cpu.json`` is from a CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sources import drawing_code, fingerprint, place_of

from sgl_flashsample.autotune.race import Ratio
from sgl_flashsample.tools.comparison import ALPHA
from sgl_flashsample.tools.samplings import SAMPLINGS

RESULTS = Path(__file__).resolve().parent / "results"
# The names of files and of pages; other GPUs follow, under the names of their files.
GPUS = {"h200": "H200", "h200x2": "two H200s", "h200x4": "four H200s", "h100": "H100", "h100x2": "two H100s"}
OF_TESTS = ("planted-defects",)  # files that measure no speed
NOT_MEASURED = "Not measured."
EARLIER = " (earlier kernels)"
MUCH = 10  # percent
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
SUMMARY_BATCHES = (1, 16, 64, 256)
SUMMARY_SAMPLINGS = ("t1", "trunc", "greedy")
STOCK, FLASHSAMPLE = "stock", "flashsample"
STANDING = 64  # rows of a batch that stays, beside traffic
TRAFFIC = (16, 64, 256)  # clients
TABLE_EFFORTS = ("quick", "full")
SCREEN = "+screen"  # the end of the kinds of a tuned table that have a screen; the others in words:
KINDS = {
    "plain": "temperature",
    "truncate": "top-k, top-p, min-p",
    "edit": "penalties, bias, grammar",
    "edit+truncate": "both",
}
SHORT = {"trunc": "top-k, top-p", "k50p90": "top-k, top-p", "t1": "temperature 1", "greedy": "greedy"}
OF_OURS, AS_SERVED = "ours-", "served"  # of the race against rivals: names of our paths begin so; the server's choice
RACED_PATHS = {
    "ours-fused": "fused pass",
    "ours-picked": "without a screen or a table",
    "ours-screened": "with a screen",
    AS_SERVED: "as served",
}
Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # the head and the lines


def title(sampling: str) -> str:
    if sampling == "mix":
        return "mixed requests"
    return SAMPLINGS[sampling].title if sampling in SAMPLINGS else sampling


def markdown(table: Table) -> str:
    head, lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def result_files(folder: Path = RESULTS) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if file.stem not in OF_TESTS)


def read(file: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for a file that is none, and for a dry run of a benchmark that needs a GPU."""
    try:
        data = json.loads(file.read_text())
        env = data["env"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result: {type(error).__name__}: {error}") from None
    if env.get("device") == "cpu" and "-" in file.stem:
        raise ValueError(f"{file} is of a dry run; expected a measured result")
    return data


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
    def data(self, benchmark: str) -> dict[str, Any]:
        """Empty where it was not measured."""
        file = self.folder / f"{self.gpu}-{benchmark}.json"
        return read(file) if file.exists() else {}

    def rows(self, benchmark: str, *sections: str) -> list[Row]:
        """The rows of a file; those of ``sections`` where they are given."""
        rows = self.data(benchmark).get("rows", [])
        return [row for row in rows if row["section"] in sections] if sections else rows

    def section(self, benchmark: str, name: str) -> dict[str, Any]:
        return self.data(benchmark).get("sections", {}).get(name, {})

    @functools.cached_property
    def cells(self) -> list[Cell]:
        cells: dict[tuple[int, int, int], Cell] = {}
        for row in self.rows("kernels"):
            key = row["D"], row["V"], row["B"]
            cells.setdefault(key, Cell(*key, {})).rows[row["sampling"], row["path"]] = row
        return list(cells.values())

    def sides(self, benchmark: str, *sections: str, fields: Iterable[str]) -> dict[tuple, dict[str, Row]]:
        """{the values of ``fields``: {backend: row}}."""
        sides: dict[tuple, dict[str, Row]] = {}
        for row in self.rows(benchmark, *sections):
            sides.setdefault(tuple(map(row.get, fields)), {})[row.get("backend", "")] = row
        return sides


def gpus(folder: Path = RESULTS) -> list[str]:
    """The GPUs with a result file; the ones that ``GPUS`` names first."""
    names = {file.name.partition("-")[0] for file in result_files(folder) if "-" in file.stem}
    return [gpu for gpu in GPUS if gpu in names] + sorted(names - GPUS.keys())


def served(row: Row) -> str:
    """The model, its ranks where there are several, and its drafts where it has some."""
    about = [f"{name} {row[name]}" for name in ("tp", "pp", "dp") if row.get(name, 1) > 1]
    about += ["deterministic"] * ("deterministic" in row)
    if "speculation" in row:
        about.append(f"{row['draft_tokens']} drafts of {row['speculation']}")
    return ", ".join([row["model"], *about])


# --- pairs ----------------------------------------------------------------------------------------------------------


def _short(spread: float) -> str:
    return f"{spread:.0f}" if spread >= 1 else f"{spread:.1f}"


def pair_words(stock: Row, ours: Row, time: str = "tpot_us", spread: str = "spread_us") -> str:
    """Both times, their ratio and the larger spread, by the names of their fields."""
    over, widest = ours[time] / stock[time], max(stock[spread], ours[spread])
    return f"{stock[time]:.0f} → {ours[time]:.0f} ({over:.3f}; ± {_short(widest)})"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two figures of one cell, and the spread of each. rate: more is better. low, high: the interval of their ratio,
    where the benchmark has one."""

    one: float
    ours: float
    spreads: tuple[float, float] = (0.0, 0.0)
    rate: bool = False
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, one: Row, ours: Row, figure: str, spread: str, rate: bool = False) -> Pair:
        return cls(one[figure], ours[figure], (one[spread], ours[spread]), rate)

    def as_rates(self) -> Pair:
        """This pair of times as rates per second."""
        one, ours = 1e6 / self.one, 1e6 / self.ours
        spreads = one * self.spreads[0] / self.one, ours * self.spreads[1] / self.ours
        return Pair(one, ours, spreads, rate=True)

    @property
    def change(self) -> float:
        """Percent of the first figure."""
        return 100 * (self.ours / self.one - 1)

    @property
    def slower(self) -> bool:
        return self.ours < self.one if self.rate else self.ours > self.one

    @property
    def certain(self) -> bool:
        """True if 1 is outside the interval; without one, if the difference is larger than both spreads together."""
        if self.low is not None and self.high is not None:
            return not self.low <= 1 <= self.high
        return abs(self.ours - self.one) > sum(self.spreads)

    def figures(self, scale: float = 1.0, digits: int = 0) -> str:
        return f"{self.one / scale:,.{digits}f} → {self.ours / scale:,.{digits}f}"

    def change_words(self) -> str:
        """The change, and its interval or the larger spread, in percent of the first figure."""
        if self.low is not None and self.high is not None:
            return f"{self.change:+.1f} % ({100 * (self.low - 1):+.0f} to {100 * (self.high - 1):+.0f})"
        return f"{self.change:+.1f} % ± {100 * max(self.spreads) / self.one:.1f}"


def _traffic(sides: dict[str, Row]) -> Pair | None:
    """Stock and ours of moving traffic; None without both or without their ratio."""
    if {STOCK, FLASHSAMPLE} - sides.keys() or sides[FLASHSAMPLE]["ratio"]["of"] is None:
        return None
    stock, ratio = sides[STOCK]["tokens_s"], sides[FLASHSAMPLE]["ratio"]
    return Pair(stock, stock * ratio["of"], rate=True, low=ratio["low"], high=ratio["high"])


SERVER = ("model", "tp", "pp", "dp", "deterministic", "speculation", "sampling", "batch")
CLIENTS = ("model", "pp", "arrivals", "clients", "sampling")
DRAFTS = ("model", "tp", "algorithm", "draft_tokens", "error", "batch", "temperature")
DRAFTS_OF_SGLANG = (STOCK, "rejection", "block", "tree", "map")  # backends of speculation.py


def server_pairs(results: Results) -> list[tuple[Row, Pair]]:
    """A row of ours and the pair, of each cell of servers with batches that stay."""
    sides = [of for of in results.sides("serve", "stock", fields=SERVER).values() if len(of) == 2]
    return [(of[FLASHSAMPLE], _of_samples(of[STOCK], of[FLASHSAMPLE])) for of in sides]


def _of_samples(stock: Row, ours: Row) -> Pair:
    """The medians, and the interval of the ratio pair by pair."""
    pair = Pair.of(stock, ours, "tpot_us", "spread_us")
    ratio = Ratio.paired(ours["samples"], stock["samples"], ALPHA)
    return dataclasses.replace(pair, low=1 + ratio.low, high=1 + ratio.high)


def traffic_pairs(results: Results) -> list[tuple[Row, Pair]]:
    pairs = [(of, _traffic(of)) for of in results.sides("traffic", fields=CLIENTS).values()]
    return [(of[FLASHSAMPLE], pair) for of, pair in pairs if pair is not None]


def draft_pairs(results: Results) -> list[tuple[Row, Pair]]:
    """A row of ours and the pair, of each cell with drafts: over the fastest of SGLang's own modes that were measured.
    Ours has coupled drafts, its default, if a model drafts."""
    pairs = []
    for of in results.sides("speculation", "speed", fields=DRAFTS).values():
        modes, ours = [of[mode] for mode in DRAFTS_OF_SGLANG if mode in of], of.get("coupled") or of.get("greedy")
        if modes and ours is not None:
            best = max(modes, key=lambda row: row["tokens_s"])
            pairs.append((ours, Pair.of(best, ours, "tokens_s", "tokens_s_spread", rate=True)))
    return pairs


# --- the README -----------------------------------------------------------------------------------------------------


def summary_rows(results: Results) -> dict[tuple[str, str], dict[int, tuple[Row, Row]]]:
    """{(model, sampling): {batch size: the rows of stock and of ours}} of the usual samplings, of servers with one GPU
    and without drafts."""
    pairs: dict[tuple[str, str], dict[int, tuple[Row, Row]]] = {}
    for of in results.sides("serve", "stock", fields=SERVER).values():
        row = next(iter(of.values()))
        if len(of) == 2 and row["sampling"] in SUMMARY_SAMPLINGS and served(row) == row["model"]:
            pairs.setdefault((row["model"], row["sampling"]), {})[row["batch"]] = of[STOCK], of[FLASHSAMPLE]
    return {key: dict(sorted(by_size.items())) for key, by_size in pairs.items()}


def summary_serve(folder: Path) -> Table | None:
    """Time per output token of the smallest and the largest batch, and tokens per second of that, stock and ours, of
    what was measured with both."""
    lines = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        rows, runs = summary_rows(results), results.data("serve").get("runs", [])
        batches = sorted({batch for by_size in rows.values() for batch in by_size})
        for (model, sampling), by_size in rows.items():
            if {batches[0], batches[-1]} <= by_size.keys():
                pairs = {batch: by_size[batch] for batch in (batches[0], batches[-1])}
                times = [f"B={batch}: {pair_words(*pair)}" for batch, pair in pairs.items()]
                speeds = [f"{batches[-1] / row['tpot_us'] * 1e6:,.0f}" for row in pairs[batches[-1]]]
                used = [runs[row["run"]] for pair in pairs.values() for row in pair if "run" in row]
                earlier = (
                    "" if all(_has_this_code(place_of(f"{results.gpu}-serve.json"), run) for run in used) else EARLIER
                )
                lines.append([f"{results.name}, {model}, {title(sampling)}{earlier}", *times, " → ".join(speeds)])
    head = ["µs per output token, stock → ours (ratio; ± the larger spread)", "smallest batch", "largest batch"]
    return ([*head, "tokens/s, all of the largest batch"], lines) if lines else None


def summary_kernels(folder: Path) -> Table | None:
    """A few batch sizes of the first head, ours beside the fastest way without us."""
    samplings = ("t1", "k50p90", "greedy")
    head = ["µs, fastest of four → ours (ratio; ± the larger spread)", *map(title, samplings), "temperature 1, screen"]
    lines = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for cell in sorted(results.cells, key=lambda cell: cell.batch):
            first = results.cells[0]
            if (cell.hidden, cell.vocab) != (first.hidden, first.vocab) or cell.batch not in SUMMARY_BATCHES:
                continue
            line = [f"{results.name}, {cell.head}, B={cell.batch}"]
            for sampling in samplings:
                taken, other = cell.picked(sampling), cell.fastest_baseline(sampling)
                line.append(pair_words(other, taken, "us", "us_spread") if taken and other else "")
            screened = cell.picked("t1", screened=True)
            lines.append(
                [*line, "-" if screened is None else f"{screened['us']:.0f} ± {_short(screened['us_spread'])}"]
            )
    return (head, lines) if lines else None


# --- the page of results --------------------------------------------------------------------------------------------


def _one(rows: Iterable[Row], **values: Any) -> Row:
    """The first row with these values. Raises LookupError without one."""
    for row in rows:
        if all(row.get(name) == value for name, value in values.items()):
            return row
    raise LookupError(f"no row has {values}")


def _server(gpu: str, folder: Path, **values: Any) -> Pair:
    rows = Results(gpu, folder).rows("serve", STOCK)
    one, ours = (_one(rows, backend=backend, **values) for backend in (STOCK, FLASHSAMPLE))
    return Pair.of(one, ours, "tpot_us", "spread_us")


def _step(gpu: str, folder: Path, vocab: int, hidden: int, batch: int, sampling: str, screened: bool = False) -> Pair:
    """The fastest baseline and ours."""
    for cell in Results(gpu, folder).cells:
        if (cell.vocab, cell.hidden, cell.batch) == (vocab, hidden, batch):
            other, ours = cell.fastest_baseline(sampling), cell.picked(sampling, screened=screened)
            if other is not None and ours is not None:
                return Pair.of(other, ours, "us", "us_spread")
    raise LookupError(f"no row of {vocab} x {hidden}, {batch}, {sampling}")


def eight(folder: Path) -> Table | None:
    """The eight numbers of the page. A number without its file is left out."""
    big = {"model": "qwen3-8b", "batch": STANDING}
    one_gpu = big | {"tp": None, "pp": None, "deterministic": None}
    head_8b = (151936, 4096, 16)
    drafts = {"model": "qwen3-8b", "algorithm": "EAGLE", "batch": 32, "temperature": 1.0}

    def with_drafts() -> Pair:
        return next(pair for row, pair in draft_pairs(Results("h200", folder)) if _has(row, drafts))

    def traffic() -> Pair:
        cell = {"model": "qwen3-8b", "clients": 64, "sampling": "trunc", "pp": None}
        return next(pair for row, pair in traffic_pairs(Results("h200", folder)) if _has(row, cell))

    limits, ms, us, rate = SHORT["trunc"], (1e3, 2, "ms per token"), (1.0, 0, "µs"), (1.0, 0, "tokens/s")
    numbers: list[tuple[str, tuple[float, int, str], Callable[[], Pair]]] = [
        (f"H200, Qwen3-8B, batch of 64, {limits}", ms, lambda: _server("h200", folder, sampling="trunc", **one_gpu)),
        ("the same, temperature 1", ms, lambda: _server("h200", folder, sampling="t1", **one_gpu)),
        ("the same, greedy", ms, lambda: _server("h200", folder, sampling="greedy", **one_gpu)),
        (
            f"four H200s, Qwen3-8B, batch of 64, {limits}",
            ms,
            lambda: _server("h200x4", folder, sampling="trunc", **big),
        ),
        (f"H200, Qwen3-8B, 64 clients that end and join, {limits}", rate, traffic),
        (
            f"the last step alone, H200, Qwen3-8B's head, 16 rows, {limits}",
            us,
            lambda: _step("h200", folder, *head_8b, "k50p90"),
        ),
        (
            "the same, temperature 1, with the INT8 screen",
            us,
            lambda: _step("h200", folder, *head_8b, "t1", screened=True),
        ),
        ("H200, Qwen3-8B, 32 requests, temperature 1, drafts of a made EAGLE model", rate, with_drafts),
    ]
    lines = []
    for name, (scale, digits, unit), measured in numbers:
        try:
            pair = measured()
        except (LookupError, StopIteration):
            continue
        lines.append([name, f"{pair.figures(scale, digits)} {unit}", pair.change_words()])
    return (["measured", "without → with", "change"], lines) if lines else None


def _has(row: Row, values: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in values.items())


def standing_and_traffic(folder: Path) -> Table | None:
    """More tokens per second than stock: a batch that stays, and clients whose requests end and join."""
    results = Results("h200", folder)
    standing = {
        key: Pair.of(*by_size[STANDING], "tpot_us", "spread_us").as_rates()
        for key, by_size in summary_rows(results).items()
        if STANDING in by_size
    }
    moving: dict[tuple[str, str], dict[int, Pair]] = {}
    for row, pair in traffic_pairs(results):
        if row["arrivals"] == "closed" and "pp" not in row:
            moving.setdefault((row["model"], row["sampling"]), {})[row["clients"]] = pair
    lines = []
    for (model, sampling), by_clients in moving.items():
        cells = [standing.get((model, sampling)), *map(by_clients.get, TRAFFIC)]
        if by_clients.keys() & set(TRAFFIC):
            words = ["" if one is None else one.change_words() for one in cells]
            lines.append([f"{model}, {SHORT.get(sampling) or title(sampling)}", *words])
    head = ["tokens/s, change", f"batch of {STANDING} that stays", *(f"{clients} clients" for clients in TRAFFIC)]
    return (head, lines) if lines else None


def _all_pairs(folder: Path) -> list[tuple[str, str, Pair]]:
    """Name, unit and pair of every cell of servers."""
    pairs = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for row, pair in server_pairs(results):
            about = f"{results.name}, {served(row)}, batch of {row['batch']}, {title(row['sampling'])}"
            pairs.append((about, "µs per token", pair))
        for row, pair in traffic_pairs(results):
            clients = f"{row['clients']} clients" if row["clients"] else "Poisson arrivals"
            pairs.append((f"{results.name}, {served(row)}, {clients}, {title(row['sampling'])}", "tokens/s", pair))
        for row, pair in draft_pairs(results):
            about = f"{results.name}, {row['model']}, drafts of {row['algorithm']}, batch of {row['batch']}"
            pairs.append((f"{about}, temperature {row['temperature']:g}", "tokens/s", pair))
    return pairs


def losses(folder: Path) -> str:
    """How many cells of servers are slower than stock; those that are for certain, or by ``MUCH``; then the last
    step."""
    pairs = _all_pairs(folder)
    slower = [one for one in pairs if one[2].slower]
    certain = [one for one in slower if one[2].certain]
    faster = sum(pair.certain for _, _, pair in pairs if not pair.slower)
    rest = len(pairs) - faster - len(certain)
    much = [one for one in slower if abs(one[2].change) >= MUCH and not one[2].certain]
    much.sort(key=lambda one: -abs(one[2].change))
    lines = [[about, f"{pair.figures()} {unit}", pair.change_words()] for about, unit, pair in [*certain, *much]]
    lines += [line for gpu in gpus(folder) for line in _slower_answers(Results(gpu, folder))]
    words = f"{len(pairs)} cells of servers were compared with stock. For certain {faster} are faster and "
    words += f"{_are(len(certain))} slower; of the other {rest}, {_are(len(slower) - len(certain))} slower, "
    words += f"{len(much)} by {MUCH} % or more: below."
    return f"{words}\n\n{markdown((['slower', 'stock → ours', 'change'], lines))}\n\n{_kernels_lost(folder)}"


def _are(count: int) -> str:
    return f"{count} is" if count == 1 else f"{count} are"


def _slower_answers(results: Results) -> list[list[str]]:
    """The slowest answers under load, where ours are slower than stock's."""
    lines = []
    for of in results.sides("load", fields=("model", "concurrency")).values():
        one, ours = (of[side]["answer_s_p99"] for side in (STOCK, FLASHSAMPLE))
        if ours > one:
            about = f"{results.name}, {of[STOCK]['model']}, {of[STOCK]['concurrency']:,} clients, P99 of an answer"
            lines.append([about, f"{one:.1f} → {ours:.1f} s", f"{100 * (ours / one - 1):+.1f} %, spread unknown"])
    return lines


def _kernels_lost(folder: Path) -> str:
    """Cells of the last step in which another path or a baseline was faster than the path that a batch takes."""
    cells, lost, worst = 0, 0, 1.0
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for cell in results.cells:
            for sampling in cell.samplings:
                if (picked := cell.picked(sampling)) is None:
                    continue
                others = [row["us"] for path in (*OURS, *BASELINES) if (row := cell.row(sampling, path)) is not None]
                cells, over = cells + 1, picked["us"] / min(others)
                lost, worst = lost + (over > 1), max(worst, over)
    if not cells:
        return f"The last step alone: {NOT_MEASURED}"
    return (
        f"The last step alone: in {lost} of {cells} cells something faster than the path taken was raced, by at most "
        f"{100 * (worst - 1):.1f} %."
    )


def rivals(folder: Path) -> Table | None:
    """Our paths over the fastest rival of each cell: the median of the cells of a mode, the smallest and the largest;
    and the cells where a rival is faster than the path that a server takes."""
    lines = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        cells: dict[tuple, dict[str, Row]] = collections.defaultdict(dict)
        for row in results.rows("rivals"):
            cells[row["mode"], row["D"], row["V"], row["B"]][row["path"]] = row
        over: dict[str, dict[str, list[float]]] = {}
        lost: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
        for (mode, hidden, vocab, batch), of in cells.items():
            others = [row for path, row in of.items() if not path.startswith(OF_OURS) and path not in (GEMM, READ)]
            served = next((row for row in of.values() if row.get("picked")), None)
            if not others or served is None:
                continue
            best = min(others, key=lambda row: row["us"])
            for path, row in (*of.items(), (AS_SERVED, served)):
                if path.startswith(OF_OURS) or path == AS_SERVED:
                    over.setdefault(mode, {}).setdefault(path, []).append(row["us"] / best["us"])
            if served["us"] > best["us"]:
                slower = served["us"] / best["us"]
                lost[mode].append((slower, f"{best['path']}, {vocab}x{hidden}, {batch} rows, {slower:.3f}"))
        for mode, paths in over.items():
            words = [_span(paths[path]) if path in paths else "" for path in RACED_PATHS]
            worst = f": {max(lost[mode])[1]}" if lost[mode] else ""
            lines.append([f"{results.name}, {mode}", *words, f"{len(lost[mode])} of {len(paths[AS_SERVED])}{worst}"])
    return (["time over the fastest rival's", *RACED_PATHS.values(), "a rival is faster in"], lines) if lines else None


def _span(values: list[float]) -> str:
    """The median, the smallest and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tuned(folder: Path) -> str:
    """The gains of tuned tables over the built-in choices, per kind and head, measured again in another process; then
    their choices between the measured sizes."""
    heads: dict[str, dict[str, list[float]]] = {}
    words = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for head, replayed in results.section("tuning", "replay").items():
            name = f"{results.name}, {head}"
            over: dict[str, list[float]] = collections.defaultdict(list)
            for size in replayed["sizes"]:
                over[size["kind"]].append(size["us"] / size["default_us"])
            heads[name] = over
            if (swept := results.section("tuning", "sweep").get(head)) is not None:
                lost = [race["off"] for race in swept["raced"] if race["slower"]]
                most = f", by at most {100 * max(lost):.1f} %" if lost else ""
                slower = f"slower in {swept['slower']} of {swept['places']} places{most}"
                words.append(f"Between the measured sizes the choices of {name} are {slower}.")
    if not heads:
        return NOT_MEASURED
    kinds = dict.fromkeys(kind for over in heads.values() for kind in over)
    lines = [[_kind_words(kind), *(_gains(over.get(kind, [])) for over in heads.values())] for kind in kinds]
    return "\n\n".join([markdown((["gain of a table", *heads], lines)), *words])


def _kind_words(kind: str) -> str:
    plain = kind.removesuffix(SCREEN)
    return KINDS.get(plain, plain) + ", with a screen" * kind.endswith(SCREEN)


def regret(folder: Path) -> Table | None:
    """How much slower the choices of tables are than the fastest that a search of the longer effort found; by head,
    over all kinds and batch sizes. A choice that was faster than the fastest by half of the rounds loses nothing."""
    lines = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for head, searched in results.section("tuning", "regret").items():
            for effort in TABLE_EFFORTS:
                sizes = [size for size in searched["sizes"] if size["by"] == effort]
                if sizes:
                    mean = sum(max(0.0, size["off"]) for size in sizes) / len(sizes)
                    worst = max(sizes, key=lambda size: size["off"])
                    most = f"{100 * worst['off']:.1f} % ({_kind_words(worst['kind'])}, {worst['batch']} rows)"
                    where = f"{results.name}, {head}, `{effort}`, commit {searched['commit'][:7]}"
                    lines.append([where, f"{100 * mean:.2f} %", most])
    sizes = "1, 8, 16, 48, 96 and 200 rows, screens up to 48, plain and truncated"
    head = (
        f"time that the choices of a table lose to the fastest of six per path that a full search timed best ({sizes})"
    )
    return ([head, "on average", "at most"], lines) if lines else None


def proposals(folder: Path) -> Table | None:
    """How much slower than the fastest of a sweep searches choose, without the sampler's share of their trials and with
    it; by head, over all batch sizes. Without its share it still proposes where a search has tried all seeds."""
    lines = []
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for head, searched in results.section("tuning", "proposals").items():
            cells: dict[str, dict[bool, list[Row]]] = {}
            for size in searched["sizes"]:
                cells.setdefault(size["effort"], {}).setdefault(size["share"] > 0, []).append(size)
            for effort, of in cells.items():
                where = f"{results.name}, {head}, `{effort}`, commit {searched['commit'][:7]}"
                lines.append([where, *(_regret(of[shared]) for shared in (False, True))])
    head = ["regret of a search (trials that Optuna proposed)", "without its share", "with its share"]
    return (head, lines) if lines else None


def _regret(sizes: list[Row]) -> str:
    """The mean over the batch sizes of one search, its standard error, and the trials."""
    mean = sum(size["off"] for size in sizes) / len(sizes)
    error = math.sqrt(sum(size["se"] ** 2 for size in sizes)) / len(sizes)
    return f"{100 * mean:.2f} ± {100 * error:.2f} % ({sizes[0]['proposed']} of {sizes[0]['trials']})"


def deterministic(folder: Path) -> Table | None:
    """Servers of deterministic inference, stock and ours: time per output token, by batch size."""
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for results in (Results(gpu, folder) for gpu in gpus(folder)):
        for of in results.sides("serve", STOCK, fields=SERVER).values():
            row = next(iter(of.values()))
            if len(of) == 2 and row.get("deterministic"):
                cell = cells.setdefault((results.name, row["model"], row["sampling"]), {})
                cell[row["batch"]] = pair_words(of[STOCK], of[FLASHSAMPLE])
    batches = sorted({batch for cell in cells.values() for batch in cell})
    lines = [
        [f"{name}, {model}, {title(sampling)}", *(cell.get(batch, "") for batch in batches)]
        for (name, model, sampling), cell in cells.items()
    ]
    head = ["µs per output token, stock → ours (ratio; ± the larger spread)", *(f"B={batch}" for batch in batches)]
    return (head, lines) if lines else None


def answers(folder: Path) -> Table | None:
    """Answers of servers of deterministic inference, compared bit by bit with those of one request at a time."""
    lines = [
        [f"{results.name}, {row['model']}, {row['way']}"]
        + [f"{row[name]:,}" for name in ("different", "different_logprobs")]
        + [f"{row.get('without_all_logprobs', 0):,}"]  # a file without the field has no such answer: its run would end
        + [f"{row[name]:,}" for name in ("requests", "tokens", "retractions")]
        for results in (Results(gpu, folder) for gpu in gpus(folder))
        for row in results.rows("serve", "answers")
    ]
    head = ["asked", "with other tokens than alone", "with other logprobs", "lacking a logprob, not compared"]
    head += ["requests", "tokens", "retracted"]
    return (head, lines) if lines else None


def _gains(over: list[float]) -> str:
    """The mean gain over the sizes of one kind, and the largest; in how many sizes the choice is not the built-in
    one."""
    if not over:
        return ""
    mean, other = statistics.fmean(1 - ratio for ratio in over), sum(ratio != 1.0 for ratio in over)
    return f"{100 * mean:.1f} % ({100 * (1 - min(over)):.1f} %; {other} of {len(over)})" if other else "0"


# --- conditions and age ---------------------------------------------------------------------------------------------


@functools.cache
def current(place: str) -> str:
    """Fingerprint of this tree's code that draws there, a place of ``place_of``."""
    return fingerprint(drawing_code(place))


def runs_of(data: dict[str, Any]) -> list[Row]:
    """The runs that a file has results of."""
    rows, sections = data.get("rows", []), data.get("sections", {}).values()
    runs = [data["runs"][place] for place in sorted({row["run"] for row in rows if "run" in row})]
    parts = [part for section in sections for part in (section, *section.values())]
    return runs + [part for part in parts if isinstance(part, dict) and "command" in part] or [data["env"]]


def with_this_code(file: Path) -> bool:
    """True if every run of a result file was made with the code that draws in this tree."""
    return all(_has_this_code(place_of(file.name), run) for run in runs_of(read(file)))


def _has_this_code(place: str, run: Row) -> bool:
    return run.get("drawing_code", {}).get(place) == current(place)


def with_other_code(folder: Path = RESULTS) -> list[str]:
    """Names of the files that were measured with other code, or that do not say with which."""
    return [file.name for file in result_files(folder) if not with_this_code(file)]


def age(folder: Path) -> str:
    files, others = result_files(folder), with_other_code(folder)
    silent = sum(any("drawing_code" not in run for run in runs_of(read(folder / name))) for name in others)
    words = f"**{len(files) - len(others)} of {len(files)} result files were measured with the kernels of this commit, "
    names = f": {', '.join(f'`{name}`' for name in others)}" if others else ""
    words += f"{len(others)} with older kernels, some in parts**{names}"
    return f"{words}; {silent} of these do not say with which commit."


def sglang_of(files: Iterable[dict[str, Any]]) -> set[str]:
    """The versions of SGLang that files were measured with."""
    return {run.get("sglang") or data["env"].get("sglang") for data in files for run in runs_of(data)} - {None}


def _conditions(files: Iterable[dict[str, Any]]) -> str:
    """The cards, versions and dates of result files."""
    files = list(files)
    versions = {"SGLang": sglang_of(files)}
    for name, key in (("torch", "torch"), ("Triton", "triton"), ("FlashInfer", "flashinfer")):
        versions[name] = {data["env"][key] for data in files if data["env"].get(key)}
    dates = sorted(run["date"] for data in files for run in runs_of(data))
    cards = sorted({data["env"]["device"] for data in files})
    words = [f"{name} {' and '.join(sorted(found))}" for name, found in versions.items() if found]
    return f"{' and '.join(cards)}; {', '.join(words)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."


def conditions_of(results: Results, *benchmarks: str) -> str:
    return _conditions(data for name in benchmarks if (data := results.data(name)))


def conditions(folder: Path) -> str:
    """The cards, versions and dates of all files of GPUs."""
    files = [data for file in result_files(folder) if (data := read(file))["env"]["device"] != "cpu"]
    return _conditions(files) if files else NOT_MEASURED


def _table(make: Callable[[Path], Table | None], subject: str = "") -> Callable[[Path], str]:
    """subject: of the words where nothing is measured yet."""
    return lambda folder: markdown(table) if (table := make(folder)) is not None else f"{subject}{NOT_MEASURED}"


SECTIONS: dict[str, Callable[[Path], str]] = {
    "summary-kernels": _table(summary_kernels),
    "summary-serve": _table(summary_serve),
    "eight": _table(eight),
    "conditions": conditions,
    "age": age,
    "standing-and-traffic": _table(standing_and_traffic),
    "losses": losses,
    "rivals": _table(rivals),
    "tuned": tuned,
    "regret": _table(regret),
    "proposals": _table(proposals, "Regret without the proposals of Optuna, and with them: "),
    "deterministic": _table(deterministic),
    "answers": _table(answers),
}
