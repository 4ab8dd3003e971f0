"""The head of a model: from the hidden states after the final norm to logits.

Final softcaps and logit scales stand in the family's own `forward`, so the head is that forward with the decoder
replaced by a module that hands on the given hidden states. (Replacing the decoder as a whole, rather than its layers,
leaves nothing of it to be applied again, such as granite's embedding multiplier.)

Shapes: N rows, C rows of one chunk, H hidden size, V vocabulary, W the part of it that this rank has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import Parameters
from plait.models.compute.float64 import kept_float64
from plait.models.parallel.collectives import copied, gathered
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token ids whose logits this rank computes, of a head that ranks share to have one softmax.

    Args:
        peers: the ranks of tensor parallelism.
        bounds: first token id of each, and the size of the vocabulary.
    """

    peers: Peers
    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.bounds[self.peers.index]

    @property
    def stop(self) -> int:
        return self.bounds[self.peers.index + 1]

    def most(self, top_C: Tensor) -> Tensor:
        """The largest [C] over all ranks; in place."""
        return self.peers.all_reduce(top_C, "max")

    def sums(self, *parts_C: Tensor) -> tuple[Tensor, ...]:
        """The sum [C] of each over all ranks."""
        return self.peers.all_reduce(torch.stack(parts_C)).unbind()

    def places(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Columns [C] of the targets among this rank's logits (any where it has not), and whether it has them [C]."""
        has_C = (targets_C >= self.start) & (targets_C < self.stop)
        return (targets_C - self.start).clamp(0, self.stop - self.start - 1), has_C

    def shared(self, hidden_NH: Tensor) -> Tensor:
        """The hidden states [N, H], equal on all ranks, for a head of which each rank has a part."""
        return copied(hidden_NH, self.peers)

    def gather(self, logits_NW: Tensor) -> Tensor:
        """All logits [N, V], on every rank; differentiable."""
        return gathered(logits_NW, self.peers, tuple(pairwise(self.bounds)))


@dataclass(frozen=True)
class Head:
    """From hidden states to logits.

    `linear` is set when the head is proven to be one linear map; its backward is then written out by hand
    (`compute.logprobs`). Otherwise `family` (softcaps, logit scales, anything a family does) is differentiated.
    """

    family: Callable[[Tensor], Tensor]
    """[N, H] → [N, V] by the module's own forward; of a `linear` head by its one layer."""
    params: tuple[nn.Parameter, ...]
    """Those that `family` uses; weight [V, H] and perhaps bias [V] when `linear`."""
    linear: bool = False
    vocabulary: Vocabulary | None = None
    """The part of the vocabulary V that `family` and `params` have, where ranks share the head; None: all of it."""

    @property
    def weight(self) -> Tensor:
        """[V, H] of a linear head."""
        assert self.linear, "only a linear head has a weight to speak of"
        return self.params[0]

    @property
    def bias(self) -> Tensor | None:
        """[V] of a linear head."""
        assert self.linear, "only a linear head has a bias to speak of"
        return self.params[1] if len(self.params) > 1 else None

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in the compute dtype; of the whole vocabulary, on each rank that shares the head."""
        if self.vocabulary is None:
            return self.family(hidden_NH)
        return self.vocabulary.gather(self.family(self.vocabulary.shared(hidden_NH)))


def _no_family(hidden_NH: Tensor) -> Tensor:
    raise AssertionError("only the last pipeline stage has a head")


NO_HEAD = Head(_no_family, ())
"""The head of the other stages."""


class _DecoderOutput(tuple):
    """What a family's `forward` reads of its decoder: the hidden states, by index or by name; the rest is None."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _PassHidden(nn.Module):
    """Stands in for a decoder; its plain attributes (a factor of the logits, say) are kept, which a head may read."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        for name, value in vars(decoder).items():
            if isinstance(value, bool | int | float | str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, input_ids: Any = None, *, inputs_embeds: Tensor, **_: Any) -> _DecoderOutput:
        return _DecoderOutput((inputs_embeds,))


def find_head(module: Any, vocabulary: Vocabulary | None = None) -> Head:
    """The head of a Transformers causal LM, by the fast path when that is proven equal on random hidden states.

    Args:
        vocabulary: which part of the vocabulary the module has; None: all of it.

    Raises:
        ModelError: the family's forward does more with its decoder than to call it.
    """
    head, hidden_NH, logits_NV = family_head(module, vocabulary)
    if not _is_linear(module, head.params):
        return head
    linear = Head(module.get_output_embeddings(), head.params, linear=True, vocabulary=vocabulary)
    with torch.no_grad():
        return linear if torch.equal(linear.family(hidden_NH), logits_NV) else head


def family_head(module: Any, vocabulary: Vocabulary | None = None) -> tuple[Head, Tensor, Tensor]:
    """The head by the family's own forward; random hidden states, [N, H], and what it made of them, [N, V].

    Args:
        module: perhaps without weights, on the meta device.

    Raises:
        ModelError: as of `find_head`.
    """
    stage = copy.copy(module)
    stage._modules = {**module._modules, module.base_model_prefix: _PassHidden(module.base_model)}

    def family(hidden_NH: Tensor) -> Tensor:
        with kept_float64(hidden_NH.dtype):
            return stage(inputs_embeds=hidden_NH[None], use_cache=False).logits[0]

    head = Head(family, tuple(stage.parameters()), vocabulary=vocabulary)
    hidden_NH = _random_hidden(module)
    try:
        with torch.no_grad():
            return head, hidden_NH, family(hidden_NH)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"model: {type(module).__name__} is refused: its head cannot be run without its decoder "
            f"({type(error).__name__}: {error}). Set `model` to another family."
        ) from error


def head_of_part(module: Any, parameters: Parameters, team: Team) -> Head:
    """The head of a rank's part of a causal LM.

    Args:
        module: whose parameters are this rank's.
        parameters: of the whole model.

    Raises:
        ModelError: see `find_head`; or the family's plan for tp cuts its head along a dim that is not its rows.
    """
    if not team.is_last_stage:
        return NO_HEAD
    weight = module.get_output_embeddings().weight
    name = next(name for name, param in module.named_parameters() if param is weight)
    param = next(param for param in parameters.params if param.name == name)
    if team.tp.size == 1 or param.cut is None:
        return find_head(module)
    if param.cut != 0:
        raise ModelError(f"tp: the plan of {type(module).__name__} cuts its head along dim {param.cut}; set tp to 1.")
    starts = [param.tp_range(index, team.tp.size)[0] for index in range(team.tp.size)]
    return find_head(module, Vocabulary(team.tp, (*starts, param.extent)))


def _random_hidden(module: Any) -> Tensor:
    """[6, H] from small to large: a softcap shows on large logits only, in narrow dtypes."""
    weight = module.get_input_embeddings().weight
    hidden_size = module.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)
    random_NH = torch.randn(6, hidden_size, generator=generator, dtype=torch.float64)
    scale_N = torch.tensor([0.1, 1.0, 1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    return (random_NH * scale_N[:, None]).to(weight.device, weight.dtype)


def _is_linear(module: Any, params: tuple[nn.Parameter, ...]) -> bool:
    output = module.get_output_embeddings()
    if type(output) is not nn.Linear:
        return False
    parameters = [output.weight] if output.bias is None else [output.weight, output.bias]
    return len(parameters) == len(params) and all(
        mine is theirs for mine, theirs in zip(parameters, params, strict=True)
    )
