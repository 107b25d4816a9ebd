"""What measures, without a GPU: the same calls, interpreted; their times mean nothing, their tokens do."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import stats
import torch
import triton
from sgl_flashsample.autotune import builtin, compiling, gpu, inputs, rivals
from sgl_flashsample.autotune.compiling import CompileBench
from sgl_flashsample.autotune.gate import Gate, first_ids, g_test
from sgl_flashsample.autotune.names import key_of, label_of, path_of
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.autotune.remote import Crew, Remote, work_until
from sgl_flashsample.autotune.trials import Log, config_data, config_of, read
from sgl_flashsample.autotune.worker import Incorrect, error_of
from sgl_flashsample.kernels.head import LMHead
from sgl_flashsample.kernels.int8_head import Counted
from sgl_flashsample.kernels.tiles import ReadConfig, ScreenConfig, TileConfig

from sgl_flashsample import Screen, resolution
from sgl_flashsample.table import HeadShape
from sgl_flashsample.work import Work

TILE = TileConfig(16, 256, 64, 4, 1, ctas_per_sm=2, tma=False, flatten=False, reduce_rows=16)
# Interpreted, a program costs milliseconds: few of them for many draws.
WIDE_TILE = TileConfig(128, 128, 32, 4, 1, tma=False, flatten=False, reduce_rows=128)
WIDE_READER = ReadConfig(64, 256, 4, ctas_per_sm=1, reduce_rows=64)
READER = ReadConfig(8, 256, 4, ctas_per_sm=1, reduce_rows=8)
SCREEN = ScreenConfig(16, 256, 64, 4, 1, ctas_per_sm=2, tma=False, flatten=False, chunk=16, rescore_d=64)
WIDE_SCREEN = ScreenConfig(128, 128, 32, 4, 1, tma=False, flatten=False, rescore_v=128, rescore_d=32)
HEAD = {"vocab": 469, "hidden": 64, "dtype": "fp32", "tp": 1, "softcap": False}


def named(name: str) -> type[Exception]:
    """An exception of Triton's, which need not be importable here."""
    return type(name, (Exception,), {})


@pytest.fixture(scope="module")
def bench(device):
    return gpu.GpuBench(device)


def request(op: str, config, work: str, **values) -> dict:
    found = {"op": op, "head": HEAD, "path": path_of(config), "config": config_data(config), "work": work}
    return {**found, "label": label_of(config, work), **values}


@pytest.mark.parametrize("config", [TILE, READER], ids=path_of)
@pytest.mark.parametrize("work", ["plain", "edit"])
def test_a_configuration_is_checked_and_timed(bench, config, work):
    answer = bench.answer(request("trial", config, work, batches=[1, 3]))
    assert set(answer["us"]) == {"1", "3"} and all(us > 0 for us in answer["us"].values())
    assert answer["checked"] == "tokens"


@pytest.mark.parametrize("work", ["plain+screen", "edit+screen"])
def test_a_screened_configuration_is_checked_and_timed(bench, work):
    answer = bench.answer(request("trial", SCREEN, work, batches=[1, 3]))
    assert set(answer["us"]) == {"1", "3"} and answer["checked"] == "tokens"


def test_a_race_times_its_contenders_and_rivals_and_says_what_cannot_run(bench):
    entries = [{"name": key_of(c), "path": path_of(c), "config": config_data(c)} for c in (TILE, READER)]
    entries += [{"name": name, "path": name, "config": None} for name in (rivals.GEMM, rivals.ARGMAX, "abacus")]
    answer = bench.answer({"op": "setup", "head": HEAD, "work": "greedy", "batch": 3, "entries": entries})
    assert set(answer["failed"]) == {"abacus"} and "abacus" in answer["failed"]["abacus"]["detail"]
    names = [key_of(TILE), key_of(READER), rivals.GEMM, rivals.ARGMAX]
    answer = bench.answer({"op": "rounds", "names": names, "rounds": 2, "first": 0})
    assert {name: len(values) for name, values in answer["samples"].items()} == dict.fromkeys(names, 2)
    assert len(answer["clocks"]) == 2


