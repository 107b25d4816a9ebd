"""Drafts from the hidden states of the draft model: the most likely tokens, or drawn with the noise of the target's,
so that they are often the same. The tokens of a request do not depend on them."""

from __future__ import annotations

import functools
import logging
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_states import (
    Processor,
    dtype_on,
    hidden_states,
    is_serving,
    make_head,
    make_state,
    serve,
    weights,
    write_unseen,
)
from lab import drafters
from serving import INTERPRETED, TWO_RANKS, needs_sglang, server_of
from sglang_batches import VOCAB, CountingHead, make_samplers, request
from stats import coupled_acceptance
from test_speculation import CHAIN, Original, verification

from sgl_flashsample import sample_from_logits
from sgl_flashsample.head import Head
from sgl_flashsample.hot_vocab import HotVocab
from sgl_flashsample.kernels.draft_children import Children
from sgl_flashsample.kernels.merge_ranks import merge_records, pack_record
from sgl_flashsample.kernels.params import BatchParams, LMHead
from sgl_flashsample.kernels.reference import best_ids_ref
from sgl_flashsample.kernels.sample_own_ids import OwnIds
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.selfcheck import MAX_COMPILED_ROWS
from sgl_flashsample.sglang import own_vocabulary, token_counts
from sgl_flashsample.sglang.batch import BATCH_ATTRIBUTE, SLOTS_ATTRIBUTE, batch_of
from sgl_flashsample.sglang.draft_graphs import BothGraphs
from sgl_flashsample.sglang.drafts import DRAFT_VOCAB_VARIABLE, DRAFTS_VARIABLE, DraftMode, Drafts, start
from sgl_flashsample.sglang.draw import launch
from sgl_flashsample.sglang.exchange import Exchange
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import plain
from sgl_flashsample.sglang.own_vocabulary import OwnVocabulary
from sgl_flashsample.sglang.runtime import RankError, Runtime
from sgl_flashsample.switches import SPECULATION_VARIABLE
from sgl_flashsample.tools import markov
from sgl_flashsample.tools import server as demo_server

REQUESTS, NODES = 6, 4  # places in the server, and nodes of a verification: the root and three drafts
FIRST = 7  # the KV length without the last known token: the position of the root


def forward_batch(mode: str, positions: torch.Tensor, batch_size: int, **others: Any) -> types.SimpleNamespace:
    """As SGLang's ForwardBatch and LogitsMetadata."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fields = {"spec_info": types.SimpleNamespace(), "extend_return_logprob": False, "is_prefill_only": False, **others}
    fields["moe_num_token_non_padded"] = lambda: None  # SGLang 0.5.23 asks for it
    return types.SimpleNamespace(forward_mode=ForwardMode[mode], positions=positions, batch_size=batch_size, **fields)


class Server:
    """A server's drafts, and a draft model with the target's LM head, or with ``lm_head``.

    worker: as SGLang's EagleDraftWorker. computed: how many rows of logits SGLang has computed."""

    def __init__(
        self, head: Any, lm_head: Any = None, mode: DraftMode = DraftMode.COUPLED, attach: bool = True, **worker: Any
    ) -> None:
        self.runtime = make_samplers()[0].runtime
        self.runtime.settings.verifies = True
        serve(self.runtime, head.state)
        self.hooks, self.computed = StepHooks(self.runtime), 0
        self.model = torch.nn.Module()
        self.model.lm_head = lm_head or head.state.lm_head
        self.model.logits_processor = self._processor(worker.pop("vocab_size", VOCAB))
        for place in range(worker.pop("others", 0)):
            setattr(self.model, f"other_{place}", self._processor(VOCAB))
        self.worker = types.SimpleNamespace(
            hot_token_id=None,
            draft_runner=types.SimpleNamespace(model=self.model),
            req_to_token_pool=types.SimpleNamespace(size=worker.pop("size", REQUESTS)),
            speculative_num_draft_tokens=NODES,
            topk=1,
        )
        vars(self.worker).update(worker)
        self.runtime.leave_drafts(self.model)
        self.drafts = Drafts(self.runtime, mode)
        if attach:
            self.drafts.attach(self.worker)

    def _processor(self, vocab_size: int) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        vars(processor).update(vars(Processor(vocab_size=vocab_size)))

        def compute(processor: Any, hidden: torch.Tensor, lm_head: Any, *others: Any) -> torch.Tensor:
            self.computed += len(hidden)
            return (hidden.float() @ lm_head.weight.float().T)[:, : processor.vocab_size]

        def forward(input_ids: Any, hidden_states: torch.Tensor, lm_head: Any, logits_metadata: Any) -> Any:
            logits = self.hooks.get_logits(compute, processor, hidden_states, lm_head, logits_metadata)
            return types.SimpleNamespace(next_token_logits=logits, hidden_states=None)

        processor.forward = forward
        return processor

    def load(self, info: Any, top_logprobs: int = 0, grammars: bool = False) -> None:
        batch = types.SimpleNamespace(sampling_info=info, return_logprob=top_logprobs > 0, token_ids_logprobs=None)
        batch.top_logprobs_nums = [top_logprobs] * (0 if info is None else len(info))
        batch.has_grammar = grammars
        batch.req_pool_indices = getattr(info, SLOTS_ATTRIBUTE, None)
        self.drafts.load(None, batch)

    def call(self, batch: types.SimpleNamespace, hidden: torch.Tensor) -> torch.Tensor:
        """The logits that SGLang's worker sees."""
        return self.model.logits_processor(None, hidden, self.model.lm_head, batch).next_token_logits

    def decode(self, hidden: torch.Tensor, position: int = FIRST) -> torch.Tensor:
        """``call`` in a step of the chain, in which all rows are at one position."""
        positions = torch.full((len(hidden),), position, device=hidden.device)
        return self.call(forward_batch("DECODE", positions, len(hidden)), hidden)


def requests_at(temperature: float, count: int = 1, seed: int = 0) -> list:
    """Requests with the seeds from ``seed`` on."""
    return [request(str(row), temperature=temperature, sampling_seed=row + seed) for row in range(count)]


@pytest.fixture
def server(head, one_rank, fake_heads, monkeypatch) -> Callable[..., Server]:
    """Makes servers. refused: why they leave heads to SGLang. prepared: for each head, whether the server was
    starting."""

    def prepare(runtime: Runtime, *head: Any, starting: bool) -> HeadState | str:
        make.prepared.append(starting)
        return make.refused or HeadState(*head)

    def make(**options: Any) -> Server:
        return Server(head, **options)

    make.refused, make.prepared = None, []
    monkeypatch.setattr(Runtime, "_prepare", prepare)
    return make


def drawn(logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]) -> list[int]:
    """What ``sample_from_logits`` draws, as the verification does."""
    device = logits.device
    params = BatchParams(
        torch.tensor(temperatures, device=device),
        torch.tensor(seeds, device=device),
        torch.tensor(positions, device=device),
    )
    return sample_from_logits(logits, params).token_ids.tolist()


# --- which token ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafts_are_the_targets_tokens_as_often_as_the_noise_allows(server, head, hidden, info_of, device, temperature):
    """Within five standard deviations, of a draft model that is wrong; far more often than the draft model's best
    token."""
    requests = 20_000 if device.type == "cuda" else 1_500
    target, error = 0.2 * hidden(2)
    draft = target + 0.4 * error
    p, q = (torch.softmax(head.logits(state[None])[0].double() / temperature, -1) for state in (target, draft))
    coupled = server(size=requests)
    coupled.load(info_of(requests_at(temperature, requests)))
    drafts = coupled.decode(draft.repeat(requests, 1)).argmax(-1)
    tokens = drawn(
        head.logits(target[None]).repeat(requests, 1),
        [temperature] * requests,
        list(range(requests)),
        [FIRST + 1] * requests,
    )
    accepted = (drafts == torch.tensor(tokens, device=device)).double().mean().item()
    want = coupled_acceptance(p, q)
    assert abs(accepted - want) < 5 * (want * (1 - want) / requests) ** 0.5
    assert want > p[q.argmax()] + 0.2, "else this says little"


