"""Every sampling feature and every pair of them, ours against stock SGLang and the definition, over HTTP.

What is compared, and how, is in tests/proof/parity.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import CUDA, needs_sglang

PROOF = Path(__file__).resolve().parents[1] / "proof"


@pytest.mark.full
@pytest.mark.server
@needs_sglang
@pytest.mark.skipif(CUDA, reason="compares with the closed form in float32: runs on the CPU")
def test_each_feature_and_each_pair_is_stocks_and_the_definitions(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PROOF))
    import parity

    measured = parity.measure(tmp_path)
    assert not measured.problems, "\n".join(measured.problems)
    assert measured.matrix.keys() == {cell.names for cell in parity.CELLS}
