"""The training engine of a role as the leader has it: calls go to the ranks of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked, CallKind
from plait.engines import LossOver, ScoredBy
from plait.recipes.router_checks import replays_experts
from plait.schedule.named_plans import MODE_OF
from plait.schedule.pipeline import micro_batches_of
from plait.schedule.work import Work
from plait.workers.announcer import Announcer
from plait.workers.score_call import ScoreCall
from plait.workers.train_calls import EvaluateCall, TrainCall


class RemoteTrainer:
    """`training.trainer.Trainer` for the leader, over the ranks of the role's layouts."""

    def __init__(self, announcer: Announcer, role: str) -> None:
        self._announcer = announcer
        self.role = role

    def mesh(self, kind: CallKind, *, begins: bool) -> frozenset[int]:
        """The ranks that a call of this kind keeps busy; to begin, with those that bring it weights. Copies that are
        dropped may have to be brought again, when the call asks other models in between."""
        rank_state = self._announcer.rank_state
        place = rank_state.places[self.role]
        match kind:
            case CallKind.TRAIN:
                layouts = (place.train,)
            case CallKind.SCORE:
                layouts = (place.scoring,)
            case _:
                layouts = place.generate
        ranks = frozenset(rank for layout in layouts if layout is not None for rank in layout.mesh.ranks)
        older = rank_state.held_copies[self.role]
        copies = [
            copy
            for n, copy in enumerate(rank_state.copies[self.role])
            if MODE_OF[kind] in copy.modes and n not in older
        ]
        away = copies and (begins or any(copy.after == "drop" for copy in copies))
        return ranks | frozenset(rank_state.places[self.role].movers if away else ())

    def syncing_weights(self, kind: CallKind) -> Work[None]:
        """Have the role's weights brought to where a call of this kind computes; see `Announcer.syncing_weights`."""
        return self._announcer.syncing_weights(self.role, MODE_OF[kind])

    @property
    def scoring_instances(self) -> tuple[frozenset[int], ...]:
        """Ranks of each copy of the model that scores; none where weights are brought to them before."""
        rank_state = self._announcer.rank_state
        if any("score" in copies.modes for copies in rank_state.copies[self.role]):
            return ()
        return tuple(frozenset(instance.mesh.ranks) for instance in rank_state.places[self.role].scoring.instances())

    def tokens_of_a_part(self, root_tokens: int) -> int:
        """See `TrainingEngine.tokens_of_a_part`."""
        place = self._announcer.rank_state.places[self.role]
        sizes = place.scoring.parallelism
        budget = place.micro_batch_tokens.get("score") or self._announcer.rank_state.recipe.micro_batch_tokens
        return sizes.dp * micro_batches_of(sizes.pp) * max(1, budget - root_tokens)

    def score(
        self,
        rows: Rows,
        what: Asked,
        *,
        temperature: float | None = None,
        call: str | None = None,
        by: ScoredBy | None = None,
    ) -> Work[FloatArray]:
        """See `Trainer.score`, and `TrainingEngine.score` for who computes."""
        name = call or f"{self.role}.{what}"
        return self._announcer.calling(ScoreCall(self.role, what, name, self._read(rows, self.role), temperature, by))

    @property
    def trains_with(self) -> tuple[str, ...]:
        """See `TrainingEngine.trains_with`: as the plan has it."""
        return self._announcer.rank_state.places[self.role].trains_with

    def train(self, overs: Sequence[LossOver], *, step: int) -> Work[list[dict[str, float]]]:
        """See `TrainingEngine.train`."""
        return self._announcer.calling(TrainCall(tuple(map(self._over, overs)), step))

    def evaluate(self, over: LossOver) -> Work[dict[str, float]]:
        """See `TrainingEngine.evaluate`."""
        return self._announcer.calling(EvaluateCall(self._over(over)))

    def _over(self, over: LossOver) -> LossOver:
        return replace(over, rows=self._read(over.rows, over.role))

    def _read(self, rows: Rows, role: str) -> Rows:
        """Rows as a role reads them: where tokens went only if it asks for that, and what all prompts begin with."""
        rank_state = self._announcer.rank_state
        says_experts = any(sample.experts is not None for sample in rows.samples)
        if says_experts and not replays_experts(role, rank_state.flow, rank_state.recipe):
            rows = replace(rows, samples=tuple(replace(sample, experts=None) for sample in rows.samples))
        return rows.with_root()
