"""Which experts the tokens of a forward go to: routers are listened to, or told.

A router chooses by one call of `torch.topk`, of the scores of all experts of a token; whatever a family makes of it
(softmax before or behind, sigmoids, biases, groups), it takes weights from its scores at the places that come back. So
that call is the one place where a choice is seen, and where it is replaced by another: then the family's own code
weighs the experts that were told by its own scores, and gradients flow to the router (R3: Ma et al. 2025, arXiv
2510.11370, equations 7 and 8). That a family works like this is shown, not assumed (`Routers.check`).

Shapes: T tokens, E experts, K of them for each token, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.errors import ModelError
from plait.layout.params import Parameters
from plait.models.shape import ModelShape, config_fields

CHECKED_TOKENS = 12


class Routing(Protocol):
    """Who is told what routers choose, and may have them choose otherwise."""

    def chosen(self, layer: int, own_TK: Tensor) -> Tensor:
        """The experts that the tokens go to.

        Args:
            layer: number of the decoder layer.
            own_TK: int64, the router's own choice.

        Returns:
            [T, K] int64; `own_TK` itself leaves everything as it is, to the bit.
        """
        ...


class Routers:
    """The routers of a decoder, or of a stage of it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._routing: Routing | None = None

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """(E, K)"""
        return sizes_of(self._decoder.config)

    @cached_property
    def _mixtures(self) -> Mapping[int, Any]:
        """Number of the layer → the module around the experts of a layer."""
        found: dict[int, nn.Module] = {}
        for name, module in self._decoder.named_modules():
            number = next((int(part) for part in name.split(".") if part.isdigit()), None)
            if number is not None and "experts" in module._modules:
                found.setdefault(number, module)
        return found

    @contextlib.contextmanager
    def routed(self, routing: Routing | None) -> Iterator[None]:
        """Within it routers choose by `routing`; once, where it is entered again within. None: as they do."""
        if routing is None or routing is self._routing:
            yield
            return
        before, self._routing = self._routing, routing
        own = {layer: vars(mixture).get("forward") for layer, mixture in self._mixtures.items()}
        for layer, mixture in self._mixtures.items():
            choices = _Choices(*self._sizes, partial(routing.chosen, layer))
            mixture.forward = partial(_within, choices, mixture.forward)
        try:
            yield
        finally:
            self._routing = before
            for layer, mixture in self._mixtures.items():
                if own[layer] is None:
                    del mixture.forward
                else:
                    mixture.forward = own[layer]

    @torch.no_grad()
    def check(self, having: Callable[[int], contextlib.AbstractContextManager[None]]) -> None:
        """Have the routers of a few tokens told experts that are not their own, up to where these would compute.

        Args:
            having: within what it makes of the number of a layer, the weights of that are there.

        Raises:
            ModelError: a mixture does not ask once for each forward, or its experts are not given those, each with a
                weight.
        """
        config = self._decoder.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, CHECKED_TOKENS, config.hidden_size, generator=generator)
        for layer, mixture in self._mixtures.items():
            told_TK = torch.rand(CHECKED_TOKENS, self._sizes[0], generator=generator).argsort(-1)[:, : self._sizes[1]]
            with having(layer):
                weight = next(mixture.parameters())
                fault = _fault(mixture, hidden.to(weight.device, weight.dtype), told_TK, self)
            if fault is not None:
                raise ModelError(
                    f"`sampling.router_replay`: the routers of {type(self._decoder).__name__} (family "
                    f"{config.model_type}) cannot be told what to choose: in layer {layer} {fault}; set "
                    "`sampling.router_replay` to false, or `model` to another family"
                )

    def choices(self, choose: Callable[[Tensor], Tensor]) -> TorchFunctionMode:
        """Within it calls of `torch.topk` that choose experts go by `choose`: own choice [T, K] to [T, K]."""
        return _Choices(*self._sizes, choose)


def sizes_of(config: Any) -> tuple[int, int]:
    """(E, K) of a configuration of Transformers; zeros where it has no mixture of experts."""
    shape = ModelShape.from_config(config_fields(config.get_text_config()))
    return shape.experts, shape.experts_per_token


def mixtures_of(parameters: Parameters) -> tuple[int, ...]:
    """The layers of a whole model that are mixtures of experts, ascending."""
    return tuple(sorted({param.layer for param in parameters.params if ".experts." in param.name} - {None}))  # type: ignore[type-var]


class _Choices(TorchFunctionMode):
    """Calls of `topk` that give K of E; all else is as it is."""

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._choose = num_experts, top_k, choose

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores: Tensor = (*args, *(kwargs or {}).values())[0]
        # Of scores with a dim for groups of experts it chooses within each.
        if scores.ndim != 2 or (scores.shape[1], out[1].shape[1]) != (self._num_experts, self._top_k):
            return out
        own_TK = out[1]
        chosen_TK = self._choose(own_TK)
        if chosen_TK is own_TK:
            return out
        return torch.return_types.topk((scores.gather(1, chosen_TK), chosen_TK))


_TOPK = frozenset((torch.topk, torch.Tensor.topk))


def _within(mode: _Choices, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


class _Reached(Exception):
    """The experts would compute now; what they were given."""


class _NoExperts(nn.Module):
    """Stands in the place of experts."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _Reached(*args, *kwargs.values())


def _fault(mixture: Any, hidden_1TH: Tensor, told_TK: Tensor, routers: Routers) -> str | None:
    """What is wrong with a mixture whose router is told experts; None: nothing."""
    told_TK, asked = told_TK.to(hidden_1TH.device), []
    experts, mixture._modules["experts"] = mixture._modules["experts"], _NoExperts()
    given: tuple[Any, ...] = ()
    try:
        with routers.choices(lambda own_TK: asked.append(own_TK) or told_TK):
            mixture(hidden_1TH)
    except _Reached as reached:
        given = reached.args
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        return f"its mixture does not compute by itself ({type(error).__name__}: {error})"
    finally:
        mixture._modules["experts"] = experts
    if len(asked) != 1:
        return f"`topk` chose experts {len(asked)} times, expected once"
    tensors = [value for value in given if isinstance(value, Tensor) and value.shape == told_TK.shape]
    if not any(torch.equal(value, told_TK) for value in tensors if not value.is_floating_point()):
        return "the experts are not given those that were told"
    if not any(value.isfinite().all() and (value != 0).all() for value in tensors if value.is_floating_point()):
        return "experts that were told have no weight"
    return None
