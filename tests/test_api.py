"""The public function, and the table lookup behind it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from problems import reference
from sgl_flashsample.kernels.features import Edit
from sgl_flashsample.kernels.reference import lm_head_sample_ref, logits_ref
from sgl_flashsample.kernels.tiles import ReadConfig

import sgl_flashsample
from sgl_flashsample import (
    BatchParams,
    LMHead,
    LogitEdits,
    Path,
    SampleOutput,
    Screen,
    Truncation,
    Workspace,
    sample,
    sample_from_logits,
    tuned,
)
from sgl_flashsample.choices import Choices
from sgl_flashsample.paths import make_workspace
from sgl_flashsample.tuned import TABLE, WORK_TABLE, Shape, tile_for
from sgl_flashsample.work import ANY_BATCH, Work


def problem(device, rows=9, vocab=600, hidden=32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=generator).to(device)
    weight = torch.randn(vocab, hidden, generator=generator).to(device)
    row = torch.arange(rows, device=device)
    params = BatchParams((row % 3 * 0.5).float(), row * 17, row + 3)
    return states, weight, params


def test_sample_draws_the_references_tokens_and_logprobs(device):
    states, weight, params = problem(device)
    out = sample(states, weight, params, return_logprob=True)
    want = lm_head_sample_ref(states, weight, params.temperature, params.seed, params.position)
    assert isinstance(out, SampleOutput)
    sure = ~want.near_tie
    assert torch.equal(out.token_ids[sure], want.token[sure])
    assert (out.logprobs[sure] >= want.logprob_low[sure] - 1e-4).all()
    assert (out.logprobs[sure] <= want.logprob_high[sure] + 1e-4).all()
    assert (out.token_ids.dtype, out.logprobs.dtype, out.scores.dtype) == (torch.int64, torch.float32, torch.float32)


def features(device, rows=9, vocab=600):
    row = torch.arange(rows, device=device)
    truncation = Truncation((row % 4 * 5).int(), 1.0 - row % 2 * 0.3, (row % 5 == 4) * 0.1)
    bias = torch.zeros(rows, vocab, device=device)
    bias[:, ::7] = 2.5
    return truncation, LogitEdits(bias=bias, rows=(row % 3 * 4).int())  # Edit.BIAS in rows 2, 5 and 8


@pytest.mark.parametrize("truncated, edited", [(True, False), (False, True), (True, True)])
def test_sample_truncates_and_edits_as_the_reference_does(device, truncated, edited):
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-2, 3, (9, 32), generator=generator).float().to(device)
    weight = (torch.randint(-1, 2, (600, 32), generator=generator) / 4).float().to(device)  # exact dot products
    _, _, plain = problem(device)
    truncation, edits = features(device)
    params = dataclasses.replace(plain, truncation=truncation if truncated else None, edits=edits if edited else None)
    out = sample(states, weight, params, return_logprob=True)
    logits = logits_ref(states, weight).float()
    if edited:
        logits = torch.where((edits.rows & Edit.BIAS != 0)[:, None], logits + edits.bias, logits)
    options = {"temperature": params.temperature, "seed": params.seed, "position": params.position}
    want = reference(logits, options, params.truncation)
    sure = ~want.near_tie
    assert sure.sum() >= 7
    assert torch.equal(out.token_ids[sure], want.token[sure])
    torch.testing.assert_close(out.logprobs.double()[sure], want.logprob_low[sure], rtol=0, atol=1e-4)
    unaffected = sample(states, weight, plain).token_ids
    assert not torch.equal(out.token_ids, unaffected)


@pytest.mark.parametrize("options", [{}, {"vocab_size": 577}, {"softcap": 4.0}, {"logit_scale": 0.5}], ids=str)
@pytest.mark.parametrize("featured", [False, True], ids=["plain", "truncated and edited"])
def test_every_path_draws_the_same_tokens(device, options, featured):
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-2, 3, (9, 32), generator=generator).float().to(device)
    weight = (torch.randint(-1, 2, (600, 32), generator=generator) / 4).float().to(device)  # exact dot products
    head, params = LMHead(weight, **options), problem(device)[2]
    if featured:
        truncation, edits = features(device)
        params = dataclasses.replace(params, truncation=truncation, edits=edits)
    outs = [sample(states, head, params, return_logprob=True, path=path) for path in (None, *ANY_BATCH)]
    raw = states @ weight.T
    keywords = {"vocab_size": head.vocab_size, "softcap": head.softcap, "logit_scale": head.logit_scale}
    outs.append(sample_from_logits(raw, params, return_logprob=True, **keywords))
    for out in outs[1:]:
        assert torch.equal(out.token_ids, outs[0].token_ids)
        torch.testing.assert_close(out.logprobs, outs[0].logprobs, rtol=0, atol=1e-4)


def test_logits_from_elsewhere_are_sampled_without_a_head(device):
    _, _, params = problem(device)
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    options = {"temperature": params.temperature, "seed": params.seed, "position": params.position}
    want = reference(logits, options)
    sure = ~want.near_tie
    assert torch.equal(sample_from_logits(logits, params).token_ids[sure], want.token[sure])
    workspace = Workspace(512 * 9, device)
    assert torch.equal(sample_from_logits(logits, params, workspace=workspace).token_ids[sure], want.token[sure])
    with pytest.raises(ValueError, match=r"logits is \(9, 700\).*expected \[B, 701 or more\]"):
        sample_from_logits(logits, params, vocab_size=701)


def test_a_path_that_cannot_serve_a_head_says_so_and_is_never_chosen(device):
    states, weight, params = problem(device)
    head = LMHead(weight.bfloat16(), logits_dtype=torch.float32)
    works = [work for work in Work if not work.screened]
    assert all(tuned.path_for(head, rows, work) is Path.FUSED for rows in (1, 100, 4096) for work in works)
    with pytest.raises(ValueError, match=r"path is 'logits', which cannot serve this head: .*bfloat16.*float32"):
        sample(states.bfloat16(), head, params, path=Path.LOGITS)
    with pytest.raises(ValueError, match=r"hidden is .*expected \[B, 32\]"):
        sample(states[:, :16], weight, params, path=Path.LOGITS)


def test_the_path_follows_the_number_of_rows_on_a_gpu_and_is_the_fused_one_elsewhere(device, monkeypatch):
    head = LMHead(torch.zeros(1000, 32, device=device, dtype=torch.bfloat16))
    if device.type == "cpu":
        assert tuned.path_for(head, 4096) is Path.FUSED
    for family, most in (("sm90", tuned.PATHS["sm90", 2, Work.PLAIN]), ("sm80", tuned.FUSED_ROWS)):
        monkeypatch.setattr(tuned, "family_of", lambda _, family=family: family)
        assert tuned.path_for(head, most) is Path.FUSED
        assert tuned.path_for(head, most + 1) is Path.LOGITS
        assert tuned.path_for(head, most, Work.GREEDY) is Path.FUSED
        assert tuned.path_for(head, most + 1, Work.GREEDY) is Path.LOGITS


def test_scratch_for_a_range_of_batches_is_not_allocated_again(device):
    states, weight, params = problem(device)
    head = LMHead(weight)
    read = ReadConfig(2, 64, 4)
    own = Choices(Shape.of(head), {Work.PLAIN: dict.fromkeys(range(4, 10), read)})
    workspace = make_workspace(head, 9, choices=own)
    buffer = workspace.gemm(9, 600, torch.float32)
    assert buffer.stride() == (608, 1), "rows start at multiples of 16 elements"
    for rows in (1, 4, 9):
        cut = BatchParams(params.temperature[:rows], params.seed[:rows], params.position[:rows])
        for path in (None, Path.LOGITS):
            sample(states[:rows], head, cut, workspace=workspace, path=path, choices=own)
    assert workspace.gemm(9, 600, torch.float32).data_ptr() == buffer.data_ptr()
    assert workspace.gemm(10, 600, torch.float32).untyped_storage().nbytes() == 2 * 9 * 608 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("path", [Path.FUSED, Path.LOGITS, Path.SCREENED])
def test_a_captured_graph_follows_its_truncation_and_its_edits(device, path):
    states, weight, plain = problem(device)
    states, weight = states.bfloat16(), weight.bfloat16()
    truncation, edits = features(device)
    params, head = dataclasses.replace(plain, truncation=truncation, edits=edits), LMHead(weight)
    logprobs = path is not Path.SCREENED
    options = {"return_logprob": logprobs, "workspace": Workspace(10_000, device), "path": path}
    options["screen"] = None if logprobs else Screen(head, len(states))
    eager = sample(states, head, params, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(states, head, params, **options)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out.token_ids, eager.token_ids)
        assert not logprobs or torch.equal(out.logprobs, eager.logprobs)
    truncation.top_k.fill_(1)
    edits.bias.zero_()
    edits.bias[:, 40] = 1000.0
    edits.rows.fill_(int(Edit.BIAS))
    graph.replay()
    assert out.token_ids.tolist() == [40] * 9


def test_a_head_object_and_a_reused_workspace_change_nothing(device):
    states, weight, params = problem(device)
    plain = sample(states, weight, params)
    assert plain.logprobs is None
    head, workspace = LMHead(weight), Workspace(10_000, device)
    for _ in range(2):
        assert torch.equal(sample(states, head, params, workspace=workspace).token_ids, plain.token_ids)


def test_wrong_arguments_raise_value_errors(device):
    states, weight, params = problem(device)
    with pytest.raises(ValueError, match=r"hidden is .*expected \[B, 32\]"):
        sample(states[:, :16], weight, params)
    with pytest.raises(ValueError, match="seed is"):
        sample(states, weight, BatchParams(params.temperature, params.seed.float(), params.position))


def test_importing_the_package_loads_neither_torch_nor_triton():
    code = (
        "import sys, sgl_flashsample; print([m for m in ('torch', 'triton', 'optuna', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sgl_flashsample.nonsense


def test_every_public_name_is_there():
    for name in sgl_flashsample.__all__:
        assert getattr(sgl_flashsample, name) is not None


def test_the_table_grows_with_the_batch_and_its_last_entry_serves_the_rest():
    for entries in (*TABLE.values(), *WORK_TABLE.values()):
        limits = [limit for limit, _ in entries]
        assert limits == sorted(set(limits))
        assert all(tile.block_b >= 16 for _, tile in entries)


def test_work_is_named_by_its_features():
    for truncates in (False, True):
        for edits in (False, True):
            work = Work.of(truncates, edits)
            assert (work.truncates, work.edits) == (truncates, edits)
            assert work is not Work.GREEDY
    assert Work.of(False, False, greedy=True) is Work.GREEDY
    assert Work.of(False, True, greedy=True) is Work.EDIT, "the kernel edits, greedy or not"
    assert not (Work.GREEDY.truncates or Work.GREEDY.edits)


def test_work_without_an_entry_of_its_own_takes_the_tiles_of_a_plain_draw():
    assert ("sm100", 4, Work.EDIT) not in WORK_TABLE
    assert tuned.tile_in("sm100", 4, 17, Work.EDIT) == tuned.tile_in("sm100", 4, 17, Work.PLAIN)
    assert tuned.tile_in("sm90", 2, 64, Work.GREEDY) == tuned.tile_in("sm90", 2, 64, Work.PLAIN)
    assert tuned.reader_in(64, Work.GREEDY) == tuned.reader_in(64, Work.PLAIN)
    assert tuned.tile_in("sm90", 2, 64, Work.TRUNCATE) == WORK_TABLE["sm90", 2, Work.TRUNCATE][-1][1]


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 512, 4096])
def test_every_batch_size_has_a_tile(device, rows):
    head = LMHead(torch.zeros(1000, 32, device=device))
    assert tile_for(head, rows).block_v % 16 == 0


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_each_entry_serves_batches_up_to_its_limit_and_the_next_one_from_there(key):
    entries = TABLE[key]
    for (limit, tile), following in zip(entries, [*entries[1:], entries[-1]], strict=True):
        assert tuned.tile_in(*key, limit, Work.PLAIN) == tile
        assert tuned.tile_in(*key, limit + 1, Work.PLAIN) == following[1]
