"""Compiles kernels to GPU binaries without a GPU, through the launchers that a server uses.

    python tests/compile_targets.py resources 90 [--once | --each | --full]   what built-in choices take of the device
    python tests/compile_targets.py keys 90                 launches that would be given another one's binary
    python tests/compile_targets.py names 90                names in the cache on disk, and the constants behind them

Launchers run within ``compiling_only`` for a GPU that is not there (``pretend_gpu``): nothing is launched. Prints JSON.
Run it in a new process: Triton must not be the interpreter.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing"

try:
    import sgl_flashsample.kernels
except ImportError:  # a bare checkout, as in conftest.py
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import sgl_flashsample

    sgl_flashsample.__path__.append(sys.path[0])

FAMILIES = {80: "sm80", 89: "sm80", 90: "sm90", 100: "sm100"}
# Bytes per weight element of the heads that each capability is compiled for: float8_e4m3fn needs 8.9.
ITEMSIZES = {80: (2, 4), 89: (1,), 90: (1, 2, 4), 100: (1, 2, 4)}
MULTIPROCESSORS = 132  # about: it decides how many splits there are, and so how much each leaves behind
VOCAB, HIDDEN = 151_936, 4096


def pretend(capability: int) -> None:
    """Makes this process compile for such a GPU."""
    from sgl_flashsample.kernels.launch import Gpu, pretend_gpu

    pretend_gpu(Gpu(divmod(capability, 10), MULTIPROCESSORS))


# --- resources ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of one program: registers per thread, bytes of local memory per thread (spills), shared memory in bytes. loads:
    kernel arguments that addresses are loaded from."""

    launch: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    loads: list[str]


def compiled_by(name: str, launch: Callable[[], Any]) -> Iterator[Resources]:
    """The binaries that ``launch`` compiles."""
    from sgl_flashsample.kernels.launch import compiling_only

    with compiling_only() as binaries:
        launch()
    for binary in binaries:
        registers, spilled = register_usage(binary.asm["cubin"])
        loads = loaded_arguments(binary.asm["ttir"])
        yield Resources(name, binary.metadata.name, registers, spilled, binary.metadata.shared, loads)


@functools.cache  # half of the launches of a device are given a binary of another launch
def register_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, per thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    assert match is not None, printed
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


@functools.cache
def loaded_arguments(ttir: str) -> list[str]:
    """The kernel arguments from whose addresses, with any offset, Triton's IR loads. Arguments of a screen have the
    names of its fields."""
    from sgl_flashsample.kernels.workspace import ScreenOperands

    base = {f"%{name}": name for name in re.findall(r"%([\w.]+): !tt\.ptr<", ttir)}
    screen = [name for name in base if re.fullmatch(r"%screen(_\d+)?", name)]
    base |= dict(zip(screen, ScreenOperands._fields, strict=bool(screen)))
    loads = set()
    for result, operation, operands in re.findall(r"(%\w+) = (tt\.\w+) ([^:{]*)", ttir):
        first = re.match(r"%[\w.]+", operands)
        if first is None or first[0] not in base:
            continue
        if operation == "tt.load":
            loads.add(base[first[0]])
        elif operation in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast", "tt.reshape"):
            base[result] = base[first[0]]
    return sorted(loads)


