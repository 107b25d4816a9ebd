"""The table of a run: written as a whole after every decision, so that a complete file is there however a run ends.

A size is stored with its evidence where its winner is not the built-in choice; else it is one of the confirmed sizes.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..files import write_whole
from ..kernels.rng import NOISE_ABI
from ..kinds import KIND_NAMES, BatchKind, SamplingPath
from ..tables.lookup import load_table
from ..tables.schema import Entry, Table, file_name
from .decisions import Decision, by_size, decisions, larger_screen, stored, why_apart
from .plan import RANK, Plan
from .trials import set_aside

MEASURE: dict[str, Any] = {
    "mode": "cuda_graph",
    "weights": "cold",
    "hidden": "hot",
    "profiles": "typical, peaked, flat, in all channels",
}


class TableWriter:
    """Collects decisions and writes the table of a plan's device and head to ``folder``. A table of the same device,
    head, built-in choices and versions that is there keeps its sizes until they are decided anew, but for those that
    are stale; as long as it keeps one, the new table has no more effort, and is no more complete, than the old one. Any
    other table that is there is set aside when the first decision is written.

    Raises ValueError for a device without built-in choices.

    flashinfer: its path may be chosen. simulated: nothing is measured on a GPU. decided: per kind and size the winner
    with its evidence, also where that is the built-in choice. rejected: the reasons, by label. note: prints a line for
    the user.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        env: dict[str, str],
        flashinfer: bool = False,
        note: Callable[[str], None] = lambda text: None,
        simulated: bool = False,
    ) -> None:
        self.plan, self.flashinfer, self._note = plan, flashinfer, note
        self.path = folder / file_name(plan.device.name, plan.head)
        self.decided: dict[BatchKind, dict[int, Entry]] = {}
        self.rejected: dict[str, str] = {}
        self.provenance: dict[str, Any] = {"complete": False}
        self._began = time.time()
        measure = MEASURE | {"min_gain": plan.effort.policy.min_gain}
        measure |= {"allowed": SamplingPath.FLASHINFER.value} if flashinfer else {}
        measure |= {"screen": plan.screen} if plan.screen else {}
        self._empty = Table(
            device=plan.device,
            head=plan.head,
            effort=plan.effort.name,
            simulated=simulated,
            defaults=plan.defaults_digest,  # raises ValueError for a device that has none
            tool={"sgl_flashsample": __version__, "noise": NOISE_ABI},
            env=env,
            measure=measure,
        )
        self._before, self._apart = load_table(self.path)
        if self._before is not None:
            here = (self._before.device, self._before.head) == (plan.device, plan.head)
            self._apart = why_apart(self._before, self._empty) if here else "of another device or head"
        if self._apart:
            self._before = None

    def add(self, entry: Entry) -> None:
        self.decided.setdefault(KIND_NAMES[entry.kind], {})[entry.rows] = entry

    def is_default(self, entry: Entry) -> bool:
        """True where the decision is the built-in choice."""
        return not entry.flashinfer and entry.configuration == self.plan.default(entry.rows, KIND_NAMES[entry.kind])

    def table(self) -> Table:
        decided = {
            (kind, rows): Decision(entry, self.is_default(entry), entry.configuration)
            for kind, entries in self.decided.items()
            for rows, entry in entries.items()
        }
        before = self._before or Table()
        sizes = by_size(before) | decided
        keeps = len(sizes) > len(decided)
        effort, complete = self.plan.effort.name, self.provenance["complete"]
        if keeps:
            effort = min(effort, before.effort, key=lambda name: RANK.get(name, -1))
            complete = complete and before.provenance.get("complete") is True
        run = {"effort": self.plan.effort.name, "complete": self.provenance["complete"]}
        run |= {str(kind): " ".join(map(str, sorted(rows))) for kind, rows in self.decided.items()}
        seconds = round(time.time() - self._began, 1)
        return msgspec.structs.replace(
            self._empty,
            effort=effort,
            measure=self._empty.measure | (larger_screen(self._empty, before) if keeps else {}),
            provenance={**self.provenance, "complete": complete, "seconds": seconds, "run": run},
            rejected=dict(sorted(collections.Counter(self.rejected.values()).items())),
            **stored(sizes[size] for size in sorted(sizes)),
        )

    def up_to_date(self) -> bool:
        """True where the finished table is there: of this device, head and versions, at this effort or more, with every
        size of the plan. Some may be stale."""
        table = self._before
        if table is None:
            return False
        # The decisions of its last run, where it keeps sizes of less effort.
        run = table.provenance.get("run")
        run = run if isinstance(run, dict) else {}
        whole: dict[str, Any] = {kind: " ".join(map(str, table.sizes(kind))) for kind in table.kinds}
        whole |= {"effort": table.effort, "complete": table.provenance.get("complete")}
        wanted = {str(kind): set(map(str, self.plan.sizes_of(kind))) for kind in self.plan.kinds}
        return any(
            done.get("complete") is True
            and RANK.get(str(done.get("effort")), -1) >= RANK[self.plan.effort.name]
            and all(sizes <= set(str(done.get(kind, "")).split()) for kind, sizes in wanted.items())
            for done in (whole, run)
        )

    @property
    def before(self) -> Table | None:
        """The table that is there, as far as its sizes are kept."""
        return self._before

    def forget(self, stale: Container[tuple[BatchKind, int]]) -> None:
        """Keep no size that is stale, or of unknown machine code."""
        if self._before is not None:
            kept = [one for one in decisions(self._before) if one.entry.code and (one.kind, one.rows) not in stale]
            self._before = msgspec.structs.replace(self._before, **stored(kept))

    def begin_anew(self) -> None:
        """Keep no size of the table that is there: it is set aside when the first decision is written."""
        if self._before is not None:
            self._before, self._apart = None, "all is measured anew"

    def write(self) -> None:
        """Write the table. Raises OSError where the folder cannot be written to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._apart and self.path.is_file():
            self._note(f"the table that was here is kept as {set_aside(self.path).name}: {self._apart}")
        self._apart = None  # from now on the file is this table
        write_whole(self.path, self.table().dumps())
