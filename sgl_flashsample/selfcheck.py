"""Kernels compiled ahead and compared with their reference on this machine, in seconds: what ``doctor`` and a starting
server run, and what the tuner asks before it times a configuration.

Were kernels compiled one by one, the first start on a machine would wait for each. Threads are enough: Triton lets go
of Python's lock in its passes, in LLVM and around ptxas, four fifths of a compilation. They also work where child
processes do not, as in SGLang's scheduler, which is a daemon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from .cpu_path import draws_in_host_memory
from .defaults import HeadTraits
from .dispatch import DispatchTable, reading_table
from .files import first_line
from .flashinfer_path import FlashInferError, draw_with_flashinfer
from .invariant import tile_of
from .kernels.config import ReadConfig, ScreenConfig
from .kernels.gather_logprobs import head_logprobs
from .kernels.gather_rows import LINE_WORDS, RowBuffers, StagedBatch, gather_rows, stage_rows, write_rows
from .kernels.host_memory import copy_words
from .kernels.launch import compiling_only
from .kernels.params import BatchParams, Edit, LMHead, LogitEdits, Truncation
from .kernels.reference import (
    Reference,
    allowed_ref,
    edit_logits_ref,
    logits_ref,
    sample_ref,
    transform_ref,
    truncated_sample_ref,
)
from .kernels.rng import GROUP_SIZE
from .kernels.top_logprobs import WIDTHS
from .kernels.workspace import LogitsBuffer
from .kinds import BATCH_KINDS, PLAIN, BatchKind, Config
from .logprobs import WantedLogprobs
from .paths import Parts, compute_logits, launch, launch_with_logprobs, logprobs_in_chunks
from .screen import Screen

logger = logging.getLogger("sgl_flashsample")

# A server compiles for batches up to this size at its start; the last tile also serves larger ones.
MAX_COMPILED_ROWS = 512
# Enough ids for each program of a large GPU to walk several vocabulary tiles.
MAX_IDS = 40_000
# Ids that the float64 reference takes at a time: a server that loads its model has little memory to spare.
CHUNK_IDS = 2_048
# Configurations for fewer rows are checked with so many: a single row may be greedy, which does not test the noise.
CHECKED_ROWS = 4
MAX_COMPILING_THREADS = 8
COMPILED_TOP_LOGPROBS = WIDTHS[:2]  # more likeliest ids of a row, 33 to 128, are rare
NARROW = 16  # hidden size of a head whose GEMM makes logits to read
# Rows of the batches in which a row is tried; where kernels are interpreted, few.
TRIED_ROWS, INTERPRETED_ROWS = (2, 17, 64, 65, 130), (2, 5)
# Whenever tensor cores add so many terms to the accumulator, they truncate the sum to 24 bits of the largest term.
_TERMS_AT_ONCE = 16
_ACCUMULATOR_ERROR = 2.0**-23


def first_ids(head: LMHead, most: int) -> LMHead:
    """``head`` cut to about ``most`` ids; its last group is as full as the whole vocabulary's, which decides how a
    reader is compiled."""
    return head.first(min(head.vocab_size, most // GROUP_SIZE * GROUP_SIZE + head.vocab_size % GROUP_SIZE))


def compile_ahead(heads: Sequence[Parts], max_rows: int, table: DispatchTable, *, bool_masks: bool = False) -> None:
    """Compile the kernels that batches of 1 to ``max_rows`` rows of ``heads`` launch, whatever their features, and
    those that gather a batch from a table of rows; run none of them. For the first head, where it is no shard, also the
    kernels for logprobs of up to 32 likeliest ids and of given ids, of a batch and of a prompt.

    A head with a screen is also compiled for screened batches. table: the configuration of each batch. bool_masks: also
    the kernels for grammar masks of dtype bool. A kernel that fails to compile fails again where it is launched, and is
    reported there.
    """
    if triton.knobs.runtime.interpret or draws_in_host_memory(heads[0].lm_head.weight.device):
        return  # there is nothing to compile
    threads = min(MAX_COMPILING_THREADS, len(os.sched_getaffinity(0)))
    try:
        with (
            ThreadPoolExecutor(threads, initializer=_leave_signals_to_others) as pool,
            _dropped_when_interrupted(pool),
            triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
            _dropped_when_interrupted(pool, mode),  # leaving the mode waits for all that it was given
            compiling_only(),
        ):
            for parts in heads:
                # The kernels that take longest come first, so that none of them is left alone at the end.
                used = table.configs_up_to(max_rows, screened=parts.screen is not None)
                for kind, _, config in sorted(used, key=lambda one: not one[0].truncate):
                    if kind.truncate and parts.lm_head.shards > 1:
                        continue  # only a whole vocabulary is truncated
                    for return_logprob in (False,) if kind.screen else (False, True):
                        for masks in _masks_of(kind, bool_masks):
                            launch_once(parts, config, kind, return_logprob, **masks)
            launch_row_table(heads[0].lm_head.weight[:1].to(heads[0].lm_head.hidden_dtype))
            if heads[0].lm_head.shards == 1:
                for kind in dict.fromkeys(kind.unscreened._replace(greedy=False) for kind in BATCH_KINDS):
                    for masks in _masks_of(kind, bool_masks):
                        launch_logprobs_once(heads[0], kind, **masks)
    except Exception as error:  # another Triton: each kernel is compiled at its first launch, as ever
        logger.debug("flashsample: kernels are not compiled ahead: %s", first_line(error))


def _leave_signals_to_others() -> None:
    """A compiler that this thread starts inherits its mask. Else Ctrl-C ends the compiler too, and Triton prints the
    program that it did not compile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextlib.contextmanager
