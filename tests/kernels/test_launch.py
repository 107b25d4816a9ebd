"""The launch cache: a binary is looked up once for everything that it depends on, and launched again by place."""

from __future__ import annotations

import dataclasses
import threading
import types

import pytest
import torch
import triton
import triton.language as tl

from sgl_flashsample.kernels.config import cdiv, next_power_of_2
from sgl_flashsample.kernels.launch import (
    Gpu,
    compiling_only,
    gpu_of,
    is_compiling_only,
    launch,
    resident_programs,
    supports_early_launch,
)


def signature(x_ptr, n, A: tl.constexpr, B: tl.constexpr):
    pass


@dataclasses.dataclass(eq=False)
class Kernel:
    """A stand-in for a kernel: returns binaries, and records the requests and the launches of these binaries."""

    asked: list = dataclasses.field(default_factory=list)
    ran: list = dataclasses.field(default_factory=list)
    warmed: list = dataclasses.field(default_factory=list)
    fn = staticmethod(signature)
    __name__ = "signature"

    def __getitem__(self, grid):
        def ask(*arguments, **options):
            self.asked.append((grid, arguments, options))
            return Binary(self.ran, len(self.asked))

        return ask

    def warmup(self, *arguments, **options):
        self.warmed.append((arguments, options))


@dataclasses.dataclass
class Binary:
    ran: list
    number: int

    def __getitem__(self, grid):
        return lambda *arguments: self.ran.append((self.number, grid, arguments))


def test_a_launch_that_agrees_in_its_variant_goes_straight_to_the_binary():
    kernel = Kernel()
    launch(kernel, 3, ("x", 7), {"A": 1, "B": 2}, 4, ("variant",))
    assert kernel.asked == [((3,), ("x", 7), {"A": 1, "B": 2, "num_warps": 4})] and kernel.ran == []
    launch(kernel, 5, ("y", 8), {"A": 1, "B": 2}, 4, ("variant",))
    assert len(kernel.asked) == 1
    assert kernel.ran == [(1, (5, 1, 1), ("y", 8, 1, 2))], "constants behind the arguments, in their order"


def test_what_a_binary_depends_on_asks_for_another():
    kernel, other = Kernel(), Kernel()
    launch(kernel, 1, (), {"A": 1, "B": 2}, 4, ("variant",))
    for changed in (
        (kernel, {"A": 1, "B": 3}, 4, ("variant",)),
        (kernel, {"A": 2, "B": 1}, 4, ("variant",)),
        (kernel, {"A": 1, "B": 2}, 8, ("variant",)),
        (kernel, {"A": 1, "B": 2}, 4, ("another",)),
        (other, {"A": 1, "B": 2}, 4, ("variant",)),
    ):
        of, constants, num_warps, variant = changed
        before = len(of.asked)
        launch(of, 1, (), constants, num_warps, variant)
        assert len(of.asked) == before + 1, changed
    before = len(kernel.asked)
    launch(kernel, 1, (), {"A": 1, "B": 2}, 4, ("variant",), max_registers=128)
    assert kernel.asked[before:] == [((1,), (), {"A": 1, "B": 2, "num_warps": 4, "maxnreg": 128})]
    assert kernel.ran == other.ran == []


def test_constants_in_another_order_than_the_signatures_are_refused():
    """Otherwise a cached binary would read one constant in place of another."""
    with pytest.raises(AssertionError, match=r"constants of signature are \['B', 'A'\], expected \['A', 'B'\]"):
        launch(Kernel(), 1, (), {"B": 2, "A": 1}, 4, ())


def test_an_early_launch_says_so():
    kernel = Kernel()
    launch(kernel, 1, (), {"A": 1, "B": 2}, 4, (), early=True)
    assert kernel.asked[0][2]["launch_pdl"] is True


def test_within_compiling_only_nothing_runs_in_this_thread_alone():
    kernel = Kernel()
    with compiling_only():
        assert is_compiling_only()
        launch(kernel, 1, ("x",), {"A": 1, "B": 2}, 4, ())
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_compiling_only()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not is_compiling_only() and kernel.asked == kernel.ran == []
    assert kernel.warmed == [(("x",), {"A": 1, "B": 2, "num_warps": 4, "grid": (1,)})]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="of the interpreter")
def test_the_interpreter_has_no_binary_to_keep_and_is_asked_each_time():
    @triton.jit
    def increment(x_ptr, N: tl.constexpr):
        offs = tl.arange(0, N)
        tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)

    x = torch.zeros(4)
    for _ in range(3):
        launch(increment, 1, (x,), {"N": 4}, 1, ())
    assert x.tolist() == [3.0] * 4


@pytest.mark.parametrize("capability, early", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_a_gpu_says_how_many_programs_it_holds_and_whether_a_launch_may_start_early(monkeypatch, capability, early):
    (major, minor), device = capability, torch.device("cuda", 99)
    properties = types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for remembered in (gpu_of, resident_programs, supports_early_launch):
        monkeypatch.setattr(f"sgl_flashsample.kernels.launch.{remembered.__name__}", remembered.__wrapped__)
    assert resident_programs.__wrapped__(device, 2) == 264
    assert supports_early_launch.__wrapped__(device) is early


def test_a_gpu_has_the_clock_and_the_bandwidth_that_the_driver_names_and_0_where_it_names_none(monkeypatch):
    properties = types.SimpleNamespace(major=8, minor=9, multi_processor_count=128, name="NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 99)
    assert gpu_of.__wrapped__(device) == Gpu((8, 9), 128, 0.0, 0.0, is_geforce=True)
    vars(properties).update(
        name="NVIDIA H200", clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6016
    )
    known = gpu_of.__wrapped__(device)
    assert (known.clock, round(known.bandwidth / 1e9), known.is_geforce) == (1.98e9, 4814, False)


def test_devices_say_what_they_hold_and_can_do():
    cpu = torch.device("cpu")
    assert resident_programs(cpu, 6) == 6 and not supports_early_launch(cpu)
    if torch.cuda.is_available():
        cuda = torch.device("cuda", 0)
        assert resident_programs(cuda, 2) == 2 * torch.cuda.get_device_properties(cuda).multi_processor_count
        assert supports_early_launch(cuda) == (torch.cuda.get_device_capability(cuda) >= (9, 0))
    assert [cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]
