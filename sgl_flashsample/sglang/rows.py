"""Per-row parameters of a batch, as the fused pass needs them.

SGLang's batch-level flags are sticky: after one request with top-p has joined, ``need_top_p_sampling`` stays
set until the batch is empty, and a greedy request (top_k 1) sets ``need_top_k_sampling`` for all. So the
reasons against fusing are kept per row and follow the batch through its filters and merges.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..kernels.features import Edit, Truncation
from ..kernels.integers import next_power_of_2

# Attributes of SGLang's SamplingBatchInfo: whether its sampler has to truncate.
NEED_FLAGS = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
TOP_K_OFF = 1 << 30  # SGLang's TOP_K_ALL


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the fused pass knows of a batch. Immutable: a forward keeps the rows it was planned with.

    reasons: per row, why it needs SGLang's sampler, or None. tempered_greedy: per row, greedy with a
    temperature other than 1, which SGLang applies to its logprob only beside sampled rows.
    temperature: ``[B]`` float32, 0 on greedy rows. seed: ``[B]`` int64. needs: per row, SGLang's ``NEED_FLAGS`` of
    that request alone. edits: per row, what SGLang changes in its logits, grammars apart. top_k: ``[B]`` int32, top_p
    and min_p: ``[B]`` float32. seeded: per row, whether the request gave the seed that its tokens are to be those of.
    top_ks: ``top_k`` on the host.
    """

    reasons: tuple[str | None, ...]
    greedy: tuple[bool, ...]
    tempered_greedy: tuple[bool, ...]
    temperature: torch.Tensor
    seed: torch.Tensor
    needs: tuple[tuple[bool, bool, bool], ...]
    edits: tuple[Edit, ...]
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeded: tuple[bool, ...]
    top_ks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.reasons)

    @functools.cached_property
    def logprob_reasons(self) -> tuple[str | None, ...]:
        """Per row, why its logprob needs SGLang's sampler, or None."""
        if self.all_greedy:
            return (None,) * len(self)
        return tuple("greedy_logprob_at_temperature" if tempered else None for tempered in self.tempered_greedy)

    @functools.cached_property
    def all_greedy(self) -> bool:
        """Whether no row is drawn."""
        return all(self.greedy)

    @functools.cached_property
    def distribution_only(self) -> bool:
        """Whether any noise does: no row is greedy or has a seed, all have top-k or top-p, none has min-p."""
        return not (any(self.greedy) or any(self.seeded)) and all(
            (top_p or top_k) and not min_p for top_p, top_k, min_p in self.needs
        )

    @functools.cached_property
    def num_truncated(self) -> int:
        """How many rows have top-k, top-p or min-p (a greedy row has none)."""
        return sum(any(needs) and not greedy for needs, greedy in zip(self.needs, self.greedy, strict=True))

    @functools.cached_property
    def truncation(self) -> Truncation | None:
        """Top-k, top-p and min-p; None where no row has any."""
        if not self.num_truncated:
            return None
        return Truncation(self.top_k, self.top_p, self.min_p, largest_top_k=self._largest_top_k)

    @functools.cached_property
    def _largest_top_k(self) -> int | None:
        """Of the rows with a truncation, rounded up to a power of two: batches that differ below that share CUDA
        graphs. None where such a row has no top-k."""
        rows = zip(self.needs, self.greedy, self.top_ks, strict=True)
        largest = max(top_k for needs, greedy, top_k in rows if any(needs) and not greedy)
        return next_power_of_2(largest) if largest < TOP_K_OFF else None

    @functools.cached_property
    def plans(self) -> dict[tuple, Any]:
        """The plans made for these rows (plan.py). They live as long as the batch stays as it is."""
        return {}

    @classmethod
    def of_requests(
        cls, requests: Sequence[Any], server_seed: int, custom_processors: bool, device: torch.device | str
    ) -> Rows:
        """From SGLang's ``Req`` objects. Copies to the device without waiting for it."""
        greedy = tuple(is_greedy(request.sampling_params) for request in requests)
        temperatures = [
            0.0 if is_zero else request.sampling_params.temperature
            for request, is_zero in zip(requests, greedy, strict=True)
        ]
        seeds = [request_seed(server_seed, request.rid, request.sampling_params) for request in requests]
        return cls(
            tuple(native_reason(request, custom_processors) for request in requests),
            greedy,
            tuple(g and r.sampling_params.temperature != 1.0 for g, r in zip(greedy, requests, strict=True)),
            to_device(temperatures, torch.float32, device),
            to_device(seeds, torch.int64, device),
            tuple(truncation_needs(request.sampling_params) for request in requests),
            tuple(edits_of_request(request.sampling_params) for request in requests),
            to_device([request.sampling_params.top_k for request in requests], torch.int32, device),
            to_device([request.sampling_params.top_p for request in requests], torch.float32, device),
            to_device([request.sampling_params.min_p for request in requests], torch.float32, device),
            tuple(request.sampling_params.sampling_seed is not None for request in requests),
            tuple(request.sampling_params.top_k for request in requests),
        )

    def keep(self, indices: Iterable[int], device_indices: torch.Tensor) -> Rows:
        """The rows at ``indices`` (also given as a device tensor), in that order."""
        indices = list(indices)

        def pick(values: tuple) -> tuple:
            return tuple(values[i] for i in indices)

        return Rows(
            pick(self.reasons),
            pick(self.greedy),
            pick(self.tempered_greedy),
            self.temperature[device_indices],
            self.seed[device_indices],
            pick(self.needs),
            pick(self.edits),
            self.top_k[device_indices],
            self.top_p[device_indices],
            self.min_p[device_indices],
            pick(self.seeded),
            pick(self.top_ks),
        )

    def followed_by(self, other: Rows) -> Rows:
        return Rows(
            self.reasons + other.reasons,
            self.greedy + other.greedy,
            self.tempered_greedy + other.tempered_greedy,
            torch.cat([self.temperature, other.temperature]),
            torch.cat([self.seed, other.seed]),
            self.needs + other.needs,
            self.edits + other.edits,
            torch.cat([self.top_k, other.top_k]),
            torch.cat([self.top_p, other.top_p]),
            torch.cat([self.min_p, other.min_p]),
            self.seeded + other.seeded,
            self.top_ks + other.top_ks,
        )


