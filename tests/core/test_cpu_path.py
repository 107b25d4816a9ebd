"""The cpu path: the reference's token for every row, in every dtype and with any number of threads."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from kernel_cases import (
    CAPS,
    DTYPES,
    KINDS,
    KNOWN_ANSWERS,
    Case,
    Drawn,
    assert_equal_to_reference,
    assert_soft_capped,
    huge_biases_and_a_mask,
    limits,
    limits_by_row,
    make_case,
    make_params,
    mixed_edits,
    near_a_limit_of_top_p,
    near_pairs,
    pack_bits,
    peaked,
    reference,
    spelled_out,
    take,
    ties_apart,
    two_huge_biases,
)

from sgl_flashsample import BatchParams, LogitEdits, cpu_path, sample_from_logits
from sgl_flashsample.cpu_path import sample_on_cpu
from sgl_flashsample.kernels.merge_ranks import merge_records, pack_record
from sgl_flashsample.kernels.params import LARGEST_LOGIT, LMHead, LogitsSpec
from sgl_flashsample.kernels.reference import group_noise_ref, group_scores_ref

numba = pytest.importorskip("numba")
loops_cache = pytest.importorskip("sgl_flashsample.loops_cache")
CPU = torch.device("cpu")
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def draw(case: Case, threads: int | None = 1) -> Drawn:
    spec = case.head.spec
    return Drawn(*sample_on_cpu(case.raw, spec, case.params, return_logprob=True, threads=threads), None, None)


def rows_of(logits: torch.Tensor, **changes) -> BatchParams:
    """Parameters of rows that are sampled at temperature 1, but for ``changes``."""
    rows = torch.arange(len(logits))
    return dataclasses.replace(BatchParams(torch.ones(len(logits)), rows * 7919, rows + 2**33), **changes)


# --- the reference's token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows, vocab", [(17, 1), (1, 127), (3, 129), (17, 127), (33, 2003)])
@pytest.mark.parametrize("kind", KINDS)
@of_every_dtype
def test_tokens_and_logprobs_equal_the_reference(dtype, kind, num_rows, vocab):
    case = make_case(num_rows, vocab, CPU, kind, dtype, padding=vocab % 7)
    assert_equal_to_reference(case, draw(case), 0.7 if num_rows < 9 else 0.15)


@pytest.mark.parametrize("num_rows, kind, dtype", [(1, "plain", "bf16"), (3, "edit+truncate", "fp32")])
def test_tokens_and_logprobs_of_a_whole_vocabulary_equal_the_reference(num_rows, kind, dtype):
    case = make_case(num_rows, 50_257, CPU, kind, DTYPES[dtype], padding=3)
    assert_equal_to_reference(case, draw(case), 0.7)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"logit_scale": 0.25},
        {"logit_scale": -3.0, "softcap": 20.0},
        {"logits_dtype": torch.float32},
        {"logits_dtype": torch.bfloat16},
        {"vocab_start": 1600, "shards": 9},
        {"vocab_start": 160, "shards": 2, "logit_scale": 0.375, "softcap": 9.0, "logits_dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["plain", "edit", "truncate"])
def test_scale_softcap_rounding_shard_and_padding_are_the_models(kind, options):
    if kind == "truncate" and "shards" in options:
        options = {name: value for name, value in options.items() if name not in ("shards", "vocab_start")}
    case = make_case(17, 901, CPU, kind, seed=3, padding=11, **options)
    assert_equal_to_reference(case, draw(case), 0.15)


@pytest.mark.parametrize("cap", CAPS)
def test_soft_capped_logits_are_those_of_tanh_and_in_its_order(cap):
    assert_soft_capped(near_pairs(cap, CPU), draw(near_pairs(cap, CPU)))


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 30.0])
def test_no_group_that_could_win_is_left_out(temperature):
    """Scores are those of the best group, whatever the distribution; also where most groups are not scored."""
    logits = 3 * torch.randn(64, 5003, generator=torch.Generator().manual_seed(1)) - 4 * torch.rand(5003).sort()[0]
    params = rows_of(logits, temperature=torch.full((64,), temperature))
    drawn = sample_on_cpu(logits, LogitsSpec(5003), params)
    noise = group_noise_ref(params.seed, params.position, 5003, 0)
    best = group_scores_ref(logits.double(), params.temperature, noise).amax(1)
    torch.testing.assert_close(drawn.scores.double(), best, rtol=4e-7, atol=4e-6)
    want = reference(logits.double(), params)
    assert torch.equal(drawn.token_ids[~want.near_tie], want.token[~want.near_tie])


@of_every_dtype
@pytest.mark.parametrize("kind", ["plain", "edit+truncate"])
def test_tokens_equal_the_kernels(kind, dtype):
    case = make_case(6, 300, CPU, kind, dtype, seed=2)
    kernels = sample_from_logits(case.raw, case.params)
    ours, certain = draw(case), ~reference(case.edited, case.params).near_tie
    assert torch.equal(ours.token_ids[certain], kernels.token_ids[certain])
    torch.testing.assert_close(ours.scores[certain], kernels.scores[certain], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limited", [False, True])
def test_tokens_equal_the_kernels_at_any_temperature_with_many_ties(limited):
    """Temperatures uniform in their logarithm, from 1e-6 to 1e30."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (96, 200), generator=g).float()
    logits[::2] += 2.0 ** torch.randint(0, 60, (48, 1), generator=g)
    params = rows_of(logits, temperature=10 ** (36 * torch.rand(96, generator=g) - 6))
    if limited:
        params = dataclasses.replace(params, truncation=limits(96, CPU, 50, 0.9))
    kernels = sample_from_logits(logits, params, return_logprob=True)
    ours = sample_on_cpu(logits, LogitsSpec(200), params, return_logprob=True)
    assert torch.equal(ours.token_ids, kernels.token_ids)
    torch.testing.assert_close(ours.logprobs, kernels.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounding", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_rounded_as_torch_rounds_them(rounding):
    """Float32 of every exponent, ties between two neighbours, tiny and infinite ones."""
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=torch.Generator().manual_seed(0))
    bits[:9000] &= ~0x1FFF if rounding is torch.float16 else ~0xFFFF
    bits[:6000] |= 0x1000 if rounding is torch.float16 else 0x8000
    logits = bits.int().view(torch.float32)[:, None].clone()
    logits[:6] = torch.tensor([65519.0, 65520.0, -65520.0, 2.0**-25, 1.5 * 2.0**-24, -(2.0**-24)])[:, None]
    params = rows_of(logits, temperature=torch.zeros(len(logits)))
    drawn = sample_on_cpu(logits, LogitsSpec(1, logits_dtype=rounding), params)
    want = logits.to(rounding).float()[:, 0]
    want = torch.where(want > float("-inf"), want.clamp(max=LARGEST_LOGIT), float("-inf"))
    assert torch.equal(drawn.scores, want)


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    philox = cpu_path._loops()._philox

    @numba.njit
    def words(index, position, stream, seed):
        return philox(index, position, stream, seed)

    position, seed = counter[1] | counter[2] << 32, key[0] | key[1] << 32
    assert words(*map(np.uint64, (counter[0], position, counter[3], seed))) == answer[:2]


