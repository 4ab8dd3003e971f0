"""The numbers of a step that its rows tell. Names: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from plait.data.records import IS_ERROR, FinishReason, Sample
from plait.data.supports import Supports
from plait.dataflow import CallKind, Dataflow, Node
from plait.metric_names import with_logged
from plait.observe.progress import Watched
from plait.recipes.role_models import REWARD_ROLES, RoleModel, main_role
from plait.rewards.scores import GroupScores
from plait.runtime.evaluating.evaluation import logged_means
from plait.runtime.evaluating.evaluations import in_set
from plait.runtime.inputs.held_out import HeldOut
from plait.runtime.steps.grading import exact_mean, grade_metrics, is_baseline, prefix_of
from plait.runtime.steps.step import StepState, by_model, reward_calls


def step_metrics(
    flow: Dataflow, state: StepState, limits: tuple[int, int] | None = None, *, has_tools: bool = False
) -> dict[str, float]:
    """Rewards and their parts, lengths, dead groups, and what the calls recorded. What the user's code says under a
    name of these is under `logged/NAME`.

    Args:
        limits: turns, and tokens, that a sample may have; None where nothing replies.
        has_tools: what replies are tools (`turns.tools`).
    """
    own = _length_metrics(flow, state) | _answer_metrics(flow, state)
    for node in reward_calls(flow, state):
        own |= _reward_metrics(node, flow, state)
    if limits is not None:
        own |= _turn_metrics(flow, state, *limits, has_tools=has_tools)
    own = with_logged(own, grade_metrics(flow, state))
    of_calls = {name: value for name, value in with_logged(own, state.metrics).items() if name not in own}
    return with_logged(of_calls | own, _logged(flow, state))


def tokens_of(state: StepState) -> int:
    """Tokens of the step's samples, each with its own prompt."""
    tables = {**state.tables, **state.generated}
    return sum(len(s.prompt.token_ids) + s.num_tokens for rows in tables.values() for s in rows.samples)


def _turn_metrics(flow: Dataflow, state: StepState, most: int, max_tokens: int, *, has_tools: bool) -> dict[str, float]:
    """How many turns the samples have, how long their replies are, the share that has `most` turns, of those for which
    a reply left no room below `max_tokens`, and of those to which nobody could reply; how many calls of tools were
    answered, and which share of these by an error; of the first rollout, where all samples that train are given."""
    drawn = flow.main_rows if flow.main_rows.id in state.generated else flow.nodes[min(state.generated)]
    samples, prefix = state.generated[drawn.id].samples, prefix_of(drawn, flow)
    turns = np.array([1 + len(sample.replies) for sample in samples])
    answers = [said for sample in samples for said in sample.turns if said["role"] == "tool"] if has_tools else []
    of_tools = {f"{prefix}turns/tool_calls": len(answers) / len(samples)} if has_tools else {}
    if answers:
        of_tools[f"{prefix}turns/tool_failures"] = float(np.mean([bool(said.get(IS_ERROR)) for said in answers]))
    return {
        f"{prefix}turns/mean": float(turns.mean()),
        f"{prefix}turns/max_turns_share": float((turns >= most).mean()),
        f"{prefix}turns/reply_tokens": float(np.mean([s.num_tokens - len(s.token_ids) for s in samples])),
        f"{prefix}turns/no_room": float(
            np.mean([s.finish_reason is FinishReason.LENGTH and s.num_tokens < max_tokens for s in samples])
        ),
        f"{prefix}turns/errors": float(np.mean([bool(s.reply_error) for s in samples])),
        **of_tools,
    }


def _reward_metrics(node: Node, flow: Dataflow, state: StepState) -> dict[str, float]:
    rows = state.tables[node.rows]
    rewards = rows.columns[node.outputs[0]]
    groups = [rewards[list(members)] for members in rows.groups.values()]
    drawn = flow.nodes[node.rows]
    before = prefix_of(drawn, flow)
    prefix = f"{before}{node.role}"
    share = f"frac_{prefix}_zero_std" if is_baseline(drawn, flow) else f"{before}frac_{node.role}_zero_std"
    metrics = {
        prefix: float(rewards.mean()),
        f"{prefix}_std": float(rewards.std()),
        share: float(np.mean([np.ptp(group) == 0 for group in groups])),
    }
    for name, values in by_function(state.scores.get(node.id, ())).items():
        metrics[f"{prefix}s/{name}/mean"] = exact_mean([value for value in values if not math.isnan(value)])
    for name, scores in by_model(node, state).items():
        metrics[f"{prefix}s/{name}/mean"] = exact_mean([score for score in scores.values() if not math.isnan(score)])
    return metrics


def _length_metrics(flow: Dataflow, state: StepState) -> dict[str, float]:
    main = flow.main_rows
    is_rollout = main.kind is CallKind.GENERATE
    samples = (state.generated if is_rollout else state.tables)[main.id].samples
    metrics = _lengths_of(samples, is_rollout=is_rollout)
    if is_rollout:
        metrics |= _support_sizes(samples)
    mixed = [sample.token_versions is not None for sample in samples]
    if any(mixed):
        metrics["training/mixed_versions"] = float(np.mean(mixed))
    return metrics


