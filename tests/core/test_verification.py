"""``verify``: with drafts, whatever they are, rows gain the tokens that they would have drawn one after another."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_flashsample import BatchParams, DraftTree, LMHead, LogitEdits, SampleOutput, Truncation, sample, verify
from sgl_flashsample.kernels.reference import lm_head_sample_ref

VOCAB, HIDDEN = 200, 64
TREE = [-1, 0, 0, 1, 1, 2, 3, 6]  # siblings, and a path of five nodes
NUM_ROWS = 5


@dataclasses.dataclass
class Model:
    """A language model whose next token depends on the last one alone."""

    embedding: torch.Tensor  # [V, D]
    head: LMHead

    def hidden_after(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]


@pytest.fixture(scope="module")
def model(device) -> Model:
    g = torch.Generator().manual_seed(7)
    embedding, weight = (torch.randn(VOCAB, HIDDEN, generator=g).to(device) for _ in range(2))
    return Model(embedding, LMHead(0.3 * weight))


def params_of(device, position: int, **changes) -> BatchParams:
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0], device=device)
    seed = torch.tensor([3, -4, 5, 6, 2**62], device=device)
    return BatchParams(temperature, seed, torch.full((NUM_ROWS,), position, device=device), **changes)


def truncation(device) -> Truncation:
    top_k = torch.tensor([5, 1 << 30, 9, 3, 40], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 0.6, 0.9, 0.8, 1.0], device=device)
    return Truncation(top_k, top_p, torch.zeros(NUM_ROWS, device=device))


def drawn_one_by_one(model: Model, first: torch.Tensor, position: int, count: int, **changes) -> torch.Tensor:
    """``[B, count]``: the tokens after ``first``, by the reference; with a truncation, by ``sample``."""
    tokens = [first]
    for step in range(count):
        params = params_of(first.device, position + step, **changes)
        hidden = model.hidden_after(tokens[-1])
        if changes:
            tokens.append(sample(hidden, model.head, params).token_ids)
        else:
            weight = model.head.weight
            want = lm_head_sample_ref(hidden, weight, params.temperature, params.seed, params.position)
            assert not want.near_tie.any()
            tokens.append(want.token)
    return torch.stack(tokens[1:], 1)


def drafts_of(parents: list[int], truth: torch.Tensor, right: float, seed: int) -> torch.Tensor:
    """``[B, D]``: each node's draft, the true token of its depth with a chance of ``right``."""
    depth = DraftTree.from_parents(parents, "cpu").depth
    g = torch.Generator().manual_seed(seed)
    wrong = torch.randint(VOCAB, (len(truth), len(parents)), generator=g).to(truth.device)
    is_right = torch.rand(len(truth), len(parents), generator=g).to(truth.device) < right
    return torch.where(is_right, truth[:, depth.clamp(min=1) - 1], wrong)


def number_accepted(parents: list[int], drafts: torch.Tensor, truth: torch.Tensor) -> list[int]:
    """The number of tokens that each row gains: by the definition, among all paths from the root."""

    def longest(row: int, node: int, depth: int) -> int:
        fitting = [c for c, p in enumerate(parents) if p == node and drafts[row, c] == truth[row, depth]]
        return 1 + (longest(row, fitting[0], depth + 1) if fitting else 0)

    return [longest(row, 0, 0) for row in range(len(drafts))]


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1, 2], TREE], ids=["no drafts", "chain", "tree"])
@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
def test_a_row_gains_the_tokens_that_it_would_have_drawn_one_after_another(model, device, parents, right, truncated):
    changes = {"truncation": truncation(device)} if truncated else {}
    first = torch.arange(NUM_ROWS, device=device)
    truth = drawn_one_by_one(model, first, 11, len(parents), **changes)
    drafts = drafts_of(parents, truth, right, seed=len(parents))
    hidden = model.hidden_after(torch.cat([first[:, None], drafts[:, 1:]], 1))
    tree = None if parents == list(range(-1, len(parents) - 1)) else DraftTree.from_parents(parents, device)
    out = verify(hidden, model.head, drafts, params_of(device, 11, **changes), tree)
    accepted = number_accepted(parents, drafts, truth)
    assert out.num_tokens.tolist() == accepted and out.logprobs is None
    for row, count in enumerate(accepted):
        assert out.token_ids[row].tolist() == truth[row, :count].tolist() + [-1] * (len(parents) - count)
        nodes = out.nodes[row, :count] - row * len(parents)
        assert nodes[0] == 0 and [parents[node] for node in nodes[1:]] == nodes[:-1].tolist()
        assert [drafts[row, node].item() for node in nodes[1:]] == truth[row, : count - 1].tolist()


