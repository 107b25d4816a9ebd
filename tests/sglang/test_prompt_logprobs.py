"""Logprobs of prompts: the values and lists of SGLang's own code in this process, and rows that are drawn as in any
other prefill."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_head import Script
from head_states import VOCAB, Processor, hidden_states, make_head, make_state, metadata_of, serve, weights
from sglang_batches import make_samplers

from sgl_flashsample import Head, LMHead, Logprobs, WantedLogprobs, paths
from sgl_flashsample.logprobs import merge_parts
from sgl_flashsample.sglang import hooks, prompt_logprobs, versions
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.prompt_logprobs import MAX_GIVEN_VALUES, PromptHooks
from sgl_flashsample.sglang.runtime import RankError, Runtime
from sgl_flashsample.sglang.step_graphs import RETRY_SECONDS

FORWARD, PREPARE = versions.PROMPT_TARGETS
STOCK = object()  # the answer of SGLang's own code


@dataclasses.dataclass
class Part:
    """One sequence of a prefill. length: its tokens. start: the first of them after which a logprob is asked for."""

    length: int
    start: int
    top: int = 0
    ids: list[int] | None = None


class PromptProcessor(Processor):
    """A LogitsProcessor that counts the rows whose logits it computes."""

    computed = 0

    def _get_logits(self, hidden, lm_head, metadata, embedding_bias=None, use_logits_buffer=True):  # type: ignore[override]
        self.computed += len(hidden)
        return (hidden @ lm_head.weight.T)[:, : self.vocab_size].float()


class Prefill:
    """The arguments of ``InputLogprobProcessor.forward`` for these sequences, as SGLang makes them."""

    def __init__(self, state: HeadState, sequences: Sequence[Part], **fields: Any) -> None:
        self.state, device = state, state.lm_head.weight.device
        lengths = [one.length - one.start for one in sequences]
        rows = [max(length, 1) for length in lengths]
        ends = torch.tensor(rows).cumsum(0)
        self.sample = (ends - 1).tolist()
        self.indices = [
            int(end) - each + row
            for end, each, length in zip(ends, rows, lengths, strict=True)
            for row in range(length)
        ]
        self.hidden = hidden_states(device, sum(rows), dtype=state.lm_head.weight.dtype)
        generator = torch.Generator().manual_seed(1)
        self.targets = torch.randint(VOCAB, (sum(lengths),), generator=generator).to(device)
        self.metadata = metadata_of(
            "extend",
            extend_return_logprob=True,
            extend_return_top_logprob=any(one.top for one in sequences),
            extend_token_ids_logprob=any(one.ids is not None for one in sequences),
            extend_logprob_pruned_lens_cpu=lengths,
            top_logprobs_nums=[one.top for one in sequences],
            token_ids_logprobs=[one.ids for one in sequences],
            extend_input_logprob_token_ids_gpu=self.targets,
            sample_indices_cpu=self.sample,
            input_logprob_indices_cpu=self.indices,
        )
        vars(self.metadata).update(fields)
        of_row = [place for place, each in enumerate(rows) for _ in range(each)]
        self.arguments: dict[str, Any] = {
            "pruned_states": self.hidden,
            "sample_indices": torch.tensor(self.sample, device=device),
            "input_logprob_indices": torch.tensor(self.indices, dtype=torch.int64, device=device),
            "token_to_seq_idx": of_row,
            "lm_head": state.lm_head,
            "get_logits_fn": state.processor._get_logits,
            "logits_metadata": self.metadata,
        }

    @property
    def logprobs(self) -> torch.Tensor:
        """``[n, V]`` float64: of the rows with logprobs."""
        logits = self.hidden[self.indices].double() @ self.state.lm_head.weight.double().T
        return torch.log_softmax(logits[:, :VOCAB], dim=-1)


def served(runtime: Runtime, device: torch.device, script: Script | None) -> HeadState:
    """A head that the runtime serves: a fake one with this script, or a real one."""
    state = make_state(device, dtype=torch.float32, script=script)
    state.processor = PromptProcessor()
    serve(runtime, state)
    return state


@pytest.fixture
def state(runtime, device, script) -> HeadState:
    return served(runtime, device, script)


@pytest.fixture
def prompts(runtime, pretend) -> PromptHooks:
    """Hooks of a pretended SGLang."""
    pretend("sglang.srt.layers.logprob_processor", LogprobResult=types.SimpleNamespace)
    return PromptHooks(runtime)


def read(prompts: PromptHooks, prefill: Prefill, **options: Any) -> Any:
    """The result of our hook; ``STOCK`` where it leaves the prompt to SGLang's own code."""
    arguments = list({**prefill.arguments, **options}.values())

    def original(processor: Any, *given: Any) -> object:
        assert processor == "processor" and all(one is other for one, other in zip(given, arguments, strict=False))
        return STOCK

    return prompts.forward(original, "processor", **prefill.arguments, **options)


