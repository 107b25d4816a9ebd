"""The carrier of hidden states that acts as the logits tensor, and computes the logits when they are read."""

from __future__ import annotations

import copy
import dataclasses
import weakref

import numpy as np
import pytest
import torch

from sgl_flashsample.sglang.lazy_logits import DraftLogits, LazyLogits, plain

WEIGHT = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))


class Compute:
    """Counts how often the logits are really computed."""

    def __init__(self):
        self.calls = 0

    def __call__(self, hidden):
        self.calls += 1
        return hidden @ WEIGHT.T


@pytest.fixture
def hidden():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compute():
    return Compute()


@pytest.fixture
def lazy(hidden, compute):
    return LazyLogits(hidden, 50, "source", compute)


def test_looks_like_float32_logits_without_computing_them(lazy, compute, hidden):
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device) == ((6, 50), torch.float32, hidden.device)
    assert len(lazy) == 6
    assert "not computed" in repr(lazy)
    assert compute.calls == 0


@pytest.mark.parametrize("index", [slice(0, 4), slice(None, 2), slice(3, None), slice(None), slice(0, 0)])
def test_a_slice_of_rows_stays_lazy_and_carries_those_rows(lazy, compute, hidden, index):
    piece = lazy[index]
    assert isinstance(piece, LazyLogits)
    assert torch.equal(piece.hidden, hidden[index])
    assert piece.source == "source"
    assert compute.calls == 0
    assert torch.equal(piece.dense(), hidden[index] @ WEIGHT.T)


def test_the_first_rows_know_the_states_of_the_captured_graph_and_other_rows_do_not(hidden, compute):
    """SGLang cuts the padding off its graph's output; a draw of the whole has these rows first."""
    lazy = LazyLogits(hidden[:5], 50, "source", compute, hidden)
    for index in (slice(0, 4), slice(None, 2), slice(None), slice(0, 0), slice(0, 3, 1)):
        assert lazy[index].captured is hidden and lazy[index][:1].captured is hidden
    for index in (slice(1, 4), slice(3, None), slice(-5, None), slice(-2, None)):
        assert lazy[index].captured is None and lazy[index][:1].captured is None
    assert LazyLogits(hidden, 50, "source", compute)[:2].captured is None, "no graph has them"


def test_a_graph_keeps_the_logits_of_no_step(hidden, compute):
    """Batches come in many sizes, and their logits are hundreds of kilobytes per row."""
    captured, computed = LazyLogits(hidden, 50, "source", compute, hidden), []
    for size in (1, 2, 3, 2, 1):
        step = captured[:size]
        assert captured[:size] is step, "until they are computed, those of the next step are the same"
        computed.append(weakref.ref(step.dense()))
        del step
    assert [logits() for logits in computed] == [None] * 5 and compute.calls == 5


def test_the_first_rows_of_a_graph_are_one_tensor_until_someone_reads_them(hidden, compute):
    lazy = LazyLogits(hidden, 50, "source", compute, hidden)
    first = lazy[:2]
    assert lazy[:2] is first and lazy[:3] is not first
    first.dense()
    hidden += 1  # the graph is replayed
    again = lazy[:2]
    assert again is not first and torch.equal(again.dense(), hidden[:2] @ WEIGHT.T)


