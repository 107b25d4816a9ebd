"""Races the whole last step, LM head to token, against everybody else's on this GPU; writes JSON.

    python benchmarks/run.py rivals --out benchmarks/results/h200-rivals.json

Per head, batch size and mode, everything in one race: CUDA graphs, weights cold, rounds interleaved, medians and half
the distance between the quartiles. ``read`` is the time to read the head once, ``gemm`` that of the GEMM alone. A rival
that takes logits gets them from that GEMM, in the forms that it can read; the fastest of its forms is its row.

Paths of ours:

    ours-fused             the fused pass, whatever the size of the batch: what fusion alone gains
    ours-picked            the path that a batch takes by itself, without a screen and a tuned table
    ours-screened          with the screen that a server without a tuned table decides on when it starts
    ours-tuned             as ours-picked, with the tuned table that is shipped for this GPU and head
    ours-tuned-screened    as a server with that table serves it

The last one that a head has is the path of its server, ``"picked": true``. A path whose configuration is that of an
earlier one is not raced twice: its row has the same time, and ``same_as``.

Before a race, tokens of every contender are compared with float64 logits of the batch: each has to be one that the mode
allows, to within the rounding of logits to the head's dtype; the log-probabilities of plain tokens have to have the
right mean. A contender that fails has no time. It, and a rival that is not installed, is in ``env.not_run`` with the
reason. Top-k and top-p are SGLang's (joint); forms that take top-k first draw from a part of the allowed ids.

Install rivals beside the package; each is raced where it can be imported:

    flashinfer     pip install flashinfer-python==0.7.2, also for flashinfer-cluster; compiles its kernels with nvcc
    sglang         pip install sglang==0.5.23
    vllm           pip download --no-deps vllm==0.33.0; unpack the wheel, with its dist-info, into a folder on
                   PYTHONPATH. Its kernels need no server; an installed wheel would bring another PyTorch
    flashsampling  clone FlashSampling/FlashSampling from GitHub, put its src/ on PYTHONPATH; pip install nvtx; it
                   imports FlashInfer too

A run that has ended, or has used up ``--limit``, goes on with ``--keep``. ``--fast``: three batch sizes of six.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, DRY_RUN, Benchmark, Result, Shape, reason_of
from contenders import (
    EAGER,
    MAX_SCREENED_ROWS,
    PICKED,
    PICKED_WITH_SCREEN,
    Entrant,
    Selection,
    Tree,
    baseline_batch,
    full,
    is_unscreened,
)
from racing import PROBE, PROBE_ROWS, Job, Session, compiling_jobs, verdict
from screened import race_at_start
from step import check_race

from sgl_flashsample import LMHead, SamplingPath, screen_race
from sgl_flashsample.autotune import baselines
from sgl_flashsample.autotune.timing import MAX_CALLS, Call, copies_needed
from sgl_flashsample.autotune.workload import Workload
from sgl_flashsample.paths import Parts
from sgl_flashsample.screen import unsupported_head
from sgl_flashsample.tables.lookup import resolve
from sgl_flashsample.tools.samplings import SAMPLINGS

MODES = {"plain": "t1", "greedy": "greedy", "top_k+top_p": "k50p90", "top_p": "p90", "min_p": "minp05"}
# Qwen3 8B (with a table), DeepSeek V3, Qwen3.5 4B, Mistral Small 3, Phi-4 mini, GPT-2, Llama 3 70B (with a table),
# Qwen3.5 27B.
HEADS = (
    [Shape(48, 777)]
    if DRY_RUN
    else [
        Shape(4096, 151936),
        Shape(7168, 129280),
        Shape(2560, 248320),
        Shape(5120, 131072),
        Shape(3072, 200064),
        Shape(768, 50257),
        Shape(8192, 128256),
        Shape(5120, 248320),
    ]
)
BATCHES = (3,) if DRY_RUN else (1, 17, 48, 100, 200, 384)
FAST_BATCHES = (3,) if DRY_RUN else (1, 48, 200)
CHECKED_ROWS = 6 if DRY_RUN else 64  # tokens of each contender that are compared, at least
IDS_AT_ONCE = 8192  # ids whose float64 logits are computed together
# A rounded logit changes the mass of the ids above it: boundaries of top-p are compared to within this.
MASS_TOLERANCE = 0.01
MAX_DEVIATIONS = 6.0  # standard errors of the mean log-probability of plain tokens
DEVICE_LOST = "the device failed"


@dataclasses.dataclass(frozen=True)
class Step:
    """The inputs of rivals for one batch and mode. given: hidden states, copies of the head, limits per row.
    top_k (0: off), top_p, min_p: of every row."""

    mode: str
    batch: Workload
    given: baselines.BaselineBatch
    gemm: baselines.Gemm
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, batch: Workload, mode: str, heads: Sequence[LMHead] = ()) -> Step:
        limits = SAMPLINGS[MODES[mode]].truncation or (0, 1.0, 0.0)
        given = baseline_batch(batch, limits, heads)
        return cls(mode, batch, given, baselines.Gemm(given), *limits)

    def weight(self, step: int) -> torch.Tensor:
        return self.given.weights[step % len(self.given.weights)]

    def noise(self, step: int) -> dict[str, Any]:
        return baselines.flashinfer_noise(self.given, step)

    def baselines(self, **options: Any) -> list[baselines.Baseline]:
        """The baselines of the tuner that draw in this mode."""
        draws = {"plain": baselines.PLAIN, "greedy": baselines.GREEDY}.get(self.mode, baselines.TRUNCATED)
        return [one for one in baselines.baselines(self.given, **options) if one.draws == draws]


Forms = dict[str, Call]


@dataclasses.dataclass(frozen=True)
class Rival:
    """modules: that it is imported by. package: of which the version is recorded. install: what is missing where the
    import fails. modes: that it serves. forms: takes the modules and a ``Step``; returns the calls of one step, each
    with its own name. compiles: its kernels are compiled for each shape."""

    modules: tuple[str, ...]
    package: str
    install: str
    modes: tuple[str, ...]
    forms: Callable[..., Forms]
    compiles: bool = False
    needs_gpu: bool = True

    def load(self) -> list[Any]:
        """The modules. Raises whatever their imports do; ValueError where they import and cannot run."""
        try:
            loaded = [importlib.import_module(module) for module in self.modules]
        except ImportError as error:
            raise ImportError(f"{reason_of(error)}; {self.install}") from None
        if self.needs_gpu and DEVICE.type != "cuda":
            raise ValueError("it needs a CUDA device")
        return loaded

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:  # a folder on PYTHONPATH
            package = sys.modules.get(self.modules[0].partition(".")[0])
            return str(getattr(package, "__version__", "unknown"))


def torch_forms(modules: list[Any], step: Step) -> Forms:
    compiled: Any = None if DRY_RUN else functools.partial(torch.compile, dynamic=False, fullgraph=True)
    if step.mode in ("plain", "greedy"):
        drawing = [one for one in step.baselines(compile=compiled) if one.name != baselines.GEMM]
        return {f"{one.name}, {one.form}": one.call for one in drawing}
    draw: Callable[..., torch.Tensor] = _min_p
    limits: dict[str, float] = {"floor": math.log(step.min_p)} if step.min_p else {}
    if not step.min_p:
        draw, limits = _largest, {"count": step.top_k or step.batch.vocab, "top_p": step.top_p}
    made = draw if compiled is None else compiled(draw)
    return {"eager" if compiled is None else "torch.compile": lambda index: made(step.gemm(index), **limits)}


def _gumbel_argmax(logits: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(logits).exponential_(1.0).clamp_min(torch.finfo(torch.float32).tiny)
    return (logits - noise.log()).argmax(-1)


def _largest(logits: torch.Tensor, count: int, top_p: float) -> torch.Tensor:
    """Top-k and top-p from the sorted ``count`` largest logits."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.sort(-1, descending=True) if count == logits.shape[-1] else logits.topk(count)
    mass = (values - total).exp()
    kept = values.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf)
    return ids.gather(-1, _gumbel_argmax(kept)[:, None])[:, 0]


