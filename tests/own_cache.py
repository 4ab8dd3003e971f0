"""The cache of tests: models and data are the user's, profiles are those that a test keeps itself, and gone behind it.

Runs are planned by what is kept of this machine, and what they measured is added to it: of the user's profiles tests
would plan otherwise on every machine, and the user's own runs by what was measured of tiny models. A test that gives a
process an environment of its own passes PLAIT_CACHE on: whose profile was written among the user's is not told
afterwards, as the user may run plait beside the tests.

Kernels that tests compile are kept there for the tests of all checkouts: two minutes of a core, in a fresh one. They
are found by the text that they are made of, and gone after a fortnight.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from plait.data.package_file import cache_folder

SHARED = ("models", "data")
KERNELS = "kernels-of-tests"
KEPT_S = 14 * 24 * 3600.0


class OwnCache:
    """That of this process and of those it starts, from now on.

    Attributes:
        users: the cache in place of which it stands.
    """

    def __init__(self) -> None:
        # A worker of xdist has the environment of the process that has started it.
        self.users = Path(os.environ.setdefault("PLAIT_CACHE_OF_USER", str(cache_folder())))
        self.folder = Path(tempfile.mkdtemp(prefix="plait-cache-of-tests-"))
        for name in SHARED:
            (self.users / name).mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to((self.users / name).resolve())
        os.environ["PLAIT_CACHE"] = str(self.folder)
        forget_old(self.users / KERNELS)
        os.environ.setdefault("NUMBA_CACHE_DIR", str(self.users / KERNELS))  # read when numba is imported

    def forget_profiles(self) -> None:
        """Behind a test."""
        shutil.rmtree(self.folder / "profiles", ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def forget_old(kernels: Path) -> None:
    """Folders that were written last too long ago; other processes may do the same at the same time."""
    for folder in kernels.glob("*"):
        try:
            if folder.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
