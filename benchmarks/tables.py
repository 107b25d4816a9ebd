"""The README's result tables, from the committed result files.

python benchmarks/tables.py            prints them
python benchmarks/tables.py --write    puts them between their markers in README.md
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SAMPLING_NAMES = {
    "t1": "temperature 1",
    "trunc": "temperature 0.7, top_p 0.9, top_k 50",
    "penalty": "the same with frequency_penalty 0.5, repetition_penalty 1.1",
    "json": "the same with a JSON schema",
    "logprob": "temperature 1, logprobs",
    "top-logprobs": "temperature 1, 5 top logprobs",
    "greedy": "greedy",
}
NOT_MEASURED = "not measured yet"
# Modes of features.py, in words.
TRUNCATIONS = {
    "plain": "temperature 1",
    "greedy": "greedy",
    "logprob": "temperature 1, logprob",
    "k20p95": "top_k 20, top_p 0.95",
    "k50p90": "top_k 50, top_p 0.9",
    "p90": "top_p 0.9",
    "minp05": "min_p 0.05",
    "k1000": "top_k 1000",
}
EDITS = {
    "penalties": "penalties (additive and scaling)",
    "bias": "logit bias",
    "bitmask": "grammar bitmask",
    "edits": "all of these",
    "edits+k50p90": "all of these, top_k 50, top_p 0.9",
}


OURS = ("fused", "logits", "screened", "gemm")  # paths of kernels.py that are no rival


def serve_table(path: Path = RESULTS / "h200-serve.json") -> str:
    """Time per output token, stock and ours, per model, sampling and batch."""
    if not path.exists():
        return NOT_MEASURED
    rows = json.loads(path.read_text())["rows"]
    batches = sorted({row["batch"] for row in rows})
    cell = {(row["model"], row["sampling"], row["batch"], row["backend"]): row for row in rows}
    lines = ["| model, sampling | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for model in dict.fromkeys(row["model"] for row in rows):
        for sampling, name in SAMPLING_NAMES.items():
            values, shares = [], []
            for batch in batches:
                pair = [cell.get((model, sampling, batch, backend)) for backend in ("stock", "flashsample")]
                if None in pair:
                    values.append("")
                    continue
                stock, ours = (row["tpot_us"] for row in pair if row)
                values.append(f"{stock:.0f} → {ours:.0f} ({ours / stock:.3f})")
                shares.append(pair[1]["path_share"]["fused"] if pair[1] else 0.0)
            if not shares:
                continue
            by = " (SGLang's sampler)" if max(shares) < 0.5 else ""
            lines.append(f"| {model}, {name}{by} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def kernel_table(path: Path = RESULTS / "h200-kernels.json") -> str:
    """The whole last step in microseconds on the path that the built-in table picks, beside the floor, the GEMM and the
    strongest rival."""
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text())
    found: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["D"], row["V"], row["B"]), {}).setdefault(row["mode"], {})[row["path"]] = row
    lines = ["| V x D, B | floor | GEMM alone | temperature 1 (over floor; over GEMM) | its strongest rival |"]
    lines[0] += " greedy (rival over it) | top_k 50, top_p 0.9 (rival over it) |"
    lines.append("|---" * 7 + "|")
    for (hidden, vocab, batch), modes in found.items():
        floor = hidden * vocab * 2 / result["floor_tb_s"] / 1e6
        gemm = modes["plain"]["gemm"]["us"]
        (plain, rival), greedy, truncated = (_ours_and_rival(modes[mode]) for mode in ("plain", "greedy", "trunc"))
        ours = plain["us"]
        cells = [
            f"{floor:.0f}",
            f"{gemm:.0f}",
            f"{ours:.0f} ({ours / floor:.3f}; {ours / gemm:.3f}), `{plain['path']}`",
        ]
        cells.append(f"{rival['us']:.0f} ({rival['us'] / ours:.2f} of ours), {rival['path']}")
        for own, other in (greedy, truncated):
            cells.append(f"{own['us']:.0f} ({other['us'] / own['us']:.2f})")
        lines.append(f"| {vocab} x {hidden}, {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ours_and_rival(paths: dict[str, dict]) -> tuple[dict, dict]:
    """The row of the path that the built-in table picks, and the fastest of the others."""
    own = next(row for row in paths.values() if "picked by the table" in row["config"])
    return own, min((row for path, row in paths.items() if path not in OURS), key=lambda row: row["us"])


def _features(path: Path) -> tuple[dict[tuple, dict], list[str], list[int], list[dict]]:
    """{(profile, batch, path, mode): row}, profiles and batches in order, and the counts of searches."""
    result = json.loads(path.read_text())
    rows = {(row["profile"], row["B"], row["path"], row["mode"]): row for row in result["rows"]}
    return rows, list(dict.fromkeys(key[0] for key in rows)), sorted({key[1] for key in rows}), result["rounds"]


def _rivals_us(rows: dict[tuple, dict], profile: str, batch: int, mode: str) -> list[float]:
    """What GEMM and sampling take without us, for each way to do it that was measured."""
    keys = [(profile, batch, path, mode) for path in ("flashinfer", "torch")]
    return [rows[key]["us"] for key in keys if key in rows]


def truncation_table(path: Path = RESULTS / "h200-features.json") -> str:
    """Per mode and batch: the median profile's time, and the worst profile's ratios to plain and to the rival."""
    if not path.exists():
        return NOT_MEASURED
    rows, profiles, batches, _ = _features(path)
    lines = ["| us (over plain; rival over it) | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for mode, name in TRUNCATIONS.items():
        cells = []
        for batch in batches:
            found = [rows[profile, batch, "fused", mode] for profile in profiles]
            rivals = [
                min(us) / row["us"]
                for profile, row in zip(profiles, found, strict=True)
                if (us := _rivals_us(rows, profile, batch, mode))
            ]
            rival = f"; {min(rivals):.2f}" if rivals else ""
            over = max(row["over_plain"] for row in found)
            cells.append(f"{statistics.median(row['us'] for row in found):.0f} ({over:.3f}{rival})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def edits_table(path: Path = RESULTS / "h200-features.json") -> str:
    """Per kind of edit and batch: the median profile's time, what of it reading the edits takes at the speed of the
    head, and the worst profile's ratio to plain without that."""
    if not path.exists():
        return NOT_MEASURED
    rows, profiles, batches, _ = _features(path)
    lines = ["| us (their bytes; over plain without them) | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for mode, name in EDITS.items():
        cells = []
        for batch in batches:
            found = [rows[profile, batch, "fused", mode] for profile in profiles]
            plain = [rows[profile, batch, "fused", "plain"]["us"] for profile in profiles]
            net = max((row["us"] - row["extra_bytes_us"]) / us for row, us in zip(found, plain, strict=True))
            extra = statistics.median(row["extra_bytes_us"] for row in found)
            cells.append(f"{statistics.median(row['us'] for row in found):.0f} ({extra:.1f}; {net:.3f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def searched_table(path: Path = RESULTS / "h200-features.json") -> str:
    """Share of rows that took a search, per shape of the distribution, and the tokens compared with the reference."""
    if not path.exists():
        return NOT_MEASURED
    _, profiles, _, rounds = _features(path)
    names = {mode: name for mode, name in (TRUNCATIONS | EDITS).items() if mode in {row["mode"] for row in rounds}}
    lines = ["| rows searched | " + " | ".join(names.values()) + " | tokens compared, different, near-ties |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for profile in profiles:
        found = {row["mode"]: row for row in rounds if row["profile"] == profile}
        cells = [f"{100 * found[mode]['searched'] / found[mode]['rows']:.2f} %" for mode in names]
        sums = (sum(row[key] for row in found.values()) for key in ("compared", "differ_from_reference", "near_ties"))
        lines.append(f"| {profile} | " + " | ".join(cells) + " | " + ", ".join(map(str, sums)) + " |")
    return "\n".join(lines)


def profile_table(path: Path = RESULTS / "h200-step-profile.json") -> str:
    """Calls of one decode step at batch 32, stock and ours."""
    lines = ["| per decode step, B=32, temperature 1 | stock | ours |", "|---|---|---|"]
    names = {
        "launches": "kernel launches and copies beside the CUDA graph",
        "synchronising": "synchronising calls",
        "driver_allocating": "allocations from the driver",
        "new_tensors": "tensors from PyTorch's allocator",
        "gpu_busy_us": "GPU busy, us",
    }
    for model, samplings in json.loads(path.read_text())["calls_per_step"].items():
        stock, ours = (samplings["t1"][backend] for backend in ("stock", "flashsample"))
        lines += [f"| {model}: {name} | {stock[key]:g} | {ours[key]:g} |" for key, name in names.items()]
    return "\n".join(lines)


def tuning_table(path: Path = RESULTS / "h200-tuning.json") -> str:
    """What the autotuner promises and what was measured of it, a line per section and head."""
    if not path.exists():
        return NOT_MEASURED
    sections = json.loads(path.read_text())["sections"]
    lines = ["| | head | measured |", "|---|---|---|"]
    for section, (name, words) in TUNING.items():
        for head, found in sections.get(section, {}).items():
            lines.append(f"| {name} | {head.replace('x', ' x ')} | {words(found)} |")
    return "\n".join(lines)


def _runs_words(found: dict) -> str:
    return "; ".join(
        f"{effort} {run['seconds']:.0f} s ({run['trials']} configurations, {run['buckets']} buckets), again "
        f"{run['again_seconds']:.0f} s, file {'untouched' if run['untouched'] else 'CHANGED'}"
        for effort, run in found.items()
        if isinstance(run, dict)
    )


def _resume_words(found: dict) -> str:
    again = found["buckets_done_again"] + found["trials_done_again"]
    return (
        f"killed after {found['killed_after_seconds']:.0f} s and {found['finished_when_killed']} of {found['buckets']} "
        f"buckets: {found['kept']} kept as they were, {again} finished things done again; "
        f"{found['resumed_seconds']:.0f} s more"
    )


def _agreement_words(found: dict) -> str:
    worst = max((abs(one["off"]) for one in found["differing"]), default=0.0)
    return (
        f"{found['same']} of {found['places']} the same; of the others {found['inside']} within the tie band for "
        f"certain, {found['open']} undecided, {found['outside']} outside (largest difference {worst:.1%})"
    )


def _regret_words(found: dict) -> str:
    cells = (f"{100 * one['off']:.2f} ± {100 * one['se']:.2f} % at {one['batch']}" for one in found["buckets"])
    return f"{', '.join(cells)} ({found['tried_by_the_search']} of {found['space']} configurations tried)"


def _sweep_words(found: dict) -> str:
    slower = ", ".join(f"{one['work']} {one['batch']} by {one['off']:.1%}" for one in found["raced"] if one["slower"])
    ratios = [one["off"] for one in found["raced"]]
    times = f" and take {1 + min(ratios):.3f} to {1 + max(ratios):.3f} of its time" if ratios else ""
    failed = f"; {len(found['failed'])} could not be raced" if found["failed"] else ""
    return (
        f"{len(ratios)} of {found['places']} places differ from the default{times}; slower beyond noise: "
        f"{slower or 'none'}{failed}"
    )


def _replay_words(found: dict) -> str:
    if not found["buckets"]:
        return found["message"]
    return (
        f"{found['message']}; off by at most {found['worst_off']:.1%}, beside the GEMM "
        f"{found['worst_off_beside_gemm']:.1%}; {found['seconds']:.0f} s"
    )


# Sections of tuning.py, in words.
TUNING = {
    "runs": ("a run, and a second one", _runs_words),
    "resume": ("a run that is killed, and goes on", _resume_words),
    "agreement": ("two independent runs", _agreement_words),
    "regret": ("the search's choice over the best of a sweep", _regret_words),
    "sweep": ("between the buckets, against the default", _sweep_words),
    "replay": ("measured again in a fresh process", _replay_words),
}


def host_table(path: Path = RESULTS / "h200-serve-host.json") -> str:
    """Host time in our sampler, per batch."""
    if not path.exists():
        return NOT_MEASURED
    rows = [row for row in json.loads(path.read_text())["rows"] if row["host_us"] is not None]
    cell = {(row["sampling"], row["batch"]): row["host_us"] for row in rows}
    batches = sorted({row["batch"] for row in rows})
    lines = ["| us of host time per batch | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for sampling in dict.fromkeys(row["sampling"] for row in rows):
        cells = " | ".join(f"{cell[sampling, batch]:.0f}" for batch in batches)
        lines.append(f"| {SAMPLING_NAMES[sampling]} | {cells} |")
    return "\n".join(lines)


def screened_table(path: Path = RESULTS / "h200-screened.json") -> str:
    """The screened path beside the fused one, GEMM and FlashInfer, and the floor."""
    section = _section(path, "speed")
    if section is None:
        return NOT_MEASURED
    cell = {(row["B"], row["path"], row["mode"]): row for row in section["rows"]}
    rivals: dict[int, float] = {}  # the fastest of its forms
    for row in section["rows"]:
        if row["path"] == "flashinfer_gumbel":
            rivals[row["B"]] = min(row["us"], rivals.get(row["B"], row["us"]))
    limited = [mode for mode in dict.fromkeys(row["mode"] for row in section["rows"]) if ", k=" in mode]
    lines = ["| B | fused | screened, temperature 1 | temperature 0.7 | greedy | " + " | ".join(limited) + " |"]
    lines.append("|---" * (5 + len(limited)) + "|")
    for batch in dict.fromkeys(row["B"] for row in section["rows"]):
        cells = [f"{cell[batch, 'fused', 'T=1']['us']:.0f}"]
        for mode in ("T=1", "T=0.7", "greedy"):
            own, fused = cell[batch, "screened", mode], cell[batch, "fused", mode]
            over = [f"{own['over_floor']:.3f} of the floor", f"{own['us'] / fused['us']:.3f} of fused"]
            if mode == "T=1" and batch in rivals:
                over.append(f"FlashInfer {rivals[batch] / own['us']:.2f}")
            cells.append(f"{own['us']:.0f} ({'; '.join(over)}; {own['groups_read']} groups read)")
        for mode in limited:
            own, fused = cell[batch, "screened", mode], cell[batch, "fused", mode]
            cells.append(f"{own['us']:.0f} ({own['us'] / fused['us']:.3f} of fused; {own['rows_left']} rows left)")
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hot_bound_table(path: Path = RESULTS / "h200-hot-bound.json") -> str:
    """What a screened step takes, without what a hot set could spare it, and what the sizing model makes of that."""
    if not path.exists():
        return NOT_MEASURED
    lines = [
        "| B, temperature | screened, us (groups) | told the leaders (groups) | first pass alone | best hot set |",
        "|---|---|---|---|---|",
    ]
    for row in json.loads(path.read_text())["rows"]:
        us, read, sized = row["us"], row["groups_read"], row["sized"]
        cells = [f"{row['B']}, {row['temperature']:g}"]
        cells += [f"{us[name]:.1f} ({read[name]:.0f})" for name in ("screened", "leader known")]
        cells += [f"{us['first pass']:.1f}"]
        cells += [f"{sized['hot_groups']} groups, {sized['hit']:.0%} of the tokens: {sized['saves_us']:.2f} us"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def screened_serve_table(path: Path = RESULTS / "h200-serve-screen.json") -> str:
    """Time per output token of our server with a screen, and over that without one."""
    if not path.exists():
        return NOT_MEASURED
    rows = json.loads(path.read_text())["rows"]
    cell = {(row["model"], row["sampling"], row["batch"], row["backend"]): row for row in rows}
    batches = dict.fromkeys(row["batch"] for row in rows)
    lines = ["| model, sampling | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for model, sampling in dict.fromkeys((row["model"], row["sampling"]) for row in rows):
        cells = []
        for batch in batches:
            off, on = (cell.get((model, sampling, batch, f"screen {state}")) for state in ("off", "on"))
            if off is None or on is None:
                cells.append("")
                continue
            same = f"; {on['same_answers']} of {batch} answers the same" if "same_answers" in on else ""
            cells.append(f"{on['tpot_us']:.0f} us ({on['tpot_us'] / off['tpot_us']:.3f}{same})")
        lines.append(f"| {model}, {SAMPLING_NAMES[sampling]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def screened_tokens_table(path: Path = RESULTS / "h200-screened.json") -> str:
    """Tokens of the screened path that are not the fused one's, and groups that each row left to be decided."""
    section = _section(path, "tokens")
    if section is None:
        return NOT_MEASURED
    kinds = dict.fromkeys(row["kind"] for row in section["rows"])
    columns = dict.fromkeys((row["temperature"], row["limited"]) for row in section["rows"])
    cell = {(row["kind"], row["temperature"], row["limited"]): row for row in section["rows"]}
    names = (f"T={value:g}" + (", top-k and top-p" if limited else "") for value, limited in columns)
    lines = ["| rows; different; candidates per row | " + " | ".join(names) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for kind in kinds:
        cells = [cell[kind, *column] for column in columns]
        left = [f"; {row['left']:.2%} left" if row["limited"] else "" for row in cells]
        words = (
            f"{row['rows']:,}; {row['different']}; {row['candidates_per_row']}{rest}"
            for row, rest in zip(cells, left, strict=True)
        )
        lines.append(f"| {kind} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _section(path: Path, name: str) -> dict | None:
    return json.loads(path.read_text())["sections"].get(name) if path.exists() else None


TABLES = {
    "serve": serve_table,
    "kernel": kernel_table,
    "truncation": truncation_table,
    "edits": edits_table,
    "searched": searched_table,
    "profile": profile_table,
    "tuning": tuning_table,
    "host": host_table,
    "screened": screened_table,
    "screened-tokens": screened_tokens_table,
    "screened-serve": screened_serve_table,
    "hot-bound": hot_bound_table,
}


def filled(readme: str) -> str:
    """``readme`` with each table between its markers."""
    for name, table in TABLES.items():
        marked = f"<!-- {name}-table -->\n{table()}\n<!-- end -->"
        readme, found = re.subn(rf"<!-- {name}-table -->.*?<!-- end -->", lambda _, m=marked: m, readme, flags=re.S)
        if found != 1:
            raise ValueError(f"README.md has {found} places for the {name} table; expected one")
    return readme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    if options.write:
        readme.write_text(filled(readme.read_text()))
    else:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main()
