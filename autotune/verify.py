"""``tune verify``: times the choices of a table again, in a separate process. The recorded times must still hold, and
no choice may be slower than the built-in one."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ..exit_codes import FAILED, OK, USAGE
from ..kinds import KIND_NAMES, SamplingPath
from ..tables.lookup import known_stale
from ..tables.schema import Table
from .decisions import Decision, decisions, device_and_head
from .labels import GEMM, codes_request, key_of, setup_request
from .plan import EFFORTS, Plan
from .pool import HELLO_SECONDS, WorkerProcess, ask_once, measuring_process
from .progress import Progress
from .race import RECORDED_ROUNDS, Policy, robust_mean, t_quantile
from .staleness import Staleness, other_release

WITHIN = 0.03  # largest relative difference from the recorded time
SLOWER = Policy().min_gain  # largest loss against the built-in choice, by the lower bound of the ratio
ALPHA = 0.01
LOAD_ROUNDS = Policy().most
SETUP_SECONDS, ROUNDS_SECONDS = 90.0, 60.0
FLASHINFER = SamplingPath.FLASHINFER.value


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One batch size measured again. off: relative difference from the recorded time. off_gemm: the same for the ratio
    to the GEMM that was timed beside it, where one was: power and heat limit a large batch, and move both times.
    slower: least loss against the built-in choice, the lower bound of the paired ratio; negative where it is faster or
    equal. stale: it compiles to other machine code than was measured, by the same release of Triton."""

    kind: str
    rows: int
    recorded_us: float
    us: float = 0.0
    off: float = 0.0
    off_gemm: float = 0.0
    default_us: float = 0.0
    slower: float = 0.0
    stale: bool = False
    error: str = ""

    @property
    def reason(self) -> str:
        """The fault; empty without one."""
        if self.error:
            return self.error
        if self.slower > SLOWER:
            return f"at least {self.slower:.1%} slower than the built-in choice"
        if min(abs(self.off), abs(self.off_gemm)) <= WITHIN:
            return ""
        return f"{self.off:+.1%} from the recorded time, {self.off_gemm:+.1%} beside its GEMM"


def verify(table: Table, progress: Progress) -> tuple[int, str, list[Replayed]]:
    """Exit code, one line, and the measurements. 1: a time is off or slower than the built-in choice; 2: the table is
    of another device, or cannot be replayed. A stale size whose times hold is named, and no fault. Raises ValueError on
    a machine without a GPU."""
    # Not beside the table: that folder may be of an installed package.
    log = Path(tempfile.gettempdir()) / f"flashsample-verify-{os.getpid()}.log"
    process = measuring_process(log)
    replayed: list[Replayed] = []
    failure: str | None = None
    reasons, unknown = known_stale(table), ""
    try:
        answer = ask_once(process, {"op": "hello"}, HELLO_SECONDS)
        failure = _wrong_device(table, answer)
        if failure is None:
            unknown = other_release(table, answer["env"].get("triton", "unknown"))
            plan = Plan(*device_and_head(table), EFFORTS["quick"])
            recorded = list(decisions(table))
            for one in recorded:
                replayed.append(_replay(one, plan, process))
                if not reasons and not unknown and _has_other_code(one, plan, process):
                    replayed[-1] = dataclasses.replace(replayed[-1], stale=True)
                progress.update("verified", len(replayed), len(recorded))
                if replayed[-1].reason:
                    progress.note(f"{one.kind} {one.rows}: {replayed[-1].reason}")
    except ValueError as error:
        failure = str(error)
    finally:
        process.end()
    if failure is not None:
        return USAGE, failure, replayed
    if log.exists() and not log.stat().st_size:
        log.unlink()
    stale = [(KIND_NAMES[one.kind], one.rows) for one in replayed if one.stale]
    staleness = Staleness(tuple(reasons), tuple(stale), unknown)
    code = f"; {staleness.words(table)}" if staleness.lines or unknown else ""
    wrong = [one for one in replayed if one.reason]
    if wrong:
        first = f"{wrong[0].kind} {wrong[0].rows}: {wrong[0].reason}"
        return FAILED, f"{len(wrong)} of {len(replayed)} batch sizes are off, first {first}{code}", replayed
    line = f"{len(replayed)} batch sizes as recorded (within {WITHIN:.0%}), none slower than the built-in choice"
    return OK, line + code, replayed