MIXED = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 1.7, "top_k": 1}]
TEMPERATURES = [0.0, 1.0, 0.3, 0.0]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "DRAFT_EXTEND_V2", "selected"])
@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_each_row_is_drawn_at_its_temperature_and_greedy_rows_are_the_largest_logit(
    server, head, hidden, info_of, device, drafting, mode, padding
):
    """In all passes of a draft model: a step of the chain, a prefill, and the pass over verified tokens, whose rows are
    all nodes or the last accepted ones. No logits are computed where SGLang takes the largest. padding: rows that a
    graph of SGLang's has beside the batch."""
    server = server(mode=drafting)
    info = info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)])
    server.load(info)
    rows, others, copies, name = len(MIXED) + padding, {}, 1, mode
    if mode == "DECODE":
        positions = FIRST + torch.arange(rows)
        last = positions.tolist()
    elif mode == "EXTEND":
        lengths = 1 + torch.arange(rows)
        positions, last = torch.cat([torch.arange(length) for length in lengths]), (lengths - 1).tolist()
        others["extend_seq_lens"] = lengths.to(device)
    else:
        positions = (FIRST + 10 * torch.arange(rows)[:, None] + torch.arange(NODES)).reshape(-1)
        last, copies, name = positions.tolist(), NODES, "DRAFT_EXTEND_V2"
        if mode == "selected":
            select = NODES * torch.arange(rows) + torch.arange(rows) % NODES
            others["spec_info"] = types.SimpleNamespace(select_index=select.to(device))
            last, copies = positions[select].tolist(), 1
    states = 0.3 * hidden(rows * copies)
    logits, batch = head.logits(states), forward_batch(name, positions.to(device), rows, **others)
    seen = server.call(batch, states)
    served = len(MIXED) * copies
    want = drawn(
        logits[:served],
        [temperature for temperature in TEMPERATURES for _ in range(copies)],
        [row for row in range(len(MIXED)) for _ in range(copies)],
        [position + 1 for position in last[:served]],
    )
    best = logits.argmax(-1)
    if drafting is DraftMode.GREEDY:
        want = best[:served].tolist()
    drafts = torch.argmax(seen, dim=-1, keepdim=True)
    assert drafts.shape == (len(states), 1) and drafts.dtype == torch.int64
    assert drafts[:served, 0].tolist() == want
    greedy = torch.tensor([temperature == 0 for temperature in TEMPERATURES]).repeat_interleave(copies).to(device)
    assert torch.equal(drafts[:served, 0][greedy], best[:served][greedy])
    assert (drafts[:, 0] != best).any() == (drafting is DraftMode.COUPLED), "some rows are drawn"
    # Some rows: as SGLang's graphs cut off padding, and as it selects the last accepted node.
    selected = torch.arange(served - 1, -1, -2, device=device)
    assert torch.equal(seen[:served].argmax(-1), drafts[:served, 0])
    assert torch.equal(seen[selected].argmax(-1), drafts[selected, 0])
    assert server.computed == 0
    # After a prefill it takes the most probable token, and one that is certain is that.
    probabilities = torch.softmax(seen, dim=-1)
    most, tokens = torch.max(probabilities, dim=-1, keepdim=True)
    assert most.tolist() == [[1.0]] * len(seen) and torch.equal(tokens, drafts) and most.dtype == torch.float32
    assert torch.equal(probabilities[selected].max(-1).indices, drafts[selected, 0])
    assert torch.equal(probabilities.argmax(-1), drafts[:, 0]) and server.computed == 0
    certain = torch.nn.functional.one_hot(drafts[:, 0], VOCAB).float()
    assert torch.equal(torch.softmax(probabilities, -1), torch.softmax(certain, -1)), "no stand-in for that"
    assert torch.equal(probabilities + 0.0, certain) and server.computed == 0
    again = server.call(batch, states)
    assert torch.equal(again.max(-1).indices, drafts[:, 0]), "the largest logit itself is computed"
    assert torch.equal(again.argmax(0), seen.argmax(0)), "the row of each id"
    assert server.computed == 2 * len(states)
    assert torch.equal(seen.argmax(-1), drafts[:, 0]) and torch.equal(seen[selected].argmax(-1), drafts[selected, 0])
    assert torch.equal(torch.softmax(seen, -1), probabilities + 0.0), "of the logits that are there now"
    seen.fill_(0.0)
    assert torch.equal(torch.softmax(seen, -1), torch.full_like(probabilities + 0.0, 1 / VOCAB)), "and of changed ones"


def scores_of(logits: torch.Tensor, temperatures: list[float], seeds: list[int], positions: list[int]) -> torch.Tensor:
    """``[N, V]``, the perturbed score of each id; of greedy rows its logit."""
    row = [torch.tensor(each, device=logits.device) for each in (temperatures, seeds, positions)]
    ids, scores = best_ids_ref(logits.double(), *row, number=logits.shape[1])
    return torch.empty_like(scores).scatter_(1, ids, scores)


@pytest.mark.parametrize("own", [False, True], ids=["all ids", "some of the ids"])
@pytest.mark.parametrize("children", [2, 4])
@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_the_children_of_a_node_are_the_drafts_and_the_next_best_ids_with_chances_by_their_scores(
    server, head, hidden, info_of, device, drafting, children, own
):
    """In a pass over as many nodes per request as a node has children. No logits are computed where SGLang takes the
    largest probabilities."""
    ids_of_rows = torch.arange(1, VOCAB, 2, device=device) if own else torch.arange(VOCAB, device=device)
    options: dict[str, Any] = {}
    if own:
        draft_head = make_head(head.state.lm_head.weight[ids_of_rows].clone())
        options = {"lm_head": draft_head, "vocab_size": VOCAB, "hot_token_id": ids_of_rows}
    server = server(mode=drafting, topk=children, **options)
    info = info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)])
    server.load(info)
    rows = len(MIXED) * children
    states = 0.3 * hidden(rows)
    seen = server.call(forward_batch("DECODE", torch.full((rows,), FIRST, device=device), len(MIXED)), states)
    probabilities = torch.softmax(seen, dim=-1)
    chances, places = torch.topk(probabilities, children, dim=-1)
    assert not probabilities.is_dense, "nothing as wide as the vocabulary is made"
    assert server.computed == 0 and chances.shape == places.shape == (rows, children)
    temperatures = [one if drafting is DraftMode.COUPLED else 0.0 for one in TEMPERATURES for _ in range(children)]
    seeds = [row for row in range(len(MIXED)) for _ in range(children)]
    logits = torch.full((rows, VOCAB), -60.0, device=device)
    logits[:, ids_of_rows] = head.logits(states)[:, ids_of_rows]
    scores = scores_of(logits, temperatures, seeds, [FIRST + 1] * rows)
    found = scores.gather(1, ids_of_rows[places])
    assert torch.equal(places[:, 0], scores[:, ids_of_rows].argmax(-1)), "the draft of a chain"
    assert (found.diff() <= 0).all() and (places.sort().values.diff() > 0).all()
    torch.testing.assert_close(chances.double(), 0.9 * torch.softmax(1.5 * found, -1), rtol=1e-3, atol=1e-4)
    selected = torch.arange(rows - 1, -1, -2, device=device)
    of_some = torch.topk(torch.softmax(seen[selected], dim=-1), children, dim=-1)
    assert torch.equal(of_some.indices, places[selected]) and torch.equal(of_some.values, chances[selected])
    fewer = torch.topk(torch.softmax(seen, dim=-1), 1, dim=-1)
    assert torch.equal(fewer.values, chances.amax(-1, keepdim=True)) and server.computed == 0


