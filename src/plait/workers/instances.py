"""An instance of several ranks that generates: every rank runs the same engine on its part of the model, step by step.

All ranks get the same requests at the same step, and so make the same decisions. The first rank of the last stage draws
the tokens and tells the others; with several stages, steps of other samples run before its tokens come
(`policy.decode_ring`). Drafts depend on measured seconds, so one rank makes them and tells the others.

Shapes: B rows, D tokens that are drawn, T tokens of a step, H hidden size, V vocabulary, W bytes that have a bit for
each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from plait.data.host_device import Bits, HostTokens, numbers_of
from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.engine import Engine
from plait.generation.joint import Tokens
from plait.generation.sampler import sample
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import NoSpeculation
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team
from plait.policy.decode_ring import COSTS, GroupRule
from plait.policy.step import Key
from plait.workers.ranks import LEADER
from plait.workers.step_links import Kind, OneToAll, StageLink, Waited


def prompt_engine_of(
    model: LanguageModel, settings: SamplingSettings, team: Team, *, keep_memory: bool = True
) -> Engine:
    """The engine of one rank of an instance that computes prompts for others; arguments as of `engine_of`."""
    joint = JointRanks(model, settings, team) if team.all.size > 1 else None
    engine = Engine(model, settings, joint=joint, speculates=NoSpeculation(), keep_memory=keep_memory)
    engine.state.compute_for_others()
    return engine


def engine_of(model: LanguageModel, settings: SamplingSettings, team: Team, *, keep_memory: bool = True) -> Engine:
    """The engine of one rank of an instance.

    Args:
        model: the rank's part.
        team: the instance.
        keep_memory: see `Engine`.
    """
    if team.all.size == 1:
        return Engine(model, settings, keep_memory=keep_memory)
    joint = JointRanks(model, settings, team)
    own = None if joint.decides else NoSpeculation()
    engine = Engine(model, settings, joint=joint, speculates=own, keep_memory=keep_memory)
    joint.is_drafting = settings.speculation != "off" and (
        settings.speculation != "auto" or engine.state.forward.may_be_steady
    )
    return engine


def deciding(team: Team) -> int:
    """Place, in an instance, of the rank that says which commands a step takes up: the leader's, or the first."""
    return team.all.ranks.index(LEADER) if LEADER in team.all.ranks else 0


class JointRanks:
    """The ranks of an instance of several; see `generation.joint.Joint`."""

    choose = staticmethod(sample)
    is_alone: ClassVar[bool] = False

    def __init__(self, model: LanguageModel, settings: SamplingSettings, team: Team) -> None:
        self.waited = Waited()
        source = team.all.ranks.index(team.layout.rank_at(0, 0, team.pp.size - 1))
        self._tokens = OneToAll(team.all, source, Kind.TOKENS, "drawn tokens", self.waited)
        self._bits = OneToAll(team.all, source, Kind.BITS, "what tokens were drawn from", self.waited)
        self._lengths, self._drafts = (
            OneToAll(team.all, deciding(team), kind, "drafts", self.waited) for kind in (Kind.NUM_DRAFTS, Kind.DRAFTS)
        )
        self.is_drafting = False
        """Whether the deciding rank makes drafts; all ranks know it alike."""
        hidden_size = model.config.get_text_config().hidden_size
        on_cpu = model.device.type == "cpu"
        self.link = StageLink(
            team.pp,
            lambda rows: model.weights.new_empty((rows, hidden_size)),
            self.waited,
            is_ahead=on_cpu and not settings.exact and not team.pp.in_order,
        )
        cost = COSTS.get(model.device.type, COSTS["cpu"])
        self._groups = GroupRule(team.pp.size, cost, settings.stated_groups)

    @property
    def waited_s(self) -> float:
        """See Joint.waited_s."""
        return self.waited.seconds

    @property
    def decides(self) -> bool:
        """Whether this is the deciding rank, which makes the drafts and tells the others."""
        return self._lengths.tells

    @property
    def draws(self) -> bool:
        """See Joint.draws."""
        return self._tokens.tells

    @property
    def most_groups(self) -> int:
        """See Joint.most_groups."""
        return self._groups.most

    def num_groups(self, num_samples: int) -> int:
        """See Joint.num_groups."""
        return self._groups.groups(num_samples)

    def expect(self, num_rows: int) -> None:
        """See Joint.expect."""
        self.link.expect(num_rows)

    def rest(self) -> None:
        """See Joint.rest."""
        self.link.rest()
        self._tokens.rest()
        self._bits.rest()
        self._lengths.rest()
        self._drafts.rest()

    def drafts(self, make: Callable[[], Drafts], running: Sequence[Key]) -> Drafts:
        """See Joint.drafts."""
        if not self.is_drafting or not running:
            return NO_DRAFTS
        drafts = make()
        lengths_B = torch.tensor([len(drafts.get(key, ())) for key in running])
        self._lengths.said(lengths_B)
        if not (total := int(lengths_B.sum())):
            return NO_DRAFTS
        token_ids_D = torch.zeros(total, dtype=torch.int64)
        if drafts:
            token_ids_D[:] = torch.tensor([token_id for key in running for token_id in drafts.get(key, ())])
        self._drafts.said(token_ids_D)
        parts = token_ids_D.split(lengths_B.tolist())
        return {key: part.tolist() for key, part in zip(running, parts, strict=True) if len(part)}

    def tell(self, drawn: Tokens | None, num_drawn: int) -> Callable[[], HostTokens]:
        """See Joint.tell."""
        # A token id is exact in float64, and so is a log-prob.
        drawn_2D = torch.empty(2, num_drawn, dtype=torch.float64)
        if drawn is None:
            transfer = self._tokens.listen(drawn_2D)
            return lambda: numbers_of(self.waited.wait(transfer))
        drawn_2D[0], drawn_2D[1] = drawn
        self._tokens.tell(drawn_2D)
        return lambda: numbers_of(drawn_2D)

    def tell_bits(self, bits_DW: Tensor | None, num_drawn: int, num_bytes: int) -> Callable[[], Bits]:
        """See Joint.tell_bits."""
        if bits_DW is None:
            transfer = self._bits.listen(torch.empty(num_drawn, num_bytes, dtype=torch.uint8))
            return lambda: self.waited.wait(transfer).numpy()
        told_DW = bits_DW.cpu()
        self._bits.tell(told_DW)
        return told_DW.numpy
