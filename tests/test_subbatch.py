"""Mixed batches: each row gets what SGLang gives it in the whole batch, and only the rows that need SGLang's sampler
have their logits computed. Against SGLang's own code, in this process; the requests are greedy where their tokens
are compared."""

from __future__ import annotations

import copy
import logging
import math
import types

import batches
import pytest
import torch
from batches import Batch, for_forward, grammar, request, sampling_info
from serving import needs_sglang
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_flashsample import SampleOutput
from sgl_flashsample.sglang import hooks

pytestmark = needs_sglang

GREEDY = {"temperature": 0}


@pytest.fixture
def sglang(monkeypatch):
    batches.configure(monkeypatch)
    return monkeypatch


@pytest.fixture
def runners(sglang):
    """Ours and stock."""
    own, stock = batches.samplers()
    return batches.ModelRunner(own, hooks.Hooks(own.runtime)), batches.ModelRunner(stock)


@pytest.fixture
def head():
    return batches.Head()


@pytest.fixture
def disallow(sglang):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


def hidden(rows: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, batches.WIDTH, generator=torch.Generator().manual_seed(seed)).to(batches.DEVICE)


def best(head, states: torch.Tensor, row: int, n: int = 3) -> list[int]:
    """The ids of the largest logits of a row, which a mask or a processor is to exclude."""
    return head.logits(states)[row].topk(n).indices.tolist()


def mixed(head, states, disallow):
    """Fused rows beside one row of every kind that SGLang's sampler processes in its own way."""
    banned = {"token_ids": best(head, states, 1)}  # this processor wants one list for all its rows
    return [
        request("plain", **GREEDY),
        request("processor", disallow, **GREEDY, custom_params=banned),
        request("top logprobs", **GREEDY),
        request("grammar", grammar=grammar(5, 9, 77), **GREEDY),
        request("frequency", **GREEDY, frequency_penalty=1.5),
        request("tempered", temperature=0.5, top_k=1),
        request("bias", **GREEDY, logit_bias={"17": 300.0}),
        request("min new tokens", **GREEDY, min_new_tokens=4, stop_token_ids=best(head, states, 7)),
        request("ids logprobs", **GREEDY),
        request("repetition", **GREEDY, repetition_penalty=1.3),
        request("sampled", temperature=0.01),  # as good as greedy; makes the batch one that is not all greedy
        request("grammar too", disallow, grammar=grammar(5, 9, 77), **GREEDY, custom_params=banned),
        request("frequency too", disallow, **GREEDY, frequency_penalty=1.5, custom_params=banned),
        request("bias too", disallow, **GREEDY, logit_bias={"17": 300.0}, custom_params=banned),
        request("repetition too", disallow, **GREEDY, repetition_penalty=1.3, custom_params=banned),
    ]


ROWS = 15


REASONS = ["fused", "native:custom_logit_processor", *["fused"] * 9, *["native:custom_logit_processor"] * 4]


def seen(info, tokens: list[int]) -> None:
    """Feed the penalizers one generated token per row."""
    info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(tokens, device=batches.DEVICE))


def tolist(values):
    return [value.tolist() if torch.is_tensor(value) else value for value in values]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("return_logprob", [False, True], ids=["tokens", "logprobs"])
