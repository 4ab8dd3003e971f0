"""Runs in worker processes: a part of a model against the whole one, which each rank has beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.errors import UserError
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.params import Block
from plait.models.backbone_model import BackboneModel, copy_of
from plait.models.compute.attention import PackedContext
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.compute.logprobs_at import chunked_logprobs_at, chunked_top_logprobs
from plait.models.flat_weights import cut_block
from plait.models.language_model import LanguageModel
from plait.models.loading import load_model, load_scalar, merged
from plait.models.lora import add_lora, without_lora
from plait.models.lora_settings import LoraSettings
from plait.models.parallel import mixers, part_loading, token_split
from plait.models.parallel.kept_tokens import KeptTokens, keeping
from plait.models.parallel.part_loading import PartLoader
from plait.models.parallel.partial import part_of
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team
from plait.models.scalar_loading import scalar_of, scalar_view
from tests.models.tiny import tiny_model
from tests.training.exact import ExactFloat64

TEMPERATURE = 0.7


def team_of(
    worker: Any, dp: int, tp: int, pp: int, stages: tuple[int, ...] = (), *, splits_tokens: bool = False
) -> Team | None:
    team = worker.team_of(Layout(Mesh(tuple(range(dp * tp * pp))), Parallelism(dp, tp, pp, stages)))
    return None if team is None else replace(team, splits_tokens=splits_tokens)


def batch_of(model: Any) -> PackedBatch:
    """Groups of several shapes, an empty response and a single sample among them; the ids end with the vocabulary."""
    vocabulary = model.config.vocab_size
    ids = iter((5 + 7919 * i) % vocabulary for i in range(200))
    draw = lambda count: [next(ids) for _ in range(count)]
    groups = [(draw(4), [draw(5), draw(0), draw(3)]), (draw(3), [draw(7)]), (draw(6), [draw(2), [vocabulary - 1, 0]])]
    return pack(groups, model.device)


def outputs_of(model: Any, hidden_TH: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
    """Of a language model also the log-probs of some tokens at each place, of both ends of the vocabulary."""
    if isinstance(model, LanguageModel):
        ids_RK = (batch.targets_R[:, None] + torch.tensor([0, 1, 40])) % model.config.vocab_size
        at_RJ = chunked_logprobs_at(model.head, hidden_TH[batch.predict_R], ids_RK, TEMPERATURE, 4)
        return *model.logprobs_of(hidden_TH, batch, TEMPERATURE, chunk_rows=4), at_RJ.flatten()
    return model.values_and_scores_of(hidden_TH, batch)


def through_stages(model: Any, batch: PackedBatch, stage: Callable[[Tensor | None], Tensor]) -> Tensor:
    """What this rank's stage makes of what the stage before made; of one model alone, what it makes."""
    pp, inputs_TH = model.team.pp, None
    if pp.index > 0:
        room_TH = torch.empty(batch.num_tokens, model.config.hidden_size, dtype=model.dtype)
        inputs_TH = pp.recv(room_TH, pp.index - 1, 3, "hidden states")
    hidden_TH = stage(inputs_TH)
    if not model.team.is_last_stage:
        pp.send(hidden_TH, pp.index + 1, 3, "hidden states")
    return hidden_TH