# --- what a token does not depend on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "edit+truncate"])
def test_a_token_does_not_depend_on_the_threads_or_the_batch(kind):
    case = make_case(33, 700, CPU, kind, torch.bfloat16, seed=5)
    together = draw(case)

    def values(drawn: Drawn) -> tuple:
        return drawn.token_ids, drawn.logprobs, drawn.scores, drawn.log_mass

    first = values(together)
    for threads in (2, 3, 100):
        for one, other in zip(first, values(draw(case, threads)), strict=True):
            assert torch.equal(one, other)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draw(case.rows(order)).token_ids, together.token_ids[order])


@pytest.mark.parametrize("openmp", [True, False])
def test_pytorchs_threads_draw_each_row_once(monkeypatch, openmp):
    """Its own, where it uses OpenMP: no thread of Python starts. Elsewhere as many of Python's."""
    case = make_case(33, 700, CPU, "edit+truncate", torch.bfloat16, seed=5)
    want, jobs, make_job = draw(case), [], cpu_path._make_job
    monkeypatch.setattr(cpu_path, "_make_job", lambda *arguments: jobs.append(make_job(*arguments)) or jobs[-1])
    if not openmp:
        monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    cpu_path._openmp.cache_clear()
    cpu_path._pool.cache_clear()
    before, num_threads = set(threading.enumerate()), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        drawn = draw(case, threads=None)
    finally:
        torch.set_num_threads(num_threads)
        cpu_path._openmp.cache_clear()
    assert torch.equal(drawn.token_ids, want.token_ids) and torch.equal(drawn.scores, want.scores)
    assert (len(set(threading.enumerate()) - before) == 0) is openmp
    assert jobs[0]["next_row"] == 33 + 3, "each row once, and each of three threads finds that none is left"


