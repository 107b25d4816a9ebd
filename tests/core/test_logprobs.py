"""Logprobs of the likeliest ids and of given ids, behind ``Head``: the reference's, by kernels and in host memory. No
token is another because of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from core_examples import ROWS, VOCAB, example
from kernel_cases import DTYPES, KINDS, Case, make_case, pack_bits

from sgl_flashsample import (
    Head,
    LMHead,
    LogprobOutput,
    Logprobs,
    Sampler,
    SamplingParams,
    WantedLogprobs,
    paths,
    sample,
)
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB
from sgl_flashsample.kernels.merge_ranks import merge_records, no_record, pack_record
from sgl_flashsample.kernels.params import BatchParams, LogitEdits, SampleOutput
from sgl_flashsample.kernels.reference import gather_logprobs_ref, top_logprobs_ref
from sgl_flashsample.kernels.workspace import Workspace
from sgl_flashsample.logprobs import merge_parts
from sgl_flashsample.tables import lookup

INF = float("inf")


@pytest.fixture(params=["kernels", "host memory"])
def place(request, device, monkeypatch) -> torch.device:
    """The device of the batches: that of the kernels, or the CPU without them."""
    if request.param == "kernels":
        return device
    pytest.importorskip("numba")
    for module in ("head", "logprobs", "paths"):
        monkeypatch.setattr(f"sgl_flashsample.{module}.draws_in_host_memory", lambda device: True)
    return torch.device("cpu")


@pytest.fixture
def merging(place, device) -> None:
    """Kernels merge what ranks have drawn, also where they draw in host memory."""
    if place.type != device.type:
        pytest.skip("no kernel reads host memory here")


def some_ids(num_rows: int, num_ids: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Given ids, the first one twice, the last one unused."""
    ids = torch.randint(vocab, (num_rows, num_ids), generator=torch.Generator().manual_seed(num_ids))
    ids[:, 1], ids[:, -1] = ids[:, 0], -1
    return ids.to(device)


def assert_close(got: torch.Tensor, want: torch.Tensor, slack: float = 0.0) -> None:
    """Within a few roundings of float32; NaN where NaN is expected."""
    assert got.dtype is torch.float32 and not (got > 0).any()
    near = (got.double() - want).abs() <= 2e-5 + 4e-7 * want.abs() + slack
    assert (near | (got.isnan() & want.isnan())).all()


def assert_reference(
    found: Logprobs,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: WantedLogprobs,
    temperature: torch.Tensor | None = None,
    slack: float = 0.0,
) -> None:
    """``found`` is the reference's of ``[B, V]`` float64 logits after their edits; empty behind the count of a row, and
    behind its last id."""
    assert_close(found.of_tokens, gather_logprobs_ref(logits, tokens[:, None], temperature)[:, 0], slack)
    assert (found.of_ids is None) == (wanted.token_ids is None)
    if wanted.token_ids is not None:
        ids = wanted.token_ids.expand(len(logits), -1)
        assert_close(found.of_ids, gather_logprobs_ref(logits, ids, temperature), slack)
    assert (found.top is None) == (wanted.top == 0)
    if found.top is None:
        return
    known = min(wanted.top, logits.shape[1])
    ids, values = top_logprobs_ref(logits, known, temperature)
    counts = wanted.counts.tolist() if wanted.counts is not None else [wanted.top] * len(logits)
    for row, count in enumerate(counts):
        count = max(0, min(count, known))
        assert torch.equal(found.top.token_ids[row, :count], ids[row, :count])
        assert_close(found.top.logprobs[row, :count], values[row, :count], slack)
        assert set(found.top.token_ids[row, count:].tolist()) <= {-1}
        assert set(found.top.logprobs[row, count:].tolist()) <= {LOWEST_LOGPROB}
        assert set(found.top.logits[row, count:].tolist()) <= {-INF}


