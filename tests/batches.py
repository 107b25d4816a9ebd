"""SGLang's own batches and sampler in this process, without a server: what it does with a batch as a whole is what
each row must get from us."""

from __future__ import annotations

import contextlib
import sys
import types

import torch

from sgl_flashsample.sglang import hooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.rows import Rows
from sgl_flashsample.sglang.runtime import HeadState, Runtime

VOCAB, WIDTH = 512, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Configuration(types.SimpleNamespace):
    """What SGLang's code reads of a server's configuration here; ``get_exec()`` and ``get_server_args()`` are this."""

    def __init__(self):
        super().__init__(
            deterministic=types.SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
            features=types.SimpleNamespace(enable_custom_logit_processor=True, enable_watermark=False),
            kernel=types.SimpleNamespace(sampling_backend="flashsample", override=self.override),
        )

    @contextlib.contextmanager
    def override(self, sampling_backend):
        before, self.kernel.sampling_backend = self.kernel.sampling_backend, sampling_backend
        yield
        self.kernel.sampling_backend = before


def configure(monkeypatch) -> None:
    """Let SGLang's code run without a server: a configuration, and one rank."""
    import sglang.srt.layers.sampler as sglang_sampler
    import sglang.srt.sampling.sampling_batch_info as batch_info

    import sgl_flashsample.sglang.sampler as own

    configuration = Configuration()
    for module in (sglang_sampler, batch_info, own):
        for name in ("get_exec", "get_server_args"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: configuration)
    monkeypatch.setattr(sglang_sampler.Sampler, "_sync_token_ids_across_tp", lambda *arguments: None)


def samplers():
    """Ours, on an active runtime, and SGLang's."""
    from sglang.srt.layers.sampler import OutputLogprobProcessor, Sampler

    from sgl_flashsample.sglang.sampler import FlashSampler, native_backend

    runtime = Runtime("not asked yet")
    runtime.problem, runtime.report_path = None, True
    made = []
    for kind in (FlashSampler, Sampler):
        sampler = kind.__new__(kind)  # __init__ asks for the process groups of a server
        torch.nn.Module.__init__(sampler)
        sampler.rl_on_policy_target, sampler.tp_sync_group, sampler.cp_sync_group = None, None, None
        sampler.enable_deterministic = sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
        sampler.sampling_mask_max_tokens = 32
        sampler.output_logprob_processor = OutputLogprobProcessor()
        made.append(sampler)
    made[0].runtime, made[0].native_backend = runtime, native_backend()
    return made


def grammar(*allowed: int):
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


def request(rid: str, processor: str | None = None, mask: bool = False, grammar=None, **params):
    """A request with the attributes of SGLang's ``Req`` that its batches read."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling_params = SamplingParams(**params)
    tokenizer = types.SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
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
    )


class Batch:
    """SGLang's ``ScheduleBatch``, as far as its SamplingBatchInfo looks."""

    device = DEVICE

    def __init__(self, requests):
        self.reqs = requests


def sampling_info(batch: Batch):
    """SGLang's SamplingBatchInfo of the batch, with our rows, as in a server whose hooks landed."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    setattr(info, hooks.ROWS_ATTRIBUTE, Rows.of_requests(batch.reqs, 1, True, DEVICE))
    grammars = [request.grammar for request in batch.reqs]
    info.grammars = grammars if any(grammars) else None
    return info


def for_forward(info, overlap: bool):
    """What a forward is given: a copy in overlap mode, else the batch's own."""
    if not overlap:
        return info
    copy = info.copy_for_forward()
    setattr(copy, hooks.ROWS_ATTRIBUTE, hooks.rows_of(info))
    return copy


class Head:
    """An LM head, and the carriers of its logits. Remembers which hidden states had their logits computed."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.randn(VOCAB, WIDTH, generator=generator).to(DEVICE)
        self.computed: list[torch.Tensor] = []
        processor = types.SimpleNamespace(
            logit_scale=None, final_logit_softcapping=None, vocab_size=VOCAB, use_fp32_lm_head=False
        )
        self.state = HeadState(processor, types.SimpleNamespace(weight=self.weight))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T

    def lazy(self, hidden: torch.Tensor) -> LazyLogits:
        def compute(hidden: torch.Tensor) -> torch.Tensor:
            self.computed.append(hidden)
            return self.logits(hidden)

        return LazyLogits(hidden, VOCAB, self.state, compute)


class ModelRunner:
    """The end of SGLang's ``ModelRunner.sample``. hooks: ours around its preprocessing, or None."""

    def __init__(self, sampler, own_hooks=None):
        self.sampler, self.hooks = sampler, own_hooks

    def sample(self, logits, info, return_logprob=False, top=None, ids=None):
        """Token ids, and the LogitsProcessorOutput that the sampler has filled."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunner as SGLangs

        from sgl_flashsample.sglang.sampler import native_backend

        output = LogitsProcessorOutput(next_token_logits=logits)
        if self.hooks is None:
            SGLangs._preprocess_logits(self, output, info)
        else:
            self.hooks.preprocess_logits(SGLangs._preprocess_logits, self, output, info)
        rows = len(info)
        arguments = (return_logprob, top or [0] * rows, ids or [None] * rows, torch.arange(rows, device=DEVICE))
        with sys.modules["sglang.srt.layers.sampler"].get_exec().kernel.override(native_backend()):
            tokens = self.sampler(output, info, *arguments)
        return tokens, output
