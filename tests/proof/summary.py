"""The tables of tests/proof/README.md, from the committed result files and nothing else. Needs no torch.

    python tests/proof/summary.py            prints the tables
    python tests/proof/summary.py --write    puts them between their markers in tests/proof/README.md

A goal is met, missed (by how much, and why), or not run; missed goals come first. A marker is
``<!-- results:NAME -->``; the text after it, up to ``<!-- end -->``, is replaced.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).resolve().parent / "README.md"
FOLDERS = (PAGE.parent / "results", ROOT / "benchmarks" / "results")  # a program of speed can count something, too
MARKER = re.compile(r"<!-- results:([a-z-]+) -->\n.*?<!-- end -->", re.S)
Data = dict[str, Any]


class Count(NamedTuple):
    """``wrong`` of ``total`` at one place: a path, a tool, a machine. An empty name: there is only one."""

    place: str
    wrong: int
    total: int

    def __str__(self) -> str:
        return f"{self.place}: " * bool(self.place) + f"{self.wrong:,} of {self.total:,}"


class Found(NamedTuple):
    """The numbers of a result file in words, and what of the goal they miss."""

    words: str
    missed: list[str]


Judge = Callable[[Data], Found]
MOST_OF_STOCKS_ERROR = 1.1


MET, MISSED, NOT_RUN = "met", "missed", "not run"


class Verdict(NamedTuple):
    """``MET``, ``MISSED`` or ``NOT_RUN``; the numbers; and by how much a goal was missed."""

    verdict: str
    found: str = ""
    by: str = ""


@dataclasses.dataclass(frozen=True)
class Goal:
    """``name`` with a goal in words; ``judge`` reads the result file. why: it was missed, or nothing was run."""

    name: str
    goal: str
    file: str = ""
    judge: Judge | None = None
    why: str = ""

    def judged(self, data: Data | None) -> Verdict:
        found = self.judge(data) if data is not None and self.judge is not None else Found("", [])
        if not found.words:
            return Verdict(NOT_RUN)
        return Verdict(MISSED if found.missed else MET, found.words, "; ".join(found.missed))


# --- readers of result files ----------------------------------------------------------------------------------------


def sums(rows: Iterable[Data], wrong: str, total: str, place: Callable[[Data], str] = lambda row: "") -> list[Count]:
    """One count per place, in the order of the rows. wrong: fields that are added up, with spaces between."""
    counts: dict[str, Count] = {}
    for row in rows:
        name = place(row)
        _, wrongs, totals = counts.get(name, Count(name, 0, 0))
        counts[name] = Count(name, wrongs + sum(row[field] for field in wrong.split()), totals + row[total])
    return list(counts.values())


def together(counts: Iterable[Count]) -> list[Count]:
    """Places with equal counts in one."""
    places: dict[tuple[float, float], list[str]] = {}
    for place, wrong, total in counts:
        places.setdefault((wrong, total), []).append(place)
    return [Count(", ".join(names), *numbers) for numbers, names in places.items()]


def section(data: Data, name: str) -> list[Data]:
    return [row for row in data["rows"] if row["section"] == name]


def none_wrong(counts: Callable[[Data], list[Count]], least: float = 1) -> Judge:
    """The judge of a goal of no wrong one among at least ``least``, at each place."""

    def judge(data: Data) -> Found:
        found = counts(data)
        missed = [str(count) for count in found if count.wrong]
        few = [count.place for count in found if not count.wrong and count.total < least]
        missed += [f"{', '.join(few)}: " * any(few) + "too few"] * bool(few)
        return Found("; ".join(map(str, together(found))), missed)

    return judge


def by_path(name: str, wrong: str, total: str, least: float, paths: Iterable[str]) -> Judge:
    """The judge of a goal of no wrong one on each of ``paths``, which it claims; paths without a row are named, whether
    it claims them or not."""
    counted = none_wrong(
        lambda data: sums(section(data, name), wrong, total, lambda row: row["path"].replace(", ", " ")), least
    )

    def judge(data: Data) -> Found:
        there = {row["path"] for row in section(data, name)}
        every = PATHS if set(paths) <= set(PATHS) else paths
        without = [path for path in every if path not in there]
        words, missed = counted(data)
        if without and words:
            words += f"; {', '.join(without)}: no row"
        return Found(words, missed + [f"{path}: no row" for path in without if path in paths])

    return judge


PATHS = ("cpu", "logits", "fused", "screened")  # ways to draw a token
GIVEN_WEIGHTS = ("fused", "screened", "quantised")  # ways to draw a token from the products of a head
LOGPROB_PATHS = ("cpu", "logits", "fused", "prompts", "ranks")  # ways to logprobs


def logprob_values(name: str, wrong: str, total: str, least: float, paths: Iterable[str]) -> Judge:
    """``by_path``, and the largest error."""

    def judge(data: Data) -> Found:
        words, missed = by_path(name, wrong, total, least, paths)(data)
        largest = max((row["max_error"] for row in section(data, name)), default=0.0)
        return Found(f"{words}; at most {largest:.1e}" if words else "", missed)

    return judge


def logprob_errors(data: Data) -> Found:
    """The mean error of logprobs, ours over stock's of the same tokens: the largest ratio, and that error."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in data["rows"]:
        cell = tuple(row[name] for name in ("logits", "temperature", "truncation", "path"))
        cells.setdefault(cell, {})[row["sampler"]] = row["mean"]
    ratio, (logits, *_), mean = max((of["ours"] / of["stock"], cell, of["ours"]) for cell, of in cells.items())
    words = f"{ratio:.3f}, of {mean:.1e} with {logits} logits"
    return Found(words, [] if ratio <= MOST_OF_STOCKS_ERROR else [f"{ratio - MOST_OF_STOCKS_ERROR:.3f}"])


