"""A tuned table: written and read back the same, one text for one table, and one line for whatever is wrong in it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sgl_flashsample.kernels.tiles import ReadConfig, ScreenConfig, TileConfig
from tuned_tables import HEAD, make_table

from sgl_flashsample import bounded_json, table_entries
from sgl_flashsample.table import SCHEMA, Bucket, Choice, HeadShape, Table, TableError, file_name
from sgl_flashsample.work import Work

TEXT = make_table().dumps()


def changed(place: str, value: Any) -> str:
    """The table's text with ``value`` at ``place``, a dotted path; ``...`` takes the entry away."""
    data = json.loads(TEXT)
    *parents, last = place.split(".")
    at = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(data)


def test_what_is_written_is_read_back_and_written_the_same():
    table = make_table()
    assert Table.loads(TEXT) == table
    assert Table.loads(TEXT).dumps() == TEXT
    assert table.notes == Table.loads(TEXT).notes == ()


def test_the_text_is_the_same_whatever_the_order_of_its_parts():
    table = make_table()
    data = json.loads(TEXT)
    backwards = {key: data[key] for key in reversed(data)}
    assert Table.loads(json.dumps(backwards)).dumps() == TEXT
    shuffled = {work: dict(reversed(buckets.items())) for work, buckets in reversed(table.classes.items())}
    assert dataclasses.replace(table, classes=shuffled).dumps() == TEXT


def test_keys_are_sorted_batch_sizes_by_size_and_a_changed_bucket_changes_its_own_lines():
    data = json.loads(TEXT)
    assert list(data) == sorted(data)
    assert list(data["classes"]["plain"]) == ["1", "4", "16", "32", "128"]
    other = make_table()
    other.classes["plain"][4] = dataclasses.replace(other.classes["plain"][4], us=200.0, use="fused-16")
    lines = list(zip(TEXT.splitlines(), other.dumps().splitlines(), strict=True))
    assert sum(mine != theirs for mine, theirs in lines) == 2
    assert TEXT.endswith("}\n") and '\n  "schema": "flashsample-tune/1"' in TEXT


names = st.text("abcdefgh-_+.0123456789é", min_size=1, max_size=12)
numbers = st.floats(0.001, 1e6) | st.integers(1, 10**6)
tiles = st.builds(
    TileConfig,
    *(st.sampled_from(values) for values in ((16, 64), (32, 256), (16, 128), (1, 8))),
    st.integers(1, 8),
    flatten=st.booleans(),
    tma=st.booleans(),
)
readers = st.builds(ReadConfig, st.sampled_from((1, 8)), st.sampled_from((32, 512)), st.sampled_from((1, 4)))


