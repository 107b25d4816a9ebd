"""What a starting server does with its tuned table: the same on all ranks, checked, and said."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys

import pytest
import test_runtime
import torch
from sgl_flashsample.kernels.lm_head_sample import workspace_slots
from sgl_flashsample.kernels.tiles import TileConfig
from tuned_tables import table_for_this_machine

from sgl_flashsample import LMHead, lookup, resolution, selftest
from sgl_flashsample.choices import Choices, choices_for
from sgl_flashsample.sglang import head_state, tuning
from sgl_flashsample.sglang.agreement import Ranks
from sgl_flashsample.sglang.runtime import HeadState
from sgl_flashsample.tuned import Shape
from sgl_flashsample.work import Work

stand_in, runtime = test_runtime.sglang, test_runtime.runtime  # fixtures

# Two ranks of a real process group, and SGLang's group as far as it is read.
SCRIPT = """
import json, os, sys, types, warnings
warnings.simplefilter("ignore")
sys.path[:0] = json.loads(sys.argv[1])
import torch, torch.distributed as dist
import conftest
from sgl_flashsample import LMHead, lookup, resolution
from sgl_flashsample.kernels.lm_head_sample import workspace_slots
from sgl_flashsample.kernels.tiles import TileConfig
from sgl_flashsample.sglang import tuning
from sgl_flashsample.sglang.agreement import Ranks
from sgl_flashsample.work import Work

rank, folder = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
ranks = Ranks(types.SimpleNamespace(world_size=2, rank_in_group=rank, ranks=[0, 1], cpu_group=dist.group.WORLD))
shard = LMHead(torch.zeros(600 - 8 * rank, 32), vocab_start=rank * 608)
if rank:  # the first rank alone sees the table
    os.environ.pop("FLASHSAMPLE_TUNED", None)

def resolved(name):
    found = tuning.resolve_alike(shard, 2, ranks, deterministic=False)
    tuned = [rows for rows in range(1, 20) if found.choices.is_tuned(rows, Work.PLAIN)]
    out[name] = [found.found and [found.found.file, found.found.match], tuned, found.line()]
    return found

out = {
    "text": [ranks.from_first(text if rank == 0 else "other") for text in ("", "x", "Käse " * 1000)],
    "anywhere": [ranks.anywhere([bool(rank), False, True]), ranks.anywhere([])],
    "same": [ranks.same("a"), ranks.same(f"rank {rank}")],
}
found = resolved("table")
_, first, config = next(used for used in found.choices.used_up_to(1) if used[0] is Work.PLAIN)
seen = tuning.refuse_wrong.__globals__
compare = seen["_compare"]
if rank:  # one configuration fails on the second rank alone
    seen["_compare"] = lambda head, rows, this, *more: "wrong" if this == config else compare(head, rows, this, *more)
checked = tuning.check(shard, 2, found, ranks, False)
seen["_compare"] = compare
out["checked"] = [checked.problem, checked.choices.digest, [line.partition(" ")[0] for line in checked.refused]]
if rank:  # and here a configuration cannot be used at all
    resolution.config_problem = lambda *arguments: "no"
resolved("another device")
if rank == 0:
    def fail(*arguments, **keywords):
        raise RuntimeError("disk on fire")
    tuning.resolve = fail
