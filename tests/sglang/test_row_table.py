"""The parameters of all requests in one table by slot: the line of a request is what it asked for, and every draw gets
the lines of its own requests, whatever joins and leaves beside it."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_states import CPU, SAMPLING_DEFAULTS, gathered, request

from sgl_flashsample.cpu_path import gather_rows_on_cpu
from sgl_flashsample.kernels.gather_rows import RowBuffers
from sgl_flashsample.kernels.params import Edit
from sgl_flashsample.sglang import batch as batch_module
from sgl_flashsample.sglang import row_table
from sgl_flashsample.sglang.batch import Batch, batch_of, slots_of
from sgl_flashsample.sglang.draw import Step, gather
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.row_table import TOP_K_OFF, UNREADABLE, Reason, RowTable

GREEDY = {"top_k": 1}
LINE = (0.5, 3, 7, 0.9, 0.1, 0)  # temperature, top_k, seed, top_p, min_p, edits


@pytest.fixture
def no_kinds(monkeypatch) -> None:
    """A process that has met no kinds of requests yet: there is room for all that a test makes."""
    rows = [UNREADABLE]
    monkeypatch.setattr(row_table, "ROWS", rows)
    monkeypatch.setattr(batch_module, "ROWS", rows)
    monkeypatch.setattr(row_table, "_IDS", {UNREADABLE: 0})
    monkeypatch.setattr(row_table, "_KINDS", {})
    monkeypatch.setattr(batch_module, "_MIXES", {})


def batch_in(table: RowTable, slots: list[int], requests: list[Any], **options: Any) -> Batch:
    return Batch.of_requests(requests, slots, table, 1, True, **options)


def tolist(rows: RowBuffers) -> list[tuple]:
    """A tuple per row: temperature, top_k, top_p, min_p, seed, edits."""
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.edits)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def read(table: RowTable, slots: list[int], device: torch.device = CPU, **options: Any) -> list[tuple]:
    return tolist(gathered(Batch("\0" * len(slots), table), slots, device, **options))


# --- the line of a request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"sampling_seed": 11}, (1.0, TOP_K_OFF, 1.0, 0.0, 11, Edit(0))),
        (
            {"temperature": 0.75, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "sampling_seed": -(2**63)},
            (0.75, 5, 0.5, 0.25, -(2**63), Edit(0)),
        ),
        # SGLang sets temperature 1 for a greedy request; here greedy rows have temperature 0.
        (GREEDY | {"sampling_seed": 2**63 - 1}, (0.0, 1, 1.0, 0.0, 2**63 - 1, Edit(0))),
        (GREEDY | {"temperature": 0.5, "top_p": 0.5, "sampling_seed": 0}, (0.0, 1, 0.5, 0.0, 0, Edit(0))),
        ({"top_k": 8.5, "sampling_seed": 1}, (1.0, 8, 1.0, 0.0, 1, Edit(0))),  # SGLang drops the fraction too
        ({"sampling_seed": 1, "frequency_penalty": 0.5}, (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit.ADDITIVE)),
        ({"sampling_seed": 1, "repetition_penalty": 1.5}, (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit.SCALING)),
        ({"sampling_seed": 1, "logit_bias": {"3": 1.0}}, (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit.BIAS)),
        ({"sampling_seed": 1, "grammar": "a grammar"}, (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit.MASK)),
        (
            {"sampling_seed": 1, "grammar": "a grammar", "min_new_tokens": 2, "logit_bias": {}},
            (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit.MASK | Edit.ADDITIVE | Edit.BIAS),
        ),
        # Numbers beyond float32.
        ({"sampling_seed": 1, "temperature": 1e300}, (float("inf"), TOP_K_OFF, 1.0, 0.0, 1, Edit(0))),
        ({"sampling_seed": 1, "min_p": 1e-300}, (1.0, TOP_K_OFF, 1.0, 0.0, 1, Edit(0))),
    ],
    ids=str,
)
def test_the_line_of_a_request_is_what_it_asked_for(device, fields, line):
    table = RowTable(device)
    batch_in(table, [9, 3, 6], [request(), request(**fields), request(**GREEDY)])
    assert read(table, [3], device) == [line]


def test_a_step_keeps_of_the_edits_of_a_row_those_that_it_gives(device):
    table = RowTable(device)
    batch_in(table, [1, 2], [request(grammar=object(), logit_bias={}), request(logit_bias={})])
    flags = [[row[-1] for row in read(table, [1, 2], device, edits=given)] for given in (Edit.MASK, Edit.BIAS, Edit(0))]
    assert flags == [[Edit.MASK, 0], [Edit.BIAS, Edit.BIAS], [0, 0]]


def test_the_last_line_of_a_slot_wins_whether_or_not_another_was_written(device):
    table = RowTable(device)
    for written in (False, True):
        for temperature in (0.25, 0.5, 0.75):
            table.put(5, (temperature, *LINE[1:]))
            table.put(6, LINE)
            if written:
                assert read(table, [5, 6], device)[0][0] == temperature
        assert [row[0] for row in read(table, [5, 6], device)] == [0.75, 0.5]


def test_each_written_slot_is_written_once(device, monkeypatch):
    """A scatter with duplicates has no order."""
    table = RowTable(device)
    written = note_writes(monkeypatch)
    for slot in (4, 2, 4, 8, 2):
        table.put(slot, LINE)
    assert not written, "not before the draw: another step may be under way"
    read(table, [4], device)
    read(table, [4], device)
    assert [sorted(slots) for slots in written] == [[2, 4, 8]]


def note_writes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots of each write into a table."""
    written, write = [], row_table.write_rows

    def noted(lines: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        written.append(slots.tolist())
        write(lines, slots, new)

    monkeypatch.setattr(row_table, "write_rows", noted)
    return written


def test_the_table_grows_and_keeps_its_lines(device, monkeypatch):
    monkeypatch.setattr(row_table, "FIRST_SLOTS", 4)
    table, slots = RowTable(device), [1, 4, 5, 23, 24, 1000]
    for place, slot in enumerate(slots):
        table.put(slot, (0.5 + place, *LINE[1:]))
        want = [0.5 + each for each in range(place + 1)] + [0.0] * (len(slots) - place - 1)
        assert [row[0] for row in read(table, slots, device)] == want, "a slot without a line is a greedy row"


@pytest.mark.parametrize("queue", [4, 5, 64])
def test_a_full_queue_begins_anew_and_loses_no_line(monkeypatch, device, queue):
    monkeypatch.setattr(row_table, "QUEUE", queue)
    table = RowTable(device)
    for slot in range(1, 33):
        table.put(slot, (0.5 + slot, *LINE[1:]))
        if slot % 10 == 3:
            table.write()
    assert [row[0] for row in read(table, list(range(1, 33)), device)] == [0.5 + slot for slot in range(1, 33)]


@pytest.mark.gpu
def test_a_queue_is_written_over_once_the_device_has_read_it(monkeypatch, device):
    monkeypatch.setattr(row_table, "QUEUE", 4)
    table = RowTable(device)
    torch.cuda._sleep(200_000_000)  # the device is behind
    for slot in range(1, 13):
        table.put(slot, (0.5 + slot, *LINE[1:]))
        table.write()
    assert [row[0] for row in read(table, list(range(1, 13)), device)] == [0.5 + slot for slot in range(1, 13)]


@pytest.mark.parametrize("slot", [0, -1])
def test_a_slot_that_no_request_has_is_refused_and_stays_a_greedy_row_without_edits(device, slot):
    table = RowTable(device)
    with pytest.raises(ValueError, match=f"slot is {slot}; expected 1 or more"):
        table.put(slot, LINE)
    table.put(1, LINE)
    assert read(table, [0, 1], device)[0] == (0.0, 0, 1.0, 0.0, 0, 0)


def test_rows_behind_the_batch_are_greedy_rows_without_edits(device):
    table = RowTable(device)
    table.put(2, (*LINE[:5], int(Edit.BIAS)))
    first, *others = read(table, [2], device, rows=3)
    assert first[0] == 0.5 and first[-1] == Edit.BIAS and others == [(0.0, 0, 1.0, 0.0, 0, 0)] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "sampling_params", None),
        lambda one: setattr(one.sampling_params, "temperature", "hot"),
        lambda one: setattr(one.sampling_params, "top_k", 2**31),
        lambda one: delattr(one.sampling_params, "min_p"),
    ],
    ids=["no parameters", "a word", "a top-k beyond int32", "a missing parameter"],
)
def test_a_request_that_cannot_be_read_is_sglangs_and_its_neighbours_keep_their_lines(change):
    table, errors = RowTable(CPU), []
    broken = request()
    change(broken)
    batch = batch_in(
        table, [3, 1, 2], [request(sampling_seed=5), broken, request(sampling_seed=6)], unreadable=errors.append
    )
    assert [row.reason for row in batch.rows] == [None, Reason.UNREADABLE, None] and len(errors) == 1
    assert [row[4] for row in read(table, [3, 2])] == [5, 6]


