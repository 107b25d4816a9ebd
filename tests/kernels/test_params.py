"""Parameters of launchers: errors name the bad value and the expected one; derived properties are right."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig, TruncationConfig
from sgl_flashsample.kernels.lm_head_sample import num_splits, workspace_slots
from sgl_flashsample.kernels.params import (
    BatchParams,
    Edit,
    EditOperands,
    LMHead,
    LogitEdits,
    LogitsSpec,
    MaskOperands,
    supports_tma,
)
from sgl_flashsample.kernels.sample_logits import num_read_splits, read_slots
from sgl_flashsample.kernels.workspace import Workspace, num_group_blocks

TILE = TileConfig(16, 64, 32, 4, 2)
READ = ReadConfig(16, 64, 4)
SCREEN = ScreenConfig(16, 64, 32, 4, 2)
CPU = torch.device("cpu")


def without_memory() -> torch.Tensor:
    """A weight whose memory was given back, as FSDP does between two passes."""
    weight = torch.zeros(10, 16)
    weight.untyped_storage().resize_(0)
    return weight


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 11}, "vocab_size is 11; expected 1 to the head's 10 rows"),
        ({"vocab_size": -1}, "vocab_size is -1; expected an integer, 1 or more"),
        ({"vocab_start": 8, "shards": 2}, "vocab_start is 8; expected a multiple of 16"),
        ({"vocab_start": 2**31, "shards": 2}, "ids reach 2147483658; expected them below 2\\*\\*31"),
        ({"vocab_start": 16}, "vocab_start is 16 and shards is 1; expected 0 in a whole vocabulary"),
        ({"shards": 0}, "shards is 0; expected 1 or more"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a finite number above 0, or None"),
        ({"softcap": float("nan")}, "softcap is nan; expected a finite number above 0"),
        ({"vocab_size": True}, "vocab_size is True; expected an integer, 1 or more"),
        ({"vocab_size": "3"}, "vocab_size is '3'; expected an integer, 1 or more"),
        ({"logits_dtype": torch.int8}, "logits_dtype is torch.int8; expected bfloat16, float16 or float32"),
        ({"spec": 10}, "spec is a int; expected a LogitsSpec or None"),
        ({"weight": torch.zeros(10, 4, 2)}, r"weight is \(10, 4, 2\) .*; expected \[V, D\]"),
        ({"weight": torch.zeros(16, 10).T}, "weight has strides .*; expected rows that are contiguous"),
        ({"weight": without_memory()}, "weight has no memory; expected a plain tensor, neither sharded"),
        (
            {"weight": torch.zeros(10, 4, dtype=torch.int8)},
            "weight is .*int8; expected .* bfloat16, float16 or float32",
        ),
    ],
)
def test_a_bad_head_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LMHead(**({"weight": torch.zeros(10, 4)} | options))


@pytest.mark.parametrize("shape, strides", [((1, 16), (1, 1)), ((16, 1), (1, 16))])
def test_the_stride_of_a_dimension_of_length_one_does_not_matter(shape, strides):
    assert LMHead(torch.zeros(16).as_strided(shape, strides)).vocab_size == shape[0]


E4M3 = torch.zeros(10, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scale": None}, r"scale is None; expected contiguous \[10\] float32, one number per row"),
        ({"scale": 0.5}, r"scale is a float; expected contiguous \[10\] float32"),
        ({"scale": torch.ones(10, 1)}, r"scale is \(10, 1\) torch.float32 .*; expected contiguous \[10\] float32"),
        ({"scale": torch.ones(2, 2)}, r"scale is \(2, 2\) .*; expected contiguous \[10\] float32"),
        ({"scale": torch.ones(9)}, r"scale is \(9,\) .*; expected contiguous \[10\] float32"),
        ({"scale": torch.ones(20)[::2]}, r"scale is \(10,\) .* strides \(2,\); expected contiguous"),
        ({"scale": torch.ones(10).bfloat16()}, r"scale is \(10,\) torch.bfloat16 .*; expected .* float32"),
        ({"scale": torch.ones(10, device="meta")}, "scale is on meta; expected it on the weight's cpu"),
        ({"weight": E4M3.to(torch.float8_e5m2)}, r"weight is \(10, 4\) torch.float8_e5m2; expected .*float8_e4m3fn"),
        ({"weight": E4M3.view(torch.int8)}, r"weight is \(10, 4\) torch.int8; expected .*float8_e4m3fn with a scale"),
        ({"weight": E4M3.float()}, "scale is given with a torch.float32 weight; expected None, or float8_e4m3fn"),
        (
            {"weight": torch.zeros(4, 10).to(torch.float8_e4m3fn).T},
            "weight has strides .*; expected rows that are cont",
        ),
        ({"hidden_dtype": torch.float32}, "hidden_dtype is torch.float32; expected bfloat16 or float16"),
        ({"module": torch.nn.Linear(4, 10)}, "module is a Linear; expected None with a scale"),
    ],
)
def test_a_bad_quantised_head_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LMHead(**({"weight": E4M3, "scale": torch.ones(10)} | options))


def test_another_dtype_of_hidden_states_than_the_weights_is_refused():
    with pytest.raises(ValueError, match=r"hidden_dtype is torch.float16; expected None or the weight's torch.float32"):
        LMHead(torch.zeros(10, 4), hidden_dtype=torch.float16)


@pytest.mark.parametrize("one", [torch.tensor(0.5), torch.tensor([0.5])])
def test_one_number_is_the_scale_of_all_rows(one):
    head = LMHead(E4M3, scale=one)
    assert torch.equal(head.scale, torch.full((10,), 0.5))
    assert head.hidden_dtype is head.rounding is torch.bfloat16


def test_a_quantised_head_keeps_its_scale_in_every_head_that_is_made_of_it():
    scale = torch.arange(1.0, 11.0)
    head = LMHead(E4M3.clone(), scale=scale, hidden_dtype=torch.float16)
    assert head.current is head and head.scale is scale and head.rounding is torch.float16
    head.check(torch.zeros(1, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"hidden is .*bfloat16; expected \[B, 4\] torch.float16"):
        head.check(torch.zeros(1, 4, dtype=torch.bfloat16))
    head.weight.data = head.weight.data.clone()
    for other in (
        head.current,
        dataclasses.replace(head, softcap=3.0),
        LMHead.of_rank(head.weight, 0, 1, 9, scale=scale),
    ):
        assert other is not head and other.scale is scale
    assert head.current.hidden_dtype is torch.float16
    assert torch.equal(head.first(3).scale, scale[:3]) and head.first(3).hidden_dtype is torch.float16
    scale.data = scale.data.clone()
    assert head.current._place[-1] == scale.data_ptr(), "a scale in another place"


@pytest.mark.parametrize(
    "width, num_ranks, vocab, sizes",
    [
        (75968, 2, 151936, [75968, 75968]),
        (32, 3, 70, [32, 32, 6]),
        (16, 8, 33, [16, 16, 1, 0, 0, 0, 0, 0]),
        (7, 1, 5, [5]),
    ],
)
def test_the_parts_of_ranks_are_the_vocabulary_in_order_and_a_rank_of_padding_has_no_head(
    width, num_ranks, vocab, sizes
):
    weight = torch.empty(width, 4, device="meta")
    heads = [LMHead.of_rank(weight, rank, num_ranks, vocab, softcap=3.0) for rank in range(num_ranks)]
    assert [0 if head is None else head.vocab_size for head in heads] == sizes
    for rank, head in enumerate(filter(None, heads)):
        assert (head.vocab_start, head.shards, head.softcap) == (rank * width, num_ranks, 3.0)
        assert head.spec.shards == num_ranks


@pytest.mark.parametrize(
    "width, rank, num_ranks, vocab, message",
    [
        (16, 2, 2, 32, "rank is 2; expected 0 to 1"),
        (16, -1, 2, 32, "rank is -1; expected 0 to 1"),
        (24, 0, 2, 32, "a rank's weight has 24 rows; expected a multiple of 16"),
        (16, 0, 2, 33, "vocab_size is 33; expected 1 to 32"),
        (16, 0, 2, 0, "vocab_size is 0; expected 1 to 32"),
        (2**24, 0, 2, 2**24 + 1, "vocab_size is 16777217; expected 1 to 16777216"),
    ],
)
def test_a_part_that_no_rank_can_have_is_refused_by_name(width, rank, num_ranks, vocab, message):
    with pytest.raises(ValueError, match=message):
        LMHead.of_rank(torch.empty(width, 4, device="meta"), rank, num_ranks, vocab)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 0}, "vocab_size is 0; expected an integer, 1 or more"),
        ({"vocab_size": 10.0}, "vocab_size is 10.0; expected an integer, 1 or more"),
        ({"vocab_start": 8, "shards": 2}, "vocab_start is 8; expected a multiple of 16, 0 or more"),
        ({"vocab_start": -16, "shards": 2}, "vocab_start is -16; expected a multiple of 16, 0 or more"),
        ({"vocab_size": 2**31}, "ids reach 2147483648; expected them below 2\\*\\*31"),
        *(({"softcap": value}, "softcap is .*; expected a finite number above 0") for value in (-1.0, math.inf, "30")),
        *(
            ({"logit_scale": value}, "logit_scale is .*; expected a finite number")
            for value in (math.inf, math.nan, "2")
        ),
        ({"logits_dtype": torch.int8}, "logits_dtype is torch.int8; expected bfloat16, float16 or float32"),
    ],
)
def test_bad_logits_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LogitsSpec(**({"vocab_size": 10} | options))


@pytest.mark.parametrize(
    "config, field, value, expectation",
    [
        (TILE, "block_v", 48, "a power of two of at least 32"),
        (TILE, "block_b", 8, "a power of two of at least 16"),
        (TILE, "stages", 0, "an integer of at least 1"),
        (TILE, "num_warps", 3, "a power of two of at least 1"),
        (READ, "block_v", 16, "a power of two of at least 32"),
        (READ, "block_b", 3, "a power of two of at least 1"),
        (READ, "min_splits", 513, "512 or fewer"),
        (READ, "ctas_per_sm", 1.5, "an integer of at least 1"),
        (SCREEN, "block_v", 48, "a power of two of at least 32"),
        (SCREEN, "block_b", 256, "128 or fewer"),
        (SCREEN, "chunk", 8, "16 or more"),
        (SCREEN, "rescore_warps", 16, "8 or fewer"),
        (SCREEN, "rescore_stages", 0, "an integer of at least 1"),
        (SCREEN, "rescore_v", 8, "a power of two of at least 16"),
        (TruncationConfig(), "splits", 32, "16 or fewer"),
        (TruncationConfig(), "search_splits", 3, "a power of two of at least 1"),
        (TruncationConfig(), "block", 8, "a power of two of at least 16"),
        (TruncationConfig(), "candidate_groups", 1024, "512 or fewer"),
        (TruncationConfig(), "window", 2.0, "a power of two of at least 1"),
    ],
)
def test_a_bad_config_names_the_field_and_what_was_expected(config, field, value, expectation):
    with pytest.raises(ValueError, match=f"{type(config).__name__}.{field} is {value}; expected {expectation}"):
        dataclasses.replace(config, **{field: value})


@pytest.mark.parametrize("config", [TILE, READ])
def test_one_launch_reduces_no_more_rows_at_a_time_than_a_tile_has(config):
    with pytest.raises(ValueError, match="reduce_rows is 32; expected at most block_b, 16, with one launch"):
        dataclasses.replace(config, reduce_rows=32, one_launch=True)
    assert dataclasses.replace(config, reduce_rows=32).reduce_rows == 32


def test_configs_that_differ_in_nothing_that_is_compiled_share_a_binary():
    """Configurations that differ in a compiled property do not share one."""
    launch_only = {TileConfig: {"ctas_per_sm": 2, "reduce_rows": 4}}
    launch_only[ReadConfig] = {"ctas_per_sm": 3, "reduce_rows": 4, "min_splits": 9}
    for config in (TILE, READ):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            changed = launch_only[type(config)].get(field.name, not value if isinstance(value, bool) else 2 * value)
            other = dataclasses.replace(config, **{field.name: changed})
            assert (other.compiled == config.compiled) == (field.name in launch_only[type(config)]), field.name
    one = dataclasses.replace(TILE, one_launch=True)
    assert dataclasses.replace(one, reduce_rows=4).compiled != one.compiled, "its own program reduces"


@pytest.mark.parametrize("warps, programs, registers", [(4, 2, None), (4, 3, 168), (8, 2, 128), (16, 9, 32)])
def test_as_many_programs_as_a_tile_asks_for_have_room_for_their_registers(warps, programs, registers):
    """No more than a multiprocessor has at once, which is four of 16 warps."""
    tile = dataclasses.replace(TILE, num_warps=warps, ctas_per_sm=programs)
    assert tile.max_registers == registers
    assert (tile.compiled.ctas_per_sm == 1) == (registers is None), "another binary"


def test_the_edits_that_are_given_are_known():
    tensor, word = torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.int32)
    assert LogitEdits().given == Edit(0)
    assert LogitEdits(additive=tensor, bias=tensor).given == Edit.ADDITIVE | Edit.BIAS
    assert LogitEdits(scaling=tensor, mask=word).given == Edit.SCALING | Edit.MASK
    assert not LogitEdits(mask=word).mask_is_bool and LogitEdits(mask=word.bool()).mask_is_bool
    assert not LogitEdits(scaling=tensor).mask_is_bool

    def makes_logits(edits: LogitEdits | None) -> bool:
        return BatchParams(tensor, tensor, tensor, edits=edits).makes_logits

    assert not makes_logits(None) and not makes_logits(LogitEdits()) and not makes_logits(LogitEdits(mask=word))
    assert makes_logits(LogitEdits(bias=tensor)) and makes_logits(LogitEdits(scaling=tensor, mask=word))


class Far(torch.Tensor):
    """A tensor that says that its rows are far apart."""

    def stride(self, dim=None):
        return (2**30, 1) if dim is None else (2**30, 1)[dim]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"truncation": (5, 1.0, 0.0)}, "truncation is a tuple; expected Truncation or None"),
        ({"edits": {"bias": None}}, "edits is a dict; expected LogitEdits or None"),
        ({"edits": LogitEdits(additive=[[0.0]])}, "additive is a list; expected a tensor"),
        ({"edits": LogitEdits(repeats=2)}, "repeats is 2; expected a divisor of the batch's 3 rows"),
        ({"edits": LogitEdits(repeats=0)}, "repeats is 0; expected a divisor"),
        (
            {"edits": LogitEdits(bias=torch.zeros(3, 16), repeats=3)},
            r"bias is \(3, 16\) .*; expected contiguous \(1, 16\)",
        ),
        ({"edits": LogitEdits(bias=torch.tensor(1.0))}, r"bias is \(\); expected a tensor with a row per row"),
        ({"edits": LogitEdits(mask=torch.zeros(3, dtype=torch.bool))}, r"mask is \(3,\) .*; expected contiguous"),
        (
            {"edits": LogitEdits(bias=torch.zeros(3, 16).as_subclass(Far))},
            r"bias has rows 1073741824 elements apart; expected 3 rows within 2\*\*31 elements",
        ),
    ],
)
def test_bad_parameters_of_rows_are_refused_by_name(changes, message):
    row = torch.zeros(3, dtype=torch.int64)
    params = BatchParams(torch.ones(3), row, row, **changes)
    with pytest.raises(ValueError, match=message):
        params.check("hidden", torch.zeros(3, 16), LogitsSpec(16))


def test_a_workspace_of_another_device_or_type_is_refused():
    with pytest.raises(ValueError, match="workspace is a int; expected a Workspace"):
        Workspace.for_splits(1, 1, CPU, 5)
    with pytest.raises(ValueError, match="workspace is on meta; expected it on cpu"):
        Workspace.for_splits(1, 1, CPU, Workspace(4, torch.device("meta")))


def test_edits_of_a_shard_need_the_columns_of_the_ids_before_it():
    edits = LogitEdits(bias=torch.zeros(2, 400))
    spec = LogitsSpec(400, vocab_start=160, shards=2)
    row = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"bias is \(2, 400\).*expected contiguous \(2, 560\)"):
        BatchParams(torch.ones(2), row, row, edits=edits).check("hidden", torch.zeros(2, 16), spec)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_part_compiles_depends_on_the_ids_of_all_parts(rank):
    """Whichever edits are given: the others are as far apart as SGLang's would be, which have a column for every id."""
    part = LMHead.of_rank(torch.zeros(336, 16), rank, 2, 600)
    filler = torch.zeros(1)
    width, mask, rows = part.spec.edit_width, torch.zeros(1, 19, dtype=torch.int32), torch.zeros(1, 600)
    operands, variant = LogitEdits(scaling=rows).operands(width, filler, filler.int())
    assert (operands.bias_stride, operands.mask_words) == (600, 19)
    for edits in (LogitEdits(bias=rows), LogitEdits(rows, mask=mask)):
        assert variant == edits.operands(width, filler, filler.int())[1]


