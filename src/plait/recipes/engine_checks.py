"""What each generation engine can do, and what a recipe asks beyond that: refused by name, before any work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError
from plait.generation.refused import LAYERS_ROUND
from plait.generation.settings import MAX_DRAFT_TOKENS, SamplingSettings
from plait.models.mixer_shape import KEEPS_STATE
from plait.models.shape import ModelShape
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import optimizer_of
from plait.schedule.plan import POOL, Plan
from plait.speculation.promise import MAY_LOSE


@dataclass(frozen=True)
class Abilities:
    """What a generation engine can do, whatever the run."""

    exact: bool
    """Its logits can be had to the bit, whatever is computed beside them."""
    drafts: bool
    moves: bool
    """Samples go on elsewhere, or with other weights."""
    parts: bool
    """It computes with models in parts and on several devices."""
    keeps_support: bool
    """It says what top-k, top-p and min-p left of the vocabulary for each token, over which a trainer renormalises."""
    min_p: bool
    """It draws by min-p."""
    keeps_experts: bool
    """It says which experts of a mixture each token went to."""
    own_cache: bool
    """What it keeps of earlier prompts is its own to decide."""
    program: str | None
    """The other program that generates, as users know it. None: ranks generate, with the weights of the role."""
    dtypes: tuple[str, ...]

    @property
    def computes_elsewhere(self) -> bool:
        """In a process and an environment of its own, which holds weights, keys and values of its own all the time; its
        log-probs are compared with the trainer's before the first step."""
        return self.program is not None


ABILITIES = {
    "plait": Abilities(
        exact=True,
        drafts=True,
        moves=True,
        parts=True,
        keeps_support=True,
        min_p=True,
        keeps_experts=True,
        own_cache=False,
        program=None,
        dtypes=("bfloat16", "float32", "float64"),
    ),
    "vllm": Abilities(
        exact=False,
        drafts=False,
        moves=False,
        parts=False,
        keeps_support=False,
        min_p=False,
        keeps_experts=False,
        own_cache=True,
        program="vLLM",
        dtypes=("bfloat16", "float32"),
    ),
}
"""By `sampling.engine`: all that anything but the engine itself knows of it. What opens an engine, what it has room for
and what it needs to be there are tables by the same names, each with its readers."""


def abilities(recipe: Recipe) -> Abilities:
    """What the engine that draws in training can do."""
    return ABILITIES[recipe.sampling.engine]


def said_of_program(recipe: Recipe) -> str | None:
    """Who draws tokens, in words for a person, where that is another program; None: ranks do."""
    program = abilities(recipe).program
    return None if program is None else f"{program} draws the tokens, in a process of its own (`sampling.engine`)"


STEADY = {"cpu": ("float32", "bfloat16")}
"""Device → dtypes in which a row may have the same bits in any company: what backends of `generation` declare
(`Backend.is_steady`), known without torch."""


def no_drafts(recipe: Recipe) -> str | None:
    """Why nothing is drafted with `sampling.speculation` auto, as far as the recipe says; None: something may be, or it
    is not auto. What engines find when they have their model is `GenerationEngine.refusals`."""
    sampling = recipe.sampling
    if sampling.speculation != "auto":
        return None
    if not (can := abilities(recipe)).drafts:
        return f"{can.program} takes no drafts"
    if recipe.update_rule.by_clock:
        return (
            "drafts would change where samples stand when new weights come (`partial_rollout` "
            f"{recipe.partial_rollout})"
        )
    if sampling.exact:
        return None
    if recipe.device not in STEADY:
        return "kernels of a GPU may round by the number of rows"
    if (dtype := recipe.dtype.value) not in STEADY[recipe.device]:
        return f"in {dtype} kernels may round by the number of rows"
    return None


def said_of_no_drafts(recipe: Recipe, not_steady: str | None = None) -> str | None:
    """Why auto drafts nothing and what does, in words for a person; None: it may, or it is not auto.

    Args:
        not_steady: of the engine, as far as there is one.
    """
    why = no_drafts(recipe)
    if why is None and drafts_whole(recipe):
        why = not_steady
    return None if why is None else none_by_auto("sampling.speculation", why, adaptive=abilities(recipe).drafts)


