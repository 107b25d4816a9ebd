"""A cost model of the fused pass and the GEMM, for GPUs on which neither was measured: a roofline.

Either path reads the head from memory once, however many rows a batch has, until its operations take longer than that.
The GEMM does more operations per second, but its logits are written and read again. ``fused_rows`` finds the number of
rows up to which the fused pass takes less time.

The fused pass has two roofs of its own. Each block of rows loads the head anew, from L2: small tiles keep the tensor
cores waiting. On an H200 the programs of a multiprocessor load about as many bytes per cycle whatever their tile is:
fewer through pointers than through tensor descriptors.

All shares are of the largest clocks that a driver names, which a GPU at its power limit does not reach.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from .kinds import BatchKind

if TYPE_CHECKING:
    from .kernels.config import TileConfig
    from .kernels.launch import Gpu

# Multiply-adds per multiprocessor and cycle, by compute capability: 16-bit operands, sums in float32, none sparse.
# Other GPUs, such as those that share their memory with a CPU, have no model.
MULTIPLY_ADDS = {(8, 0): 1024, (8, 6): 512, (8, 9): 512, (9, 0): 2048, (10, 0): 4096, (10, 3): 4096, (12, 0): 512}
GEFORCE = 0.5  # of that on GeForce cards, where sums are in float32

# Shares and bytes as an H200 reached them (``tests/core/test_cost_model.py`` compares).
FUSED_EFFICIENCY, GEMM_EFFICIENCY = 0.58, 0.66  # of the multiply-adds
MEMORY_EFFICIENCY = 0.9  # of the memory's bandwidth
LAUNCH_SECONDS = 8e-6  # of a GEMM and its reader, beyond those of the fused pass
LOADED_BYTES = {False: 30.0, True: 41.0}  # per multiprocessor and cycle, without and with tensor descriptors
# A multiprocessor with fewer multiply-adds is assumed to load fewer bytes in proportion. That errs on the side of the
# GEMM: a tenth is lost where it comes too early, while the time of a fused pass beyond its limit grows with the rows.
FULL_LOADS = 1024

MOST_ROWS = 256  # the largest batch of which the fused pass was the fastest, on an H100 with most heads
# The limit of edited or truncated batches, as a part of ``FusedRows.reading`` with their own tiles. On an H200, the
# measured built-in table ends them after 64 rows of 105, and both at once after 32 of 52. Per logit, a truncation or
# edits cost the fused pass about what they cost a reader, and registers besides.
PART = 2 / 3


class FusedRows(NamedTuple):
    """Rows of the largest batch for which the fused pass takes no longer than (plain) a GEMM and its reader, (reading)
    reading the head."""

    plain: int
    reading: int

    def of(self, kind: BatchKind) -> int:
        """Rows of the largest batch of ``kind`` for which the fused pass is the faster path."""
        return int(PART * self.reading) if kind.truncate or kind.edit else self.plain


def is_modelled(gpu: Gpu) -> bool:
    """True for a GPU of a known kind that names its clocks."""
    return gpu.capability in MULTIPLY_ADDS and gpu.clock > 0 and gpu.bandwidth > 0


@functools.lru_cache(maxsize=1024)
def fused_rows(gpu: Gpu, vocab_size: int, hidden_size: int, tile: TileConfig) -> FusedRows:
    """The limits of batches with this tile, for a head with 2 bytes per element, on a GPU that ``is_modelled``."""
    multiply_adds = MULTIPLY_ADDS[gpu.capability]
    bandwidth, cycles = MEMORY_EFFICIENCY * gpu.bandwidth, gpu.multiprocessors * gpu.clock
    tensor_cores = 2 * multiply_adds * (GEFORCE if gpu.is_geforce else 1.0) * cycles
    # A tile of R rows and C ids does 2 RC operations with each R + C elements of 2 bytes.
    per_byte = tile.block_b * tile.block_v / (tile.block_b + tile.block_v)
    loaded = LOADED_BYTES[tile.tma] * min(1.0, multiply_adds / FULL_LOADS) * cycles
    fused = min(FUSED_EFFICIENCY * tensor_cores, loaded * per_byte)
    gemm = GEMM_EFFICIENCY * tensor_cores

    weights, operations = vocab_size * hidden_size, 2.0 * vocab_size * hidden_size
    read = 2 * weights / bandwidth

    def fused_seconds(rows: int) -> float:
        return max(read, rows * operations / fused)

    def gemm_seconds(rows: int) -> float:
        logits = 4 * vocab_size * rows  # bytes: 2 written and 2 read
        return max(read, rows * operations / gemm) + logits / bandwidth + LAUNCH_SECONDS

    slower = (rows for rows in range(1, MOST_ROWS + 1) if fused_seconds(rows) > gemm_seconds(rows))
    return FusedRows(next(slower, MOST_ROWS + 1) - 1, min(MOST_ROWS, int(read * fused / operations)))
