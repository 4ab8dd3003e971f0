"""What an error of a group says of the ranks."""

from __future__ import annotations

from dataclasses import replace

from plait.launch.failures import Ended, Failure, PeerState, as_said


def test_seconds_are_those_of_the_method_and_of_nothing_in_it() -> None:
    """A rank of a run has one method, which takes as long as the run: what it does there has another age."""
    peers = (PeerState(0, "run", 310.3, waits_for="rank 1 (RECV 1)"), PeerState(2, "run", 310.4))
    failure = Failure(Ended.DIED, 1, "run", 310.2, "was killed by SIGKILL", peers=peers)
    assert str(failure) == (
        "rank 1 was killed by SIGKILL in `run` after 310.2 s\n"
        "  meanwhile rank 0 was in `run` for 310.3 s, waiting for rank 1 (RECV 1)\n"
        "  meanwhile rank 2 was in `run` for 310.4 s"
    )
    said = ["actor (move)", "actor.train", ""]
    assert str(as_said(said, replace(failure, peers=tuple(as_said(said, peer) for peer in peers)))) == (
        "rank 1 was killed by SIGKILL in `actor.train`\n"
        "  meanwhile rank 0 was in `actor (move)`, waiting for rank 1 (RECV 1)\n"
        "  meanwhile rank 2 was in `run`"
    )
    assert as_said([], failure) == as_said(["", "", ""], failure) == failure, "nobody has said anything yet"


def test_ranks_in_the_same_state_are_told_together() -> None:
    """Hundreds may wait for the one that was lost, most of them in the same place."""
    waits = {"waits_for": "rank 9 (SUM)", "node": "node 1"}
    peers = [PeerState(rank, "actor.train", 5.0 + 0.01 * rank, stack="train.py:7", **waits) for rank in (0, 1, 2, 5)]
    peers += [PeerState(3, "actor.train", 5.0, stack="train.py:9", **waits), PeerState(4, "actor.train", 5.0, "rank 8")]
    peers += [PeerState(6, "", 0.0), PeerState(7, "actor.train", 5.0, raised="ConnectionError")]
    assert str(Failure(Ended.DIED, 9, "actor.train", 4.2, "was killed", peers=tuple(peers))) == (
        "rank 9 was killed in `actor.train` after 4.2 s\n"
        "  meanwhile ranks 0-3, 5 on node 1 were in `actor.train` for 5.0 s, waiting for rank 9 (SUM)\n"
        "  meanwhile rank 4 was in `actor.train` for 5.0 s, waiting for rank 8\n"
        "  meanwhile rank 6 was idle\n"
        "  meanwhile rank 7 raised in `actor.train` after 5.0 s: ConnectionError"
    )


def test_where_ranks_are_is_told_of_those_that_do_not_say_whom_they_wait_for() -> None:
    """Of others only where ranks wait for each other: else pages of where all wait would explain one lost rank."""
    peers = [PeerState(rank, "actor.train", 5.0, stack=f"train.py:{7 + rank // 2}") for rank in (0, 1, 2)]
    peers.append(PeerState(3, "actor.train", 5.0, "rank 4 (SUM)", stack="peers.py:3"))
    failure = Failure(Ended.DIED, 4, "actor.train", 4.2, "was killed", peers=tuple(peers))
    alone = "ranks 0-1:\n  | train.py:7\nrank 2:\n  | train.py:8"
    assert str(failure).endswith(alone)
    assert str(replace(failure, ended=Ended.STALLED)).endswith(f"{alone}\nrank 3:\n  | peers.py:3")