def _lengths_of(samples: Sequence[Sample], *, is_rollout: bool) -> dict[str, float]:
    lengths = np.array([len(sample.token_ids) for sample in samples])
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "prompt_length/mean": float(np.mean(list({s.prompt.uid: len(s.prompt.token_ids) for s in samples}.values()))),
    }
    if is_rollout:
        truncated = [sample.finish_reason is FinishReason.LENGTH for sample in samples]
        metrics["response_length/clip_ratio"] = float(np.mean(truncated))
    return metrics


def _answer_metrics(flow: Dataflow, state: StepState) -> dict[str, float]:
    """Lengths of what was said to prompts that were made of samples, as by a judge, under the name of the call."""
    metrics: dict[str, float] = {}
    for node in flow.of_kind(CallKind.GENERATE):
        if node.prompts is not None and node is not flow.main_rows:
            lengths = _lengths_of(state.generated[node.id].samples, is_rollout=True)
            metrics |= {f"{node.call}/{name}": value for name, value in lengths.items()}
    return metrics


def _support_sizes(samples: Sequence[Sample]) -> dict[str, float]:
    """From how many tokens those were drawn that did not come from the whole vocabulary."""
    supports = Supports.of(samples)
    sizes = np.zeros(0) if supports is None else supports.counts_R[supports.counts_R >= 0]
    if not len(sizes):
        return {}
    return {"support_size/mean": float(sizes.mean()), "support_size/max": float(sizes.max())}


def _logged(flow: Dataflow, state: StepState) -> dict[str, float]:
    """Means of what reward functions logged (`log_metric`)."""
    groups_of: dict[str, list[GroupScores]] = {}
    for node_id, groups in state.scores.items():
        groups_of.setdefault(prefix_of(flow.nodes[flow.nodes[node_id].rows], flow), []).extend(groups)
    return {
        f"{prefix}{name}": mean for prefix, groups in groups_of.items() for name, mean in logged_means(groups).items()
    }


def by_function(groups: Sequence[GroupScores]) -> dict[str, list[float]]:
    """Name of a reward function → its scores of all samples, group after group."""
    names = groups[0].scores if groups else {}
    return {name: [score for group in groups for score in group.scores[name]] for name in names}


def watched(flow: Dataflow, models: Sequence[RoleModel], held_out: Sequence[HeldOut] = ()) -> Iterator[Watched]:
    """The few numbers of a step that a person watches, what matters most first. A step shows those that it has.

    Of the samples that train: what rewards and functions over texts say of them, and the loss where they are given or
    nothing says anything. Then the loss on given samples beside them, what losses log of pairs and of a reference, the
    same of held-out items (of the first set) in a step that evaluates, lengths and the pace.
    """
    role = main_role(models).role
    accuracies = ("rewards/accuracies", f"{role}/accuracy", f"{role}/mean_token_accuracy")
    said = [*_said_of(flow.main_rows, flow)]
    if not said or flow.main_rows.kind is CallKind.READ:
        said.append(Watched("loss", (f"{role}/loss",), ".4f"))
    learnt = (
        *said,
        *_losses_beside(flow, role),
        Watched("accuracy", accuracies, ".1%"),
    )
    yield from learnt
    yield Watched("margin", ("rewards/margins", f"{role}/margin"), ".4f")
    yield Watched("kl", ("kl",), ".4f")
    label = held_out[0].label if held_out else ""
    for each in learnt:
        of_task = ("accuracy",) if each.metrics == accuracies else ()
        names = tuple(in_set(label, f"eval/{name}") for name in (*of_task, *each.metrics))
        yield Watched(f"eval {label and f'{label} '}{each.title}", names, each.form)
    yield Watched("length", ("response_length/mean",), ".1f")
    yield Watched("tok/s", ("perf/throughput",), ",.0f")


def _said_of(rows: Node, flow: Dataflow) -> Iterator[Watched]:
    """What is said of how good these samples are."""
    scored = {node.role for node in flow.of_kind(CallKind.SCORE) if node.rows == rows.id}
    for role in REWARD_ROLES:
        if role in scored:
            yield Watched(role, (role,), ".3f")
    for node in flow.of_kind(CallKind.GRADE):
        if node.rows == rows.id:
            yield Watched(node.call, (f"{node.call}/mean",), ".3f")
            yield Watched(f"{node.call} unread", (f"{node.call}/unread",), ".0%")


def _losses_beside(flow: Dataflow, role: str) -> Iterator[Watched]:
    """Losses of a role on given samples, beside those on the samples that metrics without a prefix are of."""
    for node in flow.calls(role):
        rows = flow.nodes[node.rows]
        if node.kind is CallKind.TRAIN and rows.kind is CallKind.READ and rows is not flow.main_rows:
            yield Watched(f"{rows.call} loss", (f"{role}/ptx_loss", f"{node.call}/loss"), ".4f")
