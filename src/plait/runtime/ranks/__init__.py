"""A run on several ranks: who leads and who serves, what they tell each other, which part of what each of them holds.

`supervisor` starts the ranks, `worker` is one of them, `crew` the leader's view of all, `serving` that of the others.
"""
