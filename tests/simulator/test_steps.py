"""Steps in simulated seconds: by hand, against a plain list scheduler, and what holds of every one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.costs import Tail
from plait.cost.pipelines import FILLING
from plait.cost.working_memory import KEPT, PROCESS
from plait.dataflow import Resample, trace
from plait.errors import ConfigError
from plait.schedule.completion import complete
from plait.schedule.fused import FUSED
from plait.schedule.named_plans import PlannedModel, named_plan
from plait.schedule.plan import Placement, Plan
from plait.simulator.places import Places
from plait.simulator.step_graph import Rollouts, Slot, StepCall, StepGraph
from plait.simulator.step_simulator import Played, StepSimulator
from plait.simulator.steps import Prediction, predict
from tests.cases import examples
from tests.schedule.test_placements import PPO
from tests.schedule.workloads import never
from tests.simulator.stand_in_costs import StandIn

MODELS = {role: PlannedModel(scalar=role in ("critic", "reward")) for role in ("actor", "critic", "ref", "reward")}
WORK = {
    "actor.generate": 40.0,
    "ref.logprobs": 8.0,
    "critic.values": 4.0,
    "reward.score": 4.0,
    "actor.train": 24.0,
    "critic.train": 12.0,
}
WEIGHTS = {"actor": 10, "critic": 10, "ref": 10, "reward": 10}
GRAPH = StepGraph.of(PPO, MODELS, ["reward"], rollouts=Rollouts(groups=8, group_tokens=512, micro_batch_tokens=1024))


def costs(devices: int = 4, **changes) -> StandIn:
    return replace(StandIn(WORK, WEIGHTS, devices=devices, memory=1000), **changes)


def predicted(plan: Plan, **changes) -> Prediction:
    whole = complete(plan, PPO, MODELS, "plan")
    return predict(whole, GRAPH, costs(plan.num_ranks, **changes))


def starts(prediction: Prediction) -> dict[str, tuple[float, float]]:
    return {
        one.call: (pytest.approx(one.start_s), pytest.approx(one.start_s + one.seconds)) for one in prediction.calls
    }


def test_prompts_that_are_computed_elsewhere_keep_ranks_until_all_is_drawn() -> None:
    """Who draws what is a matter of the costs, which are told where prompts are computed."""
    prefill, decode = Placement("actor.generate", "prefill", (0,)), Placement("actor.generate", "decode", (1,))
    same = Plan("mine", 2, (replace(prefill, ranks=(1,)), decode))
    together = predicted(same)
    assert together.seconds_per_step == predicted(Plan("mine", 2, (decode,))).seconds_per_step
    apart = predicted(Plan("mine", 2, (prefill, decode)))
    (drawn,) = (call for call in apart.calls if call.call == "actor.generate")
    assert {p.mode for p in drawn.placements} == {"prefill", "decode"}
    assert {span.rank for span in apart.timeline.spans if span.action == "actor.generate"} == {0, 1}
    with pytest.raises(
        ConfigError, match=r"plan `mine`: actor.generate computes its prompts on other ranks .* not pred"
    ):
        predicted(Plan("mine", 2, (prefill, decode)), crowded_s=1.0)


def test_who_waits_for_whom_in_ppo() -> None:
    """Calls 0 generate, 1 reward, 2 reference, 3 values, 4 and 5 training: advantages need the scores of all."""
    assert [one.call for one in GRAPH.calls] == [
        "actor.generate", "reward.score", "ref.logprobs", "critic.values", "actor.train", "critic.train",
    ]  # fmt: skip
    assert GRAPH.calls[2].needs == {0}
    assert GRAPH.calls[2].source == 0
    assert GRAPH.calls[2].beside == frozenset()
    assert GRAPH.calls[4].needs == {0, 1, 2, 3}
    assert GRAPH.slots[0] == Slot("actor", "decode")
    assert GRAPH.home_of("actor") == 4


def test_needs_pass_through_what_no_model_computes() -> None:
    def flow(prompts, actor, reward):
        samples = actor.generate(prompts)
        actor.train(samples, loss=lambda batch, rewards: batch, rewards=reward.score(samples))

    graph = StepGraph.of(trace(flow, roles=("actor", "reward")), ["actor"])
    assert [one.call for one in graph.calls] == ["actor.generate", "actor.train"]
    assert graph.calls[1].needs == {0}


@pytest.mark.parametrize("draws_again", [False, True])
def test_models_of_one_reward_score_side_by_side(draws_again: bool) -> None:
    """In parts beside generation, a quarter of the larger one after it; or, where they decide what is drawn, when all
    is: their ranks are busy until then. Training waits for both."""

    def flow(prompts, actor, reward):
        samples = actor.generate(prompts, resample=Resample(keep=bool, reward=reward) if draws_again else None)
        actor.train(samples, loss=lambda batch, rewards: batch, rewards=reward.score(samples))

    traced = trace(flow, roles={"actor": {}, "reward": {"model_2": "reward_2"}})
    models = {role: PlannedModel(scalar=role != "actor") for role in ("actor", "reward_2", "reward")}
    graph = StepGraph.of(traced, models, ["reward"], rollouts=GRAPH.rollouts)
    assert [one.call for one in graph.calls] == ["actor.generate", "reward_2.score", "reward.score", "actor.train"]
    assert [one.needs for one in graph.calls] == [frozenset(), {0}, {0}, {0, 1, 2}]
    assert [graph.slots[slot].role for slot in graph.calls[0].deciding] == ["reward", "reward_2"] * draws_again
    places = {"actor.generate": 0, "actor.train": 0, "reward.score": 1, "reward_2.score": 2}
    modes = {"generate": "decode", "train": "train", "score": "score"}
    placements = tuple(Placement(call, modes[call.split(".")[1]], (rank,)) for call, rank in places.items())
    work = {"actor.generate": 40.0, "reward.score": 4.0, "reward_2.score": 8.0, "actor.train": 24.0}
    bytes_of = dict.fromkeys(models, 10)
    prediction = predict(
        complete(Plan("mine", 3, placements), traced, models, "plan"),
        graph,
        StandIn(work, bytes_of, devices=3, memory=1000),
    )
    drawn = 40.4  # decoding has 1 % that stays
    assert starts(prediction)["actor.train"] == ((drawn + 8, drawn + 32) if draws_again else (drawn + 2, drawn + 26))


def test_colocated_is_one_call_after_another() -> None:
    """All on 4 devices, one copy each: the sum of the calls, a quarter of their work; decoding has 1 % that stays."""
    prediction = predicted(named_plan("colocated", PPO, MODELS, 4))
    seconds = 10.4 + 1 + 2 + 1 + 6 + 3
    assert prediction.seconds_per_step == pytest.approx(seconds)
    assert starts(prediction)["actor.train"] == (14.4, 20.4)
    assert not any(one.kind == "MOVE" for one in prediction.calls)
    computed = (span.duration_s for span in prediction.timeline.spans if (span.rank, span.lane) == (3, "compute"))
    assert sum(computed) == pytest.approx(3 * seconds)


def test_scores_on_ranks_of_their_own_are_computed_beside_generation_in_parts() -> None:
    """Split: actor and reference on two ranks, critic and reward on the others. Two groups make a part there (2 x 1024
    tokens, 512 of a group: 4 groups), so scoring has 2 parts: one of the reward and one of the values from half of
    generation on, 1 s each, and the others when it has ended (20.4 s), one behind the other. Where all samples end at
    the end, scoring begins there."""
    prediction = predicted(named_plan("split", PPO, MODELS, 4))
    found = starts(prediction)
    assert found["actor.generate"] == (0.0, 20.4)
    assert found["reward.score"] == (19.4, 21.4)
    assert found["critic.values"] == (20.4, 22.4)
    assert found["ref.logprobs"] == (20.4, 24.4)
    assert found["critic.train"] == (22.4, 28.4)
    assert found["actor.train"] == (24.4, 36.4)
    assert prediction.seconds_per_step == pytest.approx(36.4)
    late = starts(predicted(named_plan("split", PPO, MODELS, 4), first_s=20.4))
    assert late["reward.score"] == (20.4, 22.4)


def test_what_is_left_to_score_when_samples_have_ended_keeps_its_ranks_busy() -> None:
    """Actor on ranks 0 and 1 (20.4 s), critic and reward on 2 and 3, each 2 s in 2 parts, the reference on all ranks
    (2 s). Half of what the critic and reward have to do is left when the generation ends: the reference waits for it,
    2 s, though nothing else needs ranks 0 and 1."""
    placed = [
        Placement("actor.generate", "decode", (0, 1), dp=2),
        Placement("actor.train", "train", (0, 1), dp=2),
        Placement("ref.logprobs", "score", (0, 1, 2, 3), dp=4),
        *(Placement(call, "score", (2, 3), dp=2) for call in ("critic.values", "reward.score")),
        Placement("critic.train", "train", (2, 3), dp=2),
    ]
    found = starts(predicted(Plan("mine", 4, tuple(placed))))
    assert found["reward.score"] == (19.4, 21.4)
    assert found["critic.values"] == (20.4, 22.4)
    assert found["ref.logprobs"] == (22.4, 24.4)
    assert found["actor.train"] == (24.4, 36.4)


def test_scores_keep_ranks_from_which_models_leave() -> None:
    """As above, but the critic's optimizer state leaves while others compute: a call that has begun keeps its ranks, so
    the values begin when the reward has ended, and take what they take."""
    plan = complete(named_plan("split", PPO, MODELS, 4), PPO, MODELS, "plan")
    placed = [replace(p, after="offload") if p.call == "critic.train" else p for p in plan.placements]
    prediction = predicted(replace(plan, placements=tuple(placed)))
    times = {one.call: (one.start_s, one.start_s + one.seconds) for one in prediction.calls}
    assert times["reward.score"] == pytest.approx((19.4, 21.4))
    assert times["critic.values"] == pytest.approx((21.4, 23.4))


def test_ranks_without_samples_score_while_others_generate() -> None:
    """Four instances that have 2.4 s to spare each in the mean: scores of 4 s are begun in them, all but a quarter of
    each (1.5, 0.75 and 0.15 of the last). Gathering would end generation 0.5 s later, and have 3 s to spare. Ranks end
    a sixteenth of a score apart, of a score of 2 s in half of the cases, of one of 1 s in a quarter each: 0.09375 s."""
    away = (Tail(10.4, 9.6), Tail(10.9, 12.0, 0.05))
    plan = complete(named_plan("colocated", PPO, MODELS, 4), PPO, MODELS, "plan")
    graph = replace(GRAPH, fuses=True)
    plain, fused, gathered = (
        predict(plan, one, costs(4, tails=tails))
        for one, tails in ((GRAPH, away), (graph, away[:1]), (graph, (away[0], Tail(9.9, 12.0, 0.05))))
    )
    assert plain.seconds_per_step == pytest.approx(23.4)
    assert fused.seconds_per_step == pytest.approx(23.4 - 2.4 + 0.09375)
    assert gathered.seconds_per_step == pytest.approx(23.4 - 0.5 - 3.0 + 0.09375)
    assert predict(plan, graph, costs(4, tails=away)).seconds_per_step == fused.seconds_per_step


def test_what_never_changes_scores_a_batch_when_it_is_drawn() -> None:
    """A reference, and a reward model; not the critic, which trains."""
    graph = StepGraph.of(PPO, MODELS, ["reward"], frozen=["ref", "reward"])
    assert {graph.calls[number].call for number in graph.early} == {"ref.logprobs", "reward.score"}


def test_of_a_batch_that_is_drawn_ahead_only_what_scores_it_then_is_hidden() -> None:
    """As above, but the step draws the next batch, which the reference scores at once: it is begun in 1.5 s of the
    2.4 s, ranks end a sixteenth of its 2 s apart, and the critic and the reward take what they take in any case."""
    plan = complete(named_plan("colocated", PPO, MODELS, 4), PPO, MODELS, "plan")
    away = costs(4, tails=(Tail(10.4, 9.6),))
    graph = replace(GRAPH, ahead=True, early=frozenset({2}))
    plain, fused, nothing = (
        predict(plan, one, away)
        for one in (graph, replace(graph, fuses=True), replace(graph, fuses=True, early=frozenset()))
    )
    assert (plain.seconds_per_step, nothing.seconds_per_step) == (pytest.approx(23.4), pytest.approx(23.4))
    assert fused.seconds_per_step == pytest.approx(23.4 - 1.5 + 0.125)


def test_what_is_hidden_behind_generation_gains_nothing_where_training_is_the_longer_side() -> None:
    """Generation and the reference on two ranks take 20.4 and 4 s, of which 3 are hidden; all else on the others 20 s,
    or 26. Moves of weights are on top."""
    placed = [Placement("actor.generate", "decode", (2, 3), dp=2), Placement("ref.logprobs", "score", (2, 3), dp=2)]
    others = {"actor.train": "train", "critic.train": "train", "critic.values": "score", "reward.score": "score"}
    placed += [Placement(call, mode, (0, 1), dp=2) for call, mode in others.items()]
    whole = complete(Plan("apart", 4, tuple(placed)), PPO, MODELS, "plan")
    graph = replace(GRAPH, ahead=True, early=frozenset({2}))
    for train, plain_s, fused_s in ((20.0, 24.4, 24.4 - 3.0 + 0.25), (32.0, 26.0, 26.0)):
        away = costs(4, tails=(Tail(20.4, 9.6),), work=WORK | {"actor.train": train})
        plain, fused = (predict(whole, replace(graph, fuses=fuses), away) for fuses in (False, True))
        assert plain.seconds_per_step == pytest.approx(plain_s, abs=0.2)
        assert fused.seconds_per_step == pytest.approx(fused_s, abs=0.2)


def test_what_scores_with_copies_is_not_begun_while_others_generate() -> None:
    """The critic trains in pairs of ranks, so that its values are computed with weights that are brought first: of
    2.4 s to spare the reference takes 1.5 s and the reward 0.75; ranks end a sixteenth of a score apart, of that of 2 s
    in two of three cases, of that of 1 s in one."""
    plan = complete(named_plan("colocated", PPO, MODELS, 4), PPO, MODELS, "plan")
    in_pairs = [replace(p, dp=2, tp=2) if (p.call, p.mode) == ("critic.train", "train") else p for p in plan.placements]
    plan = replace(plan, placements=tuple(in_pairs))
    plain, fused = (
        predict(plan, replace(GRAPH, fuses=fuses), costs(4, tails=(Tail(10.4, 9.6),))) for fuses in (False, True)
    )
    assert any(one.kind == "MOVE" and one.call == "critic.weights" for one in plain.calls)
    hidden_s = 1.5 + 0.75 - (2 * 2 / 3 + 1 / 3) / 16
    assert fused.seconds_per_step == pytest.approx(plain.seconds_per_step - hidden_s)


def test_instances_of_different_size_end_with_the_last_of_them() -> None:
    """Of all samples two instances of one rank take 10.4 s for theirs, one of two ranks 12.4: that is what generation
    takes. They have 6 s to spare together, 2 s for each of three in the mean. Their last samples are not gathered."""
    plan = complete(named_plan("colocated", PPO, MODELS, 4), PPO, MODELS, "plan")
    mixed = [p for p in plan.placements if p.mode != "decode"]
    mixed += [Placement("actor.generate", "decode", (0, 1), dp=2), Placement("actor.generate", "decode", (2, 3), tp=2)]
    plan = complete(replace(plan, placements=tuple(mixed)), PPO, MODELS, "plan")
    away = costs(4, tails=(Tail(12.4, 6.0), Tail(11.0, 9.0)))
    plain, fused = (predict(plan, replace(GRAPH, fuses=fuses), away) for fuses in (False, True))
    assert next(one for one in plain.calls if one.call == "actor.generate").seconds == pytest.approx(12.4)
    apart_s = (2 * 2 / 4 + 2 * 1 / 4) / 16
    assert fused.seconds_per_step == pytest.approx(plain.seconds_per_step - 2.0 + apart_s)


def test_a_step_draws_the_next_batch_beside_training_where_weights_are_of_its_own() -> None:
    """Actor and reference on two ranks, and generation on two others: 20.4 s of generation beside 4 s of the reference,
    12 of training, 4 of the critic's and the reward's scores and 6 of its training; on ranks that train it is one after
    the other. Without the next batch half of all scores are computed beside generation, in the first of two parts."""

    def step_s(generates: tuple[int, ...], ahead: bool) -> float:
        plan = Plan(
            "apart",
            1 + generates[-1],
            (
                Placement("actor.generate", "decode", generates, dp=len(generates)),
                *(
                    Placement(f"{call}", mode, (0, 1), dp=2)
                    for call, mode in (
                        ("actor.train", "train"),
                        ("ref.logprobs", "score"),
                        ("critic.train", "train"),
                        ("critic.values", "score"),
                        ("reward.score", "score"),
                    )
                ),
            ),
        )
        whole = complete(plan, PPO, MODELS, "plan")
        return predict(whole, replace(GRAPH, ahead=ahead), costs(plan.num_ranks)).seconds_per_step

    trained = 2 + 4 + 2 + 12 + 6
    half_scored = (2 + 4 + 2) / 2
    assert step_s((2, 3), False) == pytest.approx(20.4 + half_scored + 12 + 6, abs=0.2)
    assert step_s((2, 3), True) == pytest.approx(max(20.4, trained) + 0.1, abs=0.2)
    assert step_s((0, 1), True) == pytest.approx(20.4 + trained, abs=0.2)


def test_new_weights_are_moved_to_instances_of_another_layout() -> None:
    """Training is cut in two stages, generation is whole on each: a move of 0.1 s a step, of the ranks of both."""
    plan = Plan(
        "two",
        2,
        (
            Placement("actor.train", "train", (0, 1), pp=2, stages=(1, 1)),
            Placement("actor.generate", "decode", (0, 1), dp=2),
        ),
    )
    prediction = predicted(plan)
    moves = [one for one in prediction.calls if one.kind == "MOVE"]
    assert [(one.call, one.start_s, one.seconds) for one in moves] == [
        ("actor.weights", pytest.approx(0.0), pytest.approx(0.1))
    ]
    assert starts(prediction)["actor.generate"] == (0.1, 20.5)


def test_a_reference_that_follows_is_moved_once_in_so_many_steps() -> None:
    """0.1 s from the masters, of which each of two ranks that train has a half, and as much to the copy with which the
    reference generates in two stages; both in every fourth step, so 0.05 s of the mean one, in any number of them."""

    def flow(prompts, actor, ref):
        ref.generate(prompts)
        samples = actor.generate(prompts)
        actor.train(samples, loss=never, kept=ref.logprobs(samples))

    traced = trace(flow, roles=("actor", "ref"))
    models = {role: PlannedModel(scalar=False, layers=2) for role in ("actor", "ref")}
    work = {"actor.generate": 40.0, "ref.generate": 40.0, "ref.logprobs": 8.0, "actor.train": 24.0}
    plan = Plan(
        "mine",
        2,
        (
            Placement("actor.train", "train", (0, 1), dp=2),
            Placement("ref.logprobs", "score", (0, 1), dp=2),
            Placement("ref.generate", "decode", (0, 1), pp=2, stages=(1, 1)),
        ),
    )
    whole = complete(plan, traced, models, "plan")
    frozen = StepGraph.of(traced, models)
    follows = replace(frozen, follows={"ref": "actor"}, follow_steps=4)
    stand_in = StandIn(work, WEIGHTS, devices=2, memory=1000)
    for steps in (1, 3):
        still, moved = (predict(whole, graph, stand_in, steps=steps) for graph in (frozen, follows))
        assert moved.seconds_per_step - still.seconds_per_step == pytest.approx(0.05)
        assert [(one.call, one.bytes) for one in moved.calls if one.kind == "MOVE"] == [("ref.follow", 5)]
    same = predict(whole, replace(follows, follows={"ref": "judge"}), stand_in)
    assert same.seconds_per_step == still.seconds_per_step, "nobody trains whom it follows"


def test_what_is_offloaded_comes_back_before_its_call_and_leaves_before_another() -> None:
    """The reference's 10 bytes: 0.2 s to come back; its copy in host memory stays, so leaving takes no time. Of the
    actor's training all takes 0.2 s for weights and 0.8 s for state, each way, and weights are there to generate."""
    kept = predicted(named_plan("colocated", PPO, MODELS, 1))
    plan = Plan(
        "away",
        1,
        (
            Placement("ref.logprobs", "score", (0,), after="offload"),
            Placement("actor.train", "train", (0,), after="offload"),
            Placement("actor.generate", "decode", (0,), after="keep"),
        ),
    )
    away = predicted(plan)
    loads = [(one.call, one.kind, round(one.seconds, 3)) for one in away.calls if one.kind in ("ONLOAD", "OFFLOAD")]
    assert loads == [("ref.weights", "ONLOAD", 0.2), ("actor.state", "ONLOAD", 0.8), ("actor.state", "OFFLOAD", 0.8)]
    assert away.seconds_per_step == pytest.approx(kept.seconds_per_step + 1.8)
    assert away.memory[0].peak_bytes < kept.memory[0].peak_bytes


