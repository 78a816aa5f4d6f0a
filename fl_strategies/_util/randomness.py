"""Independent, named streams of experiment randomness.

Every draw of an experiment comes from a generator named by the seed and a path such as
``("party", 3, "teacher", 0)``. The order in which replies arrive, or the number of worker
processes, therefore cannot change a result. Noise that protects privacy never comes from
here: a known seed would undo it.
"""

import hashlib

import numpy as np


def derive_rng(seed: int, *path: str | int) -> np.random.Generator:
    """Return the generator of one named stream.

    Examples
    --------
    >>> a = derive_rng(7, "party", 3).integers(100, size=3)
    >>> b = derive_rng(7, "party", 3).integers(100, size=3)
    >>> bool((a == b).all())
    True
    """
    name = "/".join(f"{type(part).__name__}:{part}" for part in path)
    digest = hashlib.sha256(name.encode()).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=words))