def test_there_is_no_limit_of_kinds(no_kinds):
    choices = {
        "top_k": (TOP_K_OFF, 50, 99, 500),
        "top_p": (1.0, 0.5),
        "min_p": (0.0, 0.1),
        "sampling_seed": (None, 1),
        "logit_bias": (None, {}),
        "repetition_penalty": (1.0, 2.0),
        "min_new_tokens": (0, 1),
        "grammar": (None, object()),
    }
    asked: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        asked = [{**row, name: value} for row in asked for value in values]
    table = RowTable(CPU)
    errors: list[Exception] = []
    slots, requests = list(range(1, len(asked) + 1)), [request(**row) for row in asked]
    batch = batch_in(table, slots, requests, unreadable=errors.append)
    known = {row_table._row_of(request(**row), True) for row in asked}
    assert not errors and len(set(batch.kinds)) == len(known) > 256
    for row, fields in zip(batch.rows, asked, strict=True):
        assert row == row_table._row_of(request(**fields), True)
    again = batch_in(table, [1, 2], [request(**asked[0]), request(**asked[-1])])
    assert again.kinds == batch.kinds[0] + batch.kinds[-1], "kinds that were met before keep their id"


# --- batches against tuples -------------------------------------------------------------------------------------------


def test_filters_and_merges_of_batches_are_those_of_tuples():
    chance, table = random.Random(1), RowTable(CPU)
    asked = ({}, GREEDY, {"top_p": 0.5}, {"grammar": object()})
    kinds = batch_in(table, [1, 2, 3, 4], [request(**row) for row in asked]).kinds
    batch, rows = Batch("", table), ()
    for _ in range(3_000):
        if rows and chance.random() < 0.5:
            indices = chance.sample(range(len(rows)), chance.randint(0, len(rows)))
            if chance.random() < 0.8:
                indices.sort()
            batch, rows = batch.keep(indices), tuple(rows[index] for index in indices)
        else:
            joined = [chance.choice(kinds) for _ in range(chance.randint(0, 40))]
            batch, rows = batch.followed_by(Batch("".join(joined), table)), (*rows, *joined)
        assert len(batch) == len(rows) and tuple(batch.kinds) == rows
        assert batch.num_truncated == rows.count(kinds[2]) and batch.num_masked == rows.count(kinds[3])
        assert batch.mix.kinds == set(map(ord, rows))