@pytest.mark.parametrize("kind", ["plain", "greedy", "edit"])
def test_ranks_draw_the_token_of_the_whole_vocabulary(kind):
    whole = make_case(33, 1501, CPU, kind, torch.bfloat16, seed=6)
    drawn = draw(whole)
    weight = torch.nn.functional.pad(whole.head.weight, (0, 0, 0, 35), value=float("nan"))
    records = []
    for rank in range(2):
        head = LMHead.of_rank(weight[rank * 768 : (rank + 1) * 768].contiguous(), rank, 2, 1501)
        part = dataclasses.replace(whole, head=head)
        records.append(pack_record(sample_on_cpu(part.raw, head.spec, part.params, return_logprob=True, threads=1)))
    merged = merge_records(torch.cat(records), return_logprob=True)
    assert torch.equal(merged.token_ids, drawn.token_ids) and torch.equal(merged.scores, drawn.scores)
    torch.testing.assert_close(merged.logprobs, drawn.logprobs, rtol=0, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_is_changed_and_logprobs_change_no_token(kind):
    case = make_case(5, 300, CPU, kind, padding=3)
    before = case.raw.clone()
    with_logprobs = draw(case)
    without = sample_on_cpu(case.raw, case.head.spec, case.params)
    assert torch.equal(case.raw.nan_to_num(), before.nan_to_num())
    assert without.logprobs is without.log_mass is None
    assert torch.equal(without.token_ids, with_logprobs.token_ids)


# --- greedy rows, and what is no number -------------------------------------------------------------------------------


@of_every_dtype
def test_greedy_rows_take_the_first_of_equal_maxima(dtype):
    logits = torch.full((5, 4000), -1.0, dtype=dtype)
    for row, ids in enumerate(([0, 1, 3999], [15, 16], [513, 600, 3590], [3998, 3999])):
        logits[row, ids] = 1.25
    logits[4, 40], logits[4, 30] = 0.0, -0.0
    drawn = sample_on_cpu(logits, LogitsSpec(4000), rows_of(logits, temperature=torch.zeros(5)))
    assert drawn.token_ids.tolist() == [0, 15, 513, 3998, 30]
    assert drawn.scores.tolist() == [1.25] * 4 + [0.0]


@pytest.mark.parametrize("kind", ["plain", "greedy", "truncate"])
@of_every_dtype
def test_nan_is_never_drawn_infinity_wins_and_a_row_without_a_token_gives_the_first_id(dtype, kind):
    logits = torch.zeros(5, 403, dtype=dtype)
    logits[:, 10:40], logits[:, 401:] = float("nan"), float("-inf")
    logits[1], logits[2] = float("nan"), float("-inf")
    logits[3, 77] = float("inf")
    params = make_params(5, LogitsSpec(403), CPU, kind)
    drawn = sample_on_cpu(logits, LogitsSpec(403), params, return_logprob=True)
    assert drawn.token_ids[1:4].tolist() == [0, 0, 77]
    assert drawn.log_mass[[1, 2]].tolist() == [[float("-inf"), 0.0]] * 2
    assert drawn.scores[[1, 2]].tolist() == [float("-inf")] * 2
    clean = torch.where(logits > float("-inf"), logits, float("-inf")).double()
    others = torch.tensor([0, 4])
    want = reference(clean[others], take(params, others))
    assert torch.equal(drawn.token_ids[others][~want.near_tie], want.token[~want.near_tie])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limited", [False, True])
def test_logprobs_are_right_and_never_above_0_at_any_temperature(limited, dtype):
    case = peaked(CPU, dtype)
    if limited:
        case = case.with_params(truncation=limits(len(case.hidden), CPU, 50, 0.9))
    drawn, tempered = draw(case), case.edited / case.params.temperature.double()[:, None]
    want = torch.log_softmax(tempered, 1).gather(1, drawn.token_ids[:, None])[:, 0]
    assert drawn.logprobs.max() <= 0
    assert ((drawn.logprobs.double() - want).abs() <= 2e-6 + 4e-7 * want.abs()).all()
    log_mass = torch.logsumexp(tempered, 1)
    # The smallest temperature is 1e-6 in float64, which is no float32.
    assert ((drawn.log_mass.double().sum(-1) - log_mass).abs() <= 2e-6 + 1e-8 * log_mass).all()


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("temperature", [3e38, math.inf, math.nan, 1e-30])
def test_a_temperature_out_of_range_is_that_of_its_nearest_end(temperature, limited):
    """NaN is the largest."""
    case = make_case(16, 400, CPU, "edit+truncate" if limited else "edit", torch.float32, seed=4)
    drawn, end = (
        draw(case.with_params(temperature=torch.full((16,), value)))
        for value in (temperature, 1e-6 if temperature < 1e-6 else 1e30)
    )
    assert torch.equal(drawn.token_ids, end.token_ids) and torch.equal(drawn.logprobs, end.logprobs)
    assert (case.edited.gather(1, drawn.token_ids[:, None]) > -math.inf).all()


# --- edits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bool_mask", [False, True], ids=["words", "bools"])
def test_each_row_has_its_own_combination_of_edits_also_of_views_and_of_one_row_for_all(bool_mask):
    case = make_case(33, 700, CPU, seed=8)
    edits = mixed_edits(33, 700, CPU, bool_mask=bool_mask)
    edited = case.with_params(edits=edits)
    first = draw(edited)
    assert_equal_to_reference(edited, first)

    def view(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.ones(33, tensor.shape[1] + 45, dtype=tensor.dtype)
        buffer[:, 3 : 3 + tensor.shape[1]] = tensor
        return buffer[:, 3 : 3 + tensor.shape[1]]

    views = LogitEdits(view(edits.additive), view(edits.scaling), view(edits.mask), view(edits.bias), edits.rows)
    assert torch.equal(draw(case.with_params(edits=views)).token_ids, first.token_ids)
    shared = case.with_params(edits=LogitEdits(bias=edits.bias[:1].expand(33, 700)))
    assert_equal_to_reference(shared, draw(shared))


@pytest.mark.parametrize("bool_mask", [False, True], ids=["words", "bools"])
def test_rows_that_share_a_row_of_edits_draw_as_if_each_had_its_own(bool_mask):
    case = make_case(24, 700, CPU, "edit+truncate", seed=8)
    per_row, shared = mixed_edits(24, 700, CPU, bool_mask=bool_mask), mixed_edits(8, 700, CPU)
    few = {name: getattr(shared, name) for name in ("additive", "scaling", "bias")}
    each = {name: tensor.repeat_interleave(3, 0) for name, tensor in few.items()}
    one, other = (
        draw(case.with_params(edits=dataclasses.replace(per_row, **given)), threads=2)
        for given in (few | {"repeats": 3}, each)
    )
    assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("words", [0, 1, 9, 12])
def test_ids_beyond_a_short_mask_of_words_are_allowed(words):
    case = make_case(17, 300, CPU)
    mask = pack_bits(torch.rand(17, 12 * 32, generator=torch.Generator().manual_seed(1)) < 0.3)[:, :words]
    masked = case.with_params(edits=LogitEdits(mask=mask.contiguous()))
    assert_equal_to_reference(masked, draw(masked))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e30])
