"""Random examples have no time limit: how long one takes says how busy the machine is. One thread, for tiny tensors."""

from __future__ import annotations

import os

# Before torch is imported: two threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# `make test` tries the same examples each time; `make test-all` tries new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
