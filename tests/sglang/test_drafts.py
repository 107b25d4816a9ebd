"""Coupled drafts: the draft model's tokens are drawn with the noise of the target's, so that they are often the same.
The tokens of a request do not depend on them."""

from __future__ import annotations

import logging
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_states import serve
from serving import INTERPRETED, make_server, needs_sglang
from sglang_batches import VOCAB, make_samplers, request
from test_speculation import CHAIN, Original, verification

from sgl_flashsample import sample_from_logits
from sgl_flashsample.demo import markov
from sgl_flashsample.kernels.params import BatchParams
from sgl_flashsample.kernels.rng import GROUP_SIZE
from sgl_flashsample.sglang.drafts import DRAFTS_VARIABLE, CoupledDrafts, couple

REQUESTS, NODES = 6, 4  # places in the server, and nodes of a verification: the root and three drafts
FIRST = 7  # the KV length without the last known token: the position of the root


def forward_batch(mode: str, positions: torch.Tensor, batch_size: int, **others: Any) -> types.SimpleNamespace:
    """As SGLang's ForwardBatch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fields = {"spec_info": types.SimpleNamespace(), **others}
    return types.SimpleNamespace(forward_mode=ForwardMode[mode], positions=positions, batch_size=batch_size, **fields)


class Server:
    """A server's coupled drafts, and a draft model whose logits are a function of what it is called with.

    logits: ``[N, V]`` of the next call. worker: as SGLang's EagleDraftWorker. largest: the tokens with the largest
    logits that the last call returned."""

    def __init__(self, head: Any, **worker: Any) -> None:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        server = self

        class Processor(LogitsProcessor):
            def __init__(self, vocab_size: int) -> None:
                torch.nn.Module.__init__(self)
                self.vocab_size = vocab_size

            def forward(self, input_ids, hidden_states, lm_head, logits_metadata) -> types.SimpleNamespace:
                return types.SimpleNamespace(next_token_logits=server.logits.clone(), hidden_states=None)

        self.runtime = make_samplers()[0].runtime
        serve(self.runtime, head.state)
        model = torch.nn.Module()
        model.logits_processor = Processor(worker.pop("vocab_size", VOCAB))
        for place in range(worker.pop("others", 0)):
            setattr(model, f"other_{place}", Processor(VOCAB))
        self.worker = types.SimpleNamespace(
            hot_token_id=None,
            draft_runner=types.SimpleNamespace(model=model),
            req_to_token_pool=types.SimpleNamespace(size=worker.pop("size", REQUESTS)),
            speculative_num_draft_tokens=NODES,
        )
        vars(self.worker).update(worker)
        self.logits = torch.empty(0)
        self.drafts = CoupledDrafts(self.runtime)
        self.drafts.attach(self.worker)

    def load(self, info: Any, top_logprobs: int = 0) -> None:
        batch = types.SimpleNamespace(sampling_info=info, return_logprob=top_logprobs > 0, token_ids_logprobs=None)
        batch.top_logprobs_nums = [top_logprobs] * (0 if info is None else len(info))
        self.drafts.load(None, batch)

    def call(self, batch: types.SimpleNamespace, logits: torch.Tensor) -> torch.Tensor:
        """The logits that SGLang's worker sees."""
        self.logits = logits
        return self.worker.draft_runner.model.logits_processor(None, None, None, batch).next_token_logits


@pytest.fixture
def server(head, one_rank) -> Callable[..., Server]:
    return lambda **worker: Server(head, **worker)


def random_logits(rows: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, VOCAB, generator=generator).to(device)


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


def closed_form(p: torch.Tensor, q: torch.Tensor) -> float:
    """How often a draw of p and a draw of q with the same noise are equal. ``[V]`` float64 probabilities.

    A group of ids is chosen first, then an id in it, each by noise of its own: two choices among the same things with
    the same noise are both i with probability 1 / sum_j max(p_j / p_i, q_j / q_i)."""

    def both(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return 1 / torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None]).sum(1)

    groups = list(zip(p.split(GROUP_SIZE), q.split(GROUP_SIZE), strict=True))
    masses = (torch.stack([pair[which].sum() for pair in groups]) for which in range(2))
    return sum(chosen * both(*pair).sum() for chosen, pair in zip(both(*masses), groups, strict=True)).item()