def _min_p(logits: torch.Tensor, floor: float) -> torch.Tensor:
    logits = logits.float()
    least = logits.amax(-1, keepdim=True) + floor
    return _gumbel_argmax(logits.masked_fill(logits < least, -torch.inf))


def flashinfer_forms(modules: list[Any], step: Step) -> Forms:
    """The forms of the tuner's baselines, and FlashInfer's own softmax and special cases."""
    sampling, given = modules[0], step.given
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    drawing = step.baselines(flashinfer=sampling, compile=compiled)
    forms = {one.form: one.call for one in drawing if one.name == baselines.FLASHINFER}
    for source, logits in {"float32": step.gemm.float32, "2 bytes": step.gemm}.items():
        if step.mode == "top_k+top_p":
            forms[f"top-k first, GEMM writes {source}"] = lambda index, logits=logits: (
                sampling.top_k_top_p_sampling_from_logits(logits(index), step.top_k, step.top_p, **step.noise(index))
            )
        if step.mode == "top_p":
            forms[f"its softmax, GEMM writes {source}"] = lambda index, logits=logits: (
                sampling.top_p_sampling_from_probs(sampling.softmax(logits(index)), given.top_p, **step.noise(index))
            )
        if step.mode == "min_p":
            forms[f"its softmax, GEMM writes {source}"] = lambda index, logits=logits: (
                sampling.min_p_sampling_from_probs(sampling.softmax(logits(index)), given.min_p, **step.noise(index))
            )
    return forms


