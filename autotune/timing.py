"""Times of calls on a device, measured as a server runs them. The tuner and the benchmarks share this.

    timer = Timer(torch.device("cuda"))
    contenders = {name: timer.contender(call, copies=len(heads)) for name, call in calls.items()}
    rounds = timer.rounds(contenders, 15, before_round=batch.refresh)
    rounds.timing("fused").us  # median microseconds per call

``call(step)`` runs the whole step once, with noise number ``step`` and copy ``step % copies`` of its inputs. It
writes its results to buffers that it holds, so that it can be captured in a CUDA graph. A contender is such a graph
with as many calls as a millisecond takes, ``MAX_CALLS`` or fewer: the weights are cold, because copies take turns
(``copies_needed``); the hidden states are hot. In each round every contender runs once, in rotated order and without a
pause, so that drift of clocks falls on all alike.

    Timer.contender(call)      a call that is ready to be timed; ``graph=False`` for what no graph can hold
    Timer.sample(contenders)   microseconds per call of each, one after the other, and the SM clock meanwhile
    Timer.rounds(contenders)   many samples, interleaved: ``Rounds``, with a ``Timing`` for each name
    Timer.race(calls)          the three of them in one: {name: Timing}
    Timer.warm_up(call)        keep the device busy until its clocks are those of a loaded one
    copies_needed(weight)      copies of a head that have to take turns to be read from memory
    sm_clock, busy_percent, memory_share
                               of a GPU, through NVML; 0 where nvidia-ml-py or the driver is missing
    describe_machine(device)   device, versions and clocks, for a file of results

Without CUDA the same calls run one at a time: code that uses this can be tested, its times mean nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..kernels.config import cdiv
from ..tables.lookup import environment
from .race import median_and_error

Call = Callable[[int], Any]

MAX_CALLS = 32  # calls per graph; noise and positions are needed for steps 0 to MAX_CALLS - 1
SAMPLE_US = 1000.0  # least time of one sample
WARM_SECONDS = 0.3
COLD = 5  # size of a head's copies over the L2 cache, from which on they are read from memory


@dataclasses.dataclass(frozen=True)
class Contender:
    """A call that is ready to be timed. replay: runs it ``calls`` times. call: holds the buffers of a captured
    graph."""

    replay: Callable[[], object]
    calls: int
    call: Call


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median of n samples, its standard error, and half the distance of the quartiles."""

    us: float
    se: float
    spread: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        us, se = median_and_error(samples)
        quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else (us, us, us)
        return cls(us, se, (quartiles[2] - quartiles[0]) / 2, len(samples))


@dataclasses.dataclass(frozen=True)
class Rounds:
    """samples: microseconds per call of each contender, one per round. clocks: MHz per round, 0 where unknown."""

    samples: dict[str, list[float]]
    clocks: list[float]

    def timing(self, name: str) -> Timing:
        return Timing.of(self.samples[name])


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def contender(self, call: Call, *, copies: int = 1, graph: bool = True) -> Contender:
        """``call``, compiled and captured. copies: of its inputs, ``MAX_CALLS`` at most; each is read equally
        often. graph: False for a call that cannot be captured: it is then timed with its host time. Raises whatever
        ``call`` raises."""
        call(0)  # compiles and allocates
        if self._stream is None:
            return Contender(lambda: call(0), 1, call)
        torch.cuda.synchronize(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            call(0)
            start.record()
            call(1)
            end.record()
            end.synchronize()
            us = max(start.elapsed_time(end) * 1e3, 1.0)
            calls = calls_of_sample(us, copies)
            if not graph:
                return Contender(lambda: [call(step) for step in range(calls)], calls, call)
            # torch.cuda.graph collects garbage and empties caches, which takes ten times as long as a capture.
            captured = torch.cuda.CUDAGraph()
            captured.capture_begin()
            try:
                for step in range(calls):
                    call(step)
            finally:
                captured.capture_end()
        torch.cuda.synchronize(self.device)
        return Contender(captured.replay, calls, call)

    def sample(self, contenders: Sequence[Contender]) -> tuple[list[float], float]:
        """Microseconds per call of each contender, in this order without a pause; and the SM clock in MHz meanwhile."""
        if self._stream is None:
            times = []
            for contender in contenders:
                began = time.perf_counter()
                contender.replay()
                times.append((time.perf_counter() - began) * 1e6 / contender.calls)
            return times, 0.0
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(contenders) + 1)]
        if contenders:
            contenders[0].replay()  # the first sample must not pay for the pause before it
        events[0].record()
        for contender, event in zip(contenders, events[1:], strict=True):
            contender.replay()
            event.record()
        clock = sm_clock(self.device)
        events[-1].synchronize()
        pairs = zip(events, events[1:], contenders, strict=False)
        return [first.elapsed_time(second) * 1e3 / contender.calls for first, second, contender in pairs], clock

    def rounds(
        self,
        contenders: Mapping[str, Contender],
        count: int,
        *,
        first: int = 0,
        before_round: Callable[[int], object] = lambda index: None,
    ) -> Rounds:
        """Time every contender once per round, in rotated order, in rounds ``first`` to ``first + count - 1``.

        before_round: takes the round's number; not timed. Put fresh inputs into the contenders' buffers there.
        """
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        clocks: list[float] = []
        for index in range(first, first + count):
            before_round(index)
            order = rotated(list(contenders), index)
            times, clock = self.sample([contenders[name] for name in order])
            clocks.append(clock)
            for name, us in zip(order, times, strict=True):
                samples[name].append(us)
        return Rounds(samples, clocks)

    def race(self, calls: Mapping[str, Call], rounds: int = 15) -> dict[str, Timing]:
        """Capture ``calls`` and time them side by side."""
        timed = self.rounds({name: self.contender(call) for name, call in calls.items()}, rounds)
        return {name: timed.timing(name) for name in calls}

    def warm_up(self, call: Call) -> None:
        """Run ``call`` until clocks and temperature are as they are under load. Nothing without CUDA."""
        until = time.monotonic() + WARM_SECONDS
        while self._stream is not None and time.monotonic() < until:
            for step in range(8):
                call(step)
            torch.cuda.synchronize(self.device)


