"""Ten thousand corrupted tables: none of them raises, none hangs, and what is still accepted changes no token."""

from __future__ import annotations

import copy
import json
import random
import time

import pytest
import torch
from sgl_flashsample.kernels.reference import lm_head_sample_ref
from tuned_tables import table_for_this_machine

from sgl_flashsample import BatchParams, LMHead, Truncation, lookup, resolution, sample
from sgl_flashsample.choices import Config
from sgl_flashsample.lookup import Found
from sgl_flashsample.resolution import Resolution
from sgl_flashsample.work import Work

VARIANTS = 10_000
SAMPLED = 24  # configurations that are drawn with
ROWS, V, D = 6, 700, 24
STRANGE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    16,
    24,
    1 << 20,
    10**40,
    -(10**40),
    0.5,
    -0.0,
    1e300,
    "",
    "16",
    "\n",
    "é" * 400,
]
STRANGE += [[], {}, [[]], {"": {}}, [1] * 5000, "fused", "logits", "plain", "../..", {"path": "logits", "config": {}}]


def places(value, at=()):
    """Every place in a JSON value, as a path of keys."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


class Corrupter:
    def __init__(self, text: str) -> None:
        self.text, self.data = text, json.loads(text)
        self.places = [at for at in places(self.data) if at]
        # Where a change is the likeliest to be accepted: numbers of configurations, and what buckets use.
        self.numbers = [at for at in self.places if at[0] == "configs" and len(at) == 4] * 3
        self.numbers += [at for at in self.places if at[0] == "classes" and at[-1] == "use"]
        self.kinds = [self.bytes_, self.cut, self.swap, self.swap, self.tweak, self.tweak, self.tweak, self.rename]
        self.kinds += [self.twice, self.constant, self.deep, self.digits, self.move, self.remove]

    def variant(self, seed: int) -> bytes:
        random_ = random.Random(seed)
        return random_.choice(self.kinds)(random_)

    def changed(self, at, change) -> bytes:
        data = copy.deepcopy(self.data)
        parent = data
        for key in at[:-1]:
            parent = parent[key]
        change(parent, at[-1])
        return json.dumps(data).encode()

    def bytes_(self, random_) -> bytes:
        data = bytearray(self.text.encode())
        for _ in range(random_.choice((1, 1, 2, 8, 100))):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        return bytes(data)

    def cut(self, random_) -> bytes:
        data = self.text.encode()
        first, last = sorted(random_.randrange(len(data)) for _ in range(2))
        return random_.choice((data[:first], data[last:], data[:first] + data[last:], data[:last] + data[first:]))

    def swap(self, random_) -> bytes:
        value = random_.choice(STRANGE)
        return self.changed(random_.choice(self.places), lambda parent, key: parent.__setitem__(key, value))

    def tweak(self, random_) -> bytes:
        def change(parent, key):
            if isinstance(parent[key], str):
                parent[key] = random_.choice(list(self.data["configs"]))
            elif isinstance(parent[key], bool):
                parent[key] = not parent[key]
            else:
                factor = random_.choice((2, 2, 4, 0.5, 0.5, 1, 64, -1))
                parent[key] = int(parent[key] * factor) + random_.choice((0, 0, 0, 1))

        return self.changed(random_.choice(self.numbers), change)

    def rename(self, random_) -> bytes:
        name = random_.choice(
            ["fused", "plain", "16", "1", "-1", "1e3", "ü", "", "x" * 301, "__class__", "\ud800", "٣"]
        )
        at = random_.choice([at for at in self.places if isinstance(at[-1], str)])
        return self.changed(at, lambda parent, key: parent.__setitem__(name, parent.pop(key)))

    def move(self, random_) -> bytes:
        other = random_.choice(self.places)
        value = self.data
        for key in other:
            value = value[key]
        at = random_.choice(self.places)
        return self.changed(at, lambda parent, key: parent.__setitem__(key, copy.deepcopy(value)))

    def remove(self, random_) -> bytes:
        return self.changed(random_.choice(self.places), lambda parent, key: parent.__delitem__(key))

    def twice(self, random_) -> bytes:
        line = random_.choice([line for line in self.text.splitlines() if '": ' in line and line.endswith(",")])
        return self.text.replace(line, f"{line}\n{line}", 1).encode()

    def constant(self, random_) -> bytes:
        at = random_.choice(self.places)
        marked = self.changed(at, lambda parent, key: parent.__setitem__(key, "@"))
        return marked.replace(
            b'"@"', random_.choice((b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"01", b"0x1"))
        )

    def deep(self, random_) -> bytes:
        depth = random_.choice((5, 50, 990, 5_000, 60_000))
        opening, closing = random_.choice(((b"[", b"]"), (b'{"a":', b"}")))
        marked = self.changed(random_.choice(self.places), lambda parent, key: parent.__setitem__(key, "@"))
        return marked.replace(b'"@"', opening * depth + b"1" + closing * depth)

    def digits(self, random_) -> bytes:
        number = random_.choice(
            (b"9" * 18, b"9" * 400, b"9" * 5_000, b"-" + b"1" * 100, b"1e400", b"1." + b"3" * 3_000)
        )
        marked = self.changed(random_.choice(self.places), lambda parent, key: parent.__setitem__(key, "@"))
        return marked.replace(b'"@"', number)


@pytest.fixture(scope="module")
def head():
    """On the CPU: a configuration that only corruption brings may not compile for a GPU, and is refused there later."""
    generator = torch.Generator().manual_seed(0)
    # Products without rounding: every order of summation gives the same logits.
    return LMHead((torch.randint(-1, 2, (V, D), generator=generator) / 4).float())


@pytest.fixture(scope="module")
def accepted(head, tmp_path_factory) -> list[Resolution]:
    """What is left of the variants: those that give a resolution with a table."""
    folder = tmp_path_factory.mktemp("fuzz")
    target = resolution.target_of(head)
    corrupter = Corrupter(table_for_this_machine(head.weight.device, target.head).dumps())
    file = folder / "table.json"
    found: list[tuple[Found, list[str]]] = []
    started = time.process_time()
    for seed in range(VARIANTS):
        file.write_bytes(corrupter.variant(seed))
        one, warnings = lookup.find(target, file, {"SGLANG_CACHE_DIR": str(folder)})
        assert (one is None) == bool(warnings), seed
        assert all("\n" not in line and line.isprintable() and len(line) < 700 for line in warnings), seed
        if one is not None:
            found.append((one, warnings))
    assert time.process_time() - started < 60, "none of them may take long"
    assert VARIANTS * 0.1 < len(found) < VARIANTS * 0.9, "both happen, or this tests nothing"
    resolved, seen = [], set()
    for one, warnings in found:
        key = repr((one.table.configs, one.table.classes))
        if key not in seen:
            seen.add(key)
            resolved.append(resolution.apply(head, target, one, warnings))
    return resolved


def test_a_corrupted_table_is_a_miss_or_in_bounds_and_never_an_error(accepted):
    for one in accepted:
        assert one.line().isprintable()
        assert one.buckets <= 25
        assert all(line.isprintable() for line in one.warnings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_an_accepted_variant_draws_the_references_tokens(accepted, head):
    """A sample of the configurations that only corruption brings, each in one launch."""
    right = {
        c.launch for c in table_for_this_machine(head.weight.device, resolution.head_shape_of(head)).configs.values()
    }
    brought: dict[Config, tuple[Resolution, int]] = {}
    for one in accepted:
        for _, rows, config in one.choices.used_up_to(ROWS):
            if config not in right and one.choices.is_tuned(rows, Work.PLAIN) and one.choices.pick(rows) == config:
                brought.setdefault(config, (one, rows))
    assert len(brought) >= SAMPLED
    chosen = random.Random(0).sample(sorted(brought, key=repr), SAMPLED)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-2, 3, (ROWS, D), generator=generator).float()
    row = torch.arange(ROWS)
    params = BatchParams((row % 3 * 0.5).float(), row * 17, row + 3)
    want = lm_head_sample_ref(hidden, head.weight, params.temperature, params.seed, params.position)
    sure = ~want.near_tie
    assert sure.sum() >= ROWS - 1
    for config in chosen:
        one, rows = brought[config]
        cut = BatchParams(params.temperature[:rows], params.seed[:rows], params.position[:rows])
        got = sample(hidden[:rows], head, cut, choices=one.choices).token_ids
        assert torch.equal(got[sure[:rows]], want.token[:rows][sure[:rows]]), config
    limits = Truncation(torch.full_like(row, 40).int(), torch.full_like(params.temperature, 0.8), row.float() * 0)
    drawn: dict[int, torch.Tensor] = {}
    truncated = {}
    for one in accepted:
        for work, rows, config in one.choices.used_up_to(2):
            if work is Work.TRUNCATE and config not in right and one.choices.is_tuned(rows, work):
                truncated[config] = one, rows
    for config in random.Random(1).sample(sorted(truncated, key=repr), 4):
        one, rows = truncated[config]
        limit = Truncation(limits.top_k[:rows], limits.top_p[:rows], limits.min_p[:rows])
        cut = BatchParams(params.temperature[:rows] + 0.5, params.seed[:rows], params.position[:rows], limit)
        if rows not in drawn:
            drawn[rows] = sample(hidden[:rows], head, cut).token_ids
        assert torch.equal(sample(hidden[:rows], head, cut, choices=one.choices).token_ids, drawn[rows]), config
