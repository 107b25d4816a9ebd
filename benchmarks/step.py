"""The whole last step, LM head to token, raced on this GPU: ``kernels``, ``features`` and ``quantised``."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from common import DRY_RUN, HALF_DTYPE, SHAPES, Benchmark, Result, Shape
from contenders import (
    BASELINES,
    OURS,
    PICKED,
    PICKED_WITH_SCREEN,
    Entrant,
    Selection,
    Tree,
    edits_of,
    full,
    trees,
)
from racing import Race, Session

from sgl_flashsample.autotune.workload import PROFILES, Workload
from sgl_flashsample.kernels.reference import truncated_sample_ref
from sgl_flashsample.tools.samplings import SAMPLINGS

KERNELS = """Races the whole last step, LM head to token, against its baselines on this GPU; prints tables, writes JSON.

    python benchmarks/run.py kernels --out benchmarks/results/h200-kernels.json

Per shape and batch size, everything in one race: our paths and the baselines (``autotune/baselines.py``) in CUDA
graphs, weights cold, hidden states fresh in each round, noise fresh in each call, rounds interleaved, medians and half
the distance between the quartiles, beside a kernel that only reads. ``--fast`` takes five of the thirteen batch sizes.

    python benchmarks/run.py kernels --compare-with OLDER --out compared.json

``OLDER`` is another tree of the project, a checkout or what its wheel unpacks to. Our paths of both trees are raced in
one process, on the same head and batches, without the baselines. A cell that seems more than 1 % slower is raced for
longer; the exit code is 1 where one is slower by more than that for certain.

A run that has ended, or has used up ``--limit``, goes on with ``--keep``: batch sizes of the file are not raced again.
"""
FEATURES = """Times every sampling feature on this GPU beside plain sampling and the baselines; writes JSON.

    python benchmarks/run.py features --out benchmarks/results/h200-features.json

The path and configuration are those that a batch takes by itself, with a screen of the head and without one, for three
profiles of the distribution: peaked, typical and flat. Also counts, per feature and profile, the truncated rows whose
tokens took a search over their logits, and compares tokens with the float64 reference. ``--fast``: three batch sizes of
five.
"""
QUANTISED = """Races a head in float8_e4m3fn with a scale per row beside the same head in bfloat16; writes JSON.

    python benchmarks/run.py quantised --out benchmarks/results/h200-quantised.json