@needs_sglang
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafts_are_the_targets_tokens_as_often_as_the_noise_allows(server, info_of, device, temperature):
    """Within five standard deviations, of a draft model that is wrong by a normal error; far more often than the draft
    model's best token."""
    requests = 20_000 if device.type == "cuda" else 3_000
    target, error = random_logits(2, device)
    draft = target + 0.4 * error
    p, q = (torch.softmax(logits.double() / temperature, -1) for logits in (target, draft))
    coupled = server(size=requests)
    coupled.load(info_of([request(str(row), temperature=temperature, sampling_seed=row) for row in range(requests)]))
    positions = torch.full((requests,), FIRST, device=device)
    drafts = coupled.call(forward_batch("DECODE", positions, requests), draft.expand(requests, -1)).argmax(-1)
    tokens = drawn(
        target.expand(requests, -1).contiguous(),
        [temperature] * requests,
        list(range(requests)),
        [FIRST + 1] * requests,
    )
    accepted = (drafts == torch.tensor(tokens, device=device)).double().mean().item()
    want = closed_form(p, q)
    assert abs(accepted - want) < 5 * (want * (1 - want) / requests) ** 0.5
    assert want > p[q.argmax()] + 0.2, "else this says little"


MIXED = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 1.7, "top_k": 1}]
TEMPERATURES = [0.0, 1.0, 0.3, 0.0]


@needs_sglang
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "DRAFT_EXTEND_V2", "selected"])
def test_each_row_is_drawn_at_its_temperature_and_greedy_rows_are_the_largest_logit(
    server, info_of, device, mode, padding
):
    """In all passes of a draft model: a step of the chain, a prefill, and the pass over verified tokens, whose rows are
    all nodes or the last accepted ones. padding: rows that a graph of SGLang's has beside the batch."""
    coupled = server()
    info = info_of([request(str(row), sampling_seed=row, **params) for row, params in enumerate(MIXED)])
    coupled.load(info)
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
    logits = random_logits(rows * copies, device)
    seen = coupled.call(forward_batch(name, positions.to(device), rows, **others), logits)
    served = len(MIXED) * copies
    want = drawn(
        logits[:served],
        [temperature for temperature in TEMPERATURES for _ in range(copies)],
        [row for row in range(len(MIXED)) for _ in range(copies)],
        [position + 1 for position in last[:served]],
    )
    assert seen.argmax(-1)[:served].tolist() == want
    greedy = torch.tensor([temperature == 0 for temperature in TEMPERATURES]).repeat_interleave(copies).to(device)
    assert torch.equal(seen.argmax(-1)[:served][greedy], logits.argmax(-1)[:served][greedy])
    assert (seen.argmax(-1) != logits.argmax(-1)).any(), "some rows are drawn"
    # SGLang also takes the most probable token, and one that is certain is that.
    assert torch.softmax(seen, -1).max(-1).values.tolist() == [1.0] * len(seen) and seen.isfinite().all()


@needs_sglang
def test_a_pass_without_rows_and_one_of_more_requests_than_the_server_has_are_left_alone(server, info_of, device):
    coupled = server()
    coupled.load(info_of([request("0", temperature=1.0)]))
    none = forward_batch("IDLE", torch.empty(0, dtype=torch.int64), 0)
    assert coupled.call(none, torch.empty(0, VOCAB)).shape == (0, VOCAB)
    for batch in (
        forward_batch("DECODE", torch.arange(REQUESTS + 1, device=device), REQUESTS + 1),
        forward_batch("TARGET_VERIFY", torch.arange(REQUESTS + 1, device=device), 1),
    ):
        logits = random_logits(REQUESTS + 1, device)
        assert torch.equal(coupled.call(batch, logits), logits)
    coupled.logits = None  # what an autotuner of SGLang's computes
    batch = forward_batch("DECODE", torch.arange(1, device=device), 1)
    assert (
        coupled.drafts.draw(None, (None, None, None, batch), {}, types.SimpleNamespace(next_token_logits=None)) is None
    )
    assert torch.equal(
        coupled.call(batch, random_logits(1, device)).argmax(-1).cpu(),
        torch.tensor(drawn(random_logits(1, device), [1.0], coupled.drafts._seed[:1].tolist(), [1])),
    ), "still coupled"


