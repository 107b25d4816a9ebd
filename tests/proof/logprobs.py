"""Logprobs of random rows, compared with float64: the section ``logprobs`` of ``draws.py exact``.

A batch asks for the ``k`` likeliest ids, 1 to 128 and another number in each row, for up to 256 given ids, and for that
of its token. Rows have temperatures from 0.01 to 30, and any other feature on or off at random. Vocabularies have 1 to
32,768 ids, and now and then 151,936. Logits are the products of a head and rows of an identity matrix, so they are
exact, and float64 has the edited ones as kernels have them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from kernel_cases import Mix, Rows, random_rows

from sgl_flashsample import BatchParams, Head, LMHead, Logprobs, WantedLogprobs
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.kernels.gather_logprobs import head_logprobs
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows
from sgl_flashsample.kernels.params import LogitsSpec
from sgl_flashsample.kernels.reference import log_softmax_ref, top_logprobs_ref
from sgl_flashsample.kernels.top_logprobs import WIDTHS
from sgl_flashsample.logprobs import merge_parts, read_logprobs

MOST_ERROR = 2e-5  # of a logprob down to -50, and as large a share of one below
NEAR = 4e-7  # a share of two logits: those of a near-tie are less far apart
# Triton's interpreter rounds the product of an fma, which costs the digits of logits that are large in temperatures.
POWERS = (-0.5, 1.5) if os.environ.get("TRITON_INTERPRET") == "1" else (-2.0, 1.5)
MIX = Mix(shapes=("normal", "rounded", "peaked", "flat", "ties", "zipf"), masked=0.3, edited=0.3, powers=POWERS)
LIST_IDS = 256  # given ids of a row, the most
RANKS = {torch.float32: 2, torch.bfloat16: 4, torch.float16: 8}  # by dtype: no further kernels to compile
PLANTED_ERROR = 1e-4


class Vocabulary(NamedTuple):
    """Sizes whose kernels are the same, and the rows of a batch. weight: how often they are chosen."""

    least_ids: int
    most_ids: int
    rows: int
    weight: float


VOCABULARIES = (
    Vocabulary(1, 128, 256, 1.0),
    Vocabulary(1025, 2048, 256, 1.0),
    Vocabulary(4097, 8192, 256, 1.0),
    Vocabulary(16_385, 32_768, 256, 1.0),
    Vocabulary(151_936, 151_936, 32, 1.0),
)
FEW = (Vocabulary(50, 100, 8, 1.0),)  # of the interpreter
MEAN_ROWS = 196  # of a batch, at least, on average
HIDDEN = 256


class Shape(NamedTuple):
    """The kernels of a batch depend on this alone, but for edits of every kind that all batches have."""

    vocabulary: Vocabulary
    dtype: torch.dtype
    original: bool

    @property
    def width(self) -> int:
        """The likeliest ids that kernels are compiled for. Every two of vocabulary, dtype and width occur together."""
        places = VOCABULARIES.index(self.vocabulary) if self.vocabulary in VOCABULARIES else 0
        return WIDTHS[(places + MIX.dtypes.index(self.dtype)) % len(WIDTHS)]


def shape_of(index: int, vocabularies: tuple[Vocabulary, ...]) -> Shape:
    chance = random.Random(f"shape {index}")
    (vocabulary,) = chance.choices(vocabularies, [one.weight for one in vocabularies])
    return Shape(vocabulary, MIX.dtypes[index % len(MIX.dtypes)], chance.random() < 0.3)


def shapes_once(vocabularies: tuple[Vocabulary, ...]) -> list[int]:
    """Numbers of batches that have every shape, each once."""
    found: dict[Shape, int] = {}
    for index in range(1000):
        found.setdefault(shape_of(index, vocabularies), index)
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Asked:
    """A batch of rows, and the logprobs that it asks for. hidden: ``[B, D]``, rows of an identity matrix. prompt:
    ``[B]`` int64, tokens whose logprobs are asked for without a draw."""

    rows: Rows
    head: Head
    hidden: torch.Tensor
    wanted: WantedLogprobs
    prompt: torch.Tensor

    @property
    def params(self) -> BatchParams:
        return self.rows.params

    @property
    def temperature(self) -> torch.Tensor | None:
        return None if self.wanted.original else self.params.temperature


def make_batch(index: int, device: torch.device, vocabularies: tuple[Vocabulary, ...]) -> Asked:
    """The batch with this number."""
    chance, shape = random.Random(f"batch {index}"), shape_of(index, vocabularies)
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(index), "device": device}
    sizes, most = shape.vocabulary, max(one.rows for one in vocabularies)
    num_rows = sizes.rows - chance.randrange(max(1, sizes.rows // 8))
    mix = dataclasses.replace(MIX, least_ids=sizes.least_ids, most_ids=sizes.most_ids)
    rows = random_rows(mix, index, num_rows, device)
    assert rows.logits.dtype is shape.dtype
    vocab = rows.logits.shape[1]
    lowest = max((0, *(width for width in WIDTHS if width < shape.width)))
    k = chance.randint(lowest + 1, shape.width)
    counts = torch.randint(-1, k + 1, (num_rows,), **on).int() if chance.random() < 0.7 else None
    lists = (num_rows if chance.random() < 0.7 else 1, chance.randint(1, LIST_IDS))
    ids = torch.randint(-1, vocab + 1, lists, **on)  # -1 and V: ids that the head does not have
    size = HIDDEN if most >= HIDDEN else max(16, most)
    weight = torch.nn.functional.pad(rows.logits.T, (0, size - num_rows)).contiguous()
    hidden = torch.eye(num_rows, size, dtype=rows.logits.dtype, device=device)
    prompt = torch.randint(vocab, (num_rows,), **on)
    head = Head(LMHead(weight))
    if chance.random() < 0.5:
        head.reserve_logprobs(num_rows)
    return Asked(rows, head, hidden, WantedLogprobs(k, counts, ids, shape.original), prompt)


# --- ways to logprobs -------------------------------------------------------------------------------------------------


def by_ranks(asked: Asked, tokens: torch.Tensor) -> Logprobs:
    """The logprobs of shards of the vocabulary, merged as servers merge those of prompts on ranks."""
    logits, wanted, parts = asked.rows.logits, asked.wanted, []
    (num_rows, vocab), num_ranks = logits.shape, RANKS[logits.dtype]
    width = -(-vocab // num_ranks // 16) * 16
    for start in range(0, num_ranks * width, width):
        size = min(width, vocab - start)
        if size > 0:
            part = torch.nn.functional.pad(logits[:, start : start + size], (0, width - size)).contiguous()
            spec = LogitsSpec(size, start, shards=num_ranks, total_ids=vocab)
            rows = LogitRows(part, spec, asked.params, original=wanted.original)
            found = read_logprobs(rows, tokens, wanted)
        else:
            found = nothing(wanted, num_rows, logits.device)
        parts.append(found.pack(tokens=True))
    return merge_parts(torch.stack(parts), wanted)


def nothing(wanted: WantedLogprobs, num_rows: int, device: torch.device) -> Logprobs:
    """The logprobs of a shard without ids."""
    found = Logprobs.empty(wanted, num_rows, device)
    assert found.top is not None and found.of_ids is not None and found.log_mass is not None
    found.top.token_ids.fill_(-1), found.top.logits.fill_(-math.inf)
    for logprobs in (found.of_tokens, found.of_ids, found.top.logprobs):
        logprobs.fill_(LOWEST_LOGPROB)
    found.log_mass[:] = found.log_mass.new_tensor([-math.inf, 0.0])
    return found


class Way(NamedTuple):
    """The logprobs of one way, and the tokens that they are of. plain: at temperature 1, without edits."""

    path: str
    found: Logprobs
    tokens: torch.Tensor
    wanted: WantedLogprobs
    temperature: torch.Tensor | None
    plain: bool = False


def ways(asked: Asked) -> list[Way]:
    """Every way to the logprobs of a batch; in host memory, both."""
    hidden, wanted, host = asked.hidden, asked.wanted, draws_in_host_memory(asked.hidden.device)
    drawn, found = asked.head.draw_with_logprobs(hidden, asked.params, wanted)
    prompt = asked.head.logprobs_of(hidden, asked.prompt, wanted, chunk_rows=100)
    done = [Way("cpu" if host else "logits", found, drawn.token_ids, wanted, asked.temperature)]
    done.append(Way("cpu, prompts" if host else "prompts", prompt, asked.prompt, wanted, None, plain=True))
    if not host:
        out = asked.head.draw(hidden, asked.params, return_logprob=True, path="fused")
        assert out.logprobs is not None and out.log_mass is not None and wanted.token_ids is not None
        of_ids = head_logprobs(hidden, asked.head.lm_head, wanted.token_ids, out.log_mass, asked.params)
        given = WantedLogprobs(token_ids=wanted.token_ids)
        found = Logprobs(out.logprobs, None, of_ids)
        done.append(Way("fused", found, out.token_ids, given, asked.params.temperature))
        done.append(Way("ranks", by_ranks(asked, drawn.token_ids), drawn.token_ids, wanted, asked.temperature))
    return done


# --- the comparison ---------------------------------------------------------------------------------------------------


def error_of(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How far float32 logprobs are from float64 ones: as they are down to -50, below as a share of 1/50 of them; as NaN
    or infinity where one is above 0 or no number."""
    error = (got.double() - want).abs() / (want.abs() / 50).clamp(min=1.0)
    return torch.where(got > 0, torch.inf, error)


