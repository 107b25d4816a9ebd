"""What a server counts while it draws, without a server."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import time
import types

import pytest
import torch

from sgl_flashsample.hot_set import HotSet
from sgl_flashsample.sglang import trace as traces
from sgl_flashsample.sglang.trace import TokenTrace

V = 1000


@pytest.fixture
def file(tmp_path):
    return tmp_path / "hot.json"


@pytest.fixture
def make(file, monkeypatch):
    """Makes a trace, with times that a test can wait for; all of them are closed."""
    monkeypatch.setattr(traces, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(traces, "_IDLE_SECONDS", 0.02)
    made = []

    def make(name="m", **constants) -> TokenTrace:
        for constant, value in constants.items():
            monkeypatch.setattr(traces, constant, value)
        made.append(TokenTrace(file, name))
        return made[-1]

    monkeypatch.setattr(traces, "_lock", lambda file: None)
    yield make
    for one in made:
        one.close()


def until(condition, seconds=20.0):
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.01)


def counts(tokens: torch.Tensor, vocab: int = V) -> tuple[int, ...]:
    per_id = torch.bincount(tokens.cpu().reshape(-1), minlength=vocab)
    padded = torch.nn.functional.pad(per_id, (0, -vocab % 16))
    return tuple(padded.view(-1, 16).sum(1).tolist())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_drawn_token_is_in_the_file_when_the_trace_is_closed(make, file, device, dtype):
    tokens = torch.randint(0, V, (300, 17), generator=torch.Generator().manual_seed(0))
    trace = make()
    for step in tokens.to(device, dtype):
        trace.add(step, V)
    if device.type == "cuda":
        torch.cuda.synchronize()
    trace.close()
    found = HotSet.load(file)
    assert found.counts == counts(tokens)
    assert (found.vocab, found.name, found.source, found.counted) == (V, "m", "server", 5100)
    per_id = torch.bincount(tokens.reshape(-1)).sort(descending=True).values
    assert found.by_token == {size: pytest.approx(int(per_id[:size].sum()) / 5100, abs=1e-6) for size in (256, 512)}


def test_more_ids_than_there_are_places_go_round_and_round(make, file, device):
    trace = make(CAPACITY=64)
    tokens = torch.randint(0, V, (40, 23), generator=torch.Generator().manual_seed(1))
    for step in tokens.to(device):
        trace.add(step, V)
        until(lambda: trace._counted == trace._added)
    trace.close()
    assert trace.left_out == 0
    assert HotSet.load(file).counts == counts(tokens)


def test_ids_that_find_no_place_are_left_out_with_one_warning_and_no_step_waits(make, device, caplog):
    trace = make(CAPACITY=64, _LOOK_SECONDS=60.0)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(10):
            trace.add(torch.arange(30, device=device), V)
    assert (trace._added, trace.left_out) == (60, 240)
    (record,) = caplog.records
    assert "tokens are drawn faster than they are counted" in record.message
    trace._stop.set()


def test_an_id_that_has_not_arrived_is_waited_for_and_none_is_skipped(make, device):
    """As on a device that is behind: the places are taken, the ids come later, the second step's before the first's."""
    trace = make(_LOOK_SECONDS=60.0)
    trace._begin(V)
    trace._added = 4
    assert trace._collect() == 0
    trace._ids[2:4] = torch.tensor([7, 8])
    assert trace._collect() == 0
    trace._ids[0] = 5
    assert trace._collect() == 1
    trace._ids[1] = 6
    assert trace._collect() == 3
    assert trace._counts.nonzero().reshape(-1).tolist() == [5, 6, 7, 8]
    assert (trace._ids == traces._EMPTY).all(), "free for others"
    trace._stop.set()


def test_the_file_is_written_while_the_server_is_idle_and_again_when_more_has_come(make, file):
    trace = make()
    trace.add(torch.tensor([1, 2, 3]), V)
    until(file.exists)
    assert HotSet.load(file).counted == 3
    trace.add(torch.tensor([1]), V)
    until(lambda: HotSet.load(file).counted == 4)
    inode = file.stat().st_ino
    time.sleep(0.2)
    assert file.stat().st_ino == inode, "nothing new, nothing written"


def test_while_tokens_keep_coming_the_file_is_written_at_intervals(make, file):
    trace = make(_IDLE_SECONDS=60.0, _WRITE_SECONDS=0.3)
    started = time.monotonic()
    while not file.exists():
        trace.add(torch.tensor([1]), V)
        time.sleep(0.001)
        assert time.monotonic() - started < 20
    assert time.monotonic() - started >= 0.3


def test_a_restarted_server_goes_on_counting(make, file):
    first = make()
    first.add(torch.tensor([1, 2, 999]), V)
    first.close()
    second = make()
    second.add(torch.tensor([1]), V)
    second.close()
    assert HotSet.load(file).counts == counts(torch.tensor([1, 2, 999, 1]))


def test_ids_that_are_none_are_not_counted(make, file):
    trace = make()
    trace.add(torch.tensor([-1, V, 1 << 40, 5]), V)
    trace.close()
    assert HotSet.load(file).counts == counts(torch.tensor([5]))


@pytest.mark.parametrize(
    "before, message",
    [
        ("not a hot set", "hot.json: it is not JSON"),
        (HotSet.of_tokens({1: 1}, V, "other").dumps(), "hot.json is of other, not of m; expected a file for each"),
    ],
)
def test_a_file_that_is_something_else_is_left_alone(make, file, before, message):
    file.write_text(before)
    with pytest.raises(ValueError, match=message):
        make()
    assert file.read_text() == before


def test_a_file_of_another_vocabulary_is_left_alone_with_one_warning(make, file, caplog):
    before = HotSet.of_tokens({1: 1}, 500, "m").dumps()
    file.write_text(before)
    trace = make()
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            trace.add(torch.tensor([1]), V)
    (record,) = caplog.records
    assert "hot.json is of 500 ids, the model has 1000" in record.message
    assert file.read_text() == before


def test_a_full_disk_costs_one_warning_and_no_count(make, file, monkeypatch, caplog):
    def full(file, text):
        raise OSError(28, "No space left on device")

    trace = make()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "sgl_flashsample"):
        patch.setattr(traces, "write_whole", full)
        for i in range(5):
            trace.add(torch.tensor([i]), V)
            time.sleep(0.06)
        until(lambda: trace._counted == 5)
        time.sleep(0.1)
        (record,) = caplog.records
        assert "the trace cannot be written, tokens are still counted: [Errno 28] No space left" in record.message
    until(file.exists)
    assert HotSet.load(file).counted == 5


def test_a_step_never_fails_and_after_a_failure_nothing_is_counted(make, caplog):
    trace = make()
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            trace.add(None, V)
    (record,) = caplog.records
    assert "the drawn tokens are not counted any more: AttributeError" in record.message


def test_one_process_counts_into_a_file_and_its_end_lets_another_one(file):
    code = (
        "import sys; from pathlib import Path; from sgl_flashsample.sglang.trace import TokenTrace\n"
        "TokenTrace(Path(sys.argv[1]), 'm')\n"
        "print('counting', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "counting\n"
        with pytest.raises(ValueError, match=f"another process counts into {file}"):
            TokenTrace(file, "m")
    finally:
        child.communicate("", timeout=60)
    TokenTrace(file, "m")


def test_a_file_system_without_locks_is_taken_as_it_is(file, monkeypatch):
    def no_locks(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    TokenTrace(file, "m")


# --- whether a server counts at all


@pytest.fixture
def server(monkeypatch, file):
    """A stand-in for what is read of SGLang's configuration."""
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
    for value in (None, ""):
        monkeypatch.delenv("FLASHSAMPLE_TRACE") if value is None else monkeypatch.setenv("FLASHSAMPLE_TRACE", value)
        assert traces.of_this_server() is None


