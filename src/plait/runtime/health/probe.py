"""Why engine and trainer disagree: log-probs of a few samples again, under one hypothesis after the other.

Three readings of the same tokens are compared: what the engine recorded, what the trainer's forward says, and a plain
forward of each sample alone whose places, targets and temperature are written out here. The reading that differs from
the plain one is the side that is off, and the hypothesis that brings it nearest is the cause. The weights are those
after the step's update, so what a hypothesis leaves is not 0 but what one update changes.

Shapes: n tokens of one response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from plait.data.packed import pack
from plait.data.records import Sample
from plait.data.rows import FloatArray, Rows
from plait.data.supports import Supports
from plait.dataflow import CallKind, Score
from plait.models.compute.attention import PackedContext
from plait.models.compute.head_chunks import LEFT_OUT
from plait.models.language_model import LanguageModel
from plait.observe.doctor_reading import Diagnosis
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.roles import ModelRole
from plait.training.router_replay import replay_of

CALL = "doctor"
"""What it is in the trace."""

NUM_SAMPLES = 4
MAX_TOKENS = 512
"""Prompt and response tokens of a sample that is looked at; longer ones are passed over while there are shorter."""
_EXPLAINS = 0.4
"""Share of the difference that a hypothesis may leave and still be the cause."""
_AGREE = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-6}
"""Mean |Δ log p| up to which two forwards of one model agree."""
_TEMPERATURES = tuple(np.exp(np.linspace(np.log(0.25), np.log(4.0), 17)))


@dataclass(frozen=True)
class Suspects:
    """Who may be at fault."""

    role: ModelRole
    """The role of the samples: its engine drew them, its trainer trains on them."""
    temperature: float
    """That the recipe asks for."""
    between_steps: BetweenSteps
    """Drives what the trainer is asked."""
    others: Mapping[str, LanguageModel]
    """Further models whose weights the engine may hold: the reference, which has those of the beginning."""
    has_come_apart: bool
    """Engine and trainer agreed before the first update and do no longer."""


def diagnose(suspects: Suspects, rows: Rows) -> Diagnosis | None:
    """The hypothesis that explains the difference; None if none does.

    Args:
        rows: of a rollout, as the trainer gets them.
    """
    model = suspects.role.model
    few = rows.select(chosen_samples(rows))
    if not len(few):
        return None
    plain = _Plain(model, few)
    scoring = suspects.role.trainer
    ranks = scoring.mesh(CallKind.SCORE, begins=True)
    trainer = suspects.between_steps.run(CALL, scoring.score(few, Score.LOGPROBS, call=CALL), ranks, scoring.role)
    engine = few.sampling_logprobs
    tolerance = _AGREE[model.dtype]
    expected = plain.logprobs(suspects.temperature)
    if _distance(trainer, expected) > tolerance:
        return _trainer_is_off(trainer, plain, suspects.temperature)
    if _distance(engine, expected) <= tolerance and not _other_weights(suspects.role):
        return None
    return _engine_is_off(engine, plain, suspects)


def _trainer_is_off(trainer: FloatArray, plain: _Plain, temperature: float) -> Diagnosis | None:
    base = _distance(trainer, plain.logprobs(temperature))
    shifts = [plain.logprobs(temperature, place=place) for place in (-1, 1)]
    shifts += [plain.logprobs(temperature, target=target) for target in (-1, 1)]
    shifted = min(_distance(trainer, shift) for shift in shifts)
    fitted, warm = _best_temperature(trainer, plain, temperature)
    if min(shifted, warm) > _EXPLAINS * base:
        return None
    if shifted <= warm:
        return Diagnosis(
            "mask_shift",
            f"the trainer reads its log-probs one token off ({shifted:.2g} nats are left of {base:.2g} when the places "
            "are moved by one)",
            "algorithm",
        )
    return Diagnosis(
        "temperature",
        f"the trainer takes its log-probs at temperature {fitted:.3g}, the recipe says {temperature:g}",
        "sampling.temperature",
    )


def _engine_is_off(engine: FloatArray, plain: _Plain, suspects: Suspects) -> Diagnosis | None:
    expected = plain.logprobs(suspects.temperature)
    base = _distance(engine, expected)
    stale = _Hypothesis(np.inf, "")
    for name, other in _models(suspects).items():
        distance = _distance(engine, _Plain(other, plain.rows).logprobs(suspects.temperature))
        stale = min(stale, _Hypothesis(distance, name))
    fitted, warm = _best_temperature(engine, plain, suspects.temperature)
    shifted = plain.rolled_distance(engine, expected)
    if _other_weights(suspects.role) and stale.left < base and stale.name == _ENGINE:
        return _stale(
            f"the engine holds other weights than those that train: {stale.left:.2g} nats are left under them"
        )
    best = min(stale.left, warm, shifted)
    if best <= _EXPLAINS * base:
        if best == shifted:
            return Diagnosis(
                "mask_shift",
                f"the engine's log-probs stand one token off ({shifted:.2g} nats are left of {base:.2g} when moved by "
                "one)",
                "algorithm",
            )
        if best == warm:
            return Diagnosis(
                "temperature",
                f"the engine samples at temperature {fitted:.3g}, the recipe says {suspects.temperature:g}",
                "sampling.temperature",
            )
        return _stale(f"the engine's log-probs are those of the weights of `{stale.name}`")
    if suspects.has_come_apart:
        return _stale(
            "the trainer agrees with a plain forward, and both sides agreed before the first update: the engine most "
            "likely samples with older weights"
        )
    return None


def _stale(sentence: str) -> Diagnosis:
    return Diagnosis("stale_sampler_weights", sentence, "doctor.max_version_lag")


_ENGINE = "its engine"


@dataclass(frozen=True, order=True)
class _Hypothesis:
    left: float
    name: str


def _models(suspects: Suspects) -> dict[str, LanguageModel]:
    engine = suspects.role.engine
    own = {_ENGINE: engine.model} if engine is not None and _other_weights(suspects.role) else {}
    return {**own, **suspects.others}


def _other_weights(role: ModelRole) -> bool:
    """Whether the engine's model is another one than the trainer's, with other numbers in it."""
    if role.engine is None or role.engine.model is role.model:
        return False
    pairs = (
        (role.engine.model.weights, role.model.weights),
        (role.engine.model.trained.weights, role.model.trained.weights),
    )
    return not all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


class _Plain:
    """Logits of samples by one forward each, and log-probs read from them with places and targets of one's own."""

    def __init__(self, model: LanguageModel, rows: Rows) -> None:
        self.model = model
        self.rows = rows

    @cached_property
    def _logits(self) -> list[torch.Tensor]:
        """Logits of each sample [n + 2, V] in the widest dtype of its model: row j + 1 predicts the response's token j,
        replies counted."""
        logits = []
        for sample in self.rows.samples:
            batch = pack([(sample.prompt.token_ids, [sample.all_ids])], device=self.model.device)
            with torch.no_grad():
                tokens, routing = (batch.token_ids_T, batch.position_ids_T), replay_of(self.model, batch, [[sample]])
                hidden_TH = self.model.hidden(*tokens, PackedContext(batch), routing=routing)
                last = len(sample.prompt.token_ids) - 1
                places = torch.arange(last - 1, last + sample.num_tokens + 1).clamp(0, len(hidden_TH) - 1)
                logits_NV = self.model.logits(hidden_TH[places.to(hidden_TH.device)])
            logits.append(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)))
        return logits

    def _kept(self, logits_NV: torch.Tensor, sample: Sample) -> torch.Tensor:
        """The logits that drew a sample's tokens, without those that could not be drawn."""
        supports = Supports.of([sample])
        if supports is None:
            return logits_NV
        rows, places = supports.within(slice(0, len(logits_NV)), 0, logits_NV.shape[1])
        kept_NV = torch.ones_like(logits_NV, dtype=torch.bool)
        kept_NV[torch.from_numpy(rows).to(logits_NV.device)] = False
        kept_NV.view(-1)[torch.from_numpy(places).to(logits_NV.device)] = True
        return logits_NV.masked_fill(~kept_NV, LEFT_OUT)

    def logprobs(self, temperature: float, *, place: int = 0, target: int = 0) -> FloatArray:
        """[R]: of token j + `target`, by the logits that predict token j + `place`."""
        parts = []
        for sample, logits in zip(self.rows.samples, self._logits, strict=True):
            rows = torch.tensor(sample.places, dtype=torch.int64) + 1 + place
            targets = torch.tensor(sample.token_ids, dtype=torch.int64).roll(-target).to(logits.device)
            drawn_NV = self._kept(logits[rows.to(logits.device)], sample)
            chosen = torch.log_softmax(drawn_NV / temperature, dim=-1)
            parts.append(chosen.gather(1, targets[:, None])[:, 0].double().cpu().numpy())
        return np.concatenate(parts)

    def rolled_distance(self, engine: FloatArray, expected: FloatArray) -> float:
        """Mean difference when the engine's log-probs are moved by one token within each response."""
        ahead, behind = [], []
        for start, stop in zip(self.rows.offsets, self.rows.offsets[1:], strict=False):
            ahead.append(np.abs(engine[start + 1 : stop] - expected[start : stop - 1]))
            behind.append(np.abs(engine[start : stop - 1] - expected[start + 1 : stop]))
        return min(float(np.concatenate(parts).mean()) for parts in (ahead, behind))


