"""What all ranks of a run know of each other."""

from __future__ import annotations

LEADER = 0
"""The rank that gives the commands."""
WAIT_S = 7 * 24 * 3600.0
"""Seconds of each wait for peers: a rank may have nothing to do for as long as others work. The supervisor finds who
dies, freezes or stalls.
"""
