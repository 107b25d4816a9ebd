"""Tuned tables for the tests: one with every field filled, and one for this machine, both paths in turns."""

from __future__ import annotations

import dataclasses

import torch
from sgl_flashsample.kernels.tiles import ReadConfig, TileConfig

from sgl_flashsample import resolution
from sgl_flashsample.sources import sources_hash
from sgl_flashsample.table import Bucket, Choice, Device, HeadShape, Table
from sgl_flashsample.work import Work

H200 = Device("NVIDIA H200", "9.0", 132, 50, 232_448)
CPU = Device("cpu", "0.0", 0, 0, 0)
HEAD = HeadShape(128_256, 4096, "bf16")


def make_table(device: Device = H200, head: HeadShape = HEAD, **changes: object) -> Table:
    tma = device.cc >= "9.0"
    configs = {
        "fused-16": Choice.of(TileConfig(16, 128, 256, 4, 3, tma=tma)),
        "fused-32": Choice.of(TileConfig(32, 128, 128, 8, 5, tma=tma)),
        "default": Choice.of(TileConfig(16, 128, 128, 4, 4, tma=tma)),
        "read": Choice.of(ReadConfig(1, 512, 1, ctas_per_sm=32)),
    }

    def bucket(use: str, us: float) -> Bucket:
        return Bucket(
            use=use,
            us=us,
            se=0.4,
            n=150,
            default="default",
            default_us=us / 0.93,
            gain=0.07,
            tied=["fused-32"] if use != "fused-32" else [],
            checked="tokens, G-test",
            clock_mhz=1965.0,
            others={"gemm+flashinfer": us * 1.25, "logits": us * 1.05},
        )

    table = Table(
        device=device,
        head=head,
        configs=configs,
        classes={
            "plain": {1: bucket("fused-16", 284.0), 4: bucket("read", 287.5), 16: bucket("fused-16", 286.0)}
            | {32: bucket("fused-32", 290.0), 128: bucket("read", 353.0)},
            "edit+truncate": {16: bucket("fused-16", 340.0), 32: bucket("read", 345.0)},
        },
        tool={"sgl_flashsample": "0.1.0", "noise": 1},
        env={"triton": "3.6.0", "torch": "2.11.0", "cuda": "13.0", "driver": "580.82.07"},
        measure={"mode": "cuda_graph", "weights": "cold", "rounds": 15, "profiles": ["peaked", "flat"]},
        effort="full",
        kernels={path: {"src": sources_hash(path), "space": "sha256:41aa"} for path in ("fused", "logits")},
        rejected=[
            {"config": {"block_v": 256, "stages": 5}, "why": "shared_memory", "detail": "262144 of 232448 bytes"}
        ],
        provenance={"when": "2026-11-20T09:00:00Z", "trials": 212, "seconds": 171.5, "seed": 0},
    )
    return dataclasses.replace(table, **changes)


def table_for_this_machine(device: torch.device, head: HeadShape) -> Table:
    """Paths in turns over batches of up to 16 rows, in all classes, as if measured here."""
    if device.type == "cuda":
        launches = {
            "narrow": TileConfig(16, 128, 64, 4, 3),
            "wide": TileConfig(32, 128, 64, 8, 2),
            "rows": ReadConfig(4, 128, 1, ctas_per_sm=32),
            "whole": ReadConfig(1, 1024, 2, ctas_per_sm=12, least_parts=64),
        }
    else:  # few programs: they are interpreted
        launches = {
            "narrow": TileConfig(16, 512, 64, 4, 1, flatten=False, tma=False, reduce_rows=16),
            "wide": TileConfig(32, 1024, 32, 4, 1, flatten=False, tma=False, reduce_rows=16),
            "rows": ReadConfig(8, 512, 4, ctas_per_sm=2, reduce_rows=8),
            "whole": ReadConfig(16, 1024, 4, ctas_per_sm=1, reduce_rows=16),
        }
    turns = {
        Work.PLAIN: {1: "narrow", 2: "rows", 4: "wide", 8: "whole", 16: "narrow"},
        Work.GREEDY: {1: "whole", 8: "narrow"},
        Work.TRUNCATE: {1: "rows", 2: "narrow", 16: "wide"},
        Work.EDIT: {1: "whole", 4: "narrow", 8: "rows"},
        Work.EDIT_AND_TRUNCATE: {2: "whole", 8: "wide"},
    }
    return make_table(
        resolution.device_of(device),
        head,
        configs={key: Choice.of(config) for key, config in launches.items()},
        classes={
            work.value: {rows: Bucket(key, 100.0, 0.1, 15) for rows, key in buckets.items()}
            for work, buckets in turns.items()
        },
        env=resolution.environment(),
    )
