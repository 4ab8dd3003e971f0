"""An instance of several ranks that generates: every rank runs the same engine on its part of the model, step by step.

All ranks are given the same requests at the same step, and so make the same decisions; the first rank of the last stage
draws the tokens, and tells the others.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.generation.engine import Engine
from plait.generation.sampler import SamplingRows, sample
from plait.generation.settings import SamplingSettings
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team


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
    return Engine(whole, settings, choose=_drawn_by_one(team))


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