def test_wrong_tokens_are_found_before_anything_is_timed(bench, monkeypatch):
    bench.answer({"op": "ready", "head": HEAD})
    draw = gpu.lm_head_sample
    monkeypatch.setattr("sgl_flashsample.selftest.lm_head_sample", lambda *a, **k: (draw(*a, **k)[0] ^ 1, None, None))
    with pytest.raises(Incorrect, match="tokens differ from the reference"):
        bench.answer(request("trial", dataclasses.replace(TILE, ctas_per_sm=1), "plain", batches=[1]))


@pytest.mark.parametrize("where", ["selftest", "autotune.gate"], ids=["reference", "fused pass"])
def test_a_screen_that_loses_the_best_group_is_found_by_either_comparison(device, monkeypatch, where):
    """With the reference on few ids, and with the fused pass on the whole head."""

    def lossy(*arguments, **options):
        drawn = true(*arguments, **options)
        return drawn._replace(token=drawn.token ^ 16, score=drawn.score - 1)

    gate = Gate(LMHead(inputs.make_weight(96, 32, torch.float32, device)))
    gate.check(SCREEN, Work.SCREENED)
    true = gpu.screened_sample
    monkeypatch.setattr(f"sgl_flashsample.{where}.screened_sample", lossy)
    with pytest.raises(Incorrect, match="tokens differ from the reference" if where == "selftest" else "fused pass's"):
        gate.check(SCREEN, Work.SCREENED)


def test_a_reader_that_is_wrong_for_greedy_batches_alone_is_refused(device, monkeypatch):
    def wrong(*arguments, all_greedy=False, **options):
        token, score, logprob = read(*arguments, all_greedy=all_greedy, **options)
        return token ^ int(all_greedy), score, logprob

    read = gpu.sample_logits
    monkeypatch.setattr("sgl_flashsample.selftest.sample_logits", wrong)
    gate = Gate(LMHead(inputs.make_weight(96, 32, torch.float32, device)))
    gate.check(WIDE_READER, Work.EDIT)
    with pytest.raises(Incorrect, match="tokens differ from the reference"):
        gate.check(WIDE_READER, Work.PLAIN)


@pytest.mark.parametrize(
    "config, work",
    [
        (WIDE_TILE, Work.PLAIN),
        (WIDE_READER, Work.EDIT),
        (WIDE_SCREEN, Work.SCREENED),
        (WIDE_SCREEN, Work.SCREENED_EDIT),
    ],
)
def test_many_draws_follow_the_distribution(device, config, work):
    gate = Gate(LMHead(inputs.make_weight(96, 32, torch.float32, device)))
    p, draws = gate.g_test(config, work, 1000, rows=128)
    assert draws == 1024 and p > 1e-4


def test_truncated_draws_follow_the_truncated_distribution(device):
    gate = Gate(LMHead(inputs.make_weight(160, 32, torch.float32, device)))
    p, draws = gate.g_test(WIDE_READER, Work.TRUNCATE, 160, rows=40)
    assert draws == 160 and 1e-4 < p < 1.0, "1.0 is the p-value of a single cell: nothing tested"


def test_draws_of_another_distribution_are_found(device, monkeypatch):
    gate = Gate(LMHead(inputs.make_weight(96, 32, torch.float32, device)))
    draw = gpu.lm_head_sample
    biased = lambda *a, **k: (draw(*a, **k)[0] & ~1, None, None)  # noqa: E731
    monkeypatch.setattr("sgl_flashsample.autotune.gate.lm_head_sample", biased)
    assert gate.g_test(WIDE_TILE, Work.PLAIN, 2000, rows=128)[0] < 1e-4, "20 draws of each id: no cell is pooled"


