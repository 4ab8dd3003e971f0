"""The controller and what surrounds it: recipe, run directory, executor of the traced graph, evaluation.

Enters: a recipe. Leaves: a run directory with metrics, samples, trace, checkpoints and the final model. Imports every
floor below; never the planner. `recipes`: what a user says. `forecast`: what it will take. `ranks`: a run on several
devices. `recipes.recipe`, `directory`, `recipes.algorithm`, `forecast.estimate` and `recorder` import no torch.
"""