# The values and the lists, as SGLang's own code gets them to a request.

LOW, HIGH = [5], [VOCAB - 1, 7, 7, 0]
BATCHES = {
    "from the start": [Part(6, 0)],
    "from the middle": [Part(6, 3)],
    "from the last token": [Part(6, 5)],
    "beside a sequence without": [Part(4, 4), Part(6, 0, 3), Part(5, 5)],
    "with the likeliest ids": [Part(5, 0, 1)],
    "with different numbers of likeliest ids": [Part(4, 0, 3), Part(5, 2, 0), Part(3, 0, 9)],
    "whose likeliest ids are asked for without a row": [Part(4, 4, 3), Part(5, 2)],
    "with given ids": [Part(5, 0, 0, HIGH), Part(4, 1, 0, HIGH)],
    "with given ids of one sequence": [Part(5, 0), Part(4, 1, 0, LOW), Part(4, 4)],
    "with different given ids": [Part(4, 0, 2, LOW), Part(3, 3, 0, [1]), Part(4, 0, 4, HIGH)],
    "with given ids of which there are none": [Part(4, 0, 0, []), Part(3, 1)],
}


def delivered(result: Any, sequences: Sequence[Part]) -> list[dict[str, Any]]:
    """The logprobs that SGLang keeps for each request, and then sends to its client."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ReqLogprob
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor

    output = LogitsProcessorOutput(next_token_logits=None)
    result.write_input_to(output)
    batch = types.SimpleNamespace(return_logprob=True)
    SchedulerBatchResultProcessor.move_logprobs_to_cpu(None, batch=batch, logits_output=output)
    processor = SchedulerLogprobResultProcessor(model_config=types.SimpleNamespace(vocab_size=VOCAB))
    kept, row = [], 0
    for place, sequence in enumerate(sequences):
        request = types.SimpleNamespace(
            **dict.fromkeys(("input_token_logprobs", "multi_item_delimiter_indices", "token_indices_to_pool")),
            **dict.fromkeys(
                f"temp_input_{name}_{part}"
                for name in ("top_logprobs", "token_ids_logprobs")
                for part in ("val", "idx")
            ),
            logprob=ReqLogprob(top_logprobs_num=sequence.top, token_ids_logprob=sequence.ids),
            logprob_start_len=sequence.start,
            origin_input_ids=list(range(sequence.length)),
            is_prefill_only=False,
            return_logprob=True,
            return_flat_raw_top_logprobs=False,
        )
        rows = sequence.length - sequence.start
        if rows:
            processor.add_input_logprob_return_values(place, request, output, row, rows, last_prefill_chunk=True)
        row += rows
        logprobs = dataclasses.asdict(request.logprob)
        kept.append({name: value for name, value in logprobs.items() if name.startswith("input_")})
    return kept


@pytest.fixture
def stock(one_rank, monkeypatch) -> Callable[[Prefill], Any]:
    """SGLang's own code, in chunks of 4 rows."""
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor
    from sglang.srt.managers.scheduler_components import logprob_result_processor

    features = types.SimpleNamespace(features=types.SimpleNamespace(enable_mis=False))
    monkeypatch.setattr(logprob_result_processor, "get_exec", lambda: features)
    width = {"vocab_size": VOCAB} if "vocab_size" in inspect.signature(InputLogprobProcessor).parameters else {}
    processor = InputLogprobProcessor(**width)
    processor.logprobs_chunk_size = 4
    return lambda prefill: processor.forward(**prefill.arguments)


