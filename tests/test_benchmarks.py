"""The benchmarks run here as far as a machine without a GPU lets them, so that they run at once where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import CUDA

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_the_feature_benchmark_runs_every_mode_and_its_tables_follow_from_its_file(tmp_path):
    import features
    import tables

    out = tmp_path / "features.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "features.py"), "--dry-run", "--out", str(out)]
    subprocess.run([*command, "--profiles", "typical", "--batches", "2"], check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert {row["mode"] for row in result["rows"] if row["path"] == "fused"} == set(features.MODES)
    assert not any(row["differ_from_reference"] for row in result["rounds"])
    assert set(tables.TRUNCATIONS) | set(tables.EDITS) == set(features.MODES)
    for table in (tables.truncation_table, tables.edits_table, tables.searched_table):
        lines = table(out).splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert table(tmp_path / "absent.json") == tables.NOT_MEASURED


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_the_reader_benchmark_times_the_gemm_the_fused_pass_and_readers_of_equal_tokens(tmp_path):
    out = tmp_path / "readers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "readers.py"), "--dry-run", "--out", str(out)]
    subprocess.run([*command, "--modes", "plain"], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["path"] for row in rows][:2] == ["gemm", "fused"]
    assert {row["path"] for row in rows[2:]} == {"logits"}
    assert sum(row["shipped"] for row in rows) == 1
    assert all(row["same_tokens"] for row in rows)


def test_the_tables_name_every_sampling_of_the_server_benchmark():
    import serve
    import tables

    assert set(tables.SAMPLING_NAMES) == set(serve.SAMPLING)