def chain_of(coupled: Server, first: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """``[B, D - 1]``: the drafts after ``first`` (``[B, 1]``), by SGLang's own loop. logits: ``[B, D, V]`` of the
    draft model after each node."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    rows, steps = logits.shape[0], iter(range(1, NODES - 1))
    device = logits.device

    def forward(batch: types.SimpleNamespace) -> types.SimpleNamespace:
        coupled.logits = logits[:, next(steps)]
        output = coupled.worker.draft_runner.model.logits_processor(None, None, None, batch)
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
    runner.model = coupled.worker.draft_runner.model
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
    return EagleDraftWorker.draft_forward(worker, batch)[2]


@needs_sglang
def test_drafts_of_the_target_itself_are_all_accepted_at_every_temperature(server, head, hidden, info_of, monkeypatch):
    """Through SGLang's chain of drafts and our verification: the positions of the noise are the same in both."""
    from sglang.srt.speculative import eagle_worker_v2

    from sgl_flashsample.sglang.speculation import SpeculationHooks

    plain = types.SimpleNamespace(speculative_use_rejection_sampling=False)
    monkeypatch.setattr(eagle_worker_v2, "get_spec", lambda: plain)
    temperatures = [0.0, 0.2, 0.7, 1.0, 1.5, 4.0]
    coupled, rows = server(), len(temperatures)
    info = info_of([request(str(row), temperature=one) for row, one in enumerate(temperatures)])
    coupled.load(info)
    states = hidden(rows * NODES)
    logits = head.logits(states).view(rows, NODES, VOCAB)
    # The pass over the tokens of the last verification gained the root, one past what is in the KV cache.
    verified = torch.full((rows,), FIRST - 1, device=states.device)
    selected = types.SimpleNamespace(select_index=torch.arange(rows, device=states.device))
    extend = forward_batch("DRAFT_EXTEND_V2", verified, rows, spec_info=selected)
    first = coupled.call(extend, logits[:, 0]).argmax(-1, keepdim=True)
    drafts = torch.cat([torch.zeros_like(first), chain_of(coupled, first, logits)], 1)
    assert (drafts[:, 1:] != logits[:, :-1].argmax(-1)).any(0).all(), (
        "each depth has drafts that are not the best token"
    )
    verify_input, batch, output = verification(info, head.lazy(states), CHAIN, drafts)
    _, num_tokens, _ = SpeculationHooks(coupled.runtime).eagle_sample(Original(), verify_input, batch, output)
    assert num_tokens.tolist() == [NODES] * rows


# --- which rows -----------------------------------------------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize("case", ["SGLang's row", "top logprobs", "no batch", "inactive", "too many"])
def test_a_batch_that_sglang_verifies_has_greedy_drafts(server, info_of, device, case):
    """Its coins accept a draft by the target's probability, whichever noise it has: the most likely token is best."""
    coupled = server()
    coupled.load(info_of([request(str(row), temperature=1.0) for row in range(3)]))
    batch = forward_batch("DECODE", torch.arange(3, device=device), 3)
    logits = random_logits(3, device)
    assert not torch.equal(coupled.call(batch, logits).argmax(-1), logits.argmax(-1))
    info = info_of([request("0", mask=case == "SGLang's row"), request("1"), request("2")])
    if case == "no batch":
        info = None
    elif case == "inactive":
        coupled.runtime.inactive_reason = "off"
    elif case == "too many":
        info = info_of([request(str(row)) for row in range(REQUESTS + 1)])
    coupled.load(info, top_logprobs=2 if case == "top logprobs" else 0)
    assert torch.equal(coupled.call(batch, logits).argmax(-1), logits.argmax(-1))


@needs_sglang
def test_what_a_graph_reads_stays_where_it_is_and_is_written_when_the_batch_changes(server, info_of, device):
    coupled = server()
    drafts = coupled.drafts
    tensors = [drafts._temperature, drafts._seed, *drafts._workspace.splits]
    places = [tensor.data_ptr() for tensor in tensors]
    first, second = (
        info_of([request(str(row), temperature=t, sampling_seed=row + 5) for row in range(count)])
        for t, count in ((0.5, 2), (0.9, 4))
    )
    coupled.load(first)
    versions = [tensor._version for tensor in tensors[:2]]
    coupled.load(first)
    assert [tensor._version for tensor in tensors[:2]] == versions, "the same batch is not written again"
    coupled.load(second)
    coupled.drafts.attach(coupled.worker)
    rows = REQUESTS * NODES
    batch = forward_batch("DRAFT_EXTEND_V2", torch.arange(rows, device=device), REQUESTS)
    coupled.call(batch, random_logits(rows, device))
    tensors = [drafts._temperature, drafts._seed, *drafts._workspace.splits]
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert drafts._temperature[:4].tolist() == pytest.approx([0.9] * 4) and drafts._seed[:4].tolist() == [5, 6, 7, 8]


# --- where not ------------------------------------------------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"hot_token_id": [5, 9]}, "the draft model has a vocabulary of its own"),
        ({"vocab_size": VOCAB - 16}, f"the draft model has {VOCAB - 16} ids, the target {VOCAB}"),
        ({"others": 1}, "the draft model has 2 places that compute logits; expected 1"),
        ({"req_to_token_pool": None}, "AttributeError: 'NoneType' object has no attribute 'size'"),
    ],
    ids=str,
)
def test_a_draft_model_that_cannot_be_coupled_keeps_its_drafts_and_the_log_says_why(
    server, info_of, device, caplog, changes, words
):
    with caplog.at_level(logging.INFO):
        coupled = server(**changes)
    coupled.load(info_of([request("0", temperature=5.0)]))
    batch, logits = forward_batch("DECODE", torch.arange(1, device=device), 1), random_logits(1, device)
    assert torch.equal(coupled.call(batch, logits), logits) == (words is not None)
    (line,) = [record.message for record in caplog.records if "drafts are" in record.message]
    assert line.endswith("with the target's noise" if words is None else words)


