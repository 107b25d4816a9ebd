"""The kernels compiled ahead are exactly those that batches launch afterwards; two are compiled at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

# Triton's public interface needs a process whose Triton is not the interpreter. The GPU is pretended, and the compiler
# is a stand-in that records its requests.
SCRIPT = """
import contextlib, io, itertools, json, logging, os, sys, threading
import torch, triton, triton.compiler
root, V, anywhere = json.loads(sys.argv[1])
sys.path.insert(0, root)
try:
    import sgl_flashsample.kernels
except ImportError:
    import sgl_flashsample
    sgl_flashsample.__path__.append(root)
from sgl_flashsample import BatchParams, Head, LMHead, LogitEdits, Truncation, WantedLogprobs, paths, sample, selfcheck
from sgl_flashsample.screen import Screen
from sgl_flashsample.screen_race import Outcome, candidates, decide, race, raced_kinds
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.kernels.gather_rows import RowBuffers, StagedBatch, gather_rows, stage_rows, write_rows
from sgl_flashsample.kernels.host_memory import copy_words
from sgl_flashsample.kernels.launch import Gpu, compiling_only, pretend_gpu

together = threading.Barrier(2)

def compiler(src, target, options, **more):
    if threading.current_thread() is not threading.main_thread() and next(calls) < 2:
        together.wait(120)  # raises unless another kernel is compiled at the same time
    if how == "broken":
        raise RuntimeError("no compiler")
    asked.append(src.name)
    return object()

triton.compiler.compile = compiler
pretend_gpu(Gpu((9, 0), 132))
os.sched_getaffinity = lambda process: {0, 1}
modules = [module for name, module in sys.modules.items() if name.startswith("sgl_flashsample.kernels.")]
kernels = [value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)]

def moved(tensor):
    # The same values; anywhere: at an address that is no multiple of 16.
    if not anywhere:
        return tensor
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

def batches():
    # One batch of each kind, as SGLang makes them.
    for rows in (1, 9, 17, 33, 65):
        hidden, ids = torch.zeros(rows, 64, dtype=torch.bfloat16), moved(torch.zeros(rows, dtype=torch.int64))
        ones, flags = moved(torch.ones(rows)), moved(torch.zeros(rows, dtype=torch.int32))
        wide, words = torch.zeros(rows, V), torch.zeros(rows, -(-V // 32), dtype=torch.int32)
        edits = [None, LogitEdits(additive=wide, rows=flags), LogitEdits(mask=wide.bool(), rows=flags)]
        edits.append(LogitEdits(scaling=moved(wide), mask=words, bias=wide, rows=flags))
        edits += [LogitEdits(mask=words, rows=flags), LogitEdits(bias=wide, mask=wide.bool(), rows=flags)]
        truncations = [None, Truncation(flags, ones, ones), Truncation(flags, ones, ones, 20)]
        for truncation, edit in itertools.product(truncations, edits):
            for return_logprob, greedy in ((False, False), (True, False), (False, True)):
                yield hidden, BatchParams(ones, ids, ids, truncation, edit, all_greedy=greedy), return_logprob

head = LMHead(torch.zeros(V, 64, dtype=torch.bfloat16))
def stopwatch(calls, rounds, refresh):
    for call in calls:
        call()
    return [[1.0] * rounds] * 2

screen, results = Screen(head, 65), {}
for how in ("ahead", "never", "raced", "no bool masks", "no screen", "broken", "another triton"):
    asked, calls, log = [], itertools.count(), io.StringIO()
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s", stream=log, force=True)
    for kernel in kernels:
        kernel.device_caches.clear()
    if how == "another triton":
        del triton.AsyncCompileMode
    screens = () if how == "no screen" else (screen,)
    table = default_table(head)
    tables = [table]
    if how == "raced":
        table = candidates(table, raced_kinds(head))
        tables = [table, decide(table, Outcome((), 0.0))]
    if how != "never":
        parts = paths.Parts.of(head, screen=next(iter(screens), None))
        selfcheck.compile_ahead([parts], 65, table, bool_masks=how != "no bool masks")
    ahead, asked = asked, []
    try:
        with contextlib.nullcontext() if how == "broken" else compiling_only():
            if how == "raced":
                race(parts, table, stopwatch)
            for hidden, params, return_logprob in batches():
                for used, chosen in itertools.product({*screens, None}, tables):  # also while the screen serves nothing
                    one = Head(head, table=chosen, screen=used)
                    sample(hidden, one, params, return_logprob=return_logprob)
                for k in (0, 1, 8, 20) if return_logprob else ():
                    ids = moved(torch.zeros(len(hidden), 5, dtype=torch.int64))
                    wanted = WantedLogprobs(k, moved(torch.zeros(len(hidden), dtype=torch.int32)), ids)
                    sample(hidden, head, params, logprobs=wanted)
                    Head(head).logprobs_of(hidden, params.seed, WantedLogprobs(k, None, ids))
            for rows in (1, 9, 65):
                slots, lines = moved(torch.ones(rows, dtype=torch.int64)), torch.ones(rows, 8, dtype=torch.int32)
                write_rows(lines.clone(), slots, moved(lines))
                out = RowBuffers.allocate(max(rows, 32), "cpu")
                gather_rows(lines, slots, slots, out, edits=rows)
                stage_rows(StagedBatch(lines.device), lines, head.weight[: min(rows, 32)], out)
                copy_words(lines[0], moved(lines[0].clone()))
                copy_words(lines[0, :6], lines[0], tells=True)
    except RuntimeError as error:
        asked.append(str(error))
    results[how] = ahead, asked, log.getvalue()
print(json.dumps(results))
"""


@pytest.fixture(
    scope="module", params=[(1_008, False), (1_009, True)], ids=["whole groups", "odd widths and addresses"]
)
def results(request) -> dict[str, tuple[list[str], list[str], str]]:
    """Per case the kernels compiled ahead, those that batches still compile after that, and the log."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(request.config.rootpath), *request.param])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_batches_need_and_nothing_else_is_compiled_ahead_and_two_at_a_time(results):
    ahead, later, log = results["ahead"]
    assert later == [] and log == ""
    assert sorted(ahead) == sorted(results["never"][1])
    assert {"lm_head_sample_kernel", "screen_head_kernel", "top_logprobs_kernel"} <= set(ahead)


def test_neither_a_race_of_the_screen_nor_what_it_decides_compiles_anything_later(results):
    ahead, later, log = results["raced"]
    assert later == [] and log == ""
    assert ahead.count("screen_head_kernel") > results["ahead"][0].count("screen_head_kernel")


def test_kernels_for_bool_masks_and_of_a_screen_are_compiled_ahead_only_when_asked_for(results):
    ahead, later, _ = results["no bool masks"]
    assert len(ahead) + len(later) == len(results["ahead"][0]) and later
    ahead, later, _ = results["no screen"]
    assert later == [] and "screen_head_kernel" not in ahead


def test_a_triton_without_parallel_compilation_compiles_at_the_first_launch_and_nobody_is_warned(results):
    ahead, later, log = results["another triton"]
    assert ahead == [] and len(later) == len(results["ahead"][0])
    assert log.startswith("DEBUG flashsample: kernels are not compiled ahead: AttributeError")


def test_a_kernel_that_does_not_compile_is_reported_where_it_is_launched(results):
    assert results["broken"] == [[], ["no compiler"], ""]
