"""A rank's part of a model: its stage, its heads and rows of every layer, its part of the vocabulary.

The family's own module goes on computing: layers of other stages hand on (`parallel.stage`), layers that are sharded
get collectives (`parallel.tensor_parallel`), and weights are views of one flat buffer by `layout.shards.shard`. Made of
a whole model (`part_of`), or of a module without weights and what the rank reads of a checkpoint
(`parallel.part_loading`). That a family can be cut like this is shown each time, not assumed (`parallel.part_proof`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from plait.data.packed import PackedBatch
from plait.layout.adapters import GROUPED_BYTES
from plait.layout.params import Block, FlatLayout, Parameters
from plait.layout.shards import check, shard
from plait.layout.zero_shares import Share, owned_ranges
from plait.models.admission import check_batch
from plait.models.backbone import Backbone
from plait.models.expert_adapters import adapted_experts
from plait.models.flat_weights import FlatWeights, cut_block
from plait.models.model import AnyModel, Model
from plait.models.parallel.gathered_layers import GatheredLayers
from plait.models.parallel.mixers import tp_plan
from plait.models.parallel.part import Part
from plait.models.parallel.part_proof import Proof, own_layers
from plait.models.parallel.partial_sums import Partials
from plait.models.parallel.share_proof import ShareProof
from plait.models.parallel.stage import cut_stage, decoder_list
from plait.models.parallel.team import Team
from plait.models.parallel.tensor_parallel import install
from plait.models.parallel.token_split import TokenSplit
from plait.models.weight_share import WeightShare
from plait.models.working_weights import adapted_layers

Values = Callable[[Block], Tensor]
"""A rank's block of a parameter, in any dtype and on any device."""


def part_of(model: AnyModel, team: Team) -> AnyModel:
    """Turn a whole model into this rank's part of it, in place. All ranks of a copy call it with the same model.

    Args:
        model: whole; adapters are added to parts (`lora.add_lora`), as are heads on shared weights.
        team: this rank's.

    Returns:
        The model itself: `layout` and `weights` are the part's, `parameters` stay those of the whole.

    Raises:
        LayoutError: the model does not allow the layout.
        ModelError: the family cannot be cut like this; the same on every rank.
    """
    assert model.part is None, "the model is a part already"
    parameters = model.parameters
    check(parameters, team.layout)
    whole = replace(team, layout=team.layout.whole)
    if team.tp.size == team.pp.size == 1:
        model.part = Part(whole, parameters)
        batch = check_batch(model.module, model.device)[0]
        return _shown_to_share(model, team, batch) if team.layout.shards_weights else model
    assert model.own is None, "a view of a model is made of its part"
    assert not adapted_layers(model.module), "adapters are added to parts"
    assert not adapted_experts(model.module), "adapters are added to parts"
    proof = Proof(model, whole)
    proof.record_whole()
    cut_layers(model, team, tuple_length=proof.tuple_length)
    proof.record_stage()
    take_weights(model, whole, cut_from(model.module), model.device)
    proof.check()
    assert model.part is not None, "weights were taken"
    model.part = replace(model.part, cache=proof.cache_shape())
    return _shown_to_share(model, team, proof.batch) if team.layout.shards_weights else model


def cut_layers(model: Model, team: Team, *, tuple_length: int) -> None:
    """Leave the layers of this rank's stage; the others hand on. tuple_length: see `stage.PassingLayer`."""
    if team.pp.size == 1:
        return
    prefix = f"{model.module.base_model_prefix}."
    idle = []
    for param in model.parameters.params:
        if param.layer is None and param.name.startswith(prefix):
            read = team.is_first_stage if param.ends in ("first", "both") else team.is_last_stage
            if not read:
                idle.append(param.name.removeprefix(prefix))
    decoder = model.module.base_model
    layers = decoder_list(decoder, model.parameters.num_layers)
    cut_stage(decoder, layers, own_layers(model, team), tuple_length=tuple_length, outside=idle)
    model.backbone = Backbone(decoder)