class Truth:
    """The ids and logprobs of ``[B, V]`` logits after their edits, in float64. k: the likeliest ids, the most."""

    def __init__(self, logits: torch.Tensor, k: int) -> None:
        self.logits = logits.double()
        self.k = min(k, logits.shape[1])
        self._logprobs: dict[bool, torch.Tensor] = {}

    @functools.cached_property
    def ids(self) -> torch.Tensor:
        """``[B, k]`` int64, whatever the temperature."""
        return top_logprobs_ref(self.logits, self.k)[0]

    def logprobs(self, temperature: torch.Tensor | None) -> torch.Tensor:
        """``[B, V]`` float64, at the temperature of the draw or at 1."""
        if (plain := temperature is None) not in self._logprobs:
            self._logprobs[plain] = log_softmax_ref(self.logits, temperature)
        return self._logprobs[plain]


def compare(way: Way, truth: Truth) -> Counter[str]:
    """Counts of the rows and of the logprobs of one way.

    near_ties: rows with other ids than float64 has where logits are near ones and not equal. wrong_ids: rows with other
    ids elsewhere, or with anything behind their count. wrong_values: logprobs off by more than ``MOST_ERROR``. unequal:
    rows whose token is among the likeliest ids with another logprob, be it by one bit; SGLang has one number for both.
    """
    found, wanted, logits = way.found, way.wanted, truth.logits
    (num_rows, vocab), logprobs = logits.shape, truth.logprobs(way.temperature)
    errors = [error_of(found.of_tokens, logprobs.gather(1, way.tokens[:, None])[:, 0])]
    near_tie = wrong_ids = unequal = torch.zeros(num_rows, dtype=torch.bool, device=logits.device)
    if wanted.token_ids is not None:
        assert found.of_ids is not None
        ids = wanted.token_ids.expand(num_rows, -1)
        inside = (ids >= 0) & (ids < vocab)
        want = torch.where(inside, logprobs.gather(1, torch.where(inside, ids, 0)), LOWEST_LOGPROB)
        errors.append(error_of(found.of_ids, want).flatten())
    if wanted.top:
        assert found.top is not None
        got, known = found.top.token_ids, truth.k
        places = torch.arange(wanted.top, device=logits.device)
        counts = torch.full((num_rows,), wanted.top, device=logits.device) if wanted.counts is None else wanted.counts
        asked = places < counts.clamp(max=known)[:, None]
        want_ids = torch.where(asked, torch.nn.functional.pad(truth.ids, (0, wanted.top - known)), -1)
        inside = asked & (got >= 0) & (got < vocab)
        mine, theirs = (logits.gather(1, torch.where(inside, one, 0)) for one in (got, want_ids))
        off = (mine - theirs).abs()
        near = inside & (off > 0) & (off <= NEAR * theirs.abs().clamp(min=1.0))
        other = got != want_ids
        twice = (torch.where(inside, got, -1 - places).sort(1).values.diff(dim=1) == 0).any(1)
        rest = ~asked & ((found.top.logprobs != LOWEST_LOGPROB) | (found.top.logits != -math.inf))
        wrong_ids = (other & ~near).any(1) | twice | rest.any(1)
        near_tie = other.any(1) & ~wrong_ids
        values = error_of(found.top.logprobs, logprobs.gather(1, torch.where(inside, got, 0)))
        errors.append(values[inside])
        is_token = inside & (got == way.tokens[:, None])
        unequal = (is_token & (found.top.logprobs != found.of_tokens[:, None])).any(1)
    error = torch.cat(errors)
    wrong = ~(error <= MOST_ERROR)
    sums = [one.sum() for one in (near_tie, wrong_ids, wrong, unequal)]
    near_ties, rows, values, unequals, largest = torch.stack([*sums, error.nan_to_num(nan=math.inf).max()]).tolist()
    counts_of: Counter[str] = Counter(rows=num_rows, values=len(error), near_ties=int(near_ties))
    counts_of.update(wrong_ids=int(rows), wrong_values=int(values), unequal=int(unequals))
    counts_of["max_error"] = largest  # type: ignore[assignment]
    return counts_of


