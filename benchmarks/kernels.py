"""Races the whole last step, LM head to token, against its baselines on this GPU; prints tables, writes JSON.

    python benchmarks/kernels.py --out benchmarks/results/h200-kernels.json

Per shape and batch size, everything in one race: our paths and the baselines (``autotune/baselines.py``) in CUDA
graphs, weights cold, hidden states fresh in each round, noise fresh in each call, rounds interleaved, medians and half
the distance between the quartiles, beside a kernel that only reads. ``--fast`` takes five of the thirteen batch sizes.

    python benchmarks/kernels.py --compare-with OLDER --out compared.json

``OLDER`` is another tree of the project, a checkout or what its wheel unpacks to. Our paths of both trees are raced in
one process, on the same head and batches, without the baselines. A cell that seems more than 1 % slower is raced for
longer; the exit code is 1 where one is slower by more than that for certain.

What cannot run is recorded in ``env.not_run``, with the reason. The file is written after each batch size; a run that
has ended, or that has used up ``--limit``, goes on with ``--resume``.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from common import DRY_RUN, SHAPES, Batch, make_parser, new_env, read_result, write_result
from contenders import BASELINES, MODES, OURS, Selection, trees
from racing import Race, Session

# Some have one row more than a block of rows: a second block, which has to find the head in L2.
BATCHES = (3,) if DRY_RUN else (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 129, 256, 512)
FAST_BATCHES = (3,) if DRY_RUN else (1, 16, 64, 129, 256)
RACED_MODES = ("plain", "k50p90", "greedy")
COMPARED_MODES = (*RACED_MODES, "edits")
# A cell is slower than the older tree's if all of its interval, of a ratio with this error, is beyond the tolerance.
TOLERANCE, ALPHA = 0.01, 1e-4
MORE_ROUNDS = 24  # of a cell that seems slower


def compare(race: Race, lines: list[dict[str, Any]]) -> None:
    """Add to each of our rows the time of the older tree, and the ratio to it."""
    ours, older = (
        {(one.mode, one.path): one for one in race.entrants if one.older is which} for which in (False, True)
    )
    for row in lines:
        key = row["mode"], row["path"]
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
    for mode in dict.fromkeys(one.mode for one in race.entrants if one.path in OURS):
        tokens = {}
        for one in race.entrants:
            if one.mode == mode and (one.path in OURS or mode == "greedy") and one.path not in tokens:
                try:
                    tokens[one.path] = one.call(0).flatten().long()
                except Exception:  # its reason is in ``not_run``
                    continue
        first = next((tokens[path] for path in OURS if path in tokens), None)
        for row in lines:
            if first is not None and row["mode"] == mode and row["path"] in tokens:
                row["same_tokens"] = int((tokens[row["path"]] == first).sum())


def judge(lines: list[dict[str, Any]]) -> tuple[str, bool]:
    """What the comparison with an older tree says, and whether nothing is slower for certain."""
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
        groups.setdefault((row["path"], row["mode"]), []).append(1 + row["ratio"]["off"])
    for (path, mode), ratios in groups.items():
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        out.append(f"  {path:9} {mode:7} {len(ratios):3} cells, ratio {statistics.median(ratios):.3f} ({spread})")
    for row in [row for row in worst if row["ratio"]["off"] > TOLERANCE][:20]:
        where = "D={D} V={V} B={B} {path} {mode}: {us} us, was {older_us}".format(**row)
        same = (
            "the same configuration" if row["form"] == row["older_form"] else f"{row['form']}, was {row['older_form']}"
        )
        out.append(f"  {where} ({row['ratio']['low']:+.1%} to {row['ratio']['high']:+.1%}; {same})")
    return "\n".join(out), bool(compared) and not slower


def parse() -> Any:
    parser = make_parser(__doc__)
    names = {str(shape): shape for shape in SHAPES}
    parser.add_argument("--paths", nargs="+", choices=(*OURS, *BASELINES))
    parser.add_argument("--shapes", nargs="+", choices=names, default=list(names), metavar="DxV")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--rounds", type=int, default=1 if DRY_RUN else 9)
    parser.add_argument("--tuned", action="store_true", help="with tuned tables that fit, not the built-in choices")
    parser.add_argument("--compare-with", type=Path, metavar="OLDER", help="another tree of the project")
    parser.add_argument("--resume", action="store_true", help="keep the batch sizes that --out holds already")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which no further race begins")
    options = parser.parse_args()
    older = options.compare_with
    options.modes = options.modes or list(COMPARED_MODES if older else RACED_MODES)
    options.paths = options.paths or [*OURS, *(() if older else BASELINES)]
    options.batches = options.batches or list(FAST_BATCHES if options.fast else BATCHES)
    if min(options.batches) < 1 or options.rounds < (1 if DRY_RUN else 3):
        parser.error(f"batches are {options.batches}, rounds {options.rounds}; expected at least 1 and at least 3")
    if older is not None and not (older / "sgl_flashsample" / "__init__.py").exists():
        parser.error(f"{older} holds no package sgl_flashsample")
    options.shapes = [names[name] for name in options.shapes]
    return options


def resumed(file: Path, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The result to go on with. Raises ValueError where ``file`` holds one of other arguments or of another device."""
    result = read_result(file, "kernels.py")
    for name, now in (("arguments", arguments), ("device", device)):
        if result["env"].get(name) != now:
            raise ValueError(f"{file} has {name} {result['env'].get(name)}; expected {now}")
    return result


def main() -> int:
    options = parse()
    arguments = {name: getattr(options, name) for name in ("paths", "modes", "rounds", "tuned")}
    arguments["compared"] = options.compare_with is not None
    env = new_env() | {"arguments": arguments, "not_run": []}
    result: dict[str, Any] = {"env": env, "rows": []}
    if options.resume and options.out.exists():
        try:
            before = resumed(options.out, arguments, env["device"])
        except ValueError as error:
            sys.exit(f"error: {error}")
        result["rows"] = before["rows"]
        env["not_run"] = [gap for gap in before["env"]["not_run"] if "B" in gap]  # the others are determined again
    done = {(row["D"], row["V"], row["B"]) for row in result["rows"]}
    todo = {
        shape: [rows for rows in options.batches if (shape.hidden, shape.vocab, rows) not in done]
        for shape in options.shapes
    }
    todo = {shape: batches for shape, batches in todo.items() if batches}
    if not todo:
        sys.exit(f"{options.out} holds every cell already")
    selection = Selection(tuple(options.paths), tuple(options.modes), options.tuned, options.compare_with)
    session = Session(list(todo), sorted({rows for batches in todo.values() for rows in batches}), selection, env)
    then = count_same_tokens if options.compare_with is None else compare
    for shape, batches in todo.items():
        weight = shape.weight()
        ours = trees(shape, weight, max(batches), selection)
        for rows in batches:
            if session.seconds > options.limit:
                print(f"out of time before {shape} B={rows}: go on with --resume", flush=True)
                break
            result["rows"] += session.race(
                ours, Batch(ours[0].head, rows), options.rounds, shape.fields | {"B": rows}, then
            )
            write_result(options.out, result)
        del ours, weight
    print(f"{session.seconds:.0f} s in all", flush=True)
    if options.compare_with is not None:
        text, is_fine = judge(result["rows"])
        print(text)
        return 0 if is_fine else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
