"""The order in which requests arrive at a server, and the seed of the noise that each draws with.

SGLang hands a request to all ranks that share an LM head, and to all of them in one order: its number is the same on
each. A request is numbered when it arrives, not when it is first scheduled: one that is aborted while it waits has been
counted as well, and takes no place of another. It keeps its number through chunks, retractions and pauses.
"""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any, NamedTuple

from ..sampler import hashed_seed, seed_of_sample

_ATTRIBUTE = "_flashsample_arrival"  # on a request
_BLOCK = 64  # requests whose seeds are made at once


class Arrival(NamedTuple):
    """The place of a request. number: among all requests of this server or replica. sample: among the n samples of a
    seeded request, else 0."""

    number: int
    sample: int


class Arrivals:
    """SGLang makes n requests with new ids and the same seed of a seeded request with n samples, and sends them one
    after the other. The order of arrival tells them apart, so that the same request gives the same n answers again, in
    the same order.

    rank: of replicas and of DP attention, which get different requests, and of n samples some each: their noise
    differs. default_seed: counts as given by every request that gives none; None: such requests have noise of their
    own."""

    MAX_PROMPTS = 4096

    def __init__(self, rank: int = 0, default_seed: int | None = None) -> None:
        self.rank, self.default_seed = rank, default_seed
        self._numbers = itertools.count()
        self._next_samples: collections.OrderedDict[tuple, int] = collections.OrderedDict()

    def of(self, request: Any) -> Arrival:
        """The arrival of a request; a request without one arrives now."""
        arrival = getattr(request, _ATTRIBUTE, None)
        if arrival is None:
            number = next(self._numbers)  # also of a request that cannot be read: ranks count alike
            arrival = Arrival(number, self._sample_of(request))
            setattr(request, _ATTRIBUTE, arrival)
        return arrival

    def seed_of(self, request: Any, server_seed: int) -> int:
        """The noise seed of a request: the one that it gave, or one that no other request has. Its id is a name, which
        another request may have as well."""
        arrival: Arrival = getattr(request, _ATTRIBUTE, None) or self.of(request)
        seed = self._seed(request.sampling_params)
        if seed is None:
            block, place = divmod(arrival.number, _BLOCK)
            return _seeds_of(server_seed, self.rank, block)[place]
        if arrival.sample == 0:
            return (seed + 2**63) % 2**64 - 2**63  # older SGLang lets any integer through
        return seed_of_sample(seed, arrival.sample)

    def _seed(self, params: Any) -> int | None:
        seed = given_seed(params)
        return self.default_seed if seed is None else seed

    def _sample_of(self, request: Any) -> int:
        params = request.sampling_params
        count = getattr(params, "n", None) or 1
        # n <= 1: one answer. SGLang's extra request that warms the prefix cache has max_new_tokens 0.
        if not count > 1 or self._seed(params) is None or getattr(params, "max_new_tokens", None) == 0:
            return 0
        prompt = hash(tuple(getattr(request, "origin_input_ids", None) or ()))
        # Tokenizer processes send at the same time; each of them sends the n samples of one request without a pause.
        sender = getattr(request, "http_worker_ipc", None)
        key = (params.sampling_seed, count, prompt, sender)
        place = self._next_samples.pop(key, 0)
        self._next_samples[key] = (place + 1) % count
        if len(self._next_samples) > self.MAX_PROMPTS:
            self._next_samples.popitem(last=False)
        return self.rank * count + place


@functools.lru_cache(maxsize=64)
def _seeds_of(server_seed: int, rank: int, block: int) -> list[int]:
    """The seeds of ``_BLOCK`` requests that come one after the other: in a loop each costs a part of what it costs
    alone, between two steps."""
    numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
    return [hashed_seed(f"server {server_seed}, rank {rank}, request {number}") for number in numbers]


def given_seed(params: Any) -> int | None:
    """The seed that a request gave. Older SGLang lets any JSON value through; only an integer is a seed."""
    seed = params.sampling_seed
    return seed if isinstance(seed, int) else None
