"""Where the tests run: on a CUDA device, or, without one, with the kernels in Triton's interpreter."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

# Workers of pytest-xdist share the cores: in each, PyTorch would start a thread per core.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))  # before `import torch`

import torch

gc.disable()  # until all is imported: to look for garbage among it, again and again, is a fifth of the time

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first `import triton`
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles its repetition penalty

if importlib.util.find_spec("sgl_flashsample") is None:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

if torch.version.cuda is None:  # so that SGLang can be imported here
    import lab.torchvision_schemas  # noqa: F401

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNPATCHED = os.environ.get("UNPATCHED_INTERPRETER") == "1"  # Triton's own interpreter, as it is
if INTERPRETED and not UNPATCHED:
    from lab import interpreter, interpreter_bf16

    interpreter_bf16.patch()
    interpreter.patch()


# Files whose tests share what takes long to make (servers, ranks, checkpoints, kernels that are compiled):
# each file runs on one worker of pytest-xdist, but for the tests marked `alone`. Longest first.
TOGETHER = ["test_server.py", "test_parity.py", "test_compile.py", "test_exchange.py", "test_cpu_path.py"]
TOGETHER += ["test_compile_ahead.py", "test_quantised_server.py", "test_trained.py", "test_ranks.py", "test_package.py"]
TOGETHER += ["test_benchmarks_tuning.py", "test_table_fuzz.py", "test_flashinfer_path.py"]
MINUTES = {"test_unpatched.py", "test_warm.py"}  # files with tests that take as long as those that start servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: exhaustive (all combinations, releases, targets); runs only with --full")
    config.addinivalue_line("markers", "alone: shares nothing that takes long with its file; runs on any worker")
    config.addinivalue_line("markers", "slow: takes seconds; `make test-fast` leaves it out")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """``pytest -n 8`` alone keeps groups together, and starts tests in the order below."""
    if hasattr(config, "workerinput"):
        config.option.loadgroup = True  # a group is known by its mark in the names of its tests
    elif getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist, config.option.loadscopereorder = "loadgroup", False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(TOGETHER)}
    on_gpu = torch.cuda.is_available()

    def order(item: pytest.Item) -> tuple[int, int]:
        """Files of ``TOGETHER`` come first, then other tests that take minutes, so that short ones fill the end.

        Compiling takes most of the time on a GPU: what is made for it or slow compiles most. Tests of one file need
        the same kernels, and each worker would compile them: neighbours are of different files."""
        first = place.get(item.path.name)
        if first is not None:
            return first, 0
        takes_minutes = "server" in item.keywords or item.path.name in MINUTES
        compiles = on_gpu and ("gpu" in item.keywords or "slow" in item.keywords)
        mixed = crc32(item.nodeid.encode()) if on_gpu else 0
        return len(place) + (0 if takes_minutes else 1 if compiles else 2), mixed

    items.sort(key=order)
    for item in items:
        if item.path.name in place and "alone" not in item.keywords:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        if on_gpu and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)  # `pytest -m gpu` runs every test that uses the device
        if not on_gpu and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "full" in item.keywords and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="exhaustive: runs with --full"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported modules stay, so their objects are frozen. pytest-xdist marks groups in the names of their tests:
    without the marks each worker would start every server."""
    gc.freeze()
    gc.enable()
    grouped = session.items if session.config.getoption("loadgroup", False) else []
    for item in grouped:
        if item.get_closest_marker("xdist_group") is not None:
            assert "@" in item.nodeid, "pytest-xdist does not group the tests of one file with this release of pytest"


def why_skipped(reports: Iterable[Any]) -> str:
    """One line: how many tests were skipped for each reason, the most frequent first. reports: of skipped tests."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    return "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped := terminalreporter.stats.get("skipped"):
        terminalreporter.write_line(f"skipped: {why_skipped(skipped)}")


@pytest.fixture
def caplog(caplog):
    """Log records of this package alone. Others warn once per process, in whichever test comes first."""

    def ours(record) -> bool:
        return record.name == "sgl_flashsample"

    caplog.handler.addFilter(ours)
    yield caplog
    caplog.handler.removeFilter(ours)


@pytest.fixture(autouse=True)
def no_half_of_sglang():
    """Removes the modules of a pretended SGLang after the test: submodules whose package is gone break later
    imports."""
    yield
    if "sglang" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("sglang.")]:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def no_memory_of_the_device_is_kept():
    """Several processes may share a GPU."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
