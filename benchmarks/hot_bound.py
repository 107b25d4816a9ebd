"""The most that a hot set could save a screened step, and how large the sizing model would have it.

    python benchmarks/hot_bound.py --out benchmarks/results/h200-hot-bound.json

A hot group is read from the head itself in every step; what that can spare is rescoring, for a leader that is hot has
its exact score before the others are certified. So, in one race of whole steps (random bf16 weights, CUDA-graph replay,
weights cold, fresh hidden states each round):

    screened      the step as it is
    leader known  the same, told the winner's exact score before its first pass: a hot set that holds every leader and
                  costs nothing
    first pass    its first two launches: all that is left of a step that has nothing to rescore

``Sizing`` (``hot_sizing.py``) is given these times, the bytes of a group, and a hit curve: Zipf's law, or that of a
recorded hot set (``--hot``). ``--dry-run``: a small shape, nothing is timed; needs no GPU.
"""

from __future__ import annotations

import sys

if "--dry-run" in sys.argv:
    from sgl_flashsample.demo import interpreter

    interpreter.turn_on()  # before triton is imported

import argparse
import datetime
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import STEPS
from rivals import Contender, Inputs
from screened import BATCHES, DRY_BATCHES, DRY_SHAPES, READ_BYTES, SHAPES, Paths, race, random_weight
from sgl_flashsample.autotune import measure
from sgl_flashsample.kernels import rng
from sgl_flashsample.kernels.quantize_hidden import quantize_hidden
from sgl_flashsample.kernels.rescore_groups import rescore_groups
from sgl_flashsample.kernels.screen_head import screen_head

from sgl_flashsample.hot_set import HotSet
from sgl_flashsample.hot_sizing import Costs, HitCurve, Sizing

TEMPERATURES = (1.0, 0.7)
SCREENED, KNOWN, FIRST = "screened", "leader known", "first pass"
_BELOW = 1e-5  # of a score: what the step is told is no more than what its rescoring finds


