"""Training as the leader has ranks do it. Nodes and columns go by the number that each rank's own trace gave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from plait.data.rows import Rows
from plait.dataflow import Column, Dataflow, Level, Node
from plait.engines import LossOver
from plait.layout.mesh import Layout
from plait.policy.turns import ALONE, Turn
from plait.schedule.fused import FusedOrder
from plait.schedule.work import Work
from plait.training.micro_batches import drawn_batches, shares_of
from plait.training.mini_batch import LossCall, LossTerm, mask_of
from plait.training.together import train_together
from plait.training.trainer import Trainer
from plait.workers.messages import RESULT, Message
from plait.workers.offload_manager import Need
from plait.workers.rank_state import RankState
from plait.workers.row_stubs import Arrays, by_rank, pack_shares, unpack_share


@dataclass(frozen=True)
class EvaluateCall:
    """`Trainer.evaluate` by the loss of a TRAIN node. It takes no optimizer."""

    over: LossOver

    kind: ClassVar[str] = "evaluate"
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

    @property
    def trained(self) -> tuple[str, ...]:
        return ()

    @property
    def needs(self) -> tuple[Need, ...]:
        return ((self.role, "home"),)

    def layout(self, rank_state: RankState) -> Layout:
        return _layout(self.over, rank_state)

    def run(self, rank_state: RankState) -> Work[dict[str, float]]:
        yield from rank_state.offloads.wanting(*self.needs)
        return (yield from _trainer(self.over, rank_state).evaluate(self.over.rows, _loss_call(self.over)))

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """See `_messages`."""
        return _messages(self.over, rank_state, self.kind, lambda rows: [range(len(rows))])

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> EvaluateCall:
        return cls(_over_of(message, flow))

    @staticmethod
    def answer(result: Mapping[str, float]) -> Message:
        return Message({"metrics": dict(result)}, kind=RESULT)

    @staticmethod
    def result_of(message: Message) -> dict[str, float]:
        return dict(message.header["metrics"])


@dataclass(frozen=True)
class TrainCall:
    """Training calls that one schedule computes in a training step of the run: of one role those whose gradients meet
    in the same optimizer steps, of several roles all that train together on the ranks that they share. The result is
    the metrics of each call."""

    overs: tuple[LossOver, ...]
    """What each loss is averaged over, in the order of the flow."""
    step: int

    kind: ClassVar[str] = "train"
    turn: ClassVar[Turn] = ALONE

    @property
    def copied(self) -> None:
        return None

    @property
    def role(self) -> str:
        """For records that belong to none of several alone."""
        return self.overs[0].role

    @property
    def call(self) -> str:
        return " + ".join(over.node.call for over in self.overs)

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(over.role for over in self.overs))

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple((role, "train") for role in self.trained)

    def layout(self, rank_state: RankState) -> Layout:
        return _layout(self.overs[0], rank_state) if len(self.trained) == 1 else self._order(rank_state).layout

    def _order(self, rank_state: RankState) -> FusedOrder:
        order = rank_state.places[self.role].together
        assert order is not None, f"{self.call}: the plan has no order of all"
        return order

    def run(self, rank_state: RankState) -> Work[list[dict[str, float]]]:
        yield from rank_state.offloads.wanting(*self.needs)
        of_roles = {role: [over for over in self.overs if over.role == role] for role in self.trained}
        terms = {role: list(map(_term, overs)) for role, overs in of_roles.items()}
        trainers = {role: _trainer(overs[0], rank_state) for role, overs in of_roles.items()}
        if len(trainers) == 1:
            return (yield from trainers[self.role].train(terms[self.role], step=self.step))
        order, begun = self._order(rank_state), [t.begin(terms[role], step=self.step) for role, t in trainers.items()]
        results = yield from train_together(begun, order, rank_state.joint_teams[order.layout])
        metrics = {role: iter(of_role) for role, of_role in zip(trainers, results, strict=True)}
        return [next(metrics[over.role]) for over in self.overs]

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader, that of each call behind the other.

        Raises:
            RunError: the mask holds something other than 0 and 1.
        """
        seed = rank_state.recipe.seed
        of_calls = []
        for over in self.overs:
            how = over.node.training
            draw = {"mini_batches": how.mini_batches, "epochs": how.epochs, "whole_groups": how.whole_groups}
            batches_of = partial(drawn_batches, **draw, seed=seed, step=self.step)
            of_calls.append(_messages(over, rank_state, self.kind, batches_of))
        by_rank = {}
        for rank in of_calls[0]:
            mine = [messages[rank] for messages in of_calls]
            header = {"step": self.step, "calls": [message.header for message in mine]}
            header |= {"arrays": [len(message.arrays) for message in mine]}
            by_rank[rank] = Message(header, tuple(array for message in mine for array in message.arrays), self.kind)
        return by_rank

    @classmethod
    def of(cls, message: Message, flow: Dataflow) -> TrainCall:
        overs, at = [], 0
        for header, count in zip(message.header["calls"], message.header["arrays"], strict=True):
            overs.append(_over_of(Message(header, message.arrays[at : at + count]), flow))
            at += count
        return cls(tuple(overs), message.header["step"])

    @staticmethod
    def answer(result: Sequence[Mapping[str, float]]) -> Message:
        return Message({"metrics": [dict(metrics) for metrics in result]}, kind=RESULT)

    @staticmethod
    def result_of(message: Message) -> list[dict[str, float]]:
        return [dict(metrics) for metrics in message.header["metrics"]]


