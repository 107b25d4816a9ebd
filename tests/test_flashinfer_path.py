"""The flashinfer path: chosen only where it is allowed and exact, given up for good where it fails. Here FlashInfer is
a stand-in that draws what it is asked for; on a GPU it is itself."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import types
from collections import Counter

import numpy as np
import pytest
import stats
import test_runtime
import test_tune_run
import test_tuning
import torch
from sgl_flashsample.autotune import commands
from sgl_flashsample.autotune.gate import Gate
from sgl_flashsample.autotune.inputs import make_weight
from sgl_flashsample.autotune.race import Policy, certainly_faster
from sgl_flashsample.kernels.features import LogitEdits, Truncation
from sgl_flashsample.kernels.head import LMHead, LogitsSource
from sgl_flashsample.kernels.reference import allowed_ref, transform_ref
from test_rows import request
from tuned_tables import make_table, table_for_this_machine

from sgl_flashsample import Path, flashinfer_path, lookup, resolution, selftest
from sgl_flashsample.api import BatchParams, sample
from sgl_flashsample.choices import Choices
from sgl_flashsample.sglang.rows import Rows
from sgl_flashsample.table import HeadShape, Table, TableError
from sgl_flashsample.tuned import Shape
from sgl_flashsample.work import Work

SIZE, ROWS = 300, 6
surface, runtime, stand_in = test_tune_run.surface, test_tuning.runtime, test_tuning.stand_in


class StandIn:
    """``flashinfer.sampling`` as its documentation says, row by row: one seed and offset for all rows. calls: what it
    was called with. breaks: an exception to raise instead."""

    def __init__(self) -> None:
        self.calls: list[types.SimpleNamespace] = []
        self.breaks: Exception | None = None

    def top_k_top_p_sampling_from_probs(
        self,
        probs,
        top_k,
        top_p,
        indices=None,
        filter_apply_order="top_k_first",
        deterministic=True,
        seed=None,
        offset=None,
    ):
        if self.breaks is not None:
            raise self.breaks
        for tensor in (seed, offset):
            assert tensor.dtype is torch.int64 and tensor.shape == (1,) and tensor.device == probs.device
        assert filter_apply_order == "joint" and deterministic
        assert probs.dtype is torch.float32 and probs.is_contiguous() and top_k.dtype is torch.int32
        self.calls.append(types.SimpleNamespace(seed=int(seed), offset=int(offset), probs=probs, top_k=top_k))
        generator = torch.Generator().manual_seed(hash((int(seed), int(offset))) % 2**63)
        ones, zeros = torch.ones_like(top_p), torch.zeros_like(top_p)
        kept = probs.double() * allowed_ref(probs.double().log(), ones, top_k, top_p, zeros)
        return torch.multinomial(kept.cpu(), 1, generator=generator)[:, 0].int().to(probs.device)


@pytest.fixture
def flashinfer(monkeypatch):
    made = StandIn()
    monkeypatch.setattr(flashinfer_path, "_given_up", [])
    monkeypatch.setattr(flashinfer_path, "_module", lambda: made)
    return made


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(flashinfer_path, "_given_up", [])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)
    flashinfer_path._module.cache_clear()


@pytest.fixture
def head(device):
    generator = torch.Generator().manual_seed(3)
    return LMHead(torch.randn(SIZE, 32, generator=generator).to(device))


@pytest.fixture
def states(device):
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(4)).to(device)


def params(device, rows=ROWS, **changes) -> BatchParams:
    row = torch.arange(rows, device=device)
    limits = Truncation((20 + row).int(), torch.full((rows,), 0.9, device=device), torch.zeros(rows, device=device))
    made = BatchParams(torch.ones(rows, device=device), row * 7919 + 3, row + 5, limits, distribution_only=True)
    return dataclasses.replace(made, **changes)


def allowing(head, *sizes) -> Choices:
    return Choices(Shape.of(head), flashinfer=sizes)


def test_a_batch_takes_it_where_choices_and_caller_allow_it(head, states, device, flashinfer):
    given = params(device)
    out = sample(states, head, given, choices=allowing(head, ROWS))
    assert len(flashinfer.calls) == 1
    assert out.token_ids.dtype is torch.int64 and out.token_ids.shape == out.scores.shape == (ROWS,)
    assert out.logprobs is None
    logits = (states @ head.weight.T).double()
    limits = given.truncation
    allowed = allowed_ref(logits, given.temperature, limits.top_k, limits.top_p, limits.min_p, slack=1e-6)
    assert allowed.gather(1, out.token_ids[:, None]).all()


def test_every_other_batch_has_the_token_of_our_paths(head, states, device, flashinfer):
    given, own = params(device), allowing(head, ROWS)
    edits = LogitEdits(bias=torch.zeros(ROWS, SIZE, device=device), rows=torch.zeros(ROWS, device=device).int())
    cases = [
        (dataclasses.replace(given, distribution_only=False), own, False),
        (dataclasses.replace(given, truncation=None), own, False),
        (dataclasses.replace(given, edits=edits), own, False),
        (given, own, True),
        (given, allowing(head, ROWS + 1), False),
        (given, own.without_flashinfer(), False),
        (given, None, False),
    ]
    for case, choices, logprob in cases:
        want = sample(states, head, dataclasses.replace(case, distribution_only=False), return_logprob=logprob)
        got = sample(states, head, case, choices=choices, return_logprob=logprob)
        assert torch.equal(got.token_ids, want.token_ids)
    assert not flashinfer.calls


def test_as_a_path_of_ones_own_choice_it_says_what_it_cannot_serve(head, states, device, flashinfer):
    given = params(device)
    sample(states, head, given, path=Path.FLASHINFER)
    assert len(flashinfer.calls) == 1
    for changes, why in [
        ({"distribution_only": False}, "its caller has not said distribution_only"),
        ({"truncation": None}, "its rows have no truncation"),
        ({"edits": LogitEdits(bias=torch.zeros(ROWS, SIZE, device=device))}, "its rows have edits"),
    ]:
        with pytest.raises(ValueError, match=f"path is 'flashinfer', which cannot serve this batch: {why}"):
            sample(states, head, dataclasses.replace(given, **changes), path=Path.FLASHINFER)
    with pytest.raises(ValueError, match="logprobs are asked for"):
        sample(states, head, given, path=Path.FLASHINFER, return_logprob=True)
    with pytest.raises(ValueError, match="the head is a shard"):
        sample(states, dataclasses.replace(head, vocab_start=16), given, path=Path.FLASHINFER)
    rounded = dataclasses.replace(head, logits_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cannot serve this head: its GEMM gives torch.float32"):
        sample(states, rounded, given, path=Path.FLASHINFER)
    with pytest.raises(ValueError, match=r"temperature is \(2,\)"):
        sample(states, head, dataclasses.replace(given, temperature=given.temperature[:2]), path=Path.FLASHINFER)


def test_its_noise_is_a_function_of_the_first_row_and_of_nothing_else(head, states, device, flashinfer):
    given = params(device)
    state = torch.get_rng_state()
    first = sample(states, head, given, path=Path.FLASHINFER).token_ids
    torch.manual_seed(1)
    assert torch.equal(sample(states, head, given, path=Path.FLASHINFER).token_ids, first)
    torch.set_rng_state(state)
    sample(states, head, dataclasses.replace(given, position=given.position + 1), path=Path.FLASHINFER)
    sample(states, head, dataclasses.replace(given, seed=given.seed + 1), path=Path.FLASHINFER)
    assert torch.equal(torch.get_rng_state(), state), "PyTorch's generator is not asked"
    one, same, later, other = flashinfer.calls
    assert (one.seed, one.offset) == (same.seed, same.offset) == (3, flashinfer_path.FIRST_OFFSET + 5 * 2**20)
    assert later.offset - one.offset == flashinfer_path.DRAWS_PER_CALL and later.seed == one.seed
    assert other.seed == one.seed + 1


@pytest.mark.parametrize("position", [0, 1, 2**20, 2**29 - 1])
def test_its_counters_are_never_those_of_our_noise(position):
    """cuRAND counts (offset / 4, row), we (index, position, stream and unit), under the same key."""
    first = (flashinfer_path.FIRST_OFFSET + position * flashinfer_path.DRAWS_PER_CALL) % 2**64 // 4
    last = first + flashinfer_path.DRAWS_PER_CALL // 4 - 1
    for counter in (first, last):
        assert 2**29 <= counter >> 32 < 2**32, "our second word is a position, below 2**29"
    assert last < ((flashinfer_path.FIRST_OFFSET + (position + 1) * flashinfer_path.DRAWS_PER_CALL) % 2**64) // 4


def test_its_logits_are_the_models_scaled_capped_and_without_the_padding(device, flashinfer):
    raw = torch.randn(ROWS, SIZE + 20, generator=torch.Generator().manual_seed(5)).bfloat16().to(device) * 4
    given, temperature = params(device), 0.5 + torch.arange(ROWS, device=device) / 4
    limits = Truncation(torch.zeros_like(given.truncation.top_k), given.truncation.top_p, given.truncation.min_p)
    source = LogitsSource(SIZE, 0, 0.7, 5.0, torch.bfloat16)
    kept = raw.clone()
    flashinfer_path.draw_with_flashinfer(raw, source, temperature, given.seed, given.position, limits)
    (call,) = flashinfer.calls
    logits = transform_ref(raw[:, :SIZE].double(), torch.bfloat16, logit_scale=0.7, softcap=5.0)
    want = torch.softmax(logits / temperature.double()[:, None], -1)
    assert torch.allclose(call.probs.double(), want, rtol=1e-5, atol=0)
    assert torch.equal(raw, kept)
    assert call.top_k.tolist() == [SIZE] * ROWS, "a top-k of 0 is off"


def test_no_rows_are_no_call(head, device, flashinfer):
    out = sample(torch.zeros(0, 32, device=device), head, params(device, 0), path=Path.FLASHINFER)
    assert out.token_ids.shape == (0,) and not flashinfer.calls


def test_a_failure_in_a_step_is_one_warning_and_our_own_token_from_then_on(head, states, device, flashinfer, caplog):
    given, own = params(device), allowing(head, ROWS)
    flashinfer.breaks = RuntimeError("no kernel image is available\nmore")
    want = sample(states, head, dataclasses.replace(given, distribution_only=False)).token_ids
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            assert torch.equal(sample(states, head, given, choices=own).token_ids, want)
            flashinfer.breaks = None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "flashsample: our own paths take over from FlashInfer: RuntimeError: no kernel image is available"
    assert not flashinfer.calls
    with pytest.raises(ValueError, match="FlashInfer failed: RuntimeError"):
        sample(states, head, given, path=Path.FLASHINFER)


def test_without_flashinfer_our_paths_serve_its_batches(head, states, device, absent):
    given = params(device)
    want = sample(states, head, dataclasses.replace(given, distribution_only=False)).token_ids
    assert torch.equal(sample(states, head, given, choices=allowing(head, ROWS)).token_ids, want)


# Which batches of a server want the distribution alone.

TRUNCATED = {"top_p": 0.9}


@pytest.mark.parametrize(
    "batch, wanted",
    [
        ([TRUNCATED], True),
        ([TRUNCATED, {"top_k": 50}, {"top_k": 5, "top_p": 0.5, "temperature": 0.3}], True),
        ([TRUNCATED, {}], False),
        ([TRUNCATED, {"top_k": 1}], False),
        ([TRUNCATED, {"top_p": 0.5, "min_p": 0.1}], False),
        ([TRUNCATED, {"top_p": 0.5, "sampling_seed": 7}], False),
        ([TRUNCATED, {"top_p": 0.5, "sampling_seed": 0}], False),
        ([TRUNCATED, {"top_p": 0.5, "sampling_seed": 7, "n": 2}], False),
    ],
)
def test_a_row_that_is_greedy_seeded_plain_or_has_min_p_keeps_the_whole_batch_on_our_noise(batch, wanted):
    rows = Rows.of_requests([request(str(n), **fields) for n, fields in enumerate(batch)], 1, True, "cpu")
    assert rows.distribution_only == wanted
    kept = rows.keep([0], torch.tensor([0]))
    assert kept.distribution_only
    assert kept.followed_by(rows).distribution_only == wanted


# Tables.


def with_flashinfer(table: Table, work: str = "truncate", rows: tuple[int, ...] = (2,)) -> Table:
    buckets = table.classes[work]
    changed = {
        n: dataclasses.replace(b, distribution_only="flashinfer" if n in rows else "") for n, b in buckets.items()
    }
    return dataclasses.replace(table, classes=table.classes | {work: changed})


def table_of(device, head) -> Table:
    return with_flashinfer(table_for_this_machine(device, resolution.head_shape_of(head)))


def test_a_table_says_it_and_a_table_without_it_is_written_as_before(device, head):
    table = table_of(device, head)
    text = table.dumps()
    assert Table.loads(text) == table and not Table.loads(text).notes
    assert text.count("distribution_only") == 1
    assert "distribution_only" not in make_table().dumps()
    other = Table.loads(text.replace('"distribution_only": "flashinfer"', '"distribution_only": "abacus"'))
    assert other.classes["truncate"][2].distribution_only == ""
    assert any("the path 'abacus'" in note for note in other.notes)
    with pytest.raises(TableError, match="distribution_only"):
        Table.loads(text.replace('"distribution_only": "flashinfer"', '"distribution_only": 3'))


def resolved(table: Table, head: LMHead, tp: int = 1) -> resolution.Resolution:
    target = resolution.target_of(head, tp)
    changed = dataclasses.replace(table, head=target.head)
    return resolution.apply(head, target, lookup.Found(changed, "x", "test", lookup.Match.EXACT, ()), [])


def test_its_batches_are_those_of_the_bucket_and_their_other_choices_stay(device, head):
    table = table_of(device, head)
    found, without = resolved(table, head), resolved(with_flashinfer(table, rows=()), head)
    assert found.choices.flashinfer == {2}
    assert found.choices.takes_flashinfer(2, Work.TRUNCATE)
    assert not any(found.choices.takes_flashinfer(2, work) for work in Work if work is not Work.TRUNCATE)
    assert all(found.choices.pick(n, work) == without.choices.pick(n, work) for n in range(1, 20) for work in Work)
    assert found.choices.digest != without.choices.digest == found.choices.without_flashinfer().digest
    assert found.line().endswith("; FlashInfer draws truncated batches of 2 rows without seeds")
    assert "FlashInfer" not in without.line()
    config = found.choices.pick(2, Work.TRUNCATE)
    assert found.choices.without(config, Work.TRUNCATE).flashinfer == {2}
    assert not resolved(table, head, tp=2).choices.flashinfer, "of a shard"
    assert not resolved(with_flashinfer(table_for_this_machine(device, table.head), "plain"), head).choices.flashinfer


def prepared(runtime, head):
    return runtime._prepare(test_runtime.processor(vocab_size=SIZE), test_runtime.head(head.weight), starting=True)


def test_a_starting_server_tries_it_and_leaves_it_out_with_one_warning_where_it_fails(
    stand_in,
    runtime,
    head,
    device,
    tmp_path,
    monkeypatch,
    caplog,
    flashinfer,
):
    path = tmp_path / "table.json"
    table = table_of(device, head)
    path.write_text(dataclasses.replace(table, classes={"truncate": table.classes["truncate"]}).dumps())
    monkeypatch.setenv(lookup.FILE_VARIABLE, str(path))
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        assert prepared(runtime, head).choices.flashinfer
    assert flashinfer.calls and "FlashInfer draws truncated batches of 2 rows" in caplog.text
    caplog.clear()
    flashinfer.breaks = ImportError("libcudart.so.13: cannot open")
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        state = prepared(runtime, head)
    assert not state.choices.flashinfer and state.choices.is_tuned(2, Work.TRUNCATE)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("the table leaves to FlashInfer: ImportError: libcudart.so.13: cannot open")


def test_a_server_leaves_its_batches_to_it_and_none_with_a_seed(
    stand_in,
    runtime,
    head,
    device,
    tmp_path,
    monkeypatch,
    flashinfer,
):
    path = tmp_path / "table.json"
    path.write_text(table_of(device, head).dumps())
    monkeypatch.setenv(lookup.FILE_VARIABLE, str(path))
    state = prepared(runtime, head)
    flashinfer.calls.clear()
    lazy = types.SimpleNamespace(source=state, hidden=torch.zeros(2, 32, device=device))
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    for seed in (None, 7):
        rows = [request("a", top_p=0.9), request("b", top_k=9, sampling_seed=seed)]
        out = runtime.sample(lazy, Rows.of_requests(rows, 1, False, device), None, positions, False)
        assert out.token_ids.shape == (2,) and runtime.problem is None
        assert len(flashinfer.calls) == 1, "the first batch alone"


def test_tokens_that_a_truncation_forbids_are_found_at_the_start(head, flashinfer, monkeypatch):
    assert selftest.flashinfer_problem(head) is None
    draw = flashinfer.top_k_top_p_sampling_from_probs
    monkeypatch.setattr(
        flashinfer, "top_k_top_p_sampling_from_probs", lambda p, *a, **k: draw(p, *a, **k) * 0 + p.argmin(-1).int()
    )
    assert "8 of its 8 tokens are truncated ones" in selftest.flashinfer_problem(head)
    monkeypatch.setattr(flashinfer, "top_k_top_p_sampling_from_probs", lambda p, *a, **k: p.argmax(-1).int() + SIZE)
    assert "tokens are truncated ones" in selftest.flashinfer_problem(head)


# The tuner.


def samples(*ratios: float) -> list[float]:
    return [300.0 * ratio for ratio in ratios]


def test_it_wins_only_for_a_gain_that_is_certain():
    than, clocks = samples(1.0, 1.002, 0.999, 1.001, 1.0, 0.998), [1980.0] * 6
    assert certainly_faster([us * 0.95 for us in than], than, clocks, Policy())
    assert not certainly_faster([us * 0.995 for us in than], than, clocks, Policy()), "less than min_gain"
    noisy = [us * ratio for us, ratio in zip(than, (0.9, 1.1, 0.8, 1.0, 0.85, 1.05), strict=True)]
    assert not certainly_faster(noisy, than, clocks, Policy())
    assert not certainly_faster([], than, clocks, Policy())


def chosen(table: Table) -> Counter:
    return Counter((w, n) for w, found in table.classes.items() for n, b in found.items() if b.distribution_only)


def test_the_tuner_chooses_it_only_when_asked_and_where_it_is_faster(tmp_path, surface):
    path = surface(rivals=True, costs={"flashinfer": {"1": 400.0, "64": 200.0}})
    plain = test_tune_run.tune(tmp_path, path, buckets=(1, 64))
    assert not chosen(plain.table) and "flashinfer" not in plain.table.classes["truncate"][64].others
    asked = test_tune_run.tune(tmp_path, path, buckets=(1, 64), flashinfer=True)
    assert asked.status == "done", "a table that was made without it is not up to date"
    assert chosen(asked.table) == {("truncate", 64): 1}
    bucket = asked.table.classes["truncate"][64]
    assert bucket.others["flashinfer"] == pytest.approx(200, rel=0.02) and bucket.us > 250
    assert bucket.use in asked.table.configs
    again = test_tune_run.tune(tmp_path, path, buckets=(1, 64), flashinfer=True)
    assert again.status == "up to date"
    without = test_tune_run.tune(tmp_path, path, buckets=(1, 64))
    assert without.status == "done" and not chosen(without.table)


def test_it_is_not_chosen_for_a_shard_nor_where_it_is_not_there_nor_with_another_distribution(tmp_path, surface):
    fast = {"costs": {"flashinfer": {"64": 100.0}}, "rivals": True}
    result = test_tune_run.tune(tmp_path / "a", surface(**fast | {"rivals": False}), buckets=(64,), flashinfer=True)
    assert result.status == "done" and not chosen(result.table)
    notes = test_tune_run.Notes()
    biased = surface(**fast, faults={"truncate/flashinfer": "biased"})
    result = test_tune_run.tune(tmp_path / "b", biased, notes, buckets=(64,), flashinfer=True)
    assert result.status == "done" and not chosen(result.table)
    assert any("FlashInfer is not chosen: its G-test" in line for line in notes.lines)
    shard = dataclasses.replace(test_tune_run.HEAD, tp=2)
    options = test_tune_run.Options(
        shard, tmp_path / "c", effort="quick", surface=surface(**fast), buckets=(64,), flashinfer=True
    )
    assert not chosen(test_tune_run.run(options, test_tune_run.Notes()).table)


def test_verify_finds_that_it_is_no_longer_faster(tmp_path, surface):
    result = test_tune_run.tune(
        tmp_path, surface(rivals=True, costs={"flashinfer": {"64": 200.0}}), buckets=(64,), flashinfer=True
    )
    assert chosen(result.table)
    assert (
        test_tune_run.verify(result.table, surface(costs={"flashinfer": {"64": 200.0}}), test_tune_run.Notes())[0] == 0
    )
    now = surface(costs={"flashinfer": {"64": 400.0}})
    code, line, _ = test_tune_run.verify(result.table, now, test_tune_run.Notes())
    assert code == 1 and "truncate 64: flashinfer is at least" in line


def test_the_commands_name_it(tmp_path, surface, capsys, monkeypatch):
    path = surface(rivals=True, costs={"flashinfer": {"64": 200.0}})
    arguments = ["run", "--vocab", "151936", "--hidden", "4096", "--effort", "quick", "--batch-sizes", "64"]
    arguments += ["--surface", path, "--out", str(tmp_path)]
    assert commands.main([*arguments, "--allow-path", "flashinfer", "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["file"]
    assert commands.main(["show", file]) == 0
    assert capsys.readouterr().out.count("flashinfer where no row has a seed") == 1
    place = ["--device", "NVIDIA H200", "--vocab", "151936", "--hidden", "4096", "--batch", "64"]
    monkeypatch.setenv(lookup.FILE_VARIABLE, file)
    assert commands.main(["explain", *place, "--work", "truncate"]) == 0
    assert "; flashinfer where no row has a seed" in capsys.readouterr().out
    assert commands.main(["lint", file]) == 0
    with pytest.raises(SystemExit):
        commands.main([*arguments, "--allow-path", "fused"])
    assert "invalid choice: 'fused'" in capsys.readouterr().err


def test_lint_refuses_it_for_other_work_than_truncation(tmp_path, capsys):
    table = with_flashinfer(make_table(head=HeadShape(128_256, 4096, "bf16")), "plain", (16,))
    path = tmp_path / table.file_name
    path.write_text(table.dumps())
    assert commands.main(["lint", str(path)]) == 1
    assert "classes.plain.16.distribution_only is flashinfer" in capsys.readouterr().out


def test_the_gate_follows_its_draws(device, flashinfer):
    gate = Gate(LMHead(make_weight(160, 32, torch.float32, device)))
    assert 1e-4 < gate.g_test(None, Work.TRUNCATE, 2000, rows=256)[0] < 1.0
    flashinfer.top_k_top_p_sampling_from_probs = lambda p, *a, **k: p.argmax(-1).int()
    assert gate.g_test(None, Work.TRUNCATE, 2000, rows=256)[0] < 1e-4


# On a GPU: FlashInfer itself.


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [129, 50257, 151936])
@pytest.mark.parametrize("top_k, top_p", [(50, 0.9), (0, 0.95), (20, 1.0)])
def test_flashinfer_draws_from_the_references_distribution(vocab, top_k, top_p):
    pytest.importorskip("flashinfer")
    device, rows, calls = torch.device("cuda"), 512, 400
    weight = make_weight(vocab, 64, torch.bfloat16, device)
    head = LMHead(weight)
    hidden = torch.zeros(rows, 64, dtype=weight.dtype, device=device)
    hidden[:, 0] = 8.0  # the column of the head, times a power of two: logits that no sum rounds
    row = torch.arange(rows, device=device)
    temperature = torch.full((rows,), 0.8, device=device)
    limits = Truncation(
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.zeros(rows, device=device),
    )
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    for call in range(calls):
        given = BatchParams(temperature, row * 7919 + 1, row + call, limits, distribution_only=True)
        counts += torch.bincount(sample(hidden, head, given, path=Path.FLASHINFER).token_ids, minlength=vocab)
    logits = weight[None, :, 0].double() * 8.0
    one = [tensor[:1] for tensor in (temperature, limits.top_k, limits.top_p, limits.min_p)]
    # Float32 sums decide about the last token that top-p leaves; either is right.
    surely, perhaps = (allowed_ref(logits, *one, slack=slack)[0] for slack in (-1e-5, 1e-5))
    assert not counts[~perhaps].any()
    probability = torch.softmax(logits / temperature[:1].double()[:, None], -1)[0] * surely
    truth = (probability / probability.sum()).cpu().numpy()
    assert stats.g_test((counts * surely).cpu().numpy(), truth).p_value > 1e-6
    hotter = np.where(truth > 0, truth ** (1 / 1.05), 0.0)
    assert stats.power(rows * calls, truth, hotter / hotter.sum(), 1e-6) > 0.99


@pytest.mark.gpu
def test_flashinfer_is_captured_in_a_graph_and_replays_with_new_noise():
    pytest.importorskip("flashinfer")
    device = torch.device("cuda")
    head = LMHead(make_weight(151936, 64, torch.bfloat16, device))
    hidden = torch.randn(64, 64, device=device).bfloat16()
    given = params(device, 64)
    choices = allowing(head, 64)
    from sgl_flashsample.paths import make_workspace

    workspace = make_workspace(head, 64, choices=choices)
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = sample(hidden, head, given, workspace=workspace, choices=choices).token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(hidden, head, given, workspace=workspace, choices=choices).token_ids
    graph.replay()
    assert torch.equal(out, eager)
    before = out.clone()
    given.position.add_(1)
    graph.replay()
    assert not torch.equal(out, before)
    assert torch.equal(out, sample(hidden, head, given, workspace=workspace, choices=choices).token_ids)
    assert selftest.flashinfer_problem(head) is None
