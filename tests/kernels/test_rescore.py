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
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.reference import truncated_sample_ref
from sgl_flashsample.kernels.rescore import RescorePass, list_groups
from sgl_flashsample.kernels.screen import quantize_hidden, screen_head
from sgl_flashsample.kernels.screened_truncated import (
    bound_truncated,
    certify_truncated,
    draw_rescored,
    list_ids,
    read_groups,
    read_ids,
)
from sgl_flashsample.kernels.workspace import (
    ID_ROWS,
    MAX_ID_ROWS,
    LogitsBuffer,
    RowStatus,
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

    def shuffled(num_rows, workspace, config, *others):
        list_groups(num_rows, workspace, config, *others)
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
    drawn: int = -1  # by a racing row, of the made ones

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
    def bound(self) -> torch.Tensor:
        """``[B]`` float32."""
        key = self.workspace.operands.bound
        return torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)

    @bound.setter
    def bound(self, value: torch.Tensor) -> None:
        self.workspace.operands.bound.copy_(ordered(value))

    @property
    def status(self) -> torch.Tensor:
        return self.buffer.status[: len(self.case.hidden)]

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
    for name in ("max_logit_lo", "logit_hi", "lse_lo", "lse_hi", "id_hi"):
        getattr(workspace.operands, name).fill_(-55.0)  # stays in rows that are not truncated
    quantize_hidden(case.hidden, workspace, SCREEN)
    screen_head(case.head, copy, num_rows, case.params, workspace, SCREEN)
    buffer = LogitsBuffer(num_rows, vocab, torch.float32, device)
    buffer.logits.fill_(-77.0)
    buffer.group_max.fill_(-INF)
    buffer.status.copy_(torch.where(case.limited, int(RowStatus.OPEN), int(RowStatus.PLAIN)))
    return Stage(case, workspace, buffer)


@pytest.mark.parametrize("launch", ["bound", "certify"])
def test_a_bound_is_what_as_many_sets_of_groups_as_are_wanted_are_above(stage, launch):
    """``top_k`` sets where that is small, else as many as the draw has room for. Bisection finds the bound, so one in
    sixteen more may be above it. Rows that are not truncated keep what they have."""
    stage.bound, greedy = torch.full_like(stage.bound, -3.0), stage.case.params.temperature <= 0
    started = torch.full_like(stage.buffer.group_max, -77.0)
    stage.buffer.group_max.copy_(started)
    if launch == "bound":
        bound_truncated(*stage.arguments, stage.buffer, SCREEN, TRUNCATION)
        started[~greedy] = -INF
    else:
        certify_truncated(nothing_drawn(stage), *stage.arguments[1:], stage.buffer, SCREEN, TRUNCATION)
    lo = stage.rows_of_groups("max_logit_lo")[:-1]
    maxima = in_sets(lo, -INF).amax(1)
    above = (maxima > stage.bound[:-1, None]).sum(1).tolist()
    small = TRUNCATION.candidate_groups // 2
    for k, num_above in zip(stage.case.params.truncation.top_k.tolist(), above, strict=False):
        wanted = k if 1 <= k <= small else small
        assert num_above == maxima.shape[1] or wanted <= num_above <= wanted + wanted // 16, (k, num_above)
    assert above[0] == 3 and above[5] == 5
    assert stage.bound[-1].item() == -3.0
    assert torch.equal(stage.buffer.group_max, started)


