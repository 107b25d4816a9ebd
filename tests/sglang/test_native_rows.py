"""Mixed batches: each row gets what SGLang gives it in the whole batch, and only the rows that need SGLang's sampler
have their logits computed. Against SGLang's own code, in this process; the requests are greedy where their tokens
are compared."""

from __future__ import annotations

import copy
import logging
import math
import types

import pytest
import torch
from head_states import WIDTH
from sglang_batches import for_forward, grammar, request
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.sglang.batch import (
    BATCH_ATTRIBUTE,
    PREPROCESS_ATTRIBUTE,
    REASON_ATTRIBUTE,
    Routing,
    batch_of,
    routing_of,
)

GREEDY = {"temperature": 0}
ROWS = 15
REASONS = ["fused", "native:custom_logit_processor", *["fused"] * 9, *["native:custom_logit_processor"] * 4]


@pytest.fixture
def disallow(one_rank) -> str:
    """SGLang's own custom logit processor, as requests carry it."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


def best(head, states: torch.Tensor, row: int, n: int = 3) -> list[int]:
    """The ids of the largest logits of a row, which a mask or a processor is to exclude."""
    return head.logits(states)[row].topk(n).indices.tolist()


def forbidden(head, states: torch.Tensor, row: int) -> dict:
    """Of a request: its first tokens are not the best ones of ``row``, which would end it."""
    return {"min_new_tokens": 4, "stop_token_ids": best(head, states, row)}


def mixed(head, states, disallow) -> list:
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
        request("min new tokens", **GREEDY, **forbidden(head, states, 7)),
        request("ids logprobs", **GREEDY),
        request("repetition", **GREEDY, repetition_penalty=1.3),
        request("sampled", temperature=0.01),  # as good as greedy; makes the batch one that is not all greedy
        request("grammar too", disallow, grammar=grammar(5, 9, 77), **GREEDY, custom_params=banned),
        request("additive too", disallow, **GREEDY, **forbidden(head, states, 12), custom_params=banned),
        request("bias too", disallow, **GREEDY, logit_bias={"17": 300.0}, custom_params=banned),
        request("repetition too", disallow, **GREEDY, repetition_penalty=1.3, custom_params=banned),
    ]


def see(info, tokens: list[int]) -> None:
    """Feed the penalizers one generated token per row."""
    info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(tokens, device=info.device))


def tolist(values):
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("return_logprob", [False, True], ids=["tokens", "logprobs"])
def test_every_row_gets_what_sglang_gives_it_in_the_whole_batch(
    runners, head, disallow, info_of, hidden, overlap, return_logprob
):
    ours, stock = (info_of(mixed(head, hidden(ROWS), disallow)) for _ in range(2))
    top, ids = [0, 0, 3, *[0] * 9, 2, 0, 0], [None] * 8 + [[4, 8]] + [None] * 6
    for step in range(3):
        states = hidden(ROWS, seed=step // 2 + 3)  # twice the same: the second time only the penalties differ
        arguments = (return_logprob, top, ids)
        got, output = runners[0].sample(head.lazy(states), for_forward(ours, overlap), *arguments)
        want, expected = runners[1].sample(head.logits(states), for_forward(stock, overlap), *arguments)
        assert got.tolist() == want.tolist()
        reasons = list(REASONS)
        if return_logprob:
            torch.testing.assert_close(output.next_token_logprobs, expected.next_token_logprobs, atol=1e-4, rtol=0)
            for name in ("next_token_top_logprobs_val", "next_token_token_ids_logprobs_val"):
                for mine, theirs in zip(getattr(output, name), getattr(expected, name), strict=True):
                    assert mine.tolist() == pytest.approx(tolist([theirs])[0], abs=1e-4)
            mine, theirs = (tolist(o.next_token_top_logprobs_idx) for o in (output, expected))
            assert [*map(list, mine)] == theirs
            got_ids, want_ids = (o.next_token_token_ids_logprobs_idx for o in (output, expected))
            assert [row or [] for row in got_ids] == [row or [] for row in want_ids]
        assert output.customized_info == {"flashsample_path": reasons}
        computed = head.computed.pop()
        assert torch.equal(computed, states[[row for row, reason in enumerate(reasons) if reason != "fused"]])
        for info in (ours, stock):
            see(info, want.tolist())
    assert not head.computed


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("return_logprob", [False, True], ids=["tokens", "logprobs"])
def test_requests_that_are_all_sglangs_are_sampled_as_in_stock_without_a_routing_in_each_step(
    runners, head, disallow, info_of, hidden, monkeypatch, overlap, return_logprob
):
    banned = {"token_ids": [3, 4]}
    rows = [
        request("frequency", disallow, **GREEDY, frequency_penalty=1.5, custom_params=banned),
        request("tempered", disallow, temperature=0.5, top_k=1, custom_params=banned),
        request("sampled", disallow, temperature=0.01, logit_bias={"17": 3.0}, custom_params=banned),
        request("grammar", disallow, **GREEDY, grammar=grammar(5, 9, 77), custom_params=banned),
    ]
    ours, stock = info_of(rows), info_of(rows)
    monkeypatch.setattr(runners[0].sampler, "_route", lambda *arguments: pytest.fail("a routing"))
    for step in range(3):
        states = hidden(4, seed=step // 2)
        got, output = runners[0].sample(head.lazy(states), for_forward(ours, overlap), return_logprob)
        want, expected = runners[1].sample(head.logits(states), for_forward(stock, overlap), return_logprob)
        assert got.tolist() == want.tolist()
        assert not return_logprob or torch.equal(output.next_token_logprobs, expected.next_token_logprobs)
        assert torch.equal(output.next_token_logits, expected.next_token_logits)
        assert output.customized_info == {"flashsample_path": ["native:custom_logit_processor"] * 4}
        for info in (ours, stock):
            see(info, want.tolist())


@pytest.mark.parametrize("case", ["the fused pass is off", "other rows than were scheduled"])
def test_such_requests_say_another_reason_where_there_is_one(runners, head, disallow, info_of, hidden, case):
    info = info_of([request(f"r{row}", disallow, **GREEDY, custom_params={"token_ids": [3]}) for row in range(2)])
    reason = "inactive"
    if case == "the fused pass is off":
        runners[0].sampler.runtime.inactive_reason = "off"
    else:
        batch = batch_of(info)
        setattr(info, BATCH_ATTRIBUTE, batch.keep([0]))
        reason = "unknown_rows"
    _, output = runners[0].sample(head.lazy(hidden(2)), info)
    assert output.customized_info == {"flashsample_path": [f"native:{reason}"] * 2}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_whole_batch_stays_as_it_is(runners, head, disallow, info_of, hidden, overlap):
    """In particular its penalizers: later steps would be wrong if they were filtered or left penalties on the batch."""
    info = info_of(mixed(head, hidden(ROWS), disallow))
    see(info, list(range(ROWS)))
    penalizers = list(info.penalizer_orchestrator.penalizers.values())
    given = for_forward(info, overlap)
    before = [vars(copy.copy(each)) for each in (info, given)]
    penalties = [copy.deepcopy(vars(penalizer)) for penalizer in penalizers]
    runners[0].sample(head.lazy(hidden(ROWS)), given)
    for each, fields in zip((info, given), before, strict=True):
        assert vars(each).keys() == fields.keys()
        for name, value in fields.items():
            assert getattr(each, name) is value, name
    assert list(info.penalizer_orchestrator.penalizers.values()) == penalizers
    for penalizer, fields in zip(penalizers, penalties, strict=True):
        for name, value in fields.items():
            assert not torch.is_tensor(value) or torch.equal(vars(penalizer)[name], value)


def test_the_rows_of_a_batch_that_stays_as_it_is_are_cut_once(runners, head, disallow, info_of, hidden):
    info = info_of(mixed(head, hidden(ROWS), disallow))
    native_rows = []
    for _ in range(3):
        runners[0].sample(head.lazy(hidden(ROWS)), for_forward(info, True))
        native_rows += [routing.native_rows for routing in batch_of(info).routings.values()]
    assert len(native_rows) == 3 and native_rows[0] is native_rows[1] is native_rows[2] is not None
    assert native_rows[0].info(info, False) is not native_rows[0].info(info, False)


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


def test_a_steady_mixed_step_never_waits_for_the_device(runners, head, disallow, info_of, hidden, device):
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sgl_flashsample.sglang.sampler import Call

    states = hidden(ROWS)
    info = for_forward(info_of(mixed(head, states, disallow)), True)
    runners[0].sample(head.lazy(states), info)
    (routing,) = batch_of(info).routings.values()
    num_native = len(routing.native)
    theirs = LogitsProcessorOutput(next_token_logits=None, next_token_logprobs=torch.zeros(num_native, device=device))
    theirs.next_token_top_logprobs_val = list(torch.zeros(num_native, 2, device=device))
    tokens = torch.zeros(num_native, dtype=torch.int32, device=device)
    logprobs = torch.zeros(ROWS, device=device)
    fused = SampleOutput(logprobs.to(torch.int64), logprobs, logprobs)
    output = LogitsProcessorOutput(next_token_logits=head.lazy(states))
    call = Call(output, info, True, [0] * ROWS, [None] * ROWS, torch.zeros(ROWS, device=device))
    with NoWaiting():
        routing.native_rows.sample(lambda *_: tokens, None, call)
        routing.native_rows.merge(tokens, theirs, fused, output)
    assert [len(values) for values in output.next_token_top_logprobs_val] == [
        0 if reason is None else 2 for reason in routing.reasons
    ]


def test_sglangs_sampler_is_called_with_what_its_rows_asked_for_and_their_positions(head, info_of, hidden, device):
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sgl_flashsample.sglang.sampler import Call, NativeRows

    states, calls = hidden(4), []
    info = info_of([request(str(row), mask=row % 2 == 1, **GREEDY) for row in range(4)])
    output, positions = LogitsProcessorOutput(head.lazy(states)), torch.tensor([10, 20, 30, 40], device=device)
    call = Call(output, info, True, [0, 2, 3, 1], [None, None, [6], [7]], positions)
    routing = Routing((None, "sampling_mask") * 2)
    rows = NativeRows(info, batch_of(info), routing, device)
    rows.sample(lambda *arguments: calls.append(arguments), None, call)
    ((their_output, their_info, *others, their_positions),) = calls
    torch.testing.assert_close(their_output.next_token_logits, head.logits(states)[[1, 3]])
    assert len(their_info) == 2
    assert others == [True, [2, 1], [None, [7]]] and their_positions.tolist() == [20, 40]


def native_info(info, routing: Routing | None = None, return_logprob: bool = False):
    """The SamplingBatchInfo that the rows of SGLang's sampler get."""
    from sgl_flashsample.sglang.sampler import NativeRows

    batch = batch_of(info)
    routing = routing or routing_of(batch, info, return_logprob, None, None, False, True)
    return NativeRows(info, batch, routing, info.temperatures.device).info(info, return_logprob)


