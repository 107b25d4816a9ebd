"""Every shipped tile compiled to real machine code, without a GPU: it fits the device and spills no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Shared memory per program that a device of each compute capability offers.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
FAMILY = {80: "sm80", 86: "sm80", 90: "sm90", 100: "sm100"}

# The search for a token runs in few rows and waits for memory rather than registers: it may spill this much.
# Bytes: of its own accord ptxas stops at 128 registers and spills a few words; with that limit given, it spills none.
SPILLS = {"draw of ": 16, "screened draw of ": 32, "truncated rescoring, ": 16, "first, ": 16}
SPILLS |= {"search of ": 256}
VOCAB = 151_936
SCREENED = ("screen, plain: ", "list, plain: ", "rescoring, plain: ", "fixed point, plain: ")
SCREENED += (
    "truncated screen, plain: ",
    "truncated rescoring, plain: ",
    "first, plain: ",
    "rest, plain: ",
    "screened draw of ",
)
SCREENED += ("id list, plain: ", "ids, plain: ")

# Compiling needs a process whose Triton is not the interpreter.
SCRIPT = """
import dataclasses, json, sys
import torch
sys.path[:0] = json.loads(sys.argv[1])
try:
    import sgl_flashsample.kernels
except ImportError:
    import sgl_flashsample
    sgl_flashsample.__path__.append(sys.path[1])
import cubins
from sgl_flashsample.kernels.tiles import DEFAULT_DRAW
from sgl_flashsample.tuned import DRAWS, READS, SCREENS, TABLE, WORK_TABLE, Work
capability, family, vocab = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
draw = DRAWS.get(family, DEFAULT_DRAW)
found = []

def report(name, used):
    found.append([name, dataclasses.asdict(used)])

for name, itemsize in TABLE:
    if name != family:
        continue
    dtypes = [torch.bfloat16, torch.float16] if itemsize == 2 else [torch.float32]
    for work in (work for work in Work if work.fallback is None):  # the others take these where they are not screened
        features = {"truncate": work.truncates, "edits": work.edits}
        for _, tile in WORK_TABLE.get((family, itemsize, work)) or TABLE[family, itemsize]:
            for dtype in dtypes:
                variants = [{}, {"return_logprob": True}, {"softcap": True}]
                # Another 2-byte dtype or a softcap changes no layout: with the plain work alone.
                for options in variants[:1] if dtype is torch.float16 else variants[: 3 if work is Work.PLAIN else 2]:
                    if dtype is torch.float16 and work is not Work.PLAIN:
                        continue
                    used = cubins.resources_of_lm_head_sample(capability, 4096, dtype, tile, **options, **features)
                    report(f"{work}: {tile} {dtype} {options}", used)
            if work is Work.PLAIN and not tile.one_launch:
                used = cubins.resources_of_reduce_parts(capability, tile, 256, return_logprob=True)
                report(f"reduction of {tile}", used)
for (name, itemsize, work), entries in SCREENS.items():
    if name != family:
        continue
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    own = work if (name, itemsize, Work.EDIT) in SCREENS else None
    for place, (_, config) in enumerate(entries):
        for edits in {False, True} if own is None else {work.edits}:
            for softcap in (False, True)[: 1 if place else 2]:  # it changes no layout
                options = {"edits": edits, "softcap": softcap}
                used = cubins.resources_of_screen_head(capability, 4096, dtype, config, **options)
                report(f"screen, {work}: {config} {dtype} {options}", used)
                used = cubins.resources_of_rescore_groups(capability, 4096, dtype, config, **options)
                report(f"rescoring, {work}: {config} {dtype} {options}", used)
        if not place or place == len(entries) - 1:
            options = {"edits": work.edits, "truncate": True}
            used = cubins.resources_of_screen_head(capability, 4096, dtype, config, **options)
            report(f"truncated screen, {work}: {config} {dtype} {options}", used)
            used = cubins.resources_of_rescore_groups(capability, 4096, dtype, config, **options)
            report(f"truncated rescoring, {work}: {config} {dtype} {options}", used)
            for of in (cubins.Round.FIRST, cubins.Round.REST):
                used = cubins.resources_of_rescore_groups(capability, 4096, dtype, config, of=of, **options)
                report(f"{of.name.lower()}, {work}: {config} {dtype} {options}", used)
            used = cubins.resources_of_list_groups(capability, config, first=True)
            report(f"first list, {work}: {config}", used)
            report(f"id list, {work}: {config}", cubins.resources_of_list_ids(capability, config))
            used = cubins.resources_of_verify_ids(capability, 4096, dtype, config, edits=work.edits)
            report(f"ids, {work}: {config} {dtype}", used)
        if not place:
            listed = dataclasses.replace(config, listed=True, early=capability >= 90)
            report(f"list, {work}: {listed}", cubins.resources_of_list_groups(capability, listed))
            used = cubins.resources_of_rescore_groups(capability, 4096, dtype, listed)
            report(f"rescoring, {work}: {listed} {dtype}", used)
        used = cubins.resources_of_quantize_hidden(capability, 4096, dtype, config)
        report(f"fixed point, {work}: {config} {dtype}", used)
