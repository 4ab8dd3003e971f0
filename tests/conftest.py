"""Random examples have no time limit: how long one takes says how busy the machine is. One thread, for tiny tensors."""

from __future__ import annotations

import os

# Before torch is imported: two threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