def test_the_rows_of_sglangs_sampler_are_a_batch_of_their_own(info_of, disallow):
    """That batch has only the flags that its rows need. SGLang's flags stay set after the request that needed them
    left."""
    others = request("sampled", temperature=0.7), request("masked", mask=True, **GREEDY)
    native = request("k", mask=True, top_k=4), request("bias", mask=True, logit_bias={"3": 1.0})
    info = info_of([others[0], *native])
    info.need_top_p_sampling = info.need_min_p_sampling = True
    part = native_info(info)
    assert len(part) == 2
    assert (part.need_top_k_sampling, part.need_top_p_sampling, part.need_min_p_sampling) == (True, False, False)
    assert part.top_ks.tolist() == [4, 1 << 30]
    assert part.logit_bias[:, 3].tolist() == [0.0, 1.0]
    assert part.grammars is None and part.custom_params is None and not part.has_custom_logit_processor
    assert info.need_top_p_sampling and len(info) == 3
    part = native_info(info_of([*others, request("g", mask=True, grammar=grammar(2))]))
    assert part.return_sampling_masks == [True, True]
    assert [g is not None for g in part.grammars] == [False, True]
    part = native_info(info_of([*others, request("p", disallow, custom_params={"token_ids": [1]})]))
    assert [p and p["token_ids"] for p in part.custom_params] == [None, [1]]