def built_in_launches(capability: int, choices: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A name for, and the launch of, built-in choices of the device's family. choices: "full" for all of them with the
    features they are for; "each" for every kind and every configuration, but not every pair of them, with features
    of few; "once" for the same, with a mask alone, once per kind and path, and features of 2-byte heads alone; "first"
    for, of 2-byte heads, the first of each kind and path that wide ones take, but of truncation only with edits, and
    the first for plain batches of a quantised head."""
    from sgl_flashsample.defaults import builtin_table, truncation_config
    from sgl_flashsample.invariant import tile_of
    from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
    from sgl_flashsample.kernels.params import LMHead
    from sgl_flashsample.kinds import KIND_NAMES, path_of
    from sgl_flashsample.paths import Parts
    from sgl_flashsample.screen import UnwrittenScreen
    from sgl_flashsample.selfcheck import launch_once

    family, full, first = FAMILIES[capability], choices == "full", choices == "first"
    for itemsize in ITEMSIZES[capability]:
        if first and itemsize == 4:
            continue
        dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[itemsize]
        scale = torch.empty(VOCAB) if itemsize == 1 else None
        head = LMHead(torch.empty(VOCAB, HIDDEN, dtype=dtype), scale=scale)
        others = {"softcap": dataclasses.replace(head, softcap=30.0)}
        others["ragged"] = dataclasses.replace(head, vocab_size=VOCAB - 1)
        if itemsize == 2:
            others["fp16"] = LMHead(torch.empty(VOCAB, HIDDEN, dtype=torch.float16))
        truncation = truncation_config(family, itemsize, VOCAB)
        usual_screen = None if itemsize == 1 else UnwrittenScreen(head, 64)  # 0.6 GB that take a while to clear
        seen: set[Any] = set()
        entries = builtin_table(family, itemsize).entries
        widest = {(one.kind, one.path, one.rows): one for one in sorted(entries, key=lambda one: one.min_hidden)}
        for entry in entries:
            if first and entry is not widest[entry.kind, entry.path, entry.rows]:
                continue
            config = entry.configuration
            kind = KIND_NAMES[entry.kind].launched(config)
            wanted = {(kind, config)} if full else {(kind, path_of(config))} | (set() if first else {config})
            if wanted <= seen or (first and kind.truncate and not kind.edit):
                continue
            if first and itemsize == 1 and (str(kind) != "plain" or not isinstance(config, TileConfig)):
                continue
            first_of_kind = (kind, path_of(config)) not in seen
            seen |= wanted | {(kind, path_of(config))}
            if str(kind) == "plain+screen" and first:  # most sm90 choices list the groups, other devices do not
                config = dataclasses.replace(config, listed=False)
            options: list[tuple[str, LMHead, dict]] = [("", head, {})]
            # Fewer operands than all edits, which fit.
            if kind.edit and (choices == "each" or (first_of_kind and (choices != "once" or itemsize == 2))):
                options.append(("a mask alone", head, {"only_mask": True}))
            every_feature = kind.edit and kind.truncate and isinstance(config, ReadConfig)
            featured = not first and first_of_kind and (str(kind) in ("plain", "plain+screen") or every_feature)
            featured = featured and (choices != "once" or itemsize == 2)
            if (full or featured) and not isinstance(config, ScreenConfig):
                options.append(("logprobs", head, {"return_logprob": True}))
            if featured:
                # Another 2-byte dtype, a softcap or a ragged end changes no layout: not with every kind and every tile.
                options += [(name, other, {}) for name, other in others.items()]
            for name, some, given in options:
                label = f"{path_of(config)}, {kind}, {dtype}, {name or 'as usual'}: {config}"
                screen = None
                if isinstance(config, ScreenConfig):
                    screen = usual_screen if some is head else UnwrittenScreen(some, 64)
                parts = Parts(some, truncation, screen=screen)
                yield label, functools.partial(launch_once, parts, config, kind, **given)
        if itemsize == 2 and not first:
            invariant = dataclasses.replace(head, batch_invariant=True)
            kind, tile = KIND_NAMES["edit+truncate"], tile_of(invariant)  # every batch has the kernels of this kind
            label = f"fused, {kind}, {dtype}, batch-invariant: {tile}"
            yield label, functools.partial(launch_once, Parts(invariant, truncation), tile, kind)


def launches_beside_a_draw(choices: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The launches that exchange and merge the draws of ranks, the one that accepts drafts, those of a table of rows,
    and those of top logprobs and of given ids."""
    from sgl_flashsample.kernels.follow_drafts import follow_drafts
    from sgl_flashsample.kernels.merge_ranks import NUM_FIELDS, merge_records, no_record, pack_record
    from sgl_flashsample.kernels.peer_memory import PeerMemory, exchange_logprobs, exchange_records, exchange_rows
    from sgl_flashsample.selfcheck import launch_row_table

    num_bytes = PeerMemory.num_bytes(2, 65, 4096, torch.bfloat16)
    # Triton sees pointers at multiples of 16, as a GPU's allocator gives them.
    regions = [torch.zeros(num_bytes + 128, dtype=torch.uint8) for _ in range(2)]
    aligned = [region[-region.data_ptr() % 128 :][:num_bytes] for region in regions]
    memory = PeerMemory(aligned, 0, 65, 4096, torch.bfloat16)
    for return_logprob in (False, True):
        name, drawn = (
            "merge of ranks" + ", logprobs" * return_logprob,
            no_record(3, torch.device("cpu"), return_logprob),
        )
        yield f"{name}: pack", functools.partial(pack_record, drawn, 1, 5)
        yield name, functools.partial(merge_records, torch.zeros(2, 3, NUM_FIELDS), return_logprob=return_logprob)
        yield f"{name} by peer memory", functools.partial(exchange_records, memory, drawn, 1, 5)
    yield "rows by peer memory", functools.partial(exchange_rows, memory, 1, 5)
    yield "logprobs by peer memory", functools.partial(exchange_logprobs, memory, 5, 17)
    tables = (torch.zeros(3, 8, dtype=torch.int64) for _ in range(4))
    yield "path of drafts", functools.partial(follow_drafts, *tables)
    yield "table of rows", functools.partial(launch_row_table, torch.zeros(16, 64, dtype=torch.bfloat16))
    yield from own_id_launches()
    yield from logprob_launches(choices)


def own_id_launches() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The launches that draw from logits of some of the ids, with columns in their order and in any, and those of the
    next best ids of a draw."""
    from sgl_flashsample.kernels.draft_children import Splits, best_ids
    from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
    from sgl_flashsample.kernels.sample_own_ids import OwnIds
    from sgl_flashsample.kernels.workspace import Workspace
    from sgl_flashsample.paths import read_own_ids

    ids, row, spec = torch.arange(0, VOCAB, 7), torch.zeros(2, dtype=torch.int64), LogitsSpec(VOCAB)
    params = BatchParams(torch.ones(2), row, row)
    for in_order in (True, False):
        own = OwnIds(ids, VOCAB, in_order=in_order)
        logits = torch.zeros(2, len(ids), dtype=torch.bfloat16)
        name = f"draw from {len(ids)} ids, {'in order' if in_order else 'in any order'}"
        yield name, functools.partial(read_own_ids, logits, own, spec, params)
    for number, most in itertools.product((2, 4), (264, 1056)):
        splits, workspace = Splits(5, most), Workspace(10, torch.device("cpu"))
        yield f"{number} children", functools.partial(best_ids, workspace, splits, params, spec, number)


def found_by_rank(num_rows: int, k: int, num_ids: int, offset: int = 0) -> tuple[Any, Any, torch.Tensor]:
    """The arguments of ``pack_logprobs``, at addresses that are ``offset`` elements behind an aligned one."""
    from sgl_flashsample.kernels.top_logprobs import TopLogprobs

    ids = at(torch.zeros(num_rows * k, dtype=torch.int64), offset).view(num_rows, k)
    logprobs, logits = (at(torch.zeros(num_rows * k), offset).view(num_rows, k) for _ in range(2))
    of_ids = at(torch.zeros(num_rows * num_ids), offset).view(num_rows, num_ids) if num_ids else None
    top = TopLogprobs(ids, logprobs, logits, None) if k else None
    return top, of_ids, at(torch.zeros(num_rows * 2), offset).view(num_rows, 2)


def logprob_launches(choices: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The launches of top logprobs of each width and of given ids, with and without edits; the widest also with a soft
    cap, of a vocabulary with a partial group, and of other dtypes. "once": with edits, of bfloat16 alone. "first": of
    bfloat16, with and without edits."""
    from sgl_flashsample.kernels.gather_logprobs import gather_logprobs, head_logprobs
    from sgl_flashsample.kernels.logit_summary import LogitRows, RowSummary
    from sgl_flashsample.kernels.merge_logprobs import fields_of, merge_logprobs, pack_logprobs
    from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitEdits
    from sgl_flashsample.kernels.top_logprobs import WIDTHS, top_logprobs

    row, of_ids = torch.zeros(2, dtype=torch.int64), torch.zeros(2, VOCAB)
    edits = LogitEdits(of_ids, of_ids, row.new_zeros(2, VOCAB // 32, dtype=torch.int32), of_ids, row.int())
    plain = BatchParams(torch.ones(2), row, row)
    edited = dataclasses.replace(plain, edits=edits)
    known = RowSummary(log_mass=torch.zeros(2, 2))
    for k, num_ids in itertools.product((0, *WIDTHS), (0, 9)):
        name = f"{k} top logprobs and logprobs of {num_ids} ids of 8 ranks"
        yield f"{name}: pack", functools.partial(pack_logprobs, *found_by_rank(2, k, num_ids), 1, 5)
        yield name, functools.partial(merge_logprobs, torch.zeros(8, 2, fields_of(k, num_ids)), k)
    features: tuple[tuple[str, dict, BatchParams], ...] = (
        ("", {}, plain),
        (", edits", {}, edited),
        (", softcap", {"softcap": 50.0}, plain),
        (", ragged", {"vocab_size": VOCAB - 1}, plain),
    )
    for dtype in (torch.bfloat16,) if choices == "first" else (torch.bfloat16, torch.float16, torch.float32):
        weight, hidden = torch.empty(VOCAB, HIDDEN, dtype=dtype), torch.empty(2, HIDDEN, dtype=dtype)
        logits = torch.empty(2, VOCAB, dtype=dtype)
        number = 1 if choices == "once" else 2
        if dtype is torch.bfloat16:
            number = 2 if choices == "first" else len(features)
        for words, options, params in features[:number]:
            head = LMHead(weight, **options)
            rows = LogitRows(logits, head.spec, params)
            every_size = dtype is torch.bfloat16 and not options
            for width in WIDTHS if every_size else WIDTHS[-1:]:
                yield f"{width} top logprobs, {dtype}{words}", functools.partial(top_logprobs, rows, width)
            for lists in (1, 2) if every_size else (2,):
                ids = torch.zeros(lists, 9, dtype=torch.int64)
                name = f"logprobs of {lists} lists of ids, {dtype}{words}"
                yield name, functools.partial(gather_logprobs, rows, ids)
                yield name, functools.partial(gather_logprobs, rows, ids, summary=known)
                yield name, functools.partial(gather_logprobs, rows, ids, own_mass=torch.zeros(2, 2))
                yield name, functools.partial(head_logprobs, hidden, head, ids, known.log_mass, params)


def resources(capability: int, choices: str) -> list[dict]:
    """Each launch's resources; draws alone where only quantised heads are compiled for the device."""
    beside = launches_beside_a_draw(choices) if ITEMSIZES[capability] != (1,) else ()
    return [
        dataclasses.asdict(used)
        for name, launch in itertools.chain(built_in_launches(capability, choices), beside)
        for used in compiled_by(name, launch)
    ]


# --- keys -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Launches:
    """The current launch; launches that compiled a binary; and launches that reused a binary made for another one."""

    now: str = ""
    made: list[str] = dataclasses.field(default_factory=list)
    mistaken: list[str] = dataclasses.field(default_factory=list)


LAUNCHES = Launches()


class Binary:
    """In place of a compiled kernel: notes the launches for which Triton would have taken another."""

    def __init__(self, kernel: Any, specialization: str) -> None:
        self.kernel, self.specialization = kernel, specialization
        LAUNCHES.made.append(f"{LAUNCHES.now}: {kernel.__name__}")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            if specialization_of(self.kernel, arguments, {}) != self.specialization:
                LAUNCHES.mistaken.append(f"{LAUNCHES.now}: {self.kernel.__name__}")

        return run


def specialization_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Triton's key of a binary, without its options."""
    binder = kernel.device_caches[0][-1]
    return str(binder(*arguments, **options)[1])


def pretend_to_run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Binary:
    return Binary(kernel, specialization_of(kernel, arguments, options))


def at(tensor: torch.Tensor, offset: int = 0, gap: int = 0) -> torch.Tensor:
    """The same values ``offset`` elements behind an aligned address, in rows with ``gap`` elements between them."""
    rows, width = tensor.shape if tensor.dim() == 2 else (1, len(tensor))
    held = torch.zeros(offset + rows * (width + gap), dtype=tensor.dtype)
    view = held[offset:].view(rows, width + gap)[:, :width]
    view.copy_(tensor.view(rows, width))
    return view if tensor.dim() == 2 else view[0]


def variations(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments that may differ between two launches on this path with the same features."""
    for num_rows in (1, 2, 16, 17):
        yield f"{num_rows} rows", {"num_rows": num_rows}
    for name, offset, gap in (("odd address", 1, 0), ("wider rows", 0, 8), ("odd rows", 0, 3), ("rows of 16", 0, 16)):
        yield f"hidden at an {name}", {"hidden": {"offset": offset, "gap": gap}}
        yield f"weight at an {name}", {"weight": {"offset": offset, "gap": gap}}
        yield f"logits at an {name}", {"logits": {"offset": offset, "gap": gap}}
        for edit in ("additive", "scaling", "mask", "bias", "rows"):
            yield f"{edit} at an {name}", {"edits": {edit: {"offset": offset, "gap": gap if edit != "rows" else 0}}}
    for row in ("temperature", "seed", "position", "top_k", "top_p", "min_p"):
        yield f"{row} at an odd address", {"odd": row}
    for given in ((), ("additive",), ("mask",), ("mask", "rows"), ("bias", "rows"), ("additive", "mask", "bias")):
        yield f"edits {given}", {"given": given}
    yield "a mask of bools", {"bools": True}
    yield "a mask of bools alone", {"bools": True, "given": ("mask",)}
    for name, offset, gap in (("odd address", 1, 0), ("wider rows", 0, 8), ("odd rows", 0, 3), ("rows of 16", 0, 16)):
        yield f"a mask alone at an {name}", {"given": ("mask",), "edits": {"mask": {"offset": offset, "gap": gap}}}
    yield "edits of rows that are far apart", {"far": True, "num_rows": 1}
    for name, value in (("logit_scale", 0.5), ("logit_scale", 1), ("softcap", 30.0), ("vocab_start", 1600)):
        yield f"{name} {value}", {"head": {name: value} | ({"shards": 9} if name == "vocab_start" else {})}
    for vocab in (1, 16, 399, 400):
        yield f"{vocab} ids", {"head": {"vocab_size": vocab}}
    yield "float32 logits", {"head": {"logits_dtype": torch.float32}}
    for dtype in (torch.float16, torch.float32):
        yield f"{dtype}", {"dtype": dtype}
    if path != "screened":
        yield "logprobs", {"logprobs": True}
    if path == "fused":
        quantised: dict[str, Any] = {"dtype": torch.float8_e4m3fn}
        for where in ("weight", "hidden"):
            for offset, gap in ((0, 0), (1, 0), (0, 16), (0, 3)):
                yield f"quantised, {where} {offset} {gap}", quantised | {where: {"offset": offset, "gap": gap}}
        yield "quantised, scale at an odd address", quantised | {"scale": {"offset": 1}}
        yield "quantised, float16", quantised | {"head": {"hidden_dtype": torch.float16}}


def launch_variation(path: str, kind: str, config: Any, change: dict[str, Any]) -> None:
    from sgl_flashsample.kernels.int8_head import Int8Head
    from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
    from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitEdits, Truncation
    from sgl_flashsample.kernels.sample_logits import sample_logits
    from sgl_flashsample.kernels.screened_sample import screened_sample

    num_rows, dtype = change.get("num_rows", 3), change.get("dtype", torch.bfloat16)
    options = change.get("head", {})
    weight = at(torch.ones(400, 64).to(dtype), **change.get("weight", {}))
    if "truncate" in kind and "vocab_start" in options:
        return
    if dtype is torch.float8_e4m3fn:
        options = options | {"scale": at(torch.ones(400), **change.get("scale", {}))}
    head = LMHead(weight, **options)
    width = head.spec.vocab_end

    def row(name: str, dtype: torch.dtype, value: float = 1) -> torch.Tensor:
        return at(torch.full((num_rows,), value, dtype=dtype), offset=int(change.get("odd") == name))

    edits = None
    if "edit" in kind:
        shape = (num_rows, width)
        tensors = dict.fromkeys(("additive", "scaling", "bias"), torch.ones(shape))
        tensors["mask"] = torch.ones(num_rows, -(-width // 32), dtype=torch.int32)
        if change.get("bools"):
            tensors["mask"] = torch.zeros(shape, dtype=torch.bool)
        tensors["rows"] = torch.ones(num_rows, dtype=torch.int32)
        given = change.get("given", tuple(tensors))
        tensors = {name: at(tensors[name], **change.get("edits", {}).get(name, {})) for name in given}
        if change.get("far"):
            tensors["bias"] = tensors["bias"].as_strided(shape, (2**31, 1))
        edits = LogitEdits(**tensors)
    truncation = None
    if "truncate" in kind:
        truncation = Truncation(
            row("top_k", torch.int32, 5), row("top_p", torch.float32), row("min_p", torch.float32, 0)
        )
    params = BatchParams(
        row("temperature", torch.float32),
        row("seed", torch.int64),
        row("position", torch.int64),
        truncation,
        edits,
        all_greedy=kind == "greedy",
    )
    hidden = at(torch.ones(num_rows, 64, dtype=head.hidden_dtype), **change.get("hidden", {}))
    if path == "screened":
        screened_sample(hidden, head, Int8Head(head), params, config)
    elif path == "logits":
        logits = at(torch.ones(num_rows, 400, dtype=dtype), **change.get("logits", {}))
        sample_logits(logits, head.spec, params, config, return_logprob=change.get("logprobs", False))
    else:
        lm_head_sample(hidden, head, params, config, return_logprob=change.get("logprobs", False))


def launch_row_tables() -> None:
    """Stage, and gather and write with slots, positions and lines at any address, and with numbers of every kind."""
    from sgl_flashsample.kernels.gather_rows import RowBuffers, StagedBatch, gather_rows, stage_rows, write_rows
    from sgl_flashsample.kernels.host_memory import copy_words

    for num_rows, width, dtype in itertools.product((1, 2, 17), (1, 24, 64), (torch.bfloat16, torch.float32)):
        LAUNCHES.now = f"stage of {num_rows} rows, {width} columns, {dtype}"
        stage, out = torch.zeros(num_rows, width, dtype=dtype), RowBuffers.allocate(32, "cpu")
        stage_rows(StagedBatch(stage.device), torch.zeros(num_rows, 8, dtype=torch.int32), stage, out)
    for num_rows, nodes, offset in itertools.product((1, 2, 16, 17), (1, 3, 16), (0, 1)):
        LAUNCHES.now = f"table of {num_rows} rows, {nodes} nodes, {offset}"
        table = torch.zeros(num_rows, 8, dtype=torch.int32)
        slots, positions = (at(torch.zeros(rows, dtype=torch.int64), offset) for rows in (num_rows, num_rows * nodes))
        gather_rows(table, slots, positions, RowBuffers.allocate(400, "cpu"), nodes=nodes, edits=num_rows)
        write_rows(table, slots, at(table, offset))
    for num_words, tells, offset in itertools.product((1, 8, 16), (False, True), (0, 1)):
        LAUNCHES.now = f"{num_words} words, {tells}, {offset}"
        source, target = (torch.zeros(n, dtype=torch.int32) for n in (num_words, num_words + 2 * tells))
        copy_words(at(source, offset), at(target, offset), tells=tells)


def launch_logprobs() -> None:
    """Top logprobs and logprobs of given ids, with tensors at any address, and with numbers of every kind."""
    from sgl_flashsample.kernels.gather_logprobs import gather_logprobs, head_logprobs
    from sgl_flashsample.kernels.logit_summary import LogitRows, RowSummary
    from sgl_flashsample.kernels.merge_logprobs import fields_of, merge_logprobs, pack_logprobs
    from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitEdits
    from sgl_flashsample.kernels.top_logprobs import top_logprobs

    changes: list[dict[str, Any]] = [{}, {"odd": True}, {"stride": 3}, {"stride": 16}, {"softcap": 30.0}]
    changes += [{"softcap": 50.0}, {"logit_scale": 1}, {"vocab_size": 1}, {"vocab_size": 399}, {"edits": True}]
    changes += [{"original": True}, {"counts": True}, {"dtype": torch.float32}, {"logits_dtype": torch.float32}]
    for num_rows, change in itertools.product((1, 2, 17), [*changes, {}]):
        LAUNCHES.now = f"logprobs of {num_rows} rows, {change}"
        offset, dtype = int("odd" in change), change.get("dtype", torch.bfloat16)
        options = {
            name: change[name] for name in ("softcap", "logit_scale", "vocab_size", "logits_dtype") if name in change
        }
        head = LMHead(at(torch.ones(400, 64, dtype=dtype), offset, change.get("stride", 0)), **options)
        hidden = at(torch.ones(num_rows, 64, dtype=dtype), offset, change.get("stride", 0))
        logits = at(torch.ones(num_rows, 400, dtype=dtype), offset, change.get("stride", 0))
        row = at(torch.ones(num_rows, dtype=torch.int64), offset)
        edits = LogitEdits(bias=at(torch.ones(num_rows, 400), offset)) if "edits" in change else None
        params = BatchParams(at(torch.ones(num_rows), offset), row, row, edits=edits)
        original = "original" in change
        rows = LogitRows(logits, head.spec, params, original)
        counts = at(torch.ones(num_rows, dtype=torch.int32), offset) if "counts" in change else None
        log_mass = at(torch.ones(2 * num_rows), offset).view(num_rows, 2)
        for summary in (None, RowSummary(log_mass=log_mass)):
            for k in (1, 5, 16, 100):
                top_logprobs(rows, k, counts=counts, summary=summary)
            for lists, num_ids in itertools.product({1, num_rows}, (1, 16, 130)):
                ids = at(torch.ones(lists * num_ids, dtype=torch.int64), offset).view(lists, num_ids)
                gather_logprobs(rows, ids, summary=summary)
                if summary is None:
                    gather_logprobs(rows, ids, own_mass=log_mass)
                head_logprobs(hidden, head, ids, log_mass, params, original=original)

    for num_ranks, num_rows, k, num_ids in itertools.product((1, 2, 3), (1, 16), (0, 5, 16), (0, 1, 16)):
        for offset in (0, 1):
            LAUNCHES.now = f"logprobs of {num_ranks} ranks, {num_rows} rows, {k}, {num_ids}, {offset}"
            found, fields = found_by_rank(num_rows, k, num_ids, offset), fields_of(k, num_ids)
            packed = at(torch.ones(num_ranks * num_rows * fields), offset).view(num_ranks, num_rows, fields)
            pack_logprobs(*found, first=offset, num_rows=num_rows + offset)
            pack_logprobs(*found, out=packed[0])
            merge_logprobs(packed, k)
            merge_logprobs(packed, k, counts=at(torch.ones(num_rows, dtype=torch.int32), offset))


def keys() -> dict[str, list[str]]:
    """Runs many launches in one process, where each can meet the binaries of all earlier launches. mistaken: launches
    that got a binary that Triton would not have chosen. made: launches that compiled a binary. late: launches of
    ``made`` whose kernels had been compiled ahead."""
    from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
    from sgl_flashsample.kernels.params import LMHead
    from sgl_flashsample.kinds import KIND_NAMES
    from sgl_flashsample.paths import Parts
    from sgl_flashsample.screen import UnwrittenScreen
    from sgl_flashsample.selfcheck import launch_once

    triton.JITFunction.run = pretend_to_run
    tile, read = TileConfig(16, 64, 32, 4, 2), ReadConfig(16, 64, 4)
    screen = ScreenConfig(16, 64, 32, 4, 2)
    configs = {
        "fused": [
            tile,
            dataclasses.replace(tile, hidden_tma=True),
            TileConfig(16, 64, 32, 4, 2, tma=False, one_launch=True),
        ],
        "logits": [read, dataclasses.replace(read, one_launch=True)],
        "screened": [screen, dataclasses.replace(screen, listed=True, early=True, tma=False)],
    }
    kinds = ("plain", "greedy", "edit", "truncate", "edit+truncate")
    for kind, path, vocab in itertools.product(kinds, configs, (368, 367)):
        head = LMHead(torch.ones(400, 64, dtype=torch.bfloat16), vocab_size=vocab)
        LAUNCHES.now = "ahead"
        launch_once(Parts(head, screen=UnwrittenScreen(head, 1)), configs[path][0], KIND_NAMES[kind])
        for num_rows, odd in ((1, ""), (2, ""), (16, "temperature"), (17, "position")):
            LAUNCHES.now = f"{path}, {kind}, {vocab} ids, {num_rows} rows"
            change = {"num_rows": num_rows, "odd": odd, "head": {"vocab_size": vocab}}
            launch_variation(path, kind, configs[path][0], change)
    late = [one for one in LAUNCHES.made if not one.startswith("ahead")]
    LAUNCHES.made.clear()
    for kind, path in itertools.product(kinds, configs):
        for config in configs[path]:
            for name, change in [("first", {}), *variations(path), ("again", {})]:
                LAUNCHES.now = f"{path}, {kind}, {name}"
                launch_variation(path, kind, config, change)
    launch_row_tables()
    launch_logprobs()
    return {"mistaken": LAUNCHES.mistaken, "made": LAUNCHES.made, "late": late}


# --- names ----------------------------------------------------------------------------------------------------------


def kernels() -> dict[str, Any]:
    from sgl_flashsample import kernels

    by_name = {}
    for module in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda module: module.name):
        for name, value in vars(importlib.import_module(f"sgl_flashsample.kernels.{module.name}")).items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                by_name[name] = value
    return by_name


def cache_names(order: list[str]) -> dict[str, Any]:
    """Of each kernel, launched in this order, its key in the cache on disk and the values of its constants by name."""
    from sgl_flashsample.kernels.launch import compiling_only, launch

    by_kernel_name = kernels()
    for name in order:
        kernel = by_kernel_name[name]
        kernel.warmup = lambda *arguments, **options: None
        constants = {parameter.name: 0 for parameter in kernel.params if parameter.is_constexpr}
        with compiling_only():
            launch(kernel, 1, (), constants, 4, ())
    values: dict[str, dict[str, list[str]]] = {}
    for name, kernel in by_kernel_name.items():
        by_name = collections.defaultdict(set)
        for (constant, _), (value, _) in kernel.used_global_vals.items():
            by_name[constant].add(str(value))
        values[name] = {constant: sorted(these) for constant, these in by_name.items()}
    return {"keys": {name: kernel.cache_key for name, kernel in by_kernel_name.items()}, "constants": values}


def names() -> list[dict[str, Any]]:
    """``cache_names`` of several orders of launches, each in a new process."""
    every = sorted(kernels())
    orders = [every, every[::-1], *([name, *every] for name in every[::4])]
    answers = []
    for order in orders:
        read, write = os.pipe()
        if not (child := os.fork()):
            with os.fdopen(write, "w") as out:
                json.dump(cache_names(order), out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            answers.append(json.load(answer))
        os.waitpid(child, 0)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["resources", "keys", "names"])
    parser.add_argument("capability", type=int, choices=FAMILIES)
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--once", action="store_const", const="once", dest="choices", help="as --each, with features of one dtype"
    )
    some.add_argument(
        "--each", action="store_const", const="each", dest="choices", help="every kind, every configuration"
    )
    some.add_argument(
        "--full", action="store_const", const="full", dest="choices", help="their pairs, with all features"
    )
    parser.set_defaults(choices="first")
    arguments = parser.parse_args()
    pretend(arguments.capability)
    if arguments.what == "resources":
        result: Any = resources(arguments.capability, arguments.choices)
    else:
        result = keys() if arguments.what == "keys" else names()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