def assert_drawn(case: Case, wanted: WantedLogprobs, slack: float = 0.0) -> None:
    """A draw with these logprobs has the tokens of one without, and the reference's logprobs."""
    head = Head(case.head)
    drawn, found = head.draw_with_logprobs(case.hidden, case.params, wanted)
    path = "logits" if case.head.gemm_gives_logits else None
    plain = head.draw(case.hidden, case.params, path=path, return_logprob=True)
    assert torch.equal(drawn.token_ids, plain.token_ids) and torch.equal(drawn.scores, plain.scores)
    temperature = None if wanted.original else case.params.temperature
    temperature = temperature if wanted.temperature is None else wanted.temperature
    assert_reference(found, case.edited, drawn.token_ids, wanted, temperature, slack)
    if not wanted.are_of_draw:
        assert drawn.logprobs is drawn.log_mass is None
    else:
        # Two paths may round a sum otherwise.
        close = {"rtol": 0, "atol": 0} if path == "logits" else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(drawn.log_mass.sum(-1), plain.log_mass.sum(-1), **close)
        torch.testing.assert_close(found.of_tokens, drawn.logprobs, rtol=1e-6, atol=1e-6)
        assert found.top is None or found.top.log_mass is drawn.log_mass


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_references_and_tokens_those_of_a_draw_without_them(place, dtype, kind, original):
    for num_rows, vocab, k in ((1, 601, 5), (7, 515, 20)):
        case = make_case(num_rows, vocab, place, kind, DTYPES[dtype], padding=5)
        counts = torch.tensor([3, 0, k, -1, 1, k, 2][:num_rows], dtype=torch.int32, device=place)
        wanted = WantedLogprobs(k, counts, some_ids(num_rows, 9, vocab, place), original)
        assert_drawn(case, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_may_have_other_temperatures_than_the_draw(place, kind):
    case = make_case(5, 515, place, kind)
    temperature = torch.tensor([0.5, 3.0, 0.0, 1.0, 0.7], device=place)  # 0: the row counts as one at 1
    for wanted in (WantedLogprobs(), WantedLogprobs(4, token_ids=some_ids(5, 9, 515, place))):
        asked = wanted._replace(temperature=temperature)
        assert_drawn(case, asked)
        drawn, _ = Head(case.head).draw_from_logits_with_logprobs(case.hidden @ case.head.weight.T, case.params, asked)
        assert drawn.logprobs is drawn.log_mass is None, "those of the draw are at its own temperatures"


@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
def test_an_empty_list_of_ids_has_no_logprobs(place, original):
    case = make_case(3, 131, place)
    wanted = WantedLogprobs(token_ids=torch.empty(3, 0, dtype=torch.int64, device=place), original=original)
    assert_drawn(case, wanted)
    tokens = case.params.seed % 131
    assert Head(case.head).logprobs_of(case.hidden, tokens, wanted).of_ids.shape == (3, 0)


@pytest.mark.parametrize("wanted", [WantedLogprobs(), WantedLogprobs(3)], ids=["token", "top"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_ids_whose_logits_are_infinite_share_the_mass(place, temperature, wanted):
    case = make_case(4, 131, place)
    logits = case.hidden @ case.head.weight.T
    logits[:, [5, 50, 120]] = float("inf")
    params = dataclasses.replace(case.params, temperature=torch.full((4,), temperature, device=place))
    drawn, found = Head(case.head).draw_from_logits_with_logprobs(logits, params, wanted)
    third = torch.full((4,), -math.log(3.0), device=place)
    torch.testing.assert_close(found.of_tokens, third)
    torch.testing.assert_close(drawn.log_mass[:, 1], math.log(3.0) * torch.ones(4, device=place))
    if wanted.top:
        torch.testing.assert_close(found.top.logprobs, third[:, None].expand(4, 3))


def test_a_vocabulary_may_have_fewer_ids_than_are_wanted(place):
    assert_drawn(make_case(3, 17, place), WantedLogprobs(20))


@pytest.fixture
def gemms(monkeypatch) -> list[int]:
    """The rows of each GEMM that is launched from here on."""
    rows: list[int] = []
    compute = paths.compute_logits
    monkeypatch.setattr(
        paths,
        "compute_logits",
        lambda hidden, *args, **kwargs: rows.append(len(hidden)) or compute(hidden, *args, **kwargs),
    )
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_given_ids_alone_are_read_from_the_head_after_the_draw_that_is_made_without_them(device, kind, gemms):
    case = make_case(3, 2003, device, kind)
    wanted = WantedLogprobs(token_ids=some_ids(3, 9, 2003, device))
    head = Head(case.head)
    plain = head.draw(case.hidden, case.params, return_logprob=True, path="fused")
    drawn, found = head.draw_with_logprobs(case.hidden, case.params, wanted)
    assert not gemms
    assert torch.equal(drawn.token_ids, plain.token_ids) and torch.equal(drawn.scores, plain.scores)
    assert_reference(found, case.edited, drawn.token_ids, wanted, case.params.temperature)
    tokens = wanted._replace(token_ids=drawn.token_ids[:, None])
    _, again = head.draw_with_logprobs(case.hidden, case.params, tokens)
    assert torch.equal(again.of_ids[:, 0], found.of_tokens)


@pytest.mark.parametrize(
    "wanted",
    [
        WantedLogprobs(token_ids=torch.zeros(3, 21, dtype=torch.int64)),  # 63 of 2003 rows: more than 1 of 32
        WantedLogprobs(1, token_ids=torch.zeros(3, 1, dtype=torch.int64)),
        WantedLogprobs(token_ids=torch.zeros(3, 1, dtype=torch.int64), original=True),
    ],
    ids=["many ids", "the likeliest id beside them", "another temperature"],
)
def test_other_batches_with_given_ids_take_a_gemm(device, wanted, gemms):
    case = make_case(3, 2003, device)
    Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted._replace(token_ids=wanted.token_ids.to(device)))
    assert gemms == [3]


def test_given_ids_may_be_the_same_for_all_rows_and_nothing_else_be_wanted(place):
    case = make_case(5, 131, place)
    assert_drawn(case, WantedLogprobs(token_ids=some_ids(1, 9, 131, place)))
    assert_drawn(case, WantedLogprobs())
    assert_drawn(case, WantedLogprobs(original=True))


@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"logit_scale": 0.25}, {"logit_scale": -3.0, "softcap": 20.0}, {"logits_dtype": torch.float32}],
    ids=str,
)
def test_scale_soft_cap_and_rounding_are_the_heads(place, options):
    """Soft-capped logits are compared where no two are near one another."""
    case = make_case(5, 901, place, "edit", **options)
    k = 0 if "softcap" in options else 9
    assert_drawn(case, WantedLogprobs(k, token_ids=some_ids(5, 20, 901, place)), 8 * case.softcap_error)