def _dropped_when_interrupted(pool: ThreadPoolExecutor, mode: triton.AsyncCompileMode | None = None) -> Iterator[None]:
    """A KeyboardInterrupt in the block drops the work that waits in the pool, and what ``mode`` waits for of it."""
    try:
        yield
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        if mode is not None:  # nobody tells it that a future was cancelled
            mode.raw_futures = [future for future in mode.raw_futures if not future.cancelled()]
        raise


def _masks_of(kind: BatchKind, bool_masks: bool) -> list[dict[str, bool]]:
    """The options of ``one_row`` for each kernel that batches of this kind need: a mask of words or of bools, beside
    other edits or alone."""
    if not kind.edit:
        return [{}]
    each = itertools.product((False, True) if bool_masks else (False,), (False, True))
    return [{"bool_mask": bool_mask, "only_mask": only_mask} for bool_mask, only_mask in each]


def launch_once(parts: Parts, config: Config, kind: BatchKind, return_logprob: bool = False, **masks: bool) -> None:
    """Launch the kernels of a batch of this kind, with one row: kernels do not depend on the number of rows. masks: as
    in ``one_row``."""
    hidden, params = one_row(parts.lm_head, kind, **masks)
    launch(config, hidden, params, parts, return_logprob=return_logprob)


def launch_logprobs_once(parts: Parts, kind: BatchKind, **masks: bool) -> None:
    """Launch the kernels of a batch of this kind, with one row, whose requests want logprobs of up to 32 likeliest ids
    and of given ids; where its kind is the plain one, also those of a prompt."""
    hidden, params = one_row(parts.lm_head, kind, **masks)
    counts, ids = torch.zeros_like(params.seed, dtype=torch.int32), params.seed[:, None]
    for k in COMPILED_TOP_LOGPROBS:
        launch_with_logprobs(hidden, params, parts, WantedLogprobs(k, counts, ids))
    if parts.lm_head.scale is None:
        head_logprobs(hidden, parts.lm_head, ids, hidden.new_zeros(1, 2, dtype=torch.float32), params)
    if kind == PLAIN:
        for k in (0, *COMPILED_TOP_LOGPROBS):
            logprobs_in_chunks(hidden, params.seed, parts, WantedLogprobs(k), 1)


