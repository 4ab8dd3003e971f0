"""The shard algebra, without torch: logical parameters, blocks of them, and flat buffers that hold blocks.

Enters: names, shapes and cut dims of a model's parameters. Leaves: who holds which block at which offset of one flat
buffer. Imports nothing of plait.
"""
