"""Requests that come and go, and the processes that send them: the clients of ``traffic.py``.

A ``Plan`` numbers its requests. A request depends on the plan and its number alone, so two servers are asked for the
same ones in the same order. Client processes stream the answers and note when tokens arrive. This module loads no
torch: a process starts in half a second.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import aiohttp

from .samplings import SAMPLINGS

PROMPTS, ANSWERS = (32, 512), (16, 512)  # tokens, the fewest and the most; uniform between them
MIX = "mix"
# Requests of each kind in one deck of the mix: 40 % truncated, 20 % at temperature 1, 20 % greedy, 10 % with penalties
# or a bias, 10 % with JSON or logprobs. All counts are even: half of the requests of each kind has a seed.
DECK = {"trunc": 16, "t1": 8, "greedy": 8, "penalty": 2, "bias": 2, "json": 2, "logprob": 2}
CLOSED, POISSON = "closed", "poisson"
# A server spends more time on the text of streams than on their tokens. So about this many requests at a time stream
# each token, and have gaps; the others stream every 16th.
STREAMS, CHUNK_TOKENS = 8, 16
TICK = 0.1  # seconds of running time for which arrived tokens are summed
ANSWER_SECONDS = 60.0
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


def kinds_of(sampling: str) -> list[str]:
    """The names in ``SAMPLINGS`` of the requests of ``sampling``, a name or the mix."""
    return list(DECK) if sampling == MIX else [sampling]


@functools.lru_cache(maxsize=64)
def _deck(seed: int, number: int) -> list[tuple[str, bool]]:
    """Kinds of requests and whether they have seeds, in the order of the deck of this number."""
    cards = [(kind, place % 2 == 0) for kind, count in DECK.items() for place in range(count)]
    random.Random(f"deck {seed} {number}").shuffle(cards)
    return cards


class Plan(NamedTuple):
    """Requests by number. sampling: a name in ``SAMPLINGS`` or ``MIX``. ids: the prompts' ids are sampled from these.
    clients: of a closed loop, each with one request at a time; 0 without. rate: requests per second that arrive as a
    Poisson process; 0.0 in a closed loop."""

    sampling: str
    ids: range
    clients: int = 0
    rate: float = 0.0
    seed: int = 1

    @property
    def arrivals(self) -> str:
        return POISSON if self.rate else CLOSED

    def kind(self, number: int) -> tuple[str, bool]:
        """The kind of a request, and whether it has a seed."""
        if self.sampling != MIX:
            return self.sampling, False
        deck, card = divmod(number, sum(DECK.values()))
        return _deck(self.seed, deck)[card]

    def request(self, number: int) -> dict[str, Any]:
        """The body of POST /generate."""
        r = random.Random(f"request {self.seed} {number}")
        kind, seeded = self.kind(number)
        prompt = r.choices(self.ids, k=r.randint(*PROMPTS))
        tokens = r.randint(*ANSWERS)
        if number < self.clients:  # the first request of each client: else all would end and begin together
            tokens = max(1, int(tokens * r.random()))
        asked = SAMPLINGS[kind]
        params = asked.params | {"max_new_tokens": tokens, "ignore_eos": True}
        params["stream_interval"] = 1 if self.streams(number) else CHUNK_TOKENS
        if seeded:
            params["sampling_seed"] = number
        return {"input_ids": prompt, "sampling_params": params, "stream": True, **asked.fields}

    def streams(self, number: int) -> bool:
        """The request gets each token by itself."""
        return number % max(1, self.clients // STREAMS if self.clients else STREAMS) == 0

    def wait(self, number: int, parts: int) -> float:
        """Seconds from the last arrival to this one, for one of ``parts`` independent processes of arrivals."""
        return random.Random(f"wait {self.seed} {number}").expovariate(self.rate / parts)


class Report(NamedTuple):
    """The view that one process has of one server in a window. tokens: that arrived. gaps, firsts: seconds between two
    chunks of a stream (a chunk with several tokens is one gap), and until the first chunk. ended, open: requests since
    the beginning, and now. failures: requests that were not answered as asked, by reason."""

    tokens: int
    gaps: list[float]
    firsts: list[float]
    ended: int
    open: int
    failures: dict[str, int]


class Requests:
    """The requests of one process to one server: numbers ``part``, ``part + parts``, ... of the plan.

    Its clock, the running time, stands still while the server does.
    """

    def __init__(self, http: aiohttp.ClientSession, port: int, plan: Plan, part: int, parts: int) -> None:
        self._http, self._url, self._plan, self._parts = http, f"http://127.0.0.1:{port}/generate", plan, parts
        self._numbers = itertools.count(part, parts)
        self._paused_at: float | None = None
        self._paused = 0.0  # seconds
        self._began = time.monotonic()
        self._arrived: Counter[int] = Counter()  # tokens by number of the tick
        self._chunks: list[tuple[float, float]] = []  # time of arrival, tokens
        self._gaps: list[tuple[float, float]] = []  # time of arrival, seconds
        self._firsts: list[tuple[float, float]] = []
        self._ended = self._open = 0
        self._failures: Counter[str] = Counter()
        clients = len(range(part, plan.clients, parts))
        loops = [self._arrivals()] if plan.rate else [self._client() for _ in range(clients)]
        self._tasks = {asyncio.ensure_future(loop) for loop in loops}

    def pause(self) -> None:
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused += time.monotonic() - self._paused_at
            self._paused_at = None

    def report(self, start: float, end: float) -> Report:
        """The window from ``start`` to ``end``, of ``time.monotonic()``, since the last ``resume``. What came before
        ``end`` is forgotten."""
        start, end = start - self._paused, end - self._paused
        tokens, gaps, firsts = (
            [value for at, value in noted if start <= at < end] for noted in (self._chunks, self._gaps, self._firsts)
        )
        for noted in (self._chunks, self._gaps, self._firsts):
            noted[:] = [one for one in noted if one[0] >= end]
        return Report(int(sum(tokens)), gaps, firsts, self._ended, self._open, dict(self._failures))

    def arrived(self) -> list[int]:
        """Tokens that arrived in each full ``TICK`` of running time since the beginning."""
        return [self._arrived[tick] for tick in range(self._tick(self._now()))]

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _now(self) -> float:
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._paused

    def _tick(self, now: float) -> int:
        return int((now - self._began) / TICK)

    def _note(self, now: float, tokens: int) -> None:
        self._chunks.append((now, tokens))
        self._arrived[self._tick(now)] += tokens

    async def _client(self) -> None:
        while not self._failures:
            await self._ask(next(self._numbers))

    async def _arrivals(self) -> None:
        due = self._now()
        while not self._failures:
            number = next(self._numbers)
            due += self._plan.wait(number, self._parts)
            while (early := due - self._now()) > 0 or self._paused_at is not None:
                await asyncio.sleep(max(early, 0.001))
            task = asyncio.ensure_future(self._ask(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, number: int) -> None:
        body = self._plan.request(number)
        self._open += 1
        try:
            tokens, expected = await self._stream(body, self._plan.streams(number)), _asked(body)
            if tokens != expected:
                self._failures[f"{tokens} tokens; expected {expected}"] += 1
        except Exception as error:  # of any kind: a client that ended in silence would change the load
            self._failures[f"{type(error).__name__}: {error}"[:200]] += 1
        finally:
            self._open -= 1
            self._ended += 1

    async def _stream(self, body: dict[str, Any], each: bool) -> int:
        """Tokens of the answer. Raises ValueError for an answer that is an error."""
        tokens, before = 0, self._now()
        async with self._http.post(self._url, json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:150]}")
            async for line in response.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                now, count = self._now(), _COUNT.search(line)
                if count is None:
                    raise ValueError(line[5:155].decode(errors="replace").strip())
                if not tokens:
                    self._firsts.append((now, now - before))
                elif each:
                    self._gaps.append((now, now - before))
                self._note(now, int(count[1]) - tokens)
                tokens, before = int(count[1]), now
        return tokens


def _asked(body: dict[str, Any]) -> int:
    return body["sampling_params"]["max_new_tokens"]


async def _serve(pipe: Connection, part: int, parts: int) -> None:
    """Do what the parent asks for, until it is gone."""
    over = asyncio.Event()
    sides: dict[str, Requests] = {}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close an idle connection at any time
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as http:

        def listen() -> None:
            try:
                method, label, *values = pipe.recv()
            except EOFError:
                return over.set()
            if method == "begin":
                port, plan = values
                sides[label] = Requests(http, port, plan, part, parts)
                pipe.send(None)
            else:
                pipe.send(getattr(sides[label], method)(*values))

        asyncio.get_running_loop().add_reader(pipe.fileno(), listen)
        await over.wait()


def _process(pipe: Connection, cores: Sequence[int] | None, part: int, parts: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked to end, and closes the pipe
    if cores:
        os.sched_setaffinity(0, cores)
    asyncio.run(_serve(pipe, part, parts))


class Clients:
    """``with Clients(processes, cores) as clients:`` client processes, on these cores alone (None: on any).

    ``tell(method, label, ...)`` calls a method of the ``Requests`` to the server of that label in each process;
    ``"begin", label, port, plan`` makes them.
    """

    def __init__(self, processes: int, cores: Sequence[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for part in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_process, args=(theirs, cores, part, processes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()

    def tell(self, *command: Any) -> list[Any]:
        """The answer of each process. Raises EOFError or OSError where one has ended or hangs."""
        for pipe in self._pipes:
            pipe.send(command)
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_SECONDS):
                raise TimeoutError(f"a client process has not answered within {ANSWER_SECONDS:.0f} s")
        return [pipe.recv() for pipe in self._pipes]
