"""The names that tables are indexed by: the ways to do the last step, and what a batch asks for."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from .kernels.config import ReadConfig, ScreenConfig, TileConfig

if TYPE_CHECKING:
    from .kernels.params import BatchParams

Config = TileConfig | ReadConfig | ScreenConfig  # of the fused, the logits and the screened path


class SamplingPath(enum.StrEnum):
    """One way to do the last step. ``Head.draw`` picks one for a batch; ``paths.py`` launches it."""

    FUSED = "fused"  # one pass over the head
    LOGITS = "logits"  # a GEMM, then one reader of its output
    SCREENED = "screened"  # an INT8 copy of the head rules groups of ids out, the head decides among the rest
    FLASHINFER = "flashinfer"  # a GEMM, then FlashInfer's rejection sampling: other tokens of the same distribution

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"path is {value!r}; expected one of {', '.join(cls)}")


# Rows of the largest batch with a screen that is measured: beyond, the integer arithmetic takes as long as reading
# 2-byte weights.
MAX_SCREENED_ROWS = 64

# Bytes of the smallest head whose screen is raced without a table. Smaller ones are read from memory in less time than
# the launches of a screen take, and stay in the cache of a large GPU in part.
MIN_RACED_BYTES = 250_000_000

# The paths that draw the same token for the same logits, with their configurations.
CONFIGS: dict[SamplingPath, type[Config]] = {
    SamplingPath.FUSED: TileConfig,
    SamplingPath.LOGITS: ReadConfig,
    SamplingPath.SCREENED: ScreenConfig,
}


def path_of(config: Config) -> SamplingPath:
    """The path that a configuration is of."""
    return next(path for path, kind in CONFIGS.items() if isinstance(config, kind))


class BatchKind(NamedTuple):
    """The properties of a batch, beside its size, that decide which configuration is fastest and which ones fit the
    registers.

    truncate: some row has top-k, top-p or min-p. edit: some row has penalties, a grammar or a bias. greedy: every row
    is greedy, and the batch has neither. screen: the head has a screen (``screen.Screen``) that can serve the batch; it
    serves truncated rows with a small top-k only.
    """

    truncate: bool = False
    edit: bool = False
    greedy: bool = False
    screen: bool = False

    @classmethod
    def of(cls, params: BatchParams) -> BatchKind:
        """The kind of a batch whose head has no screen."""
        truncate, edit = params.truncation is not None, params.edits is not None
        return cls(truncate, edit, params.all_greedy and not truncate and not edit)

    def __str__(self) -> str:
        """ "plain", "edit+truncate", "greedy+screen", ..."""
        words = [word for word, applies in (("edit", self.edit), ("truncate", self.truncate)) if applies]
        words = words or ["greedy" if self.greedy else "plain"]
        return "+".join([*words, "screen"] if self.screen else words)

    @property
    def fallback(self) -> BatchKind | None:
        """The kind whose entries serve where a table has none for this one: a batch with a screen is served as without
        it, a greedy one as a plain one. None for the other kinds."""
        if self.screen:
            return self.unscreened
        return self._replace(greedy=False) if self.greedy else None

    @property
    def screened(self) -> BatchKind:
        return self._replace(screen=True)

    @property
    def unscreened(self) -> BatchKind:
        return self._replace(screen=False)

    def launched(self, config: Config) -> BatchKind:
        """One kind for all that launch identical kernels with ``config``: whether all rows are greedy changes nothing
        in the fused pass and in a screen, but a reader of greedy rows leaves out the noise."""
        if isinstance(config, ScreenConfig):
            return self._replace(greedy=False)
        if isinstance(config, TileConfig):
            return self.unscreened._replace(greedy=False)
        return self.unscreened


_UNSCREENED = tuple(
    BatchKind(truncate, edit, greedy)
    for truncate, edit, greedy in (
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (True, True, False),
        (False, False, True),
    )
)
BATCH_KINDS = (*_UNSCREENED, *(kind.screened for kind in _UNSCREENED))
KIND_NAMES = {str(kind): kind for kind in BATCH_KINDS}
PLAIN = BATCH_KINDS[0]
