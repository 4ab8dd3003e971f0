"""Which samples the doctor computes the plain way."""

from __future__ import annotations

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.rows import Rows
from plait.runtime.health.probe import MAX_TOKENS, chosen_samples


def test_a_long_reply_makes_a_sample_long() -> None:
    """Logits of all its tokens are held at once."""

    def sample(uid: int, *replies: Reply) -> Sample:
        return Sample(Prompt(uid, "", (1,)), 0, (4, 5), (-1.0, -1.0), "", FinishReason.STOP, replies=replies)

    long = sample(0, Reply(1, (6,) * MAX_TOKENS))
    assert chosen_samples(Rows((long, sample(1), sample(2, Reply(1, (6, 7)))))) == [1, 2]
    assert chosen_samples(Rows((long,))) == [0]
