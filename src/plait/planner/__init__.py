"""Searches for schedules (given pipelines on ranks, in which order each rank does its actions) and for plans (which
ranks do what).

`tables` are a workload as arrays, `evaluate` says what an order of it takes, `bounds` what none can beat; `greedy`,
`sweep`, `search` (a `portfolio`) and `exact` find one; `annealing`, `evolution` and `kernels` are their compiled inner
loops.

`plan_problem` is what a plan is searched for, `plan_space` has the plans that may be proposed, of the ways to compute a
call that `slot_forms` has; `plan_objective` values one by simulated steps, `step_bound` says what one takes at least,
`plan_baselines` makes those of others (`hybridflow`), `plan_moves` such as are near one, of the places that single
slots can have (`slot_places`), and `plan_search` finds the best, and the best of each kind (`plan_leaders`);
`stage_layers` cuts layers, `slot_divisions` divides the devices of a generation in two. `collecting` says how often
Python looks for garbage.
"""