@pytest.mark.parametrize("words", [True, False], ids=["words", "bools"])
def test_a_mask_alone_has_kernels_of_its_own_unless_one_is_to_serve_all(words):
    filler, row = torch.zeros(1), torch.zeros(1, 600)
    mask = torch.zeros(1, 19, dtype=torch.int32) if words else torch.zeros(1, 600, dtype=torch.bool)
    alone, together = LogitEdits(mask=mask), LogitEdits(row, mask=mask)

    def operands(edits: LogitEdits, **options: bool) -> tuple[object, object]:
        return edits.operands(600, filler, filler.int(), **options)

    assert isinstance(operands(alone)[0], MaskOperands) and isinstance(operands(together)[0], EditOperands)
    assert operands(alone)[0].mask is mask and operands(alone)[1] != operands(together)[1]
    assert operands(alone, one_for_all=True)[1] == operands(together)[1]


def test_a_scale_that_is_an_integer_is_a_float_to_the_kernels():
    """Another type would compile another kernel."""
    row = torch.zeros(1, dtype=torch.int64)
    params, filler = BatchParams(torch.ones(1), row, row), torch.zeros(1)
    features = params.operands(LogitsSpec(16, logit_scale=7, softcap=11), filler, filler.int())
    assert (features.logit_scale, features.softcap) == (7.0, (11.0,))
    assert isinstance(features.logit_scale, float) and isinstance(features.softcap[0], float)


