"""The same token for a row whatever surrounds it: batch, order, path, configuration, ranks, CUDA graphs.

    python benchmarks/determinism.py --out benchmarks/results/determinism.json

Tokens are compared one by one, of rows that are the same bit for bit. Hidden states and weights are small integers over
a power of two: each dot product is exact in float32, so every tile and every GEMM gives the same logits. What still
rounds is a score; a token that differs where the two best scores are equal but for that is a near-tie, as the float64
reference says, and counted apart.

rows     each row alone; in batches of every size up to the largest; in 20 orders. On every path, with every kind of
         features: greedy, plain, with edits (penalties, mask, bias), with a truncation, with both; temperatures from
         1e-6 to 10
tables   with each configuration of the shipped tables that fits the device, against the path's own choice
shards   the vocabulary split over 1, 2, 4 and 8 ranks, whose draws are merged (``kernels/merge_ranks.py``)
graphs   a CUDA graph, replayed ``--replays`` times, and at other positions, against launches; on a GPU alone

On a GPU the paths are fused, screened, logits (a GEMM and the reader) and reader (of given logits). FlashInfer's path
keys no noise and is left out. Without a GPU: cpu, in host memory, and the GPU's paths interpreted, on fewer and shorter
rows. ``--dry-run`` runs the interpreted part alone.

In one more comparison per path the rows have other positions: they must differ, or nothing is proven. The exit code is
1 if a token differs, or if that is not noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, make_parser, new_env, read_result, write_result
from exact import expected
from tqdm import tqdm

from sgl_flashsample import BatchParams, LMHead, SampleOutput, Truncation, sample, sample_from_logits
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.head import make_workspace
from sgl_flashsample.kernels.launch import compiling_only
from sgl_flashsample.kernels.merge_ranks import merge_records, no_record, pack_record
from sgl_flashsample.kernels.params import LogitEdits
from sgl_flashsample.kernels.reference import edit_logits_ref, logits_ref, merge_records_ref
from sgl_flashsample.kinds import BatchKind, Config, SamplingPath, path_of
from sgl_flashsample.paths import Parts, launch
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import pack_bits
from sgl_flashsample.tables import schema
from sgl_flashsample.tables.lookup import device_of, unsupported_config
from sgl_flashsample.tables.schema import Device, Table

SECTIONS = ("rows", "tables", "shards", "graphs")
KINDS = ("greedy", "plain", "edit", "truncate", "edit+truncate")
INTERPRETED, HOST = DRY_RUN, draws_in_host_memory(DEVICE)
TABLE_KINDS = ("plain", "edit+truncate")
TABLES = Path(schema.__file__).parent
PERMUTATIONS = 20
GRAPH_ROWS, POSITIONS = 64, 16
MOST_ASKED = 64  # rows that differ, of which the reference says whether they are near-ties; more are none
COMPILED_ROWS = (1, 2, 16, 17, 33, 65, 129, 257, 512)
RANKS = (1, 2, 4, 8)
WHERE = "interpreted" if INTERPRETED else "host memory" if HOST else "GPU"


@dataclasses.dataclass(frozen=True)
class Size:
    """rows: of the largest batch. alone: every how many rows one is drawn alone; sizes: of other batches."""

    vocab: int
    hidden: int
    rows: int
    alone: int
    sizes: tuple[int, ...]
    permutations: int = PERMUTATIONS


if HOST:
    SIZE = Size(5003, 64, 512, 1, tuple(range(1, 513)))
elif INTERPRETED:
    SIZE = Size(777, 32, 8, 4, (2, 3, 7), 2)
else:
    SIZE = Size(128_259, 256, 512, 1, tuple(range(1, 513)))
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
STEPS = {torch.float32: 256, torch.bfloat16: 4}[DTYPE]  # of a weight, per unit


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch, and the logits that its hidden states have, in the dtype of the head. allowed: ``[B, V]`` bool, on the
    CPU, what the mask of the edits says."""

    kind: str
    hidden: torch.Tensor
    head: LMHead
    logits: torch.Tensor
    params: BatchParams
    allowed: torch.Tensor | None

    def of(self, rows: slice | torch.Tensor) -> Case:
        """These rows, in this order."""

        def taken(value: Any) -> Any:
            if value is None:
                return None
            tensors = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            of_rows = {name: one[rows] for name, one in tensors.items() if isinstance(one, torch.Tensor)}
            return dataclasses.replace(value, **of_rows)

        params = dataclasses.replace(
            taken(self.params), truncation=taken(self.params.truncation), edits=taken(self.params.edits)
        )
        on_cpu = rows.cpu() if isinstance(rows, torch.Tensor) else rows
        allowed = None if self.allowed is None else self.allowed[on_cpu]
        return dataclasses.replace(
            self, hidden=self.hidden[rows], logits=self.logits[rows], params=params, allowed=allowed
        )

    def later(self, steps: int = 1) -> Case:
        """At other positions."""
        return dataclasses.replace(self, params=dataclasses.replace(self.params, position=self.params.position + steps))


