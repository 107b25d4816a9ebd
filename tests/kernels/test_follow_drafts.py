"""The path of accepted drafts: of chains and trees as the reference follows them, and with the law of verification by
acceptance probabilities."""

from __future__ import annotations

import itertools

import pytest
import torch
from stats import g_test

from sgl_flashsample.cpu_path import follow_drafts_on_cpu
from sgl_flashsample.kernels.follow_drafts import follow_drafts
from sgl_flashsample.kernels.reference import follow_drafts_ref

NONE = -1


def tree_of(parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First children and next siblings of a tree whose nodes come after their parents; siblings in ascending order."""
    children = [[node for node, parent in enumerate(parents) if parent == of] for of in range(len(parents))]
    following = {a: b for nodes in children for a, b in itertools.pairwise(nodes)}
    first = [nodes[0] if nodes else NONE for nodes in children]
    return torch.tensor(first), torch.tensor([following.get(node, NONE) for node in range(len(parents))])


def random_trees(num_rows: int, num_nodes: int, device) -> tuple[torch.Tensor, ...]:
    """Drawn tokens, drafts, first children, next siblings: of few tokens, so that paths are long."""
    g = torch.Generator().manual_seed(num_rows * 100 + num_nodes)
    trees = []
    for _ in range(num_rows):
        parents = [NONE, *(int(torch.randint(node, (1,), generator=g)) for node in range(1, num_nodes))]
        trees.append(tree_of(parents))
    drawn, drafts = torch.randint(3, (2, num_rows, num_nodes), generator=g)
    tables = (torch.stack([tree[which] for tree in trees]) for which in range(2))
    return tuple(tensor.to(device) for tensor in (drawn, drafts, *tables))


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 8, 33, 64])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("where", ["kernel", "host memory"])
def test_the_path_is_the_references(device, num_rows, num_nodes, where):
    on_host = where == "host memory"
    arguments = random_trees(num_rows, num_nodes, torch.device("cpu") if on_host else device)
    got = (follow_drafts_on_cpu if on_host else follow_drafts)(*arguments)
    paths = follow_drafts_ref(*arguments)
    assert num_nodes < 7 or num_rows < 17 or max(map(len, paths)) > 1, "some drafts are accepted"
    assert got.num_tokens.tolist() == [len(path) for path in paths]
    for row, path in enumerate(paths):
        places = [row * num_nodes + node for node in path]
        assert got.nodes[row].tolist() == places + [NONE] * (num_nodes - len(path))


@pytest.mark.parametrize("num_nodes", [1, 8, 130])
def test_the_drawn_tokens_are_handed_out_as_int32_beside_the_path(device, num_nodes):
    """Those of nodes that are not on the path too."""
    arguments = random_trees(3, num_nodes, device)
    tokens = torch.full((3 * num_nodes + 2,), NONE, dtype=torch.int32, device=device)
    with_tokens = follow_drafts(*arguments, tokens=tokens[1:-1])
    assert torch.equal(tokens[1:-1].long(), arguments[0].reshape(-1)) and tokens[0] == tokens[-1] == NONE
    for got, want in zip(with_tokens, follow_drafts(*arguments), strict=True):
        assert torch.equal(got, want)


def test_a_path_ends_at_the_most_nodes_that_it_may_have(device):
    chain = torch.arange(5, device=device)[None]
    first = torch.tensor([[1, 2, 3, 4, NONE]], device=device)
    none = torch.full_like(first, NONE)
    for most in range(1, 6):
        got = follow_drafts(chain + 1, chain, first, none, most)
        assert got.num_tokens.tolist() == [most] and got.nodes.tolist() == [list(range(most))]


@pytest.mark.parametrize("where", ["kernel", "host memory"])
@pytest.mark.parametrize(
    "first, following",
    [([1, NONE, NONE, NONE], [NONE, 2, 1, NONE]), ([4, 7, -9, 3], [NONE] * 4), ([1, NONE, NONE, NONE], [0, 5, 5, 5])],
    ids=["siblings in a circle", "children that are none", "siblings that are none"],
)
def test_tables_that_are_no_tree_end_the_path(device, where, first, following):
    place, follow = (device, follow_drafts) if where == "kernel" else (torch.device("cpu"), follow_drafts_on_cpu)
    drawn, drafts = torch.full((1, 4), 5, device=place), torch.arange(4, device=place)[None]
    got = follow(drawn, drafts, *(torch.tensor([table], device=place) for table in (first, following)))
    assert got.num_tokens.tolist() == [1] and got.nodes.tolist() == [[0, NONE, NONE, NONE]]


def test_of_siblings_with_the_same_draft_the_first_is_taken(device):
    first, following = (table[None].to(device) for table in tree_of([NONE, 0, 0, 1, 2]))
    drawn = torch.tensor([[5, 6, 6, 0, 0]], device=device)
    drafts = torch.tensor([[9, 5, 5, 6, 6]], device=device)
    assert follow_drafts(drawn, drafts, first, following).nodes.tolist() == [[0, 1, 3, NONE, NONE]]


def accepted_law(target: torch.Tensor, drafts: torch.Tensor, parents: list[int]) -> torch.Tensor:
    """Probability of each outcome, by the rule of SGLang's tree verification and FlashSpec: a child is accepted with
    the target's probability of its token, else a token is drawn from what is left. ``[D, V]``: the path ends at this
    node with this token. target: ``[D, V]`` of each node."""
    reached = torch.zeros(len(parents), dtype=torch.float64)
    reached[0] = 1.0
    outcome = torch.zeros_like(target)
    for node in range(len(parents)):
        left = target[node].clone()
        for child, parent in enumerate(parents):
            if parent == node:
                reached[child] = reached[node] * left[drafts[child]]
                left[drafts[child]] = 0.0
        outcome[node] = reached[node] * left
    return outcome


@pytest.mark.parametrize("parents", [[NONE, 0, 1, 2], [NONE, 0, 0, 1, 1, 2, 4]], ids=["chain", "tree"])
def test_the_tokens_have_the_law_of_acceptance_by_probabilities(device, parents):
    """1e5 rows; alpha 1e-6. A child that is taken for a token that was not drawn would show with a power of 1."""
    num_rows, size, g = 100_000 if device.type == "cuda" else 4_000, 5, torch.Generator().manual_seed(3)
    target = torch.softmax(1.5 * torch.randn(len(parents), size, generator=g, dtype=torch.float64), -1)
    drafts = torch.tensor([0, 1, 2, 0, 3, 4, 2][: len(parents)])
    first, following = (table.expand(num_rows, -1).contiguous().to(device) for table in tree_of(parents))
    drawn = torch.stack([torch.multinomial(row, num_rows, True, generator=g) for row in target], 1).to(device)
    got = follow_drafts(drawn, drafts.expand(num_rows, -1).contiguous().to(device), first, following)
    last = got.nodes.gather(1, got.num_tokens[:, None].long() - 1)[:, 0].long()
    node, token = last % len(parents), drawn.reshape(-1)[last]
    counts = torch.bincount(node * size + token, minlength=len(parents) * size).double().cpu().numpy()
    law = accepted_law(target, drafts, parents).reshape(-1).numpy()
    assert abs(law.sum() - 1) < 1e-9
    assert g_test(counts, law).p_value > 1e-6


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"drafts": torch.zeros(2, 3)}, "drafts is \\(2, 3\\) torch.float32; expected \\(2, 3\\) torch.int64"),
        ({"first_child": torch.zeros(2, 4).long()}, "first_child is \\(2, 4\\) torch.int64; expected \\(2, 3\\)"),
        ({"drawn": torch.zeros(6).long()}, "drawn is \\(6,\\) torch.int64; expected \\[B, D\\] torch.int64"),
        ({"next_sibling": torch.zeros(3, 2).long().T}, "next_sibling has strides \\(1, 2\\).*expected it contiguous"),
        ({"max_path": 0}, "max_path is 0 of 3 nodes; expected 1 or more"),
        ({"tokens": torch.zeros(6).long()}, "tokens is \\(6,\\) torch.int64.*expected contiguous \\(6,\\) torch.int32"),
        ({"tokens": torch.zeros(2, 3).int()}, "tokens is \\(2, 3\\) torch.int32.*expected contiguous \\(6,\\)"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    tensors = dict.fromkeys(("drawn", "drafts", "first_child", "next_sibling"), torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match=message):
        follow_drafts(**tensors | changed)
