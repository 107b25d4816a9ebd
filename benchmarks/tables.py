"""The README's result tables, from the committed result files.

python benchmarks/tables.py            prints them
python benchmarks/tables.py --write    puts them between their markers in README.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SAMPLING_NAMES = {
    "t1": "temperature 1",
    "trunc": "temperature 0.7, top_p 0.9, top_k 50 (SGLang's sampler)",
    "greedy": "greedy",
}


def serve_table(path: Path = RESULTS / "h200-serve.json") -> str:
    """Time per output token, stock and ours, per model, sampling and batch."""
    rows = json.loads(path.read_text())["rows"]
    batches = sorted({row["batch"] for row in rows})
    cell = {(row["model"], row["sampling"], row["batch"], row["backend"]): row["tpot_us"] for row in rows}
    lines = ["| model, sampling | " + " | ".join(f"B={batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for model in dict.fromkeys(row["model"] for row in rows):
        for sampling, name in SAMPLING_NAMES.items():
            values = []
            for batch in batches:
                stock, ours = (cell[model, sampling, batch, backend] for backend in ("stock", "flashsample"))
                values.append(f"{stock:.0f} → {ours:.0f} ({ours / stock:.3f})")
            lines.append(f"| {model}, {name} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def kernel_table(path: Path = RESULTS / "h200-tiles.json") -> str:
    """The whole last step in microseconds with the shipped tile, beside the read floor, the GEMM and stock."""
    import torch

    from sgl_flashsample.tuned import TABLE

    rows = json.loads(path.read_text())["rows"]
    entries = TABLE["sm90", torch.bfloat16.itemsize]
    lines = ["| D, B | reading the head once | cuBLAS GEMM alone | GEMM + SGLang's sampling | fused | fused / floor |"]
    lines.append("|---|---|---|---|---|---|")
    for hidden, batch in dict.fromkeys((row["D"], row["B"]) for row in rows):
        shipped = next((tile for limit, tile in entries if batch <= limit), entries[-1][1])
        for row in rows:
            if (row["D"], row["B"]) == (hidden, batch) and row["config"] == vars(shipped):
                lines.append(
                    f"| {hidden}, {batch} | {row['read_us']:.1f} | {row['gemm_us']:.1f} | {row['stock_us']:.1f} | "
                    f"{row['us']:.1f} | {row['us'] / row['read_us']:.3f} |"
                )
    return "\n".join(lines)


def profile_table(path: Path = RESULTS / "h200-step-profile.json") -> str:
    """Calls of one decode step at batch 32, stock and ours."""
    lines = ["| per decode step, B=32, temperature 1 | stock | ours |", "|---|---|---|"]
    names = {
        "launches": "kernel launches and copies beside the CUDA graph",
        "synchronising": "synchronising calls",
        "driver_allocating": "allocations from the driver",
        "new_tensors": "tensors from PyTorch's allocator",
        "gpu_busy_us": "GPU busy, us",
    }
    for model, samplings in json.loads(path.read_text())["calls_per_step"].items():
        stock, ours = (samplings["t1"][backend] for backend in ("stock", "flashsample"))
        lines += [f"| {model}: {name} | {stock[key]:g} | {ours[key]:g} |" for key, name in names.items()]
    return "\n".join(lines)


TABLES = {"serve": serve_table, "kernel": kernel_table, "profile": profile_table}


def filled(readme: str) -> str:
    """``readme`` with each table between its markers."""
    for name, table in TABLES.items():
        marked = f"<!-- {name}-table -->\n{table()}\n<!-- end -->"
        readme, found = re.subn(rf"<!-- {name}-table -->.*?<!-- end -->", lambda _, m=marked: m, readme, flags=re.S)
        if found != 1:
            raise ValueError(f"README.md has {found} places for the {name} table; expected one")
    return readme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update README.md")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    if options.write:
        readme.write_text(filled(readme.read_text()))
    else:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main()
