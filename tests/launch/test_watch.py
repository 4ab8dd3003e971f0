"""Ranks that live and do nothing: who is to blame, and who only waits."""

from __future__ import annotations

import itertools
import time

import pytest

from plait.launch import monitor
from plait.launch.failures import Ended, WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.watch import Stillness, Watch, stalled_of
from tests.launch.workers import Echo, until_there, waiter

LIMIT_S = 60.0
STALLED_S = 0.4


def test_a_rank_is_still_while_its_number_stays():
    numbers = [0, 0, 4]
    still = Stillness(3, lambda: numbers, 2.0)
    for _ in range(4):
        still.look(1.0)
    assert still.seconds == [0.0, 0.0, 3.0], "the first look begins the clock; 0 has not begun"
    assert still.suspects == [2]
    numbers[0], numbers[2] = 1, 5
    still.look(1.0)
    assert (still.seconds, still.suspects) == ([0.0, 0.0, 0.0], [])
    still.look(1.0)
    assert still.seconds == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("suspects", "waits_for", "blamed"),
    [
        ([0, 1], {0: "rank 1 (actor.train)"}, 1),
        ([0], {0: "rank 1 (actor.train)"}, None),  # rank 1 goes on
        ([0, 1, 2], {0: "rank 1 (a)", 1: "rank 3 (b)", 2: "ranks 0, 1 (c)"}, None),  # all for rank 3, in the end
        ([1, 2], {1: "rank 2 (tp sum)", 2: "rank 1 (tp sum)"}, 1),  # for each other, while rank 0 asks for samples
        ([0, 1, 2], {1: "rank 0 (the next command)", 2: "rank 0 (the next command)"}, 0),
        ([1, 2], {1: "ranks 2, 3 (sum of 40 bytes)"}, 2),
    ],
)
def test_who_is_to_blame(suspects, waits_for, blamed):
    assert stalled_of(suspects, waits_for, excuses_silent=False) == blamed


@pytest.mark.parametrize(
    ("suspects", "waits_for", "blamed"),
    [
        ([1], {}, None),  # rank 1 waits on its device, for one that goes on perhaps
        ([1, 2], {2: "rank 1 (the next command)"}, None),  # so rank 2 waits for it
        ([0, 1, 2], {1: "rank 2 (move)", 2: "rank 1 (move)"}, 1),  # who waits for each other needs no device for that
    ],
)
def test_on_devices_who_says_nothing_is_not_to_blame_while_others_go_on(suspects, waits_for, blamed):
    assert stalled_of(suspects, waits_for, excuses_silent=True) == blamed


def test_ranks_on_devices_are_excused_as_long_as_one_goes_on():
    numbers = [0, 7, 7]
    stills = [Stillness(3, lambda: numbers, 2.0, on_devices=on_devices) for on_devices in (True, False)]
    for second in range(6):
        numbers[1] += second < 3  # rank 0 has not begun, rank 2 does nothing from the beginning
        for still in stills:
            still.look(1.0)
        assert [still.excuses_silent for still in stills] == [second < 5, False]
    assert stills[0].suspects == [1, 2], "nobody goes on"


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_waits_on_its_device_is_not_stalled_while_another_goes_on(goes_on):
    numbers = itertools.count(1) if goes_on else itertools.repeat(3)
    launcher = LocalProcesses(
        watch=Watch(progress=lambda: [3, next(numbers)], stalled_after_s=STALLED_S, on_devices=True)
    )
    with launcher.start(Echo, 2) as group:
        waiting = group.submit(0, "nap", 4 * STALLED_S)
        group.submit(1, "nap", 4 * STALLED_S)
        if goes_on:
            assert waiting.result(LIMIT_S)
            return
        with pytest.raises(WorkerError, match=r"rank 0 stalled"):
            waiting.result(LIMIT_S)


def test_a_rank_that_hangs_is_found_and_who_waited_for_it(tmp_path):
    with LocalProcesses(watch=Watch(progress=lambda: [3, 5], stalled_after_s=STALLED_S)).start(Echo, 2) as group:
        waiting = waiter(group, 0, 1, tmp_path)
        group.submit(1, "hang_in_python")
        with pytest.raises(WorkerError, match=r"rank 1 stalled: no progress for .* s in `hang_in_python`") as caught:
            waiting.result(LIMIT_S)
        failure = caught.value.failure
        assert (failure.ended, failure.rank) == (Ended.STALLED, 1)
        assert "in hang_in_python" in failure.traceback
        assert [peer.waits_for for peer in failure.peers] == ["rank 1 (recv 3F0)"]


def test_a_rank_may_wait_for_one_that_goes_on(tmp_path, monkeypatch):
    """It is asked for whom again and again."""
    monkeypatch.setattr(monitor, "LOOK_S", 0.1)
    numbers = itertools.count(1)
    with LocalProcesses(watch=Watch(progress=lambda: [3, next(numbers)], stalled_after_s=STALLED_S)).start(
        Echo, 2
    ) as group:
        waiting = waiter(group, 0, 1, tmp_path)
        assert group.submit(1, "nap", 3 * STALLED_S).result(LIMIT_S)
        assert not waiting.done
        group.close(grace_s=0.0)  # rank 0 waits for ever


@pytest.mark.slow
def test_what_a_rank_waited_for_before_it_stood_still_is_nothing(tmp_path):
    """Rank 1 waits for rank 0, and is asked; then it goes on, and waits for rank 2, which goes on all the time."""
    numbers, going = [1, 1, 1], {0, 2}

    def progress():
        for rank in going:
            numbers[rank] += 1
        return tuple(numbers)

    go, waits = tmp_path / "go", tmp_path / "rank 1 waits"
    with LocalProcesses(watch=Watch(progress=progress, stalled_after_s=STALLED_S)).start(Echo, 3) as group:
        other = group.submit(1, "wait_for_two", 0, str(go), 2, str(waits))
        time.sleep(3 * STALLED_S)
        going = {0, 1, 2}
        go.touch()
        until_there(waits)
        waiting = waiter(group, 0, 1, tmp_path)
        going = {1, 2}
        time.sleep(STALLED_S / 2)
        going = {2}  # rank 0 is asked; a little later rank 1 stands still, too
        assert group.submit(2, "nap", 3 * STALLED_S).result(LIMIT_S)
        assert (waiting.done, other.done) == (False, False)
        group.close(grace_s=0.0)  # ranks 0 and 1 wait for ever