def calls_of_sample(us: float, copies: int) -> int:
    """Calls of ``us`` microseconds that take as long as a sample has to, ``MAX_CALLS`` at most: as many with each
    of the copies."""
    return min(MAX_CALLS // copies, math.ceil(SAMPLE_US / us / copies)) * copies


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The order of round ``index``: each name is first in turn. Every other round is reversed: else a name would run
    after the same one in all rounds but one, and be timed with what that leaves behind."""
    place = index // 2 % max(1, len(names))
    turned = [*names[place:], *names[:place]]
    return turned if index % 2 == 0 else turned[::-1]


def copies_needed(weight: torch.Tensor, l2_bytes: int | None = None) -> int:
    """Copies of ``weight`` that have to take turns so that each call reads memory, not the L2 cache; ``MAX_CALLS`` at
    most. l2_bytes: of the weight's device when None."""
    if l2_bytes is None:
        properties: Any = torch.cuda.get_device_properties(weight.device) if weight.is_cuda else None
        l2_bytes = properties.L2_cache_size if properties is not None else 0
    return min(MAX_CALLS, max(1, cdiv(COLD * l2_bytes, weight.numel() * weight.element_size())))


@functools.cache
def _nvml(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and its handle of a GPU; None where either is missing."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        properties: Any = torch.cuda.get_device_properties(device)
        bus = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus)
    except Exception:  # no such package, no driver's library, a GPU that it does not know
        return None


def _ask_nvml(device: torch.device, question: Callable[[Any, Any], float]) -> float:
    """The answer to ``question(nvml, handle)``; 0 where there is none."""
    nvml_and_handle = _nvml(device)
    try:
        return float(question(*nvml_and_handle)) if nvml_and_handle is not None else 0.0
    except Exception:  # this GPU does not say
        return 0.0


def sm_clock(device: torch.device) -> float:
    """MHz at this moment; 0 where it is unknown."""
    return _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))


def busy_percent(device: torch.device) -> float:
    """Share of the last fraction of a second in which a kernel ran, of any process; 0 where it is unknown."""
    return _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)


def memory_share(device: torch.device) -> float:
    """Share of the memory that is in use, of any process; 0 where it is unknown."""

    def used(nvml: Any, gpu: Any) -> float:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return memory.used / memory.total

    return _ask_nvml(device, used)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The facts that a result depends on beside the code: "device", "sms", versions, and "clocks" in MHz, degrees and
    watts."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clocks = {
        "sm_mhz": sm_clock(device),
        "max_sm_mhz": _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        "memory_mhz": _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
        "celsius": _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "watts": _ask_nvml(device, lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    }
    return {
        "device": properties.name if properties is not None else device.type,
        "sms": properties.multi_processor_count if properties is not None else 0,
        **environment(),
        "python": platform.python_version(),
        "clocks": clocks,
    }
