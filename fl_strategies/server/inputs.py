"""What a server is given by its operator, checked like what a party is given."""

from collections.abc import Mapping

from fl_strategies._util.arrays import Array, to_rows
from fl_strategies.learners import LearnerFactory, check_made
from fl_strategies.party.party import check_rows


def public_array(owner: str, public: object) -> Array:
    """Return public rows as an array of finite numbers, from a list, frame or tensor too."""
    rows = to_rows(owner, "public", public)
    check_rows(owner, "public", rows)
    return rows


def check_factories(
    owner: str,
    learner_fn: LearnerFactory | None,
    num_classes: int,
    **others: Mapping[str, LearnerFactory] | None,
) -> None:
    """Raise `InvalidParameter`, saying what to write, for what makes no learner."""
    given = {
        f"{place}[{name!r}]": fn
        for place in others
        for name, fn in (others[place] or {}).items()
    }
    if learner_fn is not None:
        given["learner_fn"] = learner_fn
    for name, factory in given.items():
        check_made(owner, name, factory, num_classes)
