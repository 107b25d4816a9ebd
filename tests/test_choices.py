"""What each batch takes: the built-in choice of its size or a tuned one, in any order of paths; never another token."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from sgl_flashsample.kernels.tiles import ReadConfig, TileConfig
from test_api import features, problem

from sgl_flashsample import BatchParams, LMHead, selftest, tuned
from sgl_flashsample.api import sample
from sgl_flashsample.choices import DENSE_ROWS, Choices, choices_for, path_of_config
from sgl_flashsample.paths import make_workspace
from sgl_flashsample.tuned import Shape, path_for, read_for, tile_for
from sgl_flashsample.work import OWN_PATHS, Path, Work

TILES = [
    TileConfig(16, 64, 32, 4, 1, flatten=False, tma=False),
    TileConfig(32, 128, 16, 4, 1, flatten=False, tma=False),
]
READS = [ReadConfig(4, 64, 4, ctas_per_sm=2), ReadConfig(1, 128, 2, ctas_per_sm=3)]
# Paths in turns: no number of rows separates them.
TURNS = {1: READS[0], 2: TILES[0], 3: READS[1], 4: TILES[1], 6: TILES[0], 9: READS[0]}


@pytest.fixture
def head(device):
    return LMHead(problem(device)[1])


def turns(head, *works):
    return Choices(Shape.of(head), dict.fromkeys(works, TURNS))


@pytest.mark.parametrize("family", ["sm80", "sm90", "sm100", None])
@pytest.mark.parametrize("work", Work)
def test_without_a_tuned_table_every_batch_has_the_choice_of_the_built_in_tables(device, monkeypatch, family, work):
    head = LMHead(torch.zeros(1000, 32, dtype=torch.bfloat16, device=device))
    if family is not None:
        # A device of this family: where it is, and that it is not a CPU.
        monkeypatch.setattr(tuned, "family_of", lambda _: family)
        shape = Shape.of(head)._replace(device=torch.device("cuda"))
        own = Choices(shape)
        for rows in (1, 16, 17, 64, 65, 97, 512, 513, 4096):
            entries = {
                Path.FUSED: tuned.tile_in(family, 2, rows, work),
                Path.LOGITS: tuned.reader_in(rows, work),
                Path.SCREENED: tuned.screen_in(family, 2, rows, work),
            }
            assert own.pick(rows, work) == entries[tuned.path_of(shape, rows, work)]
        return
    for rows in (1, 16, 65, 512, 513, 4096):
        if path_for(head, rows, work) is Path.SCREENED:
            assert choices_for(head).pick(rows, work) == tuned.screen_of(Shape.of(head), rows, work)
            continue
        wanted = read_for(device, 1000, rows, work) if path_for(head, rows, work) is Path.LOGITS else None
        assert choices_for(head).pick(rows, work) == (wanted or tile_for(head, rows, work))


def test_a_tuned_batch_takes_its_own_configuration_and_every_other_one_the_built_in_one(head):
    own = turns(head, Work.TRUNCATE)
    for rows in (*range(1, 12), DENSE_ROWS, DENSE_ROWS + 1, 5000):
        expected = TURNS.get(rows, own.built_in(rows, Work.TRUNCATE))
        assert own.pick(rows, Work.TRUNCATE) == expected
        assert own.is_tuned(rows, Work.TRUNCATE) == (rows in TURNS)
        assert own.pick(rows, Work.EDIT) == own.built_in(rows, Work.EDIT)


def test_a_batch_that_is_to_have_a_path_has_the_tuned_choice_if_that_is_of_this_path(head):
    own = turns(head, Work.PLAIN)
    for rows in TURNS:
        picked = own.pick(rows)
        for path in OWN_PATHS:
            config = own.on(path, rows)
            assert path_of_config(config) is path
            assert (config == picked) == (path_of_config(picked) is path)


def test_greedy_batches_take_what_plain_ones_do_unless_they_have_an_entry_of_their_own(head):
    own = Choices(Shape.of(head), {Work.PLAIN: TURNS, Work.GREEDY: {2: READS[1], 30: TILES[1]}})
    for rows in (1, 3, 4, 6, 9):
        assert own.pick(rows, Work.GREEDY) == own.pick(rows, Work.PLAIN)
    assert own.pick(2, Work.GREEDY) == READS[1] and own.pick(2, Work.PLAIN) == TILES[0]
    assert own.pick(30, Work.GREEDY) == TILES[1] and not own.is_tuned(30, Work.PLAIN)
    alone = Choices(Shape.of(head), {Work.GREEDY: TURNS})
    assert not any(alone.is_tuned(rows, Work.PLAIN) for rows in TURNS)


@pytest.mark.parametrize("most", [1, 4, 9, 20, 600])
def test_what_a_range_of_batches_uses_is_listed_once_with_a_batch_that_uses_it(head, most):
    own = Choices(Shape.of(head), {Work.PLAIN: TURNS, Work.EDIT: TURNS, Work.GREEDY: {2: READS[1], 4: TILES[0]}})
    used = list(own.used_up_to(most))
    assert len(used) == len({(work, config) for work, _, config in used})
    for work, rows, config in used:
        assert rows <= most and own.pick(rows, work) == config
    listed = {(work, config) for work, _, config in used}
    assert not any(work.screened for work, _ in listed)
    screened = {(work, config) for work, _, config in own.used_up_to(most, screened=True)}
    assert listed <= screened
    for work in Work:
        for rows in range(1, most + 1):
            config = own.pick(rows, work)
            # The kernels of a greedy batch, and of one with a screen, are those of a plain one.
            names = {other for other in Work if other.launched(config) is work.launched(config)}
            assert any((name, config) in (screened if work.screened else listed) for name in names)


@pytest.mark.parametrize("featured", [False, True], ids=["plain", "truncated and edited"])
def test_interleaved_paths_draw_the_built_in_tokens_in_one_workspace(device, head, featured):
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-2, 3, (9, 32), generator=generator).float().to(device)
    weight = (torch.randint(-1, 2, (600, 32), generator=generator) / 4).float().to(device)  # exact dot products
    head, params = LMHead(weight), problem(device)[2]
    own = turns(head, *Work)
    workspace = make_workspace(head, 9, choices=own)
    slots, buffer = workspace.slots, workspace.gemm(9, 600, torch.float32).data_ptr()
    truncation, edits = features(device)
    for rows in (3, 9) if featured else (1, 2, 3, 4, 9):
        cut = BatchParams(params.temperature[:rows], params.seed[:rows], params.position[:rows])
        if featured:
            limits = type(truncation)(truncation.top_k[:rows], truncation.top_p[:rows], truncation.min_p[:rows])
            own_edits = type(edits)(bias=edits.bias[:rows], rows=edits.rows[:rows])
            cut = BatchParams(cut.temperature, cut.seed, cut.position, limits, own_edits)
        tokens = sample(states[:rows], head, cut, choices=own, workspace=workspace).token_ids
        assert torch.equal(tokens, sample(states[:rows], head, cut).token_ids)
    assert workspace.slots == slots and workspace.gemm(9, 600, torch.float32).data_ptr() == buffer


def test_scratch_has_room_for_the_parts_of_every_tuned_tile(device, head):
    states, _, params = problem(device)
    many = TileConfig(16, 32, 32, 4, 1, ctas_per_sm=16, flatten=False, tma=False)
    own = Choices(Shape.of(head), {Work.PLAIN: {9: many}})
    workspace = make_workspace(head, 9, choices=own)
    if device.type == "cpu":
        assert workspace.slots == 9 * 16 > make_workspace(head, 9).slots
    got = sample(states, head, params, choices=own, workspace=workspace).token_ids
    assert torch.equal(got, sample(states, head, params).token_ids)


def test_a_batch_that_is_said_to_be_greedy_takes_the_greedy_choice_and_has_the_same_tokens(device, head, monkeypatch):
    states, _, params = problem(device)
    own, seen = Choices(Shape.of(head), {Work.GREEDY: {9: TILES[1]}}), []
    monkeypatch.setattr(
        "sgl_flashsample.paths.lm_head_sample",
        lambda *arguments, **keywords: seen.append(arguments[5]) or selftest.lm_head_sample(*arguments, **keywords),
    )
    greedy = BatchParams(torch.zeros_like(params.temperature), params.seed, params.position)
    first = sample(states, head, greedy, choices=own).token_ids
    said = BatchParams(greedy.temperature, params.seed, params.position, all_greedy=True)
    assert torch.equal(sample(states, head, said, choices=own).token_ids, first)
    # Said of a batch that is none: slower or faster, and nothing else.
    wrong = BatchParams(params.temperature, params.seed, params.position, all_greedy=True)
    assert torch.equal(sample(states, head, wrong, choices=own).token_ids, sample(states, head, params).token_ids)
    assert seen == [tile_for(head, 9), TILES[1], TILES[1], tile_for(head, 9)]


def test_choices_for_another_head_are_refused_and_keep_no_head_in_memory(device, head):
    states, _, params = problem(device)
    own = turns(head, Work.PLAIN)
    sample(states, head, params, choices=own)
    for other in (LMHead(head.weight, vocab_size=577), LMHead(head.weight.half())):
        with pytest.raises(ValueError, match=r"choices are for Shape.*expected them for the head's Shape"):
            sample(states.to(other.weight.dtype), other, params, choices=own)
    again = LMHead(head.weight.clone())
    sample(states, again, params, choices=own)
    gone = weakref.ref(again)
    del again
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("refused", [*TILES, *READS], ids=str)
def test_a_refused_configuration_gives_its_batches_back_to_the_built_in_choice_in_its_class_alone(head, refused):
    own = turns(head, Work.PLAIN, Work.EDIT).without(refused, Work.EDIT)
    for rows, config in TURNS.items():
        assert own.pick(rows, Work.EDIT) == (own.built_in(rows, Work.EDIT) if config == refused else config)
        assert own.pick(rows, Work.PLAIN) == config
    plain = turns(head, Work.PLAIN, Work.EDIT).without(refused, Work.PLAIN)
    assert refused not in {plain.pick(rows, work) for rows in TURNS for work in (Work.PLAIN, Work.GREEDY)}
    assert refused in {plain.pick(rows, Work.EDIT) for rows in TURNS}
    greedy = turns(head, Work.PLAIN).without(refused, Work.GREEDY)
    assert refused not in {greedy.pick(rows, Work.PLAIN) for rows in TURNS}, "the kernel is the same"


@pytest.fixture
def breaks(monkeypatch):
    """Makes one configuration draw the token after the right one, or raise, when its batch is edited or always."""

    def break_it(config, how="shift", edited_only=False):
        name = "sample_logits" if isinstance(config, ReadConfig) else "lm_head_sample"
        true = getattr(selftest, name)

        def broken(*arguments, **keywords):
            token, score, logprob = true(*arguments, **keywords)
            if arguments[5] != config or (edited_only and keywords["edits"] is None):
                return token, score, logprob
            if how == "raise":
                raise RuntimeError("out of resource: shared memory\nmore")
            return (token + 1) % 600, score, logprob

        monkeypatch.setattr(selftest, name, broken)

    return break_it


def test_right_tuned_configurations_pass_and_stay(head):
    checked = selftest.refuse_wrong(head, 9, turns(head, Work.PLAIN))
    assert checked.problem is None and checked.refused == ()
    assert checked.choices.pick(4) == TILES[1]


@pytest.mark.parametrize("config, how", [(TILES[1], "shift"), (READS[0], "raise")], ids=["tile", "reader"])
def test_a_tuned_configuration_that_fails_is_taken_out_and_named_and_the_others_stay(head, breaks, config, how):
    breaks(config, how)
    checked = selftest.refuse_wrong(head, 9, turns(head, Work.PLAIN))
    assert checked.problem is None
    (line,) = checked.refused
    assert str(config) in line and line.endswith("(plain)") and "\n" not in line
    assert ("tokens differ" if how == "shift" else "RuntimeError: out of resource: shared memory with") in line
    for rows, tuned_one in TURNS.items():
        assert checked.choices.is_tuned(rows, Work.PLAIN) == (tuned_one != config)


def test_a_built_in_choice_that_fails_is_the_servers_problem_as_ever(head, breaks):
    breaks(tile_for(head, 1))
    assert "tokens differ" in selftest.refuse_wrong(head, 9, Choices(Shape.of(head))).problem
    # Also where it would have to take the place of a tuned one.
    breaks(TILES[0])
    checked = selftest.refuse_wrong(head, 1, Choices(Shape.of(head), {w: {1: TILES[0]} for w in Work}))
    assert "tokens differ" in checked.problem and str(tile_for(head, 1)) in checked.problem
    assert len(checked.refused) == 4, "each class's, greedy batches and those with a screen being plain ones"


def test_what_fails_on_another_rank_is_taken_out_here_too(head):
    asked = []

    def agree(failed):
        asked.append(list(failed))
        return [True, *failed[1:]] if len(asked) == 1 else failed

    own = Choices(Shape.of(head), {Work.PLAIN: {1: TILES[0], 2: TILES[1]}})
    checked = selftest.refuse_wrong(head, 2, own, agree=agree)
    assert checked.problem is None
    assert checked.refused == (f"another rank refuses {TILES[0]} (plain)",)
    assert checked.choices.pick(2) == TILES[1] and not checked.choices.is_tuned(1, Work.PLAIN)
    assert not any(any(failed) for failed in asked)
