"""What a server hands to the SGLang layer, made without SGLang: requests, an LM head with its LogitsProcessor, hidden
states; and CUDA graphs that need no GPU."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fake_head import FakeHead, Script
from torch.utils._pytree import tree_leaves

from sgl_flashsample.defaults import HeadTraits, default_config_on
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.gather_rows import RowBuffers
from sgl_flashsample.kernels.params import Edit, SampleOutput
from sgl_flashsample.kinds import BATCH_KINDS, SamplingPath
from sgl_flashsample.sglang.batch import Batch
from sgl_flashsample.sglang.draw import Step
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.row_table import TOP_K_OFF, RowTable
from sgl_flashsample.sglang.runtime import Runtime
from sgl_flashsample.sglang.screen_lifecycle import HeadScreen
from sgl_flashsample.sglang.step_graphs import CudaCapture, Launched

CPU = torch.device("cpu")
VOCAB, WIDTH, PADDING = 600, 32, 8
RANK_ROWS = 4
SCREENED_ROWS = 8  # rows of the largest batch that the screen of ``make_state`` serves

SAMPLING_DEFAULTS = {
    "temperature": 1.0,
    "top_k": TOP_K_OFF,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "max_new_tokens": 128,
    "logit_bias": None,
    "sampling_seed": None,
    "n": 1,
}


def request(
    rid: str = "r",
    *,
    processor: str | None = None,
    mask: bool = False,
    prompt: Sequence[int] = (5, 300),
    sender: str | None = None,
    grammar: Any = None,
    **params: Any,
) -> types.SimpleNamespace:
    """A request as SGLang's scheduler holds it, with sampling parameters as SGLang normalises them: greedy is
    ``top_k=1``."""
    return types.SimpleNamespace(
        rid=rid,
        sampling_params=types.SimpleNamespace(**(SAMPLING_DEFAULTS | params)),
        custom_logit_processor=processor,
        return_sampling_mask=mask,
        origin_input_ids=list(prompt),
        http_worker_ipc=sender,
        grammar=grammar,
    )


def make_batch(*rows: dict[str, Any], device: torch.device = CPU) -> Batch:
    """One request for each row, named r0, r1, ..., in the slots 1, 2, ... of a table of their own; a row is the
    arguments of ``request``."""
    requests = [request(**{"rid": f"r{place}", **row}) for place, row in enumerate(rows)]
    return Batch.of_requests(requests, range(1, len(rows) + 1), RowTable(device), 1, True)


def gathered(
    batch: Batch, slots: Sequence[int] | None = None, device: torch.device = CPU, **options: Any
) -> RowBuffers:
    """The parameters that a draw of the batch gets, with every edit. slots: of its rows; when None, those of
    ``make_batch``. options: of ``gather_rows``."""
    indices = torch.tensor(range(1, len(batch) + 1) if slots is None else slots, dtype=torch.int64, device=device)
    num_rows = len(indices) * options.get("nodes", 1)
    rows = RowBuffers.allocate(options.get("rows", num_rows), device)
    positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
    batch.table.gather(indices, positions, rows, **{"edits": ~Edit(0), **options})
    return rows


def step_of(batch: Batch, positions: torch.Tensor, *arguments: Any, **options: Any) -> Step:
    """A step of a batch of ``make_batch``."""
    slots = torch.arange(1, len(batch) + 1, device=positions.device)
    return Step(batch, slots, positions, *arguments, **options)


def rank_batches() -> list[tuple[Batch, bool]]:
    """What ranks that share a head draw, and whether with logprobs: a plain batch, a truncated one, a plain one."""
    sampled = [{"temperature": 0.5 + 0.2 * row} for row in range(1, RANK_ROWS)]
    truncated = [row | {"top_p": 0.9} for row in sampled]
    return [(make_batch({"top_k": 1}, *rows), rows is truncated) for rows in (sampled, truncated, sampled)]


def mixed_temperatures(device: torch.device, num_rows: int = 6) -> Batch:
    """A greedy row, and sampled ones from temperature 0.3 on."""
    rows = [{"temperature": 0.3 * place} if place else {"top_k": 1} for place in range(num_rows)]
    return make_batch(*rows, device=device)


class Processor:
    """A stand-in for SGLang's LogitsProcessor, with the attributes that our code reads."""

    def __init__(self, **attributes: Any) -> None:
        self.logit_scale = self.final_logit_softcapping = None
        self.vocab_size = VOCAB
        self.use_fp32_lm_head = self.do_tensor_parallel_all_gather = self.return_full_logits = False
        self.use_attn_tp_group = False
        vars(self).update(attributes)

    def forward(self) -> None: ...

    def _get_logits(self) -> None: ...

    def _compute_lm_head(self) -> None: ...


