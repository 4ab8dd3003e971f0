"""Parameters of the models of roles, as they would have them when they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from plait.layout.params import Parameters
from plait.models.files.hub import read_config
from plait.recipes.role_models import RoleModel


def parameters_of(models: Sequence[RoleModel]) -> dict[str, Parameters]:
    """The parameters of each role's model, from the configurations alone; roles with equal models share one value.

    Imports torch.
    """
    parameters: dict[tuple[str, bool], Parameters] = {}
    for model in models:
        if (model.name, model.scalar) not in parameters:
            parameters[model.name, model.scalar] = _model_parameters(model.name, model.scalar)
    return {model.role: parameters[model.name, model.scalar] for model in models}


def _model_parameters(name: str, scalar: bool) -> Parameters:
    """As a loaded model would have them; a scalar one has a head of one output."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from plait.models.files.pretrained import new_module
    from plait.models.scalar_model import ScalarModule
    from plait.models.working_weights import layout_of

    read = read_config(name)
    config = CONFIG_MAPPING[read["model_type"]].from_dict(dict(read))
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if scalar:
            decoder = new_module(config, decoder_only=True)
            head_1H = torch.nn.Parameter(torch.empty(1, config.get_text_config().hidden_size))
            module = ScalarModule(decoder, head_1H)
        else:
            module = new_module(config, decoder_only=False)
    text = config.get_text_config()
    return Parameters.of(layout_of(module), text.num_attention_heads, getattr(text, "num_key_value_heads", None))
