"""Tuned tables for the tests: one with every field filled, and one for this machine, both paths in turns."""

from __future__ import annotations

import msgspec

from sgl_flashsample.defaults import defaults_digest, family_of
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kinds import KIND_NAMES, Config, path_of
from sgl_flashsample.paths import Parts
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.fingerprint import machine_code
from sgl_flashsample.tables.schema import ITEMSIZE, Confirmed, Device, Entry, HeadShape, Table, config_fields

H200 = Device(name="NVIDIA H200", cc="9.0", sms=132, l2_mb=50, smem_optin=232_448)
CPU = Device(name="cpu", cc="0.0", sms=0, l2_mb=0, smem_optin=0)
CODE = "0a1b2c3d4e5f6071"  # machine code that no configuration has
HEAD = HeadShape(vocab=128_256, hidden=4096, dtype="bf16")


def make_entry(kind: str, rows: int, config: Config, code: str = CODE, **evidence: object) -> Entry:
    """What batches of this kind and size take."""
    return Entry(kind=kind, rows=rows, path=path_of(config).value, config=config_fields(config), code=code, **evidence)


def make_table(device: Device = H200, head: HeadShape = HEAD, **changes: object) -> Table:
    tma = float(device.cc) >= 9.0
    fused, read = TileConfig(16, 128, 256, 4, 3, tma=tma), ReadConfig(1, 512, 1, ctas_per_sm=32)

    def measured(kind: str, rows: int, config: Config, us: float) -> Entry:
        evidence = {
            "us": us,
            "se": 0.4,
            "n": 150,
            "default": "fused-16",
            "default_us": us + 20.0,
            "gain": 0.07,
            "against": 5,
        }
        evidence |= {"tied": ["fused-32"], "checked": "tokens, G-test", "clock_mhz": 1965.0}
        evidence |= {"others": {"gemm+flashinfer": us + 80.0, "logits": us + 15.0}}
        return make_entry(kind, rows, config, **evidence)

    family = family_of(device.cc)
    table = Table(
        device=device,
        head=head,
        effort="full",
        defaults=defaults_digest(family, ITEMSIZE[head.dtype], head.hidden) if family else "",
        tool={"sgl_flashsample": "0.1.0", "noise": 2},
        env={"triton": "3.6.0", "torch": "2.11.0", "cuda": "13.0", "driver": "580.82.07"},
        measure={"mode": "cuda_graph", "weights": "cold", "rounds": 15, "profiles": ["peaked", "flat"]},
        provenance={"when": "2026-11-20T09:00:00Z", "trials": 212, "seconds": 171.5, "seed": 0},
        rejected={"shared_memory": 14},
        entries=[
            measured("edit+truncate", 16, fused, 340.0),
            measured("plain", 1, fused, 284.0),
            measured("plain", 4, read, 287.5),
            measured("plain", 16, fused, 286.0),
        ],
        confirmed={
            "edit+truncate": Confirmed(rows=[32], us=[345.0], code=[CODE]),
            "plain": Confirmed(
                rows=[32, 128],
                us=[290.0, 353.0],
                gemm_us=[255.0, 270.5],
                against=[0, 4],
                code=[CODE, CODE],
            ),
        },
    )
    return msgspec.structs.replace(table, **changes)


def table_for_this_machine(head: LMHead) -> Table:
    """Paths in turns over batches of up to 16 rows, of all kinds without a screen, as if measured here."""
    device, parts = head.weight.device, Parts.of(head)
    if device.type == "cuda":
        configs: dict[str, Config] = {
            "narrow": TileConfig(16, 128, 64, 4, 3),
            "wide": TileConfig(32, 128, 64, 8, 2),
            "rows": ReadConfig(4, 128, 1, ctas_per_sm=32),
            "whole": ReadConfig(1, 1024, 2, ctas_per_sm=12, min_splits=64),
        }
    else:  # few programs: they are interpreted
        configs = {
            "narrow": TileConfig(16, 512, 64, 4, 1, flatten=False, tma=False, reduce_rows=16),
            "wide": TileConfig(32, 1024, 32, 4, 1, flatten=False, tma=False, reduce_rows=16),
            "rows": ReadConfig(8, 512, 4, ctas_per_sm=2, reduce_rows=8),
            "whole": ReadConfig(16, 1024, 4, ctas_per_sm=1, reduce_rows=16),
        }
    turns = {
        "edit": {1: "whole", 4: "narrow", 8: "rows"},
        "edit+truncate": {2: "whole", 8: "wide"},
        "greedy": {1: "whole", 8: "narrow"},
        "plain": {1: "narrow", 2: "rows", 4: "wide", 8: "whole", 16: "narrow"},
        "truncate": {1: "rows", 2: "narrow", 16: "wide"},
    }

    def measured(kind: str, rows: int, config: Config) -> Entry:
        code = machine_code(config, KIND_NAMES[kind], parts) or CODE  # without a GPU nothing is compiled
        return make_entry(kind, rows, config, code, us=100.0, se=0.1, n=15)

    return make_table(
        lookup.device_of(device),
        lookup.head_shape_of(head),
        entries=[measured(kind, rows, configs[name]) for kind, sizes in turns.items() for rows, name in sizes.items()],
        confirmed={},
        env=lookup.environment(),
    )
