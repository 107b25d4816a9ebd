"""What the step is timed on: a head of the real shape, and batches whose logits look like a model's.

A logit is ``-slope * log(rank)`` of its id plus Gaussian noise. Three directions in the head hold the rank's share for
three profiles (peaked, typical, flat), and a row's hidden state has one of them: the rows of a batch differ, as
requests do. How long a truncated row takes depends on its profile; how many groups a screen leaves to rescore, on the
profile, the temperature and the lengths of hidden states and of the head's rows. So the directions are spread over all
channels, as a model's are: one large channel would leave an INT8 copy of the head nothing of the others.
"""

from __future__ import annotations

import dataclasses

import torch

from ..kernels.features import Edit, LogitEdits, Truncation
from ..kernels.head import LMHead
from ..resolution import DTYPE_NAMES
from ..work import Work

# Profile: slope, and deviation of the noise.
PROFILES = {"typical": (1.2, 2.0), "peaked": (2.5, 3.0), "flat": (0.0, 1.0)}
TRUNCATIONS = ((50, 0.9), (20, 0.95), (0, 0.95))  # top-k (0: off) and top-p, row by row
SCREENED_TRUNCATIONS = ((50, 0.9), (20, 0.95), (40, 1.0))  # of a batch that a screen can help
SEEN = 200  # tokens with a penalty, per row
BIASED = 20
ALLOWED = 0.1  # share of the vocabulary that a grammar allows
# Temperatures of the rows of a batch with a screen, in turn: the colder, the more groups are left to rescore.
TEMPERATURES = (0.8, 1.0, 0.6, 0.3)
REACH = 0.5  # of a hidden state along its profile's direction, per root of its size; the rest of it is noise
CHUNK_IDS = 16_384
# The head is read from memory, not from the L2 cache, where its copies hold this many times the cache.
COLD = 5
STEPS = 32  # positions between two refreshes: calls of a sample at most
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def make_weight(vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[vocab, hidden]``, rows of length 1 and, for ids of a high rank, up to twice that."""
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.empty(vocab, hidden, dtype=dtype, device=device)
    rank = torch.randperm(vocab, device=device, generator=generator) + 1
    slopes = torch.tensor([slope for slope, _ in PROFILES.values()], device=device)
    shares = -rank.float().log()[:, None] * slopes / (REACH * hidden**0.5)
    along = directions(hidden, device)
    for first in range(0, vocab, CHUNK_IDS):
        rows = slice(first, min(first + CHUNK_IDS, vocab))
        noise = torch.randn(rows.stop - first, hidden, device=device, generator=generator) / hidden**0.5
        weight[rows] = noise.addmm_(shares[rows], along)
    return weight


def directions(hidden: int, device: torch.device) -> torch.Tensor:
    """``[profiles, hidden]`` of length 1, at right angles: signs that change every 1, 2, 4 channels."""
    channel = torch.arange(hidden, device=device)
    bits = torch.stack([channel >> place & 1 for place in range(len(PROFILES))])
    return (1.0 - 2.0 * bits) / hidden**0.5


def copies_needed(weight: torch.Tensor, l2_bytes: int) -> int:
    """How many copies of the head have to take turns for it to be read from memory each time; as many as a sample has
    calls at most."""
    return min(STEPS, max(1, -(-COLD * l2_bytes // (weight.numel() * weight.element_size()))))


class Batch:
    """Inputs of ``rows`` rows; each round of a race has hidden states and noise of its own, the same in every process:
    how long a row takes depends on them, so what is measured again is measured on them."""

    def __init__(self, head: LMHead, rows: int) -> None:
        weight = head.weight
        device, self.rows, self.vocab = weight.device, rows, head.vocab_size
        self.hidden = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device=device)
        row = torch.arange(rows, device=device)
        self.profile = row % len(PROFILES)
        deviations = torch.tensor([deviation for _, deviation in PROFILES.values()], device=device)
        self._deviation = deviations[self.profile][:, None]
        self._along = REACH * weight.shape[1] ** 0.5 * directions(weight.shape[1], device)[self.profile]
        self.seed = row * 7919
        self.position = torch.empty(STEPS, rows, dtype=torch.int64, device=device)
        self.rival_seed = torch.tensor([1234], device=device)
        self.rival_offset = torch.empty(STEPS, 1, dtype=torch.int64, device=device)
        self._truncations = {
            screened: _truncation(SCREENED_TRUNCATIONS if screened else TRUNCATIONS, row) for screened in (False, True)
        }
        self._edits: LogitEdits | None = None
        self.refresh(0)

    def refresh(self, index: int) -> None:
        """The inputs of round ``index``."""
        device = self.hidden.device
        generator = torch.Generator(device).manual_seed(index)
        noise = torch.randn(self.hidden.shape, device=device, generator=generator) * self._deviation
        self.hidden.copy_(noise + self._along)
        steps = index * STEPS + torch.arange(STEPS, device=device)[:, None]
        self.position.copy_(steps.expand_as(self.position))
        self.rival_offset.copy_(steps * 4096)

    def temperature(self, work: Work) -> torch.Tensor:
        if work.screened and not work.greedy:
            place = torch.arange(self.rows, device=self.hidden.device) % len(TEMPERATURES)
            return torch.tensor(TEMPERATURES, device=self.hidden.device)[place]
        return torch.full((self.rows,), 0.0 if work.greedy else 1.0, device=self.hidden.device)

    def truncation(self, work: Work) -> Truncation | None:
        """None for work without one."""
        return self._truncations[work.screened] if work.truncates else None

    @property
    def edits(self) -> LogitEdits:
        """Penalties of tokens seen, a grammar's mask and a few biases, in every row."""
        if self._edits is None:
            device, shape = self.hidden.device, (self.rows, self.vocab)
            generator = torch.Generator(device).manual_seed(2)
            seen = torch.randint(self.vocab, (self.rows, min(SEEN, self.vocab)), device=device, generator=generator)
            allowed = torch.rand(shape, device=device, generator=generator) < ALLOWED
            edits = LogitEdits(
                additive=torch.zeros(shape, device=device).scatter_(1, seen, -0.5),
                scaling=torch.ones(shape, device=device).scatter_(1, seen, 1.1),
                mask=as_bitmask(allowed),
                bias=torch.zeros(shape, device=device).scatter_(1, seen[:, :BIASED], 2.0),
            )
            flags = torch.full((self.rows,), int(sum(Edit)), dtype=torch.int32, device=device)
            self._edits = dataclasses.replace(edits, rows=flags)
        return self._edits


def _truncation(kinds: tuple[tuple[int, float], ...], row: torch.Tensor) -> Truncation:
    limits = torch.tensor(kinds, device=row.device)[row % len(kinds)]
    top_k, top_p = limits[:, 0].int().contiguous(), limits[:, 1].float().contiguous()
    return Truncation(top_k, top_p, torch.zeros_like(top_p), largest_top_k=max(kinds)[0] if min(kinds)[0] else None)


def as_bitmask(allowed: torch.Tensor) -> torch.Tensor:
    """``[B, V]`` bool as ``[B, ceil(V / 32)]`` int32, bit ``i % 32`` of word ``i // 32``."""
    rows, vocab = allowed.shape
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(rows, -1, 32)
    words = (padded.long() << torch.arange(32, device=allowed.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
