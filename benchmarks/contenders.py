"""The contenders of races: every path of ours through ``Head``, and every way to get tokens without us."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, Shape, reason_of

import sgl_flashsample
from sgl_flashsample.autotune import baselines
from sgl_flashsample.autotune.timing import Call
from sgl_flashsample.autotune.workload import TORCH_DTYPES, Workload, quantize_rows
from sgl_flashsample.kernels.params import Edit, LMHead, LogitEdits
from sgl_flashsample.kinds import PLAIN, BatchKind, SamplingPath
from sgl_flashsample.tools.samplings import SAMPLINGS, Sampling

OURS = tuple(map(str, (SamplingPath.FUSED, SamplingPath.LOGITS, SamplingPath.SCREENED)))
PICKED, PICKED_WITH_SCREEN = "picked", "picked with screen"  # the path that a batch takes by itself
SCREENED = (str(SamplingPath.SCREENED), PICKED_WITH_SCREEN)
NOTHING = baselines.NOTHING  # the sampling of what draws no token
READ = "read"  # a kernel that reads as many bytes as the head has, and does nothing else
BASELINES = (baselines.GEMM, baselines.ARGMAX, baselines.MULTINOMIAL, baselines.EXPONENTIAL, baselines.FLASHINFER)
MAX_SCREENED_ROWS = 64
MAX_SMALL_TOP_K = 64
EAGER = "eager"  # mark of a baseline that no CUDA graph can hold: it is timed with its host time
MIN_SLOTS, SLOTS_PER_ROW = 1 << 16, 1024  # sizes of a workspace: more than any configuration needs


@dataclasses.dataclass(frozen=True)
class Selection:
    """A choice of contenders: paths (ours and baselines) and names of ``SAMPLINGS``. tuned: with the tuned table that a
    server would find, not the built-in choices. compared: an older tree of the project whose paths are raced too.
    quantised: our paths are also raced on the same head in float8_e4m3fn."""

    paths: tuple[str, ...]
    samplings: tuple[str, ...]
    tuned: bool = False
    compared: Path | None = None
    quantised: bool = False


@dataclasses.dataclass(frozen=True)
class Entrant:
    """One way to do a step. form: how, where a path has several, or its configuration. picked: a batch takes it by
    itself. older: of the older tree. dtype: of the head, as tables name it, where heads of two dtypes are raced;
    else empty."""

    path: str
    sampling: str
    form: str
    call: Call
    picked: bool = False
    older: bool = False
    dtype: str = ""

    @property
    def name(self) -> str:
        words = ["older"] * self.older + [self.dtype] * bool(self.dtype) + [self.path, self.sampling]
        return f"{' '.join(words)}: {self.form}"


class Tree:
    """One tree of the project, for one head. An older tree is imported under another name, so that both run in one
    process: its modules import each other by relative names only.

    tuned: of ``Selection``. rows: of the largest batch. screened_rows: of the largest batch with a screen. head: more
    options of ``LMHead``. dtype: of ``Entrant``.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        softcap: float | None,
        rows: int,
        *,
        tuned: bool,
        folder: Path | None,
        dtype: str = "",
        **head: Any,
    ):
        self._api = sgl_flashsample if folder is None else import_tree(folder)
        self.is_older, self.dtype = folder is not None, dtype
        self.head = self._api.LMHead(weight, softcap=softcap, **head)
        self.table = self._table(tuned)
        self.screened_rows = min(rows, MAX_SCREENED_ROWS)
        slots = 4096 if DRY_RUN else max(MIN_SLOTS, SLOTS_PER_ROW * rows)
        self.workspace = self._module("kernels.workspace").Workspace(slots, DEVICE)

    @functools.cached_property
    def screen(self) -> Any:
        return self._module("screen").Screen(self.head, self.screened_rows)

    def drawer(self, screened: bool) -> Callable[..., Any]:
        """``Head.draw``, with the screen or without it."""
        parts = {"table": self.table, "workspace": self.workspace, "screen": self.screen if screened else None}
        return self._api.Head(self.head, **parts).draw

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self._api.__name__}.{name}")

    def _table(self, tuned: bool) -> Any:
        if tuned:
            return self._module("tables.lookup").resolve(self.head).dispatch
        return self._module("dispatch").default_table(self.head)

    def _config(self, sampling: Sampling, rows: int, path: str | None, screened: bool) -> Any:
        """The configuration that such a batch takes, on ``path`` if that is given."""
        if path is None and sampling.truncation is not None:  # as ``Head.draw``
            screened = screened and 1 <= sampling.truncation[0] <= self.table.truncation_config.max_small_top_k
        kind = self._module("kinds").BatchKind(
            sampling.truncation is not None, bool(sampling.edits), sampling.temperature == 0.0, screened
        )
        return self.table.lookup_on(self._api.SamplingPath(path), rows, kind) if path else self.table.lookup(rows, kind)

    def _label(self, config: Any) -> str:
        return self._module("autotune.labels").key_of(config)

    def labels(self, rows: int, selection: Selection) -> tuple[str, ...]:
        """Labels of all configurations that batches of ``rows`` rows are raced with."""
        return tuple(
            self._label(self._config(SAMPLINGS[name], rows, path if path in OURS else None, path in SCREENED))
            for name in selection.samplings
            for path in selection.paths
            if path not in BASELINES
        )

    def _params(self, batch: Workload, sampling: Sampling) -> list[Any]:
        """``BatchParams`` of each call of a graph."""
        api, truncation, edits = self._api, None, None
        if sampling.truncation is not None:
            top_k, top_p, min_p = sampling.truncation
            limits = full(batch, top_k, torch.int32), full(batch, top_p), full(batch, min_p)
            truncation = api.Truncation(*limits, max_top_k=top_k or None)
        if sampling.edits:
            flags = sum(Edit[name.upper()] for name in sampling.edits)  # a server always says which row has which edits
            given = {name: getattr(edits_of(batch), name) for name in sampling.edits}
            edits = api.LogitEdits(**given, rows=full(batch, flags, torch.int32))
        temperature = full(batch, sampling.temperature)
        return [
            api.BatchParams(temperature, batch.seed, position, truncation, edits, sampling.temperature == 0.0)
            for position in batch.position
        ]

    def entrant(self, batch: Workload, name: str, path: str) -> Entrant:
        """name: one of ``SAMPLINGS``. path: one of ``OURS``, ``PICKED`` or ``PICKED_WITH_SCREEN``."""
        sampling, screened = SAMPLINGS[name], path in SCREENED
        forced = path if path in OURS else None
        config, picked = (self._config(sampling, batch.rows, which, screened) for which in (forced, None))
        which_path = None if forced is None else self._api.SamplingPath(forced)
        params, draw = self._params(batch, sampling), self.drawer(screened)

        def call(step: int) -> torch.Tensor:
            out = draw(batch.hidden, params=params[step], path=which_path, return_logprob=sampling.logprob)
            return out.token_ids

        return Entrant(path, name, self._label(config), call, config == picked, self.is_older, self.dtype)


