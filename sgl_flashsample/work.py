"""The names that tables are indexed by: what a batch asks for (``Work``), the ways to serve it (``Path``), and the
configurations of those (``Config``)."""

from __future__ import annotations

import enum

from .kernels.tiles import ReadConfig, ScreenConfig, TileConfig

Config = TileConfig | ReadConfig | ScreenConfig  # of the fused, the logits and the screened path


class Path(enum.StrEnum):
    """One way to do the last step. What each supports and does: ``paths.py``."""

    FUSED = "fused"  # one pass over the head
    LOGITS = "logits"  # a GEMM, then one reader of its output
    SCREENED = "screened"  # an INT8 copy of the head rules groups of ids out, the head decides among the rest
    FLASHINFER = "flashinfer"  # a GEMM, then FlashInfer's rejection sampling: other tokens of the same distribution


# Those that need nothing but the head, and serve any batch.
ANY_BATCH = (Path.FUSED, Path.LOGITS)
# Those that draw the same token for the same logits.
OWN_PATHS = (*ANY_BATCH, Path.SCREENED)


def path_of_config(config: Config) -> Path:
    if isinstance(config, ScreenConfig):
        return Path.SCREENED
    return Path.LOGITS if isinstance(config, ReadConfig) else Path.FUSED


class Work(enum.StrEnum):
    """What a launch does beside drawing: it decides which tile is fastest, and which ones fit the registers.

    A batch is GREEDY when it has nothing but greedy rows, neither truncated nor edited. The fused pass launches for it
    what it does for PLAIN, a reader leaves out the noise; its entry is PLAIN's wherever a table has none for it.

    A batch whose head has a screen (``screen.Screen``) is of one of the last five kinds: it may take any path of ours,
    whichever is fastest. With a truncation it is so where every such row has a small top-k; a screen does not help
    others. Where a table has nothing for such a kind, its batches take what they would without the screen, or the
    built-in choice where that is the screened path. Greedy rows leave more groups to rescore than others: what is
    fastest for SCREENED says nothing of SCREENED_GREEDY.
    """

    PLAIN = "plain"
    TRUNCATE = "truncate"
    EDIT = "edit"
    EDIT_AND_TRUNCATE = "edit+truncate"
    GREEDY = "greedy"
    SCREENED = "plain+screen"
    SCREENED_EDIT = "edit+screen"
    SCREENED_GREEDY = "greedy+screen"
    SCREENED_TRUNCATE = "truncate+screen"
    SCREENED_EDIT_AND_TRUNCATE = "edit+truncate+screen"

    @classmethod
    def of(cls, truncate: bool, edit: bool, greedy: bool = False) -> Work:
        """Of a batch whose head has no screen. greedy: every row of the batch is; it may be left unsaid."""
        if truncate or edit:
            return (cls.EDIT_AND_TRUNCATE if truncate else cls.EDIT) if edit else cls.TRUNCATE
        return cls.GREEDY if greedy else cls.PLAIN

    @property
    def truncates(self) -> bool:
        return self.unscreened in (Work.TRUNCATE, Work.EDIT_AND_TRUNCATE)

    @property
    def edits(self) -> bool:
        return self.unscreened in (Work.EDIT, Work.EDIT_AND_TRUNCATE)

    @property
    def screened(self) -> bool:
        return self in _UNSCREENED

    @property
    def greedy(self) -> bool:
        return self.unscreened is Work.GREEDY

    @property
    def with_screen(self) -> Work:
        """What such a batch is where its head has a screen that can help it."""
        return _WITH_SCREEN[self]

    @property
    def unscreened(self) -> Work:
        """What such a batch is without a screen."""
        return _UNSCREENED.get(self, self)

    @property
    def fallback(self) -> Work | None:
        """Whose entries serve where there are none for this."""
        return Work.PLAIN if self is Work.GREEDY else _UNSCREENED.get(self)

    @property
    def kernels(self) -> Work:
        """The end of the chain of fallbacks: the work whose tiles and readers are right for this one."""
        return self if self.fallback is None else self.fallback.kernels

    @property
    def screening(self) -> Work:
        """The work whose screening kernels are right for this one."""
        return Work.SCREENED if self is Work.SCREENED_GREEDY else self

    def launched(self, config: Config) -> Work:
        """The work whose launches with ``config`` these are, to the last constant: greedy rows change none of the fused
        pass's and of a screen's, but a reader leaves out the noise."""
        if isinstance(config, ScreenConfig):
            return self.screening
        return self.kernels if isinstance(config, TileConfig) else self.unscreened


_UNSCREENED = {
    Work.SCREENED: Work.PLAIN,
    Work.SCREENED_EDIT: Work.EDIT,
    Work.SCREENED_GREEDY: Work.GREEDY,
    Work.SCREENED_TRUNCATE: Work.TRUNCATE,
    Work.SCREENED_EDIT_AND_TRUNCATE: Work.EDIT_AND_TRUNCATE,
}
_WITH_SCREEN = {work: screened for screened, work in _UNSCREENED.items()} | {work: work for work in _UNSCREENED}
