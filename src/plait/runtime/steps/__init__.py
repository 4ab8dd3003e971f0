"""A training step: the calls of a flow, what each does, and the roles that do it."""
