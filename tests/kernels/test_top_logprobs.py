"""The k largest logprobs of rows of logits: the reference's ids in its order, whatever is equal, forbidden or no
number, and its logprobs to the last digits of float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import (
    CUDA,
    DTYPES,
    READ,
    TRUNCATION,
    Mix,
    limits,
    make_case,
    pack_bits,
    peaked,
    random_rows,
)

from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows, RowSummary, summarize_logits
from sgl_flashsample.kernels.params import LARGEST_LOGIT, BatchParams, LogitEdits, LogitsSpec
from sgl_flashsample.kernels.reference import log_softmax_ref, top_logprobs_ref, transform_ref
from sgl_flashsample.kernels.sample_logits import sample_logits
from sgl_flashsample.kernels.top_logprobs import TopLogprobs, top_logprobs
from sgl_flashsample.kernels.workspace import MAX_TOP_LOGPROBS, SUMMARY_IDS, LogprobWorkspace, Workspace

INF, NAN = float("inf"), float("nan")
KS = (1, 5, 9, 64, 127, 128)


def close(got: torch.Tensor, want: torch.Tensor, slack: torch.Tensor | float = 0.0) -> bool:
    """Within a few roundings of float32; NaN where NaN is expected."""
    difference = (got.double() - want).abs()
    return bool(((difference <= 2e-5 + 4e-7 * want.abs() + slack) | (got.isnan() & want.isnan())).all())


def assert_top(
    top: TopLogprobs,
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    slack: torch.Tensor | float = 0.0,
) -> None:
    """``top`` is the reference's of ``[B, V]`` logits after their edits, and -1 beyond their last id."""
    k = top.token_ids.shape[1]
    known = min(k, logits.shape[1])
    ids, logprobs = top_logprobs_ref(logits, known, temperature)
    assert torch.equal(top.token_ids[:, :known], ids)
    assert close(top.logprobs[:, :known], logprobs, slack)
    assert not (top.logprobs > 0).any()
    assert set(top.token_ids[:, known:].flatten().tolist()) <= {-1}
    assert set(top.logprobs[:, known:].flatten().tolist()) <= {LOWEST_LOGPROB}
    assert set(top.logits[:, known:].flatten().tolist()) <= {-INF}


def gaussian(num_rows: int, vocab: int, device, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + vocab)
    return (torch.randn(num_rows, vocab, generator=generator) * 3).to(dtype).to(device)


def one_row(values: list[float], device) -> LogitRows:
    return LogitRows(torch.tensor([values], device=device), LogitsSpec(len(values)))


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_and_logprobs_are_the_references(device, dtype, k):
    """Vocabularies of fewer ids than k, of a partial group, of a partial block of groups, and of several tiles."""
    for num_rows, vocab in ((1, 1), (3, 16), (2, 131), (1, 2003), (2, 2 * SUMMARY_IDS), (3, 2 * SUMMARY_IDS + 37)):
        logits = gaussian(num_rows, vocab, device, DTYPES[dtype])
        assert_top(top_logprobs(LogitRows(logits, LogitsSpec(vocab)), k), logits.double())


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_come_before_temperatures_and_a_truncation_does_not_count(device, dtype, original):
    case = make_case(17, 2003, device, "edit+truncate", DTYPES[dtype])
    top = top_logprobs(LogitRows(case.raw, case.head.spec, case.params, original=original), 20)
    assert_top(top, case.edited, None if original else case.params.temperature)


def test_greedy_rows_have_temperature_1_as_rows_without_temperatures(device):
    logits, row = gaussian(3, 999, device), torch.arange(3, device=device)
    params = BatchParams(torch.tensor([0.0, -1.0, 0.5], device=device), row, row)
    top = top_logprobs(LogitRows(logits, LogitsSpec(999), params), 5)
    assert_top(top, logits, params.temperature)
    plain = top_logprobs(LogitRows(logits, LogitsSpec(999)), 5)
    assert torch.equal(top.logprobs[:2], plain.logprobs[:2]) and not torch.equal(top.logprobs[2], plain.logprobs[2])


def test_hostile_rows_have_the_references_ids_and_no_logprob_above_0(device):
    """NaN, infinities and huge numbers among logits, biases and temperatures; rows without an allowed id. Compiled
    kernels may round an edited logit otherwise: there the logits are compared."""
    for index in range(8):
        rows = random_rows(Mix(hostile=True), index, 5, device)
        top = top_logprobs(LogitRows(rows.logits, LogitsSpec(rows.logits.shape[1]), rows.params), 20)
        if not CUDA:
            assert_top(top, rows.edited, rows.params.temperature)
            continue
        known = min(20, rows.logits.shape[1])
        ids, _ = top_logprobs_ref(rows.edited, known)
        torch.testing.assert_close(top.logits[:, :known].double(), rows.edited.gather(1, ids), rtol=1e-6, atol=1e-6)
        assert not (top.logprobs > 0).any()


