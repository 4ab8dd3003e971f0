"""Rewards: functions in TRL's, verl's or OpenRLHF's signature in killable worker processes, scorers of tasks, figures
of an evaluation.

Enters: samples. Leaves: one number per sample and function, and their weighted sum. Imports no torch; may import
`data` and `errors`.
"""
