"""The doctor at work in a run: facts of a step, probes, and what it says.

`doctor` looks at an `inspected_run`: `step_facts` and `weight_facts` are what it reads, `compared` is how groups
differ, `probe` finds why engine and trainer disagree.
"""