def make_case(kind: str) -> Case:
    """The largest batch of this kind. Rows differ in everything."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    rows, vocab = SIZE.rows, SIZE.vocab

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    most = max(1, round(0.3 * STEPS * (64 / SIZE.hidden) ** 0.5))
    hidden = whole(-2, 3, rows, SIZE.hidden).to(DTYPE).to(DEVICE)
    head = LMHead((whole(-most, most + 1, vocab, SIZE.hidden) / STEPS).to(DTYPE).to(DEVICE))
    temperature = torch.zeros(rows) if kind == "greedy" else 10 ** uniform(-6.0, 1.0, rows)
    truncation = edits = allowed = None
    if "truncate" in kind:
        limits = [torch.rand(rows, generator=generator) < 0.5 for _ in range(3)]
        truncation = Truncation(
            torch.where(limits[0], whole(1, 200, rows), 0).int().to(DEVICE),
            torch.where(limits[1], uniform(0.05, 0.99, rows), 1.0).to(DEVICE),
            torch.where(limits[2], uniform(0.01, 0.5, rows), 0.0).to(DEVICE),
        )
    if "edit" in kind:
        allowed = torch.rand(rows, vocab, generator=generator) < 0.6
        allowed[:, 0] = True
        tensors = {
            "additive": -whole(0, 24, rows, vocab) / 8,
            "scaling": whole(8, 16, rows, vocab) / 8,
            "bias": whole(-16, 17, rows, vocab) / 8,
        }
        edits = LogitEdits(
            mask=pack_bits(allowed.to(DEVICE)), **{name: one.to(DEVICE) for name, one in tensors.items()}
        )
    params = BatchParams(
        temperature.to(DEVICE),
        whole(-(2**62), 2**62, rows).to(DEVICE),
        whole(0, 2**40, rows).to(DEVICE),
        truncation,
        edits,
        all_greedy=kind == "greedy",
    )
    return Case(kind, hidden, head, (hidden.float() @ head.weight.float().T).to(DTYPE), params, allowed)


Draw = Callable[[Case], torch.Tensor]


class Paths:
    """Draws of cases, with scratch that is kept, as a server keeps it."""

    def __init__(self) -> None:
        self._workspaces: dict[int, Any] = {}

    def held(self, head: LMHead) -> tuple[Any, Screen]:
        if id(head) not in self._workspaces:
            self._workspaces[id(head)] = head, make_workspace(head, SIZE.rows), Screen(head, SIZE.rows)
        return self._workspaces[id(head)][1:]

    def from_logits(self, case: Case) -> torch.Tensor:
        return sample_from_logits(case.logits, case.params).token_ids

    def on(self, path: str) -> Draw:
        """The draw on a path, with the configuration that the path takes by itself."""
        if path in ("cpu", "reader"):
            return self.from_logits

        def draw(case: Case) -> torch.Tensor:
            workspace, screen = self.held(case.head)
            if path == SamplingPath.LOGITS:
                workspace = None  # the kept one holds what the batches need that take this path by themselves
            return sample(case.hidden, case.head, case.params, path=path, workspace=workspace, screen=screen).token_ids

        return draw

    def with_config(self, config: Config) -> Draw:
        def draw(case: Case) -> torch.Tensor:
            return self.output(case, config, case.head).token_ids

        return draw

    def output(self, case: Case, config: Config, head: LMHead) -> SampleOutput:
        limits = default_table(head).truncation_config
        return launch(config, case.hidden, case.params, Parts(head, limits, screen=self.held(head)[1]))


def names_of_paths() -> tuple[str, ...]:
    return ("cpu",) if HOST else ("fused", "screened", "logits", "reader")


# --- counting -------------------------------------------------------------------------------------------------------


class Count:
    """Of one comparison. planted_noticed: rows at other positions whose tokens differ; None where none were drawn."""

    def __init__(self, section: str, path: str, kind: str, what: str) -> None:
        self.about = {"section": section, "on": WHERE, "path": path, "kind": kind, "what": what}
        self.tokens = self.different = self.near_ties = 0
        self.noticed: int | None = None

    def add(self, tokens: torch.Tensor, want: torch.Tensor, case: Case) -> None:
        """tokens: drawn for ``case``; want: what the others drew."""
        self.tokens += len(want)
        rows = (tokens != want).nonzero()[:, 0]
        if len(rows):
            near_ties = int((~is_certain(case.of(rows[:MOST_ASKED]))).sum())
            self.near_ties += near_ties
            self.different += len(rows) - near_ties

    @property
    def row(self) -> dict[str, Any]:
        counts = {"tokens": self.tokens, "different": self.different, "near_ties": self.near_ties}
        return self.about | counts | ({} if self.noticed is None else {"planted_noticed": self.noticed})


def is_certain(case: Case) -> torch.Tensor:
    """``[B]`` bool, on the CPU: whether the float64 reference knows each row's token for certain."""
    params, edits = case.params, case.params.edits
    logits = logits_ref(case.hidden.cpu(), case.head.weight.cpu(), logits_dtype=case.head.rounding)
    if edits is not None:
        given = {name: getattr(edits, name).cpu() for name in ("additive", "scaling", "bias")}
        logits = edit_logits_ref(logits, allowed=case.allowed, **given)
    num_rows = len(logits)
    limits = [torch.zeros(num_rows, dtype=torch.int32), torch.ones(num_rows), torch.zeros(num_rows)]
    if params.truncation is not None:
        limits = [one.cpu() for one in (params.truncation.top_k, params.truncation.top_p, params.truncation.min_p)]
    temperature, seed, position = (value.cpu() for value in (params.temperature, params.seed, params.position))
    on_cpu = BatchParams(temperature, seed, position, Truncation(*limits))
    return expected(logits.double(), on_cpu, on_cpu.position)[1]


