"""The public functions: every path draws the reference's tokens, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from core_examples import ROWS, UNSCREENED, VOCAB, assert_reference, example
from kernel_cases import expected, make_case, reference, take
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_flashsample
from sgl_flashsample import Head, LMHead, SamplingPath, Truncation, argmax, sample, sample_from_logits
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.kernels.params import Edit
from sgl_flashsample.kernels.workspace import Workspace
from sgl_flashsample.kinds import CONFIGS, KIND_NAMES
from sgl_flashsample.screen import Screen

ALL, GREEDY = KIND_NAMES["edit+truncate"], KIND_NAMES["greedy"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"padding": 7}, {"softcap": 4.0, "logit_scale": 0.5}], ids=["padded", "softcap"])
@pytest.mark.parametrize("kind", UNSCREENED, ids=str)
@pytest.mark.parametrize("path", [*map(str, CONFIGS), "from logits"])
def test_every_path_draws_the_references_tokens(device, path, kind, options):
    case = example(device, kind, **options)
    head, want = case.head, expected(case)
    if path == "from logits":
        transforms = {"vocab_size": VOCAB, "softcap": head.softcap, "logit_scale": head.logit_scale}
        before = case.raw.clone()
        output = sample_from_logits(case.raw, case.params, return_logprob=True, **transforms)
        assert torch.equal(case.raw, before)
    elif path == "screened":
        output = sample(case.hidden, Head(head, screen=Screen(head, ROWS)), case.params, path=path)
    else:
        output = sample(case.hidden, head, case.params, path=path, return_logprob=True)
    assert_reference(output.token_ids, case)
    assert (output.token_ids.dtype, output.scores.dtype) == (torch.int64, torch.float32)
    assert (output.logprobs is None) == (path == "screened")
    if output.logprobs is not None:
        certain = ~want.near_tie
        torch.testing.assert_close(output.logprobs.double()[certain], want.logprob_low[certain], rtol=0, atol=1e-4)


def test_a_path_is_named_by_its_word_and_another_word_is_refused_with_the_list(device):
    case = example(device)
    drawn = [sample(case.hidden, case.head, case.params, path=path) for path in ("logits", SamplingPath.LOGITS)]
    assert torch.equal(drawn[0].token_ids, drawn[1].token_ids)
    with pytest.raises(ValueError, match=r"'gemm'.*fused.*logits.*screened.*flashinfer"):
        sample(case.hidden, case.head, case.params, path="gemm")


def test_arguments_of_another_type_are_refused_by_name(device):
    case = example(device)
    params, rows = case.params, case.params.temperature
    top_k = Truncation(rows.int(), rows, rows, max_top_k="5")
    for arguments, words in (
        ((case.hidden.cpu().numpy(), case.head, params), r"hidden is a ndarray; expected a \[B, D\] tensor"),
        ((case.hidden[0], case.head, params), r"hidden has shape \(\d+,\); expected a \[B, D\] tensor"),
        ((case.hidden, torch.nn.Linear(4, 8), params), r"weight is a Linear; expected a \[V, D\] tensor"),
        ((case.hidden, case.head, {"temperature": 1.0}), "params is a dict; expected BatchParams"),
        ((case.hidden, case.head, dataclasses.replace(params, temperature=0.7)), "temperature is a float; expected a"),
        ((case.hidden, case.head, dataclasses.replace(params, seed=None)), "seed is a NoneType; expected a tensor"),
        ((case.hidden, case.head, dataclasses.replace(params, truncation=(5, 1.0, 0.0))), "truncation is a tuple; exp"),
        ((case.hidden, case.head, dataclasses.replace(params, truncation=top_k)), "max_top_k is '5'; expected an"),
        ((case.hidden, case.head, dataclasses.replace(params, edits={})), "edits is a dict; expected LogitEdits or"),
    ):
        with pytest.raises(ValueError, match=words):
            sample(*arguments)
    with pytest.raises(ValueError, match=r"logits is a list; expected a \[B, V\] tensor"):
        sample_from_logits([[1.0]], params)
    with pytest.raises(ValueError, match=r"hidden is a list; expected a \[B, D\] tensor"):
        argmax([[1.0]], case.head)


@pytest.mark.slow
def test_without_a_gpu_and_numba_the_error_says_what_is_missing():
    code = """
import importlib.util, torch, sgl_flashsample as fs
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find_spec(name, *rest)
try:
    fs.Sampler(torch.ones(64, 32))(torch.ones(2, 32))
