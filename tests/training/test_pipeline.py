"""The executor on real processes: any valid schedule gives the gradients of the whole, in the order of its row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.errors import DataError
from plait.launch.group import Group
from plait.models.parallel.peers import FIRST_INNER_TAG, Peers
from plait.models.parallel.transfer import Transfer
from plait.policy.packing import MicroBatch
from plait.schedule.generators import gpipe, one_at_a_time, one_f_one_b, opposite
from plait.schedule.pipeline import Workload, fused_workload
from plait.schedule.schedule import Schedule, parse, with_transfers
from plait.schedule.validate import validate
from plait.training.pipeline import CALL_TAGS, RECEIVES_AHEAD, execute, forwards_only, message_lines, pipeline_of
from tests.cases import slow_but
from tests.training.batches import run_all
from tests.training.schedules import shuffled

RAGGED = (7, 1, 4, 9, 2, 5)


def ragged(num_stages: int, count: int = len(RAGGED)) -> Workload:
    micros = [MicroBatch(((i,),), tokens) for i, tokens in enumerate(RAGGED[:count])]
    return Workload((pipeline_of("actor", 1, range(num_stages), micros),), num_stages)


def check(four: Group, schedule: Schedule, workload: Workload) -> None:
    validate(schedule, workload)
    explicit = with_transfers(schedule)
    for in_order in (False, True):
        answers = four.submit(range(4), "pipeline", schedule, RAGGED, in_order).result(60.0)
        for rank, row in enumerate(explicit.rows):
            done, off = answers[rank]
            assert done == [action.id for action in row]
            assert off <= 1e-12


@pytest.mark.parametrize("rule", [gpipe, one_f_one_b, one_at_a_time])
@pytest.mark.parametrize("num_stages", slow_but([4], [2, 3, 4]))
def test_one_model(four, rule, num_stages):
    workload = ragged(num_stages)
    check(four, rule(workload), workload)


@pytest.mark.parametrize("seed", slow_but(range(4), range(12)))
def test_any_valid_order(four, seed):
    workload = ragged(2 + seed % 3)
    check(four, shuffled(workload, seed), workload)


def test_explicit_transfers_and_text(four):
    workload = ragged(4)
    check(four, with_transfers(one_f_one_b(workload)), workload)
    check(four, parse(one_f_one_b(workload).to_text()), workload)


def test_receives_may_stand_long_before_their_use(four):
    """They are posted ahead and end when their message comes: here what stands behind one makes it possible."""
    early = parse(
        "rank 0: 0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1\n"
        "rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    validate(early)
    answers = four.submit(range(4), "pipeline", early, RAGGED[:2]).result(60.0)
    assert [off <= 1e-12 for _, off in answers] == [True] * 4
    assert answers[0][0] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]


def test_receives_are_posted_ahead(four):
    """Before a rank waits for its first message it has asked for the next ones, as far as memory is spent on them."""
    counts = four.submit(range(4), "posted_ahead", gpipe(ragged(4)), RAGGED).result(60.0)
    assert counts == [RECEIVES_AHEAD] * 4


@pytest.mark.parametrize("seed", range(40))
def test_messages_in_one_order_meet_without_buffers(seed):
    """On a transport where a message passes only when both ends have come to it, in the order of posting."""
    if seed % 2:
        workload = fused_workload((4, 2 if seed % 4 == 1 else 4), (5, 5), (1.0, 1.0))
    else:
        workload = ragged(2 + seed % 3)
    schedule = with_transfers(shuffled(workload, seed))
    lines = {rank: message_lines(schedule, rank) for rank in range(schedule.num_ranks)}
    for rank, row in enumerate(schedule.rows):
        sends = [action for action in row if action.kind.lane == "send"]
        for peer, line in lines[rank].items():
            theirs = [one.waits[0] if one.kind.lane == "recv" else one.id for one in lines[peer][rank]]
            assert [one.waits[0] if one.kind.lane == "recv" else one.id for one in line] == theirs
            assert [one for one in line if one.kind.lane == "send"] == [one for one in sends if one in line]
    passed: set[str] = set()
    at = [0] * schedule.num_ranks
    posted = {(rank, peer): 0 for rank in lines for peer in lines[rank]}
    while any(place < len(row) for place, row in zip(at, schedule.rows, strict=True)):
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind.lane == "recv" and action.waits[0] not in passed:
                    peer = next(peer for peer in lines[rank] if action in lines[rank][peer])
                    posted[rank, peer] = max(posted[rank, peer], list(lines[rank][peer]).index(action) + 1)
                    break
                if action.kind.lane == "send":
                    peer = next(peer for peer in lines[rank] if action in lines[rank][peer])
                    posted[rank, peer] = max(posted[rank, peer], list(lines[rank][peer]).index(action) + 1)
                at[rank] += 1
                moved = True
        for rank, peer in posted:
            both = min(posted[rank, peer], posted[peer, rank])
            for one in list(lines[rank][peer])[:both]:
                name = one.waits[0] if one.kind.lane == "recv" else one.id
                moved |= name not in passed
                passed.add(name)
        assert moved, "ranks wait for each other for ever"


@pytest.mark.parametrize("seed", slow_but([1, 4], range(6)))
def test_two_models_in_opposite_directions(four, seed):
    """Where one has half as many stages, as two copies side by side."""
    workload = fused_workload((4, 2 if seed % 2 else 4), (len(RAGGED),) * 2, (1.0, 1.0), models=("actor", "critic"))
    schedule = opposite(workload)[seed // 2] if seed < 4 else shuffled(workload, seed)
    check(four, schedule, workload)


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_three_models_on_the_same_ranks(four, seed):
    """An actor, and two critics the other way, one of them as two copies."""
    rows = {("actor", 0): range(4), ("critic", 0): (3, 2, 1, 0), ("cost_critic", 0): (1, 0), ("cost_critic", 1): (3, 2)}
    micros = [MicroBatch(((i,),), tokens) for i, tokens in enumerate(RAGGED)]
    workload = Workload(tuple(pipeline_of(*key, ranks, micros) for key, ranks in rows.items()), 4)
    check(four, shuffled(workload, seed), workload)


def test_forwards_only_sends_on_without_end(four):
    """More micro-batches than are ever on their way at once."""
    tokens = [1 + i % 3 for i in range(40)]
    micros = [MicroBatch(((i,),), count) for i, count in enumerate(tokens)]
    workload = Workload((pipeline_of("", 0, range(4), micros),), 4)
    schedule = forwards_only(workload)
    validate(schedule)
    answers = four.submit(range(4), "pipeline", schedule, tokens).result(60.0)
    assert [len(done) for done, _ in answers] == [len(row) for row in with_transfers(schedule).rows]


class Ends:
    """The peers of one end of a pipeline of two: they write down the tags, and whatever is waited for is there."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tags: dict[str, int] = {}

    def isend(self, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        return self.irecv(tensor, peer, tag, what)

    def irecv(self, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        assert peer == 1 - self.index
        self.tags[what.replace("1RECV_F", "0SEND_F")] = tag
        return Transfer(tensor, lambda: None)


class Passing:
    """A stage that computes nothing."""

    def __init__(self, is_last: bool) -> None:
        self._is_last = is_last

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        return None if self._is_last else self.room(index)

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        raise AssertionError("forwards only")

    def room(self, index: int) -> Tensor:
        return torch.zeros(1, 1)

    def tokens(self, index: int) -> int:
        return 1


@pytest.mark.parametrize(("count", "in_a_row"), slow_but([(10, 4)], [(10, 4), (9000, CALL_TAGS)]))
def test_a_call_may_have_any_number_of_micro_batches(monkeypatch, count, in_a_row):
    """Scoring a large batch in small micro-batches takes thousands of them: each message has a tag of its own, the same
    at both ends."""
    monkeypatch.setattr("plait.training.pipeline.CALL_TAGS", in_a_row)
    micros = [MicroBatch(((i,),), 1) for i in range(count)]
    schedule = forwards_only(Workload((pipeline_of("ref", 0, range(2), micros),), 2))
    both = [Ends(0), Ends(1)]
    for end in both:
        run_all(execute(schedule, {("ref", 0): Passing(end.index == 1)}, end, name="ref.logprobs"))
    assert both[0].tags == both[1].tags
    assert len(set(both[0].tags.values())) == count
    assert max(both[0].tags.values()) < FIRST_INNER_TAG


def test_what_is_no_pipeline_is_refused():
    peers = Peers((0, 1), 0, "pp")
    with pytest.raises(DataError, match="expected forwards and backwards"):
        execute(parse("rank 0: 0F0 0STEP\nrank 1: 1F0"), {}, peers, name="x")
    with pytest.raises(DataError, match="0F1 on rank 0 waits for 1F0, but no message tells it of that"):
        execute(parse("rank 0: 0F0 0F1<1F0\nrank 1: 1F0 1F1"), {}, peers, name="x")