def all_outputs(model: Any, batch: PackedBatch) -> tuple[Tensor, ...]:
    """Nothing on stages before the last."""
    hidden_TH = through_stages(model, batch, lambda inputs_TH: model.stage(batch, inputs_TH))
    return outputs_of(model, hidden_TH, batch) if model.team.is_last_stage else ()


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    """Weighs every output differently."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for part, share in zip(outputs, (1.0, -0.3, 0.2), strict=False):
        total = total + share * (part * torch.linspace(0.5, 1.5, len(part), dtype=part.dtype)).sum()
    return total


def gradients_of(model: BackboneModel, batch: PackedBatch, *, checkpoint: bool = False) -> Tensor:
    """The flat gradient of `loss_of`, through all stages."""
    model.module.requires_grad_(False)
    trained = model.trained
    params = {block.param.name: trained.parameter(block.param.name) for block in trained.layout.blocks}
    for param in params.values():
        param.requires_grad_(True)
        param.grad = None
    pp, inputs_TH = model.team.pp, None
    hidden_size = model.config.hidden_size
    if pp.index > 0:
        inputs_TH = torch.empty(batch.num_tokens, hidden_size, dtype=model.dtype)
        pp.recv(inputs_TH, pp.index - 1, 1, "0F0")
        inputs_TH.requires_grad_(True)
    out_TH = model.stage(batch, inputs_TH, checkpoint=checkpoint)
    if model.team.is_last_stage:
        loss_of(outputs_of(model, out_TH, batch)).backward()
    else:
        pp.send(out_TH.detach(), pp.index + 1, 1, "0F0")
        grad_TH = pp.recv(torch.empty_like(out_TH), pp.index + 1, 2, "0B0")
        if out_TH.requires_grad:  # else nothing is trained up to here
            out_TH.backward(grad_TH)
    if inputs_TH is not None:
        assert inputs_TH.grad is not None
        pp.send(inputs_TH.grad, pp.index - 1, 2, "0B0")
    flat = torch.zeros(trained.layout.num_elements, dtype=model.dtype)
    for block, start, stop in trained.layout.entries:
        grad = params[block.param.name].grad
        if grad is not None:
            flat[start:stop] = grad.reshape(-1)
    trained.sum_partial_gradients(flat)
    for param in params.values():
        param.requires_grad_(False)
    return flat


def compare(
    worker: Any,
    family: str,
    sizes: dict[str, Any],
    *,
    scalar: bool = False,
    dtype: str = "float64",
    copied: bool = False,
    exact: bool = False,
    **options: Any,
) -> dict[str, float] | None:
    """Largest errors of a part against the whole model, relative to the largest number of the whole tensor.

    Args:
        copied: the part is a copy of a part.
        exact: nothing is rounded to float32 (`ExactFloat64`).
        options: of `tiny`.

    Returns:
        By what was compared; None on ranks outside the layout.
    """
    team = team_of(worker, **sizes)
    if team is None:
        return None
    if exact:
        with ExactFloat64():
            return compare(worker, family, sizes, scalar=scalar, copied=copied, **options)
    whole: Any = tiny_model(family, dtype=getattr(torch, dtype), **options)
    if scalar:
        whole = scalar_of(whole, seed=3)
    part = part_of(copy_of(whole), team)
    if copied:
        part = copy_of(part)
    batch = batch_of(whole)
    errors = {"weights": weight_error(part, whole)}
    with torch.no_grad():
        outputs = all_outputs(part, batch)
        assert len(outputs) == (3 - scalar if team.is_last_stage else 0)
        both = zip(outputs, all_outputs(whole, batch), strict=False)
        errors["outputs"] = max((relative(found, expected) for found, expected in both), default=0.0)
        if isinstance(part, LanguageModel):
            logits_TV = logits_of(part, batch)
            if team.is_last_stage:
                errors["logits"] = relative(logits_TV, logits_of(whole, batch))
            if team.is_last_stage and dtype == "float64":
                errors["likeliest"] = likeliest_error(part, whole, batch)
                errors["top"] = top_error(part, whole)
    expected = gradients_of(whole, batch)
    for checkpoint in (False, True):
        found = gradients_of(part, batch, checkpoint=checkpoint)
        errors["recomputed gradients" if checkpoint else "gradients"] = gradient_error(part, found, whole, expected)
    errors["norm"] = abs(norm_of(part, found) / float(expected.norm()) - 1)
    return errors


def from_file(
    worker: Any,
    folder: str,
    sizes: dict[str, Any],
    *,
    scalar: bool = False,
    dtype: str = "float32",
    scales: bool = True,
) -> dict[str, Any] | None:
    """A part that is read from a checkpoint against the same part, cut from the whole model.

    Args:
        folder: perhaps of an adapter.
        scales: whether the family's configuration says how to make it smaller, to prove that it can be cut.

    Returns:
        What is equal, to the bit; None on ranks outside the layout.
    """
    team = team_of(worker, **sizes)
    if team is None:
        return None
    loader = PartLoader(dtype=dtype, device="cpu", seed=3, head_std=None)
    wholes: list[Any] = []
    read_folder, scaled_down = part_loading.read_folder, part_loading.scaled_down
    part_loading.read_folder = lambda *args, **of: wholes.append(args) or read_folder(*args, **of)
    if not scales:
        part_loading.scaled_down = lambda *args, **options: None
    try:
        read: Any = loader.part(folder, team, scalar=scalar)
    finally:
        part_loading.read_folder, part_loading.scaled_down = read_folder, scaled_down
    load: Any = partial(load_scalar, seed=3) if scalar else load_model
    whole = load(folder, dtype=dtype, adapt=merged)
    cut: Any = part_of(whole, team)
    batch = batch_of(cut)
    with torch.no_grad():
        outputs = zip(all_outputs(read, batch), all_outputs(cut, batch), strict=True)
    mine, others = dict(read.module.named_buffers()), dict(cut.module.named_buffers())
    return {
        "by parts": not wholes,
        "layout": read.layout == cut.layout and read.parameters == cut.parameters,
        "weights": torch.equal(read.weights, cut.weights),
        "buffers": mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine),
        "outputs": all(torch.equal(one, other) for one, other in outputs),
        "gradients": torch.equal(gradients_of(read, batch), gradients_of(cut, batch)),
        "cache": read.part.cache == cut.part.cache,
        "limits": (read.max_positions, read.eos_token_ids) == (cut.max_positions, cut.eos_token_ids),
        "tokenizer": read.tokenizer.get_vocab() == cut.tokenizer.get_vocab(),
    }


def logits_of(model: Any, batch: PackedBatch) -> Any:
    """[T, V]; None on stages before the last, which have no head."""
    row = batch.token_ids_T, batch.position_ids_T, PackedContext(batch)
    hidden_TH = through_stages(model, batch, lambda inputs_TH: model.hidden(*row, inputs_TH=inputs_TH))
    return model.logits(hidden_TH) if model.team.is_last_stage else None


def likeliest_error(part: LanguageModel, whole: LanguageModel, batch: PackedBatch) -> float:
    """Rows for which a head that is sharded by vocabulary does not know as the whole one's argmax whether the target is
    the likeliest token; of every other row it is."""
    hidden_TH = whole.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
    most_T = whole.logits(hidden_TH).argmax(-1)
    targets_T = torch.where(torch.arange(len(most_T)) % 2 == 0, most_T, batch.token_ids_T)
    likeliest_T = torch.empty_like(targets_T, dtype=torch.bool)
    chunked_logprobs(part.head, hidden_TH, targets_T, TEMPERATURE, 4, likeliest_R=likeliest_T)
    return float((likeliest_T != (targets_T == most_T)).sum())


def top_error(part: Any, whole: Any) -> float:
    """The largest error of the log-probs of the likeliest tokens, in some rows of equal logits too; infinite where
    those of the part are others."""
    vocabulary = whole.config.vocab_size
    hidden_TH = torch.linspace(-1, 1, 6 * whole.config.hidden_size, dtype=whole.dtype).view(6, -1).sin()
    hidden_TH[3:] = 0
    errors = [0.0]
    for count, among in ((5, None), (5, vocabulary // 2), (vocabulary, None)):
        (ids, found), (others, expected) = (
            chunked_top_logprobs(of.head, hidden_TH, count, TEMPERATURE, 4, among=among) for of in (part, whole)
        )
        errors.append(relative(found, expected) if torch.equal(ids, others) else float("inf"))
    return max(errors)


def weight_error(part: Any, whole: Any) -> float:
    return max(
        relative(view, cut_block(whole.module.get_parameter(block.param.name), block))
        for block, view in views_of(part, part.weights)
    )


def gradient_error(part: Any, found: Tensor, whole: Any, expected: Tensor) -> float:
    wholes = {block.param.name: view for block, view in views_of(whole, expected)}
    errors = (
        relative(view, cut_block(wholes[block.param.name], block), scale=wholes[block.param.name])
        for block, view in views_of(part, found)
    )
    return max(errors, default=0.0)


def views_of(model: Any, flat: Tensor) -> list[tuple[Block, Tensor]]:
    return [(block, flat[start:stop].view(block.shape)) for block, start, stop in model.trained.layout.entries]


def norm_of(part: Any, flat: Tensor) -> float:
    """The norm of the gradient of all ranks, each parameter once."""
    squares = [flat[start:stop].double().square().sum() for start, stop in part.trained.counted_ranges()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return float(part.team.pp.all_reduce(part.team.tp.all_reduce(total)).sqrt())


def relative(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    assert found.shape == expected.shape, f"{found.shape} is not {expected.shape}"
    size = (expected if scale is None else scale).detach().abs().max().double().clamp(min=1e-6)
    return float((found.detach().double() - expected.detach().double()).abs().max() / size)


def refusal(worker: Any, family: str, sizes: dict[str, Any], **options: Any) -> str | None:
    """What `part_of` says."""
    team = team_of(worker, **sizes)
    if team is None:
        return None
    try:
        part_of(tiny_model(family, **options), team)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_copy(worker: Any) -> tuple[float, ...] | None:
    """The hidden states of the second of two copies, the first of which has its part already."""
    team = team_of(worker, 2, 2, 1)
    if team is None or team.dp.index == 0:
        return None
    part = part_of(tiny_model("llama"), team)
    with torch.no_grad():
        return tuple(part.stage(batch_of(part))[-1].tolist())


def of_unknown_form(worker: Any, function: str, *arguments: Any) -> Any:
    """What a function here gives where no mixer is one that can be divided."""
    with mock.patch.object(mixers, "divided_mixers", return_value={}):
        return globals()[function](worker, *arguments)


def wrong_plan(worker: Any, changes: dict[str, str | None]) -> str | None:
    """What `part_of` says to a qwen3 whose plan is changed; None takes a key away."""
    team = team_of(worker, 1, 2, 1)
    if team is None:
        return None
    model = tiny_model("qwen3")
    plan = {**model.module.tp_plan, **changes}
    type(model.module).tp_plan = property(lambda self: {key: style for key, style in plan.items() if style})
    try:
        part_of(model, team)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del type(model.module).tp_plan
    return "nothing"


def wrong_stage(worker: Any) -> str | None:
    """What `part_of` says on every rank to a layer that computes something else when it is called again, on one."""
    team = team_of(worker, 1, 1, 2)
    if team is None:
        return None
    model = tiny_model("llama")
    if worker.rank == 1:
        calls: list[int] = []

        def drifting(layer: Any, args: Any, out: Tensor) -> Tensor:
            calls.append(1)
            return out + torch.linspace(0, len(calls), out.shape[-1], dtype=out.dtype)

        model.module.model.layers[1].register_forward_hook(drifting)
    try:
        part_of(model, team)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def kept_bytes(worker: Any, *, splits_tokens: bool) -> tuple[int, int] | None:
    """What a training forward of a llama keeps for its backward, without weights: with all activations, and with those
    alone from which the others are computed again."""
    team = team_of(worker, 1, 2, 1, splits_tokens=splits_tokens)
    if team is None:
        return None
    part = part_of(tiny_model("llama", num_hidden_layers=3), team)
    part.module.requires_grad_(True)
    return _kept_bytes(part, checkpoint=False), _kept_bytes(part, checkpoint=True)


def _kept_bytes(part: Any, *, checkpoint: bool) -> int:
    memory: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
        return tensor

    def also_within(kept: KeptTokens, whole: Tensor) -> Any:
        hooks = keeping(kept, whole)

        def pack(tensor: Tensor) -> Any:
            saved = hooks.pack_hook(tensor)
            keep(saved if isinstance(saved, Tensor) else saved.kept.own)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, hooks.unpack_hook)

    weights = part.weights.untyped_storage().data_ptr()
    with (
        mock.patch.object(token_split, "keeping", also_within),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out_TH = part.stage(batch_of(part), checkpoint=checkpoint)
    out_TH.sum().backward()
    return sum(size for pointer, size in memory.items() if pointer != weights)


def communication(worker: Any, *, splits_tokens: bool = False) -> dict[str, int] | None:
    """Collectives of a two-layer llama's forward and backward."""
    team = team_of(worker, 1, 2, 1, splits_tokens=splits_tokens)
    if team is None:
        return None
    part = part_of(tiny_model("llama"), team)
    batch, calls = batch_of(part), []
    original = Peers.all_reduce

    def counting(peers: Peers, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(peers, *args, **kwargs)

    Peers.all_reduce = counting  # type: ignore[method-assign]
    try:
        part.module.requires_grad_(True)
        out_TH = part.stage(batch)
        forward = len(calls)
        out_TH.sum().backward()
    finally:
        Peers.all_reduce = original  # type: ignore[method-assign]
    return {"forward": forward, "backward": len(calls) - forward}


def given_back(worker: Any) -> tuple[int, int, int]:
    """Elements that a part keeps alive, those of its layout, those of the whole model."""
    team = team_of(worker, 1, 2, 2)
    assert team is not None
    model = tiny_model("llama")
    num_whole, kept = model.layout.num_elements, weakref.ref(model.weights.untyped_storage())
    part = part_of(model, team)
    assert part is model
    gc.collect()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in part.module.parameters()}
    assert kept() is None, "the whole weights are alive"
    return sum(storages.values()) // part.weights.itemsize, part.layout.num_elements, num_whole