def test_the_g_test_rejects_the_truth_as_often_as_it_says():
    """Thousands of cells, most of them of a few draws: where the plain statistic is wrong ten times as often."""
    probability = 1 / np.arange(1, 40_001) ** 1.2
    probability /= probability.sum()
    rng = np.random.default_rng(0)
    truth = torch.tensor(probability)
    p = np.array([g_test(torch.tensor(rng.multinomial(200_000, probability)), truth) for _ in range(500)])
    assert scipy.stats.kstest(p, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("cells, draws", [(3, 1000), (5000, 200_000)])
def test_the_g_test_is_that_of_the_textbook(cells, draws):
    rng = np.random.default_rng(cells)
    probability = 1 / np.arange(1, cells + 1) ** 1.2
    probability /= probability.sum()
    counts = rng.multinomial(draws, probability)
    expected = stats.g_test(counts, probability).p_value
    assert g_test(torch.tensor(counts), torch.tensor(probability)) == pytest.approx(expected, rel=1e-6)
    counts[-1] += 1
    impossible = torch.tensor(np.append(probability[:-1], 0.0) / probability[:-1].sum())
    assert g_test(torch.tensor(counts), impossible) == 0.0


@pytest.mark.parametrize("vocab", [40_003, 50_257, 151_936])
def test_a_cut_head_ends_in_a_group_as_full_as_the_whole(vocab):
    head = LMHead(torch.empty(vocab, 1).expand(vocab, 1))
    cut = first_ids(head, 4096)
    assert cut.vocab_size % 16 == vocab % 16 and cut.vocab_size <= 4096 + 16
    assert cut.weight.shape[0] == cut.vocab_size


def test_rows_have_different_profiles_and_a_round_has_states_and_noise_of_its_own_in_every_process(device):
    head = LMHead(inputs.make_weight(2048, 64, torch.float32, device))
    batch = inputs.Batch(head, 30)
    logits = batch.hidden @ head.weight.T
    largest = torch.softmax(logits, -1).amax(-1)
    typical, peaked, flat = (largest[batch.profile == profile].mean() for profile in range(3))
    assert peaked > typical > flat
    hidden, position = batch.hidden.clone(), batch.position.clone()
    batch.refresh(1)
    assert not torch.equal(batch.hidden, hidden)
    assert not set(batch.position.flatten().tolist()) & set(position.flatten().tolist())
    torch.manual_seed(5)
    other = inputs.Batch(head, 30)
    assert torch.equal(other.hidden, hidden) and torch.equal(other.position, position)
    other.refresh(1)
    assert torch.equal(other.hidden, batch.hidden) and torch.equal(other.rival_offset, batch.rival_offset)


def test_rows_with_a_screen_are_of_several_temperatures_and_few_of_their_groups_are_left_to_rescore(device):
    """As a model's: were one channel of the head large, its INT8 copy would rule nothing out."""
    torch.manual_seed(0)
    head = LMHead(inputs.make_weight(8192, 1024, torch.float32, device))
    batch = inputs.Batch(head, 4)
    temperature = batch.temperature(Work.SCREENED)
    assert sorted(set(temperature.tolist())) == pytest.approx(sorted(inputs.TEMPERATURES))
    assert not batch.temperature(Work.SCREENED_GREEDY).any()
    screen = Screen(head, 4)
    if device.type == "cuda":
        config = SCREEN
    else:  # few steps for the interpreter
        config = dataclasses.replace(SCREEN, block_v=1024, rescore_v=256, rescore_d=256, block_d=256)
    params = (temperature, batch.seed, batch.position[0])
    gpu.screened_sample(batch.hidden, head, screen.int8_head, *params, config, workspace=screen.workspace)
    assert 4 <= screen.counters[Counted.CANDIDATES] < 4 * 0.25 * screen.int8_head.num_groups


def test_a_small_head_is_copied_until_it_is_cold():
    weight = torch.empty(16_000, 4096, dtype=torch.bfloat16)
    assert inputs.copies_needed(weight, 50 << 20) == 2
    assert inputs.copies_needed(weight, 0) == 1


@pytest.mark.parametrize(
    "error, why, fatal",
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "runtime", True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "runtime", True),
        (
            type("OutOfResources", (Exception,), {})("out of resource: shared memory, Required: 300000"),
            "shared_memory",
            False,
        ),
        (type("OutOfResources", (Exception,), {})("out of resource: threads, Required: 2048"), "registers", False),
        (type("CompilationError", (Exception,), {})("at 3:4: nonsense\nmore"), "compile", False),
        (RuntimeError("`ptxas` failed with error code 255"), "compile", False),
        (Incorrect("3 of 13 tokens differ"), "incorrect", False),
        (ValueError("no such thing"), "runtime", False),
    ],
)
def test_every_error_has_a_reason(error, why, fatal):
    found = error_of(error)["error"]
    assert (found["why"], found["fatal"]) == (why, fatal)
    assert found["detail"].isprintable()


