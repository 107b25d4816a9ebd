"""Each sampling feature and each pair of them, ours against stock SGLang and against the definition, over HTTP.

    python tests/proof/parity.py --out tests/proof/results/parity.json

On this machine's CPU, with two servers of a generated checkpoint whose next-token distribution is known
(``sgl_flashsample/tools/markov.py``). What a request draws, given what it has drawn before, has a distribution in
closed form: logits, penalties, grammar, bias, temperature, truncation.

exact    greedy answers are stock's, token for token, and their logprobs within 1e-3
law      of other answers, ours and stock's, no token is outside the allowed set, G-tests of the tokens against the
         closed form pass, of each cell, of all with a feature and of all together, and a temperature off by a fifth
         would be noticed; every logprob is within 1e-3 of it; a seeded answer of ours is that of the float64 reference
         (``kernels/reference.py``) for the same noise, and the same again beside requests with every other feature
refused  both servers refuse it with the same words

``--speculation``: our server verifies the drafts of a smaller model (STANDALONE), with interpreted kernels. Stock's has
none, as it cannot verify on a CPU. From the second token on, the definition is then that of SGLang's verification:
without min-p, and with the top-p of what top-k has left. Left out is what depends on the whole step there (penalties,
min_new_tokens), and what SGLang would have to verify.

Without overlap scheduling, but for drafts: with it, SGLang counts a token for the penalties one step late, or not, as
requests arrive. Takes three minutes on two cores, with ``--speculation`` half an hour. The exit code is 1, and nothing
is written, where something is not as it must be.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from programs import make_parser, new_env, write_result
from lab.servers import server_on_this_machine
from scipy import stats

from sgl_flashsample.kernels.reference import allowed_ref, edit_logits_ref, truncated_sample_ref
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import Server, ServerError, stop_all

JSON_TEXTS = [f'"{word}"' for word in ("aaaa", "abab", "baba", "bbbb")]
REGEX = "[a-d]{8}"
MIN_NEW_TOKENS = 3
TOP_LOGPROBS = 3
BIAS = {"500": 4.0, "501": 2.5, "600": -100.0}
# {name: (sampling parameters, other fields of the request)}. Where a text stands for an id, ``Truth`` knows it.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "temperature": ({"temperature": 0.7}, {}),
    "top_k": ({"top_k": 8}, {}),
    "top_p": ({"top_p": 0.8}, {}),
    "min_p": ({"min_p": 0.1}, {}),
    "frequency": ({"frequency_penalty": 0.8}, {}),
    "presence": ({"presence_penalty": 0.6}, {}),
    "repetition": ({"repetition_penalty": 1.3}, {}),
    "min_new_tokens": ({"min_new_tokens": MIN_NEW_TOKENS}, {}),
    "logit_bias": ({"logit_bias": BIAS}, {}),
    "json": ({"json_schema": json.dumps({"enum": [text.strip('"') for text in JSON_TEXTS]})}, {}),
    "regex": ({"regex": REGEX}, {}),
    "logprob": ({}, {"return_logprob": True}),
    "top_logprobs": ({}, {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS}),
    "token_ids_logprobs": ({}, {"return_logprob": True, "token_ids_logprob": [500, 501]}),
    "seed": ({}, {}),  # another one for each row
}
TRUNCATIONS = {"top_k", "top_p", "min_p"}
UNVERIFIED = {"frequency", "presence", "repetition", "min_new_tokens"}
MANY_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 129}  # served by SGLang's sampler
GREEDY_TOKENS, TOKENS = 10, 3
ROWS = 48  # requests per cell
NODES, DRAFT_ERROR = 4, 0.6
NO_MIN_P = 1e-30
EOS = 1
BINS, ALPHA = 16, 1e-6
PLANTED, PLANTED_TEMPERATURE = "temperature times 1.2", 1.2
SIZE = "tiny"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One feature, or two together."""

    names: tuple[str, ...]

    @property
    def greedy(self) -> bool:
        return "greedy" in self.names

    def params(self, truth: Truth) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 1.0}
        for name in self.names:
            params |= FEATURES[name][0]
        if {"greedy", "temperature"} == set(self.names):
            params = {"temperature": 0.7, "top_k": 1}  # SGLang's other way to ask for it
        if "min_new_tokens" in self.names:
            params["stop_token_ids"] = truth.stop_ids
        return params | {"max_new_tokens": GREEDY_TOKENS if self.greedy else TOKENS, "ignore_eos": True}

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in self.names:
            fields |= FEATURES[name][1]
        return fields


