"""Which choices a server's head has: its tuned table, the same on all ranks, and what of it holds on this machine."""

from __future__ import annotations

import dataclasses
import json
import logging

from ..kernels.head import LMHead
from ..lookup import Found, Match
from ..resolution import Resolution, apply, built_in, resolve, target_of
from ..screen import Screen
from ..selftest import Checked, flashinfer_problem, refuse_wrong
from ..table import Table
from .agreement import Ranks

logger = logging.getLogger("sgl_flashsample")


def resolve_alike(head: LMHead, tp: int, ranks: Ranks, deterministic: bool) -> Resolution:
    """The resolution of ``head``: what the first rank found, on all of them, or the built-in choices on all of them.

    deterministic: of a server whose answers must not depend on what was tuned.
    """
    if deterministic:
        return built_in(head, "deterministic inference")
    if tp == 1:
        return resolve(head)
    own, message = built_in(head, "this rank"), ""
    try:
        if ranks.is_first:
            own = resolve(head, tp=tp)
            message = "" if own.found is None else _written(own.found)
    except Exception as error:  # the other ranks are waiting
        own = built_in(head, f"this rank ({type(error).__name__}: {error})")
    message = ranks.from_first(message)
    try:
        target = target_of(head, tp)
        if message and target is not None and not ranks.is_first:
            own = apply(head, target, _read(message), [])
    except Exception as error:
        own = built_in(head, f"this rank ({type(error).__name__}: {error})")
    if ranks.same(own.choices.digest):
        return own
    return built_in(head, "ranks that resolve a table differently", own.warnings)


def _written(found: Found) -> str:
    fields = {"file": found.file, "source": found.source, "match": found.match, "differs": found.differs}
    return json.dumps(fields | {"table": found.table.dumps()})


def _read(message: str) -> Found:
    fields = json.loads(message)
    table = Table.loads(fields.pop("table"))
    return Found(table, fields["file"], fields["source"], Match(fields["match"]), tuple(fields["differs"]))


def check(
    head: LMHead,
    max_rows: int,
    resolution: Resolution,
    ranks: Ranks,
    bool_masks: bool,
    screen: Screen | None = None,
) -> Checked:
    """Compile and check what batches of up to ``max_rows`` rows take, and say in a line what table that is from; a
    tuned configuration that fails is left out with one warning, on all ranks alike; so is FlashInfer. screen: of the
    head, where batches may be screened."""
    for warning in resolution.warnings:
        logger.warning("flashsample: %s", warning)
    checked = refuse_wrong(
        head, max_rows, resolution.choices, bool_masks=bool_masks, agree=ranks.anywhere, screen=screen
    )
    if checked.refused:
        logger.warning(
            "flashsample: the built-in choice takes the batches of %d tuned configurations that fail here: %s",
            len(checked.refused),
            "; ".join(checked.refused),
        )
    if checked.choices.flashinfer and (problem := _flashinfer_problem(head)) is not None:
        logger.warning("flashsample: our own paths take the batches that the table leaves to FlashInfer: %s", problem)
        checked = dataclasses.replace(checked, choices=checked.choices.without_flashinfer())
    logger.info("flashsample: %s", dataclasses.replace(resolution, choices=checked.choices).line())
    return checked


def _flashinfer_problem(head: LMHead) -> str | None:
    try:
        return flashinfer_problem(head)
    except Exception as error:  # memory for the check, or what else a starting server may lack
        return f"{type(error).__name__}: {error}"
