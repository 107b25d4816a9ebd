"""Ranks in processes of this machine, without SGLang: their group, over gloo, and how they wait for each other."""

from __future__ import annotations

import time
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


def sleep_while_waiting() -> None:
    """A rank whose kernel spins on a flag of another one lets that one have the processor."""
    from triton.runtime.interpreter import InterpreterBuilder

    read = InterpreterBuilder.create_atomic_rmw

    def read_and_sleep(*arguments: Any) -> Any:
        time.sleep(WAIT_SECONDS)
        return read(*arguments)

    InterpreterBuilder.create_atomic_rmw = read_and_sleep
