"""The tuner on heads in float8_e4m3fn with a scale per row: what it measures, compares and leaves out."""

from __future__ import annotations

import pytest
import torch
import triton
from tune_examples import A100, EDIT, H200, PLAIN, TRUNCATE

from sgl_flashsample import LMHead, paths
from sgl_flashsample.autotune import compiling
from sgl_flashsample.autotune.baselines import GEMM, baseline_names
from sgl_flashsample.autotune.compiling import CompilingWorker
from sgl_flashsample.autotune.correctness import CorrectnessCheck
from sgl_flashsample.autotune.errors import IncorrectTokens
from sgl_flashsample.autotune.labels import contender, key_of
from sgl_flashsample.autotune.measuring import MeasuringWorker
from sgl_flashsample.autotune.plan import EFFORTS, Plan, StudyKey
from sgl_flashsample.autotune.space import FUSED, MAX_EDITED_CLASS, TILE_CLASSES, Limits, Space
from sgl_flashsample.autotune.workload import Workload, copy_of, make_weight, quantize_rows, random_head
from sgl_flashsample.defaults import HeadTraits, default_config
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.reference import dequantize_ref
from sgl_flashsample.kinds import BATCH_KINDS, BatchKind, path_of
from sgl_flashsample.tables.lookup import head_shape_of, load_table
from sgl_flashsample.tables.schema import HeadShape

E4M3 = torch.float8_e4m3fn
HEAD = {"vocab": 469, "hidden": 64, "dtype": "e4m3", "tp": 1, "softcap": False}
LARGE = HeadShape(vocab=151_936, hidden=4096, dtype="e4m3")
TILE = TileConfig(16, 256, 64, 4, 1, ctas_per_sm=2, tma=False, flatten=False, reduce_rows=16)
READER = ReadConfig(8, 256, 4, ctas_per_sm=1, reduce_rows=8)
WIDE_TILE = TileConfig(128, 128, 32, 4, 1, tma=False, flatten=False, reduce_rows=128)
if torch.cuda.is_available():  # compiled, a wide tile takes minutes
    WIDE_TILE = TILE


@pytest.fixture(scope="module")
def worker(device):
    return MeasuringWorker(device)


def named(value) -> str:
    return str(value) if isinstance(value, BatchKind) else path_of(value).value


def request(op: str, config, kind, **values) -> dict:
    return {"op": op, "head": HEAD, "kind": str(kind), **contender(config, kind), **values}


# --- the head and its batches


def test_the_largest_number_of_each_row_is_that_of_the_dtype_and_the_others_are_as_near_as_it_allows(device):
    weight = make_weight(700, 64, torch.bfloat16, device)
    quantised, scale = quantize_rows(weight)
    assert quantised.dtype is E4M3 and scale.dtype is torch.float32
    assert (quantised.float().abs().amax(1) == 448).all()
    error = (dequantize_ref(quantised, scale) - weight.double()).abs()
    half_step = torch.maximum(weight.double().abs() * 2.0**-4, scale[:, None].double() * 2.0**-10)
    assert (error <= half_step * 1.001).all()


def test_a_batch_has_hidden_states_of_the_dtype_that_the_head_takes(device):
    head = random_head(HeadShape(**HEAD), device)
    assert head.weight.dtype is E4M3 and Workload(head, 3).hidden.dtype is head.hidden_dtype is torch.bfloat16
    assert head_shape_of(head) == HeadShape(**HEAD)


def test_a_copy_of_a_head_shares_no_memory_with_it(device):
    head = random_head(HeadShape(**HEAD), device)
    copy = copy_of(head)
    assert torch.equal(copy.weight.float(), head.weight.float()) and torch.equal(copy.scale, head.scale)
    assert copy.weight.data_ptr() != head.weight.data_ptr() and copy.scale.data_ptr() != head.scale.data_ptr()


# --- measuring


@pytest.mark.slow
@pytest.mark.parametrize("config, kind", [(TILE, PLAIN), (TILE, EDIT), (READER, PLAIN)], ids=named)
def test_a_configuration_is_checked_and_timed(worker, config, kind):
    assert all(us > 0 for us in worker.answer(request("trial", config, kind, sizes=[1, 3]))["us"].values())


def test_a_kernel_that_leaves_the_scale_out_is_found_before_it_is_timed(device, monkeypatch):
    check, right = CorrectnessCheck(random_head(HeadShape(**HEAD), device)), paths.lm_head_sample

    def without_scale(hidden, head, *arguments, **options):
        return right(hidden, LMHead(head.weight, head.spec, scale=torch.ones_like(head.scale)), *arguments, **options)

    monkeypatch.setattr(paths, "lm_head_sample", without_scale)
    with pytest.raises(IncorrectTokens, match="tokens differ from the reference"):
        check.check(TILE, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, EDIT], ids=str)
def test_many_draws_follow_the_distribution_of_the_dequantised_weights(device, kind):
    small = CorrectnessCheck(random_head(HeadShape(vocab=96, hidden=32, dtype="e4m3"), device))
    p, draws = small.g_test(WIDE_TILE, kind, 500, rows=128)
    assert draws == 512 and 1e-4 < p < 1.0


