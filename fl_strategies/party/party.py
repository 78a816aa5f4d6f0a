"""One member of the federation, in its own process, and its policy.

A `PartyRole` says by a `ReleasePlan` what a message asks for, and the party's `PartyPolicy`
refuses it before any record is touched. Nothing here depends on a record, so the refusal may
say which rule it was. What a release costs is not known before it is charged; `max_run_epsilon`
is therefore checked there (`party.role.spend`).
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, derive_rng, require_argument, to_array, to_rows
from fl_strategies.errors import InvalidData, RequestRefused, require, require_data
from fl_strategies.learners import LearnerFactory, check_factory, check_made
from fl_strategies.party.records import (
    LARGEST_VALUE,
    NO_CLASS,
    RecordForm,
    class_numbers,
    known_classes,
    public_bound,
)
from fl_strategies.release import ReleasePlan
from fl_strategies.tasks import UNKNOWN, Task, check_targets, check_task

if TYPE_CHECKING:
    from fl_strategies.privacy.journal import PartyJournal


def asked_number(config: ConfigRecord, key: str) -> int:
    """Return a whole number that a server sent, 0 for what the role will refuse."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


@dataclass(frozen=True, kw_only=True)
class PartyPolicy:
    """What a party takes part in.

    Parameters
    ----------
    strategies : tuple of str
        Names such as ``"fedkd"``, or with a level or release ``"fedkt L2"``; none: all.
    allow_unprotected : bool
        Let answers and models leave that no noise of the party protects: FedKT's L0 and L1,
        FedKD, FedMD and Cronus without a release, averages of weights and co-distillation,
        unless the party's learner trains privately; FedGen, PFNM and the aggregator of FENS
        in any case; and let accuracies on held-out rows leave where nothing is promised.
    allow_models : bool
        Let models leave, and not only answers about public rows.
    allow_seeded_noise : bool
        Draw noise from the experiment's seed if the server asks for it.
    allow_drowned_noise : bool
        Pay for answers that are mostly noise.
    max_run_epsilon : float, optional
        Most that one run may cost a record, at `delta`. A journal limits all runs together.
    delta, sample_delta : float
        See `fl_strategies.privacy.journal.Allowance`.
    max_epochs, max_fits, max_predictions : int
        Most passes over data, models to be trained, and rows to be predicted by them, in
        one request.

    Examples
    --------
    >>> print(PartyPolicy(strategies=("fedkt L2", "fedmd ldp")).describe())
    fedkt L2, fedmd ldp; epsilon of a run at most 10
    """

    strategies: tuple[str, ...] = ()
    allow_unprotected: bool = False
    allow_models: bool = False
    allow_seeded_noise: bool = False
    allow_drowned_noise: bool = False
    max_run_epsilon: float | None = 10.0
    delta: float = 1e-5
    sample_delta: float = 0.0
    max_epochs: int = 10_000
    max_fits: int = 10_000
    max_predictions: int = 10**8

    def __post_init__(self) -> None:
        """Check the limits, and that they do not contradict each other."""
        owner, limit = "PartyPolicy", self.max_run_epsilon
        known = limit is None or 0 < limit < math.inf
        require(known, owner, "max_run_epsilon", "greater than 0 and finite, or None", limit)
        free = limit is None or not self.allow_unprotected
        rule = "None with allow_unprotected: what has no noise costs more than any number"
        require(free, owner, "max_run_epsilon", rule, limit)
        require(0 < self.delta < 1, owner, "delta", "between 0 and 1", self.delta)
        share = self.sample_delta
        require(0 <= share < 1, owner, "sample_delta", "at least 0 and below 1", share)
        for name in ("max_epochs", "max_fits", "max_predictions"):
            require(getattr(self, name) >= 1, owner, name, "at least 1", getattr(self, name))

    def allows(self, name: str) -> bool:
        """Return whether the party takes part in a strategy, by whatever name it is allowed."""
        return (
            not self.strategies or name in self.strategies or _family(name) in self.strategies
        )

    def describe(self) -> str:
        """Return strategies that are named, limits and exceptions, for the owner to read."""
        known = [", ".join(self.strategies)] if self.strategies else []
        if self.max_run_epsilon is not None:
            known.append(f"epsilon of a run at most {self.max_run_epsilon:g}")
        if self.sample_delta:
            known.append(f"samples with chance {self.sample_delta:g} at most")
        flags = ("unprotected", "models", "seeded_noise", "drowned_noise")
        allowed = [name.replace("_", " ") for name in flags if getattr(self, f"allow_{name}")]
        return "; ".join([*known, *([f"also {', '.join(allowed)}"] if allowed else [])])


