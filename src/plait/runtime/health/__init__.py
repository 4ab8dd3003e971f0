"""The doctor at work in a run: facts of a step, probes, and what it says."""
