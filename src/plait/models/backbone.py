"""The decoder that one or several models compute with: hidden states, activation checkpointing, which adapter is on.

Models that share a backbone (an actor's adapter, a critic's adapter, the reference under both) differ in the adapter
that they switch on before their forward; the weights under it exist once.

Above the last attention every token goes its own way, so the last layer's MLP need compute only the rows that are read.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from plait.data.packed import PackedBatch
from plait.errors import ModelError
from plait.layout.params import FlatLayout, Parameters
from plait.models.compute.attention import AttentionContext, PackedContext
from plait.models.compute.float64 import kept_float64
from plait.models.flat_weights import FlatWeights
from plait.models.parallel.part import Part, parameters_of
from plait.models.parallel.stage import stage_view
from plait.models.parallel.team import Team
from plait.models.parallel.tensor_parallel import Partials
from plait.models.working_weights import OwnPart

STAGE_TAG = 1 << 29
"""Of hidden states that pass from stage to stage outside a training schedule."""

READ_SHARE = 0.9
"""Of the rows; where more are read, to leave the others out gains nothing."""


class Backbone:
    """A Transformers decoder (embedding, layers, final norm).

    Args:
        module: the decoder itself, such as a LlamaModel; attention "plait", eval mode. Perhaps one stage of it.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._adapted: tuple[tuple[dict[str, Any], frozenset[str]], ...] = ()
        """Of each layer that carries adapters: its attributes, the names of its adapters."""
        self._active: str | None = None
        self._view = stage_view(module)
        self._last_mlp = None if self._view is not None and self._view.has_output else _last_mlp(module)

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        *,
        adapter: str | None = None,
        checkpoint: bool = False,
        read: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype; of a stage, after its last layer.

        Args:
            context: says who attends to whom.
            adapter: the one that is added to the weights; None: the weights alone.
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            read: places whose hidden states are asked for, in any order; the others may hold anything. None: all.
            inputs: hidden states [T, H] from the stage before; None on the first.
        """
        view = self._view
        assert (inputs is not None) == (view is not None and view.has_input), "stages behind the first have an input"
        if view is not None:
            view.input_TH = inputs
        self.activate(adapter)
        recomputed = self._checkpointed(adapter) if checkpoint else self._reading(read, len(token_ids_T))
        with recomputed, kept_float64(self.dtype):
            out = self.module(
                input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, context=context
            )
        if view is None:
            return out.last_hidden_state[0]
        output_TH = view.output_TH if view.has_output else out.last_hidden_state[0]
        view.input_TH = view.output_TH = None  # the graph keeps what the backward needs
        return output_TH

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        return next(self.module.parameters()).dtype

    def activate(self, adapter: str | None) -> None:
        """Add this adapter, and no other, to the weights from now on; nothing to do where it is on already."""
        if adapter == self._active:
            return
        for attributes, names in self._adapted:
            # peft's own `set_adapter` would also decide which adapters are trained, and takes far longer.
            attributes["_active_adapter"] = [adapter] if adapter in names else []
        self._active = adapter

    def adapted(self, layers: Iterable[Any]) -> None:
        """These layers (peft's) hold adapters now, those of earlier calls among them; none is on."""
        self._adapted = tuple((vars(layer), frozenset(layer.lora_A)) for layer in layers)
        self._active = ""
        self.activate(None)

    @contextlib.contextmanager
    def _reading(self, read: Tensor | None, num_tokens: int) -> Iterator[None]:
        """Within it the last MLP computes these rows alone. (Not with activation checkpoints: those compute the layer
        again when this is over.)"""
        rows = None if read is None or self._last_mlp is None else torch.unique(read)
        if rows is None or len(rows) > READ_SHARE * num_tokens:
            yield
            return
        mlp, own = self._last_mlp, vars(self._last_mlp).get("forward")
        mlp.forward = partial(_on_rows, mlp.forward, rows)
        try:
            yield
        finally:
            if own is None:
                del mlp.forward
            else:
                mlp.forward = own

    def recomputed_layers(self) -> list[nn.Module]:
        """The decoder layers that activation checkpointing computes again.

        Raises:
            ModelError: the family does not say which modules they are.
        """
        return _decoder_layers(self.module)

    @contextlib.contextmanager
    def _checkpointed(self, adapter: str | None) -> Iterator[None]:
        layers = self.recomputed_layers()
        for layer in layers:
            forward = partial(self._with_adapter, adapter, layer.forward)
            layer.forward = partial(recompute, forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _with_adapter(self, adapter: str | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The backward computes a layer again perhaps long after another model's forward switched adapters."""
        self.activate(adapter)
        with kept_float64(self.dtype):
            return forward(*args, **kwargs)


class BackboneModel:
    """What a language model and a scalar model have in common; both are dataclasses with these fields."""

    module: Any
    layout: FlatLayout
    weights: Tensor
    backbone: Backbone
    own: OwnPart | None
    part: Part | None
    nested: FlatWeights | None = None
    """Its weights where they lie in the memory of other parts; `weights` has no elements then."""

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def trained_layout(self) -> FlatLayout:
        """Of what training changes: the parameters that are this model's alone (an adapter, a head), or all."""
        return self.layout if self.own is None else self.own.layout

    @property
    def trained_weights(self) -> Tensor:
        """The flat buffer of `trained_layout`, compute dtype, of a model that is not `nested`."""
        assert self.nested is None, "the weights lie in the memory of another part: take `flat`"
        return self.weights if self.own is None else self.own.weights

    @property
    def flat(self) -> FlatWeights:
        """The elements of `trained_layout`, wherever they lie."""
        return FlatWeights(self.trained_layout, self.trained_weights) if self.nested is None else self.nested

    @property
    def weights_version(self) -> int:
        """Another after every write to the trained weights."""
        return self.trained_weights._version if self.nested is None else self.nested.version

    def trained_parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name in `trained_layout`."""
        return self.module.get_parameter(name) if self.own is None else self.own.parameters[name]

    @property
    def team(self) -> Team:
        """The ranks that hold this model together; a whole model's is this process alone."""
        return Team.alone() if self.part is None else self.part.team

    @cached_property
    def parameters(self) -> Parameters:
        """Of the whole model, though this rank may have a part of it; those that are its alone left out (`own`)."""
        return parameters_of(self.layout, self.config) if self.part is None else self.part.parameters

    @cached_property
    def trained_parameters(self) -> Parameters:
        """Of what training changes, on all ranks together."""
        return self.parameters if self.own is None else Parameters.of(self.own.layout)

    @property
    def partial_gradients(self) -> frozenset[str]:
        """Parameters whose gradient on this rank is a part of a sum over ranks of tensor parallelism."""
        return frozenset(name for partial in self._partials for name in partial.names)

    @property
    def _partials(self) -> tuple[Partials, ...]:
        return () if self.part is None else self.part.partials

    def sum_partial_gradients(self, gradients: Tensor) -> None:
        """Make gradients complete that are sums over ranks of one copy of the model: of parameters that ranks of tensor
        parallelism hold alike and use for their own heads, and of a tied embedding, which the first and the last stage
        hold. Once per optimizer step, by all ranks of the team; in place.

        Args:
            gradients: flat [trained_layout.num_elements].
        """
        if self.part is not None and not self.part.is_whole:
            self.part.sum_partial_gradients(self.trained_layout, gradients)

    def counted_ranges(self) -> list[tuple[int, int]]:
        """Ranges [start, stop) of a buffer of `trained_layout` that this rank counts, so that over the ranks of one
        copy of the model every parameter counts once (in a gradient norm, say)."""
        if self.part is None or self.part.is_whole:
            return [(start, stop) for _, start, stop in self.trained_layout.entries]
        return list(self.part.counted_ranges(self.trained_layout))

    def stage(self, batch: PackedBatch, inputs_TH: Tensor | None = None, *, checkpoint: bool = False) -> Tensor:
        """What this rank's pipeline stage makes of the hidden states of the stage before; of a whole model, the hidden
        states after the final norm. Differentiable. All ranks of tensor parallelism call it alike.

        Args:
            batch: on the model's device.
            inputs_TH: [T, H], compute dtype; None on the first stage.
            checkpoint: see `hidden`.

        Returns:
            [T, H]; on the last stage only the places that the model's outputs read need be right.
        """
        context, ids_T, positions_T = PackedContext(batch), batch.token_ids_T, batch.position_ids_T
        read = self.read_places(batch) if self.team.is_last_stage else None
        return self._decoder(ids_T, positions_T, context, checkpoint=checkpoint, read=read, inputs=inputs_TH)

    def read_places(self, batch: PackedBatch) -> Tensor:
        """Places of the row whose hidden states the model's outputs are made of."""
        raise NotImplementedError

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        *,
        checkpoint: bool = False,
        read: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype; `context` says who attends to whom.

        Through all stages, where there are several: without gradients, and the result is right on the last.

        Args:
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            read: places whose hidden states are asked for; the others may hold anything. None: all.
        """
        pp, inputs_TH = self.team.pp, None
        assert pp.size == 1 or not torch.is_grad_enabled(), "gradients pass several stages by `stage`"
        if pp.index > 0:
            hidden_size = self.config.get_text_config().hidden_size
            inputs_TH = self.weights.new_empty((len(token_ids_T), hidden_size))
            pp.recv(inputs_TH, pp.index - 1, STAGE_TAG, "hidden states")
        hidden_TH = self._decoder(
            token_ids_T,
            position_ids_T,
            context,
            checkpoint=checkpoint,
            read=read if self.team.is_last_stage else None,
            inputs=inputs_TH,
        )
        if not self.team.is_last_stage:
            pp.send(hidden_TH, pp.index + 1, STAGE_TAG, "hidden states")
        return hidden_TH

    def _decoder(self, *args: Any, **kwargs: Any) -> Tensor:
        """Without an adapter no gradient reaches weights that are another's to train: a head alone is trained."""
        adapter = None if self.own is None else self.own.adapter
        reaches = self.own is None or adapter is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and reaches):
            return self.backbone.hidden(*args, adapter=adapter, **kwargs)

    def _outputs(
        self,
        batch: PackedBatch,
        outputs_of: Callable[[Tensor], tuple[Tensor, Tensor]],
        lengths: tuple[int, int],
        *,
        checkpoint: bool,
    ) -> tuple[Tensor, Tensor]:
        """Two outputs of these lengths, in float32 or wider, that the last stage makes of its hidden states; on all."""
        team = self.team
        if team.pp.size == 1:
            return outputs_of(self.stage(batch, checkpoint=checkpoint))
        read = self.read_places(batch)
        hidden_TH = self.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch), read=read)
        if team.is_last_stage:
            found = torch.cat(outputs_of(hidden_TH))
        else:
            found = self.weights.new_empty(sum(lengths), dtype=torch.promote_types(self.dtype, torch.float32))
        first, second = team.pp.broadcast(found, team.pp.size - 1).split(lengths)
        return first, second


