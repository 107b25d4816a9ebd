"""The contract of every path: each row gets the reference's token, in every batch and with every configuration."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from kernel_cases import (
    CAPS,
    CUDA,
    DTYPES,
    KINDS,
    LISTED,
    PATHS,
    READ,
    SCREEN,
    TILE,
    Case,
    Drawn,
    assert_equal_to_reference,
    assert_soft_capped,
    config_of,
    draw,
    huge_biases_and_a_mask,
    limits,
    limits_by_row,
    make_case,
    make_params,
    mixed_edits,
    near_pairs,
    numbers,
    pack_bits,
    peaked,
    reference,
    rounding_case,
    spelled_out,
    two_huge_biases,
)

from sgl_flashsample.defaults import all_configs, family_of_device
from sgl_flashsample.kernels.config import (
    MAX_SPLITS,
    MAX_TRUNCATED_ROWS_PER_TILE,
    ReadConfig,
    TileConfig,
    TruncationConfig,
)
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_splits, workspace_slots
from sgl_flashsample.kernels.merge_ranks import merge_records, no_record, pack_record
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitEdits, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.reference import allowed_ref, lm_head_sample_ref
from sgl_flashsample.kernels.sample_logits import num_read_splits, read_slots, sample_logits
from sgl_flashsample.kernels.screened_sample import screened_sample
from sgl_flashsample.kernels.workspace import ScreenWorkspace, Workspace
from sgl_flashsample.kinds import path_of


def kinds(*names: str):
    """Interpreted, each truncated row takes 50 to 100 ms."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow) if "truncate" in name and not CUDA else name for name in names]


on_every_path = pytest.mark.parametrize("path", PATHS)
of_every_kind = pytest.mark.parametrize("kind", kinds(*KINDS))
plain_and_all = pytest.mark.parametrize("kind", kinds("plain", "edit+truncate"))

SHAPES = [(17, 1), (1, 127), (3, 129), (17, 127), (65, 129), (9, 5003)]
DTYPE_OF_KIND = dict(zip(KINDS, ["bf16", "fp16", "fp32", "bf16", "fp32"], strict=True))


def assert_same(one: Drawn, other: Drawn) -> None:
    """The same tokens. Scores and logprobs agree up to rounding, which depends on the order of sums."""
    assert torch.equal(one.token_ids, other.token_ids)
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-5, atol=1e-5, equal_nan=True)
    if one.logprobs is not None and other.logprobs is not None:
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4, equal_nan=True)
        masses = (drawn.log_mass.double().sum(-1) for drawn in (one, other))
        torch.testing.assert_close(*masses, rtol=1e-6, atol=1e-4)


# --- the reference's token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows, vocab", SHAPES)
@of_every_kind
@on_every_path
def test_tokens_and_logprobs_equal_the_reference(device, path, kind, num_rows, vocab):
    if "truncate" in kind and not CUDA:
        num_rows = {65: 18, 17: 8, 9: 5}.get(num_rows, num_rows)
    case = make_case(num_rows, vocab, device, kind, DTYPES[DTYPE_OF_KIND[kind]], padding=vocab % 7)
    assert_equal_to_reference(case, draw(path, case), 0.4 if num_rows < 9 else 0.12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_rows, vocab, kind",
    [
        (1, 151_937, "plain"),
        (3, 50_257, "edit+truncate"),
        *([pytest.param(17, 151_936, "edit+truncate", marks=pytest.mark.full)] if CUDA else []),
        pytest.param(17, 151_937, "edit+truncate", marks=pytest.mark.full),
    ],
)
@on_every_path
def test_tokens_and_logprobs_of_a_whole_vocabulary_equal_the_reference(device, path, num_rows, vocab, kind):
    case = make_case(num_rows, vocab, device, kind, torch.bfloat16, padding=3)
    assert_equal_to_reference(case, draw(path, case), 0.4)


ALL_SHAPES = [*itertools.product((1, 3, 17, 65), (1, 127, 129)), (17, 50_257), (1, 151_936), (1, 151_937)]
if CUDA:  # interpreted, 17 rows of the largest vocabularies take minutes; the test above has the dearest kind of them
    ALL_SHAPES += [(1, 50_257), (17, 151_936), (17, 151_937), (65, 151_937), (129, 50_257)]


