"""Algorithms, one file each: the flow, the advantage and the loss as pure functions, and their options.

Importable without torch: advantages are NumPy, losses use the methods of the tensors that they are given.
"""
