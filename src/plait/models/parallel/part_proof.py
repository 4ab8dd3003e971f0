"""That a family can be cut is shown, not assumed: what a few tokens become in a rank's part, against the whole.

First the stage, still uncut, against the whole model: its output from the whole one's input. Then the sharded stage
against the uncut: its output, and the gradients of its input and of small parameters that are not cut, under a
random gradient of the output. Attention is in pieces on every device, as where models are admitted (`admission`).

Shapes: T tokens of a packed row, H hidden size, V vocabulary, N rows of any numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.errors import ModelError, PlaitError
from plait.layout.caches import CacheShape, LayerCache, cache_parameters
from plait.layout.params import Param
from plait.layout.shards import stage_bounds
from plait.models.admission import check_batch
from plait.models.compute.attention import PackedContext
from plait.models.compute.row_attention import pieces_plan
from plait.models.module_names import wildcard
from plait.models.parallel.stage import boundary_recorder, decoder_list
from plait.models.parallel.team import Team
from plait.models.shape import config_fields

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Largest accepted error of a token's hidden states or logits, relative to their norm: sums in another order. A wrong
cut is wrong by about 1; 30 layers in bfloat16, cut in two, differ by 0.04."""

GRADIENT_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}
"""The same of gradients, of all layers' parameters of one name together. One that lacks the parts of other ranks is
wrong by 0.7 or more; those 30 layers differ by 0.22, in float32 by 1e-5."""

QUANTILE = {torch.bfloat16: 0.75, torch.float16: 0.75}
"""In narrow dtypes a rounding may send a token to another expert; a quarter of the tokens may differ more."""

LARGEST_CHECKED = 1 << 20
"""Elements of a parameter whose gradient is compared: norms, biases, routers."""


def own_layers(model: Any, team: Team) -> range:
    """Numbers of the layers of this rank's stage."""
    bounds = stage_bounds(model.parameters.num_layers, team.layout.parallelism)
    return range(bounds[team.pp.index], bounds[team.pp.index + 1])


