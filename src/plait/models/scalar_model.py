"""A decoder with a head of one output per token: the critic, the reward model, the cost model.

The head is linear and without bias, as in Hugging Face's `...ForSequenceClassification` with one label, which is also
the format on disk: parameters `{base_model_prefix}.…` and `score.weight`.

Shapes: T tokens of a packed row, R response tokens, N samples, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.data.chat import READS_TO_MARKER
from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch, Span
from plait.layout.decoder import HEAD
from plait.models.backbone import Backbone
from plait.models.backbone_model import BackboneModel
from plait.models.files.saving import Export, cpu_state
from plait.models.outputs import Outputs, Said
from plait.models.working_weights import OwnPart, adapter_name


class ScalarModule(nn.Module):
    """The decoder under the name that its family gives it, and `score`."""

    def __init__(self, base: Any, head_1H: nn.Parameter) -> None:
        super().__init__()
        self.base_model_prefix = base.base_model_prefix
        self.add_module(base.base_model_prefix, base)
        self.score = nn.Linear(head_1H.shape[1], 1, bias=False, device="meta")
        self.score.weight = head_1H

    @property
    def base_model(self) -> Any:
        return self.get_submodule(self.base_model_prefix)

    @property
    def config(self) -> Any:
        return self.base_model.config

    @property
    def tp_plan(self) -> dict[str, str]:
        """The family's plan; the head is replicated."""
        return self._of_decoder("tp_plan")

    @property
    def ep_plan(self) -> dict[str, str]:
        """The family's plan for experts."""
        return self._of_decoder("ep_plan")

    def _of_decoder(self, plan: str) -> dict[str, str]:
        styles = getattr(self.base_model, plan, None) or {}
        return {f"{self.base_model_prefix}.{name}": style for name, style in styles.items()}


