"""Measures a machine for a cost model: products, copies, forwards, backwards, decoding steps, links. Imports torch.

All quantities are measured by turns, several times (`stopwatch.in_rounds`): cores change their speed within minutes,
and a forecast is made of many quantities. What layers take is told by models that have more or fewer (`models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from plait.cost.machine import machine_name
from plait.cost.measured.links import ROUNDS as LINK_ROUNDS
from plait.cost.measured.links import Links, measure_gpu_links, measure_links
from plait.cost.measured.models import (
    Layers,
    Models,
    Pair,
    by_layer,
    drawing_of,
    layers_of,
    no_faster,
    of_steps,
    rests_of,
    steps_of,
)
from plait.cost.measured.rates import COPIED_BYTES
from plait.cost.measured.sharded_layer import FEW as SHARDED_FEW
from plait.cost.measured.sharded_layer import MANY as SHARDED_MANY
from plait.cost.measured.sharded_layer import REPEATS as SHARDED_REPEATS
from plait.cost.measured.sizes import Sizes, sizes_of
from plait.cost.measured.stopwatch import ROUNDS, Seconds, Size, Work, in_rounds, seconds_in_a_row, seconds_of
from plait.cost.measured.work import (
    backward_s,
    capture_s,
    decode_by_layers_s,
    decode_s,
    forward_s,
    optimizer_s,
    packing_s,
    prompt_s,
    response_tokens,
)
from plait.cost.model_work import ModelWork
from plait.cost.profile import LinkRecord, Points, Profile, Steps
from plait.memory_limits import machine_bytes
from plait.models.compute import widened
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape

QUICK_ERROR = 0.2
"""The error of a profile of few sizes, as nothing was measured to tell it."""
BUDGET_S = 60.0
"""Further sizes and rounds are not begun once so much has passed; what must be measured comes on top, and on a GPU all
of a first round, in which torch compiles for a minute or so."""
HOST_SIZES = (1 << 12, 1 << 26)
"""Bytes of a copy between a device and its host that is all latency, and of one that is none."""
SHARED_S = 15.0
"""Rows are not measured whose layers, shared by two processes, would take longer in all rounds."""
ALONE: Size = (0,)
"""The size of what has one."""


def measure(
    name: str, config: Mapping[str, Any], dtype: str, device: str, threads: int, *, quick: bool = False
) -> Profile:
    """
    Args:
        name: of the model.
        config: its configuration, as `config.json` has it; its layers are left away but for a few. Of a model of images
            and texts the part for texts is measured.
        quick: few sizes, once beside what warms up, and none to tell the error by, which is then taken as
            `QUICK_ERROR`.
    """
    torch.set_num_threads(threads)
    config = config.get("text_config") or config
    links, sizes = measure_gpu_links() if device == "cuda" else Links(), sizes_of(device, quick=quick)
    models = Models.of(name, config, dtype, device, sizes.most_tokens)
    works, compiles = _works(models, sizes), device == "cuda"
    measured = in_rounds(works, BUDGET_S, rounds=1 if quick else ROUNDS, compiles=compiles)
    copy_rate = 2 * COPIED_BYTES[device] / measured["copying"][ALONE][0]
    least_s = ModelWork(models.shape, dtype, 1).read(1) / copy_rate
    forward, backward, prompts, by_layers = (
        by_layer(measured[family], least_s, models.rows.few_layers)
        for family in ("forward", "backward", "prompts", "decode by layers")
    )
    decode, drawing = _decoding(measured["decode"], models.steps, least_s, device)
    if device == "cpu":
        links = _links_of_cpu(config, dtype, forward, backward, 1 if quick else LINK_ROUNDS)
    profile = Profile(
        machine=machine_name(device),
        device=device,
        threads=threads,
        dtype=dtype,
        model=name,
        shape=models.shape,
        memory_gib=_memory_gib(device),
        forward=layers_of(forward),
        backward=no_faster(backward, forward),
        cut_forward=links.sharded.forward,
        cut_backward=links.sharded.backward,
        prompts=layers_of(prompts),
        decode=decode,
        decode_by_layers=steps_of(by_layers),
        head=rests_of(forward),
        head_backward=rests_of(backward),
        drawing=drawing,
        capture_s=measured["capturing"][ALONE][0] if device == "cuda" else None,
        products=_products(measured["products"], models.shape),
        copy_bytes_per_s=copy_rate,
        packing_bytes_per_s=models.packing_rate(measured["packing"][ALONE][0]),
        widens=device == "cpu" and widened.WIDENS,
        optimizer_s=measured["optimizer"][ALONE][0],
        links_over="nccl" if device == "cuda" else "gloo",
        send=links.send,
        all_reduce=links.all_reduce,
        between=links.between,
        host=measure_host(device) if device == "cuda" else None,
        contention=links.contention,
        error=0.0,
    )
    return profile.model_copy(update={"error": QUICK_ERROR if quick else _held_out_error(profile, models, sizes)})


def _works(models: Models, sizes: Sizes) -> dict[str, dict[Size, Work]]:
    """All that is measured by turns."""
    few, rows, deep = models.rows.few, models.rows, models.steps
    device = few.device.type
    most = models.shape.max_positions - response_tokens(models.shape.max_positions) - 1
    prompts = dict.fromkeys(min(tokens, most) for tokens in sizes.prompts)
    decoded, by_layers = (
        tuple(dict.fromkeys((samples, min(context, most)) for samples, context in steps))
        for steps in (sizes.decoded, sizes.by_layers)
    )
    works: dict[str, dict[Size, Work]] = {
        "copying": {ALONE: partial(copy_s, device)},
        "forward": {(tokens,): partial(rows.row, forward_s, tokens) for tokens in sizes.rows},
        "prompts": {(tokens,): partial(rows.step, prompt_s, tokens) for tokens in prompts},
        "decode": {size: partial(deep.step, decode_s, *size) for size in decoded},
        "decode by layers": {size: partial(rows.step, decode_by_layers_s, *size) for size in by_layers},
        "backward": {(tokens,): partial(rows.row, backward_s, tokens) for tokens in sizes.back},
        "products": {(tokens,): partial(_product_s, few, models.shape, tokens) for tokens in sizes.products},
        "packing": {ALONE: lambda: (packing_s(rows.many),)},
        "optimizer": {ALONE: lambda: (optimizer_s(few),)},
    }
    if device == "cuda":
        works["capturing"] = {ALONE: lambda: (capture_s(deep.many) / deep.layers,)}
    return works


def _decoding(measured: Mapping[Size, Seconds], models: Pair, least_s: float, device: str) -> tuple[Steps, Points]:
    """Seconds of a layer in steps of decoding, and of all beside layers."""
    if device == "cuda":
        return of_steps(measured, models.layers, least_s)
    layers = by_layer(measured, least_s, models.few_layers)
    return steps_of(layers), drawing_of(layers)


def _links_of_cpu(config: Mapping[str, Any], dtype: str, forward: Layers, backward: Layers, rounds: int) -> Links:
    """With layers that two processes share, of rows of as many tokens as `SHARED_S` has room for."""
    seconds = {tokens: forward[(tokens,)][0] + layer for (tokens,), (layer, _) in backward.items()}
    repeats = rounds * SHARDED_REPEATS * (SHARDED_FEW + SHARDED_MANY)
    shared = [tokens for tokens in seconds if repeats * seconds[tokens] < SHARED_S]
    return measure_links(config, dtype, shared, rounds=rounds)


def _product_s(model: LanguageModel, shape: ModelShape, rows: int) -> Seconds:
    from plait.models.compute import cpu_linear

    weight, left = (
        torch.randn(count, shape.hidden, dtype=model.dtype, device=model.device)  # of equal numbers a GPU takes less
        for count in (shape.intermediate, rows)
    )
    with torch.inference_mode():
        return (seconds_in_a_row(lambda: cpu_linear.linear(left, weight), model.device.type),)


def _products(measured: Mapping[Size, Seconds], shape: ModelShape) -> Points:
    """Floating point operations per second of products with a layer's largest matrix."""
    operations = 2 * shape.hidden * shape.intermediate
    return tuple((rows, rows * operations / seconds) for (rows,), (seconds,) in measured.items())


