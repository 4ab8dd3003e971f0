"""plait: you write the RLHF algorithm as a plain function; plait plans how to run it, and runs what it planned."""

__version__ = "0.1.0"
