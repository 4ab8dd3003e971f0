"""Training as the leader has ranks do it. Nodes and columns go by the number that each rank's own trace gave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Column, Dataflow, Level, Node
from plait.layout.mesh import Layout
from plait.policy.turns import ALONE, Turn
from plait.schedule.fused import FusedOrder
from plait.schedule.work import Work
from plait.training.mini_batch import LossCall, mask_of
from plait.training.row_shares import drawn_batches, shares_of
from plait.training.together import train_together
from plait.training.trainer import BegunTraining, Trainer
from plait.workers.messages import RESULT, Message
from plait.workers.offload_manager import Need
from plait.workers.rank_state import RankState
from plait.workers.row_stubs import Arrays, by_rank, pack_shares, unpack_share


@dataclass(frozen=True)
class TrainCall:
    """`Trainer.train` of a TRAIN node, or `evaluate`; the result is metrics."""

    node: Node
    rows: Rows
    step: int | None
    """None: evaluate."""
    temperature: float | None = None
    batch_values: Mapping[Column, FloatArray] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return str(self.node.role)

    @property
    def call(self) -> str:
        return self.node.call

    kind: ClassVar[str] = "train"
    turn: ClassVar[Turn] = ALONE

    @property
    def copied(self) -> None:
        return None

    @property
    def trained(self) -> tuple[str, ...]:
        return () if self.step is None else (self.role,)

    @property
    def needs(self) -> tuple[Need, ...]:
        """To evaluate takes no optimizer."""
        return ((self.role, "home" if self.step is None else "train"),)

    def layout(self, rank_state: RankState) -> Layout:
        layout = rank_state.places[self.role].train
        assert layout is not None, f"{self.call}: role `{self.role}` has no place to train"
        return layout

    def run(self, rank_state: RankState) -> Work[dict[str, float]]:
        yield from rank_state.offloads.wanting(*self.needs)
        trainer = self._trainer(rank_state)
        if self.step is None:
            return (yield from trainer.evaluate(self.rows, self._loss))
        return (yield from trainer.train(self.rows, self._loss, **self._how))

    def begun(self, rank_state: RankState) -> BegunTraining:
        """This rank's part of it, to be done together with that of others."""
        return self._trainer(rank_state).begin(self.rows, self._loss, **self._how)

    def _trainer(self, rank_state: RankState) -> Trainer:
        trainer = rank_state.roles[self.role].trainer
        assert trainer is not None, f"{self.call}: rank {rank_state.rank} has no part in it"
        return trainer

    @property
    def _loss(self) -> LossCall:
        return LossCall.of(self.node, batch_values=self.batch_values, temperature=self.temperature)

    @property
    def _how(self) -> dict[str, int]:
        how, step = self.node.training, self.step
        assert step is not None, f"{self.call} evaluates"
        return {"mini_batches": how.mini_batches, "epochs": how.epochs, "step": step}

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader, with the rows of its share.

        Raises:
            RunError: the mask holds something other than 0 and 1.
        """
        of_rows, of_batch = _columns(self.node)
        values = tuple(np.asarray(self.batch_values[column], dtype=np.float64) for column in of_batch)
        header = {"node": self.node.id, "step": self.step, "temperature": self.temperature}
        header |= {"values": len(values)}
        mask = self.node.inputs.get("mask")
        mask_of(self.rows, mask, self.role)
        rows = self.rows.ordered()

        def arrays_of(ways: int) -> list[Arrays]:
            shares = shares_of(
                rows,
                self._batches(rows, rank_state),
                ways,
                whole_groups=self.node.training.whole_groups,
                pair_tokens=rank_state.pair_tokens[self.role],
            )
            return [(*values, *arrays) for arrays in pack_shares(rows, of_rows, shares, mask)]

        return by_rank(self.layout(rank_state), self.kind, header, arrays_of)

    def _batches(self, rows: Rows, rank_state: RankState) -> Iterable[Sequence[int]]:
        """Positions of the ordered rows that are divided over the dp ranks together, as `Trainer` does it."""
        if self.step is None:
            return [range(len(rows))]
        how, seed = self.node.training, rank_state.recipe.seed
        return drawn_batches(
            rows, how.mini_batches, epochs=how.epochs, seed=seed, step=self.step, whole_groups=how.whole_groups
        )

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> TrainCall:
        h = message.header
        node = flow.nodes[h["node"]]
        of_rows, of_batch = _columns(node)
        values = dict(zip(of_batch, message.arrays[: h["values"]], strict=True))
        rows = unpack_share(message.arrays[h["values"] :], of_rows, node.inputs.get("mask"))
        return cls(node, rows, h["step"], h["temperature"], values)

    @staticmethod
    def answer(result: Mapping[str, float]) -> Message:
        return Message({"metrics": dict(result)}, kind=RESULT)

    @staticmethod
    def result_of(message: Message) -> dict[str, float]:
        return dict(message.header["metrics"])


@dataclass(frozen=True)
class TrainTogetherCall:
    """Training calls of several roles, which one order of the plan computes on the ranks that they share; the result is
    the metrics of each."""

    calls: tuple[TrainCall, ...]
    """Calls of different roles, in the order of the flow."""

    kind: ClassVar[str] = "train together"
    turn: ClassVar[Turn] = ALONE

    @property
    def copied(self) -> None:
        return None

    @property
    def role(self) -> str:
        """For records that belong to none of them alone."""
        return self.calls[0].role

    @property
    def call(self) -> str:
        return " + ".join(call.call for call in self.calls)

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(call.role for call in self.calls)

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(need for call in self.calls for need in call.needs)

    def layout(self, rank_state: RankState) -> Layout:
        return self._order(rank_state).layout

    def _order(self, rank_state: RankState) -> FusedOrder:
        order = rank_state.places[self.role].schedule
        assert isinstance(order, FusedOrder), f"{self.call}: the plan has no order of both"
        return order

    def run(self, rank_state: RankState) -> Work[list[dict[str, float]]]:
        yield from rank_state.offloads.wanting(*self.needs)
        order = self._order(rank_state)
        team = rank_state.joint_teams[order.layout]
        return (yield from train_together([call.begun(rank_state) for call in self.calls], order, team))

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader, that of each call behind the other.

        Raises:
            RunError: as of `TrainCall.messages`.
        """
        of_calls = [call.messages(rank_state) for call in self.calls]
        by_rank = {}
        for rank in of_calls[0]:
            mine = [messages[rank] for messages in of_calls]
            header = {"calls": [message.header for message in mine]}
            header |= {"arrays": [len(message.arrays) for message in mine]}
            by_rank[rank] = Message(header, tuple(array for message in mine for array in message.arrays), self.kind)
        return by_rank

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> TrainTogetherCall:
        calls, at = [], 0
        for header, count in zip(message.header["calls"], message.header["arrays"], strict=True):
            calls.append(TrainCall.of(Message(header, message.arrays[at : at + count]), flow))
            at += count
        return cls(tuple(calls))

    @staticmethod
    def answer(result: Sequence[Mapping[str, float]]) -> Message:
        return Message({"metrics": [dict(metrics) for metrics in result]}, kind=RESULT)

    @staticmethod
    def result_of(message: Message) -> list[dict[str, float]]:
        return [dict(metrics) for metrics in message.header["metrics"]]


def _columns(node: Node) -> tuple[list[Column], list[Column]]:
    """What a TRAIN node reads of its rows, and of the batch."""
    columns: Iterable[Column] = dict.fromkeys(column for name, column in node.inputs.items() if name != "keep")
    by_level: Sequence[list[Column]] = ([], [])
    for column in columns:
        by_level[column.level is Level.BATCH].append(column)
    return by_level[0], by_level[1]
