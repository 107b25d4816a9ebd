"""Tokens at scale: exact, the same whatever surrounds a row, of the right law, and the same with verified drafts.

    python tests/proof/draws.py exact --out tests/proof/results/exact.json
    python tests/proof/draws.py determinism --out tests/proof/results/determinism.json
    python tests/proof/draws.py soak --scale 0.1 --out tests/proof/results/soak.json       # 6 minutes
    python tests/proof/draws.py verified --out tests/proof/results/verified.json

exact        sections are counted by path, with ``GOALS`` draws or rows of each at ``--scale 1``
  legal         draws of rows with temperatures, top-k, top-p, min-p and grammar masks, of 1 to 5,000 ids, holes of -inf
                among them. A float64 oracle (``definition.py``) says which ids a row may draw.
  reference     rows of 1 to 2,000 ids with every feature on or off at random, in each dtype. Tokens are compared with
                the float64 reference (``kernels/reference.py``), except in near-ties, which it cannot decide.
  heads         such rows, as the products of a head that draws them by the fused pass and with a screen; and rows near
                them, of a head in float8_e4m3fn
  hostile       rows of reference, every second one with NaN, infinities or huge numbers at some ids or all. Tokens and
                scores of the other rows are, bit for bit, those of a batch without hostile rows.
  temperatures  the same rows, each with limits and a temperature between 1e-6 and 1e4, uniform in its logarithm.
  forbidden     rows of 1 to 500 ids with hostile biases, logits and temperatures. A token is forbidden if its logit or
                its bias is -inf or NaN, or the mask forbids it. Each logprob is a number and not above 0.
  logprobs      rows of 1 to 32,768 ids, and of 151,936, with every feature on or off at random (``logprobs.py``). The
                likeliest ids of a row are those of float64 but for near-ties, and logprobs of these, of given ids, of
                tokens and of prompts differ from float64 by 2e-5 at most, below -50 by a share of 4e-7.
determinism  rows that are the same bit for bit, compared token by token. Dot products are exact, so every tile and
             every GEMM gives the same logits. Temperatures are 1e-6 to 10.
  rows          each row alone; in batches of every size up to the largest; in 20 orders; on every path; with each kind
                of features
  tables        with each configuration of the shipped tables that fits the device
  shards        the vocabulary split over 1, 2, 4 and 8 ranks, whose draws are merged (``kernels/merge_ranks.py``)
  graphs        CUDA graphs, replayed 10,000 times at ``--scale 1``, and at other positions; on a GPU only
soak         draws of known distributions, 60 minutes at ``--scale 1`` in equal parts per path and batch. The evidence
             against them (``log_e_value`` in ``stats.py``) is looked at again and again. The mean over the rows of one
             of N right batches ever reaches N / ``ALPHA`` with a chance of at most ``ALPHA`` / N. ``powerful``: rows
             where so many draws of a distribution at a total variation distance of ``TVD`` would be noticed in 99 of
             100 simulations.
verified     drafts of a language of 64 tokens, in chains, trees, and a tree of each row's own; 1e7 positions per case
             at ``--scale 1``. ``p_value``: G-tests of the tokens after each token. ``tv``: total variation between
             counted and true transitions; ``tv_chance``: the share of chance. ``accepted_z``: accepted first drafts
             less the expected number, in standard deviations; None where all must be accepted. ``different``: tokens
             that a step without drafts would not have drawn.

Paths: on a GPU fused, screened, logits (a GEMM and the reader) and reader (of given logits; exact and soak call it
logits). Without a GPU: cpu, in host memory. ``--dry-run`` interprets the GPU's paths, on few and short rows.

Each count plants an error and must notice it, or nothing is proven: an oracle that forbids each row's most likely id or
drawn id, a reference or a batch at another position, another distribution, other ids and logprobs.
``planted_noticed``, ``noticed`` and ``noticed_*`` say how often. The exit code is 1 if a token or a logprob is wrong,
or if a planted error is not noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from programs import DEVICE, DRY_RUN, in_processes, make_parser, new_env, read_result, write_result  # isort: skip
from definition import Row, may_and_must, probabilities
from kernel_cases import HOSTILE, KINDS, Case, Mix, Rows, expected, limits, make_case, random_rows, reference
from logprobs import FEW, MEAN_ROWS, VOCABULARIES, add, count_logprobs, make_batch, shapes_once, ways
from scipy.special import logsumexp
from scipy.stats import chi2
from stats import coupled_acceptance, g_test, log_e_value
from tqdm import tqdm

from sgl_flashsample import (
    BatchParams,
    DraftTree,
    Head,
    LMHead,
    SampleOutput,
    Truncation,
    sample,
    sample_from_logits,
    verify,
)
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.kernels.launch import compiling_only
from sgl_flashsample.kernels.merge_ranks import merge_records, no_record, pack_record
from sgl_flashsample.kernels.reference import allowed_ref, merge_records_ref
from sgl_flashsample.kinds import BatchKind, Config, SamplingPath, path_of
from sgl_flashsample.paths import launch
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import MAX_COMPILED_ROWS
from sgl_flashsample.tables import schema
from sgl_flashsample.tables.lookup import device_of, unsupported_config
from sgl_flashsample.tables.schema import Device, Table

HOST = draws_in_host_memory(DEVICE)
WHERE = "interpreted" if DRY_RUN else "host memory" if HOST else "GPU"
Result = dict[str, Any]  # one row of a result file
# The fields that say what a row counts. A later row of the same replaces an earlier one.
ABOUT = ("section", "on", "path", "first", "kind", "what", "batch", "shape", "drafts", "temperature", "truncated")


class Part(NamedTuple):
    """One of ``of`` parts of a count: each ``of``-th batch, from ``number`` on."""

    number: int
    of: int

    def batches(self, goal: float, each: int, about: str, first: int = 0) -> Iterator[int]:
        """Numbers of batches that count ``each``, until this part has its share of the goal. Only the first part, which
        is like the others, shows its progress."""
        total, index = 0, first + self.number
        with tqdm(total=goal / self.of, desc=about, unit_scale=True, disable=self.number > 0) as bar:
            while total < goal / self.of or total == 0:
                yield index
                total += each
                index += self.of
                bar.update(each)


# --- exact ------------------------------------------------------------------------------------------------------------

GOALS = {
    "reference": 1e8,
    "heads": 1e6,
    "legal": 1e9,
    "hostile": 1e5,
    "temperatures": 1e6,
    "forbidden": 1e8,
    "logprobs": 1e6,
}
NUM_ROWS = 8 if DRY_RUN else 1024
FUSED_ROWS = min(NUM_ROWS, 256)  # elements of a hidden state: rows of logits that a head can hold at a time
HEAD_ROWS = {"quantised": FUSED_ROWS, "fused": FUSED_ROWS, "screened": min(NUM_ROWS, 64)}  # of a batch
HOSTILE_ROWS = 8 if DRY_RUN else 64
AT_ONCE = 16 if DEVICE.type == "cuda" else 1  # positions of a call: a GPU is idle between small ones
POSITIONS = 2 if DRY_RUN else 1600  # of a batch of legal or forbidden
PARTS_PER_PROCESS = 8  # the file has the counts of the parts that have ended
F32 = (torch.float32,)
LEGAL = Mix(5000, ("peaked", "flat", "ties", "holes", "zipf"), F32, greedy=0.0, masked=0.3, edited=0.0)
REFERENCE = Mix(100, dtypes=(torch.float32, torch.float16)) if DRY_RUN else Mix(2000)
MIXES = {
    "reference": REFERENCE,
    "heads": REFERENCE,
    "temperatures": dataclasses.replace(REFERENCE, greedy=0.0, limited=True, powers=(-6.0, 4.0)),
    "legal": dataclasses.replace(LEGAL, most_ids=100) if DRY_RUN else LEGAL,
    "forbidden": Mix(500, ("normal",), F32, greedy=0.0, masked=0.7, edited=0.0, powers=(-6.0, 4.0), hostile=True),
}
Draw = Callable[[range], SampleOutput]  # of each row at each of the positions, a row after the other


class DrawPath(NamedTuple):
    """rows: of a batch. at_once: positions of a call."""

    name: str
    rows: int
    at_once: int

    def drawn(self, rows: Rows, return_logprob: bool = False) -> Draw:
        """The function that draws these rows at ``at_once`` positions."""
        case, params = None, rows.params.repeated(self.at_once)
        if self.name == "fused":
            case = rows.case(self.at_once)
        logits = rows.logits.repeat_interleave(self.at_once, 0)

        def draw(positions: range) -> SampleOutput:
            at = torch.arange(positions.start, positions.stop, device=DEVICE).repeat(len(rows.logits))
            moved = dataclasses.replace(params, position=at)
            if case is None:
                return sample_from_logits(logits, moved, return_logprob=return_logprob)
            return sample(case.hidden, case.head, moved, path="fused", return_logprob=return_logprob)

        return draw


PATHS = {
    "cpu": DrawPath("cpu", NUM_ROWS, 1),
    "logits": DrawPath("logits", NUM_ROWS, AT_ONCE),
    "fused": DrawPath("fused", FUSED_ROWS, min(AT_ONCE, MAX_COMPILED_ROWS // FUSED_ROWS)),
}


def oracle_rows(rows: Rows) -> Iterator[Row]:
    """The rows as the float64 oracle takes them: without ids that the mask forbids."""
    limits, logits = rows.params.truncation, torch.where(rows.allowed, rows.logits, -math.inf).cpu().numpy()
    assert limits is not None
    columns = (one.tolist() for one in (rows.params.temperature, limits.top_k, limits.top_p, limits.min_p))
    for of_row, temperature, top_k, top_p, min_p in zip(logits, *columns, strict=True):
        yield Row("", of_row, temperature, top_k or None, None if top_p == 1 else top_p, min_p or None)


def legal_ids(rows: Rows) -> torch.Tensor:
    """``[B, V]`` bool: ids that each row may draw."""
    may = [may_and_must(row, probabilities(row), flashinfer=True)[0] for row in oracle_rows(rows)]
    return torch.from_numpy(np.stack(may)).to(DEVICE)


def count_wrong(
    draw: Draw, positions: range, at_once: int, may: torch.Tensor, has_token: torch.Tensor
) -> tuple[int, int]:
    """Wrong ones at these positions, a multiple of ``at_once``: tokens that are not in ``may`` (``[B, V]`` bool), or no
    id; and logprobs above 0, or no number, of rows that have a token (``[B]`` bool)."""
    illegal, bad = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    row = torch.arange(len(may), device=DEVICE).repeat_interleave(at_once)
    for start in positions[::at_once]:
        drawn = draw(range(start, start + at_once))
        inside = (drawn.token_ids >= 0) & (drawn.token_ids < may.shape[1])
        illegal += (~(inside & may[row, drawn.token_ids.clamp(0, may.shape[1] - 1)])).sum()
        if drawn.logprobs is not None:
            bad += (has_token[row] & ~(drawn.logprobs <= 0)).sum()
    return int(illegal), int(bad)


def count_draws(section: str, path: DrawPath, part: Part, goal: float, first: int) -> Counter[str]:
    """The counts of legal or forbidden."""
    totals, forbidden = Counter[str](), section == "forbidden"
    for index in part.batches(goal, path.rows * POSITIONS, f"{section}, {path.name}", 0 if forbidden else first):
        rows = random_rows(MIXES[section], index, path.rows, DEVICE)
        rows = rows.finite if forbidden and path.name == "fused" else rows
        draw, may = path.drawn(rows, return_logprob=forbidden), rows.may if forbidden else legal_ids(rows)
        has_token = may.any(1)
        may[:, 0] |= ~has_token  # such a row draws the first id, whose logprob is no number
        illegal, bad = count_wrong(draw, range(POSITIONS), path.at_once, may, has_token)
        totals.update({"draws": path.rows * POSITIONS, "illegal": illegal})
        totals.update({"bad_logprobs": bad} if forbidden else {})
        if "planted_noticed" not in totals:  # an oracle that forbids each row's most likely id, or the drawn one
            ids = torch.where(may, rows.logits, -math.inf).argmax(1, keepdim=True)
            if forbidden:
                ids = draw(range(path.at_once)).token_ids[:: path.at_once, None].long()
            wrong = may.scatter(1, ids, False)
            totals["planted_noticed"] = count_wrong(draw, range(2 * path.at_once), path.at_once, wrong, has_token)[0]
    return totals


def later(params: BatchParams, steps: int = 1) -> BatchParams:
    return dataclasses.replace(params, position=params.position + steps)


def drawn_by(path: str, rows: Rows) -> tuple[Rows, torch.Tensor]:
    """The tokens of these rows, of logits in memory or of a head, and the rows that are drawn from: a quantised head
    has other ones."""
    if path not in HEAD_ROWS:
        return rows, sample_from_logits(rows.logits, rows.params).token_ids
    rows, case = rows.quantised() if path == "quantised" else (rows, rows.case())
    screen = Screen(case.head, len(rows.logits)) if path == "screened" else None
    drawn = Head(case.head, screen=screen).draw(case.hidden, rows.params, path="fused" if screen is None else path)
    return rows, drawn.token_ids


def count_reference(section: str, path: str, part: Part, goal: float) -> Counter[str]:
    totals, num_rows = Counter[str](), HEAD_ROWS.get(path, NUM_ROWS)
    for index in part.batches(goal, num_rows, section):
        rows, token = drawn_by(path, random_rows(MIXES[section], index, num_rows, DEVICE))
        want = reference(rows.edited, rows.params)
        totals["rows"] += num_rows
        totals["different"] += int((~want.near_tie & (token != want.token)).sum())
        totals["near_ties"] += int(want.near_tie.sum())
        if "planted_noticed" not in totals:
            totals["planted_noticed"] = int((token != reference(rows.edited, later(rows.params)).token).sum())
    return totals


def planted(rows: Rows, index: int) -> Rows:
    """Hostile numbers at some ids, or all, of every second row."""
    chance, logits = np.random.default_rng(index), rows.logits.clone()
    for row in logits[::2]:
        ids = slice(None) if chance.random() < 0.1 else chance.integers(0, len(row), chance.integers(1, 20))
        row[ids] = chance.choice(HOSTILE)
    return dataclasses.replace(rows, logits=logits)


def count_hostile(part: Part, goal: float) -> Counter[str]:
    """A NaN is never drawn, infinity and huge numbers are the largest logits, and a row of nothing else gets its first
    id."""
    totals, others = Counter[str](), torch.arange(HOSTILE_ROWS, device=DEVICE) % 2 == 1
    for index in part.batches(goal, HOSTILE_ROWS // 2, "hostile"):
        clean = random_rows(MIXES["reference"], index, HOSTILE_ROWS, DEVICE)
        rows = planted(clean, index)
        drawn, alone = (sample_from_logits(one.logits, one.params) for one in (rows, clean))
        want, token = reference(rows.edited, rows.params), drawn.token_ids.long()
        inside = (token >= 0) & (token < rows.logits.shape[1])
        is_nan = rows.logits.gather(1, torch.where(inside, token, 0)[:, None])[:, 0].isnan()
        wrong = (~want.near_tie & (token != want.token)) | ~inside | (is_nan & (token > 0))
        disturbed = ((drawn.token_ids != alone.token_ids) | (drawn.scores != alone.scores)) & others
        totals["rows"] += HOSTILE_ROWS // 2
        totals["different"] += int(wrong.sum()) + int(disturbed.sum())
        totals["near_ties"] += int(want.near_tie.sum())
        if "planted_noticed" not in totals:
            moved = sample_from_logits(clean.logits, later(clean.params)).token_ids
            totals["planted_noticed"] = int((moved != drawn.token_ids)[others].sum())
    return totals


LOGPROB_VOCABULARIES = FEW if DRY_RUN else VOCABULARIES


def count_exact(section: str, path: str, part: Part, goal: float, first: int = 0) -> Counter[str]:
    if section in ("legal", "forbidden"):
        return count_draws(section, PATHS[path], part, goal, first)
    return count_hostile(part, goal) if section == "hostile" else count_reference(section, path, part, goal)


def count_by_path(section: str, path: str, part: Part, goal: float, first: int = 0) -> dict[str, Counter[str]]:
    """{path: counts}. The ways to logprobs share their batches, and what float64 says of these."""
    if section == "logprobs":
        batches = part.batches(goal, MEAN_ROWS, section, first)
        return count_logprobs(batches, DEVICE, LOGPROB_VOCABULARIES)
    return {path: count_exact(section, path, part, goal, first)}


def launch_logprobs() -> None:
    """Launch the kernels of the section."""
    for index in shapes_once(LOGPROB_VOCABULARIES):
        ways(make_batch(index, DEVICE, LOGPROB_VOCABULARIES))


def paths_of(section: str) -> tuple[str, ...]:
    if section == "heads":
        return () if HOST else tuple(HEAD_ROWS)
    return ("cpu",) if HOST else ("logits", "fused") if section in ("legal", "forbidden") else ("logits",)


def exact(options: Any) -> Iterator[Result]:
    """A row grows as the parts of its count end."""
    num_parts = options.processes * (PARTS_PER_PROCESS if options.processes > 1 else 1)
    for section in (section for section in GOALS if section in options.only):
        for path in paths_of(section):
            started, totals = time.monotonic(), dict[str, Counter[str]]()
            if section == "logprobs" and WHERE == "GPU":
                compile_in_parallel(launch_logprobs)  # for all processes
            first = {"first": options.first} if section in ("legal", "logprobs") else {}
            goal = GOALS[section] * options.scale
            parts = ((section, path, Part(number, num_parts), goal, options.first) for number in range(num_parts))
            for counted in in_processes(count_by_path, parts, options.processes):
                for name, counts in counted.items():
                    add(totals.setdefault(name, Counter()), counts)
                    about = {"section": section, "path": name} | first
                    yield about | totals[name] | {"seconds": round(time.monotonic() - started, 1)}


def wrong_exact(rows: list[Result], options: Any) -> list[Result]:
    faults = ("illegal", "different", "bad_logprobs", "wrong_ids", "wrong_values")
    return [row for row in rows if any(row.get(one) for one in faults) or not row["planted_noticed"]]


# --- determinism ------------------------------------------------------------------------------------------------------

TABLE_KINDS = ("plain", "edit+truncate")
TABLES = Path(schema.__file__).parent
REPLAYS = 10_000  # of each graph, at a scale of 1
GRAPH_ROWS, GRAPH_POSITIONS = 64, 16
MOST_ASKED = 64  # rows that differ, of which the reference says whether they are near-ties; more are none
COMPILED_ROWS = (1, 2, 16, 17, 33, 65, 129, 257, 512)
RANKS = (1, 2, 4, 8)
PLAIN_TEMPERATURES = (-6.0, 1.0)  # powers of ten


@dataclasses.dataclass(frozen=True)
class Size:
    """rows: of the largest batch. alone: every how many rows one is drawn alone; sizes: of other batches."""

    vocab: int
    hidden: int
    rows: int
    alone: int
    sizes: tuple[int, ...]
    orders: int


if HOST:
    SIZE = Size(5003, 64, 512, 1, tuple(range(1, 513)), 20)
elif DEVICE.type == "cpu":
    SIZE = Size(777, 32, 8, 4, (2, 3, 7), 2)
else:
    SIZE = Size(128_259, 256, 512, 1, tuple(range(1, 513)), 20)
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


def make_cases() -> dict[str, Case]:
    """The largest batch of each kind, which share a head."""
    cases = {}
    for kind in KINDS:
        case = make_case(SIZE.rows, SIZE.vocab, DEVICE, kind, DTYPE, hidden=SIZE.hidden)
        if kind != "greedy":
            low, high = PLAIN_TEMPERATURES
            share = torch.rand(SIZE.rows, generator=torch.Generator().manual_seed(0))
            case = case.with_params(temperature=(10 ** (low + (high - low) * share)).to(DEVICE))
        head = next(iter(cases.values())).head if cases else case.head
        cases[kind] = dataclasses.replace(case, head=head)
    return cases


def some(case: Case, rows: slice) -> Case:
    return case.rows(torch.arange(len(case.hidden), device=DEVICE)[rows])


def moved(case: Case) -> Case:
    return case.with_params(position=case.params.position + 1)


DrawCase = Callable[[Case], torch.Tensor]


def from_logits(case: Case) -> torch.Tensor:
    return sample_from_logits(case.raw, case.params).token_ids


def ready(lm_head: LMHead, max_rows: int = 0) -> Head:
    """With a screen, where the device has kernels."""
    return Head(lm_head, max_rows=max_rows, screen=None if HOST else Screen(lm_head, SIZE.rows))


class Paths:
    """Draws of cases of one head, with scratch that is kept, as a server keeps it."""

    def __init__(self, lm_head: LMHead) -> None:
        self.kept = ready(lm_head, SIZE.rows)
        self.allocating = Head(
            lm_head
        )  # the kept scratch holds what batches need that take the logits path by themselves

    def on(self, path: str) -> DrawCase:
        """The draw on a path, with the configuration that the path takes by itself."""
        if path in ("cpu", "reader"):
            return from_logits
        head = self.allocating if path == SamplingPath.LOGITS else self.kept
        return lambda case: head.draw(case.hidden, case.params, path=path).token_ids

    def with_config(self, config: Config) -> DrawCase:
        return lambda case: launch(config, case.hidden, case.params, self.kept.parts).token_ids


def names_of_paths() -> tuple[str, ...]:
    return ("cpu",) if HOST else ("fused", "screened", "logits", "reader")


class Count:
    """One comparison. noticed: rows at other positions whose tokens differ; None where none were drawn."""

    def __init__(self, section: str, path: str, kind: str, what: str) -> None:
        self.about = {"section": section, "on": WHERE, "path": path, "kind": kind, "what": what}
        self.tokens = self.different = self.near_ties = 0
        self.noticed: int | None = None

    def add(self, tokens: torch.Tensor, want: torch.Tensor, case: Case) -> None:
        """tokens: drawn for ``case``; want: the tokens to compare with."""
        self.tokens += len(want)
        rows = (tokens != want).nonzero()[:, 0]
        if len(rows):
            near_ties = int(expected(case.rows(rows[:MOST_ASKED])).near_tie.sum())
            self.near_ties += near_ties
            self.different += len(rows) - near_ties

    @property
    def row(self) -> Result:
        counts = {"tokens": self.tokens, "different": self.different, "near_ties": self.near_ties}
        return self.about | counts | ({} if self.noticed is None else {"planted_noticed": self.noticed})


def count_rows(paths: Paths, cases: dict[str, Case]) -> Iterator[Result]:
    for kind, case in cases.items():
        want = from_logits(case)
        for path in names_of_paths():
            draw = paths.on(path)
            count = Count("rows", path, kind, "the whole batch")
            count.add(draw(case), want, case)
            if kind == "plain":
                count.noticed = int((draw(moved(case)) != want).sum())
            yield count.row
            orders = [torch.randperm(SIZE.rows, generator=torch.Generator().manual_seed(i)) for i in range(SIZE.orders)]
            every = torch.arange(SIZE.rows)
            for what, batches in (
                ("alone", every[:: SIZE.alone].split(1)),
                ("in batches of other sizes", [every[SIZE.rows - size :] for size in SIZE.sizes]),
                (f"in {SIZE.orders} orders", orders),
            ):
                count = Count("rows", path, kind, what)
                for index in batches:
                    batch = case.rows(index.to(DEVICE))
                    count.add(draw(batch), want[index.to(DEVICE)], batch)
                yield count.row


def shipped_configs() -> list[Config]:
    """The configurations of all tables, each once."""
    tables = [Table.loads(file.read_text()) for file in TABLES.glob("*.json")]
    return sorted({entry.configuration for table in tables for entry in table.entries}, key=repr)


def fits(config: Config, kind: str) -> bool:
    """True if the device can run it; the interpreter has shared memory of any size."""
    batch = BatchKind("truncate" in kind, "edit" in kind, screen=path_of(config) is SamplingPath.SCREENED)
    device = device_of(DEVICE) if WHERE == "GPU" else Device(name="cpu", cc="9.0", sms=0, l2_mb=0, smem_optin=0)
    return unsupported_config(config, device, "fp32" if DTYPE is torch.float32 else "bf16", batch) is None


def count_tables(paths: Paths, cases: dict[str, Case]) -> Iterator[Result]:
    for kind in TABLE_KINDS:
        case, counts = cases[kind], dict[str, tuple[Count, set[Config]]]()
        want = from_logits(case)
        for config in shipped_configs():
            if fits(config, kind):
                path = path_of(config).value
                count, used = counts.setdefault(path, (Count("tables", path, kind, ""), set()))
                used.add(config)
                draw = paths.with_config(config)
                count.add(draw(case), want, case)
                if count.noticed is None:
                    count.noticed = int((draw(moved(case)) != want).sum())
        for count, used in counts.values():
            yield count.row | {"what": f"{len(used)} configurations"}


class Shard(NamedTuple):
    """A rank's part of the vocabulary, from ``start`` on; None: a rank without ids."""

    start: int
    head: Head | None