class Copied(Protocol):
    """A language or a scalar model."""

    module: Any

    def copied(self) -> Any: ...


AnyModel = TypeVar("AnyModel", bound=Copied)


def copy_of(model: AnyModel) -> AnyModel:
    """A frozen copy with buffers of its own: the reference. None of its parameters requires a gradient."""
    twin = model.copied()
    twin.module.requires_grad_(False)
    return twin


def _decoder_layers(module: Any) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked: list[nn.Module] = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if marked:
        return marked
    num_layers = module.config.get_text_config().num_hidden_layers
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers]
    if len(lists) != 1:
        raise ModelError(
            f"checkpoint_activations: {type(module).__name__} neither marks its decoder layers nor has one list of "
            f"{num_layers} modules, but {len(lists)}; set checkpoint_activations to false or the role's model to "
            "another family."
        )
    return list(lists[0])


def _on_rows(forward: Callable[[Tensor], Tensor], rows: Tensor, x: Tensor) -> Tensor:
    """`forward` of these rows of [1, T, H], zeros elsewhere."""
    out = forward(x[:, rows])
    return out.new_zeros(x.shape).index_copy(1, rows, out)


@torch.no_grad()
def _last_mlp(module: Any) -> Any:
    """The last layer's MLP where it is shown to compute each row for itself; None in float64, which stays exact."""
    layers = [layer for layer in module.modules() if hasattr(layer, "self_attn") and hasattr(layer, "mlp")]
    if not layers:
        return None
    mlp, norm = layers[-1].mlp, getattr(layers[-1], "post_attention_layernorm", None)
    weight = next(mlp.parameters(), None)
    if weight is None or norm is None or weight.dtype == torch.float64 or weight.device.type == "meta":
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, module.config.get_text_config().hidden_size, generator=generator)
    x = x.to(weight.device, weight.dtype)
    rows = torch.tensor([1, 2, 4], device=weight.device)
    try:
        whole, part = mlp(x), _on_rows(mlp, rows, x)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None
    near = part.shape == whole.shape and torch.allclose(part[:, rows], whole[:, rows], rtol=0.02, atol=1e-3)
    return mlp if near else None
