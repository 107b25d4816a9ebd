"""Ranks in processes of this machine, without SGLang: their group, over gloo, and how they wait for each other."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from head_states import CPU

WAIT_SECONDS = 0.001


class Group:
    """What SGLang's GroupCoordinator is to us, of all ranks."""

    device = CPU

    def __init__(self) -> None:
        self.rank_in_group, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.cpu_group = torch.distributed.group.WORLD

    def _all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        torch.distributed.all_to_all_single(output, tensor)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        torch.distributed.all_gather_into_tensor(output, tensor)


def join(rank: int, num_ranks: int, port: int, seconds: float) -> None:
    """This process becomes a rank. seconds: that it may wait for another one."""
    sleep_while_waiting()
    store = torch.distributed.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
    limit = datetime.timedelta(seconds=seconds)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)


def fork(num_ranks: int, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """The result of ``work`` on each rank, as JSON keeps it. Ranks are forks of this process, with its imports. A rank
    that fails ends the others."""
    children, files = {}, [folder / f"{num_ranks}-{rank}.json" for rank in range(num_ranks)]
    for rank, file in enumerate(files):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                file.write_text(json.dumps(work(rank)))
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)  # an interpreter that ends may be aborted by gloo's threads
        children[child] = rank
    failed = None
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        if status and failed is None:
            failed = rank
            for other in children:
                os.kill(other, 9)
    if failed is not None:
        raise RuntimeError(f"rank {failed} of {num_ranks} failed")
    return [json.loads(file.read_text()) for file in files]


def sleep_while_waiting() -> None:
    """A rank whose kernel spins on a flag of another one lets that one have the processor."""
    from triton.runtime.interpreter import InterpreterBuilder

    read = InterpreterBuilder.create_atomic_rmw

    def read_and_sleep(*arguments: Any) -> Any:
        time.sleep(WAIT_SECONDS)
        return read(*arguments)

    InterpreterBuilder.create_atomic_rmw = read_and_sleep