def test_the_chain_gets_its_drafts_without_logits_and_moves_on(server, hidden, info_of, device):
    """In the place of a kernel of SGLang's, which would read the logits' memory."""
    coupled = server()
    coupled.load(info_of(requests_at(1.0, REQUESTS)))
    positions = torch.arange(REQUESTS, device=device)
    seen = coupled.call(forward_batch("DECODE", positions, REQUESTS), hidden(REQUESTS))
    chain, before = torch.zeros(REQUESTS, 3, dtype=torch.int64, device=device), positions.clone()
    p, drafts = coupled.drafts.add_to_chain(None, seen, positions, chain, 1)
    assert torch.equal(drafts, seen.argmax(-1, keepdim=True)) and coupled.computed == 0
    assert torch.equal(positions, before + 1) and torch.equal(chain[:, 1:2], drafts)
    assert p.tolist() == [[1.0]] * REQUESTS and not chain[:, [0, 2]].any()
    assert torch.equal(coupled.drafts.add_to_chain(None, seen, positions)[1], drafts)
    for other in (torch.zeros(2, VOCAB), seen):  # SGLang's logits, and such as somebody has read
        _ = seen.sum()
        given = coupled.drafts.add_to_chain(lambda *arguments: arguments, other, positions, chain, 2)
        assert given[0] is plain(other) and given[1:] == (positions, chain, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_probabilities_need_no_logits_and_no_memory_that_is_not_there(server, hidden, info_of, mode):
    """On some GPUs SGLang 0.5.23 takes FlashInfer's softmax of contiguous logits, in C code that looks for their
    memory by itself."""
    from sgl_flashsample.sglang.lazy_logits import DraftProbabilities

    coupled = server()
    coupled.load(info_of(requests_at(1.0)))
    with mode():
        seen = coupled.decode(hidden(1))
        assert type(torch.softmax(seen, dim=-1)) is DraftProbabilities and coupled.computed == 0
        assert not seen.is_contiguous() and type(seen.contiguous()) is torch.Tensor and coupled.computed == 1
        assert not seen.is_contiguous(), "its own memory is never there"


def test_a_batch_larger_than_the_workspace_is_drawn_in_parts(server, head, hidden, info_of, script, device):
    requests = MAX_COMPILED_ROWS // NODES + 2
    rows, coupled = requests * NODES, server(size=requests)
    coupled.load(info_of(requests_at(1.0, requests)))
    states, positions = hidden(rows), torch.arange(rows, device=device)
    seen = coupled.call(forward_batch("DRAFT_EXTEND_V2", positions, requests), states)
    seeds = [row // NODES for row in range(rows)]
    want = drawn(head.logits(states), [1.0] * rows, seeds, (positions + 1).tolist())
    differ = sum(got != token for got, token in zip(seen.argmax(-1).tolist(), want, strict=True))
    assert differ <= (device.type == "cuda"), "one near-tie, where a GEMM has the logits"
    assert [call.rows for call in script.calls] == [MAX_COMPILED_ROWS, 2 * NODES]


def test_a_pass_that_drafts_nothing_is_left_alone(server, head, hidden, info_of, device):
    coupled = server()
    coupled.load(info_of(requests_at(1.0)))
    none = forward_batch("IDLE", torch.empty(0, dtype=torch.int64), 0)
    assert coupled.call(none, hidden(1)[:0]).shape == (0, VOCAB)
    states = hidden(REQUESTS + 1)
    for batch in (
        forward_batch("DECODE", torch.arange(REQUESTS + 1, device=device), REQUESTS + 1),  # more than the server has
        forward_batch("TARGET_VERIFY", torch.arange(REQUESTS + 1, device=device), 1),
        forward_batch("DECODE", torch.arange(2, device=device), 2),  # rows of whom?
        forward_batch("EXTEND", torch.arange(2, device=device), 2, extend_return_logprob=True),
    ):
        assert type(coupled.call(batch, states)) is torch.Tensor
    batch = forward_batch("DECODE", torch.arange(1, device=device), 1)
    nothing = types.SimpleNamespace(next_token_logits=None)  # what an autotuner of SGLang's computes
    assert coupled.drafts.draw(None, (None, None, None, batch), {}, nothing) is None
    want = drawn(head.logits(states[:1]), [1.0], coupled.drafts._rows.seed[:1].tolist(), [1])
    assert coupled.call(batch, states[:1]).argmax(-1).tolist() == want and coupled.computed == 4 * len(states)


def chain_of(coupled: Server, first: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``[B, D - 1]``: the drafts after ``first`` (``[B, 1]``), by SGLang's own loop, hooked as in a server. hidden:
    ``[B, D, H]`` of the draft model after each node."""
    from sglang.srt.speculative import eagle_worker_v2

    rows, steps = hidden.shape[0], iter(range(1, NODES - 1))
    device = hidden.device

    def forward(batch: types.SimpleNamespace) -> types.SimpleNamespace:
        states = hidden[:, next(steps)].contiguous()
        output = coupled.model.logits_processor(None, states, coupled.model.lm_head, batch)
        return types.SimpleNamespace(logits_output=output)

    spec_info = types.SimpleNamespace(
        topk_p=torch.ones(rows, 1, device=device), topk_index=first, hidden_states=None, dsa_topk_indices=None
    )
    batch = forward_batch("DECODE", torch.full((rows,), FIRST, device=device), rows, spec_info=spec_info)
    batch.out_cache_loc = torch.arange(rows * (NODES - 1), device=device)
    model_config = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(architectures=["LlamaForCausalLM"]), model_is_mrope=False
    )
    runner = types.SimpleNamespace(forward=forward, canary_manager=None, model_config=model_config)
    runner.model = coupled.model
    worker = types.SimpleNamespace(
        topk=1,
        speculative_num_steps=NODES - 1,
        speculative_num_draft_tokens=NODES,
        hot_token_id=None,
        index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False,
        draft_attn_backend=types.SimpleNamespace(attn_backends=[None] * NODES),
        draft_runner=runner,
        _topk1_parents_prealloc=torch.zeros(rows, NODES, dtype=torch.int64, device=device),
        _topk1_score_indices_prealloc=torch.zeros(rows, NODES, dtype=torch.int64, device=device),
    )
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(eagle_worker_v2, "draft_topk1_postprocess"):
            hooked = functools.partial(coupled.drafts.add_to_chain, eagle_worker_v2.draft_topk1_postprocess)
            patch.setattr(eagle_worker_v2, "draft_topk1_postprocess", hooked)
        return eagle_worker_v2.EagleDraftWorker.draft_forward(worker, batch)[2]


def test_drafts_of_the_target_itself_are_all_accepted_at_every_temperature(server, head, hidden, info_of, monkeypatch):
    """Through SGLang's chain of drafts and our verification: the positions of the noise are the same in both."""
    from sglang.srt.speculative import eagle_worker_v2

    from sgl_flashsample.sglang.speculation import SpeculationHooks

    spec = types.SimpleNamespace(speculative_use_rejection_sampling=False)
    monkeypatch.setattr(eagle_worker_v2, "get_spec", lambda: spec)
    temperatures = [0.0, 0.2, 0.7, 1.0, 1.5, 4.0]
    coupled, rows = server(), len(temperatures)
    info = info_of([request(str(row), temperature=one) for row, one in enumerate(temperatures)])
    coupled.load(info)
    states = hidden(rows * NODES)
    nodes = states.view(rows, NODES, -1)
    # The pass over the tokens of the last verification gained the root, one past what is in the KV cache.
    verified = torch.full((rows,), FIRST - 1, device=states.device)
    selected = types.SimpleNamespace(select_index=torch.arange(rows, device=states.device))
    extend = forward_batch("DRAFT_EXTEND_V2", verified, rows, spec_info=selected)
    first = coupled.call(extend, nodes[:, 0].contiguous()).argmax(-1, keepdim=True)
    drafts = torch.cat([torch.zeros_like(first), chain_of(coupled, first, nodes)], 1)
    best = head.logits(states).view(rows, NODES, VOCAB)[:, :-1].argmax(-1)
    assert (drafts[:, 1:] != best).any(0).all(), "each depth has drafts that are not the best token"
    verify_input, batch, output = verification(info, head.lazy(states), CHAIN, drafts)
    _, num_tokens, _ = SpeculationHooks(coupled.runtime).eagle_sample(Original(), verify_input, batch, output)
    assert num_tokens.tolist() == [NODES] * rows and coupled.computed == 0, "no logits of drafts"


# --- from which head --------------------------------------------------------------------------------------------------


def test_a_head_that_is_the_targets_is_not_prepared_again(server, head):
    """EAGLE's draft model has the target's LM head."""
    drafting = server()
    assert drafting.runtime.draft_head is head.state
    assert drafting.runtime.status["draft_head"] == drafting.runtime.status["heads"][0]


def test_a_draft_model_with_a_head_of_its_own_is_drawn_from_it(server, hidden, info_of, device):
    """STANDALONE's is prepared when it has loaded, and is then the one whose drafts are drawn, with the weight that it
    has by then."""
    draft_head = make_head(weights(device, seed=9, dtype=torch.float32))
    drafting = server(lm_head=draft_head, attach=False)
    drafting.runtime.prepares_drafts = True
    drafting.runtime.leave_drafts(drafting.model)
    prepared = drafting.runtime.draft_head
    assert prepared is not None and prepared not in drafting.runtime.heads
    drafting.drafts.attach(drafting.worker)
    assert drafting.runtime.draft_head is prepared
    drafting.load(info_of(requests_at(1.0, 4)))
    states = hidden(4)
    for weight in (draft_head.weight, -draft_head.weight):
        draft_head.weight = weight
        seen = drafting.decode(states)
        want = drawn((states @ weight.T)[:, :VOCAB], [1.0] * 4, list(range(4)), [FIRST + 1] * 4)
        assert seen.argmax(-1).tolist() == want


def test_a_screen_that_graphs_were_captured_with_is_written_anew_in_its_place_and_never_freed(
    one_rank, hidden, info_of, device
):
    """Of the draft model's own head, through a change of its weights."""
    target = types.SimpleNamespace(state=make_state(device))
    draft_state = make_state(device, seed=9, screened=True)
    drafting = Server(target, lm_head=draft_state.lm_head, attach=False)
    drafting.runtime.draft_head = draft_state
    drafting.drafts.attach(drafting.worker)
    screen = drafting.drafts._head.screen
    assert is_serving(draft_state) and screen is not None
    place = screen.int8_head.weight.data_ptr()
    drafting.runtime.weights_change()
    assert not is_serving(draft_state)
    drafting.runtime.free_screens()
    draft_state.lm_head.weight.copy_(weights(device, seed=10))
    drafting.runtime.renew_screens()
    assert is_serving(draft_state) and drafting.drafts._head.screen.int8_head.weight.data_ptr() == place
    states = hidden(4).to(dtype_on(device))
    logits = (states.float() @ draft_state.lm_head.weight.float().T)[:, :VOCAB]
    want = logits.to(states.dtype).argmax(-1)  # as the head rounds them; of equal ones the lowest id
    assert torch.equal(drafting.decode(states).argmax(-1), want)


# --- which rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["SGLang's row", "top logprobs", "no batch", "inactive", "too many", "no memory", "no grammars"]
)
def test_a_batch_that_sglang_verifies_has_greedy_drafts(server, head, hidden, info_of, case):
    """Its coins accept a draft by the target's probability, whichever noise it has: the most likely token is best."""
    coupled = server()
    coupled.load(info_of(requests_at(3.0, 3)))
    states = hidden(3)
    best = head.logits(states).argmax(-1)
    assert not torch.equal(coupled.decode(states).argmax(-1), best)
    info = info_of([request("0", mask=case == "SGLang's row"), request("1"), request("2")])
    if case == "no batch":
        info = None
    elif case == "inactive":
        coupled.runtime.inactive_reason = "off"
    elif case == "too many":
        info = info_of(requests_at(1.0, REQUESTS + 1))
    elif case == "no memory":
        head.state.out_of_memory(3 * NODES)
    elif case == "no grammars":
        coupled.runtime.no_grammars_reason = "off"
    coupled.load(info, top_logprobs=129 if case == "top logprobs" else 0, grammars=case == "no grammars")
    assert torch.equal(coupled.decode(states).argmax(-1), best)
    assert not coupled.drafts._rows.temperature.any(), "what graphs read that were captured already"


def test_what_a_graph_reads_stays_where_it_is_and_is_written_when_the_batch_changes(server, hidden, info_of, device):
    coupled = server()
    drafts = coupled.drafts
    tensors = [drafts._rows.temperature, drafts._rows.seed, *drafts._head.workspaces[0].splits]
    places = [tensor.data_ptr() for tensor in tensors]
    first, second = info_of(requests_at(0.5, 2, seed=5)), info_of(requests_at(0.9, 4, seed=5))
    coupled.load(first)
    versions = [tensor._version for tensor in tensors[:2]]
    coupled.load(first)
    assert [tensor._version for tensor in tensors[:2]] == versions, "the same batch is not written again"
    coupled.load(second)
    coupled.drafts.attach(coupled.worker)
    rows = REQUESTS * NODES
    batch = forward_batch("DRAFT_EXTEND_V2", torch.arange(rows, device=device), REQUESTS)
    coupled.call(batch, hidden(rows))
    tensors = [drafts._rows.temperature, drafts._rows.seed, *drafts._head.workspaces[0].splits]
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert drafts._rows.temperature[:4].tolist() == pytest.approx([0.9] * 4)
    assert drafts._rows.seed[:4].tolist() == [5, 6, 7, 8]


def test_drafts_are_drawn_with_the_parameters_of_the_requests_that_are_left_in_the_batch(server, info_of, device):
    coupled = server()
    info = info_of([request(str(row), temperature=0.5 + row, sampling_seed=row + 5) for row in range(4)])
    coupled.load(info)
    setattr(info, BATCH_ATTRIBUTE, batch_of(info).keep([3, 1]))
    setattr(info, SLOTS_ATTRIBUTE, torch.tensor([4, 2, 9], device=device))  # SGLang's may be longer than the batch
    coupled.load(info)
    rows = coupled.drafts._rows
    assert rows.temperature[:2].tolist() == [3.5, 1.5] and rows.seed[:2].tolist() == [8, 6]
    assert coupled.runtime.draws_drafts


def test_drafts_read_the_targets_screen_and_are_not_counted_there(one_rank, hidden, info_of, device):
    """Else what drafts leave undecided would pause the screen for the target."""
    head = CountingHead(device, screened=True)
    unpinned = head.state.screen.num_bytes
    coupled = Server(head)
    coupled.load(info_of(requests_at(1.0)))
    coupled.decode(hidden(1))
    drafted, target = coupled.drafts._head.screen, head.state.screen.serving(head.state.head.lm_head)
    assert drafted.int8_head is target.int8_head
    assert target.counters.count_nonzero() == 0 and drafted.counters[ScreenCounter.ROWS] == 1
    assert head.state.screen.num_bytes == unpinned + drafted.workspace.num_bytes


# A GEMM would move logits whose rows are too few: graphs read them where they were.
resizes_nothing = pytest.mark.filterwarnings("error:An output with one or more elements was resized")
OWN_IDS = torch.arange(VOCAB).reshape(-1, 3)[:, ::2].reshape(-1)  # two of three, so that groups are incomplete


@resizes_nothing
@pytest.mark.parametrize("told", [VOCAB, len(OWN_IDS)], ids=["a token map", "EAGLE3"])
def test_a_draft_model_with_some_of_the_targets_ids_draws_with_the_noise_of_these(
    server, hidden, info_of, device, told, monkeypatch, caplog
):
    """In rows of any number, also with another weight. told: ids of its LogitsProcessor."""
    monkeypatch.setattr(own_vocabulary, "MAX_ROWS", 3)
    order = torch.randperm(len(OWN_IDS), generator=torch.Generator().manual_seed(2))
    token_ids = OWN_IDS[order].to(device)
    lm_head = make_head(weights(device, seed=9, dtype=torch.float32)[token_ids])
    with caplog.at_level(logging.INFO):
        drafting = server(lm_head=lm_head, vocab_size=told, hot_token_id=token_ids)
    assert drafting.drafts.mode is DraftMode.COUPLED
    assert "through logits of the ids that the draft model has; they are coupled" in caplog.text
    drafting.load(info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)]))
    states = 0.3 * hidden(len(MIXED))
    for scale in (1.0, -1.0):
        with torch.no_grad():
            lm_head.weight.mul_(scale)
        whole = torch.full((len(MIXED), VOCAB), -torch.inf, device=device)
        whole[:, token_ids] = (states.float() @ lm_head.weight.float().T).to(states.dtype).float()
        want = drawn(whole, TEMPERATURES, list(range(len(MIXED))), [FIRST + 1] * len(MIXED))
        assert token_ids[drafting.decode(states).argmax(-1)].tolist() == want
        assert want != whole.argmax(-1).tolist(), "some rows are drawn"
    assert drafting.computed == 0


