"""Training as the leader has ranks do it. Nodes and columns go by the number that each rank's own trace gave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

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
class LossOver:
    """Rows, and the loss of a TRAIN node over them: what is evaluated, or trained on."""

    node: Node
    rows: Rows
    temperature: float | None = None
    batch_values: Mapping[Column, FloatArray] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return str(self.node.role)

    @property
    def call(self) -> LossCall:
        return LossCall.of(self.node, batch_values=self.batch_values, temperature=self.temperature)

    def layout(self, rank_state: RankState) -> Layout:
        layout = rank_state.places[self.role].train
        assert layout is not None, f"{self.node.call}: role `{self.role}` has no place to train"
        return layout

    def trainer(self, rank_state: RankState) -> Trainer:
        trainer = rank_state.roles[self.role].trainer
        assert trainer is not None, f"{self.node.call}: rank {rank_state.rank} has no part in it"
        return trainer

    def messages(
        self, rank_state: RankState, kind: str, batches_of: Callable[[Rows], Iterable[Sequence[int]]], **header: int
    ) -> dict[int, Message]:
        """For each rank but the leader, with the rows of its share.

        Args:
            batches_of: ordered rows → positions of those that are divided over the dp ranks together, as `Trainer`
                does it.
            header: what a call says beside it.

        Raises:
            RunError: the mask holds something other than 0 and 1.
        """
        of_rows, of_batch = _columns(self.node)
        values = tuple(np.asarray(self.batch_values[column], dtype=np.float64) for column in of_batch)
        fields = {"node": self.node.id, "temperature": self.temperature, "values": len(values), **header}
        mask = self.node.mask
        mask_of(self.rows, mask, self.role)
        rows = self.rows.ordered()

        def arrays_of(ways: int) -> list[Arrays]:
            whole_groups, pair_tokens = self.node.training.whole_groups, rank_state.pair_tokens[self.role]
            shares = shares_of(rows, batches_of(rows), ways, whole_groups=whole_groups, pair_tokens=pair_tokens)
            return [(*values, *arrays) for arrays in pack_shares(rows, of_rows, shares, mask)]

        return by_rank(self.layout(rank_state), kind, fields, arrays_of)

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> LossOver:
        h = message.header
        node = flow.nodes[h["node"]]
        of_rows, of_batch = _columns(node)
        values = dict(zip(of_batch, message.arrays[: h["values"]], strict=True))
        rows = unpack_share(message.arrays[h["values"] :], of_rows, node.mask)
        return cls(node, rows, h["temperature"], values)


class _OfOneRole(Protocol):
    """Base of the calls of one TRAIN node; the result is metrics."""

    over: LossOver

    turn: ClassVar[Turn] = ALONE

    @property
    def role(self) -> str:
        return self.over.role

    @property
    def call(self) -> str:
        return self.over.node.call

    @property
    def copied(self) -> None:
        return None

    def layout(self, rank_state: RankState) -> Layout:
        return self.over.layout(rank_state)

    @staticmethod
    def answer(result: Mapping[str, float]) -> Message:
        return Message({"metrics": dict(result)}, kind=RESULT)

    @staticmethod
    def result_of(message: Message) -> dict[str, float]:
        return dict(message.header["metrics"])


@dataclass(frozen=True)
class EvaluateCall(_OfOneRole):
    """`Trainer.evaluate` by the loss of a TRAIN node. It takes no optimizer."""

    over: LossOver

    kind: ClassVar[str] = "evaluate"

    @property
    def trained(self) -> tuple[str, ...]:
        return ()

    @property
    def needs(self) -> tuple[Need, ...]:
        return ((self.role, "home"),)

    def run(self, rank_state: RankState) -> Work[dict[str, float]]:
        yield from rank_state.offloads.wanting(*self.needs)
        return (yield from self.over.trainer(rank_state).evaluate(self.over.rows, self.over.call))

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """See `LossOver.messages`."""
        return self.over.messages(rank_state, self.kind, lambda rows: [range(len(rows))])

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> EvaluateCall:
        return cls(LossOver.of(message, flow))


@dataclass(frozen=True)
class TrainCall(_OfOneRole):
    """`Trainer.train` of a TRAIN node, in a training step of the run."""

    over: LossOver
    step: int

    kind: ClassVar[str] = "train"

    @property
    def trained(self) -> tuple[str, ...]:
        return (self.role,)

    @property
    def needs(self) -> tuple[Need, ...]:
        return ((self.role, "train"),)

    def run(self, rank_state: RankState) -> Work[dict[str, float]]:
        yield from rank_state.offloads.wanting(*self.needs)
        return (yield from self.over.trainer(rank_state).train(self.over.rows, self.over.call, **self._how))

    def begun(self, rank_state: RankState) -> BegunTraining:
        """This rank's part of it, to be done together with that of others."""
        return self.over.trainer(rank_state).begin(self.over.rows, self.over.call, **self._how)

    @property
    def _how(self) -> dict[str, int]:
        how = self.over.node.training
        return {"mini_batches": how.mini_batches, "epochs": how.epochs, "step": self.step}

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """See `LossOver.messages`."""
        seed, whole_groups = rank_state.recipe.seed, self.over.node.training.whole_groups

        def batches_of(rows: Rows) -> Iterable[Sequence[int]]:
            return drawn_batches(rows, **self._how, seed=seed, whole_groups=whole_groups)

        return self.over.messages(rank_state, self.kind, batches_of, step=self.step)

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> TrainCall:
        return cls(LossOver.of(message, flow), message.header["step"])


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
        order = rank_state.places[self.role].together
        assert order is not None, f"{self.call}: the plan has no order of both"
        return order

    def run(self, rank_state: RankState) -> Work[list[dict[str, float]]]:
        yield from rank_state.offloads.wanting(*self.needs)
        order = self._order(rank_state)
        team = rank_state.joint_teams[order.layout]
        return (yield from train_together([call.begun(rank_state) for call in self.calls], order, team))

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader, that of each call behind the other.

        Raises:
            RunError: as of `LossOver.messages`.
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
    mask = () if node.mask is None else (node.mask,)
    columns: Iterable[Column] = dict.fromkeys((*node.loss_columns.values(), *mask))
    by_level: Sequence[list[Column]] = ([], [])
    for column in columns:
        by_level[column.level is Level.BATCH].append(column)
    return by_level[0], by_level[1]
