"""The parameters of a model's adapter, from those of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from plait.layout.decoder import HEAD
from plait.layout.params import Param, Parameters

EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that peft takes for those of routers and experts, wherever a family has any."""


def parameters_of_adapter(
    parameters: Parameters, rank: int, targets: tuple[str, ...] | Literal["all-linear"]
) -> Parameters:
    """A and B of each linear layer that gets an adapter, and the head of a scalar model, which is trained too
    (`models.lora`).

    Args:
        targets: names of layers; `all-linear`: all in the decoder layers, in a mixture of experts but for its MLPs. So
            it is where they name others: of a model that is known by its shape, these may be called otherwise. Names
            with a dot are of experts.
    """
    layers = [param for param in parameters.params if param.layer is not None and _is_linear(param)]
    mixtures = tuple({_before_experts(param.name) for param in parameters.params if ".experts." in param.name})
    left_out = EXPERTS | {_leaf(param) for param in layers if param.name.startswith(mixtures)} if mixtures else set()
    names = {_leaf(param) for param in layers}
    of_experts = () if targets == "all-linear" else tuple(f".{name}" for name in targets if "." in name)
    targets = targets if targets == "all-linear" else tuple(name for name in targets if "." not in name)
    if targets != "all-linear" and (names | left_out).issuperset(targets):
        names = set(targets)
    adapted = {param.name for param in layers if _leaf(param) in names - left_out}
    params: list[Param] = []
    for param in parameters.params:
        if param.name in adapted:
            params += low_rank(param.name.removesuffix(".weight"), param, rank)
        elif _is_stacked(param, of_experts):
            params += low_rank_of_experts(param, rank)
    heads = (param for param in parameters.params if param.name == HEAD)
    return Parameters((*params, *heads), layers=parameters.num_layers)


def low_rank(at: str, weight: Param, rank: int, *, is_transposed: bool = False) -> tuple[Param, Param]:
    """A [rank, in] and B [out, rank] of a layer. Tensor parallelism cuts B where it cuts the layer's outputs, A where
    it cuts its inputs.

    Args:
        at: the layer's name.
        weight: [out, in], or [in, out] if `is_transposed`.
    """
    num_out, num_in = reversed(weight.shape) if is_transposed else weight.shape
    name_a, name_b, shape_a, shape_b = f"{at}.lora_A.weight", f"{at}.lora_B.weight", (rank, num_in), (num_out, rank)
    plain_a, plain_b = Param(name_a, shape_a, weight.layer), Param(name_b, shape_b, weight.layer)
    if weight.cut is None or is_transposed:
        return plain_a, plain_b
    if weight.cut == 0:
        return plain_a, replace(weight, name=name_b, shape=shape_b)
    return replace(weight, name=name_a, shape=shape_a), plain_b


def low_rank_of_experts(weight: Param, rank: int, *, by_columns: bool = False) -> tuple[Param, Param]:
    """A [E, rank, in] and B [E, out, rank] of a parameter of E experts. Tensor parallelism cuts both between experts
    where it cuts the parameter so, B where it cuts outputs, A where it cuts inputs.

    Args:
        weight: [E, out, in], or [E, in, out] if `by_columns`.
    """
    (num_experts, *sizes), of_outputs = weight.shape, 2 if by_columns else 1
    num_out, num_in = reversed(sizes) if by_columns else sizes
    (name_a, shape_a), (name_b, shape_b) = (
        (f"{weight.name}.lora_A.weight", (num_experts, rank, num_in)),
        (f"{weight.name}.lora_B.weight", (num_experts, num_out, rank)),
    )
    plain_a, plain_b = Param(name_a, shape_a, weight.layer), Param(name_b, shape_b, weight.layer)
    if weight.cut is None:
        return plain_a, plain_b
    if weight.cut == of_outputs:
        return plain_a, replace(weight, name=name_b, shape=shape_b, cut=1)
    if weight.cut == 3 - of_outputs:
        return replace(weight, name=name_a, shape=shape_a, cut=2), plain_b
    return replace(weight, name=name_a, shape=shape_a), replace(weight, name=name_b, shape=shape_b)


def _is_linear(param: Param) -> bool:
    return len(param.shape) == 2 and param.name.endswith(".weight")


def _is_stacked(param: Param, names: tuple[str, ...]) -> bool:
    """Whether it is a parameter of experts by one of the names; of a model that is known by its shape, what enters
    experts is `gate_up_proj`."""
    return len(param.shape) == 3 and (param.name.endswith(names) or param.name.replace("gate_up", "up").endswith(names))


def _leaf(param: Param) -> str:
    return param.name.split(".")[-2]


def _before_experts(name: str) -> str:
    """The module around the experts, with its dot; the experts alone where they lie in the layer itself."""
    around = name[: name.index(".experts.")]
    return f"{around}.experts." if around.rpartition(".")[2].isdigit() else f"{around}."