def test_memory_by_hand() -> None:
    """One device: weights of four models, state (2 + 6) x 10 of two of them, and 5 of the largest call."""
    (memory,) = predicted(named_plan("colocated", PPO, MODELS, 1)).memory
    assert memory.peak_bytes == 4 * 10 + 2 * 80 + 5
    assert sum(memory.terms.values()) == memory.peak_bytes
    assert memory.terms["actor: optimizer state"] == 80
    beside = {"process_bytes": 30, "slack_bytes": 7}
    (other,) = predicted(named_plan("colocated", PPO, MODELS, 1), **beside).memory
    assert other.peak_bytes == sum(other.terms.values()) == memory.peak_bytes + 30 + 7
    assert (other.terms[PROCESS], other.terms["slack"]) == (30, 7)
    (cpu,) = predicted(named_plan("colocated", PPO, MODELS, 1), keeps_freed=True).memory
    assert (cpu.peak_bytes, cpu.terms[KEPT]) == (memory.peak_bytes + 5, 5), "5 to generate beside what training left"
    assert sum(cpu.terms.values()) == cpu.peak_bytes
    tight = predicted(named_plan("colocated", PPO, MODELS, 1), memory=204)
    assert not tight.feasible
    assert tight.timeline.peak_memory(0) == 205


