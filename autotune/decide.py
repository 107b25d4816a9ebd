"""The second half of a run: per bucket a race of the finalists, the default and the rivals, a G-test of the winner, and
the table written anew."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from ..table import Bucket
from ..work import Path, Work
from . import rivals
from .builtin import kernels_of
from .names import key_of, label_of, path_of, path_of_key
from .outcome import Outcome, times_of
from .plan import midpoint
from .publish import Publisher, key_map
from .race import Contender, Policy, Race, certainly_faster, preference_of
from .remote import Job
from .search import Context
from .space import Config, shared_bytes
from .trials import config_data, config_of

SETUP_SECONDS = 20.0  # and more for each contender
EACH_SECONDS = 8.0
ROUND_SECONDS = 20.0
GTEST_SECONDS = 60.0
MOST_TRIES = 4  # of a race whose process ends, or whose times contradict the rounds they are of
ALPHA = 1e-5  # of a G-test: a run makes dozens, and what is wrong is off by far more than 200,000 draws show
TRANSFER = 0.03  # regret between buckets at which a bucket is inserted
CERTAIN = 0.01  # or this much slower than the default, for certain

FLASHINFER_LABEL = f"{Work.TRUNCATE}/{Path.FLASHINFER}"

# A generator that yields requests like a job, and returns something.
Steps = Generator[tuple[dict[str, Any], float], dict[str, Any], Any]


class Decider:
    """finalists: who may race for a batch size and kind of work. flashinfer: whether it can be raced by now."""

    def __init__(
        self,
        context: Context,
        publisher: Publisher,
        finalists: Callable[[int, Work], list[Config]],
        flashinfer: Callable[[], bool],
    ) -> None:
        self.context, self.publisher, self.finalists, self.flashinfer = context, publisher, finalists, flashinfer
        self.done = 0
        self.noisy: list[float] = []  # standard errors of the winners' times, relative
        self.unfinished: list[str] = []
        self._tested: dict[str, float] = {}
        self._refused: set[str] = set()  # labels of what failed in a race or a G-test
        self._recall()

    @property
    def races(self) -> int:
        return self.context.plan.races

    def _recall(self) -> None:
        """Buckets that an earlier run of this effort has finished."""
        for event in self.context.log.of("gtest"):
            self._tested[event.get("label", "")] = event.get("p", 0.0)
        for event in self.context.log.of("bucket"):
            try:
                if (
                    event["effort"] != self.context.plan.effort.name
                    or event.get("flashinfer", False) != self.publisher.flashinfer
                    or Work(event["work"]) not in self.context.plan.works
                ):
                    continue
                configs = {key: config_of(path_of_key(key), data) for key, data in event["configs"].items()}
                bucket = Bucket(**event["bucket"])
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            self.publisher.add(event["work"], event["batch"], bucket, configs)
        decided = self.publisher.buckets
        self.done = sum(
            rows in decided.get(work.value, {})
            for work in self.context.plan.works
            for rows in self.context.plan.buckets_of(work)
        )

    def entered(self) -> Iterator[tuple[Config, Work]]:
        """What races whatever the search has found, race by race, and whose kernels it is."""
        plan = self.context.plan
        for work in plan.works:
            for rows in plan.buckets_of(work):
                if rows not in self._decided(work):
                    for config in (plan.default(rows, work), self._unscreened(work, rows)):
                        yield config, kernels_of(work, config)

    def jobs(self) -> Iterable[Job]:
        """One job per kind of work: its buckets in order, since each helps the next; then what lies between them."""
        for work in self.context.plan.works:
            yield self._all_of(work)

    def _all_of(self, work: Work) -> Job:
        plan = self.context.plan
        for rows in plan.buckets_of(work):
            if rows in self._decided(work):
                continue
            if self.context.left() <= 0:
                self.unfinished.append(f"{work.value}/{rows}")
                continue
            yield from self._bucket(work, rows)
        if plan.effort.transfer and self.context.left() > 0:
            yield from self._transfer(work)

    def _decided(self, work: Work) -> dict[int, Bucket]:
        return self.publisher.buckets.get(work.value, {})

    def _neighbour(self, work: Work, rows: int) -> Config | None:
        """What the next smaller bucket uses."""
        smaller = [other for other in self._decided(work) if other < rows]
        return self.publisher.configs[self._decided(work)[max(smaller)].use] if smaller else None

    def _unscreened(self, work: Work, rows: int) -> Config:
        """What such a batch takes without a screen, as far as that is decided."""
        decided = self._decided(work.unscreened).get(rows)
        if decided is None:
            return self.context.plan.default(rows, work.unscreened)
        return self.publisher.configs[decided.use]

    def _allotment(self) -> float:
        """Seconds that one race may take: an equal share of what is left."""
        left = max(1, self.races - self.done)
        return len(self.context.gpus.remotes) * max(0.0, self.context.left()) / left

    def _bucket(self, work: Work, rows: int) -> Steps:
        finalists = self.finalists(rows, work)
        while True:
            outcome = yield from self._race(work, rows, finalists)
            if outcome is None:
                self.unfinished.append(f"{work.value}/{rows}")
                return
            winner = outcome.configs[outcome.verdict.winner]
            label = label_of(winner, kernels_of(work, winner).value)
            p = yield from self._gtest(winner, work, label)
            if p >= ALPHA:
                yield from self._check_flashinfer(outcome, work)
                self._publish(work, rows, outcome)
                return
            self._refuse(winner, work, "incorrect", f"G-test: p = {p:.1e}")
            finalists = [config for config in finalists if config != winner]

    def _race(self, work: Work, rows: int, finalists: list[Config], policy: Policy | None = None) -> Steps:
        """None where no race came about."""
        plan, began, allotted = self.context.plan, time.monotonic(), self._allotment()
        default, neighbour = plan.default(rows, work), self._neighbour(work, rows)
        entered = [default, *finalists, *([neighbour] if neighbour is not None else [])]
        if work.screened:  # what the screen's memory buys is what it is faster than
            entered.append(self._unscreened(work, rows))
        configs = key_map([config for config in dict.fromkeys(entered) if not self._is_refused(config, work)])
        others: dict[str, list[float]] = {name: [] for name in rivals.names_for(work, self.flashinfer())}
        if self._may_take_flashinfer(work):
            others[Path.FLASHINFER] = []
        for tries in range(1, MOST_TRIES + 1):
            if not configs:
                return None
            others = {name: [] for name in others}  # rounds of a race that broke off are not this one's
            entries = [self._entry(key, config, work) for key, config in configs.items()]
            entries += [{"name": name, "path": name, "config": None} for name in others]
            request = {"op": "setup", "head": self.context.head, "work": work.value, "batch": rows, "entries": entries}
            answer = yield request, SETUP_SECONDS + EACH_SECONDS * len(entries)
            if "error" in answer:
                self._drop(answer.get("at", ""), answer["error"], configs, others, work)
                continue
            for name, error in answer["failed"].items():
                self._drop(name, error, configs, others, work)
            if not configs:
                return None
            race = self._entered(configs, default, neighbour, policy or plan.effort.policy)
            failed = yield from self._run(race, others, began, allotted)
            if failed is None and race.verdict is not None:
                faster = bool(others.get(Path.FLASHINFER)) and certainly_faster(
                    others[Path.FLASHINFER], race.samples[race.verdict.winner], race.clocks, race.policy
                )
                answer = yield times_of(race.verdict, configs, race.default, list(others)), ROUND_SECONDS
                if "error" in answer:
                    failed = answer["error"]["detail"]
                else:
                    clock = statistics.median(answer["clocks"])
                    outcome = Outcome(race.verdict, configs, answer["samples"], clock, race.default, faster)
                    if tries == MOST_TRIES or self.context.left() <= 0 or outcome.agrees:
                        return outcome
                    failed, began = "its times contradict its rounds", time.monotonic()
            self.context.note(f"{work.value} {rows}: the race broke off: {failed}; again")
        return None

    def _entered(self, configs: dict[str, Config], default: Config, neighbour: Config | None, policy: Policy) -> Race:
        contenders = []
        for key, config in configs.items():
            stages, size = config.stages, shared_bytes(config, self.context.plan.itemsize)
            values = tuple(dataclasses.astuple(config))
            contenders.append(
                Contender(key, preference_of(config == default, config == neighbour, size, stages, values))
            )
        return Race(contenders, key_of(default) if key_of(default) in configs else None, policy)

    def _run(self, race: Race, others: dict[str, list[float]], began: float, allotted: float) -> Steps:
        """Rounds until the race is decided. Returns what went wrong, None where nothing did."""
        while True:
            names, rounds = race.due()
            if not names:
                return None
            beside = [name for name in others if len(others[name]) < race.policy.least]
            request = {"op": "rounds", "names": [*names, *beside], "rounds": rounds, "first": len(race.clocks)}
            answer = yield request, ROUND_SECONDS
            if "error" in answer:
                return answer["error"]["detail"]
            samples = answer["samples"]
            for name in beside:
                others[name] += samples[name]
            over = time.monotonic() - began > allotted or self.context.left() <= 0
            race.add({name: samples[name] for name in names}, answer["clocks"], last=over)

    def _drop(
        self, name: str, error: dict[str, Any], configs: dict[str, Config], others: dict[str, Any], work: Work
    ) -> None:
        """Take out what failed; without a name, the process has ended for no reason that we know."""
        if name in others:
            del others[name]
            self.context.note(f"rival {name} left out: {error['detail']}")
        elif name in configs:
            self._refuse(configs.pop(name), work, error["why"], error["detail"])

    def _refuse(self, config: Config, work: Work, why: str, detail: str) -> None:
        label = label_of(config, kernels_of(work, config).value)
        self._refused.add(label)
        self.context.reject(config, kernels_of(work, config), why, detail)
        if self.context.is_default(config, work):
            self.context.failed_defaults.append(f"{label}: {why}: {detail}")

    def _is_refused(self, config: Config, work: Work) -> bool:
        label = label_of(config, kernels_of(work, config).value)
        return label in self._refused or label in self.publisher.rejected

    def _entry(self, key: str, config: Config, work: Work) -> dict[str, Any]:
        label = label_of(config, kernels_of(work, config).value)
        return {"name": key, "path": path_of(config), "config": config_data(config), "label": label}

    def _gtest(self, config: Config, work: Work, label: str) -> Steps:
        if label in self._tested:
            return self._tested[label]
        draws = self.context.plan.effort.draws
        answer = yield self.context.request("gtest", config, kernels_of(work, config), draws=draws), GTEST_SECONDS
        if "error" in answer:
            return 0.0
        self._tested[label] = p = float(answer["p"])
        self.context.log.add("gtest", label=label, p=p, draws=answer["draws"])
        return p

    def _may_take_flashinfer(self, work: Work) -> bool:
        """Only a whole vocabulary is truncated: a shard has no such work."""
        allowed = self.publisher.flashinfer and self.flashinfer() and FLASHINFER_LABEL not in self._refused
        return allowed and work is Work.TRUNCATE

    def _check_flashinfer(self, outcome: Outcome, work: Work) -> Steps:
        """Whether FlashInfer draws from the distribution, where it has won."""
        if not outcome.flashinfer:
            return
        if FLASHINFER_LABEL not in self._tested:
            draws = self.context.plan.effort.draws
            request: dict[str, Any] = {
                "op": "gtest",
                "head": self.context.head,
                "path": Path.FLASHINFER.value,
                "config": None,
            }
            request |= {"work": work.value, "label": FLASHINFER_LABEL, "draws": draws}
            answer = yield request, GTEST_SECONDS
            self._tested[FLASHINFER_LABEL] = p = float(answer.get("p", 0.0))
            self.context.log.add("gtest", label=FLASHINFER_LABEL, p=p, draws=answer.get("draws", 0))
        if self._tested[FLASHINFER_LABEL] < ALPHA:
            self.context.note(f"FlashInfer is not chosen: its G-test gives p = {self._tested[FLASHINFER_LABEL]:.1e}")
            self._refused.add(FLASHINFER_LABEL)
            outcome.flashinfer = False

    def _publish(self, work: Work, rows: int, outcome: Outcome) -> None:
        bucket = outcome.bucket()
        named = {bucket.use, bucket.default, *bucket.tied} - {""}
        configs = {key: outcome.configs[key] for key in named}
        self.publisher.add(work.value, rows, bucket, configs)
        self.context.log.add(
            "bucket",
            effort=self.context.plan.effort.name,
            work=work.value,
            batch=rows,
            bucket=dataclasses.asdict(bucket),
            flashinfer=self.publisher.flashinfer,
            configs={key: config_data(config) for key, config in configs.items()},
        )
        self.done += rows in self.context.plan.buckets_of(work)
        self.noisy.append(bucket.se / bucket.us)
        self.publisher.write()
        gain = "the default stays" if bucket.use == bucket.default else f"{bucket.gain:.1%} less than the default"
        self.context.note(f"{work.value:13} {rows:4} rows: {bucket.us:8.1f} us  {bucket.use}  ({gain})")

    def _transfer(self, work: Work) -> Steps:
        """Race between buckets: a batch there uses the next larger bucket's choice, which must not cost much."""
        decided = sorted(self._decided(work).items())
        for (lower, small), (upper, large) in itertools.pairwise(decided):
            rows = midpoint(lower, upper)
            default = self.context.plan.default(rows, work) if rows is not None else None
            alike = small.use == large.use and default is not None and key_of(default) == large.use
            if rows is None or alike or self.context.left() <= 0 or self._seen_transfer(work, rows):
                continue
            configs = self.publisher.configs
            outcome = yield from self._race(work, rows, [configs[large.use], configs[small.use]])
            if outcome is None or large.use not in outcome.verdict.standings:
                continue
            served, verdict = outcome.verdict.standings[large.use], outcome.verdict
            regret = served.us / verdict.standings[verdict.winner].us - 1.0
            insert = verdict.winner != large.use and (
                regret > TRANSFER or (verdict.winner == outcome.default and served.low > CERTAIN)
            )
            self.context.log.add("transfer", work=work.value, batch=rows, regret=round(regret, 5), inserted=insert)
            if insert:
                winner = outcome.configs[verdict.winner]
                p = yield from self._gtest(winner, work, label_of(winner, kernels_of(work, winner).value))
                if p >= ALPHA:
                    yield from self._check_flashinfer(outcome, work)
                    self._publish(work, rows, outcome)

    def _seen_transfer(self, work: Work, rows: int) -> bool:
        seen = {(event.get("work"), event.get("batch")) for event in self.context.log.of("transfer")}
        return (work.value, rows) in seen
