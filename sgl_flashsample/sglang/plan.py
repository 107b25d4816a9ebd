"""Who serves each row of a batch: the fused pass, or SGLang's own sampler, and why."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import torch

from .rows import Rows


@dataclasses.dataclass
class Plan:
    """For one batch. reasons: per row, why it takes SGLang's sampler, in one word; None where it is fused.

    From the first step of this batch on, subbatch: what ``subbatch.SubBatch`` keeps of the rows that are not fused;
    edit_kinds, edit_rows: the ``Edit`` flags that ``edits.edits_of`` found for the others, in all, and per row on the
    device.
    """

    reasons: tuple[str | None, ...]
    subbatch: Any = None
    edit_kinds: int | None = None
    edit_rows: torch.Tensor | None = None

    @classmethod
    def whole(cls, reason: str, num_rows: int) -> Plan:
        """All rows to SGLang's sampler, for one reason."""
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


def plan_of(
    rows: Rows,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int] | None,
    token_ids_logprobs: list | None,
    original_logprobs: bool,
    fuse_grammars: bool,
) -> Plan:
    """The plan of this step. A batch that stays as it is has one plan for all its steps: what could tell its steps
    apart is compared here without a loop over the rows."""
    grammars = sampling_info.grammars or ()
    top = tuple(top_logprobs_nums or ()) if return_logprob else ()
    ids = tuple(map(type, token_ids_logprobs or ())) if return_logprob else ()
    key: tuple = ()  # of a batch without grammars and logprobs
    if grammars or return_logprob:
        key = (tuple(map(type, grammars)), fuse_grammars, return_logprob, top, ids)
    plan = rows.plans.get(key)
    if plan is None:
        columns: list[tuple] = [rows.reasons]
        if grammars and not fuse_grammars:
            columns.append(tuple(None if grammar is None else "grammar" for grammar in grammars))
        if return_logprob:
            columns.append(("original_logprobs" if original_logprobs else None,) * len(rows))
            columns.append(tuple("top_logprobs" if n > 0 else None for n in top) or (None,) * len(rows))
            columns.append(
                tuple(None if kind is type(None) else "token_ids_logprobs" for kind in ids) or (None,) * len(rows)
            )
            columns.append(rows.logprob_reasons)
        reasons = tuple(next(filter(None, row), None) for row in zip(*columns, strict=True))
        plan = rows.plans[key] = Plan(reasons)
    return plan