def test_a_finite_bias_of_any_size_neither_opens_nor_closes_a_mask(temperature):
    case, allowed = huge_biases_and_a_mask(CPU, temperature)
    drawn = draw(case)
    assert (drawn.token_ids == allowed).all() and (drawn.logprobs == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_larger_of_two_biases_wins_however_large_both_are(temperature):
    case, larger = two_huge_biases(CPU, temperature)
    assert (draw(case).token_ids == larger).all()


# --- truncation -------------------------------------------------------------------------------------------------------

VALUES = [0.0, 7.0, 5.0, -1.0, 5.0, 6.0, 5.0, 7.0, 5.0, 4.0, -1.0, 5.0, 0.0]
LIMITS = [
    *({"top_k": k} for k in (1, 2, 3, 4, 8, 9)),
    *({"top_p": p} for p in (0.0, 1e-6, 0.5, 0.74, 0.84)),
    *({"min_p": p} for p in (1.5, 0.9, 0.36, 0.13)),
    {"top_k": 4, "top_p": 0.74},
    {"top_k": 4, "top_p": 0.4},
    {"top_k": 3, "top_p": 0.84, "min_p": 0.001},
    {"top_k": 3, "top_p": 0.85, "min_p": 0.001},
]


def assert_tokens_equal_the_reference(case: Case, most_ties: float) -> None:
    """With logprobs, for which the mass of a row is known before its limits, and without."""
    drawn = draw(case)
    assert_equal_to_reference(case, drawn, most_ties)
    assert torch.equal(sample_on_cpu(case.raw, case.head.spec, case.params).token_ids, drawn.token_ids)


@pytest.mark.parametrize("others, num_rows", [(0, 200), (15, 16)], ids=["together", "one in a group"])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_equal_logits_at_a_limit_stay_or_go_together(limit, others, num_rows):
    values = [value for one in VALUES for value in (one, *(-math.inf for _ in range(others)))]
    case = spelled_out(values, num_rows, CPU, temperature=3.0 if "min_p" not in limit else 1.0)
    assert_tokens_equal_the_reference(case.with_params(truncation=limits(num_rows, CPU, **limit)), 0.1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 8.0])
