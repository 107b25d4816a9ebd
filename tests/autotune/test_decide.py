"""The second half of a tuning run, on a simulated device: races, G-tests and what the table records of them."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec
import pytest
from lab.simulated import SimulatedWorker
from tune_examples import (
    DEFAULT,
    ENV,
    EXHAUSTIVE,
    FULL,
    GREEDY,
    H200,
    HEAD,
    OTHER,
    PLAIN,
    QUICK,
    SCREENED,
    TRUNCATE,
    context_of,
    finish,
    simulated_device,
)

from sgl_flashsample.autotune.decide import FLASHINFER_LABEL, MAX_TRIES, Decider
from sgl_flashsample.autotune.labels import key_of, label_of
from sgl_flashsample.autotune.plan import EFFORTS, Plan, StudyKey
from sgl_flashsample.autotune.race import GAIN_TOLERANCE, RECORDED_ROUNDS, gains_apart
from sgl_flashsample.autotune.space import LOGITS
from sgl_flashsample.autotune.staleness import Compilers
from sgl_flashsample.autotune.tables import check
from sgl_flashsample.autotune.writer import TableWriter
from sgl_flashsample.kinds import SamplingPath, path_of
from sgl_flashsample.tables.lookup import load_table
from sgl_flashsample.tables.schema import Table


class Decided:
    """Runs all races of ``kinds``. asked: every request to the worker. table: read back from the written file."""

    def __init__(self, folder, kinds, finalists=(), *, plan=QUICK, sizes=(1,), log=(), alter=None, left=None, **device):
        class Part(Plan):
            pass

        Part.kinds = tuple(kinds)
        plan = Part(H200, HEAD, plan.effort, sizes)
        self.asked, self.notes = [], []
        self.writer = TableWriter(folder, plan, ENV, flashinfer=bool(device.pop("flashinfer", False)))
        self.context = context_of(plan, note=self.notes.append, rejected=self.writer.rejected)
        self.context.log.events += log
        if left is not None:
            self.context.left = left
        worker = SimulatedWorker(simulated_device(**device))
        worker.note = lambda text: None
        decider = Decider(self.context, self.writer, lambda rows, kind: list(finalists), lambda: True)

        def answer(request, answer):
            self.asked.append(request)
            return alter(request, answer) if alter else answer

        with contextlib.suppress(KeyboardInterrupt):  # of ``alter``: the run is interrupted
            for job in decider.jobs():
                finish(job, worker, answer)
        self.done, self.path = decider.done, self.writer.path

    @property
    def table(self) -> Table:
        table, reason = load_table(self.path)
        assert table is not None, reason
        return table


def test_the_fastest_is_stored_with_its_evidence_and_a_size_that_keeps_the_default_with_its_times(tmp_path):
    costs = {label_of(OTHER, PLAIN): {"1": 250.0}, label_of(QUICK.default(64, PLAIN), PLAIN): {"64": 200.0}}
    costs |= {"gemm": {"64": 320.0}, label_of(DEFAULT, PLAIN): {"1": 300.0}}
    decided = Decided(tmp_path, [PLAIN], [OTHER], sizes=(1, 64), costs=costs)
    (entry,), confirmed = decided.table.entries, decided.table.confirmed["plain"]
    assert entry.configuration == OTHER and (entry.kind, entry.rows, entry.default) == ("plain", 1, key_of(DEFAULT))
    assert entry.us == pytest.approx(250.0, rel=0.01) and entry.gain == pytest.approx(1 / 6, abs=0.02)
    assert entry.n == RECORDED_ROUNDS and 0 < entry.se < 2.5 and entry.clock_mhz == 1980.0
    assert entry.checked == "tokens, g-test" and set(entry.others) == {"gemm", "gemm+flashinfer"}
    assert confirmed.rows == [64] and confirmed.us == pytest.approx([200.0], rel=0.01)
    assert confirmed.gemm_us == pytest.approx([320.0], rel=0.01)
    assert decided.table.defaults == QUICK.defaults_digest
    assert check(str(decided.path), Compilers(print))[0] == []


def test_what_loses_its_g_test_is_refused_and_the_next_best_takes_its_place(tmp_path):
    third = next(c for c in QUICK.space(QUICK.studies[0]).first() if c not in (OTHER, DEFAULT))
    costs = {label_of(OTHER, PLAIN): {"1": 200.0}, label_of(third, PLAIN): {"1": 250.0}}
    decided = Decided(tmp_path, [PLAIN, GREEDY], [OTHER, third], costs=costs, faults={label_of(OTHER, PLAIN): "biased"})
    assert [entry.configuration for entry in decided.table.entries] == [third, third]
    assert decided.table.rejected == {"incorrect": 1}
    tested = [request["label"] for request in decided.asked if request["op"] == "gtest"]
    assert tested == [label_of(OTHER, PLAIN), label_of(third, PLAIN)], "greedy batches have the kernels of plain ones"


def test_what_fails_in_a_race_is_left_out_and_a_default_that_does_is_a_failure(tmp_path):
    def fail(request, answer):
        names = [one["name"] for one in request.get("contenders", ())]
        error = {"reason": "shared_memory", "detail": "too much", "fatal": False}
        return {**answer, "failed": {key_of(DEFAULT): error}} if key_of(DEFAULT) in names else answer

    decided = Decided(tmp_path, [PLAIN], [OTHER], alter=fail)
    (entry,) = decided.table.entries
    assert entry.configuration == OTHER and entry.default == "" and entry.gain == 0.0
    assert decided.context.failed_defaults == [f"{label_of(DEFAULT, PLAIN)}: shared_memory: too much"]
    again = Decided(tmp_path, [GREEDY], [OTHER], log=decided.context.log.events)
    assert again.context.failed_defaults == decided.context.failed_defaults, "a later run knows"


ENDED = {"reason": "runtime", "detail": "the process ended", "fatal": True}


def test_a_g_test_that_could_not_be_made_is_made_again(tmp_path):
    failed = []

    def alter(request, answer):
        if request["op"] == "gtest" and not failed:
            failed.append(request)
            return {"error": ENDED}
        return answer

    decided = Decided(tmp_path, [PLAIN], [OTHER], alter=alter, costs={label_of(OTHER, PLAIN): {"1": 250.0}})
    assert failed and decided.table.entry("plain", 1).configuration == OTHER and decided.table.rejected == {}


def test_a_g_test_that_can_never_be_made_refuses_for_its_own_reason_and_only_this_run(tmp_path):
    def alter(request, answer):
        return {"error": ENDED} if request["op"] == "gtest" and request["label"] == label_of(DEFAULT, PLAIN) else answer

    decided = Decided(tmp_path, [PLAIN], [OTHER], alter=alter, costs={label_of(DEFAULT, PLAIN): {"1": 250.0}})
    (event,) = decided.context.log.of("refused")
    assert (event["reason"], event["detail"]) == ("runtime", "the G-test could not be made: the process ended")
    assert decided.table.rejected == {"runtime": 1} and decided.table.entry("plain", 1).configuration == OTHER
    again = Decided(
        tmp_path, [PLAIN], [OTHER], log=decided.context.log.events, costs={label_of(DEFAULT, PLAIN): {"1": 250.0}}
    )
    assert again.context.failed_defaults == [] and again.table.confirmed["plain"].rows == [1], "it races again"


@pytest.mark.parametrize("contradicting", [1, MAX_TRIES], ids=["once", "always"])
def test_a_race_whose_times_contradict_its_rounds_is_run_again(tmp_path, contradicting):
    """A GPU may be slower during the race than while the recorded times are measured."""
    races = []

    def alter(request, answer):
        if request["op"] == "rounds" and request["rounds"] == RECORDED_ROUNDS and request["first"] == 0:
            races.append(request)
            if len(races) <= contradicting:
                answer["samples"][key_of(DEFAULT)] = [260.0] * RECORDED_ROUNDS
        return answer

    costs = {label_of(OTHER, PLAIN): {"1": 250.0}, label_of(DEFAULT, PLAIN): {"1": 300.0}}
    decided = Decided(tmp_path, [PLAIN], [OTHER], alter=alter, costs=costs)
    (entry,) = decided.table.entries
    repeats = [line for line in decided.notes if "its times contradict its rounds; again" in line]
    assert entry.configuration == OTHER and len(repeats) == len(races) - 1 == min(contradicting, MAX_TRIES - 1)
    assert (gains_apart(entry.gain, entry.us, entry.default_us) <= GAIN_TOLERANCE) == (contradicting == 1)
    errors, _, _ = check(str(decided.path), Compilers(print))
    assert any("its times give" in error for error in errors) == (contradicting > 1), "it is not published unseen"


def test_recorded_times_are_of_the_rounds_and_the_company_in_which_they_are_measured_again(tmp_path):
    decided = Decided(tmp_path, [PLAIN], [OTHER], costs={label_of(OTHER, PLAIN): {"1": 250.0}})
    *_, last = [request for request in decided.asked if request["op"] == "rounds"]
    assert (last["first"], last["rounds"]) == (0, RECORDED_ROUNDS)
    assert last["names"] == [key_of(OTHER), key_of(DEFAULT), "gemm", "gemm+flashinfer"]


def test_with_a_screen_what_is_fastest_without_one_races_too(tmp_path):
    screened = QUICK.default(1, SCREENED)
    costs = {label_of(OTHER, PLAIN): {"1": 250.0}, label_of(screened, SCREENED): {"1": 160.0}}
    table = Decided(tmp_path, [PLAIN, SCREENED], [OTHER], costs=costs).table
    assert table.confirmed["plain+screen"].us == pytest.approx([160.0], rel=0.01)
    costs[label_of(screened, SCREENED)] = {"1": 400.0}
    decided = Decided(tmp_path, [PLAIN, SCREENED], [], costs=costs | {label_of(DEFAULT, PLAIN): {"1": 250.0}})
    entry = decided.table.entry("plain+screen", 1)
    assert entry.configuration == DEFAULT and entry.others["screened"] == pytest.approx(400.0, rel=0.02)
    assert decided.table.measure["screen"] == Plan(H200, HEAD, QUICK.effort, (1,)).screen


@pytest.mark.parametrize("kind, rows", [(SCREENED, 64), (PLAIN, 256)], ids=["screened", "fused"])
def test_a_built_in_choice_that_is_for_requests_alone_races_whatever_the_search_has_found(tmp_path, kind, rows):
    (on_request,) = QUICK.on_request(rows, kind)
    costs = {label_of(on_request, kind): {str(rows): 160.0}}
    table = Decided(tmp_path, [kind], sizes=(rows,), costs=costs).table
    assert table.entry(str(kind), rows).configuration == on_request != QUICK.default(rows, kind)


@pytest.mark.parametrize("us, taken", [(150.0, True), (299.0, False)])
@pytest.mark.parametrize("fault", [None, "biased"])
def test_flashinfer_is_chosen_only_where_it_was_allowed_is_certainly_faster_and_draws_right(tmp_path, us, taken, fault):
    device = {"costs": {"flashinfer": {"1": us}}, "faults": {FLASHINFER_LABEL: fault} if fault else {}}
    device["model"] = {"us": 300.0, "rugged": 0.0}
    decided = Decided(tmp_path, [TRUNCATE, PLAIN], flashinfer=True, **device)
    table = decided.table
    chosen = [entry for entry in table.entries if entry.flashinfer]
    assert [(entry.kind, entry.configuration) for entry in chosen] == (
        [("truncate", QUICK.default(1, TRUNCATE))] if taken and not fault else []
    )
    assert table.measure["allowed"] == "flashinfer"
    if fault and taken:
        assert any("FlashInfer is not chosen: G-test: p = 1.0e-12" in line for line in decided.notes)
    refused = Decided(tmp_path, [TRUNCATE], **device)
    assert not any(entry.flashinfer for entry in refused.table.entries) and "allowed" not in refused.table.measure


@pytest.fixture
def between() -> dict:
    """Arguments of a run at 64 and 256 rows: at 160 rows, the configuration of 256 rows is far slower than the
    default."""
    default = FULL.default(160, PLAIN)
    fast_at_256 = next(c for c in FULL.space(FULL.studies[3]).first() if c != default)
    costs = {label_of(default, PLAIN): {"160": 200.0, "256": 400.0}}
    costs[label_of(fast_at_256, PLAIN)] = {"64": 300.0, "256": 300.0}
    device = {"costs": costs, "model": {"us": 500.0, "rugged": 0.05}}
    return {"kinds": [PLAIN], "finalists": [fast_at_256], "plan": FULL, "sizes": (64, 256), **device}


def test_what_lies_between_two_sizes_gets_one_of_its_own_where_it_matters(tmp_path, between):
    decided = Decided(tmp_path, **between)
    assert decided.table.sizes("plain") == [64, 160, 256] and 160 in decided.table.confirmed["plain"].rows
    (event,) = decided.context.log.of("transfer")
    assert event["inserted"] and event["regret"] == pytest.approx(0.5, abs=0.02)
    again = Decided(tmp_path, log=decided.context.log.events, **between)
    assert again.asked == [] and again.done == 2, "what a log says is not raced again"


def test_a_quick_run_races_between_two_sizes_where_the_fused_pass_took_the_larger_one_from_a_gemm(tmp_path, between):
    decided = Decided(tmp_path, **between | {"plan": QUICK})
    assert path_of(between["finalists"][0]) is SamplingPath.FUSED
    assert decided.table.sizes("plain") == [64, 160, 256] and decided.table.confirmed["plain"].rows == [160]


def test_a_quick_run_races_nothing_between_two_sizes_on_the_path_of_the_built_in_choice(tmp_path):
    reader = next(c for c in QUICK.space(StudyKey(LOGITS, PLAIN, 0)).first() if c != QUICK.default(256, PLAIN))
    costs = {label_of(reader, PLAIN): {"64": 600.0, "256": 300.0}}
    device = {"costs": costs, "model": {"us": 500.0, "rugged": 0.05}}
    decided = Decided(tmp_path, [PLAIN], [reader], sizes=(64, 256), **device)
    assert [entry.configuration for entry in decided.table.entries if entry.rows == 256] == [reader]
    assert decided.table.sizes("plain") == [64, 256] and not decided.context.log.of("transfer")


def test_a_race_between_two_sizes_is_of_its_effort_and_is_over_once_its_outcome_is_in_the_table(tmp_path, between):
    first = Decided(tmp_path, **between)
    other = Decided(tmp_path, log=first.context.log.events, **between | {"plan": EXHAUSTIVE})
    assert [event["effort"] for event in other.context.log.of("transfer")] == ["full", "exhaustive"]

    def interrupt(request, answer):
        requests.append(request["op"])
        if requests.count("codes") == 3:  # of the size between: its race is over, and no table has it
            raise KeyboardInterrupt
        return answer

    requests = []
    broken = Decided(tmp_path / "broken", alter=interrupt, **between)
    assert broken.table.sizes("plain") == [64, 256]
    resumed = Decided(tmp_path / "broken", log=broken.context.log.events, **between)
    assert resumed.table.sizes("plain") == [64, 160, 256]


def test_a_decision_of_another_effort_or_without_flashinfer_is_not_recalled(tmp_path):
    events = Decided(tmp_path, [PLAIN], [OTHER]).context.log.events
    assert Decided(tmp_path, [PLAIN], [OTHER], log=events).done == 1
    assert not Decided(tmp_path, [PLAIN], log=events, left=lambda: 0.0, plan=FULL).done
    assert not Decided(tmp_path, [PLAIN], log=events, left=lambda: 0.0, flashinfer=True).done
    broken = [{**event, "entry": {"kind": "plain"}} for event in events if event["event"] == "decided"]
    assert not Decided(tmp_path, [PLAIN], log=broken, left=lambda: 0.0).done


def test_sizes_that_were_there_stay_until_they_are_decided_anew_and_only_while_nothing_else_has_changed(tmp_path):
    costs = {label_of(OTHER, PLAIN): {"1": 250.0}, label_of(QUICK.default(64, PLAIN), PLAIN): {"64": 200.0}}
    first = Decided(tmp_path, [PLAIN], [OTHER], sizes=(1, 64), costs=costs).table
    assert first.entry("plain", 1) is not None and first.confirmed["plain"].rows == [64]
    second = Decided(tmp_path, [PLAIN], sizes=(2,)).table
    assert second.entry("plain", 1) == first.entry("plain", 1)
    assert (
        second.confirmed["plain"].rows == [2, 64] and second.confirmed["plain"].us[1] == first.confirmed["plain"].us[0]
    )
    third = Decided(tmp_path, [PLAIN], sizes=(1,)).table
    assert third.confirmed["plain"].rows == [1, 2, 64] and third.entries == [], "1 is decided anew"
    for change in ({"defaults": "sha256:0"}, {"env": {**ENV, "triton": "3.7.0"}}, {"simulated": True}):
        path = tmp_path / first.file_name
        path.write_text(msgspec.structs.replace(first, **change).dumps())
        assert Decided(tmp_path, [PLAIN], sizes=(2,)).table.sizes("plain") == [2]


def test_a_table_that_is_not_gone_on_with_is_kept_under_a_name_of_its_own_once_there_is_another(tmp_path):
    first = Decided(tmp_path, [PLAIN], sizes=(1, 64)).table
    notes = []

    def writer(**changes) -> TableWriter:
        return TableWriter(tmp_path, QUICK, **{"env": ENV, "note": notes.append} | changes)

    path = writer(env={**ENV, "triton": "3.7.0"}).path
    assert load_table(path)[0] == first, "nothing is decided yet"
    changes = {"env": {**ENV, "triton": "3.7.0"}}, {"flashinfer": True}
    for number, change in zip(("", 2), changes, strict=True):
        before = path.read_bytes()
        other = writer(**change)
        other.write()
        other.write()
        assert path.with_suffix(f".old{number}").read_bytes() == before != path.read_bytes()
    path.write_text("{")
    writer().write()
    assert path.with_suffix(".old3").read_text() == "{"
    why = ("measured with different versions (triton 3.6.0 and 3.7.0)", "", "it is not JSON")
    assert len(notes) == len(why) and all(text in note for text, note in zip(why, notes, strict=True))


def test_a_table_is_up_to_date_at_its_effort_and_below_for_the_sizes_that_it_has(tmp_path):
    decided = Decided(tmp_path, [PLAIN], sizes=(1, 64))
    decided.writer.provenance = {"complete": True}
    decided.writer.write()

    def up_to_date(effort="quick", sizes=(1,), kinds=(PLAIN,), **changes):
        class Part(Plan):
            pass

        Part.kinds = kinds
        return TableWriter(tmp_path, Part(H200, HEAD, EFFORTS[effort], sizes), **{"env": ENV} | changes).up_to_date()

    assert up_to_date() and up_to_date(sizes=(1, 64))
    assert not up_to_date(effort="full") and not up_to_date(sizes=(1, 2)) and not up_to_date(kinds=(PLAIN, SCREENED))
    assert not up_to_date(flashinfer=True) and not up_to_date(env={**ENV, "torch": "2.12.0"})
    decided.writer.provenance = {"complete": False}
    decided.writer.write()
    assert not up_to_date()


def test_sizes_of_less_effort_or_of_a_run_that_failed_are_not_passed_off_as_more_while_they_stay(tmp_path):
    def decided(sizes, plan, complete=True):
        run = Decided(tmp_path, [PLAIN, SCREENED], sizes=sizes, plan=plan)
        run.writer.provenance = {"complete": complete}
        run.writer.write()
        return run.table

    first = decided((1, 64), QUICK, complete=False)
    second = decided((1,), FULL)
    assert second.effort == "quick" and second.provenance["complete"] is False
    assert second.measure["screen"] == first.measure["screen"] and first.measure["screen"]["rows"] == 64
    third = decided((1, 64), FULL)
    assert third.effort == "full" and third.provenance["complete"] is True


def test_a_policy_is_tighter_the_more_looks_it_takes():
    assert EFFORTS["quick"].policy.looks < EFFORTS["full"].policy.looks
    assert dataclasses.replace(EFFORTS["full"].policy, most=60).looks > EFFORTS["full"].policy.looks
