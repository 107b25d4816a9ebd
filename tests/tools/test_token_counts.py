"""Counts of a server while it draws, without a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import types

import pytest
import torch

from sgl_flashsample.hot_vocab import HotVocab
from sgl_flashsample.sglang import token_counts
from sgl_flashsample.sglang.token_counts import TokenCounts

V = 1000
NEVER = 1e9  # seconds
SOON = {"LOOK_SECONDS": 0.01, "IDLE_SECONDS": 0.02}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "hot.json"


@pytest.fixture
def make(file, monkeypatch):
    """A function that makes a ``TokenCounts`` of ``file`` with a short interval. It closes earlier ones: they lock the
    file."""
    made = []

    def make(name="m", **options) -> TokenCounts:
        for earlier in made:
            earlier.close()
        for option, value in (SOON | options).items():
            monkeypatch.setattr(token_counts, option, value)
        made.append(TokenCounts(file, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition, seconds=60.0):
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.01)


def expected(tokens: torch.Tensor, vocab: int = V) -> HotVocab:
    return HotVocab.of_ids(torch.bincount(tokens.cpu().reshape(-1).long(), minlength=vocab).numpy(), "m", "server")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [1 << 18, 64])
def test_every_drawn_token_is_in_the_file_in_the_end(make, file, device, dtype, capacity):
    """Also with fewer slots than steps, so that slots are reused."""
    tokens = torch.randint(0, V, (100, 17), generator=torch.Generator().manual_seed(0))
    counts = make(CAPACITY=capacity)
    for place, step in enumerate(tokens.to(device, dtype), 1):
        counts.add(step, V)
        if capacity < tokens.numel():
            until(lambda place=place: counts.counted == 17 * place)
    if device.type == "cuda":
        torch.cuda.synchronize()
    counts.close()
    written = HotVocab.load(file)
    assert written.dumps() == expected(tokens).dumps()
    assert counts.dropped == 0


def test_ids_that_find_no_slot_are_left_out_with_one_warning_and_no_step_waits(make, device, caplog):
    counts = make(CAPACITY=64, LOOK_SECONDS=NEVER)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(10):
            counts.add(torch.arange(30, device=device), V)
    assert counts.dropped == 240
    (record,) = caplog.records
    assert "FLASHSAMPLE_TRACE cannot keep up, from now on its counts miss tokens" in record.message


class Late(torch.Tensor):
    """Ids on a device that is behind: copies of them are made later."""

    copies: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            cls.copies.append((args[0], args[1].as_subclass(torch.Tensor)))
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})


def test_an_id_that_has_not_arrived_is_waited_for_and_none_is_skipped_or_counted_twice(make, file):
    counts = make(LOOK_SECONDS=0.001, CAPACITY=4)

    def add(*ids):
        counts.add(torch.tensor(ids).as_subclass(Late), V)
        return Late.copies.pop()

    def arrive(slots, ids):
        slots.copy_(ids)
        time.sleep(0.05)

    first, second = add(5, 6), add(7, 8)
    arrive(*second)
    assert counts.counted == 0
    arrive(*first)
    until(lambda: counts.counted == 4)
    third = add(9, 10)  # in the slots of the first
    time.sleep(0.05)
    assert counts.counted == 4
    arrive(*third)
    counts.close()
    assert HotVocab.load(file).digest == expected(torch.arange(5, 11)).digest


def test_the_file_is_written_while_the_server_is_idle_and_again_when_more_has_come(make, file):
    counts = make()
    counts.add(torch.tensor([1, 2, 3]), V)
    until(file.exists)
    assert HotVocab.load(file).counted == 3
    counts.add(torch.tensor([1]), V)
    until(lambda: HotVocab.load(file).counted == 4)
    written = file.stat().st_mtime_ns
    time.sleep(0.1)
    assert file.stat().st_mtime_ns == written, "nothing new, nothing written"


def test_while_tokens_keep_coming_the_file_is_written_at_intervals(make, file):
    started = time.monotonic()  # before the writer looks at its clock
    counts = make(IDLE_SECONDS=NEVER, WRITE_SECONDS=0.2)
    while not file.exists():
        counts.add(torch.tensor([1]), V)
        time.sleep(0.001)
        assert time.monotonic() - started < 60
    assert time.monotonic() - started >= 0.2


def test_a_restarted_server_goes_on_counting_and_ids_that_are_none_are_left_out(make, file):
    for ids in ([1, 2, 999], [-1, V, 1 << 40, 5]):
        counts = make()
        counts.add(torch.tensor(ids), V)
        counts.close()
    assert HotVocab.load(file).digest == expected(torch.tensor([1, 2, 999, 5])).digest


@pytest.mark.parametrize(
    "before, message",
    [
        ("not token counts", "hot.json: it is not JSON"),
        (HotVocab.of_ids(torch.ones(V).long().numpy(), "other").dumps(), "hot.json is of other, not of m; expected"),
    ],
)
def test_a_file_that_is_something_else_is_left_alone(make, file, before, message):
    file.write_text(before)
    with pytest.raises(ValueError, match=message):
        make()
    assert file.read_text() == before


def test_a_file_of_another_vocabulary_is_left_alone_with_one_warning(make, file, caplog):
    before = expected(torch.tensor([1]), 500).dumps()
    file.write_text(before)
    counts = make()
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(5):
            counts.add(torch.tensor([1]), V)
            time.sleep(0.04)
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert f"cannot write {file}, the next write tries again: one is of 500 ids, the other of 1000" in record.message
    assert file.read_text() == before


def test_a_file_that_cannot_be_written_for_a_while_costs_one_warning_and_no_count(make, file, caplog):
    counts = make()
    file.mkdir()
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for i in range(5):
            counts.add(torch.tensor([i]), V)
            time.sleep(0.04)
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert f"cannot write {file}, the next write tries again: {file} is not a plain file" in record.message
    file.rmdir()
    until(file.exists)
    until(lambda: HotVocab.load(file).counted == 5)


def test_a_step_never_fails_and_after_a_failure_nothing_is_counted(make, caplog):
    counts = make()
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            counts.add(None, V)
    (record,) = caplog.records
    assert "FLASHSAMPLE_TRACE counts no tokens any more: AttributeError" in record.message


def test_a_failure_of_the_thread_is_one_warning_and_the_server_goes_on(make, monkeypatch, caplog):
    counts = make()
    monkeypatch.setattr(counts, "_write", lambda: 1 / 0)
    counts.add(torch.tensor([1]), V)
    until(lambda: counts.disabled)
    counts._disable(ValueError("of a step that was under way"))
    counts.add(torch.tensor([2]), V)
    counts.close()
    (record,) = caplog.records
    assert record.message.endswith("any more: ZeroDivisionError: division by zero; answers are not affected")


@pytest.mark.slow
def test_one_process_counts_into_a_file_and_its_end_lets_another_one(file):
    code = (
        "import sys; from pathlib import Path; from sgl_flashsample.sglang.token_counts import TokenCounts\n"
        "counts = TokenCounts(Path(sys.argv[1]), 'm')\n"
        "print('counting', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], **pipes)
    try:
        assert child.stdout.readline() == "counting\n"
        with pytest.raises(ValueError, match=f"another process counts into {file}"):
            TokenCounts(file, "m")
    finally:
        child.communicate("", timeout=60)
    TokenCounts(file, "m").close()


def test_a_watcher_gets_the_ids_that_are_counted_in_the_order_of_their_steps_without_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(token_counts, "LOOK_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    counts, seen = TokenCounts(), []
    counts.add(torch.tensor([5]), V)
    until(lambda: counts.counted == 1)
    counts.watch(lambda ids: seen.extend(ids.tolist()))
    for ids in ([7, 6], [-1, 9], [8, V]):
        counts.add(torch.tensor(ids), V)
    until(lambda: counts.counted == 7)
    counts.close()
    assert seen == [7, 6, 9, 8] and not list(tmp_path.iterdir())


def test_a_watcher_that_fails_is_one_warning_and_the_server_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(token_counts, "LOOK_SECONDS", 0.01)
    counts = TokenCounts()
    counts.watch(lambda ids: 1 / 0)
    for _ in range(2):
        counts.add(torch.tensor([1]), V)
        until(lambda: counts.disabled)
    counts.close()
    (record,) = caplog.records
    assert "FLASHSAMPLE_DRAFT_VOCAB counts no tokens any more: ZeroDivisionError" in record.message


# --- whether a server counts at all


@pytest.fixture
def server(monkeypatch, file):
    """A stand-in for SGLang's configuration, with the settings that our code reads."""
    parallel = types.SimpleNamespace(tp_rank=0, pp_rank=0, pp_size=1)
    module = types.ModuleType("sglang.srt.runtime_context")
    module.get_parallel = lambda: parallel
    module.get_model = lambda: types.SimpleNamespace(model_path="Qwen/Qwen9-1B")
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("FLASHSAMPLE_TRACE", str(file))
    return types.SimpleNamespace(parallel=parallel, module=module)


