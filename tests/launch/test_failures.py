"""What an error of a group says of the ranks."""

from __future__ import annotations

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
    assert str(as_said(said, failure)).startswith("rank 1 was killed by SIGKILL in `actor.train`\n")
    assert [str(as_said(said, peer)) for peer in peers] == [
        "rank 0 was in `actor (move)`, waiting for rank 1 (RECV 1)",
        "rank 2 was in `run`",
    ]
    assert as_said([], failure) == as_said(["", "", ""], failure) == failure, "nobody has said anything yet"