COUNTED = torch.arange(3, VOCAB, 8)  # ids that traffic has, fewer than are drafted
HOT_IDS = torch.cat([COUNTED, torch.tensor([one for one in range(VOCAB) if one % 8 != 3][: 96 - len(COUNTED)])])


def counts_file(folder: Path, ids: torch.Tensor = COUNTED, vocab: int = VOCAB) -> Path:
    """Counts of traffic, the more of an id the larger it is."""
    file = folder / "hot.json"
    file.write_text(HotVocab.of_ids(np.bincount(ids, weights=1 + ids, minlength=vocab).astype(np.int64)).dumps())
    return file


@pytest.fixture
def hot_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(DRAFT_VOCAB_VARIABLE, str(tmp_path / "hot.json"))
    return counts_file(tmp_path)


def only(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits with minus infinity at other ids."""
    return torch.full_like(logits, -torch.inf).index_copy(1, ids, logits[:, ids])


@resizes_nothing
@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_a_hot_vocabulary_is_drafted_with_the_noise_of_its_ids_from_a_copy_of_their_rows(
    server, head, hidden, info_of, device, hot_file, monkeypatch, caplog, drafting
):
    """15 % of the ids, in whole groups: those that were counted, and the lowest others."""
    monkeypatch.setattr(own_vocabulary, "MAX_ROWS", 3)
    with caplog.at_level(logging.INFO):
        hot = server(mode=drafting)
    hot.load(info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)]))
    states = 0.3 * hidden(len(MIXED))
    whole = only(HOT_IDS.to(device), head.logits(states))
    want = drawn(whole, TEMPERATURES, list(range(len(MIXED))), [FIRST + 1] * len(MIXED))
    if drafting is DraftMode.GREEDY:
        want = whole.argmax(-1).tolist()
    assert hot.decode(states).argmax(-1).tolist() == want and hot.computed == 0
    assert (want != whole.argmax(-1).tolist()) == (drafting is DraftMode.COUPLED), "some rows are drawn"
    assert whole.argmax(-1).tolist() != head.logits(states).argmax(-1).tolist(), "other ids are not drafted"
    num_bytes = 96 * states.shape[1] * 4
    words = f"the 96 most frequent ids of {hot_file} (100.0 % of its tokens), a copy of {num_bytes:,} bytes"
    assert f"through logits of {words}; they are {drafting.value}" in caplog.text
    status = {"file": str(hot_file), "ids": 96, "covers": 1.0, "bytes": num_bytes}
    assert hot.runtime.status["draft_vocabulary"] == status


def test_a_hot_vocabulary_has_the_most_frequent_ids_and_says_what_they_cover(device, tmp_path):
    """A quantised head has its scales copied too."""
    weight = weights(device, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = 1 + torch.rand(len(weight), generator=torch.Generator().manual_seed(3)).to(device)
    lm_head = LMHead(weight, vocab_size=VOCAB, scale=scale, hidden_dtype=torch.float16)
    ids = torch.arange(VOCAB)
    vocabulary = own_vocabulary.HotVocabulary.of_file(lm_head, str(counts_file(tmp_path, ids)), 4)
    vocabulary.follow(lm_head, 0)
    hidden = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(4)).to(device, torch.float16)
    logits = ((hidden.float() @ weight.float().T) * scale).half().float()[:, :VOCAB]
    params = [torch.full((4,), value, device=device) for value in (1.0, 5, 6)]
    want = drawn(only(ids[-96:].to(device), logits), [1.0] * 4, [5] * 4, [6] * 4)
    assert vocabulary.draw(hidden, BatchParams(*params)).token_ids.tolist() == want
    assert vocabulary.status["covers"] == (1 + ids)[-96:].sum() / (1 + ids).sum()


def test_a_hot_vocabulary_of_a_few_ids_has_all_of_them(device, tmp_path):
    """15 % of them are less than one."""
    lm_head = LMHead(weights(device, dtype=torch.float32), vocab_size=6)
    file = counts_file(tmp_path, torch.tensor([5]), 6)
    assert own_vocabulary.HotVocabulary.of_file(lm_head, str(file), 4).status["ids"] == 6


@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
@pytest.mark.parametrize("own", [False, True], ids=["the target's head", "its own"])
def test_the_copy_of_a_hot_vocabulary_follows_the_weight_in_its_place_once_the_change_is_over(
    server, head, hidden, device, hot_file, own, drafting
):
    """Announced writes, that PyTorch does not count, and another tensor. Steps of the server write it, its graphs do
    not: they only read where it is."""
    state = make_state(device, seed=9, dtype=torch.float32) if own else head.state
    hot = server(lm_head=state.lm_head, mode=drafting)
    copy = hot.runtime.draft_vocabulary._weight
    place, states = copy.data_ptr(), hidden(REQUESTS)

    def step() -> None:
        hot.load(None)
        if settled:
            version = copy._version
            hot.load(None)
            assert copy._version == version, "nothing has changed"
            assert torch.equal(copy, state.lm_head.weight[HOT_IDS.sort().values])
        drafts, version = hot.decode(states).argmax(-1), copy._version
        want = only(HOT_IDS.to(device), states @ state.lm_head.weight[:VOCAB].T).argmax(-1)
        assert torch.equal(drafts, want) == settled and copy._version == version

    settled = True
    step()
    hot.runtime.weights_settled = settled = False
    hot.runtime.weights_change()
    write_unseen(state, weights(device, 10))
    step()
    hot.runtime.weights_settled = settled = True
    step()
    state.lm_head.weight = weights(device, 11, torch.float32)
    step()
    assert hot.runtime.draft_vocabulary._weight.data_ptr() == place


UNUSED: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "hot.json: No such file or directory": lambda file, patch: file.unlink(),
    "hot.json: it is not JSON: ": lambda file, patch: file.write_text("ids"),
    "hot.json: Expected `int` >= 1 - at `$.counted`": lambda file, patch: file.write_text(
        re.sub('("counted"): .*,', r"\1: 0,", file.read_text())
    ),
    f"hot.json counts id {VOCAB}; expected ids from 0 to {VOCAB - 1}": lambda file, patch: counts_file(
        file.parent, torch.arange(VOCAB + 1), VOCAB + 8
    ),
    "RuntimeError: it takes 9 bytes of 8": lambda file, patch: patch.setattr(
        own_vocabulary, "lack_of_memory", lambda needed, device, share: "it takes 9 bytes of 8"
    ),
    "OutOfMemoryError: no room": lambda file, patch: patch.setattr(
        own_vocabulary, "OwnIds", functools.partial(raise_error, torch.OutOfMemoryError("no room"))
    ),
}


def raise_error(error: Exception, *args: Any, **kwargs: Any) -> None:
    raise error


@pytest.mark.parametrize("words", UNUSED)
def test_counts_that_cannot_be_used_are_one_warning_and_the_whole_vocabulary_is_drafted(
    server, head, hidden, hot_file, monkeypatch, caplog, words
):
    UNUSED[words](hot_file, monkeypatch)
    whole, states = server(), hidden(REQUESTS)
    whole.load(None)
    assert torch.equal(whole.decode(states).argmax(-1), head.logits(states).argmax(-1)) and whole.computed == 0
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("flashsample: drafts are of the whole vocabulary (FLASHSAMPLE_DRAFT_VOCAB): ")
    assert words in line and whole.runtime.status["draft_vocabulary"] is None


@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_a_draft_model_with_some_of_the_ids_keeps_them_and_the_log_says_so(server, device, hot_file, caplog, drafting):
    ids = OWN_IDS.to(device)
    lm_head = make_head(weights(device, seed=9, dtype=torch.float32)[ids])
    kept = server(lm_head=lm_head, vocab_size=len(ids), hot_token_id=ids, mode=drafting)
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("FLASHSAMPLE_DRAFT_VOCAB does nothing for this draft model: it has some of the ids")
    assert kept.runtime.draws_drafts and kept.runtime.draft_vocabulary is None


# --- ids that are learned from the tokens of requests ----------------------------------------------------------------

WINDOW = VOCAB // 8  # tokens
FREQUENT = range(200, 240)


@pytest.fixture
def learning(server, monkeypatch) -> Iterator[Callable[..., Server]]:
    """Makes servers whose drafts are of learned ids."""
    monkeypatch.setenv(DRAFT_VOCAB_VARIABLE, "auto")
    made = []

    def make(**options: Any) -> Server:
        made.append(server(**options))
        return made[-1]

    yield make
    for one in made:
        if one.runtime.token_counts is not None:
            one.runtime.token_counts.close()


def answered(drafting: Server, ids: Iterable[int], windows: int = 1) -> None:
    """The server's requests have got tokens with these ids."""
    drafting.runtime.draft_vocabulary.watch(np.resize(np.array([*ids]), windows * WINDOW))


def drafted_ids(drafting: Server, states: torch.Tensor, lm_head: Any, ids: list[int] | None = None) -> bool:
    """Whether greedy drafts are the likeliest of these ids, of all by default."""
    logits = states.float() @ lm_head.weight.float()[:VOCAB].T
    if ids is not None:
        logits = only(torch.tensor(ids, device=logits.device), logits)
    drafts = drafting.decode(states).argmax(-1)
    assert drafting.computed == 0
    return torch.equal(drafts, logits.argmax(-1))


LEARNED = sorted({*FREQUENT, *range(96 - len(FREQUENT))})  # and the lowest others


@resizes_nothing
@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_drafts_are_of_all_ids_until_some_cover_the_tokens_of_requests_and_again_when_none_do(
    learning, head, hidden, info_of, device, drafting, caplog
):
    with caplog.at_level(logging.INFO):
        server = learning(mode=drafting)
        info = info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)])
        states = 0.3 * hidden(len(MIXED))

        def drafts() -> list[int]:
            server.load(info)
            return server.decode(states).argmax(-1).tolist()

        def of(logits: torch.Tensor) -> list[int]:
            if drafting is DraftMode.GREEDY:
                return logits.argmax(-1).tolist()
            return drawn(logits, TEMPERATURES, list(range(len(MIXED))), [FIRST + 1] * len(MIXED))

        whole = head.logits(states)
        some, others = (
            only(torch.tensor([*FREQUENT, *rest], device=device), whole)
            for rest in (range(96 - len(FREQUENT)), range(300, 396 - len(FREQUENT)))
        )
        assert of(whole) != of(some) != of(others) != of(whole)
        status = {"file": None, "ids": 96, "covers": 1.0, "bytes": 96 * states.shape[1] * 4}
        steps = [
            ([], of(whole), None),
            (FREQUENT, of(whole), None),
            (FREQUENT, of(some), status),
            (range(300, 300 + WINDOW), of(whole), None),
            (FREQUENT, of(others), status),
        ]
        for ids, want, facts in steps:
            if len(ids):
                answered(server, ids)
            assert drafts() == want and drafts() == want and server.computed == 0
            assert server.runtime.status["draft_vocabulary"] == facts
    lines = [record.message.removeprefix("flashsample: drafts ") for record in caplog.records]
    start, *changes = [line for line in lines if "ids" in line]
    words = f"without logits, of the 96 most frequent ids once {WINDOW} tokens or more are counted"
    assert words in start and start.count("they are " + drafting.value)
    assert changes == [
        f"are of 96 frequent ids, adopted: they cover 100.0 % of the last {WINDOW} tokens",
        f"are of the whole vocabulary, 96 frequent ids are given up: others cover 0.0 % of the last {WINDOW} tokens, "
        "those so far 0.0 %",
        f"are of 96 frequent ids, adopted: they cover 100.0 % of the last {WINDOW} tokens",
    ]


