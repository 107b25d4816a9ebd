"""Which code of the kernels a tuned table was measured with."""

from __future__ import annotations

import ast
import pathlib

import pytest

from sgl_flashsample import kernels, sources
from sgl_flashsample.sources import LAUNCHERS, device_code, imported_from, installed_sources

FILES = {
    "lm_head_sample": "from .noise import noise\nfrom . import tiles\n@triton.jit\ndef sample_kernel():\n    noise()\n",
    "sample_logits": "from .noise import noise\n@triton.jit(debug=True)\ndef read_kernel():\n    noise()\n",
    "noise": "LN_2 = 0.69\n@triton.jit\ndef noise():\n    LN_2\n",
    "tiles": "def launcher():\n    pass\n",
    "reference": "@triton.jit\ndef other():\n    pass\n",
}


@pytest.fixture
def hashes(tmp_path, monkeypatch):
    """The hashes of all paths, of a folder with these changes."""
    monkeypatch.setattr(sources, "kernels", type("Folder", (), {"__file__": str(tmp_path / "__init__.py")}))

    def of(**changes):
        for name, text in (FILES | changes).items():
            (tmp_path / f"{name}.py").write_text(text)
        return {path: sources.sources_hash.__wrapped__(path) for path in ("fused", "logits")}

    return of


def test_a_hash_is_of_each_paths_own_kernels_and_those_they_call(hashes):
    before = hashes()
    assert all(text.startswith("sha256:") and len(text) == 71 for text in before.values())
    own = hashes(lm_head_sample=FILES["lm_head_sample"].replace("noise()", "noise() + 1"))
    assert own["fused"] != before["fused"] and own["logits"] == before["logits"]
    shared = hashes(noise=FILES["noise"].replace("0.69", "0.7"))
    assert shared["fused"] != before["fused"] and shared["logits"] != before["logits"]


@pytest.mark.parametrize(
    "changes",
    [
        {"reference": "other"},
        {"tiles": "def launcher():\n    return 1\n"},
        {"tiles": "class Tile:\n    size = 1\n"},
        {"noise": FILES["noise"] + "PI = 3.14\n@triton.jit\ndef other():\n    PI\n"},
        {"noise": '"""Words."""\n' + FILES["noise"].replace("LN_2\n", "LN_2  # the logarithm\n\n")},
    ],
    ids=["a reference", "a launcher", "a class of the host", "what no kernel here uses", "comments"],
)
def test_what_the_device_does_not_run_leaves_a_hash_as_it_is(hashes, changes):
    assert hashes(**changes) == hashes()


def test_device_code_is_kernels_constants_and_enumerations_without_words():
    source = """\
\"\"\"What it is.

Why it is.
\"\"\"
import a  # for b

SIZE = 16  # one warp
OTHER = 17


class Unit(enum.IntEnum):
    \"\"\"What is counted.\"\"\"

    TOKEN = 0


@a.jit(
    debug=True,
)
def f_kernel(x):  # [B]
    # Why.
    \"\"\"What it does.\"\"\"
    text = "# no comment"

    \"\"\"a value, not a docstring\"\"\"
    return {"é": f"{x} # {text}", Unit.TOKEN: SIZE}  # é


def launch(x):
    f_kernel(x, OTHER)
"""
    assert device_code([source]).splitlines() == [
        "SIZE = 16",
        "class Unit(enum.IntEnum):",
        "    TOKEN = 0",
        "@a.jit(",
        "    debug=True,",
        ")",
        "def f_kernel(x):",
        '    text = "# no comment"',
        '    """a value, not a docstring"""',
        '    return {"é": f"{x} # {text}", Unit.TOKEN: SIZE}',
    ]


@pytest.mark.parametrize("path", LAUNCHERS)
def test_every_kernel_that_a_launcher_names_is_in_its_hash(path):
    folder = pathlib.Path(kernels.__file__).parent
    found = imported_from(folder, LAUNCHERS[path])
    assert {LAUNCHERS[path], "epilogue", "rng", "approx"} <= found and "reference" not in found
    code = device_code([(folder / f"{module}.py").read_text() for module in sorted(found)])
    ast.parse(code)
    for text in ("def score_groups(", "def philox4x32(", "GROUP_SIZE = 16", "_MASK = tl.constexpr(", "class Edit("):
        assert code.count(text) == 1
    assert "MOST_PARTS" not in code and "import" not in code  # of launchers
    assert set(installed_sources()) == set(LAUNCHERS)