def test_few_and_many_allowed_tokens_equal_the_reference(temperature):
    each = [
        {"top_k": 30},
        {"top_k": 3000},
        {"top_p": 0.1},
        {"top_p": 0.99},
        {"top_k": 700, "top_p": 0.6},
        {"top_k": 700, "top_p": 0.6, "min_p": 1e-4},
        {"top_k": 700, "top_p": 0.6, "min_p": 0.3},
        {"top_p": 0.6, "min_p": 0.02},
        {"min_p": 1e-6},
    ]
    case = make_case(len(each) * 3, 9001, CPU, dtype=torch.float32, seed=5)
    case = case.with_params(
        temperature=torch.full((len(each) * 3,), temperature), truncation=limits_by_row(each * 3, CPU)
    )
    assert_tokens_equal_the_reference(case, 0.3)


def test_many_ties_at_the_limit_are_all_drawn():
    case, tied = ties_apart(16, CPU)
    case = case.with_params(truncation=limits(16, CPU, top_k=20))
    drawn = draw(case)
    assert torch.isin(drawn.token_ids, tied).all() and drawn.token_ids.unique().numel() > 10
    assert_equal_to_reference(case, drawn, 0.01)


@pytest.mark.parametrize("share", [1e-5, -1e-5, 1e-4, -1e-4])
@pytest.mark.parametrize("top_k", [50, 0])
def test_top_p_lets_the_right_tokens_through_at_any_temperature(top_k, share):
    case, fourth = near_a_limit_of_top_p(CPU, top_k, share)
    assert ((draw(case).token_ids == fourth) == (share > 0)).all()


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("logits", torch.zeros(2, 399), r"logits is \(2, 399\).*expected \[B, 400 or more\]"),
        ("logits", torch.zeros(2, 400, dtype=torch.float64), r"logits is .*float64.*bfloat16, float16 or float32"),
        ("logits", torch.zeros(800), r"logits is \(800,\)"),
        ("logits", torch.zeros(400, 2).T, r"logits has strides \(1, 2\); expected rows that are contiguous"),
        ("logits", torch.zeros(2, 400, device="meta"), "logits is on meta; expected it in host memory"),
        ("temperature", torch.zeros(3), r"temperature is \(3,\).*expected contiguous \(2,\) torch.float32"),
        ("seed", torch.zeros(2, dtype=torch.int32), r"seed is .*int32.*expected .*int64"),
        ("threads", 0, "threads is 0; expected 1 or more"),
    ],
)
def test_a_bad_argument_raises_a_value_error_that_names_it_and_what_was_expected(name, value, message):
    logits = torch.zeros(2, 400)
    params = rows_of(logits)
    if name in ("temperature", "seed"):
        params = dataclasses.replace(params, **{name: value})
    with pytest.raises(ValueError, match=message):
        sample_on_cpu(
            value if name == "logits" else logits,
            LogitsSpec(400),
            params,
            threads=value if name == "threads" else None,
        )


def test_there_are_as_many_threads_as_have_ever_worked_at_once():
    """Whatever the batch sizes were."""
    cpu_path._pool.cache_clear()
    before, logits = set(threading.enumerate()), torch.zeros(9, 400)
    for num_rows in range(1, 10):
        sample_on_cpu(logits[:num_rows], LogitsSpec(400), rows_of(logits[:num_rows]), threads=9)
    assert len(set(threading.enumerate()) - before) <= 8


