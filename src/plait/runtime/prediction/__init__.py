"""What a run will take: plans found and predicted, what a machine takes, and afterwards how wrong that was."""
