"""One rank's stage of a pipeline: forward and backward of each micro-batch through its part of the model.

Shapes: T tokens of a packed row, H hidden size, R response tokens, K tokens of the vocabulary at each place, J = K + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.data.records import ranges_of
from plait.data.rows import Rows
from plait.data.supports import Supports
from plait.dataflow import Top
from plait.errors import RunError
from plait.models.compute.logprobs_at import chunked_top_logprobs
from plait.models.language_model import LanguageModel
from plait.models.layer_weights import LayerWeights
from plait.models.model import Model
from plait.models.outputs import Outputs, Said
from plait.models.parallel.team import Team
from plait.policy.packing import NO_SAMPLES, MicroBatch
from plait.training.optimizer import MasterOptimizer
from plait.training.router_balance import RouterBalance, joined
from plait.training.router_replay import RouterReplay, replay_of
from plait.training.tally import Tally

Take = Callable[[MicroBatch, Outputs], None]
"""Is told the outputs of a micro-batch."""


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a model: all of it, or a tensor-parallel share of a stage."""

    model: Model
    team: Team
    checkpoint: bool
    """Compute the activations of layers, and logits, again in the backward."""
    replays_experts: bool
    """Tokens go to the experts that samples say."""

    def packed(self, rows: Rows, micro: MicroBatch) -> PackedBatch:
        """The packed row of a micro-batch, on the model's device.

        Raises:
            RunError: a sample has a token that the model has not.
        """
        groups = [
            (rows.samples[members[0]].prompt.token_ids, [rows.samples[i].all_ids for i in members])
            for members in micro.groups
        ]
        given = [ranges_of(rows.samples[i].replies) for i in micro.samples]
        speaks = Said.LOGPROBS in self.model.says
        supports = Supports.of([rows.samples[i] for i in micro.samples]) if speaks else None
        batch = pack(groups, self.model.device, root_tokens=micro.root_tokens, given=given, supports=supports)
        config = self.model.config.get_text_config()
        largest = max(max(batch.token_ids, default=0), 0 if supports is None else supports.largest)
        if largest >= config.vocab_size:
            having = [rows.samples[i] for i in micro.samples]
            uid = next((s.uid for s in having if largest in s.all_ids or largest in s.prompt.token_ids), having[0].uid)
            raise RunError(
                f"sample {uid} has token {largest}, but the model `{config.name_or_path}`, which reads it, has only "
                f"the tokens 0 to {config.vocab_size - 1}; give all roles models with as many tokens (Transformers' "
                "`resize_token_embeddings` adds rows)"
            )
        return batch

    def replay(self, batch: PackedBatch, rows: Rows, micro: MicroBatch) -> RouterReplay | None:
        """Where the tokens of a micro-batch are to go; None: where routers send them."""
        if not self.replays_experts:
            return None
        return replay_of(self.model, batch, [[rows.samples[i] for i in members] for members in micro.groups])

    def hidden(
        self,
        batch: PackedBatch,
        inputs_TH: Tensor | None,
        routing: RouterReplay | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """What this stage makes of the hidden states [T, H] of the stage before, which the first has none of: [T, H].
        Differentiable.

        Args:
            routing: of `replay`.
            router_logits: are filled, see `ForwardOptions`.
        """
        how = {"checkpoint": self.checkpoint, "router_logits": router_logits, "routing": routing}
        return self.model.stage(batch, inputs_TH, **how)

    @property
    def layers(self) -> LayerWeights:
        """The weights that forwards and backwards compute with."""
        return self.model.backbone.layer_weights

    def as_many(self, micros: Sequence[MicroBatch], copies: Sequence[Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
        """The micro-batches of this rank for forwards, and some without samples where weights are gathered and other
        copies have more."""
        if not self.layers.is_gathered:
            return micros
        return *micros, *[NO_SAMPLES] * (max(map(len, copies)) - len(micros))

    @property
    def lowest_layer(self) -> int | None:
        """The first layer of this rank that a backward comes to, as something is trained in it or before it; None: a
        backward comes to none."""
        model = self.model
        if model.own is not None and model.own.adapter is None:
            return None  # a head alone is trained
        is_adapted = model.own is not None and self.team.is_first_stage
        blocks = (model.trained.layout if is_adapted else model.layout).blocks
        return min((block.param.layer for block in blocks if block.param.layer is not None), default=None)

    def room(self, num_tokens: int) -> Tensor:
        """Memory for hidden states [T, H] between two stages, or for their gradient."""
        hidden_size = self.model.config.get_text_config().hidden_size
        return torch.empty(num_tokens, hidden_size, dtype=self.model.dtype, device=self.model.device)


@dataclass(frozen=True)
class ScoringStage:
    """Forward only.

    Args:
        take: is told the outputs, on the last stage alone.
        top: the likeliest tokens are all that is asked for; None: the model says what it has to say.
    """

    part: ModelPart
    rows: Rows
    micros: Sequence[MicroBatch]
    temperature: float
    take: Take
    top: Top | None = None

    def tokens(self, index: int) -> int:
        return self.micros[index].num_tokens

    def room(self, index: int) -> Tensor:
        """See `pipeline.Stage`: [T, H]."""
        return self.part.room(self.tokens(index))

    @torch.no_grad()
    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        """See `pipeline.Stage`: [T, H] to [T, H], without a graph for a backward."""
        micro, model = self.micros[index], self.part.model
        if not micro.samples:
            self.part.layers.idle_forward()
            return None if self.part.team.is_last_stage else self.room(index)
        with self.part.layers.forward():
            batch = self.part.packed(self.rows, micro)
            hidden_TH = self.part.hidden(batch, inputs, self.part.replay(batch, self.rows, micro))
            if not self.part.team.is_last_stage:
                return hidden_TH
            if self.top is None:
                self.take(micro, model.outputs(hidden_TH, batch, self.temperature))
            else:
                self.take(micro, _top_outputs(model, hidden_TH, batch, self.temperature, self.top))
        return None

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """A call that scores has none: no gradient [T, H] comes here."""
        raise AssertionError("a call that scores has no backward")


@dataclass(frozen=True)
class TrainingStage:
    """Forward and backward of each micro-batch; those of other micro-batches and models may come in between."""

    part: ModelPart
    micros: Sequence[MicroBatch]
    """Those of one loss behind those of another. One without samples computes nothing, and sends nothing to other
    stages: the rank takes part in the gradient sums of what other copies of the model compute."""
    optimizer: MasterOptimizer
    """Each backward adds to its gradients."""
    tallies: Sequence[Tally]
    """For each micro-batch, what counts the mini-batch of its loss; it is told the outputs, on the last stage alone."""
    num_samples: int
    """Samples of the optimizer step, on all ranks and for all losses."""
    balance: RouterBalance | None
    """The loss of routers that is added; what it sums up goes from stage to stage behind the hidden states."""
    kept: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=dict)
    """Micro-batch in flight → its inputs, and the tensors that its backward starts from."""
    finished: set[int] = field(default_factory=set)
    """Micro-batches whose backward is done."""

    def tokens(self, index: int) -> int:
        return self.micros[index].num_tokens

    def room(self, index: int) -> Tensor:
        """See `pipeline.Stage`: [T, H], or what `router_balance.joined` makes of it."""
        room_TH = self.part.room(self.tokens(index))
        return room_TH if self.balance is None else self.balance.room(room_TH, len(self.micros[index].samples))

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        """See `pipeline.Stage`: [T, H] to [T, H], or messages as of `room`; what the backward starts from is kept."""
        micro, tally = self.micros[index], self.tallies[index]
        if not micro.samples:
            self.part.layers.idle_forward()
            return None if self.part.team.is_last_stage else self.room(index)
        mini_batch = tally.batch
        with self.optimizer.collecting_gradients(), self.part.layers.forward():
            given = () if inputs is None else self._parts(index, inputs)
            for tensor in given:
                tensor.requires_grad_(True)
            batch = self.part.packed(mini_batch.rows, micro)
            hidden_TH, *sums = made = self._made(tally, batch, given, self.part.replay(batch, mini_batch.rows, micro))
            if not self.part.team.is_last_stage:
                self.kept[index] = given, made
                return joined(made)
            keeps = not self.part.checkpoint
            outputs = self.part.model.outputs(hidden_TH, batch, mini_batch.temperature, keeps_logits=keeps)
            share = start = mini_batch.share(micro, outputs, needs_gradient=True)
            if self.balance is not None:
                start = share + self.balance.share(sums[0], mini_batch, self.num_samples)
        tally.add(micro, outputs, share)
        self.kept[index] = given, (start,)
        return None

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """See `pipeline.Stage`: [T, H] to [T, H], or messages as of `room`; gradients of the stage's weights are added
        to the optimizer's."""
        layers, settle = self.part.layers, self.optimizer.collected.settle
        if not self.micros[index].samples:
            layers.idle_backward(settle, self.part.lowest_layer)
            self._end(index)
            return None if self.part.team.is_first_stage else self.room(index)
        given, made = self.kept.pop(index)
        with self.optimizer.collecting_gradients(), layers.backward(settle):
            if gradient is None:
                self.tallies[index].batch.backward(made[0])
            else:
                # Of a stage without routers, and none before it, sums have no gradient to take.
                parts = zip(made, self._parts(index, gradient), strict=True)
                starts = {tensor: part for tensor, part in parts if tensor.requires_grad}
                torch.autograd.backward(list(starts), list(starts.values()))
        self._end(index)
        return joined([tensor.grad for tensor in given if tensor.grad is not None]) if given else None

    def _made(
        self, tally: Tally, batch: PackedBatch, given: tuple[Tensor, ...], routing: RouterReplay | None
    ) -> tuple[Tensor, ...]:
        """Hidden states [T, H], and, where routers are balanced, their sums [2, N, E] up to this stage."""
        if self.balance is None:
            made: tuple[Tensor, ...] = (self.part.hidden(batch, given[0] if given else None, routing),)
        else:
            router_logits: list[Tensor] = []
            inputs_TH, before_2NE = given or (None, None)
            hidden_TH = self.part.hidden(batch, inputs_TH, routing, router_logits)
            used = None if routing is None else [routing.used[layer] for layer in sorted(routing.used)]
            sums_2NE, chosen_LE = self.balance.sums(batch, router_logits, before_2NE, used)
            tally.add_chosen(chosen_LE)
            made = hidden_TH, sums_2NE
        if routing is not None:
            tally.add_replayed(routing.counts())
        return made

    def _parts(self, index: int, message: Tensor) -> tuple[Tensor, ...]:
        """What is in a message as of `room`."""
        if self.balance is None:
            return (message,)
        return self.balance.parted(message, self.tokens(index), len(self.micros[index].samples))

    def _end(self, index: int) -> None:
        self.optimizer.collected.end_micro_batch()
        self.finished.add(index)

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == len(self.micros)


def _top_outputs(model: Model, hidden_TH: Tensor, batch: PackedBatch, temperature: float, top: Top) -> Outputs:
    """The likeliest tokens in the place of each response token, and nothing else, from the hidden states of the last
    stage [T, H]."""
    assert isinstance(model, LanguageModel), "a scalar model has no tokens"
    hidden_RH = hidden_TH[batch.predict_R]
    ids_RK, logprobs_RJ = chunked_top_logprobs(model.head, hidden_RH, top.count, temperature, among=top.among)
    return Outputs(top=torch.cat([ids_RK.to(logprobs_RJ.dtype), logprobs_RJ], dim=1))
