"""Whether a row's logits depend, to the last bit, on the batch around it or on the tile that computes them.

    python tests/proof/order.py --out order.json

A bfloat16 head with float32 logits shows its accumulators. One row of hidden states is multiplied alone and at the
first, a middle and the last place of batches of 1 to 512 rows, beside random, huge and NaN neighbours, with every tile
of the fused pass that is a built-in choice or that a search tries first. Each row of the file has a tile and

batches      how often the row was computed
unequal      of these, how often its logits were not those that it has alone with this tile: must be 0
order        a number that tiles share whose logits are equal bit for bit
mass_order   a number that tiles share whose log-masses of that row are equal bit for bit
instructions tensor-core instructions of the compiled kernel, without their shapes
rounded      logits that differ, once rounded to bfloat16, from those of the first tile
masses       log-masses of plain batches that are not those that the row has alone with this tile

Rows of other GEMMs have no tile: PyTorch's, SGLang's for deterministic inference where SGLang is installed, and one
that adds two halves of the hidden states, which must have another order, or nothing is proven. One more row,
"batch-invariant", is of the head that takes one tile for all batches (``LMHead(batch_invariant=True)``): neither its
logits nor its masses may depend on the batch. A tile that cannot run on the device is in ``env.not_run``. The exit code
is 1 where something is not as it must be. With ``--dry-run`` kernels are interpreted: NumPy adds, so orders mean
nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from programs import DEVICE, DRY_RUN, make_parser, new_env, reason_of, write_result

from sgl_flashsample import BatchParams, Head, LMHead, Truncation, invariant
from sgl_flashsample.autotune.space import TILE_CLASSES, Limits, Space
from sgl_flashsample.defaults import builtin_table, family_of_device
from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.kernels.launch import compiling_only
from sgl_flashsample.kinds import SamplingPath
from sgl_flashsample.paths import Parts, launch

# (D, V). The second D is no multiple of a step of the hidden states.
SHAPES = [(48, 128)] if DRY_RUN else [(4096, 32_768), (2880, 16_384)]
SIZES = [1, 3] if DRY_RUN else [1, 2, 7, 16, 17, 31, 33, 64, 65, 100, 128, 129, 255, 256, 400, 512]
NEIGHBOURS: dict[str, float] = {"random": 1.0, "huge": 1e30, "NaN": float("nan")}
TENSOR_CORES = re.compile(r"(wgmma\.mma_async|mma\.sync)\S*?\.m\d+n\d+(k\d+\S*)")


def tiles(hidden: int) -> list[TileConfig]:
    """One of each code that the fused pass may compile to."""
    if DEVICE.type == "cpu":
        return [TileConfig(64, 128, 32, 4, 1, tma=False, rows_first=first) for first in (False, True)]
    family = family_of_device(DEVICE)
    found = [entry.configuration for entry in builtin_table(family, 2).entries]
    capability = torch.cuda.get_device_properties(DEVICE)
    limits = Limits(hidden, 2, capability.shared_memory_per_block_optin, capability.major >= 9, 72)
    for block_b in TILE_CLASSES:
        found += Space(limits, SamplingPath.FUSED, block_b, truncate=True, edit=False).first()
    whole = [dataclasses.replace(one, one_launch=False) for one in found if isinstance(one, TileConfig)]
    return list({tile.compiled: tile for tile in whole}.values())


def params(num_rows: int, truncated: bool) -> BatchParams:
    """The same seed and position in every row. Truncated rows leave their logits in the workspace."""
    same = torch.full((num_rows,), 7, device=DEVICE)
    ones = torch.ones(num_rows, device=DEVICE)
    limits = Truncation(same.int(), ones, torch.zeros_like(ones)) if truncated else None
    return BatchParams(ones, same, same, limits)


def batches(row: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Batches with the row somewhere among others, and its place."""
    for size in SIZES:
        for name, scale in NEIGHBOURS.items():
            others = torch.randn(size, row.shape[0], device=DEVICE)
            others = others.sign() * scale if name == "huge" else others * scale
            for place in sorted({0, size // 2, size - 1}):
                hidden = others.to(row.dtype)
                hidden[place] = row
                yield hidden, place


class Fused:
    """The fused pass with one tile."""

    def __init__(self, head: LMHead, tile: TileConfig) -> None:
        self.head, self.tile = head, tile
        self.parts = Parts(head).with_scratch([tile], max(SIZES))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, V]`` float32, valid until the next call."""
        batch = params(len(hidden), truncated=True)
        launch(self.tile, hidden, batch, self.parts)
        assert self.parts.workspace is not None and self.parts.workspace.last_buffer is not None
        return self.parts.workspace.last_buffer.logits[: len(hidden), : self.head.vocab_size]

    def mass(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, 2]`` float32."""
        batch = params(len(hidden), truncated=False)
        drawn = launch(self.tile, hidden, batch, self.parts, return_logprob=True)
        assert drawn.log_mass is not None
        return drawn.log_mass

    def instructions(self, hidden: torch.Tensor) -> list[str]:
        if DEVICE.type == "cpu":
            return []
        with compiling_only() as binaries:
            self.logits(hidden)
        return sorted({"".join(found) for binary in binaries for found in TENSOR_CORES.findall(binary.asm["ptx"])})


class Invariant(Fused):
    """The same with the one tile of a batch-invariant head."""

    def __init__(self, weight: torch.Tensor) -> None:
        head = LMHead(weight, logits_dtype=torch.float32, batch_invariant=True)
        super().__init__(head, invariant.tile_of(head))
        self.drawer = Head(head, max_rows=max(SIZES))

    def mass(self, hidden: torch.Tensor) -> torch.Tensor:
        drawn = self.drawer.draw(hidden, params(len(hidden), truncated=False), return_logprob=True)
        assert drawn.log_mass is not None
        return drawn.log_mass


def measured(fused: Fused, row: torch.Tensor, known_masses: list[torch.Tensor]) -> dict[str, Any]:
    """The counts of a tile; alone: the row's logits."""
    alone, mass = fused.logits(row[None])[0].clone(), fused.mass(row[None])[0].clone()
    logits = [same_bits(fused.logits(hidden)[place], alone) for hidden, place in batches(row)]
    masses = [same_bits(fused.mass(hidden)[place], mass) for hidden, place in batches(row)]
    return {
        "batches": len(logits),
        "unequal": logits.count(False),
        "masses": masses.count(False),
        "mass_order": place_among(known_masses, mass),
        "instructions": fused.instructions(row[None]),
        "alone": alone,
    }


def place_among(known: list[torch.Tensor], values: torch.Tensor) -> int:
    """The place of the same values in ``known``; they are added where they are new."""
    place = next((place for place, other in enumerate(known) if same_bits(values, other)), len(known))
    if place == len(known):
        known.append(values.clone())
    return place


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def other_gemms(head: LMHead) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """``[B, D]`` -> ``[B, V]`` float32."""
    weight = head.weight

    def multiply(hidden: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if DEVICE.type == "cpu":
            return hidden.float() @ part.float().T
        return torch.mm(hidden, part.T, out_dtype=torch.float32)

    def halves(hidden: torch.Tensor) -> torch.Tensor:
        middle = weight.shape[1] // 2
        return multiply(hidden[:, :middle], weight[:, :middle]) + multiply(hidden[:, middle:], weight[:, middle:])

    def deterministic(hidden: torch.Tensor) -> torch.Tensor:
        from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_persistent

        return matmul_persistent(hidden, weight.T).float()  # bfloat16: only its rounded logits can be compared

    gemms = {"torch.mm": lambda hidden: multiply(hidden, weight), "two halves": halves}
    return gemms if DRY_RUN else gemms | {"SGLang, deterministic": deterministic}


def rows_of(hidden_size: int, vocab: int, not_run: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(hidden_size)
    weight = (torch.randn(vocab, hidden_size, device=DEVICE) * 0.02).bfloat16()
    head = LMHead(weight, logits_dtype=torch.float32)
    row = torch.randn(hidden_size, device=DEVICE).bfloat16()
    known: list[torch.Tensor] = []
    known_masses: list[torch.Tensor] = []

    def order_of(logits: torch.Tensor) -> dict[str, int]:
        return {
            "order": place_among(known, logits),
            "rounded": int((logits.bfloat16() != known[0].bfloat16()).sum()),
        }

    cell = {"D": hidden_size, "V": vocab}
    for tile in tiles(hidden_size):
        words = {"tile": dataclasses.asdict(tile)}
        try:
            counts = measured(Fused(head, tile), row, known_masses)
        except Exception as error:  # a search tries tiles that need more shared memory than the device has
            not_run.append({"D": str(hidden_size), "tile": str(tile), "reason": reason_of(error)})
            continue
        alone = counts.pop("alone")
        yield cell | words | counts | order_of(alone)
    counts = measured(Invariant(weight), row, known_masses)
    alone = counts.pop("alone")
    yield cell | {"gemm": "batch-invariant"} | counts | order_of(alone)
    for name, gemm in other_gemms(head).items():
        try:
            alone = gemm(row[None])[0].clone()
            logits = [same_bits(gemm(hidden)[place], alone) for hidden, place in batches(row)]
        except Exception as error:
            not_run.append({"gemm": name, "reason": reason_of(error)})
            continue
        yield cell | {"gemm": name, "batches": len(logits), "unequal": logits.count(False)} | order_of(alone)


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it must be, in words."""
    tiles, others = [row for row in rows if "tile" in row], [row for row in rows if row.get("gemm") == "two halves"]
    found = [
        f"D {row['D']}: {row['unequal']} batches change logits of {row['tile']}" for row in tiles if row["unequal"]
    ]
    found += [
        f"D {row['D']}: {row['unequal']} batches change logits, {row['masses']} masses of a batch-invariant head"
        for row in rows
        if row.get("gemm") == "batch-invariant" and (row["unequal"] or row["masses"])
    ]
    orders = {(row["D"], row["order"]) for row in tiles}
    found += [
        f"D {row['D']}: two halves have the order of a tile" for row in others if (row["D"], row["order"]) in orders
    ]
    without = sorted({row["D"] for row in tiles} - {row["D"] for row in others})
    return found + [f"D {hidden}: two halves were not computed" for hidden in without]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted on a CPU")
    options = parser.parse_args()
    result: dict[str, Any] = {"env": new_env() | {"not_run": []}, "rows": []}
    for hidden, vocab in SHAPES:
        for row in rows_of(hidden, vocab, result["env"]["not_run"]):
            result["rows"].append(row)
            write_result(options.out, result)
            words = row.get("gemm") or " ".join(f"{name}={value}" for name, value in row["tile"].items())
            print(f"D {hidden} order {row['order']} unequal {row['unequal']} of {row['batches']}: {words}", flush=True)
    result["wrong"] = wrong(result["rows"])
    write_result(options.out, result)
    print(*result["wrong"], sep="\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