def test_the_likeliest_ids_of_a_soft_capped_head_are_its_own(place):
    """Its logits are 0.01 apart or more."""
    values = torch.linspace(-30.0, 30.0, 301, device=place)[
        torch.randperm(301, generator=torch.Generator().manual_seed(1))
    ]
    hidden, row = torch.ones(2, 16, device=place), torch.arange(2, device=place)
    weight = torch.nn.functional.pad(values[:, None], (0, 15))
    case = Case(hidden, LMHead(weight, softcap=20.0), BatchParams(0.5 + row, row, row))
    assert_drawn(case, WantedLogprobs(9), 8 * case.softcap_error)


def test_ids_that_a_mask_forbids_follow_the_allowed_ones(place):
    case = make_case(2, 131, place)
    allowed = torch.zeros(2, 131, dtype=torch.bool, device=place)
    allowed[0, [130, 3, 50]], allowed[1, 77] = True, True
    case = case.with_params(edits=LogitEdits(mask=pack_bits(allowed)))
    wanted = WantedLogprobs(5, token_ids=torch.tensor([[77, 3]], device=place))
    assert_drawn(case, wanted)
    _, found = Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted)
    assert found.top.token_ids[1].tolist() == [77, 0, 1, 2, 3]
    assert found.of_ids[1].tolist() == [0.0, LOWEST_LOGPROB]


def test_scratch_that_was_made_for_other_configurations_does_not_matter(place):
    case = example(place)
    head = Head(case.head, workspace=Workspace(1, place))
    drawn, found = head.draw_with_logprobs(case.hidden, case.params, WantedLogprobs(3))
    assert_reference(found, case.edited, drawn.token_ids, WantedLogprobs(3), case.params.temperature)


