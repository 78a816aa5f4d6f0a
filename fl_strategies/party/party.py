"""One member of the federation, in its own process."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fl_strategies._util.arrays import Array, to_array, to_rows
from fl_strategies._util.naming import require_argument
from fl_strategies._util.randomness import derive_rng
from fl_strategies.errors import InvalidData, require, require_data
from fl_strategies.learners import LearnerFactory, check_factory, check_made
from fl_strategies.party.policy import SIMULATED, PartyPolicy
from fl_strategies.party.records import (
    LARGEST_VALUE,
    NO_CLASS,
    RecordForm,
    class_numbers,
    known_classes,
    public_bound,
)
from fl_strategies.tasks import UNKNOWN, Task, check_targets, check_task

if TYPE_CHECKING:
    from fl_strategies.privacy.journal import PartyJournal


logger = logging.getLogger("flwr.fl_strategies")

_ARRAYS = ("x", "y", "public", "public_y", "x_test", "y_test")


def check_rows(owner: str, name: str, x: Array) -> None:
    """Raise `InvalidData` unless `x` is a numeric array of finite rows."""
    require_data(x.ndim >= 2, owner, name, "an array of rows (n, ...)", f"shape {x.shape}")
    require_data(
        np.issubdtype(x.dtype, np.floating) or np.issubdtype(x.dtype, np.integer),
        owner,
        name,
        "an array of numbers",
        f"dtype {x.dtype}",
    )
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        rows = ~np.isfinite(x.reshape(len(x), -1)).all(axis=1)
        raise InvalidData(
            f"{owner}: {name} must be finite, got NaN or infinity in {rows.sum()} of "
            f"{len(x)} rows, the first is row {rows.argmax()}. Fill or drop these rows."
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Party:
    """Private data, public data and the models of one member.

    Lists, pandas data frames and torch tensors become arrays; columns of data frames are
    matched by name with the public ones. `repr` shows shapes, never a record.

    Parameters
    ----------
    x, y : (num_records, ...), (num_records,)
        Private records and their class indices, or other targets of the task; see `tasks`.
        They never leave the party. Each is read by itself, in the number type of the public
        rows: values beyond `value_bound` are clipped, a value that is not a number becomes
        the public median, and an unknown label the most common public class, or the first
        one. The party's own log counts them.
    public : (num_public, ...), optional
        The unlabelled rows that everybody in the federation holds, in the same order. Only
        strategies that transfer knowledge on them need any.
    num_classes : int
        Length of the federation's class list, even if this party lacks some classes. In
        multi-label learning the number of labels, in regression that of targets.
    classes : sequence of str, optional
        The class list itself, in the order that the whole federation uses. Labels may then
        be names, of any type; `num_classes` may be omitted.
    task : "single-label", "multi-label" or "regression"
    public_y : optional
        Labels of the public rows, if there are any and the strategy may use them.
    learner_fn : factory
        Makes the party's model, unfitted: a function without arguments, not a model.
    teacher_fn : factory, optional
        Makes the model that is trained on small subsets (FedKT); `learner_fn` if omitted.
    learner_name : str
        Name of this model, for reports and, when models are sent, to find the receiver's
        factory for it.
    partition_id : int
        Number of this party in the federation; names its stream of randomness.
    x_test, y_test : optional
        Held-out rows on which this party evaluates the federation's model. They are private:
        wherever a privacy guarantee is given, no metric on them leaves.
    public_test : bool (default: False)
        Whether these rows are public, like those of a benchmark, and not the party's records.
    catalogue : mapping of name to factory, optional
        Models that this party accepts besides its own. Only arrays are sent; the code that
        reads them is always the receiver's.
    journal : PartyJournal, optional
        The party's own record of all charges to its data so far, with its budget.
    run : str
        Name of the run, for the journal.
    compare_at_home : bool (default: False)
        Log whether the model of a run beats one that this party trains alone, on its
        held-out rows. It costs one more training per run.
    tell_verdict : bool (default: False)
        Send that one bit to the server, unless there is a journal or a privacy guarantee.
    value_bound : float, optional
        Largest magnitude of a number in a record; ten times that of the public rows, and at
        least 10, if omitted; without public rows, what float32 holds. Choose it without
        looking at the records.
    policy : PartyPolicy
        The requests that this party accepts. Without one it is a party of a simulation, which
        allows everything but endless work: give a real party a `PartyPolicy()`.
    """

    x: Array
    y: Array
    num_classes: int = 0
    learner_fn: LearnerFactory
    public: Array = field(default_factory=lambda: np.empty(0))
    task: Task = "single-label"
    public_y: Array | None = None
    teacher_fn: LearnerFactory | None = None
    learner_name: str = "learner"
    partition_id: int = 0
    x_test: Array | None = None
    y_test: Array | None = None
    public_test: bool = False
    catalogue: Mapping[str, LearnerFactory] = field(default_factory=dict)
    journal: "PartyJournal | None" = None
    run: str = "unnamed"
    compare_at_home: bool = False
    tell_verdict: bool = False
    value_bound: float | None = None
    policy: PartyPolicy = SIMULATED
    # Not kept: labels are class indices from then on, also in copies of the party.
    classes: InitVar[Sequence[object] | None] = None

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse a misspelt argument by the name that was probably meant."""
        for name in given:
            known = [*(item.name for item in fields(cls)), "classes"]
            require_argument(cls.__name__, name, known)
        return super().__new__(cls)

    @property
    def owner(self) -> str:
        """Name of the party in errors."""
        return f"Party {self.partition_id}"

    def __post_init__(self, classes: Sequence[object] | None) -> None:
        """Check everything that could otherwise surface as a wrong model."""
        owner = self.owner
        if classes is not None:
            same = self.num_classes in (0, len(classes))
            rule = f"omitted, or {len(classes)} like classes"
            require(same, owner, "num_classes", rule, self.num_classes)
            object.__setattr__(self, "num_classes", len(classes))
        require(self.partition_id >= 0, owner, "partition_id", "at least 0", self.partition_id)
        compared = self.compare_at_home or not self.tell_verdict
        require(compared, owner, "tell_verdict", "false without compare_at_home", True)
        check_task(owner, self.task, self.num_classes)
        self._check_factories()
        if (self.x_test is None) != (self.y_test is None):
            raise InvalidData(f"{owner}: x_test and y_test must be given together, got one.")
        self._convert_rows()
        self._convert_targets(classes)

    def __repr__(self) -> str:
        """Return only names and shapes: logging a party must not log its records."""
        named = ("partition_id", "learner_name", "task", "num_classes")
        shown = [f"{name}={getattr(self, name)!r}" for name in named]
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        shown += [f"{n}={a.shape} {a.dtype}" for n, a in arrays.items() if a is not None]
        return f"Party({', '.join(shown)})"

    def _check_factories(self) -> None:
        received = {f"catalogue[{name!r}]": made for name, made in self.catalogue.items()}
        given = {"learner_fn": self.learner_fn, "teacher_fn": self.teacher_fn, **received}
        for name, factory in given.items():
            if name != "teacher_fn" or factory is not None:
                check_factory(self.owner, name, factory, self.num_classes)

    def check_learners(self) -> None:
        """Raise `InvalidParameter`, with the fix, if a factory returns no learner."""
        for name in ("learner_fn", "teacher_fn"):
            if (factory := getattr(self, name)) is not None:
                check_made(self.owner, name, factory, self.num_classes)

    def _convert_rows(self) -> None:
        """Convert rows to arrays; empty public rows have the shape of records."""
        owner, public, names = self.owner, None, getattr(self.public, "columns", None)
        if self.public is not None:
            public = to_rows(owner, "public", self.public)
            public = None if public.shape == (0,) else public
        if public is not None:
            check_rows(owner, "public", public)
        bound = self.value_bound
        if bound is None:
            bound = LARGEST_VALUE if public is None else public_bound(public)
        require(0 < bound < math.inf, owner, "value_bound", "finite and above 0", bound)
        for name in ("x", "x_test"):
            if (value := getattr(self, name)) is None:
                continue
            others = "the public data" if public is not None and len(public) else "x"
            value = _by_name(owner, name, value, names)
            rows = RecordForm(public, bound, others).read(owner, name, value)
            object.__setattr__(self, name, rows)
            if public is None:
                public = np.empty((0, *rows.shape[1:]), dtype=rows.dtype)
        object.__setattr__(self, "public", public)

    def _convert_targets(self, classes: Sequence[object] | None) -> None:
        """Convert targets to arrays; an invalid one is an error only in public rows."""
        given = {"public_y": self.public, "y": self.x, "y_test": self.x_test}
        read = {
            "single-label": self._classes,
            "multi-label": self._marks,
            "regression": self._outputs,
        }[self.task]
        for name, rows in given.items():
            if (value := getattr(self, name)) is not None and rows is not None:
                y = read(name, value, classes)
                check_targets(self.owner, name, y, len(rows), self.num_classes, self.task)
                object.__setattr__(self, name, y)

    def _classes(self, name: str, value: Any, classes: Sequence[object] | None) -> Array:
        """Return class indices; an unknown private label becomes the most common public one."""
        owner, size = self.owner, self.num_classes
        y = class_numbers(owner, name, value, classes, size)
        unknown = y == NO_CLASS
        if name == "public_y" or (unknown.all() and len(y)):
            return known_classes(owner, name, y, classes, size)
        if not unknown.any():
            return y
        known = () if self.public_y is None else self.public_y
        common = int(np.bincount(known).argmax()) if len(known) else 0
        logger.warning(
            "%s: %d labels of %s are no class; class %d stands in for each.",
            owner,
            unknown.sum(),
            name,
            common,
        )
        return np.where(unknown, common, y)

    def _marks(self, name: str, value: Any, _: object) -> Array:
        """Return labels of -1, 0 and 1; a private one that is neither is unknown."""
        if name == "public_y":
            return to_array(self.owner, name, value)
        like = np.full((1, self.num_classes), UNKNOWN, dtype=np.float64)
        marks = RecordForm(like, others="the labels").read(self.owner, name, value)
        return np.where(np.isin(marks, (0, 1)), marks, UNKNOWN).astype(np.int64)

    def _outputs(self, name: str, value: Any, _: object) -> Array:
        """Return numeric targets; private ones are finite, in the type of public ones."""
        if name == "public_y":
            return to_array(self.owner, name, value)
        like = np.empty((0, self.num_classes)) if self.public_y is None else self.public_y
        form = RecordForm(like, public_bound(like), "the targets")
        return form.read(self.owner, name, value)

    def rows_to_try(self, most: int = 1) -> Array:
        """Return rows for trying a model that are not records: public ones, or one of zeros."""
        if len(self.public):
            return self.public[:most]
        return np.zeros((1, *self.x.shape[1:]), dtype=self.x.dtype)

    def rng(self, seed: int, purpose: str, *path: int) -> np.random.Generator:
        """Return one named stream of this party's randomness; never for private noise."""
        return derive_rng(seed, "party", self.partition_id, purpose, *path)


def _by_name(owner: str, name: str, rows: Any, columns: Any) -> Any:
    """Return a data frame with its columns in the order of the public one."""
    if columns is None or not hasattr(rows, "columns"):
        return rows
    others = sorted({*map(str, columns)} ^ {*map(str, rows.columns)})
    rule = "those of public"
    require_data(not others, owner, f"columns of {name}", rule, f"others: {others[:10]}")
    return rows[list(columns)]
