"""The second pass of the screened path: the groups that it reads, in any order; and each launch for truncated rows
against its definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import (
    CUDA,
    LISTED,
    SCREEN,
    TRUNCATION,
    Case,
    assert_equal_to_reference,
    draw,
    expected,
    limits,
    make_case,
    make_params,
    rounding_case,
    spelled_out,
    take,
)

from sgl_flashsample.kernels import rescore, screened_sample
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.reference import truncated_sample_ref
from sgl_flashsample.kernels.rescore import list_groups
from sgl_flashsample.kernels.screen import quantize_hidden, screen_head
from sgl_flashsample.kernels.screened_truncated import (
    RescorePass,
    bound_truncated,
    draw_rescored,
    list_ids,
    read_groups,
    read_ids,
)
from sgl_flashsample.kernels.workspace import (
    ID_ROWS,
    MAX_ID_ROWS,
    LogitsBuffer,
    ScreenCounter,
    ScreenWorkspace,
    num_group_blocks,
)

INF = float("inf")
in_chunks_and_listed = pytest.mark.parametrize("config", [SCREEN, LISTED], ids=["chunks", "listed"])


def counted(drawn) -> dict[ScreenCounter, int]:
    return dict(zip(ScreenCounter, drawn.screen.operands.counters.tolist(), strict=True))


def ordered(x: torch.Tensor) -> torch.Tensor:
    """float32 to int32 in the same order."""
    bits = x.float().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


# --- the groups that are read -----------------------------------------------------------------------------------------


@in_chunks_and_listed
def test_where_every_group_could_win_every_group_is_read_and_the_token_is_right(device, config):
    case = make_case(17, 1003, device, hidden=64)
    copy = Int8Head(case.head)
    copy.operands.error.fill_(1e6)
    drawn = draw("screened", case, config, int8_head=copy)
    assert_equal_to_reference(case, drawn)
    counts = counted(drawn)
    assert counts[ScreenCounter.ROW_BLOCKS] == counts[ScreenCounter.MANY_CANDIDATES] == 2
    assert counts[ScreenCounter.ROWS] == 17 and counts[ScreenCounter.CERTIFIED_ROWS] == 0
    assert counts[ScreenCounter.GROUPS] == 63 * 2
    assert counts[ScreenCounter.CANDIDATES] == 63 * 17


@pytest.mark.slow
def test_neither_the_order_of_the_list_nor_who_reads_an_entry_matters_even_where_scores_tie(device, monkeypatch):
    case = make_case(17, 703, device, "greedy", torch.bfloat16)
    case.hidden[:, 1:] = 0  # few different logits: the best is everywhere
    fused, in_order = draw("fused", case), draw("screened", case, LISTED)
    shifts: list[int] = []

    def shuffled(num_rows, vocab_size, params, workspace, config, **options):
        list_groups(num_rows, vocab_size, params, workspace, config, **options)
        screen, num_groups = workspace.operands, workspace.num_groups
        for block in range(-(-num_rows // config.rescore_tile.block_b)):
            entries = screen.group_list[block * num_groups :][: int(screen.num_flagged[block])]
            entries.copy_(entries.flip(0).roll(shifts[-1]))
            place = screen.group_place[block * num_groups :]
            place[entries.long()] = torch.arange(len(entries), dtype=torch.int32, device=device)

    monkeypatch.setattr(rescore, "list_groups", shuffled)
    for shift in (0, 5):
        shifts.append(shift)
        drawn = draw("screened", case, LISTED)
        assert torch.equal(drawn.token_ids, fused.token_ids)
        assert torch.equal(drawn.scores, in_order.scores)


@in_chunks_and_listed
def test_what_is_read_first_spares_what_is_worse(device, config):
    case = rounding_case(4, 2000, device, torch.bfloat16, hidden=64)
    head = LMHead(torch.cat([case.hidden / 5, case.head.weight]))  # the first group holds the best id of each state
    case = dataclasses.replace(case, head=head).with_params(temperature=torch.ones(4, device=device))
    copy = Int8Head(head)
    copy.operands.error.mul_(20)  # few groups are ruled out before their turn
    drawn = draw("screened", case, dataclasses.replace(config, rescore_v=32), int8_head=copy)
    assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)
    counts = counted(drawn)
    assert counts[ScreenCounter.CANDIDATES] >= 25, counts
    if not CUDA:  # there, programs run at the same time
        assert counts[ScreenCounter.GROUPS] <= counts[ScreenCounter.CANDIDATES] // 2, counts


def test_few_groups_are_read_and_the_counters_say_how_many(device):
    case = rounding_case(8, 4000, device, torch.bfloat16, hidden=256)
    case = case.with_params(temperature=torch.ones(8, device=device))
    counts = counted(draw("screened", case))
    assert counts[ScreenCounter.ROW_BLOCKS] == 1 and counts[ScreenCounter.ROWS] == 8
    assert counts[ScreenCounter.CANDIDATES] >= 8 and counts[ScreenCounter.GROUPS] <= 60
    assert counts[ScreenCounter.GROUPS] <= counts[ScreenCounter.CANDIDATES]
    peaked = dataclasses.replace(case, hidden=case.head.weight[100:900:100] * 8)
    counts = counted(draw("screened", peaked))
    assert counts[ScreenCounter.CERTIFIED_ROWS] == 8, "nothing comes near the one id that a state points to"
    assert counts[ScreenCounter.GROUPS] == 8 and counts[ScreenCounter.MANY_CANDIDATES] == 0


def test_edits_do_not_make_every_group_a_candidate_and_a_row_without_a_token_reads_nothing(device):
    case = make_case(17, 1900, device, "edit", hidden=64, seed=6)
    counts = counted(draw("screened", case))
    assert counts[ScreenCounter.GROUPS] < 17 * 119 / 4
    masked = case.with_params(
        edits=dataclasses.replace(
            case.params.edits, mask=torch.ones(17, 1900, dtype=torch.bool, device=device), rows=None
        )
    )
    counts = counted(draw("screened", masked))
    assert counts[ScreenCounter.GROUPS] == 0 and counts[ScreenCounter.CERTIFIED_ROWS] == 17


# --- truncated rows, launch by launch -------------------------------------------------------------------------------


@dataclasses.dataclass
class Stage:
    """A batch of ``num_rows`` truncated rows, of which the last is greedy, and made-up results of the launches before
    the one under test."""

    case: Case
    workspace: ScreenWorkspace
    buffer: LogitsBuffer
    config: ScreenConfig = SCREEN

    @property
    def arguments(self) -> tuple[int, int, BatchParams, ScreenWorkspace]:
        return len(self.case.hidden), self.case.head.vocab_size, self.case.params, self.workspace

    def rows_of_groups(self, name: str) -> torch.Tensor:
        """``[B, G]`` of a tensor of that layout."""
        num_rows, groups = len(self.case.hidden), self.workspace.num_groups
        return getattr(self.workspace.operands, name)[: num_rows * groups].view(num_rows, groups)

    @property
    def score_hi(self) -> torch.Tensor:
        """``[G, B]``."""
        num_rows, groups = len(self.case.hidden), self.workspace.num_groups
        return self.workspace.operands.score_hi[: num_rows * groups].view(groups, num_rows)

    @property
    def threshold(self) -> torch.Tensor:
        key = self.workspace.operands.threshold
        return torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)

    @property
    def peaks(self) -> torch.Tensor:
        """``[B, G]`` float32, the true largest logits."""
        return padded(self.case.edited).amax(-1).float()


def padded(logits: torch.Tensor) -> torch.Tensor:
    """``[B, G, 16]``, -inf beyond the vocabulary."""
    return torch.nn.functional.pad(logits, (0, -logits.shape[1] % 16), value=-INF).view(len(logits), -1, 16)


def in_sets(of_groups: torch.Tensor, empty: float) -> torch.Tensor:
    """``[B, n, S]``: the groups of each of the S sets of ``set_maxima``, from ``[B, G]``."""
    sets = num_group_blocks(of_groups.shape[1] * 16)
    padded = torch.nn.functional.pad(of_groups, (0, -of_groups.shape[1] % sets), value=empty)
    return padded.view(len(of_groups), -1, sets)


@pytest.fixture
def stage(device) -> Stage:
    return make_stage(7, device)


def make_stage(num_rows: int, device) -> Stage:
    vocab = 1003
    case = make_case(num_rows, vocab, device, dtype=torch.float32, seed=12)
    temperature = torch.linspace(0.6, 1.4, num_rows, device=device)
    temperature[-1] = 0.0
    top_k = torch.tensor([3, 40, 64, 0, 100, 5, 5] * 3, dtype=torch.int32, device=device)[:num_rows]
    truncation = dataclasses.replace(limits(num_rows, device, top_p=0.9), top_k=top_k)
    case = case.with_params(temperature=temperature, truncation=truncation)
    copy = Int8Head(case.head)
    workspace = ScreenWorkspace(copy.num_groups, copy.weight.shape[1], num_rows, device)
    for never_written in (workspace.operands.max_logit_lo, workspace.operands.id_hi):
        never_written.fill_(-55.0)  # of rows that are not truncated
    quantize_hidden(case.hidden, workspace, SCREEN)
    screen_head(case.head, copy, num_rows, case.params, workspace, SCREEN)
    buffer = LogitsBuffer(num_rows, vocab, torch.float32, device)
    buffer.logits.fill_(-77.0)
    buffer.group_max.fill_(-77.0)
    return Stage(case, workspace, buffer)


@pytest.mark.parametrize("rescored", [False, True])
def test_a_bound_is_what_as_many_sets_of_groups_as_are_wanted_are_above(stage, rescored):
    """``top_k`` sets where that is small, else as many as the draw has room for. Bisection finds the bound, so one in
    sixteen more may be above it. Rows that are not truncated keep their threshold."""
    greedy_before = stage.threshold[-1].item()
    bound_truncated(*stage.arguments, stage.buffer, SCREEN, TRUNCATION, rescored=rescored)
    lo = stage.rows_of_groups("max_logit_lo")[:-1]
    maxima = in_sets(lo, -INF).amax(1)
    above = (maxima > stage.threshold[:-1, None]).sum(1).tolist()
    small = TRUNCATION.candidate_groups // 2
    for k, num_above in zip(stage.case.params.truncation.top_k.tolist(), above, strict=False):
        wanted = k if 1 <= k <= small else small
        assert num_above == maxima.shape[1] or wanted <= num_above <= wanted + wanted // 16, (k, num_above)
    assert above[0] == 3 and above[5] == 5
    assert stage.threshold[-1].item() == greedy_before
    started = torch.full_like(stage.buffer.group_max, -77.0 if rescored else -INF)
    started[-1] = -77.0
    assert torch.equal(stage.buffer.group_max, started)


@pytest.mark.parametrize("certain", [False, True])
def test_groups_are_listed_once_per_block_of_rows_if_any_of_its_rows_flags_them(device, certain):
    num_rows, vocab = 20, 1003  # two blocks of rows
    case = make_case(num_rows, vocab, device, dtype=torch.float32)
    case = case.with_params(truncation=dataclasses.replace(limits(num_rows, device, top_k=5)))
    workspace = ScreenWorkspace(63, 32, num_rows, device)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(num_rows, 63, generator=generator).to(device)
    values[:, ::9] = -INF
    workspace.operands.score_hi.copy_(values.T.flatten())
    workspace.operands.max_logit_lo.copy_(values.flatten())
    threshold = torch.full((num_rows,), 1.0, device=device)
    threshold[3] = -INF  # a group without an allowed token is not flagged even so
    threshold[17] = values[17, 5]  # reached, not passed
    workspace.operands.threshold.copy_(ordered(threshold))
    workspace.operands.candidates.zero_()
    list_groups(num_rows, vocab, case.params, workspace, SCREEN, certain=certain)
    flags = (values >= threshold[:, None]) & (values > -INF)
    if certain:
        flags &= (case.params.temperature > 0)[:, None]
    for block in range(2):
        rows = flags[16 * block : 16 * block + 16]
        count = int(workspace.operands.num_flagged[block])
        listed = workspace.operands.group_list[block * 63 :][:count].tolist()
        assert sorted(listed) == rows.any(0).nonzero()[:, 0].tolist()
        place = workspace.operands.group_place[block * 63 :]
        assert [int(place[group]) for group in listed] == list(range(count))
    assert torch.equal(workspace.operands.candidates, flags.sum(1).int())


@pytest.mark.parametrize("which", RescorePass)
def test_groups_are_read_for_the_rows_that_need_them_and_for_no_others(stage, which):
    """Certain groups become exact: their lower bound is their largest logit, and they are not flagged again."""
    num_rows = len(stage.case.hidden)
    stage.workspace.operands.threshold.copy_(ordered(stage.peaks.topk(3).values[:, -1] - 0.5))
    lo_before, hi_before = stage.rows_of_groups("max_logit_lo").clone(), stage.score_hi.clone()
    needs = stage.case.limited
    certain = which is RescorePass.CERTAIN_GROUPS
    if certain:
        flags = (lo_before >= stage.threshold[:, None])[needs].any(0)
        assert 3 <= flags.sum() < 40
        read = flags[None] & needs[:, None]
    else:
        needs = torch.tensor([True, False, True, False, False, True, False], device=needs.device)
        stage.buffer.status.copy_(torch.where(needs, -1, 1))
        read = needs[:, None].expand(-1, 63)
    read_groups(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, SCREEN, stage.buffer, which)
    left = stage.buffer.logits.view(num_rows, -1, 16)
    assert torch.equal(left[read].double(), padded(stage.case.edited)[read])
    assert (left[~read] == -77.0).all() and (stage.buffer.group_max[~read] == -77.0).all()
    assert torch.equal(stage.buffer.group_max[read], stage.peaks[read])
    if certain:
        temperature = stage.case.params.temperature.double().clamp(min=1e-3)[:, None, None]
        mass = (padded(stage.case.edited) / temperature).logsumexp(-1).float()
        for end in ("lse_hi", "lse_lo"):
            torch.testing.assert_close(stage.rows_of_groups(end)[read], mass[read], rtol=1e-6, atol=1e-6)
    changed = read if certain else torch.zeros_like(read)
    lo, hi = stage.rows_of_groups("max_logit_lo"), stage.score_hi.T
    assert torch.equal(lo[changed], stage.peaks[changed]) and torch.equal(lo[~changed], lo_before[~changed])
    assert (hi[changed] == -INF).all() and torch.equal(hi[~changed], hi_before.T[~changed])
    assert not stage.workspace.operands.num_flagged.any() and not stage.workspace.operands.arrived.any()
    wanted = int(read.any(0).sum())
    assert stage.workspace.operands.counters[ScreenCounter.GROUPS] == wanted


def test_ids_that_could_reach_the_threshold_are_listed_and_their_groups_ruled_out(stage):
    num_rows, vocab = len(stage.case.hidden), stage.case.head.vocab_size
    threshold = stage.peaks.topk(5).values[:, -1] - 0.01
    stage.workspace.operands.threshold.copy_(ordered(threshold))
    stage.workspace.operands.candidates.zero_()
    hi_before = stage.score_hi.T.clone()
    id_hi = stage.workspace.operands.id_hi[: vocab * num_rows].view(vocab, num_rows).T.float()
    list_ids(num_rows, vocab, stage.case.params, stage.workspace, SCREEN)
    possible = (hi_before >= threshold[:, None]) & stage.case.limited[:, None]
    reaching = (id_hi >= threshold[:, None]) & possible.repeat_interleave(16, 1)[:, :vocab]
    count = int(stage.workspace.operands.num_ids)
    listed = stage.workspace.operands.ids[:count].tolist()
    assert count >= 5 and sorted(listed) == reaching.any(0).nonzero()[:, 0].tolist()
    assert (stage.score_hi.T[possible] == -INF).all()
    assert torch.equal(stage.score_hi.T[~possible], hi_before[~possible])
    assert torch.equal(stage.workspace.operands.candidates, possible.sum(1).int())


def test_an_id_that_does_reach_the_threshold_brings_its_group_back(stage):
    num_rows, vocab = len(stage.case.hidden), stage.case.head.vocab_size
    threshold = stage.peaks.topk(5).values[:, -1]  # reached, not passed
    stage.workspace.operands.threshold.copy_(ordered(threshold))
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:400].int().to(threshold.device)
    stage.workspace.operands.ids[:400], stage.workspace.operands.num_ids[:] = ids, 400
    stage.score_hi.fill_(-INF)
    read_ids(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, SCREEN)
    listed = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
    listed[ids.long()] = True
    reaches = listed & (stage.case.edited >= threshold.double()[:, None]) & stage.case.limited[:, None]
    back = torch.nn.functional.pad(reaches, (0, -vocab % 16)).view(num_rows, -1, 16).any(-1)
    assert 3 <= back.sum() < 30
    assert torch.equal(stage.score_hi.T, torch.where(back, INF, -INF))
    assert not stage.workspace.operands.num_ids.any() and not stage.workspace.operands.ids_arrived.any()


def test_each_block_of_rows_has_a_list_of_ids_of_its_own(device):
    num_rows, vocab = ID_ROWS + 4, 1003
    stage = make_stage(num_rows, device)
    threshold = stage.peaks.topk(5).values[:, -1]
    stage.workspace.operands.threshold.copy_(ordered(threshold))
    stage.workspace.operands.candidates.zero_()
    possible = (threshold[:, None] <= stage.score_hi.T) & stage.case.limited[:, None]
    id_hi = stage.workspace.operands.id_hi[: vocab * num_rows].view(vocab, num_rows).T.float()
    reaching = (id_hi >= threshold[:, None]) & possible.repeat_interleave(16, 1)[:, :vocab]
    list_ids(num_rows, vocab, stage.case.params, stage.workspace, SCREEN)
    listed = torch.zeros(num_rows, vocab, dtype=torch.bool, device=device)
    for block, rows in enumerate((slice(0, ID_ROWS), slice(ID_ROWS, num_rows))):
        ids = stage.workspace.operands.ids[block * 1008 :][: int(stage.workspace.operands.num_ids[block])].long()
        assert sorted(ids.tolist()) == reaching[rows].any(0).nonzero()[:, 0].tolist()
        listed[rows, ids] = True
    stage.score_hi.fill_(-INF)
    read_ids(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, SCREEN)
    reaches = listed & (stage.case.edited >= threshold.double()[:, None]) & stage.case.limited[:, None]
    back = torch.nn.functional.pad(reaches, (0, -vocab % 16)).view(num_rows, -1, 16).any(-1)
    assert torch.equal(stage.score_hi.T, torch.where(back, INF, -INF))
    assert not stage.workspace.operands.num_ids.any() and not stage.workspace.operands.ids_arrived.any()


def rescored(case: Case, threshold: torch.Tensor, width: float, dtype=torch.float32) -> Stage:
    """Groups that reach the threshold in the buffer, and bounds of each group's mass, ``width`` below and above it."""
    num_rows, vocab, device = len(case.hidden), case.head.vocab_size, case.hidden.device
    workspace = ScreenWorkspace(-(-vocab // 16), 32, num_rows, device)
    made = Stage(case, workspace, LogitsBuffer(num_rows, vocab, dtype, device))
    workspace.operands.threshold.copy_(ordered(threshold))
    logits = padded(case.edited)
    mass = (logits / case.params.temperature.double().clamp(min=1e-3)[:, None, None]).logsumexp(-1)
    made.rows_of_groups("lse_lo").copy_(mass - width)
    made.rows_of_groups("lse_hi").copy_(mass + width)
    read = made.peaks >= threshold[:, None]
    made.buffer.logits.copy_(torch.where(read[..., None], logits, 99.0).flatten(1))  # unread logits are arbitrary
    made.buffer.group_max.copy_(torch.where(read, made.peaks, -INF))
    return made


def drawn_from(made: Stage, truncation_config=TRUNCATION) -> tuple[SampleOutput, torch.Tensor]:
    num_rows, vocab, params, workspace = made.arguments
    output = SampleOutput.empty(num_rows, made.case.hidden.device, False)
    output.token_ids.fill_(-7)
    draw_rescored(output, vocab, params, workspace, made.buffer, SCREEN, truncation_config)
    return output, made.buffer.status[:num_rows]


@in_chunks_and_listed
def test_the_token_is_of_the_groups_that_are_not_ruled_out(stage, config):
    """A row without limits gets the best token of these groups. For a row with limits, only their logits are written,
    to the buffer."""
    num_rows, vocab = len(stage.case.hidden), stage.case.head.vocab_size
    best = stage.peaks[-1].argmax()
    stage.score_hi[best, :] = -INF
    stage.workspace.operands.threshold.copy_(ordered(stage.peaks.topk(4).values[:, -1] - 0.5))
    flagged = (stage.threshold[:, None] <= stage.score_hi.T).any(0)
    assert 4 <= flagged.sum() < 60
    logits = padded(stage.case.edited)
    output = rescore.rescore_groups(
        stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, config, stage.buffer
    )
    allowed = torch.where(flagged[:, None], logits[-1], -INF).flatten()
    assert output.token_ids[-1] == allowed.argmax() and output.scores[-1] == allowed.max()
    left, limited = stage.buffer.logits.view(num_rows, -1, 16), stage.case.limited
    assert (left[:, ~flagged] == -77.0).all() and (left[~limited] == -77.0).all()
    written = (left != -77.0).any(-1)
    assert torch.equal(left[written].double(), logits[written])
    assert written[limited][:, flagged].float().mean() > 0.8, "logits read earlier rule some groups out"
    assert vocab == allowed.isfinite().numel() - (-vocab % 16)


@pytest.mark.slow
def test_rescored_groups_decide_a_token_only_where_they_are_certain_to(stage):
    """Close bounds of the mass decide nearly all rows, distant bounds few. Every decided token is right. A row with a
    large top-k or none is decided if top-p or min-p need less than was rescored. A row that is decided once the mass is
    known has a status of its own."""
    num_rows = 14
    case = stage.case.rows(torch.arange(num_rows, device=stage.case.hidden.device) % 6)
    truncation, device = case.params.truncation, case.hidden.device
    truncation = dataclasses.replace(truncation, top_p=torch.where(torch.arange(num_rows, device=device) < 7, 0.9, 0.3))
    case = case.with_params(truncation=truncation, position=torch.arange(num_rows, device=device))
    want = expected(case)
    threshold = case.edited.topk(64).values[:, -1].float()
    decided = {}
    for width in (1e-4, 3.0):
        output, status = drawn_from(rescored(case, threshold, width))
        answered = (status == 1) & ~want.near_tie
        assert ((status == 1) | (status == -1) | (status == -2)).all()
        assert width == 1e-4 or (status == -2).any()
        assert torch.equal(output.token_ids[answered], want.token[answered])
        decided[width] = int((status == 1).sum())
    assert decided[3.0] < decided[1e-4] and decided[1e-4] > num_rows // 2, decided


def with_unknown_mass(device) -> tuple[Stage, torch.Tensor]:
    """Rows that need more of their mass than is known, but for the first, and a last one that is not truncated; and the
    log-mass of each group."""
    num_rows, vocab = 9, 51_200
    case = make_case(num_rows, vocab, device, dtype=torch.float32, seed=4)
    temperature = torch.full((num_rows,), 1.0, device=device)
    temperature[-1] = 0.0
    case = case.with_params(temperature=temperature, truncation=limits(num_rows, device, top_k=40, top_p=0.1))
    case.params.truncation.top_p[0] = 1.0  # decided by top-k alone
    made = rescored(case, case.edited.topk(64).values[:, -1].float(), 0.0)
    mass = made.rows_of_groups("lse_hi").clone()
    width = 0.1 + 1.5 * torch.rand(mass.shape, generator=torch.Generator().manual_seed(1)).to(device)
    made.rows_of_groups("lse_hi").copy_(mass + width)
    made.rows_of_groups("lse_lo").copy_(mass - width)
    made.rows_of_groups("max_logit_lo").fill_(7.0)
    return made, mass


def test_rows_whose_mass_is_not_known_choose_groups_that_will_tell_it(device):
    """Of most rows less than half, those whose ends are furthest apart. Other rows choose none, and rows that are not
    truncated keep what they have. With the mass of the chosen groups, a second draw answers for the rows that chose,
    and leaves the others alone."""
    made, mass = with_unknown_mass(device)
    hi, lo, marks = (made.rows_of_groups(name) for name in ("lse_hi", "lse_lo", "max_logit_lo"))
    output, status = drawn_from(made)
    wide, status = status == -2, status.clone()
    assert status[0] == 1 and wide.sum() >= 3 and (marks[-1] == 7.0).all()
    assert (marks[:-1][~wide[:-1]] == -INF).all()
    chosen = marks[wide] == INF
    assert (chosen.sum(1) > 0).all() and chosen.sum(1).median() < mass.shape[1] / 2
    hi[wide], lo[wide] = (ends[wide].where(~chosen, mass[wide]) for ends in (hi, lo))
    output.token_ids.fill_(-7)
    draw_rescored(output, *made.arguments[1:], made.buffer, SCREEN, TRUNCATION, again=True)
    want, again = expected(made.case), made.buffer.status[: len(status)]
    assert (again[wide] == 1).all() and torch.equal(again[~wide], status[~wide])
    assert torch.equal(output.token_ids[wide & ~want.near_tie], want.token[wide & ~want.near_tie])
    assert (output.token_ids[~wide] == -7).all()


def test_a_row_that_needs_the_mass_of_more_groups_than_may_be_read_is_left(device):
    made, _ = with_unknown_mass(device)
    _, status = drawn_from(made)
    wide = status == -2
    _, status = drawn_from(made, dataclasses.replace(TRUNCATION, wide_groups=1))
    assert (status[wide] == -1).all() and (made.rows_of_groups("max_logit_lo")[:-1] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_threshold_of_zero_is_reached_by_a_logit_of_zero(device, dtype):
    """No number that is smaller lies between 0.0 and -0.0."""
    values = [{5: 1.0, 100: 0.5, 300: 0.25, 500: 0.0}.get(i, -9.0) for i in range(1024)]
    case = spelled_out(values, 32, device).with_params(
        temperature=torch.full((32,), 50.0, device=device), truncation=limits(32, device, top_k=4)
    )
    output, status = drawn_from(rescored(case, torch.zeros(32, device=device), 1e-6, dtype))
    want = expected(case)
    assert (status == 1).all() and (output.token_ids == 500).any()
    assert torch.equal(output.token_ids[~want.near_tie], want.token[~want.near_tie])


def test_small_limits_of_every_kind_are_drawn_as_the_reference_does(stage):
    """All tokens that a small top-k allows were rescored, and the mass is known: no row is left to the search."""
    device, num_rows = stage.case.hidden.device, 24
    row = torch.arange(num_rows, device=device)
    case = stage.case.rows(row % 6).with_params(position=row)
    truncation = limits(num_rows, device, top_k=20)
    top_p, min_p = torch.where(row % 4 < 2, 0.6, 1.0), torch.where(row % 2 == 0, 0.25, 0.0)
    case = case.with_params(truncation=dataclasses.replace(truncation, top_p=top_p, min_p=min_p))
    threshold = case.edited.topk(24).values[:, -1].float() - 0.01
    output, status = drawn_from(rescored(case, threshold, 1e-6))
    want = expected(case)
    certain = ~want.near_tie
    assert (status == 1).float().mean() > 0.9 and certain.float().mean() > 0.8
    assert torch.equal(output.token_ids[certain], want.token[certain])


def test_rows_without_a_limit_keep_the_token_that_they_have(stage):
    output, status = drawn_from(rescored(stage.case, stage.peaks.amax(1) - 2, 1e-4))
    assert output.token_ids[-1].item() == -7 and status[-1].item() == 0
    assert (output.token_ids[:-1] >= 0).all()


def test_an_unread_token_that_min_p_allows_leaves_the_row_to_the_search(device):
    """The threshold lies between two bfloat16 logits. The lower one, 2, may be in a group that was not read, and min-p
    just allows it: e^-2 of the largest, 4. 64 groups are above the threshold, so that the draw finds enough."""
    values = torch.full((80, 16), -30.0)
    values[:70, 0] = 4.0 - torch.arange(70) / 64
    values[75, 3] = 2.0
    values = values.flatten().bfloat16().float()
    weight = torch.zeros(1280, 16, dtype=torch.bfloat16, device=device)
    weight[:, 0] = values
    hidden = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
    hidden[:, 0] = 1.0
    num_rows, head = 800, LMHead(weight)
    params = dataclasses.replace(
        make_params(num_rows, head.spec, device),
        temperature=torch.ones(num_rows, device=device),
        truncation=limits(num_rows, device, min_p=torch.tensor(-2.0).exp().item()),
    )
    case = Case(hidden.expand(num_rows, -1), head, params)
    case = case.rows((expected(case).token == 75 * 16 + 3).nonzero()[:4, 0])
    num_rows = len(case.hidden)
    assert num_rows >= 3
    threshold = torch.full((num_rows,), 2.005, device=device)
    output, status = drawn_from(rescored(case, threshold, 1e-4, torch.bfloat16))
    assert ((status == -1) | (output.token_ids == 75 * 16 + 3)).all()


def test_the_draw_of_rescored_groups_is_the_reference_of_what_was_left(stage):
    """Only a small top-k: the bounds of the mass do not matter."""
    device = stage.case.hidden.device
    case = stage.case.with_params(truncation=limits(7, device, top_k=20))
    threshold = case.edited.topk(20).values[:, -1].float() - 0.01
    output, status = drawn_from(rescored(case, threshold, INF))
    assert (status[:-1] == 1).all()
    some = take(case.params, torch.arange(6, device=device))
    truncation = some.truncation
    rows = (some.temperature, some.seed, some.position, truncation.top_k, truncation.top_p, truncation.min_p)
    want = truncated_sample_ref(case.edited[:6], *rows)
    assert torch.equal(output.token_ids[:6][~want.near_tie], want.token[~want.near_tie])


# --- truncated rows, all launches together --------------------------------------------------------------------------


def screened(
    num_rows: int,
    vocab: int,
    device,
    spread: float = 1.0,
    wider: float = 1.0,
    hidden: int = 128,
    wide_groups: int = TRUNCATION.wide_groups,
    **limit,
):
    """Draw rows with the same limits on logits of a deviation of 3 x ``spread``, with a bound ``wider`` times as large
    as needed. Tokens must be the fused pass's. Returns the draw and the number of groups read."""
    case = rounding_case(num_rows, vocab, device, torch.bfloat16, hidden=hidden)
    case = dataclasses.replace(case, hidden=case.hidden * spread)
    case = case.with_params(
        temperature=torch.ones(num_rows, device=device), truncation=limits(num_rows, device, **limit)
    )
    copy = Int8Head(case.head)
    copy.operands.error.mul_(wider)
    config = dataclasses.replace(TRUNCATION, wide_groups=wide_groups)
    drawn = draw("screened", case, int8_head=copy, truncation_config=config)
    assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)
    return drawn, counted(drawn)[ScreenCounter.GROUPS]


@pytest.mark.slow
def test_a_small_top_k_is_answered_from_a_part_of_the_head(device):
    drawn, groups = screened(3, 16_000, device, top_k=20)
    assert (drawn.status == 1).all()
    assert groups < 1000 / 2, "of 1000 groups, for 3 rows together"


def test_a_head_of_fewer_blocks_than_the_top_k_is_read_once(device):
    drawn, groups = screened(3, 784, device, hidden=64, top_k=20, top_p=0.95)
    assert (drawn.status == 1).all() and groups == 784 / 16


@pytest.mark.slow
def test_what_the_largest_groups_are_rules_out_more_than_what_they_are_at_least(device, monkeypatch):
    """The second bound, taken after the certain groups are read, leaves less than half as many groups to read."""
    _, groups = screened(1, 20_000, device, wider=8, top_k=8)
    bound = screened_sample.bound_truncated
    monkeypatch.setattr(screened_sample, "bound_truncated", lambda *given, rescored=False: rescored or bound(*given))
    assert groups < screened(1, 20_000, device, wider=8, top_k=8)[1] / 2


@pytest.mark.slow
def test_ids_are_read_one_by_one_and_bring_back_the_groups_that_they_reach_for(device, monkeypatch):
    """They are fewer bytes of the head than their whole groups, which are read without that."""
    num_rows, groups = 3, []
    for most in (MAX_ID_ROWS, 0):
        monkeypatch.setattr(screened_sample, "MAX_ID_ROWS", most)
        case = rounding_case(num_rows, 8000, device, torch.bfloat16, hidden=96)
        case = case.with_params(
            temperature=torch.ones(num_rows, device=device), truncation=limits(num_rows, device, top_k=12)
        )
        copy = Int8Head(case.head)
        copy.operands.error.mul_(6)
        drawn = draw("screened", case, int8_head=copy)
        assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)
        groups.append(counted(drawn)[ScreenCounter.GROUPS])
    assert groups[0] < 0.7 * groups[1], groups


@pytest.mark.slow
def test_reading_the_groups_whose_mass_is_known_least_answers_rows_without_the_whole_head(device, monkeypatch):
    limit = {"spread": 1.2, "wider": 8, "top_k": 40, "top_p": 0.5}
    drawn, groups = screened(12, 8000, device, **limit)
    draw_once = screened_sample.draw_rescored
    monkeypatch.setattr(
        screened_sample, "draw_rescored", lambda *given, again=False: again or draw_once(*given, again=again)
    )
    without, all_groups = screened(12, 8000, device, **limit)
    assert (drawn.status == 1).all() and (without.status > 1).any()
    assert groups < 0.8 * all_groups


@pytest.mark.slow
def test_limits_are_answered_where_few_tokens_matter_and_else_from_the_whole_head(device):
    assert (screened(4, 6000, device, top_k=20, top_p=0.95)[0].status == 1).float().mean() >= 0.75
    assert (screened(4, 6000, device, top_k=20, top_p=0.95, min_p=0.01)[0].status == 1).all(), "min-p after top-k"
    assert (screened(2, 16_000, device, spread=2.0, min_p=0.2)[0].status == 1).all()
    assert (screened(2, 16_000, device, spread=3.0, top_p=0.5)[0].status == 1).any()
    flat, groups = screened(2, 6000, device, spread=0.1, top_p=0.9)
    assert (flat.status > 1).all() and groups >= 375, "all of the head is read where all of it matters"


@pytest.mark.slow
def test_a_row_that_is_left_does_not_make_the_others_read_more(device):
    case = rounding_case(2, 6000, device, torch.bfloat16, hidden=128)
    case.hidden[1] *= 0.1
    case = case.with_params(temperature=torch.ones(2, device=device), truncation=limits(2, device, top_k=10))
    few = draw("screened", case)
    case.params.truncation.top_k[1], case.params.truncation.top_p[1] = 0, 0.9
    truncated = draw("screened", case)
    assert truncated.status[0] == 1 < truncated.status[1] and truncated.token_ids[0] == few.token_ids[0]
    assert counted(truncated)[ScreenCounter.GROUPS] >= 375 > counted(few)[ScreenCounter.GROUPS]


@pytest.mark.slow
def test_a_bound_that_is_wide_is_late_and_not_wrong(device):
    drawn, _ = screened(8, 6000, device, wider=12, hidden=96, wide_groups=1, top_k=8, top_p=0.04)
    assert (drawn.status > 1).any(), "their mass is not known well enough"
    assert (drawn.status == 1).any(), "the largest logit is allowed for every mass"


@pytest.mark.slow
def test_what_min_p_allows_below_the_groups_that_the_draw_has_room_for_is_drawn_too(device):
    """The screen's lower bounds are below the logits. A logit that min-p allows may thus be above every unread group
    and still below the last group that the draw has looked at."""
    for wider in (1, 20):
        drawn, _ = screened(6, 16_000, device, spread=0.5, wider=wider, hidden=64, min_p=0.05)
        assert (drawn.status > 1).any(), "too many groups, and so the whole head"


@pytest.mark.slow
def test_a_workspace_that_counts_elsewhere_counts_there(device):
    counters = torch.full((len(ScreenCounter),), 100, dtype=torch.int64, device=device)
    case = make_case(3, 500, device)
    screen = ScreenWorkspace(32, 32, 3, device, counters)
    draw("screened", case, screen=screen)
    assert counters[ScreenCounter.ROWS] == 103 and counters[ScreenCounter.ROW_BLOCKS] == 101
    assert screen.num_bytes > 0 and LogitsSpec(500).num_groups == screen.num_groups
