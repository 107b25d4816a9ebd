"""The check of a starting server: right kernels pass, wrong ones are named, and only wrong configurations are
removed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from core_examples import LONG, ON_PATH, READ, ROWS, TILE, UNSCREENED, VOCAB, WIDE, example, table_of
from kernel_cases import edited_ref

from sgl_flashsample import BatchParams, LMHead, paths, sample, selfcheck
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.kernels import rng
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig
from sgl_flashsample.kernels.params import Edit
from sgl_flashsample.kinds import BATCH_KINDS, KIND_NAMES, PLAIN, BatchKind
from sgl_flashsample.paths import Parts
from sgl_flashsample.screen import Screen

pytestmark = pytest.mark.slow
SCREENED = KIND_NAMES["plain+screen"]
KIND_ON_PATH = {"fused": PLAIN, "logits": PLAIN, "screened": SCREENED}


@pytest.fixture
def head(device):
    return example(device).head


@pytest.fixture
def normal_weight(device):
    """Like a model's weight: its dot products are rounded."""
    return torch.randn(700, 48, generator=torch.Generator().manual_seed(0)).to(device)


def screen_for(kind: BatchKind, head: LMHead, rows: int) -> Screen | None:
    return Screen(head, rows) if kind.screen else None


@pytest.fixture
def broken(monkeypatch):
    """Makes launches with a configuration draw the token after the right one, draw with another noise, leave another
    logit behind, or raise. kinds: of the batches for which it does."""

    def break_it(config, how="shift", kinds=BATCH_KINDS):
        launch = selfcheck.launch

        def broken_launch(used, hidden, params, parts, **keywords):
            kind = BatchKind(params.truncation is not None, params.edits is not None)
            wrong = used == config and kind in {other.unscreened for other in kinds}
            with monkeypatch.context() as patched:
                if wrong and how == "noise":
                    patched.setattr(rng, "SAMPLE", tl.constexpr(rng.SAMPLE.value + 3))
                output = launch(used, hidden, params, parts, **keywords)
            if not wrong or how == "noise":
                return output
            if how == "raise":
                raise RuntimeError("out of resource: shared memory\nmore")
            if how == "logit":
                parts.workspace.last_buffer.logits[0, 3] += 1
                return output
            return output._replace(token_ids=(output.token_ids + 1) % parts.lm_head.vocab_size)

        monkeypatch.setattr(selfcheck, "launch", broken_launch)

    return break_it


@pytest.mark.parametrize(
    "options, chunk, config",
    [
        ({}, 97, TILE),
        ({"vocab_size": 601}, 64, READ),
        pytest.param({"softcap": 5.0, "logit_scale": 0.5}, 5000, WIDE, marks=pytest.mark.full),
        pytest.param({"softcap": 5.0, "logit_scale": 0.5}, 97, LONG, marks=pytest.mark.full),
        ({"vocab_start": 320, "shards": 2}, 97, LONG),
    ],
    ids=["whole", "padded", "softcap", "softcap, read", "shard"],
)
def test_right_kernels_pass_whatever_the_head_and_the_chunk_of_the_reference(
    normal_weight, monkeypatch, options, chunk, config
):
    monkeypatch.setattr(selfcheck, "CHUNK_IDS", chunk)
    head = LMHead(normal_weight, **options)
    table = table_of(head, UNSCREENED, {1: config})
    assert selfcheck.refuse_wrong(head, 1, table, Screen(head, 1)).fault is None


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"softcap": 5.0, "logit_scale": 0.5}, marks=pytest.mark.full)],
    ids=["plain", "softcap"],
)
def test_whole_rows_of_logits_are_checked_as_sample_from_logits_draws_them(device, monkeypatch, options):
    drawn = set()

    def noted(config, hidden, params, parts, **keywords):
        drawn.add((config, params.truncation is None, params.edits is None))
        return paths.launch(config, hidden, params, parts, **keywords)

    monkeypatch.setattr(selfcheck, "launch", noted)
    assert selfcheck.compare_rows_with_reference(601, 640, torch.float32, device, 4, **options) is None
    assert len({(plain, unedited) for _, plain, unedited in drawn}) == 4
    assert all(isinstance(config, ReadConfig) for config, *_ in drawn)
    monkeypatch.setattr(selfcheck, "difference", lambda *arguments, **keywords: "3 of 4 tokens differ")
    reason = selfcheck.compare_rows_with_reference(601, 640, torch.float32, device, 4, **options)
    assert reason.startswith("3 of 4 tokens differ with ReadConfig(")


