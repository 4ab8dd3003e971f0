"""What runs measured, carried to other numbers of ranks. By hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from plait.cost.calibration import calibrated, uncorrected
from plait.cost.corrections import Correction, Corrections, with_carried
from plait.cost.costs import CallCost, Tail
from plait.cost.profile import KindRecord, Ratio, RunRecord
from plait.layout.mesh import Layout
from plait.schedule.plan import Mode, Placement
from tests.cost.test_model_costs import SHAPE
from tests.cost.test_profile import PROFILE, costs


def a_run(factors: Mapping[str, float], *, devices: int = 1, steps: int = 3) -> RunRecord:
    """
    Args:
        factors: kind → times as long as the profile said.
    """
    kinds = {
        kind: KindRecord(profile_s=2.0, predicted_s=2.0, measured_s=2.0 * factor) for kind, factor in factors.items()
    }
    return RunRecord(devices=devices, predicted_s=1.0, measured_s=1.0, kinds=kinds, steps=steps)


def ratio(value: float, steps: int = 3) -> Ratio:
    return Ratio(value, 1, steps)


def test_a_carried_factor_is_nearer_to_one_the_fewer_steps_were_measured() -> None:
    """16 times as long: of one step the square root, of three 16 to the power of 3/4, of ninety-nine of 99/100."""
    for steps, factor in ((1, 4.0), (3, 8.0), (99, 16**0.99)):
        found = Corrections({"train on 1": ratio(16.0, steps)}).of("train", 2)
        assert found is not None
        assert (found.kind, found.steps, found.carried) == ("train on 1", steps, True)
        assert found.factor == pytest.approx(factor)
    faster = Corrections({"train on 1": ratio(1 / 16)}).of("train", 2)
    assert faster is not None
    assert faster.factor == pytest.approx(1 / 8), "as far below as above"


def test_what_was_measured_on_as_many_ranks_comes_first_and_in_full() -> None:
    known = Corrections({"train on 1": ratio(16.0), "train on 2": ratio(1.5), "score on 1": ratio(3.0)})
    assert known.of("train", 2) == Correction(1.5, "train on 2", 3)
    assert known.of("decode", 1) is None, "scoring says nothing of generation"
    assert known.move == 1.0
    assert Corrections({"move": ratio(2.5)}).move == 2.5


@pytest.mark.parametrize(("ranks", "nearest"), [(1, 2), (3, 2), (4, 2), (5, 8), (8, 8), (64, 16)])
def test_the_nearest_number_of_ranks_is_carried(ranks: int, nearest: int) -> None:
    """By how many times as many they are: 4 is twice 2 and half of 8, of which the less counts."""
    known = Corrections({f"train on {count}": ratio(2.0) for count in (16, 8, 2)})
    found = known.of("train", ranks)
    assert found is not None
    assert found.kind == f"train on {nearest}"


def test_what_ranks_do_with_each_other_is_not_carried() -> None:
    """10 s of layers become 20, 6 s between ranks stay: 26 in place of 16, so all else takes 26/16 times as long."""
    terms = {"layers": 10.0, "tensor parallel": 1.0, "gradients": 2.0, "new weights": 1.5, "rows": 1.0, "hops": 0.5}
    cost = CallCost(16.0, terms, 7, (3,), (16.0, 8.0), (Tail(16.0, 8.0, 1.6),), 4.0, 0.8)
    found = Correction(2.0, "train on 1", 3, carried=True).of(cost)
    assert found.seconds == pytest.approx(26.0)
    assert found.terms == {**terms, "layers": 20.0}
    assert found.instance_seconds == pytest.approx((26.0, 13.0))
    assert (found.first_s, found.in_parts_s) == pytest.approx((6.5, 1.3))
    (tail,) = found.tails
    assert (tail.end_s, tail.idle_s, tail.move_s) == pytest.approx((26.0, 13.0, 2.6))
    assert (found.bytes, found.working_bytes) == (7, (3,))
    assert Correction(2.0, "train on 2", 3).of(cost) == cost.times(2.0), "of as many ranks all of it"


@pytest.mark.parametrize(
    ("call", "mode"), [("actor.generate", "decode"), ("ref.logprobs", "score"), ("actor.train", "train")]
)
def test_two_devices_take_as_many_times_as_long_as_one_was_measured_to(call: str, mode: Mode) -> None:
    """Three steps on one device, 16 times as long as the profile said: 8 times on two, but for what these say each
    other."""
    profile = PROFILE.with_run(a_run({f"{mode} on 1": 16.0}))
    both = Layout.on(range(2), dp=2)
    more, less = (costs(known, prompts=2).call(call, mode, both) for known in (profile, uncorrected(profile)))
    between = {"gradients", "new weights", "rows"}
    assert between & less.terms.keys()
    for name, seconds in less.terms.items():
        assert more.terms[name] == pytest.approx(seconds if name in between else 8.0 * seconds)
    assert more.seconds == pytest.approx(sum(more.terms.values()))


def test_runs_on_two_devices_put_an_end_to_it() -> None:
    profile = PROFILE.with_run(a_run({"train on 1": 16.0})).with_run(a_run({"train on 2": 1.25}, devices=2))
    both = Layout.on(range(2), dp=2)
    more, less = (
        costs(known, prompts=2).call("actor.train", "train", both) for known in (profile, uncorrected(profile))
    )
    assert more.seconds == pytest.approx(1.25 * less.seconds)


def test_what_is_carried_is_said() -> None:
    """Scoring was measured on two, generation nowhere."""
    known = Corrections({"train on 1": ratio(16.0), "score on 2": ratio(2.0), "score on 1": ratio(3.0)})
    placements = [
        Placement("actor.train", "train", (0, 1), dp=2),
        Placement("ref.logprobs", "score", (0, 1), dp=2),
        Placement("actor.generate", "decode", (0, 1), dp=2),
    ]
    carried = known.carried(placements, ("actor", "ref"))
    assert set(carried) == {"train on 2"}
    said = "train on 2 8.00 times as long, carried from train on 1 (3 steps)"
    assert with_carried("a profile", carried) == f"a profile; {said}"
    assert with_carried("a profile", known.carried(placements, ("ref",))) == "a profile"
    source = calibrated([PROFILE.with_run(a_run({"train on 1": 16.0}))], SHAPE, "bfloat16", 1, 2).source
    assert source.endswith("corrected by 1 run on other numbers of devices than 2")
    assert calibrated([PROFILE.with_run(a_run({}, devices=2))], SHAPE, "bfloat16", 1, 2).source.endswith(
        "corrected by 1 run"
    )


def test_steps_of_all_runs_that_had_a_kind_are_counted() -> None:
    profile = PROFILE.with_run(a_run({"train on 1": 1.0}, steps=3)).with_run(a_run({"train on 1": 3.0}, steps=5))
    found = profile.with_run(a_run({"score on 1": 9.0}, steps=7)).ratios(1)["train on 1"]
    assert (found.value, found.runs, found.steps) == (2.0, 2, 8)


def test_what_reads_memory_takes_longer_where_both_cores_do() -> None:
    """Optimizer steps and packing, as products: 1.5 times as long of two processes as of one."""
    measured = PROFILE.model_copy(update={"optimizer_s": 1e-6})
    busy = measured.model_copy(update={"contention": 1.5})
    one, two = Layout.on(range(1)), Layout.on(range(2), dp=2)
    for call, mode, term in (("actor.train", "train", "optimizer"), ("actor.generate", "decode", "packing")):
        alone, plain, slow = (
            costs(profile, prompts=2).call(call, mode, layout).terms[term]  # type: ignore[arg-type]
            for profile, layout in ((busy, one), (measured, two), (busy, two))
        )
        assert slow == pytest.approx(1.5 * plain)
        assert alone == pytest.approx({"optimizer": 2.0, "packing": 1.0}[term] * plain), "each packs all of it"


def test_what_is_carried_of_prompts_that_are_computed_apart_is_said() -> None:
    """They are a part of the generation, which was measured on one rank."""
    placements = [
        Placement("actor.generate", "prefill", (0, 1), tp=2),
        Placement("actor.generate", "decode", (2,)),
    ]
    carried = Corrections({"decode on 1": ratio(16.0)}).carried(placements, ("actor",))
    assert {kind: own.kind for kind, own in carried.items()} == {"decode on 2": "decode on 1"}