def _loss_call(over: LossOver) -> LossCall:
    return LossCall.of(over.node, batch_values=over.batch_values, temperature=over.temperature)


def _term(over: LossOver) -> LossTerm:
    how = over.node.training
    return LossTerm(over.rows, _loss_call(over), how.mini_batches, how.epochs)


def _layout(over: LossOver, rank_state: RankState) -> Layout:
    layout = rank_state.places[over.role].train
    assert layout is not None, f"{over.node.call}: role `{over.role}` has no place to train"
    return layout


def _trainer(over: LossOver, rank_state: RankState) -> Trainer:
    trainer = rank_state.roles[over.role].trainer
    assert trainer is not None, f"{over.node.call}: rank {rank_state.rank} has no part in it"
    return trainer


def _messages(
    over: LossOver, rank_state: RankState, kind: str, batches_of: Callable[[Rows], Iterable[Sequence[int]]]
) -> dict[int, Message]:
    """For each rank but the leader, with the rows of its share.

    Args:
        batches_of: ordered rows → positions of those that are divided over the dp ranks together, as `Trainer` does it.

    Raises:
        RunError: the mask holds something other than 0 and 1.
    """
    node = over.node
    of_rows, of_batch = _columns(node)
    values = tuple(np.asarray(over.batch_values[column], dtype=np.float64) for column in of_batch)
    fields = {"node": node.id, "temperature": over.temperature, "values": len(values)}
    mask_of(over.rows, node.mask, over.role)
    rows = over.rows.ordered()

    def arrays_of(ways: int) -> list[Arrays]:
        whole_groups, pair_tokens = node.training.whole_groups, rank_state.pair_tokens[over.role]
        shares = shares_of(rows, batches_of(rows), ways, whole_groups=whole_groups, pair_tokens=pair_tokens)
        return [(*values, *arrays) for arrays in pack_shares(rows, of_rows, shares, node.mask)]

    return by_rank(_layout(over, rank_state), kind, fields, arrays_of)


def _over_of(message: Message, flow: Dataflow) -> LossOver:
    h = message.header
    node = flow.nodes[h["node"]]
    of_rows, of_batch = _columns(node)
    values = dict(zip(of_batch, message.arrays[: h["values"]], strict=True))
    rows = unpack_share(message.arrays[h["values"] :], of_rows, node.mask)
    return LossOver(node, rows, h["temperature"], values)


def _columns(node: Node) -> tuple[list[Column], list[Column]]:
    """What a TRAIN node reads of its rows, and of the batch."""
    mask = () if node.mask is None else (node.mask,)
    columns: Iterable[Column] = dict.fromkeys((*node.loss_columns.values(), *mask))
    by_level: Sequence[list[Column]] = ([], [])
    for column in columns:
        by_level[column.level is Level.BATCH].append(column)
    return by_level[0], by_level[1]
