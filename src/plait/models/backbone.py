"""The decoder that one or several models compute with: hidden states, activation checkpointing, which adapter is on.

Models that share a backbone (an actor's adapter, a critic's adapter, the reference under both) differ in the adapter
that they switch on before their forward; the weights under it exist once.

Above the last attention every token goes its own way, so the last layer's MLP need compute only the rows that are read.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from plait.data.host_device import uploaded
from plait.errors import ModelError
from plait.models.compute.float64 import kept_float64
from plait.models.compute.layer_kernels import LayerKernels
from plait.models.compute.recurrent import recurrent_layers_of
from plait.models.layer_weights import HeldLayers, LayerWeights
from plait.models.parallel.stage import stage_view
from plait.models.parallel.token_split import token_split
from plait.models.routers import Routers, Routing

if TYPE_CHECKING:
    from plait.models.compute.attention import AttentionContext
    from plait.models.expert_adapters import AdaptedExperts

Computing = Callable[[], contextlib.AbstractContextManager[None]]
"""Within what it makes, layers compute."""

READ_SHARE = 0.9
"""The most of the rows; where more are read, to leave the others out gains nothing."""


@dataclass(frozen=True)
class ForwardOptions:
    """Options of a forward through a decoder: the adapter, what is kept for the backward, which rows are left out."""

    adapter: str | None = None
    """Name of the adapter that is added to the weights; None: none is."""
    checkpoint: bool = False
    """Keep one activation per decoder layer and compute the layer again in the backward."""
    read: Tensor | None = None
    """int64 places whose hidden states are asked for, in any order; the others may hold anything. None: all. On the
    host, or, where no gradient is asked for, on the device."""
    by_kernels: bool = False
    """Norms, gates and rotations are computed by kernels of training, where the device has any."""
    router_logits: list[Tensor] | None = None
    """Is given the router logits [T, experts] of each mixture of experts of this stage, in the order of layers, of all
    T tokens (whatever is `read`); differentiable. None: they are not kept."""
    routing: Routing | None = None
    """Is told which experts the routers of this stage choose for all T tokens (whatever is `read`), and may have them
    choose others. None: they are not heard."""


class Backbone:
    """A Transformers decoder (embedding, layers, final norm).

    Args:
        module: the decoder itself, such as a LlamaModel; attention "plait", eval mode. Perhaps one stage of it.
        layer_weights: within passes of it the weights of layers are there; None: they always are.
    """

    def __init__(self, module: Any, layer_weights: LayerWeights | None = None) -> None:
        self.module = module
        self.layer_weights = layer_weights or HeldLayers()
        self._split = token_split(module)
        self._kernels = LayerKernels(module)
        self.routers = Routers(module)
        self._adapted: tuple[tuple[dict[str, Any], str, frozenset[str]], ...] = ()
        """Layers and experts with adapters: attributes, which of them says what is on, the names of the adapters."""
        self._active: str | None = None
        self._view = stage_view(module)
        self.last_mlp = None if self._view is not None and self._view.has_output else _last_mlp(module)
        """The MLP behind the last attention, where it computes only the rows that are read; None: it computes all."""

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        how: ForwardOptions | None = None,
        *,
        inputs_TH: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype; of a stage, after its last layer.

        Args:
            token_ids_T: int64, one packed row.
            position_ids_T: int64, the place of each token in its own sample.
            context: says who attends to whom.
            how: None: without an adapter, all of it, nothing computed twice.
            inputs_TH: hidden states, compute dtype, from the stage before; None on the first.
        """
        how = how or ForwardOptions()
        view = self._view
        assert (inputs_TH is not None) == (view is not None and view.has_input), "stages behind the first have an input"
        if view is not None:
            view.input_TH = inputs_TH
        self.activate(how.adapter)
        computing = partial(self._computing, token_ids_T, how)
        read = how.read if how.router_logits is None and how.routing is None else None
        also = {} if how.router_logits is None else {"output_router_logits": True}
        with (
            computing(),
            self._checkpointed(how.adapter, computing) if how.checkpoint else self._reading(read, token_ids_T),
        ):
            out = self.module(
                input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, context=context, **also
            )
        if how.router_logits is not None:
            how.router_logits.extend(logits.flatten(0, -2) for logits in out.router_logits)
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
        """Make this adapter the active one, and all others inactive; returns at once if it is active already."""
        if adapter == self._active:
            return
        for attributes, active, names in self._adapted:
            # peft's own `set_adapter` would also decide which adapters are trained, and takes far longer.
            attributes[active] = [adapter] if adapter in names else []
        self._active = adapter

    def adapted(self, layers: Iterable[Any], experts: Iterable[AdaptedExperts] = ()) -> None:
        """These layers (peft's) and experts hold adapters now, those of earlier calls among them; none is on."""
        self._adapted = (
            *((vars(layer), "_active_adapter", frozenset(layer.lora_A)) for layer in layers),
            *((vars(mixture), "active", frozenset(mixture.pairs)) for mixture in experts),
        )
        self._active = ""
        self.activate(None)

    @contextlib.contextmanager
    def _reading(self, read: Tensor | None, token_ids_T: Tensor) -> Iterator[None]:
        """Within it the last MLP computes these rows alone. (Not with activation checkpoints: those compute the layer
        again when this is over.)"""
        parted = self._split is not None and self._split.is_on
        rows = None if read is None or self.last_mlp is None or parted else _once(read, token_ids_T.device)
        if rows is None or len(rows) > READ_SHARE * len(token_ids_T):
            yield
            return
        mlp, own = self.last_mlp, vars(self.last_mlp).get("forward")
        mlp.forward = partial(_on_rows, mlp.forward, rows)
        try:
            yield
        finally:
            if own is None:
                del mlp.forward
            else:
                mlp.forward = own

    @contextlib.contextmanager
    def _computing(self, token_ids_T: Tensor, how: ForwardOptions) -> Iterator[None]:
        """Within it layers compute a row, now or again in their backward."""
        if self._split is not None:
            self._split.num_tokens, self._split.is_recomputed = len(token_ids_T), how.checkpoint
        kernels = self._kernels.applied(token_ids_T.device) if how.by_kernels else contextlib.nullcontext()
        with kept_float64(self.dtype), kernels, self.routers.routed(how.routing):
            yield

    def recomputed_layers(self) -> list[nn.Module]:
        """The decoder layers that activation checkpointing computes again.

        Raises:
            ModelError: the family does not say which modules they are.
        """
        try:
            return decoder_layers(self.module)
        except ModelError as error:
            raise ModelError(
                f"checkpoint_activations: {error}; set it to false or the role's model to another family."
            ) from None

    @contextlib.contextmanager
    def _checkpointed(self, adapter: str | None, computing: Computing) -> Iterator[None]:
        layers = self.recomputed_layers()
        for layer in layers:
            forward = partial(self._with_adapter, adapter, computing, layer.forward)
            layer.forward = partial(recompute, forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _with_adapter(
        self, adapter: str | None, computing: Computing, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The backward computes a layer again perhaps long after another model's forward switched adapters."""
        self.activate(adapter)
        with computing():
            return forward(*args, **kwargs)


def decoder_layers(module: Any) -> list[nn.Module]:
    """The layers of a decoder, in order.

    Raises:
        ModelError: the family does not say which modules they are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked: list[nn.Module] = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if marked:
        return marked
    num_layers = module.config.get_text_config().num_hidden_layers
    lists = [
        modules for modules in module.modules() if isinstance(modules, nn.ModuleList) and len(modules) == num_layers
    ]
    if len(lists) != 1:
        raise ModelError(
            f"{type(module).__name__} neither marks its decoder layers nor has one list of {num_layers} modules, but "
            f"{len(lists)}"
        )
    return list(lists[0])


def _once(read: Tensor, device: torch.device) -> Tensor:
    """Each place once. Of places on a GPU, without gradients, as often as they stand there, as it would be waited for
    to count them; the gradient of a place that stands there twice would count twice."""
    if read.device.type == "cpu":
        return uploaded(torch.unique(read), torch.int64, device)
    return torch.unique(read) if torch.is_grad_enabled() else read


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
    if module.config.get_text_config().num_hidden_layers - 1 in recurrent_layers_of(module.config):
        return None  # another mixer reads what the last layer that attends gives
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