resolved("broken")
dist.barrier()
print(json.dumps(out), flush=True)
os._exit(0)  # gloo's threads may abort a process that ends in the usual way
"""


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    folder = tmp_path_factory.mktemp("ranks")
    cpu = torch.device("cpu")
    shape = resolution.head_shape_of(LMHead(torch.zeros(600, 32)), 2)
    table = table_for_this_machine(cpu, shape)
    (folder / "table.json").write_text(table.dumps())
    paths = [str(request.config.rootpath / "tests"), str(request.config.rootpath)]
    environment = os.environ | {"FLASHSAMPLE_TUNED": str(folder / "table.json"), "SGLANG_CACHE_DIR": str(folder)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(paths), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    answers = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], answers[0][1][-2000:] + answers[1][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in answers], folder / "table.json"


def test_ranks_share_what_the_first_one_says_and_what_is_true_anywhere(two_ranks):
    (first, second), _ = two_ranks
    assert first["text"] == second["text"] == ["", "x", "Käse " * 1000]
    assert first["anywhere"] == second["anywhere"] == [[True, False, True], []]
    assert first["same"] == second["same"] == [True, False]


def test_all_ranks_take_the_table_that_the_first_one_found(two_ranks):
    (first, second), path = two_ranks
    assert first["table"][:2] == second["table"][:2]
    assert first["table"][0] == [str(path), "exact"]
    assert first["table"][1] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_a_configuration_that_fails_on_one_rank_is_taken_out_on_all_of_them(two_ranks):
    (first, second), _ = two_ranks
    assert first["checked"][:2] == second["checked"][:2] and first["checked"][0] is None
    assert set(first["checked"][2]) == {"another"} and set(second["checked"][2]) == {"wrong"}


@pytest.mark.parametrize("how", ["another device", "broken"])
def test_ranks_that_cannot_all_take_it_take_the_built_in_choices_all_of_them(two_ranks, how):
    for rank in two_ranks[0]:
        assert rank[how][:2] == [None, []]
        assert "built-in choices for all batches" in rank[how][2]


def test_a_rank_alone_agrees_with_itself():
    ranks = Ranks()
    assert ranks.from_first("x") == "x" and ranks.anywhere([True, False]) == [True, False] and ranks.same("x")


@pytest.fixture
def tuned_head(tmp_path, monkeypatch, device):
    weight = torch.randn(100, 16, generator=torch.Generator().manual_seed(0)).to(device)
    made = LMHead(weight)
    path = tmp_path / "table.json"
    table = table_for_this_machine(device, resolution.head_shape_of(made))
    path.write_text(dataclasses.replace(table, classes={"plain": table.classes["plain"]}).dumps())
    monkeypatch.setenv(lookup.FILE_VARIABLE, str(path))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    return made, path


def test_deterministic_inference_ignores_tables(tuned_head):
    head, _ = tuned_head
    assert tuning.resolve_alike(head, 1, Ranks(), deterministic=False).found is not None
    found = tuning.resolve_alike(head, 1, Ranks(), deterministic=True)
    assert found.found is None and found.choices.digest == choices_for(head).digest
    assert found.line().startswith("no tuned table for deterministic inference")


def prepared(runtime, weight):
    return runtime._prepare(test_runtime.processor(), test_runtime.head(weight), starting=True)


def test_a_starting_server_serves_with_its_table_and_says_so_in_one_line(stand_in, runtime, tuned_head, caplog):
    head, path = tuned_head
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(runtime, head.weight)
    assert state.choices.is_tuned(4, Work.PLAIN)
    line, about_screen = [record.getMessage() for record in caplog.records]
    assert about_screen.startswith("flashsample: screen not built: ")
    assert line.startswith(
        f"flashsample: tuned table {path} (exact, the named file): 5 buckets in use, batches without"
    )


def test_a_configuration_that_fails_in_the_self_test_leaves_the_fused_pass_on_with_one_warning(
    stand_in,
    runtime,
    tuned_head,
    caplog,
    monkeypatch,
):
    head, path = tuned_head
    table, _ = lookup.load_table(path)
    refused = table.configs["whole"].launch
    true = selftest._compare
    monkeypatch.setattr(
        selftest,
        "_compare",
        lambda head, rows, config, *more: "off" if config == refused else true(head, rows, config, *more),
    )
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(runtime, head.weight)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "flashsample: the built-in choice takes the batches of 1 tuned configurations that fail"
    )
    assert str(refused) in warnings[0]
    assert state.choices.pick(8) == choices_for(state.current()).pick(8) and state.choices.is_tuned(4, Work.PLAIN)
    assert runtime.problem is None


def test_a_bad_table_is_one_warning_and_the_built_in_choices(stand_in, runtime, tuned_head, caplog):
    head, path = tuned_head
    path.write_text(path.read_text()[:500])
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(runtime, head.weight)
    assert state.choices.digest == choices_for(state.current()).digest
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO, logging.INFO], "the bad table, the choices, the screen"
    assert f"{path}: it is not JSON" in caplog.records[0].getMessage()
    assert "built-in choices for all batches" in caplog.records[1].getMessage()


def test_a_step_has_the_tuned_choices_their_scratch_and_says_when_all_its_rows_are_greedy(
    stand_in, runtime, device, monkeypatch
):
    lazy, rows = test_runtime.lazy_rows(device)
    state = lazy.source = HeadState(test_runtime.processor(), test_runtime.head(torch.ones(104, 16, device=device)))
    head, seen = state.current(), []
    tile = TileConfig(16, 32, 16, 4, 1, ctas_per_sm=128, flatten=False, tma=False)
    state.choices = Choices(Shape.of(head), {work: {2: tile} for work in Work})
    true = head_state.sample
    monkeypatch.setattr(
        head_state,
        "sample",
        lambda hidden, head, params, **keywords: (
            seen.append((params.all_greedy, keywords)) or true(hidden, head, params, **keywords)
        ),
    )
    for greedy in ((False, True), (True, True)):
        batch = dataclasses.replace(rows, greedy=greedy)
        assert runtime.sample(lazy, batch, None, torch.zeros(2, dtype=torch.int64, device=device), False) is not None
    assert [said for said, _ in seen] == [False, True]
    for _, keywords in seen:
        assert keywords["choices"] is state.choices
        assert keywords["workspace"].slots >= workspace_slots(head, 512, tile)


def test_a_head_that_changes_its_shape_gives_up_its_tuned_choices(stand_in, runtime, tuned_head):
    head, _ = tuned_head
    state = prepared(runtime, head.weight)
    tuned = state.choices
    state.processor.final_logit_softcapping = 30.0
    state.current()
    assert state.choices is tuned
    state.lm_head.weight = torch.zeros(104, 32, device=head.weight.device)
    assert state.choices is tuned and state.current() is not None
    assert state.choices is choices_for(state.current())