def test_a_head_says_what_its_logits_are_and_what_can_address_it():
    spec = LogitsSpec(37, 32, 0.5, 20.0, torch.float32, 3)
    head = LMHead(torch.zeros(40, 24, dtype=torch.bfloat16), spec)
    assert head.spec == spec and LMHead(head.weight, **dataclasses.asdict(spec)).spec == spec
    assert dataclasses.replace(head, softcap=3.0).spec == dataclasses.replace(spec, softcap=3.0)
    assert (head.spec.num_groups, head.spec.vocab_end) == (3, 69)
    assert head.rounding is torch.float32 and not head.gemm_gives_logits
    assert LMHead(head.weight).rounding is torch.bfloat16 and LMHead(head.weight).gemm_gives_logits
    assert head.supports_tma and supports_tma(torch.zeros(3, 4)) and not supports_tma(torch.zeros(3, 5))
    assert not supports_tma(torch.zeros(3, 8)[:, 1:5]) and not supports_tma(torch.zeros(8).expand(3, 8))
    odd = LMHead(torch.zeros(40, 25, dtype=torch.bfloat16))
    both = dataclasses.replace(TILE, tma=True, hidden_tma=True)
    hidden = torch.zeros(2, 24, dtype=torch.bfloat16)
    assert head.without_unsupported_tma(both, hidden) == both
    assert odd.without_unsupported_tma(both, hidden) == dataclasses.replace(both, tma=False)
    shifted = torch.zeros(2, 40, dtype=torch.bfloat16)[:, 1:25]
    assert head.without_unsupported_tma(both, shifted) == dataclasses.replace(both, hidden_tma=False)
    assert head.weight_operand(TILE) is head.weight_operand(TILE), "a descriptor is made once"
    assert head.weight_operand(dataclasses.replace(TILE, tma=False)) is head.weight


