from __future__ import annotations

from plait.runtime.inputs.prepared import NOTHING_KEPT, Kept
from plait.schedule.plan import Plan, PolicyChoice


def test_settings_of_a_stay_before_hold_where_a_plan_leaves_them_open() -> None:
    """By another profile they would be others, and with them what is scored together."""
    told = PolicyChoice("fusion", (("step_s", 0.5),))
    earlier = Plan("p", 2, policies=(told, PolicyChoice("shares", (("actor", 0.25),))))
    is_open = Plan("p", 2, policies=(PolicyChoice("fusion"), PolicyChoice("shares", (("actor", 0.5),))))
    settled = Kept(earlier=earlier).settled(is_open)
    assert settled.policies == (told, is_open.policies[1]), "what is stated stays"
    assert NOTHING_KEPT.settled(is_open) == is_open
    assert NOTHING_KEPT.orders == ()