CELLS = [Cell((name,)) for name in FEATURES] + [Cell(pair) for pair in itertools.combinations(FEATURES, 2)]
VERIFIED_CELLS = [cell for cell in CELLS if not UNVERIFIED & set(cell.names)]


class Truth:
    """The distribution of every request in closed form. verified: that of SGLang's verification of drafts."""

    def __init__(self, model: markov.MarkovModel, folder: Path, verified: bool = False) -> None:
        self.model, self.vocab, self.verified = model, model.size.vocab_size, verified
        self.ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.letters = {i: name for name, i in self.ids.items() if len(name) == 1}
        # The likeliest tokens of the contexts: min_new_tokens matters where it forbids them.
        likeliest = model.logits(torch.arange(300, 400)).argmax(-1).unique().tolist()
        self.stop_ids = [token for token in likeliest if token not in self.letters]

    def edited(self, cell: Cell, previous: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """``[N, V]`` float64 logits of ``[N]`` requests that have answered ``history`` (``[N, T]``)."""
        rows, step = history.shape
        counts = torch.zeros(rows, self.vocab).scatter_add_(1, history, torch.ones(rows, step))
        params = cell.params(self)
        additive = -params.get("frequency_penalty", 0.0) * counts
        additive -= params.get("presence_penalty", 0.0) * (counts > 0)
        if step < params.get("min_new_tokens", 0):
            additive[:, [EOS, *self.stop_ids]] = -math.inf
        scaling = torch.where(counts > 0, params.get("repetition_penalty", 1.0), 1.0)
        bias = torch.zeros(rows, self.vocab)
        for token, value in params.get("logit_bias", {}).items():
            bias[:, int(token)] = value
        allowed = torch.ones(rows, self.vocab, dtype=torch.bool)
        if "regex" in cell.names or "json" in cell.names:
            allowed[:] = False
            for row, tokens in enumerate(history.tolist()):
                allowed[row, self._next_ids(cell, tokens)] = True
        logits = self.model.logits(previous).float()
        edits = {"additive": additive, "scaling": scaling, "allowed": allowed, "bias": bias}
        return edit_logits_ref(logits, **edits).double()

    def limits(self, cell: Cell, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """top_k, top_p and min_p of each row."""
        params = cell.params(self)
        names = (("top_k", 0, torch.int32), ("top_p", 1.0, torch.float64), ("min_p", 0.0, torch.float64))
        top_k, top_p, min_p = (torch.full((rows,), params.get(n, default), dtype=d) for n, default, d in names)
        if self.verified and step > 0:  # the first token is the prefill's
            # Any min-p makes top-p look at what top-k has left; so small a one forbids nothing.
            min_p = torch.full_like(min_p, NO_MIN_P if {"top_k", "top_p"} <= set(cell.names) else 0.0)
        return top_k, top_p, min_p

    def _next_ids(self, cell: Cell, tokens: list[int]) -> list[int]:
        """The ids that the grammar allows after these tokens, none of which ends it: letters."""
        if "regex" in cell.names:
            return [self.ids[letter] for letter in "abcd"]
        text = "".join(self.letters.get(token, "?") for token in tokens)
        return [self.ids[whole[len(text)]] for whole in JSON_TEXTS if whole.startswith(text)]


@dataclasses.dataclass
class Draws:
    """Answers to the requests of one cell. prompts: the token before each answer; tokens: ``[N, T]``."""

    prompts: torch.Tensor
    tokens: torch.Tensor
    seeds: list[int | None]
    answers: list[dict]


class Parity:
    """problems: what was not as it must be, in words. matrix: {names: word}. truth: of our server."""

    def __init__(self, ours: Server, stock: Server, truth: Truth, stock_truth: Truth) -> None:
        self.ours, self.stock, self.truth, self.stock_truth = ours, stock, truth, stock_truth
        self.problems: list[str] = []
        self.matrix: dict[tuple[str, ...], str] = {}
        self.verifications = self.answered = 0  # tokens of ours
        self.pooled: dict[tuple[str, str], list[np.ndarray]] = {}  # of stock and ours, with a feature: uniform numbers
        self.seeded: list[tuple[Cell, dict[str, Any], int, list[int]]] = []  # cell, parameters, prompt, answer
        self.random = np.random.default_rng(0)

    def run(self, cells: list[Cell]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # small tensors, and the servers need the cores
        try:
            self._run(cells)
        finally:
            torch.set_num_threads(threads)

    def _run(self, cells: list[Cell]) -> None:
        for number, cell in enumerate(cells):
            if cell.greedy:
                word = self._greedy(cell)
            elif {"json", "regex"} <= set(cell.names):
                word = self._refused(cell)
            else:
                word = self._drawn(cell, number)
            self.matrix[cell.names] = word
        self._laws()
        self._together()

    def _check(self, holds: bool, cell: Cell, what: str) -> None:
        if not holds:
            self.problems.append(f"{' + '.join(cell.names)}: {what}")

    def _greedy(self, cell: Cell) -> str:
        prompts = [[5, 300 + i, 340 + i] for i in range(3)]
        request = {"input_ids": prompts, "sampling_params": cell.params(self.truth), **cell.fields}
        mine, theirs = (server.generate(**request) for server in (self.ours, self.stock))
        self._paths(cell, mine)
        for answer, stock_answer in zip(mine, theirs, strict=True):
            tokens, stock_tokens = answer["output_ids"], stock_answer["output_ids"]
            if self.truth.verified and tokens[-1] == EOS:  # SGLang ends such an answer with its grammar
                stock_tokens = stock_tokens[: len(tokens)]
            self._check(tokens == stock_tokens, cell, f"tokens {tokens}, stock's are {stock_tokens}")
            for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
                got, want = (flat_logprobs(one["meta_info"].get(key)) for one in (answer, stock_answer))
                close = len(got) == len(want) and all(map(is_close, got, want))
                self._check(close, cell, f"other {key} than stock's")
        return "exact"

    def _refused(self, cell: Cell) -> str:
        said = []
        for server in (self.ours, self.stock):
            try:
                server.generate(input_ids=[300], sampling_params=cell.params(self.truth), **cell.fields)
                said.append("answered")
            except ServerError as error:
                said.append(str(error))
        self._check(said[0] == said[1] != "answered", cell, f"ours and stock said {said}")
        return "refused"

    def _drawn(self, cell: Cell, number: int) -> str:
        # A request without a seed among those with one, unless it is the seed that is looked at.
        seeds: list[int | None] = [number * 1000 + i for i in range(ROWS)]
        if "seed" not in cell.names:
            seeds[-1] = None
        mine = self._ask(self.ours, cell, seeds, 300 + 7 * number % 97)
        self._paths(cell, mine.answers)
        self._law(cell, mine, self.truth, "ours")
        self._reference(cell, mine)
        self._law(cell, self._ask(self.stock, cell, [None] * ROWS, 300), self.stock_truth, "stock")
        return "law"

    def _ask(self, server: Server, cell: Cell, seeds: list[int | None], first: int) -> Draws:
        prompts = [first + i for i in range(len(seeds))]
        params = cell.params(self.truth)
        answers = server.generate(
            input_ids=[[5, prompt] for prompt in prompts],
            sampling_params=[params if seed is None else params | {"sampling_seed": seed} for seed in seeds],
            **cell.fields,
        )
        lengths = {len(answer["output_ids"]) for answer in answers}
        if lengths != {TOKENS}:
            raise RuntimeError(f"{' + '.join(cell.names)}: answers of {lengths} tokens; expected {TOKENS}")
        tokens = torch.tensor([answer["output_ids"] for answer in answers])
        return Draws(torch.tensor(prompts), tokens, seeds, answers)

    def _paths(self, cell: Cell, answers: list[dict]) -> None:
        # With drafts SGLang has one value per step, and none is reported.
        paths = {path for answer in answers for path in answer["meta_info"].get("flashsample_path", ())}
        for answer in answers:
            self.verifications += answer["meta_info"].get("spec_verify_ct") or 0
            self.answered += len(answer["output_ids"])
        served = set() if self.truth.verified else {"fused"}
        self._check(paths == served, cell, f"served by {paths}; expected {served}")

    def _law(self, cell: Cell, draws: Draws, truth: Truth, who: str) -> None:
        """Allowed set, distribution and logprobs of the drawn tokens."""
        params, uniform, planted = cell.params(truth), [], []
        for step in range(TOKENS):
            previous = draws.prompts if step == 0 else draws.tokens[:, step - 1]
            token = draws.tokens[:, step]
            logits = truth.edited(cell, previous, draws.tokens[:, :step])
            temperature = torch.full((len(token),), params["temperature"])
            loose = allowed = logits > -math.inf
            if TRUNCATIONS & set(cell.names):
                limits = truth.limits(cell, step, len(token))
                loose = allowed_ref(logits, temperature, *limits, slack=1e-5)
                allowed = allowed_ref(logits, temperature, *limits)
            inside = loose.gather(1, token[:, None]).all()
            self._check(bool(inside), cell, f"{who}: a token that is not allowed, at step {step}")
            tempered = logits / params["temperature"]
            shares = torch.softmax(tempered.masked_fill(~allowed, -math.inf), -1)
            uniform.append(self._uniform(shares, token))
            wrong = torch.softmax((tempered / PLANTED_TEMPERATURE).masked_fill(~allowed, -math.inf), -1)
            planted.append(self._uniform(wrong, token))
            self._logprobs(cell, draws, step, torch.log_softmax(tempered, -1), who)
        self._check(is_uniform(np.concatenate(uniform)), cell, f"{who}: not the distribution")
        for name in ("all", *cell.names):
            self.pooled.setdefault((who, name), []).extend(uniform)
        self.pooled.setdefault((who, PLANTED), []).extend(planted)

    def _laws(self) -> None:
        """Tests over all cells with a feature together, and over all cells: one cell notices gross errors alone. The
        same tokens must not pass for those of another temperature."""
        for (who, name), values in self.pooled.items():
            if is_uniform(np.concatenate(values)) == (name == PLANTED):
                self.problems.append(f"{who}, {name}: {'not noticed' if name == PLANTED else 'not the distribution'}")

    def _uniform(self, shares: torch.Tensor, token: torch.Tensor) -> np.ndarray:
        """A uniform number per draw, if it was drawn from ``shares``: where it lies among the tokens in the order of
        their shares, at random within its own."""
        share = shares.gather(1, token[:, None])
        ids = torch.arange(shares.shape[1])
        before = (shares > share) | ((shares == share) & (ids < token[:, None]))
        start = (shares * before).sum(1)
        return (start + share.squeeze(1) * torch.from_numpy(self.random.random(len(token)))).numpy()

    def _logprobs(self, cell: Cell, draws: Draws, step: int, want: torch.Tensor, who: str) -> None:
        for row, answer in enumerate(draws.answers):
            info, token = answer["meta_info"], int(draws.tokens[row, step])
            expected: list[tuple[list, list[float]]] = []  # SGLang's entries, and what their logprobs must be
            if "return_logprob" in cell.fields:
                expected.append(([info["output_token_logprobs"][step]], [float(want[row, token])]))
            if "top_logprobs" in cell.names:
                expected.append((info["output_top_logprobs"][step], want[row].topk(TOP_LOGPROBS).values.tolist()))
            if "token_ids_logprobs" in cell.names:
                ids = FEATURES["token_ids_logprobs"][1]["token_ids_logprob"]
                expected.append((info["output_token_ids_logprobs"][step], want[row, ids].tolist()))
            for entries, values in expected:
                close = all(is_close(entry[0], value) for entry, value in zip(entries, values, strict=True))
                self._check(close, cell, f"{who}: logprobs {entries} for {values}")

    def _reference(self, cell: Cell, draws: Draws) -> None:
        """Seeded answers are those of the reference that draws with the same noise."""
        rows = [row for row, seed in enumerate(draws.seeds) if seed is not None]
        params, seeds = cell.params(self.truth), torch.tensor([draws.seeds[row] for row in rows])
        for step in range(TOKENS):
            previous = (draws.prompts if step == 0 else draws.tokens[:, step - 1])[rows]
            logits = self.truth.edited(cell, previous, draws.tokens[rows, :step])
            want = truncated_sample_ref(
                logits,
                torch.full((len(rows),), params["temperature"]),
                seeds,
                torch.full((len(rows),), 1 + step),  # a position is that of the token before, in a prompt of two
                *self.truth.limits(cell, step, len(rows)),
                tolerance=1e-5,
            )
            same = (draws.tokens[rows, step] == want.token) | want.near_tie
            self._check(
                bool(same.all()), cell, f"not the reference's tokens at step {step} in {int((~same).sum())} rows"
            )
        seeded = params | {"sampling_seed": draws.seeds[rows[0]]}
        self.seeded.append((cell, seeded, int(draws.prompts[rows[0]]), draws.tokens[rows[0]].tolist()))

    def _together(self) -> None:
        """One seeded request of every cell, all in one batch, beside greedy ones and one of SGLang's sampler."""
        others: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"temperature": 0, "max_new_tokens": TOKENS}, {}) for _ in range(4)
        ]
        if not self.truth.verified:
            others += [({"temperature": 1.0, "max_new_tokens": TOKENS}, MANY_LOGPROBS)]
        requests = [(params, cell.fields) for cell, params, _, _ in self.seeded] + others
        answers = self.ours.generate(
            input_ids=[[5, prompt] for _, _, prompt, _ in self.seeded] + [[5, 300]] * len(others),
            sampling_params=[params for params, _ in requests],
            return_logprob=[fields.get("return_logprob", False) for _, fields in requests],
            top_logprobs_num=[fields.get("top_logprobs_num", 0) for _, fields in requests],
        )
        for (cell, _, _, tokens), answer in zip(self.seeded, answers, strict=False):
            self._check(answer["output_ids"] == tokens, cell, "another answer in a mixed batch")
            self._paths(cell, [answer])


