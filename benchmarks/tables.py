"""The tables of the pages, from the files in ``results/`` and nothing else. Needs no torch.

A result file is ``<gpu>-<benchmark>.json``: ``h200-kernels.json``, ``h100-serve.json``; ``cpu.json`` is of a CPU. A
table that has no file says so, and a GPU that was not measured is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from step_profile import SYNCHRONISING

from sgl_flashsample.tools.samplings import SAMPLINGS

RESULTS = Path(__file__).resolve().parent / "results"
# The names of files and of pages; others follow, as their files are called.
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
# Sections of tuning.py, in words.
TUNING = {
    "runs": "a run, and a second one",
    "regret": "the search's choice over the best of a sweep",
    "sweep": "between the measured sizes, against the default",
    "replay": "measured again in a fresh process",
}
EXCHANGED = (151936, 4096, 64)  # V, D, B of the table
SUMMARY_BATCHES = (1, 16, 64, 256)
SUMMARY_SAMPLINGS = ("t1", "trunc", "greedy")


@dataclasses.dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]

    @property
    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid(corner: str, rows: dict[Any, str], columns: dict[Any, str], cell: Callable[[Any, Any], str]) -> Table | None:
    """A line per row and a cell per column; rows without a word are left out. rows, columns: {key: name}."""
    lines = [[name, *(cell(row, column) for column in columns)] for row, name in rows.items()]
    lines = [line for line in lines if any(line[1:])]
    return Table([corner, *columns.values()], lines) if lines else None


def sizes(batches: Iterable[int]) -> dict[int, str]:
    return {batch: f"B={batch}" for batch in sorted(set(batches))}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was raced together: everything of one head and batch size."""

    hidden: int
    vocab: int
    batch: int
    rows: dict[tuple[str, str], dict[str, Any]]  # mode, path

    @property
    def head(self) -> str:
        return f"{self.vocab:,} x {self.hidden:,}"

    def row(self, mode: str, path: str) -> dict[str, Any] | None:
        return self.rows.get((NOTHING if path in (GEMM, READ) else mode, path))

    def us(self, mode: str, path: str) -> float | None:
        row = self.row(mode, path)
        return row["us"] if row is not None else None

    @property
    def floor(self) -> float | None:
        """Microseconds that reading the head once takes."""
        return self.us(NOTHING, READ)

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(mode for mode, _ in self.rows if mode != NOTHING))

    def picked(self, mode: str, *, screen: bool = False) -> dict[str, Any] | None:
        """The row of the path that a batch takes by itself. screen: where its head has one, if that is the screened
        path."""
        paths = (SCREENED,) if screen else OURS
        rows = [row for path in paths if (row := self.row(mode, path)) is not None and row.get("picked")]
        return rows[0] if rows else None

    def fastest(self, mode: str, paths: Iterable[str]) -> dict[str, Any] | None:
        rows = [row for path in paths if (row := self.row(mode, path)) is not None]
        return min(rows, key=lambda row: row["us"]) if rows else None

    def fastest_baseline(self, mode: str) -> dict[str, Any] | None:
        """Of those that draw."""
        return self.fastest(mode, [path for path in PATHS if path not in (*OURS, SCREENED, GEMM)])


class Results:
    """The result files of one GPU; each is read when it is first asked for."""

    def __init__(self, gpu: str, folder: Path = RESULTS) -> None:
        self.gpu, self.folder = gpu, folder

    def file(self, benchmark: str) -> Path:
        return self.folder / (f"{self.gpu}-{benchmark}.json" if self.gpu else f"{benchmark}.json")

    @functools.cache  # noqa: B019 (one process, a few files)
    def data(self, benchmark: str) -> dict[str, Any] | None:
        """None where it was not measured. Raises ValueError for a file that is no result."""
        file = self.file(benchmark)
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

    def section(self, benchmark: str, name: str) -> dict[str, Any] | None:
        data = self.data(benchmark)
        return data.get("sections", {}).get(name) if data is not None else None

    def serve_rows(self, section: str, benchmark: str = "serve") -> list[dict[str, Any]]:
        data = self.data(benchmark)
        return [row for row in data["rows"] if row["section"] == section] if data is not None else []

    @functools.cached_property
    def cells(self) -> list[Cell]:
        data, cells = self.data("kernels"), dict[tuple[int, int, int], Cell]()
        for row in data["rows"] if data is not None else ():
            key = row["D"], row["V"], row["B"]
            cells.setdefault(key, Cell(*key, {})).rows[row["sampling"], row["path"]] = row
        return list(cells.values())

    def about(self, benchmark: str, section: str | None = None) -> str:
        """One line: on what and how a table was made."""
        data = self.data(benchmark)
        assert data is not None
        env = data["env"]
        runs: list[dict[str, Any]] = [env]
        if "runs" in data:
            used = {row["run"] for row in data["rows"] if section in (None, row.get("section"))}
            runs = [data["runs"][place] for place in sorted(used)]
        elif section is not None and (part := self.section(benchmark, section)) is not None:
            runs = [part] if "command" in part else list(part.values())
        versions = [f"{name} {env[key]}" for name, key in (("torch", "torch"), ("Triton", "triton")) if env.get(key)]
        sglang = dict.fromkeys(run["sglang"] for run in runs if run.get("sglang"))
        versions += [f"SGLang {version}" for version in sglang]
        flashinfer = env.get("flashinfer") or env.get("servers", {}).get("flashinfer-python")
        versions += [f"FlashInfer {flashinfer}"] if flashinfer not in (None, "none") else []
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
    """Those with a result file; the ones that ``GPUS`` names first."""
    names = {file.name.partition("-")[0] for file in folder.glob("*-*.json")}
    return [gpu for gpu in GPUS if gpu in names] + sorted(names - GPUS.keys())