def to_device(values: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` on the device, without waiting for the copy."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def is_greedy(params: Any) -> bool:
    """SGLang turns temperature 0 into top_k 1, and treats every top_k 1 as greedy."""
    return params.top_k <= 1


def truncation_needs(params: Any) -> tuple[bool, bool, bool]:
    """``NEED_FLAGS`` as SGLang sets them for one request."""
    return params.top_p != 1.0, params.top_k != TOP_K_OFF, params.min_p > 0


def edits_of_request(params: Any) -> Edit:
    """What SGLang adds to, multiplies with and biases the logits of one request."""
    edits = Edit(0)
    if params.frequency_penalty != 0 or params.presence_penalty != 0 or params.min_new_tokens > 0:
        edits |= Edit.ADDITIVE
    if params.repetition_penalty != 1:
        edits |= Edit.SCALING
    if params.logit_bias is not None:
        edits |= Edit.BIAS
    return edits


def native_reason(request: Any, custom_processors: bool) -> str | None:
    """Why this request needs SGLang's sampler: one word, the first that applies; None when fused."""
    params = request.sampling_params
    checks = (
        ("custom_logit_processor", custom_processors and bool(request.custom_logit_processor)),
        ("sampling_mask", bool(getattr(request, "return_sampling_mask", False))),
        ("beam_search", (getattr(params, "beam_width", None) or 1) > 1),
    )
    return next((reason for reason, applies in checks if applies), None)


def request_seed(server_seed: int, request_id: str, params: Any) -> int:
    """The noise seed of one request: its own, or one that every rank derives alike from the server's seed and
    the request's id. Two requests never share noise, nor do the n samples of one request."""
    own = params.sampling_seed
    if isinstance(own, int) and getattr(params, "n", 1) in (None, 1):
        return (own + 2**63) % 2**64 - 2**63  # older SGLang lets any integer through
    digest = hashlib.blake2b(f"{server_seed}/{own}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
