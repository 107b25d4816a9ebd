"""Every built-in choice is compiled to machine code by its launcher, without a GPU. It fits the device and spills no
register. By default only the first choice of each kind for sm90, and of truncation only with edits; with ``--full`` all
choices for all devices, for the measured family each with every kind that takes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CACHE

pytestmark = pytest.mark.slow
COMPILE_TARGETS = Path(__file__).parent.parent / "compile_targets.py"
MEASURED = 90  # the built-in choices of other families were measured nowhere
# Bytes of shared memory per program that every device of a family has: 8.6 and 8.9 have less than 8.0, and its table.
SHARED = {80: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Bytes of local memory per thread. Without a limit, ptxas stops at 128 registers and spills a few words. With an
# explicit limit of 128, it spills none. The search runs in few rows and is bound by memory, not by registers.
SPILLS = {"sample_truncated_kernel": 16, "draw_rescored_kernel": 32, "search_truncated_kernel": 256}
SPILLS |= {"rescore_groups_kernel": 16, "read_groups_kernel": 16, "read_ids_kernel": 16}
# Addresses of edits that a graph is told take two registers each, where a kernel's own arguments take none. The kernels
# of sm100 were never measured.
SPILLS_ON = {80: {"sample_logits_kernel": 8, "summarize_logits_kernel": 8}}
SPILLS_ON |= {100: {"lm_head_sample_kernel": 16, "sample_logits_kernel": 16, "screen_head_kernel": 8}}
SPILLS_ON[100] |= {"top_logprobs_kernel": 16, "rescore_groups_kernel": 24}
# An edited tile of 64 rows, which batch-invariant heads take too: one that spilled less was slower on an H200.
SPILLS_EDITED_LOGPROBS, SPILLS_BATCH_INVARIANT = {90: 8}, {90: 136}
# Weights on their way to a tensor core take registers, beside sums and best logits. Tiles that spill nothing were
# slower on an H200 than these, whose times ``h200-quantised.json`` has.
SPILLS_QUANTISED = {90: {"plain": 96, "truncate": 80, "edit": 184, "edit+truncate": 368}}
EVERYWHERE = {"lm_head_sample_kernel", "sample_logits_kernel", "sample_truncated_kernel", "search_truncated_kernel"}
EVERYWHERE |= {"quantize_hidden_kernel", "screen_head_kernel", "list_groups_kernel", "rescore_groups_kernel"}
EVERYWHERE |= {
    "bound_truncated_kernel",
    "certify_truncated_kernel",
    "list_ids_kernel",
    "read_ids_kernel",
    "read_groups_kernel",
}
EVERYWHERE |= {"draw_rescored_kernel", "reduce_splits_kernel", "pack_record_kernel", "merge_records_kernel"}
EVERYWHERE |= {"exchange_records_kernel", "tell_logits_kernel", "copy_rows_kernel", "follow_drafts_kernel"}
EVERYWHERE |= {"gather_rows_kernel", "write_rows_kernel", "stage_rows_kernel", "scale_hidden_kernel"}
EVERYWHERE |= {"copy_words_kernel", "sample_own_ids_kernel", "best_ids_kernel"}
EVERYWHERE |= {"summarize_logits_kernel", "top_logprobs_kernel"}
EVERYWHERE |= {"gather_logprobs_kernel", "head_logprobs_kernel", "pack_logprobs_kernel", "merge_logprobs_kernel"}


# A GPU before 8.9 reads no float8_e4m3fn; for 8.9 only the draws from such heads are compiled.
QUANTISED = {"scale_hidden_kernel", "lm_head_sample_kernel", "reduce_splits_kernel", "sample_logits_kernel"}
QUANTISED |= {"sample_truncated_kernel", "search_truncated_kernel"}


def printed_by(*arguments: object, path: str = ""):
    """What ``compile_targets.py`` says, in a process whose Triton is not the interpreter. path: where modules are
    looked for first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= CACHE | ({"PYTHONPATH": path} if path else {})
    command = [sys.executable, str(COMPILE_TARGETS), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_fits(resources: list[dict], capability: int, kinds: tuple[str, ...]) -> None:
    expected = {80: EVERYWHERE - {"scale_hidden_kernel"}, 89: QUANTISED}.get(capability, EVERYWHERE)
    assert {used["kernel"] for used in resources} == expected
    for kind in kinds:
        for path, suffix in (("fused", ""), ("logits", ""), ("screened", "+screen"))[: 2 if capability == 89 else 3]:
            assert any(used["launch"].startswith(f"{path}, {kind}{suffix}, ") for used in resources), (path, kind)
    for used in resources:
        allowed = (SPILLS | SPILLS_ON.get(capability, {})).get(used["kernel"], 0)
        if used["kernel"] == "lm_head_sample_kernel" and "float8_e4m3fn" in used["launch"]:
            allowed = SPILLS_QUANTISED.get(capability, {}).get(used["launch"].split(", ")[1], allowed)
        elif used["kernel"] == "lm_head_sample_kernel" and re.search("^fused, edit, .*, logprobs: ", used["launch"]):
            allowed = max(allowed, SPILLS_EDITED_LOGPROBS.get(capability, 0))
        elif used["kernel"] == "lm_head_sample_kernel" and ", batch-invariant: " in used["launch"]:
            allowed = max(allowed, SPILLS_BATCH_INVARIANT.get(capability, 0))
        assert used["spilled"] <= allowed, f"{used} spills on sm{capability}"
        assert used["shared"] <= SHARED[capability], f"{used} does not fit on sm{capability}"


def assert_resident(resources: list[dict]) -> None:
    """The programs per multiprocessor that a choice for quantised heads asks for are there at once on an sm90: 228 KiB
    of shared memory, 1 KiB of it for each program itself, and 65,536 registers, in lots of 8 per thread."""
    for used in resources:
        asks = re.search(r"^fused, .* torch.float8_e4m3fn, .*num_warps=(\d+), .*ctas_per_sm=(\d+)", used["launch"])
        if asks is None or used["kernel"] != "lm_head_sample_kernel":
            continue
        warps, programs = map(int, asks.groups())
        assert programs * (used["shared"] + 1024) <= 228 * 1024, used
        assert programs * warps * 32 * (-(-used["registers"] // 8) * 8) <= 65_536, used


def assert_barriers_agree(resources: list[dict]) -> None:
    """Threads do not load a threshold that other programs raise each for itself: threads with different values would
    take different branches around one barrier. A program without a list loads it once, before any branch."""
    rescored = [used for used in resources if used["kernel"] == "rescore_groups_kernel"]
    for listed in (True, False):
        loads = [used["loads"] for used in rescored if f"listed={listed}" in used["launch"]]
        assert loads and all(("threshold" in one) != listed for one in loads), listed
        assert all(("group_list" in one) for one in loads)


def test_the_first_choices_fit_an_sm90_and_spill_nothing():
    resources = printed_by("resources", 90)
    assert_fits(resources, 90, ("plain", "edit", "edit+truncate"))
    assert_resident(resources)
    assert_barriers_agree(resources)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("capability", SHARED)
def test_every_built_in_choice_with_everything_it_is_for_fits_its_device_and_spills_nothing(capability):
    """Also with logprobs, a softcap, a ragged vocabulary, fp16 and fp32."""
    resources = printed_by("resources", capability, "--full" if capability == MEASURED else "--each")
    assert_fits(resources, capability, ("plain", "edit", "truncate", "edit+truncate"))
    if capability == MEASURED:
        assert_resident(resources)
    dtypes = {80: (2, 4), 89: (1,)}.get(capability, (1, 2, 4))
    names = [{1: "torch.float8_e4m3fn", 2: "fp16", 4: "torch.float32"}[itemsize] for itemsize in dtypes]
    for words in ("logprobs", "softcap", "ragged", *names):
        assert any(words in used["launch"] for used in resources), words


@pytest.fixture
def oldest_triton() -> str:
    """The folder that has it."""
    folders = list(Path(sys.prefix, "triton-versions").glob("[0-9]*"))
    if not folders:
        pytest.skip("needs the environment of `make test-full`")
    return str(folders[0])


@pytest.mark.full
@pytest.mark.alone
def test_the_oldest_supported_triton_compiles_every_kind_and_every_built_in_configuration(oldest_triton):
    """And every feature: with one dtype, for its operations are the same with each."""
    resources = printed_by("resources", 90, "--once", path=oldest_triton)
    assert {used["kernel"] for used in resources} == EVERYWHERE
    for words in ("logprobs", "softcap", "ragged", "a mask alone", "fp16", "torch.float32", "torch.float8_e4m3fn"):
        assert any(words in used["launch"] for used in resources), words


@pytest.mark.full
@pytest.mark.alone
def test_the_kernels_pass_their_tests_with_the_oldest_supported_triton(oldest_triton):
    """Interpreted: all that is not slow."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, str(Path(__file__).parent)],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        | {"PYTHONPATH": oldest_triton},
        cwd=COMPILE_TARGETS.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 500


@pytest.fixture(scope="module")
def launches() -> dict[str, list[str]]:
    """About a thousand launches with arguments of every kind, one after the other, in one process."""
    return printed_by("keys", 90)


def test_no_launch_is_given_a_binary_that_triton_would_not_have_taken(launches):
    """Types, values of 1, multiples of 16, alignments, sizes beyond int32, and None."""
    assert len(launches["made"]) > 500
    assert launches["mistaken"] == []


def test_what_is_compiled_ahead_serves_every_batch_size_and_views_at_odd_addresses(launches):
    assert launches["late"] == []


@pytest.mark.parametrize(
    "name", ["temperature at an odd address", "seed at", "position at", "2 rows", "17 rows", "again"]
)
def test_another_batch_does_not_compile_another_kernel(launches, name):
    assert not [one for one in launches["made"] if f", {name}" in one]


def test_a_kernel_has_the_same_name_in_the_cache_on_disk_whichever_was_launched_first():
    """One process thus finds the binaries that another has compiled. A constant with the same name in two modules has
    one value: Triton orders a kernel's constants by name, and equal names by address."""
    orders = printed_by("names", 90)
    keys = orders[0]["keys"]
    assert set(keys) == EVERYWHERE and len(set(keys.values())) == len(keys)
    assert len(orders) >= 5 and all(other["keys"] == keys for other in orders[1:])
    for constants in orders[0]["constants"].values():
        assert all(len(values) == 1 for values in constants.values()), constants
    assert any(orders[0]["constants"].values())
