"""Ranks that share an LM head, one GPU each, without a server: are their tokens those of one rank, and what do they
exchange per step?

    python benchmarks/run.py ranks --out benchmarks/results/h200x2-ranks.json

tokens    rows drawn by all ranks, each from its shard: tokens of all ranks are compared, and of each ``--every``-th
          batch with those of one rank with the whole head; a row that differs is a near-tie where the reference cannot
          tell its two best scores apart
exchange  microseconds of an exchange: by kernels through memory that all ranks reach (replayed from a CUDA graph), by
          collectives, and stock SGLang's gather of the logits with their copy to float32
soak      batches of every kind for some time: tokens of all ranks are compared after each, and with those of one rank

A rank is a process, in SGLang's own groups; ``--tp`` is their number.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import DRY_RUN, SHAPES, Benchmark, Result, reason_of
from contenders import full

from sgl_flashsample import Head, LMHead
from sgl_flashsample.autotune.timing import MAX_CALLS, Timing
from sgl_flashsample.autotune.workload import Workload
from sgl_flashsample.kernels.config import cdiv
from sgl_flashsample.kernels.params import BatchParams, LogitEdits, SampleOutput, Truncation
from sgl_flashsample.kernels.reference import sample_ref, transform_ref
from sgl_flashsample.model_config import shard_of
from sgl_flashsample.tools.server import free_port

SECTIONS = ("tokens", "exchange", "soak")
KINDS = ("plain", "greedy", "mask", "truncated")
BATCHES = (1, 16, 64, 256)
TOKENS = 200 if DRY_RUN else 500_000  # per kind
TOKEN_ROWS = 5 if DRY_RUN else 256
GATHERED = 64  # batches whose tokens are compared between the ranks at once
CALLS, ROUNDS = (2, 2) if DRY_RUN else (50, 15)
COMPARED_EVERY = 10  # batches of the soak, with those of one rank
WRITTEN_EVERY = 20.0  # seconds of the soak


class Rank:
    """One process: the whole head, its shard as a server has it, and the exchange with the others."""

    def __init__(self, rank: int, num_ranks: int, port: int) -> None:
        if DRY_RUN:
            import lab.torchvision_schemas  # noqa: F401
        from sglang.srt.distributed import parallel_state

        from sgl_flashsample.sglang.exchange import Exchange
        from sgl_flashsample.sglang.head import HeadState

        cuda = torch.cuda.is_available() and not DRY_RUN
        self.rank, self.device = rank, torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "nccl" if cuda else "gloo"
        parallel_state.init_distributed_environment(
            world_size=num_ranks,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend=backend,
        )
        if cuda:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks, backend=backend)
        self.group = parallel_state.get_tp_group() if cuda else parallel_state.get_world_group()
        shape = SHAPES[0]
        weight = shape.weight().to(self.device)
        width = shard_of(shape.vocab, num_ranks)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, width * num_ranks - shape.vocab))
        self.whole = LMHead(weight, softcap=shape.softcap)
        self.alone = Head(self.whole)
        processor = types.SimpleNamespace(
            vocab_size=shape.vocab,
            logit_scale=None,
            final_logit_softcapping=shape.softcap,
            use_fp32_lm_head=False,
            use_attn_tp_group=False,
        )
        shard = types.SimpleNamespace(weight=padded[rank * width : (rank + 1) * width].clone())
        del padded
        self.state = HeadState(processor, shard, exchange=Exchange(self.group))
        wrong = self.state.check_exchange()
        assert wrong is None, wrong
        self.state.update(max(BATCHES))

    def params(self, batch: Workload, kind: str, number: int) -> BatchParams:
        """Parameters of a batch that all ranks make alike."""
        rows, vocab = batch.rows, self.whole.vocab_size
        temperature = 0.3 + torch.arange(rows, device=self.device) % 8 * 0.2
        truncation = edits = None
        if kind == "greedy":
            temperature = torch.zeros_like(temperature)
        if kind == "truncated":
            top_k = full(batch, 50, torch.int32)
            truncation = Truncation(top_k, full(batch, 0.9), full(batch, 0.0), 50)
        if kind == "mask":
            generator = torch.Generator(self.device).manual_seed(number)
            words = torch.randint(-(2**31), 2**31, (rows, cdiv(vocab, 32)), generator=generator, device=self.device)
            edits = LogitEdits(mask=words.to(torch.int32))
        return BatchParams(temperature, batch.seed, batch.position[number % len(batch.position)], truncation, edits)

    def draw(self, batch: Workload, params: BatchParams, return_logprob: bool = False) -> SampleOutput:
        from sgl_flashsample.sglang.draw import launch

        assert self.state.exchange is not None
        return launch(self.state, batch.hidden, params, return_logprob).out

    def draw_alone(self, batch: Workload, params: BatchParams) -> torch.Tensor:
        """From the whole head; truncated rows from the logits that the ranks have exchanged."""
        if params.truncation is None:
            return self.alone.draw(batch.hidden, params).token_ids
        logits = self.state.logits_of_shard(batch.hidden).contiguous()
        shards = [torch.empty_like(logits) for _ in range(self.group.world_size)]
        torch.distributed.all_gather(shards, logits, group=self.group.device_group)
        whole, share = (
            torch.cat(shards, 1),
            cdiv(batch.rows, self.group.world_size),
        )  # its workspace is for so many rows
        drawn = [
            self.state.sample_rows(whole[start : start + share], params.rows(start, start + share), False).token_ids
            for start in range(0, batch.rows, share)
        ]
        return torch.cat(drawn)

    def near_ties(self, batch: Workload, params: BatchParams, rows: torch.Tensor) -> int:
        """The number of these rows that the reference cannot decide."""
        logits = batch.hidden[rows].double() @ self.whole.weight.double().T
        logits = transform_ref(logits, torch.float64, softcap=self.whole.softcap)
        error_bound = logits.abs() * torch.finfo(batch.hidden.dtype).eps + 1e-6
        if params.edits is not None and params.edits.mask is not None:
            words = params.edits.mask[rows].repeat_interleave(32, 1)[:, : logits.shape[1]]
            allowed = words >> torch.arange(logits.shape[1], device=self.device) % 32 & 1
            logits = logits.masked_fill(allowed == 0, float("-inf"))
        low, high = logits - error_bound, logits + error_bound
        of_rows = (params.temperature[rows], params.seed[rows], params.position[rows])
        return int(sample_ref(logits, low, high, *of_rows).near_tie.sum())

    def compare(self, drawn: torch.Tensor, batch: Workload, params: BatchParams, row: dict[str, Any]) -> None:
        """Count into ``row`` the tokens that one rank draws differently."""
        differ = (drawn != self.draw_alone(batch, params)).nonzero().flatten()
        row["compared"] += batch.rows
        row["differing"] += len(differ)
        if len(differ) and params.truncation is None:
            row["near_ties"] += self.near_ties(batch, params, differ)

    def same_on_all(self, tokens: torch.Tensor) -> int:
        """The number of tokens that differ between ranks."""
        every = [torch.empty_like(tokens) for _ in range(self.group.world_size)]
        torch.distributed.all_gather(every, tokens.contiguous(), group=self.group.device_group)
        return int(sum((other != every[0]) for other in every[1:]).gt(0).sum())


def tokens(rank: Rank, options: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, each time the ranks have compared their tokens."""
    result: list[dict[str, Any]] = []
    for kind in options.kinds:
        batch, number = Workload(rank.whole, TOKEN_ROWS, "typical"), 0
        row = {"section": "tokens", "kind": kind, "rows": 0, "ranks_differ": 0}
        row |= {"compared": 0, "differing": 0, "near_ties": 0}
        result.append(row)
        while row["rows"] < options.tokens:
            gathered = []
            for _ in range(GATHERED):
                if number % options.every == 0:
                    batch.refresh(number)
                params = rank.params(batch, kind, number)
                gathered.append(rank.draw(batch, params).token_ids)
                if number % options.every == 0:
                    rank.compare(gathered[-1], batch, params, row)
                number += 1
            row["ranks_differ"] += rank.same_on_all(torch.cat(gathered))
            row["rows"] += GATHERED * TOKEN_ROWS
            yield [dict(row) for row in result]


