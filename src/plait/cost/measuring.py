"""Measures a machine for a cost model: products, copies, forwards, backwards, decoding steps, links. Imports torch.

Steps are measured on models of one and of three layers with random weights: their difference is two layers' time, what
is left the head's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.cost.limit import COPIED_BYTES
from plait.cost.machine import machine_name
from plait.cost.measured_links import measure_links
from plait.cost.model_work import ModelWork
from plait.cost.profile import Points, Profile
from plait.cost.stopwatch import now, repeats, seconds_of, typical
from plait.data.packed import PackedBatch, pack
from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.forward import PACK_STEPS
from plait.generation.request import Request
from plait.generation.settings import Sampling, SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.memory_limits import machine_bytes
from plait.models.files.pretrained import new_module
from plait.models.language_loading import from_module
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape
from plait.training.optimizer import MasterOptimizer
from plait.training.settings import OptimizerSettings

FEW, MANY = 1, 3
"""Layers of the two models that are measured."""
ROW_TOKENS = (16, 64, 256, 1024)
DECODED = ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64), (32, 512))
"""Samples, tokens of context of each."""
DECODED_BY_LAYERS = ((1, 64), (8, 64), (8, 512), (32, 64), (32, 512))
"""The same, of layers that are not compiled for decoding, as those of a part of a model."""
HELD_OUT_TOKENS, HELD_OUT_DECODE = (128, 512), ((4, 256), (16, 128))
"""Sizes that are measured to be foretold."""
QUICK_ROW_TOKENS, QUICK_DECODED = (16, 256), ((1, 64), (16, 64), (16, 512))
QUICK_BY_LAYERS = ((1, 64), (16, 64))
QUICK_ERROR = 0.2
"""The error of a profile of few sizes, as nothing was measured to tell it."""
BUDGET_S = 60.0
"""Further sizes are not measured once so much has passed; what must be measured comes on top."""
LONG_S = 2.0
"""Larger sizes are not measured once one took so long."""
PACKED_TIMES = 3
MOST_PACKED = 1e12
"""Bytes per second that nothing packs: what takes less did not."""
SAMPLE_TOKENS = 64
"""Tokens of prompt and response in the rows of forwards."""


def measure(
    name: str, config: Mapping[str, Any], dtype: str, device: str, threads: int, *, quick: bool = False
) -> Profile:
    """
    Args:
        name: of the model.
        config: its configuration, as `config.json` has it; its layers are left away but for a few.
        quick: few sizes, and none to tell the error by, which is then taken as `QUICK_ERROR`.
    """
    torch.set_num_threads(threads)
    shape = ModelShape.from_config(config, name)
    few, many = (_model(config, layers, dtype, device) for layers in (FEW, MANY))
    until = time.monotonic() + BUDGET_S
    rows = QUICK_ROW_TOKENS if quick else ROW_TOKENS
    most = shape.max_positions - _said(shape.max_positions) - 1
    decoded, by_layers = (
        tuple(dict.fromkeys((samples, min(context, most)) for samples, context in sizes))
        for sizes in ((QUICK_DECODED, QUICK_BY_LAYERS) if quick else (DECODED, DECODED_BY_LAYERS))
    )
    copy_rate = _copy_rate(device)
    least_s = ModelWork(shape, dtype, 1).read(1) / copy_rate
    of_layer = lambda run, sizes: by_layer(run, (few, many), sizes, until, least_s)  # noqa: E731
    forward = of_layer(_forward_s, [(tokens,) for tokens in rows])
    backward = of_layer(_backward_s, [(tokens,) for tokens in rows])
    decode = of_layer(_decode_s, decoded)
    decode_by_layers = of_layer(_decode_by_layers_s, by_layers)
    head = tuple((tokens, max(1e-9, rest)) for (tokens,), _, rest in forward)
    links = measure_links(dtype)
    profile = Profile(
        machine=machine_name(device),
        device=device,
        threads=threads,
        dtype=dtype,
        model=name,
        shape=shape,
        memory_gib=_memory_gib(device),
        forward=tuple((tokens, layer) for (tokens,), layer, _ in forward),
        backward=_no_faster(backward, forward),
        decode=tuple((samples, context, layer) for (samples, context), layer, _ in decode),
        decode_by_layers=tuple((samples, context, layer) for (samples, context), layer, _ in decode_by_layers),
        head=head,
        head_backward=tuple((tokens, max(1e-9, rest)) for (tokens,), _, rest in backward),
        drawing=_drawing([(samples, rest) for (samples, _), _, rest in decode]),
        products=_products(shape, dtype, device),
        copy_bytes_per_s=copy_rate,
        packing_bytes_per_s=_packing_rate(many),
        optimizer_s=_optimizer_s(few),
        send=links.send,
        all_reduce=links.all_reduce,
        between=links.between,
        contention=links.contention if device == "cpu" else 1.0,
        error=0.0,
    )
    return profile.model_copy(update={"error": QUICK_ERROR if quick else _held_out_error(profile, many)})


def _model(config: Mapping[str, Any], layers: int, dtype: str, device: str) -> LanguageModel:
    from transformers import CONFIG_MAPPING

    read = {**config, "num_hidden_layers": layers}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(read.get(key), list):
            read[key] = read[key][:layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = new_module(CONFIG_MAPPING[read["model_type"]].from_dict(read), decoder_only=False)
    model = from_module(module, None, dtype, device, name=f"{layers} layers")
    model.tokenizer = _NoTexts()
    return model


class _NoTexts:
    """A tokenizer where only numbers of tokens matter."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return ""


