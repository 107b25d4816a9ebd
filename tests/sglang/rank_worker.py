"""One of two ranks that share an LM head, from the start of a server to its draws, over gloo and without SGLang.

    python tests/sglang/rank_worker.py RANK PORT FOLDER FAULT [FAULT ...]

For each fault, which strikes rank 1 alone: the ranks start anew, draw, and print as a line of JSON what they serve.
They exchange through memory that both reach, files in FOLDER; by collectives where that is "".
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from head_states import (
    CPU,
    RANK_ROWS,
    VOCAB,
    Model,
    hidden_states,
    make_head,
    pretended_sglang,
    rank_batches,
    step_of,
    weights,
)
from rank_group import Group, sleep_while_waiting

CONFIG, contents = pretended_sglang()
MODULES = {name: types.ModuleType(name) for name in contents}
for name, attributes in contents.items():
    vars(MODULES[name]).update(attributes)
sys.modules.update(MODULES)

from sgl_flashsample import WantedLogprobs, paths, screen, screen_race, selfcheck  # noqa: E402
from sgl_flashsample.head import Head  # noqa: E402
from sgl_flashsample.kernels.merge_ranks import merge_records  # noqa: E402
from sgl_flashsample.sglang import exchange, head, runtime, settings, support  # noqa: E402
from sgl_flashsample.sglang.draw import draw  # noqa: E402
from sgl_flashsample.sglang.head import HeadState  # noqa: E402
from sgl_flashsample.sglang.lazy_logits import LazyLogits  # noqa: E402
from sgl_flashsample.sglang.logprobs import AskedLogprobs  # noqa: E402
from sgl_flashsample.sglang.prompt_logprobs import PromptHooks  # noqa: E402
from sgl_flashsample.sglang.runtime import Runtime  # noqa: E402
from sgl_flashsample.sglang.screen_lifecycle import ScreenMode  # noqa: E402
from sgl_flashsample.switches import FILE_VARIABLE  # noqa: E402

SECONDS = 20.0  # that a rank may wait for the other one
WIDTH = 320  # ids per rank: the last 40 of the second one are padding
ODD_WIDTH = 312  # no multiple of 16: a group of ids lies on both ranks


class SharingGroup(Group):
    """A group that may exchange through memory. folder: of that memory; "" where there is none."""

    device_group = types.SimpleNamespace(group_name="ranks")

    def __init__(self, folder: str) -> None:
        super().__init__()
        # As SGLang's, where GPUs reach each other.
        self.ca_comm = types.SimpleNamespace(disabled=False, graph_params=None) if folder else None
        self.regions: list[torch.Tensor] = []
        self.folder, self.fault = Path(folder), ""

    def reserve(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """In the place of a GPU's memory: a file that all ranks map."""
        files = [str(self.folder / f"{self.fault}, rank {rank}") for rank in range(self.world_size)]
        self.regions = [torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
        return self.regions[self.rank_in_group]

    def rendezvous(self, region: torch.Tensor, name: str) -> Any:
        return types.SimpleNamespace(get_buffer=lambda rank, shape, dtype: self.regions[rank])


def fails(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("a fault")


def out_of_memory(*arguments: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("a fault")


def patched(place: Any, name: str, value: Any = fails) -> Callable[[], Any]:
    return lambda: mock.patch.object(place, name, value)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Kernels are taken as right, in seconds less."""
    checked = patched(selfcheck, "refuse_wrong", lambda head, rows, table, *_, **__: selfcheck.Checked(table, None, ()))
    with checked(), patched(head, "compare_rows_with_reference", lambda *arguments, **options: None)():
        yield


def wrong_merge(*arguments: Any, **options: Any) -> Any:
    merged = merge_records(*arguments, **options)
    return merged._replace(token_ids=merged.token_ids + 1)


@contextlib.contextmanager
def original_logprobs() -> Iterator[None]:
    with mock.patch.object(MODULES["sglang.srt.layers.sampler"], "SGLANG_RETURN_ORIGINAL_LOGPROB", True):
        yield


@contextlib.contextmanager
def unmeasured_collectives() -> Iterator[None]:
    """GPUs that do not reach each other's memory."""
    unmeasured = patched(support, "unmeasured_exchange", lambda device: "collectives are not measured")
    with patched(exchange, "_symmetric_memory", out_of_memory)(), unmeasured():
        yield


@contextlib.contextmanager
def lost_draws(*paths: str, error: type[Exception] = RuntimeError) -> Iterator[None]:
    """Draws from the part of a rank fail on these paths; without any, on all of them."""
    of_head = Head.draw

    def failing(*arguments: Any, **options: Any) -> Any:
        if not paths or str(options["path"] or "fused") in paths:
            raise error("a fault")
        return of_head(*arguments, **options)

    with mock.patch.object(Head, "draw", failing):
        yield


@contextlib.contextmanager
def broken_table() -> Iterator[None]:
    """The user's table is no table."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write("{}")
        file.flush()
        with mock.patch.dict(os.environ, {FILE_VARIABLE: file.name}):
            yield


@contextlib.contextmanager
def lost_memory() -> Iterator[None]:
    """This rank cannot open the memory of the others."""
    with mock.patch.object(sys.modules["torch.distributed._symmetric_memory"], "rendezvous", fails):
        yield


# At the start (with a plain server around them), and while the server draws.
STARTING: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "an unknown version": patched(settings, "sglang_version", lambda: "9.9.9"),
    "another setting": original_logprobs,
    "a hook that is missing": contextlib.nullcontext,  # ``serve`` says so
    "no hook of prompts": contextlib.nullcontext,
    "no configuration": patched(support, "unsupported_server"),
    "no models": patched(runtime, "heads_of"),
    "a head that is not served": patched(support, "unsupported_head", lambda *arguments: "a fault"),
    "no table": patched(runtime, "resolve"),
    "a wrong token": patched(selfcheck, "difference", lambda *arguments, **options: "a fault"),
    "no memory for a workspace": patched(Head, "grow", out_of_memory),
    "a wrong exchange": patched(exchange, "merge_records", wrong_merge),
    "collectives alone": unmeasured_collectives,
    "no kernels for an exchange": patched(head, "merge_parts"),
    "a trial that fails": patched(HeadState, "check_exchange", out_of_memory),
    "a broken table": broken_table,
    "no memory for an exchange": patched(exchange, "_symmetric_memory", out_of_memory),
    "memory that cannot be opened": lost_memory,
    "no memory for a screen": patched(screen.Screen, "__init__", out_of_memory),
}
# Times of the built-in choice and of the screened path on both ranks, where these race. None: the race fails.
RACES: dict[str, tuple[tuple[float, float] | None, ...]] = {
    "a race that both win": ((300.0, 170.0), (310.0, 180.0)),
    "a race that one loses": ((300.0, 170.0), (300.0, 310.0)),
    "a race that fails": ((300.0, 170.0), None),
}
DRAWING: dict[str, Callable[[], Any]] = {
    "the screened path fails": patched(paths, "screened_sample"),
    "the fused path fails": lambda: lost_draws("fused"),
    "no way to draw": lost_draws,
    "no memory for the fused path": lambda: lost_draws("fused", error=torch.OutOfMemoryError),
    "no logprobs": patched(Head, "draw_with_logprobs"),
    "no memory for a prompt": patched(Head, "logprobs_of", out_of_memory),
    "no memory for logits": patched(HeadState, "logits_of_shard", out_of_memory),
    "rows cannot be drawn": patched(HeadState, "sample_rows"),
}


@contextlib.contextmanager
def races(times: tuple[float, float] | None) -> Iterator[None]:
    """Heads of any size are raced, with these times."""

    def stopwatch(calls: Any, rounds: int, refresh: Any) -> list[list[float]]:
        return [[microseconds] * rounds for microseconds in times or out_of_memory()]

    given = mock.patch.object(HeadState, "stopwatch", lambda state: stopwatch)
    with given, mock.patch.object(screen_race, "MIN_RACED_BYTES", 0):
        yield


def serve(fault: str, rank: int) -> dict[str, Any]:
    """What this rank serves: why nothing is fused, or the tokens of a plain batch and of a truncated one."""
    strikes = rank == 1
    settings = {"tp_size": 2, "tp_rank": rank, "attn_tp_size": 2, "attn_tp_rank": rank}
    vars(CONFIG.parallel).update(settings)
    CONFIG.device.random_seed = 1234 + rank
    raced = fault in RACES
    struck = STARTING[fault]() if strikes and fault in STARTING else contextlib.nullcontext()
    with struck, races(RACES[fault][rank]) if raced else contextlib.nullcontext():
        server = Runtime("a hook did not land" if strikes and fault == "a hook that is missing" else None)
        server.reads_prompts = not (strikes and fault == "no hook of prompts")
        server.agree()
        server.screen_mode = ScreenMode.AUTO if raced else ScreenMode.ON
        odd = fault == "an odd width"
        width = ODD_WIDTH if odd else WIDTH
        weight = torch.nn.functional.pad(weights(CPU)[:VOCAB], (0, 0, 0, 2 * width - VOCAB))
        part = make_head(weight[rank * width : (rank + 1) * width].clone(), tp_size=2)
        gathered: list[torch.Tensor] = []
        gatherer = {} if odd else {"_logits_gatherer": gathered.append}  # not in every SGLang
        model = Model(part, do_tensor_parallel_all_gather=True, **gatherer)
        server.prepare_model(model)
    told = {"reason": server.all_native_reason, "seed": server.settings.seed, "heads": len(server.heads)}
    if server.all_native_reason is not None:
        return told
    (state,) = server.heads
    told["memory"] = state.exchange.memory is not None
    with DRAWING[fault]() if strikes and fault in DRAWING else contextlib.nullcontext():
        try:
            told["tokens"] = draw_all(state)
            told["logprobs"] = read_all(server, state)
        except Exception as error:  # as the sampler does
            server.disable(f"{type(error).__name__}: {error}")
    return told | {"screen": state.has_screen, "path": state.path, "gathered": [logits.shape for logits in gathered]}


def draw_all(state: HeadState) -> list[list[int]]:
    lazy = LazyLogits(hidden_states(CPU, RANK_ROWS), VOCAB, state, fails)
    return [
        draw(lazy, step_of(batch, torch.arange(RANK_ROWS), None, return_logprob)).token_ids.tolist()
        for batch, return_logprob in rank_batches()
    ]


def read_all(server: Runtime, state: HeadState) -> list[list[float]]:
    """The logprobs of the likeliest ids of a step, and of the tokens of a prompt, to 3 digits."""
    batch, _ = rank_batches()[0]
    lazy = LazyLogits(hidden_states(CPU, RANK_ROWS), VOCAB, state, fails)
    asked = AskedLogprobs.of((), [2] * RANK_ROWS, None, False)
    drawn = draw(lazy, step_of(batch, torch.arange(RANK_ROWS), None, True, asked=asked))
    targets, wanted = torch.arange(RANK_ROWS) * (VOCAB // RANK_ROWS), WantedLogprobs()
    prompt = PromptHooks(server)._logprobs_of(state, lazy.hidden, targets, wanted)
    return [[round(value, 3) for value in one.flatten().tolist()] for one in (drawn.rest.parts()[1], prompt.of_tokens)]


def main(rank: int, port: int, folder: str, faults: list[str]) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    # A rank that waits for longer has been left alone.
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=SECONDS)
    )
    sleep_while_waiting()
    group = SharingGroup(folder)
    exchange._symmetric_memory = group.reserve
    sys.modules["torch.distributed._symmetric_memory"] = types.SimpleNamespace(rendezvous=group.rendezvous)
    torch.cuda.synchronize = lambda: None
    distributed = types.ModuleType("sglang.srt.distributed")
    distributed.parallel_state = types.SimpleNamespace(get_world_group=lambda: group, get_tp_group=lambda: group)
    sys.modules["sglang.srt.distributed"] = distributed
    runtime.MAX_INTERPRETED_ROWS = 4
    for fault in faults:
        group.fault = fault
        with contextlib.nullcontext() if fault == "a wrong token" else unchecked():
            print(json.dumps(serve(fault, rank)), flush=True)


if __name__ == "__main__":
    code = 1
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # an interpreter that ends may be aborted by gloo's threads