def _has_other_code(recorded: Decision, plan: Plan, process: WorkerProcess) -> bool:
    """True where the machine code of a size is another one than was measured."""
    config = recorded.config or plan.default(recorded.rows, recorded.kind)
    request = codes_request(plan.head, [(config, recorded.kind)])
    answer = ask_once(process, request, ROUNDS_SECONDS)
    return answer.get("codes") != [recorded.entry.code]


def _wrong_device(table: Table, answer: dict[str, Any]) -> str | None:
    if "error" in answer:
        return f"the device does not answer: {answer['error']['detail']}"
    device, there = device_and_head(table)[0], answer["device"]
    if (there["name"], there["sms"]) != (device.name, device.sms):
        return f"the table is for {device.name}, this is {there['name']}"
    return None


def _replay(recorded: Decision, plan: Plan, process: WorkerProcess) -> Replayed:
    kind, rows, default = recorded.kind, recorded.rows, plan.default(recorded.rows, recorded.kind)
    config = default if recorded.confirmed or recorded.config is None else recorded.config
    takes_flashinfer = recorded.entry.flashinfer
    untimed = Replayed(str(kind), rows, recorded.us)
    if not recorded.us:
        return dataclasses.replace(untimed, error="the table has no time of it")
    use, configs = key_of(config), {key_of(config): config, **({"default": default} if default != config else {})}
    beside = [FLASHINFER] if takes_flashinfer else []
    beside += [GEMM] if recorded.gemm_us else []
    answer = ask_once(process, setup_request(plan.head, kind, rows, configs, beside), SETUP_SECONDS)
    failures = answer.get("failed", {})
    failed = answer.get("error") or failures.get(use) or failures.get(FLASHINFER)
    if failed:
        return dataclasses.replace(untimed, error=f"{failed['reason']}: {failed['detail']}")
    names = [name for name in (*configs, *beside) if name not in failures]
    # The recorded times were taken right after a race, which had heated and slowed the GPU: so it is loaded first.
    for rounds in (LOAD_ROUNDS, RECORDED_ROUNDS):
        answer = ask_once(process, {"op": "rounds", "names": names, "rounds": rounds, "first": 0}, ROUNDS_SECONDS)
        if "error" in answer:
            return dataclasses.replace(untimed, error=answer["error"]["detail"])
    samples = answer["samples"]
    timed = {name: statistics.median(values) for name, values in samples.items()}
    us, error = timed[use], ""
    off = off_gemm = us / recorded.us - 1.0
    if GEMM in timed:
        off_gemm = (us / timed[GEMM]) / (recorded.us / recorded.gemm_us) - 1.0
    if takes_flashinfer and (lost := _at_least(samples, FLASHINFER, use)) > 0:
        error = f"{FLASHINFER} is at least {lost:.1%} slower than {use}"
    slower = _at_least(samples, use, "default") if "default" in timed else 0.0
    times = {"us": us, "off": off, "off_gemm": off_gemm, "default_us": timed.get("default", us), "slower": slower}
    return dataclasses.replace(untimed, **times, error=error)


def _at_least(samples: dict[str, list[float]], name: str, than: str) -> float:
    """Lower bound of the log-ratio of two names in the same rounds."""
    ratios = [math.log(mine / theirs) for mine, theirs in zip(samples[name], samples[than], strict=True)]
    mean, error = robust_mean(ratios)
    return mean - t_quantile(1 - ALPHA, RECORDED_ROUNDS - 1) * error