screens = st.builds(
    ScreenConfig,
    *(st.sampled_from(values) for values in ((8, 64), (64, 256), (32, 256), (1, 8))),
    st.integers(1, 8),
    flatten=st.booleans(),
    chunk=st.integers(16, 200),
    rescore_d=st.sampled_from((16, 256)),
    prefetch=st.booleans(),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    configs = draw(st.dictionaries(names, (tiles | readers | screens).map(Choice.of), min_size=1, max_size=4))
    keys = st.sampled_from(sorted(configs))
    buckets = st.builds(
        Bucket,
        use=keys,
        us=numbers,
        se=numbers,
        n=st.integers(0, 1000),
        default=keys | st.just(""),
        default_us=numbers,
        gain=st.floats(-2, 1),
        tied=st.lists(keys, max_size=3),
        checked=names,
        others=st.dictionaries(names, numbers, max_size=3),
    )
    return make_table(
        head=draw(
            st.builds(HeadShape, st.integers(1, 300_000), st.integers(1, 9000), st.sampled_from(("bf16", "fp32")))
        ),
        configs=configs,
        classes=draw(
            st.dictionaries(st.sampled_from([*map(str, Work)]), st.dictionaries(st.integers(1, 65_536), buckets))
        ),
        env=draw(st.dictionaries(names, names, max_size=3)),
        measure=draw(st.dictionaries(names, names | numbers | st.lists(numbers, max_size=2), max_size=3)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables())
def test_any_table_survives_the_round_trip(table):
    text = table.dumps()
    assert Table.loads(text) == table
    assert Table.loads(text).dumps() == text


def test_a_choice_is_a_launch_and_back():
    screen = ScreenConfig(8, 64, 256, 4, 4, ctas_per_sm=2, prefetch=False)
    for launch in (TileConfig(16, 64, 32, 8, 4, tma=False), ReadConfig(4, 512, 4, least_parts=64), screen):
        assert Choice.of(launch).launch == launch
    assert Choice("fused", {"block_b": 16, "block_v": 64, "block_d": 32, "num_warps": 4, "stages": 2}).launch.flatten
    assert Choice.of(screen).path == "screened"
    assert Choice("speculative", {"hot": 4096}).launch is None, "a path of a later release"


@pytest.mark.parametrize(
    "device, head, name",
    [
        ("NVIDIA H200", HEAD, "fs1,device=NVIDIA_H200,V=128256,D=4096,tp=1,w=bf16.json"),
        (
            "NVIDIA RTX PRO 6000 / é",
            HeadShape(262_144, 3840, "fp16", 4, True),
            "fs1,device=NVIDIA_RTX_PRO_6000_,V=262144,D=3840,tp=4,w=fp16,softcap.json",
        ),
        ("../x", HeadShape(1, 1, "fp32"), "fs1,device=.._x,V=1,D=1,tp=1,w=fp32.json"),
    ],
)
def test_the_file_name_shows_device_and_head_and_is_one_name_in_one_folder(device, head, name):
    assert file_name(device, head) == name
    assert make_table(dataclasses.replace(make_table().device, name=device), head).file_name == name


WRONG = [
    ("schema", "flashsample-tune/2", "schema is 'flashsample-tune/2'; expected 'flashsample-tune/1'"),
    ("schema", ["flashsample-tune/1"], "schema is a list; expected 'flashsample-tune/1'"),
    ("schema", ..., "schema is None"),
    ("device", ..., "device is missing"),
    ("device", [], "device is a list; expected an object"),
    ("device.name", "", "device.name is ''; expected a text of 1 to 300 printable characters"),
    ("device.name", "a\nb", r"device.name is 'a\nb'; expected a text"),
    ("device.name", "\ud800", r"device.name is '\ud800'; expected a text"),
    ("device.cc", "nine", "device.cc is 'nine'; expected a compute capability such as '9.0'"),
    ("device.sms", True, "device.sms is True; expected an integer from 0"),
    ("device.sms", 10**30, "device.sms is a huge number; expected an integer from 0"),
    ("device.smem_optin", ..., "device.smem_optin is missing"),
    ("head.vocab", 0, "head.vocab is 0; expected an integer from 1"),
    ("head.vocab", 1.5, "head.vocab is 1.5; expected an integer from 1"),
    ("head.dtype", "int8", "head.dtype is 'int8'; expected one of bf16, fp16, fp32"),
    ("head.dtype", {}, "head.dtype is an object; expected one of"),
    ("head.softcap", 1, "head.softcap is 1; expected true or false"),
    ("env", {"triton": 3.6}, "env.triton is 3.6; expected a text"),
    ("env", {"x": "y" * 301}, "env.x is 'yyy"),
    ("tool", "x", "tool is 'x'; expected an object"),
    ("effort", None, "effort is None; expected a text"),
    ("measure", {"a": {"b": {"c": {"d": 1}}}}, "measure.a.b.c.d is nested too deeply"),
    ("measure", {"a": 1e19}, "measure.a is 1e+19; expected a number from -1e+18 to 1e+18"),
    ("measure", {"a": [0] * 4097}, "measure.a has 4097 entries; expected 4096 or fewer"),
    ("kernels.fused", "x", "kernels.fused is 'x'; expected an object"),
    ("kernels.fused.src", 7, "kernels.fused.src is 7; expected a text"),
    ("configs", ..., "configs is missing"),
    ("configs.read", 3, "configs.read is 3; expected an object"),
    ("configs.read.path", "", "configs.read.path is ''; expected a text of 1"),
    ("configs.read.config.block_v", ..., "configs.read.config.block_v is missing"),
    ("configs.read.config.block_v", 500, "configs.read.config: ReadConfig.block_v is 500; expected a power of two"),
    ("configs.read.config.stages", 17, "configs.read.config.stages is 17; expected an integer from 1 to 16"),
    ("configs.read.config.num_warps", True, "configs.read.config.num_warps is True; expected an integer from 1 to 32"),
    ("configs.fused-16.config.tma", 1, "configs.fused-16.config.tma is 1; expected true or false"),
    ("configs.fused-16.config.block_v", 2**17, "configs.fused-16.config has a block of more than 1048576 elements"),
    ("classes", ..., "classes is missing"),
    ("classes.plain", [], "classes.plain is a list; expected an object"),
    ("classes.plain.0", {}, "classes.plain has the batch size '0'; expected 1 to 65536"),
    ("classes.plain.016", {}, "classes.plain has the batch size '016'; expected 1 to 65536"),
    ("classes.plain.99999", {}, "classes.plain has the batch size '99999'; expected 1 to 65536"),
    ("classes.plain.16.use", "nobody", "classes.plain.16.use is 'nobody'; expected a key of configs"),
    ("classes.plain.16.use", [], "classes.plain.16.use is a list; expected a key of configs"),
    ("classes.plain.16.us", 0, "classes.plain.16.us is 0; expected a number from 1e-06"),
    ("classes.plain.16.us", "1", "classes.plain.16.us is '1'; expected a number from 1e-06"),
    ("classes.plain.16.us", ..., "classes.plain.16.us is missing"),
    ("classes.plain.16.se", -1, "classes.plain.16.se is -1; expected a number from 0"),
    ("classes.plain.16.n", 1.0, "classes.plain.16.n is 1.0; expected an integer from 0"),
    ("classes.plain.16.default", "nobody", "classes.plain.16.default is 'nobody'; expected a key of configs"),
    ("classes.plain.16.gain", 1.5, "classes.plain.16.gain is 1.5; expected a number from -1e+06 to 1"),
    ("classes.plain.16.tied", ["read", 3], "classes.plain.16.tied[1] is 3; expected a key of configs"),
    ("classes.plain.16.others", {"x": None}, "classes.plain.16.others.x is None; expected a number from 0"),
    ("classes.plain.16.checked", 5, "classes.plain.16.checked is 5; expected a text"),
    ("rejected", {}, "rejected is an object; expected a list"),
    ("rejected.0", 1, "rejected[0] is 1; expected an object"),
    ("rejected.0.why", ..., "rejected[0].why is missing"),
    ("provenance", {"k" * 301: 1}, "a key of provenance is 'kkk"),
]


@pytest.mark.parametrize("place, value, message", WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named_in_one_line(place, value, message):
    with pytest.raises(TableError) as caught:
        Table.loads(changed(place, value))
    said = str(caught.value)
    assert said.startswith(message)
    assert "\n" not in said and len(said) < 400


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "it is not JSON: Expecting value"),
        (TEXT[:-2], "it is not JSON: "),
        ("[1, 2]", "the table is a list; expected an object"),
        ("7", "the table is 7; expected an object"),
        ('{"schema": NaN}', "it has the number NaN; expected finite ones"),
        ('{"schema": -Infinity}', "it has the number -Infinity; expected finite ones"),
        (TEXT.replace('"us": 284.0', '"us": 1e999'), "classes.plain.1.us is inf; expected a number"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice in one object"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"n": ' + "9" * 5000 + "}", "it is not JSON: Exceeds the limit"),
        ('"' + "x" * (1 << 20) + '"', "it is longer than 1048576 bytes"),
        ('"' + "é" * (1 << 19) + '"', "it is longer than 1048576 bytes"),
    ],
    ids=range(12),
)
def test_a_text_that_is_no_table_is_refused_in_one_line(text, message):
    with pytest.raises(TableError) as caught:
        Table.loads(text)
    assert str(caught.value).startswith(message)