@needs_sglang
@pytest.mark.parametrize("failing", ["load", "draw"])
def test_after_a_failure_drafts_are_greedy_and_the_log_says_so_once(
    server, info_of, device, caplog, monkeypatch, failing
):
    from sgl_flashsample.sglang import drafts

    coupled = server()
    coupled.load(info_of([request("0", temperature=5.0)]))

    def fail(*arguments, **named):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(drafts, {"load": "batch_of", "draw": "sample_from_logits"}[failing], fail)
    batch, logits = forward_batch("DECODE", torch.arange(1, device=device), 1), random_logits(1, device)
    for _ in range(2):
        coupled.load(info_of([request("1", temperature=5.0)]))
        assert torch.equal(coupled.call(batch, logits), logits)
    (line,) = [record.message for record in caplog.records if "drafts are greedy" in record.message]
    assert not coupled.drafts._temperature.any(), "what graphs read"
    assert line.endswith("RuntimeError: no kernel") and coupled.runtime.inactive_reason is None


@pytest.fixture
def installed(server_config, monkeypatch) -> list:
    """What ``install`` gets in a server of EAGLE."""
    monkeypatch.setenv(DRAFTS_VARIABLE, "coupled")
    server_config.spec.speculative_algorithm = "EAGLE"
    return []


@pytest.mark.parametrize(
    "text, words",
    [(None, None), ("greedy", None), ("coupled", None), ("1", "FLASHSAMPLE_DRAFTS is '1'; expected greedy or coupled")],
)
def test_drafts_are_coupled_where_the_switch_says_so(installed, monkeypatch, caplog, text, words):
    if text is None:
        monkeypatch.delenv(DRAFTS_VARIABLE)
    else:
        monkeypatch.setenv(DRAFTS_VARIABLE, text)
    couple("runtime", installed.append)
    assert [drafts.runtime for drafts in installed] == (["runtime"] if text == "coupled" else [])
    assert [record.message.partition("the same: ")[2] for record in caplog.records] == (
        [] if words is None else [words]
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        *(({"spec.speculative_algorithm": name}, None) for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")),
        *(({"spec.speculative_algorithm": name}, f"{name} drafts") for name in ("NGRAM", "FROZEN_KV_MTP")),
        ({"spec.enable_multi_layer_eagle": True}, "several draft heads (--enable-multi-layer-eagle)"),
        ({"spec.speculative_eagle_topk": 2}, "a tree of drafts (--speculative-eagle-topk above 1)"),
        ({"parallel.tp_size": 2}, "a draft head that several ranks share"),
        ({"parallel.pp_size": 2}, "a draft head that several ranks share"),
    ],
    ids=str,
)
def test_of_a_server_whose_drafts_cannot_be_coupled_the_log_says_why(installed, server_config, caplog, changes, words):
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(server_config, part), name, value)
    couple("runtime", installed.append)
    assert len(installed) == (0 if words else 1)
    lines = [record.message for record in caplog.records]
    assert lines == ([] if words is None else [lines[0]]) and all(words in line for line in lines)