def import_tree(folder: Path) -> Any:
    """The package in ``folder``, a checkout or what a wheel unpacks to, under another name."""
    name = "sgl_flashsample_older"
    if name not in sys.modules:
        package = folder.resolve() / "sgl_flashsample"
        # In a checkout, kernels/ and autotune/ lie beside the package.
        locations = [str(package), str(package.parent)]
        spec = importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=locations
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except OSError as error:
            del sys.modules[name]
            raise ValueError(f"{folder} holds no package sgl_flashsample: {error.strerror}") from None
    return sys.modules[name]


def trees(shape: Shape, weight: torch.Tensor, rows: int, selection: Selection) -> list[Tree]:
    """This one and, if that is asked for, the older one, or this one with the head quantised. rows: of the largest
    batch."""
    if selection.quantised:
        make = functools.partial(Tree, softcap=shape.softcap, rows=rows, tuned=selection.tuned, folder=None)
        quantised, scale = quantize_rows(weight)
        half = next(name for name, dtype in TORCH_DTYPES.items() if dtype is weight.dtype)
        return [
            make(weight, dtype=half),
            make(quantised, dtype="e4m3", scale=scale, hidden_dtype=weight.dtype),
        ]
    folders = [None, *([selection.compared] if selection.compared is not None else [])]
    return [Tree(weight, shape.softcap, rows, tuned=selection.tuned, folder=folder) for folder in folders]


