"""Many ranks, each a process that shares what one process has imported: they draw batches from their parts of a head,
exchange, and return what they got.

    python tests/sglang/many_ranks.py PORT FOLDER SHAPE [SHAPE ...]

SHAPE: ranks, ids of each rank and ids of the vocabulary, as 8x44x345. A line of JSON for each: of each rank, the
answers to each batch. A rank that fails, or waits for longer than ``SECONDS``, ends the run.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from exchange_worker import Answers, as_answer, as_lists, values_of
from head_states import CPU, Processor, make_head
from kernel_cases import Case, make_case
from rank_group import Group, fork, join

from sgl_flashsample import WantedLogprobs
from sgl_flashsample.kernels.peer_memory import PeerMemory
from sgl_flashsample.sglang.draw import launch
from sgl_flashsample.sglang.exchange import Exchange
from sgl_flashsample.sglang.head import HeadState

SECONDS = 240
ROWS, BLOCK = 5, 3  # rows of a batch, and those that are exchanged through memory at a time
TOP, GIVEN = 3, 4  # likeliest and given ids of each row
KINDS = ("plain", "edit", "truncate")
KINDS_OF_MANY = ("plain", "truncate")  # of more than 8 ranks
WAYS = ("collectives", "memory in blocks")


@functools.cache
def case_of(kind: str, vocab: int) -> Case:
    return make_case(ROWS, vocab, CPU, kind, torch.float32, hidden=16, seed=ROWS)


def wanted_of(vocab: int) -> WantedLogprobs:
    """Each row asks for another number of likeliest ids, and for ids of all ranks; the last one is none."""
    ids = torch.arange(ROWS * GIVEN).view(ROWS, GIVEN) * (vocab // (ROWS * GIVEN))
    ids[:, -1] = -1
    return WantedLogprobs(TOP, torch.arange(ROWS, dtype=torch.int32) % (TOP + 1), ids)


def answers_of(exchange: Exchange, kind: str, width: int, vocab: int, memory: PeerMemory | None) -> Answers:
    """As a rank of a server."""
    case, wanted = case_of(kind, vocab), wanted_of(vocab)
    whole = torch.nn.functional.pad(case.head.weight, (0, 0, 0, width * exchange.num_ranks - vocab))
    part = whole[exchange.rank * width : (exchange.rank + 1) * width]
    exchange.memory = memory
    state = HeadState(Processor(vocab_size=vocab), make_head(part), exchange=exchange)
    state.update(ROWS)
    drawn = as_lists(launch(state, case.hidden, case.params, True).out)
    launched = launch(state, case.hidden, case.params, wanted)
    assert launched.logprobs is not None and launched.rest is not None
    found = as_answer(launched.out.token_ids, launched.logprobs, *launched.rest.parts())
    prompt = None
    if memory is None and kind == "plain":
        tokens = wanted.token_ids[:, 0].contiguous()
        prompt = as_answer(tokens, *values_of(state.logprobs_of_prompt(case.hidden, tokens, wanted)))
    return Answers([drawn], [found], prompt)


def rank_of(rank: int, shape: tuple[int, int, int], port: int, regions: list[torch.Tensor]) -> Any:
    num_ranks, width, vocab = shape
    join(rank, num_ranks, port, SECONDS)
    exchange, answers = Exchange(Group()), {}
    for way in WAYS:
        memory = None
        if way != WAYS[0]:
            memory = PeerMemory(regions, rank, BLOCK, width, torch.float32)
        for kind in kinds_of(num_ranks):
            answers[f"{kind}, by {way}"] = answers_of(exchange, kind, width, vocab, memory)._asdict()
    return answers


def kinds_of(num_ranks: int) -> tuple[str, ...]:
    return KINDS if num_ranks <= 8 else KINDS_OF_MANY


def shared_regions(num_ranks: int, width: int) -> list[torch.Tensor]:
    """Memory of each rank, which processes inherit."""
    size = PeerMemory.num_bytes(num_ranks, BLOCK, width, torch.float32)
    return [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]


def run(shape: tuple[int, int, int], port: int, folder: Path) -> list[Any]:
    """The answers of each rank."""
    regions = shared_regions(*shape[:2])
    return fork(shape[0], lambda rank: rank_of(rank, shape, port, regions), folder)


def main(port: int, folder: Path, shapes: list[str]) -> None:
    for place, text in enumerate(shapes):
        num_ranks, width, vocab = map(int, text.split("x"))
        print(json.dumps(run((num_ranks, width, vocab), port + place, folder)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
