"""Facts of a step that the roles' weights tell, by fingerprints: which has changed, and which should have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plait.models.backbone_model import BackboneModel, TrainedWeights
from plait.models.flat_weights import FlatWeights
from plait.models.module_names import in_module_order
from plait.runtime.health.inspected_run import InspectedRun

SAMPLED_WEIGHTS = 1 << 17
"""Weights of a model that its fingerprint looks at, evenly spread."""


class WeightFacts:
    """Compares weights with those that the run, and the step before, began with.

    Args:
        baseline: name of a fingerprint → what it was when the run began.
    """

    def __init__(self, inspected: InspectedRun, baseline: Callable[[], Mapping[str, float | str]]) -> None:
        self._inspected = inspected
        self._baseline = baseline
        self._before = self._fingerprints()

    def first(self) -> dict[str, str]:
        """What the run began with where nothing else is known: name of each fingerprint → the fingerprint now."""
        return {self._first(name): value for name, value in self._before.items()}

    def of_step(self, step: int) -> dict[str, float]:
        """What the rules read of the weights as they are after a step, counted from 1."""
        now = self._fingerprints()
        before, self._before = self._before, now
        first = self._baseline()
        comparable = [name for name in now if self._first(name) in first]
        every = self._inspected.recipe.reference.sync_every
        as_before = {name: first[self._first(name)] for name in comparable if self._is_frozen(name)}
        if every and "ref" in as_before:  # what it is since its last sync
            as_before["ref"] = now["ref"] if step % every == 0 else before.get("ref", now["ref"])
        changed = [name for name, expected in as_before.items() if now[name] != expected]
        facts = {"ref_changed" if name == "ref" else f"changed/{name}": 1.0 for name in changed}
        if "actor" in self._inspected.flow.trained_roles and "actor" in comparable and "actor" in before:
            facts["weights_moved"] = float(now["actor"] != before["actor"])
            adapted = self._inspected.models["actor"].own is not None
            if "ref" in now and not every and not adapted and now["ref"] == now["actor"] != first[self._first("actor")]:
                facts["ref_is_policy"] = 1.0
        return facts

    def _first(self, name: str) -> str:
        """Name of the fingerprint that a role began with. Under another plan a rank has another part of the model, and
        in early versions biases had other places in it: that is compared with its own beginning."""
        model = self._inspected.models[name]
        part, shares = model.part, model.trained.share is not None
        said = []
        if part is not None and (shares or not part.is_whole):
            sizes, team = part.team.layout.parallelism, part.team
            said = [f"dp {team.dp.index} of {sizes.dp}"] if shares else []
            said += [f"tp {team.tp.index} of {sizes.tp}", f"pp {team.pp.index} of {sizes.pp}", f"stages {sizes.stages}"]
        names = [block.param.name for block in self._held(name).layout.blocks]
        if in_module_order(names) != names:
            said.append("weights side by side")
        return f"weights/{name} ({', '.join(said)})" if said else f"weights/{name}"

    def _held(self, name: str) -> BackboneModel | TrainedWeights:
        """What of a role's model is looked at: has a layout and weights."""
        model = self._inspected.models[name]
        return model if self._is_frozen(name) or model.nested else model.trained

    def _is_frozen(self, name: str) -> bool:
        return name not in self._inspected.flow.trained_roles

    def _fingerprints(self) -> dict[str, str]:
        """Role → fingerprint of its trained weights, or of all its weights if it is not trained; of the roles whose
        weights the leader has."""
        prints: dict[str, str] = {}
        for name, model in self._inspected.models.items():
            held = self._held(name)
            now = self._inspected.workers.leader_weights.now(name, held.weights)
            if now is not None:
                shared = model.trained.share
                prints[name] = fingerprint(model.nested or FlatWeights(held.layout, now) if shared is None else now)
        return prints


def fingerprint(weights: FlatWeights | Tensor) -> str:
    """A hash of an even sample: equal for equal weights, another after any update of them all. Weights, or a rank's
    share of them, [elements]."""
    count = len(weights) if isinstance(weights, Tensor) else weights.num_elements
    stride = max(1, count // SAMPLED_WEIGHTS) | 1
    sampled = weights[::stride] if isinstance(weights, Tensor) else weights.sampled(stride)
    sampled = sampled.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(sampled.tobytes(), digest_size=8).hexdigest()
