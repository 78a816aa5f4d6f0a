"""Unknown names, and suggestions for what was probably meant."""

import difflib
from collections.abc import Collection

from fl_strategies.errors import InvalidParameter


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the name that was probably meant; an empty one if none is near."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def nearest(name: str, known: Collection[str]) -> str:
    """Return a sentence with the name that was probably meant, or with all there are.

    Examples
    --------
    >>> nearest("num_techers", ["num_splits", "num_teachers"])
    "Did you mean 'num_teachers'?"
    """
    close = nearest_name(name, known)
    return f"Did you mean {close!r}?" if close else f"Known are {', '.join(known)}."


def require_argument(owner: str, name: str, known: Collection[str], hint: str = "") -> None:
    """Raise `InvalidParameter`, with the nearest name, unless an argument is known.

    Parameters
    ----------
    owner : str
    name : str
    known : collection of str
    hint : str
        Shown instead of the nearest name.

    Examples
    --------
    >>> require_argument("FedKT", "num_partys", ["num_parties", "seed"])
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: FedKT: the argument must be a known one, \
got 'num_partys'. Did you mean 'num_parties'?
    """
    if name not in known:
        told = hint or nearest(name, known)
        raise InvalidParameter(
            f"{owner}: the argument must be a known one, got {name!r}. {told}"
        )
