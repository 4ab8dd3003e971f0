"""That a compiled forward computes what its module computes: shown layer by layer, each from the module's own input.

The module computes a few random prompts once, and is watched. Then each compiled layer gets what the module's got,
so nothing that earlier layers rounded hides an error of this one. Two things are asked of each difference:

1. It is of the size of rounding, in every row.
2. It points nowhere. Rounding is chance, so its projection on what the attention added, and on what the MLP added,
   averages out. A factor of 1.01 on either does not, even where rounding is larger than the difference it makes.

Embeddings, final norm and head are compared in the same way, as far as a stage has them; all layers in one go must
give the bits of one after the other. The prompts come in chunks, alone and beside others; one stands at far positions;
windows are narrowed, for no prompt of this length would reach their edge.

Shapes: T tokens of the prompts, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.data.packed import pack as packed_row
from plait.generation.dense_layers import decoder_layers, entering, input_of
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, ragged
from plait.generation.refused import require
from plait.kernels.paged_attention import KEYS
from plait.models.compute.attention import PackedContext
from plait.models.compute.attention_form import AttentionForm
from plait.models.language_model import LanguageModel
from plait.models.working_weights import adapted_layers, adapter_name

ROUNDING = {torch.float32: 64.0, torch.bfloat16: 4.0}
"""Root-mean-square difference of a row at most, in units of the last place of what is compared. The order of a sum is
all that differs in float32, and shows the more the longer it is."""

FACTOR = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""The part of what is added that a difference may be, beyond what chance explains."""

DEVIATIONS = 6
"""Standard deviations that count as chance."""

LENGTHS = (2 * KEYS + 5, 3, 6)
"""Tokens of the prompts; the last one stands at far positions."""
SPLIT = KEYS + 2
"""Tokens of the first prompt in its first chunk."""
WINDOW = 4
FAR = 1 << 15
"""Positions beyond it are not tried: tables of angles would be long."""
NUM_LOGITS = 8
"""Rows whose logits are compared."""
NUM_IN_ONE_GO = 2
"""Tokens for which all layers are computed in one go."""
SMALLEST = 1e-30


