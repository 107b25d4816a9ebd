"""Where the tests run: on a CUDA device, or, without one, with the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first `import triton`
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles its repetition penalty

try:
    import sgl_flashsample.kernels
except ImportError:
    # A bare checkout, not installed: the mapping that pyproject.toml makes for an install.
    sys.path.insert(0, str(ROOT))
    import sgl_flashsample

    sgl_flashsample.__path__.append(str(ROOT))

if torch.version.cuda is None:  # so that SGLang can be imported here, as in the servers of the tests
    from sgl_flashsample.demo import cpu_platform

    torchvision = sys.modules["flashsample_torchvision"] = types.ModuleType("flashsample_torchvision")
    exec(cpu_platform.TORCHVISION_SCHEMAS, vars(torchvision))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreter_bf16

    from sgl_flashsample.demo import interpreter

    interpreter_bf16.patch()
    interpreter.patch()


# Files whose tests share what takes long to make: one worker of pytest-xdist runs such a file. Longest first.
TOGETHER = ["test_server.py", "test_parity.py", "test_compile.py", "test_package.py", "test_warmup.py"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("::")[0].rpartition("/")[2]
            return name if name in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(TOGETHER)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if torch.cuda.is_available():
        for item in items:  # `pytest -m gpu` runs every test that uses the device, where the device is a GPU
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_half_of_sglang():
    """What a test with a pretended SGLang has imported in its place goes with it: parts without their package cannot be
    imported from."""
    yield
    if "sglang" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("sglang.")]:
            del sys.modules[name]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
