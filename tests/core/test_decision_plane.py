"""The decision plane: the tokens of ``sample``, whatever the blocks; what is copied when, and that nothing is drawn
before it has arrived."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable

import pytest
import torch
from kernel_cases import DTYPES, KINDS, Case, expected, make_case, mixed_edits

from sgl_flashsample import cpu_path, decision_plane, dispatch
from sgl_flashsample.api import sample
from sgl_flashsample.decision_plane import SLOTS, DecisionPlane
from sgl_flashsample.kernels.params import BatchParams, LogitEdits, SampleOutput
from sgl_flashsample.kernels.workspace import Workspace

pytest.importorskip("numba")
CPU = torch.device("cpu")


def draw(plane: DecisionPlane, case: Case) -> SampleOutput:
    workspace = Workspace(1, case.hidden.device)
    return plane.draw(case.hidden, case.head, case.params, workspace=workspace, return_logprob=True)


@pytest.fixture
def sampled(monkeypatch) -> Callable[[Case], SampleOutput]:
    """What ``sample`` draws; on a CPU, in host memory instead of Triton's interpreter."""
    monkeypatch.setattr(dispatch, "draws_in_host_memory", lambda device: device.type == "cpu")
    return lambda case: sample(case.hidden, case.head, case.params, return_logprob=True, path="logits")


def assert_same(drawn: SampleOutput, want: SampleOutput, case: Case) -> None:
    """On a GPU, kernels and host memory may differ in near-ties."""
    if case.hidden.device.type == "cpu":
        assert all(torch.equal(one, other) for one, other in zip(drawn, want, strict=True))
    else:
        certain = ~expected(case).near_tie
        assert torch.equal(drawn.token_ids[certain], want.token_ids[certain])
        assert torch.allclose(drawn.logprobs[certain], want.logprobs[certain], rtol=1e-4, atol=1e-4, equal_nan=True)


# --- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows, vocab, dtype", [(1, 127, "bf16"), (3, 129, "fp16"), (17, 50257, "bf16")])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_sample(device, sampled, kind, num_rows, vocab, dtype):
    case = make_case(num_rows, vocab, device, kind, DTYPES[dtype], padding=vocab % 7)
    assert_same(draw(DecisionPlane(device, block_rows=5), case), sampled(case), case)


@pytest.mark.parametrize("vocab", [127, 129, 50257])
def test_blocks_and_threads_change_no_token(device, sampled, vocab):
    case = make_case(65, vocab, device, "edit+truncate", torch.bfloat16)
    want = sampled(case)
    for block_rows, threads in ((7, 1), (32, 3), (65, 2), (1000, None)):
        assert_same(draw(DecisionPlane(device, block_rows, threads), case), want, case)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_scale": 0.375, "softcap": 9.0},
        {"logits_dtype": torch.float32},
        {"logits_dtype": torch.bfloat16},
        {"vocab_start": 160, "shards": 2},
    ],
    ids=str,
)
def test_scale_softcap_rounding_and_shard_are_the_models(device, options):
    case = make_case(17, 901, device, "edit", seed=3, padding=11, **options)
    out, want = draw(DecisionPlane(device, 5), case), expected(case)
    assert torch.equal(out.token_ids[~want.near_tie], want.token[~want.near_tie])


def test_edits_may_be_views_and_a_mask_of_bools(device, sampled):
    case = make_case(9, 700, device)
    edits = mixed_edits(9, 700, device, bool_mask=True)
    wide = torch.cat([edits.additive, edits.additive], 1)
    one_bias = edits.bias[:1].expand(9, 700)
    for rows in (edits.rows, None):  # which rows are edited; all where nothing says so
        edited = case.with_params(edits=LogitEdits(wide[:, :700], mask=edits.mask, bias=one_bias, rows=rows))
        assert_same(draw(DecisionPlane(device, block_rows=4), edited), sampled(edited), edited)


def test_logprobs_are_given_where_they_are_asked_for_and_no_rows_give_no_tokens(device):
    case, plane = make_case(3, 300, device), DecisionPlane(device)
    workspace = Workspace(1, device)
    out = plane.draw(case.hidden, case.head, case.params, workspace=workspace)
    assert out.logprobs is out.log_mass is None and torch.equal(out.token_ids, draw(plane, case).token_ids)
    assert out.token_ids.device == out.scores.device == case.hidden.device
    none = case.rows(torch.arange(0, device=device))
    assert len(draw(plane, none).token_ids) == 0


# --- what is copied when ----------------------------------------------------------------------------------------------


class Late(DecisionPlane):
    """As on a GPU: copies to the host are made on another stream when they are waited for, not before. log: what was
    done in which order, by slot."""

    def __init__(self, block_rows: int) -> None:
        super().__init__(CPU, block_rows)
        self.pending: list[Callable[[], object]] = []
        self.log: list[str] = []
        self.aside = False  # whether the copying stream is the current one
        self._stream = types.SimpleNamespace(wait_event=lambda event: self.log.append(f"wait for {event.name}"))
        self._computed = types.SimpleNamespace(name="GEMM", record=lambda: self.log.append("GEMM"))
        self._arrived = [Arrival(self, slot) for slot in range(SLOTS)]

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.untyped_storage().data_ptr() == self._outputs.untyped_storage().data_ptr():
            self.log.append("back, aside" if self.aside else "back")
            return super()._copy(destination, source)
        assert self.aside
        self.pending.append(lambda: destination.copy_(source))
        return destination


