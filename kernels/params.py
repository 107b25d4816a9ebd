"""The arguments of launchers: the LM head, one value per row of the batch, and what rows ask for beyond a temperature.

Values and their checks. The arithmetic is in ``epilogue.py`` and ``truncation_math.py``. The ``*Operands`` are the same
values as kernels take them: NamedTuples of pointers and strides.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import hf_head
from .config import GROUP_SIZE, TileConfig, cdiv

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Kernel arguments that may be views at any offset: another alignment must not compile another kernel.
ROW_POINTERS = ["temperature_ptr", "seed_ptr", "position_ptr"]


class Edit(enum.IntFlag):
    """The edits that apply to a row, as flags."""

    ADDITIVE = 1
    SCALING = 2
    MASK = 4
    BIAS = 8


PER_ROW = 16  # bit of ``given_edits``: ``edits.rows`` has flags of each row
REPEATS_SHIFT = 8  # bits from this on of ``given_edits``: rows of the batch per row of edits
# +inf and larger logits count as this: the largest finite number that both bfloat16 and float32 hold.
LARGEST_LOGIT = 2.0**128 - 2.0**120
# Soft caps up to this one are computed from one exponential: its error, a share of the cap, is small beside a logit.
NARROW_CAP = 32.0


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> None:
    """Raise ValueError unless ``tensor`` has this shape and dtype, contiguous rows, and the device of ``like``."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; expected a tensor, {shape} {dtype} on {like.device}")
    contiguous = tensor.is_contiguous() if tensor.dim() < 2 else tensor.stride(-1) == 1
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != like.device or not contiguous:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; "
            f"expected contiguous {shape} {dtype} on {like.device}"
        )


class TruncationOperands(NamedTuple):
    """Pointers, ``[B]`` each: int32, float32, float32."""

    top_k: Any
    top_p: Any
    min_p: Any