def ratio(row: dict[str, Any] | None, ours: float) -> str:
    return "" if row is None else f"{row['us'] / ours:.2f}"


def kernels(results: Results) -> Table | None:
    """The whole last step on the path that a batch takes by itself, beside the floor and the fastest baselines."""
    head = ["V x D, B", "floor", "GEMM alone", "temperature 1 (over floor; over GEMM; path)", "with a screen"]
    head += ["fastest baseline (of ours)", "greedy (baseline of ours)", "top_k 50, top_p 0.9 (baseline of ours)"]
    rows = []
    for cell in results.cells:
        plain, floor, gemm = cell.picked("t1"), cell.floor, cell.us(NOTHING, GEMM)
        if plain is None or floor is None or gemm is None:
            continue
        us, screened, baseline = plain["us"], cell.picked("t1", screen=True), cell.fastest_baseline("t1")
        line = [f"{cell.head}, {cell.batch}", f"{floor:.0f}", f"{gemm:.0f}"]
        line.append(f"{us:.0f} ({us / floor:.3f}; {us / gemm:.3f}; {plain['path']})")
        line.append("" if screened is None else f"{screened['us']:.0f} ({screened['us'] / floor:.3f})")
        line.append(
            "" if baseline is None else f"{PATHS[baseline['path']]} {baseline['us']:.0f} ({ratio(baseline, us)})"
        )
        for mode in ("greedy", "k50p90"):
            taken, other = cell.picked(mode), cell.fastest_baseline(mode)
            line.append("" if taken is None else f"{taken['us']:.0f} ({ratio(other, taken['us']) or 'none'})")
        rows.append(line)
    return Table(head, rows) if rows else None


def kernels_faster(results: Results) -> Table | None:
    """Whatever draws a token faster than the path that a batch takes by itself, our other path among it; the worst
    first."""
    lines = []
    for cell in results.cells:
        for mode in cell.modes:
            picked = cell.picked(mode)
            for path in PATHS if picked is not None else ():
                row = cell.row(mode, path)
                if picked is None or row is None or path in (GEMM, SCREENED) or row["us"] >= picked["us"]:
                    continue
                within = picked["us"] - row["us"] <= row["us_spread"] + picked["us_spread"]
                line = [f"{cell.head}, {cell.batch}", SAMPLINGS[mode].title, f"{PATHS[path]} {row['us']:.1f}"]
                line += [f"{picked['path']} {picked['us']:.1f}", f"{picked['us'] / row['us']:.3f}"]
                lines.append((picked["us"] / row["us"], [*line, "yes" if within else ""]))
    head = ["V x D, B", "sampling", "faster, us", "taken, us", "taken over faster", "within the spread"]
    rows = [line for _, line in sorted(lines, key=lambda one: -one[0])]
    return Table(head, rows or [["none", *[""] * (len(head) - 1)]]) if results.cells else None