def test_tokens_of_requests_are_counted_for_drafts_without_a_file(learning, hidden, head, monkeypatch, caplog):
    """The ids that verifications accept; a step takes over what the counting thread has chosen."""
    monkeypatch.setattr(token_counts, "LOOK_SECONDS", 0.01)
    server, states = learning(mode=DraftMode.GREEDY), hidden(REQUESTS)
    counts = server.runtime.token_counts
    for _ in range(2):
        counts.add(torch.tensor(np.resize(np.array(FREQUENT), WINDOW)), VOCAB)
    counts.close()
    assert not server.runtime.draft_vocabulary.in_use
    server.load(None)
    assert drafted_ids(server, states, head.state.lm_head, LEARNED)
    assert server.runtime.draft_vocabulary.in_use and not caplog.records


@pytest.mark.parametrize("own", [False, True], ids=["the target's head", "its own"])
def test_the_copy_of_learned_ids_follows_the_weight_and_changes_in_its_place(learning, head, hidden, device, own):
    """A set that is chosen while weights change waits for their end."""
    state = make_state(device, seed=9, dtype=torch.float32) if own else head.state
    server, states = learning(lm_head=state.lm_head, mode=DraftMode.GREEDY), hidden(REQUESTS)
    vocabulary = server.runtime.draft_vocabulary
    places = [tensor.data_ptr() for tensor in (vocabulary._weight, *vocabulary._ids.operands[:4])]
    server.runtime.weights_settled = False
    answered(server, FREQUENT, 2)
    server.load(None)
    assert not vocabulary.in_use and drafted_ids(server, states, state.lm_head)
    server.runtime.weights_settled = True
    server.load(None)
    assert drafted_ids(server, states, state.lm_head, LEARNED)
    version = vocabulary._weight._version
    server.load(None)
    assert vocabulary._weight._version == version, "nothing has changed"
    server.runtime.weights_change()
    write_unseen(state, weights(device, 10))
    server.load(None)
    assert drafted_ids(server, states, state.lm_head, LEARNED)
    answered(server, [*FREQUENT, 300], 8)
    server.load(None)
    assert drafted_ids(server, states, state.lm_head, sorted({*FREQUENT, 300, *range(95 - len(FREQUENT))}))
    assert [tensor.data_ptr() for tensor in (vocabulary._weight, *vocabulary._ids.operands[:4])] == places


def test_a_set_that_cannot_be_taken_over_leaves_drafts_of_all_ids_and_the_log_says_so_once(
    learning, head, hidden, monkeypatch, caplog
):
    server, states = learning(mode=DraftMode.GREEDY), hidden(REQUESTS)
    answered(server, FREQUENT, 2)
    server.load(None)
    monkeypatch.setattr(OwnIds, "replace", functools.partial(raise_error, torch.OutOfMemoryError("no room")))
    for ids in (range(300, 300 + WINDOW), FREQUENT, FREQUENT):
        answered(server, ids)
        server.load(None)
        assert drafted_ids(server, states, head.state.lm_head)
    (line,) = [record.message for record in caplog.records]
    words = (
        "drafts are of the whole vocabulary (FLASHSAMPLE_DRAFT_VOCAB): until restart, after OutOfMemoryError: no room"
    )
    assert line == f"flashsample: {words}" and server.runtime.draws_drafts


def test_learned_ids_are_not_used_after_a_failure_of_drafts(learning, script, hidden):
    """Graphs that were captured already go on: those of all ids."""
    server = learning()
    answered(server, FREQUENT, 2)
    server.load(None)
    assert server.runtime.draft_vocabulary.in_use
    server.drafts.load(None, object())
    assert not server.runtime.draws_drafts and not server.runtime.draft_vocabulary.in_use


def test_where_ids_cannot_be_learned_all_are_drafted_and_nothing_is_counted(learning, monkeypatch, caplog):
    server = learning(attach=False)
    server.drafts.no_graphs_reason = "a hook did not land"
    server.drafts.attach(server.worker)
    (line,) = [record.message for record in caplog.records]
    words = "drafts are of the whole vocabulary (FLASHSAMPLE_DRAFT_VOCAB): RuntimeError: a hook did not land"
    assert line == f"flashsample: {words}"
    assert server.runtime.draws_drafts and server.runtime.token_counts is None