def test_a_server_that_was_not_asked_counts_nothing(server, monkeypatch):
    monkeypatch.setenv("FLASHSAMPLE_TRACE", "")
    assert TokenCounts.of_this_server() is None
    monkeypatch.delenv("FLASHSAMPLE_TRACE")
    assert TokenCounts.of_this_server() is None


def test_a_server_that_was_asked_names_its_model_and_not_where_it_lies(server, file, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        assert TokenCounts.of_this_server().name == "Qwen/Qwen9-1B"
    assert [record.message for record in caplog.records] == [f"flashsample: counting the drawn tokens into {file}"]
    (tmp_path / "My-Model").mkdir()
    server.module.get_model = lambda: types.SimpleNamespace(model_path=str(tmp_path / "My-Model"))
    monkeypatch.setenv("FLASHSAMPLE_TRACE", str(file) + "2")
    assert TokenCounts.of_this_server().name == "My-Model"


@pytest.mark.parametrize("tp_rank, pp_rank, pp_size, counts", [(0, 0, 1, 1), (1, 0, 1, 0), (0, 0, 2, 0), (0, 1, 2, 1)])
def test_the_first_rank_of_the_last_stage_counts(server, tp_rank, pp_rank, pp_size, counts):
    vars(server.parallel).update(tp_rank=tp_rank, pp_rank=pp_rank, pp_size=pp_size)
    assert (TokenCounts.of_this_server() is not None) == bool(counts)


def test_what_stands_against_counting_costs_one_warning_and_not_the_server(server, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FLASHSAMPLE_TRACE", os.fspath(tmp_path / "nowhere" / "hot.json"))
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert TokenCounts.of_this_server() is None
    (record,) = caplog.records
    assert "drawn tokens are not counted (FLASHSAMPLE_TRACE): FileNotFoundError: " in record.message
    del server.module.get_parallel
    assert TokenCounts.of_this_server() is None


# --- on a GPU


@pytest.mark.gpu
def test_a_step_synchronises_with_nothing(make, file, device):
    counts = make()
    tokens = torch.randint(0, V, (200, 64), device=device, dtype=torch.int32)
    counts.add(tokens[0], V)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in tokens[1:]:
            counts.add(step, V)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not counts.disabled
    torch.cuda.synchronize()
    counts.close()
    assert HotVocab.load(file).digest == expected(tokens).digest


@pytest.mark.gpu
def test_ids_are_those_of_their_step_though_the_device_is_behind_and_the_memory_is_used_again(make, file, device):
    counts = make()
    for step in range(100):
        torch.cuda._sleep(200_000)
        ids = torch.full((64,), step, dtype=torch.int64, device=device)
        counts.add(ids, V)
        ids.fill_(V - 1)  # as the next step would, over its memory
    torch.cuda.synchronize()
    counts.close()
    assert HotVocab.load(file).digest == expected(torch.arange(100).repeat(64)).digest


@pytest.mark.gpu
def test_a_step_in_a_graph_that_is_being_captured_is_not_counted(make, file, device):
    counts, ids = make(), torch.arange(8, device=device)
    counts.add(ids, V)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts.add(ids, V)
    graph.replay()
    torch.cuda.synchronize()
    counts.close()
    assert not counts.disabled and HotVocab.load(file).counted == 8
