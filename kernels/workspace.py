"""All scratch memory of the kernels: what one launch leaves for the next. Reused by every call on one stream.

Each class allocates tensors and hands them to kernels as one NamedTuple of pointers (``*Operands``).
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import (
    GROUP_SIZE,
    LIMBS,
    MAX_CANDIDATE_GROUPS,
    MAX_DRAW_SPLITS,
    MAX_SCREEN_ROWS_PER_TILE,
    MIN_BLOCK_D,
    MIN_CHUNK,
    MIN_RESCORED_ROWS,
    ScreenConfig,
    cdiv,
    next_power_of_2,
)
from .params import LogitsSpec, descriptor

MAX_TOP_GROUPS = 8  # groups that a split leaves behind per truncated row
GROUPS_PER_BLOCK = 8  # groups that the search handles as one
MEASURED_CANDIDATES = 4  # tokens that one pass over a row's largest groups measures
CANDIDATE_GROUPS = 64  # groups that these come from
PARTIALS = 2 * MEASURED_CANDIDATES  # numbers that each part of a row leaves behind in that pass
SUMMARY_IDS = 4096  # ids whose exp-sum one program of ``summarize_logits`` leaves behind
MAX_TOP_LOGPROBS = 128  # per row
MAX_GIVEN_IDS = 256  # per row, where ranks or a server serve them
LISTED_GROUPS = max(MAX_DRAW_SPLITS * CANDIDATE_GROUPS, 2 * MAX_CANDIDATE_GROUPS)  # room for lists of groups, per row
MAX_ID_ROWS = 32  # rows of the largest batch whose truncated rows have single ids looked at: 2 bytes per row and id
ID_ROWS = 16  # rows that share a list of such ids


_MAX_DOUBLED_ROWS = 512  # a row of logits takes hundreds of kilobytes


def _grown(held: int, wanted: int) -> int:
    """The rows of a new allocation: more than asked for, so that a batch that grows by a row allocates seldom."""
    return max(wanted, min(2 * held, _MAX_DOUBLED_ROWS), held + held // 8)


def num_group_blocks(vocab_size: int) -> int:
    """The blocks of groups of a row, as a power of two."""
    return next_power_of_2(cdiv(vocab_size, GROUPS_PER_BLOCK * GROUP_SIZE))


class SplitOperands(NamedTuple):
    """The tensors that the splits of a vocabulary leave behind: P splits with ``TOP_GROUPS`` best groups (T) each."""

    score: Any  # [P * T, B] f32, perturbed log-mass of a group
    group: Any  # [P * T, B] i32, its absolute id
    logits: Any  # [P * T, B, GROUP_SIZE] f32
    mass: Any  # [P * T, B, 2] f32, the largest logit, and the exp-sum at temperature relative to that
    second: Any  # [P * T, B] f32, in truncated batches: the score of the second-best group
    arrived: Any  # [B] i32: how many splits of a block of rows are done; zeros before and after each launch


class RowStatus(enum.IntEnum):
    """Where a row of a truncated batch stands. Negative: without an answer."""

    ANSWERED = 1
    PLAIN = 0  # not truncated
    LEFT = -1  # to be searched for
    WIDE = -2  # as the next two, of a screen: more of the row's mass has to be known
    OPEN = -3  # the groups that could hold its token are to be read
    RACING = -4  # its token may be the one that it has without a truncation


class BufferOperands(NamedTuple):
    """The tensors of a ``LogitsBuffer``; ``width`` logits and G groups per row."""

    logits: Any  # [B, width] bf16 or f32
    group_max: Any  # [B, G] f32, the largest logit of each group; -inf where a screen has not read it
    group_score: Any  # [B, G] f32, for rows that are searched, as the next; before that a list of groups, as i32
    group_mass: Any  # [B, G] f32, relative to group_max
    block_list: Any  # [B, 3 * blocks of groups] i32
    partial: Any  # [B, MAX_DRAW_SPLITS, PARTIALS] f32
    group_list: Any  # [B, ...] i32
    arrived: Any  # [B] i32, zeros before and after each launch
    status: Any  # [B] i32: a RowStatus, or more than ANSWERED after a search
    searched: Any  # [1] i64: rows searched so far


class HalfHidden(NamedTuple):
    """Hidden states as float16, in units of a power of two per row, in an order of their own (``scale_hidden.py``)."""

    states: Any  # [B, D] f16, D up to a multiple of MIN_BLOCK_D
    unit: Any  # [B] f32


class LogitsBuffer:
    """Where truncated rows leave their logits, ``[num_rows, width]``, and the scratch of their draw.

    width: the vocabulary size rounded up to whole groups. searched: as in ``Workspace``.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        searched: torch.Tensor | None = None,
    ) -> None:
        num_groups = cdiv(vocab_size, GROUP_SIZE)
        self.num_rows, self.width = num_rows, num_groups * GROUP_SIZE
        self.dtype = dtype
        group_max, group_score, group_mass = (
            torch.empty(num_rows, num_groups, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.operands = BufferOperands(
            logits=torch.empty(num_rows, self.width, dtype=dtype, device=device),
            group_max=group_max,
            group_score=group_score,
            group_mass=group_mass,
            # Two lists: as many blocks as there are, and those of a window, a power of two.
            block_list=torch.empty(num_rows, 3 * cdiv(num_groups, GROUPS_PER_BLOCK), dtype=torch.int32, device=device),
            partial=torch.empty(num_rows, MAX_DRAW_SPLITS, PARTIALS, dtype=torch.float32, device=device),
            group_list=torch.empty(num_rows, LISTED_GROUPS, dtype=torch.int32, device=device),
            arrived=torch.zeros(num_rows, dtype=torch.int32, device=device),
            status=torch.zeros(num_rows, dtype=torch.int32, device=device),
            searched=torch.zeros(1, dtype=torch.int64, device=device) if searched is None else searched,
        )

    @property
    def logits(self) -> torch.Tensor:
        return self.operands.logits

    @property
    def group_max(self) -> torch.Tensor:
        return self.operands.group_max

    @property
    def status(self) -> torch.Tensor:
        return self.operands.status

    def fits(self, vocab_size: int) -> bool:
        return self.width - GROUP_SIZE < vocab_size <= self.width


class Workspace:
    """Scratch of ``lm_head_sample`` and ``sample_logits`` for up to ``slots`` = splits x rows.

    ``slots * 708`` bytes on ``device``, and what ``gemm``, ``half_hidden`` and ``logits_buffer`` have been asked for.
    searched: ``[1]`` int64, counts the rows whose tokens took a search, in this workspace or, when it is given, since
    it was made.
    """

    def __init__(self, slots: int, device: torch.device, searched: torch.Tensor | None = None) -> None:
        self.slots, self.device = slots, device
        self.searched = torch.zeros(1, dtype=torch.int64, device=device) if searched is None else searched
        held = slots * MAX_TOP_GROUPS
        self.splits = SplitOperands(
            score=torch.empty(held, dtype=torch.float32, device=device),
            group=torch.empty(held, dtype=torch.int32, device=device),
            logits=torch.empty(held, GROUP_SIZE, dtype=torch.float32, device=device),
            mass=torch.empty(held, 2, dtype=torch.float32, device=device),
            second=torch.empty(held, dtype=torch.float32, device=device),
            arrived=torch.zeros(slots, dtype=torch.int32, device=device),
        )
        self._buffers: dict[torch.dtype, LogitsBuffer] = {}
        self.last_buffer: LogitsBuffer | None = None  # the last truncated batch's
        self._gemm: torch.Tensor | None = None
        self._half: HalfHidden | None = None

    @property
    def held(self) -> tuple[object, ...]:
        """The buffers that a launch may write to and that a larger batch replaces: a captured graph needs them."""
        return self.last_buffer, self._gemm, self._half

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds, buffers of logits included."""
        tensors = [*self.splits, *(tensor for buffer in self._buffers.values() for tensor in buffer.operands)]
        tensors += [*([] if self._gemm is None else [self._gemm]), *(self._half or ())]
        return sum(tensor.nbytes for tensor in tensors)

    @classmethod
    def for_splits(cls, num_splits: int, num_rows: int, device: torch.device, given: Workspace | None) -> Workspace:
        """The given scratch, or new. Raises ValueError where the given one is too small or on another device."""
        if given is None:
            return cls(num_splits * num_rows, device)
        if not isinstance(given, cls):
            raise ValueError(f"workspace is a {type(given).__name__}; expected a Workspace")
        if given.splits.score.device != device:
            raise ValueError(f"workspace is on {given.splits.score.device}; expected it on {device}")
        if given.slots < num_splits * num_rows:
            raise ValueError(
                f"workspace has {given.slots} slots; expected at least {num_splits} splits x {num_rows} rows"
            )
        return given

    def gemm(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for a GEMM's ``[num_rows, width]`` logits, in rows that start at multiples of ``GROUP_SIZE`` elements;
        allocates for the first batch and for one larger than all before."""
        stride = cdiv(width, GROUP_SIZE) * GROUP_SIZE
        held = self._gemm
        if held is None or held.dtype is not dtype or held.shape[1] != stride or held.shape[0] < num_rows:
            same_kind = held is not None and held.dtype is dtype and held.shape[1] == stride
            rows = _grown(held.shape[0], num_rows) if held is not None and same_kind else num_rows
            held = self._gemm = None  # the old one goes before the new one comes
            with torch.inference_mode(False):  # else PyTorch could not write to it outside of that mode
                held = self._gemm = torch.empty(rows, stride, dtype=dtype, device=self.device)
        return held[:num_rows, :width]

    def half_hidden(self, num_rows: int, width: int) -> HalfHidden:
        """Room for ``[num_rows, width]`` hidden states as float16, ``width`` up to a multiple of ``MIN_BLOCK_D``;
        allocates for the first batch and for one larger than all before."""
        stride = cdiv(width, MIN_BLOCK_D) * MIN_BLOCK_D
        held = self._half
        if held is None or held.states.shape[1] != stride or held.states.shape[0] < num_rows:
            rows = num_rows if held is None or held.states.shape[1] != stride else _grown(len(held.states), num_rows)
            held = self._half = None  # the old one goes before the new one comes
            states = torch.empty(rows, stride, dtype=torch.float16, device=self.device)
            held = self._half = HalfHidden(states, torch.empty(rows, dtype=torch.float32, device=self.device))
        return HalfHidden(held.states[:num_rows], held.unit)

    def logits_buffer(self, num_rows: int, spec: LogitsSpec, rounding: torch.dtype, *, edited: bool) -> LogitsBuffer:
        """Room for the logits of truncated rows; allocates for the first batch and for one larger than all before.

        rounding: dtype that the model's logits are rounded to. edited: whether other numbers are made of them after
        that.
        """
        # bfloat16 holds the logits exactly where they are bfloat16 numbers.
        exact = rounding is torch.bfloat16 and spec.softcap is None and not edited
        dtype = torch.bfloat16 if exact else torch.float32
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.num_rows < num_rows or not buffer.fits(spec.vocab_size):
            same_kind = buffer is not None and buffer.fits(spec.vocab_size)
            rows = _grown(buffer.num_rows, num_rows) if buffer is not None and same_kind else num_rows
            self._buffers.pop(dtype, None)
            self.last_buffer = buffer = None  # the old one goes before the new one comes
            buffer = self._buffers[dtype] = LogitsBuffer(rows, spec.vocab_size, dtype, self.device, self.searched)
        self.last_buffer = buffer
        return buffer


class ScreenCounter(enum.IntEnum):
    """The entries of ``ScreenOperands.counters``, which are counted on the device without anyone waiting."""

    ROW_BLOCKS = 0  # blocks of rows: each reads groups of its own
    ROWS = 1
    GROUPS = 2  # groups that were read from the head, per block of rows: on a GPU, not the same number each time
    CANDIDATES = 3  # groups that a row could have taken its token from, as far as was known before any was read; of a
    # row whose truncation rather forbids its token, those with a logit that its top-k surely allows
    CERTIFIED_ROWS = 4  # rows with one such group or none
    MANY_CANDIDATES = 5  # blocks of rows that may have to read more than 1/16 of the head for these


class ScreenOperands(NamedTuple):
    """The tensors of a ``ScreenWorkspace``, but for the limbs. Groups are numbered from the first of the head on."""

    hidden_scale: Any  # [B] f32, the step of a row's fixed-point hidden state
    hidden_norm: Any  # [B] f32
    hidden_error: Any  # [B] f32
    score_hi: Any  # [G, B] f32: no score of the group is above
    threshold: Any  # [B] i32, ordered: score that the best group surely reaches
    bound: Any  # [B] i32, ordered, for truncated rows, as the next five: a small top-k allows no logit below
    logit_hi: Any  # [B, G] f32: no logit of the group is above; after list_ids, +inf or -inf: to be read or not
    max_logit_lo: Any  # [B, G] f32: the group's largest logit is not below; +inf in groups that a wide row chose
    lse_hi: Any  # [B, G] f32, the group's log-mass at the row's temperature is not above
    lse_lo: Any  # [B, G] f32, nor below
    id_hi: Any  # [V, B] f16, for MAX_ID_ROWS rows or fewer: no logit of the id is above
    ids: Any  # [blocks of ID_ROWS rows, V] i32, lists of ids
    num_ids: Any  # [blocks] i32, their lengths; zeros before and after each draw, as the next
    ids_arrived: Any  # [blocks] i32
    best: Any  # [B] i64: ordered score of the best rescored group, above NO_GROUP without its id
    candidates: Any  # [B] i32: groups that the first pass reads for the row
    logits: Any  # [programs, B, GROUP_SIZE] f32: each program's best rescored group
    group_list: Any  # [row blocks, G] i32, the groups to rescore
    group_place: Any  # [row blocks, G] i32: where each of these is in the list
    num_flagged: Any  # [row blocks] i32, the lengths of the lists; zeros before and after each draw, as the next
    arrived: Any  # [row blocks] i32
    counters: Any  # [len(ScreenCounter)] i64


class ScreenWorkspace:
    """Scratch of ``screened_sample`` for up to ``max_rows`` rows of a head with ``num_groups`` groups whose INT8 copy
    is ``width`` columns wide, with any config.

    counters: ``[len(ScreenCounter)]`` int64, counts in this workspace or, when it is given, since it was made.
    """

    def __init__(
        self, num_groups: int, width: int, max_rows: int, device: torch.device, counters: torch.Tensor | None = None
    ) -> None:
        self.max_rows, self.num_groups = max_rows, num_groups
        padded = cdiv(max_rows, MAX_SCREEN_ROWS_PER_TILE) * MAX_SCREEN_ROWS_PER_TILE
        # Rows beyond the batch are multiplied too: their integers, whichever they are, touch nobody else's.
        self.limbs = torch.zeros(padded * LIMBS, width, dtype=torch.int8, device=device)
        row_blocks = cdiv(max_rows, MIN_RESCORED_ROWS)
        ids, id_rows = num_groups * GROUP_SIZE, min(max_rows, MAX_ID_ROWS)
        id_blocks = cdiv(id_rows, ID_ROWS)

        def floats(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        def integers(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.operands = ScreenOperands(
            hidden_scale=floats(max_rows),
            hidden_norm=floats(max_rows),
            hidden_error=floats(max_rows),
            score_hi=floats(num_groups * max_rows),
            threshold=integers(max_rows),
            bound=integers(max_rows),
            logit_hi=floats(max_rows * num_groups),
            max_logit_lo=floats(max_rows * num_groups),
            lse_hi=floats(max_rows * num_groups),
            lse_lo=floats(max_rows * num_groups),
            id_hi=torch.empty(ids * id_rows, dtype=torch.float16, device=device),
            ids=integers(ids * id_blocks),
            num_ids=zeros(id_blocks),
            ids_arrived=zeros(id_blocks),
            best=torch.empty(max_rows, dtype=torch.int64, device=device),
            candidates=integers(max_rows),
            logits=floats(cdiv(num_groups, MIN_CHUNK) * max_rows * GROUP_SIZE),
            group_list=integers(row_blocks * num_groups),
            group_place=integers(row_blocks * num_groups),
            num_flagged=zeros(max_rows),
            arrived=zeros(max_rows),
            counters=torch.zeros(len(ScreenCounter), dtype=torch.int64, device=device)
            if counters is None
            else counters,
        )
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.limbs, *self.operands))

    def check(self, num_rows: int, num_groups: int, width: int) -> None:
        """Raise ValueError unless a batch of ``num_rows`` rows of such a head fits."""
        if num_rows > self.max_rows or (self.num_groups, self.limbs.shape[1]) != (num_groups, width):
            raise ValueError(
                f"workspace is for {self.max_rows} rows, {self.num_groups} groups and {self.limbs.shape[1]} columns; "
                f"expected at least {num_rows} rows, {num_groups} groups and {width} columns"
            )

    def limbs_operand(self, config: ScreenConfig) -> torch.Tensor | TensorDescriptor:
        """The kernel's argument for the limbs of the hidden states."""
        if not config.tma:
            return self.limbs
        return descriptor(self._descriptors, self.limbs, (config.block_b * LIMBS, config.block_d))


class LogprobWorkspace:
    """Scratch of ``summarize_logits`` and ``top_logprobs`` for up to ``max_rows`` rows of ``vocab_size`` logits.

    group_max: ``[max_rows, G]`` float32. tile_mass: ``[max_rows, T, 2]`` float32, T tiles of ``SUMMARY_IDS`` ids.
    lists: ``[max_rows, 4, MAX_TOP_LOGPROBS]`` int32. About a quarter of a byte per logit, and 2 KiB per row.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        num_groups, num_tiles = cdiv(vocab_size, GROUP_SIZE), cdiv(vocab_size, SUMMARY_IDS)
        self.max_rows, self.vocab_size = max_rows, vocab_size
        self.group_max = torch.empty(max_rows, num_groups, dtype=torch.float32, device=device)
        self.tile_mass = torch.empty(max_rows, num_tiles, 2, dtype=torch.float32, device=device)
        self.lists = torch.empty(max_rows, 4, MAX_TOP_LOGPROBS, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds."""
        return self.group_max.nbytes + self.tile_mass.nbytes + self.lists.nbytes

    @classmethod
    def for_rows(
        cls, num_rows: int, vocab_size: int, device: torch.device, given: LogprobWorkspace | None
    ) -> LogprobWorkspace:
        """The given scratch, or new. Raises ValueError where the given one has fewer rows, another vocabulary size or
        another device."""
        if given is None:
            return cls(max(1, num_rows), vocab_size, device)
        if not isinstance(given, cls):
            raise ValueError(f"workspace is a {type(given).__name__}; expected a LogprobWorkspace")
        if given.lists.device != device or given.max_rows < num_rows or given.vocab_size != vocab_size:
            raise ValueError(
                f"workspace is for {given.max_rows} rows of {given.vocab_size} logits on {given.lists.device}; "
                f"expected at least {num_rows} rows of {vocab_size} on {device}"
            )
        return given
