"""Speculative decoding in real SGLang servers: tokens per second, accepted drafts and the time of each part of a step.

    python benchmarks/run.py speculation --out benchmarks/results/h200-speculation.json --sizes qwen3-1.7b

stock      SGLang's own verification and drafts, the most likely tokens
rejection  SGLang's drafts by sampling, and rejection (EAGLE, NEXTN)
block      the same, whole blocks of drafts judged together (SGLang 0.5.23; not by default)
tree       SGLang's verification of trees of the most likely tokens, 4 to a node, at most 5 deep
greedy     our verification and, where a model drafts, our drafts: the most likely tokens
coupled    our verification, drafts with the noise of the target's tokens (where a model drafts)
coupled-trees  the same in trees, 2 to a node, at most 5 deep
map        SGLang's own, with a draft head of the likeliest ids (EAGLE, NEXTN: ``--speculative-token-map``)
mapped     coupled, with that draft head
hot        coupled, drafts of the likeliest ids (EAGLE, NEXTN, STANDALONE: ``FLASHSAMPLE_DRAFT_VOCAB``)
hot-trees  the same, in trees as coupled-trees

The target is a checkpoint whose distribution is known (``sgl_flashsample/tools/markov.py``), computed at the full cost
of its size. STANDALONE drafts with a smaller one whose logits have a normal error of ``--errors``; "p_max" and
"draft_tv" are the largest probability and the total variation between the two distributions, means over the tokens that
were answered. NGRAM drafts from what it has seen. EAGLE and NEXTN (MTP) have one layer whose hidden states are almost
the target's, EAGLE3 one that knows nothing and an LM head of 32,000 ids (``tests/lab/drafters.py``): they
show what a step costs. All servers of an algorithm run at once, with ``--draft-tokens`` nodes per verification (the
root and its drafts), and are measured in turns; the others stand still. Medians, and half the distance between the
quartiles.

The likeliest ids are the 15 % most frequent of a million tokens that the target has drawn before, at the same
temperatures, from its known distribution. Contexts of a checkpoint are peaked, Zipf-like or almost flat, which few
ids cannot cover: of what qwen3-1.7b answers they are 0.81 at temperature 1, and 0.98 at 0.7.

tokens_s       tokens per second: of long answers less short ones, as many one after the other as take a middling server
               about a second
step_us        of the same, per verification of the request that needs most of them. With one request it does not depend
               on how many drafts are accepted; with several it does a little, as the last steps have fewer rows
acceptance     share of the drafts that are accepted, but for what the last one accepts beyond the answer's length
covered        of map, mapped and hot: share of the answered tokens that are among the likeliest ids
target_us      on the GPU, of a step: the target's layers
head_us        the LM head of the target where it is a part of that pass: stock's, which computes logits
verify_us      from the end of the target's last norm until the accepted drafts are known: the head, the verification,
               and what the GPU waits for its launches
draft_step_us  a pass of the draft model in its chain
drafts_us      all passes of the draft model
busy_us        all of the above and what lies between them, without the GPU's waits
logits_operations  names of operations with an argument ``[*, V]``, V being the vocabulary, outside CUDA graphs

The last seven are of traces; without a GPU there are none. "screen" of a row: whether the target's head had an INT8
copy.

``--only tokens``: answers to seeded requests, as many at once as the largest of ``--batches``, with the drafts of each
backend and without any, token by token until the first that differs. A difference is a near-tie where the float64
reference, of the logits that the target is known to have, cannot tell the two tokens apart once each logit may be off
by a rounding. The first token of each answer is compared with the reference itself. Ends with 1 where a difference is
none.

``--tp``: GPUs of each server, whose ranks share the LM heads; its rows say so.

Runs on a CPU too, slowly, with ``--sizes tiny``.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import math
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Benchmark, Result
from lab import drafters
from lab.servers import server_on_this_machine
from servers import Servers, TakingTurns, check_server_options, in_turns, server_options, take_turns
from step_profile import correlation, events_of, record

from sgl_flashsample.autotune.timing import Timing
from sgl_flashsample.hot_vocab import MAPPED_SHARE, HotVocab
from sgl_flashsample.kernels.reference import sample_ref
from sgl_flashsample.sglang.drafts import DRAFTS_VARIABLE
from sgl_flashsample.sglang.support import SPECULATION_VARIABLE
from sgl_flashsample.sglang.versions import sglang_version
from sgl_flashsample.switches import DRAFT_VOCAB_VARIABLE
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.bench import OURS, STOCK, check_active
from sgl_flashsample.tools.server import Server, ServerError, stop_all

PROMPT_TOKENS, SHORT = 32, 16
DRAFT_LAYERS = 4
HOT_IDS = 32_000  # ids of EAGLE3's draft model, for larger vocabularies
ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
DRAFTED = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")  # by a model
REJECTING = ("EAGLE", "NEXTN")  # SGLang refuses it for EAGLE3's draft model, which has other ids than the target
MAPPED = ("EAGLE", "NEXTN")
HOT = (*MAPPED, "STANDALONE")
COUNTED_TOKENS = 1 << 20  # whose most frequent ids are drafted
TREE_WIDTH, COUPLED_TREE_WIDTH, TREE_DEPTH = 4, 2, 5
EXTEND_ATTENTION = "_fwd_kernel"  # serves several new tokens per row: a verification has it in each layer of the target
# Kernels that end a verification
VERIFYING = ("TreeSpeculativeSampling", "VerifyTreeGreedy", "verify_tree_greedy", "follow_drafts")
PROFILED_STEPS = 20
SAMPLE_SECONDS = 1.0
SECTIONS = ("speed", "tokens")
COUNTS = ("tokens", "near_ties", "different")
NO_DRAFTS = "no drafts"
OUT_OF_TIME = "out of time"
GPU_ARGUMENTS = [
    *("--attention-backend", "triton", "--disable-flashinfer-autotune", "--disable-prefill-cuda-graph"),
    *("--cuda-graph-max-bs-decode", "32"),
]


class Backend(NamedTuple):
    """name: --sampling-backend on a GPU. algorithms: those that it serves. options: of the server. width: drafts of a
    node. mapped: with a token map. hot: with a file of counts. says: words of the log's line on drafts."""

    name: str
    environment: dict[str, str]
    algorithms: tuple[str, ...] = ALGORITHMS
    options: tuple[str, ...] = ()
    width: int = 1
    speculates: bool = True
    mapped: bool = False
    hot: bool = False
    says: tuple[str, ...] = ()

    def steps(self, nodes: int) -> int:
        """Passes of the draft model for so many nodes, the root among them."""
        return nodes - 1 if self.width == 1 else min(TREE_DEPTH, nodes - 1)


