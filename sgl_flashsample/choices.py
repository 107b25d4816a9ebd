"""Which path and configuration each batch of a head takes: the built-in choices, or a tuned table on top of them.

Resolved once, for every batch size that a server is prepared for: a step looks its own up by place.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

from .kernels.head import LMHead
from .kernels.tiles import DrawConfig, ScreenConfig
from .tuned import Shape, draw_on, path_of, read_for, screen_of, tile_of
from .work import Config, Path, Work, path_of_config

Tuned = Mapping[Work, Mapping[int, Config]]  # batch size -> configuration

# Batches up to this size are looked up by place; a larger one has the built-in choice of its size.
DENSE_ROWS = 512
_SCREENED = [work for work in Work if work.screened]


class Choices:
    """For the heads of one shape. Immutable; ``choices_for`` a head gives the built-in ones.

    tuned: what differs from the built-in choices. Where it has nothing for greedy batches, they take what it has for
    plain ones; where it has nothing for batches with a screen, the screened path if the built-in choice is that, else
    what they would take without. flashinfer: sizes of truncated batches that take the flashinfer path where their
    caller wants the distribution alone; every other batch of these sizes has the choice that it would have without.
    screening: False leaves nothing to the screened path.
    """

    def __init__(
        self,
        shape: Shape,
        tuned: Tuned | None = None,
        flashinfer: Collection[int] = (),
        *,
        screening: bool = True,
    ) -> None:
        self.shape = shape
        self.flashinfer = frozenset(flashinfer)
        self.screening = screening
        self._tuned: dict[Work, dict[int, Config]] = {work: dict((tuned or {}).get(work, {})) for work in Work}
        if not screening:
            self._tuned |= {work: {} for work in Work if work.screened}
        self._dense = {work: self._resolve(work) for work in Work}
        self._checked: Callable[[], LMHead | None] = lambda: None  # weak: choices outlive heads

    def _resolve(self, work: Work) -> tuple[Config, ...]:
        return tuple(self._tuned_for(rows, work) or self.built_in(rows, work) for rows in range(DENSE_ROWS + 1))

    def _tuned_for(self, num_rows: int, work: Work) -> Config | None:
        """What the table has for such a batch, under its own work or one that this falls back to."""
        found = self._tuned[work].get(num_rows)
        if found is not None or work.fallback is None or isinstance(self.built_in(num_rows, work), ScreenConfig):
            return found
        return self._tuned_for(num_rows, work.fallback)

    def check(self, head: LMHead) -> None:
        """Raise ValueError unless these are for heads of this shape."""
        if head is not self._checked():
            if (shape := Shape.of(head)) != self.shape:
                raise ValueError(f"choices are for {self.shape}; expected them for the head's {shape}")
            self._checked = weakref.ref(head)

    @functools.cached_property
    def draw(self) -> DrawConfig:
        """How rows with a truncation are drawn, on any path."""
        return draw_on(self.shape.device, self.shape.vocab_size)

    def pick(self, num_rows: int, work: Work = Work.PLAIN) -> Config:
        """What a batch takes: a tile of the fused path, a reader of the logits path or, for work with a screen, what
        the screened path launches."""
        if num_rows <= DENSE_ROWS:
            return self._dense[work][num_rows]
        return self.built_in(num_rows, work)

    def on(self, path: Path, num_rows: int, work: Work = Work.PLAIN) -> Config:
        """What a batch takes that is to have this path."""
        picked = self.pick(num_rows, work)
        return picked if path_of_config(picked) is path else self._built_in_on(path, num_rows, work)

    def takes_flashinfer(self, num_rows: int, work: Work) -> bool:
        return num_rows in self.flashinfer and work is Work.TRUNCATE

    def without_flashinfer(self) -> Choices:
        return Choices(self.shape, self._tuned, screening=self.screening)

    def without_screen(self) -> Choices:
        """The same with nothing on the screened path."""
        return Choices(self.shape, self._tuned, self.flashinfer, screening=False)

    def screens(self, max_rows: int, *, tuned: bool = False) -> bool:
        """Whether any batch of 1 to ``max_rows`` rows would be screened if its head had a screen. tuned: because a
        tuned table says so, not the built-in choice."""
        return self.screened_rows(max_rows, tuned=tuned) > 0

    def screened_rows(self, max_rows: int, *, tuned: bool = False) -> int:
        """The rows of the largest such batch: what a screen needs scratch for. 0 where there is none."""
        sizes = range(max_rows, 0, -1)
        return next((rows for rows in sizes if any(self._screens(rows, work, tuned) for work in _SCREENED)), 0)

    def _screens(self, num_rows: int, work: Work, tuned: bool) -> bool:
        config = self._tuned[work].get(num_rows) if tuned else self.pick(num_rows, work)
        return isinstance(config, ScreenConfig)

    def built_in(self, num_rows: int, work: Work = Work.PLAIN) -> Config:
        """What a batch would take without a tuned table."""
        if not self.screening:
            work = work.unscreened
        return self._built_in_on(path_of(self.shape, num_rows, work), num_rows, work)

    def _built_in_on(self, path: Path, num_rows: int, work: Work) -> Config:
        if path is Path.SCREENED:
            return screen_of(self.shape, num_rows, work)
        if path is Path.LOGITS:
            return read_for(self.shape.device, self.shape.vocab_size, num_rows, work)
        return tile_of(self.shape, num_rows, work)

    def is_tuned(self, num_rows: int, work: Work) -> bool:
        return num_rows <= DENSE_ROWS and self._tuned_for(num_rows, work) is not None

    @functools.cached_property
    def digest(self) -> str:
        """Equal for choices that differ from the built-in ones alike."""
        entries = [(work, rows, config) for work, own in self._tuned.items() for rows, config in sorted(own.items())]
        facts = (entries, sorted(self.flashinfer), self.screening)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def used_up_to(self, max_rows: int, *, screened: bool = False) -> Iterator[tuple[Work, int, Config]]:
        """What batches of 1 to ``max_rows`` rows take, with a batch size that takes it; what several kinds of work
        launch alike, once. screened: also of batches whose head has a screen."""
        found: set[tuple[Work, Config]] = set()
        for work in Work:
            if work.screened and not screened:
                continue
            for num_rows in range(1, max_rows + 1):
                config = self.pick(num_rows, work)
                launched = (work.launched(config), config)
                if launched not in found:
                    found.add(launched)
                    yield work, num_rows, config

    def without(self, refused: Config, work: Work) -> Choices:
        """The same with the built-in choice wherever ``work`` takes ``refused``. Greedy batches launch what plain ones
        do, or nearly, and batches with a screen what those without one do: a refusal of one is a refusal of all."""
        tuned = {
            own: {
                rows: config for rows, config in entries.items() if own.kernels is not work.kernels or config != refused
            }
            for own, entries in self._tuned.items()
        }
        return Choices(self.shape, tuned, self.flashinfer, screening=self.screening)


@functools.lru_cache(maxsize=256)
def _built_in_choices(shape: Shape) -> Choices:
    return Choices(shape)


def choices_for(head: LMHead) -> Choices:
    """The built-in choices for ``head``. Raises ValueError on a device without any."""
    return _built_in_choices(Shape.of(head))