class Features:
    """What features.py has measured. Times are of the median profile, ratios of the worst."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rows = {(row["profile"], row["B"], row["path"], row["sampling"]): row for row in data["rows"]}
        self.profiles = list(dict.fromkeys(key[0] for key in self.rows))
        self.batches = sizes(key[1] for key in self.rows)
        self.modes = [mode for mode in SAMPLINGS if any(key[3] == mode for key in self.rows)]

    def rows_of(self, batch: int, path: str, mode: str) -> list[dict[str, Any]]:
        keys = [(profile, batch, path, mode) for profile in self.profiles]
        return [self.rows[key] for key in keys if key in self.rows]

    def us(self, batch: int, path: str, mode: str) -> float | None:
        return statistics.median(us) if (us := [row["us"] for row in self.rows_of(batch, path, mode)]) else None

    def screened_us(self, batch: int, mode: str) -> float | None:
        """With a screen of the head; None where such a batch does not take it."""
        rows = [row for row in self.rows_of(batch, "picked with screen", mode) if row["form"].startswith("screened")]
        return statistics.median(row["us"] for row in rows) if rows else None

    def over_plain(self, batch: int, mode: str) -> float | None:
        """Less the time to read the edits."""
        rows = [
            (row, self.rows.get((row["profile"], batch, "picked", "t1"))) for row in self.rows_of(batch, "picked", mode)
        ]
        over = [(row["us"] - row.get("bytes_us", 0.0)) / plain["us"] for row, plain in rows if plain is not None]
        return max(over, default=None)

    def baseline_over(self, batch: int, mode: str) -> float | None:
        """What the fastest baseline takes over ours."""
        ratios = []
        for row in self.rows_of(batch, "picked", mode):
            others = [self.rows.get((row["profile"], batch, path, mode)) for path in PATHS]
            times = [other["us"] for other in others if other is not None]
            ratios += [min(times) / row["us"]] if times else []
        return min(ratios) if ratios else None


def features_table(results: Results, edited: bool) -> Table | None:
    """Per mode, with edits or without them, and batch size: over plain, the fastest baseline over it, the time to read
    the edits, and with a screen."""
    if (data := results.data("features")) is None:
        return None
    features = Features(data)

    def words(mode: str, batch: int) -> str:
        us, screened = features.us(batch, "picked", mode), features.screened_us(batch, mode)
        bytes_us = [row["bytes_us"] for row in features.rows_of(batch, "picked", mode) if "bytes_us" in row]
        over, baseline = features.over_plain(batch, mode), features.baseline_over(batch, mode)
        notes = [f"{over:.3f}"] if over else []
        notes += [f"baseline {baseline:.2f}"] if baseline else []
        notes += [f"{statistics.median(bytes_us):.1f} us to read"] if bytes_us else []
        notes += [f"with a screen {screened:.0f}"] if screened else []
        return f"{us:.0f} ({'; '.join(notes)})" if us else ""

    rows = {mode: SAMPLINGS[mode].title for mode in features.modes if bool(SAMPLINGS[mode].edits) is edited}
    return grid("us (over plain; ...)", rows, features.batches, words)


def searches(results: Results) -> Table | None:
    """Share of truncated rows that took a search, per profile, and the tokens compared with the reference."""
    if (data := results.data("features")) is None:
        return None
    counts = {(row["profile"], row["sampling"]): row for row in data["searches"]}

    def words(profile: str, mode: str) -> str:
        if mode in SAMPLINGS:
            return f"{counts[profile, mode]['searched'] / counts[profile, mode]['rows']:.2%}"
        of_profile = [row for row in data["searches"] if row["profile"] == profile]
        return ", ".join(str(sum(row[key] for row in of_profile)) for key in ("compared", "different", "near_ties"))

    columns = {mode: sampling.title for mode, sampling in SAMPLINGS.items() if any(key[1] == mode for key in counts)}
    profiles = {key[0]: key[0] for key in counts}
    return grid("rows searched", profiles, columns | {"": "compared, different, near-ties"}, words)


def screened_speed(results: Results) -> Table | None:
    """The screened path beside the fused one, over the floor, with the groups that it read."""
    if (section := results.section("screened", "speed")) is None:
        return None
    measured = {(row["B"], row["profile"], row["path"], row["sampling"]): row for row in section["rows"]}

    def words(key: tuple[int, str], mode: str) -> str:
        row, fused, floor = (measured.get((*key, *one)) for one in ((SCREENED, mode), ("fused", mode), (READ, NOTHING)))
        if row is None or fused is None or floor is None:
            return ""
        over = [row["us"] / other["us"] for other in (fused, floor)]
        return f"{row['us']:.0f} ({over[0]:.3f}; {over[1]:.3f}; {row['groups_read']})"

    columns = {key[3]: SAMPLINGS[key[3]].title for key in measured if key[2] == SCREENED}
    corner = "us (over fused; over the floor; groups read): B, profile"
    return grid(corner, {key[:2]: f"{key[0]}, {key[1]}" for key in measured}, columns, words)


def screened_tokens(results: Results) -> Table | None:
    """Tokens of the screened path that are not the fused one's, and groups that each row left to be decided."""
    if (section := results.section("screened", "tokens")) is None:
        return None
    measured = {(row["head"], row["temperature"], row["truncated"]): row for row in section["rows"]}

    def words(kind: str, column: tuple[float, bool]) -> str:
        row = measured[kind, *column]
        left = f"; {row['left']:.2%}" if row["truncated"] else ""
        return "{rows:,}; {different} ({no_near_tie} no near-tie); {candidates_per_row}".format(**row) + left

    columns = {key[1:]: f"T={key[1]:g}{', truncated' * key[2]}" for key in measured}
    corner = "rows; different; candidate groups per row; left to a search"
    return grid(corner, {key[0]: key[0] for key in measured}, columns, words)


