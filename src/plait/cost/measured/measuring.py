"""Measures a machine for a cost model: products, copies, forwards, backwards, decoding steps, links. Imports torch.

Layers are measured by two models of random weights, of which one has more of them: the difference has nothing of what
is beside layers. All quantities are measured by turns, several times (`stopwatch.in_rounds`): cores change
their speed within minutes, and a forecast is made of many quantities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from plait.cost.machine import machine_name
from plait.cost.measured.cut import FEW as CUT_FEW
from plait.cost.measured.cut import MANY as CUT_MANY
from plait.cost.measured.cut import REPEATS as CUT_REPEATS
from plait.cost.measured.host import measure_host
from plait.cost.measured.links import ROUNDS as LINK_ROUNDS
from plait.cost.measured.links import measure_links
from plait.cost.measured.rates import COPIED_BYTES
from plait.cost.measured.sizes import Sizes, sizes_of
from plait.cost.measured.stopwatch import ROUNDS, Seconds, Size, Work, in_rounds, seconds_of
from plait.cost.measured.work import (
    backward_s,
    decode_by_layers_s,
    decode_s,
    forward_s,
    layers_alone,
    optimizer_s,
    packing_s,
    prompt_s,
    random_model,
    response_tokens,
)
from plait.cost.model_work import ModelWork
from plait.cost.profile import Points, Profile, Steps
from plait.memory_limits import machine_bytes
from plait.models.compute import widened
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape

FEW, MANY, MOST = 1, 3, 9
"""Layers of the two models that are measured: FEW, and MANY to MOST, as fit into MANY_BYTES."""
MANY_BYTES = 1 << 30
QUICK_ERROR = 0.2
"""The error of a profile of few sizes, as nothing was measured to tell it."""
BUDGET_S = 60.0
"""Further sizes and rounds are not begun once so much has passed; what must be measured comes on top, and on a GPU all
of a first round, in which torch compiles for a minute or so."""
SHARED_S = 15.0
"""Rows are not measured whose layers, shared by two processes, would take longer in all rounds."""
MOST_PACKED = 1e12
"""Bytes per second that nothing packs: what takes less did not."""
ALONE: Size = (0,)
"""The size of what has one."""


Layers = dict[Size, tuple[float, float]]
"""Size → seconds of a layer, of everything else."""


def measure(
    name: str, config: Mapping[str, Any], dtype: str, device: str, threads: int, *, quick: bool = False
) -> Profile:
    """
    Args:
        name: of the model.
        config: its configuration, as `config.json` has it; its layers are left away but for a few.
        quick: few sizes, once beside what warms up, and none to tell the error by, which is then taken as
            `QUICK_ERROR`.
    """
    torch.set_num_threads(threads)
    models, sizes = Models.of(name, config, dtype, device), sizes_of(device, quick=quick)
    works, compiles = _works(models, sizes), device == "cuda"
    measured = in_rounds(works, BUDGET_S, rounds=1 if quick else ROUNDS, compiles=compiles)
    copy_rate = 2 * COPIED_BYTES / measured["copying"][ALONE][0]
    least_s = ModelWork(models.shape, dtype, 1).read(1) / copy_rate
    forward, backward, prompts, decode, by_layers = (
        by_layer(measured[family], least_s)
        for family in ("forward", "backward", "prompts", "decode", "decode by layers")
    )
    rounds = 1 if quick else LINK_ROUNDS
    shared = _shared_tokens(forward, backward, rounds) if device == "cpu" else ()
    links = measure_links(config, dtype, shared, rounds=rounds)
    profile = Profile(
        machine=machine_name(device),
        device=device,
        threads=threads,
        dtype=dtype,
        model=name,
        shape=models.shape,
        memory_gib=_memory_gib(device),
        forward=_layers(forward),
        backward=_no_faster(backward, forward),
        cut_forward=links.cut.forward,
        cut_backward=links.cut.backward,
        prompts=_layers(prompts),
        decode=_steps(decode),
        decode_by_layers=_steps(by_layers),
        head=_rests(forward),
        head_backward=_rests(backward),
        drawing=_drawing(decode),
        products=_products(measured["products"], models.shape),
        copy_bytes_per_s=copy_rate,
        packing_bytes_per_s=models.packing_rate(measured["packing"][ALONE][0]),
        widens=device == "cpu" and widened.WIDENS,
        optimizer_s=measured["optimizer"][ALONE][0],
        send=links.send,
        all_reduce=links.all_reduce,
        between=links.between,
        host=measure_host(device) if device == "cuda" else None,
        contention=links.contention if device == "cpu" else 1.0,
        error=0.0,
    )
    return profile.model_copy(update={"error": QUICK_ERROR if quick else _held_out_error(profile, models, sizes)})


@dataclass(frozen=True)
class Models:
    """few: of FEW layers; many: of so many `layers`."""

    shape: ModelShape
    few: LanguageModel
    many: LanguageModel
    layers: int

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], dtype: str, device: str) -> Self:
        shape = ModelShape.from_config(config, name)
        fitting = MANY_BYTES / ModelWork(shape, dtype, 1).read(shape.experts)
        layers = max(MANY, min(MOST, int(fitting)))
        few, many = (random_model(config, count, dtype, device) for count in (FEW, layers))
        return cls(shape, few, many, layers)

    def row(self, run_s: Callable[..., float], tokens: int) -> Seconds:
        """(a layer's, those of FEW layers and all beside them)."""
        short, long = (run_s(model, tokens, layers_alone) for model in (self.few, self.many))
        return (long - short) / (self.layers - FEW), run_s(self.few, tokens)

    def step(self, run_s: Callable[..., float], *size: int) -> Seconds:
        """(a layer's, those of FEW layers and all beside them)."""
        short, long = (run_s(model, *size) for model in (self.few, self.many))
        return (long - short) / (self.layers - FEW), short

    def packing_rate(self, seconds: float) -> float | None:
        """Bytes of weights that a new engine packs in a second; None where they are not packed."""
        num_bytes = self.many.weights.numel() * self.many.weights.element_size()
        return num_bytes / seconds if seconds > num_bytes / MOST_PACKED else None


def _works(models: Models, sizes: Sizes) -> dict[str, dict[Size, Work]]:
    """All that is measured by turns."""
    device = models.few.device.type
    most = models.shape.max_positions - response_tokens(models.shape.max_positions) - 1
    prompts = dict.fromkeys(min(tokens, most) for tokens in sizes.prompts)
    decoded, by_layers = (
        tuple(dict.fromkeys((samples, min(context, most)) for samples, context in steps))
        for steps in (sizes.decoded, sizes.by_layers)
    )
    return {
        "copying": {ALONE: partial(copy_s, device)},
        "forward": {(tokens,): partial(models.row, forward_s, tokens) for tokens in sizes.rows},
        "prompts": {(tokens,): partial(models.step, prompt_s, tokens) for tokens in prompts},
        "decode": {size: partial(models.step, decode_s, *size) for size in decoded},
        "decode by layers": {size: partial(models.step, decode_by_layers_s, *size) for size in by_layers},
        "backward": {(tokens,): partial(models.row, backward_s, tokens) for tokens in sizes.back},
        "products": {(tokens,): partial(_product_s, models.few, models.shape, tokens) for tokens in sizes.products},
        "packing": {ALONE: lambda: (packing_s(models.many),)},
        "optimizer": {ALONE: lambda: (optimizer_s(models.few),)},
    }


def by_layer(measured: Mapping[Size, Seconds], least_s: float) -> Layers:
    """
    Args:
        measured: (a layer's seconds, those of FEW layers and all beside them) of each size.
        least_s: what reading a layer's weights takes, and so a layer at least: those of few layers stay in caches,
            those of a whole model do not; and on a busy machine a difference of two times may be anything.
    """
    layers = {size: (max(least_s, layer), whole) for size, (layer, whole) in measured.items()}
    return {size: (layer, max(0.0, whole - FEW * layer)) for size, (layer, whole) in layers.items()}


def _shared_tokens(forward: Layers, backward: Layers, rounds: int) -> list[int]:
    """Tokens of rows that pass layers which two processes share: as many as `SHARED_S` has room for."""
    seconds = {tokens: forward[(tokens,)][0] + layer for (tokens,), (layer, _) in backward.items()}
    repeats = rounds * CUT_REPEATS * (CUT_FEW + CUT_MANY)
    return [tokens for tokens in seconds if repeats * seconds[tokens] < SHARED_S]


def _layers(measured: Layers) -> Points:
    return tuple((size[0], layer) for size, (layer, _) in measured.items())


def _rests(measured: Layers) -> Points:
    return tuple((size[0], max(1e-9, rest)) for size, (_, rest) in measured.items())


def _steps(measured: Layers) -> Steps:
    return tuple((samples, context, layer) for (samples, context), (layer, _) in measured.items())


def _no_faster(backward: Layers, forward: Layers) -> Points:
    """Backwards of a layer take no less than its forwards: they compute twice as much."""
    return tuple((size[0], max(layer, forward.get(size, (0.0,))[0])) for size, (layer, _) in backward.items())


def _drawing(measured: Layers) -> Points:
    """The shortest of each number of samples, whatever their context."""
    rests: dict[int, list[float]] = {}
    for (samples, _), (_, rest) in measured.items():
        rests.setdefault(samples, []).append(rest)
    return tuple((samples, min(taken)) for samples, taken in sorted(rests.items()))


def _product_s(model: LanguageModel, shape: ModelShape, rows: int) -> Seconds:
    from plait.models.compute import cpu_linear

    weight = torch.ones(shape.intermediate, shape.hidden, dtype=model.dtype, device=model.device)
    left = torch.ones(rows, shape.hidden, dtype=model.dtype, device=model.device)
    with torch.inference_mode():
        return (seconds_of(lambda: cpu_linear.linear(left, weight), model.device.type),)


def _products(measured: Mapping[Size, Seconds], shape: ModelShape) -> Points:
    """Floating point operations per second of products with a layer's largest matrix."""
    operations = 2 * shape.hidden * shape.intermediate
    return tuple((rows, rows * operations / seconds) for (rows,), (seconds,) in measured.items())


def copy_s(device: str) -> Seconds:
    """Seconds of a copy of COPIED_BYTES."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # memory that nobody has touched takes several times as long
    return (seconds_of(lambda: target.copy_(source), device),)


def _held_out_error(profile: Profile, models: Models, sizes: Sizes) -> float:
    """Error of forwards and decoding steps of the larger model, foretold by the profile."""
    model, layers, errors = models.many, models.layers, []
    for tokens in sizes.held_out_rows:
        if tokens < profile.forward[-1][0]:
            foretold = layers * profile.layer_s(tokens) + profile.head_s(tokens)
            errors.append(abs(foretold / forward_s(model, tokens) - 1))
    longest = max(context for _, context, _ in profile.decode)
    few = [size for size in sizes.held_out_decoded if size[0] <= profile.decode[-1][0] and size[1] <= longest]
    for samples, context in few:
        foretold = layers * profile.decode_s(samples, samples * context) + profile.drawing_s(samples)
        errors.append(abs(foretold / decode_s(model, samples, context) - 1))
    return sum(errors) / max(1, len(errors))


def _memory_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return machine_bytes() / 2**30