def take_weights(
    model: Model,
    team: Team,
    values: Values,
    device: torch.device | str,
    memory: FlatWeights | None = None,
) -> None:
    """Give a model, whose layers are those of its stage, this rank's blocks of the parameters and make it a part.

    Args:
        values: asked for each block once, in the order of the rank's flat buffer.
        device: of the weights, and of the module's buffers.
        memory: where the weights are to lie; None: in a new buffer. Of weights that dp shards there is none.

    Raises:
        ModelError: the family's plan for tp cuts its head along a dim that is not its rows; or see `GatheredLayers`.
    """
    parameters, dtype = model.parameters, model.dtype
    layout = shard(parameters, team.layout.parallelism, team.tp.index, team.pp.index)
    share = None
    if team.layout.shards_weights:
        assert memory is None, "shares lie in a buffer of their own"
        share = _empty_share(layout, parameters, team, torch.empty(0, dtype=dtype, device=device))
        views = dict(zip((block.param.name for block in layout.blocks), share.placeholders, strict=True))
        for block, start, _ in layout.entries:
            share.take(block, start, values(block))
    else:
        if memory is None:
            memory = FlatWeights(layout, torch.zeros(layout.num_elements, dtype=dtype, device=device))
        assert memory.layout == layout, "memory for another part"
        views = {block.param.name: view for block, view in zip(layout.blocks, memory.views, strict=True)}
        for block in layout.blocks:
            views[block.param.name].copy_(values(block))
        model.weights, model.nested = torch.empty(0, dtype=dtype, device=device), memory
        if memory.whole is not None:
            model.weights, model.nested = memory.whole, None
    _register(model, views, torch.empty(0, dtype=dtype, device=device))
    model.module.to(device)
    model.layout = layout
    model.part = Part(team, parameters, _install_tp(model, team))
    _choose_experts(model)
    if share is not None:
        _gather_from(model, share, team)
        return
    model.renew_head()
    model.backbone = Backbone(model.module.base_model)


def _register(model: Model, views: dict[str, Tensor], none: Tensor) -> None:
    """Give the modules of a model these parameters, by name, and those of other stages none."""
    own: dict[str, nn.Parameter] = {}
    for name, param in list(model.module.named_parameters(remove_duplicate=False)):
        stored = model.parameters.aliases.get(name, name)
        if stored not in own and stored in views:
            own[stored] = nn.Parameter(views.pop(stored), requires_grad=param.requires_grad)
        elif stored not in own:  # another stage's
            own[stored] = nn.Parameter(none, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        model.module.get_submodule(owner).register_parameter(leaf, own[stored])
    assert not views, f"{next(iter(views))} is this rank's, and its module is gone"


def _shown_to_share(model: AnyModel, team: Team, batch: PackedBatch) -> AnyModel:
    """`hold_shares`, and show that the family computes with what it gathers.

    Raises:
        ModelError: it does not; or see `GatheredLayers`.
    """
    proof = ShareProof(model, team, batch)
    hold_shares(model, team)
    proof.check()
    return model


def hold_shares(model: AnyModel, team: Team) -> AnyModel:
    """Leave of the weights of a model, whole or a part, this rank's share along dp, in place. All ranks of the team
    call it together.

    Raises:
        ModelError: see `GatheredLayers`.
    """
    assert model.part is not None, "the ranks that share its weights are known"
    share = _empty_share(model.layout, model.parameters, team, model.weights)
    for block, start, _ in model.layout.entries:
        share.take(block, start, model.module.get_parameter(block.param.name))
    model.part = replace(model.part, team=team)
    _gather_from(model, share, team)
    return model


def _empty_share(layout: FlatLayout, parameters: Parameters, team: Team, like: Tensor) -> WeightShare:
    sizes, place = team.layout.parallelism, team.coordinates
    bounds = Share.of(layout, (), sizes, place).bounds
    return WeightShare(layout, owned_ranges(layout, parameters, sizes, place, bounds)[0], place.dp, like)


def _gather_from(model: Model, share: WeightShare, team: Team) -> None:
    """Have a model, whose weights are a share from now on, compute with those that it gathers."""
    model.share, model.weights = share, share.whole
    gathered = GatheredLayers(model.module, share, team.dp)
    with gathered.having(gathered.layers[-1]):
        model.renew_head()
        model.backbone = Backbone(model.module.base_model, gathered)


def cut_from(module: nn.Module) -> Values:
    """Blocks of a whole module's parameters."""
    params = {name: param.detach() for name, param in module.named_parameters()}
    return lambda block: cut_block(params[block.param.name], block)


def _install_tp(model: Model, team: Team) -> tuple[Partials, ...]:
    if team.tp.size == 1:
        return ()
    own_names = {block.param.name for block in model.layout.blocks} | set(model.layout.aliases)
    config = model.config.get_text_config()
    split = TokenSplit(team.tp, splits=team.splits_tokens)
    return install(model.module, tp_plan(model.module), model.parameters, own_names, split, config)


def _choose_experts(model: Model) -> None:
    """Grouped matrix products take rows of a multiple of 16 bytes alone; cut otherwise, experts go one by one."""
    mixtures = [block.shape for block in model.layout.blocks if len(block.shape) == 3 and block.param.cut is not None]
    if any(extent * model.weights.itemsize % GROUPED_BYTES for shape in mixtures for extent in shape[1:]):
        model.module.base_model.set_experts_implementation("eager")
