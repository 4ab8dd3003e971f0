"""Sequence parallelism: between the products that tensor parallelism divides, each rank has some of the tokens.

Norms, residuals and what enters a layer are equal on all ranks of tensor parallelism, and kept by each of them for the
backward. Divided by tokens they are kept once (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): a rank has
neighbouring tokens of the packed row, all of them come together before attention and before the MLP, and the sum behind
these gives each rank its own again. A sum over the ranks and a gathering of tokens take as many bytes together as the
sum that they stand for. Weights of norms, and biases behind a sum, then have gradients of which every rank has a part.
What the products keep of their input are the own tokens (`kept_tokens`), unless layers are computed again anyway.

In other modules (mixtures of experts, latent attention, those that ranks hold whole) something that is not divided
stands between the products, such as a router. These have all tokens, and compute as they do without: tokens come
together before them, the sum within gives each rank all, and each takes its own behind. Their gradients are what they
are without. That is a gathering more, forward and backward.

It is so where gradients are asked for. What is generated and scored keeps nothing, and is computed as without it.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import Param, Parameters
from plait.models.module_names import wildcard
from plait.models.parallel.collectives import all_tokens, entered, left, reduced, rejoined, shared_out
from plait.models.parallel.kept_tokens import KeptTokens, keeping
from plait.models.parallel.peers import Peers
from plait.models.parallel.stage import PassingLayer, is_idle

WITHIN = frozenset(
    {"colwise", "packed_colwise", "rowwise", "replicated_with_grad_allreduce", "mixer", "mixer_columns", "mixer_rows"}
)
"""Styles of layers that may be between where tokens come together and where they part."""


class TokenSplit:
    """Which tokens of the row that is computed this rank has.

    Args:
        splits: whether ranks have some of the tokens at all.
    """

    def __init__(self, tp: Peers, *, splits: bool) -> None:
        self.tp = tp
        self.splits = splits
        self.num_tokens = 0
        """Tokens of the row that is computed, on all ranks together: who has layers compute says it, each time
        (`Backbone`)."""
        self.is_recomputed = False
        """Whether layers keep their input alone and are computed again in the backward; said as `num_tokens` is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenSplit:
        memo[id(self)] = twin = TokenSplit(self.tp, splits=self.splits)
        return twin

    @property
    def is_on(self) -> bool:
        """Whether tokens are sharded now."""
        return self.splits and torch.is_grad_enabled()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first token of each rank, and T."""
        return tuple(self.num_tokens * index // self.tp.size for index in range(self.tp.size + 1))

    def own(self, whole: Tensor) -> Tensor:
        """[1, own, H] of [1, T, H], which is equal on all ranks."""
        return shared_out(whole, self.tp, self.bounds)

    def rejoined(self, own: Tensor) -> Tensor:
        """[1, T, H] of each rank's, for what all ranks compute alike."""
        return rejoined(own, self.tp, self.bounds)

    def entered(self, own: Tensor) -> Tensor:
        """[1, T, H] of each rank's, for a computation of which each rank does a part."""
        return entered(own, self.tp, self.bounds)

    def keeping(self, own: Tensor, whole: Tensor) -> AbstractContextManager[Any]:
        """A context of the forwards that read `whole` [1, T, H], which is `own` [1, own, H] of all ranks."""
        if self.is_recomputed:
            return nullcontext()
        return keeping(KeptTokens(own.detach(), partial(all_tokens, peers=self.tp, bounds=self.bounds)), whole)

    def summed(self, part: Tensor) -> Tensor:
        """The sum of [1, T, H] over the ranks: [1, own, H] where tokens are sharded."""
        return left(part, self.tp, self.bounds) if self.is_on else reduced(part, self.tp)


def split_tokens(
    module: Any, split: TokenSplit, parameters: Parameters, own_names: set[str], alike: Collection[str]
) -> None:
    """Have the decoder of a model, whose cut layers have their collectives, keep its own tokens between them.

    Args:
        own_names: names of the parameters that this rank has a block of.
        alike: as of `computed_alike`.
    """
    embedding: Any = module.base_model.get_input_embeddings()
    if not is_idle(embedding) and not _is_cut(embedding.weight, module, parameters):  # else the sum parts the tokens
        embedding.register_forward_hook(_TakeOwn(split))
    for name in dict.fromkeys((*_divided_modules(parameters, own_names), *alike)):
        part, enter = module.get_submodule(name), _Enter(split, name in alike)
        part.register_forward_pre_hook(enter, with_kwargs=True)
        part.register_forward_hook(enter.left, always_call=True)
        if name in alike:
            part.register_forward_hook(_TakeOwn(split))
    decoder, takes_out = module.base_model, False
    decoder.token_split = split
    for layer in decoder.modules():
        if isinstance(layer, PassingLayer) and layer.puts_in:
            layer.register_forward_hook(_TakeOwn(split))
        elif isinstance(layer, PassingLayer) and layer.takes_out:
            layer.register_forward_pre_hook(_Rejoin(split))
            takes_out = True
    if not takes_out:
        decoder.register_forward_hook(_RejoinOutput(split))


def token_split(decoder: nn.Module) -> TokenSplit | None:
    """That of a decoder which `split_tokens` was called on; None of others."""
    return vars(decoder).get("token_split")