def test_no_rows_have_no_logprobs(place):
    case = make_case(2, 131, place)
    none = case.rows(torch.arange(0, device=place))
    wanted = WantedLogprobs(5, token_ids=torch.zeros(0, 3, dtype=torch.int64, device=place))
    drawn, found = Head(case.head).draw_with_logprobs(none.hidden, none.params, wanted)
    prompt = Head(case.head).logprobs_of(none.hidden, drawn.token_ids, wanted)
    for one in (found, prompt):
        assert one.of_tokens.shape == (0,) and one.of_ids.shape == (0, 3) and one.top.token_ids.shape == (0, 5)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chunks(monkeypatch) -> list[int]:
    """The rows of each GEMM, from now on."""
    seen: list[int] = []
    compute = paths.compute_logits

    def noted(hidden, *arguments, **keywords):
        seen.append(len(hidden))
        return compute(hidden, *arguments, **keywords)

    monkeypatch.setattr(paths, "compute_logits", noted)
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_of_a_prompt_are_the_references_whatever_the_chunks(place, chunks, dtype):
    case = make_case(11, 515, place, dtype=DTYPES[dtype], padding=5)
    head, tokens = Head(case.head), some_ids(11, 3, 515, place)[:, 0].contiguous()
    counts = torch.arange(11, dtype=torch.int32, device=place) - 1
    for ids in (some_ids(11, 4, 515, place), some_ids(1, 4, 515, place), None):
        wanted = WantedLogprobs(7, counts, ids)
        for chunk_rows in (1, 4, 11, 1024):
            found = head.logprobs_of(case.hidden, tokens, wanted, chunk_rows=chunk_rows)
            assert_reference(found, case.edited, tokens, wanted)
    assert chunks == 3 * ([1] * 11 + [4, 4, 3] + [11] + [11])


def test_logits_of_a_chunk_take_few_bytes_and_chunks_are_of_one_size(place, chunks, monkeypatch):
    """A row takes 4 bytes for each of 608 ids; with the bound, 4 rows."""
    case = example(place)
    monkeypatch.setattr(paths, "MAX_CHUNK_BYTES", 5 * 4 * 608 - 1)
    tokens = case.params.seed % VOCAB
    found = Head(case.head).logprobs_of(case.hidden, tokens, WantedLogprobs(3))
    assert_reference(found, case.edited, tokens, WantedLogprobs(3))
    monkeypatch.setattr(paths, "MAX_CHUNK_BYTES", 1)
    Head(case.head).logprobs_of(case.hidden[:2], tokens[:2], WantedLogprobs())
    assert chunks == [3, 3, 3, 1, 1]


def test_a_prompt_leaves_no_scratch_behind(place):
    case = example(place)
    head = Head(case.head, max_rows=2)
    held = head.num_bytes
    head.logprobs_of(case.hidden, case.params.seed % VOCAB, WantedLogprobs(3))
    assert head.num_bytes == held


# --- parts of a vocabulary --------------------------------------------------------------------------------------------