READERS = {
    "argmax": lambda z: torch.argmax(z, -1),
    "method": lambda z: z.softmax(-1),
    "row index": lambda z: z[torch.tensor([0, 3])],
    "column index": lambda z: z[:, 3],
    "step": lambda z: z[::2],
    "arithmetic": lambda z: z / torch.full((6, 1), 0.5),
    "clone": lambda z: z.clone(),
    "to": lambda z: z.to(torch.float64),
    "contiguous": lambda z: z.contiguous(),
    "cat": lambda z: torch.cat([z, z]),
    "dlpack": lambda z: torch.from_dlpack(z),
    "numpy": lambda z: torch.from_numpy(np.asarray(z)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("inference", [False, True])
def test_whoever_reads_it_gets_the_logits(lazy, hidden, reader, inference):
    with torch.inference_mode(inference):
        got = READERS[reader](lazy)
        want = READERS[reader](hidden @ WEIGHT.T)
    assert not isinstance(got, LazyLogits)
    torch.testing.assert_close(got, want)


def test_writing_into_it_changes_the_logits_that_later_readers_see(lazy, compute, hidden):
    want = hidden @ WEIGHT.T
    lazy.add_(1.0)
    lazy.div_(2.0)
    lazy[:] = torch.softmax(lazy, -1)
    lazy.index_fill_(1, torch.tensor([4]), -1.0)
    want = torch.softmax((want + 1.0) / 2.0, -1).index_fill_(1, torch.tensor([4]), -1.0)
    torch.testing.assert_close(lazy.dense(), want)
    assert compute.calls == 1
    assert lazy.is_dense


def test_a_slice_after_a_write_sees_the_write(lazy):
    lazy.zero_()
    assert not isinstance(lazy[:3], LazyLogits)
    assert torch.equal(lazy[:3], torch.zeros(3, 50))


def test_memory_is_that_of_the_computed_logits_and_never_null(lazy):
    """Triton's launcher asks for the pointer; a null pointer there is an illegal access."""
    assert lazy.data_ptr() == lazy.dense().data_ptr() != 0


def test_it_is_a_cuda_array_where_its_logits_are(lazy):
    """Numba and CuPy ask for one."""
    assert hasattr(lazy, "__cuda_array_interface__") is lazy.dense().is_cuda


def test_it_survives_the_rebuilds_that_sglang_makes_of_its_output(lazy):
    @dataclasses.dataclass
    class Output:
        next_token_logits: torch.Tensor
        hidden_states: torch.Tensor | None = None

    rebuilt = dataclasses.replace(Output(lazy), hidden_states=None)
    assert rebuilt.next_token_logits is lazy
    assert copy.copy(rebuilt).next_token_logits is lazy


def test_plain_gives_ordinary_tensors_back_as_they_are(lazy, hidden):
    assert plain(hidden) is hidden
    assert plain(None) is None
    assert type(plain(lazy)) is torch.Tensor


def test_the_logits_of_some_rows_are_computed_for_these_alone_and_are_the_callers(lazy, hidden):
    rows = torch.tensor([4, 1])
    for _ in range(2):
        logits = lazy.logits_of(rows)
        torch.testing.assert_close(logits, (hidden @ WEIGHT.T)[rows])
        logits.zero_()
    lazy.add_(1.0)
    with pytest.raises(AssertionError, match="may have changed them"):
        lazy.logits_of(rows)


def test_a_draft_that_stands_twice_for_want_of_other_ids_keeps_its_chance():
    logits = LazyLogits(torch.zeros(1, 4), 7, None, lambda hidden: torch.zeros(1, 7))
    drafts = DraftLogits.of(logits, torch.tensor([[5, 5]]), torch.tensor([[0.9, 0.0]]))
    probabilities = torch.softmax(drafts, dim=-1) + 0.0
    assert torch.equal(probabilities, torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0]]))


@pytest.fixture
def drafts(hidden, compute):
    """Drafts of a graph with six rows."""
    captured = LazyLogits(hidden, 50, "source", compute, hidden)
    return DraftLogits.of(captured, torch.tensor([[7], [1], [9], [4], [30], [0]]))


def test_rows_of_drafts_are_selected_without_their_hidden_states_until_someone_reads_the_logits(
    drafts, hidden, compute
):
    rows = torch.tensor([4, 1])
    some = drafts[:5][rows]
    assert (some.shape, some.num_rows, some.ids.tolist()) == ((2, 50), 2, [[30], [1]]) and compute.calls == 0
    assert torch.equal(some[1:].argmax(-1), torch.tensor([1])) and compute.calls == 0
    want = hidden[rows] @ WEIGHT.T
    want[[0, 1], [30, 1]] = torch.finfo(torch.float32).max
    assert torch.equal(some + 0.0, want) and compute.calls == 1


def test_drafts_that_are_handed_out_are_the_readers_to_change(drafts):
    """Drafts of a graph stay at one place in all steps; selected rows have a copy already."""
    rows = torch.tensor([4, 1])
    for stand_in in (drafts, drafts[:5], drafts[2:], drafts[rows], torch.softmax(drafts[rows], -1)):
        ids = drafts.ids.clone()
        stand_in.argmax(-1, keepdim=True).fill_(-1)
        assert torch.equal(drafts.ids, ids)
    some = drafts[rows]
    taken, again = some.argmax(-1), some.argmax(-1)
    assert taken.data_ptr() == some.ids.data_ptr() != again.data_ptr()


def test_the_first_drafts_of_a_graph_are_one_tensor_until_someone_reads_their_logits(drafts, hidden, compute):
    first = drafts[:2]
    assert drafts[:2] is first and drafts[:3] is not first and drafts[1:] is not drafts[1:]
    first.dense()
    hidden += 1  # the graph is replayed
    drafts.ids.copy_(drafts.ids.flip(0))
    again = drafts[:2]
    assert again is not first and again.argmax(-1).tolist() == [0, 30]
    assert torch.equal(again.dense()[:, 10:20], hidden[:2] @ WEIGHT.T[:, 10:20])
    eager = DraftLogits.of(LazyLogits(hidden, 50, "source", compute), drafts.ids)
    assert eager[:2] is not eager[:2], "no graph has them"
