"""A table of choices as text: each table has exactly one readable text, and each error is one line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tuned_tables import H200, HEAD, make_entry, make_table

from sgl_flashsample.files import BadFileError
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kinds import CONFIGS, KIND_NAMES
from sgl_flashsample.tables.schema import (
    MAX_OF_FIELD,
    Confirmed,
    HeadShape,
    Table,
    config_fields,
    file_name,
)

TEXT = make_table().dumps()


def changed(place: str, value: Any) -> str:
    """The table's text with ``value`` at ``place``, a dotted path; ``...`` deletes the entry."""
    data = json.loads(TEXT)
    *parents, last = (int(name) if name.isdigit() else name for name in place.split("."))
    at = data
    for name in parents:
        at = at[name]
    at[last] = value
    if value is ...:
        del at[last]
    return json.dumps(data)


def test_what_is_written_is_read_back_and_written_the_same():
    assert Table.loads(TEXT) == make_table()
    assert Table.loads(TEXT).dumps() == TEXT and not Table.loads(TEXT).notes


def test_a_table_has_one_text_whatever_the_order_of_its_parts():
    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(inner) for key, inner in reversed(value.items())}
        return [backwards(inner) for inner in value] if isinstance(value, list) else value

    data = backwards(json.loads(TEXT))
    data["entries"].reverse()
    assert Table.loads(json.dumps(data)).dumps() == TEXT


def test_an_entry_is_one_line_that_says_what_differs_from_the_defaults_and_the_evidence():
    lines = TEXT.splitlines()
    entries = [json.loads(line.strip(" ,")) for line in lines if line.startswith('  {"kind"')]
    places = [(entry["kind"], entry["rows"]) for entry in entries]
    assert places == [("edit+truncate", 16), ("plain", 1), ("plain", 4), ("plain", 16)]
    assert entries[2]["config"] == {"block_b": 1, "block_v": 512, "num_warps": 1, "ctas_per_sm": 32}
    assert lines[1] == ' "schema": "flashsample-tune/2",' and TEXT.endswith("}\n") and len(lines) < 30
    assert sum(line.startswith('  "') for line in lines) == 2, "a line for each kind with sizes that keep the default"
    other = make_table(entries=[*make_table().entries[:3], make_entry("plain", 16, ReadConfig(1, 64, 1))])
    assert sum(mine != theirs for mine, theirs in zip(lines, other.dumps().splitlines(), strict=True)) == 1


names = st.text("abcdefgh-_+.0123456789é", min_size=1, max_size=12)
times = st.floats(0.001, 1e6)
sizes = st.sampled_from
tiles = st.builds(TileConfig, sizes((16, 64)), sizes((32, 256)), sizes((32, 128)), sizes((4, 8)), st.integers(1, 8))
readers = st.builds(ReadConfig, sizes((1, 8)), sizes((32, 512)), sizes((1, 4)), min_splits=st.integers(1, 512))
screens = st.builds(ScreenConfig, sizes((8, 64)), st.just(64), sizes((32, 128)), sizes((4, 8)), st.integers(1, 8))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    place = st.tuples(st.sampled_from(sorted(KIND_NAMES)), st.integers(1, 65_536))
    places = draw(st.lists(place, unique=True, max_size=12))
    num_entries = draw(st.integers(0, len(places)))
    entries = [
        make_entry(
            *one,
            draw(tiles | readers | screens),
            us=draw(times),
            gain=draw(st.floats(-2, 1)),
            tied=draw(st.lists(names, max_size=3)),
            others=draw(st.dictionaries(names, times, max_size=3)),
            flashinfer=draw(st.booleans()),
        )
        for one in sorted(places[:num_entries])
    ]
    confirmed: dict[str, Confirmed] = {}
    for kind in {kind for kind, _ in places[num_entries:]}:
        rows = [rows for other, rows in places[num_entries:] if other == kind]
        confirmed[kind] = Confirmed(rows=rows, us=[draw(times) for _ in rows], gemm_us=[draw(times) for _ in rows])
    head = HeadShape(vocab=draw(st.integers(1, 300_000)), hidden=64, dtype=draw(sizes(("bf16", "fp32"))))
    measure = draw(st.dictionaries(names, names | times | st.lists(times, max_size=2), max_size=3))
    return make_table(head=head, entries=entries, confirmed=confirmed, measure=measure)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables())
