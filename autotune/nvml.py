"""Clock and load of a GPU, from the driver's own library; 0 where it is not there."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_SM_CLOCK = 1


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@functools.cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


@functools.cache
def _device(bus_id: str) -> ctypes.c_void_p | None:
    library = _library()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)) != 0:
        return None
    return handle


def sm_clock(bus_id: str) -> float:
    """MHz at this moment."""
    device, value = _device(bus_id), ctypes.c_uint()
    if device is None or _library().nvmlDeviceGetClockInfo(device, _SM_CLOCK, ctypes.byref(value)) != 0:
        return 0.0
    return float(value.value)


def busy_percent(bus_id: str) -> int:
    """Share of the last fraction of a second in which a kernel ran, whoever's."""
    device, value = _device(bus_id), _Utilization()
    if device is None or _library().nvmlDeviceGetUtilizationRates(device, ctypes.byref(value)) != 0:
        return 0
    return int(value.gpu)
