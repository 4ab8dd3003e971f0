"""How fast a step on two workers can be at best, from the phases of one-worker steps and the bytes that have to move.

All seconds are of one step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phases:
    """Where the time of a step went. Of several ranks each phase is the busiest rank's."""

    step: float
    generate: float
    score: float
    train: float
    """Forwards and backwards."""
    optimizer: float
    score_micro_batches: int = 1
    train_micro_batches: int = 1

    @property
    def other(self) -> float:
        """Rewards, advantages, the controller: what one process does whatever the plan."""
        return max(0.0, self.step - self.generate - self.score - self.train - self.optimizer)


def data_parallel(whole: Phases, half: Phases, received_bytes: float, bytes_per_s: float, ways: int = 2) -> float:
    """Seconds of a step on `ways` workers that share all rows.

    Generation is measured, not divided: a decode step of half as many samples takes more than half the time t(B).
    Training, scoring and the optimizer (whose state is divided, ZeRO-1) divide at best evenly.

    Args:
        whole, half: steps of one worker over all rows, and over one worker's share of them.
        received_bytes: by one rank: gradients and new weights.
    """
    divided = (whole.score + whole.train + whole.optimizer) / ways
    return half.generate + divided + whole.other + received_bytes / bytes_per_s


def pipelined(
    whole: Phases,
    half: Phases,
    score_micro_batches: int,
    train_micro_batches: int,
    received_bytes: float,
    bytes_per_s: float,
    stages: int = 2,
) -> float:
    """Seconds of a step whose models are split into `stages`; generation is by as many instances.

    A pipeline of p equal stages takes (m + p - 1) / (m p) of the time of one worker for m micro-batches, whatever the
    schedule (GPipe, 1F1B: Narayanan et al. 2021, section 2.2). What passes between stages is hidden behind computation;
    the weights that the instances get after the step are not.

    Args:
        received_bytes: by one rank: new weights for its instance.
    """
    scored = whole.score * filled(score_micro_batches, stages)
    trained = whole.train * filled(train_micro_batches, stages)
    moved = received_bytes / bytes_per_s
    return half.generate + scored + trained + whole.optimizer / stages + whole.other + moved


def filled(micro_batches: int, stages: int) -> float:
    """The share of one worker's time that a pipeline of equal stages takes."""
    return (micro_batches + stages - 1) / (micro_batches * stages)
