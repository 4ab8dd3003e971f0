"""The two sides of `ppo_step.py`, the work that both do, and what they say about it."""