@dataclass
class Proof:
    """The proof of one rank's part. Call `record_whole`, cut the layers, `record_stage`, cut the weights, `check`."""

    model: Any
    team: Team
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, team = self.model, self.team
        self.batch: PackedBatch = check_batch(model.module, model.device)[0]
        self.own_layers = own_layers(model, team)
        self.input_TH: Tensor | None = None
        self.tuple_length = 0
        self.logits_TV: Tensor | None = None
        self.cached: dict[int, tuple[int, int, int]] = {}
        """What the layers of the newest forward had: key-value heads, head sizes of keys and of values."""

    @torch.no_grad()
    def record_whole(self) -> None:
        model, recorded, hooks = self.model, {}, []
        if self.team.pp.size > 1:
            layers = decoder_list(model.module.base_model, model.parameters.num_layers)
            recorded, hooks = boundary_recorder(layers, self.own_layers)
        try:
            hidden_TH = self._run(None)
        finally:
            for hook in hooks:
                hook.remove()
        self.whole_cached = self.cached
        self.input_TH = recorded.get("input_TH")
        self.tuple_length = recorded.get("tuple_length", 0)
        if self.team.is_last_stage:
            self.output_TH = hidden_TH
            self.logits_TV = model.head_outputs(hidden_TH, self.batch)
        else:
            self.output_TH = recorded["output_TH"]

    def record_stage(self) -> None:
        """The stage before its weights are cut.

        Raises:
            ModelError: its forward or backward fails.
        """
        with self._guarded("the stage's forward"):
            hidden_TH, self.gradients = self._gradients()
            if self.team.pp.size > 1:
                self._compare("the hidden states of the stage", hidden_TH, self.output_TH, TOLERANCE)

    def check(self) -> None:
        """Compare, and tell each other: those that hold the model together, as other copies may have their parts.

        Raises:
            ModelError: on every rank of the copy, where one has found a fault.
        """
        if self.team.tp.size > 1:
            with self._guarded("the forward of the sharded stage"):
                hidden_TH, gradients = self._gradients()
                self._compare("the hidden states of the sharded stage", hidden_TH, self.output_TH, TOLERANCE)
                self._compare_gradients(gradients)
        if self.team.is_last_stage:
            with self._guarded("the forward of the head"), torch.no_grad():
                outputs = self.model.head_outputs(self.output_TH, self.batch)
                assert self.logits_TV is not None, "the whole model's were recorded"
                self._compare("the outputs of the head", outputs, self.logits_TV, TOLERANCE)
        count = torch.tensor([float(len(self.faults))], device=self.model.device)
        for peers in (self.team.tp, self.team.pp):
            peers.all_reduce(count, "max")
        if count.item():
            raise self._refusal()

    def cache_shape(self) -> CacheShape | None:
        """What ranks keep of a token, in all layers; None where a rank has neither its own key-value heads nor all."""
        tp, heads = self.team.tp, config_fields(self.model.config.get_text_config())["num_attention_heads"]
        own = {layer: self.cached[layer][0] for layer in self.own_layers if layer in self.cached}
        gathers = tp.size > 1 and all(count == self.whole_cached[layer][0] for layer, count in own.items())
        layers = tuple(LayerCache(layer, *sizes, not gathers) for layer, sizes in sorted(self.whole_cached.items()))
        shape = CacheShape(self.model.parameters.num_layers, heads, layers)
        for param in cache_parameters(shape, [1]):
            start, stop = param.tp_range(tp.index, tp.size)
            if param.cut is not None and own.get(param.layer, stop - start) != stop - start:
                return None
        return shape

    def _refusal(self) -> ModelError:
        sizes, module = self.team.layout.parallelism, self.model.module
        cause = "; ".join(self.faults) or "another rank found that its part computes something else"
        keys = " and ".join(f"{key} to 1" for key, size in (("tp", sizes.tp), ("pp", sizes.pp)) if size > 1)
        return ModelError(
            f"model: {type(module.base_model).__name__} (family {module.config.model_type}) cannot be sharded into tp "
            f"{sizes.tp} and pp {sizes.pp}: {cause}. Set {keys}, or the role's model to another family."
        )

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """What it raises is a fault of the family. Raised at once: peers may wait in a collective of that forward, and
        are interrupted by the error of this rank, not by a message."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            if isinstance(error, PlaitError):
                raise
            text = str(error).splitlines()[0] if str(error) else ""
            self.faults.append(f"{what} raised {type(error).__name__}: {text}")
            raise self._refusal() from error

    def _run(self, input_TH: Tensor | None) -> Tensor:
        self.cached = {}
        batch, context = self.batch, PackedContext(self.batch, self._note_cached, planned=pieces_plan)
        return self.model.backbone.hidden(batch.token_ids_T, batch.position_ids_T, context, inputs_TH=input_TH)

    def _note_cached(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.cached[layer] = (key.shape[0], key.shape[2], value.shape[2])

    def _gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The stage's output, and gradients by name (without numbers of layers)."""
        checked = self._checked() if self.team.tp.size > 1 else {}
        required = [param.requires_grad for param in checked.values()]
        input_TH = None if self.input_TH is None else self.input_TH.clone().requires_grad_(self.team.tp.size > 1)
        for param in checked.values():
            param.requires_grad_(True)
        try:
            with torch.enable_grad():
                output_TH = self._run(input_TH)
            return output_TH.detach(), self._grad(output_TH, input_TH, checked)
        finally:
            for param, before in zip(checked.values(), required, strict=True):
                param.requires_grad_(before)

    def _grad(self, output_TH: Tensor, input_TH: Tensor | None, checked: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        if self.team.tp.size == 1:
            return {}
        generator = torch.Generator().manual_seed(0)
        grad_TH = torch.randn(output_TH.shape, generator=generator, dtype=torch.float64).to(output_TH)
        names, tensors = list(checked), list(checked.values())
        if input_TH is not None:
            names, tensors = ["the input", *names], [input_TH, *tensors]
        grads = torch.autograd.grad(output_TH, tensors, grad_TH, allow_unused=True)
        grads_by_name = {
            name: torch.zeros_like(tensor) if grad is None else grad.contiguous()
            for name, tensor, grad in zip(names, tensors, grads, strict=True)
        }
        for name in self.model.trained.partial_gradients & grads_by_name.keys():
            self.team.tp.all_reduce(grads_by_name[name])
        pieces = sorted(grads_by_name.items(), key=lambda item: wildcard(item[0]))
        return {
            key: torch.cat([grad.reshape(-1).double() for _, grad in group])
            for key, group in groupby(pieces, lambda item: wildcard(item[0]))
        }

    def _checked(self) -> dict[str, nn.Parameter]:
        """Parameters of the stage that tensor parallelism does not cut."""
        return {
            param.name: self.model.module.get_parameter(param.name)
            for param in self.model.parameters.params
            if self._is_checked(param)
        }

    def _is_checked(self, param: Param) -> bool:
        if param.cut is not None or param.num_elements > LARGEST_CHECKED:
            return False
        return param.layer in self.own_layers

    def _compare_gradients(self, gradients: dict[str, Tensor]) -> None:
        largest = max((float(grad.norm()) for grad in self.gradients.values()), default=0.0)
        for name, expected in self.gradients.items():
            if float(expected.norm()) > 1e-3 * largest:
                self._compare(f"the gradient of {name}", gradients[name][None], expected[None], GRADIENT_TOLERANCE)

    def _compare(self, what: str, found_NX: Tensor, expected_NX: Tensor, tolerance: dict[torch.dtype, float]) -> None:
        dtype = self.model.dtype
        found_NX, expected_NX = found_NX.double(), expected_NX.double()
        size = expected_NX.norm(dim=-1).mean()
        # A new head is zero, and so is all that it says.
        error_N = (found_NX - expected_NX).norm(dim=-1) / (size if size > 0 else 1.0)
        error = float(torch.quantile(error_N, QUANTILE.get(dtype, 1.0)))
        if not error <= tolerance[dtype]:
            self.faults.append(f"{what} differs by {error:.2g} of its size, allowed {tolerance[dtype]:g}")