def every_pair() -> list[tuple[str, str, str, int, int]]:
    """Path, kind, dtype, rows and ids: the product on a GPU. Interpreted, every pair of two options' values, every path
    with every kind and dtype, and every kind and path with each number of rows and of ids."""
    if CUDA:
        return [(*one, *shape) for *one, shape in itertools.product(PATHS, KINDS, DTYPES, ALL_SHAPES)]
    dtypes = tuple(DTYPES)
    return [
        (PATHS[(place + place // 3 + kind) % 3], KINDS[kind], dtypes[(place + 2 * (place // 3) + kind) % 3], *shape)
        for (place, shape), kind in itertools.product(enumerate(ALL_SHAPES), range(len(KINDS)))
    ]


def test_every_pair_of_options_is_compared_with_the_reference():
    cases = [(path, kind, dtype, shape) for path, kind, dtype, *shape in map(list, every_pair())]
    values = [PATHS, KINDS, tuple(DTYPES), [list(shape) for shape in ALL_SHAPES]]
    for places in (*itertools.combinations(range(4), 2), (0, 1, 2)):
        for wanted in itertools.product(*(values[place] for place in places)):
            assert any(tuple(case[place] for place in places) == wanted for case in cases), wanted


@pytest.mark.full
@pytest.mark.parametrize("path, kind, dtype, num_rows, vocab", every_pair())
def test_tokens_and_logprobs_equal_the_reference_for_every_shape_and_dtype(device, path, kind, dtype, num_rows, vocab):
    case = make_case(num_rows, vocab, device, kind, DTYPES[dtype], seed=1, padding=vocab % 7)
    assert_equal_to_reference(case, draw(path, case), 0.7 if num_rows < 9 else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows, vocab", [(3, 17), (17, 2003), *([(65, 151_937)] if CUDA else [])])
@pytest.mark.parametrize("dtype", DTYPES)
@on_every_path
def test_where_sums_are_rounded_tokens_equal_the_reference_but_for_rows_that_a_rounding_decides(
    device, path, dtype, num_rows, vocab
):
    case = rounding_case(num_rows, vocab, device, DTYPES[dtype])
    drawn, params = draw(path, case), case.params
    if path == "logits":
        return assert_equal_to_reference(case, drawn, 0.05)  # the same logits, to the bit
    want = lm_head_sample_ref(case.hidden, case.head.weight, params.temperature, params.seed, params.position)
    certain = ~want.near_tie
    assert torch.equal(drawn.token_ids[certain], want.token[certain])
    assert want.near_tie.double().mean() <= (0.35 if num_rows < 9 else 0.12)
    if drawn.logprobs is not None:
        same = drawn.token_ids == want.token
        assert (drawn.logprobs[same] >= want.logprob_low[same] - 1e-4).all()
        assert (drawn.logprobs[same] <= want.logprob_high[same] + 1e-4).all()


HEADS = {
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "scale and softcap": {"logit_scale": 3.0, "softcap": 20.0},
    "float32 logits": {"logits_dtype": torch.float32},
    "logits rounded further": {"logits_dtype": torch.bfloat16},
    "shard": {"vocab_start": 1600, "shards": 9},
    "shard with everything": {
        **{"vocab_start": 160, "shards": 2},
        **{"logit_scale": 0.375, "softcap": 9.0, "logits_dtype": torch.float32},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(kind, options, id=f"{kind}-{name}", marks=[pytest.mark.slow] * (kind == "truncate" and not CUDA))
        for kind, (name, options) in itertools.product(("plain", "edit", "truncate"), HEADS.items())
        if kind != "truncate" or "shards" not in options
    ],
)
@on_every_path
def test_scale_softcap_rounding_shard_and_padding_are_the_models(device, path, kind, options):
    """Vocabularies with a full and a partial last group, and with padding. Edits of a shard are read at the shard's
    ids."""
    num_rows = 9 if kind == "truncate" and not CUDA else 17
    for vocab in (896, 901) if kind == "plain" else (901,):
        case = make_case(num_rows, vocab, device, kind, seed=3, padding=11, **options)
        assert_equal_to_reference(case, draw(path, case), 0.15)


def test_a_negative_scale_is_one_of_the_models(device):
    """The screened path is left out: its bound needs a positive scale."""
    case = make_case(17, 901, device, "edit", padding=3, logit_scale=-3.0)
    for path in ("fused", "logits"):
        assert_equal_to_reference(case, draw(path, case))


@pytest.mark.parametrize("hidden", [65, 72, 200])
@pytest.mark.parametrize("path", ["fused", "screened"])
def test_a_hidden_size_that_no_block_divides_is_read_to_its_end(device, path, hidden):
    """Rows of a multiple of 16 bytes are read through descriptors, others through pointers."""
    case = make_case(5, 300, device, hidden=hidden)
    described = {"tma": True, "hidden_tma": True} if path == "fused" else {"tma": True}
    assert case.head.supports_tma == (hidden != 65)
    config = dataclasses.replace(config_of(path, 300), **described)
    assert_equal_to_reference(case, draw(path, case, config), 0.2)


# --- invariance of the token --------------------------------------------------------------------------------

CONFIGS = {
    "fused": [
        TileConfig(32, 256, 32, 4, 2, tma=False, reduce_rows=8),
        TileConfig(128, 1024, 64, 4, 1, 4, tma=False),
        TileConfig(128, 1024, 64, 4, 1, tma=False, rows_first=True),
        TileConfig(64, 1024, 32, 4, 1, hidden_tma=True, flatten=False),
        TileConfig(64, 1024, 64, 4, 1, 3, tma=False, reduce_rows=32, one_launch=True),
    ],
    "logits": [
        ReadConfig(64, 2048, 4, ctas_per_sm=2, reduce_rows=64),
        ReadConfig(16, 256, 4, ctas_per_sm=1, min_splits=5),
        ReadConfig(8, 512, 1, 3, ctas_per_sm=2, reduce_rows=4, one_launch=True),
    ],
    "screened": [
        LISTED,
        dataclasses.replace(SCREEN, block_v=64, rescore_v=64),  # noise of fewer groups than there are threads
        dataclasses.replace(SCREEN, block_b=64),
        dataclasses.replace(SCREEN, block_b=8, block_d=32, chunk=16),
        dataclasses.replace(SCREEN, block_v=128, chunk=1000, rescore_v=128, rescore_d=16),
    ],
}
if CUDA:
    CONFIGS["fused"] = [TileConfig(32, 64, 32, 4, 2, tma=False), TileConfig(128, 128, 64, 8, 3, flatten=False)]
    CONFIGS["fused"] += [
        dataclasses.replace(TILE, block_b=64, **{name: True}) for name in ("rows_first", "hidden_tma", "one_launch")
    ]
    CONFIGS["logits"][0] = ReadConfig(32, 128, 4, ctas_per_sm=2, reduce_rows=16)  # a larger block compiles for minutes
    CONFIGS["screened"] += [dataclasses.replace(SCREEN, **{name: False}) for name in ("flatten", "tma", "prefetch")]


@pytest.mark.slow
@plain_and_all
@on_every_path
def test_a_token_does_not_depend_on_the_configuration(device, path, kind):
    case = make_case(33 if kind == "plain" or CUDA else 6, 1500, device, kind, seed=4)
    first = draw(path, case)
    assert_equal_to_reference(case, first)
    for config in CONFIGS[path] if kind == "plain" or CUDA else CONFIGS[path][:2]:
        assert_same(first, draw(path, case, config))


def test_the_configurations_cut_the_work_in_several_ways(device):
    head = make_case(1, 2000, device).head
    assert num_splits(head, 33, TILE) > 1 and {num_splits(head, 33, tile) for tile in CONFIGS["fused"]} != {1}
    assert num_read_splits(2000, 33, READ, device) > 1
    assert {num_read_splits(2000, 33, read, device) for read in CONFIGS["logits"]} >= {1, 5} or CUDA
    assert num_read_splits(2**24, 1, ReadConfig(1, 32, 1, ctas_per_sm=4096, min_splits=512), device) == MAX_SPLITS


@pytest.mark.parametrize("kind", kinds("truncate", "edit+truncate"))
def test_a_truncated_token_does_not_depend_on_how_its_draw_is_launched(device, kind):
    case = make_case(24 if CUDA else 6, 700, device, kind, seed=4)
    first = draw("fused", case)
    assert_equal_to_reference(case, first, 0.25)
    for config in (
        TruncationConfig(),
        TruncationConfig(splits=16, num_warps=4, block=128, search_splits=1, search_warps=4, window=1, gather=1),
        TruncationConfig(1, 4, 256, candidate_groups=8, search_splits=4, search_warps=8, window=4, gather=2),
    ):
        assert_same(first, draw("fused", case, truncation_config=config))


@plain_and_all
@on_every_path
def test_a_token_does_not_depend_on_the_batch_its_order_or_the_neighbours(device, path, kind):
    case = make_case(33 if kind == "plain" or CUDA else 6, 700, device, kind, seed=5)
    num_rows = len(case.hidden)
    together = draw(path, case)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled = draw(path, case.rows(order))
    assert torch.equal(together.token_ids[order], shuffled.token_ids)
    assert torch.equal(together.scores[order], shuffled.scores)
    if together.logprobs is not None:
        assert torch.equal(together.logprobs[order], shuffled.logprobs)
    for row in (3, num_rows - 1):
        alone = draw(path, case.rows(torch.tensor([row], device=device)))
        assert alone.token_ids.item() == together.token_ids[row].item()
    others = torch.arange(num_rows, device=device) != 3
    changed = case.with_params(
        temperature=torch.where(others, 9.0, case.params.temperature),
        seed=torch.where(others, 7, case.params.seed),
        truncation=None if kind == "plain" else dataclasses.replace(
            case.params.truncation, top_k=torch.where(others, 2, case.params.truncation.top_k)
        ),
    )  # fmt: skip
    assert draw(path, changed).token_ids[3].item() == together.token_ids[3].item()


@on_every_path
def test_equal_rows_have_equal_tokens_and_another_seed_or_position_draws_anew(device, path):
    """64 rows of one flat distribution over 1,024 ids: each half has the seeds of the other."""
    case = Case(
        torch.zeros(64, 16, device=device),
        LMHead(torch.zeros(1024, 16, device=device)),
        BatchParams(
            torch.ones(64, device=device),
            torch.arange(64, device=device) % 32 - 7,
            torch.full((64,), 2**33 + 5, device=device),
        ),
    )
    first = draw(path, case, logprobs=False).token_ids
    assert torch.equal(first[:32], first[32:])
    assert first.unique().numel() > 28
    for name in ("seed", "position"):
        for step in (1, 2**32):
            moved = case.with_params(**{name: getattr(case.params, name) + step})
            assert (draw(path, moved, logprobs=False).token_ids != first).float().mean() > 0.9, (name, step)


@of_every_kind
@on_every_path
def test_no_input_is_changed(device, path, kind):
    case = make_case(5, 300, device, kind, padding=3)
    held = [case.hidden, case.head.weight, case.raw, case.params.temperature, case.params.seed, case.params.position]
    for group in (case.params.truncation, case.params.edits):
        if group is not None:
            held += [value for value in vars(group).values() if isinstance(value, torch.Tensor)]
    before = [value.clone() for value in held]
    draw(path, case)
    for value, copy in zip(held, before, strict=True):
        assert torch.equal(value.nan_to_num(), copy.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["fused", "logits", *(["screened"] if CUDA else [])])
def test_rows_may_be_further_apart_than_an_int32_counts(device, path, tmp_path):
    """Rows of logits and of a head, in a file without blocks that is mapped into memory."""
    case = make_case(3, 300, device)
    size = 2**31 + 2**10
    if CUDA:
        held = torch.empty(size, dtype=torch.float16, device=device)
    else:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(2 * size)
        held = torch.from_file(str(tmp_path / "sparse"), size=size, dtype=torch.float16)
    weight = held.as_strided((300, 32), ((2**31 + 64) // 299, 1))
    weight.copy_(case.head.weight)
    far = dataclasses.replace(case, head=LMHead(weight))
    if path == "logits":
        far.__dict__["raw"] = held.as_strided((3, 300), (2**30 + 32, 1))
        far.raw.copy_(case.raw)
    fused = draw("fused", case)
    drawn = draw(path, far)
    assert torch.equal(drawn.token_ids, fused.token_ids)


# --- shards ---------------------------------------------------------------------------------------------------------


def draw_by_ranks(path, whole: Case, num_ranks: int) -> SampleOutput:
    """The draw of ranks that hold equally many rows of the weight, the last ones padding alone."""
    weight, vocab = whole.head.weight, whole.head.vocab_size
    width = -(-vocab // num_ranks // 16) * 16
    weight = torch.nn.functional.pad(weight, (0, 0, 0, width * num_ranks - len(weight)), value=float("nan"))
    draws = []
    for rank in range(num_ranks):
        head = LMHead.of_rank(weight[rank * width : (rank + 1) * width], rank, num_ranks, vocab)
        if head is not None:
            of_rank = draw(path, dataclasses.replace(whole, head=head))
            ids = of_rank.token_ids
            assert ((ids >= head.vocab_start) & (ids < head.vocab_start + head.vocab_size)).all()
            draws.append(SampleOutput(ids, of_rank.logprobs, of_rank.scores, of_rank.log_mass))
        else:
            draws.append(no_record(len(whole.hidden), weight.device, draws[0].logprobs is not None))
    records = torch.cat([pack_record(draw) for draw in draws])
    return merge_records(records, return_logprob=draws[0].logprobs is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_ranks, vocab", [pytest.param(2, 1500, marks=pytest.mark.full), (3, 1501), (8, 401), (8, 33)]
)
@pytest.mark.parametrize("kind", ["plain", "greedy", "edit"])
@on_every_path
def test_ranks_draw_the_token_of_the_whole_vocabulary(device, path, kind, num_ranks, vocab):
    """Whatever their number, also where some hold no id. Edits of a shard are read at the shard's ids. The logprob is
    that under the whole vocabulary."""
    whole = make_case(17, vocab, device, kind, torch.bfloat16, seed=6)
    drawn, merged = draw(path, whole), draw_by_ranks(path, whole, num_ranks)
    assert torch.equal(merged.token_ids, drawn.token_ids)
    rounding = 0.25 if path == "logits" and CUDA else 0.0  # a GEMM of another width may round a logit otherwise
    torch.testing.assert_close(merged.scores, drawn.scores, rtol=0, atol=rounding)
    if drawn.logprobs is not None:
        masses = (output.log_mass.double().sum(-1) for output in (merged, drawn))
        torch.testing.assert_close(*masses, rtol=1e-6, atol=rounding or 1e-4)
        torch.testing.assert_close(merged.logprobs, drawn.logprobs, rtol=0, atol=rounding or 2e-4, equal_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_of_a_hundred_thousand_rows_none_depends_on_the_number_of_ranks(device, num_ranks, monkeypatch):
    """A million on a GPU. Of equal logits: no near-tie is left out."""
    vocab, width = 500, -(-500 // num_ranks // 16) * 16
    num_rows, batches = (50_000, 20) if device.type == "cuda" else (10_000, 10)

    if device.type != "cuda":  # interpreted, a program takes as long for many rows as for one
        monkeypatch.setattr("sgl_flashsample.kernels.merge_ranks.ROWS_PER_PROGRAM", 1 << 14)

    def draw_from(logits: torch.Tensor, spec: LogitsSpec) -> SampleOutput:
        block_b, block_v = 16, 512
        if device.type != "cuda":
            block_v = 1 << (logits.shape[1] - 1).bit_length()
            block_b = 2**20 // block_v
        return sample_logits(logits, spec, params, ReadConfig(block_b, block_v, 4, ctas_per_sm=1, reduce_rows=block_b))

    generator = torch.Generator(device).manual_seed(num_ranks)
    for batch in range(batches):
        logits = 3 * torch.randn(num_rows, vocab, generator=generator, device=device)
        row = torch.arange(num_rows, device=device)
        params = BatchParams(0.3 + row % 7 * 0.3, row * 7919 + batch, row % 1000)
        whole = draw_from(logits, LogitsSpec(vocab))
        records = [
            pack_record(draw_from(part, LogitsSpec(part.shape[1], place * width, shards=num_ranks)))
            for place, part in enumerate(logits.split(width, dim=1))
        ]
        merged = merge_records(torch.cat(records), return_logprob=False)
        assert torch.equal(merged.token_ids, whole.token_ids)


@pytest.mark.parametrize("path", ["fused", "logits"])
def test_the_log_mass_of_a_row_without_an_allowed_id_is_minus_infinity(device, path):
    case = make_case(5, 300, device)
    allowed = torch.ones(5, 300, dtype=torch.bool, device=device)
    allowed[2] = False
    drawn = draw(path, case.with_params(edits=LogitEdits(mask=pack_bits(allowed))))
    assert drawn.log_mass[2].tolist() == [float("-inf"), 0.0]
    assert drawn.log_mass[[0, 1, 3, 4]].isfinite().all()


# --- greedy rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_greedy", [False, True], ids=["among sampled rows", "known to be"])
@pytest.mark.parametrize("edited", [False, True], ids=["", "edited"])
@on_every_path
def test_greedy_rows_take_the_first_of_equal_maxima(device, path, edited, all_greedy):
    vocab, firsts = 4000, [0, 15, 513, 3998]
    values = torch.zeros(4, vocab, device=device)
    for row, ids in enumerate(([0, 1, 3999], [15, 16], [513, 600, 1025, 2049, 3590], [3998, 3999])):
        values[row, ids] = 1.25
    weight, hidden = torch.zeros(vocab, 16, device=device), torch.eye(4, 16, device=device)
    if not edited:
        weight[:, :4] = values.T
    params = BatchParams(
        torch.zeros(4, device=device),
        *(torch.arange(4, device=device) for _ in range(2)),
        edits=LogitEdits(bias=values) if edited else None,
        all_greedy=all_greedy,
    )
    case = Case(hidden, LMHead(weight), params)
    if not all_greedy:  # one more, that is sampled
        order = torch.tensor([0, 1, 1, 2, 3], device=device)
        case = case.rows(order)
        case.params.temperature[1] = 1.0
        firsts.insert(1, None)
    drawn = draw(path, case, logprobs=False)
    for token, score, first in zip(drawn.token_ids.tolist(), drawn.scores.tolist(), firsts, strict=True):
        assert first is None or (token, score) == (first, 1.25)


def test_a_greedy_row_s_logprob_is_that_of_temperature_one(device):
    case = make_case(5, 700, device, "greedy", torch.float32)
    want = torch.log_softmax(case.edited, -1)
    for path in ("fused", "logits"):
        drawn = draw(path, case)
        torch.testing.assert_close(
            drawn.logprobs.double(), want.gather(1, drawn.token_ids[:, None])[:, 0], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("spec", [{}, {"vocab_size": 1001}, {"softcap": 2.0}, {"logit_scale": -1.5}], ids=str)
def test_rows_known_to_be_greedy_are_read_without_noise_to_the_same_tokens(device, spec):
    logits = (torch.randint(-9, 10, (17, 1008), generator=torch.Generator().manual_seed(9)) / 4).float().to(device)
    logits[3, 77], logits[4, 500], logits[5, :] = float("nan"), float("inf"), float("nan")
    logits[6, 990] = logits[6, 12] = 7.0
    logits[7, :] = float("-inf")
    spec = LogitsSpec(**({"vocab_size": 1008, "vocab_start": 320, "shards": 2} | spec))
    params = make_params(17, spec, device, "greedy")
    drawn = sample_logits(logits, spec, dataclasses.replace(params, all_greedy=False), READ)
    known = sample_logits(logits, spec, params, dataclasses.replace(READ, reduce_rows=1, one_launch=True))
    assert torch.equal(drawn.token_ids, known.token_ids)
    assert torch.equal(drawn.scores, known.scores)
    assert known.token_ids[[5, 7]].tolist() == [320, 320], "rows without an allowed token get the first id"


# --- values that are no numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("vocab", [403, 416])
@pytest.mark.parametrize("kind", kinds("plain", "truncate"))
@on_every_path
def test_what_is_not_a_number_is_never_drawn_and_never_touches_another_row(device, path, kind, vocab, softcap):
    """Rows 1, 2 and 4: NaN, a NaN and an infinite hidden element. Ids 10 to 39 and the last two are NaN everywhere."""
    num_rows = 8
    case = make_case(num_rows, vocab, device, kind, torch.float32, seed=7)
    head = LMHead(case.head.weight.clone(), softcap=softcap)
    head.weight[10:40], head.weight[vocab - 2 :] = float("nan"), float("nan")
    clean = dataclasses.replace(case, head=head)
    hidden = case.hidden.clone()
    hidden[1], hidden[2, 0], hidden[4] = float("nan"), float("nan"), float("inf")
    broken = dataclasses.replace(clean, hidden=hidden)
    drawn, sound = draw(path, broken), draw(path, clean)
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab)).all()
    assert drawn.token_ids[[1, 2]].tolist() == [0, 0], "a row without an allowed token gets the first id"
    others = [0, 3, 5, 6, 7]
    assert torch.equal(drawn.token_ids[others], sound.token_ids[others])
    without_nan = clean.edited.nan_to_num(nan=float("-inf"))
    want = reference(without_nan, clean.params, error=clean.softcap_error)
    certain = ~want.near_tie
    assert torch.equal(sound.token_ids[certain], want.token[certain])
    if sound.logprobs is not None:
        assert ((sound.logprobs - want.logprob_low).abs() <= 2e-4)[certain].all()


@pytest.mark.parametrize("kind", kinds("plain", "truncate"))
@on_every_path
def test_an_infinite_logit_wins_and_a_huge_one_is_as_good(device, path, kind):
    num_rows = 5
    case = make_case(num_rows, 100, device, kind, torch.float32)
    for value in (float("inf"), 3e38):
        weight = torch.zeros(100, 16, device=device)
        weight[77] = value
        ones = dataclasses.replace(case, hidden=torch.ones(num_rows, 16, device=device), head=LMHead(weight))
        assert draw(path, ones).token_ids.tolist() == [77] * num_rows


TEMPERATURES = numbers(0.05, 1e-6, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 1.2, 1e30)


@pytest.mark.parametrize("top_k, top_p", [(50, 1.0), (50, 0.9), (0, 0.9)])
@on_every_path
def test_a_token_with_a_huge_bias_is_drawn_at_any_temperature(device, path, top_k, top_p):
    """Its float32 score has no digits for the noise."""
    num_rows, biases = len(TEMPERATURES), (1e9, 1e10, 1e12, 3e38)
    case = spelled_out([0.125 * (i % 9) for i in range(300)], num_rows, device)
    temperature = torch.tensor(TEMPERATURES, device=device)
    for value in biases if CUDA else biases[1:2]:
        bias = torch.zeros(num_rows, 300, device=device)
        bias[:, 170] = value
        changes = {"truncation": limits(num_rows, device, top_k, top_p), "edits": LogitEdits(bias=bias)}
        drawn = draw(path, case.with_params(temperature=temperature, **changes), logprobs=False)
        is_exact = temperature < 1e8
        assert (drawn.token_ids[is_exact] == 170).all(), value


@on_every_path
def test_ids_with_a_huge_negative_bias_are_as_good_as_forbidden(device, path):
    """Whole groups of them, whose largest logit has no digits for the noise either; some rows are searched."""
    num_rows = 30 if CUDA else 9
    case = spelled_out(torch.randn(1024, generator=torch.Generator().manual_seed(1)).tolist(), num_rows, device)
    forbidden = torch.zeros(num_rows, 1024, dtype=torch.bool, device=device)
    forbidden.view(num_rows, 8, 128)[:, :, 80:112] = True
    changes = {"temperature": torch.tensor([0.35, 0.7, 1e-6] * (num_rows // 3), device=device)}
    changes["truncation"] = limits(num_rows, device, top_p=0.3)
    want = draw(path, case.with_params(edits=LogitEdits(mask=forbidden), **changes), logprobs=False)
    bias = torch.where(forbidden, -1e9, 0.0)
    drawn = draw(path, case.with_params(edits=LogitEdits(bias=bias), **changes), logprobs=False)
    assert torch.equal(drawn.token_ids, want.token_ids)
    assert path == "screened" or (drawn.status > 1).any()


@pytest.mark.parametrize("temperature", numbers(0.0, 1e-6, 1.0, 1e30))
@on_every_path
def test_a_finite_bias_of_any_size_neither_opens_nor_closes_a_mask(device, path, temperature):
    case, allowed = huge_biases_and_a_mask(device, temperature)
    drawn = draw(path, case)
    assert (drawn.token_ids == allowed).all()
    assert drawn.logprobs is None or (drawn.logprobs == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@on_every_path
def test_the_larger_of_two_biases_wins_however_large_both_are(device, path, temperature):
    case, larger = two_huge_biases(device, temperature)
    assert (draw(path, case).token_ids == larger).all()


@pytest.mark.parametrize("cap", numbers(*CAPS))
@on_every_path
def test_soft_capped_logits_are_those_of_tanh_and_in_its_order(device, path, cap):
    case = near_pairs(cap, device)
    assert_soft_capped(case, draw(path, case))


@pytest.mark.parametrize("temperature", numbers(3e38, float("inf"), float("nan"), 1e-30))
@on_every_path
def test_a_temperature_out_of_range_is_that_of_its_nearest_end_and_touches_no_neighbour(device, path, temperature):
    """NaN is the largest. Masked ids are never drawn, and limits hold."""
    end = 1e-6 if temperature < 1e-6 else 1e30
    kind = "edit" if path == "logits" else "edit+truncate"
    case = make_case(16 if CUDA or kind == "edit" else 6, 400, device, kind, torch.float32, seed=4)
    temperatures = case.params.temperature.clone()
    temperatures[1::2] = temperature
    drawn = draw(path, case.with_params(temperature=temperatures))
    temperatures[1::2] = end
    want = draw(path, case.with_params(temperature=temperatures))
    assert torch.equal(drawn.token_ids, want.token_ids)
    assert drawn.logprobs is None or torch.equal(drawn.logprobs, want.logprobs)
    assert (case.edited.gather(1, drawn.token_ids[:, None]) > float("-inf")).all()


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["fused", "logits", "two ranks"])
def test_logprobs_are_right_and_never_above_0_at_any_temperature(device, path, dtype, limited):
    case = peaked(device, dtype, 24 if limited and not CUDA else 64)
    num_rows = len(case.hidden)
    if path == "two ranks":
        drawn = draw_by_ranks("fused", case, 2)
    else:
        truncation = limits(num_rows, device, 50, 0.9, max_top_k=50) if limited else None
        drawn = draw(path, case.with_params(truncation=truncation))
    logprobs = torch.log_softmax(case.edited / case.params.temperature.double()[:, None], 1)
    want = logprobs.gather(1, drawn.token_ids[:, None])[:, 0]
    assert drawn.logprobs.max() <= 0
    assert ((drawn.logprobs.double() - want).abs() <= 2e-6 + 4e-7 * want.abs()).all()
    log_mass = torch.logsumexp(case.edited / case.params.temperature.double()[:, None], 1)
    # The reciprocal of the temperature is rounded; interpreted, a multiply-add is, too.
    assert ((drawn.log_mass.double().sum(-1) - log_mass).abs() <= 2e-6 + 2.0**-23 * log_mass.abs()).all()


@on_every_path
def test_at_the_largest_temperature_all_ids_but_forbidden_ones_are_drawn(device, path):
    case = spelled_out([float(i % 5) for i in range(64)], 256, device, temperature=1e30)
    forbidden = torch.zeros(256, 64, dtype=torch.bool, device=device)
    forbidden[:, ::2] = True
    drawn = draw(path, case.with_params(edits=LogitEdits(mask=forbidden)), logprobs=False).token_ids
    assert (drawn % 2 == 1).all() and len(drawn.unique()) > 24


@pytest.mark.parametrize("weights, hidden", [(0, 0), (106, -84), (110, -84), (120, -84)])
def test_the_screen_rules_nothing_out_by_a_product_that_overflows(device, weights, hidden):
    """Powers of two of the weights and of the hidden states, whose logits are all finite and negative."""
    g = torch.Generator().manual_seed(0)
    scale = (
        -(0.5 + torch.rand(64, 64, generator=g)) * 2.0**weights,
        (0.5 + torch.rand(2, 64, generator=g)) * 2.0**hidden,
    )
    weight, states = (tensor.to(device, torch.bfloat16) for tensor in scale)
    row = torch.arange(2, device=device)
    case = Case(states, LMHead(weight), BatchParams(torch.zeros(2, device=device), row, row))
    assert torch.equal(draw("screened", case).token_ids, draw("fused", case).token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, value",
    [*(("plain", value) for value in (float("inf"), float("-inf"), 1e38, -3e38)), ("edit+truncate", float("inf"))],
)
def test_the_screen_of_huge_hidden_states_and_weights_gives_the_token_of_the_fused_pass(device, kind, value):
    case = make_case(8, 600, device, kind, torch.float32, seed=2)
    hidden, weight = case.hidden.clone(), case.head.weight.clone()
    hidden[1], hidden[2, 0] = value, value
    weight[50], weight[377, 3] = value, value
    broken = Case(hidden, LMHead(weight), case.params)
    assert torch.equal(draw("screened", broken).token_ids, draw("fused", broken).token_ids)


@plain_and_all
@on_every_path
def test_a_row_whose_tokens_are_all_forbidden_gives_the_first_id(device, path, kind):
    case = make_case(7, 500, device, kind)
    allowed = torch.ones(7, 500, dtype=torch.bool, device=device)
    allowed[1], allowed[3, :] = False, False
    allowed[3, 499] = True
    masked = case.with_params(edits=LogitEdits(mask=pack_bits(allowed)))
    drawn = draw(path, masked)
    assert drawn.token_ids[[1, 3]].tolist() == [0, 499]
    assert_equal_to_reference(masked, drawn, 0.3)


# --- edits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bool_mask", [False, True], ids=["words", "bools"])
@pytest.mark.parametrize("per_row", [False, True], ids=["all rows", "flags"])
@on_every_path
def test_each_row_has_its_own_combination_of_edits(device, path, per_row, bool_mask):
    """All sixteen combinations of edits, the empty one included, with a mask in words or in bools."""
    case = make_case(33 if per_row else 17, 700, device, seed=8)
    edits = mixed_edits(len(case.hidden), 700, device, bool_mask=bool_mask)
    if not per_row:
        edits = dataclasses.replace(edits, rows=None)
    edited = case.with_params(edits=edits)
    assert_equal_to_reference(edited, draw(path, edited))


@pytest.mark.parametrize(
    "given", [("additive",), ("scaling",), ("mask",), ("bias",), ("scaling", "bias"), ("additive", "mask"), ()], ids=str
)
@on_every_path
def test_only_what_is_given_is_applied_whatever_the_flags_say(device, path, given):
    case = make_case(17, 300, device, seed=9)
    edits = mixed_edits(17, 300, device)
    edits = LogitEdits(**{name: getattr(edits, name) for name in given}, rows=torch.full_like(edits.rows, 15))
    edited = case.with_params(edits=edits)
    assert_equal_to_reference(edited, draw(path, edited))


@pytest.mark.parametrize("bool_mask", [False, True], ids=["words", "bools"])
@on_every_path
def test_a_row_without_a_flag_reads_nothing_of_its_edits(device, path, bool_mask):
    case = make_case(17, 300, device, dtype=torch.bfloat16)
    garbage = torch.full((17, 300), float("nan"), device=device)
    mask = torch.ones_like(garbage, dtype=torch.bool) if bool_mask else pack_bits(torch.zeros_like(garbage).bool())
    edited = torch.arange(17, device=device) == 4
    drawn = draw(
        path, case.with_params(edits=LogitEdits(garbage, garbage, mask, garbage, torch.where(edited, 15, 0).int()))
    )
    assert torch.equal(drawn.token_ids[~edited], draw(path, case).token_ids[~edited])
    assert drawn.token_ids[4].item() == 0, "a row without an allowed token gets the first id"


@pytest.mark.parametrize("kind, repeats", [("plain", 3), ("truncate", 8)])
@on_every_path
def test_rows_that_share_a_row_of_edits_draw_as_if_each_had_its_own(device, path, kind, repeats):
    """Masks and flags are each row's own. Parts of the batch too, wherever it is cut."""
    case = make_case(24, 700, device, kind, seed=8)
    if kind == "truncate" and not CUDA:  # some of each eight
        case.params.temperature[torch.arange(24) % 3 > 0] = 0.0
    shared, per_row = mixed_edits(24 // repeats, 700, device), mixed_edits(24, 700, device)
    spelled = {name: getattr(shared, name).repeat_interleave(repeats, 0) for name in ("additive", "scaling", "bias")}
    edits = dataclasses.replace(per_row, **{name: getattr(shared, name) for name in spelled}, repeats=repeats)
    apart = case.with_params(edits=dataclasses.replace(per_row, **spelled))
    together = draw(path, case.with_params(edits=edits), logprobs=kind == "plain")
    assert_same(draw(path, apart, logprobs=kind == "plain"), together)
    for start, stop in ((0, repeats), (repeats - 1, 2 * repeats + 1), (23, 24)):
        cut, whole = edits.part(start, stop), apart.params.edits
        assert cut.repeats == 1
        for name in ("additive", "scaling", "mask", "bias", "rows"):
            assert torch.equal(getattr(cut, name), getattr(whole, name)[start:stop]), name


@pytest.mark.parametrize("names", [("additive", "scaling", "mask", "bias"), ("mask",)], ids=["all", "mask"])
@on_every_path
def test_edits_are_read_at_the_places_that_a_kernel_finds_when_it_runs(device, path, names):
    """The given tensors say only how far rows are apart. Rows behind those of the edits have no flag. A part of the
    batch draws the same."""
    case = make_case(17, 300, device)
    edits = mixed_edits(17, 300, device)
    edits.rows[15:] = 0
    tensors = {name: getattr(edits, name)[:15] for name in names}
    edits = LogitEdits(rows=edits.rows, **{name: getattr(edits, name) for name in names})
    given = {name: torch.zeros_like(tensor[:1]) for name, tensor in tensors.items()}
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in edits.tensors]
    placed = LogitEdits(rows=edits.rows, places=torch.tensor(addresses, device=device), **given)
    whole = draw(path, case.with_params(edits=edits))
    assert_same(draw(path, case.with_params(edits=placed)), whole)
    part = dataclasses.replace(case, hidden=case.hidden[4:], params=case.with_params(edits=placed).params.rows(4, 17))
    assert torch.equal(draw(path, part).token_ids, whole.token_ids[4:])


@pytest.mark.parametrize("kind", ["plain", "truncate"])
@on_every_path
def test_a_mask_alone_draws_as_beside_edits_that_change_nothing(device, path, kind):
    """It has kernels of its own, and leaves the logits of truncated rows in their own dtype."""
    case = make_case(5, 300, device, kind, dtype=torch.bfloat16)
    mask, zeros = mixed_edits(5, 300, device).mask, torch.zeros(5, 300, device=device)
    alone, beside = LogitEdits(mask=mask), LogitEdits(zeros, zeros + 1, mask, zeros)
    drawn, same = (draw(path, case.with_params(edits=edits)) for edits in (alone, beside))
    assert torch.equal(drawn.token_ids, same.token_ids)
    ids = drawn.token_ids[:, None]
    assert ((mask.gather(1, ids // 32) >> (ids % 32)) & 1 != 0).all()
    if kind == "truncate":
        buffers = drawn.workspace.last_buffer, same.workspace.last_buffer
        assert [buffer.logits.dtype for buffer in buffers] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("words", [0, 1, 3, 9, 12])
@on_every_path
def test_ids_beyond_a_short_mask_of_words_are_allowed(device, path, words):
    case = make_case(17, 300, device)
    mask = pack_bits(torch.rand(17, 12 * 32, generator=torch.Generator().manual_seed(1)) < 0.3).to(device)[:, :words]
    masked = case.with_params(edits=LogitEdits(mask=mask.contiguous()))
    assert_equal_to_reference(masked, draw(path, masked))


@on_every_path
def test_edits_may_be_views_of_wider_tensors_and_one_row_may_serve_all(device, path):
    case = make_case(17, 300, device)
    edits = mixed_edits(17, 300, device)

    def view(tensor: torch.Tensor, garbage) -> torch.Tensor:
        buffer = torch.full((17, tensor.shape[1] + 45), garbage, dtype=tensor.dtype, device=device)
        buffer[:, 2 : 2 + tensor.shape[1]] = tensor
        return buffer[:, 2 : 2 + tensor.shape[1]]

    views = LogitEdits(
        view(edits.additive, 9.0), view(edits.scaling, 0.1), view(edits.mask, 0), view(edits.bias, 9.0), edits.rows
    )
    assert_same(draw(path, case.with_params(edits=edits)), draw(path, case.with_params(edits=views)))
    shared = case.with_params(edits=LogitEdits(bias=edits.bias[:1].expand(17, 300)))
    assert_equal_to_reference(shared, draw(path, shared))


@on_every_path
def test_a_mask_wins_over_a_bias_and_an_infinite_one_over_all_but_a_mask(device, path):
    """A penalty of -inf (min_new_tokens) and a NaN forbid their tokens, too."""
    hidden, weight = torch.ones(8, 16, device=device), torch.zeros(100, 16, device=device)
    weight[7] = 5 / 16
    case = Case(hidden, LMHead(weight), make_params(8, LogitsSpec(100), device))
    forty = torch.zeros(8, 100, device=device)
    forty[:, 40] = 1e30
    allowed = torch.ones(8, 100, dtype=torch.bool, device=device)
    allowed[:, 40] = False
    lowest = torch.zeros(8, 100, device=device)
    lowest[:, 7] = float("-inf")
    nan = torch.full((8, 100), float("nan"), device=device)
    nan[:, 20] = 1.0

    def tokens(**edits) -> set[int]:
        return set(draw(path, case.with_params(edits=LogitEdits(**edits))).token_ids.tolist())

    assert tokens(bias=forty) == {40}
    assert 40 not in tokens(bias=forty, mask=pack_bits(allowed))
    assert 40 not in tokens(bias=forty, mask=~allowed)
    assert tokens(bias=torch.where(forty > 0, float("inf"), 0.0)) == {40}
    assert 40 not in tokens(bias=torch.where(forty > 0, float("inf"), 0.0), mask=~allowed)
    assert 7 not in tokens(additive=lowest)
    for name in ("additive", "scaling", "bias"):
        assert tokens(**{name: nan}) == {20}


# --- truncation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_every_path
def test_a_truncation_changes_a_token_only_where_it_forbids_it(device, path):
    case = make_case(40 if CUDA else 17, 700, device, "truncate", torch.float32, seed=8)
    plain, drawn = draw(path, case.with_params(truncation=None)), draw(path, case)
    truncation = case.params.truncation
    temperature = torch.where(case.limited, case.params.temperature, 1.0)
    allowed = allowed_ref(case.edited, temperature, truncation.top_k, truncation.top_p, truncation.min_p)
    stays = allowed.gather(1, plain.token_ids[:, None])[:, 0] | ~case.limited
    assert 4 <= stays.sum() < len(stays) - 2
    assert torch.equal(drawn.token_ids[stays], plain.token_ids[stays])
    assert (drawn.token_ids != plain.token_ids)[~stays].all()


@on_every_path
def test_limits_that_are_off_change_nothing_at_all(device, path):
    case = make_case(9, 300, device)
    spellings = [{"top_k": top_k} for top_k in (0, -3, 300, 301, 2**30)] * 2
    off = draw(path, case.with_params(truncation=limits_by_row(spellings[:9], device)))
    assert off.status.tolist() == [0] * 9
    assert_same(off, draw(path, case))


@on_every_path
def test_the_tightest_limits_leave_the_largest_logit_and_greedy_rows_ignore_them(device, path):
    tightest = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.5}]
    case = make_case(7, 300, device, dtype=torch.float32, seed=3)  # the fifth is greedy
    drawn = draw(path, case.with_params(truncation=limits_by_row([*tightest, {"top_k": 1, "min_p": 0.5}], device)))
    assert torch.equal(drawn.token_ids, case.edited.argmax(-1))
    assert torch.equal(drawn.status > 0, case.params.temperature > 0)


# --- outputs, scratch and graphs ------------------------------------------------------------------------------------


@of_every_kind
@on_every_path
def test_outputs_have_the_promised_shapes_and_dtypes_and_no_rows_give_no_tokens(device, path, kind):
    for num_rows in (3, 0):
        drawn = draw(path, make_case(num_rows, 100, device, kind))
        assert drawn.token_ids.shape == drawn.scores.shape == (num_rows,)
        assert drawn.token_ids.dtype is torch.int64 and drawn.scores.dtype is torch.float32
        if path == "screened":
            assert drawn.logprobs is drawn.log_mass is None
        else:
            assert drawn.logprobs.shape == (num_rows,) and drawn.log_mass.shape == (num_rows, 2)
            assert drawn.logprobs.dtype is drawn.log_mass.dtype is torch.float32


@pytest.mark.parametrize("kind", kinds("plain", "edit", "truncate"))
@pytest.mark.parametrize("path", ["fused", "logits"])
def test_a_call_without_logprobs_draws_the_same_tokens(device, path, kind):
    case = make_case(9, 300, device, kind)
    drawn = draw(path, case, logprobs=False)
    assert drawn.logprobs is drawn.log_mass is None
    assert_same(drawn, draw(path, case))


@pytest.mark.parametrize("kind", kinds("plain", "truncate"))
@on_every_path
def test_a_workspace_serves_batches_of_every_size_one_after_the_other_and_is_left_as_it_was(device, path, kind):
    """Each batch reads the workspace that the previous one wrote. After each, every counter that kernels share is zero.

    The screened path lists single ids only of a vocabulary that is large beside a small top-k: two batches have one."""
    sizes = (5, 40, 1, 17) if kind == "plain" or CUDA else (3, 7, 1, 6)
    lists_ids = path == "screened" and kind == "truncate"
    vocab = 4000 if lists_ids else 1000
    whole = make_case(max(sizes), vocab, device, kind, seed=4)
    copy = Int8Head(whole.head)
    screen = ScreenWorkspace(copy.num_groups, copy.weight.shape[1], max(sizes), device)
    screen.operands.ids.fill_(-1)
    workspace = Workspace(max(workspace_slots(whole.head, 40, TILE), read_slots(vocab, 40, READ, device)), device)
    other = LISTED
    if path != "screened":
        usual = config_of(path, vocab)
        other = dataclasses.replace(usual, one_launch=True, reduce_rows=min(16, usual.block_b))
    for num_rows, config in zip(sizes, (None, other, None, other), strict=True):
        case = whole.rows(torch.arange(num_rows, device=device))
        if lists_ids and config is None:
            case = case.with_params(truncation=limits(num_rows, device, top_k=20))
        drawn = draw(path, case, config, workspace=workspace, int8_head=copy, screen=screen)
        assert_equal_to_reference(case, drawn, 0.4)
        assert not workspace.splits.arrived.any()
        if workspace.last_buffer is not None:
            assert not workspace.last_buffer.operands.arrived.any()
        for name in ("arrived", "num_flagged", "num_ids", "ids_arrived"):
            assert not getattr(screen.operands, name).any(), name
    assert (screen.operands.ids >= 0).any() == lists_ids, "whether num_ids was ever above zero"


@pytest.mark.gpu
@of_every_kind
@on_every_path
def test_a_captured_graph_replays_the_same_tokens_and_follows_its_inputs(device, path, kind):
    case = make_case(17, 151_936, device, kind, torch.bfloat16, hidden=256)
    copy = Int8Head(case.head)
    screen = ScreenWorkspace(copy.num_groups, copy.weight.shape[1], 17, device)
    workspace = Workspace(max(workspace_slots(case.head, 17, TILE), read_slots(151_936, 17, READ, device)), device)
    held = {"int8_head": copy, "screen": screen, "workspace": workspace}
    _ = case.raw
    eager = draw(path, case, **held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(path, case, **held)
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured.token_ids, eager.token_ids)
    case.params.position.add_(1)
    graph.replay()
    assert torch.equal(captured.token_ids, draw(path, case, **held).token_ids)
    assert kind == "greedy" or not torch.equal(captured.token_ids, eager.token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("rescore", [(64, 256, 4), (64, 64, 8), (32, 256, 4), (16, 256, 4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_thousand_screened_steps_equal_the_fused_pass(device, temperature, rescore):
    """16 rows x 64 positions at a real shape. A program that reads fewer groups at a time has more threads per group,
    and loads the threshold that other programs raise more often."""
    case = rounding_case(16, 151_936, device, torch.bfloat16, hidden=4096)
    case = case.with_params(temperature=torch.full((16,), temperature, device=device))
    copy = Int8Head(case.head)
    names = ("rescore_v", "rescore_d", "rescore_warps")
    config = dataclasses.replace(SCREEN, **dict(zip(names, rescore, strict=True)))
    for _ in range(64):
        case.params.position.add_(1)
        fused = draw("fused", case, logprobs=False)
        assert torch.equal(draw("screened", case, config, int8_head=copy).token_ids, fused.token_ids)


def fastest_replay(call, device: torch.device) -> float:
    """Milliseconds of ``call`` in a CUDA graph, with nothing of its operands in L2."""
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    others, times = torch.empty(2**28, dtype=torch.int8, device=device), []
    for _ in range(10):
        others.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


@pytest.mark.gpu
@pytest.mark.parametrize("block_b, warps", [(64, 4), (128, 8)])
def test_one_row_more_than_a_block_takes_no_longer_than_two_blocks(device, block_b, warps):
    """Programs of one tile of the head share it in L2 for as long as none of them runs ahead."""
    case = rounding_case(2 * block_b, 151_936, device, torch.bfloat16, hidden=2048)
    tma = torch.cuda.get_device_capability(device) >= (9, 0)
    tile = TileConfig(block_b, 128, 64, warps, 4, tma=tma, hidden_tma=tma, rows_first=True)
    one_more, both = case.rows(torch.arange(block_b + 1, device=device)), case
    took = [fastest_replay(lambda c=c: draw("fused", c, tile, logprobs=False), device) for c in (one_more, both)]
    assert took[0] < 1.1 * took[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, kind", [("bf16", "edit+truncate"), ("fp32", "edit+truncate"), *((dtype, "plain") for dtype in DTYPES)]
)
def test_every_built_in_choice_equals_the_reference_at_a_real_shape(device, dtype, kind):
    case = make_case(24, 151_937, device, kind, DTYPES[dtype], hidden=256)
    for config in all_configs(family_of_device(device), case.head.weight.element_size()):
        if kind == "plain" or config.block_b <= MAX_TRUNCATED_ROWS_PER_TILE:
            assert_equal_to_reference(case, draw(path_of(config).value, case, config), 0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("vocab", [127, 50_257, 151_936, 151_937])
def test_a_hundred_thousand_rows_equal_the_reference(device, vocab, dtype):
    """16,384 rows per case, 8 cases: 131,072 rows."""
    case = rounding_case(512, vocab, device, DTYPES[dtype], hidden=256)
    tile = TileConfig(64, 128, 64, 4, 3)
    for start in range(32):
        params = make_params(512, case.head.spec, device, seed=start)
        drawn = draw("fused", dataclasses.replace(case, params=params), tile)
        want = lm_head_sample_ref(case.hidden, case.head.weight, params.temperature, params.seed, params.position)
        assert torch.equal(drawn.token_ids[~want.near_tie], want.token[~want.near_tie])
        assert want.near_tie.double().mean() < 0.08


# --- bad arguments --------------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ("hidden", torch.zeros(2, 8), r"hidden is \(2, 8\).*expected \[B, 16\]"),
    ("hidden", torch.zeros(2, 16, dtype=torch.float16), r"hidden is .*float16.*expected .*float32"),
    ("hidden", torch.zeros(32)[::2], r"hidden is \(16,\)"),
    ("hidden", torch.zeros(16, 2).T, r"hidden is .*strides \(1, 2\); expected contiguous rows"),
    ("logits", torch.zeros(2, 399), r"logits is \(2, 399\).*expected \[B, 400 or more\]"),
    ("logits", torch.zeros(2, 400, dtype=torch.float64), r"logits is .*float64.*bfloat16, float16 or float32"),
    ("logits", torch.zeros(800), r"logits is \(800,\)"),
    ("logits", torch.zeros(400, 2).T, r"logits has strides \(1, 2\); expected rows that are contiguous"),
    ("temperature", torch.zeros(3), r"temperature is \(3,\).*expected contiguous \(2,\) torch.float32"),
    ("temperature", torch.zeros(4)[::2], r"temperature is \(2,\).*strides \(2,\); expected contiguous"),
    ("seed", torch.zeros(2, dtype=torch.int32), r"seed is .*int32.*expected .*int64"),
    ("position", torch.zeros(2, 1, dtype=torch.int64), r"position is \(2, 1\).*expected contiguous \(2,\)"),
    ("top_k", torch.zeros(2, dtype=torch.int64), r"top_k is \(2,\) torch.int64.*expected contiguous \(2,\).*int32"),
    ("top_k", torch.zeros(3, dtype=torch.int32), r"top_k is \(3,\).*expected contiguous \(2,\)"),
    ("top_p", torch.ones(2, dtype=torch.float64), r"top_p is .*float64.*expected .*float32"),
    ("min_p", torch.zeros(4)[::2], r"min_p is \(2,\) .*strides \(2,\); expected contiguous"),
    ("additive", torch.zeros(2, 399), r"additive is \(2, 399\) .*expected contiguous \(2, 400\) torch.float32"),
    ("scaling", torch.zeros(3, 400), r"scaling is \(3, 400\) .*expected contiguous \(2, 400\)"),
    ("bias", torch.zeros(2, 400, dtype=torch.float16), r"bias is \(2, 400\) torch.float16.*expected .*float32"),
    ("bias", torch.zeros(400, 2).T, r"bias is .*strides \(1, 2\); expected contiguous"),
    ("mask", torch.zeros(2, 399, dtype=torch.bool), r"mask is \(2, 399\) torch.bool.*expected .*\(2, 400\)"),
    ("mask", torch.zeros(2, 13, dtype=torch.int64), r"mask is \(2, 13\) torch.int64.*expected .*int32"),
    ("mask", torch.zeros(1, 13, dtype=torch.int32), r"mask is \(1, 13\) .*expected contiguous \(2, 13\)"),
    ("rows", torch.zeros(2, dtype=torch.int64), r"rows is \(2,\) torch.int64.*expected contiguous \(2,\).*int32"),
    ("shards", 2, "shards is 2; expected 1, the whole vocabulary, with a truncation"),
    ("workspace", 1, "workspace (has 1 slots|is for 1 rows).*expected at least"),
    ("int8_head", torch.zeros(300, 16), r"int8_head is \(300, 16\) on .*; expected \(400, 16\)"),
    ("logit_scale", -1.0, "logit_scale is -1.0; expected a positive number"),
]
ONLY_ON = {
    "hidden": ["fused", "screened"],
    "logits": ["logits"],
    "int8_head": ["screened"],
    "logit_scale": ["screened"],
}


@pytest.mark.parametrize(
    "path, name, value, message",
    [
        pytest.param(path, name, value, message, id=f"{path}-{name}-{place}")
        for place, (name, value, message) in enumerate(BAD_ARGUMENTS)
        for path in ONLY_ON.get(name, PATHS)
    ],
)
def test_a_bad_argument_raises_a_value_error_that_names_it_and_what_was_expected(device, path, name, value, message):
    if isinstance(value, torch.Tensor):  # on the device, with the same strides
        value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).zero_()
    given = {name: value}
    head = LMHead(
        torch.zeros(400, 16, device=device),
        shards=given.get("shards", 1),
        logit_scale=given.get("logit_scale"),
    )
    params = make_params(2, LogitsSpec(400), device)
    if name in ("temperature", "seed", "position"):
        params = dataclasses.replace(params, **given)
    if name in ("top_k", "top_p", "min_p", "shards"):
        truncation = limits(2, device, 5)
        params = dataclasses.replace(
            params, truncation=truncation if name == "shards" else dataclasses.replace(truncation, **given)
        )
    if name in ("additive", "scaling", "bias", "mask", "rows"):
        params = dataclasses.replace(params, edits=LogitEdits(**given))
    hidden = given.get("hidden", torch.zeros(2, 16, device=device))
    with pytest.raises(ValueError, match=message):
        if path == "screened":
            copy = Int8Head(LMHead(given.get("int8_head", head.weight)))
            screen = ScreenWorkspace(copy.num_groups, copy.weight.shape[1], given.get("workspace", 2), device)
            screened_sample(hidden, head, copy, params, SCREEN, workspace=screen)
        elif path == "logits":
            workspace = Workspace(given["workspace"], device) if "workspace" in given else None
            logits = given.get("logits", torch.zeros(2, 400, device=device))
            sample_logits(logits, head.spec, params, READ, workspace=workspace)
        else:
            workspace = Workspace(given["workspace"], device) if "workspace" in given else None
            lm_head_sample(hidden, head, params, TILE, workspace=workspace)


@on_every_path
def test_more_edited_or_truncated_logits_than_an_int32_counts_are_refused(device, path):
    head = LMHead(torch.zeros(2**16, 16, device=device))
    params = dataclasses.replace(make_params(2**15, head.spec, device), truncation=limits(2**15, device))
    hidden = torch.zeros(1, 16, device=device).expand(2**15, 16)
    with pytest.raises(ValueError, match="has 32768 rows; expected fewer than 2\\*\\*31 logits"):
        if path == "screened":
            screened_sample(hidden, head, Int8Head(head), params, SCREEN)
        elif path == "logits":
            sample_logits(torch.zeros(1, 2**16, device=device).expand(2**15, -1), head.spec, params, READ)
        else:
            lm_head_sample(hidden, head, params, TILE)


@pytest.mark.parametrize("path", ["fused", "logits"])
def test_a_tile_of_more_rows_than_have_flags_is_refused_with_a_truncation(device, path):
    case = make_case(3, 100, device, "truncate")
    with pytest.raises(ValueError, match="block_b is 256; expected 128 or fewer with a truncation"):
        draw(path, case, dataclasses.replace(config_of(path, 100), block_b=256))