@dataclasses.dataclass(frozen=True)
class Truncation:
    """The limits of the tokens that a row may draw, as SGLang decides on its FlashInfer backend.

    top_k: ``[B]`` int32; fewer than ``top_k`` tokens have a larger logit. Off below 1 and from V on.
    top_p: ``[B]`` float32 in (0, 1]; tokens with a larger logit have less than ``top_p`` of the probability. Off at 1.
    min_p: ``[B]`` float32 in [0, 1]; probability at least ``min_p`` times the largest one. Off at 0.

    Top-k and top-p look at the whole distribution each ("joint"); on a row with min-p, top-p looks at what top-k has
    left. Equal logits stay or go together. Greedy rows ignore all three.

    max_top_k: the caller knows that every truncated row has a top-k, none above this; None: not known. It decides how
    fast a batch is, never its tokens.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    max_top_k: int | None = None

    @property
    def operands(self) -> TruncationOperands:
        return TruncationOperands(_aligned(self.top_k), _aligned(self.top_p), _aligned(self.min_p))

    def check(self, num_rows: int, like: torch.Tensor) -> None:
        """Raise ValueError unless there is one value of each kind per row, on the device of ``like``."""
        check_tensor("top_k", self.top_k, (num_rows,), torch.int32, like)
        check_tensor("top_p", self.top_p, (num_rows,), torch.float32, like)
        check_tensor("min_p", self.min_p, (num_rows,), torch.float32, like)


class EditOperands(NamedTuple):
    """Pointers as in ``LogitEdits``, and the distance of their rows in elements. An edit that is not given is any
    pointer of its type, which no flag reads: with a None inside, Triton 3.6 cannot compare the whole with None."""

    rows: Any
    additive: Any
    scaling: Any
    mask: Any
    bias: Any
    places: Any
    additive_stride: int
    scaling_stride: int
    mask_stride: int
    bias_stride: int
    mask_words: int


class MaskOperands(NamedTuple):
    """``EditOperands`` of a batch whose only edit is a mask, for which kernels that draw are compiled: JSON."""

    rows: Any
    mask: Any
    places: Any
    mask_stride: int
    mask_words: int


@dataclasses.dataclass(frozen=True)
class LogitEdits:
    """Changes to logits before temperature and truncation, in this order, as in SGLang; each optional.

    additive: ``[B, V]`` float32, added (frequency and presence penalties, min_new_tokens).
    scaling: ``[B, V]`` float32; a logit ``x`` becomes ``x * s`` below 0, else ``x / s`` (repetition penalty).
    mask: allowed tokens: ``[B, W]`` int32, bit ``i % 32`` of word ``i // 32`` set where token i is allowed, ids
        from ``32 W`` on allowed; or forbidden ones: ``[B, V]`` bool, True where forbidden.
    bias: ``[B, V]`` float32, added after the mask: it cannot revive a masked token.
    rows: ``[B]`` int32 of ``Edit`` flags, which edits apply to which row; None: all that are given to every row.
        A row without a flag reads nothing.
    repeats: so many rows in a row share a row of ``additive``, ``scaling`` and ``bias``, which then have
        ``B / repeats`` rows, as the nodes of a tree of drafts do; ``mask`` and ``rows`` have B.
    places: ``[4]`` int64, the addresses of ``additive``, ``scaling``, ``mask`` and ``bias`` when a kernel runs, for
        launches that a graph captures: it is told the tensors of each replay there. They are multiples of 16, and 0 for
        a tensor that is not given; those that are given say only how far rows are apart, and may have fewer. A row
        beyond those of a replay must have no flag.
    """

    additive: torch.Tensor | None = None
    scaling: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    repeats: int = 1
    places: torch.Tensor | None = None

    def repeated(self, times: int, num_rows: int) -> LogitEdits:
        """The edits of a batch with each row ``times`` times in a row, which makes ``num_rows``. A tensor with so many
        rows stays."""

        def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or tensor.shape[0] == num_rows:
                return tensor
            return tensor.repeat_interleave(times, 0)

        shared = (self.additive, self.scaling, self.bias)
        if any(tensor is not None and tensor.shape[0] == num_rows for tensor in shared):
            additive, scaling, bias = map(each, shared)
            return LogitEdits(additive, scaling, each(self.mask), bias, each(self.rows))
        repeats = self.repeats * times
        return dataclasses.replace(self, mask=each(self.mask), rows=each(self.rows), repeats=repeats)

    def part(self, start: int, stop: int) -> LogitEdits:
        """The edits of the rows from ``start`` to ``stop``: views, but copies where rows share a row of edits."""

        def cut(tensor: torch.Tensor | None, repeats: int = 1) -> torch.Tensor | None:
            if tensor is None or repeats == 1:
                return None if tensor is None else tensor[start:stop]
            first = start // repeats * repeats
            whole = tensor[start // repeats : cdiv(stop, repeats)].repeat_interleave(repeats, 0)
            return whole[start - first : stop - first]

        if self.places is not None:
            return self._placed_part(start, cut(self.rows))
        additive, scaling, bias = (cut(tensor, self.repeats) for tensor in (self.additive, self.scaling, self.bias))
        return LogitEdits(additive, scaling, cut(self.mask), bias, cut(self.rows))

    def _placed_part(self, start: int, rows: torch.Tensor | None) -> LogitEdits:
        """The edits of the rows from ``start`` on, whose addresses follow from ``places`` when a kernel runs."""
        assert self.places is not None
        if start % self.repeats:
            raise ValueError(f"start is {start}; expected a multiple of repeats, {self.repeats}, with places")
        places = self.places.clone()
        for place, tensor in zip(places, self.tensors, strict=True):
            if tensor is not None:
                first = start if tensor is self.mask else start // self.repeats
                place += first * tensor.stride(0) * tensor.element_size()
        return dataclasses.replace(self, rows=rows, places=places)

    def check_types(self) -> None:
        """Raise ValueError for an edit that is no tensor with rows, and for ``repeats`` that are no integer."""
        if not isinstance(self.repeats, int):
            raise ValueError(f"repeats is {self.repeats!r}; expected an integer")
        for name in ("additive", "scaling", "mask", "bias", "rows"):
            tensor = getattr(self, name)
            if tensor is not None and not (isinstance(tensor, torch.Tensor) and tensor.dim()):
                is_what = f"{tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
                raise ValueError(f"{name} is {is_what}; expected a tensor with a row per row of the batch, or None")

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The edits in their order, that of ``Edit`` and of ``places``."""
        return self.additive, self.scaling, self.mask, self.bias

    @property
    def given(self) -> Edit:
        """The edits that are given."""
        return Edit(sum(flag for flag, tensor in zip(Edit, self.tensors, strict=True) if tensor is not None))

    @property
    def mask_is_bool(self) -> bool:
        return self.mask is not None and self.mask.dtype is torch.bool

    def operands(
        self, width: int, floats: torch.Tensor, integers: torch.Tensor, *, one_for_all: bool = False
    ) -> tuple[EditOperands | MaskOperands, Hashable]:
        """These edits as a kernel takes them, and the facts about them that a compiled kernel depends on.

        width: ids below it have a column. floats, integers: any float32 and int32 tensor, in the place of edits
        that are not given; its rows are as far apart as theirs would be, so that one binary serves all sets of edits
        but a mask alone, and with ``one_for_all`` that, too.
        """
        pointers: list[Any] = []
        strides: list[int] = []
        for tensor, filler, columns in (
            (self.additive, floats, width),
            (self.scaling, floats, width),
            (self.mask, integers, cdiv(width, 32)),
            (self.bias, floats, width),
        ):
            given = filler if tensor is None else _aligned(tensor)
            pointers.append(given)
            strides.append(columns if tensor is None else given.stride(0))
        words = cdiv(width, 32) if self.mask is None else self.mask.shape[1]
        pointers.insert(0, integers if self.rows is None else _aligned(self.rows))
        pointers.append(_no_places(floats.device) if self.places is None else self.places)
        if self.given == Edit.MASK and not one_for_all:
            rows, _, _, mask, _, places = pointers
            stride = strides[2]
            facts = (self.mask_is_bool, *((size == 1, size % 16 == 0, size < 2**31) for size in (stride, words)))
            return MaskOperands(rows, mask, places, stride, words), facts
        variant = (
            self.mask_is_bool,
            *((size == 1, size % 16 == 0, size < 2**31) for size in (*strides, words)),
        )
        return EditOperands._make((*pointers, *strides, words)), variant

    def check(self, num_rows: int, width: int, like: torch.Tensor) -> None:
        """Raise ValueError unless there is a row of each edit per row of the batch. width: as in ``operands``."""
        if self.repeats < 1 or num_rows % self.repeats:
            raise ValueError(f"repeats is {self.repeats}; expected a divisor of the batch's {num_rows} rows")
        shared_rows = num_rows // self.repeats
        mask_dtype = torch.int32 if getattr(self.mask, "dtype", None) is not torch.bool else torch.bool
        for name, tensor, rows, dtype in (
            ("additive", self.additive, shared_rows, torch.float32),
            ("scaling", self.scaling, shared_rows, torch.float32),
            ("bias", self.bias, shared_rows, torch.float32),
            ("mask", self.mask, num_rows, mask_dtype),
        ):
            if tensor is None:
                continue
            if self.places is not None:
                rows = tensor.shape[0]
            columns = tensor.shape[-1] if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 else 0
            check_tensor(name, tensor, (rows, columns if dtype is torch.int32 else max(width, columns)), dtype, like)
            if (rows - 1) * tensor.stride(0) + columns >= 2**31:  # places are int32 in kernels
                raise ValueError(
                    f"{name} has rows {tensor.stride(0)} elements apart; expected {rows} rows within 2**31 elements"
                )
        if self.rows is not None:
            check_tensor("rows", self.rows, (num_rows,), torch.int32, like)
        if self.places is not None:
            check_tensor("places", self.places, (4,), torch.int64, like)