def by_layer(
    run: Callable[..., float],
    models: tuple[LanguageModel, LanguageModel],
    sizes: Sequence[tuple[int, ...]],
    until: float,
    least_s: float,
) -> list[tuple[tuple[int, ...], float, float]]:
    """(size, seconds of a layer, of everything else) of each size; two at least, and others till the time is up.

    Args:
        least_s: what reading a layer's weights takes, and so a layer at least: those of few layers stay in caches,
            those of a whole model do not; and on a busy machine a difference of two times may be anything.
    """
    measured: list[tuple[tuple[int, ...], float, float]] = []
    for size in sizes:
        short, long = (run(model, *size) for model in models)
        layer = max(least_s, (long - short) / (MANY - FEW))
        measured.append((size, layer, max(0.0, short - FEW * layer)))
        if len(measured) >= 2 and (long > LONG_S or time.monotonic() > until):
            break
    return measured


def _no_faster(
    backward: Sequence[tuple[tuple[int, ...], float, float]], forward: Sequence[tuple[tuple[int, ...], float, float]]
) -> Points:
    """Backwards of a layer take no less than its forwards: they compute twice as much."""
    least = {size: layer for size, layer, _ in forward}
    return tuple((size[0], max(layer, least.get(size, 0.0))) for size, layer, _ in backward)