def test_a_generation_is_asked_for_beside_all_that_its_devices_hold() -> None:
    """Four models of 10 bytes and two states of 80 where all are on one device: 2 s more for 200 bytes, whose tenth its
    pool takes here. On two devices, speaking and judging apart, 10 + 10 + 80 of them."""
    alone = named_plan("colocated", PPO, MODELS, 1)
    plain, beside = predicted(alone), predicted(alone, crowded_s=0.01)
    assert beside.seconds_per_step == pytest.approx(plain.seconds_per_step + 2.0)
    assert beside.memory[0].terms["actor decode"] == 20
    assert beside.memory[0].peak_bytes == 200 + 20
    assert sum(beside.memory[0].terms.values()) == beside.memory[0].peak_bytes
    apart = predicted(named_plan("split", PPO, MODELS, 2), crowded_s=0.01)
    (generated,) = [call for call in apart.calls if call.kind == "DECODE"]
    assert generated.seconds == pytest.approx(40.4 + 1.0)


def test_a_part_lies_in_the_whole_that_stays_beside_it() -> None:
    """Two ranks train halves of the actor (5 bytes each) and generate with all of it (10): the halves take nothing."""
    halves = (
        Placement("actor.train", "train", (0, 1), pp=2, stages=(1, 1)),
        Placement("actor.generate", "decode", (0, 1), dp=2),
    )
    plan = complete(Plan("halves", 2, halves), PPO, MODELS, "plan")
    apart, within = (predict(plan, replace(GRAPH, nested=nested), costs(2)) for nested in (False, True))
    for rank in (0, 1):
        one, other = apart.memory[rank], within.memory[rank]
        assert other.peak_bytes == one.peak_bytes - 5
        assert sum(other.terms.values()) == pytest.approx(other.peak_bytes, abs=2)