@pytest.mark.full
def test_right_kernels_pass_at_every_size_of_batch(normal_weight):
    head = LMHead(normal_weight)
    table = table_of(head, UNSCREENED, dict(enumerate((TILE, READ, WIDE, LONG), 1)))
    assert selfcheck.refuse_wrong(head, 70, table, Screen(head, 40)).fault is None


def test_a_dead_head_of_zeros_does_not_stop_a_server(device):
    head = LMHead(torch.zeros(700, 48, device=device))
    assert selfcheck.refuse_wrong(head, 4, default_table(head)).fault is None


def test_every_choice_of_every_kind_is_drawn_with_as_batches_draw(head, monkeypatch):
    """With and without logprobs, and truncated ones also on the whole vocabulary: its size is compiled in."""
    drawn, launch = set(), selfcheck.launch

    def note(config, hidden, params, parts, **keywords):
        kind = BatchKind(params.truncation is not None, params.edits is not None, params.all_greedy)
        kind = kind._replace(screen=isinstance(config, ScreenConfig)).launched(config)
        drawn.add((kind, config, parts.lm_head.vocab_size, keywords["return_logprob"]))
        return launch(config, hidden, params, parts, **keywords)

    monkeypatch.setattr(selfcheck, "launch", note)
    monkeypatch.setattr(selfcheck, "compile_ahead", lambda *arguments, **keywords: None)
    monkeypatch.setattr(selfcheck, "MAX_IDS", 128)
    table, wanted = table_of(head, UNSCREENED, {1: TILE, 2: READ}), set()
    assert selfcheck.refuse_wrong(head, 2, table, Screen(head, 2)).fault is None
    fewest_ids = 128 + VOCAB % 16  # the last group is as full as the whole vocabulary's
    for kind in BATCH_KINDS:
        for rows in (1, 2):
            config = table.lookup(rows, kind)
            sizes = {fewest_ids, VOCAB} if kind.truncate and config == table.lookup(1, kind) else {fewest_ids}
            logprobs = (False,) if isinstance(config, ScreenConfig) else (False, True)
            wanted |= {(kind.launched(config), config, size, one) for size in sizes for one in logprobs}
    assert drawn == wanted


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("path", ON_PATH)
def test_kernels_with_another_noise_are_caught_on_every_path(head, broken, path, rows):
    """A configuration that single rows alone take is drawn with more of them: the right token of one row, greedy or
    peaked, says nothing of the noise."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter: a compiled kernel keeps its constants")
    config, kind = ON_PATH[path], KIND_ON_PATH[path]
    broken(config, how="noise", kinds=[kind])
    table, screen = table_of(head, [kind], {rows: config}), screen_for(kind, head, ROWS)
    (line,) = selfcheck.refuse_wrong(head, ROWS, table, screen=screen).refused
    assert f"tokens differ from the reference with {config} ({kind})" in line


@pytest.mark.parametrize(
    "path, kind",
    [(path, kind) for path in ("fused", "logits") for kind in UNSCREENED[:4]]
    + [("screened", kind) for kind in BATCH_KINDS[5:9]],
    ids=str,
)
def test_a_launch_that_draws_another_token_is_named_with_its_configuration_and_its_kind(head, broken, path, kind):
    config = ON_PATH[path]
    broken(config, kinds=[kind])
    reason = selfcheck.refuse_wrong(head, 3, table_of(head, [kind], {3: config}), screen_for(kind, head, 3)).fault
    assert f"tokens differ from the reference with {config} ({kind})" in reason


@pytest.mark.parametrize("path", ON_PATH)
def test_a_launch_that_leaves_another_logit_to_a_truncation_is_named(head, broken, path):
    kind = KIND_NAMES["truncate"]._replace(screen=path == "screened")
    broken(ON_PATH[path], how="logit")
    reason = selfcheck.refuse_wrong(
        head, 1, table_of(head, [kind], {1: ON_PATH[path]}), screen_for(kind, head, 1)
    ).fault
    assert reason.startswith("logits of 1 of 4 rows differ from the reference with")


@pytest.mark.parametrize("how", ["shift", "raise"])
@pytest.mark.parametrize("path", ON_PATH)
def test_a_tuned_configuration_that_fails_gives_its_batches_back_and_is_named(head, broken, path, how):
    config, kind = ON_PATH[path], KIND_ON_PATH[path]
    table, screen = table_of(head, [kind], {1: config, 2: WIDE}), screen_for(kind, head, 3)
    if how == "shift":
        assert selfcheck.refuse_wrong(head, 2, table, screen=screen) == selfcheck.Checked(table, None, ())
    broken(config, how=how)
    checked = selfcheck.refuse_wrong(head, 2, table, screen=screen)
    assert checked.reason is None and checked.unscreened is None
    (line,) = checked.refused
    assert line.endswith(f"with {config} ({kind})") and "\n" not in line
    assert ("tokens differ" if how == "shift" else "RuntimeError: out of resource: shared memory with") in line
    assert checked.table.lookup(1, kind) == table.default(1, kind) and checked.table.lookup(2, kind) == WIDE


def test_a_configuration_is_taken_out_of_the_kinds_that_launch_it_and_left_to_the_others(head, broken):
    broken(TILE, kinds=[PLAIN])
    table = table_of(head, UNSCREENED, {1: TILE})
    checked = selfcheck.refuse_wrong(head, 1, table)
    assert checked.reason is None and len(checked.refused) == 1
    for kind in UNSCREENED:
        still_tuned = kind.truncate or kind.edit
        assert checked.table.lookup(1, kind) == (TILE if still_tuned else table.default(1, kind))


def test_a_built_in_choice_of_the_fused_pass_that_fails_is_a_reason_not_to_serve(head, broken):
    default = default_table(head).lookup(1)
    broken(default)
    checked = selfcheck.refuse_wrong(head, 9, default_table(head))
    assert "tokens differ" in checked.reason and str(default) in checked.reason and checked.refused == ()
    broken(TILE)  # and where it would have to take the place of a tuned one
    checked = selfcheck.refuse_wrong(head, 1, table_of(head, [PLAIN], {1: TILE}))
    assert str(default) in checked.reason and len(checked.refused) == 1 and str(TILE) in checked.refused[0]


def test_a_built_in_screen_that_fails_switches_the_screen_off_and_nothing_else(head, broken, monkeypatch):
    head = head if head.weight.device.type == "cpu" else LMHead(head.weight.bfloat16())  # has a built-in screen there
    table, screen = table_of(head, UNSCREENED, {1: TILE}), Screen(head, 1)
    broken(table.lookup(1, SCREENED), kinds=[SCREENED])
    reasons = [selfcheck.refuse_wrong(head, 1, table, screen=screen)]

    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(selfcheck, "Screen", full)  # for the check's own copy
    reasons.append(selfcheck.refuse_wrong(head, 1, table, screen=screen))
    for checked, words in zip(reasons, ("tokens differ", "OutOfMemoryError: CUDA out of memory."), strict=True):
        assert checked.reason is None and checked.refused == ()
        assert words in checked.unscreened and "with ScreenConfig(" in checked.unscreened
        assert checked.table.screened_rows(1) == 0
        assert checked.table.lookup(1, SCREENED) == TILE == checked.table.lookup(1)


@pytest.mark.parametrize("bool_mask", [False, True], ids=["bits", "bools"])
def test_edits_of_every_kind_are_all_in_the_first_row_and_are_what_the_reference_says(device, bool_mask):
    case, row = example(device, rows=16), torch.arange(16, device=device)
    edits, edited = selfcheck.edits_of_every_kind(row, case.head, bool_mask=bool_mask)
    assert edits.mask_is_bool == bool_mask and sorted(edits.rows.tolist()) == list(range(16)) and edits.rows[0] == 15
    wanted = edited(case.edited)
    columns = {name: getattr(edits, name)[:, :VOCAB] for name in ("additive", "scaling", "bias")}
    if bool_mask:
        columns["mask"] = edits.mask[:, :VOCAB]
    assert torch.equal(wanted, edited_ref(case.edited, dataclasses.replace(edits, **columns)))
    params = BatchParams(row * 0.0, row, row, edits=edits)
    assert torch.equal(sample(case.hidden, case.head, params).token_ids, wanted.argmax(-1))


def test_bits_are_packed_in_the_order_of_ids():
    allowed = torch.rand(3, 75, generator=torch.Generator().manual_seed(0)) < 0.5
    words = selfcheck.pack_bits(allowed)
    assert words.shape == (3, 3) and words.dtype is torch.int32
    assert [[int(word[i // 32]) >> (i % 32) & 1 for i in range(75)] for word in words] == allowed.int().tolist()


def test_a_reader_takes_its_logits_from_the_vendors_gemm(normal_weight):
    """The reader's reference starts from the same GEMM. A fused pass may sum in another order, within a tolerance."""
    head = LMHead(normal_weight)
    fused, read = (selfcheck.expect(head, 3, PLAIN, reads=reads) for reads in (False, True))
    assert torch.equal(read.low, read.high) and torch.equal(read.logits, (read.hidden @ head.weight.T).double())
    assert (fused.low < fused.high).any() and ((fused.low <= read.logits) & (read.logits <= fused.high)).all()