def test_a_process_that_cannot_start_is_given_up_with_the_place_of_its_log(tmp_path):
    remote = Remote("measuring", {"bench": "surface", "file": "/nonexistent"}, tmp_path / "log")
    answers = []

    def job():
        answers.append((yield {"op": "hello"}, 5.0))

    crew = Crew([remote])
    crew.add(job())
    work_until([crew], lambda: bool(answers))
    crew.end()
    assert "no surface in /nonexistent" in answers[0]["error"]["detail"]


def test_a_log_survives_a_line_that_was_cut_short_and_goes_on(tmp_path):
    path = tmp_path / "trials.jsonl"
    log = Log(path, {"device": "x"}, resume=True)
    log.add("trial", value=1)
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "trial", "val')
    log = Log(path, {"device": "x"}, resume=True)
    assert [event["value"] for event in log.of("trial")] == [1]
    log.add("trial", value=2)
    log.close()
    assert [event.get("value") for event in read(path)] == [None, 1, 2]
    assert not Log(path, {"device": "y"}, resume=True).events
    assert (tmp_path / "trials.old").exists()


@pytest.mark.parametrize("config", [TILE, READER, SCREEN], ids=path_of)
def test_a_configuration_is_what_its_data_say(config):
    assert config_of(path_of(config), config_data(config)) == config
    with pytest.raises(ValueError, match="path is 'abacus'; expected one of fused, logits, screened"):
        config_of("abacus", config_data(config))


def test_a_screen_is_compiled_ahead_of_its_measurement(device):
    bench = CompileBench(device, 1)
    answer = bench.answer(request("compile", SCREEN, "edit+screen"))
    assert {"seconds", "shared", "registers", "spilled"} <= set(answer), answer


def test_each_head_that_is_compiled_for_has_a_screen_of_its_own(device, monkeypatch):
    """Truncated rows are compiled for the whole vocabulary and for the one that tokens are compared on; a screen's
    rival is compiled with it."""
    launched = []

    def launch(head, config, work, return_logprob, *, screen=None):
        launched.append((path_of(config), head.vocab_size, screen and screen.int8_head.weight.shape[0]))

    monkeypatch.setattr(compiling, "launch_once", launch)
    monkeypatch.setattr(compiling, "MANY_IDS", 320)
    bench = CompileBench(device, 1)
    bench._use(HEAD)
    bench._compile(SCREEN, Work.SCREENED_TRUNCATE)
    bench._compile(SCREEN, Work.SCREENED)
    bench._compile(TILE, Work.TRUNCATE)
    bench._compile(READER, Work.PLAIN)
    rival = ("fused", 469, None)
    assert launched == [
        *(rival, ("screened", 469, 469), ("screened", 325, 325)),
        *(rival, ("screened", 325, 325)),
        *(("fused", 469, None), ("fused", 325, None)),
        *[("logits", 325, None)] * 2,  # a greedy batch's reader is one of its own
    ]
    assert triton.knobs.compilation.listener is None