# --- a model of SGLang's scheduler ------------------------------------------------------------------------------------

POOL = 12  # slots of the server: few, so that they are given again soon


class Device:
    """A device with the two streams of SGLang's. Work of the schedule stream is done at once: nothing lets it wait for
    a draw that is under way. Work of the forward stream is done in its order, when the host waits for it or earlier."""

    def __init__(self) -> None:
        self.in_forward = False
        self._pending: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self.step = 0

    def submit(self, work: Callable[[], None]) -> None:
        if self.in_forward:
            self._pending.append((self.step, work))
        else:
            work()

    def finish(self, step: int) -> None:
        while self._pending and self._pending[0][0] <= step:
            self._pending.popleft()[1]()

    def write_rows(self, table: torch.Tensor, slots: torch.Tensor, lines: torch.Tensor) -> None:
        assert len(set(slots.tolist())) == len(slots), "a scatter with duplicates has no order"
        self.submit(lambda: table.__setitem__(slots, lines))

    def gather_rows(self, *arguments: Any, **options: Any) -> None:
        self.submit(lambda: gather_rows_on_cpu(*arguments, **options))


class Scheduled:
    """A ``ScheduleBatch`` of SGLang's, of requests that have slots."""

    device = CPU

    def __init__(self, hooks: StepHooks, requests: list[Any]) -> None:
        self.reqs, self.req_pool_indices_cpu = requests, torch.tensor([one.slot for one in requests])
        self.sampling_info = types.SimpleNamespace()
        self._hooks = hooks
        hooks.from_schedule_batch(None, self.sampling_info, self, 600)

    def filter(self, kept: Callable[[Any], bool]) -> None:
        places = [place for place, one in enumerate(self.reqs) if kept(one)]
        if len(places) < len(self.reqs):
            indices = torch.tensor(places, dtype=torch.int64)
            self.reqs = [self.reqs[place] for place in places]
            self.req_pool_indices_cpu = self.req_pool_indices_cpu[indices]
            self._hooks.filter_batch(None, self.sampling_info, places, indices)

    def merge(self, other: Scheduled) -> None:
        self.reqs = [*self.reqs, *other.reqs]
        self.req_pool_indices_cpu = torch.cat([self.req_pool_indices_cpu, other.req_pool_indices_cpu])
        self._hooks.merge_batch(None, self.sampling_info, other.sampling_info)


