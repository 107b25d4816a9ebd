"""Machine code of a configuration as a hash: the same for two compilations, another one for another computation."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sgl_flashsample import LMHead
from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.kinds import PLAIN
from sgl_flashsample.paths import Parts
from sgl_flashsample.tables.fingerprint import machine_code

pytestmark = pytest.mark.slow

# Prints the machine code of one-row launches of small configurations on a GPU that is pretended. In each module that
# the launches use, the texts of the first argument are replaced before it is imported.
SCRIPT = """
import importlib.abc, importlib.util, json, sys
from pathlib import Path

edits, asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
import sgl_flashsample
folder = Path(importlib.util.find_spec("sgl_flashsample.kernels").origin).parent

class Edited(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        place = name.removeprefix("sgl_flashsample.kernels.")
        if place not in edits:
            return None
        text = (folder / f"{place}.py").read_text()
        for old, new in edits[place]:
            assert old in text, old
            text = text.replace(old, new)
        copy = Path(sys.argv[3]) / f"{place}.py"
        copy.write_text(text)
        return importlib.util.spec_from_file_location(name, copy)

sys.meta_path.insert(0, Edited())
import torch
from sgl_flashsample.kernels.launch import Gpu, pretend_gpu
pretend_gpu(Gpu((9, 0), 132))
from sgl_flashsample import LMHead
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kinds import KIND_NAMES
from sgl_flashsample.paths import Parts
from sgl_flashsample.screen import UnwrittenScreen
from sgl_flashsample.tables.fingerprint import machine_code

head = LMHead(torch.zeros(400, 64, dtype=torch.bfloat16))
configs = {
    "read": ReadConfig(16, 64, 4),
    "fused": TileConfig(16, 64, 32, 4, 2),
    "deeper": TileConfig(16, 64, 32, 4, 3),
    "screened": ScreenConfig(16, 64, 32, 4, 2),
}
codes = {}
for name, kind, rows in asked:
    parts = Parts.of(head, UnwrittenScreen(head, rows))
    codes[f"{name} {kind} {rows}"] = machine_code(configs[name], KIND_NAMES[kind], parts)
print(json.dumps(codes))
"""
FUSED = [["fused", "plain", 1]]
COMMENT = ["    if EARLY:\n", "    # A comment.\n\n    if EARLY:\n"]
RENAMED = ["first_row", "top_row"]
MOVED = [
    "    offs_d = tl.arange(0, BLOCK_D)\n    offs_g = tl.arange(0, NUM_GROUPS)\n",
    "    offs_g = tl.arange(0, NUM_GROUPS)\n    offs_d = tl.arange(0, BLOCK_D)\n",
]
CONSTANT = ["_SERIES_TERMS = tl.constexpr(8)", "_SERIES_TERMS = tl.constexpr(9)"]


@pytest.fixture(scope="module")
def codes_of(tmp_path_factory):
    """A function that returns the machine code of configurations, by a new process with an empty cache."""

    def codes_of(asked: list[list], **edits: list[list[str]]) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("compiled")
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
        command = [sys.executable, "-c", SCRIPT, json.dumps(edits), json.dumps(asked), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return codes_of


@pytest.fixture(scope="module")
def codes(codes_of):
    asked = [["read", "plain", 1], ["read", "greedy", 1], *FUSED, ["fused", "greedy", 1], ["deeper", "plain", 1]]
    return codes_of([*asked, ["screened", "plain+screen", 1], ["screened", "plain+screen", 64]])


def test_comments_names_and_lines_of_a_kernel_leave_its_machine_code_and_a_constant_does_not(codes_of, codes):
    as_it_is = {"fused plain 1": codes["fused plain 1"]}
    assert codes_of(FUSED, lm_head_sample=[COMMENT, RENAMED, MOVED]) == as_it_is
    assert codes_of(FUSED, rng=[CONSTANT]) != as_it_is


def test_each_configuration_and_kind_has_machine_code_of_its_own_whatever_the_size_of_its_screen(codes):
    assert all(len(code) == 16 for code in codes.values())
    assert codes["fused plain 1"] == codes["fused greedy 1"], "the noise of a greedy row is left out by a reader alone"
    assert codes["screened plain+screen 1"] == codes["screened plain+screen 64"]
    assert len(set(codes.values())) == len(codes) - 2


def test_where_nothing_is_compiled_there_is_no_machine_code(device):
    if device.type == "cuda":
        pytest.skip("a GPU's kernels are compiled")
    import torch

    assert machine_code(TileConfig(16, 64, 32, 4, 2), PLAIN, Parts.of(LMHead(torch.zeros(400, 64)))) == ""