def test_parameters_may_want_gradients_as_logits_may():
    """They get none: a token has no derivative."""
    logits = torch.zeros(2, 400)
    params = rows_of(logits, truncation=limits(2, CPU, 5), edits=LogitEdits(bias=torch.zeros(2, 400)))
    plain = sample_on_cpu(logits, LogitsSpec(400), params).token_ids
    for tensor in (logits, params.temperature, params.truncation.top_p, params.truncation.min_p, params.edits.bias):
        tensor.requires_grad_()
    assert torch.equal(sample_on_cpu(logits, LogitsSpec(400), params).token_ids, plain)


def test_a_truncation_on_a_shard_is_refused_and_no_rows_give_no_tokens():
    logits = torch.zeros(2, 400)
    with pytest.raises(ValueError, match="shards is 2; expected 1"):
        sample_on_cpu(logits, LogitsSpec(400, shards=2), rows_of(logits, truncation=limits(2, CPU, 5)))
    drawn = sample_on_cpu(logits[:0], LogitsSpec(400), rows_of(logits[:0]), return_logprob=True)
    assert drawn.token_ids.shape == drawn.scores.shape == drawn.logprobs.shape == (0,)


def test_without_numba_an_import_error_says_what_to_install(monkeypatch):
    logits = torch.zeros(2, 400)
    monkeypatch.setitem(sys.modules, "sgl_flashsample.cpu_loops", None)
    monkeypatch.delattr("sgl_flashsample.cpu_loops", raising=False)
    cpu_path._loops.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"needs Numba.*pip install '\.\[cpu\]' in a checkout"):
            sample_on_cpu(logits, LogitsSpec(400), rows_of(logits))
    finally:
        cpu_path._loops.cache_clear()


# --- Numba's cache ----------------------------------------------------------------------------------------------------

TRUNCATED = """
import os, shutil, sys, torch
from pathlib import Path
from sgl_flashsample import BatchParams
from sgl_flashsample.cpu_path import sample_on_cpu
from sgl_flashsample.kernels.params import LogitsSpec
from sgl_flashsample.loops_cache import cache_folder
folder = Path(cache_folder())
assert str(folder).startswith(os.environ["NUMBA_CACHE_DIR"])
shutil.copytree(sys.argv[1], folder, dirs_exist_ok=True)
for file in folder.glob("cpu_loops.*.nbi"):
    os.truncate(file, 60)
logits = torch.arange(400.0).expand(1, 400)
row = torch.zeros(1, dtype=torch.int64)
print("drawn", sample_on_cpu(logits, LogitsSpec(400), BatchParams(row.float(), row, row)).token_ids.tolist())
print("left", [file.name for file in folder.glob("cpu_loops.*.nb[ic]")])
"""


@pytest.mark.slow
def test_incomplete_files_of_numbas_cache_are_removed_and_the_loops_compiled_anew(tmp_path):
    """As a full disk leaves them."""
    logits = torch.zeros(1, 400)
    sample_on_cpu(logits, LogitsSpec(400), rows_of(logits))
    command = [sys.executable, "-c", TRUNCATED, loops_cache.cache_folder()]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["drawn [399]", "left []"], done.stderr
    assert f"flashsample: Numba's cache in {tmp_path}" in done.stderr


def test_the_files_of_other_sources_stay_in_numbas_cache(monkeypatch, tmp_path, caplog):
    for name in ("cpu_loops._draw-1.py311.nbi", "cpu_loops._draw-1.py311.1.nbc", "other._draw-1.py311.nbi"):
        (tmp_path / name).touch()
    monkeypatch.setattr(loops_cache, "cache_folder", lambda: str(tmp_path))
    function = numba.njit(cache=True)(_plus)
    loops_cache.leave_cache([function, 1], "cpu_loops", EOFError("Ran out of input"))
    assert [file.name for file in tmp_path.iterdir()] == ["other._draw-1.py311.nbi"]
    function(1)
    assert not function.stats.cache_hits and not function._cache._enabled
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"flashsample: Numba's cache in {tmp_path} cannot be used")
    assert line.endswith("EOFError: Ran out of input")


def _plus(number):
    return number + 1


