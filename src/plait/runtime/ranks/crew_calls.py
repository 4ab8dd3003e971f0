"""Calls that score and train, as the leader has them: announced to the ranks of a layout, with its own part of them.

A call is an iterator over actions, as it is in one process (`training.trainer.Trainer`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Column, Dataflow
from plait.runtime.ranks.commands import LEADER, Call, ScoreCall, TrainCall
from plait.runtime.recorder import Elsewhere
from plait.schedule.named_plans import MODE_OF
from plait.training.trainer import MICRO_BATCHES_OF_A_STAGE, NO_VALUES, Done

if TYPE_CHECKING:
    from plait.runtime.ranks.crew import Crew


class CrewCall:
    """A call on its way: an iterator over its actions, whose StopIteration has the result. It begins with the first
    `next()`."""

    def __init__(self, crew: Crew, call: Call) -> None:
        self._crew = crew
        self._call = call
        self.ranks = call.layout(crew.parts).mesh.ranks
        self.is_own = LEADER in self.ranks
        """Whether the leader has a part in it."""
        self._work: Generator[Done, None, Any] | None = None
        self._number: int | None = None
        """Of its command; None: it is not announced yet."""

    def begin(self) -> None:
        """Announce it; harmless when done before."""
        if self._number is not None:
            return
        crew, call = self._crew, self._call
        if isinstance(call, TrainCall):
            if call.step >= 0:
                crew.trained(call.role)
            self._number = crew.tell(self.ranks, call.parcels(crew.parts))
        else:
            crew.freshen(call.role, "score")
            self._number = crew.tell(self.ranks, call.parcels(crew.parts), crew.copies(call.role, "score"))
            if not self.is_own:
                crew.elsewhere[self._number] = self.ranks
        if self.is_own:
            crew.parts.residence.want(call.need)
            self._work = call.run(crew.parts)
            if len(self.ranks) > 1:
                crew.together[self._number] = call.call

    @property
    def ready(self) -> bool:
        """Whether `next()` would not wait for other ranks' results."""
        return self.is_own or (self._number is not None and self._crew.mail.has(self.ranks[0], self._number))

    def __iter__(self) -> CrewCall:
        return self

    def __next__(self) -> Done | Elsewhere:
        self.begin()
        with self._crew.board.doing(self._call.call):
            return self._next()

    def _next(self) -> Done | Elsewhere:
        assert self._number is not None, "a call that began was announced"
        if self._work is not None:
            try:
                return next(self._work)
            except StopIteration:
                self._crew.together.pop(self._number, None)
                raise
        answer = self._crew.answer(self.ranks[0], self._number, self._call.call)
        if "count" in answer.header:
            return Elsewhere(answer.header["count"])
        self._crew.elsewhere.pop(self._number, None)
        raise StopIteration(self._call.result_of(answer))


class CrewTrainer:
    """`training.trainer.Trainer` for the leader, over the ranks of the role's layouts."""

    def __init__(self, crew: Crew, role: str, flow: Dataflow, max_positions: int) -> None:
        self._crew = crew
        self.role = role
        self._nodes = {node.call: node for node in flow.calls(role)}
        part = crew.parts.roles.get(role)
        self.model = part.model if part is not None else AbsentModel(max_positions)

    def mesh(self, kind: CallKind, *, begins: bool) -> frozenset[int]:
        """The ranks that a call of this kind keeps busy; to begin, with those that bring it weights. Copies that are
        dropped may have to be brought again, when the call asks other models in between."""
        place = self._crew.parts.places[self.role]
        match kind:
            case CallKind.TRAIN:
                layouts = (place.train,)
            case CallKind.SCORE:
                layouts = (place.score or place.train,)
            case _:
                layouts = place.generate
        found = frozenset(rank for layout in layouts if layout is not None for rank in layout.mesh.ranks)
        copies = [one for one in self._crew.parts.copies[self.role] if MODE_OF[kind] in one.modes]
        away = copies and (begins or any(one.after == "drop" for one in copies))
        return found | frozenset(self._crew.parts.movers[self.role] if away else ())

    def freshening(self, kind: CallKind) -> Iterator[None]:
        """Have the role's weights brought to where a call of this kind computes; see `Crew.freshening`."""
        return self._crew.freshening(self.role, MODE_OF[kind])

    @property
    def tokens_of_a_part(self) -> int:
        """That keep the ranks that score busy: a call of fewer wastes their time."""
        place = self._crew.parts.places[self.role]
        layout = place.score or place.train
        assert layout is not None, f"role `{self.role}` has no place to score"
        sizes = layout.parallelism
        micro_batches = sizes.dp * (MICRO_BATCHES_OF_A_STAGE * sizes.pp if sizes.pp > 1 else 1)
        return micro_batches * (place.micro_batch_tokens.get("score") or self._crew.parts.recipe.micro_batch_tokens)

    def logprobs(self, rows: Rows, *, temperature: float | None = None, call: str | None = None) -> CrewCall:
        return self._crew.call(ScoreCall(self.role, "logprobs", call or f"{self.role}.logprobs", rows, temperature))

    def values(self, rows: Rows, *, call: str | None = None) -> CrewCall:
        return self._crew.call(ScoreCall(self.role, "values", call or f"{self.role}.values", rows))

    def scores(self, rows: Rows, *, call: str | None = None) -> CrewCall:
        return self._crew.call(ScoreCall(self.role, "scores", call or f"{self.role}.scores", rows))

    def train(
        self,
        rows: Rows,
        columns: Mapping[str, Column],
        loss: Callable[..., Any],
        *,
        step: int,
        call: str,
        batch_values: Mapping[Column, FloatArray] = NO_VALUES,
        temperature: float | None = None,
        **of_node: Any,
    ) -> CrewCall:
        """Columns, loss and the rest are those of the node that the call names: every rank has traced them."""
        return self._crew.call(TrainCall(self._nodes[call], rows, step, temperature, batch_values))

    def evaluate(
        self,
        rows: Rows,
        columns: Mapping[str, Column],
        loss: Callable[..., Any],
        *,
        call: str,
        batch_values: Mapping[Column, FloatArray] = NO_VALUES,
        temperature: float | None = None,
        **of_node: Any,
    ) -> CrewCall:
        return self._crew.call(TrainCall(self._nodes[call], rows, -1, temperature, batch_values))


class AbsentModel:
    """What is known of a model of which this rank has no part."""

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