screen = config
for work, entries in READS.items():
    features = {"truncate": work.truncates, "edits": work.edits}
    for config in {config for _, config in entries}:
        greedy = [{"dtype": torch.bfloat16, "softcap": True, "all_greedy": True}] if work is Work.PLAIN else []
        for options in [*greedy, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "return_logprob": True},
                        {"dtype": torch.float32, "softcap": True}, {"dtype": torch.bfloat16, "whole_groups": False}]:
            used = cubins.resources_of_sample_logits(capability, config=config, **options, **features)
            report(f"reader, {work}: {config} {options}", used)
early = dataclasses.replace(screen, early=capability >= 90)
report(f"bound: {draw}", cubins.resources_of_bound_truncated(capability, vocab, draw, early))
for dtype in (torch.bfloat16, torch.float32):  # what logits are kept in
    report(f"screened draw of {dtype}", cubins.resources_of_draw_screened(capability, vocab, draw, early, dtype))
    report(f"draw of {dtype}", cubins.resources_of_draw_truncated(capability, vocab, draw, 2048, dtype))
    report(f"search of {dtype}", cubins.resources_of_search_truncated(capability, vocab, draw, dtype))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def reports(request):
    """What each capability's process reports: all of them run at the same time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(request.config.rootpath / "tests"), str(request.config.rootpath)]
    running = {
        capability: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(roots), str(capability), FAMILY[capability], str(VOCAB)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in SHARED_LIMIT
    }
    return {capability: (*process.communicate(), process.returncode) for capability, process in running.items()}


@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_every_shipped_tile_with_the_features_it_is_for_compiles_fits_and_spills_nothing(capability, reports):
    output, errors, status = reports[capability]
    assert status == 0, errors[-2000:]
    found = json.loads(output.splitlines()[-1])
    for work in ("plain", "truncate", "edit", "edit+truncate"):
        assert sum(name.startswith(f"reader, {work}: ") for name, _ in found) >= 4, work
    for part in (
        "plain: ",
        "truncate: ",
        "edit: ",
        "edit+truncate: ",
        "draw of ",
        "search of ",
        "reduction of ",
        *SCREENED,
    ):
        assert sum(name.startswith(part) for name, _ in found) >= 2, part
    for name, used in found:
        spills = next((most for part, most in SPILLS.items() if name.startswith(part)), 0)
        assert used["spilled"] <= spills, f"{name} spills {used['spilled']} bytes per thread on sm{capability}"
        assert used["shared"] <= SHARED_LIMIT[capability], f"{name} needs {used['shared']} bytes on sm{capability}"


def test_what_other_programs_raise_meanwhile_is_not_loaded_by_each_thread_for_itself(reports):
    """Threads that see different values take different branches around the same barrier: tokens are wrong and addresses
    too. A program without a list looks once, before there is a branch."""
    found = {name: used["loaded"] for name, used in json.loads(reports[90][0].splitlines()[-1])}
    listed = [loaded for name, loaded in found.items() if name.startswith("rescoring, ") and "listed=True" in name]
    others = [loaded for name, loaded in found.items() if name.startswith("rescoring, ") and "listed=False" in name]
    assert listed and all("list_ptr" in loaded and "threshold_ptr" not in loaded for loaded in listed)
    assert others and all("threshold_ptr" in loaded for loaded in others)
