"""A billion draws without an illegal token, and a million rows with the reference's token.

    python tests/proof/exact.py --out tests/proof/results/exact.json

legal      Random rows of logits with temperatures, top-k, top-p, min-p and grammar masks, of 1 to 5,000 ids, holes of
           -inf among them. An oracle says in float64 which ids each may draw (``definition.py``); each batch is drawn
           at many positions. A token is illegal if it is none of these ids, or no id at all.
reference  Rows of 1 to 2,000 ids in which every feature is on or off at random, so all pairs occur: greedy, top-k,
           top-p, min-p, both kinds of penalties, a mask and a bias, in each dtype. Tokens are compared with the float64
           reference (``kernels/reference.py``), but for near-ties, which it cannot decide.

hostile    The same rows, every second one with NaN, infinities or huge numbers at some ids or all. A NaN is never
           drawn, infinity and what is huge are the largest logits, and a row of nothing else gets its first id: the
           tokens of these rows are the reference's. Tokens and scores of the others are, bit for bit, those of a batch
           without hostile rows.

temperatures  As reference, every row with limits and a temperature between 1e-6 and 1e4, uniform in its logarithm.

forbidden  Rows of 1 to 500 ids with a mask or without, with limits or without, whose biases and some of whose logits
           and temperatures are hostile: 0, tiny, huge, infinite, NaN. A token is forbidden if its logit or its bias is
           -inf or NaN, or the mask forbids it. Each token's logprob is a number and not above 0.

Each is counted by path. cpu: in host memory, where there is no GPU; logits: from logits on the GPU; fused: from an LM
head whose products are these logits, as a hidden state has a single element that is not 0.

In one more batch the oracle forbids each row's most likely id, or the reference or the batch without hostile rows has
another position: those rows must be counted, or nothing is proven. The exit code is 1 if a token is wrong, or if that
is not noticed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from definition import make_row, may_and_must, probabilities
from programs import DEVICE, in_processes, make_parser, new_env, read_result, write_result
from tqdm import tqdm

from sgl_flashsample import BatchParams, LMHead, SampleOutput, Truncation, sample, sample_from_logits
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.kernels.params import LARGEST_LOGIT, LogitEdits
from sgl_flashsample.kernels.reference import edit_logits_ref, sample_ref, truncated_sample_ref
from sgl_flashsample.selfcheck import MAX_COMPILED_ROWS, pack_bits

SECTIONS = ("legal", "reference", "hostile", "temperatures", "forbidden")
ROWS, MASKED_SHARE, MOST_IDS = 1024, 0.3, 2000
FUSED_WIDTH = 256  # elements of a hidden state: rows of logits that a head can hold at a time
FEATURES = 8  # greedy, top-k, top-p, min-p, additive, scaling, mask, bias
HOSTILE_ROWS, HOSTILE = 64, (math.nan, math.inf, -math.inf, 3e38, -3e38)
COLDEST, HOTTEST = -6.0, 4.0  # powers of ten
BIASES = (0.0, 0.0, 0.0, -1.5, 2.0, 1e31, -1e31, 3e38, -3e38, math.inf, -math.inf, math.nan)
TEMPERATURES = (0.0, 1e-30, 1e-6, 1e-3, 0.7, 1.0, 30.0, 1e30, 3e38, math.inf, math.nan)
MOST_FORBIDDEN_IDS = 500
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 16 if DEVICE.type == "cuda" else 1  # positions of a call: a GPU is idle between small ones
PARTS_PER_PROCESS = 8  # the file has what the parts that have ended have counted
Draw = Callable[[range], SampleOutput]  # of each row at each of the positions, a row after the other


class Part(NamedTuple):
    """One of ``of`` parts of a count: each ``of``-th batch, from ``number`` on."""

    number: int
    of: int

    def progress(self, total: float, what: str, unit: str) -> tqdm:
        """Of the first part, which is like the others."""
        return tqdm(total=total / self.of, desc=what, unit=unit, unit_scale=True, disable=self.number > 0)


# --- legal ------------------------------------------------------------------------------------------------------------


class Batch:
    """``rows`` rows of one size, the numbers ``index * rows`` and following of ``make_row``.

    seen: the rows, without what a mask forbids. may: ``[B, V]`` bool, what each may draw. at_once: positions of a call.
    """

    return_logprob = False

    def __init__(self, index: int, rows: int, at_once: int = 1) -> None:
        self.at_once = at_once
        random = np.random.default_rng(index)
        vocab = make_row(index).logits.size
        made = [make_row(index * rows + row, vocab) for row in range(rows)]
        allowed = np.ones((rows, vocab), dtype=bool)
        for row in np.flatnonzero(random.random(rows) < MASKED_SHARE):
            allowed[row] = random.random(vocab) < 0.5
            allowed[row, made[row].logits.argmax()] = True  # a grammar leaves a row something to draw
        self.logits = np.stack([row.logits for row in made])
        self.may = np.empty_like(allowed)
        logits = np.where(allowed, self.logits, np.float32(-np.inf))
        self.seen = [dataclasses.replace(row, logits=of_row) for row, of_row in zip(made, logits, strict=True)]
        for place, row in enumerate(self.seen):
            self.may[place] = may_and_must(row, probabilities(row), flashinfer=True)[0]
        columns = {
            "temperature": [row.temperature for row in made],
            "top_k": [row.top_k or 0 for row in made],
            "top_p": [row.top_p or 1.0 for row in made],
            "min_p": [row.min_p or 0.0 for row in made],
        }
        on_device = {name: torch.tensor(values, device=DEVICE) for name, values in columns.items()}
        limits = on_device["top_k"].to(torch.int32), on_device["top_p"], on_device["min_p"]
        edits = LogitEdits(mask=pack_bits(torch.from_numpy(allowed).to(DEVICE)))
        seed = torch.arange(rows, device=DEVICE) + index * rows
        params = BatchParams(on_device["temperature"], seed, torch.zeros_like(seed), Truncation(*limits), edits)
        self._params = params.repeated(at_once)
        self._row = torch.arange(rows, device=DEVICE).repeat_interleave(at_once)

    def params(self, positions: range) -> BatchParams:
        """positions: ``at_once`` of them."""
        at = torch.arange(positions.start, positions.stop, device=DEVICE)
        return dataclasses.replace(self._params, position=at.repeat(len(self.may)))

    def illegal(self, draw: Draw, positions: range, may: np.ndarray) -> int:
        """How many tokens of these positions, a multiple of ``at_once``, are not in ``may``."""
        legal, count = torch.from_numpy(may).to(DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
        for start in positions[:: self.at_once]:
            tokens = draw(range(start, start + self.at_once)).token_ids
            inside = (tokens >= 0) & (tokens < legal.shape[1])
            count += (~(inside & legal[self._row, tokens.clamp(0, legal.shape[1] - 1)])).sum()
        return int(count)


def from_logits(batch: Batch) -> Draw:
    logits = torch.from_numpy(batch.logits).to(DEVICE).repeat_interleave(batch.at_once, 0)
    return lambda positions: sample_from_logits(logits, batch.params(positions), return_logprob=batch.return_logprob)


def from_head(batch: Batch) -> Draw:
    """Products of an element 1.0 and its column of the head, and of zeros: the logits, bit for bit. A hole or NaN is a
    logit of -3e38, which no row draws that has another, and infinity one of 3e38."""
    weight = torch.from_numpy(np.nan_to_num(batch.logits, nan=-3e38, posinf=3e38, neginf=-3e38).T.copy()).to(DEVICE)
    hidden = torch.eye(len(batch.logits), device=DEVICE).repeat_interleave(batch.at_once, 0)
    head = LMHead(weight)
    return lambda positions: sample(
        hidden, head, batch.params(positions), path="fused", return_logprob=batch.return_logprob
    )


class Path(NamedTuple):
    draw_of: Callable[[Batch], Draw]
    rows: int
    at_once: int


PATHS = {
    "cpu": Path(from_logits, ROWS, 1),
    "logits": Path(from_logits, ROWS, AT_ONCE),
    "fused": Path(from_head, FUSED_WIDTH, min(AT_ONCE, MAX_COMPILED_ROWS // FUSED_WIDTH)),
}


def count_illegal(path: str, part: Part, options: Any) -> dict[str, int]:
    """Batches are made until there are enough draws."""
    draw_of, rows, at_once = PATHS[path]
    total, illegal, index = 0, 0, options.first + part.number
    bar = part.progress(options.draws, f"legal, {path}", "draw")
    while total < options.draws / part.of:
        batch = Batch(index, rows, at_once)
        illegal += batch.illegal(draw_of(batch), range(options.positions), batch.may)
        total += rows * options.positions
        index += part.of
        bar.update(rows * options.positions)
    bar.close()
    batch = Batch(part.number, rows, at_once)
    wrong = batch.may.copy()
    wrong[np.arange(rows), batch.logits.argmax(1)] = False
    noticed = batch.illegal(draw_of(batch), range(2 * at_once), wrong)
    return {"draws": total, "illegal": illegal, "planted_noticed": noticed}


# --- forbidden --------------------------------------------------------------------------------------------------------


class Forbidden(Batch):
    """``rows`` rows with hostile numbers. A row in which every id is forbidden may draw the first; its logprob is no
    number. finite: logits are those of a head, -3e38 in the place of NaN and -inf, which an edit may then raise."""

    return_logprob = True

    def __init__(self, index: int, rows: int, at_once: int, finite: bool) -> None:
        self.at_once = at_once
        random = np.random.default_rng(index)
        vocab = int(np.exp(random.uniform(0, np.log(MOST_FORBIDDEN_IDS))))
        logits = (3 * random.standard_normal((rows, vocab))).astype(np.float32)
        broken = random.random(rows) < 0.2
        logits[broken] = np.where(random.random((broken.sum(), vocab)) < 0.1, random.choice(HOSTILE), logits[broken])
        self.logits = np.nan_to_num(logits, nan=-3e38, posinf=3e38, neginf=-3e38) if finite else logits
        bias = random.choice(np.array(BIASES, dtype=np.float32), (rows, vocab))
        bias[random.random(rows) < 0.2] = 0.0
        allowed = (random.random((rows, vocab)) < 0.5) | (random.random(rows) < 0.3)[:, None]
        self.may = allowed & (self.logits > -np.inf) & (bias > -np.inf)
        self.has_token = torch.from_numpy(self.may.any(1)).to(DEVICE)
        self.may[~self.may.any(1), 0] = True
        temperature = np.where(
            random.random(rows) < 0.5,
            random.choice(np.array(TEMPERATURES, dtype=np.float32), rows),
            10 ** random.uniform(COLDEST, HOTTEST, rows).astype(np.float32),
        )

        def limit(low: float, high: float, off: float) -> torch.Tensor:
            values = np.where(random.random(rows) < 0.5, random.uniform(low, high, rows), off)
            return torch.from_numpy(values.astype(np.float32)).to(DEVICE)

        limits = Truncation(limit(1, 60, 0).int(), limit(0.05, 0.99, 1.0), limit(0.01, 0.5, 0.0))
        edits = LogitEdits(mask=pack_bits(torch.from_numpy(allowed).to(DEVICE)), bias=torch.from_numpy(bias).to(DEVICE))
        seed = torch.arange(rows, device=DEVICE) + index * rows
        params = BatchParams(torch.from_numpy(temperature).to(DEVICE), seed, torch.zeros_like(seed), limits, edits)
        self._params = params.repeated(at_once)
        self._row = torch.arange(rows, device=DEVICE).repeat_interleave(at_once)

    def bad_logprobs(self, draw: Draw, positions: range) -> int:
        """How many logprobs at these positions, a multiple of ``at_once``, are above 0 or no number."""
        count, has_token = torch.zeros((), dtype=torch.int64, device=DEVICE), self.has_token[self._row]
        for start in positions[:: self.at_once]:
            logprobs = draw(range(start, start + self.at_once)).logprobs
            count += (has_token & ~(logprobs <= 0)).sum()
        return int(count)


def count_forbidden(path: str, part: Part, options: Any) -> dict[str, int]:
    """Batches are made until there are enough draws."""
    draw_of, rows, at_once = PATHS[path]
    totals, index = Counter[str](), part.number
    bar = part.progress(options.forbidden, f"forbidden, {path}", "draw")
    while totals["draws"] < options.forbidden / part.of:
        batch = Forbidden(index, rows, at_once, path == "fused")
        draw, positions = draw_of(batch), range(options.positions)
        totals["illegal"] += batch.illegal(draw, positions, batch.may)
        totals["bad_logprobs"] += batch.bad_logprobs(draw, positions)
        totals["draws"] += rows * len(positions)
        index += part.of
        bar.update(rows * len(positions))
    bar.close()
    batch = Forbidden(part.number, rows, at_once, path == "fused")
    draw, wrong = draw_of(batch), batch.may.copy()
    wrong[np.arange(rows), draw(range(at_once)).token_ids[::at_once].cpu().numpy()] = False
    return {**totals, "planted_noticed": batch.illegal(draw, range(at_once), wrong)}


# --- reference --------------------------------------------------------------------------------------------------------


def make_rows(
    index: int, rows: int, hostile: bool = False, any_temperature: bool = False
) -> tuple[torch.Tensor, BatchParams, torch.Tensor]:
    """``[B, V]`` logits, what the rows ask for, and the edited logits in float64. hostile: every second row is; the
    others are the same as without. any_temperature: all rows are sampled, at any temperature, with limits."""
    g = torch.Generator(DEVICE).manual_seed(index)
    vocab = int(np.exp(np.random.default_rng(index).uniform(0, np.log(MOST_IDS))))

    on: dict[str, Any] = {"generator": g, "device": DEVICE}

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, **on)

    logits = 3 * torch.randn(rows, vocab, **on)
    logits = torch.where(torch.rand(rows, 1, **on) < 0.2, logits.round(), logits).to(DTYPES[index % len(DTYPES)])
    if hostile:
        plant(logits, index)
    greedy, k, p, m, additive, scaling, masked, biased = torch.rand(FEATURES, rows, **on) < 0.5
    if any_temperature:
        greedy, k = torch.zeros_like(greedy), k | ~(p | m)
    largest_k = max(2, min(vocab, 200))
    top_k = torch.where(k, torch.randint(1, largest_k, (rows,), **on), 0).int()
    limits = top_k, torch.where(p, uniform(0.05, 0.99, rows), 1.0), torch.where(m, uniform(0.01, 0.5, rows), 0.0)
    allowed = (torch.rand(rows, vocab, **on) < 0.6) | ~masked[:, None]
    allowed[:, 0] = True
    edits = {
        "additive": additive[:, None] * uniform(-2, 0, rows, vocab),
        "scaling": torch.where(scaling[:, None], uniform(1, 1.5, rows, vocab), 1.0),
        "bias": biased[:, None] * torch.randn(rows, vocab, **on),
    }
    temperature = torch.where(greedy & (torch.rand(rows, **on) < 0.25), 0.0, uniform(0.3, 2.0, rows))
    if any_temperature:
        temperature = 10 ** uniform(COLDEST, HOTTEST, rows)
    params = BatchParams(
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (rows,), **on),
        torch.randint(0, 2**40, (rows,), **on),
        Truncation(*limits),
        LogitEdits(mask=pack_bits(allowed), **edits),
    )
    return logits, params, bounded(edit_logits_ref(bounded(logits.float()), allowed=allowed, **edits)).double()


def plant(logits: torch.Tensor, index: int) -> None:
    """Hostile numbers at some ids, or all, of every second row. In place."""
    random = np.random.default_rng(index)
    for row in logits[::2]:
        ids = slice(None) if random.random() < 0.1 else random.integers(0, len(row), random.integers(1, 20))
        row[ids] = random.choice(HOSTILE)


def bounded(logits: torch.Tensor) -> torch.Tensor:
    """What kernels take such logits for: forbidden, or the largest."""
    return torch.where(logits > -math.inf, logits.clamp(max=LARGEST_LOGIT), -math.inf)


def expected(edited: torch.Tensor, params: BatchParams, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's token of each row, and whether it is certain. A greedy row has no limits."""
    drawn = params.temperature, params.seed, position
    plain = sample_ref(edited, edited, edited, *drawn)
    assert params.truncation is not None
    limits = params.truncation.top_k, params.truncation.top_p, params.truncation.min_p
    limited = ((limits[0] > 0) | (limits[1] < 1) | (limits[2] > 0)) & (params.temperature > 0)
    some = limited.nonzero()[:, 0]
    if not len(some):
        return plain.token, ~plain.near_tie
    truncated = truncated_sample_ref(edited[some], *(one[some] for one in (*drawn, *limits)))
    token = plain.token.index_copy(0, some, truncated.token)
    return token, ~plain.near_tie.index_copy(0, some, truncated.near_tie)


