"""The layouts whose ranks tell each other something in a run of a plan: one rule, for the process groups that are made
of them and for what is forecast of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.layout.groups import all_of
from plait.layout.mesh import Layout
from plait.schedule.fusion_rule import FusionRule
from plait.schedule.placements import RolePlacement, layouts_of
from plait.schedule.plan import Plan


@dataclass(frozen=True)
class TeamLayouts:
    """
    layouts:      all of them, in one order that all ranks share: what `models.parallel.team.make_teams` is called with
    everywhere:   role that generates in several instances → a layout of all their ranks, which send each other samples,
                  or prompts that were computed for others
    scores_alone: whether an instance of a layout that scores may do so by itself
    """

    layouts: tuple[Layout, ...]
    everywhere: Mapping[str, Layout]
    scores_alone: bool


def team_layouts(plan: Plan, places: Mapping[str, RolePlacement], rule: FusionRule, *, rebalances: bool) -> TeamLayouts:
    """
    Args:
        plan: completed.
        places: of every role that is a model.
        rule: by which samples are gathered.
        rebalances: whether instances give each other samples beside that.
    """
    gathers = plan.fuses(rule)
    several = {role: place.generate for role, place in places.items() if len(place.generate) > 1}
    everywhere = {
        role: all_of(instances) for role, instances in several.items() if rebalances or gathers or places[role].prefill
    }
    scores_alone = bool(everywhere) and gathers
    alone = [instance for place in places.values() for instance in place.scoring.instances()] if scores_alone else []
    layouts = dict.fromkeys((*layouts_of(plan), *everywhere.values(), *alone))
    return TeamLayouts(tuple(layouts), everywhere, scores_alone)
