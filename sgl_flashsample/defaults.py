"""The built-in choices: what a batch takes where no tuned table says otherwise.

They are tables like the tuned ones, ``tables/builtin-*.json``, one per device family and size of a weight element. An
entry serves batches of up to ``rows`` rows, and the last one larger batches too. The entries of sm90 for 2-byte weights
are those that tuning runs on an H100 or an H200 confirmed or chose; all others compile for their device with few
register spills or none, and are not measured (``evidence_of``). For 2-byte weights on those devices, a cost model says
from how many rows on a batch takes the logits path (``cost_model.py``); entries give each path its configurations.

On a CPU kernels are interpreted: there the configuration is computed, for as few programs as the interpreter allows.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .cost_model import fused_rows, is_modelled
from .files import read_plain
from .kernels.config import (
    DEFAULT_TRUNCATION,
    GROUP_SIZE,
    MIN_BLOCK_D,
    ReadConfig,
    ScreenConfig,
    TileConfig,
    TruncationConfig,
    next_power_of_2,
)
from .kinds import BatchKind, Config, SamplingPath
from .tables.schema import ITEMSIZE, MAX_BYTES, Entry, HeadShape, Table

if TYPE_CHECKING:
    import torch

    from .kernels.launch import Gpu
    from .kernels.params import LMHead

SHIPPED = Path(__file__).parent / "tables"
# Major compute capability -> family. Ampere, Ada and the consumer Blackwells share the smallest shared memory.
FAMILIES = {8: "sm80", 9: "sm90", 10: "sm100", 11: "sm80", 12: "sm80"}
LEAST_E4M3 = (8, 9)  # compute capability from which on kernels can read float8_e4m3fn
INTERPRETED = "interpreted"
# All batches of a batch-invariant head take the configuration of this one.
INVARIANT_ROWS, INVARIANT_KIND = 64, BatchKind(edit=True)
MEASURED, MEASURED_ON = ("sm90", 2), ("H100", "H200")  # family and bytes per weight element; GPUs
MODELLED = (("sm80", 2), ("sm100", 2))  # families with a cost model for weights of so many bytes
MAX_INTERPRETED_SCREEN_ROWS = 32  # of a head with a screen: speed does not matter, and the path gets tested
MAX_INTERPRETED_WEIGHTS = 2**23  # beyond, reading the head takes seconds; PyTorch's GEMM reads it in milliseconds


class HeadTraits(NamedTuple):
    """The properties of a head and its device that the built-in choices depend on. family: of the device, or
    ``INTERPRETED``. has_gemm: a GEMM rounds logits as the head requires, and is fast: it takes several times as long
    where the number of logits in a row is no multiple of 8, and where the weight has to be converted first.
    batch_invariant: every batch takes one configuration. gpu: the one by whose cost model the fused path ends; None
    leaves that to the built-in table."""

    family: str
    itemsize: int  # bytes per weight element
    vocab_size: int
    hidden_size: int
    has_gemm: bool = True
    batch_invariant: bool = False
    gpu: Gpu | None = None

    @classmethod
    def of(cls, head: LMHead) -> HeadTraits:
        """Raises ValueError on a device without built-in choices, and on one that cannot convert the weight."""
        weight = head.weight
        family = family_of_device(weight.device)
        if head.scale is not None and not converts_e4m3(weight.device):
            raise ValueError(
                f"weight is {weight.dtype} on {weight.device}; expected a device of compute capability 8.9 or newer"
            )
        has_gemm = head.gemm_gives_logits and weight.shape[0] % 8 == 0 and head.scale is None
        traits = cls(family, weight.element_size(), head.vocab_size, weight.shape[1], has_gemm, head.batch_invariant)
        if (family, traits.itemsize) not in MODELLED:
            return traits
        from .kernels.launch import gpu_of

        return traits.modelled_on(gpu_of(weight.device))

    @classmethod
    def of_shape(cls, shape: HeadShape, family: str) -> HeadTraits:
        """The traits of a head as tables name it, whose weight is as wide as servers hold it."""
        return cls(family, ITEMSIZE[shape.dtype], shape.vocab, shape.hidden, not shape.is_quantised)

    def modelled_on(self, gpu: Gpu | None) -> HeadTraits:
        """The same with the cost model of ``gpu``, where it has one."""
        return self._replace(gpu=gpu) if gpu is not None and is_modelled(gpu) else self

    @property
    def unmodelled(self) -> HeadTraits:
        """The same without a cost model. Built-in choices that a tuned table was measured against, and refers to, are
        those of its family alone: the tuner, which may run elsewhere, and a server mean the same ones."""
        return self._replace(gpu=None)


def evidence_of(traits: HeadTraits, device_name: str) -> str:
    """The measurements behind the built-in choices for a head on a device of that name, in words; empty where kernels
    are interpreted."""
    if traits.family == INTERPRETED:
        return ""
    if (traits.family, traits.itemsize) != MEASURED:
        by_cost = traits.gpu is not None and traits.has_gemm
        path = "; the path of a batch by a cost model of bandwidth and multiprocessors" if by_cost else ""
        return f"compiled for GPUs of this kind, measured on none{path}"
    there = any(name in device_name for name in MEASURED_ON)
    return f"measured on {' or '.join(MEASURED_ON)}{'' if there else ', not on this GPU'}"


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels on this device can read float8_e4m3fn. Interpreted ones can."""
    from .kernels.launch import gpu_of

    gpu = gpu_of(device)
    return gpu is None or gpu.capability >= LEAST_E4M3