def test_a_baseline_is_left_out_of_a_race_by_its_name_and_the_rest_is_timed(worker):
    contenders = [{"name": key_of(TILE), **contender(TILE, PLAIN)}, {"name": GEMM, "path": GEMM, "config": None}]
    answer = worker.answer({"op": "setup", "head": HEAD, "kind": "plain", "rows": 3, "contenders": contenders})
    assert answer["failed"].keys() == {GEMM} and "is torch.float8_e4m3fn; expected" in answer["failed"][GEMM]["detail"]
    answer = worker.answer({"op": "rounds", "names": [key_of(TILE)], "rounds": 1, "first": 0})
    assert answer["samples"].keys() == {key_of(TILE)}


@pytest.mark.parametrize("kind", BATCH_KINDS, ids=str)
def test_no_race_asks_for_a_baseline(kind):
    assert baseline_names(kind, LARGE, flashinfer=True) == []


def test_a_compiling_process_has_the_scale_where_the_weight_is(device, monkeypatch):
    launched = []
    monkeypatch.setattr(compiling, "launch_once", lambda parts, config, kind: launched.append(parts.lm_head))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        answer = CompilingWorker(device, 1, many_ids=320).answer(request("compile", TILE, TRUNCATE))
    assert "error" not in answer and [head.vocab_size for head in launched] == [469, 325]
    assert all(
        head.scale.shape == head.weight.shape[:1] and head.scale.device == head.weight.device for head in launched
    )


# --- the plan and the space


def test_no_screen_is_planned():
    plan = Plan(H200, LARGE, EFFORTS["full"])
    assert [str(kind) for kind in plan.kinds] == ["plain", "greedy", "truncate", "edit", "edit+truncate"]
    assert plan.screen == {} and plan.paths == ("fused", "logits")


def test_the_default_is_what_a_server_takes_without_a_table():
    plan = Plan(H200, LARGE, EFFORTS["full"])
    traits = HeadTraits("sm90", 1, LARGE.vocab, LARGE.hidden, has_gemm=False)
    for kind in plan.kinds:
        for rows in plan.sizes:
            default = plan.default(rows, kind)
            assert default == default_config(traits, rows, kind) and path_of(default) is FUSED
            assert default in plan.seeds(plan.study_of(default, kind))


def test_a_device_that_cannot_read_such_a_head_is_named():
    with pytest.raises(ValueError, match=r"A100.* has compute capability 8\.0; expected 8\.9 or newer for e4m3"):
        Plan(A100, LARGE, EFFORTS["quick"]).limits  # noqa: B018


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("edit", [False, True])
def test_tiles_fit_by_the_bytes_of_weights_and_of_hidden_states_and_by_registers(truncate, edit):
    limits = Limits(hidden=4096, itemsize=1, shared_memory=232_448, tma=True, chunk=72)
    for block_b in TILE_CLASSES[: TILE_CLASSES.index(MAX_EDITED_CLASS) + 1 if edit else None]:
        space = Space(limits, FUSED, block_b, truncate, edit)
        assert space.points
        for config in space.points:
            stage = (config.block_v + config.block_b * 2) * config.block_d
            assert config.ctas_per_sm * config.stages * stage <= limits.shared_memory
            assert config.block_b * config.block_v <= 64 * 32 * config.num_warps


@pytest.mark.parametrize(
    "block_b, tile",
    [
        (16, (64, 256, 4, 2)),
        (16, (256, 128, 8, 1)),
        (32, (64, 256, 4, 2)),
        (64, (256, 64, 8, 1)),
        (128, (128, 64, 8, 1)),
    ],
)
def test_the_first_trials_have_tiles_of_many_ids_and_the_weight_as_left_operand(block_b, tile):
    plan = Plan(H200, LARGE, EFFORTS["quick"])
    first = plan.space(StudyKey(FUSED, PLAIN, block_b)).first()
    tiles = [(one.block_v, one.block_d, one.num_warps, one.ctas_per_sm) for one in first if not one.rows_first]
    assert tile in tiles[:6]


# --- commands


@pytest.mark.slow
def test_a_run_names_the_baselines_that_it_leaves_out_and_verify_reads_its_table(command, tmp_path, simulated):
    shape = ("--vocab", 151_936, "--hidden", 4096, "--dtype", "float8_e4m3fn")
    options = ("--effort", "quick", "--batch-sizes", "1,64", "--compilers", 1, "--baselines", "on")
    device = simulated(baselines=True)
    code, out, err = command("run", *shape, *options, "--out", tmp_path, device=device)
    assert code == 0 and "gemm, gemm+argmax and gemm+flashinfer are not raced: a GEMM multiplies no e4m3" in err, out
    file = tmp_path / "fs2-NVIDIA_H200-V151936-D4096-tp1-e4m3.json"
    table, _ = load_table(file)
    assert table.head == LARGE and set(table.kinds) == {"plain", "greedy", "truncate", "edit", "edit+truncate"}
    assert not any(name.startswith("gemm") for entry in table.entries for name in entry.others)
    code, out, _ = command("verify", file, device=device)
    assert code == 0 and "none slower than the built-in choice" in out