def test_what_a_later_release_adds_is_ignored_with_a_note_wherever_it_is():
    data = json.loads(TEXT)
    data["schema"] += ".7"
    data["extra"] = data["device"]["extra"] = data["head"]["extra"] = {"deep": [1]}
    data["classes"]["draft"] = {"1": "of any form"}
    data["classes"]["plain"]["4"]["energy_mj"] = 12.5
    data["configs"]["read"]["config"]["warp_specialize"] = True
    data["configs"]["new"] = {"path": "speculative", "config": {"hot": 4096}}
    found = Table.loads(json.dumps(data))
    assert "draft" not in found.classes
    assert found.configs.pop("new") == Choice("speculative", {"hot": 4096})
    assert found == make_table()
    told = " ".join(found.notes)
    for word in ("extra", "device.extra", "classes.draft", "energy_mj", "warp_specialize", "'speculative'"):
        assert word in told
    assert len(found.notes) == 7


def test_a_table_that_could_not_be_read_back_is_not_written():
    table = make_table()
    for wrong, message in (
        ({"effort": "two\nlines"}, "effort is"),
        ({"measure": {"x": math.nan}}, "the table cannot be written"),
        ({"measure": {"x": object()}}, "the table cannot be written"),
        ({"classes": {"plain": {0: table.classes["plain"][1]}}}, "classes.plain has the batch size '0'"),
        ({"provenance": {str(i): "x" * 300 for i in range(4000)}}, "it is longer than"),
    ):
        with pytest.raises(TableError, match=message):
            dataclasses.replace(table, **wrong).dumps()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("terms", 3, "terms is 3; expected an integer from 1 to 2"),
        ("block_b", 4, "ScreenConfig.block_b is 4; expected a power of two of at least 8"),
        ("rescore_v", 4096, "has a block of more than 1048576 elements"),
        ("chunk", 15, "ScreenConfig.chunk is 15; expected 16 or more"),
        ("prefetch", 1, "prefetch is 1"),
        ("rescore_stages", 99, "rescore_stages is 99; expected an integer from 1 to 16"),
    ],
)
def test_a_screened_configuration_is_held_to_its_bounds(field, value, message):
    screen = Choice.of(ScreenConfig(8, 64, 256, 4, 4, rescore_d=512))
    table = make_table()
    wrong = dataclasses.replace(screen, config=screen.config | {field: value})
    with pytest.raises(TableError, match=message):
        dataclasses.replace(table, configs=table.configs | {"screen": wrong}).dumps()


def test_every_numeric_field_of_a_configuration_has_an_upper_bound():
    for kind in table_entries.LAUNCHES.values():
        numeric = {field.name for field in dataclasses.fields(kind) if field.type == "int"}
        assert numeric <= set(table_entries.MOST_OF_FIELD)


def test_a_table_is_read_without_torch():
    code = "import sys; from sgl_flashsample.table import Table; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_reading_takes_nothing_out_of_what_it_reads():
    data = json.loads(TEXT)
    before = copy.deepcopy(data)
    reader = bounded_json.Reader()
    reader.object("x", data).clear()
    assert data == before
    assert data["schema"] == SCHEMA
