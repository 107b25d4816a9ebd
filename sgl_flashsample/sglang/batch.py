"""One batch of SGLang's as the fused pass needs it: the kinds of its rows, which sampler serves each row, and what
SGLang does to the logits before it samples.

SGLang's batch-level flags are sticky: after one request with top-p has joined, ``need_top_p_sampling`` stays set until
the batch is empty, and a greedy request (top_k 1) sets ``need_top_k_sampling`` for all. So what matters is kept per row
and follows the batch through its filters and merges: one character per row on the host. A step then looks at the kinds
that a batch has, not at its rows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.params import Edit, LogitEdits
from ..kernels.workspace import MAX_GIVEN_IDS, MAX_TOP_LOGPROBS
from .arrivals import Arrivals
from .logprobs import AskedLogprobs
from .row_table import ROWS, TOP_K_OFF, Reason, Row, RowTable, read_requests

BATCH_ATTRIBUTE = "_flashsample_batch"  # on SamplingBatchInfo
SLOTS_ATTRIBUTE = "_flashsample_slots"  # on SamplingBatchInfo, for one forward: slots of the rows in SGLang's pool
DRAWN_ATTRIBUTE = "_flashsample_drawn"  # on LogitsProcessorOutput: the tokens of a step that ranks drew together
REASON_ATTRIBUTE = "_flashsample_reason"  # on LogitsProcessorOutput: why its logits were computed after all
ROUTING_ATTRIBUTE = "_flashsample_routing"  # on LogitsProcessorOutput: of rows whose logits are there, preprocessed
# On LogitsProcessorOutput: SGLang's preprocessing, still to be done, as a function and its first argument.
PREPROCESS_ATTRIBUTE = "_flashsample_preprocess"


_PENALTIES, _MASK, _BIAS = int(Edit.ADDITIVE | Edit.SCALING), int(Edit.MASK), int(Edit.BIAS)


class DrawKind(NamedTuple):
    """The facts of a batch that its path and the kernels depend on, as in ``BatchParams``. CUDA graphs of a step are
    told apart by it."""

    truncated: bool
    max_top_k: int | None
    all_greedy: bool
    distribution_only: bool


@dataclasses.dataclass(eq=False)
class Mix:
    """The facts that follow from the kinds of rows in a batch, whatever their numbers. kinds: their ids. There is one
    object for each set of kinds."""

    kinds: frozenset[int]

    @functools.cached_property
    def rows(self) -> list[Row]:
        return [ROWS[kind] for kind in sorted(self.kinds)]

    @functools.cached_property
    def truncated(self) -> tuple[int, ...]:
        """The kinds with top-k, top-p or min-p."""
        return tuple(kind for kind in self.kinds if ROWS[kind].truncated)

    @functools.cached_property
    def edits(self) -> int:
        """The ``Edit`` flags that any row has, grammars included, as a number: each operation of flags is a call."""
        return int(functools.reduce(operator.or_, (row.edits for row in self.rows), Edit(0)))

    @functools.cached_property
    def masked(self) -> tuple[int, ...]:
        """The kinds with a grammar."""
        return tuple(kind for kind in self.kinds if ROWS[kind].edits & Edit.MASK)

    @functools.cached_property
    def is_native(self) -> bool:
        """Some row needs SGLang's sampler in every step."""
        return any(row.reason is not None for row in self.rows)

    @functools.cached_property
    def all_native(self) -> bool:
        """Every row does."""
        return bool(self.rows) and all(row.reason is not None for row in self.rows)

    @functools.cached_property
    def is_contested(self) -> bool:
        """Some row has a grammar and ``min_new_tokens``."""
        return any(row.keeps_going and row.edits & Edit.MASK for row in self.rows)

    @functools.cached_property
    def has_other_logprobs(self) -> bool:
        """Some row has a logprob at another temperature in SGLang than here."""
        return not self.draw.all_greedy and any(row.tempered for row in self.rows)

    @functools.cached_property
    def draw(self) -> DrawKind:
        # FlashInfer can draw a batch whose rows all have top-k or top-p, none min-p or a seed, and of which none is
        # greedy: the caller needs their distribution alone.
        return DrawKind(
            bool(self.truncated),
            _largest_top_k([ROWS[kind] for kind in self.truncated]),
            all(row.greedy for row in self.rows),
            all(
                not row.greedy and not row.seeded and (row.needs[0] or row.needs[1]) and not row.needs[2]
                for row in self.rows
            ),
        )

    @functools.cached_property
    def draw_of_nodes(self) -> DrawKind:
        """``draw`` for a verification of drafts. SGLang's verification ignores min-p. A draft is accepted where it
        equals the draw, so a node needs the noise of its position."""
        truncated = [row for row in self.rows if not row.greedy and (row.needs[0] or row.needs[1])]
        return DrawKind(bool(truncated), _largest_top_k(truncated), self.draw.all_greedy, False)


