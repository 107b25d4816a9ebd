"""Compiling ahead: what it asks Triton for is what batches need afterwards, in threads, and its failure is harmless."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import triton

from sgl_flashsample import LMHead, selftest, warmup

# Triton's front door needs a process whose Triton is not the interpreter. Its driver and its compiler are stand-ins:
# the one says sm90, the other takes down what it is asked for.
SCRIPT = """
import contextlib, io, itertools, json, logging, os, sys, threading
import torch, triton, triton.compiler
from triton.backends.compiler import GPUTarget
sys.path[:0] = json.loads(sys.argv[1])
try:
    import sgl_flashsample.kernels
except ImportError:
    import sgl_flashsample
    sgl_flashsample.__path__.append(sys.path[0])
from sgl_flashsample import BatchParams, LMHead, choices, sample, tuned, warmup
from sgl_flashsample.kernels import draw_truncated, lm_head_sample, reduce_parts, search_truncated
from sgl_flashsample.kernels.features import LogitEdits, Truncation
from sgl_flashsample.kernels.launch import compiling_only

class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

together = threading.Barrier(2)

def compiler(src, target, options, **more):
    if threading.current_thread() is not threading.main_thread() and next(calls) < 2:
        together.wait(120)  # raises unless another kernel is compiled at the same time
    if how == "broken":
        raise RuntimeError("no compiler")
    asked.append(src.name)
    return object()

triton.compiler.compile = compiler
triton.runtime.driver.set_active(Driver())
os.sched_getaffinity = lambda process: {0, 1}
choices.tile_of = lambda shape, rows, work: tuned.tile_in("sm90", shape.itemsize, rows, work)
choices.draw_on = lambda device, vocab_size: tuned.DEFAULT_DRAW
warmup.draw_for = lambda head: tuned.DEFAULT_DRAW
lm_head_sample.resident_programs = lambda device, per: 132 * per
V = 1_009

def moved(tensor):
    # The same values at an address that is no multiple of 16.
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

def batches():
    # Of each kind one, as SGLang makes them: rows at any address, penalties and masks of any width.
    for rows in (1, 17, 33, 65):
        hidden, ids = torch.zeros(rows, 64, dtype=torch.bfloat16), moved(torch.zeros(rows, dtype=torch.int64))
        ones, flags = moved(torch.ones(rows)), moved(torch.zeros(rows, dtype=torch.int32))
        wide, words = torch.zeros(rows, V), torch.zeros(rows, -(-V // 32), dtype=torch.int32)
        edits = [LogitEdits(additive=wide, rows=flags), LogitEdits(mask=wide.bool(), rows=flags)]
        edits += [LogitEdits(scaling=moved(wide), mask=words, bias=wide, rows=flags), None]
        for edit in edits:
            for truncation in (None, Truncation(flags, ones, ones)):
                for return_logprob in (False, True):
                    yield hidden, BatchParams(ones, ids, ids, truncation, edit), return_logprob

head = LMHead(torch.zeros(V, 64, dtype=torch.bfloat16))
found = {}
for how in ("ahead", "never", "no bool masks", "broken", "another triton"):
    asked, calls, log = [], itertools.count(), io.StringIO()
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s", stream=log, force=True)
    for module in (lm_head_sample, reduce_parts, draw_truncated, search_truncated):
        getattr(module, module.__name__.rpartition(".")[2] + "_kernel").device_caches.clear()
    if how == "another triton":
        del triton.AsyncCompileMode
    if how != "never":
        warmup.compile_at_once([head], 65, bool_masks=how != "no bool masks")
    ahead, asked = asked, []
    try:
        with contextlib.nullcontext() if how == "broken" else compiling_only():
            for hidden, params, return_logprob in batches():
                sample(hidden, head, params, return_logprob=return_logprob)
    except RuntimeError as error:
        asked.append(str(error))
    found[how] = ahead, asked, log.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(request) -> dict[str, tuple[list[str], list[str], str]]:
    """Per case the kernels compiled ahead, those that batches still compile after that, and the log."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(request.config.rootpath)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_batches_need_and_nothing_else_is_compiled_ahead_and_two_at_a_time(found):
    ahead, later, log = found["ahead"]
    assert later == [] and log == ""
    assert sorted(ahead) == sorted(found["never"][1])


def test_kernels_for_bool_masks_are_compiled_ahead_only_when_asked_for(found):
    ahead, later, _ = found["no bool masks"]
    assert len(ahead) + len(later) == len(found["ahead"][0])
    assert set(later) == {"lm_head_sample_kernel"}


def test_a_triton_without_parallel_compilation_compiles_at_the_first_launch_and_nobody_is_warned(found):
    ahead, later, log = found["another triton"]
    assert ahead == [] and len(later) == len(found["ahead"][0])
    assert log.startswith("DEBUG flashsample: kernels are not compiled ahead: AttributeError")


def test_a_kernel_that_does_not_compile_is_reported_where_it_is_launched(found):
    assert found["broken"] == [[], ["no compiler"], ""]


def test_nothing_is_compiled_ahead_where_kernels_are_interpreted(monkeypatch):
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(warmup, "lm_head_sample", None)  # a call would fail
    warmup.compile_at_once([LMHead(torch.zeros(100, 16))], 64)


@pytest.mark.gpu
def test_the_self_test_compiles_nothing_that_was_not_compiled_ahead(device, monkeypatch):
    compiled = []
    head = LMHead(torch.randn(50_257, 80, device=device, dtype=torch.bfloat16))  # another hidden size than elsewhere
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
    )
    warmup.compile_at_once([head, LMHead(head.weight[: selftest.MAX_IDS])], 65)
    assert compiled
    compiled.clear()
    assert selftest.compare_with_reference(head, 65) is None
    assert compiled == []