def adapted(
    worker: Any,
    family: str,
    sizes: dict[str, Any],
    *,
    scalar: bool = False,
    dtype: str = "float64",
    targets: Any = "all-linear",
    copied: bool = False,
    **options: Any,
) -> dict[str, float] | None:
    """Largest errors of adapters on a part against those on the whole model, as of `compare`: outputs, gradients, and
    what they begin with. Another adapter is on some of the layers, and off.

    Args:
        targets: names of layers.
        copied: the part is a copy of a part that has adapters.
        options: of `tiny`.
    """
    team = team_of(worker, **sizes)
    if team is None:
        return None
    model = tiny_model(family, dtype=getattr(torch, dtype), **options)
    settings = LoraSettings(rank=3, alpha=5.0, target_modules=targets)

    def view_on(base: Any) -> Any:
        of_others = {"gpt_neox": "dense", "gpt2": "c_proj", "lfm2": "out_proj"}.get(family, "o_proj")
        add_lora(base, LoraSettings(rank=2, target_modules=(of_others,)), name="other", seed=1)
        under = scalar_view(base, seed=3, head_std=0.5) if scalar else base
        return add_lora(under, settings, name="actor", seed=0)

    part, whole = view_on(part_of(copy_of(model), team)), view_on(copy_of(model))
    errors = {"weights": adapter_error(part, whole)}
    generator = torch.Generator().manual_seed(4)
    stirred = torch.randn(whole.trained.weights.shape, generator=generator, dtype=torch.float64) * 0.1
    whole.trained.weights.add_(stirred.to(whole.dtype))
    values = dict(whole.own.parameters)
    with torch.no_grad():
        for block, view in views_of(part, part.trained.weights):
            view.copy_(cut_block(values[block.param.name], block))
    if copied:
        part = part.copied()
    batch = batch_of(whole)
    with torch.no_grad():
        both = zip(all_outputs(part, batch), all_outputs(whole, batch), strict=False)
        errors["outputs"] = max((relative(found, expected) for found, expected in both), default=0.0)
        without, base = all_outputs(without_lora(part), batch), all_outputs(without_lora(whole), batch)
        errors["under it"] = max((relative(*pair) for pair in zip(without, base, strict=False)), default=0.0)
    expected = gradients_of(whole, batch)
    for checkpoint in (False, True):
        found = gradients_of(part, batch, checkpoint=checkpoint)
        errors["recomputed gradients" if checkpoint else "gradients"] = gradient_error(part, found, whole, expected)
    errors["norm"] = abs(norm_of(part, found) / float(expected.norm()) - 1)
    assert not any(param.requires_grad for param in part.module.parameters())
    return errors


