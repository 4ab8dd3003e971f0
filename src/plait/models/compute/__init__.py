"""Pieces of a forward and its backward over packed rows: attention, norms, rotations, products, log-probs."""
