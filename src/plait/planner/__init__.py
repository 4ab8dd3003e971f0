"""Searches for schedules: given pipelines on ranks, in which order each rank does its actions.

`tables` are a workload as arrays, `evaluate` judges an order of it, `bounds` what none can beat; `greedy`, `sweep`,
`search` and `exact` find one; `engines` and `kernels` are their compiled inner loops.
"""
