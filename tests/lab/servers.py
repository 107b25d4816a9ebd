"""SGLang servers on this machine: on its GPU, else on the pretended platform of ``cpu_platform.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sgl_flashsample.tools.server import Server

from . import cpu_platform


def server_on_this_machine(
    model: Path | str,
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Server:
    """A server, not started. Arguments and options: of ``Server.on_this_machine``."""
    pretended = {} if torch.cuda.is_available() else cpu_platform.environment(log.parent / "cpu")
    return Server.on_this_machine(
        model, arguments, log=log, environment={**pretended, **(environment or {})}, **options
    )
