"""What language models and scalar models have in common: a backbone over flat weights, perhaps one part of several.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.layout.params import FlatLayout, Parameters
from plait.models.backbone import Backbone, ForwardOptions
from plait.models.compute.attention import AttentionContext, PackedContext
from plait.models.flat_weights import FlatWeights
from plait.models.outputs import Said
from plait.models.parallel.part import Part, parameters_of
from plait.models.parallel.team import Team
from plait.models.routers import Routing
from plait.models.working_weights import OwnPart, adapter_name, copy_module

if TYPE_CHECKING:
    from plait.models.weight_share import WeightShare


@dataclass(eq=False, kw_only=True)
class BackboneModel:
    """What a language model and a scalar model have in common: one admitted model on one device."""

    kind: ClassVar[str]
    """What messages call it."""
    says: ClassVar[tuple[Said, ...]]
    """What it may be asked of samples."""
    peft_task: ClassVar[str]
    """What peft calls what it is for."""

    module: Any
    """Attention "plait", eval mode, no dropout. Its parameters are views of `weights`, those of `own` excepted."""
    tokenizer: Any
    layout: FlatLayout
    weights: Tensor
    """Flat working buffer [layout.num_elements] in the compute dtype; of a model with a `share`, the buffer of that."""
    max_positions: int
    """Longest prompt with response, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    backbone: Backbone
    """The module's decoder, perhaps shared with other models."""
    own: OwnPart | None = None
    """Its own parameters (an adapter, a head) where it is a view of weights that it shares."""
    part: Part | None = None
    """Its place in a team (`models.parallel.partial`); None: it is whole, and alone."""
    nested: FlatWeights | None = field(default=None, init=False)
    """Its weights where they lie in the memory of other parts; `weights` has no elements then."""
    share: WeightShare | None = field(default=None, init=False)
    """What this rank holds of its weights, where the ranks of dp hold shares; its `backbone` gathers them."""

    @property
    def config(self) -> Any:
        return self.module.config

    def tokenizer_of_folder(self) -> Any:
        """What is written beside the weights, or an adapter; None where there is no tokenizer."""
        return self.tokenizer

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def weights_version(self) -> int:
        """Another after every write to the trained weights."""
        return self.trained.version

    @property
    def trained(self) -> TrainedWeights:
        """What training changes of it."""
        return TrainedWeights(self)

    @property
    def team(self) -> Team:
        """The ranks that hold this model together; a whole model's is this process alone."""
        return Team.alone() if self.part is None else self.part.team

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters of the whole model, though this rank may have a part of it; those of `own` left out."""
        return parameters_of(self.layout, self.config) if self.part is None else self.part.parameters

    def stage(
        self,
        batch: PackedBatch,
        inputs_TH: Tensor | None = None,
        *,
        checkpoint: bool = False,
        router_logits: list[Tensor] | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """`hidden` of a packed batch on the model's device: [T, H], of which the last stage has the places that the
        model's outputs read. For `checkpoint`, `router_logits`, which are filled, and `routing` see `ForwardOptions`.
        """
        read = self.read_places(batch) if self.team.is_last_stage else None
        how = ForwardOptions(checkpoint=checkpoint, read=read, router_logits=router_logits, routing=routing)
        return self._through(batch.token_ids_T, batch.position_ids_T, PackedContext(batch), inputs_TH, how)

    def read_places(self, batch: PackedBatch) -> Tensor:
        """Places [N] int64 of the row whose hidden states the model's outputs are made of, on the host."""
        raise NotImplementedError

    def _over(self, module: Any, weights: Tensor) -> Self:
        """The same model over another module, whose parameters are views of `weights`."""
        raise NotImplementedError

    def copied(self) -> Self:
        """See `copy_of`."""
        if self.own is not None:
            return self.own.copied()
        return self._over(*copy_module(self.module, self.layout))

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        *,
        inputs_TH: Tensor | None = None,
        read: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """What this rank's pipeline stage makes of the hidden states of the stage before, in the compute dtype;
        `context` says who attends to whom. All ranks of tensor parallelism call it alike.

        Args:
            inputs_TH: [T, H], compute dtype; None on the first stage.
            read: places whose hidden states are asked of the last stage; the others may hold anything. None: all. See
                `ForwardOptions.read`.
            routing: see `ForwardOptions`.

        Returns:
            [T, H] for the next stage; of the last one, or of a whole model, after the final norm. Differentiable, but
            without an adapter no gradient reaches weights that are another's to train: a head alone is trained.
        """
        how = ForwardOptions(read=read if self.team.is_last_stage else None, routing=routing)
        return self._through(token_ids_T, position_ids_T, context, inputs_TH, how)

    def _through(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        inputs_TH: Tensor | None,
        how: ForwardOptions,
    ) -> Tensor:
        """As `hidden`, with this model's adapter."""
        adapter = adapter_name(self.own)
        reaches = self.own is None or adapter is not None
        by_kernels = isinstance(context, PackedContext) and context.by_kernels
        how = replace(how, adapter=adapter, by_kernels=by_kernels)
        with torch.set_grad_enabled(torch.is_grad_enabled() and reaches):
            return self.backbone.hidden(token_ids_T, position_ids_T, context, how, inputs_TH=inputs_TH)


