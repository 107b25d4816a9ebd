"""The second half of a run: per batch size a race of the finalists, the built-in choice and the baselines, a G-test of
the winner, and the table written anew."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import msgspec

from ..kernels.config import ReadConfig
from ..kinds import KIND_NAMES, BatchKind, Config, SamplingPath, path_of
from ..tables.lookup import buffer_bytes
from ..tables.schema import Entry, config_fields
from .baselines import baseline_names
from .errors import LASTING
from .labels import codes_request, config_of, kernel_kind, key_of, label_of, setup_request
from .plan import midpoint
from .pool import Job
from .race import (
    GAIN_TOLERANCE,
    RECORDED_ROUNDS,
    Candidate,
    Policy,
    Race,
    Verdict,
    certainly_faster,
    gains_apart,
    median_and_error,
    preference_of,
)
from .search import Context
from .trials import recalled
from .writer import TableWriter

SETUP_SECONDS = 20.0  # without the contenders, each of which takes more
EACH_SECONDS = 8.0
ROUND_SECONDS = 20.0
CODE_SECONDS = 60.0
GTEST_DRAWS, GTEST_SECONDS = 200_000, 60.0
GTEST_TRIES = 2  # attempts, where the process ends or has no memory
MAX_TRIES = 4  # attempts at a race, where its process ends or its times contradict its rounds
NOISY = 0.01  # relative standard error of a winner's time; for a whole run, the median of the winners
ALPHA = 1e-5  # G-test significance; low because a run does dozens, and real bugs fail by orders of magnitude
TRANSFER_REGRET = 0.03  # regret between two sizes at which a size is inserted
CERTAIN_REGRET = 0.01  # or loss against the built-in choice that is certain

TRUNCATE = BatchKind(truncate=True)
FLASHINFER = SamplingPath.FLASHINFER
FLASHINFER_LABEL = f"{TRUNCATE}/{FLASHINFER}"

# A generator that yields requests like a job, and returns something.
Steps = Generator[tuple[dict[str, Any], float], dict[str, Any], Any]


@dataclasses.dataclass
class Outcome:
    """A race that is over. configs: of the candidates, by key. samples: microseconds per round of everything whose
    times are recorded. clock: the median meanwhile. default: the key of the built-in choice, "" where it could not
    race. flashinfer: whether the flashinfer path is faster for certain. code: the winner's machine code, "" where
    unknown."""

    kind: BatchKind
    rows: int
    verdict: Verdict
    configs: dict[str, Config]
    samples: dict[str, list[float]]
    clock: float
    default: str
    flashinfer: bool = False
    code: str = ""

    @property
    def winner(self) -> Config:
        return self.configs[self.verdict.winner]

    def entry(self) -> Entry:
        """The decision with its evidence, as a table has it."""
        winner = self.verdict.winner
        timed = {name: median_and_error(values) for name, values in self.samples.items()}
        us, se = timed[winner]
        others: dict[str, float] = {}  # by path, or the name of a baseline
        for name, (median, _) in timed.items():
            path = path_of(self.configs[name]).value if name in self.configs else name
            if path != path_of(self.winner):
                others[path] = min(median, others.get(path, median))
        gain = self.verdict.gain if winner != self.default else 0.0
        return Entry(
            kind=str(self.kind),
            rows=self.rows,
            path=path_of(self.winner).value,
            config=config_fields(self.winner),
            flashinfer=self.flashinfer,
            us=round(us, 3),
            se=round(se, 4),
            n=len(self.samples[winner]),
            default=self.default,
            default_us=round(timed[self.default][0], 3) if self.default else 0.0,
            gain=round(1.0 - 1.0 / (1.0 + gain), 5),
            against=len(self.configs) - 1,
            tied=list(self.verdict.tied),
            checked="tokens, g-test",
            code=self.code,
            clock_mhz=self.clock,
            others={name: round(median, 3) for name, median in others.items()},
        )


def entry_of(event: dict[str, Any]) -> Entry:
    """The entry of a "decided" event. Raises ValueError or KeyError."""
    entry = msgspec.convert(event["entry"], Entry)
    config_of(entry.path, entry.config)
    return entry


def _refusal_of(event: dict[str, Any]) -> tuple[Config, BatchKind, str, str]:
    config = config_of(event["path"], event["config"])
    return config, KIND_NAMES[event["kind"]], event["reason"], event["detail"]


def recorded_names(verdict: Verdict, configs: dict[str, Config], default: str, baselines: list[str]) -> list[str]:
    """The names whose times a table records: the winner, the built-in choice, the best of each other path and the
    baselines, side by side in the rounds in which ``verify`` will take them again. Race samples are not reused: the
    contenders differ, and power and clock differ with them."""
    best: dict[str, str] = {}
    for key in sorted(configs.keys() & verdict.standings.keys(), key=lambda key: verdict.standings[key].us):
        best.setdefault(path_of(configs[key]), key)
    best[path_of(configs[verdict.winner])] = verdict.winner
    names = [verdict.winner, *([default] if default else []), *best.values(), *baselines]
    return list(dict.fromkeys(names))


class Decider:
    """finalists: the configurations that may race for a batch size and kind. flashinfer: true once it can be
    raced."""

    def __init__(
        self,
        context: Context,
        writer: TableWriter,
        finalists: Callable[[int, BatchKind], list[Config]],
        flashinfer: Callable[[], bool],
    ) -> None:
        self.context, self.writer, self.finalists, self.flashinfer = context, writer, finalists, flashinfer
        # A decision of a run with other values is not taken over.
        self._same_run = {"effort": context.plan.effort.name, "flashinfer": writer.flashinfer}
        self._tested: dict[str, float] = {}  # p-values by label
        self._recall()

    def _recall(self) -> None:
        """Take over the decisions of an earlier run of this effort. A refusal whose reason may be gone is forgotten."""
        log, plan = self.context.log, self.context.plan
        self._tested |= recalled(log.of("gtest"), lambda event: (str(event["label"]), float(event["p"])))
        for config, kind, reason, detail in recalled(log.of("refused"), _refusal_of):
            if reason in LASTING:
                self.context.reject(config, kind, reason, detail)
        for entry in recalled(self._of_same_run("decided"), entry_of):
            if KIND_NAMES.get(entry.kind) in plan.kinds and self._stands(entry):
                self.writer.add(entry)

    def _of_same_run(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.context.log.of(event) if one.items() >= self._same_run.items()]

    def _stands(self, entry: Entry) -> bool:
        """True where a recorded decision is final: its error is small, and the built-in choice has raced or is known to
        fail."""
        kind = KIND_NAMES[entry.kind]
        raced = entry.default or self._is_refused(self.context.plan.default(entry.rows, kind), kind)
        return bool(raced) and entry.se <= NOISY * entry.us

    @property
    def done(self) -> int:
        """Races of the plan that are decided."""
        plan = self.context.plan
        return sum(rows in self._decided(kind) for kind in plan.kinds for rows in plan.sizes_of(kind))

    @property
    def errors(self) -> list[float]:
        """Standard errors of the winners' times, relative."""
        return [entry.se / entry.us for sizes in self.writer.decided.values() for entry in sizes.values()]

    def entered(self) -> Iterator[tuple[Config, BatchKind]]:
        """The configurations that race whatever the search has found, in the order of the races."""
        plan = self.context.plan
        for kind in plan.kinds:
            for rows in plan.sizes_of(kind):
                if rows not in self._decided(kind):
                    for config in (plan.default(rows, kind), *plan.on_request(rows, kind)):
                        yield config, kind
                    yield self._unscreened(kind, rows), kind

    def jobs(self) -> Iterable[Job]:
        """One job per kind of batch: its sizes in order, since each decision helps the next; then sizes between
        them."""
        for kind in self.context.plan.kinds:
            yield self._all_of(kind)

    def _all_of(self, kind: BatchKind) -> Job:
        plan = self.context.plan
        for rows in plan.sizes_of(kind):
            if rows not in self._decided(kind) and self.context.left() > 0:
                yield from self._decide(kind, rows)
        if self.context.left() > 0:
            yield from self._transfer(kind)

    def _decided(self, kind: BatchKind) -> dict[int, Entry]:
        return self.writer.decided.get(kind, {})

    def _neighbour(self, kind: BatchKind, rows: int) -> Config | None:
        """The choice of the next smaller size."""
        smaller = [other for other in self._decided(kind) if other < rows]
        return self._decided(kind)[max(smaller)].configuration if smaller else None

    def _unscreened(self, kind: BatchKind, rows: int) -> Config:
        """The choice of such a batch without a screen, as far as that is decided."""
        decided = self._decided(kind.unscreened).get(rows)
        return decided.configuration if decided is not None else self.context.plan.default(rows, kind.unscreened)

    def _decide(self, kind: BatchKind, rows: int) -> Steps:
        finalists = self.finalists(rows, kind)
        while True:
            outcome = yield from self._race(kind, rows, finalists)
            if outcome is None or (yield from self._passes(outcome)):
                break
            finalists = [config for config in finalists if config != outcome.winner]
        if outcome is not None:
            yield from self._write(outcome)

    def _passes(self, outcome: Outcome) -> Steps:
        """True where many draws of the winner follow the distribution, and FlashInfer's too where it has won."""
        refusal = yield from self._gtest(self.context.request("gtest", outcome.winner, outcome.kind))
        if refusal is not None:
            self._refuse(outcome.winner, outcome.kind, *refusal)
            return False
        if outcome.flashinfer:
            request = {"op": "gtest", "head": self.context.head, "kind": str(TRUNCATE), "path": FLASHINFER.value}
            refusal = yield from self._gtest({**request, "config": None, "label": FLASHINFER_LABEL})
            if refusal is not None:
                self.context.rejected[FLASHINFER_LABEL], detail = refusal
                self.context.note(f"FlashInfer is not chosen: {detail}")
                outcome.flashinfer = False
        return True

    def _gtest(self, request: dict[str, Any]) -> Steps:
        """A refusal where the draws do not follow the distribution, or the test could not be made; else None."""
        label, tries = request["label"], 0
        while label not in self._tested:
            answer = yield {**request, "draws": GTEST_DRAWS}, GTEST_SECONDS
            tries += 1
            if "error" not in answer:
                self._tested[label] = float(answer["p"])
                self.context.log.add("gtest", label=label, p=answer["p"], draws=answer["draws"])
            elif tries == GTEST_TRIES:
                return answer["error"]["reason"], f"the G-test could not be made: {answer['error']['detail']}"
        p = self._tested[label]
        return ("incorrect", f"G-test: p = {p:.1e}") if p < ALPHA else None

    def _race(self, kind: BatchKind, rows: int, finalists: list[Config]) -> Steps:
        """The outcome; None where no race came about."""
        plan, began = self.context.plan, time.monotonic()
        # Seconds: an equal share of the time that is left.
        allotted = len(self.context.gpus.processes) * max(0.0, self.context.left()) / max(1, plan.races - self.done)
        default, neighbour = plan.default(rows, kind), self._neighbour(kind, rows)
        entered = [default, *plan.on_request(rows, kind), *finalists]
        entered += [neighbour] if neighbour is not None else []
        if kind.screen:  # a screen must beat this choice to earn its memory
            entered.append(self._unscreened(kind, rows))
        configs = {key_of(config): config for config in entered if not self._is_refused(config, kind)}
        others = baseline_names(kind, plan.head, flashinfer=self.flashinfer())
        # Only a whole vocabulary is truncated: a shard has no such batches.
        allowed = self.writer.flashinfer and self.flashinfer() and FLASHINFER_LABEL not in self.context.rejected
        if allowed and kind == TRUNCATE:
            others.append(FLASHINFER.value)
        for tries in range(1, MAX_TRIES + 1):
            if not configs:
                return None
            request = setup_request(plan.head, kind, rows, configs, others)
            answer = yield request, SETUP_SECONDS + EACH_SECONDS * len(request["contenders"])
            if "error" in answer:  # without a name, the process has ended for no reason that we know
                self._drop(answer.get("at", ""), answer["error"], configs, others, kind)
                continue
            for name, error in answer["failed"].items():
                self._drop(name, error, configs, others, kind)
            if not configs:
                return None
            race = self._new_race(configs, default, neighbour)
            beside: dict[str, list[float]] = {name: [] for name in others}
            failed = yield from self._run(race, beside, began, allotted)
            if failed is None and race.verdict is not None:
                verdict, default_key = race.verdict, race.default or ""
                names = recorded_names(verdict, configs, default_key, others)
                answer = yield {"op": "rounds", "names": names, "rounds": RECORDED_ROUNDS, "first": 0}, ROUND_SECONDS
                if "error" not in answer:
                    clock, samples = statistics.median(answer["clocks"]), answer["samples"]
                    outcome = Outcome(kind, rows, verdict, configs, samples, clock, default_key)
                    if beside.get(FLASHINFER):
                        winner = race.samples[verdict.winner]
                        outcome.flashinfer = certainly_faster(beside[FLASHINFER], winner, race.clocks, race.policy)
                    entry = outcome.entry()  # the gain by the recorded times, and by the paired rounds of the race
                    agrees = gains_apart(entry.gain, entry.us, entry.default_us) <= GAIN_TOLERANCE
                    if tries == MAX_TRIES or self.context.left() <= 0 or agrees:
                        return outcome
                    failed, began = "its times contradict its rounds", time.monotonic()
                else:
                    failed = answer["error"]["detail"]
            self.context.note(f"{kind} {rows}: the race broke off: {failed}; again")
        return None

    def _new_race(self, configs: dict[str, Config], default: Config, neighbour: Config | None) -> Race:
        candidates = []
        for key, config in configs.items():
            size = 0 if isinstance(config, ReadConfig) else buffer_bytes(config, self.context.plan.itemsize)
            order = (config == default, config == neighbour, size, config.stages, dataclasses.astuple(config))
            candidates.append(Candidate(key, preference_of(*order)))
        policy: Policy = self.context.plan.effort.policy
        return Race(candidates, key_of(default) if key_of(default) in configs else None, policy)

    def _run(self, race: Race, beside: dict[str, list[float]], began: float, allotted: float) -> Steps:
        """Run rounds until the race is decided. Returns the error, None without one. beside: samples of the names that
        are timed without competing."""
        while True:
            names, rounds = race.due()
            if not names:
                return None
            along = [name for name, samples in beside.items() if len(samples) < race.policy.least]
            request = {"op": "rounds", "names": [*names, *along], "rounds": rounds, "first": len(race.clocks)}
            answer = yield request, ROUND_SECONDS
            if "error" in answer:
                return answer["error"]["detail"]
            for name in along:
                beside[name] += answer["samples"][name]
            over = time.monotonic() - began > allotted or self.context.left() <= 0
            race.add({name: answer["samples"][name] for name in names}, answer["clocks"], last=over)

    def _drop(
        self, name: str, error: dict[str, Any], configs: dict[str, Config], others: list[str], kind: BatchKind
    ) -> None:
        """Take out the configurations that failed."""
        if name in others:
            others.remove(name)
            self.context.note(f"{name} is left out: {error['detail']}")
        elif name in configs:
            self._refuse(configs.pop(name), kind, error["reason"], error["detail"])

    def _refuse(self, config: Config, kind: BatchKind, reason: str, detail: str) -> None:
        path = path_of(config)
        about = {"kind": str(kernel_kind(kind, path)), "path": path.value, "config": config_fields(config)}
        self.context.log.add("refused", **about, reason=reason, detail=detail)
        self.context.reject(config, kind, reason, detail)

    def _is_refused(self, config: Config, kind: BatchKind) -> bool:
        return label_of(config, kind) in self.context.rejected

    def _write(self, outcome: Outcome) -> Steps:
        request = codes_request(self.context.plan.head, [(outcome.winner, outcome.kind)])
        answer = yield request, CODE_SECONDS
        if "error" in answer:
            self.context.note(f"{outcome.kind} {outcome.rows}: no machine code: {answer['error']['detail']}")
        else:
            outcome.code = answer["codes"][0]
        entry = outcome.entry()
        self.writer.add(entry)
        self.context.log.add("decided", **self._same_run, entry=msgspec.to_builtins(entry))
        self.writer.write()
        gain = f"{entry.gain:.1%} less than the built-in choice"
        gain = "the built-in choice stays" if self.writer.is_default(entry) else gain
        self.context.note(
            f"{entry.kind:13} {entry.rows:4} rows: {entry.us:8.1f} us  {outcome.verdict.winner}  ({gain})"
        )

    def _transfer(self, kind: BatchKind) -> Steps:
        """Race between two sizes: a batch there takes the choice of the larger one, which must not cost much."""
        plan = self.context.plan
        decided = [entry for rows, entry in sorted(self._decided(kind).items()) if rows in plan.sizes_of(kind)]
        raced = {event.get("rows") for event in self._of_same_run("transfer") if event.get("kind") == str(kind)}
        for small, large in itertools.pairwise(decided):
            rows = midpoint(small.rows, large.rows)
            if rows is None or self.context.left() <= 0 or rows in raced:
                continue
            served = large.configuration
            default = plan.default(rows, kind)
            if small.configuration == served == default:
                continue
            # A fused tile takes as long for some of its rows as for all, a GEMM does not.
            fused_for_logits = path_of(served) is SamplingPath.FUSED and path_of(default) is SamplingPath.LOGITS
            if not plan.effort.transfer and not fused_for_logits:
                continue
            outcome = yield from self._race(kind, rows, [served, small.configuration])
            if outcome is None or key_of(served) not in outcome.verdict.standings:
                continue
            verdict = outcome.verdict
            standing = verdict.standings[key_of(served)]
            regret = standing.us / verdict.standings[verdict.winner].us - 1.0
            insert = verdict.winner != key_of(served) and (
                regret > TRANSFER_REGRET or (verdict.winner == outcome.default and standing.low > CERTAIN_REGRET)
            )
            if inserted := insert and (yield from self._passes(outcome)):
                yield from self._write(outcome)
            # Only now: a later run skips this race, and must find its outcome in the log.
            about = {"kind": str(kind), "rows": rows, "regret": round(regret, 5), "inserted": inserted}
            self.context.log.add("transfer", **self._same_run, **about)