BLOCK = "--speculative-use-block-verification"
COUPLED = {SPECULATION_VARIABLE: "1", DRAFTS_VARIABLE: "coupled"}
SAYS_COUPLED = "they are coupled"
BACKENDS = {
    NO_DRAFTS: Backend(OURS, {}, speculates=False),
    STOCK: Backend("flashinfer", {}),
    "rejection": Backend("flashinfer", {}, REJECTING, ("--speculative-use-rejection-sampling",)),
    "block": Backend("flashinfer", {}, REJECTING, ("--speculative-use-rejection-sampling", BLOCK)),
    "tree": Backend("flashinfer", {}, DRAFTED, width=TREE_WIDTH),
    "greedy": Backend(OURS, {SPECULATION_VARIABLE: "1", DRAFTS_VARIABLE: "greedy"}),
    "coupled": Backend(OURS, COUPLED, DRAFTED, says=(SAYS_COUPLED,)),
    "coupled-trees": Backend(OURS, COUPLED, DRAFTED, width=COUPLED_TREE_WIDTH, says=("trees of", SAYS_COUPLED)),
    "map": Backend("flashinfer", {}, MAPPED, mapped=True),
    "mapped": Backend(OURS, COUPLED, MAPPED, mapped=True),
    "hot": Backend(OURS, COUPLED, HOT, hot=True, says=("most frequent ids", SAYS_COUPLED)),
    "hot-trees": Backend(
        OURS, COUPLED, HOT, width=COUPLED_TREE_WIDTH, hot=True, says=("most frequent ids", "trees of", SAYS_COUPLED)
    ),
}


# --- what is known --------------------------------------------------------------------------------------------------