class Steps:
    """The steps of one batch. start: per step, the ``ordered`` scores that a step is told before its first pass."""

    def __init__(self, paths: Paths, inputs: Inputs, temperature: float) -> None:
        rows, device = inputs.hidden.shape[0], inputs.hidden.device
        self._paths, self._inputs, self._config = paths, inputs, paths.config(rows, None)
        self._temperature = torch.full((rows,), temperature, device=device)
        self._unknown = ordered(torch.full((STEPS, rows), -torch.inf, device=device))
        self._known = self._unknown.clone()

    def screened(self, step: int) -> torch.Tensor:
        return self._rescored(step, self._unknown[step])

    def leader_known(self, step: int) -> torch.Tensor:
        return self._rescored(step, self._known[step])

    def first_pass(self, step: int) -> torch.Tensor:
        self._screen(step, self._unknown[step])
        return self._paths.screen_workspace.threshold

    def refresh(self) -> None:
        """Other hidden states and noise, and what wins with them."""
        self._inputs.refresh()
        self.learn()

    def learn(self) -> None:
        for step in range(STEPS):
            parameters = self._temperature, self._inputs.seed, self._inputs.position[step]
            score = self._paths.screened(self._inputs.hidden, *parameters).score
            self._known[step] = ordered(score - score.abs() * _BELOW)

    def _screen(self, step: int, start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        paths, hidden, workspace = self._paths, self._inputs.hidden, self._paths.screen_workspace
        noise = self._temperature, self._inputs.seed, self._inputs.position[step]
        quantize_hidden(hidden, paths.copy, workspace, self._config)
        workspace.threshold[: len(start)].copy_(start)
        screen_head(paths.head, paths.copy, len(start), *noise, workspace, self._config)
        return noise

    def _rescored(self, step: int, start: torch.Tensor) -> torch.Tensor:
        noise = self._screen(step, start)
        paths = self._paths
        return rescore_groups(self._inputs.hidden, paths.head, *noise, paths.screen_workspace, self._config).token


def ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 to int32, order-preserving: ``kept_row.ordered``."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def zipf(num_groups: int) -> HitCurve:
    """The H most frequent groups' share of the tokens: that of rank r is drawn 1 / r as often as the first."""
    sums = [0.0, *itertools.accumulate(1 / rank for rank in range(1, num_groups + 1))]
    return lambda num_hot: sums[num_hot] / sums[-1]


def sized(us: dict[str, float], num_groups: int, group_us: tuple[float, float], hits: HitCurve) -> dict[str, float]:
    """What the sizing model makes of a batch's times. group_us: to read one in the head's dtype, from its copy."""
    hot_us, screened_us = group_us
    hit_us, miss_us = us[KNOWN] - us[FIRST], us[SCREENED] - us[FIRST]
    fixed_us = us[FIRST] - screened_us * num_groups
    model = Sizing(Costs(fixed_us, hot_us, screened_us, hit_us, miss_us), num_groups, hits)
    best = model.best()
    return {
        "hot_groups": best,
        "hit": round(hits(best), 3),
        "saves_us": round(model.us(0) - model.us(best), 3),
        "saves": round(1 - model.us(best) / model.us(0), 5),
    }


def measured(device: str, dtype: torch.dtype, dry: bool, hot: HotSet | None) -> dict[str, Any]:
    hidden_size, vocab = (DRY_SHAPES if dry else SHAPES)["speed"]
    weight = random_weight(vocab, hidden_size, device, dtype)
    batches = DRY_BATCHES if dry else BATCHES
    paths = Paths(weight, max(batches), {})
    num_groups = paths.screen_workspace.num_groups
    if hot is not None and hot.num_groups != num_groups:
        raise SystemExit(f"the hot set is of {hot.num_groups} groups; expected one of {num_groups}")
    reader, found = None, {}
    if not dry:
        import warm

        reader, _, found = warm.ceilings(READ_BYTES, 8192)
    rows = []
    for batch in batches:
        for temperature in TEMPERATURES:
            inputs = Inputs.make(weight, None, batch, STEPS)
            steps = Steps(paths, inputs, temperature)
            steps.learn()
            calls: dict[str, Callable[[int], torch.Tensor]] = {
                SCREENED: steps.screened,
                KNOWN: steps.leader_known,
                FIRST: steps.first_pass,
            }
            row: dict[str, Any] = {"B": batch, "temperature": temperature}
            drawn, read = {}, {}
            for name in (SCREENED, KNOWN):
                paths.counted()
                drawn[name] = torch.stack([calls[name](step) for step in range(STEPS)])
                read[name] = round(paths.counted()["groups"] / STEPS, 1)
            row |= {"same_tokens": torch.equal(drawn[SCREENED], drawn[KNOWN]), "groups_read": read}
            raced = [Contender(name, "", str(paths.config(batch, None)), call) for name, call in calls.items()]
            timings = race(raced, reader, steps.refresh)
            if reader is not None:
                us = {contender.path: timings[contender.name].us for contender in raced}
                row["us"] = {name: round(value, 2) for name, value in us.items()}
                row["us_spread"] = {contender.path: round(timings[contender.name].spread, 2) for contender in raced}
                byte_us = timings["read"].us / READ_BYTES
                group = rng.GROUP_SIZE * hidden_size * byte_us
                hits = zipf(num_groups) if hot is None else hot.coverage
                row["sized"] = sized(us, num_groups, (weight.element_size() * group, group), hits)
            rows.append(row)
            print("  " + json.dumps(row), flush=True)
    return {"D": hidden_size, "V": vocab, **found, "hits": "Zipf's law" if hot is None else "recorded", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--hot", type=Path, help="a recorded hot set of 151,936 ids (default: Zipf's law)")
    parser.add_argument("--dry-run", action="store_true", help="a small shape, nothing is timed; needs no GPU")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run works without one")
    hot = None if options.hot is None else HotSet.load(options.hot)
    torch.manual_seed(0)
    found = measured("cpu" if dry else "cuda", torch.float32 if dry else torch.bfloat16, dry, hot)
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
    found |= {"env": {} if dry else measure.environment(), "date": datetime.date.today().isoformat()}
    found["command"] = " ".join(["python", *words])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
