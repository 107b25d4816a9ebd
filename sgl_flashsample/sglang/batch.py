"""One batch of SGLang's as the fused pass needs it: parameters per row, which sampler serves each row, and what SGLang
does to the logits before it samples.

SGLang's batch-level flags are sticky: after one request with top-p has joined, ``need_top_p_sampling`` stays set until
the batch is empty, and a greedy request (top_k 1) sets ``need_top_k_sampling`` for all. So what matters is kept per row
and follows the batch through its filters and merges.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.config import next_power_of_2
from ..kernels.params import BatchParams, Edit, LogitEdits, Truncation
from .arrivals import Arrivals, given_seed

BATCH_ATTRIBUTE = "_flashsample_batch"  # on SamplingBatchInfo
REASON_ATTRIBUTE = "_flashsample_reason"  # on LogitsProcessorOutput: why its logits were computed after all
PREPROCESS_ATTRIBUTE = "_flashsample_preprocess"  # on LogitsProcessorOutput: SGLang's preprocessing, still to be done

# Attributes of SGLang's SamplingBatchInfo: whether its sampler has to truncate.
NEED_FLAGS = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
TOP_K_OFF = 1 << 30  # SGLang's TOP_K_ALL
# Removes no token of a float32 softmax. Where min-p is given, SGLang takes top-p of what top-k has left, and so do we.
NO_MIN_P = 1e-37


class Row(NamedTuple):
    """One request, as far as the host knows it.

    reason: why it needs SGLang's sampler, or None. tempered: greedy with a temperature other than 1, which SGLang
    applies to its logprob only beside sampled rows. needs: ``NEED_FLAGS`` of this request alone. edits: what SGLang
    changes in its logits, grammars apart. seeded: whether the request gave a seed, which must give the same tokens each
    time. keeps_going: it has ``min_new_tokens``.
    """

    reason: Reason | None
    greedy: bool
    tempered: bool
    needs: tuple[bool, bool, bool]
    edits: Edit
    seeded: bool
    top_k: int
    keeps_going: bool = False

    @property
    def truncated(self) -> bool:
        """The row has top-k, top-p or min-p; a greedy row has none."""
        return any(self.needs) and not self.greedy


class RowTensors(NamedTuple):
    """The parameters of the rows on the device, ``[B]`` each."""

    temperature: torch.Tensor  # f32, 0 on greedy rows
    seed: torch.Tensor  # i64
    top_k: torch.Tensor  # i32
    top_p: torch.Tensor  # f32
    min_p: torch.Tensor  # f32


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch. Immutable: a forward keeps the batch that it was routed with."""

    rows: tuple[Row, ...]
    tensors: RowTensors

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def all_greedy(self) -> bool:
        """No row is drawn: each has its most likely token."""
        return all(row.greedy for row in self.rows)

    @functools.cached_property
    def distribution_only(self) -> bool:
        """The caller needs the distribution alone, and FlashInfer can draw from it: no row is greedy or has a seed, all
        have top-k or top-p, none has min-p."""
        return all(
            not row.greedy and not row.seeded and (row.needs[0] or row.needs[1]) and not row.needs[2]
            for row in self.rows
        )

    @functools.cached_property
    def num_truncated(self) -> int:
        """How many rows have top-k, top-p or min-p."""
        return sum(row.truncated for row in self.rows)

    @functools.cached_property
    def truncation(self) -> Truncation | None:
        """Top-k, top-p and min-p; None where no row has any."""
        if not self.num_truncated:
            return None
        largest = max(row.top_k for row in self.rows if row.truncated)
        # Rounded up to a power of two: batches that differ below that share CUDA graphs.
        max_top_k = next_power_of_2(largest) if largest < TOP_K_OFF else None
        return Truncation(self.tensors.top_k, self.tensors.top_p, self.tensors.min_p, max_top_k)

    @functools.cached_property
    def logprob_reasons(self) -> tuple[Reason | None, ...]:
        """Per row, why its logprob needs SGLang's sampler, or None."""
        if self.all_greedy:
            return (None,) * len(self)
        return tuple(Reason.GREEDY_LOGPROB_AT_TEMPERATURE if row.tempered else None for row in self.rows)

    @functools.cached_property
    def routings(self) -> dict[tuple, Routing]:
        """The routings made for this batch, by the key of ``routing_of``. A change of the rows makes a new ``Batch``
        without any."""
        return {}

    def params(self, positions: torch.Tensor, edits: LogitEdits | None) -> BatchParams:
        """The parameters of the fused pass. positions: ``[B]`` int64."""
        return BatchParams(
            self.tensors.temperature,
            self.tensors.seed,
            positions,
            self.truncation,
            edits,
            self.all_greedy,
            self.distribution_only,
        )

    def of_nodes(self, num_nodes: int) -> Batch:
        """The batch of a verification of drafts: each row ``num_nodes`` times. SGLang's verification ignores min-p, and
        takes top-p of what top-k has left."""
        nodes = self._of_nodes.get(num_nodes)
        if nodes is None:
            # Seeded: a draft is accepted where it equals the draw, so a node needs the noise of its position.
            rows = [
                row._replace(needs=(*row.needs[:2], row.needs[0] and row.needs[1]), seeded=True) for row in self.rows
            ]
            min_p = [NO_MIN_P if row.needs[2] else 0.0 for row in rows]
            tensors = self.tensors._replace(min_p=to_device(min_p, torch.float32, self.tensors.min_p.device))
            repeated = RowTensors(*(tensor.repeat_interleave(num_nodes) for tensor in tensors))
            nodes = self._of_nodes[num_nodes] = Batch(tuple(row for row in rows for _ in range(num_nodes)), repeated)
        return nodes

    @functools.cached_property
    def _of_nodes(self) -> dict[int, Batch]:
        return {}

    @classmethod
    def of_requests(
        cls,
        requests: Sequence[Any],
        server_seed: int,
        custom_processors: bool,
        device: torch.device | str,
        arrivals: Arrivals | None = None,
        unreadable: Callable[[Exception], None] = lambda error: None,
    ) -> Batch:
        """A batch of SGLang's ``Req`` objects. Copies to the device without waiting for it. A request that cannot be
        read here, though SGLang serves it, is a row of SGLang's sampler; ``unreadable`` gets the error."""
        arrivals = Arrivals() if arrivals is None else arrivals
        rows: list[Row] = []
        values: list[tuple[float, int, int, float, float]] = []
        for request in requests:
            try:
                seed = arrivals.seed_of(request, server_seed)  # first: it numbers a request that cannot be read as well
                row, params = _row_of(request, custom_processors), request.sampling_params
                temperature = 0.0 if row.greedy else float(params.temperature)
                value = (temperature, seed, row.top_k, float(params.top_p), float(params.min_p))
            except Exception as error:
                row, value = UNREADABLE
                unreadable(error)
            rows.append(row)
            values.append(value)
        columns = zip(*values, strict=True) if values else ((),) * len(RowTensors._fields)
        dtypes = (torch.float32, torch.int64, torch.int32, torch.float32, torch.float32)
        tensors = (to_device(column, dtype, device) for column, dtype in zip(columns, dtypes, strict=True))
        return cls(tuple(rows), RowTensors(*tensors))

    def keep(self, indices: Iterable[int], device_indices: torch.Tensor) -> Batch:
        """The rows at ``indices`` (also given as a device tensor), in that order."""
        rows = tuple(self.rows[i] for i in indices)
        return Batch(rows, RowTensors(*(tensor[device_indices] for tensor in self.tensors)))

    def followed_by(self, other: Batch) -> Batch:
        tensors = zip(self.tensors, other.tensors, strict=True)
        return Batch(self.rows + other.rows, RowTensors(*(torch.cat(pair) for pair in tensors)))