def make_head(weight: torch.Tensor, **attributes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(weight=weight, quant_method=None, **attributes)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 is wrong in Triton's interpreter."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def weights(device: torch.device, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB + PADDING, WIDTH, generator=generator).to(device, dtype or dtype_on(device))


def hidden_states(
    device: torch.device, num_rows: int = 6, seed: int = 5, dtype: torch.dtype | None = None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, generator=generator).to(device, dtype or dtype_on(device))


def screening_table(traits: HeadTraits) -> DispatchTable:
    """A tuned table that has found the screened path faster for every batch of up to ``SCREENED_ROWS`` rows."""
    sizes = range(1, SCREENED_ROWS + 1)
    kinds = [kind for kind in BATCH_KINDS if kind.screen]
    tuned = {kind: {n: default_config_on(traits, SamplingPath.SCREENED, n, kind) for n in sizes} for kind in kinds}
    return DispatchTable(traits, tuned)


def make_state(
    device: torch.device,
    seed: int = 0,
    *,
    screened: bool = False,
    capture: CountingCapture | None = None,
    dtype: torch.dtype | None = None,
    script: Script | None = None,
    **processor: Any,
) -> HeadState:
    """A head whose batches take the screen where it has one. capture: of step graphs, where it has them. script: of a
    ``FakeHead``, where it is one."""
    state = HeadState(Processor(**processor), make_head(weights(device, seed, dtype)), capture)
    if script is not None:
        state.head = FakeHead(state.head.lm_head, announces_changes=True, script=script)
    state.head.table = screening_table(HeadTraits.of(state.head.lm_head))
    state.use_step_graphs = capture is not None
    if screened:
        state.screen = HeadScreen(state.head.lm_head, SCREENED_ROWS, counter_seconds=0.0)
    return state


def write_unseen(state: HeadState, values: torch.Tensor) -> None:
    """Writes as SGLang's weight loaders do: the tensor's version does not change."""
    version = state.lm_head.weight._version
    state.lm_head.weight.data.copy_(values)
    assert state.lm_head.weight._version == version


def metadata_of(*modes: str, **fields: Any) -> types.SimpleNamespace:
    """As SGLang's LogitsMetadata of a forward in these modes: a verification and a split prefill are prefills, too."""
    names = ("decode", "extend", "target_verify", "split_prefill", "draft_extend_v2")
    mode = types.SimpleNamespace(**{f"is_{name}": lambda name=name: name in modes for name in names})
    fields = {"extend_return_logprob": False, "is_prefill_only": False} | fields
    return types.SimpleNamespace(forward_mode=mode, **fields)


def serve(runtime: Runtime, *states: HeadState) -> None:
    """Register these heads with the runtime, as if a server had prepared them."""
    for state in states:
        runtime._heads[id(state.processor), id(state.lm_head)] = state


def is_serving(state: HeadState) -> bool:
    return state.screen is not None and state.screen.serving(state.head.lm_head) is not None


@dataclasses.dataclass
class CountedGraph:
    """A CUDA graph; without one, it runs the launches again, into the tensors of the first run, as a graph would."""

    capture: CountingCapture
    launches: Callable[[], Any]
    launched: Any  # a Launched, or logits
    graph: Any

    @property
    def out(self) -> SampleOutput:
        return self.launched.out

    def replay(self) -> None:
        self.capture.replays += 1
        if self.graph is not None:
            self.graph.replay()
            return
        results = self.launched, _without_scratch(self.launches())
        for output, new in zip(*map(tree_leaves, results), strict=True):
            if torch.is_tensor(output):
                output.copy_(new)


def _without_scratch(launched: Any) -> Any:
    return launched._replace(scratch=None) if isinstance(launched, Launched) else launched


class CountingCapture:
    """``head.CudaCapture`` on a GPU, and what stands for it elsewhere. pools: that it has been asked for. graphs: that
    it has captured. replays: of all of them. fails: whether captures fail from now on."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.pools = self.replays = 0
        self.fails = False
        self.graphs: list[CountedGraph] = []
        self._cuda = CudaCapture(device) if device.type == "cuda" else None

    def new_pool(self) -> Any:
        self.pools += 1
        return self.pools if self._cuda is None else self._cuda.new_pool()

    def __call__(self, launches: Callable[[], Any], pool: Any) -> tuple[CountedGraph, Any]:
        if self.fails:
            raise RuntimeError("no memory for a graph")
        graph, launched = (None, launches()) if self._cuda is None else self._cuda(launches, pool)
        self.graphs.append(CountedGraph(self, launches, _without_scratch(launched), graph))
        return self.graphs[-1], launched


def settle(device: torch.device) -> None:
    """Wait until all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Model(torch.nn.Module):
    """With a LogitsProcessor and an LM head beside it, where SGLang's models have them."""

    def __init__(self, lm_head: Any, **processor: Any) -> None:
        super().__init__()
        self.logits_processor, self.lm_head = TorchProcessor(**processor), lm_head


def model_of(*states: HeadState) -> types.SimpleNamespace:
    """A model with these heads, as our code finds them."""
    parents = {str(place): types.SimpleNamespace(lm_head=state.lm_head) for place, state in enumerate(states)}
    processors = {f"{place}.logits_processor": state.processor for place, state in enumerate(states)}
    return types.SimpleNamespace(named_modules=lambda: (parents | processors).items())


class TorchProcessor(Processor, torch.nn.Module):
    """A LogitsProcessor that modules can hold."""

    def __init__(self, **attributes: Any) -> None:
        torch.nn.Module.__init__(self)
        Processor.__init__(self, **attributes)


class Adapter:
    """As SGLang's ``LoRAConfig``: what an adapter's folder says of it."""

    def __init__(self, path: str) -> None:
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        self.target_modules: str | list[str] = config["target_modules"]


def lora_modules(named: Any) -> set[str]:
    """As SGLang's ``get_normalized_target_modules``."""
    return {"all"} if isinstance(named, str) else {{"output": "lm_head"}.get(name, name) for name in named}


ENGINE_TYPES = {"null": "unified", "prefill": "prefill", "decode": "decode"}


def pretended_sglang() -> tuple[types.SimpleNamespace, dict[str, dict[str, Any]]]:
    """The settings of a plain server, to be changed by a test, and the modules in which our code looks them up, with
    their attributes."""
    space = types.SimpleNamespace
    config = space(
        parallel=space(
            **dict.fromkeys(("tp_size", "pp_size", "attn_tp_size", "attn_dp_size", "attn_cp_size"), 1),
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "moe_ep_rank"), 0),
            enable_dp_lm_head=False,
        ),
        exec=space(
            deterministic=space(enable_deterministic_inference=False, rl_on_policy_target=None),
            dllm=space(dllm_algorithm=None),
            features=space(enable_custom_logit_processor=False),
            graph=space(cuda_graph_config=space(decode=space(backend="full")), enable_torch_compile=False),
            kernel=space(grammar_backend="xgrammar"),
            moe=space(elastic_ep_backend=None),
            overlap=space(enable_two_batch_overlap=False),
        ),
        spec=space(
            speculative_algorithm=None,
            speculative_accept_threshold_single=1.0,
            speculative_accept_threshold_acc=1.0,
            speculative_use_rejection_sampling=False,
            speculative_eagle_topk=1,
        ),
        disagg=space(enable_pdmux=False, disaggregation_mode="null"),
        serving=space(served_model_name="model"),
        flags=space(capture=space(enable_torch_compile=False)),
        device=space(random_seed=1234),
        observability=space(
            enable_metrics=False, enable_metrics_for_all_schedulers=False, debug_tensor_dump_output_folder=None
        ),
        lora=space(enable_lora=None, lora_target_modules=None, lora_paths=[]),
        model=space(
            model_path="model",
            weight_cache_mode="off",
            remote_instance_weight_loader_start_seed_via_transfer_engine=False,
            remote_instance_weight_loader_backend="nccl",
        ),
        environ=space(SGLANG_SIMULATE_ACC_LEN=space(get=lambda: -1)),
    )
    return config, {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.disaggregation": {},
        "sglang.srt.disaggregation.utils": {"DisaggregationMode": space(to_engine_type=ENGINE_TYPES.__getitem__)},
        "sglang.srt.layers": {},
        "sglang.srt.runtime_context": {f"get_{name}": (lambda part=part: part) for name, part in vars(config).items()},
        "sglang.srt.environ": {"envs": config.environ},
        "sglang.srt.lora": {},
        "sglang.srt.lora.lora_config": {"LoRAConfig": Adapter},
        "sglang.srt.lora.utils": {"get_normalized_target_modules": lora_modules},
        "sglang.srt.layers.sampler": {"SGLANG_RETURN_ORIGINAL_LOGPROB": False, "Sampler": object},
        "sglang.srt.layers.logits_processor": {
            "LogitsProcessor": Processor,
            "should_apply_lm_head_quant_method": lambda head, method: method is not None,
        },
    }
