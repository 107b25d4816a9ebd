"""Which code of the kernels a tuned table was measured with: a path's device code, and nothing else."""

from __future__ import annotations

import ast
import pathlib
import shutil
import types

import pytest

from sgl_flashsample import kernels
from sgl_flashsample.tables import fingerprint
from sgl_flashsample.tables.fingerprint import LAUNCHERS, installed_fingerprints, kernel_fingerprint

EVERY = set(map(str, LAUNCHERS))
# A folder of kernels: the modules of three launchers, modules that they import, and one that none imports.
SMALL = {
    "lm_head_sample": "from .noise import noise\nfrom . import config\n@triton.jit\ndef fused():\n    noise()\n",
    "sample_logits": "from .noise import noise\n@triton.jit(debug=True)\ndef read():\n    noise()\n",
    "screened_sample": "from .screen import screen\ndef launch():\n    screen()\n",
    "screen": "from .noise import noise\nSLACK = 2.0**-15\n@triton.jit\ndef screen():\n    SLACK\n",
    "noise": 'LN_2 = 0.69\nclass Stream(enum.IntEnum):\n    """Words."""\n    SAMPLE = 0\n'
    "class Operands(NamedTuple):\n    seed: Any\n@triton.jit\ndef noise():\n    LN_2\n",
    "config": "def launcher():\n    pass\n@dataclass\nclass Tile:\n    size: int\n",
    "reference": "@triton.jit\ndef other():\n    pass\n",
}


@pytest.fixture
def changed_paths(tmp_path, monkeypatch):
    """The paths whose fingerprint changes with a change to a folder: ``of(folder, module, old text, new text)``."""

    def hashes(folder: pathlib.Path) -> dict[str, str]:
        monkeypatch.setattr(fingerprint, "kernels", types.SimpleNamespace(__file__=str(folder / "__init__.py")))
        kernel_fingerprint.cache_clear()
        return installed_fingerprints()

    def of(folder: pathlib.Path, module: str, old: str, new: str) -> set[str]:
        before, file = hashes(folder), folder / f"{module}.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        after = hashes(folder)
        return {path for path in after if after[path] != before[path]}

    yield of
    kernel_fingerprint.cache_clear()


@pytest.fixture
def small(tmp_path):
    for name, text in SMALL.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "module, old, new, wanted",
    [
        ("lm_head_sample", "noise()", "noise() + 1", {"fused"}),
        ("sample_logits", "debug=True", "debug=False", {"logits"}),
        ("screen", "-15", "-14", {"screened"}),
        ("noise", "0.69", "0.7", EVERY),
        ("noise", "SAMPLE = 0", "SAMPLE = 1", EVERY),
        ("noise", "seed: Any", "position: Any\n    seed: Any", EVERY),
        ("noise", "def noise():", "def noise(x=1):", EVERY),
        ("reference", "pass", "return 1", set()),
        ("config", "pass", "return 1", set()),  # a launcher
        ("config", "size: int", "size: int = 1", set()),  # a class of the host
        ("noise", "LN_2 = 0.69", '"""A docstring."""\n\nLN_2 = (0.69)  # the logarithm\n\n', set()),
        ("noise", '"""Words."""', '"""Other words."""', set()),
        ("screen", "def screen():\n", 'def screen():\n    """What it does."""\n    # Why.\n', set()),
    ],
)
def test_a_change_of_device_code_is_one_of_the_paths_that_import_it_and_of_no_other(
    changed_paths, small, module, old, new, wanted
):
    assert changed_paths(small, module, old, new) == wanted


@pytest.mark.slow
def test_the_installed_kernels_fingerprints_are_of_their_device_code_alone(changed_paths, tmp_path):
    installed = pathlib.Path(kernels.__file__).parent
    fingerprints = installed_fingerprints()
    assert set(fingerprints) == EVERY and len(set(fingerprints.values())) == len(EVERY)
    assert all(text.startswith("sha256:") and len(text) == 71 for text in fingerprints.values())
    shutil.copytree(installed, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "kernels").glob("*.py"):  # without comments, in the layout of Python's own printer
        file.write_text(ast.unparse(ast.parse(file.read_text())))
    assert changed_paths(tmp_path / "kernels", "config", "GROUP_SIZE = 16", "GROUP_SIZE = 32") == EVERY
    assert changed_paths(tmp_path / "kernels", "config", "GROUP_SIZE = 32", "GROUP_SIZE = 16") == EVERY
    assert installed_fingerprints() == fingerprints
    assert changed_paths(tmp_path / "kernels", "int8_head", "ACCUMULATION = 1.5", "ACCUMULATION = 2.5") == {"screened"}