@pytest.mark.parametrize("given", [False, True], ids=["own mass", "given log-mass"])
def test_logprobs_are_right_and_never_above_0_at_any_temperature(device, given):
    case = peaked(device)
    rows = LogitRows(case.raw, case.head.spec, case.params)
    if not given:
        assert_top(top_logprobs(rows, 20), case.raw.double(), case.params.temperature)
        return
    drawn = sample_logits(case.raw, case.head.spec, case.params, READ, return_logprob=True)
    top = top_logprobs(rows, 20, summary=RowSummary(log_mass=drawn.log_mass))
    # The interpreter's fused multiply-add rounds twice: it does not know the error of a product.
    slack = 0.0 if CUDA else 2.0**-22 * (case.raw.double().amax(1) / case.params.temperature)[:, None]
    assert_top(top, case.raw.double(), case.params.temperature, slack)
    assert top.log_mass is drawn.log_mass


@pytest.mark.parametrize("num_equal", [200, 2 * SUMMARY_IDS], ids=["some", "all"])
@pytest.mark.parametrize("value", [2.5, 0.0, -7.0, LARGEST_LOGIT, INF])
def test_of_equal_logits_the_smaller_ids_come_first_across_groups_and_tiles(device, num_equal, value):
    vocab = 2 * SUMMARY_IDS
    equal = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:num_equal].sort().values
    logits = torch.full((1, vocab), -9.0, device=device)
    logits[0, equal.to(device)] = value
    for k in KS:
        top = top_logprobs(LogitRows(logits, LogitsSpec(vocab)), k)
        assert top.token_ids[0].tolist() == equal[:k].tolist()
        assert_top(top, logits)


def test_zeros_of_both_signs_are_equal(device):
    values = [-0.0, 0.0, -1.0, -0.0, 0.0] * 40
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = one_row(values, device)
        top = top_logprobs(dataclasses.replace(rows, logits=rows.logits.to(dtype)), 9)
        assert top.token_ids[0].tolist() == [0, 1, 3, 4, 5, 6, 8, 9, 10]


def test_all_winners_may_be_in_one_group_and_one_of_them_in_each_group(device):
    vocab = 40 * 128
    inside, apart = torch.zeros(2, 1, vocab, device=device)
    inside[0, 1600:1616] = torch.arange(16, device=device) + 1.0
    apart[0, 5::128] = torch.arange(40, device=device) + 1.0
    top = top_logprobs(LogitRows(torch.cat([inside, apart]), LogitsSpec(vocab)), 20)
    assert top.token_ids[0].tolist() == [*range(1615, 1599, -1), 0, 1, 2, 3]
    assert top.token_ids[1].tolist() == [5 + 128 * block for block in range(39, 19, -1)]


def test_forbidden_ids_follow_the_allowed_ones_in_ascending_order(device):
    """NaN and -inf: the lowest float32. One allowed id has logprob 0."""
    values = [NAN, -INF] * 500
    values[700] = -3.0
    top = top_logprobs(one_row(values, device), 9)
    assert top.token_ids[0].tolist() == [700, 0, 1, 2, 3, 4, 5, 6, 7]
    assert top.logprobs[0].tolist() == [0.0] + [LOWEST_LOGPROB] * 8
    assert top.logits[0].tolist() == [-3.0] + [-INF] * 8
    assert top.log_mass[0].double().sum().item() == -3.0


@pytest.mark.parametrize("given", [False, True], ids=["own mass", "given log-mass"])
def test_a_row_without_an_allowed_id_has_no_logprobs(device, given):
    rows = LogitRows(torch.tensor([[-INF] * 40, [0.0] * 40], device=device), LogitsSpec(40))
    known = RowSummary(log_mass=top_logprobs(rows, 1).log_mass) if given else None
    top = top_logprobs(rows, 5, summary=known)
    assert top.token_ids[0].tolist() == [0, 1, 2, 3, 4]
    assert top.logprobs[0].isnan().all() and not top.logprobs[1].isnan().any()
    assert top.log_mass[0].tolist() == [-INF, 0.0]


