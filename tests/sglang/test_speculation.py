"""Verification of drafts in SGLang: which batches are verified by the fused pass, that rows gain the tokens of their
draws, and what SGLang verifies itself. The law of it is in ``test_follow_drafts.py``."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_states import CountingCapture
from sglang_batches import VOCAB, CountingHead, grammar, make_samplers, request

from sgl_flashsample.api import DraftTree
from sgl_flashsample.kernels.params import BatchParams, Truncation
from sgl_flashsample.kernels.reference import allowed_ref
from sgl_flashsample.sglang import draw as draw_module
from sgl_flashsample.sglang import speculation
from sgl_flashsample.sglang.batch import batch_of
from sgl_flashsample.sglang.head import GraphInputs
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.row_table import Reason
from sgl_flashsample.sglang.step_graphs import PATIENCE

CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 1, 2, 2, 5]
SETTINGS = [
    {"temperature": 1.0, "sampling_seed": 1},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 9, "sampling_seed": 3},
    {"temperature": 1.2, "top_p": 0.6, "sampling_seed": 4},
    {"temperature": 1.0, "min_p": 0.3, "sampling_seed": 5},
]
ROWS = len(SETTINGS)
LISTS = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val")


@pytest.fixture
def hooks(one_rank):
    from sgl_flashsample.sglang.speculation import SpeculationHooks

    return SpeculationHooks(make_samplers()[0].runtime)


def counted(hooks) -> str:
    """The counts of the server, as its log says them."""
    metrics = hooks.runtime.metrics
    metrics.flush()
    return metrics.summary().removeprefix("since the start: ")


class Original:
    """In the place of SGLang's ``eagle_sample``: notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, verify_input, batch, logits_output, grammar_mask=None, *args, **kwargs):
        self.calls.append((logits_output.next_token_logits, grammar_mask, args, kwargs))
        return "SGLang's"