@dataclass(eq=False, kw_only=True)
class ScalarModel(BackboneModel):
    """See the top of the file."""

    kind: ClassVar[str] = "a scalar model"
    says: ClassVar[tuple[Said, ...]] = (Said.VALUES, Said.SCORES)
    peft_task: ClassVar[str] = "SEQ_CLS"

    module: ScalarModule
    passed_token_id: int | None = None
    """The score is read at the last token that is not this one: see `load_scalar`."""

    def values_and_scores(self, batch: PackedBatch, *, checkpoint: bool = False) -> tuple[Tensor, Tensor]:
        """`values_and_scores_of` a batch on the model's device, by a model in one stage: values [R] and scores [N].

        Args:
            checkpoint: see `hidden`.
        """
        return self.values_and_scores_of(self.stage(batch, checkpoint=checkpoint), batch)

    def values_and_scores_of(self, hidden_TH: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The head's outputs at the places that predict the response tokens, and at the last token of each sample, from
        the hidden states of the last stage (`stage`).

        Returns:
            (values [R], scores [N]) in float32, float64 for a float64 model; once differentiable. values[t] is of the
            state before response token t; scores are read at the last response token (of an empty response: the last
            prompt token), in row order.
        """
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        read = uploaded(self.read_places(batch), torch.int64, hidden_TH.device)
        outputs = F.linear(hidden_TH[read].to(wide), self.module.score.weight.to(wide))[:, 0]
        num_tokens = len(batch.predict_on_host_R)
        return outputs[:num_tokens], outputs[num_tokens:]

    def outputs(
        self, hidden_TH: Tensor, batch: PackedBatch, temperature: float, *, keeps_logits: bool = False
    ) -> Outputs:
        """`values_and_scores_of` the hidden states [T, H] of the last stage, values [R] and scores [N]; they have no
        temperature and no logits."""
        values_R, scores_N = self.values_and_scores_of(hidden_TH, batch)
        return Outputs(values_R=values_R, scores_N=scores_N)

    def head_outputs(self, hidden_TH: Tensor, batch: PackedBatch) -> Tensor:
        """What the head makes of hidden states [T, H], one row for each place that it reads: [R + samples, 1]."""
        return torch.cat(self.values_and_scores_of(hidden_TH, batch))[:, None]

    def renew_head(self) -> None:
        """Nothing to do: it is read at every forward."""

    def parameters_of_views(self) -> dict[str, nn.Parameter]:
        """Parameters that every view with an adapter has of its own, by name: those of the head."""
        return {HEAD: self.module.score.weight}

    def with_own(self, own: OwnPart) -> ScalarModel:
        """A view of this model with parameters of its own (an adapter, a head)."""
        return replace(self, module=ScalarModule(self.module.base_model, own_head(own, self.config)), own=own)

    def read_places(self, batch: PackedBatch) -> Tensor:
        """See `BackboneModel.read_places`: [R + samples]."""
        return torch.cat([batch.predict_on_host_R, self._last_N(batch)])

    def _over(self, module: Any, weights: Tensor) -> ScalarModel:
        return replace(self, module=module, weights=weights, backbone=Backbone(module.base_model))

    def export(self, dtype: torch.dtype) -> Export:
        """What `saving.save_pretrained` writes: a `...ForSequenceClassification` with one label."""
        assert self.part is None or self.part.is_whole, "a part of a model cannot be exported"
        config = copy.deepcopy(self.config)
        config.num_labels = 1
        config.get_text_config().pad_token_id = self._pad_token_id()
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            skeleton = _classifier_class(self.module.base_model)(config)
        state = cpu_state(self.module, dtype, adapter_name(self.own))
        return Export(skeleton, state, dtype, self.tokenizer_of_folder())

    def tokenizer_of_folder(self) -> Any:
        """See `BackboneModel.tokenizer_of_folder`.

        A `...ForSequenceClassification` reads the score at the last token that is not the padding token, so that one
        must not be an end-of-sequence token: where it is, another special token becomes the padding token.
        """
        tokenizer = copy.deepcopy(self.tokenizer)
        if tokenizer is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self._pad_token_id())
            tokenizer.init_kwargs[READS_TO_MARKER] = True
        return tokenizer

    def _pad_token_id(self) -> int:
        if self.passed_token_id is not None:
            return self.passed_token_id
        tokenizer, config = self.tokenizer, self.config.get_text_config()
        num_tokens = config.vocab_size if tokenizer is None else len(tokenizer)
        candidates = [config.pad_token_id]
        if tokenizer is not None:
            candidates = [tokenizer.pad_token_id, *candidates, tokenizer.unk_token_id, tokenizer.bos_token_id]
            candidates += tokenizer.all_special_ids
        usable = (i for i in candidates if i is not None and 0 <= i < num_tokens and i not in self.eos_token_ids)
        return next(usable, num_tokens - 1)

    def _last_N(self, batch: PackedBatch) -> Tensor:
        """Place in the row where the score of each sample is read, on the host."""
        samples = [(group.prompt, response) for group in batch.groups for response in group.responses]
        if self.passed_token_id is None:
            places = [(response if response.length else prompt).stop - 1 for prompt, response in samples]
        else:
            assert len(batch.token_ids) == batch.num_tokens, "the ids of the row are on the host, too"
            is_read = [token_id != self.passed_token_id for token_id in batch.token_ids]
            places = [_last_read(is_read, batch.root, prompt, response) for prompt, response in samples]
        return torch.tensor(places, dtype=torch.int64)


def own_head(own: OwnPart, config: Any) -> nn.Parameter:
    """The head [1, H] among what a view has of its own; [0, H] on pipeline stages before the last.

    Args:
        config: of the decoder.
    """
    none_0H = own.weights.new_empty(0, config.get_text_config().hidden_size)
    return own.parameters[HEAD] if HEAD in own.parameters else nn.Parameter(none_0H, requires_grad=False)


def _last_read(is_read: Sequence[bool], *segments: Span) -> int:
    places = [place for span in segments for place in range(span.start, span.stop)]
    return next((place for place in reversed(places) if is_read[place]), places[0])


def _classifier_class(decoder: Any) -> type[Any]:
    """The family's sequence classifier; where Transformers has none, one made as it makes the others."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(decoder.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(decoder.config)]
        if classifier.base_model_prefix == decoder.base_model_prefix:
            return classifier
    family = next(cls for cls in type(decoder).__mro__[1:] if issubclass(cls, PreTrainedModel))
    name = type(decoder).__name__.removesuffix("Model") + "ForSequenceClassification"
    prefix = {"base_model_prefix": decoder.base_model_prefix}
    return type(name, (GenericForSequenceClassification, family), prefix)