def compare(section: str, part: Part, options: Any) -> dict[str, int]:
    """Rows are made until there are enough."""
    total, different, ties, index, noticed = 0, 0, 0, part.number, 0
    bar = part.progress(options.rows, section, "row")
    while total < options.rows / part.of:
        logits, params, edited = make_rows(index, ROWS, any_temperature=section == "temperatures")
        token = sample_from_logits(logits, params).token_ids
        want, certain = expected(edited, params, params.position)
        different += int((certain & (token != want)).sum())
        ties += int((~certain).sum())
        if index == part.number:
            noticed = int((token != expected(edited, params, params.position + 1)[0]).sum())
        total += ROWS
        index += part.of
        bar.update(ROWS)
    bar.close()
    return {"rows": total, "different": different, "near_ties": ties, "planted_noticed": noticed}


def count_hostile(part: Part, options: Any) -> dict[str, int]:
    """Batches are made until there are enough hostile rows."""
    total, different, ties, index, noticed = 0, 0, 0, part.number, 0
    bar = part.progress(options.hostile, "hostile", "row")
    while total < options.hostile / part.of:
        logits, params, edited = make_rows(index, HOSTILE_ROWS, hostile=True)
        clean = make_rows(index, HOSTILE_ROWS)[0]
        drawn, alone = sample_from_logits(logits, params), sample_from_logits(clean, params)
        want, certain = expected(edited, params, params.position)
        token, others = drawn.token_ids.long(), torch.arange(HOSTILE_ROWS, device=DEVICE) % 2 == 1
        inside = (token >= 0) & (token < logits.shape[1])
        illegal = ~inside | (logits.gather(1, torch.where(inside, token, 0)[:, None])[:, 0].isnan() & (token > 0))
        different += int(((certain & (token != want)) | illegal).sum())
        different += int(((drawn.token_ids != alone.token_ids) | (drawn.scores != alone.scores))[others].sum())
        ties += int((~certain).sum())
        if index == part.number:
            later = dataclasses.replace(params, position=params.position + 1)
            noticed = int((sample_from_logits(clean, later).token_ids != drawn.token_ids)[others].sum())
        total += HOSTILE_ROWS // 2
        index += part.of
        bar.update(HOSTILE_ROWS // 2)
    bar.close()
    return {"rows": total, "different": different, "near_ties": ties, "planted_noticed": noticed}


def count(section: str, path: str, part: Part, options: Any) -> dict[str, int]:
    if section == "legal":
        return count_illegal(path, part, options)
    if section == "forbidden":
        return count_forbidden(path, part, options)
    return count_hostile(part, options) if section == "hostile" else compare(section, part, options)


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of what is not counted now")
    parser.add_argument("--draws", type=float, default=1e9, help="of each path, for legal")
    parser.add_argument("--positions", type=int, default=1600, help="that each batch is drawn at, for legal")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch of legal: others are new draws")
    parser.add_argument("--rows", type=float, default=1e6, help="for reference and temperatures")
    parser.add_argument("--forbidden", type=float, default=1e8, help="draws of each path, for forbidden")
    parser.add_argument("--hostile", type=float, default=1e5, help="hostile rows, for hostile")
    parser.add_argument("--processes", type=int, default=1, help="they share all GPUs")
    options = parser.parse_args()
    if options.positions % AT_ONCE:
        parser.error(
            f"--positions is {options.positions}; expected a multiple of {AT_ONCE}, which a call draws at once"
        )
    counts = [("reference", "logits"), ("legal", "logits"), ("legal", "fused"), ("hostile", "logits")]
    counts += [("temperatures", "logits"), ("forbidden", "logits"), ("forbidden", "fused")]
    if DEVICE.type == "cpu":
        if not draws_in_host_memory(DEVICE):
            parser.error("without a GPU this draws in host memory: the extra `cpu`, and TRITON_INTERPRET unset")
        counts = [(section, "cpu") for section in ("reference", "legal", "hostile", "temperatures", "forbidden")]
    try:
        kept = read_result(options.out, "exact.py")["rows"] if options.keep and options.out.exists() else []
    except ValueError as error:
        sys.exit(f"error: {error}")
    rows = [row for row in kept if row["section"] not in options.only]
    result: dict[str, Any] = {"env": new_env(), "rows": rows}
    for section, path in counts:
        if section in options.only:
            started, totals = time.monotonic(), Counter[str]()
            num_parts = options.processes * (PARTS_PER_PROCESS if options.processes > 1 else 1)
            parts = ((section, path, Part(number, num_parts), options) for number in range(num_parts))
            for counted in in_processes(count, parts, options.processes):
                totals.update(counted)
                row = {"section": section, "path": path} | ({"first": options.first} if section == "legal" else {})
                row |= {**totals, "seconds": round(time.monotonic() - started, 1)}
                write_result(options.out, result | {"rows": [*result["rows"], row]})
            result["rows"].append(row)
            print(row, flush=True)
    faults = ("illegal", "different", "bad_logprobs")
    wrong = (any(row.get(one) for one in faults) or not row["planted_noticed"] for row in result["rows"])
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