def test_what_the_measuring_process_compiles_itself_is_said(bench, monkeypatch):
    """A compiler's time that looked like a check's would be searched for in the check."""

    def check(self, config, work):
        bench._listen(src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=3e6), cache_hit=False)
        bench._listen(src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=9e6), cache_hit=True)

    monkeypatch.setattr(Gate, "check", check)
    seconds = bench.answer(request("trial", TILE, "plain", batches=[1]))["seconds"]
    assert seconds[gpu.LATE] == 3.0 and set(seconds) == {"check", gpu.LATE, "timing"}


@pytest.mark.gpu
@pytest.mark.parametrize("rows_", [8, 512])
@pytest.mark.parametrize("work", Work)
def test_a_check_compiles_nothing_that_was_not_compiled_ahead(device, monkeypatch, work, rows_):
    shape = {"vocab": 50_257, "hidden": 208, "dtype": "bf16", "tp": 1, "softcap": False}  # a width of this test alone
    plan = Plan(resolution.device_of(device), HeadShape(50_257, 208, "bf16"), EFFORTS["quick"])
    config, ahead = plan.default(rows_, work), CompileBench(device, 1)
    kernels = builtin.kernels_of(work, config)  # of which there is a study
    answer = ahead.answer(request("compile", config, kernels.value) | {"head": shape})
    assert "error" not in answer
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
    )
    Gate(LMHead(inputs.make_weight(50_257, 208, torch.bfloat16, device))).check(config, kernels)
    assert compiled == []


@pytest.mark.gpu
def test_the_measuring_process_finds_what_a_compiling_one_has_compiled_in_whatever_order(device, tmp_path, monkeypatch):
    """Two processes, as in a run: what a kernel is called on disk must not depend on what was launched before it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    plan = Plan(resolution.device_of(device), HeadShape(50_257, 256, "bf16"), EFFORTS["quick"])
    shape = {"vocab": 50_257, "hidden": 256, "dtype": "bf16", "tp": 1, "softcap": False}
    works = [Work.PLAIN, Work.SCREENED, Work.SCREENED_TRUNCATE]
    answers = []

    def ask(op, work, **values):
        answers.append((yield request(op, plan.default(1, work), work.value, **values) | {"head": shape}, 120.0))

    compilers = Crew([Remote("compiling", {"bench": "compiling", "processes": 1}, tmp_path / "compiling.log")])
    gpus = Crew([Remote("measuring", {"bench": "gpu"}, tmp_path / "measuring.log")])
    for work in works:
        compilers.add(ask("compile", work))
    for work in reversed(works):
        gpus.add(ask("trial", work, batches=[1]))
    try:
        for crew in (compilers, gpus):
            work_until([crew], lambda crew=crew: not crew.pending)
    finally:
        compilers.end()
        gpus.end()
    assert not [answer for answer in answers if "error" in answer]
    assert [answer["seconds"][gpu.LATE] for answer in answers[len(works) :]] == [0.0] * len(works)


@pytest.fixture(scope="module")
def real_gate(device):
    """What is to be drawn is computed once for all configurations."""
    return Gate(LMHead(inputs.make_weight(151936, 4096, torch.bfloat16, device)))


@pytest.mark.gpu
@pytest.mark.parametrize("work", [work for work in Work if work.screened and not work.greedy], ids=str)
@pytest.mark.parametrize("terms, rescore", [(1, (64, 64, 8)), (2, (64, 64, 8)), (2, (32, 256, 4))], ids=str)
@pytest.mark.parametrize("block_b", [16, 64])
def test_a_screen_passes_the_gate_however_many_groups_it_leaves(real_gate, block_b, terms, rescore, work):
    """One term leaves many groups, and many truncated rows to the whole head; 32 ids per step are one group or two of
    which several warps have to make the same."""
    names = ("rescore_v", "rescore_d", "rescore_warps")
    config = ScreenConfig(block_b, 64, 256, 8, 4, terms=terms, prefetch=False, listed=True, early=True)
    real_gate.check(dataclasses.replace(config, **dict(zip(names, rescore, strict=True))), work)