def parts_of(case: Case, num_ranks: int) -> list[Head | None]:
    """The heads of ranks with equally many rows of the weight; None where a rank has padding alone."""
    weight, vocab = case.head.weight, case.head.vocab_size
    width = -(-vocab // num_ranks // 16) * 16
    weight = torch.nn.functional.pad(weight, (0, 0, 0, max(0, width * num_ranks - len(weight))), value=float("nan"))
    options = {"logit_scale": case.head.logit_scale, "softcap": case.head.softcap, "logits_dtype": case.head.rounding}
    parts = (weight[rank * width : (rank + 1) * width].contiguous() for rank in range(num_ranks))
    heads = [LMHead.of_rank(part, rank, num_ranks, vocab, **options) for rank, part in enumerate(parts)]
    return [None if head is None else Head(head) for head in heads]


def draw_by_ranks(case: Case, num_ranks: int, wanted: WantedLogprobs) -> tuple[SampleOutput, Logprobs]:
    """The merged draw and the merged logprobs of all ranks: each rank gets these. A rank without ids draws no row."""
    num_rows, records, parts = len(case.hidden), [], []
    for head in parts_of(case, num_ranks):
        if head is None:
            records.append(pack_record(no_record(num_rows, case.hidden.device, True)))
            nothing = Logprobs.empty(wanted.rows(0, 0, num_rows), 0, case.hidden.device)
            parts.append(nothing.pack(0, num_rows))
            continue
        drawn, found = head.draw_with_logprobs(case.hidden, case.params, wanted)
        records.append(pack_record(drawn._replace(logprobs=found.of_tokens, log_mass=found.log_mass)))
        parts.append(found.pack())
    merged = merge_records(torch.cat(records), return_logprob=True)
    return merged, merge_parts(torch.stack(parts), wanted, merged.logprobs)


def assert_by_ranks(case: Case, num_ranks: int, wanted: WantedLogprobs) -> None:
    """The token is that of the whole vocabulary, and the logprobs are the reference's."""
    drawn, found = draw_by_ranks(case, num_ranks, wanted)
    whole, _ = Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted)
    assert torch.equal(drawn.token_ids, whole.token_ids) and torch.equal(drawn.scores, whole.scores)
    temperature = None if wanted.original else case.params.temperature
    assert_reference(found, case.edited, drawn.token_ids, wanted, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
@pytest.mark.parametrize("num_ranks, vocab", [(2, 515), (4, 601), (8, 33)])
@pytest.mark.parametrize("kind", ["plain", "edit"])
@pytest.mark.usefixtures("merging")
def test_ranks_have_the_token_and_the_logprobs_of_the_whole_vocabulary(place, kind, num_ranks, vocab, original):
    """Three of eight ranks hold the 33 ids, 16, 16 and 1 of them; the other five hold none."""
    case = make_case(5, vocab, place, kind, torch.float32, padding=5)
    counts = torch.tensor([3, 0, 20, -1, 1], dtype=torch.int32, device=place)
    assert_by_ranks(case, num_ranks, WantedLogprobs(20, counts, some_ids(5, 9, vocab, place), original))


@pytest.mark.parametrize("wanted", [WantedLogprobs(), WantedLogprobs(3), WantedLogprobs(original=True)], ids=str)
@pytest.mark.usefixtures("merging")
def test_ranks_may_be_asked_for_less(place, wanted):
    assert_by_ranks(make_case(3, 131, place), 2, wanted)
    ids = some_ids(1, 9, 131, place)
    assert_by_ranks(make_case(3, 131, place), 2, wanted._replace(token_ids=ids))


def test_ranks_may_read_given_ids_from_their_parts_of_the_head(device, gemms):
    case = make_case(3, 2003, device, "edit")
    wanted = WantedLogprobs(token_ids=some_ids(3, 9, 2003, device))
    drawn, found = draw_by_ranks(case, 2, wanted)
    assert not gemms
    assert torch.equal(drawn.token_ids, Head(case.head).draw(case.hidden, case.params, path="fused").token_ids)
    assert_reference(found, case.edited, drawn.token_ids, wanted, case.params.temperature)


def equal_rows(device: torch.device) -> Case:
    """Logits that are equal on all ranks, forbidden on all but one, and forbidden everywhere or no number."""
    logits = torch.zeros(5, 160, device=device)
    logits[1] = torch.arange(160, device=device) % 4
    logits[2, :], logits[2, 150] = -INF, 2.0
    logits[3, :], logits[3, [3, 90, 150]] = -INF, torch.tensor([1.0, float("nan"), INF], device=device)
    logits[4, :] = -INF
    row = torch.arange(5, device=device)
    # Hidden states are rows of the identity: each row of logits is a column of the weight, which has 0 for NaN and
    # infinity. The mask forbids the ids that have NaN or -infinity.
    finite = logits.nan_to_num(0.0, 0.0, 0.0)
    weight = torch.nn.functional.pad(finite.T, (0, 11)).contiguous()
    allowed = logits > -INF
    case = Case(torch.eye(16, device=device)[:5].contiguous(), LMHead(weight), BatchParams(0.5 + row, row, row))
    return case.with_params(edits=LogitEdits(mask=pack_bits(allowed)))


@pytest.mark.usefixtures("merging")
def test_ties_between_ranks_go_to_the_smaller_id_and_forbidden_ids_are_those_of_no_rank(place):
    case = equal_rows(place)
    wanted = WantedLogprobs(128, token_ids=torch.tensor([[0, 150, 159, -1]], device=place))
    for num_ranks in (2, 4):
        assert_by_ranks(case, num_ranks, wanted)
        _, found = draw_by_ranks(case, num_ranks, wanted)
        assert found.top.token_ids[0].tolist() == list(range(128))
        assert found.top.token_ids[2, :4].tolist() == [150, 0, 1, 2]
        assert found.of_tokens[4].isnan() and found.top.logprobs[4].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
@pytest.mark.parametrize("kind", ["truncate", "edit+truncate"])
@pytest.mark.usefixtures("merging")
def test_ranks_that_draw_some_rows_each_have_the_tokens_and_logprobs_of_one_that_draws_all(place, kind, original):
    """Two ranks draw the five rows, two and three of them; the third rank draws none."""
    case = make_case(5, 131, place, kind)
    counts = torch.tensor([3, 0, 5, 5, 1], dtype=torch.int32, device=place)
    wanted = WantedLogprobs(5, counts, some_ids(5, 9, 131, place), original)
    head, records, parts = Head(case.head), [], []
    logits = case.hidden @ case.head.weight.T
    for start, stop in ((0, 2), (2, 5), (5, 5)):
        params, rows = case.params.rows(start, stop), wanted.rows(start, stop, 5)
        drawn, found = head.draw_from_logits_with_logprobs(logits[start:stop], params, rows)
        record = drawn._replace(logprobs=found.of_tokens, log_mass=found.log_mass)
        records.append(pack_record(record, start, 5))
        parts.append(found.pack(start, 5))
    merged = merge_records(torch.cat(records), return_logprob=True)
    found = merge_parts(torch.stack(parts), wanted, merged.logprobs)
    whole, _ = head.draw_with_logprobs(case.hidden, case.params, wanted)
    assert torch.equal(merged.token_ids, whole.token_ids)
    assert_reference(found, case.edited, merged.token_ids, wanted, None if original else case.params.temperature)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.usefixtures("merging")
def test_ranks_have_the_logprobs_of_a_prompt_of_the_whole_vocabulary(place, num_ranks):
    case = make_case(7, 515, place, padding=5)
    tokens = some_ids(7, 3, 515, place)[:, 0].contiguous()
    counts = torch.arange(7, dtype=torch.int32, device=place) - 1
    heads = parts_of(case, num_ranks)
    for wanted in (WantedLogprobs(5, counts, some_ids(7, 4, 515, place)), WantedLogprobs()):
        parts = [head.logprobs_of(case.hidden, tokens, wanted, chunk_rows=3).pack(tokens=True) for head in heads]
        assert_reference(merge_parts(torch.stack(parts), wanted), case.edited, tokens, wanted)


def test_a_part_of_a_vocabulary_keeps_scratch_for_the_logprobs_of_all_its_batches(place, monkeypatch):
    """A rank that found no memory in a step would leave the others alone."""
    case = example(place)
    head, _ = parts_of(case, 2)
    head.grow(ROWS)
    held = head.num_bytes
    monkeypatch.setattr(paths, "Workspace", None)
    head.reserve_logprobs(ROWS)
    head.draw_with_logprobs(case.hidden, case.params, WantedLogprobs(3))
    assert head.num_bytes == held


# --- the public functions ---------------------------------------------------------------------------------------------


def test_sample_and_a_sampler_give_what_the_head_gives(place, monkeypatch, tmp_path):
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(tmp_path))
    case = make_case(5, 131, place, "edit+truncate")
    wanted = WantedLogprobs(3, token_ids=some_ids(5, 4, 131, place), original=True)
    sampler, limits = Sampler(case.head, max_rows=2), case.params.truncation
    params = SamplingParams(case.params.temperature, limits.top_k, limits.top_p, limits.min_p, case.params.seed)
    for logprobs, asked in ((3, WantedLogprobs(3)), (0, WantedLogprobs()), (wanted, wanted)):
        drawn, found = Head(case.head).draw_with_logprobs(case.hidden, case.params, asked)
        by_function = sample(case.hidden, case.head, case.params, logprobs=logprobs, path="logits")
        by_sampler = sampler(
            case.hidden, params, position=case.params.position, edits=case.params.edits, logprobs=logprobs
        )
        for out in (by_function, by_sampler):
            assert isinstance(out, LogprobOutput)
            assert torch.equal(out.token_ids, drawn.token_ids) and torch.equal(out.scores, drawn.scores)
            assert torch.equal(out.logprobs, found.of_tokens)
            assert (out.log_mass is None) == asked.original
            assert (out.top_logprobs is None) == (found.top is None)
            if found.top is not None:
                assert all(torch.equal(one, other) for one, other in zip(out.top_logprobs, found.top, strict=True))
            assert (out.token_ids_logprobs is None) == (found.of_ids is None)
            if found.of_ids is not None:
                assert torch.equal(out.token_ids_logprobs, found.of_ids)