def distances(
    target: markov.MarkovModel, draft: markov.MarkovModel, tokens: list[int], temperature: float
) -> tuple[float, float]:
    """The target's largest probability, and the total variation between the two: means over what follows ``tokens``."""
    counts = Counter(target.representative(torch.tensor(tokens)).tolist())
    last = torch.tensor(list(counts))
    weights = torch.tensor(list(counts.values()), dtype=torch.float64) / len(tokens)
    if temperature == 0:  # all mass is on the most likely token
        differ = target.logits(last).argmax(-1) != draft.logits(last).argmax(-1)
        return 1.0, float(weights @ differ.double())
    p, q = (model.distribution(last, temperature) for model in (target, draft))
    return float(weights @ p.max(-1).values), float(weights @ (p - q).abs().sum(-1)) / 2


def drawn_before(target: markov.MarkovModel, tokens: int, temperatures: Sequence[float]) -> torch.Tensor:
    """``[V]`` int64: how often the target draws each id in answers of ``tokens`` tokens to random prompts, at each
    temperature equally often, up to ``COUNTED_TOKENS`` in all."""
    generator, vocab = torch.Generator().manual_seed(1), target.size.vocab_size
    one_of_each, context = target.representative(torch.arange(vocab)).unique(return_inverse=True)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for temperature in temperatures:
        # A temperature of 0 is the limit: nothing but the most likely token is left.
        summed = target.distribution(one_of_each, max(temperature, 1e-6)).cumsum(-1)
        last = torch.randint(3, vocab, (COUNTED_TOKENS // tokens // len(temperatures),), generator=generator)
        for _ in range(tokens):
            contexts = context[last]
            for one in contexts.unique():
                rows = contexts == one
                uniform = torch.rand(int(rows.sum()), dtype=torch.float64, generator=generator)
                last[rows] = torch.searchsorted(summed[one], uniform * summed[one, -1], right=True)
            counts += last.bincount(minlength=vocab)
    return counts


# --- what is measured -----------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """The answers of one batch of requests. verifications: of all requests; steps: of the one that needed most."""

    seconds: float
    tokens: list[list[int]]
    verifications: int
    steps: int


def prompts_of(vocab_size: int, batch: int) -> list[list[int]]:
    return [random.choices(range(3, vocab_size), k=PROMPT_TOKENS) for _ in range(batch)]


def ask(
    server: Server, prompts: list[list[int]], temperature: float, tokens: int, seeds: Sequence[int] | None = None
) -> Answers:
    """``tokens`` tokens for each prompt. Raises ServerError for answers of another length."""
    params: Any = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    if seeds is not None:
        params = [params | {"sampling_seed": seed} for seed in seeds]
    started = time.perf_counter()
    answers = server.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    ids = [answer["output_ids"] for answer in answers]
    if {len(one) for one in ids} != {tokens}:
        raise ServerError(f"answers have {sorted({len(one) for one in ids})} tokens; expected {tokens}")
    counts = [answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers]
    return Answers(seconds, ids, sum(counts), max(counts))


def acceptance(answers: Answers, draft_tokens: int) -> float:
    """The share of the drafts that were accepted. Of each answer the first token is the prefill's, and a verification
    gains one token more than it accepts."""
    gained = sum(len(tokens) - 1 for tokens in answers.tokens)
    return (gained / answers.verifications - 1) / (draft_tokens - 1)


# --- the parts of a step --------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """One CUDA graph of a trace that is a pass of a model, on the GPU, in microseconds. last_norm: the end of its last
    norm. extends: kernels of attention for several new tokens per row."""

    start: float
    end: float
    last_norm: float
    extends: int


def parts(events: list[dict[str, Any]], chain: int) -> dict[str, float]:
    """The parts of a step in a trace, in microseconds, each where it shows. chain: passes in the draft model's graph.

    The target's pass has attention for several new tokens in more layers than any other; the draft model's chain is the
    pass ahead of it.
    """
    launches = {correlation(event) for event in events if event.get("name") == "cudaGraphLaunch"} - {None}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    by_launch: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        if correlation(kernel) in launches:
            by_launch[correlation(kernel)].append(kernel)
    passes = sorted(one for each in by_launch.values() if (one := _pass_of(each)) is not None)
    most = max((one.extends for one in passes), default=0)
    ends = sorted(
        kernel["ts"] + kernel["dur"] for kernel in kernels if any(name in kernel["name"] for name in VERIFYING)
    )
    targets = [one for one in passes if most and one.extends == most]
    times: dict[str, list[float]] = defaultdict(list)
    for one in targets:
        times["target_us"].append(one.last_norm - one.start)
        times["head_us"].append(one.end - one.last_norm)
        place = bisect.bisect_left(ends, one.last_norm)
        if place < len(ends):
            times["verify_us"].append(ends[place] - one.last_norm)
    for before, one in itertools.pairwise(passes):
        if one in targets and before not in targets:
            times["draft_step_us"].append((before.end - before.start) / chain)
    for begun, ended in itertools.pairwise(target.start for target in targets):
        times["drafts_us"].append(
            sum(one.end - one.start for one in passes if begun < one.start < ended and one not in targets)
        )
        times["busy_us"].append(_busy(kernels, begun, ended))
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def _busy(kernels: list[dict[str, Any]], begun: float, ended: float) -> float:
    """Microseconds in which a kernel runs that starts between the two times."""
    total = reached = 0.0
    for start, end in sorted((one["ts"], one["ts"] + one["dur"]) for one in kernels if begun <= one["ts"] < ended):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def logits_operations(events: list[dict[str, Any]], vocab_size: int) -> list[str]:
    """Operations of PyTorch with an argument of several dimensions whose last one is the vocabulary, in a trace with
    shapes."""
    return sorted(
        {
            event["name"]
            for event in events
            for shape in event.get("args", {}).get("Input Dims", ())
            if len(shape) > 1 and shape[-1] == vocab_size
        }
    )


def _pass_of(kernels: list[dict[str, Any]]) -> Pass | None:
    """The pass of a model that these kernels of a graph are; None where none of them is a norm."""
    norms = [event["ts"] + event["dur"] for event in kernels if "norm" in event["name"].lower()]
    if not norms:
        return None
    start, end = min(event["ts"] for event in kernels), max(event["ts"] + event["dur"] for event in kernels)
    return Pass(start, end, max(norms), sum(event["name"] == EXTEND_ATTENTION for event in kernels))


# --- servers and cells ----------------------------------------------------------------------------------------------


class Run:
    """The servers of one model, algorithm, number of nodes and error, and what is asked of them."""

    def __init__(self, options: Any, result: Result, size: str, algorithm: str, nodes: int, error: float) -> None:
        self.options, self.result, self.algorithm, self.nodes = options, result, algorithm, nodes
        self.about = {"model": size, "algorithm": algorithm, "draft_tokens": nodes}
        if algorithm == "STANDALONE":
            self.about["error"] = error
        if options.tp > 1:
            self.about["tp"] = options.tp
        self.size, self.error = markov.SIZES[size], error
        self.backends = [name for name in options.backends if algorithm in BACKENDS[name].algorithms]
        if "tokens" in options.only:
            served = (name for name in self.backends if BACKENDS[name].name == OURS or "speed" in options.only)
            self.backends = [NO_DRAFTS, *served]

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """The rows of one cell after the other, with their "section"."""
        try:
            with in_turns(self.options) as wait_for_turn:
                yield from self._cells(wait_for_turn)
        except (ServerError, OSError) as error:
            self.result.miss(error, **self.about)
            print(f"logs are in {self.options.logs}", flush=True)

    def _cells(self, wait_for_turn: Callable[[Servers], None]) -> Iterator[list[dict[str, Any]]]:
        target, draft = self._write_checkpoints()
        if any(BACKENDS[name].mapped or BACKENDS[name].hot for name in self.backends):
            self._write_likeliest(target)
        servers = {name: self._server(name) for name in self.backends}
        try:
            for server in servers.values():
                server.start()
            for name, server in servers.items():
                server.wait_until_ready()
                if BACKENDS[name].name == OURS:
                    check_active(server)
                said = server.log_lines("flashsample: drafts ")[-1:]
                if not all(words in "".join(said) for words in BACKENDS[name].says):
                    raise ServerError(f"drafts of {name} are not what they are to be: {said}")
            wait_for_turn(servers.values())
            take_turns(servers.values())
            cells = [
                (batch, temperature) for batch in self.options.batches for temperature in self.options.temperatures
            ]
            for batch, temperature in cells if "speed" in self.options.only else ():
                about = self.about | {"batch": batch, "temperature": temperature}
                if time.monotonic() > self.options.until:
                    self.result.miss(OUT_OF_TIME, section="speed", **about)
                else:
                    yield self._cell(
                        {name: servers[name] for name in servers if BACKENDS[name].speculates},
                        *(target, draft, batch, temperature, about),
                    )
            for temperature in self.options.temperatures if "tokens" in self.options.only else ():
                if time.monotonic() > self.options.until:
                    self.result.miss(OUT_OF_TIME, section="tokens", **self.about, temperature=temperature)
                else:
                    yield self._compared(servers, target, temperature)
        finally:
            stop_all(servers.values())

    @property
    def _largest(self) -> int:
        return max(self.options.batches)

    def _write_checkpoints(self) -> tuple[markov.MarkovModel, markov.MarkovModel | None]:
        """The target's truth, and the draft model's where it is known."""
        if self.algorithm == "NEXTN":
            return drafters.write_mtp(self._target_folder, self.size), None
        draft = None
        if self.algorithm == "STANDALONE":
            layers = min(DRAFT_LAYERS, self.size.num_hidden_layers)
            size = dataclasses.replace(self.size, num_hidden_layers=layers)  # the target's shape with few layers
            draft = markov.write(self._draft_folder, size, error=self.error)
        elif self.algorithm == "EAGLE":
            drafters.write_eagle(self._draft_folder, self.size)
        elif self.algorithm == "EAGLE3":
            drafters.write_eagle3(self._draft_folder, self.size, min(HOT_IDS, self.size.vocab_size // 2))
        return markov.write(self._target_folder, self.size), draft

    @property
    def _target_folder(self) -> Path:
        return self.options.checkpoints / (self.about["model"] + ("-mtp" if self.algorithm == "NEXTN" else ""))

    @property
    def _draft_folder(self) -> Path:
        of = f"{self.error:g}" if self.algorithm == "STANDALONE" else self.algorithm
        return self.options.checkpoints / f"{self.about['model']}-draft-{of}"

    @property
    def _token_map(self) -> Path:
        return self._target_folder / "token-map.pt"

    @property
    def _counts(self) -> Path:
        return self._target_folder / "hot.json"

    def _write_likeliest(self, target: markov.MarkovModel) -> None:
        """A file of counts, as a server writes one of its traffic, and the token map of its most frequent ids."""
        counts = HotVocab.of_ids(drawn_before(target, self.options.tokens, self.options.temperatures).numpy())
        self._counts.write_text(counts.dumps())
        torch.save(counts.most_frequent(int(MAPPED_SHARE * counts.vocab)).tolist(), self._token_map)

    def _server(self, name: str) -> Server:
        # An idle server would otherwise take a core from the one that is measured.
        arguments = ["--disable-radix-cache", "--random-seed", "1", "--sleep-on-idle"]
        arguments += ["--max-total-tokens", str(self._largest * (PROMPT_TOKENS + self.options.tokens + 64) + 1024)]
        if BACKENDS[name].speculates:
            arguments += ["--speculative-algorithm", self.algorithm]
            arguments += ["--speculative-num-draft-tokens", str(self.nodes)]
        if BACKENDS[name].speculates and self.algorithm != "NGRAM":
            arguments += ["--speculative-eagle-topk", str(BACKENDS[name].width), *BACKENDS[name].options]
            arguments += ["--speculative-num-steps", str(BACKENDS[name].steps(self.nodes))]
            if BACKENDS[name].mapped:
                arguments += ["--speculative-token-map", str(self._token_map)]
            if self.algorithm != "NEXTN":
                arguments += ["--speculative-draft-model-path", str(self._draft_folder)]
        if self.options.tp > 1:
            arguments += ["--tp-size", str(self.options.tp)]
        backend, on_gpu = BACKENDS[name], torch.cuda.is_available()
        environment = backend.environment | ({DRAFT_VOCAB_VARIABLE: str(self._counts)} if backend.hot else {})
        environment |= self.options.set
        if not on_gpu and backend.name == OURS:
            environment = {"TRITON_INTERPRET": "1"} | environment
        cpu_arguments = [] if on_gpu else ["--attention-backend", "triton", "--disable-cuda-graph"]
        return server_on_this_machine(
            self._target_folder,
            [*arguments, *cpu_arguments],
            backend=backend.name if on_gpu or backend.name == OURS else None,
            log=self.options.logs / f"{self.about['model']}-{self.algorithm}-{self.nodes}-{name}.log",
            environment=environment,
            gpu_arguments=[*GPU_ARGUMENTS, "--mem-fraction-static", str(self.options.memory_share)],
            kind=TakingTurns,
        )

    def _cell(
        self,
        servers: dict[str, Server],
        target: markov.MarkovModel,
        draft: markov.MarkovModel | None,
        batch: int,
        temperature: float,
        about: dict[str, Any],
    ) -> list[dict[str, Any]]:
        vocab, pairs, long_tokens = self.size.vocab_size, self.options.pairs, self.options.tokens
        speeds: dict[str, list[float]] = {name: [] for name in servers}
        steps: dict[str, list[float]] = {name: [] for name in servers}
        answered: dict[str, list[Answers]] = {name: [] for name in servers}
        prompts = prompts_of(vocab, batch)
        for server in servers.values():
            ask(server, prompts, temperature, SHORT)  # compiles, and fills caches
        seconds = [ask(server, prompts, temperature, long_tokens).seconds for server in servers.values()]
        times = math.ceil(SAMPLE_SECONDS / statistics.median(seconds))
        for pair in range(pairs):
            # The same ones: a greedy answer's drafts are as lucky in each server.
            each = [prompts_of(vocab, batch) for _ in range(times)]
            for name in list(servers) if pair % 2 == 0 else reversed(servers):
                taken, verified = 0.0, 0
                for prompts in each:
                    short = ask(servers[name], prompts, temperature, SHORT)
                    long = ask(servers[name], prompts, temperature, long_tokens)
                    taken, verified = taken + long.seconds - short.seconds, verified + long.steps - short.steps
                    answered[name].append(long)
                speeds[name].append(times * batch * (long_tokens - SHORT) / max(1e-9, taken))
                steps[name].append(1e6 * taken / max(1, verified))
        rows: list[dict[str, Any]] = []
        for name, server in servers.items():
            tokens = [token for answers in answered[name] for one in answers.tokens for token in one]
            speed, step = Timing.of(speeds[name]), Timing.of(steps[name])
            row = about | {
                "section": "speed",
                "backend": name,
                "tokens_s": round(speed.us, 1),
                "tokens_s_spread": round(speed.spread, 1),
            }
            row["screen"] = bool(server.log_lines("flashsample: screen built"))
            row |= {"step_us": round(step.us, 1), "step_us_spread": round(step.spread, 1)}
            row["acceptance"] = round(statistics.fmean(acceptance(a, self.nodes) for a in answered[name]), 4)
            if draft is not None:
                p_max, tv = distances(target, draft, tokens, temperature)
                row |= {"p_max": round(p_max, 4), "draft_tv": round(tv, 4)}
            if BACKENDS[name].mapped or BACKENDS[name].hot:
                likeliest = torch.tensor(torch.load(self._token_map))
                row["covered"] = round(float(torch.isin(torch.tensor(tokens), likeliest).double().mean()), 4)
            if torch.cuda.is_available() and batch in self.options.profiled:
                trace = (
                    self.options.logs / f"{about['model']}-{self.algorithm}-{self.nodes}-{name}-{batch}-{temperature}"
                )
                # The first draft is of the pass over the verified tokens.
                chain = max(1, BACKENDS[name].steps(self.nodes) - 1)
                record(server, trace, PROFILED_STEPS, lambda s=server: ask(s, prompts, temperature, long_tokens), True)
                events = events_of(trace)
                row |= parts(events, chain) | {"logits_operations": logits_operations(events, vocab)}
            rows.append(row)
        line = ", ".join(
            f"{row['backend']} {row['tokens_s']:.0f}/s ({row['acceptance']:.3f}; step {row['step_us']:.0f} us)"
            for row in rows
        )
        print(f"{about}: {line}", flush=True)
        return rows

    def _compared(
        self, servers: dict[str, Server], target: markov.MarkovModel, temperature: float
    ) -> list[dict[str, Any]]:
        """A row for each server with drafts of ours; and for the one without, of the first tokens."""
        about = self.about | {"section": "tokens", "batch": self._largest, "temperature": temperature}
        names = [name for name in servers if BACKENDS[name].name == OURS]
        rows = {name: about | {"backend": name, **dict.fromkeys(COUNTS, 0), "differences": []} for name in names}
        first_seed = 0
        while first_seed * self.options.tokens < self.options.compared:
            prompts = prompts_of(self.size.vocab_size, self._largest)
            seeds = range(first_seed, first_seed + self._largest)
            answers = {
                name: ask(servers[name], prompts, temperature, self.options.tokens, seeds).tokens for name in names
            }
            want, ties = drawn(target, [prompt[-1] for prompt in prompts], temperature, seeds, PROMPT_TOKENS - 1)
            firsts = [answer[0] for answer in answers[NO_DRAFTS]]
            rows[NO_DRAFTS]["tokens"] += self._largest  # the first of each answer
            for token, wanted, tie in zip(firsts, want, ties, strict=True):
                if token != wanted:
                    rows[NO_DRAFTS]["near_ties" if tie else "different"] += 1
            for name in names[1:]:
                for prompt, seed, one, other in zip(prompts, seeds, answers[NO_DRAFTS], answers[name], strict=True):
                    _add_difference(rows[name], target, prompt, seed, temperature, one, other)
            first_seed += self._largest
        for row in rows.values():
            print({key: value for key, value in row.items() if key != "differences"}, flush=True)
        return list(rows.values())


def _add_difference(
    row: dict[str, Any],
    target: markov.MarkovModel,
    prompt: list[int],
    seed: int,
    temperature: float,
    one: list[int],
    other: list[int],
) -> None:
    """Count two answers to one request into ``row``, up to their first difference."""
    place = next((n for n, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
    row["tokens"] += len(one) if place is None else place + 1
    if place is not None:
        context = [*prompt, *one[:place]]
        _, (near_tie,) = drawn(target, context[-1:], temperature, [seed], len(context) - 1)
        row["near_ties" if near_tie else "different"] += 1
        row["differences"].append({"seed": seed, "position": len(context) - 1, "tokens": [one[place], other[place]]})


def drawn(
    target: markov.MarkovModel, last: list[int], temperature: float, seeds: Sequence[int], position: int
) -> tuple[list[int], list[bool]]:
    """Tokens that the float64 reference draws after each of these, and whether each draw is a near-tie, where a logit
    may be off by a rounding of the model's dtype."""
    logits = target.logits(torch.tensor(last))
    bound = logits.abs() * torch.finfo(target.head.dtype).eps + 1e-6
    temperatures = torch.full((len(last),), temperature)
    positions = torch.full((len(last),), position)
    want = sample_ref(logits, logits - bound, logits + bound, temperatures, torch.tensor(list(seeds)), positions)
    return want.token.tolist(), want.near_tie.tolist()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=markov.SIZES, default=["qwen3-1.7b"])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["NGRAM", "STANDALONE"])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each server")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4, 8], metavar="NODES")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.6], help="of the draft's logits")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    drafting = [name for name in BACKENDS if name != NO_DRAFTS]
    usual = [name for name in drafting if name != "block"]
    parser.add_argument("--backends", nargs="+", choices=drafting, default=usual)
    parser.add_argument("--compared", type=int, default=50_000, help="tokens of each server and temperature, of tokens")
    parser.add_argument("--profiled", type=int, nargs="*", default=[1, 32], metavar="BATCH", help="batches with traces")
    parser.add_argument("--pairs", type=int, default=5, help="samples of each server per cell")
    parser.add_argument("--tokens", type=int, default=256, help="of a long answer; a short one has 16")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "flashsample-checkpoints")
    server_options(parser, "flashsample-speculation", memory_share=0.3)


def prepare(options: Any) -> None:
    check_server_options(options)
    if options.tokens <= SHORT:
        raise ValueError(f"--tokens is {options.tokens}; expected more than {SHORT}")
    if min(options.draft_tokens) < 2:
        raise ValueError(f"--draft-tokens is {options.draft_tokens}; expected 2 or more: the root and its drafts")


def measure(options: Any, result: Result) -> int:
    random.seed(1)
    result.run["sglang"] = sglang_version()
    for size, algorithm, nodes in itertools.product(options.sizes, options.algorithms, options.draft_tokens):
        for error in options.errors if algorithm == "STANDALONE" else options.errors[:1]:
            for rows in Run(options, result, size, algorithm, nodes, error).rows():
                result.add(rows)
    return result.close() or int(any(row.get("different") for row in result.rows))


PLACE = ("section", "model", "tp", "algorithm", "draft_tokens", "error", "batch", "temperature", "backend")
CELL = ("section", "batch", "temperature", "backend")
BENCHMARKS = {
    "speculation": Benchmark(__doc__, measure, add_options, prepare, SECTIONS, ("speed",), PLACE, CELL, needs_gpu=False)
}