def _largest_top_k(truncated: Sequence[Row]) -> int | None:
    """The largest top-k of truncated rows, rounded up to its bound; None where one has no bound."""
    largest = max((row.top_k for row in truncated), default=TOP_K_OFF)
    return None if largest == TOP_K_OFF else largest


_MIXES: dict[frozenset[int], Mix] = {}
MAX_MIXES = 4096


def _mix_of(kinds: frozenset[int]) -> Mix:
    mix = _MIXES.get(kinds)
    if mix is None:
        if len(_MIXES) == MAX_MIXES:
            _MIXES.clear()
        mix = _MIXES[kinds] = Mix(kinds)
    return mix


def _count(kinds: str, counted: tuple[int, ...]) -> int:
    """The rows whose kinds have these ids."""
    return sum(kinds.count(chr(kind)) for kind in counted)


class Batch:
    """One batch. kinds: the kind of each row, the character with the number of its id in ``row_table.ROWS``: texts are
    cut, joined and counted fast. table: where the parameters of its requests
    are. num_truncated: rows with top-k, top-p or min-p. Nothing changes it: a forward keeps the batch that it was
    routed with."""

    def __init__(self, kinds: str, table: RowTable, mix: Mix | None = None, num_truncated: int | None = None) -> None:
        """mix, num_truncated: where the caller knows them."""
        self.kinds, self.table = kinds, table
        self.mix = mix = _mix_of(frozenset(map(ord, set(kinds)))) if mix is None else mix
        self.num_truncated = _count(kinds, mix.truncated) if num_truncated is None else num_truncated

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(ROWS[ord(kind)] for kind in self.kinds)

    def row(self, place: int) -> Row:
        return ROWS[ord(self.kinds[place])]

    @functools.cached_property
    def num_masked(self) -> int:
        """How many rows have a grammar."""
        return _count(self.kinds, self.mix.masked)

    @functools.cached_property
    def logprob_reasons(self) -> tuple[Reason | None, ...]:
        """Per row, why its logprob needs SGLang's sampler, or None."""
        if not self.mix.has_other_logprobs:
            return (None,) * len(self)
        return tuple(Reason.GREEDY_LOGPROB_AT_TEMPERATURE if row.tempered else None for row in self.rows)

    def temperatures(self, sampling_info: Any, original_logprobs: bool) -> torch.Tensor | None:
        """``[B, 1]`` float32, of the logprobs of a step, where the draw has others. Original logprobs are at
        temperature 1 in every row, wherever it has another."""
        return sampling_info.temperatures if self.mix.has_other_logprobs and not original_logprobs else None

    @functools.cached_property
    def fused(self) -> Routing:
        """The routing of a step in which every row is fused."""
        return Routing.all_fused(len(self))

    @functools.cached_property
    def native(self) -> Routing:
        """The routing of each step of a batch whose ``mix`` is ``all_native``."""
        return Routing(tuple(row.reason for row in self.rows))

    @functools.cached_property
    def routings(self) -> dict[tuple, Routing]:
        """The other routings made for this batch, by the key of ``routing_of``. A change of the rows makes a new
        ``Batch`` without any."""
        return {}

    @classmethod
    def of_requests(
        cls,
        requests: Sequence[Any],
        slots: Sequence[int],
        table: RowTable,
        server_seed: int,
        custom_processors: bool,
        arrivals: Arrivals | None = None,
        unreadable: Callable[[Exception], None] = lambda error: None,
    ) -> Batch:
        """A batch of SGLang's ``Req`` objects in these slots of its pool (``row_table.read_requests``)."""
        arrivals = Arrivals() if arrivals is None else arrivals
        return cls(read_requests(requests, slots, table, server_seed, custom_processors, arrivals, unreadable), table)

    def keep(self, indices: Sequence[int]) -> Batch:
        """The rows at ``indices``, in that order."""
        num_rows = len(indices)
        if num_rows and len(self.mix.kinds) == 1:
            return Batch(self.kinds[:num_rows], self.table, self.mix, num_rows if self.num_truncated else 0)
        if num_rows < 2:  # an itemgetter of one index returns no tuple
            return Batch("".join(self.kinds[index] for index in indices), self.table)
        return Batch("".join(operator.itemgetter(*indices)(self.kinds)), self.table)

    def followed_by(self, other: Batch) -> Batch:
        mix = self.mix if self.mix is other.mix else _mix_of(self.mix.kinds | other.mix.kinds)
        return Batch(self.kinds + other.kinds, self.table, mix, self.num_truncated + other.num_truncated)