def test_a_server_whose_configuration_cannot_be_read_keeps_its_drafts(installed, server_config, caplog):
    del server_config.spec.speculative_eagle_topk
    couple("runtime", installed.append)
    (line,) = [record.message for record in caplog.records]
    assert installed == [] and "speculative_eagle_topk" in line


def test_an_sglang_without_a_place_that_we_hook_keeps_its_drafts(server_config, monkeypatch):
    """None of its modules is there."""
    from sgl_flashsample.sglang import hooks

    monkeypatch.setattr(
        hooks.versions, "unsupported_target", lambda target, want: f"{target.split('.')[-1]} is missing"
    )
    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookType = module.HookRegistry = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    missing = "init_cuda_graphs is missing; forward_batch_generation is missing; forward is missing"
    assert hooks.install_drafts(None) == missing


# --- a server -------------------------------------------------------------------------------------------------------

STEPS = NODES - 1
STANDALONE = [
    *("--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"),
    *("--speculative-num-steps", str(STEPS), "--speculative-num-draft-tokens", str(NODES)),
    *("--attention-backend", "triton", "--disable-cuda-graph"),
]
TOKENS = 12
SERVED = [
    *({"temperature": 1.0, "sampling_seed": seed} for seed in range(4)),
    {"temperature": 0.0},
    {"temperature": 0.5, "sampling_seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 2},
]
AT_ONE = range(4)  # the rows at temperature 1


def write_wrong_drafter(folder: Path) -> None:
    """A checkpoint like the target's, but that each logit has a normal error of 0.6."""
    from safetensors.torch import load_file, save_file

    size = markov.SIZES["tiny"]
    shutil.copytree(folder / "tiny", folder / "drafter")
    weights = load_file(folder / "drafter" / "model.safetensors")
    error = torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(5))
    weights["lm_head.weight"] += 0.6 / size.hidden_size**0.5 * error
    save_file(weights, folder / "drafter" / "model.safetensors", metadata={"format": "pt"})


def accepted(answers: list[dict]) -> float:
    """The part of the drafts that are accepted, of those that follow accepted ones."""
    tried = correct = 0
    for answer in answers:
        for count, times in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            correct, tried = correct + count * times, tried + min(count + 1, STEPS) * times
    return correct / tried


@needs_sglang
@pytest.mark.server
@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="near-ties of bfloat16 are looked at by the benchmark")
def test_a_servers_tokens_do_not_depend_on_its_drafts_and_coupled_ones_are_accepted_more_often(tmp_path):
    """Servers without drafts, with greedy ones, with coupled ones, and with coupled ones of the target itself."""
    markov.write(tmp_path / "tiny", markov.SIZES["tiny"])
    write_wrong_drafter(tmp_path)
    answers = {}
    for name, drafter in (("none", None), ("greedy", "drafter"), ("coupled", "drafter"), ("itself", "tiny")):
        environment, arguments = {}, ["--disable-radix-cache"]
        if drafter is not None:
            environment = {"FLASHSAMPLE_SPECULATION": "1"} | INTERPRETED
            environment["FLASHSAMPLE_DRAFTS"] = "greedy" if name == "greedy" else "coupled"
            arguments += [*STANDALONE, "--speculative-draft-model-path", str(tmp_path / drafter)]
        server, _ = make_server(tmp_path, "tiny", name=name, arguments=arguments, environment=environment)
        with server:
            rows = [{**params, "max_new_tokens": TOKENS, "ignore_eos": True} for params in SERVED]
            ids = [[5 + row, 300, 7] for row in range(len(SERVED))]
            answers[name] = server.generate(input_ids=ids, sampling_params=rows)
            assert bool(server.log_lines("drafts are coupled")) == (name in ("coupled", "itself"))
            assert "drafts are greedy" not in server.log_text()
    tokens = {name: [answer["output_ids"] for answer in each] for name, each in answers.items()}
    assert tokens["none"] == tokens["greedy"] == tokens["coupled"] == tokens["itself"]
    assert all(len(one) == TOKENS for one in tokens["none"])
    rates = {name: accepted([answers[name][row] for row in AT_ONE]) for name in ("greedy", "coupled", "itself")}
    print(rates)
    assert 0.05 < rates["greedy"] < rates["coupled"] - 0.2 and 0.3 < rates["coupled"] < 0.95
    assert rates["itself"] == 1.0