def batch_of(sampling_info: Any) -> Batch | None:
    """The batch that follows this SamplingBatchInfo; None when SGLang made it in a way we do not know."""
    return getattr(sampling_info, BATCH_ATTRIBUTE, None)


def to_device(values: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` on the device, without waiting for the copy."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def _row_of(request: Any, custom_processors: bool) -> Row:
    params = request.sampling_params
    greedy = params.top_k <= 1  # SGLang turns temperature 0 into top_k 1, and treats every top_k 1 as greedy
    edits = Edit(0)
    if params.frequency_penalty != 0 or params.presence_penalty != 0 or params.min_new_tokens > 0:
        edits |= Edit.ADDITIVE
    if params.repetition_penalty != 1:
        edits |= Edit.SCALING
    if params.logit_bias is not None:
        edits |= Edit.BIAS
    return Row(
        reason=native_reason(request, custom_processors),
        greedy=greedy,
        tempered=greedy and params.temperature != 1.0,
        needs=(params.top_p != 1.0, params.top_k != TOP_K_OFF, params.min_p > 0),
        edits=edits,
        seeded=given_seed(params) is not None,
        top_k=int(params.top_k),  # SGLang lets a fraction through, and drops it
        keeps_going=params.min_new_tokens > 0,
    )


def native_reason(request: Any, custom_processors: bool) -> Reason | None:
    """Why this request needs SGLang's sampler, the first that applies; None when fused."""
    params = request.sampling_params
    checks = (
        (Reason.CUSTOM_LOGIT_PROCESSOR, custom_processors and bool(request.custom_logit_processor)),
        (Reason.SAMPLING_MASK, bool(getattr(request, "return_sampling_mask", False))),
        (Reason.BEAM_SEARCH, (getattr(params, "beam_width", None) or 1) > 1),
    )
    return next((reason for reason, applies in checks if applies), None)


class Reason(enum.StrEnum):
    """Why a row takes SGLang's sampler: the label ``reason`` of the metrics. README.md of this folder says what each
    means."""

    # Reasons of a request.
    CUSTOM_LOGIT_PROCESSOR = "custom_logit_processor"
    SAMPLING_MASK = "sampling_mask"
    BEAM_SEARCH = "beam_search"
    UNREADABLE = "unreadable"
    TOP_LOGPROBS = "top_logprobs"
    TOKEN_IDS_LOGPROBS = "token_ids_logprobs"
    ORIGINAL_LOGPROBS = "original_logprobs"
    GREEDY_LOGPROB_AT_TEMPERATURE = "greedy_logprob_at_temperature"
    # Reasons of a batch.
    INPUT_LOGPROBS = "input_logprobs"
    LOGITS_COMPUTED = "logits_computed"
    SAMPLING_OBSERVER = "sampling_observer"
    UNKNOWN_ROWS = "unknown_rows"
    POSITIONS = "positions"
    UNKNOWN_ARGUMENT = "unknown_argument"
    OUT_OF_MEMORY = "out_of_memory"
    # Reasons of a server.
    INACTIVE = "inactive"
    GRAMMAR = "grammar"
    ERROR = "error"


# The row of a request that cannot be read. Its parameters are placeholders: SGLang's sampler draws it.
UNREADABLE = (
    Row(Reason.UNREADABLE, False, False, needs=(True, True, True), edits=Edit(0), seeded=False, top_k=TOP_K_OFF),
    (1.0, 0, TOP_K_OFF, 1.0, 0.0),
)


class GrammarError(ValueError):
    """A grammar of a kind that we do not know. everywhere: every rank of a server meets it alike."""

    def __init__(self, message: str, everywhere: bool = True) -> None:
        super().__init__(message)
        self.everywhere = everywhere


@dataclasses.dataclass
class Routing:
    """Who serves each row of a batch. reasons: per row, why it takes SGLang's sampler; None where it is fused.

    Set in the first step of the batch. native_rows: the batch of the rows that are not fused. edit_kinds, edit_rows:
    the ``Edit`` flags of the others, in all, and per row on the device. num_truncated: of the others, those with top-k,
    top-p or min-p. node_rows: per node of a tree of drafts, by the edits that are given and the number of nodes.
    contested: the others with a grammar and with ``min_new_tokens``. contests: by the number of nodes, the places of
    these and the flags of all rows in this step.
    """

    reasons: tuple[Reason | None, ...]
    native_rows: Any = None
    edit_kinds: Edit | None = None
    edit_rows: torch.Tensor | None = None
    num_truncated: int | None = None
    node_rows: dict[tuple[Edit, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    contested: tuple[int, ...] = ()
    contests: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    @classmethod
    def whole(cls, reason: Reason, num_rows: int) -> Routing:
        """A routing of all rows to SGLang's sampler, for one reason."""
        return cls((reason,) * num_rows)

    @functools.cached_property
    def native(self) -> tuple[int, ...]:
        """The rows of SGLang's sampler, ascending."""
        return tuple(row for row, reason in enumerate(self.reasons) if reason is not None)

    @functools.cached_property
    def all_native(self) -> bool:
        return len(self.native) == len(self.reasons)

    @functools.cached_property
    def counts(self) -> Counter[tuple[str, str]]:
        """Rows per path and reason."""
        return Counter(("fused", "") if reason is None else ("native", reason) for reason in self.reasons)

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
) -> Routing:
    """The routing of this step. While the rows of a batch do not change, its steps share one routing: everything else
    that the routing depends on is compared here, without a loop over the rows."""
    grammars = sampling_info.grammars or ()
    key: tuple = ()  # for a batch without grammars and logprobs
    top: tuple[int, ...] = ()
    ids: tuple[type, ...] = ()
    if grammars or return_logprob:
        top = tuple(top_logprobs_nums or ()) if return_logprob else ()
        ids = tuple(map(type, token_ids_logprobs or ())) if return_logprob else ()
        key = (tuple(map(type, grammars)), fuse_grammars, return_logprob, top, ids)
    routing = batch.routings.get(key)
    if routing is None:
        none = (None,) * len(batch)
        columns: list[Sequence[Reason | None]] = [[row.reason for row in batch.rows]]
        if grammars and not fuse_grammars:
            columns.append([None if grammar is None else Reason.GRAMMAR for grammar in grammars])
        if return_logprob:
            columns.append((Reason.ORIGINAL_LOGPROBS if original_logprobs else None,) * len(batch))
            columns.append([(Reason.TOP_LOGPROBS if n > 0 else None) for n in top] or none)
            columns.append([None if kind is type(None) else Reason.TOKEN_IDS_LOGPROBS for kind in ids] or none)
            columns.append(batch.logprob_reasons)
        reasons = tuple(next(filter(None, row), None) for row in zip(*columns, strict=True))
        routing = batch.routings[key] = Routing(reasons)
    return routing


def edits_of(batch: Batch, routing: Routing, sampling_info: Any) -> LogitEdits | None:
    """The edits of the fused rows; None where none of them has any.

    Raises GrammarError for a grammar without a mask in a form that we know.
    """
    kinds = _edit_kinds(batch, routing, sampling_info)
    if not kinds:
        return None
    additive, scaling = penalties_of(sampling_info) if kinds & (Edit.ADDITIVE | Edit.SCALING) else (None, None)
    edits = LogitEdits(
        additive=additive,
        scaling=scaling,
        mask=grammar_mask(sampling_info, _fused_grammars(routing, sampling_info)) if kinds & Edit.MASK else None,
        bias=sampling_info.logit_bias if kinds & Edit.BIAS else None,
        rows=routing.edit_rows,
    )
    return _grammar_first(edits, routing) if routing.contested else edits


def edits_of_nodes(
    batch: Batch, routing: Routing, sampling_info: Any, grammar_mask: Any, num_nodes: int
) -> LogitEdits | None:
    """``edits_of`` for a verification of drafts: all nodes of a row share its penalties and its bias; SGLang has filled
    their masks. None where no row has any.

    Raises GrammarError for a mask in a form that we do not know, and where there is none.
    """
    kinds = _edit_kinds(batch, routing, sampling_info)
    if not kinds:
        return None
    assert routing.edit_rows is not None

    mask = None
    if kinds & Edit.MASK:
        mask = getattr(grammar_mask, "vocab_mask", None)
        check_mask(mask, len(batch) * num_nodes)
    edits = LogitEdits(
        additive=sampling_info.acc_additive_penalties if kinds & Edit.ADDITIVE else None,
        scaling=sampling_info.acc_scaling_penalties if kinds & Edit.SCALING else None,
        mask=mask,
        bias=sampling_info.logit_bias if kinds & Edit.BIAS else None,
        repeats=num_nodes,
    )
    # Penalties that SGLang has not accumulated are not applied to drafts either.
    given = edits.given
    if not given:
        return None
    rows = routing.node_rows.get((given, num_nodes))
    if rows is None:
        rows = (routing.edit_rows & int(given)).repeat_interleave(num_nodes)
        routing.node_rows[given, num_nodes] = rows
    edits = dataclasses.replace(edits, rows=rows)
    return _grammar_first(edits, routing) if routing.contested else edits


def _grammar_first(edits: LogitEdits, routing: Routing) -> LogitEdits:
    """``edits`` without the penalties of a row where they leave no id that its grammar allows.

    ``min_new_tokens`` forbids the tokens that end an answer, and a grammar that is complete allows nothing else: SGLang
    has no token then. The flags of each step are at one address, which captured graphs read.
    """
    if edits.additive is None:  # drafts, whose penalties SGLang has not accumulated
        return edits
    assert edits.mask is not None and edits.rows is not None  # a contested row has a grammar
    contest = routing.contests.get(edits.repeats)
    if contest is None:
        nodes = [row * edits.repeats + node for row in routing.contested for node in range(edits.repeats)]
        places = to_device(nodes, torch.int64, edits.rows.device)
        contest = routing.contests[edits.repeats] = places, torch.empty_like(edits.rows)
    places, rows = contest
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


def _edit_kinds(batch: Batch, routing: Routing, sampling_info: Any) -> Edit:
    """``edit_kinds`` of the routing. Sets them, with ``edit_rows``, in a new one."""
    if routing.edit_kinds is None:
        _find_edits(batch, routing, sampling_info)
    assert routing.edit_kinds is not None
    return routing.edit_kinds


def _find_edits(batch: Batch, routing: Routing, sampling_info: Any) -> None:
    grammars = _fused_grammars(routing, sampling_info) or [None] * len(batch)
    flags = [
        Edit(0) if reason is not None else (row.edits | Edit.MASK if grammar is not None else row.edits)
        for row, grammar, reason in zip(batch.rows, grammars, routing.reasons, strict=True)
    ]
    routing.edit_kinds = functools.reduce(operator.or_, flags, Edit(0))
    if routing.edit_kinds:
        routing.edit_rows = to_device([int(flag) for flag in flags], torch.int32, batch.tensors.seed.device)
    pairs = enumerate(zip(batch.rows, flags, strict=True))
    routing.contested = tuple(place for place, (row, flag) in pairs if row.keeps_going and flag & Edit.MASK)


def _fused_grammars(routing: Routing, sampling_info: Any) -> list:
    """The grammar of each row, None where another sampler serves it; an empty list where no row has one."""
    return [
        grammar if reason is None else None
        for grammar, reason in zip(sampling_info.grammars or (), routing.reasons, strict=False)
    ]


def penalties_of(sampling_info: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Additive and scaling penalties of the whole batch, ``[B, V]`` each, or None.

    Overlap mode has accumulated them on its copy already. Elsewhere the penalizers are asked, on a copy as well:
    penalties left on the original would be applied a second time, beside the penalizers. Additive ones
    come first in both modes; by themselves, the penalizers have the order of a Python set.
    """
    orchestrator = sampling_info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        sampling_info = copy.copy(sampling_info)
        sampling_info.update_penalties()
    return sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties


def grammar_mask(sampling_info: Any, grammars: list) -> torch.Tensor:
    """The mask of these grammars: SGLang's code fills it, on a copy that nothing else sees. Raises GrammarError."""
    info = copy.copy(sampling_info)
    info.grammars = grammars
    try:
        info.update_regex_vocab_mask()
        mask = info.grammar_mask.vocab_mask
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A missing attribute is the same on all ranks; another error, such as a device's, may be local.
        everywhere = isinstance(error, (AttributeError, NotImplementedError, TypeError, ValueError))
        raise GrammarError(f"{type(error).__name__}: {error}", everywhere) from error
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
