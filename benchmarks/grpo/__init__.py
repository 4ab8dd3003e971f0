"""The two sides of `grpo_step.py`, the work that both do, and how it is measured."""