def verification(info, lazy: LazyLogits, parents: list[int], drafts: torch.Tensor, **changes):
    """The arguments of ``eagle_sample``, for rows whose root is at position 7."""
    num_rows, device = len(drafts), drafts.device
    tree = DraftTree.from_parents(parents, device)
    shape = (num_rows, len(parents))
    first, following, depth = (column.expand(shape).contiguous() for column in tree)
    verify_input = types.SimpleNamespace(
        draft_token=drafts.reshape(-1),
        draft_token_num=len(parents),
        positions=(7 + depth).reshape(-1),
        retrieve_index=torch.arange(drafts.numel(), device=device).view(shape),
        retrieve_next_token=first,
        retrieve_next_sibling=following,
        max_tree_depth=int(depth.max()) + 1,
        tree_topk=-1,
    )
    batch = types.SimpleNamespace(
        seq_lens=torch.full((num_rows,), 7, device=device),
        req_pool_indices=torch.arange(1, num_rows + 3, device=device),  # SGLang's may be longer than the batch
        sampling_info=info,
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    vars(batch).update(changes)
    return verify_input, batch, types.SimpleNamespace(next_token_logits=lazy)


def sequentially_allowed(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """As SGLang's verification: top-p of what top-k has left. logits: ``[V]`` float64, divided by the temperature."""
    probabilities = torch.softmax(logits, -1)
    kept = probabilities >= probabilities.topk(top_k).values[-1]
    left = torch.where(kept, probabilities, 0.0) / probabilities[kept].sum()
    ordered = left.sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    return torch.zeros_like(kept).scatter(0, ordered.indices, before < top_p) & kept


def draws(head, hidden: torch.Tensor, num_nodes: int, positions: torch.Tensor, settings=SETTINGS):
    """What each node draws: by ``sample_from_logits``, of logits that are there."""
    from sgl_flashsample import sample_from_logits

    def column(name: str, other: float, dtype: torch.dtype) -> torch.Tensor:
        values = [one.get(name, other) for one in settings for _ in range(num_nodes)]
        return torch.tensor(values, dtype=dtype, device=hidden.device)

    zero = torch.zeros(len(hidden), device=hidden.device)
    truncation = Truncation(column("top_k", 1 << 30, torch.int32), column("top_p", 1.0, torch.float32), zero)
    params = BatchParams(
        column("temperature", 1.0, torch.float32),
        column("sampling_seed", 0, torch.int64),
        positions,
        truncation,
    )
    return sample_from_logits(head.logits(hidden), params, return_logprob=True)


def accepted_by_sglang(verify_input, drawn: torch.Tensor):
    """SGLang's own walk over the tree: its Triton twin, interpreted, which SGLang 0.5.23 has moved."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    verify_tree_greedy_triton = sys.modules[verify_tree_greedy_func.__module__].verify_tree_greedy_triton
    shape = verify_input.retrieve_index.shape
    predict = torch.zeros(drawn.shape, dtype=torch.int32, device=drawn.device)
    nodes = torch.full((shape[0], verify_input.max_tree_depth), -1, dtype=torch.int32, device=drawn.device)
    count = torch.empty(shape[0], dtype=torch.int32, device=drawn.device)
    verify_tree_greedy_triton(
        predict,
        nodes,
        count,
        verify_input.draft_token.view(shape),
        verify_input.retrieve_index,
        verify_input.retrieve_next_token,
        verify_input.retrieve_next_sibling,
        drawn.view(shape),
    )
    return predict, count + 1, nodes


def good_drafts(drawn: torch.Tensor, parents: list[int], seed: int = 0) -> torch.Tensor:
    """Drafts of which most are what their parents draw. The hidden states are given, so they change no draw."""
    drawn = drawn.view(-1, len(parents))
    wrong = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(seed)).to(drawn.device) < 0.3
    followed = drawn[:, torch.tensor(parents).clamp(min=0)]
    return torch.where(wrong, followed + 1, followed)


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_gain_what_their_nodes_draw_along_sglangs_own_walk(hooks, head, info_of, hidden, parents):
    nodes = len(parents)
    states = hidden(ROWS * nodes)
    info = info_of([request(str(row), **settings) for row, settings in enumerate(SETTINGS)])
    positions = 7 + DraftTree.from_parents(parents, states.device).depth.repeat(ROWS)
    drawn = draws(head, states, nodes, positions).token_ids
    drafts = good_drafts(drawn, parents)
    verify_input, batch, output = verification(info, head.lazy(states), parents, drafts)
    original = Original()
    predict, num_tokens, accepted = hooks.eagle_sample(original, verify_input, batch, output)
    want_predict, want_tokens, want_nodes = accepted_by_sglang(verify_input, drawn)
    assert original.calls == [] and head.computed == [], "no logits are computed"
    assert torch.equal(num_tokens, want_tokens) and torch.equal(accepted, want_nodes)
    assert num_tokens.max() > 2 and num_tokens.min() < verify_input.max_tree_depth
    on_path = accepted[accepted >= 0].long()
    assert torch.equal(predict[on_path], want_predict[on_path])
    assert (predict.dtype, num_tokens.dtype, accepted.dtype) == (torch.int32,) * 3
    assert hooks.runtime.inactive_reason is None


@pytest.mark.parametrize("edited, top", [(False, None), (True, None), (False, [3, 2, 0])])
def test_steps_are_replayed_wherever_their_positions_are_and_whichever_requests_they_have(
    hooks, info_of, hidden, device, edited, top
):
    """SGLang's graph has two rows of padding, and a slot for each request, not for each node. With likeliest ids too;
    with a bias, which all nodes of a row share: then the requests stay, as the bias of others is at another place."""
    parents, num_rows, steps, padding = CHAIN[:2], 3, PATIENCE + 5, 2
    head = CountingHead(device, capture=(capture := CountingCapture(device)))
    captured = hidden(num_rows * len(parents) + padding)
    states = captured[:-padding]
    head.state.inputs = GraphInputs(*torch.zeros(2, len(captured), dtype=torch.int64, device=device))
    bias = {"logit_bias": {str(VOCAB - 1): 0.0}} if edited else {}
    settings = [SETTINGS[:num_rows]]
    if not edited:  # of the same kinds, in another order
        settings.append([{"temperature": 0.4, "top_k": 20, "sampling_seed": 8}, SETTINGS[0], SETTINGS[1]])
    infos = [info_of([request(str(row), **one, **bias) for row, one in enumerate(each)]) for each in settings]
    depth = DraftTree.from_parents(parents, states.device).depth.repeat(num_rows)
    kept = []  # else the next step's positions would be at the same place
    for step in range(steps):
        kept.append(positions := 7 + 2 * step + depth)
        turn = step % len(settings)
        drawn = draws(head, states, len(parents), positions, settings[turn])
        drafts = good_drafts(drawn.token_ids, parents, seed=step)
        lazy = head.lazy(captured, captured)[:-padding]
        verify_input, batch, output = verification(
            infos[turn], lazy, parents, drafts, return_logprob=True, top_logprobs_nums=top
        )
        vars(output).update(dict.fromkeys((*LISTS, "next_token_token_ids_logprobs_idx")))
        verify_input.positions = positions
        predict, _, accepted = hooks.eagle_sample(Original(), verify_input, batch, output)
        assert torch.equal(predict.long(), drawn.token_ids)
        hooks.compute_logprobs(None, batch, output, predict, accept_index=accepted)
        want = drawn.logprobs[accepted.clamp(min=0).long()]
        torch.testing.assert_close(output.next_token_logprobs, want, rtol=1e-5, atol=1e-5)
        if top is not None:
            likeliest = head.logits(states).topk(3).indices
            for place, node in enumerate(accepted.reshape(-1).tolist()):
                ids = [*output.next_token_top_logprobs_idx[place].tolist()]
                assert node < 0 or ids == likeliest[node, : top[node // len(parents)]].tolist()
    assert capture.replays == head.state.counts.replayed == steps - PATIENCE
    assert (head.state.counts.launched, head.state.counts.late_captures) == (PATIENCE, 2)


@pytest.fixture
def steady(hooks, info_of, hidden, device, monkeypatch) -> types.SimpleNamespace:
    """A server that verifies chains of two nodes of three requests, in a graph of SGLang's. ``verify`` does so once,
    for requests with these settings, and compares the tokens with the draws. looked_up: the steps that took ``draw``.
    """
    parents, num_rows = CHAIN[:2], 3
    head = CountingHead(device, capture=(capture := CountingCapture(device)))
    captured = hidden(num_rows * len(parents) + 2)  # two rows are padding
    states = captured[:-2]
    case = types.SimpleNamespace(head=head, capture=capture, captured=captured, states=states, looked_up=0, step=0)
    depth = DraftTree.from_parents(parents, states.device).depth.repeat(num_rows)
    drawing = speculation.draw

    def draw(*arguments):
        case.looked_up += 1
        return drawing(*arguments)

    monkeypatch.setattr(speculation, "draw", draw)
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1e9)  # the interpreter takes its time

    def verify(info, settings=SETTINGS[:num_rows], **changes):
        case.step += 1
        positions = 7 + 2 * case.step + depth
        drawn = draws(head, states, len(parents), positions, settings).token_ids
        drafts = good_drafts(drawn, parents, seed=case.step)
        lazy = head.lazy(captured, captured)[:-2]
        verify_input, batch, output = verification(info, lazy, parents, drafts, **changes)
        verify_input.positions = positions
        original = Original()
        predict, num_tokens, nodes = hooks.eagle_sample(original, verify_input, batch, output)
        assert original.calls == [] and torch.equal(predict.long(), drawn)
        _, want_tokens, want_nodes = accepted_by_sglang(verify_input, drawn)
        assert torch.equal(num_tokens, want_tokens) and torch.equal(nodes, want_nodes)

    case.verify = verify
    return case


def test_a_verification_whose_like_has_been_replayed_is_replayed_without_another_look(steady, info_of):
    """Also for other requests of the same kinds."""
    others = [{"temperature": 0.4, "top_k": 20, "sampling_seed": 8}, SETTINGS[0], SETTINGS[1]]
    infos = [
        (info_of([request(str(row), **one) for row, one in enumerate(each)]), each) for each in (SETTINGS[:3], others)
    ]
    for step in range(PATIENCE + 10):
        steady.verify(*infos[step % 2])
    assert steady.looked_up == PATIENCE + 3 and steady.capture.replays == 10


@pytest.mark.parametrize("kind", draw_module.COMMON_KINDS)
def test_verifications_of_common_kinds_have_graphs_ahead_of_the_first_one(steady, info_of, kind):
    truncation = {} if not kind.truncated else {"top_p": 0.9} if kind.max_top_k is None else {"top_k": 9}
    settings = [{"temperature": 0.0} if kind.all_greedy else {"sampling_seed": row} | truncation for row in range(3)]
    state, info = steady.head.state, info_of([request(str(row), **one) for row, one in enumerate(settings)])
    state.captured[len(steady.captured)] = steady.captured
    while draw_module.prepare_next(state, batch_of(info).table):
        pass
    for _ in range(3):
        steady.verify(info, settings)
    counts = state.counts
    assert (counts.replayed, counts.launched, counts.late_captures) == (3, 0, 0) and steady.looked_up == 1


@pytest.mark.parametrize("change", ["nothing", "logprobs", "weight", "time", "bias", "graphs are off"])
def test_a_verification_that_is_not_as_before_is_looked_at_anew(steady, info_of, change):
    requests = [request(str(row), **settings) for row, settings in enumerate(SETTINGS[:3])]
    info, options = info_of(requests), {}
    for _ in range(PATIENCE + 4):
        steady.verify(info)
    before, state = steady.looked_up, steady.head.state
    if change == "logprobs":
        options = {"return_logprob": True}
    elif change == "weight":
        state.lm_head.weight.mul_(0.5)
    elif change == "time":
        state.full_step_at = 0.0
    elif change == "bias":
        info = info_of([request(str(row), logit_bias={"3": 0.0}, **one) for row, one in enumerate(SETTINGS[:3])])
    elif change == "graphs are off":
        state.graphs._give_up("a fault")
    steady.verify(info, **options)
    assert steady.looked_up - before == (change != "nothing")


def test_top_p_is_of_what_top_k_has_left_and_min_p_is_ignored_as_in_sglangs_verification(hooks, head, info_of, hidden):
    """The kept sets, of many draws: those of the joint rule would be larger."""
    top_k, top_p, temperature, draws_per_row = 6, 0.7, 4.0, 120
    states = hidden(1).expand(draws_per_row, -1).contiguous()
    logits = head.logits(states[:1])[0].double() / temperature
    sequential = sequentially_allowed(logits, top_k, top_p)
    limits = (torch.tensor([value], device=states.device) for value in (1.0, top_k, top_p, 0.0))
    joint = allowed_ref(logits[None], *limits)[0]
    assert sequential.sum() < joint.sum(), "else this tells nothing"
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": 0.9}
    info = info_of([request(str(row), sampling_seed=row, **settings) for row in range(draws_per_row)])
    drafts = torch.zeros(draws_per_row, 1, dtype=torch.int64, device=states.device)
    verify_input, batch, output = verification(info, head.lazy(states), [-1], drafts)
    predict, _, _ = hooks.eagle_sample(Original(), verify_input, batch, output)
    assert set(predict.tolist()) == set(sequential.nonzero()[:, 0].tolist())


def mask_of(allowed: torch.Tensor) -> types.SimpleNamespace:
    """As SGLang's GrammarMask. allowed: ``[B * D, V]`` bool."""

    def apply(logits: torch.Tensor) -> None:
        logits.masked_fill_(~allowed, float("-inf"))

    return types.SimpleNamespace(vocab_mask=~allowed, apply=apply)


def edited_case(info_of, states: torch.Tensor, nodes: int, penalised: torch.Tensor):
    """A batch with every edit on some of its rows. penalised: a token of each row, which it has had before."""
    requests = [
        request("0", temperature=1.0, sampling_seed=1, frequency_penalty=2.0),
        request("1", temperature=0.0, repetition_penalty=2.0),
        request("2", temperature=0.7, sampling_seed=3, logit_bias={"5": 40.0}),
        request("3", temperature=1.2, sampling_seed=4, grammar=grammar(*range(0, VOCAB, 3))),
        request("4", temperature=1.0, sampling_seed=5),
    ]
    info = info_of(requests)
    for _ in range(20):
        info.penalizer_orchestrator.cumulate_output_tokens(penalised)
    info.update_penalties()
    row = torch.arange(len(states), device=states.device) // nodes
    g = torch.Generator().manual_seed(2)
    allowed = (torch.rand(len(states), VOCAB, generator=g) < 0.3).to(states.device) | (row != 3)[:, None]
    return info, mask_of(allowed)


def edited_logits(head, states: torch.Tensor, info, mask, nodes: int) -> torch.Tensor:
    """By SGLang's own steps before its verification."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    logits = head.logits(states).clone()
    logits.add_(torch.repeat_interleave(info.acc_additive_penalties, nodes, dim=0))
    apply_scaling_penalties(logits, torch.repeat_interleave(info.acc_scaling_penalties, nodes, dim=0))
    logits.add_(torch.repeat_interleave(info.logit_bias, nodes, dim=0))
    mask.apply(logits)
    return logits


def test_penalties_bias_and_masks_of_nodes_are_sglangs_and_so_are_the_logprobs_of_accepted_tokens(
    hooks, head, info_of, hidden
):
    from sgl_flashsample import sample_from_logits

    nodes = len(TREE)
    states = hidden(ROWS * nodes)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.2, 1.0], device=states.device).repeat_interleave(nodes)
    seed = torch.tensor([1, 0, 3, 4, 5], device=states.device).repeat_interleave(nodes)
    positions = 7 + DraftTree.from_parents(TREE, states.device).depth.repeat(ROWS)
    params = BatchParams(temperature, seed, positions)
    unedited = sample_from_logits(head.logits(states), params).token_ids
    info, mask = edited_case(info_of, states, nodes, unedited[::nodes])
    logits = edited_logits(head, states, info, mask, nodes)
    drawn = sample_from_logits(logits, params).token_ids
    assert (drawn != unedited).view(ROWS, nodes)[:4].any(1).all(), "each edit changes a token"
    drafts = good_drafts(drawn, TREE)
    verify_input, batch, output = verification(info, head.lazy(states), TREE, drafts, return_logprob=True)
    predict, _, accepted = hooks.eagle_sample(Original(), verify_input, batch, output, mask)
    assert torch.equal(predict.long(), drawn)
    hooks.compute_logprobs(None, batch, output, predict, accept_index=accepted)
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    want = torch.log_softmax(scaled, -1).gather(1, drawn[:, None])[:, 0]
    on_path = accepted >= 0
    got = output.next_token_logprobs
    assert got.shape == accepted.shape and head.computed == []
    torch.testing.assert_close(got[on_path].double(), want[accepted[on_path].long()], rtol=1e-5, atol=1e-5)


def logprobs_by_sglang(batch, logits: torch.Tensor, predict: torch.Tensor, nodes: torch.Tensor, original: bool):
    """A LogitsProcessorOutput with SGLang's own logprobs after a verification, of edited logits."""
    from sglang.srt.environ import envs
    from sglang.srt.layers import logprob_processor

    output = types.SimpleNamespace(next_token_logits=logits, next_token_token_ids_logprobs_idx=None)
    vars(output).update(dict.fromkeys(LISTS))
    with envs.SGLANG_RETURN_ORIGINAL_LOGPROB.override(original):
        if hasattr(logprob_processor, "compute_spec_logprobs"):
            logprob_processor.compute_spec_logprobs(batch, output, predict, accept_index=nodes)
        else:
            logprob_processor.compute_spec_v2_logprobs(batch, output, predict, nodes, nodes.shape[1] - 1)
    return output


@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
@pytest.mark.parametrize(
    "top, ids",
    [([0, 2, 9, 1, 5], [None, [1, 7, 7], [], [9], None]), (None, [[3], None, None, None, [0]]), ([5] * ROWS, None)],
    ids=["both", "given ids", "top"],
)
def test_logprobs_of_accepted_nodes_are_those_that_sglang_lists_and_change_no_token(
    hooks, head, info_of, hidden, top, ids, original
):
    """In lists with an entry per place of ``accept_index``; after the accepted nodes these have any values."""
    nodes = len(TREE)
    states = hidden(ROWS * nodes)
    positions = 7 + DraftTree.from_parents(TREE, states.device).depth.repeat(ROWS)
    unedited = draws(head, states, nodes, positions).token_ids
    info, mask = edited_case(info_of, states, nodes, unedited[::nodes])
    logits = edited_logits(head, states, info, mask, nodes)
    hooks.runtime.settings.original_logprobs = original
    outputs, tokens = [], []
    for asks in (True, False):
        changes = {"top_logprobs_nums": top, "token_ids_logprobs": ids} if asks else {}
        drafts = good_drafts(unedited, TREE)
        arguments = verification(info, head.lazy(states), TREE, drafts, return_logprob=True, **changes)
        verify_input, batch, output = arguments
        vars(output).update(dict.fromkeys((*LISTS, "next_token_token_ids_logprobs_idx")))
        original_call = Original()
        predict, num_tokens, accepted = hooks.eagle_sample(original_call, verify_input, batch, output, mask)
        assert original_call.calls == [] and head.computed == []
        hooks.compute_logprobs(None, batch, output, predict, accept_index=accepted)
        outputs.append((batch, output, predict, accepted))
        tokens.append((predict.tolist(), num_tokens.tolist(), accepted.tolist()))
    assert tokens[0] == tokens[1]
    batch, output, predict, accepted = outputs[0]
    want = logprobs_by_sglang(batch, logits, predict, accepted, original)
    on_path = accepted.reshape(-1) >= 0
    torch.testing.assert_close(
        output.next_token_logprobs.reshape(-1)[on_path],
        want.next_token_logprobs.reshape(-1)[on_path],
        atol=1e-4,
        rtol=0,
    )
    for name in LISTS:
        mine, theirs = getattr(output, name), getattr(want, name)
        assert (mine is None) is (theirs is None), name
        for place, (one, other) in enumerate(zip(mine or (), theirs or (), strict=True)):
            if on_path[place]:
                least = -1e30  # SGLang's clamp, and ours, of forbidden ids
                # SGLang 0.5.17 has a list for a row without given ids.
                lists = (one.tolist(), other.tolist() if torch.is_tensor(other) else other)
                values = [[max(value, least) for value in entry] for entry in lists]
                assert values[0] == pytest.approx(values[1], abs=1e-4), (name, place)
    assert output.next_token_token_ids_logprobs_idx == want.next_token_token_ids_logprobs_idx


def test_logprobs_that_were_not_drawn_are_sglangs(hooks):
    calls = []
    output = types.SimpleNamespace()
    hooks.compute_logprobs(
        lambda *args, **kwargs: calls.append((args, kwargs)), "batch", output, "predict", chain_stride=4
    )
    assert calls == [(("batch", output, "predict"), {"chain_stride": 4})]


@pytest.mark.parametrize("fused", [True, False])
def test_the_tokens_that_rows_gain_are_counted_for_a_hot_vocabulary(hooks, head, info_of, hidden, fused):
    added = []
    hooks.runtime.token_counts = types.SimpleNamespace(add=lambda *arguments: added.append(arguments))
    hooks.runtime.inactive_reason = None if fused else "failed"
    states = hidden(ROWS * len(CHAIN))
    info = info_of([request(str(row), **settings) for row, settings in enumerate(SETTINGS)])
    positions = 7 + DraftTree.from_parents(CHAIN, states.device).depth.repeat(ROWS)
    drafts = good_drafts(drawn := draws(head, states, len(CHAIN), positions).token_ids, CHAIN)
    verify_input, batch, output = verification(info, head.lazy(states), CHAIN, drafts)
    want = accepted_by_sglang(verify_input, drawn)
    _, num_tokens, _ = hooks.eagle_sample(lambda *arguments: want, verify_input, batch, output)
    ((tokens, vocab),) = added
    drawn, nodes = drawn.view(ROWS, -1).tolist(), [[node for node in row if node >= 0] for row in want[2].tolist()]
    gained = [drawn[row][node % len(CHAIN)] for row in range(ROWS) for node in nodes[row]]
    assert [token for token in tokens.flatten().tolist() if token != -1] == gained and vocab == VOCAB
    assert len(gained) == num_tokens.sum()


@pytest.fixture
def verify(hooks, head, info_of, hidden, script) -> Callable[..., types.SimpleNamespace]:
    """Makes a verification of three drafts, all of them 0, for each of these requests; ``sample`` asks for it."""

    def make(*requests: dict) -> types.SimpleNamespace:
        rows = [{k: grammar(*v) if k == "grammar" else v for k, v in row.items()} for row in requests]
        info = info_of([request(str(place), **row) for place, row in enumerate(rows)])
        states = hidden(len(rows) * len(CHAIN))
        drafts = torch.zeros(len(rows), len(CHAIN), dtype=torch.int64, device=states.device)
        tree, batch, output = verification(info, head.lazy(states), CHAIN, drafts)
        case = types.SimpleNamespace(tree=tree, batch=batch, output=output, states=states, mask=None, kwargs={})
        case.runtime, case.state, case.script, case.original = hooks.runtime, head.state, script, Original()
        case.sample = lambda: hooks.eagle_sample(case.original, tree, batch, output, case.mask, **case.kwargs)
        return case

    return make


def test_penalties_that_sglang_has_not_accumulated_change_no_draft(verify, head):
    case = verify(SETTINGS[0] | {"frequency_penalty": 0.5})
    assert case.batch.sampling_info.acc_additive_penalties is None
    predict, _, _ = case.sample()
    positions = 7 + torch.arange(4, device=case.states.device)
    assert torch.equal(predict.long(), draws(head, case.states, 4, positions, settings=SETTINGS[:1]).token_ids)


def test_counted_rows_are_requests_that_the_fused_pass_has_verified(hooks, verify):
    verify({"top_p": 0.5}, {"temperature": 0.0}).sample()
    words = r"fused 2 rows in 1 batches, 1 of the rows with top-k, top-p or min-p \(0 by a search\); CPU time of .*"
    assert re.fullmatch(words, counted(hooks))


def without_bias(case) -> None:
    """A SamplingBatchInfo of an SGLang that has its biases elsewhere."""
    fields = vars(case.batch.sampling_info).items()
    case.batch.sampling_info = types.SimpleNamespace(**{name: value for name, value in fields if name != "logit_bias"})


def with_logits(case, **of_runtime: Any) -> None:
    """SGLang has computed the logits."""
    case.output.next_token_logits = (case.states @ case.state.lm_head.weight.T)[:, :VOCAB]
    vars(case.runtime).update(of_runtime)


TWO, GRAMMARS = ({}, {}), ({"grammar": (3,)},) * 2
MASK = types.SimpleNamespace(vocab_mask=torch.zeros(1, 9, dtype=torch.int32))
# Batches that SGLang verifies: the requests, what is different, the reason that is counted.
LEFT: dict[str, tuple[tuple, Callable, Reason]] = {
    "inactive": (TWO, lambda case: setattr(case.runtime, "inactive_reason", "off"), Reason.INACTIVE),
    "logits that were read": (TWO, lambda case: case.output.next_token_logits.dense(), Reason.LOGITS_COMPUTED),
    "logits": (TWO, with_logits, Reason.LOGITS_COMPUTED),
    "logits, inactive": (TWO, lambda case: with_logits(case, inactive_reason="failed"), Reason.INACTIVE),
    "logits of another head": (TWO, lambda case: with_logits(case, _refused=["LoRA"]), Reason.INACTIVE),
    "an argument": (TWO, lambda case: case.kwargs.update(uno_target_max_top_k=8), Reason.UNKNOWN_ARGUMENT),
    "other nodes": (TWO, lambda case: setattr(case.tree, "draft_token_num", 3), Reason.UNKNOWN_ROWS),
    "fewer positions": (TWO, lambda case: setattr(case.tree, "positions", case.tree.positions[:5]), Reason.POSITIONS),
    "too large": (TWO, lambda case: case.state.out_of_memory(1), Reason.OUT_OF_MEMORY),
    "no memory": (TWO, lambda case: setattr(case.script, "error", torch.OutOfMemoryError("")), Reason.OUT_OF_MEMORY),
    "top logprobs": (
        TWO,
        lambda case: vars(case.batch).update(return_logprob=True, top_logprobs_nums=[0, 129]),
        Reason.TOP_LOGPROBS,
    ),
    "a sampling mask": (({}, {"mask": True}), lambda case: None, Reason.SAMPLING_MASK),
    "grammars": (GRAMMARS, lambda case: setattr(case.runtime, "no_grammars_reason", "off"), Reason.GRAMMAR),
    "a mask of another kind": (GRAMMARS, lambda case: setattr(case, "mask", MASK), Reason.ERROR),
    "a draw that fails": (TWO, lambda case: setattr(case.script, "error", RuntimeError("no kernel")), Reason.ERROR),
    "edits that fail": (({"logit_bias": {"3": 1.0}}, {}), without_bias, Reason.ERROR),
    "drafts that fail": (TWO, lambda case: setattr(case.tree, "draft_token", None), Reason.ERROR),
}
# The failures after which SGLang verifies all that follow, or all with a grammar.
SAID = {
    "a mask of another kind": ("no_grammars_reason", "its mask is (1, 9) "),
    "a draw that fails": ("inactive_reason", "RuntimeError: no kernel"),
    "edits that fail": (
        "inactive_reason",
        "AttributeError: 'types.SimpleNamespace' object has no attribute",
    ),
    "drafts that fail": ("inactive_reason", "AttributeError: 'NoneType' object has no attribute 'dtype'"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_sglang_has_to_verify_it_gets_with_plain_logits_and_the_reason_is_counted(
    hooks, verify, head, caplog, name
):
    requests, change, reason = LEFT[name]
    case = verify(*requests)
    change(case)
    before = vars(case.runtime).copy()
    assert case.sample() == "SGLang's"
    ((logits, mask, _, kwargs),) = case.original.calls
    assert type(logits) is torch.Tensor and torch.equal(logits, head.logits(case.states))
    assert mask is case.mask and kwargs == case.kwargs
    assert counted(hooks) == f"SGLang's sampler ({reason}) 2 rows in 1 batches", "no truncated row, and no time of ours"
    attribute, words = SAID.get(name, (None, ""))
    for other in ("inactive_reason", "no_grammars_reason"):
        said = getattr(case.runtime, other)
        assert said.startswith(words) if other == attribute else said == before[other]
    assert len(caplog.records) == (name in SAID or reason is Reason.OUT_OF_MEMORY)


def test_a_rank_without_memory_ends_the_step_instead_of_leaving_the_others_alone(verify, head, script):
    script.error = torch.OutOfMemoryError("a fault")
    case = verify({})
    head.state.exchange = types.SimpleNamespace(rank=0, num_ranks=2, memory=None)
    with pytest.raises(torch.OutOfMemoryError):
        case.sample()
