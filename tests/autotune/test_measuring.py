"""The measuring and compiling processes without a GPU. Kernels are interpreted: times mean nothing, tokens are
exact."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import triton
from tune_examples import EDIT, PLAIN, SCREENED, SCREENED_EDIT, SCREENED_GREEDY, SCREENED_TRUNCATE, TRUNCATE

from sgl_flashsample.autotune import baselines, compiling, correctness, launcher, workload
from sgl_flashsample.autotune.compiling import CompilingWorker
from sgl_flashsample.autotune.correctness import CorrectnessCheck
from sgl_flashsample.autotune.errors import IncorrectTokens, error_of
from sgl_flashsample.autotune.gtest import g_test
from sgl_flashsample.autotune.labels import contender, kernel_kind, key_of
from sgl_flashsample.autotune.measuring import COMPILING_LATE, MeasuringWorker
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.autotune.pool import WORKERS, WorkerProcess, ask_once, measuring_process
from sgl_flashsample.autotune.timing import MAX_CALLS, Timer, calls_of_sample, copies_needed, describe_machine, rotated
from sgl_flashsample.autotune.workload import Workload, make_head, make_weight, weight_shape
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.kinds import BATCH_KINDS, BatchKind, path_of
from sgl_flashsample.paths import Parts, launch
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import first_ids
from sgl_flashsample.tables.lookup import device_of
from sgl_flashsample.tables.schema import HeadShape

TILE = TileConfig(16, 256, 64, 4, 1, ctas_per_sm=2, tma=False, flatten=False, reduce_rows=16)
READER = ReadConfig(8, 256, 4, ctas_per_sm=1, reduce_rows=8)
SCREEN = ScreenConfig(16, 256, 64, 4, 1, ctas_per_sm=2, tma=False, flatten=False, chunk=16, rescore_d=64)
# Interpreted, a program costs milliseconds: few of them for many draws.
WIDE_TILE = TileConfig(128, 128, 32, 4, 1, tma=False, flatten=False, reduce_rows=128)
WIDE_READER = ReadConfig(64, 256, 4, ctas_per_sm=1, reduce_rows=64)
WIDE_SCREEN = ScreenConfig(128, 128, 32, 4, 1, tma=False, flatten=False, rescore_v=128, rescore_d=32)
if torch.cuda.is_available():  # compiled, wide blocks take minutes
    WIDE_TILE, WIDE_READER, WIDE_SCREEN = TILE, READER, SCREEN
HEAD = {"vocab": 469, "hidden": 64, "dtype": "fp32", "tp": 1, "softcap": False}


def named(value) -> str:
    return str(value) if isinstance(value, BatchKind) else path_of(value).value


@pytest.fixture(scope="module")
def worker(device):
    return MeasuringWorker(device)


@pytest.fixture(scope="module")
def small(device):
    """The checker of a head of 96 ids."""
    return CorrectnessCheck(LMHead(make_weight(96, 32, torch.float32, device)))


def request(op: str, config, kind, **values) -> dict:
    return {"op": op, "head": HEAD, "kind": str(kind), **contender(config, kind), **values}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, kind",
    [(TILE, PLAIN), (TILE, EDIT), (READER, PLAIN), (READER, EDIT), (SCREEN, SCREENED), (SCREEN, SCREENED_EDIT)],
    ids=named,
)
def test_a_configuration_is_checked_and_timed(worker, config, kind):
    answer = worker.answer(request("trial", config, kind, sizes=[1, 3]))
    assert set(answer["us"]) == {"1", "3"} and all(us > 0 for us in answer["us"].values())
    assert set(answer["seconds"]) == {"check", COMPILING_LATE, "timing"}


def test_a_race_times_its_contenders_and_baselines_and_says_what_cannot_run(worker):
    contenders = [{"name": key_of(config), **contender(config, PLAIN)} for config in (TILE, READER)]
    names = (baselines.GEMM, baselines.ARGMAX, "abacus")
    contenders += [{"name": name, "path": name, "config": None} for name in names]
    answer = worker.answer({"op": "setup", "head": HEAD, "kind": "greedy", "rows": 3, "contenders": contenders})
    assert set(answer["failed"]) == {"abacus"} and "abacus" in answer["failed"]["abacus"]["detail"]
    racing = [key_of(TILE), key_of(READER), *names[:2]]
    answer = worker.answer({"op": "rounds", "names": racing, "rounds": 2, "first": 0})
    assert {name: len(values) for name, values in answer["samples"].items()} == dict.fromkeys(racing, 2)
    assert len(answer["clocks"]) == 2


def test_a_worker_says_what_it_is_and_what_it_cannot(worker):
    hello = worker.answer({"op": "hello"})
    assert {"triton", "torch", "python", "sgl_flashsample"} <= hello["env"].keys() and hello["busy"] >= 0
    assert set(hello["device"]) == {"name", "cc", "sms", "l2_mb", "smem_optin"}
    assert "available" in worker.answer({"op": "baselines"})


# --- correctness


def wrong_tokens(monkeypatch, module, applies=lambda config, params: True, lost=0.0):
    """Every launch of ``module`` that applies draws the neighbour of the right token, with a score that is lower."""

    def off_by_one(config, hidden, params, parts, **options):
        output = launch(config, hidden, params, parts, **options)
        if not applies(config, params):
            return output
        return output._replace(token_ids=output.token_ids ^ 1, scores=output.scores - lost)

    monkeypatch.setattr(f"sgl_flashsample.{module}.launch", off_by_one)


def test_wrong_tokens_are_found_before_anything_is_timed(worker, monkeypatch):
    worker.answer({"op": "ready", "head": HEAD})
    wrong_tokens(monkeypatch, "selfcheck")
    with pytest.raises(IncorrectTokens, match="tokens differ from the reference"):
        worker.answer(request("trial", TILE, PLAIN, sizes=[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, why", [("selfcheck", "tokens differ from the reference"), ("autotune.launcher", "fused")]
)
def test_a_screen_that_loses_the_best_group_is_found_by_either_comparison(small, monkeypatch, module, why):
    """Two comparisons notice it: with the reference on few ids, and with the fused pass on the whole head."""
    wrong_tokens(monkeypatch, module, lambda config, params: isinstance(config, ScreenConfig), lost=1.0)
    with pytest.raises(IncorrectTokens, match=why):
        small.check(SCREEN, SCREENED)


def test_a_configuration_that_fails_leaves_no_scratch_to_the_next(small, monkeypatch):
    uncleared = small._launcher.screen(SCREEN, small.few)

    def fails(*arguments, **options):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(correctness, "difference", fails)
    with pytest.raises(RuntimeError, match="out of resource"):
        small.check(TILE, PLAIN)
    assert small._launcher.screen(SCREEN, small.few) is not uncleared


def test_a_reader_that_is_wrong_for_greedy_batches_alone_is_refused(small, monkeypatch):
    wrong_tokens(monkeypatch, "selfcheck", lambda config, params: params.all_greedy)
    small.check(WIDE_READER, EDIT)
    with pytest.raises(IncorrectTokens, match="tokens differ from the reference"):
        small.check(WIDE_READER, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, kind",
    [(WIDE_TILE, PLAIN), (WIDE_READER, EDIT), (WIDE_SCREEN, SCREENED), (WIDE_SCREEN, SCREENED_EDIT)],
    ids=named,
)
def test_many_draws_follow_the_distribution(small, config, kind):
    p, draws = small.g_test(config, kind, 500, rows=128)
    assert draws == 512 and 1e-4 < p < 1.0


@pytest.mark.slow
def test_truncated_draws_follow_the_truncated_distribution(device):
    check = CorrectnessCheck(LMHead(make_weight(64, 32, torch.float32, device)))
    p, draws = check.g_test(WIDE_READER, TRUNCATE, 100, rows=50)
    assert draws == 100 and 1e-4 < p < 1.0, "1.0 is the p-value of a single cell: nothing tested"


@pytest.mark.slow
def test_draws_of_another_distribution_are_found(small, monkeypatch):
    def even(config, hidden, params, parts):
        output = launch(config, hidden, params, parts)
        return output._replace(token_ids=output.token_ids & ~1)

    monkeypatch.setattr(launcher, "launch", even)
    assert small.g_test(WIDE_TILE, PLAIN, 2000, rows=128)[0] < 1e-4, "20 draws of each id: no cell is pooled"


@pytest.mark.slow
def test_the_g_test_rejects_the_truth_as_often_as_it_says():
    """In thousands of cells of a few draws each, the uncorrected statistic would reject ten times as often."""
    probability = 1 / np.arange(1, 40_001) ** 1.2
    probability /= probability.sum()
    rng = np.random.default_rng(0)
    p = np.array([g_test(rng.multinomial(200_000, probability), probability).p_value for _ in range(300)])
    assert scipy.stats.kstest(p, "uniform").pvalue > 1e-3


def test_the_g_test_is_that_of_the_textbook():
    """Four cells of 100 draws, of which the last two expect 8 together and are pooled."""
    counts, probability = np.array([60, 28, 7, 5]), np.array([0.5, 0.42, 0.05, 0.03])
    g = 2 * (60 * math.log(60 / 50) + 28 * math.log(28 / 42) + 12 * math.log(12 / 8))
    q = 1 + (1 / 50 + 1 / 42 + 1 / 8 - 1 / 100) / (6 * 2)
    found = g_test(counts, probability)
    assert (found.statistic, found.dof) == (pytest.approx(g / q), 2)
    assert found.p_value == pytest.approx(math.exp(-g / q / 2)), "chi-square of two degrees is exponential"


def test_a_draw_that_is_forbidden_fails_the_g_test_and_a_single_cell_tests_nothing():
    """However small the cell that the draw is pooled into."""
    assert g_test(np.array([500, 499, 3, 1]), np.array([0.5, 0.497, 0.003, 0.0])).p_value == 0.0
    assert g_test(np.array([5, 0]), np.array([1.0, 0.0])).p_value == 1.0


@pytest.mark.parametrize("vocab", [40_003, 50_257, 151_936])
def test_a_cut_head_ends_in_a_group_as_full_as_the_whole(vocab):
    head = first_ids(LMHead(torch.empty(vocab, 1).expand(vocab, 1)), 4096)
    assert head.vocab_size % 16 == vocab % 16 and head.vocab_size <= 4096 + 16
    assert head.weight.shape[0] == head.vocab_size


# --- the workload


def test_rows_have_different_profiles_and_a_round_has_states_and_noise_of_its_own_in_every_process(device):
    head = LMHead(make_weight(2048, 64, torch.float32, device))
    batch = Workload(head, 30)
    largest = torch.softmax(batch.hidden @ head.weight.T, -1).amax(-1)
    typical, peaked, flat = (largest[batch.profile == profile].mean() for profile in range(3))
    assert peaked > typical > flat
    hidden, position = batch.hidden.clone(), batch.position.clone()
    batch.refresh(1)
    assert not torch.equal(batch.hidden, hidden)
    assert not set(batch.position.flatten().tolist()) & set(position.flatten().tolist())
    torch.manual_seed(5)
    other = Workload(head, 30)
    assert torch.equal(other.hidden, hidden) and torch.equal(other.position, position)
    other.refresh(1)
    offsets = [each.for_baselines([head], PLAIN).offset for each in (other, batch)]
    assert torch.equal(other.hidden, batch.hidden) and torch.equal(*offsets)


@pytest.mark.parametrize("kind", BATCH_KINDS, ids=str)
def test_a_batch_asks_for_what_its_kind_says_and_reads_its_inputs_in_place(device, kind):
    batch = Workload(LMHead(make_weight(320, 32, torch.float32, device)), 5)
    params = batch.params(kind)
    assert all((one.truncation is not None, one.edits is not None) == (kind.truncate, kind.edit) for one in params)
    assert all(one.all_greedy == kind.greedy and bool((one.temperature > 0).any()) != kind.greedy for one in params)
    assert len({int(one.position[0]) for one in params}) == len(params), "each call of a graph has different noise"
    batch.refresh(3)
    assert batch.params(kind) is params and int(params[0].position[0]) == 3 * len(params)
    if kind.truncate:
        small = params[0].truncation.max_top_k
        assert (small is not None) == kind.screen, "a screen can help only where every top-k is small"


@pytest.mark.slow
def test_rows_with_a_screen_are_of_several_temperatures_and_few_of_their_groups_are_left_to_rescore(device):
    """The weight resembles a model's. With one large channel, the INT8 copy would rule no group out."""
    head = LMHead(make_weight(8192, 1024, torch.float32, device))
    batch = Workload(head, 4)
    params = batch.params(SCREENED)[0]
    assert sorted(set(params.temperature.tolist())) == pytest.approx(sorted(workload.TEMPERATURES))
    assert not batch.params(SCREENED_GREEDY)[0].temperature.any()
    screen = Screen(head, 4)
    config = SCREEN
    if device.type == "cpu":  # few steps for the interpreter
        config = dataclasses.replace(SCREEN, block_v=1024, rescore_v=256, rescore_d=256, block_d=256)
    launch(config, batch.hidden, params, Parts(head, screen=screen))
    assert 4 <= screen.counters[ScreenCounter.CANDIDATES] < 4 * 0.25 * screen.int8_head.num_groups


