from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sgl_flashsample import defaults, flashinfer_path, paths
from sgl_flashsample.kernels.reference import allowed_ref


@pytest.fixture
def builtin_files(tmp_path, monkeypatch) -> Callable[..., None]:
    """Edits a copy of the built-in choices: ``edit(file name, line -> line)``. Until the test ends, the copy
    is read."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for file in defaults.SHIPPED.glob("builtin-*.json"):
        shutil.copy(file, folder)
    cached = (defaults.builtin_table, defaults.defaults_digest, defaults.default_config, defaults.default_config_on)

    def forget() -> None:
        for function in cached:
            function.cache_clear()

    def edit(name: str, change: Callable[[str], str]) -> None:
        file = Path(folder / name)
        file.write_text("\n".join(map(change, file.read_text().splitlines())))
        forget()

    monkeypatch.setattr(defaults, "SHIPPED", folder)
    forget()
    yield edit
    forget()


@pytest.fixture
def launched(monkeypatch) -> list:
    """The configurations that batches are launched with, from now on."""
    seen: list = []
    launch = paths.launch

    def noted(config, *arguments, **keywords):
        seen.append(config)
        return launch(config, *arguments, **keywords)

    monkeypatch.setattr(paths, "launch", noted)
    return seen


class FlashInfer(types.ModuleType):
    """``flashinfer.sampling`` as documented, computed row by row: one seed and offset for all rows. calls: the
    arguments of each call. breaks: an exception to raise instead. draw: a function from the arguments to the tokens."""

    def __init__(self) -> None:
        super().__init__("flashinfer.sampling")
        self.calls: list[types.SimpleNamespace] = []
        self.breaks: Exception | None = None
        self.draw = self.multinomial

    def top_k_top_p_sampling_from_probs(
        self, probs, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, **noise
    ):
        if self.breaks is not None:
            raise self.breaks
        for tensor in (noise["seed"], noise["offset"]):
            assert tensor.dtype is torch.int64 and tensor.shape == (1,) and tensor.device == probs.device
        assert filter_apply_order == "joint" and deterministic and indices is None
        assert probs.dtype is torch.float32 and probs.is_contiguous() and top_k.dtype is torch.int32
        numbers = {name: int(tensor) for name, tensor in noise.items()}
        self.calls.append(types.SimpleNamespace(probs=probs, top_k=top_k, top_p=top_p, **numbers))
        return self.draw(self.calls[-1])

    @staticmethod
    def multinomial(call: types.SimpleNamespace) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((call.seed, call.offset)) % 2**63)
        ones, zeros = torch.ones_like(call.top_p), torch.zeros_like(call.top_p)
        left = call.probs.double() * allowed_ref(call.probs.double().log(), ones, call.top_k, call.top_p, zeros)
        return torch.multinomial(left.cpu(), 1, generator=generator)[:, 0].int().to(call.probs.device)


@pytest.fixture
def without_flashinfer(monkeypatch):
    """A process that has not looked for FlashInfer yet, on a machine without it."""
    monkeypatch.setattr(flashinfer_path, "_given_up", [])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)
    flashinfer_path._module.cache_clear()
    yield
    flashinfer_path._module.cache_clear()


@pytest.fixture
def flashinfer(without_flashinfer, monkeypatch) -> FlashInfer:
    """A stand-in for FlashInfer."""
    package, module = types.ModuleType("flashinfer"), FlashInfer()
    package.sampling = module
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    return module