Both heads draw from the same hidden states, on the path and with the configuration that a batch takes by itself, in the
same rounds. ``--fast``: three batch sizes of seven.
"""
# Some have one row more than a block of rows: a second block, which has to find the head in L2.
BATCHES = (3,) if DRY_RUN else (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 129, 256, 512)
FAST_BATCHES = (3,) if DRY_RUN else (1, 16, 64, 129, 256)
RACED = ("t1", "k50p90", "greedy")
COMPARED = (*RACED, "edits", "edits+k50p90")
# A cell is slower than the older tree's if all of its interval, of a ratio with this error, is beyond the tolerance.
TOLERANCE, ALPHA = 0.01, 1e-4
MORE_ROUNDS = 24  # for a cell that seems slower
FEATURE_BATCHES = (3,) if DRY_RUN else (1, 8, 16, 32, 64)
FAST_FEATURE_BATCHES = (3,) if DRY_RUN else (1, 16, 64)
FEATURED = ("t1", "greedy", "logprob", "k20p95", "k50p90", "p90", "minp05", "k1000")
FEATURED += ("penalties", "bias", "bitmask", "edits", "edits+k50p90")
QUANTISED_SHAPES = SHAPES if DRY_RUN else [Shape(4096, 151936), Shape(5120, 248320)]
QUANTISED_BATCHES = (3,) if DRY_RUN else (1, 8, 16, 32, 64, 128, 256)
FAST_QUANTISED_BATCHES = (3,) if DRY_RUN else (1, 16, 64)
# Rows sampled per profile and sampling, for the count of searches; rows of these that are compared; rows of float64 at
# a time.
COUNTED, CHECKED, CHECKED_AT_ONCE = (3, 3, 3) if DRY_RUN else (4096, 256, 64)


def compare(race: Race, lines: list[dict[str, Any]]) -> None:
    """Add to each of our rows the time of the older tree, and the ratio to it."""
    ours, older = (
        {(one.sampling, one.path): one for one in race.entrants if one.older is which} for which in (False, True)
    )
    for row in lines:
        key = row["sampling"], row["path"]
        if key not in ours or key not in older:
            continue
        names = ours[key].name, older[key].name
        ratio = race.ratio(*names, ALPHA)
        if ratio is not None and ratio.off > TOLERANCE / 2 and ratio.low <= TOLERANCE and not DRY_RUN:
            race.run(MORE_ROUNDS, names)
            ratio = race.ratio(*names, ALPHA)
        timing = race.timing(older[key].name)
        if timing is not None and ratio is not None:
            row |= {"older_us": round(timing.us, 2), "older_form": older[key].form, "ratio": ratio.rounded}
            row["same_tokens"] = int((ours[key].call(0) == older[key].call(0)).sum())


def count_same_tokens(race: Race, lines: list[dict[str, Any]]) -> None:
    """Add to rows of our paths, and of every greedy one, how many tokens are those of the first path. They differ where
    two logits are equal to within the rounding of their sums."""
    for sampling in dict.fromkeys(one.sampling for one in race.entrants if one.path in OURS):
        tokens = {}
        for one in race.entrants:
            if one.sampling == sampling and (one.path in OURS or sampling == "greedy") and one.path not in tokens:
                try:
                    tokens[one.path] = one.call(0).flatten().long()
                except Exception:  # its reason is in ``not_run``
                    continue
        first = next((tokens[path] for path in OURS if path in tokens), None)
        for row in lines:
            if first is not None and row["sampling"] == sampling and row["path"] in tokens:
                row["same_tokens"] = int((tokens[row["path"]] == first).sum())


def judge(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """The comparison with an older tree in words, and whether nothing is slower for certain."""
    compared = [row for row in lines if "ratio" in row]
    worst = sorted(compared, key=lambda row: -row["ratio"]["off"])
    slower = [row for row in compared if row["ratio"]["low"] > TOLERANCE]
    unsure = [row for row in compared if row["ratio"]["off"] > TOLERANCE >= row["ratio"]["low"]]
    out = [f"{len(compared)} cells of both trees: {len(slower)} slower by more than {TOLERANCE:.0%} for certain, "]
    tokens = sum(row["B"] for row in compared)
    different = tokens - sum(row["same_tokens"] for row in compared)
    out[0] += f"{len(unsure)} perhaps; {different} of {tokens} tokens differ"
    groups: dict[tuple[str, str], list[float]] = {}
    for row in compared:
        groups.setdefault((row["path"], row["sampling"]), []).append(1 + row["ratio"]["off"])
    for (path, sampling), ratios in groups.items():
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        out.append(f"  {path:9} {sampling:7} {len(ratios):3} cells, ratio {statistics.median(ratios):.3f} ({spread})")
    for row in [row for row in worst if row["ratio"]["off"] > TOLERANCE][:20]:
        where = "D={D} V={V} B={B} {path} {sampling}: {us} us, was {older_us}".format(**row)
        same = (
            "the same configuration" if row["form"] == row["older_form"] else f"{row['form']}, was {row['older_form']}"
        )
        out.append(f"  {where} ({row['ratio']['low']:+.1%} to {row['ratio']['high']:+.1%}; {same})")
    return "\n".join(out), bool(compared) and not slower


def race_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, help="1 in a dry run; by default 9, for features 7")
    parser.add_argument("--tuned", action="store_true", help="with tuned tables that fit, not the built-in choices")


def check_race(options: Any, rounds: int) -> None:
    """Complete the options of ``race_options``. Raises ValueError."""
    options.rounds = options.rounds or (1 if DRY_RUN else rounds)
    if min(options.batches) < 1 or options.rounds < (1 if DRY_RUN else 3):
        raise ValueError(f"batches are {options.batches}, rounds {options.rounds}; expected at least 1 and at least 3")


def kernels_options(parser: argparse.ArgumentParser) -> None:
    race_options(parser)
    names = [str(shape) for shape in SHAPES]
    parser.add_argument("--paths", nargs="+", choices=(*OURS, *BASELINES))
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="DxV")
    parser.add_argument("--samplings", nargs="+", choices=[name for name in SAMPLINGS if not SAMPLINGS[name].server])
    parser.add_argument("--compare-with", type=Path, metavar="OLDER", help="another tree of the project")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which no further race begins")


def prepare_kernels(options: Any) -> None:
    older = options.compare_with
    options.samplings = options.samplings or list(COMPARED if older else RACED)
    options.paths = options.paths or [*OURS, *(() if older else BASELINES)]
    options.batches = options.batches or list(FAST_BATCHES if options.fast else BATCHES)
    options.shapes = [shape for shape in SHAPES if str(shape) in options.shapes]
    check_race(options, 9)
    if older is not None and not (older / "sgl_flashsample" / "__init__.py").exists():
        raise ValueError(f"{older} holds no package sgl_flashsample")


def kernels(options: Any, result: Result) -> int:
    arguments = {name: getattr(options, name) for name in ("paths", "samplings", "rounds", "tuned")}
    arguments["compared"] = options.compare_with is not None
    if (before := result.before.get("arguments", arguments)) != arguments:
        sys.exit(f"error: {options.out} has arguments {before}; expected {arguments}")
    result.env["arguments"] = arguments
    # Gaps of no batch are determined again.
    result.env["not_run"] = [gap for gap in result.env["not_run"] if "B" in gap]
    done = {(row["D"], row["V"], row["B"]) for row in result.rows}
    todo = {
        shape: [rows for rows in options.batches if (shape.hidden, shape.vocab, rows) not in done]
        for shape in options.shapes
    }
    todo = {shape: batches for shape, batches in todo.items() if batches}
    if not todo:
        sys.exit(f"{options.out} holds every cell already")
    selection = Selection(tuple(options.paths), tuple(options.samplings), options.tuned, options.compare_with)
    session = Session(
        list(todo), sorted({rows for batches in todo.values() for rows in batches}), selection, result.env
    )
    then = count_same_tokens if options.compare_with is None else compare
    for shape, batches in todo.items():
        weight = shape.weight()
        ours = trees(shape, weight, max(batches), selection)
        for rows in batches:
            if session.seconds > options.limit:
                print(f"out of time before {shape} B={rows}: go on with --keep", flush=True)
                break
            batch, cell = Workload(ours[0].head, rows, "typical"), shape.fields | {"B": rows}
            result.add(session.race(ours, batch, options.rounds, cell, then))
        del ours, weight
    print(f"{session.seconds:.0f} s in all", flush=True)
    if options.compare_with is not None:
        text, is_fine = judge(result.rows)
        print(text)
        return 0 if is_fine else 1
    return 0


def add_bytes(batch: Workload, race: Race, rows: list[dict[str, Any]]) -> None:
    """Add to rows with edits the microseconds that reading the edits takes, ``bytes_us``."""
    for row in rows:
        fields = SAMPLINGS[row["sampling"]].edits if row["sampling"] in SAMPLINGS else ()
        read = sum(getattr(edits_of(batch), name).nbytes for name in fields)
        if fields and (us := race.floor_us(read)) is not None:
            row["bytes_us"] = round(us, 2)


def count_searches(tree: Tree, profile: str, name: str, rows: int) -> dict[str, Any]:
    """The number of rows that were left to the search, and of tokens that are not the reference's."""
    batch, sampling = Workload(tree.head, rows, profile), SAMPLINGS[name]
    one: Entrant = tree.entrant(batch, name, PICKED)
    assert sampling.truncation is not None
    limits = [full(batch, value) for value in sampling.truncation]
    seen = searched = compared = different = near_ties = 0
    while seen < COUNTED:
        batch.refresh(1 + seen)
        token = one.call(0)
        buffer = tree.workspace.last_buffer
        seen += rows
        searched += int((buffer.status[:rows] > 1).sum())
        for first in range(0, rows if compared < CHECKED else 0, CHECKED_AT_ONCE):
            part = slice(first, min(rows, first + CHECKED_AT_ONCE))
            want = truncated_sample_ref(
                buffer.logits[part, : tree.head.vocab_size].double(),
                full(batch, sampling.temperature)[part],
                batch.seed[part],
                batch.position[0][part],
                *(values[part] for values in limits),
            )
            compared += len(want.token)
            different += int(((token[part] != want.token) & ~want.near_tie).sum())
            near_ties += int(want.near_tie.sum())
    line = {"profile": profile, "sampling": name, "B": rows, "rows": seen, "searched": searched}
    return line | {"compared": compared, "different": different, "near_ties": near_ties}


