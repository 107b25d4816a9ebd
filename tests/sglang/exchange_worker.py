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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from head_states import Processor, make_head
from kernel_cases import KINDS, Case, make_case

from sgl_flashsample import sample
from sgl_flashsample.kernels.params import BatchParams, SampleOutput
from sgl_flashsample.kernels.peer_memory import PeerMemory
from sgl_flashsample.sglang.draw import launch
from sgl_flashsample.sglang.exchange import Exchange, RankSync
from sgl_flashsample.sglang.head import HeadState

CPU = torch.device("cpu")
SHAPES = ((1, 401), (2, 32), (17, 401))  # rows, ids; of three ranks, the last one holds no id of 32
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


def draw_in_group(exchange: Exchange, case: Case, multiple: int, folder: Path | None) -> list[SampleOutput]:
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
    return [launch(state, case.hidden, params, wants_logprob(case)).out for params in params_of(case, times)]


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
    exchange = Exchange(get_world_group())
    drawn = {
        f"{name}, parts of a multiple of {multiple}, {'by memory' if shared else 'by collectives'}": [
            as_lists(output) for output in draw_in_group(exchange, case, multiple, folder if shared else None)
        ]
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
