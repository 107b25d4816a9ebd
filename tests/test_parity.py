"""Every sampling feature and every pair of them, ours against stock SGLang and the definition, over HTTP.

What is compared, and how, is in benchmarks/parity.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from serving import CUDA, needs_sglang

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

pytestmark = [needs_sglang, pytest.mark.server]


def test_the_table_shows_every_pair_once():
    import parity

    words = {cell.names: f"{' '.join(cell.names)}." for cell in parity.CELLS}
    table = parity.table(words)
    assert all(table.count(f"| {word} |") == 1 for word in words.values())
    readme = "a\n<!-- parity-table -->\nold\n<!-- end -->\nb"
    assert parity.filled(readme, words) == f"a\n<!-- parity-table -->\n{table}\n<!-- end -->\nb"


@pytest.mark.skipif(CUDA, reason="compares with the closed form in float32: runs on the CPU")
def test_each_feature_and_each_pair_is_stocks_and_the_readme_says_so(tmp_path):
    import parity

    found = parity.measure(tmp_path)
    assert not found.problems, "\n".join(found.problems)
    readme = (ROOT / "README.md").read_text()
    assert parity.filled(readme, found.matrix) == readme, "run `python benchmarks/parity.py --write`"