def test_rows_without_a_grammar_beside_one_that_is_not_theirs_have_no_grammars(info_of):
    """SGLang looks for the first grammar of a list, and expects to find one."""
    info = info_of([request("bias", logit_bias={"3": 1.0}), request("g", grammar=grammar(2))])
    part = native_info(info, Routing(("logit_bias", None)))
    part.update_regex_vocab_mask()
    assert part.grammar_mask is None


def test_greedy_rows_are_an_all_greedy_batch_unless_their_logprobs_are_asked_for(info_of):
    """All greedy, SGLang takes logprobs at temperature 1; beside a sampled row, at the row's own."""
    requests = [request("sampled"), request("greedy", mask=True, temperature=0.5, top_k=1)]
    assert native_info(info_of(requests)).is_all_greedy
    assert not native_info(info_of(requests), return_logprob=True).is_all_greedy
    assert native_info(info_of(requests[1:]), return_logprob=True).is_all_greedy


def test_sampling_masks_reach_their_requests(runners, head, info_of, hidden):
    states = hidden(4)
    requests = [
        request("plain", **GREEDY),
        request("masked", mask=True, top_k=1),
        request("bias", temperature=0.7, logit_bias={"17": 300.0}),
        request("masked too", mask=True, top_k=3, temperature=1.0),
    ]
    outputs = []
    for runner, logits in ((runners[0], head.lazy(states)), (runners[1], head.logits(states))):
        outputs.append(runner.sample(logits, info_of(requests))[1])
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
    "requests, shape", [([{}, GREEDY], None), ([{"top_k": 1, "mask": True}] * 2, (2, WIDTH))], ids=["none", "all"]
)
def test_a_batch_of_one_kind_is_not_cut(runners, head, info_of, hidden, requests, shape):
    info = info_of([request(str(place), **fields) for place, fields in enumerate(requests)])
    _, output = runners[0].sample(head.lazy(hidden(2)), info)
    assert [tuple(each.shape) for each in head.computed] == ([] if shape is None else [shape])
    batch = batch_of(info)
    assert all(routing.native_rows is None for routing in (batch.fused, *batch.routings.values()))
    assert not hasattr(output, PREPROCESS_ATTRIBUTE), "done, or not needed"