def features_options(parser: argparse.ArgumentParser) -> None:
    race_options(parser)
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--samplings", nargs="+", choices=FEATURED, default=list(FEATURED))


def prepare_features(options: Any) -> None:
    options.batches = options.batches or list(FAST_FEATURE_BATCHES if options.fast else FEATURE_BATCHES)
    check_race(options, 7)


def features(options: Any, result: Result) -> int:
    result.env["arguments"] = {"rounds": options.rounds, "tuned": options.tuned}
    searches: list[dict[str, Any]] = result.data.setdefault("searches", [])
    shape, batches = SHAPES[0], options.batches
    selection = Selection((PICKED, PICKED_WITH_SCREEN, *BASELINES), tuple(options.samplings), options.tuned)
    session = Session([shape], batches, selection, result.env)
    (tree,) = trees(shape, shape.weight(), max(batches), selection)
    for profile in options.profiles:
        for rows in batches:
            batch = Workload(tree.head, rows, profile)
            cell, then = shape.fields | {"B": rows, "profile": profile}, functools.partial(add_bytes, batch)
            result.add(session.race([tree], batch, options.rounds, cell, then))
        for name in [name for name in options.samplings if SAMPLINGS[name].truncation is not None]:
            try:
                counted = count_searches(tree, profile, name, max(batches))
            except Exception as error:  # the next one may do
                result.miss(error, profile=profile, path=f"searches of {name}")
                continue
            searches[:] = [row for row in searches if (row["profile"], row["sampling"]) != (profile, name)] + [counted]
            print(
                "  {sampling}: {searched} of {rows} rows searched; {different} of {compared} differ".format(**counted)
            )
        result.write()
    print(f"{session.seconds:.0f} s in all", flush=True)
    return 0


