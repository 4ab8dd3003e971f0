"""Scoring as the leader has ranks do it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import ClassVar

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked, Score, Top
from plait.engines import ScoredBy
from plait.layout.mesh import Layout
from plait.policy.turns import Turn
from plait.schedule.plan import Mode
from plait.schedule.work import Work
from plait.training.micro_batches import shares_of
from plait.workers.messages import RESULT, Message
from plait.workers.offload_manager import Need
from plait.workers.rank_state import RankState
from plait.workers.row_stubs import Arrays, by_rank, pack_shares, unpack_share


@dataclass(frozen=True)
class ScoreCall:
    """`Trainer.score` over rows; the result is an array."""

    role: str
    what: Asked
    call: str
    rows: Rows
    temperature: float | None = None
    by: ScoredBy | None = None
    """Who computes all rows; None: all instances of the scoring layout do, each a share."""

    kind: ClassVar[str] = "score"

    @property
    def copied(self) -> Mode:
        return "score"

    @property
    def trained(self) -> tuple[str, ...]:
        return ()

    @property
    def turn(self) -> Turn:
        return Turn(0, is_behind=self.by is not None and self.by.is_behind)

    @property
    def needs(self) -> tuple[Need, ...]:
        return ((self.role, "score"),)

    def layout(self, rank_state: RankState) -> Layout:
        scoring = rank_state.places[self.role].scoring
        return scoring if self.by is None else scoring.instances()[self.by.instance]

    def run(self, rank_state: RankState) -> Work[FloatArray]:
        role_state = rank_state.roles[self.role]
        yield from rank_state.offloads.wanting(*self.needs)
        trainer = role_state.alone if self.by is not None else role_state.scorer or role_state.trainer
        assert trainer is not None, f"{self.call}: rank {rank_state.rank} has no part in it"
        scored = trainer.score(self.rows, self.what, temperature=self.temperature, call=self.call)
        return (yield from scored)

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader, with the rows of its share and without what nobody scores by."""
        top = self.what if isinstance(self.what, Top) else None
        header = {"role": self.role, "what": self.what.value, "top": top and astuple(top), "call": self.call}
        header |= {"temperature": self.temperature, "by": self.by and astuple(self.by)}
        samples = tuple(replace(sample, logprobs=(), token_versions=None) for sample in self.rows.samples)
        if self.what not in (Score.LOGPROBS, Score.ENTROPIES):
            samples = tuple(replace(sample, supports=None) for sample in samples)
        rows = Rows(samples, root_tokens=self.rows.root_tokens)

        def arrays_of(ways: int) -> list[Arrays]:
            pair_tokens = rank_state.pair_tokens[self.role]
            shares = shares_of(rows.ordered(), [range(len(rows))], ways, pair_tokens=pair_tokens)
            return pack_shares(rows, (), [sorted(rows.order[i] for i in share) for share in shares])

        return by_rank(self.layout(rank_state), self.kind, header, arrays_of)

    @classmethod
    def of(cls, message: Message) -> ScoreCall:
        h = message.header
        rows = unpack_share(message.arrays)
        by = h["by"] and ScoredBy(*h["by"])
        what = Top(*h["top"]) if h["top"] else Score(h["what"])
        return cls(h["role"], what, h["call"], rows, h["temperature"], by)

    @staticmethod
    def answer(result: FloatArray) -> Message:
        return Message({}, (result,), RESULT)

    @staticmethod
    def result_of(message: Message) -> FloatArray:
        return message.arrays[0]
