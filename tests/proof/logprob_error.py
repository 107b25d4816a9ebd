"""The error of the logprob that a sampled token is returned with, ours and stock's, against float64.

    python tests/proof/logprob_error.py --out logprob-error.json

The head has bfloat16 weights. Its logits are bfloat16, as a model's own GEMM rounds them, or float32, as with
``--enable-fp32-lm-head``. The truth is the log-softmax of ``hidden @ weight.T / temperature`` in float64, of the whole
vocabulary: a truncation changes which token is drawn and not its logprob. Tokens are ours, drawn by each path; stock's
logprob of the same token is PyTorch's: a GEMM, a division by the temperature, a log-softmax in float32. Rows of the
file have, over all tokens,

mean, max       absolute difference from the truth
ratio_spread    standard deviation of exp(logprob - truth): of an importance ratio whose policies are equal
below           least logprob, so that ``max`` can be judged

of_stock        in rows of ours, the mean divided by stock's

The exit code is 1 where a logprob is above 0 or no number, or the mean error of ours is above stock's by more than a
tenth. No mean of float32 logits is below 1e-6, ours or stock's: the float32 sums of a GEMM err by more. With
``--dry-run`` kernels are interpreted: errors mean nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from programs import DEVICE, DRY_RUN, make_parser, new_env, write_result

from sgl_flashsample import BatchParams, Head, LMHead, Truncation
from sgl_flashsample.autotune.workload import Workload, make_weight

HIDDEN, VOCAB = (48, 300) if DRY_RUN else (4096, 151_936)
ROWS, BATCHES = (8, 1) if DRY_RUN else (64, 64)
TEMPERATURES = (0.3, 0.6, 1.0)
TRUNCATIONS = {"none": (0, 1.0), "top_k 50, top_p 0.9": (50, 0.9)}
DTYPES = {"bfloat16": None, "float32": torch.float32}  # of logits; None: that of the weight
MOST_OF_STOCK = 1.1


@dataclasses.dataclass
class Errors:
    """Of logprobs of one kind; ``add`` takes ``[B]`` float32 and the truth, ``[B]`` float64."""

    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    least: float = 0.0
    illegal: int = 0

    def add(self, logprobs: torch.Tensor, truth: torch.Tensor) -> None:
        self.parts.append(logprobs.double() - truth)
        self.least = min(self.least, float(truth.min()))
        self.illegal += int((~(logprobs <= 0)).sum())

    @property
    def row(self) -> dict[str, Any]:
        difference = torch.cat(self.parts)
        return {
            "tokens": len(difference),
            "mean": float(difference.abs().mean()),
            "max": float(difference.abs().max()),
            "ratio_spread": float(difference.exp().std()),
            "below": self.least,
            "illegal": self.illegal,
        }


def truncation(kind: str) -> Truncation | None:
    top_k, top_p = TRUNCATIONS[kind]
    if not top_k:
        return None
    of_each = torch.ones(ROWS, device=DEVICE)
    return Truncation((of_each * top_k).int(), of_each * top_p, of_each * 0.0)


def stock_logprobs(hidden: torch.Tensor, head: LMHead, temperature: float, token_ids: torch.Tensor) -> torch.Tensor:
    """``[B]`` float32, as stock SGLang computes them."""
    weight = head.weight
    if DEVICE.type == "cpu":
        logits = (hidden.float() @ weight.float().T).to(head.rounding)
    else:
        logits = torch.mm(hidden, weight.T, out_dtype=head.rounding)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(1, token_ids[:, None])[:, 0]


def measured(weight: torch.Tensor, dtype: str) -> Iterator[dict[str, Any]]:
    head = LMHead(weight, logits_dtype=DTYPES[dtype])
    drawer, workload = Head(head), Workload(head, ROWS)
    paths = ("fused", "logits") if head.gemm_gives_logits else ("fused",)
    for temperature in TEMPERATURES:
        for kind in TRUNCATIONS:
            errors = {path: (Errors(), Errors()) for path in paths}
            for batch in range(BATCHES):
                workload.refresh(batch)
                hidden, position = workload.hidden, workload.position[0]
                exact = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
                params = BatchParams(
                    torch.full((ROWS,), temperature, device=DEVICE), workload.seed, position, truncation(kind)
                )
                for path, (ours, stock) in errors.items():
                    drawn = drawer.draw(hidden, params, return_logprob=True, path=path)
                    truth = exact.gather(1, drawn.token_ids[:, None])[:, 0]
                    ours.add(drawn.logprobs, truth)
                    stock.add(stock_logprobs(hidden, head, temperature, drawn.token_ids), truth)
            cell = {"logits": dtype, "temperature": temperature, "truncation": kind, "D": HIDDEN, "V": VOCAB}
            for path, (ours, stock) in errors.items():
                mine, theirs = ours.row, stock.row
                of_stock = mine["mean"] / theirs["mean"] if theirs["mean"] else None
                yield cell | {"path": path, "sampler": "ours", "of_stock": of_stock} | mine
                yield cell | {"path": path, "sampler": "stock"} | theirs


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it must be, in words."""

    def cell(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("logits", "temperature", "truncation", "path"))

    stock = {cell(row): row for row in rows if row["sampler"] == "stock"}
    found = []
    for row in (row for row in rows if row["sampler"] == "ours"):
        if row["illegal"]:
            found.append(f"{cell(row)}: {row['illegal']} logprobs are above 0, or no number")
        most = MOST_OF_STOCK * stock[cell(row)]["mean"]
        if row["mean"] > most:
            found.append(f"{cell(row)}: the mean error is {row['mean']:.3g}; expected {most:.3g} at most")
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted on a CPU")
    options = parser.parse_args()
    result: dict[str, Any] = {"env": new_env(), "rows": []}
    weight = make_weight(VOCAB, HIDDEN, torch.float16 if DEVICE.type == "cpu" else torch.bfloat16, DEVICE)
    for dtype in DTYPES:
        for row in measured(weight, dtype):
            result["rows"].append(row)
            write_result(options.out, result)
            names = ("logits", "temperature", "truncation", "path", "sampler", "mean", "max")
            print(*(f"{name} {row[name]}" for name in names), flush=True)
    result["wrong"] = wrong(result["rows"])
    write_result(options.out, result)
    print(*result["wrong"], sep="\n")
    return 1 if result["wrong"] and not DRY_RUN else 0


if __name__ == "__main__":
    raise SystemExit(main())