def prepare_quantised(options: Any) -> None:
    options.batches = options.batches or list(FAST_QUANTISED_BATCHES if options.fast else QUANTISED_BATCHES)
    check_race(options, 9)


def quantised(options: Any, result: Result) -> int:
    result.env["arguments"] = {"rounds": options.rounds, "tuned": options.tuned}
    selection = Selection((PICKED,), COMPARED, options.tuned, quantised=True)
    session = Session(QUANTISED_SHAPES, options.batches, selection, result.env)
    for shape in QUANTISED_SHAPES:
        both = trees(shape, shape.weight(HALF_DTYPE), max(options.batches), selection)
        for rows in options.batches:
            batch, cell = Workload(both[0].head, rows, "typical"), shape.fields | {"B": rows}
            result.add(session.race(both, batch, options.rounds, cell))
        del both, batch
    print(f"{session.seconds:.0f} s in all", flush=True)
    return 0


PLACE = ("D", "V", "B", "profile", "dtype", "sampling", "path")
BENCHMARKS = {
    "kernels": Benchmark(KERNELS, kernels, kernels_options, prepare_kernels, place=PLACE),
    "features": Benchmark(FEATURES, features, features_options, prepare_features, place=PLACE),
    "quantised": Benchmark(QUANTISED, quantised, race_options, prepare_quantised, place=PLACE),
}
