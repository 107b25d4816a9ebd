"""The floor of whatever reads a head: a kernel that does nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(source_ptr, out_ptr, n, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), n // BLOCK, NUM_PROGRAMS, num_stages=STAGES):
        acc ^= tl.load(source_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), acc)


def read_call(tensor: torch.Tensor, programs_per_sm: int = 8, block: int = 2048, num_warps: int = 8, stages: int = 4):
    """Reads every byte of ``tensor`` once, whole blocks of 4-byte words of it: the floor of anything that does."""
    words = tensor.view(-1).view(torch.int32)
    programs = torch.cuda.get_device_properties(0).multi_processor_count * programs_per_sm
    out = torch.empty(programs * block, dtype=torch.int32, device=tensor.device)
    return lambda: _read_kernel[(programs,)](
        words, out, words.numel(), NUM_PROGRAMS=programs, BLOCK=block, STAGES=stages, num_warps=num_warps
    )
