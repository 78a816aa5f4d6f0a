"""Why sums of parties are not hidden from the server by Flower's secure aggregation."""

import numpy as np
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen


def test_masks_of_flower_are_made_of_32_bits() -> None:
    """Two of 2**256 secrets give one mask, so a server can try all 2**32 of them.

    If this fails, Flower's masks have become stronger: docs/fedhistogram.md is to be written
    anew, and sums may be masked.
    """
    secret = bytes(range(32))
    other = secret[4:] + secret[:4]

    masks = [pseudo_rand_gen(seed, 2**32, [(50,)])[0] for seed in (secret, other)]

    assert secret != other
    np.testing.assert_array_equal(masks[0], masks[1])


def test_masks_of_flower_never_have_the_largest_value() -> None:
    """A mask that is not uniform tells of what it hides: one of two values says it all."""
    masks = pseudo_rand_gen(b"\x01" * 32, 2, [(1000,)])[0]

    assert not masks.any()
