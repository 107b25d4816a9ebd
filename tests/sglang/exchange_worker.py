"""One of several ranks in a group of gloo: draws batches from its part of a head, exchanges, and prints what it got.

python tests/sglang/exchange_worker.py RANK NUM_RANKS PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from kernel_cases import KINDS, Case, make_case

from sgl_flashsample import LMHead, sample, sample_from_logits
from sgl_flashsample.kernels.merge_ranks import no_record
from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.sglang.exchange import Exchange

CPU = torch.device("cpu")
SHAPES = ((1, 401), (2, 33), (17, 401))  # rows, ids; of three ranks, the last one holds no id of 33


def cases() -> dict[str, Case]:
    return {
        f"{kind}, {rows} rows, {vocab} ids": make_case(rows, vocab, CPU, kind, torch.float32, seed=rows)
        for kind in KINDS
        for rows, vocab in SHAPES
    }


def wants_logprob(case: Case) -> bool:
    return len(case.hidden) != 2


def draw_whole(case: Case, return_logprob: bool) -> SampleOutput:
    return sample(case.hidden, case.head, case.params, return_logprob=return_logprob, path="logits")


def draw_in_group(exchange: Exchange, case: Case, return_logprob: bool, multiple: int) -> SampleOutput:
    """As a rank of a server: it has equally many rows of the weight as the others, a multiple of so many."""
    weight, vocab = case.head.weight, case.head.vocab_size
    width = -(-vocab // exchange.num_ranks // multiple) * multiple
    start = exchange.rank * width
    weight = torch.nn.functional.pad(weight, (0, 0, 0, width * exchange.num_ranks - len(weight)))[start : start + width]
    if case.params.truncation is not None or multiple % 16:
        return exchange.draw_rows(
            case.hidden @ weight.T,
            case.params,
            lambda rows, params: sample_from_logits(rows, params, vocab_size=vocab, return_logprob=return_logprob),
        )
    head = LMHead.of_rank(weight, exchange.rank, exchange.num_ranks, vocab)
    if head is None:
        return exchange.merge(no_record(len(case.hidden), CPU, return_logprob))
    return exchange.merge(sample(case.hidden, head, case.params, return_logprob=return_logprob))


def as_lists(output: SampleOutput) -> dict[str, list | None]:
    return {name: None if values is None else values.tolist() for name, values in output._asdict().items()}


def main(rank: int, num_ranks: int, port: int) -> None:
    from sglang.srt.distributed.parallel_state import get_world_group, init_distributed_environment

    init_distributed_environment(
        world_size=num_ranks,
        rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
        backend="gloo",
    )
    exchange = Exchange(get_world_group())
    print(
        json.dumps(
            {
                f"{name}, parts of a multiple of {multiple}": as_lists(
                    draw_in_group(exchange, case, wants_logprob(case), multiple)
                )
                for name, case in cases().items()
                for multiple in (16, 1)
                if multiple == 16 or name.startswith("plain")
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