@pytest.mark.parametrize(("functions_s", "ends_s"), [(4.0, 10.9), (400.0, 401.3)])
def test_functions_score_groups_as_they_end_and_keep_no_rank_busy(functions_s: float, ends_s: float) -> None:
    """Generation ends at 10.4 s, a group of 8 every 1.3 s. Functions of 4 s end with the last group's half second;
    of 400 s they go on from the first group on, and training waits for them."""
    models = {role: one for role, one in MODELS.items() if role != "reward"}
    graph = StepGraph.of(PPO, models, functions=["reward"], rollouts=GRAPH.rollouts)
    stand_in = costs(4, work={**WORK, "reward.score": functions_s})
    plan = complete(named_plan("colocated", PPO, models, 4), PPO, models, "plan")
    prediction = predict(plan, graph, stand_in)
    found = starts(prediction)
    assert found["reward.score"][1] == pytest.approx(ends_s)
    assert found["ref.logprobs"] == (10.4, 12.4)
    assert found["actor.train"][0] == pytest.approx(max(13.4, ends_s))
    without = predict(plan, StepGraph.of(PPO, models, rollouts=GRAPH.rollouts), stand_in)
    assert without.seconds_per_step <= prediction.seconds_per_step


def test_roles_that_train_together_fill_each_others_gaps() -> None:
    """Two stages: 12 + 3 s of the actor, 6 + 1.5 s of the critic, of which a fifth is filling and draining. One after
    the other 22.5 s, together the 18 s of work."""

    def once(prompts, actor, critic):
        samples = actor.generate(prompts)
        values = critic.values(samples)
        actor.train(samples, loss=lambda batch, values: batch, values=values)
        critic.train(samples, loss=lambda batch, values: batch, values=values)

    flow = trace(once, roles=("actor", "critic"))

    class Idle(StandIn):
        def call(self, call, mode, layout, **options):
            found = super().call(call, mode, layout, **options)
            return replace(found, terms={FILLING if name == "bubble" else name: s for name, s in found.terms.items()})

    def steps(schedule: str) -> Prediction:
        trained = [
            Placement("actor.train", "train", (0, 1), pp=2, stages=(1, 1), schedule=schedule),
            Placement("critic.train", "train", (1, 0), pp=2, stages=(1, 1), schedule=schedule),
        ]
        plan = complete(Plan("two stages", 2, tuple(trained)), flow, MODELS, "plan")
        return predict(plan, StepGraph.of(flow, MODELS), Idle(WORK, WEIGHTS, devices=2, memory=1000))

    one_by_one, together = (
        {one.call: (one.start_s, one.start_s + one.seconds) for one in steps(schedule).calls}
        for schedule in ("", FUSED)
    )
    assert one_by_one["critic.train"][1] - one_by_one["actor.train"][0] == pytest.approx(22.5)
    assert together["actor.train"] == together["critic.train"]
    assert together["actor.train"][1] - together["actor.train"][0] == pytest.approx(18.0)
    alone, both = (max(one.peak_bytes for one in steps(schedule).memory) for schedule in ("", FUSED))
    assert both > alone  # activations of both are there at the same time