def is_uniform(values: np.ndarray) -> bool:
    """True if a G-test finds nothing against numbers that should be uniform from 0 to 1."""
    counts = np.bincount(np.minimum((values * BINS).astype(int), BINS - 1), minlength=BINS)
    return bool(stats.power_divergence(counts, lambda_="log-likelihood").pvalue > ALPHA)


def flat_logprobs(entries: list | None) -> list[float | None]:
    """The numbers in SGLang's lists of (logprob, id, text), however deep."""
    if not entries:
        return []
    if not isinstance(entries[0], list):
        return [entries[0]]
    return [value for entry in entries for value in flat_logprobs(entry)]


def is_close(got: float | None, want: float | None) -> bool:
    """Within 1e-3. A token that cannot be drawn has no logprob, a very small one or minus infinity."""
    never = [value is None or value < -1e30 for value in (got, want)]
    return never[0] == never[1] if any(never) else math.isclose(got, want, abs_tol=1e-3)  # type: ignore[arg-type]


def make_server(folder: Path, name: str, backend: str, speculates: bool = False) -> Server:
    """Not started yet; of the checkpoint in ``folder``."""
    arguments = ["--dtype", markov.SIZES[SIZE].dtype, "--random-seed", "1234"]
    variables = {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_LOG_SECONDS": "0"}
    if speculates:
        arguments += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(folder / "draft")]
        arguments += ["--speculative-num-draft-tokens", str(NODES), "--speculative-num-steps", str(NODES - 1)]
        arguments += ["--speculative-eagle-topk", "1", "--attention-backend", "triton", "--disable-cuda-graph"]
        variables["TRITON_INTERPRET"] = "1"
    else:
        arguments += ["--disable-overlap-schedule"]
    log = folder / f"{name}.log"
    return server_on_this_machine(folder / SIZE, arguments, backend=backend, log=log, environment=variables)


