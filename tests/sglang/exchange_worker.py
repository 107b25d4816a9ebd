"""One of several ranks in a group of gloo: draws batches from its part of a head, exchanges, and prints what it got.

python tests/sglang/exchange_worker.py RANK NUM_RANKS PORT FOLDER

By collectives, and by memory that all ranks reach: files in FOLDER, which each rank maps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from head_states import Processor, make_head
from kernel_cases import KINDS, Case, make_case
from rank_group import sleep_while_waiting

from sgl_flashsample import Head, Logprobs, WantedLogprobs, sample
from sgl_flashsample.kernels.params import BatchParams, SampleOutput
from sgl_flashsample.kernels.peer_memory import PeerMemory
from sgl_flashsample.sglang.draw import launch
from sgl_flashsample.sglang.exchange import Exchange, RankSync
from sgl_flashsample.sglang.head import HeadState

CPU = torch.device("cpu")
SHAPES = ((1, 401), (2, 32), (17, 401))  # rows, ids; of three ranks, the last one holds no id of 32
TOP, GIVEN = 8, 9  # likeliest and given ids of each row
TIMES = 3  # draws of a batch by memory, which is used again, at one position after the other


def cases() -> dict[str, Case]:
    return {
        f"{kind}, {rows} rows, {vocab} ids": make_case(rows, vocab, CPU, kind, torch.float32, seed=rows)
        for kind in KINDS
        for rows, vocab in SHAPES
    }


def wants_logprob(case: Case) -> bool:
    return len(case.hidden) != 2


def params_of(case: Case, times: int) -> list[BatchParams]:
    return [dataclasses.replace(case.params, position=case.params.position + time) for time in range(times)]


def wanted_of(case: Case) -> WantedLogprobs:
    """In the batches of one row at temperature 1. The ids of a row are drawn with a seed; the last one is none."""
    rows = len(case.hidden)
    ids = torch.randint(case.head.vocab_size, (rows, GIVEN), generator=torch.Generator().manual_seed(rows))
    ids[:, -1] = -1
    counts = torch.arange(rows, dtype=torch.int32) % (TOP + 1)
    return WantedLogprobs(TOP, TOP - counts, ids, original=rows == 1)


def logprobs_of_whole(case: Case) -> Logprobs:
    return Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted_of(case))[1]


def prompt_of(case: Case, head: Head) -> Logprobs:
    """The logprobs of a prompt, whose tokens are its first given ids."""
    wanted = wanted_of(case)
    return head.logprobs_of(case.hidden, wanted.token_ids[:, 0].contiguous(), wanted, chunk_rows=2)


def draw_whole(case: Case) -> list[SampleOutput]:
    return [
        sample(case.hidden, case.head, params, return_logprob=wants_logprob(case), path="logits")
        for params in params_of(case, TIMES)
    ]


def shared_memory(folder: Path, exchange: Exchange, rows: int, width: int) -> PeerMemory:
    """Of this batch alone; ranks come to it in the same order."""
    num_bytes = PeerMemory.num_bytes(exchange.num_ranks, rows, width, torch.float32)
    batch = len(list(folder.glob(f"{exchange.rank}-*")))
    (folder / f"{exchange.rank}-{batch}").touch()
    regions = [
        torch.from_file(str(folder / f"region-{rank}-{batch}"), shared=True, size=num_bytes, dtype=torch.uint8)
        for rank in range(exchange.num_ranks)
    ]
    return PeerMemory(regions, exchange.rank, rows, width, torch.float32)


class Answers(NamedTuple):
    """The answers of a rank to a batch, JSON values. drawn: without further logprobs; found: with them, the logprobs of
    the tokens, ids of the likeliest, their logprobs and those of given ids, for the first draw. prompt: the same,
    without a draw; None where ranks exchange whole rows, and by memory."""

    drawn: list[dict[str, list | None]]
    found: list[dict[str, list]]
    prompt: dict[str, list] | None


def answers_in_group(exchange: Exchange, case: Case, multiple: int, folder: Path | None) -> Answers:
    """As a rank of a server: it has equally many rows of the weight as the others, a multiple of so many. folder: of
    memory that all ranks reach; None for collectives."""
    weight, vocab = case.head.weight, case.head.vocab_size
    width = -(-vocab // exchange.num_ranks // multiple) * multiple
    start = exchange.rank * width
    weight = torch.nn.functional.pad(weight, (0, 0, 0, width * exchange.num_ranks - len(weight)))[start : start + width]
    processor = Processor(
        vocab_size=vocab, logit_scale=case.head.logit_scale, final_logit_softcapping=case.head.softcap
    )
    exchange.memory = None if folder is None else shared_memory(folder, exchange, len(case.hidden), width)
    state = HeadState(processor, make_head(weight), exchange=exchange)
    state.update(len(case.hidden))
    times = 1 if folder is None else TIMES
    drawn, found = [], []
    for params in params_of(case, times):
        drawn.append(as_lists(launch(state, case.hidden, params, wants_logprob(case)).out))
        if found:
            continue  # the exchange of before has left the memory to one without further logprobs
        launched = launch(state, case.hidden, params, wanted_of(case))
        assert launched.logprobs is not None and launched.rest is not None
        ids, logprobs, of_ids = launched.rest.parts()
        found.append(as_answer(launched.out.token_ids, launched.logprobs, ids, logprobs, of_ids))
    prompt = None
    if folder is None and not state.whole_rows:
        tokens = wanted_of(case).token_ids[:, 0].contiguous()
        prompt = as_answer(tokens, *values_of(state.logprobs_of_prompt(case.hidden, tokens, wanted_of(case))))
    return Answers(drawn, found, prompt)


def values_of(found: Logprobs) -> tuple[torch.Tensor, ...]:
    assert found.top is not None and found.of_ids is not None
    return found.of_tokens, found.top.token_ids, found.top.logprobs, found.of_ids


def as_answer(token_ids: torch.Tensor, *values: torch.Tensor) -> dict[str, list]:
    names = ("logprobs", "top ids", "top logprobs", "of ids")
    return {"token_ids": token_ids.tolist(), **{name: one.tolist() for name, one in zip(names, values, strict=True)}}


def as_lists(output: SampleOutput) -> dict[str, list | None]:
    return {name: None if values is None else values.tolist() for name, values in output._asdict().items()}


def main(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    from sglang.srt.distributed.parallel_state import get_world_group, init_distributed_environment

    init_distributed_environment(
        world_size=num_ranks,
        rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
        backend="gloo",
    )
    said = RankSync(get_world_group()).of_all(
        {"rank": rank, "words": ["word"] * rank, "none": None, "large": 2**63 - 1}
    )
    sleep_while_waiting()
    exchange = Exchange(get_world_group())
    drawn = {
        f"{name}, parts of a multiple of {multiple}, {'by memory' if shared else 'by collectives'}": answers_in_group(
            exchange, case, multiple, folder if shared else None
        )._asdict()
        for name, case in cases().items()
        for multiple in (16, 1)
        if multiple == 16 or name.startswith("plain")
        for shared in (False, True)
    }
    print(json.dumps({"said": said, "drawn": drawn}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # an interpreter that ends may be aborted by gloo's threads