# --- sections -------------------------------------------------------------------------------------------------------


def count_rows(paths: Paths, cases: dict[str, Case]) -> Iterator[dict[str, Any]]:
    for kind, case in cases.items():
        want = paths.from_logits(case)
        for path in names_of_paths():
            draw = paths.on(path)
            count = Count("rows", path, kind, "the whole batch")
            count.add(draw(case), want, case)
            if kind == "plain":
                count.noticed = int((draw(case.later()) != want).sum())
            yield count.row
            count = Count("rows", path, kind, "alone")
            for row in range(0, SIZE.rows, SIZE.alone):
                one = slice(row, row + 1)
                count.add(draw(case.of(one)), want[one], case.of(one))
            yield count.row
            count = Count("rows", path, kind, "in batches of other sizes")
            for size in SIZE.sizes:
                some = slice(SIZE.rows - size, SIZE.rows)
                count.add(draw(case.of(some)), want[some], case.of(some))
            yield count.row
            count = Count("rows", path, kind, f"in {SIZE.permutations} orders")
            for place in range(SIZE.permutations):
                order = torch.randperm(SIZE.rows, generator=torch.Generator().manual_seed(place)).to(DEVICE)
                count.add(draw(case.of(order)), want[order], case.of(order))
            yield count.row


def shipped_configs() -> list[Config]:
    """Those of all tables, each once."""
    tables = [Table.loads(file.read_text()) for file in TABLES.glob("*.json")]
    return sorted({entry.launch for table in tables for entry in table.entries}, key=repr)


