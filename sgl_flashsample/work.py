"""The names that tables are indexed by: what a batch asks for (``Work``), the ways to serve it (``Path``), and the
configurations of those (``Config``)."""

from __future__ import annotations

import enum

from .kernels.tiles import ReadConfig, TileConfig

Config = TileConfig | ReadConfig  # of the fused path, of the logits path


class Path(enum.StrEnum):
    """One way to do the last step. What each supports and does: ``paths.py``."""

    FUSED = "fused"  # one pass over the head
    LOGITS = "logits"  # a GEMM, then one reader of its output
    FLASHINFER = "flashinfer"  # a GEMM, then FlashInfer's rejection sampling: other tokens of the same distribution


# Those that draw the same token for the same logits.
OWN_PATHS = (Path.FUSED, Path.LOGITS)


def path_of_config(config: Config) -> Path:
    return Path.LOGITS if isinstance(config, ReadConfig) else Path.FUSED


class Work(enum.StrEnum):
    """What a launch does beside drawing: it decides which tile is fastest, and which ones fit the registers.

    A batch is GREEDY when it has nothing but greedy rows, neither truncated nor edited. The fused pass launches for it
    what it does for PLAIN, a reader leaves out the noise; its entry is PLAIN's wherever a table has none for it.
    """

    PLAIN = "plain"
    TRUNCATE = "truncate"
    EDIT = "edit"
    EDIT_AND_TRUNCATE = "edit+truncate"
    GREEDY = "greedy"

    @classmethod
    def of(cls, truncate: bool, edit: bool, greedy: bool = False) -> Work:
        """greedy: every row of the batch is; it may be left unsaid."""
        if truncate or edit:
            return (cls.EDIT_AND_TRUNCATE if truncate else cls.EDIT) if edit else cls.TRUNCATE
        return cls.GREEDY if greedy else cls.PLAIN

    @property
    def truncates(self) -> bool:
        return self in (Work.TRUNCATE, Work.EDIT_AND_TRUNCATE)

    @property
    def edits(self) -> bool:
        return self in (Work.EDIT, Work.EDIT_AND_TRUNCATE)

    @property
    def fallback(self) -> Work | None:
        """Whose entries serve where there are none for this."""
        return Work.PLAIN if self is Work.GREEDY else None