def test_calls_whose_gradients_meet_are_one_training() -> None:
    """Two stages: 12 + 3 s, 6 + 1.5 s of which a fifth is filling and draining: that is done once, so 24 - 1.5 s. With
    a critic of 6 + 1.5 s beside it nobody waits: the work of all is 18 + 6 s."""

    def summed(prompts, actor, critic):
        samples = actor.generate(prompts)
        actor.train(samples, loss=lambda batch: batch, with_next=True)
        actor.train(samples, loss=lambda batch: batch)
        critic.train(samples, loss=lambda batch: batch)

    flow = trace(summed, roles=("actor", "critic"))
    graph = StepGraph.of(flow, MODELS)
    assert graph.updates == (((0,),), ((1, 2),), ((3,),))

    class Idle(StandIn):
        def call(self, call, mode, layout, **options):
            found = super().call(call, mode, layout, **options)
            return replace(found, terms={FILLING if name == "bubble" else name: s for name, s in found.terms.items()})

    def trained(schedule: str) -> dict[str, tuple[float, float]]:
        placements = [
            Placement("actor.train", "train", (0, 1), pp=2, stages=(1, 1), schedule=schedule),
            Placement("critic.train", "train", (1, 0), pp=2, stages=(1, 1), schedule=schedule),
        ]
        plan = complete(Plan("two stages", 2, tuple(placements)), flow, MODELS, "plan")
        work = {**WORK, "actor.train#2": 12.0}
        found = predict(plan, graph, Idle(work, WEIGHTS, devices=2, memory=1000)).calls
        return {one.call: (one.start_s, one.start_s + one.seconds) for one in found}

    alone, beside = trained(""), trained(FUSED)
    begins, ends = alone["actor.train"][0], alone["actor.train#2"][1]
    assert ends - begins == pytest.approx(15 + 7.5 - 1.5)
    assert alone["actor.train"][1] == alone["actor.train#2"][0] == pytest.approx(begins + 21 * 15 / 22.5)
    assert alone["critic.train"] == pytest.approx((ends, ends + 7.5))
    assert beside["critic.train"] == pytest.approx((beside["actor.train"][0], beside["actor.train#2"][1]))
    assert beside["critic.train"][1] - beside["critic.train"][0] == pytest.approx(12 + 6 + 6)


