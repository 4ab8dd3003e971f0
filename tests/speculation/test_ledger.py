"""What an engine's steps took, and what of it counts."""

from __future__ import annotations

import pytest

from plait.speculation.ledger import COLD, Counted, Ledger, Spent


def warm() -> Ledger:
    """Steps of 8 rows take 16 ms, of 10 rows 20."""
    ledger = Ledger()
    for _ in range(16):
        ledger.done(Counted(8, 0, 1000, 8, 0.016, 0.016), Spent(), is_paid=False)
        ledger.done(Counted(8, 2, 1000, 10, 0.020, 0.020), Spent(), is_paid=False)
    return ledger


@pytest.mark.parametrize("looks", [True, False])
def test_the_step_behind_prompts_is_no_measure(*, looks: bool) -> None:
    """It finds caches cold and takes 3 ms longer. Measures of more rows were made in it, the first step of a rollout,
    and more rows seemed to take half as long again as they do."""
    ledger = warm()
    for number in range(40):
        if number % 2 == 0 and looks:
            ledger.mixed(8, 0, 800, 0.080, Spent())
            ledger.done(Counted(8, 2, 1000, 10, 0.024, 0.024), Spent(), is_paid=False)
        elif number % 2 == 0:
            ledger.quiet(0, 0, 0.080)
            ledger.quiet(8, 1000, 0.019)
            ledger.account()
        else:
            ledger.done(Counted(8, 0, 1000, 8, 0.016, 0.016), Spent(), is_paid=False)
    assert ledger.cost.of(8, 1000) == pytest.approx(0.016, rel=1e-3)
    assert ledger.cost.of(10, 1000) == pytest.approx(0.020, rel=1e-3)
    assert not ledger.is_cold


def test_where_every_other_step_has_prompts_the_others_are_measures() -> None:
    """New samples begin as old ones end: no step would ever be one, and nothing was drafted."""
    ledger = Ledger()
    for _ in range(COLD + 3):
        ledger.mixed(8, 0, 800, 0.080, Spent())
        assert ledger.is_cold == (ledger.cost.num_steps == 0 and ledger.counts.steps < COLD)
        ledger.done(Counted(8, 0, 1000, 8, 0.019, 0.019), Spent(), is_paid=False)
    assert ledger.cost.num_steps == 3


def test_what_is_cold_is_no_loss_of_drafts() -> None:
    """Two of two are accepted: ten tokens of 2 ms each in what would be 20 ms, and took 24."""
    ledger, saved_s = warm(), warm().counts.saved_s
    ledger.mixed(8, 0, 800, 0.080, Spent())
    ledger.done(Counted(8, 2, 1000, 10, 0.024, 0.024), Spent(), is_paid=False)
    taken_s, lost_s = ledger.margin.steps_W2[-1]
    assert taken_s == 0.024
    assert lost_s == pytest.approx(0.0, abs=1e-4)
    assert ledger.counts.saved_s == pytest.approx(saved_s, abs=1e-4)
    assert ledger.seconds == pytest.approx(16 * 0.036 + 0.024)
