"""Names of configurations and of devices: short, readable, the same in tables, logs and simulated devices.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..kernels.config import ReadConfig, ScreenConfig
from ..kinds import CONFIGS, BatchKind, Config, SamplingPath, path_of
from ..tables.schema import Device, HeadShape, config_fields

GEMM = "gemm"  # baseline: the vendor's GEMM alone, which draws no token

# Bytes of shared memory that a program may ask for, by compute capability: from the vendor's programming guide.
SHARED_MEMORY = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448}

# Devices that can be named on a machine without them: name as the driver gives it, compute capability, multiprocessors,
# MiB of L2 cache. A shorter name, such as "h100", means the first that fits.
DEVICES = {
    name: Device(name=name, cc=cc, sms=sms, l2_mb=l2_mb, smem_optin=SHARED_MEMORY[cc])
    for name, cc, sms, l2_mb in (
        ("NVIDIA H200", "9.0", 132, 60),
        ("NVIDIA H100 80GB HBM3", "9.0", 132, 50),
        ("NVIDIA H100 PCIe", "9.0", 114, 50),
        ("NVIDIA H800", "9.0", 132, 50),
        ("NVIDIA H20", "9.0", 78, 60),
        ("NVIDIA GH200 480GB", "9.0", 132, 60),
        ("NVIDIA GH200 120GB", "9.0", 132, 60),
        ("NVIDIA A100-SXM4-80GB", "8.0", 108, 40),
        ("NVIDIA A100-SXM4-40GB", "8.0", 108, 40),
        ("NVIDIA A100 80GB PCIe", "8.0", 108, 40),
        ("NVIDIA A100-PCIE-40GB", "8.0", 108, 40),
        ("NVIDIA A800-SXM4-80GB", "8.0", 108, 40),
        ("NVIDIA A30", "8.0", 56, 24),
        ("NVIDIA B200", "10.0", 148, 126),
        ("NVIDIA GB200", "10.0", 152, 126),
        ("NVIDIA L40S", "8.9", 142, 96),
        ("NVIDIA L40", "8.9", 142, 96),
        ("NVIDIA L4", "8.9", 58, 48),
        ("NVIDIA RTX 6000 Ada Generation", "8.9", 142, 96),
        ("NVIDIA GeForce RTX 4090", "8.9", 128, 72),
        ("NVIDIA A40", "8.6", 84, 6),
        ("NVIDIA A10", "8.6", 72, 6),
        ("NVIDIA A10G", "8.6", 80, 6),
        ("NVIDIA RTX A6000", "8.6", 84, 6),
        ("NVIDIA GeForce RTX 3090", "8.6", 82, 6),
    )
}


def device_named(name: str) -> Device:
    """The device of that name (``known_device``). Raises ValueError for a name that is not known."""
    device = known_device(name)
    if device is None:
        raise ValueError(f"--device is {name!r}; known without a GPU are {', '.join(DEVICES)}")
    return device


def known_device(name: str) -> Device | None:
    """The device whose name has all words of ``name``, whatever their case: "h200", "NVIDIA_H200"."""
    wanted = _words(name)
    return next((device for known, device in DEVICES.items() if wanted <= _words(known)), None) if wanted else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}


# Fields with a fixed place in a key; every other field appears by its name where it differs from its default.
_SAID = {"block_b", "block_v", "block_d", "num_warps", "stages", "ctas_per_sm", "min_splits", "chunk", "rescore_v"}
_SAID |= {"rescore_d", "rescore_warps", "rescore_stages", "prefetch", "listed", "early"}
_WORDS = {("flatten", False): "nested", ("tma", False): "pointers", ("hidden_tma", True): "hidden"}
_WORDS |= {("rows_first", True): "rows", ("one_launch", True): "one"}


def key_of(config: Config) -> str:
    """The name of a configuration, unique among all: path, tile, warps (w), stages (s), programs per multiprocessor
    (c), then the fields that are not at their defaults."""
    sides = [getattr(config, name) for name in ("block_b", "block_v", "block_d") if hasattr(config, name)]
    key = f"{path_of(config)}-{'x'.join(map(str, sides))}-w{config.num_warps}-s{config.stages}-c{config.ctas_per_sm}"
    if isinstance(config, ReadConfig):
        key += f"-p{config.min_splits}"
    if isinstance(config, ScreenConfig):
        key += f"-then-{config.chunk}x{config.rescore_v}x{config.rescore_d}-w{config.rescore_warps}"
        key += f"-s{config.rescore_stages}"
        key += "".join(f"-{name}" for name in ("prefetch", "listed", "early") if getattr(config, name))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SAID and value != field.default:
            name = "r" if field.name == "reduce_rows" else field.name
            key += f"-{_WORDS.get((field.name, value), f'{name}{value}')}"
    return key


def label_of(config: Config, kind: BatchKind) -> str:
    """The configuration with the kind of batch whose kernels it has (``kernel_kind``): "plain/fused-16x..."."""
    return f"{kernel_kind(kind, path_of(config))}/{key_of(config)}"


def kernel_kind(kind: BatchKind, path: str) -> BatchKind:
    """The kind of batch whose kernels ``kind`` has on this path; a study is of one such kind. Greedy batches have the
    kernels of plain ones, and a screen makes a difference on the screened path alone."""
    kind = kind._replace(greedy=False)
    return kind if path == SamplingPath.SCREENED else kind.unscreened


def config_of(path: str, fields: dict[str, Any]) -> Config:
    """The configuration with these fields. Raises ValueError or TypeError where ``path`` has no such configuration."""
    if path not in CONFIGS:
        raise ValueError(f"path is {path!r}; expected one of {', '.join(CONFIGS)}")
    return CONFIGS[SamplingPath(path)](**fields)


def contender(config: Config, kind: BatchKind) -> dict[str, Any]:
    """A configuration as it stands in requests to workers."""
    return {"path": path_of(config).value, "config": config_fields(config), "label": label_of(config, kind)}


def codes_request(head: HeadShape, choices: Iterable[tuple[Config, BatchKind]]) -> dict[str, Any]:
    """The request to a worker for the machine code of configurations."""
    named = [{"kind": str(kind), **contender(config, kind)} for config, kind in choices]
    return {"op": "codes", "head": msgspec.to_builtins(head), "choices": named}


def setup_request(
    head: HeadShape, kind: BatchKind, rows: int, configs: Mapping[str, Config], beside: Iterable[str] = ()
) -> dict[str, Any]:
    """The request to a worker before the rounds of a race. configs: by the names that rounds call them. beside:
    baselines and the flashinfer path, which are timed without competing."""
    contenders: list[dict[str, Any]] = [{"name": name, **contender(one, kind)} for name, one in configs.items()]
    contenders += [{"name": name, "path": name, "config": None} for name in beside]
    about = {"head": msgspec.to_builtins(head), "kind": str(kind), "rows": rows}
    return {"op": "setup", **about, "contenders": contenders}
