"""What a step's line says beside its stages, in seconds told by hand."""

from __future__ import annotations

from plait.observe.beside_steps import COMPILING, BesideSteps


def test_parts_are_counted_from_take_to_take_and_what_is_compiled_once() -> None:
    now_s, compiled_s = 10.0, 5.0  # compiled while it loaded: of no step
    beside = BesideSteps(lambda: now_s, lambda: compiled_s)
    with beside.part("first evaluation", once=True):
        now_s, compiled_s = now_s + 124, compiled_s + 115
    now_s, compiled_s = now_s + 3, compiled_s + 2  # in a stage of the step
    with beside.part("saving"):
        now_s += 1
    # 124 s before the first step, of which 115 compiled; 2 more in the step: 126 of 128 come once
    assert beside.take() == ({"first evaluation": 124.0, "saving": 1.0, COMPILING: 117.0}, 126.0)
    for _ in range(2):
        with beside.part("evaluation"):
            now_s += 2
    assert beside.take() == ({"evaluation": 4.0, COMPILING: 0.0}, 0.0)