def lost_by_rounding(worker: Any, family: str, sizes: dict[str, Any]) -> tuple[float, float, float] | None:
    """How far gradients of adapters in bfloat16 are from those of the same numbers in float64: of a part, of the whole
    model, and both from each other. Root mean squares, relative to those of the exact ones."""
    team = team_of(worker, **sizes)
    if team is None:
        return None
    narrow, wide = tiny_model(family, dtype=torch.bfloat16), tiny_model(family)
    wide.weights.copy_(narrow.weights)
    part, whole, exact = (
        add_lora(base, LoraSettings(rank=3), name="actor", seed=0)
        for base in (part_of(copy_of(narrow), team), copy_of(narrow), wide)
    )
    generator = torch.Generator().manual_seed(4)
    whole.trained.weights.copy_(torch.randn(whole.trained.weights.shape, generator=generator) * 0.1)
    exact.trained.weights.copy_(whole.trained.weights)
    values = dict(views_of(whole, whole.trained.weights))
    with torch.no_grad():
        for block, view in views_of(part, part.trained.weights):
            of_whole = next(value for other, value in values.items() if other.param.name == block.param.name)
            view.copy_(cut_block(of_whole, block))
    batch = batch_of(exact)
    mine, *others = (
        {b.param.name: (b, v) for b, v in views_of(of, gradients_of(of, batch))} for of in (part, whole, exact)
    )
    flat = lambda gradients: torch.cat(
        [cut_block(gradients[n][1], b).reshape(-1).double() for n, (b, _) in mine.items()]
    )
    own = torch.cat([gradient.reshape(-1).double() for _, gradient in mine.values()])
    of_whole, of_exact = map(flat, others)
    pairs = (own, of_exact), (of_whole, of_exact), (own, of_whole)
    rounded, unparted, between = (float((one - other).norm() / of_exact.norm()) for one, other in pairs)
    return rounded, unparted, between


def adapter_error(part: Any, whole: Any) -> float:
    """How far what is trained of a part is from that of the whole; a stage may have nothing of it."""
    pairs = views_of(part, part.trained.weights)
    return max((relative(view, cut_block(whole.own.parameters[b.param.name], b)) for b, view in pairs), default=0.0)
