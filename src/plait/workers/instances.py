"""An instance of several ranks that generates: every rank runs the same engine on its part of the model, step by step.

All ranks are given the same requests at the same step, and so make the same decisions; the first rank of the last
stage draws the tokens, and tells the others. What is drafted depends on seconds that a rank measured, so one rank says
it, too.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.generation.engine import Engine
from plait.generation.response import Response
from plait.generation.rows import Drafts
from plait.generation.sampler import SamplingRows, sample
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import NoSpeculation, Speculates, speculator_of
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team
from plait.policy.step import Key, StepPlan
from plait.speculation.counts import Counts
from plait.workers.ranks import LEADER


def engine_of(model: LanguageModel, settings: SamplingSettings, team: Team, *, keep_memory: bool = True) -> Engine:
    """The engine of one rank of an instance.

    Args:
        model: the rank's part.
        team: the instance.
        keep_memory: see `Engine`.
    """
    if team.all.size == 1:
        return Engine(model, settings, keep_memory=keep_memory)
    whole: Any = _Staged(model) if team.pp.size > 1 else model
    speculates = NoSpeculation() if settings.speculation == "off" else DraftedByOne(settings, team)
    return Engine(whole, settings, choose=_drawn_by_one(team), speculates=speculates)


def deciding(team: Team) -> int:
    """Place among the ranks of an instance of the one that says what a step begins with: the leader, or the first."""
    return team.all.ranks.index(LEADER) if LEADER in team.all.ranks else 0


def _drawn_by_one(team: Team) -> Callable[[Tensor, Tensor, SamplingRows], tuple[Tensor, Tensor]]:
    source = team.all.ranks.index(team.layout.rank_at(0, 0, team.pp.size - 1))

    def choose(logits_BV: Tensor, keys_B: Tensor, parameters: SamplingRows) -> tuple[Tensor, Tensor]:
        drawn_2B = torch.empty(2, len(keys_B), dtype=torch.float64, device=keys_B.device)
        if team.all.index == source:
            # A token id is exact in float64, and so is a log-prob.
            drawn_2B[0], drawn_2B[1] = sample(logits_BV, keys_B, parameters)
        team.all.broadcast(drawn_2B, source)
        return drawn_2B[0].long(), drawn_2B[1]

    return choose


class DraftedByOne:
    """Drafts of a step, by the rank that delivers the instance's samples; the others are told. See `Speculates`."""

    def __init__(self, settings: SamplingSettings, team: Team) -> None:
        self._peers = team.all
        self._source = deciding(team)
        drafts = team.all.index == self._source
        self._own: Speculates = speculator_of(settings) if drafts else NoSpeculation()

    @property
    def counts(self) -> Counts | None:
        """See Speculates.counts; None on ranks that are told."""
        return self._own.counts

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """See Speculates.drafts."""
        if not running:
            return {}
        found = self._own.drafts(started, running)
        lengths_B = torch.tensor([len(found.get(key, ())) for key in running])
        self._peers.broadcast(lengths_B, self._source)
        if not (total := int(lengths_B.sum())):
            return {}
        token_ids_D = torch.zeros(total, dtype=torch.int64)
        if found:
            token_ids_D[:] = torch.tensor([token_id for key in running for token_id in found.get(key, ())])
        self._peers.broadcast(token_ids_D, self._source)
        parts = token_ids_D.split(lengths_B.tolist())
        return {key: part.tolist() for key, part in zip(running, parts, strict=True) if len(part)}

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """See Speculates.done."""
        self._own.done(plan, num_drawn, seconds)

    def rest(self) -> None:
        """See Speculates.rest."""
        self._own.rest()

    def new_policy(self) -> None:
        """See Speculates.new_policy."""
        self._own.new_policy()

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """See Speculates.recall."""
        self._own.recall(prompt_ids, token_ids, logprobs)


class _Staged:
    """A model of which this rank has a stage; where that is not the last, its logits are zeros that nobody reads."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        if self._model.team.is_last_stage:
            return self._model.logits(hidden_NH)
        vocabulary = self._model.config.get_text_config().vocab_size
        return hidden_NH.new_zeros(1, 1).expand(len(hidden_NH), vocabulary)
