"""Which configuration the batches of a head take: a pure look-up, by batch size and kind.

The paths that a table chooses from draw the same token for the same logits (near-ties of scores excepted): the choice
is a matter of speed alone. The logits may differ between them: a GEMM of the vendor adds up in another order than the
fused pass, and may move a logit by a unit in its last place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .defaults import HeadTraits, default_config, default_config_on, truncation_config
from .kernels.config import ScreenConfig, TruncationConfig
from .kinds import BATCH_KINDS, PLAIN, BatchKind, Config, SamplingPath, path_of

if TYPE_CHECKING:
    from .kernels.params import LMHead

Tuned = Mapping[BatchKind, Mapping[int, Config]]  # batch size -> configuration

# Batches up to this size are looked up by place; a larger one takes the built-in choice of its size.
DENSE_ROWS = 512


class Choice(NamedTuple):
    """config: the batch's configuration. asked: the kinds whose sizes were looked up, in this order; the last one
    decided. measured: a tuned table has this size of the last kind; else ``config`` is the built-in choice for it."""

    config: Config
    asked: tuple[BatchKind, ...]
    measured: bool


class DispatchTable:
    """Which configuration batches of one head take: the built-in choices, or a tuned table on top of them. Immutable;
    resolved once, for every batch size that a server is prepared for.

    tuned: choices other than the built-in ones. measured: sizes that a tuned table, or a race at the start
    (``screen_race.py``), has decided, for the built-in choice or another. A greedy batch that was not measured takes
    what a plain one takes; a batch with a screen that was not measured takes the screened path if that is its built-in
    choice, else what it would take without a screen. flashinfer: sizes of truncated batches that take the flashinfer
    path where their caller wants the distribution alone.
    screening: False leaves nothing to the screened path.
    """

    def __init__(
        self,
        traits: HeadTraits,
        tuned: Tuned | None = None,
        measured: Mapping[BatchKind, Collection[int]] | None = None,
        flashinfer: Collection[int] = (),
        *,
        screening: bool = True,
    ) -> None:
        self.traits, self.screening = traits, screening
        self.flashinfer = frozenset(flashinfer)
        self._tuned = {kind: dict((tuned or {}).get(kind, {})) for kind in BATCH_KINDS}
        self._measured = {
            kind: frozenset((measured or {}).get(kind, ())) | self._tuned[kind].keys() for kind in BATCH_KINDS
        }
        self._dense = {
            kind: tuple(self.choice(rows, kind).config for rows in range(DENSE_ROWS + 1)) for kind in BATCH_KINDS
        }
        self._checked: Callable[[], LMHead | None] = _no_head  # weak: tables outlive heads

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_checked": _no_head}  # a weak reference cannot be pickled

    def choice(self, num_rows: int, kind: BatchKind = PLAIN) -> Choice:
        """The configuration of a batch, and the kinds whose sizes were looked up for it."""
        asked = [kind if self.screening else kind.unscreened]
        while True:
            default = self.default(num_rows, asked[-1])
            if num_rows > DENSE_ROWS:
                return Choice(default, tuple(asked), measured=False)
            measured, fallback = num_rows in self._measured[asked[-1]], asked[-1].fallback
            if measured or fallback is None or isinstance(default, ScreenConfig):
                return Choice(self._tuned[asked[-1]].get(num_rows, default), tuple(asked), measured)
            asked.append(fallback)

    def check(self, head: LMHead) -> None:
        """Raise ValueError unless this table is for heads with the traits of ``head``."""
        if head is not self._checked():
            if (traits := HeadTraits.of(head)).unmodelled != self.traits.unmodelled:
                raise ValueError(f"table is for {self.traits}; expected one for the head's {traits}")
            self._checked = weakref.ref(head)

    @functools.cached_property
    def truncation_config(self) -> TruncationConfig:
        """How truncated rows are drawn, on any path."""
        return truncation_config(self.traits.family, self.traits.itemsize, self.traits.vocab_size)

    def lookup(self, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """The configuration of a batch: a tile of the fused path, a reader of the logits path or, for a kind with a
        screen, one of the screened path."""
        return self._dense[kind][num_rows] if num_rows <= DENSE_ROWS else self.default(num_rows, kind)

    def lookup_on(self, path: SamplingPath, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """The configuration of a batch on a given path."""
        config = self.lookup(num_rows, kind)
        return config if path_of(config) is path else default_config_on(self.traits, path, num_rows, kind)

    def default(self, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """The configuration that a batch would take without a tuned table."""
        return default_config(self.traits, num_rows, kind if self.screening else kind.unscreened)

    def is_measured(self, num_rows: int, kind: BatchKind) -> bool:
        """True if a tuned table has decided what such a batch takes."""
        return self.choice(num_rows, kind).measured

    def takes_flashinfer(self, num_rows: int, kind: BatchKind) -> bool:
        return num_rows in self.flashinfer and kind == BatchKind(truncate=True)

    def screened_rows(self, max_rows: int, *, measured: bool = False) -> int:
        """The rows of the largest batch of up to ``max_rows`` rows that is screened if its head has a screen; 0 where
        none is. measured: because it was measured, not as the built-in choice alone."""
        kinds = [kind for kind in BATCH_KINDS if kind.screen]
        for rows in range(max_rows, 0, -1):
            for kind in kinds:
                known = rows in self._measured[kind] or not measured
                if known and isinstance(self.lookup(rows, kind), ScreenConfig):
                    return rows
        return 0

    def configs_up_to(self, max_rows: int, *, screened: bool = False) -> Iterator[tuple[BatchKind, int, Config]]:
        """Configurations of batches of 1 to ``max_rows`` rows, each with a batch size that takes it. Kinds that launch
        the same kernels are listed once. screened: also of batches whose head has a screen."""
        seen: set[tuple[BatchKind, Config]] = set()
        for kind in BATCH_KINDS:
            if kind.screen and not screened:
                continue
            for num_rows in range(1, max_rows + 1):
                config = self.lookup(num_rows, kind)
                launched = (kind.launched(config), config)
                if launched not in seen:
                    seen.add(launched)
                    yield kind, num_rows, config

    def with_choices(self, tuned: Tuned) -> DispatchTable:
        """The same with these choices besides, as measured ones; of kinds that are named, with these alone."""
        return self._replaced(tuned={**self._tuned, **tuned})

    def without(self, refused: Config, kind: BatchKind) -> DispatchTable:
        """The same with the built-in choice wherever ``kind`` takes ``refused``. Greedy and plain batches launch nearly
        the same kernels, and so do batches with and without a screen: what is refused for one is refused for all."""
        kernels = (kind.truncate, kind.edit)
        tuned = {
            other: {rows: c for rows, c in entries.items() if c != refused or (other.truncate, other.edit) != kernels}
            for other, entries in self._tuned.items()
        }
        return self._replaced(tuned=tuned)

    def without_flashinfer(self) -> DispatchTable:
        return self._replaced(flashinfer=())

    def without_screen(self) -> DispatchTable:
        """The same with nothing on the screened path."""
        return self._replaced(screening=False)

    def _replaced(self, **changes: Any) -> DispatchTable:
        same: dict[str, Any] = {"tuned": self._tuned, "flashinfer": self.flashinfer, "screening": self.screening}
        return DispatchTable(self.traits, measured=self._measured, **(same | changes))


def _no_head() -> None:
    """The head of a table that was compared with none yet."""


@functools.lru_cache(maxsize=256)
def _default_table(traits: HeadTraits) -> DispatchTable:
    return DispatchTable(traits)


def default_table(head: LMHead) -> DispatchTable:
    """The built-in choices for ``head``. Raises ValueError on a device without any."""
    return _default_table(HeadTraits.of(head))


@functools.lru_cache(maxsize=256)
def reading_table(traits: HeadTraits) -> DispatchTable:
    """The choices of ``api.sample_from_logits``: for each kind and size, the built-in one for logits in memory."""
    traits = traits.unmodelled._replace(hidden_size=0, has_gemm=True)
    sizes = range(1, DENSE_ROWS + 1)
    kinds = [kind for kind in BATCH_KINDS if not kind.screen]
    chosen = {
        kind: {rows: default_config_on(traits, SamplingPath.LOGITS, rows, kind) for rows in sizes} for kind in kinds
    }
    return DispatchTable(traits, chosen, screening=False)