class TrainedWeights:
    """The weights of a model that training changes: an adapter or a head, where it has one of its own, else all."""

    def __init__(self, model: BackboneModel) -> None:
        self._model = model
        own = model.own
        self.layout: FlatLayout = model.layout if own is None else own.layout
        """This rank's elements."""
        self._part = model.part if own is None else own.part

    @property
    def weights(self) -> Tensor:
        """The flat buffer [layout.num_elements], compute dtype, of a model that is not `nested`; of one with a `share`,
        what this rank holds."""
        model = self._model
        assert model.nested is None, "the weights lie in the memory of another part: take `flat`"
        return model.weights if model.own is None else model.own.weights

    @property
    def share(self) -> WeightShare | None:
        """What this rank holds of them, where the ranks of dp hold shares: never of adapters and heads."""
        return self._model.share if self._model.own is None else None

    @property
    def flat(self) -> FlatWeights | WeightShare:
        """The elements of `layout`, wherever they lie."""
        nested = self._model.nested if self._model.own is None else None
        return nested or self.share or FlatWeights(self.layout, self.weights)

    @property
    def updated(self) -> Tensor:
        """As `weights`, without what ranks that share weights hold twice: what moves read and write, [elements]."""
        return self.weights if self.share is None else self.share.own

    @property
    def version(self) -> int:
        """Another after every write to the weights."""
        nested = self._model.nested
        return self.weights._version if nested is None else nested.version

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name in `layout`."""
        model = self._model
        return model.module.get_parameter(name) if model.own is None else model.own.parameters[name]

    @property
    def parameters(self) -> Parameters:
        """The parameters on all ranks together."""
        model = self._model
        return model.parameters if model.own is None else model.own.part.parameters

    @property
    def partial_gradients(self) -> frozenset[str]:
        """Parameters whose gradient on this rank is a part of a sum over ranks of tensor parallelism."""
        part = self._part
        return frozenset(() if part is None else (name for partial in part.partials for name in partial.names))

    def sum_partial_gradients(self, gradients: Tensor) -> None:
        """Make gradients complete that are sums over ranks of one copy of the model: of parameters that ranks of tensor
        parallelism hold alike and use for their own heads, and of a tied embedding, which the first and the last stage
        hold. Once per optimizer step, by all ranks of the team; in place.

        Args:
            gradients: flat [layout.num_elements].
        """
        part = self._part
        if part is not None and not part.is_whole:
            part.sum_partial_gradients(self.layout, gradients)

    def sum_over_tp(self, gradients: Mapping[str, Tensor]) -> None:
        """As `sum_partial_gradients`, of some parameters: those of them that ranks of tensor parallelism hold alike.

        Args:
            gradients: name → [elements], a contiguous view of a buffer; the same names on all these ranks.
        """
        part = self._part
        if part is not None and not part.is_whole:
            part.sum_over_tp(gradients)

    def sum_over_ends(self, gradients: Sequence[Tensor]) -> None:
        """As `sum_partial_gradients`, of pieces of what the first and the last stage both hold.

        Args:
            gradients: each [elements], a contiguous view of a buffer; on both stages those of the same elements.
        """
        part = self._part
        if part is not None and not part.is_whole:
            part.sum_over_ends(gradients)

    def counted_ranges(self) -> list[tuple[int, int]]:
        """Ranges [start, stop) of a buffer of `layout` that this rank counts, so that over the ranks of one copy of the
        model every parameter counts once (in a gradient norm, say)."""
        part = self._part
        if part is None or part.is_whole:
            return [(start, stop) for _, start, stop in self.layout.entries]
        return list(part.counted_ranges(self.layout))


Copied = TypeVar("Copied", bound=BackboneModel)


def copy_of(model: Copied) -> Copied:
    """A frozen copy with buffers of its own: the reference. None of its parameters requires a gradient."""
    twin = model.copied()
    twin.module.requires_grad_(False)
    return twin