def test_rows_race_where_a_truncation_probably_allows_the_token_that_they_have_without_it(device):
    """The groups above the bound and top-p have half of the mass or more. Masses: one group in ten has a share."""
    num_rows, groups = 8, 320
    case = make_case(num_rows, groups * 16, device, dtype=torch.float32)
    temperature = torch.ones(num_rows, device=device)
    temperature[7] = 0.0
    top_p = torch.tensor([1.0, 1.0, 0.6, 0.4, 1.0, 0.45, 0.55, 1.0], device=device)
    share = torch.tensor([0.55, 0.45, 0.55, 0.55, 0.9, 0.9, 0.9, 0.9], device=device)
    truncation = dataclasses.replace(limits(num_rows, device, top_k=32), top_p=top_p)
    made = Stage(
        case.with_params(temperature=temperature, truncation=truncation),
        ScreenWorkspace(groups, 32, num_rows, device),
        LogitsBuffer(num_rows, groups * 16, torch.float32, device),
    )
    large = torch.arange(groups, device=device) % 10 == 0
    peaks = torch.where(large, 5.0, 1.0) + torch.arange(groups, device=device) / 1000
    made.rows_of_groups("max_logit_lo").copy_(peaks.expand(num_rows, -1))
    mass = torch.where(large, share[:, None] / 32, (1 - share[:, None]) / (groups - 32))
    made.rows_of_groups("lse_lo").copy_(mass.log() + 40.0)
    bound_truncated(*made.arguments, made.buffer, SCREEN, TRUNCATION)
    racing, open_row, plain = (int(one) for one in (RowStatus.RACING, RowStatus.OPEN, RowStatus.PLAIN))
    assert made.status.tolist() == [racing, open_row, racing, open_row, racing, open_row, racing, plain]


def nothing_drawn(stage: Stage) -> SampleOutput:
    output = SampleOutput.empty(len(stage.case.hidden), stage.case.hidden.device, False)
    output.scores.fill_(-INF)
    output.token_ids.fill_(-7)
    return output