def _best_temperature(logprobs: FloatArray, plain: _Plain, temperature: float) -> tuple[float, float]:
    """(temperature other than the recipe's that explains log-probs best, what it leaves), in two rounds of a search."""
    tried = {t: _distance(logprobs, plain.logprobs(t)) for t in {1.0, *(temperature * f for f in _TEMPERATURES)}}
    best = min(tried, key=tried.__getitem__)
    for factor in np.linspace(0.92, 1.08, 17):
        tried[best * factor] = _distance(logprobs, plain.logprobs(best * factor))
    tried = {t: distance for t, distance in tried.items() if abs(np.log(t / temperature)) > 0.01}
    best = min(tried, key=tried.__getitem__)
    if tried.get(1.0, np.inf) <= 1.1 * tried[best]:  # the likeliest mistake; none where the recipe says about 1
        best = 1.0
    return best, tried[best]


def _distance(one: FloatArray, other: FloatArray) -> float:
    """Mean |Δ log p|, each at most 20 nats."""
    return float(np.minimum(np.abs(one - other), 20.0).mean())


def chosen_samples(rows: Rows) -> list[int]:
    """Samples of two tokens and more that were sampled, the first ones that are not long."""
    fit = [
        place
        for place, sample in enumerate(rows.samples)
        if len(sample.token_ids) >= 2 and len(sample.logprobs) == len(sample.token_ids)
    ]
    size = {p: len(rows.samples[p].prompt.token_ids) + rows.samples[p].num_tokens for p in fit}
    short = [place for place in fit if size[place] <= MAX_TOKENS]
    return (short or sorted(fit, key=size.__getitem__)[:1])[:NUM_SAMPLES]