def cluster_forms(modules: list[Any], step: Step) -> Forms:
    """FlashInfer's top-k and top-p by clusters of thread blocks, of which a graph repeats the noise."""
    cluster, sampling = modules
    given = step.given

    def call(logits: Call, index: int) -> torch.Tensor:
        return cluster.top_k_top_p_sampling_from_probs(
            sampling.softmax(logits(index)),
            given.top_k,
            given.top_p,
            top_k_max=step.top_k,
            philox_seed=1234,
            philox_offset=index * baselines.OFFSETS_PER_CALL,
        )

    sources = {"GEMM writes float32": step.gemm.float32, "GEMM writes 2 bytes": step.gemm}
    return {name: functools.partial(call, logits) for name, logits in sources.items()}


def vllm_forms(modules: list[Any], step: Step) -> Forms:
    """The order of its GPU worker's sampler: logits stay in the GEMM's dtype unless they are truncated."""
    gumbel, min_p, truncation = modules
    given, rows = step.given, torch.arange(step.batch.rows, dtype=torch.int32, device=step.batch.hidden.device)
    temperature = torch.zeros_like(given.temperature) if step.mode == "greedy" else given.temperature

    def call(index: int) -> torch.Tensor:
        logits = step.gemm(index)
        if step.mode == "min_p":
            logits = logits.float()
            min_p.apply_min_p(logits, rows, given.min_p)
        elif step.mode in ("top_k+top_p", "top_p"):
            top_k = given.top_k if step.top_k else None
            logits = truncation.apply_top_k_top_p_triton(
                logits.float(), top_k, given.top_p, has_topp_only_rows=top_k is None
            )
        return gumbel.gumbel_sample(
            logits,
            rows,
            temperature,
            step.batch.seed,
            step.batch.position[index],
            apply_temperature=False,
            is_drafting=False,
        )

    return {"its Triton sampler": call}


def sglang_forms(modules: list[Any], step: Step) -> Forms:
    """``Sampler.forward`` of its FlashInfer backend, with the kernels that its module imports."""
    sampler, given = modules[0], step.given
    softmax = getattr(sampler, "sampler_softmax", functools.partial(torch.softmax, dim=-1))
    top_k = given.top_k if step.top_k else torch.full_like(given.top_k, sampler.TOP_K_ALL)

    def call(index: int) -> torch.Tensor:
        logits = step.gemm(index).float()
        if step.mode == "greedy":
            return torch.argmax(logits, -1)
        logits.div_(given.temperature[:, None])
        logits[:] = softmax(logits)
        if step.mode == "plain":
            return sampler.sampling_from_probs_torch(logits)
        if step.mode == "min_p":
            kept = sampler.top_p_renorm_prob(sampler.top_k_renorm_prob(logits, top_k), given.top_p)
            return sampler.min_p_sampling_from_probs(kept, given.min_p, **step.noise(index))
        return sampler.top_k_top_p_sampling_from_probs(
            logits, top_k, given.top_p, filter_apply_order="joint", **step.noise(index)
        )

    return {"its sampler's kernels": call}