def test_a_head_is_as_wide_as_a_server_holds_it():
    assert weight_shape(HeadShape(vocab=151_936, hidden=64, dtype="bf16")) == (151_936, 64)
    shape = HeadShape(vocab=50_257, hidden=64, dtype="bf16", softcap=True)
    head = make_head(shape, torch.empty(weight_shape(shape)))
    assert head.weight.shape[0] == 50_304 and head.vocab_size == 50_257 and head.softcap


# --- timing and baselines


def test_contenders_are_timed_side_by_side_each_first_in_turn(device):
    calls: list[str] = []
    timer = Timer(torch.device("cpu"))
    contenders = {name: timer.contender(lambda step, name=name: calls.append(name)) for name in "abc"}
    calls.clear()
    rounds = timer.rounds(contenders, 6, first=0, before_round=lambda index: calls.append(str(index)))
    assert calls[:8] == ["0", "a", "b", "c", "1", "c", "b", "a"] and rounds.clocks == [0.0] * 6
    assert {name: len(us) for name, us in rounds.samples.items()} == dict.fromkeys("abc", 6)
    timing = rounds.timing("a")
    assert timing.n == 6 and timing.us > 0 and timing.se >= 0 and timing.spread >= 0
    assert set(timer.race({"a": lambda step: None}, 2)) == {"a"}
    orders = [rotated("abc", index) for index in range(6)]
    assert [order[0] for order in orders[:3]] == ["a", "c", "b"]
    assert len({tuple(order) for order in orders}) == 6, "each round has another order"
    follows = [order[order.index("a") - 1] for order in orders if order[0] != "a"]
    assert follows.count("b") == follows.count("c"), "a name runs after each other one as often"