def soak(rank: Rank, options: Any) -> Iterator[list[dict[str, Any]]]:
    """The row of the soak every ``WRITTEN_EVERY`` seconds, and in the end."""
    choose, number, started, written = random.Random(1), 0, time.monotonic(), 0.0
    row = {"section": "soak", "seconds": 0.0, "batches": 0, "rows": 0, "ranks_differ": 0, "compared": 0}
    row |= {"differing": 0, "near_ties": 0}
    batches = {size: Workload(rank.whole, size, "typical") for size in (1, 2, 3, 17, 64)}
    while True:
        batch, kind = batches[choose.choice(list(batches))], choose.choice(KINDS)
        batch.refresh(number)
        params = rank.params(batch, kind, number)
        drawn = rank.draw(batch, params, return_logprob=choose.random() < 0.3).token_ids
        row["ranks_differ"] += rank.same_on_all(drawn)
        row["batches"] += 1
        row["rows"] += batch.rows
        if number % COMPARED_EVERY == 0:
            rank.compare(drawn, batch, params, row)
        number += 1
        # All ranks end after the same batch: the first one's clock decides.
        seconds = time.monotonic() - started
        ended = torch.tensor([seconds > options.soak_seconds], device=rank.device)
        torch.distributed.broadcast(ended, 0, group=rank.group.device_group)
        if ended.item() or seconds - written > WRITTEN_EVERY:
            written = seconds
            yield [row | {"seconds": round(seconds, 1)}]
        if ended.item():
            return