def statuses(num_rows: int, device, *cycle: RowStatus) -> torch.Tensor:
    return torch.tensor([int(cycle[row % len(cycle)]) for row in range(num_rows)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("which", [None, RescorePass.FIRST, RescorePass.POSSIBLE, RescorePass.WIDE])
def test_groups_are_listed_once_per_block_of_rows_if_any_of_its_rows_flags_them(device, which):
    """By scores; in a truncated batch, rows that are open flag groups that surely reach their bound, then those that
    could and were not read; wide rows flag what is marked. Other rows flag none."""
    num_rows, vocab = 20, 1003  # two blocks of rows
    workspace, buffer = ScreenWorkspace(63, 32, num_rows, device), LogitsBuffer(num_rows, vocab, torch.float32, device)
    generator = torch.Generator().manual_seed(3)
    score, low, high = (torch.randn(num_rows, 63, generator=generator).to(device) for _ in range(3))
    for values in (score, low, high):
        values[:, ::9] = -INF
    workspace.operands.score_hi.copy_(score.T.flatten())
    workspace.operands.max_logit_lo.copy_(low.flatten())
    workspace.operands.logit_hi.copy_(high.flatten())
    read = torch.rand(num_rows, 63, generator=generator).to(device) < 0.3
    buffer.group_max.copy_(torch.where(read, high, -INF))
    buffer.status.copy_(statuses(num_rows, device, *RowStatus))
    threshold = torch.full((num_rows,), 1.0, device=device)
    threshold[3::6] = -INF  # a group without an allowed token is not flagged even so
    values = {None: score, RescorePass.FIRST: score, RescorePass.POSSIBLE: high, RescorePass.WIDE: low}[which]
    threshold[17] = values[17, 5]  # reached, not passed
    workspace.operands.threshold.copy_(ordered(threshold))
    workspace.operands.bound.copy_(ordered(threshold))
    workspace.operands.candidates.zero_()
    if which is None:
        list_groups(num_rows, workspace, SCREEN)
    else:
        list_groups(num_rows, workspace, SCREEN, buffer, which)
    open_rows, wide = (buffer.status == int(one) for one in (RowStatus.OPEN, RowStatus.WIDE))
    if which is RescorePass.FIRST:
        values = torch.where(open_rows[:, None], low, score)
    flags = (values >= threshold[:, None]) & (values > -INF)
    if which is RescorePass.POSSIBLE:
        flags &= open_rows[:, None] & ~(read & (high > -INF))
    elif which is RescorePass.WIDE:
        flags &= wide[:, None]
    assert flags.any()
    for block in range(2):
        rows = flags[16 * block : 16 * block + 16]
        count = int(workspace.operands.num_flagged[block])
        listed = workspace.operands.group_list[block * 63 :][:count].tolist()
        assert sorted(listed) == rows.any(0).nonzero()[:, 0].tolist()
        place = workspace.operands.group_place[block * 63 :]
        assert [int(place[group]) for group in listed] == list(range(count))
    first = which in (None, RescorePass.FIRST)
    assert torch.equal(workspace.operands.candidates, flags.sum(1).int() * first), "the first pass counts"


@pytest.mark.parametrize("which", [RescorePass.POSSIBLE, RescorePass.WIDE, RescorePass.ALL])
def test_groups_are_read_for_the_rows_that_need_them_and_for_no_others(stage, which):
    """The ends of what is known of them become exact, but where all are read."""
    num_rows = len(stage.case.hidden)
    stage.bound = stage.peaks.topk(3).values[:, -1] - 0.5
    needs = torch.tensor([True, False, True, False, False, True, False], device=stage.peaks.device)
    wanted = RowStatus.WIDE if which is RescorePass.WIDE else RowStatus.OPEN
    stage.status.copy_(torch.where(needs, int(wanted), int(RowStatus.ANSWERED)))
    ends = {name: stage.rows_of_groups(name).clone() for name in ("max_logit_lo", "logit_hi", "lse_lo", "lse_hi")}
    if which is RescorePass.ALL:
        read = needs[:, None].expand(-1, 63)
    else:
        flags = ends["logit_hi" if which is RescorePass.POSSIBLE else "max_logit_lo"] >= stage.bound[:, None]
        assert 3 <= flags[needs].any(0).sum() < 40
        read = flags[needs].any(0)[None] & needs[:, None]
    read_groups(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, SCREEN, stage.buffer, which)
    left = stage.buffer.logits.view(num_rows, -1, 16)
    assert torch.equal(left[read].double(), padded(stage.case.edited)[read])
    assert (left[~read] == -77.0).all() and (stage.buffer.group_max[~read] == -INF).all()
    assert torch.equal(stage.buffer.group_max[read], stage.peaks[read])
    changed = torch.zeros_like(read) if which is RescorePass.ALL else read
    assert_exact(stage, changed)
    for name, before in ends.items():
        assert torch.equal(stage.rows_of_groups(name)[~changed], before[~changed]), name
    assert not stage.workspace.operands.num_flagged.any() and not stage.workspace.operands.arrived.any()
    assert stage.workspace.operands.counters[ScreenCounter.GROUPS] == int(read.any(0).sum())


def assert_exact(stage: Stage, groups: torch.Tensor) -> None:
    """In these groups, bool ``[B, G]``, both ends that the screen left equal the value of the logits themselves."""
    temperature = stage.case.params.temperature.double().clamp(min=1e-3)[:, None, None]
    mass = (padded(stage.case.edited) / temperature).logsumexp(-1).float()
    for name in ("lse_hi", "lse_lo"):
        torch.testing.assert_close(stage.rows_of_groups(name)[groups], mass[groups], rtol=1e-6, atol=1e-6)
    for name in ("max_logit_lo", "logit_hi"):
        assert torch.equal(stage.rows_of_groups(name)[groups], stage.peaks[groups]), name


def test_ids_that_could_reach_the_bound_are_listed_and_their_groups_ruled_out(stage):
    """Only open rows list ids, and only of groups that have not been read."""
    num_rows, vocab = len(stage.case.hidden), stage.case.head.vocab_size
    stage.bound = stage.peaks.topk(5).values[:, -1] - 0.01
    stage.status[2] = int(RowStatus.ANSWERED)
    read = stage.peaks.argmax(1)
    stage.buffer.group_max[torch.arange(num_rows), read] = stage.peaks.amax(1)
    before = stage.rows_of_groups("logit_hi").clone()
    possible = could_reach(stage)
    reaching = ids_that_could_reach(stage)
    list_ids(num_rows, vocab, stage.workspace, stage.buffer, SCREEN)
    count = int(stage.workspace.operands.num_ids)
    listed = stage.workspace.operands.ids[:count].tolist()
    assert count >= 5 and sorted(listed) == reaching.any(0).nonzero()[:, 0].tolist()
    after = stage.rows_of_groups("logit_hi")
    assert (after[possible] == -INF).all() and torch.equal(after[~possible], before[~possible])


def could_reach(stage: Stage) -> torch.Tensor:
    """bool ``[B, G]``: unread groups of open rows with an upper end that reaches the bound."""
    open_rows, unread = stage.status == int(RowStatus.OPEN), stage.buffer.group_max == -INF
    return (stage.rows_of_groups("logit_hi") >= stage.bound[:, None]) & open_rows[:, None] & unread


def ids_that_could_reach(stage: Stage) -> torch.Tensor:
    """bool ``[B, V]``: ids of these groups with such an end."""
    num_rows, vocab = len(stage.case.hidden), stage.case.head.vocab_size
    id_hi = stage.workspace.operands.id_hi[: vocab * num_rows].view(vocab, num_rows).T.float()
    return (id_hi >= stage.bound[:, None]) & could_reach(stage).repeat_interleave(16, 1)[:, :vocab]


def groups_that_reach(stage: Stage, listed: torch.Tensor) -> torch.Tensor:
    """bool ``[B, G]``: groups of open rows with one of the listed ids, bool ``[B, V]``, that reaches the bound."""
    reaches = listed & (stage.case.edited >= stage.bound.double()[:, None])
    reaches &= (stage.status == int(RowStatus.OPEN))[:, None]
    return padded(reaches.float()).amax(-1) > 0


def test_an_id_that_does_reach_the_bound_brings_its_group_back(stage):
    vocab = stage.case.head.vocab_size
    stage.bound = stage.peaks.topk(5).values[:, -1]  # reached, not passed
    stage.status[2] = int(RowStatus.ANSWERED)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:400].int().to(stage.peaks.device)
    stage.workspace.operands.ids[:400], stage.workspace.operands.num_ids[:] = ids, 400
    stage.workspace.operands.logit_hi.fill_(-INF)
    read_ids(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, stage.buffer, SCREEN)
    listed = torch.zeros_like(stage.case.edited, dtype=torch.bool)
    listed[:, ids.long()] = True
    back = groups_that_reach(stage, listed)
    assert 3 <= back.sum() < 30
    assert torch.equal(stage.rows_of_groups("logit_hi"), torch.where(back, INF, -INF))
    assert not stage.workspace.operands.num_ids.any() and not stage.workspace.operands.ids_arrived.any()


def test_each_block_of_rows_has_a_list_of_ids_of_its_own(device):
    num_rows, vocab = ID_ROWS + 4, 1003
    stage = make_stage(num_rows, device)
    stage.bound = stage.peaks.topk(5).values[:, -1]
    reaching = ids_that_could_reach(stage)
    list_ids(num_rows, vocab, stage.workspace, stage.buffer, SCREEN)
    listed = torch.zeros(num_rows, vocab, dtype=torch.bool, device=device)
    for block, rows in enumerate((slice(0, ID_ROWS), slice(ID_ROWS, num_rows))):
        ids = stage.workspace.operands.ids[block * 1008 :][: int(stage.workspace.operands.num_ids[block])].long()
        assert sorted(ids.tolist()) == reaching[rows].any(0).nonzero()[:, 0].tolist()
        listed[rows, ids] = True
    stage.workspace.operands.logit_hi.fill_(-INF)
    read_ids(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, stage.buffer, SCREEN)
    back = groups_that_reach(stage, listed)
    assert torch.equal(stage.rows_of_groups("logit_hi"), torch.where(back, INF, -INF))
    assert not stage.workspace.operands.num_ids.any() and not stage.workspace.operands.ids_arrived.any()


def rescored(case: Case, threshold: torch.Tensor, width: float, dtype=torch.float32) -> Stage:
    """Groups that reach the threshold in the buffer, and bounds of each group's mass, ``width`` below and above it."""
    num_rows, vocab, device = len(case.hidden), case.head.vocab_size, case.hidden.device
    workspace = ScreenWorkspace(-(-vocab // 16), 32, num_rows, device)
    made = Stage(case, workspace, LogitsBuffer(num_rows, vocab, dtype, device))
    made.bound = threshold
    made.buffer.status.copy_(torch.where(case.limited, int(RowStatus.OPEN), int(RowStatus.PLAIN)))
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
    """Plain and racing rows get the best token of the groups whose scores are not ruled out. Open rows get none, and
    have the groups read that surely reach their bound. Logits that are read for any row of a block are left for all of
    its truncated rows, and what is known of them is exact."""
    racing, open_row = (int(one) for one in (RowStatus.RACING, RowStatus.OPEN))
    stage.status[:6] = torch.tensor([racing, open_row] * 3, device=stage.peaks.device)
    best = stage.score_hi.argmax(0)
    stage.score_hi[best[[0, 6]], :] = -INF  # of two rows
    stage.bound = stage.peaks.topk(4).values[:, -1] - 0.5
    threshold = torch.where(stage.status == open_row, INF, stage.score_hi.topk(3, 0).values[-1])
    stage.workspace.operands.threshold.copy_(ordered(threshold))
    by_score = threshold[:, None] <= stage.score_hi.T
    certain = (stage.rows_of_groups("max_logit_lo") >= stage.bound[:, None]) & (stage.status == open_row)[:, None]
    flagged = (by_score | certain).any(0)
    assert certain.any() and flagged.sum() < 60
    output = rescore.rescore_groups(
        stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, config, stage.buffer
    )
    left, truncated = stage.buffer.logits.view(7, -1, 16), stage.status < 0
    read = flagged[None] & truncated[:, None]
    assert torch.equal(left[read].double(), padded(stage.case.edited)[read]) and (left[~read] == -77.0).all()
    assert_exact(stage, read)
    some = take(stage.case.params, torch.tensor([0, 2, 4, 6], device=read.device))
    logits = torch.where(flagged[:, None], padded(stage.case.edited)[[0, 2, 4, 6]], -INF).flatten(1)
    unlimited = limits(4, read.device)
    want = truncated_sample_ref(
        logits, some.temperature, some.seed, some.position, unlimited.top_k, unlimited.top_p, unlimited.min_p
    )
    assert torch.equal(output.token_ids[[0, 2, 4, 6]][~want.near_tie], want.token[~want.near_tie])
    assert (output.scores[[1, 3, 5]] == -INF).all()


@in_chunks_and_listed
def test_open_rows_have_all_their_groups_read_whatever_the_scores_are(stage, config):
    """A plain row of the block reads its best group first, and its score rules the others out."""
    config = dataclasses.replace(config, rescore_v=32, chunk=64)
    stage.bound = stage.peaks.topk(20).values[:, -1]
    stage.workspace.operands.threshold.copy_(ordered(torch.where(stage.case.limited, INF, -99.0)))
    stage.score_hi.fill_(-98.0)
    certain = (stage.rows_of_groups("max_logit_lo") >= stage.bound[:, None])[:-1].any(0)
    assert certain.sum() > 20
    rescore.rescore_groups(stage.case.hidden, stage.case.head, stage.case.params, stage.workspace, config, stage.buffer)
    assert (stage.buffer.group_max[:-1, certain] > -INF).all()


# Rows of made logits: 40 from 9.0 down in steps of 0.25, each in a group of its own, and -9.0 beside them.
def made_race(device, drawn: int, unread: tuple[int, ...] = (), above: int = 1, num_rows: int = 1, **limit) -> Stage:
    """A racing row that has drawn its ``drawn``-th largest logit. unread: those whose group was not read; ``above`` of
    such a group's ids have an end above all logits, and its mass is known to within a factor of e^0.1."""
    values = torch.full((512, 16), -9.0)
    values[:40, 0] = 9.0 - 0.25 * torch.arange(40)
    case = spelled_out(values.flatten().tolist(), num_rows, device)
    case = case.with_params(
        temperature=torch.ones(num_rows, device=device), truncation=limits(num_rows, device, **limit)
    )
    made = rescored(case, torch.full((num_rows,), -99.0, device=device), 0.0)
    made.rows_of_groups("max_logit_lo").copy_(made.peaks)
    made.rows_of_groups("logit_hi").copy_(made.peaks)
    groups = list(unread)
    made.buffer.group_max[:, groups] = -INF
    made.rows_of_groups("logit_hi")[:, groups] = 20.0
    made.rows_of_groups("lse_hi")[:, groups] += 0.1
    made.rows_of_groups("lse_lo")[:, groups] -= 0.1
    if num_rows <= MAX_ID_ROWS:
        id_hi = made.workspace.operands.id_hi.view(512, 16, num_rows)
        id_hi.fill_(-8.0)
        id_hi[groups, :above] = 20.0
    made.buffer.status.fill_(int(RowStatus.RACING))
    made.drawn = drawn
    return made


def is_certified(made: Stage) -> bool:
    output = nothing_drawn(made)
    output.scores.fill_(1.0)
    output.token_ids.fill_(16 * made.drawn)
    certify_truncated(output, *made.arguments[1:], made.buffer, SCREEN, TRUNCATION)
    assert (output.token_ids == 16 * made.drawn).all(), "the token stays"
    answered = made.status == int(RowStatus.ANSWERED)
    assert ((made.status == int(RowStatus.OPEN)) | answered).all() and answered.any() == answered.all()
    return bool(answered.all())


def mass_above(drawn: int) -> float:
    weights = torch.full((512 * 16,), -9.0, dtype=torch.float64)
    weights[:40] = 9.0 - 0.25 * torch.arange(40)
    weights = weights.softmax(0)
    return float(weights[:drawn].sum())


CERTIFIED = {
    "top-k": (7, (), 0, {"top_k": 8}, True),
    "one more than top-k": (7, (), 0, {"top_k": 7}, False),
    "an unread group of small ids": (7, (20,), 0, {"top_k": 8}, True),
    "an id that may be larger": (7, (20,), 1, {"top_k": 8}, False),
    "four that may be": (7, (20, 3), 2, {"top_k": 11}, True),
    "one more than that": (7, (20, 3), 2, {"top_k": 10}, False),
    "top-p": (7, (), 0, {"top_p": 0.01 + mass_above(7)}, True),
    "more than top-p": (7, (), 0, {"top_p": mass_above(7) - 0.01}, False),
    "a mass that may be larger": (7, (3,), 1, {"top_p": 0.001 + mass_above(7)}, False),
    "and cannot be so much larger": (7, (3,), 1, {"top_p": 0.03 + mass_above(7)}, True),
    "the largest": (0, (), 0, {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}, True),
    "perhaps the largest": (0, (5,), 1, {"top_p": 1e-6}, False),
    "min-p": (7, (), 0, {"min_p": 0.17}, True),
    "below min-p": (7, (), 0, {"min_p": 0.18}, False),
    "perhaps below min-p": (7, (20,), 1, {"min_p": 0.17}, False),
    "top-p of top-k": (7, (), 0, {"top_k": 20, "top_p": 0.99, "min_p": 0.01}, False),
}


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_token_is_certified_if_the_limits_allow_it_whatever_was_not_read(device, name):
    """Seven logits are larger than the eighth. An unread group counts as many ids as have an end above it, and its mass
    at the larger end. min-p: e^-1.75 = 0.174 of the largest. With all three limits, top-p is of what top-k has left,
    which is not known: only the largest logit is sure."""
    drawn, unread, above, limit, certified = CERTIFIED[name]
    assert is_certified(made_race(device, drawn, unread, above, **limit)) == certified


def test_ends_of_masses_that_were_not_read_make_a_token_uncertain(device):
    """All groups but those of the larger logits have ends e^0.5 apart: top-p is met by what they have at least."""
    for top_p, certified in ((0.02 + mass_above(7), False), (0.08 + mass_above(7), True)):
        made = made_race(device, 7, top_p=top_p)
        small = made.peaks[0] <= 9.0 - 0.25 * 7
        made.rows_of_groups("lse_hi")[:, small] += 0.5
        made.rows_of_groups("lse_lo")[:, small] -= 0.5
        assert is_certified(made) == certified


def test_a_token_with_more_larger_groups_than_can_be_listed_is_not_certified(device):
    made = made_race(device, 39, top_k=4096)
    assert is_certified(made)
    made = made_race(device, 39, tuple(range(40, 40 + TRUNCATION.candidate_groups)), 0, top_k=4096)
    assert not is_certified(made)


def test_in_a_batch_without_ends_of_single_ids_all_of_an_unread_group_may_be_larger(device):
    for top_k, certified in ((22, False), (24, True)):
        made = made_race(device, 7, (20,), 1, num_rows=MAX_ID_ROWS, top_k=top_k)
        assert is_certified(made)
        made = made_race(device, 7, (20,), 1, num_rows=MAX_ID_ROWS + 1, top_k=top_k)
        assert is_certified(made) == certified


def test_of_equal_scores_a_certified_row_takes_the_lowest_id_as_other_truncated_rows_do(device):
    """At a temperature so low that the score of a group has no digits for the noise inside it."""
    values = [{37: 40.0, 41: 40.0, 44: 40.0}.get(i, 0.0) for i in range(320)]
    case = spelled_out(values, 24, device).with_params(
        temperature=torch.full((24,), 1e-6, device=device), truncation=limits(24, device, top_k=5)
    )
    drawn = draw("screened", case)
    assert (drawn.status == 1).all() and (drawn.token_ids != 37).any()
    assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)


def test_rows_that_do_not_race_or_have_no_token_are_not_certified(device):
    made = made_race(device, 0, top_k=4)
    made.buffer.status.fill_(int(RowStatus.OPEN))
    assert not is_certified(made)
    made = made_race(device, 0, top_k=4)
    certify_truncated(nothing_drawn(made), *made.arguments[1:], made.buffer, SCREEN, TRUNCATION)
    assert made.status.tolist() == [int(RowStatus.OPEN)]


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
    """Most rows choose less than half of the groups, those whose ends are furthest apart. Other rows choose none. With
    the mass of the chosen groups, a second draw answers for the rows that chose, and leaves the others alone."""
    made, mass = with_unknown_mass(device)
    hi, lo, marks = (made.rows_of_groups(name) for name in ("lse_hi", "lse_lo", "max_logit_lo"))
    output, status = drawn_from(made)
    wide, status = status == -2, status.clone()
    assert status[0] == 1 and wide.sum() >= 3 and (marks[~wide] == 7.0).all()
    chosen = marks[wide] == INF
    assert (chosen.sum(1) > 0).all() and chosen.sum(1).median() < mass.shape[1] / 2
    hi[wide], lo[wide] = (ends[wide].where(~chosen, mass[wide]) for ends in (hi, lo))
    output.token_ids.fill_(-7)
    draw_rescored(output, *made.arguments[1:], made.buffer, SCREEN, TRUNCATION, again=True)
    want, again = expected(made.case), made.buffer.status[: len(status)]
    assert (again[wide] == 1).all() and torch.equal(again[~wide], status[~wide])
    assert torch.equal(output.token_ids[wide & ~want.near_tie], want.token[wide & ~want.near_tie])
    assert (output.token_ids[~wide] == -7).all()


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
    drawn = draw("screened", case, int8_head=copy)
    assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)
    return drawn, counted(drawn)[ScreenCounter.GROUPS]


@pytest.mark.slow
def test_a_small_top_k_is_answered_from_a_part_of_the_head(device):
    drawn, groups = screened(3, 16_000, device, top_k=20)
    assert (drawn.status == 1).all()
    assert groups < 1000 / 2, "of 1000 groups, for 3 rows together"


def test_a_head_of_fewer_blocks_than_the_top_k_is_read_once(device):
    drawn, groups = screened(3, 784, device, hidden=64, top_k=20, top_p=0.4)
    assert (drawn.status == 1).all() and groups == 784 / 16


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
    _, groups = screened(8, 6000, device, hidden=96, top_k=8, top_p=0.04)
    assert groups < screened(8, 6000, device, wider=12, hidden=96, top_k=8, top_p=0.04)[1] / 2


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
