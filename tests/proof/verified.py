"""Drafts that are verified: the law of each token, and that it is the token of a step without drafts.

    python tests/proof/verified.py --out tests/proof/results/verified.json

A language of 64 tokens whose next token depends on the last one alone. ``verify`` takes drafts in the shape of a chain,
a tree, or a tree of each row's own, as n-grams give: random ones of another distribution, those of a draft model with
the noise of the target's tokens (coupled), and those of the target itself. The tokens that rows gain are counted by the
token before them.

p_value      of the G-tests of what follows each token, whose statistics are added
tv           the total variation between the counted and the true transitions; tv_chance: what chance alone gives
accepted_z   first drafts that are accepted, less what the two distributions say, in standard deviations; None where all
             must be accepted
different    tokens that a step without drafts would not have drawn: each is drawn again, alone with its context, in a
             shuffled batch
noticed_law  whether the p-value rejects the same counts against a temperature that is 1 % higher; they must
noticed_tokens  tokens that differ when they are drawn with the noise of the position before; some must

Ends with 1 if a p-value is below 1e-5, an acceptance off by more than 5 deviations, a token different, or a planted
error unnoticed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from programs import DEVICE, DRY_RUN, in_processes, make_parser, new_env, write_result
from scipy.stats import chi2
from stats import coupled_acceptance, g_test
from tqdm import tqdm

from sgl_flashsample import BatchParams, LMHead, Truncation, sample
from sgl_flashsample.api import DraftTree, verify
from sgl_flashsample.kernels.reference import allowed_ref

VOCAB, NODES = 64, 8
ROWS = 16 if DRY_RUN else 32_768
TREE = [-1, 0, 0, 0, 1, 1, 2, 4]  # the parent of each node
TOP_K, TOP_P = 20, 0.9
LEAST_P, MOST_DEVIATIONS = 1e-5, 5.0
# Shape, drafts, temperature, whether tokens are truncated
Case = tuple[str, str, float, bool]


def cases() -> Iterator[Case]:
    temperatures = (1.0,) if DRY_RUN else (0.7, 1.0, 1.3)
    for shape in ("chain", "tree", "tree per row"):
        for temperature in temperatures:
            yield shape, "random", temperature, False
        if not DRY_RUN or shape == "tree":  # a truncation takes minutes in the interpreter
            yield shape, "random", 1.0, True
    for drafts in ("coupled", "the target's"):
        for temperature in temperatures:
            yield "chain", drafts, temperature, False


class Language:
    """A head whose logits after a token are a row of ``logits`` (``[64, 64]`` float32): its hidden state is one-hot."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits.to(DEVICE)
        self.head = LMHead(self.logits.T.contiguous())

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, VOCAB).float()

    def distribution(self, temperature: float, truncated: bool = False) -> torch.Tensor:
        """``[64, 64]`` float64, on the CPU."""
        logits = self.logits.double().cpu()
        if truncated:
            columns = torch.full((VOCAB,), temperature), torch.full((VOCAB,), TOP_K), torch.full((VOCAB,), TOP_P)
            allowed = allowed_ref(logits, *columns, torch.zeros(VOCAB))
            logits = torch.where(allowed, logits, -math.inf)
        return torch.softmax(logits / temperature, -1)


def make_languages() -> tuple[Language, Language]:
    """The target, and a draft model that errs."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    return Language(logits), Language(logits + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator))


def make_parents(shape: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, NODES]`` int64, on the CPU: the parent of each node, which comes before it."""
    if shape == "chain":
        return torch.arange(-1, NODES - 1).expand(rows, NODES)
    if shape == "tree":
        return torch.tensor(TREE).expand(rows, NODES)
    share = torch.rand(rows, NODES, generator=generator)
    return (share * torch.arange(NODES)).long().where(torch.arange(NODES) > 0, torch.tensor(-1))


def tree_of(parents: torch.Tensor) -> DraftTree:
    """One tree where all rows have the same, else one per row."""
    distinct, which = parents.unique(dim=0, return_inverse=True)
    if len(distinct) == 1:
        return DraftTree.from_parents(distinct[0].tolist(), DEVICE)
    trees = [DraftTree.from_parents(row, "cpu") for row in distinct.tolist()]
    return DraftTree(*(torch.stack(column)[which].to(DEVICE) for column in zip(*trees, strict=True)))