@pytest.mark.gpu
def test_a_captured_call_has_the_time_of_a_call_and_its_own_step(device):
    timer, seen = Timer(device), []
    weight = torch.randn(4096, 4096, device=device)
    out = torch.empty_like(weight)

    def call(step):
        seen.append(step)
        torch.mm(weight, weight, out=out)

    graph, eager = timer.contender(call, copies=3), timer.contender(call, graph=False)
    assert graph.calls % 3 == 0 and set(range(graph.calls)) <= set(seen)
    samples = timer.rounds({"graph": graph, "eager": eager}, 15).samples  # others use the GPU: the fastest is of a call
    assert min(samples["graph"]) == pytest.approx(min(samples["eager"]), rel=0.3)
    assert describe_machine(device)["clocks"]["sm_mhz"] >= 0


def test_a_small_head_is_copied_until_it_is_cold():
    weight = torch.empty(16_000, 4096, dtype=torch.bfloat16)
    assert copies_needed(weight, 50 << 20) == 2
    assert copies_needed(weight, 0) == copies_needed(weight) == 1
    assert copies_needed(weight[:1], 50 << 20) == 32, "as many as a graph has calls"


def test_a_sample_reads_each_copy_equally_often_and_is_a_millisecond_long_where_a_graph_has_room():
    for copies in range(1, MAX_CALLS + 1):
        for us in (1.0, 24.0, 333.0, 5000.0):
            calls = calls_of_sample(us, copies)
            assert 0 < calls <= MAX_CALLS and calls % copies == 0, (us, copies)
            assert calls * us >= 1000.0 or calls + copies > MAX_CALLS, (us, copies)