def flashsampling_forms(modules: list[Any], step: Step) -> Forms:
    temperature = torch.ones((), device=step.batch.hidden.device)

    def call(index: int) -> torch.Tensor:
        # Triton compiles a kernel anew for an integer that is 1 or a multiple of 16: these are neither.
        seed = 2 * index + 3
        return modules[0].fused_mm_sample_triton(
            step.weight(index), step.batch.hidden, 1, temperature, seed, greedy_sampling=step.mode == "greedy"
        )

    return {"fused, Triton": call}


_ALL = tuple(MODES)
_FLASHINFER = "pip install flashinfer-python==0.7.2"
RIVALS = {
    "torch": Rival(("torch",), "torch", "", _ALL, torch_forms, compiles=True, needs_gpu=False),
    "flashinfer": Rival(
        ("flashinfer.sampling",),
        "flashinfer-python",
        _FLASHINFER,
        ("plain", "top_k+top_p", "top_p", "min_p"),
        flashinfer_forms,
    ),
    "flashinfer-cluster": Rival(
        ("flashinfer.cake_sampling", "flashinfer.sampling"),
        "flashinfer-python",
        _FLASHINFER,
        ("top_k+top_p",),
        cluster_forms,
    ),
    "vllm": Rival(
        ("vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.sample.min_p", "vllm.v1.sample.ops.topk_topp_triton"),
        "vllm",
        "the folder of the unpacked wheel vllm==0.33.0 on PYTHONPATH",
        _ALL,
        vllm_forms,
        compiles=True,
    ),
    "flashsampling": Rival(
        ("fused_mm_sampling.core",),
        "fused-mm-sampling",
        "src/ of the repository FlashSampling/FlashSampling on PYTHONPATH, nvtx and FlashInfer",
        ("plain", "greedy"),
        flashsampling_forms,
        compiles=True,
    ),
    "sglang": Rival(("sglang.srt.layers.sampler",), "sglang", "pip install sglang==0.5.23", _ALL, sglang_forms),
}


def rival_entrants(name: str, batch: Workload, mode: str, heads: Sequence[LMHead] = ()) -> list[Entrant]:
    """The forms of one rival for this batch. heads: copies of the head, read in turns."""
    rival = RIVALS[name]
    if mode not in rival.modes:
        return []
    forms = rival.forms(rival.load(), Step.of(batch, mode, heads))
    return [Entrant(name, mode, form, call) for form, call in forms.items()]


def _probe_batch() -> Workload:
    weight = torch.randn(PROBE.vocab, PROBE.hidden, device=DEVICE).bfloat16()
    return Workload(LMHead(weight), PROBE_ROWS, "typical")


def tries(names: Sequence[str], modes: Sequence[str]) -> dict[str, Job]:
    """A job for each form of these rivals: whether it can be called, and captured. Nothing without CUDA."""
    if DEVICE.type != "cuda":
        return {}
    batch, jobs = _probe_batch(), dict[str, Job]()
    for name, mode in [(name, mode) for name in names for mode in modes]:
        with contextlib.suppress(Exception):  # it fails again where it is raced, and is recorded there
            jobs |= {one.name: (try_out, (name, mode, one.name)) for one in rival_entrants(name, batch, mode)}
    return jobs


def try_out(name: str, mode: str, entrant: str) -> str | None:
    """``verdict`` of one form."""
    tried = rival_entrants(name, _probe_batch(), mode)
    return verdict(entrant, next(one.call for one in tried if one.name == entrant))


