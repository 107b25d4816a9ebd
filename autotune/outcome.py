"""What of a race goes into a table: whose times are recorded, and the bucket that they make."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..table import Bucket
from ..work import Path
from .names import path_of
from .race import GAIN_TOLERANCE, RECORDED_ROUNDS, Verdict, gains_apart, median_and_error
from .space import Config


@dataclasses.dataclass
class Outcome:
    """A race that is over. configs: of contenders, by key. samples, clock: of those whose times are recorded,
    microseconds per round, and the median clock. flashinfer: whether its path is faster for certain."""

    verdict: Verdict
    configs: dict[str, Config]
    samples: dict[str, list[float]]
    clock: float
    default: str | None
    flashinfer: bool = False

    def bucket(self) -> Bucket:
        verdict, winner = self.verdict, self.verdict.winner
        timed = {name: median_and_error(values) for name, values in self.samples.items()}
        us, se = timed[winner]
        others: dict[str, float] = {}  # by path, or the name of a rival
        for name, (median, _) in timed.items():
            path = path_of(self.configs[name]) if name in self.configs else name
            if path != path_of(self.configs[winner]):
                others[path] = min(median, others.get(path, median))
        return Bucket(
            use=winner,
            us=round(us, 3),
            se=round(se, 4),
            n=len(self.samples[winner]),
            default=self.default or "",
            default_us=round(timed[self.default][0], 3) if self.default else 0.0,
            gain=round(1.0 - 1.0 / (1.0 + verdict.gain) if winner != self.default else 0.0, 5),
            tied=list(verdict.tied),
            checked="tokens, g-test",
            clock_mhz=self.clock,
            others={name: round(median, 3) for name, median in others.items()},
            distribution_only=Path.FLASHINFER.value if self.flashinfer else "",
        )

    @property
    def agrees(self) -> bool:
        """Whether its recorded times are what its paired rounds say of them."""
        bucket = self.bucket()
        return gains_apart(bucket.gain, bucket.us, bucket.default_us) <= GAIN_TOLERANCE


def times_of(verdict: Verdict, configs: dict[str, Config], default: str | None, others: list[str]) -> dict[str, Any]:
    """Asks for the times that a table records: of the winner, the default, the best of each other path and the rivals,
    side by side in the rounds in which ``verify`` will take them again. Those of the race are not of the same rounds,
    and its company, which a large batch's clock depends on, is not in the table."""
    best: dict[str, str] = {}
    for key in sorted(set(configs) & set(verdict.standings), key=lambda key: verdict.standings[key].us):
        best.setdefault(path_of(configs[key]), key)
    best[path_of(configs[verdict.winner])] = verdict.winner
    names = [verdict.winner, *([default] if default else []), *best.values(), *others]
    return {"op": "rounds", "names": list(dict.fromkeys(names)), "rounds": RECORDED_ROUNDS, "first": 0}
