"""Which layers of a model asked our forward for what: each must attend, or go through its mixer, once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.data.packed import PackedBatch
from plait.models.compute.attention import PackedContext
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.recurrent import Mixer, recurrent_layers_of
from plait.models.compute.row_attention import pieces_plan
from plait.models.layer_types import attending_layers


class LayerCalls(PackedContext):
    """A PackedContext that remembers which layer attended with which window, and which went through its mixer."""

    def __init__(self, batch: PackedBatch) -> None:
        super().__init__(batch, planned=pieces_plan)
        self.calls: list[tuple[int, int | None]] = []
        self.mixed: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        self.calls.append((layer, form.window))
        return super().attend(layer, query, key, value, form)

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """See `RecurrentContext.mix`: [T, H] → [T, H]."""
        self.mixed.append(layer)
        return super().mix(layer, hidden_TH, mixer)

    def fault(self, config: Any) -> str | None:
        """What was called otherwise than a configuration of Transformers states; None: nothing."""
        texts, types = config.get_text_config(), layer_types(config)
        called, recurrent = sorted(layer for layer, _ in self.calls), [*recurrent_layers_of(config)]
        attending = [*attending_layers(types, texts.num_hidden_layers)]
        if called != attending:
            each = attending if recurrent else f"0 … {texts.num_hidden_layers - 1}"
            return f"attention ran for layers {called}, expected each of {each} once"
        if (mixed := sorted(self.mixed)) != recurrent:
            update = "" if mixed else "; Transformers 5.22 and later have them in the form that is known here"
            return f"segments went through the recurrent layers {mixed}, expected each of {recurrent} once{update}"
        stated = getattr(texts, "sliding_window", None)
        for layer, window in sorted(self.calls, key=lambda call: call[0]):
            expected = stated if types is None or types[layer] == "sliding_attention" else None
            if window != expected:
                return f"layer {layer} attends with window {window}, its configuration states {expected}"
        return None


def layer_types(config: Any) -> list[str] | None:
    """The kind of each decoder layer, by a configuration of Transformers; None: the family states none."""
    return getattr(config.get_text_config(), "layer_types", None)
