"""SGLang on a machine without a GPU, for demonstration and tests: plain PyTorch on the CPU, rows drawn in host memory.

SGLang's own CPU engine needs AMX kernels that are not on PyPI, so this adds a platform through SGLang's own
entry point group ``sglang.srt.platforms``. It is no part of the package. ``write_entry_points`` writes the entry points
to a folder: ``bootstrap.py`` to that of the packages of ``.venv``, ``environment`` to one that only the servers it is
given to have on their path.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import types
from pathlib import Path

_ENTRY_POINTS = """\
[sglang.srt.platforms]
flashsample_cpu = lab.cpu_platform:activate

[sglang.srt.plugins]
flashsample_cpu_arguments = lab.cpu_platform:keep_sampling_backend
flashsample_cpu_speculation = lab.cpu_platform:prepare_speculation
flashsample_cpu_quantisation = lab.cpu_platform:support_quantised_heads
flashsample_cpu_determinism = lab.cpu_platform:support_determinism
flashsample_cpu_controller = lab.cpu_platform:replace_controller
"""
# Garbage collections take a fifth of a server's start at Python's thresholds, because SGLang imports so much.
_FEWER_COLLECTIONS = "import gc\n\ngc.set_threshold(300_000, 10, 10)\n"
_FORK_SERVER = "from lab import fork_server\n\nfork_server.start()\n"
_METADATA = "Metadata-Version: 2.1\nName: flashsample-cpu-demo\nVersion: 0\n"
VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with a penalty waits for a compiler
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",  # the other way is a kernel for GPUs
    "OMP_NUM_THREADS": "1",  # the models are tiny: threads that wait for each other only cost
}


def write_entry_points(folder: Path) -> None:
    """Let processes that have ``folder`` on their path find the platform: a distribution's metadata, and a link to this
    package."""
    info = folder / "flashsample_cpu_demo-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (info / "METADATA").write_text(_METADATA)
    link = folder / f"lab-{os.getpid()}"
    link.symlink_to(Path(__file__).resolve().parent)
    link.replace(folder / "lab")  # also one that leads to a checkout elsewhere


def environment(folder: Path) -> dict[str, str]:
    """Environment variables of a server on the CPU; ``folder`` receives the files that they point to. Its rows are
    drawn in host memory, or, without Numba, by interpreted kernels."""
    from sgl_flashsample.cpu_path import unsupported_by_machine

    write_entry_points(folder)
    schemas = Path(__file__).with_name("torchvision_schemas.py").read_text()
    (folder / "sitecustomize.py").write_text("\n\n".join([schemas, _FEWER_COLLECTIONS, _FORK_SERVER]))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "0" if unsupported_by_machine() is None else "1",
        "CUDA_VISIBLE_DEVICES": "",
        **VARIABLES,
    }


def activate() -> str:
    """Entry point: the platform class."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from . import interpreter

        interpreter.patch()
    return "lab.cpu_platform.NativeCpuPlatform"


def keep_sampling_backend() -> None:
    """Entry point: SGLang forces the pytorch sampling backend on a CPU; let the chosen one through."""
    import importlib

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.arg_groups.platform_hook.handle_cpu_backends"
    try:
        if not hasattr(importlib.import_module(target.rpartition(".")[0]), "handle_cpu_backends"):
            raise ImportError
    except ImportError:  # up to 0.5.18
        target = "sglang.srt.server_args.ServerArgs._handle_cpu_backends"
    HookRegistry.register(target, lambda server_args: None, HookType.REPLACE)


