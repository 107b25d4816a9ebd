"""Ranks of DP attention that share an LM head, each a process with requests of its own: they run steps as SGLang does,
and return what each got.

    python tests/sglang/replica_ranks.py PORT FOLDER SHAPE

SHAPE: ranks, ids of each rank and ids of the vocabulary, as 4x44x170. A line of JSON: of each rank, the answers to each
step. A rank that fails, or waits for longer than ``SECONDS``, ends the run.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import conftest  # noqa: F401  the interpreter's patches
import torch
from head_states import Processor, make_batch, make_head, metadata_of, pretended_sglang, serve
from rank_group import Group, fork, join

from sgl_flashsample.sglang.batch import BATCH_ATTRIBUTE, DRAWN_ATTRIBUTE, Batch
from sgl_flashsample.sglang.exchange import Exchange
from sgl_flashsample.sglang.head import HeadState

SECONDS = 60.0  # that a rank may wait for another one
HIDDEN, GRAPH_ROWS = 16, 4


class Part(NamedTuple):
    """The requests of one rank in a step, as of ``head_states.make_batch``, and how it runs them. fields: of SGLang's
    ScheduleBatch, where they are not those of a plain batch."""

    rows: Sequence[dict[str, Any]] = ()
    mode: str = "decode"
    fields: Mapping[str, Any] = types.MappingProxyType({})


class Case(NamedTuple):
    """A step. parts: of the ranks, the first ones where there are fewer. captured: the model is a CUDA graph."""

    parts: tuple[Part, Part, Part, Part]
    captured: bool = False


IDLE = Part()
SAMPLED = [{"temperature": 0.7 + 0.3 * row} for row in range(3)]
TRUNCATED = [{"temperature": 0.9, "top_p": 0.8}, {"top_k": 5}]
GREEDY = [{"top_k": 1}]
BESIDE = (Part([*GREEDY, *SAMPLED]), IDLE, Part(SAMPLED[:1]))  # the other ranks of a step

FUSED = {
    "sampled and greedy rows, and an idle rank": Case((Part(SAMPLED), Part(SAMPLED[:1]), IDLE, Part(GREEDY))),
    "equal numbers of rows": Case((Part(SAMPLED[:2]),) * 4),
    "truncated rows on one rank": Case((Part(SAMPLED), Part(TRUNCATED), IDLE, Part(GREEDY))),
    "greedy rows alone": Case((IDLE, Part(GREEDY * 2), IDLE, Part(GREEDY))),
    "a prefill beside decodes": Case((Part(SAMPLED[:2]), Part(SAMPLED, "extend"), IDLE, Part(TRUNCATED))),
    "logprobs on one rank": Case((Part(SAMPLED), Part(GREEDY, fields={"return_logprob": True}), IDLE, IDLE)),
    "a replayed model": Case((Part(SAMPLED), IDLE, Part(TRUNCATED), Part(GREEDY)), captured=True),
}
NATIVE = {
    "a penalty": Part([{"frequency_penalty": 0.5}]),
    "a custom logit processor": Part([*SAMPLED, {"processor": "p"}]),
    "a grammar": Part(SAMPLED, fields={"has_grammar": True}),
    "likeliest ids": Part(SAMPLED[:1], fields={"return_logprob": True, "top_logprobs_nums": [2]}),
    "given ids": Part(SAMPLED[:1], fields={"return_logprob": True, "token_ids_logprobs": [[3]]}),
    "logprobs of a prompt": Part(SAMPLED[:1], "extend", {"return_logprob": True, "extend_logprob_start_lens": [0]}),
    "a prefill that draws nothing": Part(SAMPLED[:1], "extend", {"is_prefill_only": True}),
    "a batch that cannot be read": Part(SAMPLED, fields={"sampling_info": None}),
}
STEPS = {
    **FUSED,
    **{name: Case((BESIDE[0], part, *BESIDE[1:])) for name, part in NATIVE.items()},
    "a replayed model and a penalty": Case((BESIDE[0], NATIVE["a penalty"], *BESIDE[1:]), captured=True),
}
AGAIN = "sampled and greedy rows, and an idle rank"  # runs once more after all others


@functools.cache
def weight_of(vocab: int) -> torch.Tensor:
    return torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(1))


def hidden_of(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


def batch_of(part: Part) -> tuple[Batch, torch.Tensor]:
    """The batch of a rank, and the positions of its rows."""
    return make_batch(*part.rows), 7 + torch.arange(len(part.rows))


class Rank:
    """One rank of a server. computed: SGLang's computations of logits."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        from sgl_flashsample.sglang import runtime
        from sgl_flashsample.sglang.hooks import StepHooks
        from sgl_flashsample.sglang.replicas import ReplicaHooks
        from sgl_flashsample.sglang.sampler import FlashSampler

        num_ranks, width, vocab = shape
        group = Group()
        self.rank, self.num_ranks, self.computed = group.rank_in_group, num_ranks, 0
        whole = torch.nn.functional.pad(weight_of(vocab), (0, 0, 0, width * num_ranks - vocab))
        self.part, self.vocab = whole[self.rank * width : (self.rank + 1) * width].clone(), vocab
        self.runtime = runtime.Runtime(None)
        processor = Processor(vocab_size=vocab, do_tensor_parallel_all_gather_dp_attn=True)
        self.state = HeadState(processor, make_head(self.part), exchange=Exchange(group))
        serve(self.runtime, self.state)
        self.steps, self.replicas = StepHooks(self.runtime), ReplicaHooks(self.runtime)
        self.sampler = FlashSampler(self.runtime)
        # SGLang captures its model before any step.
        self.graph = torch.zeros(GRAPH_ROWS, HIDDEN)
        with mock.patch.object(runtime, "_is_capturing", lambda: True):
            self.replayed = self.get_logits(self.graph, "decode")

    def get_logits(self, hidden: torch.Tensor, mode: str) -> Any:
        metadata, state = metadata_of(mode), self.state
        return self.steps.get_logits(self.logits, state.processor, hidden, state.lm_head, metadata)

    def logits(self, processor: Any, hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """As SGLang's ranks: hidden states of all to all, then logits of all."""
        self.computed += 1
        count = torch.tensor([len(hidden)])
        counts = [torch.empty_like(count) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(counts, count)
        start, total = int(sum(counts[: self.rank])), int(sum(counts))
        everyones = torch.zeros(total, HIDDEN)
        everyones[start : start + len(hidden)] = hidden
        torch.distributed.all_reduce(everyones)
        logits = everyones @ self.part.T
        parts = [torch.empty_like(logits) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(parts, logits)
        return torch.cat(parts, dim=1)[start : start + len(hidden), : self.vocab]

    def run(self, case: Case) -> dict[str, Any]:
        """One step: the computations of logits, the tokens and their logprobs."""
        part = case.parts[self.rank]
        batch, positions = batch_of(part)
        num_rows, mode = len(batch), part.mode if part.rows else "idle"
        forward_mode = types.SimpleNamespace(
            is_idle=lambda: mode == "idle", is_decode=lambda: mode == "decode", is_extend=lambda: mode == "extend"
        )
        info = types.SimpleNamespace(grammars=None, **{BATCH_ATTRIBUTE: batch})
        fields: dict[str, Any] = {"sampling_info": info, "has_grammar": False, "is_prefill_only": False}
        fields |= {"return_logprob": False, "top_logprobs_nums": [0] * num_rows, "token_ids_logprobs": None}
        fields |= {"extend_lens": [3] * num_rows, "extend_logprob_start_lens": [3] * num_rows}
        fields |= {"batch_size": lambda: num_rows, "forward_mode": forward_mode, **part.fields}
        local = types.SimpleNamespace(**fields) if num_rows else None
        runner = types.SimpleNamespace(sampling_observer=None)
        self.replicas.agree(local, local, model_runner=runner)
        forward = types.SimpleNamespace(
            forward_mode=forward_mode,
            sampling_info=info,
            positions=positions,
            seq_lens=positions + 1,
            req_pool_indices=torch.arange(1, num_rows + 1),
        )
        computed, hidden = self.computed, hidden_of(self.rank, num_rows)
        output = self.replicas.forward(self.model(case, hidden, mode), runner, forward).logits_output
        answer = {"computed": self.computed - computed, "drawn together": DRAWN_ATTRIBUTE in vars(output)}
        logprobs = fields["return_logprob"]
        if batch.mix.is_native or batch.mix.edits or not num_rows:  # SGLang's sampler, and its penalties
            return answer | {"tokens": None if num_rows else [], "logprobs": None}
        self.steps.sample(runner, output, forward)
        tokens = self.sampler.forward(output, info, logprobs, [0] * num_rows, [None] * num_rows, positions)
        values = output.next_token_logprobs.tolist() if logprobs else None
        return answer | {"tokens": tokens.tolist(), "logprobs": values}

    def model(self, case: Case, hidden: torch.Tensor, mode: str) -> Any:
        """SGLang's ModelRunner.forward of these hidden states, padded as it pads them."""

        def forward(*arguments: Any) -> Any:
            if case.captured:
                self.graph[: len(hidden)] = hidden
                logits = self.replayed[: len(hidden)]
            else:
                logits = self.get_logits(hidden, mode)
            output = types.SimpleNamespace(next_token_logits=logits, customized_info=None, next_token_logprobs=None)
            return types.SimpleNamespace(logits_output=output)

        return forward


def rank_of(rank: int, shape: tuple[int, int, int], port: int) -> Any:
    join(rank, shape[0], port, SECONDS)
    server = Rank(shape)
    assert server.state._gathers_right()
    answers = {name: server.run(case) for name, case in STEPS.items()}
    return answers | {"again": server.run(STEPS[AGAIN])}


def pretend() -> None:
    """SGLang is pretended."""
    _, contents = pretended_sglang()
    contents["sglang.srt.utils"] = {"is_flashinfer_available": lambda: False}
    contents["sglang.srt.layers.sampler"]["Sampler"] = object
    for name, attributes in contents.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)


def main(port: int, folder: Path, text: str) -> None:
    pretend()
    num_ranks, width, vocab = map(int, text.split("x"))
    shape = num_ranks, width, vocab
    print(json.dumps(fork(num_ranks, lambda rank: rank_of(rank, shape, port), folder)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
