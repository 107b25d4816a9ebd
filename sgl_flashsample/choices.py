"""Which path and configuration each batch of a head takes: the built-in choices, or a tuned table on top of them.

Resolved once, for every batch size that a server is prepared for: a step looks its own up by place.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

from .kernels.head import LMHead
from .kernels.tiles import DrawConfig
from .tuned import Shape, draw_on, path_of, read_for, tile_of
from .work import Config, Path, Work, path_of_config

Tuned = Mapping[Work, Mapping[int, Config]]  # batch size -> configuration

# Batches up to this size are looked up by place; a larger one has the built-in choice of its size.
DENSE_ROWS = 512


class Choices:
    """For the heads of one shape. Immutable; ``choices_for`` a head gives the built-in ones.

    tuned: what differs from the built-in choices. Where it has nothing for greedy batches, they take what it has for
    plain ones. flashinfer: sizes of truncated batches that take the flashinfer path where their caller wants the
    distribution alone; every other batch of these sizes has the choice that it would have without.
    """

    def __init__(self, shape: Shape, tuned: Tuned | None = None, flashinfer: Collection[int] = ()) -> None:
        self.shape = shape
        self.flashinfer = frozenset(flashinfer)
        self._tuned: dict[Work, dict[int, Config]] = {work: dict((tuned or {}).get(work, {})) for work in Work}
        self._dense = {work: self._resolve(work) for work in Work}
        self._checked: Callable[[], LMHead | None] = lambda: None  # weak: choices outlive heads

    def _resolve(self, work: Work) -> tuple[Config, ...]:
        own = self._tuned[work]
        if work.fallback is not None:
            own |= {rows: config for rows, config in self._tuned[work.fallback].items() if rows not in own}
        return tuple(own.get(rows) or self.built_in(rows, work) for rows in range(DENSE_ROWS + 1))

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
        """What a batch takes: a tile of the fused path, or a reader of the logits path."""
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
        return Choices(self.shape, self._tuned)

    def built_in(self, num_rows: int, work: Work = Work.PLAIN) -> Config:
        """What a batch would take without a tuned table."""
        return self._built_in_on(path_of(self.shape, num_rows, work), num_rows, work)

    def _built_in_on(self, path: Path, num_rows: int, work: Work) -> Config:
        if path is Path.LOGITS:
            return read_for(self.shape.device, self.shape.vocab_size, num_rows, work)
        return tile_of(self.shape, num_rows, work)

    def is_tuned(self, num_rows: int, work: Work) -> bool:
        return num_rows in self._tuned[work]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for choices that differ from the built-in ones alike."""
        entries = [(work, rows, config) for work, own in self._tuned.items() for rows, config in sorted(own.items())]
        return hashlib.sha256(repr((entries, sorted(self.flashinfer))).encode()).hexdigest()

    def used_up_to(self, max_rows: int) -> Iterator[tuple[Work, int, Config]]:
        """What batches of 1 to ``max_rows`` rows take, each once per kind of work, with a batch size that takes it.
        On the fused path greedy batches launch what plain ones do: of them, only what those do not take."""
        for work in Work:
            found: dict[Config, int] = {}
            for num_rows in range(1, max_rows + 1):
                found.setdefault(self.pick(num_rows, work), num_rows)
            if work.fallback is not None:
                for num_rows in range(1, max_rows + 1):
                    if path_of_config(same := self.pick(num_rows, work.fallback)) is Path.FUSED:
                        found.pop(same, None)
            yield from ((work, num_rows, config) for config, num_rows in found.items())

    def without(self, refused: Config, work: Work) -> Choices:
        """The same with the built-in choice wherever ``work`` takes ``refused``. Greedy batches launch what plain ones
        do, or nearly: a refusal of one is a refusal of both."""
        affected = [other for other in Work if work in (other, other.fallback) or other is work.fallback]
        tuned = {
            own: {rows: config for rows, config in entries.items() if own not in affected or config != refused}
            for own, entries in self._tuned.items()
        }
        return Choices(self.shape, tuned, self.flashinfer)


@functools.lru_cache(maxsize=256)
def _built_in_choices(shape: Shape) -> Choices:
    return Choices(shape)


def choices_for(head: LMHead) -> Choices:
    """The built-in choices for ``head``. Raises ValueError on a device without any."""
    return _built_in_choices(Shape.of(head))
