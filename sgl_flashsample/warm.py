"""``sgl-flashsample warm``: compiles what a server of a head launches into Triton's cache; needs no GPU.

An image that is built with it starts servers without compiling these kernels. What belongs to a kernel's name in the
cache is the same as at a server's start: the compute capability, the head's shape and dtype, the choices of the table,
and the versions of Triton and of this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from .kernels.launch import Gpu, pretend_gpu
from .kernels.params import LMHead
from .model_config import VOCAB_MULTIPLE
from .screen import UnwrittenScreen
from .selfcheck import CHECKED_ROWS, MAX_COMPILED_ROWS, compile_ahead, shortened
from .tables.lookup import resolve
from .tables.schema import Device, HeadShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOFTCAP = 30.0  # any: a launch is given its value


class Warmed(NamedTuple):
    """compiled, found: kernels that were compiled, and that the cache had. table: the line of a server's log."""

    compiled: int
    found: int
    seconds: float
    table: str


def warm(
    shape: HeadShape,
    device: Device,
    *,
    file: str | None = None,
    screen: bool = True,
    max_rows: int = MAX_COMPILED_ROWS,
    step: Callable[[], Any] = lambda: None,
) -> Warmed:
    """Compile for ``device``, which need not be here. The process can launch nothing afterwards.

    file: the tuned table, None for the one that a server finds. screen: also what batches launch whose head has a
    screen, where the table takes it. max_rows: of the largest batch. step: called after each kernel.
    """
    major, minor = map(int, device.cc.split("."))
    pretend_gpu(Gpu((major, minor), device.sms))
    padded = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    # Pages that are never written take no memory.
    weight = torch.empty(padded, shape.hidden, dtype=DTYPES[shape.dtype])
    head = LMHead(weight, vocab_size=shape.vocab, softcap=SOFTCAP if shape.softcap else None)
    resolved = resolve(head, file=file, device=device)
    heads = [head, shortened(head)]
    screened = resolved.dispatch.screened_rows(max_rows) if screen else 0
    screens = [UnwrittenScreen(one, max(screened, CHECKED_ROWS)) for one in heads] if screened else []
    counts = [0, 0]

    def listen(*, cache_hit: bool, **about: Any) -> None:
        counts[cache_hit] += 1
        step()

    started, before = time.monotonic(), triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    try:
        compile_ahead(heads, max_rows, table=resolved.dispatch, screens=screens)
    finally:
        triton.knobs.compilation.listener = before
    return Warmed(counts[0], counts[1], time.monotonic() - started, resolved.line())