@dataclasses.dataclass
class Edited:
    """Four nodes per row: masks are of nodes, penalties of rows. drawn: what each node draws by itself."""

    hidden: torch.Tensor
    allowed: torch.Tensor
    edits: LogitEdits
    params: BatchParams
    accepted: torch.Tensor  # drafts that are all accepted; the hidden states are those of others
    drawn: SampleOutput


@pytest.fixture(scope="module")
def edited(model, device) -> Edited:
    g = torch.Generator().manual_seed(1)
    allowed = (torch.rand(NUM_ROWS * 4, VOCAB, generator=g) < 0.5).to(device)
    edits = LogitEdits(additive=2 * torch.randn(NUM_ROWS, VOCAB, generator=g).to(device), mask=~allowed)
    drafts = torch.randint(VOCAB, (NUM_ROWS, 4), generator=g).to(device)
    hidden = model.hidden_after(drafts)
    params = params_of(device, 0, edits=edits)
    nodes = dataclasses.replace(params.repeated(4), position=torch.arange(4, device=device).repeat(NUM_ROWS))
    drawn = sample(hidden.flatten(0, 1), model.head, nodes, return_logprob=True)
    accepted = drafts.clone()
    accepted[:, 1:] = drawn.token_ids.view(NUM_ROWS, 4)[:, :-1]
    return Edited(hidden, allowed, edits, params, accepted, drawn)


def flags_of_nodes(device) -> torch.Tensor:
    return torch.full((NUM_ROWS * 4,), 15, dtype=torch.int32, device=device)


def test_edits_of_a_batch_are_repeated_by_a_number_and_not_copied(edited):
    rows = edited.params.repeated(4).edits
    assert rows.mask is edited.edits.mask and rows.additive is edited.edits.additive and rows.repeats == 4


def test_masks_of_nodes_and_penalties_of_rows_apply_to_every_node(model, edited):
    out = verify(edited.hidden, model.head, edited.accepted, edited.params, return_logprob=True)
    assert out.num_tokens.tolist() == [4] * NUM_ROWS
    assert torch.equal(out.token_ids.flatten(), edited.drawn.token_ids)
    assert torch.equal(out.logprobs.flatten(), edited.drawn.logprobs)
    assert edited.allowed.gather(1, edited.drawn.token_ids[:, None]).all()


def test_logprobs_are_of_the_tokens_gained_and_0_behind_them(model, edited):
    rejected = torch.full_like(edited.accepted, -2)
    out = verify(edited.hidden, model.head, rejected, edited.params, return_logprob=True)
    assert out.num_tokens.tolist() == [1] * NUM_ROWS and not out.logprobs[:, 1:].any()
    assert torch.equal(out.logprobs[:, 0], edited.drawn.logprobs.view(NUM_ROWS, 4)[:, 0])


def test_penalties_and_flags_may_be_of_nodes_as_masks_are(model, edited, device):
    additive = edited.edits.additive.repeat_interleave(4, 0)
    edits = dataclasses.replace(edited.edits, additive=additive, rows=flags_of_nodes(device))
    params = dataclasses.replace(edited.params, edits=edits)
    out = verify(edited.hidden, model.head, edited.accepted, params, return_logprob=True)
    assert torch.equal(out.token_ids.flatten(), edited.drawn.token_ids)


def test_masks_and_flags_may_be_of_rows_as_penalties_are(model, edited, device):
    mask, flags = ~edited.allowed[::4].contiguous(), flags_of_nodes(device)
    of_rows = LogitEdits(edited.edits.additive, mask=mask, rows=flags[::4].contiguous())
    of_nodes = LogitEdits(edited.edits.additive.repeat_interleave(4, 0), mask=mask.repeat_interleave(4, 0), rows=flags)
    both = [
        verify(edited.hidden, model.head, edited.accepted, dataclasses.replace(edited.params, edits=edits)).token_ids
        for edits in (of_rows, of_nodes)
    ]
    assert torch.equal(*both)


