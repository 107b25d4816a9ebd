"""Runs ``sgl-flashsample`` so that its SGLang servers start also on a machine without a GPU.

    python tests/lab demo | bench | serve [arguments of the command]

Without a GPU the environment of the command, and of its servers, is that of ``cpu_platform.py``. With one it is left
alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    if not torch.cuda.is_available():
        sys.path[0] = str(tests)  # instead of this folder
        from lab import cpu_platform, fork_server, servers

        # The demonstration's models are known; ``serve`` and ``bench`` are given any.
        environment = servers.pretended_environment if sys.argv[1:2] == ["demo"] else cpu_platform.environment
        os.environ.update(environment(tests.parent / ".cache" / "cpu"))
        if sys.argv[1:2] in (["demo"], ["bench"]):
            from sgl_flashsample import cli
            from sgl_flashsample.tools.server import Server

            Server.popen = staticmethod(fork_server.popen)
            sys.exit(cli.main())
    os.execv(sys.executable, [sys.executable, "-m", "sgl_flashsample.cli", *sys.argv[1:]])