class Batches:
    """Rows of one case, as often as they are asked for, with seeds and drafts of their own."""

    def __init__(self, case: Case, target: Language, drafter: Language, rows: int) -> None:
        self.shape, self.drafts, self.temperature, self.truncated = case
        self.target, self.drafter, self.rows = target, target if self.drafts == "the target's" else drafter, rows
        self._generator = torch.Generator().manual_seed(7)
        self.device_generator = torch.Generator(DEVICE).manual_seed(8)
        parents = make_parents(self.shape, rows, self._generator)
        self.tree, self._parents = tree_of(parents), parents.to(DEVICE)
        self._q = self.drafter.distribution(self.temperature).float().to(DEVICE)
        self._next_seed = 0

    def params(self, seed: torch.Tensor, position: torch.Tensor) -> BatchParams:
        rows = len(seed)
        temperature, truncation = torch.full((rows,), self.temperature, device=DEVICE), None
        if self.truncated:
            top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=DEVICE)
            truncation = Truncation(top_k, torch.full((rows,), TOP_P, device=DEVICE), torch.zeros(rows, device=DEVICE))
        return BatchParams(temperature, seed, position, truncation)

    def new(self) -> tuple[torch.Tensor, BatchParams]:
        """Tokens of the nodes, ``[rows, NODES]`` int64, and the parameters of the rows."""
        seed = torch.arange(self._next_seed, self._next_seed + self.rows, device=DEVICE)
        self._next_seed += self.rows
        params = self.params(seed, torch.full_like(seed, 100))
        tokens = torch.randint(VOCAB, (self.rows, NODES), generator=self.device_generator, device=DEVICE)
        for node in range(1, NODES):
            before = tokens.gather(1, self._parents[:, node : node + 1])[:, 0]
            if self.drafts == "random":
                drawn = torch.multinomial(self._q[before], 1, generator=self.device_generator)[:, 0]
            else:
                at = self.params(seed, params.position + node - 1)  # of a chain
                drawn = sample(self.drafter.hidden(before), self.drafter.head, at).token_ids
            tokens[:, node] = drawn
        return tokens, params

    def expected_accepted(self, tokens: torch.Tensor, p: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """``[rows]`` float64: how likely each row accepts a draft at its root. both: by token, of coupled drafts."""
        if self.drafts != "random":
            return both[tokens[:, 0]]
        of_root = torch.zeros(self.rows, VOCAB, dtype=torch.bool, device=DEVICE)
        row = torch.arange(self.rows, device=DEVICE)
        for node in range(1, NODES):
            of_root[row, tokens[:, node]] |= self._parents[:, node] == 0
        return (p[tokens[:, 0]] * of_root).sum(1)


def count(case: Case, positions: float, shows_progress: bool) -> dict[str, Any]:
    """One row of the result."""
    target, drafter = make_languages()
    batches = Batches(case, target, drafter, ROWS)
    shape, drafts, temperature, truncated = case
    p = target.distribution(temperature, truncated)
    q = batches.drafter.distribution(temperature)
    both = torch.tensor([coupled_acceptance(one, other) for one, other in zip(p, q, strict=True)], dtype=p.dtype)
    p_on_device, both = p.to(DEVICE), both.to(DEVICE)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64, device=DEVICE)
    earlier = total = 0
    # On the device, so that a batch does not wait for the counts of the one before
    accepted, different = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    expected, variance = (torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(2))
    bar = tqdm(
        total=positions, desc=", ".join(map(str, case)), unit="token", unit_scale=True, disable=not shows_progress
    )
    while total < positions:
        tokens, params = batches.new()
        verified = verify(target.hidden(tokens), target.head, tokens, params, batches.tree)
        rows, places = (verified.nodes >= 0).nonzero(as_tuple=True)
        nodes = verified.nodes[rows, places].long() % NODES
        before, gained = tokens[rows, nodes], verified.token_ids[rows, places]
        counts.view(-1).index_add_(0, before * VOCAB + gained, torch.ones_like(gained))
        shuffled = torch.randperm(len(rows), generator=batches.device_generator, device=DEVICE)
        alone = batches.params(params.seed[rows][shuffled], (params.position[rows] + places)[shuffled])
        hidden = target.hidden(before[shuffled])
        different += (sample(hidden, target.head, alone).token_ids != gained[shuffled]).sum()
        if not total:
            moved = batches.params(alone.seed, alone.position - 1)
            earlier = int((sample(hidden, target.head, moved).token_ids != gained[shuffled]).sum())
        chance = batches.expected_accepted(tokens, p_on_device, both)
        accepted += (verified.num_tokens > 1).sum()
        expected += chance.sum()
        variance += (chance * (1 - chance)).sum()
        total += len(rows)
        bar.update(len(rows))
    bar.close()
    observed = counts.cpu().numpy()
    row = {"shape": shape, "drafts": drafts, "temperature": temperature, "truncated": truncated, "positions": total}
    row |= {"p_value": p_value(observed, p.numpy()), **distance(observed, p.numpy())}
    if variance > 1e-6:
        row["accepted_z"] = round(float((accepted - expected) / variance**0.5), 2)
    else:
        row |= {"accepted_z": None, "rejected": round(float(expected)) - int(accepted)}
    hotter = target.distribution(1.01 * temperature, truncated).numpy()
    noticed = {"noticed_law": p_value(observed, hotter) < LEAST_P, "noticed_tokens": earlier}
    return row | {"different": int(different)} | noticed


def p_value(observed: np.ndarray, p: np.ndarray) -> float:
    tests = [g_test(counts, truth) for counts, truth in zip(observed, p, strict=True) if counts.sum()]
    return float(chi2.sf(sum(test.statistic for test in tests), sum(test.dof for test in tests)))


def distance(observed: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """The total variation between transitions, and its mean where chance alone makes it."""
    total, each = observed.sum(), observed.sum(1, keepdims=True)
    chance = np.sqrt(2 / np.pi * each * p * (1 - p))
    return {
        "tv": round(float(np.abs(observed - each * p).sum() / total / 2), 6),
        "tv_chance": round(float(chance.sum() / total / 2), 6),
    }


def is_wrong(row: dict[str, Any], planted: bool) -> bool:
    """planted: whether there are enough tokens to notice what is planted."""
    off = row["rejected"] != 0 if row["accepted_z"] is None else abs(row["accepted_z"]) > MOST_DEVIATIONS
    unnoticed = not row["noticed_tokens"] or (planted and not row["noticed_law"])
    return row["p_value"] < LEAST_P or off or row["different"] > 0 or unnoticed


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--dry-run", action="store_true", help="few positions, interpreted")
    parser.add_argument("--positions", type=float, default=40 if DRY_RUN else 1e7, help="of each case")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time; they share all GPUs")
    options = parser.parse_args()
    result: dict[str, Any] = {"env": new_env(), "rows": []}
    counted = ((case, options.positions, options.processes == 1) for case in cases())
    for row in in_processes(count, counted, options.processes):
        result["rows"].append(row)
        print(result["rows"][-1], flush=True)
        write_result(options.out, result)
    return int(any(is_wrong(row, options.positions >= 1e7) for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