def fits(config: Config, kind: str) -> bool:
    """Whether the device can run it; interpreted, whatever its bytes of shared memory."""
    batch = BatchKind("truncate" in kind, "edit" in kind, screen=path_of(config) is SamplingPath.SCREENED)
    device = Device(name="cpu", cc="9.0", sms=0, l2_mb=0, smem_optin=0) if INTERPRETED else device_of(DEVICE)
    return unsupported_config(config, device, "fp32" if DTYPE is torch.float32 else "bf16", batch) is None


def count_tables(paths: Paths, cases: dict[str, Case]) -> Iterator[dict[str, Any]]:
    for kind in TABLE_KINDS:
        case, counts = cases[kind], dict[str, tuple[Count, set[Config]]]()
        want = paths.from_logits(case)
        for config in shipped_configs():
            if fits(config, kind):
                path = path_of(config).value
                count, used = counts.setdefault(path, (Count("tables", path, kind, ""), set()))
                used.add(config)
                draw = paths.with_config(config)
                count.add(draw(case), want, case)
                if count.noticed is None:
                    count.noticed = int((draw(case.later()) != want).sum())
        for count, used in counts.values():
            yield count.row | {"what": f"{len(used)} configurations"}


def draw_by_ranks(paths: Paths, path: str, heads: Sequence[LMHead | None], width: int, case: Case) -> torch.Tensor:
    """The token of each row, of the draws of ranks that hold ``width`` ids each."""
    draws: list[SampleOutput] = []
    for rank, head in enumerate(heads):
        if head is None:
            draws.append(no_record(len(case.hidden), DEVICE, False))
        elif path in ("cpu", "reader"):
            part = case.logits[:, rank * width : (rank + 1) * width]
            draws.append(sample_from_logits(part, case.params, vocab_start=rank * width, shards=len(heads)))
        else:
            config = default_table(head).lookup_on(
                SamplingPath(path), len(case.hidden), BatchKind(edit="edit" in case.kind, screen=path == "screened")
            )
            draws.append(paths.output(case, config, head))
    if HOST:  # there the kernel that merges cannot run: the reference does
        empty = torch.zeros(len(case.hidden))
        records = [torch.stack([one.scores, one.token_ids.float(), *3 * [empty]], -1) for one in draws]
        return merge_records_ref(torch.stack(records))[0]
    return merge_records(torch.cat([pack_record(one) for one in draws]), return_logprob=False).token_ids