def compile_rivals(shape: Shape, rows: int, names: Sequence[str], modes: Sequence[str]) -> list[str]:
    """Compile what these rivals compile for such a batch; returns what failed."""
    weight = torch.zeros(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
    batch, failed = Workload(LMHead(weight), rows, "typical"), []
    for name, mode in [(name, mode) for name in names for mode in modes]:
        try:
            for one in rival_entrants(name, batch, mode):
                one.call(0)
        except Exception as error:
            failed.append(f"{shape} B={rows} {name} {mode}: {reason_of(error)}")
    torch.cuda.synchronize()
    torch.compiler.reset()
    del batch, weight
    torch.cuda.empty_cache()
    return failed


class Ours:
    """Our paths for one head. heads: copies of it, read in turns. served: the path of its server."""

    def __init__(self, shape: Shape, weights: Sequence[torch.Tensor], rows: int) -> None:
        def trees(tuned: bool) -> list[Tree]:
            return [Tree(weight, shape.softcap, rows, tuned=tuned, folder=None) for weight in weights]

        builtin = trees(tuned=False)
        self.heads: list[LMHead] = [tree.head for tree in builtin]
        self._ways = {"ours-fused": (builtin, str(SamplingPath.FUSED)), "ours-picked": (builtin, PICKED)}
        self._ways["ours-screened"] = builtin, PICKED_WITH_SCREEN if self._decide(builtin) else PICKED
        resolved = resolve(self.heads[0])
        if resolved.table_file is not None:
            tuned = trees(tuned=True)
            screened = bool(resolved.dispatch.screened_rows(MAX_SCREENED_ROWS, measured=True))
            if not resolved.knows_screens:
                screened = self._decide(tuned)
            self._ways["ours-tuned"] = tuned, PICKED
            self._ways["ours-tuned-screened"] = tuned, PICKED_WITH_SCREEN if screened else PICKED
        self.served = list(self._ways)[-1]

    @staticmethod
    def _decide(trees: list[Tree]) -> bool:
        """Give ``trees`` the choices of a server whose tuned table, if it has one, knows no screen: True where its head
        has a screen. A dry run takes the screen wherever one can serve."""
        head = trees[0].head
        reason = unsupported_head(head) or (None if DRY_RUN else screen_race.unsupported_race(head))
        if reason is not None:
            print(f"no screen without a fresh table: {reason}", flush=True)
            return False
        if not DRY_RUN:
            table, (outcome,) = race_at_start(Parts.of(head, trees[0].screen), trees[0].table)
            decided = screen_race.decide(table, outcome)
            print(outcome.words(decided), flush=True)
            for tree in trees:  # the choices of batches without a screen stay
                tree.table = decided
        return True

    def entrants(self, batch: Workload, mode: str) -> tuple[list[Entrant], dict[str, str]]:
        """The entrants with different configurations, and {path: the earlier path that has its configuration}."""
        entered: dict[str, Entrant] = {}
        same: dict[str, str] = {}
        sampling = MODES[mode]
        for path, (trees, way) in self._ways.items():
            if way == PICKED_WITH_SCREEN and is_unscreened(batch, SAMPLINGS[sampling], way):
                way = PICKED
            copies = [tree.entrant(batch, sampling, way) for tree in trees]
            form = copies[0].form
            if form in entered:
                same[path] = entered[form].path
            else:
                entered[form] = Entrant(path, mode, form, _in_turns([one.call for one in copies]))
        return list(entered.values()), same

    def complete(self, rows: list[dict[str, Any]], same: dict[str, str]) -> list[dict[str, Any]]:
        """``rows`` of a race with those of the paths that were not raced twice; the server's is marked."""
        by_path = {row["path"]: row for row in rows}
        rows = rows + [
            by_path[first] | {"path": path, "same_as": first} for path, first in same.items() if first in by_path
        ]
        return [row | ({"picked": True} if row["path"] == self.served else {}) for row in rows]


def _in_turns(calls: Sequence[Call]) -> Call:
    return lambda step: calls[step % len(calls)](step)


class Law:
    """The tokens that a mode allows for the rows of a batch, by float64 logits of the head.

    least: ``[B]``, the smallest logit that a token may have. Logits that other samplers read are rounded to the dtype
    of the head: two that are equal to within that are a near-tie.
    """

    def __init__(self, batch: Workload, mode: str) -> None:
        batch.refresh(0)
        weight, hidden = batch.head.weight[: batch.vocab], batch.hidden.double()
        self.logits = torch.cat([hidden @ ids.double().T for ids in weight.split(IDS_AT_ONCE)], 1)
        self._mode = mode
        self._calls = min(MAX_CALLS, max(2, math.ceil(CHECKED_ROWS / batch.rows)))
        near = max(torch.finfo(weight.dtype).eps, 1e-5) * self.logits.abs().amax(1)
        top_k, top_p, min_p = SAMPLINGS[MODES[mode]].truncation or (0, 1.0, 0.0)
        top = self.logits.amax(1)
        least = full(batch, -torch.inf, torch.float64)
        if mode == "greedy":
            least = top
        if top_k:
            least = torch.maximum(least, self.logits.topk(top_k).values[:, -1])
        if top_p < 1.0:
            ordered = self.logits.sort(1, descending=True).values
            mass = torch.softmax(ordered, 1)
            inside = mass.cumsum(1) - mass < top_p + MASS_TOLERANCE
            least = torch.maximum(least, ordered.masked_fill(~inside, torch.inf).amin(1))
        if min_p:
            least = torch.maximum(least, top + math.log(min_p))
        self.least = least - near

    def fault(self, call: Call) -> str | None:
        """Why the tokens of ``call`` are no draws of this mode; None where nothing says so."""
        rows, vocab = self.logits.shape
        drawn = [call(step).flatten().long().clone() for step in range(self._calls)]
        if any(len(tokens) != rows for tokens in drawn):
            return f"wrong tokens: {len(drawn[0])} of {rows} rows"
        tokens = torch.stack(drawn, 1)  # [B, calls]
        known = (tokens >= 0) & (tokens < vocab)
        logits = self.logits.gather(1, tokens.clamp(0, vocab - 1))
        wrong = ~known | (logits < self.least[:, None])
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            first = f"first: row {row}, id {int(tokens[row, place])}"
            return f"wrong tokens: {int(wrong.sum())} of {tokens.numel()} are not allowed in this mode, {first}"
        if self._mode == "plain":
            logprobs = torch.log_softmax(self.logits, 1)
            probs = logprobs.exp()
            mean = (probs * logprobs).sum(1)
            variance = (probs * (logprobs - mean[:, None]).square()).sum(1)
            off = (logprobs.gather(1, tokens) - mean[:, None]).sum()
            deviations = float(off / (self._calls * variance.sum()).sqrt().clamp(min=1e-9))
            if abs(deviations) > MAX_DEVIATIONS:
                return f"wrong tokens: their mean log-probability is {deviations:+.0f} standard errors off"
        return None


def legal(entered: Sequence[Entrant], law: Law, unusual: dict[str, str], miss: Callable[..., None]) -> list[Entrant]:
    """The entrants whose tokens are right; the others are recorded as missing. unusual: of ``Session``. An entrant that
    cannot run is not called here: the race records it."""
    fine = []
    for one in entered:
        if unusual.get(one.name, EAGER) != EAGER:
            fine.append(one)
            continue
        try:
            fault: str | None = law.fault(one.call)
        except Exception as error:  # the others may do
            fault = reason_of(error)
        if fault is None:
            fine.append(one)
        else:
            miss(fault, path=one.name)
    return fine


def head_of(text: str) -> Shape:
    """ "4096x151936": hidden elements and ids. Raises ValueError."""
    if (sizes := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)) is None:
        raise ValueError(f"head is {text!r}; expected DxV, as 4096x151936")
    return Shape(int(sizes[1]), int(sizes[2]))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", nargs="+", metavar="DxV", help="hidden elements and ids, of any head")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, help="by default all; in a dry run torch")
    parser.add_argument("--rounds", type=int, help="1 in a dry run; by default 9")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which no further race begins")


