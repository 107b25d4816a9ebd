"""What is worth trying: the launch spaces of ``lm_head_sample`` and ``sample_logits``, declared once, and what cannot
run removed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import triton

from ..kernels.tiles import ReadConfig, TileConfig

BLOCK_V = (64, 128, 256)
BLOCK_D = (64, 128, 256)
NUM_WARPS = (4, 8)
CTAS_PER_SM = (1, 2)
LEAST_ROWS_FIRST = 64  # rows per tile that a tensor-core instruction takes as its left operand
FLATTEN = (True, False)
MAX_BLOCK_B = 128
MAX_STAGES = 8
MIN_STAGES = 2
# Shared memory that the epilogue's reductions and layout changes take beside the pipeline's buffers.
EPILOGUE_BYTES = 8 * 1024
# Accumulator registers per thread beyond which every variant spills.
MAX_ACCUMULATORS = 128

# Of readers: rows and ids per tile, and warps. A thread has one group of 16 ids per tile, or two.
READ_TILES = (
    *((1, 512, 1), (2, 256, 1), (4, 128, 1), (8, 64, 1)),
    *((1, 1024, 1), (4, 256, 1)),
    *((1, 1024, 2), (1, 2048, 4), (4, 512, 4), (16, 128, 4)),
)
READ_STAGES = (1, 2, 3)
READ_WARPS_PER_SM = (24, 32, 64)  # that the vocabulary is cut for
READ_LEAST_PARTS = (64, 128, 256)  # where rows are truncated


def block_b_choices(num_rows: int) -> list[int]:
    """The block that holds the whole batch and, where it exists, half of it."""
    whole = min(MAX_BLOCK_B, max(16, triton.next_power_of_2(num_rows)))
    return [whole] if whole <= 32 else [whole, whole // 2]


def candidates(num_rows: int, hidden_size: int, itemsize: int, shared_memory: int, tma: bool) -> Iterator[TileConfig]:
    """Every tile that fits ``shared_memory`` bytes per multiprocessor, with the deepest pipeline that fits."""
    space = itertools.product(block_b_choices(num_rows), BLOCK_V, BLOCK_D, NUM_WARPS, CTAS_PER_SM, FLATTEN)
    for block_b, block_v, block_d, warps, ctas, flatten in space:
        rows_first = (True, False) if block_b >= LEAST_ROWS_FIRST else (False,)
        if block_d > triton.next_power_of_2(hidden_size) or block_v * block_b > MAX_ACCUMULATORS * warps * 32:
            continue
        stage_bytes = (block_v + block_b) * block_d * itemsize
        deepest = min(MAX_STAGES, (shared_memory // ctas - EPILOGUE_BYTES) // stage_bytes)
        if deepest < MIN_STAGES:
            continue
        for first, hidden_tma in itertools.product(rows_first, (True, False) if tma else (False,)):
            yield TileConfig(
                block_b,
                block_v,
                block_d,
                warps,
                deepest,
                ctas,
                flatten,
                tma,
                hidden_tma=hidden_tma,
                rows_first=first,
            )


def read_candidates(truncates: bool) -> Iterator[ReadConfig]:
    """Every reader of the declared space. truncates: for batches in which rows have a truncation."""
    least_parts = READ_LEAST_PARTS if truncates else (1,)
    for (block_b, block_v, num_warps), stages, warps, least in itertools.product(
        READ_TILES, READ_STAGES, READ_WARPS_PER_SM, least_parts
    ):
        # A cut into more programs than are resident is moot where there are many parts anyway.
        if truncates and warps != READ_WARPS_PER_SM[0]:
            continue
        yield ReadConfig(block_b, block_v, num_warps, stages, max(1, warps // num_warps), least)
