"""SGLang's own batches and sampler in this process, without a server: what SGLang does with a whole batch is what each
row must get from us."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from head_states import VOCAB, hidden_states, make_state, serve

from sgl_flashsample.sglang.batch import BATCH_ATTRIBUTE, SLOTS_ATTRIBUTE, Batch, batch_of
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.row_table import RowTable
from sgl_flashsample.sglang.runtime import Runtime


class Configuration(types.SimpleNamespace):
    """What SGLang's code reads of a server's configuration here: ``get_exec()``, ``get_parallel()`` and
    ``get_server_args()`` are this."""

    def __init__(self) -> None:
        super().__init__(
            deterministic=types.SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
            features=types.SimpleNamespace(
                enable_custom_logit_processor=True, enable_watermark=False, sampling_mask_max_tokens=32
            ),
            kernel=types.SimpleNamespace(sampling_backend="flashsample", override=self.override),
            tp_group=types.SimpleNamespace(device_group=None),
        )

    @contextlib.contextmanager
    def override(self, sampling_backend: str) -> Iterator[None]:
        before, self.kernel.sampling_backend = self.kernel.sampling_backend, sampling_backend
        yield
        self.kernel.sampling_backend = before


def make_samplers() -> tuple[Any, Any]:
    """Our sampler, on an active runtime that reports paths, and SGLang's sampler."""
    from sglang.srt.layers.sampler import Sampler

    from sgl_flashsample.sglang.sampler import FlashSampler

    runtime = Runtime("not asked yet")
    runtime.inactive_reason, runtime.settings.report_path = None, True
    return FlashSampler(runtime), Sampler()


def grammar(*allowed: int) -> Any:
    """A grammar that allows these ids: SGLang's grammar object, with a mask of bools."""
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

    class Grammar(BaseGrammarObject):
        def allocate_vocab_mask(self, vocab_size, batch_size, device):
            return torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

        def fill_vocab_mask(self, vocab_mask, idx):
            vocab_mask[idx] = True
            vocab_mask[idx, list(allowed)] = False

        @staticmethod
        def move_vocab_mask(vocab_mask, device):
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits, vocab_mask):
            logits.masked_fill_(vocab_mask, float("-inf"))

    return Grammar()


def request(rid: str, processor: str | None = None, mask: bool = False, grammar: Any = None, **params: Any) -> Any:
    """A request with SGLang's sampling parameters, and the attributes of SGLang's ``Req`` that its batches read."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling_params = SamplingParams(**params)
    tokenizer = types.SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)  # which SGLang 0.5.17 reads
    sampling_params.normalize(tokenizer)
    return types.SimpleNamespace(
        rid=rid,
        sampling_params=sampling_params,
        custom_logit_processor=processor,
        return_sampling_mask=mask,
        sampling_logprobs_mode="selected",
        grammar=grammar,
        eos_token_ids={1},
        tokenizer=tokenizer,
        origin_input_ids=[5, 300],
    )


class ScheduleBatch:
    """A stand-in for SGLang's class, with the attributes that SamplingBatchInfo reads. Penalizers hold it weakly: keep
    it."""

    def __init__(self, requests: Sequence[Any], device: torch.device | str) -> None:
        self.reqs, self.device = list(requests), str(device)
        self.req_pool_indices_cpu = torch.arange(1, len(self.reqs) + 1)
        self.req_pool_indices = self.req_pool_indices_cpu.to(device)


def sampling_info(batch: ScheduleBatch, table: RowTable | None = None) -> Any:
    """SGLang's SamplingBatchInfo of the batch, with our ``Batch``, as in a server whose hooks landed. table: of its
    requests; one of their own where None."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    slots, table = batch.req_pool_indices_cpu.tolist(), RowTable(batch.device) if table is None else table
    setattr(info, BATCH_ATTRIBUTE, Batch.of_requests(batch.reqs, slots, table, 1, True))
    setattr(info, SLOTS_ATTRIBUTE, batch.req_pool_indices)
    grammars = [request.grammar for request in batch.reqs]
    info.grammars = grammars if any(grammars) else None
    return info


