"""Random numbers of new parameters: a function of a key, apart from every global random state."""

from __future__ import annotations

from hashlib import blake2b

import torch


def generator(*key: int | str) -> torch.Generator:
    """A generator on the CPU that depends on the key alone."""
    digest = blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
