"""The parameters of a model's adapter, from those of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from plait.layout.decoder import HEAD
from plait.layout.params import Param, Parameters

EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that peft takes for those of routers and experts, wherever a family has any."""


GROUPED_BYTES = 16
"""What torch's grouped matrix products want every stride to be a multiple of."""


def parameters_of_adapter(
    parameters: Parameters, rank: int, targets: tuple[str, ...] | Literal["all-linear"], experts: tuple[str, ...] = ()
) -> Parameters:
    """A and B of each linear layer and each parameter of experts that gets an adapter, and the head of a scalar model,
    which is trained too (`models.lora`).

    Args:
        targets: names of layers; `all-linear`: all in the decoder layers, in a mixture of experts but for its MLPs. So
            it is where they name others: of a model that is known by its shape, these may be called otherwise.
        experts: names of parameters of experts, as `experts.down_proj`.
    """
    layers = [param for param in parameters.params if param.layer is not None and _is_linear(param)]
    mixtures = tuple({_before_experts(param.name) for param in parameters.params if ".experts." in param.name})
    left_out = EXPERTS | {_leaf(param) for param in layers if param.name.startswith(mixtures)} if mixtures else set()
    names = {_leaf(param) for param in layers}
    if targets != "all-linear" and (names | left_out).issuperset(targets):
        names = set(targets)
    adapted = {param.name for param in layers if _leaf(param) in names - left_out}
    hosts = [param for param in parameters.params if param.name in adapted or _is_stacked(param, experts)]
    params = [part for host in hosts for part in low_rank(host.name.removesuffix(".weight"), host, rank)]
    heads = (param for param in parameters.params if param.name == HEAD)
    return Parameters((*params, *heads), layers=parameters.num_layers)


def low_rank(at: str, weight: Param, rank: int, *, is_transposed: bool = False) -> tuple[Param, Param]:
    """A [rank, in] and B [out, rank] of a layer; [E, rank, in] and [E, out, rank] of a parameter of E experts. Tensor
    parallelism cuts B where it cuts the outputs, A where it cuts the inputs, and both between experts.

    Args:
        at: what they belong to: the layer's name, or that of the parameter.
        weight: [out, in] or [E, out, in]; [..., in, out] if `is_transposed`.
    """
    *experts, num_out, num_in = weight.shape
    of_outputs, of_inputs = len(experts), len(experts) + 1
    if is_transposed:
        num_out, num_in, of_outputs, of_inputs = num_in, num_out, of_inputs, of_outputs
    a = Param(f"{at}.lora_A.weight", (*experts, rank, num_in), weight.layer)
    b = Param(f"{at}.lora_B.weight", (*experts, num_out, rank), weight.layer)
    cut_as_it = lambda own, dim: replace(weight, name=own.name, shape=own.shape, cut=dim)
    if weight.cut is None:
        return a, b
    if weight.cut == of_outputs:
        return a, cut_as_it(b, len(experts))
    if weight.cut == of_inputs:
        return cut_as_it(a, len(experts) + 1), b
    return cut_as_it(a, weight.cut), cut_as_it(b, weight.cut)


def _is_linear(param: Param) -> bool:
    return len(param.shape) == 2 and param.name.endswith(".weight")


def _is_stacked(param: Param, names: tuple[str, ...]) -> bool:
    """Whether it is a parameter of experts by one of the names. Of a model that is known by its shape, what goes into
    experts is `gate_up_proj`, whether there is a gate or none."""
    ends = tuple(f".{name}" for name in names)
    return len(param.shape) == 3 and (param.name.endswith(ends) or param.name.replace("gate_up", "up").endswith(ends))


def _leaf(param: Param) -> str:
    return param.name.split(".")[-2]


def _before_experts(name: str) -> str:
    """The module around the experts, with its dot; the experts alone where they lie in the layer itself."""
    around = name[: name.index(".experts.")]
    return f"{around}.experts." if around.rpartition(".")[2].isdigit() else f"{around}."