def measure(folder: Path, cells: list[Cell] | None = None, speculates: bool = False) -> Parity:
    """Start both servers in ``folder``, ask for ``cells``, all when None, and stop them."""
    size = markov.SIZES[SIZE]
    model = markov.write(folder / SIZE, size)
    if speculates:
        markov.write(folder / "draft", size, error=DRAFT_ERROR)
    ours, stock = make_server(folder, "ours", "flashsample", speculates), make_server(folder, "stock", "pytorch")
    try:
        for server in (ours, stock):
            server.start()
        for server in (ours, stock):
            server.wait_until_ready()
        truths = (Truth(model, folder / SIZE, verified) for verified in (speculates, False))
        parity = Parity(ours, stock, *truths)
        parity.run((VERIFIED_CELLS if speculates else CELLS) if cells is None else cells)
        if "Traceback" in ours.log_text():
            parity.problems.append(f"our server logged: {ours.last_error()}")
        if speculates and parity.verifications >= 0.9 * parity.answered:
            parity.problems.append(f"{parity.verifications} verifications gave {parity.answered} tokens")
        return parity
    finally:
        stop_all((ours, stock))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--features", nargs="+", choices=FEATURES, help="only these, and their pairs")
    parser.add_argument("--speculation", action="store_true", help="our server verifies drafts")
    options = parser.parse_args()
    if torch.cuda.is_available():
        parser.error("this compares with the closed form in float32, on a machine without a GPU")
    wanted = set(options.features or FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        cells = VERIFIED_CELLS if options.speculation else CELLS
        chosen = [cell for cell in cells if wanted.issuperset(cell.names)]
        parity = measure(Path(folder), chosen, options.speculation)
    for problem in parity.problems:
        print(problem, file=sys.stderr)
    rows = [{"features": list(names), "result": word} for names, word in parity.matrix.items()]
    if not parity.problems:
        env = new_env() | {"sglang": importlib.metadata.version("sglang")}
        if options.speculation:
            env |= {"verifications": parity.verifications, "tokens": parity.answered}
        write_result(options.out, {"env": env, "rows": rows})
    print(f"{len(rows)} features and pairs, {len(parity.problems)} problems")
    return 1 if parity.problems else 0


if __name__ == "__main__":
    sys.exit(main())