SIMULATED: Final = PartyPolicy(
    allow_unprotected=True,
    allow_models=True,
    allow_seeded_noise=True,
    allow_drowned_noise=True,
    max_run_epsilon=None,
)
"""The policy of a party that states none: what an experiment needs, within limits of work."""


def check_request(
    policy: PartyPolicy, plan: ReleasePlan, *, owner: str, budgeted: bool, releases: bool
) -> None:
    """Raise `RequestRefused` unless a party's policy allows what a message asks for.

    Parameters
    ----------
    policy : PartyPolicy
    plan : ReleasePlan
    owner : str
        Whose policy it is, for the error.
    budgeted : bool
        Whether the party has a limit on its epsilon, so that nothing may leave without noise.
    releases : bool
        Whether anything about records is to leave; if not, only strategy and work count.
    """
    violated = [_unwanted_work(policy, plan)]
    if releases:
        violated += [_unwanted_release(policy, plan, budgeted), _bad_noise(policy, plan)]
    for what, rule, value in chain.from_iterable(violated):
        raise RequestRefused(f"{owner}: {what} must be {rule}, got {value}.")


def _family(name: str) -> str:
    return name.partition(" ")[0]


_Violations: TypeAlias = Iterator[tuple[str, str, object]]


def _unwanted_work(policy: PartyPolicy, plan: ReleasePlan) -> _Violations:
    if not policy.allows(plan.name):
        rule = f"one that its policy allows ({', '.join(policy.strategies)})"
        yield "the strategy", rule, plan.shown
    for name in ("epochs", "fits", "predictions"):
        asked, most = getattr(plan, name), getattr(policy, f"max_{name}")
        if asked > most:
            yield f"{name} of a request", f"at most {most}, by its policy", asked


def _unwanted_release(policy: PartyPolicy, plan: ReleasePlan, budgeted: bool) -> _Violations:
    if plan.models and not policy.allow_models:
        rule = "answers about public rows, by its policy (allow-models)"
        yield "what leaves", rule, f"models of {plan.shown}"
    may_be_open = policy.allow_unprotected and not budgeted
    if not (may_be_open or plan.protected or plan.trains_privately):
        rule = "protected, by its " + ("budget" if budgeted else "policy (allow-unprotected)")
        got = f"{plan.shown}, by which it would leave the party without noise"
        yield "what leaves", rule, got
    drawn, most = plan.sample_delta, policy.sample_delta
    if not policy.allow_unprotected and drawn > most:
        rule = f"at most {most:g}, by its policy (sample-delta)"
        yield "the chance to be in the sample", rule, f"{drawn:.3g}"


def _bad_noise(policy: PartyPolicy, plan: ReleasePlan) -> _Violations:
    if plan.seeded and not policy.allow_seeded_noise:
        yield (
            "noise",
            "drawn in secret, by its policy (allow-seeded-noise)",
            "noise from the seed",
        )
    elif not policy.allow_drowned_noise and (hidden := plan.no_signal()):
        rule = "weaker than what it protects, by its policy (allow-drowned-noise)"
        yield "noise", rule, f"noise of {hidden}"


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
