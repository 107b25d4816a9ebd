"""Limits of the device: the speed of a kernel that only reads, and the rate of a large matrix product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sgl_flashsample.autotune.timing import Timer

READ_BYTES = 2**31
MATMUL = 8192  # rows and columns of the product
# Programs per multiprocessor, int32 words per step, warps, depth of the pipeline.
READERS = [(8, 2048, 8, 4), (16, 2048, 8, 4), (4, 4096, 8, 4), (8, 4096, 8, 3), (4, 8192, 8, 3), (16, 1024, 4, 4)]


@triton.jit
def _read_kernel(source_ptr, out_ptr, n, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), n // BLOCK, NUM_PROGRAMS, num_stages=STAGES):
        acc ^= tl.load(source_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), acc)


def _read_call(words: torch.Tensor, programs_per_sm: int, block: int, num_warps: int, stages: int):
    """Reads every int32 of ``words`` once."""
    programs = torch.cuda.get_device_properties(words.device).multi_processor_count * programs_per_sm
    out = torch.empty(programs * block, dtype=torch.int32, device=words.device)
    return lambda: _read_kernel[(programs,)](
        words, out, words.numel(), NUM_PROGRAMS=programs, BLOCK=block, STAGES=stages, num_warps=num_warps
    )


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """reader: reads ``READ_BYTES``, the fastest of several kernels; None without a GPU."""

    reader: Callable[[], object] | None = None
    name: str = ""
    matmul_tflop_s: float = 0.0

    @property
    def env(self) -> dict[str, object]:
        if self.reader is None:
            return {}
        return {"reader": self.name, "read_bytes": READ_BYTES, "matmul_tflop_s": self.matmul_tflop_s}


def measure_ceilings(device: torch.device) -> Ceilings:
    if device.type != "cuda":
        return Ceilings()
    words = torch.randint(-(2**31), 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device=device)
    readers: dict[str, Callable[[], object]] = {
        "{} programs per SM, {} words, {} warps, {} stages".format(*config): _read_call(words, *config)
        for config in READERS
    }
    readers["torch.amax"] = lambda: words.view(-1, 2**14).amax(-1)
    left, right = (torch.randn(MATMUL, MATMUL, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    timer = Timer(device)
    timer.warm_up(lambda step: torch.mm(left, right, out=product))
    calls = {**readers, "matmul": lambda: torch.mm(left, right, out=product)}
    timings = timer.race({name: lambda step, call=call: call() for name, call in calls.items()}, rounds=7)
    name = min(readers, key=lambda reader: timings[reader].us)
    rate = 2 * MATMUL**3 / timings["matmul"].us / 1e6
    print(f"read {READ_BYTES / timings[name].us / 1e6:.3f} TB/s ({name}); matmul {rate:.0f} TFLOP/s", flush=True)
    return Ceilings(readers[name], name, round(rate, 1))