def entrants(ours: Sequence[Tree], batch: Workload, flashinfer: Any, selection: Selection) -> list[Entrant]:
    """All that ``selection`` asks for and that supports such a batch. flashinfer: ``import_flashinfer()`` or None."""
    entered = []
    for name in selection.samplings:
        for path in selection.paths:
            if path in BASELINES or (path in SCREENED and is_unscreened(batch, SAMPLINGS[name], path)):
                continue
            entered += [tree.entrant(batch, name, path) for tree in ours]
    if not any(path in BASELINES for path in selection.paths):
        return entered
    return entered + [one for one in _baselines(batch, flashinfer, selection.samplings) if one.path in selection.paths]


def is_unscreened(batch: Workload, sampling: Sampling, path: str) -> bool:
    """True if no screen serves such a batch. A truncated batch with a large top-k, or with none, is screened only where
    the path is given."""
    top_k = sampling.truncation[0] if sampling.truncation is not None else 1
    asks = path == SamplingPath.SCREENED or 1 <= top_k <= MAX_SMALL_TOP_K
    return batch.rows > MAX_SCREENED_ROWS or sampling.logprob or not asks


def _baselines(batch: Workload, flashinfer: Any, names: Sequence[str]) -> Iterator[Entrant]:
    """The baselines of samplings without edits: with penalties, a grammar or a bias no other sampler draws from the
    GEMM's logits."""
    compiled = None if DRY_RUN else functools.partial(torch.compile, dynamic=False, fullgraph=True)
    draws = {"t1": baselines.PLAIN, "greedy": baselines.GREEDY}
    gemm = next(baselines.baselines(baseline_batch(batch, (0, 1.0, 0.0))))
    yield Entrant(gemm.name, NOTHING, gemm.form, gemm.call)
    for name in names:
        sampling = SAMPLINGS[name]
        if sampling.edits or sampling.logprob or sampling.temperature not in (0.0, 1.0):
            continue
        wanted = draws.get(name, baselines.TRUNCATED)
        inputs = baseline_batch(batch, sampling.truncation or (0, 1.0, 0.0))
        for one in baselines.baselines(inputs, flashinfer=flashinfer, compile=compiled):
            if one.draws == wanted:
                yield Entrant(one.name, name, one.form, one.call)


def baseline_batch(
    batch: Workload, truncation: tuple[int, float, float], heads: Sequence[LMHead] = ()
) -> baselines.BaselineBatch:
    """The inputs of baselines, with these limits in every row. heads: copies of the batch's head, read in turns."""
    top_k, top_p, min_p = truncation
    return dataclasses.replace(
        batch.for_baselines(list(heads) or [batch.head], PLAIN),
        top_k=full(batch, top_k, torch.int32),
        top_p=full(batch, top_p),
        min_p=full(batch, min_p) if min_p else None,
    )


def full(batch: Workload, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[B]``, the same value for each row."""
    return torch.full((batch.rows,), value, dtype=dtype, device=batch.hidden.device)


def edits_of(batch: Workload) -> LogitEdits:
    """Edits of every kind, in every row: ``[B, V]`` float32 three times, and a mask."""
    edits = batch.params(BatchKind(edit=True))[0].edits
    assert edits is not None
    return edits


def import_flashinfer() -> tuple[Any, str | None]:
    """``flashinfer.sampling``, or None and the reason why it is not there."""
    try:
        return baselines.import_flashinfer(), None
    except Exception as error:  # its import looks for compilers and GPUs
        return None, reason_of(error)