def screened_distribution(results: Results) -> Table | None:
    section = results.section("screened", "distribution")
    if section is None:
        return None
    line = ["{V:,}", "{draws:,}", "{total_variation:.6f}", "{by_chance:.6f}", "{deviations_from_chance:+.1f}"]
    head = ["ids", "draws", "total variation", "by chance alone", "deviations from that"]
    return Table(head, [[cell.format(**section) for cell in line]])


def serve(results: Results) -> Table | None:
    """Time per output token, stock and ours, per model, sampling and batch size."""
    return _pairs(results.serve_rows("stock"), "stock", "flashsample", _pair_words)


def _short(spread: float) -> str:
    return f"{spread:.0f}" if spread >= 1 else f"{spread:.1f}"


def _pair_words(stock: dict[str, Any], ours: dict[str, Any], time: str = "tpot_us", spread: str = "spread_us") -> str:
    """Both times, their ratio and the larger spread, by the names of their fields."""
    over, widest = ours[time] / stock[time], max(stock[spread], ours[spread])
    return f"{stock[time]:.0f} → {ours[time]:.0f} ({over:.3f}; ± {_short(widest)})"


def serve_screen(results: Results) -> Table | None:
    """Time per output token of our server with a screen, over that without one."""

    def words(off: dict[str, Any], on: dict[str, Any]) -> str:
        same = f"; {on['same_answers']} of {on['batch']} answers the same" if "same_answers" in on else ""
        return f"{on['tpot_us']:.0f} ({on['tpot_us'] / off['tpot_us']:.3f}{same})"

    return _pairs(results.serve_rows("screen"), "screen off", "screen on", words)


def serve_graphs(results: Results) -> Table | None:
    """Time per output token of our server with one root in the model's graphs, and with two; and the gaps in each."""

    def words(one: dict[str, Any], two: dict[str, Any]) -> str:
        gaps = f"gaps {one['gaps_us']:.0f} → {two['gaps_us']:.0f}" if "gaps_us" in two else ""
        same = f"{two['same_answers']} of {two['batch']} answers the same" if "same_answers" in two else ""
        return f"{_pair_words(one, two)[:-1]}; {'; '.join(filter(None, (gaps, same)))})"

    return _pairs(results.serve_rows("graphs"), "one root", "two roots", words)


def serve_oracle(results: Results) -> Table | None:
    """Time per output token of a server whose sampler draws nothing, and ours."""
    return _pairs(results.serve_rows("oracle"), "oracle", "flashsample", _pair_words)


def serve_plane(results: Results) -> Table | None:
    """Time per output token of our server with the fused pass and with the decision plane; of one that draws nothing,
    where that was measured too."""
    nothing = {
        (_served(row), row["sampling"], row["batch"]): row["tpot_us"]
        for row in results.serve_rows("oracle", "decision-plane")
        if row["backend"] == "oracle"
    }

    def words(fused: dict[str, Any], plane: dict[str, Any]) -> str:
        least = nothing.get((_served(plane), plane["sampling"], plane["batch"]))
        notes = [] if least is None else [f"nothing drawn {least:.0f}"]
        notes += [f"{plane['same_answers']} of {plane['batch']} answers the same"] if "same_answers" in plane else []
        return f"{'; '.join([_pair_words(fused, plane)[:-1], *notes])})"

    return _pairs(results.serve_rows("plane", "decision-plane"), "flashsample", "decision plane", words)