@functools.cache
def _no_places(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64, device=device)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a view that does not start at a multiple of 16 bytes: Triton compiles kernels anew for
    those where pointers are in a tuple."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class QuantizedOperands(NamedTuple):
    """Factors of the products of a quantised head."""

    scale: Any  # [V] f32, of the rows of the weight
    unit: Any  # [B] f32, of the hidden states (``scale_hidden.py``)


class FeatureOperands(NamedTuple):
    """Requests of rows and transforms of logits, as every kernel that sees logits takes them."""

    truncation: TruncationOperands | None
    edits: EditOperands | MaskOperands | None
    logit_scale: float | None
    softcap: tuple[float, ...] | None  # the cap; above ``NARROW_CAP`` its reciprocal, too
    given_edits: int  # ``Edit`` flags, ``PER_ROW``, and how many rows share a row of edits, above ``REPEATS_SHIFT``
    variant: Hashable  # the facts about all these that a compiled kernel depends on


@dataclasses.dataclass(frozen=True)
class BatchParams:
    """One value per row of the batch, on the device of the hidden states.

    temperature: ``[B]`` float32; 0 or less is greedy. Others count as the nearest of ``MIN_TEMPERATURE`` to
        ``MAX_TEMPERATURE``, NaN as the largest.
    seed: ``[B]`` int64, any value. Rows with equal seed, position and logits get equal tokens, so give
        each request its own.
    position: ``[B]`` int64, at least 0 and different for each token of a request, for example its index.
    truncation: top-k, top-p and min-p of the rows; None where no row has any.
    edits: penalties, grammar mask and bias of the rows; None where no row has any.
    all_greedy: the caller knows that every temperature is 0 or less, which may be faster; with another temperature
        the tokens are undefined.
    distribution_only: the caller wants tokens of the right distribution and no certain ones: they may depend on the
        batch and on the row's place in it. Only for batches with every row truncated by top-k or top-p, none greedy and
        none with min-p; of others the tokens are undefined. Allows the flashinfer path, where a tuned table names it.
    """

    MIN_TEMPERATURE: ClassVar[float] = 1e-6
    MAX_TEMPERATURE: ClassVar[float] = 1e30

    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    truncation: Truncation | None = None
    edits: LogitEdits | None = None
    all_greedy: bool = False
    distribution_only: bool = False

    def rows(self, start: int, stop: int) -> BatchParams:
        """The parameters of the rows from ``start`` to ``stop``, as views but for edits that rows share."""
        edits = None if self.edits is None else self.edits.part(start, stop)
        return self._of_each(lambda tensor: tensor[start:stop], edits)

    def repeated(self, times: int) -> BatchParams:
        """Each row ``times`` times in a row. A tensor with so many rows, as positions or a mask may have, stays."""
        num_rows = self.temperature.shape[0] * times
        edits = None if self.edits is None else self.edits.repeated(times, num_rows)
        return self._of_each(
            lambda tensor: tensor if tensor.shape[0] == num_rows else tensor.repeat_interleave(times, 0), edits
        )

    def _of_each(self, change: Callable[[torch.Tensor], torch.Tensor], edits: LogitEdits | None) -> BatchParams:
        def changed(value: Any) -> Any:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            tensors = {name: change(field) for name, field in fields.items() if isinstance(field, torch.Tensor)}
            return dataclasses.replace(value, **tensors)

        truncation = None if self.truncation is None else changed(self.truncation)
        return dataclasses.replace(changed(self), truncation=truncation, edits=edits)

    def of_every_kind(self) -> BatchParams:
        """The same rows with a truncation and with edits, which change nothing where there were none: a batch then
        launches the kernels that every other batch launches."""
        truncation, edits = self.truncation, self.edits
        if truncation is None:
            ones = torch.ones_like(self.temperature)
            truncation = Truncation(torch.zeros_like(ones, dtype=torch.int32), ones, torch.zeros_like(ones))
        return dataclasses.replace(self, truncation=truncation, edits=LogitEdits() if edits is None else edits)

    @property
    def makes_logits(self) -> bool:
        """Whether an edit may make another number of a logit. A mask makes none: it forbids."""
        return self.edits is not None and self.edits.given & ~Edit.MASK != 0

    def operands(
        self, spec: LogitsSpec, floats: torch.Tensor, integers: torch.Tensor, *, one_for_all: bool = False
    ) -> FeatureOperands:
        """floats, integers, one_for_all: as in ``LogitEdits.operands``."""
        truncation = None if self.truncation is None else self.truncation.operands
        edits, edit_variant, given = None, None, 0
        if self.edits is not None:
            edits, edit_variant = self.edits.operands(spec.edit_width, floats, integers, one_for_all=one_for_all)
            given = self.edits.given | (0 if self.edits.rows is None else PER_ROW)
            given |= self.edits.repeats << REPEATS_SHIFT
        # An integer would compile another kernel than a float.
        scale = None if spec.logit_scale is None else float(spec.logit_scale)
        softcap: tuple[float, ...] | None = None if spec.softcap is None else (float(spec.softcap),)
        if softcap is not None and softcap[0] > NARROW_CAP:
            softcap = (*softcap, 1.0 / softcap[0])
        variant = (truncation is None, edit_variant, scale is None, softcap and len(softcap))
        return FeatureOperands(truncation, edits, scale, softcap, int(given), variant)

    def check_types(self) -> None:
        """Raise ValueError for a truncation or edits of another type: before a path is chosen by them."""
        for field, value, kind in (("truncation", self.truncation, Truncation), ("edits", self.edits, LogitEdits)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{field} is a {type(value).__name__}; expected {kind.__name__} or None")
        if self.truncation is not None and not isinstance(self.truncation.max_top_k, int | None):
            raise ValueError(f"max_top_k is {self.truncation.max_top_k!r}; expected an integer or None")
        if self.edits is not None:
            self.edits.check_types()

    def check_rows(self, num_rows: int, like: torch.Tensor) -> None:
        """Raise ValueError unless there is one value per row, edits apart, on the device of ``like``."""
        check_tensor("temperature", self.temperature, (num_rows,), torch.float32, like)
        check_tensor("seed", self.seed, (num_rows,), torch.int64, like)
        check_tensor("position", self.position, (num_rows,), torch.int64, like)
        self.check_types()
        if self.truncation is not None:
            self.truncation.check(num_rows, like)

    def check(self, name: str, rows: torch.Tensor, spec: LogitsSpec) -> None:
        """Raise ValueError unless there is one value per row of ``rows``, which messages call ``name``."""
        num_rows, width = rows.shape[0], spec.vocab_end
        self.check_rows(num_rows, rows)
        if self.truncation is not None and spec.shards > 1:
            raise ValueError(f"shards is {spec.shards}; expected 1, the whole vocabulary, with a truncation")
        if self.edits is not None:
            self.edits.check(num_rows, width, rows)
        if num_rows * (width + GROUP_SIZE) >= 2**31 and (self.truncation or self.edits):
            raise ValueError(f"{name} has {num_rows} rows; expected fewer than 2**31 logits with a truncation or edits")


class SampleOutput(NamedTuple):
    """token_ids: ``[B]`` int64, absolute vocabulary ids; 0 in a row without an allowed id.

    logprobs: ``[B]`` float32, natural log-probability of each token under ``softmax(logits / temperature)``
        (temperature 1 on greedy rows), after edits and before truncation, never above 0; NaN in a row without an
        allowed id; or None when not asked for. Where the head is a shard of the vocabulary, the softmax is over the
        shard's ids alone: ``log_mass`` takes it to the whole.
    scores: ``[B]`` float32: the winning group's perturbed log-mass, its largest logit on greedy rows. Where the head is
        a shard of the vocabulary, the shard with the largest score holds the row's token; of equal scores, the one with
        the lowest ids.
    log_mass: ``[B, 2]`` float32, two numbers whose sum is ``logsumexp(logits / temperature)`` of the logits that
        ``logprobs`` are of, given with them; one would not hold the differences between shards at a low temperature.
        The first is -inf where an edit masks every id. With ``m = log_mass.double().sum(-1)``, the logprob of a token
        of shard s under the whole vocabulary is ``logprobs[s] + m[s] - logsumexp(m of all shards)``.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    scores: torch.Tensor
    log_mass: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device, return_logprob: bool) -> SampleOutput:
        scores = torch.empty(num_rows, dtype=torch.float32, device=device)
        logprobs = torch.empty_like(scores) if return_logprob else None
        log_mass = scores.new_empty(num_rows, 2) if return_logprob else None
        return cls(torch.empty(num_rows, dtype=torch.int64, device=device), logprobs, scores, log_mass)


@dataclasses.dataclass(frozen=True)
class LogitsSpec:
    """The columns of ``[B, >= vocab_size]`` logits, and what is still to be done to them.

    vocab_size: columns below it are real, those after it are padding and are never returned or read.
    vocab_start: absolute id of column 0, a multiple of ``GROUP_SIZE``. shards: number of parts that the vocabulary is
        cut into, of which the columns are one; 1 where they are all of it (``LMHead.of_rank``). total_ids: number of
        ids of all parts (default: the ids up to the last column).
    logit_scale, softcap: ``softcap * tanh(logit_scale * x / softcap)``, as far as set.
    logits_dtype: dtype that a logit is rounded to before anything else (default: the logits' own).
    batch_invariant: the logits, token and logprobs of a row are the same, bit by bit, in every batch: all batches take
        one tile and one set of kernels (``invariant.py``). Not for a part of a vocabulary.

    Raises ValueError for values out of these ranges, and ids beyond int32.
    """

    vocab_size: int
    vocab_start: int = 0
    logit_scale: float | None = None
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None
    shards: int = 1
    total_ids: int = 0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        size = self.vocab_size
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size!r}; expected an integer, 1 or more")
        if self.shards < 1:
            raise ValueError(f"shards is {self.shards}; expected 1 or more")
        if self.batch_invariant and self.shards > 1:
            raise ValueError(f"shards is {self.shards}; expected 1, the whole vocabulary, with batch_invariant")
        if self.vocab_start and self.shards == 1:
            raise ValueError(f"vocab_start is {self.vocab_start} and shards is 1; expected 0 in a whole vocabulary")
        if self.vocab_start < 0 or self.vocab_start % GROUP_SIZE:
            raise ValueError(f"vocab_start is {self.vocab_start}; expected a multiple of {GROUP_SIZE}, 0 or more")
        if self.vocab_end >= 2**31:
            raise ValueError(f"ids reach {self.vocab_end}; expected them below 2**31")
        if self.logits_dtype is not None and self.logits_dtype not in TRITON_DTYPES:
            raise ValueError(f"logits_dtype is {self.logits_dtype}; expected bfloat16, float16 or float32")
        scale, softcap = self.logit_scale, self.softcap
        if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
            raise ValueError(f"logit_scale is {scale!r}; expected a finite number or None")
        if softcap is not None and not (isinstance(softcap, numbers.Real) and 0 < softcap < math.inf):
            raise ValueError(f"softcap is {softcap!r}; expected a finite number above 0, or None")

    @property
    def num_groups(self) -> int:
        return cdiv(self.vocab_size, GROUP_SIZE)

    @property
    def vocab_end(self) -> int:
        """The absolute id after the last real one."""
        return self.vocab_start + self.vocab_size

    @property
    def edit_width(self) -> int:
        """The columns of edits, which all parts share."""
        return max(self.vocab_end, self.total_ids)


def supports_tma(matrix: torch.Tensor) -> bool:
    """Whether tensor descriptors can address ``matrix``: 16-byte aligned rows, each in a place of its own."""
    stride = matrix.stride(0)
    return matrix.data_ptr() % 16 == 0 and stride * matrix.element_size() % 16 == 0 and stride >= matrix.shape[1]


@dataclasses.dataclass(frozen=True, init=False)
class LMHead:
    """An LM head: a weight, and how logits come from the products with it.

    weight: ``[V, D]`` bfloat16, float16 or float32, or float8_e4m3fn with a ``scale``; contiguous rows at any distance.
    spec: the logits. Rows of the weight from ``vocab_size`` on are padding and are never returned (default: V, none).
        ``logits_dtype`` is that of the model's own GEMM, never None in a head (default: that of the hidden states;
        torch.float32 keeps the accumulator).
    scale: ``[V]`` float32, contiguous, of a float8_e4m3fn weight, whose row v stands for ``weight[v] * scale[v]``. One
        number, ``[]`` or ``[1]``, is copied for all rows. Activations are not quantised.
    hidden_dtype: that of the hidden states: the weight's; of a float8_e4m3fn weight bfloat16 (default) or float16.
    module: the owner of ``weight``; a weight that it gets later is followed (``current``). None with a scale.
    options: fields of ``LogitsSpec``, instead of ``spec`` or to replace some of its fields.

    Raises ValueError for a weight or a scale of another shape, dtype, layout or device, and for values out of these
    ranges.
    """

    weight: torch.Tensor
    spec: LogitsSpec
    scale: torch.Tensor | None
    hidden_dtype: torch.dtype
    module: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __init__(
        self,
        weight: torch.Tensor,
        spec: LogitsSpec | None = None,
        *,
        scale: torch.Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        module: Any = None,
        **options: Any,
    ):
        if not isinstance(weight, torch.Tensor):
            raise ValueError(
                f"weight is a {type(weight).__name__}; expected a [V, D] tensor, such as a module's .weight"
            )
        if weight.dim() != 2 or weight.dtype not in (*TRITON_DTYPES, torch.float8_e4m3fn):
            raise ValueError(
                f"weight is {tuple(weight.shape)} {weight.dtype}; expected [V, D] in bfloat16, float16 or float32, "
                "or in float8_e4m3fn with a scale"
            )
        if not _has_contiguous_rows(weight):
            raise ValueError(f"weight has strides {weight.stride()}; expected rows that are contiguous")
        if weight.numel() and not weight.is_meta and not weight.data_ptr():
            raise ValueError("weight has no memory; expected a plain tensor, neither sharded (DTensor) nor freed")
        if weight.dtype is torch.float8_e4m3fn:
            scale = _row_scale(scale, weight)
            hidden_dtype = torch.bfloat16 if hidden_dtype is None else hidden_dtype
            if hidden_dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"hidden_dtype is {hidden_dtype}; expected bfloat16 or float16 with a quantised weight"
                )
            if module is not None:
                raise ValueError(f"module is a {type(module).__name__}; expected None with a scale: it is not followed")
        else:
            if scale is not None:
                raise ValueError(f"scale is given with a {weight.dtype} weight; expected None, or float8_e4m3fn")
            if hidden_dtype not in (None, weight.dtype):
                raise ValueError(f"hidden_dtype is {hidden_dtype}; expected None or the weight's {weight.dtype}")
            hidden_dtype = weight.dtype
        if spec is None:
            spec = LogitsSpec(**({"vocab_size": weight.shape[0]} | options))
        elif not isinstance(spec, LogitsSpec):
            raise ValueError(f"spec is a {type(spec).__name__}; expected a LogitsSpec or None")
        else:
            spec = dataclasses.replace(spec, **options)
        if spec.logits_dtype is None:
            spec = dataclasses.replace(spec, logits_dtype=hidden_dtype)
        if spec.vocab_size > weight.shape[0]:
            raise ValueError(f"vocab_size is {spec.vocab_size}; expected 1 to the head's {weight.shape[0]} rows")
        if spec.vocab_start + weight.shape[0] >= 2**31:
            raise ValueError(f"ids reach {spec.vocab_start + weight.shape[0]}; expected them below 2**31")
        vars(self).update(weight=weight, spec=spec, scale=scale, hidden_dtype=hidden_dtype, module=module)
        _ = self._place  # remembered before anyone can change it

    @classmethod
    def of_rank(cls, weight: torch.Tensor, rank: int, num_ranks: int, vocab_size: int, **options: Any) -> LMHead | None:
        """The part of a head that one of ``num_ranks`` tensor-parallel ranks holds; None where that is only padding.

        weight: ``[W, D]``, with the same W on every rank: rank r holds the ids from ``r * W`` on, as far as they are
        below ``vocab_size``, that of the whole vocabulary. options: further fields of ``LogitsSpec``, and the rank's
        ``scale``.

        Raises ValueError for a rank that is none; of several ranks, for a W that is not a multiple of ``GROUP_SIZE``,
        and for more than 2**24 ids, which they send each other as float32 (``merge_ranks.py``).
        """
        width = weight.shape[0]
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}; expected 0 to {num_ranks - 1}")
        most = width if num_ranks == 1 else min(width * num_ranks, 2**24)
        if not 1 <= vocab_size <= most:
            raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {most}")
        if num_ranks > 1 and width % GROUP_SIZE:
            raise ValueError(f"a rank's weight has {width} rows; expected a multiple of {GROUP_SIZE}")
        start = rank * width
        if start >= vocab_size:
            return None
        part = LogitsSpec(min(width, vocab_size - start), start, shards=num_ranks, total_ids=vocab_size)
        return cls(weight, part, **options)

    @classmethod
    def from_hf(cls, model: Any) -> LMHead:
        """The LM head of a Hugging Face causal language model: the weight of its output embeddings; vocabulary size,
        final softcap and logit scale of its config, under the names that transformers has for them.

        A model of several modalities gives those of its text config, which SGLang applies. The wrappers of transformers
        (PaliGemma, LLaVA, LLaVA-NeXT, Aya Vision, Cohere2 Vision, Gemma 3, Granite Speech) do not: the ``logits`` that
        they return have no scale and no softcap. A model that changes its logits in a way of its own gives a head of
        other logits: compare them once where the model is not of transformers itself.

        The head draws from the weight that the module of the output embeddings has at each call (``current``). Where a
        model gets another module, as by ``resize_token_embeddings`` or an adapter of the head, make the head anew.

        Raises ValueError for a model without output embeddings; for a head that is no plain ``torch.nn.Linear``
        (adapters, quantised, sharded or computed weights) or has a bias; and for one with fewer rows than the config
        has ids.
        """
        module, config = hf_head.plain_head(model), hf_head.text_config(model)
        rows = module.weight.shape[0]
        if rows < config.vocab_size:
            raise ValueError(f"the LM head has {rows} rows; expected the {config.vocab_size} ids of the model's config")
        return cls(
            module.weight,
            vocab_size=config.vocab_size,
            logit_scale=hf_head.logit_scale(config),
            softcap=hf_head.softcap(config),
            module=module,
        )

    @property
    def current(self) -> LMHead:
        """The head to draw from: this one, or the same with the weight that ``module`` has, or that is in the memory of
        ``weight``, since it was replaced. Costs a step a microsecond."""
        weight = self.weight if self.module is None else self.module.weight
        latest: LMHead = vars(self).get("_latest", self)
        if weight is not latest.weight or _place_of(weight, self.scale) != latest._place:
            # A new head, as descriptors are made for one place in memory. It rounds to the new weight's dtype if this
            # one rounds to the old weight's, which ``self.weight`` itself may have no more.
            latest = vars(self)["_latest"] = LMHead(
                weight,
                self.spec,
                scale=self.scale,
                hidden_dtype=None if self.scale is None else self.hidden_dtype,
                module=self.module,
                logits_dtype=None if self.gemm_gives_logits else self.rounding,
            )
        return latest

    @functools.cached_property
    def _place(self) -> tuple:
        return _place_of(self.weight, self.scale)

    def first(self, size: int) -> LMHead:
        """The head of the first ``size`` ids alone."""
        scale = None if self.scale is None else self.scale[:size]
        return LMHead(self.weight[:size], self.spec, scale=scale, hidden_dtype=self.hidden_dtype, vocab_size=size)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def vocab_start(self) -> int:
        return self.spec.vocab_start

    @property
    def logit_scale(self) -> float | None:
        return self.spec.logit_scale

    @property
    def softcap(self) -> float | None:
        return self.spec.softcap

    @property
    def shards(self) -> int:
        return self.spec.shards

    @property
    def rounding(self) -> torch.dtype:
        """The dtype that logits are rounded to."""
        assert self.spec.logits_dtype is not None
        return self.spec.logits_dtype

    @property
    def batch_invariant(self) -> bool:
        return self.spec.batch_invariant

    @property
    def gemm_gives_logits(self) -> bool:
        """Whether a GEMM in the dtype of the hidden states rounds logits as they are to be rounded."""
        return self.rounding is self.hidden_dtype

    def check(self, hidden: torch.Tensor) -> None:
        """Raise ValueError unless ``hidden`` can be multiplied with the weight."""
        if hidden.dim() != 2 or hidden.dtype != self.hidden_dtype or hidden.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"hidden is {tuple(hidden.shape)} {hidden.dtype}; "
                f"expected [B, {self.weight.shape[1]}] {self.hidden_dtype} as the head's"
            )
        if hidden.device != self.weight.device or hidden.stride(1) != 1:
            raise ValueError(
                f"hidden is on {hidden.device} with strides {hidden.stride()}; "
                f"expected contiguous rows on {self.weight.device}"
            )

    @functools.cached_property
    def supports_tma(self) -> bool:
        """Whether tensor descriptors can address the weight."""
        return supports_tma(self.addressed) and self.addressed.dtype is not torch.uint8

    @functools.cached_property
    def addressed(self) -> torch.Tensor:
        """The weight as kernels of the fused pass address it: of a quantised head as ``[V, D // 2]`` int16, pairs of
        weights, or as ``[V, D]`` uint8 where rows start at odd addresses or end within a pair."""
        weight = self.weight
        if self.scale is None:
            return weight
        odd = (one % 2 for one in (weight.shape[1], weight.stride(0), weight.storage_offset(), weight.data_ptr()))
        in_pairs = not any(odd)
        return weight.view(torch.int16 if in_pairs else torch.uint8)

    def check_not_quantised(self) -> None:
        """Raise ValueError for a quantised head, where single rows of the weight are read without their scale."""
        if self.scale is not None:
            raise ValueError(f"the head's weight is {self.weight.dtype}; expected one without a scale")

    def without_unsupported_tma(self, tile: TileConfig, hidden: torch.Tensor) -> TileConfig:
        """``tile`` without the descriptors that cannot address the weight or ``hidden``."""
        if tile.tma and not self.supports_tma:
            tile = dataclasses.replace(tile, tma=False)
        if tile.hidden_tma and not supports_tma(hidden):
            tile = dataclasses.replace(tile, hidden_tma=False)
        return tile

    @functools.cached_property
    def variant(self) -> tuple:
        """The facts about this head that a compiled kernel depends on, beside its constants."""
        weight, scale = self.addressed, self.scale
        return (
            weight.dtype,
            weight.stride(0),
            weight.data_ptr() % 16 == 0,
            scale is not None and scale.data_ptr() % 16 == 0,
        )

    @functools.cached_property
    def _descriptors(self) -> dict[tuple[int, int], TensorDescriptor]:
        return {}

    def weight_operand(self, tile: TileConfig) -> torch.Tensor | TensorDescriptor:
        """The kernel's argument for the weight: a descriptor of the tile's blocks, or the tensor."""
        if not tile.tma:
            return self.addressed
        block_d = tile.block_d if self.scale is None else tile.block_d // 2
        return descriptor(self._descriptors, self.addressed, (tile.block_v, block_d))


def _place_of(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple:
    """Where ``weight`` and its scale are, and how they lie there."""
    place = None if scale is None else scale.data_ptr()
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), place


def _has_contiguous_rows(weight: torch.Tensor) -> bool:
    """PyTorch gives a dimension of length 1 any stride."""
    rows, columns = weight.shape
    return (columns < 2 or weight.stride(1) == 1) and (rows < 2 or weight.stride(0) >= columns)


def _row_scale(scale: Any, weight: torch.Tensor) -> torch.Tensor:
    """``[V]`` float32 from the scale that is given with a quantised ``weight``. Raises ValueError for anything but a
    factor per row, or one for all."""
    rows = weight.shape[0]
    expected = f"expected contiguous [{rows}] float32, one number per row of the weight, or a single one"
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"scale is {'None' if scale is None else f'a {type(scale).__name__}'}; {expected}")
    is_one = scale.dim() == 0 or scale.shape == (1,)
    if scale.dtype is not torch.float32 or not (is_one or scale.shape == (rows,)) or not scale.is_contiguous():
        raise ValueError(f"scale is {tuple(scale.shape)} {scale.dtype} with strides {scale.stride()}; {expected}")
    if scale.device != weight.device:
        raise ValueError(f"scale is on {scale.device}; expected it on the weight's {weight.device}")
    scale = scale.detach() if scale.requires_grad else scale
    return scale.reshape(1).repeat(rows) if is_one else scale


def descriptor(
    known: dict[tuple[int, int], TensorDescriptor], matrix: torch.Tensor, block: tuple[int, int]
) -> TensorDescriptor:
    """The descriptor of ``matrix`` for blocks of this shape, made once per matrix: ``known`` keeps it."""
    if block not in known:
        known[block] = TensorDescriptor.from_tensor(matrix, list(block))
    return known[block]