STATES_STAY = "states of its recurrent layers cannot be rolled back where draft tokens are rejected"
"""Why nothing is drafted for a model whose layers are recurrent."""


def none_by_layers(key: str, not_compiled: str) -> str:
    """That auto drafts nothing as the Transformers module computes, for this reason, in words for a person.

    Args:
        key: that is auto.
    """
    keeps = not_compiled == KEEPS_STATE
    return none_by_auto(key, STATES_STAY if keeps else LAYERS_ROUND, adaptive=not keeps)


def none_by_auto(key: str, why: str, *, adaptive: bool) -> str:
    """That auto drafts nothing, in words for a person.

    Args:
        key: that is auto.
        adaptive: whether it may be `adaptive` instead.
    """
    remedy = "; `adaptive` drafts all the same" if adaptive else ""
    return f"none by `{key}` auto, as {why}{remedy}"


def speculates(recipe: Recipe) -> bool:
    """Whether engines of a run may draft."""
    return recipe.sampling.speculation != "off" and no_drafts(recipe) is None


def learns_acceptance(recipe: Recipe) -> bool:
    """Whether engines of a run may learn how drafts do: those of a fixed length are made whatever comes of them."""
    return speculates(recipe) and not isinstance(recipe.sampling.speculation, int)


def drafts_whole(recipe: Recipe) -> bool:
    """Whether only instances on one device draft (`auto`, and not exact): where a model is sharded, how the sums of a
    row are rounded depends on the other rows of its batch."""
    return recipe.sampling.speculation == "auto" and not recipe.sampling.exact


def max_draft_tokens(recipe: Recipe) -> int:
    """Tokens of a draft at most; 0: nothing is drafted."""
    stated = recipe.sampling.speculation
    return 0 if not speculates(recipe) else stated if isinstance(stated, int) else MAX_DRAFT_TOKENS


def of_engines(recipe: Recipe) -> SamplingSettings:
    """What engines of a run are told."""
    if speculates(recipe):
        return recipe.sampling
    return recipe.sampling.model_copy(update={"speculation": "off"})


_UNHEARD = "does not say which experts tokens went to"
_FORGETS = "does not say which tokens are left to draw from, which training needs to know"


def check_engine(recipe: Recipe) -> None:
    """Raises ConfigError where a recipe asks its engine for what that cannot do."""
    engine, sampling = recipe.sampling.engine, recipe.sampling
    can, drafts = abilities(recipe), sampling.draft_model
    drafting, grouped = sampling.speculation not in ("auto", "off"), sampling.stated_groups is not None
    demands = (
        ("sampling.exact", sampling.exact, can.exact, "promises no equal bits", "false"),
        ("sampling.speculation", drafting, can.drafts, "takes no drafts", "auto"),
        ("sampling.speculation_loss", sampling.speculation_loss != MAY_LOSE, can.drafts, "takes no drafts", MAY_LOSE),
        ("sampling.draft_model", drafts is not None, can.drafts, "takes no drafts", "null"),
        ("sampling.top_p", sampling.top_p < 1, can.keeps_support, _FORGETS, "1"),
        ("sampling.top_k", sampling.top_k, can.keeps_support, _FORGETS, "0"),
        ("sampling.min_p", sampling.min_p, can.keeps_support, _FORGETS, "0"),
        (
            "sampling.router_replay",
            sampling.router_replay,
            can.keeps_experts,
            _UNHEARD,
            "false",
        ),
        ("sampling.decode_groups", grouped, can.parts, "has no stages", "auto"),
        ("sampling.prefix_cache_tokens", sampling.prefix_cache_tokens, not can.own_cache, "decides what it keeps", "0"),
        ("max_staleness", recipe.max_staleness, can.moves, "draws with the newest weights alone", "0"),
        ("rebalance", recipe.rebalance != "off", can.moves, "lets no sample go on elsewhere", "off"),
    )
    for key, is_set, is_met, why, remedy in demands:
        if is_set and not is_met:
            section, _, name = key.rpartition(".")
            value = getattr(sampling if section else recipe, name)
            raise ConfigError(
                f"`{key}` is {value}, but `sampling.engine` is {engine}, which {why}; set `{key}` to {remedy}, or "
                "`sampling.engine` to plait"
            )
    for one in evaluation_sets(recipe):
        if one.answering.min_p and not can.min_p:
            raise ConfigError(
                f"`{one.section}.min_p` is {one.answering.min_p:g}, but `sampling.engine` is {engine}, which does not "
                f"draw by it; set it to 0, or `sampling.engine` to plait"
            )
    if drafts is not None and (why := no_drafts(recipe)) is not None:
        raise ConfigError(
            f"`sampling.draft_model` is {drafts}, but `sampling.speculation` is auto, which drafts nothing here: "
            f"{why}; set `sampling.speculation` to adaptive, or leave `sampling.draft_model` out"
        )
    if recipe.dtype.value not in can.dtypes:
        raise ConfigError(
            f"`dtype` is {recipe.dtype.value}, but `sampling.engine` is {engine}, which computes in "
            f"{' or '.join(can.dtypes)}; change one of them"
        )


