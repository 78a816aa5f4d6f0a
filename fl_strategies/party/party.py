"""One member of the federation, in its own process: its records, and its policy.

The type of a list, a data frame or an array of objects is inferred from all of its cells, so
one record would affect how all others are read. Here every record is read by itself, in the
number type of the public rows, and then clipped to a public bound. A value that is not a
number becomes the public median of its column: a failing party would be a release as well.

A `PartyRole` declares by a `ReleasePlan` what a message asks for, and the party's `PartyPolicy`
refuses it before any record is touched. Nothing there depends on a record, so the refusal may
name its rule. What a release costs is not known before it is charged, so `max_run_epsilon` is
checked by `party.role.spend`.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import (
    Array,
    FloatArray,
    IntArray,
    derive_rng,
    plain,
    require_argument,
    to_array,
    to_rows,
)
from fl_strategies.errors import InvalidData, RequestRefused, require, require_data
from fl_strategies.learners import (
    UNKNOWN,
    LearnerFactory,
    Task,
    check_factory,
    check_made,
    check_targets,
    check_task,
)
from fl_strategies.release import ReleasePlan

if TYPE_CHECKING:
    from fl_strategies.privacy.journal import PartyJournal

logger = logging.getLogger("flwr.fl_strategies")

LARGEST_VALUE: Final = 1e30
"""Within float32, with room for sums."""
_TIMES_PUBLIC: Final = 10.0
_NUMBERS: Final = "biuf"
_ROWS_PER_CHUNK: Final = 1024
_MOST_NAMED: Final = 10
_LONGEST_NAME: Final = 40


def public_bound(public: Array) -> float:
    """Return the largest value that a private record may have, known from public rows.

    Generous, because it exists for accidents and attacks: a value that overflows in training
    would make a party fail, and the failure would reveal something about its records.
    Without public rows the scale is unknown, so only float32 sets the bound.
    """
    if not len(public):
        return LARGEST_VALUE
    largest = float(np.abs(public).max(initial=1.0))
    return min(_TIMES_PUBLIC * largest, LARGEST_VALUE)


@dataclass(frozen=True, eq=False)
class RecordForm:
    """The form of every record: number type, bound and defaults, fixed by public rows.

    Parameters
    ----------
    public : (num_public, ...), optional
        Finite numbers. Without any, a missing value is 0, and records are float64 unless an
        array declares another floating-point type.
    bound : float
        Largest magnitude of a number.
    others : str
        Name of the rows that fix the shape, for errors.

    Examples
    --------
    >>> form = RecordForm(np.array([[1.0, 5.0], [3.0, 5.0]]), bound=50.0)
    >>> form.read("Party 0", "x", [[7, 1e300], [None, "about 4"], [1.0]])
    array([[ 7., 50.],
           [ 2.,  5.],
           [ 2.,  5.]])
    """

    public: Array | None = None
    bound: float = LARGEST_VALUE
    others: str = "the public data"

    def read(self, owner: str, name: str, value: Any) -> Array:
        """Return records as finite numbers; an array that already qualifies is returned as is.

        Raises
        ------
        InvalidData
            If the whole has another shape, or no record of a list has the public one.
        """
        shape = None if self.public is None else self.public.shape[1:]
        given = plain(owner, name, value)
        numbers = _numbers(owner, name, given, shape)
        rule, found = "an array of rows (n, ...)", f"shape {numbers.shape}"
        require_data(numbers.ndim >= 2, owner, name, rule, found)
        same = shape is None or numbers.shape[1:] == shape
        rule = f"rows of shape {shape} like {self.others}"
        require_data(same, owner, name, rule, numbers.shape[1:])
        dtype = self._dtype(given)
        # As Python's floats: the bound exceeds small types. NaN is not within it either.
        ends = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
        inside = -self.bound <= ends[0] <= ends[1] <= self.bound
        if numbers.dtype == dtype and inside:
            return numbers
        gaps = self._has_gaps(owner, name, value, numbers)
        defaults = self._defaults(numbers.shape[1:]) if gaps else None
        return self._converted(numbers, dtype, defaults)

    def _dtype(self, given: Any) -> np.dtype[Any]:
        """Return the type of records: the public one if it has fractions, or one that has."""
        if self.public is None:
            declared = isinstance(given, np.ndarray) and given.dtype.kind == "f"
            kind = given.dtype if declared else np.dtype(np.float64)
        else:
            kind = self.public.dtype
        if kind.kind != "f":
            return np.dtype(np.float32 if kind.itemsize <= 2 else np.float64)
        return np.dtype(np.float64) if kind.itemsize > 8 else kind.newbyteorder("=")

    def _defaults(self, shape: tuple[int, ...]) -> FloatArray:
        if self.public is None or not len(self.public):
            return np.zeros(shape)
        return np.asarray(np.median(self.public, axis=0), dtype=np.float64)

    def _converted(self, x: Array, dtype: np.dtype[Any], defaults: FloatArray | None) -> Array:
        # By float64, whatever type a record came in, so that it is rounded in one way.
        bound = min(self.bound, float(np.finfo(dtype).max))
        converted = np.empty(x.shape, dtype=dtype)
        for start in range(0, len(x), _ROWS_PER_CHUNK):
            chunk = slice(start, start + _ROWS_PER_CHUNK)
            wide = cells_as_numbers(x[chunk])
            if defaults is not None:
                wide = np.where(np.isnan(wide), defaults, wide)
            converted[chunk] = np.clip(wide, -bound, bound)
        return converted

    def _has_gaps(self, owner: str, name: str, value: Any, x: Array) -> bool:
        """Log, at the party, replaced and clipped values; return whether any are missing."""
        gaps = np.isnan(x)
        if gaps.any():
            columns = [*getattr(value, "columns", ())]
            named = [repr(str(c)) for n, c in enumerate(columns) if gaps[:, n].any()]
            place = f" in the columns {', '.join(named[:_MOST_NAMED])}" if named else ""
            logger.warning(
                "%s: %d values of %s%s are no numbers; %s stands in for each.",
                owner,
                gaps.sum(),
                name,
                place,
                "the public median" if self.public is not None and len(self.public) else "0",
            )
        with np.errstate(all="ignore"):
            if (x > self.bound).any() or (x < -self.bound).any():
                logger.warning("%s: values beyond %g are cut to it.", owner, self.bound)
        return bool(gaps.any())


def _numbers(owner: str, name: str, given: Any, shape: tuple[int, ...] | None) -> Array:
    """Return records as an array of numbers of any type; NaN for anything else."""
    if isinstance(given, np.ndarray):
        if given.dtype.kind in _NUMBERS:
            return given
        if given.ndim == 1:
            return _listed(owner, name, list(given), shape)
        return cells_as_numbers(given)
    if hasattr(given, "columns"):
        return _columns(given)
    return _listed(owner, name, given, shape)


def _columns(frame: Any) -> Array:
    """Return a data frame as numbers, each column read by itself."""
    whole = _try_array(frame)
    if whole is not None and whole.dtype.kind in _NUMBERS:
        return whole
    at = getattr(frame, "iloc", None)
    columns = [
        np.asarray(frame[name] if at is None else at[:, place])
        for place, name in enumerate(frame.columns)
    ]
    return np.stack([cells_as_numbers(column) for column in columns], axis=1)


def _listed(owner: str, name: str, rows: Sequence[Any], shape: tuple[int, ...] | None) -> Array:
    """Return a list of records as numbers; a record of another shape is missing entirely."""
    if not rows and shape is not None:
        return np.empty((0, *shape))
    # numpy would ask a tensor for one number after the other.
    rows = [_try_array(row) if hasattr(row, "detach") else row for row in rows]
    whole = _try_array(rows)
    if whole is not None and whole.ndim >= 2 and shape in (None, whole.shape[1:]):
        shape = whole.shape[1:]
        if whole.dtype.kind in _NUMBERS:
            return whole
    if shape is None:
        raise InvalidData(
            f"{owner}: {name} must be an array, or a list, frame or tensor of rows of one "
            f"shape, got {type(rows).__name__}."
        )
    found = [_record(row, shape) for row in rows]
    fitting = sum(one is not None for one in found)
    rule = f"rows of shape {shape}"
    require_data(fitting > 0, owner, name, rule, "a list without any")
    if fitting < len(rows):
        count = len(rows) - fitting
        logger.warning("%s: %d records of %s are not %s.", owner, count, name, rule)
    gap = np.full(shape, np.nan)
    return np.stack([gap if one is None else one for one in found])


def _record(row: Any, shape: tuple[int, ...]) -> FloatArray | None:
    """Return one record as numbers, or None if it has another shape."""
    array = _try_array(row, dtype=object)
    return None if array is None or array.shape != shape else cells_as_numbers(array)


def _try_array(value: Any, dtype: Any = None) -> Array | None:
    try:
        return np.asarray(plain("", "", value), dtype=dtype)
    except Exception:  # one record may be anything
        return None


def cells_as_numbers(cells: Array) -> FloatArray:
    """Return cells of any type as float64, each by itself; NaN for anything but a number."""
    if cells.dtype.kind in _NUMBERS:
        with np.errstate(over="ignore", invalid="ignore"):
            return cells.astype(np.float64)
    if cells.dtype.kind in "mM":
        return np.full(cells.shape, np.nan)
    read = np.array([number_of_cell(cell) for cell in cells.ravel().tolist()], np.float64)
    return read.reshape(cells.shape)


def number_of_cell(cell: Any) -> float:
    """Return a value or a text as a number; infinity beyond float64, NaN if it is none.

    Examples
    --------
    >>> [number_of_cell(cell) for cell in ("True", "1.5", 10**400, None, "about 4")]
    [1.0, 1.5, inf, nan, nan]
    """
    try:
        if cell in ("True", "False"):  # as numpy writes truth values beside texts
            return float(cell == "True")
        if isinstance(cell, complex):
            return cell.real if cell.imag == 0 else math.nan
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf
    except Exception:  # a cell may be anything
        return math.nan


NO_CLASS: Final = -1
"""Index of a label that is missing or unknown."""

_NOTHING = frozenset({"", "nan", "None", "NaT", "<NA>"})


def is_missing(y: Any, classes: Sequence[object] = ()) -> Array:
    """Return which labels are missing, (n,) of truth values.

    NaN, None and empty texts are missing, also as pandas and numpy represent them, unless
    the class list has such a name. A record of several labels is missing if all are NaN.

    Examples
    --------
    >>> is_missing(["ill", None, " ", 1.0])
    array([False,  True,  True, False])
    """
    given = plain("labels", "y", y)
    if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
        return np.asarray(np.isnan(given.reshape(len(given), -1)).all(axis=1))
    cells = given if isinstance(given, list | tuple) else np.asarray(given).tolist()
    nothing = _NOTHING - {str(name) for name in classes}
    return np.array([_is_nothing(cell, nothing) for cell in cells], dtype=bool)


def _is_nothing(cell: Any, nothing: Collection[str]) -> bool:
    if isinstance(cell, list | tuple | np.ndarray):
        return len(cell) > 0 and all(_is_nothing(one, nothing) for one in cell)
    text = cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)
    return text.strip() in nothing


def class_numbers(
    owner: str, name: str, y: Any, classes: Sequence[object] | None, num_classes: int
) -> IntArray:
    """Return labels as class indices, and `NO_CLASS` for unknown ones.

    Every label is read by itself. The class list (`classes`, in the federation's order) alone
    decides the meaning of a number: a name if all names are integers, otherwise an index.
    Without the list all labels are indices.

    Examples
    --------
    >>> labels = ["ill", "healthy", None]
    >>> class_numbers("Party 0", "y", labels, ["healthy", "ill"], 2)
    array([ 1,  0, -1])
    """
    cells = _flat(owner, name, plain(owner, name, y))
    words = [str(one) for one in classes or ()]
    different = len({*words}) == len(words)
    require(different, owner, "classes", "different names", words)
    index = _Index({word: place for place, word in enumerate(words)}, num_classes)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        values, places = np.unique(cells, return_inverse=True)
        found = np.array([index.of(value) for value in values.tolist()], dtype=np.int64)
        return found[places]
    return np.array([index.of(cell) for cell in cells], dtype=np.int64)


def known_classes(
    owner: str, name: str, y: IntArray, classes: Sequence[object] | None, num_classes: int
) -> IntArray:
    """Return labels; raise `InvalidData`, without quoting any, if some are unknown."""
    others = int((y == NO_CLASS).sum())
    if others == len(y) > 0 and classes is None:
        raise InvalidData(
            f"{owner}: {name} must be class indices below {num_classes}, or names with the "
            f"class list beside them, got none of these. Write classes=[...] with all classes "
            f'of the federation in one order, such as classes=["healthy", "ill"].'
        )
    listed = ", ".join(map(str, [*(classes or ())][:20]))
    indices = f"between 0 and {num_classes - 1}, the federation's class list"
    rule = f"among the classes {listed}" if classes is not None else indices
    require_data(not others, owner, name, rule, f"{others} others")
    return y


@dataclass(frozen=True)
class _Index:
    """Index of a class, by its name or number."""

    places: Mapping[str, int]
    num_classes: int

    @cached_property
    def _numbered(self) -> bool:
        """Whether all names are whole numbers."""
        return bool(self.places) and all(
            word.removeprefix("-").isdecimal() for word in self.places
        )

    def of(self, label: Any) -> int:
        """Return the index of a label, or `NO_CLASS`."""
        text = label.decode(errors="replace") if isinstance(label, bytes) else label
        if isinstance(text, bool | np.bool_):
            text = text if str(text) not in self.places else str(text)
        if isinstance(text, str) and self.places:
            return self.places.get(text, self.places.get(text.strip(), NO_CLASS))
        number = number_of_cell(text)
        if not number.is_integer():
            return self.places.get(str(text), NO_CLASS)
        whole = int(text) if isinstance(text, int) else int(number)
        if self._numbered:
            return self.places.get(str(whole), NO_CLASS)
        return whole if 0 <= whole < self.num_classes else NO_CLASS


def _flat(owner: str, name: str, given: Any) -> Any:
    """Return labels as a flat array, or as a list of cells of any type."""
    if hasattr(given, "columns"):
        given = np.asarray(given)
    if not isinstance(given, np.ndarray):
        return [_alone(cell) for cell in given]
    flat = given.reshape(-1) if given.ndim == 2 and given.shape[1] == 1 else given
    rule = "a flat array of class indices"
    require_data(flat.ndim == 1, owner, name, rule, f"shape {given.shape} of {given.dtype}")
    if flat.dtype.kind in "iuf":
        return flat
    return (flat.astype(np.str_) if flat.dtype.kind in "mM" else flat).tolist()


def _alone(cell: Any) -> Any:
    """Return the only element of a list or an array, as a column of labels has them."""
    while isinstance(cell, list | tuple) or getattr(cell, "ndim", 0) > 0:
        if len(cell) != 1:
            return None
        (cell,) = cell
    return cell


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
        family, _, _ = name.partition(" ")
        return not self.strategies or name in self.strategies or family in self.strategies

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

    From a party that is `budgeted`, with a limit on its epsilon, nothing may leave without
    noise. If no message `releases` anything about records, only strategy and work count.
    """
    name = plan.name[:_LONGEST_NAME]  # a server must not be able to fill the logs

    def allow(holds: bool, what: str, rule: str, got: object) -> None:
        if not holds:
            raise RequestRefused(f"{owner}: {what} must be {rule}, got {got}.")

    rule = f"one that its policy allows ({', '.join(policy.strategies)})"
    allow(policy.allows(plan.name), "the strategy", rule, name)
    for work in ("epochs", "fits", "predictions"):
        asked, most = getattr(plan, work), getattr(policy, f"max_{work}")
        allow(asked <= most, f"{work} of a request", f"at most {most}, by its policy", asked)
    if not releases:
        return
    rule = "answers about public rows, by its policy (allow-models)"
    fits = policy.allow_models or not plan.models
    allow(fits, "what leaves", rule, f"models of {name}")
    rule = "protected, by its " + ("budget" if budgeted else "policy (allow-unprotected)")
    got = f"{name}, by which it would leave the party without noise"
    may_be_open = policy.allow_unprotected and not budgeted
    allow(may_be_open or plan.protected or plan.trains_privately, "what leaves", rule, got)
    drawn, rule = plan.sample_delta, f"at most {policy.sample_delta:g}, by its policy"
    fits = policy.allow_unprotected or drawn <= policy.sample_delta
    allow(fits, "the chance to be in the sample", f"{rule} (sample-delta)", f"{drawn:.3g}")
    rule, fits = "drawn in secret, by its policy", policy.allow_seeded_noise or not plan.seeded
    allow(fits, "noise", f"{rule} (allow-seeded-noise)", "noise from the seed")
    hidden = "" if policy.allow_drowned_noise else plan.no_signal()
    rule = "weaker than what it protects, by its policy (allow-drowned-noise)"
    allow(not hidden, "noise", rule, f"noise of {hidden}")


_ARRAYS = ("x", "y", "public", "public_y", "x_test", "y_test")


def check_rows(owner: str, name: str, x: Array) -> None:
    """Raise `InvalidData` unless `x` is a numeric array of finite rows."""
    require_data(x.ndim >= 2, owner, name, "an array of rows (n, ...)", f"shape {x.shape}")
    numeric = x.dtype.kind in "iuf"
    require_data(numeric, owner, name, "an array of numbers", f"dtype {x.dtype}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
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
    encoding : str
        Hash of what made rows of raw records, such as `clients.Encoder.hash`, or empty. A
        server whose own is another one is refused.
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
    encoding: str = ""
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
        is_text, rule = isinstance(self.encoding, str), "a hash, or empty"
        require(is_text, owner, "encoding", rule, self.encoding)
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
