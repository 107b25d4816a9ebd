"""A tuned table for the tests: every field filled, both paths, interleaved over the batch sizes."""

from __future__ import annotations

import dataclasses

from sgl_flashsample.kernels.tiles import ReadConfig, TileConfig

from sgl_flashsample.table import Bucket, Choice, Device, HeadShape, Table, sources_hash

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
            tied=["fused-32"],
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
        kernels={path: {"src": sources_hash(), "space": "sha256:41aa"} for path in ("fused", "logits")},
        rejected=[
            {"config": {"block_v": 256, "stages": 5}, "why": "shared_memory", "detail": "262144 of 232448 bytes"}
        ],
        provenance={"when": "2026-11-20T09:00:00Z", "trials": 212, "seconds": 171.5, "seed": 0},
    )
    return dataclasses.replace(table, **changes)