def test_logprobs_of_another_type_and_another_path_are_refused(device):
    case = example(device)
    for logprobs in (True, 5.0, [5]):
        with pytest.raises(
            ValueError, match=r"logprobs is .*; expected WantedLogprobs, or the number of the likeliest ids"
        ):
            sample(case.hidden, case.head, case.params, logprobs=logprobs)
    for logprobs in (-1, 129):
        with pytest.raises(ValueError, match=f"logprobs is {logprobs}; expected 0 to 128"):
            sample(case.hidden, case.head, case.params, logprobs=logprobs)
    with pytest.raises(ValueError, match="path is 'fused'; expected 'logits' or None where logprobs are asked for"):
        sample(case.hidden, case.head, case.params, logprobs=5, path="fused")


# --- arguments --------------------------------------------------------------------------------------------------------


IDS = torch.zeros(9, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    "wanted, message",
    [
        (WantedLogprobs(129), "wanted.top is 129; expected an integer from 1 to 128"),
        (WantedLogprobs(-1), "wanted.top is -1; expected"),
        (WantedLogprobs(True), "wanted.top is True; expected an integer from 0 to 128"),
        (WantedLogprobs(IDS), r"(?s)wanted.top is tensor.*; expected an integer from 0 to 128"),
        (
            WantedLogprobs(3, IDS[:, 0]),
            r"wanted.counts is \(9,\) torch.int64 .*; expected contiguous \(9,\) torch.int32",
        ),
        (WantedLogprobs(3, IDS[:8, 0].int()), r"wanted.counts is \(8,\)"),
        (
            WantedLogprobs(token_ids=IDS[:8]),
            r"wanted.token_ids is \(8, 2\); expected a tensor of shape \(9, m\) or \(1,",
        ),
        (WantedLogprobs(token_ids=IDS.int()), r"wanted.token_ids is \(9, 2\) torch.int32"),
        (WantedLogprobs(temperature=torch.ones(8)), r"wanted.temperature is \(8,\)"),
    ],
)
def test_what_is_wanted_and_does_not_fit_is_named(device, wanted, message):
    case = example(device)
    wanted = WantedLogprobs(*(one.to(device) if isinstance(one, torch.Tensor) else one for one in wanted))
    with pytest.raises(ValueError, match=message):
        Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted)
    with pytest.raises(ValueError, match=message):
        Head(case.head).logprobs_of(case.hidden, case.params.seed % VOCAB, wanted)