@dataclasses.dataclass
class Launched:
    """A step that the host has launched. ends: the requests whose answer it may end."""

    number: int
    ends: list[Any]


class Scheduler:
    """SGLang's scheduler, with requests whose answers end at random. overlap: a step is scheduled and launched while
    the one before is under way, whose tokens are read after that.

    A request has ``slot``; ``finished``; ``chunks``, parts of its prompt that are not scheduled yet; and ``line`` and
    ``kind``, what each of its draws must get."""

    def __init__(self, runtime: Any, device: Device, overlap: bool, chance: random.Random) -> None:
        self.runtime, self.hooks, self.device = runtime, StepHooks(runtime), device
        self.overlap, self.chance = overlap, chance
        self.free = list(range(POOL, 0, -1))
        self.owners: dict[int, Any] = {}
        self.spare = RowTable(CPU)  # whose lines nobody draws with
        self.waiting: list[Any] = []
        self.chunked: Any = None
        self.running: Scheduled | None = None
        self.prefilled: Scheduled | None = None  # the last batch, where it was of prompts
        self.state = types.SimpleNamespace(rows=RowBuffers.allocate(4 * POOL, CPU))
        self.seen: collections.Counter[str] = collections.Counter()

    def arrive(self) -> None:
        pick = self.chance.choice
        params: dict[str, Any] = {"sampling_seed": pick((None, self.chance.randrange(-(2**63), 2**63)))}
        if pick((True, False)):
            params |= {"temperature": self.chance.randint(1, 99) / 8, "top_k": pick((1, 2, 70, TOP_K_OFF))}
            params |= {"top_p": self.chance.randint(1, 8) / 8, "min_p": pick((0.0, 0.25))}
        if pick((True, False)):
            edits = {"min_new_tokens": 3, "grammar": object()}, {"repetition_penalty": 2.0}, {"logit_bias": {}}
            params |= pick(edits)
        one = request(**params)
        one.slot, one.finished, one.chunks = None, False, pick((1, 1, 1, 3))
        asked = types.SimpleNamespace(**{**SAMPLING_DEFAULTS, **params})
        greedy = asked.top_k == 1
        flags = Edit.ADDITIVE if asked.min_new_tokens else Edit(0)
        flags |= Edit.SCALING if asked.repetition_penalty != 1 else Edit(0)
        flags |= Edit.BIAS if asked.logit_bias is not None else Edit(0)
        flags |= Edit.MASK if one.grammar is not None else Edit(0)
        seed = self.runtime.arrivals.seed_of(one, self.runtime.settings.seed)
        one.line = (0.0 if greedy else asked.temperature, asked.top_k, asked.top_p, asked.min_p, seed, flags)
        one.kind = batch_in(self.spare, [1], [one]).kinds[0]
        self.waiting.append(one)

    def _release(self, one: Any) -> None:
        del self.owners[one.slot]
        self.free.append(one.slot)
        one.slot = None

    def _admit(self, limit: int) -> list[Any]:
        """Requests that get slots now, last in first out."""
        admitted = self.waiting[: min(limit, len(self.free))]
        del self.waiting[: len(admitted)]
        for one in admitted:
            one.slot = self.free.pop()
            self.owners[one.slot] = one
        return admitted

    def _join(self, batch: Scheduled | None) -> None:
        if batch is not None and batch.reqs:
            if self.running is not None and self.running.reqs:
                self.running.merge(batch)
            else:
                self.running = batch

    def schedule(self) -> Scheduled | None:
        """The next batch to run, as ``get_next_batch_to_run``."""
        chance = self.chance.random
        outside = self.chunked  # a part of its prompt is in the last batch, and it does not decode yet
        if self.chunked is not None and chance() < 0.1:
            self.chunked.finished = True
            self._release(self.chunked)
            self.chunked = None
            self.seen["a chunk was aborted"] += 1
        if self.prefilled is not None:
            self.prefilled.filter(lambda one: one is not outside and not one.finished)
            self._join(self.prefilled)
            self.prefilled = None
        if chance() < 0.05 and (made := self._admit(2)):  # prefilled elsewhere: no step before it joins
            batch = Scheduled(self.hooks, made)
            if chance() < 0.5:
                made[-1].finished = True
                self._release(made[-1])
                batch.filter(lambda one: not one.finished)
                self.seen["aborted before a step"] += 1
            self._join(batch)
        if self.running is not None:
            self.running.filter(lambda one: not one.finished)
        if (self.chunked is not None or (self.waiting and self.free)) and chance() < 0.6:
            return self._prefill()
        if self.running is None or not self.running.reqs:
            return None
        if chance() < 0.1:
            for one in self.chance.sample(self.running.reqs, 1):
                self._release(one)
                self.running.filter(lambda other, one=one: other is not one)
                self.waiting.insert(0, one)
                self.seen["retracted"] += 1
        return self.running if self.running.reqs else None

    def _prefill(self) -> Scheduled:
        requests = ([] if self.chunked is None else [self.chunked]) + self._admit(self.chance.randint(1, 4))
        self.chunked = None
        for one in requests:
            one.chunks = max(0, one.chunks - 1)
            if one.chunks and self.chunked is None:
                self.chunked = one
            one.chunks = one.chunks if one is self.chunked else 0
        batch = Scheduled(self.hooks, requests)
        if self.running is not None and self.running.reqs and self.chance.random() < 0.3:
            batch.merge(self.running)
            self.running = None
            self.seen["mixed"] += 1
        self.prefilled = batch
        return batch

    def forward(self, batch: Scheduled) -> tuple[Any, list[Any], torch.Tensor]:
        """The sampling info of the step, its requests and their slots: the host goes on and changes the batch."""
        info = batch.sampling_info
        if self.overlap:
            info = types.SimpleNamespace()
            self.hooks.copy_for_forward(info, batch.sampling_info)
        return info, list(batch.reqs), batch.req_pool_indices_cpu

    def draw(self, info: Any, requests: list[Any], slots: torch.Tensor) -> None:
        """The draw of a step on the forward stream, as in ``ModelRunner.sample`` and ``draw.draw``."""
        rows, padding = len(requests), self.chance.randint(0, 4)
        output = types.SimpleNamespace(next_token_logits=LazyLogits(torch.empty(rows, 1), 600, None, None))
        padded = torch.nn.functional.pad(slots, (0, padding))
        self.device.in_forward = True
        self.hooks.sample(None, output, types.SimpleNamespace(sampling_info=info, req_pool_indices=padded))
        batch, positions = batch_of(info), torch.randint(0, 9, (rows,))
        assert batch.kinds == "".join(one.kind for one in requests)
        step = Step(batch, slots_of(info, rows), positions, types.SimpleNamespace(given=~Edit(0)), False)
        gather(self.state, step, rows + padding)
        want = [one.line for one in requests] + [(0.0, 0, 1.0, 0.0, 0, 0)] * padding

        def check() -> None:
            assert tolist(self.state.rows)[: rows + padding] == want
            assert self.state.rows.position[:rows].tolist() == positions.tolist()
            owners = zip(slots.tolist(), requests, strict=True)
            self.seen["slot has another owner"] += any(self.owners.get(slot, one) is not one for slot, one in owners)
            self.seen["steps"] += 1

        self.device.submit(check)
        self.device.in_forward = False

    def process(self, step: Launched) -> None:
        """Read the tokens of a step: some end their answers, whose slots are free from now on."""
        self.device.finish(step.number)
        for one in step.ends:
            if one.slot is not None and not one.finished and self.chance.random() < 0.15:
                one.finished = True
                self._release(one)

    def run(self, steps: int) -> None:
        last: Launched | None = None
        for number in range(steps):
            self.device.step = number
            while len(self.waiting) < 3:
                self.arrive()
            batch, launched = self.schedule(), None
            if batch is not None:
                forward = self.forward(batch)
                launched = Launched(number, [one for one in batch.reqs if one is not self.chunked])
                # Where grammars have to be filled, SGLang draws after it has read the step before.
                delayed = self.overlap and self.chance.random() < 0.3
                if not delayed:
                    self.draw(*forward)
            if not self.overlap:
                last = launched
            if last is not None:
                self.process(last)
            if launched is not None and delayed:
                self.draw(*forward)
            if self.chance.random() < 0.3:  # the device was quick
                self.device.finish(number)
            last = launched if self.overlap else None
        self.device.finish(steps)


@pytest.fixture
def device_model(monkeypatch, no_kinds) -> Device:
    model = Device()
    monkeypatch.setattr(row_table, "draws_in_host_memory", lambda device: False)
    monkeypatch.setattr(row_table, "write_rows", model.write_rows)
    monkeypatch.setattr(row_table, "gather_rows", model.gather_rows)
    return model


@pytest.mark.parametrize("overlap, steps", [(True, 2_000), (False, 500)], ids=["overlap", "no overlap"])
def test_every_draw_gets_the_parameters_of_its_own_requests_while_others_come_and_go(
    runtime, device_model, overlap, steps
):
    """Also a draw that is under way while the slot of a request that has ended is given to the next."""
    scheduler = Scheduler(runtime, device_model, overlap, random.Random(3))
    scheduler.run(steps)
    seen = scheduler.seen
    assert seen["steps"] > 0.9 * steps and runtime.inactive_reason is None
    assert len(row_table.ROWS) > 50, "each request has its kind"
    assert (
        min(seen[name] for name in ("retracted", "mixed", "a chunk was aborted", "aborted before a step")) > steps / 200
    )
    assert (seen["slot has another owner"] > 100) == overlap, "else this says little"