def count_shards(paths: Paths, cases: dict[str, Case]) -> Iterator[dict[str, Any]]:
    """Only a whole vocabulary is truncated: of several ranks one draws those rows, of whole rows of logits."""
    for kind in ("greedy", "plain", "edit"):
        case = cases[kind]
        want = paths.from_logits(case)
        for path in names_of_paths():
            for ranks in RANKS:
                width = -(-SIZE.vocab // ranks // 16) * 16
                weight = torch.nn.functional.pad(case.head.weight, (0, 0, 0, width * ranks - SIZE.vocab))
                parts = weight.split(width)
                heads = [LMHead.of_rank(part, rank, ranks, SIZE.vocab) for rank, part in enumerate(parts)]
                count = Count("shards", path, kind, f"{ranks} ranks")
                count.add(draw_by_ranks(paths, path, heads, width, case), want, case)
                if kind == "plain" and ranks > 1:
                    later = draw_by_ranks(paths, path, heads, width, case.later())
                    count.noticed = int((later != want).sum())
                yield count.row


def count_graphs(paths: Paths, cases: dict[str, Case], replays: int) -> Iterator[dict[str, Any]]:
    """All of a row's tokens come from the same kernels and the same memory: there are no near-ties."""
    for kind, whole in cases.items():
        case = whole.of(slice(0, GRAPH_ROWS))
        case = dataclasses.replace(case, params=dataclasses.replace(case.params, position=case.params.position.clone()))
        for path in names_of_paths():
            draw = paths.on(path)
            want, count = draw(case).clone(), Count("graphs", path, kind, f"{replays:,} replays")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = draw(case)
            wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
            for _ in range(replays):
                graph.replay()
                wrong += (captured != want).sum()
            count.tokens, count.different = replays * len(want), int(wrong)
            for _ in range(POSITIONS):
                case.params.position.add_(1)
                graph.replay()
                tokens = captured.clone()
                count.tokens += len(want)
                count.different += int((tokens != draw(case)).sum())
                if kind == "plain":
                    count.noticed = int((tokens != want).sum())
            yield count.row


def compile_ahead(paths: Paths, cases: dict[str, Case], options: Any) -> None:
    """What the sections launch, in parallel. What fails to compile fails again where it is launched."""
    import triton  # not before the interpreter is turned on

    with (
        contextlib.suppress(AttributeError),  # a Triton that cannot: each kernel is compiled at its first launch
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for kind, case in cases.items():
            _ = paths.held(case.head)  # a screen is built, not compiled
            with compiling_only():
                for path in names_of_paths():
                    for rows in COMPILED_ROWS:
                        paths.on(path)(case.of(slice(0, rows)))
                for config in shipped_configs() if "tables" in options.only and kind in TABLE_KINDS else ():
                    if fits(config, kind):
                        paths.with_config(config)(case)


def run_interpreted(options: Any) -> list[dict[str, Any]]:
    """Of another process: the interpreter is turned on before Triton is imported."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "interpreted.json"
        command = [sys.executable, __file__, "--dry-run", "--out", str(out), "--only", *options.only]
        done = subprocess.run(command, check=False)
        if done.returncode not in (0, 1):  # 1: a token differs
            raise RuntimeError(f"the interpreted part ended with code {done.returncode}")
        return read_result(out, "determinism.py")["rows"]


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--dry-run", action="store_true", help="the interpreted part alone")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of what is not counted now")
    parser.add_argument("--replays", type=int, default=10_000, help="of each graph")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not HOST and not INTERPRETED:
        parser.error("without a GPU this draws in host memory: the extra `cpu`, and TRITON_INTERPRET unset")
    try:
        kept = read_result(options.out, "determinism.py") if options.keep and options.out.exists() else {}
    except ValueError as error:
        sys.exit(f"error: {error}")
    now = {WHERE, "interpreted"} if HOST else {WHERE}
    rows = [row for row in kept.get("rows", []) if row["section"] not in options.only or row["on"] not in now]
    env = new_env()
    run = {name: env[name] for name in ("device", "torch", "triton", "date", "command")}
    result: dict[str, Any] = {"env": env, "runs": [*kept.get("runs", []), run], "rows": rows}
    paths, cases = Paths(), {kind: make_case(kind) for kind in KINDS}
    if WHERE == "GPU":
        compile_ahead(paths, cases, options)
    counts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"rows": lambda: count_rows(paths, cases)}
    counts["shards"] = lambda: count_shards(paths, cases)
    if not HOST:
        counts["tables"] = lambda: count_tables(paths, cases)
    if WHERE == "GPU":
        counts["graphs"] = lambda: count_graphs(paths, cases, options.replays)
    for section in (section for section in SECTIONS if section in options.only and section in counts):
        for row in tqdm(counts[section](), desc=f"{section}, {WHERE}", unit="comparison"):
            result["rows"].append(row)
            write_result(options.out, result)
    if HOST:
        result["rows"] += run_interpreted(options)
    write_result(options.out, result)
    wrong = [row for row in result["rows"] if row["different"] or row.get("planted_noticed") == 0]
    for row in wrong:
        print(row)
    tokens, ties = (sum(row[name] for row in result["rows"]) for name in ("tokens", "near_ties"))
    print(f"{WHERE}: {tokens:,} tokens, {sum(row['different'] for row in wrong):,} different, {ties:,} near-ties")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