def test_a_server_that_was_asked_names_its_model_and_not_where_it_lies(server, file, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        assert traces.of_this_server().name == "Qwen/Qwen9-1B"
    assert [record.message for record in caplog.records] == [f"flashsample: counting the drawn tokens into {file}"]
    (tmp_path / "My-Model").mkdir()
    server.module.get_model = lambda: types.SimpleNamespace(model_path=str(tmp_path / "My-Model"))
    monkeypatch.setenv("FLASHSAMPLE_TRACE", str(file) + "2")
    assert traces.of_this_server().name == "My-Model"


@pytest.mark.parametrize(
    "ranks, counts", [((0, 0, 1), True), ((1, 0, 1), False), ((0, 0, 2), False), ((0, 1, 2), True)]
)
def test_the_first_rank_of_the_last_stage_counts(server, ranks, counts):
    server.parallel.tp_rank, server.parallel.pp_rank, server.parallel.pp_size = ranks
    assert (traces.of_this_server() is not None) == counts


def test_what_stands_against_counting_costs_one_warning_and_not_the_server(server, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FLASHSAMPLE_TRACE", str(tmp_path / "nowhere" / "hot.json"))
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert traces.of_this_server() is None
    (record,) = caplog.records
    assert record.message.startswith("flashsample: no trace: FLASHSAMPLE_TRACE: FileNotFoundError: ")
    del server.module.get_parallel
    assert traces.of_this_server() is None


# --- on a GPU


@pytest.mark.gpu
def test_a_step_synchronises_with_nothing(make, file, device):
    trace = make()
    tokens = torch.randint(0, V, (200, 64), device=device, dtype=torch.int32)
    trace.add(tokens[0], V)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in tokens[1:]:
            trace.add(step, V)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trace.problem is None
    torch.cuda.synchronize()
    trace.close()
    assert HotSet.load(file).counts == counts(tokens.long())


@pytest.mark.gpu
def test_ids_are_those_of_their_step_though_the_device_is_behind_and_the_memory_is_used_again(make, file, device):
    trace = make()
    for step in range(100):
        torch.cuda._sleep(200_000)
        ids = torch.full((64,), step, dtype=torch.int64, device=device)
        trace.add(ids, V)
        ids.fill_(V - 1)  # as the next step would, over its memory
    torch.cuda.synchronize()
    trace.close()
    assert HotSet.load(file).counts == counts(torch.arange(100).repeat(64))


@pytest.mark.gpu
def test_a_step_in_a_graph_that_is_being_captured_is_not_counted(make, device):
    trace, ids = make(), torch.arange(8, device=device)
    trace.add(ids, V)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trace.add(ids, V)
    graph.replay()
    torch.cuda.synchronize()
    assert trace.problem is None and trace._added == 8