@pytest.mark.parametrize("drafting", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_a_draft_model_with_some_of_the_ids_learns_none(learning, device, caplog, drafting):
    ids = OWN_IDS.to(device)
    lm_head = make_head(weights(device, seed=9, dtype=torch.float32)[ids])
    kept = learning(lm_head=lm_head, vocab_size=len(ids), hot_token_id=ids, mode=drafting)
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("FLASHSAMPLE_DRAFT_VOCAB does nothing for this draft model: it has some of the ids")
    assert kept.runtime.draws_drafts and kept.runtime.token_counts is None


class Backend:
    """As SGLang's graph backend: runs what it captures, and replays what that returned."""

    def __init__(self) -> None:
        self.captured: dict[Any, Any] = {}
        self.failing: list[Exception] = []

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        if self.captured and self.failing:
            raise self.failing.pop()
        self.captured[shape_key] = forward_fn()

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.captured

    def replay(self, shape_key: Any, forward_batch: Any) -> Any:
        return self.captured[shape_key]


def shape_keys() -> list[Any]:
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    return [ShapeKey(size=4), ShapeKey(size=8), ShapeKey(size=8, variant_label="greedy")]


def test_each_graph_of_drafts_is_captured_of_all_ids_and_of_learned_ones_and_a_step_replays_what_is_in_use(learning):
    server = learning()
    vocabulary = server.runtime.draft_vocabulary
    runner = types.SimpleNamespace(backend=Backend())
    inner = runner.backend
    for key in shape_keys():
        server.drafts.capture(runner, key.size)
        runner.backend.capture_one(key, lambda key=key: (key, vocabulary.in_use), capture_inputs=None)
        assert runner.backend._backend is inner, "it is not put around twice"
        assert runner.backend.can_run(None, key) and not vocabulary.in_use
    assert len(inner.captured) == 2 * len(shape_keys())
    for ids, in_use in ((FREQUENT, False), (FREQUENT, True), (range(300, 300 + WINDOW), False)):
        answered(server, ids)
        server.load(None)
        assert [runner.backend.replay(key, None) for key in shape_keys()] == [(key, in_use) for key in shape_keys()]


def test_graphs_that_are_captured_again_in_the_middle_are_of_both_too(learning):
    """As after a change of weights, while learned ids are in use."""
    server = learning()
    answered(server, FREQUENT, 2)
    server.load(None)
    vocabulary, backend, key = server.runtime.draft_vocabulary, Backend(), shape_keys()[0]
    both = BothGraphs(backend, vocabulary)
    both.capture_one(key, lambda: vocabulary.in_use)
    assert vocabulary.in_use and sorted(backend.captured.values()) == [False, True]
    assert both.replay(key, None) is True


def test_a_graph_of_learned_ids_that_cannot_be_captured_leaves_those_of_all_ids(learning, caplog):
    server, backend, (key, other, _) = learning(), Backend(), shape_keys()
    vocabulary = server.runtime.draft_vocabulary
    backend.failing.append(torch.OutOfMemoryError("no room"))
    both = BothGraphs(backend, vocabulary)
    both.capture_one(key, lambda: vocabulary.in_use)
    both.capture_one(other, lambda: vocabulary.in_use)
    answered(server, FREQUENT, 2)
    server.load(None)
    assert both.replay(key, None) is False and list(backend.captured) == [key, other]
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("(FLASHSAMPLE_DRAFT_VOCAB): until restart, after OutOfMemoryError: no room")


def test_a_server_whose_ids_are_not_learned_has_one_graph_of_each_batch_size(server):
    runner = types.SimpleNamespace(backend=(backend := Backend()))
    server().drafts.capture(runner, 4)
    assert runner.backend is backend


@pytest.mark.gpu
def test_captured_passes_draw_the_learned_ids_that_a_step_has_taken_over(learning, hidden, info_of, device):
    """Both graphs once, as SGLang captures them; sets change between their replays."""

    class Graphs(Backend):
        def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *args: Any) -> None:
            forward_fn()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                drafts = forward_fn()
            self.captured[shape_key] = graph, drafts

        def replay(self, shape_key: Any, forward_batch: Any) -> torch.Tensor:
            graph, drafts = self.captured[shape_key]
            graph.replay()
            return drafts.clone()

    server, states, key = learning(), 0.3 * hidden(REQUESTS), shape_keys()[0]
    server.load(info_of(requests_at(1.0, REQUESTS)))
    batch = forward_batch("DECODE", torch.full((REQUESTS,), FIRST, device=device), REQUESTS)
    both = BothGraphs(Graphs(), server.runtime.draft_vocabulary)
    both.capture_one(key, lambda: server.call(batch, states).tokens)
    seen = []
    others = range(500, 540)
    # After one window, most of the others have been answered no more often than ids that came once before them.
    for ids, windows in ((FREQUENT, 1), (FREQUENT, 1), (range(300, 300 + WINDOW), 1), (others, 2), (others, 1)):
        answered(server, ids, windows)
        server.load(info_of(requests_at(1.0, REQUESTS)))
        assert torch.equal(both.replay(key, batch), server.call(batch, states).argmax(-1))
        seen.append(server.runtime.draft_vocabulary.in_use)
    assert seen == [False, True, False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["without a screen", "screened", "some of the target's ids", "a hot vocabulary"])
def test_a_captured_pass_draws_on_while_batches_grow_and_follows_the_loaded_parameters(
    one_rank, hidden, info_of, device, server, kind, tmp_path, monkeypatch
):
    """100,000 replays, between which the target draws, from the same INT8 copy where there is one, and its workspace is
    replaced by larger ones."""
    head, own = CountingHead(device, screened=kind == "screened"), dict[str, Any]()
    if kind == "some of the target's ids":
        ids = OWN_IDS.to(device)
        weight = weights(device, seed=9, dtype=torch.float32)[ids]
        own = {"lm_head": make_head(weight), "vocab_size": len(ids), "hot_token_id": ids}
    elif kind == "a hot vocabulary":
        monkeypatch.setenv(DRAFT_VOCAB_VARIABLE, str(counts_file(tmp_path)))
    coupled, states = Server(head, **own), 0.3 * hidden(REQUESTS)
    assert (coupled.drafts._head.screen is not None) == (kind == "screened")
    batch = forward_batch("DECODE", torch.full((REQUESTS,), FIRST, device=device), REQUESTS)
    infos = [info_of(requests_at(t, REQUESTS)) for t in (1.0, 0.5)]
    wanted = []
    for info in infos:
        coupled.load(info)
        wanted.append(coupled.call(batch, states).argmax(-1))
    assert not torch.equal(*wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = coupled.call(batch, states).tokens
    ones, row = torch.ones(REQUESTS, device=device), torch.arange(REQUESTS, device=device)
    params, wrong = BatchParams(ones, row, row), torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(100):
        coupled.load(infos[replay % 2])
        head.state.update(MAX_COMPILED_ROWS + 8 * replay)
        launch(head.state, states, params, False)
        for _ in range(1000):
            graph.replay()
            wrong += (drafts != wanted[replay % 2]).sum()
    assert int(wrong) == 0


# --- where not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"mode": DraftMode.GREEDY}, "FLASHSAMPLE_DRAFTS says so"),
        ({"hot_token_id": torch.tensor([5, 9])}, f"the draft model has {VOCAB} rows for 2 of the target's ids"),
        (
            {"hot_token_id": torch.tensor([*range(VOCAB - 1), 5])},
            f"the draft model's ids are not different ones from 0 to {VOCAB - 1}",
        ),
        (
            {"hot_token_id": torch.arange(1, VOCAB + 1)},
            f"the draft model's ids are not different ones from 0 to {VOCAB - 1}",
        ),
        ({"vocab_size": VOCAB - 16}, f"the draft model has {VOCAB - 16} ids, the target {VOCAB}"),
    ],
    ids=str,
)
def test_where_drafts_cannot_be_coupled_they_are_greedy_and_the_log_says_why(
    server, head, hidden, info_of, caplog, changes, words
):
    with caplog.at_level(logging.INFO):
        drafting = server(**changes)
    drafting.load(info_of(requests_at(5.0, seed=1)))  # which does not draw the most likely token
    states = hidden(1)
    ids = changes.get("vocab_size", VOCAB)
    best = head.logits(states)[:, :ids].argmax(-1)
    assert torch.equal(drafting.decode(states).argmax(-1), best) == (words is not None)
    assert drafting.computed == 0
    (line,) = [record.message for record in caplog.records if "they are" in record.message]
    assert line.endswith("with the target's noise" if words is None else f"they are greedy: {words}")


UNDRAWN: dict[str, tuple[dict[str, Any], Callable[[Server], None]]] = {
    "the draft model has 2 places that compute logits; expected 1": ({"others": 1}, lambda drafting: None),
    "AttributeError: 'NoneType' object has no attribute 'size'": (
        {"req_to_token_pool": None},
        lambda drafting: None,
    ),
    "the LM head is quantised": ({"lm_head": types.SimpleNamespace(weight=None)}, lambda drafting: None),
    "the draft model shows 0 LM heads; expected 1": ({}, lambda drafting: delattr(drafting.model, "lm_head")),
    "a kernel failed": ({}, lambda drafting: drafting.runtime.disable("a kernel failed")),
    "the model shows its LM head only at its first batch": ({}, lambda drafting: drafting.runtime._heads.clear()),
}


@pytest.mark.parametrize("words", UNDRAWN)
def test_where_drafts_cannot_be_drawn_they_are_sglangs_and_the_log_says_why(server, hidden, info_of, caplog, words):
    options, change = UNDRAWN[words]
    server.refused = words  # of a head that is not the target's
    drafting = server(attach=False, **options)
    change(drafting)
    drafting.drafts.attach(drafting.worker)
    drafting.load(info_of(requests_at(5.0)))
    assert not drafting.runtime.draws_drafts
    line = caplog.records[-1].message
    assert line == f"flashsample: drafts are SGLang's own (greedy), the tokens are the same: {words}"
    if getattr(getattr(drafting.model, "lm_head", None), "weight", None) is not None:
        assert type(drafting.decode(hidden(1))) is torch.Tensor and drafting.computed == 1


def test_a_draft_model_that_cannot_be_drawn_from_leaves_the_target_alone(server, device):
    """STANDALONE's is looked at when it has loaded, in the middle of SGLang's start; and not at all where nothing is
    fused."""
    server.refused = "the LM head is quantised"
    drafting = server(lm_head=make_head(weights(device, seed=9).double()), attach=False)
    runner = types.SimpleNamespace(is_generation=True, is_draft_worker=True, model=drafting.model)
    drafting.runtime.prepares_drafts = True
    drafting.hooks.load_model(None, runner)
    assert drafting.runtime.inactive_reason is None and drafting.runtime.draft_head is None
    drafting.runtime.disable("a kernel failed")
    drafting.hooks.load_model(None, runner)
    assert server.prepared == [True]


@pytest.mark.parametrize("failing", ["load", "draw"])
def test_after_a_failure_drafts_are_sglangs_and_the_log_says_so_once(
    server, head, hidden, info_of, caplog, script, failing
):
    coupled, states = server(), hidden(1)
    coupled.load(info_of(requests_at(5.0)))
    if failing == "load":
        coupled.drafts.load(None, object())
    else:
        script.error = RuntimeError("no kernel")
    for _ in range(2):
        assert torch.equal(coupled.decode(states), head.logits(states))
        coupled.load(info_of(requests_at(5.0, seed=1)))
    (line,) = [record.message for record in caplog.records if "drafts are SGLang's" in record.message]
    assert not coupled.drafts._rows.temperature.any(), "what graphs read"
    errors = {
        "load": "AttributeError: 'object' object has no attribute 'sampling_info'",
        "draw": "RuntimeError: no kernel",
    }
    assert line.endswith(f"the same: until restart, after {errors[failing]}")
    assert coupled.runtime.inactive_reason is None and coupled.runtime.draft_head is head.state, "its screen lives on"