def family_of(compute_capability: str) -> str | None:
    """The device family of "9.0"; None where no entry fits it."""
    return FAMILIES.get(int(compute_capability.split(".")[0]))


@functools.cache
def family_of_device(device: torch.device) -> str:
    """Raises ValueError on a device without built-in choices."""
    import torch

    from .kernels.launch import gpu_of

    gpu = gpu_of(device) if torch.version.hip is None else None
    if gpu is None and device.type == "cpu":
        return INTERPRETED
    family = None if gpu is None else family_of("{}.{}".format(*gpu.capability))
    if family is not None:
        return family
    raise ValueError(f"device is {device}; expected a CUDA device of compute capability 8.0 or newer")


@functools.cache
def builtin_table(family: str, itemsize: int) -> Table:
    """The table of a device family. Raises FileNotFoundError where there is none."""
    return Table.loads(read_plain(SHIPPED / f"builtin-{family}-{itemsize}byte.json", MAX_BYTES))


@functools.cache
def defaults_digest(family: str, itemsize: int, hidden_size: int) -> str:
    """Changes with every built-in choice for heads of this width: what a tuned table was measured against."""
    table = builtin_table(family, itemsize)
    lines = [
        repr((kind, str(path), entry.rows, entry.configuration, entry.on_request))
        for kind in sorted({entry.kind for entry in table.entries})
        for path in (None, *SamplingPath)
        for entry in _entries(table, hidden_size, kind, path)
    ]
    text = "\n".join([*lines, repr(sorted(table.truncation.items()))])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# A dispatch table asks for 513 sizes of each of the kinds: with room for fewer, none would still be there for the next.
@functools.lru_cache(maxsize=1 << 14)
def default_config(traits: HeadTraits, num_rows: int, kind: BatchKind) -> Config:
    """The built-in configuration of a batch of ``num_rows`` rows."""
    if traits.batch_invariant:
        return default_config_on(traits, SamplingPath.FUSED, num_rows, kind)
    if traits.family == INTERPRETED:
        path = SamplingPath.FUSED
        if kind.screen and num_rows <= MAX_INTERPRETED_SCREEN_ROWS:
            path = SamplingPath.SCREENED
        elif traits.vocab_size * traits.hidden_size > MAX_INTERPRETED_WEIGHTS and traits.has_gemm:
            path = SamplingPath.LOGITS
        return _interpreted(traits, path, num_rows)
    entry = _serving(traits, num_rows, kind)
    if traits.gpu is not None and entry.path != SamplingPath.SCREENED:
        entry = _serving_by_cost(traits, traits.gpu, num_rows, kind)
    if entry.path == SamplingPath.LOGITS and not traits.has_gemm:
        return default_config_on(traits, SamplingPath.FUSED, num_rows, kind)
    return entry.configuration


@functools.lru_cache(maxsize=4096)
def default_config_on(traits: HeadTraits, path: SamplingPath, num_rows: int, kind: BatchKind) -> Config:
    """The built-in configuration of a batch of ``num_rows`` rows on this path."""
    if traits.batch_invariant:
        num_rows, kind = (GROUP_SIZE if traits.family == INTERPRETED else INVARIANT_ROWS), INVARIANT_KIND
    if traits.family == INTERPRETED:
        return _interpreted(traits, path, num_rows)
    return _serving_on(traits, path, num_rows, kind).configuration


def on_request_configs(traits: HeadTraits, num_rows: int, kind: BatchKind) -> list[Config]:
    """The built-in configurations of a batch of ``num_rows`` rows that only callers who ask for their path get."""
    paths = [SamplingPath.SCREENED] if kind.screen else [SamplingPath.FUSED]
    if traits.has_gemm and not kind.screen:
        paths.append(SamplingPath.LOGITS)
    entries = [_serving_on(traits, path, num_rows, kind) for path in paths]
    return [entry.configuration for entry in entries if entry.on_request]


