"""Pure decisions: how a batch is drawn, packed and split. Numbers in, decisions out; the runtime and the simulator
call the same functions. Imports no torch, reads no clock and no memory.
"""
