"""The same from Python: `python examples/five_lines.py`."""

from my_flow import best_of_group

import plait

if __name__ == "__main__":
    outcome = plait.train("examples/my_recipe.yaml", algorithm=best_of_group, run_dir="runs/five_lines")
    print(outcome.metrics["reward"])