def same_tokens(name: str) -> Judge:
    return none_wrong(lambda data: sums(section(data, name), "different", "tokens", lambda row: row["on"]))


def wrong_of(rows: Iterable[Data], is_wrong: Callable[[Data], bool]) -> list[Count]:
    rows = list(rows)
    return [Count("", sum(map(is_wrong, rows)), len(rows))]


def ways(data: Data) -> Found:
    """Cells of a matrix of features by the way in which they equal stock SGLang's."""
    counted = collections.Counter(row["result"] for row in data["rows"])
    words = ", ".join(f"{count} {way}" for way, count in counted.most_common())
    return Found(words, [f"{count} {way}" for way, count in counted.items() if way not in WAYS])


WAYS = ("exact", "law", "refused")  # of ``parity.py``


def fuzzed(data: Data) -> Found:
    failures = [*data["failures"], *(one["side"] for one in data["ended"] if "side" in one)]
    found = none_wrong(lambda data: [Count("", data["different"], data["requests"])], 1e5)(data)
    words = f"{len(failures)} failures of a server"
    return Found(f"{found.words}; {words}", found.missed + [words] * bool(failures))


def ours_under_load(data: Data) -> list[Data]:
    return [row for row in data["rows"] if row["backend"] != "stock"]


def answered(data: Data) -> list[Count]:
    rows = ours_under_load(data)
    lost = (count for row in rows for end, count in row["ends"].items() if end not in ("answered", "left"))
    return [Count("", sum(lost), sum(row["requests"] for row in rows))]


def memory_growth(data: Data) -> Found:
    """MiB of host memory between the second quarter of a run and its last, and stock's beside it."""
    rows = ours_under_load(data)
    stock = {row["model"]: row["host_mib_growth"] for row in data["rows"] if row["backend"] == "stock"}
    words = [
        f"{row['host_mib_growth']:+.0f} of {row['memory'][-1]['host_mib']:,} MiB (stock {stock[row['model']]:+.0f})"
        for row in rows
    ]
    return Found("; ".join(words), ["it grew"] * any(row["host_mib_growth"] > 0 for row in rows))


