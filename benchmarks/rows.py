"""All rows of the result files in one form, for the table of docs/results/table.html. Loads no torch.

A row of the page has what filters ask for (benchmark, card, model or head, batch, sampling, contender), one figure with
its spread and unit, the time over that of the contender beside it, and every number and word of the row in its file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import (
    BASELINES,
    DRAFTS_OF_SGLANG,
    GPUS,
    PATHS,
    READ,
    RESULTS,
    Row,
    read,
    result_files,
    runs_of,
    served,
    title,
    with_this_code,
)

# Figures in the order of their weight: the field, that of its spread, the unit, and True where more is better.
FIGURES = (
    ("tpot_us", "spread_us", "µs per token", False),
    ("tokens_s", "tokens_s_spread", "tokens/s", True),
    ("tokens_s", "spread", "tokens/s", True),
    ("tokens_per_s", "", "tokens/s", True),
    ("ms", "spread_ms", "ms", False),
    ("us", "us_spread", "µs", False),
    ("us", "", "µs", False),
    ("screened_us", "screened_spread", "µs", False),
    ("host_us", "", "µs of the host per step", False),
    ("gpu_busy_us", "", "µs of the GPU per step", False),
    ("searched", "", "rows searched", False),
    ("different_logprobs", "", "answers different", False),
    ("different", "", "tokens different", False),
    ("differing", "", "tokens different", False),
    ("ranks_differ", "", "tokens different", False),
    ("waits", "", "waits for the GPU", False),
    ("deviations_from_chance", "", "deviations from chance", False),
    ("seconds", "", "s", False),
)
# The contenders that a row is compared with, in the order of their weight, and the fields that hold the other time.
BESIDE = {
    "flashsample": ("stock", "oracle"),
    **dict.fromkeys(("greedy", "coupled", "coupled-trees", "mapped", "hot", "hot-trees"), DRAFTS_OF_SGLANG),
    "screen on": ("screen off",),
    "two roots": ("one root",),
    "decision plane": ("flashsample",),
    "cpu": ("stock", "torch"),
    "picked, e4m3": ("picked, bf16",),
    **dict.fromkeys(("fused", "logits", "screened", "picked", "picked with screen"), tuple(BASELINES)),
}
WITHOUT_BASELINE = {"screened": ("fused",)}
NOT_DECIDED = "not decided"
OTHER_TIMES = ("default_us", "other_us", "builtin_us")
CONTENDER = ("backend", "path", "exchange", "way")
# Fields that say what a row is about; rows that are equal in these are compared.
SETTING = (
    *("section", "model", "tp", "pp", "dp", "deterministic", "speculation", "algorithm", "draft_tokens", "error"),
    *("temperature", "arrivals"),
    *("clients", "concurrency", "V", "D", "B", "batch", "rows", "sampling", "kind", "profile", "threads"),
    *("prompt_tokens", "mode", "head"),
)
FIRST = ("serve", "traffic")  # benchmarks that a page begins with
SAID_ONCE = ("command", "date", "commit", "drawing_code", "run", "section_seconds")  # of the run, not of the row


@dataclasses.dataclass
class Shown:
    """One row of the page. over: the figure as a time over that of ``beside``. verdict: empty without a comparison,
    ``NOT_DECIDED`` where the difference is within both spreads or its interval. about: the row of the file."""

    section: str
    model: str
    batch: int | None
    sampling: str
    contender: str
    value: float | None
    spread: float | None
    unit: str
    over: float | None
    beside: str
    verdict: str
    run: int
    about: dict[str, Any]


def _scalars(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and words of a row, those of its parts under "part.name"."""
    found: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, dict) and name not in SAID_ONCE:
            found |= _scalars(one, f"{prefix}{name}.")
        elif isinstance(one, str | int | float) and (prefix or name not in SAID_ONCE):
            found[prefix + name] = one
    return found


def raw_rows(data: dict[str, Any]) -> Iterator[tuple[Row, Row]]:
    """Each row of a file, and its run. A section without rows is one row."""
    for row in data.get("rows", []):
        yield row, data["runs"][row["run"]] if "run" in row else data["env"]
    for row in data.get("searches", []):
        yield {"section": "searches"} | row, data["env"]
    for name, section in data.get("sections", {}).items():
        parts = {"": section} if "command" in section else section
        for head, part in parts.items():
            about = {"section": name} | ({"head": head} if head else {})
            yield from ((about | row, part) for row in _rows_of_part(part))


