"""The vocabulary of execution: what is done, in which order, and what happened.

* `action`: the smallest thing scheduled, with a text form that parses back (`actor:2F0`).
* `schedule`: ordered actions of each rank, their file form; `validate` says why one cannot run.
* `pipeline`: models cut into stages on ranks, and the generators GPipe, 1F1B and their combinations for two models.
* `greedy`, `search`, `exact`: fused schedules of two models in opposite directions.
* `timeline`: actions with start, end and bytes, predicted or measured.
* `plan`: what a run is told to do: schedules and predicted timelines under one name.

Enters: numbers. Leaves: records. Imports `observe` and `errors` only; no torch.
"""
