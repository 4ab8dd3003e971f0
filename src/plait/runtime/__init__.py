"""The controller and what surrounds it: recipe, run directory, executor of the traced graph, evaluation.

Enters: a recipe. Leaves: a run directory with metrics, samples, trace, checkpoints and the final model. Imports every
floor below; never the planner. `recipe`, `directory`, `algorithm`, `estimate` and `recorder` import no torch.
"""