def batch_of(sampling_info: Any) -> Batch | None:
    """The batch that follows this SamplingBatchInfo; None when SGLang made it in a way we do not know."""
    return getattr(sampling_info, BATCH_ATTRIBUTE, None)


def slots_of(sampling_info: Any, num_rows: int) -> torch.Tensor | None:
    """``[num_rows]``: the slots of the rows of this forward in SGLang's pool; None where SGLang has given none, or
    fewer. DP attention and beam search leave them longer than the logits."""
    slots: torch.Tensor | None = getattr(sampling_info, SLOTS_ATTRIBUTE, None)
    if slots is None or slots.shape[0] == num_rows:
        return slots
    return slots[:num_rows] if slots.shape[0] > num_rows else None


def to_device(values: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` on the device, without waiting for the copy."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


class TimeOfSGLang:
    """Seconds that SGLang's own penalties and grammars take while ours calls them. They are no cost of ours: stock
    SGLang takes them as well."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, started: float) -> None:
        """Add the time since ``started``, of ``time.perf_counter()``."""
        self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


time_of_sglang = TimeOfSGLang()


class GrammarError(ValueError):
    """A grammar of a kind that we do not know. everywhere: every rank of a server meets it alike."""

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class Part(NamedTuple):
    """Facts of some rows of a batch. edits: that any of them has. num_masked: rows with a grammar. num_truncated: rows
    with top-k, top-p or min-p."""

    edits: int
    num_masked: int
    num_truncated: int


@dataclasses.dataclass
class Routing:
    """Who serves each row of a batch. reasons: per row, why it takes SGLang's sampler; None where it is fused.

    native_rows: the batch of the rows that are not fused. flags: by the edits that are given, the number of nodes and
    the rows without a grammar, the ``Edit`` flags of each node of the fused rows, on the device, where the host has to
    say them; and the places of the nodes with a grammar and ``min_new_tokens``. contests: by the number of nodes, the
    flags of a step. last_asked: of the last step that had this routing, the arguments of ``asked`` and its result.
    """

    reasons: tuple[Reason | None, ...]
    native_rows: Any = None
    flags: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)
    contests: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    _part: Part | None = None
    last_asked: tuple[Any, Any, bool, Any, AskedLogprobs | None] = (..., ..., False, None, None)

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def whole(cls, reason: Reason, num_rows: int) -> Routing:
        """The routing of all rows to SGLang's sampler, for one reason."""
        return cls((reason,) * num_rows)

    @classmethod
    def all_fused(cls, num_rows: int) -> Routing:
        """A routing of all rows to the fused pass, made without a look at each."""
        routing = cls((None,) * num_rows)
        vars(routing).update(native=(), all_native=num_rows == 0, counts={("fused", ""): num_rows})
        return routing

    @functools.cached_property
    def native(self) -> tuple[int, ...]:
        """The rows of SGLang's sampler, ascending."""
        return tuple(row for row, reason in enumerate(self.reasons) if reason is not None)

    @functools.cached_property
    def all_native(self) -> bool:
        return len(self.native) == len(self.reasons)

    @functools.cached_property
    def counts(self) -> dict[tuple[str, str], int]:
        """Rows per path and reason."""
        return Counter(("fused", "") if reason is None else ("native", reason) for reason in self.reasons)

    def part(self, batch: Batch) -> Part:
        """The facts of the fused rows of the batch, as they were scheduled."""
        if not self.native:
            return Part(batch.mix.edits, batch.num_masked, batch.num_truncated)
        if self._part is None:
            rows = [row for row, reason in zip(batch.rows, self.reasons, strict=True) if reason is None]
            edits = int(functools.reduce(operator.or_, (row.edits for row in rows), Edit(0)))
            masked = sum(bool(row.edits & Edit.MASK) for row in rows)
            self._part = Part(edits, masked, sum(row.truncated for row in rows))
        return self._part

    def asked(
        self, top: list[int] | None, ids: list | None, original: bool, temperatures: torch.Tensor | None = None
    ) -> AskedLogprobs | None:
        """The logprobs that the fused rows ask for beside those of their tokens. SGLang has other lists, and another
        tensor of temperatures, where a batch has other rows. temperatures: ``[B, 1]`` float32, of the logprobs, where
        the draw has others."""
        last_top, last_ids, last_original, last_temperatures, asked = self.last_asked
        if (
            last_top is not top
            or last_ids is not ids
            or last_original is not original
            or last_temperatures is not temperatures
        ):
            flat = None if temperatures is None else temperatures.reshape(-1)
            asked = AskedLogprobs.of(self.native, top, ids, original, flat)
            self.last_asked = top, ids, original, temperatures, asked
        return asked

    @functools.cached_property
    def labels(self) -> list[str]:
        """Per row: "fused" or "native:REASON"."""
        return ["fused" if reason is None else f"native:{reason}" for reason in self.reasons]


def routing_of(
    batch: Batch,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int] | None,
    token_ids_logprobs: list | None,
    original_logprobs: bool,
    fuse_grammars: bool,
    vocab_size: int = MAX_TOP_LOGPROBS,
    other_temperatures: bool = False,
) -> Routing:
    """The routing of this step. Where every row is fused, it is found without a loop over the rows. Otherwise the steps
    of a batch whose rows do not change share one routing: everything else that it depends on is compared here.
    vocab_size: a request for the likeliest of more ids than there are is SGLang's, whose sampler refuses it.
    other_temperatures: the head has logprobs at other temperatures than those of the draw."""
    grammars = (sampling_info.grammars or ()) if not fuse_grammars else ()
    top = (top_logprobs_nums or ()) if return_logprob else ()
    ids = (token_ids_logprobs or ()) if return_logprob else ()
    mix = batch.mix
    most_top = min(MAX_TOP_LOGPROBS, vocab_size)
    # Original logprobs are at temperature 1 in every row, wherever it has another.
    tempered = return_logprob and mix.has_other_logprobs and not (original_logprobs or other_temperatures)
    lengths = () if not ids or ids.count(None) == len(ids) else tuple(-1 if one is None else len(one) for one in ids)
    if not (
        mix.is_native
        or grammars
        or tempered
        or max(top, default=0) > most_top
        or max(lengths, default=-1) > MAX_GIVEN_IDS
    ):
        return batch.fused
    key = (tuple(map(type, grammars)), return_logprob, tempered, tuple(top), lengths)
    routing = batch.routings.get(key)
    if routing is None:
        none = (None,) * len(batch)
        columns: list[Sequence[Reason | None]] = [[row.reason for row in batch.rows]]
        if grammars:
            columns.append([None if grammar is None else Reason.GRAMMAR for grammar in grammars])
        if return_logprob:
            columns.append([(Reason.TOP_LOGPROBS if n > most_top else None) for n in top] or none)
            columns.append([(Reason.TOKEN_IDS_LOGPROBS if n > MAX_GIVEN_IDS else None) for n in lengths] or none)
        if tempered:
            columns.append(batch.logprob_reasons)
        reasons = tuple(next(filter(None, row), None) for row in zip(*columns, strict=True))
        routing = batch.routings[key] = Routing(reasons)
    return routing


def edits_of(batch: Batch, routing: Routing, sampling_info: Any, device: torch.device) -> LogitEdits | None:
    """The edits of the fused rows; None where none of them has any. Without ``rows``, the flags of each row are those
    of its line in the table.

    Raises GrammarError for a grammar without a mask in a form that we know.
    """
    grammars = _fused_grammars(routing, sampling_info)
    kinds = _given_edits(batch, routing, grammars)
    if not kinds:
        return None
    additive, scaling = penalties_of(sampling_info) if kinds & _PENALTIES else (None, None)
    mask = grammar_mask(sampling_info, grammars) if kinds & _MASK else None
    edits = LogitEdits(additive, scaling, mask, sampling_info.logit_bias if kinds & _BIAS else None)
    return _with_flags(edits, batch, routing, grammars, device)


def edits_of_nodes(
    batch: Batch, routing: Routing, sampling_info: Any, grammar_mask: Any, num_nodes: int, device: torch.device
) -> LogitEdits | None:
    """``edits_of`` for a verification of drafts: all nodes of a row share its penalties and its bias; SGLang has filled
    their masks. None where no row has any.

    Raises GrammarError for a mask in a form that we do not know, and where there is none.
    """
    grammars = _fused_grammars(routing, sampling_info)
    kinds = _given_edits(batch, routing, grammars)
    if not kinds:
        return None
    mask = None
    if kinds & _MASK:
        mask = getattr(grammar_mask, "vocab_mask", None)
        check_mask(mask, len(batch) * num_nodes)
    edits = LogitEdits(
        # Penalties that SGLang has not accumulated are not applied to drafts either.
        additive=sampling_info.acc_additive_penalties if kinds & Edit.ADDITIVE else None,
        scaling=sampling_info.acc_scaling_penalties if kinds & Edit.SCALING else None,
        mask=mask,
        bias=sampling_info.logit_bias if kinds & Edit.BIAS else None,
        repeats=num_nodes,
    )
    return _with_flags(edits, batch, routing, grammars, device) if edits.given else None


def _given_edits(batch: Batch, routing: Routing, grammars: Sequence[Any]) -> int:
    """The ``Edit`` flags that a fused row has in this step."""
    kinds = routing.part(batch).edits
    return (kinds | _MASK) if any(grammars) else (kinds & ~_MASK)


def _with_flags(
    edits: LogitEdits, batch: Batch, routing: Routing, grammars: Sequence[Any], device: torch.device
) -> LogitEdits:
    """``edits``, with the flags of each row where those of the table do not hold: a row whose grammar came or went
    after it was scheduled, and one whose grammar and ``min_new_tokens`` leave it no token."""
    contested = batch.mix.is_contested and edits.additive is not None and edits.mask is not None
    as_scheduled = edits.mask is None or len(grammars) - grammars.count(None) == routing.part(batch).num_masked
    if as_scheduled and not contested:
        return edits
    key = edits.given, edits.repeats, tuple(grammar is None for grammar in grammars)
    if key not in routing.flags:
        routing.flags[key] = _flags_of(edits, batch, routing, grammars, device)
    rows, contests = routing.flags[key]
    edits = dataclasses.replace(edits, rows=rows)
    return _grammar_first(edits, routing, contests) if contested and len(contests) else edits


def _flags_of(
    edits: LogitEdits, batch: Batch, routing: Routing, grammars: Sequence[Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Routing.flags`` of the edits that are given."""
    given, nodes = edits.given, range(edits.repeats)
    places = zip(batch.rows, grammars or (None,) * len(batch), routing.reasons, strict=True)
    flags = [
        Edit(0) if reason is not None else row.edits & ~Edit.MASK | (Edit.MASK if grammar is not None else Edit(0))
        for row, grammar, reason in places
    ]
    contests = [
        place * edits.repeats + node
        for place, (row, flag) in enumerate(zip(batch.rows, flags, strict=True))
        if row.keeps_going and flag & Edit.MASK
        for node in nodes
    ]
    rows = [int(flag & given) for flag in flags for _ in nodes]
    return to_device(rows, torch.int32, device), to_device(contests, torch.int64, device)


def _grammar_first(edits: LogitEdits, routing: Routing, places: torch.Tensor) -> LogitEdits:
    """``edits`` without the penalties of a row where they leave no id that its grammar allows. places: of the rows that
    this may happen to.

    ``min_new_tokens`` forbids the tokens that end an answer, and a grammar that is complete allows nothing else: SGLang
    has no token then. The flags of each step are at one address, which captured graphs read.
    """
    assert edits.additive is not None and edits.mask is not None and edits.rows is not None
    rows = routing.contests.get(edits.repeats)
    if rows is None:
        rows = routing.contests[edits.repeats] = torch.empty_like(edits.rows)
    allowed = _allowed_ids(edits.mask[places], edits.additive.shape[1])
    possible = edits.additive[places // edits.repeats] > float("-inf")
    stuck = ~(allowed & possible).any(1)
    rows.copy_(edits.rows)
    rows[places] &= ~(stuck.to(torch.int32) * int(Edit.ADDITIVE))
    return dataclasses.replace(edits, rows=rows)


def _allowed_ids(mask: torch.Tensor, width: int) -> torch.Tensor:
    """``[B, width]`` bool: the allowed ids, from a mask in either form of ``LogitEdits``."""
    if mask.dtype is torch.bool:
        return ~mask[:, :width]
    bits = (mask.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    allowed = bits.flatten(1)[:, :width] != 0
    return torch.nn.functional.pad(allowed, (0, width - allowed.shape[1]), value=True)


def _fused_grammars(routing: Routing, sampling_info: Any) -> Sequence[Any]:
    """The grammar of each row, None where another sampler serves it; empty where no row has one."""
    grammars = sampling_info.grammars or ()
    if not grammars or not routing.native:
        return grammars
    return [grammar if reason is None else None for grammar, reason in zip(grammars, routing.reasons, strict=False)]


def penalties_of(sampling_info: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Additive and scaling penalties of the whole batch, ``[B, V]`` each, or None.

    Overlap mode has accumulated them on its copy already. Elsewhere the penalizers are asked, on a copy as well:
    penalties left on the original would be applied a second time, beside the penalizers. Additive ones
    come first in both modes; by themselves, the penalizers have the order of a Python set.
    """
    orchestrator = sampling_info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        sampling_info, started = copy.copy(sampling_info), time.perf_counter()
        sampling_info.update_penalties()
        time_of_sglang.add(started)
    return sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties


def grammar_mask(sampling_info: Any, grammars: Sequence[Any]) -> torch.Tensor:
    """The mask of these grammars: SGLang's code fills it, and nothing else sees it. Raises GrammarError."""
    info = sampling_info
    if grammars is not info.grammars:
        info = copy.copy(info)
        info.grammars = grammars
    started = time.perf_counter()
    try:
        info.update_regex_vocab_mask()
        mask = info.grammar_mask.vocab_mask
        info.grammar_mask = None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A missing attribute is the same on all ranks; another error, such as a device's, may be local.
        everywhere = isinstance(error, (AttributeError, NotImplementedError, TypeError, ValueError))
        raise GrammarError(f"{type(error).__name__}: {error}", everywhere) from error
    finally:
        time_of_sglang.add(started)
    check_mask(mask, len(grammars))
    return mask


def check_mask(mask: Any, num_rows: int) -> None:
    """Raise GrammarError unless this is a grammar's mask of so many rows."""
    if not isinstance(mask, torch.Tensor):
        raise GrammarError(f"its mask is a {type(mask).__name__}; expected a tensor")
    if mask.dim() != 2 or mask.dtype not in (torch.int32, torch.bool) or mask.shape[0] != num_rows:
        raise GrammarError(
            f"its mask is {tuple(mask.shape)} {mask.dtype}; expected [{num_rows}, words] int32 or "
            f"[{num_rows}, vocabulary] bool"
        )