def test_a_head_whose_weight_gets_another_dtype_rounds_to_it_unless_it_was_told_another_one():
    module = torch.nn.Linear(24, 40, bias=False)
    head = LMHead(module.weight, module=module, softcap=3.0)
    told = LMHead(module.weight, module=module, logits_dtype=torch.bfloat16)
    module.half()
    assert head.current.rounding is torch.float16 and head.current.softcap == 3.0
    assert told.current.rounding is torch.bfloat16


@pytest.mark.parametrize("max_rows", [1, 15, 16, 17, 64, 100])
def test_a_workspace_of_so_many_slots_serves_every_batch_up_to_its_size(device, max_rows):
    head = LMHead(torch.zeros(5003, 16, device=device))
    tile, read = dataclasses.replace(TILE, ctas_per_sm=7), dataclasses.replace(READ, ctas_per_sm=7, min_splits=3)
    rows = range(1, max_rows + 1)
    assert workspace_slots(head, max_rows, tile) == max(num_splits(head, n, tile) * n for n in rows)
    assert read_slots(5003, max_rows, read, device) == max(num_read_splits(5003, n, read, device) * n for n in rows)
    assert all(num_read_splits(5003, n, read, device) >= 3 for n in rows)


def test_room_for_a_gemm_has_rows_at_multiples_of_16_and_grows_by_doubling(device):
    workspace = Workspace(1, device)
    first = workspace.gemm(3, 50_257, torch.float16)
    assert first.shape == (3, 50_257) and first.stride() == (50_272, 1) and first.dtype is torch.float16
    assert workspace.gemm(2, 50_257, torch.float16).data_ptr() == first.data_ptr()
    second = workspace.gemm(4, 50_257, torch.float16)
    assert second.shape == (4, 50_257) and second.untyped_storage().nbytes() == 6 * 50_272 * 2
    assert workspace.gemm(6, 50_257, torch.float16).data_ptr() == second.data_ptr()
    assert workspace.gemm(1, 32, torch.float16).stride() == (32, 1), "another width starts anew"


def test_blocks_of_groups_are_a_power_of_two_of_128_ids():
    assert [num_group_blocks(vocab) for vocab in (1, 128, 129, 1000, 151_936)] == [1, 1, 2, 8, 2048]