def check_engine_calls(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a role generates with weights of the same step, but its engine gets them when the step
    has ended."""
    if not (can := abilities(recipe)).computes_elsewhere:
        return
    trained = set[str | None]()
    for node in flow.nodes:
        if node.kind is CallKind.TRAIN:
            trained.add(node.role)
        elif node.kind is CallKind.GENERATE and node.role in trained:
            raise ConfigError(
                f"{node.call} of the flow `{flow.name}` comes after {node.role}.train, but `sampling.engine` is "
                f"{recipe.sampling.engine}: {can.program} gets new weights when a step has ended; set "
                "`sampling.engine` to plait, or generate before the role is trained"
            )


def check_engine_plan(recipe: Recipe, plan: str, num_ranks: int) -> None:
    """Raises ConfigError where a plan of that name spreads what its engine computes in one process only."""
    engine = recipe.sampling.engine
    if num_ranks > 1 and not abilities(recipe).parts:
        raise ConfigError(
            f"the plan `{plan}` (`plan`, `devices`) is of {num_ranks} devices, but `sampling.engine` is "
            f"{engine}, which generates for a run of one: no tp, pp or several instances; set `devices` to 1, or "
            "`sampling.engine` to plait"
        )


def said_of_idle_keys(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What of a recipe has nothing to do in a plan, or of a plan in a recipe, in words."""
    decoding = [p for p in plan.placements if p.mode == "decode"]
    instances = Counter[str]()
    for p in decoding:
        instances[p.call] += p.dp
    if recipe.sequence_parallel and all(p.tp == 1 for p in plan.placements if p.mode == "train"):
        yield "`sequence_parallel` divides nothing: no call of the plan trains with tp above 1"
    for key in ("shard_gradients", "shard_weights"):
        divided = [p for p in plan.placements if p.mode == "train" and getattr(optimizer_of(p.role, recipe), key)]
        if divided and all(p.dp == 1 for p in divided):
            yield f"`optimizer.{key}` divides nothing: no call of the plan that has it trains with dp above 1"
    if recipe.rebalance != "off" and all(count == 1 for count in instances.values()):
        yield "`rebalance` moves nothing: no call of the plan generates in several instances"
    if (recipe.sampling.stated_groups or 1) > 1 and all(p.pp == 1 for p in decoding):
        yield "`sampling.decode_groups` divides nothing: no call of the plan generates with pp above 1"
    if plan.keeps_pools and (recipe.device != "cuda" or abilities(recipe).computes_elsewhere):
        yield f"policy `{POOL}` of the plan keeps nothing: it is for GPUs that generate by plait's own engine"


def check_stop(recipe: Recipe, shape: ModelShape) -> None:
    """Raises ConfigError where a stop token is none of the model's."""
    for token in recipe.sampling.stop_token_ids or ():
        if token >= shape.vocabulary:
            raise ConfigError(
                f"`sampling.stop_token_ids` holds {token}, but `{recipe.model}` has the tokens 0 to "
                f"{shape.vocabulary - 1}; give one of these"
            )