def test_any_table_survives_the_round_trip(table):
    text = table.dumps()
    assert Table.loads(text) == table and Table.loads(text).dumps() == text
    assert sum(line.startswith('  {"kind"') for line in text.splitlines()) == len(table.entries)
    for entry in table.entries:
        assert config_fields(entry.configuration) == entry.config


@pytest.mark.parametrize(
    "device, head, name",
    [
        ("NVIDIA H200", HEAD, "fs2-NVIDIA_H200-V128256-D4096-tp1-bf16.json"),
        (
            "NVIDIA RTX PRO 6000 / é",
            HeadShape(vocab=262_144, hidden=3840, dtype="fp16", tp=4, softcap=True),
            "fs2-NVIDIA_RTX_PRO_6000_-V262144-D3840-tp4-fp16-softcap.json",
        ),
        ("../x", HeadShape(vocab=1, hidden=1, dtype="fp32"), "fs2-.._x-V1-D1-tp1-fp32.json"),
    ],
)
def test_the_file_name_shows_device_and_head_and_is_one_name_in_one_folder(device, head, name):
    assert file_name(device, head) == name
    assert make_table(msgspec.structs.replace(H200, name=device), head).file_name == name


@given(st.lists(st.sampled_from(["..", "/", "\\", "\0", "\n", "~", "C:", "%2e", "\u202e", "é", "-", "="]) | st.text()))
def test_the_file_of_a_device_of_any_name_is_in_its_folder(parts):
    name = file_name("".join(parts), HEAD)
    assert Path(name).name == name and os.path.normpath(f"/folder/{name}") == f"/folder/{name}"
    assert not name.startswith(".")
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", name), "else no Kubernetes ConfigMap can hold the file"


