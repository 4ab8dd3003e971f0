"""Whether kernels of GPUs can be compiled here."""

from __future__ import annotations

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None
"""Triton comes with torch for CUDA on Linux."""