def test_a_mixed_batch_counts_its_rows_under_what_served_them(runners, head, disallow, info_of, hidden):
    info = info_of(mixed(head, hidden(ROWS), disallow))
    for _ in range(2):
        runners[0].sample(head.lazy(hidden(ROWS)), info)
    metrics = runners[0].sampler.runtime.metrics
    metrics.flush()
    assert metrics.summary() == (
        "since the start: fused 20 rows in 2 batches; SGLang's sampler (custom_logit_processor) 10 rows in 2 batches"
    )


def test_after_a_failure_mixed_batches_are_sglangs_as_a_whole_with_one_warning(
    runners, head, disallow, info_of, hidden, monkeypatch, caplog
):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def broken(self, keep_indices, keep_indices_device):
        raise AttributeError("an SGLang that is not the one we know")

    monkeypatch.setattr(SamplingBatchInfo, "filter_batch", broken)
    states = hidden(ROWS)
    ours, stock = (info_of(mixed(head, states, disallow)) for _ in range(2))
    want, _ = runners[1].sample(head.logits(states), stock)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(2):
            got, output = runners[0].sample(head.lazy(states), ours)
            assert got.tolist() == want.tolist()
            assert set(output.customized_info["flashsample_path"]) == {"native:error"}
    assert len(caplog.records) == 1
    assert "takes the whole batch where a request in it needs it: AttributeError: an SGLang that is not" in caplog.text
    _, output = runners[0].sample(head.lazy(hidden(1)), info_of([request("plain")]))
    assert output.customized_info == {"flashsample_path": ["fused"]}