def test_rows_and_heads_that_do_not_fit_are_named(device):
    case = example(device)
    head, tokens = Head(case.head), case.params.seed % VOCAB
    for call, message in (
        (lambda: head.logprobs_of(case.hidden[0], tokens, WantedLogprobs()), r"hidden has shape \(32,\)"),
        (lambda: head.logprobs_of(case.hidden[:, :16], tokens, WantedLogprobs()), r"hidden is \(9, 16\)"),
        (lambda: head.logprobs_of(case.hidden, tokens[:2], WantedLogprobs()), r"token_ids is \(2,\)"),
        (lambda: head.logprobs_of(case.hidden, tokens.int(), WantedLogprobs()), "token_ids is .*int32"),
        (
            lambda: head.logprobs_of(case.hidden, tokens, WantedLogprobs(), chunk_rows=0),
            "chunk_rows is 0; expected an int",
        ),
        (
            lambda: head.logprobs_of(case.hidden, tokens, WantedLogprobs(), chunk_rows=1.5),
            "chunk_rows is 1.5; expected",
        ),
        (lambda: head.draw_with_logprobs(case.hidden, None, WantedLogprobs()), "params is a NoneType"),
        (lambda: head.draw_with_logprobs(case.hidden, case.params, 3), "wanted is 3; expected WantedLogprobs"),
        (lambda: head.logprobs_of(case.hidden, tokens, 3), "wanted is 3; expected WantedLogprobs"),
        (
            lambda: head.draw_with_logprobs(
                case.hidden, case.params, WantedLogprobs(original=True, temperature=case.params.temperature)
            ),
            "wanted.original is True; expected False with wanted.temperature",
        ),
        (
            lambda: head.draw_with_logprobs(
                case.hidden, dataclasses.replace(case.params, seed=tokens[:1]), WantedLogprobs()
            ),
            r"seed is \(1,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- real sizes -------------------------------------------------------------------------------------------------------


def real_head(device: torch.device) -> Head:
    """A head of 128,256 ids, whose logits are float32: a rounding to 2 bytes may go either way."""
    generator = torch.Generator(device).manual_seed(1)
    weight = (torch.randn(128_256, 2048, generator=generator, device=device) / 16).bfloat16()
    return Head(LMHead(weight, logits_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("top", [20, 0])
def test_a_captured_draw_has_the_logprobs_of_what_is_written_later(device, top):
    head, rows = real_head(device), 33
    generator = torch.Generator(device).manual_seed(2)
    hidden = torch.randn(rows, 2048, generator=generator, device=device).bfloat16()
    row = torch.arange(rows, device=device)
    params = BatchParams(0.5 + row / rows, row, row)
    counts = torch.full((rows,), 20, dtype=torch.int32, device=device)
    wanted = WantedLogprobs(top, counts if top else None, some_ids(rows, 9, 128_256, device))
    head.draw_with_logprobs(hidden, params, wanted)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, found = head.draw_with_logprobs(hidden, params, wanted)
    for count in (20, 5):
        hidden.copy_(torch.randn(rows, 2048, generator=generator, device=device))
        counts.fill_(count)
        graph.replay()
        logits = head.logits(hidden).double()
        assert_reference(found, logits, drawn.token_ids, wanted, params.temperature)


@pytest.mark.gpu
def test_a_prompt_of_real_size_never_has_all_its_logits_in_memory(device):
    head, rows = real_head(device), 3000
    hidden = torch.randn(rows, 2048, generator=torch.Generator(device).manual_seed(3), device=device).bfloat16()
    tokens = some_ids(rows, 3, 128_256, device)[:, 0].contiguous()
    wanted = WantedLogprobs(5, token_ids=some_ids(1, 9, 128_256, device))
    head.logprobs_of(hidden[:8], tokens[:8], wanted)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found = head.logprobs_of(hidden, tokens, wanted)
    assert torch.cuda.max_memory_allocated(device) - before < paths.MAX_CHUNK_BYTES + 100_000_000
    some = torch.arange(0, rows, 97, device=device)
    logits = hidden[some].double() @ head.lm_head.weight.double().T
    top = found.top
    torch.testing.assert_close(top.logits[some].double(), logits.gather(1, top.token_ids[some]), rtol=0, atol=1e-3)
    torch.testing.assert_close(top.logits[some].double(), logits.topk(5).values, rtol=0, atol=1e-3)
    want = gather_logprobs_ref(logits, torch.cat([tokens[some, None], wanted.token_ids.expand(len(some), -1)], 1))
    got = torch.cat([found.of_tokens[some, None], found.of_ids[some]], 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)