class FakeFlashInfer:
    """Returns the arguments of the call."""

    def sampling_from_logits(self, logits, **noise):
        return "plain", logits, noise

    def top_k_top_p_sampling_from_logits(self, logits, top_k, top_p, **noise):
        return "truncated", logits, top_k, top_p, noise

    def min_p_sampling_from_probs(self, probabilities, min_p, **noise):
        return "min-p", probabilities, min_p, noise


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_baselines_draw_from_the_heads_logits(device, softcap):
    heads = [LMHead(make_weight(320, 32, torch.float32, device) * scale, softcap=softcap) for scale in (1.0, -1.0)]
    batch = Workload(heads[0], 3)
    logits = batch.hidden @ heads[1].weight.T
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    inputs = batch.for_baselines(heads, TRUNCATE)
    every = list(baselines.baselines(inputs, flashinfer=FakeFlashInfer(), compile=lambda function: function))
    assert {one.name for one in every} == {
        *(baselines.GEMM, baselines.ARGMAX, baselines.EXPONENTIAL, baselines.MULTINOMIAL, baselines.FLASHINFER)
    }
    for one in every:
        drawn = one.call(1)  # of the second copy
        if one.name == baselines.GEMM:
            torch.testing.assert_close(drawn, logits)
        elif one.name == baselines.ARGMAX:
            assert torch.equal(drawn, logits.argmax(-1))
        elif one.name == baselines.FLASHINFER:
            torch.testing.assert_close(drawn[1].float(), capped)
            assert drawn[-1]["seed"].tolist() == [1234] and drawn[-1]["offset"].tolist() == [baselines.OFFSETS_PER_CALL]
            if one.draws == baselines.TRUNCATED:
                assert drawn[2].tolist() == [50, 20, 320] and drawn[-1]["filter_apply_order"] == "joint"
        else:
            assert drawn.numel() == 3 and int(drawn.min()) >= 0 and int(drawn.max()) < 320
    inputs = dataclasses.replace(inputs, min_p=torch.full((3,), 0.05, device=device))
    every = list(baselines.baselines(inputs, flashinfer=FakeFlashInfer(), compile=lambda function: function))
    forms = [one.call(1) for one in every if one.draws == baselines.TRUNCATED]
    assert [drawn[0] for drawn in forms] == ["min-p", "min-p"]
    for _, probabilities, min_p, noise in forms:
        torch.testing.assert_close(probabilities, torch.softmax(capped, -1))
        assert min_p is inputs.min_p and noise["offset"].tolist() == [baselines.OFFSETS_PER_CALL]


