"""Times every sampling feature on this GPU beside plain sampling and the baselines; writes JSON.

    python benchmarks/features.py --out benchmarks/results/h200-features.json

The path and configuration are those that a batch takes by itself, with a screen of the head and without one, for three
profiles of the distribution: peaked, typical and flat. Also counts, per feature and profile, the truncated rows whose
tokens took a search over their logits, and compares tokens with the float64 reference. ``--fast``: three batch sizes of
five.
"""

from __future__ import annotations

import functools
from typing import Any

from common import DRY_RUN, PROFILES, SHAPES, Batch, make_parser, new_env, reason_of, write_result
from contenders import BASELINES, MODES, PICKED, PICKED_WITH_SCREEN, Entrant, Selection, Tree, trees
from racing import Race, Session

from sgl_flashsample.kernels.reference import truncated_sample_ref

SHAPE = SHAPES[0]
BATCHES = (3,) if DRY_RUN else (1, 8, 16, 32, 64)
FAST_BATCHES = (3,) if DRY_RUN else (1, 16, 64)
FEATURES = tuple(mode for mode in MODES if not mode.startswith("T"))
# Rows sampled per profile and mode, for the count of searches; of these, rows compared; rows of float64 at a time.
COUNTED, COMPARED, COMPARED_AT_ONCE = (3, 3, 3) if DRY_RUN else (4096, 256, 64)


def add_bytes(batch: Batch, race: Race, rows: list[dict[str, Any]]) -> None:
    """Add to rows with edits the microseconds that reading the edits takes, ``bytes_us``."""
    for row in rows:
        edits = MODES[row["mode"]].edits if row["mode"] in MODES else ()
        if edits and (us := race.floor_us(sum(getattr(batch.edits, name).nbytes for name in edits))) is not None:
            row["bytes_us"] = round(us, 2)


def count_searches(tree: Tree, profile: str, mode_name: str, rows: int) -> dict[str, Any]:
    """How many rows were left to the search, and whether the tokens are the reference's."""
    batch, mode = Batch(tree.head, rows, profile), MODES[mode_name]
    one: Entrant = tree.entrant(batch, mode_name, PICKED)
    assert mode.truncation is not None
    limits = [batch.full(value) for value in mode.truncation]
    seen = searched = compared = different = near_ties = 0
    while seen < COUNTED:
        batch.refresh(1 + seen)
        token = one.call(0)
        buffer = tree.workspace.last_buffer
        seen += rows
        searched += int((buffer.status[:rows] > 1).sum())
        for first in range(0, rows if compared < COMPARED else 0, COMPARED_AT_ONCE):
            part = slice(first, min(rows, first + COMPARED_AT_ONCE))
            want = truncated_sample_ref(
                buffer.logits[part, : tree.head.vocab_size].double(),
                batch.full(mode.temperature)[part],
                batch.seed[part],
                batch.position[0][part],
                *(values[part] for values in limits),
            )
            compared += len(want.token)
            different += int(((token[part] != want.token) & ~want.near_tie).sum())
            near_ties += int(want.near_tie.sum())
    line = {"profile": profile, "mode": mode_name, "B": rows, "rows": seen, "searched": searched}
    return line | {"compared": compared, "different": different, "near_ties": near_ties}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--modes", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=1 if DRY_RUN else 7)
    parser.add_argument("--tuned", action="store_true", help="with a tuned table that fits, not the built-in choices")
    options = parser.parse_args()
    batches = options.batches or (FAST_BATCHES if options.fast else BATCHES)
    env = new_env() | {"arguments": {"rounds": options.rounds, "tuned": options.tuned}}
    result: dict[str, Any] = {"env": env, "rows": [], "searches": []}
    selection = Selection((PICKED, PICKED_WITH_SCREEN, *BASELINES), tuple(options.modes), options.tuned)
    session = Session([SHAPE], batches, selection, env)
    (tree,) = trees(SHAPE, SHAPE.weight(), max(batches), selection)
    for profile in options.profiles:
        for rows in batches:
            batch = Batch(tree.head, rows, profile)
            cell = SHAPE.fields | {"B": rows, "profile": profile}
            then = functools.partial(add_bytes, batch)
            result["rows"] += session.race([tree], batch, options.rounds, cell, then)
            write_result(options.out, result)
        for mode in [mode for mode in options.modes if MODES[mode].truncation is not None]:
            try:
                counted = count_searches(tree, profile, mode, max(batches))
            except Exception as error:  # the next one may do
                env["not_run"].append({"profile": profile, "path": f"searches of {mode}", "reason": reason_of(error)})
                continue
            result["searches"].append(counted)
            print("  {mode}: {searched} of {rows} rows searched; {different} of {compared} differ".format(**counted))
        write_result(options.out, result)
    print(f"{session.seconds:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