def prepare(options: Any) -> None:
    options.heads = [head_of(text) for text in options.heads] if options.heads else list(HEADS)
    options.batches = options.batches or list(FAST_BATCHES if options.fast else BATCHES)
    options.rivals = options.rivals or (["torch"] if DRY_RUN else list(RIVALS))
    check_race(options, 9)


def measure(options: Any, result: Result) -> int:
    arguments = {"rounds": options.rounds, "rivals": options.rivals}
    if (before := result.before.get("arguments", arguments)) != arguments:
        sys.exit(f"error: {options.out} has arguments {before}; expected {arguments}")
    result.env |= {"arguments": arguments, "rivals": {}}
    # Gaps of no batch are determined again.
    result.env["not_run"] = [gap for gap in result.env["not_run"] if "B" in gap]
    ended = [*result.rows, *(gap for gap in result.env["not_run"] if gap["reason"] == DEVICE_LOST)]
    done = {(row["D"], row["V"], row["B"], row["mode"]) for row in ended}
    cells = [(shape, rows, mode) for shape in options.heads for rows in options.batches for mode in options.modes]
    cells = [cell for cell in cells if (cell[0].hidden, cell[0].vocab, *cell[1:]) not in done]
    if not cells:
        sys.exit(f"{options.out} holds every cell already")
    rivals = []
    for name in options.rivals:
        try:
            RIVALS[name].load()
        except Exception as error:  # an import may look for compilers, GPUs and other packages
            result.miss(error, path=name)
            continue
        rivals.append(name)
        result.env["rivals"][name] = RIVALS[name].version()
    session = _session(cells, rivals, result.env)
    for shape in dict.fromkeys(shape for shape, _, _ in cells):
        of_shape = [(rows, mode) for one, rows, mode in cells if one == shape]
        if session.seconds > options.limit:
            break
        weight = shape.weight()
        copies = [weight, *(weight.clone() for _ in range(copies_needed(weight) - 1))]
        try:
            ours = Ours(shape, copies, max(rows for rows, _ in of_shape))
        except Exception as error:  # the next head may do
            result.miss(error, head=str(shape))
            continue
        for rows, mode in of_shape:
            if session.seconds > options.limit:
                print(f"out of time before {shape} B={rows} {mode}: go on with --keep", flush=True)
                break
            _race(session, ours, rivals, shape.fields | {"B": rows, "mode": mode}, options.rounds, result)
        del ours, weight, copies
    print(f"{session.seconds:.0f} s in all", flush=True)
    return 0