def test_a_grammar_mask_leaves_fewer_ids_than_k(device):
    allowed = torch.zeros(2, 999, dtype=torch.bool, device=device)
    allowed[0, [998, 3, 500]], allowed[1, 77] = True, True
    row = torch.arange(2, device=device)
    params = BatchParams(torch.ones(2, device=device), row, row, edits=LogitEdits(mask=pack_bits(allowed)))
    logits = gaussian(2, 999, device)
    top = top_logprobs(LogitRows(logits, LogitsSpec(999), params), 5)
    assert_top(top, torch.where(allowed, logits, -INF))
    assert top.token_ids[1].tolist() == [77, 0, 1, 2, 3]


def test_each_row_has_as_many_ids_as_its_count(device):
    logits = gaussian(6, 2003, device)
    counts = torch.tensor([5, 0, 9, -1, 100, 1], dtype=torch.int32, device=device)
    top = top_logprobs(LogitRows(logits, LogitsSpec(2003)), 9, counts=counts)
    whole = top_logprobs(LogitRows(logits, LogitsSpec(2003)), 9)
    for row, count in enumerate((5, 0, 9, 0, 9, 1)):
        assert torch.equal(top.token_ids[row, :count], whole.token_ids[row, :count])
        assert torch.equal(top.logprobs[row, :count], whole.logprobs[row, :count])
        assert set(top.token_ids[row, count:].tolist()) <= {-1}
        assert set(top.logprobs[row, count:].tolist()) <= {LOWEST_LOGPROB}
    assert top.log_mass[1].tolist() == top.log_mass[3].tolist() == [-INF, 0.0]


def test_a_row_without_a_count_is_not_read(device):
    logits, counts = gaussian(2, 40, device), torch.tensor([1, 0], dtype=torch.int32, device=device)
    workspace = LogprobWorkspace(2, 40, device)
    for tensor in (workspace.group_max, workspace.tile_mass):
        tensor.fill_(-77)
    top_logprobs(LogitRows(logits, LogitsSpec(40), workspace=workspace), 2, counts=counts)
    assert set(workspace.group_max[1].tolist()) == set(workspace.tile_mass[1].flatten().tolist()) == {-77}


