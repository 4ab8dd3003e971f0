"""What a model says to prompts, and nothing learns from it: evaluations, `plait generate`, an engine's gate."""
