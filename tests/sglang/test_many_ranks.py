"""Eight ranks and sixteen, which share a head of any number of ids: each gets the draw from the whole vocabulary.

Parts that are no multiple of 16 ids, as of 202,048 and 262,208 ids on 8 ranks and 151,936 on 16, have groups of ids
that lie on two ranks. What few ranks exchange is in ``test_exchange.py``.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import many_ranks
import pytest
import torch
from kernel_cases import expected
from many_ranks import ROWS, WAYS, case_of, kinds_of, wanted_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_flashsample import Head, Logprobs, WantedLogprobs, sample
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.sglang.straddling import Straddling
from sgl_flashsample.tools.server import free_port

# Ranks, ids of each, ids of the vocabulary. The remainders of the parts by 16 are those of 262,208 ids on 8 ranks,
# of 202,048 and 262,208 on 16, and none; the last rank has padding behind its ids.
SHAPES = ("8x40x315", "8x48x380", "16x36x570")
ALWAYS = "4x44x170"  # runs without --full; the remainder of 202,048 ids on 16 ranks


@pytest.fixture(scope="module", params=[ALWAYS, *(pytest.param(shape, marks=pytest.mark.full) for shape in SHAPES)])
def answered(request, tmp_path_factory) -> tuple[int, list[dict]]:
    """The ids of the vocabulary, and the answers of each rank."""
    command = [sys.executable, many_ranks.__file__, str(free_port()), str(tmp_path_factory.mktemp("ranks"))]
    ran = subprocess.run([*command, request.param], capture_output=True, text=True, timeout=many_ranks.SECONDS * 2)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return int(request.param.split("x")[2]), json.loads(ran.stdout)


@pytest.mark.slow
def test_every_rank_gets_the_same(answered):
    _, ranks = answered
    assert len(ranks[0]) == len(WAYS) * len(kinds_of(len(ranks)))
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.slow
def test_the_token_is_that_of_one_rank_and_of_the_reference(answered):
    vocab, ranks = answered
    for name, answer in ranks[0].items():
        case = case_of(name.split(",")[0], vocab)
        (drawn,) = answer["drawn"]
        want = sample(case.hidden, case.head, case.params, return_logprob=True, path="logits")
        assert drawn["token_ids"] == want.token_ids.tolist(), name
        reference = expected(case)
        differs = torch.tensor(drawn["token_ids"]) != reference.token
        assert not (differs & ~reference.near_tie).any(), name
        logprobs, masses = torch.tensor(drawn["logprobs"]), torch.tensor(drawn["log_mass"])
        torch.testing.assert_close(logprobs, want.logprobs, rtol=1e-5, atol=2e-4, msg=name)
        # A log-mass is the sum of two numbers.
        torch.testing.assert_close(masses.sum(1), want.log_mass.sum(1), rtol=1e-5, atol=2e-4, msg=name)


def assert_logprobs(got: dict, want: Logprobs, name: str) -> None:
    values = dict(zip(("logprobs", "top ids", "top logprobs", "of ids"), many_ranks.values_of(want), strict=True))
    assert got["top ids"] == values.pop("top ids").tolist(), name
    for key, value in values.items():
        torch.testing.assert_close(torch.tensor(got[key]), value, rtol=1e-5, atol=2e-4, msg=f"{name}: {key}")


@pytest.mark.slow
def test_logprobs_beside_the_tokens_are_those_of_one_rank(answered):
    vocab, ranks = answered
    for name, answer in ranks[0].items():
        case = case_of(name.split(",")[0], vocab)
        (found,) = answer["found"]
        assert found["token_ids"] == answer["drawn"][0]["token_ids"], name
        assert_logprobs(found, Head(case.head).draw_with_logprobs(case.hidden, case.params, wanted_of(vocab))[1], name)


@pytest.mark.slow
def test_logprobs_of_a_prompt_are_those_of_one_rank(answered):
    vocab, ranks = answered
    case, wanted = case_of("plain", vocab), wanted_of(vocab)
    want = Head(case.head).logprobs_of(case.hidden, wanted.token_ids[:, 0].contiguous(), wanted)
    assert_logprobs(ranks[0]["plain, by collectives"]["prompt"], want, "a prompt")


class Allocations(TorchDispatchMode):
    """What is allocated, but for empty tensors, which the interpreter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel():
            self.made.append(StorageWeakRef(made.untyped_storage()))
        return made


@pytest.mark.parametrize("wanted", [None, WantedLogprobs(token_ids=torch.zeros(ROWS, 1, dtype=torch.int64))])
def test_what_a_graph_writes_to_beside_its_result_lives_as_long_as_it(wanted):
    """Else the tokens of another graph would lie there."""
    case = case_of("edit", 170)
    part = torch.nn.functional.pad(case.head.weight, (0, 0, 0, 6))[44:88]
    straddling = Straddling.of_rank(LMHead(part), 1, 4, 170).with_scratch(ROWS)
    drawn, found = Head(straddling.whole_groups).draw_with_logprobs(case.hidden, case.params, WantedLogprobs())
    found = found._replace(of_ids=torch.zeros(ROWS, 1))
    logits, holds = torch.zeros(ROWS, 16), []
    with Allocations() as allocations:
        if wanted is None:
            result = straddling.complete(drawn, logits, case.params, holds)
        else:
            result = straddling.complete_with_logprobs(drawn, found, logits, case.params, wanted, holds)
    gc.collect()
    assert allocations.made and not any(storage.expired() for storage in allocations.made)
    assert result is not drawn


REAL = [(202_048, 8), (202_048, 16), (262_208, 8), (262_208, 16), (151_936, 16), (201_088, 16)]


@pytest.mark.parametrize("vocab, num_ranks", REAL)
def test_each_id_is_drawn_by_one_rank_and_each_group_as_a_whole(vocab, num_ranks):
    width, owners = vocab // num_ranks, torch.zeros(vocab, dtype=torch.int32)
    weight = torch.zeros(width, 1)
    for rank in range(num_ranks):
        one = Straddling.of_rank(LMHead(weight), rank, num_ranks, vocab)
        whole, sent = one.whole_groups, 0 if one.first is None else len(one.first.weight)
        assert whole.vocab_start == rank * width + sent and sent < 16
        owners[whole.vocab_start : whole.vocab_start + whole.vocab_size] += 1
        if one.group is not None:
            owners[one.group.vocab_start : one.group.vocab_end] += 1
            assert one.group.vocab_start == whole.vocab_start + whole.vocab_size
            assert one.group.vocab_end - len(one.last.weight) >= one.group.vocab_start
        assert (whole.shards, whole.spec.total_ids) == (num_ranks, vocab)
    assert (owners == 1).all()


@pytest.mark.parametrize(
    "width, num_ranks, vocab",
    [(48, 8, 380), (40, 1, 40), (20, 4, 80), (40, 4, 120), (40, 4, 128)],
    ids=["multiples of 16", "one rank", "parts without a whole group", "a rank without ids", "one with half a group"],
)
def test_no_group_straddles_or_whole_rows_are_exchanged(width, num_ranks, vocab):
    weight = torch.zeros(width, 4)
    assert not any(Straddling.of_rank(LMHead(weight), rank, num_ranks, vocab) for rank in range(num_ranks))