def test_a_pass_that_finds_no_memory_has_sglangs_logits_and_the_next_one_is_drawn(server, hidden, script):
    drafting, states = server(), hidden(1)
    script.error = torch.OutOfMemoryError("a fault")
    assert type(drafting.decode(states)) is torch.Tensor and drafting.computed == 1
    script.error = None
    assert drafting.decode(states).tokens.shape == (1,) and drafting.computed == 1


@pytest.fixture
def installed(server_config, monkeypatch) -> list:
    """What ``install`` gets in a server of EAGLE."""
    monkeypatch.delenv(DRAFTS_VARIABLE, raising=False)
    server_config.spec.speculative_algorithm = "EAGLE"
    return []


@pytest.mark.parametrize(
    "text, mode", [(None, "coupled"), ("coupled", "coupled"), ("greedy", "greedy"), ("stock", None)]
)
def test_drafts_are_what_the_switch_says(installed, runtime, monkeypatch, caplog, text, mode):
    if text is not None:
        monkeypatch.setenv(DRAFTS_VARIABLE, text)
    start(runtime, installed.append)
    assert [drafts.mode for drafts in installed] == ([] if mode is None else [mode])
    assert not caplog.records


@pytest.mark.parametrize(
    "changes, words",
    [
        *(({"spec.speculative_algorithm": name}, None) for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")),
        *(({"spec.speculative_algorithm": name}, f"{name} drafts") for name in ("NGRAM", "FROZEN_KV_MTP")),
        ({"spec.enable_multi_layer_eagle": True}, "several draft heads (--enable-multi-layer-eagle)"),
        ({"spec.speculative_eagle_topk": 8}, None),
        ({"spec.speculative_eagle_topk": 9}, "a tree of drafts with more than 8 children (--speculative-eagle-topk)"),
        ({"parallel.tp_size": 2}, None),
        ({"parallel.tp_size": 2, "spec.speculative_eagle_topk": 2}, None),
        ({"parallel.pp_size": 2}, "drafts in a pipeline"),
    ],
    ids=str,
)
def test_of_a_server_whose_drafts_cannot_be_drawn_the_log_says_why(
    installed, runtime, server_config, caplog, changes, words
):
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(server_config, part), name, value)
    start(runtime, installed.append)
    assert len(installed) == (0 if words else 1)
    assert runtime.prepares_drafts == (changes.get("spec.speculative_algorithm") == "STANDALONE"), "its head stays"
    lines = [record.message for record in caplog.records]
    assert lines == ([] if words is None else [lines[0]]) and all(words in line for line in lines)


def test_a_server_whose_configuration_cannot_be_read_keeps_its_drafts(installed, runtime, server_config, caplog):
    del server_config.spec.speculative_eagle_topk
    start(runtime, installed.append)
    (line,) = [record.message for record in caplog.records]
    assert installed == [] and "speculative_eagle_topk" in line


# --- ranks that share the draft model's LM head ---------------------------------------------------------------------


class Others:
    """An exchange whose other rank has drawn the next id, of at most three rows at a time. sizes: of its merges."""

    rank, num_ranks, memory = 0, 2, types.SimpleNamespace(max_rows=3, total_bytes=0)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def merge(self, drawn: Any) -> Any:
        self.sizes.append(len(drawn.token_ids))
        return drawn._replace(token_ids=(drawn.token_ids + 1) % VOCAB)

    def merge_children(self, children: Children) -> Children:
        self.sizes.append(len(children.token_ids))
        return children._replace(token_ids=(children.token_ids + 1) % VOCAB)

    def use_memory_of(self, other: Any) -> bool:
        return isinstance(other, Others)


@pytest.fixture
def others(head) -> Others:
    """Another rank holds the rest of the target's head, which EAGLE's draft model has too."""
    head.state.exchange = Others()
    return head.state.exchange


@pytest.mark.parametrize("children", [1, 2])
@pytest.mark.parametrize("mode", [DraftMode.COUPLED, DraftMode.GREEDY])
def test_ranks_draft_what_they_have_drawn_together_in_blocks_that_fit_their_memory(
    server, head, hidden, info_of, mode, children
):
    states = hidden(4)
    alone = server(mode=mode, topk=children)
    alone.load(info_of(requests_at(1.0, 4)))
    drafts = alone.decode(states).ids
    head.state.exchange = others = Others()
    together = server(mode=mode, topk=children)
    together.load(info_of(requests_at(1.0, 4)))
    assert torch.equal(together.decode(states).ids, (drafts + 1) % VOCAB)
    assert others.sizes == [3, 1] and together.computed == 0


@pytest.mark.parametrize("failing", ["attach", "load", "draw", "memory"])
def test_a_rank_whose_drafts_fail_ends_the_server_instead_of_leaving_the_others_alone(
    server, others, hidden, info_of, script, failing
):
    drafting = server(attach=failing != "attach")
    with pytest.raises(RankError, match=r"a fault|'NoneType' object|'object' object"):
        if failing == "attach":
            drafting.worker.req_to_token_pool = None
            drafting.drafts.attach(drafting.worker)
        elif failing == "load":
            drafting.drafts.load(None, object())
        else:
            script.error = {"draw": RuntimeError, "memory": torch.OutOfMemoryError}[failing]("a fault")
            drafting.decode(hidden(1))


@pytest.mark.parametrize("name, value", [("whole_rows", True), ("straddling", object())])
def test_where_a_group_of_ids_lies_on_two_ranks_drafts_are_sglangs(server, head, others, hidden, caplog, name, value):
    setattr(head.state, name, value)
    drafting = server()
    assert "a group of 16 ids of the draft model lies on two ranks, or a rank has none" in caplog.records[-1].message
    assert not drafting.runtime.draws_drafts and type(drafting.decode(hidden(1))) is torch.Tensor


@pytest.mark.parametrize("order", ["ascending", "mixed"])
def test_ranks_draw_from_the_own_ids_of_a_draft_model_what_one_rank_draws(device, order):
    """As EAGLE3's on two ranks, whose parts end with a group of the target's ids."""
    token_ids = OWN_IDS[:384].to(device)
    if order == "mixed":
        generator = torch.Generator().manual_seed(3)
        token_ids = torch.cat([part[torch.randperm(192, generator=generator)] for part in token_ids.split(192)])
    weight = weights(device, seed=9, dtype=torch.float32)[:384]
    states = 0.3 * hidden_states(device, 8, dtype=torch.float32)
    rows = torch.arange(8, device=device)
    params = BatchParams(torch.ones(8, device=device), rows, rows)
    heads = [LMHead.of_rank(weight[192 * rank :][:192].contiguous(), rank, 2, 384) for rank in range(2)]
    whole, *parts = (OwnVocabulary(Head(head), token_ids, VOCAB, 8) for head in (LMHead(weight), *heads))
    want = whole.draw(states, params).token_ids
    records = torch.cat([pack_record(part.draw(states, params)) for part in parts])
    assert torch.equal(merge_records(records, return_logprob=False).token_ids, want)
    children = merged_children([part.draw_children(states, params, 3) for part in parts])
    assert torch.equal(children.token_ids[:, 0], want), "a tree's first child is the draft of a chain"
    rows = whole.drafts(want)
    assert torch.equal(rows, parts[1].drafts(want)) and (rows < 192).any() and (rows >= 192).any()


def merged_children(parts: list[Children]) -> Children:
    """The children that ranks keep, of those that each has in its part; exchanged by collectives."""
    packed = [torch.cat([part.token_ids.float(), part.scores], 1) for part in parts]
    group = types.SimpleNamespace(rank_in_group=0, world_size=len(parts))
    group._all_gather_into_tensor = lambda output, sent: output.copy_(torch.cat(packed))
    return Exchange(group).merge_children(parts[0])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_children_that_ranks_exchange_are_the_best_that_any_of_them_has(device, temperature):
    """The first is the token that one rank draws."""
    weight, states = weights(device, dtype=torch.float32), 0.3 * hidden_states(device, 8, dtype=torch.float32)
    rows = torch.arange(8, device=device)
    params = BatchParams(torch.full((8,), temperature, device=device), rows, rows)
    heads = [LMHead.of_rank(weight[304 * rank :][:304].contiguous(), rank, 2, VOCAB) for rank in range(2)]
    parts = [Head(head).draw_children(states, params, 3) for head in heads]
    merged = merged_children(parts)
    assert torch.equal(merged.token_ids[:, 0], Head(LMHead(weight, vocab_size=VOCAB)).draw(states, params).token_ids)
    for row, (ids, scores) in enumerate(zip(*merged, strict=True)):
        known = {int(i): float(s) for part in parts for i, s in zip(part.token_ids[row], part.scores[row], strict=True)}
        best = sorted(known, key=lambda token_id: -known[token_id])[:3]
        assert ids.tolist() == best and scores.tolist() == [known[token_id] for token_id in best]
    assert 0 < (merged.token_ids < 304).sum() < merged.token_ids.numel(), "of both ranks"


def test_ranks_draft_all_ids_and_the_log_says_so(server, others, monkeypatch, caplog):
    monkeypatch.setenv(DRAFT_VOCAB_VARIABLE, "auto")
    assert server().drafts._learned is None
    assert "does nothing for this draft model: several ranks share its head" in caplog.text


@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_the_draft_model_alone_is_exchanged_through_the_memory_of_the_target(
    server, others, device, caplog, same
):
    drafting = server(lm_head=make_head(weights(device, seed=9, dtype=torch.float32)), attach=False)
    prepare, used = Runtime._prepare, []

    def with_exchange(*head: Any, **options: Any) -> HeadState:
        state = prepare(*head, **options)
        state.exchange = Others()
        state.exchange.use_memory_of = lambda other: used.append(other) or same
        return state

    drafting.runtime._prepare = with_exchange.__get__(drafting.runtime)
    drafting.drafts.attach(drafting.worker)
    assert used == [others] and drafting.runtime.draws_drafts == same
    assert same or "are not those of the target's" in caplog.records[-1].message


