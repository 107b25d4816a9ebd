"""Logits that are not computed unless somebody reads them.

``LogitsProcessor`` returns a ``LazyLogits`` instead of ``[N, V]`` logits. It is a tensor without storage that carries
the final hidden states. It stays one through SGLang's CUDA-graph capture (where it carries the graph's buffer), the
slices that runners take of it, and every rebuild of ``LogitsProcessorOutput``. Our sampler takes the hidden states out
of it. Any PyTorch operation on it, also by code that knows nothing of us, computes the logits with SGLang's own code.

One reader escapes: C code that imports it through DLPack without asking Python sees a null pointer. So it
is always turned into a plain tensor before SGLang's sampler runs, and it says that it is not contiguous, which
code that hands memory to C asks for first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

_make, _FLOAT32 = torch.Tensor._make_wrapper_subclass, torch.float32


class LazyLogits(torch.Tensor):
    """``[N, V]`` float32 logits in name; ``hidden`` (``[N, D]``) and how to compute them in fact.

    source: opaque to this class; the sampler reads it. compute: ``hidden -> [N, V] float32``. captured: the hidden
    states of one of SGLang's CUDA graphs, of which ``hidden`` are the first rows; None outside of a graph. Each replay
    writes them anew at the same place. prefills: they are of a prefill, which has no such graph. num_rows: N, without a
    call of PyTorch. computed: the logits, once someone has read them, and perhaps changed them.
    """

    hidden: torch.Tensor
    num_rows: int
    source: Any
    captured: torch.Tensor | None
    prefills: bool
    _compute: Callable[[torch.Tensor], torch.Tensor]
    computed: torch.Tensor | None = None
    _first: dict[Any, LazyLogits] | None = None  # by number of rows, none of them computed
    _forget: Callable[[], Any] | None = None  # takes this one out of the ``_first`` of another

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        width: int,
        source: Any,
        compute: Callable[[torch.Tensor], torch.Tensor],
        captured: torch.Tensor | None = None,
        prefills: bool = False,
    ) -> LazyLogits:
        num_rows = hidden.shape[0]
        self = _make(cls, (num_rows, width), dtype=_FLOAT32, device=hidden.device)
        self.hidden, self.source, self._compute = hidden, source, compute
        self.captured, self.prefills, self.num_rows = captured, prefills, num_rows
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dense(self) -> torch.Tensor:
        """The logits, computed at the first call."""
        if self.computed is None:
            self.computed = self._compute(self.hidden)
            if self._forget is not None:
                self._forget()  # else they would stay for as long as the graph does
        return self.computed

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits of some rows (``[R]`` int64) alone: ``[R, V]``, which the caller may change."""
        assert not self.is_dense, "whoever read the logits may have changed them"
        return self._compute(self.hidden.index_select(0, rows))

    @property
    def is_dense(self) -> bool:
        """The logits have been read, and perhaps changed."""
        return self.computed is not None

    def __getitem__(self, index: Any) -> torch.Tensor:
        if not isinstance(index, slice) or index.step not in (None, 1) or self.computed is not None:
            return self.dense()[index]
        if index.start or self.captured is None:
            return self._of_hidden(self.hidden[index])
        return self._first_rows(index.stop)

    def _first_rows(self, stop: Any) -> LazyLogits:
        """``self[:stop]`` of a graph. SGLang takes it at every step, after the replay: until someone computes them, the
        logits of one step are like those of the next, and no tensor has to be made for each."""
        if self._first is None:
            self._first = {}
        first = self._first.get(stop)
        if first is None:
            first = self._first[stop] = self._of_hidden(self.hidden[:stop], self.captured)
            first._forget = functools.partial(self._first.pop, stop, None)
        return first

    def _of_hidden(self, hidden: torch.Tensor, captured: torch.Tensor | None = None) -> LazyLogits:
        """The logits of these hidden states."""
        return LazyLogits(hidden, self.shape[1], self.source, self._compute, captured, self.prefills)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(LazyLogits, lambda lazy: lazy.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    # Triton's launcher, DLPack and NumPy ask for memory instead of dispatching.
    def data_ptr(self) -> int:
        return self.dense().data_ptr()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.dense().contiguous(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().__dlpack__(*args, **kwargs)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.dense().__cuda_array_interface__

    def __array__(self, *args: Any) -> Any:
        return self.dense().__array__(*args)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyLogits({tuple(self.shape)}, {'dense' if self.is_dense else 'not computed'})"


class DraftLogits(LazyLogits):
    """The logits of a draft model whose drafts are known.

    ids: ``[N, K]`` int64, the children of each node of a tree of drafts, the first the draft of a chain. chances:
    ``[N, K]`` float32, how likely the target draws each of them; None in a chain, whose drafts are certain.

    Where SGLang takes the largest logit of each row, it gets the first draft, and where it takes the softmax,
    ``DraftProbabilities``. The logits themselves are computed, with that draft the largest by far, for any other
    reader: for one of these alone, hidden states of selected rows are gathered.
    """

    ids: torch.Tensor
    chances: torch.Tensor | None
    _of: LazyLogits  # their rows at ``_rows`` are these; all where that is None
    _rows: Any
    _has_own_ids: bool  # no other stand-in has this memory

    @classmethod
    def of(
        cls,
        lazy: LazyLogits,
        ids: torch.Tensor,
        chances: torch.Tensor | None = None,
        rows: Any = None,
        has_own_ids: bool = False,
    ) -> DraftLogits:
        """rows: an index of ``lazy``; all of its rows when None."""
        num_rows = ids.shape[0]
        drafts = _make(cls, (num_rows, lazy.shape[1]), dtype=_FLOAT32, device=ids.device)
        drafts._of, drafts._rows, drafts._has_own_ids = lazy, rows, has_own_ids
        drafts.ids, drafts.chances, drafts.num_rows = ids, chances, num_rows
        drafts.source, drafts._compute = lazy.source, lazy._compute
        drafts.captured, drafts.prefills = lazy.captured, lazy.prefills
        return drafts

    @property
    def hidden(self) -> torch.Tensor:  # type: ignore[override]
        return self._of.hidden if self._rows is None else self._of.hidden[self._rows]

    @property
    def tokens(self) -> torch.Tensor:
        """``[N]`` int64, the first draft of each row."""
        return self.ids[:, 0]

    def dense(self) -> torch.Tensor:
        if self.computed is None:
            logits = self._compute(self.hidden)
            self.computed = logits.scatter_(1, self.ids[:, :1], torch.finfo(logits.dtype).max)
        return self.computed

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.is_dense:
            return self.dense()[index]
        if isinstance(index, slice):
            return self._slice(index)
        if isinstance(index, torch.Tensor) and index.dim() == 1:
            return self._select(index, has_own_ids=True)
        return self.dense()[index]

    def _select(self, index: Any, has_own_ids: bool = False) -> DraftLogits:
        chances = None if self.chances is None else self.chances[index]
        return self.of(self, self.ids[index], chances, index, has_own_ids)

    def _slice(self, index: slice) -> DraftLogits:
        """The first rows of a graph's are kept, as ``_first_rows`` keeps them: SGLang cuts the padding off in every
        step."""
        is_of_graph = self.captured is not None and type(self._of) is LazyLogits
        if not is_of_graph or index.start or index.step not in (None, 1):
            return self._select(index)
        if self._first is None:
            self._first = {}
        first = self._first.get(index.stop)
        if not isinstance(first, DraftLogits) or first.is_dense:
            first = self._first[index.stop] = self._select(index)
        return first

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        drafts = args[0] if args else None
        answer = drafts._answers.get(func) if isinstance(drafts, DraftLogits) and not drafts.is_dense else None
        if answer is not None:
            options = _DEFAULTS[func] | dict(zip(_DEFAULTS[func], args[1:], strict=False)) | (kwargs or {})
            known = answer(drafts, **options) if options.pop("dim") in (1, -1) else None
            if known is not None:
                return known
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _largest(self, keepdim: bool) -> torch.Tensor:
        largest = self.ids[:, :1] if keepdim else self.tokens
        if self._has_own_ids:
            self._has_own_ids = False  # the caller may write there
            return largest
        return largest.clone()

    def _probabilities(self, **ignored: Any) -> torch.Tensor:
        return DraftProbabilities.of(self, self.ids, self.chances)

    # Operations whose result follows from the drafts alone; None where it does not. The others take the logits.
    _answers: ClassVar[dict[Any, Callable[..., Any]]] = {
        torch.ops.aten.argmax.default: _largest,
        torch.ops.aten._softmax.default: _probabilities,
        torch.ops.aten.softmax.int: _probabilities,  # in inference mode
    }


class DraftProbabilities(DraftLogits):
    """The softmax of ``DraftLogits``: the chances of the drafts, and nothing else."""

    def dense(self) -> torch.Tensor:
        if self.computed is None:
            self.computed = torch.zeros(self.shape, device=self.device).scatter_add_(1, self.ids, self._known_chances())
        return self.computed

    def _known_chances(self) -> torch.Tensor:
        return torch.ones_like(self.ids, dtype=torch.float32) if self.chances is None else self.chances.clone()

    def _likeliest(self, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.chances is not None:
            return None
        tokens = self._largest(keepdim)
        return torch.ones_like(tokens, dtype=torch.float32), tokens

    def _children(self, k: int, largest: bool, **ignored: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (self._known_chances(), self.ids.clone()) if k == self.ids.shape[1] and largest else None

    _answers: ClassVar[dict[Any, Callable[..., Any]]] = {
        torch.ops.aten.argmax.default: DraftLogits._largest,
        torch.ops.aten.max.dim: _likeliest,
        torch.ops.aten.topk.default: _children,
    }


# The arguments of an operation after the tensor, in their order. PyTorch leaves out those that have their default.
_DEFAULTS: dict[Any, dict[str, Any]] = {
    torch.ops.aten.argmax.default: {"dim": None, "keepdim": False},
    torch.ops.aten._softmax.default: {"dim": None, "half_to_float": False},
    torch.ops.aten.softmax.int: {"dim": None, "dtype": None},
    torch.ops.aten.max.dim: {"dim": None, "keepdim": False},
    torch.ops.aten.topk.default: {"k": None, "dim": -1, "largest": True, "sorted": True},
}


def plain(logits: torch.Tensor | None) -> torch.Tensor | None:
    """``logits`` as a tensor that any code may use: computed if they were lazy."""
    return logits.dense() if isinstance(logits, LazyLogits) else logits