@pytest.mark.parametrize(
    "kind, names",
    [(PLAIN, ["gemm", "gemm+flashinfer"]), (EDIT, ["gemm"]), (SCREENED_GREEDY, ["gemm", "gemm+argmax"])],
    ids=str,
)
def test_a_race_has_the_baselines_that_draw_what_its_batches_ask_for(kind, names):
    head = HeadShape(vocab=469, hidden=64, dtype="bf16")
    assert baselines.baseline_names(kind, head, flashinfer=True) == names
    assert "gemm+flashinfer" not in baselines.baseline_names(kind, head, flashinfer=False)


# --- errors and compiling


@pytest.mark.parametrize(
    "kind, text, reason, fatal",
    [
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", "runtime", True),
        ("RuntimeError", "Triton Error [CUDA]: misaligned address", "runtime", True),
        ("OutOfResources", "out of resource: shared memory, Required: 300000", "shared_memory", False),
        ("OutOfResources", "out of resource: threads, Required: 2048", "registers", False),
        ("CompilationError", "at 3:4: nonsense\nmore", "compile", False),
        ("RuntimeError", "`ptxas` failed with error code 255", "compile", False),
        ("ValueError", "no such thing", "runtime", False),
    ],
)
def test_every_error_has_a_reason(kind, text, reason, fatal):
    error = error_of(type(kind, (Exception,), {})(text))["error"]
    assert (error["reason"], error["fatal"]) == (reason, fatal) and error["detail"].isprintable()
    incorrect = error_of(IncorrectTokens("3 of 13 tokens differ: illegal"))["error"]
    assert incorrect == {"reason": "incorrect", "detail": "3 of 13 tokens differ: illegal", "fatal": False}


def test_each_head_that_is_compiled_for_has_a_screen_of_its_own(device, monkeypatch):
    """Kernels for truncated rows are compiled for the whole vocabulary and for the smaller one of the comparison. The
    fused pass that a screen is compared with is compiled together with the screen."""
    launched = []

    def launch_once(parts, config, kind):
        rows_of_screen = parts.screen and parts.screen.int8_head.weight.shape[0]
        launched.append((path_of(config).value, parts.lm_head.vocab_size, rows_of_screen))

    monkeypatch.setattr(compiling, "launch_once", launch_once)
    worker = CompilingWorker(device, 1, many_ids=320)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        for config, kind in ((SCREEN, SCREENED_TRUNCATE), (SCREEN, SCREENED), (TILE, TRUNCATE), (READER, PLAIN)):
            answer = worker.answer(request("compile", config, kind))
            assert answer.keys() == {"seconds", "shared", "registers", "spilled"}
    fused = ("fused", 469, None)
    assert launched == [
        *(fused, ("screened", 469, 469), ("screened", 325, 325)),
        *(fused, ("screened", 325, 325)),
        *(("fused", 469, None), ("fused", 325, None)),
        *[("logits", 325, None)] * 2,  # greedy batches have a separate reader
    ]
    assert triton.knobs.compilation.listener is None