# --- a server -------------------------------------------------------------------------------------------------------

STEPS = NODES - 1
SPECULATING = [
    *("--speculative-eagle-topk", "1", "--attention-backend", "triton", "--disable-cuda-graph"),
    *("--speculative-num-steps", str(STEPS), "--speculative-num-draft-tokens", str(NODES)),
]
TOKENS = 12
SERVED = [
    *({"temperature": 1.0, "sampling_seed": seed} for seed in range(4)),
    {"temperature": 0.0},
    {"temperature": 0.5, "sampling_seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 2},
]
AT_ONE = range(4)  # the rows at temperature 1


def accepted(answers: list[dict]) -> float:
    """The part of the drafts that are accepted, of those that follow accepted ones."""
    tried = correct = 0
    for answer in answers:
        for count, times in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            correct, tried = correct + count * times, tried + min(count + 1, STEPS) * times
    return correct / tried


# By name: the algorithm, the folder of its draft model (None: in the target), FLASHSAMPLE_DRAFTS, what the log says.
SERVERS = {
    "stock": ("STANDALONE", "standalone", "stock", None),
    "coupled": ("STANDALONE", "standalone", "coupled", "they are coupled"),
    "eagle": ("EAGLE", "eagle", "coupled", "they are coupled"),
    "mtp": ("NEXTN", None, "coupled", "they are coupled"),
    "map": ("EAGLE", "eagle", "coupled", "they are coupled"),
    "hot": ("EAGLE", "eagle", "coupled", "most frequent ids of"),
    "eagle3": ("EAGLE3", "eagle3", "coupled", "they are coupled"),
    "tree": ("STANDALONE", "standalone", "coupled", "trees of up to 2 children per node; they are coupled"),
    "eagle on two ranks": ("EAGLE", "eagle", "coupled", "they are coupled"),
    "coupled on two ranks": ("STANDALONE", "standalone", "coupled", "they are coupled"),
    "eagle3 on two ranks": ("EAGLE3", "eagle3", "coupled", "they are coupled"),
    "tree on two ranks": ("STANDALONE", "standalone", "coupled", "trees of up to 2 children per node"),
}
TREE = ["--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", str(2 * STEPS + 1)]
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--attention-backend", "triton"]
# What is asked of the server whose drafts are n-grams: of long answers, some of them are accepted.
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.4": {"temperature": 0.4},
    "top-k": {"temperature": 0.6, "top_k": 8},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "a regular expression": {"temperature": 1.0, "regex": "(ab|cd)*"},
    "a bias": {"temperature": 0.7, "logit_bias": {"7": 3.0}},
}
SEEDS, LONG = range(2), 44


def long_answers(server: demo_server.Server) -> list[dict]:
    """One batch of each kind of request, with each seed, and the logprobs of the tokens."""
    rows = [
        {**params, "sampling_seed": seed, "max_new_tokens": LONG, "ignore_eos": True}
        for params in KINDS.values()
        for seed in SEEDS
    ]
    ids = [[5 + seed, 300, 7] for _ in KINDS for seed in SEEDS]
    return server.generate(input_ids=ids, sampling_params=rows, return_logprob=True)


def assert_same_long_answers(without: list[dict], with_ngrams: list[dict]) -> None:
    """More than 500 tokens of seven kinds, and their logprobs."""
    tokens = right = 0
    for row, (alone, drafted) in enumerate(zip(without, with_ngrams, strict=True)):
        kind = list(KINDS)[row // len(SEEDS)]
        assert alone["output_ids"] == drafted["output_ids"], kind
        pair = [[value for value, *_ in a["meta_info"]["output_token_logprobs"]] for a in (alone, drafted)]
        torch.testing.assert_close(*map(torch.tensor, pair), rtol=1e-4, atol=1e-4, msg=kind)
        tokens, right = tokens + len(alone["output_ids"]), right + drafted["meta_info"]["spec_num_correct_drafts"]
    assert tokens > 500 and right > 20, "drafts are accepted"


@needs_sglang
@pytest.mark.server
@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="near-ties of bfloat16 are looked at by the benchmark")
def test_a_servers_tokens_do_not_depend_on_its_drafts_and_coupled_ones_are_accepted_more_often(tmp_path):
    """Servers without drafts, and with n-grams, chains and a tree of several algorithms, on one rank and on two:
    SGLang's own drafts, greedy and coupled ones."""
    size = markov.SIZES["tiny"]
    markov.write(tmp_path / "tiny", size)
    markov.write(tmp_path / "standalone", size, error=0.6)
    drafters.write_eagle(tmp_path / "eagle", size)
    drafters.write_eagle3(tmp_path / "eagle3", size, hot_ids=500)
    drafters.write_mtp(tmp_path / "mtp", size)
    torch.save([token_id for token_id in range(size.vocab_size) if token_id % 8], tmp_path / "map.pt")
    answers, long = {}, {}
    for name in ("none", "ngrams", *SERVERS):
        environment, arguments, line = {}, ["--disable-radix-cache"], None
        if name in SERVERS:
            algorithm, drafter, drafts, line = SERVERS[name]
            environment = {"FLASHSAMPLE_DRAFTS": drafts} | INTERPRETED
            if name.endswith("two ranks"):
                environment |= TWO_RANKS | ({} if algorithm == "EAGLE" else {SPECULATION_VARIABLE: "1"})
                arguments += ["--tp-size", "2"]
            if name == "hot":
                counted = torch.tensor([token for answer in answers["none"] for token in answer["output_ids"]])
                environment[DRAFT_VOCAB_VARIABLE] = str(counts_file(tmp_path, counted, size.vocab_size))
            more = {"tree": TREE, "map": ["--speculative-token-map", str(tmp_path / "map.pt")]}
            more = more.get(name.removesuffix(" on two ranks"), [])
            arguments += [*SPECULATING, *more, "--speculative-algorithm", algorithm]
            if drafter is not None:
                arguments += ["--speculative-draft-model-path", str(tmp_path / drafter)]
        elif name == "ngrams":
            environment, line = INTERPRETED, "drawing NGRAM drafts is not supported yet"
            arguments += NGRAM
        target = tmp_path / ("mtp" if name == "mtp" else "tiny")
        server = server_of(target, size.dtype, name=name, arguments=arguments, environment=environment)
        with server:
            rows = [{**params, "max_new_tokens": TOKENS, "ignore_eos": True} for params in SERVED]
            ids = [[5 + row, 300, 7] for row in range(len(SERVED))]
            answers[name] = server.generate(input_ids=ids, sampling_params=rows)
            if name not in SERVERS:
                long[name] = long_answers(server)
                assert "native" not in server.log_text().split("since the start:")[-1]
            said = server.log_lines("drafts come from hidden states") + server.log_lines("drafts are SGLang's")
            said = [words for words in said if " TP1]" not in words]
            assert len(said) == (line is not None) and (line is None or line in said[0]), said
    assert_same_long_answers(long["none"], long["ngrams"])
    tokens = {name: [answer["output_ids"] for answer in each] for name, each in answers.items()}
    for name, each in tokens.items():
        assert each == tokens["none"], name
    assert all(len(one) == TOKENS for one in tokens["none"])
    rates = {name: accepted([answers[name][row] for row in AT_ONE]) for name in SERVERS}
    print(rates)
    assert 0.05 < rates["stock"] < rates["coupled"] - 0.2 and 0.3 < rates["coupled"] < 0.95
    assert rates["tree"] > rates["coupled"], "the second child often is the target's token"
    for name in ("eagle", "coupled"):
        assert rates[f"{name} on two ranks"] == rates[name], "ranks draft what one does"
    assert rates["tree on two ranks"] > rates["coupled"]
    assert min(rates["eagle"], rates["mtp"]) > 0.8, "their hidden states are almost the target's"
    assert rates["map"] > 0.6, "an eighth of the ids is not drafted"
    assert rates["hot"] > 0.6, "the ids of these answers are drafted"


@needs_sglang
@pytest.mark.server
@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="near-ties of bfloat16 are looked at by the benchmark")
def test_a_servers_tokens_are_the_same_while_it_learns_the_ids_of_its_drafts_and_gives_them_up(tmp_path):
    """Through traffic of a few ids, then of many. Drafts of a few ids are accepted as often as those of all where the
    answers have them."""
    size = markov.SIZES["tiny"]
    markov.write(tmp_path / "tiny", size)
    drafters.write_eagle(tmp_path / "eagle", size)
    arguments = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tmp_path / "eagle")]
    traffic = {"few": {"temperature": 0.0}, "many": {"temperature": 3.0}}
    asked = ["few", "few", "many", "many"]
    answers: dict[str, list[list[dict]]] = {}
    for name, more in {"none": [], "learned": [*SPECULATING, *arguments]}.items():
        environment = {DRAFT_VOCAB_VARIABLE: "auto"} | INTERPRETED if more else {}
        more = ["--disable-radix-cache", *more]
        with server_of(tmp_path / "tiny", size.dtype, name=name, arguments=more, environment=environment) as server:
            answers[name] = []
            for turn, kind in enumerate(asked):
                rows = [
                    {**traffic[kind], "sampling_seed": 16 * turn + row, "max_new_tokens": LONG, "ignore_eos": True}
                    for row in range(8)
                ]
                ids = [[5 + row % 2, 300, 7] for row in range(8)]
                answers[name].append(server.generate(input_ids=ids, sampling_params=rows))
                time.sleep(2 * token_counts.LOOK_SECONDS)  # its tokens are counted
            changes = server.log_lines("flashsample: drafts are of ")
    for turn, (alone, drafted) in enumerate(zip(answers["none"], answers["learned"], strict=True)):
        assert [a["output_ids"] for a in alone] == [a["output_ids"] for a in drafted], (turn, asked[turn])
    print([accepted(each) for each in answers["learned"]], changes)
    kinds = [re.search("adopted|renewed|given up", line).group() for line in changes]
    assert kinds[0] == "adopted" and "given up" in kinds
    first, second = (accepted(answers["learned"][turn]) for turn in (0, 1))
    assert second > first - 0.05