def copy_s(device: str) -> Seconds:
    """Seconds of a copy of COPIED_BYTES of the device."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # memory that nobody has touched takes several times as long
    return (seconds_in_a_row(lambda: target.copy_(source), device),)


def _held_out_error(profile: Profile, models: Models, sizes: Sizes) -> float:
    """Error of forwards and decoding steps of the larger model, predicted by the profile."""
    errors: list[float] = []
    model, layers = models.rows.many, models.rows.layers
    for tokens in sizes.held_out_rows:
        if tokens < profile.forward[-1][0]:
            predicted = layers * profile.layer_s(tokens) + profile.head_s(tokens)
            errors.append(abs(predicted / forward_s(model, tokens) - 1))
    longest = max(context for _, context, _ in profile.decode)
    few = [size for size in sizes.held_out_decoded if size[0] <= profile.decode[-1][0] and size[1] <= longest]
    model, layers = models.steps.many, models.steps.layers
    for samples, context in few:
        predicted = layers * profile.decode_s(samples, samples * context) + profile.drawing_s(samples)
        errors.append(abs(predicted / decode_s(model, samples, context) - 1))
    return sum(errors) / max(1, len(errors))


def _memory_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return machine_bytes() / 2**30


def measure_host(device: str) -> LinkRecord:
    """Copies between a device of this kind and pinned memory, in the slower direction: what weights and optimizer
    states that leave take."""
    least, most = (_copy_s(device, size) for size in HOST_SIZES)
    return LinkRecord(bytes_per_s=HOST_SIZES[1] / max(most - least, 1e-9), latency_s=least)


def _copy_s(device: str, num_bytes: int) -> float:
    """Seconds of a copy of so many bytes, there or back."""
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    ways = ((here, there), (there, here))
    return max(seconds_of(lambda to=to, of=of: to.copy_(of), device) for to, of in ways)
