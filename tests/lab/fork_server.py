"""Processes of a server start with PyTorch and Transformers imported: for tests on a machine without a GPU.

SGLang spawns a server's processes, and each imports everything again: more than half of what a server's start takes.
Here the first process imports the packages of others, and forks one that waits for nothing but to fork again. A process
that SGLang spawns is a fork of that one. It imports SGLang and this package as ever, and finds its plugins anew, with
the environment that its parent has by then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys

LAUNCHER = "sglang.launch_server"  # a word of the command of a server
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torchvision", "triton"),
    *("transformers", "transformers.processing_utils", "transformers.masking_utils", "transformers.modeling_layers"),
    *("openai", "openai.types.responses", "openai.types.graders", "compressed_tensors", "xgrammar", "IPython"),
    *("scipy.stats", "aiohttp", "fastapi", "uvicorn", "PIL.Image", "huggingface_hub", "gguf", "opentelemetry.sdk"),
)
_SET_PDEATHSIG = 1  # of prctl(2)


def start() -> None:
    """In a server's first process, before it imports anything of its own."""
    if not (3, 11) <= sys.version_info < (3, 14) or LAUNCHER not in sys.orig_argv:
        return  # a later Python starts its fork server in another way
    gc.disable()  # nearly all that imports make stays: to look for garbage in it is a seventh of their time
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _carry_environment()
    _fork()


def _carry_environment() -> None:
    """A fork has the environment of its parent at the time of its start, as a spawned process has."""
    from multiprocessing import spawn

    describe, prepare = spawn.get_preparation_data, spawn.prepare

    def described(name):
        return describe(name) | {"environment": dict(os.environ)}

    def prepared(data):
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        environment = data.pop("environment")
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = described, prepared


def _fork() -> None:
    """Start the process that waits, and let ``spawn`` fork it."""
    import ctypes
    import socket
    from multiprocessing import connection, context, forkserver, popen_forkserver

    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()
    first = os.getpid()
    process = os.fork()
    if process == 0:
        os.close(held)
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # SGLang's processes end when their parent does
        signal.signal(signal.SIGQUIT, lambda *about: os.kill(first, signal.SIGQUIT))  # they tell their parent by it
        try:
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, process
    context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)
