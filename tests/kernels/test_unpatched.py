"""The contract of every path under Triton's own interpreter, as it is: our short cuts of it are not what is proven."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import CUDA, UNPATCHED
from triton.runtime import interpreter

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "tests/kernels/test_contract.py"
# Every fast test, and the reference's token with each kind of features; those of whole vocabularies take hours.
RUNS = (
    [CONTRACT, f"{__file__}::test_the_interpreter_is_tritons_own", "-m", "not slow and not full"],
    [f"{CONTRACT}::test_tokens_and_logprobs_equal_the_reference", "-m", "slow"],
)


@pytest.mark.full
@pytest.mark.skipif(CUDA, reason="kernels are compiled")
@pytest.mark.parametrize("chosen", RUNS, ids=["fast", "truncated"])
def test_the_contract_holds_under_tritons_own_interpreter(chosen):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["UNPATCHED_INTERPRETER"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr


@pytest.mark.skipif(not UNPATCHED, reason="runs within the test above")
def test_the_interpreter_is_tritons_own():
    for function in (interpreter._patch_lang, interpreter._get_np_dtype, interpreter.InterpreterBuilder.create_dot):
        assert function.__module__ == "triton.runtime.interpreter"