def with_planted_errors(way: Way) -> Way:
    """The same with the ids of each row one place on, and every logprob ``PLANTED_ERROR`` lower."""
    top = way.found.top
    if top is not None:
        top = top._replace(token_ids=top.token_ids.roll(1, 1))
    return way._replace(found=way.found._replace(top=top, of_tokens=way.found.of_tokens - PLANTED_ERROR))


def planted_noticed(way: Way, truth: Truth) -> int:
    """How many planted errors are noticed: of ids or of values, the fewer."""
    noticed = compare(with_planted_errors(way), truth)
    return noticed["wrong_values"] if way.found.top is None else min(noticed["wrong_ids"], noticed["wrong_values"])


def add(totals: Counter[str], counted: Counter[str]) -> None:
    """Add counts; of errors, the larger one stays."""
    largest = max(totals["max_error"], counted["max_error"])
    totals.update(counted)
    if "max_error" in counted:
        totals["max_error"] = largest


def count_logprobs(
    indices: Iterable[int], device: torch.device, vocabularies: tuple[Vocabulary, ...] = VOCABULARIES
) -> dict[str, Counter[str]]:
    """{path: counts} of the batches with these numbers."""
    totals: dict[str, Counter[str]] = {}
    for index in indices:
        asked = make_batch(index, device, vocabularies)
        edited, plain = (Truth(logits, asked.wanted.top) for logits in (asked.rows.edited, asked.rows.logits))
        for way in ways(asked):
            counted, truth = totals.setdefault(way.path, Counter()), plain if way.plain else edited
            add(counted, compare(way, truth))
            if not counted["planted_noticed"]:
                counted["planted_noticed"] = planted_noticed(way, truth) if truth.k > 1 else 0
    return totals
