"""Which rows of a batch restrict what may be drawn: one device function, for every path that draws from such rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def truncates(top_k_ptr, top_p_ptr, min_p_ptr, rows, mask, vocab_size):
    """Whether rows restrict what may be drawn."""
    top_k = tl.load(top_k_ptr + rows, mask=mask, other=0)
    top_p = tl.load(top_p_ptr + rows, mask=mask, other=1.0)
    min_p = tl.load(min_p_ptr + rows, mask=mask, other=0.0)
    return ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