@pytest.mark.parametrize("scale, softcap", [(0.125, None), (None, 5.0), (0.5, 30.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_soft_cap_are_applied(device, dtype, scale, softcap):
    """Capped logits are equal or apart as their float32 numbers are: ids are compared by their exact logits."""
    logits = gaussian(2, 2003, device, DTYPES[dtype])
    spec = LogitsSpec(2003, logit_scale=scale, softcap=softcap)
    top = top_logprobs(LogitRows(logits, spec), 9)
    exact = transform_ref(logits.double(), logits.dtype, logit_scale=scale, softcap=softcap)
    if softcap is None:
        assert_top(top, exact)
    ids, logprobs = top_logprobs_ref(exact, 9)
    slack = 4e-6 * (softcap or 0)
    torch.testing.assert_close(exact.gather(1, top.token_ids), exact.gather(1, ids), rtol=0, atol=slack)
    assert close(top.logprobs, logprobs, slack)


def test_logits_are_rounded_as_the_spec_says(device):
    logits = 1.0 + torch.arange(200, device=device)[None] / 4096
    top = top_logprobs(LogitRows(logits, LogitsSpec(200, logits_dtype=torch.float16)), 9)
    assert_top(top, logits.half().double())


def test_columns_beyond_the_vocabulary_and_between_rows_are_not_read(device):
    for vocab, stride in ((2003, 2016), (2003, 2005), (2000, 2016)):
        held = torch.full((3, stride), INF, device=device)
        held[:, :vocab] = gaussian(3, vocab, device)
        assert_top(top_logprobs(LogitRows(held, LogitsSpec(vocab)), 9), held[:, :vocab])
        assert_top(top_logprobs(LogitRows(held[:, :vocab], LogitsSpec(vocab)), 9), held[:, :vocab])
        flat = torch.cat([held.new_zeros(1), held.flatten()])[1:].view(3, stride)
        assert_top(top_logprobs(LogitRows(flat, LogitsSpec(vocab)), 9), held[:, :vocab])


def test_a_row_is_the_same_bit_by_bit_alone_and_in_a_batch(device):
    logits, row = gaussian(7, 3 * SUMMARY_IDS + 5, device), torch.arange(7, device=device)
    spec, params = LogitsSpec(logits.shape[1]), BatchParams(0.3 + row / 4, row, row)
    batch = top_logprobs(LogitRows(logits, spec, params), 20)
    for place in (0, 3, 6):
        part = slice(place, place + 1)
        alone = top_logprobs(LogitRows(logits[part], spec, params.rows(place, place + 1)), 20)
        assert all(torch.equal(one, many[part]) for one, many in zip(alone, batch, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edited", ["", "edit+"])
def test_rows_that_a_truncated_draw_has_left_behind_need_no_pass(device, dtype, edited):
    """Logits, maxima and log-mass of the buffer, which are after edits."""
    case = make_case(9, 2003, device, edited + "truncate", DTYPES[dtype])
    case = case.with_params(truncation=limits(9, device, top_k=5), temperature=torch.full((9,), 0.7, device=device))
    workspace = Workspace(9 * 64, device)
    drawn = sample_logits(
        case.raw,
        case.head.spec,
        case.params,
        READ,
        return_logprob=True,
        workspace=workspace,
        truncation_config=TRUNCATION,
    )
    buffer = workspace.last_buffer
    params = dataclasses.replace(case.params, edits=None)
    known = RowSummary(group_max=buffer.group_max[:9], log_mass=drawn.log_mass)
    scratch = LogprobWorkspace(9, 2003, device)
    scratch.group_max.fill_(NAN)
    rows = LogitRows(buffer.logits[:9], LogitsSpec(2003), params, workspace=scratch)
    assert_top(top_logprobs(rows, 20, summary=known), case.edited, case.params.temperature)
    assert scratch.group_max.isnan().all(), "no pass over the logits"
    original = dataclasses.replace(rows, original=True)
    again = top_logprobs(original, 20, summary=known._replace(log_mass=None))
    assert_top(again, case.edited)
    assert scratch.group_max.isnan().all(), "a second log-mass needs no maxima"


def test_the_parts_of_a_vocabulary_have_its_logprobs_and_its_winners(device):
    logits, row = gaussian(3, 2005, device, torch.bfloat16), torch.arange(3, device=device)
    params = BatchParams(torch.tensor([0.7, 0.0, 1.3], device=device), row, row)
    whole = top_logprobs(LogitRows(logits, LogitsSpec(2005), params), 9)
    sizes = ((0, 992), (992, 1008), (2000, 5))  # the last part has fewer ids than k
    parts = [
        LogitRows(
            logits[:, start : start + size], LogitsSpec(size, vocab_start=start, shards=3, total_ids=2005), params
        )
        for start, size in sizes
    ]
    tops = [top_logprobs(part, 9) for part in parts]
    masses = torch.stack([top.log_mass.double().sum(1) for top in tops])
    total = torch.logsumexp(masses, 0)
    log_mass = torch.stack([total.float(), (total - total.float().double()).float()], 1)
    tops = [top_logprobs(part, 9, summary=RowSummary(log_mass=log_mass)) for part in parts]
    ids, logprobs, values = (torch.cat([getattr(top, name) for top in tops], 1) for name in TopLogprobs._fields[:3])
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :9]  # parts are in the order of their ids
    assert torch.equal(ids.gather(1, order), whole.token_ids)
    assert torch.equal(values.gather(1, order), whole.logits)
    assert close(logprobs.gather(1, order), whole.logprobs.double())


def test_a_summary_has_the_maxima_of_groups_and_the_masses_of_tiles(device):
    logits, row = gaussian(2, SUMMARY_IDS + 37, device), torch.arange(2, device=device)
    params = BatchParams(torch.tensor([0.5, 2.0], device=device), row, row)
    summary = summarize_logits(LogitRows(logits, LogitsSpec(SUMMARY_IDS + 37), params))
    padded = torch.nn.functional.pad(logits, (0, 11), value=-INF)
    assert torch.equal(summary.group_max, padded.view(2, -1, 16).amax(-1))
    for tile, part in enumerate(logits.split(SUMMARY_IDS, 1)):
        largest, mass = summary.tile_mass[:, tile].unbind(-1)
        assert torch.equal(largest, part.amax(1))
        want = torch.exp((part.double() - largest[:, None]) / params.temperature[:, None]).sum(1)
        torch.testing.assert_close(mass.double(), want, rtol=1e-5, atol=0)


def test_a_workspace_serves_batches_of_every_size(device):
    workspace, spec = LogprobWorkspace(4, 999, device), LogitsSpec(999)
    for num_rows in (4, 1, 3, 0):
        logits = gaussian(num_rows, 999, device, seed=num_rows)
        assert_top(top_logprobs(LogitRows(logits, spec, workspace=workspace), 9), logits)
    assert workspace.num_bytes == 4 * (63 * 4 + 8 + 4 * 4 * MAX_TOP_LOGPROBS)


LOGITS = torch.zeros(3, 40)
ROW = torch.zeros(3, dtype=torch.int64)
PARAMS = BatchParams(torch.ones(3), ROW, ROW)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"logits": LOGITS[:, :39]}, r"logits is \(3, 39\) torch.float32; expected \[B, 40 or more\]"),
        ({"logits": LOGITS.double()}, r"logits is \(3, 40\) torch.float64"),
        ({"logits": LOGITS[0]}, r"logits is \(40,\)"),
        ({"logits": torch.zeros(40, 3).T}, r"logits has strides \(1, 3\); expected rows that are contiguous"),
        (
            {"params": dataclasses.replace(PARAMS, temperature=torch.ones(2))},
            r"temperature is \(2,\) .*; expected contiguous \(3,\) torch.float32",
        ),
        (
            {"params": dataclasses.replace(PARAMS, edits=LogitEdits(bias=torch.zeros(3, 39)))},
            r"bias is \(3, 39\) .*; expected contiguous \(3, 40\) torch.float32",
        ),
        ({"workspace": LogprobWorkspace(2, 40, torch.device("cpu"))}, "workspace is for 2 rows of 40 logits on cpu"),
        ({"workspace": LogprobWorkspace(3, 41, torch.device("cpu"))}, "expected at least 3 rows of 40 on cpu"),
        ({"workspace": 7}, "workspace is a int; expected a LogprobWorkspace"),
    ],
)
def test_wrong_rows_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        LogitRows(**{"logits": LOGITS, "spec": LogitsSpec(40), "params": PARAMS} | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"k": 0}, "k is 0; expected an integer from 1 to 128"),
        ({"k": 129}, "k is 129; expected an integer from 1 to 128"),
        ({"k": 5.0}, "k is 5.0; expected an integer"),
        ({"counts": ROW}, r"counts is \(3,\) torch.int64 .*; expected contiguous \(3,\) torch.int32"),
        ({"counts": ROW[:2].int()}, r"counts is \(2,\)"),
        ({"summary": RowSummary(group_max=LOGITS)}, r"group_max is \(3, 40\) .*; expected contiguous \(3, 3\)"),
        ({"summary": RowSummary(log_mass=LOGITS[:, :2])}, r"log_mass has strides \(40, 1\); expected it contiguous"),
        ({"summary": RowSummary(tile_mass=LOGITS)}, r"tile_mass is \(3, 40\) .*; expected contiguous \(3, 1, 2\)"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        top_logprobs(**{"rows": LogitRows(LOGITS, LogitsSpec(40)), "k": 5} | changed)


@pytest.mark.parametrize("counts", [ROW, ROW[:2].int()])
def test_wrong_counts_of_a_summary_are_named(counts):
    with pytest.raises(ValueError, match="counts is"):
        summarize_logits(LogitRows(LOGITS, LogitsSpec(40)), counts=counts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, vocab", [(1, 151_936), (33, 151_936), (256, 128_256), (8, 50_257)])
def test_rows_of_real_size_have_the_references_ids(device, num_rows, vocab, dtype):
    logits = gaussian(num_rows, vocab, device, DTYPES[dtype])
    workspace = LogprobWorkspace(num_rows, vocab, device)
    for k in (1, 20, 128):
        assert_top(top_logprobs(LogitRows(logits, LogitsSpec(vocab), workspace=workspace), k), logits)


@pytest.mark.gpu
def test_a_captured_launch_reads_what_is_written_later(device):
    logits, spec = gaussian(4, 151_936, device, torch.bfloat16), LogitsSpec(151_936)
    rows = LogitRows(logits, spec)
    top_logprobs(rows, 20)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top = top_logprobs(rows, 20)
    for seed in (1, 2):
        logits.copy_(gaussian(4, 151_936, device, torch.bfloat16, seed))
        graph.replay()
        assert_top(top, logits)


def test_the_references_logprobs_are_torchs(device):
    logits, temperature = gaussian(3, 50, device), torch.tensor([0.0, 0.5, 2.0], device=device)
    want = torch.log_softmax(logits.double() / torch.tensor([[1.0], [0.5], [2.0]], device=device), -1)
    torch.testing.assert_close(log_softmax_ref(logits, temperature), want)
    ids, logprobs = top_logprobs_ref(logits, 5, temperature)
    assert torch.equal(ids, logits.topk(5).indices) and torch.equal(
        logprobs, log_softmax_ref(logits, temperature).gather(1, ids)
    )
