"""The built-in choices: every batch has one on every path, and the files alone decide which."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from core_examples import UNSCREENED, example

from sgl_flashsample import LMHead, defaults
from sgl_flashsample.defaults import (
    FAMILIES,
    INTERPRETED,
    SHIPPED,
    HeadTraits,
    all_configs,
    builtin_table,
    default_config,
    default_config_on,
    defaults_digest,
    family_of,
    family_of_device,
    truncation_config,
)
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig, TruncationConfig
from sgl_flashsample.kernels.launch import Gpu
from sgl_flashsample.kinds import BATCH_KINDS, CONFIGS, KIND_NAMES, PLAIN, Config, SamplingPath, path_of
from sgl_flashsample.tables.lookup import load_table, unsupported_config
from sgl_flashsample.tables.schema import Device

TABLES = [(family, itemsize) for family in ("sm80", "sm90", "sm100") for itemsize in (1, 2, 4)]
SIZES = (1, 2, 8, 9, 16, 17, 32, 33, 48, 64, 65, 128, 129, 512, 513, 5000)
# The device with the smallest shared memory of each family.
DEVICES = {
    family: Device(name="", cc=cc, sms=128, l2_mb=50, smem_optin=smem)
    for family, cc, smem in (("sm80", "8.9", 101_376), ("sm90", "9.0", 232_448), ("sm100", "10.0", 232_448))
}


def traits(family="sm90", itemsize=2, hidden=4096, has_gemm=True) -> HeadTraits:
    return HeadTraits(family, itemsize, 151_936, hidden, has_gemm)


@pytest.mark.parametrize("has_gemm", [True, False])
@pytest.mark.parametrize("family, itemsize", [*TABLES, (INTERPRETED, 4)])
def test_every_batch_has_a_choice_on_every_path_that_can_run_on_the_device(family, itemsize, has_gemm):
    for hidden in (64, 4096):
        head = traits(family, itemsize, hidden, has_gemm)
        for kind in BATCH_KINDS:
            for rows in SIZES:
                chosen = default_config(head, rows, kind)
                assert kind.screen or not isinstance(chosen, ScreenConfig)
                assert has_gemm or not isinstance(chosen, ReadConfig), "nobody writes such a head's logits"
                # A quantised head is not screened.
                served = [path for path in CONFIGS if itemsize > 1 or path is not SamplingPath.SCREENED]
                on_paths = {path: default_config_on(head, path, rows, kind) for path in served}
                assert all(isinstance(config, CONFIGS[path]) for path, config in on_paths.items())
                assert on_paths[path_of(chosen)] == chosen
                for path, config in on_paths.items() if family in DEVICES else ():
                    on_path = kind._replace(screen=path is SamplingPath.SCREENED)
                    dtype = {1: "e4m3", 2: "bf16", 4: "fp32"}[itemsize]
                    assert unsupported_config(config, DEVICES[family], dtype, on_path) is None


@pytest.mark.parametrize("family, itemsize", TABLES)
def test_a_file_of_built_in_choices_is_a_table_and_no_tuned_one(family, itemsize):
    table = builtin_table(family, itemsize)
    assert (table.builtin, table.itemsize, table.notes) == (family, itemsize, [])
    file = SHIPPED / f"builtin-{family}-{itemsize}byte.json"
    assert load_table(file) == (None, "it holds built-in choices, not tuned ones")
    assert set(table.kinds) <= set(KIND_NAMES)
    configs = all_configs(family, itemsize)
    assert len(configs) == len(set(configs)) and set(configs) == {entry.configuration for entry in table.entries}


def test_editing_one_line_changes_what_one_size_of_batch_takes_and_nothing_else(builtin_files):
    every = [(rows, kind) for rows in range(1, 140) for kind in BATCH_KINDS]
    before = {one: default_config(traits(), *one) for one in every}

    def deepen(line: str) -> str:
        return line.replace('"stages": 5', '"stages": 3') if '"plain", "rows": 32, "path": "fused"' in line else line

    builtin_files("builtin-sm90-2byte.json", deepen)
    after = {one: default_config(traits(), *one) for one in every}
    changed = {one for one in every if after[one] != before[one]}
    names = ("plain", "greedy", "greedy+screen")  # not "plain+screen": these batches take the screen
    assert changed == {(rows, KIND_NAMES[name]) for rows in range(17, 33) for name in names}
    assert {after[one].stages for one in changed} == {3}
    assert default_config(traits("sm80"), 20, PLAIN).stages == 4


def test_an_entry_for_wide_heads_alone_is_nothing_to_the_others(builtin_files):
    entry = {"kind": "plain", "rows": 9000, "path": "logits", "min_hidden": 8192}
    entry["config"] = {"block_b": 8, "block_v": 64, "num_warps": 1}
    before = {rows: default_config(traits(), rows, PLAIN) for rows in (512, 600)}
    builtin_files("builtin-sm90-2byte.json", lambda line: line.replace('s": [', f's": [{json.dumps(entry)},'))
    assert default_config(traits(hidden=8192), 600, PLAIN).block_b == 8
    assert {rows: default_config(traits(), rows, PLAIN) for rows in before} == before


@pytest.mark.parametrize("place", ["kind", "rows", "path", "config", "on_request", "min_hidden", "truncation"])
def test_the_digest_changes_with_every_choice(builtin_files, place):
    before = {one: defaults_digest(*one, 4096) for one in TABLES}

    def change(line: str) -> str:
        if place == "truncation":
            return line.replace('"truncation": {', '"truncation": {"window": 16, ')
        if '"kind": "truncate", "rows": 32, "path": "fused"' not in line:
            return line
        entry = json.loads(line.strip().rstrip(","))
        entry |= {
            "kind": {"kind": "edit"},
            "rows": {"rows": 31},
            "path": {"path": "logits", "config": {"block_b": 1, "block_v": 64, "num_warps": 1}},
            "config": {"config": entry["config"] | {"rows_first": True}},
        }.get(place, {place: 4097 if place == "min_hidden" else True})
        return f"  {json.dumps(entry)},"

    builtin_files("builtin-sm90-2byte.json", lambda line: line.replace('"builtin"', ' "effort": "x", "builtin"'))
    assert {one: defaults_digest(*one, 4096) for one in TABLES} == before, "no choice"
    builtin_files("builtin-sm90-2byte.json", change)
    assert {one for one in TABLES if defaults_digest(*one, 4096) != before[one]} == {("sm90", 2)}


def test_a_choice_for_wide_heads_changes_no_digest_of_the_others(builtin_files):
    entry = {"kind": "truncate", "rows": 32, "path": "fused", "min_hidden": 2048}
    entry["config"] = {"block_b": 32, "block_v": 64, "block_d": 64, "num_warps": 4, "stages": 3}
    before = {hidden: defaults_digest("sm90", 2, hidden) for hidden in (2047, 2048, 8192)}
    builtin_files("builtin-sm90-2byte.json", lambda line: line.replace('s": [', f's": [{json.dumps(entry)},'))
    changed = [hidden for hidden in before if defaults_digest("sm90", 2, hidden) != before[hidden]]
    assert changed == [2048, 8192]
    assert default_config(traits(hidden=2048), 32, KIND_NAMES["truncate"]).block_d == 64


def test_an_entry_serves_up_to_its_size_and_the_last_one_all_larger_batches():
    taken = {rows: default_config(traits(), rows, PLAIN) for rows in (1, 16, 17, 32, 33, 128, 129, 512, 513, 9999)}
    assert taken[1] == taken[16] != taken[17] == taken[32] != taken[33] != taken[128]
    assert isinstance(taken[128], TileConfig) and isinstance(taken[129], ReadConfig)
    assert taken[129] == taken[512] == taken[513] == taken[9999]
    asked = default_config_on(traits(), SamplingPath.FUSED, 300, PLAIN)
    assert asked.block_b == 128 and asked != taken[128], "an entry that only batches forced to its path take"


@pytest.mark.parametrize("family", ["sm80", "sm90", "sm100"])
def test_a_choice_does_not_depend_on_the_order_of_the_entries(family, monkeypatch):
    def choices() -> list[Config]:
        heads = [traits(family, hidden=hidden) for hidden in (2048, 2880, 4096)]
        return [default_config(head, rows, kind) for head in heads for kind in BATCH_KINDS for rows in SIZES]

    table, before = builtin_table(family, 2), choices()
    reversed_table = msgspec.structs.replace(table, entries=table.entries[::-1])
    monkeypatch.setattr(defaults, "builtin_table", lambda *of: reversed_table)
    default_config.cache_clear()
    after = choices()
    default_config.cache_clear()
    assert before == after


def test_a_kind_without_entries_takes_those_of_its_fallback():
    for rows in (1, 20, 64, 300):
        assert default_config(traits(), rows, KIND_NAMES["greedy"]) == default_config(traits(), rows, PLAIN)
        for kind in UNSCREENED:  # not measured there: no batch is screened
            wanted = default_config(traits("sm100"), rows, kind)
            assert default_config(traits("sm100"), rows, kind._replace(screen=True)) == wanted


@pytest.mark.parametrize("hidden, edited, truncated, both", [(2879, 16, 1, 0), (2880, 32, 16, 8)])
def test_on_sm90_batches_are_screened_up_to_the_sizes_that_were_measured_to_win(hidden, edited, truncated, both):
    largest = {"plain": 32, "greedy": 16, "edit": edited, "truncate": truncated, "edit+truncate": both}
    for name, size in largest.items():
        kind = KIND_NAMES[f"{name}+screen"]
        for head in (traits(hidden=hidden), traits(hidden=hidden, has_gemm=False)):
            screened = [rows for rows in range(1, 600) if isinstance(default_config(head, rows, kind), ScreenConfig)]
            assert screened == list(range(1, size + 1))
            assert default_config(head, size + 1, kind) == default_config(head, size + 1, kind.unscreened)


def test_a_head_whose_gemm_is_slow_or_rounds_otherwise_keeps_to_the_fused_pass(device):
    weight = example(device).head.weight
    unaligned, padded = LMHead(weight[:599]), LMHead(weight, vocab_size=599)
    rounded = LMHead(weight.bfloat16(), logits_dtype=torch.float32)
    assert [HeadTraits.of(head).has_gemm for head in (LMHead(weight), unaligned, padded, rounded)] == [True, False] * 2
    assert HeadTraits.of(padded) == HeadTraits(family_of_device(device), 4, 599, 32, True)
    for kind in UNSCREENED:
        for rows in (65, 200, 700):
            fused = default_config_on(traits(), SamplingPath.FUSED, rows, kind)
            assert default_config(traits(has_gemm=False), rows, kind) == fused


CUDA = torch.device("cuda", 0)


def test_a_family_is_that_of_the_compute_capability():
    names = dict.fromkeys(("8.0", "8.6", "8.9", "12.0"), "sm80") | {"9.0": "sm90", "10.0": "sm100", "10.3": "sm100"}
    names |= dict.fromkeys(("7.5", "13.0", "0.0"))
    assert {cc: family_of(cc) for cc in names} == names


def test_every_family_has_a_table_of_built_in_choices():
    assert set(FAMILIES.values()) == {family for family, _ in TABLES}
    with pytest.raises(ValueError, match="No such file"):
        builtin_table("sm70", 2)


def test_a_device_has_the_family_of_its_compute_capability(monkeypatch):
    assert family_of_device(torch.device("cpu")) == INTERPRETED
    monkeypatch.setattr("sgl_flashsample.kernels.launch.gpu_of", {CUDA: Gpu((10, 3), 148)}.get)
    assert family_of_device.__wrapped__(CUDA) == "sm100"
    with pytest.raises(ValueError, match=r"device is meta; expected a CUDA device of compute capability 8\.0 or newer"):
        family_of_device(torch.device("meta"))


@pytest.mark.parametrize("rows, vocab, hidden", [(1, 1, 8), (9, 600, 32), (600, 151_936, 4096)])
def test_interpreted_choices_are_few_programs_within_the_interpreters_block_limit(rows, vocab, hidden):
    head = HeadTraits(INTERPRETED, 4, vocab, hidden)
    for kind in BATCH_KINDS:
        screened = kind.screen and rows <= defaults.MAX_INTERPRETED_SCREEN_ROWS
        large = vocab * hidden > defaults.MAX_INTERPRETED_WEIGHTS
        unscreened = SamplingPath.LOGITS if large else SamplingPath.FUSED
        wanted = SamplingPath.SCREENED if screened else unscreened
        assert path_of(default_config(head, rows, kind)) is wanted
        without_gemm = default_config(head._replace(has_gemm=False), rows, kind)
        assert path_of(without_gemm) is (SamplingPath.SCREENED if screened else SamplingPath.FUSED)
        for path in CONFIGS:
            config = default_config_on(head, path, rows, kind)
            assert config.ctas_per_sm == 1 and min(vocab, 2**11) <= config.block_v <= 2**20 // config.block_b
            assert isinstance(config, ReadConfig) or not (config.tma or config.flatten)


def test_truncated_rows_of_one_head_are_drawn_alike_whatever_the_batch():
    assert truncation_config("sm90", 2, 151_936) == TruncationConfig(splits=4, num_warps=16), "what the file names"
    assert truncation_config("sm100", 4, 32_000) == TruncationConfig(), "a file that names nothing"
    assert truncation_config("sm80", 2, 151_936).gather == 16, "of a small shared memory"
    assert [truncation_config(INTERPRETED, 4, vocab).block for vocab in (1, 600, 10**6)] == [16, 1024, 2**16]


def test_a_batch_kind_has_one_name_and_its_fallback_is_the_kind_without_what_is_least_missed():
    names = "plain truncate edit edit+truncate greedy plain+screen truncate+screen edit+screen edit+truncate+screen"
    assert list(KIND_NAMES) == [*names.split(), "greedy+screen"] == list(map(str, BATCH_KINDS))
    for name, kind in KIND_NAMES.items():
        wanted = name.removesuffix("+screen") if kind.screen else {"greedy": "plain"}.get(name)
        assert (kind.fallback and str(kind.fallback)) == wanted