def _session(cells: Sequence[tuple[Shape, int, str]], rivals: Sequence[str], env: dict[str, Any]) -> Session:
    shapes = list(dict.fromkeys(shape for shape, _, _ in cells))
    batches = sorted({rows for _, rows, _ in cells})
    modes = tuple(dict.fromkeys(mode for _, _, mode in cells))
    samplings = tuple(MODES[mode] for mode in modes)
    selection = Selection((str(SamplingPath.FUSED), PICKED, PICKED_WITH_SCREEN), samplings)
    if DEVICE.type != "cuda":
        return Session(shapes, batches, selection, env)
    compiling = [name for name in rivals if RIVALS[name].compiles]
    jobs: list[Job] = [(compile_rivals, (shape, rows, compiling, modes)) for shape in shapes for rows in batches]
    tuned = Selection((PICKED, PICKED_WITH_SCREEN), samplings, tuned=True)
    jobs += compiling_jobs([shape for shape in shapes if _has_table(shape)], batches, tuned)
    session = Session(shapes, batches, selection, env, jobs, tries(rivals, modes))
    # FlashSampling picked these while the GPU was shared; they are picked again, alone.
    for picked in Path(os.environ["TRITON_CACHE_DIR"]).rglob("fused_mm_sample*.autotune.json"):
        picked.unlink()
    return session


def _has_table(shape: Shape) -> bool:
    weight = torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
    return resolve(LMHead(weight)).table_file is not None


def _race(
    session: Session, ours: Ours, rivals: Sequence[str], cell: dict[str, Any], rounds: int, result: Result
) -> None:
    """Race one cell and add its rows."""
    batch, mode = Workload(ours.heads[0], cell["B"], "typical"), cell["mode"]
    same: dict[str, str] = {}

    def enter() -> list[Entrant]:
        gemm = Step.of(batch, mode, ours.heads).gemm
        entered, not_raced = ours.entrants(batch, mode)
        same.update(not_raced)
        for name in rivals:
            try:
                entered += rival_entrants(name, batch, mode, ours.heads)
            except Exception as error:  # the others may do
                result.miss(error, **cell, path=name)
        alone = Entrant(baselines.GEMM, mode, "torch.mm(out=)", gemm)
        return [alone, *legal(entered, Law(batch, mode), session.unusual, functools.partial(result.miss, **cell))]

    try:
        rows = session.race_entrants(enter, batch, rounds, cell, copies=len(ours.heads))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # the race records whatever else fails
        result.miss(DEVICE_LOST, **cell, path="all")
        result.write()
        sys.exit(f"error: {DEVICE_LOST} in {cell} ({reason_of(error)}); --keep goes on without this cell")
    result.add({name: value for name, value in row.items() if name != "sampling"} for row in ours.complete(rows, same))


PLACE = ("D", "V", "B", "mode", "path")
BENCHMARKS = {"rivals": Benchmark(__doc__, measure, add_options, prepare, place=PLACE)}
