"""The table as it grows: written whole after every bucket, so that whatever ends a run, a complete file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_whole
from ..kernels.rng import NOISE_ABI
from ..sources import installed_sources
from ..table import Bucket, Choice, Device, HeadShape, Table, TableError, file_name
from ..work import Path as DrawPath
from ..work import Work
from .names import key_of, label_of, path_of
from .plan import RANK, Plan
from .space import Config, space_hash
from .trials import config_data

MEASURE: dict[str, Any] = {
    "mode": "cuda_graph",
    "weights": "cold",
    "hidden": "hot",
    "profiles": "typical, peaked, flat, in all channels",
}
MOST_REJECTED = 500  # in a table; the log has all
# What of the environment a table's times depend on so much that another one is another run.
SAME_ENV = ("torch", "triton", "cuda", "sgl_flashsample")


class Publisher:
    """Collects buckets and writes the table of a plan's device and head to ``folder``. flashinfer: whether its path may
    be chosen."""

    def __init__(self, folder: Path, plan: Plan, env: dict[str, str], flashinfer: bool = False) -> None:
        self.device, self.head, self.effort = plan.device, plan.head, plan.effort
        self.path = folder / file_name(self.device.name, self.head)
        self.env, self.paths = env, plan.paths
        self.buckets: dict[str, dict[int, Bucket]] = {}
        self.configs: dict[str, Config] = {}
        self.rejected: dict[str, dict[str, Any]] = {}
        self.provenance: dict[str, Any] = {"complete": False}
        self.began = time.time()
        self.measure: dict[str, Any] = MEASURE | ({"allowed": DrawPath.FLASHINFER.value} if flashinfer else {})
        if plan.screen:
            self.measure["screen"] = plan.screen
        before = _same(self.path, self.device, self.head, env)  # its buckets stay until they are decided anew
        same_paths = before is not None and before.measure.get("allowed") == self.measure.get("allowed")
        self._before = before if same_paths else None

    def reject(self, config: Config, work: Work, why: str, detail: str) -> None:
        label = label_of(config, work.value)
        entry = {"path": path_of(config), "work": work.value, "key": key_of(config), **config_data(config)}
        self.rejected[label] = {"config": entry, "why": why, "detail": detail[:200]}

    def add(self, work: str, rows: int, bucket: Bucket, configs: dict[str, Config]) -> None:
        self.buckets.setdefault(work, {})[rows] = bucket
        self.configs |= configs

    def table(self) -> Table:
        before = self._before
        classes = {work: dict(buckets) for work, buckets in (before.classes if before else {}).items()}
        choices = dict(before.configs if before else {}) | {k: Choice.of(c) for k, c in self.configs.items()}
        for work, buckets in self.buckets.items():
            classes[work] = {**classes.get(work, {}), **buckets}
        used = {key for found in classes.values() for b in found.values() for key in (b.use, b.default, *b.tied)}
        return Table(
            device=self.device,
            head=self.head,
            configs={key: choices[key] for key in sorted(used - {""})},
            classes=classes,
            tool={"sgl_flashsample": __version__, "noise": NOISE_ABI},
            env=self.env,
            measure={**self.measure, "min_gain": self.effort.policy.min_gain},
            effort=self.effort.name,
            kernels={path: {"src": installed_sources()[path], "space": space_hash(path)} for path in self.paths},
            rejected=list(self.rejected.values())[:MOST_REJECTED],
            provenance={**self.provenance, "seconds": round(time.time() - self.began, 1)},
        )

    @property
    def flashinfer(self) -> bool:
        return "allowed" in self.measure

    def up_to_date(self) -> bool:
        """Whether the finished table is there: of this device, head, kernels and versions, at this effort or more, with
        the same paths to choose from."""
        table = self._before
        if table is None or table.provenance.get("complete") is not True or not set(self.paths) <= table.kernels.keys():
            return False
        return RANK.get(table.effort, -1) >= RANK[self.effort.name]

    def write(self) -> None:
        """Raises OSError where the folder cannot be written to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.table().dumps())


def _same(path: Path, device: Device, head: HeadShape, env: dict[str, str]) -> Table | None:
    """The table at ``path`` if it is of this device, head, kernels and versions."""
    try:
        table = Table.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TableError):
        return None
    same = (
        (table.device, table.head) == (device, head)
        and all(table.env.get(name) == env.get(name) for name in SAME_ENV)
        and all(entry.get("src") == installed_sources().get(path) for path, entry in table.kernels.items())
    )
    return table if same else None


def key_map(configs: list[Config]) -> dict[str, Config]:
    return {key_of(config): config for config in configs}