def _row(tokens: int, model: LanguageModel) -> PackedBatch:
    """Samples of SAMPLE_TOKENS, all but the first token responses."""
    sample_tokens = min(tokens, _said(model.max_positions))
    groups = [([1], [[2] * (sample_tokens - 1)]) for _ in range(tokens // sample_tokens)]
    return pack(groups, model.device)


def _forward_s(model: LanguageModel, tokens: int) -> float:
    batch = _row(tokens, model)
    with torch.no_grad():
        return seconds_of(lambda: model.logprobs(batch, 1.0), model.device.type)


def _backward_s(model: LanguageModel, tokens: int) -> float:
    """Seconds of a backward whose gradients are added up as in training, after a forward that is not counted."""
    batch, optimizer = _row(tokens, model), _optimizer(model)
    taken: list[float] = []
    for _ in repeats(taken):
        with optimizer.collecting_gradients():
            logprobs, _ = model.logprobs(batch, 1.0)
            total = logprobs.sum()
            started = now(model.device.type)
            total.backward()
            taken.append(now(model.device.type) - started)
    return typical(taken)


def _decode_s(model: LanguageModel, samples: int, context: int) -> float:
    """Seconds of a step in which each of `samples` draws a token, after prompts of so many tokens."""
    return _steps_s(model, samples, context, _said(model.max_positions))


def _decode_by_layers_s(model: LanguageModel, samples: int, context: int) -> float:
    """As `_decode_s`, by the model's own layers: responses are too short for weights to be packed."""
    return _steps_s(model, samples, context, min(PACK_STEPS - 1, _said(model.max_positions)))


def _steps_s(model: LanguageModel, samples: int, context: int, response_tokens: int) -> float:
    engine = _begun(model, samples, context, response_tokens)
    taken: list[float] = []
    for _ in repeats(taken):
        started = now(model.device.type)
        engine.step()
        taken.append(now(model.device.type) - started)
    engine.abort(0)
    return typical(taken)


def _said(positions: int) -> int:
    """Tokens of a response, of which some are drawn: more than steps are measured, where the model has room."""
    return min(SAMPLE_TOKENS, positions // 2)


def _begun(model: LanguageModel, samples: int, context: int, response_tokens: int) -> Engine:
    """An engine that has computed the prompt, and packed the weights if responses are long enough for that."""
    settings = SamplingSettings.model_validate(
        {"max_running": samples, "max_response_tokens": response_tokens, "max_prefill_tokens": context + 1}
    )
    engine = Engine(model, settings)
    prompt, sampling = Prompt(0, "", (1,) * context), Sampling(max_tokens=response_tokens, stop_token_ids=())
    request = Request(prompt, samples, sampling, NoiseKey(0), (response_tokens,) * samples)
    engine.add(request)
    engine.step()
    return engine


def _packing_rate(model: LanguageModel) -> float | None:
    """Bytes of weights that a new engine packs for decoding in a second; None where they are not packed."""
    taken = []
    for _ in range(PACKED_TIMES):
        engine = _begun(model, 1, 8, _said(model.max_positions))
        assert engine.last_step is not None
        taken.append(engine.last_step.packing_s)
        engine.abort(0)
    num_bytes = model.weights.numel() * model.weights.element_size()
    return num_bytes / min(taken) if min(taken) > num_bytes / MOST_PACKED else None


def _drawing(rests: Sequence[tuple[int, float]]) -> Points:
    """The shortest of each number of samples, whatever their context."""
    counts = sorted({samples for samples, _ in rests})
    return tuple((count, min(rest for samples, rest in rests if samples == count)) for count in counts)


def _optimizer_s(model: LanguageModel) -> float:
    """Seconds of an optimizer step for each number that it updates."""
    optimizer = _optimizer(model)
    seconds = seconds_of(lambda: optimizer.step(True), model.device.type)
    return seconds / optimizer.masters.numel()


def _optimizer(model: LanguageModel) -> MasterOptimizer:
    return MasterOptimizer(model, OptimizerSettings.model_validate({}), 100)


def _products(shape: ModelShape, dtype: str, device: str) -> Points:
    from plait.models.compute import cpu_linear

    weight = torch.ones(shape.intermediate, shape.hidden, dtype=getattr(torch, dtype), device=device)
    rates = []
    for rows in ROW_TOKENS:
        left = torch.ones(rows, shape.hidden, dtype=weight.dtype, device=device)
        with torch.inference_mode():
            seconds = seconds_of(lambda left=left: cpu_linear.linear(left, weight), device)
        rates.append((rows, 2 * rows * shape.hidden * shape.intermediate / seconds))
    return tuple(rates)


def _copy_rate(device: str) -> float:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds_of(lambda: target.copy_(source), device)


def _held_out_error(profile: Profile, model: LanguageModel) -> float:
    """Error of forwards and decoding steps of the larger model, foretold by the profile."""
    errors = []
    for tokens in HELD_OUT_TOKENS:
        if tokens < profile.forward[-1][0]:
            foretold = MANY * profile.layer_s(tokens, backward=False) + profile.head_s(tokens)
            errors.append(abs(foretold / _forward_s(model, tokens) - 1))
    longest = max(context for _, context, _ in profile.decode)
    few = [size for size in HELD_OUT_DECODE if size[0] <= profile.decode[-1][0] and size[1] <= longest]
    for samples, context in few:
        foretold = MANY * profile.decode_s(samples, samples * context) + profile.drawing_s(samples)
        errors.append(abs(foretold / _decode_s(model, samples, context) - 1))
    return sum(errors) / max(1, len(errors))


def _memory_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return machine_bytes() / 2**30
