"""Checkpoints on disk: found, fetched, checked, read and written."""