def test_what_the_measuring_process_compiles_itself_is_said(device, monkeypatch):
    """Its compile time is reported apart from the time of the check."""
    worker = MeasuringWorker.make({"device": device.type})
    listen = triton.knobs.compilation.listener
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)

    def check(self, config, kind):
        for seconds, cache_hit in ((3.0, False), (9.0, True)):
            times = SimpleNamespace(total=seconds * 1e6)
            listen(src=None, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)

    monkeypatch.setattr(CorrectnessCheck, "check", check)
    seconds = worker.answer(request("trial", TILE, PLAIN, sizes=[1]))["seconds"]
    assert seconds[COMPILING_LATE] == 3.0


SHAPE = {"vocab": 50_257, "hidden": 208, "dtype": "bf16", "tp": 1, "softcap": False}  # a width of these tests alone


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("kind", BATCH_KINDS, ids=str)
def test_a_check_compiles_nothing_that_was_not_compiled_ahead(device, monkeypatch, kind, rows):
    plan = Plan(device_of(device), HeadShape(**SHAPE), EFFORTS["quick"])
    config = plan.default(rows, kind)
    kernels = kernel_kind(kind, path_of(config))  # of which there is a study
    answer = CompilingWorker(device, 1).answer(request("compile", config, kernels) | {"head": SHAPE})
    assert "error" not in answer
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
    )
    shape = HeadShape(**SHAPE)
    CorrectnessCheck(make_head(shape, make_weight(*weight_shape(shape), torch.bfloat16, device))).check(config, kernels)
    assert compiled == []


def test_more_gpus_than_this_process_may_use_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert measuring_process(tmp_path / "log", 1).environment["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(ValueError, match="--gpus is 3 or more; expected at most 2"):
        measuring_process(tmp_path / "log", 2)


@pytest.mark.gpu
def test_the_measuring_process_finds_what_a_compiling_one_has_compiled_in_whatever_order(device, tmp_path, monkeypatch):
    """Two processes, as in a tuning run. A kernel's name on disk must not depend on earlier launches."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    plan = Plan(device_of(device), HeadShape(**SHAPE), EFFORTS["quick"])
    kinds = [PLAIN, SCREENED, SCREENED_TRUNCATE]
    processes = [WorkerProcess(getattr(WORKERS, name), tmp_path / name) for name in ("compiling", "measuring")]
    try:
        for process, op, values, order in zip(
            processes, ("compile", "trial"), ({}, {"sizes": [1]}), (kinds, kinds[::-1]), strict=True
        ):
            for kind in order:
                answer = ask_once(process, request(op, plan.default(1, kind), kind, **values) | {"head": SHAPE}, 120.0)
                assert "error" not in answer and not answer["seconds"].get(COMPILING_LATE)
    finally:
        for process in processes:
            process.end()


@pytest.fixture(scope="module")
def real_check(device):
    """A check that computes the reference's tokens once for all configurations."""
    return CorrectnessCheck(LMHead(make_weight(151_936, 4096, torch.bfloat16, device)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in BATCH_KINDS if kind.screen and not kind.greedy], ids=str)
@pytest.mark.parametrize("rescore", [(64, 64, 8), (32, 256, 4)], ids=str)
@pytest.mark.parametrize("block_b", [16, 64])
def test_a_screen_passes_the_check_whatever_its_rescoring(real_check, block_b, rescore, kind):
    """With 32 ids per step, several warps share one or two groups and must agree on them."""
    config = ScreenConfig(block_b, 64, 256, 8, 4, prefetch=False, listed=True, early=True)
    names = ("rescore_v", "rescore_d", "rescore_warps")
    real_check.check(dataclasses.replace(config, **dict(zip(names, rescore, strict=True))), kind)
