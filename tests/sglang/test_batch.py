"""One batch: the kinds of its rows through filters and merges, who serves each row and why, seeds, and edits. The
parameters of its requests: ``test_row_table.py``."""

from __future__ import annotations

import hashlib
import types
from typing import Any

import pytest
import torch
from head_states import CPU, gathered, make_batch, request

from sgl_flashsample.kernels.params import Edit, LogitEdits
from sgl_flashsample.sglang.arrivals import Arrivals
from sgl_flashsample.sglang.batch import (
    Batch,
    DrawKind,
    Part,
    Routing,
    batch_of,
    edits_of,
    edits_of_nodes,
    routing_of,
)
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.row_table import RowTable, native_reason

GREEDY, TEMPERED = {"top_k": 1}, {"top_k": 1, "temperature": 0.5}


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, None),
        ({"temperature": 0.2, "top_k": 2, "top_p": 0.99, "min_p": 0.01}, None),
        ({"top_k": 1, "top_p": 0.5, "min_p": 0.1}, None),
        ({"frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_new_tokens": 1, "logit_bias": {}}, None),
        ({"beam_width": None, "sampling_seed": 3, "n": 4}, None),
        ({"processor": "x"}, "custom_logit_processor"),
        ({"mask": True}, "sampling_mask"),
        ({"beam_width": 2}, "beam_search"),
        ({"processor": "x", "mask": True, "beam_width": 2}, "custom_logit_processor"),
    ],
)
def test_each_feature_that_is_not_fused_has_its_reason(fields, reason):
    assert native_reason(request(**fields), custom_processors=True) == reason
    unprocessed = native_reason(request(**fields | {"processor": None}), custom_processors=True)
    assert native_reason(request(**fields), custom_processors=False) == unprocessed, (
        "where the server runs no processors"
    )


def distinct_rows(start: int, num_rows: int) -> list[dict]:
    """Rows that share no parameter."""
    return [
        {"temperature": n / 8, "top_k": 10 + n, "top_p": 1 - n / 32, "min_p": n / 64, "sampling_seed": 100 + n}
        | {"mask": n % 2 == 1, "logit_bias": {} if n % 3 == 0 else None}
        for n in range(start, start + num_rows)
    ]


def test_filters_and_merges_keep_the_kind_of_every_row():
    rows = distinct_rows(1, 6)
    first, second = make_batch(*rows[:4]), make_batch(*rows[4:])
    merged = first.keep([2, 0]).followed_by(second.keep([1]))
    want = make_batch(rows[2], rows[0], rows[5])
    assert merged.kinds == want.kinds and merged.rows == want.rows and len(merged) == 3
    assert [merged.row(place) for place in range(3)] == list(want.rows)
    assert merged.table is first.table
    assert first.kinds == make_batch(*rows[:4]).kinds, "the batch of a forward under way does not change"
    assert first.keep([]).rows == ()


def scheduled(rows: list[dict], slots: list[int]) -> types.SimpleNamespace:
    """A ``ScheduleBatch`` of SGLang's."""
    requests = [request(**row) for row in rows]
    return types.SimpleNamespace(reqs=requests, device=CPU, req_pool_indices_cpu=torch.tensor(slots))


def test_our_batch_follows_sglangs_through_filters_merges_and_copies(runtime):
    hooks, rows = StepHooks(runtime), distinct_rows(1, 5)
    info, other, forward = (types.SimpleNamespace() for _ in range(3))
    hooks.from_schedule_batch(None, info, scheduled(rows[:3], [4, 2, 9]), 600)
    hooks.from_schedule_batch(None, other, scheduled(rows[3:], [1, 7]), 600)
    hooks.filter_batch(None, info, [2, 0], torch.tensor([2, 0]))
    hooks.merge_batch(None, info, other)
    hooks.copy_for_forward(forward, info)
    batch, want = batch_of(forward), make_batch(rows[2], rows[0], *rows[3:])
    assert batch is batch_of(info) and batch.kinds == want.kinds
    got = gathered(batch, [9, 4, 1, 7])
    assert all(map(torch.equal, got.tensors, gathered(want).tensors))
    hooks.merge_batch(None, info, types.SimpleNamespace())
    assert batch_of(info) is None, "of some of its rows nothing is known"


