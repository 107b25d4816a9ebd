"""Corrupted tables: none raises, none takes long, and an accepted one changes no token."""

from __future__ import annotations

import copy
import json
import random
import time

import pytest
import torch
from core_examples import assert_reference, example
from kernel_cases import take
from tuned_tables import table_for_this_machine

from sgl_flashsample import Head
from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.kinds import KIND_NAMES, PLAIN
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.lookup import ResolvedTable, Target

pytestmark = pytest.mark.slow

VALUES = [None, True, False, 0, 1, -1, 2, 3, 16, 24, 1 << 20, 10**40, -(10**40), 0.5, -0.0, 1e300, "", "16", "\n"]
VALUES += ["é" * 400, "\u202e", [], {}, [[]], {"": {}}, [1] * 5000, "fused", "plain", "screened", "../..", {"a": {}}]
KEYS = ["fused", "plain", "rows", "1", "-1", "ü", "", "x" * 301, "__class__", "\ud800", "\u202e", "٣"]
TEXTS = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"01",
    b"0x1",
    b"9" * 18,
    b"9" * 5_000,
    b"-" + b"1" * 100,
    b"1." + b"3" * 3_000,
]
TEXTS += [b"[" * depth + b"1" + b"]" * depth for depth in (5, 990, 60_000)] + [b'{"a":' * 5_000 + b"1" + b"}" * 5_000]
WAYS = ["bytes", "cut", "line", "text", "value", "value", "number", "number", "number", "key", "move", "remove"]


def places(value):
    """Every place in a JSON value: the object or list, and the key in it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(inner)


def corrupted(text: str, seed: int) -> bytes:
    """A table's text with one random defect."""
    chance, raw, data = random.Random(seed), text.encode(), json.loads(text)
    way = chance.choice(WAYS)
    if way == "bytes":
        flipped = bytearray(raw)
        for _ in range(chance.choice((1, 1, 2, 8, 100))):
            flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        return bytes(flipped)
    if way == "cut":
        first, last = sorted(chance.choices(range(len(raw)), k=2))
        return chance.choice((raw[:first], raw[last:], raw[:first] + raw[last:], raw[:last] + raw[first:]))
    if way == "line":
        line = chance.choice([line for line in text.splitlines() if line.endswith(",")])
        return text.replace(line, f"{line}\n{line}", 1).encode()
    every = list(places(data))
    # Where a change is the likeliest to be accepted: in sizes and configurations.
    numbers = [(at, key) for at, key in every if key == "rows" or (isinstance(at, dict) and "block_b" in at)]
    at, key = chance.choice(numbers if way == "number" else every)
    if way == "number":
        at[key] = int(at[key] * chance.choice((2, 2, 4, 0.5, 0.5, 64, -1)))
    elif way == "value":
        at[key] = chance.choice(VALUES)
    elif way == "key" and isinstance(at, dict):
        at[chance.choice(KEYS)] = at.pop(key)
    elif way == "move":
        other, place = chance.choice(every)
        at[key] = copy.deepcopy(other[place])
    elif way == "remove":
        del at[key]
    elif way == "text":
        at[key] = "@"
    return json.dumps(data).encode().replace(b'"@"', chance.choice(TEXTS))


@pytest.fixture(scope="module")
def head():
    """On the CPU: a configuration that only corruption brings may not compile for a GPU, and is refused there later."""
    return example(torch.device("cpu")).head


@pytest.fixture(
    scope="module", params=[300, pytest.param(10_000, marks=pytest.mark.full)], ids=["300 variants", "10,000 variants"]
)
def accepted(request, head, tmp_path_factory) -> list[ResolvedTable]:
    """The rest of the variants: the different tables that are used."""
    folder, shape = tmp_path_factory.mktemp("fuzz"), lookup.head_shape_of(head)
    target = Target(lookup.device_of(head.weight.device), shape, lookup.environment())
    text = table_for_this_machine(head).dumps()
    file, tables, used = folder / "table.json", {}, 0
    for seed in range(request.param):
        file.write_bytes(corrupted(text, seed))
        started = time.process_time()
        table_file, warnings = lookup.find(target, file, {"SGLANG_CACHE_DIR": str(folder)})
        # A sound table takes under a millisecond. The limit leaves room for garbage collection in a large process.
        assert time.process_time() - started < 1.0, (seed, "no table may take long")
        assert (table_file is None) == bool(warnings), seed
        assert all(line.isprintable() and len(line) < 700 for line in warnings), seed
        if table_file is not None:
            used += 1
            assert all(note.isprintable() for note in (*table_file.differs, *table_file.table.notes)), seed
            tables.setdefault(repr((table_file.table.entries, table_file.table.confirmed)), table_file)
    assert request.param * 0.1 < used < request.param * 0.9, "some are used and some are refused, or this tests nothing"
    resolved = []
    for table_file in list(tables.values())[: request.param // 5]:
        dispatch, warnings = lookup.dispatch_of(table_file, target, HeadTraits.of(head))
        resolved.append(ResolvedTable(dispatch, table_file, "this head", tuple(warnings)))
    return resolved


def test_a_corrupted_table_is_a_miss_or_in_bounds_and_never_an_error(accepted):
    for table in accepted:
        assert table.line().isprintable() and all(line.isprintable() for line in table.warnings)
        assert table.table_file.table.dumps()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_what_is_accepted_draws_the_references_tokens(accepted, head, request):
    """Configurations that only corruption brings, each in one launch."""
    device, full = head.weight.device, request.node.callspec.params["accepted"] > 300
    right = {entry.configuration for entry in table_for_this_machine(head).entries}
    brought = {}
    for table in accepted:
        for kind, rows, config in table.dispatch.configs_up_to(6):
            if config not in right and table.dispatch.is_measured(rows, kind):
                brought.setdefault((kind, config), (table.dispatch, rows))
    for kind, most in [(PLAIN, 24 if full else 6), (KIND_NAMES["truncate"], 8 if full else 2)]:
        chosen = random.Random(0).sample(sorted((one for one in brought if one[0] == kind), key=repr), most)
        case = example(device, kind, 6)
        for table, rows in map(brought.get, chosen):
            params = take(case.params, torch.arange(rows))
            assert_reference(Head(case.head, table=table).draw(case.hidden[:rows], params).token_ids, case)
