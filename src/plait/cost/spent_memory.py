"""What the memory of GPUs is spent on, where a recipe and a plan leave that open: on long micro-batches, on
activations that are kept for the backward, and on pools and graphs that stay though they idle; and what leaves for host
memory while it idles, where all of a plan by name does not fit.

None of this changes a result beyond rounding. A short micro-batch leaves a GPU to wait for launches: on an H100 the
forward of a layer of 1.5 billion parameters takes 2.3 ms for 64 and for 4,096 tokens, and 3.4 for 16,384. Activations
that are not kept are computed once more, a third of a training. So the first of WAYS is taken that fits, by the
forecast of memory; one beside which pools and graphs of generation stay comes before one that drives them out.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from plait.cost.device_memory import memory_by_device, unlike_devices
from plait.cost.placed import Facts
from plait.recipes.engine_checks import abilities
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.recipe import Recipe
from plait.schedule.kept_pools import pools_stay
from plait.schedule.plan import POOL, SEVERAL, Placement, Plan, PolicyChoice

LONG = 16_384
"""Tokens of the longest micro-batches: longer ones are not faster."""
WAYS: Sequence[tuple[int, bool]] = (
    (LONG, False),
    (LONG // 2, False),
    (LONG, True),
    (LONG // 2, True),
    (LONG // 4, True),
)
"""Values of `MEMORY_KEYS`, the fastest first."""
POOL_MARGIN = 0.1
"""Share of a device's memory that is to be free beside pools that stay, at the fullest moment and with all that may
come on top: what a forecast does not know must not end a run that would fit without them."""

Leaves = Callable[[Placement], bool]


def is_open(recipe: Recipe) -> bool:
    """Whether a recipe leaves to a run what memory is spent on."""
    return recipe.device == "cuda" and not all(map(recipe.states, MEMORY_KEYS))


def spent_text(recipe: Recipe) -> str:
    """How training computes, in words."""
    how = "recomputed in the backward" if recipe.checkpoint_activations else "kept for the backward"
    return f"micro-batches of up to {recipe.micro_batch_tokens:,} tokens, whose activations are {how}"


def sparing(recipe: Recipe) -> Recipe:
    """The recipe, which states the way that takes least, as far as it has left that open."""
    return recipe.with_found(**dict(zip(MEMORY_KEYS, WAYS[-1], strict=True)))


def with_memory_spent(facts: Facts, room_bytes: float, *, may_leave: bool, is_alike: bool = True) -> Recipe:
    """The recipe of `facts`, which states the fastest way that fits, as far as it has left open which; one that leaves
    nothing open, or computes on a CPU, as it is.

    Args:
        facts: its plan is completed.
        room_bytes: of one device.
        may_leave: what idles may be in host memory, if not even the last way fits without: no longer micro-batch, and
            nothing kept, is worth that.
        is_alike: all devices are of one kind; where they are not, the way that takes least is taken.
    """
    recipe = facts.recipe
    if not is_open(recipe):
        return recipe
    if not is_alike:
        return sparing(recipe)
    least = facts.spending(_ways(recipe)[-1])
    tried = chain(_tried(facts), _tried_away(facts, least, room_bytes) if may_leave else ())
    found = next((way.recipe for way in tried if has_margin(way, room_bytes)), least.recipe)
    return recipe.with_found(**{key: getattr(found, key) for key in MEMORY_KEYS})


def _tried(facts: Facts) -> Iterator[Facts]:
    """Each way, first with pools and graphs that stay, where they do not anyway."""
    pooled = with_pools(facts)
    for planned in (facts,) if pooled is facts.plan else (replace(facts, plan=pooled), facts):
        yield from map(planned.spending, _ways(facts.recipe))


def _tried_away(facts: Facts, least: Facts, room_bytes: float) -> Iterator[Facts]:
    """With what idles away, each way that keeps no activations (each, where the recipe states that they are kept), if
    `least` has no room without."""
    if with_idle_away(least, room_bytes) == facts.plan:
        return
    ways = _ways(facts.recipe)
    for way in [way for way in ways if way.checkpoint_activations] or ways:
        of_way = facts.spending(way)
        yield replace(of_way, plan=with_idle_away(of_way, room_bytes))


def _ways(recipe: Recipe) -> Sequence[Recipe]:
    """The recipe in each way that it allows."""
    found: dict[tuple[int, bool], Recipe] = {}
    for values in WAYS:
        way = recipe.by_default(**dict(zip(MEMORY_KEYS, values, strict=True)))
        found.setdefault((way.micro_batch_tokens, way.checkpoint_activations), way)
    return list(found.values())


def with_pools(facts: Facts) -> Plan:
    """The plan of `facts`, which is completed, with the policy `pool` where that saves captures of CUDA graphs; else as
    it is."""
    plan = facts.plan
    decoding = [p for p in plan.placements if p.mode in SEVERAL]
    has_graphs = bool(decoding) and all(p.after == "keep" for p in decoding)
    is_ours = facts.recipe.device == "cuda" and not abilities(facts.recipe).computes_elsewhere
    if not (has_graphs and is_ours) or pools_stay(plan):
        return plan
    return replace(plan, policies=(*plan.policies, PolicyChoice(POOL)))


def has_margin(facts: Facts, room_bytes: float) -> bool:
    """Whether every device of this size has room for all that it may hold, but for `POOL_MARGIN`."""
    return all(device.most_bytes <= (1 - POOL_MARGIN) * room_bytes for device in unlike_devices(facts))


def with_pools_kept(facts: Facts, room_bytes: float) -> Plan:
    """As `with_pools`, where every device has room for pools and graphs beside all that it may hold, but for
    `POOL_MARGIN`; else the plan of `facts` as it is.

    Args:
        room_bytes: of one device.
    """
    kept = with_pools(facts)
    return kept if kept is facts.plan or has_margin(replace(facts, plan=kept), room_bytes) else facts.plan


def with_idle_away(facts: Facts, room_bytes: float) -> Plan:
    """The plan of `facts` itself where every device has room for all that stays; else with what idles away, as little
    of it as makes it fit: optimizer states, then models that are never trained, then all that generate nothing. Where
    nothing makes it fit, the plan of these whose fullest device holds least.

    Args:
        facts: its plan is completed, and keeps everything.
        room_bytes: of one device.
    """
    if facts.recipe.lora.rank:
        return facts.plan  # all roles share weights, which are always in use
    needed: dict[int, Plan] = {}
    for plan in _candidates(facts):
        most = max(device.expected_bytes for device in memory_by_device(replace(facts, plan=plan)))
        if most <= room_bytes:
            return plan
        needed.setdefault(most, plan)
    return needed[min(needed)]


def with_all_kept(plan: Plan) -> Plan:
    """The plan as it was before anything left."""
    return replace(plan, placements=tuple(replace(placement, after="keep") for placement in plan.placements))


def leaving_text(plan: Plan) -> str:
    """What of a plan leaves its device, in words; empty where nothing does."""
    leaving = dict.fromkeys(f"{p.call} ({p.mode})" for p in plan.placements if p.after == "offload")
    return ", ".join(leaving)


def _candidates(facts: Facts) -> Iterator[Plan]:
    """From all that stays to all that leaves."""
    trained = {model.role for model in facts.models if model.changes}
    generating = {p.role for p in facts.plan.placements if p.mode == "decode"}
    steps: tuple[Leaves, ...] = (
        lambda p: False,
        lambda p: p.mode == "train",
        lambda p: p.mode == "train" or p.role not in trained | generating,
        lambda p: p.mode == "train" or p.role not in generating,
    )
    for leaves in steps:
        placements = tuple(replace(p, after="offload") if leaves(p) else p for p in facts.plan.placements)
        yield replace(facts.plan, placements=placements)