def test_a_lack_of_memory_beside_fused_rows_does_not_end_the_mixing_of_batches(
    runners, head, disallow, info_of, hidden, monkeypatch
):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def fails(self, keep_indices, keep_indices_device):
        raise torch.OutOfMemoryError("for a moment")

    info, states = info_of(mixed(head, hidden(ROWS), disallow)), hidden(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(SamplingBatchInfo, "filter_batch", fails)
        _, output = runners[0].sample(head.lazy(states), info)
    assert set(output.customized_info["flashsample_path"]) == {"native:out_of_memory"}
    assert runners[0].sampler.runtime.no_mixing_reason is None


def test_a_request_that_cannot_be_read_is_sglangs_as_it_asks_and_the_rows_beside_it_are_fused(
    runners, head, info_of, hidden
):
    def rows():
        asked = {"temperature": 0.7, "top_p": 1e-6}  # the largest logit, if its top-p is looked at
        return [request("a", sampling_seed=3), request("b", n="several", **asked), request("c", **GREEDY)]

    states = hidden(3)
    alone, _ = runners[0].sample(head.lazy(states[:1]), info_of(rows()[:1]))
    got, output = runners[0].sample(head.lazy(states), info_of(rows()))
    assert output.customized_info == {"flashsample_path": ["fused", "native:unreadable", "fused"]}
    assert got.tolist() == [alone.item(), *head.logits(states[1:]).argmax(-1).tolist()]


def test_a_grammar_of_an_unknown_kind_is_sglangs_from_the_next_step_on_with_one_warning(
    runners, head, info_of, hidden, caplog
):
    unknown = grammar(5, 9, 77)
    unknown.allocate_vocab_mask = lambda vocab_size, batch_size, device: torch.zeros(
        batch_size, vocab_size, dtype=torch.int8, device=device
    )
    unknown.apply_vocab_mask = lambda logits, vocab_mask: logits.masked_fill_(vocab_mask.bool(), float("-inf"))
    states = hidden(2)
    ours, stock = (info_of([request("plain", **GREEDY), request("g", grammar=unknown, **GREEDY)]) for _ in range(2))
    want, _ = runners[1].sample(head.logits(states), stock)
    paths = []
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            got, output = runners[0].sample(head.lazy(states), ours)
            assert got.tolist() == want.tolist()
            paths.append(output.customized_info["flashsample_path"])
    assert paths == [["native:error"] * 2, ["fused", "native:grammar"], ["fused", "native:grammar"]]
    (record,) = caplog.records
    assert (
        "until restart, requests with a grammar use SGLang's own sampler, which enforces it as ever: its mask is "
        in record.message
    )


@pytest.mark.parametrize("params", [GREEDY, {"temperature": 1.0}])
def test_a_grammar_that_is_complete_ends_an_answer_before_min_new_tokens(runners, head, info_of, hidden, params):
    """The stop token, id 1, is all that it allows; where it allows more, that is drawn."""
    requests = [request(str(ids), grammar=grammar(*ids), min_new_tokens=4, **params) for ids in ((1,), (1, 9))]
    got, output = runners[0].sample(head.lazy(hidden(2)), info_of(requests))
    assert got.tolist() == [1, 9] and output.customized_info["flashsample_path"] == ["fused", "fused"]


@pytest.mark.parametrize(
    "error, path", [(torch.OutOfMemoryError, "native:out_of_memory"), (RuntimeError, "native:error")]
)
def test_a_failure_that_is_no_grammars_leaves_grammars_fused(runners, head, info_of, hidden, script, error, path):
    script.error = error("a kernel failed")
    _, output = runners[0].sample(head.lazy(hidden(1)), info_of([request("g", grammar=grammar(5, 9), **GREEDY)]))
    assert output.customized_info["flashsample_path"] == [path]
    runtime = runners[0].sampler.runtime
    assert runtime.no_grammars_reason is None and (runtime.inactive_reason is None) == (path == "native:out_of_memory")


def test_an_observer_of_the_logits_gets_those_of_the_whole_batch(runners, head, hidden):
    states, output = hidden(2), types.SimpleNamespace()
    output.next_token_logits = head.lazy(states)
    original = lambda runner, output, info, observer: observer(output.next_token_logits)  # noqa: E731
    got = runners[0].hooks.preprocess_logits(original, None, output, object(), observer=lambda logits: logits.clone())
    assert torch.equal(got, head.logits(states))
    assert getattr(output, REASON_ATTRIBUTE) == "sampling_observer"


def test_prefill_only_logprobs_are_those_of_preprocessed_logits(runners, head, info_of, hidden):
    """No carrier should ever come here; if one does, its biases must not be lost."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner as SGLangs

    runner = runners[0]
    info = info_of([request("bias", logit_bias={"17": 300.0})])
    output = LogitsProcessorOutput(next_token_logits=head.lazy(hidden(1)))
    runner.hooks.preprocess_logits(SGLangs._preprocess_logits, runner, output, info)
    runner.sampler.compute_logprobs_only(output, info, [0], [[17]])
    assert math.isclose(output.next_token_token_ids_logprobs_val[0].item(), 0.0, abs_tol=1e-3)