def test_every_row_gets_what_sglang_gives_it_in_the_whole_batch(runners, head, disallow, overlap, return_logprob):
    states = hidden(ROWS)
    requests = [Batch(mixed(head, states, disallow)) for _ in range(2)]
    ours, stock = map(sampling_info, requests)
    top, ids = [0, 0, 3, *[0] * 9, 2, 0, 0], [None] * 8 + [[4, 8]] + [None] * 6
    for step in range(3):
        states = hidden(ROWS, seed=step // 2 + 3)  # twice the same: the second time only the penalties differ
        arguments = (return_logprob, top, ids)
        got, output = runners[0].sample(head.lazy(states), for_forward(ours, overlap), *arguments)
        want, expected = runners[1].sample(head.logits(states), for_forward(stock, overlap), *arguments)
        assert got.tolist() == want.tolist()
        reasons = list(REASONS)
        if return_logprob:
            reasons[2], reasons[5] = "native:top_logprobs", "native:greedy_logprob_at_temperature"
            reasons[8] = "native:token_ids_logprobs"
            torch.testing.assert_close(output.next_token_logprobs, expected.next_token_logprobs, atol=1e-4, rtol=0)
            for name in ("next_token_top_logprobs_val", "next_token_token_ids_logprobs_val"):
                for mine, theirs in zip(getattr(output, name), getattr(expected, name), strict=True):
                    assert torch.is_tensor(mine), "SGLang asks every row for its tolist()"
                    assert mine.tolist() == pytest.approx(tolist([theirs])[0], abs=1e-4)
            assert tolist(output.next_token_top_logprobs_idx) == tolist(expected.next_token_top_logprobs_idx)
            got_ids, want_ids = (o.next_token_token_ids_logprobs_idx for o in (output, expected))
            assert [row or [] for row in got_ids] == [row or [] for row in want_ids]
        assert output.customized_info == {"flashsample_path": reasons}
        computed = head.computed.pop()
        assert torch.equal(computed, states[[row for row, reason in enumerate(reasons) if reason != "fused"]])
        for info in (ours, stock):
            seen(info, want.tolist())
    assert not head.computed


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_whole_batch_stays_as_it_is(runners, head, disallow, overlap):
    """Above all its penalizers: filtered, or with penalties left on the batch, later steps would be wrong."""
    states = hidden(ROWS)
    batch = Batch(mixed(head, states, disallow))  # the penalizers' reference to it is a weak one
    info = sampling_info(batch)
    seen(info, list(range(ROWS)))
    given = for_forward(info, overlap)
    before = [vars(copy.copy(each)) for each in (info, given)]
    penalties = [copy.deepcopy(vars(info.penalizer_orchestrator.penalizers[p])) for p in _ordered(info)]
    runners[0].sample(head.lazy(states), given)
    for each, fields in zip((info, given), before, strict=True):
        assert vars(each).keys() == fields.keys()
        for name, value in fields.items():
            assert getattr(each, name) is value, name
    for penalizer, fields in zip(_ordered(info), penalties, strict=True):
        now = vars(info.penalizer_orchestrator.penalizers[penalizer])
        for name, value in fields.items():
            assert not torch.is_tensor(value) or torch.equal(now[name], value)


def _ordered(info):
    return sorted(info.penalizer_orchestrator.penalizers, key=lambda kind: kind.__name__)


def test_a_batch_that_stays_as_it_is_is_cut_once(runners, head, disallow):
    states = hidden(ROWS)
    info = sampling_info(Batch(mixed(head, states, disallow)))
    for _ in range(3):
        runners[0].sample(head.lazy(states), for_forward(info, True))
    (plan,) = hooks.rows_of(info).plans.values()
    first = plan.subbatch
    runners[0].sample(head.lazy(states), for_forward(info, True))
    assert plan.subbatch is first
    assert first.info(info, False) is not first.info(info, False)


class NoWaiting(TorchDispatchMode):
    """Refuses what makes a host wait for its device, or sends it something: a value read, a mask counted, a tensor
    made from Python numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.equal,
            torch.ops.aten.lift_fresh,
        ), func
        return func(*args, **(kwargs or {}))


def test_a_steady_mixed_step_never_waits_for_the_device(runners, head, disallow):
    states = hidden(ROWS)
    info = for_forward(sampling_info(Batch(mixed(head, states, disallow))), True)
    runners[0].sample(head.lazy(states), info)
    (plan,) = hooks.rows_of(info).plans.values()
    rows = len(plan.native)
    own = LogitsProcessorFields(next_token_logprobs=torch.zeros(rows, device=batches.DEVICE))
    own.next_token_top_logprobs_val = list(torch.zeros(rows, 2, device=batches.DEVICE))
    tokens = torch.zeros(rows, dtype=torch.int32, device=batches.DEVICE)
    logprobs = torch.zeros(ROWS, device=batches.DEVICE)
    fused = SampleOutput(logprobs.to(torch.int64), logprobs, logprobs)
    output = LogitsProcessorFields(next_token_logits=head.lazy(states))
    positions = torch.zeros(ROWS, device=batches.DEVICE)
    with NoWaiting():
        plan.subbatch.sample(lambda *_: tokens, None, output, info, True, [0] * ROWS, [None] * ROWS, positions)
        plan.subbatch.merge(tokens, own, fused, output)
    assert [len(values) for values in output.next_token_top_logprobs_val] == [
        0 if reason is None else 2 for reason in plan.reasons
    ]


class LogitsProcessorFields:
    """What a sub-batch touches of SGLang's LogitsProcessorOutput."""

    def __init__(self, next_token_logits=None, next_token_logprobs=None):
        self.next_token_logits, self.next_token_logprobs = next_token_logits, next_token_logprobs
        self.next_token_top_logprobs_val = self.next_token_top_logprobs_idx = None
        self.next_token_token_ids_logprobs_val = self.next_token_token_ids_logprobs_idx = None
        self.next_token_sampling_mask_idx = self.next_token_sampling_logprobs = None


def cut(requests, return_logprob=False, sticky=None):
    """The SamplingBatchInfo that the rows of SGLang's sampler get."""
    from sgl_flashsample.sglang.plan import plan_of
    from sgl_flashsample.sglang.subbatch import SubBatch

    info = sampling_info(Batch(requests))
    for name, value in (sticky or {}).items():
        setattr(info, name, value)
    rows = hooks.rows_of(info)
    plan = plan_of(rows, info, return_logprob, None, None, False, True)
    return SubBatch(info, rows, plan).info(info, return_logprob), info


def test_the_rows_of_sglangs_sampler_are_a_batch_of_their_own(sglang, disallow):
    """Without what the others need: SGLang's flags stay set, also after the request that needed them has left."""
    others = request("sampled", temperature=0.7), request("masked", mask=True, **GREEDY)
    sticky = {"need_top_p_sampling": True, "need_min_p_sampling": True}
    native = request("k", mask=True, top_k=4), request("bias", mask=True, logit_bias={"3": 1.0})
    cut_info, info = cut([others[0], *native], sticky=sticky)
    assert len(cut_info) == 2
    assert (cut_info.need_top_k_sampling, cut_info.need_top_p_sampling, cut_info.need_min_p_sampling) == (1, 0, 0)
    assert cut_info.top_ks.tolist() == [4, 1 << 30]
    assert cut_info.logit_bias[:, 3].tolist() == [0.0, 1.0]
    assert cut_info.grammars is None and cut_info.custom_params is None and not cut_info.has_custom_logit_processor
    assert info.need_top_p_sampling and len(info) == 3
    cut_info, _ = cut([*others, request("g", mask=True, grammar=grammar(2))])
    assert cut_info.return_sampling_masks == [True, True]
    assert [g is not None for g in cut_info.grammars] == [False, True]
    cut_info, _ = cut([*others, request("p", disallow, custom_params={"token_ids": [1]})])
    assert [p and p["token_ids"] for p in cut_info.custom_params] == [None, [1]]


def test_rows_without_a_grammar_beside_one_that_is_not_theirs_have_no_grammars(sglang):
    """SGLang looks for the first grammar of a list, and expects to find one."""
    from sgl_flashsample.sglang.plan import Plan
    from sgl_flashsample.sglang.subbatch import SubBatch

    info = sampling_info(Batch([request("bias", logit_bias={"3": 1.0}), request("g", grammar=grammar(2))]))
    cut_info = SubBatch(info, hooks.rows_of(info), Plan(("logit_bias", None))).info(info, False)
    cut_info.update_regex_vocab_mask()
    assert cut_info.grammar_mask is None


def test_greedy_rows_are_an_all_greedy_batch_unless_their_logprobs_are_asked_for(sglang):
    """All greedy, SGLang takes logprobs at temperature 1; beside a sampled row, at the row's own."""
    requests = [request("sampled"), request("greedy", mask=True, temperature=0.5, top_k=1)]
    assert cut(requests)[0].is_all_greedy
    assert not cut(requests, return_logprob=True)[0].is_all_greedy
    assert cut(requests[1:], return_logprob=True)[0].is_all_greedy


def test_sampling_masks_reach_their_requests(runners, head):
    states = hidden(4)
    requests = [
        request("plain", **GREEDY),
        request("masked", mask=True, top_k=1),
        request("bias", temperature=0.7, logit_bias={"17": 300.0}),
        request("masked too", mask=True, top_k=3, temperature=1.0),
    ]
    outputs = []
    for runner, logits in ((runners[0], head.lazy(states)), (runners[1], head.logits(states))):
        outputs.append(runner.sample(logits, sampling_info(Batch(requests)))[1])
    device_side = [getattr(output, "sampling_mask_output", None) for output in outputs]
    if device_side[1] is None:  # SGLang 0.5.17 makes lists on the host
        assert outputs[0].next_token_sampling_mask_idx == outputs[1].next_token_sampling_mask_idx
        assert outputs[0].next_token_sampling_mask_idx[0] is None
        got, want = (output.next_token_sampling_logprobs for output in outputs)
        assert [value is None for value in got] == [value is None for value in want] == [True, False, True, False]
        assert got[1] == want[1] == 0.0
    else:
        mine, theirs = device_side
        assert mine.lengths.tolist() == theirs.lengths.tolist() == [1, 3]
        assert mine.statuses.tolist() == theirs.statuses.tolist()
        for row, length in enumerate(mine.lengths.tolist()):
            assert mine.token_ids[row, :length].tolist() == theirs.token_ids[row, :length].tolist()
        assert mine.selected_logprobs[0] == theirs.selected_logprobs[0] == 0.0


@pytest.mark.parametrize(
    "requests, shape",
    [([{}, GREEDY], None), ([{"top_k": 1, "mask": True}] * 2, (2, batches.WIDTH))],
    ids=["none", "all"],
)
def test_a_batch_of_one_kind_is_not_cut(runners, head, requests, shape):
    info = sampling_info(Batch([request(str(i), **fields) for i, fields in enumerate(requests)]))
    states = hidden(2)
    _, output = runners[0].sample(head.lazy(states), info)
    assert [tuple(each.shape) for each in head.computed] == ([] if shape is None else [shape])
    assert all(plan.subbatch is None for plan in hooks.rows_of(info).plans.values())
    assert not hasattr(output, hooks.PREPROCESS_ATTRIBUTE), "done, or not needed"


def test_a_mixed_batch_counts_its_rows_under_what_served_them(runners, head, disallow):
    states = hidden(ROWS)
    info = sampling_info(Batch(mixed(head, states, disallow)))
    for _ in range(2):
        runners[0].sample(head.lazy(states), info)
    summary = runners[0].sampler.runtime.counters.summary()
    assert summary == "fused 20 rows in 2 batches; native (custom_logit_processor) 10 rows in 2 batches"


def test_after_a_failure_mixed_batches_are_sglangs_as_a_whole_with_one_warning(
    runners, head, disallow, monkeypatch, caplog
):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def broken(self, keep_indices, keep_indices_device):
        raise AttributeError("an SGLang that is not the one we know")

    monkeypatch.setattr(SamplingBatchInfo, "filter_batch", broken)
    states = hidden(ROWS)
    ours, stock = (sampling_info(Batch(mixed(head, states, disallow))) for _ in range(2))
    want, _ = runners[1].sample(head.logits(states), stock)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(2):
            got, output = runners[0].sample(head.lazy(states), ours)
            assert got.tolist() == want.tolist()
            assert set(output.customized_info["flashsample_path"]) == {"native:error"}
    assert len(caplog.records) == 1
    assert "every mixed batch: AttributeError: an SGLang that is not" in caplog.text
    plain = sampling_info(Batch([request("plain")]))
    _, output = runners[0].sample(head.lazy(hidden(1)), plain)
    assert output.customized_info == {"flashsample_path": ["fused"]}


def test_a_failing_fused_pass_leaves_the_batch_to_sglang_preprocessed(runners, head, disallow, monkeypatch):
    states = hidden(ROWS)
    ours, stock = (sampling_info(Batch(mixed(head, states, disallow))) for _ in range(2))
    monkeypatch.setattr(head.state, "current", lambda: 1 / 0)
    got, output = runners[0].sample(head.lazy(states), ours)
    assert got.tolist() == runners[1].sample(head.logits(states), stock)[0].tolist()
    assert set(output.customized_info["flashsample_path"]) == {"native:error"}
    runners[0].sample(head.lazy(states), ours)
    assert "ZeroDivisionError" in runners[0].sampler.runtime.problem


def test_an_observer_of_the_logits_gets_those_of_the_whole_batch(runners, head):
    states, output = hidden(2), types.SimpleNamespace()
    output.next_token_logits = head.lazy(states)
    original = lambda runner, output, info, observer: observer(output.next_token_logits)  # noqa: E731
    got = runners[0].hooks.preprocess_logits(original, None, output, object(), observer=lambda logits: logits.clone())
    assert torch.equal(got, head.logits(states))
    assert getattr(output, hooks.REASON_ATTRIBUTE) == "sampling_observer"


def test_prefill_only_logprobs_are_those_of_preprocessed_logits(runners, head):
    """No carrier should ever come here; if one does, its biases must not be lost."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner, states = runners[0], hidden(1)
    info = sampling_info(Batch([request("bias", logit_bias={"17": 300.0})]))
    output = LogitsProcessorOutput(next_token_logits=head.lazy(states))
    runner.hooks.preprocess_logits(ModelRunner._preprocess_logits, runner, output, info)
    runner.sampler.compute_logprobs_only(output, info, [0], [[17]])
    assert math.isclose(output.next_token_token_ids_logprobs_val[0].item(), 0.0, abs_tol=1e-3)
