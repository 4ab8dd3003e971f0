"""The vocabulary of execution: what is done, in which order, and what happened.

* `action`: the smallest thing scheduled, with a text form that parses back (`actor:2F0`).
* `schedule`: ordered actions of each rank, their file form; `validate` says why one cannot run.
* `timeline`: actions with start, end and bytes, predicted or measured; `compare` holds two against each other, `gantt`
  draws one.
* `plan`: what a run is told to do: placements, schedules, policies and the predicted timeline under one name.
* `pipeline`: models cut into stages on ranks, one or two at a time; `bounds` of any schedule of them.
* `generators` (GPipe, 1F1B), `greedy`, `search`, `exact`: pipeline schedules, fused ones among them.
* `tables`, `kernels`, `engines`, `evaluate`: the search's inner loops and how it judges.

Enters: numbers. Leaves: records. Imports `observe` and `errors` only; no torch.
"""