def test_a_row_knows_what_sglangs_sampler_would_need_for_it_alone():
    rows = make_batch({}, {"top_p": 0.9}, {"top_k": 5}, GREEDY, {"min_p": 0.1}).rows
    top_p, top_k, min_p = (True, False, False), (False, True, False), (False, False, True)
    assert [row.needs for row in rows] == [(False,) * 3, top_p, top_k, top_k, min_p]


@pytest.mark.parametrize(
    "fields, edits",
    [
        ({}, Edit(0)),
        ({"frequency_penalty": 0.1}, Edit.ADDITIVE),
        ({"presence_penalty": -0.1}, Edit.ADDITIVE),
        ({"min_new_tokens": 1}, Edit.ADDITIVE),
        ({"repetition_penalty": 1.1}, Edit.SCALING),
        ({"logit_bias": {}}, Edit.BIAS),
        (
            {"logit_bias": {"1": 2.0}, "repetition_penalty": 0.9, "presence_penalty": 1.0},
            Edit.ADDITIVE | Edit.SCALING | Edit.BIAS,
        ),
    ],
)
def test_a_row_knows_what_sglang_changes_in_its_logits(fields, edits):
    assert make_batch(fields).rows[0].edits == edits


def test_a_grammar_is_an_edit_of_its_row():
    batch = make_batch({}, {"grammar": object(), "logit_bias": {}})
    assert [row.edits for row in batch.rows] == [Edit(0), Edit.BIAS | Edit.MASK] and batch.num_masked == 1


def test_a_truncation_ends_with_the_last_row_that_has_one():
    batch = make_batch({}, {"top_p": 0.5, "top_k": 7}, {"min_p": 0.25}, GREEDY | {"top_p": 0.5})
    assert batch.num_truncated == 2 and batch.mix.draw.truncated
    rest = batch.keep([0, 3])
    assert rest.num_truncated == 0 and not rest.mix.draw.truncated, "a greedy row has none"


@pytest.mark.parametrize(
    "rows, max_top_k",
    [
        ([{"top_k": 5}, {"top_k": 33}, {}, GREEDY], 64),
        ([{"top_k": 64}, {"top_k": 65, "top_p": 0.5}], 128),
        ([{"top_k": 5}, {"top_k": 129}], None),
        ([{"top_k": 5}, {"top_p": 0.5}], None),
        ([{"top_k": 5}, {"top_k": 64.5}], 64),  # SGLang refuses no fraction; one must not end our service
    ],
)
def test_the_largest_top_k_is_known_where_every_truncated_row_has_a_small_one(rows, max_top_k):
    """Rounded up to a bound: batches that differ below that share CUDA graphs."""
    assert make_batch(*rows).mix.draw.max_top_k == max_top_k


