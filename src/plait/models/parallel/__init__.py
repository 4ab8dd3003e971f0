"""A model over several ranks: teams and their collectives, stages, tensor parallelism, the part that a rank has."""