def partial_parameters(
    module: Any, plan: Mapping[str, str], parameters: Parameters, own_names: set[str], alike: Collection[str]
) -> tuple[str, ...]:
    """Names of the parameters that are used on own tokens, so that each rank has a part of their gradient.

    Args:
        plan: style of modules and parameters, by names with `*` for numbers.
        own_names, alike: as of `split_tokens`.
    """
    divided, names = _divided_modules(parameters, own_names), []
    for param in _in_decoder(module, parameters, own_names):
        owner, _, leaf = param.name.rpartition(".")
        if module_of_layer(param.name) in alike:
            continue
        if module_of_layer(param.name) not in divided:
            if param.cut is None:
                names.append(param.name)
        elif plan.get(wildcard(owner)) in ("rowwise", "mixer_rows") and leaf == "bias":
            names.append(param.name)
    return tuple(names)


def computed_alike(module: Any, plan: Mapping[str, str], parameters: Parameters, own_names: set[str]) -> frozenset[str]:
    """Names of the modules of layers that need all tokens, on which ranks compute something alike: a router, a
    projection that is not divided, or all of it. Arguments as of `partial_parameters`; the weights are not looked at.

    Raises:
        ModelError: the model cannot part tokens (`undivided`).
    """
    if why := undivided(module, parameters, own_names):
        raise ModelError(f"sequence_parallel: {why}; set `sequence_parallel` to false")
    divided, alike = _divided_modules(parameters, own_names), set()
    for param in _in_decoder(module, parameters, own_names):
        name, owner = module_of_layer(param.name), wildcard(param.name.rpartition(".")[0])
        is_between = plan.get(owner) not in WITHIN if name in divided else len(param.shape) > 1
        if is_between and param.layer is not None and name != param.name:  # what is a layer's own meets own tokens
            alike.add(name)
    return frozenset(alike)


def undivided(module: Any, parameters: Parameters, own_names: set[str]) -> str:
    """Why ranks that hold a model by tensor parallelism cannot part tokens between its layers, in words for a person;
    empty: they can. Arguments as of `partial_parameters`; the weights are not looked at."""
    for param in _in_decoder(module, parameters, own_names):
        if (name := module_of_layer(param.name)).endswith(".experts"):
            return (
                f"{type(module).__name__} has `{wildcard(name)}` in its layers themselves, beside the router, where "
                "every rank needs all tokens"
            )
    return ""


def _in_decoder(module: Any, parameters: Parameters, own_names: set[str]) -> Iterator[Param]:
    """The rank's own parameters within the decoder, without the embedding."""
    prefix, embedding = f"{module.base_model_prefix}.", module.base_model.get_input_embeddings().weight
    whole = {name for name, param in module.named_parameters(remove_duplicate=False) if param is embedding}
    for param in parameters.params:
        if param.name in own_names and param.name.startswith(prefix) and param.name not in whole:
            yield param


def _is_cut(weight: Tensor, module: nn.Module, parameters: Parameters) -> bool:
    names = {name for name, param in module.named_parameters(remove_duplicate=False) if param is weight}
    return any(param.cut is not None for param in parameters.params if param.name in names)


def _divided_modules(parameters: Parameters, own_names: set[str]) -> tuple[str, ...]:
    """Names of the attentions and MLPs: what a layer consists of, where its parameters are cut."""
    return tuple(
        dict.fromkeys(
            module_of_layer(param.name)
            for param in parameters.params
            if param.layer is not None and param.cut is not None and param.name in own_names
        )
    )


def module_of_layer(name: str) -> str:
    """Name of the module of a decoder layer that a parameter or module is in; empty outside the layers."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdigit()), None)
    return "" if number is None else ".".join(words[: number + 2])


@dataclass(eq=False)
class _TakeOwn:
    split: TokenSplit

    def __call__(self, layer: nn.Module, args: Any, out: Any) -> Any:
        if not self.split.is_on:
            return out
        return (self.split.own(out[0]), *out[1:]) if isinstance(out, tuple) else self.split.own(out)


@dataclass(eq=False)
class _Enter:
    """All tokens of each rank's, of which a module keeps the own ones until it is left."""

    split: TokenSplit
    computes_alike: bool
    within: ExitStack = field(default_factory=ExitStack)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Enter:
        return _Enter(deepcopy(self.split, memo), self.computes_alike)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.split.is_on:
            return args, kwargs
        own = args[0] if args else kwargs["hidden_states"]
        whole = self.split.rejoined(own) if self.computes_alike else self.split.entered(own)
        self.within.enter_context(self.split.keeping(own, whole))
        return ((whole, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": whole})

    def left(self, layer: nn.Module, args: Any, out: Any) -> None:
        self.within.close()


@dataclass(eq=False)
class _Rejoin:
    split: TokenSplit

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.split.rejoined(args[0]), *args[1:]) if self.split.is_on else args


@dataclass(eq=False)
class _RejoinOutput:
    split: TokenSplit

    def __call__(self, decoder: nn.Module, args: Any, out: Any) -> Any:
        if self.split.is_on:
            out.last_hidden_state = self.split.rejoined(out.last_hidden_state)
        return out
