"""The table as it grows: written as a whole after every decision, so that a complete file is there however a run ends.

A size is stored with its evidence where its winner is not the built-in choice; else it is one of the confirmed sizes.
"""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_whole
from ..kernels.rng import NOISE_ABI
from ..kinds import KIND_NAMES, BatchKind, SamplingPath
from ..tables.fingerprint import installed_fingerprints
from ..tables.lookup import load_table
from ..tables.schema import Entry, Table, file_name
from .labels import GEMM
from .plan import RANK, Plan
from .space import space_hash
from .tables import confirmed_of

MEASURE: dict[str, Any] = {
    "mode": "cuda_graph",
    "weights": "cold",
    "hidden": "hot",
    "profiles": "typical, peaked, flat, in all channels",
}
# What of the environment a table's times depend on so much that another one is another run.
SAME_ENV = ("torch", "triton", "cuda", "sgl_flashsample")


class TableWriter:
    """Collects decisions and writes the table of a plan's device and head to ``folder``. A table of the same device,
    head, kernels, built-in choices and versions that is there keeps its sizes until they are decided anew.

    Raises ValueError for a device without built-in choices.

    flashinfer: whether its path may be chosen. decided: per kind and size what won, with its evidence, also where that
    is the built-in choice. rejected: the reasons, by label.
    """

    def __init__(self, folder: Path, plan: Plan, env: dict[str, str], flashinfer: bool = False) -> None:
        self.plan, self.env, self.flashinfer = plan, env, flashinfer
        self.path = folder / file_name(plan.device.name, plan.head)
        self.decided: dict[BatchKind, dict[int, Entry]] = {}
        self.rejected: dict[str, str] = {}
        self.provenance: dict[str, Any] = {"complete": False}
        self._defaults = plan.defaults_digest  # raises ValueError for a device that has none
        self._began = time.time()
        self._measure = MEASURE | {"min_gain": plan.effort.policy.min_gain}
        self._measure |= {"allowed": SamplingPath.FLASHINFER.value} if flashinfer else {}
        self._measure |= {"screen": plan.screen} if plan.screen else {}
        self._before = self._same_before()

    def _same_before(self) -> Table | None:
        table, _ = load_table(self.path)
        fingerprints = installed_fingerprints()
        same = (
            table is not None
            and (table.device, table.head) == (self.plan.device, self.plan.head)
            and all(table.env.get(name) == self.env.get(name) for name in SAME_ENV)
            and all(hashes.get("src") == fingerprints.get(path) for path, hashes in table.kernels.items())
            and table.defaults == self._defaults
            and table.measure.get("allowed") == self._measure.get("allowed")
        )
        return table if same else None

    def add(self, entry: Entry) -> None:
        self.decided.setdefault(KIND_NAMES[entry.kind], {})[entry.rows] = entry

    def is_default(self, entry: Entry) -> bool:
        """Whether the decision is the built-in choice."""
        return not entry.flashinfer and entry.launch == self.plan.default(entry.rows, KIND_NAMES[entry.kind])

    def table(self) -> Table:
        before = self._before or Table()
        times: dict[str, dict[int, tuple[float, float]]] = {}  # of the confirmed sizes, and of their GEMMs
        for name, old in before.confirmed.items():
            gemm_us = old.gemm_us or [0.0] * len(old.rows)
            times[name] = {rows: (us, gemm) for rows, us, gemm in zip(old.rows, old.us, gemm_us, strict=True)}
        entries = {(entry.kind, entry.rows): entry for entry in before.entries}
        for entry in (entry for sizes in self.decided.values() for entry in sizes.values()):
            entries.pop((entry.kind, entry.rows), None)
            times.setdefault(entry.kind, {}).pop(entry.rows, None)
            if self.is_default(entry):
                times[entry.kind][entry.rows] = (entry.us, entry.others.get(GEMM, 0.0))
            else:
                entries[entry.kind, entry.rows] = entry
        kinds = [str(kind) for kind in KIND_NAMES.values() if times.get(str(kind))]
        fingerprints = installed_fingerprints()
        return Table(
            device=self.plan.device,
            head=self.plan.head,
            effort=self.plan.effort.name,
            defaults=self._defaults,
            tool={"sgl_flashsample": __version__, "noise": NOISE_ABI},
            env=self.env,
            measure=self._measure,
            kernels={path: {"src": fingerprints[path], "space": space_hash(path)} for path in self.plan.paths},
            provenance={**self.provenance, "seconds": round(time.time() - self._began, 1)},
            rejected=dict(sorted(collections.Counter(self.rejected.values()).items())),
            entries=list(entries.values()),
            confirmed={kind: confirmed_of(times[kind]) for kind in kinds},
        )

    def up_to_date(self) -> bool:
        """Whether the finished table is there: of this device, head, kernels and versions, at this effort or more, with
        every size of the plan."""
        table = self._before
        if table is None or table.provenance.get("complete") is not True:
            return False
        sizes_there = all(set(self.plan.sizes_of(kind)) <= set(table.sizes(str(kind))) for kind in self.plan.kinds)
        return sizes_there and RANK.get(table.effort, -1) >= RANK[self.plan.effort.name]

    def write(self) -> None:
        """Raises OSError where the folder cannot be written to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.table().dumps())