def one_row(
    head: LMHead, kind: BatchKind, *, bool_mask: bool = False, only_mask: bool = False
) -> tuple[torch.Tensor, BatchParams]:
    """Hidden states and parameters of a batch of this kind. bool_mask, only_mask: as in ``edits_of_every_kind``."""
    weight = head.weight
    row = torch.zeros(1, dtype=torch.int64, device=weight.device)
    one = torch.ones(1, dtype=torch.float32, device=weight.device)
    params = BatchParams(
        one,
        row,
        row,
        Truncation(row.int(), one, one) if kind.truncate else None,
        edits_of_every_kind(row, head, bool_mask=bool_mask, only_mask=only_mask)[0] if kind.edit else None,
        all_greedy=kind.greedy,
    )
    return torch.zeros(1, weight.shape[1], dtype=head.hidden_dtype, device=weight.device), params


def launch_row_table(weight: torch.Tensor) -> None:
    """Launch the kernels that write a table of rows, that gather a batch from it, and that copy words to and from host
    memory, with one row. weight: ``[V, D]``; the hidden states are like its rows."""
    device = weight.device
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    lines = torch.zeros(1, LINE_WORDS, dtype=torch.int32, device=device)
    write_rows(lines.clone(), slots, lines)
    out = RowBuffers.allocate(1, device)
    gather_rows(lines, slots, slots, out)
    stage_rows(StagedBatch(device), lines, weight.new_zeros(1, weight.shape[1]), out)
    copy_words(lines[0], lines.new_zeros(LINE_WORDS))
    copy_words(lines[0], lines.new_zeros(LINE_WORDS + 2), tells=True)


def compare_rows_with_reference(
    vocab_size: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    *,
    logit_scale: float | None = None,
    softcap: float | None = None,
    bool_masks: bool = False,
) -> str | None:
    """The first difference from the reference in draws of ``api.sample_from_logits`` from ``[B, width]`` logits, by
    which ranks that share a head draw whole rows; None without one."""
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn(width, NARROW, generator=generator, device=device).to(dtype)
    head = LMHead(weight, vocab_size=vocab_size, logit_scale=logit_scale, softcap=softcap)
    return refuse_wrong(head, max_rows, reading_table(HeadTraits.of(head)), bool_masks=bool_masks).fault


@dataclasses.dataclass(frozen=True)
class Checked:
    """table: the choices that were checked, without the refused ones. reason: why not even the built-in ones can be
    trusted, or None. refused: of each configuration that was taken out, what was wrong with it. unscreened: why nothing
    is screened any more, or None."""

    table: DispatchTable
    reason: str | None
    refused: tuple[str, ...]
    unscreened: str | None = None

    @property
    def fault(self) -> str | None:
        """The first difference from the reference; None without one."""
        return next(iter(self.refused), None) or self.unscreened or self.reason


def refuse_wrong(
    head: LMHead,
    max_rows: int,
    table: DispatchTable,
    screen: Screen | None = None,
    *,
    bool_masks: bool = False,
) -> Checked:
    """Draw with every configuration that batches of up to ``max_rows`` rows take in ``table``, whatever their features,
    on the first ids of ``head``, and compare each token with the reference's (near-ties excepted). screen: of ``head``;
    also with those of the screened path, on a copy of these ids. Compiles each kernel that such batches need, with
    ``bool_masks`` also those for grammar masks of dtype bool.

    A configuration from a tuned table that fails, or that does not compile, gives its batches back to the built-in
    choice, which is checked in turn. Where a built-in one of the screened path fails, nothing is screened. Any other
    built-in one that fails is a reason not to serve."""
    refused: list[str] = []
    unscreened: str | None = None
    checked: set[tuple[BatchKind, Config]] = set()
    while True:
        every = table.configs_up_to(max_rows, screened=screen is not None)
        used = [one for one in every if (one[0].launched(one[2]), one[2]) not in checked]
        if not used:
            return Checked(table, None, tuple(refused), unscreened)
        check = _Check(head, max_rows, table, screen, bool_masks)
        for kind, num_rows, config in used:
            try:
                reason = check.compare(kind, num_rows, config)
            except Exception as error:  # whatever a compiler or a device makes of a configuration
                reason = f"{first_line(error)} with {config} ({kind})"
            if reason is None:
                checked.add((kind.launched(config), config))
            elif table.lookup(num_rows, kind) != config:
                continue  # already taken out, by a refusal for another kind
            elif config != table.default(num_rows, kind):
                table = table.without(config, kind)
                refused.append(reason)
            elif isinstance(config, ScreenConfig):
                table, unscreened = table.without_screen(), reason
            else:
                return Checked(table, reason, tuple(refused), unscreened)