def test_nothing_is_compiled_ahead_where_kernels_are_interpreted(head, monkeypatch):
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(selfcheck, "launch", lambda *arguments, **keywords: pytest.fail("launched"))
    selfcheck.compile_ahead([Parts.of(head, screen=Screen(head, 64))], 64, default_table(head))


@pytest.fixture
def compiler(monkeypatch) -> list:
    """A process with a compiler, without interpreter. Returns what is compiled ahead: the shards of the head, the kind
    of batch, whether its grammars have masks of dtype bool, and whether these are its only edits."""
    compiled: list = []
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(selfcheck, "draws_in_host_memory", lambda device: False)
    monkeypatch.setattr(triton, "AsyncCompileMode", lambda pool, **options: contextlib.nullcontext(), raising=False)

    def launch_once(parts, config, kind, *arguments, bool_mask=False, only_mask=False) -> None:
        compiled.append((parts.lm_head.shards, kind, bool_mask, only_mask))

    monkeypatch.setattr(selfcheck, "launch_once", launch_once)
    return compiled


def test_of_a_head_that_ranks_share_no_truncation_is_compiled_as_only_whole_rows_are_truncated(compiler, device):
    whole = LMHead(torch.zeros(64, 16, device=device))
    shard = LMHead(whole.weight, shards=2)
    selfcheck.compile_ahead([Parts.of(whole), Parts.of(shard)], 4, default_table(whole))
    truncated = {shards: {kind.truncate for of, kind, *_ in compiler if of == shards} for shards in (1, 2)}
    assert truncated == {1: {True, False}, 2: {False}}