def make_shards(lm_head: LMHead, ranks: int) -> list[Shard]:
    width = -(-SIZE.vocab // ranks // 16) * 16
    weight = torch.nn.functional.pad(lm_head.weight, (0, 0, 0, width * ranks - SIZE.vocab))
    parts = [LMHead.of_rank(part, rank, ranks, SIZE.vocab) for rank, part in enumerate(weight.split(width))]
    heads = [None if one is None else ready(one) for one in parts]
    return [Shard(rank * width, head) for rank, head in enumerate(heads)]


def draw_by_ranks(path: str, shards: Sequence[Shard], case: Case) -> torch.Tensor:
    """The token of each row, from the merged draws of the ranks."""
    draws: list[SampleOutput] = []
    for shard, end in zip(shards, [*(one.start for one in shards[1:]), None], strict=True):
        if shard.head is None:
            draws.append(no_record(len(case.hidden), DEVICE, False))
        elif path in ("cpu", "reader"):
            part = case.raw[:, shard.start : end]
            draws.append(sample_from_logits(part, case.params, vocab_start=shard.start, shards=len(shards)))
        else:
            draws.append(shard.head.draw(case.hidden, case.params, path=path))
    if HOST:  # the kernel that merges cannot run: the reference does
        empty = torch.zeros(len(case.hidden))
        records = [torch.stack([one.scores, one.token_ids.float(), *3 * [empty]], -1) for one in draws]
        return merge_records_ref(torch.stack(records))[0]
    return merge_records(torch.cat([pack_record(one) for one in draws]), return_logprob=False).token_ids


def count_shards(cases: dict[str, Case]) -> Iterator[Result]:
    """Without truncated rows: one of several ranks draws those, from whole rows of logits."""
    for ranks in RANKS:
        shards = make_shards(cases["plain"].head, ranks)
        for kind in ("greedy", "plain", "edit"):
            case, want = cases[kind], from_logits(cases[kind])
            for path in names_of_paths():
                count = Count("shards", path, kind, f"{ranks} ranks")
                count.add(draw_by_ranks(path, shards, case), want, case)
                if kind == "plain" and ranks > 1:
                    count.noticed = int((draw_by_ranks(path, shards, moved(case)) != want).sum())
                yield count.row


def count_graphs(paths: Paths, cases: dict[str, Case], replays: int) -> Iterator[Result]:
    """All tokens of a row come from the same kernels and the same memory: there are no near-ties."""
    for kind, whole in cases.items():
        case = some(whole, slice(0, GRAPH_ROWS))
        for path in names_of_paths():
            draw = paths.on(path)
            want, count = draw(case).clone(), Count("graphs", path, kind, f"{replays:,} replays")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = draw(case)
            wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
            for _ in range(replays):
                graph.replay()
                wrong += (captured != want).sum()
            count.tokens, count.different = replays * len(want), int(wrong)
            for _ in range(GRAPH_POSITIONS):
                case.params.position.add_(1)
                graph.replay()
                tokens = captured.clone()
                count.tokens += len(want)
                count.different += int((tokens != draw(case)).sum())
                if kind == "plain":
                    count.noticed = int((tokens != want).sum())
            yield count.row


def compile_in_parallel(launches: Callable[[], None]) -> None:
    """Compile the kernels of these launches, and run none of them. One that fails to compile fails again at its
    launch."""
    import triton  # not before the interpreter is turned on

    with (
        contextlib.suppress(AttributeError),  # a Triton without it compiles each kernel at its first launch
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
        compiling_only(),
    ):
        launches()


def launch_all(paths: Paths, cases: dict[str, Case], with_tables: bool) -> None:
    """Launch the kernels of the sections."""
    for kind, case in cases.items():
        for path in names_of_paths():
            for rows in COMPILED_ROWS:
                paths.on(path)(some(case, slice(0, rows)))
        for config in shipped_configs() if with_tables and kind in TABLE_KINDS else ():
            if fits(config, kind):
                paths.with_config(config)(case)


def determinism(options: Any) -> Iterator[Result]:
    cases = make_cases()
    paths = Paths(cases["plain"].head)
    if WHERE == "GPU":
        compile_in_parallel(lambda: launch_all(paths, cases, "tables" in options.only))
    counts: dict[str, Callable[[], Iterator[Result]]] = {"rows": lambda: count_rows(paths, cases)}
    if not HOST:
        counts["tables"] = lambda: count_tables(paths, cases)
    counts["shards"] = lambda: count_shards(cases)
    if WHERE == "GPU":
        counts["graphs"] = lambda: count_graphs(paths, cases, max(1, round(REPLAYS * options.scale)))
    for section in (section for section in counts if section in options.only):
        yield from tqdm(counts[section](), desc=f"{section}, {WHERE}", unit="comparison")
    if HOST:
        yield from run_interpreted(options.only)


def run_interpreted(only: Iterable[str]) -> list[Result]:
    """The rows of another process: the interpreter is turned on before Triton is imported."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "interpreted.json"
        command = [sys.executable, __file__, "determinism", "--dry-run", "--out", str(out), "--only", *only]
        done = subprocess.run(command, check=False)
        if done.returncode not in (0, 1):  # 1: a token differs
            raise RuntimeError(f"the interpreted part ended with code {done.returncode}")
        return read_result(out, "draws.py")["rows"]


def wrong_determinism(rows: list[Result], options: Any) -> list[Result]:
    return [row for row in rows if row["different"] or row.get("planted_noticed") == 0]


# --- soak -------------------------------------------------------------------------------------------------------------

ALPHA, TVD, PLANTED_TVD = 1e-6, 1e-3, 0.03
MINUTES = 60.0  # at a scale of 1, of all paths together
SOAK_ROWS, SOAK_BATCHES = 32, 4  # rows of a batch, and batches of each process
SOAK_AT_ONCE = 1 if DRY_RUN else MAX_COMPILED_ROWS // SOAK_ROWS  # positions of a call
CALLS = 2 if DRY_RUN else 100  # between two looks
SIMULATIONS = 100


def distribution(row: Row) -> np.ndarray | None:
    """``[V]`` float64. None where rounding decides which ids a limit leaves, or where one id is left."""
    p = probabilities(row)
    may, must = may_and_must(row, p, flashinfer=True)
    return np.where(must, p, 0.0) / p[must].sum() if (may == must).all() and must.sum() > 1 else None


def at_distance(probability: np.ndarray, tvd: float) -> np.ndarray:
    """Another distribution of the same ids. The most likely one is less likely by ``tvd``, if it can be; all others are
    more likely by the same share."""
    most = probability.argmax()
    tvd = min(tvd, probability[most] / 2)
    other = probability * (1 + tvd / (1 - probability[most]))
    other[most] = probability[most] - tvd
    return other


class Soak:
    """Draws of one batch of rows. probability: of each row, None where it is not certain. counts: ``[B, V + 1]`` int64,
    the last column of tokens that are no id."""

    def __init__(self, path: str, index: int) -> None:
        self.index, self.position = index, 0
        rows = random_rows(MIXES["legal"], index, SOAK_ROWS, DEVICE)
        self.draw = PATHS[path]._replace(at_once=SOAK_AT_ONCE).drawn(rows)
        self.probability = [distribution(row) for row in oracle_rows(rows)]
        self.counts = np.zeros((SOAK_ROWS, rows.logits.shape[1] + 1), dtype=np.int64)
        self.most_evidence = -math.inf

    def go_on(self) -> None:
        """``CALLS`` calls, and a look at the evidence."""
        width = self.counts.shape[1]
        first = torch.arange(0, self.counts.size, width, device=DEVICE).repeat_interleave(SOAK_AT_ONCE)
        counts = torch.zeros(self.counts.size, dtype=torch.int64, device=DEVICE)
        for _ in range(CALLS):
            tokens = self.draw(range(self.position, self.position + SOAK_AT_ONCE)).token_ids
            tokens = torch.where((tokens >= 0) & (tokens < width), tokens, width - 1)
            counts += torch.bincount(first + tokens, minlength=len(counts))
            self.position += SOAK_AT_ONCE
        self.counts += counts.view(SOAK_ROWS, width).cpu().numpy()
        self.most_evidence = max(self.most_evidence, self.evidence())

    def known_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Counts and distribution of each row that has one."""
        for counts, probability in zip(self.counts, self.probability, strict=True):
            if probability is not None:
                yield counts, np.append(probability, 0.0)

    def evidence(self) -> float:
        """Log of the mean over the rows."""
        logs = [log_e_value(counts, probability) for counts, probability in self.known_rows()]
        return float(logsumexp(logs) - math.log(len(logs))) if logs else 0.0

    def summary(self) -> Result:
        random, limit = np.random.default_rng(0), -math.log(ALPHA)
        noticed = powerful = rows = 0
        for counts, probability in self.known_rows():
            rows += 1
            noticed += log_e_value(counts, at_distance(probability, PLANTED_TVD)) > limit
            simulated = random.multinomial(counts.sum(), at_distance(probability, TVD), size=SIMULATIONS)
            powerful += sum(log_e_value(one, probability) > limit for one in simulated) >= 0.99 * SIMULATIONS
        found = {"batch": self.index, "ids": self.counts.shape[1] - 1, "rows": rows, "draws_per_row": self.position}
        found |= {"log_evidence": round(self.evidence(), 2), "most_log_evidence": round(self.most_evidence, 2)}
        return found | {"noticed": int(noticed), "powerful": int(powerful)}


def soak_batch(path: str, index: int, seconds: float) -> Result:
    """The row of one batch that is drawn until the time is over."""
    started, draws = time.monotonic(), Soak(path, index)
    while draws.position == 0 or time.monotonic() < started + seconds:
        draws.go_on()
    return {"path": path} | draws.summary()


def soak(options: Any) -> Iterator[Result]:
    """A batch without a row whose distribution is certain is left out."""
    paths = [path for path in PATHS if (path == "cpu") == HOST]
    seconds = 0.0 if DRY_RUN else options.scale * MINUTES * 60 / len(paths) / SOAK_BATCHES
    batches = range(1 if DRY_RUN else SOAK_BATCHES * options.processes)
    for path in paths:
        rows = in_processes(soak_batch, ((path, index, seconds) for index in batches), options.processes)
        yield from (row for row in rows if row["rows"])


def wrong_soak(rows: list[Result], options: Any) -> list[Result]:
    """The row with the most evidence of a path where it has reached its limit, or where nothing planted is noticed."""
    wrong = []
    for path in dict.fromkeys(row["path"] for row in rows):
        of_path = [row for row in rows if row["path"] == path]
        most = max(of_path, key=lambda row: row["most_log_evidence"])
        unnoticed = not DRY_RUN and not any(row["noticed"] for row in of_path)
        wrong += [most] if most["most_log_evidence"] >= math.log(len(of_path) / ALPHA) or unnoticed else []
    return wrong


# --- verified ---------------------------------------------------------------------------------------------------------

VOCAB, NODES = 64, 8
BATCH = 16 if DRY_RUN else 32_768
TREE = [-1, 0, 0, 0, 1, 1, 2, 4]  # the parent of each node
VERIFIED_POSITIONS = 1e7  # of each case, at a scale of 1: enough to notice the planted law
LEAST_P, MOST_DEVIATIONS = 1e-5, 5.0
TOP_K, TOP_P = 20, 0.9


class Drafts(NamedTuple):
    """A case of drafts: random ones of another distribution, those of a draft model with the noise of the target's
    tokens (coupled), or those of the target itself."""

    shape: str
    drafts: str
    temperature: float
    truncated: bool


def verified_cases() -> Iterator[Drafts]:
    temperatures = (1.0,) if DRY_RUN else (0.7, 1.0, 1.3)
    for shape in ("chain", "tree", "tree per row"):
        for temperature in temperatures:
            yield Drafts(shape, "random", temperature, False)
        if not DRY_RUN or shape == "tree":  # a truncation takes minutes in the interpreter
            yield Drafts(shape, "random", 1.0, True)
    for drafts in ("coupled", "the target's"):
        for temperature in temperatures:
            yield Drafts("chain", drafts, temperature, False)


class Language:
    """A head whose logits after a token are a row of ``logits`` (``[64, 64]`` float32): its hidden state is one-hot."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits.to(DEVICE)
        self.head = LMHead(self.logits.T.contiguous())

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, VOCAB).float()

    def distribution(self, temperature: float, truncated: bool = False) -> torch.Tensor:
        """``[64, 64]`` float64, on the CPU."""
        logits = self.logits.double().cpu()
        if truncated:
            columns = limits(VOCAB, torch.device("cpu"), TOP_K, TOP_P)
            temperatures = torch.full((VOCAB,), temperature)
            logits = torch.where(
                allowed_ref(logits, temperatures, columns.top_k, columns.top_p, columns.min_p), logits, -math.inf
            )
        return torch.softmax(logits / temperature, -1)


def make_languages() -> tuple[Language, Language]:
    """The target, and a draft model that errs."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    return Language(logits), Language(logits + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator))


def make_parents(shape: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, NODES]`` int64, on the CPU: the parent of each node, which comes before it."""
    if shape == "chain":
        return torch.arange(-1, NODES - 1).expand(rows, NODES)
    if shape == "tree":
        return torch.tensor(TREE).expand(rows, NODES)
    share = torch.rand(rows, NODES, generator=generator)
    return (share * torch.arange(NODES)).long().where(torch.arange(NODES) > 0, torch.tensor(-1))


def tree_of(parents: torch.Tensor) -> DraftTree:
    """One tree where all rows have the same, else one per row."""
    distinct, which = parents.unique(dim=0, return_inverse=True)
    if len(distinct) == 1:
        return DraftTree.from_parents(distinct[0].tolist(), DEVICE)
    trees = [DraftTree.from_parents(row, "cpu") for row in distinct.tolist()]
    return DraftTree(*(torch.stack(column)[which].to(DEVICE) for column in zip(*trees, strict=True)))


class DraftedRows:
    """Rows of one case, as often as they are asked for, with seeds and drafts of their own."""

    def __init__(self, case: Drafts, target: Language, drafter: Language, rows: int) -> None:
        self.case, self.rows, self.drafter = case, rows, target if case.drafts == "the target's" else drafter
        self.generator = torch.Generator(DEVICE).manual_seed(8)
        parents = make_parents(case.shape, rows, torch.Generator().manual_seed(7))
        self.tree, self._parents = tree_of(parents), parents.to(DEVICE)
        self._q = self.drafter.distribution(case.temperature).float().to(DEVICE)
        self._next_seed = 0

    def params(self, seed: torch.Tensor, position: torch.Tensor) -> BatchParams:
        truncation: Truncation | None = limits(len(seed), DEVICE, TOP_K, TOP_P) if self.case.truncated else None
        return BatchParams(torch.full((len(seed),), self.case.temperature, device=DEVICE), seed, position, truncation)

    def new(self) -> tuple[torch.Tensor, BatchParams]:
        """Tokens of the nodes, ``[rows, NODES]`` int64, and the parameters of the rows."""
        seed = torch.arange(self._next_seed, self._next_seed + self.rows, device=DEVICE)
        self._next_seed += self.rows
        params = self.params(seed, torch.full_like(seed, 100))
        tokens = torch.randint(VOCAB, (self.rows, NODES), generator=self.generator, device=DEVICE)
        for node in range(1, NODES):
            before = tokens.gather(1, self._parents[:, node : node + 1])[:, 0]
            if self.case.drafts == "random":
                drawn = torch.multinomial(self._q[before], 1, generator=self.generator)[:, 0]
            else:
                at = self.params(seed, params.position + node - 1)  # of a chain
                drawn = sample(self.drafter.hidden(before), self.drafter.head, at).token_ids
            tokens[:, node] = drawn
        return tokens, params

    def acceptance(self, tokens: torch.Tensor, p: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """``[rows]`` float64: how likely each row accepts a draft at its root. both: by token, of coupled drafts."""
        if self.case.drafts != "random":
            return both[tokens[:, 0]]
        of_root = torch.zeros(self.rows, VOCAB, dtype=torch.bool, device=DEVICE)
        row = torch.arange(self.rows, device=DEVICE)
        for node in range(1, NODES):
            of_root[row, tokens[:, node]] |= self._parents[:, node] == 0
        return (p[tokens[:, 0]] * of_root).sum(1)


def count_verified(case: Drafts, positions: float, shows_progress: bool) -> Result:
    """One row of the result."""
    target, drafter = make_languages()
    batches = DraftedRows(case, target, drafter, BATCH)
    p = target.distribution(case.temperature, case.truncated)
    q = batches.drafter.distribution(case.temperature)
    both = torch.tensor([coupled_acceptance(one, other) for one, other in zip(p, q, strict=True)], dtype=p.dtype)
    p_on_device, both = p.to(DEVICE), both.to(DEVICE)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64, device=DEVICE)
    earlier = total = 0
    # On the device, so that a batch does not wait for the counts of the one before
    accepted, different = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    wanted, variance = (torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(2))
    bar = tqdm(total=positions, desc=", ".join(map(str, case)), unit_scale=True, disable=not shows_progress)
    while total < positions:
        tokens, params = batches.new()
        drawn = verify(target.hidden(tokens), target.head, tokens, params, batches.tree)
        rows, places = (drawn.nodes >= 0).nonzero(as_tuple=True)
        nodes = drawn.nodes[rows, places].long() % NODES
        before, gained = tokens[rows, nodes], drawn.token_ids[rows, places]
        counts.view(-1).index_add_(0, before * VOCAB + gained, torch.ones_like(gained))
        # Each token is drawn again, alone with its context, in a shuffled batch.
        shuffled = torch.randperm(len(rows), generator=batches.generator, device=DEVICE)
        alone = batches.params(params.seed[rows][shuffled], (params.position[rows] + places)[shuffled])
        hidden = target.hidden(before[shuffled])
        different += (sample(hidden, target.head, alone).token_ids != gained[shuffled]).sum()
        if not total:
            at = batches.params(alone.seed, alone.position - 1)
            earlier = int((sample(hidden, target.head, at).token_ids != gained[shuffled]).sum())
        chance = batches.acceptance(tokens, p_on_device, both)
        accepted += (drawn.num_tokens > 1).sum()
        wanted += chance.sum()
        variance += (chance * (1 - chance)).sum()
        total += len(rows)
        bar.update(len(rows))
    bar.close()
    observed = counts.cpu().numpy()
    row = case._asdict() | {
        "positions": total,
        "p_value": p_value(observed, p.numpy()),
        **distance(observed, p.numpy()),
    }
    if variance > 1e-6:
        row["accepted_z"] = round(float((accepted - wanted) / variance**0.5), 2)
    else:
        row |= {"accepted_z": None, "rejected": round(float(wanted)) - int(accepted)}
    hotter = target.distribution(1.01 * case.temperature, case.truncated).numpy()
    noticed = {"noticed_law": p_value(observed, hotter) < LEAST_P, "noticed_tokens": earlier}
    return row | {"different": int(different)} | noticed


def p_value(observed: np.ndarray, p: np.ndarray) -> float:
    """One p-value of the G-tests of all tokens, whose statistics are added."""
    tests = [g_test(counts, truth) for counts, truth in zip(observed, p, strict=True) if counts.sum()]
    return float(chi2.sf(sum(test.statistic for test in tests), sum(test.dof for test in tests)))


def distance(observed: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """The total variation between transitions, and its mean where chance alone makes it."""
    total, each = observed.sum(), observed.sum(1, keepdims=True)
    chance = np.sqrt(2 / np.pi * each * p * (1 - p))
    return {
        "tv": round(float(np.abs(observed - each * p).sum() / total / 2), 6),
        "tv_chance": round(float(chance.sum() / total / 2), 6),
    }


def verified(options: Any) -> Iterator[Result]:
    positions = 40 if DRY_RUN else VERIFIED_POSITIONS * options.scale
    counted = ((case, positions, options.processes == 1) for case in verified_cases())
    return in_processes(count_verified, counted, options.processes)


def is_wrong_verified(row: Result, planted: bool) -> bool:
    """planted: whether there are enough tokens to notice the planted law."""
    off = row["rejected"] != 0 if row["accepted_z"] is None else abs(row["accepted_z"]) > MOST_DEVIATIONS
    unnoticed = not row["noticed_tokens"] or (planted and not row["noticed_law"])
    return row["p_value"] < LEAST_P or off or row["different"] > 0 or unnoticed


def wrong_verified(rows: list[Result], options: Any) -> list[Result]:
    return [row for row in rows if is_wrong_verified(row, planted=options.scale >= 1 and not DRY_RUN)]


# --- the program ------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A kind of counts: its rows one after the other, the wrong ones of them, and the sections to choose from."""

    rows: Callable[[Any], Iterable[Result]]
    wrong: Callable[[list[Result], Any], list[Result]]
    sections: tuple[str, ...] = ()


PROGRAMS = {
    "exact": Program(exact, wrong_exact, tuple(GOALS)),
    "determinism": Program(determinism, wrong_determinism, ("rows", "tables", "shards", "graphs")),
    "soak": Program(soak, wrong_soak),
    "verified": Program(verified, wrong_verified),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the counts, replays or minutes above")
    parser.add_argument("--only", nargs="+", help="these sections")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of what is not counted now")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch of legal and logprobs")
    parser.add_argument("--processes", type=int, default=1, help="they share all GPUs; not for determinism")
    parser.add_argument("--dry-run", action="store_true", help="few and short rows, interpreted")
    options = parser.parse_args()
    program = PROGRAMS[options.program]
    options.only = options.only or program.sections
    if unknown := set(options.only) - set(program.sections):
        parser.error(
            f"--only {' '.join(sorted(unknown))}: {options.program} has {', '.join(program.sections) or 'none'}"
        )
    if not options.scale > 0:
        parser.error(f"--scale is {options.scale:g}; expected more than 0")
    if DEVICE.type == "cpu" and not HOST and not DRY_RUN:
        parser.error("without a GPU this draws in host memory: the extra `cpu`, and TRITON_INTERPRET unset")
    if DRY_RUN:
        options.scale = 0.0  # one batch of each
    try:
        kept = read_result(options.out, "draws.py") if options.keep and options.out.exists() else {}
    except ValueError as error:
        sys.exit(f"error: {error}")
    env = new_env()
    run = {name: env[name] for name in ("device", "torch", "triton", "date", "command")}
    result: dict[str, Any] = {"env": env, "runs": [*kept.get("runs", []), run]}
    rows = {tuple(row.get(name) for name in ABOUT): row for row in kept.get("rows", []) if is_kept(row, options.only)}
    for row in program.rows(options):
        rows[tuple(row.get(name) for name in ABOUT)] = row
        write_result(options.out, result | {"rows": list(rows.values())})
        print(row, flush=True)
    wrong = program.wrong(list(rows.values()), options)
    for row in wrong:
        print("wrong:", row)
    return int(bool(wrong))


def is_kept(row: Result, only: Iterable[str]) -> bool:
    """True for an earlier row that stays: a row of another section, or of another device."""
    now = {WHERE, "interpreted"} if HOST else {WHERE}
    return row.get("section") not in only or row.get("on", WHERE) not in now


if __name__ == "__main__":
    sys.exit(main())
