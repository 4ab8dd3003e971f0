"""The part of a decoder that one pipeline stage computes, by the family's own forward.

Layers of other stages become modules that hand their input on, so that layer numbers, types and masks stay as they are.
The last of them before the stage's own puts in the hidden states that came from the stage before; the first behind it
takes out what goes to the next one. So whatever the family does before and after its layers (embeddings, scales,
norms) runs on other stages too, at next to no cost, and reaches nothing.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.reach import text_decoder


class StageView:
    """Where hidden states enter and leave the decoder of one stage."""

    def __init__(self, has_input: bool, has_output: bool) -> None:
        self.has_input = has_input
        """It is not the first stage."""
        self.has_output = has_output
        """It is not the last stage."""
        self.input_TH: Tensor | None = None
        self.output_TH: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StageView:
        memo[id(self)] = twin = StageView(self.has_input, self.has_output)
        return twin


class PassingLayer(nn.Module):
    """Stands in for a decoder layer of another stage.

    Args:
        like: the layer; its plain attributes (a type of attention, say) are kept, which the decoder's forward may read.
        tuple_length: the layer's output is a tuple of so many parts, the hidden states and then nothing; 0: it is none.
        puts_in, takes_out: see the top of the file.
    """

    def __init__(self, like: nn.Module, view: StageView, *, tuple_length: int, puts_in: bool, takes_out: bool) -> None:
        super().__init__()
        for name, value in vars(like).items():
            if isinstance(value, bool | int | float | str) and not name.startswith("_"):
                setattr(self, name, value)
        self.view = view
        self.tuple_length = tuple_length
        self.puts_in, self.takes_out = puts_in, takes_out

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, T, H] to [1, T, H]: the hidden states unchanged, or in their place those from the previous stage."""
        if self.puts_in:
            assert self.view.input_TH is not None, "a stage behind the first got no hidden states"
            hidden_states = self.view.input_TH[None]
        if self.takes_out:
            self.view.output_TH = hidden_states[0]
        return (hidden_states, *[None] * (self.tuple_length - 1)) if self.tuple_length else hidden_states


class _NoEmbedding:
    """`forward` of an embedding on a stage that does not read it."""

    def __init__(self, layer: nn.Embedding) -> None:
        self.layer = layer

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer.weight.new_zeros((*ids.shape, self.layer.embedding_dim))


class _Identity:
    """`forward` of a module outside the layers whose parameters another stage has."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def is_idle(module: nn.Module) -> bool:
    """Whether a module outside the layers is one that this stage does not read."""
    return isinstance(vars(module).get("forward"), _NoEmbedding | _Identity)


def stage_view(decoder: nn.Module) -> StageView | None:
    """That of a decoder which `cut_stage` was called on; None of a whole one."""
    return next((layer.view for layer in decoder.modules() if isinstance(layer, PassingLayer)), None)


def decoder_list(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The layers of a Transformers decoder.

    Raises:
        ModelError: they are not in one list.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in text_decoder(decoder).modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == num_layers
        if is_list and all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            return module
    raise ModelError(
        f"pp: {type(decoder).__name__} has no list of its {num_layers} decoder layers to cut; set pp to 1 or the "
        "role's model to another family."
    )


def hidden_of(layer_output: Any) -> Tensor:
    """[T, H] of what a decoder layer returns."""
    return (layer_output[0] if isinstance(layer_output, tuple) else layer_output)[0]


def cut_stage(
    decoder: nn.Module, layers: nn.ModuleList, own: range, *, tuple_length: int, outside: Sequence[str]
) -> StageView:
    """Leave of a decoder what one stage computes; weights of other stages lose their modules, or stay unused.

    Args:
        layers: of `decoder_list`.
        own: numbers of the stage's layers.
        tuple_length: see PassingLayer.
        outside: names, in the decoder, of parameters without a layer that this stage does not read in its forward.
    """
    view = StageView(own.start > 0, own.stop < len(layers))
    for number, layer in enumerate(layers):
        if number not in own:
            layers[number] = PassingLayer(
                layer,
                view,
                tuple_length=tuple_length,
                puts_in=number == own.start - 1,
                takes_out=number == own.stop,
            )
    for owner in {name.rpartition(".")[0] for name in outside}:
        module = decoder.get_submodule(owner)
        module.forward = _NoEmbedding(module) if isinstance(module, nn.Embedding) else _Identity()
    return view


def boundary_recorder(layers: nn.ModuleList, own: range) -> tuple[dict[str, Any], list[Any]]:
    """Have a whole decoder note, at its next forward, what enters and leaves a stage.

    Returns:
        Where it will stand (`input_TH`, `output_TH`, `tuple_length`), and the hooks to remove then.
    """
    recorded: dict[str, Any] = {"input_TH": None, "output_TH": None, "tuple_length": 0}

    def keep(key: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            recorded["tuple_length"] = len(output) if isinstance(output, tuple) else 0
            recorded[key] = hidden_of(output).detach()

        return hook

    hooks = []
    if own.start > 0:
        hooks.append(layers[own.start - 1].register_forward_hook(keep("input_TH")))
    if own.stop < len(layers):
        hooks.append(layers[own.stop - 1].register_forward_hook(keep("output_TH")))
    return recorded, hooks