def test_where_numba_can_write_to_no_folder_the_loops_are_not_kept_and_one_line_says_so(monkeypatch, caplog):
    def no_locator(**options):
        raise RuntimeError("cannot cache function '_philox': no locator available for file 'cpu_loops.py'")

    assert loops_cache.can_cache() and not caplog.records
    monkeypatch.setattr(loops_cache, "njit", no_locator)
    assert not loops_cache.can_cache()
    (line,) = [record.message for record in caplog.records]
    assert "NUMBA_CACHE_DIR names another one" in line


@pytest.mark.parametrize("caches", [True, False])
def test_loops_that_cannot_be_compiled_with_a_cache_are_compiled_without(monkeypatch, caches):
    """Where there is no cache, the error is one of the loops."""
    from sgl_flashsample import cpu_loops

    def compile_loops(kind, cache):
        if cache is caches:
            raise EOFError("Ran out of input")
        return types.SimpleNamespace(address=(kind, cache))

    left = []
    monkeypatch.setattr(cpu_loops, "_CACHES", caches)
    monkeypatch.setattr(cpu_loops, "_sampler_of", compile_loops)
    monkeypatch.setattr(cpu_loops, "leave_cache", lambda functions, name, error: left.append((name, str(error))))
    with contextlib.nullcontext() if caches else pytest.raises(EOFError):
        assert cpu_loops.sampler_of.__wrapped__("int32") == (np.int32, False)
    assert left == [("cpu_loops", "Ran out of input")] * caches


# --- the public functions, without the interpreter --------------------------------------------------------------------


@pytest.mark.slow
def test_the_public_functions_draw_in_host_memory_and_pass_the_check_of_a_starting_server():
    """In a process of its own: this one's kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERPRETER],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


WITHOUT_INTERPRETER = """
import torch
from sgl_flashsample import (
    BatchParams, Head, LMHead, Truncation, WantedLogprobs, argmax, sample, sample_from_logits, verify
)
from sgl_flashsample.cpu_path import sample_on_cpu
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.selfcheck import refuse_wrong

torch.manual_seed(1)
for dtype, options in (
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"logits_dtype": torch.float32}),
):
    head, hidden = LMHead(torch.randn(2003, 64).to(dtype), **options), torch.randn(5, 64).to(dtype)
    logits = (hidden.float() @ head.weight.float().T) if options else hidden @ head.weight.T
    rows = torch.arange(5)
    limits = Truncation(torch.full((5,), 50, dtype=torch.int32), torch.full((5,), 0.9), torch.zeros(5))
    for truncation in (None, limits):
        params = BatchParams(torch.ones(5), rows, rows + 7, truncation)
        want = sample_on_cpu(logits, head.spec, params, return_logprob=True)
        one = sample(hidden, head, params, return_logprob=True)
        for got in (one, sample_from_logits(logits, params, return_logprob=True)):
            assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.logprobs, want.logprobs)
        more = sample(hidden, head, params, logprobs=3)
        assert torch.equal(more.token_ids, want.token_ids)
        torch.testing.assert_close(more.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)  # read with the likeliest
        assert torch.equal(more.top_logprobs.token_ids[:, 0], logits.float().argmax(1))
    prompt = Head(head).logprobs_of(hidden, rows, WantedLogprobs())
    certain = torch.log_softmax(logits.float(), 1).gather(1, rows[:, None])[:, 0]
    torch.testing.assert_close(prompt.of_tokens, certain, rtol=0, atol=1e-4)
    assert torch.equal(argmax(hidden, head), logits.argmax(1))
    alone = [sample(hidden, head, BatchParams(torch.ones(5), rows, rows + 7 + node)).token_ids for node in range(3)]
    nodes, drafts = hidden[:, None].repeat(1, 3, 1), torch.stack([rows, alone[0], alone[1]], 1)
    drafts[0, 1] = (drafts[0, 1] + 1) % 2003
    verified = verify(nodes, head, drafts, BatchParams(torch.ones(5), rows, rows + 7))
    assert verified.num_tokens.tolist() == [1, 3, 3, 3, 3]
    assert torch.equal(verified.token_ids[1:], torch.stack(alone, 1)[1:]) and verified.token_ids[0, 0] == alone[0][0]
    checked = refuse_wrong(head, 16, default_table(head))
    assert checked.reason is None and not checked.refused, checked
"""