def sanitized(data: Data) -> Found:
    """Reports by tool. A call of CUDA that returned an error, because memory has run out, is no report."""
    words, missed = [], []
    for row in data["rows"]:
        reports = sum(count for report, count in row["reports"].items() if not report.startswith("Program hit"))
        failed, left = row["outcomes"].get("failure", 0), row["outcomes"].get("not run", 0)
        left += row["tests"] - sum(row["outcomes"].values())
        gaps = [f"{reports:,} reports"] * bool(reports) + [f"{failed:,} tests failed"] * bool(failed)
        gaps += [f"{left:,} tests not run"] * bool(left)
        words.append(f"{row['tool']}: {reports:,} in {row['outcomes'].get('passed', 0):,} tests")
        missed += [f"{row['tool']}: {', '.join(gaps)}"] if gaps else []
    return Found("; ".join(words), missed)


def hot_path(data: Data) -> list[Count]:
    wrong = sum(row[name] for row in data["rows"] for name in ("waits", "allocates", "loads"))
    return [Count("", wrong, sum(row["steps"] for row in data["rows"]))]


SOAK_ALPHA = 1e-6  # ``ALPHA`` of ``draws.py``


def soaked(data: Data) -> Found:
    """By path: the most evidence beside its limit, and how many distributions had draws enough for the power."""
    words, missed = [], []
    for path in dict.fromkeys(row["path"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["path"] == path]
        most, limit = max(row["most_log_evidence"] for row in rows), math.log(len(rows) / SOAK_ALPHA)
        draws = sum(row["rows"] * row["draws_per_row"] for row in rows)
        tested, powerful = (sum(row[name] for row in rows) for name in ("rows", "powerful"))
        words.append(f"{path}: {most:.1f} of {limit:.1f} in {draws:.1e} draws")
        missed += [f"{path}: {most:.1f} of {limit:.1f}"] if most >= limit else []
        missed += [f"{path}: {powerful:,} of {tested:,} distributions have this power"] if powerful < tested else []
    return Found("; ".join(words), missed)


def rejected(data: Data) -> Found:
    least = min(row["p_value"] for row in data["rows"])
    return Found(f"{least:.2g}", [f"{least:.2g}"] * (least <= 1e-5))


def map_errors(data: Data) -> Found:
    row = data["sections"]["map"]["rows"][0]
    wrong, error = row["cpu_not_finite_or_not_below_the_one_before"], row["cpu_max_absolute_error"]
    words = f"{error:.1e}; {wrong:,} of {row['upper_words']:,} not finite or out of order"
    return Found(words, [words] * (wrong > 0 or error >= 1e-12))


def equal_noise(data: Data) -> Found:
    rows = [row for row in data["sections"]["collisions"]["rows"] if "planted" not in row]
    ours, other = (row for row in rows if row["steps"] == 10**7)
    words = f"{ours['equal_pairs']:,}; {other['equal_pairs']:,} with {other['noise']}'s 32 bits"
    return Found(words, [words] * bool(ours["equal_pairs"]))


def streams(data: Data) -> Found:
    """By battery of TestU01: failed p-values of all, suspect ones, and orders of the stream."""
    rows = [row for part in data["sections"].values() for row in part["rows"]]
    rows = [row for row in rows if "battery" in row and "planted" not in row]
    words, missed = [], []
    for battery in dict.fromkeys(row["battery"] for row in rows):
        run = [row for row in rows if row["battery"] == battery]
        verdicts = [one["verdict"] for row in run for one in row["not_normal"]]
        failed, orders = verdicts.count("FAILED"), len({row["order"] for row in run})
        words.append(
            f"{battery}: {failed} of {sum(row['p_values'] for row in run)}, {verdicts.count('suspect')} suspect, in "
            f"{orders} order{'s' * (orders != 1)}"
        )
        missed += [f"{battery}: {failed}"] if failed else []
    return Found("; ".join(words), missed)


def deviations(data: Data) -> Found:
    found = data["sections"]["distribution"]["deviations_from_chance"]
    return Found(f"{found:+.1f}", [f"{found:+.1f}"] * (found >= 4))


def as_stock(data: Data) -> Found:
    """The judge of ``families.py``, which must notice other weights."""
    rows = [row for row in data["rows"] if "planted" not in row]
    words, missed = none_wrong(lambda _: sums(rows, "different apart not_fused", "answers"))(data)
    unnoticed = not any(row["different"] + row["apart"] for row in data["rows"] if "planted" in row)
    words += f", of {len(rows)} architectures; {max(row['largest_difference'] for row in rows):.1e}"
    return Found(words, missed + ["other weights were not noticed"] * unnoticed)


def tokens_of_ranks(wrong: str, least: float) -> Judge:
    return none_wrong(lambda data: sums(section(data, "tokens"), wrong, "rows"), least)


def same_bits(data: Data) -> Found:
    """The judge of the tiles of ``order.py``, which must notice a GEMM that adds in another order."""
    rows = data["rows"]
    tiles = [row for row in rows if "tile" in row]
    words, missed = none_wrong(lambda _: sums(tiles, "unequal", "batches"), 900)(data)
    orders = {(row["D"], row["order"]) for row in tiles}
    noticed = {row["D"] for row in rows if row.get("gemm") == "two halves" and (row["D"], row["order"]) not in orders}
    unnoticed = {row["D"] for row in tiles} - noticed
    return Found(words, missed + ["no other order was noticed"] * bool(unnoticed))


# --- goals ----------------------------------------------------------------------------------------------------------


def exact(
    name: str,
    goal: str,
    counted: tuple[str, str, str, float],
    paths: tuple[str, ...],
    why: str = "",
    judge: Callable[..., Judge] = by_path,
) -> Goal:
    """A goal of ``draws.py exact`` on each of ``paths``. counted: section, the wrong ones, of which, how many at
    least."""
    return Goal(f"{name} ({', '.join(paths)})", goal, "exact", judge(*counted, paths), why)


GIVEN_LOGITS, GIVEN_HEAD = PATHS[:2], PATHS[:3]  # the paths that sections count
SLOW_CPU = "50 to 200 times slower"
ENDED = "the run ended early"
NO_LEAK = "ten minutes do not tell a leak from noise, and stock grows too"
GOALS: dict[str, tuple[Goal, ...]] = {
    "Exact tokens": (
        exact("illegal tokens", "0 of 1e9 draws", ("legal", "illegal", "draws", 1e9), GIVEN_HEAD, SLOW_CPU),
        exact(
            "rows with all features: another token than the float64 reference's",
            "0 of 1e8",
            ("reference", "different", "rows", 1e8),
            GIVEN_LOGITS,
            SLOW_CPU,
        ),
        exact(
            "such rows of a head",
            "0 of 1e6",
            ("heads", "different", "rows", 1e6),
            GIVEN_WEIGHTS,
            ENDED,
        ),
        exact(
            "rows with limits at temperatures from 1e-6 to 1e4: another token than the reference's",
            "0 of 1e6",
            ("temperatures", "different", "rows", 1e6),
            GIVEN_LOGITS,
        ),
        exact(
            "rows with NaN, infinities or huge numbers, and their neighbours: another token than the reference's",
            "0 of 5,000",
            ("hostile", "different", "rows", 5e3),
            GIVEN_LOGITS,
        ),
        exact(
            "hostile biases, logits and temperatures: forbidden ids, or logprobs above 0 or no number",
            "0 of 1e8 draws",
            ("forbidden", "illegal bad_logprobs", "draws", 1e8),
            GIVEN_HEAD,
            SLOW_CPU,
        ),
        exact(
            "rows with all features: other likeliest ids than float64 has, but for near-ties, or a token's logprob "
            "that is not, bit for bit, the same id's",
            "0 of 1e6",
            ("logprobs", "wrong_ids unequal", "rows", 1e6),
            LOGPROB_PATHS,
            ENDED,
        ),
        exact(
            "logprobs of these rows off by more than 2e-5, or below -50 by a share of 4e-7",
            "0 of 1e6",
            ("logprobs", "wrong_values", "values", 1e6),
            LOGPROB_PATHS,
            judge=logprob_values,
        ),
        Goal(
            "mean error of logprobs, ours over stock's",
            "at most 1.1",
            "h200-logprob-error",
            logprob_errors,
        ),
        Goal(
            "draws of known distributions: log of the most evidence against them, at any time",
            "below its limit, with the power to notice a total variation distance of 1e-3",
            "soak",
            soaked,
            "the draws of minutes are spread over hundreds of distributions",
        ),
        Goal(
            "tokens of the screened path that differ from the fused path's",
            "0",
            "h200-screened",
            none_wrong(lambda data: sums(data["sections"]["tokens"]["rows"], "no_near_tie", "rows")),
        ),
        Goal(
            "draws of a known distribution on the screened path: deviations from chance",
            "below 4",
            "h200-screened",
            deviations,
        ),
    ),
    "The same token for the same logits, seed and position": (
        Goal("alone, in every batch, order and path", "0 differ", "determinism", same_tokens("rows")),
        Goal("with every shipped configuration", "0 differ", "determinism", same_tokens("tables")),
        Goal(
            "bits of a row's logits, in batches of 1 to 512",
            "0 differ",
            "h200-order",
            same_bits,
            ENDED,
        ),
        Goal("merged from 1, 2, 4 and 8 ranks", "0 differ", "determinism", same_tokens("shards")),
        Goal("from CUDA graphs", "0 differ", "determinism", same_tokens("graphs")),
        Goal("on two GPUs as on one", "0 of 1e6 differ", "h200x2-ranks", tokens_of_ranks("differing", 1e6)),
        Goal(
            "on all of four GPUs",
            "0 of 1e8 differ",
            "h200x4-ranks",
            tokens_of_ranks("ranks_differ", 1e8),
            ENDED,
        ),
        Goal(
            "verified drafts: tokens that a step without drafts would not have drawn",
            "0 of 1e6",
            "verified",
            none_wrong(lambda data: sums(data["rows"], "different", "positions"), 1e6),
        ),
        Goal("verified drafts: smallest p-value of the tokens' law", "above 1e-5", "verified", rejected),
    ),
    "Noise": (
        Goal("largest error of the map in host memory, over all upper words", "below 1e-12", "noise", map_errors),
        Goal("equal pairs among 1e7 steps", "0", "noise", equal_noise),
        Goal("p-values of TestU01 that fail", "0", "noise", streams),
        Goal("PractRand", "no failure", why="TestU01 was run in its place"),
    ),
    "Servers": (
        Goal("features and pairs of features as in stock SGLang", "each in one of the ways below", "parity", ways),
        Goal("features and pairs with verified drafts", "the same", "parity-drafts", ways),
        Goal("random requests that stock SGLang answers in another way", "0 of 1e5; no failure", "http-fuzz", fuzzed),
        Goal(
            "cases of SGLang's and other suites that stock SGLang passes and ours does not",
            "0",
            "external-suites",
            none_wrong(
                lambda data: wrong_of(
                    (row for row in data["cases"] if row["stock"] == "pass"), lambda row: row["ours"] != "pass"
                )
            ),
        ),
        Goal(
            "greedy answers, by architecture, unlike stock's; largest difference of logprobs",
            "0; 2e-5; all fused",
            "families",
            as_stock,
        ),
        Goal("requests under load that are not answered", "0", "h100-load", none_wrong(answered)),
        Goal("growth of host memory under load", "none", "h100-load", memory_growth, NO_LEAK),
        Goal(
            "a day under load with aborted requests and delayed ranks",
            "none is lost, none wrong",
            why="`load.py` and `ranks.py` run for ten minutes",
        ),
        Goal(
            "waits for the GPU, allocations and loaded kernels of the sampler's steps",
            "0 in 1e4 steps",
            "h200-hot-path",
            none_wrong(hot_path, 1e4),
            "500 steps of each of 16 kinds were run",
        ),
    ),
    "Tests": (
        Goal(
            "planted defects that no test notices",
            "0 of at least 60",
            "planted-defects",
            none_wrong(lambda data: wrong_of(data["defects"], lambda row: not row["caught"]), 60),
        ),
        Goal(
            "branches of a server's host code that no test takes, apart from what needs a GPU",
            "0",
            "coverage",
            none_wrong(lambda data: [Count("", data["total"]["missing_branches"], data["total"]["branches"])]),
        ),
        Goal(
            "reports of compute-sanitizer in GPU tests of the kernels",
            "0 in all of them",
            "h200-sanitized",
            sanitized,
            "memcheck had no memory for 52 tests at once, initcheck reports a copy in PyTorch, racecheck had no time",
        ),
    ),
}


# --- the page -------------------------------------------------------------------------------------------------------


def read(name: str, folders: Iterable[Path] = FOLDERS) -> Data | None:
    """The result file of this name; None where there is none. Raises ValueError for a file that is no result."""
    for folder in folders:
        file = folder / f"{name}.json"
        if file.exists():
            try:
                data = json.loads(file.read_text())
                _ = data["env"]["command"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} is no result: {type(error).__name__}: {error}") from None
            return data
    return None


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def verdicts(folders: Iterable[Path] = FOLDERS) -> list[tuple[Goal, Verdict]]:
    found = []
    for goal in (goal for group in GOALS.values() for goal in group):
        found.append((goal, goal.judged(read(goal.file, folders) if goal.file else None)))
    return found


def goals(folders: Iterable[Path] = FOLDERS) -> str:
    """How many goals are met; the missed ones with their reasons, those not run, and the met ones by group."""
    by_goal = dict(verdicts(folders))
    counted = collections.Counter(one.verdict for one in by_goal.values())
    parts = [f"{counted[MET]} goals are met, {counted[MISSED]} are missed, {counted[NOT_RUN]} were not run."]
    missed = [
        [f"**missed**: {goal.name}", goal.goal, one.found, f"{one.by}; {goal.why}", f"`{goal.file}.json`"]
        for goal, one in by_goal.items()
        if one.verdict == MISSED
    ]
    if missed:
        parts += ["### Missed", markdown(["", "goal", "found", "missed by; reason", "file"], missed)]
    left = [
        [goal.name, goal.goal, "no result is committed" if goal.file else goal.why]
        for goal, one in by_goal.items()
        if one.verdict == NOT_RUN
    ]
    if left:
        parts += ["### Not run", markdown(["", "goal", "reason"], left)]
    for title, group in GOALS.items():
        rows = [
            [goal.name, goal.goal, by_goal[goal].found, f"`{goal.file}.json`"]
            for goal in group
            if by_goal[goal].verdict == MET
        ]
        if rows:
            parts += [f"### Met: {title}", markdown(["", "goal", "found", "file"], rows)]
    return "\n\n".join(parts)


def features(folders: Iterable[Path] = FOLDERS) -> str:
    """How the features of ``parity.py``, by themselves and in pairs, equal stock SGLang's; versions and date."""
    data = read("parity", folders)
    if data is None:
        return "Not run."
    by_way: dict[str, list[str]] = {}
    for row in data["rows"]:
        by_way.setdefault(row["result"], []).append(" with ".join(row["features"]))
    alone = [row["features"][0] for row in data["rows"] if len(row["features"]) == 1]
    words = []
    for way, cells in by_way.items():
        every = [cell for cell in cells if alone[0] in cell.split(" with ")]
        named = f": all with {alone[0]}" if every == cells else f": {', '.join(cells)}" if len(cells) <= FEW else ""
        words.append(f"{len(cells)} *{way}*{named}")
    env = data["env"]
    about = f"SGLang {env['sglang']}, torch {env['torch']}, Triton {env['triton']}, on a CPU, {env['date']}"
    return f"{'; '.join(words)}. Features: {', '.join(f'`{name}`' for name in alone)}. {about}."


FEW = 5  # cells that a page names


SECTIONS = {"goals": goals, "features": features}


def filled(page: str, folders: Iterable[Path] = FOLDERS) -> str:
    """``page`` with each section between its markers. Raises ValueError for a marker of no section."""

    def replaced(marker: re.Match[str]) -> str:
        if marker[1] not in SECTIONS:
            raise ValueError(f"results:{marker[1]} is no section; there are {', '.join(SECTIONS)}")
        return f"<!-- results:{marker[1]} -->\n{SECTIONS[marker[1]](folders)}\n<!-- end -->"

    return MARKER.sub(replaced, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite tests/proof/README.md")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print(*(make() for make in SECTIONS.values()), sep="\n\n")


if __name__ == "__main__":
    main()