class Arrival:
    """An event on the copying stream of a ``Late`` plane."""

    def __init__(self, plane: Late, slot: int) -> None:
        self.plane, self.slot, self.before = plane, slot, 0

    def record(self) -> None:
        assert self.plane.aside
        self.plane.log.append(f"copy {self.slot}")
        self.before = len(self.plane.pending)

    def synchronize(self) -> None:
        self.plane.log.append(f"draw {self.slot}")
        for copy in self.plane.pending[: self.before]:
            copy()
        self.plane.pending[: self.before] = [lambda: None] * self.before


@pytest.fixture
def late(monkeypatch) -> Late:
    plane = Late(4)

    @contextlib.contextmanager
    def aside(stream):
        assert stream is plane._stream
        plane.aside = True
        yield
        plane.aside = False

    monkeypatch.setattr(torch.cuda, "stream", aside)
    return plane


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_before_it_has_arrived(sampled, late, kind):
    case = make_case(17, 300, CPU, kind, torch.bfloat16)
    for position in (case.params.position, case.params.position + 1):
        case = case.with_params(position=position)
        assert_same(draw(late, case), sampled(case), case)


def test_blocks_are_copied_after_the_gemm_each_while_the_one_before_is_drawn(late):
    draw(late, make_case(13, 127, CPU))
    blocks = ["copy 0", "copy 1", "draw 0", "copy 0", "draw 1", "copy 1", "draw 0", "draw 1"]
    assert late.log == ["GEMM", "wait for GEMM", *blocks, "back"]


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """The addresses of all tensors that are copied to the host or back."""
    seen: list[int] = []
    copy = DecisionPlane._copy

    def noted(plane, destination, source):
        seen.append(source.data_ptr())
        return copy(plane, destination, source)

    monkeypatch.setattr(DecisionPlane, "_copy", noted)
    return seen


def tensors_of(params: BatchParams) -> set[int]:
    """The addresses of what stays while a batch stays."""
    limits = params.truncation
    return {t.data_ptr() for t in (params.temperature, params.seed, limits.top_k, limits.top_p, limits.min_p)} | {
        params.edits.rows.data_ptr()
    }


def test_the_parameters_of_a_batch_are_copied_once_and_its_positions_in_each_step(device, copied):
    case, plane = make_case(9, 300, device, "edit+truncate"), DecisionPlane(device, 4)
    draw(plane, case)
    assert tensors_of(case.params) <= set(copied)
    copied.clear()
    case.params.position.add_(1)
    first = draw(plane, case)
    assert not tensors_of(case.params) & set(copied) and case.params.position.data_ptr() in copied
    want = expected(case)
    assert torch.equal(first.token_ids[~want.near_tie], want.token[~want.near_tie])


def test_a_new_tensor_and_a_write_to_a_known_one_are_copied_anew(device, sampled):
    case, plane = make_case(9, 300, device, "truncate"), DecisionPlane(device, 4)
    draw(plane, case)
    case.params.temperature.mul_(0.5)
    other = case.with_params(seed=case.params.seed + 1)
    assert_same(draw(plane, other), sampled(other), other)
    assert_same(draw(plane, case), sampled(case), case)


def test_batches_of_all_sizes_and_kinds_take_turns(device, sampled):
    plane = DecisionPlane(device, 4)
    turns = ((9, "plain"), (9, "truncate"), (3, "truncate"), (9, "truncate"), (600, "plain"), (9, "edit"), (9, "plain"))
    for rows, kind in turns:
        case = make_case(rows, 300, device, kind, seed=rows)
        assert_same(draw(plane, case), sampled(case), case)


def test_a_steady_step_reserves_no_memory_of_the_host(device, monkeypatch):
    plane, cases = DecisionPlane(device, 4), [make_case(9, 300, device, kind) for kind in ("edit+truncate", "plain")]
    for case in cases:
        draw(plane, case)
    monkeypatch.setattr(decision_plane.DecisionPlane, "_host_memory", None)
    for case in cases:
        draw(plane, case.with_params(position=case.params.position + 1))


def test_memory_made_in_inference_mode_serves_outside_of_it(device, sampled):
    case, plane = make_case(9, 300, device, "edit+truncate"), DecisionPlane(device, 4)
    with torch.inference_mode():
        draw(plane, case)
    assert_same(draw(plane, case), sampled(case), case)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_without_numba_and_for_bad_arguments_it_says_so_in_a_line(device, monkeypatch):
    case = make_case(3, 300, device)
    short = case.with_params(seed=case.params.seed[:2])
    with pytest.raises(ValueError, match=r"seed is \(2,\).*expected contiguous \(3,\) torch.int64"):
        draw(DecisionPlane(device), short)
    with pytest.raises(ValueError, match="block_rows is 0; expected 1 or more"):
        DecisionPlane(device, 0)
    monkeypatch.setattr(decision_plane, "unsupported_by_machine", cpu_path.unsupported_by_machine.__wrapped__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the cpu path needs Numba"):
        DecisionPlane(device)