@pytest.mark.parametrize(
    "rows, all_greedy, distribution_only",
    [
        ([GREEDY, TEMPERED], True, False),
        ([GREEDY, {}], False, False),
        ([{"top_k": 5}, {"top_p": 0.5}], False, True),
        ([{"top_k": 5}, {"top_p": 0.5}, {}], False, False),
        ([{"top_k": 5}, {"top_p": 0.5, "sampling_seed": 0}], False, False),
        ([{"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}], False, False),
        ([{"top_k": 5}, {"top_k": 1}], False, False),
    ],
)
def test_what_holds_for_the_whole_batch(rows, all_greedy, distribution_only):
    batch = make_batch(*rows)
    assert (batch.mix.draw.all_greedy, batch.mix.draw.distribution_only) == (all_greedy, distribution_only)
    assert not batch.mix.draw_of_nodes.distribution_only, "a draft is accepted where it equals the draw"
    turned = batch.keep([*range(len(rows))][::-1] * 3)
    assert turned.mix is batch.mix, "it depends on the kinds of rows, not on their order or number"


def test_a_verification_of_drafts_ignores_min_p():
    batch = make_batch({"min_p": 0.1}, {}, GREEDY)
    assert batch.mix.draw == DrawKind(True, None, False, False)
    assert batch.mix.draw_of_nodes == DrawKind(False, None, False, False)
    both = make_batch({"min_p": 0.1}, {"top_k": 5, "min_p": 0.1})
    assert both.mix.draw_of_nodes == DrawKind(True, 64, False, False)
    assert make_batch(GREEDY, GREEDY).mix.draw_of_nodes == DrawKind(False, None, True, False)


def test_a_tempered_greedy_row_needs_sglangs_logprob_only_beside_sampled_rows():
    assert make_batch(TEMPERED, TEMPERED).logprob_reasons == (None, None)
    assert make_batch(TEMPERED, {}).logprob_reasons == ("greedy_logprob_at_temperature", None)
    assert make_batch(GREEDY, {}).logprob_reasons == (None, None)


# Seeds.


def seeds_of(arrivals: Arrivals, server_seed: int = 1, **params) -> list[int]:
    """The seeds of one request with n samples: SGLang makes n requests of it."""
    return [arrivals.seed_of(request(**params), server_seed) for _ in range(params["n"])]


def seeds_drawn_with(*rows: dict) -> list[int]:
    return gathered(make_batch(*rows)).seed.tolist()


def samples_of(arrivals: Arrivals, *requests: Any) -> list[int]:
    return [arrivals.of(each).sample for each in requests]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), 2**63, 2**70, -(2**63) - 1])
def test_a_request_draws_with_the_seed_that_it_gave_cut_to_64_bits(seed):
    assert seeds_drawn_with({"sampling_seed": seed}) == [(seed + 2**63) % 2**64 - 2**63]


@pytest.mark.parametrize("seed", ["x", "7", 7.0, float("nan"), [7], {"seed": 7}], ids=str)
def test_what_is_no_integer_is_no_seed(seed):
    """SGLang 0.5.17 lets it through."""
    assert seeds_of(Arrivals(), sampling_seed=seed, n=2) == seeds_of(Arrivals(), n=2)
    assert seeds_drawn_with({"sampling_seed": seed}) == seeds_drawn_with({})
    assert not make_batch({"sampling_seed": seed}).rows[0].seeded


def test_requests_without_a_seed_have_seeds_of_their_own_whatever_their_ids():
    arrivals = [Arrivals(), Arrivals(), Arrivals(rank=1)]
    seeds = [
        each.seed_of(request("task 12"), server)
        for each, server in zip(arrivals, (1, 2, 1), strict=True)
        for _ in "abc"
    ]
    assert len(set(seeds)) == 9 and all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_seed_of_a_request_without_one_is_the_hash_of_the_server_its_rank_and_its_number():
    arrivals = Arrivals(rank=3)
    for number in range(200):
        text = f"server 5, rank 3, request {number}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        assert arrivals.seed_of(request(), 5) == int.from_bytes(digest, "little", signed=True)


def test_the_samples_of_a_request_without_a_seed_have_seeds_of_their_own():
    arrivals = Arrivals()
    assert len({*seeds_of(arrivals, n=3), *seeds_of(arrivals, n=3)}) == 6


def test_a_server_may_give_requests_without_a_seed_one_seed_as_if_it_were_given_and_samples_differ():
    arrivals = Arrivals(default_seed=42)
    assert seeds_of(arrivals, n=3) == seeds_of(Arrivals(), sampling_seed=42, n=3)
    assert seeds_of(arrivals, n=1) == seeds_of(arrivals, n=1) == [42]
    assert seeds_of(arrivals, sampling_seed=7, n=1) == [7]


