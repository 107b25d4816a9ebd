"""Workloads that the step is timed on: a head of the real shape, and batches whose logits look like a model's.

A logit is ``-slope * log(rank)`` of its id plus Gaussian noise. Three directions in the head hold the rank's share for
three profiles (peaked, typical, flat), and a row's hidden state has one of them: the rows of a batch differ, as
requests do. How long a truncated row takes depends on its profile; how many groups a screen leaves to rescore, on the
profile, the temperature and the lengths of hidden states and of the head's rows. So the directions are spread over all
channels, as a model's are: one large channel would take up the range of an INT8 copy, at the cost of all others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from ..kernels.config import cdiv
from ..kernels.params import BatchParams, Edit, LMHead, LogitEdits, Truncation
from ..kinds import BatchKind
from ..model_config import VOCAB_MULTIPLE
from ..screen_race import TEMPERATURES
from ..screen_race import TRUNCATIONS as SCREENED_TRUNCATIONS
from ..selfcheck import pack_bits
from ..tables.schema import HeadShape
from .baselines import OFFSETS_PER_CALL, BaselineBatch
from .timing import MAX_CALLS

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}
E4M3_MAX = 448.0  # the largest number of float8_e4m3fn
SOFTCAP = 30.0  # softcap of heads that have one; times do not depend on its value

# Slope and deviation of the noise, by profile.
PROFILES = {"typical": (1.2, 2.0), "peaked": (2.5, 3.0), "flat": (0.0, 1.0)}
TRUNCATIONS = ((50, 0.9), (20, 0.95), (0, 0.95))  # top-k (0: off) and top-p, row by row
PENALISED = 200  # tokens with a penalty, per row
BIASED = 20
ALLOWED = 0.1  # share of the vocabulary that a grammar allows
REACH = 0.5  # part of a hidden state along its profile's direction, per root of its size; the rest is noise
CHUNK_IDS = 16_384


def make_head(shape: HeadShape, weight: torch.Tensor, scale: torch.Tensor | None = None) -> LMHead:
    """scale: of a quantised weight, ``[rows]`` float32."""
    return LMHead(weight, vocab_size=shape.vocab, scale=scale, softcap=SOFTCAP if shape.softcap else None)


def empty_head(shape: HeadShape, device: torch.device | str) -> LMHead:
    """A head whose numbers do not matter."""
    size, dtype = weight_shape(shape), TORCH_DTYPES[shape.dtype]
    scale = torch.empty(size[0], device=device) if shape.is_quantised else None
    return make_head(shape, torch.empty(size, dtype=dtype, device=device), scale)


def random_head(shape: HeadShape, device: torch.device) -> LMHead:
    """A head with the weight of ``make_weight``; of a quantised one, the bfloat16 weight quantised."""
    if not shape.is_quantised:
        return make_head(shape, make_weight(*weight_shape(shape), TORCH_DTYPES[shape.dtype], device))
    return make_head(shape, *quantize_rows(make_weight(*weight_shape(shape), torch.bfloat16, device)))


def copy_of(head: LMHead) -> LMHead:
    """``head`` in other memory."""
    scale = None if head.scale is None else head.scale.clone()
    return dataclasses.replace(head, weight=head.weight.clone(), scale=scale)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[V, D]`` float8_e4m3fn and ``[V]`` float32 from a ``[V, D]`` weight: the largest element of each row becomes
    ``E4M3_MAX`` times the row's scale, as in checkpoints. A part at a time: the weight may fill half of a device."""
    quantised = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scale = torch.empty(len(weight), device=weight.device)
    for ids in _parts_of(len(weight)):
        rows = weight[ids].float()
        scale[ids] = (rows.abs().amax(1) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        quantised[ids] = (rows / scale[ids, None]).to(torch.float8_e4m3fn)
    return quantised, scale


def weight_shape(shape: HeadShape) -> tuple[int, int]:
    """Shape of the weight as servers hold it: a vocabulary that is no multiple of 8 is padded."""
    rows = shape.vocab if shape.vocab % 8 == 0 else cdiv(shape.vocab, VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return rows, shape.hidden


def make_weight(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[rows, hidden]``, rows of length 1 and, for ids of a high rank, up to twice that."""
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.empty(rows, hidden, dtype=dtype, device=device)
    rank = torch.randperm(rows, device=device, generator=generator) + 1
    slopes = torch.tensor([slope for slope, _ in PROFILES.values()], device=device)
    shares = -rank.float().log()[:, None] * slopes / (REACH * hidden**0.5)
    along = directions(hidden, device)
    for ids in _parts_of(rows):
        noise = torch.randn(ids.stop - ids.start, hidden, device=device, generator=generator) / hidden**0.5
        weight[ids] = noise.addmm_(shares[ids], along)
    return weight


def _parts_of(rows: int) -> Iterator[slice]:
    return (slice(first, min(first + CHUNK_IDS, rows)) for first in range(0, rows, CHUNK_IDS))


def directions(hidden: int, device: torch.device) -> torch.Tensor:
    """``[profiles, hidden]`` of length 1, at right angles: signs that change every 1, 2, 4 channels."""
    channel = torch.arange(hidden, device=device)
    bits = torch.stack([channel >> place & 1 for place in range(len(PROFILES))])
    return (1.0 - 2.0 * bits) / hidden**0.5


class Workload:
    """Batches of ``rows`` rows of one head. Each round of a race has other hidden states and noise, the same in every
    process: the time of a row depends on them, so times that are measured again are of the same inputs.

    profile: of all rows; None for each of ``PROFILES`` in turn.

    hidden: ``[B, D]``. profile: ``[B]``, places in ``PROFILES``. position: ``[MAX_CALLS, B]``, of each call of a graph.
    """

    def __init__(self, head: LMHead, rows: int, profile: str | None = None) -> None:
        weight, self.head = head.weight, head
        device, self.rows, self.vocab = weight.device, rows, head.vocab_size
        self.hidden = torch.empty(rows, weight.shape[1], dtype=head.hidden_dtype, device=device)
        row = torch.arange(rows, device=device)
        self.profile = row % len(PROFILES) if profile is None else torch.full_like(row, list(PROFILES).index(profile))
        deviations = torch.tensor([deviation for _, deviation in PROFILES.values()], device=device)
        self._deviation = deviations[self.profile][:, None]
        self._along = REACH * weight.shape[1] ** 0.5 * directions(weight.shape[1], device)[self.profile]
        self.seed = row * 7919
        self.position = torch.empty(MAX_CALLS, rows, dtype=torch.int64, device=device)
        self._offset = torch.empty(MAX_CALLS, 1, dtype=torch.int64, device=device)
        self._params: dict[BatchKind, list[BatchParams]] = {}
        self.refresh(0)

    def refresh(self, index: int) -> None:
        """Write the inputs of round ``index``, in place."""
        device = self.hidden.device
        generator = torch.Generator(device).manual_seed(index)
        noise = torch.randn(self.hidden.shape, device=device, generator=generator) * self._deviation
        self.hidden.copy_(noise + self._along)
        steps = index * MAX_CALLS + torch.arange(MAX_CALLS, device=device)[:, None]
        self.position.copy_(steps.expand_as(self.position))
        self._offset.copy_(steps * OFFSETS_PER_CALL)

    def params(self, kind: BatchKind) -> list[BatchParams]:
        """Parameters of the calls of a graph, one after the other."""
        if kind not in self._params:
            temperature, edits = self._temperature(kind), self._edits if kind.edit else None
            truncation = self._truncation(kind) if kind.truncate else None
            self._params[kind] = [
                BatchParams(temperature, self.seed, position, truncation, edits, all_greedy=kind.greedy)
                for position in self.position
            ]
        return self._params[kind]

    def for_baselines(self, heads: list[LMHead], kind: BatchKind) -> BaselineBatch:
        """The batch for baselines. heads: copies, read in turns. Raises ValueError for quantised ones."""
        for head in heads:
            head.check_not_quantised()
        limits = self._truncation(kind)
        return BaselineBatch(
            hidden=self.hidden,
            weights=[head.weight for head in heads],
            softcap=heads[0].softcap,
            temperature=self._temperature(kind),
            top_k=limits.top_k,
            top_p=limits.top_p,
            seed=torch.tensor([1234], device=self.hidden.device),
            offset=self._offset,
        )

    def _temperature(self, kind: BatchKind) -> torch.Tensor:
        if kind.screen and not kind.greedy:
            place = torch.arange(self.rows, device=self.hidden.device) % len(TEMPERATURES)
            return torch.tensor(TEMPERATURES, device=self.hidden.device)[place]
        return torch.full((self.rows,), 0.0 if kind.greedy else 1.0, device=self.hidden.device)

    def _truncation(self, kind: BatchKind) -> Truncation:
        limits = SCREENED_TRUNCATIONS if kind.screen else TRUNCATIONS
        row = torch.arange(self.rows, device=self.hidden.device)
        per_row = torch.tensor(limits, device=self.hidden.device)[row % len(limits)]
        top_k, top_p = per_row[:, 0].int().contiguous(), per_row[:, 1].float().contiguous()
        max_top_k = max(limits)[0] if min(limits)[0] else None
        return Truncation(top_k, top_p, torch.zeros_like(top_p), max_top_k=max_top_k)

    @functools.cached_property
    def _edits(self) -> LogitEdits:
        """Penalties of tokens seen, a grammar's mask and a few biases, in every row."""
        device, shape = self.hidden.device, (self.rows, self.vocab)
        generator = torch.Generator(device).manual_seed(2)
        seen = torch.randint(self.vocab, (self.rows, min(PENALISED, self.vocab)), device=device, generator=generator)
        return LogitEdits(
            additive=torch.zeros(shape, device=device).scatter_(1, seen, -0.5),
            scaling=torch.ones(shape, device=device).scatter_(1, seen, 1.1),
            mask=pack_bits(torch.rand(shape, device=device, generator=generator) < ALLOWED),
            bias=torch.zeros(shape, device=device).scatter_(1, seen[:, :BIASED], 2.0),
            rows=torch.full((self.rows,), int(sum(Edit)), dtype=torch.int32, device=device),
        )
