"""What was made of data, said before anything is trained on them."""

from collections.abc import Sequence

import numpy as np

from fl_strategies._util.arrays import IntArray
from simulations.arguments import say
from simulations.config import Settings
from simulations.data.csv import listed
from simulations.data.sets import LOADERS
from simulations.federation import Federation, load_federation

_MOST_CLASSES = 12


def tell_data(settings: Settings) -> None:
    """Say what was made of a file, where it does not mix with results."""
    if settings.data not in LOADERS:
        say(f"{describe_data(load_federation(settings))}\n")


def describe_data(federation: Federation) -> str:
    """Return what a simulation understood of a file: columns, classes and rows a party.

    It counts all rows, private ones too, so it is for the people of a simulation.
    """
    data = federation.dataset
    labels = [y for y in (data.y_train, data.y_public, data.y_test) if y is not None]
    held_out = f"{len(data.x_public)} public, {len(data.x_test)} test"
    lines = [
        *(data.understood or [f"rows of shape {data.row_shape}"]),
        f"classes: {class_shares(data.classes, np.concatenate(labels))}",
        f"rows: {_rows_of_parties(federation.rows)}, {held_out}",
    ]
    return "\n".join([data.name, *(f"  {line}" for line in lines)])


def class_shares(classes: Sequence[str], y: IntArray) -> str:
    """Return each class with its share of some rows.

    Examples
    --------
    >>> class_shares(("no", "yes"), np.array([0, 0, 1, 0]))
    'no 75.0 %, yes 25.0 %'
    """
    counts = np.bincount(y, minlength=len(classes))
    shares = [
        f"{name} {100 * count / max(len(y), 1):.1f} %"
        for name, count in zip(classes, counts, strict=True)
    ]
    return listed(shares, _MOST_CLASSES)


def _rows_of_parties(rows: Sequence[IntArray]) -> str:
    sizes = [len(own) for own in rows]
    few, many = min(sizes), max(sizes)
    each = str(few) if few == many else f"{few} to {many}"
    parties = "one party" if len(sizes) == 1 else f"{len(sizes)} parties of {each}"
    return f"{sum(sizes)} private in {parties}"