def _serving_by_cost(traits: HeadTraits, gpu: Gpu, num_rows: int, kind: BatchKind) -> Entry:
    """The entry on the path that the cost model takes for the fastest: the fused one for whole tiles up to their limit,
    as a tile takes as long however many of its rows exist, and for one tile of the smallest size whatever its limit.
    """
    first, fused = (_serving_on(traits, SamplingPath.FUSED, rows, kind) for rows in (1, num_rows))
    tile = fused.configuration
    assert isinstance(tile, TileConfig)
    limit = fused_rows(gpu, traits.vocab_size, traits.hidden_size, tile).of(kind)
    if num_rows <= max(first.configuration.block_b, limit // tile.block_b * tile.block_b):
        return fused
    return _serving_on(traits, SamplingPath.LOGITS, num_rows, kind)


def _serving_on(traits: HeadTraits, path: SamplingPath, num_rows: int, kind: BatchKind) -> Entry:
    kind = kind.screened if path is SamplingPath.SCREENED else kind.unscreened
    return _serving(traits, num_rows, kind._replace(greedy=kind.greedy and path is SamplingPath.LOGITS), path)


def _serving(traits: HeadTraits, num_rows: int, kind: BatchKind, path: SamplingPath | None = None) -> Entry:
    """The entry of the smallest size that is not smaller, of this kind or of its fallback; else the last one. path:
    None for the fastest one."""
    entries = _entries(builtin_table(traits.family, traits.itemsize), traits.hidden_size, str(kind), path)
    fallback = kind.fallback if path is not SamplingPath.SCREENED else None
    if fallback is not None and (not entries or entries[-1].rows < num_rows):
        return _serving(traits, num_rows, fallback, path)
    return next((entry for entry in entries if entry.rows >= num_rows), entries[-1])


def _entries(table: Table, hidden_size: int, kind: str, path: SamplingPath | None) -> list[Entry]:
    """The entries of one kind for heads of this width, sorted by size; of two for one size, the one for wider heads.
    path: None for entries that no caller has to ask for."""
    by_rows: dict[int, Entry] = {}
    for entry in sorted(table.entries, key=lambda entry: -entry.min_hidden):
        of_path = not entry.on_request if path is None else entry.path == path
        if entry.kind == kind and of_path and entry.min_hidden <= hidden_size:
            by_rows.setdefault(entry.rows, entry)
    return [by_rows[rows] for rows in sorted(by_rows)]


def truncation_config(family: str, itemsize: int, vocab_size: int) -> TruncationConfig:
    """How truncated rows are drawn, whatever the batch size and the path."""
    if family == INTERPRETED:
        block = min(max(GROUP_SIZE, next_power_of_2(vocab_size)), 2**16)
        return TruncationConfig(1, 4, block, search_splits=1, search_warps=4, window=2, gather=64)
    fields = builtin_table(family, itemsize).truncation
    return TruncationConfig(**fields) if fields else DEFAULT_TRUNCATION


def all_configs(family: str, itemsize: int) -> list[Config]:
    """Every built-in configuration of a family, whatever it is for: places for a search to start."""
    return list(dict.fromkeys(entry.configuration for entry in builtin_table(family, itemsize).entries))


def _interpreted(traits: HeadTraits, path: SamplingPath, num_rows: int) -> Config:
    """Interpreted programs cost milliseconds each: as few as the interpreter's block limit of 2**20 allows."""

    def cover(number: int, least: int, most: int) -> int:
        return min(max(least, next_power_of_2(max(1, number))), most)

    if path is SamplingPath.LOGITS:
        block_b = cover(num_rows, 1, 64)
        return ReadConfig(
            block_b, cover(traits.vocab_size, 2 * GROUP_SIZE, 2**20 // block_b), 4, ctas_per_sm=1, reduce_rows=block_b
        )
    block_d = cover(traits.hidden_size, MIN_BLOCK_D, 256)
    block_b = cover(num_rows, 16, 128)
    block_v = cover(traits.vocab_size, 32, 2**19 // max(block_b, block_d))
    if path is SamplingPath.FUSED:
        return TileConfig(block_b, block_v, block_d, 4, 1, flatten=False, tma=False, reduce_rows=block_b)
    return ScreenConfig(
        block_b,
        block_v,
        block_d,
        4,
        1,
        flatten=False,
        tma=False,
        chunk=1024,
        rescore_d=block_d,
        rescore_stages=1,
    )