def _rows_of_part(part: Row) -> Iterator[Row]:
    lists = [value for value in part.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    shape = {name: part[name] for name in ("V", "D") if name in part}
    for rows in lists:
        for row in rows:
            inner = list(_rows_of_part(row))  # heads with rows of their own
            yield from (
                [shape | one for one in inner] if any(isinstance(v, list) for v in row.values()) else [shape | row]
            )
    if not lists:
        yield part


def _contender(row: Row) -> str:
    name = next((row[name] for name in CONTENDER if name in row), "")
    return f"{name}, {row['dtype']}" if "dtype" in row else name


def _figure(row: Row) -> tuple[float | None, float | None, str, bool]:
    for name, spread, unit, rate in FIGURES:
        if row.get(name) is not None and (not spread or spread in row):
            return row[name], row.get(spread), unit, rate
    return None, None, "", False


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(one if isinstance(one := row.get(name), str | int | float) else None for name in SETTING)


def _beside(row: Row, others: dict[str, Row]) -> tuple[str, Row] | None:
    """The contender that a row is compared with, and its row: of baselines, and of SGLang's drafts, the fastest."""
    for choices in (BESIDE, WITHOUT_BASELINE):
        if names := [name for name in choices.get(_contender(row), ()) if name in others]:
            break
    else:
        return None
    if "us" in row:
        names = [min(names, key=lambda name: others[name]["us"])]
    elif "tokens_s" in row and "algorithm" in row:
        names = [max(names, key=lambda name: others[name]["tokens_s"])]
    return names[0], others[names[0]]


def _verdict(over: float, beyond: bool) -> str:
    return NOT_DECIDED if not beyond else "slower" if over > 1 else "faster"


def _compared(row: Row, others: dict[str, Row]) -> tuple[float | None, str, str]:
    """Time over the other's, the other's name, and a verdict."""
    value, spread, _, rate = _figure(row)
    if not value:
        return None, "", ""
    ratio = row.get("ratio")
    if isinstance(ratio, dict) and ratio.get("of"):  # of moving traffic
        return 1 / ratio["of"], "stock", _verdict(1 / ratio["of"], not ratio["low"] <= 1 <= ratio["high"])
    for name in OTHER_TIMES:
        if row.get(name):
            beyond = "low" in row and not row["low"] <= 0 <= row["high"]
            return value / row[name], name.removesuffix("_us"), _verdict(value / row[name], beyond)
    found = _beside(row, others)
    first, first_spread = _figure(found[1])[:2] if found is not None else (None, None)
    if found is None or not first:
        return None, "", ""
    over = first / value if rate else value / first
    beyond = spread is not None and first_spread is not None and abs(value - first) > spread + first_spread
    return over, PATHS.get(found[0], found[0]), _verdict(over, beyond)


def _sampling(row: Row) -> str:
    name = row.get("sampling") or row.get("kind") or row.get("mode")
    if name:
        return title(name)
    return f"temperature {row['temperature']:g}" if "temperature" in row else ""


def _head(name: str) -> str:
    """ "151936x4096" as "151,936 x 4,096"; any other name as it is."""
    sizes = name.split("x")
    return " x ".join(f"{int(size):,}" for size in sizes) if all(size.isdecimal() for size in sizes) else name


def shown_rows(data: dict[str, Any]) -> list[Shown]:
    """The rows of one file."""
    runs = runs_of(data)
    rows = list(raw_rows(data))
    cells: dict[tuple, dict[str, Row]] = {}
    for row, _ in rows:
        cells.setdefault(_key(row), {})[_contender(row)] = row
    found = []
    for row, run in rows:
        value, spread, unit, _ = _figure(row)
        over, beside, verdict = _compared(row, cells[_key(row)])
        head = f"{row['V']:,} x {row['D']:,}" if {"V", "D"} <= row.keys() else f"{row['V']:,} ids" if "V" in row else ""
        model = served(row) if "model" in row else head or _head(row.get("head", ""))
        batch = next((row[name] for name in ("batch", "B", "clients", "concurrency") if name in row), None)
        batch = row["rows"] if batch is None and "default_us" in row else batch
        drafts = f"{row['draft_tokens']} drafts of {row['algorithm']}" if "algorithm" in row else ""
        contender = PATHS.get(
            _contender(row), "read alone (draws nothing)" if _contender(row) == READ else _contender(row)
        )
        place = runs.index(run) if run in runs else 0
        found.append(
            Shown(
                row.get("section", ""),
                ", ".join(filter(None, (model, drafts))),
                batch,
                _sampling(row),
                contender,
                value,
                spread,
                unit,
                None if over is None else round(over, 4),
                beside,
                verdict,
                place,
                _scalars(row),
            )
        )
    return found


def page_data(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """One entry per result file: its environment, its runs, and its rows as lists in the order of ``columns``."""
    files = []
    for file in sorted(result_files(folder), key=lambda file: not file.stem.endswith(FIRST)):
        data = read(file)
        gpu, _, benchmark = file.stem.partition("-") if "-" in file.stem else ("", "", file.stem)
        rows = shown_rows(data)
        names = list(dict.fromkeys(name for row in rows for name in row.about))
        columns = [field.name for field in dataclasses.fields(Shown) if field.name != "about"]
        env = data["env"]
        runs = [{name: run.get(name) for name in ("date", "command", "sglang", "commit")} for run in runs_of(data)]
        versions = {
            name: env[name] for name in ("torch", "triton", "cuda", "driver", "flashinfer", "python") if name in env
        }
        versions |= {"sglang": sglang} if (sglang := env.get("sglang") or env.get("servers", {}).get("sglang")) else {}
        entry = {
            "file": file.name,
            "benchmark": benchmark,
            "card": GPUS.get(gpu, gpu) or "CPU",
            "device": env["device"],
        }
        entry |= {"versions": versions, "runs": runs, "these_kernels": with_this_code(file)}
        entry |= {"not_run": [" ".join(map(str, gap.values())) for gap in env.get("not_run", [])]}
        entry |= {"columns": columns, "names": names}
        entry["rows"] = [
            [*(getattr(row, name) for name in columns), [row.about.get(name) for name in names]] for row in rows
        ]
        files.append(entry)
    return files


def script(folder: Path = RESULTS) -> str:
    """``page_data`` as a script of one line per row, which a page reads without a server."""
    blocks = []
    for entry in page_data(folder):
        head = json.dumps({name: value for name, value in entry.items() if name != "rows"}, ensure_ascii=False)
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in entry["rows"])
        blocks.append(f'{head[:-1]}, "rows": [\n{lines}\n]}}')
    return "const FILES = [\n" + ",\n".join(blocks) + "\n];\n"
