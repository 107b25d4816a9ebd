"""One more root in each CUDA graph of SGLang's model, so that its kernels overlap.

SGLang captures a decode step as one chain of kernels, most of them with programmatic dependent launch: such a kernel
may begin before the one ahead of it has ended. In a graph of one chain, CUDA leaves gaps all the same. In a graph that
has a second root, the same kernels overlap (times: ``docs/results/table.html``, part "graphs"). SGLang's own
gather of logits, which ours replaces, adds such a root with several ranks; with one rank its graphs have none, and get
one only on request: kernels that have never run side by side may then do.

The root is the record of an event that nothing waits for. It reads and writes no memory, and no kernel depends on it.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from ..switches import MODEL_GRAPHS_VARIABLE, switch

logger = logging.getLogger("sgl_flashsample")

_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def _driver() -> Any:  # coverage: needs a GPU
    """CUDA's driver library. Raises OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    library.cuGraphAddEventRecordNode.argtypes = [pointer, pointer, pointer, size, pointer]
    return library


class ExtraRoot:
    """The root of every graph that is captured on one device."""

    @classmethod
    def of_device(cls, device: torch.device, several_ranks: bool) -> ExtraRoot | None:
        """The root for this device; None where graphs stay as SGLang captures them. several_ranks: several ranks share
        the head. Call it before any capture: it records an event."""
        asked = switch(MODEL_GRAPHS_VARIABLE)
        wanted = several_ranks if asked is None else asked
        if device.type != "cuda" or torch.version.cuda is None or not wanted:
            return None
        try:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))  # which creates it
            root = cls(_driver(), event)
        except Exception as error:  # the server does without
            logger.warning("flashsample: the model's CUDA graphs stay as they are: %s: %s", type(error).__name__, error)
            return None
        logger.info(
            "flashsample: the model's CUDA graphs get a second root, so that their kernels overlap (%s=0: they do not)",
            MODEL_GRAPHS_VARIABLE,
        )
        return root

    def __init__(self, driver: Any, event: torch.cuda.Event) -> None:
        self._driver, self._event = driver, event
        self._failed = False

    def add(self, stream: int) -> None:
        """Add the root to the graph that ``stream`` (a CUstream) is captured into. Never raises: a graph without it is
        as correct."""
        if self._failed:
            return
        status, graph, node = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        error = self._driver.cuStreamGetCaptureInfo_v2(
            stream, ctypes.byref(status), None, ctypes.byref(graph), None, None
        )
        if not error and status.value == _CAPTURING:
            error = self._driver.cuGraphAddEventRecordNode(ctypes.byref(node), graph, None, 0, self._event.cuda_event)
        if error:
            self._failed = True
            logger.warning("flashsample: a CUDA graph of the model stays as it is: CUDA error %d", error)