def exchange(rank: Rank, options: Any) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    connection = rank.state.exchange
    assert connection is not None
    memory = connection.memory
    for size in BATCHES[:2] if DRY_RUN else BATCHES:
        batch = Workload(rank.whole, size, "typical")
        drawn = rank.draw(batch, rank.params(batch, "plain", 0))
        greedy = BatchParams(torch.zeros(size, device=rank.device), batch.seed, batch.position[0])
        nothing = SampleOutput.empty(cdiv(size, rank.group.world_size), rank.device, False)
        logits = rank.state.logits_of_shard(batch.hidden)

        def undrawn(rows: torch.Tensor, params: BatchParams, nothing: SampleOutput = nothing) -> SampleOutput:
            """A stand-in for the draw, which is no part of the exchange."""
            return SampleOutput(*(None if values is None else values[: len(rows)] for values in nothing))

        def gathered(logits: torch.Tensor = logits) -> Any:
            return rank.group.all_gather(logits, dim=-1).float()

        ways: dict[str, tuple[bool, Callable[[], Any]]] = {
            "records, by collectives": (False, lambda drawn=drawn: connection.merge(drawn)),
            "rows, by collectives": (
                False,
                lambda logits=logits, greedy=greedy, draw=undrawn: connection.draw_rows(logits, greedy, draw),
            ),
        }
        if memory is not None:
            ways |= {name.replace("collectives", "memory"): (True, way) for name, (_, way) in ways.items()}
        if not DRY_RUN:
            ways["gather of logits, to float32"] = (False, gathered)
        for name, (by_memory, call) in ways.items():
            connection.memory = memory if by_memory else None
            row = {"section": "exchange", "batch": size, "exchange": name}
            rows.append(row | microseconds(rank, call, in_graph=by_memory))
        connection.memory = memory
    yield rows


def microseconds(rank: Rank, call: Callable[[], Any], in_graph: bool) -> dict[str, Any]:
    """Microseconds of one of ``CALLS`` calls in a row: the median of rounds, and half the distance between the
    quartiles."""
    call()
    if rank.device.type == "cpu":
        return {"us": 0.0, "us_spread": 0.0, "in_graph": False}

    def repeat() -> None:
        for _ in range(CALLS):
            call()

    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            repeat()
        repeat = graph.replay  # type: ignore[assignment]
    times = []
    for _ in range(ROUNDS + 2):
        torch.distributed.barrier(group=rank.group.device_group)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        repeat()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    timing = Timing.of(times[2:])
    return {"us": round(timing.us, 2), "us_spread": round(timing.spread, 2), "in_graph": in_graph}


def work(number: int, port: int, options: Any, answers: Any) -> None:
    rank = Rank(number, options.tp, port)
    measured = {"tokens": tokens, "exchange": exchange, "soak": soak}
    for section in options.only:
        try:
            for rows in measured[section](rank, options):
                answers.put((number, section, [row | {"tp": options.tp} for row in rows]))
        except Exception as error:
            answers.put((number, section, reason_of(error)))
            os._exit(1)  # the others may wait for this one: they are ended
    answers.put((number, None, None))
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain", "truncated"], help="for tokens")
    parser.add_argument("--tokens", type=float, default=TOKENS, help="of each kind, for tokens")
    parser.add_argument("--every", type=int, default=1, help="each so many batches one rank draws too, for tokens")
    parser.add_argument("--soak-seconds", type=float, default=1.0 if DRY_RUN else 600.0)


def check(options: Any) -> None:
    if not 1 <= options.every <= MAX_CALLS:
        raise ValueError(f"--every is {options.every}; expected 1 to {MAX_CALLS}, the positions that a batch has")


def measure(options: Any, result: Result) -> int:
    gaps, port = result.env["not_run"], free_port()
    gaps[:] = [gap for gap in gaps if gap["section"] not in (*options.only, "all")]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(number, port, options, answers)) for number in range(options.tp)]
    for process in ranks:
        process.start()
    running = options.tp
    while running and all(process.exitcode in (None, 0) for process in ranks):
        if answers.empty():
            time.sleep(0.05)
            continue
        number, section, answer = answers.get()
        if section is None:
            running -= 1
        elif isinstance(answer, str):
            result.miss(answer, section=section, rank=number)
        elif number == 0:  # all rows of the section that there are so far
            result.add(answer)
    for row in result.rows:
        print(row, flush=True)
    for process in ranks:
        process.join(30)
    if running:
        if not result.env["not_run"]:  # else a rank has said why
            result.miss("a rank ended", section="all")
        for process in ranks:
            process.kill()
    return result.close()


PLACE = ("section", "tp", "kind", "exchange", "batch")
BENCHMARKS = {"ranks": Benchmark(__doc__, measure, add_options, check, SECTIONS, place=PLACE)}