def for_forward(info: Any, overlap: bool) -> Any:
    """The sampling info of a forward pass: a copy in overlap mode, else the batch's."""
    if not overlap:
        return info
    copy = info.copy_for_forward()
    setattr(copy, BATCH_ATTRIBUTE, batch_of(info))
    setattr(copy, SLOTS_ATTRIBUTE, getattr(info, SLOTS_ATTRIBUTE))
    return copy


class CountingHead:
    """A float32 LM head, and the lazy logits of its hidden states. computed: the states whose logits were computed."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.state = make_state(device, dtype=torch.float32, **options)
        self.computed: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.state.lm_head.weight.T)[:, :VOCAB]

    def lazy(self, hidden: torch.Tensor, captured: torch.Tensor | None = None) -> LazyLogits:
        def compute(hidden: torch.Tensor) -> torch.Tensor:
            self.computed.append(hidden)
            return self.logits(hidden)

        return LazyLogits(hidden, VOCAB, self.state, compute, captured)


class ModelRunner:
    """The end of SGLang's ``ModelRunner.sample``. hooks: ours around its preprocessing, or None."""

    def __init__(self, sampler: Any, hooks: StepHooks | None = None) -> None:
        self.sampler, self.hooks = sampler, hooks

    def sample(
        self,
        logits: torch.Tensor,
        info: Any,
        return_logprob: bool = False,
        top: list[int] | None = None,
        ids: list | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Token ids, and the LogitsProcessorOutput that the sampler has filled."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunner as SGLangs
        from sglang.srt.utils import is_flashinfer_available

        output = LogitsProcessorOutput(next_token_logits=logits)
        if self.hooks is None:
            SGLangs._preprocess_logits(self, output, info)
        else:
            self.hooks.preprocess_logits(SGLangs._preprocess_logits, self, output, info)
        rows = len(info)
        if positions is None:
            positions = torch.arange(rows, device=logits.device)
        backend = "flashinfer" if is_flashinfer_available() else "pytorch"
        with sys.modules["sglang.srt.layers.sampler"].get_exec().kernel.override(backend):
            tokens = self.sampler(output, info, return_logprob, top or [0] * rows, ids or [None] * rows, positions)
        return tokens, output


class SteadyServer:
    """A server that draws the same batch step by step, as the first rows of one of SGLang's CUDA graphs. rows: the
    sampling parameters of each request, or other arguments of ``request``. paths, logprobs, output: what served each
    row of the last step, the logprobs of its tokens, and its LogitsProcessorOutput. padded: rows of the graph, where
    these are more. captured: whether there is a graph."""

    captured = True

    def __init__(self, device: torch.device, state: HeadState, rows: Sequence[dict], padded: int = 0) -> None:
        self.device, self.state, self.sampler = device, state, make_samplers()[0]
        self.runtime: Runtime = self.sampler.runtime
        serve(self.runtime, state)
        self.runner = ModelRunner(self.sampler, StepHooks(self.runtime))
        self.paths: list[str] = []
        self.logprobs: torch.Tensor | None = None
        self.hidden = hidden_states(device, max(padded, len(rows)), dtype=state.head.lm_head.weight.dtype)
        self.positions, self.table = torch.arange(len(self.hidden), device=device), RowTable(device)
        self.take(rows)

    def take(self, rows: Sequence[dict]) -> None:
        """Draw another batch, of as many rows as the graph has, or fewer."""
        requests = [request(**{"rid": f"r{place}", **row}) for place, row in enumerate(rows)]
        self._batch = ScheduleBatch(requests, self.device)
        self.info = sampling_info(self._batch, self.table)

    def step(self, return_logprob: bool = False, top: list | None = None, ids: list | None = None) -> list[int]:
        self.positions += 1
        captured, rows = self.hidden if self.captured else None, len(self.info)
        lazy = LazyLogits(self.hidden, VOCAB, self.state, self._logits, captured)[:rows]
        positions = self.positions[:rows]
        tokens, output = self.runner.sample(lazy, self.info, return_logprob, top, ids, positions)
        self.paths = (output.customized_info or {}).get("flashsample_path", [])
        self.logprobs, self.output = output.next_token_logprobs, output
        return tokens.tolist()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.state.lm_head.weight.T)[:, :VOCAB].float()