def test_a_request_without_a_seed_draws_with_the_same_noise_when_it_is_scheduled_again():
    arrivals, first, second = Arrivals(), request(), request()
    seeds = [arrivals.seed_of(each, 1) for each in (first, second, first)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_any_text_may_be_an_id():
    """``sgl.Engine`` takes half of a surrogate pair too, and UTF-8 has no bytes for it."""
    assert make_batch({"rid": "\ud800"}).rows[0].reason is None


def test_a_request_that_cannot_be_read_is_counted():
    """A rank that can read it counts on alike."""
    arrivals, same = Arrivals(), Arrivals()
    Batch.of_requests([types.SimpleNamespace(), request()], [1, 2], RowTable(CPU), 1, True, arrivals)
    Batch.of_requests([request(), request()], [1, 2], RowTable(CPU), 1, True, same)
    assert arrivals.of(request()).number == same.of(request()).number


def test_the_samples_of_a_seeded_request_are_the_same_again_and_differ_from_each_other():
    arrivals = Arrivals()
    first = seeds_of(arrivals, sampling_seed=5, n=3)
    assert seeds_of(arrivals, sampling_seed=5, n=3) == first and len(set(first)) == 3
    assert first[0] == 5, "the first sample is the answer of a request with n = 1"
    assert not set(seeds_of(arrivals, sampling_seed=6, n=3)) & set(first)
    assert seeds_of(Arrivals(), 2, sampling_seed=5, n=3) == first, "also by another server"


def test_samples_on_other_ranks_of_dp_attention_are_others():
    """The requests of one call are divided over these ranks."""
    ranks = [seeds_of(Arrivals(rank), sampling_seed=5, n=3) for rank in range(3)]
    assert ranks[0] == seeds_of(Arrivals(), sampling_seed=5, n=3)
    assert len({seed for seeds in ranks for seed in seeds}) == 9
    alone = {tuple(seeds_of(Arrivals(rank), sampling_seed=5, n=1)) for rank in range(3)}
    assert len(alone) == 1


def test_samples_of_several_requests_may_come_in_turns():
    """Also of one request that two clients have sent, where their tokenizer processes are two."""
    arrivals = Arrivals()
    kinds = [
        {"prompt": (1, 2)},
        {"prompt": (1, 3)},
        {"prompt": (1, 2), "sampling_seed": 8},
        {"prompt": (1, 2), "sender": "tokenizer 2"},
    ]
    turns = [samples_of(arrivals, *(request(**{"sampling_seed": 5, "n": 2} | kind) for kind in kinds)) for _ in "abcd"]
    assert turns == [[0] * 4, [1] * 4, [0] * 4, [1] * 4]


def test_a_sample_keeps_its_index_when_it_is_scheduled_again():
    first, second = request(sampling_seed=5, n=2), request(sampling_seed=5, n=2)
    assert samples_of(Arrivals(), first, first, second, first, second) == [0, 0, 1, 0, 1]


def test_what_has_no_samples_of_its_own_takes_no_index():
    """The request with which SGLang fills the prefix cache before the n samples of a prompt draws no token."""
    arrivals = Arrivals()
    none = (request(n=2), request(sampling_seed=5), request(sampling_seed=5, n=2, max_new_tokens=0))
    assert samples_of(arrivals, *none) == [0] * 3
    assert seeds_of(arrivals, sampling_seed=5, n=2)[0] == 5


@pytest.mark.parametrize("n", [0, -3, 0.3, float("nan"), True])
def test_a_number_of_samples_that_is_not_above_one_is_one(n):
    """SGLang answers such a request once: with the same seed, the same tokens each time."""
    assert samples_of(Arrivals(), *(request(sampling_seed=5, n=n) for _ in range(4))) == [0] * 4


def test_only_so_many_prompts_are_remembered():
    arrivals = Arrivals()
    arrivals.MAX_PROMPTS = 2
    prompts = ((1,), (2,), (3,), (3,), (1,))
    requests = (request(prompt=prompt, sampling_seed=5, n=2) for prompt in prompts)
    assert samples_of(arrivals, *requests) == [0, 0, 0, 1, 0]


# Routing.

NO_LOGPROBS = (False, None, None, False)


def route(batch: Batch, grammars=None, logprobs=NO_LOGPROBS, fuse_grammars: bool = True, **facts: Any) -> Routing:
    return routing_of(batch, types.SimpleNamespace(grammars=grammars), *logprobs, fuse_grammars, **facts)


BEAM = {"beam_width": 2}
AT_TEMPERATURE = "greedy_logprob_at_temperature"


@pytest.mark.parametrize(
    "rows, grammars, logprobs, reasons",
    [
        ([{}, GREEDY], None, NO_LOGPROBS, (None, None)),
        ([{}, GREEDY], [None, object()], NO_LOGPROBS, (None, None)),
        ([{}, BEAM], None, NO_LOGPROBS, (None, "beam_search")),
        ([BEAM, {}], [object(), object()], NO_LOGPROBS, ("beam_search", None)),
        ([TEMPERED, {}], None, (False, [0, 2], [None, [1]], True), (None, None)),  # nobody asked for logprobs
        ([TEMPERED, {}], None, (True, [0, 0], [None, None], False), (AT_TEMPERATURE, None)),
        ([GREEDY, {}], None, (True, [0, 0], [None, None], False), (None, None)),
        ([TEMPERED, TEMPERED], None, (True, None, None, False), (None, None)),
        ([TEMPERED, {}], None, (True, [0, 129], [None, None], False), (AT_TEMPERATURE, "top_logprobs")),
        ([TEMPERED, {}], None, (True, [0, 0], [None, [1] * 257], False), (AT_TEMPERATURE, "token_ids_logprobs")),
        ([BEAM, {}], None, (True, None, None, True), ("beam_search", None)),
    ],
)
def test_each_row_is_fused_unless_something_stands_against_that_row(rows, grammars, logprobs, reasons):
    assert route(make_batch(*rows), grammars, logprobs).reasons == reasons


@pytest.mark.parametrize(
    "rows, logprobs, reasons",
    [
        ([{}, GREEDY], (True, [5, 128], [[1, 2], None], False), (None, None)),
        ([{}, GREEDY], (True, [129, 5], [None, [1]], False), ("top_logprobs", None)),
        ([{}, GREEDY], (True, [5, 5], [None, list(range(257))], False), (None, "token_ids_logprobs")),
        ([{}, GREEDY], (True, [0, 5], [list(range(256)), []], True), (None, None)),
        ([TEMPERED, {}], (True, [5, 5], None, False), (None, None)),
        ([TEMPERED, {}], (True, [5, 5], None, True), (None, None)),
        ([BEAM, {}], (True, [5, 5], None, False), ("beam_search", None)),
    ],
)
def test_rows_with_logprobs_beside_those_of_their_tokens_are_fused_up_to_a_number(rows, logprobs, reasons):
    assert route(make_batch(*rows), None, logprobs, vocab_size=600, other_temperatures=True).reasons == reasons


def test_a_routing_with_other_temperatures_is_not_that_of_a_head_without():
    """A server with drafts asks both of one batch: its prefill has these logprobs, its verifications do not."""
    batch, asked = make_batch(BEAM, TEMPERED, {}), (True, None, None, False)
    assert route(batch, None, asked, other_temperatures=True).reasons == ("beam_search", None, None)
    assert route(batch, None, asked).reasons == ("beam_search", AT_TEMPERATURE, None)


def test_the_likeliest_of_more_ids_than_there_are_are_sglangs():
    asked = True, [101, 100], None, False
    assert route(make_batch({}, GREEDY), None, asked, vocab_size=100).reasons == ("top_logprobs", None)


def test_rows_with_a_grammar_are_sglangs_once_grammars_cannot_be_fused():
    batch = make_batch(BEAM, {})
    assert route(batch, [object(), object()], fuse_grammars=False).reasons == ("beam_search", "grammar")
    assert route(batch, [object(), None], fuse_grammars=False).reasons == ("beam_search", None)


def test_a_batch_that_stays_as_it_is_has_one_routing_for_all_its_steps():
    many = [1] * 257
    batch, logprobs = make_batch({}, {}), (True, [0, 0], [None, many], False)
    first = route(batch, [None, object()], logprobs)
    assert route(batch, None, (True, [0, 0], [None, [2] * 257], False)) is first
    others = [
        route(batch, [object(), None], logprobs, fuse_grammars=False),
        route(batch, [None, object()], logprobs, fuse_grammars=False),
        route(batch, [None, object()], (True, None, None, False), fuse_grammars=False),
        route(batch, [None, object()], fuse_grammars=False),
        route(batch, None, (True, [0, 129], [None, many], False)),
        route(batch, None, (True, [0, 129], [None, None], False)),
        route(make_batch({}, {}), None, logprobs),
        route(batch),
    ]
    assert len({id(each) for each in [first, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    "grammars, logprobs",
    [
        (None, NO_LOGPROBS),
        ([None, object()], (True, [0, 0], [None, None], False)),
        (None, (True, None, None, False)),
        (None, (False, [0, 2], [None, [1]], True)),
    ],
)
def test_a_step_in_which_every_row_is_fused_is_routed_without_a_look_at_each(monkeypatch, grammars, logprobs):
    batch = make_batch({}, {"top_p": 0.5})
    batch.mix.is_native, batch.mix.has_other_logprobs  # known of these kinds  # noqa: B018
    monkeypatch.setattr(Batch, "rows", property(lambda batch: 1 / 0))
    monkeypatch.setattr(Batch, "row", lambda batch, place: 1 / 0)
    routing = route(batch, grammars, logprobs)
    assert routing is batch.fused is route(batch)
    assert not routing.native and not routing.all_native and routing.counts == {("fused", ""): 2}
    assert routing.part(batch) == Part(Edit(0), 0, 1)


def test_a_routing_of_fused_rows_is_that_which_a_look_at_each_row_would_make():
    for num_rows in (0, 1, 5):
        quick, slow = Routing.all_fused(num_rows), Routing((None,) * num_rows)
        assert (quick.native, quick.all_native, quick.labels) == (slow.native, slow.all_native, slow.labels)
        assert dict(quick.counts) | {("fused", ""): num_rows} == dict(slow.counts) | {("fused", ""): num_rows}


def test_a_routing_knows_what_its_fused_rows_have():
    batch = make_batch({"top_p": 0.5} | PENALISED, BIASED | BEAM | {"top_k": 4}, {"grammar": object()}, GREEDY)
    assert batch.fused.part(batch) == Part(Edit.ADDITIVE | Edit.BIAS | Edit.MASK, 1, 2)
    assert route(batch).part(batch) == Part(Edit.ADDITIVE | Edit.MASK, 1, 1), "without the beam search"


def test_a_routing_names_what_serves_each_row_and_counts_it():
    routing = Routing(("grammar", None, "beam_search", None, "grammar"))
    assert routing.native == (0, 2, 4) and not routing.all_native
    assert routing.labels == ["native:grammar", "fused", "native:beam_search", "fused", "native:grammar"]
    assert routing.counts == {("fused", ""): 2, ("native", "grammar"): 2, ("native", "beam_search"): 1}
    whole = Routing.whole("inactive", 3)
    assert whole.all_native and whole.counts == {("native", "inactive"): 3}


# Edits.


class Info:
    """A stand-in for SamplingBatchInfo, with the attributes that edits read. Penalties are those of the current
    step."""

    def __init__(self, num_rows: int, grammars=None, *, overlap: bool = False, mask: torch.Tensor | None = None):
        self.grammars, self.grammar_mask, self.mask = grammars, None, mask
        self.logit_bias = torch.zeros(num_rows, 8)
        self.acc_additive_penalties = self.acc_scaling_penalties = None
        self.penalizer_orchestrator = None if overlap else types.SimpleNamespace(is_required=True)
        if overlap:
            self.update_penalties()

    def update_penalties(self):
        self.acc_additive_penalties, self.acc_scaling_penalties = torch.zeros(2, 8), torch.ones(2, 8)

    def update_regex_vocab_mask(self):
        self.masked = [grammar is not None for grammar in self.grammars]
        mask = torch.zeros(len(self.grammars), 1, dtype=torch.int32) if self.mask is None else self.mask
        self.grammar_mask = types.SimpleNamespace(vocab_mask=mask)


PENALISED, BIASED = {"frequency_penalty": 1.0}, {"logit_bias": {"3": 1.0}}


def flags_of(batch: Batch, edits: LogitEdits) -> list[int]:
    """The flags that the kernels see."""
    rows = gathered(batch, edits=edits.given, nodes=edits.repeats).edits if edits.rows is None else edits.rows
    return rows.tolist()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_edits_are_given_and_flagged_where_a_fused_row_has_them(overlap):
    grammar, info = object(), Info(2, [None, None], overlap=overlap)
    for rows, grammars, given, flags in (
        ([{}, GREEDY], [None, None], Edit(0), None),
        ([{}, PENALISED], [None, None], Edit.ADDITIVE | Edit.SCALING, [0, Edit.ADDITIVE]),
        ([BIASED, {}], [None, None], Edit.BIAS, [Edit.BIAS, 0]),
        ([{}, BIASED], [None, grammar], Edit.MASK | Edit.BIAS, [0, Edit.MASK | Edit.BIAS]),
        ([PENALISED | BEAM, BIASED], [grammar, None], Edit.BIAS, [0, Edit.BIAS]),
    ):
        rows = [row | {"grammar": grammar} for row, grammar in zip(rows, grammars, strict=True)]
        batch, info.grammars = make_batch(*rows), grammars
        edits = edits_of(batch, route(batch, grammars), info, CPU)
        assert (edits.given if edits is not None else Edit(0)) == given
        if edits is not None:
            assert edits.rows is None, "the table has the flags of requests"
            served = [reason is None for reason in route(batch, grammars).reasons]
            seen = [flag * fused for flag, fused in zip(flags_of(batch, edits), served, strict=True)]
            assert seen == [int(flag) for flag in flags]
    assert info.grammar_mask is None and (overlap or info.acc_additive_penalties is None), "the whole batch's stay"


@pytest.mark.parametrize(
    "scheduled, now, given, flags",
    [
        ([True, False], [True, False], Edit.MASK, None),
        ([True, False], [False, False], Edit(0), None),
        ([True, True], [True, False], Edit.MASK, [Edit.MASK, 0]),
        ([False, False], [True, False], Edit.MASK, [Edit.MASK, 0]),
        ([True, False], [True, True], Edit.MASK, [Edit.MASK, Edit.MASK]),
    ],
)
def test_a_grammar_that_came_or_went_after_its_request_was_scheduled_counts(scheduled, now, given, flags):
    grammar = object()
    batch = make_batch(*({"grammar": grammar if has else None} for has in scheduled))
    grammars = [grammar if has else None for has in now]
    info = Info(2, grammars)
    edits = edits_of(batch, route(batch, grammars), info, CPU)
    assert (edits.given if edits is not None else Edit(0)) == given
    if given:
        want = [Edit.MASK if has else Edit(0) for has in now]
        assert flags_of(batch, edits) == want and info.grammar_mask is None
        assert (edits.rows is None) == (flags is None), "the host says them only where those of the table do not hold"
        assert edits_of(batch, route(batch, grammars), info, CPU).rows is edits.rows, "made once for all steps"


@pytest.mark.parametrize("mask", [torch.zeros(2, 1), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2).int()])
def test_a_grammar_whose_mask_is_in_no_known_form_is_refused(mask):
    batch, grammars = make_batch({}, {}), [None, object()]
    with pytest.raises(ValueError, match=r"its mask is .*; expected"):
        edits_of(batch, route(batch, grammars), Info(2, grammars, mask=mask), CPU)


# A grammar and min_new_tokens.

STOP, KEEPS_GOING = 1, {"min_new_tokens": 4}
NO_STOP = torch.tensor([[0.0, float("-inf"), 0, 0, 0, 0, 0, 0]])  # what min_new_tokens adds


def bools(*allowed: int) -> torch.Tensor:
    return torch.tensor([[place not in allowed for place in range(8)]])


def words(*allowed: int) -> torch.Tensor:
    return torch.tensor([[sum(1 << place for place in allowed)]], dtype=torch.int32)


def contested_flags(masks: list[torch.Tensor], additive: torch.Tensor, *rows: dict) -> list[int]:
    """The flags of rows that all have a grammar."""
    grammars = [object()] * len(rows)
    batch = make_batch(*(row | {"grammar": grammars[0]} for row in rows))
    info = Info(len(rows), grammars, overlap=True, mask=torch.cat(masks))
    info.acc_additive_penalties = additive
    return flags_of(batch, edits_of(batch, route(batch, grammars), info, CPU))


@pytest.mark.parametrize("allowing", [bools, words])
def test_a_grammar_that_allows_only_stop_tokens_wins_over_min_new_tokens(allowing):
    both = Edit.ADDITIVE | Edit.MASK
    masks, additive = [allowing(STOP), allowing(STOP, 5), allowing(STOP)], NO_STOP.repeat(3, 1)
    assert contested_flags(masks, additive, KEEPS_GOING, KEEPS_GOING, {}) == [Edit.MASK, both, Edit.MASK]
    additive[0] = 0.0  # enough tokens
    assert contested_flags(masks, additive, KEEPS_GOING, KEEPS_GOING, {}) == [both, both, Edit.MASK]


def test_ids_beyond_the_words_of_a_mask_are_allowed_and_may_go_on():
    additive = torch.zeros(1, 40)
    additive[0, STOP] = float("-inf")
    assert contested_flags([words(STOP)], additive, KEEPS_GOING) == [Edit.ADDITIVE | Edit.MASK]
    additive[0, 32:] = float("-inf")
    assert contested_flags([words(STOP)], additive, KEEPS_GOING) == [Edit.MASK]


def test_flags_of_contested_rows_follow_the_steps_at_one_address():
    grammars = [object(), None]
    batch = make_batch(KEEPS_GOING | {"grammar": grammars[0]}, {})
    routing, info = route(batch, grammars), Info(2, grammars, overlap=True)
    info.acc_additive_penalties = NO_STOP.repeat(2, 1)
    seen = []
    for mask in (words(STOP), words(STOP, 3)):
        info.mask = torch.cat([mask, words()])
        rows = edits_of(batch, routing, info, CPU).rows
        seen.append((rows.data_ptr(), rows.tolist()))
    assert [flags for _, flags in seen] == [[Edit.MASK, 0], [Edit.ADDITIVE | Edit.MASK, 0]]
    assert len({address for address, _ in seen}) == 1


def test_a_grammar_wins_at_the_nodes_of_drafts_where_it_is_complete():
    grammars = [None, object()]
    batch = make_batch({}, KEEPS_GOING | {"grammar": grammars[1]})
    routing, info = route(batch, grammars), Info(2, grammars, overlap=True)
    masks = types.SimpleNamespace(vocab_mask=torch.cat([words(0), words(0), words(STOP), words(STOP, 3)]))
    both = Edit.ADDITIVE | Edit.MASK
    info.acc_additive_penalties = None
    edits = edits_of_nodes(batch, routing, info, masks, 2, CPU)
    assert edits.rows is None and flags_of(batch, edits) == [0, 0, Edit.MASK, Edit.MASK]
    info.acc_additive_penalties = torch.cat([torch.zeros(1, 8), NO_STOP])
    edits = edits_of_nodes(batch, routing, info, masks, 2, CPU)
    assert edits.rows.tolist() == [0, 0, Edit.MASK, both]