def dependence_on_batch(head: LMHead) -> str | None:
    """The reason why a head is not batch-invariant on this device; None where it is. Draws one row alone, and at the
    first, a middle and the last place of batches whose other rows have limits and edits, and compares bits. Allocates
    and waits: at start."""
    weight = head.weight
    sizes = TRIED_ROWS if weight.is_cuda else INTERPRETED_ROWS
    parts = Parts.of(head).with_scratch([tile_of(head)], max(sizes))
    row = _hidden(head, 1)[0]

    def results(hidden: torch.Tensor, params: BatchParams, place: int) -> list[torch.Tensor]:
        drawn, found = launch_with_logprobs(hidden, params, parts, WantedLogprobs())
        assert parts.workspace is not None and parts.workspace.last_buffer is not None and found.log_mass is not None
        values = drawn.token_ids, drawn.scores, found.of_tokens, found.log_mass, parts.workspace.last_buffer.logits
        return [value[place].clone() for value in values]

    for truncated in (True, False):
        alone = results(row[None], _beside_others(head, 1, 0, truncated), 0)
        for size in sizes:
            others = _hidden(head, size)
            for place in sorted({0, size // 2, size - 1}):
                hidden = others.clone()
                hidden[place] = row
                beside = results(hidden, _beside_others(head, size, place, truncated), place)
                if not all(map(_same_bits, alone, beside)):
                    return f"a row's logits, token or logprobs depend on its batch of {size} rows here"
    return None


def _beside_others(head: LMHead, num_rows: int, place: int, truncated: bool) -> BatchParams:
    """Rows of every kind, and at ``place`` one with temperature 1, no edits and a truncation or none."""
    device = head.weight.device
    number = torch.arange(num_rows, device=device)
    mine, ones = number == place, torch.ones(num_rows, device=device)
    plain = mine if not truncated else mine & ~mine
    return BatchParams(
        torch.where(mine, 1.0, (number % 3).float()),
        torch.where(mine, 7, number * 7919),
        torch.full_like(number, 7),
        Truncation(torch.where(plain, 0, 5).int(), torch.where(plain, 1.0, 0.9 * ones), 0.0 * ones),
        LogitEdits(
            bias=ones.new_ones(num_rows, head.spec.edit_width),
            rows=torch.where(mine, 0, int(Edit.BIAS)).int(),
        ),
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def unsupported_by_flashinfer(head: LMHead) -> str | None:
    """Why FlashInfer cannot draw for ``head`` here; None where it can. Also compiles it, a minute the first time."""
    if head.shards > 1 or not head.gemm_gives_logits:
        return "it needs a whole vocabulary, and logits of the weight's dtype"
    num_rows = 8
    raw = compute_logits(_hidden(head, num_rows), head)
    row = torch.arange(num_rows, device=raw.device)
    temperature = 0.5 + row % 4 * 0.5
    limits = Truncation(20 + row.int(), torch.where(row % 2 == 0, 0.95, 1.0), torch.zeros_like(temperature))
    try:
        token = draw_with_flashinfer(
            raw, head.spec, BatchParams(temperature, row * 7919 - 5, row + 11, limits)
        ).token_ids
    except FlashInferError as error:
        return str(error)
    logits = transform_ref(
        raw[:, : head.vocab_size].double(), head.rounding, logit_scale=head.logit_scale, softcap=head.softcap
    )
    # Wherever rounding decides which token is the last one, either is right.
    allowed = allowed_ref(logits, temperature, limits.top_k, limits.top_p, limits.min_p, slack=1e-5)
    inside = (token >= 0) & (token < head.vocab_size)
    wrong = ~inside | ~allowed.gather(1, token.clamp(0, head.vocab_size - 1)[:, None])[:, 0]
    return f"{int(wrong.sum())} of its {num_rows} tokens are truncated ones" if wrong.any() else None


class _Check:
    """Kernels of ``head`` compiled together, then checked one by one."""

    def __init__(
        self, head: LMHead, max_rows: int, table: DispatchTable, screen: Screen | None, bool_masks: bool
    ) -> None:
        self.head, self.table = head, table
        shortened, copy, self.screen_error = first_ids(head, MAX_IDS), None, "no screen"
        if screen is not None and (screened_rows := table.screened_rows(max_rows)):
            try:
                copy = Screen(shortened, max(screened_rows, CHECKED_ROWS), announces_writes=True)
            except Exception as error:  # memory for a second copy, or what else a starting server may lack
                self.screen_error = first_line(error)
        self.parts = Parts.of(head, screen if copy is not None else None)
        self.shortened = self.parts._replace(lm_head=shortened, screen=copy)
        compile_ahead([self.parts, self.shortened], max_rows, table, bool_masks=bool_masks)

    def compare(self, kind: BatchKind, num_rows: int, config: Config) -> str | None:
        if kind.truncate and self.head.shards > 1:
            return None  # only a whole vocabulary is truncated
        if isinstance(config, ScreenConfig) and self.shortened.screen is None:
            return f"{self.screen_error} with {config} ({kind})"
        reads = isinstance(config, ReadConfig) or draws_in_host_memory(self.head.weight.device)
        rows, size = max(num_rows, CHECKED_ROWS), self.shortened.lm_head.vocab_size
        logprobs = (False,) if kind.screen else (False, True)  # a batch that asks for logprobs is one without a screen
        for only_mask in (False, True) if kind.edit else (False,):
            expected = expect(self.shortened.lm_head, rows, kind, reads=reads, only_mask=only_mask)
            for return_logprob in logprobs:
                reason = difference(expected, config, self.shortened, return_logprob=return_logprob)
                if reason is not None:
                    return f"{reason} with {config} ({kind})"
        if config == self.table.lookup(1, kind) and kind.truncate and size < self.head.vocab_size:
            # The draw is compiled for a size of the vocabulary: the first truncated request must not wait for it.
            for return_logprob in logprobs:
                for masks in _masks_of(kind, False):
                    launch_once(self.parts, config, kind, return_logprob, **masks)
        return None


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A batch of every kind of row, and what must be drawn from it. low, high: how far from ``logits`` a right logit
    may be."""

    head: LMHead
    hidden: torch.Tensor
    params: BatchParams
    low: torch.Tensor
    logits: torch.Tensor
    high: torch.Tensor
    want: Reference


def expect(head: LMHead, num_rows: int, kind: BatchKind, *, reads: bool, only_mask: bool = False) -> Expectation:
    """reads: from logits that a GEMM has written, as ``ReadConfig`` does. only_mask: of edits, a mask alone."""
    hidden = _hidden(head, num_rows)
    row = torch.arange(num_rows, device=hidden.device)
    temperature = torch.where(row % 3 == (1 if kind.truncate else 0), 0.0, 0.5 + row % 4 * 0.5)
    if kind.greedy:
        temperature.zero_()
    if reads:
        raw = compute_logits(hidden, head)[:, : head.vocab_size].double()
        logits = transform_ref(raw, head.rounding, logit_scale=head.logit_scale, softcap=head.softcap)
        error_bound = 0.0 if head.softcap is None else 2.0**-20 * head.softcap
        low, high = logits - error_bound, logits + error_bound
    else:
        error = accumulation_error(head.weight.shape[1])
        low, logits, high = (_logits(hidden, head, sign * error) for sign in (-1, 0, 1))
    edits = None
    if kind.edit:
        edits, edited = edits_of_every_kind(row, head, only_mask=only_mask)
        low, logits, high = map(edited, (low, logits, high))
    truncation = None
    if kind.truncate:  # top-k and top-p in row 0, and another combination in each following one
        top_k, top_p = torch.where(row % 2 == 0, 20, 0).int(), torch.where(row % 4 < 2, 0.95, 1.0)
        truncation = Truncation(top_k, top_p, torch.where(row % 5 == 4, 0.05, 0.0))
    params = BatchParams(temperature, row * 7919 - 5, row + 11, truncation, edits, all_greedy=kind.greedy)
    want = sample_ref(logits, low, high, temperature, params.seed, params.position, vocab_start=head.vocab_start)
    return Expectation(head, hidden, params, low, logits, high, want)


def difference(expected: Expectation, config: Config, parts: Parts, *, return_logprob: bool = False) -> str | None:
    """How the draw of ``config`` differs from the expectation; None where it does not. parts: of the expectation's
    head; scratch is made for the draw."""
    head, params, num_rows = expected.head, expected.params, len(expected.hidden)
    parts = parts._replace(workspace=None).with_scratch([config], num_rows)
    token = launch(config, expected.hidden, params, parts, return_logprob=return_logprob).token_ids
    want = expected.want
    if params.truncation is not None and draws_in_host_memory(expected.hidden.device):
        limited = _truncated_rows(params.truncation, head) & (params.temperature > 0)
        want = _with_truncated(want, expected.logits, limited, params)
    elif params.truncation is not None:
        assert parts.workspace is not None and parts.workspace.last_buffer is not None
        written = _written_logits(expected, parts.workspace.last_buffer, screened=isinstance(config, ScreenConfig))
        limited = _truncated_rows(params.truncation, head) & (params.temperature > 0)
        bound = 1e-5 * expected.logits.abs().clamp(min=1.0)
        inside = (written >= expected.low - bound) & (written <= expected.high + bound) | (written == expected.logits)
        off = limited & ~inside.all(1)
        if off.any():
            return f"logits of {int(off.sum())} of {num_rows} rows differ from the reference"
        want = _with_truncated(want, written, limited, params)
    wrong = (token != want.token) & ~want.near_tie
    if wrong.any():
        return f"{int(wrong.sum())} of {num_rows} tokens differ from the reference"
    return None


def accumulation_error(terms: int) -> float:
    """Bound on the error of a float32 dot product of ``terms`` terms, in units of the sum of their absolute values."""
    return max(1.0, terms / _TERMS_AT_ONCE) * _ACCUMULATOR_ERROR


def edits_of_every_kind(
    row: torch.Tensor,  # [B] i64, 0, 1, ...
    head: LMHead,
    *,
    bool_mask: bool = False,
    only_mask: bool = False,
) -> tuple[LogitEdits, Callable[[torch.Tensor], torch.Tensor]]:
    """Edits of all kinds, all of them in row 0 and another combination in each following one; and what they do to
    ``[B, V]`` logits, by the reference. bool_mask: with a mask of forbidden ids instead of one of allowed bits.
    only_mask: without the other edits, which other kernels serve."""
    width = head.spec.edit_width  # as SGLang's tensors: kernels are compiled for how far rows are apart
    ids = torch.arange(width, device=row.device)[None, :] + row[:, None]
    additive, scaling, bias = ids % 3 * -0.25, 1.0 + ids % 2 * 0.125, ids % 4 * 0.5
    allowed = ids % 5 != 0
    flags = 15 - row % 16
    mask = ~allowed if bool_mask else pack_bits(allowed)
    edits = LogitEdits(additive=additive, scaling=scaling, mask=mask, bias=bias, rows=flags.int())
    if only_mask:
        edits, flags = LogitEdits(mask=mask, rows=edits.rows), flags & Edit.MASK
    columns = slice(head.vocab_start, head.vocab_start + head.vocab_size)

    def edited(logits: torch.Tensor) -> torch.Tensor:
        with_additive, with_scaling, with_mask, with_bias = ((flags & edit != 0)[:, None] for edit in Edit)
        return edit_logits_ref(
            logits,
            additive=torch.where(with_additive, additive, 0.0)[:, columns],
            scaling=torch.where(with_scaling, scaling, 1.0)[:, columns],
            allowed=(allowed | ~with_mask)[:, columns],
            bias=torch.where(with_bias, bias, 0.0)[:, columns],
        ).double()

    return edits, edited


def pack_bits(allowed: torch.Tensor) -> torch.Tensor:
    """``[B, ceil(V / 32)]`` int32 from ``[B, V]`` bool: bit ``i % 32`` of word ``i // 32`` says that i is allowed."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    bits = padded.view(len(allowed), -1, 32).long() << torch.arange(32, device=allowed.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _hidden(head: LMHead, num_rows: int) -> torch.Tensor:
    """Hidden states that give logits of a usual size."""
    weight = head.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    lengths = weight[:CHUNK_IDS].float().norm(dim=1)
    spread = (lengths if head.scale is None else lengths * head.scale[:CHUNK_IDS]).mean().clamp(min=1e-6)
    hidden = torch.randn(num_rows, weight.shape[1], generator=generator, device=weight.device)
    return (hidden * (3.0 / spread)).to(head.hidden_dtype)


def _logits(hidden: torch.Tensor, head: LMHead, perturb: float) -> torch.Tensor:
    return torch.cat(
        [
            logits_ref(
                hidden,
                head.weight[start : start + CHUNK_IDS],
                scale=None if head.scale is None else head.scale[start : start + CHUNK_IDS],
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                logits_dtype=head.rounding,
                perturb=perturb,
            )
            for start in range(0, head.vocab_size, CHUNK_IDS)
        ],
        dim=1,
    )


def _written_logits(expected: Expectation, buffer: LogitsBuffer, *, screened: bool) -> torch.Tensor:
    """``[B, V]`` float64, the logits that a launch has written to ``buffer``. screened: such a launch writes only the
    groups of ids that it rescores; the other groups have the expected logits here."""
    num_rows, size = expected.logits.shape
    logits = buffer.logits[:num_rows, :size].double()
    if screened:
        read = buffer.group_max[:num_rows].repeat_interleave(GROUP_SIZE, 1)[:, :size]
        logits = torch.where(read > float("-inf"), logits, expected.logits)
    return logits


def _truncated_rows(truncation: Truncation, head: LMHead) -> torch.Tensor:
    use_k = (truncation.top_k >= 1) & (truncation.top_k < head.vocab_size)
    return use_k | (truncation.top_p < 1) | (truncation.min_p > 0)


def _with_truncated(want: Reference, logits: torch.Tensor, limited: torch.Tensor, params: BatchParams) -> Reference:
    """``want``, but with the tokens of truncated rows drawn by the reference from ``logits``. limited: which rows those
    are."""
    assert params.truncation is not None
    drawn = truncated_sample_ref(
        torch.where(limited[:, None], logits, 0.0),
        torch.where(limited, params.temperature, 1.0),
        params.seed,
        params.position,
        params.truncation.top_k,
        params.truncation.top_p,
        params.truncation.min_p,
    )
    token = torch.where(limited, drawn.token, want.token)
    return dataclasses.replace(want, token=token, near_tie=torch.where(limited, drawn.near_tie, want.near_tie))