def draws_ignoring_masks(launch: Callable) -> Callable:
    """``launch``, but with no mask that is alone."""

    def launched(config, hidden, params, parts, **options):
        if params.edits is not None and params.edits.given == Edit.MASK:
            params = dataclasses.replace(params, edits=None)
        return launch(config, hidden, params, parts, **options)

    return launched


@pytest.mark.parametrize("bool_masks", [True, False])
def test_masks_of_dtype_bool_are_compiled_for_where_a_grammar_may_have_them(compiler, device, bool_masks):
    head = LMHead(torch.zeros(64, 16, device=device))
    selfcheck.compile_ahead([Parts.of(head)], 4, default_table(head), bool_masks=bool_masks)
    edited = {kind for _, kind, *_ in compiler if kind.edit}
    for alone in (False, True):
        of_bools = {kind for _, kind, bool_mask, only_mask in compiler if bool_mask and only_mask is alone}
        assert of_bools == (edited if bool_masks else set())
        assert {kind for _, kind, bool_mask, only_mask in compiler if kind.edit and only_mask is alone} == edited


def test_kernels_of_a_mask_alone_are_compared_with_the_reference(head, monkeypatch):
    """A draw of other tokens where a mask is the only edit is found."""
    monkeypatch.setattr(selfcheck, "launch", draws_ignoring_masks(selfcheck.launch))
    assert "differ from the reference" in (selfcheck.refuse_wrong(head, 1, default_table(head)).reason or "")


def test_a_triton_without_parallel_compilation_compiles_nothing_ahead_and_nobody_is_warned(
    compiler, device, monkeypatch, caplog
):
    monkeypatch.delattr(triton, "AsyncCompileMode")
    head = LMHead(torch.zeros(64, 16, device=device))
    with caplog.at_level(logging.DEBUG, "sgl_flashsample"):
        selfcheck.compile_ahead([Parts.of(head)], 4, default_table(head))
    assert compiler == []
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and "kernels are not compiled ahead: AttributeError" in record.message


@pytest.mark.gpu
def test_the_check_compiles_nothing_that_was_not_compiled_ahead(device, monkeypatch):
    compiled = []
    head = LMHead(torch.randn(50_257, 80, device=device, dtype=torch.bfloat16))  # another hidden size than elsewhere
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
    )
    short = LMHead(head.weight[: selfcheck.MAX_IDS])
    selfcheck.compile_ahead([Parts.of(head), Parts.of(short)], 65, default_table(head))
    assert compiled
    compiled.clear()
    assert selfcheck.refuse_wrong(head, 65, default_table(head)).fault is None and compiled == []