@pytest.mark.parametrize("pipeline", [False, True], ids=["", "in a pipeline"])
@pytest.mark.parametrize("name", BATCHES)
def test_requests_get_what_sglang_gives_them_and_no_logits_are_computed(stock, device, script, name, pipeline):
    """Values within 2e-5 of float64."""
    runtime: Runtime = make_samplers()[0].runtime
    state, sequences = served(runtime, device, script), BATCHES[name]
    state.copies_tokens = pipeline
    prefill = Prefill(state, sequences)
    result, lazy = read(PromptHooks(runtime), prefill)
    assert state.processor.computed == 0
    of_tokens = prefill.logprobs.gather(1, prefill.targets[:, None])[:, 0]
    torch.testing.assert_close(result.token_logprobs.double(), of_tokens, atol=2e-5, rtol=0)
    expected, logits = stock(prefill)
    got, want = delivered(result, sequences), delivered(expected, sequences)
    assert len(got) == len(want) == len(sequences)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for field in mine:
            assert_alike(mine[field], theirs[field])
    torch.testing.assert_close(lazy.dense(), logits)


def assert_alike(mine: Any, theirs: Any) -> None:
    """The same lists, their numbers of the same type and within 2e-5."""
    assert type(mine) is type(theirs)
    if isinstance(mine, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(mine, float):
        assert math.isclose(mine, theirs, abs_tol=2e-5)
    else:
        assert mine == theirs


def test_the_rows_that_draw_a_token_are_left_for_later(prompts, state):
    prefill = Prefill(state, [Part(4, 4), Part(6, 1)])
    _, lazy = read(prompts, prefill)
    assert type(lazy) is LazyLogits and lazy.prefills and lazy.source is state and lazy.shape == (2, VOCAB)
    assert torch.equal(lazy.hidden, prefill.hidden[prefill.sample])


@pytest.mark.parametrize("rows", [4, 6, 1024])
def test_values_of_kernels_are_those_of_float64_wherever_a_chunk_ends(prompts, runtime, device, monkeypatch, rows):
    """In chunks of 4 rows, which end where sequences do, of 6 rows, and in one chunk; within 2e-5."""
    state = served(runtime, device, None)
    monkeypatch.setattr(paths, "MAX_CHUNK_BYTES", rows * state.lm_head.weight.shape[0] * 4)
    sequences = [Part(4, 0, 3, LOW), Part(4, 4), Part(3, 0, 0, HIGH), Part(9, 1, 9)]
    prefill = Prefill(state, sequences)
    result, _ = read(prompts, prefill)
    want, start = prefill.logprobs, 0
    of_tokens = want.gather(1, prefill.targets[:, None])[:, 0]
    torch.testing.assert_close(result.token_logprobs.double(), of_tokens, atol=2e-5, rtol=0)
    for place, one in enumerate(sequences):
        part = want[start : start + one.length - one.start]
        start += len(part)
        values, ids = part.topk(one.top)
        if len(part):
            assert list(result.top_logprobs_idx[place]) == ids.tolist()
            mine = torch.tensor(list(result.top_logprobs_val[place]), dtype=torch.float64, device=device)
            torch.testing.assert_close(mine, values, atol=2e-5, rtol=0)
        if len(part) and one.ids is not None:
            mine = result.token_ids_logprobs_val[place].double().to(device)
            torch.testing.assert_close(mine, part[:, one.ids], atol=2e-5, rtol=0)


def test_a_pipeline_sends_lists_at_once(prompts, state):
    """Lists of whole rows, which it pickles before SGLang has waited for the device."""
    state.copies_tokens = True
    result, _ = read(prompts, Prefill(state, [Part(3, 0, 2, LOW), Part(4, 4), Part(3, 1, 1, HIGH)]))
    for lists in (result.top_logprobs_val, result.top_logprobs_idx, result.token_ids_logprobs_val):
        assert [type(one) for one in lists] == [list] * 3 and [len(one) for one in lists] == [3, 0, 2]


def test_ids_that_all_sequences_give_are_told_once(prompts, state, script):
    read(prompts, Prefill(state, [Part(5, 0, 0, HIGH), Part(4, 1, 0, [*HIGH]), Part(4, 4, 0, LOW)]))
    assert script.prompts[0].token_ids.tolist() == [HIGH]


def test_rows_without_likeliest_ids_are_not_read_for_them(prompts, state, script):
    read(prompts, Prefill(state, [Part(4, 4, 9), Part(5, 3, 2), Part(3, 1)]))
    assert script.prompts[0].top == 2 and script.prompts[0].counts.tolist() == [0, 2, 2, 0, 0]


# Prefills that SGLang serves.

MANY_IDS = [0] * (MAX_GIVEN_VALUES // 2 + 1)
LEFT: dict[str, tuple[Sequence[Part], dict[str, Any], dict[str, Any]]] = {
    "DP attention": ([Part(4, 0)], {}, {"skip_chunking_for_dp_attn": True}),
    "129 likeliest ids": ([Part(4, 0, 129)], {}, {}),
    "an id below 0": ([Part(4, 0, 0, [-1])], {}, {}),
    "an id above the vocabulary": ([Part(4, 0, 0, [VOCAB])], {}, {}),
    "too many given ids": ([Part(2, 0, 0, MANY_IDS)], {}, {}),
    "rows that we do not know": ([Part(4, 0)], {"extend_logprob_pruned_lens_cpu": [3]}, {}),
    "targets that we do not know": (
        [Part(4, 0)],
        {"extend_input_logprob_token_ids_gpu": torch.zeros(3, dtype=torch.int64)},
        {},
    ),
    "a verification of drafts": ([Part(4, 0)], vars(metadata_of("extend", "target_verify")), {}),
    "a split prefill": ([Part(4, 0)], vars(metadata_of("extend", "split_prefill")), {}),
    "no prefill": ([Part(4, 0)], vars(metadata_of("decode")), {}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_we_do_not_read_is_sglangs(prompts, state, script, caplog, name):
    sequences, fields, options = LEFT[name]
    fields = {key: value for key, value in fields.items() if key != "extend_return_logprob"}
    assert read(prompts, Prefill(state, sequences, **fields), **options) is STOCK
    assert not script.prompts and not caplog.records
    assert read(prompts, Prefill(state, [Part(4, 0)])) is not STOCK


def test_the_most_likeliest_ids_that_we_read_are_128(prompts, state, script):
    assert read(prompts, Prefill(state, [Part(4, 0, 128)])) is not STOCK
    assert script.prompts[0].top == 128


def share_unevenly(given: types.SimpleNamespace) -> None:
    given.state.exchange, given.state.whole_rows = types.SimpleNamespace(num_ranks=2), True


def draft(given: types.SimpleNamespace) -> None:
    given.runtime._draft_processors.add(id(given.state.processor))
    given.runtime.draft_head, given.runtime.draws_drafts = given.state, True


def switch_off(given: types.SimpleNamespace) -> None:
    given.runtime.inactive_reason = "a fault"


def leave(given: types.SimpleNamespace) -> None:
    given.runtime._heads[id(given.state.processor), id(given.state.lm_head)] = None


def hide_processor(given: types.SimpleNamespace) -> None:
    given.prefill.arguments["get_logits_fn"] = lambda *arguments, **options: None


@pytest.mark.parametrize("change", [share_unevenly, draft, switch_off, leave, hide_processor])
def test_a_head_that_we_do_not_serve_is_sglangs(prompts, runtime, state, script, monkeypatch, change):
    prefill = Prefill(state, [Part(4, 0)])
    monkeypatch.setattr(runtime, "_prepare", lambda *arguments, **options: "no LogitsProcessor")
    change(types.SimpleNamespace(runtime=runtime, state=state, prefill=prefill))
    assert read(prompts, prefill) is STOCK and not script.prompts


class Other:
    """The exchange of the first of two ranks in this process. It asks the other one where the first has its answer.
    fails: raised in the place of an answer."""

    rank, num_ranks, fails = 0, 2, False

    def __init__(self, weight: torch.Tensor) -> None:
        self.head = Head(LMHead.of_rank(weight, 1, 2, VOCAB))
        self.asked: tuple = ()

    def merge_prompt(self, found: Logprobs, wanted: WantedLogprobs) -> Logprobs:
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        parts = [found, self.head.logprobs_of(*self.asked, wanted)]
        return merge_parts(torch.stack([part.pack(tokens=True) for part in parts]), wanted)


@pytest.fixture
def first_of_two(runtime, device) -> HeadState:
    """The first of two ranks that share a head."""
    weight = torch.nn.functional.pad(weights(device, dtype=torch.float32), (0, 0, 0, 32))  # 320 ids each
    lm_head = make_head(weight)
    state = HeadState(PromptProcessor(), make_head(weight[:320]), exchange=Other(weight[320:].contiguous()))
    of_head = state.head.logprobs_of

    def noted(hidden: torch.Tensor, targets: torch.Tensor, wanted: WantedLogprobs) -> Logprobs:
        state.exchange.asked = hidden, targets
        return of_head(hidden, targets, wanted)

    state.head.logprobs_of = noted
    serve(runtime, state)
    state.whole = lm_head
    return state


def test_ranks_that_share_a_head_read_prompts_together(prompts, first_of_two):
    """With given ids and targets of both ranks, and the likeliest ids of both."""
    sequences = [Part(5, 0, 9, HIGH), Part(4, 4), Part(3, 1, 0, LOW)]
    prefill = Prefill(first_of_two, sequences)
    prefill.state = types.SimpleNamespace(lm_head=first_of_two.whole)
    result, lazy = read(prompts, prefill)
    want = prefill.logprobs
    of_tokens = want.gather(1, prefill.targets[:, None])[:, 0]
    torch.testing.assert_close(result.token_logprobs.double(), of_tokens, atol=2e-5, rtol=0)
    values, ids = want[:5].topk(9)
    assert {id // 320 for id in ids.flatten().tolist()} == {0, 1}
    assert list(result.top_logprobs_idx[0]) == ids.tolist()
    torch.testing.assert_close(torch.tensor(list(result.top_logprobs_val[0])).double(), values.cpu(), atol=2e-5, rtol=0)
    torch.testing.assert_close(result.token_ids_logprobs_val[0].double(), want[:5, HIGH].cpu(), atol=2e-5, rtol=0)
    torch.testing.assert_close(result.token_ids_logprobs_val[2].double(), want[5:, LOW].cpu(), atol=2e-5, rtol=0)
    assert type(lazy) is LazyLogits and len(lazy) == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AttributeError])
def test_a_rank_that_fails_at_a_prompt_ends_instead_of_leaving_the_others_alone(
    prompts, first_of_two, monkeypatch, error
):
    """The others have begun their exchange by then, whatever has failed."""

    def fails(*arguments: object) -> None:
        raise error("a fault")

    monkeypatch.setattr(first_of_two, "logprobs_of_prompt", fails)
    with pytest.raises(RankError, match=rf"sampling failed on rank 0 .*: {error.__name__}: a fault"):
        read(prompts, Prefill(first_of_two, [Part(4, 0)]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AttributeError])
def test_a_rank_that_fails_before_the_exchange_ends_unless_all_fail_alike(prompts, first_of_two, monkeypatch, error):
    """It would wait for the others in SGLang's gather. A missing attribute of SGLang's is missing on all ranks."""

    def fails(*arguments: object) -> None:
        raise error("a fault")

    monkeypatch.setattr(prompt_logprobs, "wanted_of", fails)
    prefill = Prefill(first_of_two, [Part(4, 0)])
    if error is AttributeError:
        assert read(prompts, prefill) is STOCK
        return
    with pytest.raises(RankError, match=r"rank 0 .*: logprobs of a prompt: OutOfMemoryError: a fault"):
        read(prompts, prefill)


def test_a_capture_of_the_model_is_sglangs(prompts, state, script, pretend_gpu):
    pretend_gpu(True, True)
    assert read(prompts, Prefill(state, [Part(4, 0)])) is STOCK and not script.prompts


@pytest.mark.parametrize("missing", [True, False], ids=["memory", "a fault"])
def test_after_a_failure_sglang_reads_prompts_and_one_warning_says_so(prompts, state, script, clock, caplog, missing):
    prefill = Prefill(state, [Part(4, 0)])
    script.error = torch.OutOfMemoryError("no memory") if missing else ZeroDivisionError("a fault")
    assert [read(prompts, prefill) for _ in range(3)] == [STOCK] * 3
    assert len(script.prompts) == 1
    (line,) = [record.message for record in caplog.records]
    words = (
        ("for 5 minutes", "OutOfMemoryError: no memory") if missing else ("until restart", "ZeroDivisionError: a fault")
    )
    assert words[0] in line and line.endswith(words[1])
    script.error = None
    clock[0] += RETRY_SECONDS
    assert (read(prompts, prefill) is STOCK) is not missing
    assert prompts.runtime.inactive_reason is None, "decode steps are fused"


# The hooks.


def test_prompts_are_read_in_the_place_of_sglangs_code_and_batches_are_corrected_after_it(registry, runtime, caplog):
    hooks.install_prompt_hooks(runtime)
    assert [(target, when) for target, (_, when) in registry.hooked.items()] == [
        (FORWARD, "around"),
        (PREPARE, "after"),
    ]
    assert not caplog.records


@pytest.mark.parametrize("missing", [FORWARD, PREPARE])
def test_an_sglang_whose_prompts_we_do_not_know_reads_them_and_a_warning_says_so(registry, runtime, caplog, missing):
    registry.missing.add(missing)
    hooks.install_prompt_hooks(runtime)
    (warning,) = [record.message for record in caplog.records]
    assert warning.endswith(f"are SGLang's: no {missing}") and not registry.hooked


# A retraction.


def prepared(starts: Sequence[int], stored: Sequence[Any], **fields: Any) -> types.SimpleNamespace:
    """A ScheduleBatch after ``prepare_for_extend``: 4 tokens per request, with the ids 10, 11, ... of the first, 20,
    21, ... of the second. stored: the logprobs of its prompt that a request has."""
    ids = [10 * place + token for place, start in enumerate(starts, 1) for token in range(start, 4)]
    batch = types.SimpleNamespace(
        return_logprob=True,
        reqs=[types.SimpleNamespace(logprob=types.SimpleNamespace(input_token_logprobs_val=one)) for one in stored],
        model_config=types.SimpleNamespace(is_encoder_decoder=False),
        extend_lens=[4] * len(starts),
        extend_logprob_start_lens=list(starts),
        extend_input_logprob_token_ids=torch.tensor(ids, dtype=torch.int64),
    )
    vars(batch).update(fields)
    return batch


@pytest.mark.parametrize(
    "starts, stored, want, ids",
    [
        ([0, 2], [[], None], [4, 2], [22, 23]),
        ([2, 0], [None, [None, -1.5]], [2, 4], [12, 13]),
        ([1, 4, 3], [None, [], []], [1, 4, 4], [11, 12, 13]),
        ([0, 1], [[], []], [4, 4], []),
        ([0, 1], [None, None], [0, 1], [10, 11, 12, 13, 21, 22, 23]),
    ],
)
def test_after_a_retraction_nothing_is_asked_for_that_sglang_has(prompts, starts, stored, want, ids):
    batch = prepared(starts, stored)
    prompts.prepare_for_extend(None, batch)
    assert batch.extend_logprob_start_lens == want
    assert batch.extend_input_logprob_token_ids.tolist() == ids
    assert batch.extend_input_logprob_token_ids.dtype is torch.int64


def test_a_rank_that_finds_no_memory_to_pin_asks_for_the_rows_that_the_others_ask_for(prompts, monkeypatch, caplog):
    def pin_memory(ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a fault")

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda ids: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batch = prepared([0, 2], [[], None])
    prompts.prepare_for_extend(None, batch)
    assert batch.extend_logprob_start_lens == [4, 2] and batch.extend_input_logprob_token_ids.tolist() == [22, 23]
    assert not caplog.records


@pytest.mark.parametrize(
    "fields",
    [
        {"model_config": types.SimpleNamespace(is_encoder_decoder=True)},
        {"return_logprob": False},
        {"extend_input_logprob_token_ids": None},
    ],
    ids=["an encoder", "no logprobs", "no ids"],
)
def test_a_batch_of_other_lengths_stays(prompts, fields, caplog):
    batch = prepared([0, 2], [[], None], **fields)
    ids = batch.extend_input_logprob_token_ids
    prompts.prepare_for_extend(None, batch)
    assert batch.extend_logprob_start_lens == [0, 2] and batch.extend_input_logprob_token_ids is ids
    assert not caplog.records


def test_a_batch_that_cannot_be_read_stays_and_one_warning_says_so(prompts, caplog):
    for _ in range(2):
        batch = prepared([0, 2], [[], None], extend_lens=[4, 9])
        ids = batch.extend_input_logprob_token_ids
        prompts.prepare_for_extend(None, batch)
        assert batch.extend_logprob_start_lens == [0, 2] and batch.extend_input_logprob_token_ids is ids
    (line,) = [record.message for record in caplog.records]
    assert "prefills after a retraction compute logprobs that SGLang has stored already: RuntimeError: " in line