def serve_repeats(results: Results) -> Table | None:
    """Of comparisons of the same two servers, how many call ours faster, and between which changes."""
    rows = {(_served(row), row["sampling"], row["batch"]): row for row in results.serve_rows("repeats")}

    def words(key: tuple[str, str], batch: int) -> str:
        if (row := rows.get((*key, batch))) is None:
            return ""
        changes = sorted(change for change, _, _ in row["percent"])
        slower = f", {row['slower']} slower" * bool(row["slower"])
        return f"{row['faster']} of {len(changes)} faster{slower} ({changes[0]:+.1f} to {changes[-1]:+.1f} %)"

    names = {key[:2]: f"{key[0]}, {SAMPLINGS[key[1]].title}" for key in rows}
    return grid("verdicts (changes of the time per token)", names, sizes(key[2] for key in rows), words)


def exchanged(results: Results) -> Table | None:
    """What a step of several ranks takes by its bytes: the head, from its measured read, and what ranks exchange."""
    cell = next((c for c in results.cells if (c.vocab, c.hidden, c.batch) == EXCHANGED and c.floor), None)
    if cell is None:
        return None
    rows = []
    for ranks in (2, 4, 8, 16):
        width, others = cell.vocab / ranks, ranks - 1
        each = -(-cell.batch // ranks)
        stock, records = cell.batch * others * width * 2, cell.batch * others * 20
        whole_rows = records + others * each * width * 2
        received = [f"{count / 1e6:.3g}" for count in (stock, records, whole_rows)]
        rows.append([str(ranks), f"{cell.floor / ranks:.0f}", *received, f"{cell.batch * cell.vocab * 6 / 1e6:.0f}"])
    head = ["ranks", "head read, us", "gather of logits, MB", "records, MB", "whole rows, MB"]
    return Table([*head, "stock's float32 copy, MB"], rows)


def cpu(results: Results) -> Table | None:
    """Microseconds per call of the cpu path, over one read of the logits; then of the others."""
    rows = (results.data("cpu") or {}).get("rows", [])
    measured = {(row["V"], row["B"], row["threads"], row["sampling"], row["path"]): row["us"] for row in rows}
    modes = {mode: SAMPLINGS[mode].title for mode in ("t1", "greedy", "k50p90")}

    def words(key: tuple[int, int, int], mode: str) -> str:
        ours, read = measured.get((*key, mode, "cpu")), measured.get((*key, "", READ))
        if ours is None or read is None:
            return ""
        others = ((path, measured.get((*key, mode, path))) for path in ("stock", "torch"))
        return "; ".join(
            [f"{ours:,.0f} ({ours / read:.2f} of a read)", *(f"{path} {us:,.0f}" for path, us in others if us)]
        )

    keys = dict.fromkeys((row["V"], row["B"], row["threads"]) for row in rows)
    return grid("us", {key: f"{key[0]:,} ids, B={key[1]}, {key[2]} threads" for key in keys}, modes, words)


def _lost(row: dict[str, Any]) -> int:
    return sum(count for end, count in row["ends"].items() if end not in ("answered", "left"))


def load(results: Results) -> Table | None:
    """What became of the requests of each server, its slowest answers and gaps, and what its memory has grown by."""
    head = ["", "requests", "lost", "tokens/s", "answers, P50 and P99", "gaps, P50 and P99", "memory, growth", "graphs"]
    lines = []
    for row in (results.data("load") or {}).get("rows", []):
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
        lines.append([about, f"{row['requests']:,}", f"{_lost(row):,}", f"{row['tokens_per_s']:,.0f}", *times])
        lines[-1] += ["; ".join(memory), graphs]
    return Table(head, lines) if lines else None


def _speculation_rows(results: Results, section: str) -> list[dict[str, Any]]:
    return [row for row in (results.data("speculation") or {}).get("rows", []) if row["section"] == section]


def speculation_tokens(results: Results) -> Table | None:
    """Tokens of seeded requests with drafts, against those without: until the first difference of each answer."""
    rows = [row for row in _speculation_rows(results, "tokens") if row["backend"] != "no drafts"]
    if not rows:
        return None
    head = ["drafts", "tokens compared", "first differences that are near-ties", "other differences"]
    cells = [
        [
            f"{row['model']}, {row['draft_tokens']} nodes of {row['algorithm']}, {row['backend']}, "
            f"temperature {row['temperature']:g}",
            *(f"{row[name]:,}" for name in ("tokens", "near_ties", "different")),
        ]
        for row in rows
    ]
    return Table(head, cells)


def speculation_parts(results: Results) -> Table | None:
    """Microseconds of the parts of a step on the GPU, of servers with traces, and of the rest of the step."""
    rows = [row for row in _speculation_rows(results, "speed") if "busy_us" in row]
    if not rows:
        return None
    parts = {
        "target": "target_us",
        "its head": "head_us",
        "verification, with the head": "verify_us",
        "drafts": "drafts_us",
        "one draft": "draft_step_us",
        "GPU busy": "busy_us",
    }
    lines = []
    for row in rows:
        about = f"{row['model']}, {row['draft_tokens']} nodes of {row['algorithm']}, B={row['batch']}"
        cells = [f"{row[field]:.0f}" if field in row else "" for field in parts.values()]
        waits = f"{max(0.0, row['step_us'] - row['busy_us']):.0f}"
        operations = str(len(row["logits_operations"])) if "logits_operations" in row else ""
        lines.append([f"{about}, temperature {row['temperature']:g}, {row['backend']}", *cells, waits, operations])
    return Table(["us per step", *parts, "GPU waits", "operations on logits"], lines)


def speculation(results: Results) -> Table | None:
    """Tokens per second, accepted drafts and microseconds of a step of each server; with a trace, those of the
    verification and of a draft."""
    rows = _speculation_rows(results, "speed")
    fields = ("model", "algorithm", "draft_tokens", "batch", "temperature", "error")
    measured: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        measured.setdefault(tuple(map(row.get, fields)), {})[row["backend"]] = row

    def about(key: tuple) -> str:
        model, algorithm, nodes, batch, temperature, _ = key
        distances = [row["draft_tv"] for row in measured[key].values() if "draft_tv" in row]
        distance = f", total variation {min(distances):.2f}" if distances else ""
        return f"{model}, {nodes} nodes of {algorithm}, B={batch}, temperature {temperature:g}{distance}"

    def words(key: tuple, backend: str) -> str:
        if (row := measured[key].get(backend)) is None:
            return ""
        text = f"{row['tokens_s']:.0f} ± {row['tokens_s_spread']:.0f} ({row['acceptance']:.2f})"
        text += f"; step {row['step_us']:.0f} ± {row['step_us_spread']:.0f}"
        text += f", verification {row['verify_us']:.0f}" if "verify_us" in row else ""
        return text + (f", draft {row['draft_step_us']:.0f}" if "draft_step_us" in row else "")

    backends = {row["backend"]: row["backend"] for row in rows}
    return grid("tokens/s", {key: about(key) for key in measured}, backends, words)


def _rank_rows(results: Results, *sections: str) -> list[dict[str, Any]]:
    rows = (results.data("ranks") or {}).get("rows", [])
    return [row for row in rows if row["section"] in sections]


def ranks_exchange(results: Results) -> Table | None:
    """Microseconds of each way to exchange, by batch size."""
    rows = _rank_rows(results, "exchange")
    if not rows:
        return None
    measured = {(row["exchange"], row["batch"]): row for row in rows}

    def words(key: tuple[str], batch: int) -> str:
        row = measured.get((*key, batch))
        return f"{row['us']:.1f} ± {row['us_spread']:.1f}" if row is not None else ""

    names = {(row["exchange"],): row["exchange"] + ", replayed" * row["in_graph"] for row in rows}
    return grid("us", names, sizes(row["batch"] for row in rows), words)


def ranks_tokens(results: Results) -> Table | None:
    """Rows drawn by several ranks, and how many of them one rank draws differently."""
    rows = _rank_rows(results, "tokens", "soak")
    if not rows:
        return None
    head = ["rows", "ranks", "drawn", "compared with one rank", "different", "near-ties among them", "ranks disagree"]
    return Table(
        head,
        [
            [
                row.get("kind", f"all kinds, {row.get('seconds', 0):.0f} s"),
                str(row["tp"]),
                f"{row['rows']:,}",
                f"{row.get('compared', row['rows']):,}",
                str(row["differing"]),
                str(row["near_ties"]),
                str(row["ranks_differ"]),
            ]
            for row in rows
        ],
    )


def _served(row: dict[str, Any]) -> str:
    """The model, its ranks where there are several, and its drafts where it has some."""
    about = [f"{name} {row[name]}" for name in ("tp", "pp") if row.get(name, 1) > 1]
    if "speculation" in row:
        about.append(f"{row['draft_tokens']} drafts of {row['speculation']}")
    return ", ".join([row["model"], *about])


def _pairs(rows: list[dict[str, Any]], one: str, other: str, words: Callable[[dict, dict], str]) -> Table | None:
    measured = {(_served(row), row["sampling"], row["batch"], row["backend"]): row for row in rows}
    native = {key[:2] for key, row in measured.items() if row.get("paths", {"fused": 1.0}).get("fused", 0.0) < 0.5}

    def cell(key: tuple[str, str], batch: int) -> str:
        before, after = (measured.get((*key, batch, label)) for label in (one, other))
        return words(before, after) if before is not None and after is not None else ""

    keys = dict.fromkeys(
        (_served(row), sampling) for sampling in SAMPLINGS for row in rows if row["sampling"] == sampling
    )
    names = {
        key: f"{key[0]}, {SAMPLINGS[key[1]].title}{', by the sampler of SGLang' * (key in native)}"
        for key in sorted(keys, key=lambda key: key[0])
    }
    return grid("us per token", names, sizes(row["batch"] for row in rows), cell)


def serve_host(results: Results) -> Table | None:
    """Host time in our sampler per step: in long answers, and in short ones."""
    rows = results.serve_rows("host")
    measured = {(row["model"], row["screen"], row["sampling"], row["batch"]): row for row in rows}

    def words(key: tuple[str, str, str], batch: int) -> str:
        row = measured.get((*key, batch))
        return f"{row['host_us']:.0f} ({row['host_us_short']:.0f})" if row is not None else ""

    names = {key[:3]: f"{key[0]}, screen {key[1]}, {SAMPLINGS[key[2]].title}" for key in measured}
    return grid("host us per step (in short answers)", names, sizes(row["batch"] for row in rows), words)


def serve_profile(results: Results) -> Table | None:
    """Calls of one decode step, stock and ours."""
    rows = [row for row in results.serve_rows("profile") if "steps" in row]
    measured = {(_served(row), row["sampling"], row["batch"], row["backend"]): row for row in rows}
    names = {
        "graph_launches": "CUDA graphs",
        "launches": "kernel launches and copies beside them",
        "synchronising": "synchronising calls",
        "driver_allocating": "allocations from the driver",
        "tensors": "tensors from PyTorch's allocator",
        "gpu_busy_us": "GPU busy, us",
        "beside_graphs_us": "of this, beside the CUDA graphs, us",
        "gaps_us": "gaps between kernels, us",
        "exchange_us": "exchange between ranks, us",
    }

    for row in rows:
        row["synchronising"] = round(sum(row.get(name, 0.0) for name in SYNCHRONISING), 2)

    def words(name: str, key: tuple[str, str, int]) -> str:
        pair = [measured.get((*key, label)) for label in ("stock", "flashsample")]
        return " → ".join(f"{row[name]:g}" for row in pair if row is not None and name in row)

    columns = {key[:3]: f"{key[0]}, {SAMPLINGS[key[1]].title}, B={key[2]}" for key in measured}
    return grid("per decode step, stock → ours", names, columns, words)


def tuning(results: Results) -> Table | None:
    """What the autotuner promises and what was measured of it, a line per section and head."""
    data = results.data("tuning")
    if data is None:
        return None
    rows = [
        [name, head.replace("x", " x "), measured["summary"]]
        for section, name in TUNING.items()
        for head, measured in data["sections"].get(section, {}).items()
    ]
    return Table(["", "head", "measured"], rows)


def summary_kernels(results: Results) -> Table | None:
    """Of the first head: a few batch sizes, ours beside the fastest way without us."""
    modes = ("t1", "k50p90", "greedy")
    titles = (SAMPLINGS[mode].title for mode in modes)
    head = ["µs, fastest baseline → ours (ratio; larger spread)", *titles, "with a screen"]
    rows = []
    for cell in results.cells:
        if (cell.hidden, cell.vocab) != (results.cells[0].hidden, results.cells[0].vocab):
            continue
        if cell.batch in SUMMARY_BATCHES:
            line = [f"{GPUS.get(results.gpu, results.gpu)}, {cell.head}, B={cell.batch}"]
            for mode in modes:
                taken, other = cell.picked(mode), cell.fastest_baseline(mode)
                both = taken is not None and other is not None
                line.append(_pair_words(other, taken, "us", "us_spread") if both else "")
            screened = cell.picked("t1", screen=True)
            rows.append([*line, "" if screened is None else f"{screened['us']:.0f} ± {_short(screened['us_spread'])}"])
    return Table(head, rows) if rows else None


def summary_rows(results: Results) -> dict[tuple[str, str], dict[int, tuple[dict[str, Any], dict[str, Any]]]]:
    """{(model, sampling): {batch size: what was measured of stock and of ours}} of the usual samplings, of servers as
    they are by default: of one GPU, without drafts."""
    rows: dict[tuple[str, str], dict[int, dict[str, dict[str, Any]]]] = {}
    for row in results.serve_rows("stock"):
        if row["sampling"] in SUMMARY_SAMPLINGS and _served(row) == row["model"]:
            by_batch = rows.setdefault((row["model"], row["sampling"]), {})
            by_batch.setdefault(row["batch"], {})[row["backend"]] = row
    pairs = {
        key: {batch: (of["stock"], of["flashsample"]) for batch, of in sorted(by_batch.items()) if len(of) == 2}
        for key, by_batch in rows.items()
    }
    return {key: by_batch for key, by_batch in pairs.items() if by_batch}


def summary_serve(results: Results) -> Table | None:
    """Time per output token of the smallest and the largest batch, and tokens per second of that, stock and ours. Empty
    where a sampling was not measured with that batch."""
    lines, rows = [], summary_rows(results)
    batches = sorted({batch for by_batch in rows.values() for batch in by_batch})
    for (model, sampling), by_batch in rows.items():
        line, speeds = [f"{GPUS.get(results.gpu, results.gpu)}, {model}, {SAMPLINGS[sampling].title}"], ""
        for batch in (batches[0], batches[-1]):
            pair = by_batch.get(batch)
            line.append("" if pair is None else f"B={batch}: {_pair_words(*pair)}")
            speeds = "" if pair is None else " → ".join(f"{batch / row['tpot_us'] * 1e6:,.0f}" for row in pair)
        lines.append([*line, speeds])
    head = [
        "µs per token, stock → ours (ratio; larger spread)",
        "smallest batch",
        "largest batch",
        "tokens/s of the largest batch",
    ]
    return Table(head, lines) if lines else None


@dataclasses.dataclass(frozen=True)
class Section:
    """One place on a page. benchmark, part: whose file, and which of its sections, the line above the table is about.
    brief: without that line, all GPUs in one table."""

    table: Callable[[Results], Table | None]
    benchmark: str
    part: str | None = None
    brief: bool = False

    def markdown(self, folder: Path = RESULTS) -> str:
        names = ["", *gpus(folder)]  # "": of a CPU
        tables = [(one, table) for one in (Results(name, folder) for name in names) if (table := self.table(one))]
        if self.brief and tables:
            longest = max((table for _, table in tables), key=lambda table: len(table.head))
            rows = [row + [""] * (len(longest.head) - len(row)) for _, table in tables for row in table.rows]
            return Table(longest.head, rows).markdown
        blocks = [f"{results.about(self.benchmark, self.part)}\n\n{table.markdown}" for results, table in tables]
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
    "serve": Section(serve, "serve", "stock"),
    "serve-screen": Section(serve_screen, "serve", "screen"),
    "serve-repeats": Section(serve_repeats, "serve", "repeats"),
    "serve-graphs": Section(serve_graphs, "serve", "graphs"),
    "serve-oracle": Section(serve_oracle, "serve", "oracle"),
    "load": Section(load, "load"),
    "serve-plane": Section(serve_plane, "decision-plane"),
    "exchanged": Section(exchanged, "kernels"),
    "ranks-exchange": Section(ranks_exchange, "ranks", "exchange"),
    "ranks-tokens": Section(ranks_tokens, "ranks"),
    "serve-host": Section(serve_host, "serve", "host"),
    "speculation": Section(speculation, "speculation", "speed"),
    "speculation-parts": Section(speculation_parts, "speculation", "speed"),
    "speculation-tokens": Section(speculation_tokens, "speculation", "tokens"),
    "serve-profile": Section(serve_profile, "serve", "profile"),
    "kernels": Section(kernels, "kernels"),
    "kernels-faster": Section(kernels_faster, "kernels"),
    "features-truncations": Section(lambda results: features_table(results, edited=False), "features"),
    "features-edits": Section(lambda results: features_table(results, edited=True), "features"),
    "features-searches": Section(searches, "features"),
    "screened": Section(screened_speed, "screened", "speed"),
    "screened-tokens": Section(screened_tokens, "screened", "tokens"),
    "screened-distribution": Section(screened_distribution, "screened", "distribution"),
    "tuning": Section(tuning, "tuning"),
    "cpu": Section(cpu, "cpu"),
    "summary-kernels": Section(summary_kernels, "kernels", brief=True),
    "summary-serve": Section(summary_serve, "serve", "stock", brief=True),
}