WRONG = [
    ("schema", "flashsample-tune/1", "schema is 'flashsample-tune/1'; expected 'flashsample-tune/2'"),
    ("schema", "flashsample-tune/22", "schema is 'flashsample-tune/22'"),
    ("schema", ..., "schema is None"),
    ("device", ..., "device or head is missing"),
    ("device.name", "a\nb", "device.name is no text of 300 or fewer printable characters"),
    ("device.name", "a\x1b[2J", "device.name is no text"),
    ("device.name", "a\u202eb", "device.name"),
    ("device.name", "\ud800", "device.name"),
    ("device.sms", True, "Expected `int`, got `bool` - at `$.device.sms`"),
    ("device.sms", 10**30, "device.sms is a huge number; expected 1e+18 or less"),
    ("device.sms", 2**17, "Expected `int` <= 65536 - at `$.device.sms`"),
    ("device.smem_optin", ..., "missing required field `smem_optin` - at `$.device`"),
    ("head.vocab", 0, "Expected `int` >= 1 - at `$.head.vocab`"),
    ("head.dtype", "int8", "dtype is 'int8'; expected one of bf16, fp16, fp32, e4m3"),
    ("env", {"x": "y" * 301}, "env.x is no text"),
    ("env", {str(number): "" for number in range(65)}, "$.env"),
    ("measure", {"a": {"b": {"c": {"d": 1}}}}, "measure.a.b.c is nested too deeply"),
    ("measure", {"a": -(10**40)}, "measure.a is a huge number; expected 1e+18 or less"),
    ("measure", {"a": [0] * 4097}, "measure.a has 4097 entries; expected 4096 or fewer"),
    ("measure", {"a": "two\nlines"}, "measure.a is no text of 300 or fewer printable characters"),
    ("measure", {"a": {"two\nlines": 1}}, "measure.a"),
    ("provenance", {"k" * 301: 1}, "provenance.kkk"),
    ("simulated", 1, "Expected `bool`, got `int` - at `$.simulated`"),
    ("entries.1.against", -1, "$.entries[1].against"),
    ("entries.1.code", 7, "$.entries[1].code"),
    ("confirmed.plain.code", ["a"], "code has 1 values; expected 2, one for each of rows"),
    ("entries.1", 3, "$.entries[1]"),
    ("entries.1.kind", ..., "missing required field `kind` - at `$.entries[1]`"),
    ("entries.1.rows", 0, "$.entries[1].rows"),
    ("entries.1.rows", 65_537, "$.entries[1].rows"),
    ("entries.1.rows", 4, "entries[2] is the second one for plain batches of 4 rows"),
    ("entries.1.config.block_v", ..., "entries[1].config: "),
    ("entries.1.config.block_v", 100, "entries[1].config: TileConfig.block_v is 100; expected a power of two"),
    (
        "entries.1.config.block_v",
        2**17,
        "entries[1].config has a block of 33554432 elements for 4 warps; expected 65536",
    ),
    ("entries.1.config.stages", 17, "entries[1].config.stages is 17; expected an integer from 1 to 16"),
    ("entries.1.config.stages", -1, "entries[1].config.stages is -1; expected an integer from 1 to 16"),
    ("entries.1.config.num_warps", True, "entries[1].config.num_warps is true; expected an integer"),
    ("entries.1.config.num_warps", 4.0, "$.entries[1].config"),
    ("entries.1.config.num_warps", 10**30, "entries[1].config.num_warps is a huge number"),
    ("entries.1.config.tma", 1, "entries[1].config.tma is 1; expected true or false"),
    ("entries.1.us", "1", "$.entries[1].us"),
    ("entries.1.us", -1, "$.entries[1].us"),
    ("entries.1.us", 1e10, "$.entries[1].us"),
    ("entries.1.gain", 1.5, "$.entries[1].gain"),
    ("entries.1.tied", ["a"] * 65, "$.entries[1].tied"),
    ("entries.1.others", {"x": None}, "$.entries[1].others"),
    ("confirmed.plain.rows", [32], "us has 2 values; expected 1, one for each of rows"),
    ("confirmed.plain.gemm_us", [1.0], "gemm_us has 1 values; expected 2, one for each of rows"),
    ("confirmed.plain.rows", [32, 32], "confirmed.plain has 32 rows, which are there twice"),
    ("confirmed.plain.rows", [16, 32], "confirmed.plain has 16 rows, which are there twice"),
    ("confirmed.plain.rows", [0, 32], ".rows[0]"),
]


@pytest.mark.parametrize("place, value, message", WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named_in_one_line(place, value, message):
    with pytest.raises(BadFileError) as caught:
        Table.loads(changed(place, value))
    said = str(caught.value)
    assert message in said and said.isprintable() and len(said) < 400


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2]", "it is no object"),
        (TEXT[:-3], "it is not JSON: "),
        (TEXT.replace('"us": 284.0', '"us": 1e999'), "entries[1].us is a huge number"),
        (TEXT.replace('"rounds": 15', '"rounds": 1e999'), "measure.rounds is a huge number"),
        (TEXT.replace('"rounds": 15', '"rounds": NaN'), "it has the number NaN; expected finite ones"),
        (TEXT.replace('"n": 150', '"n": 150, "n": 150'), "the key 'n' is there twice in one object"),
        (TEXT + " " * (1 << 20), "it is longer than 1048576 bytes"),
    ],
    ids=range(7),
)
def test_a_text_that_is_no_table_is_refused_in_one_line(text, message):
    with pytest.raises(BadFileError) as caught:
        Table.loads(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "path, config, warps",
    [
        # Within all bounds on single fields; a reader of 65,536 ids for one warp compiles for a minute and a half.
        ("logits", {"block_b": 1, "block_v": 65_536, "num_warps": 1}, 4),
        ("logits", {"block_b": 64, "block_v": 512, "num_warps": 1}, 2),
        ("fused", {"block_b": 256, "block_v": 256, "block_d": 32, "num_warps": 2, "stages": 1}, 4),
        ("fused", {"block_b": 16, "block_v": 256, "block_d": 256, "num_warps": 2, "stages": 1}, 4),
        ("screened", {"block_b": 128, "block_v": 256, "block_d": 32, "num_warps": 2, "stages": 1}, 4),
        ("screened", {"block_b": 8, "block_v": 64, "block_d": 64, "num_warps": 4, "stages": 1, "rescore_v": 1024}, 8),
        ("screened", {"block_b": 128, "block_v": 64, "block_d": 64, "num_warps": 8, "stages": 1, "chunk": 1024}, 8),
    ],
)
def test_a_block_has_no_more_elements_per_thread_than_compile_in_time(path, config, warps):
    data = json.loads(TEXT)
    data["entries"][1] |= {"kind": "plain+screen", "path": path, "config": config}
    with pytest.raises(
        BadFileError, match=r"^entries\[1\].config has a block of \d+ elements for \d warps; expected \d+ or fewer"
    ):
        Table.loads(json.dumps(data))
    config["rescore_warps" if {"rescore_v", "chunk"} & config.keys() else "num_warps"] = warps
    assert Table.loads(json.dumps(data)).entries[1].config == config