def support_quantised_heads() -> None:
    """Entry point: SGLang asks the GPU whether it multiplies E4M3, and then does so with kernels that are not on PyPI;
    here it multiplies the dequantised weight, with the sum in float32. Not in 0.5.17, which has no such heads."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def apply(scheme, layer, hidden, bias=None):
        return (hidden.float() @ (layer.weight.float() * layer.weight_scale.view(1, -1))).to(hidden.dtype)

    config = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
    scheme = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
    HookRegistry.register(f"{config}._check_scheme_supported", lambda *_, **named: True, HookType.REPLACE)
    HookRegistry.register(f"{scheme}.CompressedTensorsW8A8Fp8.apply_weights", apply, HookType.REPLACE)


def support_determinism() -> None:
    """Entry point: SGLang's deterministic mode knows the attention of GPUs alone, and replaces PyTorch's operators by
    kernels for GPUs."""
    if "--enable-deterministic-inference" not in sys.argv:
        return
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    target = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
    HookRegistry.register(target, lambda runner: None, HookType.REPLACE)


def replace_controller() -> None:
    """Entry point: SGLang's process that hands requests to the ranks of DP attention is ``run_controller``. It loads no
    plugins, so hooks do not reach it."""
    if "--dp-size" not in sys.argv or multiprocessing.parent_process() is not None:
        return  # the first process starts it
    from sglang.srt.entrypoints import engine

    vars(engine).update(run_data_parallel_controller_process=run_controller)


def run_controller(*arguments, **named) -> None:
    """SGLang's, but that it waits for requests: its loop asks for them without a pause, which takes a core."""
    from sglang.srt.managers import data_parallel_controller as controller

    receive = controller.sock_recv

    def wait_and_receive(socket, **options):
        socket.poll(100)
        return receive(socket, **options)

    vars(controller).update(sock_recv=wait_and_receive)
    controller.run_data_parallel_controller_process(*arguments, **named)


def support_dp_attention() -> None:
    """SGLang's DP attention takes these for granted: collectives of groups, pinned memory, the padding of an attention
    backend."""
    import functools

    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    def gather(group, output, tensor):
        torch.distributed.all_gather_into_tensor(output, tensor, group=group.device_group)

    def reduce_scatter(group, output, every):
        torch.distributed.reduce_scatter_tensor(output, every, group=group.device_group)

    class Torch:
        """torch, but that a tensor in pinned memory is one in memory."""

        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        @functools.wraps(torch.tensor)
        def tensor(*args, pin_memory=False, **options):
            return torch.tensor(*args, **options)

    GroupCoordinator.all_gather_into_tensor = gather
    GroupCoordinator.reduce_scatter_tensor = reduce_scatter
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1
    forward_batch_info.torch = Torch()


def doze() -> None:
    """Ranks of DP attention begin each step together, and one without requests sleeps for up to a second: let it look
    more often."""
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    IdleSleeper.maybe_sleep = lambda sleeper: sleeper.poller.poll(20)


def prepare_speculation() -> None:
    """Entry point: before SGLang makes the worker of a speculative algorithm."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
    HookRegistry.register(target, support_speculation, HookType.BEFORE)


def support_speculation(*arguments: object) -> None:
    """Trees of drafts are made, and NGRAM's are read, with kernels that are not on PyPI; SGLang has the same in
    Triton. Not in 0.5.17: no NGRAM there."""
    package, module = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.speculative")
    module.reconstruct_indices_from_tree_mask = None  # type: ignore[attr-defined]  # imported, and not called
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.speculative": module}
    from sglang.srt.speculative import eagle_utils

    with contextlib.suppress(ImportError):
        from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_triton

        module.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask_triton  # type: ignore[attr-defined]
    # Newer versions have a module for trees, and refuse platforms that are not SGLang's own there.
    for trees in filter(None, (eagle_utils, sys.modules.get("sglang.kernels.ops.speculative.spec_tree"))):
        build = getattr(trees, "sgl_build_tree_kernel_triton", None)
        vars(trees).update(sgl_build_tree_kernel_efficient=build, reject_out_of_tree_path=lambda *args, **named: None)


def __getattr__(name: str):
    if name != "NativeCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def supports_speculative_algorithm(self, algorithm: str) -> bool:
            return True

        def get_speculative_cache_locs_fn(self):
            import torch

            def places(req_pool_indices, req_to_token, start_offset, end_offset, **others) -> torch.Tensor:
                bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
                return torch.cat([req_to_token[row, start:end] for row, start, end in bounds]).to(torch.int64)

            return places

        def get_mha_kv_pool_cls(self):
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
            from sglang.srt.runtime_context import get_parallel

            if get_parallel().tp_size > 1:
                support_dp_attention()
            if get_parallel().dp_size > 1:
                doze()
            return MHATokenToKVPool

        def get_paged_allocator_cls(self):
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

            def make(size, *, page_size, dtype, device, kvcache, need_sort):
                return TokenToKVPoolAllocator(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)

            return make

    globals()[name] = NativeCpuPlatform
    return NativeCpuPlatform
