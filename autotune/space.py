"""Which tiles are worth trying: the launch space of ``lm_head_sample``, declared once, and what cannot run removed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import triton

from ..kernels.tiles import TileConfig

BLOCK_V = (64, 128, 256)
BLOCK_D = (64, 128, 256)
NUM_WARPS = (4, 8)
CTAS_PER_SM = (1, 2)
FLATTEN = (True, False)
MAX_BLOCK_B = 128
MAX_STAGES = 8
MIN_STAGES = 2
# Shared memory that the epilogue's reductions and layout changes take beside the pipeline's buffers.
EPILOGUE_BYTES = 8 * 1024
# Accumulator registers per thread beyond which every variant spills.
MAX_ACCUMULATORS = 128


def block_b_choices(num_rows: int) -> list[int]:
    """The block that holds the whole batch and, where it exists, half of it."""
    whole = min(MAX_BLOCK_B, max(16, triton.next_power_of_2(num_rows)))
    return [whole] if whole <= 32 else [whole, whole // 2]


def candidates(num_rows: int, hidden_size: int, itemsize: int, shared_memory: int, tma: bool) -> Iterator[TileConfig]:
    """Every tile that fits ``shared_memory`` bytes per multiprocessor, with the deepest pipeline that fits."""
    space = itertools.product(block_b_choices(num_rows), BLOCK_V, BLOCK_D, NUM_WARPS, CTAS_PER_SM, FLATTEN)
    for block_b, block_v, block_d, warps, ctas, flatten in space:
        if block_d > triton.next_power_of_2(hidden_size) or block_v * block_b > MAX_ACCUMULATORS * warps * 32:
            continue
        stage_bytes = (block_v + block_b) * block_d * itemsize
        deepest = min(MAX_STAGES, (shared_memory // ctas - EPILOGUE_BYTES) // stage_bytes)
        if deepest >= MIN_STAGES:
            yield TileConfig(block_b, block_v, block_d, warps, deepest, ctas, flatten, tma)
