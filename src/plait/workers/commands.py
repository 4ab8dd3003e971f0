"""All that the leader tells ranks, by its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

from plait.dataflow import Dataflow
from plait.workers.announcer import Follow, Move
from plait.workers.call_messages import ForgetCall, InstanceCommand
from plait.workers.knowledge_upkeep import TakeUpKnowledge, TellKnowledge
from plait.workers.messages import Message
from plait.workers.score_call import ScoreCall
from plait.workers.train_calls import EvaluateCall, TrainCall
from plait.workers.upkeep import EndTurns, Gather, Load, Recall, Save, Spans, Version
from plait.workers.wire_forms import Record


@dataclass(frozen=True)
class End(Record):
    """The run is over."""

    kind: ClassVar[str] = "end"


Call = ScoreCall | EvaluateCall | TrainCall
Upkeep = Move | Follow | Version | EndTurns | Recall | TellKnowledge | TakeUpKnowledge | Gather | Save | Load | Spans
Command = Call | Upkeep | InstanceCommand | ForgetCall | End
_BY_KIND: Mapping[str, type[ScoreCall | Upkeep | InstanceCommand | ForgetCall | End]] = {
    command.kind: command for command in (ScoreCall, *get_args(Upkeep), *get_args(InstanceCommand), ForgetCall, End)
}


def command_of(message: Message, flow: Dataflow) -> Command:
    """What a message of the leader tells."""
    match message.kind:
        case EvaluateCall.kind:
            return EvaluateCall.of(message, flow)
        case TrainCall.kind:
            return TrainCall.of(message, flow)
        case kind:
            return _BY_KIND[kind].of(message)
