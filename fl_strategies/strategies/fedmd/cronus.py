"""Cronus: FedMD whose server takes a mean that some liars cannot move."""

from typing import ClassVar

from fl_strategies.strategies.fedmd.options import CronusOptions
from fl_strategies.strategies.fedmd.server import FedMD


class Cronus(FedMD):
    """Parties of any kind learn from the robust mean of each other's scores.

    Chang, Shejwalkar, Shokri, Houmansadr: Cronus: Robust and Heterogeneous Collaborative
    Learning with Black-Box Knowledge Transfer (2019).

        round 1   party    trains on its records and sends class scores of the public rows
                  server   takes a robust mean of each row's scores
        round r   party    learns the means and its records, and sends new scores

    With at most a share `trim_fraction` of liars, and at most a quarter, the robust mean of a
    row is within O(sqrt(share)) deviations of the honest scores from their mean; see
    `aggregation.robust_mean`. It needs more than a handful of parties: with three, one of
    them is filtered wherever it stands alone. Where honest parties know different classes,
    those that know a row's class may be few, and are then filtered as liars would be.

    Leaves the party
        Class scores of the public rows in every round, float32.
    Guarantee
        None by default; with `release` those of `FedMD`.

    Notes
    -----
    All else is `FedMD` (``consensus="robust-mean"``), its privacy options included.
    Deviations from the paper: a party's passes over public rows come before those over its
    records, not in the same shuffled batches; the filter takes weight away in proportion
    instead of points beyond a drawn threshold, so that it draws nothing; and it finds by
    itself what deviation is usual, by the median distance, where the paper is told.
    """

    name: ClassVar[str] = "cronus"
    options_type = CronusOptions