class Layered(Protocol):
    """A forward that can be shown layer by layer."""

    model: LanguageModel

    def embedded(self, token_ids_T: Tensor) -> Tensor:
        """What enters the first layer of the first stage: [T, H]."""
        ...

    def decoded(
        self, x_TH: Tensor, batch: RaggedBatch, pool: KVPool, layers: slice = ..., *, window: int | None = None
    ) -> Tensor:
        """Hidden states [R, H] after these layers and the final norm; x_TH holds what leaves the last of them then.

        Args:
            window: narrows those of layers that have one.
        """
        ...

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, V]."""
        ...


def prove(forward: Layered) -> None:
    """Compare a compiled forward with its module on random tokens, with another adapter in place of theirs. Its weights
    stay packed as they were then.

    Raises:
        Refused: they differ; says where and how much.
    """
    with _stirred(forward.model):
        _prove(forward)


def _prove(forward: Layered) -> None:
    model, module = forward.model, forward.model.module.base_model
    row, positions_T = _prompts(model.config.get_text_config().vocab_size, model.max_positions)
    inputs_TH = entering(model, row.num_tokens)
    with torch.no_grad(), _watched(module) as seen:
        hidden_TH = model.hidden(row.token_ids_T, positions_T, _Narrow(row), inputs_TH=inputs_TH)
    steps, pool = _steps(row, positions_T), KVPool(KEYS)
    pool.reserve(5, 5)
    if inputs_TH is None:
        _compare("embeddings", forward.embedded(row.token_ids_T), seen[0].entered, [seen[0].entered])
    for number, layer in enumerate(seen):
        x_TH, normed_TH = layer.entered.clone(), torch.empty_like(hidden_TH)
        for rows_T, batch in steps:
            x_nH = x_TH[rows_T]
            this_layer = slice(number, number + 1)
            normed_TH[rows_T] = forward.decoded(x_nH, batch, pool, this_layer, window=WINDOW)
            x_TH[rows_T] = x_nH
        _compare(f"layer {number}", x_TH, layer.left, [layer.attention, layer.mlp])
    if model.team.is_last_stage:
        with torch.no_grad():
            expected_TH, logits_NV = module.norm(x_TH), model.logits(hidden_TH[-NUM_LOGITS:])
        _compare("final norm", normed_TH, expected_TH, [expected_TH])
        _compare("logits", forward.logits(hidden_TH[-NUM_LOGITS:]), logits_NV, [logits_NV])
    few = slice(NUM_IN_ONE_GO)
    _prove_in_one_go(forward, row.token_ids_T[few], seen[0].entered[few], pool, len(seen))


def _prove_in_one_go(forward: Layered, token_ids_T: Tensor, entered_TH: Tensor, pool: KVPool, num_layers: int) -> None:
    """Raises Refused where all layers in one go give other bits than one after the other."""
    batch = ragged([NewTokens(token_ids_T.tolist(), 0, (0,))], KEYS)
    x_TH, at_once_TH = entered_TH.clone(), entered_TH.clone()
    for number in range(num_layers):
        normed_TH = forward.decoded(x_TH, batch, pool, slice(number, number + 1))
    is_same = torch.equal(forward.decoded(at_once_TH, batch, pool), normed_TH) and torch.equal(at_once_TH, x_TH)
    require(is_same, "its layers in one go are not those one after another")


def _compare(what: str, found: Tensor, expected: Tensor, parts: Sequence[Tensor]) -> None:
    """Raises Refused where found [N, X] is not expected [N, X] but for rounding.

    Args:
        parts: [N, X] each, what `expected` is a sum of; each is rounded on its way.
    """
    scale = expected.float().square()
    for part in parts:
        scale = scale + part.float().square().mean(1, keepdim=True)
    scale = scale.sqrt().clamp(min=SMALLEST)
    error = (found.float() - expected.float()) / scale
    worst = float(error.square().mean(1).sqrt().max()) / torch.finfo(expected.dtype).eps
    require(
        worst <= ROUNDING[expected.dtype], f"its compiled {what} differs from the module's by {worst:.2g} roundings"
    )
    spread = float(error.square().mean().sqrt())
    for part in parts:
        direction = part.float() / scale
        size = max(float(direction.square().sum()), SMALLEST)
        factor = float((error * direction).sum()) / size
        chance = DEVIATIONS * spread / size**0.5
        require(
            abs(factor) <= FACTOR[expected.dtype] + chance,
            f"its compiled {what} differs from the module's by a factor of {1 - factor:.4f} in what it adds",
        )


def _prompts(vocab_size: int, max_positions: int) -> tuple[PackedBatch, Tensor]:
    """Random prompts in one row, and their positions [T]."""
    generator = torch.Generator().manual_seed(0)
    row = packed_row([(torch.randint(vocab_size, (n,), generator=generator).tolist(), ()) for n in LENGTHS])
    positions_T = row.position_ids_T.clone()
    positions_T[-LENGTHS[-1] :] = torch.linspace(0, min(max_positions, FAR) - 1, LENGTHS[-1]).long()
    return row, positions_T


def _steps(row: PackedBatch, positions_T: Tensor) -> list[tuple[Tensor, RaggedBatch]]:
    """The row in two steps: (places in it, the batch) of each."""
    tables, starts = ((3, 0, 2), (1,), (4,)), [group.prompt.start for group in row.groups]
    short, first = LENGTHS[1] - 1, SPLIT
    cuts = [[(1, 0, short), (2, 0, LENGTHS[2]), (0, 0, first)], [(1, short, LENGTHS[1]), (0, first, LENGTHS[0])]]
    steps = []
    for cut in cuts:
        rows_T = torch.cat([torch.arange(starts[prompt] + at, starts[prompt] + stop) for prompt, at, stop in cut])
        new = [
            NewTokens(row.token_ids_T[starts[prompt] + at : starts[prompt] + stop].tolist(), at, tables[prompt])
            for prompt, at, stop in cut
        ]
        steps.append((rows_T, replace(ragged(new, KEYS), position_ids_T=positions_T[rows_T])))
    return steps


class _Narrow(PackedContext):
    """Windows of at most WINDOW tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See AttentionContext.attend."""
        window = None if form.window is None else min(form.window, WINDOW)
        return super().attend(layer, query, key, value, replace(form, window=window))


@dataclass
class _Seen:
    """What a layer of the module got, added and gave; [T, H] each."""

    entered: Tensor = field(init=False)
    attention: Tensor = field(init=False)
    mlp: Tensor = field(init=False)
    left: Tensor = field(init=False)


@contextlib.contextmanager
def _watched(module: Any) -> Iterator[list[_Seen]]:
    """Note what passes the layers of the module meanwhile."""
    layers = decoder_layers(module).values()
    seen, hooks = [_Seen() for _ in layers], []

    def keep(watched: _Seen, name: str) -> Any:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            setattr(watched, name, (out[0] if isinstance(out, tuple) else out).flatten(0, -2))

        return hook

    def entering(watched: _Seen) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            watched.entered = input_of(args, kwargs)[0]

        return hook

    for layer, watched in zip(layers, seen, strict=True):
        hooks.append(layer.register_forward_pre_hook(entering(watched), with_kwargs=True))
        parts = ((layer.self_attn, "attention"), (layer.mlp, "mlp"), (layer, "left"))
        hooks += [part.register_forward_hook(keep(watched, name)) for part, name in parts]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _stirred(model: LanguageModel) -> Iterator[None]:
    """Meanwhile the model's adapter is another one, which adds about half of what the weights under it give: B of a
    fresh one is 0, and hides all errors."""
    adapter = adapter_name(model.own)
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[nn.Linear, nn.Parameter]] = []
    for layer in adapted_layers(model.module.base_model).values():
        if adapter not in layer.lora_A:
            continue
        low, high = layer.lora_A[adapter], layer.lora_B[adapter]
        rank, num_in = low.weight.shape
        size = float(layer.base_layer.weight.detach().float().norm(dim=1).mean())
        for linear, spread in ((low, num_in**-0.5), (high, size / layer.scaling[adapter] / rank**0.5 / 2)):
            values = spread * torch.randn(linear.weight.shape, generator=generator)
            kept.append((linear, linear.weight))
            linear.weight = nn.Parameter(values.to(linear.weight.dtype), requires_grad=False)
    try:
        yield
    finally:
        for linear, weight in kept:
            linear.weight = weight