def test_a_batch_without_rows_gains_nothing(model, device):
    empty = torch.empty(0, 4, dtype=torch.int64, device=device)
    params = BatchParams(*(torch.empty(0, dtype=dtype, device=device) for dtype in (torch.float32, *[torch.int64] * 2)))
    out = verify(model.hidden_after(empty), model.head, empty, params, return_logprob=True)
    assert out.token_ids.shape == out.nodes.shape == out.logprobs.shape == (0, 4) and out.num_tokens.shape == (0,)


def with_edits(**edits) -> BatchParams:
    return BatchParams(torch.ones(2), *torch.zeros(2, 2).long(), edits=LogitEdits(**edits))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden": torch.zeros(2, 64)}, "hidden is \\(2, 64\\); expected \\[B, D, H\\]"),
        ({"hidden": torch.zeros(2, 0, 64)}, "hidden is \\(2, 0, 64\\); expected .* a D of 1 or more"),
        ({"hidden": [[[1.0]]]}, "hidden is a list; expected \\[B, D, H\\]"),
        ({"draft_tokens": torch.zeros(2, 4).long()}, "draft_tokens is \\(2, 4\\) .*; expected contiguous \\(2, 3\\)"),
        ({"draft_tokens": torch.zeros(2, 3).int()}, "draft_tokens is .* torch.int32 .*; expected .* torch.int64"),
        ({"draft_tokens": [[0]]}, "draft_tokens is a list; expected a tensor"),
        ({"tree": (0, 1, 2)}, "tree is a tuple; expected a DraftTree or None"),
        ({"params": BatchParams(torch.ones(6), *torch.zeros(2, 6).long())}, "temperature is \\(6,\\) .* \\(2,\\)"),
        ({"tree": DraftTree.chain(4, "cpu")}, "tree.first_child is \\(4,\\); expected \\(3,\\) or \\(2, 3\\)"),
        ({"params": {}}, "params is a dict; expected BatchParams"),
        ({"params": BatchParams([1.0, 1.0], *torch.zeros(2, 2).long())}, "temperature is a list; expected a tensor"),
        ({"params": BatchParams(torch.ones(2), *torch.zeros(2, 2).long(), 5)}, "truncation is a int; expected Trunc"),
        ({"params": with_edits(mask=[[True] * 100] * 2)}, "mask is a list; expected a tensor with a row per row"),
        ({"params": with_edits(bias=torch.tensor(1.0))}, "bias is \\(\\); expected a tensor with a row per row"),
        ({"params": with_edits(repeats="2")}, "repeats is '2'; expected an integer"),
        ({"tree": DraftTree([1], [2], [3])}, "tree.first_child is a list; expected an int64 tensor"),
        ({"lm_head": LMHead(torch.zeros(96, 64), shards=2)}, "lm_head is one of 2 shards; verify expects a whole"),
        (
            {"tree": DraftTree(*torch.zeros(3, 3).int())},
            "tree.first_child is torch.int32 on cpu; expected int64 on cpu",
        ),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    params = BatchParams(torch.ones(2), *torch.zeros(2, 2).long())
    right = {"hidden": torch.zeros(2, 3, 64), "draft_tokens": torch.zeros(2, 3).long(), "params": params}
    with pytest.raises(ValueError, match=message):
        verify(**{"lm_head": torch.zeros(100, 64)} | right | changed)


@pytest.mark.parametrize(
    "parents, message",
    [
        ([0], "parents\\[0\\] is 0; expected -1"),
        ([-1, -1], "parents\\[1\\] is -1; expected an integer, 0 to 0"),
        ([-1, 0, 2], "parents\\[2\\] is 2; expected an integer, 0 to 1"),
        ([-1, 0.0], "parents\\[1\\] is 0.0; expected an integer, 0 to 0"),
        ([], "parents has no node; expected -1 and the parents of the other nodes"),
    ],
)
def test_parents_that_are_no_tree_are_named(parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(parents, "cpu")


@pytest.mark.parametrize("nodes", [0, 1.5])
def test_a_chain_has_one_node_or_more(nodes):
    with pytest.raises(ValueError, match=f"num_nodes is {nodes}; expected an integer, 1 or more"):
        DraftTree.chain(nodes, "cpu")