def test_more_ranks_than_devices_are_refused() -> None:
    plan = complete(named_plan("colocated", PPO, MODELS, 8), PPO, MODELS, "plan")
    with pytest.raises(ConfigError, match="num_ranks"):
        predict(plan, GRAPH, costs(4))


def test_steps_repeat_themselves_from_the_first_on() -> None:
    plan = complete(named_plan("split", PPO, MODELS, 4), PPO, MODELS, "plan")
    one, five = predict(plan, GRAPH, costs(), steps=1), predict(plan, GRAPH, costs(), steps=5)
    assert one.seconds_per_step == pytest.approx(five.seconds_per_step)
    assert five.timeline.makespan_s == pytest.approx(5 * one.seconds_per_step)


@st.composite
def tasks(draw):
    """Up to six calls: (needs, first rank, number of ranks, seconds), on four ranks."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        needs = draw(st.sets(st.integers(0, number - 1))) if number else set()
        first = draw(st.integers(0, 3))
        size = draw(st.integers(1, 4 - first))
        found.append((needs, first, size, draw(st.integers(1, 9))))
    return found


def play(found, devices: int = 4) -> tuple[Played, StepGraph]:
    calls = tuple(StepCall(f"r{n}.score", n, frozenset(needs)) for n, (needs, *_) in enumerate(found))
    graph = StepGraph(calls, tuple(Slot(f"r{n}", "score") for n in range(len(found))), frozenset())
    work = {f"r{n}.score": float(seconds * size) for n, (_, _, size, seconds) in enumerate(found)}
    stand_in = StandIn(work, {f"r{n}": 1 for n in range(len(found))}, devices=devices)
    places = Places(graph, stand_in, devices)
    chosen = [
        places.place(n, [Placement(f"r{n}.score", "score", tuple(range(first, first + size)), dp=size)])
        for n, (_, first, size, _) in enumerate(found)
    ]
    return StepSimulator(graph, stand_in).play(chosen), graph


def listed(found) -> dict[int, tuple[int, int]]:
    """Start and end of each task: in order, what can begin does; then the next end comes, of several at the same moment
    that of the task which began first."""
    spans: dict[int, tuple[int, int]] = {}
    running: list[int] = []
    ended: set[int] = set()
    now = 0
    while len(ended) < len(found):
        for number, (needs, first, size, seconds) in enumerate(found):
            busy = {r for o in running for r in range(found[o][1], found[o][1] + found[o][2])}
            if number not in spans and needs <= ended and not busy & set(range(first, first + size)):
                spans[number] = (now, now + seconds)
                running.append(number)
        nearest = min(running, key=lambda one: spans[one][1])
        running.remove(nearest)
        ended.add(nearest)
        now = spans[nearest][1]
    return spans


@settings(deadline=None, max_examples=examples(150, 300))
@given(tasks())
def test_it_is_what_a_plain_list_scheduler_does(found) -> None:
    played, _ = play(found)
    assert {a.call: (a.start_s, a.end_s) for a in played.actions} == listed(found)


@settings(deadline=None, max_examples=80)
@given(tasks())
def test_no_faster_than_the_longest_path_and_the_busiest_rank_no_slower_than_one_by_one(found) -> None:
    played, _ = play(found)
    longest: list[int] = []
    for needs, _, _, seconds in found:
        longest.append(seconds + max((longest[one] for one in needs), default=0))
    busy = [sum(s for _, first, size, s in found if first <= rank < first + size) for rank in range(4)]
    assert max(*longest, *busy) <= played.step_s + 1e-9
    assert played.step_s <= sum(seconds for *_, seconds in found) + 1e-9
    again, _ = play(found)
    assert again.actions == played.actions
    wider, _ = play(found, devices=8)
    assert wider.ends_s == played.ends_s


def test_no_rank_does_two_things_at_once() -> None:
    for name in ("colocated", "split", "standalone"):
        timeline = predicted(named_plan(name, PPO, MODELS, 8)).timeline
        for rank in timeline.ranks:
            spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: (s.start_s, s.end_s))
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))
