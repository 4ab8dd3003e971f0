"""What a run will take: plans found and foretold, what a machine takes, and afterwards how wrong that was."""