except ValueError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hidden is on the CPU; expected it on a CUDA device: the cpu path needs Numba (pip")


@pytest.mark.parametrize(
    "path, options, reason",
    [
        ("logits", {"logits_dtype": torch.float32}, "its GEMM gives torch.bfloat16, the head's logits are"),
        ("flashinfer", {"logits_dtype": torch.float32}, "its GEMM gives torch.bfloat16, the head's logits are"),
        ("screened", {"logit_scale": -1.0}, r"its logit_scale is -1\.0, the bound needs a positive one"),
    ],
)
def test_a_path_that_cannot_serve_a_head_says_why_and_the_head_is_served_all_the_same(device, path, options, reason):
    case = make_case(ROWS, VOCAB, device, dtype=torch.bfloat16, **options)
    with pytest.raises(ValueError, match=f"path is '{path}', which cannot serve this head: {reason}"):
        sample(case.hidden, case.head, case.params, path=path)
    assert_reference(sample(case.hidden, case.head, case.params).token_ids, case)


def test_arguments_that_do_not_fit_are_named(device):
    case = example(device, ALL)
    states, head, params = case.hidden, case.head, case.params
    limits, edits = params.truncation, params.edits
    for hidden, changes, options, message in [
        (states[:, :16], {}, {}, r"hidden is \(9, 16\).*expected \[B, 32\]"),
        (states[:, :16], {}, {"path": "logits"}, r"hidden is \(9, 16\).*expected \[B, 32\]"),
        (states.half(), {}, {}, r"hidden is .*float16.*expected \[B, 32\] torch.float32"),
        (states.T.contiguous().T, {}, {}, "hidden is on .* with strides"),
        (states, {"seed": params.seed.float()}, {}, "seed is"),
        (states, {"temperature": params.temperature[:2]}, {}, r"temperature is \(2,\)"),
        (states, {"truncation": dataclasses.replace(limits, top_k=limits.top_k.long())}, {}, "top_k is .*int64"),
        (states, {"edits": dataclasses.replace(edits, bias=edits.bias[:, 1:])}, {}, r"bias is \(9, 599\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample(hidden, head, dataclasses.replace(params, **changes), **options)


def test_a_table_or_scratch_of_another_head_is_named(device):
    case = example(device, ALL)
    other = default_table(LMHead(case.head.weight[:32]))
    with pytest.raises(ValueError, match=r"table is for HeadTraits\(.*vocab_size=32.*expected one for the head's Head"):
        Head(case.head, table=other)
    for given in ({"table": "h200.json"}, {"screen": True}):
        with pytest.raises(ValueError, match=r"(table is 'h200|screen is T).*; expected a (DispatchTable|Screen) or"):
            Head(case.head, **given)
    for rows in (-1, None, 1.5, 65537):
        with pytest.raises(ValueError, match=f"max_rows is {rows}; expected an integer, 0 to 65536"):
            Head(case.head, max_rows=rows)
    with pytest.raises(ValueError, match="lm_head is None; expected an LMHead"):
        Head(case.head).replace(None)
    with pytest.raises(ValueError, match="workspace has 1 slots"):
        sample(case.hidden, Head(case.head, workspace=Workspace(1, device)), case.params)


def test_logits_narrower_than_the_vocabulary_are_refused(device):
    params = example(device, ALL).params
    with pytest.raises(ValueError, match=r"logits is \(9, 600\).*expected \[B, 601 or more\]"):
        sample_from_logits(torch.zeros(9, 600, device=device), params, vocab_size=601)
    with pytest.raises(ValueError, match="workspace is 3; expected a Workspace or None"):
        sample_from_logits(torch.zeros(9, 601, device=device), params, workspace=3)


def test_argmax_names_arguments_that_do_not_fit(device):
    case = example(device, ALL)
    with pytest.raises(ValueError, match="hidden is"):
        argmax(case.hidden[:, 1:], case.head)
    with pytest.raises(ValueError, match="lm_head is one of 2 shards; argmax expects a whole vocabulary"):
        argmax(case.hidden, LMHead(case.head.weight, shards=2))


def test_logits_may_be_of_any_dtype_at_any_place_and_of_a_shard(device):
    params = example(device).params
    logits = torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)[:, 3:703]
    want = reference(logits.double(), params)
    whole = sample_from_logits(logits, params, workspace=Workspace(512 * ROWS, device))
    assert torch.equal(whole.token_ids[~want.near_tie], want.token[~want.near_tie])
    low, high = (sample_from_logits(logits[:, a:b], params, vocab_start=a, shards=2) for a, b in ((0, 304), (304, 700)))
    assert torch.equal(torch.where(high.scores > low.scores, high.token_ids, low.token_ids), whole.token_ids)


class Allocations(TorchDispatchMode):
    """Records new tensors. bytes: the memory of each; views and empty tensors are left out."""

    MAKERS = ("empty", "new_", "zeros", "ones", "full", "arange", "clone", "_to_copy", "rand", "mm.default")

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        made = operator(*arguments, **(keywords or {}))
        if str(operator).removeprefix("aten.").startswith(self.MAKERS) and made.untyped_storage().nbytes():
            self.bytes.append(made.untyped_storage().nbytes())
        return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "edit+truncate"])
@pytest.mark.parametrize("path", CONFIGS)
def test_with_scratch_nothing_is_allocated_but_what_is_returned(device, path, kind):
    case = example(device, KIND_NAMES[kind])
    head = Head(case.head, max_rows=ROWS, screen=Screen(case.head, ROWS))
    first, few = sample(case.hidden, head, case.params, path=path), take(case.params, torch.arange(3))
    with Allocations() as allocated:
        again = sample(case.hidden[:3], head, few, path=path)
    assert sorted(allocated.bytes) == [4 * 3, 8 * 3]
    assert torch.equal(again.token_ids, first.token_ids[:3])


