"""From a head on this machine to the choices that its batches take: the tuned table that fits, on the built-in ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import re
from collections.abc import Iterable, Iterator

import torch
import triton

from .choices import DENSE_ROWS, Choices, Config
from .kernels.head import LMHead
from .lookup import USED_AS_FOUND, Found, Match, Target, bucket_for, config_problem, find
from .table import Device, HeadShape
from .tuned import Shape
from .work import Work

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclasses.dataclass(frozen=True)
class Resolution:
    """choices: what batches take. found: the table behind them, or None. about: what was looked for, in words.
    warnings: one line for each file that is not used as it is, and why."""

    choices: Choices
    found: Found | None
    about: str
    warnings: tuple[str, ...]

    @property
    def buckets(self) -> int:
        """How many entries of the table are in use."""
        classes = {} if self.found is None else self.found.table.classes
        return sum(self.choices.is_tuned(rows, Work(work)) for work, buckets in classes.items() for rows in buckets)

    def line(self) -> str:
        """One line for a log."""
        if self.found is None:
            return f"no tuned table for {self.about}: built-in choices for all batches"
        misses = "; ".join(self._misses()) or "none"
        return (
            f"tuned table {self.found.file} ({self.found.match}, {self.found.source}): {self.buckets} buckets in use, "
            f"batches without one: {misses}{self._about_flashinfer()}"
        )

    def _about_flashinfer(self) -> str:
        sizes = self.choices.flashinfer
        return f"; FlashInfer draws truncated batches of {ranges_of(sizes)} rows without seeds" if sizes else ""

    def _misses(self) -> Iterator[str]:
        """Ranges of the batch sizes that have the built-in choice, per class."""
        tuned = set(self.found.table.classes) if self.found is not None else set()
        for work in Work:
            if work.screened and work not in tuned:
                continue  # of a table that was measured without a screen
            sizes = [rows for rows in range(1, DENSE_ROWS + 1) if not self.choices.is_tuned(rows, work)]
            if sizes:
                yield f"{work} {ranges_of(sizes)}"


def ranges_of(sizes: Iterable[int]) -> str:
    """ "1-4, 8"."""
    numbered = itertools.groupby(enumerate(sorted(sizes)), lambda at: at[1] - at[0])
    runs = [[rows for _, rows in run] for _, run in numbered]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@functools.cache
def device_of(device: torch.device) -> Device:
    """``device`` as tables name it; "cpu" where kernels are interpreted."""
    if device.type != "cuda":
        return Device(device.type, "0.0", 0, 0, 0)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.name,
        f"{properties.major}.{properties.minor}",
        properties.multi_processor_count,
        getattr(properties, "L2_cache_size", 0) >> 20,
        getattr(properties, "shared_memory_per_block_optin", 0),
    )


def head_shape_of(head: LMHead, tp: int = 1) -> HeadShape | None:
    """``head`` as tables name it. tp: how many shards hold it. None for a head whose logits are kept in another dtype
    than the weight's: no table is measured for one."""
    weight = head.weight
    if head.rounding is not weight.dtype:
        return None
    return HeadShape(head.vocab_size, weight.shape[1], DTYPE_NAMES[weight.dtype], tp, head.softcap is not None)


@functools.cache
def environment() -> dict[str, str]:
    """The versions that times depend on, as in ``Table.env``."""
    found = {"triton": triton.__version__, "torch": str(torch.__version__), "cuda": torch.version.cuda or "none"}
    try:
        with open("/proc/driver/nvidia/version") as file:
            driver = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read(4096))
    except OSError:
        driver = None
    if driver is not None:
        found["driver"] = driver.group()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["flashinfer"] = importlib.metadata.version("flashinfer-python")
    return found


def target_of(head: LMHead, tp: int = 1) -> Target | None:
    """What a table is wanted for; None where there can be none."""
    shape = head_shape_of(head, tp)
    return None if shape is None else Target(device_of(head.weight.device), shape, environment())


def resolve(head: LMHead, *, tp: int = 1, file: str | os.PathLike[str] | None = None) -> Resolution:
    """The choices for ``head`` from the tuned table that fits it, or the built-in ones.

    Reads files: once per head, at start. tp: how many shards hold the head. file: the table to use; None for the one
    that ``lookup.find`` finds. A table never makes this raise; warnings say what of one is not used.

    Raises ValueError for a device without kernels.
    """
    target = target_of(head, tp)
    if target is None:
        return built_in(head, "a head with logits in another dtype")
    found, warnings = find(target, file)
    return apply(head, target, found, warnings)


def built_in(head: LMHead, about: str, warnings: tuple[str, ...] = ()) -> Resolution:
    """No table."""
    return Resolution(Choices(Shape.of(head)), None, about, warnings)


def apply(head: LMHead, target: Target, found: Found | None, warnings: list[str]) -> Resolution:
    """The resolution of ``head`` with this table, wherever it was found."""
    about = f"{target.device.name}, head {target.head.vocab} x {target.head.hidden} {target.head.dtype}"
    if found is None:
        return built_in(head, about, tuple(warnings))
    warnings = list(warnings)
    if found.match not in USED_AS_FOUND:
        advice = (
            "tune anew" if found.match is Match.FAMILY else "tune anew, or check with `sgl-flashsample tune verify`"
        )
        warnings.append(
            f"{found.file} is {found.match} ({'; '.join(found.differs)}): its choices may be slow; {advice}"
        )
    tuned: dict[Work, dict[int, Config]] = {}
    flashinfer: set[int] = set()
    unusable: dict[str, str] = {}
    for work in Work:
        buckets = found.table.classes.get(work, {})
        for rows in range(1, DENSE_ROWS + 1):
            bucket = bucket_for(buckets, rows)
            if bucket is None:
                continue
            key = buckets[bucket].use
            choice = found.table.configs[key]
            problem = config_problem(choice, target.device, target.head.dtype, work)
            if problem is not None or choice.launch is None:
                unusable[key] = f"{key}: {problem}"
                continue
            tuned.setdefault(work, {})[rows] = choice.launch
            # Ranks would have to agree on the noise of a call; a shard knows nothing of a truncation.
            if buckets[bucket].distribution_only and work is Work.TRUNCATE and target.head.tp == 1:
                flashinfer.add(rows)
    if unusable:
        warnings.append(f"{found.file}: not used, {'; '.join(sorted(unusable.values()))[:500]}")
    return Resolution(Choices(Shape.of(head), tuned, flashinfer), found, about, tuple(warnings))