@pytest.mark.parametrize(
    "path, config",
    [
        # A GPU of 132 multiprocessors reduces 132 splits of a row per unit of ctas_per_sm, one warp alone.
        ("fused", {"block_b": 16, "block_v": 64, "block_d": 32, "num_warps": 4, "stages": 2, "ctas_per_sm": 128}),
        ("logits", {"block_b": 16, "block_v": 64, "num_warps": 1, "ctas_per_sm": 128, "min_splits": 512}),
    ],
)
def test_a_reduction_has_no_more_elements_per_thread_than_compile_in_time(path, config):
    data = json.loads(TEXT)
    data["entries"][1] |= {"path": path, "config": config | {"reduce_rows": 256}}
    with pytest.raises(BadFileError, match=r"^entries\[1\].config.*reduc"):
        Table.loads(json.dumps(data))


def test_every_numeric_field_of_a_configuration_has_an_upper_bound():
    for config in CONFIGS.values():
        numeric = {name for name, field in config.__dataclass_fields__.items() if field.type == "int"}
        assert numeric <= set(MAX_OF_FIELD)


def test_what_a_later_release_adds_is_ignored_with_a_note_wherever_it_is():
    data = json.loads(TEXT)
    data["schema"] += ".7"
    data["extra"] = data["device"]["extra"] = data["head"]["extra"] = {"deep": [1]}
    data["confirmed"]["draft"] = {"rows": [1], "us": [1.0]}
    data["confirmed"]["plain"]["energy_mj"] = [1.0, 2.0]
    data["entries"][1]["p99_us"] = 12.5
    data["entries"][2]["config"]["warp_specialize"] = True
    data["entries"] += [
        {"kind": "speech", "rows": 1, "path": "fused", "config": {}},
        {"kind": "plain", "rows": 8, "path": "speculative", "config": {"hot": 4096}},
    ]
    table = Table.loads(json.dumps(data))
    assert table.dumps() == TEXT, "as this release writes it"
    told = "\n".join(table.notes)
    for word in ("extra is", "entries[2].config.warp_specialize", "entries[4]: the kind 'speech'", "'speculative'"):
        assert word in told
    for word in ("device.extra", "head.extra", "confirmed.draft", "energy_mj", "p99_us"):
        assert word in told, "also inside of what is known"
    assert len(Table.loads(json.dumps(data | {f"extra{number}": 1 for number in range(1000)})).notes) == 20


def test_a_table_that_could_not_be_read_back_is_not_written():
    reader = ReadConfig(1, 64, 1)
    for wrong, message in (
        ({"effort": "two\nlines"}, "effort is no text"),
        ({"measure": {"x": math.nan}}, "it has the number NaN"),
        ({"measure": {"x": object()}}, "the table cannot be written"),
        ({"entries": [make_entry("plain", 0, reader)]}, r"\$.entries\[0\].rows"),
        ({"entries": [make_entry("plain", n, reader, checked="x" * 300) for n in range(1, 4000)]}, "longer"),
    ):
        with pytest.raises(BadFileError, match=message):
            make_table(**wrong).dumps()


def test_a_table_is_found_and_read_without_torch():
    code = "import sys; from sgl_flashsample.tables import schema, lookup; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