def test_a_table_keeps_no_head_in_memory(device):
    case = example(device)
    weight, table = case.head.weight, default_table(case.head)
    head = LMHead(weight)
    Head(head, table=table).draw(case.hidden, case.params)
    gone = weakref.ref(head)
    del head
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("rows, vocab, hidden", [(1, 17, 32), (3, 601, 40), (17, 515, 33)])
def test_argmax_is_the_first_maximum_with_and_without_a_screen(device, rows, vocab, hidden):
    case = make_case(rows, vocab, device, "greedy", torch.float32, hidden=hidden)
    weight, half = case.head.weight, vocab // 2
    weight[half : 2 * half] = weight[:half].clone()  # every logit is there twice
    wanted = torch.argmax(case.edited, -1).tolist()
    assert expected(case).token.tolist() == wanted
    for screen in (None, Screen(case.head, rows)):
        assert argmax(case.hidden, Head(case.head, max_rows=rows, screen=screen)).tolist() == wanted
    assert argmax(case.hidden, weight).tolist() == wanted, "a weight is a head"


def test_argmax_makes_the_parameters_of_greedy_rows_once(device):
    case = example(device, GREEDY)
    head = Head(case.head, max_rows=ROWS)
    argmax(case.hidden, head)
    with Allocations() as allocated:
        argmax(case.hidden, head)
    assert sorted(allocated.bytes) == [4 * ROWS, 8 * ROWS], "only outputs"


def test_argmax_is_of_the_models_own_logits(device):
    """Padding, scale and softcap included, and rounded: two sums that differ by less than bfloat16 can tell tie."""
    weight = torch.full((73, 32), -1.0, dtype=torch.bfloat16, device=device)
    weight[40], weight[50], weight[64:] = 1.0, 1.0, 100.0
    weight[50, 0] = 1.0078125  # its sum, 32.0078125, rounds to 32
    states = torch.ones(1100, 32, dtype=torch.bfloat16, device=device)
    for options, wanted in [
        ({}, 64),
        ({"vocab_size": 64}, 40),
        ({"vocab_size": 64, "logits_dtype": torch.float32}, 50),
        ({"vocab_size": 64, "logit_scale": 0.5, "softcap": 20.0}, 40),
    ]:
        head = LMHead(weight, **options)
        for screen in (None, Screen(head, 2)):
            assert argmax(states[:2], Head(head, screen=screen)).tolist() == [wanted] * 2
    assert argmax(states, weight).tolist() == [64] * 1100, "more rows than the cached parameters have"


def test_a_batch_of_no_rows_has_no_tokens(device):
    case = example(device, rows=0)
    paths, scratch = ("fused", "logits"), Head(case.head, max_rows=2)
    tokens = [
        sample(case.hidden, head, case.params, path=path).token_ids for path in paths for head in (case.head, scratch)
    ]
    for none in (*tokens, argmax(case.hidden, Head(case.head, screen=Screen(case.head, 1)))):
        assert none.shape == (0,) and none.dtype is torch.int64


@pytest.mark.gpu
@pytest.mark.parametrize("path", CONFIGS)
def test_a_captured_graph_follows_its_truncation_and_its_edits(device, path):
    case = make_case(ROWS, VOCAB, device, "edit+truncate", torch.bfloat16)
    head = Head(case.head, screen=Screen(case.head, ROWS), workspace=Workspace(10_000, device))
    options = {"path": path, "return_logprob": path != "screened"}
    eager = sample(case.hidden, head, case.params, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample(case.hidden, head, case.params, **options)
    for _ in range(3):
        graph.replay()
        assert torch.equal(output.token_ids, eager.token_ids)
        assert output.logprobs is None or torch.equal(output.logprobs, eager.logprobs)
    case.params.truncation.top_k.fill_(1)
    case.params.edits.bias.zero_()[:, 41] = 1000.0
    case.params.edits.rows.fill_(int(Edit.BIAS))
    graph.replay()
    assert output.token_ids.tolist() == [41] * ROWS


@pytest.mark.gpu
def test_an_argmax_that_is_captured_first_leaves_nothing_behind_for_others(device):
    case = example(device, GREEDY, 5000)  # no other test has as many rows
    wanted = sample(case.hidden, case.head, case.params).token_ids  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = argmax(case.hidden, case.head)
    assert torch.equal(argmax(case.hidden, case.head), wanted)
    graph.replay()
    assert torch.equal(captured, wanted)


def test_importing_the_package_loads_neither_torch_nor_triton():
    code = (
        "import sys, sgl_flashsample; print([m for m in ('torch', 'triton', 'optuna', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists_and_no_other():
    assert all(getattr(sgl_flashsample, name) is not None for name in sgl_flashsample.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sgl_flashsample.nonsense
